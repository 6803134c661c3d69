"""Random life of rows over a `ModelDrafter` on the fake backend (INVARIANTS V6; K1, K3 to K5,
K9, L4 and T11 of its cache).

The machine is target, verifier and scheduler in one: it accepts as many drafts as it likes, goes on with
another token, preempts and cancels. It knows by itself what the drafter has computed and what it must draw,
from whole token lists.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from mvllm.backends.fake.model import FakeModel, Faults, InjectedFault, logprobs_of
from mvllm.backends.fake.tags import ROOT_TAG, FakeSampling, choose, extend_tag, tag_of
from mvllm.core.batch.row_sampling import RowSampling
from mvllm.core.batch.sampling_row import SamplingRow
from mvllm.core.batch.token_counts import TokenCounts
from mvllm.core.request import Request, SamplingParams
from mvllm.core.spec.drafter import DraftRow
from mvllm.core.spec.model_drafter import ModelDrafter, ModelDrafterConfig
from mvllm.core.spec.vocab_limit import VocabLimits
from mvllm.core.step import NO_VOCAB_LIMIT, ForwardBatch, StepOutput
from mvllm.core.types import RequestId, TokenId, ceil_div

TARGET_VOCAB = 6
DRAFT_VOCAB = 5  # token 5 is the target's alone
MASKED = 4  # padding in the draft model
END = 3
MAX_ROWS = 4

Drafts = tuple[int, ...]


class RecordingModel(FakeModel):
    """Keeps the batches of its steps."""

    def __init__(self, vocab_size: int, num_blocks: int, block_size: int) -> None:
        super().__init__(vocab_size, num_blocks, block_size)
        self.batches: list[ForwardBatch] = []

    def step(self, batch: ForwardBatch) -> StepOutput:
        self.batches.append(batch)
        return super().step(batch)


@dataclass
class Row:
    """A request as the target has it, and what the drafter must have computed of it."""

    request: Request
    tokens: list[int]
    salt: str
    in_cache: list[int] | None = None  # tokens computed for it, wrong drafts included; None: not in the cache
    first: int = 0  # tokens left out before these
    reads_all: bool = False  # none are to be left out
    beginning: object = None  # what the cache keeps of it since it began
    drafts: Drafts = ()
    vocab_limit: int = NO_VOCAB_LIMIT  # of the present step: no draft may reach it

    @property
    def id(self) -> RequestId:
        return self.request.id

    def num_kept(self) -> int:
        """Computed positions that are right, but for the last committed token."""
        assert self.in_cache is not None
        pairs = zip(self.in_cache, self.tokens[self.first :], strict=False)
        equal = next((i for i, (a, b) in enumerate(pairs) if a != b), len(self.in_cache))
        return min(equal, len(self.tokens) - self.first - 1)

    def sampling(self) -> RowSampling:
        row = SamplingRow.of(self.request)
        num_prompt = len(self.request.prompt_token_ids)
        counts = None
        if row.has_penalties:
            counts = TokenCounts(self.request.prompt_token_ids)
            counts.add_output(self.tokens[num_prompt:])
        return RowSampling(row, counts, num_prompt)

    def next_draft(self, drafts: Sequence[int]) -> int | None:
        """What the draft model draws after the committed tokens and `drafts`."""
        params = self.request.params
        tokens = [*self.tokens, *drafts]
        output = tokens[len(self.request.prompt_token_ids) :]
        bias = {token: value for token, value in params.logit_bias.items() if token < DRAFT_VOCAB}
        if len(output) < params.min_tokens:
            bias |= dict.fromkeys(params.stop_token_ids, -math.inf)
        bias[MASKED] = -math.inf
        sampling = FakeSampling(
            position=len(tokens),
            seed=self.request.seed,
            temperature=params.temperature,
            filters=(params.top_k, params.top_p, params.min_p),
            repetition_penalty=params.repetition_penalty,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            prompt_counts=Counter(self.request.prompt_token_ids),
            output_counts=Counter(output),
            bias=bias,
        )
        return choose(tag_of(tokens[self.first :]), DRAFT_VOCAB, sampling, self.vocab_limit)

    def confidence(self, drafts: Sequence[int]) -> float:
        """How likely the draft model gives all of `drafts`."""
        result = 1.0
        for index, token in enumerate(drafts):
            tag = tag_of([*self.tokens[self.first :], *drafts[:index]])
            result *= math.exp(logprobs_of(tag, DRAFT_VOCAB, self.vocab_limit)[token])
        return result


tokens = st.sampled_from([0, 0, 0, 0, 0, 0, 1, 1, 1, 2, END, 5])
# Zeros first, so that prefixes are often shared and often part at a block's border.
prompts = st.builds(
    lambda zeros, rest: (0,) * zeros + tuple(rest),
    st.integers(0, 9),
    st.lists(tokens, min_size=1, max_size=4),
)
params = st.sampled_from(
    [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.0, min_tokens=5, stop_token_ids=[1], logprobs=2),
        SamplingParams(temperature=0.8, top_k=3, logit_bias={0: 1.0, 5: 4.0}),
        SamplingParams(temperature=1.5, frequency_penalty=1.5, repetition_penalty=1.3),
    ]
)


@dataclass(frozen=True)
class Arrival:
    prompt: tuple[int, ...]
    salt: str
    params: SamplingParams
    seed: int


arrivals = st.builds(Arrival, prompts, st.sampled_from(["", "", "", "tenant"]), params, st.integers(0, 3))


@dataclass
class Asked:
    """A row of a call and what was known of it before."""

    row: Row
    max_drafts: int
    limit: int
    num_behind: int
    reads_all: bool
    least_confidence: float
    seen: list[int] = field(default_factory=list)


class GivenLimits(VocabLimits):
    """Every pass has the limit that the machine says; rows are looked at all the same."""

    present = NO_VOCAB_LIMIT

    def of(self, texts: Iterable[tuple[RequestId, Sequence[TokenId]]]) -> int:
        super().of(texts)
        return self.present


class ModelDrafterMachine(RuleBasedStateMachine):
    make_drafter: Callable[..., ModelDrafter] = ModelDrafter
    roomy = False  # pool, context and budget for everything: then every draft must be there

    @initialize(
        num_blocks=st.integers(3, 10),
        block_size=st.integers(1, 4),
        max_context=st.integers(8, 24),
        budget=st.integers(2 * MAX_ROWS, 14),
        first_tokens=st.none() | st.integers(2, 12),
        caching=st.booleans(),
    )
    def create(
        self,
        num_blocks: int,
        block_size: int,
        max_context: int,
        budget: int,
        first_tokens: int | None,
        caching: bool,
    ) -> None:
        if self.roomy:
            num_blocks, max_context, budget = 400, 400, 60
        self.config = ModelDrafterConfig(
            num_kv_blocks=num_blocks,
            block_size=block_size,
            max_model_len=max_context,
            max_num_seqs=MAX_ROWS,
            vocab_size=DRAFT_VOCAB,
            masked_token_ids=(MASKED,),
            end_token_ids=frozenset({END}),
            catch_up_tokens=budget,
            first_tokens=first_tokens,
            enable_prefix_caching=caching,
        )
        self.model = RecordingModel(DRAFT_VOCAB, num_blocks, block_size)
        self.drafter = type(self).make_drafter(self.model, self.config)
        self.limits = self.drafter._vocab_limits = GivenLimits(DRAFT_VOCAB, 0.5)
        self.rows: dict[RequestId, Row] = {}
        # Of all rows that were ever in the cache, and where it began.
        self.texts: list[tuple[list[int], int]] = []
        self.num_submitted = 0

    # --- rules -------------------------------------------------------------------------------------------

    @rule(data=st.data(), arrivals=st.lists(arrivals, max_size=2))
    def submit_and_step(self, data: st.DataObject, arrivals: list[Arrival]) -> None:
        for arrival in arrivals[: MAX_ROWS - len(self.rows)]:
            id = RequestId(f"r{self.num_submitted}")
            self.num_submitted += 1
            request = Request(id, arrival.prompt, arrival.params, arrival.seed, max_tokens=99)
            self.rows[id] = Row(request, list(arrival.prompt), arrival.salt)
        self._step(data)

    @rule(data=st.data(), ends=st.booleans())
    def cancel_or_preempt_and_step(self, data: st.DataObject, ends: bool) -> None:
        if self.rows:
            row = self.rows[data.draw(st.sampled_from(sorted(self.rows)))]
            self.drafter.release(row.id)
            self.drafter.check_integrity(frozenset(self.rows) - {row.id})
            row.in_cache, row.drafts = None, ()
            if ends:
                del self.rows[row.id]
                self.drafter.release(row.id)
        self._step(data)

    @rule(data=st.data())
    def step_that_fails(self, data: st.DataObject) -> None:
        failing = self.model.num_steps + data.draw(st.integers(1, 3))
        self.model.faults = Faults(crash_if=lambda batch: self.model.num_steps >= failing)
        asked = self._ask(data)
        try:
            self.drafter.propose([self._draft_row(one) for one in asked])
        except InjectedFault:
            for one in asked:
                one.row.in_cache = None
                assert self.drafter._cache._kv.table(one.row.id) == (), "a failed step left a row behind"
        else:
            # It needed fewer passes than that; what it did is known to be right by the other rules.
            for one in asked:
                self.drafter.release(one.row.id)
                one.row.in_cache = None
        for row in self.rows.values():
            row.drafts = ()
        self.model.faults = Faults()

    # --- a step ------------------------------------------------------------------------------------------

    def _step(self, data: st.DataObject) -> None:
        self.limits.present = data.draw(st.just(NO_VOCAB_LIMIT) | st.integers(1, DRAFT_VOCAB))
        for row in self.rows.values():
            row.vocab_limit = self.limits.present
        asked = self._ask(data)
        before = len(self.model.batches)
        proposed = self.drafter.propose([self._draft_row(one) for one in asked])
        batches = self.model.batches[before:]
        assert len(proposed) == len(asked)
        self._check_sizes(batches)
        for one in asked:
            self._note_beginning(one.row, told=one.reads_all and one.max_drafts > 0)
        for one, drafts in zip(asked, proposed, strict=True):
            self._check_drafts(one, drafts)
        self._account(asked, proposed, batches)
        for row in self.rows.values():
            self._verify(data, row)

    def _ask(self, data: st.DataObject) -> list[Asked]:
        asked = []
        for row in self.rows.values():
            if data.draw(st.integers(0, 9)) == 0:
                continue
            limit = self.drafter.limit(row.id, len(row.tokens))
            assert limit >= 0
            num_unread = self.drafter.num_unread(row.id, len(row.tokens))
            assert num_unread in (0, row.first if row.in_cache is not None else 0)
            reads_all = num_unread > 0 and data.draw(st.integers(0, 3)) == 0
            num_behind = self.drafter.num_behind(row.id, len(row.tokens))
            max_drafts = min(limit, data.draw(st.integers(0, 5)))
            least_confidence = 0.0
            if max_drafts > 1:
                least_confidence = data.draw(st.sampled_from([0.0, 0.0, 0.0, 0.02, 0.1, 0.3]))
            asked.append(Asked(row, max_drafts, limit, num_behind, reads_all, least_confidence))
        return asked

    @staticmethod
    def _draft_row(one: Asked) -> DraftRow:
        tokens, sampling = tuple(one.row.tokens), one.row.sampling()
        return DraftRow(
            one.row.id,
            tokens,
            one.max_drafts,
            sampling,
            one.row.salt,
            reads_all=one.reads_all,
            least_confidence=one.least_confidence,
        )

    def _check_sizes(self, batches: Sequence[ForwardBatch]) -> None:
        geometry = self.config.geometry("f32")
        for batch in batches:
            assert batch.num_tokens <= geometry.max_batch_tokens, "the step is over its budget"
            assert batch.num_rows <= geometry.max_batch_rows
            assert batch.tokens.max() < DRAFT_VOCAB, "a token without an embedding"
            assert batch.context_lens.max() <= geometry.max_context, "a row is longer than the context"

    def _most_entering(self) -> int:
        first_tokens, context = self.config.first_tokens, self.config.max_model_len
        return context if first_tokens is None else min(first_tokens, context)

    def _note_beginning(self, row: Row, told: bool) -> None:
        """A row begins with all of its tokens or its last ones, and again exactly when it must or is told."""
        beginning = self.drafter._cache._sequences.get(row.id)
        most, context = self._most_entering(), self.config.max_model_len
        if row.beginning is not None and row.in_cache is not None:
            num_positions = len(row.tokens) - row.first
            foreign = max(row.tokens) >= DRAFT_VOCAB
            row.reads_all &= beginning is not row.beginning or beginning.reads_all
            is_far = not row.reads_all and num_positions - row.num_kept() > most
            must = told or foreign or num_positions > context or is_far
            assert must or beginning is row.beginning, "begun anew, or put out"
            assert not must or beginning is not row.beginning, "should have begun anew"
        if beginning is row.beginning:
            return
        row.beginning, row.in_cache = beginning, None
        if beginning is not None:
            row.first, row.reads_all = beginning.first, told
            self.texts.append((row.tokens, row.first))
            if row.first > 0:
                assert len(row.tokens) > most, "part of a row that could be computed whole"
                assert len(row.tokens) - row.first == min(most, context // 2), "begins at the wrong token"
                assert not told, "leaves out what it was told to read"
            else:
                assert len(row.tokens) <= context
                is_near = len(row.tokens) - beginning.num_computed <= most
                assert told or is_near, "begins at the wrong token"

    def _check_drafts(self, one: Asked, drafts: Drafts) -> None:
        """They are what the draft model alone, with no cache, would draw; none is missing without reason."""
        row = one.row
        assert len(drafts) <= one.max_drafts <= one.limit, "V1: more drafts than wanted"
        for index, token in enumerate(drafts):
            assert token == row.next_draft(drafts[:index]), (
                f"V4: draft {index} of {drafts} after {row.tokens}"
            )
            assert END not in drafts[:index], "drafts after the end"
            is_sure = index == 0 or row.confidence(drafts[:index]) >= one.least_confidence
            assert is_sure, "goes on where it should have stopped"
        # Rows that read all may have to share the budget.
        is_ready = not row.reads_all or one.num_behind <= self.config.catch_up_tokens // MAX_ROWS
        can_draft = is_ready and max(row.tokens) < DRAFT_VOCAB and not self._waits(row)
        if self.roomy and can_draft and END not in drafts:
            is_sure = row.confidence(drafts) >= one.least_confidence
            is_all = len(drafts) == one.max_drafts or row.next_draft(drafts) is None
            assert is_all or not is_sure, "a draft is missing"
        row.drafts = drafts

    def _waits(self, row: Row) -> bool:
        """For another row, which has a full block that it can share (INVARIANTS S15)."""
        size = self.config.block_size
        shareable = [row.tokens[:size], row.tokens[-self._most_entering() :][:size]]
        return (
            self.config.enable_prefix_caching
            and self.drafter._cache._kv.table(row.id) == ()
            and len(row.tokens) > size
            and any(
                other.salt == row.salt and other.tokens[other.first :][:size] in shareable
                for other in self.rows.values()
                if other is not row and self.drafter._cache._kv.table(other.id)
            )
        )

    def _account(
        self, asked: Sequence[Asked], proposed: Sequence[Drafts], batches: Sequence[ForwardBatch]
    ) -> None:
        """What was computed of each row: its tokens from where the cache ends, then its drafts but the last.

        Rows of a batch are recognised by their block tables: an OPEN block has one owner.
        """
        computed = self._computed_positions(batches)
        for one, drafts in zip(asked, proposed, strict=True):
            row = one.row
            table = self.drafter._cache._kv.table(row.id)
            if not table:
                assert not drafts
                row.in_cache = None
                continue
            most = ceil_div(len(row.tokens) - row.first + max(0, one.max_drafts - 1), self.config.block_size)
            assert len(table) <= most, "K5: blocks of rejected drafts are kept"
            start, stop = computed.get(row.id, (None, None))
            if row.in_cache is not None:
                kept = row.num_kept()
                assert start in (None, kept), f"K5: computes from {start}, the cache holds {kept} positions"
                start = kept
            assert start is not None
            stop = start if stop is None else stop
            sequence = [*row.tokens[row.first :], *drafts]
            assert stop <= len(sequence) - bool(drafts), "the last draft was computed"
            row.in_cache = sequence[:stop]

    def _computed_positions(self, batches: Sequence[ForwardBatch]) -> dict[RequestId, tuple[int, int]]:
        by_last_block = {}
        for id in self.rows:
            for block_id in self.drafter._cache._kv.table(id):
                by_last_block.setdefault(block_id, []).append(id)
        computed: dict[RequestId, tuple[int, int]] = {}
        for batch in batches:
            for index in range(batch.num_rows):
                first, last = batch.row_starts[index : index + 2].tolist()
                positions = batch.positions[first:last].tolist()
                slots = batch.slots[first:last].tolist()
                [id] = by_last_block[slots[-1] // self.config.block_size]
                start, stop = computed.get(id, (positions[0], positions[0]))
                assert positions[0] == stop, "computed twice, or with a gap"
                computed[id] = (start, positions[-1] + 1)
        return computed

    def _verify(self, data: st.DataObject, row: Row) -> None:
        """Accept some drafts, then go on with a token of the target's own."""
        num_accepted = data.draw(st.integers(0, len(row.drafts)))
        if data.draw(st.booleans()):
            num_accepted = len(row.drafts)
        row.tokens += row.drafts[:num_accepted]
        if num_accepted < len(row.drafts) or data.draw(st.integers(0, 3)):
            row.tokens.append(data.draw(tokens))
        row.drafts = ()

    # --- invariants --------------------------------------------------------------------------------------

    @invariant()
    def parts_agree(self) -> None:
        self.drafter.check_integrity(frozenset(self.rows))

    @invariant()
    def the_model_saw_no_wrong_access(self) -> None:
        assert self.model.violations == []

    @invariant()
    def tenants_share_nothing(self) -> None:
        by_salt: dict[str, set[int]] = {}
        for row in self.rows.values():
            by_salt.setdefault(row.salt, set()).update(self.drafter._cache._kv.table(row.id))
        assert len(set().union(*by_salt.values())) == sum(map(len, by_salt.values())), "T11"

    @invariant()
    def the_cache_holds_what_was_computed(self) -> None:
        """K1, of committed positions and of those past them."""
        cache, size = self.drafter._cache, self.config.block_size
        for row in self.rows.values():
            table = cache._kv.table(row.id)
            if row.in_cache is None:
                assert table == (), f"L4: {row.id} has blocks"
                continue
            assert len(table) >= ceil_div(len(row.in_cache), size), "K3"
            tag = ROOT_TAG
            for position, token in enumerate(row.in_cache):
                tag = extend_tag(tag, token)
                found = self.model.tag_at(table[position // size] * size + position % size)
                assert found == tag, f"K1: {row.id} at {position}"

    @invariant()
    def only_committed_tokens_are_shared(self) -> None:
        """K4 and T1: indexed blocks hold the tags of tokens that the target has committed."""
        trie, size = self.drafter._cache._kv._trie, self.config.block_size
        for block, node in trie._nodes.items():
            path = list(node.key[1])
            parent = node.key[0]
            while not isinstance(parent, str):
                path = [*trie._nodes[parent].key[1], *path]
                parent = trie._nodes[parent].key[0]
            tags = list(itertools.accumulate(path, extend_tag, initial=ROOT_TAG))
            found = [self.model.tag_at(block * size + offset) for offset in range(size)]
            assert found == tags[-size:], f"K4: block {block} is not what it is indexed under"
            assert any(path == text[first : first + len(path)] for text, first in self.texts), (
                f"K4: {path} was never committed"
            )

    def teardown(self) -> None:
        if not hasattr(self, "drafter"):
            return
        for id in list(self.rows):
            self.drafter.release(id)
        self.drafter.check_integrity(frozenset())
        kv = self.drafter._cache._kv
        assert kv.num_free + kv.num_idle == kv.num_blocks, "K9: blocks are lost"
