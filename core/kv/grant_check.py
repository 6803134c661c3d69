"""Whether a plan is legal, and how many blocks it needs and may have. Nothing here changes anything.

All of it is known before `KvManager.grant` touches any state, which makes the grant all-or-nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from mvllm.core.errors import InvariantViolation
from mvllm.core.kv.block_pool import BlockPool
from mvllm.core.kv.block_table import BlockTable
from mvllm.core.kv.prefix_trie import PrefixTrie
from mvllm.core.step import Admission, PlannedRow, StepPlan
from mvllm.core.types import BlockId, RequestId, ceil_div

Tables = Mapping[RequestId, BlockTable]
Hits = Mapping[RequestId, tuple[BlockId, ...]]
"""Cached blocks that each admitted row starts with."""


def check_changes(plan: StepPlan, salts: Mapping[RequestId, str], tables: Tables, trie: PrefixTrie) -> Hits:
    """The hits of the plan's admissions.

    Raises:
        InvariantViolation: a preempt or an admission is illegal.
    """
    for id in plan.preempts:
        if id not in tables:
            raise InvariantViolation(f"grant: row {id!r} is preempted, but has no block table")
    if len(set(plan.preempts)) != len(plan.preempts):
        raise InvariantViolation(f"grant: a row is preempted twice: {plan.preempts}")
    hits: dict[RequestId, tuple[BlockId, ...]] = {}
    for admission in plan.admits:
        _check_admission(admission, salts, tables, trie)
        if admission.id in hits:
            raise InvariantViolation(f"grant: row {admission.id!r} is admitted twice")
        hits[admission.id] = admission.hit_block_ids
    return hits


def blocks_needed(plan: StepPlan, hits: Hits, tables: Tables, block_size: int) -> list[int]:
    """How many blocks must be opened for each row of the plan.

    Raises:
        InvariantViolation: a row is neither live nor admitted, is preempted, occurs twice or does not
            continue where its cache ends.
    """
    needs = []
    for row in plan.rows:
        table = tables.get(row.id)
        if table is None:
            num_held, num_computed = _admitted(row, hits, block_size)
        else:
            num_held, num_computed = len(table.block_ids), table.num_computed
        if row.start != num_computed or row.count < 1 or row.max_drafts < 0:
            raise InvariantViolation(
                f"grant: expected a row that starts at {num_computed} with count >= 1 and max_drafts >= 0, "
                f"found {row}"
            )
        num_blocks = ceil_div(row.end + row.max_drafts, block_size)
        needs.append(max(0, num_blocks - num_held))
    ids = {row.id for row in plan.rows}
    if len(ids) != len(plan.rows):
        raise InvariantViolation(f"grant: a row is planned twice: {[row.id for row in plan.rows]}")
    if not ids.isdisjoint(plan.preempts):
        raise InvariantViolation(f"grant: preempted rows are planned: {sorted(ids & set(plan.preempts))}")
    return needs


def blocks_available(plan: StepPlan, tables: Tables, pool: BlockPool) -> int:
    """Blocks that can be opened once the preempted rows have left and the hits are pinned."""
    available = pool.num_free + pool.num_idle
    if not plan.preempts and not plan.admits:
        return available
    leaving = Counter(block_id for id in plan.preempts for block_id in tables[id].block_ids)
    freed = sum(num_leaving == pool.num_readers(block_id) for block_id, num_leaving in leaving.items())
    pinned = {block_id for admission in plan.admits for block_id in admission.hit_block_ids}
    return available + freed - sum(leaving[block_id] == pool.num_readers(block_id) for block_id in pinned)


def _check_admission(
    admission: Admission, salts: Mapping[RequestId, str], tables: Tables, trie: PrefixTrie
) -> None:
    id = admission.id
    if id in tables:
        raise InvariantViolation(f"grant: row {id!r} is admitted, but has a block table already")
    if id not in salts:
        raise InvariantViolation(f"grant: row {id!r} is admitted without a salt")
    if not trie.is_path(admission.hit_block_ids, salts[id]):
        raise InvariantViolation(
            f"grant: the hit {admission.hit_block_ids} of row {id!r} is no cached prefix in its namespace"
        )


def _admitted(row: PlannedRow, hits: Hits, block_size: int) -> tuple[int, int]:
    """(blocks held, positions computed) of a row at its admission."""
    if row.id not in hits:
        raise InvariantViolation(f"grant: row {row.id!r} is planned, but neither live nor admitted")
    num_held = len(hits[row.id])
    return num_held, num_held * block_size
