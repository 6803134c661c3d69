"""Checks the messages of a chat and brings them into the one form that templates get."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mvllm.core.errors import TemplateError, shown

Message = Mapping[str, Any]
"""`role`, `content` (text, or a list of text parts), and what else the template knows, e.g. `tool_calls`."""

_ROLE = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_MAX_DEPTH = 64


def checked_messages(messages: Sequence[Message], *, content_as_parts: bool) -> list[dict[str, Any]]:
    """Copies of the messages, made of JSON types only.

    A list of text parts stays one if `content_as_parts`; otherwise the texts are joined by line breaks.

    Raises:
        TemplateError: there is no message, or one is malformed; the error names which.
    """
    if not messages:
        raise TemplateError("messages is empty; a chat needs at least one message")
    return [
        _checked_message(message, f"messages[{index}]", content_as_parts)
        for index, message in enumerate(messages)
    ]


def _checked_message(message: object, where: str, content_as_parts: bool) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise TemplateError(f"{where} is {type(message).__name__}; expected an object with role and content")
    checked: dict[str, Any] = plain(message, where)
    role = checked.get("role")
    if not isinstance(role, str) or not _ROLE.fullmatch(role):
        raise TemplateError(f"{where}.role is {shown(role)}; expected a word such as 'user' or 'assistant'")
    content = checked.get("content")
    if isinstance(content, list):
        texts = [_part_text(part, f"{where}.content[{index}]") for index, part in enumerate(content)]
        if not content_as_parts:
            checked["content"] = "\n".join(texts)
    elif content is None:
        if not checked.get("tool_calls"):
            raise TemplateError(f"{where}.content is missing; expected text")
        checked["content"] = None
    elif not isinstance(content, str):
        raise TemplateError(f"{where}.content is {shown(content)}; expected text or a list of text parts")
    _parse_arguments(checked.get("tool_calls"))
    return checked


def _part_text(part: object, where: str) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    raise TemplateError(
        f"{where} is {shown(part)}; only parts of the form {{'type': 'text', 'text': ...}} work"
    )


def _parse_arguments(tool_calls: object) -> None:
    """The API carries the arguments of a call as JSON text; templates write them out as objects."""
    for call in tool_calls if isinstance(tool_calls, list) else ():
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            try:
                function["arguments"] = json.loads(function["arguments"])
            except (ValueError, RecursionError):
                continue


def plain(value: object, where: str, depth: int = 0) -> Any:
    """A deep copy made of dicts with text keys, lists, text, numbers, booleans and None.

    Raises:
        TemplateError: another type, or too much nesting.
    """
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, str):
        return str(value)
    if depth >= _MAX_DEPTH:
        raise TemplateError(f"{where} is nested more than {_MAX_DEPTH} levels deep")
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {str(key): plain(item, f"{where}.{key}", depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item, f"{where}[{index}]", depth + 1) for index, item in enumerate(value)]
    raise TemplateError(f"{where} is of type {type(value).__name__}; expected JSON types")


def strings_in(value: Any) -> Iterator[str]:
    """Every string of a plain value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from strings_in(item)
    elif isinstance(value, list):
        for item in value:
            yield from strings_in(item)
