"""Products with quantized weights, for every format of `layout.QUANTIZED` and every instruction set.

A tile is one row block times a few tokens. Per group of 32 inputs it unpacks the weights' codes once, forms
the exact integer dot products with each token's codes, and carries one float32 accumulator per output:

    sum = fma(float(dot), scale * activation_scale, sum)
    sum = fma(bias, activation_scale * sum of codes, sum)       with a bias

Where the halves of a group have integer factors, they are part of the exact dot product. Groups ascend. Hence
an output's value does not depend on the tile, the batch or the row range it is in.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

from mvllm.backends.cpu.functions import ROUND_TO_INTEGER, ROUND_TO_INTEGER_BITS
from mvllm.backends.cpu.isa import ISAS, HalfFactors, Isa, Operands, half_to_float
from mvllm.backends.cpu.layout import (
    ACTIVATION_CODES_OFFSET,
    CODE_PARTS,
    GROUP,
    HALF_SUMS_OFFSET,
    LAYOUT_NUMBERS,
    MINUS_SUM_OFFSET,
    QUADS,
    QUANTIZED,
    SCALE_OFFSET,
    SCALED_SUM_OFFSET,
    SECOND_CODE_BITS,
    ActivationLayout,
    CodePart,
    QuantLayout,
)
from mvllm.backends.cpu.memory import LINE_BYTES
from mvllm.backends.cpu.panel import emit_store_sums, output_addresses
from mvllm.backends.cpu.reading import Reading
from mvllm.backends.cpu.vector import (
    F16,
    F32,
    I8,
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

TILE_BLOCKS = 2
"""Row blocks of a tile: they share the broadcasts of activations. With three, registers don't suffice."""

_LEAST_TOKENS_FOR_CODES_TIMES_FACTORS = 4
_FARTHEST_PREFETCH = 128 * 1024  # a part of the second-level cache
_NEAR_PREFETCH = 2560  # bytes ahead, where the next tile's weights are farther
_SMALLEST_MAXIMUM = 2.0**-110  # below it code / maximum could overflow; such a group counts as zeros


def load_quad(
    emitter: Emitter, isa: Isa, layout: QuantLayout, load_plane: Callable[[int], Value], quad: int
) -> Value:
    """Quad `quad` of a group as uint8 codes, from its code planes (see `layout`)."""
    parts = [_take_bits(emitter, isa, load_plane(part.plane), part) for part in CODE_PARTS[layout.bits][quad]]
    return functools.reduce(emitter.builder.or_, parts)


