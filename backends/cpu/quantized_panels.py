"""Products of many tokens with quantized weights, by panels.

A panel is a few adjacent row blocks over a chunk of their inputs. Its codes are unpacked once into a scratch
that stays in the first-level cache, as the words that `Isa.dot` takes; then tiles of all its row blocks and
a few tokens run over it. Sums go on from chunk to chunk in `out`: they are the ones of `quantized_kernels`.

Scratch, for each group of 32 inputs, for each row block:

    scale    float32[lanes]
    bias     float32[lanes], only with a bias
    halves   the three vectors of `isa.HalfFactors`, where halves have factors
    words    words of codes, 4 * lanes bytes each

With activations in pairs factors of halves are no part of it, but multiplied into the words (code - zero).
"""

from __future__ import annotations

from dataclasses import dataclass

from mvllm.backends.cpu.isa import HalfFactors, Isa
from mvllm.backends.cpu.layout import GROUP, NARROW, ActivationLayout, QuantLayout
from mvllm.backends.cpu.panel import (
    Form,
    PanelShape,
    emit_prefetch_lines,
    emit_start_sums,
    emit_store_sums,
    output_addresses,
)
from mvllm.backends.cpu.quantized_kernels import (
    NUM_FACTOR_PAIRS,
    TILE_BLOCKS,
    ZEROS,
    Factors,
    GroupProduct,
    GroupWeights,
    factor_pairs,
    for_each_group,
    load_word,
    times_factor,
)
from mvllm.backends.cpu.reading import best_reading
from mvllm.backends.cpu.vector import (
    F32,
    I8,
    I32,
    I64,
    Emitter,
    Value,
    vector,
)

CHUNK_GROUPS = 8
"""Groups of a chunk; a superblock where there are such."""

PANEL_BLOCKS = 3
"""Row blocks of a panel. With three tokens nine sums, three vectors of codes and an activation fill the 16
registers of AVX2; with four, twelve dot products at a time keep both multipliers of AVX-512 busy (5 % less
time for a prompt than with three)."""


@dataclass(frozen=True)
class Scratch:
    """The unpacked form of a group of one row block, a sequence of vectors."""

    lanes: int
    layout: QuantLayout
    records: ActivationLayout

    @property
    def has_halves(self) -> bool:
        """Factors of halves are apart from the words."""
        return self.layout.scales > 1 and not self.is_centred

    @property
    def is_centred(self) -> bool:
        """Words are (code - zero) times the factor of their half."""
        return self.layout.scales > 1 and self.records.has_pairs

    @property
    def first_half(self) -> int:
        """Index of the first of the vectors for the halves."""
        return 1 + self.layout.has_bias

    @property
    def first_word(self) -> int:
        """Index of the first vector of codes."""
        return self.first_half + NUM_FACTOR_PAIRS * self.has_halves

    @property
    def vector_bytes(self) -> int:
        return 4 * self.lanes

    @property
    def block_bytes(self) -> int:
        return self.vector_bytes * (self.first_word + self.records.words)


