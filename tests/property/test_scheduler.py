"""The scheduler against its rules: on random consistent views, and on the states a simulation reaches."""

from __future__ import annotations

import copy

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mvllm.core.sched.policy import POLICIES
from mvllm.core.step import SchedulerView, StepPlan
from mvllm.core.types import RequestId
from tests.property.scheduler_rules import check_all
from tests.property.scheduler_simulation import ModelPool, PoolFactory, RealPool, Simulation, Tokens
from tests.strategies import SchedulerLimits, scheduler_cases, scheduler_limits, scheduler_views

Case = tuple[SchedulerLimits, SchedulerView]
PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=10).map(tuple)
ALIKE_PROMPTS = st.integers(1, 12).map(lambda length: (0,) * length)
REQUESTS = st.tuples(st.one_of(ALIKE_PROMPTS, PROMPTS), st.integers(1, 12), st.integers(0, 2))
AMPLE = SchedulerLimits(max_num_batched_tokens=16, max_num_seqs=8, block_size=4, num_blocks=200)


@settings(max_examples=4 * settings.default.max_examples)  # one run for all of the rules
@given(case=scheduler_cases())
def test_the_plan_of_any_consistent_view_keeps_every_rule(case: Case) -> None:
    limits, view = case
    check_all(limits, view, limits.scheduler().plan(view))


@given(data=st.data(), limits=scheduler_limits())
def test_s5_planning_is_pure_and_equal_views_give_equal_plans_after_any_history(
    data: st.DataObject, limits: SchedulerLimits
) -> None:
    view = data.draw(scheduler_views(limits))
    before = copy.deepcopy(view)
    expected = limits.scheduler().plan(view)
    scheduler = limits.scheduler()
    for other in data.draw(st.lists(scheduler_views(limits), max_size=3)):
        scheduler.plan(other)
    assert scheduler.plan(view) == expected == scheduler.plan(copy.deepcopy(view))
    assert view == before


class SchedulerMachine(RuleBasedStateMachine):
    """Arrivals, cancels, early ends and steps in any order; each step checks every rule and the grant."""

    simulation: Simulation

    @initialize(
        limits=scheduler_limits(),
        make_pool=st.sampled_from([ModelPool, RealPool]),
        caching=st.booleans(),
        window=st.sampled_from([None, 1, 2]),
    )
    def start(
        self, limits: SchedulerLimits, make_pool: PoolFactory, caching: bool, window: int | None
    ) -> None:
        self.simulation = Simulation(limits, make_pool, caching=caching, window=window)

    @rule(requests=st.lists(REQUESTS, min_size=1, max_size=4))
    def submit(self, requests: list[tuple[Tokens, int, int]]) -> None:
        for prompt, max_tokens, max_drafts in requests:
            self.simulation.submit(prompt, max_tokens, max_drafts)

    @precondition(lambda self: self.simulation.live)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.simulation.cancel(data.draw(st.sampled_from([request.id for request in self.simulation.live])))

    @rule(accepted_drafts=st.integers(0, 2))
    def step(self, accepted_drafts: int) -> None:
        self.simulation.step(accepted_drafts)

    @precondition(lambda self: self.simulation.live)
    @rule(data=st.data())
    def step_in_which_one_stops(self, data: st.DataObject) -> None:
        stops = data.draw(st.sampled_from([request.id for request in self.simulation.live]))
        self.simulation.step(stops=frozenset([stops]))

    @invariant()
    def every_request_ends_in_time(self) -> None:
        if self.simulation.limits.admission == "optimistic":
            for request in self.simulation.live:
                assert len(self.simulation.plans) < request.deadline, f"S10: {request.id} is starved"

    @invariant()
    def without_followers_the_running_requests_are_the_oldest(self) -> None:
        if not self.simulation.caching:
            running = [request.running for request in self.simulation.live]
            assert running == sorted(running, reverse=True), "S8: a younger request runs before an older one"

    def teardown(self) -> None:
        if hasattr(self, "simulation"):
            self.simulation.drain()
            pool = self.simulation.pool
            assert pool.num_free + pool.num_idle == self.simulation.limits.num_blocks


TestEveryReachableStateKeepsS1ToS15AndDrainsWithinTheS10Bound = SchedulerMachine.TestCase


@given(
    limits=scheduler_limits(),
    prompts=st.lists(st.tuples(PROMPTS, st.integers(1, 12)), min_size=1, max_size=8),
)
def test_s10_a_drain_takes_at_most_the_sum_of_all_total_limits(
    limits: SchedulerLimits, prompts: list[tuple[Tokens, int]]
) -> None:
    simulation = Simulation(limits)
    for prompt, max_tokens in prompts:
        simulation.submit(prompt, max_tokens)
    simulation.drain()


@given(limits=scheduler_limits(), prompt=PROMPTS, max_tokens=st.integers(1, 12), data=st.data())
def test_s10_a_stream_of_younger_arrivals_does_not_starve_an_older_request(
    limits: SchedulerLimits, prompt: Tokens, max_tokens: int, data: st.DataObject
) -> None:
    assume(limits.admission == "optimistic")
    simulation = Simulation(limits)
    first = simulation.submit(prompt, max_tokens)
    assume(first is not None)
    for _ in range(len(prompt) + max_tokens):
        simulation.submit(data.draw(PROMPTS), 3)
        simulation.step()
    assert first in simulation.finished_at


