"""Sampling parameters of logit rows, one array per parameter."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from mvllm.core.batch.row_sampling import RowSampling
from mvllm.core.batch.sampling_row import SamplingRow
from mvllm.core.batch.token_counts import TokenCounts
from mvllm.core.step import SamplingArrays
from mvllm.core.types import TokenId

LogitRow = tuple[RowSampling, int, tuple[TokenId, ...]]
"""A sequence's sampling, the position that the drawn token will take, and the drafts that stand before it."""

_Counts = tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]
"""Offsets, distinct tokens, and how often each is in the prompt and in the output."""

_Biases = tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.float32]]
"""Offsets, tokens and values."""


class SamplingPacker:
    """Packs logit rows. Owns a memo of the parameters packed last, which mostly stay the same from step to
    step; the result depends on the arguments alone."""

    def __init__(self) -> None:
        self._constants = _Constants.of([])

    def pack(self, logit_rows: Sequence[LogitRow]) -> SamplingArrays:
        """Sampling arrays of the logit rows, in order."""
        rows = [sampling.row for sampling, _, _ in logit_rows]
        if rows != self._constants.rows:
            self._constants = _Constants.of(rows)
        constants = self._constants
        count_offsets, count_tokens, prompt_counts, output_counts = (
            _pack_counts(logit_rows) or constants.no_counts
        )
        bias_offsets, bias_tokens, bias_values = _pack_biases(logit_rows) or constants.no_biases
        return SamplingArrays(
            temperature=constants.filters[0],
            top_p=constants.filters[1],
            min_p=constants.filters[2],
            repetition_penalty=constants.filters[3],
            presence_penalty=constants.filters[4],
            frequency_penalty=constants.filters[5],
            top_k=constants.top_k,
            seed=constants.seed,
            position=np.array([position for _, position, _ in logit_rows], np.int32),
            num_logprobs=constants.num_logprobs,
            target=constants.target,
            count_offsets=count_offsets,
            count_tokens=count_tokens,
            prompt_counts=prompt_counts,
            output_counts=output_counts,
            bias_offsets=bias_offsets,
            bias_tokens=bias_tokens,
            bias_values=bias_values,
        )


@dataclass(frozen=True, slots=True)
class _Constants:
    """What depends on the sampling parameters alone; S logit rows."""

    rows: list[SamplingRow]
    filters: tuple[NDArray[np.float32], ...]  # six of [S]
    top_k: NDArray[np.int32]  # [S]
    seed: NDArray[np.uint64]  # [S]
    num_logprobs: NDArray[np.int32]  # [S]
    target: NDArray[np.int32]  # [S]
    no_counts: _Counts
    no_biases: _Biases

    @classmethod
    def of(cls, rows: list[SamplingRow]) -> _Constants:
        offsets, no_ints = np.zeros(len(rows) + 1, np.int32), np.zeros(0, np.int32)
        return cls(
            rows=rows,
            # One conversion, then six contiguous rows of it.
            filters=tuple(
                np.ascontiguousarray(np.array([row.filters for row in rows], np.float32).reshape(-1, 6).T)
            ),
            top_k=np.array([row.top_k for row in rows], np.int32),
            seed=np.array([row.seed for row in rows], np.uint64),
            num_logprobs=np.array([row.num_logprobs for row in rows], np.int32),
            target=np.full(len(rows), -1, np.int32),
            no_counts=(offsets, no_ints, no_ints, no_ints),
            no_biases=(offsets, no_ints, np.zeros(0, np.float32)),
        )


def _pack_counts(logit_rows: Sequence[LogitRow]) -> _Counts | None:
    """The counts, ascending per row; None if no row has any."""
    counts = [
        sampling.counts if sampling.counts is None or not drafts else _with_drafts(sampling.counts, drafts)
        for sampling, _, drafts in logit_rows
    ]
    if counts.count(None) == len(counts):
        return None
    tokens, in_prompt, in_output = array("i"), array("i"), array("i")
    for row in counts:
        if row is not None:
            tokens += row.tokens
            in_prompt += row.in_prompt
            in_output += row.in_output
    return (
        _offsets([0 if row is None else len(row) for row in counts]),
        np.array(tokens, np.int32),
        np.array(in_prompt, np.int32),
        np.array(in_output, np.int32),
    )


def _with_drafts(counts: TokenCounts, drafts: Sequence[TokenId]) -> TokenCounts:
    """Counts as they will be if the drafts become output (INVARIANTS M10)."""
    counts = counts.copy()
    counts.add_output(drafts)
    return counts


def _pack_biases(logit_rows: Sequence[LogitRow]) -> _Biases | None:
    """The biases; the output's length at its own position decides for each logit row. None if there are
    none."""
    biases = [
        sampling.row.bias_at(position - sampling.num_prompt_tokens) for sampling, position, _ in logit_rows
    ]
    if not any(bias.tokens for bias in biases):
        return None
    return (
        _offsets([len(bias.tokens) for bias in biases]),
        np.array([token for bias in biases for token in bias.tokens], np.int32),
        np.array([value for bias in biases for value in bias.values], np.float32),
    )


def _offsets(lengths: Sequence[int]) -> NDArray[np.int32]:
    """Prefix sums, one more than lengths."""
    return np.array([0, *accumulate(lengths)], np.int32)
