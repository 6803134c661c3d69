"""The exception tree. Every error the project raises on purpose derives from `MvllmError`.

Messages say what was found, what was expected and, where the user can act, what to do. `shown` and `listed`
put what a file or a caller brought into them, cut to a length that a terminal bears.
"""

from __future__ import annotations

from collections.abc import Sequence

_MAX_SHOWN_CHARACTERS = 80
_MAX_LISTED = 8


class MvllmError(Exception):
    """Base of all errors raised on purpose."""


class ConfigError(MvllmError):
    """A setting or a sampling parameter has an unusable value, alone or together with another."""


class ModelFileError(MvllmError):
    """A model file is missing, damaged, hostile or of an unsupported kind."""


class DownloadError(MvllmError):
    """A model could not be fetched, or what arrived is not what was promised."""


class TemplateError(MvllmError):
    """A chat template is missing, fails to render, or exceeds its limits."""


class RequestRejected(MvllmError):
    """A request can never be served as given.

    `needed` and `available` are in the unit that `reason` names (tokens or blocks).
    """

    def __init__(self, reason: str, *, needed: int | None = None, available: int | None = None) -> None:
        super().__init__(reason)
        self.needed = needed
        self.available = available


class CapacityError(MvllmError):
    """An allocation asked for more than there is; nothing was changed."""

    def __init__(self, what: str, *, needed: int, available: int) -> None:
        super().__init__(f"{what}: {needed} needed, {available} available")
        self.needed = needed
        self.available = available


class BackendUnavailable(MvllmError):
    """A backend can't run here."""

    def __init__(self, backend: str, reason: str) -> None:
        super().__init__(f"backend {backend!r} is unavailable: {reason}")
        self.backend = backend


class EngineClosed(MvllmError):
    """The engine was closed, or closed itself after an error that no request alone had caused."""


class InvariantViolation(MvllmError):
    """Internal state contradicts a stated invariant: a bug in this project."""


def shown(value: object) -> str:
    """A value as a message shows it, at most 80 characters."""
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN_CHARACTERS else text[: _MAX_SHOWN_CHARACTERS - 3] + "..."


def listed(names: Sequence[str]) -> str:
    """The first names of a list, with commas."""
    return ", ".join(names[:_MAX_LISTED]) + (", ..." if len(names) > _MAX_LISTED else "")
