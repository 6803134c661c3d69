"""Causal grouped-query attention straight from the KV blocks, and the storing of new keys and values.

Work comes in items: up to MAX_ROWS query rows of one sequence (tokens times the query heads of one kv head,
token by token) that read keys and values together, for all positions or for some parts of them. Any cut into
items gives the same bits, because positions are always cut alike:

    span    SPAN positions, whose scores exist at a time. Softmax is online: a row's state holds maximum, sum
            and weighted values so far, and is rescaled when a span raises the maximum.
    part    PART positions with a state of their own. The states of a row's parts are merged in order, by
            whoever finishes the last of the items that share the row.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mvllm.backends.cpu.atomics import atomic_add
from mvllm.backends.cpu.attention_kernels import (
    AHEAD,
    LOWEST,
    MAX_WIDTH,
    MAXIMUM,
    SCORES_BYTES,
    SPAN,
    SUM,
    TILES_AT_ONCE,
    UNIT_BYTES,
    VALUES,
    call_add_values,
    call_score,
    half_bits,
    merge_state,
    softmax_span,
)
from mvllm.backends.cpu.elementwise import cap_softly, scale
from mvllm.backends.cpu.jit import kernel
from mvllm.backends.cpu.kv_pool import TILE
from mvllm.backends.cpu.memory import LINE_BYTES, round_up
from mvllm.backends.cpu.pointers import f32_at, i16_at, i32_at, i64_at, record_at
from mvllm.backends.cpu.tables import ATTENTION, ATTENTION_WORK, ITEM, SPLIT

PART = 2 * SPAN
"""Positions with a state of their own; what threads can share of a row's context."""

MAX_ROWS = 4 * MAX_WIDTH
"""Query rows of an item: they share what is read from memory."""

_LOWEST = np.float32(LOWEST)
_END = 1 << 62  # beyond every position
_DONE = SPLIT.fields["done"][1]  # type: ignore[index]

