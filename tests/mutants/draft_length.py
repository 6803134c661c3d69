"""Planted bugs of the draft-length policies, and the rule that each of them breaks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from mvllm.core.spec import adaptive_length, draft_length
from mvllm.core.spec.draft_length import DraftDemand, DraftResult, SpeculationStep
from mvllm.core.types import RequestId
from tests.mutants.mutant import Mutant

_rate_next = draft_length.AcceptanceRate._next
_adaptive_lengths = adaptive_length.AdaptiveLength.lengths
_adaptive_observe = adaptive_length.AdaptiveLength.observe
_made = itertools.count()


def _rate_jumps(self: draft_length.AcceptanceRate, result: DraftResult) -> int:
    return self._max_length if result.accepted == result.proposed else 1


def _rate_has_no_bounds(self: draft_length.AcceptanceRate, result: DraftResult) -> int:
    change = 1 if result.accepted == result.proposed else -1
    return self._lengths.get(result.id, self._start) + change


def _rate_counts_empty_rounds(self: draft_length.AcceptanceRate, step: SpeculationStep) -> None:
    for result in step.results:
        whole = DraftResult(result.id, max(1, result.proposed), result.accepted)
        self._lengths[result.id] = _rate_next(self, whole)


def _limits_are_ignored(self: draft_length.AcceptedLength, rows: Sequence[DraftDemand]) -> list[int]:
    return [self._length(self._means.get(row.id, self._start)) for row in rows]


def _nothing_is_released(self: object, id: RequestId) -> None:
    pass


def _learns_of_ended_requests(self: adaptive_length.AdaptiveLength, step: SpeculationStep) -> None:
    _adaptive_observe(self, step)
    for acceptance in self._acceptance.values():
        acceptance.observe(step.results)


def _depends_on_the_process(self: adaptive_length.AdaptiveLength, rows: Sequence[DraftDemand]) -> list[int]:
    """Every second policy that is made never drafts."""
    if "number" not in self.__dict__:
        self.__dict__["number"] = next(_made)
    number = self.__dict__["number"]
    lengths = _adaptive_lengths(self, rows)
    return [0] * len(lengths) if number % 2 else lengths


MUTANTS: dict[str, Mutant] = {
    "acceptance-rate jumps": Mutant(
        draft_length.AcceptanceRate, "_next", _rate_jumps, "V7 acceptance-rate moves by one at most"
    ),
    "acceptance-rate has no bounds": Mutant(
        draft_length.AcceptanceRate, "_next", _rate_has_no_bounds, "V7 lengths stay within their bounds"
    ),
    "a round without drafts counts as rejected": Mutant(
        draft_length.AcceptanceRate,
        "observe",
        _rate_counts_empty_rounds,
        "V7 a round without drafts changes nothing",
    ),
    "limits are ignored": Mutant(
        draft_length.AcceptedLength, "lengths", _limits_are_ignored, "V7 lengths stay within their bounds"
    ),
    "acceptance-rate keeps ended requests": Mutant(
        draft_length.AcceptanceRate, "release", _nothing_is_released, "ended requests leave nothing behind"
    ),
    "adaptive keeps ended requests": Mutant(
        adaptive_length.AdaptiveLength, "release", _nothing_is_released, "ended requests leave nothing behind"
    ),
    "adaptive learns of ended requests": Mutant(
        adaptive_length.AdaptiveLength,
        "observe",
        _learns_of_ended_requests,
        "ended requests leave nothing behind",
    ),
    "adaptive depends on something else": Mutant(
        adaptive_length.AdaptiveLength,
        "lengths",
        _depends_on_the_process,
        "equal observations give equal lengths",
    ),
}
