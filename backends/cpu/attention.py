"""Causal grouped-query attention straight from the KV blocks, and the storing of new keys and values.

Work comes in items: up to MAX_ROWS query rows of one sequence (tokens times the query heads of one kv head,
token by token) that share a pass over the keys and values. Any cut into items gives the same bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mvllm.backends.cpu.attention_kernels import (
    MAX_ROWS,
    add_weighted_values,
    half_bits,
    score_tile,
    softmax_row,
)
from mvllm.backends.cpu.elementwise import cap_softly, scale
from mvllm.backends.cpu.jit import kernel
from mvllm.backends.cpu.kv_pool import TILE
from mvllm.backends.cpu.memory import round_up
from mvllm.backends.cpu.pointers import f32_at, i16_at, i32_at, i64_at, record_at
from mvllm.backends.cpu.tables import ATTENTION

ROW, KV_HEAD, FIRST, COUNT = range(4)
ITEM_FIELDS = 4
"""An item, int64: row of the batch, kv head, first query row (token * group + head), number of query rows."""

# A thread's scratch: per query row address, begin, end and factor; then a tile of keys, the sums, the scores.
_QUERIES, _BEGINS, _ENDS, _FACTORS = 0, 64, 128, 192
_KEY_TILE = 256
_ROW_BYTES = 4 * TILE
_END = 1 << 62  # beyond every position

_TILES_AHEAD = 4  # prefetched: the time of one tile is below the latency of memory

attention_at = record_at(ATTENTION)


def scratch_bytes(max_context: int, head_dim: int) -> int:
    """Scratch that one thread needs; a multiple of a cache line."""
    tiles = max_context // TILE + 2
    padded_dim = round_up(head_dim, TILE)
    return _KEY_TILE + _ROW_BYTES * head_dim + MAX_ROWS * (4 * padded_dim + tiles * _ROW_BYTES)


@kernel("void(int64, int64, int64, int64)")
def store_keys_values(attention_address: Any, slot: Any, keys: Any, values: Any) -> Any:
    """Write one token's keys and values, float32[kv_heads * head_dim] each, into its slot."""
    a = attention_at(attention_address)
    block, offset = slot // a.block_size, slot % a.block_size
    first_key = offset // a.tile * a.tile * a.head_dim + offset % a.tile
    first_value = offset * a.padded_dim
    for head in range(a.kv_heads):
        key, value = f32_at(keys + 4 * head * a.head_dim), f32_at(values + 4 * head * a.head_dim)
        target = a.layer + block * a.block_bytes + head * a.head_bytes
        if a.is_half:
            half_keys, half_values = i16_at(target), i16_at(target + a.value_offset)
            for i in range(a.head_dim):
                half_keys[first_key + i * a.tile] = half_bits(key[i])
                half_values[first_value + i] = half_bits(value[i])
        else:
            full_keys, full_values = f32_at(target), f32_at(target + a.value_offset)
            for i in range(a.head_dim):
                full_keys[first_key + i * a.tile] = key[i]
                full_values[first_value + i] = value[i]


