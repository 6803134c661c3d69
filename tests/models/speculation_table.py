"""What `adaptive` makes of measured costs and agreements: `python -m tests.models.speculation_table`.

For each drafter and share of right drafts, over seeds: speed over that without drafts, its least, and the
share of what the best constant length reaches, mean and least.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Mapping

import numpy as np

from mvllm.core.spec.adaptive_length import AdaptiveLength
from mvllm.core.spec.draft_length import FixedLength
from tests.models.speculation_world import Costs, Text, even_text, read_text, simulate

Table = Mapping[int, float]
"""Seconds of a forward with one row, by its tokens."""

TODAY: Table = {1: 0.059, 2: 0.072, 3: 0.078, 4: 0.090, 5: 0.112, 8: 0.150, 17: 0.264}
"""Qwen2.5-Coder-1.5B on two cores; 17 tokens by extrapolation."""
AIMED_AT: Table = {1: 0.057, 2: 0.062, 3: 0.066, 4: 0.072, 5: 0.082, 8: 0.105, 17: 0.174}

LENGTHS = (0, 1, 2, 3, 4, 5, 6, 8, 12, 16)
CHANCES = (0.98, 0.94, 0.9, 0.87, 0.75, 0.6, 0.5, 0.3, 0.0)
OUTPUT, PROMPT = 512, 850  # tokens
RUNS = 0.4  # chance that a token is as difficult as the one before it


def _forward(table: Table) -> Callable[[int, int], float]:
    places, seconds = list(table), list(table.values())
    return lambda rows, tokens: float(np.interp(tokens, places, seconds))


def model_costs(table: Table) -> Costs:
    """Qwen2.5-Coder-0.5B as the drafter."""
    return Costs(_forward(table), lambda rows: 0.024, catch_up=0.003, first_tokens=64)


def lookup_costs(table: Table) -> Costs:
    return Costs(_forward(table), lambda rows: 0.00005, first_tokens=0)


def agreement_by_read(read: int) -> float:
    """Of a drafter that gains much by reading. The 0.5B model agreed with the 1.5B model at 77 % of the
    tokens of a refactoring task after reading 64 of them, and at 93 % after all 890."""
    return float(np.interp(np.log(max(read, 1)), np.log([64, 256, 512, 900]), [0.87, 0.90, 0.94, 0.98]))


def line(costs: Costs, text: Callable[[int], Text], seeds: int) -> str:
    ups, shares = [], []
    for seed in range(seeds):
        one = [text(seed)]
        rates = [simulate(FixedLength(length), one, costs, prompt=PROMPT).rate for length in LENGTHS]
        adaptive = simulate(AdaptiveLength(), one, costs, prompt=PROMPT).rate
        ups.append(adaptive / rates[0])
        shares.append(adaptive / max(rates))
    return (
        f"{statistics.fmean(ups):.3f} (least {min(ups):.3f})  "
        f"{statistics.fmean(shares):.3f} (least {min(shares):.3f})"
    )


def _even(chance: float) -> Callable[[int], Text]:
    return lambda seed: even_text(OUTPUT, chance, seed, runs=RUNS)


def main(seeds: int) -> None:
    texts = {f"{chance:.2f}": _even(chance) for chance in CHANCES}
    texts["by read"] = lambda seed: read_text(OUTPUT, agreement_by_read, seed, runs=RUNS)
    for costs_name, table in (("today", TODAY), ("aimed at", AIMED_AT)):
        for drafter, costs in (("model", model_costs(table)), ("lookup", lookup_costs(table))):
            for name, text in texts.items():
                if costs.first_tokens is None and name == "by read":
                    continue  # a lookup reads nothing first
                print(f"{costs_name:9} {drafter:7} {name:8} {line(costs, text, seeds)}", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10)
