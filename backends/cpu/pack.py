"""Packing host weights into the kernels' layout (see `layout`), some rows at a time."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mvllm.backends.cpu import linear
from mvllm.backends.cpu.isa import Isa, selected
from mvllm.backends.cpu.layout import (
    DENSE,
    GROUP,
    NARROW,
    QUANTIZED,
    ActivationLayout,
    DenseLayout,
    QuantLayout,
)
from mvllm.backends.cpu.pack_kernels import code_packer
from mvllm.core.load.mapped import release_pages
from mvllm.core.load.quantized import FactoredGroups
from mvllm.core.load.weights import DENSE_DTYPES, DenseWeight, QuantizedWeight
from mvllm.core.tensor import Weight
from mvllm.core.types import ceil_div

_CHUNK_WEIGHTS = 1 << 19  # weights packed at once: bounds the temporaries and keeps them in cache
_SEGMENT_BYTES = 64 << 20
_HUGE_PAGE = 2 << 20
_ALIGNMENT = 64


class Arena:
    """Memory for the packed matrices of one model, in large anonymous mappings with huge pages where the
    system offers them.

    Owns its mappings; does not own what is stored in them. Arrays handed out keep their mapping alive.
    """

    def __init__(self) -> None:
        self._segment: NDArray[np.uint8] = np.empty(0, np.uint8)
        self._used = 0
        self.allocated_bytes = 0

    def allocate(self, num_bytes: int) -> NDArray[np.uint8]:
        """Zeroed bytes at an address that is a multiple of 64. Mutates the arena.

        Raises:
            MemoryError, OSError: the system has no such mapping left.
        """
        if self._used + num_bytes > self._segment.nbytes:
            self._segment = _map_anonymous(max(num_bytes, _SEGMENT_BYTES))
            self._used = 0
        start = self._used
        self._used = ceil_div(start + num_bytes, _ALIGNMENT) * _ALIGNMENT
        self.allocated_bytes += num_bytes
        return self._segment[start : start + num_bytes]


def _map_anonymous(num_bytes: int) -> NDArray[np.uint8]:
    """Fresh zeroed memory that starts at a huge page; pages are taken from the system when first written."""
    # A shared mapping, Python's default, gets no huge pages under Linux's usual settings.
    private = {"flags": mmap.MAP_PRIVATE} if hasattr(mmap, "MAP_PRIVATE") else {}
    mapping = mmap.mmap(-1, num_bytes + _HUGE_PAGE, **private)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(mapping, np.uint8)
    start = -whole.ctypes.data % _HUGE_PAGE
    return whole[start : start + num_bytes]


@dataclass(frozen=True, eq=False)
class PackedMatrix:
    """One or several weights as one matrix in the kernels' layout."""

    names: tuple[str, ...]
    format_name: str
    isa: Isa
    rows: int  # outputs, without padding
    inputs: int
    num_blocks: int
    data: NDArray[np.uint8]  # [num_blocks, bytes of a row block]
    _descriptors: list[NDArray[np.int64]] = field(default_factory=list)  # handed out by address

    def product_descriptor(
        self, activations: ActivationLayout = NARROW, panels_from: int = linear.DEFAULT_PANELS_FROM
    ) -> int:
        """Address of a descriptor for `linear.matmul`; compiles the format's kernel for these activations.

        Products of `panels_from` and more tokens are computed by panels. A dense matrix takes float32 rows,
        whatever `activations` says.
        """
        function = linear.matmul_address(self.format_name, self.isa, activations)
        return self._descriptor(function, panels_from)

    def embedding_descriptor(self) -> int:
        """Address of a descriptor for `linear.embed_row`; compiles the format's kernel."""
        return self._descriptor(linear.embed_address(self.format_name, self.isa))

    def _descriptor(self, function: int, panels_from: int = 0) -> int:
        fields = np.zeros(linear.DESCRIPTOR_FIELDS, np.int64)
        fields[linear.FUNCTION] = function
        fields[linear.WEIGHTS] = self.data.ctypes.data
        fields[linear.BLOCK_STRIDE] = self.data.shape[1]
        fields[linear.INPUTS] = self.inputs
        fields[linear.PANELS_FROM] = panels_from
        self._descriptors.append(fields)
        return int(fields.ctypes.data)

    @property
    def nbytes(self) -> int:
        """Bytes of packed weights."""
        return self.data.nbytes

    @property
    def is_quantized(self) -> bool:
        """Activations are records of `linear.quantize_row`, not float32 rows."""
        return self.format_name in QUANTIZED

    @property
    def padded_rows(self) -> int:
        """float32 values that one token's outputs take."""
        return self.num_blocks * self.isa.lanes

    def describe(self) -> str:
        names = " + ".join(self.names)
        bits = 8 * self.nbytes / (self.rows * self.inputs)
        return f"{names}: [{self.rows}, {self.inputs}] {self.format_name}, {bits:.2f} bits per weight"


