"""Lowering of rows to arrays: the one place where rows become a `ForwardBatch`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mvllm.core.batch.row_sampling import RowSampling
from mvllm.core.batch.sampling_arrays import LogitRow, SamplingPacker
from mvllm.core.step import NO_VOCAB_LIMIT, ForwardBatch
from mvllm.core.types import BlockId, RequestId, TokenId


class BatchRow(NamedTuple):
    """Compute positions `[start, end)` of a sequence: its committed tokens, followed by drafts.

    The last `num_logit_rows` of these positions get a logit row each. The one at position p draws the token
    of position p + 1, as if the drafts up to p were part of the output.
    """

    id: RequestId
    table: tuple[BlockId, ...]
    token_ids: Sequence[TokenId]  # committed; only read, and only while the batch is packed
    drafts: tuple[TokenId, ...]
    start: int
    end: int
    sampling: RowSampling | None  # None: no logit row
    num_logit_rows: int
    first: int = 0
    """Tokens of the sequence before those given here, unknown to the model: noise and minimum length count
    them."""


class Batcher:
    """Turns rows into arrays.

    Owns memos of the sampling parameters packed last, of each row's block table and of all of them together,
    which save converting anew what most steps leave as it was; the result depends on the arguments alone.
    Does not change any row.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._sampling = SamplingPacker()
        self._packed: dict[RequestId, tuple[tuple[BlockId, ...], NDArray[np.int32]]] = {}
        self._tables: list[tuple[BlockId, ...]] = []
        self._packed_tables: NDArray[np.int32] = np.empty((0, 0), np.int32)

    def pack(self, rows: Sequence[BatchRow], vocab_limit: int = NO_VOCAB_LIMIT) -> ForwardBatch:
        """The batch that computes `rows`, which have distinct ids, and draws ids below `vocab_limit` only."""
        tokens: list[TokenId] = []
        positions: list[int] = []
        slots: list[int] = []
        row_starts = [0]
        logit_rows: list[int] = []
        sampled: list[LogitRow] = []
        block_size = self._block_size
        for row in rows:
            table, start, end = row.table, row.start, row.end
            if end - start == 1 and not row.drafts:
                tokens.append(row.token_ids[start])
                positions.append(start)
                slots.append(table[start // block_size] * block_size + start % block_size)
            else:
                tokens += _computed_tokens(row)
                positions += range(start, end)
                slots += [table[p // block_size] * block_size + p % block_size for p in range(start, end)]
            num_tokens = len(tokens)
            row_starts.append(num_tokens)
            sampling = row.sampling
            if sampling is None:
                continue
            if row.num_logit_rows == 1 and not row.drafts:
                logit_rows.append(num_tokens - 1)
                sampled.append((sampling, row.first + end, ()))
            else:
                logit_rows += range(num_tokens - row.num_logit_rows, num_tokens)
                sampled += _logit_rows(row, sampling)
        return ForwardBatch(
            tokens=np.array(tokens, np.int32),
            positions=np.array(positions, np.int32),
            slots=np.array(slots, np.int32),
            row_starts=np.array(row_starts, np.int32),
            context_lens=np.array([row.end for row in rows], np.int32),
            block_tables=self._pack_tables(rows),
            logit_rows=np.array(logit_rows, np.int32),
            sampling=self._sampling.pack(sampled),
            vocab_limit=vocab_limit,
        )

    def _pack_tables(self, rows: Sequence[BatchRow]) -> NDArray[np.int32]:
        """int32[R, M], padded with -1. An unchanged table is the same tuple from step to step."""
        tables = [row.table for row in rows]
        if tables == self._tables:
            return self._packed_tables
        packed = {}
        for row in rows:
            known = self._packed.get(row.id)
            packed[row.id] = (
                known if known and known[0] is row.table else (row.table, np.array(row.table, np.int32))
            )
        self._packed = packed
        width = max([len(table) for table, _ in packed.values()], default=0)
        out = np.empty((len(rows), width), np.int32)
        out.fill(-1)
        for index, (table, ids_array) in enumerate(packed.values()):
            out[index, : len(table)] = ids_array
        self._tables, self._packed_tables = tables, out
        return out


def _computed_tokens(row: BatchRow) -> Sequence[TokenId]:
    """Tokens at positions `[start, end)`."""
    num_known = len(row.token_ids)
    if row.end <= num_known:
        return row.token_ids[row.start : row.end]
    drafts = row.drafts[max(0, row.start - num_known) : row.end - num_known]
    return [*row.token_ids[row.start : num_known], *drafts]


def _logit_rows(row: BatchRow, sampling: RowSampling) -> list[LogitRow]:
    """One per position: the token drawn comes after `position - len(token_ids)` of the drafts."""
    num_known = len(row.token_ids)
    drawn = range(row.end - row.num_logit_rows + 1, row.end + 1)
    return [
        (sampling, row.first + position, row.drafts[: max(0, position - num_known)]) for position in drawn
    ]
