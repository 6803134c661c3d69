"""A team of threads that runs one compiled job together, over and over.

States of a worker thread:

    spinning --(no call for a millisecond, or one of another team)--> napping   (some microseconds at a time)
    napping  --(no call for some milliseconds)--> asleep      (in Python, on a semaphore; burns no core)
    spinning, napping --(a call that counts on it)--> working --> spinning
    asleep   --(caller takes its sleep flag and releases the semaphore)--> working

The caller works too, as thread 0. Threads meet at barriers inside the job and once more at its end, so a job
never overlaps the next one. A call may count on fewer threads than there are (`team_size`): on those with the
lowest numbers. A thread's share of the work follows its pace (`share_of`), also within a call: a core that
another virtual machine loads too takes half as long again, for milliseconds or for seconds. Words shared
between threads lie on cache lines of their own.
"""

from __future__ import annotations

import functools
import os
import threading
import time
import weakref
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mvllm.backends.cpu.atomics import atomic_add, atomic_exchange, atomic_load, back_off
from mvllm.backends.cpu.clock import now_ns
from mvllm.backends.cpu.jit import kernel
from mvllm.backends.cpu.memory import LINE_BYTES, aligned_zeros
from mvllm.backends.cpu.pointers import call_operation, f64_at, i64_at, record_at
from mvllm.backends.cpu.team_size import TeamSize

_OWN_LINE = ("call", "arrivals", "closed")
_SETTINGS = ("job", "latest", "long_spins", "short_spins", "paces", "crew", "ps_per_try")
_PER_CALL = ("argument", "base", "spins", "rest_calls", "resting_calls", "kind")
CONTROL = np.dtype(
    {
        "names": [*_OWN_LINE, *_SETTINGS, *_PER_CALL],
        "formats": [np.int64] * len((*_OWN_LINE, *_SETTINGS, *_PER_CALL)),
        "offsets": [
            *range(0, 3 * LINE_BYTES, LINE_BYTES),
            *range(3 * LINE_BYTES, 3 * LINE_BYTES + 8 * len(_SETTINGS), 8),
            *range(4 * LINE_BYTES, 4 * LINE_BYTES + 8 * len(_PER_CALL), 8),
        ],
        "itemsize": 5 * LINE_BYTES,
    }
)
"""Shared words, first those with a line of their own: the current call, arrivals at barriers so far, whether
the team is closed. Then what to run, where to read which team was called last (`_latest`), for how many
tries a thread may spin at a barrier, long or short, the address of float64[kinds of calls, crew], each
thread's pace in them, and what a try takes, in picoseconds. Then of this call its argument, the arrivals
before it and the tries chosen for it; for how many calls threads spin less if they sleep too often, and how
many of these are left (`_choose_spins`); and its kind.

A call is its number times `_CALL_STEP`, plus how many threads it counts on: one word, so that no thread sees
the one without the other. `arrivals` only grows, so no thread has to reset what another still reads."""

_PER_WORKER = ("thread", "threads", "control", "meetings", "call", "took_ns", "waited_ns", "naps")
_WINDOW = ("is_working", "window_ns", "tries", "napped_ns", "spent_ns", "lost_ns")
_SHARE = ("share_first", "share_last", "next_first", "next_last")
_OF_WORKER = (*_PER_WORKER, *_WINDOW, *_SHARE)
WORKER = np.dtype(
    {
        "names": [*_OF_WORKER, "asleep"],
        "formats": [np.int64] * (len(_OF_WORKER) + 1),
        "offsets": [*range(0, 8 * len(_OF_WORKER), 8), 3 * LINE_BYTES],
        "itemsize": 4 * LINE_BYTES,
    }
)
"""One thread's own words: its number, how many work in this call, the barriers of this call so far, the last
call that it saw, how long that took it, how much of this it waited for others beyond a moment, at how many of
the call's barriers it slept.

Then what shares follow from: whether it is still at the job; when the present window began, how often it has
tried at barriers in it before it slept, and how long it has slept; how long the last window took, and how
much of it was waiting. Its share of the work (`share_of`), and the one that follows (`_adjust_share`).

And the flag "asleep" (1: the thread waits on its semaphore or is about to; who changes it back to 0 decides
whether the semaphore is released)."""

_ARRIVALS, _CLOSED, _ASLEEP = LINE_BYTES, 2 * LINE_BYTES, 3 * LINE_BYTES  # offsets, for the atomic operations
_WORKER_BYTES = WORKER.itemsize
_CALL_STEP = 1 << 16

