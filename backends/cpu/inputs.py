"""Hands a batch to compiled code: the `STEP` record that every thread reads."""

from __future__ import annotations

import struct

import numpy as np
from numpy.typing import NDArray

from mvllm.backends.cpu.attention import scratch_bytes, state_bytes
from mvllm.backends.cpu.attention_plan import STATES_BYTES, most_items, most_splits
from mvllm.backends.cpu.link import LinkedProgram
from mvllm.backends.cpu.memory import LINE_BYTES, address_of, aligned_zeros
from mvllm.backends.cpu.prepare import LIMITS, BatchFault, prepare_step
from mvllm.backends.cpu.tables import BATCH_FIELDS, ITEM, SPLIT, STEP, Regime, regime_of
from mvllm.core.errors import InvariantViolation
from mvllm.core.model.spec import ModelSpec
from mvllm.core.step import ForwardBatch
from mvllm.core.tensor import KvGeometry

_WORD = {name: offset // 8 for name, (_, offset, *_) in (STEP.fields or {}).items()}
"""Place of each field of STEP among its int64 words; setting fields by name takes five times as long."""

_BATCH = struct.Struct(f"{len(BATCH_FIELDS)}q")


class StepInputs:
    """Owns the STEP record, the attention's items, states and scratch; borrows a batch's arrays."""

    def __init__(self, spec: ModelSpec, geometry: KvGeometry, threads: int) -> None:
        self._geometry = geometry
        self._arrays: list[NDArray[np.int32]] = []  # the current batch's, kept alive
        self.regime = Regime.MANY  # of the current batch
        items = most_items(geometry.max_batch_tokens, spec.num_heads, threads)
        self._items = aligned_zeros(ITEM.itemsize * items, "attention items")
        self._splits = aligned_zeros(SPLIT.itemsize * most_splits(threads), "attention splits")
        self._states = aligned_zeros(STATES_BYTES * threads, "attention states")
        stride = scratch_bytes(spec.head_dim)
        self._scratch = aligned_zeros(threads * stride, "attention scratch")
        self._memory = aligned_zeros(STEP.itemsize, "step")
        self.record = self._memory.view(STEP)
        self._words = self._memory.view(np.int64)
        self._program: LinkedProgram | None = None  # that of the record
        self.address = self._memory.ctypes.data
        self.record["items"] = self._items.ctypes.data
        self.record["splits"] = self._splits.ctypes.data
        self.record["states"], self.record["states_bytes"] = self._states.ctypes.data, self._states.nbytes
        self.record["scratch"], self.record["scratch_stride"] = self._scratch.ctypes.data, stride
        self._limits = np.zeros(1, LIMITS)
        self._limits[0] = (
            spec.vocab_size,
            geometry.max_context,
            geometry.num_blocks * geometry.block_size,
            geometry.block_size,
            spec.num_kv_heads,
            spec.num_heads // spec.num_kv_heads,
            threads,
            state_bytes(spec.head_dim),
        )
        self._limits_address = self._limits.ctypes.data

    def set_program(
        self, linked: LinkedProgram, num_instructions: int, sampling: int = 0, times: int = 0
    ) -> None:
        """Make the first instructions of `linked` the program of the next step.

        Args:
            sampling: address of the sampler's parameter table; 0 if these instructions don't sample.
            times: where the threads note when they did what, see `STEP`; 0: nowhere.
        """
        if self._program is not linked:
            self.record["instructions"] = linked.table.ctypes.data
            self.record["next_item"] = linked.counters.ctypes.data
            self.record["num_counters"] = linked.counters.nbytes // LINE_BYTES
            self._program = linked
        self._set(num_instructions=num_instructions, sampling=sampling, times=times)

    def set_batch(self, batch: ForwardBatch) -> None:
        """Point the record at the batch's arrays and plan its attention.

        Raises:
            InvariantViolation: the batch is larger than the geometry allows, or contradicts itself.
        """
        geometry = self._geometry
        num_tokens, num_logit_rows = len(batch.tokens), len(batch.logit_rows)
        for what, found, limit in (
            ("tokens", num_tokens, geometry.max_batch_tokens),
            ("rows", len(batch.context_lens), geometry.max_batch_rows),
            ("logit rows", num_logit_rows, geometry.max_logit_rows),
        ):
            if found > limit:
                raise InvariantViolation(f"a batch has {found} {what}, at most {limit} were announced")
        if batch.vocab_limit < 1:
            raise InvariantViolation(f"a batch's vocab_limit is {batch.vocab_limit}; it must be 1 at least")
        if len(batch.positions) != num_tokens or len(batch.slots) != num_tokens:
            raise InvariantViolation("tokens, positions and slots of a batch differ in length")
        if len(batch.row_starts) != batch.num_rows + 1 or len(batch.block_tables) != batch.num_rows:
            raise InvariantViolation("row_starts, context_lens and block_tables of a batch differ in length")
        self._arrays = arrays = [
            np.ascontiguousarray(array, np.int32)
            for array in (
                batch.tokens,
                batch.positions,
                batch.slots,
                batch.row_starts,
                batch.context_lens,
                batch.block_tables,
                batch.logit_rows,
            )
        ]
        self.regime = regime_of(num_tokens, num_logit_rows)
        _BATCH.pack_into(
            self._memory.data,
            0,
            num_tokens,
            len(batch.context_lens),
            num_logit_rows,
            batch.block_tables.shape[1],
            batch.vocab_limit,
            self.regime,
            *map(address_of, arrays),
        )
        fault = prepare_step(self.address, self._limits_address)
        if fault != BatchFault.NONE:
            raise InvariantViolation(f"a batch can't be run: {BatchFault(fault).describe()}")

    def _set(self, **fields: int) -> None:
        words = self._words
        for name, value in fields.items():
            words[_WORD[name]] = value
