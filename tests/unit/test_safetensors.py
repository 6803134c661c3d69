"""The safetensors parser, and the rules for a model in several files."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from numpy.typing import NDArray

from mvllm.core.errors import ModelFileError
from mvllm.core.load.safetensors import UnsupportedTensor, find_weight_files, read_safetensors, read_shards
from mvllm.core.load.weights import DenseWeight
from tests.model_files import safetensors_bytes


def entry(dtype: object = "F32", shape: object = (2, 2), offsets: object = (0, 16)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def file_bytes(header: object, body: bytes = bytes(16), *, length: int | None = None) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + body


def read(folder: Path, raw: bytes) -> dict[str, Any]:
    path = folder / "model.safetensors"
    path.write_bytes(raw)
    return dict(read_safetensors(path))


def test_tensors_equal_what_the_reference_library_wrote(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    tensors: dict[str, NDArray[Any]] = {
        "a": rng.standard_normal((3, 5)).astype(np.float32),
        "b": np.arange(7, dtype=np.float16),
    }
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors")
    ours = read_safetensors(tmp_path / "model.safetensors")
    for name, values in tensors.items():
        weight = ours[name]
        assert isinstance(weight, DenseWeight)
        assert weight.format_name == {"float32": "F32", "float16": "F16"}[values.dtype.name]
        assert np.array_equal(weight.stored, values)


def test_mixed_types_keep_their_own_and_bfloat16_its_bits(tmp_path: Path) -> None:
    bits = np.array([0x0001, 0x8000, 0x7F80, 0x7FC0, 0x4049], np.uint16)
    stored: dict[str, tuple[str, NDArray[Any]]] = {"bf": ("BF16", bits), "f": ("F32", np.ones(2, np.float32))}
    stored["h"] = ("F16", np.ones(3, np.float16))
    tensors = read(tmp_path, safetensors_bytes(stored))
    assert {name: tensor.format_name for name, tensor in tensors.items()} == {
        "bf": "BF16",
        "f": "F32",
        "h": "F16",
    }
    assert np.array_equal(tensors["bf"].to_float32().view(np.uint32), bits.astype(np.uint32) << 16)


def test_weights_are_views_unless_the_file_leaves_them_unaligned(tmp_path: Path) -> None:
    body = np.arange(4, dtype=np.float32).tobytes()
    header = json.dumps({"w": entry()}).encode()
    for padding in range(8):
        weight = read(tmp_path, file_bytes(header + b" " * padding, body))["w"]
        assert weight.stored.flags.aligned
        assert weight.stored.tolist() == [[0, 1], [2, 3]]
    header += b" " * (-len(header) % 8)
    assert not read(tmp_path, file_bytes(header, body))["w"].stored.flags.owndata


def test_scalars_and_other_types_are_kept_apart(tmp_path: Path) -> None:
    header = {"i": entry("I64", [2], [0, 16]), "scalar": entry("F32", [], [16, 20])}
    tensors = read(tmp_path, file_bytes(header, bytes(20)))
    assert all(isinstance(tensor, UnsupportedTensor) for tensor in tensors.values())


HOSTILE = {
    "length 2**63": file_bytes({"w": entry()}, length=2**63),
    "length 0": file_bytes({"w": entry()}, length=0),
    "length one past the end": file_bytes({"w": entry()}, length=len(json.dumps({"w": entry()})) + 17),
    "shorter than a length": b"\x01\x02",
    "a list": file_bytes([1, 2]),
    "not JSON": file_bytes(b"{nonsense"),
    "invalid UTF-8": file_bytes(b'{"\xff": 1}'),
    "deep nesting": file_bytes(b'{"a":' * 100_000),
    "NaN": file_bytes(b'{"w": NaN}'),
    "huge number": file_bytes(b'{"w": ' + b"9" * 10_000 + b"}"),
    "duplicate name": file_bytes(b'{"w": %s, "w": %s}' % ((json.dumps(entry()).encode(),) * 2)),
    "entry is a list": file_bytes({"w": [1]}),
    "no dtype": file_bytes({"w": {"shape": [4], "data_offsets": [0, 16]}}),
    "unknown dtype": file_bytes({"w": entry("F1")}),
    "dtype is a list": file_bytes({"w": entry(["F32"])}),
    "reversed offsets": file_bytes({"w": entry(offsets=[16, 0])}),
    "negative offset": file_bytes({"w": entry(offsets=[-16, 0])}),
    "float offset": file_bytes({"w": entry(offsets=[0.0, 16.0])}),
    "boolean size": file_bytes({"w": entry(shape=[True, 4])}),
    "three offsets": file_bytes({"w": entry(offsets=[0, 8, 16])}),
    "past the end": file_bytes({"w": entry(shape=[8], offsets=[0, 32])}),
    "negative size": file_bytes({"w": entry(shape=[-2, -2])}),
    "shape and bytes differ": file_bytes({"w": entry(shape=[2, 3])}),
    "product wraps": file_bytes({"w": entry(shape=[2**62, 4], offsets=[0, 0])}, b""),
    "gap": file_bytes({"w": entry(shape=[2], offsets=[8, 16])}),
    "overlap": file_bytes({"w": entry(), "v": entry(shape=[2], offsets=[8, 16])}),
    "bytes left over": file_bytes({"w": entry(shape=[2], offsets=[0, 8])}),
    "too many dimensions": file_bytes({"w": entry(shape=[1] * 64 + [4])}),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_file_is_refused(tmp_path: Path, case: str) -> None:
    with pytest.raises(ModelFileError, match=r"model\.safetensors"):
        read(tmp_path, HOSTILE[case])


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    raw = safetensors_bytes({"w": ("F32", np.ones(4, np.float32))})
    for size in range(len(raw)):
        with pytest.raises(ModelFileError):
            read(tmp_path, raw[:size])


# --- which files --------------------------------------------------------------------------------------------

NUMBERED = [f"model-{number:05}-of-00003.safetensors" for number in (1, 2, 3)]


def write_files(folder: Path, names: list[str]) -> None:
    for name in names:
        (folder / name).write_bytes(safetensors_bytes({name: ("F32", np.ones(1, np.float32))}))


def write_index(folder: Path, names: list[object]) -> None:
    weight_map = {f"w{index}": name for index, name in enumerate(names)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def found(folder: Path) -> list[str]:
    return [path.name for path in find_weight_files(folder)]


def test_an_index_whose_files_are_there_is_followed(tmp_path: Path) -> None:
    write_files(tmp_path, [*NUMBERED, "consolidated.safetensors"])
    write_index(tmp_path, list(NUMBERED))
    assert found(tmp_path) == NUMBERED


def test_a_missing_shard_is_named_with_and_without_an_index(tmp_path: Path) -> None:
    write_files(tmp_path, NUMBERED[:2])
    with pytest.raises(ModelFileError, match=r"missing: 3$"):
        find_weight_files(tmp_path)
    write_index(tmp_path, list(NUMBERED))
    with pytest.raises(ModelFileError, match=NUMBERED[2]):
        find_weight_files(tmp_path)


def test_a_stale_index_is_a_warning_and_the_files_there_are_used(tmp_path: Path) -> None:
    write_files(tmp_path, NUMBERED)
    write_index(tmp_path, ["other-1.safetensors", "other-2.safetensors"])
    with pytest.warns(UserWarning, match="none of the files it names is there"):
        assert found(tmp_path) == NUMBERED


def test_without_an_index_all_shards_or_the_single_file_are_used(tmp_path: Path) -> None:
    write_files(tmp_path, NUMBERED)
    assert found(tmp_path) == NUMBERED
    write_files(tmp_path, ["model.safetensors"])
    assert found(tmp_path) == ["model.safetensors"]


def test_unusual_shard_names_are_found(tmp_path: Path) -> None:
    names = [f"model.safetensors-{number:05}-of-00002.safetensors" for number in (1, 2)]
    write_files(tmp_path, names)
    assert found(tmp_path) == names


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"no \.safetensors"):
        find_weight_files(tmp_path)


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/passwd", "a/b.safetensors", "..", 3, None])
def test_an_index_may_only_name_files_of_its_folder(tmp_path: Path, name: object) -> None:
    write_files(tmp_path, ["a.safetensors"])
    write_index(tmp_path, [name])
    with pytest.raises(ModelFileError, match="plain file name"):
        find_weight_files(tmp_path)


@pytest.mark.parametrize("text", ["[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', "nonsense"])
def test_an_unusable_index_is_refused(tmp_path: Path, text: str) -> None:
    write_files(tmp_path, ["a.safetensors"])
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ModelFileError, match=r"index\.json"):
        find_weight_files(tmp_path)


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    for name in ("a.safetensors", "b.safetensors"):
        (tmp_path / name).write_bytes(safetensors_bytes({"w": ("F32", np.ones(1, np.float32))}))
    with pytest.raises(ModelFileError, match="'w' is also in another file"):
        read_shards(find_weight_files(tmp_path))
