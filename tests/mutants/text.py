"""Planted bugs of the text stage: each replaces one function, and some rule of the text must notice."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from mvllm.core.text import gguf_vocabulary
from mvllm.core.text.content_guard import ContentGuard
from mvllm.core.text.control_tokens import ControlTokens, Piece
from mvllm.core.text.detokenizer import Detokenizer, TextState
from mvllm.core.text.stop import StopState, StopStrings
from mvllm.core.text.tokenizer import Tokenizer
from mvllm.core.types import TokenId
from tests.mutants.mutant import Mutant

_advance = Detokenizer.advance
_advance_stop = StopStrings.advance
_encode = Tokenizer.encode
_merges_by_score = gguf_vocabulary._merges_by_score


def _decodes_each_token_alone(self: Detokenizer, state: TextState, id: TokenId) -> tuple[TextState, str]:
    return state, "" if id in self._skipped else self._tokenizer.token_text(id)


def _shows_special_tokens(self: Detokenizer, state: TextState, id: TokenId) -> tuple[TextState, str]:
    return state, self._tokenizer.whole_text(id) or ""


def _keeps_one_state_for_all(self: Detokenizer, state: TextState, id: TokenId) -> tuple[TextState, str]:
    shared, text = _advance(self, self.__dict__.get("shared", state), id)
    self.__dict__["shared"] = shared
    return shared, text


def _always_strips_a_space(self: Detokenizer, prompt: Iterable[TokenId]) -> TextState:
    return TextState(at_text_start=self._tokenizer.adds_leading_space)


def _never_strips_a_space(self: Detokenizer, prompt: Iterable[TokenId]) -> TextState:
    return TextState()


def _forgets_the_unfinished_character(self: Detokenizer, state: TextState) -> str:
    return ""


def _holds_nothing_back(self: StopStrings, text: str) -> str:
    return ""


def _holds_everything_back(self: StopStrings, text: str) -> str:
    return text


def _looks_for_the_first_stop_string_first(self: StopStrings, text: str) -> tuple[int, int] | None:
    for stop in self._stops:
        if stop in text:
            return text.index(stop), text.index(stop) + len(stop)
    return None


def _prefers_the_match_that_begins_first(self: StopStrings, text: str) -> tuple[int, int] | None:
    matches = [(text.index(stop), text.index(stop) + len(stop)) for stop in self._stops if stop in text]
    return min(matches, default=None)


def _goes_on_after_a_match(
    self: StopStrings, state: StopState, delta: str
) -> tuple[StopState, str, str | None]:
    return _advance_stop(self, state._replace(matched=None), delta)


def _drops_what_was_held_back(self: StopStrings, state: StopState) -> str:
    return ""


def _doubles_the_bos(self: Tokenizer, text: str, *, add_special_tokens: bool = True, **how: Any) -> list[int]:
    ids = _encode(self, text, add_special_tokens=False, **how)
    return [*self._vocabulary.prefix, *ids] if add_special_tokens else ids


def _always_parses_special(
    self: Tokenizer, text: str, *, parse_special: bool = True, **how: Any
) -> list[int]:
    return _encode(self, text, **how)


def _takes_the_first_control_token_listed(self: ControlTokens, text: str) -> list[Piece]:
    if not self.by_text:
        return [text] if text else []
    pieces = re.split(f"({'|'.join(map(re.escape, self.by_text))})", text)
    return [self.by_text[piece].id if piece in self.by_text else piece for piece in pieces if piece]


def _disguises_nothing(self: ContentGuard, value: Any, disguise: dict[str, str]) -> Any:
    return value


def _disguises_whole_control_tokens_only(self: ContentGuard, value: Any, disguise: dict[str, str]) -> Any:
    if isinstance(value, str):
        for name in ("<|im_start|>", "<|im_end|>", "<|bos|>", "<|im|>", "[INST]"):
            value = value.replace(name, disguise[name[0]] + name[1:])
        return value
    if isinstance(value, dict):
        return {k: _disguises_whole_control_tokens_only(self, v, disguise) for k, v in value.items()}
    if isinstance(value, list):
        return [_disguises_whole_control_tokens_only(self, item, disguise) for item in value]
    return value


def _keeps_every_literal_of_the_template(self: ControlTokens, literal: str) -> bool:
    return False


def _encodes_letter_by_letter(self: Tokenizer, pieces: list[Piece]) -> list[TokenId]:
    ids: list[TokenId] = []
    for piece in pieces:
        letters = list(piece) if isinstance(piece, str) else []
        ids += [id for letter in letters for id in self._encode_text(letter, at_start=False)]
        ids += [piece] if isinstance(piece, int) else []
    return ids


def _ranks_merges_backwards(source: Any) -> list[tuple[str, str]]:
    return _merges_by_score(source)[::-1]


ONE_SHOT = "the_stream_equals_the_text_decoded_at_once"
ANY_CHUNKS = "stop_strings_do_not_depend_on_how_the_text_arrives"
NO_CONTROL = "content_yields_no_control_token"

MUTANTS = {
    mutant.replacement.__name__.removeprefix("_"): mutant
    for mutant in (
        Mutant(Detokenizer, "advance", _decodes_each_token_alone, ONE_SHOT),
        Mutant(Detokenizer, "advance", _shows_special_tokens, ONE_SHOT),
        Mutant(Detokenizer, "advance", _keeps_one_state_for_all, "streams_do_not_disturb_each_other"),
        Mutant(Detokenizer, "start", _always_strips_a_space, ONE_SHOT),
        Mutant(Detokenizer, "start", _never_strips_a_space, ONE_SHOT),
        Mutant(Detokenizer, "finish", _forgets_the_unfinished_character, ONE_SHOT),
        Mutant(StopStrings, "_possible_beginning", _holds_nothing_back, ANY_CHUNKS),
        Mutant(
            StopStrings,
            "_possible_beginning",
            _holds_everything_back,
            "no_more_is_held_back_than_could_become_a_stop_string",
        ),
        Mutant(StopStrings, "_first_match", _looks_for_the_first_stop_string_first, ANY_CHUNKS),
        Mutant(StopStrings, "_first_match", _prefers_the_match_that_begins_first, ANY_CHUNKS),
        Mutant(StopStrings, "advance", _goes_on_after_a_match, ANY_CHUNKS),
        Mutant(StopStrings, "flush", _drops_what_was_held_back, ANY_CHUNKS),
        Mutant(Tokenizer, "encode", _doubles_the_bos, "there_is_exactly_one_bos_at_the_start"),
        Mutant(Tokenizer, "encode", _always_parses_special, "unparsed_text_yields_no_control_token"),
        Mutant(
            ControlTokens,
            "split",
            _takes_the_first_control_token_listed,
            "control_tokens_are_found_leftmost_and_longest",
        ),
        Mutant(ContentGuard, "disguised", _disguises_nothing, NO_CONTROL),
        Mutant(ContentGuard, "disguised", _disguises_whole_control_tokens_only, NO_CONTROL),
        Mutant(ControlTokens, "can_overlap", _keeps_every_literal_of_the_template, NO_CONTROL),
        Mutant(
            Tokenizer,
            "encode_pieces",
            _encodes_letter_by_letter,
            "parsing_agrees_with_the_tokenizers_library",
        ),
        Mutant(
            gguf_vocabulary,
            "_merges_by_score",
            _ranks_merges_backwards,
            "sentencepiece_ids_are_those_of_joining_the_best_pair",
        ),
    )
}
