"""The properties of core/kv can fail: each planted bug of tests/mutants/kv.py is caught by its machine."""

from __future__ import annotations

import pytest
from hypothesis import Phase, seed, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from mvllm.core.errors import MvllmError
from mvllm.core.kv.block_pool import BlockPool
from mvllm.core.kv.kv_manager import KvManager
from mvllm.core.kv.prefix_trie import PrefixTrie
from tests.models.kv_machine import KvManagerMachine, Row
from tests.mutants.kv import MANAGER_MUTANTS, POOL_MUTANTS, TRIE_MUTANTS
from tests.property.test_block_pool import BlockPoolMachine
from tests.property.test_prefix_trie import CollidingTrieMachine

# The hunt ends at the first failure, and always finds the same one. It may take more examples than the
# profile of the properties themselves, which run again and again.
HUNT = settings(
    max_examples=400,
    stateful_step_count=30,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    report_multiple_bugs=False,
)

NUM_HUNTS = 30


def assert_caught(machine: type[RuleBasedStateMachine]) -> None:
    with pytest.raises((AssertionError, MvllmError, pytest.fail.Exception)):
        run_state_machine_as_test(machine, settings=HUNT)


@pytest.mark.parametrize("mutant", POOL_MUTANTS)
def test_the_pool_machine_catches_each_planted_bug(mutant: type[BlockPool]) -> None:
    class Machine(BlockPoolMachine):
        pool_class = mutant

    assert_caught(Machine)


@pytest.mark.parametrize("mutant", TRIE_MUTANTS)
def test_the_trie_machine_catches_each_planted_bug(mutant: type[PrefixTrie]) -> None:
    class Machine(CollidingTrieMachine):
        trie_class = mutant

    assert_caught(Machine)


@pytest.mark.parametrize("mutant", MANAGER_MUTANTS)
def test_the_manager_machine_catches_each_planted_bug(mutant: str) -> None:
    class Machine(KvManagerMachine):
        make_manager: type[KvManager] = MANAGER_MUTANTS[mutant]

    assert_caught(Machine)


# Which failure is met first is chance: another check may stand in front of the one named. So the hunt is
# repeated, without the recomputation that would be first nearly always.
@pytest.mark.parametrize(
    ("name", "mutant"),
    [
        ("K1", "block hash ignores its prefix (INVARIANTS 9)"),
        ("K1", "salt ignored"),
        ("K1", "stale key on reallocation (INVARIANTS 9)"),
        ("K8", "duplicate freed, table not rewritten"),
        ("K2", "block given out twice"),
        ("K3", "a block too many"),
        ("K4", "incomplete block indexed (INVARIANTS 9)"),
        ("K5", "keeps the blocks of rejected drafts"),
        ("K7", "preempts before it checks"),
        ("K8", "duplicate kept"),
        ("K9", "release leaks open blocks"),
        ("T12", "full blocks not published"),
        ("S15", "next block key off by one"),
        ("L6", "rollback forgets the fresh blocks"),
    ],
)
def test_each_property_by_itself_is_seen_to_fail(name: str, mutant: str) -> None:
    hunt_for(name, mutant, recompute=False)


class UnlookedAt(KvManagerMachine):
    """Does not look up what was just published: what is wrong with it is left to the recomputation."""

    def _check_published(self, row: Row) -> None:
        pass


class UnlookedAtWithoutCaching(UnlookedAt):
    caching = False


@pytest.mark.parametrize(
    ("name", "mutant", "machine"),
    [
        ("P4", "full blocks not sealed", UnlookedAtWithoutCaching),
        ("T5", "roots evicted first", UnlookedAt),
        ("T6", "duplicate kept above an indexed block", UnlookedAt),
    ],
)
def test_the_recomputation_is_seen_to_fail(name: str, mutant: str, machine: type[KvManagerMachine]) -> None:
    hunt_for(name, mutant, machine, recompute=True)


def hunt_for(
    name: str, mutant: str, machine: type[KvManagerMachine] = KvManagerMachine, *, recompute: bool
) -> None:
    recomputed = recompute
    found = set()
    for number in range(NUM_HUNTS):

        @seed(number)
        class Machine(machine):  # type: ignore[misc, valid-type]
            make_manager: type[KvManager] = MANAGER_MUTANTS[mutant]
            recompute = recomputed

        try:
            run_state_machine_as_test(Machine, settings=settings(HUNT, derandomize=False))
        except (AssertionError, MvllmError, pytest.fail.Exception) as failure:
            message = str(failure).partition("\n")[0]
            if name in message:
                return
            found.add(message)
    pytest.fail(f"{name} did not catch it; found instead: {found}")
