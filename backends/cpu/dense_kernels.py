"""Products with float32, float16 and bfloat16 weights.

Activations are float32 rows. Each output is one chain of fused multiply-adds over ascending inputs, whatever
the tile: several tokens of one row block, or for a single token several row blocks, so that enough
independent chains are in flight. A panel is a few row blocks over a chunk of their inputs, widened to float32
in a scratch that stays in the first-level cache; sums go on from chunk to chunk in `out`.
"""

from __future__ import annotations

from collections.abc import Callable

from mvllm.backends.cpu.isa import ISAS, Isa, half_to_float
from mvllm.backends.cpu.layout import DENSE, DenseLayout
from mvllm.backends.cpu.panel import (
    Form,
    PanelShape,
    emit_prefetch_lines,
    emit_start_sums,
    emit_store_sums,
    output_addresses,
)
from mvllm.backends.cpu.reading import Reading
from mvllm.backends.cpu.vector import (
    F16,
    F32,
    I16,
    I32,
    I64,
    Emitter,
    Value,
    constant,
    emitted,
    vector,
)

_READING = Reading(most_tokens=1, short_streams=4, long_streams=4, bytes_ahead=1024)

PANEL_SHAPE = PanelShape(blocks=2, tokens=6)

CHUNK_INPUTS = 128
"""Inputs of a panel."""

UNROLL = 4
"""Inputs of a round of a tile's loop."""

# Bytes that are prefetched ahead. A tile of many tokens works long enough on its weights for memory to answer
# from further away.
_FAR_PREFETCH = 2560
_FEW_TOKENS = 3


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
    out_block_stride: Value,
    out_stride: Value,
    inputs: Value,
    is_first: Value | None = None,
    prefetch: Callable[[Value], None] | None = None,
) -> None:
    """out[token, block, lane] of some row blocks and tokens; strides in bytes.

    With `is_first` the weights are a panel's, in the cache, and their products are added to `out` unless
    `is_first` is 1; `prefetch(n)` is emitted in round n, of `UNROLL` inputs.
    """
    row_bytes = layout.value_bytes * isa.lanes
    starts = [emitter.offset(weights, emitter.times(block_stride, b)) for b in range(blocks)]
    tokens_at = [emitter.offset(activations, emitter.times(activation_stride, t)) for t in range(tokens)]
    outs = output_addresses(emitter, blocks, tokens, out, out_block_stride, out_stride)

    def step(first_input: Value, width: int, sums: list[Value]) -> list[Value]:
        at = [emitter.offset(start, emitter.times(first_input, row_bytes)) for start in starts]
        x_offset = emitter.times(first_input, 4)
        xs = [emitter.offset(address, x_offset) for address in tokens_at]
        if prefetch is None:
            ahead = _READING.bytes_ahead // _READING.short_streams if tokens <= _FEW_TOKENS else _FAR_PREFETCH
            for address in at:
                emitter.prefetch(emitter.offset(address, ahead), width * row_bytes)
        elif width == UNROLL:
            prefetch(emitter.builder.sdiv(first_input, I64(UNROLL)))
        for k in range(width):
            values = [load_floats(emitter, isa, layout, isa.lanes, address, k * row_bytes) for address in at]
            broadcast = [emitter.load_splat(F32, isa.lanes, x, 4 * k) for x in xs]
            sums = [
                emitter.fma(broadcast[index // blocks], values[index % blocks], sum_)
                for index, sum_ in enumerate(sums)
            ]
        return [emitter.pin(sum_, isa.register) for sum_ in sums]

    sums = emit_start_sums(emitter, isa, outs, is_first)
    sums = _for_each_input(emitter, inputs, sums, step)
    emit_store_sums(emitter, outs, sums)


def _for_each_input(
    emitter: Emitter,
    inputs: Value,
    carried: list[Value],
    body: Callable[[Value, int, list[Value]], list[Value]],
) -> list[Value]:
    """`carried = body(first input, number of inputs, carried)`, `UNROLL` inputs at a time, then singly."""
    steps = emitter.builder.sdiv(inputs, I64(UNROLL))
    carried = emitter.loop(steps, carried, lambda i, values: body(emitter.times(i, UNROLL), UNROLL, values))
    done = emitter.times(steps, UNROLL)
    left = emitter.builder.sub(inputs, done)
    return emitter.loop(left, carried, lambda i, values: body(emitter.offset(done, i), 1, values))


def emit_dense_unpack(
    emitter: Emitter,
    isa: Isa,
    layout: DenseLayout,
    weights: Value,
    block_stride: Value,
    scratch: Value,
    inputs: Value,
) -> None:
    """Widen `inputs` inputs, at most CHUNK_INPUTS, of the panel whose first row block is at `weights`."""
    row_bytes = layout.value_bytes * isa.lanes
    for block in range(PANEL_SHAPE.blocks):
        source = emitter.offset(weights, emitter.times(block_stride, block))
        target = emitter.offset(scratch, block * _panel_block_bytes(isa))

        def copy(
            first: Value, width: int, carried: list[Value], source: Value = source, target: Value = target
        ) -> list[Value]:
            at = emitter.offset(source, emitter.times(first, row_bytes))
            to = emitter.offset(target, emitter.times(first, 4 * isa.lanes))
            for k in range(width):
                value = load_floats(emitter, isa, layout, isa.lanes, at, k * row_bytes)
                emitter.store(value, to, k * 4 * isa.lanes)
            return carried

        _for_each_input(emitter, inputs, [], copy)


def _panel_block_bytes(isa: Isa) -> int:
    return CHUNK_INPUTS * 4 * isa.lanes


def dense_form(isa: Isa, layout: DenseLayout) -> Form:
    """How a product with such weights is cut up."""
    return Form(
        inputs_per_step=1,
        activation_step_bytes=4,
        reading=_READING,
        tile_blocks=1,
        tile_tokens=isa.max_tokens,
        panel=PANEL_SHAPE,
        round_steps=UNROLL,
        chunk_steps=CHUNK_INPUTS,
        chunk_bytes=CHUNK_INPUTS * layout.value_bytes * isa.lanes,
        scratch_bytes=PANEL_SHAPE.blocks * _panel_block_bytes(isa),
    )


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


def emit_dense_panel_tile(
    emitter: Emitter,
    isa: Isa,
    tokens: int,
    scratch: Value,
    activations: Value,
    activation_stride: Value,
    out: Value,
    out_stride: Value,
    inputs: Value,
    is_first: Value,
    following: Value,
    block_stride: Value,
    lines: Value,
) -> None:
    """out[token, row] += products of a widened chunk with `tokens` tokens; = if `is_first` isn't 0.

    Meanwhile asks for `lines` cache lines per round and row block of the chunk at `following`.
    """
    emit_dense_tile(
        emitter,
        isa,
        DENSE["F32"],
        PANEL_SHAPE.blocks,
        tokens,
        scratch,
        I64(_panel_block_bytes(isa)),
        activations,
        activation_stride,
        out,
        I64(4 * isa.lanes),
        out_stride,
        inputs,
        is_first,
        lambda number: emit_prefetch_lines(
            emitter, number, PANEL_SHAPE.blocks, following, block_stride, lines
        ),
    )


def _emit_row(emitter: Emitter, format_name: str, isa_name: str, *addresses_and_sizes: Value) -> None:
    emit_dense_row(emitter, ISAS[isa_name], DENSE[format_name], *addresses_and_sizes)


dense_row = emitted(_emit_row, 4, num_names=2)
"""`emit_dense_row` as (format name, ISA name, weights, lane, out, inputs)."""
