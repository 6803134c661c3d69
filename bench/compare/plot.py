"""A comparison as one SVG picture. Needs matplotlib, which is asked for by the extra `plots`."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mvllm.bench.compare.measures import Result
from mvllm.bench.compare.run import Comparison
from mvllm.core.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SMALLEST_ERROR = 1e-9  # stands for zero on a logarithmic axis


def check_plot(path: Path) -> None:
    """Fail before the work rather than after it.

    Raises:
        ConfigError: matplotlib is missing, or the path can't take an SVG file.
    """
    if path.suffix.lower() != ".svg":
        raise ConfigError(f"the plot is an SVG file; {path} should end in .svg")
    if not path.parent.is_dir():
        raise ConfigError(f"the plot's folder does not exist: {path.parent}")
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("plots need matplotlib; install it with: pip install 'mvllm-engine[plots]'")


def write_plot(comparison: Comparison, path: Path) -> None:
    """Tokens per second, and the error after each layer of every backend but the base."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    # The same comparison gives the same file.
    with pyplot.rc_context({"svg.hashsalt": "mvllm", "font.size": 9}):
        figure, (speed, error) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
        _draw_speed(speed, comparison.results)
        _draw_error(error, comparison)
        metadata: dict[str, Any] = {"Date": None}
        figure.savefig(path, format="svg", metadata=metadata)
        pyplot.close(figure)


def _draw_speed(axes: Axes, results: Sequence[Result]) -> None:
    """Groups of bars: prefill and decode for each batch size, one bar per backend."""
    width = 0.8 / max(1, len(results))
    labels: list[str] = []
    for index, result in enumerate(results):
        bars = [(f"prefill\nx{speed.sequences}", speed.prefill) for speed in result.speeds]
        bars += [(f"decode\nx{speed.sequences}", speed.decode) for speed in result.speeds]
        labels = [label for label, _ in bars]
        places = [group + (index + 0.5) * width - 0.4 for group in range(len(bars))]
        axes.bar(places, [value for _, value in bars], width, label=result.backend)
    axes.set_xticks(range(len(labels)), labels)
    axes.set_yscale("log")
    axes.set_ylabel("tokens/s, all sequences together")
    axes.set_title("Speed")
    axes.legend(loc="upper right")


def _draw_error(axes: Axes, comparison: Comparison) -> None:
    """Lines over the layers: the error so far, and dotted what each layer adds."""
    for result in comparison.results:
        if result.difference is None:
            continue
        layers = result.difference.layers
        borders = range(len(layers))
        total = [max(layer.total, _SMALLEST_ERROR) for layer in layers]
        added = [max(layer.added, _SMALLEST_ERROR) for layer in layers]
        [line] = axes.plot(borders, total, label=result.backend)
        axes.plot(borders, added, linestyle=":", color=line.get_color(), label=f"{result.backend}, added")
    axes.set_yscale("log")
    axes.set_xlabel("layers done")
    axes.set_ylabel(f"error relative to {comparison.base}")
    axes.set_title("Activations")
    if axes.lines:
        axes.legend(loc="upper right")
