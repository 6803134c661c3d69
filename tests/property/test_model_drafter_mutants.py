"""The machine of the model drafter can fail: it catches each planted bug of tests/mutants/drafter.py.

So can the scripts of the whole engine with a draft model, for what depends on how the engine uses it.
"""

from __future__ import annotations

import pytest
from hypothesis import find, seed, settings
from hypothesis.errors import NoSuchExample
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from mvllm.core.errors import MvllmError
from mvllm.core.spec.model_drafter import ModelDrafter
from tests.models.drafter_machine import ModelDrafterMachine
from tests.mutants.drafter import MUTANTS
from tests.property import engine_speculation
from tests.property.engine_harness import Script, run_script
from tests.property.engine_strategies import model_draftings, scripts
from tests.property.test_engine_mutants import SEARCH
from tests.property.test_kv_mutants import HUNT
from tests.property.test_model_drafter import RoomyModelDrafterMachine

NEEDS_ROOM = (
    "fewer drafts than possible",
    "stops though sure",
)  # without room nothing says how many there should be
LONG_HUNT = settings(HUNT, derandomize=False)
SHORT_HUNT = settings(LONG_HUNT, max_examples=40)
NUM_LONG_HUNTS, NUM_HUNTS = 5, 30
NOTICES = (AssertionError, MvllmError, LookupError, pytest.fail.Exception)
"""How a planted bug shows: a check of the machine or of the product, or a table in disorder."""


def machine_with(mutant: str) -> type[RuleBasedStateMachine]:
    base: type[ModelDrafterMachine] = (
        RoomyModelDrafterMachine if mutant in NEEDS_ROOM else ModelDrafterMachine
    )

    class Machine(base):  # type: ignore[misc, valid-type]
        make_drafter: type[ModelDrafter] = MUTANTS[mutant]

    return Machine


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_machine_catches_each_planted_bug(mutant: str) -> None:
    for number in range(NUM_LONG_HUNTS):
        try:
            run_state_machine_as_test(seed(number)(machine_with(mutant)), settings=LONG_HUNT)
        except NOTICES:
            return
    pytest.fail("nothing was noticed")


# Which failure is met first is chance: another check may stand in front of the one named. So the hunt is
# repeated.
@pytest.mark.parametrize(
    ("check", "mutant"),
    [
        ("K1: ", "left-out tokens read"),
        ("K3: ", "last draft counted as computed"),
        ("K4: ", "drafts published"),
        ("K5: computes from", "last position computed again"),
        ("K5: blocks of rejected drafts", "blocks of rejected drafts kept"),
        ("K9: ", "drafts published"),
        ("L4: draft sequences", "released rows keep their blocks"),
        ("L4: the drafter knows", "released rows keep their parameters"),
        ("T11", "salt ignored"),
        ("V1: ", "more drafts than wanted"),
        ("V4: ", "every draft taken for accepted"),
        ("V4: ", "last draft counted as computed"),
        ("begun anew, or put out", "rows put out of a full pool"),
        ("should have begun anew", "never begins anew"),
        ("begins at the wrong token", "begins one token late"),
        ("over its budget", "budget ignored"),
        ("a draft is missing", "fewer drafts than possible"),
    ],
)
def test_each_property_by_itself_is_seen_to_fail(check: str, mutant: str) -> None:
    found = set()
    for number in range(NUM_HUNTS):
        try:
            run_state_machine_as_test(seed(number)(machine_with(mutant)), settings=SHORT_HUNT)
        except NOTICES as failure:
            message = str(failure).partition("\n")[0]
            if check in message:
                return
            found.add(message)
    pytest.fail(f"{check!r} did not catch it; found instead: {found}")


@pytest.mark.parametrize(
    "mutant",
    [
        "last draft counted as computed",
        "drafts published",
        "blocks of rejected drafts lost",
        "released rows keep their blocks",
        "released rows stay",
        "released rows keep their parameters",
        "full pool not seen",
        "pinned blocks counted as free",
        "left-out tokens read",
    ],
)
def test_the_scripts_with_a_draft_model_catch(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Preemptions, cancellations and ends as the engine has them; a full pool that makes drafting fail."""
    monkeypatch.setattr(engine_speculation, "ModelDrafter", MUTANTS[mutant])

    def fails(script: Script) -> bool:
        try:
            run_script(script)
        except NOTICES:
            return True
        return False

    try:
        find(scripts(drafts=True, drafter=model_draftings()), fails, settings=SEARCH)
    except NoSuchExample:
        pytest.fail(f"no script shows the planted bug {mutant!r}")
