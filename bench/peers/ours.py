"""mvllm, measured through the whole engine: scheduler, forward, sampler, text."""

from __future__ import annotations

import time
from collections.abc import Sequence

from mvllm.core.request import Request, SamplingParams
from mvllm.core.types import RequestId
from mvllm.llm import LLM


class Ours:
    """A loaded model without prefix caching, so that every prompt is computed."""

    def __init__(self, path: str, threads: int, max_model_len: int) -> None:
        self._llm = LLM(
            path,
            backend="cpu",
            threads=threads,
            max_model_len=max_model_len,
            enable_prefix_caching=False,
        )
        self.vocab_size = self._llm.checkpoint.spec.vocab_size
        self._count = 0

    def prefill(self, ids: Sequence[int]) -> float:
        """Tokens per second of one prompt, to its first output token."""
        start = time.perf_counter()
        self._submit(ids, 1)
        while self._llm.engine.has_work:
            self._llm.engine.step()
        return len(ids) / (time.perf_counter() - start)

    def decode(self, prompts: Sequence[Sequence[int]], steps: int) -> float:
        """Tokens per second, all sequences together, after their prompts."""
        engine = self._llm.engine
        for ids in prompts:
            self._submit(ids, steps + 64)
        ids_left = sum(map(len, prompts))
        while ids_left > 0:
            engine.step()
            ids_left -= engine.last_step.num_prefill_tokens
        start = time.perf_counter()
        for _ in range(steps):
            engine.step()
        elapsed = time.perf_counter() - start
        for number in range(self._count - len(prompts), self._count):
            engine.cancel(RequestId(str(number)))
        while engine.has_work:
            engine.step()
        return len(prompts) * steps / elapsed

    def close(self) -> None:
        self._llm.close()

    def _submit(self, ids: Sequence[int], max_tokens: int) -> None:
        params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=max_tokens)
        request = Request(RequestId(str(self._count)), tuple(ids), params, 0, max_tokens)
        self._llm.engine.submit(request)
        self._count += 1
