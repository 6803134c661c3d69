"""What was measured: the file that keeps it, and the medians."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mvllm.bench.peers.rounds import Round, Timing
from mvllm.core.errors import ConfigError

UNCHECKED_FACTS = ("date",)


@dataclass(frozen=True)
class Start:
    """One run of one engine's process."""

    engine: str
    load_seconds: float
    peak_rss_bytes: int | None


class Results:
    """Facts, starts and rounds, in a JSON file if there is a path; the file is whole after every addition."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self.facts: dict[str, str] = {}
        self.starts: list[Start] = []
        self.rounds: list[Round] = []
        if path is not None and path.exists():
            self._read(path)

    def begin(self, facts: Mapping[str, str]) -> None:
        """Start, or check that the rounds that are there were measured with the same things.

        Raises:
            ConfigError: they were not.
        """
        if not self.facts:
            self.facts = dict(facts)
            return
        for name in {**self.facts, **facts}:
            before, now = self.facts.get(name), facts.get(name)
            if name not in UNCHECKED_FACTS and before != now:
                raise ConfigError(
                    f"{self._path} was measured with {name} {before!r}, not {now!r}: give another file"
                )

    def add(self, round: Round) -> None:
        self.rounds.append(round)
        self._write()

    def add_start(self, start: Start) -> None:
        self.starts.append(start)
        self._write()

    def _read(self, path: Path) -> None:
        try:
            content = json.loads(path.read_text())
            self.facts = dict(content["facts"])
            self.starts = [Start(**start) for start in content["starts"]]
            self.rounds = [_round_from_json(fields) for fields in content["rounds"]]
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path} holds no results of this command: {error}") from error

    def _write(self) -> None:
        if self._path is None:
            return
        content = {
            "facts": self.facts,
            "starts": [asdict(start) for start in self.starts],
            "rounds": [asdict(round) for round in self.rounds],
        }
        new = self._path.with_name(self._path.name + ".new")
        new.write_text(json.dumps(content, indent=1) + "\n")
        new.replace(self._path)


def _round_from_json(fields: Mapping[str, Any]) -> Round:
    theirs = fields["theirs"]
    timings = {
        "ours": Timing(**fields["ours"]),
        "theirs": None if theirs is None else Timing(**theirs),
    }
    return Round(**{**fields, **timings})


@dataclass(frozen=True)
class Ratios:
    """Of the rounds of a case, each taken within its round."""

    median: float
    lowest: float
    highest: float

    @staticmethod
    def of(values: Sequence[float]) -> Ratios:
        return Ratios(statistics.median(values), min(values), max(values))


@dataclass(frozen=True)
class Summary:
    """Medians over the rounds of one case that count; None where none does."""

    case: str
    num_kept: int
    num_dropped: int
    ours: float | None = None  # tokens per second
    theirs: float | None = None
    ratio: Ratios | None = None
    bandwidth: float | None = None  # bytes per second
    foreign_load: float | None = None
    our_share: float | None = None  # packed weight bytes per second, over the bandwidth
    their_share: float | None = None
    same_tokens: tuple[int, int] | None = None  # greedy tokens before the first difference, of how many


def counts(round: Round, max_foreign: float) -> bool:
    """Whether a round was measured undisturbed; where the load is unknown, all do."""
    return round.foreign_load is None or round.foreign_load <= max_foreign


def summarize(case: str, rounds: Sequence[Round], max_foreign: float, weight_bytes: int) -> Summary:
    """Args:
    weight_bytes: what one decoding step reads of the file's weights.
    """
    of_case = [round for round in rounds if round.case == case]
    kept = [round for round in of_case if counts(round, max_foreign)]
    dropped = len(of_case) - len(kept)
    if not kept:
        return Summary(case, 0, dropped)
    pairs = [(round.ours.rate, round.theirs.rate) for round in kept if round.theirs is not None]
    one_sequence = case.startswith("decode-")
    agreeing = [(r.same_tokens, r.num_tokens) for r in kept if r.same_tokens is not None]
    return Summary(
        case,
        len(kept),
        dropped,
        ours=statistics.median(round.ours.rate for round in kept),
        theirs=_median([theirs for _, theirs in pairs]),
        ratio=Ratios.of([ours / theirs for ours, theirs in pairs]) if pairs else None,
        bandwidth=statistics.median(round.bandwidth for round in kept),
        foreign_load=_median([round.foreign_load for round in kept if round.foreign_load is not None]),
        our_share=_share(kept, weight_bytes, lambda round: round.ours) if one_sequence else None,
        their_share=_share(kept, weight_bytes, lambda round: round.theirs) if one_sequence else None,
        same_tokens=min((same, of or 0) for same, of in agreeing) if agreeing else None,
    )


def _share(
    rounds: Sequence[Round], weight_bytes: int, side: Callable[[Round], Timing | None]
) -> float | None:
    timings = [(side(round), round.bandwidth) for round in rounds]
    return _median(
        [timing.rate * weight_bytes / bandwidth for timing, bandwidth in timings if timing is not None]
    )


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None
