"""Reading prompts from the command line, standard input and files."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import click

from mvllm.core.errors import ConfigError
from mvllm.core.request import SamplingParams

_SAMPLING_FIELDS = frozenset(SamplingParams.__dataclass_fields__)


@dataclass(frozen=True)
class PromptInput:
    """One prompt: text, a conversation, or token ids; with its own sampling fields, if any."""

    id: str | int
    text: str | None = None
    messages: list[dict[str, Any]] | None = None
    token_ids: list[int] | None = None
    sampling: dict[str, Any] = field(default_factory=dict)


def read_prompt(argument: str | None) -> str:
    """The prompt given as an argument; from standard input for "-", or if there is none and input is piped.

    Raises:
        click.UsageError: there is no prompt, and standard input is a terminal or closed.
    """
    if argument is not None and argument != "-":
        return argument
    if argument is None and (sys.stdin is None or sys.stdin.closed or sys.stdin.isatty()):
        raise click.UsageError("give a prompt, '-' to read it from standard input, or --prompts FILE")
    try:
        text = _decode(_standard_input())
    except UnicodeDecodeError as error:
        raise click.UsageError(f"standard input is not UTF-8 text: {error}") from error
    if not text.strip():
        raise click.UsageError("standard input holds no prompt")
    return text.rstrip("\r\n")


def read_prompt_file(path: Path) -> list[PromptInput]:
    """Prompts of a file: JSON lines if its first line is a JSON object, otherwise one prompt per line.

    A JSON line has "prompt" (text), "messages" or "prompt_token_ids", and may have "id" and any sampling
    field, which then overrides the command line's. Blank lines are skipped.

    Raises:
        ConfigError: a line can't be used; the message names it.
    """
    try:
        text = _decode(_standard_input() if str(path) == "-" else path.read_bytes())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} can't be read as UTF-8 text: {error}") from error
    # Not splitlines: JSON strings may hold U+2028 and its like.
    numbered = enumerate(text.split("\n"), 1)
    lines = [(number, line.removesuffix("\r")) for number, line in numbered if line.strip()]
    if not lines:
        raise ConfigError(f"{path} holds no prompt")
    if not lines[0][1].lstrip().startswith("{"):
        return [PromptInput(id=index, text=line) for index, (_, line) in enumerate(lines)]
    return [_parse_line(f"{path}, line {number}", index, line) for index, (number, line) in enumerate(lines)]


def _standard_input() -> bytes:
    if sys.stdin is None:
        raise click.UsageError("standard input is closed")
    return sys.stdin.buffer.read()


def _decode(raw: bytes) -> str:
    """Text, without the byte order mark that some editors put first."""
    return raw.decode("utf-8-sig")


def _parse_line(where: str, index: int, line: str) -> PromptInput:
    try:
        fields = json.loads(line, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ConfigError(f"{where}: expected a JSON object")
    id = fields.pop("id", index)
    sources = {
        name: fields.pop(name) for name in ("prompt", "messages", "prompt_token_ids") if name in fields
    }
    if len(sources) != 1:
        raise ConfigError(f'{where}: exactly one of "prompt", "messages" and "prompt_token_ids" is needed')
    unknown = set(fields) - _SAMPLING_FIELDS
    if unknown:
        raise ConfigError(f"{where}: unknown field {', '.join(sorted(unknown))}")
    if "logit_bias" in fields and isinstance(fields["logit_bias"], dict):
        fields["logit_bias"] = _integer_keys(where, fields["logit_bias"])
    return PromptInput(id, _text(where, sources), _messages(where, sources), _ids(where, sources), fields)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _integer_keys(where: str, biases: dict[str, Any]) -> dict[int, Any]:
    try:
        return {int(token): bias for token, bias in biases.items()}
    except ValueError as error:
        raise ConfigError(f"{where}: logit_bias has a key that is not a token id") from error


def _text(where: str, sources: dict[str, Any]) -> str | None:
    text = sources.get("prompt")
    if "prompt" in sources and not isinstance(text, str):
        raise ConfigError(f'{where}: "prompt" must be a string')
    return text


def _messages(where: str, sources: dict[str, Any]) -> list[dict[str, Any]] | None:
    messages = sources.get("messages")
    if "messages" in sources and not (
        isinstance(messages, list) and messages and all(isinstance(message, dict) for message in messages)
    ):
        raise ConfigError(f'{where}: "messages" must be a list of objects')
    return messages


def _ids(where: str, sources: dict[str, Any]) -> list[int] | None:
    ids = sources.get("prompt_token_ids")
    if "prompt_token_ids" in sources and not (
        isinstance(ids, list) and all(type(token) is int for token in ids)
    ):
        raise ConfigError(f'{where}: "prompt_token_ids" must be a list of whole numbers')
    return ids
