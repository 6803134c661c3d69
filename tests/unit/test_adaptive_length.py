"""The adaptive policy in worlds whose costs and texts are known: no clock, no model.

Every world starts with a policy that knows nothing. It is compared with the best constant length of the
same world, which knows everything.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest

from mvllm.core.spec.adaptive_length import (
    FIRST_SAVINGS,
    FIRST_TRIAL,
    LARGEST_GROWTH,
    MAX_TRIAL,
    MOST_SURE,
    PLAIN_FIRST,
    TRIAL_AFTER,
    TRIAL_SHARE,
    AdaptiveLength,
)
from mvllm.core.spec.draft_length import (
    DraftDemand,
    DraftLengthPolicy,
    DraftResult,
    FixedLength,
    SpeculationStep,
)
from mvllm.core.spec.length_policies import create_policy
from mvllm.core.spec.step_costs import FORGET_AFTER
from mvllm.core.types import RequestId
from tests.models.speculation_table import TODAY, agreement_by_read, lookup_costs, model_costs
from tests.models.speculation_world import (
    Costs,
    Run,
    Text,
    copied_text,
    even_text,
    joined,
    opinionated_text,
    read_text,
    simulate,
    told_text,
    with_copies,
)
from tests.mutants.adaptive_length import MUTANTS

LENGTH = 500  # tokens of a text
CONSTANTS = (0, 1, 2, 3, 4, 6, 8, 16)


def memory_bound(rows: int, tokens: int) -> float:
    """A forward that mostly reads weights, up to eight tokens; then it computes."""
    return 0.030 + 0.001 * rows + 0.0018 * tokens + 0.003 * max(0, tokens - 8)


def compute_bound(rows: int, tokens: int) -> float:
    return 0.03 + 0.015 * tokens


def with_a_jump(rows: int, tokens: int) -> float:
    """One token has a kernel of its own."""
    return 0.033 if tokens == 1 else 0.045 + 0.001 * tokens


def with_cheap_tokens(rows: int, tokens: int) -> float:
    return 0.1 + 0.001 * tokens


def small_model(rows: int) -> float:
    return 0.012 + 0.0005 * rows


def large_model(rows: int) -> float:
    return 0.030 + 0.002 * rows


def lookup(rows: int) -> float:
    return 0.00003


MODEL, FREE = (Costs(memory_bound, drafter, first_tokens=0) for drafter in (small_model, lookup))
DEAR, STEEP, JUMP = (
    Costs(memory_bound, large_model, first_tokens=0),
    Costs(compute_bound, lookup, first_tokens=0),
    Costs(with_a_jump, lookup, first_tokens=0),
)
CHEAP = Costs(with_cheap_tokens, lookup, first_tokens=0)


def batched(rows: int, tokens: int) -> float:
    """Eight rows keep two cores busy: each draft takes its time."""
    return 0.150 + 0.014 * (tokens - 8)


MEASURED = model_costs(TODAY)
NARROW = Costs(
    lambda rows, tokens: 0.035 if tokens == 1 else 0.034 + 0.0044 * tokens, lambda rows: 0.0138, 0.0045
)
"""A draft model that pays little, and not with one draft a round; as measured on an Intel Xeon."""

FAST_READER = replace(NARROW, catch_up=0.0008, first_tokens=64)
BATCHED = replace(MEASURED, forward=batched, draft_pass=lambda rows: 0.02 + 0.004 * rows)


def streaks(chance: float, seed: int, length: int = LENGTH) -> Text:
    return even_text(length, chance, seed, runs=0.4)


def bad_beginning(seed: int) -> Text:
    """How an answer with code began: more words around it than the drafter expects, then it is copied."""
    begins = [value == "1" for value in "11100010110111110001111111111001101110110000"]
    return joined(told_text(begins), streaks(0.9, seed, LENGTH - len(begins)))


@dataclass(frozen=True)
class World:
    costs: Costs
    text: Callable[[int], Text]  # by seed
    rows: int = 1
    near: float = 0.95  # share of the best constant length's rate that is wanted
    prompt: int = 100  # tokens

    def run(self, policy: DraftLengthPolicy, *, seed: int = 0, **changes: float) -> Run:
        texts = [self.text(10 * seed + row) for row in range(self.rows)]
        return simulate(policy, texts, replace(self.costs, **changes), prompt=self.prompt, seed=seed)


WORLDS = {
    "model, nearly always right": World(MODEL, lambda seed: even_text(LENGTH, 0.85, seed)),
    "model, often right": World(MODEL, lambda seed: even_text(LENGTH, 0.6, seed)),
    "model, seldom right": World(MODEL, lambda seed: even_text(LENGTH, 0.25, seed)),
    "model, never right": World(MODEL, lambda seed: even_text(LENGTH, 0.0, seed)),
    "free drafts, nearly always right": World(FREE, lambda seed: even_text(LENGTH, 0.9, seed)),
    "free drafts, always right": World(FREE, lambda seed: even_text(LENGTH, 1.0, seed)),
    "free drafts, seldom right": World(FREE, lambda seed: even_text(LENGTH, 0.2, seed)),
    "drafter as dear as the target": World(DEAR, lambda seed: even_text(LENGTH, 0.8, seed)),
    "every token costs": World(STEEP, lambda seed: even_text(LENGTH, 0.7, seed)),
    "the first draft costs most": World(JUMP, lambda seed: even_text(LENGTH, 0.7, seed)),
    "copies, long": World(FREE, lambda seed: copied_text(LENGTH, 0.8, 40, seed)),
    # Seven copies, most drafts before them wrong: little to learn from.
    "copies, short and rare": World(FREE, lambda seed: copied_text(LENGTH, 0.3, 20, seed), near=0.92),
    "false matches": World(STEEP, lambda seed: copied_text(LENGTH, 0.0, 1, seed, false_matches=0.5)),
    "eight rows, free drafts": World(FREE, lambda seed: even_text(300, 0.8, seed), rows=8),
    "eight rows, never right": World(MODEL, lambda seed: even_text(300, 0.0, seed), rows=8),
    "eight rows, copies": World(FREE, lambda seed: copied_text(300, 0.8, 40, seed), rows=8),
    # What a token more costs is far less here than one would guess.
    "thirty rows, cheap tokens": World(CHEAP, lambda seed: even_text(300, 0.9, seed), rows=30, near=0.85),
    # A draft model that reads 64 tokens before it begins, which takes as long as three steps.
    "reads first, often right": World(MEASURED, lambda seed: streaks(0.87, seed), prompt=850),
    "reads first, learns": World(
        MEASURED, lambda seed: read_text(LENGTH, agreement_by_read, seed, runs=0.4), prompt=850
    ),
    "reads first, a coin's toss": World(MEASURED, lambda seed: streaks(0.5, seed), prompt=850),
    "reads first, begins badly": World(MEASURED, bad_beginning, prompt=850),
    "two drafts pay, one does not": World(NARROW, lambda seed: streaks(0.87, seed)),
    # Without the drafter's opinion the best constant length gives less.
    "knows when to stop": World(
        MODEL, lambda seed: opinionated_text(LENGTH, (0.99, 0.99, 0.99, 0.2), seed), near=1.05
    ),
    "sure of what is wrong": World(MODEL, lambda seed: opinionated_text(LENGTH, (0.6,), seed, opinion=0.99)),
    "unsure of what is right": World(
        MODEL, lambda seed: opinionated_text(LENGTH, (0.9,), seed, opinion=0.35)
    ),
    "reads first, eight rows": World(BATCHED, lambda seed: streaks(0.87, seed, 128), rows=8, prompt=850),
}


@pytest.mark.parametrize("name", WORLDS)
def test_it_comes_near_the_best_constant_length_and_never_costs(name: str) -> None:
    comes_near_the_best(WORLDS[name])


def comes_near_the_best(world: World) -> None:
    constants = {length: world.run(FixedLength(length)).rate for length in CONSTANTS}
    adaptive = world.run(AdaptiveLength()).rate
    assert adaptive >= world.near * max(constants.values())
    assert adaptive >= 0.98 * constants[0]  # of 500 tokens 5 and 3 may be lost by trials


@pytest.mark.parametrize("name", ["model, nearly always right", "model, never right", "copies, long"])
def test_disturbed_measurements_do_not_mislead_it(name: str) -> None:
    """One step in thirty takes three times as long, all of them are off by a twentieth."""
    world = WORLDS[name]
    constants = {length: world.run(FixedLength(length), seed=1).rate for length in CONSTANTS}
    adaptive = world.run(AdaptiveLength(), seed=1, noise=0.05, disturbed=0.03).rate
    assert adaptive >= 0.93 * max(constants.values())
    assert adaptive >= 0.98 * constants[0]


def test_it_stops_when_the_text_changes_for_the_worse() -> None:
    world = World(MODEL, lambda seed: joined(even_text(300, 0.9, seed), even_text(600, 0.05, seed)))
    lengths = [row for [row] in world.run(AdaptiveLength()).lengths]
    drafting = [index for index, length in enumerate(lengths) if length > 0]
    change = len(lengths) - 600  # about: each step of the second part brings one token
    assert statistics.fmean(lengths[20 : change - 20]) > 1.5
    late = [index for index in drafting if index > change + 40]
    assert len(late) < 0.05 * 560


def test_it_starts_again_when_the_text_changes_for_the_better() -> None:
    world = World(MODEL, lambda seed: joined(even_text(400, 0.05, seed), even_text(600, 0.9, seed)))
    lengths = [row for [row] in world.run(AdaptiveLength()).lengths]
    start = next(index for index in range(380, len(lengths)) if min(lengths[index : index + 5]) > 0)
    assert start < 400 + 120


def test_one_step_that_took_far_too_long_does_not_end_all_trials() -> None:
    class Disturbed(AdaptiveLength):
        """Its sixth step with drafts is held up for a minute."""

        steps = 0

        def observe(self, step: SpeculationStep) -> None:
            self.steps += step.draft_seconds > 0.0
            if self.steps == 6 and step.draft_seconds > 0.0:
                step = replace(step, draft_seconds=60.0)
            super().observe(step)

    text = joined(even_text(200, 0.0, 1), even_text(600, 0.9, 1))
    policy = Disturbed()
    lengths = [row for [row] in simulate(policy, [text], MODEL).lengths]
    assert policy.steps > 6
    assert any(min(lengths[index : index + 5]) > 0 for index in range(200, 320))


def test_steps_that_were_slow_at_first_do_not_make_drafts_look_cheap() -> None:
    """Eight rows that keep the processor busy, so that even good drafts hardly pay."""

    def forward(rows: int, tokens: int) -> float:
        return 0.010 + 0.008 * tokens + 0.003 * (tokens > 8)

    class Disturbed(AdaptiveLength):
        num_slow = 0

        def observe(self, step: SpeculationStep) -> None:
            if self.num_slow > 0:
                self.num_slow -= 1
                step = replace(step, forward_seconds=2.5 * step.forward_seconds)
            super().observe(step)

    costs = Costs(forward, lookup, first_tokens=0)
    for seed in range(8):
        texts = [with_copies(even_text(128, 0.6, 8 * seed + row), 8, row, share=0.4) for row in range(8)]
        plain = simulate(FixedLength(0), texts, costs).rate
        for num_slow, near in ((1, 0.99), (2, 0.95), (12, 0.99)):
            policy = Disturbed()
            policy.num_slow = num_slow
            assert simulate(policy, texts, costs).rate >= near * plain


def test_drafts_that_gain_next_to_nothing_are_left_alone() -> None:
    """Each is right, and takes 0.95 of the time of a step: measurements are not as exact as that."""
    costs = Costs(lambda rows, tokens: 0.0005 + 0.0095 * tokens, lookup, first_tokens=0)
    lengths = simulate(AdaptiveLength(), [even_text(1000, 1.0, 1)], costs).lengths
    assert sum(row > 0 for [row] in lengths) < 0.02 * len(lengths)


def test_steps_without_drafts_are_timed_the_more_often_the_less_drafts_gain() -> None:
    shares = []
    for chance in (0.95, 0.65):
        lengths = simulate(AdaptiveLength(), [even_text(2000, chance, 1)], STEEP).lengths[20:]
        num_plain = sum(row == 0 for [row] in lengths)
        shares.append(num_plain / len(lengths))
    assert shares[0] < 0.02 < shares[1] < 0.1


def test_nothing_is_read_for_an_answer_that_is_about_to_end() -> None:
    for num_left, drafts in ((8, 2), (7, 0)):  # 64 tokens are guessed to take as long as two steps
        policy = AdaptiveLength()
        for number in range(3):
            demand = DraftDemand(
                RequestId("a"), 900 + number, 8, num_behind=64, num_output=100 + number, num_left=num_left
            )
            lengths = policy.lengths([demand])
            policy.observe(SpeculationStep((DraftResult(demand.id, 0, 0),), 1, 1, 0, 900, 0.0, 0.05))
        assert lengths == [drafts]


def test_a_good_drafter_does_not_read_for_a_short_answer() -> None:
    for seed in range(3):
        policy, text = AdaptiveLength(), even_text(12, 0.95, seed + 1)
        simulate(policy, [streaks(0.95, seed)], MEASURED, prompt=850)
        plain, run = (
            simulate(each, [text], MEASURED, prompt=850, first_id=1) for each in (FixedLength(0), policy)
        )
        assert run.rate >= 0.98 * plain.rate


def test_what_was_slow_when_it_was_seen_is_tried_again() -> None:
    """In the first forty steps those with more than two tokens take half as long again."""
    text, num_steps = streaks(0.8, 2, 1500), 0

    def forward(rows: int, tokens: int) -> float:
        nonlocal num_steps
        num_steps += 1
        is_slow = tokens > 2 and num_steps <= 40
        return (0.036 if tokens == 1 else 0.027 + 0.009 * tokens) * (1.5 if is_slow else 1.0)

    costs = Costs(forward, lambda rows: 0.012, first_pass=0.002)
    adaptive = simulate(AdaptiveLength(), [text], costs).rate
    constants = [simulate(FixedLength(length), [text], costs).rate for length in CONSTANTS]
    assert adaptive >= 0.97 * max(constants) > 1.02 * constants[0]


def test_every_group_of_rows_has_its_steps_without_drafts() -> None:
    """So have two rows that always draft, though steps with three rows are plain all the time."""
    policy, lengths = AdaptiveLength(), []
    for number in range(2000):
        rows = 2 + number % 2
        demands = [DraftDemand(RequestId(str(row)), 100 + number, 8 * (rows == 2)) for row in range(rows)]
        drafts = policy.lengths(demands)
        if rows == 2:
            lengths.append(drafts)
        tokens = rows + sum(drafts)
        results = tuple(DraftResult(demand.id, n, n) for demand, n in zip(demands, drafts, strict=True))
        seconds = (0.002 * max(drafts), 0.03 + 0.001 * tokens)
        policy.observe(SpeculationStep(results, rows, tokens, 0, 300, *seconds))
    plain = [index for index, drafts in enumerate(lengths) if not any(drafts)]
    assert sum(map(any, lengths)) > 900
    assert plain[-1] > len(lengths) - FORGET_AFTER - 1
    assert max(after - before for before, after in pairwise(plain)) <= FORGET_AFTER
    assert policy._forward.curve(2).num_plain > PLAIN_FIRST, "they are not forgotten between"


@pytest.mark.parametrize("seed", [2, 5, 7])
def test_a_few_lucky_measurements_do_not_fill_a_step_with_drafts(seed: int) -> None:
    """Sixteen rows whose drafts cost half a step each and are never right, where measurements say little."""
    costs = Costs(
        lambda rows, tokens: 1.0 + 0.05 * (rows - 1) + 0.5 * (tokens - rows),
        lambda rows: 0.1 + 0.002 * rows,
        catch_up=0.001,
        first_tokens=64,
        noise=0.2,
        disturbed=0.1,
    )
    texts = [even_text(200, 0.0, row) for row in range(16)]
    run = simulate(AdaptiveLength(), texts, costs, seed=seed)
    most = FIRST_TRIAL * (1 + LARGEST_GROWTH)
    assert max(map(sum, run.lengths)) <= most + MAX_TRIAL, "beside them one more row may be tried"
    assert run.seconds <= 1.06 * 200 * costs.forward(16, 16)


def test_with_a_free_drafter_it_starts_again_within_a_few_steps() -> None:
    text = joined(even_text(300, 0.0, 1), even_text(300, 1.0, 1))
    lengths = [row for [row] in simulate(AdaptiveLength(), [text], STEEP).lengths]
    start = next(index for index in range(290, len(lengths)) if min(lengths[index : index + 3]) > 0)
    assert start < 300 + 60


def test_good_rows_draft_and_bad_rows_do_not() -> None:
    texts = [even_text(300, 0.9 if row % 2 else 0.05, row) for row in range(4)]
    run = simulate(AdaptiveLength(), texts, Costs(memory_bound, lookup, first_tokens=0))
    both = [lengths for lengths in run.lengths[30:] if len(lengths) == 4]
    good = statistics.fmean(lengths[1] + lengths[3] for lengths in both)
    bad = statistics.fmean(lengths[0] + lengths[2] for lengths in both)
    assert good > 4.0
    assert bad < 0.5


def test_a_drafter_that_would_have_to_catch_up_at_a_high_price_is_left_alone() -> None:
    """A prompt that takes the drafter as long as thirty steps is caught up with once, to see, and not again
    after every pause."""
    costs = replace(MODEL, catch_up=0.01, first_tokens=None)
    text, prompt = even_text(LENGTH, 0.05, 3), 100 - TRIAL_AFTER
    plain = simulate(FixedLength(0), [text], costs, prompt=prompt)
    run = simulate(AdaptiveLength(), [text], costs, prompt=prompt)
    entry = 1.0 + 3 * 0.06  # seconds: the prompt, and the drafts that were wrong
    assert run.seconds <= plain.seconds * 1.012 + entry


def test_short_requests_one_after_the_other_get_drafts_too() -> None:
    """None of them comes as far as a row has to be for a trial of a drafter that reads first."""
    costs = replace(MODEL, catch_up=0.0005, first_tokens=64)
    for length in (30, 50):
        policies = FixedLength(0), AdaptiveLength()
        texts = [streaks(0.9, number, length) for number in range(60)]
        seconds = [
            sum(
                simulate(policy, [text], costs, prompt=300, first_id=n).seconds
                for n, text in enumerate(texts)
            )
            for policy in policies
        ]
        assert seconds[0] > 1.15 * seconds[1]


def test_where_long_answers_were_tried_a_new_one_waits_for_its_turn() -> None:
    """Their drafts were never right, and much time has passed since."""
    policy, costs = AdaptiveLength(), replace(MODEL, catch_up=0.0005, first_tokens=64)
    simulate(policy, [even_text(3000, 0.0, 1)], costs, prompt=300)
    [lengths] = zip(
        *simulate(policy, [even_text(200, 0.0, 2)], costs, prompt=300, first_id=1).lengths, strict=True
    )
    assert not any(lengths[:TRIAL_AFTER])


def test_one_row_does_not_spend_what_many_have_saved() -> None:
    """In a batch a token's time is a fraction of a step, with a single row it is all of it."""
    policy = AdaptiveLength()
    simulate(policy, [even_text(2000, 0.0, row) for row in range(30)], MODEL)
    text = even_text(LENGTH, 0.0, 1)
    plain, run = (simulate(each, [text], MODEL, first_id=100) for each in (FixedLength(0), policy))
    assert run.rate >= 0.95 * plain.rate


