"""GGUF metadata and tensors to a checkpoint, for the architectures in `ARCHITECTURES`."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mvllm.core.load.assemble import (
    ATTENTION_BIASES,
    HEAD_NORMS,
    MLP_BIASES,
    Dimensions,
    Naming,
    Slots,
    assemble,
)
from mvllm.core.load.contents import Checkpoint, GenerationDefaults, TensorInfo
from mvllm.core.load.gguf import GgufFile, read_gguf
from mvllm.core.load.gguf_text import read_text_assets
from mvllm.core.load.rope import rope_from_gguf
from mvllm.core.load.settings import MAX_CONTEXT, Settings
from mvllm.core.model.spec import LayerSpec, ModelSpec
from mvllm.core.tensor import ModelWeights

ARCHITECTURES: dict[str, Slots] = {
    "llama": Slots(optional=ATTENTION_BIASES | MLP_BIASES | {"o_bias"}),
    "qwen2": Slots(required=ATTENTION_BIASES, optional=frozenset({"o_bias"})),
    "qwen3": Slots(required=HEAD_NORMS, optional=ATTENTION_BIASES),
}

_INTERLEAVED = frozenset({"llama"})
"""Architectures whose q and k rows converters reorder for rotation of adjacent pairs."""

_ROPE_DIVISORS = "rope_freqs.weight"

_STEMS = {
    **{"attention_norm": "attn_norm", "q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_output"},
    **{"mlp_norm": "ffn_norm", "gate": "ffn_gate", "up": "ffn_up", "down": "ffn_down"},
    **{"q_norm": "attn_q_norm", "k_norm": "attn_k_norm"},
}
_NAMING = Naming(
    embedding="token_embd.weight",
    final_norm="output_norm.weight",
    head="output.weight",
    slots={slot: f"blk.{{layer}}.{stem}.weight" for slot, stem in _STEMS.items()}
    | {
        f"{slot}_bias": f"blk.{{layer}}.{_STEMS[slot]}.bias"
        for slot in ("q", "k", "v", "o", "gate", "up", "down")
    },
    harmless=re.compile(r"rope_freqs\.weight|blk\.\d+\.attn_rot_embd\.weight|token_types\.weight"),
)

_LONGEST_SHOWN_ARRAY = 16


def load_gguf_model(path: Path, *, mmap: bool = True) -> Checkpoint:
    """Load a GGUF checkpoint; weights stay views of the file.

    Raises:
        ModelFileError: the file is damaged, or of an architecture or with a feature that is not supported.
    """
    file = read_gguf(path, mmap=mmap)
    metadata = Settings(str(path), file.metadata)
    architecture = metadata.text("general.architecture")
    if architecture not in ARCHITECTURES:
        raise metadata.error(
            f"unsupported architecture {architecture!r}; supported: {', '.join(ARCHITECTURES)}"
        )
    settings = Settings(str(path), file.metadata, prefix=f"{architecture}.")
    _refuse_unsupported(metadata, settings)
    dimensions = _dimensions(settings, file)
    weights = assemble(
        file.tensors,
        _NAMING,
        dimensions,
        ARCHITECTURES[architecture],
        tied=None,
        row_orders=_row_orders(dimensions) if architecture in _INTERLEAVED else {},
    )
    return Checkpoint(
        path=path,
        format="gguf",
        spec=_spec(architecture, settings, dimensions, weights, file),
        weights=weights,
        text=read_text_assets(metadata, dimensions.vocab_size),
        generation=_generation_defaults(metadata),
        file_bytes=file.file_bytes,
        metadata=_light(file.metadata),
        tensors=tuple(
            TensorInfo(tensor.name, tensor.format_name, tensor.shape, tensor.nbytes)
            for tensor in file.tensors.values()
        ),
    )


def _refuse_unsupported(metadata: Settings, settings: Settings) -> None:
    """Fail on settings that change the arithmetic in ways this loader does not know."""
    if (metadata.integer("split.count", minimum=0) or 1) > 1:
        raise metadata.error(
            "models split over several GGUF files are not supported; merge them into one file"
        )
    if settings.integer("expert_count", minimum=0):
        raise settings.error("mixtures of experts are not supported")
    window = settings.integer("attention.sliding_window", minimum=0)
    if window and window < settings.require_integer("context_length"):
        raise settings.error(
            f"{settings.name('attention.sliding_window')} is {window}; windows are not supported here"
        )


def _dimensions(settings: Settings, file: GgufFile) -> Dimensions:
    hidden_size = settings.require_integer("embedding_length")
    num_heads = settings.require_integer("attention.head_count")
    embedding = file.tensors.get(_NAMING.embedding)
    if embedding is None:
        raise settings.error(f"tensor {_NAMING.embedding!r} is missing")
    return Dimensions(
        where=settings.where,
        vocab_size=embedding.shape[0],
        hidden_size=hidden_size,
        intermediate_size=settings.require_integer("feed_forward_length"),
        num_layers=settings.require_integer("block_count"),
        num_heads=num_heads,
        num_kv_heads=_num_kv_heads(settings, num_heads),
        head_dim=_head_dim(settings, hidden_size, num_heads),
    )


def _num_kv_heads(settings: Settings, num_heads: int) -> int:
    """One number, or an array with the same number for every layer."""
    key = "attention.head_count_kv"
    value = settings.get(key)
    if not isinstance(value, np.ndarray):
        return settings.integer(key) or num_heads
    numbers = set(value.tolist())
    if len(numbers) != 1:
        raise settings.error(f"{settings.name(key)} differs between layers: {sorted(numbers)[:8]}")
    return Settings(settings.where, {key: numbers.pop()}).require_integer(key)


def _head_dim(settings: Settings, hidden_size: int, num_heads: int) -> int:
    """The explicit key length wins; hidden size over heads is only the default."""
    key_length = settings.integer("attention.key_length")
    value_length = settings.integer("attention.value_length")
    default = hidden_size // num_heads
    if (key_length or default) != (value_length or key_length or default):
        raise settings.error(
            f"keys of length {key_length or default} and values of length {value_length} differ"
        )
    if key_length is None and hidden_size % num_heads:
        raise settings.error(
            f"{num_heads} heads don't divide the hidden size {hidden_size}, and no key length is given"
        )
    head_dim = key_length or default
    rotated = settings.integer("rope.dimension_count")
    if rotated is not None and rotated != head_dim:
        raise settings.error(f"rotary embedding of {rotated} out of {head_dim} dimensions is not supported")
    return head_dim


def _row_orders(dimensions: Dimensions) -> dict[str, NDArray[np.intp]]:
    q_order = interleaved_row_order(dimensions.num_heads, dimensions.head_dim)
    k_order = interleaved_row_order(dimensions.num_kv_heads, dimensions.head_dim)
    return {"q": q_order, "q_bias": q_order, "k": k_order, "k_bias": k_order}


def interleaved_row_order(num_heads: int, head_dim: int) -> NDArray[np.intp]:
    """Where row (head, half, i) lies in a file that stores the rows of a head as (i, half).

    Converters of llama models reorder q and k so that rotation pairs are neighbours; the decoder pairs
    dimension i with i + head_dim / 2.
    """
    rows = np.arange(num_heads * head_dim, dtype=np.intp).reshape(num_heads, head_dim // 2, 2)
    return rows.swapaxes(1, 2).reshape(-1)


def _spec(
    architecture: str, settings: Settings, dimensions: Dimensions, weights: ModelWeights, file: GgufFile
) -> ModelSpec:
    context_length = settings.require_integer("context_length", maximum=MAX_CONTEXT)
    divisors = _rope_divisors(settings, dimensions.head_dim, file)
    return ModelSpec(
        architecture=architecture,
        vocab_size=dimensions.vocab_size,
        hidden_size=dimensions.hidden_size,
        intermediate_size=dimensions.intermediate_size,
        num_heads=dimensions.num_heads,
        num_kv_heads=dimensions.num_kv_heads,
        head_dim=dimensions.head_dim,
        context_length=context_length,
        norm_eps=settings.require_number("attention.layer_norm_rms_epsilon"),
        ropes=(rope_from_gguf(settings, dimensions.head_dim, context_length, divisors),),
        layers=(LayerSpec(),) * dimensions.num_layers,
        attention_scale=settings.number("attention.scale") or 1.0 / math.sqrt(dimensions.head_dim),
        tied_head=weights.head is weights.embedding,
    )


def _rope_divisors(settings: Settings, head_dim: int, file: GgufFile) -> NDArray[np.float32] | None:
    tensor = file.tensors.get(_ROPE_DIVISORS)
    if tensor is None:
        return None
    if tensor.shape != (head_dim // 2,):
        raise settings.error(
            f"tensor {_ROPE_DIVISORS!r} has shape {tensor.shape}, expected {(head_dim // 2,)}"
        )
    return tensor.to_float32()


def _generation_defaults(metadata: Settings) -> GenerationDefaults:
    return GenerationDefaults(
        temperature=metadata.number("general.sampling.temp", minimum=-1e-30),
        top_p=metadata.number("general.sampling.top_p"),
        top_k=metadata.integer("general.sampling.top_k", minimum=0),
        repetition_penalty=metadata.number("general.sampling.penalty_repeat"),
    )


def _light(metadata: Mapping[str, object]) -> dict[str, object]:
    """Metadata for display: long arrays become a description, short ones lists."""
    light: dict[str, object] = {}
    for key, value in metadata.items():
        if not isinstance(value, tuple | np.ndarray):
            light[key] = value
        elif len(value) > _LONGEST_SHOWN_ARRAY:
            light[key] = f"array of {len(value)}"
        else:
            light[key] = list(value) if isinstance(value, tuple) else value.tolist()
    return light