# A thread's scratch: an ATTENTION_WORK record, then what it points to.
_UNITS_BYTES = round_up((SPAN // TILE + TILES_AT_ONCE + SPAN + AHEAD) * UNIT_BYTES)
_RUNS_BYTES = round_up((SPAN + AHEAD) * UNIT_BYTES)
_WORK_BYTES = round_up(ATTENTION_WORK.itemsize)

attention_at, item_at, split_at = record_at(ATTENTION), record_at(ITEM), record_at(SPLIT)
_work_at = record_at(ATTENTION_WORK)


def scratch_bytes(head_dim: int) -> int:
    """Scratch that one thread needs; a multiple of a cache line."""
    ranges = 16 * MAX_ROWS
    fixed = _WORK_BYTES + ranges + _UNITS_BYTES + _RUNS_BYTES + MAX_ROWS * SCORES_BYTES
    keys_and_queries = 4 * (TILE + MAX_ROWS) * head_dim
    return round_up(fixed + keys_and_queries) + 2 * MAX_ROWS * state_bytes(head_dim)


def state_bytes(head_dim: int) -> int:
    """The state of one query row."""
    return VALUES + 4 * round_up(head_dim, TILE)


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


@kernel("void(int64, int64, int64, int64, int64)")
def _set_up_work(
    attention_address: Any, item_address: Any, table: Any, scratch: Any, work_address: Any
) -> Any:
    """Write the record of an item, except for its range of positions."""
    a, item, w = attention_at(attention_address), item_at(item_address), _work_at(work_address)
    w.attention, w.table = attention_address, table
    w.head = a.layer + item.kv_head * a.head_bytes
    w.value_bytes = 2 if a.is_half else 4
    w.rows, w.state_bytes = item.count, VALUES + 4 * a.padded_dim
    w.begins = scratch
    w.ends = w.begins + 8 * MAX_ROWS
    w.units = w.ends + 8 * MAX_ROWS
    w.runs = w.units + _UNITS_BYTES
    w.scores = w.runs + _RUNS_BYTES
    w.keys = w.scores + MAX_ROWS * SCORES_BYTES
    w.queries = w.keys + 4 * TILE * a.head_dim
    w.totals = (w.queries + 4 * MAX_ROWS * a.head_dim + LINE_BYTES - 1) // LINE_BYTES * LINE_BYTES
    w.parts = w.totals + MAX_ROWS * w.state_bytes


@kernel("void(int64, int64, int64, int64, int64)")
def _place_rows(work_address: Any, item_address: Any, positions: Any, q: Any, stride: Any) -> Any:
    """Write begin and end of every query row, the range of positions that they span, its start moved down to
    a multiple of TILE, and the queries, scaled, those taken at once side by side.

    `positions` and `q` are those of the sequence's first token in the batch.
    """
    w, item = _work_at(work_address), item_at(item_address)
    a = attention_at(w.attention)
    begins, ends = i64_at(w.begins), i64_at(w.ends)
    first, last = _END, 0
    for row in range(w.rows):
        number = item.first + row
        token, head = number // a.group, item.kv_head * a.group + number % a.group
        ends[row] = i32_at(positions)[token] + 1
        begins[row] = max(0, ends[row] - a.window) if a.window > 0 else 0
        first, last = min(first, begins[row]), max(last, ends[row])
        query = f32_at(q + token * stride + 4 * a.head_dim * head)
        start = row // MAX_WIDTH * MAX_WIDTH
        width = min(MAX_WIDTH, w.rows - start)
        packed = f32_at(w.queries + 4 * (start * a.head_dim + row - start))
        for i in range(a.head_dim):
            packed[i * width] = query[i] * a.scale
    w.first, w.last = first // TILE * TILE, last


@kernel("int64(int64, int64)")
def _block(work_address: Any, number: Any) -> Any:
    """Address of the head's keys in a block of the sequence."""
    w = _work_at(work_address)
    return w.head + i32_at(w.table)[number] * attention_at(w.attention).block_bytes


@kernel("void(int64, int64, int64)")
def _assemble_tile(work_address: Any, first: Any, last: Any) -> Any:
    """Put the keys of [first, min(first + TILE, last)) together as one tile."""
    w = _work_at(work_address)
    a = attention_at(w.attention)
    for lane in range(min(TILE, last - first)):
        number, offset = (first + lane) // a.block_size, (first + lane) % a.block_size
        start = offset // a.tile * a.tile * a.head_dim + offset % a.tile
        source = _block(work_address, number) + start * w.value_bytes
        if a.is_half:
            for i in range(a.head_dim):
                i16_at(w.keys)[i * TILE + lane] = i16_at(source)[i * a.tile]
        else:
            for i in range(a.head_dim):
                i32_at(w.keys)[i * TILE + lane] = i32_at(source)[i * a.tile]


@kernel("int64(int64, int64)")
def _tile(work_address: Any, position: Any) -> Any:
    """Address of the keys of the tile that starts at a position; at or beyond the last one, of the last."""
    w = _work_at(work_address)
    a = attention_at(w.attention)
    position = min(position, (w.last - 1) // TILE * TILE)
    block = _block(work_address, position // a.block_size)
    return block + position % a.block_size // TILE * TILE * a.head_dim * w.value_bytes


@kernel("int64(int64, int64, int64)")
def _list_tiles(work_address: Any, first: Any, last: Any) -> Any:
    """Write the tiles of [first, last) into the table of units; returns their number."""
    w = _work_at(work_address)
    entry, count = i64_at(w.units), 0
    for position in range(first, last, TILE):
        entry[2 * count] = _tile(work_address, position)
        count += 1
    while count % TILES_AT_ONCE != 0:
        entry[2 * count] = entry[2 * count - 2]
        count += 1
    return count


@kernel("int64(int64, int64, int64, int64)")
def _list_runs(work_address: Any, runs: Any, first: Any, last: Any) -> Any:
    """Write the table of the runs of [first, last), of at most TILE positions each; returns their number."""
    w = _work_at(work_address)
    a = attention_at(w.attention)
    entry, count, position = i64_at(runs), 0, first
    while position < last:
        offset = position % a.block_size
        values = _block(work_address, position // a.block_size) + a.value_offset
        length = min(TILE - offset % TILE, a.block_size - offset, last - position)
        entry[2 * count] = values + offset * a.padded_dim * w.value_bytes
        entry[2 * count + 1] = length
        count += 1
        position += length
    return count


@kernel("void(int64, int64, int64, int64)")
def _list_ahead(work_address: Any, units: Any, count: Any, position: Any) -> Any:
    """Let a table of `count` units go on with the tiles from `position` on, which are prefetched."""
    for i in range(AHEAD):
        i64_at(units)[2 * (count + i)] = _tile(work_address, position + i * TILE)


@kernel("void(int64, int64, int64)")
def _score_rows(work_address: Any, tiles: Any, target: Any) -> Any:
    """Scores of all query rows at the listed tiles; `target` is where the first row's go."""
    w = _work_at(work_address)
    a = attention_at(w.attention)
    call_score(a.score, w.rows, w.units, tiles, w.queries, a.head_dim // 2, target)


@kernel("void(int64, int64, int64)")
def _score_assembled(work_address: Any, first: Any, last: Any) -> Any:
    """Scores at the positions [first, last) of a span, put together tile by tile."""
    w = _work_at(work_address)
    for i in range(TILES_AT_ONCE + AHEAD):
        i64_at(w.units)[2 * i] = w.keys
    for position in range(first, last, TILE):
        _assemble_tile(work_address, position, last)
        _score_rows(work_address, TILES_AT_ONCE, w.scores + 4 * (position % SPAN))


@kernel("UniTuple(int64, 2)(int64, int64, int64, int64, int64)")
def _shared(work_address: Any, first_row: Any, last_row: Any, start: Any, stop: Any) -> Any:
    """The positions within [start, stop) that all of the query rows attend to: [begin, end), begin <= end."""
    w = _work_at(work_address)
    begins, ends = i64_at(w.begins), i64_at(w.ends)
    begin, end = start, stop
    for row in range(first_row, last_row):
        begin, end = max(begin, begins[row]), min(end, ends[row])
    begin = min(begin, stop)
    return begin, max(begin, end)


@kernel("void(int64, int64, int64, int64, int64, int64, int64)")
def _add_values(
    work_address: Any, row: Any, count: Any, first: Any, runs: Any, num_runs: Any, states: Any
) -> Any:
    """Add the weighted values of runs, which start at the position `first`, to `count` rows from `row` on."""
    w = _work_at(work_address)
    a = attention_at(w.attention)
    value_stride, vectors = a.padded_dim * w.value_bytes, a.padded_dim // TILE
    weights = w.scores + row * SCORES_BYTES + 4 * (first % SPAN)
    sums = states + row * w.state_bytes + VALUES
    call_add_values(a.add_values, count, runs, num_runs, value_stride, weights, sums, w.state_bytes, vectors)


@kernel("void(int64, int64, int64, int64, int64, int64)")
def _add_some_values(work_address: Any, row: Any, count: Any, first: Any, last: Any, states: Any) -> Any:
    """Add the weighted values of the positions [first, last) of a span to `count` rows from `row` on."""
    if first < last:
        w = _work_at(work_address)
        num_runs = _list_runs(work_address, w.runs, first, last)
        _list_ahead(work_address, w.runs, num_runs, last)
        _add_values(work_address, row, count, first, w.runs, num_runs, states)


@kernel("void(int64, int64, int64, int64)")
def _add_unshared_values(work_address: Any, start: Any, stop: Any, states: Any) -> Any:
    """Add the weighted values within [start, stop) of a span, of which every query row sees some or none.

    The rows taken at once share the positions that all of them attend to. What lies before and after is added
    row by row: a weight of zero would not do, as zero times an infinite value is not zero.
    """
    if start >= stop:
        return
    w = _work_at(work_address)
    begins, ends = i64_at(w.begins), i64_at(w.ends)
    for first in range(0, w.rows, MAX_WIDTH):
        last = min(first + MAX_WIDTH, w.rows)
        begin, end = _shared(work_address, first, last, start, stop)
        for row in range(first, last):
            _add_some_values(work_address, row, 1, max(start, begins[row]), min(begin, ends[row]), states)
        _add_some_values(work_address, first, last - first, begin, end, states)
        for row in range(first, last):
            _add_some_values(work_address, row, 1, max(end, begins[row]), min(stop, ends[row]), states)


@kernel("void(int64, int64, int64, int64)")
def _weigh_rows(work_address: Any, start: Any, stop: Any, states: Any) -> Any:
    """Turn the scores of a span into weights, and take them into the states but for the values."""
    w = _work_at(work_address)
    a = attention_at(w.attention)
    begins, ends = i64_at(w.begins), i64_at(w.ends)
    origin = start // SPAN * SPAN
    for row in range(w.rows):
        begin, end = max(start, begins[row]), min(stop, ends[row])
        if begin < end:
            scores, state = w.scores + row * SCORES_BYTES, states + row * w.state_bytes
            if a.soft_cap > 0:
                cap_softly(scores, a.soft_cap, scores, SPAN)
            factor = softmax_span(scores, begin - origin, end - origin, state)
            if factor != np.float32(1.0):
                scale(state + VALUES, factor, state + VALUES, a.padded_dim)


@kernel("void(int64, int64, int64, int64)")
def _attend_span(work_address: Any, start: Any, stop: Any, states: Any) -> Any:
    """Take the positions [start, stop) of a span into the states of the query rows that see them."""
    w = _work_at(work_address)
    begin, end = _shared(work_address, 0, w.rows, start, stop)
    tiles = 0
    if attention_at(w.attention).tile == TILE:
        tiles = _list_tiles(work_address, start, stop)
    else:
        _score_assembled(work_address, start, stop)
    # Runs follow the tiles in one table, as the last tiles prefetch the first values.
    runs = w.units + tiles * UNIT_BYTES
    num_runs = _list_runs(work_address, runs, begin, end)
    _list_ahead(work_address, runs, num_runs, stop)
    if tiles > 0:
        _score_rows(work_address, tiles, w.scores + 4 * (start % SPAN))
    _weigh_rows(work_address, start, stop, states)
    _add_unshared_values(work_address, start, begin, states)
    if begin < end:
        _add_values(work_address, 0, w.rows, begin, runs, num_runs, states)
    _add_unshared_values(work_address, end, stop, states)


@kernel("void(int64, int64)")
def _clear_states(work_address: Any, states: Any) -> Any:
    w = _work_at(work_address)
    for row in range(w.rows):
        state = f32_at(states + row * w.state_bytes)
        for i in range(w.state_bytes // 4):
            state[i] = 0.0
        state[MAXIMUM // 4] = _LOWEST


@kernel("void(int64, int64, int64)")
def _attend_part(work_address: Any, part: Any, states: Any) -> Any:
    """The states of the query rows after their positions in a part."""
    w = _work_at(work_address)
    _clear_states(work_address, states)
    start, last = max(w.first, part * PART), min(w.last, (part + 1) * PART)
    while start < last:
        stop = min(last, (start // SPAN + 1) * SPAN)
        _attend_span(work_address, start, stop, states)
        start = stop


@kernel("void(int64, int64, int64)")
def _merge_part(work_address: Any, part: Any, states: Any) -> Any:
    """Merge the states of a part into those of the whole, for the query rows that see some of it."""
    w = _work_at(work_address)
    vectors = attention_at(w.attention).padded_dim // TILE
    begins, ends = i64_at(w.begins), i64_at(w.ends)
    for row in range(w.rows):
        if begins[row] < (part + 1) * PART and ends[row] > part * PART:
            offset = row * w.state_bytes
            merge_state(w.totals + offset, states + offset, vectors)


@kernel("void(int64, int64, int64, int64)")
def _write_rows(work_address: Any, item_address: Any, out: Any, stride: Any) -> Any:
    w, item = _work_at(work_address), item_at(item_address)
    a = attention_at(w.attention)
    for row in range(w.rows):
        number = item.first + row
        token, head = number // a.group, item.kv_head * a.group + number % a.group
        target = f32_at(out + token * stride + 4 * a.head_dim * head)
        state = w.totals + row * w.state_bytes
        values, factor = f32_at(state + VALUES), np.float32(1.0) / f32_at(state + SUM)[0]
        for i in range(a.head_dim):
            target[i] = values[i] * factor


@kernel("void(int64, int64, int64, int64, int64, int64, int64, int64)")
def attend_item(
    attention_address: Any,
    item_address: Any,
    positions: Any,
    table: Any,
    q: Any,
    out: Any,
    stride: Any,
    scratch: Any,
) -> Any:
    """Attention of one item; its output is written by the last of the items that share its query rows.

    Args:
        positions: int32[tokens of the sequence in this batch].
        table: the sequence's block table, int32.
        q, out: float32 matrices [tokens, heads * head_dim], their rows `stride` bytes apart.
    """
    item, work = item_at(item_address), scratch
    w = _work_at(work)
    _set_up_work(attention_address, item_address, table, scratch + _WORK_BYTES, work)
    _place_rows(work, item_address, positions, q, stride)
    split = item.split
    part_bytes = w.rows * w.state_bytes if split != 0 else 0
    parts = split_at(split).states if split != 0 else w.parts
    _clear_states(work, w.totals)
    for part in range(max(item.first_part, w.first // PART), item.last_part):
        _attend_part(work, part, parts + part * part_bytes)
        if split == 0:
            _merge_part(work, part, parts)
    if split != 0:
        if atomic_add(split + _DONE, 1) + 1 < split_at(split).items:
            return
        split_at(split).done = 0  # for the next layer
        for part in range(w.first // PART, split_at(split).num_parts):
            _merge_part(work, part, parts + part * part_bytes)
    _write_rows(work, item_address, out, stride)
