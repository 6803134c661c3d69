"""An engine reduced to what scheduling needs: requests that grow, and a pool of blocks.

The pool is either the project's own `KvManager` or a few dictionaries that do the same by brute force.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Protocol

from mvllm.core.kv.kv_manager import KvManager
from mvllm.core.request import Phase
from mvllm.core.step import KvCommit, PrefixProbe, RowView, SchedulerView, StepPlan
from mvllm.core.types import BlockId, RequestId, TokenId, ceil_div
from tests.property.scheduler_rules import check_all
from tests.strategies import SchedulerLimits

Tokens = tuple[TokenId, ...]


class Pool(Protocol):
    """What the simulation asks of a pool; `commit` takes the row's tokens and how many are computed."""

    @property
    def num_free(self) -> int: ...
    @property
    def num_idle(self) -> int: ...
    def table(self, id: RequestId) -> tuple[BlockId, ...]: ...
    def probe(self, tokens: Tokens) -> PrefixProbe: ...
    def next_block_key(self, id: RequestId, tokens: Tokens, num_computed: int) -> Hashable | None: ...
    def grant(self, plan: StepPlan) -> None: ...
    def commit(self, id: RequestId, tokens: Tokens, num_computed: int) -> None: ...
    def release(self, id: RequestId) -> None: ...


class PoolFactory(Protocol):
    def __call__(self, num_blocks: int, block_size: int, *, caching: bool) -> Pool: ...


class RealPool:
    """The project's `KvManager`, re-checked after every change."""

    def __init__(self, num_blocks: int, block_size: int, *, caching: bool) -> None:
        self.kv = KvManager(num_blocks, block_size, enable_prefix_caching=caching)

    @property
    def num_free(self) -> int:
        return self.kv.num_free

    @property
    def num_idle(self) -> int:
        return self.kv.num_idle

    def table(self, id: RequestId) -> tuple[BlockId, ...]:
        return self.kv.table(id)

    def probe(self, tokens: Tokens) -> PrefixProbe:
        return self.kv.probe(tokens, "")

    def next_block_key(self, id: RequestId, tokens: Tokens, num_computed: int) -> Hashable | None:
        return self.kv.next_block_key(id, tokens)

    def grant(self, plan: StepPlan) -> None:
        self.kv.grant(plan, {admission.id: "" for admission in plan.admits})
        self.kv.check_integrity()

    def commit(self, id: RequestId, tokens: Tokens, num_computed: int) -> None:
        self.kv.commit([KvCommit(id, tokens, num_computed)])

    def release(self, id: RequestId) -> None:
        self.kv.release(id)


