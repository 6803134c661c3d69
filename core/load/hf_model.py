"""A folder with config.json and safetensors files to a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from mvllm.core.errors import ModelFileError
from mvllm.core.load.assemble import Naming, assemble
from mvllm.core.load.contents import Checkpoint, TensorInfo
from mvllm.core.load.hf_config import read_config
from mvllm.core.load.hf_text import generation_defaults, read_generation_config, read_text_assets
from mvllm.core.load.json_files import read_json_object
from mvllm.core.load.mlx_quantization import Quantization, join_quantized
from mvllm.core.load.safetensors import (
    PackedCodes,
    SafeTensor,
    UnsupportedTensor,
    find_weight_files,
    read_shards,
)
from mvllm.core.load.settings import Settings
from mvllm.core.load.weights import DENSE_DTYPES, AffineWeight, HostWeight

_LINEARS = {
    **{"q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj"},
    **{"gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj"},
}
_NORMS = {
    **{"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"},
    **{"q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm"},
}
_NAMING = Naming(
    embedding="model.embed_tokens.weight",
    final_norm="model.norm.weight",
    head="lm_head.weight",
    slots={slot: f"model.layers.{{layer}}.{stem}.weight" for slot, stem in (_LINEARS | _NORMS).items()}
    | {f"{slot}_bias": f"model.layers.{{layer}}.{stem}.bias" for slot, stem in _LINEARS.items()},
    harmless=re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"),
)


_BODY = ("embed_tokens.", "layers.", "norm.")
"""Tensors of the body of a model, whose prefix "model." some tools leave away."""


def load_hf_model(folder: Path, *, mmap: bool = True) -> Checkpoint:
    """Load a checkpoint in Hugging Face form; weights stay views of the files.

    Raises:
        ModelFileError: a file is missing or damaged, or the model has a feature that is not supported.
    """
    values = read_json_object(folder / "config.json")
    if values is None:
        raise ModelFileError(
            f"{folder}: config.json is missing; a model folder has it beside .safetensors files"
        )
    settings = Settings(str(folder / "config.json"), values)
    config = read_config(settings)
    files = find_weight_files(folder)
    tensors = _named(folder, read_shards(files, mmap=mmap), config.quantization)
    weights = assemble(
        _only_weights(folder, tensors),
        _NAMING,
        config.dimensions,
        config.slots,
        tied=config.tied,
        row_orders={},
    )
    generation = read_generation_config(folder)
    return Checkpoint(
        path=folder,
        format="safetensors",
        spec=config.spec,
        weights=weights,
        text=read_text_assets(folder, settings, generation, config.dimensions.vocab_size),
        generation=generation_defaults(generation),
        file_bytes=sum(file.stat().st_size for file in files),
        metadata=values,
        tensors=tuple(
            TensorInfo(tensor.name, tensor.format_name, tensor.shape, tensor.nbytes)
            for tensor in tensors.values()
        ),
    )


def _named(
    folder: Path, tensors: Mapping[str, SafeTensor], quantization: Quantization | None
) -> dict[str, SafeTensor | AffineWeight]:
    """The tensors under the names of `_NAMING`, each quantized matrix as one."""
    renamed: dict[str, SafeTensor] = {}
    for name, tensor in tensors.items():
        known = f"model.{name}" if name.startswith(_BODY) else name
        if known in renamed:
            raise ModelFileError(
                f"{folder}: tensors {known!r} and {known.removeprefix('model.')!r} are the same"
            )
        renamed[known] = replace(tensor, name=known)
    if quantization is None:
        return dict(renamed)
    return join_quantized(str(folder), renamed, quantization)


def _only_weights(folder: Path, tensors: Mapping[str, SafeTensor | AffineWeight]) -> dict[str, HostWeight]:
    """The tensors of supported types; one of another type must be known to be harmless."""
    weights: dict[str, HostWeight] = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, PackedCodes):
            raise ModelFileError(
                f"{folder}: tensor {name!r} is quantized (U32), but it has no scales beside it, or "
                "config.json has no section quantization"
            )
        if not isinstance(tensor, UnsupportedTensor):
            weights[name] = tensor
        elif not _NAMING.harmless.fullmatch(name):
            raise ModelFileError(
                f"{folder}: tensor {name!r} has type {tensor.format_name} and shape {tensor.shape}; "
                f"supported types: {', '.join(DENSE_DTYPES)}, at least one dimension, none of size 0"
            )
    return weights
