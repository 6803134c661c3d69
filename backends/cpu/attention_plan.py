"""Cuts a batch's attention into items for the team to take from a list."""

from __future__ import annotations

from typing import Any

from mvllm.backends.cpu.attention import COUNT, FIRST, ITEM_FIELDS, KV_HEAD, ROW
from mvllm.backends.cpu.attention_kernels import MAX_ROWS
from mvllm.backends.cpu.jit import kernel
from mvllm.backends.cpu.pointers import i32_at, i64_at, record_at
from mvllm.backends.cpu.tables import STEP

step_at = record_at(STEP)


def most_items(max_batch_tokens: int, num_heads: int) -> int:
    """Upper bound on the items of any batch."""
    return max_batch_tokens * num_heads


@kernel("int64(int64, int64, int64, int64)")
def _count_items(step_address: Any, kv_heads: Any, group: Any, rows_per_item: Any) -> Any:
    step = step_at(step_address)
    starts, count = i32_at(step.row_starts), 0
    for row in range(step.num_rows):
        count += ((starts[row + 1] - starts[row]) * group + rows_per_item - 1) // rows_per_item
    return count * kv_heads


@kernel("void(int64, int64, int64, int64, int64)")
def _add_items(step_address: Any, row: Any, kv_heads: Any, group: Any, rows_per_item: Any) -> Any:
    """Append the items of a row, longest contexts first."""
    step = step_at(step_address)
    starts = i32_at(step.row_starts)
    total = (starts[row + 1] - starts[row]) * group
    first = (total - 1) // rows_per_item * rows_per_item
    while first >= 0:
        for head in range(kv_heads):
            item = i64_at(step.items + 8 * ITEM_FIELDS * step.num_items)
            item[ROW], item[KV_HEAD] = row, head
            item[FIRST], item[COUNT] = first, min(rows_per_item, total - first)
            step.num_items += 1
        first -= rows_per_item


@kernel("void(int64, int64, int64, int64)")
def plan_items(step_address: Any, kv_heads: Any, group: Any, threads: Any) -> Any:
    """Write the batch's items into its list. Changes `items` and `num_items` of the step only.

    Items are made smaller when there are fewer than threads. Rows with more than the average context come
    first, so that no thread starts on a long one when the others are about to finish.
    """
    step = step_at(step_address)
    rows_per_item = MAX_ROWS
    while rows_per_item > 1 and _count_items(step_address, kv_heads, group, rows_per_item) < threads:
        rows_per_item = (rows_per_item + 1) // 2
    contexts, total = i32_at(step.context_lens), 0
    for row in range(step.num_rows):
        total += contexts[row]
    step.num_items = 0
    for long_ones in (True, False):
        for row in range(step.num_rows):
            if (contexts[row] * step.num_rows > total) == long_ones:
                _add_items(step_address, row, kv_heads, group, rows_per_item)
