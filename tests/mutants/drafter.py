"""Planted bugs of the model drafter and its cache. Each is one mistake that a change could plausibly make."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mvllm.core.batch.batcher import BatchRow
from mvllm.core.batch.row_sampling import RowSampling
from mvllm.core.batch.sampling_row import SamplingRow, TokenBias
from mvllm.core.spec import draft_cache
from mvllm.core.spec.draft_cache import DraftCache, DraftJob
from mvllm.core.spec.drafter import DraftRow
from mvllm.core.spec.model_drafter import DrawnToken, ModelDrafter, ModelDrafterConfig
from mvllm.core.step import NO_VOCAB_LIMIT, KvCommit, KvGrant, PrefixProbe
from mvllm.core.tensor import Model
from mvllm.core.types import RequestId, TokenId

# --- what is kept of drafts (K1, K5) -------------------------------------------------------------------


class TrustingCache(DraftCache):
    """Takes every draft for accepted, and reads the KV of rejected ones."""

    def _settle(self, row: DraftRow) -> None:
        sequence = self._sequences.get(row.id)
        if sequence is not None:
            start = sequence.first + sequence.num_computed
            sequence.written = tuple(row.token_ids[start : start + len(sequence.written)])
        super()._settle(row)


class OneTooManyCache(DraftCache):
    """Keeps the first rejected draft."""

    def _settle(self, row: DraftRow) -> None:
        sequence = self._sequences.get(row.id)
        if sequence is not None:
            start = sequence.first + sequence.num_computed
            committed = row.token_ids[start : start + len(sequence.written)]
            agreed = draft_cache._common_length(sequence.written, committed)
            sequence.written = tuple(committed[: agreed + 1])
        super()._settle(row)


class ForgetfulCache(DraftCache):
    """Computes accepted drafts again."""

    def written(self, job: DraftJob, drafts: tuple[TokenId, ...]) -> None:
        super().written(job, ())


class RepeatingCache(DraftCache):
    """Computes a position again with which it had caught up."""

    def written(self, job: DraftJob, drafts: tuple[TokenId, ...]) -> None:
        super().written(job, drafts)
        sequence = self._sequences[job.row.id]
        sequence.written = sequence.written[: len(sequence.written) - 1]


class WholeCache(DraftCache):
    """Keeps the last committed token too, and has nothing to draw the first draft from."""

    def _settle(self, row: DraftRow) -> None:
        super()._settle(row)
        sequence = self._sequences.get(row.id)
        if sequence is not None and self._lag(row) == 1:
            sequence.num_computed += 1


class OvercountingCache(DraftCache):
    """Counts a position more than was computed."""

    def written(self, job: DraftJob, drafts: tuple[TokenId, ...]) -> None:
        super().written(job, (*drafts, 0))


class HastyCache(DraftCache):
    """Seals what was written for drafts before it is known to be right (K4)."""

    def written(self, job: DraftJob, drafts: tuple[TokenId, ...]) -> None:
        super().written(job, drafts)
        sequence = self._sequences[job.row.id]
        sequence.num_computed += len(sequence.written)
        sequence.written = ()
        self._kv.commit([KvCommit(job.row.id, (*job.tokens, *drafts), sequence.num_computed)])


class PublishingCache(DraftCache):
    """Lets others share the block that drafts have filled, under the tokens that they had (K4)."""

    def written(self, job: DraftJob, drafts: tuple[TokenId, ...]) -> None:
        super().written(job, drafts)
        kv = self._kv
        table = kv._tables[job.row.id]
        index = table.num_computed // kv.block_size
        tokens = (*job.tokens, *drafts)
        parent_indexed = index == 0 or table.block_ids[index - 1] in kv._trie
        if (
            drafts
            and parent_indexed
            and kv.enable_prefix_caching
            and len(tokens) >= (index + 1) * kv.block_size
        ):
            kv._trie.insert(kv._key(table, index, tokens), table.block_ids[index])

    def check_integrity(self, live: frozenset[RequestId]) -> None:
        """Finds it at once; here it is left to those that see the content."""


class HoardingCache(DraftCache):
    """Leaves the blocks of rejected drafts in the table (K5)."""

    def _settle(self, row: DraftRow) -> None:
        held = self._kv.table(row.id)
        super()._settle(row)
        table = self._kv._tables.get(row.id)
        if table is not None:
            table.append(self._kv._pool.open(min(len(held) - len(table.block_ids), self._kv.num_free)))


class UntruncatedCache(DraftCache):
    """Forgets the blocks of rejected drafts, but does not give them back."""

    def _settle(self, row: DraftRow) -> None:
        pool = self._kv._pool
        pool.discard = lambda block_ids: None  # type: ignore[method-assign]
        try:
            super()._settle(row)
        finally:
            del pool.discard


# --- who is in the cache (L3, L4, T11) -----------------------------------------------------------------


class LeakyCache(DraftCache):
    """Forgets a row, but not its blocks."""

    def release(self, id: RequestId) -> None:
        self._sequences.pop(id, None)


class KeepingCache(DraftCache):
    """Keeps rows that have gone."""

    def release(self, id: RequestId) -> None:
        pass


class SaltlessCache(DraftCache):
    """Lets tenants share prefixes."""

    def begin(self, rows: Sequence[DraftRow]) -> tuple[list[DraftJob], KvGrant]:
        return super().begin([replace(row, cache_salt="") for row in rows])


# --- how much there is room for ------------------------------------------------------------------------


class ThirstyCache(DraftCache):
    """Catches up with everything at once."""

    def _job(self, row: DraftRow, room: draft_cache._Room) -> DraftJob | None:
        room.tokens = 1 << 30
        return super()._job(row, room)


class OverfullCache(DraftCache):
    """Does not see that the pool is full."""

    def _job(self, row: DraftRow, room: draft_cache._Room) -> DraftJob | None:
        room.blocks = 1 << 30
        return super()._job(row, room)


class PreemptingCache(DraftCache):
    """Puts a row out of a full pool for another one."""

    def begin(self, rows: Sequence[DraftRow]) -> tuple[list[DraftJob], KvGrant]:
        entering = [row for row in rows if row.id not in self._sequences]
        if entering and self._sequences and self._kv.num_free + self._kv.num_idle == 0:
            self.release(next(iter(self._sequences)))
        return super().begin(rows)


class UnpinnedCache(DraftCache):
    """Counts idle blocks of a hit as free for others."""

    def _job(self, row: DraftRow, room: draft_cache._Room) -> DraftJob | None:
        job = super()._job(row, room)
        if job is not None and job.probe is not None:
            room.blocks += len(job.probe.idle_block_ids)
        return job


class EndlessCache(DraftCache):
    """Goes on beyond the draft model's context."""

    def begin(self, rows: Sequence[DraftRow]) -> tuple[list[DraftJob], KvGrant]:
        self._max_context += 1 << 20
        try:
            return super().begin(rows)
        finally:
            self._max_context -= 1 << 20


