"""A checkpoint's exact weights in float32: as host weights for mvllm, as a safetensors folder for mlx-lm."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mvllm.core.errors import ConfigError
from mvllm.core.load.contents import Checkpoint
from mvllm.core.load.weights import DenseWeight
from mvllm.core.model.spec import ModelSpec
from mvllm.core.tensor import LayerWeights, ModelWeights, Weight

_LAYER_NAMES = {
    "attention_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


def widened(weights: ModelWeights) -> ModelWeights:
    """The same values, every weight dense float32. A tied head stays tied."""
    done: dict[int, DenseWeight] = {}

    def widen(weight: Weight) -> DenseWeight:
        if id(weight) not in done:
            done[id(weight)] = DenseWeight(weight.name, "F32", weight.to_float32())
        return done[id(weight)]

    def widen_layer(layer: LayerWeights) -> LayerWeights:
        present = {slot: weight for slot, weight in vars(layer).items() if weight is not None}
        return LayerWeights(**{slot: widen(weight) for slot, weight in present.items()})

    return replace(
        weights,
        embedding=widen(weights.embedding),
        final_norm=widen(weights.final_norm),
        head=widen(weights.head),
        layers=tuple(map(widen_layer, weights.layers)),
    )


def write_folder(folder: Path, checkpoint: Checkpoint, weights: ModelWeights) -> None:
    """Write `widened` weights of a plain llama model as config.json and model.safetensors; no tokenizer.

    Raises:
        ConfigError: the model has something that this writer doesn't know.
    """
    config = _config(checkpoint.spec)
    tensors = {
        "model.embed_tokens.weight": weights.embedding,
        "model.norm.weight": weights.final_norm,
        **({} if checkpoint.spec.tied_head else {"lm_head.weight": weights.head}),
    }
    for index, layer in enumerate(weights.layers):
        present = {slot: weight for slot, weight in vars(layer).items() if weight is not None}
        if not present.keys() <= _LAYER_NAMES.keys():
            raise ConfigError(f"only plain llama models can be written; this one has {sorted(present)}")
        tensors |= {f"model.layers.{index}.{_LAYER_NAMES[slot]}.weight": w for slot, w in present.items()}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    arrays = {name: mx.array(weight.to_float32()) for name, weight in tensors.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), arrays, metadata={"format": "mlx"})


def _config(spec: ModelSpec) -> dict[str, Any]:
    """config.json of the model.

    Raises:
        ConfigError: rope is scaled, or differs between layers, or layers have windows.
    """
    frequencies = np.array(spec.ropes[0].inverse_frequencies)
    theta = float(frequencies[1] ** (-spec.head_dim / 2))
    plain = theta ** (-np.arange(0, spec.head_dim, 2) / spec.head_dim)
    if (
        spec.architecture != "llama"
        or len(spec.ropes) > 1
        or spec.ropes[0].magnitude != 1
        or not np.allclose(frequencies, plain, rtol=1e-6)
        or any(layer.window is not None for layer in spec.layers)
    ):
        raise ConfigError("only llama models without rope scaling and windows can be written")
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": len(spec.layers),
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "vocab_size": spec.vocab_size,
        "max_position_embeddings": spec.context_length,
        "rms_norm_eps": spec.norm_eps,
        "rope_theta": theta,
        "tie_word_embeddings": spec.tied_head,
        "torch_dtype": "float32",
    }
