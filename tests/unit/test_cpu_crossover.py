"""The thresholds between the forms of a product: how they are chosen and kept."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mvllm.backends.cpu import linear
from mvllm.backends.cpu.crossover import MEASURED_TOKENS, NEVER, Thresholds, choose, measure, shape_name
from mvllm.backends.cpu.isa import selected
from mvllm.backends.cpu.layout import NARROW, WIDE, ActivationLayout
from mvllm.backends.cpu.pack import PackedMatrix
from tests.cpu_matrices import packed, random_weight

_MACHINE = "a processor"


def _matrix(rows: int = 512, format_name: str = "Q4_0") -> PackedMatrix:
    return packed(random_weight(format_name, rows, 256, np.random.default_rng(0)), selected())


def _no_measurement(matrix: PackedMatrix, records: ActivationLayout) -> int:
    raise AssertionError("measured again")


@pytest.mark.parametrize(
    ("panels", "expected"),
    [
        ({2: 1.0, 3: 1.0, 4: 1.0}, 2),
        ({2: 9.0, 3: 2.0, 4: 1.0}, 3),
        ({2: 1.0, 3: 9.0, 4: 1.0}, 4),
        ({2: 1.0, 3: 1.0, 4: 9.0}, NEVER),
        ({2: 1.0, 3: 1.0, 4: 2.1}, 2),
    ],
)
def test_the_threshold_is_where_the_forms_lose_least(panels: dict[int, float], expected: int) -> None:
    assert choose({2: 2.0, 3: 2.0, 4: 2.0}, panels) == expected


@pytest.mark.parametrize("format_name", ["Q4_0", "F16"])
def test_a_measured_threshold_is_one_of_those_tried(format_name: str) -> None:
    assert measure(_matrix(format_name=format_name), NARROW) in (*MEASURED_TOKENS, NEVER)


def test_a_shape_is_measured_once_and_kept_for_the_next_process(tmp_path: Path) -> None:
    path = tmp_path / "crossover.json"
    matrix = _matrix()
    measured: list[str] = []

    def counting(matrix: PackedMatrix, records: ActivationLayout) -> int:
        measured.append(shape_name(matrix, records))
        return 6 if records is NARROW else NEVER

    first = Thresholds(path, _MACHINE, counting)
    assert [first.panels_from(matrix, records) for records in (NARROW, WIDE, NARROW)] == [6, NEVER, 6]
    assert measured == ["Q4_0 narrow 512x256", "Q4_0 wide 512x256"]
    first.save()
    assert [file.name for file in tmp_path.iterdir()] == ["crossover.json"]
    second = Thresholds(path, _MACHINE, _no_measurement)
    assert [second.panels_from(matrix, records) for records in (NARROW, WIDE)] == [6, NEVER]


def test_what_another_process_has_kept_meanwhile_stays(tmp_path: Path) -> None:
    path = tmp_path / "crossover.json"
    ours, theirs = (Thresholds(path, _MACHINE, lambda matrix, records: 4) for _ in range(2))
    ours.panels_from(_matrix(512), NARROW)
    theirs.panels_from(_matrix(520), NARROW)
    theirs.save()
    ours.save()
    kept = Thresholds(path, _MACHINE, _no_measurement)
    assert kept.panels_from(_matrix(512), NARROW) == kept.panels_from(_matrix(520), NARROW) == 4


def test_small_matrices_are_not_measured() -> None:
    thresholds = Thresholds(None, _MACHINE, _no_measurement)
    assert thresholds.panels_from(_matrix(rows=16), NARROW) == linear.default_panels_from("Q4_0")


def test_thresholds_of_another_machine_count_for_nothing(tmp_path: Path) -> None:
    path = tmp_path / "crossover.json"
    for machine in (_MACHINE, "another"):
        thresholds = Thresholds(path, machine, lambda matrix, records: 8)
        thresholds.panels_from(_matrix(), NARROW)
        thresholds.save()
    with pytest.raises(AssertionError, match="measured again"):
        Thresholds(path, _MACHINE, _no_measurement).panels_from(_matrix(), NARROW)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)
_KEPT = st.dictionaries(st.just("Q4_0 narrow 512x256"), _JSON)
_CONTENTS = st.one_of(
    st.binary(),
    st.fixed_dictionaries({"machine": st.just(_MACHINE), "panels_from": _JSON | _KEPT}).map(
        lambda content: json.dumps(content).encode()
    ),
    st.just(b"[" * 100_000),
)


@given(_CONTENTS)
def test_a_spoilt_file_is_measured_anew_and_replaced(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    path = tmp_path_factory.mktemp("thresholds") / "crossover.json"
    path.write_bytes(content)
    matrix = _matrix()
    thresholds = Thresholds(path, _MACHINE, lambda matrix, records: 3)
    value = thresholds.panels_from(matrix, NARROW)
    assert type(value) is int and 2 <= value <= NEVER
    thresholds.save()
    if value == 3:
        assert json.loads(path.read_bytes())["panels_from"]["Q4_0 narrow 512x256"] == 3


def test_a_file_too_large_to_be_ours_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "crossover.json"
    kept = {"machine": _MACHINE, "panels_from": {"Q4_0 narrow 512x256": 7}}
    path.write_text(json.dumps(kept) + " " * (1 << 20))
    assert Thresholds(path, _MACHINE, lambda matrix, records: 3).panels_from(_matrix(), NARROW) == 3


def test_a_folder_that_takes_no_file_costs_only_the_measurement(tmp_path: Path) -> None:
    thresholds = Thresholds(tmp_path / "missing" / "crossover.json", _MACHINE, lambda matrix, records: 3)
    assert thresholds.panels_from(_matrix(), NARROW) == 3
    thresholds.save()
    assert not any(tmp_path.iterdir())
