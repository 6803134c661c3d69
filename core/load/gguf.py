"""Reader of GGUF files that trusts nothing in them.

Format: github.com/ggml-org/ggml, `docs/gguf.md`, versions 2 and 3, little-endian. Every length, count and
offset is a Python integer (no wrap-around) and is checked against what is left of the file before it
is used, so that a damaged or hostile file costs at most time and memory in proportion to its own size.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mvllm.core.errors import ModelFileError
from mvllm.core.load.mapped import open_bytes, release_pages
from mvllm.core.load.quantized import QUANT_FORMATS
from mvllm.core.load.weights import DENSE_DTYPES, DenseWeight, QuantizedWeight
from mvllm.core.types import ceil_div

MAGIC = b"GGUF"
SUPPORTED_VERSIONS = (2, 3)
MAX_DIMENSIONS = 4
MAX_ARRAY_ITEMS = 1 << 22
"""Largest metadata array accepted; the largest vocabularies have 2**18 tokens and 2**19 merges."""

_DEFAULT_ALIGNMENT = 32
_MIN_KEY_BYTES = 8 + 4 + 1  # length of the key, type, a one-byte value
_MIN_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8  # length of the name, rank, one dimension, type, offset

_SCALAR_DTYPES: dict[int, np.dtype[np.generic]] = {
    0: np.dtype("<u1"),
    1: np.dtype("<i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    7: np.dtype("?"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
_STRING, _ARRAY = 8, 9

_TENSOR_TYPES = {
    **{0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0"},
    **{12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 30: "BF16"},
}

MetadataValue = int | float | bool | str | tuple[str, ...] | NDArray[Any]
"""Arrays of strings are tuples, arrays of numbers read-only NumPy views of the file."""


@dataclass(frozen=True)
class GgufFile:
    """A parsed file; weights are views of its bytes, named as in the file, shaped (out, in)."""

    path: Path
    version: int
    metadata: Mapping[str, MetadataValue]
    tensors: Mapping[str, DenseWeight | QuantizedWeight]
    file_bytes: int


def read_gguf(path: Path, *, mmap: bool = True) -> GgufFile:
    """Parse a GGUF file.

    Raises:
        ModelFileError: the file is not GGUF, of another version, truncated, or inconsistent; the message
            names the file and the field.
    """
    data = open_bytes(path, mmap=mmap)
    header = _Header(path, data)
    version = header.read_version()
    num_tensors = header.read_count("tensor count", _MIN_TENSOR_BYTES)
    num_keys = header.read_count("metadata count", _MIN_KEY_BYTES)
    metadata = _read_metadata(header, num_keys)
    entries = [_read_tensor_entry(header) for _ in range(num_tensors)]
    alignment = _alignment(header, metadata)
    data_start = ceil_div(header.offset, alignment) * alignment
    tensors: dict[str, DenseWeight | QuantizedWeight] = {}
    for entry in entries:
        if entry.name in tensors:
            raise header.error(f"tensor {entry.name!r} appears twice")
        if entry.offset % alignment:
            raise header.error(
                f"tensor {entry.name!r}: offset {entry.offset} is not a multiple of {alignment}"
            )
        tensors[entry.name] = _view(header, entry, data_start)
    release_pages(data[: header.offset])
    return GgufFile(path, version, metadata, tensors, data.size)


@dataclass(frozen=True)
class _TensorEntry:
    name: str
    format_name: str
    shape: tuple[int, ...]  # outermost first
    offset: int  # from the start of the data section


class _Header:
    """Owns the read position in a file's header; does not own the bytes. Reads advance it; a failing read
    raises ModelFileError."""

    def __init__(self, path: Path, data: NDArray[np.uint8]) -> None:
        self.path = path
        self.data = data
        self.offset = 0

    def error(self, problem: str) -> ModelFileError:
        return ModelFileError(f"{self.path}: {problem}")

    def take(self, count: int, field: str) -> NDArray[np.uint8]:
        """The next `count` bytes, a view."""
        left = self.data.size - self.offset
        if count > left:
            raise self.error(
                f"{field} needs {count} bytes at offset {self.offset}, but the file ends {left} bytes on"
            )
        start, self.offset = self.offset, self.offset + count
        return self.data[start : self.offset]

    def integer(self, num_bytes: int, field: str) -> int:
        return int.from_bytes(self.take(num_bytes, field).tobytes(), "little")

    def read_count(self, field: str, min_bytes_each: int) -> int:
        """A 64-bit count of things that take at least `min_bytes_each` in what is left of the file."""
        count = self.integer(8, field)
        left = self.data.size - self.offset
        if count > left // min_bytes_each:
            raise self.error(f"{field} is {count}, but only {left} bytes are left in the file")
        return count

    def string(self, field: str) -> str:
        length = self.integer(8, f"{field} length")
        return self.decode(self.take(length, field).tobytes(), field)

    def decode(self, raw: bytes, field: str) -> str:
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.error(f"{field} is not valid UTF-8") from error

    def read_version(self) -> int:
        if self.take(4, "magic").tobytes() != MAGIC:
            raise self.error("not a GGUF file: it does not begin with 'GGUF'")
        version = self.integer(4, "version")
        if version in SUPPORTED_VERSIONS:
            return version
        if version & 0xFFFF == 0:
            raise self.error("big-endian GGUF files are not supported; convert the file to little-endian")
        raise self.error(f"GGUF version {version} is not supported; supported: 2, 3")


def _read_metadata(header: _Header, count: int) -> dict[str, MetadataValue]:
    metadata: dict[str, MetadataValue] = {}
    for index in range(count):
        key = header.string(f"metadata key {index}")
        if key in metadata:
            raise header.error(f"metadata key {key!r} appears twice")
        metadata[key] = _read_value(header, f"metadata {key!r}")
    return metadata


def _read_value(header: _Header, field: str) -> MetadataValue:
    kind = header.integer(4, f"{field} type")
    if kind == _STRING:
        return header.string(field)
    if kind == _ARRAY:
        return _read_array(header, field)
    scalar: int | float | bool = _read_numbers(header, kind, 1, field)[0].item()
    return scalar


def _read_array(header: _Header, field: str) -> MetadataValue:
    kind = header.integer(4, f"{field} element type")
    if kind == _ARRAY:
        raise header.error(f"{field} is an array of arrays, which is not supported")
    min_bytes = 8 if kind == _STRING else 1
    count = header.read_count(f"{field} length", min_bytes)
    if count > MAX_ARRAY_ITEMS:
        raise header.error(f"{field} has {count} items; at most {MAX_ARRAY_ITEMS} are accepted")
    if kind == _STRING:
        return _read_strings(header, count, field)
    return _read_numbers(header, kind, count, field)


def _read_numbers(header: _Header, kind: int, count: int, field: str) -> NDArray[Any]:
    dtype = _SCALAR_DTYPES.get(kind)
    if dtype is None:
        raise header.error(f"{field} has unknown type {kind}")
    return header.take(count * dtype.itemsize, field).view(dtype)


def _read_strings(header: _Header, count: int, field: str) -> tuple[str, ...]:
    """Read an array of strings; a vocabulary has hundreds of thousands, hence the flat loop."""
    buffer = memoryview(header.data)  # type: ignore[arg-type]  # NumPy's stubs lack the buffer protocol here
    size, offset = header.data.size, header.offset
    read_length = struct.Struct("<Q").unpack_from
    strings: list[str] = []
    append = strings.append
    try:
        for _ in range(count):
            start = offset + 8
            offset = start + read_length(buffer, offset)[0]
            if offset > size:
                break
            append(str(buffer[start:offset], "utf-8"))
    except struct.error:
        pass  # the length itself is cut off: reported below with the others
    except UnicodeDecodeError as error:
        raise header.error(f"{field}[{len(strings)}] is not valid UTF-8") from error
    if len(strings) < count:
        raise header.error(f"{field}[{len(strings)}] reaches beyond the end of the file")
    header.offset = offset
    return tuple(strings)


def _read_tensor_entry(header: _Header) -> _TensorEntry:
    name = header.string("tensor name")
    field = f"tensor {name!r}"
    rank = header.integer(4, f"{field} rank")
    if not 1 <= rank <= MAX_DIMENSIONS:
        raise header.error(f"{field} has {rank} dimensions; 1 to {MAX_DIMENSIONS} are possible")
    dimensions = [header.integer(8, f"{field} dimension {index}") for index in range(rank)]
    if 0 in dimensions:
        raise header.error(f"{field} has a dimension of size 0")
    kind = header.integer(4, f"{field} type")
    if kind not in _TENSOR_TYPES:
        supported = ", ".join(_TENSOR_TYPES.values())
        raise header.error(f"{field} has type {kind}, which is not supported; supported: {supported}")
    offset = header.integer(8, f"{field} offset")
    return _TensorEntry(name, _TENSOR_TYPES[kind], tuple(reversed(dimensions)), offset)


def _alignment(header: _Header, metadata: Mapping[str, MetadataValue]) -> int:
    value = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(value, int) or isinstance(value, bool) or value < 8 or value & (value - 1):
        raise header.error(f"general.alignment is {value!r}; a power of two of at least 8 is expected")
    return value


def _view(header: _Header, entry: _TensorEntry, data_start: int) -> DenseWeight | QuantizedWeight:
    """The tensor's bytes as a weight, after checking that they lie within the file."""
    field = f"tensor {entry.name!r}"
    *outer, inputs = entry.shape
    quant_format = QUANT_FORMATS.get(entry.format_name)
    block_size, block_bytes = (
        (quant_format.block_size, quant_format.block_bytes)
        if quant_format
        else (1, DENSE_DTYPES[entry.format_name].itemsize)
    )
    if quant_format and len(entry.shape) != 2:
        raise header.error(f"{field}: {entry.format_name} needs two dimensions, found shape {entry.shape}")
    if inputs % block_size:
        raise header.error(
            f"{field}: rows of {inputs} are not a multiple of {entry.format_name}'s {block_size}"
        )
    row_bytes = inputs // block_size * block_bytes
    num_rows = 1
    for size in outer:
        num_rows *= size
    start, num_bytes = data_start + entry.offset, num_rows * row_bytes
    if start + num_bytes > header.data.size:
        raise header.error(
            f"{field} of shape {entry.shape} covers bytes [{start}, {start + num_bytes}), "
            f"but the file ends at {header.data.size}; it is truncated or damaged"
        )
    raw = header.data[start : start + num_bytes]
    if quant_format:
        return QuantizedWeight(entry.name, quant_format, raw.reshape(num_rows, row_bytes))
    values = raw.view(DENSE_DTYPES[entry.format_name]).reshape(entry.shape)
    return DenseWeight(entry.name, entry.format_name, values)
