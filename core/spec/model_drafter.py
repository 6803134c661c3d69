"""A drafter that is a language model itself, as a rule a small one of the target's family."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from mvllm.core.batch.batcher import Batcher, BatchRow
from mvllm.core.batch.row_sampling import RowSampling
from mvllm.core.batch.sampling_row import SamplingRow, TokenBias
from mvllm.core.errors import ConfigError, InvariantViolation
from mvllm.core.spec.draft_cache import VERIFIED_LAG, DraftCache, DraftJob
from mvllm.core.spec.drafter import Drafter, DraftRow
from mvllm.core.spec.vocab_limit import VocabLimits
from mvllm.core.step import KvGrant, RowStatus
from mvllm.core.tensor import KvGeometry, Model
from mvllm.core.types import BlockId, RequestId, TokenId

DEFAULT_CATCH_UP_TOKENS = 256
DEFAULT_FIRST_TOKENS = 64


def catch_up_tokens_for(max_num_seqs: int) -> int:
    """The default budget, or what so many rows need at least."""
    return max(DEFAULT_CATCH_UP_TOKENS, VERIFIED_LAG * max_num_seqs)


@dataclass(frozen=True)
class ModelDrafterConfig:
    """Limits of a model drafter.

    Raises:
        ConfigError: a catch-up budget that could not serve every row after a verification.
    """

    num_kv_blocks: int
    block_size: int  # tokens per block
    max_model_len: int  # longest sequence it follows, tokens
    max_num_seqs: int  # rows that may want drafts in one step
    vocab_size: int  # of the draft model
    masked_token_ids: tuple[TokenId, ...] = ()  # never drafted; ascending
    end_token_ids: frozenset[TokenId] = frozenset()  # nothing is drafted after one of them
    catch_up_tokens: int = DEFAULT_CATCH_UP_TOKENS  # most committed tokens computed per step, of all rows
    first_tokens: int | None = DEFAULT_FIRST_TOKENS
    """Context that a row begins with: its last tokens before the first draft; None: all of them."""
    enable_prefix_caching: bool = True
    head_share: float = 0.0
    """The head's part of a pass, of which `vocab_limit` saves some; 0: every id may be drafted."""

    def __post_init__(self) -> None:
        least = VERIFIED_LAG * self.max_num_seqs
        if self.catch_up_tokens < least:
            raise ConfigError(
                f"catch_up_tokens is {self.catch_up_tokens}; {self.max_num_seqs} rows need {least} at least"
            )
        if self.first_tokens is not None and self.first_tokens < VERIFIED_LAG:
            raise ConfigError(f"first_tokens is {self.first_tokens}; it must be {VERIFIED_LAG} at least")

    def geometry(self, kv_dtype: str) -> KvGeometry:
        """The pool and batches that the draft model must be loaded for."""
        return KvGeometry(
            num_blocks=self.num_kv_blocks,
            block_size=self.block_size,
            max_context=self.max_model_len,
            max_batch_tokens=self.catch_up_tokens,
            max_batch_rows=self.max_num_seqs,
            max_logit_rows=self.max_num_seqs,
            dtype=kv_dtype,
        )


@dataclass(frozen=True, slots=True)
class DrawnToken:
    """One token that the draft model has drawn."""

    id: TokenId
    probability: float  # that the draft model gives it; 1 where nobody asked