_LONG_SPIN_US = 200
"""How long a thread spins at a barrier before it sleeps: longer than an undisturbed one waits, and than a
sleeping partner takes to wake up on Linux (100 to 140 us)."""

_SHORT_SPIN_US = 40
"""The same where threads lack cores: there each barrier waits for one that can only run when others sleep."""

_MEASURED_TRIES = 2000  # to learn how long one takes
_BEARABLE_NAPS = 8  # barriers to each one that a thread sleeps at ...
_BEARABLE_WAIT = 8  # ... and time of a call to what it waits: more of both means that cores are lacking
_FIRST_REST, _LONGEST_REST = 4, 256  # calls with fewer spins before the next trial of more
_BETWEEN_CALLS = 6  # times the spins at a barrier: what a caller does between two calls takes about so long
_SHARE_UNITS = 1 << 16  # of all work
_WINDOW_BARRIERS = 16  # of a call, after which shares are corrected: of a step two or three layers
_PACE_NS = 4e6  # of work, that a thread's pace is about the mean of
_SLOWEST_PACE, _FASTEST_PACE = 0.25, 4.0  # of a thread, the mean of all being 1
_LEAST_WORKED = 0.25  # of a window's time: who worked less was disturbed rather than quick
_IDLE_NAPS = 100  # then, before a worker goes to sleep in Python: some milliseconds
_SLEEP, _CLOSE = 0, 1  # why `serve` returned

_latest = aligned_zeros(LINE_BYTES, "the latest team")
"""The control words' address of the team that was called last, of all teams in this process."""

control_at = record_at(CONTROL)
worker_at = record_at(WORKER)


@kernel("int64(int64)")
def _window_lost_ns(worker_address: Any) -> Any:
    worker = worker_at(worker_address)
    return worker.napped_ns + worker.tries * control_at(worker.control).ps_per_try // 1000


@kernel("void(int64, int64)")
def _learn_paces(control_address: Any, workers: Any) -> Any:
    """Correct the threads' paces in calls of this kind by what they waited in the last window: with the right
    shares they would have waited equally long. A long window weighs more than a short one."""
    control = control_at(control_address)
    threads = control.call % _CALL_STEP
    spent_ns = np.float64(worker_at(workers).spent_ns)
    if threads < 2 or spent_ns <= 0.0:
        return
    paces = f64_at(control.paces + 8 * control.kind * control.crew)
    gain, total = spent_ns / (spent_ns + _PACE_NS), 0.0
    for thread in range(threads):
        lost_ns = worker_at(workers + thread * _WORKER_BYTES).lost_ns
        worked_ns = max(spent_ns - lost_ns, _LEAST_WORKED * spent_ns)
        found = paces[thread] * spent_ns / worked_ns  # all of them are multiplied by the same below
        paces[thread] += gain * (found - paces[thread])
        total += paces[thread]
    for thread in range(threads):
        paces[thread] = min(max(paces[thread] * threads / total, _SLOWEST_PACE), _FASTEST_PACE)


@kernel("void(int64, int64, int64)")
def _share_out(control_address: Any, workers: Any, threads: Any) -> Any:
    """Say which share of the work each of the first `threads` takes next."""
    control = control_at(control_address)
    paces, total = f64_at(control.paces + 8 * control.kind * control.crew), 0.0
    for thread in range(threads):
        total += paces[thread]
    first, before = 0, 0.0
    for thread in range(threads):
        before += paces[thread]
        last: Any = _SHARE_UNITS if thread == threads - 1 else np.int64(before / total * _SHARE_UNITS)
        worker = worker_at(workers + thread * _WORKER_BYTES)
        worker.next_first, worker.next_last = first, last
        first = last


@kernel("void(int64)")
def _adjust_share(worker_address: Any) -> Any:
    """After a barrier: correct the shares in calls of many barriers, by what was waited in the last window.

    What one thread has written before a barrier others read after it: at the first barrier of a window each
    thread tells what it waited in the window before, after the second one thread 0 learns from that and says
    which shares follow, after the third every thread takes its own.
    """
    worker = worker_at(worker_address)
    place = (worker.meetings - 1) % _WINDOW_BARRIERS
    if not worker.is_working or place > 2:
        return
    is_first = worker.meetings <= _WINDOW_BARRIERS  # which nothing was told before
    if place == 0:
        now = now_ns()
        if not is_first:
            worker.spent_ns, worker.lost_ns = now - worker.window_ns, _window_lost_ns(worker_address)
        worker.window_ns, worker.tries, worker.napped_ns = now, 0, 0
    elif place == 1:
        if worker.thread == 0 and not is_first:
            _learn_paces(worker.control, worker_address)
            _share_out(worker.control, worker_address, worker.threads)
    else:
        worker.share_first, worker.share_last = worker.next_first, worker.next_last


