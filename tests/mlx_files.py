"""Tiny checkpoints in MLX's quantized form, written with NumPy alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.model_files import safetensors_bytes, to_dense_type
from tests.tiny_models import TinyShape, dense_tensors, tiny_shape, write_tiny_hf

Stored = dict[str, tuple[str, NDArray[Any]]]
"""(dtype name, stored values) by tensor name."""

_TINY = {"hidden": 128, "intermediate": 256, "head_dim": 32}
"""Sizes that groups of 128 divide."""


def pack_codes(codes: NDArray[np.uint8], bits: int) -> NDArray[np.uint32]:
    """Codes [N, K] -> uint32[N, K * bits / 32]: each row one stream of bits, lowest first."""
    stream = np.unpackbits(codes[..., None], axis=-1, count=bits, bitorder="little")
    packed = np.packbits(stream.reshape(len(codes), -1), axis=-1, bitorder="little")
    return packed.view("<u4")


def quantize(values: NDArray[np.float32], bits: int, group_size: int, scale_type: str) -> Stored:
    """Nearest codes between each group's extremes, as the parts "weight", "scales" and "biases"."""
    groups = values.reshape(len(values), -1, group_size)
    low, high = groups.min(axis=-1), groups.max(axis=-1)
    scales = to_dense_type((high - low) / np.float32(2**bits - 1), scale_type)
    biases = to_dense_type(low, scale_type)
    steps = (groups - low[..., None]) / np.maximum(high - low, np.float32(1e-9))[..., None] * (2**bits - 1)
    codes = np.rint(steps).astype(np.uint8).reshape(values.shape)
    return {
        "weight": ("U32", pack_codes(codes, bits)),
        "scales": (scale_type, scales),
        "biases": (scale_type, biases),
    }


def quantize_tensors(
    tensors: Mapping[str, NDArray[np.float32]], quantization: Mapping[str, Any], scale_type: str
) -> Stored:
    """Dense tensors as a folder with this `quantization` section in its config holds them."""
    stored: Stored = {}
    for name, values in tensors.items():
        matrix = name.removesuffix(".weight")
        settings = quantization.get(matrix, True)
        if values.ndim != 2 or settings is False:
            stored[name] = (scale_type, to_dense_type(values, scale_type))
            continue
        chosen = {**quantization, **(settings if isinstance(settings, dict) else {})}
        parts = quantize(values, chosen["bits"], chosen["group_size"], scale_type)
        stored |= {f"{matrix}.{part}": value for part, value in parts.items()}
    return stored


def write_tiny_mlx(
    folder: Path,
    architecture: str = "llama",
    *,
    bits: int = 4,
    group_size: int = 64,
    scale_type: str = "F16",
    overrides: Mapping[str, Any] | None = None,
    seed: int = 0,
    config: Mapping[str, Any] | None = None,
    **sizes: Any,
) -> TinyShape:
    """Write a quantized checkpoint of a tiny random model.

    Args:
        overrides: settings of single matrices, as in config.json.
        config: entries that replace or, with value None, remove the usual ones of config.json.
        sizes: fields of `TinyShape`.
    """
    sizes = _TINY | sizes
    quantization = {"group_size": group_size, "bits": bits, **(overrides or {})}
    write_tiny_hf(
        folder, architecture, seed=seed, config={"quantization": quantization, **(config or {})}, **sizes
    )
    shape = tiny_shape(architecture, **sizes)
    stored = quantize_tensors(dense_tensors(shape, seed), quantization, scale_type)
    (folder / "model.safetensors").write_bytes(safetensors_bytes(stored))
    return shape


def edit_config(folder: Path, **values: Any) -> None:
    """Replace entries of a folder's config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
