"""What every plan must keep, stated once and checked against any (limits, view, plan).

The block arithmetic here is a set: the blocks that tables and hits name are in use, all others can be had.
Each rule raises AssertionError; `RULES` names them after the invariants in docs/INVARIANTS.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from mvllm.core.request import Phase
from mvllm.core.sched.capacity import Capacity
from mvllm.core.step import PlannedRow, RowView, SchedulerView, StepPlan
from mvllm.core.types import BlockId, RequestId, ceil_div
from tests.strategies import SchedulerLimits

Rule = Callable[[SchedulerLimits, SchedulerView, StepPlan], None]


def _planned(plan: StepPlan) -> dict[RequestId, PlannedRow]:
    return {row.id: row for row in plan.rows}


def _rows_of(view: SchedulerView, plan: StepPlan) -> list[RowView]:
    """The view's rows that the plan computes, oldest first."""
    planned = _planned(plan)
    return [row for row in view.rows if row.id in planned]


def _table(row: RowView) -> tuple[BlockId, ...]:
    return row.block_ids if row.phase is Phase.RUNNING else row.probe.hit_block_ids


def _blocks_in_use(rows: Iterable[RowView]) -> int:
    return len({block for row in rows for block in _table(row)})


def _to_open(limits: SchedulerLimits, row: RowView, end: int) -> int:
    return max(0, ceil_div(end, limits.block_size) - len(_table(row)))


def _known(row: RowView) -> int:
    return min(row.num_tokens + 1, row.total_limit - 1)


def _reserved(limits: SchedulerLimits, rows: Iterable[RowView]) -> int:
    return sum(ceil_div(row.total_limit - 1, limits.block_size) for row in rows)


def _key(row: RowView) -> object:
    return row.next_block_key if row.phase is Phase.RUNNING else row.probe.next_block_key


def _followers(view: SchedulerView, plan: StepPlan) -> set[RequestId]:
    """Waiting rows whose next block an older row of the plan computes."""
    planned = _planned(plan)
    keys: set[object] = set()
    found = set()
    for row in view.rows:
        if row.phase is Phase.WAITING and _key(row) is not None and _key(row) in keys:
            found.add(row.id)
        if row.id in planned:
            keys.add(_key(row))
    return found


def keeps_the_token_budget(limits: SchedulerLimits, view: SchedulerView, plan: StepPlan) -> None:
    used = sum(row.count + row.max_drafts for row in plan.rows)
    assert used <= limits.max_num_batched_tokens, f"{used} tokens planned"
    drafts = sum(row.max_drafts for row in plan.rows)
    assert limits.max_step_drafts is None or drafts <= limits.max_step_drafts, f"{drafts} drafts planned"


def plans_each_live_row_at_most_once(limits: SchedulerLimits, view: SchedulerView, plan: StepPlan) -> None:
    ids = [row.id for row in plan.rows]
    assert len(ids) <= limits.max_num_seqs, "too many rows"
    assert ids == [row.id for row in _rows_of(view, plan)], "an unknown or repeated row, or not by age"
    waiting = [row for row in view.rows if row.phase is Phase.WAITING and row.id in set(ids)]
    admitted = [(row.id, row.probe.hit_block_ids) for row in waiting]
    assert [(a.id, a.hit_block_ids) for a in plan.admits] == admitted, "admits are not the waiting rows"


def rows_are_well_formed(limits: SchedulerLimits, view: SchedulerView, plan: StepPlan) -> None:
    planned = _planned(plan)
    for row in _rows_of(view, plan):
        p = planned[row.id]
        hit = len(row.probe.hit_block_ids) * limits.block_size
        assert p.start == (row.num_computed if row.phase is Phase.RUNNING else hit), f"{p} starts wrong"
        assert p.count >= 1, f"{p} does nothing"
        assert p.end <= row.num_tokens, f"{p} goes past its tokens"
        assert p.max_drafts >= 0, f"{p} has negative drafts"
        if p.max_drafts:
            assert p.end == row.num_tokens, f"{p} drafts before its last token"
            assert p.max_drafts <= row.max_drafts, f"{p} drafts more than asked"
            assert p.max_drafts <= row.total_limit - 1 - row.num_tokens, f"{p} drafts past its limit"


