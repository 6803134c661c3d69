"""The immutable objects of one engine step, in the order in which they come to be.

    SchedulerView -> StepPlan -> KvGrant -> ForwardBatch -> StepOutput -> RowDecision... -> events

Everything here is frozen and complete at construction. There is no prefill flag: a row is "let
`num_computed` catch up", so a prompt chunk, a decode and a verification are the same arithmetic.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from mvllm.core.request import FinishReason, Phase, TokenLogprobs
from mvllm.core.types import BlockId, RequestId, TokenId

# --- what the scheduler sees -------------------------------------------------------------------------


@dataclass(frozen=True)
class PrefixProbe:
    """Longest indexed prefix of a token sequence at this moment."""

    hit_block_ids: tuple[BlockId, ...] = ()
    idle_block_ids: frozenset[BlockId] = frozenset()  # those of the hit that nobody reads now
    next_block_key: Hashable | None = None  # names the first full block past the hit; None if there is none


@dataclass(frozen=True)
class RowView:
    """One live request as the scheduler sees it."""

    id: RequestId
    phase: Phase  # WAITING or RUNNING
    num_tokens: int  # n(r): prompt and output so far
    num_computed: int  # c(r): positions whose KV is in the cache; for a waiting row 0
    total_limit: int  # most tokens it can ever have
    block_ids: tuple[BlockId, ...] = ()  # its block table; empty while waiting
    probe: PrefixProbe = PrefixProbe()  # a waiting row's cached prefix
    next_block_key: Hashable | None = None  # a running row: the full block it is about to complete
    max_drafts: int = 0  # most draft tokens wanted after the last committed one


@dataclass(frozen=True)
class SchedulerView:
    """Frozen snapshot that a plan is made from. Rows are ordered by age, oldest first."""

    rows: tuple[RowView, ...]
    num_free: int  # FREE blocks
    num_idle: int  # IDLE blocks: indexed, without readers, evictable


# --- what the scheduler decides ----------------------------------------------------------------------


@dataclass(frozen=True)
class Admission:
    """A waiting row starts, on top of an already cached prefix."""

    id: RequestId
    hit_block_ids: tuple[BlockId, ...] = ()


@dataclass(frozen=True)
class PlannedRow:
    """Compute positions `[start, start + count)` and, after them, at most `max_drafts` draft positions."""

    id: RequestId
    start: int
    count: int
    max_drafts: int = 0

    @property
    def end(self) -> int:
        return self.start + self.count


@dataclass(frozen=True)
class StepPlan:
    """Applied in this order: preempt, admit, then compute the rows."""

    preempts: tuple[RequestId, ...] = ()
    admits: tuple[Admission, ...] = ()
    rows: tuple[PlannedRow, ...] = ()


@dataclass(frozen=True)
class KvGrant:
    """Block tables that cover every position of the plan; `fresh` lists the blocks opened for it."""

    tables: dict[RequestId, tuple[BlockId, ...]]
    fresh: dict[RequestId, tuple[BlockId, ...]]


@dataclass(frozen=True)
class KvCommit:
    """What a row's cache holds after the forward: KV of `token_ids[:num_computed]`, all of it final."""

    id: RequestId
    token_ids: Sequence[TokenId]  # the row's committed tokens, at least num_computed of them; only read
    num_computed: int  # c(r) after the step; rejected drafts lie beyond it


# --- what crosses into the backend -------------------------------------------------------------------


@dataclass(frozen=True)
class SamplingArrays:
    """How to sample each logit row; S rows. Ragged lists are (offsets[S + 1], values)."""

    temperature: NDArray[np.float32]  # [S]
    top_k: NDArray[np.int32]  # [S], <= 0: all
    top_p: NDArray[np.float32]  # [S]
    min_p: NDArray[np.float32]  # [S]
    repetition_penalty: NDArray[np.float32]  # [S]
    presence_penalty: NDArray[np.float32]  # [S]
    frequency_penalty: NDArray[np.float32]  # [S]
    seed: NDArray[np.uint64]  # [S]
    position: NDArray[np.int32]  # [S] position that the drawn token will take in its sequence
    num_logprobs: NDArray[np.int32]  # [S] -1: none; 0: chosen and target only; k: also the k most likely
    target: NDArray[np.int32]  # [S] a token whose logprob is wanted too; -1: none
    count_offsets: NDArray[np.int32]  # [S + 1] into the three arrays below; empty for rows without penalties
    count_tokens: NDArray[np.int32]  # [C] distinct tokens seen by the row, ascending
    prompt_counts: NDArray[np.int32]  # [C]
    output_counts: NDArray[np.int32]  # [C] earlier drafts of the row included
    bias_offsets: NDArray[np.int32]  # [S + 1] into the two arrays below
    bias_tokens: NDArray[np.int32]  # [B] ascending within a row
    bias_values: NDArray[np.float32]  # [B] -inf bans the token