def _take_bits(emitter: Emitter, isa: Isa, plane: Value, part: CodePart) -> Value:
    """The bits of a part, at their place in the codes, for each byte of a plane."""
    builder, count = emitter.builder, plane.type.count
    if part.width == 8:
        return plane
    if isa.move_bits is not None and part.plane_bit != part.code_bit and count == 4 * isa.lanes:
        return isa.move_bits(emitter, plane, part.plane_bit, part.code_bit, part.width)
    words = vector(I32, count // 4)
    bits, right = builder.bitcast(plane, words), part.plane_bit - part.code_bit
    if right > 0:
        bits = builder.lshr(bits, constant(I32, words.count, right))
    mask = ((1 << part.width) - 1) << part.code_bit
    return builder.and_(builder.bitcast(bits, plane.type), constant(I8, count, mask))


def load_word(
    emitter: Emitter, isa: Isa, layout: QuantLayout, records: ActivationLayout, group: Value, word: int
) -> Value:
    """Word `word` of the group record at `group`, of all rows, for products with such activations."""
    builder, vector_bytes = emitter.builder, 4 * isa.lanes
    start = layout.codes_offset(isa.lanes)

    def load_plane(plane: int) -> Value:
        return emitter.load(vector(I8, vector_bytes), group, start + plane * vector_bytes)

    if not records.has_pairs:
        return load_quad(emitter, isa, layout, load_plane, word)
    quad, is_odd = load_quad(emitter, isa, layout, load_plane, word // 2), word % 2 == 1
    pairs = builder.bitcast(quad, vector(I16, vector_bytes // 2))
    if is_odd:
        pairs = builder.lshr(pairs, constant(I16, vector_bytes // 2, 8))
    else:
        pairs = builder.and_(pairs, constant(I16, vector_bytes // 2, 0xFF))
    return builder.bitcast(pairs, quad.type)


class Factors:
    """Loads the float32 scales and biases of groups, for `count` adjacent lanes starting at `lane`.

    `lane` is an index (int64 value) for a single row, or None for all lanes.
    """

    def __init__(self, emitter: Emitter, isa: Isa, layout: QuantLayout, lane: Value | None) -> None:
        self._emitter, self._isa, self._layout = emitter, isa, layout
        self._lane = lane
        self._count = isa.lanes if lane is None else 1

    def header(self, superblock: Value) -> list[Value]:
        """Super scale and, with a bias, super bias; empty if the format isn't factored."""
        if not self._layout.factored:
            return []
        offsets = [0, 2 * self._isa.lanes] if self._layout.has_bias else [0]
        return [self._half(superblock, offset) for offset in offsets]

    def scale(self, header: list[Value], group: Value) -> Value:
        """Of the group; where its halves have factors, the scale before them."""
        if not self._layout.factored:
            return self._plain(group, 0)
        if self._layout.scales > 1:
            return header[0]
        return self._emitter.builder.fmul(header[0], self._to_float(self._small(group, 0)))

    def halves(self, group: Value) -> list[Value]:
        """The integer factors of a group's halves, int32; empty if the format has none."""
        count = self._layout.scales
        return [self._small(group, half * self._isa.lanes) for half in range(count)] if count > 1 else []

    def bias(self, header: list[Value], group: Value) -> Value | None:
        if not self._layout.has_bias:
            return None
        offset = self._layout.bias_offset(self._isa.lanes)
        if not self._layout.factored:
            return self._plain(group, offset)
        return self._emitter.builder.fmul(header[1], self._to_float(self._small(group, offset)))

    def _plain(self, record: Value, offset: int) -> Value:
        layout = self._layout
        if layout.factor_type == "F16":
            return self._half(record, offset)
        builder, floats = self._emitter.builder, vector(F32, self._count)
        address = self._at(record, layout.factor_bytes)
        if layout.factor_type == "F32":
            return self._emitter.load(floats, address, offset)
        upper = builder.zext(
            self._emitter.load(vector(I16, self._count), address, offset), vector(I32, self._count)
        )
        return builder.bitcast(builder.shl(upper, constant(I32, self._count, 16)), floats)

    def _half(self, record: Value, offset: int) -> Value:
        half = self._emitter.load(vector(F16, self._count), self._at(record, 2), offset)
        return half_to_float(self._emitter, self._isa, half)

    def _small(self, record: Value, offset: int) -> Value:
        """int8 factors as int32."""
        small = self._emitter.load(vector(I8, self._count), self._at(record, 1), offset)
        return self._emitter.builder.sext(small, vector(I32, self._count))

    def _to_float(self, small: Value) -> Value:
        return self._emitter.builder.sitofp(small, vector(F32, self._count))

    def _at(self, record: Value, size: int) -> Value:
        if self._lane is None:
            return record
        return self._emitter.offset(record, self._emitter.times(self._lane, size))


ZEROS, NUM_FACTOR_PAIRS = 2, 3
"""Of `factor_pairs`: the index of zero times the factors, which follow the halves', and the number of all."""


def factor_pairs(emitter: Emitter, layout: QuantLayout, factors: list[Value]) -> list[Value]:
    """Int32 factors of a group's halves -> int16 pairs: each twice, then zero times each."""
    builder, lanes = emitter.builder, factors[0].type.count

    def pair(low: Value, high: Value) -> Value:
        upper = builder.shl(high, constant(I32, lanes, 16))
        return builder.or_(builder.and_(low, constant(I32, lanes, 0xFFFF)), upper)

    low, high = factors
    zeros = [builder.mul(factor, constant(I32, lanes, layout.zero)) for factor in factors]
    return [pair(low, low), pair(high, high), pair(*zeros)]


def times_factor(emitter: Emitter, layout: QuantLayout, word: Value, factor: Value) -> Value:
    """Word of pairs -> of (code - zero) times `factor`, int16: a half's of `factor_pairs`."""
    builder, pairs = emitter.builder, vector(I16, word.type.count // 2)
    centred = builder.sub(builder.bitcast(word, pairs), constant(I16, pairs.count, layout.zero))
    return builder.bitcast(builder.mul(centred, builder.bitcast(factor, pairs)), word.type)


def half_factors(emitter: Emitter, layout: QuantLayout, by_block: list[list[Value]]) -> HalfFactors:
    """The int32 factors of the halves of some row blocks' groups, as `Isa.dot` takes them."""
    pairs = [factor_pairs(emitter, layout, factors) for factors in by_block]
    return HalfFactors(lambda block, half: pairs[block][half], lambda block: pairs[block][ZEROS])


def for_each_group(
    emitter: Emitter,
    isa: Isa,
    layout: QuantLayout,
    factors: Factors,
    blocks: list[Value],
    groups: Value,
    carried: list[Value],
    body: Callable[[list[Value], list[list[Value]], Value, list[Value]], list[Value]],
) -> list[Value]:
    """`carried = body(group records, headers, group index, carried)` for every group of the row blocks at
    `blocks`; records and headers are those of each row block."""
    group_bytes = layout.group_bytes(isa.lanes)
    if not layout.factored:
        no_headers: list[list[Value]] = [[] for _ in blocks]

        def plain(index: Value, values: list[Value]) -> list[Value]:
            position = emitter.times(index, group_bytes)
            return body([emitter.offset(block, position) for block in blocks], no_headers, index, values)

        return emitter.loop(groups, carried, plain)

    def superblock(outer: Value, values: list[Value]) -> list[Value]:
        position = emitter.times(outer, layout.superblock_bytes(isa.lanes))
        starts = [emitter.offset(block, position) for block in blocks]
        headers = [factors.header(start) for start in starts]
        first = [emitter.offset(start, layout.header_bytes(isa.lanes)) for start in starts]
        before = emitter.times(outer, layout.superblock)

        def group(inner: Value, values: list[Value]) -> list[Value]:
            position = emitter.times(inner, group_bytes)
            records = [emitter.offset(start, position) for start in first]
            return body(records, headers, emitter.offset(before, inner), values)

        return emitter.loop(I64(layout.superblock), values, group)

    return emitter.loop(emitter.builder.sdiv(groups, I64(layout.superblock)), carried, superblock)


def emit_tile(
    emitter: Emitter,
    isa: Isa,
    layout: QuantLayout,
    records: ActivationLayout,
    blocks: int,
    tokens: int,
    weights: Value,
    block_stride: Value,
    activations: Value,
    activation_stride: Value,
    out: Value,
    out_block_stride: Value,
    out_stride: Value,
    groups: Value,
    *,
    reading: Reading | None = None,
) -> None:
    """out[token, block, lane] of `blocks` row blocks and `tokens` tokens; strides in bytes, `groups` of 32
    inputs. With block strides of 0 it is one row block, computed more than once.

    The row blocks are neighbours, or with `reading` each is part of a stream that goes on behind it.
    """
    factors = Factors(emitter, isa, layout, lane=None)
    starts = [emitter.offset(weights, emitter.times(block_stride, b)) for b in range(blocks)]
    acts = [emitter.offset(activations, emitter.times(activation_stride, t)) for t in range(tokens)]
    lines = range(0, layout.group_bytes(isa.lanes), LINE_BYTES)
    past_caches = reading is not None and reading.past_caches
    if reading is None:
        ahead = _next_tile(emitter, emitter.times(block_stride, blocks))
    else:
        ahead = I64(reading.bytes_ahead // blocks)

    has_halves = layout.scales > 1
    # For several tokens it is less work to multiply the codes by them than every token's sums.
    multiplies_codes = has_halves and records.has_pairs and tokens >= _LEAST_TOKENS_FOR_CODES_TIMES_FACTORS

    def group(at: list[Value], headers: list[list[Value]], index: Value, sums: list[Value]) -> list[Value]:
        halves = [factors.halves(record) for record in at]
        pairs = [factor_pairs(emitter, layout, each) for each in halves] if multiplies_codes else []

        def load(block: int, word: int) -> Value:
            # One by one among the products, since a burst of prefetches would stall them.
            for line in lines[word :: records.words]:
                emitter.prefetch(emitter.offset(at[block], ahead, line), past_caches=past_caches)
            codes = load_word(emitter, isa, layout, records, at[block], word)
            if not multiplies_codes:
                return codes
            return times_factor(emitter, layout, codes, pairs[block][2 * word // records.words])

        scales = [factors.scale(header, record) for header, record in zip(headers, at, strict=True)]
        biases = [factors.bias(header, record) for header, record in zip(headers, at, strict=True)]
        weights = GroupWeights(
            blocks,
            load,
            scales.__getitem__,
            biases.__getitem__,
            half_factors(emitter, layout, halves) if has_halves and not multiplies_codes else None,
            0 if multiplies_codes else layout.zero,
        )
        position = emitter.times(index, records.record_bytes)
        product = GroupProduct(emitter, isa, layout, records, weights)
        return product.add_to(sums, [emitter.offset(act, position) for act in acts])

    zeros = [constant(F32, isa.lanes, 0.0)] * (tokens * blocks)
    sums = for_each_group(emitter, isa, layout, factors, starts, groups, zeros, group)
    emit_store_sums(
        emitter, output_addresses(emitter, blocks, tokens, out, out_block_stride, out_stride), sums
    )


def _next_tile(emitter: Emitter, distance: Value) -> Value:
    """How far behind this tile's weights to prefetch: those of the next tile, if the second-level cache has
    room for both, else those that follow soon."""
    is_near = emitter.builder.icmp_signed("<=", distance, I64(_FARTHEST_PREFETCH))
    return emitter.builder.select(is_near, distance, I64(_NEAR_PREFETCH))


@dataclass(frozen=True)
class GroupWeights:
    """One group of inputs of some row blocks, unpacked.

    `load(block, word)` are codes as `Isa.dot` takes them. A row block has one scale, and a bias or None.
    """

    blocks: int
    load: Callable[[int, int], Value]
    scale: Callable[[int], Value]
    bias: Callable[[int], Value | None]
    halves: HalfFactors | None
    zero: int  # what to take from every code


@dataclass(frozen=True)
class GroupProduct:
    """Adds the products of one group of weights with some tokens to running sums (formula above)."""

    emitter: Emitter
    isa: Isa
    layout: QuantLayout
    records: ActivationLayout
    weights: GroupWeights

    def add_to(self, sums: list[Value], tokens: list[Value]) -> list[Value]:
        """`sums`, float32[lanes] for each token and in it each row block, with the group added; `tokens` are
        the addresses of its activation records."""
        dots = self.isa.dot(self.emitter, self._operands(tokens))
        results, before = [], iter(sums)
        for row, record in zip(dots, tokens, strict=True):
            scale = self._load_splat(F32, record, SCALE_OFFSET)
            for block, dot in enumerate(row):
                results.append(self._accumulate(dot, block, scale, record, next(before)))
        return results

    def _accumulate(self, dot: Value, block: int, scale: Value, record: Value, sum_: Value) -> Value:
        emitter, builder = self.emitter, self.emitter.builder
        exact = builder.sitofp(dot, vector(F32, self.isa.lanes))
        sum_ = emitter.fma(exact, builder.fmul(self.weights.scale(block), scale), sum_)
        bias = self.weights.bias(block)
        if bias is not None:
            sum_ = emitter.fma(bias, self._load_splat(F32, record, SCALED_SUM_OFFSET), sum_)
        return self._pin(sum_)

    def _operands(self, tokens: list[Value]) -> Operands:
        return Operands(
            lambda block, word: self._pin(self.weights.load(block, word)),
            blocks=self.weights.blocks,
            words=self._words_by_plane(),
            activations=[self.emitter.offset(record, ACTIVATION_CODES_OFFSET) for record in tokens],
            minus_sum=lambda token: self._load_splat(I32, tokens[token], MINUS_SUM_OFFSET),
            half_sums=lambda token: self._load_splat(I32, tokens[token], HALF_SUMS_OFFSET),
            bits=self.layout.bits,
            zero=self.weights.zero,
            halves=self.weights.halves,
            records=self.records,
            pin=self._pin,
        )

    def _words_by_plane(self) -> list[int]:
        """All words. Of 4 bits, those that are unpacked from the same plane come one after the other."""
        quads = list(range(QUADS))
        if self.layout.bits == 4:
            quads = [plane + quad for plane in range(4) for quad in (0, 4)]
        return [2 * quad + odd for quad in quads for odd in (0, 1)] if self.records.has_pairs else quads

    def _load_splat(self, element: Value, record: Value, offset: int) -> Value:
        return self.emitter.load_splat(element, self.isa.lanes, record, offset)

    def _pin(self, value: Value) -> Value:
        return self.emitter.pin(value, self.isa.register)


def emit_row(
    emitter: Emitter, isa: Isa, layout: QuantLayout, weights: Value, lane: Value, out: Value, groups: Value
) -> None:
    """Exact values of row `lane` of a row block as float32, by the format's own definition."""
    builder = emitter.builder
    factors = Factors(emitter, isa, layout, lane)
    plane_bytes = 4 * isa.lanes
    floats, ints = vector(F32, 4), vector(I32, 4)

    def group(at: list[Value], headers: list[list[Value]], index: Value, carried: list[Value]) -> list[Value]:
        [record], [header] = at, headers
        row = emitter.offset(record, emitter.times(lane, 4), layout.codes_offset(isa.lanes))
        planes = [emitter.load(vector(I8, 4), row, plane * plane_bytes) for plane in range(layout.bits)]
        scales = [emitter.shuffle(scale, [0] * 4) for scale in _half_scales(emitter, factors, header, record)]
        bias = factors.bias(header, record)
        target = emitter.offset(out, emitter.times(index, 4 * GROUP))
        for quad in range(QUADS):
            code = load_quad(emitter, isa, layout, planes.__getitem__, quad)
            centred = builder.sub(builder.zext(code, ints), constant(I32, 4, layout.zero))
            value = builder.fmul(builder.sitofp(centred, floats), scales[quad * len(scales) // QUADS])
            if bias is not None:
                value = builder.fadd(value, emitter.shuffle(bias, [0] * 4))
            emitter.store(value, target, 16 * quad)
        return []

    for_each_group(emitter, isa, layout, factors, [weights], groups, [], group)


def _half_scales(emitter: Emitter, factors: Factors, header: list[Value], record: Value) -> list[Value]:
    """A group's scale, or those of its halves."""
    builder, scale = emitter.builder, factors.scale(header, record)
    halves = factors.halves(record)
    return [builder.fmul(scale, builder.sitofp(half, scale.type)) for half in halves] or [scale]


def emit_quantize(
    emitter: Emitter, layout: ActivationLayout, x: Value, records: Value, groups: Value
) -> None:
    """float32[groups * 32] at x -> activation records (see `layout`); ties round to even.

    An infinite or NaN input makes its group's scale infinite or NaN, and so the products.
    """
    builder = emitter.builder
    ints, floats = vector(I32, GROUP), vector(F32, GROUP)
    largest_code = F32(float(layout.largest_code))

    def group(index: Value, carried: list[Value]) -> list[Value]:
        values = emitter.load(floats, x, emitter.times(index, 4 * GROUP))
        record = emitter.offset(records, emitter.times(index, layout.record_bytes))
        # As integers the bits of magnitudes order like the magnitudes, with NaN above infinity.
        magnitudes = builder.and_(builder.bitcast(values, ints), constant(I32, GROUP, 0x7FFFFFFF))
        maximum = builder.bitcast(
            emitter.reduce(lambda a, b: builder.select(builder.icmp_signed(">", a, b), a, b), magnitudes), F32
        )
        scale = builder.fdiv(maximum, largest_code)
        usable = builder.fcmp_ordered(">", maximum, F32(_SMALLEST_MAXIMUM))
        inverse = builder.select(usable, builder.fdiv(largest_code, maximum), F32(0.0))
        scaled = builder.fmul(values, emitter.splat(inverse, GROUP))
        rounded = builder.bitcast(builder.fadd(scaled, constant(F32, GROUP, ROUND_TO_INTEGER)), ints)
        codes = builder.sub(rounded, constant(I32, GROUP, ROUND_TO_INTEGER_BITS))
        # What becomes of NaN is cut down first: sums have to be those of the codes for all forms to agree.
        unused_bits = constant(I32, GROUP, 32 - layout.code_bits)
        codes = builder.ashr(builder.shl(codes, unused_bits), unused_bits)
        low_sum = emitter.reduce(builder.add, emitter.shuffle(codes, range(GROUP // 2)))
        high_sum = emitter.reduce(builder.add, emitter.shuffle(codes, range(GROUP // 2, GROUP)))
        total = builder.add(low_sum, high_sum)
        _store_codes(emitter, layout, codes, record)
        emitter.store(scale, record, SCALE_OFFSET)
        emitter.store(builder.fmul(scale, builder.sitofp(total, F32)), record, SCALED_SUM_OFFSET)
        emitter.store(builder.neg(total), record, MINUS_SUM_OFFSET)
        emitter.store(builder.neg(low_sum), record, HALF_SUMS_OFFSET)
        if not layout.is_wide:
            minus_high_sum = builder.trunc(builder.neg(high_sum), I16)
            emitter.store(minus_high_sum, record, HALF_SUMS_OFFSET + I16.width // 8)
        return []

    emitter.loop(groups, [], group)


def _store_codes(emitter: Emitter, layout: ActivationLayout, codes: Value, record: Value) -> None:
    builder, bytes_ = emitter.builder, vector(I8, GROUP)
    if layout.has_pairs:
        codes = emitter.shuffle(codes, [quad + i for quad in range(0, GROUP, 4) for i in (0, 2, 1, 3)])
        emitter.store(builder.trunc(codes, vector(I16, GROUP)), record, ACTIVATION_CODES_OFFSET)
        return
    if layout.is_split:
        second = builder.and_(codes, constant(I32, GROUP, (1 << SECOND_CODE_BITS) - 1))
        emitter.store(builder.trunc(second, bytes_), record, ACTIVATION_CODES_OFFSET + GROUP)
        codes = builder.ashr(codes, constant(I32, GROUP, SECOND_CODE_BITS))
    emitter.store(builder.trunc(codes, bytes_), record, ACTIVATION_CODES_OFFSET)


def _emit_quantize(emitter: Emitter, layout_number: Value, *addresses_and_sizes: Value) -> None:
    layouts = list(LAYOUT_NUMBERS)
    emit_for_count(
        emitter,
        layout_number,
        range(len(layouts)),
        lambda number: emit_quantize(emitter, layouts[number], *addresses_and_sizes),
    )


def _emit_dequantize(emitter: Emitter, format_name: str, isa_name: str, *addresses_and_sizes: Value) -> None:
    emit_row(emitter, ISAS[isa_name], QUANTIZED[format_name], *addresses_and_sizes)


dequantize_row = emitted(_emit_dequantize, 4, num_names=2)
"""`emit_row` as (format name, ISA name, weights, lane, out, groups)."""

quantize_groups = emitted(_emit_quantize, 4)
"""`emit_quantize` as (number of the activation layout, x, records, groups)."""
