"""Reader of safetensors files that trusts nothing in them, and the rules for a model in several files.

Format: github.com/huggingface/safetensors: eight bytes of header length, a JSON header, then the data. As
the reference library does, it demands that the tensors cover the data exactly, without gap or overlap.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mvllm.core.errors import ModelFileError, listed
from mvllm.core.load.json_files import parse_json_object, read_json_object
from mvllm.core.load.mapped import open_bytes
from mvllm.core.load.weights import DENSE_DTYPES, DenseWeight

MAX_HEADER_BYTES = 100_000_000
MAX_DIMENSIONS = 16

_ITEM_BYTES = {
    **{"BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1},
    **{"U16": 2, "I16": 2, "F16": 2, "BF16": 2},
    **{"U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8},
}
_NUMBERED_SHARD = re.compile(r".*?-?(\d{1,6})-of-(\d{1,6})\.safetensors")


@dataclass(frozen=True)
class UnsupportedTensor:
    """A tensor of a type or shape that can't be a weight here."""

    name: str
    format_name: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True, eq=False)
class PackedCodes:
    """A matrix of uint32: the codes of a quantized weight, whose scales are another tensor."""

    name: str
    stored: NDArray[np.uint32]  # [N, words per row]
    format_name: str = "U32"

    @property
    def shape(self) -> tuple[int, int]:
        rows, words = self.stored.shape
        return rows, words

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.stored.nbytes


SafeTensor = DenseWeight | PackedCodes | UnsupportedTensor


def read_safetensors(path: Path, *, mmap: bool = True) -> dict[str, SafeTensor]:
    """Tensors of one file by name; weights are views of its bytes.

    Raises:
        ModelFileError: the file is not safetensors, truncated, or inconsistent.
    """
    data = open_bytes(path, mmap=mmap)
    header_bytes = int.from_bytes(data[:8].tobytes(), "little")
    if data.size < 8 or header_bytes > min(data.size - 8, MAX_HEADER_BYTES):
        raise ModelFileError(
            f"{path}: not a safetensors file, or truncated: header of {header_bytes} bytes "
            f"in a file of {data.size} (at most {MAX_HEADER_BYTES} are accepted)"
        )
    header = parse_json_object(data[8 : 8 + header_bytes].tobytes(), f"{path}: header")
    body = data[8 + header_bytes :]
    tensors: dict[str, SafeTensor] = {}
    spans: list[tuple[int, int, str]] = []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        format_name, shape, start, stop = _checked_entry(f"{path}: tensor {name!r}", entry, body.size)
        spans.append((start, stop, name))
        tensors[name] = _view(name, format_name, shape, body[start:stop])
    _check_cover(path, sorted(spans), body.size)
    return tensors


def _checked_entry(where: str, entry: object, body_bytes: int) -> tuple[str, tuple[int, ...], int, int]:
    """Type, shape and byte range of a header entry, consistent with each other and within the data."""
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise ModelFileError(f"{where}: an object with dtype, shape and data_offsets is expected")
    format_name, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(format_name, str) or format_name not in _ITEM_BYTES:
        raise ModelFileError(f"{where}: unknown dtype {str(format_name)[:40]!r}")
    if not _is_sizes(shape) or len(shape) > MAX_DIMENSIONS:
        raise ModelFileError(f"{where}: shape {str(shape)[:80]} is not a short list of sizes")
    if not _is_sizes(offsets) or len(offsets) != 2:
        raise ModelFileError(f"{where}: data_offsets {str(offsets)[:80]} are not two sizes")
    start, stop = offsets
    if not start <= stop <= body_bytes:
        raise ModelFileError(f"{where}: bytes [{start}, {stop}) are outside the {body_bytes} bytes of data")
    needed = _ITEM_BYTES[format_name]
    for size in shape:
        needed *= size
    if needed != stop - start:
        raise ModelFileError(
            f"{where}: {format_name} of shape {shape} takes {needed} bytes, not {stop - start}"
        )
    return format_name, tuple(shape), start, stop