def test_that_a_drafter_has_read_nothing_yet_does_not_make_reading_cheap() -> None:
    """It worked for texts so short that they were read by the way."""
    costs = replace(MEASURED, forward=with_cheap_tokens, draft_pass=lambda rows: 0.005, catch_up=0.002)
    policy = AdaptiveLength()
    simulate(policy, [streaks(0.9, row, 60) for row in range(8)], costs, prompt=4)
    texts = [streaks(0.9, row, 128) for row in range(8)]
    lengths = simulate(policy, texts, costs, prompt=850, first_id=100).lengths
    assert sum(length > 0 for length in next(filter(any, lengths))) == 1


def test_what_one_request_taught_spares_the_next_one() -> None:
    policy = AdaptiveLength()
    first, *_, last = [
        simulate(policy, [even_text(100, 0.0, number)], MODEL, first_id=number) for number in range(12)
    ]
    drafts = [sum(length for [length] in run.lengths) for run in (first, last)]
    assert drafts[1] < drafts[0]


def test_l8_drafting_that_cannot_pay_falls_to_zero_and_the_loss_is_bounded() -> None:
    """A target as small as its drafter, and a drafter that is as often wrong as right."""
    costs = Costs(lambda rows, tokens: 0.004 + 0.0001 * tokens, lambda rows: 0.004)
    text = even_text(1000, 0.5, 5)
    plain, run = simulate(FixedLength(0), [text], costs), simulate(AdaptiveLength(), [text], costs)
    assert run.rate >= 0.985 * plain.rate
    assert sum(length > 0 for [length] in run.lengths[50:]) <= 0.03 * len(run.lengths)
    fixed = simulate(create_policy("fixed"), [text], costs)
    assert fixed.rate < 0.6 * plain.rate


