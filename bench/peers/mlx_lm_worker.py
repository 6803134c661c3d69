"""mlx-lm, measured on command. Runs in an environment that has mlx-lm, without mvllm.

Reads one JSON object per line from standard input, answers with one JSON object per line:

    {"prompts": [[...], ...], "steps": 32} -> {"seconds": ..., "token_ids": [[...], ...]}

One prompt runs through mlx-lm's generator of single answers, several through its batch generator. The time is
that of `steps` decode steps after the prompts and two warm steps.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.generate import BatchGenerator, generate_step
from mlx_lm.utils import load_model

WARM_STEPS = 2


def decode_one(model: Any, prompt: list[int], steps: int) -> tuple[float, list[list[int]]]:
    generator = generate_step(mx.array(prompt), model, max_tokens=WARM_STEPS + steps)
    ids = [next(generator)[0] for _ in range(WARM_STEPS)]
    start = time.perf_counter()
    ids += [next(generator)[0] for _ in range(steps)]
    return time.perf_counter() - start, [[int(id) for id in ids]]


def decode_batch(model: Any, prompts: Sequence[list[int]], steps: int) -> tuple[float, list[list[int]]]:
    generator = BatchGenerator(model, max_tokens=WARM_STEPS + steps + 1, completion_batch_size=len(prompts))
    uids = generator.insert([list(prompt) for prompt in prompts])
    ids: dict[int, list[int]] = {uid: [] for uid in uids}

    def advance(count: int) -> None:
        for _ in range(count):
            responses = generator.next_generated()
            if len(responses) != len(uids):
                raise RuntimeError(f"a step made {len(responses)} tokens for {len(uids)} sequences")
            for response in responses:
                ids[response.uid].append(int(response.token))

    advance(WARM_STEPS)
    start = time.perf_counter()
    advance(steps)
    seconds = time.perf_counter() - start
    generator.close()
    return seconds, [ids[uid] for uid in uids]


def main() -> None:
    model, _ = load_model(Path(sys.argv[1]))
    versions = {name: version(name) for name in ("mlx-lm", "mlx")}
    device = mx.default_device().type.name
    print(json.dumps({"versions": versions, "device": device}), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        prompts, steps = order["prompts"], order["steps"]
        if len(prompts) == 1:
            seconds, ids = decode_one(model, prompts[0], steps)
        else:
            seconds, ids = decode_batch(model, prompts, steps)
        print(json.dumps({"seconds": seconds, "token_ids": ids}), flush=True)


if __name__ == "__main__":
    main()
