"""Small vocabularies of every kind, with the awkward cases that real ones have."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from mvllm.core.text.assets import GgufVocabulary, TextAssets
from mvllm.core.text.byte_level import BYTE_OF_CHARACTER

CONTROL = ("<|bos|>", "<|im_start|>", "<|im_end|>", "[INST]", "<|im|>")
USER_DEFINED = ("<tool_call>", "</tool_call>")
UNUSED = "[PAD]"
BOS, IM_START, IM_END, INST, IM = range(5)

_CHARACTER = {byte: character for character, byte in BYTE_OF_CHARACTER.items()}


def spelled(text: str | bytes) -> str:
    """Text or bytes in the byte-level alphabet."""
    return "".join(_CHARACTER[byte] for byte in (text.encode() if isinstance(text, str) else text))


def _merge(left: str | bytes, right: str | bytes) -> str:
    return f"{spelled(left)} {spelled(right)}"


MERGES = (
    *(_merge(left, right) for left, right in ("he", "lo", ("he", "l"), ("hel", "lo"), (" ", "hello"))),
    *(_merge(left, right) for left, right in (" w", ("o", "r"), (" w", "or"), ("l", "d"), ("\n", "\n"))),
    *(_merge(left, right) for left, right in ("<|", "|>", "im", ("im", "_"))),
    _merge(b"\xf0", b"\x9f"),  # half of an emoji
    _merge(b"\xc4", b"\x8d"),  # a whole "č"
    _merge(b"\xe4\xb8"[:1], b"\xb8"),  # two thirds of "中"
)


def byte_level_vocabulary(**changes: Any) -> GgufVocabulary:
    """Control tokens, user-defined tokens, 256 bytes, the results of MERGES, and an unused id."""
    merged = [merge.replace(" ", "") for merge in MERGES]
    normal = [*_CHARACTER.values(), *merged]
    tokens = (*CONTROL, *USER_DEFINED, *normal, UNUSED)
    types = (3,) * len(CONTROL) + (4,) * len(USER_DEFINED) + (1,) * len(normal) + (5,)
    vocabulary = GgufVocabulary("gpt2", "gpt-2", tokens, types, merges=MERGES)
    return replace(vocabulary, **changes)


def byte_level_assets(vocabulary: GgufVocabulary | None = None, **changes: Any) -> TextAssets:
    assets = TextAssets(
        gguf_vocabulary=vocabulary or byte_level_vocabulary(),
        bos_token=CONTROL[BOS],
        eos_token=CONTROL[IM_END],
        bos_token_id=BOS,
        add_bos=True,
        eos_token_ids=frozenset({IM_END}),
    )
    return replace(assets, **changes)


_PIECES: tuple[str, ...] = (
    "▁",
    "h",
    "e",
    "l",
    "o",
    "w",
    "r",
    "d",
    "he",
    "ll",
    "hell",
    "hello",
    "▁w",
    "or",
    "▁wor",
    "ld",
)
_PIECES += ("▁hello", "▁▁", "lo", "llo", "rl", "world", "▁world", "ell", "oo", "ooo")


def sentencepiece_vocabulary(**changes: Any) -> GgufVocabulary:
    """Unknown, BOS and EOS, a user-defined token, byte tokens, and pieces with falling scores."""
    byte_tokens = tuple(f"<0x{byte:02X}>" for byte in range(256))
    tokens = ("<unk>", "<s>", "</s>", "<tool_call>", *byte_tokens, *_PIECES)
    types = (2, 3, 3, 4) + (6,) * 256 + (1,) * len(_PIECES)
    scores = (0.0,) * 260 + tuple(-float(rank * 7 % 26) for rank in range(len(_PIECES)))
    return replace(GgufVocabulary("llama", None, tokens, types, scores, unknown_token_id=0), **changes)


def sentencepiece_assets(vocabulary: GgufVocabulary | None = None, **changes: Any) -> TextAssets:
    assets = TextAssets(
        gguf_vocabulary=vocabulary or sentencepiece_vocabulary(),
        bos_token="<s>",
        eos_token="</s>",
        bos_token_id=1,
        add_bos=True,
        eos_token_ids=frozenset({2}),
    )
    return replace(assets, **changes)


def byte_level_json(*, adds_bos: bool = True, strips_right: bool = False) -> Tokenizer:
    """The tokens of `byte_level_vocabulary` as a tokenizer of the `tokenizers` library."""
    vocabulary = byte_level_vocabulary()
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in MERGES)]
    ids = {token: id for id, token in enumerate(vocabulary.tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(text, normalized=False, rstrip=strips_right) for text in CONTROL]
    )
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in USER_DEFINED])
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<|bos|> $A", special_tokens=[("<|bos|>", BOS)]
        )
    return tokenizer


def metaspace_json() -> Tokenizer:
    """A SentencePiece-style tokenizer that puts a space before the first word of a text only."""
    source = sentencepiece_vocabulary()
    pieces = set(_PIECES)
    pairs = [
        (piece[:cut], piece[cut:])
        for piece in _PIECES
        for cut in range(1, len(piece))
        if piece[:cut] in pieces and piece[cut:] in pieces
    ]
    ids = {token: id for id, token in enumerate(source.tokens)}
    model = models.BPE(vocab=ids, merges=pairs, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in ("<unk>", "<s>", "</s>")])
    return tokenizer


def json_assets(tokenizer: Tokenizer, **changes: Any) -> TextAssets:
    return replace(TextAssets(tokenizer_json=tokenizer.to_str().encode()), **changes)
