"""Options that several commands share, and what they build."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

import click

from mvllm.core.config import EngineConfig
from mvllm.core.load.catalog import DEFAULT_MODEL
from mvllm.core.request import SamplingParams

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
            type=click.Choice(["auto", "cpu", "reference"]),
            default="auto",
            show_default=True,
            help="Where to compute.",
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
            type=click.Choice(["auto", "f32", "f16"]),
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
