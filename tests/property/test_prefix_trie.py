"""PrefixTrie against a dict of whole prefixes (INVARIANTS T1 to T11)."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from mvllm.core.errors import InvariantViolation
from mvllm.core.kv.prefix_trie import PrefixTrie
from mvllm.core.types import BlockId
from tests.models.kv_snapshots import trie_snapshot
from tests.models.trie_model import TrieModel

SALTS = ("", "tenant")
NUM_BLOCKS = 10


class CollidingToken(int):
    """A token whose hash is that of every other."""

    def __hash__(self) -> int:
        return 0


class PrefixTrieMachine(RuleBasedStateMachine):
    """Rows publish, pin and leave paths; the trie answers and evicts as the model does."""

    trie_class: type[PrefixTrie] = PrefixTrie
    token_class: type[int] = int
    sound = False  # no check has failed, so that the drain at the end means something

    @initialize(block_size=st.integers(2, 3))
    def create(self, block_size: int) -> None:
        self.block_size = block_size
        self.model = TrieModel(block_size)
        self.trie = self.trie_class(block_size, self.model.is_idle)
        self.free = list(range(NUM_BLOCKS - 1, -1, -1))
        self.readers: list[list[int]] = []  # the path of each row

    def _pin(self, path: Sequence[int]) -> None:
        self.model.pin(path)
        self.readers.append(list(path))

    def _unpin(self, path: list[int]) -> None:
        self.trie.touch([BlockId(block_id) for block_id in self.model.unpin(path)])

    def _tokens(self, bits: list[int]) -> list[int]:
        return [self.token_class(bit) for bit in bits]

    @rule(bits=st.lists(st.integers(0, 1), max_size=9), salt=st.sampled_from(SALTS), stay=st.booleans())
    def publish(self, bits: list[int], salt: str, stay: bool) -> None:
        """T4: present blocks stay and come back as the canonical ones; then the whole path is found."""
        self.sound = False
        self.evict(max(0, 5 - len(self.free)))
        tokens = self._tokens(bits)
        path: list[int] = []
        prefixes = self.model.prefixes(tokens, salt, len(tokens))[: len(self.free)]
        for prefix in prefixes:
            block_id = self.free.pop()
            key = (BlockId(path[-1]) if path else salt, prefix[1][-self.block_size :])
            canonical = self.trie.insert(key, BlockId(block_id))
            assert canonical == self.model.insert(prefix, block_id)
            assert self.trie.insert(key, BlockId(block_id)) == canonical, "T4: not idempotent"
            if canonical != block_id:
                self.free.append(block_id)
            path.append(canonical)
        self._pin(path)
        covered = len(path) * self.block_size
        assert self.trie.lookup(tokens, salt, covered) == path
        assert self.trie.is_path([BlockId(block_id) for block_id in path], salt)
        if not stay:
            self._unpin(self.readers.pop())

    @rule(
        bits=st.lists(st.integers(0, 1), max_size=10),
        salt=st.sampled_from(SALTS),
        slack=st.integers(0, 3),
        pin=st.booleans(),
    )
    def look_up(self, bits: list[int], salt: str, slack: int, pin: bool) -> None:
        """T1, T2: the longest path within the limit. T3: nothing changes."""
        self.sound = False
        tokens = self._tokens(bits)
        limit = len(tokens) - slack
        before = trie_snapshot(self.trie)
        path = self.trie.lookup(tokens, salt, limit)
        assert trie_snapshot(self.trie) == before, "T3"
        assert path == self.model.lookup(tokens, salt, limit)
        for length in range(len(path)):
            assert self.trie.lookup(tokens, salt, limit, path[:length]) == path
        if pin:
            self._pin(path)

    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        if self.readers:
            self._unpin(self.readers.pop(data.draw(st.integers(0, len(self.readers) - 1))))

    @rule(count=st.integers(0, 4))
    def evict(self, count: int) -> None:
        """T7: which nodes and in what order. T8: gone at once."""
        self.sound = False
        expected = min(count, len(self.model.idle_blocks()))
        evicted = self.trie.evict(count)
        assert len(evicted) == expected, "T7, T6: evictable means idle"
        assert evicted == self.model.evict(count)
        assert not any(block_id in self.trie for block_id in evicted)
        self.free.extend(evicted)

    @rule(bits=st.lists(st.integers(0, 1), max_size=4))
    def illegal_insert(self, bits: list[int]) -> None:
        """Raises and changes nothing: unknown parent, wrong size, block under two keys."""
        self.sound = False
        before = trie_snapshot(self.trie)
        tokens = tuple(self._tokens(bits))
        unknown_parent = (BlockId(NUM_BLOCKS), tokens)
        with pytest.raises(InvariantViolation, match="not indexed"):
            self.trie.insert(unknown_parent, BlockId(NUM_BLOCKS + 1))
        if len(tokens) != self.block_size:
            with pytest.raises(InvariantViolation, match="tokens in a block"):
                self.trie.insert(("", tokens), BlockId(NUM_BLOCKS + 1))
        for block_id in list(self.model.blocks.values())[:1]:
            other_key = ("a third salt", (self.token_class(0),) * self.block_size)
            with pytest.raises(InvariantViolation, match="already indexed under another key"):
                self.trie.insert(other_key, BlockId(block_id))
        with pytest.raises(InvariantViolation, match="not all of the blocks"):
            self.trie.touch([BlockId(NUM_BLOCKS)])
        assert trie_snapshot(self.trie) == before

    @invariant()
    def always(self) -> None:
        """T2, T5, and every idle leaf is queued for eviction."""
        self.sound = False
        self.trie.check_integrity()
        assert len(self.trie) == len(self.model.blocks)
        for (salt, tokens), block_id in self.model.blocks.items():
            assert self.trie.lookup(tokens, salt, len(tokens))[-1:] == [block_id], "T2"
        self.sound = True

    def teardown(self) -> None:
        """T8: when all readers have left, each block comes back exactly once."""
        if not self.sound:
            return
        for path in self.readers:
            self._unpin(path)
        self.free.extend(self.trie.evict(NUM_BLOCKS))
        assert sorted(self.free) == list(range(NUM_BLOCKS)), "T8"
        assert len(self.trie) == 0


class CollidingTrieMachine(PrefixTrieMachine):
    """T9: the same with tokens whose hashes are all equal."""

    token_class = CollidingToken


TestPrefixTrieEqualsTheModelT1ToT8 = PrefixTrieMachine.TestCase
TestPrefixTrieEqualsTheModelWhenAllHashesCollideT9 = CollidingTrieMachine.TestCase


def chain(trie: PrefixTrie, blocks: list[tuple[int, ...]], salt: str, first_id: int) -> list[BlockId]:
    """Index a path of new blocks with ids from `first_id` on."""
    path: list[BlockId] = []
    for offset, tokens in enumerate(blocks):
        path.append(trie.insert((path[-1] if path else salt, tokens), BlockId(first_id + offset)))
    return path


def all_idle(block_id: BlockId) -> bool:
    return True


@pytest.mark.parametrize(
    "other",
    [(257, 2), (65_537, 2), (1, 258), (1, 65_538), (2, 1), (1 + (1 << 32), 2), (1, 1 + (1 << 61))],
)
def test_tokens_that_differ_in_high_bits_or_order_never_match_t9(other: tuple[int, ...]) -> None:
    trie = PrefixTrie(2, all_idle)
    chain(trie, [(1, 2)], "", 0)
    assert trie.lookup([1, 2], "", 2) == [0]
    assert trie.lookup(other, "", 2) == []


def test_equal_tokens_after_unequal_prefixes_are_different_nodes_t1() -> None:
    trie = PrefixTrie(2, all_idle)
    chain(trie, [(1, 1), (5, 5)], "", 0)
    chain(trie, [(2, 2), (5, 5)], "", 2)
    assert trie.lookup([1, 1, 5, 5], "", 4) == [0, 1]
    assert trie.lookup([2, 2, 5, 5], "", 4) == [2, 3]
    assert trie.lookup([5, 5], "", 2) == []


@given(st.lists(st.text("ab ", max_size=2), min_size=2, max_size=4, unique=True))
def test_only_equal_salts_share_t11(salts: list[str]) -> None:
    trie = PrefixTrie(2, all_idle)
    for number, salt in enumerate(salts[:-1]):
        chain(trie, [(0, 0)], salt, number)
    for number, salt in enumerate(salts[:-1]):
        assert trie.lookup([0, 0], salt, 2) == [number]
    assert trie.lookup([0, 0], salts[-1], 2) == []


Script = list[tuple[list[int], int]]


def run_script(script: Script) -> list[BlockId]:
    """Publish and leave each path, evict some; returns all evictions in order."""
    trie = PrefixTrie(2, all_idle)
    free = [BlockId(block_id) for block_id in range(40)]
    evictions: list[BlockId] = []
    for bits, num_evicted in script:
        path: list[BlockId] = []
        for end in range(2, len(bits) + 1, 2):
            block_id = trie.insert((path[-1] if path else "", tuple(bits[end - 2 : end])), free[-1])
            if block_id == free[-1]:
                free.pop()
            path.append(block_id)
        trie.touch(path)
        evicted = trie.evict(num_evicted)
        free.extend(evicted)
        evictions.extend(evicted)
    return evictions


@given(st.lists(st.tuples(st.lists(st.integers(0, 1), max_size=8), st.integers(0, 3)), max_size=8))
def test_the_same_program_evicts_the_same_blocks_in_the_same_order_t10(script: Script) -> None:
    assert run_script(script) == run_script(script)


def test_the_least_recently_used_leaf_goes_first_and_its_parent_after_it_t7() -> None:
    trie = PrefixTrie(2, all_idle)
    old = chain(trie, [(0, 0), (0, 1)], "", 0)
    new = chain(trie, [(1, 0), (1, 1)], "", 2)
    trie.touch(old)
    trie.touch(new)
    trie.touch(old[:1])  # used again, its child not
    assert trie.evict(4) == [1, 3, 2, 0]


def test_a_deep_chain_is_indexed_found_and_evicted_without_recursion() -> None:
    trie = PrefixTrie(1, all_idle)
    depth = 20_000
    path = chain(trie, [(0,)] * depth, "", 0)
    trie.touch(path)
    assert trie.lookup([0] * depth, "", depth) == path
    trie.check_integrity()
    assert trie.evict(depth) == path[::-1]


def test_the_eviction_queue_stays_in_proportion_to_the_trie() -> None:
    trie = PrefixTrie(2, all_idle)
    path = chain(trie, [(0, 0)], "", 0)
    for _ in range(1_000):
        trie.touch(path)
    assert len(trie._leaves) <= 2 * len(trie) + 64
    assert trie.evict(2) == path
