"""Compiling for the CPU backend: a cache that never fails nor goes stale, instructions that the CPU has."""

from __future__ import annotations

import ast
import logging
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numba
import numpy as np
import pytest

from mvllm.backends.cpu import isa as instruction_sets
from mvllm.backends.cpu import jit, prepare
from mvllm.backends.cpu.isa import AVX512, PORTABLE, half_to_float
from mvllm.backends.cpu.jit import kernel, kernel_sources, native_function, prune, sources_digest
from mvllm.backends.cpu.object_cache import ObjectCode, read, write
from mvllm.backends.cpu.vector import F16, F32, I64, Emitter, Value, emitted, vector
from mvllm.core.cache_folder import cache_folder
from mvllm.core.errors import ConfigError
from tests.paths import ROOT
from tests.tiny_models import write_tiny_gguf


@pytest.fixture
def fresh_kernel_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("MVLLM_CACHE", raising=False)
    for remembered in (jit.kernel_folder, jit._warn_once):
        remembered.cache_clear()
    yield
    for remembered in (jit.kernel_folder, jit._warn_once):
        remembered.cache_clear()


CHECK_SIGNATURE, CHECK = "boolean(int64, int64, int64)", prepare._all_below.__wrapped__  # type: ignore[attr-defined]
"""A small function of the package: (int32 values, count, limit) -> whether all are in [0, limit)."""


def _add(a: int, b: int) -> int:
    return a + b


@pytest.mark.usefixtures("fresh_kernel_folder")
def test_without_a_writable_cache_kernels_compile_after_one_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    with pytest.warns(RuntimeWarning, match="MVLLM_CACHE") as warned:
        natives = [native_function(CHECK_SIGNATURE, CHECK) for _ in range(2)]
    assert len(warned) == 1
    values = np.array([3, 0, 4], np.int32)
    assert [native.ctypes(values.ctypes.data, 3, 5) for native in natives] == [True, True]
    assert not any(native.was_cached for native in natives)


@pytest.mark.usefixtures("fresh_kernel_folder")
def test_a_user_without_a_home_gets_no_cache_and_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    with pytest.warns(RuntimeWarning, match="home directory"):
        assert jit.kernel_folder() is None


