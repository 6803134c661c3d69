"""From named tensors to `ModelWeights`: every parameter set once, of the right shape, none left over."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from mvllm.core.errors import ModelFileError, listed
from mvllm.core.load.weights import HostWeight
from mvllm.core.tensor import LayerWeights, ModelWeights

ALWAYS = frozenset({"attention_norm", "q", "k", "v", "o", "mlp_norm", "gate", "up", "down"})
"""Slots of `LayerWeights` that every architecture fills."""

ATTENTION_BIASES = frozenset({"q_bias", "k_bias", "v_bias"})
MLP_BIASES = frozenset({"gate_bias", "up_bias", "down_bias"})
HEAD_NORMS = frozenset({"q_norm", "k_norm"})

MAX_HEAD_DIM = 4096
MAX_LAYERS = 4096


@dataclass(frozen=True)
class Dimensions:
    """Sizes that fix the shape of every tensor.

    Raises:
        ModelFileError: sizes that no transformer of this kind can have.
    """

    where: str  # the file, for messages
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ModelFileError(
                f"{self.where}: {self.num_heads} heads can't share {self.num_kv_heads} key-value heads evenly"
            )
        if self.head_dim % 2 or self.head_dim > MAX_HEAD_DIM:
            raise ModelFileError(
                f"{self.where}: head dimension is {self.head_dim}; "
                f"an even number up to {MAX_HEAD_DIM} is expected"
            )
        if self.num_layers > MAX_LAYERS:
            raise ModelFileError(f"{self.where}: {self.num_layers} layers; at most {MAX_LAYERS} are accepted")

    def slot_shape(self, slot: str) -> tuple[int, ...]:
        """Shape of the tensor in a slot of `LayerWeights`."""
        hidden, inner = self.hidden_size, self.intermediate_size
        q_width, kv_width = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            **{"attention_norm": (hidden,), "mlp_norm": (hidden,)},
            **{"q": (q_width, hidden), "k": (kv_width, hidden), "v": (kv_width, hidden)},
            **{"o": (hidden, q_width), "o_bias": (hidden,)},
            **{"q_bias": (q_width,), "k_bias": (kv_width,), "v_bias": (kv_width,)},
            **{"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)},
            **{"gate_bias": (inner,), "up_bias": (inner,), "down_bias": (hidden,)},
            **{"q_norm": (self.head_dim,), "k_norm": (self.head_dim,)},
        }
        return shapes[slot]


@dataclass(frozen=True)
class Naming:
    """How a file format names tensors; `{layer}` stands for the layer's number."""

    embedding: str
    final_norm: str
    head: str
    slots: Mapping[str, str]  # slot of LayerWeights -> template
    harmless: re.Pattern[str]  # tensors that may be present and are not used


@dataclass(frozen=True)
class Slots:
    """Which slots of `LayerWeights` a model has beyond `ALWAYS`."""

    required: frozenset[str] = frozenset()
    optional: frozenset[str] = frozenset()  # in all layers or in none; layer 0 decides


def assemble(
    tensors: Mapping[str, HostWeight],
    naming: Naming,
    dimensions: Dimensions,
    slots: Slots,
    *,
    tied: bool | None,
    row_orders: Mapping[str, NDArray[np.intp]],
) -> ModelWeights:
    """Fill every slot from `tensors`.

    Args:
        tied: True shares the embedding and ignores a head in the file; False needs one; None uses it if
            present and shares the embedding otherwise.
        row_orders: slot -> order in which the rows of that slot are stored.

    Raises:
        ModelFileError: a tensor is missing, has another shape, or is left over.
    """
    picker = _Picker(tensors, dimensions.where)
    vocab_shape = (dimensions.vocab_size, dimensions.hidden_size)
    embedding = picker.take(naming.embedding, vocab_shape)
    present = ALWAYS | slots.required
    present |= {slot for slot in slots.optional if naming.slots[slot].format(layer=0) in tensors}
    layers = []
    for layer in range(dimensions.num_layers):
        weights = {
            slot: picker.take(naming.slots[slot].format(layer=layer), dimensions.slot_shape(slot))
            for slot in sorted(present)
        }
        for slot in row_orders.keys() & present:
            weights[slot] = replace(weights[slot], row_order=row_orders[slot])
        layers.append(LayerWeights(**weights))
    final_norm = picker.take(naming.final_norm, (dimensions.hidden_size,))
    if tied or (tied is None and naming.head not in tensors):
        picker.ignore(naming.head)
        head = embedding
    else:
        head = picker.take(naming.head, vocab_shape)
    picker.refuse_leftovers(naming.harmless)
    return ModelWeights(embedding, tuple(layers), final_norm, head)


class _Picker:
    """Owns the set of names not yet used; does not own the tensors."""

    def __init__(self, tensors: Mapping[str, HostWeight], where: str) -> None:
        self._tensors = tensors
        self._where = where
        self._unused = set(tensors)

    def take(self, name: str, shape: tuple[int, ...]) -> HostWeight:
        """The tensor of that name; marks it used."""
        weight = self._tensors.get(name)
        if weight is None:
            raise ModelFileError(f"{self._where}: tensor {name!r} is missing")
        if weight.shape != shape:
            raise ModelFileError(
                f"{self._where}: tensor {name!r} has shape {weight.shape}, expected {shape} "
                "from the model's settings"
            )
        self._unused.discard(name)
        return weight

    def ignore(self, name: str) -> None:
        """Mark a tensor used that may or may not be there."""
        self._unused.discard(name)

    def refuse_leftovers(self, harmless: re.Pattern[str]) -> None:
        leftovers = sorted(name for name in self._unused if not harmless.fullmatch(name))
        if leftovers:
            raise ModelFileError(
                f"{self._where}: {len(leftovers)} tensors have no place in this architecture, and without "
                f"them its output would be wrong: {listed(leftovers)}"
            )
