"""Damaged model files either load or are refused with ModelFileError: nothing else comes out."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mvllm.core.errors import ModelFileError
from mvllm.core.load.checkpoint import load_checkpoint
from tests.mlx_files import write_tiny_mlx
from tests.tiny_models import write_tiny_gguf, write_tiny_hf

INTERESTING = [0, 1, 2, 7, 8, 9, 31, 32, 63, 127, 128, 255]

positions = st.floats(0, 1, exclude_max=True)
byte_values = st.sampled_from(INTERESTING) | st.integers(0, 255)
edits = st.lists(st.tuples(positions, byte_values), min_size=1, max_size=8)
wide_values = st.sampled_from([0, 1, 5, 2**31, 2**32 - 1, 2**48, 2**60, 2**63, 2**64 - 1])
wide_edits = st.lists(st.tuples(positions, wide_values), max_size=2)
cuts = st.none() | positions


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def damage(
    raw: bytes,
    within: int,
    changes: list[tuple[float, int]],
    wide_changes: list[tuple[float, int]],
    cut: float | None,
) -> bytes:
    """Overwrite bytes and 64-bit words in the first `within` bytes, then cut the file."""
    damaged = bytearray(raw)
    for where, value in changes:
        damaged[int(where * within)] = value
    for where, value in wide_changes:
        start = int(where * max(within - 8, 1))
        damaged[start : start + 8] = value.to_bytes(8, "little")
    return bytes(damaged if cut is None else damaged[: int(cut * len(damaged))])


def load_and_read(path: Path) -> None:
    """Load and touch every weight; a refusal is fine."""
    try:
        checkpoint = load_checkpoint(path)
    except ModelFileError as error:
        assert str(error)
        return
    for layer in checkpoint.weights.layers:
        for weight in vars(layer).values():
            if weight is not None:
                assert weight.to_float32().shape == weight.shape
    assert checkpoint.weights.embedding.to_float32().shape[0] == checkpoint.spec.vocab_size
    assert all(0 <= token < 2**31 for token in checkpoint.text.eos_token_ids)


@pytest.mark.parametrize(
    "architecture,tensor_type", [("llama", "Q4_0"), ("qwen2", "Q8_0"), ("llama", "Q6_K")]
)
@given(changes=edits, wide_changes=wide_edits, cut=cuts)
def test_a_damaged_gguf_file_loads_or_is_refused(
    folder: Path,
    architecture: str,
    tensor_type: str,
    changes: list[tuple[float, int]],
    wide_changes: list[tuple[float, int]],
    cut: float | None,
) -> None:
    original = folder / f"{architecture}-{tensor_type}.gguf"
    if not original.exists():
        write_tiny_gguf(original, architecture, tensor_type, layers=1)
    raw = original.read_bytes()
    header_bytes = raw.index(b"output_norm.weight") + 200
    path = folder / "damaged.gguf"
    path.write_bytes(damage(raw, header_bytes, changes, wide_changes, cut))
    load_and_read(path)


@given(changes=edits, cut=cuts)
def test_a_gguf_file_with_damaged_weights_still_dequantizes(
    folder: Path, changes: list[tuple[float, int]], cut: float | None
) -> None:
    original = folder / "weights.gguf"
    if not original.exists():
        write_tiny_gguf(original, "llama", "Q5_1", layers=1)
    raw = original.read_bytes()
    path = folder / "damaged.gguf"
    path.write_bytes(damage(raw, len(raw), changes, [], cut))
    load_and_read(path)


@pytest.mark.parametrize(
    "name", ["model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json"]
)
@given(changes=edits, wide_changes=wide_edits, cut=cuts)
def test_a_folder_with_one_damaged_file_loads_or_is_refused(
    folder: Path,
    name: str,
    changes: list[tuple[float, int]],
    wide_changes: list[tuple[float, int]],
    cut: float | None,
) -> None:
    model = folder / "hf"
    write_tiny_hf(model, layers=1)
    raw = (model / name).read_bytes()
    within = raw.index(b"}}") if name == "model.safetensors" else len(raw)
    (model / name).write_bytes(damage(raw, within, changes, wide_changes, cut))
    load_and_read(model)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
@given(changes=edits, wide_changes=wide_edits, cut=cuts)
def test_a_quantized_folder_with_one_damaged_file_loads_or_is_refused(
    folder: Path,
    name: str,
    changes: list[tuple[float, int]],
    wide_changes: list[tuple[float, int]],
    cut: float | None,
) -> None:
    model = folder / "mlx"
    overrides = {"model.layers.0.mlp.down_proj": {"bits": 3, "group_size": 32}}
    write_tiny_mlx(model, bits=5, scale_type="BF16", overrides=overrides, layers=1)
    raw = (model / name).read_bytes()
    within = raw.index(b"}}") if name == "model.safetensors" else len(raw)
    (model / name).write_bytes(damage(raw, within, changes, wide_changes, cut))
    load_and_read(model)


@given(
    replacement=st.sampled_from([b"null", b"-1", b"1e999", b'"x"', b"[]", b"{}", b"true", b"1.5"]),
    index=positions,
)
def test_a_config_with_one_value_of_another_kind_loads_or_is_refused(
    folder: Path, replacement: bytes, index: float
) -> None:
    model = folder / "config"
    write_tiny_hf(model, layers=1)
    parts = (model / "config.json").read_bytes().rstrip(b"}").split(b", ")
    chosen = int(index * len(parts))
    key = parts[chosen].partition(b": ")[0]
    parts[chosen] = key + b": " + replacement
    (model / "config.json").write_bytes(b", ".join(parts) + b"}")
    load_and_read(model)
