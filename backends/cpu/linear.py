"""Matrix products and embedding rows over packed matrices, for use inside other compiled code.

A use of a packed matrix is described by a vector of int64, its descriptor. It holds the address of the
function that serves this use of the matrix's format, compiled (or read from the compile cache) when first
needed, and called through the address, so that callers neither contain nor recompile it.

All functions take raw addresses and check nothing: whoever builds a program validates shapes once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from mvllm.backends.cpu.dense_kernels import dense_row
from mvllm.backends.cpu.isa import Isa
from mvllm.backends.cpu.jit import kernel, native_function
from mvllm.backends.cpu.layout import DENSE, GROUP, ActivationLayout
from mvllm.backends.cpu.memory import LINE_BYTES
from mvllm.backends.cpu.pointers import emit_call
from mvllm.backends.cpu.products import form_of, multiply_panel, multiply_streams, multiply_tile, unpack_panel
from mvllm.backends.cpu.quantized_kernels import dequantize_row, quantize_groups
from mvllm.backends.cpu.vector import I64, Emitter, Value, emitted, stack_memory

# Fields of a descriptor, as indices of its int64 elements.
FUNCTION, WEIGHTS, BLOCK_STRIDE, INPUTS, PANELS_FROM = range(5)
DESCRIPTOR_FIELDS = 5

_MATMUL_SIGNATURE = "void(int64, int64, int64, int64, int64, int64, int64, int64)"
_EMBED_SIGNATURE = "void(int64, int64, int64)"
_L1_BYTES = 32 * 1024  # of most first-level caches
# Activations that one pass over the weights keeps in the second-level cache.
_L2_ACTIVATION_BYTES = 384 * 1024


def _emit_load_field(emitter: Emitter, descriptor: Value, field: Value) -> Value:
    return emitter.load(I64, descriptor, emitter.times(field, 8))


load_field = emitted(_emit_load_field, 2, returns="int64")
"""Element `field` of the descriptor at an address: (descriptor, field) -> int64."""

_call_matmul = emitted(emit_call, 9)  # (function's address, the arguments of `matmul`)
_call_embed = emitted(emit_call, 4)  # (function's address, the arguments of `embed_row`)


@kernel(_MATMUL_SIGNATURE)
def matmul(  # type: ignore[no-untyped-def]
    descriptor, activations, activation_stride, out, out_stride, tokens, first_block, last_block
):
    """out[t, row] = activations[t] . weights[row] for all tokens t and the rows of blocks [first, last).

    `descriptor`, `activations` and `out` are addresses, strides are bytes from one token to the next.
    Activations are the records of `quantize_row` that the descriptor was made for, or float32 rows for a
    dense matrix. Rows are columns of `out`, float32; all rows of a block are written, so a row of `out` has
    room for whole blocks. A value does not depend on `tokens`, nor on the blocks asked for.
    """
    function = load_field(descriptor, FUNCTION)
    _call_matmul(
        function,
        descriptor,
        activations,
        activation_stride,
        out,
        out_stride,
        tokens,
        first_block,
        last_block,
    )


@kernel(_EMBED_SIGNATURE)
def embed_row(descriptor, token, out):  # type: ignore[no-untyped-def]
    """out[0:INPUTS] = row `token` of the matrix, exact, float32; the descriptor is for embedding."""
    _call_embed(load_field(descriptor, FUNCTION), descriptor, token, out)


@kernel("void(int64, int64, int64, int64)")
def quantize_row(x, records, inputs, layout):  # type: ignore[no-untyped-def]
    """Write the activation records of the float32 row at `x`; `inputs` is a multiple of 32.

    `layout` is one of `layout.LAYOUT_NUMBERS`.
    """
    quantize_groups(layout, x, records, inputs // GROUP)


def default_panels_from(format_name: str) -> int:
    """Tokens from which on a product is computed by panels, where nothing is measured."""
    return 2 if format_name in DENSE else 12


@functools.cache
def matmul_address(format_name: str, isa: Isa, records: ActivationLayout) -> int:
    """Address of the product's code for a format, compiled on first use and kept for the process.

    `records` means nothing for a dense format.
    """
    form = form_of(format_name, isa, records)
    function = _make_matmul(
        format_name,
        isa.name,
        records.name,
        4 * isa.lanes,
        form.inputs_per_step,
        form.activation_step_bytes,
        form.reading.most_tokens,
        form.reading.short_streams,
        form.reading.long_streams,
        form.tile_blocks,
        form.tile_tokens,
        form.panel.blocks,
        form.panel.tokens,
        form.round_steps,
        form.chunk_steps,
        form.chunk_bytes,
        form.chunk_bytes // LINE_BYTES + 1,
        form.scratch_bytes,
    )
    return _address(_MATMUL_SIGNATURE, function)


@functools.cache
def embed_address(format_name: str, isa: Isa) -> int:
    """Address of the embedding's code for a format, compiled on first use and kept for the process."""
    make = _make_dense_embed if format_name in DENSE else _make_quantized_embed
    return _address(_EMBED_SIGNATURE, make(format_name, isa.name, isa.lanes))


_compiled: list[Any] = []  # keeps the machine code behind the addresses


def _address(signature: str, function: Callable[..., Any]) -> int:
    compiled = native_function(signature, function)
    _compiled.append(compiled)
    return int(compiled.address)


# The functions below are closures over strings and integers only: Numba sees them as literals, which select
# the code to emit, and its cache keys them by value.


