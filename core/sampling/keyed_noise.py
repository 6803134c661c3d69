"""Counter-based noise: a pure function of (seed, position, token id) and of nothing else.

The generator is SplitMix64 (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators",
OOPSLA 2014, with the constants of Stafford's mixer 13). Its n-th output is `mix(state + n * GAMMA)`, so any
output can be had without those before it. Seed and position are mixed into the state of one generator per
logit row; the token id counts its outputs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mvllm.core.sampling.arithmetic import log
from mvllm.core.types import MASK_64

GAMMA = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB

UNIFORM_BITS = 52
"""Bits of a raw output that make the uniform number. (k + 0.5) / 2**52 is exact in float64 for every k, so it
is never 0 or 1 and the noise is finite. One bit more, and the largest k would round to 1."""


def mix(z: int) -> int:
    """SplitMix64's output function, a bijection of [0, 2**64)."""
    z = ((z ^ (z >> 30)) * MIX_1) & MASK_64
    z = ((z ^ (z >> 27)) * MIX_2) & MASK_64
    return z ^ (z >> 31)


def sibling_seed(seed: int, index: int) -> int:
    """Seed in [0, 2**64) of choice `index` of a request: distinct for distinct indices, for 0 the seed."""
    return (seed + index * GAMMA) & MASK_64


def row_state(seed: int, position: int) -> int:
    """State of the generator for the token at `position` (>= 0) of a sequence with `seed`."""
    return mix((mix((seed + GAMMA) & MASK_64) + (position + 1) * GAMMA) & MASK_64)


def raw_outputs(state: int, token_ids: NDArray[np.integer[Any]]) -> NDArray[np.uint64]:
    """Outputs uint64[N] of the generator in `state`, numbered by token ids (>= 0)."""
    z = np.uint64(state) + (token_ids.astype(np.uint64) + np.uint64(1)) * np.uint64(GAMMA)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(MIX_1)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(MIX_2)
    return z ^ (z >> np.uint64(31))


def uniform_from_raw(raw: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Numbers in [2**-53, 1 - 2**-53] from the 52 highest bits of uint64[N]; exact, never 0 or 1."""
    high = (raw >> np.uint64(64 - UNIFORM_BITS)).astype(np.int64).astype(np.float64)
    return (high + 0.5) * 2.0**-UNIFORM_BITS


def gumbel_from_raw(raw: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Standard Gumbel noise -log(-log(u)), within [-3.7, 36.8], from uint64[N]."""
    return -log(-log(uniform_from_raw(raw)))


def gumbel(seed: np.uint64 | int, position: int, token_ids: NDArray[np.integer[Any]]) -> NDArray[np.float64]:
    """Standard Gumbel noise float64[N] for tokens that may stand at `position` of a sequence with `seed`.

    `argmax(log p + gumbel(...))` over the tokens is a draw from p, and the same draw wherever it is made.
    """
    return gumbel_from_raw(raw_outputs(row_state(int(seed), position), token_ids))
