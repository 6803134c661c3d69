"""`config.json` of a Hugging Face checkpoint to sizes and a `ModelSpec`, in both spellings.

Classic (transformers 4): rope_theta, rope_scaling. Version 5: rope_parameters, layer_types. Sizes must be
there; what has an obvious default (heads, biases, tied head, rotary base) may be absent.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from mvllm.core.load.assemble import ATTENTION_BIASES, HEAD_NORMS, MLP_BIASES, Dimensions, Slots
from mvllm.core.load.mlx_quantization import Quantization, read_quantization
from mvllm.core.load.rope import rope_from_config
from mvllm.core.load.settings import MAX_CONTEXT, Settings
from mvllm.core.model.spec import Activation, LayerSpec, ModelSpec

_ATTENTION_BIASES_WITH_OUTPUT = ATTENTION_BIASES | {"o_bias"}


@dataclass(frozen=True)
class _ModelType:
    """What differs between model types beyond their sizes."""

    slots: frozenset[str] = frozenset()  # beyond `assemble.ALWAYS`
    attention_bias_option: bool = False  # config.attention_bias adds biases to q, k, v, o
    mlp_bias_option: bool = False  # config.mlp_bias adds biases to gate, up, down
    window_needs_switch: bool = False  # sliding_window counts only with use_sliding_window
    default_head_dim: int | None = None  # None: hidden size over heads


MODEL_TYPES = {
    "llama": _ModelType(attention_bias_option=True, mlp_bias_option=True),
    "mistral": _ModelType(),
    "qwen2": _ModelType(slots=ATTENTION_BIASES, window_needs_switch=True),
    "qwen3": _ModelType(
        slots=HEAD_NORMS, attention_bias_option=True, window_needs_switch=True, default_head_dim=128
    ),
}

_ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


@dataclass(frozen=True)
class HfConfig:
    """A config.json, understood."""

    dimensions: Dimensions
    slots: Slots
    tied: bool
    spec: ModelSpec
    quantization: Quantization | None


def read_config(config: Settings) -> HfConfig:
    """Sizes, tensors to expect and specification.

    Raises:
        ModelFileError: the model type or a feature is not supported, or a value is missing or unusable.
    """
    name = config.text("model_type")
    if name not in MODEL_TYPES:
        raise config.error(f"unsupported model_type {name!r}; supported: {', '.join(MODEL_TYPES)}")
    model_type = MODEL_TYPES[name]
    dimensions = _dimensions(config, model_type)
    tied = bool(config.flag("tie_word_embeddings"))
    context_length = config.require_integer("max_position_embeddings", maximum=MAX_CONTEXT)
    spec = ModelSpec(
        architecture=name,
        vocab_size=dimensions.vocab_size,
        hidden_size=dimensions.hidden_size,
        intermediate_size=dimensions.intermediate_size,
        num_heads=dimensions.num_heads,
        num_kv_heads=dimensions.num_kv_heads,
        head_dim=dimensions.head_dim,
        context_length=context_length,
        norm_eps=config.number("rms_norm_eps") or 1e-6,
        ropes=(rope_from_config(config, dimensions.head_dim, context_length),),
        layers=_layers(config, model_type, name, dimensions.num_layers),
        attention_scale=1.0 / math.sqrt(dimensions.head_dim),
        activation=_activation(config),
        tied_head=tied,
    )
    slots = Slots(required=_slots(config, model_type))
    return HfConfig(dimensions, slots, tied, spec, read_quantization(config))


def _dimensions(config: Settings, model_type: _ModelType) -> Dimensions:
    hidden_size = config.require_integer("hidden_size")
    num_heads = config.require_integer("num_attention_heads")
    head_dim = config.integer("head_dim") or model_type.default_head_dim
    if head_dim is None and hidden_size % num_heads:
        raise config.error(
            f"{num_heads} heads don't divide the hidden size {hidden_size}, and head_dim is not given"
        )
    return Dimensions(
        where=config.where,
        vocab_size=config.require_integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=config.require_integer("intermediate_size"),
        num_layers=config.require_integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=config.integer("num_key_value_heads") or num_heads,
        head_dim=head_dim or hidden_size // num_heads,
    )


def _slots(config: Settings, model_type: _ModelType) -> frozenset[str]:
    slots = model_type.slots
    if model_type.attention_bias_option and config.flag("attention_bias"):
        slots |= _ATTENTION_BIASES_WITH_OUTPUT
    if model_type.mlp_bias_option and config.flag("mlp_bias"):
        slots |= MLP_BIASES
    return slots


def _activation(config: Settings) -> Activation:
    name = config.text("hidden_act") or "silu"
    if name not in _ACTIVATIONS:
        raise config.error(f"unsupported hidden_act {name!r}; supported: {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def _layers(config: Settings, model_type: _ModelType, name: str, num_layers: int) -> tuple[LayerSpec, ...]:
    """Windows by layer: from layer_types if given, otherwise by the model type's own rule."""
    window = config.integer("sliding_window")
    if model_type.window_needs_switch and not config.flag("use_sliding_window"):
        window = None
    kinds = config.get("layer_types")
    if kinds is not None:
        return _layers_of_types(config, kinds, window, num_layers)
    if name == "llama" or window is None:
        return (LayerSpec(),) * num_layers
    first = 0
    if model_type.window_needs_switch:
        first = config.integer("max_window_layers", minimum=0) or 0
    return tuple(LayerSpec(window if index >= first else None) for index in range(num_layers))


def _layers_of_types(
    config: Settings, kinds: object, window: int | None, num_layers: int
) -> tuple[LayerSpec, ...]:
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise config.error(f"layer_types must list {num_layers} layers")
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise config.error(f"unsupported layer type {str(kind)[:80]!r}")
        if kind == "sliding_attention" and window is None:
            raise config.error(
                "layer_types has sliding_attention, but sliding_window is not set or switched off"
            )
    return tuple(LayerSpec(window if kind == "sliding_attention" else None) for kind in kinds)
