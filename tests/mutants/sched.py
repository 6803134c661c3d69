"""Planted scheduler bugs: each replaces one function, and some rule of the scheduler must notice."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from mvllm.core.request import Phase
from mvllm.core.sched import scheduler as module
from mvllm.core.sched.capacity import NO_BLOCKS, Capacity
from mvllm.core.sched.scheduler import Scheduler, _PlanInProgress
from mvllm.core.step import RowView, SchedulerView, StepPlan
from mvllm.core.types import BlockId
from tests.mutants.mutant import Mutant


def _pins_nothing(
    self: Capacity, row: RowView, released: frozenset[BlockId] = NO_BLOCKS
) -> frozenset[BlockId]:
    return NO_BLOCKS


def _pins_only_what_was_idle_before_preempting(
    self: Capacity, row: RowView, released: frozenset[BlockId] = NO_BLOCKS
) -> frozenset[BlockId]:
    return row.probe.idle_block_ids


def _counts_shared_blocks_as_released(self: Capacity, victims: Collection[RowView]) -> frozenset[BlockId]:
    return frozenset(block for row in victims for block in row.block_ids)


def _promises_nothing(self: Capacity, row: RowView, end: int) -> int:
    return 0


def _fits_if_the_first_token_fits(row: RowView) -> int:
    return 1


def _wants_a_block_for_the_last_token(row: RowView) -> int:
    return row.num_tokens + 1


def _reserves_only_one_block(total_limit: int, block_size: int) -> int:
    return 1


def _oldest_waits_its_turn(self: Scheduler, view: SchedulerView) -> RowView | None:
    return None


_real_admit = Scheduler._admit
_real_keep = _PlanInProgress.keep
_real_extend = _PlanInProgress.extend
_real_place_drafts = _PlanInProgress.place_drafts
_real_plan = Scheduler.plan


def _with_rows(work: _PlanInProgress, rows: list[RowView]) -> None:
    view = dataclasses.replace(work.capacity.view, rows=tuple(rows))
    work.capacity = dataclasses.replace(work.capacity, view=view)


def _admits_the_youngest_first(self: Scheduler, work: _PlanInProgress) -> None:
    view = work.capacity.view
    _with_rows(work, sorted(view.rows, key=lambda row: row.phase is Phase.WAITING)[::-1])
    _real_admit(self, work)
    _with_rows(work, list(view.rows))


def _skips_ahead_of_an_older_row(self: Scheduler, work: _PlanInProgress) -> None:
    view = work.capacity.view
    _real_admit(self, work)
    for row in view.rows:
        if row.id not in work.ends:
            _with_rows(work, [other for other in view.rows if other.id in work.ends or other is row])
            _real_admit(self, work)
    _with_rows(work, list(view.rows))


def _admits_followers(self: Scheduler, work: _PlanInProgress) -> None:
    view = work.capacity.view
    _with_rows(work, [dataclasses.replace(row, next_block_key=None) for row in view.rows])
    _real_admit(self, work)
    _with_rows(work, list(view.rows))


def _never_admits_behind_running_rows(self: Scheduler, work: _PlanInProgress) -> None:
    return None


def _preempts_the_oldest(self: _PlanInProgress, survivors: list[RowView], victims: list[RowView]) -> None:
    rows = [*survivors, *reversed(victims)]
    _real_keep(self, rows[len(victims) :], rows[: len(victims)])


def _chunk_ignores_the_token_budget(self: _PlanInProgress, row: RowView) -> None:
    self.tokens_left += 3
    _real_extend(self, row)


def _leaves_running_prefills_at_their_minimum(self: _PlanInProgress, row: RowView) -> None:
    if row.phase is Phase.WAITING:
        _real_extend(self, row)


def _drafts_past_the_total_limit(self: _PlanInProgress, most: int) -> None:
    view = self.capacity.view
    _with_rows(self, [dataclasses.replace(row, total_limit=row.total_limit + 1) for row in view.rows])
    _real_place_drafts(self, most)
    _with_rows(self, list(view.rows))


def _every_row_may_have_all_the_drafts(self: _PlanInProgress, most: int) -> None:
    view = self.capacity.view
    for row in view.rows:
        _with_rows(self, [row])
        _real_place_drafts(self, most)
    _with_rows(self, list(view.rows))


def _forgets_the_youngest_row_that_runs(self: Scheduler, view: SchedulerView) -> StepPlan:
    plan = _real_plan(self, view)
    return dataclasses.replace(plan, rows=plan.rows[:-1]) if len(plan.rows) > 1 else plan


def _plans_a_waiting_row_without_admitting_it(self: Scheduler, view: SchedulerView) -> StepPlan:
    return dataclasses.replace(_real_plan(self, view), admits=())


def _remembers_the_last_step(self: Scheduler, view: SchedulerView) -> StepPlan:
    plan = _real_plan(self, view)
    self._max_tokens = max(self._max_rows, self._max_tokens - len(plan.rows))
    return plan


MUTANTS: dict[str, Mutant] = {
    "pins nothing": Mutant(Capacity, "pinned_by", _pins_nothing, "S4-capacity"),
    "counts a pinned block of a victim as released": Mutant(
        Capacity, "pinned_by", _pins_only_what_was_idle_before_preempting, "S4-block-arithmetic"
    ),
    "counts shared blocks as released": Mutant(
        Capacity, "released_by", _counts_shared_blocks_as_released, "S4-capacity"
    ),
    "promises running prompts nothing": Mutant(
        Capacity, "promised_blocks", _promises_nothing, "S12-whole-prompt-fit"
    ),
    "admits if the first token fits": Mutant(
        module, "known_positions", _fits_if_the_first_token_fits, "S12-whole-prompt-fit"
    ),
    "wants a block for the last token": Mutant(
        module, "known_positions", _wants_a_block_for_the_last_token, "S6-some-plan-exists"
    ),
    "reserves one block": Mutant(module, "worst_case_blocks", _reserves_only_one_block, "S14-reserve"),
    "lets the oldest wait its turn": Mutant(
        Scheduler, "_oldest_if_waiting", _oldest_waits_its_turn, "S10-oldest-advances"
    ),
    "admits the youngest first": Mutant(
        Scheduler, "_admit", _admits_the_youngest_first, "S8-admission-by-age"
    ),
    "skips ahead of an older row": Mutant(
        Scheduler, "_admit", _skips_ahead_of_an_older_row, "S8-admission-by-age"
    ),
    "admits followers": Mutant(Scheduler, "_admit", _admits_followers, "S15-single-flight"),
    "never admits behind running rows": Mutant(
        Scheduler, "_admit", _never_admits_behind_running_rows, "S6-work-conserving"
    ),
    "preempts the oldest": Mutant(_PlanInProgress, "keep", _preempts_the_oldest, "S9-preemption"),
    "ignores the token budget in a chunk": Mutant(
        _PlanInProgress, "extend", _chunk_ignores_the_token_budget, "S1-token-budget"
    ),
    "leaves running prompts at their minimum": Mutant(
        _PlanInProgress, "extend", _leaves_running_prefills_at_their_minimum, "S6-work-conserving"
    ),
    "drafts past the total limit": Mutant(
        _PlanInProgress, "place_drafts", _drafts_past_the_total_limit, "S3-row-shape"
    ),
    "gives every row all the drafts": Mutant(
        _PlanInProgress, "place_drafts", _every_row_may_have_all_the_drafts, "S1-token-budget"
    ),
    "forgets the youngest row": Mutant(Scheduler, "plan", _forgets_the_youngest_row_that_runs, "S7-progress"),
    "remembers the last step": Mutant(Scheduler, "plan", _remembers_the_last_step, "S5-pure"),
    "plans a waiting row without admitting it": Mutant(
        Scheduler, "plan", _plans_a_waiting_row_without_admitting_it, "S2-row-limit"
    ),
}
