"""A batch in the fixed shapes of a graph: bucketed sizes, padding, rows grouped for attention. NumPy only.

MLX builds (and compiles) a graph per combination of shapes. So every size is rounded up to one of a few:
tokens, logit rows, and for attention the rows, queries per row and blocks per row. Padding tokens write to a
scratch block past the pool's own, and nothing reads what they compute.

Rows differ in length, so attention runs over *groups* of rows alike: as many queries, and contexts within a
factor of four.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mvllm.core.step import ForwardBatch

Indices = NDArray[np.int32]

_EXACT_UP_TO = 8  # sizes up to here are not rounded
_STEPS_PER_DOUBLING = 4  # so at most a quarter of a larger size is padding


@dataclass(frozen=True)
class GroupShape:
    """Sizes of one attention group, padding included."""

    rows: int
    queries: int  # per row
    blocks: int  # per row


@dataclass(frozen=True)
class GraphShape:
    """All that a graph depends on; two batches of one shape run the same graph."""

    tokens: int
    logit_rows: int  # 0: nobody asks for logits
    groups: tuple[GroupShape, ...]
    in_order: bool  # there is one group, and its queries are the tokens in their order


@dataclass(frozen=True)
class GroupArrays:
    """One attention group. R rows, Q queries, B blocks as in its `GroupShape`."""

    queries: Indices  # [R * Q] index of a token; -1, the last one, for padding
    positions: Indices  # [R, Q] of the queries; 0 for padding
    context_lens: Indices  # [R] positions written so far; 1 for padding
    tables: Indices  # [R, B] block ids, padded with the scratch block


@dataclass(frozen=True)
class BatchArrays:
    """A batch padded to its `GraphShape`: T tokens, S logit rows."""

    tokens: Indices  # [T]
    positions: Indices  # [T]
    slots: Indices  # [T] padding goes to the scratch block
    logit_rows: Indices  # [S], [1] if S is 0
    answers: Indices  # [T] where a token's query is among those of all groups; empty if in order
    groups: tuple[GroupArrays, ...]


@dataclass(frozen=True)
class BatchPlan:
    """What a graph is chosen by, and what it is run with."""

    shape: GraphShape
    arrays: BatchArrays


def bucket(size: int) -> int:
    """The least allowed size that is not below `size`: all up to 8, then four per doubling."""
    if size <= _EXACT_UP_TO:
        return size
    step = (1 << (size - 1).bit_length()) // (2 * _STEPS_PER_DOUBLING)
    return -(-size // step) * step


def plan_batch(batch: ForwardBatch, *, block_size: int, scratch_block: int) -> BatchPlan:
    """Pad and group a batch. `scratch_block` is a block that no table names."""
    num_tokens, num_logit_rows = bucket(batch.num_tokens), bucket(len(batch.logit_rows))
    groups = [
        _group_arrays(batch, rows, block_size=block_size, scratch_block=scratch_block)
        for rows in _rows_alike(batch, block_size)
    ]
    order = _order_of_queries(batch, groups)
    in_order = (
        len(groups) == 1
        and len(groups[0].queries) == num_tokens
        and np.array_equal(order, np.arange(num_tokens))
    )
    padding = num_tokens - batch.num_tokens
    arrays = BatchArrays(
        tokens=_padded(batch.tokens, padding, 0),
        positions=_padded(batch.positions, padding, 0),
        slots=_padded(batch.slots, padding, scratch_block * block_size),
        logit_rows=_padded(batch.logit_rows, max(1, num_logit_rows) - len(batch.logit_rows), 0),
        answers=order[:0] if in_order else order,
        groups=tuple(groups),
    )
    shape = GraphShape(
        tokens=num_tokens,
        logit_rows=num_logit_rows,
        groups=tuple(_group_shape(group) for group in groups),
        in_order=in_order,
    )
    return BatchPlan(shape, arrays)


def _group_shape(group: GroupArrays) -> GroupShape:
    rows, queries = group.positions.shape
    return GroupShape(rows, queries, group.tables.shape[1])


def single_tokens(batch: ForwardBatch) -> Iterator[ForwardBatch]:
    """Every token as a batch of its own, in order; one with a logit row if the batch asks for its logits.

    Its context ends at its own position, so nothing about it depends on its company or on how its prompt
    was cut.
    """
    wanted = set(batch.logit_rows.tolist())
    rows = np.repeat(np.arange(batch.num_rows), np.diff(batch.row_starts))
    for token, row in enumerate(rows.tolist()):
        at = slice(token, token + 1)
        yield ForwardBatch(
            tokens=batch.tokens[at],
            positions=batch.positions[at],
            slots=batch.slots[at],
            row_starts=np.array([0, 1], np.int32),
            context_lens=batch.positions[at] + 1,
            block_tables=batch.block_tables[row : row + 1],
            logit_rows=np.zeros(int(token in wanted), np.int32),
            sampling=batch.sampling,
        )


def _rows_alike(batch: ForwardBatch, block_size: int) -> list[list[int]]:
    """The rows, grouped by the power of two above their queries and the power of four above their blocks."""
    counts, contexts = np.diff(batch.row_starts).tolist(), batch.context_lens.tolist()
    alike: dict[tuple[int, int], list[int]] = {}
    for row, (count, context) in enumerate(zip(counts, contexts, strict=True)):
        blocks = -(-context // block_size)
        key = ((count - 1).bit_length(), ((blocks - 1).bit_length() + 1) // 2)
        alike.setdefault(key, []).append(row)
    return list(alike.values())


def _group_arrays(
    batch: ForwardBatch, rows: Sequence[int], *, block_size: int, scratch_block: int
) -> GroupArrays:
    starts, stops = batch.row_starts[:-1][rows], batch.row_starts[1:][rows]
    contexts = batch.context_lens[rows]
    num_rows, num_queries = bucket(len(rows)), bucket(int((stops - starts).max()))
    num_blocks = bucket(-(-int(contexts.max()) // block_size))
    queries = np.full((num_rows, num_queries), -1, np.int32)
    positions = np.zeros((num_rows, num_queries), np.int32)
    context_lens = np.ones(num_rows, np.int32)
    tables = np.full((num_rows, num_blocks), scratch_block, np.int32)
    context_lens[: len(rows)] = contexts
    for index, (row, start, stop) in enumerate(zip(rows, starts.tolist(), stops.tolist(), strict=True)):
        queries[index, : stop - start] = np.arange(start, stop)
        positions[index, : stop - start] = batch.positions[start:stop]
        used = -(-int(batch.context_lens[row]) // block_size)
        tables[index, :used] = batch.block_tables[row, :used]
    return GroupArrays(queries.reshape(-1), positions, context_lens, tables)


def _order_of_queries(batch: ForwardBatch, groups: Sequence[GroupArrays]) -> Indices:
    """[T, padded] where each token's answer is, counting through all groups; anywhere for padding."""
    queries = np.concatenate([group.queries for group in groups])
    order = np.minimum(np.arange(bucket(batch.num_tokens), dtype=np.int32), len(queries) - 1)
    at = np.flatnonzero(queries >= 0)
    order[queries[at]] = at
    return order


def _padded(values: Indices, count: int, filler: int) -> Indices:
    return np.concatenate([values, np.full(count, filler, np.int32)]) if count else values