NO_VOCAB_LIMIT = 1 << 31
"""More than any vocabulary has."""


@dataclass(frozen=True)
class ForwardBatch:
    """One forward pass. T tokens in R rows; row r is tokens[row_starts[r]:row_starts[r + 1]].

    Arrays are only read: those that stay the same are shared by the batches of several steps.
    """

    tokens: NDArray[np.int32]  # [T]
    positions: NDArray[np.int32]  # [T]
    slots: NDArray[np.int32]  # [T] block_id * block_size + offset, where the token's KV goes
    row_starts: NDArray[np.int32]  # [R + 1]
    context_lens: NDArray[np.int32]  # [R] positions the row's last token attends to, itself included
    block_tables: NDArray[np.int32]  # [R, M] padded with -1
    logit_rows: NDArray[np.int32]  # [S] indices into tokens, ascending
    sampling: SamplingArrays
    vocab_limit: int = NO_VOCAB_LIMIT
    """At least 1: logits of ids from it on are -inf and need not be computed. Rows of such a batch may be
    refused log-probabilities, but for that of the chosen token."""

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_rows(self) -> int:
        return len(self.context_lens)


class RowStatus(IntEnum):
    """What came of sampling a logit row."""

    OK = 0
    NAN = 1  # a logit is NaN
    INFINITE = 2  # a logit is +inf
    EMPTY = 3  # every logit is -inf


@dataclass(frozen=True)
class StepOutput:
    """What the backend answers; only read. K is the largest `num_logprobs` in the batch (0 if none)."""

    tokens: NDArray[np.int32]  # [S]
    status: NDArray[np.int32]  # [S] RowStatus; tokens are meaningless where it is not OK
    logprob: NDArray[np.float32]  # [S] of the chosen token; 0 where not asked
    rank: NDArray[np.int32]  # [S] of the chosen token, 1 = most likely; 0 where not asked
    target_logprob: NDArray[np.float32]  # [S]
    top_tokens: NDArray[np.int32]  # [S, K] descending by logprob, ties by id; -1 beyond a row's own k
    top_logprobs: NDArray[np.float32]  # [S, K]


# --- what is decided from it, and what the world is told ---------------------------------------------


@dataclass(frozen=True)
class RowDecision:
    """What becomes of one planned row."""

    id: RequestId
    num_computed: int  # c(r) after the step
    new_token_ids: tuple[TokenId, ...] = ()
    num_drafts: int = 0  # that the target computed
    num_accepted: int = 0  # leading new tokens that had been drafted
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None


@dataclass(frozen=True)
class TokensOut:
    """New tokens of a request and the text that is now certain."""

    id: RequestId
    token_ids: tuple[TokenId, ...]
    text: str = ""
    logprobs: tuple[TokenLogprobs, ...] = ()
    num_cached_tokens: int = 0


@dataclass(frozen=True)
class Finished:
    """The one terminal event of a request. `text` is what was still held back."""

    id: RequestId
    reason: FinishReason
    stop_reason: int | str | None = None
    text: str = ""
    error: str | None = None
    num_preemptions: int = 0


Event = TokensOut | Finished


@dataclass(frozen=True)
class StepStats:
    """Counts of one step, for metrics."""

    num_tokens: int
    num_rows: int
    num_prefill_tokens: int
    num_output_tokens: int
    num_drafts: int  # draft positions computed; num_tokens contains them
    num_accepted: int  # of these, tokens that became output
    num_cached_tokens: int
    num_preemptions: int
    num_running: int
    num_waiting: int
    num_free_blocks: int
    num_idle_blocks: int