def _make_matmul(
    format_name: str,
    isa_name: str,
    activation_name: str,
    out_block_bytes: int,
    inputs_per_step: int,
    step_bytes: int,
    streamed_tokens: int,
    short_streams: int,
    long_streams: int,
    tile_blocks: int,
    tile_tokens: int,
    panel_blocks: int,
    panel_tokens: int,
    round_steps: int,
    chunk_steps: int,
    chunk_bytes: int,
    chunk_lines: int,
    scratch_bytes: int,
) -> Callable[..., Any]:
    def product(  # type: ignore[no-untyped-def]
        descriptor, activations, activation_stride, out, out_stride, tokens, first_block, last_block
    ):
        weights = load_field(descriptor, WEIGHTS)
        block_stride = load_field(descriptor, BLOCK_STRIDE)
        steps = load_field(descriptor, INPUTS) // inputs_per_step
        panels_from = max(2, load_field(descriptor, PANELS_FROM))
        by_panels = tokens >= panels_from and last_block - first_block >= panel_blocks
        scratch = stack_memory(scratch_bytes)
        if tokens <= streamed_tokens and not by_panels:
            # As many parts of the row blocks are read side by side as there are streams.
            streams = long_streams if tokens * activation_stride > _L1_BYTES else short_streams
            part = (last_block - first_block) // streams
            block = first_block
            while block < last_block:
                together = streams if block < first_block + part else 1
                multiply_streams(
                    format_name,
                    isa_name,
                    activation_name,
                    together,
                    tokens,
                    weights + block * block_stride,
                    part * block_stride,
                    activations,
                    activation_stride,
                    out + block * out_block_bytes,
                    part * out_block_bytes,
                    out_stride,
                    steps,
                )
                block += 1
                if block == first_block + part:
                    block = first_block + part * streams
            return
        at_once = max(panel_tokens, min(tokens, _L2_ACTIVATION_BYTES // activation_stride))
        parts = (tokens + at_once - 1) // at_once
        start = 0
        while start < tokens:
            # Even parts, so that tiles have at least two tokens.
            stop = start + (tokens - start + parts - 1) // parts
            parts -= 1
            if by_panels:
                for panel in range(first_block, last_block, panel_blocks):
                    # The last panel is whole too: it may compute some rows once more.
                    block = min(panel, last_block - panel_blocks)
                    block_weights = weights + block * block_stride
                    for chunk in range((steps + chunk_steps - 1) // chunk_steps):
                        done = chunk * chunk_steps
                        count = min(chunk_steps, steps - done)
                        position = chunk * chunk_bytes
                        following = block_weights + position + chunk_bytes
                        if done + count == steps:
                            following = block_weights + panel_blocks * block_stride
                        unpack_panel(
                            format_name,
                            isa_name,
                            activation_name,
                            block_weights + position,
                            block_stride,
                            scratch,
                            count,
                        )
                        # The next chunk's weights come in while this one's are at work, some lines a round.
                        tiles = (stop - start + panel_tokens - 1) // panel_tokens
                        rounds = tiles * max(1, count // round_steps)
                        lines = (chunk_lines + rounds - 1) // rounds
                        asked = 0
                        token = start
                        while token < stop:
                            tiles = (stop - token + panel_tokens - 1) // panel_tokens
                            together = (stop - token + tiles - 1) // tiles
                            multiply_panel(
                                format_name,
                                isa_name,
                                activation_name,
                                together,
                                scratch,
                                activations + token * activation_stride + done * step_bytes,
                                activation_stride,
                                out + token * out_stride + block * out_block_bytes,
                                out_stride,
                                count,
                                chunk == 0,
                                following,
                                block_stride,
                                lines,
                            )
                            token += together
                            asked += count // round_steps * lines
                            following += count // round_steps * lines * LINE_BYTES
                            if asked >= chunk_lines:
                                lines = 0
            else:
                for block in range(first_block, last_block, tile_blocks):
                    # A row block without a neighbour is computed in its place too: strides of 0.
                    is_whole = block + tile_blocks <= last_block
                    token = start
                    while token < stop:
                        tiles = (stop - token + tile_tokens - 1) // tile_tokens
                        together = (stop - token + tiles - 1) // tiles
                        multiply_tile(
                            format_name,
                            isa_name,
                            activation_name,
                            together,
                            weights + block * block_stride,
                            block_stride * is_whole,
                            activations + token * activation_stride,
                            activation_stride,
                            out + token * out_stride + block * out_block_bytes,
                            out_block_bytes * is_whole,
                            out_stride,
                            steps,
                        )
                        token += together
            start = stop

    return product


def _make_quantized_embed(format_name: str, isa_name: str, lanes: int) -> Callable[..., Any]:
    def quantized_embed(descriptor, token, out):  # type: ignore[no-untyped-def]
        block = token // lanes
        weights = load_field(descriptor, WEIGHTS) + block * load_field(descriptor, BLOCK_STRIDE)
        groups = load_field(descriptor, INPUTS) // GROUP
        dequantize_row(format_name, isa_name, weights, token - block * lanes, out, groups)

    return quantized_embed


def _make_dense_embed(format_name: str, isa_name: str, lanes: int) -> Callable[..., Any]:
    def dense_embed(descriptor, token, out):  # type: ignore[no-untyped-def]
        block = token // lanes
        weights = load_field(descriptor, WEIGHTS) + block * load_field(descriptor, BLOCK_STRIDE)
        dense_row(format_name, isa_name, weights, token - block * lanes, out, load_field(descriptor, INPUTS))

    return dense_embed
