"""The helper of a first start: what it compiles is taken from it, and nothing depends on it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mvllm.backends.cpu import compile_helper, jit, sampler_arithmetic
from mvllm.backends.cpu.compile_helper import Helper, every_model_needs, helper_if_cold
from mvllm.backends.cpu.jit import Kernel
from tests.paths import ROOT
from tests.tiny_models import write_tiny_gguf

_DEADLINE_S = 120  # for what takes a second or two
_MIX, _UNIFORM = "mix", "uniform"  # small kernels of the sampler


@pytest.fixture(autouse=True)
def empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A compile cache of the test's own, for this process and those that it starts."""
    monkeypatch.setenv("MVLLM_CACHE", str(tmp_path))
    monkeypatch.chdir(ROOT)
    jit.kernel_folder.cache_clear()
    yield
    monkeypatch.undo()
    jit.kernel_folder.cache_clear()


def _kernel(name: str) -> Kernel:
    """A kernel of the sampler that is not compiled yet."""
    known: Any = getattr(sampler_arithmetic, name)
    return Kernel(known._signature, known._function)


def _compiling(*names: str) -> list[str]:
    """The command of a helper that compiles these kernels of the sampler."""
    return _running(
        "from mvllm.backends.cpu import sampler_arithmetic as s\n"
        "from mvllm.backends.cpu.compile_helper import compile_all\n"
        f"compile_all(getattr(s, name) for name in {names})"
    )


def _saying(name: str, then: str) -> list[str]:
    """The command of a process that says that it begins a kernel, and then does something else."""
    return _running(f"import os, sys, time\nprint({_kernel(name).key!r}, flush=True)\n{then}")


def _running(code: str) -> list[str]:
    return [sys.executable, "-c", f"import sys\nsys.path[:] = {sys.path}\n{code}"]


def _wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class _Helped:
    """This process with a helper. `process` is that of the helper."""

    def __init__(self, command: list[str], rest: tuple[Kernel, ...] = (), patience_s: float = _DEADLINE_S):
        self.helper = Helper(command, rest, patience_s)
        self.process = self.helper._process
        self.hears = self.helper._peer

    def __enter__(self) -> _Helped:
        jit.before_compiling.append(self.helper.before_compiling)
        return self

    def __exit__(self, *_: object) -> None:
        jit.before_compiling.clear()
        self.helper.close()
        assert self.process.returncode is not None, "nobody waited for the helper"


def test_what_the_helper_has_begun_is_waited_for_and_loaded() -> None:
    mix = _kernel(_MIX)
    with _Helped(_compiling(_MIX)) as helped:
        _wait_until(lambda: helped.hears.has_begun(mix.key))
        assert mix.native.was_cached
    assert mix(12345) == _kernel(_MIX)(12345)


def test_what_this_process_begins_the_helper_leaves_out() -> None:
    uniform = _kernel(_UNIFORM)
    with _Helped(_compiling(_MIX, _UNIFORM)) as helped:
        assert not uniform.native.was_cached
        helped.process.wait(_DEADLINE_S)
        assert helped.hears.has_begun(_kernel(_MIX).key)
        assert not helped.hears.has_begun(uniform.key)


def test_while_it_waits_this_process_compiles_what_the_helper_has_not_begun() -> None:
    mix, uniform = _kernel(_MIX), _kernel(_UNIFORM)
    with _Helped(_saying(_MIX, "sys.stdin.readline()"), rest=(mix, uniform)) as helped:
        _wait_until(lambda: helped.hears.has_begun(mix.key))
        assert not mix.native.was_cached, "the other process ended without"
        assert uniform.is_kept


@pytest.mark.parametrize(
    "then",
    [
        "raise SystemExit(1)",
        "os.kill(os.getpid(), 9)",
        "print('\\xff' * 100000, flush=True)",
        "print(flush=True); time.sleep(1000)",
    ],
    ids=["fails", "is killed", "babbles", "has nothing to show"],
)
def test_a_helper_that_fails_changes_nothing(then: str) -> None:
    mix = _kernel(_MIX)
    with _Helped(_saying(_MIX, then)) as helped:
        _wait_until(lambda: helped.hears.has_begun(mix.key))
        assert not mix.native.was_cached
    assert mix(12345) == _kernel(_MIX)(12345)


def test_a_helper_that_hangs_is_ended() -> None:
    mix = _kernel(_MIX)
    with _Helped(_saying(_MIX, "time.sleep(1000)"), patience_s=0.1) as helped:
        _wait_until(lambda: helped.hears.has_begun(mix.key))
        assert not mix.native.was_cached
        assert helped.process.returncode is not None
        assert not _kernel(_UNIFORM).native.was_cached


