"""mvllm and llama.cpp side by side on one GGUF file: medians of ratios, pair by pair.

    python -m mvllm.bench.peers.llama_cpp MODEL.gguf --peer-python OTHER_ENVIRONMENT/bin/python

llama.cpp runs in an environment of its own, made with

    CMAKE_ARGS="-DGGML_NATIVE=ON" pip install llama-cpp-python numpy

The two take turns (A B A B), so that a slow minute of the machine hits both; pairs during which other
processes used more than `--max-foreign` of a core are dropped.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import statistics
import subprocess
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click
import numpy as np

from mvllm.bench.peers.foreign_load import ForeignLoad
from mvllm.bench.peers.ours import Ours


@dataclass(frozen=True)
class Workload:
    """What one row of the table measures."""

    name: str
    sequences: int
    context: int  # prompt tokens of each sequence
    steps: int  # decode steps; 0: the prompt itself is measured


@dataclass
class Pairs:
    """Rates in tokens per second, pair by pair."""

    ours: list[float] = field(default_factory=list)
    theirs: list[float] = field(default_factory=list)
    dropped: int = 0

    def ratio(self) -> float:
        return statistics.median(a / b for a, b in zip(self.ours, self.theirs, strict=True))


class Peer:
    """The llama.cpp process."""

    def __init__(self, python: str, model: str, threads: int) -> None:
        worker = Path(__file__).with_name("llama_worker.py")
        self.process = subprocess.Popen(
            # Isolated: a neighbour of the worker has the name of the package that it imports.
            [python, "-I", str(worker), model, str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd="/",
        )
        self.version = self._read()["version"]

    def measure(self, order: dict[str, Any]) -> float:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        return float(self._read()["tokens_per_second"])

    def close(self) -> None:
        self.process.kill()
        self.process.wait()

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise click.ClickException("the llama.cpp process ended; is llama-cpp-python installed there?")
        answer: dict[str, Any] = json.loads(line)
        return answer


def _workloads(prefill: str, decode_context: str, sequences: str) -> list[Workload]:
    rows = [Workload(f"decode, context {n}", 1, n, 64) for n in map(int, decode_context.split(","))]
    rows += [Workload(f"{n} sequences", n, 128, 32) for n in map(int, sequences.split(","))]
    rows += [Workload(f"prefill {n}", 1, n, 0) for n in map(int, prefill.split(","))]
    return rows


def _measure_pair(ours: Ours, peer: Peer, load: Workload, seed: int) -> tuple[float, float]:
    rng = np.random.default_rng(seed)
    prompts = rng.integers(0, ours.vocab_size, (load.sequences, load.context)).tolist()
    if load.steps == 0:
        return ours.prefill(prompts[0]), peer.measure({"measure": "prefill", "prompt": prompts[0]})
    order = {"measure": "decode", "prompts": prompts, "steps": load.steps}
    return ours.decode(prompts, load.steps), peer.measure(order)


@click.command(help=__doc__)
@click.argument("model", type=click.Path(exists=True, dir_okay=False))
@click.option("--peer-python", required=True, help="Python of the environment with llama-cpp-python.")
@click.option("--threads", default=2, show_default=True, help="For both.")
@click.option("--prefill", default="256", show_default=True, help="Prompt lengths, with commas.")
@click.option("--decode-context", default="128", show_default=True, help="Context lengths, with commas.")
@click.option("--sequences", default="8", show_default=True, help="Numbers of sequences, with commas.")
@click.option("--pairs", default=7, show_default=True, help="Measured pairs of each row, after one warm-up.")
@click.option("--max-foreign", default=0.2, show_default=True, help="Drop pairs above this foreign load.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as one JSON object.")
def main(
    model: str,
    peer_python: str,
    threads: int,
    prefill: str,
    decode_context: str,
    sequences: str,
    pairs: int,
    max_foreign: float,
    as_json: bool,
) -> None:
    loads = _workloads(prefill, decode_context, sequences)
    longest = max(load.context + load.steps + 64 for load in loads)
    ours, peer = Ours(model, threads, longest + 64), Peer(peer_python, model, threads)
    results: dict[str, Pairs] = {}
    try:
        for load in loads:
            results[load.name] = _run(ours, peer, load, pairs, max_foreign)
    finally:
        peer.close()
        ours.close()
    _print(model, threads, peer.version, results, as_json=as_json)


def _run(ours: Ours, peer: Peer, load: Workload, pairs: int, max_foreign: float) -> Pairs:
    result = Pairs()
    _measure_pair(ours, peer, load, seed=0)
    for number in range(1, pairs + 1):
        foreign = ForeignLoad([os.getpid(), peer.process.pid])
        rates = _measure_pair(ours, peer, load, seed=number)
        load_now = foreign.measure()
        if load_now is not None and load_now > max_foreign:
            result.dropped += 1
            continue
        result.ours.append(rates[0])
        result.theirs.append(rates[1])
    return result


def _print(model: str, threads: int, peer_version: str, results: dict[str, Pairs], *, as_json: bool) -> None:
    facts = {
        "model": Path(model).name,
        "threads": threads,
        "mvllm": version("mvllm-engine"),
        "numba": version("numba"),
        "llama-cpp-python": peer_version,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "date": datetime.date.today().isoformat(),
    }
    if as_json:
        rows = {
            name: {"ours": p.ours, "llama.cpp": p.theirs, "dropped": p.dropped} for name, p in results.items()
        }
        click.echo(json.dumps({**facts, "tokens_per_second": rows}))
        return
    for name, value in facts.items():
        click.echo(f"{name:18} {value}")
    click.echo(f"\n| tokens/s | mvllm | llama.cpp | ratio | pairs kept |\n|{'---|' * 5}")
    for name, pair in results.items():
        if not pair.ours:
            click.echo(f"| {name} | - | - | - | 0 of {pair.dropped} |")
            continue
        kept = f"{len(pair.ours)} of {len(pair.ours) + pair.dropped}"
        ours, theirs = statistics.median(pair.ours), statistics.median(pair.theirs)
        click.echo(f"| {name} | {ours:.1f} | {theirs:.1f} | {pair.ratio():.2f} | {kept} |")


if __name__ == "__main__":
    main()
