"""Planted sampler bugs: each replaces one function, and some rule or law of the sampler must notice."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mvllm.core.sampling import keyed_noise, penalties, sampler
from mvllm.core.step import RowStatus, SamplingArrays
from tests.mutants.mutant import Mutant

Array = NDArray[Any]


_apply = penalties.modified_logits
_keep = sampler.kept_tokens
_scale = sampler.scaled_logits
_noise = keyed_noise.gumbel
_status = sampler.row_status
_choose = sampler._choose
_with_logprobs = sampler._with_logprobs


def _uniform_from_24_bits_in_float32(raw: Array) -> Array:
    high = (raw >> np.uint64(40)).astype(np.float32)
    return ((high + np.float32(0.5)) / np.float32(2**24)).astype(np.float64)


def _presence_counts_the_prompt(logits: Array, sampling: SamplingArrays, row: int, counts: slice) -> Array:
    seen = (sampling.prompt_counts[counts] + sampling.output_counts[counts]) > 0
    output = sampling.output_counts[counts]
    values = logits.astype(np.float64)
    repetition = float(sampling.repetition_penalty[row])
    values = np.where(seen, np.where(values > 0, values / repetition, values * repetition), values)
    values = values - sampling.frequency_penalty[row] * output - sampling.presence_penalty[row] * seen
    return np.asarray(values, np.float32)


def _repetition_always_divides(logits: Array, sampling: SamplingArrays, row: int, counts: slice) -> Array:
    output = sampling.output_counts[counts]
    values = logits.astype(np.float64) / float(sampling.repetition_penalty[row])
    values = values - sampling.frequency_penalty[row] * output - sampling.presence_penalty[row] * (output > 0)
    return np.asarray(values, np.float32)


def _top_p_keeps_one_too_many(
    logits: Array, scaled: Array, *, min_p: float, top_k: int, top_p: float
) -> Array:
    kept = _keep(logits, scaled, min_p=min_p, top_k=top_k, top_p=top_p)
    before = _keep(logits, scaled, min_p=min_p, top_k=top_k, top_p=1.0)
    return before[: len(kept) + 1]


def _top_p_keeps_one_too_few(
    logits: Array, scaled: Array, *, min_p: float, top_k: int, top_p: float
) -> Array:
    kept = _keep(logits, scaled, min_p=min_p, top_k=top_k, top_p=top_p)
    return kept[: max(1, len(kept) - 1)] if top_p < 1.0 else kept


def _top_p_before_top_k(logits: Array, scaled: Array, *, min_p: float, top_k: int, top_p: float) -> Array:
    kept = _keep(logits, scaled, min_p=min_p, top_k=0, top_p=top_p)
    return kept[:top_k] if top_k > 0 else kept


def _filters_order_ties_by_falling_id(logits: Array) -> Array:
    return np.lexsort((-np.arange(len(logits)), -logits))


def _noise_depends_on_the_place_in_the_batch(logits: Array, sampling: SamplingArrays, row: int) -> int:
    return _choose(logits, dataclasses.replace(sampling, seed=sampling.seed + np.uint64(row)), row)


def _noise_without_the_token(seed: Any, position: int, token_ids: Array) -> Array:
    return _noise(seed, position, np.zeros_like(token_ids))


def _noise_without_the_position(seed: Any, position: int, token_ids: Array) -> Array:
    return _noise(seed, 0, token_ids)


def _greedy_takes_the_highest_id(logits: Array, sampling: SamplingArrays, row: int) -> int:
    if sampling.temperature[row] < sampler.GREEDY_BELOW:
        return int(np.flatnonzero(logits == logits.max())[-1])
    return _choose(logits, sampling, row)


def _bad_logits_go_unnoticed(logits: Array) -> RowStatus:
    return RowStatus.OK if np.isnan(logits).any() else _status(logits)


def _penalties_in_place(logits: Array, sampling: SamplingArrays, row: int) -> Array:
    logits[:] = _apply(logits, sampling, row)
    return logits


def _penalties_of_the_first_row(logits: Array, sampling: SamplingArrays, row: int) -> Array:
    return _apply(logits, sampling, 0)


def _logprobs_rank_ties_by_falling_id(token: int, logits: Array, sampling: SamplingArrays, row: int) -> Any:
    turned = _with_logprobs(len(logits) - 1 - token, logits[::-1], sampling, row)
    return sampler._RowResult(
        token,
        logprob=turned.logprob,
        rank=turned.rank,
        target_logprob=turned.target_logprob,
        top_tokens=tuple(len(logits) - 1 - other for other in turned.top_tokens),
        top_logprobs=turned.top_logprobs,
    )


def _top_k_of_the_whole_vocabulary_drops_the_last(logits: Array, scaled: Array, **filters: Any) -> Array:
    kept = _keep(logits, scaled, **filters)
    return kept[:-1] if filters["top_k"] >= len(logits) and len(kept) > 1 else kept


def _temperature_is_capped_at_1(logits: Array, temperature: np.float32) -> Array:
    return _scale(logits, min(temperature, np.float32(1.0)))


MUTANTS: dict[str, Mutant] = {
    "top-k of the whole vocabulary drops the last token": Mutant(
        sampler,
        "kept_tokens",
        _top_k_of_the_whole_vocabulary_drops_the_last,
        "M3 settings that filter nothing change nothing",
    ),
    "temperature is capped at 1": Mutant(
        sampler, "scaled_logits", _temperature_is_capped_at_1, "M3 shifting and scaling change no token"
    ),
    "uniform numbers of 24 bits round to 1": Mutant(
        keyed_noise,
        "uniform_from_raw",
        _uniform_from_24_bits_in_float32,
        "M0 noise is finite for every raw output",
    ),
    "presence penalty counts the prompt": Mutant(
        penalties,
        "_penalized",
        _presence_counts_the_prompt,
        "M10 penalties and bias change what they should",
    ),
    "repetition penalty rewards negative logits": Mutant(
        penalties,
        "_penalized",
        _repetition_always_divides,
        "M10 penalties and bias change what they should",
    ),
    "top-p keeps one too many": Mutant(
        sampler, "kept_tokens", _top_p_keeps_one_too_many, "M4 the nucleus is minimal and nested"
    ),
    "top-p keeps one too few": Mutant(
        sampler, "kept_tokens", _top_p_keeps_one_too_few, "M4 the nucleus is minimal and nested"
    ),
    "top-p before top-k": Mutant(
        sampler, "kept_tokens", _top_p_before_top_k, "J2 filters agree with the slow computation"
    ),
    "ties at the top-k border go to the highest id": Mutant(
        sampler, "descending", _filters_order_ties_by_falling_id, "M1 only kept tokens are drawn"
    ),
    "noise depends on how many rows came before": Mutant(
        sampler,
        "_choose",
        _noise_depends_on_the_place_in_the_batch,
        "M5 a row does not depend on its neighbours",
    ),
    "noise is the same for every token": Mutant(
        sampler, "gumbel", _noise_without_the_token, "M7 tokens follow their probabilities"
    ),
    "noise is the same at every position": Mutant(
        sampler, "gumbel", _noise_without_the_position, "M7 tokens follow their probabilities"
    ),
    "greedy ties go to the highest id": Mutant(
        sampler, "_choose", _greedy_takes_the_highest_id, "M2 greedy takes the lowest id of the most likely"
    ),
    "a NaN goes unnoticed": Mutant(
        sampler, "row_status", _bad_logits_go_unnoticed, "M8 unusable logits fail their row only"
    ),
    "penalties change the model's logits": Mutant(
        sampler, "modified_logits", _penalties_in_place, "K1 logprobs are of the model's own distribution"
    ),
    "penalties of a neighbour": Mutant(
        sampler, "modified_logits", _penalties_of_the_first_row, "M5 a row does not depend on its neighbours"
    ),
    "ranks order ties by falling id": Mutant(
        sampler,
        "_with_logprobs",
        _logprobs_rank_ties_by_falling_id,
        "K1 logprobs are of the model's own distribution",
    ),
}
