"""The vector code of attention: scores of a span, softmax of a row, weighted sum of values, merging of parts.

All of it gives a query row the same bits whatever other rows, tiles or blocks surround it:

- A score is one chain of fused multiply-adds over head_dim. Vectors hold TILE consecutive positions, so
  positions never mix.
- Maximum and sum of a row within a span run over tiles at absolute positions: lane i sees the positions i,
  i + 16, ...; then the lanes are folded by halves. Positions outside the row's range, and scores of minus
  infinity, have the weight zero.
- A weighted sum is one chain of fused multiply-adds over the row's positions, ascending. It is carried
  through memory from call to call, which changes no bit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from llvmlite import ir

from mvllm.backends.cpu.functions import exponential, round_to_half
from mvllm.backends.cpu.isa import half_to_float, selected
from mvllm.backends.cpu.jit import native_function
from mvllm.backends.cpu.kv_pool import TILE, VALUE_BYTES
from mvllm.backends.cpu.memory import LINE_BYTES
from mvllm.backends.cpu.pointers import emit_call
from mvllm.backends.cpu.vector import (
    F16,
    F32,
    I16,
    I32,
    I64,
    Emitter,
    Value,
    constant,
    emit_for_count,
    emitted,
    vector,
)

SPAN = 128
"""Positions whose scores exist at a time; spans begin at its multiples."""

MAX_WIDTH = 6
"""Most query rows that share a pass over keys or values: as many as the registers hold sums for."""

TILES_AT_ONCE = 2
"""Key tiles come in multiples of this."""

SCORES_BYTES = 4 * (SPAN + (TILES_AT_ONCE - 1) * TILE)
"""From one query row's scores to the next row's: a span, and what tiles beyond its end may overwrite."""

LOWEST = float(np.finfo(np.float32).min)
"""Maximum of no scores."""

MAXIMUM, SUM, VALUES = 0, 4, LINE_BYTES
"""Offsets in the state of a query row: the maximum of its scores, the sum of exp(score - maximum), and the
sum of the values weighted so."""

UNIT_BYTES = 16
"""Of an entry in a table of what is read: the address, and how many positions if it is a run of values."""

AHEAD = 2
"""While a unit is read, the one so many entries further is prefetched; a table goes on so far."""

_AHEAD_AGAIN = 1
"""And this one is prefetched once more by the last rows that read a unit: while many lines are pending, the
processor drops prefetches."""

_ISA = selected()
_LANES = _ISA.lanes
_SUMS = 12 if _ISA.lanes < TILE else 24  # vector registers for running sums
_FLOATS = vector(F32, TILE)
_VECTOR_BYTES = 4 * TILE
_COUNT = 8  # offset in a unit
_RUNS_AT_ONCE = 2  # what lies between loading and storing sums; more would not stay in the first-level cache
_UNROLL = 2  # components or positions of a round


def _at_once(width: int) -> int:
    """Vectors of TILE positions or columns that `width` query rows have registers for, at most 2."""
    return min(2, max(1, _SUMS * _ISA.lanes // (width * TILE)))


def _unit(emitter: Emitter, table: Value, index: Value) -> Value:
    return emitter.offset(table, emitter.times(index, UNIT_BYTES))


def _for_each_group(emitter: Emitter, rows: Value, emit: Callable[[int, Value, list[int]], None]) -> None:
    """Run the code of `emit(width, first row, units ahead to prefetch)` for groups of MAX_WIDTH query rows,
    the last of which may have fewer."""
    before_last = emitter.builder.sdiv(emitter.offset(rows, -1), I64(MAX_WIDTH))
    covered = emitter.times(before_last, MAX_WIDTH)

    def group(index: Value, carried: list[Value]) -> list[Value]:
        emit(MAX_WIDTH, emitter.times(index, MAX_WIDTH), [AHEAD])
        return []

    emitter.loop(before_last, [], group)
    last = emitter.builder.sub(rows, covered)
    emit_for_count(
        emitter, last, range(1, MAX_WIDTH + 1), lambda width: emit(width, covered, [AHEAD, _AHEAD_AGAIN])
    )


def _load_kv(emitter: Emitter, dtype: str, address: Value, offset: Value | int) -> Value:
    """A register full of keys or values, as float32."""
    if dtype == "f16":
        return half_to_float(emitter, _ISA, emitter.load(vector(F16, _LANES), address, offset))
    return emitter.load(vector(F32, _LANES), address, offset)


def _add_products(
    emitter: Emitter,
    sums: list[Value],
    factors: Sequence[Callable[[], Value]],
    columns: Sequence[Callable[[], Value]],
) -> list[Value]:
    """sums[row][column] + factors[row] * columns[column]. Of factors and columns, which are loaded here, the
    fewer stay in registers; with both there the sums would not."""
    result = list(sums)
    if len(factors) <= len(columns):
        held = [factor() for factor in factors]
        for index, load in enumerate(columns):
            column = load()
            for row, factor in enumerate(held):
                at = row * len(columns) + index
                result[at] = emitter.pin(emitter.fma(factor, column, sums[at]), _ISA.register)
    else:
        held = [column() for column in columns]
        for row, load in enumerate(factors):
            factor = load()
            for index, column in enumerate(held):
                at = row * len(columns) + index
                result[at] = emitter.pin(emitter.fma(factor, column, sums[at]), _ISA.register)
    return result


def _emit_scores(
    emitter: Emitter,
    dtype: str,
    width: int,
    keys: list[Value],
    fetched: list[Value],
    queries: Value,
    pairs: Value,
) -> list[Value]:
    """Scores of `width` queries at the positions of the tiles `keys`: registers [row][tile][part of a tile].

    Meanwhile prefetches the units `fetched`.
    """
    row_bytes = TILE * VALUE_BYTES[dtype]
    register_bytes = _LANES * VALUE_BYTES[dtype]

    def step(index: Value, sums: list[Value]) -> list[Value]:
        at = emitter.times(index, _UNROLL * row_bytes)
        query = emitter.offset(queries, emitter.times(index, 4 * _UNROLL * width))
        for unit in fetched:
            emitter.prefetch(emitter.offset(unit, at), _UNROLL * row_bytes)
        for component in range(_UNROLL):
            factors = [
                partial(emitter.load_splat, F32, _LANES, query, 4 * (component * width + row))
                for row in range(width)
            ]
            columns = [
                partial(_load_kv, emitter, dtype, emitter.offset(key, at), component * row_bytes + piece)
                for key in keys
                for piece in range(0, row_bytes, register_bytes)
            ]
            sums = _add_products(emitter, sums, factors, columns)
        return sums

    zeros = [constant(F32, _LANES, 0.0)] * (width * len(keys) * (TILE // _LANES))
    return emitter.loop(pairs, zeros, step)


def _emit_score_tiles(
    emitter: Emitter,
    dtype: str,
    rows: Value,
    tiles: Value,
    num_tiles: Value,
    queries: Value,
    pairs: Value,
    scores: Value,
) -> None:
    """Write the scores of `rows` query rows at tiles that follow one another.

    All rows use a few tiles before the next ones: but for the first, they find them in the first-level cache.

    Args:
        tiles: table of `num_tiles` tiles [2 * pairs][TILE]; their number is a multiple of TILES_AT_ONCE.
        queries: float32[2 * pairs][MAX_WIDTH] of the first MAX_WIDTH rows, and so on; the last ones may be
            fewer.
        scores: float32[rows][num_tiles * TILE], SCORES_BYTES from row to row.
    """
    row_bytes = emitter.times(pairs, 8)

    def step(index: Value, carried: list[Value]) -> list[Value]:
        first = _unit(emitter, tiles, emitter.times(index, TILES_AT_ONCE))
        addresses = [emitter.load(I64, first, UNIT_BYTES * i) for i in range(TILES_AT_ONCE + AHEAD)]
        target = emitter.offset(scores, emitter.times(index, TILES_AT_ONCE * _VECTOR_BYTES))

        def group(width: int, row: Value, ahead: list[int]) -> None:
            own_queries = emitter.offset(queries, emitter.times(row, row_bytes))
            own_target = emitter.offset(target, emitter.times(row, SCORES_BYTES))
            at_once = _at_once(width)
            for tile in range(0, TILES_AT_ONCE, at_once):
                keys = addresses[tile:][:at_once]
                fetched = [unit for distance in ahead for unit in addresses[tile + distance :][:at_once]]
                found = _emit_scores(emitter, dtype, width, keys, fetched, own_queries, pairs)
                for number, score in enumerate(found):
                    own_row, piece = divmod(number, len(found) // width)
                    offset = SCORES_BYTES * own_row + tile * _VECTOR_BYTES + 4 * _LANES * piece
                    emitter.store(score, own_target, offset)

        _for_each_group(emitter, rows, group)
        return []

    emitter.loop(emitter.builder.sdiv(num_tiles, I64(TILES_AT_ONCE)), [], step)


_score_tiles = emitted(_emit_score_tiles, 6, num_names=1)


def _larger(emitter: Emitter, x: Value, y: Value) -> Value:
    return emitter.builder.select(emitter.builder.fcmp_ordered(">", x, y), x, y)


def _exponential(emitter: Emitter, x: Value) -> Value:
    """exp of a scalar."""
    return emitter.builder.extract_element(exponential(emitter, emitter.splat(x, 1)), I32(0))


def _emit_softmax(emitter: Emitter, scores: Value, begin: Value, end: Value, state: Value) -> Value:
    """Take a span's scores into a row's state, except for the values.

    Replaces the scores at [begin, end) by exp(score - maximum), where the maximum includes all of the row's
    scores so far. Returns the factor that brings earlier weights to this maximum.
    """
    builder = emitter.builder
    tile_bits = TILE.bit_length() - 1
    first, last = builder.ashr(begin, I64(tile_bits)), builder.ashr(emitter.offset(end, -1), I64(tile_bits))
    count = emitter.offset(builder.sub(last, first), 1)
    scores = emitter.offset(scores, emitter.times(first, _VECTOR_BYTES))
    minus_infinity, zeros = constant(F32, TILE, float("-inf")), constant(F32, TILE, 0.0)

    def score(tile: Value) -> Value:
        return emitter.load(_FLOATS, scores, emitter.times(tile, _VECTOR_BYTES))

    # What lies outside [begin, end) in the first and the last tile gets no weight.
    lanes = ir.Constant(vector(I32, TILE), list(range(TILE)))
    begins, ends = (emitter.splat(builder.trunc(value, I32), TILE) for value in (begin, end))
    for tile in (I64(0), builder.sub(count, I64(1))):
        start = builder.trunc(emitter.times(builder.add(first, tile), TILE), I32)
        positions = builder.add(emitter.splat(start, TILE), lanes)
        seen = builder.and_(
            builder.icmp_signed(">=", positions, begins), builder.icmp_signed("<", positions, ends)
        )
        masked = builder.select(seen, score(tile), minus_infinity)
        emitter.store(masked, scores, emitter.times(tile, _VECTOR_BYTES))

    def find_maximum(tile: Value, carried: list[Value]) -> list[Value]:
        return [_larger(emitter, carried[0], score(tile))]

    (maxima,) = emitter.loop(count, [constant(F32, TILE, LOWEST)], find_maximum)
    old = emitter.load(F32, state, MAXIMUM)
    new = _larger(emitter, old, emitter.reduce(lambda x, y: _larger(emitter, x, y), maxima))
    emitter.store(new, state, MAXIMUM)
    maximum = emitter.splat(new, TILE)

    def exponentiate(tile: Value, carried: list[Value]) -> list[Value]:
        found = score(tile)
        power = exponential(emitter, builder.fsub(found, maximum))
        power = builder.select(builder.fcmp_ordered("==", found, minus_infinity), zeros, power)
        emitter.store(power, scores, emitter.times(tile, _VECTOR_BYTES))
        return [builder.fadd(carried[0], power)]

    (sums,) = emitter.loop(count, [zeros], exponentiate)
    is_new = builder.zext(builder.fcmp_unordered("!=", old, new), I64)
    (factor,) = emitter.loop(is_new, [F32(1.0)], lambda *_: [_exponential(emitter, builder.fsub(old, new))])
    total = emitter.fma(emitter.load(F32, state, SUM), factor, emitter.reduce(builder.fadd, sums))
    emitter.store(total, state, SUM)
    return factor


softmax_span = emitted(_emit_softmax, 4, returns="float32")
"""`_emit_softmax` as (scores, begin, end, state) -> float32."""


def _emit_merge(emitter: Emitter, total: Value, part: Value, vectors: Value) -> None:
    """Add the state of a part of a row's positions to that of the positions before it."""
    builder = emitter.builder
    before, here = emitter.load(F32, total, MAXIMUM), emitter.load(F32, part, MAXIMUM)
    maximum = _larger(emitter, before, here)
    old = _exponential(emitter, builder.fsub(before, maximum))
    new = _exponential(emitter, builder.fsub(here, maximum))

    def merged(x: Value, y: Value, old: Value, new: Value) -> Value:
        return emitter.fma(x, old, builder.fmul(y, new))

    total_sum, part_sum = emitter.load(F32, total, SUM), emitter.load(F32, part, SUM)
    emitter.store(maximum, total, MAXIMUM)
    emitter.store(merged(total_sum, part_sum, old, new), total, SUM)
    old_factors, new_factors = emitter.splat(old, TILE), emitter.splat(new, TILE)

    def step(index: Value, carried: list[Value]) -> list[Value]:
        at = emitter.offset(emitter.times(index, _VECTOR_BYTES), VALUES)
        x, y = emitter.load(_FLOATS, total, at), emitter.load(_FLOATS, part, at)
        emitter.store(merged(x, y, old_factors, new_factors), total, at)
        return []

    emitter.loop(vectors, [], step)


