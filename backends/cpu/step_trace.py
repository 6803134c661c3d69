"""What a traced step tells: how long it was prepared, how long its threads ran, and what each of them did."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from mvllm.backends.cpu import record as graph
from mvllm.backends.cpu.link import LinkedProgram
from mvllm.backends.cpu.program import Instruction
from mvllm.backends.cpu.tables import ARRIVED, ENDED, NUM_TIMES, STARTED, Regime
from mvllm.backends.cpu.weights import PackedWeights
from mvllm.core.trace import Arguments, Trace

MODEL_TRACK = "model"
PREPARE, RUN, WAIT = "prepare", "run", "wait"
PART = "part"
"""Names of spans: the parts of a step on the model's track, and waiting at a barrier on a thread's."""


class StepTrace:
    """Tells a trace of the steps of one program. Owns the times that the threads write.

    Instructions are told with their kind, the weight or layer they work on, its shape and format, and the
    packed bytes of products, which all threads read together.
    """

    def __init__(
        self,
        trace: Trace,
        clock_ns: Callable[[], int],
        linked: LinkedProgram,
        weights: PackedWeights,
        threads: int,
    ) -> None:
        self._trace = trace
        self._clock_ns = clock_ns
        instructions = linked.program.instructions
        self._times: NDArray[np.int64] = np.zeros((threads, len(instructions), NUM_TIMES), np.int64)
        self._kinds = [str(step.kind) for step in instructions]
        self._names = [_name(step) for step in instructions]
        self._arguments = [_arguments(step, weights) for step in instructions]
        self._waits = {
            regime: np.array([regime in barriers for barriers in linked.barriers]) for regime in Regime
        }
        self._began = self._prepared = 0

    @property
    def address(self) -> int:
        """Of int64[threads, instructions, NUM_TIMES], for the timed runner."""
        return int(self._times.ctypes.data)

    def begin(self) -> None:
        """The step begins."""
        self._began = self._clock_ns()

    def run(self) -> None:
        """All is prepared, the threads begin."""
        self._prepared = self._clock_ns()

    def end(self, regime: Regime, threads: int) -> None:
        """The first `threads` are done. The trace is told at the end of the step."""
        moments = self._began, self._prepared, self._clock_ns()
        times = self._times[:threads].copy()
        self._trace.when_done(lambda: self._tell(moments, times, self._waits[regime]))

    def _tell(
        self, moments: tuple[int, int, int], times: NDArray[np.int64], waits: NDArray[np.bool_]
    ) -> None:
        self._trace.spans(MODEL_TRACK, (PREPARE, RUN), (PART, PART), moments[:2], moments[1:])
        for thread, own_times in enumerate(times):
            self._tell_thread(f"thread {thread}", own_times, waits)

    def _tell_thread(self, track: str, times: NDArray[np.int64], waits: NDArray[np.bool_]) -> None:
        self._trace.spans(
            track,
            self._names,
            self._kinds,
            times[:, STARTED].tolist(),
            times[:, ENDED].tolist(),
            self._arguments,
        )
        names = [WAIT] * int(waits.sum())
        self._trace.spans(track, names, names, times[waits, ARRIVED].tolist(), times[waits, STARTED].tolist())


def _name(step: Instruction) -> str:
    match step.operation:
        case graph.Embed(weight) | graph.RmsNorm(weight) | graph.Linear(weight):
            return weight.name
        case graph.Attend(layer):
            return f"{step.kind} layer {layer}"
        case _:
            return str(step.kind)


def _arguments(step: Instruction, weights: PackedWeights) -> Arguments:
    match step.operation:
        case graph.Linear(weight):
            shape = f"{list(weight.shape)} {weight.format_name}"
            return (("shape", shape), ("bytes", weights.matrix(weight).nbytes))
        case _ if step.output is not None:
            return (("width", step.output.width),)
        case _:
            return ()
