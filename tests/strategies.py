"""Hypothesis strategies shared by several test files, one section per subject."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from hypothesis import strategies as st

from mvllm.core.request import Phase
from mvllm.core.sched.policy import POLICIES
from mvllm.core.sched.scheduler import Scheduler
from mvllm.core.step import PrefixProbe, RowView, SchedulerView
from mvllm.core.types import BlockId, RequestId, ceil_div

# --- scheduler views -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class SchedulerLimits:
    """Keyword arguments of `Scheduler`."""

    max_num_batched_tokens: int
    max_num_seqs: int
    block_size: int
    num_blocks: int
    admission: str = "optimistic"
    policy: str = "fcfs"
    max_step_drafts: int | None = None

    def scheduler(self) -> Scheduler:
        return Scheduler(**asdict(self))


@st.composite
def scheduler_limits(draw: st.DrawFn) -> SchedulerLimits:
    """Small limits, so that budget, rows and blocks all run short often."""
    max_num_seqs = 5 - draw(st.integers(0, 4))
    return SchedulerLimits(
        max_num_batched_tokens=draw(st.integers(max_num_seqs, 12)),
        max_num_seqs=max_num_seqs,
        block_size=draw(st.integers(1, 4)),
        num_blocks=draw(st.integers(2, 12)),
        admission=draw(st.sampled_from(["optimistic", "optimistic", "reserve"])),
        policy=draw(st.sampled_from(sorted(POLICIES))),
        max_step_drafts=draw(st.sampled_from([None, 3, 1, 0])),
    )


class _ViewBuilder:
    """Builds a view that a real pool could show. Owns a tree of indexed blocks and the ids not yet used.

    A path is a tuple of labels; a label stands for the tokens of one block. Rows that share a path share its
    blocks, and the name of a full block not yet computed is (path of its parent, label).
    """

    def __init__(self, draw: st.DrawFn, limits: SchedulerLimits) -> None:
        self.draw = draw
        self.limits = limits
        self.tree: dict[tuple[int, ...], BlockId] = {}
        self.unused = [BlockId(block) for block in range(limits.num_blocks)]
        self.in_tables: set[BlockId] = set()
        self.reserved = 0

    def integer(self, low: int, high: int) -> int:
        return self.draw(st.integers(low, high))

    def label(self) -> int:
        """Mostly 0, so that paths are often shared."""
        return self.integer(0, 3) // 3

    def waiting_lengths(self) -> tuple[int, int]:
        """(total_limit, num_tokens) of a servable request."""
        total_limit = self.limits.num_blocks * self.limits.block_size + 1
        total_limit -= self.integer(0, total_limit - 2)
        return total_limit, self.integer(1, total_limit - 1)

    def running_lengths(self) -> tuple[int, int, int]:
        """(total_limit, num_tokens, num_computed) of a servable request of few blocks, so that many fit."""
        most = self.limits.num_blocks * self.limits.block_size + 1
        num_computed = min(self.integer(0, 2 * self.limits.block_size), most - 2)
        num_tokens = num_computed + 1
        if self.draw(st.booleans()):
            num_tokens = self.integer(num_tokens, most - 1)
        longest = num_tokens + 2 * self.limits.block_size
        return self.integer(num_tokens + 1, max(num_tokens + 1, min(longest, most))), num_tokens, num_computed

    def running(self, id: RequestId) -> RowView | None:
        """A row with a table, or None if reservation or blocks do not allow one more."""
        block_size = self.limits.block_size
        total_limit, num_tokens, num_computed = self.running_lengths()
        reserved = self.reserved + ceil_div(total_limit - 1, block_size)
        if self.limits.admission == "reserve" and reserved > self.limits.num_blocks:
            return None
        sealed = num_computed // block_size
        path = tuple(self.label() for _ in range(sealed))
        missing = [path[: i + 1] for i in range(sealed) if path[: i + 1] not in self.tree]
        covered = num_computed + self.integer(0, 1)
        num_open = max(0, ceil_div(covered, block_size) - sealed)
        if len(missing) + num_open > len(self.unused):
            return None
        for prefix in missing:
            self.tree[prefix] = self.unused.pop()
        table = tuple(self.tree[path[: i + 1]] for i in range(sealed))
        table += tuple(self.unused.pop() for _ in range(num_open))
        self.in_tables.update(table)
        self.reserved = reserved
        full = num_tokens >= (sealed + 1) * block_size
        return RowView(
            id=id,
            phase=Phase.RUNNING,
            num_tokens=num_tokens,
            num_computed=num_computed,
            total_limit=total_limit,
            block_ids=table,
            next_block_key=(path, self.integer(0, 2)) if full else None,
            max_drafts=self.integer(0, 4),
        )

    def add_idle(self) -> None:
        """Index blocks that nobody reads, below any path."""
        for _ in range(self.integer(0, len(self.unused))):
            parent = self.draw(st.sampled_from([(), *sorted(self.tree)]))
            path = (*parent, self.label())
            if path not in self.tree:
                self.tree[path] = self.unused.pop()

    def waiting(self, id: RequestId) -> RowView:
        block_size = self.limits.block_size
        total_limit, num_tokens = self.waiting_lengths()
        path: tuple[int, ...] = ()
        for _ in range((num_tokens - 1) // block_size):
            longer = (*path, self.label())
            if longer not in self.tree:
                break
            path = longer
        hits = tuple(self.tree[path[: i + 1]] for i in range(len(path)))
        labels = [label for label in range(3) if (*path, label) not in self.tree]
        full = num_tokens >= (len(path) + 1) * block_size
        probe = PrefixProbe(
            hit_block_ids=hits,
            idle_block_ids=frozenset(hits) - self.in_tables,
            next_block_key=(path, self.draw(st.sampled_from(labels))) if full else None,
        )
        return RowView(
            id=id,
            phase=Phase.WAITING,
            num_tokens=num_tokens,
            num_computed=0,
            total_limit=total_limit,
            probe=probe,
            max_drafts=self.integer(0, 4),
        )

    def build(self) -> SchedulerView:
        num_rows = 7 - self.integer(0, 7)
        eagerness = self.integer(0, 4)
        rows: dict[int, RowView] = {}
        for age in range(num_rows):
            if len(rows) < self.limits.max_num_seqs and self.integer(0, 3) < eagerness:
                row = self.running(RequestId(f"r{age}"))
                if row is not None:
                    rows[age] = row
        self.add_idle()
        for age in range(num_rows):
            if age not in rows:
                rows[age] = self.waiting(RequestId(f"r{age}"))
        num_idle = len(set(self.tree.values()) - self.in_tables)
        return SchedulerView(tuple(rows[age] for age in range(num_rows)), len(self.unused), num_idle)


@st.composite
def scheduler_views(draw: st.DrawFn, limits: SchedulerLimits) -> SchedulerView:
    """A consistent view: tables share prefixes, hits are partly idle, ages of the two phases are mixed."""
    return _ViewBuilder(draw, limits).build()


@st.composite
def scheduler_cases(draw: st.DrawFn) -> tuple[SchedulerLimits, SchedulerView]:
    """Limits and a consistent view under them."""
    limits = draw(scheduler_limits())
    return limits, draw(scheduler_views(limits))
