"""One engine, shared by any number of threads: whoever waits for an answer makes the next step."""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

from mvllm.core.engine.collector import OutputCollector
from mvllm.core.engine.engine import Engine
from mvllm.core.errors import EngineClosed
from mvllm.core.request import Request
from mvllm.core.step import Event
from mvllm.core.types import RequestId


class SharedEngine:
    """Owns the engine and the collectors of the requests in it; every method may be called by any thread.

    A forked child may go on with an engine that was idle when its process forked. One that was at work in
    another thread is of no use there, since that thread is missing: the methods that need it raise
    EngineClosed.

    Args:
        undisturbed: makes a context manager that keeps interrupts out of its body, so that none leaves a
            change half made.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        undisturbed: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.engine = engine
        self._undisturbed = undisturbed
        self._collectors: dict[RequestId, OutputCollector] = {}
        self._events: dict[str, deque[Event]] = {}  # by group, of those who want them one by one
        self._abandoned: deque[OutputCollector] = deque()
        self._lock = threading.Lock()
        self._is_torn = False  # whether the process forked from one in which a call was under way
        _shared_engines.add(self)

    def submit(
        self, requests: Sequence[Request], collector: OutputCollector, *, keep_events: bool = False
    ) -> None:
        """Start all siblings of one prompt, or none.

        Raises:
            RequestRejected, ConfigError, EngineClosed: the engine refuses one of them.
        """
        with self._alone():
            self._drop_abandoned()
            submitted: list[RequestId] = []
            try:
                for request in requests:
                    self.engine.submit(request)
                    submitted.append(request.id)
            except BaseException:
                for id in submitted:
                    self.engine.cancel(id)
                raise
            self._collectors.update((id, collector) for id in submitted)
            if keep_events:
                self._events[collector.group_id] = deque()

    def advance(self, collectors: Sequence[OutputCollector]) -> None:
        """Make one engine step, unless another thread's step has already finished all of `collectors`.

        Whatever leaves a step by an exception has left the state half changed, so it closes the engine.

        Raises:
            EngineClosed: the engine was closed, or closed itself.
        """
        with self._alone():
            self._drop_abandoned()
            if all(collector.finished for collector in collectors):
                return
            try:
                self._step()
            except BaseException:
                self.engine.abort()
                raise

    def take_event(self, collector: OutputCollector) -> Event | None:
        """The oldest event kept for a group that has not been taken yet; only the group's owner takes any.

        Needs no lock: a step only appends, and an end of a deque belongs to one thread.
        """
        events = self._events.get(collector.group_id)
        return events.popleft() if events else None

    def forget(self, collector: OutputCollector) -> None:
        """Cancel what still runs of a group, so that its collector is finished, and drop all record of it;
        idempotent."""
        with self._alone():
            self._drop(collector)

    def abandon(self, collector: OutputCollector) -> None:
        """`forget` at the next call of another method; takes no lock, so that a finaliser may call it."""
        self._abandoned.append(collector)

    def close(self) -> None:
        """Close the engine; idempotent. In a child that can't use it there is nothing to close."""
        if not self._is_torn:
            with self._alone():
                self.engine.close()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep other threads and interrupts out.

        Raises:
            EngineClosed: the state is half changed, because the process forked in the middle of a change.
        """
        if self._is_torn:
            raise EngineClosed(
                "this process was forked while another thread was using the engine; fork when it is idle, or "
                'start processes with "spawn"'
            )
        with self._undisturbed(), self._lock:
            yield

    def begin_in_child(self) -> None:
        """Called in a child process just forked, before anything else there."""
        self._is_torn |= self._lock.locked()
        self._lock = threading.Lock()

    def _step(self) -> None:
        for event in self.engine.step():
            # A request whose owner has gone away (and cancelled it) has no collector any more.
            if collector := self._collectors.get(event.id):
                collector.apply(event)
                if collector.group_id in self._events:
                    self._events[collector.group_id].append(event)

    def _drop_abandoned(self) -> None:
        while self._abandoned:
            self._drop(self._abandoned.popleft())

    def _drop(self, collector: OutputCollector) -> None:
        self._events.pop(collector.group_id, None)
        for id in collector.request_ids:
            if self._collectors.pop(id, None) is not None:
                self.engine.cancel(id)
        collector.cancel()


_shared_engines: weakref.WeakSet[SharedEngine] = weakref.WeakSet()


def _begin_in_child() -> None:
    for engine in list(_shared_engines):
        engine.begin_in_child()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_in_child)
