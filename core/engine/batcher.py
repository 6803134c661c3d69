"""Lowering of a plan to arrays: the one place where rows become a `ForwardBatch`."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from mvllm.core.engine.request_table import RequestState
from mvllm.core.step import ForwardBatch, KvGrant, PlannedRow, SamplingArrays
from mvllm.core.types import BlockId, RequestId


class Batcher:
    """Turns planned rows into arrays.

    Owns a memo of the block tables packed last, which saves converting long tables anew in each step; the
    result depends on the arguments alone. Does not change any row.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._packed: dict[RequestId, tuple[tuple[BlockId, ...], NDArray[np.int32]]] = {}

    def pack(
        self, rows: Sequence[PlannedRow], states: Sequence[RequestState], grant: KvGrant
    ) -> ForwardBatch:
        """The batch that computes `rows`; states[i] belongs to rows[i].

        A row gets a logit row, at its last token, only if the plan reaches the end of its tokens: there is
        nothing to sample in the middle of a prompt.
        """
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        row_starts = [0]
        logit_rows: list[int] = []
        sampled: list[RequestState] = []
        block_size = self._block_size
        for row, state in zip(rows, states, strict=True):
            table, start, end = grant.tables[row.id], row.start, row.end
            if row.count == 1:
                tokens.append(state.token_ids[start])
                positions.append(start)
                slots.append(table[start // block_size] * block_size + start % block_size)
            else:
                tokens += state.token_ids[start:end]
                positions += range(start, end)
                slots += [table[p // block_size] * block_size + p % block_size for p in range(start, end)]
            row_starts.append(len(tokens))
            if end == len(state.token_ids):
                logit_rows.append(len(tokens) - 1)
                sampled.append(state)
        return ForwardBatch(
            tokens=np.array(tokens, np.int32),
            positions=np.array(positions, np.int32),
            slots=np.array(slots, np.int32),
            row_starts=np.array(row_starts, np.int32),
            context_lens=np.array([row.end for row in rows], np.int32),
            block_tables=self._pack_tables([row.id for row in rows], grant),
            logit_rows=np.array(logit_rows, np.int32),
            sampling=pack_sampling(sampled),
        )

    def _pack_tables(self, ids: Sequence[RequestId], grant: KvGrant) -> NDArray[np.int32]:
        """int32[R, M], padded with -1. An unchanged table is the same tuple from step to step."""
        packed = {}
        for id in ids:
            table = grant.tables[id]
            known = self._packed.get(id)
            packed[id] = known if known and known[0] is table else (table, np.array(table, np.int32))
        self._packed = packed
        width = max([len(table) for table, _ in packed.values()], default=0)
        out = np.full((len(ids), width), -1, np.int32)
        for index, (table, ids_array) in enumerate(packed.values()):
            out[index, : len(table)] = ids_array
        return out


def pack_sampling(states: Sequence[RequestState]) -> SamplingArrays:
    """Sampling arrays of the rows that get a logit row, in order."""
    rows = [state.sampling for state in states]
    # One conversion, then six contiguous rows of it.
    filters = np.ascontiguousarray(np.array([row.filters for row in rows], np.float32).reshape(-1, 6).T)
    count_offsets, count_tokens, prompt_counts, output_counts = _pack_counts(states)
    biases = [state.sampling.bias_at(state.num_output_tokens) for state in states]
    return SamplingArrays(
        temperature=filters[0],
        top_p=filters[1],
        min_p=filters[2],
        repetition_penalty=filters[3],
        presence_penalty=filters[4],
        frequency_penalty=filters[5],
        top_k=np.array([row.top_k for row in rows], np.int32),
        seed=np.array([row.seed for row in rows], np.uint64),
        position=np.array([len(state.token_ids) for state in states], np.int32),
        num_logprobs=np.array([row.num_logprobs for row in rows], np.int32),
        target=np.full(len(rows), -1, np.int32),
        count_offsets=count_offsets,
        count_tokens=count_tokens,
        prompt_counts=prompt_counts,
        output_counts=output_counts,
        bias_offsets=_offsets([len(bias.tokens) for bias in biases]),
        bias_tokens=np.array([token for bias in biases for token in bias.tokens], np.int32),
        bias_values=np.array([value for bias in biases for value in bias.values], np.float32),
    )


def _pack_counts(
    states: Sequence[RequestState],
) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
    """Offsets, distinct tokens, and how often each is in the prompt and in the output; ascending per row."""
    counts = [state.counts for state in states]
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


def _offsets(lengths: Sequence[int]) -> NDArray[np.int32]:
    """Prefix sums, one more than lengths."""
    return np.array([0, *accumulate(lengths)], np.int32)
