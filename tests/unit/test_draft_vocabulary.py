"""Which draft models fit a target (REQUIREMENTS L4)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mvllm.core.errors import ConfigError
from mvllm.core.load.gguf import read_gguf
from mvllm.core.load.gguf_text import read_text_assets
from mvllm.core.load.settings import Settings
from mvllm.core.spec.vocabulary import TokenTexts, ids_to_mask, token_texts
from mvllm.core.text.assets import TextAssets
from mvllm.core.text.vocabulary import Spelling
from tests.golden.data import model_path
from tests.models.toy_vocabularies import (
    byte_level_assets,
    byte_level_json,
    byte_level_vocabulary,
    json_assets,
    metaspace_json,
    sentencepiece_assets,
)


def texts(*tokens: str) -> TokenTexts:
    return TokenTexts(tokens, Spelling.BYTE_LEVEL)


def test_equal_vocabularies_fit_without_a_mask() -> None:
    assert ids_to_mask(texts("a", "b"), texts("a", "b")) == ()


def test_padding_that_only_the_draft_model_has_is_masked() -> None:
    assert ids_to_mask(texts("a", "b"), texts("a", "b", "", "")) == (2, 3)


def test_tokens_beyond_the_draft_models_last_need_no_mask() -> None:
    assert ids_to_mask(texts("a", "b", "c", ""), texts("a", "b")) == ()


def test_padding_of_either_side_among_the_shared_ids_is_masked() -> None:
    assert ids_to_mask(texts("a", "", "c", ""), texts("a", "b", "", "")) == (1, 2)


def test_the_families_paddings_to_151936_and_152064_fit() -> None:
    words = tuple(f"w{id}" for id in range(151_665))
    target = TokenTexts(words + ("",) * (152_064 - len(words)), Spelling.BYTE_LEVEL)
    drafter = TokenTexts(words + ("",) * (151_936 - len(words)), Spelling.BYTE_LEVEL)
    assert ids_to_mask(target, drafter) == ()
    assert ids_to_mask(drafter, target) == tuple(range(151_936, 152_064))


def test_one_swapped_token_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"token 1 is 'c' there and 'b' in the target"):
        ids_to_mask(texts("a", "b", "c"), texts("a", "c", "b"))


def test_another_kind_of_tokenizer_is_refused() -> None:
    other = TokenTexts(("a", "x"), Spelling.SENTENCEPIECE)
    with pytest.raises(ConfigError, match=r"another kind \(sentencepiece.*token 1 is 'x' there"):
        ids_to_mask(texts("a", "b"), other)


def test_vocabularies_without_a_token_in_common_are_refused() -> None:
    with pytest.raises(ConfigError, match="shares no token"):
        ids_to_mask(texts("a", "b"), texts("", ""))


def test_a_gguf_file_and_a_folder_of_one_vocabulary_fit() -> None:
    size = len(byte_level_vocabulary().tokens)
    gguf = token_texts(byte_level_assets(), size)
    folder = token_texts(json_assets(byte_level_json()), size)
    unused = size - 1  # the GGUF file says so, the folder does not
    assert ids_to_mask(gguf, folder) == ids_to_mask(folder, gguf) == (unused,)


def test_rows_beyond_the_tokenizer_are_padding() -> None:
    size = len(byte_level_vocabulary().tokens)
    target = token_texts(json_assets(byte_level_json()), size)
    padded = token_texts(json_assets(byte_level_json()), size + 3)
    assert ids_to_mask(target, padded) == (size, size + 1, size + 2)


def test_one_changed_text_in_a_file_is_refused() -> None:
    vocabulary = byte_level_vocabulary()
    tokens = list(vocabulary.tokens)
    tokens[8], tokens[9] = tokens[9], tokens[8]
    other = byte_level_assets(replace(vocabulary, tokens=tuple(tokens), merges=()))
    size = len(tokens)
    with pytest.raises(ConfigError, match="token 8 is"):
        ids_to_mask(token_texts(byte_level_assets(), size), token_texts(other, size))


def test_sentencepiece_does_not_fit_byte_level() -> None:
    for assets in (sentencepiece_assets(), json_assets(metaspace_json())):
        with pytest.raises(ConfigError, match="another kind"):
            ids_to_mask(token_texts(byte_level_assets(), 270), token_texts(assets, 270))


def test_a_model_without_a_tokenizer_is_refused() -> None:
    with pytest.raises(ConfigError, match="without a tokenizer"):
        token_texts(TextAssets(), 5)


def real_texts(name: str) -> TokenTexts:
    """From the metadata alone: the model itself may be of an architecture that is not supported."""
    path = model_path(name)
    metadata = read_gguf(path).metadata
    vocab_size = len(metadata["tokenizer.ggml.tokens"])
    return token_texts(read_text_assets(Settings(str(path), metadata), vocab_size), vocab_size)


def test_the_small_qwen_fits_the_larger_one() -> None:
    assert ids_to_mask(real_texts("qwen2.5-coder-1.5b"), real_texts("qwen2.5-coder-0.5b")) == ()


@pytest.mark.parametrize("target", ["gemma3-270m", "smollm2-135m"])
def test_the_small_qwen_fits_no_other_family(target: str) -> None:
    with pytest.raises(ConfigError, match=r"does not fit.*token \d+ is"):
        ids_to_mask(real_texts(target), real_texts("qwen2.5-coder-0.5b"))
