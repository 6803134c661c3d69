"""The composition root: joins a checkpoint, a tokenizer, a backend and an engine into one object."""

from __future__ import annotations

import itertools
import os
import secrets
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any

from mvllm.backends.registry import create_backend
from mvllm.core.cache_folder import cache_folder
from mvllm.core.config import EngineConfig, ResolvedConfig, kv_bytes_per_token, resolve
from mvllm.core.engine.collector import OutputCollector
from mvllm.core.engine.engine import Engine
from mvllm.core.engine.shared_engine import SharedEngine
from mvllm.core.engine.submission import prepare_requests
from mvllm.core.errors import CapacityError, ConfigError, ModelFileError
from mvllm.core.interrupts import HoldInterrupts
from mvllm.core.load.catalog import DEFAULT_MODEL, ModelStore, Progress, no_progress
from mvllm.core.load.checkpoint import load_checkpoint
from mvllm.core.load.contents import Checkpoint
from mvllm.core.request import FinishReason, Request, RequestOutput, SamplingParams
from mvllm.core.spec.draft_length import DraftLengthPolicy
from mvllm.core.spec.drafter import Drafter
from mvllm.core.spec.speculation import Speculation
from mvllm.core.step import Event, TokensOut
from mvllm.core.tensor import Backend, KvGeometry, Model
from mvllm.core.text.chat_messages import Message
from mvllm.core.text.chat_template import ChatTemplate
from mvllm.core.text.detokenizer import Detokenizer
from mvllm.core.text.stop import stop_token_ids_for
from mvllm.core.text.tokenizer import Tokenizer
from mvllm.core.trace import NO_TRACE, FileTrace
from mvllm.core.types import TokenId
from mvllm.prompts import (
    EncodedPrompt,
    Prompt,
    conversations,
    encode_prompt,
    encode_prompts,
    params_by_prompt,
)
from mvllm.speculation import DrafterName, DraftModel, DraftSettings


def default_cache_dir() -> Path | None:
    """Where models and compiled kernels are kept: $MVLLM_CACHE, or mvllm/ in the user's cache folder.

    None for a user without a home folder; models given by path need none.
    """
    try:
        return cache_folder(os.environ, sys.platform)
    except RuntimeError:
        return None


