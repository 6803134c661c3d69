"""Backends by name, each imported only when it is asked for."""

from __future__ import annotations

import platform
from collections.abc import Callable
from importlib.util import find_spec

from mvllm.backends.mlx.options import MlxOptions
from mvllm.core.errors import BackendUnavailable, ConfigError
from mvllm.core.tensor import Backend


def _cpu(threads: int | None, mlx: MlxOptions) -> Backend:
    from mvllm.backends.cpu.backend import CpuBackend

    return CpuBackend(threads=threads)


def _mlx(threads: int | None, mlx: MlxOptions) -> Backend:
    if find_spec("mlx") is None:
        raise BackendUnavailable("mlx", "MLX is not installed; run: pip install 'mvllm-engine[mlx]'")
    from mvllm.backends.mlx.backend import MlxBackend

    return MlxBackend(mlx)


def _reference(threads: int | None, mlx: MlxOptions) -> Backend:
    from mvllm.backends.reference.backend import ReferenceBackend

    return ReferenceBackend()


_FACTORIES: dict[str, Callable[[int | None, MlxOptions], Backend]] = {
    "cpu": _cpu,
    "mlx": _mlx,
    "reference": _reference,
}

BACKEND_NAMES = ("auto", *_FACTORIES)


def create_backend(
    name: str = "auto", *, threads: int | None = None, mlx: MlxOptions | None = None
) -> Backend:
    """The backend called `name`; "auto" takes mlx where there is Metal, else cpu.

    Args:
        threads: worker threads of the cpu backend; None: as many as this process may use.
        mlx: options of the mlx backend; None: its defaults.

    Raises:
        ConfigError: no backend has that name.
        BackendUnavailable: a library that it needs is missing; the message names it.
    """
    wanted = _fastest() if name == "auto" else name
    if wanted not in _FACTORIES:
        raise ConfigError(f"unknown backend {name!r}; known: {', '.join(BACKEND_NAMES)}")
    try:
        return _FACTORIES[wanted](threads, mlx or MlxOptions())
    except ImportError as error:
        raise BackendUnavailable(wanted, str(error)) from error


def _fastest() -> str:
    """The name of the fastest backend that can run here."""
    if platform.system() != "Darwin" or platform.machine() != "arm64" or find_spec("mlx") is None:
        return "cpu"
    import mlx.core

    return "mlx" if mlx.core.metal.is_available() else "cpu"
