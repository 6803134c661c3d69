"""Text assets of a Hugging Face folder: tokenizer.json, tokenizer_config.json, chat templates, end tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from mvllm.core.load.contents import GenerationDefaults
from mvllm.core.load.end_tokens import END_OF_TURN_TOKENS
from mvllm.core.load.json_files import parse_json_object, read_bounded, read_json_object
from mvllm.core.load.settings import Settings
from mvllm.core.text.assets import TextAssets
from mvllm.core.types import TokenId

_MAX_TEMPLATE_BYTES = 1 << 20


def read_text_assets(folder: Path, config: Settings, generation: Settings, vocab_size: int) -> TextAssets:
    """Tokenizer, special tokens and chat template of a folder.

    Args:
        config: config.json.
        generation: generation_config.json, empty if absent.
        vocab_size: rows of the embedding. End tokens beyond it can't be generated and are left out.

    Raises:
        ModelFileError: a file is damaged, has values of the wrong type, or a BOS outside the vocabulary.
    """
    tokenizer_json = read_bounded(folder / "tokenizer.json")
    settings = _settings(folder / "tokenizer_config.json")
    vocabulary = _Vocabulary(folder / "tokenizer.json", tokenizer_json)
    bos_token, eos_token = _special_token(settings, "bos_token"), _special_token(settings, "eos_token")
    end_tokens = {*_ids(config, "eos_token_id"), *_ids(generation, "eos_token_id"), *vocabulary.end_of_turn()}
    if (eos_id := vocabulary.find(eos_token)) is not None:
        end_tokens.add(eos_id)
    bos_id = vocabulary.find(bos_token)
    if bos_id is None:
        bos_id = next(iter(_ids(config, "bos_token_id")), None)
    if bos_id is not None and bos_id >= vocab_size:
        raise config.error(f"the BOS token is {bos_id}, but the vocabulary has {vocab_size} tokens")
    return TextAssets(
        tokenizer_json=tokenizer_json,
        chat_template=_chat_template(folder, settings),
        bos_token=bos_token,
        eos_token=eos_token,
        bos_token_id=bos_id,
        eos_token_ids=frozenset(token for token in end_tokens if token < vocab_size),
    )


def read_generation_config(folder: Path) -> Settings:
    """generation_config.json; empty if absent."""
    return _settings(folder / "generation_config.json")


def generation_defaults(generation: Settings) -> GenerationDefaults:
    return GenerationDefaults(
        temperature=generation.number("temperature", minimum=-1e-30),
        top_p=generation.number("top_p"),
        top_k=generation.integer("top_k", minimum=0),
        repetition_penalty=generation.number("repetition_penalty"),
    )


class _Vocabulary:
    """Ids of tokens by their text, as far as tokenizer.json tells them without being built."""

    def __init__(self, path: Path, raw: bytes | None) -> None:
        parsed = {} if raw is None else parse_json_object(raw, str(path))
        model, added = parsed.get("model"), parsed.get("added_tokens")
        vocab = model.get("vocab") if isinstance(model, dict) else None
        self._ids: dict[str, object] = vocab if isinstance(vocab, dict) else {}
        self._added = [entry for entry in added if isinstance(entry, dict)] if isinstance(added, list) else []

    def find(self, token: str | None) -> TokenId | None:
        if token is None:
            return None
        candidates = [entry.get("id") for entry in self._added if entry.get("content") == token]
        return next(_valid_ids([*candidates, self._ids.get(token)]), None)

    def end_of_turn(self) -> Iterator[TokenId]:
        """Ids of the special tokens that end a turn by their well-known text."""
        for entry in self._added:
            if entry.get("special") is True and entry.get("content") in END_OF_TURN_TOKENS:
                yield from _valid_ids([entry.get("id")])


def _settings(path: Path) -> Settings:
    return Settings(str(path), read_json_object(path) or {})


def _valid_ids(values: Iterable[object]) -> Iterator[TokenId]:
    return (
        value for value in values if isinstance(value, int) and not isinstance(value, bool) and value >= 0
    )


def _ids(settings: Settings, key: str) -> tuple[TokenId, ...]:
    """A token id or a list of them; absent is none."""
    value = settings.get(key)
    values = value if isinstance(value, list) else [] if value is None else [value]
    ids = tuple(_valid_ids(values))
    if len(ids) != len(values):
        raise settings.error(f"{key} is {str(value)[:80]}; a token id or a list of them is expected")
    return ids


def _special_token(settings: Settings, key: str) -> str | None:
    """A special token's text: a string, or an object with `content`."""
    value = settings.get(key)
    if isinstance(value, dict):
        value = value.get("content")
    if value is not None and not isinstance(value, str):
        raise settings.error(f"{key} is {str(value)[:80]}; a string is expected")
    return value


def _chat_template(folder: Path, settings: Settings) -> str | None:
    """The template file wins over tokenizer_config.json; of several named ones, "default"."""
    path = folder / "chat_template.jinja"
    raw = read_bounded(path, _MAX_TEMPLATE_BYTES)
    if raw is not None:
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise settings.error(f"{path.name} is not valid UTF-8") from error
    value = settings.get("chat_template")
    if isinstance(value, list):
        named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
        value = named.get("default")
    if value is not None and not isinstance(value, str):
        raise settings.error("chat_template is neither a string nor a list of named templates")
    return value
