"""The whole-engine property can fail: every planted bug is found by the scripts of test_engine."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, find, settings
from hypothesis.errors import NoSuchExample

from mvllm.core.errors import MvllmError
from tests.mutants.engine import MUTANTS, Mutant
from tests.property.engine_harness import Script, run_script
from tests.property.engine_strategies import scripts

SEARCH = settings(
    max_examples=600,
    phases=[Phase.generate],
    database=None,
    derandomize=True,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name.replace(" ", "-"))
def test_the_whole_engine_property_catches(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant.plant(monkeypatch)

    def fails(script: Script) -> bool:
        try:
            run_script(script)
        except (AssertionError, MvllmError, LookupError, ValueError):
            return True
        return False

    try:
        find(scripts(faults=mutant.faults, drafts=False), fails, settings=SEARCH)
    except NoSuchExample:
        pytest.fail(f"no script shows the planted bug {mutant.name!r} (breaks {mutant.invariant})")
