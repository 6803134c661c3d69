"""Bounded reading of JSON text from a model folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NoReturn

from mvllm.core.errors import ModelFileError

MAX_JSON_BYTES = 256 << 20  # the largest tokenizer.json files have tens of megabytes


def parse_json_object(raw: bytes, where: str) -> dict[str, object]:
    """Parse a JSON object with unique keys.

    Raises:
        ModelFileError: the text is not JSON, not an object, nests too deeply or repeats a key.
    """

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        result: dict[str, object] = {}
        for key, value in pairs:
            if key in result:
                raise ModelFileError(f"{where}: key {key!r} appears twice in one JSON object")
            result[key] = value
        return result

    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=unique, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"{where}: not valid JSON: {str(error)[:200]}") from error
    if not isinstance(value, dict):
        raise ModelFileError(f"{where}: a JSON object is expected, found {type(value).__name__}")
    return value


def read_bounded(path: Path, limit: int = MAX_JSON_BYTES) -> bytes | None:
    """Content of a file, or None if there is no such file.

    Raises:
        ModelFileError: the file is larger than `limit` bytes, or can't be read.
    """
    try:
        if not path.is_file():
            return None
        size = path.stat().st_size
        if size > limit:
            raise ModelFileError(f"{path}: {size} bytes; at most {limit} are accepted")
        return path.read_bytes()
    except OSError as error:
        raise ModelFileError(f"{path}: can't be read: {error.strerror or error}") from error


def read_json_object(path: Path) -> dict[str, object] | None:
    """The JSON object in a file, or None if there is no such file."""
    raw = read_bounded(path)
    return None if raw is None else parse_json_object(raw, str(path))


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
