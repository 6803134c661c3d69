"""The kernels of a matrix product as functions for Numba code, the same for quantized and dense weights.

Each begins with the names of format, instruction set and activation layout. Sizes along the inputs count
steps (`panel.Form`).
"""

from __future__ import annotations

from mvllm.backends.cpu import dense_kernels, quantized_kernels, quantized_panels
from mvllm.backends.cpu.isa import ISAS, Isa
from mvllm.backends.cpu.layout import ACTIVATION_LAYOUTS, DENSE, QUANTIZED, ActivationLayout
from mvllm.backends.cpu.panel import Form
from mvllm.backends.cpu.vector import Emitter, Value, emit_for_count, emitted


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
    *addresses_and_sizes: Value,
) -> None:
    isa, records = ISAS[isa_name], ACTIVATION_LAYOUTS[activation_name]
    form = form_of(format_name, isa, records)

    def emit(count: int) -> None:
        size = (form.tile_blocks, count)
        if format_name in DENSE:
            dense_kernels.emit_dense_tile(emitter, isa, DENSE[format_name], *size, *addresses_and_sizes)
        else:
            layout = QUANTIZED[format_name]
            quantized_kernels.emit_tile(emitter, isa, layout, records, *size, *addresses_and_sizes)

    emit_for_count(emitter, tokens, range(2, form.tile_tokens + 1), emit)


def _emit_streams(
    emitter: Emitter,
    format_name: str,
    isa_name: str,
    activation_name: str,
    blocks: Value,
    tokens: Value,
    *addresses_and_sizes: Value,
) -> None:
    isa, records = ISAS[isa_name], ACTIVATION_LAYOUTS[activation_name]
    form = form_of(format_name, isa, records)

    def emit(block_count: int, token_count: int) -> None:
        size = (block_count, token_count)
        if format_name in DENSE:
            dense_kernels.emit_dense_tile(emitter, isa, DENSE[format_name], *size, *addresses_and_sizes)
        else:
            layout = QUANTIZED[format_name]
            quantized_kernels.emit_tile(
                emitter, isa, layout, records, *size, *addresses_and_sizes, reading=form.reading
            )

    def emit_for_tokens(count: int) -> None:
        together = sorted({1, form.reading.short_streams, form.reading.long_streams})
        emit_for_count(emitter, blocks, together, lambda block_count: emit(block_count, count))

    emit_for_count(emitter, tokens, range(1, form.reading.most_tokens + 1), emit_for_tokens)


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

    most = form_of(format_name, isa, records).panel.tokens
    emit_for_count(emitter, tokens, range(2, most + 1), emit)


multiply_tile = emitted(_emit_tile, 9, num_names=3)
"""`tile_blocks` row blocks times 2 to `tile_tokens` tokens, as (names, tokens, weights, block_stride,
activations, activation_stride, out, out_block_stride, out_stride, steps)."""

multiply_streams = emitted(_emit_streams, 10, num_names=3)
"""As many row blocks as there are streams, or one, times as many tokens as are read so, as (names, blocks,
tokens, weights, block_stride, activations, activation_stride, out, out_block_stride, out_stride, steps)."""

unpack_panel = emitted(_emit_unpack, 4, num_names=3)
"""Unpack a chunk of a panel, as (names, weights, block_stride, scratch, steps)."""

multiply_panel = emitted(_emit_panel_tile, 11, num_names=3)
"""An unpacked chunk times 2 or more tokens, as (names, tokens, scratch, activations, activation_stride, out,
out_stride, steps, is_first, following, block_stride, lines): meanwhile asks in each round for `lines` cache
lines of each row block of the chunk at `following`."""
