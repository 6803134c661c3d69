"""Options that several commands share, and what they build."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields
from typing import Any, TypeVar

import click

from mvllm.backends.mlx.options import MlxOptions
from mvllm.backends.registry import create_backend
from mvllm.core.config import EngineConfig
from mvllm.core.load.catalog import DEFAULT_MODEL
from mvllm.core.request import SamplingParams
from mvllm.core.spec.adaptive_length import DEFAULT_ADAPTIVE_MAX
from mvllm.core.spec.draft_length import DEFAULT_LENGTH, DEFAULT_MAX_LENGTH
from mvllm.core.spec.length_policies import POLICIES
from mvllm.core.tensor import Backend
from mvllm.speculation import DraftSettings

Command = TypeVar("Command", bound=Callable[..., Any])

DEFAULT_MAX_TOKENS = 512
"""Output limit on the command line when --max-tokens is not given."""


def _apply(options: list[Callable[[Command], Command]]) -> Callable[[Command], Command]:
    def decorate(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


model_option = click.option(
    "-m",
    "--model",
    default=DEFAULT_MODEL,
    show_default=True,
    help="A .gguf file, a Hugging Face folder, a catalog name, or a hub repository (owner/name).",
)

sampling_options = _apply(
    [
        click.option("-n", "n", type=int, default=1, show_default=True, help="Answers per prompt."),
        click.option("-t", "--temperature", type=float, default=0.0, show_default=True, help="0 is greedy."),
        click.option("--top-k", type=int, default=0, show_default=True, help="Keep the k likeliest; 0: all."),
        click.option("--top-p", type=float, default=1.0, show_default=True, help="Keep this much mass."),
        click.option(
            "--min-p",
            type=float,
            default=0.0,
            show_default=True,
            help="Keep tokens above this share of the best.",
        ),
        click.option("--repetition-penalty", type=float, default=1.0, show_default=True, help="1: none."),
        click.option("--presence-penalty", type=float, default=0.0, show_default=True, help="-2 to 2."),
        click.option("--frequency-penalty", type=float, default=0.0, show_default=True, help="-2 to 2."),
        click.option("--logit-bias", metavar="JSON", help='Added to logits, as {"token id": bias}.'),
        click.option("--seed", type=int, help="Makes sampled answers repeatable."),
        click.option(
            "--max-tokens",
            type=int,
            help=f"Output limit; by default the rest of the context, at most {DEFAULT_MAX_TOKENS}.",
        ),
        click.option("--min-tokens", type=int, default=0, show_default=True, help="No end before this."),
        click.option("--ignore-eos", is_flag=True, help="Go on after the model's end tokens."),
        click.option("--stop", multiple=True, metavar="TEXT", help="End before this text; may be repeated."),
        click.option(
            "--stop-token-id",
            type=int,
            multiple=True,
            metavar="ID",
            help="End at this token; may be repeated.",
        ),
        click.option("--include-stop", is_flag=True, help="Keep the stop text in the answer."),
        click.option("--show-special-tokens", is_flag=True, help="Show special tokens in the answer."),
        click.option(
            "--logprobs", type=int, metavar="K", help="With --json: log-probabilities of the K likeliest."
        ),
    ]
)

engine_options = _apply(
    [
        click.option(
            "--backend",
            type=click.Choice(["auto", "cpu", "mlx", "reference"]),
            default="auto",
            show_default=True,
            help="Where to compute; auto: mlx where there is Metal, else cpu.",
        ),
        click.option(
            "--exact",
            is_flag=True,
            help="mlx: compute every token apart, so that no answer depends on the batch; slow. "
            "The other backends do so anyway.",
        ),
        click.option(
            "--mlx-dense",
            is_flag=True,
            help="mlx: keep dense what MLX has no exact format for (Q6_K), instead of re-encoding it.",
        ),
        click.option(
            "--mlx-activations",
            type=click.Choice(["f32", "f16", "bf16"]),
            default="f32",
            show_default=True,
            help="mlx: type of activations and dense weights.",
        ),
        click.option(
            "--mlx-rows-apart",
            type=int,
            default=0,
            show_default=True,
            metavar="ROWS",
            help="mlx: make products of at most this many rows row by row; 0: none.",
        ),
        click.option("--threads", type=int, help="Worker threads; by default all this process may use."),
        click.option(
            "--max-model-len",
            type=int,
            metavar="TOKENS",
            help="Context; default: the model's, or what the KV pool holds if that is less.",
        ),
        click.option("--max-num-seqs", type=int, help="Most sequences per step.  [default: 64]"),
        click.option("--max-num-batched-tokens", type=int, help="Most tokens per step.  [default: 512]"),
        click.option("--block-size", type=int, metavar="TOKENS", help="Tokens per KV block.  [default: 16]"),
        click.option("--num-kv-blocks", type=int, help="Size of the KV pool in blocks."),
        click.option("--kv-cache-bytes", type=int, help="Size of the KV pool in bytes."),
        click.option(
            "--kv-dtype",
            type=click.Choice(["auto", "f32", "f16", "bf16"]),
            help="Type of keys and values.  [default: auto]",
        ),
        click.option("--no-prefix-caching", is_flag=True, help="Compute every prompt anew."),
        click.option(
            "--admission",
            type=click.Choice(["optimistic", "reserve"]),
            help="Admit when the prompt fits, or when the worst case does.  [default: optimistic]",
        ),
        click.option(
            "--allow-unknown-pretokenizer",
            is_flag=True,
            help="Load a GGUF file that names no known pre-tokenizer, at the risk of wrong token ids.",
        ),
        click.option(
            "--policy",
            type=click.Choice(["fcfs", "shortest-prefill", "round-robin"]),
            help="Whose prompt gets a step's spare tokens.  [default: fcfs]",
        ),
        click.option(
            "--no-mmap",
            is_flag=True,
            help="Read the file into memory, where it stays, instead of mapping it; for slow network disks.",
        ),
    ]
)

speculation_options = _apply(
    [
        click.option(
            "--drafter",
            type=click.Choice(["ngram", "model", "ngram+model"]),
            help="Draft tokens for the model to verify: looked up in the text, by --draft-model, or looked "
            "up where the text repeats itself and else by the draft model. Changes speed, never the answer.  "
            "[default: ngram+model with --draft-model, else none]",
        ),
        click.option(
            "--draft-model", metavar="MODEL", help="A smaller model of the same family to draft with."
        ),
        click.option(
            "--draft-length",
            type=int,
            metavar="TOKENS",
            help="Most tokens drafted at a time; with --draft-policy fixed, wherever there are so many.  "
            f"[default: {DEFAULT_ADAPTIVE_MAX} (adaptive), {DEFAULT_LENGTH} (fixed), {DEFAULT_MAX_LENGTH}]",
        ),
        click.option(
            "--draft-policy",
            type=click.Choice(POLICIES),
            help="How many tokens are drafted; adaptive: as many as pay, down to none.  [default: adaptive]",
        ),
        click.option(
            "--draft-backend",
            type=click.Choice(["auto", "cpu", "mlx", "reference"]),
            help="Where the draft model runs; by default where the model does.",
        ),
        click.option(
            "--draft-context",
            type=int,
            metavar="TOKENS",
            help="How much of a longer text the draft model reads before its first draft.  [default: 64]",
        ),
        click.option(
            "--draft-kv-cache-bytes", type=int, help="Size of the draft model's own KV pool in bytes."
        ),
    ]
)

_ENGINE_FIELDS = (
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "block_size",
    "num_kv_blocks",
    "kv_cache_bytes",
    "kv_dtype",
    "admission",
    "policy",
)


def engine_config(options: dict[str, Any]) -> EngineConfig:
    """The settings that were given; the rest keep their defaults. Takes its fields out of `options`."""
    given = {name: options.pop(name) for name in _ENGINE_FIELDS}
    chosen = {name: value for name, value in given.items() if value is not None}
    return EngineConfig(enable_prefix_caching=not options.pop("no_prefix_caching"), **chosen)


def draft_settings(options: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `LLM` that the speculation options stand for. Takes them out of `options`."""
    return {field.name: options.pop(field.name) for field in fields(DraftSettings)}


