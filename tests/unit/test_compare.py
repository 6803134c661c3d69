"""Comparing backends: what is collected, what is measured from it, what the report says."""

from __future__ import annotations

import io
import itertools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from mvllm.backends.reference.backend import ReferenceBackend, ReferenceModel
from mvllm.bench.compare.collect import Footprint, Observation, Speed, observe
from mvllm.bench.compare.measures import LayerError, compare, first_above, first_off_scale
from mvllm.bench.compare.plan import ComparedPrompt, Plan, choose_base
from mvllm.bench.compare.plot import check_plot, write_plot
from mvllm.bench.compare.report import Thresholds, tables, to_json
from mvllm.bench.compare.run import Comparison, Failure, run_comparison
from mvllm.core.errors import CapacityError, ConfigError
from mvllm.core.load.checkpoint import load_checkpoint
from mvllm.core.load.contents import Checkpoint
from mvllm.core.model.spec import ModelSpec
from mvllm.core.step import ForwardBatch, StepOutput
from mvllm.core.tensor import KvGeometry, Model, ModelWeights
from tests.planted import PlantedBackend
from tests.tiny_models import write_tiny_hf

LAYERS = 3
THRESHOLDS = Thresholds(added=1e-3, scale=1e-3)
PLAN = Plan(
    (ComparedPrompt("first", (5, 9, 200, 31)), ComparedPrompt("[second]\n", (7, 7, 8))),
    max_tokens=4,
    batch_sizes=(1, 2),
    speed_tokens=3,
    speed_steps=1,
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("model")
    write_tiny_hf(folder, layers=LAYERS, seed=4)
    return load_checkpoint(folder)


def ticking() -> float:
    """A clock that a half second passes between any two looks at."""
    return next(_ticks)


_ticks = itertools.count(0.0, 0.5)


class CarefulModel(ReferenceModel):
    """Refuses tokens outside the vocabulary, as the other backends do."""

    def step(self, batch: ForwardBatch) -> StepOutput:
        assert batch.tokens.min() >= 0
        return super().step(batch)


class CarefulBackend(ReferenceBackend):
    def load(self, spec: ModelSpec, weights: ModelWeights, geometry: KvGeometry) -> Model:
        return CarefulModel(spec, weights, geometry)


def run(
    checkpoint: Checkpoint, *backends: PlantedBackend | ReferenceBackend, plan: Plan = PLAN
) -> Comparison:
    return run_comparison(checkpoint, backends, plan, clock=ticking)


# --- collecting ---------------------------------------------------------------------------------------------


def test_an_observation_has_tokens_logprobs_activations_and_speeds(checkpoint: Checkpoint) -> None:
    seen = observe(ReferenceBackend(), checkpoint, PLAN, None, ticking)
    assert [len(tokens) for tokens in seen.greedy] == [4, 4]
    for tokens, logprobs in zip(seen.greedy, seen.logprobs, strict=True):
        assert logprobs.shape == (4, checkpoint.spec.vocab_size)
        # In one pass over its own tokens the model chooses them again.
        assert tuple(logprobs.argmax(axis=-1)) == tokens
        np.testing.assert_allclose(np.exp(logprobs.astype(float)).sum(axis=-1), 1, rtol=1e-5)
    assert [[tap.shape for tap in taps] for taps in seen.taps] == [
        [(4 + 3, 64)] * (LAYERS + 1),
        [(3 + 3, 64)] * (LAYERS + 1),
    ]
    # Of three looks at the clock, prefill lies between the first two and decode between the last two.
    assert seen.speeds == (Speed(1, prefill=6, decode=2), Speed(2, prefill=12, decode=4))
    assert (seen.footprint.load_seconds, seen.footprint.kv_dtype) == (0.5, "f32")
    assert seen.footprint.weight_bytes > 0


def test_greedy_tokens_are_those_of_the_engine(tmp_path: Path) -> None:
    from mvllm import LLM, SamplingParams

    write_tiny_hf(tmp_path, layers=LAYERS, seed=4)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    with LLM(tmp_path, backend="reference") as llm:
        outputs = llm.generate([list(prompt.token_ids) for prompt in PLAN.prompts], params)
        seen = observe(ReferenceBackend(), llm.checkpoint, PLAN, None, ticking)
    assert [tuple(output.outputs[0].token_ids) for output in outputs] == list(seen.greedy)


def test_forced_tokens_are_followed(checkpoint: Checkpoint) -> None:
    own = observe(ReferenceBackend(), checkpoint, PLAN, None, ticking)
    other = observe(ReferenceBackend(), checkpoint, PLAN, [[1] * 4, [2] * 4], ticking)
    assert other.greedy == own.greedy
    assert not np.allclose(other.logprobs[0][1:], own.logprobs[0][1:])
    assert np.array_equal(other.logprobs[0][0], own.logprobs[0][0])


# --- measuring ----------------------------------------------------------------------------------------------


def observation(
    greedy: list[list[int]], logprobs: list[list[list[float]]], taps: list[list[list[float]]]
) -> Observation:
    """One made by hand; `taps` of one prompt: [border][token][hidden]."""
    return Observation(
        "x",
        tuple(map(tuple, greedy)),
        tuple(np.array(rows, np.float32) for rows in logprobs),
        ([np.array(tap, np.float32) for tap in taps],),
        (),
        Footprint(0, 0, 0, None, "f32"),
    )


def test_a_divergence_names_both_candidates_and_what_each_backend_thinks_of_them() -> None:
    base = observation([[0, 1]], [[[-1, -2, -3], [-4, -0.5, -3]]], [[[1, 0]]])
    other = observation([[0, 2]], [[[-1, -2, -3], [-4, -2, -1.5]]], [[[1, 0]]])
    [found] = compare(base, other).divergences
    assert (found.prompt, found.position, found.base_token, found.token) == (0, 1, 1, 2)
    assert (found.base_margin, found.margin) == (2.5, 0.5)


def test_agreement_and_errors_of_log_probabilities_are_over_all_positions() -> None:
    half = [float(np.log(0.5)), float(np.log(0.5)), -np.inf]
    base = observation([[0, 0]], [[half, half]], [[[1, 0]]])
    quarter = [float(np.log(0.25)), float(np.log(0.75)), -np.inf]
    difference = compare(base, observation([[0, 0]], [[half, quarter]], [[[1, 0]]]))
    assert difference.agreement == 0.5
    assert difference.same_answers == 1
    assert difference.logprob_error.largest == pytest.approx(np.log(2))
    assert difference.logprob_error.mean == pytest.approx(np.log(2) / 2)
    divergence = 0.5 * np.log(0.5 / 0.25) + 0.5 * np.log(0.5 / 0.75)
    assert difference.logprob_error.divergence == pytest.approx(divergence / 2)


def test_layer_errors_are_relative_and_tell_what_a_layer_adds() -> None:
    same = [[[-1.0]]]
    base = observation([[0]], same, [[[3, 4], [0, 5]], [[6, 8], [0, 10]], [[3, 4], [0, 5]]])
    other = observation([[0]], same, [[[3, 4], [0, 5]], [[6, 8], [1, 10]], [[3, 4], [1, 5]]])
    root = 2**-0.5  # one of two tokens
    layers = compare(base, other).layers
    assert [layer.total for layer in layers] == pytest.approx([0, 0.1 * root, 0.2 * root])
    assert [layer.added for layer in layers] == pytest.approx([0, 0.1 * root, 0])


def test_a_layer_s_scale_is_seen_through_larger_random_errors() -> None:
    rng = np.random.default_rng(0)
    start, contribution = rng.standard_normal((2, 40, 500))
    noise = 0.05 * rng.standard_normal((40, 500))
    base = observation([[0]], [[[-1.0]]], [start.tolist(), (start + contribution).tolist()])
    ours = start + 1.01 * contribution + noise
    [_, layer] = compare(base, observation([[0]], [[[-1.0]]], [start.tolist(), ours.tolist()])).layers
    assert layer.added > 0.03
    assert layer.scale == pytest.approx(0.01, abs=2e-3)


@pytest.mark.parametrize(
    ("added", "expected"), [([0, 0, 0], None), ([0, 2, 3], 1), ([2, 0], 0), ([0, float("nan")], 1)]
)
def test_the_first_layer_above_the_threshold(added: list[float], expected: int | None) -> None:
    assert first_above([LayerError(0, value, 0) for value in added], 1) == expected
    assert first_off_scale([LayerError(0, 0, -value) for value in added], 1) == expected


def test_a_backend_that_yields_nan_is_reported_and_not_smoothed_over(checkpoint: Checkpoint) -> None:
    comparison = run(checkpoint, ReferenceBackend(), PlantedBackend(ReferenceBackend(), 2, float("nan")))
    fields = json.loads(json.dumps(to_json(comparison, THRESHOLDS, str), allow_nan=False))
    difference = fields["backends"]["planted"]["difference"]
    assert difference["first_layer_above_threshold"] == 2
    assert difference["logprob_error"]["mean"] is None
    assert difference["greedy_agreement"] < 1


def test_no_backend_is_fed_a_token_that_a_nan_chose(checkpoint: Checkpoint) -> None:
    broken = PlantedBackend(CarefulBackend(), 0, float("nan"))
    comparison = run(checkpoint, broken)
    assert [speed.sequences for speed in comparison.results[0].speeds] == [1, 2]


@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
def test_thresholds_are_positive_numbers(value: float) -> None:
    with pytest.raises(ConfigError, match="thresholds are positive numbers"):
        Thresholds(added=value)
    with pytest.raises(ConfigError, match="thresholds are positive numbers"):
        Thresholds(scale=value)


# --- planted errors -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", range(LAYERS))
def test_an_error_of_a_hundredth_in_one_layer_is_found_at_that_layer(
    checkpoint: Checkpoint, layer: int
) -> None:
    planted = PlantedBackend(ReferenceBackend(), layer, 1e-2)
    comparison = run(checkpoint, planted, ReferenceBackend())
    fields = to_json(comparison, THRESHOLDS, str)
    assert comparison.base == "reference"
    difference = fields["backends"]["planted"]["difference"]
    assert difference["first_layer_above_threshold"] == layer
    assert difference["first_layer_off_scale"] == layer
    before, at = difference["layers"][: layer + 1], difference["layers"][layer + 1]
    assert all(entry["error"] == 0 for entry in before)
    assert at["layer"] == layer
    assert at["error"] == at["added"] > THRESHOLDS.added
    assert difference["logprob_error"]["mean"] > 0


def test_equal_backends_differ_in_nothing(checkpoint: Checkpoint) -> None:
    comparison = run(checkpoint, ReferenceBackend(), PlantedBackend(ReferenceBackend(), 0, 0.0))
    difference = comparison.results[1].difference
    assert difference is not None
    assert (difference.agreement, difference.same_answers, difference.divergences) == (1.0, 2, ())
    assert difference.logprob_error.largest == 0
    assert first_above(difference.layers, 1e-12) is None


# --- the run ------------------------------------------------------------------------------------------------


def test_the_reference_is_the_base_and_otherwise_the_first() -> None:
    assert choose_base(["cpu", "reference", "mlx"]) == "reference"
    assert choose_base(["mlx", "cpu"]) == "mlx"


class CantLoad(PlantedBackend):
    def load(self, spec: ModelSpec, weights: ModelWeights, geometry: KvGeometry) -> Model:
        raise CapacityError("[bytes]", needed=2, available=1)


class Unsuited(PlantedBackend):
    def unsupported(self, spec: ModelSpec, weights: ModelWeights) -> str | None:
        return "no such head size"


def test_backends_that_can_t_run_the_model_are_reported_and_the_others_compared(
    checkpoint: Checkpoint,
) -> None:
    inner = ReferenceBackend()
    first, second = CantLoad(inner, 0, 0, "first"), Unsuited(inner, 0, 0, "second")
    third, fourth = (PlantedBackend(inner, 0, 0, name) for name in ("third", "fourth"))
    comparison = run(checkpoint, first, second, third, fourth)
    assert comparison.base == "third"
    assert [result.backend for result in comparison.results] == ["third", "fourth"]
    assert comparison.failures == (
        Failure("first", "[bytes]: 2 needed, 1 available"),
        Failure("second", "no such head size"),
    )
    assert "first can't run this model: [bytes]: 2 needed" in printed(comparison)


def test_no_backend_that_can_run_it_leaves_an_empty_comparison(checkpoint: Checkpoint) -> None:
    comparison = run(checkpoint, Unsuited(ReferenceBackend(), 0, 0, "only"))
    assert (comparison.base, comparison.results) == (None, ())
    assert "no such head size" in printed(comparison)
    assert to_json(comparison, THRESHOLDS, str)["failures"] == {"only": "no such head size"}


def test_what_can_t_be_compared_is_refused(checkpoint: Checkpoint) -> None:
    reference = ReferenceBackend()
    with pytest.raises(ConfigError, match="each only once"):
        run(checkpoint, reference, reference)
    with pytest.raises(ConfigError, match="at least one"):
        run(checkpoint)
    for tokens, message in (((), "has no tokens"), ((320,), "outside the vocabulary"), ((1,) * 510, "514")):
        with pytest.raises(ConfigError, match=message):
            run(checkpoint, reference, plan=replace(PLAN, prompts=(ComparedPrompt("p", tokens),)))
    comparison = run(checkpoint, reference, plan=replace(PLAN, kv_dtype="f16"))
    assert "keeps KV as f32" in comparison.failures[0].reason


# --- reports ------------------------------------------------------------------------------------------------


def printed(comparison: Comparison) -> str:
    console = Console(width=200, record=True, file=io.StringIO())
    for table in tables(comparison, THRESHOLDS, lambda token: f"<{token}>"):
        console.print(table)
    return console.export_text()


@pytest.fixture(scope="module")
def comparison(checkpoint: Checkpoint) -> Comparison:
    return run(checkpoint, ReferenceBackend(), PlantedBackend(ReferenceBackend(), 1, 3.0))


def test_the_tables_name_every_layer_prompt_and_backend(comparison: Comparison) -> None:
    text = printed(comparison)
    assert "Difference from reference" in text
    assert "[second]\\n" in text
    for border in ("embedding", *map(str, range(LAYERS))):
        assert any(line.startswith(f"│ {border} ") for line in text.splitlines()), border
    difference = comparison.results[1].difference
    assert difference is not None
    found = difference.divergences[0]
    assert f"'<{found.base_token}>'" in text


def test_the_json_form_holds_the_same(comparison: Comparison) -> None:
    fields = json.loads(json.dumps(to_json(comparison, THRESHOLDS, str), allow_nan=False))
    assert fields["prompts"][0] == {"name": "first", "token_ids": [5, 9, 200, 31]}
    assert fields["backends"]["reference"]["difference"] is None
    planted = fields["backends"]["planted"]
    assert [speed["sequences"] for speed in planted["tokens_per_second"]] == [1, 2]
    difference = planted["difference"]
    assert difference["first_layer_above_threshold"] == 1
    assert [entry["layer"] for entry in difference["layers"]] == ["embedding", 0, 1, 2]
    divergence = difference["divergences"][0]
    assert divergence["base_margin"] > 0
    assert divergence["margin"] > 0


def test_a_plot_is_svg_and_the_same_each_time(comparison: Comparison, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    first, second = tmp_path / "a.svg", tmp_path / "b.svg"
    for path in (first, second):
        check_plot(path)
        write_plot(comparison, path)
    assert b"<svg" in first.read_bytes()
    assert first.read_bytes() == second.read_bytes()


def test_a_plot_without_matplotlib_or_place_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"should end in \.svg"):
        check_plot(tmp_path / "a.png")
    with pytest.raises(ConfigError, match="folder does not exist"):
        check_plot(tmp_path / "absent" / "a.svg")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"mvllm-engine\[plots\]"):
        check_plot(tmp_path / "a.svg")
