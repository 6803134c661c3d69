"""Acceptance of the keyed coupling and of optimal rejection sampling, at the same positions of real text.

The target writes an answer at a temperature; then both models compute their logits at every position of it.
Where they would draw from p (target) and q (drafter):

- rejection sampling keeps a draft with probability sum(min(p, q)), computed exactly;
- the coupling accepts if argmax(log p + noise) = argmax(log q + noise): an average over draws of the noise;
- independent draws would agree with probability sum(p * q).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mvllm.bench.experiments.speculation.engines import BLOCK_SIZE
from mvllm.bench.experiments.speculation.rejection import acceptance
from mvllm.core.batch.batcher import Batcher, BatchRow
from mvllm.core.batch.row_sampling import RowSampling
from mvllm.core.batch.sampling_row import SamplingRow
from mvllm.core.request import Request, SamplingParams
from mvllm.core.sampling.keyed_noise import gumbel
from mvllm.core.sampling.sampler import scaled_logits
from mvllm.core.tensor import Model
from mvllm.core.types import BlockId, RequestId, TokenId

NEGLIGIBLE = 1e-7
"""Tokens less likely than this in both models take no part in the draws: a draw falls on one of all of
them together less than once in a hundred."""


@dataclass(frozen=True)
class Position:
    """Chances that a draft for one position is accepted."""

    rejection: float
    coupling: float
    independent: float


def compare(
    target: NDArray[np.float32],
    drafter: NDArray[np.float32],
    temperature: float,
    *,
    position: int,
    draws: int,
) -> Position:
    """Of one position, from logits f32[V] of both models over the same tokens."""
    p, q = probabilities(target, temperature), probabilities(drafter, temperature)
    kept = np.flatnonzero((p > NEGLIGIBLE) | (q > NEGLIGIBLE))
    with np.errstate(divide="ignore"):
        log_p, log_q = np.log(p[kept]), np.log(q[kept])
    agreed = 0
    for seed in range(draws):
        noise = gumbel(seed, position, kept)
        agreed += int(np.argmax(log_p + noise) == np.argmax(log_q + noise))
    return Position(acceptance(p, q), agreed / draws, float(p @ q))


def probabilities(logits: NDArray[np.float32], temperature: float) -> NDArray[np.float64]:
    """float64[V] at a temperature above 0, without filters."""
    weights = np.exp(scaled_logits(logits, np.float32(temperature)))
    return np.asarray(weights / weights.sum())


def logits_along(
    model: Model, tokens: Sequence[TokenId], start: int, *, chunk: int, vocab_size: int
) -> NDArray[np.float32]:
    """Logits f32[len(tokens) - start, vocab_size] after the tokens up to each position from `start` on.

    The model's KV pool is overwritten.

    Args:
        chunk: positions per forward pass; at most the logit rows the model was loaded for.
        vocab_size: logits beyond it, of padding, are left out.
    """
    batcher = Batcher(BLOCK_SIZE)
    table = tuple(BlockId(index) for index in range(len(tokens) // BLOCK_SIZE + 1))
    sampling = _greedy(tokens)
    rows: list[NDArray[Any]] = []
    begin = 0
    while begin < len(tokens):
        end = min(begin + chunk, start if begin < start else len(tokens))
        count = 0 if begin < start else end - begin
        row = BatchRow(
            RequestId("text"), table, tokens[:end], (), begin, end, sampling if count else None, count
        )
        logits = model.logits(batcher.pack([row]))
        if count:
            rows.append(logits[:, :vocab_size])
        begin = end
    return np.concatenate(rows)


def _greedy(tokens: Sequence[TokenId]) -> RowSampling:
    request = Request(RequestId("text"), tuple(tokens), SamplingParams(temperature=0.0), 0, 1)
    return RowSampling(SamplingRow.of(request), None, len(tokens))
