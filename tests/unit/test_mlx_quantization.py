"""MLX-quantized folders: codes, settings by matrix, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from mvllm.core.errors import ModelFileError
from mvllm.core.load.checkpoint import load_checkpoint
from mvllm.core.load.mlx_format import MLX_BITS, MLX_FORMATS, MLX_GROUP_SIZES, MLX_SCALE_TYPES, unpack_stream
from mvllm.core.load.weights import AffineWeight, DenseWeight
from tests.mlx_files import edit_config, pack_codes, quantize, quantize_tensors, write_tiny_mlx
from tests.model_files import safetensors_bytes, to_dense_type
from tests.tiny_models import dense_tensors

DOWN = "model.layers.0.mlp.down_proj"


def affine(values: NDArray[np.float32], bits: int, group_size: int, scale_type: str) -> AffineWeight:
    parts = {part: stored for part, (_, stored) in quantize(values, bits, group_size, scale_type).items()}
    format = MLX_FORMATS[f"MLX{bits}_G{group_size}_{scale_type}"]
    return AffineWeight("w", format, parts["weight"], parts["scales"], parts["biases"])


# --- codes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bits", "words", "codes"),
    [
        # Codes 0, 1, 2, ... cut to their bits, one after the other from the lowest bit on.
        (2, [0xE4E4E4E4] * 2, [0, 1, 2, 3] * 8),
        (3, [0x88FAC688, 0xC688FAC6, 0xFAC688FA], [0, 1, 2, 3, 4, 5, 6, 7] * 4),
        (4, [0x76543210, 0xFEDCBA98] * 2, [*range(16), *range(16)]),
        (8, [0x03020100, 0xFFFEFDFC], [0, 1, 2, 3, 252, 253, 254, 255]),
    ],
)
def test_hand_made_words_hold_these_codes(bits: int, words: list[int], codes: list[int]) -> None:
    packed = np.array([words], "<u4")
    assert unpack_stream(packed.view(np.uint8), bits).tolist() == [codes]
    assert pack_codes(np.array([codes], np.uint8), bits).tolist() == [words]


@pytest.mark.parametrize("bits", MLX_BITS)
@given(seed=st.integers(0, 2**32 - 1), rows=st.integers(1, 4), groups=st.integers(1, 4))
def test_every_stream_of_bits_is_read_code_by_code(bits: int, seed: int, rows: int, groups: int) -> None:
    codes = np.random.default_rng(seed).integers(0, 2**bits, (rows, 32 * groups), dtype=np.uint8)
    packed = pack_codes(codes, bits)
    assert packed.shape == (rows, groups * bits)
    assert np.array_equal(unpack_stream(packed.view(np.uint8), bits), codes)


@pytest.mark.parametrize("scale_type", MLX_SCALE_TYPES)
@pytest.mark.parametrize("group_size", MLX_GROUP_SIZES)
@pytest.mark.parametrize("bits", MLX_BITS)
def test_values_equal_those_of_mlx_with_widened_scales(bits: int, group_size: int, scale_type: str) -> None:
    mx = pytest.importorskip("mlx.core")
    values = np.random.default_rng(bits).standard_normal((5, 256), np.float32)
    weight = affine(values, bits, group_size, scale_type)
    scales, biases = (
        mx.array(DenseWeight("s", scale_type, part).to_float32()) for part in (weight.scales, weight.biases)
    )
    expected = mx.dequantize(mx.array(weight.stored), scales, biases, group_size=group_size, bits=bits)
    assert np.array_equal(weight.to_float32(), np.array(expected))


@pytest.mark.parametrize("bits", MLX_BITS)
def test_what_mlx_quantizes_is_read_as_mlx_reads_it(bits: int) -> None:
    mx = pytest.importorskip("mlx.core")
    values = mx.array(np.random.default_rng(1).standard_normal((7, 128), np.float32))
    parts = mx.quantize(values, group_size=32, bits=bits)
    codes, scales, biases = (np.array(part) for part in parts)
    weight = AffineWeight("w", MLX_FORMATS[f"MLX{bits}_G32_F32"], codes, scales, biases)
    assert np.array_equal(weight.to_float32(), np.array(mx.dequantize(*parts, group_size=32, bits=bits)))


def test_a_weight_is_scale_times_code_plus_bias_and_counts_all_its_bytes() -> None:
    weight = affine(np.random.default_rng(2).standard_normal((3, 192), np.float32), 5, 64, "BF16")
    groups = weight.unpack(0, 3)
    assert (weight.shape, weight.format_name) == ((3, 192), "MLX5_G64_BF16")
    assert weight.nbytes == 3 * (192 * 5 // 8 + 3 * 2 * 2)
    assert groups.super_bias is not None
    expected = np.empty((3, 192), np.float32)
    for n, k in np.ndindex(expected.shape):
        scaled = groups.super_scale[n, k // 64] * np.float32(groups.q[n, k])
        expected[n, k] = scaled + groups.super_bias[n, k // 64]
    assert np.array_equal(weight.to_float32(), expected)


def test_rows_are_the_same_through_every_accessor_and_in_a_new_order() -> None:
    values = np.random.default_rng(3).standard_normal((6, 64), np.float32)
    plain = affine(values, 4, 32, "F16")
    order = np.array([5, 0, 3, 1, 2, 4])
    moved = AffineWeight("w", plain.format, plain.stored, plain.scales, plain.biases, order)
    assert np.array_equal(plain.rows(2, 5), plain.to_float32()[2:5])
    assert np.array_equal(moved.to_float32(), plain.to_float32()[order])
    assert np.array_equal(moved.rows(1, 3), plain.to_float32()[order][1:3])


# --- folders ------------------------------------------------------------------------------------------------


def test_settings_of_single_matrices_are_followed(tmp_path: Path) -> None:
    overrides = {
        DOWN: {"bits": 6, "group_size": 128},
        "layers.1.mlp.down_proj": {"bits": 8, "group_size": 32},
        "model.layers.0.self_attn.q_proj": False,
        "language_model.model.layers.1.self_attn.q_proj": True,
        "vision_tower.blocks.0.mlp": {"bits": 3, "group_size": 32},
    }
    written = {**overrides, "model.layers.1.mlp.down_proj": overrides["layers.1.mlp.down_proj"]}
    shape = write_tiny_mlx(tmp_path, tied=False, overrides=written)
    edit_config(tmp_path, quantization={"group_size": 64, "bits": 4, **overrides})
    weights = load_checkpoint(tmp_path).weights
    first, second = weights.layers
    assert first.down.format_name == "MLX6_G128_F16"
    assert second.down.format_name == "MLX8_G32_F16"
    assert first.q.format_name == "F16"
    assert second.q.format_name == weights.embedding.format_name == "MLX4_G64_F16"
    assert weights.head.format_name == "MLX4_G64_F16"
    expected = dense_tensors(shape, seed=0)[f"{DOWN}.weight"]
    assert np.abs(first.down.to_float32() - expected).max() < 0.02


@pytest.mark.parametrize(("bits", "scale_type"), [(2, "F32"), (3, "BF16"), (5, "F16")])
def test_every_matrix_is_near_the_one_that_was_quantized(tmp_path: Path, bits: int, scale_type: str) -> None:
    shape = write_tiny_mlx(tmp_path, "qwen2", bits=bits, group_size=32, scale_type=scale_type)
    checkpoint = load_checkpoint(tmp_path)
    tensors = dense_tensors(shape, seed=0)
    assert checkpoint.weights.head is checkpoint.weights.embedding
    for layer in range(shape.layers):
        ours = checkpoint.weights.layers[layer].up.to_float32()
        theirs = tensors[f"model.layers.{layer}.mlp.up_proj.weight"]
        assert np.abs(ours - theirs).max() < np.ptp(theirs) / 2**bits


def test_tensors_are_listed_as_whole_matrices_and_stay_views_of_the_file(tmp_path: Path) -> None:
    write_tiny_mlx(tmp_path, bits=3, group_size=128)
    checkpoint = load_checkpoint(tmp_path)
    listed = {info.name: info for info in checkpoint.tensors}
    assert listed[f"{DOWN}.weight"].format_name == "MLX3_G128_F16"
    assert listed[f"{DOWN}.weight"].shape == (128, 256)
    assert not any(name.endswith((".scales", ".biases")) for name in listed)
    header = int.from_bytes((tmp_path / "model.safetensors").read_bytes()[:8], "little")
    assert sum(info.nbytes for info in checkpoint.tensors) == checkpoint.file_bytes - 8 - header
    weight = checkpoint.weights.layers[0].down
    assert isinstance(weight, AffineWeight)
    assert not any(part.flags.owndata for part in (weight.stored, weight.scales, weight.biases))


@pytest.mark.parametrize("prefix", ["", "model."])
def test_the_prefix_of_the_body_may_be_missing(tmp_path: Path, prefix: str) -> None:
    shape = write_tiny_mlx(tmp_path)
    tensors = {
        prefix + name.removeprefix("model."): values for name, values in dense_tensors(shape, 0).items()
    }
    stored = quantize_tensors(tensors, {"bits": 4, "group_size": 64}, "F16")
    (tmp_path / "model.safetensors").write_bytes(safetensors_bytes(stored))
    assert load_checkpoint(tmp_path).weights.embedding.format_name == "MLX4_G64_F16"


def test_quantization_config_counts_where_it_stands_alone(tmp_path: Path) -> None:
    write_tiny_mlx(tmp_path)
    edit_config(tmp_path, quantization=None, quantization_config={"group_size": 64, "bits": 4})
    assert load_checkpoint(tmp_path).weights.embedding.format_name == "MLX4_G64_F16"
    edit_config(tmp_path, quantization={"group_size": 64, "bits": 4}, quantization_config={"bits": "no"})
    assert load_checkpoint(tmp_path).weights.embedding.format_name == "MLX4_G64_F16"


# --- refusals -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"bits": 4, "group_size": 32}, r"do not fit 4 bits in groups of 32"),
        ({"bits": 8, "group_size": 64}, r"do not fit 8 bits"),
        ({"bits": 6, "group_size": 64}, r"do not fit 6 bits"),
        ({"bits": 7, "group_size": 64}, r"bits is 7; supported: 2, 3, 4, 5, 6, 8"),
        ({"group_size": 64}, r"bits is missing"),
        ({"bits": 4}, r"group_size is missing"),
        ({"bits": 4, "group_size": 48}, r"group_size is 48; supported: 32, 64, 128"),
        ({"bits": True, "group_size": 64}, r"bits is True"),
        ({"bits": 4, "group_size": 64, "mode": "mxfp4"}, r"mode 'mxfp4' is not supported"),
        ({"bits": 4, "group_size": 64, DOWN: {"mode": "nvfp4"}}, r"down_proj.*mode 'nvfp4'"),
        ({"bits": 4, "group_size": 64, DOWN: 5}, r"down_proj' is 5; true, false or an object"),
        ({"bits": 4, "group_size": 64, DOWN: {"bits": 6}}, r"down_proj': weight .* do not fit 6 bits"),
        ({"bits": 4, "group_size": 64, DOWN: False}, r"says that it is not quantized"),
        (
            {"bits": 4, "group_size": 64, DOWN: True, DOWN.removeprefix("model."): False},
            r"set twice, differently",
        ),
        ({"bits": 4, "group_size": 64, "quant_method": "gptq"}, r"quantized by 'gptq' are not supported"),
        ([4, 64], r"quantization is \[4, 64\]; an object is expected"),
    ],
)
def test_settings_that_can_not_be_right_are_refused(tmp_path: Path, quantization: Any, message: str) -> None:
    write_tiny_mlx(tmp_path)
    edit_config(tmp_path, quantization=quantization)
    with pytest.raises(ModelFileError, match=message):
        load_checkpoint(tmp_path)


def _stored(folder: Path) -> dict[str, tuple[str, NDArray[Any]]]:
    shape = write_tiny_mlx(folder)
    return quantize_tensors(dense_tensors(shape, 0), {"bits": 4, "group_size": 64}, "F16")


@pytest.mark.parametrize(
    ("part", "replacement", "message"),
    [
        ("biases", None, "down_proj.biases is missing"),
        ("weight", None, "down_proj.weight is missing"),
        ("scales", None, "is quantized (U32), but it has no scales beside it"),
        ("scales", ("F16", np.ones((128, 5), np.float16)), "they must be alike"),
        ("scales", ("F32", np.ones((128, 4), np.float32)), "they must be alike"),
        ("scales", ("U8", np.ones((128, 4), np.uint8)), "scales and biases must be F32, F16 or BF16"),
        ("weight", ("U32", np.ones((128, 31), np.uint32)), "do not fit 4 bits"),
        ("weight", ("U32", np.ones((127, 32), np.uint32)), "do not fit 4 bits"),
        ("weight", ("I32", np.ones((128, 32), np.int32)), "has type I32"),
        ("weight", ("U32", np.ones((2, 64, 32), np.uint32)), "has type U32 and shape (2, 64, 32)"),
        ("weight", ("F32", np.ones((128, 32), np.float32)), "a U32 matrix is expected"),
    ],
)
def test_parts_that_do_not_belong_together_are_refused(
    tmp_path: Path, part: str, replacement: tuple[str, NDArray[Any]] | None, message: str
) -> None:
    stored = _stored(tmp_path)
    del stored[f"{DOWN}.{part}"]
    if replacement is not None:
        stored[f"{DOWN}.{part}"] = replacement
    (tmp_path / "model.safetensors").write_bytes(safetensors_bytes(stored))
    with pytest.raises(ModelFileError, match=re.escape(message)):
        load_checkpoint(tmp_path)


def test_a_matrix_of_another_size_than_the_model_s_is_refused(tmp_path: Path) -> None:
    stored = _stored(tmp_path)
    wrong = quantize(np.ones((128, 128), np.float32), 4, 64, "F16")
    stored |= {f"{DOWN}.{part}": value for part, value in wrong.items()}
    (tmp_path / "model.safetensors").write_bytes(safetensors_bytes(stored))
    with pytest.raises(ModelFileError, match=r"has shape \(128, 128\), expected \(128, 256\)"):
        load_checkpoint(tmp_path)


def test_codes_without_a_section_in_the_config_are_refused(tmp_path: Path) -> None:
    write_tiny_mlx(tmp_path)
    edit_config(tmp_path, quantization=None)
    with pytest.raises(ModelFileError, match=r"config\.json has no section quantization"):
        load_checkpoint(tmp_path)


def test_a_tensor_under_both_of_its_names_is_refused(tmp_path: Path) -> None:
    stored = _stored(tmp_path) | {"norm.weight": ("F16", to_dense_type(np.ones(128, np.float32), "F16"))}
    (tmp_path / "model.safetensors").write_bytes(safetensors_bytes(stored))
    with pytest.raises(ModelFileError, match=r"'model\.norm\.weight' and 'norm.weight' are the same"):
        load_checkpoint(tmp_path)


def test_a_quantized_vector_has_no_place(tmp_path: Path) -> None:
    stored = _stored(tmp_path)
    del stored["model.norm.weight"]
    parts = quantize(np.ones((1, 128), np.float32), 4, 64, "F16")
    stored |= {f"model.norm.{part}": value for part, value in parts.items()}
    (tmp_path / "model.safetensors").write_bytes(safetensors_bytes(stored))
    with pytest.raises(ModelFileError, match=r"'model\.norm\.weight' has shape \(1, 128\)"):
        load_checkpoint(tmp_path)
