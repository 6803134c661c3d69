"""Commands to an engine, left by any thread and taken at the next step boundary."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from mvllm.core.batch.sampling_row import SamplingRow
from mvllm.core.engine.request_text import RequestText
from mvllm.core.errors import ConfigError, EngineClosed
from mvllm.core.request import Request
from mvllm.core.types import RequestId


@dataclass(frozen=True, slots=True)
class Submit:
    """Start a checked request."""

    request: Request
    sampling: SamplingRow
    text: RequestText | None


@dataclass(frozen=True, slots=True)
class Cancel:
    """End a request, if it is still live."""

    id: RequestId


class Inbox:
    """Owns the commands not yet taken and the ids in use; does not know what becomes of them.

    Every method may be called by any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._commands: list[Submit | Cancel] = []
        self._ids: set[RequestId] = set()  # submitted, terminal event still to come
        self._closed = False

    def __len__(self) -> int:
        """Requests submitted whose terminal event is still to come."""
        with self._lock:
            return len(self._ids)

    @property
    def closed(self) -> bool:
        return self._closed

    def submit(self, command: Submit) -> None:
        """
        Raises:
            EngineClosed: no more requests are taken.
            ConfigError: the id is in use.
        """
        id = command.request.id
        with self._lock:
            if self._closed:
                raise EngineClosed("the engine is closed")
            if id in self._ids:
                raise ConfigError(f"request id {id!r} is in use")
            self._ids.add(id)
            self._commands.append(command)

    def cancel(self, id: RequestId) -> None:
        """Does nothing for an id that is not in use."""
        with self._lock:
            if id in self._ids:
                self._commands.append(Cancel(id))

    def take(self) -> list[Submit | Cancel]:
        """All commands in the order given; they are no longer here afterwards."""
        with self._lock:
            commands, self._commands = self._commands, []
        return commands

    def free_id(self, id: RequestId) -> None:
        """The request has ended; its id may be used again."""
        with self._lock:
            self._ids.discard(id)

    def close(self) -> None:
        """Take no more requests; commands already here can still be taken."""
        with self._lock:
            self._closed = True