def fits_the_pool(limits: SchedulerLimits, view: SchedulerView, plan: StepPlan) -> None:
    rows = _rows_of(view, plan)
    planned = _planned(plan)
    opened = sum(_to_open(limits, r, planned[r.id].end + planned[r.id].max_drafts) for r in rows)
    used = _blocks_in_use(rows) + opened
    assert used <= limits.num_blocks, f"{used} blocks used of {limits.num_blocks}"


def planning_is_pure(limits: SchedulerLimits, view: SchedulerView, plan: StepPlan) -> None:
    scheduler = limits.scheduler()
    scheduler.plan(view)
    assert scheduler.plan(view) == plan, "the second plan of the same view differs"


def wastes_no_room(limits: SchedulerLimits, view: SchedulerView, plan: StepPlan) -> None:
    """S6: nothing to do only without requests; no admission and no chunk stops short of B, R or blocks."""
    assert bool(plan.rows) == bool(view.rows), "an empty plan with live requests"
    rows = _rows_of(view, plan)
    planned = _planned(plan)
    tokens_left = limits.max_num_batched_tokens - sum(row.count for row in plan.rows)
    blocks_used = _blocks_in_use(rows) + sum(_to_open(limits, r, planned[r.id].end) for r in rows)
    for row in rows:
        end = planned[row.id].end
        more = end < row.num_tokens and tokens_left > 0
        needs_block = max(_to_open(limits, row, end + 1) - _to_open(limits, row, end), 0)
        assert not (more and blocks_used + needs_block <= limits.num_blocks), f"{row.id} could go on"
    if plan.preempts or tokens_left == 0 or len(rows) == limits.max_num_seqs:
        return
    followers = _followers(view, plan)
    left_out = [row for row in view.rows if row.id not in planned and row.id not in followers]
    if left_out:
        wanted = [*rows, left_out[0]]
        if limits.admission == "reserve":
            assert _reserved(limits, wanted) > limits.num_blocks, f"{left_out[0].id} fits its reservation"
        else:
            needed = _blocks_in_use(wanted) + sum(_to_open(limits, row, _known(row)) for row in wanted)
            assert needed > limits.num_blocks, f"{left_out[0].id} fits"


def every_running_row_advances(limits: SchedulerLimits, view: SchedulerView, plan: StepPlan) -> None:
    planned = _planned(plan)
    for row in view.rows:
        if row.phase is Phase.RUNNING and row.id not in plan.preempts:
            assert row.id in planned, f"{row.id} is left out"
            assert planned[row.id].count >= 1, f"{row.id} does not advance"


def admits_by_age(limits: SchedulerLimits, view: SchedulerView, plan: StepPlan) -> None:
    followers = _followers(view, plan)
    admitted = {admission.id for admission in plan.admits}
    waiting = [row.id for row in view.rows if row.phase is Phase.WAITING and row.id not in followers]
    count = sum(id in admitted for id in waiting)
    assert all(id in admitted for id in waiting[:count]), "a younger row was admitted past an older one"


def preempts_only_the_youngest_and_only_for_need(
    limits: SchedulerLimits, view: SchedulerView, plan: StepPlan
) -> None:
    running = [row for row in view.rows if row.phase is Phase.RUNNING]
    count = len(plan.preempts)
    if not count:
        return
    assert list(plan.preempts) == [row.id for row in reversed(running)][:count], "not the youngest first"
    assert view.rows[0].id not in plan.preempts, "the oldest live request is a victim"
    assert not set(plan.preempts) & _planned(plan).keys(), "a victim is also planned"
    assert {admission.id for admission in plan.admits} <= {view.rows[0].id}, "preempted for a younger row"
    spared = running[: len(running) - count + 1]
    oldest = [view.rows[0]] if view.rows[0].phase is Phase.WAITING else []
    needed = _blocks_in_use([*spared, *oldest])
    needed += sum(_to_open(limits, row, row.num_computed + 1) for row in spared)
    needed += sum(_to_open(limits, row, _known(row)) for row in oldest)
    rows_short = len(spared) + len(oldest) > limits.max_num_seqs
    assert needed > limits.num_blocks or rows_short, f"{plan.preempts[-1]} was preempted without need"


