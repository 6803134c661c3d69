"""Emit LLVM vector code inside Numba functions.

An `Emitter` wraps the IR builder of a function under compilation with the few operations that the kernels
need. Everything works on raw addresses (int64), so that each kernel has one signature. `emitted` turns an
emitting function into something that Numba code can call.

No operation here is marked fast: floating-point results are exactly those of the order written.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import llvmlite.binding
from llvmlite import ir

from mvllm.backends.cpu.deferred import Deferred, number_type
from mvllm.backends.cpu.memory import LINE_BYTES

Value: TypeAlias = Any  # an llvmlite value; the library has no types

I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
F16, F32 = ir.HalfType(), ir.FloatType()
VOID = ir.VoidType()
_BYTE_POINTER = I8.as_pointer()


def vector(element: Value, count: int) -> Value:
    """The vector type of `count` elements."""
    return ir.VectorType(element, count)


def constant(element: Value, count: int, value: float) -> Value:
    """A vector with `value` in every element."""
    return ir.Constant(vector(element, count), [value] * count)


class Emitter:
    """Vector operations at the builder's current position. Owns nothing; appends to the builder's block."""

    def __init__(self, builder: Value) -> None:
        self.builder = builder

    def call(self, name: str, result: Value, *arguments: Value) -> Value:
        """Call the LLVM intrinsic `name`, declared on first use."""
        module = self.builder.module
        function = module.globals.get(name)
        if function is None:
            function = ir.Function(module, ir.FunctionType(result, [a.type for a in arguments]), name)
        return self.builder.call(function, arguments)

    def offset(self, address: Value, *terms: Value | int) -> Value:
        """address + the sum of `terms`, bytes."""
        for term in terms:
            if isinstance(term, int):
                if term == 0:
                    continue
                term = I64(term)
            address = self.builder.add(address, term)
        return address

    def times(self, index: Value, size: int | Value) -> Value:
        """index * size, int64."""
        return self.builder.mul(index, I64(size) if isinstance(size, int) else size)

    def load(self, type_: Value, address: Value, offset: Value | int = 0) -> Value:
        """Unaligned load of `type_` at address + offset."""
        return self.builder.load(self._pointer(type_, address, offset), align=1)

    def store(self, value: Value, address: Value, offset: Value | int = 0) -> None:
        """Unaligned store at address + offset."""
        self.builder.store(value, self._pointer(value.type, address, offset), align=1)

    def _pointer(self, type_: Value, address: Value, offset: Value | int) -> Value:
        # One base pointer and constant offsets from it become x86 addressing modes.
        base = self.builder.inttoptr(address, _BYTE_POINTER)
        at = I64(offset) if isinstance(offset, int) else offset
        return self.builder.bitcast(self.builder.gep(base, [at]), type_.as_pointer())

    def splat(self, value: Value, count: int) -> Value:
        """A vector with the scalar `value` in every element."""
        undefined = ir.Constant(vector(value.type, count), ir.Undefined)
        first = self.builder.insert_element(undefined, value, I32(0))
        return self.builder.shuffle_vector(first, undefined, ir.Constant(vector(I32, count), [0] * count))

    def load_splat(self, element: Value, count: int, address: Value, offset: Value | int = 0) -> Value:
        """A vector with the one loaded `element` everywhere."""
        return self.splat(self.load(element, address, offset), count)

    def fma(self, x: Value, y: Value, z: Value) -> Value:
        """x * y + z in float32, rounded once."""
        suffix = f"v{x.type.count}f32" if isinstance(x.type, ir.VectorType) else "f32"
        return self.call(f"llvm.fma.{suffix}", x.type, x, y, z)

    def shuffle(self, value: Value, indices: Sequence[int]) -> Value:
        """The elements of `value` at `indices`."""
        return self.builder.shuffle_vector(
            value, value, ir.Constant(vector(I32, len(indices)), list(indices))
        )

    def join(self, first: Value, second: Value) -> Value:
        """The elements of two vectors of the same type, one after the other."""
        indices = list(range(2 * first.type.count))
        return self.builder.shuffle_vector(first, second, ir.Constant(vector(I32, len(indices)), indices))

    def reduce(self, combine: Callable[[Value, Value], Value], value: Value) -> Value:
        """Fold a vector of 2**n elements to a scalar by halves, in a fixed order."""
        distance = value.type.count // 2
        while distance:
            partner = self.shuffle(value, [i ^ distance for i in range(value.type.count)])
            value = combine(value, partner)
            distance //= 2
        return self.builder.extract_element(value, I32(0))

    def prefetch(self, address: Value, num_bytes: int = 1, *, past_caches: bool = False) -> None:
        """Ask for the cache lines of `num_bytes` at an address, in the second-level cache: its queue of
        pending lines is longer than the first's. Never faults.

        With `past_caches` they go past the outer caches, which keep what they hold.
        """
        read, data, locality = I32(0), I32(1), I32(0 if past_caches else 2)
        for line in range(0, num_bytes, LINE_BYTES):
            pointer = self._pointer(I8, address, line)
            self.call("llvm.prefetch.p0", VOID, pointer, read, locality, data)

    def pin(self, value: Value, constraint: str | None) -> Value:
        """Fix `value` at this point of the schedule (empty assembly in the register class `constraint`).

        LLVM's scheduler otherwise hoists loads of a long unrolled body until registers spill. None: no pin.
        """
        if constraint is None:
            return value
        return self.assembly("", f"={constraint},0", value)

    def assembly(self, code: str, constraints: str, first: Value, *others: Value) -> Value:
        """Inline assembly with a result of the first operand's type; it keeps its place in the schedule."""
        if code:
            llvmlite.binding.initialize_native_asmparser()
        operands = [first, *others]
        signature = ir.FunctionType(first.type, [operand.type for operand in operands])
        return self.builder.call(ir.InlineAsm(signature, code, constraints, side_effect=True), operands)

    def loop(
        self, count: Value, carried: Sequence[Value], body: Callable[[Value, list[Value]], Sequence[Value]]
    ) -> list[Value]:
        """`for index in range(count): carried = body(index, carried)`, count >= 0; returns `carried`."""
        builder = self.builder
        before = builder.block
        head, after = builder.append_basic_block("loop"), builder.append_basic_block("after")
        builder.cbranch(builder.icmp_signed(">", count, I64(0)), head, after)

        builder.position_at_end(head)
        index = builder.phi(I64)
        values = [builder.phi(value.type) for value in carried]
        results = list(body(index, list(values)))
        following = builder.add(index, I64(1))
        tail = builder.block
        builder.cbranch(builder.icmp_signed("<", following, count), head, after)
        for phi, start, result in zip(
            [index, *values], [I64(0), *carried], [following, *results], strict=True
        ):
            phi.add_incoming(start, before)
            phi.add_incoming(result, tail)

        builder.position_at_end(after)
        final = [builder.phi(value.type) for value in carried]
        for phi, start, result in zip(final, carried, results, strict=True):
            phi.add_incoming(start, before)
            phi.add_incoming(result, tail)
        return final


