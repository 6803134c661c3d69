"""How many tokens to draft: the contract of a policy, and the three that look at acceptance alone.

A policy decides about time only, never about tokens. The one that weighs costs is `adaptive_length.py`;
`length_policies.py` makes any of them by name.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from mvllm.core.types import RequestId

DEFAULT_LENGTH = 4
DEFAULT_MAX_LENGTH = 8


@dataclass(frozen=True, slots=True)
class DraftDemand:
    """A decoding row of the step about to be planned."""

    id: RequestId
    num_tokens: int  # prompt and output so far
    limit: int  # most drafts it could get now; 0: none, whatever the policy says
    num_behind: int = 0  # tokens the drafter has to read before it can draft
    num_unread: int = 0  # tokens it has left out but could read after all
    num_output: int = 0  # output tokens so far
    num_left: int = 0  # most output tokens that may follow
    num_at_hand: int = 0  # drafts that take no time; 0: they have to be worked out
    heeds_confidence: bool = False  # the drafter stops by itself: `DraftLengthPolicy.least_confidence`


@dataclass(frozen=True, slots=True)
class DraftResult:
    """What became of a decoding row's drafts in a step."""

    id: RequestId
    proposed: int  # drafts in the forward; may be fewer than the policy allowed
    accepted: int  # of these, how many leading ones the target would have chosen itself


@dataclass(frozen=True, slots=True)
class SpeculationStep:
    """What a step that ran decoding rows did and took."""

    results: tuple[DraftResult, ...]  # of every decoding row
    num_rows: int  # rows of the forward, prefill included
    num_tokens: int  # tokens of the forward, prefill included
    num_prefill_tokens: int
    context_tokens: int  # positions attended to by the last token of each row, summed over the rows
    draft_seconds: float  # in the drafter
    forward_seconds: float  # in the target


class DraftLengthPolicy(ABC):
    """Decides how many tokens each decoding row drafts. One per engine; used by its stepping thread only.

    Owns what it has learned; reads no clock: all it knows of time comes with `observe`.
    """

    @abstractmethod
    def lengths(self, rows: Sequence[DraftDemand]) -> list[int]:
        """Drafts wanted for each row, in order, each within [0, row.limit]. Asked once per step, for all
        decoding rows; from then on the policy knows them."""

    def readers(self) -> frozenset[RequestId]:
        """Rows whose drafters should now begin anew and read what they have left out. Asked after `lengths`,
        which has given these rows a length above 0."""
        return frozenset()

    def least_confidence(self) -> float:
        """How likely the drafts of a row have to be all right, in the drafter's opinion, for it to go on to
        another one; within [0, 1], and with 0 it goes on in any case. Asked after `lengths`, for all rows."""
        return 0.0

    @abstractmethod
    def observe(self, step: SpeculationStep) -> None:
        """Learn from a step that ran decoding rows, with drafts or without. A result with proposed = 0 says
        nothing about its row; one of a row that it does not know, or no more, is ignored."""

    def release(self, id: RequestId) -> None:
        """The request was preempted or has ended: forget it. Unknown ids are ignored."""


class FixedLength(DraftLengthPolicy):
    """The same length always."""

    def __init__(self, length: int = DEFAULT_LENGTH) -> None:
        self._length = length

    def lengths(self, rows: Sequence[DraftDemand]) -> list[int]:
        return [min(self._length, row.limit) for row in rows]

    def observe(self, step: SpeculationStep) -> None:
        """Nothing to learn."""


class AcceptanceRate(DraftLengthPolicy):
    """One longer after a round of which most was accepted, one shorter after a round of which little was."""

    LOW, HIGH = 0.4, 0.8

    def __init__(self, max_length: int = DEFAULT_MAX_LENGTH) -> None:
        self._max_length = max_length
        self._start = min(DEFAULT_LENGTH, max_length)
        self._lengths: dict[RequestId, int] = {}

    def lengths(self, rows: Sequence[DraftDemand]) -> list[int]:
        return [min(self._lengths.setdefault(row.id, self._start), row.limit) for row in rows]

    def observe(self, step: SpeculationStep) -> None:
        for result in step.results:
            if result.proposed > 0 and result.id in self._lengths:
                self._lengths[result.id] = self._next(result)

    def _next(self, result: DraftResult) -> int:
        length = self._lengths[result.id]
        rate = result.accepted / result.proposed
        change = (rate > self.HIGH) - (rate < self.LOW)
        return min(max(length + change, 1), self._max_length)

    def release(self, id: RequestId) -> None:
        self._lengths.pop(id, None)


class AcceptedLength(DraftLengthPolicy):
    """One more than the running mean of how many drafts were accepted."""

    WEIGHT = 0.2  # of the last round in the mean

    def __init__(self, max_length: int = DEFAULT_MAX_LENGTH) -> None:
        self._max_length = max_length
        self._start = min(DEFAULT_LENGTH, max_length) - 1.0
        self._means: dict[RequestId, float] = {}

    def lengths(self, rows: Sequence[DraftDemand]) -> list[int]:
        return [min(self._length(self._means.setdefault(row.id, self._start)), row.limit) for row in rows]

    def _length(self, mean: float) -> int:
        return min(max(math.floor(mean + 0.5) + 1, 1), self._max_length)

    def observe(self, step: SpeculationStep) -> None:
        for result in step.results:
            if result.proposed > 0 and result.id in self._means:
                mean = self._means[result.id]
                self._means[result.id] = self.WEIGHT * result.accepted + (1.0 - self.WEIGHT) * mean

    def release(self, id: RequestId) -> None:
        self._means.pop(id, None)
