"""`mvllm profile`: where the time of a traced run went."""

from __future__ import annotations

import json
import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from mvllm.core.trace import STAGE, STEP

_PART = "run"  # of a cpu step: while its threads run the program
_FEWEST_PERCENT = 0.05  # rows below are left out
_NO_BYTES: Mapping[str, float] = {}


@dataclass
class TracedStep:
    """One step of a trace; durations in microseconds."""

    num_rows: int
    num_tokens: int  # drafts included
    num_drafts: int
    duration: float
    stages: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    parts: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """What the model did before and while its threads ran: "prepare" and "run"."""
    by_kind: dict[str, float] = field(default_factory=lambda: defaultdict(float))  # all threads together
    by_name: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    weight_bytes: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    """Of the products of a kind or name, once for each thread that took part."""
    threads: set[int] = field(default_factory=set)


@click.command()
@click.argument("trace_file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--names", is_flag=True, help="Also by weight and layer, the layers of a model together.")
def profile(trace_file: Path, names: bool) -> None:
    """Say where the time of the steps in TRACE_FILE went, a file that --trace has written.

    Steps that only decode, without drafts and with some, and steps with prompt tokens are told apart. Shares
    are of the steps' time; for instructions they are the mean over the threads. GB/s is how fast products
    read their packed weights.
    """
    try:
        events = json.loads(trace_file.read_text())["traceEvents"]
        steps = list(read_steps(events))
    except (ValueError, KeyError, TypeError) as error:
        raise click.ClickException(f"{trace_file} is no trace of mvllm: {error}") from error
    groups: dict[str, list[TracedStep]] = {"decode": [], "decode with drafts": [], "with prompt tokens": []}
    for step in steps:
        if step.num_tokens > step.num_rows + step.num_drafts:
            groups["with prompt tokens"].append(step)
        elif step.num_rows > 0:
            groups["decode with drafts" if step.num_drafts else "decode"].append(step)
    for title, group in groups.items():
        if group:
            click.echo("\n".join(_section(title, group, names=names)) + "\n")


def read_steps(events: Iterable[Mapping[str, Any]]) -> Iterator[TracedStep]:
    """The finished steps, in order: what follows a step's event belongs to it."""
    tracks: dict[int, str] = {}
    step: TracedStep | None = None
    for event in events:
        if event["name"] == "thread_name":
            tracks[event["tid"]] = event["args"]["name"]
        if event["ph"] != "X":
            continue
        if event["cat"] == STEP:
            if step is not None:
                yield step
            counts = event["args"]
            rows, tokens, drafts = (counts.get(name, 0) for name in ("rows", "tokens", "drafts"))
            step = TracedStep(rows, tokens, drafts, event["dur"])
        elif step is not None:
            _add(step, event, tracks[event["tid"]])
    if step is not None:
        yield step


def _add(step: TracedStep, event: Mapping[str, Any], track: str) -> None:
    name, category, duration = event["name"], event["cat"], event["dur"]
    if category == STAGE:
        step.stages[name] += duration
    elif not track.startswith("thread"):
        step.parts[name] += duration
    else:
        step.threads.add(event["tid"])
        name = re.sub(r"\d+", "*", name)
        step.by_kind[category] += duration
        step.by_name[name] += duration
        for key in {category, name}:
            step.weight_bytes[key] += event.get("args", {}).get("bytes", 0)


def _section(title: str, steps: Sequence[TracedStep], *, names: bool) -> list[str]:
    total = sum(step.duration for step in steps)
    tokens = statistics.mean(step.num_tokens for step in steps)
    median = statistics.median(step.duration for step in steps) / 1000
    lines = [f"{title}: {len(steps)} steps of {tokens:.1f} tokens (mean), {median:.3f} ms (median)"]
    lines += _table("stage", _sum(step.stages for step in steps), total, len(steps))
    parts = _sum(step.parts for step in steps)
    if _PART in parts:
        lines += _table("part of forward", parts, total, len(steps))
        lines.append(f"  {'outside the kernels':34}{_row(total - parts[_PART], total, len(steps))}")
    num_threads = max(len(step.threads) for step in steps)
    if num_threads:
        shared, count = total * num_threads, len(steps) * num_threads
        weight_bytes = _sum(step.weight_bytes for step in steps)
        lines += _table("instruction", _sum(step.by_kind for step in steps), shared, count, weight_bytes)
        if names:
            lines += _table("name", _sum(step.by_name for step in steps), shared, count, weight_bytes)
    return lines


def _sum(tables: Iterable[Mapping[str, float]]) -> dict[str, float]:
    sums: dict[str, float] = defaultdict(float)
    for table in tables:
        for name, value in table.items():
            sums[name] += value
    return sums


def _table(
    title: str,
    sums: Mapping[str, float],
    total: float,
    count: int,
    weight_bytes: Mapping[str, float] = _NO_BYTES,
) -> list[str]:
    """The rows of a table, largest first. All threads read a product's weights together, in the time that
    each of them takes."""
    rate = f"{'GB/s':>8}" if any(weight_bytes.values()) else ""
    lines = [f"  {title:34}{'ms/step':>9}{'share':>9}{rate}"]
    for name, value in sorted(sums.items(), key=lambda item: -item[1]):
        if 100 * value / total >= _FEWEST_PERCENT:
            read = weight_bytes.get(name, 0)
            rate = f"{read / value / 1000:8.1f}" if read else ""  # bytes per microsecond are MB/s
            lines.append(f"  {name:34}{_row(value, total, count)}{rate}")
    return lines


def _row(value: float, total: float, count: int) -> str:
    return f"{value / count / 1000:9.3f}{100 * value / total:8.1f}%"
