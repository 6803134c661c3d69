"""REQUIREMENTS T2: packed weights replace the file's pages in memory, they do not come on top of them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from mvllm import LLM, SamplingParams
from tests.golden.data import model_path
from tests.resident import SMAPS, resident_bytes

pytestmark = pytest.mark.skipif(not SMAPS.exists(), reason="needs Linux's account of a process's memory")

ALLOWANCE = 250 << 20
"""Tokenizer, compiled kernels, touched KV blocks (2 MiB per layer), buffers."""


def test_a_loaded_model_holds_next_to_nothing_of_its_file() -> None:
    path = model_path("smollm2-135m").resolve()
    with LLM(path, max_model_len=64) as llm:
        llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=2))
        assert resident_bytes(path) < path.stat().st_size / 8


_PEAK = """
import sys
from pathlib import Path
import mvllm.backends.cpu.model
from mvllm import LLM, SamplingParams

def field(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))

before = field("VmRSS:")
with LLM(sys.argv[1], backend="cpu") as llm:
    llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=2))
    print(field("VmHWM:") - before)
"""


def test_peak_memory_stays_near_the_size_of_the_file() -> None:
    path = model_path("qwen2.5-coder-0.5b")
    child = subprocess.run(
        [sys.executable, "-c", _PEAK, str(path)], capture_output=True, text=True, check=True, timeout=300
    )
    assert int(child.stdout) < 1.2 * path.stat().st_size + ALLOWANCE