def test_a_new_drafter_is_tried_with_one_row_until_its_cost_is_known() -> None:
    texts = [even_text(200, 0.9, row) for row in range(2)]
    run = simulate(AdaptiveLength(), texts, replace(MEASURED, forward=memory_bound), prompt=850)
    first = next(step for step, lengths in enumerate(run.lengths) if any(lengths))
    assert first == TRIAL_AFTER, "only then a text shows what it is like"
    assert run.lengths[first : first + 2] == [[2, 0], [2, 0]], "read; and a pass by itself"
    assert all(run.lengths[first + 2])


def test_rows_that_have_to_be_read_for_join_one_after_the_other() -> None:
    """Reading for all of them at once would hold them up for longer than a step takes."""
    costs = replace(MEASURED, forward=with_cheap_tokens, catch_up=0.001)
    texts = [even_text(600, 0.95, row) for row in range(8)]
    lengths = simulate(AdaptiveLength(), texts, costs, prompt=850).lengths
    joined_in = [next(step for step, rows in enumerate(lengths) if rows[row] > 0) for row in range(8)]
    assert len(set(joined_in)) == 8
    assert max(joined_in) < min(joined_in) + 20


def test_many_rows_wait_with_a_new_drafter_that_has_to_read() -> None:
    """Nobody knows how long that takes them all; enough must have been saved for a guess."""
    texts = [even_text(600, 0.0, row) for row in range(8)]
    lengths = simulate(AdaptiveLength(), texts, MEASURED, prompt=850).lengths
    first = next(step for step, rows in enumerate(lengths) if any(rows))
    assert 1000 < 8 * first < 3000


