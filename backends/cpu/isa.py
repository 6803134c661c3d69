"""Instruction sets behind one emission interface, and the choice among them.

The kernels interleave the rows of a weight matrix: lane r of every vector belongs to row r of a block of
`lanes` rows. All that differs between instruction sets is the number of lanes and how the products
of a 32-bit word of codes are added up per lane.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import llvmlite.binding
from llvmlite import ir

from mvllm.backends.cpu.vector import F32, I8, I16, I32, Emitter, Value, constant, vector
from mvllm.core.errors import ConfigError

OVERRIDE = "MVLLM_CPU_ISA"
"""Environment variable that names an instruction set, for tests and for narrowing down a fault."""

_MAX_ACTIVATION = 127  # activations are int8 in [-127, 127]
_FALSE = ir.IntType(1)(0)


@dataclass(frozen=True)
class Operands:
    """Codes of some row blocks and tokens over consecutive inputs of one group, for `Isa.dot`.

    Inputs come in words of 32 bits per row and token: four codes of 8 bits, or, wide, two of 16 bits. `words`
    are the numbers of those to take, in the order in which that is best done. `load(block, word)` is a vector of unsigned codes below 2**bits (layout `codes`), with row r in its bytes
    4r to 4r+3. `activations` holds each token's address of signed codes; `minus_sum(token)` is int32[lanes],
    minus the sum of these codes in every lane. `pin` fixes a value's place in the schedule.
    """

    load: Callable[[int, int], Value]
    blocks: int
    words: Sequence[int]
    activations: Sequence[Value]
    minus_sum: Callable[[int], Value]
    bits: int
    zero: int  # 0 or a power of two
    is_wide: bool
    pin: Callable[[Value], Value]


Dots = list[list[Value]]
"""int32[lanes] for each token and row block: `dots[token][block]`."""


@dataclass(frozen=True)
class Isa:
    """One instruction set.

    `dot(emitter, operands)` emits, for every token and row, the exact sum of (code - zero) * activation.
    """

    name: str
    lanes: int
    max_tokens: int  # tokens of the largest tile
    register: str | None  # inline-assembly constraint of a vector register, None: don't pin
    features: frozenset[str]  # LLVM feature names that the emitted code needs
    native_half: bool  # the hardware converts float16 vectors
    dot: Callable[[Emitter, Operands], Dots]


def half_to_float(emitter: Emitter, isa: Isa, half: Value) -> Value:
    """float16[n] -> float32[n], exact for finite values."""
    builder, count = emitter.builder, half.type.count
    floats, ints = vector(F32, count), vector(I32, count)
    if isa.native_half:
        return builder.fpext(half, floats)
    bits = builder.zext(builder.bitcast(half, vector(I16, count)), ints)
    magnitude = builder.shl(builder.and_(bits, constant(I32, count, 0x7FFF)), constant(I32, count, 13))
    sign = builder.shl(builder.and_(bits, constant(I32, count, 0x8000)), constant(I32, count, 16))
    # Moved over, the exponent is 112 too small.
    scaled = builder.fmul(builder.bitcast(magnitude, floats), constant(F32, count, 2.0**112))
    return builder.bitcast(builder.or_(builder.bitcast(scaled, ints), sign), floats)


_Step = Callable[[Value, Value, Value], Value]  # (sum or None, codes, activations' word in every lane) -> sum


def _add_words(
    emitter: Emitter, operands: Operands, words: Sequence[int], sums: Sequence[Sequence[Value]], step: _Step
) -> Dots:
    """`sums` with the products of `words` added by `step`, word after word."""
    results = [list(row) for row in sums]
    for word in words:
        codes = [operands.pin(operands.load(block, word)) for block in range(operands.blocks)]
        for row, address in zip(results, operands.activations, strict=True):
            activation = emitter.load_splat(I32, codes[0].type.count // 4, address, 4 * word)
            for block, code in enumerate(codes):
                row[block] = operands.pin(step(row[block], code, activation))
    return results


def _minus_zeros(emitter: Emitter, operands: Operands) -> Dots:
    """-zero * (sum of activations), for every output."""
    dots = []
    for token in range(len(operands.activations)):
        minus_sum = operands.minus_sum(token)
        lanes = minus_sum.type.count
        value = constant(I32, lanes, 0)
        if operands.zero:
            value = emitter.builder.shl(minus_sum, constant(I32, lanes, operands.zero.bit_length() - 1))
        dots.append([value] * operands.blocks)
    return dots


def _dot_avx512(emitter: Emitter, operands: Operands) -> Dots:
    instruction = "vpdpwssd" if operands.is_wide else "vpdpbusd"

    def step(total: Value, codes: Value, activation: Value) -> Value:
        weights = emitter.builder.bitcast(codes, vector(I32, 16))
        return emitter.call(f"llvm.x86.avx512.{instruction}.512", vector(I32, 16), total, weights, activation)

    return _add_words(emitter, operands, operands.words, _minus_zeros(emitter, operands), step)


def _dot_avx2(emitter: Emitter, operands: Operands) -> Dots:
    if operands.is_wide:
        return _dot_avx2_wide(emitter, operands)
    if operands.bits == 8:
        return _dot_avx2_signed(emitter, operands)
    builder = emitter.builder
    # A pair product is at most 2 * (2**bits - 1) * 127; as many as stay below 2**15 are added in 16 bits.
    addable = (2**15 - 1) // (2 * (2**operands.bits - 1) * _MAX_ACTIVATION)

    def step(pairs: Value, codes: Value, activation: Value) -> Value:
        activations = builder.bitcast(activation, vector(I8, 32))
        product = emitter.call("llvm.x86.avx2.pmadd.ub.sw", vector(I16, 16), codes, activations)
        return product if pairs is None else builder.add(pairs, product)

    none = [[None] * operands.blocks for _ in operands.activations]
    parts = []
    for first in range(0, len(operands.words), addable):
        sums = _add_words(emitter, operands, operands.words[first : first + addable], none, step)
        parts.append([[_add_pairs_avx2(emitter, pairs) for pairs in row] for row in sums])
    if operands.zero:
        parts.append(_minus_zeros(emitter, operands))
    return functools.reduce(functools.partial(_add_dots, emitter), parts)


def _add_dots(emitter: Emitter, x: Dots, y: Dots) -> Dots:
    return [
        [emitter.builder.add(*both) for both in zip(*rows, strict=True)] for rows in zip(x, y, strict=True)
    ]


def _dot_avx2_signed(emitter: Emitter, operands: Operands) -> Dots:
    """8-bit codes: unsigned products would overflow 16 bits, so the sign moves to the activation."""
    assert operands.zero in (0, 128)
    builder, bytes_ = emitter.builder, vector(I8, 32)

    def step(total: Value, codes: Value, activation: Value) -> Value:
        signed = builder.xor(codes, constant(I8, 32, 128))
        magnitude = emitter.call("llvm.abs.v32i8", bytes_, signed, _FALSE)
        activations = builder.bitcast(activation, bytes_)
        turned = emitter.call("llvm.x86.avx2.psign.b", bytes_, activations, signed)
        product = emitter.call("llvm.x86.avx2.pmadd.ub.sw", vector(I16, 16), magnitude, turned)
        return builder.add(total, _add_pairs_avx2(emitter, product))

    starts = []
    for token in range(len(operands.activations)):
        start = constant(I32, 8, 0)
        if operands.zero == 0:  # what the signs take away
            start = builder.sub(start, builder.shl(operands.minus_sum(token), constant(I32, 8, 7)))
        starts.append([start] * operands.blocks)
    return _add_words(emitter, operands, operands.words, starts, step)


def _dot_avx2_wide(emitter: Emitter, operands: Operands) -> Dots:
    builder, pairs = emitter.builder, vector(I16, 16)

    def step(total: Value, codes: Value, activation: Value) -> Value:
        weights, activations = builder.bitcast(codes, pairs), builder.bitcast(activation, pairs)
        return builder.add(
            total, emitter.call("llvm.x86.avx2.pmadd.wd", vector(I32, 8), weights, activations)
        )

    return _add_words(emitter, operands, operands.words, _minus_zeros(emitter, operands), step)


def _add_pairs_avx2(emitter: Emitter, pairs: Value) -> Value:
    return emitter.call("llvm.x86.avx2.pmadd.wd", vector(I32, 8), pairs, constant(I16, 16, 1))


def _dot_portable(emitter: Emitter, operands: Operands) -> Dots:
    builder = emitter.builder
    bits = 16 if operands.is_wide else 8

    def step(total: Value, codes: Value, activation: Value) -> Value:
        ints = activation.type
        packed = builder.bitcast(codes, ints)
        for position in range(0, 32, bits):
            shifted = builder.lshr(packed, constant(I32, ints.count, position))
            weight = builder.and_(shifted, constant(I32, ints.count, (1 << bits) - 1))
            top = builder.shl(activation, constant(I32, ints.count, 32 - bits - position))
            value = builder.ashr(top, constant(I32, ints.count, 32 - bits))
            total = builder.add(total, builder.mul(weight, value))
        return total

    return _add_words(emitter, operands, operands.words, _minus_zeros(emitter, operands), step)


AVX512 = Isa(
    name="avx512",
    lanes=16,
    max_tokens=4,
    register="v",
    features=frozenset({"avx512f", "avx512bw", "avx512vl", "avx512vnni"}),
    native_half=True,
    dot=_dot_avx512,
)
AVX2 = Isa(
    name="avx2",
    lanes=8,
    max_tokens=4,
    register="x",
    features=frozenset({"avx2", "fma", "f16c"}),
    native_half=True,
    dot=_dot_avx2,
)
PORTABLE = Isa(
    name="portable",
    lanes=8,
    max_tokens=4,
    register=None,
    features=frozenset(),
    native_half=False,
    dot=_dot_portable,
)

ISAS = {isa.name: isa for isa in (AVX512, AVX2, PORTABLE)}
"""By name, best first."""


def available() -> list[Isa]:
    """The instruction sets that code compiled by Numba may use on this machine, best first."""
    features = _compiler_features()
    return [isa for isa in ISAS.values() if isa.features <= features]


def _compiler_features() -> frozenset[str]:
    """What Numba compiles for: the host's features unless its own settings narrow them."""
    configured = narrowed_features()
    if configured is not None:
        return frozenset(item[1:] for item in configured.split(",") if item.startswith("+"))
    host = llvmlite.binding.get_host_cpu_features()
    return frozenset(name for name, present in host.items() if present)


def narrowed_features() -> str | None:
    """Numba's setting of the CPU's features, None if it has none. Does not import Numba."""
    numba = sys.modules.get("numba")
    if numba is None:
        return os.environ.get("NUMBA_CPU_FEATURES")
    features: str | None = numba.config.CPU_FEATURES
    return features


@functools.cache
def selected() -> Isa:
    """The instruction set of this process: the best available one, or the one named by `MVLLM_CPU_ISA`.

    Raises:
        ConfigError: the variable names an unknown or unavailable instruction set.
    """
    usable = available()
    name = os.environ.get(OVERRIDE)
    if not name:
        return usable[0]
    for isa in usable:
        if isa.name == name:
            return isa
    names = ", ".join(isa.name for isa in usable)
    raise ConfigError(f"{OVERRIDE} is {name!r}, but this machine offers: {names}")
