"""The reference backend: slow, obvious, exact. Other backends are compared with it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mvllm.backends.reference.tensor_ops import Array, ReferenceOps
from mvllm.core.errors import ConfigError, EngineClosed
from mvllm.core.model.decoder import forward
from mvllm.core.model.spec import ModelSpec
from mvllm.core.sampling.sampler import sample
from mvllm.core.step import ForwardBatch, StepOutput
from mvllm.core.tensor import Backend, Capabilities, KvGeometry, Model, ModelWeights, Weight
from mvllm.core.types import BlockId


class ReferenceBackend(Backend):
    name = "reference"
    capabilities = Capabilities(row_exact=True, kv_dtypes=("f32",))

    def unsupported(self, spec: ModelSpec, weights: ModelWeights) -> str | None:
        return None

    def load(self, spec: ModelSpec, weights: ModelWeights, geometry: KvGeometry) -> Model:
        if geometry.dtype not in self.capabilities.kv_dtypes:
            raise ConfigError(f"the reference backend keeps KV as f32, {geometry.dtype!r} was asked for")
        return ReferenceModel(spec, weights, geometry)


class ReferenceModel(Model):
    """Owns the KV pool and the dequantized weights (made at first use, kept)."""

    def __init__(self, spec: ModelSpec, weights: ModelWeights, geometry: KvGeometry) -> None:
        self._spec = spec
        self._weights = weights
        self._geometry = geometry
        slots = geometry.num_blocks * geometry.block_size
        self._pool: Array = np.zeros(
            (spec.num_layers, 2, slots, spec.num_kv_heads, spec.head_dim), np.float32
        )
        self._float_weights: dict[str, Array] = {}
        self._closed = False

    def step(self, batch: ForwardBatch) -> StepOutput:
        return sample(self.logits(batch), batch.sampling)

    def logits(self, batch: ForwardBatch) -> Array:
        logits = forward(self._ops(batch), self._spec, self._weights)
        logits[:, batch.vocab_limit :] = -np.inf
        return logits

    def taps(self, batch: ForwardBatch) -> list[Array]:
        seen: list[Array] = []
        forward(self._ops(batch), self._spec, self._weights, tap=lambda x: seen.append(x.copy()))
        return seen

    def read_blocks(self, ids: Sequence[BlockId]) -> Array:
        return np.ascontiguousarray(self._blocks()[:, :, list(ids)].transpose(2, 0, 1, 3, 4, 5))

    def write_blocks(self, ids: Sequence[BlockId], kv: NDArray[np.float32]) -> None:
        self._blocks()[:, :, list(ids)] = kv.transpose(1, 2, 0, 3, 4, 5)

    def describe(self) -> str:
        return "reference: NumPy float32, operation by operation (no program)"

    @property
    def weight_bytes(self) -> int:
        return sum(array.nbytes for array in self._float_weights.values())

    def close(self) -> None:
        self._closed = True
        self._float_weights.clear()

    def _ops(self, batch: ForwardBatch) -> ReferenceOps:
        if self._closed:
            raise EngineClosed("the model is closed")
        return ReferenceOps(self._spec, batch, self._pool, self._geometry.block_size, self._floats)

    def _floats(self, weight: Weight) -> Array:
        if weight.name not in self._float_weights:
            self._float_weights[weight.name] = weight.to_float32()
        return self._float_weights[weight.name]

    def _blocks(self) -> Array:
        """View [layers, 2, num_blocks, block_size, kv_heads, head_dim]."""
        layers, two, _, heads, dim = self._pool.shape
        return self._pool.reshape(layers, two, self._geometry.num_blocks, -1, heads, dim)
