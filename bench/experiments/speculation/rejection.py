"""Distribution-correct rejection sampling, the rival of the keyed coupling that the product uses.

A draft d, drawn from the drafter's distribution q, is kept with probability min(1, p(d) / q(d)); if it is
not, a token is drawn from the normalised positive part of p - q in its place. The token is then distributed
as p (Leviathan, Kalman and Matias, "Fast Inference from Transformers via Speculative Decoding", ICML 2023;
Chen et al., "Accelerating Large Language Model Decoding with Speculative Sampling", 2023). p and q are what
the sampler would draw from: after penalties, bias, temperature and all filters. A greedy drafter's q is 1
for its token, 0 for others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mvllm.core.sampling.arithmetic import masses
from mvllm.core.sampling.penalties import modified_logits
from mvllm.core.sampling.sampler import GREEDY_BELOW, kept_tokens, scaled_logits
from mvllm.core.step import SamplingArrays

Distribution = NDArray[np.float64]


def sampling_distribution(logits: NDArray[np.float32], sampling: SamplingArrays, row: int) -> Distribution:
    """float64[V]: the distribution that the sampler draws row `row` from, given its logits f32[V]."""
    modified = modified_logits(logits, sampling, row)
    result = np.zeros(len(modified))
    temperature = sampling.temperature[row]
    if temperature < GREEDY_BELOW:
        result[np.argmax(modified)] = 1.0
        return result
    scaled = scaled_logits(modified, temperature)
    kept = kept_tokens(
        modified,
        scaled,
        min_p=float(sampling.min_p[row]),
        top_k=int(sampling.top_k[row]),
        top_p=float(sampling.top_p[row]),
    )
    result[kept] = masses(scaled[kept])
    return normalised(result)


def normalised(weights: NDArray[Any]) -> Distribution:
    """Weights [V], not negative and not all zero, as float64[V] with sum 1.

    Sums of float32 probabilities differ from 1 by more than the identities of this module bear.
    """
    wide: Distribution = np.asarray(weights, np.float64)
    shares: Distribution = wide / wide.sum()
    return shares


def accept_prob(p: NDArray[Any], q: NDArray[Any], draft: int) -> float:
    """Probability to keep a draft drawn from q [V] for a target distribution p [V].

    Raises:
        ValueError: q(draft) is 0: the drafter can't have drawn it from q.
    """
    p, q = normalised(p), normalised(q)
    if q[draft] <= 0.0:
        raise ValueError(f"token {draft} has probability 0 in the distribution it is said to be drawn from")
    return min(1.0, float(p[draft] / q[draft]))


def residual(p: NDArray[Any], q: NDArray[Any]) -> Distribution:
    """float64[V]: where the token comes from if the draft is not kept.

    p itself if nothing of p exceeds q, as with p = q; such a draft is always kept, but for rounding.
    """
    p, q = normalised(p), normalised(q)
    excess = np.maximum(p - q, 0.0)
    total = excess.sum()
    return excess / total if total > 0.0 else p


def acceptance(p: NDArray[Any], q: NDArray[Any]) -> float:
    """Probability that a draft drawn from q is kept: the sum of min(p, q), or 1 minus the total variation."""
    return float(np.minimum(normalised(p), normalised(q)).sum())


def verify(
    target: Sequence[NDArray[Any]],
    drafter: Sequence[NDArray[Any]],
    drafts: Sequence[int],
    uniforms: Sequence[float],
) -> tuple[int, ...]:
    """Tokens that come of a round: the drafts kept, then one from the residual or, if all were kept, from the
    target's distribution after them.

    Args:
        target: k + 1 distributions [V]; entry i is given the first i drafts.
        drafter: the k distributions that `drafts` were drawn from.
        uniforms: k + 1 numbers from [0, 1): one for each decision, then one for the last token.
    """
    for position, draft in enumerate(drafts):
        if uniforms[position] >= accept_prob(target[position], drafter[position], draft):
            last = residual(target[position], drafter[position])
            return (*drafts[:position], draw(last, uniforms[-1]))
    return (*drafts, draw(target[len(drafts)], uniforms[-1]))


def draw(p: NDArray[Any], uniform: float) -> int:
    """The token of p [V] at `uniform` in [0, 1) of its cumulative sum; never one of probability 0."""
    cumulative = np.cumsum(normalised(p))
    index = int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))
    return min(index, int(np.flatnonzero(p)[-1]))
