"""Drafting through `LLM`: the same tokens with every drafter, and settings that contradict each other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from mvllm import LLM, ConfigError, SamplingParams
from mvllm.backends.reference.backend import ReferenceBackend
from mvllm.backends.registry import create_backend
from mvllm.core.engine.statistics import SpeculationTotals
from mvllm.core.load.checkpoint import load_checkpoint
from mvllm.core.model.spec import ModelSpec
from mvllm.core.request import RequestOutput
from mvllm.core.spec.draft_length import FixedLength
from mvllm.core.spec.drafter import Drafter, DraftRow
from mvllm.core.spec.lookup_first import LookupFirst
from mvllm.core.spec.model_drafter import ModelDrafter
from mvllm.core.spec.vocab_limit import head_share_of
from mvllm.core.tensor import KvGeometry, Model, ModelWeights
from mvllm.speculation import DrafterName
from tests.tiny_models import write_tiny_gguf

SETTINGS: dict[str, Any] = {"max_model_len": 96, "block_size": 4, "check_integrity": True}
PROMPTS = ["the fox the fox the", " the other engine", "it's they'll"]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=1, max_tokens=24, min_tokens=4, logprobs=2),
    SamplingParams(temperature=1.0, seed=2, max_tokens=24, frequency_penalty=1.0, ignore_eos=True),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    write_tiny_gguf(path, architecture="llama", tensor_type="F16", seed=4)
    return path


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another model with the same vocabulary."""
    path = tmp_path_factory.mktemp("model") / "other.gguf"
    write_tiny_gguf(path, architecture="qwen2", tensor_type="F16", seed=5)
    return path


class LastTokenAgain(Drafter):
    """Drafts what stands there already."""

    name = "echo"

    def __init__(self) -> None:
        self.closed = False

    def propose(self, rows: Sequence[DraftRow]) -> list[tuple[int, ...]]:
        return [(row.token_ids[-1],) * row.max_drafts for row in rows]

    def close(self) -> None:
        self.closed = True


def answers(model: Path, **drafting: Any) -> tuple[list[RequestOutput], SpeculationTotals | None]:
    with LLM(model, backend="reference", **SETTINGS, **drafting) as llm:
        outputs = llm.generate(PROMPTS, PARAMS)
        assert (
            sum(len(output.outputs[0].token_ids) for output in outputs) == llm.engine.totals.num_output_tokens
        )
        return outputs, llm.engine.totals.speculation


@pytest.fixture(scope="module")
def expected(model: Path) -> list[RequestOutput]:
    outputs, speculation = answers(model)
    assert speculation is None
    return outputs


def check_equal(outputs: list[RequestOutput], expected: list[RequestOutput]) -> None:
    """Tokens, texts, reasons and logprobs."""
    assert [output.outputs for output in outputs] == [output.outputs for output in expected]


@pytest.mark.parametrize("policy", ["fixed", "acceptance-rate", "accepted-length", "adaptive"])
def test_ngram_drafts_change_no_answer(model: Path, expected: list[RequestOutput], policy: str) -> None:
    outputs, _ = answers(model, drafter="ngram", draft_policy=policy)
    check_equal(outputs, expected)


@pytest.mark.parametrize("length", [1, 3, 6])
def test_a_model_that_drafts_for_itself_is_always_right(
    model: Path, expected: list[RequestOutput], length: int
) -> None:
    outputs, totals = answers(
        model, drafter="model", draft_model=model, draft_policy="fixed", draft_length=length
    )
    check_equal(outputs, expected)
    assert totals is not None and totals.num_proposed > 0
    assert totals.acceptance_rate == 1.0
    assert totals.num_accepted + totals.num_own_tokens == sum(
        len(output.outputs[0].token_ids) for output in outputs
    )


@pytest.mark.parametrize("drafter", [None, "model", "ngram+model"])
def test_another_model_changes_no_answer(
    model: Path, other: Path, expected: list[RequestOutput], drafter: DrafterName | None
) -> None:
    outputs, totals = answers(model, drafter=drafter, draft_model=other, draft_policy="fixed", draft_length=3)
    check_equal(outputs, expected)
    assert totals is not None and totals.num_proposed > totals.num_accepted


def drafter_of(llm: LLM) -> Drafter:
    assert llm.engine._speculator is not None
    return llm.engine._speculator._drafter