@kernel("void(int64)")
def meet(worker_address: Any) -> Any:
    """Wait until every thread that works in this call is here."""
    worker = worker_at(worker_address)
    if worker.threads == 1:
        return
    worker.meetings += 1
    target = control_at(worker.control).base + worker.meetings * worker.threads
    arrivals = worker.control + _ARRIVALS
    tries, since, spins = 0, 0, control_at(worker.control).spins
    if atomic_add(arrivals, 1) + 1 >= target:
        _adjust_share(worker_address)
        return
    while atomic_load(arrivals) < target:
        if tries == spins:
            since = now_ns()
        back_off(tries, spins)
        tries += 1
    napped_ns = 0
    if tries > spins:
        napped_ns = now_ns() - since
        worker.waited_ns += napped_ns
        worker.naps += 1
    # At the first one threads wait for those that have to be woken, and what comes before the last one is
    # often the work of one thread alone (sampling one row): that says nothing of the others' shares.
    if worker.meetings > 1 and worker.is_working:
        worker.tries += min(tries, spins)
        worker.napped_ns += napped_ns
    _adjust_share(worker_address)


@kernel("UniTuple(int64, 2)(int64, int64)")
def share_of(worker_address: Any, count: Any) -> Any:
    """The pieces [first, last) of `count` like pieces of work that fall to this thread."""
    worker, half = worker_at(worker_address), _SHARE_UNITS // 2
    first = (count * worker.share_first + half) // _SHARE_UNITS
    return first, (count * worker.share_last + half) // _SHARE_UNITS


@kernel("void(int64, int64)")
def _work(worker_address: Any, call: Any) -> Any:
    worker = worker_at(worker_address)
    control = control_at(worker.control)
    worker.threads, worker.meetings = call % _CALL_STEP, 0
    worker.waited_ns, worker.naps, worker.tries, worker.napped_ns = 0, 0, 0, 0
    started, worker.is_working = now_ns(), 1
    call_operation(control.job, control.argument, worker_address)
    worker.is_working = 0
    is_window = worker.meetings <= _WINDOW_BARRIERS  # the whole call, and the next one learns of it
    if is_window:
        worker.lost_ns = _window_lost_ns(worker_address)
    meet(worker_address)
    worker.took_ns = now_ns() - started
    if is_window:
        worker.spent_ns = worker.took_ns  # only the caller's is read, who knows by then that it is written


@kernel("int64(int64)")
def _serve(worker_address: Any) -> Any:
    """Work at every call that counts on this thread, until none has for long (_SLEEP) or until the team is
    closed (_CLOSE)."""
    worker = worker_at(worker_address)
    control, tries = control_at(worker.control), 0
    # Read here: a spinning thread had better leave alone what a caller is about to write.
    latest, spins = control.latest, _BETWEEN_CALLS * control.spins
    while True:
        is_closed = atomic_load(worker.control + _CLOSED) != 0
        call = atomic_load(worker.control)
        is_new = call != worker.call
        worker.call = call
        if is_new and worker.thread < call % _CALL_STEP:
            _work(worker_address, call)
            tries, spins = 0, _BETWEEN_CALLS * control.spins
        elif is_closed:  # after the last call: who takes part in it counts on this thread
            return _CLOSE
        elif tries < spins + _IDLE_NAPS:
            if atomic_load(latest) != worker.control:  # another team was called, and may need this core
                tries = max(tries, spins)
            back_off(tries, spins)
            tries += 1
        else:
            atomic_exchange(worker_address + _ASLEEP, 1)
            # A call may have come before the flag was seen. If the flag is still ours, nobody will wake us.
            call = atomic_load(worker.control)
            called = call != worker.call and worker.thread < call % _CALL_STEP
            called |= atomic_load(worker.control + _CLOSED) != 0
            if not called or atomic_exchange(worker_address + _ASLEEP, 0) == 0:
                return _SLEEP
            tries = 0


