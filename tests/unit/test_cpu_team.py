"""The cpu backend's threads: every one works, they meet, they sleep, they end, they survive forks."""

from __future__ import annotations

import gc
import multiprocessing
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numba import njit
from numpy.typing import NDArray

from mvllm.backends.cpu.atomics import atomic_add
from mvllm.backends.cpu.jit import native_function
from mvllm.backends.cpu.memory import LINE_BYTES
from mvllm.backends.cpu.pointers import i64_at
from mvllm.backends.cpu.team import (
    _CALL_STEP,
    _CLOSE,
    _FIRST_REST,
    _LONGEST_REST,
    _SLEEP,
    _WINDOW_BARRIERS,
    CONTROL,
    WORKER,
    Team,
    _adjust_share,
    _choose_spins,
    _latest,
    _learn_paces,
    _serve,
    _share_out,
    meet,
    share_of,
    worker_at,
)
from mvllm.backends.cpu.team_size import TeamSize

ROUNDS = 50


def _count_in_turns(argument: Any, worker: Any) -> None:
    """Every thread raises word 0 between two meetings, and adds what it then sees to a word of its own."""
    words, thread = i64_at(argument), worker_at(worker).thread
    for _ in range(ROUNDS):
        atomic_add(argument, 1)
        meet(worker)
        words[1 + thread] += words[0]
        meet(worker)


@pytest.fixture(scope="module")
def job() -> Iterator[int]:
    function = native_function("void(int64, int64)", _count_in_turns)
    yield int(function.address)


