"""An engine for `mvllm.bench.peers.worker` that computes nothing: a token takes a second.

Its settings: `facts`; `fails`: the error of loading; `prints`: what it writes to standard output at every
prefill; `log` and `name`: a file that every prefill is noted in. A prompt of -1 ends the process, one of -2
never returns.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class PretendingEngine:
    def __init__(self, settings: dict[str, Any]) -> None:
        self.facts: dict[str, str] = settings.get("facts", {})
        self._settings = settings
        self._prompts: Sequence[Sequence[int]] = ()
        self._steps = 0

    def prefill(self, prompt: Sequence[int], repeats: int) -> float:
        if not prompt:
            raise RuntimeError("the prompt is empty")
        if prompt[0] == -1:
            os._exit(3)
        if prompt[0] == -2:
            threading.Event().wait()
        if "prints" in self._settings:
            os.write(1, self._settings["prints"].encode())
        if "log" in self._settings:
            with Path(self._settings["log"]).open("a") as log:
                log.write(f"{self._settings['name']}:{repeats}\n")
        return float(len(prompt) * repeats)

    def prepare(self, prompts: Sequence[Sequence[int]], steps: int) -> None:
        self._prompts, self._steps = prompts, steps

    def decode(self, repeats: int) -> tuple[float, list[int]]:
        """The tokens of the first sequence count up from its last one."""
        start = self._prompts[0][-1] + 1
        return float(self._steps * repeats), list(range(start, start + self._steps))


def load(settings: dict[str, Any]) -> PretendingEngine:
    if "fails" in settings:
        raise RuntimeError(settings["fails"])
    return PretendingEngine(settings)
