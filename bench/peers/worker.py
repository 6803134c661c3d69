"""One engine in a process of its own, measured on command.

    python worker.py ENGINE_FILE SETTINGS

Runs in the environment of the engine, with nothing but the standard library. ENGINE_FILE is a Python file
with a function `load(settings) -> Engine`; SETTINGS is a JSON object. Answers go to standard output, one JSON
object per line: first {"facts": {...}, "load_seconds": s}, then one for each order that is read, one per
line, from standard input:

    {"do": "prefill", "prompt": [...], "repeats": n}     -> {"seconds": s}
    {"do": "prepare", "prompts": [[...], ...], "steps": n} -> {}
    {"do": "decode", "repeats": n}                       -> {"seconds": s, "token_ids": [...]}

An order that fails is answered with {"error": "..."}. The process ends with its standard input, whatever
it is doing.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from queue import SimpleQueue
from typing import Any, Protocol


class Engine(Protocol):
    """What is measured. Greedy; no sequence ends before it has all its tokens."""

    facts: dict[str, str]
    """Versions and build, for the report."""

    def prefill(self, prompt: Sequence[int], repeats: int) -> float:
        """Seconds from a prompt to its first output token, computed anew each time; sum over `repeats`."""

    def prepare(self, prompts: Sequence[Sequence[int]], steps: int) -> None:
        """Compute the keys and values of one prompt per sequence, for `decode` to start from."""

    def decode(self, repeats: int) -> tuple[float, list[int]]:
        """Decode the prepared `steps` in every sequence, each time from the end of the prompts.

        Returns:
            Seconds without what comes before the first of the steps, sum over `repeats`; and the first
            sequence's tokens in the last of them.
        """


def serve(engine: Engine, orders: Iterable[str], answer: Callable[[dict[str, Any]], None]) -> None:
    """Carry out one order after the other."""
    for line in orders:
        try:
            answer(_carry_out(engine, json.loads(line)))
        except Exception as error:
            answer({"error": f"{type(error).__name__}: {error}"})


def _carry_out(engine: Engine, order: dict[str, Any]) -> dict[str, Any]:
    if order["do"] == "prefill":
        return {"seconds": engine.prefill(order["prompt"], order["repeats"])}
    if order["do"] == "prepare":
        engine.prepare(order["prompts"], order["steps"])
        return {}
    if order["do"] == "decode":
        seconds, token_ids = engine.decode(order["repeats"])
        return {"seconds": seconds, "token_ids": token_ids}
    raise ValueError(f"unknown order {order['do']!r}")


def _read_orders(orders: SimpleQueue[str]) -> None:
    for line in sys.stdin:
        orders.put(line)
    # The owner is gone or wants no more, so what still runs is of no use.
    os._exit(0)


def _load(engine_file: str, settings: dict[str, Any]) -> Engine:
    spec = importlib.util.spec_from_file_location("measured_engine", engine_file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{engine_file} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    engine: Engine = module.load(settings)
    return engine


def main() -> None:
    # An interrupt reaches every process of the terminal; this one ends with its owner.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # What libraries print must not come between the answers.
    with contextlib.suppress(BrokenPipeError), os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)

        def answer(content: dict[str, Any]) -> None:
            print(json.dumps(content), file=answers, flush=True)

        orders: SimpleQueue[str] = SimpleQueue()
        threading.Thread(target=_read_orders, args=(orders,), daemon=True).start()
        start = time.perf_counter()
        engine = _load(sys.argv[1], json.loads(sys.argv[2]))
        answer({"facts": engine.facts, "load_seconds": time.perf_counter() - start})
        serve(engine, iter(orders.get, None), answer)


if __name__ == "__main__":
    main()
