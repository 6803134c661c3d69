"""What a checkpoint carries for turning text into tokens and back; filled by the loaders."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from mvllm.core.types import TokenId


class TokenType(IntEnum):
    """The values of `tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class GgufVocabulary:
    """The tokenizer.ggml.* metadata of a GGUF file, lengths already checked against each other."""

    model: str  # "gpt2" (byte-level BPE) or "llama" (SentencePiece-style)
    pre: str | None  # name of the pre-tokenizer; None: absent
    tokens: tuple[str, ...]
    token_types: tuple[int, ...]  # `TokenType`s; a file may have others
    scores: tuple[float, ...] = ()
    merges: tuple[str, ...] = ()
    unknown_token_id: TokenId | None = None
    add_space_prefix: bool = True


@dataclass(frozen=True)
class TextAssets:
    """At most one of `tokenizer_json` and `gguf_vocabulary` is set; neither: a model without a tokenizer."""

    tokenizer_json: bytes | None = None
    gguf_vocabulary: GgufVocabulary | None = None
    chat_template: str | None = None
    bos_token: str | None = None  # as the template knows it
    eos_token: str | None = None
    bos_token_id: TokenId | None = None
    add_bos: bool | None = None  # None: as tokenizer.json's post-processor has it
    eos_token_ids: frozenset[TokenId] = frozenset()  # the union of every source
