"""The process of an engine that is measured, and the pipe to it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import mvllm
from mvllm.core.errors import MvllmError

WORKER = Path(__file__).with_name("worker.py")

_IMPORTED_FROM = str(Path(mvllm.__file__).parent.parent)
_PATIENCE_S = 2.0  # for a process that was asked to end


class PeerFailed(MvllmError):
    """The process of an engine did not start, ended, or could not carry out an order."""


class EngineProcess:
    """An engine in a process of its own. Between two orders it waits for its standard input.

    Owns the process, which ends with `close`, with the `with` block, or by itself once this process is gone.

    Args:
        name: for messages.
        command: Python and its options; the worker, `engine_file` and `settings` are added. Unless it is
            isolated (-I), it imports the very mvllm that this process has.

    Raises:
        PeerFailed: the engine did not load.
    """

    def __init__(
        self, name: str, command: Sequence[str], engine_file: Path, settings: Mapping[str, object]
    ) -> None:
        self.name = name
        try:
            self._process = subprocess.Popen(
                [*command, str(WORKER), str(engine_file), json.dumps(settings)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "PYTHONPATH": _IMPORTED_FROM},
            )
        except OSError as error:
            raise PeerFailed(f"{name} can't be started with {command[0]}: {error.strerror}") from error
        try:
            hello = self._read()
        except BaseException:
            self.close()
            raise
        self.facts: dict[str, str] = hello["facts"]
        self.load_seconds: float = hello["load_seconds"]

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def status(self) -> int | None:
        """Of the process's end; None while it runs."""
        return self._process.poll()

    def ask(self, **order: object) -> dict[str, Any]:
        """Have an order carried out (`worker.py` lists them); returns the answer.

        Raises:
            PeerFailed: the engine reports an error, or its process has ended.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
        except OSError:
            raise self._ended() from None
        return self._read()

    def peak_rss_bytes(self) -> int | None:
        """Largest resident set so far, mapped files included (Linux; elsewhere None)."""
        try:
            lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        except OSError:
            return None
        return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), None)

    def close(self) -> None:
        """End the process; idempotent."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(OSError):  # it may have ended before it read everything
            self._process.stdin.close()
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_PATIENCE_S)
        finally:
            self._process.kill()
            self._process.wait()
            self._process.stdout.close()

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._ended()
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise PeerFailed(f"{self.name}: {answer['error']}")
        return answer

    def _ended(self) -> PeerFailed:
        try:
            status = self._process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            return PeerFailed(f"{self.name} closed its output")
        return PeerFailed(f"{self.name} ended with status {status}; what it said stands above")
