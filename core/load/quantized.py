"""Host form of weights: dense arrays and affine groups, as they lie in the file.

Every quantized format here has one meaning, ``w = scale * (q - zero) + bias`` with `scale` and `bias` per
group of consecutive inputs. K-quants factor both: ``scale = super_scale * sub_scale`` and
``bias = super_bias * sub_bias``. The factors stay apart in memory (written out as float32 per group they
would enlarge Q4_K by a third) and are multiplied where they are used.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class QuantFormat:
    """Static facts of one block format; all sizes in weights or bytes along one row."""

    name: str  # GGUF's name: "Q4_0", "Q6_K", ...
    bits: int
    group_size: int  # weights that share a scale
    block_size: int  # weights per file block (a superblock holds several groups)
    block_bytes: int
    zero: int  # stored q of the value 0 (before `bias`); q is unsigned in [0, 2**bits)


@dataclass(frozen=True)
class FactoredGroups:
    """Unpacked affine groups of some rows: N rows, K inputs, G groups, S superblocks per row.

    ``w[n, k] = scale * (q - zero) + bias`` with, for g = k // group_size and s = k // block_size,
    ``scale = super_scale[n, s] * sub_scale[n, g]`` and ``bias = super_bias[n, s] * sub_bias[n, g]``.
    Missing factors: sub_scale and sub_bias None means 1; super_bias None means no bias at all.
    """

    format: QuantFormat
    q: NDArray[np.uint8]  # [N, K]
    super_scale: NDArray[np.float32]  # [N, S] the file's own values, widened; NaN-free after validation
    sub_scale: NDArray[np.int8] | None  # [N, G]
    super_bias: NDArray[np.float32] | None  # [N, S] sign included
    sub_bias: NDArray[np.int8] | None  # [N, G]
