"""Rows, logits and comparisons shared by the sampler's tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from mvllm.core.step import SamplingArrays, StepOutput


@dataclass(frozen=True)
class Row:
    """Settings of one logit row, plain values."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    position: int = 0
    num_logprobs: int = -1
    target: int = -1
    counts: Mapping[int, tuple[int, int]] = field(default_factory=dict)  # token: (in prompt, in output)
    bias: Mapping[int, float] = field(default_factory=dict)


_DTYPES: dict[str, type[np.generic]] = {
    "temperature": np.float32,
    "top_k": np.int32,
    "top_p": np.float32,
    "min_p": np.float32,
    "repetition_penalty": np.float32,
    "presence_penalty": np.float32,
    "frequency_penalty": np.float32,
    "seed": np.uint64,
    "position": np.int32,
    "num_logprobs": np.int32,
    "target": np.int32,
}


def arrays(rows: Sequence[Row]) -> SamplingArrays:
    """The sampling arrays of a batch of rows."""
    scalars = {name: np.array([getattr(row, name) for row in rows], dtype) for name, dtype in _DTYPES.items()}
    counts = [sorted(row.counts.items()) for row in rows]
    biases = [sorted(row.bias.items()) for row in rows]
    flat_counts = [item for row in counts for item in row]
    flat_biases = [item for row in biases for item in row]
    return SamplingArrays(
        **scalars,
        count_offsets=np.cumsum([0, *map(len, counts)], dtype=np.int32),
        count_tokens=np.array([token for token, _ in flat_counts], np.int32),
        prompt_counts=np.array([prompt for _, (prompt, _) in flat_counts], np.int32),
        output_counts=np.array([output for _, (_, output) in flat_counts], np.int32),
        bias_offsets=np.cumsum([0, *map(len, biases)], dtype=np.int32),
        bias_tokens=np.array([token for token, _ in flat_biases], np.int32),
        bias_values=np.array([value for _, value in flat_biases], np.float32),
    )


def differences(left: StepOutput, right: StepOutput) -> list[str]:
    """Fields in which two outputs differ in any bit."""
    return [
        output_field.name
        for output_field in fields(StepOutput)
        if not _same_bits(getattr(left, output_field.name), getattr(right, output_field.name))
    ]


def select(output: StepOutput, rows: Sequence[int], width: int) -> StepOutput:
    """`output` cut to `rows`, in that order, and its top lists to `width`."""
    picked = {
        output_field.name: getattr(output, output_field.name)[list(rows)]
        for output_field in fields(StepOutput)
    }
    for name in ("top_tokens", "top_logprobs"):
        picked[name] = np.ascontiguousarray(picked[name][:, :width])
    return StepOutput(**picked)


def _same_bits(left: NDArray[Any], right: NDArray[Any]) -> bool:
    return left.shape == right.shape and left.dtype == right.dtype and left.tobytes() == right.tobytes()


# --- strategies --------------------------------------------------------------------------------------


def logits(vocab: int, *, unusable: bool = False) -> st.SearchStrategy[NDArray[np.float32]]:
    """f32[vocab]: multiples of 1/4 (ties are common), some -inf, at least one finite; with `unusable` also
    extremes, zeros of both signs, NaN and +inf, and perhaps nothing finite.
    """
    quarters = st.integers(-80, 80).map(lambda n: n / 4)
    values = st.one_of(quarters, quarters, quarters, st.just(-np.inf))
    if unusable:
        odd = st.sampled_from([np.nan, np.inf, -np.inf, 0.0, -0.0, 3e38, -3e38, 1e-45, -1e-45])
        values = st.one_of(
            values, values, values, odd, st.floats(width=32, allow_nan=False, allow_infinity=False)
        )
    row = st.lists(values, min_size=vocab, max_size=vocab).map(lambda items: np.array(items, np.float32))
    return row if unusable else row.filter(lambda array: bool(np.isfinite(array).any()))


def settings(vocab: int, **fixed: Any) -> st.SearchStrategy[Row]:
    """Any valid settings; `fixed` fields are taken as given."""
    token = st.integers(0, vocab - 1)
    share = st.one_of(st.sampled_from([1e-9, 0.1, 0.5, 0.9, 1.0]), st.floats(1e-6, 1.0))
    free: dict[str, st.SearchStrategy[Any]] = {
        "temperature": st.one_of(st.sampled_from([0.0, 1e-45, 1e-5, 0.8, 1.0, 100.0]), st.floats(0.0, 4.0)),
        "top_k": st.one_of(st.sampled_from([-1, 0, 1, vocab, vocab + 1]), st.integers(1, vocab)),
        "top_p": share,
        "min_p": st.one_of(st.just(0.0), share),
        "repetition_penalty": st.sampled_from([1.0, 0.5, 1.1, 1.5, 1e-30]),
        "presence_penalty": st.sampled_from([0.0, 0.5, -2.0, 2.0]),
        "frequency_penalty": st.sampled_from([0.0, 0.5, -2.0, 2.0]),
        "seed": st.integers(0, 2**64 - 1),
        "position": st.integers(0, 2**31 - 1),
        "num_logprobs": st.integers(-1, min(5, vocab + 1)),
        "target": st.one_of(st.just(-1), token),
        "counts": st.dictionaries(token, st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=4),
        "bias": st.dictionaries(token, st.sampled_from([-100.0, -1.0, 0.5, 100.0, -np.inf]), max_size=3),
    }
    free.update({name: st.just(value) for name, value in fixed.items()})
    return st.builds(Row, **free)


@dataclass(frozen=True)
class Batch:
    """Rows and their logits f32[S, V]."""

    rows: list[Row]
    logits: NDArray[np.float32]

    @property
    def sampling(self) -> SamplingArrays:
        return arrays(self.rows)


@st.composite
def batches(draw: st.DrawFn, /, *, unusable: bool = False, max_vocab: int = 12, **fixed: Any) -> Batch:
    """One to four rows over a small vocabulary."""
    vocab = draw(st.integers(1, max_vocab))
    rows = draw(st.lists(settings(vocab, **fixed), min_size=1, max_size=4))
    stacked = np.stack([draw(logits(vocab, unusable=unusable)) for _ in rows])
    return Batch(rows, stacked)
