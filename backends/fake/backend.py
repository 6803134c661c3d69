"""The fake backend: everything but compute. For tests of whatever lies above a model."""

from __future__ import annotations

from mvllm.backends.fake.model import FakeModel
from mvllm.core.model.spec import ModelSpec
from mvllm.core.tensor import Backend, Capabilities, KvGeometry, Model, ModelWeights


class FakeBackend(Backend):
    """Takes the vocabulary size of any model and ignores its weights."""

    name = "fake"
    capabilities = Capabilities(row_exact=True, kv_dtypes=("f32",))

    def unsupported(self, spec: ModelSpec, weights: ModelWeights) -> str | None:
        return None

    def load(self, spec: ModelSpec, weights: ModelWeights, geometry: KvGeometry) -> Model:
        return FakeModel(spec.vocab_size, geometry.num_blocks, geometry.block_size)
