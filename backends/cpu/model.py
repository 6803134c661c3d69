"""`CpuModel`: a linked program, its KV pool and the team of threads that runs it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from mvllm.backends.cpu.clock import HAS_CLOCK
from mvllm.backends.cpu.inputs import StepInputs
from mvllm.backends.cpu.isa import selected
from mvllm.backends.cpu.kv_pool import KvPool, layout_for
from mvllm.backends.cpu.link import LinkedProgram, Linker
from mvllm.backends.cpu.listing import list_program
from mvllm.backends.cpu.memory import aligned_zeros
from mvllm.backends.cpu.operations import program_runner
from mvllm.backends.cpu.prepare import prepare_step
from mvllm.backends.cpu.program import lower, with_sampling
from mvllm.backends.cpu.record import Recorder, Value, sensitive_weights
from mvllm.backends.cpu.sampler_table import (
    NUM_COLUMNS,
    Addresses,
    asks_for_other_logprobs,
    empty_output,
    pack_parameters,
    sampler_scratch_bytes,
)
from mvllm.backends.cpu.step_trace import StepTrace
from mvllm.backends.cpu.tables import Regime
from mvllm.backends.cpu.team import TEAM_KERNELS, Team
from mvllm.backends.cpu.team_size import TeamSize
from mvllm.backends.cpu.weights import PackedWeights
from mvllm.core.errors import EngineClosed, InvariantViolation
from mvllm.core.model.decoder import forward
from mvllm.core.model.spec import ModelSpec
from mvllm.core.step import ForwardBatch, SamplingArrays, StepOutput
from mvllm.core.tensor import KvGeometry, Model, ModelWeights
from mvllm.core.trace import Trace
from mvllm.core.types import BlockId


class _Sampling:
    """Owns the sampler's parameter table and scratch; `logits` is where its input will lie, f32[S, V]."""

    def __init__(self, vocab_size: int, threads: int, logits: NDArray[np.float32]) -> None:
        self._vocab_size = vocab_size
        self._stride = sampler_scratch_bytes(vocab_size)
        self._scratch = aligned_zeros(threads * self._stride, "sampler scratch")
        self._table = np.zeros(NUM_COLUMNS, np.int64)
        self._inputs, self._outputs = Addresses(SamplingArrays), Addresses(StepOutput)
        self._fixed = {
            "logits": logits.ctypes.data,
            "row_stride": logits.strides[0] // logits.itemsize,
            "scratch": self._scratch.ctypes.data,
            "scratch_stride": self._stride,
        }
        self.address: int = self._table.ctypes.data

    def set(self, batch: ForwardBatch) -> StepOutput:
        """Fill the table for a batch; returns the output that the sampler will write into.

        Raises:
            InvariantViolation: a batch with a limit asks for the log-probability of a token that is not
                chosen, or an array is unusable.
        """
        vocab = min(self._vocab_size, batch.vocab_limit)
        if vocab < self._vocab_size and asks_for_other_logprobs(batch.sampling):
            raise InvariantViolation(
                "rows of a batch with a vocab_limit can ask for the chosen token's log-probability only"
            )
        output = empty_output(batch.sampling)
        pack_parameters(
            self._table,
            vocab=vocab,
            sampling=batch.sampling,
            output=output,
            inputs=self._inputs,
            outputs=self._outputs,
            **self._fixed,
        )
        return output


