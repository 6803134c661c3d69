"""A vocabulary made ready for use: what both tokenizer formats are turned into."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

import tokenizers

from mvllm.core.text.byte_level import bytes_of_byte_level
from mvllm.core.types import TokenId

SENTENCEPIECE_SPACE = "\u2581"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Spelling(Enum):
    """How the vocabulary writes bytes down."""

    BYTE_LEVEL = "byte-level"  # GPT-2's alphabet, one character a byte
    SENTENCEPIECE = "sentencepiece"  # text with U+2581 for a space, and tokens like <0x0A> for single bytes


@dataclass(frozen=True)
class ControlToken:
    """A token that only parsing of special tokens may produce."""

    id: TokenId
    strips_left: bool = False  # swallows the white space before it
    strips_right: bool = False  # and after it


@dataclass(frozen=True)
class Vocabulary:
    """Both encoders leave the text of control tokens alone: it is encoded as any other text.

    They differ where a vocabulary puts a space before the first word: `encoder` is for text at the very
    start, `continuing_encoder` for text after a control token. They are often the same object.
    """

    encoder: tokenizers.Tokenizer
    continuing_encoder: tokenizers.Tokenizer
    texts: tuple[str, ...]  # by id, as the vocabulary writes them
    literal_ids: frozenset[TokenId]  # tokens whose text is meant as it stands, in no spelling
    silent_ids: frozenset[TokenId]  # ids that fill the vocabulary up and add no text
    control_tokens: Mapping[str, ControlToken]
    special_ids: frozenset[TokenId]  # control tokens and the unknown token: left out of decoded text
    spelling: Spelling
    adds_leading_space: bool  # and decoding takes it away again
    prefix: tuple[TokenId, ...] = ()  # what the model wants before and after a text
    suffix: tuple[TokenId, ...] = ()

    def bytes_of(self, token_id: TokenId) -> bytes:
        """The raw bytes of one token; none for an id outside the vocabulary."""
        if not 0 <= token_id < len(self.texts) or token_id in self.silent_ids:
            return b""
        text = self.texts[token_id]
        if token_id in self.literal_ids:
            return text.encode()
        if self.spelling is Spelling.BYTE_LEVEL:
            return bytes_of_byte_level(text)
        if byte := _BYTE_TOKEN.fullmatch(text):
            return bytes.fromhex(byte[1])
        return text.replace(SENTENCEPIECE_SPACE, " ").encode()
