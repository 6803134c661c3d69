"""The vector code of attention: scores of a tile, softmax of a row, weighted sum of values.

All three give a query row the same bits whatever other rows, tiles or blocks surround it:

- A score is a product over head_dim in two chains, even and odd components, added at the end. Vectors hold
  TILE consecutive positions, so positions never mix.
- Maximum and sum of a row run over tiles at absolute positions: lane i sees the positions i, i + 16, ...;
  then the lanes are folded by halves. Positions outside the row's range contribute exact zeros.
- A weighted sum is one chain of fused multiply-adds over the row's positions, ascending. It is carried
  through memory from call to call, which changes no bit.
"""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir

from mvllm.backends.cpu.functions import exponential, round_to_half
from mvllm.backends.cpu.isa import half_to_float, selected
from mvllm.backends.cpu.kv_pool import TILE
from mvllm.backends.cpu.memory import LINE_BYTES
from mvllm.backends.cpu.vector import (
    F16,
    F32,
    I8,
    I16,
    I32,
    I64,
    VOID,
    Emitter,
    Value,
    constant,
    emit_for_count,
    emitted,
    vector,
)

_ISA = selected()
MAX_ROWS = 4 if _ISA.lanes >= TILE else 3
"""Query rows that share a pass over keys and values: as many as the registers hold sums for."""

_COLUMN_VECTORS = 4 if _ISA.lanes >= TILE else 2  # vectors of value columns summed at once
_FLOATS = vector(F32, TILE)
_VECTOR_BYTES = 4 * TILE
_READ, _SECOND_LEVEL, _DATA = 0, 2, 1  # arguments of llvm.prefetch


def _emit_variants(emitter: Emitter, rows: Value, is_half: Value, emit: Callable[[int, bool], None]) -> None:
    """Emit code for each number of rows and both types of KV; at run time one of them is chosen."""

    def variant(number: int) -> None:
        emit((number - 1) % MAX_ROWS + 1, number > MAX_ROWS)

    number = emitter.offset(rows, emitter.times(is_half, MAX_ROWS))
    emit_for_count(emitter, number, 2 * MAX_ROWS, variant)


def _prefetch(emitter: Emitter, address: Value) -> None:
    """Ask for a line in the second-level cache: its queue of pending lines is longer than the first's."""
    pointer = emitter.builder.inttoptr(address, I8.as_pointer())
    emitter.call("llvm.prefetch.p0", VOID, pointer, I32(_READ), I32(_SECOND_LEVEL), I32(_DATA))


def _load_kv(emitter: Emitter, is_half: bool, address: Value, offset: Value | int = 0) -> Value:
    """float32[TILE] from keys or values."""
    if is_half:
        return half_to_float(emitter, _ISA, emitter.load(vector(F16, TILE), address, offset))
    return emitter.load(_FLOATS, address, offset)


def _emit_scores(
    emitter: Emitter, rows: int, is_half: bool, queries: Value, keys: Value, next_keys: Value, pairs: Value
) -> list[Value]:
    """Scores of `rows` queries at the TILE positions of `keys`; asks for those at `next_keys`."""
    row_bytes = TILE * (2 if is_half else 4)
    addresses = [emitter.load(I64, queries, 8 * row) for row in range(rows)]

    def step(index: Value, sums: list[Value]) -> list[Value]:
        at = emitter.times(index, 2 * row_bytes)
        ahead = emitter.offset(next_keys, at)
        for line in range(0, 2 * row_bytes, LINE_BYTES):
            _prefetch(emitter, emitter.offset(ahead, line))
        result = list(sums)
        for parity in (0, 1):
            key = _load_kv(emitter, is_half, emitter.offset(keys, at), parity * row_bytes)
            for row, address in enumerate(addresses):
                query = emitter.load_splat(
                    F32, TILE, emitter.offset(address, emitter.times(index, 8)), 4 * parity
                )
                chain = 2 * row + parity
                result[chain] = emitter.fma(query, key, result[chain])
        return result

    sums = emitter.loop(pairs, [constant(F32, TILE, 0.0)] * (2 * rows), step)
    return [emitter.builder.fadd(sums[2 * row], sums[2 * row + 1]) for row in range(rows)]


def _emit_score_tile(
    emitter: Emitter,
    rows: Value,
    is_half: Value,
    queries: Value,
    keys: Value,
    next_keys: Value,
    pairs: Value,
    scores: Value,
    stride: Value,
) -> None:
    """Write the scores of a tile.

    Args:
        queries: int64[rows], addresses of float32[2 * pairs].
        keys: a tile [2 * pairs][TILE]; `next_keys` one that will be read soon, or any readable place.
        scores: where float32[TILE] of the first row go; `stride` bytes further those of the next row.
    """

    def variant(count: int, half: bool) -> None:
        for row, score in enumerate(_emit_scores(emitter, count, half, queries, keys, next_keys, pairs)):
            emitter.store(score, emitter.offset(scores, emitter.times(stride, row)))

    _emit_variants(emitter, rows, is_half, variant)


score_tile = emitted(_emit_score_tile, 8)


