"""Whether a draft model speaks the target's language: the same token under each id.

Vocabularies are compared by the texts of their tokens, not by their sizes: models of one family pad theirs
to different lengths, and models of different families may have equally many tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mvllm.core.errors import ConfigError, shown
from mvllm.core.text.assets import GgufVocabulary, TextAssets, TokenType
from mvllm.core.text.tokenizer_json import vocabulary_from_json
from mvllm.core.text.vocabulary import Spelling
from mvllm.core.types import TokenId


@dataclass(frozen=True)
class TokenTexts:
    """What each row of a model's head stands for."""

    texts: tuple[str, ...]  # by token id, as the vocabulary writes them; "" for padding
    spelling: Spelling


def token_texts(assets: TextAssets, num_rows: int) -> TokenTexts:
    """Texts of the `num_rows` tokens of a model, without making an encoder where the file allows it.

    Raises:
        ConfigError: the model has no tokenizer.
        ModelFileError: its tokenizer is damaged or of an unsupported kind.
    """
    if assets.gguf_vocabulary is not None:
        texts, spelling = _gguf_texts(assets.gguf_vocabulary)
    elif assets.tokenizer_json is not None:
        vocabulary = vocabulary_from_json(assets.tokenizer_json, assets)
        texts, spelling = vocabulary.texts, vocabulary.spelling
    else:
        raise ConfigError("a model without a tokenizer can neither draft nor be drafted for: give both one")
    return TokenTexts((*texts[:num_rows], *[""] * (num_rows - len(texts))), spelling)


def _gguf_texts(source: GgufVocabulary) -> tuple[tuple[str, ...], Spelling]:
    spelling = Spelling.SENTENCEPIECE if source.model == "llama" else Spelling.BYTE_LEVEL
    unused = int(TokenType.UNUSED)
    if unused not in source.token_types:
        return source.tokens, spelling
    kinds = zip(source.tokens, source.token_types, strict=True)
    return tuple("" if kind == unused else text for text, kind in kinds), spelling


def ids_to_mask(target: TokenTexts, drafter: TokenTexts) -> tuple[TokenId, ...]:
    """The drafter's ids that must not be drafted, ascending: they are padding, or nothing, in one of the two.

    Raises:
        ConfigError: below the shared size an id stands for different texts; the message names the first.
    """
    if target == drafter:
        return ()
    if target.spelling is not drafter.spelling:
        raise ConfigError(
            f"the draft model does not fit: its vocabulary is of another kind ({drafter.spelling.value}, "
            f"the target's is {target.spelling.value}){_first_difference(target, drafter)}; "
            "take a draft model of the target's family"
        )
    masked = []
    for id, wanted, found in _differences(target, drafter):
        if wanted and found:
            raise ConfigError(
                f"the draft model does not fit: token {id} is {shown(found)} there and {shown(wanted)} in "
                "the target; take a draft model with the target's tokenizer"
            )
        masked.append(id)
    masked += range(len(target.texts), len(drafter.texts))
    if len(masked) == len(drafter.texts):
        raise ConfigError("the draft model does not fit: it shares no token with the target")
    return tuple(masked)


def _differences(target: TokenTexts, drafter: TokenTexts) -> Iterator[tuple[TokenId, str, str]]:
    """(id, target's text, drafter's text) below the smaller size; one of them may be padding."""
    for id, (wanted, found) in enumerate(zip(target.texts, drafter.texts, strict=False)):
        if wanted != found:
            yield id, wanted, found


def _first_difference(target: TokenTexts, drafter: TokenTexts) -> str:
    for id, wanted, found in _differences(target, drafter):
        if wanted and found:
            return f"; token {id} is {shown(found)} there and {shown(wanted)} in the target"
    return ""
