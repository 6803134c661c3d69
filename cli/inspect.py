"""`mvllm inspect`: what a model file holds and what running it takes."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from mvllm.backends.mlx.encode import reencoding_errors
from mvllm.cli.terminal import download_progress, show_log_messages
from mvllm.core.config import kv_bytes_per_token
from mvllm.core.load.catalog import ModelStore
from mvllm.core.load.checkpoint import load_checkpoint
from mvllm.core.load.contents import Checkpoint
from mvllm.llm import LLM, default_cache_dir


@click.command()
@click.argument("model")
@click.option(
    "--context",
    type=click.IntRange(min=1),
    metavar="TOKENS",
    help="Show memory at this many tokens of context.  [default: the model's]",
)
@click.option("--program", is_flag=True, help="Load it and list the program that a step runs.")
@click.option(
    "--backend",
    type=click.Choice(["auto", "cpu", "mlx", "reference"]),
    default="auto",
    show_default=True,
    help="Whose program.",
)
@click.option("--tensors", is_flag=True, help="List every tensor.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def inspect(
    model: str, context: int | None, program: bool, backend: str, tensors: bool, as_json: bool
) -> None:
    """Show architecture, dimensions, tensor types and memory of MODEL (a path or a name)."""
    with download_progress() as progress:
        path = ModelStore(default_cache_dir()).resolve(model, progress)
    checkpoint = load_checkpoint(path)
    facts = _facts(checkpoint, context)
    if tensors:
        facts["tensors"] = [
            {"name": name, "type": format_name, "shape": list(shape), "bytes": nbytes}
            for name, format_name, shape, nbytes in checkpoint.tensors
        ]
    if program:
        facts["program"] = _program(path, backend)
    if as_json:
        click.echo(json.dumps(facts, ensure_ascii=False, default=str))
    else:
        _print(facts)


def _facts(checkpoint: Checkpoint, context: int | None) -> dict[str, Any]:
    spec = checkpoint.spec
    tokens = context or spec.context_length
    return {
        "path": str(checkpoint.path),
        "format": checkpoint.format,
        "architecture": spec.architecture,
        "context_length": spec.context_length,
        "vocabulary": spec.vocab_size,
        "layers": spec.num_layers,
        "hidden": spec.hidden_size,
        "intermediate": spec.intermediate_size,
        "heads": spec.num_heads,
        "kv_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "tied_head": spec.tied_head,
        "chat_template": checkpoint.text.chat_template is not None,
        "end_tokens": sorted(checkpoint.text.eos_token_ids),
        "tensor_types": _tensor_types(checkpoint),
        "re_encoded_on_mlx": [asdict(error) for error in reencoding_errors(checkpoint.weights)],
        "weights_bytes": sum(nbytes for _, _, _, nbytes in checkpoint.tensors),
        "kv_bytes": {
            dtype: tokens * kv_bytes_per_token(spec.kv_values_per_token, dtype) for dtype in ("f16", "f32")
        },
        "kv_context": tokens,
    }


def _tensor_types(checkpoint: Checkpoint) -> dict[str, dict[str, int]]:
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for _, format_name, _, nbytes in checkpoint.tensors:
        counts[format_name] += 1
        sizes[format_name] += nbytes
    return {name: {"tensors": counts[name], "bytes": sizes[name]} for name in sorted(counts)}


def _program(path: Path, backend: str) -> str:
    show_log_messages()
    with LLM(
        path, backend=backend, max_model_len=256, num_kv_blocks=16, allow_unknown_pretokenizer=True
    ) as llm:
        return llm.describe_program()


def _print(facts: dict[str, Any]) -> None:
    program = facts.pop("program", None)
    tensors = facts.pop("tensors", None)
    types = facts.pop("tensor_types")
    re_encoded = facts.pop("re_encoded_on_mlx")
    kv, context = facts.pop("kv_bytes"), facts.pop("kv_context")
    weights = facts.pop("weights_bytes")
    for name, value in facts.items():
        click.echo(f"{name.replace('_', ' '):18} {value}")
    for name, of_type in types.items():
        click.echo(f"  {name:16} {of_type['tensors']:5} tensors {of_type['bytes'] / 2**20:10.1f} MiB")
    click.echo(f"{'weights':18} {weights / 2**20:.1f} MiB")
    for error in re_encoded:
        click.echo(
            f"{'on mlx':18} {error['format_name']} is re-encoded to 8 bits (--mlx-dense keeps it dense): "
            f"relative error {100 * error['relative_rms']:.2f} % (rms), {error['largest']:.2g} at most"
        )
    for dtype, nbytes in kv.items():
        click.echo(f"{'kv cache ' + dtype:18} {nbytes / 2**20:.1f} MiB at {context} tokens")
    for tensor in tensors or ():
        shape = " x ".join(map(str, tensor["shape"]))
        click.echo(f"{tensor['name']:44} {tensor['type']:5} {shape}")
    if program is not None:
        click.echo(program)