def _emit_softmax(
    emitter: Emitter, scores: Value, begin: Value, end: Value, tiles: Value, scale: Value
) -> Value:
    """Replace float32[tiles * TILE] scores by exp(scale * score - maximum), zero outside [begin, end).

    Returns 1 / their sum, float32.
    """
    builder = emitter.builder
    lanes = ir.Constant(vector(I64, TILE), list(range(TILE)))
    begins, ends, scales = (emitter.splat(value, TILE) for value in (begin, end, scale))
    lowest, zeros = constant(F32, TILE, float("-inf")), constant(F32, TILE, 0.0)

    def in_range(tile: Value) -> Value:
        positions = builder.add(emitter.splat(emitter.times(tile, TILE), TILE), lanes)
        return builder.and_(
            builder.icmp_signed(">=", positions, begins), builder.icmp_signed("<", positions, ends)
        )

    def scaled(tile: Value) -> Value:
        return builder.fmul(emitter.load(_FLOATS, scores, emitter.times(tile, _VECTOR_BYTES)), scales)

    def larger(x: Value, y: Value) -> Value:
        return builder.select(builder.fcmp_ordered(">", x, y), x, y)

    def find_maximum(tile: Value, carried: list[Value]) -> list[Value]:
        return [larger(carried[0], builder.select(in_range(tile), scaled(tile), lowest))]

    (maxima,) = emitter.loop(tiles, [lowest], find_maximum)
    maximum = emitter.splat(emitter.reduce(larger, maxima), TILE)

    def exponentiate(tile: Value, carried: list[Value]) -> list[Value]:
        power = exponential(emitter, builder.fsub(scaled(tile), maximum))
        power = builder.select(in_range(tile), power, zeros)
        emitter.store(power, scores, emitter.times(tile, _VECTOR_BYTES))
        return [builder.fadd(carried[0], power)]

    (sums,) = emitter.loop(tiles, [zeros], exponentiate)
    return builder.fdiv(F32(1.0), emitter.reduce(builder.fadd, sums))


softmax_row = emitted(_emit_softmax, [*["int64"] * 4, "float32"], returns="float32")
"""`_emit_softmax` as (scores, begin, end, tiles, scale) -> float32."""


def _emit_weighted_sums(
    emitter: Emitter,
    is_half: bool,
    vectors: int,
    weights: list[Value],
    values: Value,
    next_values: Value,
    value_stride: Value,
    count: Value,
    sums: list[Value],
) -> None:
    """Add `count` weighted positions to `vectors` vectors of columns, for all rows."""
    rows = len(weights)
    vector_bytes = TILE * (2 if is_half else 4)
    carried = [emitter.load(_FLOATS, sums[r], v * _VECTOR_BYTES) for r in range(rows) for v in range(vectors)]

    def step(index: Value, carried: list[Value]) -> list[Value]:
        at = emitter.times(index, value_stride)
        ahead = emitter.offset(next_values, at)
        for line in range(0, vectors * vector_bytes, LINE_BYTES):
            _prefetch(emitter, emitter.offset(ahead, line))
        row_values = emitter.offset(values, at)
        loaded = [_load_kv(emitter, is_half, row_values, v * vector_bytes) for v in range(vectors)]
        result = []
        for row in range(rows):
            weight = emitter.load_splat(F32, TILE, weights[row], emitter.times(index, 4))
            for column, value in enumerate(loaded):
                result.append(emitter.fma(weight, value, carried[row * vectors + column]))
        return result

    carried = emitter.loop(count, carried, step)
    for index, value in enumerate(carried):
        emitter.store(value, sums[index // vectors], index % vectors * _VECTOR_BYTES)


def _emit_add_weighted_values(
    emitter: Emitter,
    rows: Value,
    is_half: Value,
    weights: Value,
    weight_stride: Value,
    values: Value,
    next_values: Value,
    value_stride: Value,
    count: Value,
    sums: Value,
    sum_stride: Value,
    vectors: Value,
) -> None:
    """sums[r] += weights[r][i] * values[i] for i = 0 .. count - 1 in turn.

    Args:
        weights: float32 of the first row at the first position; `weight_stride` bytes further the next row's.
        values: the first position's [vectors][TILE]; `value_stride` bytes further the next position's.
        next_values: what will be read soon, or any readable place.
        sums: float32[vectors][TILE] of the first row; `sum_stride` bytes further the next row's.
    """
    builder = emitter.builder

    def variant(row_count: int, half: bool) -> None:
        row_weights = [emitter.offset(weights, emitter.times(weight_stride, r)) for r in range(row_count)]
        row_sums = [emitter.offset(sums, emitter.times(sum_stride, r)) for r in range(row_count)]
        vector_bytes = TILE * (2 if half else 4)

        def columns(first: Value, number: int) -> list[Value]:
            start, target = emitter.times(first, vector_bytes), emitter.times(first, _VECTOR_BYTES)
            _emit_weighted_sums(
                emitter,
                half,
                number,
                row_weights,
                emitter.offset(values, start),
                emitter.offset(next_values, start),
                value_stride,
                count,
                [emitter.offset(address, target) for address in row_sums],
            )
            return []

        wide = builder.sdiv(vectors, I64(_COLUMN_VECTORS))
        covered = emitter.times(wide, _COLUMN_VECTORS)
        emitter.loop(wide, [], lambda i, _: columns(emitter.times(i, _COLUMN_VECTORS), _COLUMN_VECTORS))
        emitter.loop(builder.sub(vectors, covered), [], lambda i, _: columns(builder.add(covered, i), 1))

    _emit_variants(emitter, rows, is_half, variant)


add_weighted_values = emitted(_emit_add_weighted_values, 11)


def _emit_half_bits(emitter: Emitter, value: Value) -> Value:
    half = round_to_half(emitter, _ISA, emitter.splat(value, 1))
    return emitter.builder.extract_element(emitter.builder.bitcast(half, vector(I16, 1)), I64(0))


half_bits = emitted(_emit_half_bits, ["float32"], returns="int16")
"""The bits, as int16, of a float32 rounded to the nearest float16, ties to even."""
