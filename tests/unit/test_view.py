"""What of the waiting queue the scheduler gets to see."""

from __future__ import annotations

from collections.abc import Sequence

from mvllm.core.batch.sampling_row import SamplingRow
from mvllm.core.engine.request_table import RequestTable
from mvllm.core.engine.view import scheduler_view
from mvllm.core.kv.kv_manager import KvManager
from mvllm.core.request import Request, SamplingParams
from mvllm.core.step import Admission, PlannedRow, PrefixProbe, StepPlan
from mvllm.core.types import RequestId


class CountingKv(KvManager):
    """Counts the prefix look-ups."""

    num_probes = 0

    def probe(self, token_ids: Sequence[int], salt: str) -> PrefixProbe:
        self.num_probes += 1
        return super().probe(token_ids, salt)


def queue(prompts: Sequence[tuple[int, ...]], num_running: int) -> tuple[RequestTable, CountingKv]:
    """Requests "0", "1", ... in this order; the first `num_running` have computed one token."""
    table, kv = RequestTable(), CountingKv(100, 2)
    for index, prompt in enumerate(prompts):
        request = Request(RequestId(str(index)), prompt, SamplingParams(), 0, 4)
        table.add(request, SamplingRow.of(request), None)
    ids = [RequestId(str(index)) for index in range(num_running)]
    plan = StepPlan((), tuple(map(Admission, ids)), tuple(PlannedRow(id, 0, 1) for id in ids))
    kv.grant(plan, dict.fromkeys(ids, ""))
    for id in ids:
        table.admit(id, 0)
    return table, kv


def shown(table: RequestTable, kv: KvManager, max_num_seqs: int) -> list[str]:
    return [str(row.id) for row in scheduler_view(table, kv, max_num_seqs).rows]


def test_without_a_free_row_the_waiting_queue_is_not_looked_at() -> None:
    table, kv = queue([(index, 0, 0) for index in range(6)], num_running=3)
    assert shown(table, kv, 3) == ["0", "1", "2"]
    assert kv.num_probes == 0


def test_one_waiting_request_is_shown_for_each_free_row() -> None:
    table, kv = queue([(index, 0, 0) for index in range(6)], num_running=2)
    assert shown(table, kv, 4) == ["0", "1", "2", "3"]
    assert kv.num_probes == 2


def test_followers_do_not_hide_the_requests_behind_them() -> None:
    """S15: 0 computes the prefix that 1 to 4 wait for; 5 leads a prefix of its own, 6 follows 5."""
    prompts = [(1, 1, 1, 1)] * 5 + [(2, 2, 2, 2)] * 2 + [(3, 3, 3, 3)]
    table, kv = queue(prompts, num_running=1)
    assert shown(table, kv, 2) == ["0", "1", "2", "3", "4", "5"]
    assert shown(table, kv, 3) == ["0", "1", "2", "3", "4", "5", "6", "7"]


def test_the_oldest_request_is_shown_even_if_younger_ones_hold_every_row() -> None:
    """S10: it may take a row from the youngest."""
    table, kv = queue([(1, 1), (2, 2), (3, 3)], num_running=3)
    table.preempt(RequestId("0"))
    kv.release(RequestId("0"))
    assert shown(table, kv, 2) == ["0", "1", "2"]


def test_running_and_waiting_rows_come_by_age() -> None:
    table, kv = queue([(1, 1), (2, 2), (3, 3), (4, 4)], num_running=3)
    table.preempt(RequestId("1"))
    kv.release(RequestId("1"))
    assert shown(table, kv, 3) == ["0", "1", "2"]
    assert shown(table, kv, 4) == ["0", "1", "2", "3"]
