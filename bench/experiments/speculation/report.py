"""The experiment's report in Markdown, from its results."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mvllm.bench.experiments.speculation import plots
from mvllm.bench.experiments.speculation.allowance import Allowance, allowance
from mvllm.bench.experiments.speculation.coupling import Position
from mvllm.bench.experiments.speculation.runs import Pair
from mvllm.core.spec.length_policies import DEFAULT_POLICY, POLICIES

Case = tuple[str, str]
"""(workload, drafter)"""

SCOPE = """\
Speculation against the same engine without it, on the same prompts, in the same process. The output must be
the same, token for token; what is measured is time.

## Procedure

Every line comes from pairs of runs, without drafts and with them, which take turns of 16 tokens of each
request, each in a fresh engine with empty caches and with a policy that has learned nothing yet. A ratio is
taken within each pair; the table has medians of ratios. *Decode* starts with the first output token (of the
last request), *whole* counts the prompts too, and with the draft model also its prompts. Requests ignore the
end of text. One request is greedy on the refactoring prompt and sampled at temperature 0.8 on the creative
one; concurrent ones are sampled at 0.8 with different seeds, half of them on each prompt. Tokens are compared
by a hash of all output ids.

*Allowed* is the best expected speed-up over constant draft lengths, from runs with each of them: mean tokens
per step over mean time per step, with median times of forwards for each number of drafts (`allowance.py`).
"""

LIMITS = """\
## What this does not show