def emit_for_count(
    emitter: Emitter, count: Value, counts: Iterable[int], emit: Callable[[int], None]
) -> None:
    """Run the code of `emit(n)` for the n of `counts` that equals `count` at run time."""
    builder = emitter.builder
    done = builder.append_basic_block("done")
    choice = builder.switch(count, done)
    for n in counts:
        block = builder.append_basic_block(f"count{n}")
        choice.add_case(I64(n), block)
        builder.position_at_end(block)
        emit(n)
        builder.branch(done)
    builder.position_at_end(done)


def emitted(
    emit: Callable[..., Value | None],
    values: int | Sequence[str],
    *,
    num_names: int = 0,
    returns: str = "void",
) -> Any:
    """What `emit` emits, as a function for Numba code.

    Its arguments are `num_names` constant strings, which reach `emit` as such, then `values`: so many int64,
    or one of each type named. `emit` gets the emitter before them, and returns the function's value, of type
    `returns`, if it has one.
    """
    value_names = ["int64"] * values if isinstance(values, int) else list(values)

    def make() -> Any:
        from numba.extending import intrinsic

        value_types = [number_type(name) for name in value_names]

        def definition(typing: Any, *arguments: Any) -> Any:
            names = [argument.literal_value for argument in arguments[:num_names]]

            def generate(context: Any, builder: Value, signature: Any, given: Sequence[Value]) -> Value:
                result = emit(Emitter(builder), *names, *given[num_names:])
                return context.get_dummy_value() if result is None else result

            return number_type(returns)(*arguments[:num_names], *value_types), generate

        # Numba matches calls against the signature, where it wants every argument by name.
        parameters = ["typing", *(f"argument{i}" for i in range(num_names + len(value_types)))]
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        signature = inspect.Signature([inspect.Parameter(name, kind) for name in parameters])
        definition.__signature__ = signature  # type: ignore[attr-defined]
        return intrinsic(prefer_literal=True)(definition)

    return Deferred(make)


def _make_stack_memory() -> Any:
    from numba.extending import intrinsic

    def stack_memory(typing: Any, nbytes: Any) -> Any:
        size = nbytes.literal_value

        def generate(context: Any, builder: Value, signature: Any, given: Sequence[Value]) -> Value:
            with builder.goto_entry_block():
                memory = builder.alloca(ir.ArrayType(I8, size))
            memory.align = LINE_BYTES
            return builder.ptrtoint(memory, I64)

        return number_type("int64")(nbytes), generate

    return intrinsic(prefer_literal=True)(stack_memory)


stack_memory: Any = Deferred(_make_stack_memory)
"""Address of `nbytes`, a constant, on the stack of the function under compilation, at the start of a line."""