@pytest.mark.usefixtures("fresh_kernel_folder")
def test_a_kernel_that_was_compiled_once_is_loaded_afterwards(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    values = np.array([3, 0, 4], np.int32)
    for was_cached in (False, True):
        native = native_function(CHECK_SIGNATURE, CHECK)
        assert native.was_cached is was_cached
        assert native.ctypes(values.ctypes.data, 3, 5) is True
        assert native.ctypes(values.ctypes.data, 3, 4) is False


@pytest.mark.usefixtures("fresh_kernel_folder")
def test_code_of_other_modules_is_not_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing would notice that it had changed."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for _ in range(2):
        assert not native_function("int64(int64, int64)", _add).was_cached
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.mark.usefixtures("fresh_kernel_folder")
@pytest.mark.parametrize("damage", [b"", b"x" * 10, b"x" * 100])
def test_a_damaged_file_is_compiled_anew_and_replaced(
    damage: bytes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    native_function(CHECK_SIGNATURE, CHECK)
    [file] = tmp_path.rglob("*.o")
    intact = file.read_bytes()
    file.write_bytes(damage + intact[len(damage) : -1])
    assert not native_function(CHECK_SIGNATURE, CHECK).was_cached
    assert native_function(CHECK_SIGNATURE, CHECK).was_cached


@pytest.mark.usefixtures("fresh_kernel_folder")
def test_a_cache_that_can_only_be_read_is_read_and_one_that_is_full_costs_a_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    native_function(CHECK_SIGNATURE, CHECK)

    def refuse(*_: object, **__: object) -> None:
        raise OSError("read-only file system")

    monkeypatch.setattr(tempfile, "mkstemp", refuse)
    monkeypatch.setattr(os, "utime", refuse)
    jit.kernel_folder.cache_clear()
    assert native_function(CHECK_SIGNATURE, CHECK).was_cached
    [file] = tmp_path.rglob("*.o")
    file.unlink()
    with pytest.warns(RuntimeWarning, match="read-only file system"):
        assert not native_function(CHECK_SIGNATURE, CHECK).was_cached


def test_a_file_says_for_which_function_it_was_written(tmp_path: Path) -> None:
    write(tmp_path, "one", ObjectCode("symbol", b"code\0more"))
    assert read(tmp_path, "one") == ObjectCode("symbol", b"code\0more")
    assert read(tmp_path, "two") is None
    [file] = tmp_path.iterdir()
    write(tmp_path, "two", ObjectCode("symbol", b""))
    [other] = set(tmp_path.iterdir()) - {file}
    other.write_bytes(file.read_bytes())
    assert read(tmp_path, "two") is None


def _writes_or_reads(folder: Path, number: int) -> bool:
    """Whether only whole files are ever seen."""
    for size in range(50):
        write(folder, "key", ObjectCode("symbol", bytes([number]) * (1000 + size)))
        found = read(folder, "key")
        if found is None or len(set(found.code)) != 1:
            return False
    return True


def test_processes_that_write_the_same_file_see_no_half_of_it(tmp_path: Path) -> None:
    with ProcessPoolExecutor(3, multiprocessing.get_context("spawn")) as processes:
        assert all(processes.map(_writes_or_reads, [tmp_path] * 3, range(3)))
    assert len(list(tmp_path.iterdir())) == 1


def test_the_cache_folder_follows_the_platforms_convention() -> None:
    home = Path.home()
    assert cache_folder({"XDG_CACHE_HOME": "/cache"}, "linux") == Path("/cache/mvllm")
    assert cache_folder({"XDG_CACHE_HOME": "relative"}, "linux") == home / ".cache" / "mvllm"
    assert cache_folder({}, "darwin") == home / "Library" / "Caches" / "mvllm"
    assert cache_folder({"LOCALAPPDATA": "/local"}, "win32") == Path("/local/mvllm")
    assert cache_folder({"MVLLM_CACHE": "/mine", "XDG_CACHE_HOME": "/cache"}, "linux") == Path("/mine")


@pytest.mark.usefixtures("fresh_kernel_folder")
def test_kernels_are_kept_beside_the_models(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MVLLM_CACHE", str(tmp_path))
    folder = jit.kernel_folder()
    assert folder is not None
    assert folder.parent == tmp_path / "kernels"


def test_any_edit_of_a_source_names_another_cache_folder(tmp_path: Path) -> None:
    first, second, renamed = (tmp_path / name for name in ("a.py", "b.py", "c.py"))
    first.write_text("x = 1")
    second.write_text("")
    before = sources_digest([first, second])
    assert sources_digest([first, second]) == before
    second.write_text("#")
    edited = sources_digest([first, second])
    second.rename(renamed)
    after = sources_digest([first, renamed])
    assert len({before, edited, after, sources_digest([first, renamed], "0.61")}) == 4


def test_every_module_that_kernels_take_constants_from_counts_as_their_source() -> None:
    sources = {path.resolve() for path in kernel_sources()}
    assert ROOT / "core" / "request.py" in sources, "GREEDY_TEMPERATURE reaches a kernel through the sampler"
    for path in (ROOT / "backends" / "cpu").glob("*.py"):
        assert path in sources
        modules = _imported_modules(path)
        if "mvllm.backends.cpu.jit" in modules:
            for module in modules - _WITHOUT_CONSTANTS:
                if module.startswith("mvllm.core."):
                    source = module.removeprefix("mvllm.").replace(".", "/") + ".py"
                    assert ROOT / source in sources, f"{path.name} imports {module}"


_WITHOUT_CONSTANTS = {
    f"mvllm.core.{name}"
    for name in (
        "errors",
        "interrupts",
        "types",
        "tensor",
        "model.spec",
        "trace",
        "load.mapped",
        "load.weights",
    )
}


def _imported_modules(path: Path) -> set[str]:
    nodes = ast.walk(ast.parse(path.read_text()))
    return {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}


def test_pruning_removes_only_folders_long_unused(tmp_path: Path) -> None:
    now = time.time()
    for name, age in (("current", 100), ("recent", 5), ("old", 100)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "kernel.nbc").write_text("")
        os.utime(tmp_path / name, (now - age, now - age))
    (tmp_path / "file").write_text("")
    os.utime(tmp_path / "file", (now - 100, now - 100))
    prune(tmp_path, keep=tmp_path / "current", before=now - 50)
    assert {path.name for path in tmp_path.iterdir()} == {"current", "recent", "file"}


@pytest.mark.usefixtures("fresh_kernel_folder")
def test_the_first_compilation_is_announced_once_and_a_warm_start_never(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def start() -> list[str]:
        """What is said by a process that loads two models."""
        jit.announce_first_compilation.cache_clear()
        caplog.clear()
        for _ in range(2):
            jit.announce_first_compilation()
        return [record.getMessage() for record in caplog.records]

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with caplog.at_level(logging.INFO, "mvllm"):
        name = instruction_sets.selected().name
        expected = f"compiling CPU kernels for {name}: first start on this machine, about 20 s"
        assert start() == [expected]
        native_function(CHECK_SIGNATURE, CHECK)
        assert start() == []


_FIRST_LOAD = """
import logging, sys
from mvllm.backends.cpu.backend import CpuBackend
from tests.conformance.random_models import ModelShape, geometry, random_model

class StopBeforeCompiling(logging.Handler):
    def emit(self, record):
        print(record.getMessage(), "mvllm.backends.cpu.model" in sys.modules)
        raise SystemExit

logging.getLogger("mvllm").addHandler(StopBeforeCompiling())
logging.getLogger("mvllm").setLevel(logging.INFO)
CpuBackend(threads=1).load(*random_model(ModelShape(), 0), geometry())
print("compiled without a word")
"""


def test_a_first_load_speaks_up_before_it_compiles(tmp_path: Path) -> None:
    environment = {**os.environ, "MVLLM_CACHE": str(tmp_path)}
    result = subprocess.run(
        [sys.executable, "-c", _FIRST_LOAD],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.startswith("compiling CPU kernels for ")
    assert result.stdout.endswith("about 20 s False\n")


_START = """
import sys
from mvllm import LLM, SamplingParams

with LLM(sys.argv[1], backend="cpu", threads=2) as llm:
    [output] = llm.generate("the other engine", SamplingParams(temperature=0.7, seed=1, max_tokens=3))
print(len(output.outputs[0].token_ids), "numba" in sys.modules)
"""


def test_a_second_start_compiles_nothing_and_does_without_numba(tmp_path: Path) -> None:
    model = tmp_path / "tiny.gguf"
    write_tiny_gguf(model, architecture="llama", tensor_type="Q8_0", seed=1)
    said = [
        subprocess.run(
            [sys.executable, "-c", _START, str(model)], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout
        for _ in range(2)  # both with the cache of this machine, which the first one completes
    ]
    assert said[1] == "3 False\n"


def test_the_best_instruction_set_of_the_machine_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(instruction_sets.OVERRIDE, raising=False)
    assert instruction_sets.selected.__wrapped__() is instruction_sets.available()[0]
    assert instruction_sets.available()[-1] is PORTABLE


def test_the_environment_can_name_the_instruction_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(instruction_sets.OVERRIDE, "portable")
    assert instruction_sets.selected.__wrapped__() is PORTABLE
    monkeypatch.setenv(instruction_sets.OVERRIDE, "avx1024")
    with pytest.raises(ConfigError, match=r"'avx1024'.*portable"):
        instruction_sets.selected.__wrapped__()


def test_features_that_numba_is_told_not_to_use_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numba.config, "CPU_FEATURES", "")
    assert instruction_sets.available() == [PORTABLE]
    listed = ",".join(f"+{feature}" for feature in AVX512.features)
    monkeypatch.setattr(numba.config, "CPU_FEATURES", listed)
    assert instruction_sets.available()[0] is AVX512
    both = [AVX512, instruction_sets.AVX512_GFNI]
    monkeypatch.setattr(numba.config, "CPU_FEATURES", f"{listed},+gfni")
    for processor, best_first in (("znver4", both), ("sapphirerapids", both[::-1])):
        monkeypatch.setattr(
            instruction_sets.llvmlite.binding, "get_host_cpu_name", lambda name=processor: name
        )
        assert instruction_sets.available()[:2] == best_first
    monkeypatch.setattr(numba.config, "CPU_FEATURES", listed.replace("+avx512vnni", "-avx512vnni"))
    assert AVX512 not in instruction_sets.available()


def _emit_widen(emitter: Emitter, halves: Value, floats: Value) -> None:
    half = emitter.load(vector(F16, 8), halves)
    emitter.store(half_to_float(emitter, PORTABLE, half), floats)


_widen = emitted(_emit_widen, 2)


def test_the_portable_half_conversion_is_exact_for_every_finite_value() -> None:
    def widen(halves, floats, count):
        for i in range(count):
            _widen(halves + 16 * i, floats + 32 * i)

    bits = np.arange(1 << 16, dtype=np.uint16)
    got = np.zeros(1 << 16, np.float32)
    native_function("void(int64, int64, int64)", widen).ctypes(
        bits.ctypes.data, got.ctypes.data, len(bits) // 8
    )
    expected = bits.view(np.float16).astype(np.float32)
    finite = np.isfinite(expected)
    assert np.array_equal(got[finite].view(np.uint32), expected[finite].view(np.uint32))


def _emit_sum(emitter: Emitter, count: Value, out: Value) -> None:
    def body(index: Value, carried: list[Value]) -> list[Value]:
        return [emitter.builder.fadd(carried[0], emitter.builder.sitofp(index, F32))]

    emitter.store(emitter.loop(count, [F32(0.5)], body)[0], out)


_sum = emitted(_emit_sum, 2)


def _emit_halves(emitter: Emitter, address: Value) -> Value:
    values = emitter.load(vector(I64, 8), address)
    return emitter.reduce(emitter.builder.add, values)


_total = emitted(_emit_halves, 1, returns="int64")


def test_emitted_loops_run_as_often_as_told_and_reductions_take_every_element() -> None:
    def loop(count, out):
        _sum(count, out)

    def total(address):
        return _total(address)

    compiled = kernel("void(int64, int64)")(loop)
    out = np.zeros(1, np.float32)
    for count, expected in ((0, 0.5), (1, 0.5), (5, 10.5)):
        compiled(count, out.ctypes.data)
        assert out[0] == expected
    values = np.array([1, 10, 100, 1000, 2, 20, 200, 2000])
    assert kernel("int64(int64)")(total)(values.ctypes.data) == values.sum()