def emit_unpack(
    emitter: Emitter,
    isa: Isa,
    layout: QuantLayout,
    records: ActivationLayout,
    weights: Value,
    block_stride: Value,
    scratch: Value,
    groups: Value,
) -> None:
    """Unpack `groups` groups, at most CHUNK_GROUPS, of the panel whose first row block is at `weights`."""
    unpacked, blocks = Scratch(isa.lanes, layout, records), PANEL_BLOCKS
    factors = Factors(emitter, isa, layout, lane=None)

    def block(number: Value, carried: list[Value]) -> list[Value]:
        target = emitter.offset(scratch, emitter.times(number, unpacked.block_bytes))

        def group(
            at: list[Value], headers: list[list[Value]], index: Value, carried: list[Value]
        ) -> list[Value]:
            [record], [header] = at, headers
            values, bias = [factors.scale(header, record)], factors.bias(header, record)
            values += [] if bias is None else [bias]
            halves = factors.halves(record)
            words = [load_word(emitter, isa, layout, records, record, n) for n in range(records.words)]
            if unpacked.has_halves:
                values += factor_pairs(emitter, layout, halves)
            elif unpacked.is_centred:
                pairs = factor_pairs(emitter, layout, halves)
                words = [
                    times_factor(emitter, layout, word, pairs[2 * number // len(words)])
                    for number, word in enumerate(words)
                ]
            to = emitter.offset(target, emitter.times(index, blocks * unpacked.block_bytes))
            for position, value in enumerate(values + words):
                emitter.store(value, to, position * unpacked.vector_bytes)
            return []

        start = emitter.offset(weights, emitter.times(number, block_stride))
        for_each_group(emitter, isa, layout, factors, [start], groups, [], group)
        return []

    emitter.loop(I64(blocks), [], block)


def emit_panel_tile(
    emitter: Emitter,
    isa: Isa,
    layout: QuantLayout,
    records: ActivationLayout,
    tokens: int,
    scratch: Value,
    activations: Value,
    activation_stride: Value,
    out: Value,
    out_stride: Value,
    groups: Value,
    is_first: Value,
    following: Value,
    block_stride: Value,
    lines: Value,
) -> None:
    """out[token, row] += products of an unpacked chunk with `tokens` tokens; = if `is_first` isn't 0.

    Meanwhile asks for `lines` cache lines per group and row block of the chunk at `following`.
    """
    unpacked, blocks = Scratch(isa.lanes, layout, records), PANEL_BLOCKS
    floats, ints, codes = vector(F32, isa.lanes), vector(I32, isa.lanes), vector(I8, 4 * isa.lanes)
    acts = [emitter.offset(activations, emitter.times(activation_stride, I64(t))) for t in range(tokens)]
    outs = output_addresses(emitter, blocks, tokens, out, I64(4 * isa.lanes), out_stride)

    def group(index: Value, sums: list[Value]) -> list[Value]:
        emit_prefetch_lines(emitter, index, blocks, following, block_stride, lines)
        at = emitter.offset(scratch, emitter.times(index, blocks * unpacked.block_bytes))

        def load(type_: Value, block: int, number: int) -> Value:
            return emitter.load(type_, at, block * unpacked.block_bytes + number * unpacked.vector_bytes)

        # Loaded where they are used: there are not enough registers to hold them.
        halves = HalfFactors(
            lambda block, half: load(ints, block, unpacked.first_half + half),
            lambda block: load(ints, block, unpacked.first_half + ZEROS),
        )
        weights = GroupWeights(
            blocks,
            lambda block, word: load(codes, block, unpacked.first_word + word),
            lambda block: load(floats, block, 0),
            lambda block: load(floats, block, 1) if layout.has_bias else None,
            halves if unpacked.has_halves else None,
            0 if unpacked.is_centred else layout.zero,
        )
        position = emitter.times(index, records.record_bytes)
        product = GroupProduct(emitter, isa, layout, records, weights)
        return product.add_to(sums, [emitter.offset(act, position) for act in acts])

    sums = emit_start_sums(emitter, isa, outs, is_first)
    sums = emitter.loop(groups, sums, group)
    emit_store_sums(emitter, outs, sums)


def quantized_form(isa: Isa, layout: QuantLayout, records: ActivationLayout) -> Form:
    """How a product with such weights and activations is cut up."""
    assert records in (NARROW, isa.wide)
    return Form(
        inputs_per_step=GROUP,
        activation_step_bytes=records.record_bytes,
        reading=best_reading(isa, layout.bits),
        tile_blocks=TILE_BLOCKS,
        tile_tokens=isa.max_tokens,
        panel=PanelShape(PANEL_BLOCKS, isa.panel_tokens),
        round_steps=1,
        chunk_steps=CHUNK_GROUPS,
        chunk_bytes=CHUNK_GROUPS // layout.superblock * layout.superblock_bytes(isa.lanes),
        scratch_bytes=CHUNK_GROUPS * PANEL_BLOCKS * Scratch(isa.lanes, layout, records).block_bytes,
    )
