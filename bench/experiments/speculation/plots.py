"""The report's figures, as SVG."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mvllm.bench.experiments.speculation.allowance import Allowance
from mvllm.bench.experiments.speculation.coupling import Position
from mvllm.core.errors import BackendUnavailable

WIDTH, HEIGHT = 7.0, 3.6  # inches


def _figure(columns: int = 1) -> tuple[Any, Any]:
    try:
        import matplotlib
    except ImportError as error:
        raise BackendUnavailable(
            "matplotlib", 'figures need it: pip install "mvllm-engine[plots]"'
        ) from error
    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "speculation"  # the same figure has the same bytes
    from matplotlib import pyplot

    return pyplot.subplots(1, columns, figsize=(WIDTH, HEIGHT), squeeze=False, layout="constrained")


def _save(figure: Any, path: Path) -> None:
    from matplotlib import pyplot

    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def bars(path: Path, title: str, unit: str, groups: Mapping[str, Mapping[str, float]], line: float) -> None:
    """One group of bars per case, one bar per series; a line marks where nothing is won or lost."""
    figure, [[axes]] = _figure()
    series = list(dict.fromkeys(name for values in groups.values() for name in values))
    width = 0.8 / max(1, len(series))
    for number, name in enumerate(series):
        places = [index + (number - (len(series) - 1) / 2) * width for index in range(len(groups))]
        heights = [values.get(name, 0.0) for values in groups.values()]
        axes.bar(places, heights, width, label=name)
    axes.axhline(line, color="black", linewidth=0.8)
    axes.set_xticks(range(len(groups)), list(groups))
    axes.set_ylabel(unit)
    axes.set_title(title)
    axes.legend(fontsize="small", loc="upper right")
    _save(figure, path)


def length_histograms(path: Path, histograms: Mapping[str, Mapping[str, int]]) -> None:
    """How often each number of drafts was proposed; one panel per case."""
    figure, [panels] = _figure(max(1, len(histograms)))
    for axes, (name, counts) in zip(panels, histograms.items(), strict=False):
        total = sum(counts.values())
        axes.bar([int(length) for length in counts], [count / total for count in counts.values()])
        axes.set_title(name, fontsize="small")
        axes.set_xlabel("drafts in a pass")
    panels[0].set_ylabel("share of passes")
    _save(figure, path)


def by_length(path: Path, curves: Mapping[str, tuple[Allowance, float]]) -> None:
    """Speed-up that constant lengths allow; a dotted line of the same colour is what `adaptive` reached."""
    figure, [[axes]] = _figure()
    for name, (allowed, reached) in curves.items():
        [line] = axes.plot(list(allowed.by_length), list(allowed.by_length.values()), marker="o", label=name)
        axes.axhline(reached, color=line.get_color(), linestyle=":", linewidth=1.2)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xlabel("constant draft length")
    axes.set_ylabel("speed-up that measurements allow")
    axes.legend(fontsize="small", loc="upper right")
    _save(figure, path)


def coupling(path: Path, positions: Mapping[str, Sequence[Position]]) -> None:
    """Acceptance of the coupling over that of rejection sampling: mean of the positions in each tenth."""
    figure, [[axes]] = _figure()
    for name, values in positions.items():
        tenths: dict[int, list[Position]] = {}
        for value in values:
            tenths.setdefault(min(9, int(value.rejection * 10)), []).append(value)
        points = [
            (statistics.fmean(v.rejection for v in tenth), statistics.fmean(v.coupling for v in tenth))
            for _, tenth in sorted(tenths.items())
        ]
        axes.plot(*zip(*points, strict=True), marker="o", label=name)
    axes.plot([0, 1], [0, 1], color="black", linewidth=0.8)
    axes.set_xlabel("rejection sampling: chance of acceptance")
    axes.set_ylabel("keyed coupling")
    axes.legend(fontsize="small", loc="upper right")
    _save(figure, path)
