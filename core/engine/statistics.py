"""Counts of an engine's work: values, replaced by new ones step by step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from mvllm.core.request import FinishReason
from mvllm.core.step import StepStats

IDLE_STEP = StepStats(
    num_tokens=0,
    num_rows=0,
    num_prefill_tokens=0,
    num_output_tokens=0,
    num_cached_tokens=0,
    num_preemptions=0,
    num_running=0,
    num_waiting=0,
    num_free_blocks=0,
    num_idle_blocks=0,
)


@dataclass(frozen=True, slots=True)
class EngineTotals:
    """Running totals since an engine was made."""

    num_steps: int = 0  # steps that computed something
    num_tokens: int = 0  # positions computed, recomputed ones included
    num_prefill_tokens: int = 0  # of these, positions of prompts
    num_output_tokens: int = 0
    num_cached_tokens: int = 0  # positions taken from the prefix cache at admissions
    num_preemptions: int = 0
    num_ended: Mapping[FinishReason, int] = field(default_factory=dict)
    seconds: float = 0.0  # spent in steps that computed something

    def with_step(self, step: StepStats, seconds: float) -> EngineTotals:
        if step.num_rows == 0:
            return self
        return replace(
            self,
            num_steps=self.num_steps + 1,
            num_tokens=self.num_tokens + step.num_tokens,
            num_prefill_tokens=self.num_prefill_tokens + step.num_prefill_tokens,
            num_output_tokens=self.num_output_tokens + step.num_output_tokens,
            num_cached_tokens=self.num_cached_tokens + step.num_cached_tokens,
            num_preemptions=self.num_preemptions + step.num_preemptions,
            seconds=self.seconds + seconds,
        )

    def with_end(self, reason: FinishReason) -> EngineTotals:
        return replace(self, num_ended={**self.num_ended, reason: self.num_ended.get(reason, 0) + 1})
