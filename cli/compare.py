"""`mvllm compare`: the same prompts through several backends, and what differs."""

from __future__ import annotations

import json
from pathlib import Path

import click
from rich.console import Console

from mvllm.backends.mlx.options import MlxOptions
from mvllm.backends.registry import create_backend
from mvllm.bench.compare.plan import DEFAULT_PROMPTS, ComparedPrompt, Plan
from mvllm.bench.compare.plot import check_plot, write_plot
from mvllm.bench.compare.report import Thresholds, tables, to_json
from mvllm.bench.compare.run import Comparison, run_comparison
from mvllm.cli.prompts import PromptInput, read_prompt_file
from mvllm.cli.terminal import download_progress, note, show_log_messages
from mvllm.core.errors import ConfigError
from mvllm.core.load.catalog import ModelStore
from mvllm.core.load.checkpoint import load_checkpoint
from mvllm.core.load.contents import Checkpoint
from mvllm.core.tensor import Backend
from mvllm.core.text.chat_template import ChatTemplate
from mvllm.core.text.tokenizer import Tokenizer
from mvllm.llm import default_cache_dir

_NAME_CHARACTERS = 24
_PLAIN_WIDTH = 160  # columns of a table that goes to a file or a pipe


@click.command()
@click.argument("model")
@click.option(
    "--backends",
    default="cpu,reference",
    show_default=True,
    metavar="NAMES",
    help="Backends, with commas. Errors are relative to `reference` if it is among them, else to the first.",
)
@click.option(
    "--prompts",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Prompts, in the form `mvllm generate` takes; text is used as it is, without the chat template.  "
    "[default: four short ones]",
)
@click.option(
    "--max-tokens",
    type=click.IntRange(1, 4096),
    default=16,
    show_default=True,
    help="Greedy tokens per prompt; end tokens do not end it.",
)
@click.option("--threads", type=int, help="Worker threads of the cpu backend; by default all it may use.")
@click.option(
    "--mlx-dense",
    is_flag=True,
    help="mlx: keep dense what MLX has no exact format for, instead of re-encoding it.",
)
@click.option(
    "--kv-dtype",
    type=click.Choice(["auto", "f32", "f16", "bf16"]),
    default="auto",
    show_default=True,
    help="Type of keys and values; auto: each backend's default.",
)
@click.option(
    "--layer-threshold",
    type=float,
    default=5e-3,
    show_default=True,
    help="Name the first layer that adds more than this relative error.",
)
@click.option(
    "--scale-threshold",
    type=float,
    default=4e-3,
    show_default=True,
    help="Name the first layer that is too large or too small by more than this share.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option(
    "--plot", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE.svg", help="Draw it as SVG."
)
def compare(
    model: str,
    backends: str,
    prompts: Path | None,
    max_tokens: int,
    threads: int | None,
    mlx_dense: bool,
    kv_dtype: str,
    layer_threshold: float,
    scale_threshold: float,
    as_json: bool,
    plot: Path | None,
) -> None:
    """Run the same prompts through several backends and show what differs.

    For MODEL (a path or a name): the first different token of each prompt, log-probability errors, the error
    after each layer, tokens per second for prefill and decode, memory and load time.
    """
    thresholds = Thresholds(layer_threshold, scale_threshold)
    devices = _create(backends, threads, MlxOptions(dense=mlx_dense))
    if plot is not None:
        check_plot(plot)
    with download_progress() as progress:
        path = ModelStore(default_cache_dir()).resolve(model, progress)
    checkpoint = load_checkpoint(path)
    # Every backend gets the same ids, so unusual ones do no harm.
    tokenizer = Tokenizer.from_assets(checkpoint.text, allow_unknown_pretokenizer=True)
    plan = Plan(_prompts(prompts, tokenizer, checkpoint), max_tokens=max_tokens, kv_dtype=kv_dtype)
    show_log_messages()
    comparison = run_comparison(
        checkpoint, devices, plan, progress=lambda name: note(f"mvllm: running on {name}")
    )
    if as_json:
        click.echo(json.dumps(to_json(comparison, thresholds, tokenizer.token_text)))
    else:
        _print(comparison, thresholds, tokenizer)
    if not comparison.results:
        raise click.ClickException("no backend could run this model")
    if plot is not None:
        write_plot(comparison, plot)


def _create(names: str, threads: int | None, mlx: MlxOptions) -> list[Backend]:
    """The backends, before anything is loaded: a missing one is known at once."""
    listed = [name.strip() for name in names.split(",") if name.strip()]
    return [create_backend(name, threads=threads, mlx=mlx) for name in listed]


def _prompts(path: Path | None, tokenizer: Tokenizer, checkpoint: Checkpoint) -> tuple[ComparedPrompt, ...]:
    if path is None:
        inputs = [PromptInput(index, text) for index, text in enumerate(DEFAULT_PROMPTS)]
    else:
        inputs = read_prompt_file(path)
    return tuple(_encode(prompt, tokenizer, checkpoint) for prompt in inputs)


def _encode(prompt: PromptInput, tokenizer: Tokenizer, checkpoint: Checkpoint) -> ComparedPrompt:
    if prompt.sampling:
        raise ConfigError(
            f"prompt {prompt.id}: compare is greedy and takes no {', '.join(sorted(prompt.sampling))}"
        )
    if prompt.token_ids is not None:
        return ComparedPrompt(str(prompt.id), tuple(prompt.token_ids))
    if prompt.messages is not None:
        return ComparedPrompt(
            str(prompt.id), tuple(ChatTemplate(tokenizer, checkpoint.text).encode(prompt.messages))
        )
    text = prompt.text or ""
    name = text if len(text) <= _NAME_CHARACTERS else text[: _NAME_CHARACTERS - 3] + "..."
    return ComparedPrompt(name, tuple(tokenizer.encode(text)))


def _print(comparison: Comparison, thresholds: Thresholds, tokenizer: Tokenizer) -> None:
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_PLAIN_WIDTH)
    for table in tables(comparison, thresholds, tokenizer.token_text):
        console.print(table)
