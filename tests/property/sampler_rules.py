"""The sampler's laws as functions that raise AssertionError where one is broken.

`RULES` hold for any batch with usable logits; `LAWS` are checked at fixed seeds.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from mvllm.core.sampling import keyed_noise, penalties, sampler
from mvllm.core.step import RowStatus, StepOutput
from tests.models import slow_sampler
from tests.sampling_cases import Batch, Row, arrays, differences, select


def _sample(batch: Batch) -> StepOutput:
    return sampler.sample(batch.logits, batch.sampling)


def _slow_rows(batch: Batch) -> list[list[float]]:
    rows = zip(batch.rows, batch.logits, strict=True)
    return [slow_sampler.modified_logits(logits.tolist(), row) for row, logits in rows]


def _changed(batch: Batch, **changes: object) -> Batch:
    return dataclasses.replace(batch, rows=[dataclasses.replace(row, **changes) for row in batch.rows])  # type: ignore[arg-type]


# --- rules for any batch -----------------------------------------------------------------------------


def only_kept_tokens_are_drawn(batch: Batch) -> None:
    output = _sample(batch)
    for token, status, row, logits in zip(
        output.tokens, output.status, batch.rows, _slow_rows(batch), strict=True
    ):
        if status == RowStatus.OK:
            assert logits[token] > -math.inf
            kept = slow_sampler.kept_tokens(logits, row)
            assert kept is None or token in kept


def greedy_takes_the_lowest_of_the_most_likely(batch: Batch) -> None:
    cold, cool = _sample(_changed(batch, temperature=0.0)), _sample(_changed(batch, temperature=1e-5))
    for row, logits in enumerate(_slow_rows(batch)):
        if cold.status[row] != RowStatus.OK:
            continue
        assert cold.tokens[row] == logits.index(max(logits))
        others = [value for token, value in enumerate(logits) if token != cold.tokens[row]]
        if max(others, default=-math.inf) < max(logits) - 0.01:
            assert cool.tokens[row] == cold.tokens[row]


def settings_that_filter_nothing_change_nothing(batch: Batch) -> None:
    vocab = batch.logits.shape[1]
    free = _changed(batch, top_k=0, top_p=1.0, min_p=0.0)
    for top_k in (-1, vocab, vocab + 7, 2**31 - 1):
        assert not differences(_sample(free), _sample(_changed(free, top_k=top_k)))
    only_one = _changed(batch, top_k=1, temperature=1.0)
    assert not differences(_sample(only_one), _sample(_changed(batch, temperature=0.0)))


def shifting_and_scaling_logits_changes_no_token(batch: Batch) -> None:
    plain = _changed(batch, counts={}, bias={}, num_logprobs=-1, target=-1)
    shifted = dataclasses.replace(plain, logits=plain.logits + np.float32(16.25))
    assert not differences(_sample(plain), _sample(shifted))
    warm = _changed(plain, temperature=0.75)
    scaled = dataclasses.replace(_changed(plain, temperature=3.0), logits=plain.logits * np.float32(4))
    assert not differences(_sample(warm), _sample(scaled))


def the_nucleus_is_minimal_and_nested(batch: Batch) -> None:
    for row, logits in zip(batch.rows, batch.logits, strict=True):
        scaled = sampler.scaled_logits(logits, np.float32(0.5 + row.temperature))
        probability = np.exp(scaled)
        kept_before = sampler.kept_tokens(logits, scaled, min_p=row.min_p, top_k=row.top_k, top_p=1.0)
        total = probability[kept_before].sum()
        for top_p in (0.9, row.top_p, 0.3, 1e-9):
            kept = sampler.kept_tokens(
                logits, scaled, min_p=row.min_p, top_k=row.top_k, top_p=min(top_p, 0.95)
            )
            share = probability[kept].sum() / total
            assert len(kept) >= 1
            assert share >= min(top_p, 0.95) - slow_sampler.MARGIN
            if len(kept) > 1:
                without_last = share - probability[kept[-1]] / total
                assert without_last < min(top_p, 0.95) + slow_sampler.MARGIN
            if top_p == 1e-9:
                assert set(kept) <= set(kept_before)
        half, most = (
            sampler.kept_tokens(logits, scaled, min_p=row.min_p, top_k=row.top_k, top_p=top_p)
            for top_p in sorted((row.top_p, 0.5))
        )
        assert list(most[: len(half)]) == list(half)


def a_row_does_not_depend_on_its_neighbours(batch: Batch) -> None:
    output = _sample(batch)
    for index, row in enumerate(batch.rows):
        width = max(0, row.num_logprobs)
        alone = sampler.sample(batch.logits[index : index + 1], arrays([row]))
        assert not differences(alone, select(output, [index], width))
    order = list(reversed(range(len(batch.rows))))
    turned = sampler.sample(batch.logits[order], arrays([batch.rows[index] for index in order]))
    assert not differences(turned, select(output, order, output.top_tokens.shape[1]))


def unusable_logits_fail_their_row_only(batch: Batch) -> None:
    vocab = batch.logits.shape[1]
    faults = [(np.nan, RowStatus.NAN), (np.inf, RowStatus.INFINITE), (-np.inf, RowStatus.EMPTY)]
    expected = _sample(batch)
    for value, status in faults:
        bad = batch.logits[:1].copy()
        bad[0, vocab - 1 if status is not RowStatus.EMPTY else slice(None)] = value
        together = Batch([*batch.rows, batch.rows[0]], np.concatenate([batch.logits, bad]))
        output = _sample(together)
        assert output.status[-1] == status
        assert output.tokens[-1] == sampler.NO_TOKEN
        rest = range(len(batch.rows))
        assert not differences(expected, select(output, rest, expected.top_tokens.shape[1]))


def penalties_and_bias_change_what_they_should(batch: Batch) -> None:
    sampling = batch.sampling
    for row, slow in enumerate(_slow_rows(batch)):
        modified = penalties.modified_logits(batch.logits[row], sampling, row)
        assert modified.tolist() == slow


def logprobs_are_of_the_models_own_distribution(batch: Batch) -> None:
    asked = _changed(batch, num_logprobs=min(5, batch.logits.shape[1]))
    own_logits = batch.logits.tolist()
    output = _sample(asked)
    for row, logits in enumerate(own_logits):
        if output.status[row] != RowStatus.OK:
            continue
        slow = slow_sampler.logprobs(logits)
        order = [token for _, token in sorted((-value, token) for token, value in enumerate(logits))]
        tokens, values = output.top_tokens[row], output.top_logprobs[row]
        assert tokens.tolist() == order[: len(tokens)]
        np.testing.assert_allclose(values, [slow[token] for token in tokens], rtol=1e-6, atol=1e-9)
        assert (values <= 0).all()
        assert np.exp(values.astype(np.float64)).sum() <= 1 + 1e-6
        np.testing.assert_allclose(output.logprob[row], slow[output.tokens[row]], rtol=1e-6, atol=1e-9)
        assert output.rank[row] == 1 + order.index(output.tokens[row])
        target = batch.rows[row].target
        expected = slow[target] if target >= 0 else 0.0
        np.testing.assert_allclose(output.target_logprob[row], expected, rtol=1e-6, atol=1e-9)


RULES: dict[str, Callable[[Batch], None]] = {
    "M1 only kept tokens are drawn": only_kept_tokens_are_drawn,
    "M2 greedy takes the lowest id of the most likely": greedy_takes_the_lowest_of_the_most_likely,
    "M3 settings that filter nothing change nothing": settings_that_filter_nothing_change_nothing,
    "M3 shifting and scaling change no token": shifting_and_scaling_logits_changes_no_token,
    "M4 the nucleus is minimal and nested": the_nucleus_is_minimal_and_nested,
    "M5 a row does not depend on its neighbours": a_row_does_not_depend_on_its_neighbours,
    "M8 unusable logits fail their row only": unusable_logits_fail_their_row_only,
    "M10 penalties and bias change what they should": penalties_and_bias_change_what_they_should,
    "K1 logprobs are of the model's own distribution": logprobs_are_of_the_models_own_distribution,
}


# --- laws at fixed seeds -----------------------------------------------------------------------------

CHI_SQUARE_LIMITS = {1: 10.83, 2: 13.82, 3: 16.27, 4: 18.47}  # exceeded once in 1,000, by degrees of freedom


def _chi_square(tokens: NDArray[np.int32], probabilities: NDArray[np.float64]) -> float:
    kept = probabilities > 0
    counts = np.bincount(tokens, minlength=len(probabilities))
    assert counts[~kept].sum() == 0
    expected = probabilities[kept] * len(tokens)
    return float((((counts[kept] - expected) ** 2) / expected).sum())


def tokens_follow_their_probabilities() -> None:
    logits = np.array([1.5, -0.5, 0.0, 0.25, 1.0], np.float32)
    turned = np.array([3, 0, 4, 1, 2])
    draws = 600
    for row in (Row(), Row(temperature=0.5, top_k=4, top_p=0.95), Row(temperature=2.0, min_p=0.3)):
        kept = slow_sampler.kept_tokens(logits.tolist(), row)
        assert kept is not None
        probabilities = np.zeros(5)
        probabilities[kept] = np.exp(logits[kept].astype(np.float64) / row.temperature)
        probabilities /= probabilities.sum()
        limit = CHI_SQUARE_LIMITS[len(kept) - 1]
        by_position = [dataclasses.replace(row, seed=7, position=index) for index in range(draws)]
        by_seed = [dataclasses.replace(row, seed=index, position=11) for index in range(draws)]
        for rows in (by_position, by_seed):
            for order in (np.arange(5), turned):
                batch = Batch(rows, np.broadcast_to(logits[order], (draws, 5)))
                assert _chi_square(_sample(batch).tokens, probabilities[order]) < limit


def filters_agree_with_the_slow_computation() -> None:
    random = np.random.default_rng(2)
    compared = 0
    special = [(1, 0.1, 0.0), (0, 1e-9, 0.0), (0, 1.0, 1.0), (3, 0.5, 0.1), (1, 0.8, 0.5)]
    for case in range(500):
        vocab = int(random.integers(1, 40))
        logits = (random.standard_normal(vocab) * random.choice([0.1, 1.0, 5.0])).astype(np.float32)
        if case % 2:
            logits = np.round(logits * 2) / 2
        logits[random.random(vocab) < 0.1] = -np.inf
        logits[random.integers(vocab)] = 1.0
        if case < 5 * len(special):
            top_k, top_p, min_p = special[case % len(special)]
        else:
            top_k = int(random.choice([0, int(random.integers(1, 45))]))
            top_p = float(random.choice([1.0, random.random()]))
            min_p = float(random.choice([0.0, random.random()]))
        temperature = float(random.choice([1e-4, 0.3, 1.0, 2.0, 100.0]))
        row = Row(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        expected = slow_sampler.kept_tokens(logits.tolist(), row)
        if expected is None:
            continue
        compared += 1
        scaled = sampler.scaled_logits(logits, np.float32(temperature))
        min_p, top_p = float(np.float32(min_p)), float(np.float32(top_p))
        assert sampler.kept_tokens(logits, scaled, min_p=min_p, top_k=top_k, top_p=top_p).tolist() == expected
    assert compared > 450


def noise_is_finite_for_every_raw_output() -> None:
    edges = np.array([0, 1, 2**12 - 1, 2**12, 2**63, 2**64 - 2**12, 2**64 - 2, 2**64 - 1], np.uint64)
    uniform = keyed_noise.uniform_from_raw(edges)
    assert (uniform > 0).all()
    assert (uniform < 1).all()
    noise = keyed_noise.gumbel_from_raw(edges)
    assert np.isfinite(noise).all()
    assert (noise > -3.7).all()
    assert (noise < 36.8).all()


LAWS: dict[str, Callable[[], None]] = {
    "M7 tokens follow their probabilities": tokens_follow_their_probabilities,
    "J2 filters agree with the slow computation": filters_agree_with_the_slow_computation,
    "M0 noise is finite for every raw output": noise_is_finite_for_every_raw_output,
}
