"""`MlxModel`: weights, KV pool and the graphs that run over them."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mvllm.backends.mlx.batch_check import check_batch
from mvllm.backends.mlx.batch_plan import GraphShape, plan_batch, single_tokens
from mvllm.backends.mlx.device import compiles
from mvllm.backends.mlx.graphs import Graph, Graphs
from mvllm.backends.mlx.kv_pool import KvPool
from mvllm.backends.mlx.listing import list_model
from mvllm.backends.mlx.options import MlxOptions
from mvllm.backends.mlx.tensor_ops import MlxOps, from_list, to_device
from mvllm.backends.mlx.weights import DeviceWeights
from mvllm.core.errors import EngineClosed, InvariantViolation
from mvllm.core.model.decoder import forward
from mvllm.core.model.spec import ModelSpec
from mvllm.core.sampling.sampler import sample
from mvllm.core.step import ForwardBatch, StepOutput
from mvllm.core.tensor import KvGeometry, Model, ModelWeights
from mvllm.core.types import BlockId

Array = NDArray[np.float32]


class _Resources:
    """Everything of a model that `close` lets go. Owns weights, KV pool and graphs."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: ModelWeights,
        geometry: KvGeometry,
        *,
        options: MlxOptions,
        device: mx.Device,
    ) -> None:
        self._spec = spec
        self._host = weights
        self._options = options
        self._geometry = geometry
        self.weights = DeviceWeights(
            spec, weights, num_positions=geometry.max_context, options=options, device=device
        )
        self.pool = KvPool(spec, geometry)
        compile = mx.compile if compiles(options, device) else _as_it_is
        self.graphs = Graphs(self._build_logits, compile)
        self._tapped = Graphs(self._build_taps, _as_it_is)

    def close(self) -> None:
        """Forget the graphs: they refer back to these resources, and Python looks for cycles late."""
        del self.graphs, self._tapped

    def logits(self, batch: ForwardBatch) -> Array:
        """f32[S, vocab]."""
        parts = self._run(self.graphs, batch)
        rows = [np.array(logits)[: len(part.logit_rows)] for part, results in parts for logits in results]
        logits = np.concatenate(rows) if rows else np.zeros((0, self._spec.vocab_size), np.float32)
        logits[:, batch.vocab_limit :] = -np.inf
        return logits

    def taps(self, batch: ForwardBatch) -> list[Array]:
        """f32[T, hidden] at every layer border."""
        parts = [
            [np.array(tap)[: part.num_tokens] for tap in taps]
            for part, taps in self._run(self._tapped, batch)
        ]
        return [np.concatenate(of_border) for of_border in zip(*parts, strict=True)]

    def _run(self, graphs: Graphs, batch: ForwardBatch) -> list[tuple[ForwardBatch, list[mx.array]]]:
        """Run a batch, whole or token by token. One evaluation per part: until a token has read the pool, the
        next one can't write it in place.

        Returns:
            The batch's parts with their graphs' evaluated results, padding included.

        Raises:
            InvariantViolation: the batch is unusable; nothing was changed.
        """
        check_batch(batch, self._geometry, self._spec.vocab_size)
        parts = single_tokens(batch) if self._options.exact else [batch]
        return [(part, self._evaluate(graphs, part)) for part in parts]

    def _evaluate(self, graphs: Graphs, batch: ForwardBatch) -> list[mx.array]:
        geometry = self._geometry
        plan = plan_batch(batch, block_size=geometry.block_size, scratch_block=geometry.num_blocks)
        graph = graphs.get(plan.shape)
        results, self.pool.arrays = graph(self.pool.arrays, to_device(plan.arrays))
        mx.eval(results, self.pool.arrays)
        return results

    def _build_logits(self, shape: GraphShape) -> Graph:
        def graph(pool: list[mx.array], inputs: list[mx.array]) -> tuple[list[mx.array], list[mx.array]]:
            pool = list(pool)
            logits = forward(self._ops(shape, pool, inputs), self._spec, self._host)
            return [logits.astype(mx.float32)] if shape.logit_rows else [], pool

        return graph

    def _build_taps(self, shape: GraphShape) -> Graph:
        def graph(pool: list[mx.array], inputs: list[mx.array]) -> tuple[list[mx.array], list[mx.array]]:
            pool, taps = list(pool), list[mx.array]()
            forward(self._ops(shape, pool, inputs), self._spec, self._host, taps.append)
            return [tap.astype(mx.float32) for tap in taps], pool

        return graph

    def _ops(self, shape: GraphShape, pool: list[mx.array], inputs: list[mx.array]) -> MlxOps:
        return MlxOps(
            self._spec,
            self.weights,
            pool,
            batch=from_list(inputs),
            shape=shape,
            block_size=self._geometry.block_size,
            rows_apart=self._options.rows_apart,
        )


class MlxModel(Model):
    """A model on an MLX device. Owns weights, KV pool and graphs.

    `step`, `logits`, `taps` and `write_blocks` change the KV pool. Any thread may call; an exception while a
    graph is built leaves the pool's contents as they were, save for the slots of the batch.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: ModelWeights,
        geometry: KvGeometry,
        *,
        options: MlxOptions,
        device: mx.Device,
    ) -> None:
        """Bring weights to the device and allocate the pool.

        Raises:
            CapacityError: memory can't be had.
        """
        self._spec = spec
        self._host_weights = weights
        self._options = options
        self._device = device
        self._running = threading.Lock()
        with mx.stream(device):
            self._all: _Resources | None = _Resources(spec, weights, geometry, options=options, device=device)

    def step(self, batch: ForwardBatch) -> StepOutput:
        return sample(self.logits(batch), batch.sampling)

    def logits(self, batch: ForwardBatch) -> Array:
        with self._resources() as own:
            return own.logits(batch)

    def taps(self, batch: ForwardBatch) -> list[Array]:
        with self._resources() as own:
            return own.taps(batch)

    def read_blocks(self, ids: Sequence[BlockId]) -> Array:
        with self._resources() as own:
            return own.pool.read(ids)

    def write_blocks(self, ids: Sequence[BlockId], kv: Array) -> None:
        with self._resources() as own:
            own.pool.write(ids, kv)

    def describe(self) -> str:
        with self._resources() as own:
            return list_model(
                self._spec, self._host_weights, own.weights, options=self._options, device=self._device
            )

    @property
    def weight_bytes(self) -> int:
        with self._resources() as own:
            return own.weights.nbytes

    @property
    def num_graphs(self) -> int:
        """Shapes for which a graph is kept."""
        with self._resources() as own:
            return len(own.graphs)

    def close(self) -> None:
        if self._all is not None:
            self._all.close()
            self._all = None
            mx.clear_cache()

    @contextmanager
    def _resources(self) -> Iterator[_Resources]:
        """The resources, for one call at a time, with the model's device as MLX's default.

        Raises:
            EngineClosed: the model was closed.
            InvariantViolation: another call is running.
        """
        if not self._running.acquire(blocking=False):
            raise InvariantViolation("calls to a model must not overlap")
        try:
            if self._all is None:
                raise EngineClosed("the model was closed")
            with mx.stream(self._device):
                yield self._all
        finally:
            self._running.release()


def _as_it_is(graph: Graph) -> Graph:
    return graph
