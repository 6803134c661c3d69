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
    backend_from,
    draft_settings,
    engine_config,
    engine_options,
    model_option,
    sampling_options,
    sampling_params,
    speculation_options,
)
from mvllm.cli.prompts import PromptInput, read_prompt, read_prompt_file
from mvllm.cli.report import json_error, json_lines, statistics
from mvllm.cli.terminal import download_progress, note, prompt_progress, show_log_messages
from mvllm.core.errors import MvllmError, TemplateError
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
@click.option(
    "--trace",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write what every step took to this file, for Chrome, Perfetto and mvllm profile.",
)
@sampling_options
@engine_options
@speculation_options
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
    """Answer PROMPT, a file of prompts, or standard input.

    Standard input is read if PROMPT is "-", or if there is no PROMPT and input is piped, never beside a
    PROMPT. The prompt is sent through the model's chat template unless --raw is given or the model has none.
    """
    if prompt is not None and prompt_file is not None:
        raise click.UsageError("give PROMPT or --prompts, not both")
    if raw and system is not None:
        raise click.UsageError("--system needs the chat template, so it can't go with --raw")
    if options["logprobs"] is not None and not as_json:
        raise click.UsageError("--logprobs needs --json, which has a place for them")
    shared = sampling_params(options)
    inputs = read_prompt_file(prompt_file) if prompt_file else [PromptInput(0, read_prompt(prompt))]
    show_log_messages()
    llm = _load(model, options)
    with llm:
        session = _Session(llm, system=system, raw=raw, shared=shared)
        if prompt_file is None and not as_json and options["n"] == 1:
            return session.print_stream(inputs[0], stats=stats)
        return session.print_batch(inputs, as_json=as_json, stats=stats)


def _load(model: str, options: dict[str, Any]) -> LLM:
    config = engine_config(options)
    with download_progress() as progress:
        return LLM(
            model,
            backend=backend_from(options),
            threads=options.pop("threads"),
            mmap=not options.pop("no_mmap"),
            allow_unknown_pretokenizer=options.pop("allow_unknown_pretokenizer"),
            config=config,
            trace=options.pop("trace"),
            progress=progress,
            **draft_settings(options),
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
        self._say_if_cut(prompt, stream.output())
        return 0

    def _say_if_cut(self, prompt: PromptInput, output: RequestOutput) -> None:
        asked = self._shared.max_tokens is not None or "max_tokens" in prompt.sampling
        if not asked and any(answer.finish_reason == "length" for answer in output.outputs):
            note("mvllm: the answer was cut at the default output limit; --max-tokens raises it")

    def print_batch(self, prompts: Sequence[PromptInput], *, as_json: bool, stats: bool) -> int:
        """Answer all prompts in one continuous batch; print in their order, each as soon as it can be.

        A refused prompt is reported and keeps nobody else from being answered. On Ctrl-C what has come is
        printed. Returns the exit status.
        """
        start = time.perf_counter()
        started = [self._start(prompt) for prompt in prompts]
        outputs: list[RequestOutput] = []
        status = 0
        try:
            with prompt_progress(len(prompts)) as show_finished:
                for count, (prompt, answer) in enumerate(zip(prompts, started, strict=True), 1):
                    if isinstance(answer, MvllmError):
                        status = self._print_refusal(prompt, answer, as_json=as_json)
                        continue
                    status = max(status, _exhaust(answer, prompt, as_json=as_json))
                    outputs.append(answer.output())
                    show_finished(count)
        except KeyboardInterrupt:
            status = 130
            _print_unfinished(prompts[len(outputs) :], started[len(outputs) :], as_json=as_json)
        finally:
            for answer in started:
                if isinstance(answer, Stream):
                    answer.close()
        if stats:
            self._print_stats(outputs, time.perf_counter() - start)
        return status

    def _start(self, prompt: PromptInput) -> Stream | MvllmError:
        """The prompt's answer to be, or why there is none."""
        try:
            ids = self._encode(prompt)
            return self._llm.stream(ids, self._params(prompt, len(ids)))
        except MvllmError as error:
            return error

    def _print_refusal(self, prompt: PromptInput, error: MvllmError, *, as_json: bool) -> int:
        note(f"mvllm: prompt {prompt.id}: {error}")
        if as_json:
            click.echo(json_error(prompt.id, str(error)))
        return 1

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
        for line in statistics(outputs, wall_seconds, self._llm.engine.totals.speculation):
            note(line)


def _exhaust(stream: Stream, prompt: PromptInput, *, as_json: bool) -> int:
    """Wait for the end of a prompt's answers and print them; the exit status that they deserve."""
    for _ in stream:
        pass
    output = stream.output()
    _print_answers(prompt, output, as_json=as_json)
    errors = [answer.error for answer in output.outputs if answer.error]
    for error in errors:
        note(f"mvllm: prompt {prompt.id}: {error}")
    return 1 if errors else 0


def _print_unfinished(
    prompts: Sequence[PromptInput], started: Sequence[Stream | MvllmError], *, as_json: bool
) -> None:
    for prompt, answer in zip(prompts, started, strict=True):
        if isinstance(answer, Stream):
            answer.close()
            output = answer.output()
            if any(completion.token_ids for completion in output.outputs):
                _print_answers(prompt, output, as_json=as_json)


def _print_answers(prompt: PromptInput, output: RequestOutput, *, as_json: bool) -> None:
    for line in json_lines(prompt.id, output) if as_json else [answer.text for answer in output.outputs]:
        click.echo(line)
