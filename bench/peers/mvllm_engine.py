"""mvllm, measured through the whole engine: scheduler, forward, sampler, text. For `worker.py`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from mvllm.bench.peers import machine
from mvllm.core.request import Request, SamplingParams
from mvllm.core.step import TokensOut
from mvllm.core.types import RequestId, ceil_div
from mvllm.llm import LLM

BLOCK_SIZE = 16


class MvllmEngine:
    """A model on the cpu backend, with a KV pool of `kv_tokens` positions.

    Prepared prompts stay in the prefix cache, so that a sequence starts from its prompt without computing it.
    """

    def __init__(
        self, model: str, threads: int, *, max_model_len: int, max_sequences: int, kv_tokens: int
    ) -> None:
        self._llm = LLM(
            model,
            backend="cpu",
            threads=threads,
            max_model_len=max_model_len,
            max_num_seqs=max_sequences,
            block_size=BLOCK_SIZE,
            num_kv_blocks=ceil_div(kv_tokens, BLOCK_SIZE) + 2 * max_sequences,
            allow_unknown_pretokenizer=True,
        )
        from mvllm.backends.cpu import isa

        self.facts = {
            "sources": machine.sources(),
            "instruction set": isa.selected().name,
            "KV type": self._llm.config.kv_dtype,
        }
        self._prompts: Sequence[Sequence[int]] = ()
        self._steps = 0
        self._count = 0

    def prefill(self, prompt: Sequence[int], repeats: int) -> float:
        engine, seconds = self._llm.engine, 0.0
        for _ in range(repeats):
            engine.clear_cache()
            start = time.perf_counter()
            self._submit(prompt, 1)
            while engine.has_work:
                engine.step()
            seconds += time.perf_counter() - start
        return seconds

    def prepare(self, prompts: Sequence[Sequence[int]], steps: int) -> None:
        engine = self._llm.engine
        engine.clear_cache()
        self._prompts, self._steps = prompts, steps
        for prompt in prompts:
            self._submit(prompt, 1)
        while engine.has_work:
            engine.step()

    def decode(self, repeats: int) -> tuple[float, list[int]]:
        seconds = 0.0
        tokens: list[int] = []
        for _ in range(repeats):
            elapsed, tokens = self._decode_once()
            seconds += elapsed
        return seconds, tokens

    def _decode_once(self) -> tuple[float, list[int]]:
        engine, steps, rows = self._llm.engine, self._steps, len(self._prompts)
        first = RequestId(str(self._count))
        for prompt in self._prompts:
            self._submit(prompt, steps + 1)
        engine.step()  # the last token of each prompt; all others are cached
        if engine.last_step.num_output_tokens != rows:
            raise RuntimeError(f"{rows} prepared prompts were not ready after one step")
        start = time.perf_counter()
        events = [engine.step() for _ in range(steps)]
        seconds = time.perf_counter() - start
        out = [event for step in events for event in step if isinstance(event, TokensOut)]
        if engine.has_work or sum(len(event.token_ids) for event in out) != rows * steps:
            raise RuntimeError(f"{steps} steps did not bring {rows} tokens each")
        return seconds, [token for event in out if event.id == first for token in event.token_ids]

    def _submit(self, prompt: Sequence[int], max_tokens: int) -> None:
        params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=max_tokens)
        self._llm.engine.submit(Request(RequestId(str(self._count)), tuple(prompt), params, 0, max_tokens))
        self._count += 1


def load(settings: dict[str, Any]) -> MvllmEngine:
    return MvllmEngine(**settings)
