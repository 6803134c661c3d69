"""C9: the cpu backend's kernels touch nothing beside their buffers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conformance.guarded_runs import CASES, PLANTS

EXAMPLES = 50 if os.environ.get("HYPOTHESIS_PROFILE") == "nightly" else 9
ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork and mprotect")


@pytest.fixture(scope="module")
def ends() -> dict[str, int]:
    """How the process of each case ended."""
    command = [sys.executable, "-m", "tests.conformance.guarded_runs", str(EXAMPLES)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    found: dict[str, int] = json.loads(run.stdout)
    return found


@pytest.mark.parametrize("case", [case.name for case in CASES if case.planted is None])
def test_nothing_is_touched_beside_the_buffers(ends: dict[str, int], case: str) -> None:
    assert ends[case] == 0


@pytest.mark.parametrize("planted", PLANTS)
def test_a_buffer_that_is_too_short_is_noticed(ends: dict[str, int], planted: str) -> None:
    assert ends[planted] in (-signal.SIGSEGV, -signal.SIGBUS)
