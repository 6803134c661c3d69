"""Products with quantized weights, for every format of `layout.QUANTIZED` and every instruction set.

A tile is one row block times a few tokens. Per group of 32 inputs it unpacks the weights' codes once, forms
the exact integer dot products with each token's codes, and carries one float32 accumulator per output:

    sum = fma(float(dot), scale * activation_scale, sum)        one scale per group
    sum = fma(float(low dot) * low scale + float(high dot) * high scale, activation_scale, sum)    two
    sum = fma(bias, activation_scale * sum of codes, sum)       with a bias

Groups ascend. Hence an output's value does not depend on the tile, the batch or the row range it is in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mvllm.backends.cpu.functions import ROUND_TO_INTEGER, ROUND_TO_INTEGER_BITS
from mvllm.backends.cpu.isa import ISAS, Dots, Isa, Operands, half_to_float, prefetch_distance
from mvllm.backends.cpu.layout import (
    ACTIVATION_CODES_OFFSET,
    ACTIVATION_LAYOUTS,
    GROUP,
    MINUS_LOW_SUM_OFFSET,
    MINUS_SUM_OFFSET,
    QUADS,
    QUANTIZED,
    SCALE_OFFSET,
    SCALED_SUM_OFFSET,
    ActivationLayout,
    QuantLayout,
)
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
    emitted,
    vector,
)

_SMALLEST_MAXIMUM = 2.0**-110  # below it code / maximum could overflow; such a group counts as zeros


def load_codes(emitter: Emitter, layout: QuantLayout, planes: list[Value]) -> list[Value]:
    """The eight quads of a group as vectors of uint8 codes, from its code planes (see `layout`)."""
    if layout.bits == 8:
        return planes
    nibbles = QUADS // 2
    codes = [_bits(emitter, plane, 0, 0x0F) for plane in planes[:nibbles]]
    codes += [_bits(emitter, plane, 4, 0x0F) for plane in planes[:nibbles]]
    if layout.high_bits == 0:
        return codes
    quads_per_plane = 8 // layout.high_bits
    mask = ((1 << layout.high_bits) - 1) << 4
    for quad in range(QUADS):
        plane = planes[nibbles + quad // quads_per_plane]
        position = quad % quads_per_plane * layout.high_bits
        codes[quad] = emitter.builder.or_(codes[quad], _bits(emitter, plane, position - 4, mask))
    return codes


def load_words(
    emitter: Emitter, isa: Isa, layout: QuantLayout, records: ActivationLayout, group: Value
) -> list[Value]:
    """The codes of the group record at `group`, as vectors of words for products with such activations."""
    vector_bytes = 4 * isa.lanes
    start = layout.codes_offset(isa.lanes)
    planes = [
        emitter.load(vector(I8, vector_bytes), group, start + plane * vector_bytes)
        for plane in range(layout.planes)
    ]
    quads = load_codes(emitter, layout, planes)
    if not records.is_wide:
        return quads
    builder, words = emitter.builder, []
    for quad in quads:
        pairs = builder.bitcast(quad, vector(I16, vector_bytes // 2))
        even = builder.and_(pairs, constant(I16, vector_bytes // 2, 0xFF))
        odd = builder.lshr(pairs, constant(I16, vector_bytes // 2, 8))
        words += [builder.bitcast(half, quad.type) for half in (even, odd)]
    return words


def _bits(emitter: Emitter, bytes_: Value, right: int, mask: int) -> Value:
    """(bytes >> right) & mask per byte; a negative `right` shifts left."""
    builder, count = emitter.builder, bytes_.type.count
    words = builder.bitcast(bytes_, vector(I32, count // 4))
    if right:
        shift = builder.lshr if right > 0 else builder.shl
        words = shift(words, constant(I32, count // 4, abs(right)))
    return builder.and_(builder.bitcast(words, bytes_.type), constant(I8, count, mask))


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

    def scales(self, header: list[Value], group: Value) -> list[Value]:
        """One scale, or two for the low and the high half of the group."""
        if not self._layout.factored:
            return [self._plain(group, 0)]
        offsets = [index * self._isa.lanes for index in range(self._layout.scales)]
        return [self._emitter.builder.fmul(header[0], self._small(group, offset)) for offset in offsets]

    def bias(self, header: list[Value], group: Value) -> Value | None:
        if not self._layout.has_bias:
            return None
        offset = self._layout.bias_offset(self._isa.lanes)
        if not self._layout.factored:
            return self._plain(group, offset)
        return self._emitter.builder.fmul(header[1], self._small(group, offset))

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
        builder = self._emitter.builder
        small = self._emitter.load(vector(I8, self._count), self._at(record, 1), offset)
        return builder.sitofp(builder.sext(small, vector(I32, self._count)), vector(F32, self._count))

    def _at(self, record: Value, size: int) -> Value:
        if self._lane is None:
            return record
        return self._emitter.offset(record, self._emitter.times(self._lane, size))


def for_each_group(
    emitter: Emitter,
    isa: Isa,
    layout: QuantLayout,
    factors: Factors,
    weights: Value,
    groups: Value,
    carried: list[Value],
    body: Callable[[Value, list[Value], Value, list[Value]], list[Value]],
) -> list[Value]:
    """`carried = body(group record, header, group index, carried)` for every group of a row block."""
    group_bytes = layout.group_bytes(isa.lanes)
    if not layout.factored:

        def plain(index: Value, values: list[Value]) -> list[Value]:
            return body(emitter.offset(weights, emitter.times(index, group_bytes)), [], index, values)

        return emitter.loop(groups, carried, plain)

    def superblock(outer: Value, values: list[Value]) -> list[Value]:
        start = emitter.offset(weights, emitter.times(outer, layout.superblock_bytes(isa.lanes)))
        header = factors.header(start)
        first = emitter.offset(start, layout.header_bytes(isa.lanes))
        before = emitter.times(outer, layout.superblock)

        def group(inner: Value, values: list[Value]) -> list[Value]:
            record = emitter.offset(first, emitter.times(inner, group_bytes))
            return body(record, header, emitter.offset(before, inner), values)

        return emitter.loop(I64(layout.superblock), values, group)

    return emitter.loop(emitter.builder.sdiv(groups, I64(layout.superblock)), carried, superblock)


def emit_tile(
    emitter: Emitter,
    isa: Isa,
    layout: QuantLayout,
    records: ActivationLayout,
    tokens: int,
    weights: Value,
    activations: Value,
    activation_stride: Value,
    out: Value,
    out_stride: Value,
    groups: Value,
) -> None:
    """out[token, lane] of one row block and `tokens` tokens; strides in bytes, `groups` of 32 inputs."""
    factors = Factors(emitter, isa, layout, lane=None)
    rows = [emitter.offset(activations, emitter.times(activation_stride, I64(t))) for t in range(tokens)]
    ahead = prefetch_distance(tokens)

    def group(record: Value, header: list[Value], index: Value, sums: list[Value]) -> list[Value]:
        emitter.prefetch(record, ahead, layout.group_bytes(isa.lanes))
        codes = load_words(emitter, isa, layout, records, record)
        scales, bias = factors.scales(header, record), factors.bias(header, record)
        weights = GroupWeights(1, lambda block, word: codes[word], lambda block: scales, lambda block: bias)
        position = emitter.times(index, records.record_bytes)
        product = GroupProduct(emitter, isa, layout, records, weights, pinned=False)
        results = []
        for row, sum_ in zip(rows, sums, strict=True):
            [[result]] = product.add_to([[sum_]], [emitter.offset(row, position)])
            results.append(emitter.pin(result, isa.register if tokens > 1 else None))
        return results

    zeros = [constant(F32, isa.lanes, 0.0)] * tokens
    sums = for_each_group(emitter, isa, layout, factors, weights, groups, zeros, group)
    for token, sum_ in enumerate(sums):
        emitter.store(sum_, emitter.offset(out, emitter.times(out_stride, I64(token))))


@dataclass(frozen=True)
class GroupWeights:
    """One group of inputs of some row blocks, unpacked.

    `load(block, word)` are codes as `Isa.dot` takes them. A row block has one scale, or one for the low and
    one for the high half of the group, and a bias or None.
    """

    blocks: int
    load: Callable[[int, int], Value]
    scales: Callable[[int], list[Value]]
    bias: Callable[[int], Value | None]


@dataclass(frozen=True)
class GroupProduct:
    """Adds the products of one group of weights with some tokens to running sums (formula above)."""

    emitter: Emitter
    isa: Isa
    layout: QuantLayout
    records: ActivationLayout
    weights: GroupWeights
    pinned: bool  # keep the order in which products are written

    def add_to(self, sums: list[list[Value]], tokens: list[Value]) -> list[list[Value]]:
        """`sums[token][block]` with the group added; `tokens` are the addresses of its activation records."""
        dots = self._dots(tokens)
        results = []
        for token, (row, record) in enumerate(zip(sums, tokens, strict=True)):
            scale = self._load_splat(F32, record, SCALE_OFFSET)
            results.append(
                [
                    self._accumulate([dot[token][block] for dot in dots], block, scale, record, sum_)
                    for block, sum_ in enumerate(row)
                ]
            )
        return results

    def _accumulate(self, dots: list[Value], block: int, scale: Value, record: Value, sum_: Value) -> Value:
        emitter, builder = self.emitter, self.emitter.builder
        scales, bias = self.weights.scales(block), self.weights.bias(block)
        exact = [builder.sitofp(dot, vector(F32, self.isa.lanes)) for dot in dots]
        if len(exact) == 1:
            sum_ = emitter.fma(exact[0], builder.fmul(scales[0], scale), sum_)
        else:
            both = emitter.fma(exact[1], scales[1], builder.fmul(exact[0], scales[0]))
            sum_ = emitter.fma(both, scale, sum_)
        if bias is not None:
            sum_ = emitter.fma(bias, self._load_splat(F32, record, SCALED_SUM_OFFSET), sum_)
        return self._pin(sum_)

    def _dots(self, tokens: list[Value]) -> list[Dots]:
        """The exact dot products: one for the group, or one for each half if each half has a scale."""
        words = self.records.words
        if self.layout.scales == 1:
            return [self._dot(0, words, tokens)]
        return [self._dot(0, words // 2, tokens), self._dot(words // 2, words, tokens)]

    def _dot(self, first: int, last: int, tokens: list[Value]) -> Dots:
        position = ACTIVATION_CODES_OFFSET + 4 * first
        operands = Operands(
            lambda block, word: self.weights.load(block, first + word),
            blocks=self.weights.blocks,
            words=last - first,
            activations=[self.emitter.offset(record, position) for record in tokens],
            minus_sum=lambda token: self._minus_sum(tokens[token], first, last),
            bits=self.layout.bits,
            zero=self.layout.zero,
            is_wide=self.records.is_wide,
            pin=self._pin,
        )
        return self.isa.dot(self.emitter, operands)

    def _minus_sum(self, record: Value, first: int, last: int) -> Value:
        """Minus the sum of the activation codes in words [first, last): the whole group or a half."""
        if last < self.records.words:
            return self._load_splat(I32, record, MINUS_LOW_SUM_OFFSET)
        total = self._load_splat(I32, record, MINUS_SUM_OFFSET)
        if first == 0:
            return total
        return self.emitter.builder.sub(total, self._load_splat(I32, record, MINUS_LOW_SUM_OFFSET))

    def _load_splat(self, element: Value, record: Value, offset: int) -> Value:
        return self.emitter.load_splat(element, self.isa.lanes, record, offset)

    def _pin(self, value: Value) -> Value:
        return self.emitter.pin(value, self.isa.register) if self.pinned else value


def emit_row(
    emitter: Emitter, isa: Isa, layout: QuantLayout, weights: Value, lane: Value, out: Value, groups: Value
) -> None:
    """Exact values of row `lane` of a row block as float32, by the format's own definition."""
    builder = emitter.builder
    factors = Factors(emitter, isa, layout, lane)
    plane_bytes = 4 * isa.lanes
    floats, ints = vector(F32, 4), vector(I32, 4)

    def group(record: Value, header: list[Value], index: Value, carried: list[Value]) -> list[Value]:
        row = emitter.offset(record, emitter.times(lane, 4), layout.codes_offset(isa.lanes))
        planes = [emitter.load(vector(I8, 4), row, plane * plane_bytes) for plane in range(layout.planes)]
        scales = [emitter.shuffle(scale, [0] * 4) for scale in factors.scales(header, record)]
        bias = factors.bias(header, record)
        target = emitter.offset(out, emitter.times(index, 4 * GROUP))
        for quad, code in enumerate(load_codes(emitter, layout, planes)):
            centred = builder.sub(builder.zext(code, ints), constant(I32, 4, layout.zero))
            value = builder.fmul(builder.sitofp(centred, floats), scales[quad * len(scales) // QUADS])
            if bias is not None:
                value = builder.fadd(value, emitter.shuffle(bias, [0] * 4))
            emitter.store(value, target, 16 * quad)
        return []

    for_each_group(emitter, isa, layout, factors, weights, groups, [], group)


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
        low_sum = emitter.reduce(builder.add, emitter.shuffle(codes, range(GROUP // 2)))
        high_sum = emitter.reduce(builder.add, emitter.shuffle(codes, range(GROUP // 2, GROUP)))
        total = builder.add(low_sum, high_sum)
        if layout.is_wide:
            codes = emitter.shuffle(codes, [quad + i for quad in range(0, GROUP, 4) for i in (0, 2, 1, 3)])
        code_type = vector(I16 if layout.is_wide else I8, GROUP)
        emitter.store(builder.trunc(codes, code_type), record, ACTIVATION_CODES_OFFSET)
        emitter.store(scale, record, SCALE_OFFSET)
        emitter.store(builder.fmul(scale, builder.sitofp(total, F32)), record, SCALED_SUM_OFFSET)
        emitter.store(builder.neg(total), record, MINUS_SUM_OFFSET)
        emitter.store(builder.neg(low_sum), record, MINUS_LOW_SUM_OFFSET)
        return []

    emitter.loop(groups, [], group)


def _emit_quantize(emitter: Emitter, activation_name: str, *addresses_and_sizes: Value) -> None:
    emit_quantize(emitter, ACTIVATION_LAYOUTS[activation_name], *addresses_and_sizes)


def _emit_dequantize(emitter: Emitter, format_name: str, isa_name: str, *addresses_and_sizes: Value) -> None:
    emit_row(emitter, ISAS[isa_name], QUANTIZED[format_name], *addresses_and_sizes)


dequantize_row = emitted(_emit_dequantize, 4, num_names=2)
"""`emit_row` as (format name, ISA name, weights, lane, out, groups)."""

quantize_groups = emitted(_emit_quantize, 3, num_names=1)
"""`emit_quantize` as (activation layout's name, x, records, groups)."""
