"""How many threads work while others want their cores, in simulated worlds of two kinds of calls."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from mvllm.backends.cpu.team_size import TeamSize

UNDISTURBED_S = 0.01
"""What a call takes with all threads on cores of their own."""


def run(size: TeamSize, seconds: float, stolen: Callable[[float], int], threads: int) -> list[int]:
    """Call until `seconds` have passed; the number of working threads of each call.

    `stolen(now)` cores belong to others. A thread without a core of its own takes twice as long, and the
    others wait for it.
    """
    now, working = 0.0, []
    while now < seconds:
        working.append(size.working)
        alone = UNDISTURBED_S * threads / size.working
        is_late = size.working > threads - stolen(now)
        size.observe(2 * alone if is_late else alone, alone * (size.working - 1) if is_late else 0.0)
        now += 2 * alone if is_late else alone
    return working


def test_an_undisturbed_team_stays_whole() -> None:
    assert set(run(TeamSize(4), 10, lambda now: 0, 4)) == {4}


def test_a_single_thread_stays_whatever_happens() -> None:
    size = TeamSize(1)
    for _ in range(100):
        size.observe(1.0, 1.0)
    assert size.working == 1


def test_a_moment_of_waiting_changes_nothing() -> None:
    size = TeamSize(2)
    for call in range(1000):
        size.observe(UNDISTURBED_S, 0.008 if call % 10 == 0 else 0.0)
        assert size.working == 2


def test_while_a_core_is_stolen_one_thread_less_works_almost_always() -> None:
    working = run(TeamSize(2), 60, lambda now: 1, 2)
    assert working.count(1) > 0.97 * len(working)


def test_as_many_threads_leave_as_cores_are_stolen() -> None:
    working = run(TeamSize(8), 60, lambda now: 3, 8)
    assert min(working) == 5
    assert working.count(5) > 0.9 * len(working)


def test_all_are_back_soon_after_the_cores_are() -> None:
    for until in (0.2, 2.0, 60.0):
        size = TeamSize(2)
        run(size, until, lambda now: 1, 2)
        rest = run(size, 20, lambda now: 0, 2)
        assert set(rest[-500:]) == {2}
        assert rest.count(1) * UNDISTURBED_S * 2 <= 8.1, "the longest rest"


@given(st.integers(1, 8), st.lists(st.tuples(st.floats(0, 2), st.floats(0, 2)), max_size=200))
def test_there_is_always_a_thread_and_never_more_than_all(
    threads: int, calls: list[tuple[float, float]]
) -> None:
    size = TeamSize(threads)
    for seconds, waited_s in calls:
        size.observe(seconds, waited_s)
        assert 1 <= size.working <= threads
