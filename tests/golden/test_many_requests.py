"""Many requests of mixed length at once on a real model: all end, and nothing stays behind."""

from __future__ import annotations

import random
import threading

from mvllm import LLM, SamplingParams
from tests.golden.data import model_path


def test_64_mixed_requests_finish_with_every_block_back_in_the_pool() -> None:
    rng = random.Random(1)
    prompts = [[rng.randrange(49_152) for _ in range(rng.choice([1, 5, 16, 40, 90]))] for _ in range(64)]
    params = [
        SamplingParams(
            temperature=rng.choice([0.0, 0.8]), seed=i, max_tokens=rng.randint(1, 12), ignore_eos=True
        )
        for i in range(64)
    ]
    threads_before = threading.active_count()
    with LLM(model_path("smollm2-135m"), max_model_len=512, num_kv_blocks=200) as llm:
        outputs = llm.generate(prompts, params)
        assert [len(o.outputs[0].token_ids) for o in outputs] == [p.max_tokens for p in params]
        assert all(o.outputs[0].finish_reason == "length" for o in outputs)
        llm.engine.check_integrity()
        assert llm.engine.num_used_blocks == 0
        assert llm.engine.num_free_blocks + llm.engine.num_idle_blocks == 200
        llm.engine.clear_cache()
        assert llm.engine.num_free_blocks == 200
    assert threading.active_count() == threads_before