merge_state = emitted(_emit_merge, 3)


def _emit_weighted_sums(
    emitter: Emitter,
    dtype: str,
    vectors: int,
    runs: Value,
    num_runs: Value,
    column: Value,
    value_stride: Value,
    weights: Value,
    sums: list[Value],
    ahead: list[int],
) -> None:
    """Add the weighted values of all runs to `vectors` vectors of columns from `column` on, for all rows."""
    value_bytes = VALUE_BYTES[dtype]
    pieces = range(0, vectors * TILE, _LANES)
    column_bytes = TILE * value_bytes
    start = emitter.times(column, column_bytes)
    before = [emitter.load(vector(F32, _LANES), row_sums, 4 * piece) for row_sums in sums for piece in pieces]

    def add_run(index: Value, carried: list[Value]) -> list[Value]:
        entry = _unit(emitter, runs, index)
        values = emitter.offset(emitter.load(I64, entry), start)
        count = emitter.load(I64, entry, _COUNT)
        # Units ahead are fetched in the order of their addresses, not by columns.
        units = [emitter.load(I64, entry, distance * UNIT_BYTES) for distance in ahead]
        fetched = [emitter.offset(unit, emitter.times(start, count)) for unit in units]
        *so_far, own_weights = carried

        def add_positions(first: Value, number: int, so_far: list[Value]) -> list[Value]:
            at = emitter.offset(values, emitter.times(first, value_stride))
            done = emitter.times(first, vectors * column_bytes)
            for unit in fetched:
                emitter.prefetch(emitter.offset(unit, done), number * vectors * column_bytes)
            weight = emitter.offset(own_weights, emitter.times(first, 4))
            for position in range(number):
                factors = [
                    partial(emitter.load_splat, F32, _LANES, weight, SCORES_BYTES * row + 4 * position)
                    for row in range(len(sums))
                ]
                columns = [partial(_load_kv, emitter, dtype, at, piece * value_bytes) for piece in pieces]
                so_far = _add_products(emitter, so_far, factors, columns)
                at = emitter.offset(at, value_stride)
            return so_far

        rounds = emitter.builder.sdiv(count, I64(_UNROLL))
        done = emitter.times(rounds, _UNROLL)
        so_far = emitter.loop(
            rounds, so_far, lambda i, so_far: add_positions(emitter.times(i, _UNROLL), _UNROLL, so_far)
        )
        left = emitter.builder.sub(count, done)
        so_far = emitter.loop(
            left, so_far, lambda i, so_far: add_positions(emitter.offset(done, i), 1, so_far)
        )
        return [*so_far, emitter.offset(own_weights, emitter.times(count, 4))]

    *after, _ = emitter.loop(num_runs, [*before, weights], add_run)
    for index, value in enumerate(after):
        row, piece = divmod(index, len(pieces))
        emitter.store(value, sums[row], 4 * pieces[piece])


