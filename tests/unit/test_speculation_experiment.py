"""The speculation experiment: its arithmetic, its file, and one small run of the whole."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from mvllm.bench.experiments.speculation.__main__ import main
from mvllm.bench.experiments.speculation.allowance import allowance, seconds_per_token
from mvllm.bench.experiments.speculation.coupling import compare
from mvllm.bench.experiments.speculation.engines import Measurement
from mvllm.bench.experiments.speculation.recording import StepSummary
from mvllm.bench.experiments.speculation.runs import Pair, Results, Run, pair_from_json
from mvllm.core.spec.draft_length import DraftResult, SpeculationStep
from mvllm.core.types import RequestId
from tests.tiny_models import write_tiny_gguf

RUN = Run("ngram", "fixed", 2, "refactoring", 1, 10, 0.0, 0)


def step(proposed: int, accepted: int, forward: float, draft: float, prefill: int = 0) -> SpeculationStep:
    result = DraftResult(RequestId("0"), proposed, accepted)
    return SpeculationStep((result,), 1, 1 + proposed + prefill, prefill, 50, draft, forward)


STEPS = [step(0, 0, 0.03, 0.0), step(2, 2, 0.04, 0.01), step(2, 1, 0.04, 0.01), step(2, 0, 0.40, 0.01)]


def measurement(seconds: float, steps: list[SpeculationStep]) -> Measurement:
    return Measurement(0.1, seconds, 8, 7, "abc", StepSummary.of(steps))


def test_steps_are_summed_up_by_length_and_timed_by_medians() -> None:
    summary = StepSummary.of([*STEPS, step(1, 1, 9.0, 9.0, prefill=5)])
    assert summary.num_steps == 5
    assert (summary.proposed, summary.accepted) == (7, 4)
    assert summary.lengths == {"0": 1, "1": 1, "2": 3}
    assert summary.accepted_by_length == {"0": 0, "1": 1, "2": 3}
    assert summary.forward_seconds == {"1": 0.03, "3": 0.04}
    assert summary.draft_seconds == {"0": 0.0, "2": 0.01}


def test_the_allowance_counts_median_times() -> None:
    # 4 steps bring 4 + 3 tokens and should have taken 0.03 + 3 * 0.05 seconds.
    assert seconds_per_token(StepSummary.of(STEPS)) == pytest.approx(0.18 / 7)
    pair = Pair(RUN, measurement(7 * 0.03, []), measurement(1.0, STEPS), None)
    other = replace(pair, run=replace(RUN, length=4), drafted=measurement(1.0, STEPS[:1]))
    allowed = allowance([pair, other])
    assert allowed.by_length == pytest.approx({0: 1.0, 2: 0.03 / (0.18 / 7), 4: 1.0})
    assert allowed.best_length == 2


def test_results_are_read_back_and_belong_to_one_experiment(tmp_path: Path) -> None:
    path = tmp_path / "out" / "results.jsonl"
    facts = {"target": "a", "draft": "b", "machine": "m", "threads": 2}
    pair = Pair(RUN, measurement(1.0, []), measurement(0.5, STEPS), 0.1)
    assert pair_from_json(json.loads(json.dumps(asdict(pair)))) == pair
    results = Results(path)
    results.begin(facts)
    results.add(pair)
    again = Results(path)
    again.begin(facts)
    assert again.has(RUN)
    assert not again.has(replace(RUN, repeat=1))
    assert again.pairs == [pair]
    with pytest.raises(ValueError, match="'a', not 'c'"):
        again.begin({**facts, "target": "c"})


def test_coupling_and_rejection_agree_on_equal_and_on_disjoint_distributions() -> None:
    logits = np.random.default_rng(0).normal(0, 2, 50).astype(np.float32)
    same = compare(logits, logits, 0.8, position=7, draws=20)
    assert same.rejection == pytest.approx(1.0)
    assert same.coupling == 1.0
    one, other = np.full(4, -np.inf, np.float32), np.full(4, -np.inf, np.float32)
    one[:2], other[2:] = 0.0, 0.0
    apart = compare(one, other, 0.8, position=7, draws=20)
    assert (apart.rejection, apart.coupling, apart.independent) == (0.0, 0.0, 0.0)


def test_coupling_lies_between_independent_draws_and_rejection() -> None:
    rng = np.random.default_rng(1)
    logits = rng.normal(0, 2, 50).astype(np.float32)
    near = logits + rng.normal(0, 0.4, 50).astype(np.float32)
    position = compare(logits, near, 0.8, position=7, draws=2000)
    assert position.independent < position.coupling - 0.05
    assert position.coupling < position.rejection + 0.03
    shifted = 1.0 - position.rejection
    assert position.coupling > (1.0 - shifted) / (1.0 + shifted) - 0.03


def test_a_report_that_could_not_be_drawn_is_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mvllm.bench.experiments.speculation.__main__.find_spec", lambda name: None)
    model = tmp_path / "tiny.gguf"
    write_tiny_gguf(model, tensor_type="F32", seed=3)
    result = CliRunner().invoke(main, [str(model), "--out", str(tmp_path / "out")])
    assert result.exit_code == 2
    assert "mvllm-engine[plots]" in result.output
    assert not (tmp_path / "out").exists()


def test_a_small_experiment_runs_stops_goes_on_and_reports(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    model = tmp_path / "tiny.gguf"
    write_tiny_gguf(model, tensor_type="F32", seed=3)
    small = {
        **{"--draft": str(model), "--out": str(tmp_path / "out"), "--backend": "reference"},
        **{"--workloads": "refactoring", "--prompt-tokens": "40", "--tokens": "5", "--repeats": "1"},
        **{"--lengths": "2", "--requests": "2", "--request-tokens": "4"},
        **{"--coupling-tokens": "4", "--coupling-draws": "5"},
    }
    options = [str(model), *(word for option in small.items() for word in option)]
    stopped = CliRunner().invoke(main, [*options, "--seconds", "0"], catch_exceptions=False)
    assert "are left" in stopped.output
    result = CliRunner().invoke(main, options, catch_exceptions=False)
    # Of each of three drafters: policies, length, batch.
    assert result.output.count("same tokens: True") == 3 * (4 + 1 + 1)
    report = (tmp_path / "out" / "report.md").read_text()
    assert "NO" not in report
    for figure in ("speed", "acceptance", "lengths", "allowed", "coupling"):
        assert (tmp_path / "out" / f"{figure}.svg").stat().st_size > 1000
    again = CliRunner().invoke(main, options, catch_exceptions=False)
    assert "tokens/s" not in again.output
