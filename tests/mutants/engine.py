"""Planted bugs of the whole engine. Each is one mistake that a change could plausibly make.

`plant(patch)` puts the bug in through a pytest MonkeyPatch, which takes it out again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pytest import MonkeyPatch

from mvllm.core.batch import batcher
from mvllm.core.batch.sampling_row import SamplingRow
from mvllm.core.engine import decisions, engine, forward
from mvllm.core.engine.request_table import RequestState, RequestTable
from mvllm.core.engine.request_text import RequestText
from mvllm.core.kv.block_pool import BlockPool
from mvllm.core.kv.kv_manager import KvManager
from mvllm.core.kv.prefix_trie import PrefixTrie
from mvllm.core.request import Phase
from mvllm.core.sched.scheduler import Scheduler
from mvllm.core.step import (
    Event,
    Finished,
    ForwardBatch,
    KvCommit,
    PlannedRow,
    RowDecision,
    SchedulerView,
    StepOutput,
    StepPlan,
)
from mvllm.core.types import BlockId, RequestId

Rows = Sequence[PlannedRow]
BatchRows = Sequence[batcher.BatchRow]
States = Sequence[RequestState]
Outcomes = tuple[list[decisions.RowOutcome], Exception | None]


@dataclass(frozen=True)
class Mutant:
    """`invariant` names what breaks; `faults`: shows only in scripts with injected faults."""

    name: str
    invariant: str
    plant: Callable[[MonkeyPatch], None]
    faults: bool = False


def _wrong_slot_past_the_first_block(patch: MonkeyPatch) -> None:
    pack = batcher.Batcher.pack

    def planted(self: batcher.Batcher, rows: BatchRows) -> ForwardBatch:
        batch = pack(self, rows)
        first_slots = batch.block_tables[0][0] * self._block_size
        slots = batch.slots.copy()
        if batch.positions[-1] >= self._block_size:
            slots[-1] = first_slots
        return replace(batch, slots=slots)

    patch.setattr(batcher.Batcher, "pack", planted)


def _memo_that_compares_lengths_only(patch: MonkeyPatch) -> None:
    def planted(self: batcher.Batcher, rows: BatchRows) -> NDArray[np.int32]:
        for row in rows:
            if row.id not in self._packed or len(self._packed[row.id][0]) != len(row.table):
                self._packed[row.id] = (row.table, np.array(row.table, np.int32))
        tables = [self._packed[row.id][0] for row in rows]
        width = max(map(len, tables))
        return np.array([[*table, *[-1] * (width - len(table))] for table in tables], np.int32)

    patch.setattr(batcher.Batcher, "_pack_tables", planted)


def _hit_that_ignores_earlier_blocks(patch: MonkeyPatch) -> None:
    def planted(
        self: PrefixTrie, token_ids: Sequence[int], salt: str, limit: int, known: object = ()
    ) -> list[BlockId]:
        by_tokens = {key[1]: block for key, block in self._block_by_key.items()}
        size = self._block_size
        path: list[BlockId] = []
        for end in range(size, limit + 1, size):
            block = by_tokens.get(tuple(token_ids[end - size : end]))
            if block is None or block in path:
                break
            path.append(block)
        return path

    patch.setattr(PrefixTrie, "lookup", planted)
    _without_kv_checks(patch)


def _stale_hash_after_eviction(patch: MonkeyPatch) -> None:
    remove = PrefixTrie._remove

    def planted(self: PrefixTrie, block_id: BlockId) -> None:
        key = self._nodes[block_id].key
        remove(self, block_id)
        self._block_by_key[key] = block_id

    patch.setattr(PrefixTrie, "_remove", planted)
    _without_kv_checks(patch)


def _published_before_it_is_computed(patch: MonkeyPatch) -> None:
    commit = KvManager.commit

    def planted(self: KvManager, commits: Sequence[KvCommit]) -> None:
        commit(self, commits)
        for one in commits:
            table, size = self._tables[one.id], self.block_size
            index = one.num_computed // size
            parent_indexed = index == 0 or table.block_ids[index - 1] in self._trie
            if one.num_computed % size and len(one.token_ids) >= (index + 1) * size and parent_indexed:
                self._trie.insert(self._key(table, index, one.token_ids), table.block_ids[index])

    patch.setattr(KvManager, "commit", planted)
    _without_kv_checks(patch)


def _without_kv_checks(patch: MonkeyPatch) -> None:
    """Silence the KV manager's own checks, so that only wrong tags can give a bug away."""
    patch.setattr(KvManager, "check_integrity", lambda self: None)
    patch.setattr(PrefixTrie, "is_path", lambda self, block_ids, salt: True)
    patch.setattr(BlockPool, "_require", lambda self, verb, block_ids, *legal: None)


