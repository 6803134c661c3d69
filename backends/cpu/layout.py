"""How weights and quantized activations lie in memory for the kernels.

A packed matrix is a sequence of row blocks of `lanes` rows each (the last one padded with zero rows). Lane r
of every vector belongs to row r of the block, so products need no horizontal sums and their order is fixed.

Quantized row block, for each superblock of 32 * `superblock` inputs:

    super scales   float16[lanes]                    only if superblock > 1
    super biases   float16[lanes]                    only if superblock > 1 and with a bias
    then per group of 32 inputs:
    scales         factors[lanes], or int8[32 / group_size][lanes] if superblock > 1
    biases         factors[lanes], or int8[lanes] if superblock > 1; only with a bias
    codes          see below

Factors are float16, or of another dense type for scales and biases that float16 can't hold (`AFFINE...`).
Groups of 64 or 128 inputs are packed as groups of 32 with the same factors, codes of 2 and 3 bits in 4 bits.

Codes come as eight quads: quad j of row r holds the codes of its inputs 4j to 4j+3 in four bytes.

    8 bits   8 vectors: quad j                                            (a vector: lanes * 4 bytes)
    4 to 6   4 vectors: quad j in the low nibbles, quad j + 4 in the high ones; the codes' low 4 bits
    5 bits   1 vector more: bit 4 of quad j at bit j of each byte
    6 bits   2 vectors more: bits 4 and 5 of quad 4 * i + j of vector i at bits 2j and 2j + 1 of each byte

Dense row block: [inputs][lanes] values in the file's own type.

Activations for a quantized matrix, per group of 32 inputs a record (`ActivationLayout`):

    scale          float32; scale * code approximates the value
    scaled sum     float32, scale * sum of the codes
    minus sum      int32, minus the sum of the codes
    minus low sum  int32, minus the sum of the first 16 codes
    codes          int8[32]; wide: int16[32], of every four inputs first those of even number (0 2 1 3)
"""

from __future__ import annotations

from dataclasses import dataclass

from mvllm.core.load.mlx_format import MLX_FORMATS
from mvllm.core.load.weights import DENSE_DTYPES

GROUP = 32
"""Inputs per activation scale, and per step of a quantized kernel."""

QUADS = GROUP // 4

SCALE_OFFSET, SCALED_SUM_OFFSET, MINUS_SUM_OFFSET, MINUS_LOW_SUM_OFFSET = range(0, 16, 4)
ACTIVATION_CODES_OFFSET = 16


@dataclass(frozen=True)
class ActivationLayout:
    """How finely activations are rounded for a quantized product. The scale is the largest magnitude of a
    group over `largest_code`."""

    name: str
    largest_code: int

    @property
    def is_wide(self) -> bool:
        """Codes have 16 bits."""
        return self.largest_code > 127

    @property
    def record_bytes(self) -> int:
        return ACTIVATION_CODES_OFFSET + GROUP * (2 if self.is_wide else 1)

    @property
    def words(self) -> int:
        """32-bit words of codes."""
        return GROUP * (2 if self.is_wide else 1) // 4

    def row_bytes(self, inputs: int) -> int:
        """Bytes of one token's records."""
        return inputs // GROUP * self.record_bytes


NARROW = ActivationLayout("narrow", 127)
WIDE = ActivationLayout("wide", 127 << 7)
"""About twice the work, a hundredth of the rounding error. The exact dot products fit in 32 bits."""

ACTIVATION_LAYOUTS = {layout.name: layout for layout in (NARROW, WIDE)}


@dataclass(frozen=True)
class QuantLayout:
    """The packed form of one quantized format. Offsets are in bytes from a group's start."""

    format_name: str
    bits: int
    zero: int  # the code of 0 before the bias; 0 or a power of two
    has_bias: bool
    superblock: int = 1  # groups of 32 inputs under one super scale; 1: scales are not factored
    scales: int = 1  # scales per group of 32 inputs
    factor_type: str = "F16"  # of scales and biases that are not factored, one of `DENSE`

    @property
    def factored(self) -> bool:
        return self.superblock > 1

    @property
    def high_bits(self) -> int:
        """Bits of a code beyond the nibble planes."""
        return self.bits - 4 if self.bits < 8 else 0

    @property
    def planes(self) -> int:
        """Vectors of codes per group."""
        return QUADS if self.bits == 8 else QUADS // 2 + self.high_bits

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
        return self.codes_offset(lanes) + self.planes * 4 * lanes

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
