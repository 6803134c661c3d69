"""Small random checkpoints made on the fly, in GGUF and in Hugging Face form. Seeded; well under 1 MB.

Dense types hold the same float32 values in both forms for the same seed and sizes (llama's q and k rows
interleaved in GGUF, as converters store them). Quantized types hold random blocks of a like spread.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mvllm.core.load.quantized import QUANT_FORMATS
from tests.model_files import (
    GgufTensor,
    gguf_bytes,
    random_blocks,
    safetensors_bytes,
    to_dense_type,
)

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BOS_ID, EOS_ID = 0, 2
VOCAB_SIZE = 320


@dataclass(frozen=True)
class TinyShape:
    """Sizes of a tiny model; the defaults suit every type but the K-quants, which need rows of 256."""

    architecture: str = "llama"  # or "qwen2"
    hidden: int = 64
    intermediate: int = 128
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    vocab: int = VOCAB_SIZE
    context: int = 512
    tied: bool = True
    rope_base: float = 10_000.0

    def matrices(self) -> dict[str, tuple[int, int]]:
        """Shapes of a layer's matrices by their Hugging Face names."""
        q_width, kv_width = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "self_attn.q_proj": (q_width, self.hidden),
            "self_attn.k_proj": (kv_width, self.hidden),
            "self_attn.v_proj": (kv_width, self.hidden),
            "self_attn.o_proj": (self.hidden, q_width),
            "mlp.gate_proj": (self.intermediate, self.hidden),
            "mlp.up_proj": (self.intermediate, self.hidden),
            "mlp.down_proj": (self.hidden, self.intermediate),
        }


def tiny_shape(architecture: str = "llama", tensor_type: str = "F32", **sizes: Any) -> TinyShape:
    """The default shape for a tensor type, with `sizes` replacing fields."""
    if tensor_type.endswith("_K"):
        sizes = {"hidden": 256, "intermediate": 256, "head_dim": 64, "layers": 1, **sizes}
    return TinyShape(architecture=architecture, **sizes)


def write_tiny_gguf(
    path: Path,
    architecture: str = "llama",
    tensor_type: str = "Q4_0",
    *,
    seed: int = 0,
    metadata: Mapping[str, Any] | None = None,
    **sizes: Any,
) -> TinyShape:
    """Write a GGUF checkpoint whose matrices have `tensor_type`.

    Args:
        metadata: entries that replace or, with value None, remove the usual ones.
        sizes: fields of `TinyShape`.
    """
    shape = tiny_shape(architecture, tensor_type, **sizes)
    entries = gguf_metadata(shape) | dict(metadata or {})
    kept = {key: value for key, value in entries.items() if value is not None}
    path.write_bytes(gguf_bytes(kept, gguf_tensors(shape, tensor_type, seed)))
    return shape


def write_tiny_hf(
    folder: Path,
    architecture: str = "llama",
    *,
    seed: int = 0,
    dtype: str = "F32",
    shards: int = 1,
    config: Mapping[str, Any] | None = None,
    **sizes: Any,
) -> TinyShape:
    """Write a folder with config.json, safetensors, tokenizer and generation_config.json.

    Args:
        config: entries that replace or, with value None, remove the usual ones of config.json.
        sizes: fields of `TinyShape`.
    """
    shape = tiny_shape(architecture, **sizes)
    folder.mkdir(parents=True, exist_ok=True)
    entries = hf_config(shape) | dict(config or {})
    kept = {key: value for key, value in entries.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(kept))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [EOS_ID, BOS_ID]}))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json(shape.vocab)))
    tokenizer_config = {"eos_token": "<|im_end|>", "bos_token": None, "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    _write_shards(folder, dense_tensors(shape, seed), dtype, shards)
    return shape


def dense_tensors(shape: TinyShape, seed: int) -> dict[str, NDArray[np.float32]]:
    """All tensors in float32, by their Hugging Face names, rows in Hugging Face order."""
    rng = np.random.default_rng(seed)

    def matrix(rows: int, inputs: int) -> NDArray[np.float32]:
        return rng.standard_normal((rows, inputs), np.float32) / np.float32(np.sqrt(inputs))

    def gain() -> NDArray[np.float32]:
        return 1.0 + 0.1 * rng.standard_normal(shape.hidden, np.float32)

    tensors = {"model.embed_tokens.weight": matrix(shape.vocab, shape.hidden), "model.norm.weight": gain()}
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}."
        tensors[f"{prefix}input_layernorm.weight"] = gain()
        tensors[f"{prefix}post_attention_layernorm.weight"] = gain()
        for name, (rows, inputs) in shape.matrices().items():
            tensors[f"{prefix}{name}.weight"] = matrix(rows, inputs)
            if shape.architecture == "qwen2" and name[-6:-5] in "qkv" and "attn" in name:
                tensors[f"{prefix}{name}.bias"] = 0.1 * rng.standard_normal(rows, np.float32)
    if not shape.tied:
        tensors["lm_head.weight"] = matrix(shape.vocab, shape.hidden)
    return tensors