Other processors, models, prompts and languages; long contexts; prompts that share prefixes; more than one
answer per engine, where a policy would start from what earlier answers taught it. One machine with other
work on it: single ratios move by several per cent. The allowance is that of one length for the whole text; a
policy that changes the length can exceed it.
"""


def write_report(
    folder: Path,
    facts: Mapping[str, Any],
    pairs: Sequence[Pair],
    positions: Mapping[str, Sequence[Position]],
    *,
    max_foreign: float,
) -> Path:
    """Write report.md and its figures into `folder`; returns the report's path.

    Pairs during which other processes took more than `max_foreign` of a core count only where a line would
    have no others.
    """
    single = [pair for pair in pairs if pair.run.num_requests == 1]
    policies = _grouped(single, lambda pair: (*_case(pair), pair.run.policy), max_foreign, length=False)
    lengths = _grouped(single, _case, max_foreign, length=True)
    concurrent = _grouped(
        [pair for pair in pairs if pair.run.num_requests > 1],
        lambda pair: (pair.run.drafter, pair.run.num_requests),
        max_foreign,
        length=False,
    )
    allowances = {case: allowance(found) for case, found in lengths.items()}
    parts = [
        f"# Speculation: {facts['target']}\n\n{SCOPE}",
        _facts(facts),
        _policies(policies, allowances),
        _lengths(lengths, allowances),
        _concurrent(concurrent),
        _coupling(positions, facts.get("coupling_temperature")),
        _figures(folder, policies, allowances, positions),
        LIMITS,
    ]
    path = folder / "report.md"
    path.write_text("\n".join(part for part in parts if part))
    return path


def _case(pair: Pair) -> Case:
    return pair.run.workload, pair.run.drafter


def _grouped(
    pairs: Iterable[Pair], key: Callable[[Pair], Any], max_foreign: float, *, length: bool
) -> dict[Any, list[Pair]]:
    groups: dict[Any, list[Pair]] = {}
    for pair in pairs:
        if (pair.run.length is not None) == length:
            groups.setdefault(key(pair), []).append(pair)
    return {name: _quiet(found, max_foreign, length=length) for name, found in sorted(groups.items())}


def _quiet(pairs: list[Pair], max_foreign: float, *, length: bool) -> list[Pair]:
    kept = [pair for pair in pairs if (pair.foreign_load or 0.0) <= max_foreign]
    return pairs if length or not kept else kept


# --- sections ----------------------------------------------------------------------------------------


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def _facts(facts: Mapping[str, Any]) -> str:
    return "## Machine and versions\n\n" + _table(
        ["what", ""], [(name, str(value)) for name, value in facts.items()]
    )


def _median(values: Iterable[float]) -> str:
    return f"{statistics.median(values):.2f}"


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def _policies(
    policies: Mapping[tuple[str, str, str], Sequence[Pair]], allowances: Mapping[Case, Allowance]
) -> str:
    rows = []
    for (workload, drafter, policy), pairs in policies.items():
        allowed = allowances.get((workload, drafter))
        reached = statistics.median(pair.speed_up for pair in pairs)
        steps = [pair.drafted.steps for pair in pairs]
        proposed = sum(step.proposed for step in steps)
        rows.append(
            (
                workload,
                drafter,
                policy,
                _spread([pair.speed_up for pair in pairs]),
                _median(pair.whole_speed_up for pair in pairs),
                "" if allowed is None else f"{allowed.best:.2f} (length {allowed.best_length})",
                "" if allowed is None else f"{reached / allowed.best:.0%}",
                f"{sum(step.accepted for step in steps)} of {proposed}",
                f"{sum(pair.drafted.num_decoded for pair in pairs) / sum(s.num_steps for s in steps):.2f}",
                f"{statistics.median(pair.plain.decode_rate for pair in pairs):.1f}",
                "yes" if all(pair.same_tokens for pair in pairs) else "NO",
                str(len(pairs)),
            )
        )
    head = ["workload", "drafter", "policy", "decode", "whole", "allowed", "of allowed", "drafts accepted"]
    head += ["tokens per step", "plain, tokens/s", "same tokens", "pairs"]
    return "## One request: speed-up over no drafts\n\n" + _table(head, rows) if rows else ""


def _lengths(lengths: Mapping[Case, Sequence[Pair]], allowances: Mapping[Case, Allowance]) -> str:
    rows = []
    for (workload, drafter), pairs in lengths.items():
        for pair in sorted(pairs, key=lambda pair: pair.run.length or 0):
            length, steps = pair.run.length or 0, pair.drafted.steps
            rows.append(
                (
                    workload,
                    drafter,
                    str(length),
                    f"{allowances[workload, drafter].by_length[length]:.2f}",
                    f"{steps.accepted / steps.proposed:.0%}" if steps.proposed else "",
                    f"{1e3 * _at(steps.forward_seconds, 1):.1f}",
                    f"{1e3 * _at(steps.forward_seconds, length + 1):.1f}",
                    f"{1e3 * _at(steps.draft_seconds, length):.2f}",
                )
            )
    head = ["workload", "drafter", "length", "speed-up allowed", "accepted"]
    head += ["forward of 1 token, ms", "forward with drafts, ms", "drafting, ms"]
    return "## Constant lengths: what they cost and allow\n\n" + _table(head, rows) if rows else ""


def _at(medians: Mapping[str, float], key: int) -> float:
    return medians.get(str(key), float("nan"))


def _concurrent(concurrent: Mapping[tuple[str, int], Sequence[Pair]]) -> str:
    rows = [
        (
            str(number),
            drafter,
            _spread([pair.speed_up for pair in pairs]),
            _median(pair.whole_speed_up for pair in pairs),
            _median(pair.plain.decode_rate for pair in pairs),
            "yes" if all(pair.same_tokens for pair in pairs) else "NO",
            str(len(pairs)),
        )
        for (drafter, number), pairs in concurrent.items()
    ]
    head = ["requests", "drafter", "decode", "whole", "plain, tokens/s", "same tokens", "pairs"]
    return f"## Concurrent requests, {DEFAULT_POLICY} policy\n\n" + _table(head, rows) if rows else ""


def _coupling(positions: Mapping[str, Sequence[Position]], temperature: object) -> str:
    rows = []
    for workload, found in positions.items():
        rejection = statistics.fmean(position.rejection for position in found)
        coupled = statistics.fmean(position.coupling for position in found)
        independent = statistics.fmean(position.independent for position in found)
        rows.append(
            (
                workload,
                str(len(found)),
                f"{rejection:.3f}",
                f"{coupled:.3f}",
                f"{rejection - coupled:.3f}",
                f"{independent:.3f}",
            )
        )
    head = ["workload", "positions", "optimal rejection", "keyed coupling", "lost", "independent draws"]
    title = f"## Keyed coupling against rejection sampling, temperature {temperature}\n\n"
    note = (
        "Chance that a draft for one position is accepted, mean over the positions of the target's own "
        "sampled answer; rejection exactly, the coupling over draws of the noise.\n\n"
    )
    return title + note + _table(head, rows) if rows else ""


def _figures(
    folder: Path,
    policies: Mapping[tuple[str, str, str], Sequence[Pair]],
    allowances: Mapping[Case, Allowance],
    positions: Mapping[str, Sequence[Position]],
) -> str:
    speed: dict[str, dict[str, float]] = {}
    accepted: dict[str, dict[str, float]] = {}
    histograms: dict[str, Counter[str]] = {}
    for (workload, drafter, policy), pairs in policies.items():
        name = f"{workload}\n{drafter}"
        steps = [pair.drafted.steps for pair in pairs]
        proposed = sum(step.proposed for step in steps)
        speed.setdefault(name, {})[policy] = statistics.median(pair.speed_up for pair in pairs)
        accepted.setdefault(name, {})[policy] = (
            sum(step.accepted for step in steps) / proposed if proposed else 0.0
        )
        if policy == DEFAULT_POLICY:
            counts = histograms.setdefault(name, Counter())
            for step in steps:
                counts.update(step.lengths)
    names = []
    if speed:
        order = {name: {p: values[p] for p in POLICIES if p in values} for name, values in speed.items()}
        plots.bars(folder / "speed.svg", "Throughput of decoding", "over target only", order, 1.0)
        plots.bars(folder / "acceptance.svg", "Drafts accepted", "share of proposed", accepted, 1.0)
        plots.length_histograms(folder / "lengths.svg", histograms)
        names += ["speed", "acceptance", "lengths"]
    reached = {
        case: (allowed, speed[f"{case[0]}\n{case[1]}"][DEFAULT_POLICY])
        for case, allowed in allowances.items()
        if DEFAULT_POLICY in speed.get(f"{case[0]}\n{case[1]}", {})
    }
    if reached:
        curves = {f"{workload}, {drafter}": value for (workload, drafter), value in reached.items()}
        plots.by_length(folder / "allowed.svg", curves)
        names.append("allowed")
    if positions:
        plots.coupling(folder / "coupling.svg", positions)
        names.append("coupling")
    return "## Figures\n\n" + "\n".join(f"![{name}]({name}.svg)" for name in names) + "\n" if names else ""
