"""What a step does besides when the engine speculates: ask for lengths, draft, count, learn."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import index

from mvllm.core.engine.decisions import Drafts
from mvllm.core.engine.request_table import RequestState
from mvllm.core.engine.statistics import SpeculationTotals
from mvllm.core.spec.draft_length import DraftDemand, DraftResult, SpeculationStep
from mvllm.core.spec.drafter import DraftRow
from mvllm.core.spec.speculation import Speculation
from mvllm.core.step import PlannedRow, RowDecision
from mvllm.core.types import RequestId, TokenId

_log = logging.getLogger("mvllm")


class Speculator:
    """Runs a drafter and its policy beside the steps of an engine.

    Owns both of them and the counts; changes no request and no block. Neither can harm a request: an
    exception from one of them, or an answer outside of its contract, ends drafting for this engine, with a
    warning and `totals.switched_off`. The tokens are the same without.

    One step calls `wishes`, `propose` and `observe`, in this order.

    Args:
        vocab_size: drafts are checked against it.
        max_step_drafts: most drafts of one step.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        speculation: Speculation,
        *,
        vocab_size: int,
        max_step_drafts: int,
        clock: Callable[[], float],
    ) -> None:
        self._drafter = speculation.drafter
        self._policy = speculation.policy
        self._vocab_size = vocab_size
        self._max_step_drafts = max_step_drafts
        self._clock = clock
        self._switched_off: str | None = None
        # of the step in progress
        self._decoding: frozenset[RequestId] = frozenset()
        self._asked: Mapping[RequestId, int] = {}  # rows that are to draft, now or as soon as they can
        self._readers: frozenset[RequestId] = frozenset()  # of these, those that are to read all their tokens
        self._least_confidence = 0.0  # `DraftRow.least_confidence`
        self._draft_seconds = 0.0
        self._forward_started = 0.0
        # since the beginning
        self._total_draft_seconds = 0.0
        self._verify_seconds = 0.0
        self._num_own_tokens = 0
        self._num_pass_tokens = 0
        self._proposed_lengths = Counter[int]()
        self._accepted_lengths = Counter[int]()

    # --- a step ------------------------------------------------------------------------------------------

    def wishes(self, running: Sequence[RequestState]) -> Mapping[RequestId, int]:
        """Most drafts that each row wants in the step about to be planned; rows that are not there want none.

        Only decoding rows are asked about: those with a single token left to compute.
        """
        decoding = [state for state in running if len(state.token_ids) - state.num_computed == 1]
        self._decoding = frozenset([state.id for state in decoding])
        self._asked, self._readers = {}, frozenset()
        if not decoding or self._switched_off is not None:
            return self._asked
        with self._contained(self._drafter):
            heeds_confidence = bool(self._drafter.heeds_confidence)
            at_hand = [index(self._drafter.num_at_hand(state.id, state.token_ids)) for state in decoding]
            limits = [self._limit(state) for state in decoding]
            with self._contained(self._policy):
                lengths = self._lengths(decoding, limits, at_hand, heeds_confidence=heeds_confidence)
                self._readers = frozenset(self._policy.readers())
                self._least_confidence = _within_one(self._policy.least_confidence())
                self._asked = {
                    state.id: min(length, limit)
                    for state, length, limit in zip(decoding, lengths, limits, strict=True)
                    if length > 0
                }
        return self._asked

    def propose(self, rows: Sequence[PlannedRow], states: Sequence[RequestState]) -> Drafts:
        """Drafts for each planned row; states[i] belongs to rows[i]. Only reads them."""
        drafts: dict[RequestId, tuple[TokenId, ...]] = {}
        asked = [
            DraftRow(
                row.id,
                state.token_ids,
                row.max_drafts,
                state.sampling,
                state.request.params.cache_salt,
                reads_all=row.id in self._readers,
                least_confidence=self._least_confidence,
            )
            for row, state in zip(rows, states, strict=True)
            if row.id in self._asked
        ]
        self._draft_seconds = 0.0
        self._forward_started = self._clock()
        if asked:
            with self._contained(self._drafter):
                proposals = self._drafter.propose(asked)
                drafts = _checked(proposals, asked, self._vocab_size)
            started, self._forward_started = self._forward_started, self._clock()
            self._draft_seconds = self._forward_started - started
            self._total_draft_seconds += self._draft_seconds
        return [drafts.get(row.id, ()) for row in rows]

    def observe(
        self,
        rows: Sequence[PlannedRow],
        drafts: Drafts,
        decisions: Sequence[RowDecision],
        *,
        together: bool,
    ) -> None:
        """Count what the step decided, and let the policy learn from it.

        Args:
            rows, drafts: what was computed.
            decisions: of the rows that took their result: neither failed nor cancelled meanwhile.
            together: in one batch. If not, its time is that of a failure, which the policy is spared.
        """
        forward_seconds = self._clock() - self._forward_started
        self._num_own_tokens += sum(
            [len(decision.new_token_ids) - decision.num_accepted for decision in decisions]
        )
        passes = [decision for decision in decisions if decision.id in self._decoding]
        if self._decoding.isdisjoint([row.id for row in rows]):
            return
        self._verify_seconds += forward_seconds
        for decision in passes:
            self._num_pass_tokens += len(decision.new_token_ids)
            self._proposed_lengths[decision.num_drafts] += 1
            if decision.num_drafts:
                self._accepted_lengths[decision.num_accepted] += 1
        if together and self._switched_off is None:
            with self._contained(self._policy):
                self._policy.observe(self._step(rows, drafts, passes, forward_seconds))

    def _step(
        self,
        rows: Sequence[PlannedRow],
        drafts: Drafts,
        passes: Sequence[RowDecision],
        forward_seconds: float,
    ) -> SpeculationStep:
        num_drafts = [len(row_drafts) for row_drafts in drafts]
        return SpeculationStep(
            results=tuple([DraftResult(one.id, one.num_drafts, one.num_accepted) for one in passes]),
            num_rows=len(rows),
            num_tokens=sum([row.count for row in rows]) + sum(num_drafts),
            num_prefill_tokens=sum([row.count for row in rows if row.id not in self._decoding]),
            context_tokens=sum([row.end for row in rows]) + sum(num_drafts),
            draft_seconds=self._draft_seconds,
            forward_seconds=forward_seconds,
        )

    # --- the end of a row, and of everything -------------------------------------------------------------

    def release(self, id: RequestId) -> None:
        """The request was preempted or has ended."""
        if self._switched_off is None:
            with self._contained(self._drafter):
                self._drafter.release(id)
            with self._contained(self._policy):
                self._policy.release(id)

    def close(self) -> None:
        """Close the drafter; idempotent, raises nothing."""
        try:
            self._drafter.close()
        except Exception as error:
            _log.warning("closing the drafter failed: %s: %s", type(error).__name__, error)

    def check_integrity(self, live: frozenset[RequestId]) -> None:
        """
        Raises:
            InvariantViolation: the drafter contradicts itself or names a request outside of `live`.
        """
        if self._switched_off is None:
            self._drafter.check_integrity(live)

    @property
    def totals(self) -> SpeculationTotals:
        """Counts since the engine was made."""
        proposed, accepted = self._proposed_lengths, self._accepted_lengths
        return SpeculationTotals(
            num_proposed=sum([length * count for length, count in proposed.items()]),
            num_accepted=sum([length * count for length, count in accepted.items()]),
            num_own_tokens=self._num_own_tokens,
            num_passes=proposed.total(),
            num_pass_tokens=self._num_pass_tokens,
            proposed_lengths=dict(sorted(proposed.items())),
            accepted_lengths=dict(sorted(accepted.items())),
            draft_seconds=self._total_draft_seconds,
            verify_seconds=self._verify_seconds,
            switched_off=self._switched_off,
        )

    # --- inside ------------------------------------------------------------------------------------------

    def _limit(self, state: RequestState) -> int:
        return max(0, min(self._drafter.limit(state.id, len(state.token_ids)), self._room(state)))

    def _room(self, state: RequestState) -> int:
        """Drafts beyond these could not become output, for the target adds a token of its own."""
        return min(self._max_step_drafts, state.request.total_limit - 1 - len(state.token_ids))

    def _lengths(
        self,
        decoding: Sequence[RequestState],
        limits: Sequence[int],
        at_hand: Sequence[int],
        *,
        heeds_confidence: bool,
    ) -> list[int]:
        """The policy's answer for each row; raises if it is none."""
        demands = [
            # A drafter that can give nothing yet has to be asked in order to catch up.
            DraftDemand(
                state.id,
                len(state.token_ids),
                limit or self._room(state),
                num_behind=self._drafter.num_behind(state.id, len(state.token_ids)),
                num_unread=self._drafter.num_unread(state.id, len(state.token_ids)),
                num_output=state.num_output_tokens,
                num_left=state.request.total_limit - len(state.token_ids),
                num_at_hand=num_at_hand,
                heeds_confidence=heeds_confidence,
            )
            for state, limit, num_at_hand in zip(decoding, limits, at_hand, strict=True)
        ]
        lengths = [index(length) for length in self._policy.lengths(demands)]
        if len(lengths) != len(demands):
            raise ValueError(f"{len(lengths)} lengths for {len(demands)} rows")
        for length, demand in zip(lengths, demands, strict=True):
            if not 0 <= length <= demand.limit:
                raise ValueError(f"a length of {length} for a row of at most {demand.limit}")
        return lengths

    @contextmanager
    def _contained(self, culprit: object) -> Iterator[None]:
        """An exception inside, which is the fault of `culprit`, ends drafting instead of the step."""
        try:
            yield
        except Exception as error:
            if self._switched_off is None:
                self._switched_off = f"{type(culprit).__name__}: {type(error).__name__}: {error}"
                _log.warning("drafting is switched off, answers go on without: %s", self._switched_off)


def _within_one(confidence: float) -> float:
    """The policy's answer; raises if it is no probability."""
    if not 0.0 <= confidence <= 1.0:
        raise ValueError(f"a least confidence of {confidence}")
    return float(confidence)


def _checked(
    proposals: Sequence[Sequence[TokenId]], rows: Sequence[DraftRow], vocab_size: int
) -> dict[RequestId, tuple[TokenId, ...]]:
    """The proposal for each row; ValueError or TypeError if they are none."""
    if len(proposals) != len(rows):
        raise ValueError(f"{len(proposals)} proposals for {len(rows)} rows")
    drafts = {}
    for row, proposal in zip(rows, proposals, strict=True):
        drafts[row.id] = tokens = tuple([index(token) for token in proposal])
        if len(tokens) > row.max_drafts:
            raise ValueError(f"{len(tokens)} drafts for a row of at most {row.max_drafts}")
        if tokens and not 0 <= min(tokens) <= max(tokens) < vocab_size:
            raise ValueError(f"drafts {tokens} outside of the vocabulary of {vocab_size} tokens")
    return drafts