# --- vocabulary ---------------------------------------------------------------------------------------------


def byte_characters() -> list[str]:
    """The printable character that byte-level BPE uses for each byte value (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def vocabulary(size: int = VOCAB_SIZE) -> tuple[list[str], list[str]]:
    """(tokens, merges): special tokens, bytes, then two-letter merges."""
    base = [*SPECIAL_TOKENS, *byte_characters()]
    pairs = list(product("etaoinsh", repeat=2))[: size - len(base)]
    fillers = [f"<|unused_{index}|>" for index in range(size - len(base) - len(pairs))]
    return [*base, *(a + b for a, b in pairs), *fillers], [f"{a} {b}" for a, b in pairs]


def tokenizer_json(size: int = VOCAB_SIZE) -> dict[str, Any]:
    """A byte-level BPE tokenizer in the form of the `tokenizers` library."""
    tokens, merges = vocabulary(size)
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": id, "content": text, **flags} for id, text in enumerate(SPECIAL_TOKENS)],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {token: id for id, token in enumerate(tokens)},
            "merges": merges,
        },
    }


# --- GGUF ---------------------------------------------------------------------------------------------------


def gguf_metadata(shape: TinyShape) -> dict[str, Any]:
    """Metadata as converters write it."""
    tokens, merges = vocabulary(shape.vocab)
    kinds = [3 if id < len(SPECIAL_TOKENS) else 1 for id in range(shape.vocab)]
    sizes = {
        "context_length": shape.context,
        "block_count": shape.layers,
        "embedding_length": shape.hidden,
        "feed_forward_length": shape.intermediate,
        "attention.head_count": shape.heads,
        "attention.head_count_kv": shape.kv_heads,
        "attention.key_length": shape.head_dim,
        "attention.value_length": shape.head_dim,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": shape.rope_base,
    }
    return {
        "general.architecture": shape.architecture,
        "general.name": "tiny",
        **{f"{shape.architecture}.{key}": value for key, value in sizes.items()},
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array(kinds, np.int32),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": BOS_ID,
        "tokenizer.ggml.eos_token_id": EOS_ID,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }


_GGUF_STEMS = {
    **{"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v"},
    **{"self_attn.o_proj": "attn_output", "input_layernorm": "attn_norm"},
    **{"mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"},
    **{"post_attention_layernorm": "ffn_norm"},
}
_GGUF_NAMES = {
    **{"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"},
    **{"lm_head.weight": "output.weight"},
}


def gguf_tensors(shape: TinyShape, tensor_type: str, seed: int) -> dict[str, GgufTensor]:
    """Tensors under their GGUF names; vectors are float32."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, values in dense_tensors(shape, seed).items():
        if shape.architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            values = interleave_rows(values, shape.head_dim)
        kind = tensor_type if values.ndim == 2 else "F32"
        if kind in QUANT_FORMATS:
            stored = random_blocks(QUANT_FORMATS[kind], values.shape, rng)
        else:
            stored = to_dense_type(values, kind)
        tensors[_gguf_name(name)] = (kind, stored, values.shape)
    return tensors


def interleave_rows(values: NDArray[Any], head_dim: int) -> NDArray[Any]:
    """Rows of each head from (half, i) to (i, half)."""
    halves = values.reshape(-1, 2, head_dim // 2, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)


def _gguf_name(name: str) -> str:
    if name in _GGUF_NAMES:
        return _GGUF_NAMES[name]
    layer, stem = name.removeprefix("model.layers.").split(".", 1)
    stem, suffix = stem.rsplit(".", 1)
    return f"blk.{layer}.{_GGUF_STEMS[stem]}.{suffix}"


# --- safetensors --------------------------------------------------------------------------------------------


def hf_config(shape: TinyShape) -> dict[str, Any]:
    """config.json in the classic spelling."""
    return {
        "model_type": shape.architecture,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab,
        "max_position_embeddings": shape.context,
        "rms_norm_eps": 1e-5,
        "rope_theta": shape.rope_base,
        "hidden_act": "silu",
        "tie_word_embeddings": shape.tied,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
    }


def shard_name(index: int, shards: int) -> str:
    return "model.safetensors" if shards == 1 else f"model-{index + 1:05}-of-{shards:05}.safetensors"


def _write_shards(folder: Path, tensors: Mapping[str, NDArray[np.float32]], dtype: str, shards: int) -> None:
    weight_map: dict[str, str] = {}
    for index in range(shards):
        part = dict(list(tensors.items())[index::shards])
        stored = {name: (dtype, to_dense_type(values, dtype)) for name, values in part.items()}
        (folder / shard_name(index, shards)).write_bytes(safetensors_bytes(stored))
        weight_map |= dict.fromkeys(part, shard_name(index, shards))
    if shards > 1:
        index_text = json.dumps({"metadata": {}, "weight_map": weight_map})
        (folder / "model.safetensors.index.json").write_text(index_text)
