"""A second process that compiles too, while the compile cache of this machine is still empty.

It compiles what every model needs, this process what its own model needs. Each tells the other what it
begins, so hardly anything is compiled twice. All that comes back is files in the compile cache: a helper that
fails, is killed or hangs costs time and nothing else. It ends with its input, hence with this process,
however that ends.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import IO

from mvllm.backends.cpu import jit
from mvllm.backends.cpu.jit import Kernel
from mvllm.backends.cpu.threads import default_threads
from mvllm.core.interrupts import HoldInterrupts

PATIENCE_S = 60.0
"""How long to wait for one function: several times what the longest takes."""

_NOTHING = ""  # in the place of a key: nothing is compiled at the moment

_CODE = """
import sys
sys.path[:] = sys.argv[1:]
from mvllm.backends.cpu.compile_helper import compile_all, every_model_needs
compile_all(every_model_needs())
"""


def every_model_needs() -> list[Kernel]:
    """What is compiled whatever the model: what takes longest, then what is needed last."""
    from mvllm.backends.cpu.operations import OPERATIONS, RUN_PROGRAM
    from mvllm.backends.cpu.prepare import prepare_step
    from mvllm.backends.cpu.program import Kind
    from mvllm.backends.cpu.team import TEAM_KERNELS

    longest = (OPERATIONS[Kind.SAMPLE], OPERATIONS[Kind.ATTEND], prepare_step)
    kinds = (Kind.TAKE, Kind.STORE_KV, Kind.ROTATE, Kind.LINEAR, Kind.NORM, Kind.EMBED)
    return [*longest, RUN_PROGRAM, *TEAM_KERNELS, *(OPERATIONS[kind] for kind in kinds)]


@contextlib.contextmanager
def helper_if_cold() -> Iterator[None]:
    """Have a helper meanwhile, if the compile cache lacks what takes longest and there is a core for it."""
    kernels = every_model_needs()
    helper = _start(kernels) if _is_worthwhile(kernels) else None
    if helper is None:
        yield
        return
    jit.before_compiling.append(helper.before_compiling)
    try:
        yield
    finally:
        jit.before_compiling.remove(helper.before_compiling)
        helper.close()


def _is_worthwhile(kernels: Sequence[Kernel]) -> bool:
    folder = jit.kernel_folder()
    if folder is None or jit.before_compiling or kernels[0].is_kept:
        return False
    return os.access(folder, os.W_OK) and default_threads() > 1


def _start(kernels: Iterable[Kernel]) -> Helper | None:
    # The executable of a frozen application is no interpreter.
    if not sys.executable or getattr(sys, "frozen", False):
        return None
    try:
        return Helper([sys.executable, "-c", _CODE, *sys.path], kernels)
    except OSError:
        return None


class Helper:
    """The helper as this process sees it. Owns its process, which ends with `close`."""

    def __init__(
        self, command: Sequence[str], kernels: Iterable[Kernel], patience_s: float = PATIENCE_S
    ) -> None:
        """
        Args:
            command: starts the helper, which calls `compile_all`.
            kernels: what it compiles, in this order; of the last ones some are compiled here instead of
                waiting for it.

        Raises:
            OSError: there can be no such process.
        """
        self._rest = list(kernels)
        self._patience_s = patience_s
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._peer = _Peer(self._process.stdout, self._process.stdin)

    def before_compiling(self, key: str) -> None:
        """Return when the helper is not, or no longer, at the function `key`; one that it has not begun is
        then the caller's. Compiles other functions meanwhile."""
        peer = self._peer
        while self._rest and peer.is_at(key):
            other = self._rest.pop()
            if not peer.has_begun(other.key):
                _ = other.native
        if not peer.wait_while_at(key, self._patience_s):
            self.close()
        if not peer.has_begun(key):
            peer.tell(key)

    def close(self) -> None:
        """End the process, whatever it does. Idempotent."""
        with HoldInterrupts():
            self._process.kill()
            self._process.wait()
            self._peer.close()


def compile_all(kernels: Iterable[Kernel]) -> None:
    """What the helper does: compile the kernels in turn, except those that the other process begins before.

    Ends the process when its standard input ends.
    """
    warnings.simplefilter(
        "error", RuntimeWarning
    )  # if the cache can't be written there is no use in going on
    peer = _Peer(sys.stdin.buffer, sys.stdout.buffer, at_end=lambda: os._exit(0))
    for kernel in kernels:
        if not peer.has_begun(kernel.key) and not kernel.is_kept:
            peer.tell(kernel.key)
            _ = kernel.native
            peer.tell(_NOTHING)


class _Peer:
    """The process at the other end of two pipes, on which each writes the keys of what it begins, one a line.

    Owns both streams.
    """

    def __init__(
        self, incoming: IO[bytes], outgoing: IO[bytes], at_end: Callable[[], None] = lambda: None
    ) -> None:
        """`at_end` is called by another thread when `incoming` ends."""
        self._incoming, self._outgoing, self._at_end = incoming, outgoing, at_end
        self._begun: list[str] = []  # the other process is at the last one
        self._changed = threading.Condition()
        self._listener = threading.Thread(target=self._listen, name="mvllm-compile-helper", daemon=True)
        self._listener.start()

    def _listen(self) -> None:
        for line in self._incoming:
            self._hear(line.decode(errors="replace").rstrip("\r\n"))
        self._hear(_NOTHING)
        self._at_end()

    def _hear(self, key: str) -> None:
        with self._changed:
            self._begun.append(key)
            self._changed.notify_all()

    def tell(self, key: str) -> None:
        """Say that this process begins the function `key`; without effect if the other is gone."""
        with contextlib.suppress(OSError, ValueError):
            self._outgoing.write(f"{key}\n".encode())
            self._outgoing.flush()

    def has_begun(self, key: str) -> bool:
        return key in self._begun

    def is_at(self, key: str) -> bool:
        return self._begun[-1:] == [key]

    def wait_while_at(self, key: str, timeout_s: float) -> bool:
        """Wait while the other process is at `key`; returns whether it no longer is."""
        with self._changed:
            return self._changed.wait_for(lambda: not self.is_at(key), timeout_s)

    def close(self) -> None:
        """Close the streams. The other process has ended."""
        self._listener.join()
        self._incoming.close()
        self._outgoing.close()
