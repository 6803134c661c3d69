"""llama.cpp, measured on command. Runs in an environment that has llama-cpp-python, without mvllm.

Reads one JSON object per line from standard input, answers with one JSON object per line:

    {"measure": "prefill", "prompt": [...]}                   -> {"tokens_per_second": ...}
    {"measure": "decode", "prompts": [[...], ...], "steps": 32}
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

import llama_cpp as binding  # type: ignore[import-not-found]
import numpy as np

_SILENT = binding.llama_log_callback(lambda *_: None)


class LlamaCpp:
    """A model with one context at a time. Greedy, f16 KV as is its default."""

    def __init__(self, path: str, threads: int) -> None:
        binding.llama_log_set(_SILENT, ctypes.c_void_p(0))
        binding.llama_backend_init()
        self._model = binding.llama_model_load_from_file(path.encode(), binding.llama_model_default_params())
        if not self._model:
            raise SystemExit(f"llama.cpp can't load {path}")
        self._threads = threads
        self._vocab_size = binding.llama_vocab_n_tokens(binding.llama_model_get_vocab(self._model))
        self._context: Any = None
        self._shape: tuple[int, int] | None = None

    def _use_context(self, length: int, sequences: int) -> None:
        if self._shape == (length, sequences):
            binding.llama_memory_clear(binding.llama_get_memory(self._context), True)
            return
        if self._context:
            binding.llama_free(self._context)
        params = binding.llama_context_default_params()
        params.n_ctx, params.n_seq_max = length * sequences, sequences
        params.n_batch, params.n_ubatch = 2048, 512
        params.n_threads = params.n_threads_batch = self._threads
        params.no_perf = True
        if sequences > 1:
            params.kv_unified = False
        self._context = binding.llama_init_from_model(self._model, params)
        self._batch = binding.llama_batch_init(2048, 0, sequences)
        self._shape = (length, sequences)

    def _run(self, items: Sequence[tuple[int, int, int, bool]]) -> list[int]:
        """(token, position, sequence, wants logits) -> greedy tokens of those that want logits."""
        batch = self._batch
        batch.n_tokens = len(items)
        for i, (token, position, sequence, wants) in enumerate(items):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, position, 1
            batch.seq_id[i][0], batch.logits[i] = sequence, int(wants)
        if binding.llama_decode(self._context, batch) != 0:
            raise RuntimeError("llama_decode failed")
        return [int(self._logits(i).argmax()) for i, item in enumerate(items) if item[3]]

    def _logits(self, row: int) -> Any:
        pointer = binding.llama_get_logits_ith(self._context, row)
        return np.ctypeslib.as_array(pointer, shape=(self._vocab_size,))

    def prefill(self, ids: Sequence[int]) -> float:
        """Tokens per second of one prompt."""
        self._use_context(len(ids) + 64, 1)
        start = time.perf_counter()
        self._run([(token, i, 0, i == len(ids) - 1) for i, token in enumerate(ids)])
        return len(ids) / (time.perf_counter() - start)

    def decode(self, prompts: Sequence[Sequence[int]], steps: int) -> float:
        """Tokens per second, all sequences together, after their prompts."""
        self._use_context(len(prompts[0]) + steps + 64, len(prompts))
        tokens = [
            self._run([(token, i, s, i == len(ids) - 1) for i, token in enumerate(ids)])[0]
            for s, ids in enumerate(prompts)
        ]
        start = time.perf_counter()
        for step in range(steps):
            position = len(prompts[0]) + step
            tokens = self._run([(token, position, s, True) for s, token in enumerate(tokens)])
        return len(prompts) * steps / (time.perf_counter() - start)


def main() -> None:
    path, threads = sys.argv[1], int(sys.argv[2])
    engine = LlamaCpp(path, threads)
    print(json.dumps({"version": binding.__version__}), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        if order["measure"] == "prefill":
            rate = engine.prefill(order["prompt"])
        else:
            rate = engine.decode(order["prompts"], order["steps"])
        print(json.dumps({"tokens_per_second": rate}), flush=True)


if __name__ == "__main__":
    main()
