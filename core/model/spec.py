"""`ModelSpec`: everything the decoder needs to know of an architecture, as values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Activation = Literal["silu", "gelu_tanh"]

_POSITIONS_AT_ONCE = 4096  # bounds the float64 temporaries of a rotary table


@dataclass(frozen=True)
class RopeSpec:
    """Rotary embedding over pairs (i, i + head_dim / 2).

    `inverse_frequencies` hold every scaling (linear, llama3, YaRN's interpolation, GGUF factors) already;
    the angle at position p is p * inverse_frequencies[i], and cos and sin are multiplied by `magnitude`.
    """

    inverse_frequencies: tuple[float, ...]  # head_dim / 2, float64
    magnitude: float = 1.0

    def table(self, num_positions: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """cos and sin, each float32[num_positions, head_dim / 2], computed in float64."""
        frequencies = np.array(self.inverse_frequencies)
        cos, sin = (np.empty((num_positions, len(frequencies)), np.float32) for _ in range(2))
        for start in range(0, num_positions, _POSITIONS_AT_ONCE):
            rows = slice(start, min(start + _POSITIONS_AT_ONCE, num_positions))
            angles = np.outer(np.arange(rows.start, rows.stop, dtype=np.float64), frequencies)
            cos[rows] = np.cos(angles) * self.magnitude
            sin[rows] = np.sin(angles) * self.magnitude
        return cos, sin


@dataclass(frozen=True)
class LayerSpec:
    """What may differ from layer to layer."""

    window: int | None = None  # a query attends to its last `window` positions, itself included; None: all
    rope: int = 0  # index into ModelSpec.ropes


@dataclass(frozen=True)
class ModelSpec:
    """A decoder-only transformer with RMS norms, rotary grouped-query attention and a gated MLP."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_length: int
    norm_eps: float
    ropes: tuple[RopeSpec, ...]
    layers: tuple[LayerSpec, ...]
    attention_scale: float
    activation: Activation = "silu"
    attention_soft_cap: float | None = None
    final_soft_cap: float | None = None
    embedding_scale: float = 1.0
    tied_head: bool = False

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def kv_values_per_token(self) -> int:
        """Numbers stored per position: keys and values of every layer."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim
