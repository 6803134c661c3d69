"""Runs the cpu backend's attention kernels on random pools, and says in float64 what should come out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mvllm.backends.cpu import attention
from mvllm.backends.cpu.attention_kernels import score_function, values_function
from mvllm.backends.cpu.kv_pool import KvLayout, KvPool
from mvllm.backends.cpu.memory import aligned_zeros
from mvllm.backends.cpu.tables import ATTENTION, ITEM, SPLIT

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Case:
    """One layer's attention."""

    kv_heads: int = 2
    group: int = 3
    head_dim: int = 16
    block_size: int = 16
    dtype: str = "f32"
    window: int | None = None
    soft_cap: float | None = None

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)


@dataclass(frozen=True)
class Tokens:
    """Random q, k, v of one sequence: [tokens, heads, head_dim]."""

    q: Floats
    k: Floats
    v: Floats


def random_sequence(case: Case, num_tokens: int, seed: int) -> Tokens:
    rng = np.random.default_rng(seed)
    shape = (num_tokens, case.kv_heads, case.head_dim)
    q = 2 * rng.standard_normal((num_tokens, case.kv_heads * case.group, case.head_dim), np.float32)
    k, v = rng.standard_normal(shape, np.float32), rng.standard_normal(shape, np.float32)
    if case.dtype == "f16":
        k, v = k.astype(np.float16).astype(np.float32), v.astype(np.float16).astype(np.float32)
    return Tokens(q, k, v)


class PagedAttention:
    """A pool full of NaN, except where the sequence was stored; blocks in a shuffled order."""

    def __init__(self, case: Case, sequence: Tokens, seed: int = 0) -> None:
        self._case, self._sequence = case, sequence
        self._num_tokens = len(sequence.q)
        blocks = -(-self._num_tokens // case.block_size)
        num_blocks = blocks + 3
        layout = KvLayout(1, num_blocks, case.block_size, case.kv_heads, case.head_dim, case.dtype)
        self.pool = KvPool(layout)
        self.pool._heads.fill(np.nan)
        self.table = np.random.default_rng(seed).permutation(num_blocks)[:blocks].astype(np.int32)
        self._record = np.zeros(1, ATTENTION)
        fields = {
            "layer": self.pool.layer_address(0),
            "block_bytes": layout.block_bytes,
            "head_bytes": layout.head_bytes,
            "value_offset": layout.value_offset,
            "block_size": case.block_size,
            "tile": layout.tile,
            "head_dim": case.head_dim,
            "padded_dim": layout.padded_dim,
            "kv_heads": case.kv_heads,
            "group": case.group,
            "is_half": case.dtype == "f16",
            "score": score_function(case.dtype).address,
            "add_values": values_function(case.dtype).address,
            "window": case.window or 0,
            "scale": case.scale,
            "soft_cap": case.soft_cap or 0.0,
        }
        for name, value in fields.items():
            self._record[name] = value
        self._split = np.zeros(1, SPLIT)
        self._scratch = aligned_zeros(attention.scratch_bytes(case.head_dim), "scratch")
        self._scratch.view(np.float32).fill(np.nan)
        states = attention.MAX_ROWS * attention.state_bytes(case.head_dim)
        self._states = aligned_zeros(-(-self._num_tokens // attention.PART) * states, "states")
        for position in range(self._num_tokens):
            self._store(position)

    def _store(self, position: int) -> None:
        block_size = self._case.block_size
        slot = int(self.table[position // block_size]) * block_size + position % block_size
        keys = np.ascontiguousarray(self._sequence.k[position])
        values = np.ascontiguousarray(self._sequence.v[position])
        attention.store_keys_values(self._record.ctypes.data, slot, keys.ctypes.data, values.ctypes.data)

    def run(self, first: int, last: int, rows_per_item: int, pieces: int = 1) -> Floats:
        """Output of the positions [first, last), cut into items of `rows_per_item` query rows, each of them
        split into `pieces`.

        Raises:
            AssertionError: something was written beside the output.
        """
        case = self._case
        q = np.ascontiguousarray(self._sequence.q[first:last])
        guarded = np.full((len(q) + 2, *q.shape[1:]), np.nan, np.float32)
        out = guarded[1:-1]
        positions = np.arange(first, last, dtype=np.int32)
        total = len(q) * case.group
        for head in range(case.kv_heads):
            for start in range(0, total, rows_per_item):
                for item in self._items(head, start, min(rows_per_item, total - start), pieces):
                    attention.attend_item(
                        self._record.ctypes.data,
                        item.ctypes.data,
                        positions.ctypes.data,
                        self.table.ctypes.data,
                        q.ctypes.data,
                        out.ctypes.data,
                        q.strides[0],
                        self._scratch.ctypes.data,
                    )
        assert np.isnan(guarded[[0, -1]]).all(), "written beside the output"
        return out.copy()

    def _items(self, head: int, first: int, count: int, pieces: int) -> list[NDArray[Any]]:
        """Items that cover all parts of the context, in a shuffled order."""
        num_parts = -(-self._num_tokens // attention.PART)
        pieces = min(pieces, num_parts)
        items = np.zeros((pieces, 1), ITEM)
        items["kv_head"], items["first"], items["count"] = head, first, count
        for piece, item in enumerate(items):
            item["first_part"] = num_parts * piece // pieces
            item["last_part"] = num_parts * (piece + 1) // pieces
        if pieces > 1:
            self._split["items"], self._split["num_parts"] = pieces, num_parts
            self._split["states"] = self._states.ctypes.data
            self._states.view(np.float32).fill(np.nan)
            items["split"] = self._split.ctypes.data
        order = np.random.default_rng(first).permutation(pieces)
        return [items[piece] for piece in order]


def expected_attention(case: Case, sequence: Tokens, positions: Sequence[int]) -> NDArray[np.float64]:
    """Float64, straight from the definition: [len(positions), heads, head_dim]."""
    q, k, v = (array.astype(np.float64) for array in (sequence.q, sequence.k, sequence.v))
    result = np.empty((len(positions), *q.shape[1:]))
    for index, position in enumerate(positions):
        start = max(0, position + 1 - case.window) if case.window else 0
        for head in range(q.shape[1]):
            kv_head = head // case.group
            scores = k[start : position + 1, kv_head] @ q[position, head] * case.scale
            if case.soft_cap:
                scores = case.soft_cap * np.tanh(scores / case.soft_cap)
            weights = np.exp(scores - scores.max())
            result[index, head] = weights @ v[start : position + 1, kv_head] / weights.sum()
    return result