def pack_matrix(
    weights: Sequence[Weight],
    arena: Arena,
    *,
    isa: Isa | None = None,
    alternate: bool = False,
) -> PackedMatrix:
    """Pack matrices of the same format and number of inputs as one.

    Rows are concatenated. With `alternate` the row blocks of the weights take turns instead (they have
    equally many rows then, each padded to whole blocks). Mutates the arena.
    """
    isa = isa or selected()
    first = weights[0]
    format_name = first.format_name
    inputs = first.shape[1]
    assert all(w.format_name == format_name and w.shape[1] == inputs for w in weights), "unlike weights"
    streams = [[weight] for weight in weights] if alternate else [list(weights)]
    blocks_each = [ceil_div(sum(w.shape[0] for w in stream), isa.lanes) for stream in streams]
    assert len(set(blocks_each)) == 1, "alternating weights need equally many rows"
    num_blocks = sum(blocks_each)
    data = arena.allocate(num_blocks * block_bytes(format_name, inputs, isa)).reshape(num_blocks, -1)
    for index, stream in enumerate(streams):
        _pack_stream(stream, data[index :: len(streams)], isa)
    rows = sum(weight.shape[0] for weight in weights)
    return PackedMatrix(
        names=tuple(weight.name for weight in weights),
        format_name=format_name,
        isa=isa,
        rows=rows,
        inputs=inputs,
        num_blocks=num_blocks,
        data=data,
    )


def block_bytes(format_name: str, inputs: int, isa: Isa) -> int:
    """Bytes of one row block."""
    if format_name in DENSE:
        return inputs * isa.lanes * DENSE[format_name].value_bytes
    layout = QUANTIZED[format_name]
    return inputs // (GROUP * layout.superblock) * layout.superblock_bytes(isa.lanes)


