"""What a draft model's KV cache holds of each sequence, and what the next step adds to it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from mvllm.core.errors import InvariantViolation
from mvllm.core.kv.kv_manager import KvManager
from mvllm.core.spec.drafter import DraftRow
from mvllm.core.step import Admission, KvCommit, KvGrant, PlannedRow, PrefixProbe, StepPlan
from mvllm.core.types import BlockId, RequestId, TokenId, ceil_div

VERIFIED_LAG = 2
"""Most committed tokens without KV after a verification in which every draft was right: the last draft, which
the drafter never computed, and the token that the target added."""


@dataclass(frozen=True, slots=True)
class DraftJob:
    """Compute positions `[start, end)` of `tokens`, then draw drafts if that reaches their end."""

    row: DraftRow
    first: int  # position in the row of what is position 0 here
    tokens: Sequence[TokenId]  # of the row, from `first` on
    start: int
    end: int
    num_drafts: int  # 0 unless end is the number of tokens
    probe: PrefixProbe | None  # of a row that enters the cache with this step

    @property
    def planned(self) -> PlannedRow:
        # The last draft is drawn, never computed.
        return PlannedRow(self.row.id, self.start, self.end - self.start, max(0, self.num_drafts - 1))


@dataclass(slots=True)
class _Sequence:
    first: int  # tokens of the row that were left out
    num_computed: int  # of its committed tokens after these; c(r) of the KV manager
    reads_all: bool = False  # none are to be left out, however far behind it is
    written: tuple[TokenId, ...] = ()  # tokens whose KV lies past that, right or wrong


@dataclass(slots=True)
class _Room:
    """What is left for the rest of a step."""

    tokens: int
    blocks: int
    pinned: set[BlockId] = field(default_factory=set)  # idle blocks that hits of this step take
    in_flight: set[Hashable] = field(default_factory=set)  # blocks that rows of this step complete next


class DraftCache:
    """Owns the KV manager of a draft model and what is written past the committed positions; does not
    own the model.

    Rows come with every call as the target committed them. What was written for drafts is compared
    with that, the common prefix is kept and the rest rolled back; so an accepted draft is never
    computed again, and the drafter needs no word from the verifier.

    A row that is new, far behind or too long begins with its last `first_tokens` tokens alone, as if
    nothing came before them: reading a long prompt once more often costs more than its drafts save. One that
    is told to read all its tokens begins anew with the first of them.

    Args:
        num_blocks, block_size: shape of the draft model's KV pool.
        max_context: longest sequence, tokens.
        catch_up_tokens: most committed tokens computed in one step, all rows together; at least
            `VERIFIED_LAG` for each row that may come.
        first_tokens: most tokens of a row that are computed before its first draft; None: all.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        max_context: int,
        catch_up_tokens: int,
        first_tokens: int | None = None,
        enable_prefix_caching: bool = True,
    ) -> None:
        self._first_tokens = max_context if first_tokens is None else min(first_tokens, max_context)
        self._kv = KvManager(num_blocks, block_size, enable_prefix_caching=enable_prefix_caching)
        self._max_context = max_context
        self._catch_up_tokens = catch_up_tokens
        self._sequences: dict[RequestId, _Sequence] = {}

    def limit(self, id: RequestId, num_tokens: int) -> int:
        """Most drafts that context, pool and catch-up budget allow a sequence of `num_tokens` tokens now."""
        num_known, num_positions = self._extent(id, num_tokens)
        if num_positions - num_known > self._catch_up_tokens:
            return 0
        num_blocks = self._kv.num_free + self._kv.num_idle + len(self._kv.table(id))
        room = min(self._max_context, num_blocks * self._kv.block_size) - num_positions
        return max(0, room + 1)

    def num_behind(self, id: RequestId, num_tokens: int) -> int:
        """Tokens to compute before the first draft of a sequence of `num_tokens` tokens."""
        num_known, num_positions = self._extent(id, num_tokens)
        return num_positions - num_known

    def num_unread(self, id: RequestId, num_tokens: int) -> int:
        """Tokens that were left out of a sequence of `num_tokens`; 0 if there is no room for them all."""
        sequence = self._sequences.get(id)
        if sequence is None or sequence.reads_all:
            return 0
        num_blocks = self._kv.num_free + self._kv.num_idle + len(self._kv.table(id))
        room = min(self._max_context, num_blocks * self._kv.block_size)
        return sequence.first if num_tokens + self._first_tokens <= room else 0

    def _extent(self, id: RequestId, num_tokens: int) -> tuple[int, int]:
        """Positions that the cache holds of a row, right or wrong, and those that it needs in all."""
        sequence = self._sequences.get(id)
        if sequence is not None:
            num_positions = num_tokens - sequence.first
            num_known = sequence.num_computed + len(sequence.written)
            if self._can_go_on(num_known, num_positions, sequence.reads_all):
                return min(num_known, num_positions), num_positions
        return 0, self._num_entering(num_tokens)

    def _num_entering(self, num_tokens: int) -> int:
        """How many of its tokens a row begins with; one that is left with a part has room to grow."""
        if num_tokens <= self._first_tokens:
            return num_tokens
        return min(self._first_tokens, self._max_context // 2)

    def _can_go_on(self, num_known: int, num_positions: int, reads_all: bool = False) -> bool:
        """Whether what is cached of a row is worth more than beginning anew."""
        is_near = reads_all or num_positions - num_known <= self._first_tokens
        return is_near and num_positions <= self._max_context

    def begin(self, rows: Sequence[DraftRow]) -> tuple[list[DraftJob], KvGrant]:
        """Roll every row back to what was committed, and open the blocks of the next step.

        Rows in the cache come first, those with little to catch up before the others; a row that finds
        no room for all of its tokens is left out, and so is one that could share the block which
        another is about to complete. A row that wants no drafts is left alone as long as a single step
        can catch it up.
        """
        for row in rows:
            self._settle(row)
        known = [row for row in rows if row.id in self._sequences]
        known.sort(key=lambda row: self._lag(row) > VERIFIED_LAG)
        entering = [row for row in rows if row.id not in self._sequences]
        room = _Room(self._catch_up_tokens, self._kv.num_free + self._kv.num_idle)
        jobs = [job for row in (*known, *entering) if (job := self._job(row, room)) is not None]
        plan = StepPlan(
            admits=tuple(
                Admission(job.row.id, job.probe.hit_block_ids) for job in jobs if job.probe is not None
            ),
            rows=tuple(job.planned for job in jobs),
        )
        grant = self._kv.grant(plan, {job.row.id: job.row.cache_salt for job in jobs})
        for job in jobs:
            if job.probe is not None:
                self._sequences[job.row.id] = _Sequence(
                    job.first, job.start, reads_all=job.row.reads_all and job.first == 0
                )
        return jobs, grant

    def written(self, job: DraftJob, drafts: tuple[TokenId, ...]) -> None:
        """Record that the KV of the job's positions and of `drafts` after them was computed."""
        sequence = self._sequences[job.row.id]
        sequence.written = (*job.tokens[job.start : job.end], *drafts)

    def release(self, id: RequestId) -> None:
        """Forget a row; what it shares stays cached. Unknown ids are ignored."""
        if self._sequences.pop(id, None) is not None:
            self._kv.release(id)

    def check_integrity(self, live: frozenset[RequestId]) -> None:
        """Raise `InvariantViolation` if the parts contradict each other or a row is not in `live`."""
        self._kv.check_integrity()
        if self._kv.live_ids() != self._sequences.keys() or not self._sequences.keys() <= live:
            raise InvariantViolation(
                f"L4: draft sequences {sorted(self._sequences)}, draft tables {sorted(self._kv.live_ids())}, "
                f"live requests {sorted(live)}"
            )
        for id, sequence in self._sequences.items():
            num_positions = sequence.num_computed + len(sequence.written)
            if num_positions > len(self._kv.table(id)) * self._kv.block_size:
                raise InvariantViolation(f"K3: row {id!r} has {num_positions} positions in too few blocks")

    # --- inside ------------------------------------------------------------------------------------------

    def _settle(self, row: DraftRow) -> None:
        """Keep what was computed as far as it agrees with the committed tokens, but for the last of these:
        computing it gives the logits of the first draft. A row that has to begin anew is released."""
        sequence = self._sequences.get(row.id)
        if sequence is None:
            return
        tokens = row.token_ids[sequence.first :]
        known = sequence.num_computed
        agreed = _common_length(sequence.written, tokens[known : known + len(sequence.written)])
        sequence.num_computed = min(known + agreed, len(tokens) - 1)
        sequence.written = ()
        leaves_out = row.reads_all and row.max_drafts > 0 and sequence.first > 0
        if not leaves_out and self._can_go_on(sequence.num_computed, len(tokens), sequence.reads_all):
            self._kv.commit([KvCommit(row.id, tokens, sequence.num_computed)])
        else:
            self.release(row.id)

    def _lag(self, row: DraftRow) -> int:
        sequence = self._sequences[row.id]
        return len(row.token_ids) - sequence.first - sequence.num_computed

    def _entry(self, row: DraftRow) -> tuple[int, PrefixProbe]:
        """Where a row begins that enters the cache: at its first token if it is to read all or is cached but
        for a part."""
        probe = self._kv.probe(row.token_ids, row.cache_salt)
        num_known = len(probe.hit_block_ids) * self._kv.block_size
        if self._can_go_on(num_known, len(row.token_ids), row.reads_all):
            return 0, probe
        first = len(row.token_ids) - self._num_entering(len(row.token_ids))
        return first, self._kv.probe(row.token_ids[first:], row.cache_salt)

    def _job(self, row: DraftRow, room: _Room) -> DraftJob | None:
        """What the step computes of a row; takes it out of `room`."""
        sequence = self._sequences.get(row.id)
        first, probe = self._entry(row) if sequence is None else (sequence.first, None)
        tokens = row.token_ids[first:]
        num_tokens = len(tokens)
        held = self._kv.table(row.id) if probe is None else probe.hit_block_ids
        start = len(held) * self._kv.block_size if sequence is None else sequence.num_computed
        lag = num_tokens - (start if probe is None else 0)  # what `limit` takes it for
        wanted = row.max_drafts > 0 or lag > self._catch_up_tokens
        count = min(num_tokens - start, room.tokens)
        next_key = self._kv.next_block_key(row.id, tokens) if probe is None else probe.next_block_key
        if not wanted or count == 0 or (probe is not None and next_key in room.in_flight):
            return None
        newly_pinned = frozenset() if probe is None else probe.idle_block_ids - room.pinned
        num_blocks = room.blocks - len(newly_pinned) + len(held)  # it could have in all
        room_for = min(num_blocks * self._kv.block_size, self._max_context) - num_tokens
        if room_for < 0:
            if sequence is not None:
                sequence.reads_all = False  # far behind, it gives back its blocks and begins anew
            return None
        num_drafts = min(row.max_drafts, room_for + 1) if start + count == num_tokens else 0
        end = num_tokens + max(0, num_drafts - 1)
        room.blocks = num_blocks - max(len(held), ceil_div(end, self._kv.block_size))
        room.tokens -= count
        room.pinned |= newly_pinned
        if next_key is not None:
            room.in_flight.add(next_key)
        return DraftJob(row, first, tokens, start, start + count, num_drafts, probe)


def _common_length(first: Sequence[TokenId], second: Sequence[TokenId]) -> int:
    pairs = zip(first, second, strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))
