"""GGUF checkpoints: what metadata and tensors become, and what is refused."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from mvllm.core.errors import ModelFileError
from mvllm.core.load.checkpoint import load_checkpoint
from mvllm.core.load.contents import Checkpoint, GenerationDefaults
from mvllm.core.load.weights import QuantizedWeight
from tests.model_files import GgufTensor, gguf_bytes
from tests.paths import MODELS, SHARED
from tests.tiny_models import (
    CHAT_TEMPLATE,
    TinyShape,
    dense_tensors,
    gguf_metadata,
    gguf_tensors,
    tiny_shape,
    write_tiny_gguf,
)

Tensors = dict[str, GgufTensor]


def load(folder: Path, *args: Any, **options: Any) -> Checkpoint:
    write_tiny_gguf(folder / "model.gguf", *args, **options)
    return load_checkpoint(folder / "model.gguf")


def load_changed(
    folder: Path,
    change: Callable[[Tensors], object],
    architecture: str = "llama",
    metadata: dict[str, Any] | None = None,
    **sizes: Any,
) -> Checkpoint:
    """Load a float32 model after `change` has edited its tensors in place."""
    shape = tiny_shape(architecture, **sizes)
    tensors = gguf_tensors(shape, "F32", seed=0)
    change(tensors)
    (folder / "model.gguf").write_bytes(gguf_bytes(gguf_metadata(shape) | (metadata or {}), tensors))
    return load_checkpoint(folder / "model.gguf")


def vector(size: int) -> GgufTensor:
    return ("F32", np.arange(size, dtype=np.float32), (size,))


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
@pytest.mark.parametrize("tied", [True, False])
def test_every_weight_lands_in_its_slot_with_rows_in_order(
    tmp_path: Path, architecture: str, tied: bool
) -> None:
    checkpoint = load(tmp_path, architecture, "F32", tied=tied, heads=4, kv_heads=2, head_dim=24)
    expected = dense_tensors(tiny_shape(architecture, tied=tied, head_dim=24), seed=0)
    weights = checkpoint.weights
    assert np.array_equal(weights.embedding.to_float32(), expected["model.embed_tokens.weight"])
    assert np.array_equal(weights.final_norm.to_float32(), expected["model.norm.weight"])
    assert (weights.head is weights.embedding) == tied == checkpoint.spec.tied_head
    if not tied:
        assert np.array_equal(weights.head.to_float32(), expected["lm_head.weight"])
    names = {
        "q": "self_attn.q_proj",
        "k": "self_attn.k_proj",
        "v": "self_attn.v_proj",
        "o": "self_attn.o_proj",
    }
    names |= {"gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj"}
    names |= {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    for index, layer in enumerate(weights.layers):
        for slot, name in names.items():
            found = getattr(layer, slot).to_float32()
            assert np.array_equal(found, expected[f"model.layers.{index}.{name}.weight"]), slot
            assert np.array_equal(getattr(layer, slot).stored_rows(0, len(found)), found), slot
        for slot in ("q", "k", "v"):
            bias = expected.get(f"model.layers.{index}.self_attn.{slot}_proj.bias")
            found_bias = getattr(layer, f"{slot}_bias")
            assert (found_bias is None) == (bias is None) == (architecture == "llama")
            assert bias is None or np.array_equal(found_bias.to_float32(), bias)


def test_llama_biases_are_reordered_with_their_rows(tmp_path: Path) -> None:
    def add_biases(tensors: Tensors) -> None:
        for layer in range(2):
            tensors[f"blk.{layer}.attn_q.bias"] = vector(64)
            tensors[f"blk.{layer}.attn_k.bias"] = vector(32)
            tensors[f"blk.{layer}.attn_v.bias"] = vector(32)
            tensors[f"blk.{layer}.ffn_down.bias"] = vector(64)

    layer = load_changed(tmp_path, add_biases).weights.layers[1]
    assert layer.q_bias is not None and layer.k_bias is not None and layer.v_bias is not None
    head = [*range(0, 16, 2), *range(1, 16, 2)]
    assert layer.k_bias.to_float32().tolist() == [*head, *(16 + row for row in head)]
    assert layer.q_bias.to_float32().tolist()[48:] == [48 + row for row in head]
    assert layer.v_bias.to_float32().tolist() == list(range(32))
    assert layer.o_bias is None and layer.down_bias is not None


def test_the_specification_comes_from_the_metadata(tmp_path: Path) -> None:
    spec = load(tmp_path, "qwen2", "Q8_0", rope_base=1e6, context=777).spec
    assert (spec.architecture, spec.context_length, spec.num_layers) == ("qwen2", 777, 2)
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim) == (4, 2, 16)
    assert (spec.hidden_size, spec.intermediate_size, spec.vocab_size) == (64, 128, 320)
    assert spec.norm_eps == pytest.approx(1e-5)
    assert spec.attention_scale == 0.25
    assert spec.ropes[0].inverse_frequencies[1] == pytest.approx(1e6 ** (-2 / 16))


def test_the_explicit_key_length_wins_over_hidden_size_by_heads(tmp_path: Path) -> None:
    spec = load(tmp_path, head_dim=24, intermediate=64, tensor_type="F32").spec
    assert spec.head_dim == 24
    absent = {"llama.attention.key_length": None, "llama.attention.value_length": None}
    assert load(tmp_path, metadata=absent).spec.head_dim == 16
    with pytest.raises(ModelFileError, match="shape"):
        load(tmp_path, metadata=absent, head_dim=24, tensor_type="F32")


def test_keys_and_values_of_different_lengths_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"keys of length 16 and values of length 24 differ"):
        load(tmp_path, metadata={"llama.attention.value_length": 24})
    with pytest.raises(ModelFileError, match="differ"):
        load(tmp_path, metadata={"llama.attention.key_length": None, "llama.attention.value_length": 24})


def test_missing_kv_head_count_means_as_many_as_heads(tmp_path: Path) -> None:
    metadata = {"llama.attention.head_count_kv": None}
    assert load(tmp_path, kv_heads=4, metadata=metadata).spec.num_kv_heads == 4


def test_kv_head_counts_by_layer_must_agree(tmp_path: Path) -> None:
    key = "llama.attention.head_count_kv"
    assert load(tmp_path, metadata={key: np.array([2, 2], np.uint32)}).spec.num_kv_heads == 2
    with pytest.raises(ModelFileError, match="differs between layers"):
        load(tmp_path, metadata={key: np.array([2, 4], np.uint32)})


@pytest.mark.parametrize(
    "metadata,message",
    [
        ({"general.architecture": "gemma3"}, "unsupported architecture 'gemma3'; supported: llama, qwen2"),
        ({"general.architecture": None}, "unsupported architecture None"),
        ({"general.architecture": 5}, "a string is expected"),
        ({"llama.block_count": None}, "llama.block_count is missing"),
        ({"llama.block_count": 3}, "'blk.2.*' is missing"),
        ({"llama.block_count": 2**31 - 1}, "2147483647 layers; at most 4096"),
        ({"llama.block_count": 1}, "no place in this architecture"),
        ({"llama.block_count": 0}, "llama.block_count is 0"),
        ({"llama.embedding_length": 65}, "hidden|shape"),
        ({"llama.embedding_length": "64"}, "llama.embedding_length"),
        ({"llama.feed_forward_length": 129}, "'blk.0.ffn_(down|gate|up).weight' has shape"),
        ({"llama.attention.head_count": 3}, "share|shape"),
        ({"llama.attention.key_length": 15, "llama.attention.value_length": 15}, "even number"),
        ({"llama.attention.key_length": 2**30, "llama.attention.value_length": 2**30}, "even number"),
        ({"llama.attention.layer_norm_rms_epsilon": None}, "epsilon is missing"),
        ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, "epsilon is nan"),
        ({"llama.rope.dimension_count": 8}, "8 out of 16"),
        ({"llama.rope.scaling.type": "longrope"}, "unknown rotary scaling"),
        ({"llama.expert_count": 8}, "mixtures of experts"),
        ({"llama.attention.sliding_window": 128}, "windows are not supported"),
        ({"split.count": 3}, "several GGUF files"),
        ({"tokenizer.ggml.model": "bert"}, "'bert'"),
        ({"tokenizer.ggml.tokens": ["a", "b"]}, "2 tokens, but the embedding has 320 rows"),
        ({"tokenizer.ggml.tokens": "a"}, "not an array of strings"),
        ({"tokenizer.ggml.token_type": np.ones(3, np.int32)}, "3 entries for 320 tokens"),
        ({"tokenizer.ggml.token_type": ["1"]}, "not an array of finite numbers"),
        ({"tokenizer.ggml.scores": np.full(320, np.nan, np.float32)}, "not an array of finite numbers"),
        ({"tokenizer.ggml.eos_token_id": 320}, "eos_token_id is 320"),
        ({"tokenizer.ggml.bos_token_id": np.array([1, 2], np.int32)}, "bos_token_id is"),
        ({"tokenizer.ggml.eos_token_id": np.array([], np.int32)}, "eos_token_id is"),
        ({"llama.context_length": 2**31 - 1}, "context_length is 2147483647"),
        ({"tokenizer.ggml.add_bos_token": 1}, "true or false"),
    ],
)
def test_settings_that_can_not_be_right_are_refused_by_name(
    tmp_path: Path, metadata: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelFileError, match=message) as error:
        load(tmp_path, metadata=metadata)
    assert "model.gguf" in str(error.value)


def test_missing_misshapen_and_unknown_tensors_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"'blk\.1\.attn_v\.weight' is missing"):
        load_changed(tmp_path, lambda tensors: tensors.pop("blk.1.attn_v.weight"))
    with pytest.raises(ModelFileError, match=r"'token_embd.weight' is missing"):
        load_changed(tmp_path, lambda tensors: tensors.pop("token_embd.weight"))
    with pytest.raises(ModelFileError, match=r"'output_norm.weight' has shape \(65,\), expected \(64,\)"):
        load_changed(tmp_path, lambda tensors: tensors.update({"output_norm.weight": vector(65)}))
    with pytest.raises(ModelFileError, match=r"no place.*blk\.0\.attn_q_norm\.weight"):
        load_changed(tmp_path, lambda tensors: tensors.update({"blk.0.attn_q_norm.weight": vector(16)}))


def test_biases_of_some_layers_only_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"'blk.1.attn_q.bias' is missing"):
        load_changed(tmp_path, lambda tensors: tensors.update({"blk.0.attn_q.bias": vector(64)}))
    with pytest.raises(ModelFileError, match=r"no place.*blk.1.attn_q.bias"):
        load_changed(tmp_path, lambda tensors: tensors.update({"blk.1.attn_q.bias": vector(64)}))
    with pytest.raises(ModelFileError, match=r"'blk.0.attn_k.bias' is missing"):
        load_changed(tmp_path, lambda tensors: tensors.pop("blk.0.attn_k.bias"), "qwen2")


def test_rope_divisors_are_applied_and_must_have_half_a_head(tmp_path: Path) -> None:
    divisors = ("F32", np.full(8, 2.0, np.float32), (8,))
    plain = load(tmp_path, "llama", "F32").spec.ropes[0].inverse_frequencies
    scaled = load_changed(tmp_path, lambda tensors: tensors.update({"rope_freqs.weight": divisors}))
    assert scaled.spec.ropes[0].inverse_frequencies == pytest.approx([value / 2 for value in plain])
    with pytest.raises(ModelFileError, match=r"rope_freqs"):
        load_changed(tmp_path, lambda tensors: tensors.update({"rope_freqs.weight": vector(16)}))


def test_text_assets_come_from_the_metadata(tmp_path: Path) -> None:
    text = load(tmp_path).text
    assert text.chat_template == CHAT_TEMPLATE
    assert (text.bos_token, text.bos_token_id, text.add_bos) == ("<|endoftext|>", 0, False)
    assert text.eos_token == "<|im_end|>"
    assert text.tokenizer_json is None
    vocabulary = text.gguf_vocabulary
    assert vocabulary is not None
    assert (vocabulary.model, vocabulary.pre) == ("gpt2", "gpt-2")
    assert vocabulary.token_types[:4] == (3, 3, 3, 1)
    assert vocabulary.merges[0] == "e e"
    assert len(vocabulary.tokens) == 320


def test_end_tokens_are_the_union_of_named_ids_and_well_known_control_tokens(tmp_path: Path) -> None:
    assert load(tmp_path).text.eos_token_ids == {0, 2}
    more = {"tokenizer.ggml.eot_token_id": 7, "tokenizer.ggml.eom_token_id": 9}
    assert load(tmp_path, metadata=more).text.eos_token_ids == {0, 2, 7, 9}
    normal = {"tokenizer.ggml.token_type": np.ones(320, np.int32), "tokenizer.ggml.eos_token_id": 5}
    assert load(tmp_path, metadata=normal).text.eos_token_ids == {5}
    absent = {"tokenizer.ggml.eos_token_id": 0xFFFFFFFF}
    assert load(tmp_path, metadata=absent).text.eos_token_ids == {0, 2}


@pytest.mark.parametrize(
    "metadata,expected",
    [
        ({}, False),
        ({"tokenizer.ggml.pre": "llama-bpe"}, True),
        ({"tokenizer.ggml.model": "llama"}, True),
        ({"tokenizer.ggml.model": "llama", "tokenizer.ggml.add_bos_token": False}, False),
        ({"tokenizer.ggml.model": "llama", "tokenizer.ggml.bos_token_id": None}, False),
        ({"tokenizer.ggml.add_bos_token": True}, True),
    ],
)
def test_whether_a_bos_is_added_when_the_file_does_not_say(
    tmp_path: Path, metadata: dict[str, Any], expected: bool
) -> None:
    assert (
        load(tmp_path, metadata={"tokenizer.ggml.add_bos_token": None, **metadata}).text.add_bos is expected
    )


def test_a_model_without_a_tokenizer_loads(tmp_path: Path) -> None:
    text = load(tmp_path, metadata={"tokenizer.ggml.model": None}).text
    assert text.gguf_vocabulary is None
    assert text.eos_token_ids == frozenset()


def test_sampling_defaults_are_read_or_absent(tmp_path: Path) -> None:
    assert load(tmp_path).generation == GenerationDefaults()
    metadata = {"general.sampling.temp": 0.5, "general.sampling.top_k": 40, "general.sampling.top_p": 0.75}
    assert load(tmp_path, metadata=metadata).generation == GenerationDefaults(0.5, 0.75, 40, None)


def test_the_summary_lists_tensors_and_keeps_metadata_light(tmp_path: Path) -> None:
    checkpoint = load(tmp_path, "qwen2", "Q5_1")
    assert checkpoint.format == "gguf"
    assert checkpoint.file_bytes == (tmp_path / "model.gguf").stat().st_size
    assert checkpoint.tensors[0] == ("token_embd.weight", "Q5_1", (320, 64), 320 * 2 * 24)
    assert checkpoint.metadata["tokenizer.ggml.tokens"] == "array of 320"
    assert checkpoint.metadata["qwen2.block_count"] == 2


def test_weights_of_llama_files_stay_packed(tmp_path: Path) -> None:
    weight = load(tmp_path, "llama", "Q4_0").weights.layers[0].q
    assert isinstance(weight, QuantizedWeight)
    assert not weight.stored.flags.owndata
    assert weight.row_order is not None


def test_a_file_of_another_kind_is_refused_with_what_is_accepted(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"\x80\x04pickle")
    with pytest.raises(ModelFileError, match="accepted are a GGUF file, or a folder"):
        load_checkpoint(tmp_path / "model.bin")
    with pytest.raises(ModelFileError, match="no such file"):
        load_checkpoint(tmp_path / "absent.gguf")
    for name in ("pipe", "pipe.gguf"):
        os.mkfifo(tmp_path / name)
        with pytest.raises(ModelFileError, match="neither a file nor a folder"):
            load_checkpoint(tmp_path / name)
    shape: TinyShape = write_tiny_gguf(tmp_path / "without_suffix")
    assert load_checkpoint(tmp_path / "without_suffix").spec.hidden_size == shape.hidden


@pytest.mark.skipif(SHARED is None, reason="golden data is kept beside the repository (../shared)")
@pytest.mark.parametrize("folder", ["gguf-llama-gqa-tied", "gguf-llama-gqa-tied-256", "gguf-qwen2-untied"])
def test_golden_files_load_and_their_embedding_is_the_reference_packages(folder: str) -> None:
    assert SHARED is not None
    for path in sorted((SHARED / "golden" / "tiny" / folder).glob("*.gguf")):
        checkpoint = load_checkpoint(path)
        tensor = next(t for t in gguf.GGUFReader(path).tensors if t.name == "token_embd.weight")
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        assert np.array_equal(checkpoint.weights.embedding.to_float32(), expected.reshape(320, -1))
        assert checkpoint.text.eos_token_ids == {2}


REAL = {
    "smollm2-135m": {0, 2},
    "qwen2.5-coder-0.5b": {151643, 151645},
    "qwen2.5-coder-1.5b": {151643, 151645},
}


@pytest.mark.skipif(MODELS is None, reason="MVLLM_TEST_MODELS names no folder with real models")
@pytest.mark.parametrize("name", REAL)
def test_real_models_load_with_all_their_end_tokens(name: str) -> None:
    assert MODELS is not None
    path = MODELS / f"{name}.gguf"
    if not path.exists():
        pytest.skip(f"{path.name} is not in MVLLM_TEST_MODELS")
    checkpoint = load_checkpoint(path)
    assert checkpoint.text.eos_token_ids == REAL[name]
    assert checkpoint.text.chat_template is not None
    assert checkpoint.spec.tied_head == (name == "smollm2-135m")