# --- where a row starts (first_tokens) -----------------------------------------------------------------


class LateCache(DraftCache):
    """Begins a long text one token too late."""

    def _num_entering(self, num_tokens: int) -> int:
        num_entering = super()._num_entering(num_tokens)
        return num_entering - (num_entering < num_tokens)


class FilledCache(DraftCache):
    """Reads as much of a long text as the context can take."""

    def _num_entering(self, num_tokens: int) -> int:
        return min(num_tokens, self._max_context)


class WholeTextCache(DraftCache):
    """Reads a long text from its first token on."""

    def _entry(self, row: DraftRow) -> tuple[int, PrefixProbe]:
        return 0, self._kv.probe(row.token_ids, row.cache_salt)


class MisplacedCache(DraftCache):
    """Compares what it has written with the tokens from the first one on, not from where the row begins."""

    def _settle(self, row: DraftRow) -> None:
        sequence = self._sequences.get(row.id)
        if sequence is not None:
            start = sequence.num_computed
            agreed = draft_cache._common_length(sequence.written, row.token_ids[start:])
            sequence.written = sequence.written[:agreed]
        super()._settle(row)


class UnendingCache(DraftCache):
    """Keeps what it has of a row that has fallen far behind, and reads everything since."""

    def _can_go_on(self, num_known: int, num_positions: int, reads_all: bool = False) -> bool:
        return num_positions <= self._max_context


