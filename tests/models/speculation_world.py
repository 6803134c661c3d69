"""An engine's drafting in simulation: what each part of a step takes and which drafts are right are given,
time is added up by hand.

A text is fixed beforehand: at each position a draft is right, wrong, or not to be had, whatever the policy
does, or right if the drafter has read enough. So two policies differ in time only, as in the engine.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from mvllm.core.spec.draft_length import DraftDemand, DraftLengthPolicy, DraftResult, SpeculationStep
from mvllm.core.types import RequestId


@dataclass(frozen=True)
class Text:
    """What a drafter would do at each position of one request's output."""

    difficulty: Sequence[float]  # within [0, 1); those below the agreement are drafted rightly
    proposes: Sequence[bool]  # the drafter has a proposal when it starts here
    agreement: Callable[[int], float] = lambda read: 0.5
    """Share of drafts that are right, if those before them were, when the drafter has read so many tokens
    before the first of them."""
    at_hand: Sequence[int] = ()
    """Drafts that have been looked up when it starts at a position, for the first positions."""
    lookup_is_right: bool = True
    confidence: Sequence[float] = ()
    """The drafter's opinion of its draft at each position; ends for positions where it has none."""

    def __len__(self) -> int:
        return len(self.difficulty)

    def num_at_hand(self, start: int) -> int:
        return self.at_hand[start] if start < len(self.at_hand) else 0

    def going_on(self, start: int, most: int, least_confidence: float) -> int:
        """Drafts, of `most`, after which a drafter stops that is told how sure it has to be."""
        confidence = 1.0
        for count in range(1, most):
            place = start + count - 1
            confidence *= self.confidence[place] if place < len(self.confidence) else 1.0
            if confidence < least_confidence:
                return count
        return most

    def accepted(self, start: int, proposed: int, read: int) -> int:
        """Leading drafts that are right, of `proposed` at `start`."""
        chance = self.agreement(read)
        if self.num_at_hand(start) > 0:
            return proposed if self.lookup_is_right else 0
        wrong = (count for count in range(proposed) if self.difficulty[start + count] >= chance)
        return next(wrong, proposed)


@dataclass(frozen=True)
class Costs:
    """Seconds of the parts of a step."""

    forward: Callable[[int, int], float]  # of rows and tokens
    draft_pass: Callable[[int], float]  # of rows that draft in it
    first_pass: float = 0.0  # what a round's first pass takes beyond
    catch_up: float = 0.0  # per token that the drafter has not seen
    first_tokens: int | None = None  # a drafter further behind begins anew with so many; None: with all
    noise: float = 0.0  # relative standard deviation of every measurement
    disturbed: float = 0.0  # share of steps that take three times as long


@dataclass
class Run:
    """What came of a simulated run."""

    seconds: float = 0.0  # undisturbed, so that runs can be compared
    tokens: int = 0
    lengths: list[list[int]] = field(default_factory=list)  # [step][row still running]
    num_worked_out: int = 0  # drafts that the drafter did not have at hand

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


@dataclass
class _Reader:
    """What a drafter with a cache has read of a row (see `core/spec/draft_cache.py`)."""

    first_tokens: int | None
    first: int = 0  # position of the first token it has read
    end: int = 0  # and of the first one after these that it has not
    reads_all: bool = False  # however far behind, 256 tokens a step

    def num_behind(self, num_tokens: int) -> int:
        behind = num_tokens - self.end
        return behind if self.reads_all or self.first_tokens is None else min(behind, self.first_tokens)

    def read_all(self) -> None:
        """Begin anew."""
        self.first, self.end, self.reads_all = 0, 0, True

    def catch_up(self, num_tokens: int) -> int:
        """Read before drafting; returns how many tokens."""
        count = self.num_behind(num_tokens)
        if self.reads_all and count > 256:
            self.end += 256
            return 256
        self.read(num_tokens)
        return count

    def read(self, num_tokens: int) -> None:
        behind = self.num_behind(num_tokens)
        if num_tokens - self.end > behind:
            self.first = num_tokens - behind
        self.end = num_tokens

    @property
    def num_read(self) -> int:
        return self.end - self.first


