"""Planted bugs of the cpu backend's planner; tests/unit/test_cpu_program.py shows that each is caught."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from mvllm.backends.cpu.plan import Buffer, assign_buffers, find_barriers
from mvllm.backends.cpu.program import Array, Kind, Program
from mvllm.backends.cpu.tables import Regime

AssignBuffers = Callable[[Program], dict[Array, Buffer]]
FindBarriers = Callable[[Program, dict[Array, Buffer]], list[frozenset[Regime]]]


def second_operands_do_not_keep_arrays_alive(program: Program) -> dict[Array, Buffer]:
    steps = tuple(replace(step, other=None) for step in program.instructions)
    return assign_buffers(replace(program, instructions=steps))


def products_may_overwrite_their_input(program: Program) -> dict[Array, Buffer]:
    buffers = assign_buffers(program)
    for step in program.instructions:
        if step.kind is Kind.LINEAR and step.input is not None and step.output is not None:
            buffers[step.output] = buffers[step.input]
    return buffers


def one_token_needs_no_barriers(program: Program, buffers: dict[Array, Buffer]) -> list[frozenset[Regime]]:
    return [regimes - {Regime.ONE_TOKEN} for regimes in find_barriers(program, buffers)]


def attention_does_not_wait_for_keys(
    program: Program, buffers: dict[Array, Buffer]
) -> list[frozenset[Regime]]:
    found = find_barriers(program, buffers)
    attends = [step.kind is Kind.ATTEND for step in program.instructions]
    return [frozenset() if attend else regimes for attend, regimes in zip(attends, found, strict=True)]


BUFFERS: list[AssignBuffers] = [second_operands_do_not_keep_arrays_alive, products_may_overwrite_their_input]
BARRIERS: list[FindBarriers] = [one_token_needs_no_barriers, attention_does_not_wait_for_keys]
