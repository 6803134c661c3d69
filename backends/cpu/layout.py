"""How weights and quantized activations lie in memory for the kernels.

A packed matrix is a sequence of row blocks of `lanes` rows each (the last one padded with zero rows). Lane r
of every vector belongs to row r of the block, so products need no horizontal sums and their order is fixed.

Quantized row block, for each superblock of 32 * `superblock` inputs:

    super scales   float16[lanes]                    only if superblock > 1
    super biases   float16[lanes]                    only if superblock > 1 and with a bias
    then per group of 32 inputs:
    scales         factors[lanes], or int8[scales][lanes] if superblock > 1
    biases         factors[lanes], or int8[lanes] if superblock > 1; only with a bias
    codes          see below

Factors are float16, or of another dense type for scales and biases that float16 can't hold (`AFFINE...`).
Groups of 64 or 128 inputs are packed as groups of 32 with the same factors, codes of 2 and 3 bits in 4 bits.

Codes come as eight quads: quad j of row r holds the codes of its inputs 4j to 4j+3 in four bytes. `bits`
planes of lanes * 4 bytes keep them: each plane has one quad in its low bits, and in the bits above some of
the quads that have no plane of their own (`CODE_PARTS`).

Dense row block: [inputs][lanes] values in the file's own type.

Activations for a quantized matrix, per group of 32 inputs a record (`ActivationLayout`):

    scale          float32; scale * code approximates the value
    scaled sum     float32, scale * sum of the codes
    minus sum      int32, minus the sum of the codes
    half sums      int16[2], minus the sums of the first and the last 16 codes; but for "narrow" int32, of the
                   first
    codes          "narrow": int8[32]
                   "wide": int16[32], of every four inputs first those of even number (0 2 1 3)
                   "split": int8[2][32], with code = 128 * first + second
"""

from __future__ import annotations

from dataclasses import dataclass

from mvllm.core.load.mlx_format import MLX_FORMATS
from mvllm.core.load.weights import DENSE_DTYPES

GROUP = 32
"""Inputs per activation scale, and per step of a quantized kernel."""

QUADS = GROUP // 4

SCALE_OFFSET, SCALED_SUM_OFFSET, MINUS_SUM_OFFSET, HALF_SUMS_OFFSET = range(0, 16, 4)
ACTIVATION_CODES_OFFSET = 16


@dataclass(frozen=True)
class CodePart:
    """`width` bits of a quad's codes, from bit `code_bit` on, that a plane has from bit `plane_bit` on."""

    plane: int
    plane_bit: int
    code_bit: int
    width: int


def _own_planes(bits: int) -> tuple[tuple[CodePart, ...], ...]:
    """The first `bits` quads, each in the low bits of a plane."""
    return tuple((CodePart(quad, plane_bit=0, code_bit=0, width=bits),) for quad in range(bits))


CODE_PARTS: dict[int, tuple[tuple[CodePart, ...], ...]] = {
    8: _own_planes(8),
    6: (
        *_own_planes(6),
        (CodePart(0, 6, 0, 2), CodePart(1, 6, 2, 2), CodePart(2, 6, 4, 2)),
        (CodePart(3, 6, 0, 2), CodePart(4, 6, 2, 2), CodePart(5, 6, 4, 2)),
    ),
    5: (
        *_own_planes(5),
        (CodePart(0, 5, 0, 3), CodePart(1, 5, 3, 2)),
        (CodePart(2, 5, 0, 3), CodePart(3, 5, 3, 2)),
        (CodePart(4, 5, 0, 3), CodePart(1, 7, 3, 1), CodePart(3, 7, 4, 1)),
    ),
    4: (*_own_planes(4), *((CodePart(plane, 4, 0, 4),) for plane in range(4))),
}
"""Where each of the eight quads is, by the number of bits. Most quads take a single mask to unpack."""


@dataclass(frozen=True)
class ActivationLayout:
    """How finely activations are rounded for a quantized product. The scale is the largest magnitude of a
    group over `largest_code`."""

    name: str
    largest_code: int
    is_split: bool = False  # a code is kept as two of 8 bits

    @property
    def code_bits(self) -> int:
        """Of a code and its sign."""
        return self.largest_code.bit_length() + 1

    @property
    def is_wide(self) -> bool:
        """Codes have more than 8 bits."""
        return self.code_bits > 8

    @property
    def has_pairs(self) -> bool:
        """Products take weights and activations in pairs of 16 bits, else in fours of 8 bits."""
        return self.is_wide and not self.is_split

    @property
    def record_bytes(self) -> int:
        return ACTIVATION_CODES_OFFSET + GROUP * (2 if self.is_wide else 1)

    @property
    def words(self) -> int:
        """32-bit words of a group's weights as products take them."""
        return GROUP * (2 if self.has_pairs else 1) // 4

    def row_bytes(self, inputs: int) -> int:
        """Bytes of one token's records."""
        return inputs // GROUP * self.record_bytes