def _is_sizes(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _check_cover(path: Path, spans: list[tuple[int, int, str]], body_bytes: int) -> None:
    position = 0
    for start, stop, name in spans:
        if start != position:
            raise ModelFileError(
                f"{path}: tensor {name!r} begins at {start}, the one before ends at {position}"
            )
        position = stop
    if position != body_bytes:
        raise ModelFileError(f"{path}: tensors end at {position}, but there are {body_bytes} bytes of data")


def _view(name: str, format_name: str, shape: tuple[int, ...], raw: NDArray[np.uint8]) -> SafeTensor:
    if format_name == "U32" and len(shape) == 2 and 0 not in shape:
        words = raw.view("<u4").reshape(shape)
        return PackedCodes(name, np.require(words, requirements="A"))
    dtype = DENSE_DTYPES.get(format_name)
    if dtype is None or not shape or 0 in shape:
        return UnsupportedTensor(name, format_name, shape, raw.size)
    values = raw.view(dtype).reshape(shape)
    # Old writers did not pad the header; kernels need aligned numbers.
    return DenseWeight(name, format_name, np.require(values, requirements="A"))


def find_weight_files(folder: Path) -> list[Path]:
    """Files that together hold a model's weights.

    An index whose files are all there is followed. One with none of its files there is stale: a warning,
    and what is there is used. Otherwise a file that an index or a shard's own number calls for is missing.

    Raises:
        ModelFileError: no weights, a missing shard (named), or an unusable index.
    """
    present = {path.name: path for path in folder.glob("*.safetensors") if path.is_file()}
    if not present:
        raise ModelFileError(f"{folder}: no .safetensors file in this folder")
    for index in sorted(folder.glob("*.safetensors.index.json")):
        named = _files_in_index(index)
        missing = sorted(named - present.keys())
        if not missing:
            return [present[name] for name in sorted(named)]
        if len(missing) < len(named):
            raise ModelFileError(
                f"{folder}: incomplete: {index.name} names files that are missing: {listed(missing)}"
            )
        warnings.warn(
            f"{index}: none of the files it names is there; using the .safetensors files of the folder",
            stacklevel=2,
        )
    if "model.safetensors" in present:
        return [present["model.safetensors"]]
    _check_numbered_shards(folder, present)
    return [present[name] for name in sorted(present)]


def read_shards(files: list[Path], *, mmap: bool = True) -> dict[str, SafeTensor]:
    """Tensors of several files by name.

    Raises:
        ModelFileError: a file is unusable, or a tensor is in two of them.
    """
    tensors: dict[str, SafeTensor] = {}
    for path in files:
        for name, tensor in read_safetensors(path, mmap=mmap).items():
            if name in tensors:
                raise ModelFileError(f"{path}: tensor {name!r} is also in another file of the model")
            tensors[name] = tensor
    return tensors


def _files_in_index(index: Path) -> set[str]:
    weight_map = (read_json_object(index) or {}).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelFileError(f"{index}: weight_map is missing or empty")
    names = set()
    for name in weight_map.values():
        # A path would let an index read files outside the model's folder.
        if not isinstance(name, str) or not name.endswith(".safetensors") or Path(name).name != name:
            raise ModelFileError(
                f"{index}: {str(name)[:80]!r} is not the plain file name of a .safetensors file"
            )
        names.add(name)
    return names


def _check_numbered_shards(folder: Path, present: Mapping[str, Path]) -> None:
    """Fail if files numbered "i of n" are not all there."""
    numbers: dict[int, set[int]] = {}
    for name in present:
        if match := _NUMBERED_SHARD.fullmatch(name):
            numbers.setdefault(int(match[2]), set()).add(int(match[1]))
    for count, found in numbers.items():
        missing = [str(number) for number in range(1, count + 1) if number not in found]
        if missing:
            raise ModelFileError(f"{folder}: of {count} numbered shards these are missing: {listed(missing)}")
