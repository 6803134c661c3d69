"""Compiling for the CPU backend: a cache that never fails nor goes stale, instructions that the CPU has."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numba
import numpy as np
import pytest

from mvllm.backends.cpu import isa as instruction_sets
from mvllm.backends.cpu import jit
from mvllm.backends.cpu.isa import AVX512, PORTABLE, half_to_float
from mvllm.backends.cpu.jit import kernel, native_function, prune, sources_digest, user_cache_folder
from mvllm.backends.cpu.vector import F16, F32, I64, Emitter, Value, emitted, vector
from mvllm.core.errors import ConfigError


@pytest.fixture
def fresh_cache_folder() -> Iterator[None]:
    jit.cache_folder.cache_clear()
    yield
    jit.cache_folder.cache_clear()


def _add(a: int, b: int) -> int:
    return a + b


@pytest.mark.usefixtures("fresh_cache_folder")
def test_without_a_writable_cache_kernels_compile_after_one_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    with pytest.warns(RuntimeWarning, match="XDG_CACHE_HOME") as warned:
        first = kernel("int64(int64, int64)")(_add)
        second = native_function("int64(int64, int64)", _add)
    assert len(warned) == 1
    assert (first(1, 2), second.ctypes(3, 4)) == (3, 7)


@pytest.mark.usefixtures("fresh_cache_folder")
def test_a_user_without_a_home_gets_no_cache_and_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    with pytest.warns(RuntimeWarning, match="home directory"):
        assert jit.cache_folder() is None


@pytest.mark.usefixtures("fresh_cache_folder")
def test_numbas_own_cache_setting_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(numba.config, "CACHE_DIR", "the user's")
    assert kernel("int64(int64, int64)")(_add)(1, 2) == 3
    assert numba.config.CACHE_DIR == "the user's"
    assert list(tmp_path.rglob("*.nbc")), "the kernel was cached below XDG_CACHE_HOME"


def test_the_cache_folder_follows_the_platforms_convention() -> None:
    home = Path.home()
    assert user_cache_folder({"XDG_CACHE_HOME": "/cache"}, "linux") == Path("/cache")
    assert user_cache_folder({"XDG_CACHE_HOME": "relative"}, "linux") == home / ".cache"
    assert user_cache_folder({}, "darwin") == home / "Library" / "Caches"
    assert user_cache_folder({"LOCALAPPDATA": "/local"}, "win32") == Path("/local")


def test_any_edit_of_a_source_names_another_cache_folder(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1")
    (tmp_path / "b.py").write_text("")
    before = sources_digest(tmp_path)
    assert sources_digest(tmp_path) == before
    (tmp_path / "b.py").write_text("#")
    edited = sources_digest(tmp_path)
    (tmp_path / "b.py").rename(tmp_path / "c.py")
    assert len({before, edited, sources_digest(tmp_path), sources_digest(tmp_path, "0.61")}) == 4


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


_SECOND_START = """
from mvllm.backends.cpu import linear
from mvllm.backends.cpu.isa import selected
linear.matmul_address("Q8_0", selected())
print(sum(linear.quantize_row.stats.cache_hits.values()), linear._compiled[0].cache_hits)
"""


def test_a_second_start_compiles_nothing(tmp_path: Path) -> None:
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    hits = [
        subprocess.run(
            [sys.executable, "-c", _SECOND_START], env=environment, capture_output=True, text=True, check=True
        ).stdout.split()
        for _ in range(2)
    ]
    assert hits == [["0", "0"], ["1", "1"]]


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


_total = emitted(_emit_halves, 1, returns=numba.types.int64)


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
