"""A whole comparison: every backend in turn, the base first, one model in memory at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mvllm.bench.compare.collect import Clock, Observation, observe
from mvllm.bench.compare.measures import Result, compare
from mvllm.bench.compare.plan import Plan, check_plan, choose_base
from mvllm.core.errors import CapacityError, ConfigError, ModelFileError
from mvllm.core.load.contents import Checkpoint
from mvllm.core.tensor import Backend


@dataclass(frozen=True)
class Failure:
    """A backend that can't run this model as asked."""

    backend: str
    reason: str


@dataclass(frozen=True)
class Comparison:
    """Everything a report says. Results stand in the order in which the backends were named."""

    plan: Plan
    base: str | None  # None: no backend could run the model
    results: tuple[Result, ...]
    failures: tuple[Failure, ...]


def run_comparison(
    checkpoint: Checkpoint,
    backends: Sequence[Backend],
    plan: Plan,
    *,
    clock: Clock = time.perf_counter,
    progress: Callable[[str], None] = lambda backend: None,
) -> Comparison:
    """Run the plan on every backend.

    The base is the reference if it is among the backends, otherwise the first that can run the model.

    Raises:
        ConfigError: the plan does not suit the model, or a backend is named twice.
    """
    by_name = {backend.name: backend for backend in backends}
    if not backends or len(by_name) < len(backends):
        raise ConfigError("name at least one backend, and each only once")
    check_plan(plan, checkpoint)
    first = choose_base(list(by_name))
    base: Observation | None = None
    results: dict[str, Result] = {}
    failures: list[Failure] = []
    for name in sorted(by_name, key=lambda name: name != first):  # stable: the others keep their order
        progress(name)
        outcome = _try(by_name[name], checkpoint, plan, base, clock)
        if isinstance(outcome, Failure):
            failures.append(outcome)
            continue
        difference = None if base is None else compare(base, outcome)
        base = base or outcome
        results[name] = Result(name, outcome.speeds, outcome.footprint, difference)
    in_order = tuple(results[name] for name in by_name if name in results)
    return Comparison(plan, base.backend if base else None, in_order, tuple(failures))


def _try(
    backend: Backend, checkpoint: Checkpoint, plan: Plan, base: Observation | None, clock: Clock
) -> Observation | Failure:
    reason = backend.unsupported(checkpoint.spec, checkpoint.weights)
    if reason is not None:
        return Failure(backend.name, reason)
    try:
        return observe(backend, checkpoint, plan, base.greedy if base else None, clock)
    except (ModelFileError, ConfigError, CapacityError, MemoryError) as error:
        return Failure(backend.name, str(error) or type(error).__name__)
