"""Examples of incremental detokenisation; the general rules are in tests/property/test_text.py."""

from __future__ import annotations

from mvllm.core.text.detokenizer import Detokenizer, TextState
from mvllm.core.text.tokenizer import Tokenizer
from tests.models.toy_vocabularies import (
    IM_END,
    byte_level_assets,
    sentencepiece_assets,
    sentencepiece_vocabulary,
)

BYTE_LEVEL = Tokenizer.from_assets(byte_level_assets())
SENTENCEPIECE = Tokenizer.from_assets(sentencepiece_assets())


def deltas(tokenizer: Tokenizer, prompt: list[int], ids: list[int], *, skip: bool = True) -> list[str]:
    """The text of each token, and what is left at the end."""
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
    state = detokenizer.start(prompt)
    texts = []
    for id in ids:
        state, text = detokenizer.advance(state, id)
        texts.append(text)
    return [*texts, detokenizer.finish(state)]


def plain_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False, parse_special=False)


def test_a_character_of_several_tokens_appears_with_the_last_of_them() -> None:
    ids = plain_ids(BYTE_LEVEL, "😀")
    assert deltas(BYTE_LEVEL, [], ids) == ["", "", "😀", ""]


def test_an_unfinished_character_comes_at_the_end_as_one_replacement_character() -> None:
    ids = plain_ids(BYTE_LEVEL, "a😀")[:-1]
    assert deltas(BYTE_LEVEL, [], ids) == ["a", "", "", "\ufffd"]


def test_a_character_that_is_never_finished_is_replaced_as_soon_as_another_begins() -> None:
    ids = [plain_ids(BYTE_LEVEL, "😀")[0], *plain_ids(BYTE_LEVEL, "a")]
    assert deltas(BYTE_LEVEL, [], ids) == ["", "\ufffda", ""]


def test_special_tokens_show_only_on_request() -> None:
    assert deltas(BYTE_LEVEL, [], [IM_END]) == ["", ""]
    assert deltas(BYTE_LEVEL, [], [IM_END], skip=False) == ["<|im_end|>", ""]


def test_a_skipped_special_token_does_not_break_a_character_in_two() -> None:
    first, *rest = plain_ids(BYTE_LEVEL, "č😀"[1:])
    assert "".join(deltas(BYTE_LEVEL, [], [first, IM_END, *rest])) == "😀"


def test_the_first_word_after_a_prompt_keeps_its_space() -> None:
    prompt, output = SENTENCEPIECE.encode("hello"), plain_ids(SENTENCEPIECE, "world")
    assert "".join(deltas(SENTENCEPIECE, prompt, output)) == " world"


def test_the_space_that_encoding_adds_is_taken_away_where_the_prompt_shows_no_text() -> None:
    output = plain_ids(SENTENCEPIECE, "hello world")
    assert "".join(deltas(SENTENCEPIECE, [], output)) == "hello world"
    assert "".join(deltas(SENTENCEPIECE, [1], output)) == "hello world"
    assert "".join(deltas(SENTENCEPIECE, [1], output, skip=False)) == " hello world"


def test_only_one_leading_space_is_taken_away() -> None:
    output = plain_ids(SENTENCEPIECE, "  hello")
    assert "".join(deltas(SENTENCEPIECE, [], output)) == "  hello"


def test_a_single_space_token_at_the_start_vanishes_once() -> None:
    space = sentencepiece_vocabulary().tokens.index("▁")
    assert deltas(SENTENCEPIECE, [], [space, space]) == ["", " ", ""]


def test_byte_tokens_join_to_a_character() -> None:
    ids = plain_ids(SENTENCEPIECE, "中")
    assert deltas(SENTENCEPIECE, [1, 100], ids)[-2:] == ["中", ""]


def test_ids_outside_the_vocabulary_add_nothing() -> None:
    assert deltas(BYTE_LEVEL, [], [10**9, -1]) == ["", "", ""]


def test_the_state_stays_small_however_long_the_text_is() -> None:
    detokenizer = Detokenizer(BYTE_LEVEL)
    state = detokenizer.start([])
    for id in plain_ids(BYTE_LEVEL, "😀 hello " * 200)[:-3]:
        state, _ = detokenizer.advance(state, id)
        assert isinstance(state, TextState)
        assert len(state.pending) <= 3