def test_more_rows_than_were_timed_with_drafts_are_tried_with_one_of_them() -> None:
    """With eight, each draft costs a good part of a step, and all rows would have to read first."""

    def forward(rows: int, tokens: int) -> float:
        return 0.025 + 0.005 * rows + 0.009 * (tokens - rows) * (rows / 8) ** 0.5

    costs = replace(MEASURED, forward=forward, catch_up=0.001)
    texts = [streaks(0.9, row, 128) for row in range(8)]
    policy = AdaptiveLength()
    simulate(policy, [streaks(0.9, 10 + row, 6) for row in range(2)], costs, prompt=850, first_id=100)
    plain, run = (simulate(each, texts, costs, prompt=850) for each in (FixedLength(0), policy))
    assert run.rate >= 0.98 * plain.rate

    policy = AdaptiveLength()
    simulate(policy, texts[:2], FREE, first_id=100)
    lengths = simulate(policy, texts, FREE).lengths
    assert sum(length > 0 for length in next(filter(any, lengths))) == 1


def test_a_drafter_that_was_silent_for_long_is_asked_again() -> None:
    silent = replace(told_text([False] * 120), proposes=[False] * 120)
    for rows in (1, 8, 30):
        texts = [joined(silent, even_text(300, 1.0, row)) for row in range(rows)]
        run = simulate(AdaptiveLength(), texts, CHEAP)
        assert run.rate >= 1.5 * simulate(FixedLength(0), texts, CHEAP).rate