def _emit_add_weighted_values(
    emitter: Emitter,
    dtype: str,
    rows: Value,
    runs: Value,
    num_runs: Value,
    value_stride: Value,
    weights: Value,
    sums: Value,
    sum_stride: Value,
    vectors: Value,
) -> None:
    """sums[r] += weights[r][i] * values[i] for the positions i of all runs in turn.

    All rows and columns use a few runs before the next ones. A column of many positions would find room in
    few sets of the first-level cache, and is not the order in which memory is quick.

    Args:
        runs: table of `num_runs` runs, their values [positions][vectors][TILE], `value_stride` bytes from
            position to position.
        weights: float32[rows], at the first position; SCORES_BYTES from row to row.
        sums: float32[vectors][TILE] of the first row; `sum_stride` bytes further the next row's.
    """
    builder = emitter.builder

    def some_runs(index: Value, carried: list[Value]) -> list[Value]:
        (own_weights,) = carried
        first = emitter.times(index, _RUNS_AT_ONCE)
        own_runs, left = _unit(emitter, runs, first), builder.sub(num_runs, first)
        is_less = builder.icmp_signed("<", left, I64(_RUNS_AT_ONCE))
        count = builder.select(is_less, left, I64(_RUNS_AT_ONCE))

        def group(width: int, row: Value, ahead: list[int]) -> None:
            row_weights = emitter.offset(own_weights, emitter.times(row, SCORES_BYTES))
            row_sums = [
                emitter.offset(sums, emitter.times(sum_stride, emitter.offset(row, r))) for r in range(width)
            ]

            def columns(column: Value, number: int) -> list[Value]:
                target = emitter.times(column, _VECTOR_BYTES)
                own_sums = [emitter.offset(address, target) for address in row_sums]
                _emit_weighted_sums(
                    emitter,
                    dtype,
                    number,
                    own_runs,
                    count,
                    column,
                    value_stride,
                    row_weights,
                    own_sums,
                    ahead,
                )
                return []

            at_once = _at_once(width)
            wide = builder.sdiv(vectors, I64(at_once))
            covered = emitter.times(wide, at_once)
            emitter.loop(wide, [], lambda i, _: columns(emitter.times(i, at_once), at_once))
            if at_once > 1:
                emitter.loop(
                    builder.sub(vectors, covered), [], lambda i, _: columns(builder.add(covered, i), 1)
                )

        _for_each_group(emitter, rows, group)

        def skip(run: Value, carried: list[Value]) -> list[Value]:
            positions = emitter.load(I64, _unit(emitter, own_runs, run), _COUNT)
            return [emitter.offset(carried[0], emitter.times(positions, 4))]

        return emitter.loop(count, [own_weights], skip)

    times = builder.sdiv(emitter.offset(num_runs, _RUNS_AT_ONCE - 1), I64(_RUNS_AT_ONCE))
    emitter.loop(times, [weights], some_runs)


