"""What a user may choose of the MLX backend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from mvllm.core.errors import ConfigError

Device = Literal["auto", "cpu", "gpu"]
Activations = Literal["f32", "f16", "bf16"]

MAX_ROWS_APART = 64
"""Beyond this many rows no device gains from reading a matrix once per row."""


@dataclass(frozen=True)
class MlxOptions:
    """Settings of a `MlxBackend`.

    Raises:
        ConfigError: a value is none of those allowed.
    """

    device: Device = "auto"  # "auto": the GPU where MLX has one, else the CPU
    activations: Activations = "f32"  # type of activations, dense weights and the groups' scales
    dense: bool = False  # keep weights without an exact MLX format dense instead of re-encoding them
    exact: bool = False  # every token is a pass of its own, so that no output depends on the batch
    rows_apart: int = 0  # products of at most this many rows are made row by row; 0: never
    compile: bool | None = None  # compile graphs; None: on a GPU only

    def __post_init__(self) -> None:
        for name, kind in (("device", Device), ("activations", Activations)):
            if getattr(self, name) not in get_args(kind):
                allowed = ", ".join(get_args(kind))
                raise ConfigError(f"mlx {name} must be one of {allowed}; got {getattr(self, name)!r}")
        if type(self.rows_apart) is not int or not 0 <= self.rows_apart <= MAX_ROWS_APART:
            raise ConfigError(
                f"mlx rows_apart must be a whole number from 0 to {MAX_ROWS_APART}, got {self.rows_apart!r}"
            )
