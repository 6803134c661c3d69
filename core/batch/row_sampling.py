"""How to sample a sequence: what never changes of it, and what its committed tokens add."""

from __future__ import annotations

from dataclasses import dataclass

from mvllm.core.batch.sampling_row import SamplingRow
from mvllm.core.batch.token_counts import TokenCounts


@dataclass(frozen=True, slots=True)
class RowSampling:
    """How to sample a sequence whose committed tokens are given.

    `counts` is the live object of the request: its owner alone changes it, between steps.
    """

    row: SamplingRow
    counts: TokenCounts | None  # of the committed tokens; None without penalties
    num_prompt_tokens: int
