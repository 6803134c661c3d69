"""Which runs there are, and the file that keeps what came of them, so that a stopped experiment goes on."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mvllm.bench.experiments.speculation.engines import Measurement
from mvllm.bench.experiments.speculation.recording import StepSummary
from mvllm.bench.experiments.speculation.workload import WORKLOADS
from mvllm.core.spec.length_policies import POLICIES


@dataclass(frozen=True)
class Run:
    """One pair of measurements: without drafts and with them, taking turns."""

    drafter: str  # "ngram", "model" or "ngram+model"
    policy: str
    length: int | None  # as `create_policy` takes it
    workload: str  # "refactoring", "creative", or "both" in turn
    num_requests: int
    num_tokens: int  # output of each request
    temperature: float
    repeat: int


@dataclass(frozen=True)
class Pair:
    """What came of a run."""

    run: Run
    plain: Measurement
    drafted: Measurement
    foreign_load: float | None  # share of a core that other processes took meanwhile

    @property
    def speed_up(self) -> float:
        """Of decoding."""
        return self.drafted.decode_rate / self.plain.decode_rate

    @property
    def whole_speed_up(self) -> float:
        """Prompts included."""
        return self.drafted.whole_rate / self.plain.whole_rate

    @property
    def same_tokens(self) -> bool:
        return self.plain.ids_sha256 == self.drafted.ids_sha256


def policy_runs(
    drafter: str, workload: str, policies: Sequence[str], num_tokens: int, repeat: int
) -> Iterator[Run]:
    """One request, each policy."""
    for policy in policies:
        yield Run(drafter, policy, None, workload, 1, num_tokens, WORKLOADS[workload], repeat)


def length_runs(drafter: str, workload: str, num_tokens: int, lengths: tuple[int, ...]) -> Iterator[Run]:
    """One request, constant lengths: what each of them costs and brings."""
    for length in lengths:
        yield Run(drafter, "fixed", length, workload, 1, num_tokens, WORKLOADS[workload], 0)


def concurrent_runs(drafter: str, num_requests: int, num_tokens: int, repeat: int) -> Iterator[Run]:
    """Several requests with the default policy, half on each workload, sampled with different seeds."""
    yield Run(drafter, POLICIES[0], None, "both", num_requests, num_tokens, 0.8, repeat)


class Results:
    """A file with one JSON object per line: first the facts of the experiment, then its pairs."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.facts: dict[str, Any] = {}
        self.pairs: list[Pair] = []
        if path.exists():
            lines = path.read_text().splitlines()
            self.facts = json.loads(lines[0])
            self.pairs = [pair_from_json(json.loads(line)) for line in lines[1:]]

    def begin(self, facts: dict[str, Any]) -> None:
        """Start the file, or check that it belongs to the same experiment.

        Raises:
            ValueError: it holds results of other models or another machine.
        """
        if not self.facts:
            self.facts = facts
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text(json.dumps(facts) + "\n")
            return
        for name in ("target", "draft", "machine", "threads", "turn_tokens"):
            if self.facts.get(name) != facts.get(name):
                raise ValueError(
                    f"{self._path} was made with {name} {self.facts.get(name)!r}, not {facts.get(name)!r}; "
                    "give another folder with --out"
                )

    def has(self, run: Run) -> bool:
        return any(pair.run == run for pair in self.pairs)

    def add(self, pair: Pair) -> None:
        self.pairs.append(pair)
        with self._path.open("a") as file:
            file.write(json.dumps(asdict(pair)) + "\n")


def pair_from_json(fields: dict[str, Any]) -> Pair:
    return Pair(
        run=Run(**fields["run"]),
        plain=_measurement(fields["plain"]),
        drafted=_measurement(fields["drafted"]),
        foreign_load=fields["foreign_load"],
    )


def _measurement(fields: dict[str, Any]) -> Measurement:
    return Measurement(**{**fields, "steps": StepSummary(**fields["steps"])})
