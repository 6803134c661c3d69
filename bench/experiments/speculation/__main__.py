"""Speculation against the same engine without it: speed, acceptance, and whether the tokens are the same.

Results are added to a file as they come, so a run that was stopped goes on where it was; a report with
figures is written at the end of each.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import time
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from mvllm.bench.experiments.speculation.coupling import Position, compare, logits_along
from mvllm.bench.experiments.speculation.engines import TURN_TOKENS, Sampling, TargetAndDrafter
from mvllm.bench.experiments.speculation.report import write_report
from mvllm.bench.experiments.speculation.runs import (
    Pair,
    Results,
    Run,
    concurrent_runs,
    length_runs,
    policy_runs,
)
from mvllm.bench.experiments.speculation.workload import WORKLOADS, prompt_ids
from mvllm.bench.peers.foreign_load import ForeignLoad
from mvllm.core.load.checkpoint import load_checkpoint
from mvllm.core.spec.length_policies import POLICIES, create_policy
from mvllm.core.types import TokenId

DRAFTERS = ("ngram", "model", "ngram+model")
PARTS = ("policies", "lengths", "concurrent", "coupling", "report")


@click.command(help=__doc__)
@click.argument("target", type=click.Path(exists=True, path_type=Path))
@click.option(
    "--draft", type=click.Path(exists=True, path_type=Path), help="A draft model; without it, n-grams only."
)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder of the results.")
@click.option("--parts", default=",".join(PARTS), show_default=True, help="What to do, with commas.")
@click.option("--workloads", default=",".join(WORKLOADS), show_default=True, help="Prompts, with commas.")
@click.option("--policies", default=",".join(POLICIES), show_default=True, help="With commas.")
@click.option(
    "--drafters",
    default=",".join(DRAFTERS),
    show_default=True,
    help="With commas; without --draft it is ngram alone.",
)
@click.option("--tokens", default=512, show_default=True, help="Output tokens of a request.")
@click.option("--repeats", default=3, show_default=True, help="Pairs of runs for each policy.")
@click.option(
    "--lengths", default="1,2,3,4,6,8,12,16", show_default=True, help="Constant lengths, with commas."
)
@click.option("--requests", default=8, show_default=True, help="Concurrent requests.")
@click.option("--request-tokens", default=128, show_default=True, help="Output tokens of each of these.")
@click.option(
    "--coupling-tokens", default=256, show_default=True, help="Positions compared, for each prompt."
)
@click.option("--coupling-draws", default=200, show_default=True, help="Draws of the noise at each of them.")
@click.option("--prompt-tokens", type=int, help="Keep so many tokens of each prompt; default: all.")
@click.option("--backend", default="auto", show_default=True, help="Where both models run.")
@click.option("--threads", type=int, help="Worker threads; default: as many as this process may use.")
@click.option(
    "--max-foreign", default=0.2, show_default=True, help="Leave out pairs above this foreign load."
)
@click.option("--seconds", type=float, help="Start no new pair after so many seconds; the next call goes on.")
def main(
    target: Path,
    draft: Path | None,
    out: Path,
    parts: str,
    workloads: str,
    policies: str,
    drafters: str,
    tokens: int,
    repeats: int,
    lengths: str,
    requests: int,
    request_tokens: int,
    coupling_tokens: int,
    coupling_draws: int,
    prompt_tokens: int | None,
    backend: str,
    threads: int | None,
    max_foreign: float,
    seconds: float | None,
) -> None:
    wanted, names = parts.split(","), workloads.split(",")
    if "report" in wanted and find_spec("matplotlib") is None:
        raise click.UsageError(
            'the report has figures: pip install "mvllm-engine[plots]", or leave it out by --parts'
        )
    constants = tuple(map(int, lengths.split(",")))
    planned: list[Run] = []
    chosen = drafters.split(",") if draft is not None else ["ngram"]
    if not set(chosen) <= set(DRAFTERS):
        raise click.BadParameter(f"{drafters}: there are {', '.join(DRAFTERS)}", param_hint="--drafters")
    for drafter in chosen:
        for repeat in range(repeats):
            if "policies" in wanted:
                for name in names:
                    planned += policy_runs(drafter, name, policies.split(","), tokens, repeat)
            if "concurrent" in wanted:
                planned += concurrent_runs(drafter, requests, request_tokens, repeat)
        if "lengths" in wanted:
            for name in names:
                planned += length_runs(drafter, name, tokens, constants)
    planned.sort(key=lambda run: run.repeat)
    results = Results(out / "results.jsonl")
    try:
        results.begin(_facts(target, draft, threads))
    except ValueError as error:
        raise click.ClickException(str(error)) from error
    left = [run for run in planned if not results.has(run)]
    deadline = time.monotonic() + seconds if seconds is not None else None
    coupling_file = out / "coupling.json"
    coupling_left = "coupling" in wanted and draft is not None and not coupling_file.exists()
    if left or coupling_left:
        longest = max(tokens, request_tokens, coupling_tokens)
        experiment = _Experiment(target, draft, requests, longest, prompt_tokens, backend, threads)
        for number, run in enumerate(left):
            if deadline is not None and time.monotonic() > deadline:
                click.echo(f"{len(left) - number} pairs are left: give the same command again")
                return
            results.add(experiment.pair(run))
            click.echo(_line(results.pairs[-1]))
        if coupling_left:
            found = {name: experiment.compare(name, coupling_tokens, coupling_draws) for name in names}
            coupling_file.write_text(
                json.dumps({name: [asdict(position) for position in each] for name, each in found.items()})
            )
        experiment.close()
    if "report" in wanted:
        facts = {**results.facts, "coupling_temperature": _Experiment.COUPLING_TEMPERATURE}
        path = write_report(out, facts, results.pairs, _positions(coupling_file), max_foreign=max_foreign)
        click.echo(f"wrote {path}")


class _Experiment:
    """The models, and the pairs of runs on them."""

    COUPLING_TEMPERATURE = 0.8

    def __init__(
        self,
        target: Path,
        draft: Path | None,
        max_rows: int,
        max_tokens: int,
        prompt_tokens: int | None,
        backend: str,
        threads: int | None,
    ) -> None:
        checkpoint = load_checkpoint(target)
        self._prompts = {name: prompt_ids(checkpoint, name)[:prompt_tokens] for name in WORKLOADS}
        longest = max(map(len, self._prompts.values()))
        self._models = TargetAndDrafter(
            checkpoint,
            None if draft is None else load_checkpoint(draft),
            max_rows=max_rows,
            max_model_len=longest + max_tokens + 1,
            threads=threads,
            backend=backend,
        )
        for kind in ("ngram",) if draft is None else DRAFTERS:
            # Compiles what is not compiled yet, and brings the weights into memory.
            self._models.run_pair(
                [self._prompts["refactoring"][:64]],
                min(24, max_tokens),
                Sampling(),
                drafter=kind,
                policy=create_policy("fixed"),
            )

    def pair(self, run: Run) -> Pair:
        names = tuple(WORKLOADS) if run.workload == "both" else (run.workload,)
        prompts = [self._prompts[names[number % len(names)]] for number in range(run.num_requests)]
        sampling = Sampling(run.temperature)
        foreign = ForeignLoad([os.getpid()])
        policy = create_policy(run.policy, max_length=run.length)
        plain, drafted = self._models.run_pair(
            prompts, run.num_tokens, sampling, drafter=run.drafter, policy=policy
        )
        return Pair(run, plain, drafted, foreign.measure())

    def compare(self, name: str, tokens: int, draws: int) -> list[Position]:
        """Acceptance at the positions of the target's own sampled answer."""
        models, prompt = self._models, self._prompts[name]
        assert models.draft_checkpoint is not None
        assert models.draft_model is not None
        answer = models.answer(prompt, tokens, Sampling(self.COUPLING_TEMPERATURE))
        text: list[TokenId] = [*prompt, *answer]
        vocab_size = min(models.checkpoint.spec.vocab_size, models.draft_checkpoint.spec.vocab_size)
        start = len(prompt) - 1
        target, drafter = (
            logits_along(model, text[:-1], start, chunk=models.config.max_num_seqs, vocab_size=vocab_size)
            for model in (models.model, models.draft_model)
        )
        return [
            compare(p, q, self.COUPLING_TEMPERATURE, position=len(prompt) + number, draws=draws)
            for number, (p, q) in enumerate(zip(target, drafter, strict=True))
        ]

    def close(self) -> None:
        self._models.close()


