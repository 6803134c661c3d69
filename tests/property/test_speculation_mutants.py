"""The properties of speculation can fail: scripts with drafts, or rows with drafts, show each planted bug."""

from __future__ import annotations

import pytest
from hypothesis import find
from hypothesis.errors import NoSuchExample

from mvllm.core.batch.batcher import BatchRow
from mvllm.core.errors import MvllmError
from tests.mutants.engine import Mutant
from tests.mutants.speculation import MUTANTS, PACKING_MUTANTS
from tests.property.engine_harness import Script, run_script
from tests.property.engine_strategies import scripts
from tests.property.test_batcher import check_logit_rows, several_rows
from tests.property.test_engine_mutants import SEARCH


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name.replace(" ", "-"))
def test_the_scripts_with_drafts_catch(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant.plant(monkeypatch)

    def fails(script: Script) -> bool:
        try:
            run_script(script)
        except (AssertionError, MvllmError, LookupError, ValueError, TypeError, RuntimeError):
            return True
        return False

    try:
        find(scripts(faults=mutant.faults, drafts=True), fails, settings=SEARCH)
    except NoSuchExample:
        pytest.fail(f"no script shows the planted bug {mutant.name!r} (breaks {mutant.invariant})")


@pytest.mark.parametrize("mutant", PACKING_MUTANTS, ids=lambda mutant: mutant.name.replace(" ", "-"))
def test_the_rows_with_drafts_catch(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant.plant(monkeypatch)

    def fails(rows: tuple[BatchRow, ...]) -> bool:
        try:
            check_logit_rows(rows)
        except AssertionError:
            return True
        return False

    try:
        find(several_rows, fails, settings=SEARCH)
    except NoSuchExample:
        pytest.fail(f"no rows show the planted bug {mutant.name!r} (breaks {mutant.invariant})")
