"""How a product is cut up, and the sums of a tile, for quantized and dense weights alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mvllm.backends.cpu.isa import Isa
from mvllm.backends.cpu.memory import LINE_BYTES
from mvllm.backends.cpu.reading import Reading
from mvllm.backends.cpu.vector import F32, I64, Emitter, Value, constant, vector


@dataclass(frozen=True)
class PanelShape:
    """How many row blocks a panel has, and how many tokens its largest tile."""

    blocks: int
    tokens: int


@dataclass(frozen=True)
class Form:
    """How a product with the weights of one format is cut up. A step is a group of inputs, or one input."""

    inputs_per_step: int
    activation_step_bytes: int
    reading: Reading  # of few tokens' weights; for more there are tiles and panels
    tile_blocks: int  # row blocks of a tile
    tile_tokens: int  # of the largest tile
    panel: PanelShape
    round_steps: int  # steps of one round of a panel tile's loop
    chunk_steps: int  # of a panel
    chunk_bytes: int  # packed weights of these steps in one row block
    scratch_bytes: int  # an unpacked panel


def output_addresses(
    emitter: Emitter,
    blocks: int,
    tokens: int,
    out: Value,
    out_block_stride: Value,
    out_stride: Value,
) -> list[Value]:
    """Where a tile's sums go, token by token, row block by row block; strides in bytes."""
    return [
        emitter.offset(out, emitter.times(out_stride, token), emitter.times(out_block_stride, block))
        for token in range(tokens)
        for block in range(blocks)
    ]


def emit_start_sums(emitter: Emitter, isa: Isa, outs: Sequence[Value], is_first: Value | None) -> list[Value]:
    """A tile's sums before it, of the outputs at the addresses `outs`.

    Zeros, or with `is_first`, if that is 0, what is at these addresses.
    """
    zero = constant(F32, isa.lanes, 0.0)
    if is_first is None:
        return [zero] * len(outs)
    fresh = emitter.builder.icmp_signed("!=", is_first, I64(0))
    before = [emitter.load(vector(F32, isa.lanes), out) for out in outs]
    return [emitter.builder.select(fresh, zero, value) for value in before]


def emit_store_sums(emitter: Emitter, outs: Sequence[Value], sums: Sequence[Value]) -> None:
    """Store a tile's sums at the addresses of its outputs."""
    for out, sum_ in zip(outs, sums, strict=True):
        emitter.store(sum_, out)


def emit_prefetch_lines(
    emitter: Emitter, number: Value, blocks: int, following: Value, block_stride: Value, lines: Value
) -> None:
    """Ask for the `lines` cache lines of each row block that round `number` of a tile has to bring in."""
    first = emitter.offset(following, emitter.times(emitter.times(number, lines), LINE_BYTES))

    def line(index: Value, carried: list[Value]) -> list[Value]:
        at = emitter.offset(first, emitter.times(index, LINE_BYTES))
        for block in range(blocks):
            emitter.prefetch(emitter.offset(at, emitter.times(block_stride, block)))
        return carried

    emitter.loop(lines, [], line)