def simulate(
    policy: DraftLengthPolicy,
    texts: Sequence[Text],
    costs: Costs,
    *,
    prompt: int = 100,
    max_drafts: int = 32,
    seed: int = 0,
    first_id: int = 0,
) -> Run:
    """Generate all texts in one batch, from their prompts of `prompt` tokens, to the end of each."""
    rng = random.Random(seed)
    run = Run()
    done = [0] * len(texts)
    drafters = [_Reader(costs.first_tokens) for _ in texts]
    while running := [i for i, text in enumerate(texts) if done[i] < len(text)]:
        demands = [
            DraftDemand(
                RequestId(str(first_id + i)),
                prompt + done[i],
                min(texts[i].num_at_hand(done[i]) or max_drafts, len(texts[i]) - done[i] - 1),
                num_behind=drafters[i].num_behind(prompt + done[i]),
                num_unread=drafters[i].first,
                num_output=done[i],
                num_left=len(texts[i]) - done[i],
                num_at_hand=texts[i].num_at_hand(done[i]),
                heeds_confidence=bool(texts[i].confidence),
            )
            for i in running
        ]
        lengths = policy.lengths(demands)
        assert all(0 <= length <= demand.limit for length, demand in zip(lengths, demands, strict=True))
        run.lengths.append(lengths)
        readers = policy.readers()
        draft_seconds = 0.0
        proposed = []
        for i, demand, length in zip(running, demands, lengths, strict=True):
            if demand.id in readers:
                assert length > 0 and demand.num_unread > 0
                drafters[i].read_all()
            if texts[i].num_at_hand(done[i]) > 0:
                proposed.append(length)
                continue
            if length > 0:
                draft_seconds += costs.catch_up * drafters[i].catch_up(prompt + done[i])
            is_ready = drafters[i].end == prompt + done[i] and texts[i].proposes[done[i]]
            stops = texts[i].going_on(done[i], length, policy.least_confidence())
            proposed.append(stops if is_ready else 0)
        accepted = []
        worked_out = []
        for i, count in zip(running, proposed, strict=True):
            accepted.append(texts[i].accepted(done[i], count, drafters[i].num_read))
            worked_out.append(0 if texts[i].num_at_hand(done[i]) > 0 else count)
            if worked_out[-1] > 0:
                drafters[i].read(prompt + done[i] + accepted[-1])
        run.num_worked_out += sum(worked_out)
        for place in range(max(worked_out)):
            draft_seconds += costs.draft_pass(sum(count > place for count in worked_out))
            draft_seconds += costs.first_pass if place == 0 else 0.0
        num_tokens = len(running) + sum(proposed)
        forward_seconds = costs.forward(len(running), num_tokens)
        for i, count in zip(running, accepted, strict=True):
            done[i] += count + 1
            run.tokens += count + 1
        run.seconds += draft_seconds + forward_seconds
        policy.observe(
            SpeculationStep(
                results=tuple(map(DraftResult, [demand.id for demand in demands], proposed, accepted)),
                num_rows=len(running),
                num_tokens=num_tokens,
                num_prefill_tokens=0,
                context_tokens=sum(demand.num_tokens for demand in demands) + sum(proposed),
                draft_seconds=draft_seconds * _disturbance(costs, rng),
                forward_seconds=forward_seconds * _disturbance(costs, rng),
            )
        )
        for i, demand in zip(running, demands, strict=True):
            if done[i] >= len(texts[i]):
                policy.release(demand.id)
    return run


def _disturbance(costs: Costs, rng: random.Random) -> float:
    factor = max(0.5, rng.gauss(1.0, costs.noise))
    return factor * 3.0 if rng.random() < costs.disturbed else factor


# --- texts -------------------------------------------------------------------------------------------------


def even_text(length: int, chance: float, seed: int, *, runs: float = 0.0) -> Text:
    """Each draft is right with the same chance; the drafter always has one.

    Args:
        runs: chance that a token is as difficult as the one before it.
    """
    return read_text(length, lambda read: chance, seed, runs=runs)


def read_text(length: int, agreement: Callable[[int], float], seed: int, *, runs: float = 0.0) -> Text:
    """As `even_text`, for a drafter that is right the more often the more it has read."""
    rng = random.Random(seed)
    difficulty: list[float] = []
    for _ in range(length):
        again = runs > 0.0 and bool(difficulty) and rng.random() < runs
        difficulty.append(difficulty[-1] if again else rng.random())
    return Text(difficulty, [True] * length, agreement)


def opinionated_text(
    length: int, chances: Sequence[float], seed: int, *, opinion: float | None = None
) -> Text:
    """Each draft is right with one of `chances`, and the drafter thinks that of it, or always `opinion`."""
    rng = random.Random(seed)
    drawn = [rng.choice(chances) for _ in range(length)]
    confidence = drawn if opinion is None else [opinion] * length
    return replace(told_text([rng.random() < chance for chance in drawn]), confidence=confidence)


def copied_text(length: int, share: float, run: int, seed: int, *, false_matches: float = 0.1) -> Text:
    """Runs of about `run` copied tokens, in which drafts are right, make up `share` of the text; between them
    the drafter has seldom a proposal, and a wrong one."""
    rng = random.Random(seed)
    right: list[bool] = []
    proposes: list[bool] = []
    gap = run * (1.0 - share) / share if share > 0 else length
    while len(right) < length:
        count = 1 + int(rng.expovariate(1.0 / max(gap, 1e-9))) if share < 1 else 1
        right += [False] * count
        proposes += [rng.random() < false_matches for _ in range(count)]
        if share > 0:
            count = 1 + int(rng.expovariate(1.0 / run))
            right += [True] * count
            proposes += [True] * count
    return replace(told_text(right[:length]), proposes=proposes[:length])


def told_text(right: Sequence[bool]) -> Text:
    """Drafts are right where they are said to be."""
    return Text([0.0 if value else 0.9 for value in right], [True] * len(right))


def with_copies(text: Text, run: int, seed: int, *, share: float) -> Text:
    """About `share` of it in runs of `run` tokens, which are at hand."""
    rng = random.Random(seed)
    at_hand: list[int] = []
    while len(at_hand) < len(text):
        if rng.random() < share:
            at_hand += range(run, 0, -1)
        else:
            at_hand += [0] * run
    return replace(text, at_hand=at_hand[: len(text)])


def joined(first: Text, second: Text) -> Text:
    """One after the other; neither may depend on what was read."""
    texts = (first, second)
    right = [value < text.agreement(0) for text in texts for value in text.difficulty]
    return replace(told_text(right), proposes=[*first.proposes, *second.proposes])
