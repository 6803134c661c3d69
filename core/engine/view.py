"""The scheduler's view of the engine: running rows, and as many waiting ones as could possibly start."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from operator import itemgetter

from mvllm.core.engine.request_table import RequestState, RequestTable
from mvllm.core.kv.kv_manager import KvManager
from mvllm.core.request import Phase
from mvllm.core.step import PrefixProbe, RowView, SchedulerView
from mvllm.core.types import RequestId

MAX_FOLLOWERS_PROBED = 256
"""Bounds the work per step when very many requests wait for one prefix in the making."""

NO_DRAFTS: Mapping[RequestId, int] = {}


def scheduler_view(
    table: RequestTable, kv: KvManager, max_num_seqs: int, max_drafts: Mapping[RequestId, int] = NO_DRAFTS
) -> SchedulerView:
    """Frozen snapshot for the scheduler; `max_drafts` has the drafts that running rows want.

    Looking up a waiting request's cached prefix costs time in proportion to its length, so only those at
    the head of the queue are shown: one for each free row, and the followers among them (INVARIANTS S15),
    which take no row. A request past the window can't start in this step under first come, first served.
    """
    room = max_num_seqs - len(table.running)
    if not table.waiting or (room <= 0 and table.waiting[0].arrival > table.running[0].arrival):
        rows = tuple([_running_view(state, kv, None, max_drafts) for state in table.running])
        return SchedulerView(rows, kv.num_free, kv.num_idle)
    keys = {state.arrival: kv.next_block_key(state.id, state.token_ids) for state in table.running}
    by_age = [
        (state.arrival, _running_view(state, kv, keys[state.arrival], max_drafts)) for state in table.running
    ]
    for state, probe in _waiting_window(table, kv, keys, max(room, 1)):
        by_age.append((state.arrival, _waiting_view(state, probe)))
    by_age.sort(key=itemgetter(0))
    return SchedulerView(tuple([row for _, row in by_age]), kv.num_free, kv.num_idle)


def _waiting_window(
    table: RequestTable, kv: KvManager, running_keys: dict[int, Hashable | None], room: int
) -> list[tuple[RequestState, PrefixProbe]]:
    """Oldest waiting requests with their probes: `room` that may start, and followers between them."""
    first_arrival: dict[Hashable, int] = {}  # next block key -> its oldest owner seen so far
    for arrival, key in running_keys.items():
        if key is not None:
            first_arrival[key] = min(arrival, first_arrival.get(key, arrival))
    window = []
    num_followers = 0
    for state in table.waiting:
        probe = kv.probe(state.waiting_token_ids, state.request.params.cache_salt)
        window.append((state, probe))
        key = probe.next_block_key
        if key is not None and first_arrival.setdefault(key, state.arrival) < state.arrival:
            num_followers += 1
        else:
            room -= 1
        if room == 0 or num_followers == MAX_FOLLOWERS_PROBED:
            break
    return window


def _running_view(
    state: RequestState, kv: KvManager, next_block_key: Hashable | None, max_drafts: Mapping[RequestId, int]
) -> RowView:
    id = state.id
    return RowView(
        id=id,
        phase=Phase.RUNNING,
        num_tokens=len(state.token_ids),
        num_computed=state.num_computed,
        total_limit=state.request.total_limit,
        block_ids=kv.table(id),
        next_block_key=next_block_key,
        max_drafts=max_drafts.get(id, 0) if max_drafts else 0,
    )


def _waiting_view(state: RequestState, probe: PrefixProbe) -> RowView:
    return RowView(
        id=state.id,
        phase=Phase.WAITING,
        num_tokens=len(state.token_ids),
        num_computed=0,
        total_limit=state.request.total_limit,
        probe=probe,
    )
