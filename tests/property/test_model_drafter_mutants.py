"""The machine of the model drafter can fail: it catches each planted bug of tests/mutants/drafter.py."""

from __future__ import annotations

import pytest
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from mvllm.core.errors import MvllmError
from mvllm.core.spec.model_drafter import ModelDrafter
from tests.models.drafter_machine import ModelDrafterMachine
from tests.mutants.drafter import MUTANTS
from tests.property.test_kv_mutants import HUNT
from tests.property.test_model_drafter import RoomyModelDrafterMachine

NEEDS_ROOM = ("fewer drafts than possible",)  # without room nothing says how many there should be


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_machine_catches_each_planted_bug(mutant: str) -> None:
    machine: type[RuleBasedStateMachine] = (
        RoomyModelDrafterMachine if mutant in NEEDS_ROOM else ModelDrafterMachine
    )

    class Machine(machine):  # type: ignore[misc, valid-type]
        make_drafter: type[ModelDrafter] = MUTANTS[mutant]

    with pytest.raises((AssertionError, MvllmError, IndexError, pytest.fail.Exception)):
        run_state_machine_as_test(Machine, settings=HUNT)