class ImpatientCache(DraftCache):
    """Draws drafts before the row is caught up with."""

    def _job(self, row: DraftRow, room: draft_cache._Room) -> DraftJob | None:
        job = super()._job(row, room)
        return job and replace(job, num_drafts=min(row.max_drafts, max(1, job.num_drafts)))


def with_cache(cache: type[DraftCache]) -> type[ModelDrafter]:
    """A drafter made with another cache."""

    class AssembledDrafter(ModelDrafter):
        def __init__(self, model: Model, config: ModelDrafterConfig) -> None:
            super().__init__(model, config)
            self._cache = cache(
                config.num_kv_blocks,
                config.block_size,
                max_context=config.max_model_len,
                catch_up_tokens=config.catch_up_tokens,
                first_tokens=config.first_tokens,
                enable_prefix_caching=config.enable_prefix_caching,
            )

    return AssembledDrafter


# --- what is drawn (V1, V4) ----------------------------------------------------------------------------


class LastDraftCountedDrafter(ModelDrafter):
    """Believes that the cache has the KV of the last draft, which was only drawn."""

    def _draft(self, jobs: Sequence[DraftJob], grant: KvGrant) -> dict[RequestId, tuple[TokenId, ...]]:
        drafts = super()._draft(jobs, grant)
        for job in jobs:
            self._cache.written(job, drafts[job.row.id])
        return drafts


class UncountedBeginningDrafter(ModelDrafter):
    """Draws as if the tokens that were left out did not exist: with the noise of other positions."""

    def _batch_row(
        self, job: DraftJob, drafts: tuple[TokenId, ...], start: int, end: int, grant: KvGrant
    ) -> BatchRow:
        return super()._batch_row(job, drafts, start, end, grant)._replace(first=0)


class ShiftedDrafter(ModelDrafter):
    """Catches up with the tokens that were left out instead of those after them."""

    def _batch_row(
        self, job: DraftJob, drafts: tuple[TokenId, ...], start: int, end: int, grant: KvGrant
    ) -> BatchRow:
        tokens = job.tokens if drafts else job.row.token_ids
        return super()._batch_row(replace(job, tokens=tokens), drafts, start, end, grant)


class UnseededDrafter(ModelDrafter):
    """Draws with noise of its own."""

    def _own_sampling(self, target: SamplingRow) -> SamplingRow:
        return replace(super()._own_sampling(target), seed=target.seed + 1)


class UnpenalizedDrafter(ModelDrafter):
    """Ignores the target's penalties."""

    def _row_sampling(self, row: DraftRow, wants_probability: bool) -> RowSampling:
        return replace(super()._row_sampling(row, wants_probability), counts=None)


class UnlimitedDrafter(ModelDrafter):
    """Draws drafts after the first from the whole vocabulary."""

    def _next_pass(
        self,
        jobs: Sequence[DraftJob],
        drafts: dict[RequestId, tuple[TokenId, ...]],
        grant: KvGrant,
        vocab_limit: int,
    ) -> list[DrawnToken | None]:
        return super()._next_pass(jobs, drafts, grant, NO_VOCAB_LIMIT)


class UnmaskedDrafter(ModelDrafter):
    """Drafts its own padding."""

    def _own_bias(self, bias: TokenBias) -> TokenBias:
        pairs = zip(bias.tokens, bias.values, strict=True)
        return TokenBias.of({token: value for token, value in pairs if token < self._config.vocab_size})


class EndlessDrafter(ModelDrafter):
    """Drafts after the end of the text."""

    def _goes_on(self, job: DraftJob, drafts: tuple[TokenId, ...], confidence: float) -> bool:
        return len(drafts) < job.num_drafts


class ParrotDrafter(ModelDrafter):
    """Passes a token to its model that it has no embedding for."""

    def _knows_tokens(self, row: DraftRow) -> bool:
        return True