@kernel("int64(int64, int64, int64)")
def _wake(workers: Any, threads: Any, sleepers: Any) -> Any:
    """Take the sleep flags of the first `threads` that are set; returns how many, and writes the threads'
    numbers to `sleepers`."""
    found = 0
    for thread in range(1, threads):
        if atomic_exchange(workers + thread * _WORKER_BYTES + _ASLEEP, 0) == 1:
            i64_at(sleepers)[found] = thread
            found += 1
    return found


@kernel("void(int64, int64)")
def _choose_spins(control_address: Any, workers: Any) -> Any:
    """Decide from the call that has ended how long threads spin in the next one.

    Where cores are lacking, spinning keeps others from one. But threads that spin less than a sleep takes may
    just keep each other asleep, so more is tried again now and then, ever more rarely.
    """
    control, naps, meetings, waited_ns = control_at(control_address), 0, 0, 0
    for thread in range(control.call % _CALL_STEP):
        worker = worker_at(workers + thread * _WORKER_BYTES)
        naps += worker.naps
        meetings += worker.meetings
        waited_ns += worker.waited_ns
    if meetings == 0:  # a single thread tells nothing
        return
    # Where stages are long threads often wait long enough to sleep, but little all the same. The caller's own
    # time is the one that is surely known by now.
    took_ns = worker_at(workers).took_ns * (control.call % _CALL_STEP)
    is_long = control.spins == control.long_spins
    if naps * _BEARABLE_NAPS <= meetings or (is_long and waited_ns * _BEARABLE_WAIT < took_ns):
        control.spins, control.rest_calls = control.long_spins, _FIRST_REST
    elif is_long:
        control.spins, control.resting_calls = control.short_spins, control.rest_calls
        control.rest_calls = min(2 * control.rest_calls, _LONGEST_REST)
    else:
        control.resting_calls -= 1
        if control.resting_calls == 0:
            control.spins = control.long_spins


