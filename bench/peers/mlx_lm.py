"""mvllm's mlx backend and mlx-lm side by side, on the same float32 weights: medians of ratios, pair by pair.

    python -m mvllm.bench.peers.mlx_lm MODEL.gguf --peer-python OTHER_ENVIRONMENT/bin/python

mlx-lm runs in an environment of its own (pip install mlx-lm 'mlx[cpu]'). Both use MLX's default device, both
inherit this command's environment, so a BLAS named in LD_PRELOAD serves both. They take turns (A B A B), and
pairs during which other processes used more than `--max-foreign` of a core are dropped. mvllm is measured
through its whole engine, mlx-lm through its generators.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import statistics
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click
import numpy as np

from mvllm.backends.mlx.backend import MlxBackend
from mvllm.bench.peers.float32_folder import widened, write_folder
from mvllm.bench.peers.foreign_load import ForeignLoad
from mvllm.core.load.checkpoint import load_checkpoint
from mvllm.core.model.spec import ModelSpec
from mvllm.core.request import Request, SamplingParams
from mvllm.core.step import TokensOut
from mvllm.core.tensor import KvGeometry, Model, ModelWeights
from mvllm.core.types import RequestId
from mvllm.llm import LLM

WARM_STEPS = 2
"""Decode steps before the clock starts, as in the worker."""


class Float32Mlx(MlxBackend):
    """The mlx backend on weights that were widened before."""

    def __init__(self, weights: ModelWeights) -> None:
        super().__init__()
        self._widened = weights

    def load(self, spec: ModelSpec, weights: ModelWeights, geometry: KvGeometry) -> Model:
        return super().load(spec, self._widened, geometry)


class Ours:
    """A loaded model without prefix caching, so that every prompt is computed."""

    def __init__(self, path: str, weights: ModelWeights, max_model_len: int) -> None:
        self._llm = LLM(
            path, backend=Float32Mlx(weights), max_model_len=max_model_len, enable_prefix_caching=False
        )
        self._count = 0

    def decode(self, prompts: Sequence[Sequence[int]], steps: int) -> tuple[float, list[list[int]]]:
        """Seconds of `steps` decode steps, and every sequence's tokens."""
        engine, ids = self._llm.engine, [self._submit(prompt, WARM_STEPS + steps) for prompt in prompts]
        tokens: dict[RequestId, list[int]] = {id: [] for id in ids}

        def advance(length: int) -> None:
            """Until every sequence has `length` tokens."""
            while min(map(len, tokens.values())) < length:
                if not engine.has_work:
                    raise click.ClickException("mvllm ended a sequence early: its logits are no numbers")
                for event in engine.step():
                    if isinstance(event, TokensOut):
                        tokens[event.id] += event.token_ids

        advance(WARM_STEPS)
        start = time.perf_counter()
        advance(WARM_STEPS + steps)
        seconds = time.perf_counter() - start
        while engine.has_work:
            engine.step()
        return seconds, [tokens[id] for id in ids]

    def close(self) -> None:
        self._llm.close()

    def _submit(self, prompt: Sequence[int], max_tokens: int) -> RequestId:
        id = RequestId(str(self._count))
        params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=max_tokens)
        self._llm.engine.submit(Request(id, tuple(prompt), params, 0, max_tokens))
        self._count += 1
        return id


class Peer:
    """The mlx-lm process. Owns it."""

    def __init__(self, python: str, folder: Path) -> None:
        worker = Path(__file__).with_name("mlx_lm_worker.py")
        self.process = subprocess.Popen(
            # Isolated: a neighbour of the worker has the name of the package that it imports.
            [python, "-I", str(worker), str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            hello = self._read()
        except BaseException:
            self.close()
            raise
        self.versions: dict[str, str] = hello["versions"]
        self.device: str = hello["device"]

    def decode(self, prompts: Sequence[Sequence[int]], steps: int) -> tuple[float, list[list[int]]]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"prompts": prompts, "steps": steps}) + "\n")
        self.process.stdin.flush()
        answer = self._read()
        return answer["seconds"], answer["token_ids"]

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise click.ClickException("the mlx-lm process ended; is mlx-lm installed there?")
        answer: dict[str, Any] = json.loads(line)
        return answer