def test_a_drafter_that_seldom_has_a_proposal_is_not_given_up() -> None:
    for seed in range(5):
        rng = random.Random(seed)
        text = replace(even_text(2000, 1.0, seed), proposes=[rng.random() < 0.04 for _ in range(2000)])
        run = simulate(AdaptiveLength(), [text], FREE)
        assert any(lengths != [0] for lengths in run.lengths[-50:])


def reads_all(text: Text, rows: int = 1, **changes: Any) -> bool:
    """Whether the drafter is told to, with a prompt of 850 tokens, of which it begins with 64."""
    told = False

    class Watched(AdaptiveLength):
        def readers(self) -> frozenset[RequestId]:
            nonlocal told
            told |= bool(super().readers())
            return super().readers()

    simulate(Watched(), [text] * rows, replace(FAST_READER, **changes), prompt=850)
    return told


def test_a_drafter_reads_all_of_a_text_if_that_may_pay() -> None:
    text = read_text(LENGTH, agreement_by_read, 1, runs=0.4)
    assert reads_all(text)
    assert not reads_all(text, catch_up=0.005), "reading takes too long"
    assert not reads_all(text, rows=8), "it would hold up all other rows"
    assert not reads_all(read_text(100, agreement_by_read, 1, runs=0.4)), "hardly anything is to come"
    assert not reads_all(even_text(LENGTH, 0.3, 1)), "it is mostly wrong"


