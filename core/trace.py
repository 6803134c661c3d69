"""What happened when: spans of time, written as a trace that Chrome and Perfetto show.

Format: the "Trace Event Format" of Chromium's tracing tools, as a JSON object with complete events (ph "X").
"""

from __future__ import annotations

import functools
import json
import logging
import os
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

from mvllm.core.errors import ConfigError

ENGINE_TRACK = "engine"
"""Track of steps and their stages."""

STEP, STAGE = "step", "stage"
"""Categories of the spans on that track; other tracks have their own."""

Arguments = tuple[tuple[str, str | int | bool], ...]
"""What else a span says of itself, by name."""

_Spans = tuple[str, Sequence[str], Sequence[str], Sequence[int], Sequence[int], Sequence[Arguments]]
"""What `Trace.spans` was given."""

_HEAD, _TAIL = b'{"displayTimeUnit": "ns", "traceEvents": [', b"\n]}\n"
_FLUSH_BYTES = 1 << 18

_log = logging.getLogger("mvllm")


class Trace:
    """Takes note of steps, their stages and whatever else took time. This one forgets it at once, so a step
    that isn't traced pays for some empty calls.

    A step is `start_step`, any number of `stage`, each of which ends the one before, then `end_step`. All
    times are nanoseconds of the clock that `time.perf_counter_ns` reads.
    """

    enabled = False

    def start_step(self) -> None:
        """A step begins; one that an exception has left open ends."""

    def stage(self, name: str) -> None:
        """The next stage of the step begins."""

    def end_step(self, num_rows: int, num_tokens: int, num_drafts: int) -> None:
        """The step's last stage and the step end; drafts count as tokens too."""

    def when_done(self, tell: Callable[[], None]) -> None:
        """Call `tell` at the end of the step, when the work of telling spans shows in none of them."""

    def spans(
        self,
        track: str,
        names: Sequence[str],
        categories: Sequence[str],
        starts_ns: Sequence[int],
        ends_ns: Sequence[int],
        arguments: Sequence[Arguments] = (),
    ) -> None:
        """Spans on a track of their own, one of each sequence's elements per span; no arguments at all will
        do. The sequences are read at the end of the step."""

    def close(self) -> None:
        """Write what is left; idempotent."""


NO_TRACE = Trace()


class FileTrace(Trace):
    """Writes a trace to a file as it comes. Owns the file; belongs to the thread that steps.

    Keeps at most some hundred kilobytes in memory. Whatever happens to the process between two writes, the
    file is complete JSON.

    Args:
        path: overwritten.
        clock_ns: `time.perf_counter_ns`.

    Raises:
        ConfigError: the file can't be written.
    """

    enabled = True

    def __init__(self, path: Path, clock_ns: Callable[[], int]) -> None:
        self._file = _EventFile(path)
        self._clock_ns = clock_ns
        self._origin_ns = clock_ns()
        self._tracks: dict[str, int] = {}
        self._number = 0  # of the current step
        self._marks: list[tuple[str, int]] = []  # the current step's stages with their starts
        self._start_ns: int | None = None  # the current step's
        self._tellers: list[Callable[[], None]] = []
        self._unwritten: list[_Spans] = []

    def start_step(self) -> None:
        if self._start_ns is not None:
            self._finish_step((("failed", True),))
        self._number += 1
        self._start_ns = self._clock_ns()

    def stage(self, name: str) -> None:
        self._marks.append((name, self._clock_ns()))

    def when_done(self, tell: Callable[[], None]) -> None:
        self._tellers.append(tell)

    def end_step(self, num_rows: int, num_tokens: int, num_drafts: int) -> None:
        self._finish_step((("rows", num_rows), ("tokens", num_tokens), ("drafts", num_drafts)))

    def spans(
        self,
        track: str,
        names: Sequence[str],
        categories: Sequence[str],
        starts_ns: Sequence[int],
        ends_ns: Sequence[int],
        arguments: Sequence[Arguments] = (),
    ) -> None:
        self._unwritten.append((track, names, categories, starts_ns, ends_ns, arguments or [()] * len(names)))

    def close(self) -> None:
        if self._start_ns is not None:
            self._finish_step((("failed", True),))
        self._file.flush()

    def _finish_step(self, counts: Arguments) -> None:
        """Formats the step's events only now, so that the work shows in none of its spans."""
        end, start, origin = self._clock_ns(), self._start_ns, self._origin_ns
        assert start is not None
        for tell in self._tellers:
            tell()
        track = self._track(ENGINE_TRACK)
        events = [_span(track, f"step {self._number}", STEP, start - origin, end - start, counts)]
        for (name, began), (_, ended) in pairwise([*self._marks, ("", end)]):
            events.append(_span(track, name, STAGE, began - origin, ended - began))
        for name, *columns in self._unwritten:
            track = self._track(name)
            for label, category, began, ended, arguments in zip(*columns, strict=True):
                events.append(_span(track, label, category, began - origin, ended - began, arguments))
        self._file.add(events)
        self._tellers.clear()
        self._marks.clear()
        self._unwritten.clear()
        self._start_ns = None

    def _track(self, name: str) -> int:
        """The track's number; a new one is named in the file first."""
        number = self._tracks.get(name)
        if number is None:
            number = self._tracks[name] = len(self._tracks)
            order = {"ph": "M", "pid": 1, "tid": number, "name": "thread_sort_index"}
            self._file.add(
                [_name("thread_name", number, name), json.dumps({**order, "args": {"sort_index": number}})]
            )
        return number


