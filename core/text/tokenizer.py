"""Text to token ids and back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mvllm.core.errors import ModelFileError
from mvllm.core.text.assets import TextAssets
from mvllm.core.text.control_tokens import ControlTokens, Piece
from mvllm.core.text.gguf_vocabulary import vocabulary_from_gguf
from mvllm.core.text.tokenizer_json import vocabulary_from_json
from mvllm.core.text.vocabulary import Vocabulary
from mvllm.core.types import TokenId


class Tokenizer:
    """A model's vocabulary. Immutable (apart from caches of spelled-out tokens) and safe in any thread.

    Owns the encoders of the `tokenizers` library; does not know templates or requests.
    """

    def __init__(self, vocabulary: Vocabulary, eos_token_ids: frozenset[TokenId] = frozenset()) -> None:
        self.vocab_size = len(vocabulary.texts)
        self.special_ids = vocabulary.special_ids
        self.eos_token_ids = eos_token_ids
        self.control = ControlTokens(vocabulary.control_tokens)
        self.adds_leading_space = vocabulary.adds_leading_space
        self._vocabulary = vocabulary
        self._guarded_ids = self.control.ids - _unknown_ids(vocabulary)
        self._bytes: dict[TokenId, bytes] = {}
        self._whole_texts: dict[TokenId, str | None] = {}

    @classmethod
    def from_assets(cls, assets: TextAssets, *, allow_unknown_pretokenizer: bool = False) -> Tokenizer:
        """Build from what the checkpoint carries.

        Raises:
            ModelFileError: there is no tokenizer, it is damaged or of an unsupported kind, or a BPE
                vocabulary in a GGUF file names no known pre-tokenizer and the flag is not set.
        """
        if assets.tokenizer_json is not None:
            vocabulary = vocabulary_from_json(assets.tokenizer_json, assets)
        elif assets.gguf_vocabulary is not None:
            vocabulary = vocabulary_from_gguf(
                assets.gguf_vocabulary, assets, allow_unknown_pretokenizer=allow_unknown_pretokenizer
            )
        else:
            raise ModelFileError("the model has no tokenizer; only token ids can be used as prompts")
        return cls(vocabulary, assets.eos_token_ids)

    def encode(
        self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True
    ) -> list[TokenId]:
        """The ids of `text`.

        `parse_special` turns the strings of control tokens into those tokens. `add_special_tokens` adds what
        the model wants around a text, in general one BOS; it is not doubled if the text begins with it
        already.
        """
        ids = self.encode_pieces(self.control.split(text) if parse_special else [text])
        if not add_special_tokens:
            return ids
        prefix, suffix = list(self._vocabulary.prefix), list(self._vocabulary.suffix)
        if ids[: len(prefix)] != prefix:
            ids = prefix + ids
        return ids + suffix

    def encode_pieces(self, pieces: Sequence[Piece]) -> list[TokenId]:
        """The ids of texts and control tokens in a row; texts yield no control token, whatever they say."""
        ids: list[TokenId] = []
        for position, piece in enumerate(pieces):
            if isinstance(piece, str):
                ids += self._encode_text(piece, at_start=position == 0)
            else:
                ids.append(piece)
        return ids

    def _encode_text(self, text: str, *, at_start: bool) -> list[TokenId]:
        vocabulary = self._vocabulary
        encoder = vocabulary.encoder if at_start else vocabulary.continuing_encoder
        try:
            ids = encoder.encode(text, add_special_tokens=False).ids
        except TypeError:  # the library refuses lone surrogates
            ids = encoder.encode(_well_formed(text), add_special_tokens=False).ids
        return ids if self._guarded_ids.isdisjoint(ids) else self._without_control(ids)

    def _without_control(self, ids: Iterable[TokenId]) -> list[TokenId]:
        """Spell control tokens that merging alone has made letter by letter, leaving out what stays one."""
        spelled: list[TokenId] = []
        for id in ids:
            if id not in self._guarded_ids:
                spelled.append(id)
                continue
            for character in self._vocabulary.texts[id]:
                letters = self._vocabulary.continuing_encoder.encode(character, add_special_tokens=False).ids
                spelled += [letter for letter in letters if letter not in self._guarded_ids]
        return spelled

    def decode(
        self, ids: Iterable[TokenId], *, skip_special_tokens: bool = True, continues: bool = False
    ) -> str:
        """The text of `ids`; bytes that are not UTF-8 become U+FFFD, ids outside the vocabulary nothing.

        A leading space that encoding adds is taken away again, unless the text `continues` an earlier one.
        """
        skipped = self.special_ids if skip_special_tokens else frozenset()
        data = b"".join(self.token_bytes(id) for id in ids if id not in skipped)
        if self.adds_leading_space and not continues:
            data = data.removeprefix(b" ")
        return data.decode("utf-8", "replace")

    def token_bytes(self, token_id: TokenId) -> bytes:
        """The raw bytes the token adds to a text; of a special token, its name. Nothing for unknown ids."""
        data = self._bytes.get(token_id)
        if data is None:
            data = self._vocabulary.bytes_of(token_id)
            self._bytes[token_id] = data
        return data

    def token_text(self, token_id: TokenId) -> str:
        """The token on its own as text; a part of a character shows as U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def whole_text(self, token_id: TokenId) -> str | None:
        """The token on its own as text if it consists of whole characters, None otherwise."""
        try:
            return self._whole_texts[token_id]
        except KeyError:
            pass
        try:
            text = self.token_bytes(token_id).decode()
        except UnicodeDecodeError:
            text = None
        self._whole_texts[token_id] = text
        return text


def _unknown_ids(vocabulary: Vocabulary) -> frozenset[TokenId]:
    """The token that encoding itself puts for what the vocabulary cannot spell."""
    unknown = getattr(vocabulary.encoder.model, "unk_token", None)
    token = vocabulary.encoder.token_to_id(unknown) if unknown is not None else None
    return frozenset() if token is None else frozenset({token})


def _well_formed(text: str) -> str:
    """Surrogate pairs joined, lone surrogates as U+FFFD."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
