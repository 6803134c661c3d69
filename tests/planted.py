"""A backend with an error planted in one layer, for tools that have to find it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from mvllm.core.load.weights import DenseWeight
from mvllm.core.model.spec import ModelSpec
from mvllm.core.tensor import Backend, KvGeometry, Model, ModelWeights


class PlantedBackend(Backend):
    """Another backend that has the down projection of one layer too large by `size`, relatively."""

    def __init__(self, inner: Backend, layer: int, size: float, name: str = "planted") -> None:
        self._inner, self._layer, self._size = inner, layer, size
        self.name = name
        self.capabilities = inner.capabilities

    def unsupported(self, spec: ModelSpec, weights: ModelWeights) -> str | None:
        return self._inner.unsupported(spec, weights)

    def load(self, spec: ModelSpec, weights: ModelWeights, geometry: KvGeometry) -> Model:
        layers = list(weights.layers)
        down = layers[self._layer].down
        values = down.to_float32() * np.float32(1 + self._size)
        layers[self._layer] = replace(layers[self._layer], down=DenseWeight(down.name, "F32", values))
        return self._inner.load(spec, replace(weights, layers=tuple(layers)), geometry)
