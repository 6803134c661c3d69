"""How the cpu backend cuts a batch's attention into items."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from mvllm.backends.cpu.attention import MAX_ROWS, PART, state_bytes
from mvllm.backends.cpu.attention_plan import most_items, most_splits, plan_items
from mvllm.backends.cpu.tables import ITEM, SPLIT, STEP

_FENCE = 3  # records that must stay as they are


@dataclass(frozen=True)
class Batch:
    """Tokens and context of each row, and the heads they attend with."""

    rows: list[tuple[int, int]]
    kv_heads: int = 2
    group: int = 3
    head_dim: int = 64
    threads: int = 2
    memory: int = 1 << 20  # for states


@dataclass(frozen=True)
class Plan:
    items: NDArray[np.void]
    splits: NDArray[np.void]
    states: int  # address


def plan(batch: Batch) -> Plan:
    """The plan of a batch, written into lists of just the announced size."""
    tokens = sum(count for count, _ in batch.rows)
    num_items = most_items(tokens, batch.kv_heads * batch.group, batch.threads)
    items, splits = np.zeros(num_items + _FENCE, ITEM), np.zeros(most_splits(batch.threads) + _FENCE, SPLIT)
    starts = np.cumsum([0, *(count for count, _ in batch.rows)]).astype(np.int32)
    contexts = np.array([context for _, context in batch.rows], np.int32)
    states = np.zeros(1, np.uint8)  # only its address is used
    step = np.zeros(1, STEP)
    step["num_rows"], step["row_starts"], step["context_lens"] = (
        len(batch.rows),
        starts.ctypes.data,
        contexts.ctypes.data,
    )
    step["items"], step["splits"] = items.ctypes.data, splits.ctypes.data
    step["states"], step["states_bytes"] = states.ctypes.data, batch.memory
    size = state_bytes(batch.head_dim)
    plan_items(step.ctypes.data, batch.kv_heads, batch.group, batch.threads, size)
    count, split_count = int(step["num_items"][0]), int(step["num_splits"][0])
    assert not items[count:].view(np.uint8).any() and not splits[split_count:].view(np.uint8).any()
    assert count <= num_items and split_count <= most_splits(batch.threads)
    return Plan(items[:count], splits[:split_count], states.ctypes.data)


def parts_of(batch: Batch, row: int) -> int:
    return -(-batch.rows[row][1] // PART)


ROWS = st.tuples(st.integers(1, 70), st.integers(0, 5000)).map(lambda pair: (pair[0], sum(pair)))
BATCHES = st.builds(
    Batch,
    rows=st.lists(ROWS, min_size=1, max_size=5),
    kv_heads=st.integers(1, 4),
    group=st.integers(1, 9),
    head_dim=st.sampled_from([16, 80, 256]),
    threads=st.integers(1, 9),
    memory=st.sampled_from([0, 1 << 14, 1 << 20]),
)


@given(BATCHES)
def test_every_query_row_meets_every_part_once(batch: Batch) -> None:
    met: Counter[tuple[int, int, int, int]] = Counter()
    for item in plan(batch).items:
        assert 1 <= item["count"] <= MAX_ROWS
        for query_row in range(item["first"], item["first"] + item["count"]):
            for part in range(item["first_part"], item["last_part"]):
                met[int(item["row"]), int(item["kv_head"]), int(query_row), part] += 1
    expected = {
        (row, head, query_row, part)
        for row, (count, _) in enumerate(batch.rows)
        for head in range(batch.kv_heads)
        for query_row in range(count * batch.group)
        for part in range(parts_of(batch, row))
    }
    assert set(met) == expected and set(met.values()) == {1}


@given(BATCHES)
def test_split_items_share_a_split_with_memory_of_its_own(batch: Batch) -> None:
    found = plan(batch)
    users = Counter(int(item["split"]) for item in found.items if item["split"])
    assert len(users) == len(found.splits)
    end = found.states
    for index, split in enumerate(found.splits):
        address = found.splits.ctypes.data + index * SPLIT.itemsize
        own = [item for item in found.items if item["split"] == address]
        assert len(own) == split["items"] > 1 and split["done"] == 0
        assert len({(item["row"], item["kv_head"], item["first"], item["count"]) for item in own}) == 1
        assert split["num_parts"] == parts_of(batch, int(own[0]["row"]))
        assert split["states"] == end
        end += int(split["num_parts"]) * int(own[0]["count"]) * state_bytes(batch.head_dim)
    assert end - found.states <= batch.memory


def test_one_long_context_keeps_all_threads_at_work() -> None:
    found = plan(Batch([(1, 4 * PART)], kv_heads=3, threads=2))
    lengths = [int(item["last_part"] - item["first_part"]) for item in found.items]
    assert len(found.splits) == 3 and sorted(lengths) == [1] * 12


def test_a_long_context_among_short_ones_is_split_and_they_are_not() -> None:
    found = plan(Batch([(1, 100), (1, 8 * PART), (1, 100)], kv_heads=1, threads=2))
    assert {int(item["row"]) for item in found.items if item["split"]} == {1}


def test_a_short_context_with_fewer_heads_than_threads_is_shared_by_query_heads() -> None:
    found = plan(Batch([(1, 100)], kv_heads=1, group=4, threads=2))
    assert [int(item["count"]) for item in found.items] == [2, 2]
