"""The noise: a pure function of seed, position and token, with the law of Gumbel."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from mvllm.core.sampling import keyed_noise
from mvllm.core.sampling.keyed_noise import gumbel, gumbel_from_raw, raw_outputs, row_state, sibling_seed

seeds = st.integers(0, 2**64 - 1)
positions = st.integers(0, 2**31 - 1)
token_ids = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=20).map(
    lambda ids: np.array(ids, np.int32)
)


def test_the_generator_gives_the_published_outputs_of_splitmix64() -> None:
    outputs = raw_outputs(1234567, np.arange(5))
    assert outputs.tolist() == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


@given(raw=st.lists(seeds, min_size=1, max_size=50))
def test_every_raw_output_gives_finite_noise(raw: list[int]) -> None:
    """M0; the extremes themselves are in the law of the same id."""
    noise = gumbel_from_raw(np.array(raw, np.uint64))
    expected = [-math.log(-math.log(((value >> 12) + 0.5) / 2**52)) for value in raw]
    assert np.isfinite(noise).all()
    np.testing.assert_allclose(noise, expected, rtol=1e-14, atol=1e-14)


@given(seed=seeds, position=positions, tokens=token_ids, data=st.data())
def test_noise_of_a_token_does_not_depend_on_the_tokens_asked_with_it(
    seed: int, position: int, tokens: NDArray[np.int32], data: st.DataObject
) -> None:
    """M6: any selection in any order gives the same numbers."""
    picked = data.draw(st.lists(st.integers(0, len(tokens) - 1), max_size=30))
    together = gumbel(np.uint64(seed), position, tokens)
    apart = gumbel(np.uint64(seed), position, tokens[picked].astype(np.int64))
    assert together[picked].tobytes() == apart.tobytes()


@given(seed=seeds, index=st.integers(0, 127), other=st.integers(0, 127))
def test_siblings_have_distinct_seeds_and_the_first_keeps_its_own(seed: int, index: int, other: int) -> None:
    """J8."""
    assert sibling_seed(seed, 0) == seed
    assert 0 <= sibling_seed(seed, index) < 2**64
    assert (sibling_seed(seed, index) == sibling_seed(seed, other)) == (index == other)


@given(seed=seeds, position=positions, bit=st.integers(0, 63))
def test_rows_that_differ_in_seed_or_position_have_other_generators(
    seed: int, position: int, bit: int
) -> None:
    state = row_state(seed, position)
    assert state != row_state(seed ^ (1 << bit), position)
    assert state != row_state(seed, position ^ (1 << (bit % 31)))


def _keys(kind: str, count: int) -> NDArray[np.float64]:
    """`count` noise values along one of the three coordinates, from fixed seeds."""
    if kind == "token":
        return gumbel(5, 9, np.arange(count))
    token = np.array([3])
    if kind == "position":
        return np.array([gumbel(5, index, token)[0] for index in range(count)])
    if kind == "sibling":
        return np.array([gumbel(sibling_seed(5, index), 9, token)[0] for index in range(count)])
    return np.array([gumbel(index, 9, token)[0] for index in range(count)])


@pytest.mark.parametrize("kind", ["token", "position", "seed", "sibling"])
def test_noise_has_the_law_of_gumbel_along_every_coordinate(kind: str) -> None:
    """M7: Kolmogorov-Smirnov distance below the bound passed once in 1,000, at fixed seeds."""
    count = 20_000 if kind == "token" else 4_000
    noise = np.sort(_keys(kind, count))
    expected = np.exp(-np.exp(-noise))
    steps = np.arange(count + 1) / count
    distance = max((steps[1:] - expected).max(), (expected - steps[:-1]).max())
    assert distance < 1.95 / math.sqrt(count)


@pytest.mark.parametrize("kind", ["token", "position", "seed", "sibling"])
@pytest.mark.parametrize("lag", [1, 2, 7])
def test_noise_of_nearby_keys_is_uncorrelated(kind: str, lag: int) -> None:
    uniform = np.exp(-np.exp(-_keys(kind, 4_000)))
    correlation = np.corrcoef(uniform[:-lag], uniform[lag:])[0, 1]
    assert abs(correlation) < 3.3 / math.sqrt(4_000)


def test_flipping_any_input_bit_flips_about_half_of_the_output_bits() -> None:
    """Averaged over 100 keys, every input bit changes between 29 and 35 of the 64 output bits."""
    token = np.array([12_345])

    def output(seed: int, position: int) -> int:
        return int(raw_outputs(row_state(seed, position), token)[0])

    for bit in range(64):
        changed = [
            (output(seed, 77) ^ output(seed ^ (1 << bit), 77)).bit_count() for seed in range(1_000, 1_100)
        ]
        assert 29 < np.mean(changed) < 35
    for bit in range(31):
        changed = [
            (output(seed, 77) ^ output(seed, 77 ^ (1 << bit))).bit_count() for seed in range(1_000, 1_100)
        ]
        assert 29 < np.mean(changed) < 35


def test_at_least_32_random_bits_reach_the_noise() -> None:
    """M0."""
    assert keyed_noise.UNIFORM_BITS >= 32
    neighbours = np.array([2**63, 2**63 + 2**32], np.uint64)
    assert np.unique(gumbel_from_raw(neighbours)).size == 2