def _newest_token_counted_as_computed(patch: MonkeyPatch) -> None:
    patch.setattr(engine, "KvCommit", lambda id, tokens, computed: KvCommit(id, tokens, computed + 1))


def _cancel_keeps_the_blocks(patch: MonkeyPatch) -> None:
    release = KvManager.release
    end = engine.Engine._end

    def planted(self: engine.Engine, id: RequestId, phase: Phase, *args: Any, **kwargs: Any) -> Finished:
        if phase is Phase.CANCELLED:
            patch.setattr(KvManager, "release", lambda self, id: None)
        try:
            return end(self, id, phase, *args, **kwargs)
        finally:
            patch.setattr(KvManager, "release", release)

    patch.setattr(engine.Engine, "_end", planted)


def _cancel_during_the_forward_comes_too_late(patch: MonkeyPatch) -> None:
    step, apply = engine.Engine.step, engine.Engine._apply_commands

    def planted(self: engine.Engine) -> tuple[Event, ...]:
        calls: list[int] = []

        def only_at_the_boundary(engine_self: engine.Engine, events: list[Event]) -> None:
            if not calls:
                calls.append(1)
                apply(engine_self, events)

        patch.setattr(engine.Engine, "_apply_commands", only_at_the_boundary)
        return step(self)

    patch.setattr(engine.Engine, "step", planted)


def _cancel_twice_ends_twice(patch: MonkeyPatch) -> None:
    apply = engine.Engine._apply_commands

    def planted(self: engine.Engine, events: list[Event]) -> None:
        before = len(events)
        apply(self, events)
        events += events[before:]

    patch.setattr(engine.Engine, "_apply_commands", planted)


def _preemption_turns_output_into_prompt(patch: MonkeyPatch) -> None:
    preempt = RequestTable.preempt

    def planted(self: RequestTable, id: RequestId) -> None:
        preempt(self, id)
        state = self._live[id]
        state.request = replace(state.request, prompt_token_ids=tuple(state.token_ids))

    patch.setattr(RequestTable, "preempt", planted)


def _preemption_keeps_the_computed_count(patch: MonkeyPatch) -> None:
    preempt = RequestTable.preempt

    def planted(self: RequestTable, id: RequestId) -> None:
        num_computed = self._live[id].num_computed
        preempt(self, id)
        self._live[id].num_computed = num_computed

    patch.setattr(RequestTable, "preempt", planted)


def _sampling_in_the_middle_of_a_prompt(patch: MonkeyPatch) -> None:
    patch.setattr(forward, "decide", _decide_every_row)
    batch_rows = forward.batch_rows

    def planted(rows: Rows, states: States, *others: Any) -> BatchRows:
        return [
            row._replace(sampling=state.sampling, num_logit_rows=1)
            for row, state in zip(batch_rows(rows, states, *others), states, strict=True)
        ]

    patch.setattr(forward, "batch_rows", planted)


def _decide_every_row(
    rows: Rows, states: States, drafts: decisions.Drafts, output: StepOutput
) -> list[decisions.RowOutcome]:
    results = decisions._Results(output.tokens.tolist(), output.status.tolist(), output)
    pairs = enumerate(zip(rows, states, strict=True))
    return [decisions._decide_token(row, state, results, index) for index, (row, state) in pairs]


def _seed_lost(patch: MonkeyPatch) -> None:
    of = SamplingRow.of
    patch.setattr(SamplingRow, "of", lambda request: replace(of(request), seed=0))


