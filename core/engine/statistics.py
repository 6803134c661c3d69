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
    num_drafts=0,
    num_accepted=0,
    num_cached_tokens=0,
    num_preemptions=0,
    num_running=0,
    num_waiting=0,
    num_free_blocks=0,
    num_idle_blocks=0,
)


@dataclass(frozen=True, slots=True)
class SpeculationTotals:
    """What drafting has done since an engine was made. A pass is one decoding row in one forward.

    Every output token is either accepted or the target's own:
    num_accepted + num_own_tokens = `EngineTotals.num_output_tokens`.
    """

    num_proposed: int = 0  # drafts that the target computed for a row that lived on to its decision
    num_accepted: int = 0  # of these, drafts that became output
    num_own_tokens: int = 0  # output tokens that were no accepted drafts; the first ones of requests too
    num_passes: int = 0
    num_pass_tokens: int = 0  # output tokens of these passes
    proposed_lengths: Mapping[int, int] = field(default_factory=dict)  # drafts in a pass -> passes
    accepted_lengths: Mapping[int, int] = field(default_factory=dict)  # of passes with drafts
    draft_seconds: float = 0.0  # in the drafter
    verify_seconds: float = 0.0  # in the target, of steps with decoding rows; prefill beside them included
    switched_off: str | None = None  # why nothing is drafted any more

    @property
    def tokens_per_pass(self) -> float:
        """Output tokens per target pass of a decoding row; 1 without speculation."""
        return self.num_pass_tokens / self.num_passes if self.num_passes else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Share of proposed drafts that became output."""
        return self.num_accepted / self.num_proposed if self.num_proposed else 0.0


@dataclass(frozen=True, slots=True)
class EngineTotals:
    """Running totals since an engine was made."""

    num_steps: int = 0  # steps that computed something
    num_tokens: int = 0  # positions computed, recomputed ones and drafts included
    num_prefill_tokens: int = 0  # of these, positions of prompts
    num_output_tokens: int = 0
    num_cached_tokens: int = 0  # positions taken from the prefix cache at admissions
    num_preemptions: int = 0
    num_ended: Mapping[FinishReason, int] = field(default_factory=dict)
    seconds: float = 0.0  # spent in steps that computed something
    speculation: SpeculationTotals | None = None  # None in an engine that does not speculate

    def with_step(self, step: StepStats, seconds: float) -> EngineTotals:
        if step.num_rows == 0:
            return self
        return EngineTotals(  # three times as quick as `replace`
            num_steps=self.num_steps + 1,
            num_tokens=self.num_tokens + step.num_tokens,
            num_prefill_tokens=self.num_prefill_tokens + step.num_prefill_tokens,
            num_output_tokens=self.num_output_tokens + step.num_output_tokens,
            num_cached_tokens=self.num_cached_tokens + step.num_cached_tokens,
            num_preemptions=self.num_preemptions + step.num_preemptions,
            num_ended=self.num_ended,
            seconds=self.seconds + seconds,
            speculation=self.speculation,
        )

    def with_end(self, reason: FinishReason) -> EngineTotals:
        return replace(self, num_ended={**self.num_ended, reason: self.num_ended.get(reason, 0) + 1})
