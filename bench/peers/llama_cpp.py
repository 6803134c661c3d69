"""mvllm and llama.cpp side by side on one GGUF file: medians of ratios, round by round.

The two take turns, so that a slow minute of the machine hits both. llama.cpp runs in an environment of its
own with the package llama-cpp-python.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

import click

from mvllm.backends.cpu.threads import default_threads
from mvllm.bench.compare.plot import check_plot
from mvllm.bench.peers.plot import write_plot
from mvllm.bench.peers.report import report, start_table, table
from mvllm.bench.peers.results import Results, Summary, counts, summarize
from mvllm.bench.peers.rounds import Round
from mvllm.bench.peers.session import Plan, bytes_read_per_step, engine_commands, measure
from mvllm.bench.peers.workloads import DEFAULT_CASES, parse_cases
from mvllm.core.errors import ConfigError, MvllmError
from mvllm.core.load.checkpoint import load_checkpoint


@click.command(help=__doc__)
@click.argument("model", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--peer-python", metavar="PYTHON", help="Python of the environment with llama-cpp-python.")
@click.option("--no-peer", is_flag=True, help="Measure mvllm alone.")
@click.option("--threads", type=click.IntRange(1), help="Of each; default: as many as mvllm would take.")
@click.option(
    "--cases",
    default=DEFAULT_CASES,
    show_default=True,
    help="What to measure, with commas: decode-CONTEXT, prefill-TOKENS, sequences-NUMBER.",
)
@click.option(
    "--rounds",
    type=click.IntRange(1),
    default=5,
    show_default=True,
    help="Rounds of each case that must count; at most twice as many are tried.",
)
@click.option(
    "--sample-seconds",
    type=click.FloatRange(0),
    default=1.0,
    show_default=True,
    help="Repeat a case for so long in every measurement.",
)
@click.option(
    "--max-foreign",
    type=click.FloatRange(0),
    default=0.2,
    show_default=True,
    help="Drop rounds in which other processes took more than this share of a core.",
)
@click.option("--seconds", type=click.FloatRange(0), help="Start no new round after so many seconds.")
@click.option(
    "--json",
    "json_file",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Keep the results here after every round; rounds that an equal run has left here count.",
)
@click.option(
    "--report",
    "report_file",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE.md",
    help="Write a report in Markdown.",
)
@click.option(
    "--plot",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE.svg",
    help="Draw tokens per second as SVG.",
)
def main(
    model: Path,
    peer_python: str | None,
    no_peer: bool,
    threads: int | None,
    cases: str,
    rounds: int,
    sample_seconds: float,
    max_foreign: float,
    seconds: float | None,
    json_file: Path | None,
    report_file: Path | None,
    plot: Path | None,
) -> None:
    if no_peer == (peer_python is not None):
        raise click.UsageError("give either --peer-python or --no-peer")
    try:
        for path in (json_file, report_file):
            if path is not None and not path.parent.is_dir():
                raise ConfigError(f"the folder of {path} does not exist")
        if plot is not None:
            check_plot(plot)
        plan = Plan(
            model,
            threads or default_threads(),
            tuple(parse_cases(cases)),
            rounds,
            sample_seconds,
            max_foreign,
            seconds,
        )
        checkpoint = load_checkpoint(model)
        results = Results(json_file)
        with _termination_as_exit():
            measure(
                plan,
                engine_commands(plan, peer_python),
                checkpoint,
                results,
                tell=lambda round: click.echo(_line(round, max_foreign), err=True),
            )
        _show(plan, results, bytes_read_per_step(checkpoint.weights), report_file, plot)
    except MvllmError as error:
        raise click.ClickException(str(error)) from error
    left = plan.missing(results)
    if left:
        more = "" if json_file is None else ": give the same command again"
        click.echo(f"{left} rounds are left{more}", err=True)


def _show(
    plan: Plan, results: Results, weight_bytes: int, report_file: Path | None, plot: Path | None
) -> None:
    summaries = _summaries(plan, results, weight_bytes)
    click.echo(table(summaries))
    click.echo(start_table(results.starts))
    if plot is not None:
        write_plot(summaries, f"{plan.model.name}, {plan.threads} threads", plot)
    if report_file is not None:
        text = report(
            results.facts,
            summaries,
            results.starts,
            sys.argv[1:],
            weight_bytes=weight_bytes,
            sample_seconds=plan.sample_seconds,
            max_foreign=plan.max_foreign,
            plot=None if plot is None else os.path.relpath(plot, report_file.parent),
        )
        report_file.write_text(text)


def _summaries(plan: Plan, results: Results, weight_bytes: int) -> Sequence[Summary]:
    """Of every case that has been measured, earlier runs included."""
    names = ",".join(dict.fromkeys(round.case for round in results.rounds))
    cases = sorted(parse_cases(names), key=lambda case: case.place) if names else []
    return [summarize(case.name, results.rounds, plan.max_foreign, weight_bytes) for case in cases]


def _line(round: Round, max_foreign: float) -> str:
    load = "?" if round.foreign_load is None else f"{round.foreign_load:.2f}"
    rates = f"mvllm {round.ours.rate:.1f} tokens/s"
    if round.theirs is not None:
        ratio = round.ours.rate / round.theirs.rate
        rates += f", llama.cpp {round.theirs.rate:.1f}, ratio {ratio:.2f}"
    end = "" if counts(round, max_foreign) else ": dropped"
    return f"{round.case}: {rates}, {round.bandwidth / 1e9:.1f} GB/s, foreign load {load}{end}"


@contextlib.contextmanager
def _termination_as_exit() -> Iterator[None]:
    """A termination signal ends the program as an interrupt does, with everything closed."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


if __name__ == "__main__":
    main()