class _Resources:
    """Everything of a model that `close` lets go. Owns weights, KV pool, programs, buffers and threads."""

    def __init__(
        self, spec: ModelSpec, weights: ModelWeights, geometry: KvGeometry, threads: int, adaptive: bool
    ) -> None:
        recorder = Recorder(sensitive_weights(weights), selected().wide)
        self._taps: list[Value] = []
        self._logits = forward(recorder, spec, weights, self._taps.append)
        self._nodes = recorder.nodes
        self.pool = KvPool(layout_for(spec, geometry))
        with ThreadPoolExecutor(threads) as packers:
            self.weights = PackedWeights(packers)
            self._linker = Linker(spec, geometry, self.weights, self.pool, threads)
            self.linked = self._linker.link(with_sampling(lower(self._nodes, self._logits)))
            self.weights.finish()
        self._tapped: LinkedProgram | None = None
        self.inputs = StepInputs(spec, geometry, threads)
        logits = self.linked.rows(self.linked.program.logits, 1)
        self.sampling = _Sampling(spec.vocab_size, threads, logits)
        self.team = Team(
            threads, program_runner(), TeamSize(threads) if adaptive else None, kinds=len(Regime)
        )
        self._trace: StepTrace | None = None
        for kernel in (prepare_step, *TEAM_KERNELS):
            _ = kernel.native  # compiled now, not in the first step

    @property
    def tapped(self) -> LinkedProgram:
        """A program that keeps the activations between layers, linked on first use."""
        if self._tapped is None:
            self._tapped = self._linker.link(lower(self._nodes, self._logits, self._taps))
        return self._tapped

    def trace_to(self, trace: Trace) -> None:
        """Time the instructions of every later `step`."""
        self._trace = StepTrace(trace, time.perf_counter_ns, self.linked, self.weights, self.team.threads)

    def step(self, batch: ForwardBatch) -> StepOutput:
        """Run the whole program over a batch.

        Raises:
            InvariantViolation: the batch is unusable; nothing was changed.
        """
        trace, linked = self._trace, self.linked
        if trace is not None:
            trace.begin()
        output = self.sampling.set(batch)
        times = 0 if trace is None else trace.address
        self.inputs.set_program(linked, len(linked.program.instructions), self.sampling.address, times)
        self.inputs.set_batch(batch)
        if trace is not None:
            trace.run()
        working = self.team.run(self.inputs.address, self.inputs.regime)
        if trace is not None:
            trace.end(self.inputs.regime, working)
        return output

    def run(self, linked: LinkedProgram, batch: ForwardBatch, num_instructions: int) -> None:
        """Run the first instructions of a program over a batch, without sampling.

        Raises:
            InvariantViolation: the batch is unusable; nothing was changed.
        """
        self.inputs.set_program(linked, num_instructions)
        self.inputs.set_batch(batch)
        self.team.run(self.inputs.address, self.inputs.regime)


class CpuModel(Model):
    """A model on the CPU. Owns packed weights, KV pool, tables, buffers and threads.

    `step`, `logits`, `taps` and `write_blocks` change the KV pool. A forked child may use a model that was
    idle when its process forked; it then starts threads of its own.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: ModelWeights,
        geometry: KvGeometry,
        threads: int,
        *,
        adaptive: bool = False,
    ) -> None:
        """Pack the weights, record and link the program; compiles what it needs.

        Args:
            adaptive: `threads` is the most; fewer work while other processes use their cores.

        Raises:
            CapacityError: memory can't be had.
        """
        self.num_threads = threads
        self._all: _Resources | None = _Resources(spec, weights, geometry, threads, adaptive)
        self._running = threading.Lock()

    def step(self, batch: ForwardBatch) -> StepOutput:
        with self._resources() as own:
            return own.step(batch)

    def logits(self, batch: ForwardBatch) -> NDArray[np.float32]:
        with self._resources() as own:
            linked = own.linked
            without_sampling = len(linked.program.instructions) - 1
            own.run(linked, batch, without_sampling)
            logits = linked.rows(linked.program.logits, len(batch.logit_rows)).copy()
            logits[:, batch.vocab_limit :] = -np.inf
            return logits

    def taps(self, batch: ForwardBatch) -> list[NDArray[np.float32]]:
        with self._resources() as own:
            linked = own.tapped
            own.run(linked, batch, len(linked.program.instructions))
            return [linked.rows(array, batch.num_tokens).copy() for array in linked.program.kept]

    def read_blocks(self, ids: Sequence[BlockId]) -> NDArray[np.float32]:
        with self._resources() as own:
            return own.pool.read(ids)

    def write_blocks(self, ids: Sequence[BlockId], kv: NDArray[np.float32]) -> None:
        with self._resources() as own:
            own.pool.write(ids, kv)

    def describe(self) -> str:
        with self._resources() as own:
            return list_program(own.linked, self.num_threads)

    def trace_to(self, trace: Trace) -> None:
        with self._resources() as own:
            if trace.enabled and HAS_CLOCK:
                own.trace_to(trace)

    @property
    def weight_bytes(self) -> int:
        with self._resources() as own:
            return own.weights.nbytes

    def close(self) -> None:
        if self._all is not None:
            self._all.team.close()
            self._all = None

    @contextmanager
    def _resources(self) -> Iterator[_Resources]:
        """The resources, for one call at a time.

        Raises:
            EngineClosed: the model was closed.
            InvariantViolation: another call is running.
        """
        if not self._running.acquire(blocking=False):
            raise InvariantViolation("calls to a model must not overlap")
        try:
            if self._all is None:
                raise EngineClosed("the model was closed")
            yield self._all
        finally:
            self._running.release()