@dataclass(frozen=True)
class StreamChunk:
    """A piece of one of the `n` answers; the last one of each has its finish reason."""

    index: int
    text: str
    token_ids: tuple[TokenId, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None  # why finish_reason is "error"


class Stream(Iterator[StreamChunk]):
    """The pieces of one prompt's answers as they come. Closing it, or dropping it, cancels the request."""

    def __init__(self, engine: SharedEngine, collector: OutputCollector) -> None:
        self._engine = engine
        self._collector = collector

    def __next__(self) -> StreamChunk:
        while True:
            event = self._engine.take_event(self._collector)
            if event is not None:
                return _chunk(self._collector.index_of(event.id), event)
            if self._collector.finished:
                self.close()
                raise StopIteration
            self._engine.advance([self._collector])

    def close(self) -> None:
        """Cancel what still runs; idempotent."""
        self._engine.forget(self._collector)

    def __del__(self) -> None:
        self._engine.abandon(self._collector)

    def output(self) -> RequestOutput:
        """Everything that has come so far."""
        return self._collector.output()


class LLM:
    """A loaded model, ready to generate.

    Owns the engine and shares its steps: any number of threads may call `generate`, `chat` and `stream`
    at once, and their requests run in one continuous batch. Use as a context manager, or call `close`.

    Args:
        model: a .gguf file, a Hugging Face folder, a catalog name or a hub repository (fetched if missing).
        backend: "auto", "cpu" or "reference", or a `Backend` object.
        threads: worker threads of the cpu backend; None: as many as this process may use.
        config: engine settings; single ones may be given as keywords instead (`max_model_len=2048`).
        mmap: map the weights from the file (True), or read the whole file into memory, where it stays.
        cache_dir: where fetched models are kept.
        progress: called during a download.
        allow_unknown_pretokenizer: load a GGUF file whose pre-tokenizer is not known, at the risk of wrong
            token ids.
        trace: file to write a trace to, with every step, its stages and the instructions of the backend, for
            Chrome, Perfetto and `mvllm profile` (docs/trace.md). It is complete once the LLM is closed.
        draft_model: a smaller model of the same family, named like `model`, that drafts tokens for it.
        drafter: "ngram" looks drafts up in prompt and output, "model" asks `draft_model`, "ngram+model"
            (default with a `draft_model`) looks them up where the text repeats itself and else asks the
            model; or a `Drafter` object of your own, closed with the LLM. Drafting changes speed, never the
            tokens (docs/speculation.md).
        draft_length: most tokens drafted at a time; with the policy "fixed", wherever there are so many.
        draft_policy: "adaptive" (default: drafts only as far as it pays), "fixed", "acceptance-rate",
            "accepted-length", or a `DraftLengthPolicy` object.
        draft_backend: where the draft model runs; None: where the model does.
        draft_context: tokens of a longer text that the draft model reads before its first draft (default
            64): more of them make drafts better and cost time at first.
        draft_kv_cache_bytes: size of the draft model's own KV pool; None: chosen as for the model.

    Raises:
        ModelFileError, DownloadError, BackendUnavailable, ConfigError: the message says what to do.
    """

    def __init__(
        self,
        model: str | Path = DEFAULT_MODEL,
        *,
        backend: str | Backend = "auto",
        threads: int | None = None,
        config: EngineConfig | None = None,
        mmap: bool = True,
        cache_dir: Path | None = None,
        progress: Progress = no_progress,
        allow_unknown_pretokenizer: bool = False,
        trace: str | Path | None = None,
        draft_model: str | Path | None = None,
        drafter: DrafterName | Drafter | None = None,
        draft_length: int | None = None,
        draft_policy: str | DraftLengthPolicy | None = None,
        draft_backend: str | Backend | None = None,
        draft_context: int | None = None,
        draft_kv_cache_bytes: int | None = None,
        **engine_settings: Any,
    ) -> None:
        asked = _join_config(config, engine_settings)
        self._trace = NO_TRACE if trace is None else FileTrace(Path(trace), time.perf_counter_ns)
        drafting = DraftSettings(
            drafter,
            draft_model,
            draft_length,
            draft_policy,
            draft_backend,
            draft_context,
            draft_kv_cache_bytes,
        )
        store = ModelStore(cache_dir or default_cache_dir())
        path = store.resolve(str(model), progress)
        self.checkpoint: Checkpoint = load_checkpoint(path, mmap=mmap)
        self.tokenizer = Tokenizer.from_assets(
            self.checkpoint.text, allow_unknown_pretokenizer=allow_unknown_pretokenizer
        )
        self.backend = backend if isinstance(backend, Backend) else create_backend(backend, threads=threads)
        self.config = self._resolve_config(asked, speculates=drafting.wanted)
        draft = None
        if draft_model is not None:
            draft = DraftModel.fitting(
                self.checkpoint,
                load_checkpoint(store.resolve(str(draft_model), progress), mmap=mmap),
                self._draft_backend(draft_backend, threads),
            )
        self._model = self._load_model()
        self._model.trace_to(self._trace)
        speculation = self._load_speculation(drafting, draft)
        detokenizers = {skip: Detokenizer(self.tokenizer, skip_special_tokens=skip) for skip in (True, False)}
        self._shared = SharedEngine(
            Engine(
                self._model,
                self.config,
                vocab_size=self.checkpoint.spec.vocab_size,
                text=lambda params: detokenizers[params.skip_special_tokens],
                speculation=speculation,
                trace=self._trace,
                clock=time.perf_counter,
            ),
            undisturbed=HoldInterrupts,
        )
        self._group_numbers = itertools.count()

    # --- generation ---------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: SamplingParams | Iterable[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Complete one prompt or many, in one continuous batch; results in the order of the prompts.

        Args:
            sampling_params: one for all, or one per prompt.

        Raises:
            RequestRejected, ConfigError: a prompt can't be served as asked; nothing was started.
        """
        encoded = encode_prompts(self.tokenizer, prompts)
        return self._run(encoded, params_by_prompt(sampling_params, len(encoded)))

    def chat(
        self,
        messages: Iterable[Message] | Iterable[Iterable[Message]],
        sampling_params: SamplingParams | Iterable[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Like `generate`, for one conversation or many, rendered with the model's chat template.

        Raises:
            TemplateError: the model has no template, or it refuses the messages.
        """
        encoded = [
            EncodedPrompt(None, tuple(self.encode_chat(conversation)))
            for conversation in conversations(messages)
        ]
        return self._run(encoded, params_by_prompt(sampling_params, len(encoded)))

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Stream:
        """Yield pieces of the answer(s) as they come. Closing the stream cancels the request."""
        return self._stream(encode_prompt(self.tokenizer, prompt), sampling_params)

    def stream_chat(
        self, messages: Sequence[Message], sampling_params: SamplingParams | None = None
    ) -> Stream:
        """`stream` for a conversation."""
        return self._stream(EncodedPrompt(None, tuple(self.encode_chat(messages))), sampling_params)

    def encode_chat(
        self, messages: Sequence[Message], *, parse_special_in_content: bool = False
    ) -> list[TokenId]:
        """Token ids of a conversation, ready for the model's answer; a prompt for `generate` and `stream`.

        Content yields no control token, whatever it says, unless `parse_special_in_content` allows it.
        """
        return self._template.encode(messages, parse_special_in_content=parse_special_in_content)

    # --- engine state -------------------------------------------------------------------------------

    @property
    def engine(self) -> Engine:
        """For statistics and integrity checks."""
        return self._shared.engine

    def describe_program(self) -> str:
        """What a step runs on the backend, as text."""
        return self._model.describe()

    def close(self) -> None:
        """End every request and release threads and memory; idempotent."""
        self._shared.close()
        self._trace.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- inside -------------------------------------------------------------------------------------

    @cached_property
    def _template(self) -> ChatTemplate:
        """Made at the first chat: a model may have no template, or a broken one, and still complete text."""
        return ChatTemplate(self.tokenizer, self.checkpoint.text)

    def _draft_backend(self, wanted: str | Backend | None, threads: int | None) -> Backend:
        if wanted is None:
            return self.backend
        return wanted if isinstance(wanted, Backend) else create_backend(wanted, threads=threads)

    def _resolve_config(self, asked: EngineConfig, *, speculates: bool) -> ResolvedConfig:
        spec = self.checkpoint.spec
        reason = self.backend.unsupported(spec, self.checkpoint.weights)
        if reason is not None:
            raise ModelFileError(f"the {self.backend.name} backend can't run this model: {reason}")
        kv_dtypes = self.backend.capabilities.kv_dtypes
        kv_dtype = kv_dtypes[0] if asked.kv_dtype == "auto" else asked.kv_dtype
        if kv_dtype not in kv_dtypes:
            raise ConfigError(f"kv_dtype {kv_dtype!r}: {self.backend.name} offers {', '.join(kv_dtypes)}")
        return resolve(
            asked,
            model_context=spec.context_length,
            kv_bytes_per_token=kv_bytes_per_token(spec.kv_values_per_token, kv_dtype),
            kv_dtype=kv_dtype,
            speculates=speculates,
        )

    def _load_model(self) -> Model:
        config, checkpoint = self.config, self.checkpoint
        geometry = KvGeometry(
            num_blocks=config.num_kv_blocks,
            block_size=config.block_size,
            max_context=config.max_model_len,
            max_batch_tokens=config.max_num_batched_tokens,
            max_batch_rows=config.max_num_seqs,
            max_logit_rows=config.max_logit_rows,
            dtype=config.kv_dtype,
        )
        try:
            return self.backend.load(checkpoint.spec, checkpoint.weights, geometry)
        except (MemoryError, CapacityError) as error:
            raise ConfigError(
                f"memory does not suffice for a context of {config.max_model_len} tokens and "
                f"{config.num_kv_blocks} KV blocks of {config.block_size} ({error}); "
                "set max_model_len or kv_cache_bytes lower"
            ) from error

    def _load_speculation(self, drafting: DraftSettings, draft: DraftModel | None) -> Speculation | None:
        try:
            if draft is None:
                return drafting.speculation(None)
            end_token_ids = self.checkpoint.text.eos_token_ids
            return drafting.speculation(draft.load(self.config, end_token_ids, drafting))
        except BaseException:
            self._model.close()
            raise

    def _prepare(
        self, prompt: EncodedPrompt, params: SamplingParams
    ) -> tuple[tuple[Request, ...], OutputCollector]:
        """The requests of one prompt and what gathers their output; nothing is started."""
        group = f"request-{next(self._group_numbers)}"
        extra = stop_token_ids_for(self.tokenizer, params.stop)
        if extra:
            params = params.with_changes(stop_token_ids=(*params.stop_token_ids, *sorted(extra)))
        requests = prepare_requests(
            group,
            prompt.token_ids,
            params,
            max_model_len=self.config.max_model_len,
            eos_token_ids=self.checkpoint.text.eos_token_ids,
            draw_seed=lambda: secrets.randbits(64),
        )
        token_bytes = self.tokenizer.token_bytes if params.logprobs is not None else None
        return requests, OutputCollector(
            group, prompt.text, requests, clock=time.perf_counter, token_bytes=token_bytes
        )

    def _run(self, prompts: Sequence[EncodedPrompt], params: Sequence[SamplingParams]) -> list[RequestOutput]:
        prepared = [self._prepare(*prompt) for prompt in zip(prompts, params, strict=True)]
        collectors = [collector for _, collector in prepared]
        try:
            for requests, collector in prepared:
                self._shared.submit(requests, collector)
            for collector in collectors:
                while not collector.finished:
                    self._shared.advance([collector])
            return [collector.output() for collector in collectors]
        finally:
            for collector in collectors:
                self._shared.forget(collector)

    def _stream(self, prompt: EncodedPrompt, params: SamplingParams | None) -> Stream:
        [params] = params_by_prompt(params, 1)
        requests, collector = self._prepare(prompt, params)
        stream = Stream(self._shared, collector)  # made first: whatever happens now, dropping it cancels
        self._shared.submit(requests, collector, keep_events=True)
        return stream


def _chunk(index: int, event: Event) -> StreamChunk:
    if isinstance(event, TokensOut):
        return StreamChunk(index, event.text, event.token_ids)
    return StreamChunk(index, event.text, (), event.reason, event.stop_reason, event.error)


def _join_config(config: EngineConfig | None, settings: Mapping[str, Any]) -> EngineConfig:
    if config is not None and settings:
        raise ConfigError(f"give config or single settings ({', '.join(settings)}), not both")
    unknown = set(settings) - set(EngineConfig.__dataclass_fields__)
    if unknown:
        known = ", ".join(EngineConfig.__dataclass_fields__)
        raise ConfigError(f"unknown setting {', '.join(sorted(unknown))}; known: {known}")
    return config or EngineConfig(**settings)
