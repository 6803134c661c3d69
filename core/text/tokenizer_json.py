"""Builds a vocabulary from a Hugging Face `tokenizer.json`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from tokenizers import Tokenizer

from mvllm.core.errors import ModelFileError
from mvllm.core.text.assets import TextAssets
from mvllm.core.text.vocabulary import ControlToken, Spelling, Vocabulary
from mvllm.core.types import TokenId

MAX_TOKEN_ID = 10_000_000
"""An id above this is taken for damage: tables are as long as the largest id."""

_PROBE = "a"


def vocabulary_from_json(source: bytes, assets: TextAssets) -> Vocabulary:
    """Raises ModelFileError: not a usable tokenizer.json, or a decoder that is not supported."""
    description = _parsed(source)
    encoder = _encoder(source.decode())
    added = encoder.get_added_tokens_decoder()
    texts = _texts_by_id(encoder)
    spelling, strips_space = _decoding(description)
    control = {
        token.content: ControlToken(id, strips_left=token.lstrip, strips_right=token.rstrip)
        for id, token in added.items()
        if token.special and token.content
    }
    prefix, suffix = _frame(encoder, texts, assets)
    return Vocabulary(
        encoder=encoder,
        continuing_encoder=_continuing_encoder(encoder, description),
        texts=texts,
        literal_ids=frozenset(added) if spelling is Spelling.BYTE_LEVEL else frozenset(),
        silent_ids=frozenset(),
        control_tokens=control,
        special_ids=frozenset(token.id for token in control.values()),
        spelling=spelling,
        adds_leading_space=strips_space,
        prefix=prefix,
        suffix=suffix,
    )


def _parsed(source: bytes) -> dict[str, Any]:
    try:
        description = json.loads(source)
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"tokenizer.json is not JSON: {error}") from error
    if not isinstance(description, dict) or not isinstance(description.get("model"), dict):
        raise ModelFileError("tokenizer.json has no 'model' object; expected a Hugging Face tokenizer")
    return description


def _encoder(source: str) -> Tokenizer:
    try:
        encoder = Tokenizer.from_str(source)
    except Exception as error:  # the library raises bare Exception
        raise ModelFileError(f"tokenizer.json is invalid: {error}") from error
    encoder.no_truncation()
    encoder.no_padding()
    encoder.encode_special_tokens = True
    return encoder


def _texts_by_id(encoder: Tokenizer) -> tuple[str, ...]:
    ids = encoder.get_vocab(with_added_tokens=True)
    largest = max(ids.values(), default=-1)
    if largest > MAX_TOKEN_ID:
        raise ModelFileError(f"tokenizer.json has token id {largest}; at most {MAX_TOKEN_ID} is accepted")
    texts = [""] * (largest + 1)
    for text, id in ids.items():
        texts[id] = text
    return tuple(texts)


def _steps(part: object) -> Iterator[dict[str, Any]]:
    """A component of the file, or the components of a sequence, however nested."""
    if not isinstance(part, dict):
        return
    if part.get("type") == "Sequence":
        for key in ("decoders", "pretokenizers", "normalizers"):
            for step in part.get(key) or ():
                yield from _steps(step)
    else:
        yield part


def _decoding(description: dict[str, Any]) -> tuple[Spelling, bool]:
    """How tokens spell bytes, and whether decoding takes a leading space away."""
    steps = {step.get("type"): step for step in _steps(description.get("decoder"))}
    if "ByteLevel" in steps:
        return Spelling.BYTE_LEVEL, False
    if "Metaspace" in steps:
        return Spelling.SENTENCEPIECE, steps["Metaspace"].get("prepend_scheme", "always") != "never"
    if "ByteFallback" in steps or "Replace" in steps:
        return Spelling.SENTENCEPIECE, bool(steps.get("Strip", {}).get("start", 0))
    found = ", ".join(map(str, steps)) or "none"
    raise ModelFileError(
        f"tokenizer.json has an unsupported decoder ({found}); expected ByteLevel, Metaspace or ByteFallback"
    )


def _continuing_encoder(encoder: Tokenizer, description: dict[str, Any]) -> Tokenizer:
    """An encoder that adds no leading space, where the file asks for one at the start of a text only."""
    first_only = [
        step
        for step in _steps(description.get("pre_tokenizer"))
        if step.get("type") == "Metaspace" and step.get("prepend_scheme") == "first"
    ]
    if not first_only:
        return encoder
    for step in first_only:
        step["prepend_scheme"] = "never"
    return _encoder(json.dumps(description))


def _frame(
    encoder: Tokenizer, texts: tuple[str, ...], assets: TextAssets
) -> tuple[tuple[TokenId, ...], tuple[TokenId, ...]]:
    """The tokens before and after every text: what `add_bos` says, or else the file's post-processor."""
    if assets.add_bos is None:
        bare = encoder.encode(_PROBE, add_special_tokens=False).ids
        framed = encoder.encode(_PROBE, add_special_tokens=True).ids
        for start in range(len(framed) - len(bare) + 1):
            if framed[start : start + len(bare)] == bare:
                return tuple(framed[:start]), tuple(framed[start + len(bare) :])
    if not assets.add_bos:
        return (), ()
    if assets.bos_token_id is not None:
        return (assets.bos_token_id,), ()
    if assets.bos_token is not None and assets.bos_token in texts:
        return (texts.index(assets.bos_token),), ()
    raise ModelFileError("the model asks for a BOS token at the start of a text but names none")