def test_a_drafter_that_is_as_often_wrong_as_right_hardly_ever_reads_all_of_a_text() -> None:
    """Some of these texts begin well, and bring enough accepted drafts before the drafter is given up."""

    def forward(rows: int, tokens: int) -> float:
        return 0.040 if tokens == 1 else 0.0325 + 0.0065 * tokens

    costs = {"forward": forward, "draft_pass": lambda rows: 0.0115, "first_pass": 0.002}
    assert sum(reads_all(even_text(LENGTH, 0.5, seed, runs=0.4), **costs) for seed in range(60)) <= 3


def test_drafting_goes_on_after_reading_a_very_long_text() -> None:
    text = read_text(2000, agreement_by_read, 1, runs=0.4)
    lengths = [row for [row] in simulate(AdaptiveLength(), [text], FAST_READER, prompt=4000).lengths]
    assert statistics.fmean(lengths[-200:]) > 2.0


def test_one_row_reads_all_of_its_text_at_a_time() -> None:
    class Watched(AdaptiveLength):
        def __init__(self) -> None:
            super().__init__()
            self.readings: list[int] = []

        def readers(self) -> frozenset[RequestId]:
            self.readings.append(len(super().readers()))
            return super().readers()

    policy = Watched()
    texts = [read_text(1500, agreement_by_read, row, runs=0.4) for row in range(2)]
    simulate(policy, texts, replace(MODEL, catch_up=0.0003, first_tokens=64), prompt=850)
    assert max(policy.readings) == 1
    assert sum(policy.readings) == 2


