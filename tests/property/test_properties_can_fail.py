"""Properties that stand as tests of their own, each run over a planted bug that it has to notice.

What the state machines and rules notice is shown in the other test_*_mutants.py.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
from hypothesis import Phase as HypothesisPhase
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from mvllm.core.engine.request_table import RequestState, RequestTable
from mvllm.core.errors import InvariantViolation
from mvllm.core.request import Phase
from mvllm.core.sampling import sampler
from mvllm.core.sched import scheduler as scheduler_module
from mvllm.core.sched.capacity import Capacity
from mvllm.core.sched.scheduler import Scheduler
from mvllm.core.step import RowView, SchedulerView, StepPlan
from mvllm.core.types import RequestId, ceil_div
from tests.mutants.mutant import Mutant
from tests.property.test_engine import test_siblings_compute_the_full_blocks_of_their_prompt_once as siblings
from tests.property.test_lifecycle import TableMachine
from tests.property.test_sampler import test_a_seeded_row_keeps_its_token_in_any_company as seeded_rows
from tests.property.test_scheduler import (
    test_s10_a_drain_takes_at_most_the_sum_of_all_total_limits as drain_bound,
)
from tests.property.test_scheduler import (
    test_s11_a_request_is_refused_exactly_if_alone_it_exceeds_the_pool as refusal,
)
from tests.property.test_scheduler import (
    test_s13_chunks_are_contiguous_and_sum_to_the_prompt_less_its_cached_part as chunks,
)

_plan = Scheduler.plan
_start = Capacity.start
_finish = RequestTable.finish
_gumbel = sampler.gumbel
_stream = itertools.count()


def _stands_still_with_an_even_number_of_rows(self: Scheduler, view: SchedulerView) -> StepPlan:
    plan = _plan(self, view)
    return plan if len(plan.rows) % 2 else dataclasses.replace(plan, admits=(), rows=())


def _no_request_waits_for_another(self: Scheduler, view: SchedulerView) -> StepPlan:
    rows = [
        dataclasses.replace(row, probe=dataclasses.replace(row.probe, next_block_key=None))
        for row in view.rows
    ]
    return _plan(self, dataclasses.replace(view, rows=tuple(rows)))


def _the_last_token_needs_a_block(total_limit: int, block_size: int) -> int:
    return ceil_div(total_limit, block_size)


def _starts_one_position_late(self: Capacity, row: RowView) -> int:
    start = _start(self, row)
    return min(start + 1, row.num_tokens - 1)


def _a_waiting_request_may_finish(self: RequestTable, id: RequestId, phase: Phase) -> RequestState:
    state = self.get(id)
    waits = state is not None and state.phase is Phase.WAITING
    return _finish(self, id, Phase.FAILED if waits and phase is Phase.FINISHED else phase)


def _noise_of_a_shared_stream(seed: Any, position: int, token_ids: Any) -> Any:
    return _gumbel(seed, position + next(_stream), token_ids)


def _life_of_requests() -> None:
    run_state_machine_as_test(TableMachine, settings=settings.default)


CASES: dict[str, tuple[Callable[[], None], Mutant]] = {
    "L1": (_life_of_requests, Mutant(RequestTable, "finish", _a_waiting_request_may_finish, "L1")),
    "K6": (siblings, Mutant(Scheduler, "plan", _no_request_waits_for_another, "K6")),
    "S10": (drain_bound, Mutant(Scheduler, "plan", _stands_still_with_an_even_number_of_rows, "S10")),
    "S11": (
        refusal,
        Mutant(scheduler_module, "worst_case_blocks", _the_last_token_needs_a_block, "S11"),
    ),
    "S13": (chunks, Mutant(Capacity, "start", _starts_one_position_late, "S13")),
    "M6": (seeded_rows, Mutant(sampler, "gumbel", _noise_of_a_shared_stream, "M6")),
}


@pytest.fixture
def hunting() -> Iterator[None]:
    """A failure is expected: look long for it, always in the same way, and don't make it small."""
    before = settings.default
    assert before is not None
    settings.register_profile(
        "hunt",
        before,
        max_examples=1000,
        derandomize=True,
        database=None,
        phases=[HypothesisPhase.generate],
        report_multiple_bugs=False,
    )
    settings.load_profile("hunt")
    yield
    settings.register_profile("before", before)
    settings.load_profile("before")


def _is_notice(error: BaseException) -> bool:
    """Whether a check failed, and nothing else went wrong; Hypothesis groups several failures into one."""
    if isinstance(error, BaseExceptionGroup):
        return all(_is_notice(inner) for inner in error.exceptions)
    return isinstance(error, AssertionError | InvariantViolation | pytest.fail.Exception)


@pytest.mark.usefixtures("hunting")
@pytest.mark.parametrize("invariant", CASES)
def test_the_property_notices_the_planted_bug(invariant: str) -> None:
    check, mutant = CASES[invariant]
    with (
        mock.patch.object(mutant.owner, mutant.attribute, mutant.replacement),
        pytest.raises(BaseException) as caught,
    ):
        check()
    assert _is_notice(caught.value), caught.value