SECOND_CODE_BITS = 7
"""So many that the second byte of a code that is split, never negative, is a signed byte too."""

NARROW = ActivationLayout("narrow", 127)
WIDE = ActivationLayout("wide", 127 << SECOND_CODE_BITS)
"""About twice the work, a hundredth of the rounding error. The exact dot products fit in 32 bits."""
SPLIT = ActivationLayout("split", WIDE.largest_code, is_split=True)
"""The same codes for instruction sets that multiply bytes with less work."""

ACTIVATION_LAYOUTS = {layout.name: layout for layout in (NARROW, WIDE, SPLIT)}
LAYOUT_NUMBERS = {layout: number for number, layout in enumerate(ACTIVATION_LAYOUTS.values())}


@dataclass(frozen=True)
class QuantLayout:
    """The packed form of one quantized format. Offsets are in bytes from a group's start."""

    format_name: str
    bits: int
    zero: int  # the code of 0 before the bias; 0 or a power of two
    has_bias: bool
    superblock: int = 1  # groups of 32 inputs under one super scale; 1: scales are not factored
    scales: int = 1  # per group of 32 inputs; two are the factors of int8 of its halves
    factor_type: str = "F16"  # of scales and biases that are not factored, one of `DENSE`

    @property
    def factored(self) -> bool:
        return self.superblock > 1

    @property
    def factor_bytes(self) -> int:
        """Of a scale or a bias in a group."""
        return 1 if self.factored else DENSE_DTYPES[self.factor_type].itemsize

    def bias_offset(self, lanes: int) -> int:
        return self.scales * lanes * self.factor_bytes

    def codes_offset(self, lanes: int) -> int:
        bias_bytes = self.factor_bytes * lanes if self.has_bias else 0
        return self.bias_offset(lanes) + bias_bytes

    def group_bytes(self, lanes: int) -> int:
        return self.codes_offset(lanes) + self.bits * 4 * lanes

    def header_bytes(self, lanes: int) -> int:
        """Super scales and super biases of a superblock."""
        return (2 + 2 * self.has_bias) * lanes if self.factored else 0

    def superblock_bytes(self, lanes: int) -> int:
        return self.header_bytes(lanes) + self.superblock * self.group_bytes(lanes)


@dataclass(frozen=True)
class DenseLayout:
    """The packed form of a dense type."""

    format_name: str
    value_bytes: int


def _affine(bits: int, factor_type: str) -> QuantLayout:
    return QuantLayout(f"AFFINE{bits}_{factor_type}", bits, zero=0, has_bias=True, factor_type=factor_type)


QUANTIZED = {
    layout.format_name: layout
    for layout in (
        QuantLayout("Q4_0", bits=4, zero=8, has_bias=False),
        QuantLayout("Q4_1", bits=4, zero=0, has_bias=True),
        QuantLayout("Q5_0", bits=5, zero=16, has_bias=False),
        QuantLayout("Q5_1", bits=5, zero=0, has_bias=True),
        QuantLayout("Q8_0", bits=8, zero=128, has_bias=False),
        QuantLayout("Q4_K", bits=4, zero=0, has_bias=True, superblock=8),
        QuantLayout("Q5_K", bits=5, zero=0, has_bias=True, superblock=8),
        QuantLayout("Q6_K", bits=6, zero=32, has_bias=False, superblock=8, scales=2),
        *(_affine(bits, factor_type) for bits in (4, 5, 6, 8) for factor_type in ("F32", "F16", "BF16")),
    )
}
DENSE = {
    layout.format_name: layout
    for layout in (DenseLayout("F32", 4), DenseLayout("F16", 2), DenseLayout("BF16", 2))
}


def packed_format(format_name: str) -> str | None:
    """The entry of `QUANTIZED` or `DENSE` as which weights of a file's format are packed; None: unknown."""
    if format_name in MLX_FORMATS:
        factor_type = format_name.rpartition("_")[-1]
        return f"AFFINE{max(4, MLX_FORMATS[format_name].bits)}_{factor_type}"
    return format_name if format_name in QUANTIZED or format_name in DENSE else None