def test_reading_all_of_a_text_makes_up_for_the_time_it_takes() -> None:
    slow = replace(FAST_READER, catch_up=0.005)
    gains = []
    for seed in range(8):
        text = read_text(LENGTH, agreement_by_read, seed, runs=0.4)
        rates = [simulate(AdaptiveLength(), [text], costs, prompt=850).rate for costs in (slow, FAST_READER)]
        gains.append(rates[1] / rates[0])
    assert min(gains) > 0.98
    assert statistics.fmean(gains) > 1.04


def test_a_drafter_that_is_always_wrong_loses_what_was_set_aside_for_trials_and_no_more() -> None:
    for costs in (MODEL, MEASURED, lookup_costs(TODAY)):
        text = even_text(1000, 0.0, 7)
        plain, run = (simulate(policy, [text], costs) for policy in (FixedLength(0), AdaptiveLength()))
        token = plain.seconds / 1000
        entry = costs.catch_up * 64 + 2 * costs.draft_pass(1)  # what nobody could know
        assert run.seconds - plain.seconds <= entry + token * (FIRST_SAVINGS + TRIAL_SHARE * 1000 + 1)


def test_a_row_whose_drafts_have_brought_something_is_given_up_later() -> None:
    def drafting_steps(text: Text) -> int:
        run = simulate(AdaptiveLength(), [text], MEASURED)
        return sum(length > 0 for [length] in run.lengths)

    good, bad = streaks(0.95, 1, 200), even_text(200, 0.0, 1)
    new, proven = drafting_steps(bad), drafting_steps(joined(good, bad)) - drafting_steps(good)
    assert 5 <= new < 15 <= proven < 40


def test_only_a_step_with_drafts_that_pay_has_a_least_confidence() -> None:
    text = opinionated_text(LENGTH, (0.99, 0.5), 3)

    found: dict[int, set[float]] = {}

    class Watched(AdaptiveLength):
        def lengths(self, rows: Sequence[DraftDemand]) -> list[int]:
            lengths = super().lengths(rows)
            found.setdefault(min(lengths[0], FIRST_TRIAL + 1), set()).add(self.least_confidence())
            return lengths

    simulate(Watched(), [text], MODEL)
    assert found[0] == {0.0}, "in steps without drafts"
    assert 0.0 in found[FIRST_TRIAL], "in the first trials"
    assert all(0.0 < confidence <= MOST_SURE for confidence in found[FIRST_TRIAL + 1])


def test_a_drafter_of_several_rows_is_not_told_how_sure_it_has_to_be() -> None:
    several: list[float] = []

    class Watched(AdaptiveLength):
        def lengths(self, rows: Sequence[DraftDemand]) -> list[int]:
            lengths = super().lengths(rows)
            if sum(length > 0 for length in lengths) > 1:
                several.append(self.least_confidence())
            return lengths

    simulate(Watched(), [opinionated_text(LENGTH, (0.99, 0.5), seed) for seed in range(2)], MODEL)
    assert len(several) > LENGTH // 4
    assert set(several) == {0.0}


def test_what_is_at_hand_is_drafted_where_working_drafts_out_does_not_pay() -> None:
    """Whether they would be wrong, or right and slow; beside rows that have nothing at hand too."""
    for costs, rows, chance, gain in (
        (DEAR, 1, 0.0, 1.5),
        (MEASURED, 1, 0.0, 1.35),
        (DEAR, 4, 0.0, 1.25),
        (DEAR, 4, 0.95, 1.25),
        (replace(DEAR, first_tokens=None), 1, 0.0, 1.5),  # has too much to read to be tried
    ):
        new = [even_text(LENGTH, chance, row) for row in range(rows)]
        texts = [with_copies(text, 8, row, share=0.5) for row, text in enumerate(new)]
        plain, alone = (
            simulate(policy, new, costs, prompt=850) for policy in (FixedLength(0), AdaptiveLength())
        )
        run = simulate(AdaptiveLength(), texts, costs, prompt=850)
        assert run.rate >= gain * plain.rate
        assert run.num_worked_out <= 2.5 * alone.num_worked_out + 4


