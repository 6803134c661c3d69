"""Builds a vocabulary from the tokenizer metadata of a GGUF file."""

from __future__ import annotations

from collections import defaultdict
from typing import cast

from tokenizers import AddedToken, Tokenizer, models, normalizers

from mvllm.core.errors import ModelFileError
from mvllm.core.text.assets import GgufVocabulary, TextAssets, TokenType
from mvllm.core.text.pretokenizers import named_pre_tokenizer
from mvllm.core.text.vocabulary import SENTENCEPIECE_SPACE, ControlToken, Spelling, Vocabulary
from mvllm.core.types import TokenId

_NORMAL = int(TokenType.NORMAL)  # a plain int: compared once for each of up to 262k tokens


def vocabulary_from_gguf(
    source: GgufVocabulary, assets: TextAssets, *, allow_unknown_pretokenizer: bool
) -> Vocabulary:
    """Byte-level BPE for the model "gpt2", SentencePiece-style for "llama".

    Raises:
        ModelFileError: another model, a missing or unknown pre-tokenizer, or contradictory contents.
    """
    if source.model == "gpt2":
        encoder = _byte_level_encoder(source, allow_unknown_pretokenizer)
    elif source.model == "llama":
        encoder = _sentencepiece_encoder(source)
    else:
        raise ModelFileError(f"tokenizer.ggml.model is {source.model!r}; supported are 'gpt2' and 'llama'")
    by_type = _ids_by_type(source)
    user_defined = by_type[TokenType.USER_DEFINED]
    encoder.add_tokens([AddedToken(source.tokens[id], normalized=False) for id in user_defined])
    control = by_type[TokenType.CONTROL]
    unknown = by_type[TokenType.UNKNOWN]
    return Vocabulary(
        encoder=encoder,
        continuing_encoder=encoder,
        texts=source.tokens,
        literal_ids=frozenset([*control, *user_defined, *unknown]),
        silent_ids=frozenset(by_type[TokenType.UNUSED]),
        control_tokens={source.tokens[id]: ControlToken(id) for id in control if source.tokens[id]},
        special_ids=frozenset([*control, *unknown]),
        spelling=Spelling.BYTE_LEVEL if source.model == "gpt2" else Spelling.SENTENCEPIECE,
        adds_leading_space=source.model == "llama" and source.add_space_prefix,
        prefix=_beginning(assets),
    )


def _beginning(assets: TextAssets) -> tuple[TokenId, ...]:
    return (assets.bos_token_id,) if assets.add_bos and assets.bos_token_id is not None else ()


def _ids_by_type(source: GgufVocabulary) -> defaultdict[int, list[TokenId]]:
    """The ids of all tokens that are not normal."""
    by_type: defaultdict[int, list[TokenId]] = defaultdict(list)
    for id, kind in enumerate(source.token_types):
        if kind != _NORMAL:
            by_type[kind].append(id)
    return by_type


def _byte_level_encoder(source: GgufVocabulary, allow_unknown: bool) -> Tokenizer:
    pre_tokenizer = named_pre_tokenizer(source.pre, allow_unknown=allow_unknown)
    merges = cast("list[tuple[str, str]]", [tuple(merge.split(" ")) for merge in source.merges])
    encoder = Tokenizer(_bpe(source, merges, ignore_merges=pre_tokenizer.ignore_merges))
    encoder.pre_tokenizer = pre_tokenizer.splitter()
    normalizer = pre_tokenizer.normalizer()
    if normalizer is not None:
        encoder.normalizer = normalizer
    return encoder


def _sentencepiece_encoder(source: GgufVocabulary) -> Tokenizer:
    unknown = source.unknown_token_id
    model = _bpe(
        source,
        _merges_by_score(source),
        unk_token=None if unknown is None else source.tokens[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    encoder = Tokenizer(model)
    spaces = normalizers.Replace(" ", SENTENCEPIECE_SPACE)
    leading = [normalizers.Prepend(SENTENCEPIECE_SPACE)] if source.add_space_prefix else []
    encoder.normalizer = normalizers.Sequence([*leading, spaces])
    return encoder


def _merges_by_score(source: GgufVocabulary) -> list[tuple[str, str]]:
    """The merges a SentencePiece BPE model makes, best first.

    SentencePiece (Kudo and Richardson 2018) joins the neighbours whose union is the piece of the highest
    score. As a rank needs a pair, each piece is listed with every cut into two pieces. Only normal pieces
    take part, so no control token can come out of text.
    """
    if len(source.scores) != len(source.tokens):
        raise ModelFileError(
            f"tokenizer.ggml.scores has {len(source.scores)} entries for {len(source.tokens)} tokens; "
            f"a 'llama' vocabulary needs one for each"
        )
    rows = zip(source.scores, source.tokens, source.token_types, strict=True)
    ranked = [(-score, token) for score, token, kind in rows if kind == _NORMAL]
    ranked.sort(key=lambda entry: entry[0])
    pieces = {token for _, token in ranked}
    return [
        (token[:cut], token[cut:])
        for _, token in ranked
        for cut in range(1, len(token))
        if token[cut:] in pieces and token[:cut] in pieces
    ]


def _bpe(source: GgufVocabulary, merges: list[tuple[str, str]], **options: object) -> models.BPE:
    ids = {token: id for id, token in enumerate(source.tokens)}
    try:
        return models.BPE(vocab=ids, merges=merges, **options)
    except Exception as error:  # the library raises bare Exception
        raise ModelFileError(
            f"the GGUF vocabulary contradicts itself: {error}; expected merges of known tokens"
        ) from error
