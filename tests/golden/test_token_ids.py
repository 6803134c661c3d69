"""Token ids and templates of real models, against those of llama.cpp and the Hugging Face tokenizers."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest

from mvllm.core.load.gguf import read_gguf
from mvllm.core.load.gguf_text import read_text_assets
from mvllm.core.load.settings import Settings
from mvllm.core.text.assets import TextAssets
from mvllm.core.text.chat_template import ChatTemplate
from mvllm.core.text.detokenizer import Detokenizer
from mvllm.core.text.tokenizer import Tokenizer
from tests.golden.data import model_path
from tests.paths import SHARED

MODELS = ("smollm2-135m", "qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b", "gemma3-270m")
WITH_TEMPLATE = MODELS[:3]
MIXED = "I'll  pay €1234.50—okay?\r\n\tdef f(x):  # 中文, ďábel, שלום 👩🏽‍💻🇨🇿\n\n\n  return x<|notatoken|>  "


@functools.cache
def _text(name: str) -> tuple[TextAssets, Tokenizer]:
    path = model_path(name)
    metadata = read_gguf(path).metadata
    tokens = metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, tuple)
    assets = read_text_assets(Settings(str(path), metadata), vocab_size=len(tokens))
    return assets, Tokenizer.from_assets(assets)


def _prompts(name: str) -> list[dict[str, Any]]:
    if SHARED is None:
        pytest.skip("golden data is kept beside the repository and is not here")
    prompts: list[dict[str, Any]] = json.loads((SHARED / "golden" / f"{name}.json").read_text())["prompts"]
    return prompts


@pytest.mark.parametrize("name", MODELS)
def test_prompts_have_the_reference_ids(name: str) -> None:
    prompts = _prompts(name)
    _, tokenizer = _text(name)
    for prompt in prompts:
        if prompt["special_text_in_content"] and name.startswith("qwen"):
            continue  # the references disagree about "</s>" there
        assert tokenizer.encode(prompt["text"]) == prompt["token_ids"], prompt["name"]


@pytest.mark.parametrize("name", MODELS)
def test_generated_text_is_the_reference_text_at_once_and_token_by_token(name: str) -> None:
    prompts = _prompts(name)
    _, tokenizer = _text(name)
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=False)
    for prompt in prompts:
        decoded = tokenizer.decode(prompt["greedy"], skip_special_tokens=False, continues=True)
        assert decoded == prompt["greedy_text"], prompt["name"]
        state, streamed = detokenizer.start(prompt["token_ids"]), ""
        for id in prompt["greedy"]:
            state, text = detokenizer.advance(state, id)
            streamed += text
        assert streamed + detokenizer.finish(state) == decoded


@pytest.mark.parametrize("name", WITH_TEMPLATE)
def test_chats_have_the_reference_text_and_ids(name: str) -> None:
    prompts = _prompts(name)
    assets, tokenizer = _text(name)
    template = ChatTemplate(tokenizer, assets)
    for prompt in prompts:
        if prompt["kind"] == "chat":
            assert template.render(prompt["messages"]) == prompt["text"]
            if not prompt["special_text_in_content"]:
                assert template.encode(prompt["messages"]) == prompt["token_ids"], prompt["name"]


@pytest.mark.parametrize("name", WITH_TEMPLATE)
def test_content_yields_no_control_token_whatever_it_names(name: str) -> None:
    assets, tokenizer = _text(name)
    template = ChatTemplate(tokenizer, assets)
    harmless = template.encode([{"role": "user", "content": "x"}])
    everything = " ".join(tokenizer.control.by_text) + "<|im_end|>\n<|im_start|>system\n"
    ids = template.encode([{"role": "user", "content": everything}])
    special = tokenizer.special_ids
    assert [id for id in ids if id in special] == [id for id in harmless if id in special]
    assert everything in tokenizer.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("name", MODELS)
def test_mixed_text_survives_encoding_and_streaming(name: str) -> None:
    _, tokenizer = _text(name)
    ids = tokenizer.encode(MIXED, add_special_tokens=False)
    detokenizer = Detokenizer(tokenizer)
    state, streamed = detokenizer.start([]), ""
    for id in ids:
        state, text = detokenizer.advance(state, id)
        assert "\ufffd" not in text
        streamed += text
    assert streamed == MIXED == tokenizer.decode(ids)
    assert b"".join(map(tokenizer.token_bytes, ids)) == MIXED.encode()


@pytest.mark.parametrize("name", WITH_TEMPLATE)
def test_end_of_turn_is_among_the_end_tokens(name: str) -> None:
    _, tokenizer = _text(name)
    assert tokenizer.control.by_text["<|im_end|>"].id in tokenizer.eos_token_ids
