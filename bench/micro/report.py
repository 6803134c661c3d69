"""A comparison of product forms as tables for a terminal, as JSON, or as an SVG picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from mvllm.bench.micro.crossover import FORMS, Crossover, Timing


def table_of(crossover: Crossover) -> Table:
    """A row for each number of tokens: 10**9 operations per second in each form, the fastest one marked."""
    choice = "never" if crossover.panels_from is None else f"from {crossover.panels_from} tokens"
    table = Table(title=f"{crossover.shape}, GOP/s; panels {choice}", title_justify="left")
    for name in ("tokens", *FORMS):
        table.add_column(name, justify="right")
    for timing in crossover.timings:
        table.add_row(str(timing.tokens), *[_cell(crossover, timing, form) for form in FORMS])
    return table


def _cell(crossover: Crossover, timing: Timing, form: str) -> str:
    if form not in timing.seconds:
        return ""
    speed = f"{crossover.operations_per_second(timing, form) / 1e9:.1f}"
    return f"{speed} *" if form == min(timing.seconds, key=timing.seconds.__getitem__) else f"{speed}  "


def to_json(crossovers: Sequence[Crossover], threads: int) -> dict[str, Any]:
    """Plain values; times in seconds."""
    return {
        "threads": threads,
        "products": [
            {
                "format": crossover.shape.format_name,
                "rows": crossover.shape.rows,
                "inputs": crossover.shape.inputs,
                "wide_activations": crossover.shape.records.is_wide,
                "panels_from": crossover.panels_from,
                "timings": [{"tokens": t.tokens, "seconds": t.seconds} for t in crossover.timings],
            }
            for crossover in crossovers
        ],
    }


def write_plot(crossovers: Sequence[Crossover], path: Path) -> None:
    """One diagram per product: speed over the number of tokens, and the threshold. Needs matplotlib."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    with pyplot.rc_context({"svg.hashsalt": "mvllm", "font.size": 9}):
        figure, axes = pyplot.subplots(
            len(crossovers), figsize=(6, 3 * len(crossovers)), layout="constrained", squeeze=False
        )
        for [diagram], crossover in zip(axes, crossovers, strict=True):
            _draw(diagram, crossover)
        metadata: dict[str, Any] = {"Date": None}
        figure.savefig(path, format="svg", metadata=metadata)
        pyplot.close(figure)


def _draw(axes: Any, crossover: Crossover) -> None:
    for form in FORMS:
        timings = [timing for timing in crossover.timings if form in timing.seconds]
        speeds = [crossover.operations_per_second(timing, form) / 1e9 for timing in timings]
        axes.plot([timing.tokens for timing in timings], speeds, marker=".", label=form)
    if crossover.panels_from is not None:
        axes.axvline(crossover.panels_from, color="grey", linestyle=":", label="panels chosen")
    axes.set_xscale("log", base=2)
    axes.set_xlabel("tokens")
    axes.set_ylabel("GOP/s")
    axes.set_title(str(crossover.shape))
    axes.legend()
