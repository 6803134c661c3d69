"""Penalties and bias: the only changes to logits before temperature and filters."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mvllm.core.step import SamplingArrays

LARGEST_LOGIT = float(np.finfo(np.float32).max)


def modified_logits(logits: NDArray[np.float32], sampling: SamplingArrays, row: int) -> NDArray[np.float32]:
    """Logits f32[V] of `row` after penalties, then bias; the argument itself if the row has neither.

    Repetition counts prompt and output, presence and frequency count output only. Each token is computed in
    float64, clamped to the finite range of float32 and rounded; infinities and NaN pass the clamp.
    """
    counts = slice(sampling.count_offsets[row], sampling.count_offsets[row + 1])
    biases = slice(sampling.bias_offsets[row], sampling.bias_offsets[row + 1])
    if counts.start == counts.stop and biases.start == biases.stop:
        return logits
    result = logits.copy()
    tokens = sampling.count_tokens[counts]
    result[tokens] = _penalized(result[tokens], sampling, row, counts)
    tokens = sampling.bias_tokens[biases]
    result[tokens] = _as_float32(result[tokens].astype(np.float64) + sampling.bias_values[biases])
    return result


def _penalized(
    logits: NDArray[np.float32], sampling: SamplingArrays, row: int, counts: slice
) -> NDArray[np.float32]:
    values = logits.astype(np.float64)
    prompt, output = sampling.prompt_counts[counts], sampling.output_counts[counts]
    repetition = float(sampling.repetition_penalty[row])
    repeated = np.where(values > 0.0, values / repetition, values * repetition)
    values = np.where((prompt > 0) | (output > 0), repeated, values)
    penalty = float(sampling.frequency_penalty[row]) * output + float(sampling.presence_penalty[row])
    return _as_float32(np.where(output > 0, values - penalty, values))


def _as_float32(values: NDArray[np.float64]) -> NDArray[np.float32]:
    clamped = np.clip(values, -LARGEST_LOGIT, LARGEST_LOGIT)
    return np.where(np.isinf(values), values, clamped).astype(np.float32)
