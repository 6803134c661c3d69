"""Measuring: two engines and the memory take turns."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from mvllm.bench.peers.foreign_load import ForeignLoad
from mvllm.bench.peers.peer_process import EngineProcess
from mvllm.bench.peers.workloads import Case, prompts_of

_MAX_REPEATS = 200

Result = TypeVar("Result")


@dataclass(frozen=True)
class Timing:
    """One engine in one round."""

    tokens: int
    seconds: float
    foreign_load: float | None  # share of a core that all other processes took meanwhile; None: unknown

    @property
    def rate(self) -> float:
        """Tokens per second, all sequences together."""
        return self.tokens / self.seconds


@dataclass(frozen=True)
class Round:
    """Both engines, one after the other, and a measurement of the memory in between."""

    case: str
    ours: Timing
    theirs: Timing | None  # None: no peer
    bandwidth: float  # bytes per second
    bandwidth_foreign_load: float | None
    same_tokens: int | None = None  # greedy tokens of the first sequence before the first difference
    num_tokens: int | None = None  # of how many

    @property
    def foreign_load(self) -> float | None:
        """The largest of its parts; None where it is unknown."""
        loads = [self.ours.foreign_load, self.bandwidth_foreign_load]
        loads += [] if self.theirs is None else [self.theirs.foreign_load]
        known = [load for load in loads if load is not None]
        return max(known) if len(known) == len(loads) else None


class _Side:
    """One engine and how often it repeats the present case, so that a measurement takes long enough."""

    def __init__(self, engine: EngineProcess, case: Case, ids: Sequence[int], sample_seconds: float) -> None:
        self._engine = engine
        self._case = case
        self._prompts = prompts_of(case, ids)
        self._repeats = 1
        if case.kind == "decode":
            engine.ask(do="prepare", prompts=self._prompts, steps=case.steps)
        warm_up, _ = self._run()
        self._repeats = min(_MAX_REPEATS, max(1, math.ceil(sample_seconds / warm_up)))

    def measure(self) -> tuple[Timing, list[int]]:
        (seconds, ids), load = _loaded([self._engine.pid], self._run)
        return Timing(self._case.tokens * self._repeats, seconds, load), ids

    def _run(self) -> tuple[float, list[int]]:
        if self._case.kind == "prefill":
            answer = self._engine.ask(do="prefill", prompt=self._prompts[0], repeats=self._repeats)
            return answer["seconds"], []
        answer = self._engine.ask(do="decode", repeats=self._repeats)
        return answer["seconds"], answer["token_ids"]


class Contest:
    """One case, prepared on both sides and warmed up.

    While one side works, the other's processor time counts as foreign load: it has to be idle.

    Args:
        ids: text for the prompts.
        bandwidth: measures the memory in this process, bytes per second.
        own_pid: this process.
        sample_seconds: least time of one measurement; the case is repeated until then.
    """

    def __init__(
        self,
        case: Case,
        ours: EngineProcess,
        theirs: EngineProcess | None,
        ids: Sequence[int],
        *,
        bandwidth: Callable[[], float],
        own_pid: int,
        sample_seconds: float,
    ) -> None:
        self._case = case
        self._ours = _Side(ours, case, ids, sample_seconds)
        self._theirs = None if theirs is None else _Side(theirs, case, ids, sample_seconds)
        self._bandwidth = bandwidth
        self._own_pid = own_pid

    def round(self, number: int) -> Round:
        """Measure once; who begins changes from round to round."""
        if self._theirs is None:
            ours, _ = self._ours.measure()
            bandwidth, load = self._measure_bandwidth()
            return Round(self._case.name, ours, None, bandwidth, load)
        sides = [self._ours, self._theirs]
        first, second = sides if number % 2 == 0 else reversed(sides)
        timings = {first: first.measure()}
        bandwidth, load = self._measure_bandwidth()
        timings[second] = second.measure()
        (ours, our_ids), (theirs, their_ids) = timings[self._ours], timings[self._theirs]
        if self._case.kind == "prefill":
            return Round(self._case.name, ours, theirs, bandwidth, load)
        same = common_prefix(our_ids, their_ids)
        return Round(self._case.name, ours, theirs, bandwidth, load, same, len(our_ids))

    def _measure_bandwidth(self) -> tuple[float, float | None]:
        return _loaded([self._own_pid], self._bandwidth)


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """Number of equal elements before the first different one."""
    for number, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return number
    return min(len(one), len(other))


def _loaded(own_pids: Sequence[int], run: Callable[[], Result]) -> tuple[Result, float | None]:
    foreign = ForeignLoad(own_pids)
    return run(), foreign.measure()
