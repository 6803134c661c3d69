"""Whether drafting changes an answer: every policy and length against no drafting, greedy and sampled.

python -m mvllm.bench.experiments.speculation.identity TARGET --draft DRAFT
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from mvllm.core.request import RequestOutput, SamplingParams
from mvllm.core.spec.draft_length import DraftDemand, DraftLengthPolicy, SpeculationStep
from mvllm.core.spec.length_policies import POLICIES, create_policy
from mvllm.core.types import RequestId
from mvllm.llm import LLM

PROMPTS = (
    "def quicksort(items):\n    ",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "# Read a CSV file and print the sum of its second column\nimport csv\n",
    "SELECT name, count(*) FROM orders",
    "The three laws of thermodynamics are",
    "Once upon a time, in a village by the sea,",
    "1, 1, 2, 3, 5, 8, 13,",
    "Write a letter to a friend about your first week in a new city.\n\n",
    "function debounce(callback, delay) {\n  let timer = null;\n  return function () {\n    ",
    "Q: What is the capital of France?\nA: Paris.\n\nQ: What is the capital of Italy?\nA:",
)


class SwitchingPolicy(DraftLengthPolicy):
    """Passes everything on to `current`, so that one loaded pair of models serves every policy."""

    def __init__(self) -> None:
        self.current = create_policy()

    def lengths(self, rows: Sequence[DraftDemand]) -> list[int]:
        return self.current.lengths(rows)

    def readers(self) -> frozenset[RequestId]:
        return self.current.readers()

    def least_confidence(self) -> float:
        return self.current.least_confidence()

    def observe(self, step: SpeculationStep) -> None:
        self.current.observe(step)

    def release(self, id: RequestId) -> None:
        self.current.release(id)


def cases(policies: Sequence[str], lengths: Sequence[int]) -> Iterator[tuple[str, DraftLengthPolicy]]:
    """Each constant length, and each other policy with its own limits."""
    if "fixed" in policies:
        for length in lengths:
            yield f"fixed {length}", create_policy("fixed", max_length=length)
    for name in policies:
        if name != "fixed":
            yield name, create_policy(name)


def samplings(tokens: int) -> dict[str, SamplingParams]:
    return {
        "greedy": SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=0),
        "sampled": SamplingParams(temperature=0.8, seed=20, max_tokens=tokens, ignore_eos=True, logprobs=0),
    }


def num_different(outputs: Sequence[RequestOutput], expected: Sequence[RequestOutput]) -> int:
    """Answers with another token, text or log-probability."""
    return sum(a.outputs != b.outputs for a, b in zip(outputs, expected, strict=True))


@click.command(help=__doc__)
@click.argument("target", type=click.Path(exists=True, path_type=Path))
@click.option(
    "--draft", type=click.Path(exists=True, path_type=Path), help="The draft model; without it, n-grams."
)
@click.option("--tokens", default=96, show_default=True, help="Output tokens of each prompt.")
@click.option("--prompts", default=len(PROMPTS), show_default=True, help="How many of the prompts.")
@click.option("--policies", default=",".join(POLICIES), show_default=True, help="With commas.")
@click.option("--lengths", default="1,2,3,4,5,6", show_default=True, help="Of the policy fixed, with commas.")
@click.option(
    "--drafter",
    type=click.Choice(["model", "ngram+model"]),
    default="ngram+model",
    show_default=True,
    help="How --draft drafts; without it, ngram.",
)
@click.option("--backend", default="auto", show_default=True)
def main(
    target: Path,
    draft: Path | None,
    tokens: int,
    prompts: int,
    policies: str,
    lengths: str,
    drafter: str,
    backend: str,
) -> None:
    texts = PROMPTS[:prompts]
    settings: dict[str, Any] = {"backend": backend, "max_model_len": 512, "kv_cache_bytes": 1 << 29}
    with LLM(target, **settings) as llm:
        expected = {name: llm.generate(texts, params) for name, params in samplings(tokens).items()}
    policy = SwitchingPolicy()
    drafting: dict[str, Any] = {"draft_model": draft, "drafter": drafter} if draft else {"drafter": "ngram"}
    total = 0
    with LLM(target, **settings, **drafting, draft_policy=policy) as llm:
        for case, policy.current in cases(policies.split(","), [int(part) for part in lengths.split(",")]):
            for name, params in samplings(tokens).items():
                before = llm.engine.totals.speculation
                different = num_different(llm.generate(texts, params), expected[name])
                after = llm.engine.totals.speculation
                assert before is not None and after is not None
                total += different
                accepted = after.num_accepted - before.num_accepted
                proposed = after.num_proposed - before.num_proposed
                click.echo(
                    f"{case:16}{name:9}different answers: {different} of {len(texts)}, "
                    f"drafts accepted: {accepted} of {proposed}"
                )
                if after.switched_off is not None:
                    raise click.ClickException(f"drafting was switched off: {after.switched_off}")
    sys.exit(1 if total else 0)


if __name__ == "__main__":
    main()