class ModelDrafter(Drafter):
    """Drafts all rows together, one forward pass per draft position.

    Owns the draft model and its KV cache. Draws with the target's sampling parameters and noise, so that
    where the two models agree on a token's probability they draw the same token (INVARIANTS 6).

    The first pass of a step also computes the committed tokens that the cache lacks: the end of a prompt, in
    parts of at most `catch_up_tokens`, or one or two tokens after a verification. A full pool or a token
    that the draft model does not know mean no drafts for that row; nobody is ever preempted for drafts.

    Its opinion of its drafts is the probability that it gives them itself, at temperature 1 and without
    penalties or bias.

    Args:
        model: loaded with `config.geometry(...)`; closed with the drafter.
    """

    name = "model"
    heeds_confidence = True

    def __init__(self, model: Model, config: ModelDrafterConfig) -> None:
        self._model = model
        self._config = config
        self._batcher = Batcher(config.block_size)
        self._cache = DraftCache(
            config.num_kv_blocks,
            config.block_size,
            max_context=config.max_model_len,
            catch_up_tokens=config.catch_up_tokens,
            first_tokens=config.first_tokens,
            enable_prefix_caching=config.enable_prefix_caching,
        )
        self._vocab_limits = VocabLimits(config.vocab_size, config.head_share)
        # Without and with the probability of what is drawn.
        self._sampling: dict[RequestId, tuple[SamplingRow, SamplingRow]] = {}
        self._num_checked: dict[RequestId, int] = {}  # tokens known to be in the draft model's vocabulary
        self._foreign: set[RequestId] = set()  # rows with a token outside of it

    def limit(self, id: RequestId, num_tokens: int) -> int:
        return 0 if id in self._foreign else self._cache.limit(id, num_tokens)

    def num_behind(self, id: RequestId, num_tokens: int) -> int:
        return self._cache.num_behind(id, num_tokens)

    def num_unread(self, id: RequestId, num_tokens: int) -> int:
        return self._cache.num_unread(id, num_tokens)

    def propose(self, rows: Sequence[DraftRow]) -> list[tuple[TokenId, ...]]:
        """
        Raises:
            Exception: whatever the draft model's step raises; the rows are released.
        """
        try:
            jobs, grant = self._cache.begin([row for row in rows if self._knows_tokens(row)])
            drafts = self._draft(jobs, grant) if jobs else {}
        except BaseException:  # an interrupt too must not leave half a step behind
            for row in rows:
                self.release(row.id)
            raise
        return [drafts.get(row.id, ()) for row in rows]

    def release(self, id: RequestId) -> None:
        self._cache.release(id)
        self._vocab_limits.release(id)
        self._sampling.pop(id, None)
        self._num_checked.pop(id, None)
        self._foreign.discard(id)

    def check_integrity(self, live: frozenset[RequestId]) -> None:
        self._cache.check_integrity(live)
        known = self._sampling.keys() | self._num_checked.keys() | self._foreign | self._vocab_limits.rows
        if not known <= live:
            raise InvariantViolation(f"L4: the drafter knows rows {sorted(known - live)}, which are not live")

    def close(self) -> None:
        self._model.close()

    # --- the passes --------------------------------------------------------------------------------------

    def _draft(self, jobs: Sequence[DraftJob], grant: KvGrant) -> dict[RequestId, tuple[TokenId, ...]]:
        """Run the jobs; returns the drafts of those that have any."""
        drafts: dict[RequestId, tuple[TokenId, ...]] = {job.row.id: () for job in jobs}
        confidence = dict.fromkeys(drafts, 1.0)  # that all of a row's drafts are right
        written = dict(drafts)
        drawing = [job for job in jobs if job.num_drafts]
        vocab_limit = self._vocab_limits.of((job.row.id, job.row.token_ids) for job in drawing)
        drawn = self._first_pass(jobs, grant, vocab_limit)
        while drawing:
            going_on = []
            for job, draft in zip(drawing, drawn, strict=True):
                if draft is None:
                    continue
                drafts[job.row.id] += (draft.id,)
                confidence[job.row.id] *= draft.probability
                if self._goes_on(job, drafts[job.row.id], confidence[job.row.id]):
                    going_on.append(job)
            drawing = going_on
            if drawing:
                drawn = self._next_pass(drawing, drafts, grant, vocab_limit)
                written |= {job.row.id: drafts[job.row.id] for job in drawing}
        for job in jobs:
            self._cache.written(job, written[job.row.id])
        return drafts

    def _goes_on(self, job: DraftJob, drafts: tuple[TokenId, ...], confidence: float) -> bool:
        if len(drafts) >= job.num_drafts or drafts[-1] in self._config.end_token_ids:
            return False
        return confidence >= job.row.least_confidence

    def _first_pass(
        self, jobs: Sequence[DraftJob], grant: KvGrant, vocab_limit: int
    ) -> list[DrawnToken | None]:
        return self._step([self._batch_row(job, (), job.start, job.end, grant) for job in jobs], vocab_limit)

    def _next_pass(
        self,
        jobs: Sequence[DraftJob],
        drafts: dict[RequestId, tuple[TokenId, ...]],
        grant: KvGrant,
        vocab_limit: int,
    ) -> list[DrawnToken | None]:
        rows = []
        for job in jobs:
            so_far = drafts[job.row.id]
            end = job.end + len(so_far)
            rows.append(self._batch_row(job, so_far, end - 1, end, grant))
        return self._step(rows, vocab_limit)

    def _batch_row(
        self, job: DraftJob, drafts: tuple[TokenId, ...], start: int, end: int, grant: KvGrant
    ) -> BatchRow:
        table: tuple[BlockId, ...] = grant.tables[job.row.id]
        # Of the last draft nobody asks how likely it is.
        wants_probability = job.row.least_confidence > 0.0 and len(drafts) + 1 < job.num_drafts
        sampling = self._row_sampling(job.row, wants_probability) if job.num_drafts else None
        num_logit_rows = 1 if job.num_drafts else 0
        return BatchRow(
            job.row.id, table, job.tokens, drafts, start, end, sampling, num_logit_rows, job.first
        )

    def _step(self, rows: Sequence[BatchRow], vocab_limit: int) -> list[DrawnToken | None]:
        """A draft for each row with a logit row; None where its logits are unusable."""
        output = self._model.step(self._batcher.pack(rows, vocab_limit))
        columns = output.tokens.tolist(), output.logprob.tolist(), output.status.tolist()
        return [
            DrawnToken(token, math.exp(logprob)) if status == RowStatus.OK else None
            for token, logprob, status in zip(*columns, strict=True)
        ]

    # --- what the draft model can't take as the target does ----------------------------------------------

    def _knows_tokens(self, row: DraftRow) -> bool:
        """Whether the draft model has an embedding for each token of the row; looks at each only once."""
        if row.id in self._foreign:
            return False
        num_checked = self._num_checked.get(row.id, 0)
        if max(row.token_ids[num_checked:], default=0) >= self._config.vocab_size:
            self.release(row.id)
            self._foreign.add(row.id)
            return False
        self._num_checked[row.id] = len(row.token_ids)
        return True

    def _row_sampling(self, row: DraftRow, wants_probability: bool) -> RowSampling:
        known = self._sampling.get(row.id)
        if known is None:
            own = self._own_sampling(row.sampling.row)
            known = self._sampling[row.id] = own, replace(own, num_logprobs=0)
        plain, with_probability = known
        return replace(row.sampling, row=with_probability if wants_probability else plain)

    def _own_sampling(self, target: SamplingRow) -> SamplingRow:
        """The target's parameters without what only it can use: ids that the draft model lacks, logprobs."""
        return replace(
            target,
            num_logprobs=-1,
            bias=self._own_bias(target.bias),
            early_bias=self._own_bias(target.early_bias),
        )

    def _own_bias(self, bias: TokenBias) -> TokenBias:
        vocab_size = self._config.vocab_size
        pairs = zip(bias.tokens, bias.values, strict=True)
        by_token = {token: value for token, value in pairs if token < vocab_size}
        return TokenBias.of(by_token | dict.fromkeys(self._config.masked_token_ids, -math.inf))
