"""Runs random arrangements of tiny models on the cpu backend with guard pages around all its memory.

    python -m tests.conformance.guarded_runs EXAMPLES

Prints one line of JSON: for every case how its process ended (0, or minus the signal). Each case is a forked
child, so that a crash ends nothing else.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import closing
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from mvllm.backends.cpu import memory
from mvllm.core.model.spec import RopeSpec
from mvllm.core.step import ForwardBatch
from mvllm.core.tensor import KvGeometry
from mvllm.core.types import BlockId
from tests.conformance.random_models import Row, make_batch
from tests.guarded_memory import GuardedMemory
from tests.property.test_cpu_exactness import MODELS, VOCAB_SIZE, model_of

PLANTS = ("KV cache", "activations", "block_tables", "weights")
"""What is made too short, one at a time, to show that an overrun is noticed."""

_POOL_TOKENS = 1536
_MAX_ROWS, _MAX_TOKENS = 4, 80


@dataclass(frozen=True)
class Case:
    """Whether arrays end or start at a guard, and what is too short."""

    at_end: bool
    planted: str | None = None

    @property
    def name(self) -> str:
        return self.planted or ("end" if self.at_end else "start")


CASES = (Case(True), Case(False), *(Case(True, plant) for plant in PLANTS))


def guard_everything(guards: GuardedMemory) -> None:
    """Make the cpu backend take its memory from `guards`."""
    from mvllm.backends.cpu import inputs, kv_pool, link, model, pack, team, weights
    from mvllm.backends.cpu.sampler_table import empty_output

    for module in (inputs, kv_pool, link, model, team, weights, memory):
        module.aligned_zeros = guards.zeros  # type: ignore[attr-defined]
    pack.Arena.allocate = lambda self, num_bytes: guards.zeros(num_bytes, "weights")  # type: ignore[method-assign]
    plain_table = RopeSpec.table

    def rope_table(self: RopeSpec, num_positions: int) -> Any:
        return tuple(guards.copy(table, "rope") for table in plain_table(self, num_positions))

    RopeSpec.table = rope_table  # type: ignore[method-assign]
    model.empty_output = lambda sampling: _guarded(empty_output(sampling), guards)  # type: ignore[attr-defined]


def _guarded(message: Any, guards: GuardedMemory) -> Any:
    """A message of core/step.py with its arrays between guards."""
    arrays = {field.name: getattr(message, field.name) for field in fields(message)}
    return replace(
        message,
        **{name: guards.copy(array, name) for name, array in arrays.items() if isinstance(array, np.ndarray)},
    )


def guarded_batch(batch: ForwardBatch, guards: GuardedMemory) -> ForwardBatch:
    guarded: ForwardBatch = replace(_guarded(batch, guards), sampling=_guarded(batch.sampling, guards))
    return guarded


def run_arrangements(guards: GuardedMemory, seed: int) -> None:
    """Load a model and run some steps of random rows, among them long ones that threads share.

    Nothing is larger than the largest of the batches needs.
    """
    from mvllm.backends.cpu.backend import CpuBackend

    rng = np.random.default_rng(seed)
    block_size = int(rng.choice([1, 3, 8, 16, 32]))
    num_blocks = _POOL_TOKENS // block_size
    batches = [_random_batch(rng, num_blocks, block_size) for _ in range(4)]
    geometry = KvGeometry(
        num_blocks=num_blocks,
        block_size=block_size,
        max_context=max(int(batch.context_lens.max()) for batch in batches),
        max_batch_tokens=max(batch.num_tokens for batch in batches),
        max_batch_rows=max(batch.num_rows for batch in batches),
        max_logit_rows=max(len(batch.logit_rows) for batch in batches),
        dtype=str(rng.choice(["f32", "f16"])),
    )
    backend = CpuBackend(threads=int(rng.integers(1, 5)))
    with closing(backend.load(*model_of(seed % len(MODELS)), geometry)) as loaded:
        for batch in batches:
            loaded.step(guarded_batch(batch, guards))
        blocks = [BlockId(0), BlockId(num_blocks - 1)]
        loaded.write_blocks(blocks, loaded.read_blocks(blocks))


def _random_batch(rng: np.random.Generator, num_blocks: int, block_size: int) -> ForwardBatch:
    """Rows on blocks of their own, the last block of the pool among them; contexts up to the whole pool."""
    blocks = [num_blocks - 1, *(int(block) for block in rng.permutation(num_blocks - 1))]
    rows: list[Row] = []
    left = _MAX_TOKENS
    for _ in range(int(rng.integers(1, _MAX_ROWS + 1))):
        own = len(blocks) if rng.random() < 0.2 else min(len(blocks), int(rng.integers(1, 5)))
        table, blocks = blocks[:own], blocks[own:]
        if not table or left == 0:
            break
        stop = int(rng.integers((own - 1) * block_size + 1, own * block_size + 1))
        count = min(stop, left, int(rng.choice([1, 1, 2, 9, 60])))
        left -= count
        tokens = [int(token) for token in rng.integers(0, VOCAB_SIZE, stop)]
        rows.append(Row(tokens, stop - count, stop, table, int(rng.integers(1, count + 1))))
    batch = make_batch(rows, block_size)
    return replace(batch, vocab_limit=int(rng.integers(1, VOCAB_SIZE + 9))) if rng.random() < 0.5 else batch


def end_of(case: Case, examples: int) -> int:
    """How a child that runs the case ends."""
    child = os.fork()
    if child == 0:
        guards = GuardedMemory(at_end=case.at_end, planted=case.planted)
        guard_everything(guards)
        for seed in range(examples):
            run_arrangements(guards, seed)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def main() -> None:
    from mvllm.backends.cpu import model, operations  # noqa: F401  (compiled once, for all children)

    print(json.dumps({case.name: end_of(case, int(sys.argv[1])) for case in CASES}))


if __name__ == "__main__":
    main()
