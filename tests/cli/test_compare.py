"""`mvllm compare` as a user meets it."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner, Result

from mvllm.backends.reference.backend import ReferenceBackend
from mvllm.cli import compare as module
from mvllm.cli.main import cli
from mvllm.core.errors import BackendUnavailable
from mvllm.core.tensor import Backend
from tests.planted import PlantedBackend
from tests.tiny_models import write_tiny_hf

QUICK = ("--max-tokens", "4")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_tiny_hf(folder, layers=3, seed=2)
    return folder


@pytest.fixture(autouse=True)
def logger_as_before() -> Iterator[None]:
    """The command lets log messages out on a standard error that ends with the test."""
    logger = logging.getLogger("mvllm")
    handlers, level = list(logger.handlers), logger.level
    yield
    logger.handlers[:] = handlers
    logger.setLevel(level)


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend "planted" computes layer 1 wrongly by a hundredth; "absent" is not installed."""

    def create(name: str, **options: object) -> Backend:
        if name == "absent":
            raise BackendUnavailable(name, "pip install 'mvllm-engine[absent]'")
        return ReferenceBackend() if name == "reference" else PlantedBackend(ReferenceBackend(), 1, 1e-2)

    monkeypatch.setattr(module, "create_backend", create)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["compare", *map(str, arguments)])


def answer(result: Result) -> dict[str, object]:
    assert result.exit_code == 0, result.output
    fields: dict[str, object] = json.loads(result.stdout)
    return fields


@pytest.mark.usefixtures("planted")
def test_the_json_form_names_the_layer_with_the_planted_error(model: Path) -> None:
    options = ("--backends", "planted,reference", "--json", "--layer-threshold", "1e-3")
    fields = answer(run(model, *options, *QUICK))
    assert fields["base"] == "reference"
    assert len(fields["prompts"]) == 4  # type: ignore[arg-type]
    backends = fields["backends"]
    assert list(backends) == ["planted", "reference"]  # type: ignore[call-overload]
    difference = backends["planted"]["difference"]  # type: ignore[index]
    assert difference["first_layer_above_threshold"] == 1


@pytest.mark.usefixtures("planted")
def test_the_table_stands_on_standard_output_and_progress_does_not(model: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot = tmp_path / "plot.svg"
    result = run(model, "--backends", "reference,planted", "--plot", plot, *QUICK)
    assert result.exit_code == 0, result.output
    assert "Difference from reference" in result.stdout
    assert "running on" not in result.stdout
    assert "running on planted" in result.stderr
    assert ElementTree.parse(plot).getroot().tag.endswith("svg")


def test_the_cpu_backend_is_compared_with_the_reference(model: Path) -> None:
    fields = answer(run(model, "--json", "--kv-dtype", "f32", "--threads", "2", *QUICK))
    difference = fields["backends"]["cpu"]["difference"]  # type: ignore[index]
    assert difference["greedy_agreement"] == 1
    assert difference["logprob_error"]["largest"] < 1e-3
    assert difference["first_layer_above_threshold"] is None


def test_prompts_come_from_a_file_in_every_form(model: Path, tmp_path: Path) -> None:
    lines = [
        {"prompt": "the other engine", "id": "a"},
        {"prompt_token_ids": [5, 6, 7], "id": "b"},
        {"messages": [{"role": "user", "content": "hi"}]},
    ]
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    fields = answer(run(model, "--backends", "reference", "--prompts", file, "--json", *QUICK))
    prompts = fields["prompts"]
    assert [prompt["name"] for prompt in prompts] == ["the other engine", "b", "2"]  # type: ignore[attr-defined]
    assert prompts[1]["token_ids"] == [5, 6, 7]  # type: ignore[index]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "x", "temperature": 1}', "takes no temperature"),
        ('{"prompt_token_ids": [999999]}', "outside the vocabulary"),
        ('{"prompt_token_ids": []}', "has no tokens"),
    ],
)
def test_prompts_that_can_not_be_compared_are_a_usage_error(
    model: Path, tmp_path: Path, line: str, message: str
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(line)
    result = run(model, "--backends", "reference", "--prompts", file)
    assert result.exit_code == 2
    assert message in result.stderr


@pytest.mark.usefixtures("planted")
def test_a_missing_backend_is_known_before_anything_is_loaded(tmp_path: Path) -> None:
    result = run(tmp_path / "no-model", "--backends", "reference,absent")
    assert result.exit_code == 1
    assert "mvllm-engine[absent]" in result.stderr


def test_wrong_names_and_places_are_usage_errors(model: Path, tmp_path: Path) -> None:
    for arguments, message in (
        (("--backends", "gpu"), "unknown backend 'gpu'"),
        (("--backends", "reference,reference"), "each only once"),
        (("--backends", " , "), "at least one backend"),
        (("--backends", "reference", "--plot", tmp_path / "a.png"), "should end in .svg"),
        (("--backends", "reference", "--layer-threshold", "inf"), "thresholds are positive numbers"),
        (("--backends", "reference", "--scale-threshold", "nan"), "thresholds are positive numbers"),
    ):
        result = run(model, *arguments)
        assert result.exit_code == 2
        assert message in result.stderr
    result = run(model, "--backends", "reference", "--kv-dtype", "bf16")
    assert result.exit_code == 1
    assert "no backend could run this model" in result.stderr
    assert "keeps KV as f32" in result.stdout
