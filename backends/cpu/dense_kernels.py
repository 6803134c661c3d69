"""Products with float32, float16 and bfloat16 weights.

Activations are float32 rows. Each output is one chain of fused multiply-adds over ascending inputs, whatever
the tile: several tokens of one row block, or for a single token several row blocks, so that enough
independent chains are in flight.
"""

from __future__ import annotations

from mvllm.backends.cpu.isa import ISAS, Isa, half_to_float, prefetch_distance
from mvllm.backends.cpu.layout import DENSE, DenseLayout
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

BLOCKS_AT_ONCE = 4
"""Row blocks of a one-token tile."""

_UNROLL = 4  # inputs per loop step


def load_floats(
    emitter: Emitter, isa: Isa, layout: DenseLayout, count: int, address: Value, offset: int
) -> Value:
    """`count` adjacent stored values as float32."""
    builder = emitter.builder
    if layout.format_name == "F32":
        return emitter.load(vector(F32, count), address, offset)
    if layout.format_name == "F16":
        return half_to_float(emitter, isa, emitter.load(vector(F16, count), address, offset))
    words = builder.zext(emitter.load(vector(I16, count), address, offset), vector(I32, count))
    return builder.bitcast(builder.shl(words, constant(I32, count, 16)), vector(F32, count))


def emit_dense_tile(
    emitter: Emitter,
    isa: Isa,
    layout: DenseLayout,
    blocks: int,
    tokens: int,
    weights: Value,
    block_stride: Value,
    activations: Value,
    activation_stride: Value,
    out: Value,
    out_stride: Value,
    inputs: Value,
) -> None:
    """out[token, block, lane] of adjacent row blocks and tokens; strides in bytes."""
    row_bytes = layout.value_bytes * isa.lanes
    starts = [emitter.offset(weights, emitter.times(block_stride, b)) for b in range(blocks)]
    tokens_at = [emitter.offset(activations, emitter.times(activation_stride, t)) for t in range(tokens)]

    def step(first_input: Value, width: int, sums: list[Value]) -> list[Value]:
        at = [emitter.offset(start, emitter.times(first_input, row_bytes)) for start in starts]
        x_offset = emitter.times(first_input, 4)
        xs = [emitter.offset(address, x_offset) for address in tokens_at]
        for address in at:
            emitter.prefetch(address, prefetch_distance(tokens), width * row_bytes)
        for k in range(width):
            values = [load_floats(emitter, isa, layout, isa.lanes, address, k * row_bytes) for address in at]
            broadcast = [emitter.load_splat(F32, isa.lanes, x, 4 * k) for x in xs]
            sums = [
                emitter.fma(broadcast[index % tokens], values[index // tokens], sum_)
                for index, sum_ in enumerate(sums)
            ]
        return [emitter.pin(sum_, isa.register) for sum_ in sums]

    steps = emitter.builder.sdiv(inputs, I64(_UNROLL))
    zeros = [constant(F32, isa.lanes, 0.0)] * (blocks * tokens)
    sums = emitter.loop(steps, zeros, lambda i, sums: step(emitter.times(i, _UNROLL), _UNROLL, sums))
    done = emitter.times(steps, _UNROLL)
    left = emitter.builder.sub(inputs, done)
    sums = emitter.loop(left, sums, lambda i, sums: step(emitter.offset(done, i), 1, sums))
    for index, sum_ in enumerate(sums):
        row = emitter.offset(out, emitter.times(out_stride, index % tokens))
        emitter.store(sum_, row, index // tokens * 4 * isa.lanes)


def emit_dense_row(
    emitter: Emitter, isa: Isa, layout: DenseLayout, weights: Value, lane: Value, out: Value, inputs: Value
) -> None:
    """Row `lane` of a row block, widened to float32."""
    row = emitter.offset(weights, emitter.times(lane, layout.value_bytes))

    def copy(index: Value, carried: list[Value]) -> list[Value]:
        address = emitter.offset(row, emitter.times(index, layout.value_bytes * isa.lanes))
        value = load_floats(emitter, isa, layout, 1, address, 0)
        emitter.store(value, emitter.offset(out, emitter.times(index, 4)))
        return []

    emitter.loop(inputs, [], copy)


def _emit_multiply(
    emitter: Emitter, format_name: str, isa_name: str, tokens: Value, *addresses_and_sizes: Value
) -> None:
    isa = ISAS[isa_name]
    emit_for_count(
        emitter,
        tokens,
        isa.max_tokens,
        lambda count: emit_dense_tile(emitter, isa, DENSE[format_name], 1, count, *addresses_and_sizes),
    )


def _emit_multiply_blocks(
    emitter: Emitter, format_name: str, isa_name: str, *addresses_and_sizes: Value
) -> None:
    emit_dense_tile(emitter, ISAS[isa_name], DENSE[format_name], BLOCKS_AT_ONCE, 1, *addresses_and_sizes)


def _emit_row(emitter: Emitter, format_name: str, isa_name: str, *addresses_and_sizes: Value) -> None:
    emit_dense_row(emitter, ISAS[isa_name], DENSE[format_name], *addresses_and_sizes)


multiply_dense_tile = emitted(_emit_multiply, 8, num_names=2)
"""`emit_dense_tile` of one row block as (format name, ISA name, tokens, weights, block_stride, activations,
activation_stride, out, out_stride, inputs), for 1 <= tokens <= the instruction set's `max_tokens`."""

multiply_dense_blocks = emitted(_emit_multiply_blocks, 7, num_names=2)
"""`emit_dense_tile` of one token and `BLOCKS_AT_ONCE` row blocks as (format name, ISA name, weights,
block_stride, activations, activation_stride, out, out_stride, inputs)."""

dense_row = emitted(_emit_row, 4, num_names=2)
"""`emit_dense_row` as (format name, ISA name, weights, lane, out, inputs)."""