def _pack_stream(weights: list[Weight], blocks: NDArray[np.uint8], isa: Isa) -> None:
    """Write the concatenated rows of `weights` into consecutive row blocks."""
    format_name, inputs = weights[0].format_name, weights[0].shape[1]
    rows_at_once = max(1, _CHUNK_WEIGHTS // (inputs * isa.lanes)) * isa.lanes
    rows = sum(weight.shape[0] for weight in weights)
    for start in range(0, rows, rows_at_once):
        stop = min(start + rows_at_once, rows)
        pieces = _pieces(weights, start, stop)
        target = blocks[start // isa.lanes : ceil_div(stop, isa.lanes)]
        if format_name in DENSE:
            _pack_dense([_dense_rows(*piece) for piece in pieces], target, isa, DENSE[format_name])
        else:
            _pack_quantized([_groups(*piece) for piece in pieces], target, isa, QUANTIZED[format_name])
        for piece in pieces:
            _release(*piece)


def _pieces(weights: list[Weight], start: int, stop: int) -> list[tuple[Weight, int, int]]:
    """The parts (weight, first row, last row) of concatenated rows [start, stop)."""
    pieces = []
    for weight in weights:
        rows = weight.shape[0]
        if start < rows and stop > 0:
            pieces.append((weight, max(start, 0), min(stop, rows)))
        start, stop = start - rows, stop - rows
    return pieces


def _dense_rows(weight: Weight, start: int, stop: int) -> NDArray[Any]:
    """Rows in the type they are stored in (bfloat16 as uint16)."""
    assert isinstance(weight, DenseWeight), weight
    return weight.stored_rows(start, stop)


def _groups(weight: Weight, start: int, stop: int) -> FactoredGroups:
    assert isinstance(weight, QuantizedWeight), weight
    return weight.unpack(start, stop)


def _release(weight: Weight, start: int, stop: int) -> None:
    """Let the file's pages of packed rows go. Reordered rows stay within a head, so few pages are missed."""
    assert isinstance(weight, DenseWeight | QuantizedWeight), weight
    release_pages(weight.stored[start:stop])


def _pack_dense(pieces: list[NDArray[Any]], target: NDArray[np.uint8], isa: Isa, layout: DenseLayout) -> None:
    rows = _padded(pieces, isa)
    values = target.view(DENSE_DTYPES[layout.format_name]).reshape(len(target), -1, isa.lanes)
    values[:] = rows.reshape(len(target), isa.lanes, -1).transpose(0, 2, 1)


def _pack_quantized(
    pieces: list[FactoredGroups], target: NDArray[np.uint8], isa: Isa, layout: QuantLayout
) -> None:
    lanes, num_blocks = isa.lanes, len(target)
    superblocks = target.reshape(num_blocks, -1, layout.superblock_bytes(lanes))
    header, body = np.split(superblocks, [layout.header_bytes(lanes)], axis=2)
    # [blocks, superblocks, groups, bytes]; splitting the last axis keeps it a view of the target
    groups = body.reshape(num_blocks, -1, layout.superblock, layout.group_bytes(lanes))
    scale_at, bias_at = 0, layout.bias_offset(lanes)

    codes = _padded([piece.q for piece in pieces], isa)
    code_packer(layout.format_name, lanes)(
        codes.ctypes.data,
        codes.shape[1],
        target.ctypes.data + layout.header_bytes(lanes) + layout.codes_offset(lanes),
        target.strides[0],
        superblocks.shape[1],
        num_blocks,
    )
    super_area = header if layout.factored else groups[:, :, 0]
    _store_half(super_area, scale_at, _padded([piece.super_scale for piece in pieces], isa), lanes)
    if layout.has_bias:
        super_bias_at = 2 * lanes
        _store_half(super_area, super_bias_at, _padded([_some(p.super_bias) for p in pieces], isa), lanes)
    if layout.factored:
        _store_small(groups, scale_at, _padded([_some(p.sub_scale) for p in pieces], isa), lanes)
        if layout.has_bias:
            _store_small(groups, bias_at, _padded([_some(p.sub_bias) for p in pieces], isa), lanes)


def _padded(pieces: list[NDArray[Any]], isa: Isa) -> NDArray[Any]:
    """Concatenated rows, with zero rows up to whole row blocks."""
    rows = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
    missing = -len(rows) % isa.lanes
    return np.pad(rows, ((0, missing), (0, 0))) if missing else np.ascontiguousarray(rows)


def _by_lane(rows: NDArray[Any], groups: NDArray[np.uint8], lanes: int) -> NDArray[Any]:
    """[rows, n] -> [blocks, lanes, superblocks, groups, n per group]."""
    num_blocks, superblocks, superblock = groups.shape[:3]
    return rows.reshape(num_blocks, lanes, superblocks, superblock, -1)


def _store_half(area: NDArray[np.uint8], offset: int, factors: NDArray[np.float32], lanes: int) -> None:
    """float32 [rows, superblocks] -> float16 at `offset` of area [blocks, superblocks, bytes]; exact, since
    the factors were float16 in the file."""
    stored = area[..., offset : offset + 2 * lanes].view("<f2")
    stored[:] = factors.reshape(area.shape[0], lanes, area.shape[1]).transpose(0, 2, 1)


def _store_small(groups: NDArray[np.uint8], offset: int, factors: NDArray[np.int8], lanes: int) -> None:
    """int8 [rows, factors] -> int8 at `offset` of each group, one vector of lanes per factor of the group."""
    by_lane = _by_lane(factors, groups, lanes)
    per_group = by_lane.shape[-1]
    stored = groups[..., offset : offset + per_group * lanes].view(np.int8)
    stored.reshape(*groups.shape[:3], per_group, lanes)[:] = by_lane.transpose(0, 2, 3, 4, 1)


def _some(factor: NDArray[Any] | None) -> NDArray[Any]:
    assert factor is not None, "the format has this factor"
    return factor
