"""What a sampler may do, worked out slowly with plain Python numbers; shares no code with the product."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from tests.sampling_cases import Row

MARGIN = 1e-9
"""Relative distance below which a comparison is too close for ordinary floats."""


def modified_logits(logits: Sequence[float], row: Row) -> list[float]:
    """Logits after penalties and bias."""
    largest = float(np.finfo(np.float32).max)

    def rounded(value: float) -> float:
        return float(np.float32(value if math.isinf(value) else min(max(value, -largest), largest)))

    result = [float(value) for value in logits]
    for token, (in_prompt, in_output) in row.counts.items():
        value = result[token]
        repetition = float(np.float32(row.repetition_penalty))
        if in_prompt + in_output > 0:
            value = value / repetition if value > 0 else value * repetition
        if in_output > 0:
            value -= row.frequency_penalty * in_output + row.presence_penalty
        result[token] = rounded(value)
    for token, bias in row.bias.items():
        result[token] = rounded(result[token] + bias)
    return result


def kept_tokens(logits: Sequence[float], row: Row) -> list[int] | None:
    """Tokens that may be drawn from modified logits, best first; None if a comparison is too close."""
    best = max(logits)
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    if np.float32(row.temperature) < np.float32(1e-5):
        return order[:1]
    temperature = float(np.float32(row.temperature))
    weight = [math.exp((value - best) / temperature) for value in logits]
    order = [token for token in order if logits[token] > -math.inf]

    least = float(np.float32(row.min_p))
    if any(abs(weight[token] - least) < MARGIN * least and logits[token] != best for token in order):
        return None
    order = [token for token in order if logits[token] == best or weight[token] >= least]

    if row.top_k > 0:
        order = order[: row.top_k]

    share = float(np.float32(row.top_p))
    if share < 1:
        total = math.fsum(weight[token] for token in order)
        reached = 0.0
        for place, token in enumerate(order):
            reached += weight[token]
            if abs(reached - share * total) < MARGIN * total:
                return None
            if reached > share * total:
                return order[: place + 1]
    return order


def logprobs(logits: Sequence[float]) -> list[float]:
    """Log-softmax."""
    best = max(logits)
    total = math.log(math.fsum(math.exp(value - best) for value in logits))
    return [value - best - total for value in logits]
