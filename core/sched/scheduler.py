"""Continuous batching: what the next step computes, decided from a frozen view.

A plan is made in five parts, each from what the ones before have left of the step's tokens and blocks:

1. minimums    every running row gets one position; the youngest are preempted while blocks are short
2. oldest row  if the oldest live request waits, it is admitted now, at the expense of the youngest
3. prefill     running prompts get further tokens, in the order of the policy
4. admissions  waiting rows by age, each only if all its known positions fit
5. drafts      speculative positions, from what nobody else wanted
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from mvllm.core.errors import ConfigError, InvariantViolation, RequestRejected
from mvllm.core.request import Phase
from mvllm.core.sched.capacity import Capacity, known_positions, worst_case_blocks
from mvllm.core.sched.policy import POLICIES
from mvllm.core.step import Admission, PlannedRow, RowView, SchedulerView, StepPlan
from mvllm.core.types import BlockId, RequestId, ceil_div


class Scheduler:
    """Decides what a step computes.

    Owns its limits and nothing that changes: it keeps no queues and no state between calls, so equal views
    give equal plans. Does not allocate; every plan fits the view it was made from.
    """

    def __init__(
        self,
        *,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        block_size: int,
        num_blocks: int,
        admission: str = "optimistic",
        policy: str = "fcfs",
        max_step_drafts: int | None = None,
    ) -> None:
        """
        Args:
            max_num_batched_tokens: tokens per step, drafts included.
            max_num_seqs: rows per step; at most `max_num_batched_tokens`.
            block_size: tokens per KV block.
            num_blocks: blocks in the pool.
            admission: "optimistic" admits what fits now and preempts the youngest when room runs out;
                "reserve" admits only what fits in the worst case and never preempts.
            policy: a name in `policy.POLICIES`, the order in which prompts share a step's spare tokens.
            max_step_drafts: drafts per step, all rows together; None: as many as the tokens allow.

        Raises:
            ConfigError: a limit is out of range, or a name is unknown.
        """
        if min(max_num_seqs, block_size, num_blocks) < 1 or max_num_seqs > max_num_batched_tokens:
            raise ConfigError(
                f"limits must be at least 1 and max_num_seqs ({max_num_seqs}) at most max_num_batched_tokens "
                f"({max_num_batched_tokens}); block_size is {block_size}, num_blocks {num_blocks}"
            )
        if admission not in ("optimistic", "reserve"):
            raise ConfigError(f"admission must be 'optimistic' or 'reserve', got {admission!r}")
        if policy not in POLICIES:
            raise ConfigError(f"policy must be one of {', '.join(map(repr, POLICIES))}, got {policy!r}")
        self._max_tokens = max_num_batched_tokens
        self._max_rows = max_num_seqs
        self._block_size = block_size
        self._num_blocks = num_blocks
        self._reserve = admission == "reserve"
        self._prefill_order = POLICIES[policy]
        self._max_drafts = max_num_batched_tokens if max_step_drafts is None else max_step_drafts

    def refusal(self, num_prompt_tokens: int, total_limit: int) -> RequestRejected | None:
        """Why a request could never be served, even alone; None if it can be.

        Args:
            num_prompt_tokens: length of the prompt.
            total_limit: most tokens, prompt included, that the request can ever have.
        """
        needed = worst_case_blocks(total_limit, self._block_size)
        if needed <= self._num_blocks:
            return None
        largest = self._num_blocks * self._block_size + 1
        if num_prompt_tokens < largest:
            advice = f"set max_tokens to at most {largest - num_prompt_tokens} or enlarge the KV cache"
        else:
            advice = f"shorten the prompt to at most {largest - 1} tokens or enlarge the KV cache"
        return RequestRejected(
            f"a prompt of {num_prompt_tokens} tokens and up to {total_limit - num_prompt_tokens} new ones "
            f"need {needed} KV blocks of {self._block_size} tokens; "
            f"the cache has {self._num_blocks}: {advice}",
            needed=needed,
            available=self._num_blocks,
        )

    def plan(self, view: SchedulerView) -> StepPlan:
        """What the next step preempts, admits and computes. Pure; empty only for a view without rows.

        Raises:
            InvariantViolation: the view can't occur: a request in it could not be served even alone, or a
                reservation is not kept.
        """
        work = _PlanInProgress(Capacity(view, self._block_size), self._max_tokens)
        self._place_minimums(work)
        if work.prefilling:
            for row in self._prefill_order(work.prefilling):
                work.extend(row)
        if not work.preempts and len(work.running) < len(view.rows):
            self._admit(work)
        work.place_drafts(self._max_drafts)
        return work.finished()

    def _place_minimums(self, work: _PlanInProgress) -> None:
        """Parts 1 and 2: one position for every row that runs on, and the oldest row if it waits."""
        oldest = self._oldest_if_waiting(work.capacity.view)
        survivors = list(work.running)
        victims: list[RowView] = []
        while not self._fits(work.capacity, survivors, victims, oldest):
            last_to_keep = 1 if oldest is None else 0
            if self._reserve or len(survivors) <= last_to_keep:
                raise InvariantViolation(
                    f"{len(survivors)} running rows with {work.capacity.num_available} available blocks of "
                    f"{self._num_blocks} leave no room for the oldest request or break a reservation"
                )
            victims.append(survivors.pop())
        work.keep(survivors, victims)
        if oldest is not None:
            work.admit(oldest, work.capacity.released_by(victims))

    def _oldest_if_waiting(self, view: SchedulerView) -> RowView | None:
        """The row that others are preempted for; nobody where room is reserved."""
        if self._reserve or not view.rows or view.rows[0].phase is Phase.RUNNING:
            return None
        return view.rows[0]

    def _fits(
        self,
        capacity: Capacity,
        survivors: Sequence[RowView],
        victims: Sequence[RowView],
        oldest: RowView | None,
    ) -> bool:
        """Whether without the victims every survivor has its minimum and a waiting oldest row can start."""
        needed = capacity.minimum_blocks(survivors)
        released = capacity.released_by(victims)
        if oldest is not None:
            if len(survivors) >= self._max_rows:
                return False
            needed += capacity.new_blocks(oldest, known_positions(oldest))
            needed += len(capacity.pinned_by(oldest, released))
        return needed <= capacity.num_available + len(released)

    def _admit(self, work: _PlanInProgress) -> None:
        """Part 4. Younger rows pass a follower, which waits for a block in the making, and nobody else."""
        if not work.tokens_left or len(work.ends) >= self._max_rows:
            return
        capacity = work.capacity
        in_the_making: set[Hashable] = set()
        spare = self._spare_blocks(work)
        for row in capacity.view.rows:
            if row.id in work.ends:
                key = row.next_block_key if row.phase is Phase.RUNNING else row.probe.next_block_key
            elif row.probe.next_block_key in in_the_making:
                continue
            else:
                cost = self._admission_cost(work, row)
                if cost > spare or not work.tokens_left or len(work.ends) >= self._max_rows:
                    return
                spare -= cost
                work.admit(row)
                key = row.probe.next_block_key
            if key is not None:
                in_the_making.add(key)

    def _spare_blocks(self, work: _PlanInProgress) -> int:
        """Blocks that admissions may use, less those that the rows of the plan still count on."""
        capacity = work.capacity
        planned = [row for row in capacity.view.rows if row.id in work.ends]
        if self._reserve:
            reserved = sum(worst_case_blocks(row.total_limit, self._block_size) for row in planned)
            return self._num_blocks - reserved
        promised = sum(capacity.promised_blocks(row, work.ends[row.id]) for row in planned)
        return work.blocks_left - promised

    def _admission_cost(self, work: _PlanInProgress, row: RowView) -> int:
        """Spare blocks that admitting the row uses up."""
        if self._reserve:
            return worst_case_blocks(row.total_limit, self._block_size)
        new_pins = work.capacity.pinned_by(row) - work.pinned
        return work.capacity.new_blocks(row, known_positions(row)) + len(new_pins)


class _PlanInProgress:
    """Working numbers of one plan.

    Owns the tokens and blocks not yet given away and the rows placed so far; lives for one call of
    `Scheduler.plan`. Does not decide who gets what.
    """

    def __init__(self, capacity: Capacity, num_tokens: int) -> None:
        self.capacity = capacity
        self.running = [row for row in capacity.view.rows if row.phase is Phase.RUNNING]
        self.prefilling: list[RowView] = []
        self.preempts: tuple[RequestId, ...] = ()
        self.admits: list[Admission] = []
        self.tokens_left = num_tokens
        self.blocks_left = capacity.num_available
        self.pinned: set[BlockId] = set()
        self.ends: dict[RequestId, int] = {}  # where the planned positions of each placed row end
        self.drafts: dict[RequestId, int] = {}

    def keep(self, survivors: Sequence[RowView], victims: Sequence[RowView]) -> None:
        """Preempt the victims and place every survivor with its minimum; mutates all numbers."""
        self.preempts = tuple([row.id for row in victims])
        self.blocks_left += len(self.capacity.released_by(victims)) - self.capacity.minimum_blocks(survivors)
        self.tokens_left -= len(survivors)
        for row in survivors:
            self.ends[row.id] = row.num_computed + 1
            if row.num_tokens - row.num_computed > 1:
                self.prefilling.append(row)

    def admit(self, row: RowView, released: frozenset[BlockId] = frozenset()) -> None:
        """Place a waiting row with as many tokens as there are; pins its hit."""
        new_pins = self.capacity.pinned_by(row, released) - self.pinned
        self.pinned |= new_pins
        self.blocks_left -= len(new_pins)
        self.admits.append(Admission(row.id, row.probe.hit_block_ids))
        self.ends[row.id] = self.capacity.start(row)
        self.extend(row)

    def extend(self, row: RowView) -> None:
        """Move a placed row's end towards its last token, as far as tokens and blocks allow."""
        self.ends[row.id] += self._take(row, row.num_tokens - self.ends[row.id])

    def place_drafts(self, most: int) -> None:
        """Part 5, for every placed row that reaches its last token, at most `most` drafts in all; mutates
        tokens, blocks and drafts."""
        for row in self.capacity.view.rows:
            if row.max_drafts and self.ends.get(row.id) == row.num_tokens:
                wanted = min(row.max_drafts, row.total_limit - 1 - row.num_tokens, most)
                self.drafts[row.id] = count = self._take(row, wanted)
                most -= count

    def _take(self, row: RowView, wanted: int) -> int:
        """Use up tokens and blocks for at most `wanted` positions past the row's end; returns how many."""
        block_size = self.capacity.block_size
        end = self.ends[row.id]
        covered = max(self.capacity.num_held(row), ceil_div(end, block_size))
        count = min(wanted, self.tokens_left, (covered + self.blocks_left) * block_size - end)
        self.tokens_left -= count
        self.blocks_left -= max(0, ceil_div(end + count, block_size) - covered)
        return count

    def finished(self) -> StepPlan:
        """The plan, rows by age."""
        rows = []
        for row in self.capacity.view.rows:
            end = self.ends.get(row.id)
            if end is not None:
                start = self.capacity.start(row)
                rows.append(PlannedRow(row.id, start, end - start, self.drafts.get(row.id, 0)))
        return StepPlan(self.preempts, tuple(self.admits), tuple(rows))
