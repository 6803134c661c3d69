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

from mvllm.backends.cpu.dense_kernels import (
    BLOCKS_AT_ONCE,
    dense_row,
    multiply_dense_blocks,
    multiply_dense_tile,
)
from mvllm.backends.cpu.isa import Isa
from mvllm.backends.cpu.jit import kernel, native_function
from mvllm.backends.cpu.layout import DENSE, GROUP, QUANTIZED, ActivationLayout
from mvllm.backends.cpu.pointers import emit_call
from mvllm.backends.cpu.quantized_kernels import dequantize_row, max_tokens, multiply_tile, quantize_groups
from mvllm.backends.cpu.quantized_panels import (
    CHUNK_GROUPS,
    Scratch,
    multiply_panel,
    panel_shape,
    unpack_panel,
)
from mvllm.backends.cpu.vector import I64, Emitter, Value, emitted, stack_memory

# Fields of a descriptor, as indices of its int64 elements.
FUNCTION, WEIGHTS, BLOCK_STRIDE, INPUTS, PANELS_FROM = range(5)
DESCRIPTOR_FIELDS = 5

DEFAULT_PANELS_FROM = 5
"""Tokens from which on a product is computed by panels, where nothing else is known."""

_MATMUL_SIGNATURE = "void(int64, int64, int64, int64, int64, int64, int64, int64)"
_EMBED_SIGNATURE = "void(int64, int64, int64)"
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
def quantize_row(x, records, inputs, is_wide):  # type: ignore[no-untyped-def]
    """Write the activation records of the float32 row at `x`; `inputs` is a multiple of 32."""
    if is_wide:
        quantize_groups("wide", x, records, inputs // GROUP)
    else:
        quantize_groups("narrow", x, records, inputs // GROUP)


@functools.cache
def matmul_address(format_name: str, isa: Isa, records: ActivationLayout) -> int:
    """Address of the product's code for a format, compiled on first use and kept for the process.

    `records` means nothing for a dense format.
    """
    if format_name in DENSE:
        function = _make_dense_matmul(format_name, isa.name, isa.lanes, isa.max_tokens)
    else:
        layout = QUANTIZED[format_name]
        shape = panel_shape(layout, records)
        function = _make_quantized_matmul(
            format_name,
            isa.name,
            records.name,
            isa.lanes,
            max_tokens(isa, records),
            shape.blocks,
            shape.tokens,
            layout.superblock_bytes(isa.lanes) * CHUNK_GROUPS // layout.superblock,
            records.record_bytes,
            CHUNK_GROUPS * shape.blocks * Scratch(isa.lanes, layout, records).block_bytes,
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


def _make_quantized_matmul(
    format_name: str,
    isa_name: str,
    activation_name: str,
    lanes: int,
    largest_tile: int,
    panel_blocks: int,
    panel_tokens: int,
    chunk_bytes: int,
    record_bytes: int,
    scratch_bytes: int,
) -> Callable[..., Any]:
    def quantized_matmul(  # type: ignore[no-untyped-def]
        descriptor, activations, activation_stride, out, out_stride, tokens, first_block, last_block
    ):
        weights = load_field(descriptor, WEIGHTS)
        block_stride = load_field(descriptor, BLOCK_STRIDE)
        groups = load_field(descriptor, INPUTS) // GROUP
        by_panels = tokens >= load_field(descriptor, PANELS_FROM) and last_block - first_block >= panel_blocks
        scratch = stack_memory(scratch_bytes)
        at_once = max(largest_tile, min(tokens, _L2_ACTIVATION_BYTES // activation_stride))
        for start in range(0, tokens, at_once):
            stop = min(start + at_once, tokens)
            if by_panels:
                for panel in range(first_block, last_block, panel_blocks):
                    # The last panel is whole too: it may compute some rows once more.
                    block = min(panel, last_block - panel_blocks)
                    for chunk in range((groups + CHUNK_GROUPS - 1) // CHUNK_GROUPS):
                        part = min(CHUNK_GROUPS, groups - chunk * CHUNK_GROUPS)
                        at = weights + block * block_stride + chunk * chunk_bytes
                        if (chunk + 1) * CHUNK_GROUPS < groups:
                            ahead = chunk_bytes
                        else:
                            ahead = panel_blocks * block_stride - chunk * chunk_bytes
                        unpack_panel(
                            format_name, isa_name, activation_name, at, block_stride, scratch, part, ahead
                        )
                        token = start
                        while token < stop:
                            tiles = (stop - token + panel_tokens - 1) // panel_tokens
                            count = (stop - token + tiles - 1) // tiles
                            multiply_panel(
                                format_name,
                                isa_name,
                                activation_name,
                                count,
                                scratch,
                                activations + token * activation_stride + chunk * CHUNK_GROUPS * record_bytes,
                                activation_stride,
                                out + token * out_stride + block * (4 * lanes),
                                out_stride,
                                part,
                                chunk == 0,
                            )
                            token += count
            else:
                for block in range(first_block, last_block):
                    token = start
                    while token < stop:
                        tiles = (stop - token + largest_tile - 1) // largest_tile
                        count = (stop - token + tiles - 1) // tiles
                        multiply_tile(
                            format_name,
                            isa_name,
                            activation_name,
                            count,
                            weights + block * block_stride,
                            activations + token * activation_stride,
                            activation_stride,
                            out + token * out_stride + block * (4 * lanes),
                            out_stride,
                            groups,
                        )
                        token += count

    return quantized_matmul


def _make_quantized_embed(format_name: str, isa_name: str, lanes: int) -> Callable[..., Any]:
    def quantized_embed(descriptor, token, out):  # type: ignore[no-untyped-def]
        block = token // lanes
        weights = load_field(descriptor, WEIGHTS) + block * load_field(descriptor, BLOCK_STRIDE)
        groups = load_field(descriptor, INPUTS) // GROUP
        dequantize_row(format_name, isa_name, weights, token - block * lanes, out, groups)

    return quantized_embed


def _make_dense_matmul(format_name: str, isa_name: str, lanes: int, largest_tile: int) -> Callable[..., Any]:
    def dense_matmul(  # type: ignore[no-untyped-def]
        descriptor, activations, activation_stride, out, out_stride, tokens, first_block, last_block
    ):
        weights = load_field(descriptor, WEIGHTS)
        block_stride = load_field(descriptor, BLOCK_STRIDE)
        inputs = load_field(descriptor, INPUTS)
        if tokens == 1:
            while first_block + BLOCKS_AT_ONCE <= last_block:
                target = out + first_block * (4 * lanes)
                block_weights = weights + first_block * block_stride
                multiply_dense_blocks(
                    format_name, isa_name, block_weights, block_stride, activations, 0, target, 0, inputs
                )
                first_block += BLOCKS_AT_ONCE
        at_once = max(largest_tile, min(tokens, _L2_ACTIVATION_BYTES // activation_stride))
        for start in range(0, tokens, at_once):
            stop = min(start + at_once, tokens)
            for block in range(first_block, last_block):
                token = start
                while token < stop:
                    tiles = (stop - token + largest_tile - 1) // largest_tile
                    count = (stop - token + tiles - 1) // tiles
                    multiply_dense_tile(
                        format_name,
                        isa_name,
                        count,
                        weights + block * block_stride,
                        block_stride,
                        activations + token * activation_stride,
                        activation_stride,
                        out + token * out_stride + block * (4 * lanes),
                        out_stride,
                        inputs,
                    )
                    token += count

    return dense_matmul


def _make_dense_embed(format_name: str, isa_name: str, lanes: int) -> Callable[..., Any]:
    def dense_embed(descriptor, token, out):  # type: ignore[no-untyped-def]
        block = token // lanes
        weights = load_field(descriptor, WEIGHTS) + block * load_field(descriptor, BLOCK_STRIDE)
        dense_row(format_name, isa_name, weights, token - block * lanes, out, load_field(descriptor, INPUTS))

    return dense_embed
