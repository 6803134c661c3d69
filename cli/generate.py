"""`mvllm generate`: answer one prompt, or a file of prompts as one continuous batch."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from mvllm.cli.options import (
    DEFAULT_MAX_TOKENS,
    engine_config,
    engine_options,
    model_option,
    sampling_options,
    sampling_params,
)
from mvllm.cli.prompts import PromptInput, read_prompt, read_prompt_file
from mvllm.cli.report import json_lines, statistics
from mvllm.cli.terminal import download_progress, note, prompt_progress, show_log_messages
from mvllm.core.errors import TemplateError
from mvllm.core.request import RequestOutput, SamplingParams
from mvllm.llm import LLM, Stream


@click.command()
@click.argument("prompt", required=False)
@model_option
@click.option(
    "--prompts",
    "prompt_file",
    type=click.Path(exists=True, dir_okay=False, allow_dash=True, path_type=Path),
    help="Prompts from a file, one per line or as JSON lines; answered as one batch.",
)
@click.option("--system", metavar="TEXT", help="System message of the conversation.")
@click.option("--raw", is_flag=True, help="Continue the prompt as it is, without the chat template.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per answer.")
@click.option("--stats", is_flag=True, help="Print timings and counts to standard error.")
@sampling_options
@engine_options
def generate(
    prompt: str | None,
    model: str,
    prompt_file: Path | None,
    system: str | None,
    raw: bool,
    as_json: bool,
    stats: bool,
    **options: Any,
) -> int:
    """Answer PROMPT, or what standard input holds if PROMPT is "-" or input is piped.

    The prompt is sent through the model's chat template unless --raw is given or the model has none.
    """
    if prompt is not None and prompt_file is not None:
        raise click.UsageError("give PROMPT or --prompts, not both")
    if raw and system is not None:
        raise click.UsageError("--system needs the chat template, so it can't go with --raw")
    inputs = read_prompt_file(prompt_file) if prompt_file else [PromptInput(0, read_prompt(prompt))]
    show_log_messages()
    llm = _load(model, options)
    with llm:
        session = _Session(llm, system=system, raw=raw, shared=sampling_params(options))
        if prompt_file is None and not as_json and options["n"] == 1:
            return session.print_stream(inputs[0], stats=stats)
        return session.print_batch(inputs, as_json=as_json, stats=stats)


def _load(model: str, options: dict[str, Any]) -> LLM:
    config = engine_config(options)
    with download_progress() as progress:
        return LLM(
            model,
            backend=options.pop("backend"),
            threads=options.pop("threads"),
            mmap=not options.pop("no_mmap"),
            allow_unknown_pretokenizer=options.pop("allow_unknown_pretokenizer"),
            config=config,
            progress=progress,
        )


class _Session:
    """One run of the command over a loaded model."""

    def __init__(self, llm: LLM, *, system: str | None, raw: bool, shared: SamplingParams) -> None:
        self._llm = llm
        self._system = system
        self._raw = raw or llm.checkpoint.text.chat_template is None
        self._shared = shared
        if self._raw and system is not None:
            raise TemplateError("the model has no chat template, so --system can't be used")

    def print_stream(self, prompt: PromptInput, *, stats: bool) -> int:
        """Print one answer as it comes; on Ctrl-C keep what has come. Returns the exit status."""
        start = time.perf_counter()
        ids = self._encode(prompt)
        params = self._params(prompt, len(ids))
        stream = self._llm.stream(ids, params)
        try:
            for chunk in stream:
                if chunk.text:
                    click.echo(chunk.text, nl=False)
                    sys.stdout.flush()
                if chunk.error is not None:
                    raise click.ClickException(chunk.error)
            click.echo()
        except KeyboardInterrupt:
            click.echo()
            return 130
        finally:
            stream.close()
        if stats:
            self._print_stats([stream.output()], time.perf_counter() - start)
        return 0

    def print_batch(self, prompts: Sequence[PromptInput], *, as_json: bool, stats: bool) -> int:
        """Print all answers in the order of the prompts, once all are done; on Ctrl-C print what has come.
        Returns the exit status."""
        start = time.perf_counter()
        ids = [self._encode(prompt) for prompt in prompts]
        params = [self._params(prompt, len(own)) for prompt, own in zip(prompts, ids, strict=True)]
        outputs, interrupted = self._answer_all(ids, params)
        for prompt, output in zip(prompts, outputs, strict=False):
            if interrupted and not any(answer.token_ids for answer in output.outputs):
                continue
            for line in json_lines(prompt.id, output) if as_json else _texts(output):
                click.echo(line)
        if stats:
            self._print_stats(outputs, time.perf_counter() - start)
        status = _report_errors(outputs)
        return 130 if interrupted else status

    def _answer_all(
        self, ids: Sequence[Sequence[int]], params: Sequence[SamplingParams]
    ) -> tuple[list[RequestOutput], bool]:
        """The answers, in one continuous batch, and whether Ctrl-C ended them early."""
        streams: list[Stream] = []
        interrupted = False
        try:
            with prompt_progress(len(ids)) as show_finished:
                for prompt_ids, own_params in zip(ids, params, strict=True):
                    streams.append(self._llm.stream(prompt_ids, own_params))
                for count, stream in enumerate(streams, 1):
                    for _ in stream:
                        pass
                    show_finished(count)
        except KeyboardInterrupt:
            interrupted = True
        finally:
            for stream in streams:
                stream.close()
        return [stream.output() for stream in streams], interrupted

    def _encode(self, prompt: PromptInput) -> list[int]:
        if prompt.token_ids is not None:
            return prompt.token_ids
        if prompt.messages is not None:
            return self._llm.encode_chat(prompt.messages)
        assert prompt.text is not None
        if self._raw:
            return self._llm.tokenizer.encode(prompt.text)
        system = [] if self._system is None else [{"role": "system", "content": self._system}]
        return self._llm.encode_chat([*system, {"role": "user", "content": prompt.text}])

    def _params(self, prompt: PromptInput, num_prompt_tokens: int) -> SamplingParams:
        """The shared parameters with the prompt's own on top, and an output limit that fits."""
        params = self._shared.with_changes(**prompt.sampling) if prompt.sampling else self._shared
        room = self._llm.config.max_model_len - num_prompt_tokens
        if room < 1:
            return params  # the engine refuses it, with the numbers
        if params.max_tokens is None:
            return params.with_changes(max_tokens=max(min(room, DEFAULT_MAX_TOKENS), params.min_tokens))
        if params.max_tokens > room:
            note(f"mvllm: max_tokens lowered from {params.max_tokens} to {room}, the rest of the context")
            return params.with_changes(max_tokens=room, min_tokens=min(params.min_tokens, room))
        return params

    def _print_stats(self, outputs: Sequence[RequestOutput], wall_seconds: float) -> None:
        for line in statistics(outputs, wall_seconds):
            note(line)


def _texts(output: RequestOutput) -> list[str]:
    return [answer.text for answer in output.outputs]


def _report_errors(outputs: Sequence[RequestOutput]) -> int:
    errors = [answer.error for output in outputs for answer in output.outputs if answer.error]
    for error in errors:
        note(f"mvllm: {error}")
    return 1 if errors else 0