def _positions(path: Path) -> dict[str, list[Position]]:
    if not path.exists():
        return {}
    found = json.loads(path.read_text())
    return {name: [Position(**position) for position in each] for name, each in found.items()}


def _facts(target: Path, draft: Path | None, threads: int | None) -> dict[str, Any]:
    return {
        "target": target.stem,
        "draft": draft.stem if draft is not None else "none",
        "threads": threads or "all",
        "machine": f"{_processor()}, {platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "turn_tokens": TURN_TOKENS,
        **{name: _version(name) for name in ("mvllm-engine", "numba", "numpy")},
        "date": datetime.date.today().isoformat(),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "?")


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _line(pair: Pair) -> str:
    run = pair.run
    length = "" if run.length is None else f" {run.length}"
    load = "?" if pair.foreign_load is None else f"{pair.foreign_load:.2f}"
    return (
        f"{run.num_requests} x {run.workload:11} {run.drafter:11} {run.policy}{length}: "
        f"decode {pair.plain.decode_rate:.1f} -> {pair.drafted.decode_rate:.1f} tokens/s "
        f"({pair.speed_up:.2f}x), "
        f"whole {pair.whole_speed_up:.2f}x, accepted {pair.drafted.steps.accepted} of "
        f"{pair.drafted.steps.proposed}, same tokens: {pair.same_tokens}, foreign load {load}"
    )


if __name__ == "__main__":
    main()