@pytest.mark.parametrize(
    ("drafter", "expected"), [(None, LookupFirst), ("ngram+model", LookupFirst), ("model", ModelDrafter)]
)
def test_drafts_are_looked_up_before_the_draft_model_is_asked(
    model: Path, drafter: DrafterName | None, expected: type[Drafter]
) -> None:
    with LLM(model, drafter=drafter, draft_model=model) as llm:
        assert type(drafter_of(llm)) is expected


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_a_draft_model_may_leave_out_ids_where_that_saves_time(model: Path, backend: str) -> None:
    weights = load_checkpoint(model).weights
    with LLM(model, drafter="model", draft_model=model, draft_backend=backend) as llm:
        drafter = drafter_of(llm)
        assert isinstance(drafter, ModelDrafter)
        head_share = drafter._config.head_share
    assert head_share == head_share_of(weights, create_backend(backend).capabilities)
    assert (head_share > 0.0) == (backend == "cpu")


def test_a_small_draft_pool_and_context_change_no_answer(
    model: Path, other: Path, expected: list[RequestOutput]
) -> None:
    spec = load_checkpoint(other).spec
    outputs, _ = answers(
        model,
        draft_model=other,
        draft_policy="fixed",
        draft_kv_cache_bytes=spec.kv_values_per_token * 4 * 4 * 8,  # f32, 8 blocks of 4
    )
    check_equal(outputs, expected)


def test_a_drafter_of_ones_own_is_used_and_closed(model: Path, expected: list[RequestOutput]) -> None:
    drafter = LastTokenAgain()
    outputs, totals = answers(model, drafter=drafter, draft_policy=FixedLength(2))
    check_equal(outputs, expected)
    assert totals is not None and totals.num_proposed > 0
    assert drafter.closed


@pytest.mark.parametrize(
    ("drafting", "named"),
    [
        ({"draft_length": 3}, "draft_length needs a drafter"),
        ({"draft_policy": "fixed"}, "draft_policy needs a drafter"),
        ({"draft_backend": "cpu"}, "draft_backend needs a drafter"),
        ({"drafter": "ngram", "draft_backend": "cpu"}, "draft_backend needs draft_model"),
        ({"drafter": "ngram", "draft_kv_cache_bytes": 5}, "draft_kv_cache_bytes needs draft_model"),
        ({"drafter": "ngram", "draft_model": "x"}, "not both"),
        ({"drafter": LastTokenAgain(), "draft_model": "x"}, "not both"),
        ({"drafter": "model"}, "needs draft_model"),
        ({"drafter": "ngram+model"}, "needs draft_model"),
        ({"drafter": "oracle"}, "'oracle'"),
        ({"drafter": "ngram", "draft_policy": "bold"}, "'bold'"),
        ({"drafter": "ngram", "draft_length": 0}, "draft_length must be"),
        ({"drafter": "ngram", "draft_length": 2.5}, "draft_length must be"),
        ({"drafter": "ngram", "draft_length": 2, "draft_policy": FixedLength(3)}, "policy object"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(
    model: Path, drafting: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        LLM(model, backend="reference", **drafting)


class CountingBackend(ReferenceBackend):
    """Counts loads; the one numbered `fails` finds no memory."""

    def __init__(self, fails: int = 0) -> None:
        self.num_loads = 0
        self.fails = fails
        self.models: list[Model] = []

    def load(self, spec: ModelSpec, weights: ModelWeights, geometry: KvGeometry) -> Model:
        self.num_loads += 1
        if self.num_loads == self.fails:
            raise MemoryError("no room")
        self.models.append(super().load(spec, weights, geometry))
        return self.models[-1]


def test_a_draft_model_of_another_vocabulary_is_refused_before_anything_is_loaded(
    model: Path, tmp_path: Path
) -> None:
    path = tmp_path / "smaller.gguf"
    write_tiny_gguf(path, architecture="llama", tensor_type="F16", seed=6)
    swapped = path.read_bytes().replace(b"<|im_start|>", b"<|im_begin|>")
    path.write_bytes(swapped)
    backend = CountingBackend()
    with pytest.raises(ConfigError, match=r"does not fit: token \d+ is"):
        LLM(model, backend=backend, draft_model=path)
    assert backend.num_loads == 0


def test_too_little_memory_for_the_draft_model_is_said_and_releases_the_target(model: Path) -> None:
    backend = CountingBackend(fails=2)
    with pytest.raises(ConfigError, match=r"draft model.*draft_kv_cache_bytes"):
        LLM(model, backend=backend, draft_model=model)
    assert backend.num_loads == 2


def test_a_draft_pool_without_a_block_is_refused(model: Path) -> None:
    with pytest.raises(ConfigError, match="draft model: kv_cache_bytes"):
        LLM(model, backend="reference", draft_model=model, draft_kv_cache_bytes=1)
