"""The exception tree. Every error the project raises on purpose derives from `MvllmError`.

Messages say what was found, what was expected and, where the user can act, what to do.
"""

from __future__ import annotations


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
    """A backend can't run here; `extra` is the pip extra that would bring it, if any."""

    def __init__(self, backend: str, reason: str, *, extra: str | None = None) -> None:
        hint = f"; install it with: pip install 'mvllm-engine[{extra}]'" if extra else ""
        super().__init__(f"backend {backend!r} is unavailable: {reason}{hint}")
        self.backend = backend
        self.extra = extra


class EngineClosed(MvllmError):
    """The engine was closed, or closed itself after an error that no request alone had caused."""


class InvariantViolation(MvllmError):
    """Internal state contradicts a stated invariant: a bug in this project."""