@given(
    blocks=st.integers(1, 6),
    block_size=st.integers(1, 4),
    num_prompt=st.integers(1, 30),
    max_tokens=st.integers(1, 30),
)
def test_s11_a_request_is_refused_exactly_if_alone_it_exceeds_the_pool(
    blocks: int, block_size: int, num_prompt: int, max_tokens: int
) -> None:
    limits = SchedulerLimits(4, 2, block_size, blocks)
    cached = num_prompt + max_tokens - 1
    simulation = Simulation(limits)
    id = simulation.submit((0,) * num_prompt, max_tokens)
    assert (id is None) == (cached > blocks * block_size)
    simulation.drain()
    assert id is None or id in simulation.finished_at


def _prefill_of(id: RequestId, plans: list[StepPlan]) -> list[tuple[int, int]]:
    return [(row.start, row.end) for plan in plans for row in plan.rows if row.id == id]


@given(limits=scheduler_limits(), prompts=st.lists(PROMPTS, min_size=1, max_size=5))
def test_s13_chunks_are_contiguous_and_sum_to_the_prompt_less_its_cached_part(
    limits: SchedulerLimits, prompts: list[Tokens]
) -> None:
    simulation = Simulation(limits)
    ids = [simulation.submit(prompt, 1) for prompt in prompts]
    simulation.drain()
    hits = {a.id: len(a.hit_block_ids) for plan in simulation.plans for a in plan.admits}
    preempted = {id for plan in simulation.plans for id in plan.preempts}
    for id, prompt in zip(ids, prompts, strict=True):
        if id is not None and id not in preempted:
            chunks = _prefill_of(id, simulation.plans)
            assert [end for _, end in chunks[:-1]] == [start for start, _ in chunks[1:]]
            assert chunks[0][0] == hits[id] * limits.block_size
            assert chunks[-1][1] == len(prompt)


@given(
    prompt=st.lists(st.integers(0, 1), min_size=1, max_size=40).map(tuple),
    num_requests=st.integers(1, 10),
    policy=st.sampled_from(sorted(POLICIES)),
)
def test_s15_identical_prompts_that_arrive_together_are_computed_once(
    prompt: Tokens, num_requests: int, policy: str
) -> None:
    limits = SchedulerLimits(16, 8, 4, 200, policy=policy)
    simulation = Simulation(limits)
    for _ in range(num_requests):
        simulation.submit(prompt, 1)
    simulation.drain()
    computed = sum(row.count for plan in simulation.plans for row in plan.rows)
    length, block_size = len(prompt), limits.block_size
    tail = length - block_size * ((length - 1) // block_size)
    assert computed == length + (num_requests - 1) * tail


def test_s15_a_follower_takes_over_when_its_leader_is_cancelled() -> None:
    simulation = Simulation(AMPLE)
    prompt = (0, 1) * 15
    leader, follower = simulation.submit(prompt, 4), simulation.submit(prompt, 4)
    assert leader is not None
    assert [row.id for row in simulation.step().rows] == [leader]
    simulation.cancel(leader)
    plan = simulation.step()
    assert [(row.id, row.start) for row in plan.rows] == [(follower, 16)]


def test_s10_a_former_follower_that_becomes_the_oldest_displaces_a_younger_request_that_passed_it() -> None:
    simulation = Simulation(SchedulerLimits(16, 4, block_size=2, num_blocks=8))
    leader = simulation.submit((0,) * 3, 3)
    follower = simulation.submit((0,) * 12, 2)
    passer = simulation.submit((1,) * 3, 10)
    assert [row.id for row in simulation.step().rows] == [leader, passer]
    while leader not in simulation.finished_at:
        assert [row.id for row in simulation.step().rows] == [leader, passer]
    plan = simulation.step()
    assert (plan.preempts, [row.id for row in plan.rows]) == ((passer,), [follower])
    simulation.drain()
    assert {follower, passer} <= simulation.finished_at.keys()


@pytest.mark.parametrize("admission", ["optimistic", "reserve"])
def test_e1_a_request_that_can_never_fit_is_refused_and_those_behind_it_are_served(admission: str) -> None:
    simulation = Simulation(SchedulerLimits(32, 4, 16, 8, admission=admission))
    assert simulation.submit((0,) * 200, 5) is None
    ids = [simulation.submit((i,) * 10, 5) for i in range(3)]
    simulation.drain()
    assert set(simulation.finished_at) == set(ids)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_e3_a_stream_a_long_prompt_and_short_requests_all_advance(policy: str) -> None:
    """One request decodes, 2,000 prompt tokens arrive, then short requests; steps are counted."""
    simulation = Simulation(SchedulerLimits(64, 4, 16, 200, policy=policy), caching=False)
    stream = simulation.submit((0,), 200)
    simulation.step()
    long_prompt = simulation.submit((1,) * 2000, 2)
    short_ids = []
    for step in range(100):
        if step % 10 == 0:
            short_ids.append(simulation.submit((step % 2,) * 5, 5))
        plan = simulation.step()
        assert stream in {row.id for row in plan.rows}
    assert stream is not None and stream not in simulation.finished_at
    assert simulation.finished_at[long_prompt] <= 50  # type: ignore[index]
    assert set(short_ids[:5]) <= set(simulation.finished_at)