def backend_from(options: dict[str, Any]) -> Backend:
    """The backend that was asked for. Takes its fields out of `options`.

    Raises:
        BackendUnavailable: it can't run here.
    """
    mlx = MlxOptions(
        exact=options.pop("exact"),
        dense=options.pop("mlx_dense"),
        activations=options.pop("mlx_activations"),
        rows_apart=options.pop("mlx_rows_apart"),
    )
    return create_backend(options.pop("backend"), threads=options["threads"], mlx=mlx)


def sampling_params(options: dict[str, Any]) -> SamplingParams:
    """Sampling parameters from the options; `max_tokens` stays None if it was not given."""
    return SamplingParams(
        n=options["n"],
        temperature=options["temperature"],
        top_k=options["top_k"],
        top_p=options["top_p"],
        min_p=options["min_p"],
        repetition_penalty=options["repetition_penalty"],
        presence_penalty=options["presence_penalty"],
        frequency_penalty=options["frequency_penalty"],
        logit_bias=_parse_logit_bias(options["logit_bias"]),
        seed=options["seed"],
        max_tokens=options["max_tokens"],
        min_tokens=options["min_tokens"],
        ignore_eos=options["ignore_eos"],
        stop=options["stop"],
        stop_token_ids=options["stop_token_id"],
        include_stop_str_in_output=options["include_stop"],
        skip_special_tokens=not options["show_special_tokens"],
        logprobs=options["logprobs"],
    )


def _parse_logit_bias(text: str | None) -> dict[int, float]:
    if text is None:
        return {}
    try:
        return {int(token): float(bias) for token, bias in json.loads(text).items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise click.BadParameter(
            f"not an object of token ids to numbers: {error}", param_hint="--logit-bias"
        ) from error
