"""The speed-up that measured times and acceptance allow a policy to reach.

For each constant length k, from a run with it: how many tokens a step brought on average, and what a step
took on average, with the median time for its number of tokens in place of each forward's own time, so that
disturbed ones don't count; drafting counts as it was, for what is looked up takes no time and what a model
drafts does. Tokens over seconds is the expected rate of length k; length 0 is the same
without drafts. The allowance is the best of these rates over that of length 0. A policy that knew the text
could do better, by changing the length; one that has to find out should come near.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mvllm.bench.experiments.speculation.recording import StepSummary
from mvllm.bench.experiments.speculation.runs import Pair


@dataclass(frozen=True)
class Allowance:
    """Speed-ups over no drafts, by constant length; one request."""

    by_length: Mapping[int, float]

    @property
    def best_length(self) -> int:
        return max(self.by_length, key=lambda length: (self.by_length[length], -length))

    @property
    def best(self) -> float:
        return self.by_length[self.best_length]


def allowance(pairs: Sequence[Pair]) -> Allowance:
    """Of pairs with a single request and constant lengths, all of one drafter and workload."""
    plain = statistics.median(1.0 / pair.plain.decode_rate for pair in pairs)
    speed_ups = {0: 1.0}
    for pair in pairs:
        if pair.run.length is not None:
            speed_ups[pair.run.length] = plain / seconds_per_token(pair.drafted.steps)
    return Allowance(dict(sorted(speed_ups.items())))


def seconds_per_token(steps: StepSummary) -> float:
    """Of a run with a single request."""
    seconds, tokens = steps.draft_total, 0.0
    for drafts, count in steps.lengths.items():
        seconds += count * steps.forward_seconds[str(int(drafts) + 1)]
        tokens += count + steps.accepted_by_length[drafts]
    return seconds / tokens
