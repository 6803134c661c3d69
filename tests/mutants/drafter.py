"""Planted bugs of the model drafter and its cache. Each is one mistake that a change could plausibly make."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from mvllm.core.batch.row_sampling import RowSampling
from mvllm.core.batch.sampling_row import SamplingRow, TokenBias
from mvllm.core.spec import draft_cache
from mvllm.core.spec.draft_cache import DraftCache, DraftJob
from mvllm.core.spec.drafter import DraftRow
from mvllm.core.spec.model_drafter import ModelDrafter, ModelDrafterConfig
from mvllm.core.step import KvCommit
from mvllm.core.tensor import Model
from mvllm.core.types import RequestId, TokenId


class TrustingCache(DraftCache):
    """Takes every draft for accepted."""

    def _settle(self, row: DraftRow) -> None:
        sequence = self._sequences.get(row.id)
        if sequence is not None:
            after = row.token_ids[sequence.num_computed : sequence.num_computed + len(sequence.written)]
            sequence.written = tuple(after)
        super()._settle(row)


class ForgetfulCache(DraftCache):
    """Computes accepted drafts again."""

    def written(self, job: DraftJob, drafts: tuple[TokenId, ...]) -> None:
        super().written(job, ())


class WholeCache(DraftCache):
    """Keeps the last committed token too, and has nothing to draw the first draft from."""

    def _settle(self, row: DraftRow) -> None:
        sequence = self._sequences.get(row.id)
        super()._settle(row)
        known = self._sequences.get(row.id)
        if known is not None and sequence is not None and known.num_computed == len(row.token_ids) - 1:
            known.num_computed += 1


class HastyCache(DraftCache):
    """Seals what was written for drafts before it is known to be right (K4)."""

    def written(self, job: DraftJob, drafts: tuple[TokenId, ...]) -> None:
        super().written(job, drafts)
        tokens = (*job.row.token_ids, *drafts)
        sequence = self._sequences[job.row.id]
        sequence.num_computed += len(sequence.written)
        sequence.written = ()
        self._kv.commit([KvCommit(job.row.id, tokens, sequence.num_computed)])


class UncommittedCache(DraftCache):
    """Leaves the blocks of rejected drafts in the table (K5)."""

    def _settle(self, row: DraftRow) -> None:
        held = self._kv.table(row.id)
        super()._settle(row)
        table = self._kv._tables.get(row.id)
        if table is not None:
            table.append(self._kv._pool.open(min(len(held) - len(table.block_ids), self._kv.num_free)))


class LeakyCache(DraftCache):
    """Forgets a row, but not its blocks."""

    def release(self, id: RequestId) -> None:
        self._sequences.pop(id, None)


class SaltlessCache(DraftCache):
    """Lets tenants share prefixes."""

    def begin(self, rows):  # type: ignore[no-untyped-def]
        return super().begin([replace(row, cache_salt="") for row in rows])


class GreedyCache(DraftCache):
    """Catches up with everything at once."""

    def _job(self, row: DraftRow, room: draft_cache._Room) -> DraftJob | None:
        room.tokens = 1 << 30
        return super()._job(row, room)


class UnpinnedCache(DraftCache):
    """Counts idle blocks of a hit as free for others."""

    def _job(self, row: DraftRow, room: draft_cache._Room) -> DraftJob | None:
        job = super()._job(row, room)
        if job is not None and job.probe is not None:
            room.blocks += len(job.probe.idle_block_ids)
        return job


class EndlessCache(DraftCache):
    """Goes on beyond the draft model's context."""

    def begin(self, rows):  # type: ignore[no-untyped-def]
        self._max_context += 1 << 20
        try:
            return super().begin(rows)
        finally:
            self._max_context -= 1 << 20


class DeafCache(DraftCache):
    """Counts a position more than was computed."""

    def written(self, job: DraftJob, drafts: tuple[TokenId, ...]) -> None:
        super().written(job, (*drafts, 0))


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
                enable_prefix_caching=config.enable_prefix_caching,
            )

    return AssembledDrafter


class UnseededDrafter(ModelDrafter):
    """Draws with noise of its own."""

    def _own_sampling(self, target: SamplingRow) -> SamplingRow:
        return replace(super()._own_sampling(target), seed=target.seed + 1)


class UnfilteredDrafter(ModelDrafter):
    """Ignores the target's penalties."""

    def _row_sampling(self, row: DraftRow) -> RowSampling:
        return replace(super()._row_sampling(row), counts=None)


class UnmaskedDrafter(ModelDrafter):
    """Drafts its own padding."""

    def _own_bias(self, bias: TokenBias) -> TokenBias:
        return TokenBias.of(
            {
                token: value
                for token, value in zip(bias.tokens, bias.values, strict=True)
                if token < self._config.vocab_size
            }
        )


class EndlessDrafter(ModelDrafter):
    """Drafts after the end of the text."""

    def _goes_on(self, job: DraftJob, drafts: tuple[TokenId, ...]) -> bool:
        return len(drafts) < job.num_drafts


class ParrotDrafter(ModelDrafter):
    """Passes a token to its model that it has no embedding for."""

    def _knows_tokens(self, row: DraftRow) -> bool:
        return True


class FragileDrafter(ModelDrafter):
    """Keeps the rows of a failed step."""

    def propose(self, rows: Sequence[DraftRow]) -> list[tuple[TokenId, ...]]:
        release: Callable[[RequestId], None] = self.release
        try:
            self.release = lambda id: None  # type: ignore[method-assign]
            return super().propose(rows)
        finally:
            self.release = release  # type: ignore[method-assign]


class StubbornDrafter(ModelDrafter):
    """Gives more drafts than were wanted."""

    def propose(self, rows: Sequence[DraftRow]) -> list[tuple[TokenId, ...]]:
        return super().propose(
            [replace(row, max_drafts=row.max_drafts and row.max_drafts + 1) for row in rows]
        )


class ShortDrafter(ModelDrafter):
    """Gives fewer drafts than it could."""

    def _goes_on(self, job: DraftJob, drafts: tuple[TokenId, ...]) -> bool:
        return super()._goes_on(job, drafts) and len(drafts) < 2


MUTANTS: dict[str, type[ModelDrafter]] = {
    "every draft taken for accepted": with_cache(TrustingCache),
    "accepted drafts computed again": with_cache(ForgetfulCache),
    "last committed token kept": with_cache(WholeCache),
    "drafts sealed": with_cache(HastyCache),
    "blocks of rejected drafts kept": with_cache(UncommittedCache),
    "released rows keep their blocks": with_cache(LeakyCache),
    "salt ignored": with_cache(SaltlessCache),
    "budget ignored": with_cache(GreedyCache),
    "pinned blocks counted as free": with_cache(UnpinnedCache),
    "context ignored": with_cache(EndlessCache),
    "a draft counted that was not computed": with_cache(DeafCache),
    "another seed": UnseededDrafter,
    "penalties ignored": UnfilteredDrafter,
    "padding drafted": UnmaskedDrafter,
    "drafts after the end": EndlessDrafter,
    "unknown token computed": ParrotDrafter,
    "failed step leaves rows": FragileDrafter,
    "more drafts than wanted": StubbornDrafter,
    "fewer drafts than possible": ShortDrafter,
}
