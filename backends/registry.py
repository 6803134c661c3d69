"""Backends by name, each imported only when it is asked for."""

from __future__ import annotations

from collections.abc import Callable

from mvllm.core.errors import BackendUnavailable, ConfigError
from mvllm.core.tensor import Backend


def _cpu(threads: int | None) -> Backend:
    from mvllm.backends.cpu.backend import CpuBackend

    return CpuBackend(threads=threads)


def _reference(threads: int | None) -> Backend:
    from mvllm.backends.reference.backend import ReferenceBackend

    return ReferenceBackend()


_FACTORIES: dict[str, Callable[[int | None], Backend]] = {"cpu": _cpu, "reference": _reference}

BACKEND_NAMES = ("auto", *_FACTORIES)


def create_backend(name: str = "auto", *, threads: int | None = None) -> Backend:
    """The backend called `name`; "auto" takes the fastest one that can run here.

    Args:
        threads: worker threads of the cpu backend; None: as many as this process may use.

    Raises:
        ConfigError: no backend has that name.
        BackendUnavailable: a library that it needs is missing; the message names it.
    """
    wanted = "cpu" if name == "auto" else name
    if wanted not in _FACTORIES:
        raise ConfigError(f"unknown backend {name!r}; known: {', '.join(BACKEND_NAMES)}")
    try:
        return _FACTORIES[wanted](threads)
    except ImportError as error:
        raise BackendUnavailable(wanted, str(error)) from error
