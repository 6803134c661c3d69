"""Packing host weights into the kernels' layout (see `layout`), some rows at a time."""

from __future__ import annotations

import functools
import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mvllm.backends.cpu import linear
from mvllm.backends.cpu.isa import Isa, selected
from mvllm.backends.cpu.jit import NativeFunction
from mvllm.backends.cpu.layout import DENSE, GROUP, NARROW, QUANTIZED, ActivationLayout, packed_format
from mvllm.backends.cpu.pack_affine import affine_packer
from mvllm.backends.cpu.pack_kernels import row_packer
from mvllm.core.load.mapped import release_pages
from mvllm.core.load.weights import AffineWeight, HostWeight
from mvllm.core.tensor import Weight
from mvllm.core.types import ceil_div

StartTask = Callable[[Callable[[], None]], object]
"""Does a piece of work, or sees to it that a thread does."""

_TASK_WEIGHTS = 1 << 22  # a piece of work: some milliseconds
_SEGMENT_BYTES = 64 << 20
_HUGE_PAGE = 2 << 20
_ALIGNMENT = 64


def call_now(task: Callable[[], None]) -> None:
    """A `StartTask` that does the work itself."""
    task()


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
        self, activations: ActivationLayout = NARROW, panels_from: int | None = None
    ) -> int:
        """Address of a descriptor for `linear.matmul`; compiles the format's kernel for these activations.

        Products of `panels_from` tokens or more, at least 2, are computed by panels; None: the default. A
        dense matrix takes float32 rows, whatever `activations` says.
        """
        function = linear.matmul_address(self.format_name, self.isa, activations)
        if panels_from is None:
            panels_from = linear.default_panels_from(self.format_name)
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
    start: StartTask = call_now,
) -> PackedMatrix:
    """Pack matrices of the same packed format and number of inputs as one.

    Rows are concatenated. With `alternate` the row blocks of the weights take turns instead (they have
    equally many rows then, each padded to whole blocks). Mutates the arena.

    Args:
        start: is given the work in pieces, which may be done later and by several threads at once; the
            matrix's data are complete when all are done.
    """
    isa = isa or selected()
    first = weights[0]
    format_name = _packed_format(first)
    inputs = first.shape[1]
    assert all(_packed_format(w) == format_name and w.shape[1] == inputs for w in weights), "unlike weights"
    streams = [[weight] for weight in weights] if alternate else [list(weights)]
    blocks_each = [ceil_div(sum(w.shape[0] for w in stream), isa.lanes) for stream in streams]
    assert len(set(blocks_each)) == 1, "alternating weights need equally many rows"
    num_blocks = sum(blocks_each)
    data = arena.allocate(num_blocks * block_bytes(format_name, inputs, isa)).reshape(num_blocks, -1)
    for index, stream in enumerate(streams):
        _pack_stream(stream, data[index :: len(streams)], isa, start)
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


def _packed_format(weight: Weight) -> str:
    name = packed_format(weight.format_name)
    assert name is not None, "the backend refuses unknown formats"
    return name


def block_bytes(format_name: str, inputs: int, isa: Isa) -> int:
    """Bytes of one row block."""
    if format_name in DENSE:
        return inputs * isa.lanes * DENSE[format_name].value_bytes
    layout = QUANTIZED[format_name]
    return inputs // (GROUP * layout.superblock) * layout.superblock_bytes(isa.lanes)


def _pack_stream(weights: list[Weight], blocks: NDArray[np.uint8], isa: Isa, start: StartTask) -> None:
    """Write the concatenated rows of `weights` into consecutive row blocks."""
    for weight in weights:
        _packer(weight, isa)  # compiled here, once, and not by several threads at once
    rows_at_once = max(1, _TASK_WEIGHTS // (weights[0].shape[1] * isa.lanes)) * isa.lanes
    rows = sum(weight.shape[0] for weight in weights)
    for first in range(0, rows, rows_at_once):
        last = min(first + rows_at_once, rows)
        target = blocks[first // isa.lanes : ceil_div(last, isa.lanes)]
        start(functools.partial(_pack_rows, _pieces(weights, first, last), target, isa))


def _packer(weight: Weight, isa: Isa) -> NativeFunction:
    make = affine_packer if isinstance(weight, AffineWeight) else row_packer
    return make(weight.format_name, isa)


@dataclass(frozen=True, eq=False)
class _Piece:
    """Rows [first, last) of a weight."""

    weight: HostWeight
    first: int
    last: int

    @property
    def arrays(self) -> list[NDArray[Any]]:
        """Where the rows lie in the file's memory, in the order that the packer wants."""
        weight = self.weight
        if isinstance(weight, AffineWeight):
            return [weight.stored, weight.scales, weight.biases]
        return [weight.stored]


def _pieces(weights: list[Weight], first: int, last: int) -> list[_Piece]:
    """The parts of the concatenated rows [first, last)."""
    pieces = []
    for weight in weights:
        assert isinstance(weight, HostWeight), weight
        rows = weight.shape[0]
        if first < rows and last > 0:
            pieces.append(_Piece(weight, max(first, 0), min(last, rows)))
        first, last = first - rows, last - rows
    return pieces


def _pack_rows(pieces: Sequence[_Piece], target: NDArray[np.uint8], isa: Isa) -> None:
    """Write the rows of `pieces` into the row blocks `target`; a last block's missing rows stay zero."""
    row = 0
    for piece in pieces:
        addresses = np.zeros((len(target) * isa.lanes, len(piece.arrays)), np.int64)
        following = row + piece.last - piece.first
        for index, array in enumerate(piece.arrays):
            addresses[row:following, index] = _row_addresses(array, piece)
        row = following
        packer = _packer(piece.weight, isa)
        units = _units(piece.weight)
        packer.ctypes(addresses.ctypes.data, len(target), target.ctypes.data, target.strides[0], units)
        for array in piece.arrays:
            # Reordered rows stay within a head, so few pages are missed.
            release_pages(array[piece.first : piece.last])


def _row_addresses(array: NDArray[Any], piece: _Piece) -> NDArray[np.int64]:
    """Where the rows of a piece lie in one of its arrays."""
    assert array.strides[1] == array.itemsize, "a row's values are neighbours"
    order = piece.weight.row_order
    rows = np.arange(piece.first, piece.last) if order is None else order[piece.first : piece.last]
    return array.ctypes.data + array.strides[0] * rows.astype(np.int64)


def _units(weight: HostWeight) -> int:
    """A row's values, or superblocks."""
    inputs, format_name = weight.shape[1], _packed_format(weight)
    return inputs if format_name in DENSE else inputs // (GROUP * QUANTIZED[format_name].superblock)
