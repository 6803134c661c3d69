"""Writers of GGUF and safetensors bytes, as small as tests need them."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mvllm.core.load.quantized import QuantFormat

TYPE_CODES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8}
TYPE_CODES |= {"Q4_K": 12, "Q5_K": 13, "Q6_K": 14, "BF16": 30}


GgufTensor = tuple[str, NDArray[Any], tuple[int, ...]]
"""(type, stored bytes or numbers, shape as (out, in))."""


def gguf_bytes(
    metadata: Mapping[str, Any], tensors: Mapping[str, GgufTensor], *, alignment: int = 32
) -> bytes:
    """A GGUF version 3 file."""
    header = bytearray(b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata)))
    for key, value in metadata.items():
        header += gguf_string(key) + gguf_value(value)
    body = bytearray()
    for name, (kind, stored, shape) in tensors.items():
        header += gguf_string(name) + struct.pack("<I", len(shape))
        header += b"".join(struct.pack("<Q", size) for size in reversed(shape))
        header += struct.pack("<IQ", TYPE_CODES[kind], len(body))
        body += stored.tobytes()
        body += bytes(-len(body) % alignment)
    return bytes(header + bytes(-len(header) % alignment) + body)


def safetensors_bytes(tensors: Mapping[str, tuple[str, NDArray[Any]]]) -> bytes:
    """A safetensors file of (dtype name, stored values) by name."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    body = bytearray()
    for name, (dtype, values) in tensors.items():
        start = len(body)
        body += values.tobytes()
        header[name] = {"dtype": dtype, "shape": list(values.shape), "data_offsets": [start, len(body)]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + bytes(body)


def to_dense_type(values: NDArray[np.float32], kind: str) -> NDArray[Any]:
    """Float32 to the stored form of F32, F16 or BF16 (cut, not rounded)."""
    if kind == "BF16":
        return (values.view(np.uint32) >> 16).astype(np.uint16)
    return values.astype({"F32": np.float32, "F16": np.float16}[kind])


def random_blocks(format: QuantFormat, shape: tuple[int, ...], rng: np.random.Generator) -> NDArray[np.uint8]:
    """Random blocks uint8[rows, bytes per row] whose weights spread around zero as 1 / sqrt(inputs)."""
    rows, inputs = shape
    blocks = inputs // format.block_size
    raw = rng.integers(0, 256, (rows, blocks, format.block_bytes), dtype=np.uint8)
    top_sub_scale = {"Q4_K": 32.0, "Q5_K": 32.0, "Q6_K": 64.0}.get(format.name, 1.0)
    scale = 3.5 / 2**format.bits / np.sqrt(inputs) / top_sub_scale
    factors = (scale * rng.uniform(0.5, 1.5, (rows, blocks))).astype(np.float16)
    middle = np.float16(2 ** (format.bits - 1) - 0.5)

    def put(offset: int, values: NDArray[np.float16]) -> None:
        raw[..., offset : offset + 2] = values[..., None].view(np.uint8)

    if format.name == "Q6_K":
        put(208, factors)
        return raw.reshape(rows, -1)
    put(0, factors)
    if format.name in ("Q4_1", "Q5_1"):
        put(2, -middle * factors)
    if format.name in ("Q4_K", "Q5_K"):
        put(2, middle * factors)
        raw[..., 8:12] = raw[..., 4:8]  # mins equal to scales centre every group
        raw[..., 12:16] = (raw[..., 12:16] & 0x0F) * 0x11
    return raw.reshape(rows, -1)


def gguf_string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def gguf_value(value: Any) -> bytes:
    """Type code and value: whole numbers as uint32, floats as float32, lists of strings, numeric arrays."""
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + gguf_string(value)
    if isinstance(value, np.ndarray):
        code = {"int32": 5, "uint32": 4, "float32": 6}[value.dtype.name]
        return struct.pack("<IIQ", 9, code, len(value)) + value.tobytes()
    return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(gguf_string, value))
