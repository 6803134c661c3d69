"""MLX's quantized matrices: codes, scales and biases as three tensors, ``w = scale * code + bias`` per group.

Codes of 2 to 8 bits follow each other from the lowest bit of a row's first byte on, across the borders of
bytes and words; a file stores them as little-endian uint32, so eight codes are always `bits` whole bytes.
Layout as documented for `mlx.core.quantize` (ml-explore.github.io/mlx); MLX itself is not needed here.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mvllm.core.load.quantized import QuantFormat

MLX_BITS = (2, 3, 4, 5, 6, 8)
MLX_GROUP_SIZES = (32, 64, 128)
MLX_SCALE_TYPES = ("F32", "F16", "BF16")

_CODES_PER_RUN = 8


def mlx_format_name(bits: int, group_size: int, scale_type: str) -> str:
    """The name of a format as `mvllm inspect` shows it, "MLX4_G64_F16" say."""
    return f"MLX{bits}_G{group_size}_{scale_type}"


MLX_FORMATS: dict[str, QuantFormat] = {
    name: QuantFormat(
        name,
        bits=bits,
        group_size=group_size,
        block_size=group_size,
        block_bytes=group_size * bits // 8,  # of codes; scales and biases lie apart
        zero=0,
    )
    for bits in MLX_BITS
    for group_size in MLX_GROUP_SIZES
    for scale_type in MLX_SCALE_TYPES
    for name in [mlx_format_name(bits, group_size, scale_type)]
}


def unpack_stream(packed: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """uint8[N, K * bits / 8] -> codes uint8[N, K], K a multiple of 8; a fresh array."""
    runs = packed.reshape(len(packed), -1, bits)  # [N, K / 8, bits]
    codes = np.empty((*runs.shape[:2], _CODES_PER_RUN), np.uint8)
    for index in range(_CODES_PER_RUN):
        byte, shift = divmod(index * bits, 8)
        code = runs[..., byte] >> shift
        if shift + bits > 8:
            code |= runs[..., byte + 1] << (8 - shift)
        codes[..., index] = code & ((1 << bits) - 1)
    return codes.reshape(len(packed), -1)