def test_a_helper_ends_with_its_input() -> None:
    """So it does not outlive this process, however that ends."""
    code = (
        "import time\nfrom mvllm.backends.cpu.compile_helper import compile_all\n"
        "def never():\n    print('here', flush=True)\n    time.sleep(1000)\n    yield\ncompile_all(never())"
    )
    with subprocess.Popen(_running(code), stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == b"here\n"
        process.stdin.close()
        assert process.wait(_DEADLINE_S) == 0


def test_a_helper_whose_cache_is_full_gives_up(tmp_path: Path) -> None:
    code = (
        "import tempfile\nfrom mvllm.backends.cpu import sampler_arithmetic as s\n"
        "from mvllm.backends.cpu.compile_helper import compile_all\n"
        "def refuse(*_, **__):\n    raise OSError('no space left')\n"
        "tempfile.mkstemp = refuse\ncompile_all([s.mix, s.uniform])"
    )
    with _Helped(_running(code)) as helped:
        assert helped.process.wait(_DEADLINE_S) != 0
        assert not helped.hears.has_begun(_kernel(_UNIFORM).key)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Helper]:
    """The helpers that `helper_if_cold` starts, on a machine with two cores, for two small kernels."""
    helpers: list[Helper] = []

    def start(kernels: list[Kernel]) -> Helper:
        helpers.append(Helper(_compiling(_MIX, _UNIFORM), kernels))
        return helpers[-1]

    monkeypatch.setattr(compile_helper, "_start", start)
    monkeypatch.setattr(compile_helper, "every_model_needs", lambda: [_kernel(_MIX), _kernel(_UNIFORM)])
    monkeypatch.setattr(compile_helper, "default_threads", lambda: 2)
    return helpers


def test_a_helper_is_started_once_while_the_cache_is_empty(started: list[Helper]) -> None:
    with helper_if_cold(), helper_if_cold():
        assert len(started) == len(jit.before_compiling) == 1
        _ = _kernel(_MIX).native
    assert jit.before_compiling == []
    assert started[0]._process.returncode is not None
    with helper_if_cold():
        assert len(started) == 1


@pytest.mark.parametrize("obstacle", ["one core", "no cache", "a cache that can't be written"])
def test_no_helper_is_started_where_it_would_not_help(
    obstacle: str, started: list[Helper], monkeypatch: pytest.MonkeyPatch
) -> None:
    if obstacle == "one core":
        monkeypatch.setattr(compile_helper, "default_threads", lambda: 1)
    elif obstacle == "no cache":
        monkeypatch.setattr(jit, "kernel_folder", lambda: None)
    else:
        monkeypatch.setattr(os, "access", lambda *_: False)
    with helper_if_cold():
        assert started == []


def test_a_machine_that_can_start_no_process_does_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_helper, "default_threads", lambda: 2)
    for executable in ("", "/nowhere/python"):
        monkeypatch.setattr(sys, "executable", executable)
        with helper_if_cold():
            assert jit.before_compiling == []


@pytest.mark.skipif(sys.platform == "win32", reason="there are no such signals")
def test_an_interrupt_ends_the_helper(started: list[Helper]) -> None:
    with pytest.raises(KeyboardInterrupt), helper_if_cold():
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(_DEADLINE_S)
    assert jit.before_compiling == []
    assert started[0]._process.returncode is not None


def test_the_helper_of_a_first_start_begins_with_what_takes_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_helper, "default_threads", lambda: 2)
    with helper_if_cold():
        [hook] = jit.before_compiling
        helper = hook.__self__  # type: ignore[attr-defined]
        _wait_until(lambda: helper._peer.is_at(every_model_needs()[0].key))
    assert helper._process.returncode is not None


_USED = """
import sys
from mvllm import LLM, SamplingParams
from mvllm.backends.cpu.compile_helper import every_model_needs

with LLM(sys.argv[1], backend="cpu", threads=1) as llm:
    unused = [kernel.key for kernel in every_model_needs() if "native" not in vars(kernel)]
print(len(every_model_needs()), unused)
"""


def test_every_model_needs_what_the_helper_compiles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.undo()  # the cache of this machine
    model = tmp_path / "tiny.gguf"
    write_tiny_gguf(model, architecture="llama", tensor_type="F32", seed=1)
    result = subprocess.run(
        [sys.executable, "-c", _USED, str(model)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert result.stdout == "16 []\n"