def _position_within_the_chunk_instead_of_the_sequence(patch: MonkeyPatch) -> None:
    pack = batcher.Batcher.pack

    def planted(self: batcher.Batcher, rows: BatchRows) -> ForwardBatch:
        batch = pack(self, rows)
        position = (
            batch.logit_rows
            - batch.row_starts[np.searchsorted(batch.row_starts, batch.logit_rows, "right") - 1]
        )
        return replace(batch, sampling=replace(batch.sampling, position=position.astype(np.int32)))

    patch.setattr(batcher.Batcher, "pack", planted)


def _min_tokens_ignored(patch: MonkeyPatch) -> None:
    patch.setattr(SamplingRow, "bias_at", lambda self, num_output_tokens: self.bias)


def _one_token_too_many(patch: MonkeyPatch) -> None:
    token_end = decisions.token_end
    patch.setattr(
        decisions, "token_end", lambda request, token, num_output: token_end(request, token, num_output - 1)
    )


def _held_back_text_lost(patch: MonkeyPatch) -> None:
    patch.setattr(RequestText, "finish", lambda self, *, search: ("", None))


def _failed_row_is_committed(patch: MonkeyPatch) -> None:
    def planted(row: PlannedRow, message: str) -> decisions.RowOutcome:
        return decisions.RowOutcome(RowDecision(row.id, row.end, finish_reason="error"))

    patch.setattr(decisions, "failed", planted)


def _failed_step_fails_everyone(patch: MonkeyPatch) -> None:
    def planted(self: forward.ForwardRunner, rows: Rows, states: States) -> Outcomes:
        return [decisions.failed(row, "the model failed") for row in rows], None

    patch.setattr(forward.ForwardRunner, "_run_singly", planted)


def _endless_single_retries(patch: MonkeyPatch) -> None:
    def planted(self: forward.ForwardRunner, rows: Rows, states: States) -> Outcomes:
        unchanged = [
            decisions.RowOutcome(RowDecision(row.id, row.start), text_after=state.text)
            for row, state in zip(rows, states, strict=True)
        ]
        return unchanged, None

    patch.setattr(forward.ForwardRunner, "_run_singly", planted)


def _youngest_first(patch: MonkeyPatch) -> None:
    plan = Scheduler.plan

    def planted(self: Scheduler, view: SchedulerView) -> StepPlan:
        return plan(self, replace(view, rows=tuple(reversed(view.rows))))

    patch.setattr(Scheduler, "plan", planted)


MUTANTS = (
    Mutant("wrong slot past the first block", "K1, K2", _wrong_slot_past_the_first_block),
    Mutant("memo of tables that compares lengths only", "K1", _memo_that_compares_lengths_only),
    Mutant("hit that ignores earlier blocks", "K1, T1", _hit_that_ignores_earlier_blocks),
    Mutant("stale hash after eviction", "K1, T8", _stale_hash_after_eviction),
    Mutant("published before it is computed", "K1, K4", _published_before_it_is_computed),
    Mutant("newest token counted as computed", "K3", _newest_token_counted_as_computed),
    Mutant("cancel keeps the blocks", "L3, L4", _cancel_keeps_the_blocks),
    Mutant("cancel during the forward comes too late", "L5", _cancel_during_the_forward_comes_too_late),
    Mutant("cancel twice ends twice", "L2", _cancel_twice_ends_twice),
    Mutant("preemption turns output into prompt", "L7, D1", _preemption_turns_output_into_prompt),
    Mutant("preemption keeps the computed count", "K1, L7", _preemption_keeps_the_computed_count),
    Mutant("sampling in the middle of a prompt", "L7, S13", _sampling_in_the_middle_of_a_prompt),
    Mutant("seed lost", "L7", _seed_lost),
    Mutant("position within the chunk", "L7", _position_within_the_chunk_instead_of_the_sequence),
    Mutant("min_tokens ignored", "L8", _min_tokens_ignored),
    Mutant("one token too many", "L8, L9", _one_token_too_many),
    Mutant("held-back text lost", "L2, L8", _held_back_text_lost),
    Mutant("failed row is committed", "L6", _failed_row_is_committed, faults=True),
    Mutant("failed step fails everyone", "L6", _failed_step_fails_everyone, faults=True),
    Mutant("endless retries", "L6, S10", _endless_single_retries, faults=True),
    Mutant("youngest first", "S10", _youngest_first),
)