def the_oldest_request_advances(limits: SchedulerLimits, view: SchedulerView, plan: StepPlan) -> None:
    if view.rows and limits.admission == "optimistic":
        assert view.rows[0].id in _planned(plan), "the oldest live request stands still"


def admitted_rows_fit_whole(limits: SchedulerLimits, view: SchedulerView, plan: StepPlan) -> None:
    """S12: with all known tokens of every planned row; the oldest row counts only others' minimums."""
    admitted = {admission.id for admission in plan.admits}
    rows = _rows_of(view, plan)
    if not admitted:
        return
    only_the_oldest = admitted == {view.rows[0].id} and limits.admission == "optimistic"
    needed = _blocks_in_use(rows)
    for row in rows:
        minimum = only_the_oldest and row.phase is Phase.RUNNING
        needed += _to_open(limits, row, row.num_computed + 1 if minimum else _known(row))
    assert needed <= limits.num_blocks, f"known tokens need {needed} blocks of {limits.num_blocks}"


def reservations_hold(limits: SchedulerLimits, view: SchedulerView, plan: StepPlan) -> None:
    if limits.admission == "reserve":
        assert plan.preempts == (), "preempted in reserve mode"
        assert _reserved(limits, _rows_of(view, plan)) <= limits.num_blocks, "more reserved than there is"


def followers_wait(limits: SchedulerLimits, view: SchedulerView, plan: StepPlan) -> None:
    followers = _followers(view, plan)
    for admission in plan.admits:
        assert admission.id not in followers, f"{admission.id} computes a block that is in the making"


def block_arithmetic_is_exact(limits: SchedulerLimits, view: SchedulerView, plan: StepPlan) -> None:
    """S4's arithmetic, whatever the plan: for any number of youngest victims, counts equal those of sets."""
    capacity = Capacity(view, limits.block_size)
    running = [row for row in view.rows if row.phase is Phase.RUNNING]
    assert capacity.num_available == limits.num_blocks - _blocks_in_use(running), "available"
    for count in range(len(running) + 1):
        kept, victims = running[:count], running[count:]
        released = capacity.released_by(victims)
        assert len(released) == _blocks_in_use(running) - _blocks_in_use(kept), f"released by {victims}"
        for row in view.rows:
            if row.phase is Phase.WAITING:
                pinned = _blocks_in_use([*kept, row]) - _blocks_in_use(kept)
                assert len(capacity.pinned_by(row, released)) == pinned, f"pinned by {row}"


RULES: dict[str, Rule] = {
    "S1-token-budget": keeps_the_token_budget,
    "S2-row-limit": plans_each_live_row_at_most_once,
    "S3-row-shape": rows_are_well_formed,
    "S4-capacity": fits_the_pool,
    "S5-pure": planning_is_pure,
    "S6-work-conserving": wastes_no_room,
    "S7-progress": every_running_row_advances,
    "S8-admission-by-age": admits_by_age,
    "S9-preemption": preempts_only_the_youngest_and_only_for_need,
    "S10-oldest-advances": the_oldest_request_advances,
    "S12-whole-prompt-fit": admitted_rows_fit_whole,
    "S14-reserve": reservations_hold,
    "S15-single-flight": followers_wait,
}


def check_all(limits: SchedulerLimits, view: SchedulerView, plan: StepPlan) -> None:
    """Raise AssertionError, naming the invariant, if the plan breaks any rule."""
    for name, rule in RULES.items():
        try:
            rule(limits, view, plan)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}\n{limits}\n{view}\n{plan}") from error
