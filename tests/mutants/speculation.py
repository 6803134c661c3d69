"""Planted bugs of speculation. Each is one mistake that a change could plausibly make.

`plant(patch)` puts the bug in through a pytest MonkeyPatch, which takes it out again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from pytest import MonkeyPatch

from mvllm.core.batch import sampling_arrays
from mvllm.core.batch.sampling_arrays import LogitRow, SamplingPacker
from mvllm.core.batch.token_counts import TokenCounts
from mvllm.core.engine import decisions, engine, forward, speculator
from mvllm.core.engine.decisions import Drafts, RowOutcome, TokenOutcome
from mvllm.core.engine.request_table import RequestState
from mvllm.core.engine.speculator import Speculator
from mvllm.core.kv.block_table import BlockTable
from mvllm.core.kv.kv_manager import KvManager
from mvllm.core.step import (
    KvCommit,
    KvGrant,
    PlannedRow,
    RowStatus,
    SamplingArrays,
    StepPlan,
)
from mvllm.core.types import RequestId, TokenId
from tests.mutants.engine import Mutant

Tokens = Sequence[TokenId]
States = Sequence[RequestState]

_accepted_length = decisions.accepted_length
_add_token = decisions.add_token
_decide_drafts = decisions._decide_drafts
_logprobs = decisions._logprobs


# --- verifying -----------------------------------------------------------------------------------------


def _one_draft_too_many(patch: MonkeyPatch) -> None:
    patch.setattr(
        decisions,
        "accepted_length",
        lambda drafts, chosen: min(len(drafts), _accepted_length(drafts, chosen) + 1),
    )


def _one_draft_too_few(patch: MonkeyPatch) -> None:
    patch.setattr(
        decisions, "accepted_length", lambda drafts, chosen: max(0, _accepted_length(drafts, chosen) - 1)
    )


def _accepts_past_a_mismatch(patch: MonkeyPatch) -> None:
    patch.setattr(
        decisions,
        "accepted_length",
        lambda drafts, chosen: sum(a == b for a, b in zip(drafts, chosen, strict=False)),
    )


def _takes_the_drafts_at_their_word(patch: MonkeyPatch) -> None:
    patch.setattr(decisions, "accepted_length", lambda drafts, chosen: len(drafts))


def _only_the_last_token_can_end(patch: MonkeyPatch) -> None:
    def planted(row: PlannedRow, state: RequestState, drafts: Tokens, results: Any, first: int) -> RowOutcome:
        last = first + _accepted_length(drafts, results.tokens[first : first + len(drafts)])
        calls: list[int] = []

        def without_an_end(*args: Any) -> TokenOutcome:
            calls.append(1)
            outcome = _add_token(*args)
            ended = first + len(calls) - 1 == last
            return outcome if ended else outcome._replace(finish_reason=None, stop_reason=None)

        patch.setattr(decisions, "add_token", without_an_end)
        return _decide_drafts(row, state, drafts, results, first)

    patch.setattr(decisions, "_decide_drafts", planted)


def _a_bad_row_past_the_mismatch_fails_the_request(patch: MonkeyPatch) -> None:
    def planted(row: PlannedRow, state: RequestState, drafts: Tokens, results: Any, first: int) -> RowOutcome:
        statuses = results.statuses[first : first + len(drafts) + 1]
        if any(status != RowStatus.OK for status in statuses):
            return decisions.failed(row, "unusable logits")
        return _decide_drafts(row, state, drafts, results, first)

    patch.setattr(decisions, "_decide_drafts", planted)


def _logprobs_of_the_first_token_for_all(patch: MonkeyPatch) -> None:
    def planted(row: PlannedRow, state: RequestState, drafts: Tokens, results: Any, first: int) -> RowOutcome:
        patch.setattr(
            decisions,
            "_logprobs",
            lambda state, output, logit_row, token: _logprobs(state, output, first, token),
        )
        return _decide_drafts(row, state, drafts, results, first)

    patch.setattr(decisions, "_decide_drafts", planted)


def _every_draft_counts_as_accepted(patch: MonkeyPatch) -> None:
    def planted(row: PlannedRow, state: RequestState, drafts: Tokens, results: Any, first: int) -> RowOutcome:
        outcome = _decide_drafts(row, state, drafts, results, first)
        return replace(outcome, decision=replace(outcome.decision, num_accepted=len(drafts)))

    patch.setattr(decisions, "_decide_drafts", planted)


def _the_target_s_token_counts_as_accepted(patch: MonkeyPatch) -> None:
    def planted(row: PlannedRow, state: RequestState, drafts: Tokens, results: Any, first: int) -> RowOutcome:
        outcome = _decide_drafts(row, state, drafts, results, first)
        count = min(len(outcome.decision.new_token_ids), len(drafts))
        return replace(outcome, decision=replace(outcome.decision, num_accepted=count))

    patch.setattr(decisions, "_decide_drafts", planted)


# --- sampling ------------------------------------------------------------------------------------------


def _penalties_ignore_earlier_drafts(patch: MonkeyPatch) -> None:
    def planted(counts: TokenCounts, drafts: Tokens) -> TokenCounts:
        return counts

    patch.setattr(sampling_arrays, "_with_drafts", planted)


def _drafts_stay_in_the_counts(patch: MonkeyPatch) -> None:
    patch.setattr(TokenCounts, "copy", lambda self: self)


def _min_tokens_counts_steps(patch: MonkeyPatch) -> None:
    pack_biases = sampling_arrays._pack_biases

    def planted(logit_rows: Sequence[LogitRow]) -> Any:
        return pack_biases([(sampling, p - len(drafts), drafts) for sampling, p, drafts in logit_rows])

    patch.setattr(sampling_arrays, "_pack_biases", planted)


def _noise_of_the_first_position_for_all(patch: MonkeyPatch) -> None:
    pack = SamplingPacker.pack

    def planted(self: SamplingPacker, logit_rows: Sequence[LogitRow]) -> SamplingArrays:
        arrays = pack(self, logit_rows)
        position = arrays.position.copy()
        for index, (_, _, drafts) in enumerate(logit_rows):
            position[index] -= len(drafts)
        return replace(arrays, position=position)

    patch.setattr(SamplingPacker, "pack", planted)


# --- blocks --------------------------------------------------------------------------------------------


def _blocks_of_rejected_drafts_are_kept(patch: MonkeyPatch) -> None:
    commit = KvManager.commit

    def planted(self: KvManager, commits: Sequence[KvCommit]) -> None:
        with patch.context() as within:
            within.setattr(BlockTable, "truncate", lambda self, num_blocks: ())
            commit(self, commits)

    patch.setattr(KvManager, "commit", planted)


def _rejected_drafts_count_as_computed(patch: MonkeyPatch) -> None:
    def planted(id: RequestId, tokens: Sequence[TokenId], computed: int) -> KvCommit:
        return KvCommit(id, tokens, min(computed + 1, len(tokens)))

    patch.setattr(engine, "KvCommit", planted)


def _blocks_of_drafts_are_published(patch: MonkeyPatch) -> None:
    """A full block goes into the trie under the tokens that the drafts had, before they are verified."""
    run = forward.ForwardRunner.run

    def planted(
        self: forward.ForwardRunner,
        rows: Sequence[PlannedRow],
        states: States,
        grant: KvGrant,
        drafts: Drafts,
    ) -> forward.ForwardResult:
        kv = self._kv
        for row, state, row_drafts in zip(rows, states, drafts, strict=True):
            table = kv._tables[row.id]
            index = table.num_computed // kv.block_size
            drafted = [*state.token_ids, *row_drafts]
            parent_indexed = index == 0 or table.block_ids[index - 1] in kv._trie
            if row_drafts and parent_indexed and len(drafted) >= (index + 1) * kv.block_size:
                kv._trie.insert(kv._key(table, index, drafted), table.block_ids[index])
        return run(self, rows, states, grant, drafts)

    patch.setattr(forward.ForwardRunner, "run", planted)
    patch.setattr(KvManager, "check_integrity", lambda self: None)


# --- the drafter ---------------------------------------------------------------------------------------


def _the_drafter_keeps_ended_rows(patch: MonkeyPatch) -> None:
    patch.setattr(Speculator, "release", lambda self, id: self._policy.release(id))


def _the_drafter_keeps_preempted_rows(patch: MonkeyPatch) -> None:
    begin = engine.Engine._begin

    def planted(self: engine.Engine, plan: StepPlan) -> tuple[list[RequestState], KvGrant]:
        with patch.context() as within:
            within.setattr(Speculator, "release", lambda self, id: None)
            return begin(self, plan)

    patch.setattr(engine.Engine, "_begin", planted)


def _the_policy_keeps_ended_rows(patch: MonkeyPatch) -> None:
    patch.setattr(Speculator, "release", lambda self, id: self._drafter.release(id))


def _the_policy_hears_of_rows_after_their_end(patch: MonkeyPatch) -> None:
    observe, finish = Speculator.observe, engine.Engine._finish

    def late(self: engine.Engine, *args: Any) -> None:
        finish(self, *args)
        for call in calls:
            call()
        calls.clear()

    calls: list[Any] = []
    patch.setattr(
        Speculator,
        "observe",
        lambda self, *args, **kwargs: calls.append(lambda: observe(self, *args, **kwargs)),
    )
    patch.setattr(engine.Engine, "_finish", late)


def _a_broken_drafter_breaks_the_step(patch: MonkeyPatch) -> None:
    @contextmanager
    def planted(self: Speculator, culprit: object) -> Iterator[None]:
        yield

    patch.setattr(Speculator, "_contained", planted)


def _proposals_go_unchecked(patch: MonkeyPatch) -> None:
    def planted(proposals: Any, rows: Any, vocab_size: int) -> dict[RequestId, tuple[TokenId, ...]]:
        return {row.id: tuple(proposal) for row, proposal in zip(rows, proposals, strict=False)}

    patch.setattr(speculator, "_checked", planted)


def _the_drafter_s_limit_is_ignored(patch: MonkeyPatch) -> None:
    wishes = Speculator.wishes

    def planted(self: Speculator, running: States) -> Mapping[RequestId, int]:
        return dict.fromkeys(wishes(self, running), 8)

    patch.setattr(Speculator, "wishes", planted)


def _the_drafter_is_left_open(patch: MonkeyPatch) -> None:
    patch.setattr(Speculator, "close", lambda self: None)


def _rows_are_rerun_with_their_drafts(patch: MonkeyPatch) -> None:
    """What broke the batch may be one row's drafts; alone, that row would then fail for its drafter."""
    run = forward.ForwardRunner.run

    def planted(
        self: forward.ForwardRunner,
        rows: Sequence[PlannedRow],
        states: States,
        grant: KvGrant,
        drafts: Drafts,
    ) -> forward.ForwardResult:
        def singly(_: forward.ForwardRunner, rows: Any, states: Any) -> Any:
            outcomes, errors = [], []
            for row, state, row_drafts in zip(rows, states, drafts, strict=True):
                fresh = self._kv.grant(StepPlan(rows=(row,)), {})
                try:
                    outcomes += self._forward([row], [state], fresh, [row_drafts])
                except Exception as error:
                    outcomes.append(decisions.failed(row, str(error)))
                    errors.append(error)
            return outcomes, errors[-1] if len(errors) == len(rows) else None

        with patch.context() as within:
            within.setattr(forward.ForwardRunner, "_run_singly", singly)
            return run(self, rows, states, grant, drafts)

    patch.setattr(forward.ForwardRunner, "run", planted)


