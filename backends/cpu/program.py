"""Lowers the recorded graph to a linear program of instructions.

A value of the graph becomes an array, and so do the records of rounded values that a quantized product
reads: they are made once per value and layout, however many products share them. Fused away are additions,
gates and soft caps that directly follow a product: a thread applies them to the columns it has just
computed, without a barrier.

Kinds of instruction and how the team shares their work:

    rows      each thread takes some rows (embed, norm, quantize, rotate, store_kv, ...)
    columns   each thread takes some columns of every row (linear)
    items     threads take (query rows, kv head) items from a list until it is empty (attend)

With a single row there are no rows to share. Instructions whose result only feeds products are then done by
every thread for itself into a private copy (`private` arrays), which saves waiting for the one that does it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from mvllm.backends.cpu import record as graph
from mvllm.backends.cpu.layout import ActivationLayout
from mvllm.backends.cpu.record import Node, Value
from mvllm.backends.cpu.tables import Domain, Epilogue


class Kind(StrEnum):
    """What an instruction does; the name of its compiled function in operations.py."""

    EMBED = "embed"
    NORM = "norm"
    QUANTIZE = "quantize"
    LINEAR = "linear"
    ROTATE = "rotate"
    STORE_KV = "store_kv"
    ATTEND = "attend"
    GATE = "gate"
    ADD = "add"
    SCALE = "scale"
    SOFT_CAP = "soft_cap"
    TAKE = "take"
    SAMPLE = "sample"


@dataclass(frozen=True)
class Array:
    """A matrix in memory: float32 values, or records of a value rounded for products."""

    number: int  # of the value
    width: int  # values per row
    domain: Domain
    records: ActivationLayout | None = None  # None: float32

    def __str__(self) -> str:
        letter = "v" if self.records is None else "w" if self.records.is_wide else "q"
        return f"{letter}{self.number}"


@dataclass(frozen=True)
class Instruction:
    """One step of the program. `operation` holds the numbers that steer it, as recorded."""

    kind: Kind
    domain: Domain
    input: Array | None = None
    other: Array | None = None
    output: Array | None = None
    operation: graph.Operation | None = None
    epilogue: Epilogue = Epilogue.NONE
    cap: float = 0.0

    @property
    def arrays(self) -> tuple[Array, ...]:
        return tuple(array for array in (self.input, self.other, self.output) if array is not None)


@dataclass(frozen=True)
class Program:
    """Instructions in order. `kept` arrays hold their contents to the end of a run."""

    instructions: tuple[Instruction, ...]
    logits: Array
    kept: tuple[Array, ...]
    private: frozenset[Array]


def lower(nodes: Sequence[Node], logits: Value, taps: Sequence[Value] = ()) -> Program:
    """The program for a recorded graph. `taps` are values to keep for inspection."""
    lowering = _Lowering(nodes, {logits, *taps})
    for node in nodes:
        lowering.add(node)
    kept = (_array(logits), *[_array(value) for value in taps])
    instructions = tuple(lowering.instructions)
    return Program(instructions, kept[0], kept[1:], _private_arrays(instructions, kept))


def with_sampling(program: Program) -> Program:
    """The program, followed by the sampling of its logits."""
    sample = Instruction(Kind.SAMPLE, Domain.LOGIT_ROWS, input=program.logits)
    return replace(program, instructions=(*program.instructions, sample))


def _array(value: Value) -> Array:
    return Array(value.number, value.width, value.domain)


def _private_arrays(instructions: Sequence[Instruction], kept: Sequence[Array]) -> frozenset[Array]:
    """Arrays that only products read, directly or through other private arrays."""
    shared: set[Array] = set(kept)
    private: set[Array] = set()
    for instruction in reversed(instructions):
        output = instruction.output
        is_private = (
            instruction.kind in (Kind.NORM, Kind.QUANTIZE, Kind.TAKE)
            and output is not None
            and output not in shared
        )
        if is_private and output is not None:
            private.add(output)
        for array in (instruction.input, instruction.other):
            feeds_product = instruction.kind is Kind.LINEAR and array is instruction.input
            if array is not None and not feeds_product and not is_private:
                shared.add(array)
    return frozenset(private)


class _Lowering:
    """Turns nodes into instructions. Owns the list of instructions and what has been fused or quantized."""

    def __init__(self, nodes: Sequence[Node], kept: set[Value]) -> None:
        self.instructions: list[Instruction] = []
        self._records: dict[tuple[Value, ActivationLayout], Array] = {}
        self._fused: set[Value] = set()  # outputs of nodes that are part of an earlier instruction
        uses = Counter(value for node in nodes for value in node.inputs)
        self._only_user = {
            value: node for node in nodes for value in node.inputs if uses[value] == 1 and value not in kept
        }

    def add(self, node: Node) -> None:
        """Append the instructions of `node`, if it isn't fused into an earlier one."""
        if node.output in self._fused:
            return
        match node.operation:
            case graph.Linear():
                self._add_linear(node, node.operation)
            case graph.Attend():
                self._add_attend(node)
            case graph.Add() | graph.Gate():
                kind = Kind.ADD if isinstance(node.operation, graph.Add) else Kind.GATE
                self._append(kind, node, other=_array(node.inputs[1]))
            case operation:
                self._append(_KIND_BY_OPERATION[type(operation)], node)

    def _append(self, kind: Kind, node: Node, other: Array | None = None) -> None:
        source = _array(node.inputs[0]) if node.inputs else None
        output = _array(node.output)
        self.instructions.append(
            Instruction(kind, output.domain, source, other, output, operation=node.operation)
        )

    def _add_linear(self, node: Node, operation: graph.Linear) -> None:
        source = node.inputs[0]
        layout = operation.activations
        activations = _array(source) if layout is None else self._records_of(source, layout)
        plain = Instruction(
            Kind.LINEAR, source.domain, activations, output=_array(node.output), operation=operation
        )
        self.instructions.append(self._with_epilogue(plain, node))

    def _with_epilogue(self, linear: Instruction, node: Node) -> Instruction:
        """The instruction with the next operation on its result fused into it, where there is such a one."""
        user = self._only_user.get(node.output)
        if user is None:
            return linear
        match user.operation:
            case graph.Add():
                epilogue, other = Epilogue.ADD, next(v for v in user.inputs if v != node.output)
            case graph.Gate(activation) if user.inputs[1] == node.output:
                epilogue = Epilogue.SILU if activation == "silu" else Epilogue.GELU_TANH
                other = user.inputs[0]
            case graph.SoftCap(cap):
                self._fused.add(user.output)
                return replace(linear, output=_array(user.output), epilogue=Epilogue.SOFT_CAP, cap=cap)
            case _:
                return linear
        if other.number > node.output.number:
            return linear
        self._fused.add(user.output)
        return replace(linear, output=_array(user.output), other=_array(other), epilogue=epilogue)

    def _records_of(self, value: Value, layout: ActivationLayout) -> Array:
        records = self._records.get((value, layout))
        if records is None:
            records = self._records[value, layout] = replace(_array(value), records=layout)
            self.instructions.append(Instruction(Kind.QUANTIZE, value.domain, _array(value), output=records))
        return records

    def _add_attend(self, node: Node) -> None:
        q, k, v = (_array(value) for value in node.inputs)
        store = Instruction(Kind.STORE_KV, q.domain, k, v, operation=node.operation)
        attend = Instruction(Kind.ATTEND, q.domain, q, output=_array(node.output), operation=node.operation)
        self.instructions += [store, attend]


_KIND_BY_OPERATION: dict[type, Kind] = {
    graph.Embed: Kind.EMBED,
    graph.RmsNorm: Kind.NORM,
    graph.Rotate: Kind.ROTATE,
    graph.Scale: Kind.SCALE,
    graph.SoftCap: Kind.SOFT_CAP,
    graph.TakeLogitRows: Kind.TAKE,
}