_add_weighted_values = emitted(_emit_add_weighted_values, 8, num_names=1)


# The two large functions are called through their addresses: they are compiled once, and only for the type of
# KV in use.


@functools.cache
def score_function(dtype: str) -> Any:
    """`_emit_score_tiles` for KV of `dtype`, compiled on first use; has an `address`."""

    def score(rows, tiles, num_tiles, queries, pairs, scores):  # type: ignore[no-untyped-def]
        _score_tiles(dtype, rows, tiles, num_tiles, queries, pairs, scores)

    return native_function("void(int64, int64, int64, int64, int64, int64)", score)


@functools.cache
def values_function(dtype: str) -> Any:
    """`_emit_add_weighted_values` for KV of `dtype`, compiled on first use; has an `address`."""

    def add_values(  # type: ignore[no-untyped-def]
        rows, runs, num_runs, value_stride, weights, sums, sum_stride, vectors
    ):
        _add_weighted_values(dtype, rows, runs, num_runs, value_stride, weights, sums, sum_stride, vectors)

    return native_function("void(int64, int64, int64, int64, int64, int64, int64, int64)", add_values)


call_score = emitted(emit_call, 7)
"""(function's address, the arguments of `score_function`)"""

call_add_values = emitted(emit_call, 9)
"""(function's address, the arguments of `values_function`)"""


def _emit_half_bits(emitter: Emitter, value: Value) -> Value:
    half = round_to_half(emitter, _ISA, emitter.splat(value, 1))
    return emitter.builder.extract_element(emitter.builder.bitcast(half, vector(I16, 1)), I64(0))


half_bits = emitted(_emit_half_bits, ["float32"], returns="int16")
"""The bits, as int16, of a float32 rounded to the nearest float16, ties to even."""
