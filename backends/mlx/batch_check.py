"""Refuses batches whose numbers point outside: MLX checks no index on the device."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mvllm.core.errors import InvariantViolation
from mvllm.core.step import ForwardBatch
from mvllm.core.tensor import KvGeometry


def check_batch(batch: ForwardBatch, geometry: KvGeometry, vocab_size: int) -> None:
    """
    Raises:
        InvariantViolation: the batch contradicts itself, or an index of it is out of range.
    """
    num_slots = geometry.num_blocks * geometry.block_size
    if not batch.num_tokens or not len(batch.tokens) == len(batch.positions) == len(batch.slots):
        raise InvariantViolation("tokens, positions and slots of a batch differ in length, or there are none")
    if not len(batch.row_starts) == batch.num_rows + 1 == len(batch.block_tables) + 1:
        raise InvariantViolation("row_starts, context_lens and block_tables of a batch differ in length")
    counts = np.diff(batch.row_starts)
    if batch.row_starts[0] != 0 or batch.row_starts[-1] != batch.num_tokens or (counts < 1).any():
        raise InvariantViolation(f"row_starts {batch.row_starts} don't split {batch.num_tokens} tokens")
    _require_within("tokens", batch.tokens, vocab_size)
    _require_within("positions", batch.positions, geometry.max_context)
    _require_within("slots", batch.slots, num_slots)
    _require_within("logit_rows", batch.logit_rows, batch.num_tokens)
    if (batch.context_lens <= batch.positions[batch.row_starts[1:] - 1]).any():
        raise InvariantViolation("context_lens of a batch end before a row's last token")
    _check_tables(batch, geometry)


def _check_tables(batch: ForwardBatch, geometry: KvGeometry) -> None:
    needed = -(-batch.context_lens // geometry.block_size)
    if needed.max() > batch.block_tables.shape[1]:
        raise InvariantViolation("block_tables of a batch are too short for context_lens")
    used = np.arange(batch.block_tables.shape[1]) < needed[:, None]
    _require_within("block_tables", batch.block_tables[used], geometry.num_blocks)


def _require_within(what: str, values: NDArray[np.int32], stop: int) -> None:
    if len(values) and (values.min() < 0 or values.max() >= stop):
        raise InvariantViolation(f"{what} of a batch must be in [0, {stop}): {values}")
