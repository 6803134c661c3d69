"""Speculation in engine scripts: who drafts, and what must hold of every step with drafts (INVARIANTS V)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice

from mvllm.backends.fake.model import FakeModel
from mvllm.backends.fake.tags import ROOT_TAG, extend_tag
from mvllm.core.config import ResolvedConfig
from mvllm.core.engine.engine import Engine
from mvllm.core.engine.statistics import SpeculationTotals
from mvllm.core.kv.kv_manager import KvManager
from mvllm.core.spec.draft_cache import VERIFIED_LAG
from mvllm.core.spec.draft_length import DraftLengthPolicy, FixedLength
from mvllm.core.spec.drafter import Drafter, DraftRow
from mvllm.core.spec.length_policies import create_policy
from mvllm.core.spec.model_drafter import ModelDrafter, ModelDrafterConfig
from mvllm.core.spec.speculation import Speculation
from mvllm.core.step import Event, TokensOut
from mvllm.core.types import RequestId, TokenId
from tests.models.drafters import (
    FAULTS,
    BreakingDrafter,
    Guess,
    RandomLengths,
    ScriptedDrafter,
    followed_by,
    guess_randomly,
    know_the_answer,
    mostly,
    repeating,
)

Answer = Callable[[RequestId], tuple[TokenId, ...]]

ENDING_TOKENS = (2, 8)
"""The end tokens that scripts use."""


@dataclass(frozen=True)
class DraftMemory:
    """What a draft model in a script has room for, and how much it differs from the target."""

    num_kv_blocks: int
    block_size: int
    max_context: int
    first_tokens: int | None
    spare_budget: int  # catch-up tokens beyond the least that the rows need
    num_missing_tokens: int  # ids at the end of the target's vocabulary that it lacks
    enable_prefix_caching: bool

    def knows_as_much(self, max_model_len: int) -> bool:
        """Whether it sees what the target sees, and so draws what the target draws."""
        return (
            self.first_tokens is None and self.max_context >= max_model_len and self.num_missing_tokens == 0
        )


@dataclass(frozen=True)
class Drafting:
    """Who drafts in a script, and how much."""

    guess: str = "mixed"  # a name in `_guesses`
    policy: str = "random"  # "random", "fixed-<k>", or a name that `create_policy` knows
    seed: int = 0
    limit: int | None = None  # the drafter's own limit varies up to this
    fault: str | None = None  # a name in FAULTS; comes after some good calls
    good_calls: int = 0
    memory: DraftMemory | None = None  # of the draft model, which then takes the place of `guess`


GUESSES = ("perfect", "mixed", "repeating", "random", "ending", "nothing")


def _guesses(name: str, vocab_size: int, answers: Mapping[RequestId, Callable[[], tuple[int, ...]]]) -> Guess:
    perfect = know_the_answer(answers)
    return {
        "perfect": perfect,
        "mixed": mostly(perfect, vocab_size),
        "repeating": repeating,
        "random": guess_randomly(vocab_size),
        "ending": followed_by(perfect, ENDING_TOKENS),
        "nothing": lambda row, rng: (),
    }[name]


class _Answers(dict[RequestId, Callable[[], tuple[TokenId, ...]]]):
    """Finds the answer of any request when it is first asked for."""

    def __init__(self, answer: Answer) -> None:
        super().__init__()
        self._answer = answer

    def __missing__(self, id: RequestId) -> Callable[[], tuple[TokenId, ...]]:
        answer = self._answer(id)
        self[id] = lambda: answer
        return self[id]


class WatchedModelDrafter(Drafter):
    """A model drafter on a fake model of its own, with what a `ScriptedDrafter` tells of itself."""

    name = "watched model"
    heeds_confidence = True

    def __init__(self, memory: DraftMemory, config: ResolvedConfig, vocab_size: int) -> None:
        self.memory = memory
        own = ModelDrafterConfig(
            num_kv_blocks=memory.num_kv_blocks,
            block_size=memory.block_size,
            max_model_len=memory.max_context,
            max_num_seqs=config.max_num_seqs,
            vocab_size=vocab_size - memory.num_missing_tokens,
            catch_up_tokens=VERIFIED_LAG * config.max_num_seqs + memory.spare_budget,
            first_tokens=memory.first_tokens,
            enable_prefix_caching=memory.enable_prefix_caching,
        )
        self.model = FakeModel(own.vocab_size, own.num_kv_blocks, own.block_size)
        self.inner = ModelDrafter(self.model, own)
        self.last: dict[RequestId, tuple[TokenId, ...]] = {}
        self.closed = False

    @property
    def known(self) -> set[RequestId]:
        return {*self.inner._cache._sequences, *self.inner._cache._kv.live_ids(), *self.inner._sampling}

    @property
    def complaints(self) -> list[str]:
        return self.model.violations

    def limit(self, id: RequestId, num_tokens: int) -> int:
        return self.inner.limit(id, num_tokens)

    def num_behind(self, id: RequestId, num_tokens: int) -> int:
        return self.inner.num_behind(id, num_tokens)

    def num_unread(self, id: RequestId, num_tokens: int) -> int:
        return self.inner.num_unread(id, num_tokens)

    def propose(self, rows: Sequence[DraftRow]) -> list[tuple[TokenId, ...]]:
        proposals = self.inner.propose(rows)
        self.last = {row.id: proposal for row, proposal in zip(rows, proposals, strict=True)}
        return proposals

    def release(self, id: RequestId) -> None:
        self.inner.release(id)

    def check_integrity(self, live: frozenset[RequestId]) -> None:
        self.inner.check_integrity(live)

    def close(self) -> None:
        self.inner.close()
        self.closed = True

    def check(self, engine: Engine) -> None:
        """V6: K1 of what is committed and of what was written for drafts, K4 and T1 of what is shared."""
        cache, size = self.inner._cache, self.memory.block_size
        for id, sequence in cache._sequences.items():
            state = engine._table.get(id)
            assert state is not None, f"{id} is in the draft cache (L4)"
            tokens = state.token_ids[sequence.first :][: sequence.num_computed]
            table = cache._kv.table(id)
            tags = accumulate((*tokens, *sequence.written), extend_tag, initial=ROOT_TAG)
            for position, tag in enumerate(islice(tags, 1, None)):
                found = self.model.tag_at(table[position // size] * size + position % size)
                assert found == tag, f"{id} position {position} of the draft model (K1)"
        check_indexed_blocks(cache._kv, self.model)

    def check_drained(self) -> None:
        self.inner.check_integrity(frozenset())
        kv = self.inner._cache._kv
        assert kv.num_free + kv.num_idle == kv.num_blocks, "draft blocks are lost (K9)"


def check_indexed_blocks(kv: KvManager, model: FakeModel) -> None:
    """K4 and T1: every indexed block holds the tags of the tokens that it is indexed under."""
    size = kv.block_size
    for block, node in kv._trie._nodes.items():
        parent, tokens = node.key
        # The parent is indexed, so what it ends with is checked as well.
        tag = ROOT_TAG if isinstance(parent, str) else model.tag_at(parent * size + size - 1)
        for offset, token in enumerate(tokens):
            tag = extend_tag(tag or 0, token)
            assert model.tag_at(block * size + offset) == tag, f"block {block} (K4)"


class SpeculationWatch:
    """The drafter and policy of one engine, and what they and the events say about its counters."""

    def __init__(self, drafting: Drafting, config: ResolvedConfig, vocab_size: int, answer: Answer) -> None:
        guess = _guesses(drafting.guess, vocab_size, _Answers(answer))
        self.drafter: ScriptedDrafter | WatchedModelDrafter
        if drafting.memory is not None:
            self.drafter = WatchedModelDrafter(drafting.memory, config, vocab_size)
        elif drafting.fault is None:
            self.drafter = ScriptedDrafter(guess, seed=drafting.seed, limit=drafting.limit)
        else:
            self.drafter = BreakingDrafter(guess, FAULTS[drafting.fault], good_calls=drafting.good_calls)
        self.drafting = drafting
        self.config = config
        self.policy = _policy(drafting)
        self.speculation = Speculation(self.drafter, self.policy)
        self._before = SpeculationTotals()
        self._num_output_tokens = 0

    def begin_step(self) -> None:
        self.drafter.last = {}

    def end_step(self, engine: Engine, events: Sequence[Event], *, together: bool) -> None:
        """V7: the counters are what can be seen from outside."""
        proposals = self.drafter.last if together else {}
        new_tokens = {event.id: event.token_ids for event in events if isinstance(event, TokensOut)}
        heard = [(proposals.get(id, ()), tokens) for id, tokens in new_tokens.items()]
        totals = engine.totals.speculation
        assert totals is not None
        before, self._before = self._before, totals
        accepted = [_common_length(proposal, tokens) for proposal, tokens in heard]
        assert totals.num_accepted - before.num_accepted == sum(accepted), "accepted (V7)"
        assert totals.num_proposed - before.num_proposed == sum(len(p) for p, _ in heard), "proposed (V7)"
        assert engine.last_step.num_accepted == sum(accepted) or not new_tokens
        for (proposal, tokens), count in zip(heard, accepted, strict=True):
            assert 1 <= len(tokens) <= len(proposal) + 1, "more tokens than drafts and one (V1)"
            assert len(tokens) <= count + 1, "went on after a mismatch (V1)"
        _check_sums(totals, engine.totals.num_output_tokens)
        if isinstance(self.drafter, WatchedModelDrafter):
            self.drafter.check(engine)
            if self.drafter.memory.knows_as_much(self.config.max_model_len):
                # Past an end or unusable logits there are fewer tokens than drafts, but no other ones.
                for proposal, tokens in heard:
                    pairs = zip(proposal, tokens, strict=False)
                    assert all(draft == token for draft, token in pairs), "a right draft was refused (V4)"
        broke = isinstance(self.drafter, BreakingDrafter) and self.drafter.broke
        assert (totals.switched_off is not None) == broke, totals.switched_off
        assert self.drafter.complaints == [], self.drafter.complaints

    def check_drained(self, engine: Engine) -> None:
        totals = engine.totals.speculation
        assert totals is not None
        if totals.switched_off is None:
            assert self.drafter.known == set(), "rows left in the drafter (L3)"
            if isinstance(self.policy, RandomLengths):
                assert self.policy.known == set(), "rows left in the policy (L3)"
        if isinstance(self.drafter, WatchedModelDrafter):
            self.drafter.check_drained()
        elif self.drafting.guess == "perfect" and self.drafting.fault is None:
            assert totals.num_accepted == totals.num_proposed, "a right draft was not accepted (V4)"
        if isinstance(self.policy, RandomLengths):
            self._check_steps(self.policy, totals)

    def _check_steps(self, policy: RandomLengths, totals: SpeculationTotals) -> None:
        """The policy is told the truth; the harness's clock ticks once per reading."""
        results = [result for step in policy.steps for result in step.results]
        assert sum(result.accepted for result in results) == totals.num_accepted or totals.switched_off
        for step in policy.steps:
            num_drafts = sum(result.proposed for result in step.results)
            assert 0 <= len(step.results) <= step.num_rows
            assert num_drafts + step.num_rows <= step.num_tokens <= step.context_tokens
            assert step.num_prefill_tokens < step.num_tokens
            assert step.draft_seconds >= 0 and step.forward_seconds > 0


def _check_sums(totals: SpeculationTotals, num_output_tokens: int) -> None:
    assert totals.num_accepted + totals.num_own_tokens == num_output_tokens, "accepted + own = output (V7)"
    assert totals.num_accepted <= totals.num_proposed, "accepted more than proposed (V7)"
    assert sum(totals.proposed_lengths.values()) == totals.num_passes
    assert sum(k * count for k, count in totals.proposed_lengths.items()) == totals.num_proposed
    assert sum(k * count for k, count in totals.accepted_lengths.items()) == totals.num_accepted
    with_drafts = sum(count for k, count in totals.proposed_lengths.items() if k)
    assert sum(totals.accepted_lengths.values()) == with_drafts
    assert totals.num_passes <= totals.num_pass_tokens <= totals.num_passes + totals.num_accepted


def _policy(drafting: Drafting) -> DraftLengthPolicy:
    if drafting.policy == "random":
        return RandomLengths(drafting.seed)
    name, _, length = drafting.policy.partition("-")
    return FixedLength(int(length)) if name == "fixed" else create_policy(drafting.policy)


def _common_length(first: Sequence[TokenId], second: Sequence[TokenId]) -> int:
    pairs = zip(first, second, strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))
