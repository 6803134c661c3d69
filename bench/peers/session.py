"""A run of the comparison: which engines are started, and which rounds are still to be measured."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mvllm.bench.peers import machine
from mvllm.bench.peers.bandwidth import ReadBandwidth
from mvllm.bench.peers.peer_process import EngineProcess
from mvllm.bench.peers.results import Results, Start, counts
from mvllm.bench.peers.rounds import Contest, Round
from mvllm.bench.peers.workloads import Case, text_token_ids, tokens_needed
from mvllm.core.errors import ConfigError
from mvllm.core.load.contents import Checkpoint
from mvllm.core.tensor import ModelWeights, Weight
from mvllm.core.text.tokenizer import Tokenizer

_FOLDER = Path(__file__).parent
_TRIES = 2  # rounds that are measured for each that must count, at most


@dataclass(frozen=True)
class EngineCommand:
    """How an engine's process is started."""

    name: str
    python: tuple[str, ...]  # Python and its options
    engine_file: Path  # as `worker.py` takes it
    settings: Mapping[str, object]


@dataclass(frozen=True)
class Plan:
    """What is to be measured."""

    model: Path
    threads: int
    cases: tuple[Case, ...]
    rounds: int  # of each case, that count
    sample_seconds: float
    max_foreign: float
    seconds: float | None  # nothing new is started after so many

    def missing(self, results: Results) -> int:
        """Rounds that still have to be measured."""
        return sum(self.missing_of(case, results) for case in self.cases)

    def missing_of(self, case: Case, results: Results) -> int:
        kept = sum(round.case == case.name and counts(round, self.max_foreign) for round in results.rounds)
        return max(0, self.rounds - kept)


def engine_commands(plan: Plan, peer_python: str | None) -> list[EngineCommand]:
    """mvllm in this Python and, unless `peer_python` is None, llama.cpp in that one."""
    common: dict[str, object] = {"model": str(plan.model.absolute()), "threads": plan.threads}
    pool: dict[str, object] = {
        "max_model_len": max(case.length for case in plan.cases),
        "max_sequences": max(case.sequences for case in plan.cases),
        # The prompts stay cached while sequences write behind them.
        "kv_tokens": max(case.sequences * (case.length + case.steps) for case in plan.cases),
    }
    ours = (sys.executable, "-P")  # the worker's neighbours are no modules to import by their bare names
    commands = [EngineCommand("mvllm", ours, _FOLDER / "mvllm_engine.py", {**common, **pool})]
    if peer_python is not None:
        # Isolated: no folder of this project may hide the package that it imports.
        python = (peer_python, "-I")
        commands.append(EngineCommand("llama.cpp", python, _FOLDER / "llama_engine.py", common))
    return commands


def measure(
    plan: Plan,
    commands: Sequence[EngineCommand],
    checkpoint: Checkpoint,
    results: Results,
    tell: Callable[[Round], None],
) -> None:
    """Add rounds to `results` until every case has enough that count, or time or tries are used up.

    Args:
        commands: our engine's, then that of the peer, if there is one.
        tell: is shown every round.

    Raises:
        ConfigError: a case does not fit the model, or the results are of something else.
        PeerFailed: an engine failed.
    """
    for case in plan.cases:
        if case.length > checkpoint.spec.context_length:
            raise ConfigError(
                f"{case.name} takes {case.length} tokens; "
                f"the model's context is {checkpoint.spec.context_length}"
            )
    if plan.missing(results) == 0:
        return
    deadline = None if plan.seconds is None else time.monotonic() + plan.seconds
    # Both sides get the same ids, so unusual ones do no harm.
    tokenizer = Tokenizer.from_assets(checkpoint.text, allow_unknown_pretokenizer=True)
    ids = text_token_ids(tokenizer, tokens_needed(plan.cases))
    with contextlib.ExitStack() as stack:
        engines = [
            stack.enter_context(EngineProcess(each.name, each.python, each.engine_file, each.settings))
            for each in commands
        ]
        results.begin(_facts(plan, checkpoint, engines))
        bandwidth = stack.enter_context(ReadBandwidth(plan.threads, bytes_read_per_step(checkpoint.weights)))
        for case in plan.cases:
            for round in _rounds(case, plan, engines, ids, bandwidth, results, deadline):
                results.add(round)
                tell(round)
        for engine in engines:
            results.add_start(Start(engine.name, engine.load_seconds, engine.peak_rss_bytes()))


def _rounds(
    case: Case,
    plan: Plan,
    engines: Sequence[EngineProcess],
    ids: Sequence[int],
    bandwidth: ReadBandwidth,
    results: Results,
    deadline: float | None,
) -> Iterator[Round]:
    """Rounds of a case, while they are wanted."""
    contest: Contest | None = None
    for number in range(_TRIES * plan.missing_of(case, results)):
        late = deadline is not None and time.monotonic() > deadline
        if late or plan.missing_of(case, results) == 0:
            return
        if contest is None:
            contest = Contest(
                case,
                engines[0],
                engines[1] if len(engines) > 1 else None,
                ids,
                bandwidth=lambda: bandwidth.measure(plan.sample_seconds / 2),
                own_pid=os.getpid(),
                sample_seconds=plan.sample_seconds,
            )
        yield contest.round(number)


def bytes_read_per_step(weights: ModelWeights) -> int:
    """Bytes of the file's weights that a decoding step reads.

    That is all of them, except that an embedding which is not also the head does not count: only some of its
    rows are read.
    """
    read: dict[int, Weight] = {id(each): each for each in (weights.head, weights.final_norm)}
    for layer in weights.layers:
        read |= {id(weight): weight for weight in vars(layer).values() if weight is not None}
    return sum(weight.nbytes for weight in read.values())


def _facts(plan: Plan, checkpoint: Checkpoint, engines: Sequence[EngineProcess]) -> dict[str, str]:
    facts = {
        "model": plan.model.name,
        "file": f"{checkpoint.file_bytes:,} bytes",
        "threads": str(plan.threads),
        **machine.facts(),
    }
    for engine in engines:
        facts |= {f"{engine.name}: {name}": value for name, value in engine.facts.items()}
    return facts
