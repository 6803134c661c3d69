"""The GGUF parser: what it reads, and what it refuses."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from mvllm.core.errors import ModelFileError
from mvllm.core.load.gguf import GgufFile, read_gguf
from mvllm.core.load.mapped import release_pages
from tests.model_files import TYPE_CODES, gguf_bytes, gguf_string, gguf_value
from tests.paths import MODELS
from tests.resident import SMAPS, resident_bytes
from tests.tiny_models import gguf_metadata, gguf_tensors, tiny_shape, write_tiny_gguf

REAL_MODELS = ["smollm2-135m", "qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b", "gemma3-270m"]


def read_bytes(folder: Path, raw: bytes) -> GgufFile:
    path = folder / "x.gguf"
    path.write_bytes(raw)
    return read_gguf(path)


def header(num_tensors: int, num_keys: int, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_keys)


def tensor_entry(
    name: str, dimensions: list[int], *, kind: int = 0, offset: int = 0, rank: int | None = None
) -> bytes:
    count = len(dimensions) if rank is None else rank
    sizes = b"".join(struct.pack("<Q", size) for size in dimensions)
    return gguf_string(name) + struct.pack("<I", count) + sizes + struct.pack("<IQ", kind, offset)


def one_tensor(dimensions: list[int], *, body: bytes = bytes(256), **options: Any) -> bytes:
    head = header(1, 0) + tensor_entry("w", dimensions, **options)
    return head + bytes(-len(head) % 32) + body


def one_key(value: bytes) -> bytes:
    return header(0, 1) + gguf_string("key") + value


@pytest.mark.parametrize("tensor_type", TYPE_CODES)
def test_tensors_and_metadata_equal_what_the_gguf_package_reads(tmp_path: Path, tensor_type: str) -> None:
    path = tmp_path / "model.gguf"
    write_tiny_gguf(path, "qwen2", tensor_type)
    ours, theirs = read_gguf(path), gguf.GGUFReader(path)
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        weight = ours.tensors[tensor.name]
        assert weight.format_name == tensor.tensor_type.name
        assert weight.shape == tuple(int(size) for size in reversed(tensor.shape))
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        assert np.array_equal(weight.to_float32(), expected.reshape(weight.shape))
    for key, value in ours.metadata.items():
        found = list(value) if isinstance(value, tuple | np.ndarray) else value
        assert found == theirs.fields[key].contents()


def test_every_metadata_type_is_read(tmp_path: Path) -> None:
    packed = {
        **{0: struct.pack("<B", 200), 1: struct.pack("<b", -7), 2: struct.pack("<H", 60_000)},
        **{3: struct.pack("<h", -300), 4: struct.pack("<I", 2**32 - 1), 5: struct.pack("<i", -(2**31))},
        **{6: struct.pack("<f", 0.5), 7: b"\x01", 8: gguf_string("čau")},
        **{10: struct.pack("<Q", 2**64 - 1), 11: struct.pack("<q", -(2**63)), 12: struct.pack("<d", 0.1)},
    }
    expected = [200, -7, 60_000, -300, 2**32 - 1, -(2**31), 0.5, True, "čau", 2**64 - 1, -(2**63), 0.1]
    for (code, raw), value in zip(packed.items(), expected, strict=True):
        scalar = read_bytes(tmp_path, one_key(struct.pack("<I", code) + raw)).metadata["key"]
        assert scalar == value
        assert type(scalar) is type(value)
        array = read_bytes(tmp_path, one_key(struct.pack("<IIQ", 9, code, 2) + 2 * raw)).metadata["key"]
        assert list(array) == [value, value]  # type: ignore[arg-type]


def test_weights_are_read_only_views_of_one_mapping(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_tiny_gguf(path)
    weights = list(read_gguf(path).tensors.values())
    for weight in weights:
        assert not weight.stored.flags.owndata
        assert not weight.stored.flags.writeable


def test_reading_into_memory_gives_the_same_tensors(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_tiny_gguf(path)
    mapped, in_memory = read_gguf(path), read_gguf(path, mmap=False)
    for name, weight in mapped.tensors.items():
        assert np.array_equal(weight.to_float32(), in_memory.tensors[name].to_float32())
        assert not in_memory.tensors[name].stored.flags.writeable


@pytest.mark.skipif(not SMAPS.exists(), reason="needs Linux's account of mapped pages")
def test_released_pages_leave_memory_and_come_back_unchanged(tmp_path: Path) -> None:
    """REQUIREMENTS T2: a backend that packs weights must not hold file and packed form at once."""
    path = tmp_path / "model.gguf"
    values = np.arange(1 << 20, dtype=np.float32)
    path.write_bytes(gguf_bytes({}, {"w": ("F32", values, (1 << 20,))}))
    stored = read_gguf(path).tensors["w"].stored
    assert np.array_equal(stored, values)
    assert resident_bytes(path) >= values.nbytes
    release_pages(stored[: 1 << 19])
    assert resident_bytes(path) <= values.nbytes / 2
    release_pages(stored)
    assert resident_bytes(path) <= 1 << 16
    assert np.array_equal(stored, values)
    release_pages(values)  # not mapped: nothing to do


def test_another_alignment_is_heeded(tmp_path: Path) -> None:
    tensors = {"w": ("F32", np.arange(5, dtype=np.float32), (5,)), "v": ("F32", np.ones(3, np.float32), (3,))}
    file = read_bytes(tmp_path, gguf_bytes({"general.alignment": 64}, tensors, alignment=64))
    assert file.tensors["w"].to_float32().tolist() == [0, 1, 2, 3, 4]
    assert file.tensors["v"].to_float32().tolist() == [1, 1, 1]


HOSTILE = {
    "no magic": (b"GGML" + bytes(100), "GGUF"),
    "version 1": (header(0, 0, version=1), "version 1"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "tensor count": (header(2**60, 0), "tensor count"),
    "metadata count": (header(0, 2**64 - 1), "metadata count"),
    "key length": (header(0, 1) + struct.pack("<Q", 2**48) + bytes(50), "metadata key 0"),
    "unknown type": (one_key(struct.pack("<I", 13) + bytes(50)), "unknown type 13"),
    "string length": (one_key(struct.pack("<IQ", 8, 2**63) + bytes(50)), "'key'"),
    "string bytes": (one_key(struct.pack("<I", 8) + struct.pack("<Q", 2) + b"\xff\xfe"), "UTF-8"),
    "array of unknown type": (one_key(struct.pack("<IIQ", 9, 99, 1) + bytes(50)), "unknown type 99"),
    "array of arrays": (one_key(struct.pack("<IIQ", 9, 9, 1) + bytes(50)), "array of arrays"),
    "array of 2**60": (one_key(struct.pack("<IIQ", 9, 0, 2**60) + bytes(50)), "'key' length"),
    "strings of 2**60": (one_key(struct.pack("<IIQ", 9, 8, 2**60) + bytes(50)), "'key' length"),
    "string in array": (one_key(struct.pack("<IIQQ", 9, 8, 1, 2**62) + bytes(8)), r"'key'\[0\]"),
    "cut array": (one_key(struct.pack("<IIQQ", 9, 8, 2, 12) + bytes(15)), r"'key'\[1\]"),
    "UTF-8 in array": (one_key(struct.pack("<IIQQ", 9, 8, 1, 1) + b"\xff"), r"'key'\[0\]"),
    "duplicate key": (header(0, 2) + 2 * (gguf_string("key") + gguf_value(1)), "twice"),
    "rank 0": (one_tensor([]), "0 dimensions"),
    "rank 5": (one_tensor([1] * 5), "5 dimensions"),
    "rank a million": (one_tensor([1], rank=10**6), "1000000 dimensions"),
    "rank 2**32 - 1": (one_tensor([1], rank=2**32 - 1), "dimensions"),
    "size 0": (one_tensor([0, 4]), "size 0"),
    "product wraps at 2**64": (one_tensor([2**63 - 1, 2]), "truncated or damaged"),
    "product is 2**65": (one_tensor([2**32, 2**32, 2]), "truncated or damaged"),
    "tensor type": (one_tensor([4], kind=9), "type 9"),
    "offset past the end": (one_tensor([4], offset=2**20), "truncated or damaged"),
    "offset near 2**64": (one_tensor([4], offset=2**64 - 32), "truncated or damaged"),
    "offset not aligned": (one_tensor([4], offset=4), "multiple of 32"),
    "partial block": (one_tensor([33, 2], kind=2), "multiple of"),
    "quantized vector": (one_tensor([32], kind=2), "two dimensions"),
    "duplicate tensor": (header(2, 0) + 2 * tensor_entry("w", [1]) + bytes(64), "twice"),
    "tensor name": (header(1, 0) + struct.pack("<Q", 2**40) + bytes(60), "tensor name"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_file_is_refused_by_name_of_the_field_without_allocation(tmp_path: Path, case: str) -> None:
    raw, message = HOSTILE[case]
    tracemalloc.start()
    try:
        with pytest.raises(ModelFileError, match=message):
            read_bytes(tmp_path, raw)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("alignment", [0, 3, 4, 48, "32", -32.0, True])
def test_a_bad_alignment_is_refused(tmp_path: Path, alignment: object) -> None:
    with pytest.raises(ModelFileError, match=r"general\.alignment"):
        read_bytes(tmp_path, gguf_bytes({"general.alignment": alignment}, {}))


def test_every_truncation_of_the_header_is_refused(tmp_path: Path) -> None:
    shape = tiny_shape(tensor_type="Q4_0", layers=1)
    metadata = {**gguf_metadata(shape), "tokenizer.ggml.tokens": ["a"], "tokenizer.ggml.merges": []}
    metadata["tokenizer.ggml.token_type"] = np.ones(1, np.int32)
    raw = gguf_bytes(metadata, gguf_tensors(shape, "Q4_0", seed=0))
    assert read_bytes(tmp_path, raw).version == 3
    for size in [*range(1, 2500, 7), len(raw) - 40, len(raw) - 1]:
        with pytest.raises(ModelFileError):
            read_bytes(tmp_path, raw[:size])


def test_absent_and_empty_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="can't be read"):
        read_gguf(tmp_path / "absent.gguf")
    with pytest.raises(ModelFileError, match="empty"):
        read_bytes(tmp_path, b"")


@pytest.mark.skipif(MODELS is None, reason="MVLLM_TEST_MODELS names no folder with real models")
@pytest.mark.parametrize("name", REAL_MODELS)
def test_real_files_are_read(name: str) -> None:
    assert MODELS is not None
    path = MODELS / f"{name}.gguf"
    if not path.exists():
        pytest.skip(f"{path.name} is not in MVLLM_TEST_MODELS")
    file = read_gguf(path)
    assert len(file.tensors) > 200
    tokens = file.metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, tuple)
    assert file.tensors["token_embd.weight"].shape[0] == len(tokens)


@pytest.mark.skipif(MODELS is None, reason="MVLLM_TEST_MODELS names no folder with real models")
@pytest.mark.parametrize("keep", [4, 20, 200, 10_000, -1])
def test_a_truncated_real_file_is_refused(tmp_path: Path, keep: int) -> None:
    assert MODELS is not None
    path = MODELS / "smollm2-135m.gguf"
    if not path.exists():
        pytest.skip(f"{path.name} is not in MVLLM_TEST_MODELS")
    size = keep if keep > 0 else path.stat().st_size + keep
    with path.open("rb") as source:
        (tmp_path / "cut.gguf").write_bytes(source.read(size))
    with pytest.raises(ModelFileError, match=r"needs|count|reaches beyond|truncated"):
        read_gguf(tmp_path / "cut.gguf")