MUTANTS = (
    Mutant("one draft too many", "V1, K1", _one_draft_too_many),
    Mutant("one draft too few", "V4, V7", _one_draft_too_few),
    Mutant("accepts past a mismatch", "V1, V2", _accepts_past_a_mismatch),
    Mutant("takes the drafts at their word", "V2, V3", _takes_the_drafts_at_their_word),
    Mutant("only the last token can end", "V5, L8", _only_the_last_token_can_end),
    Mutant("logprobs of the first token for all", "V3", _logprobs_of_the_first_token_for_all),
    Mutant("every draft counts as accepted", "V7", _every_draft_counts_as_accepted),
    Mutant("the target's token counts as accepted", "V7", _the_target_s_token_counts_as_accepted),
    Mutant("blocks of rejected drafts are kept", "K5", _blocks_of_rejected_drafts_are_kept),
    Mutant("rejected drafts count as computed", "K1, K3", _rejected_drafts_count_as_computed),
    Mutant("blocks of drafts are published", "K4", _blocks_of_drafts_are_published),
    Mutant("the drafter keeps ended rows", "L3, L4", _the_drafter_keeps_ended_rows),
    Mutant("the drafter keeps preempted rows", "L4", _the_drafter_keeps_preempted_rows),
    Mutant("the policy keeps ended rows", "L3", _the_policy_keeps_ended_rows),
    Mutant("the policy hears of rows after their end", "L3", _the_policy_hears_of_rows_after_their_end),
    Mutant("the drafter's limit is ignored", "V7", _the_drafter_s_limit_is_ignored),
    Mutant("the drafter is left open", "L3", _the_drafter_is_left_open),
    Mutant("a bad row past the mismatch", "L6", _a_bad_row_past_the_mismatch_fails_the_request, faults=True),
    Mutant("a broken drafter breaks the step", "L6", _a_broken_drafter_breaks_the_step, faults=True),
    Mutant("proposals go unchecked", "L6, V7", _proposals_go_unchecked, faults=True),
    Mutant("rows are rerun with their drafts", "L6", _rows_are_rerun_with_their_drafts, faults=True),
)

PACKING_MUTANTS = (
    Mutant("penalties ignore earlier drafts", "M10", _penalties_ignore_earlier_drafts),
    Mutant("drafts stay in the counts", "M10", _drafts_stay_in_the_counts),
    Mutant("min_tokens counts steps", "L8", _min_tokens_counts_steps),
    Mutant("noise of the first position for all", "V3", _noise_of_the_first_position_for_all),
)
"""Caught where rows are packed; the engine's scripts need more luck."""