class ModelPool:
    """Block tables and an index of full blocks. Owns both; everything else is recomputed on demand."""

    def __init__(self, num_blocks: int, block_size: int, *, caching: bool) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.caching = caching
        self.tables: dict[RequestId, list[BlockId]] = {}
        self.index: dict[Tokens, BlockId] = {}  # all tokens up to a block's end -> the block

    @property
    def num_free(self) -> int:
        return len(self.free())

    @property
    def num_idle(self) -> int:
        return len(self.idle())

    def table(self, id: RequestId) -> tuple[BlockId, ...]:
        return tuple(self.tables[id])

    def release(self, id: RequestId) -> None:
        del self.tables[id]

    def in_tables(self) -> set[BlockId]:
        return {block for table in self.tables.values() for block in table}

    def free(self) -> list[BlockId]:
        taken = self.in_tables() | set(self.index.values())
        return [BlockId(block) for block in range(self.num_blocks) if block not in taken]

    def idle(self) -> set[BlockId]:
        return set(self.index.values()) - self.in_tables()

    def probe(self, tokens: Tokens) -> PrefixProbe:
        hits: list[BlockId] = []
        while (len(hits) + 1) * self.block_size < len(tokens):
            block = self.index.get(tokens[: (len(hits) + 1) * self.block_size])
            if block is None:
                break
            hits.append(block)
        key = self._key(tokens[:-1], len(hits) * self.block_size)
        return PrefixProbe(tuple(hits), self.idle().intersection(hits), key)

    def next_block_key(self, id: RequestId, tokens: Tokens, num_computed: int) -> Tokens | None:
        return self._key(tokens, num_computed)

    def _key(self, tokens: Tokens, num_computed: int) -> Tokens | None:
        end = (num_computed // self.block_size + 1) * self.block_size
        return tokens[:end] if self.caching and end <= len(tokens) else None

    def grant(self, plan: StepPlan) -> None:
        """Carry out the plan's block changes; AssertionError if the pool can't."""
        for id in plan.preempts:
            del self.tables[id]
        for admission in plan.admits:
            assert set(admission.hit_block_ids) <= set(self.index.values()), "a hit that is not indexed"
            self.tables[admission.id] = list(admission.hit_block_ids)
        for row in plan.rows:
            table = self.tables[row.id]
            for _ in range(ceil_div(row.end + row.max_drafts, self.block_size) - len(table)):
                table.append(self._open())

    def _open(self) -> BlockId:
        free = self.free()
        if free:
            return free[0]
        idle = self.idle()
        for tokens, block in self.index.items():
            has_child = any(len(t) > len(tokens) and t[: len(tokens)] == tokens for t in self.index)
            if block in idle and not has_child:
                del self.index[tokens]
                return block
        raise AssertionError("S4: the pool can't grant the plan")

    def commit(self, id: RequestId, tokens: Tokens, num_computed: int) -> None:
        """Drop blocks past the computed positions; index the full ones, or point to those indexed before."""
        table = self.tables[id]
        del table[ceil_div(num_computed, self.block_size) :]
        if self.caching:
            for i in range(num_computed // self.block_size):
                table[i] = self.index.setdefault(tokens[: (i + 1) * self.block_size], table[i])


@dataclass
class SimulatedRequest:
    """A live request; `tokens` is what it has now, `deadline` the step by which it must have ended."""

    id: RequestId
    tokens: Tokens
    total_limit: int
    max_drafts: int
    deadline: int
    running: bool = False
    num_computed: int = 0
    starts: list[tuple[int, int]] = field(default_factory=list)  # chunks since the last admission


class Simulation:
    """Requests by age, a pool and a scheduler. Every step checks every rule on the plan it carries out.

    Owns all of it. The `deadline` of a request is S10 spelled out: the oldest live request advances in each
    step, so a request ends within the sum of the limits of those that are not younger than itself.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        make_pool: PoolFactory = RealPool,
        *,
        caching: bool = True,
        window: int | None = None,
    ) -> None:
        self.limits = limits
        self.scheduler = limits.scheduler()
        self.caching = caching
        self.pool = make_pool(limits.num_blocks, limits.block_size, caching=caching)
        self.window = window  # most waiting rows that a view shows; None: all
        self.live: list[SimulatedRequest] = []
        self.plans: list[StepPlan] = []
        self.num_submitted = 0
        self.finished_at: dict[RequestId, int] = {}

    def submit(self, prompt: Tokens, max_tokens: int, max_drafts: int = 0) -> RequestId | None:
        """Queue a request; None if the scheduler refuses it."""
        total_limit = len(prompt) + max_tokens
        if self.scheduler.refusal(len(prompt), total_limit) is not None:
            return None
        id = RequestId(f"r{self.num_submitted}")
        self.num_submitted += 1
        deadline = len(self.plans) + total_limit + sum(request.total_limit for request in self.live)
        self.live.append(SimulatedRequest(id, prompt, total_limit, max_drafts, deadline))
        return id

    def cancel(self, id: RequestId) -> None:
        if any(request.running for request in self.live if request.id == id):
            self.pool.release(id)
        self.live = [request for request in self.live if request.id != id]

    def view(self) -> SchedulerView:
        rows = []
        num_waiting = 0
        for request in self.live:
            num_waiting += not request.running
            if request.running or self.window is None or num_waiting <= self.window:
                rows.append(self._row_view(request))
        return SchedulerView(tuple(rows), self.pool.num_free, self.pool.num_idle)

    def _row_view(self, request: SimulatedRequest) -> RowView:
        pool, tokens, computed = self.pool, request.tokens, request.num_computed
        running = request.running
        return RowView(
            id=request.id,
            phase=Phase.RUNNING if running else Phase.WAITING,
            num_tokens=len(tokens),
            num_computed=computed,
            total_limit=request.total_limit,
            block_ids=pool.table(request.id) if running else (),
            probe=PrefixProbe() if running else pool.probe(tokens),
            next_block_key=pool.next_block_key(request.id, tokens, computed) if running else None,
            max_drafts=request.max_drafts,
        )

    def step(self, accepted_drafts: int = 0, stops: frozenset[RequestId] = frozenset()) -> StepPlan:
        """Plan, check, grant, generate, commit.

        Args:
            accepted_drafts: most drafts accepted per row.
            stops: requests that end early if they generate a token in this step.
        """
        view = self.view()
        plan = self.scheduler.plan(view)
        check_all(self.limits, view, plan)
        self.pool.grant(plan)
        by_id = {request.id: request for request in self.live}
        for id in plan.preempts:
            by_id[id].running, by_id[id].num_computed = False, 0
        for admission in plan.admits:
            by_id[admission.id].running, by_id[admission.id].starts = True, []
        self.plans.append(plan)
        for row in plan.rows:
            request = by_id[row.id]
            request.starts.append((row.start, row.end))
            request.num_computed = row.end
            if row.end == len(request.tokens):
                num_new = 1 + min(row.max_drafts, accepted_drafts)
                request.num_computed += num_new - 1
                request.tokens += tuple((len(request.tokens) + i) % 2 for i in range(num_new))
            self.pool.commit(row.id, request.tokens, request.num_computed)
            stopped = request.id in stops and request.num_computed == len(request.tokens) - 1
            if len(request.tokens) == request.total_limit or stopped:
                self.finished_at[request.id] = len(self.plans)
                self.cancel(request.id)
        return plan

    def drain(self) -> int:
        """Run until no request is live; returns the number of steps. AssertionError past the S10 bound."""
        bound = len(self.plans) + sum(request.total_limit for request in self.live)
        first = len(self.plans)
        while self.live:
            assert len(self.plans) < bound, f"S10: {len(self.live)} live requests after {bound - first} steps"
            self.step()
        return len(self.plans) - first