def seen_by_threads(threads: int, rounds: int) -> list[int]:
    """What every thread adds up if nobody passes a barrier early: threads, 2 threads, 3 threads, ..."""
    return [threads * rounds * (rounds + 1) // 2] * threads


class FixedSize(TeamSize):
    """So many work, whatever they report."""

    def observe(self, seconds: float, waited_s: float) -> None:
        """Decide nothing."""


def words() -> NDArray[np.int64]:
    return np.zeros(16, np.int64)


def workers_alive() -> int:
    return sum(thread.name.startswith("mvllm-cpu") for thread in threading.enumerate())


def wait_until(condition: Callable[[], bool]) -> None:
    for _ in range(1000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it never came to be")


@pytest.mark.parametrize("threads", [1, 2, 3, 4])
def test_all_threads_work_and_none_passes_a_barrier_early(threads: int, job: int) -> None:
    with closing(Team(threads, job)) as team:
        for run in range(1, 4):
            counts = words()
            team.run(counts.ctypes.data)
            assert counts[0] == threads * ROUNDS, run
            assert counts[1 : 1 + threads].tolist() == seen_by_threads(threads, ROUNDS)


@pytest.mark.parametrize("numbers", [(3, 1, 2, 3), (1, 3, 2, 2), (2, 2, 1, 1, 3)])
def test_a_call_may_count_on_fewer_threads(numbers: tuple[int, ...], job: int) -> None:
    size = FixedSize(3)
    with closing(Team(3, job, size)) as team:
        for working in numbers:
            size.working = working
            counts = words()
            assert team.run(counts.ctypes.data) == working
            assert counts[1:4].tolist() == seen_by_threads(working, ROUNDS) + [0] * (3 - working)


def test_a_thread_that_is_not_needed_goes_to_sleep_and_comes_back(job: int) -> None:
    size = FixedSize(2)
    with closing(Team(2, job, size)) as team:
        team.run(words().ctypes.data)
        crew = team._crew
        assert crew is not None
        size.working = 1

        def asleep_though_called() -> bool:
            team.run(words().ctypes.data)
            return crew.asleep() == 1

        wait_until(asleep_though_called)
        size.working = 2
        counts = words()
        team.run(counts.ctypes.data)
        assert counts[1:3].tolist() == seen_by_threads(2, ROUNDS)


def test_idle_threads_sleep_and_are_woken_by_the_next_call(job: int) -> None:
    with closing(Team(2, job)) as team:
        team.run(words().ctypes.data)
        crew = team._crew
        assert crew is not None
        wait_until(lambda: crew.asleep() == 1)
        before = time.process_time()
        time.sleep(0.2)
        assert time.process_time() - before < 0.15, "a sleeping worker burns its core"
        counts = words()
        team.run(counts.ctypes.data)
        assert counts[1:3].tolist() == seen_by_threads(2, ROUNDS)


def test_idle_threads_do_not_spin_while_another_team_is_at_work() -> None:
    latest, control, worker = np.zeros(1, np.int64), np.zeros(1, CONTROL), np.zeros(1, WORKER)
    control["latest"], control["spins"] = latest.ctypes.data, 1 << 40  # it would spin for ever
    worker["control"], worker["thread"] = control.ctypes.data, 1
    latest[0] = control.ctypes.data + 1
    assert _serve(worker.ctypes.data) == _SLEEP


def test_every_call_makes_its_team_the_latest(job: int) -> None:
    with closing(Team(2, job)) as first, closing(Team(2, job)) as second:
        for team in (first, second, first):
            team.run(words().ctypes.data)
            assert team._crew is not None
            assert _latest.view(np.int64)[0] == team._crew._control


def test_close_ends_all_threads_and_may_be_repeated(job: int) -> None:
    before = workers_alive()
    team = Team(3, job)
    team.run(words().ctypes.data)
    assert workers_alive() == before + 2
    team.close()
    team.close()
    assert workers_alive() == before


def _mark(argument: Any, worker: Any) -> None:
    atomic_add(argument, 1)


def test_a_thread_takes_part_in_the_last_call_though_the_team_is_closed() -> None:
    function = native_function("void(int64, int64)", _mark)
    marks, control, worker = np.zeros(1, np.int64), np.zeros(1, CONTROL), np.zeros(1, WORKER)
    control["job"], control["argument"] = function.address, marks.ctypes.data
    control["call"], control["closed"] = _CALL_STEP + 2, 1
    control["arrivals"], control["base"] = 1, 0  # the caller waits at the end of the call
    control["latest"] = marks.ctypes.data
    worker["control"], worker["thread"] = control.ctypes.data, 1
    assert _serve(worker.ctypes.data) == _CLOSE
    assert marks[0] == 1
    assert control["arrivals"][0] == 2


def test_threads_of_a_forgotten_team_end(job: int) -> None:
    before = workers_alive()
    team = Team(2, job)
    team.run(words().ctypes.data)
    del team
    gc.collect()
    assert workers_alive() == before


def test_a_team_that_never_ran_has_no_threads(job: int) -> None:
    before = workers_alive()
    with closing(Team(4, job)):
        assert workers_alive() == before


def test_teams_of_several_callers_run_at_once(job: int) -> None:
    def use_team(threads: int) -> list[int]:
        counts = words()
        with closing(Team(threads, job)) as team:
            for _ in range(5):
                team.run(counts.ctypes.data)
        return [int(count) for count in counts[: 1 + threads]]

    with ThreadPoolExecutor(3) as pool:
        for threads, counts in zip((2, 2, 1), pool.map(use_team, (2, 2, 1)), strict=True):
            assert counts == [5 * threads * ROUNDS, *seen_by_threads(threads, 5 * ROUNDS)]


def _run_in_child(team: Team, results: Any) -> None:
    counts = words()
    team.run(counts.ctypes.data)
    results.put((counts[:3].tolist(), workers_alive()))
    team.close()


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_starts_threads_of_its_own(job: int) -> None:
    fork = multiprocessing.get_context("fork")
    results = fork.SimpleQueue()
    with closing(Team(2, job)) as team:
        team.run(words().ctypes.data)
        child = fork.Process(target=_run_in_child, args=(team, results))
        child.start()
        child.join(30)
        assert child.exitcode == 0
        assert results.get() == ([2 * ROUNDS, *seen_by_threads(2, ROUNDS)], 1)
        counts = words()
        team.run(counts.ctypes.data)
        assert counts[0] == 2 * ROUNDS


_LONG, _SHORT = 1000, 200


class _Spins:
    """The control words of a team of two, told how often threads slept in each call."""

    def __init__(self) -> None:
        self._control, self._workers = np.zeros(1, CONTROL), np.zeros(2, WORKER)
        self._control["long_spins"], self._control["short_spins"] = _LONG, _SHORT
        self._control["spins"], self._control["rest_calls"] = _LONG, _FIRST_REST

    def after(self, naps: int, meetings: int, threads: int = 2, waited: float = 0.5) -> int:
        """How long to spin after a call in which each of so many threads slept at `naps` of `meetings`
        barriers and waited for a share of its time."""
        self._control["call"] = threads
        self._workers["naps"][:threads], self._workers["meetings"][:threads] = naps, meetings
        self._workers["took_ns"][:threads], self._workers["waited_ns"][:threads] = 10**6, int(waited * 10**6)
        _choose_spins(self._control.ctypes.data, self._workers.ctypes.data)
        return int(self._control["spins"][0])

    def trials(self, calls: int) -> list[int]:
        """The calls after which more spins are tried, though threads sleep at half of all barriers."""
        return [call for call in range(calls) if self.after(50, 100) == _LONG]


def test_threads_spin_less_while_most_barriers_put_them_to_sleep() -> None:
    spins = _Spins()
    assert spins.after(10, 100) == _LONG, "a few naps are bearable"
    assert spins.after(50, 100) == _SHORT
    assert spins.after(10, 100) == _LONG, "all is well again"


def test_threads_spin_as_long_as_before_if_naps_take_little_of_a_long_call() -> None:
    spins = _Spins()
    assert spins.after(50, 100, waited=0.1) == _LONG
    assert spins.after(50, 100, waited=0.2) == _SHORT


def test_a_team_knows_how_often_a_thread_tries_in_the_time_it_may_spin(job: int) -> None:
    with closing(Team(2, job)) as team:
        team.run(words().ctypes.data)
        assert team._crew is not None
        control = team._crew._words.view(CONTROL)
        assert control["spins"] == control["long_spins"] > control["short_spins"] > 0


def test_long_spins_are_tried_again_ever_more_rarely() -> None:
    spins = _Spins()
    trials = spins.trials(1000)
    assert trials[:4] == [4, 13, 30, 63], "after rests of 4, 8, 16 and 32 calls"
    assert max(np.diff(trials)) == _LONGEST_REST + 1
    spins.after(0, 100)
    assert spins.trials(5) == [4], "trials are frequent again"


def test_calls_with_a_single_thread_change_nothing_about_spins() -> None:
    spins = _Spins()
    assert spins.trials(14) == [4, 13]
    before = spins.after(50, 100)
    assert spins.after(0, 0, threads=1) == before
    assert spins.trials(20) == [15], "16 calls of rest"


class _Shares:
    """A team without threads, told how long each thread worked in a call; it waited for the slowest."""

    def __init__(self, threads: int, kinds: int = 1) -> None:
        self._threads = threads
        self._control, self.workers = np.zeros(1, CONTROL), np.zeros(threads, WORKER)
        self.paces = np.ones((kinds, threads))
        self._control["paces"], self._control["crew"] = self.paces.ctypes.data, threads
        self._control["ps_per_try"], self._control["call"] = 1_000, threads
        self.workers["control"] = self._control.ctypes.data

    def of(self, count: int, kind: int = 0) -> list[int]:
        """How many of so many pieces fall to each thread in a call; they follow one another, without gaps."""
        self._control["kind"] = kind
        _share_out(self._control.ctypes.data, self.workers.ctypes.data, self._threads)
        self.workers["share_first"] = self.workers["next_first"]
        self.workers["share_last"] = self.workers["next_last"]
        bounds = [_share(self.workers.ctypes.data + i * WORKER.itemsize, count) for i in range(self._threads)]
        assert bounds[0][0] == 0 and bounds[-1][1] == count
        assert all(before[1] == after[0] for before, after in pairwise(bounds))
        return [last - first for first, last in bounds]

    def learn(self, *worked_ns: float, kind: int = 0) -> None:
        self._control["kind"] = kind
        self.workers["spent_ns"] = spent_ns = max(worked_ns)
        self.workers["lost_ns"] = spent_ns - np.array(worked_ns)
        _learn_paces(self._control.ctypes.data, self.workers.ctypes.data)


@njit
def _adjust(worker: Any) -> Any:
    _adjust_share(worker)


def test_shares_are_corrected_within_a_call_by_all_threads_at_the_same_barrier() -> None:
    shares = _Shares(2)
    shares.of(1000)
    workers = shares.workers
    workers["thread"], workers["threads"], workers["is_working"] = range(2), 2, 1

    def pass_barrier(number: int) -> list[int]:
        workers["meetings"] = number
        for thread in (1, 0):
            _adjust(workers.ctypes.data + thread * WORKER.itemsize)
        assert workers["share_last"][0] == workers["share_first"][1]
        return [int(last - first) for first, last in workers[["share_first", "share_last"]].tolist()]

    equal = pass_barrier(1)
    assert equal[0] == equal[1]
    for number in range(2, _WINDOW_BARRIERS + 1):
        assert pass_barrier(number) == equal, "nothing is known yet"
    workers["window_ns"] -= 10**9  # a window of a second or more, of which the second thread waits half
    workers["tries"] = 0, 500_000_000
    assert pass_barrier(_WINDOW_BARRIERS + 1) == equal
    assert pass_barrier(_WINDOW_BARRIERS + 2) == equal
    corrected = pass_barrier(_WINDOW_BARRIERS + 3)
    assert 1.2 < corrected[1] / corrected[0] < 2.1
    assert pass_barrier(_WINDOW_BARRIERS + 4) == corrected
    assert list(workers["tries"]) == [0, 0], "a new window"
    workers["is_working"] = 0
    assert pass_barrier(2 * _WINDOW_BARRIERS + 1) == corrected, "the last barrier belongs to no window"
    assert list(workers["lost_ns"]) == [0, 500_000_000]


@njit
def _share(worker: Any, count: Any) -> Any:
    return share_of(worker, count)


@given(st.lists(st.floats(0.25, 4.0), min_size=1, max_size=9), st.integers(0, 10_000))
def test_shares_are_in_proportion_to_paces_and_leave_nothing_out(paces: list[float], count: int) -> None:
    shares = _Shares(len(paces))
    shares.paces[0] = paces
    for found, pace in zip(shares.of(count), paces, strict=True):
        assert abs(found - count * pace / sum(paces)) <= 1 + count / (1 << 15)


@given(st.lists(st.floats(0.5, 1.0), min_size=2, max_size=8), st.sampled_from([2e6, 40e6, 1e9]))
def test_threads_come_to_wait_equally_long_whatever_their_speeds(speeds: list[float], call_ns: float) -> None:
    shares = _Shares(len(speeds))
    for _ in range(300 if call_ns < 10e6 else 40):
        shares.learn(*(call_ns * n / 1000 / s for n, s in zip(shares.of(1000), speeds, strict=True)))
    worked = [n / s for n, s in zip(shares.of(1000), speeds, strict=True)]
    assert max(worked) - min(worked) < 0.05 * max(worked)


def test_a_short_call_changes_paces_little_and_a_long_one_nearly_all() -> None:
    shares = _Shares(2)
    shares.learn(2e5, 1e5)
    assert 500 < shares.of(1000)[1] < 525
    shares.learn(2e9, 1e9)
    assert 650 < shares.of(1000)[1] < 700


def test_a_thread_that_was_hardly_there_keeps_some_work() -> None:
    shares = _Shares(2)
    for _ in range(50):
        shares.learn(1e9, 1e3)
    assert 0 < shares.of(1000)[0] < 200


def test_calls_of_another_kind_have_paces_of_their_own() -> None:
    shares = _Shares(2, kinds=2)
    shares.learn(2e9, 1e9, kind=1)
    assert shares.of(1000, kind=0) == [500, 500]
    assert shares.of(1000, kind=1)[1] > 600


def test_without_a_clock_shares_stay_equal() -> None:
    shares = _Shares(3)
    shares.learn(0, 0, 0)
    assert shares.of(9) == [3, 3, 3]


def test_spinning_until_another_thread_begins_does_not_count() -> None:
    """At its first barrier a thread may wait for one that has to be woken; that says nothing of its pace."""
    control, worker = np.zeros(1, CONTROL), np.zeros(1, WORKER)
    control["spins"] = 5
    worker["control"], worker["threads"], worker["is_working"] = control.ctypes.data, 2, 1
    partner = threading.Timer(0.2, lambda: atomic_add_at(control.ctypes.data + LINE_BYTES))
    partner.start()
    meet_at(worker.ctypes.data)
    partner.join()
    assert worker["naps"] == 1 and worker["tries"] == 0 and worker["napped_ns"] == 0
    assert worker["waited_ns"] > 0
    partner = threading.Timer(0.2, lambda: atomic_add_at(control.ctypes.data + LINE_BYTES))
    partner.start()
    meet_at(worker.ctypes.data)
    partner.join()
    assert worker["naps"] == 2 and worker["tries"] == 5 and worker["napped_ns"] > 0


def _note_work(argument: Any, worker: Any) -> None:
    meet(worker)
    i64_at(argument)[worker_at(worker).thread] = worker_at(worker).is_working


def test_waiting_at_the_end_of_a_call_does_not_count() -> None:
    """There a thread waits for one that had something to do by itself. It is no longer at the job then."""
    function = native_function("void(int64, int64)", _note_work)
    with closing(Team(2, function.address)) as team:
        seen = words()
        team.run(seen.ctypes.data)
        assert seen[:2].tolist() == [1, 1]
        assert team._crew is not None
        assert team._crew._worker_words.view(WORKER)["is_working"].tolist() == [0, 0]
    control, worker = np.zeros(1, CONTROL), np.zeros(1, WORKER)
    control["spins"] = 5
    worker["control"], worker["threads"], worker["meetings"] = control.ctypes.data, 2, 1
    partner = threading.Timer(
        0.2, lambda: [atomic_add_at(control.ctypes.data + LINE_BYTES) for _ in range(3)]
    )
    partner.start()
    meet_at(worker.ctypes.data)
    partner.join()
    assert worker["naps"] == 1 and worker["tries"] == 0 and worker["napped_ns"] == 0


@njit(nogil=True)
def meet_at(worker: Any) -> None:
    meet(worker)


@njit
def atomic_add_at(address: Any) -> None:
    atomic_add(address, 1)
