"""The arithmetic of the fake model: tags instead of keys and values, hashes instead of logits.

A tag stands for a whole prefix: `tag(tokens[0..i])` follows from the tag of `tokens[0..i-1]` and token i. Two
prefixes that differ anywhere have different tags (up to a 64-bit collision), so a position computed on top of
wrong KV has a wrong tag, and so has everything after it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from mvllm.core.request import GREEDY_TEMPERATURE
from mvllm.core.sampling.keyed_noise import GAMMA, MIX_1, mix
from mvllm.core.step import NO_VOCAB_LIMIT
from mvllm.core.types import MASK_64, TokenId

ROOT_TAG = 0x5EED
"""Tag of the empty prefix."""

LOGIT_RANGE = 8.0


def extend_tag(tag: int, token: TokenId) -> int:
    """Tag of a prefix with one more token."""
    return mix((tag * 3 + token + 1) & MASK_64)


def tag_of(tokens: Iterable[TokenId]) -> int:
    """Tag of a whole prefix, from its tokens alone."""
    tag = ROOT_TAG
    for token in tokens:
        tag = extend_tag(tag, token)
    return tag


def logits_of(tag: int, vocab_size: int) -> NDArray[np.float32]:
    """f32[vocab_size] in [0, 8), multiples of 2**-13: the "logits" after a prefix."""
    return _hashed(tag, vocab_size).astype(np.float32)


@dataclass(frozen=True)
class FakeSampling:
    """How to choose a token. Filters enter the hash of the noise: a mixed-up parameter changes the choice.

    Real numbers are taken as float32, which is what a batch carries.
    """

    position: int
    seed: int
    temperature: float = 0.0
    filters: tuple[int | float, ...] = ()  # top_k, top_p, min_p
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    prompt_counts: Mapping[TokenId, int] = field(default_factory=dict)
    output_counts: Mapping[TokenId, int] = field(default_factory=dict)
    bias: Mapping[TokenId, float] = field(default_factory=dict)


def choose(
    tag: int, vocab_size: int, sampling: FakeSampling, vocab_limit: int = NO_VOCAB_LIMIT
) -> TokenId | None:
    """The token after a prefix, ties to the lowest id; None if every one below `vocab_limit` is banned."""
    logits = _hashed(tag, vocab_size)
    logits[vocab_limit:] = -np.inf
    for token in sampling.prompt_counts.keys() | sampling.output_counts.keys():
        in_output = sampling.output_counts.get(token, 0)
        logits[token] /= _single(sampling.repetition_penalty)
        logits[token] -= _single(sampling.presence_penalty) * (in_output > 0)
        logits[token] -= _single(sampling.frequency_penalty) * in_output
    for token, bias in sampling.bias.items():
        logits[token] += _single(bias)
    if not np.isfinite(logits).any():
        return None
    if sampling.temperature >= GREEDY_TEMPERATURE:
        filters = [_single(value) for value in sampling.filters]
        key = hash((sampling.seed, sampling.position, *filters)) & MASK_64
        logits += _single(sampling.temperature) * _hashed(mix(key), vocab_size)
    return int(np.argmax(logits))


def _hashed(key: int, size: int) -> NDArray[np.float64]:
    """f64[size] in [0, LOGIT_RANGE), a function of the key."""
    z = np.arange(1, size + 1, dtype=np.uint64) * np.uint64(GAMMA) + np.uint64(key)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(MIX_1)
    z ^= z >> np.uint64(31)
    return (z >> np.uint64(48)).astype(np.float64) * (LOGIT_RANGE / (1 << 16))


def _single(value: float) -> float:
    return float(np.float32(value))
