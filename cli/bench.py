"""`mvllm bench`: measurements of this machine."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click
from rich.console import Console

from mvllm.backends.cpu.threads import default_threads
from mvllm.backends.mlx.options import MlxOptions
from mvllm.backends.registry import create_backend
from mvllm.bench.compare.plot import check_plot
from mvllm.cli.terminal import download_progress, note
from mvllm.core.errors import ConfigError
from mvllm.core.load.catalog import ModelStore
from mvllm.core.load.checkpoint import load_checkpoint
from mvllm.core.load.contents import Checkpoint
from mvllm.llm import default_cache_dir

_MAX_THREADS = 256
_SECONDS = 0.05


@click.group()
def bench() -> None:
    """Measure what decides the speed of a model on this machine."""


@bench.command()
@click.argument("model", required=False)
@click.option(
    "--shape",
    "shapes",
    multiple=True,
    metavar="FORMAT:ROWSxINPUTS",
    help="A product instead of a model's, such as Q4_K:1536x8960 or Q6_K/wide:151936x1536; may be repeated.",
)
@click.option(
    "--threads",
    type=click.IntRange(1, _MAX_THREADS),
    help="Threads; by default all that the backend would use.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(0, 60),
    help=f"Time for each form and number of tokens.  [default: {_SECONDS}]",
)
@click.option(
    "--backend",
    type=click.Choice(["cpu", "mlx"]),
    default="cpu",
    show_default=True,
    help="mlx: up to how many rows its products are faster row by row (the value of --mlx-rows-apart).",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option(
    "--plot", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE.svg", help="Draw it as SVG."
)
def crossover(
    model: str | None,
    shapes: tuple[str, ...],
    threads: int | None,
    seconds: float | None,
    backend: str,
    as_json: bool,
    plot: Path | None,
) -> None:
    """Compare the forms of a backend's matrix products.

    For every different product of MODEL (a path or a name), or every --shape: the speed one token at a time
    (rows), by tiles and by panels, over the number of tokens; and from how many tokens on the backend
    chooses panels. The results of all forms are the same, bit for bit.

    With --backend mlx: the time of every product row by row, over its time whole.
    """
    if backend == "mlx":
        others = (threads, seconds, plot)
        if model is None or shapes or any(other is not None for other in others):
            raise ConfigError("--backend mlx takes a model and --json, nothing else")
        _mlx_crossover(model, as_json=as_json)
        return
    if (model is None) == (not shapes):
        raise ConfigError("name a model, or products with --shape, not both")
    if plot is not None:
        check_plot(plot)
    # Imported here: the kernels' modules compile when they are imported.
    from mvllm.bench.micro.crossover import compare_forms, parse_shape, shapes_of
    from mvllm.bench.micro.report import table_of, to_json, write_plot

    wanted = [parse_shape(text) for text in shapes]
    if model is not None:
        wanted = shapes_of(_load(model))
    threads = threads or default_threads()
    note(f"mvllm: timing {len(wanted)} products, threads: {threads}")
    console, results = Console(highlight=False), []
    for result in compare_forms(wanted, threads, _SECONDS if seconds is None else seconds):
        results.append(result)
        if not as_json:
            console.print(table_of(result))
    if as_json:
        click.echo(json.dumps(to_json(results, threads)))
    if plot is not None:
        write_plot(results, plot)


def _load(model: str) -> Checkpoint:
    with download_progress() as progress:
        path = ModelStore(default_cache_dir()).resolve(model, progress)
    return load_checkpoint(path)


def _mlx_crossover(model: str, *, as_json: bool) -> None:
    """
    Raises:
        BackendUnavailable: MLX is not installed.
    """
    create_backend("mlx")
    from mvllm.bench.micro.mlx_crossover import measure, rows_apart, table

    results = measure(_load(model).weights, MlxOptions())
    recommended = rows_apart(results)
    if as_json:
        click.echo(json.dumps({"rows_apart": recommended, "products": [asdict(kind) for kind in results]}))
        return
    click.echo(table(results))
    click.echo(f"\nrecommended: --mlx-rows-apart {recommended}")
