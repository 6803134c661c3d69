"""Models loaded once, the target twice, and fresh engines around them: every run starts with empty caches.

Shared machines are fast for some seconds and slow for others. So the two runs of a pair take turns of a few
tokens, each on a target model of its own, and both see the same of it.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass

from mvllm.backends.registry import create_backend
from mvllm.bench.experiments.speculation.recording import RecordingPolicy, StepSummary
from mvllm.core.config import EngineConfig, ResolvedConfig, kv_bytes_per_token, resolve
from mvllm.core.engine.engine import Engine
from mvllm.core.load.contents import Checkpoint
from mvllm.core.request import Request, SamplingParams
from mvllm.core.spec.draft_length import DraftLengthPolicy, SpeculationStep
from mvllm.core.spec.drafter import Drafter
from mvllm.core.spec.lookup_first import LookupFirst
from mvllm.core.spec.model_drafter import ModelDrafter, ModelDrafterConfig
from mvllm.core.spec.ngram_drafter import NgramDrafter
from mvllm.core.spec.speculation import Speculation
from mvllm.core.spec.vocab_limit import head_share_of
from mvllm.core.spec.vocabulary import ids_to_mask, token_texts
from mvllm.core.step import TokensOut
from mvllm.core.tensor import KvGeometry, Model
from mvllm.core.types import RequestId, TokenId, ceil_div

BLOCK_SIZE = 16
MAX_STEP_DRAFTS = 64
TURN_TOKENS = 16  # of each request, before the other run of a pair goes on


@dataclass(frozen=True)
class Sampling:
    """How the requests of a run draw their tokens."""

    temperature: float = 0.0
    seed: int = 1  # of the first request; the others count on from it


@dataclass(frozen=True)
class Measurement:
    """One run. Decoding starts when every request has its first token."""

    prefill_seconds: float
    decode_seconds: float
    num_tokens: int  # output, all requests
    num_decoded: int  # of these, output while decoding
    ids_sha256: str  # of all output ids
    steps: StepSummary

    @property
    def decode_rate(self) -> float:
        """Tokens per second."""
        return self.num_decoded / self.decode_seconds

    @property
    def whole_rate(self) -> float:
        """Tokens per second, prompts included."""
        return self.num_tokens / (self.prefill_seconds + self.decode_seconds)


class TargetAndDrafter:
    """A target model, loaded twice, and, if wanted, a draft model, for runs of up to `max_rows` requests.

    Owns them; the engines made of them are thrown away without closing, for that would close the models.
    """

    def __init__(
        self,
        target: Checkpoint,
        draft: Checkpoint | None,
        *,
        max_rows: int,
        max_model_len: int,
        threads: int | None = None,
        backend: str = "auto",
    ) -> None:
        self._backend = create_backend(backend, threads=threads)
        self.checkpoint = target
        spec = self.checkpoint.spec
        kv_dtype = self._backend.capabilities.kv_dtypes[0]
        self.config: ResolvedConfig = resolve(
            EngineConfig(
                max_model_len=max_model_len,
                max_num_seqs=max_rows,
                block_size=BLOCK_SIZE,
                num_kv_blocks=max_rows * (max_model_len // BLOCK_SIZE + 1),
                max_step_drafts=MAX_STEP_DRAFTS,
            ),
            model_context=spec.context_length,
            kv_bytes_per_token=kv_bytes_per_token(spec.kv_values_per_token, kv_dtype),
            kv_dtype=kv_dtype,
            speculates=True,
        )
        self.model, self._plain_model = (
            self._backend.load(spec, self.checkpoint.weights, self._geometry()) for _ in range(2)
        )
        self.draft_checkpoint = draft
        self.draft_model = None if draft is None else self._load_drafter(draft)

    def _geometry(self) -> KvGeometry:
        config = self.config
        return KvGeometry(
            num_blocks=config.num_kv_blocks,
            block_size=config.block_size,
            max_context=config.max_model_len,
            max_batch_tokens=config.max_num_batched_tokens,
            max_batch_rows=config.max_num_seqs,
            max_logit_rows=config.max_logit_rows,
            dtype=config.kv_dtype,
        )

    def _load_drafter(self, draft: Checkpoint) -> Model:
        spec, target = draft.spec, self.checkpoint
        masked = ids_to_mask(
            token_texts(target.text, target.spec.vocab_size),
            token_texts(draft.text, spec.vocab_size),
        )
        self._drafter_config = ModelDrafterConfig(
            num_kv_blocks=self.config.num_kv_blocks,
            block_size=BLOCK_SIZE,
            max_model_len=min(self.config.max_model_len, spec.context_length),
            max_num_seqs=self.config.max_num_seqs,
            vocab_size=spec.vocab_size,
            masked_token_ids=masked,
            head_share=head_share_of(draft.weights, self._backend.capabilities),
        )
        geometry = self._drafter_config.geometry(self.config.kv_dtype)
        return self._backend.load(spec, draft.weights, geometry)

    def drafter(self, kind: str) -> Drafter:
        """A drafter with nothing cached: "ngram", "model" or "ngram+model"."""
        if kind == "ngram":
            return NgramDrafter()
        if self.draft_model is None:
            raise ValueError("no draft model was loaded")
        drafter = ModelDrafter(self.draft_model, self._drafter_config)
        return drafter if kind == "model" else LookupFirst(drafter)

    def run_pair(
        self,
        prompts: Sequence[Sequence[TokenId]],
        num_tokens: int,
        sampling: Sampling,
        *,
        drafter: str,
        policy: DraftLengthPolicy,
    ) -> tuple[Measurement, Measurement]:
        """Answer all prompts in one batch, each with exactly `num_tokens` tokens: without speculation and,
        taking turns with that, with it."""
        recording = RecordingPolicy(policy)
        speculation = Speculation(self.drafter(drafter), recording)
        engine = self._engine(self.model, speculation)
        runs = [
            _Run(each, prompts, num_tokens, sampling) for each in (self._engine(self._plain_model), engine)
        ]
        for turn in range(1, ceil_div(num_tokens, TURN_TOKENS) + 1):
            for run in runs:
                run.advance(turn * TURN_TOKENS * len(prompts))
        speculated = engine.totals.speculation
        if speculated is not None and speculated.switched_off is not None:
            raise RuntimeError(f"speculation was switched off: {speculated.switched_off}")
        plain, drafted = runs
        return plain.measurement([]), drafted.measurement(recording.steps)

    def answer(self, prompt: Sequence[TokenId], num_tokens: int, sampling: Sampling) -> list[TokenId]:
        """Output ids of one request, without speculation."""
        run = _Run(self._engine(self._plain_model), [prompt], num_tokens, sampling)
        run.advance(num_tokens)
        [ids] = run.answers()
        return ids

    def _engine(self, model: Model, speculation: Speculation | None = None) -> Engine:
        return Engine(
            model,
            self.config,
            vocab_size=self.checkpoint.spec.vocab_size,
            speculation=speculation,
            clock=time.perf_counter,
        )

    def close(self) -> None:
        self.model.close()
        self._plain_model.close()
        if self.draft_model is not None:
            self.draft_model.close()


class _Run:
    """A batch of requests on an engine, answered bit by bit; only the time of its own steps counts."""

    def __init__(
        self, engine: Engine, prompts: Sequence[Sequence[TokenId]], num_tokens: int, sampling: Sampling
    ) -> None:
        self._engine = engine
        self._num_tokens = num_tokens  # of each answer
        self._ids: dict[RequestId, list[TokenId]] = {}
        self._seconds = 0.0
        self._prefill_seconds = 0.0  # until every request had its first token ...
        self._num_prefilled = 0  # ... and the tokens there were then
        params = SamplingParams(temperature=sampling.temperature, ignore_eos=True, max_tokens=num_tokens)
        for number, prompt in enumerate(prompts):
            id = RequestId(str(number))
            self._ids[id] = []
            engine.submit(Request(id, tuple(prompt), params, sampling.seed + number, num_tokens))

    @property
    def num_output(self) -> int:
        return sum(map(len, self._ids.values()))

    def advance(self, num_tokens: int) -> None:
        """Step until there are so many output tokens in all, or every answer is complete."""
        started = time.perf_counter() - self._seconds
        while self._engine.has_work and self.num_output < num_tokens:
            for event in self._engine.step():
                if isinstance(event, TokensOut):
                    self._ids[event.id] += event.token_ids
            self._seconds = time.perf_counter() - started
            if not self._num_prefilled and all(self._ids.values()):
                self._num_prefilled, self._prefill_seconds = self.num_output, self._seconds

    def answers(self) -> list[list[TokenId]]:
        """
        Raises:
            RuntimeError: one of them is shorter or longer than asked for.
        """
        answers = list(self._ids.values())
        if any(len(answer) != self._num_tokens for answer in answers):
            raise RuntimeError(
                f"some of {len(answers)} requests did not answer with {self._num_tokens} tokens"
            )
        return answers

    def measurement(self, steps: Sequence[SpeculationStep]) -> Measurement:
        """
        Args:
            steps: of a run with drafts, all of them.
        """
        answers = self.answers()
        return Measurement(
            prefill_seconds=self._prefill_seconds,
            decode_seconds=self._seconds - self._prefill_seconds,
            num_tokens=self.num_output,
            num_decoded=self.num_output - self._num_prefilled,
            ids_sha256=hashlib.sha256(repr(answers).encode()).hexdigest(),
            steps=StepSummary.of(steps),
        )
