"""Hugging Face folders: both spellings of a config, tensor rules, text assets."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from mvllm.core.errors import ModelFileError
from mvllm.core.load.checkpoint import load_checkpoint
from mvllm.core.load.contents import Checkpoint, GenerationDefaults
from mvllm.core.load.weights import DenseWeight
from mvllm.core.model.spec import LayerSpec
from tests.model_files import safetensors_bytes, to_dense_type
from tests.paths import SHARED
from tests.tiny_models import CHAT_TEMPLATE, dense_tensors, tiny_shape, write_tiny_gguf, write_tiny_hf

TINY = SHARED / "golden" / "tiny" if SHARED else Path("absent")
GOLDEN = ["llama-mha", "llama-gqa-tied", "llama-rope-llama3", "llama-rope-linear", "llama-bf16", "llama-f16"]
GOLDEN += ["llama-sharded", "llama-bias", "mistral-window", "qwen2-untied", "qwen3-gqa"]
needs_golden = pytest.mark.skipif(
    SHARED is None, reason="golden data is kept beside the repository (../shared)"
)

ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")


def load(folder: Path, *args: Any, **options: Any) -> Checkpoint:
    write_tiny_hf(folder, *args, **options)
    return load_checkpoint(folder)


def rewrite_tensors(folder: Path, tensors: dict[str, Any], dtype: str = "F32") -> None:
    stored = {name: (dtype, to_dense_type(values, dtype)) for name, values in tensors.items()}
    (folder / "model.safetensors").write_bytes(safetensors_bytes(stored))


def edit_json(path: Path, **values: Any) -> None:
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(content | values))


# --- config -------------------------------------------------------------------------------------------------


@needs_golden
@pytest.mark.parametrize("name", GOLDEN)
def test_both_spellings_of_a_golden_config_give_one_specification(name: str, tmp_path: Path) -> None:
    shutil.copytree(TINY / name, tmp_path / "model")
    expected = load_checkpoint(tmp_path / "model").spec
    (tmp_path / "model" / "config_alt.json").replace(tmp_path / "model" / "config.json")
    assert load_checkpoint(tmp_path / "model").spec == expected


@needs_golden
def test_golden_configs_are_understood() -> None:
    assert load_checkpoint(TINY / "llama-mha").spec.num_kv_heads == 4
    assert load_checkpoint(TINY / "llama-gqa-tied").spec.tied_head
    assert load_checkpoint(TINY / "llama-rope-llama3").text.eos_token_ids == {2, 3, 4}
    assert load_checkpoint(TINY / "mistral-window").spec.layers == (LayerSpec(window=16),) * 2
    assert load_checkpoint(TINY / "qwen2-untied").spec.layers == (LayerSpec(),) * 2
    assert load_checkpoint(TINY / "qwen3-gqa").spec.head_dim == 32
    layer = load_checkpoint(TINY / "llama-bias").weights.layers[0]
    biases = (layer.q_bias, layer.k_bias, layer.v_bias, layer.o_bias)
    assert None not in (*biases, layer.gate_bias, layer.up_bias, layer.down_bias)


@needs_golden
@pytest.mark.parametrize("name", ["gemma2", "gemma3-text", "olmo2"])
def test_unsupported_model_types_are_refused_by_name(name: str) -> None:
    with pytest.raises(ModelFileError, match=r"unsupported model_type .*; supported: llama"):
        load_checkpoint(TINY / name)


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_a_folder_and_a_gguf_file_of_one_model_agree(tmp_path: Path, architecture: str) -> None:
    folder = load(tmp_path / "hf", architecture, seed=3, head_dim=24)
    write_tiny_gguf(tmp_path / "x.gguf", architecture, "F32", seed=3, head_dim=24)
    file = load_checkpoint(tmp_path / "x.gguf")
    assert folder.spec.ropes == file.spec.ropes
    assert folder.spec.head_dim == file.spec.head_dim == 24
    for ours, theirs in zip(folder.weights.layers, file.weights.layers, strict=True):
        for slot, weight in vars(ours).items():
            other = getattr(theirs, slot)
            assert (weight is None) == (other is None), slot
            assert weight is None or np.array_equal(weight.to_float32(), other.to_float32()), slot


def test_windows_of_qwen_models_need_their_switch(tmp_path: Path) -> None:
    window = {"sliding_window": 8, "max_window_layers": 1}
    off = load(tmp_path / "off", "qwen2", config={**window, "use_sliding_window": False})
    on = load(tmp_path / "on", "qwen2", config={**window, "use_sliding_window": True})
    types = {"use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"]}
    listed = load(tmp_path / "listed", "qwen2", config={**window, **types})
    assert off.spec.layers == (LayerSpec(), LayerSpec())
    assert on.spec.layers == (LayerSpec(), LayerSpec(window=8))
    assert listed.spec.layers == (LayerSpec(window=8), LayerSpec())


@pytest.mark.parametrize(
    "config,message",
    [
        ({"model_type": None}, "unsupported model_type None"),
        ({"model_type": 3}, "a string is expected"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": 64.0}, "hidden_size is 64.0"),
        ({"hidden_size": True}, "hidden_size is True"),
        ({"hidden_size": -64}, "hidden_size is -64"),
        ({"vocab_size": 321}, "'model.embed_tokens.weight' has shape"),
        ({"num_hidden_layers": 3}, r"'model\.layers\.2.*' is missing"),
        ({"num_hidden_layers": 2**31 - 1}, "2147483647 layers; at most 4096"),
        ({"num_hidden_layers": 1}, "no place in this architecture"),
        ({"num_attention_heads": 3}, "share"),
        ({"head_dim": 17}, "even number"),
        ({"head_dim": 18}, "has shape"),
        ({"num_attention_heads": 6, "head_dim": None}, "divide the hidden size"),
        ({"rms_norm_eps": "tiny"}, "rms_norm_eps"),
        ({"hidden_act": "relu"}, "unsupported hidden_act 'relu'"),
        ({"attention_bias": True}, "bias' is missing"),
        ({"attention_bias": 1}, "true or false"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "unknown rotary scaling 'dynamic'"),
        ({"rope_scaling": [2.0]}, "an object is expected"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"layer_types": ["full_attention"]}, "layer_types must list 2 layers"),
        ({"layer_types": ["sliding_attention"] * 2}, "sliding_window is not set"),
        ({"layer_types": ["linear_attention"] * 2}, "unsupported layer type"),
        ({"layer_types": [["x"], {}]}, "unsupported layer type"),
        ({"quantization": {"bits": 4}}, "group_size is missing"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantized by 'gptq' are not supported"),
        ({"max_position_embeddings": None}, "max_position_embeddings is missing"),
        ({"eos_token_id": "2"}, "a token id or a list"),
    ],
)
def test_settings_that_can_not_be_right_are_refused_by_name(
    tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelFileError, match=message):
        load(tmp_path, config=config)


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"a": 1, "a": 2}', '{"a": NaN}', '{"a":' * 50_000, "\udcff"]
)
def test_a_config_that_is_no_json_object_is_refused(tmp_path: Path, text: str) -> None:
    write_tiny_hf(tmp_path)
    (tmp_path / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ModelFileError, match=r"config\.json"):
        load_checkpoint(tmp_path)


def test_a_folder_without_config_or_weights_is_refused(tmp_path: Path) -> None:
    write_tiny_hf(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelFileError, match=r"no \.safetensors"):
        load_checkpoint(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(ModelFileError, match=r"config\.json is missing"):
        load_checkpoint(tmp_path)


# --- tensors ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("present", [True, False])
def test_tied_heads_in_every_combination(tmp_path: Path, tied: bool, present: bool) -> None:
    write_tiny_hf(tmp_path, tied=not present, config={"tie_word_embeddings": tied})
    if not tied and not present:
        with pytest.raises(ModelFileError, match=r"'lm_head\.weight' is missing"):
            load_checkpoint(tmp_path)
        return
    checkpoint = load_checkpoint(tmp_path)
    assert (checkpoint.weights.head is checkpoint.weights.embedding) == tied == checkpoint.spec.tied_head
    if not tied:
        expected = dense_tensors(tiny_shape(tied=False), seed=0)["lm_head.weight"]
        assert np.array_equal(checkpoint.weights.head.to_float32(), expected)


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_tensors_keep_their_type_and_widen_exactly(tmp_path: Path, dtype: str) -> None:
    weight = load(tmp_path, dtype=dtype).weights.layers[0].up
    assert isinstance(weight, DenseWeight)
    assert weight.format_name == dtype
    assert not weight.stored.flags.owndata
    stored = to_dense_type(dense_tensors(tiny_shape(), seed=0)["model.layers.0.mlp.up_proj.weight"], dtype)
    widened = (
        (stored.astype(np.uint32) << 16).view(np.float32) if dtype == "BF16" else stored.astype(np.float32)
    )
    assert np.array_equal(weight.to_float32(), widened)


def test_shards_give_the_same_model_as_one_file(tmp_path: Path) -> None:
    whole, parts = load(tmp_path / "one"), load(tmp_path / "three", shards=3)
    assert sorted(whole.tensors) == sorted(parts.tensors)
    assert np.array_equal(
        whole.weights.layers[1].down.to_float32(), parts.weights.layers[1].down.to_float32()
    )
    (tmp_path / "three" / "model.safetensors.index.json").unlink()
    assert sorted(load_checkpoint(tmp_path / "three").tensors) == sorted(whole.tensors)


def test_a_tensor_is_found_wherever_it_is_whatever_the_index_says(tmp_path: Path) -> None:
    write_tiny_hf(tmp_path, shards=2)
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())["weight_map"]
    files = list(dict.fromkeys(index.values()))
    swapped = {name: files[1 - files.index(file)] for name, file in index.items()}
    path.write_text(json.dumps({"weight_map": swapped}))
    assert load_checkpoint(tmp_path).spec.num_layers == 2


def test_missing_and_unexpected_tensors_are_refused_by_name(tmp_path: Path) -> None:
    write_tiny_hf(tmp_path)
    tensors = dict(dense_tensors(tiny_shape(), seed=0))
    rewrite_tensors(tmp_path, {name: values for name, values in tensors.items() if "1.mlp.up" not in name})
    with pytest.raises(ModelFileError, match=r"'model\.layers\.1\.mlp\.up_proj\.weight' is missing"):
        load_checkpoint(tmp_path)
    extra = {"model.layers.0.self_attn.q_proj.bias": np.ones(64, np.float32)}
    rewrite_tensors(tmp_path, tensors | extra)
    with pytest.raises(ModelFileError, match=r"no place.*q_proj\.bias"):
        load_checkpoint(tmp_path)
    rewrite_tensors(tmp_path, tensors | {"score.weight": np.ones((2, 64), np.float32)})
    with pytest.raises(ModelFileError, match=r"no place.*score\.weight"):
        load_checkpoint(tmp_path)


def test_stored_rotary_frequencies_are_harmless(tmp_path: Path) -> None:
    write_tiny_hf(tmp_path)
    tensors = dict(dense_tensors(tiny_shape(), seed=0))
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    rewrite_tensors(tmp_path, tensors | {name: np.ones(8, np.float32)})
    assert load_checkpoint(tmp_path).spec.num_layers == 2


def test_a_weight_of_an_unsupported_type_is_refused_by_name(tmp_path: Path) -> None:
    write_tiny_hf(tmp_path)
    tensors = dense_tensors(tiny_shape(), seed=0)
    stored: dict[str, tuple[str, Any]] = {name: ("F32", values) for name, values in tensors.items()}
    stored["model.norm.weight"] = ("F64", np.ones(64))
    (tmp_path / "model.safetensors").write_bytes(safetensors_bytes(stored))
    with pytest.raises(ModelFileError, match=r"'model\.norm\.weight' has type F64"):
        load_checkpoint(tmp_path)


def test_biases_are_loaded_when_the_config_says_so(tmp_path: Path) -> None:
    write_tiny_hf(tmp_path, config={"attention_bias": True})
    shape = tiny_shape()
    tensors = dict(dense_tensors(shape, seed=0))
    for layer in range(shape.layers):
        for name in ATTENTION:
            rows = shape.matrices()[name][0]
            tensors[f"model.layers.{layer}.{name}.bias"] = np.full(rows, layer, np.float32)
    rewrite_tensors(tmp_path, tensors)
    layers = load_checkpoint(tmp_path).weights.layers
    assert layers[1].o_bias is not None
    assert layers[1].o_bias.to_float32().tolist() == [1.0] * 64
    assert layers[0].gate_bias is None


# --- text ---------------------------------------------------------------------------------------------------


def test_text_assets_come_from_the_tokenizer_files(tmp_path: Path) -> None:
    text = load(tmp_path).text
    assert text.tokenizer_json is not None
    assert Tokenizer.from_buffer(text.tokenizer_json).token_to_id("<|im_end|>") == 2
    assert text.gguf_vocabulary is None
    assert text.chat_template == CHAT_TEMPLATE
    assert (text.bos_token, text.bos_token_id, text.eos_token) == (None, 0, "<|im_end|>")
    assert text.add_bos is None


def test_end_tokens_are_the_union_of_every_source(tmp_path: Path) -> None:
    write_tiny_hf(tmp_path, config={"eos_token_id": 3})
    edit_json(tmp_path / "generation_config.json", eos_token_id=[4, 5])
    edit_json(tmp_path / "tokenizer_config.json", eos_token={"content": "!", "lstrip": False})
    exclamation = json.loads((tmp_path / "tokenizer.json").read_text())["model"]["vocab"]["!"]
    assert load_checkpoint(tmp_path).text.eos_token_ids == {0, 2, 3, 4, 5, exclamation}


def test_end_tokens_outside_the_vocabulary_are_left_out_and_such_a_bos_is_refused(tmp_path: Path) -> None:
    write_tiny_hf(tmp_path, config={"eos_token_id": [2, 320, 100_000]})
    assert load_checkpoint(tmp_path).text.eos_token_ids == {0, 2}
    edit_json(tmp_path / "config.json", bos_token_id=320)
    with pytest.raises(ModelFileError, match="the BOS token is 320"):
        load_checkpoint(tmp_path)


def test_a_folder_without_tokenizer_files_loads(tmp_path: Path) -> None:
    write_tiny_hf(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (tmp_path / name).unlink()
    checkpoint = load_checkpoint(tmp_path)
    assert checkpoint.text.tokenizer_json is None
    assert checkpoint.text.eos_token_ids == {2}
    assert checkpoint.generation == GenerationDefaults()


def test_the_default_of_several_templates_is_taken_and_a_template_file_wins(tmp_path: Path) -> None:
    write_tiny_hf(tmp_path)
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    edit_json(tmp_path / "tokenizer_config.json", chat_template=named)
    assert load_checkpoint(tmp_path).text.chat_template == "D"
    edit_json(tmp_path / "tokenizer_config.json", chat_template=None)
    assert load_checkpoint(tmp_path).text.chat_template is None
    (tmp_path / "chat_template.jinja").write_text("J", encoding="utf-8")
    assert load_checkpoint(tmp_path).text.chat_template == "J"


@pytest.mark.parametrize(
    "name,values",
    [
        ("tokenizer_config.json", {"eos_token": 3}),
        ("tokenizer_config.json", {"chat_template": 3}),
        ("generation_config.json", {"eos_token_id": [2, None]}),
        ("generation_config.json", {"temperature": "hot"}),
        ("generation_config.json", {"top_k": -1}),
    ],
)
def test_text_settings_of_the_wrong_type_are_refused(
    tmp_path: Path, name: str, values: dict[str, Any]
) -> None:
    write_tiny_hf(tmp_path)
    edit_json(tmp_path / name, **values)
    with pytest.raises(ModelFileError, match=name):
        load_checkpoint(tmp_path)


def test_generation_defaults_are_read(tmp_path: Path) -> None:
    write_tiny_hf(tmp_path)
    settings = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05}
    edit_json(tmp_path / "generation_config.json", **settings)
    assert load_checkpoint(tmp_path).generation == GenerationDefaults(**settings)  # type: ignore[arg-type]
