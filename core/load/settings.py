"""Typed, checked look-ups in a file's own settings: GGUF metadata and JSON configurations alike."""

from __future__ import annotations

from collections.abc import Mapping

from mvllm.core.errors import ModelFileError, shown

MAX_INTEGER = 2**31 - 1
MAX_CONTEXT = 2**24  # tokens; the rotary tables grow with it
SMALLEST_NUMBER, LARGEST_NUMBER = 1e-30, 1e30


class Settings:
    """Reads values by key; a missing or null value is None. Raises ModelFileError that names file and key
    for a value of another type or out of range. `prefix` is put before every key."""

    def __init__(self, where: str, values: Mapping[str, object], prefix: str = "") -> None:
        self.where = where
        self.values = values
        self._prefix = prefix

    def error(self, problem: str) -> ModelFileError:
        """An error that names the file, to be raised."""
        return ModelFileError(f"{self.where}: {problem}")

    def name(self, key: str) -> str:
        """The key as the file spells it."""
        return self._prefix + key

    def get(self, key: str) -> object:
        return self.values.get(self.name(key))

    def integer(self, key: str, *, minimum: int = 1, maximum: int = MAX_INTEGER) -> int | None:
        """A whole number in [minimum, maximum]."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value <= maximum:
            raise self.error(
                f"{self.name(key)} is {shown(value)}; a whole number from {minimum} to {maximum} is expected"
            )
        return value

    def require_integer(self, key: str, *, maximum: int = MAX_INTEGER) -> int:
        """A positive whole number that must be there."""
        value = self.integer(key, maximum=maximum)
        if value is None:
            raise self.error(f"{self.name(key)} is missing")
        return value

    def number(self, key: str, *, minimum: float = 0.0) -> float | None:
        """A number above `minimum` and of a magnitude that arithmetic in float32 survives."""
        value = self.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not _in_range(value, minimum):
            raise self.error(
                f"{self.name(key)} is {shown(value)}; a finite number above {minimum} is expected"
            )
        return float(value)

    def require_number(self, key: str) -> float:
        """A positive number that must be there."""
        value = self.number(key)
        if value is None:
            raise self.error(f"{self.name(key)} is missing")
        return value

    def text(self, key: str) -> str | None:
        value = self.get(key)
        if value is not None and not isinstance(value, str):
            raise self.error(f"{self.name(key)} is {shown(value)}; a string is expected")
        return value

    def flag(self, key: str) -> bool | None:
        value = self.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.error(f"{self.name(key)} is {shown(value)}; true or false is expected")
        return value

    def section(self, key: str) -> Settings | None:
        """A nested mapping."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.error(f"{self.name(key)} is {shown(value)}; an object is expected")
        return Settings(f"{self.where}: {self.name(key)}", value)


def _in_range(value: float, minimum: float) -> bool:
    """Above `minimum` and neither huge nor tiny. NaN fails every comparison."""
    return minimum < value and (value == 0 or SMALLEST_NUMBER <= abs(value) <= LARGEST_NUMBER)