class StubbornDrafter(ModelDrafter):
    """Gives more drafts than were wanted."""

    def propose(self, rows: Sequence[DraftRow]) -> list[tuple[TokenId, ...]]:
        return super().propose(
            [replace(row, max_drafts=row.max_drafts and row.max_drafts + 1) for row in rows]
        )


class ShortDrafter(ModelDrafter):
    """Gives fewer drafts than it could."""

    def _goes_on(self, job: DraftJob, drafts: tuple[TokenId, ...], confidence: float) -> bool:
        return super()._goes_on(job, drafts, confidence) and len(drafts) < 2


class BoldDrafter(ModelDrafter):
    """Goes on however unsure it is."""

    def _goes_on(self, job: DraftJob, drafts: tuple[TokenId, ...], confidence: float) -> bool:
        return super()._goes_on(job, drafts, 1.0)


class TimidDrafter(ModelDrafter):
    """Stops though it is sure enough."""

    def _goes_on(self, job: DraftJob, drafts: tuple[TokenId, ...], confidence: float) -> bool:
        return super()._goes_on(job, drafts, confidence / 2)


# --- how a row leaves ----------------------------------------------------------------------------------


class FragileDrafter(ModelDrafter):
    """Keeps the rows of a failed step."""

    def propose(self, rows: Sequence[DraftRow]) -> list[tuple[TokenId, ...]]:
        self._release = lambda id: None
        try:
            return super().propose(rows)
        finally:
            self._release = super().release

    def release(self, id: RequestId) -> None:
        getattr(self, "_release", super().release)(id)


class KeepingDrafter(ModelDrafter):
    """Keeps the sampling parameters of rows that have gone."""

    def release(self, id: RequestId) -> None:
        self._cache.release(id)


MUTANTS: dict[str, type[ModelDrafter]] = {
    "every draft taken for accepted": with_cache(TrustingCache),
    "first rejected draft kept": with_cache(OneTooManyCache),
    "accepted drafts computed again": with_cache(ForgetfulCache),
    "last position computed again": with_cache(RepeatingCache),
    "last committed token kept": with_cache(WholeCache),
    "a position counted that was not computed": with_cache(OvercountingCache),
    "last draft counted as computed": LastDraftCountedDrafter,
    "drafts sealed": with_cache(HastyCache),
    "drafts published": with_cache(PublishingCache),
    "blocks of rejected drafts kept": with_cache(HoardingCache),
    "blocks of rejected drafts lost": with_cache(UntruncatedCache),
    "released rows keep their blocks": with_cache(LeakyCache),
    "released rows stay": with_cache(KeepingCache),
    "released rows keep their parameters": KeepingDrafter,
    "salt ignored": with_cache(SaltlessCache),
    "budget ignored": with_cache(ThirstyCache),
    "full pool not seen": with_cache(OverfullCache),
    "rows put out of a full pool": with_cache(PreemptingCache),
    "pinned blocks counted as free": with_cache(UnpinnedCache),
    "context ignored": with_cache(EndlessCache),
    "begins one token late": with_cache(LateCache),
    "begins with a whole context": with_cache(FilledCache),
    "begins with the first token": with_cache(WholeTextCache),
    "beginning forgotten in comparing": with_cache(MisplacedCache),
    "never begins anew": with_cache(UnendingCache),
    "drafts before it has caught up": with_cache(ImpatientCache),
    "left-out tokens not counted": UncountedBeginningDrafter,
    "left-out tokens read": ShiftedDrafter,
    "another seed": UnseededDrafter,
    "penalties ignored": UnpenalizedDrafter,
    "vocabulary limit ignored": UnlimitedDrafter,
    "padding drafted": UnmaskedDrafter,
    "drafts after the end": EndlessDrafter,
    "unknown token computed": ParrotDrafter,
    "failed step leaves rows": FragileDrafter,
    "more drafts than wanted": StubbornDrafter,
    "fewer drafts than possible": ShortDrafter,
    "goes on however unsure": BoldDrafter,
    "stops though sure": TimidDrafter,
}
