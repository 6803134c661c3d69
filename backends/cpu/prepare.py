"""Checks a batch and plans its attention, once per step and before any thread runs.

Kernels index memory by what the batch says and check nothing, so a faulty batch has to stop here.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np

from mvllm.backends.cpu.attention_plan import plan_items, step_at
from mvllm.backends.cpu.jit import kernel
from mvllm.backends.cpu.memory import LINE_BYTES
from mvllm.backends.cpu.pointers import i32_at, i64_at, record_at


class BatchFault(IntEnum):
    """What is wrong with a batch; `describe` says it in words."""

    NONE = 0
    TOKEN = 1
    POSITION = 2
    SLOT = 3
    ROW_STARTS = 4
    CONTEXT = 5
    BLOCK = 6
    LOGIT_ROW = 7

    def describe(self) -> str:
        return _DESCRIPTIONS[self]


_DESCRIPTIONS = {
    BatchFault.NONE: "nothing",
    BatchFault.TOKEN: "a token id is outside the vocabulary",
    BatchFault.POSITION: "a position is outside the longest context",
    BatchFault.SLOT: "a slot is outside the KV pool",
    BatchFault.ROW_STARTS: "row_starts is not 0 = s0 < s1 < ... = number of tokens",
    BatchFault.CONTEXT: "a row's context is not its last position + 1, or its block table is too short",
    BatchFault.BLOCK: "a block table names a block outside the KV pool within its context",
    BatchFault.LOGIT_ROW: "a logit row is not the index of a token",
}

_NAMES = ("vocab", "context", "slots", "block_size", "kv_heads", "group", "threads", "state_bytes")
LIMITS = np.dtype([(name, np.int64) for name in _NAMES])
"""What batches are checked against, and planned for."""

_OK, _TOKEN, _POSITION, _SLOT, _ROW_STARTS, _CONTEXT, _BLOCK, _LOGIT_ROW = (int(f) for f in BatchFault)

_limits_at = record_at(LIMITS)


@kernel("boolean(int64, int64, int64)")
def _all_below(values: Any, count: Any, limit: Any) -> Any:
    """Whether all int32 values are in [0, limit)."""
    within = True
    for i in range(count):
        value = i32_at(values)[i]
        within &= (value >= 0) & (value < limit)
    return within


@kernel("int64(int64, int64)")
def _check_rows(step_address: Any, limits_address: Any) -> Any:
    step, limits = step_at(step_address), _limits_at(limits_address)
    starts, positions = i32_at(step.row_starts), i32_at(step.positions)
    if starts[0] != 0 or starts[step.num_rows] != step.num_tokens:
        return _ROW_STARTS
    for row in range(step.num_rows):
        if starts[row + 1] <= starts[row]:
            return _ROW_STARTS
    for row in range(step.num_rows):
        context = np.int64(i32_at(step.context_lens)[row])
        blocks = (context + limits.block_size - 1) // limits.block_size
        if context != positions[starts[row + 1] - 1] + 1 or blocks > step.table_width:
            return _CONTEXT
        for token in range(starts[row], starts[row + 1]):
            if positions[token] >= context:
                return _CONTEXT
        table = step.block_tables + 4 * row * step.table_width
        if not _all_below(table, blocks, limits.slots // limits.block_size):
            return _BLOCK
    return _OK


@kernel("int64(int64, int64)")
def prepare_step(step_address: Any, limits_address: Any) -> Any:
    """Returns a `BatchFault`; if that is NONE, the step's attention items and counters are ready.

    Changes nothing but these.
    """
    step, limits = step_at(step_address), _limits_at(limits_address)
    if not _all_below(step.tokens, step.num_tokens, limits.vocab):
        return _TOKEN
    if not _all_below(step.positions, step.num_tokens, limits.context):
        return _POSITION
    if not _all_below(step.slots, step.num_tokens, limits.slots):
        return _SLOT
    if not _all_below(step.logit_rows, step.num_logit_rows, step.num_tokens):
        return _LOGIT_ROW
    fault = _check_rows(step_address, limits_address)
    if fault == _OK:
        plan_items(step_address, limits.kv_heads, limits.group, limits.threads, limits.state_bytes)
        for index in range(step.num_counters):
            i64_at(step.next_item + LINE_BYTES * index)[0] = 0
    return fault
