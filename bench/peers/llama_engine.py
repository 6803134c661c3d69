"""llama.cpp, measured through its C interface: forward and argmax. For `worker.py`.

Runs in an environment with llama-cpp-python, without mvllm. Settings are llama.cpp's defaults: KV in f16,
weights mapped and repacked for the processor, 512 tokens per pass.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

_MAX_BATCH, _MAX_PASS = 2048, 512  # llama.cpp's defaults of n_batch and n_ubatch
_MARGIN = 8  # positions of a sequence beyond those that are used


class LlamaCppEngine:
    """A model with one context at a time.

    Args:
        binding: the module `llama_cpp`.
    """

    def __init__(self, binding: Any, path: str, threads: int) -> None:
        self._binding = binding
        self._silence = binding.llama_log_callback(lambda *_: None)
        binding.llama_log_set(self._silence, ctypes.c_void_p(0))
        binding.llama_backend_init()
        self._model = binding.llama_model_load_from_file(path.encode(), binding.llama_model_default_params())
        if not self._model:
            raise RuntimeError(f"llama.cpp can't load {path}")
        self._threads = threads
        self._vocab_size = binding.llama_vocab_n_tokens(binding.llama_model_get_vocab(self._model))
        self.facts = {
            "llama-cpp-python": binding.__version__,
            "llama.cpp build": binding.llama_print_system_info().decode().strip(" |"),
            "KV type": "f16",
        }
        self._context: Any = None
        self._batch: Any = None
        self._shape: tuple[int, int] | None = None
        self._use_context(_MAX_PASS, 1)
        self._prompt_length = 0
        self._steps = 0
        self._first_tokens: list[int] = []

    def prefill(self, prompt: Sequence[int], repeats: int) -> float:
        self._use_context(len(prompt), 1)
        seconds = 0.0
        for _ in range(repeats):
            self._binding.llama_memory_clear(self._memory, True)
            start = time.perf_counter()
            self._read_prompt(prompt, 0)
            seconds += time.perf_counter() - start
        return seconds

    def prepare(self, prompts: Sequence[Sequence[int]], steps: int) -> None:
        self._prompt_length, self._steps = len(prompts[0]), steps
        self._use_context(self._prompt_length + steps, len(prompts))
        self._binding.llama_memory_clear(self._memory, True)
        self._first_tokens = [self._read_prompt(prompt, sequence) for sequence, prompt in enumerate(prompts)]

    def decode(self, repeats: int) -> tuple[float, list[int]]:
        rows = range(len(self._first_tokens))
        seconds = 0.0
        first: list[int] = []
        for _ in range(repeats):
            for sequence in rows:
                self._binding.llama_memory_seq_rm(self._memory, sequence, self._prompt_length, -1)
            tokens, first = self._first_tokens, []
            start = time.perf_counter()
            for position in range(self._prompt_length, self._prompt_length + self._steps):
                self._fill([(token, position, sequence, True) for sequence, token in enumerate(tokens)])
                tokens = self._run(rows)
                first.append(tokens[0])
            seconds += time.perf_counter() - start
        return seconds, first

    @property
    def _memory(self) -> Any:
        return self._binding.llama_get_memory(self._context)

    def _read_prompt(self, prompt: Sequence[int], sequence: int) -> int:
        """Compute a prompt's keys and values; returns the token that follows it."""
        for start in range(0, len(prompt), _MAX_BATCH):
            part = prompt[start : start + _MAX_BATCH]
            last = len(part) - 1
            self._fill([(token, start + i, sequence, i == last) for i, token in enumerate(part)])
            [token] = self._run([last])
        return token

    def _use_context(self, length: int, sequences: int) -> None:
        if self._shape == (length, sequences):
            return
        self._free_context()
        params = self._binding.llama_context_default_params()
        params.n_ctx, params.n_seq_max = (length + _MARGIN) * sequences, sequences
        params.n_batch, params.n_ubatch = _MAX_BATCH, _MAX_PASS
        params.n_threads = params.n_threads_batch = self._threads
        params.no_perf = True
        params.kv_unified = sequences == 1
        self._context = self._binding.llama_init_from_model(self._model, params)
        if not self._context:
            raise RuntimeError(f"llama.cpp can't make a context of {sequences} x {length} tokens")
        self._batch = self._binding.llama_batch_init(_MAX_BATCH, 0, sequences)
        self._shape = (length, sequences)

    def _free_context(self) -> None:
        if self._context:
            self._binding.llama_batch_free(self._batch)
            self._binding.llama_free(self._context)
        self._context = self._batch = self._shape = None

    def _fill(self, items: Sequence[tuple[int, int, int, bool]]) -> None:
        """The batch's (token, position, sequence, wants logits)."""
        batch = self._batch
        batch.n_tokens = len(items)
        for i, (token, position, sequence, wants_logits) in enumerate(items):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, position, 1
            batch.seq_id[i][0], batch.logits[i] = sequence, int(wants_logits)

    def _run(self, rows: Sequence[int]) -> list[int]:
        """Compute the batch; returns the greedy tokens of `rows`."""
        status = self._binding.llama_decode(self._context, self._batch)
        if status != 0:
            raise RuntimeError(f"llama_decode returned {status}")
        return [int(self._logits(row).argmax()) for row in rows]

    def _logits(self, row: int) -> Any:
        pointer = self._binding.llama_get_logits_ith(self._context, row)
        return np.ctypeslib.as_array(pointer, shape=(self._vocab_size,))


def load(settings: dict[str, Any]) -> LlamaCppEngine:
    import llama_cpp  # type: ignore[import-not-found]

    return LlamaCppEngine(llama_cpp, settings["model"], settings["threads"])
