"""Drafters and length policies for tests: helpful, useless and broken ones, each in a few lines."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mvllm.core.errors import InvariantViolation
from mvllm.core.spec.draft_length import DraftDemand, DraftLengthPolicy, SpeculationStep
from mvllm.core.spec.drafter import Drafter, DraftRow
from mvllm.core.types import RequestId, TokenId

Proposal = tuple[TokenId, ...]
Guess = Callable[[DraftRow, random.Random], Proposal]
"""Tokens that may follow a row's, any number of them; the random numbers depend on row and length only."""


class ScriptedDrafter(Drafter):
    """Proposes what `guess` gives, cut to what is allowed.

    Owns the rows it has seen and that were not released, `last` (the proposals of the last call by
    row) and a log of broken promises: `complaints`.
    """

    name = "scripted"

    def __init__(self, guess: Guess, *, seed: int = 0, limit: int | None = None) -> None:
        self._guess = guess
        self._seed = seed
        self._limit = limit
        self.known: set[RequestId] = set()
        self.last: dict[RequestId, Proposal] = {}
        self.complaints: list[str] = []
        self.num_calls = 0
        self.closed = False

    def random(self, row: DraftRow) -> random.Random:
        return random.Random(f"{self._seed}/{row.id}/{len(row.token_ids)}")

    def limit(self, id: RequestId, num_tokens: int) -> int:
        if self._limit is None:
            return super().limit(id, num_tokens)
        return random.Random(f"{self._seed}/{id}/{num_tokens}").randint(0, self._limit)

    def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
        self.num_calls += 1
        for row in rows:
            self.known.add(row.id)
            self._check(row)
        self.last = {row.id: self._guess(row, self.random(row))[: row.max_drafts] for row in rows}
        return [self.last[row.id] for row in rows]

    def _check(self, row: DraftRow) -> None:
        counts, num_prompt = row.sampling.counts, row.sampling.num_prompt_tokens
        if counts is not None and not counts.matches(row.token_ids[:num_prompt], row.token_ids[num_prompt:]):
            self.complaints.append(f"the counts of row {row.id} are not those of its tokens")
        if self._limit is not None and row.max_drafts > self.limit(row.id, len(row.token_ids)):
            self.complaints.append(f"row {row.id} is asked for more than the limit")
        if self.closed:
            self.complaints.append("asked after it was closed")

    def release(self, id: RequestId) -> None:
        self.known.discard(id)

    def check_integrity(self, live: frozenset[RequestId]) -> None:
        if not self.known <= live:
            raise InvariantViolation(f"L4: the drafter knows {sorted(self.known)}, live are {sorted(live)}")

    def close(self) -> None:
        self.closed = True


# --- guesses -------------------------------------------------------------------------------------------


def repeating(row: DraftRow, rng: random.Random) -> Proposal:
    """What followed the last occurrence of the last token: prompt lookup at its simplest."""
    tokens = list(row.token_ids)
    for start in range(len(tokens) - 1, 0, -1):
        if tokens[start - 1] == tokens[-1]:
            return tuple(tokens[start:])
    return ()


def guess_randomly(vocab_size: int) -> Guess:
    """Any tokens, any number of them."""
    return lambda row, rng: tuple(rng.randrange(vocab_size) for _ in range(rng.randrange(9)))


def know_the_answer(answers: Mapping[RequestId, Callable[[], Proposal]]) -> Guess:
    """The very tokens that will come."""

    def guess(row: DraftRow, rng: random.Random) -> Proposal:
        return answers[row.id]()[len(row.token_ids) - row.sampling.num_prompt_tokens :]

    return guess


def mostly(guess: Guess, vocab_size: int, *, wrong: float = 0.2) -> Guess:
    """Another guess with some tokens changed."""

    def changed(row: DraftRow, rng: random.Random) -> Proposal:
        return tuple(
            rng.randrange(vocab_size) if rng.random() < wrong else token for token in guess(row, rng)
        )

    return changed


def followed_by(guess: Guess, tokens: Sequence[TokenId]) -> Guess:
    """Some tokens of another guess, then some of `tokens`: ones that would end the output, say."""

    def guess_and_end(row: DraftRow, rng: random.Random) -> Proposal:
        start = guess(row, rng)
        return (*start[: rng.randrange(len(start) + 1)], *rng.choices(tokens, k=6))

    return guess_and_end


# --- broken drafters -----------------------------------------------------------------------------------


class BreakingDrafter(ScriptedDrafter):
    """Good for some calls, then `fault` takes the place of its answers."""

    def __init__(self, guess: Guess, fault: Callable[[list[Proposal]], Any], *, good_calls: int) -> None:
        super().__init__(guess)
        self._fault = fault
        self._good_calls = good_calls
        self.broke = False

    def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
        if self.broke:
            self.complaints.append("asked again after it broke")
        proposals = super().propose(rows)
        if self.num_calls <= self._good_calls:
            return proposals
        self.last = {}
        self.broke = True
        wrong: list[Proposal] = self._fault(proposals)
        return wrong


def _raise(proposals: list[Proposal]) -> Any:
    raise RuntimeError("a drafter that was made to fail")


FAULTS: dict[str, Callable[[list[Proposal]], Any]] = {
    "raises": _raise,
    "too many": lambda proposals: [(*proposal, *[0] * 99) for proposal in proposals],
    "past the vocabulary": lambda proposals: [(10**9,) for _ in proposals],
    "negative": lambda proposals: [(-1,) for _ in proposals],
    "one row too few": lambda proposals: proposals[1:],
    "one row too many": lambda proposals: [*proposals, ()],
    "no tokens": lambda proposals: [("a",) for _ in proposals],
    "nothing": lambda proposals: None,
}


# --- policies ------------------------------------------------------------------------------------------


class RandomLengths(DraftLengthPolicy):
    """Any legal length, the longest most often; keeps a record of every promise that the engine makes."""

    def __init__(self, seed: int = 0) -> None:
        self._random, self._random_confidence = random.Random(seed), random.Random(seed)
        self.known: set[RequestId] = set()
        self._reading: frozenset[RequestId] = frozenset()
        self.steps: list[SpeculationStep] = []

    def lengths(self, rows: Sequence[DraftDemand]) -> list[int]:
        self.known |= {row.id for row in rows}
        lengths = [min(row.limit, self._random.choice([0, 1, 2, 3, 8, 8])) for row in rows]
        unread = [row.id for row, length in zip(rows, lengths, strict=True) if length > 0 < row.num_unread]
        self._reading = frozenset(id for id in unread if self._random.random() < 0.3)
        return lengths

    def readers(self) -> frozenset[RequestId]:
        return self._reading

    def least_confidence(self) -> float:
        return self._random_confidence.choice([0.0, 0.0, 0.0, 0.0, 0.02, 0.1, 0.5, 1.0])

    def observe(self, step: SpeculationStep) -> None:
        self.known |= {result.id for result in step.results}
        self.steps.append(step)

    def release(self, id: RequestId) -> None:
        self.known.discard(id)