@kernel("int64(int64, int64, int64, int64)")
def _head_block(attention_address: Any, table: Any, head: Any, position: Any) -> Any:
    """Where the head's keys start in the block of `position`."""
    a = attention_at(attention_address)
    block = i32_at(table)[position // a.block_size]
    return a.layer + block * a.block_bytes + head * a.head_bytes


@kernel("void(int64, int64, int64, int64, int64, int64)")
def _assemble_tile(
    attention_address: Any, table: Any, head: Any, position: Any, last: Any, target: Any
) -> Any:
    """Put the keys of [position, min(position + TILE, last)) together as one tile at `target`."""
    a = attention_at(attention_address)
    for lane in range(min(TILE, last - position)):
        offset = (position + lane) % a.block_size
        source = _head_block(attention_address, table, head, position + lane)
        first = offset // a.tile * a.tile * a.head_dim + offset % a.tile
        if a.is_half:
            for i in range(a.head_dim):
                i16_at(target)[i * TILE + lane] = i16_at(source)[first + i * a.tile]
        else:
            for i in range(a.head_dim):
                i32_at(target)[i * TILE + lane] = i32_at(source)[first + i * a.tile]


@kernel("int64(int64, int64, int64, int64)")
def _key_tile(attention_address: Any, table: Any, head: Any, position: Any) -> Any:
    """Where the tile of `position`, a multiple of TILE, lies in its block; blocks hold whole tiles."""
    a = attention_at(attention_address)
    value_bytes = 2 if a.is_half else 4
    return (
        _head_block(attention_address, table, head, position)
        + position % a.block_size * a.head_dim * value_bytes
    )


@kernel("void(int64, int64, int64, int64, int64, int64, int64, int64, int64)")
def _score(
    attention_address: Any,
    table: Any,
    head: Any,
    rows: Any,
    first: Any,
    last: Any,
    scratch: Any,
    scores: Any,
    stride: Any,
) -> Any:
    """Scores of the item's query rows at the positions [first, last), `first` a multiple of TILE."""
    a = attention_at(attention_address)
    keys = scratch + _KEY_TILE
    for position in range(first, last, TILE):
        following = keys
        if a.tile == TILE:
            keys = _key_tile(attention_address, table, head, position)
            ahead = min(position + _TILES_AHEAD * TILE, last - 1) // TILE * TILE
            following = _key_tile(attention_address, table, head, ahead)
        else:
            _assemble_tile(attention_address, table, head, position, last, keys)
        target = scores + 4 * (position - first)
        score_tile(rows, a.is_half, scratch + _QUERIES, keys, following, a.head_dim // 2, target, stride)


@kernel("void(int64, int64, int64, int64, int64, int64, int64, int64, int64, int64)")
def _add_values(
    attention_address: Any,
    table: Any,
    head: Any,
    rows: Any,
    start: Any,
    stop: Any,
    weights: Any,
    weight_stride: Any,
    sums: Any,
    sum_stride: Any,
) -> Any:
    """Add the weighted values of the positions [start, stop); `weights` is that of `start`, first row."""
    a = attention_at(attention_address)
    value_stride = a.padded_dim * (2 if a.is_half else 4)
    position = start
    while position < stop:
        offset = position % a.block_size
        count = min(a.block_size - offset, stop - position)
        values = _head_block(attention_address, table, head, position) + a.value_offset
        ahead = min(position + _TILES_AHEAD * count, stop - 1)
        following = _head_block(attention_address, table, head, ahead) + a.value_offset
        add_weighted_values(
            rows,
            a.is_half,
            weights + 4 * (position - start),
            weight_stride,
            values + offset * value_stride,
            following,
            value_stride,
            count,
            sums,
            sum_stride,
            a.padded_dim // TILE,
        )
        position += count


@kernel("void(int64, int64, int64, int64, int64, int64, int64, int64, int64, int64, int64)")
def _add_values_row_by_row(
    attention_address: Any,
    table: Any,
    head: Any,
    rows: Any,
    low: Any,
    high: Any,
    first: Any,
    scratch: Any,
    weights: Any,
    weight_stride: Any,
    sums: Any,
) -> Any:
    """Add each row's weighted values of its own positions within [low, high); weights start at `first`."""
    begins, ends = i64_at(scratch + _BEGINS), i64_at(scratch + _ENDS)
    sum_stride = 4 * attention_at(attention_address).padded_dim
    for row in range(rows):
        start, stop = max(low, begins[row]), min(high, ends[row])
        own_weights = weights + row * weight_stride + 4 * (start - first)
        own_sums = sums + row * sum_stride
        _add_values(attention_address, table, head, 1, start, stop, own_weights, 0, own_sums, 0)


@kernel("void(int64, int64, int64, int64, int64, int64, int64, int64, int64)")
def _mix_values(
    attention_address: Any,
    table: Any,
    head: Any,
    rows: Any,
    first: Any,
    scratch: Any,
    weights: Any,
    weight_stride: Any,
    sums: Any,
) -> Any:
    """sums = weighted values of each query row over its own positions, ascending.

    Rows share the positions that all of them attend to. What lies before and after is added row by row: a
    weight of zero would not do, as zero times an infinite value is not zero.
    """
    a = attention_at(attention_address)
    begins, ends = i64_at(scratch + _BEGINS), i64_at(scratch + _ENDS)
    shared_begin, shared_end = begins[0], ends[0]
    for row in range(rows):
        shared_begin, shared_end = max(shared_begin, begins[row]), min(shared_end, ends[row])
    shared_end = max(shared_end, shared_begin)
    for i in range(rows * a.padded_dim):
        f32_at(sums)[i] = 0.0
    _add_values_row_by_row(
        attention_address, table, head, rows, 0, shared_begin, first, scratch, weights, weight_stride, sums
    )
    shared_weights, sum_stride = weights + 4 * (shared_begin - first), 4 * a.padded_dim
    _add_values(
        attention_address,
        table,
        head,
        rows,
        shared_begin,
        shared_end,
        shared_weights,
        weight_stride,
        sums,
        sum_stride,
    )
    _add_values_row_by_row(
        attention_address, table, head, rows, shared_end, _END, first, scratch, weights, weight_stride, sums
    )


@kernel("UniTuple(int64, 2)(int64, int64, int64, int64, int64, int64, int64)")
def _place_rows(
    attention_address: Any,
    item_address: Any,
    first_token: Any,
    positions: Any,
    q: Any,
    stride: Any,
    scratch: Any,
) -> Any:
    """Write address, begin and end of every query row; returns the range of positions that they span, its
    start moved down to a multiple of TILE."""
    a, item = attention_at(attention_address), i64_at(item_address)
    queries, begins, ends = (
        i64_at(scratch + _QUERIES),
        i64_at(scratch + _BEGINS),
        i64_at(scratch + _ENDS),
    )
    first, last = _END, 0
    for row in range(item[COUNT]):
        token = first_token + (item[FIRST] + row) // a.group
        head = item[KV_HEAD] * a.group + (item[FIRST] + row) % a.group
        queries[row] = q + token * stride + 4 * a.head_dim * head
        ends[row] = i32_at(positions)[token] + 1
        begins[row] = max(0, ends[row] - a.window) if a.window > 0 else 0
        first, last = min(first, begins[row]), max(last, ends[row])
    return first // TILE * TILE, last


@kernel("void(int64, int64, int64, int64, int64, int64, int64)")
def _softmax_rows(
    attention_address: Any, rows: Any, first: Any, tiles: Any, scratch: Any, scores: Any, stride: Any
) -> Any:
    """Turn the scores of each query row into weights, and write its factor."""
    a = attention_at(attention_address)
    begins, ends = i64_at(scratch + _BEGINS), i64_at(scratch + _ENDS)
    for row in range(rows):
        row_scores, factor = scores + row * stride, a.scale
        if a.soft_cap > 0:
            scale(row_scores, a.scale, row_scores, tiles * TILE)
            cap_softly(row_scores, a.soft_cap, row_scores, tiles * TILE)
            factor = np.float32(1.0)
        f32_at(scratch + _FACTORS)[row] = softmax_row(
            row_scores, begins[row] - first, ends[row] - first, tiles, factor
        )


@kernel("void(int64, int64, int64, int64, int64, int64, int64, int64, int64)")
def attend_item(
    attention_address: Any,
    item_address: Any,
    first_token: Any,
    positions: Any,
    table: Any,
    q: Any,
    out: Any,
    stride: Any,
    scratch: Any,
) -> Any:
    """Attention of one item.

    Args:
        first_token: the row's first token in the batch; `positions` is the address of int32[T].
        table: the row's block table, int32.
        q, out: float32 matrices [T, heads * head_dim], their rows `stride` bytes apart.
    """
    a, item = attention_at(attention_address), i64_at(item_address)
    head, rows = item[KV_HEAD], item[COUNT]
    first, last = _place_rows(attention_address, item_address, first_token, positions, q, stride, scratch)
    tiles = (last - first + TILE - 1) // TILE
    sums = scratch + _KEY_TILE + _ROW_BYTES * a.head_dim
    scores, score_stride = sums + 4 * MAX_ROWS * a.padded_dim, tiles * _ROW_BYTES
    _score(attention_address, table, head, rows, first, last, scratch, scores, score_stride)
    _softmax_rows(attention_address, rows, first, tiles, scratch, scores, score_stride)
    _mix_values(attention_address, table, head, rows, first, scratch, scores, score_stride, sums)
    for row in range(rows):
        query, factor = i64_at(scratch + _QUERIES)[row], f32_at(scratch + _FACTORS)[row]
        target, source = f32_at(query - q + out), f32_at(sums + 4 * row * a.padded_dim)
        for i in range(a.head_dim):
            target[i] = source[i] * factor
