"""Vocabularies of every kind: what text becomes, what tokens spell, and which files are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from tokenizers import AddedToken, models
from tokenizers import Tokenizer as LibraryTokenizer

from mvllm.core.errors import ModelFileError
from mvllm.core.text.assets import GgufVocabulary, TextAssets
from mvllm.core.text.byte_level import BYTE_OF_CHARACTER
from mvllm.core.text.pretokenizers import PRE_TOKENIZERS
from mvllm.core.text.tokenizer import Tokenizer
from tests.models.toy_vocabularies import (
    BOS,
    CONTROL,
    IM_END,
    IM_START,
    byte_level_assets,
    byte_level_json,
    byte_level_vocabulary,
    json_assets,
    metaspace_json,
    sentencepiece_assets,
    sentencepiece_vocabulary,
    spelled,
)
from tests.paths import SHARED


def tokenizer_of(assets: TextAssets, **options: Any) -> Tokenizer:
    return Tokenizer.from_assets(assets, **options)


BYTE_LEVEL = tokenizer_of(byte_level_assets())
SENTENCEPIECE = tokenizer_of(sentencepiece_assets())


# --- BOS -----------------------------------------------------------------------------------------------


def test_one_bos_is_added_where_the_model_wants_one() -> None:
    assert BYTE_LEVEL.encode("hello")[:2] == [BOS, BYTE_LEVEL.encode("hello", add_special_tokens=False)[0]]


def test_the_bos_is_not_doubled_when_the_text_begins_with_it() -> None:
    assert BYTE_LEVEL.encode("<|bos|>hello") == BYTE_LEVEL.encode("hello")


def test_a_bos_string_that_is_not_parsed_does_not_count_as_one() -> None:
    ids = BYTE_LEVEL.encode("<|bos|>hello", parse_special=False)
    assert ids.count(BOS) == 1
    assert BYTE_LEVEL.decode(ids) == "<|bos|>hello"


def test_without_add_bos_the_text_alone_decides() -> None:
    tokenizer = tokenizer_of(byte_level_assets(add_bos=False))
    assert tokenizer.encode("<|bos|><|bos|>") == [BOS, BOS]
    assert BOS not in tokenizer.encode("hello")


def test_a_json_tokenizer_adds_what_its_post_processor_says_unless_the_model_says_otherwise() -> None:
    file = byte_level_json(adds_bos=True)
    assert tokenizer_of(json_assets(file)).encode("h")[0] == BOS
    assert BOS not in tokenizer_of(json_assets(file, add_bos=False)).encode("h")
    plain = byte_level_json(adds_bos=False)
    assert BOS not in tokenizer_of(json_assets(plain)).encode("h")
    assert tokenizer_of(json_assets(plain, add_bos=True, bos_token_id=BOS)).encode("h")[0] == BOS
    assert tokenizer_of(json_assets(plain, add_bos=True, bos_token="<|bos|>")).encode("h")[0] == BOS


def test_a_bos_that_is_wanted_but_not_named_is_refused() -> None:
    with pytest.raises(ModelFileError, match="BOS"):
        tokenizer_of(json_assets(byte_level_json(adds_bos=False), add_bos=True))


# --- control tokens ------------------------------------------------------------------------------------


def test_control_tokens_are_parsed_only_on_request() -> None:
    text = "<|im_start|>hello<|im_end|>"
    assert BYTE_LEVEL.encode(text, add_special_tokens=False)[::2] == [IM_START, IM_END]
    assert BYTE_LEVEL.special_ids.isdisjoint(
        BYTE_LEVEL.encode(text, add_special_tokens=False, parse_special=False)
    )


def test_user_defined_tokens_are_always_parsed() -> None:
    ids = BYTE_LEVEL.encode("<tool_call>", add_special_tokens=False, parse_special=False)
    assert ids == [len(CONTROL)]


def test_the_longest_of_the_control_tokens_that_begin_together_is_taken() -> None:
    assert BYTE_LEVEL.control.split("a<|im|>b<|im_end|><|im") == ["a", 4, "b", IM_END, "<|im"]


def test_white_space_beside_a_control_token_that_strips_it_is_left_out() -> None:
    tokenizer = tokenizer_of(json_assets(byte_level_json(strips_right=True)))
    assert tokenizer.control.split("a <|im_end|> \n b") == ["a ", IM_END, "b"]


def test_merges_that_build_a_control_token_do_not_let_text_become_one() -> None:
    vocabulary = byte_level_vocabulary()
    name = CONTROL.index("[INST]")
    word = spelled("INST")
    tokens = (*vocabulary.tokens[:name], word, *vocabulary.tokens[name + 1 :], "IN", "INS")
    merges = ("I N", "IN S", "INS T")
    types = (*vocabulary.token_types, 1, 1)
    tokenizer = tokenizer_of(
        byte_level_assets(replace(vocabulary, tokens=tokens, token_types=types, merges=merges))
    )
    ids = tokenizer.encode("INST", add_special_tokens=False, parse_special=False)
    assert name not in ids
    assert tokenizer.decode(ids) == "INST"
    assert tokenizer.encode("INST", add_special_tokens=False) == [name]


# --- bytes and text of tokens --------------------------------------------------------------------------


def test_every_byte_has_its_own_character_in_the_byte_level_alphabet() -> None:
    assert sorted(BYTE_OF_CHARACTER.values()) == list(range(256))
    assert BYTE_OF_CHARACTER["Ġ"] == 0x20
    assert BYTE_OF_CHARACTER["Ċ"] == 0x0A


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCEPIECE], ids=["byte-level", "sentencepiece"])
def test_the_bytes_of_the_tokens_joined_are_the_bytes_of_the_text(tokenizer: Tokenizer) -> None:
    text = "hello 中文 č 😀\n\n  world"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert b"".join(map(tokenizer.token_bytes, ids)).removeprefix(b" ") == text.encode()


def test_a_part_of_a_character_has_its_bytes_and_shows_as_a_replacement_character() -> None:
    half = byte_level_vocabulary().tokens.index(spelled(b"\xf0\x9f"))
    assert BYTE_LEVEL.token_bytes(half) == b"\xf0\x9f"
    assert BYTE_LEVEL.token_text(half) == "\ufffd"
    assert BYTE_LEVEL.whole_text(half) is None


def test_special_tokens_spell_their_name_and_are_left_out_of_text() -> None:
    assert BYTE_LEVEL.token_bytes(IM_END) == b"<|im_end|>"
    assert BYTE_LEVEL.decode([IM_END]) == ""
    assert BYTE_LEVEL.decode([IM_END], skip_special_tokens=False) == "<|im_end|>"


def test_unused_ids_and_ids_outside_the_vocabulary_spell_nothing() -> None:
    size = BYTE_LEVEL.vocab_size
    assert [BYTE_LEVEL.token_bytes(id) for id in (size - 1, size, size + 1000, -1)] == [b""] * 4


def test_a_leading_space_is_kept_when_the_text_continues() -> None:
    ids = SENTENCEPIECE.encode("hello", add_special_tokens=False)
    assert SENTENCEPIECE.decode(ids) == "hello"
    assert SENTENCEPIECE.decode(ids, continues=True) == " hello"


def test_lone_surrogates_are_encoded_as_replacement_characters() -> None:
    assert BYTE_LEVEL.decode(BYTE_LEVEL.encode("a\ud800b")) == "a\ufffdb"


# --- SentencePiece-style -------------------------------------------------------------------------------


def test_the_space_before_the_first_word_follows_the_file() -> None:
    without = tokenizer_of(sentencepiece_assets(sentencepiece_vocabulary(add_space_prefix=False)))
    assert SENTENCEPIECE.token_text(SENTENCEPIECE.encode("hello")[1]) == " hello"
    assert without.token_text(without.encode("hello")[1]) == "hello"
    assert without.decode(without.encode(" hello")) == " hello"


def test_what_no_piece_spells_falls_back_to_bytes() -> None:
    ids = SENTENCEPIECE.encode("č", add_special_tokens=False)
    assert [SENTENCEPIECE.token_bytes(id) for id in ids] == [b" ", b"\xc4", b"\x8d"]


def test_control_tokens_take_no_part_in_merges() -> None:
    assert SENTENCEPIECE.special_ids.isdisjoint(SENTENCEPIECE.encode("</s><s>", parse_special=False)[1:])


def test_a_space_only_at_the_start_of_the_text_is_not_repeated_after_a_control_token() -> None:
    file = metaspace_json()
    tokenizer = tokenizer_of(json_assets(file))
    for text in ("hello</s>hello", "</s>hello", " hello</s> hello", ""):
        assert tokenizer.encode(text) == file.encode(text).ids


# --- pre-tokenizers ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gpt-2", ["I", "'m", " 1234", "  ", " ok", "!!", "\n\n"]),
        ("smollm", ["I", "'m", " ", "1", "2", "3", "4", "  ", " ok", "!!", "\n\n"]),
        ("qwen2", ["I", "'m", " ", "1", "2", "3", "4", "  ", " ok", "!!\n\n"]),
        ("llama-bpe", ["I", "'m", " ", "123", "4", "  ", " ok", "!!\n\n"]),
        ("gpt-4o", ["I'm", " ", "123", "4", "  ", " ok", "!!\n\n"]),
        ("tekken", ["I", "'m", " ", "1", "2", "3", "4", "  ", " ok", "!!\n\n"]),
        ("deepseek-coder", ["I", "'", "m", " ", "1", "2", "3", "4", "  ", " ok", "!!", "\n", "\n"]),
        ("default", ["I", "'", "m", " ", "123", "4", "  ", " ok", "!!", "\n\n"]),
    ],
)
def test_named_pre_tokenizers_cut_words_as_the_models_do(name: str, words: list[str]) -> None:
    found = PRE_TOKENIZERS[name].splitter().pre_tokenize_str("I'm 1234   ok!!\n\n")
    assert [bytes(BYTE_OF_CHARACTER[c] for c in word).decode() for word, _ in found] == words


@pytest.mark.parametrize("name", [None, "nonsense"])
def test_a_missing_or_unknown_pre_tokenizer_is_refused_unless_allowed(name: str | None) -> None:
    assets = byte_level_assets(byte_level_vocabulary(pre=name))
    with pytest.raises(ModelFileError, match=r"pre-tokenizer|tokenizer\.ggml\.pre"):
        tokenizer_of(assets)
    assert tokenizer_of(assets, allow_unknown_pretokenizer=True).encode("hello")


@pytest.mark.parametrize("name", sorted(PRE_TOKENIZERS))
def test_every_known_pre_tokenizer_loses_no_text(name: str) -> None:
    tokenizer = tokenizer_of(byte_level_assets(byte_level_vocabulary(pre=name)))
    text = "I'll don'T\r\n 中文 ABCdef 12345 č!!  \t<|x  "
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_sentencepiece_vocabulary_needs_no_pre_tokenizer() -> None:
    assert tokenizer_of(sentencepiece_assets(sentencepiece_vocabulary(pre="nonsense"))).encode("hello")


def test_words_that_are_tokens_are_taken_whole_only_where_the_model_ignores_merges() -> None:
    vocabulary = byte_level_vocabulary()
    tokens, types = (*vocabulary.tokens, "zebra"), (*vocabulary.token_types, 1)
    for pre, whole in (("llama-bpe", True), ("dbrx", False)):
        changed = replace(vocabulary, pre=pre, tokens=tokens, token_types=types)
        ids = tokenizer_of(byte_level_assets(changed)).encode("zebra", add_special_tokens=False)
        assert (ids == [len(tokens) - 1]) is whole


# --- files that are refused ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("vocabulary", "message"),
    [
        (byte_level_vocabulary(model="bert"), "bert"),
        (byte_level_vocabulary(merges=("qq zz",)), "contradicts"),
        (byte_level_vocabulary(merges=("nospace",)), "contradicts"),
        (sentencepiece_vocabulary(scores=()), "scores"),
    ],
)
def test_a_gguf_vocabulary_that_contradicts_itself_is_refused(
    vocabulary: GgufVocabulary, message: str
) -> None:
    with pytest.raises(ModelFileError, match=message):
        tokenizer_of(TextAssets(gguf_vocabulary=vocabulary))


@pytest.mark.parametrize(
    "source", [b"", b"\xff", b"[]", b"{}", b'{"model": {"type": "Nonsense"}}', b"[" * 100_000]
)
def test_a_damaged_tokenizer_json_is_refused(source: bytes) -> None:
    with pytest.raises(ModelFileError, match=r"tokenizer\.json"):
        tokenizer_of(TextAssets(tokenizer_json=source))


def test_an_unsupported_decoder_is_refused_by_name() -> None:
    file = LibraryTokenizer(models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
    with pytest.raises(ModelFileError, match="decoder"):
        tokenizer_of(json_assets(file))


def test_an_absurd_token_id_is_refused_before_tables_are_made() -> None:
    description = json.loads(byte_level_json().to_str())
    description["model"]["vocab"]["huge"] = 4_000_000_000
    with pytest.raises(ModelFileError, match="4000000000"):
        tokenizer_of(TextAssets(tokenizer_json=json.dumps(description).encode()))


def test_a_model_without_a_tokenizer_is_refused() -> None:
    with pytest.raises(ModelFileError, match="no tokenizer"):
        tokenizer_of(TextAssets())


def test_a_truncating_tokenizer_json_does_not_truncate() -> None:
    file = byte_level_json(adds_bos=False)
    file.enable_truncation(2)
    assert len(tokenizer_of(json_assets(file)).encode("zzzzz")) == 5


def test_special_tokens_of_a_json_tokenizer_are_those_it_calls_special() -> None:
    file = byte_level_json()
    file.add_tokens([AddedToken("<plain>", normalized=False)])
    tokenizer = tokenizer_of(json_assets(file))
    assert tokenizer.special_ids == frozenset(range(len(CONTROL)))
    assert tokenizer.decode(tokenizer.encode("<plain>")) == "<plain>"


@pytest.mark.skipif(SHARED is None, reason="golden/tiny/tokenizer is kept beside the repository")
def test_the_tiny_golden_tokenizer_gives_the_expected_ids() -> None:
    assert SHARED is not None
    folder = SHARED / "golden" / "tiny" / "tokenizer"
    tokenizer = tokenizer_of(TextAssets(tokenizer_json=(folder / "tokenizer.json").read_bytes()))
    expected = json.loads((folder / "expected_tokens.json").read_text())
    for text, ids in expected.items():
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids) == text
