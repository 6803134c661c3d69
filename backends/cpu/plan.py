"""Places a program's arrays in memory and finds the barriers it needs.

Arrays share a buffer only if their rows have the same length and stand for the same things: row r is then at
the same place in both, so a thread that keeps to its rows never meets another thread's data.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from mvllm.backends.cpu import record as graph
from mvllm.backends.cpu.memory import round_up
from mvllm.backends.cpu.program import Array, Instruction, Kind, Program
from mvllm.backends.cpu.tables import Domain, Regime, has_single_row
from mvllm.core.errors import InvariantViolation

_IN_PLACE = frozenset({Kind.NORM, Kind.ROTATE, Kind.ADD, Kind.GATE, Kind.SCALE, Kind.SOFT_CAP})
"""Kinds whose output row may overwrite an input row: they read a value before they write it."""

_COLUMN_BLOCK = 16  # columns; a row of a matrix has room for whole blocks


@dataclass(frozen=True)
class Buffer:
    """Memory for `domain`'s rows of `row_bytes` each."""

    number: int
    domain: Domain
    row_bytes: int


def assign_buffers(program: Program) -> dict[Array, Buffer]:
    """A buffer for every array, reused once an array's last reader has run."""
    last_use = {array: index for index, step in enumerate(program.instructions) for array in step.arrays}
    for array in (program.logits, *program.kept):
        last_use[array] = len(program.instructions)
    # Private arrays share with private arrays only, or a reuse would bring back a barrier that they save.
    free: dict[Hashable, list[Buffer]] = defaultdict(list)
    buffers: dict[Array, Buffer] = {}
    count = 0

    def release(arrays: Sequence[Array]) -> None:
        for array in dict.fromkeys(arrays):
            buffer = buffers[array]
            free[buffer.domain, buffer.row_bytes, array in program.private].append(buffer)

    for index, step in enumerate(program.instructions):
        dying = [a for a in (step.input, step.other) if a is not None and last_use[a] == index]
        if step.kind in _IN_PLACE:
            release(dying)
        output = step.output
        if output is not None:
            row_bytes = _row_bytes(output)
            available = free[output.domain, row_bytes, output in program.private]
            if available:
                # Otherwise the one free for longest: the last reader of the others may still be at work.
                buffers[output] = available.pop(-1 if step.kind in _IN_PLACE else 0)
            else:
                buffers[output] = Buffer(count, output.domain, row_bytes)
                count += 1
        if step.kind not in _IN_PLACE:
            release(dying)
    return buffers


def _row_bytes(array: Array) -> int:
    if array.records is not None:
        return round_up(array.records.row_bytes(array.width))
    return 4 * round_up(array.width, _COLUMN_BLOCK)


def find_barriers(program: Program, buffers: dict[Array, Buffer]) -> list[frozenset[Regime]]:
    """For every instruction the regimes in which all threads must meet before it.

    They must if it touches memory that an instruction since the last barrier touched, one of the two writes,
    and the two don't share the work alike.
    """
    regimes: list[set[Regime]] = [set() for _ in program.instructions]
    for regime in Regime:
        since: list[_Access] = []
        for index, step in enumerate(program.instructions):
            accesses = _accesses(step, program, buffers, regime)
            if any(_conflict(before, now) for before in since for now in accesses):
                regimes[index].add(regime)
                since = []
            since += accesses
    return [frozenset(found) for found in regimes]


@dataclass(frozen=True)
class _Access:
    memory: Hashable
    writes: bool
    share: Hashable | None
    """Which part a thread touches: equal shares of one memory are equal parts. None: any part."""


def _conflict(before: _Access, now: _Access) -> bool:
    if before.memory != now.memory or not (before.writes or now.writes):
        return False
    return before.share is None or before.share != now.share


def _accesses(
    step: Instruction, program: Program, buffers: dict[Array, Buffer], regime: Regime
) -> list[_Access]:
    single = has_single_row(step.domain, regime)
    accesses = []
    for array in step.arrays:
        writes = array is step.output
        share = "private" if single and array in program.private else _share(step, array, single, program)
        accesses.append(_Access(buffers[array], writes, share))
    if isinstance(step.operation, graph.Attend):
        stores = step.kind is Kind.STORE_KV
        accesses.append(_Access(("layer", step.operation.layer), stores, "rows" if stores else None))
    return accesses


def _share(step: Instruction, array: Array, single: bool, program: Program) -> Hashable | None:
    match step.kind:
        case Kind.LINEAR:
            if array is step.input:
                return None
            assert step.output is not None
            return ("columns", step.domain, step.output.width)
        case Kind.ATTEND:
            return None
        case Kind.TAKE if array is step.input:
            return None
        case _:
            replicated = single and step.output in program.private
            return None if replicated else ("rows", step.domain)


def check_widths(instructions: Sequence[Instruction]) -> None:
    """Raise InvariantViolation if an instruction's arrays don't fit together.

    Compiled code does not check; the decoder and the weights have been validated, so this never happens.
    """
    for step in instructions:
        if step.kind is Kind.LINEAR and isinstance(step.operation, graph.Linear):
            assert step.input is not None and step.output is not None
            if step.operation.weight.shape != (step.output.width, step.input.width):
                raise InvariantViolation(
                    f"linear: weight {step.operation.weight.name} is {step.operation.weight.shape}, "
                    f"its arrays are {step.output.width} and {step.input.width} wide"
                )
        elif step.kind in (Kind.ADD, Kind.GATE) and len({array.width for array in step.arrays}) != 1:
            raise InvariantViolation(f"{step.kind}: arrays differ in width: {[a.width for a in step.arrays]}")
