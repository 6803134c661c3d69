"""Host weights: the concrete `mvllm.core.tensor.Weight`s, views of the file wherever possible."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mvllm.core.load.mlx_format import unpack_stream
from mvllm.core.load.quantized import FactoredGroups, QuantFormat, dequantize, unpack

_ROWS_AT_ONCE = 1024  # bounds the temporaries of a whole-matrix conversion

DENSE_DTYPES: dict[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
}
"""NumPy's storage type of each dense format; bfloat16 has none of its own and is kept as its bits."""


@dataclass(frozen=True, eq=False)
class DenseWeight:
    """A float32, float16 or bfloat16 tensor.

    `row_order` renames rows: row i of the weight is row `row_order[i]` of `stored`.
    """

    name: str
    format_name: str  # "F32", "F16" or "BF16"
    stored: NDArray[Any]  # float32, float16, or uint16 with bfloat16's bits; of the weight's shape
    row_order: NDArray[np.intp] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.shape

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.stored.nbytes

    def stored_rows(self, start: int, stop: int) -> NDArray[Any]:
        """Rows (or vector elements) [start, stop) as stored: a view, or a copy if the rows are reordered."""
        return _rows(self.stored, self.row_order, start, stop)

    def rows(self, start: int, stop: int) -> NDArray[np.float32]:
        """Rows (or vector elements) [start, stop), exactly widened: a fresh array."""
        return _widen(self.stored_rows(start, stop))

    def to_float32(self) -> NDArray[np.float32]:
        """Exact values, as a fresh array of `shape`."""
        return self.rows(0, self.shape[0])


@dataclass(frozen=True, eq=False)
class QuantizedWeight:
    """A matrix of affine groups, packed as in the file.

    `row_order` renames rows: row i of the weight is row `row_order[i]` of `stored`.
    """

    name: str
    format: QuantFormat
    stored: NDArray[np.uint8]  # [N, bytes_per_row]
    row_order: NDArray[np.intp] | None = None

    @property
    def shape(self) -> tuple[int, int]:
        rows, row_bytes = self.stored.shape
        return rows, row_bytes // self.format.block_bytes * self.format.block_size

    @property
    def format_name(self) -> str:
        return self.format.name

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.stored.nbytes

    def stored_rows(self, start: int, stop: int) -> NDArray[np.uint8]:
        """Packed rows [start, stop): a view, or a copy if the rows are reordered."""
        return _rows(self.stored, self.row_order, start, stop)

    def unpack(self, start: int, stop: int) -> FactoredGroups:
        """Affine groups of rows [start, stop)."""
        return unpack(self.format, self.stored_rows(start, stop))

    def rows(self, start: int, stop: int) -> NDArray[np.float32]:
        """Exact values of rows [start, stop): a fresh array."""
        return dequantize(self.unpack(start, stop))

    def to_float32(self) -> NDArray[np.float32]:
        """Exact values, as a fresh array of `shape`."""
        return _all_rows(self)


@dataclass(frozen=True, eq=False)
class AffineWeight:
    """A matrix of affine groups as MLX stores it: codes, scales and biases apart (see `mlx_format`).

    `row_order` renames rows: row i of the weight is row `row_order[i]` of the three arrays.
    """

    name: str
    format: QuantFormat
    stored: NDArray[np.uint32]  # [N, K * bits / 32] codes
    scales: NDArray[Any]  # [N, K / group_size] float32, float16, or uint16 with bfloat16's bits
    biases: NDArray[Any]  # [N, K / group_size] of the same type
    row_order: NDArray[np.intp] | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.scales), self.scales.shape[1] * self.format.group_size

    @property
    def format_name(self) -> str:
        return self.format.name

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.stored.nbytes + self.scales.nbytes + self.biases.nbytes

    def unpack(self, start: int, stop: int) -> FactoredGroups:
        """Affine groups of rows [start, stop)."""
        codes = _rows(self.stored, self.row_order, start, stop)
        return FactoredGroups(
            self.format,
            q=unpack_stream(codes.view(np.uint8), self.format.bits),
            super_scale=_widen(_rows(self.scales, self.row_order, start, stop)),
            sub_scale=None,
            super_bias=_widen(_rows(self.biases, self.row_order, start, stop)),
            sub_bias=None,
        )

    def rows(self, start: int, stop: int) -> NDArray[np.float32]:
        """Exact values of rows [start, stop): a fresh array. Those of `mx.dequantize` with float32 scales."""
        return dequantize(self.unpack(start, stop))

    def to_float32(self) -> NDArray[np.float32]:
        """Exact values, as a fresh array of `shape`."""
        return _all_rows(self)


HostWeight = DenseWeight | QuantizedWeight | AffineWeight


def _widen(values: NDArray[Any]) -> NDArray[np.float32]:
    """Values of a dense type, exactly, as a fresh array; uint16 holds bfloat16's bits."""
    if values.dtype == np.uint16:
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32)


def _all_rows(weight: QuantizedWeight | AffineWeight) -> NDArray[np.float32]:
    values = np.empty(weight.shape, np.float32)
    for start in range(0, weight.shape[0], _ROWS_AT_ONCE):
        stop = min(start + _ROWS_AT_ONCE, weight.shape[0])
        values[start:stop] = weight.rows(start, stop)
    return values


def _rows(stored: NDArray[Any], order: NDArray[np.intp] | None, start: int, stop: int) -> NDArray[Any]:
    return stored[start:stop] if order is None else stored[order[start:stop]]
