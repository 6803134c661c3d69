"""The kernels of a matrix product as functions for Numba code, the same for quantized and dense weights.

Each begins with the names of format, instruction set and activation layout. Sizes along the inputs count
steps (`panel.Form`).
"""

from __future__ import annotations

from mvllm.backends.cpu import dense_kernels, quantized_kernels, quantized_panels
from mvllm.backends.cpu.isa import ISAS, Isa
from mvllm.backends.cpu.layout import ACTIVATION_LAYOUTS, DENSE, QUANTIZED, ActivationLayout
from mvllm.backends.cpu.panel import Form
from mvllm.backends.cpu.vector import I64, Emitter, Value, emit_for_count, emitted


def form_of(format_name: str, isa: Isa, records: ActivationLayout) -> Form:
    """How products with a format are cut up; `records` means nothing for a dense format."""
    if format_name in DENSE:
        return dense_kernels.dense_form(isa, DENSE[format_name])
    return quantized_panels.quantized_form(isa, QUANTIZED[format_name], records)


def _emit_tile(
    emitter: Emitter,
    format_name: str,
    isa_name: str,
    activation_name: str,
    tokens: Value,
    weights: Value,
    block_stride: Value,
    activations: Value,
    activation_stride: Value,
    out: Value,
    out_block_stride: Value,
    out_stride: Value,
    steps: Value,
) -> None:
    isa, records = ISAS[isa_name], ACTIVATION_LAYOUTS[activation_name]
    form = form_of(format_name, isa, records)

    def emit_dense(count: int) -> None:  # row blocks adjoin in `out`
        source = (weights, block_stride, activations, activation_stride)
        size = (form.tile_blocks, count)
        dense_kernels.emit_dense_tile(
            emitter, isa, DENSE[format_name], *size, *source, out, out_stride, steps
        )

    def emit_quantized(count: int) -> None:
        together = 1 if count <= isa.streamed_tokens else form.tile_blocks
        for first in range(0, form.tile_blocks, together):
            quantized_kernels.emit_tile(
                emitter,
                isa,
                QUANTIZED[format_name],
                records,
                together,
                count,
                emitter.offset(weights, emitter.times(block_stride, first)),
                block_stride,
                activations,
                activation_stride,
                emitter.offset(out, emitter.times(out_block_stride, first)),
                out_block_stride,
                out_stride,
                steps,
            )

    if format_name in DENSE:
        emit_for_count(emitter, tokens, form.tile_tokens, emit_dense)
    else:
        emit_for_count(emitter, tokens, form.tile_tokens, emit_quantized, smallest=2)


def _emit_rows(
    emitter: Emitter,
    format_name: str,
    isa_name: str,
    activation_name: str,
    weights: Value,
    block_stride: Value,
    activations: Value,
    out: Value,
    steps: Value,
) -> None:
    isa, records, none = ISAS[isa_name], ACTIVATION_LAYOUTS[activation_name], I64(0)
    size = (form_of(format_name, isa, records).row_blocks, 1)
    source = (weights, block_stride, activations, none)
    if format_name in DENSE:
        dense_kernels.emit_dense_tile(emitter, isa, DENSE[format_name], *size, *source, out, none, steps)
    else:
        layout = QUANTIZED[format_name]
        quantized_kernels.emit_tile(emitter, isa, layout, records, *size, *source, out, none, none, steps)


def _emit_unpack(
    emitter: Emitter, format_name: str, isa_name: str, activation_name: str, *addresses_and_sizes: Value
) -> None:
    isa, records = ISAS[isa_name], ACTIVATION_LAYOUTS[activation_name]
    if format_name in DENSE:
        dense_kernels.emit_dense_unpack(emitter, isa, DENSE[format_name], *addresses_and_sizes)
    else:
        quantized_panels.emit_unpack(emitter, isa, QUANTIZED[format_name], records, *addresses_and_sizes)


def _emit_panel_tile(
    emitter: Emitter,
    format_name: str,
    isa_name: str,
    activation_name: str,
    tokens: Value,
    *addresses_and_sizes: Value,
) -> None:
    isa, records = ISAS[isa_name], ACTIVATION_LAYOUTS[activation_name]

    def emit(count: int) -> None:
        if format_name in DENSE:
            dense_kernels.emit_dense_panel_tile(emitter, isa, count, *addresses_and_sizes)
        else:
            layout = QUANTIZED[format_name]
            quantized_panels.emit_panel_tile(emitter, isa, layout, records, count, *addresses_and_sizes)

    emit_for_count(emitter, tokens, form_of(format_name, isa, records).panel.tokens, emit, smallest=2)


multiply_tile = emitted(_emit_tile, 9, num_names=3)
"""`tile_blocks` row blocks times up to `tile_tokens` tokens, of quantized weights 2 at least, as (names,
tokens, weights, block_stride, activations, activation_stride, out, out_block_stride, out_stride, steps)."""

multiply_rows = emitted(_emit_rows, 5, num_names=3)
"""`row_blocks` row blocks times one token, as (names, weights, block_stride, activations, out, steps)."""

unpack_panel = emitted(_emit_unpack, 4, num_names=3)
"""Unpack a chunk of a panel, as (names, weights, block_stride, scratch, steps)."""

multiply_panel = emitted(_emit_panel_tile, 11, num_names=3)
"""An unpacked chunk times 2 or more tokens, as (names, tokens, scratch, activations, activation_stride, out,
out_stride, steps, is_first, following, block_stride, lines): meanwhile asks in each round for `lines` cache
lines of each row block of the chunk at `following`."""
