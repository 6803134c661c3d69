"""The cpu backend's program: what is fused, where arrays lie, where threads must meet."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mvllm.backends.cpu import record as graph
from mvllm.backends.cpu.plan import Buffer, assign_buffers, check_widths, find_barriers
from mvllm.backends.cpu.program import Array, Instruction, Kind, Program
from mvllm.backends.cpu.tables import Domain, Epilogue, Regime
from mvllm.core.errors import InvariantViolation
from tests.cpu_programs import NoData, Outline, program_of, races
from tests.mutants import cpu_program as mutants

OUTLINES = st.builds(
    Outline,
    num_layers=st.integers(1, 3),
    format_name=st.sampled_from(["Q4_0", "F32"]),
    biases=st.booleans(),
    qk_norm=st.booleans(),
    post_norms=st.booleans(),
    tied_head=st.booleans(),
    embedding_scale=st.sampled_from([1.0, 8.0]),
    final_soft_cap=st.sampled_from([None, 30.0]),
    taps=st.booleans(),
)


def buffers_of(program: Program) -> dict[Array, Buffer]:
    return assign_buffers(program)


def kinds(program: Program) -> list[Kind]:
    return [step.kind for step in program.instructions]


def products(program: Program) -> list[tuple[str, Epilogue]]:
    return [
        (step.operation.weight.name, step.epilogue)
        for step in program.instructions
        if isinstance(step.operation, graph.Linear)
    ]


def test_a_layer_of_quantized_weights_becomes_seventeen_instructions() -> None:
    program = program_of(Outline(num_layers=1))
    assert kinds(program) == [
        Kind.EMBED,
        *[Kind.NORM, Kind.QUANTIZE, Kind.LINEAR, Kind.LINEAR, Kind.QUANTIZE, Kind.LINEAR],
        *[Kind.ROTATE, Kind.ROTATE, Kind.STORE_KV, Kind.ATTEND, Kind.QUANTIZE, Kind.LINEAR],
        *[Kind.NORM, Kind.QUANTIZE, Kind.LINEAR, Kind.LINEAR, Kind.QUANTIZE, Kind.LINEAR],
        *[Kind.TAKE, Kind.NORM, Kind.QUANTIZE, Kind.LINEAR, Kind.SAMPLE],
    ]


def test_residuals_gates_and_soft_caps_are_fused_into_products() -> None:
    assert products(program_of(Outline(num_layers=1, final_soft_cap=30.0))) == [
        *[("q", Epilogue.NONE), ("k", Epilogue.NONE), ("v", Epilogue.NONE), ("o", Epilogue.ADD)],
        *[("gate", Epilogue.NONE), ("up", Epilogue.SILU), ("down", Epilogue.ADD)],
        ("head", Epilogue.SOFT_CAP),
    ]


def test_a_norm_between_product_and_residual_keeps_the_addition_apart() -> None:
    program = program_of(Outline(num_layers=1, post_norms=True))
    assert ("o", Epilogue.NONE) in products(program)
    assert kinds(program).count(Kind.ADD) == 2


def test_dense_weights_need_no_records() -> None:
    assert Kind.QUANTIZE not in kinds(program_of(Outline(format_name="F32")))


def test_values_and_head_take_wide_records_and_the_rest_narrow_ones() -> None:
    program = program_of(Outline(num_layers=1))
    wide = [
        step.operation.weight.name
        for step in program.instructions
        if isinstance(step.operation, graph.Linear)
        and step.input is not None
        and step.input.records is not None
        and step.input.records.is_wide
    ]
    assert wide == ["v", "head"]


def test_one_token_needs_six_meetings_per_layer() -> None:
    program = program_of(Outline(num_layers=2))
    barriers = find_barriers(program, buffers_of(program))
    per_layer = [index for index, regimes in enumerate(barriers) if Regime.ONE_TOKEN in regimes]
    first, second = ([index for index in per_layer if start < index <= start + 18] for start in (0, 18))
    assert len(first) == len(second) == 6
    names = [program.instructions[index].kind for index in second]
    assert names == [Kind.NORM, Kind.ROTATE, Kind.ATTEND, Kind.QUANTIZE, Kind.NORM, Kind.QUANTIZE]


def test_products_of_the_same_input_run_without_a_meeting_in_between() -> None:
    program = program_of(Outline())
    barriers = find_barriers(program, buffers_of(program))
    for index, step in enumerate(program.instructions[1:], 1):
        before = program.instructions[index - 1]
        if step.kind is before.kind is Kind.LINEAR and step.input == before.input:
            assert not barriers[index]


def damaged_reads(program: Program, buffers: dict[Array, Buffer]) -> list[str]:
    """Arrays whose buffer holds another one when they are read."""
    contents: dict[Buffer, Array] = {}
    found = []
    for step in program.instructions:
        for array in (step.input, step.other):
            if array is not None and contents.get(buffers[array]) != array:
                found.append(f"{array} in {step.kind}")
        if step.output is not None:
            contents[buffers[step.output]] = step.output
    for array in (program.logits, *program.kept):
        if contents.get(buffers[array]) != array:
            found.append(f"{array} at the end")
    return found


@given(OUTLINES)
def test_every_array_is_intact_when_it_is_read(outline: Outline) -> None:
    program = program_of(outline)
    assert damaged_reads(program, buffers_of(program)) == []


@given(OUTLINES)
def test_no_thread_disturbs_another_between_barriers(outline: Outline) -> None:
    program = program_of(outline)
    buffers = buffers_of(program)
    barriers = find_barriers(program, buffers)
    for regime in Regime:
        assert races(program, buffers, barriers, regime) == []


@pytest.mark.parametrize("mutant", mutants.BUFFERS)
def test_planted_bugs_in_the_buffers_are_caught(mutant: mutants.AssignBuffers) -> None:
    program = program_of(Outline())
    buffers = mutant(program)
    barriers = find_barriers(program, buffers)
    caught = any(races(program, buffers, barriers, regime) for regime in Regime)
    assert caught or damaged_reads(program, buffers)


@pytest.mark.parametrize("mutant", mutants.BARRIERS)
def test_planted_bugs_in_the_barriers_are_caught(mutant: mutants.FindBarriers) -> None:
    program = program_of(Outline())
    buffers = buffers_of(program)
    barriers = mutant(program, buffers)
    assert any(races(program, buffers, barriers, regime) for regime in Regime)


@pytest.mark.parametrize("regime", list(Regime))
def test_without_any_one_of_the_barriers_threads_would_disturb_each_other(regime: Regime) -> None:
    program = program_of(Outline(num_layers=1, qk_norm=True, biases=True))
    buffers = buffers_of(program)
    barriers = find_barriers(program, buffers)
    needed = [index for index, regimes in enumerate(barriers) if regime in regimes]
    assert needed
    for index in needed:
        fewer = list(barriers)
        fewer[index] = fewer[index] - {regime}
        assert races(program, buffers, fewer, regime), f"the barrier before {index} serves nothing"


def test_a_product_whose_weight_does_not_fit_is_refused() -> None:
    step = Instruction(
        Kind.LINEAR,
        Domain.TOKENS,
        input=Array(0, 64, Domain.TOKENS),
        output=Array(1, 32, Domain.TOKENS),
        operation=graph.Linear(NoData("w", (32, 63)), None),
    )
    with pytest.raises(InvariantViolation, match=r"w is \(32, 63\)"):
        check_widths([step])


def test_importing_the_backend_compiles_nothing() -> None:
    code = "import sys, mvllm.backends.cpu.backend; sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
