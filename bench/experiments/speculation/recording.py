"""What the steps of a run did, kept by a policy that only listens."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from mvllm.core.spec.draft_length import DraftDemand, DraftLengthPolicy, SpeculationStep
from mvllm.core.types import RequestId

Value = TypeVar("Value")


class RecordingPolicy(DraftLengthPolicy):
    """Passes everything on to another policy and keeps the steps."""

    def __init__(self, inner: DraftLengthPolicy) -> None:
        self._inner = inner
        self.steps: list[SpeculationStep] = []

    def lengths(self, rows: Sequence[DraftDemand]) -> list[int]:
        return self._inner.lengths(rows)

    def readers(self) -> frozenset[RequestId]:
        return self._inner.readers()

    def least_confidence(self) -> float:
        return self._inner.least_confidence()

    def observe(self, step: SpeculationStep) -> None:
        self.steps.append(step)
        self._inner.observe(step)

    def release(self, id: RequestId) -> None:
        self._inner.release(id)


@dataclass(frozen=True)
class StepSummary:
    """Counts and median times of a run's decoding steps. Keys of mappings are strings, as in JSON."""

    num_steps: int = 0
    proposed: int = 0
    accepted: int = 0
    lengths: dict[str, int] = field(default_factory=dict)  # drafts proposed for a row -> rows
    accepted_by_length: dict[str, int] = field(default_factory=dict)  # -> drafts accepted, of these rows
    forward_seconds: dict[str, float] = field(default_factory=dict)  # tokens of a step -> median
    draft_seconds: dict[str, float] = field(default_factory=dict)  # drafts of a step -> median
    draft_total: float = 0.0  # seconds
    forward_total: float = 0.0  # seconds, of steps with decoding rows

    @staticmethod
    def of(steps: Sequence[SpeculationStep]) -> StepSummary:
        """Of steps as observed; those with prefill are left out of the medians."""
        lengths: dict[str, int] = defaultdict(int)
        accepted: dict[str, int] = defaultdict(int)
        forward: dict[str, list[float]] = defaultdict(list)
        draft: dict[str, list[float]] = defaultdict(list)
        for step in steps:
            for result in step.results:
                lengths[str(result.proposed)] += 1
                accepted[str(result.proposed)] += result.accepted
            if step.num_prefill_tokens == 0:
                forward[str(step.num_tokens)].append(step.forward_seconds)
                draft[str(step.num_tokens - step.num_rows)].append(step.draft_seconds)
        return StepSummary(
            num_steps=len(steps),
            proposed=sum(int(length) * count for length, count in lengths.items()),
            accepted=sum(accepted.values()),
            lengths=_by_number(lengths),
            accepted_by_length=_by_number(accepted),
            forward_seconds=_by_number({key: statistics.median(values) for key, values in forward.items()}),
            draft_seconds=_by_number({key: statistics.median(values) for key, values in draft.items()}),
            draft_total=sum(step.draft_seconds for step in steps),
            forward_total=sum(step.forward_seconds for step in steps),
        )


def _by_number(mapping: dict[str, Value]) -> dict[str, Value]:
    return dict(sorted(mapping.items(), key=lambda item: int(item[0])))