class _EventFile:
    """A JSON array of events that is complete after every write. Owns the file, which it opens to write."""

    def __init__(self, path: Path) -> None:
        head = _HEAD + b"\n" + _name("process_name", 0, "mvllm").encode()
        try:
            path.write_bytes(head + _TAIL)
        except OSError as error:
            raise ConfigError(f"{path}: can't be written: {error.strerror or error}") from error
        self._path = path
        self._process = os.getpid()
        self._end = len(head)
        self._waiting: list[bytes] = []
        self._waiting_bytes = 0

    def add(self, events: Sequence[str]) -> None:
        """Take events in JSON; writes them when enough have come together."""
        text = "".join([f",\n{event}" for event in events]).encode()
        self._waiting.append(text)
        self._waiting_bytes += len(text)
        if self._waiting_bytes >= _FLUSH_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write what has been taken. What can't be written is lost: tracing must not end what is traced. A
        forked child writes nothing into its parent's file."""
        text = b"".join(self._waiting)
        self._waiting.clear()
        self._waiting_bytes = 0
        if not text or os.getpid() != self._process:
            return
        try:
            with self._path.open("r+b", buffering=len(text) + len(_TAIL)) as file:
                file.seek(self._end)
                file.write(text + _TAIL)
            self._end += len(text)
        except OSError as error:
            _log.warning("%s: part of the trace is lost: %s", self._path, error.strerror or error)


def _span(
    track: int,
    name: str,
    category: str,
    start_ns: int,
    duration_ns: int,
    arguments: Arguments = (),
) -> str:
    """A complete event; the format counts in microseconds."""
    extra = _args(arguments) if arguments else ""
    return (
        f'{{"ph": "X", "pid": 1, "tid": {track}, "name": {_quoted(name)}, "cat": {_quoted(category)}, '
        f'"ts": {start_ns / 1000:.3f}, "dur": {duration_ns / 1000:.3f}{extra}}}'
    )


@functools.lru_cache(maxsize=1 << 12)
def _args(arguments: Arguments) -> str:
    return f', "args": {json.dumps(dict(arguments))}'


@functools.lru_cache(maxsize=1 << 14)
def _quoted(text: str) -> str:
    return json.dumps(text)


def _name(what: str, track: int, name: str) -> str:
    return json.dumps({"ph": "M", "pid": 1, "tid": track, "name": what, "args": {"name": name}})