@dataclass
class Row:
    """One workload's pairs: rates in tokens per second, and how many greedy tokens were the same."""

    sequences: int
    ours: list[float] = field(default_factory=list)
    theirs: list[float] = field(default_factory=list)
    dropped: int = 0
    same_tokens: int = 0
    tokens: int = 0

    def ratio(self) -> float:
        return statistics.median(a / b for a, b in zip(self.ours, self.theirs, strict=True))


_COUNT = click.IntRange(min=1)


def _counts(context: click.Context, option: click.Parameter, value: str) -> list[int]:
    counts = [int(text) if text.strip().isdecimal() else 0 for text in value.split(",")]
    if not all(counts):
        raise click.BadParameter(f"{value!r} is not a list of numbers from 1 on, with commas")
    return counts


@click.command(help=__doc__)
@click.argument("model", type=click.Path(exists=True, dir_okay=False))
@click.option("--peer-python", required=True, help="Python of the environment with mlx-lm.")
@click.option(
    "--sequences",
    default="1,8",
    show_default=True,
    callback=_counts,
    help="Numbers of sequences, with commas.",
)
@click.option("--context", type=_COUNT, default=16, show_default=True, help="Prompt tokens of each sequence.")
@click.option("--steps", type=_COUNT, default=16, show_default=True, help="Measured decode steps.")
@click.option(
    "--pairs", type=_COUNT, default=5, show_default=True, help="Measured pairs of each row, after a warm-up."
)
@click.option("--max-foreign", default=0.2, show_default=True, help="Drop pairs above this foreign load.")
def main(
    model: str,
    peer_python: str,
    sequences: list[int],
    context: int,
    steps: int,
    pairs: int,
    max_foreign: float,
) -> None:
    checkpoint = load_checkpoint(Path(model))
    weights = widened(checkpoint.weights)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        write_folder(Path(folder), checkpoint, weights)
        with (
            closing(Peer(peer_python, Path(folder))) as peer,
            closing(Ours(model, weights, context + steps + 64)) as ours,
        ):
            for count in sequences:
                row = Row(count)
                for number in range(pairs + 1):
                    rng = np.random.default_rng(number)
                    prompts = rng.integers(0, checkpoint.spec.vocab_size, (count, context)).tolist()
                    foreign = ForeignLoad([os.getpid(), peer.process.pid])
                    _add_pair(row, ours.decode(prompts, steps), peer.decode(prompts, steps), steps)
                    load = foreign.measure()
                    if number == 0 or (load is not None and load > max_foreign):
                        row.ours.pop()
                        row.theirs.pop()
                        row.dropped += number > 0
                rows.append(row)
    _print(model, peer, rows, context=context, steps=steps)


def _add_pair(
    row: Row, ours: tuple[float, list[list[int]]], theirs: tuple[float, list[list[int]]], steps: int
) -> None:
    row.ours.append(row.sequences * steps / ours[0])
    row.theirs.append(row.sequences * steps / theirs[0])
    for our_ids, their_ids in zip(ours[1], theirs[1], strict=True):
        row.tokens += len(our_ids)
        row.same_tokens += sum(a == b for a, b in zip(our_ids, their_ids, strict=True))


def _print(model: str, peer: Peer, rows: list[Row], *, context: int, steps: int) -> None:
    facts = {
        "model": f"{Path(model).name}, weights and KV as float32",
        "workload": f"{steps} decode steps after {context} tokens",
        "device": peer.device,
        "preloaded": os.environ.get("LD_PRELOAD") or "nothing",
        "mvllm": f"{version('mvllm-engine')}, mlx {version('mlx')}",
        "peer": ", ".join(f"{name} {number}" for name, number in peer.versions.items()),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "date": datetime.date.today().isoformat(),
    }
    for name, value in facts.items():
        click.echo(f"{name:10} {value}")
    click.echo(f"\n| tokens/s | mvllm | mlx-lm | ratio | pairs kept | same greedy tokens |\n|{'---|' * 6}")
    for row in rows:
        name = f"decode, {row.sequences} sequence{'s' * (row.sequences > 1)}"
        kept = f"{len(row.ours)} of {len(row.ours) + row.dropped}"
        same = f"{row.same_tokens} of {row.tokens}"
        if not row.ours:
            click.echo(f"| {name} | - | - | - | {kept} | {same} |")
            continue
        ours, theirs = statistics.median(row.ours), statistics.median(row.theirs)
        click.echo(f"| {name} | {ours:.2f} | {theirs:.2f} | {row.ratio():.2f} | {kept} | {same} |")


if __name__ == "__main__":
    main()
