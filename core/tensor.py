"""The abstract tensor interface: what the core asks of a backend, and nothing more.

The decoder (`mvllm.core.model.decoder`) is written once over `TensorOps`, a small closed set of operations on
opaque handles. A backend may compute at once (reference), record a program (cpu) or build a lazy graph
(mlx); the core can't tell. The core holds block ids, never tensors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from mvllm.core.model.spec import Activation, ModelSpec
from mvllm.core.step import ForwardBatch, StepOutput
from mvllm.core.trace import Trace
from mvllm.core.types import BlockId

Handle = TypeVar("Handle")


class Weight(Protocol):
    """A matrix or vector on the host, memory-mapped where the file allows it.

    Concrete: `DenseWeight` and `QuantizedWeight` of `mvllm.core.load.weights`.
    """

    @property
    def name(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]:
        """(out, in) of a matrix, (n,) of a vector."""

    @property
    def format_name(self) -> str:
        """ "F32", "F16", "BF16", or a quantized format such as "Q4_K"."""

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""

    def to_float32(self) -> NDArray[np.float32]:
        """Exact values, as a fresh array of `shape`."""


@dataclass(frozen=True)
class LayerWeights:
    """One layer; None where the architecture has no such tensor."""

    attention_norm: Weight
    q: Weight
    k: Weight
    v: Weight
    o: Weight
    mlp_norm: Weight
    gate: Weight
    up: Weight
    down: Weight
    q_bias: Weight | None = None
    k_bias: Weight | None = None
    v_bias: Weight | None = None
    o_bias: Weight | None = None
    gate_bias: Weight | None = None
    up_bias: Weight | None = None
    down_bias: Weight | None = None
    q_norm: Weight | None = None
    k_norm: Weight | None = None
    post_attention_norm: Weight | None = None
    post_mlp_norm: Weight | None = None


@dataclass(frozen=True)
class ModelWeights:
    """All tensors of a model. A tied head is the very object `embedding`."""

    embedding: Weight  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    final_norm: Weight
    head: Weight  # [vocab, hidden]


@dataclass(frozen=True)
class KvGeometry:
    """Shape of the paged KV pool."""

    num_blocks: int
    block_size: int
    max_context: int  # longest sequence, tokens
    max_batch_tokens: int  # largest T of a batch
    max_batch_rows: int  # largest R
    max_logit_rows: int  # largest S
    dtype: str  # "f32", "f16" or "bf16"


@dataclass(frozen=True)
class Capabilities:
    """What callers may rely on."""

    row_exact: bool  # a row's floats do not depend on the batch it is in
    kv_dtypes: tuple[str, ...]  # supported; the first is the default
    skips_logits: bool = False  # a batch's `vocab_limit` saves the time that the other logits take


class TensorOps(ABC, Generic[Handle]):
    """Operations of the forward pass on opaque handles. T is the number of tokens of the batch.

    One instance serves one pass over one batch (or, for a recorder, every batch). Positions, slots, block
    tables and the logit rows belong to the batch and are not arguments.
    """

    @abstractmethod
    def embed(self, table: Weight) -> Handle:
        """Rows of `table` at the batch's tokens -> f32[T, hidden]."""

    @abstractmethod
    def rms_norm(self, x: Handle, gain: Weight, eps: float) -> Handle:
        """x / sqrt(mean(x**2) + eps) * gain over each consecutive run of len(gain) values of a row."""

    @abstractmethod
    def linear(self, x: Handle, weight: Weight, bias: Weight | None = None) -> Handle:
        """[rows, in] -> [rows, out]: x @ weight.T + bias."""

    @abstractmethod
    def rotate(self, x: Handle, rope: int) -> Handle:
        """Rotary embedding number `rope` of the spec, at the batch's positions, of every head in x."""

    @abstractmethod
    def attend(
        self,
        q: Handle,
        k: Handle,
        v: Handle,
        *,
        layer: int,
        window: int | None,
        scale: float,
        soft_cap: float | None,
    ) -> Handle:
        """Store k and v into the batch's slots of `layer`, then causal grouped-query attention of q over the
        block tables: [T, heads * head_dim] -> [T, heads * head_dim]."""

    @abstractmethod
    def gate(self, gate: Handle, up: Handle, activation: Activation) -> Handle:
        """activation(gate) * up, element by element."""

    @abstractmethod
    def add(self, x: Handle, y: Handle) -> Handle: ...

    @abstractmethod
    def scale(self, x: Handle, factor: float) -> Handle: ...

    @abstractmethod
    def soft_cap(self, x: Handle, cap: float) -> Handle:
        """cap * tanh(x / cap)."""

    @abstractmethod
    def take_logit_rows(self, x: Handle) -> Handle:
        """[T, n] -> [S, n]: the batch's logit rows."""


class Model(ABC):
    """A loaded model with its KV pool. Calls must not overlap."""

    @abstractmethod
    def step(self, batch: ForwardBatch) -> StepOutput:
        """Run the batch, write its KV, sample its logit rows."""

    @abstractmethod
    def logits(self, batch: ForwardBatch) -> NDArray[np.float32]:
        """Run the batch and return f32[S, vocab] (a copy); nothing is sampled."""

    @abstractmethod
    def taps(self, batch: ForwardBatch) -> list[NDArray[np.float32]]:
        """Run the batch and return copies of the activations f32[T, hidden] after the embedding and after
        each layer. For tests and for finding where two backends part; costs the other calls nothing."""

    @abstractmethod
    def read_blocks(self, ids: Sequence[BlockId]) -> NDArray[np.float32]:
        """KV of blocks: f32[len(ids), layers, 2 (k, v), block_size, kv_heads, head_dim]."""

    @abstractmethod
    def write_blocks(self, ids: Sequence[BlockId], kv: NDArray[np.float32]) -> None:
        """Overwrite blocks with an array laid out as `read_blocks` returns it."""

    @abstractmethod
    def describe(self) -> str:
        """The program or graph that a step runs, for `mvllm inspect --program`."""

    def trace_to(self, trace: Trace) -> None:
        """Tell `trace` what the parts of every later `step` took, where the backend can tell them apart."""

    @property
    @abstractmethod
    def weight_bytes(self) -> int:
        """Bytes that the weights take in memory in this backend's form."""

    @abstractmethod
    def close(self) -> None:
        """Release threads and memory; idempotent."""


class Backend(ABC):
    """A kind of device. Stateless: all state is in the models it loads."""

    name: str
    capabilities: Capabilities

    @abstractmethod
    def unsupported(self, spec: ModelSpec, weights: ModelWeights) -> str | None:
        """Why this model can't run here, or None. Answers before anything is loaded."""

    @abstractmethod
    def load(self, spec: ModelSpec, weights: ModelWeights, geometry: KvGeometry) -> Model:
        """Load a model.

        Raises:
            ModelFileError: `unsupported` names a reason, or a weight's content is unusable.
            ConfigError: the geometry's dtype is none of `capabilities.kv_dtypes`.
            CapacityError: memory for the pool can't be had.
        """
