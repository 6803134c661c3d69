"""Text assets of a GGUF file: its `tokenizer.*` metadata."""

from __future__ import annotations

import numpy as np

from mvllm.core.load.end_tokens import END_OF_TURN_TOKENS
from mvllm.core.load.settings import Settings
from mvllm.core.text.assets import GgufVocabulary, TextAssets, TokenType
from mvllm.core.types import TokenId

_MODELS = ("gpt2", "llama")
_WITHOUT_TOKENIZER = ("none", "no_vocab")
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_BYTE_LEVEL_WITH_BOS = frozenset({"llama3", "llama-v3", "llama-bpe", "tekken"})
"""Pre-tokenizers of byte-level vocabularies whose models want a BOS although old files do not say so."""

_NORMAL, _CONTROL = int(TokenType.NORMAL), int(TokenType.CONTROL)
_ABSENT_ID = 0xFFFFFFFF  # how some converters write "no such token"


def read_text_assets(metadata: Settings, vocab_size: int) -> TextAssets:
    """Vocabulary, special tokens and chat template.

    Args:
        metadata: look-ups without a prefix.
        vocab_size: rows of the embedding.

    Raises:
        ModelFileError: lengths or ids contradict each other, or the kind of tokenizer is unknown.
    """
    chat_template = metadata.text("tokenizer.chat_template")
    vocabulary = _read_vocabulary(metadata, vocab_size)
    if vocabulary is None:
        return TextAssets(chat_template=chat_template)
    bos = _token_id(metadata, "bos_token_id", vocab_size)
    eos = _token_id(metadata, "eos_token_id", vocab_size)
    add_bos = metadata.flag("tokenizer.ggml.add_bos_token")
    if add_bos is None:
        add_bos = vocabulary.model == "llama" or vocabulary.pre in _BYTE_LEVEL_WITH_BOS
    return TextAssets(
        gguf_vocabulary=vocabulary,
        chat_template=chat_template,
        bos_token=None if bos is None else vocabulary.tokens[bos],
        eos_token=None if eos is None else vocabulary.tokens[eos],
        bos_token_id=bos,
        add_bos=add_bos and bos is not None,
        eos_token_ids=_end_tokens(metadata, vocabulary),
    )


def _read_vocabulary(metadata: Settings, vocab_size: int) -> GgufVocabulary | None:
    model = metadata.text("tokenizer.ggml.model")
    if model is None or model in _WITHOUT_TOKENIZER:
        return None
    if model not in _MODELS:
        raise metadata.error(f"tokenizer.ggml.model is {model!r}; supported: {', '.join(_MODELS)}")
    tokens = _strings(metadata, "tokens")
    if len(tokens) != vocab_size:
        raise metadata.error(
            f"the vocabulary has {len(tokens)} tokens, but the embedding has {vocab_size} rows"
        )
    scores = _numbers(metadata, "scores", len(tokens))
    types = _numbers(metadata, "token_type", len(tokens))
    space_prefix = metadata.flag("tokenizer.ggml.add_space_prefix")
    return GgufVocabulary(
        model=model,
        pre=metadata.text("tokenizer.ggml.pre"),
        tokens=tokens,
        token_types=tuple(map(int, types)) or (_NORMAL,) * len(tokens),
        scores=tuple(map(float, scores)),
        merges=_strings(metadata, "merges"),
        unknown_token_id=_token_id(metadata, "unknown_token_id", vocab_size),
        add_space_prefix=True if space_prefix is None else space_prefix,
    )


def _strings(metadata: Settings, key: str) -> tuple[str, ...]:
    value = metadata.get(f"tokenizer.ggml.{key}")
    if value is None:
        return ()
    if not isinstance(value, tuple):
        raise metadata.error(f"tokenizer.ggml.{key} is not an array of strings")
    return value


def _numbers(metadata: Settings, key: str, length: int) -> list[float]:
    """An array of one number per token, or an empty list if it is absent."""
    value = metadata.get(f"tokenizer.ggml.{key}")
    if value is None:
        return []
    if not isinstance(value, np.ndarray) or not np.isfinite(value).all():
        raise metadata.error(f"tokenizer.ggml.{key} is not an array of finite numbers")
    if len(value) != length:
        raise metadata.error(f"tokenizer.ggml.{key} has {len(value)} entries for {length} tokens")
    numbers: list[float] = value.tolist()
    return numbers


def _token_id(metadata: Settings, key: str, vocab_size: int) -> TokenId | None:
    name = f"tokenizer.ggml.{key}"
    value = metadata.integer(name, minimum=0, maximum=_ABSENT_ID)
    if value == _ABSENT_ID:
        return None
    if value is not None and value >= vocab_size:
        raise metadata.error(f"{name} is {value}, but the vocabulary has {vocab_size} tokens")
    return value


def _end_tokens(metadata: Settings, vocabulary: GgufVocabulary) -> frozenset[TokenId]:
    named = (_token_id(metadata, key, len(vocabulary.tokens)) for key in _END_KEYS)
    types = vocabulary.token_types
    controls = (token for token, kind in enumerate(types) if kind == _CONTROL)
    well_known = (token for token in controls if vocabulary.tokens[token] in END_OF_TURN_TOKENS)
    return frozenset(token for token in named if token is not None).union(well_known)