@kernel("int64(int64, int64, int64, int64, int64, int64)")
def _call(control_address: Any, workers: Any, sleepers: Any, threads: Any, argument: Any, kind: Any) -> Any:
    """Start a call for the first `threads`.

    If they are all awake, takes part in it as thread 0 and returns 0; else returns how many have to be woken
    before the caller takes part in it.
    """
    _choose_spins(control_address, workers)
    control = control_at(control_address)
    if worker_at(workers).meetings <= _WINDOW_BARRIERS + 1:  # the last one included
        _learn_paces(control_address, workers)
    control.kind = kind
    _share_out(control_address, workers, threads)
    for thread in range(threads):
        worker = worker_at(workers + thread * _WORKER_BYTES)
        worker.share_first, worker.share_last = worker.next_first, worker.next_last
    control.argument, control.base = argument, atomic_load(control_address + _ARRIVALS)
    if atomic_load(control.latest) != control_address:
        atomic_exchange(control.latest, control_address)
    call = (control.call // _CALL_STEP + 1) * _CALL_STEP + threads
    atomic_exchange(control_address, call)
    found = _wake(workers, threads, sleepers)
    if found == 0:
        _work(workers, call)
    return found


@kernel("void(int64, int64)")
def _take_part(control_address: Any, workers: Any) -> Any:
    """Take part in the current call, as thread 0."""
    _work(workers, atomic_load(control_address))


@kernel("int64(int64, int64)")
def _waited_ns(workers: Any, threads: Any) -> Any:
    """What the first `threads` waited in the last call, added up."""
    total = 0
    for thread in range(threads):
        total += worker_at(workers + thread * _WORKER_BYTES).waited_ns
    return total


@kernel("int64(int64, int64, int64, int64)")
def _start_close(control_address: Any, workers: Any, threads: Any, sleepers: Any) -> Any:
    atomic_exchange(control_address + _CLOSED, 1)
    return _wake(workers, threads, sleepers)


@kernel("void(int64)")
def _spin(tries: Any) -> Any:
    for tried in range(tries):
        back_off(tried, tries)


TEAM_KERNELS: tuple[Any, ...] = (_serve, _call, _take_part, _waited_ns, _start_close, _spin)
"""What is called from Python."""


@functools.cache
def _tries_per_us() -> float:
    """How often a spinning thread tries in a microsecond: 50 times on Zen 4, 90 times on an Intel Xeon."""
    times_ns = []
    for _ in range(3):
        start = time.perf_counter_ns()
        _spin(_MEASURED_TRIES)
        times_ns.append(time.perf_counter_ns() - start)
    return 1000 * _MEASURED_TRIES / max(1, min(times_ns))


class _Crew:
    """The shared words, semaphores and threads of a team within one process.

    Owns them; holds no reference to the team, so that a forgotten team is collected though its threads live.
    """

    def __init__(self, threads: int, job: int, kinds: int) -> None:
        self._words = aligned_zeros(CONTROL.itemsize, "control words")
        self._worker_words = aligned_zeros(WORKER.itemsize * threads, "worker words")
        self._sleepers: NDArray[np.int64] = np.zeros(threads, np.int64)
        self._control = self._words.ctypes.data
        self._workers = self._worker_words.ctypes.data
        self._sleepers_address = self._sleepers.ctypes.data
        control = self._words.view(CONTROL)
        control["job"], control["latest"] = job, _latest.ctypes.data
        control["long_spins"] = _LONG_SPIN_US * _tries_per_us()
        control["short_spins"] = _SHORT_SPIN_US * _tries_per_us()
        control["spins"], control["rest_calls"] = control["long_spins"], _FIRST_REST
        self._paces = np.ones((kinds, threads))
        control["paces"], control["crew"] = self._paces.ctypes.data, threads
        control["ps_per_try"] = 1e6 / _tries_per_us()
        workers = self._worker_words.view(WORKER)
        workers["thread"] = np.arange(threads)
        workers["control"] = self._control
        self._semaphores = [threading.Semaphore(0) for _ in range(threads)]
        self._threads = [
            threading.Thread(target=self._live, args=(thread,), name=f"mvllm-cpu-{thread}", daemon=True)
            for thread in range(1, threads)
        ]
        self.process = os.getpid()
        for worker in self._threads:
            worker.start()

    def _live(self, thread: int) -> None:
        while _serve(self._workers + thread * WORKER.itemsize) == _SLEEP:
            self._semaphores[thread].acquire()

    def run(self, argument: int, threads: int, kind: int) -> float:
        """Run the job on the first `threads`; returns how long they waited for each other in all, seconds."""
        found = _call(self._control, self._workers, self._sleepers_address, threads, argument, kind)
        if found:
            self._release(found)
            _take_part(self._control, self._workers)
        return 1e-9 * float(_waited_ns(self._workers, threads))

    def asleep(self) -> int:
        """Number of threads that wait on their semaphore or are about to."""
        return int(self._worker_words.view(WORKER)["asleep"].sum())

    def close(self) -> None:
        """End and join the threads; in a forked child there are none."""
        if os.getpid() != self.process:
            return
        threads = len(self._semaphores)
        self._release(_start_close(self._control, self._workers, threads, self._sleepers_address))
        for worker in self._threads:
            worker.join()

    def _release(self, num_sleepers: int) -> None:
        for thread in self._sleepers[:num_sleepers]:
            self._semaphores[thread].release()


class Team:
    """Runs a job on a number of threads, the caller's included.

    Owns the threads, which start with the first call and, after a fork, anew in the child; does not own what
    the job works on. Calls must not overlap. Threads end with `close`, or when the team is collected.
    """

    def __init__(self, threads: int, job: int, size: TeamSize | None = None, kinds: int = 1) -> None:
        """`job` is the address of a compiled `void(int64 argument, int64 worker)`; worker is a `WORKER`.
        `size` decides how many threads work; None: always all. `kinds` is the number of kinds of calls."""
        self.threads = threads
        self._kinds = kinds
        self._size = size
        self._job = job
        self._crew: _Crew | None = None
        self._finalizer: weakref.finalize[..., Team] | None = None

    def run(self, argument: int, kind: int = 0) -> int:
        """Run job(argument, worker); returns when the threads are done, and how many they were.

        Args:
            kind: in [0, kinds); the threads' paces are learned for each by itself.
        """
        crew = self._crew
        if crew is None or crew.process != os.getpid():
            crew = self._assemble()
        size = self._size
        if size is None:
            crew.run(argument, self.threads, kind)
            return self.threads
        threads = size.working
        started = time.perf_counter()
        waited_s = crew.run(argument, threads, kind)
        size.observe(time.perf_counter() - started, waited_s)
        return threads

    def close(self) -> None:
        """End the threads; a later `run` starts new ones. Idempotent."""
        if self._finalizer is not None:
            self._finalizer()
        self._crew = self._finalizer = None

    def _assemble(self) -> _Crew:
        if self._finalizer is not None:
            self._finalizer.detach()
        crew = self._crew = _Crew(self.threads, self._job, self._kinds)
        self._finalizer = weakref.finalize(self, crew.close)
        return crew