def test_what_was_copied_in_vain_does_not_end_what_is_worked_out() -> None:
    """Nor the other way round: each kind has its own trials."""
    new = even_text(LENGTH, 0.9, 1)
    wrong = replace(new, at_hand=[4, 0] * (LENGTH // 2), lookup_is_right=False)
    plain, alone, run = (
        simulate(policy, [text], MEASURED, prompt=850).rate
        for policy, text in ((FixedLength(0), new), (AdaptiveLength(), new), (AdaptiveLength(), wrong))
    )
    assert alone > 1.15 * plain
    assert run > 1.05 * plain


def test_costs_of_the_drafter_are_learned_from_what_it_works_out() -> None:
    """Rows with drafts at hand beside one without: what drafting takes is that one's alone."""
    policy = AdaptiveLength()
    ids = [RequestId("copies"), RequestId("new")]

    def step() -> list[int]:
        demands = [DraftDemand(ids[0], 100, 4, num_at_hand=4), DraftDemand(ids[1], 100, 8)]
        lengths = policy.lengths(demands)
        results = tuple(DraftResult(id, count, count) for id, count in zip(ids, lengths, strict=True))
        seconds = 0.02 * lengths[1]
        policy.observe(
            SpeculationStep(results, 2, 2 + sum(lengths), 0, 200, seconds, 0.05 + 0.001 * sum(lengths))
        )
        return lengths

    for _ in range(40):
        lengths = step()
    assert lengths[0] == 4
    assert policy._draft.pass_seconds(1, 0) == pytest.approx(0.02)


CHECKS: dict[str, Callable[[], None]] = {
    "at hand": test_what_is_at_hand_is_drafted_where_working_drafts_out_does_not_pay,
    "catching up is dear": test_a_drafter_that_would_have_to_catch_up_at_a_high_price_is_left_alone,
    "the text becomes better": test_it_starts_again_when_the_text_changes_for_the_better,
    "copied in vain": test_what_was_copied_in_vain_does_not_end_what_is_worked_out,
    "cost of what is worked out": test_costs_of_the_drafter_are_learned_from_what_it_works_out,
    "groups": test_every_group_of_rows_has_its_steps_without_drafts,
    "new drafter": test_a_new_drafter_is_tried_with_one_row_until_its_cost_is_known,
    "after a batch": test_one_row_does_not_spend_what_many_have_saved,
    "short before long": test_that_a_drafter_has_read_nothing_yet_does_not_make_reading_cheap,
    "slow at first": test_steps_that_were_slow_at_first_do_not_make_drafts_look_cheap,
    "next to nothing": test_drafts_that_gain_next_to_nothing_are_left_alone,
    "little gain": test_steps_without_drafts_are_timed_the_more_often_the_less_drafts_gain,
    "about to end": test_nothing_is_read_for_an_answer_that_is_about_to_end,
    "one after the other": test_rows_that_have_to_be_read_for_join_one_after_the_other,
    "many rows wait": test_many_rows_wait_with_a_new_drafter_that_has_to_read,
    "more rows": test_more_rows_than_were_timed_with_drafts_are_tried_with_one_of_them,
}


@pytest.mark.parametrize("name", MUTANTS)
def test_the_planted_bug_is_caught(name: str) -> None:
    mutant = MUTANTS[name]
    with mock.patch.object(mutant.owner, mutant.attribute, mutant.replacement):
        if mutant.broken_rule in WORLDS:
            with pytest.raises(AssertionError):
                comes_near_the_best(WORLDS[mutant.broken_rule])
        else:
            with pytest.raises((AssertionError, StopIteration)):
                CHECKS[mutant.broken_rule]()


def test_nothing_is_drafted_before_steps_without_drafts_were_timed() -> None:
    for seconds, expected in ((0.05, [0] * PLAIN_FIRST + [FIRST_TRIAL]), (0.0, [0] * 6)):
        policy, lengths = AdaptiveLength(), []
        assert policy.lengths([]) == []
        for number in range(len(expected)):
            demand = DraftDemand(RequestId("a"), 10 + number, 8)
            lengths += policy.lengths([demand])
            policy.observe(SpeculationStep((DraftResult(demand.id, 0, 0),), 1, 1, 0, 10, 0.0, seconds))
        assert lengths == expected
