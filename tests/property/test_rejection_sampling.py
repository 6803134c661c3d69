"""Rejection sampling, for comparison with the product's coupling: INVARIANTS 6, V8 and V9, and L3."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from mvllm.bench.experiments.speculation import rejection
from mvllm.core.sampling.keyed_noise import gumbel
from mvllm.core.sampling.penalties import modified_logits
from tests.mutants.rejection import MUTANTS
from tests.property.check_rules import check_all
from tests.property.rejection_rules import (
    RULES,
    chi_square,
    prefixes_follow_the_target_chain,
    random_chain,
    rounds_drawn,
    settings_of_l3,
)
from tests.sampling_cases import Row, arrays, logits, settings

Array = NDArray[np.float64]
VOCAB = 6
CHI_SQUARE_7 = 24.3  # exceeded once in a thousand by 7 degrees of freedom


def weights() -> st.SearchStrategy[Array]:
    value = st.one_of(st.just(0.0), st.integers(1, 8).map(float), st.floats(1e-12, 1.0))
    row = st.lists(value, min_size=VOCAB, max_size=VOCAB).filter(any)
    return row.map(lambda row: rejection.normalised(np.array(row)))


@given(p=weights(), q=weights(), narrow=st.booleans())
def test_v8_rules(p: Array, q: Array, narrow: bool) -> None:
    if narrow:
        p, q = p.astype(np.float32), q.astype(np.float32)
    check_all(RULES, p, q)


def test_v8_thousands_of_random_pairs() -> None:
    rng = np.random.default_rng(8)
    for _ in range(2000):
        p, q = (rejection.normalised(np.exp(rng.normal(0, rng.uniform(0, 6), 40))) for _ in range(2))
        RULES["V8 the token is distributed as the target"](p, q)


def test_v8_a_residual_of_zeros_falls_back_to_the_target() -> None:
    p = np.array([0.5, 0.5, 0.0])
    assert rejection.residual(p, p).tolist() == [0.5, 0.5, 0.0]


@given(p=weights(), uniforms=st.lists(st.floats(0.0, 1.0, exclude_max=True), min_size=1))
def test_a_draw_never_gives_a_token_of_probability_zero(p: Array, uniforms: list[float]) -> None:
    assert all(p[rejection.draw(p, uniform)] > 0.0 for uniform in uniforms)


@given(row_logits=logits(VOCAB), row=settings(VOCAB))
def test_filters_come_before_verification(row_logits: NDArray[np.float32], row: Row) -> None:
    """What the sampler can't draw has probability 0; drawing by noise agrees with the distribution."""
    sampling = arrays([row])
    assume(np.isfinite(modified_logits(row_logits, sampling, 0)).any())  # else there is nothing to draw
    p = rejection.sampling_distribution(row_logits, sampling, 0)
    assert abs(p.sum() - 1.0) <= 1e-12
    noise = gumbel(row.seed, row.position, np.arange(VOCAB))
    with np.errstate(divide="ignore"):
        drawn = int(np.argmax(np.log(p) + noise))
    assert p[drawn] > 0.0


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("seed", range(10))
def test_v9_the_joint_law_of_a_round_is_the_target_chain(seed: int, zeros: bool) -> None:
    p, q = random_chain(3, 2 * seed, zeros=zeros), random_chain(3, 2 * seed + 1, zeros=zeros)
    for length in (0, 1, 2):
        prefixes_follow_the_target_chain(p, q, length)


def test_v8_and_l3_draws_follow_the_target_after_penalties_and_top_p() -> None:
    p, q = settings_of_l3()
    assert 0 < np.count_nonzero(p) < 8
    assert 0.2 < rejection.acceptance(p, q) < 0.9
    outcomes = rounds_drawn([p, p], [q], draws=8_000, seed=3)
    counts = np.bincount([outcome[0] for outcome in outcomes], minlength=8).astype(np.float64)
    assert chi_square(counts, p) < CHI_SQUARE_7
    after = np.bincount([outcome[1] for outcome in outcomes if len(outcome) == 2], minlength=8)
    assert chi_square(after.astype(np.float64), p) < CHI_SQUARE_7


def test_l3_a_greedy_drafter_has_all_its_probability_on_its_token() -> None:
    p, _ = settings_of_l3()
    q = rejection.sampling_distribution(
        np.array([0, 3, 1, 0, 0, 0, 0, 0], np.float32), arrays([Row(temperature=0.0)]), 0
    )
    assert q.tolist() == [0, 1, 0, 0, 0, 0, 0, 0]
    outcomes = rounds_drawn([p, p], [q], draws=8_000, seed=4)
    counts = np.bincount([outcome[0] for outcome in outcomes], minlength=8).astype(np.float64)
    assert chi_square(counts, p) < CHI_SQUARE_7


def _everything() -> None:
    rng = np.random.default_rng(1)
    for _ in range(50):
        p, q = rejection.normalised(rng.exponential(size=5)), rejection.normalised(rng.exponential(size=5))
        q[rng.integers(5)] = 0.0
        for rule in RULES.values():
            rule(p, q)
    p_chain, q_chain = random_chain(3, 1, zeros=True), random_chain(3, 2, zeros=True)
    prefixes_follow_the_target_chain(p_chain, q_chain, 2)
    p, q = settings_of_l3()
    outcomes = rounds_drawn([p, p], [q], draws=8_000, seed=3)
    counts = np.bincount([outcome[0] for outcome in outcomes], minlength=8).astype(np.float64)
    assert chi_square(counts, p) < CHI_SQUARE_7


def test_without_a_planted_bug_everything_holds() -> None:
    _everything()


@pytest.mark.parametrize("name", MUTANTS)
def test_the_planted_bug_is_caught(name: str) -> None:
    mutant = MUTANTS[name]
    with (
        mock.patch.object(mutant.owner, mutant.attribute, mutant.replacement),
        pytest.raises(AssertionError),
    ):
        _everything()
