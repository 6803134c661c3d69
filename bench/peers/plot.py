"""The results as one SVG picture. Needs matplotlib, which is asked for by the extra `plots`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mvllm.bench.peers.results import Summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PANELS = (("decode", "context, tokens"), ("sequences", "sequences"), ("prefill", "prompt, tokens"))


def write_plot(summaries: Sequence[Summary], title: str, path: Path) -> None:
    """Tokens per second of both engines, a panel for each kind of case, the ratio above each group."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    # The same results give the same file.
    with pyplot.rc_context({"svg.hashsalt": "mvllm", "font.size": 9}):
        figure, panels = pyplot.subplots(1, len(PANELS), figsize=(11, 3.6), layout="constrained")
        for axes, (kind, label) in zip(panels, PANELS, strict=True):
            _draw(axes, in_panel(summaries, kind), label)
            axes.set_title(kind)
        panels[0].set_ylabel("tokens/s, all sequences together")
        figure.suptitle(title)
        # The panels show the same engines, or none.
        bars = {
            label: bar
            for axes in panels
            for bar, label in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        figure.legend(bars.values(), bars.keys(), loc="outside right upper")
        metadata: dict[str, Any] = {"Date": None}
        figure.savefig(path, format="svg", metadata=metadata)
        pyplot.close(figure)


def in_panel(summaries: Sequence[Summary], kind: str) -> list[tuple[int, Summary]]:
    """The measured cases of a kind with their numbers, in order; decode-128 is also that of one sequence."""
    found = []
    for summary in summaries:
        name, _, number = summary.case.partition("-")
        if summary.ours is None:
            continue
        if name == kind:
            found.append((int(number), summary))
        elif kind == "sequences" and summary.case == "decode-128":
            found.append((1, summary))
    return sorted(found, key=lambda item: item[0])


def _draw(axes: Axes, cases: Sequence[tuple[int, Summary]], label: str) -> None:
    for name, offset, rates in (
        ("mvllm", -0.2, [summary.ours or 0.0 for _, summary in cases]),
        ("llama.cpp", 0.2, [summary.theirs or 0.0 for _, summary in cases]),
    ):
        if any(rates):
            axes.bar([place + offset for place in range(len(cases))], rates, 0.4, label=name)
    for place, (_, summary) in enumerate(cases):
        if summary.ratio is not None:
            top = max(summary.ours or 0.0, summary.theirs or 0.0)
            axes.annotate(f"{summary.ratio.median:.2f}x", (place, top), ha="center", va="bottom")
    axes.set_xticks(range(len(cases)), [str(number) for number, _ in cases])
    axes.set_xlabel(label)
    axes.margins(y=0.12)
