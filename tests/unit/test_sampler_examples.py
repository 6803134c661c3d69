"""Worked examples of the sampler: each a case that users of other engines stumbled over."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from numpy.typing import NDArray

from mvllm.core.sampling import arithmetic
from mvllm.core.sampling.sampler import kept_tokens, sample, scaled_logits
from mvllm.core.step import RowStatus, StepOutput
from tests.sampling_cases import Row, arrays

NEGATIVE_INFINITY = -math.inf


def _run(rows: list[Row], logits: list[float] | list[list[float]]) -> StepOutput:
    array = np.array(logits, np.float32)
    return sample(np.broadcast_to(array, (len(rows), array.shape[-1])), arrays(rows))


def _token(row: Row, logits: list[float]) -> int:
    return int(_run([row], logits).tokens[0])


def _kept(logits: list[float], *, min_p: float = 0.0, top_k: int = 0, top_p: float = 1.0) -> list[int]:
    array = np.array(logits, np.float32)
    scaled = scaled_logits(array, np.float32(1.0))
    return [int(token) for token in kept_tokens(array, scaled, min_p=min_p, top_k=top_k, top_p=top_p)]


# --- J1: what penalties count ------------------------------------------------------------------------


@pytest.mark.parametrize("penalty", ["presence_penalty", "frequency_penalty"])
def test_presence_and_frequency_leave_prompt_tokens_alone(penalty: str) -> None:
    """J1: the greedy token stays while it is in the prompt only, and goes once it was generated."""
    logits = [1.0, 2.0, 0.5]
    in_prompt, generated = (Row(temperature=0.0, counts={1: counts}) for counts in ((5, 0), (0, 1)))
    assert _token(dataclasses.replace(in_prompt, **{penalty: 2.0}), logits) == 1  # type: ignore[arg-type]
    assert _token(dataclasses.replace(generated, **{penalty: 2.0}), logits) == 0  # type: ignore[arg-type]


def test_repetition_counts_the_prompt_and_works_on_either_side_of_zero() -> None:
    """J1: 1.5 takes 2.0 down to 1.33 and -1.0 down to -1.5."""
    assert _token(Row(temperature=0.0, repetition_penalty=1.5, counts={1: (1, 0)}), [1.5, 2.0]) == 0
    assert _token(Row(temperature=0.0, repetition_penalty=1.5, counts={1: (1, 0)}), [1.25, 2.0]) == 1
    assert _token(Row(temperature=0.0, repetition_penalty=1.5, counts={1: (0, 1)}), [-1.25, -1.0]) == 0


def test_frequency_grows_with_the_count_and_presence_does_not() -> None:
    """J1, M10."""
    thrice = {0: (0, 3)}
    assert _token(Row(temperature=0.0, frequency_penalty=0.5, counts=thrice), [2.0, 0.75]) == 1
    assert _token(Row(temperature=0.0, presence_penalty=0.5, counts=thrice), [2.0, 0.75]) == 0


# --- J2: filters -------------------------------------------------------------------------------------


def test_equal_tokens_are_kept_from_the_lowest_id_up() -> None:
    """J2, M4: exactly half of the mass is two of four; a little more takes a third."""
    assert _kept([1.0] * 4, top_p=0.5) == [0, 1]
    assert _kept([1.0] * 4, top_p=0.50001) == [0, 1, 2]
    assert _kept([0.0, 2.0, 1.0, 1.0, 1.0], top_k=3) == [1, 2, 3]


def test_top_p_applies_to_what_top_k_left() -> None:
    """J2: four equal tokens cut to two share their mass in halves, so 0.5 keeps one."""
    assert _kept([0.0] * 4, top_k=2, top_p=0.5) == [0]


def test_no_setting_keeps_nothing() -> None:
    """J2."""
    logits = [0.0, 3.0, 3.0, NEGATIVE_INFINITY]
    assert _kept(logits, top_k=1, top_p=0.1) == [1]
    assert _kept(logits, top_p=1e-9) == [1]
    assert _kept(logits, min_p=1.0) == [1, 2]
    assert _kept(logits) == [1, 2, 0]


def test_min_p_is_relative_to_the_most_likely_token() -> None:
    """J2: after temperature, exp(-1) of the best is above 0.3 and exp(-2) is not."""
    assert _kept([5.0, 4.0, 3.0], min_p=0.3) == [0, 1]


# --- J4: temperature ---------------------------------------------------------------------------------


def test_extreme_temperatures_share_a_batch() -> None:
    """J4: nothing overflows; below the threshold, and near it, the best token is taken."""
    temperatures = [0.0, 1e-45, 1e-8, 9.9e-6, 1e-5, 1e-4, 2.0, 100.0, 3e38]
    logits = [3e38, 10.0, -3e38, NEGATIVE_INFINITY]
    output = _run([Row(temperature=temperature, seed=3) for temperature in temperatures], logits)
    assert (output.status == RowStatus.OK).all()
    assert (output.tokens[:8] == 0).all()
    assert output.tokens[8] in (0, 1, 2)


def test_temperature_exactly_at_the_threshold_is_not_greedy() -> None:
    """J4: float32(1e-5) is a little less than 1e-5, and yet a temperature of 1e-5 samples."""
    tokens = _run([Row(temperature=1e-5, seed=seed) for seed in range(50)], [1.0, 1.0]).tokens
    assert set(tokens.tolist()) == {0, 1}
    tokens = _run([Row(temperature=9.9e-6, seed=seed) for seed in range(50)], [1.0, 1.0]).tokens
    assert set(tokens.tolist()) == {0}


# --- J6, J8: seeds -----------------------------------------------------------------------------------


def test_a_seeded_row_is_the_same_alone_and_among_others() -> None:
    """J6."""
    seeded = Row(temperature=0.8, seed=42, position=17)
    logits = np.random.default_rng(0).standard_normal(200).tolist()
    alone = _token(seeded, logits)
    crowd = [Row(seed=index * 1_000_003, position=17) for index in range(6)]
    for place in range(7):
        output = _run([*crowd[:place], seeded, *crowd[place:]], logits)
        assert output.tokens[place] == alone


def test_equal_seeds_at_equal_positions_draw_alike() -> None:
    """J8: which is why siblings get seeds of their own."""
    output = _run([Row(seed=5, position=2), Row(seed=5, position=2)], [0.0] * 100)
    assert output.tokens[0] == output.tokens[1]


# --- J9: bias ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_bias_of_100_forces_and_of_minus_100_removes(temperature: float) -> None:
    """J9: for logits within the usual range, at any seed."""
    logits = [12.0, 9.0, -15.0, 3.0]
    rows = [Row(temperature=temperature, seed=seed) for seed in range(200)]
    forced = [Row(temperature=temperature, seed=row.seed, bias={2: 100.0}) for row in rows]
    removed = [Row(temperature=temperature, seed=row.seed, bias={0: -100.0}) for row in rows]
    assert (_run(forced, logits).tokens == 2).all()
    assert (_run(removed, logits).tokens != 0).all()


def test_bias_does_not_show_in_logprobs() -> None:
    """J9, K1."""
    plain, biased = Row(num_logprobs=2, target=0), Row(num_logprobs=2, target=0, bias={0: -100.0, 1: 50.0})
    output = _run([plain, biased], [2.0, 1.0, 0.0])
    assert output.top_logprobs[0].tolist() == output.top_logprobs[1].tolist()
    assert output.target_logprob[0] == output.target_logprob[1]


def test_banning_every_token_fails_the_row() -> None:
    """M8, J9."""
    banned = Row(bias=dict.fromkeys(range(3), NEGATIVE_INFINITY), num_logprobs=1)
    output = _run([Row(), banned], [1.0, 2.0, 3.0])
    assert output.status.tolist() == [RowStatus.OK, RowStatus.EMPTY]
    assert output.top_tokens[1].tolist() == [-1]


# --- K1: logprobs ------------------------------------------------------------------------------------


def test_logprobs_are_the_same_at_every_temperature_and_under_every_filter() -> None:
    """K1."""
    rows = [Row(temperature=temperature, num_logprobs=3) for temperature in (0.0, 0.5, 2.0)]
    rows += [Row(top_k=1, num_logprobs=3), Row(bias={3: -100.0}, num_logprobs=3)]
    output = _run(rows, [0.0, 1.0, 2.0, 3.0])
    for row in range(1, len(rows)):
        assert output.top_logprobs[row].tolist() == output.top_logprobs[0].tolist()
        assert output.top_tokens[row].tolist() == [3, 2, 1]
    total = math.log(sum(math.exp(value) for value in range(4)))
    np.testing.assert_allclose(output.top_logprobs[0], [3 - total, 2 - total, 1 - total], rtol=1e-7)


def test_ranks_and_top_lists_put_the_lower_id_first() -> None:
    """K1."""
    output = _run([Row(temperature=0.0, bias={2: 10.0}, num_logprobs=4)], [1.0, 5.0, 5.0, 5.0, 0.0])
    assert output.tokens[0] == 2
    assert output.rank[0] == 2
    assert output.top_tokens[0].tolist() == [1, 2, 3, 0]


def test_rows_that_ask_for_fewer_logprobs_are_padded() -> None:
    output = _run([Row(num_logprobs=-1), Row(num_logprobs=0), Row(num_logprobs=2)], [1.0, 0.0, 2.0])
    assert output.top_tokens.tolist() == [[-1, -1], [-1, -1], [2, 0]]
    assert output.rank[0] == 0
    assert output.logprob[0] == 0.0
    assert output.rank[1] > 0


# --- arithmetic --------------------------------------------------------------------------------------


def _relative_error(values: NDArray[np.float64], expected: list[float]) -> float:
    return float(np.abs(values / np.array(expected) - 1.0).max())


def test_exp_and_log_are_accurate() -> None:
    random = np.random.default_rng(1)
    x = np.concatenate([-64.0 * random.random(20_000), -(2.0 ** -np.arange(1, 60.0))])
    assert _relative_error(arithmetic.exp(x), [math.exp(value) for value in x]) < 1e-14
    near_one = 1.0 - 2.0 ** -np.arange(1, 54.0)
    x = np.concatenate(
        [np.exp(random.standard_normal(20_000) * 50), near_one, 1.0 + 2.0 ** -np.arange(1, 53.0)]
    )
    assert _relative_error(arithmetic.log(x), [math.log(value) for value in x]) < 1e-15
    assert arithmetic.log_scalar(1.0) == 0.0


def test_masses_are_exact_at_both_ends() -> None:
    x = np.array([0.0, -0.0, -31.0, -32.0, -1e300, NEGATIVE_INFINITY])
    assert arithmetic.masses(x).tolist() == [2**44, 2**44, 1, 0, 0, 0]
    assert arithmetic.masses(np.array([-math.log(2.0)]))[0] == 2**43
