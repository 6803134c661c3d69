"""Block arithmetic against sets of blocks and a position-by-position count."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mvllm.core.request import Phase
from mvllm.core.sched.capacity import Capacity, known_positions, worst_case_blocks
from mvllm.core.step import PrefixProbe, RowView, SchedulerView, StepPlan
from mvllm.core.types import BlockId, RequestId
from tests.property.scheduler_rules import block_arithmetic_is_exact
from tests.strategies import SchedulerLimits, scheduler_cases


@given(case=scheduler_cases())
def test_s4_available_released_and_pinned_blocks_are_counted_exactly(
    case: tuple[SchedulerLimits, SchedulerView],
) -> None:
    limits, view = case
    block_arithmetic_is_exact(limits, view, StepPlan())


@given(case=scheduler_cases(), end=st.integers(0, 60), further=st.integers(0, 60))
def test_new_blocks_are_those_that_appending_position_by_position_opens(
    case: tuple[SchedulerLimits, SchedulerView], end: int, further: int
) -> None:
    limits, view = case
    capacity = Capacity(view, limits.block_size)
    for row in view.rows:
        covered = capacity.num_held(row) * limits.block_size
        opened = 0
        for position in range(end):
            if position >= covered:
                covered += limits.block_size
                opened += 1
        assert capacity.new_blocks(row, end) == opened
        assert capacity.new_blocks(row, end + further) >= opened


@given(case=scheduler_cases())
def test_s7_a_minimum_is_one_more_position_per_running_row(
    case: tuple[SchedulerLimits, SchedulerView],
) -> None:
    limits, view = case
    capacity = Capacity(view, limits.block_size)
    running = [row for row in view.rows if row.phase is Phase.RUNNING]
    one_by_one = sum(capacity.new_blocks(row, row.num_computed + 1) for row in running)
    assert capacity.minimum_blocks(running) == one_by_one


@given(case=scheduler_cases(), end=st.integers(0, 60))
def test_s12_promised_and_opened_blocks_together_cover_the_known_positions(
    case: tuple[SchedulerLimits, SchedulerView], end: int
) -> None:
    limits, view = case
    capacity = Capacity(view, limits.block_size)
    for row in view.rows:
        promised = capacity.promised_blocks(row, end)
        known = capacity.new_blocks(row, known_positions(row))
        assert promised + capacity.new_blocks(row, end) == max(known, capacity.new_blocks(row, end))


@given(case=scheduler_cases())
def test_known_positions_never_exceed_the_worst_case(case: tuple[SchedulerLimits, SchedulerView]) -> None:
    limits, view = case
    for row in view.rows:
        assert row.num_tokens <= known_positions(row) <= row.total_limit - 1
        covered = worst_case_blocks(row.total_limit, limits.block_size) * limits.block_size
        assert row.total_limit - 1 <= covered < row.total_limit - 1 + limits.block_size


def test_a_block_shared_with_a_survivor_is_not_released() -> None:
    def running(id: str, *blocks: int) -> RowView:
        return RowView(RequestId(id), Phase.RUNNING, 9, 8, 20, tuple(map(BlockId, blocks)))

    old, middle, young = running("old", 0, 1), running("middle", 0, 2), running("young", 0, 2)
    capacity = Capacity(SchedulerView((old, middle, young), 0, 0), 4)
    assert capacity.released_by([young]) == frozenset()
    assert capacity.released_by([young, middle]) == {2}
    assert capacity.released_by([young, middle, old]) == {0, 1, 2}


def test_a_hit_on_blocks_of_a_victim_pins_them_again() -> None:
    victim = RowView(RequestId("victim"), Phase.RUNNING, 9, 8, 20, (BlockId(0), BlockId(1)))
    hit = PrefixProbe((BlockId(0), BlockId(5)), frozenset({BlockId(5)}))
    oldest = RowView(RequestId("oldest"), Phase.WAITING, 9, 0, 20, probe=hit)
    capacity = Capacity(SchedulerView((oldest, victim), 0, 1), 4)
    assert capacity.pinned_by(oldest) == {5}
    assert capacity.pinned_by(oldest, capacity.released_by([victim])) == {0, 5}
