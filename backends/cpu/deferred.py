"""Things for Numba code that come into being when Numba first asks for their type.

A start whose kernels are all in the compile cache never asks, and so need not import Numba.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any


class Deferred:
    """Stands for what `make` returns, in code that Numba compiles."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make

    @cached_property
    def _made(self) -> Any:
        return self._make()

    @property
    def _numba_type_(self) -> Any:
        """How Numba asks an object that it does not know for its type."""
        from numba.core.registry import cpu_target

        typing = cpu_target.typing_context
        made = self._made
        typing.refresh()  # takes in what came up since the compilation that asks began
        return typing.resolve_value_type(made)


def number_type(name: str) -> Any:
    """Numba's type "int64", "float32", ..."""
    import numba

    return getattr(numba.types, name)
