"""Cuts a batch's attention into items for the team to take from a list."""

from __future__ import annotations

from typing import Any

import numpy as np

from mvllm.backends.cpu.attention import MAX_ROWS, PART, item_at, split_at
from mvllm.backends.cpu.jit import kernel
from mvllm.backends.cpu.pointers import i32_at, record_at
from mvllm.backends.cpu.tables import ITEM, SPLIT, STEP

STATES_BYTES = 1 << 21
"""Memory per thread for the states of parts that several threads work on."""

_SHARES = 8  # of a thread in the batch's work: what is larger than such a share is split
_READING = 6  # what reading a position costs, in query rows that attend to it
_ITEM_BYTES, _SPLIT_BYTES = ITEM.itemsize, SPLIT.itemsize

step_at = record_at(STEP)


def most_items(max_batch_tokens: int, num_heads: int, threads: int) -> int:
    """Upper bound on the items of any batch: a split adds one for each further share of the work."""
    return max_batch_tokens * num_heads + threads * _SHARES


def most_splits(threads: int) -> int:
    """Upper bound on the query rows' items that are split in any batch: they have two shares or more."""
    return threads * _SHARES // 2


@kernel("int64(int64, int64)")
def _cost(rows: Any, context: Any) -> Any:
    return (rows + _READING) * context


@kernel("int64(int64)")
def _num_parts(context: Any) -> Any:
    return (context + PART - 1) // PART


@kernel("UniTuple(int64, 2)(int64, int64, int64, int64)")
def _measure(step_address: Any, kv_heads: Any, group: Any, rows_per_item: Any) -> Any:
    """Into how many items the batch could be cut, and the cost of all."""
    step = step_at(step_address)
    starts, contexts = i32_at(step.row_starts), i32_at(step.context_lens)
    count, cost = 0, 0
    for row in range(step.num_rows):
        context = np.int64(contexts[row])
        rows = (starts[row + 1] - starts[row]) * group
        items = (rows + rows_per_item - 1) // rows_per_item
        count += items * kv_heads * _num_parts(context)
        cost += (items * _cost(0, context) + rows * context) * kv_heads
    return count, cost


@kernel("int64(int64, int64, int64, int64)")
def _add_split(step_address: Any, items: Any, num_parts: Any, part_bytes: Any) -> Any:
    """Address of a new split, 0 if there is no memory left for its states."""
    step = step_at(step_address)
    if step.states_used + num_parts * part_bytes > step.states_bytes:
        return 0
    address = step.splits + _SPLIT_BYTES * step.num_splits
    split = split_at(address)
    split.items, split.done, split.num_parts = items, 0, num_parts
    split.states = step.states + step.states_used
    step.states_used += num_parts * part_bytes
    step.num_splits += 1
    return address


@kernel("void(int64, int64, int64, int64, int64, int64, int64)")
def _add_items(
    step_address: Any, row: Any, kv_head: Any, first: Any, count: Any, share: Any, state_bytes: Any
) -> Any:
    """Append an item, or several with some of the context each if its cost is more than one share."""
    step = step_at(step_address)
    context = np.int64(i32_at(step.context_lens)[row])
    num_parts = _num_parts(context)
    pieces, split = min(num_parts, _cost(count, context) // share), 0
    if pieces > 1:
        split = _add_split(step_address, pieces, num_parts, count * state_bytes)
    if split == 0:
        pieces = 1
    for piece in range(pieces):
        item = item_at(step.items + _ITEM_BYTES * step.num_items)
        item.row, item.kv_head, item.first, item.count = row, kv_head, first, count
        item.first_part = num_parts * piece // pieces
        item.last_part = num_parts * (piece + 1) // pieces
        item.split = split
        step.num_items += 1


@kernel("void(int64, int64, int64, int64, int64, int64, int64)")
def _add_row(
    step_address: Any,
    row: Any,
    kv_heads: Any,
    group: Any,
    rows_per_item: Any,
    share: Any,
    state_bytes: Any,
) -> Any:
    """Append the items of a row of the batch, longest contexts first."""
    starts = i32_at(step_at(step_address).row_starts)
    total = (starts[row + 1] - starts[row]) * group
    first = (total - 1) // rows_per_item * rows_per_item
    while first >= 0:
        count = min(rows_per_item, total - first)
        for head in range(kv_heads):
            _add_items(step_address, row, head, first, count, share, state_bytes)
        first -= rows_per_item


@kernel("void(int64, int64, int64, int64, int64)")
def plan_items(step_address: Any, kv_heads: Any, group: Any, threads: Any, state_bytes: Any) -> Any:
    """Write the batch's items and splits. Changes nothing else of the step.

    Items get fewer query rows when there are fewer than threads, and are split when they are a large part of
    the whole. Rows with more than the average context come first, so that no thread starts on a long one when
    the others are about to finish.
    """
    step = step_at(step_address)
    contexts, starts, total, most_rows = i32_at(step.context_lens), i32_at(step.row_starts), 0, 0
    for row in range(step.num_rows):
        total += contexts[row]
        most_rows = max(most_rows, (starts[row + 1] - starts[row]) * group)
    rows_per_item = min(most_rows, MAX_ROWS)
    count, cost = _measure(step_address, kv_heads, group, rows_per_item)
    while rows_per_item > 1 and count < threads:
        rows_per_item = (rows_per_item + 1) // 2
        count, cost = _measure(step_address, kv_heads, group, rows_per_item)
    shares = threads * _SHARES
    share = (cost + shares - 1) // shares
    step.num_items = step.num_splits = step.states_used = 0
    for long_ones in (True, False):
        for row in range(step.num_rows):
            if (contexts[row] * step.num_rows > total) == long_ones:
                _add_row(step_address, row, kv_heads, group, rows_per_item, share, state_bytes)
