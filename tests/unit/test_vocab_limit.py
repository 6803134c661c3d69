"""Which ids a draft model chooses among."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mvllm.backends.registry import create_backend
from mvllm.core.spec.vocab_limit import SAMPLE_TOKENS, VocabLimits, best_limit, head_share_of
from mvllm.core.step import NO_VOCAB_LIMIT
from mvllm.core.tensor import Capabilities
from mvllm.core.types import RequestId
from tests.conformance.random_models import ModelShape, random_model

VOCAB = 150_000
A, B = RequestId("a"), RequestId("b")


def ids_of(*parts: tuple[int, int, int], seed: int = 0) -> list[int]:
    """(how many, from, up to) random ids, shuffled."""
    random = np.random.default_rng(seed)
    drawn = np.concatenate([random.integers(low, high, count) for count, low, high in parts])
    random.shuffle(drawn)
    return [int(id) for id in drawn]


def test_a_text_of_frequent_tokens_needs_the_beginning_of_the_head_only() -> None:
    limit = best_limit(ids_of((500, 0, 20_000)), VOCAB, 0.38)
    assert 15_000 <= limit <= 21_000


def test_a_few_rare_tokens_are_given_up() -> None:
    assert best_limit(ids_of((500, 0, 20_000), (5, 100_000, VOCAB)), VOCAB, 0.38) <= 21_000


def test_a_text_in_the_words_of_the_far_end_needs_the_whole_head() -> None:
    assert best_limit(ids_of((300, 0, 20_000), (200, 100_000, VOCAB)), VOCAB, 0.38) > 140_000


def test_ids_without_any_order_need_the_whole_head() -> None:
    assert best_limit(ids_of((500, 0, VOCAB)), VOCAB, 0.38) > 140_000


def test_the_less_the_head_takes_the_fewer_tokens_are_given_up() -> None:
    text = ids_of((460, 0, 20_000), (52, 60_000, 70_000))
    assert best_limit(text, VOCAB, 0.6) <= 21_000
    assert 60_000 < best_limit(text, VOCAB, 0.2) <= 71_000


def test_nothing_is_left_out_of_a_small_vocabulary_or_after_no_text() -> None:
    assert best_limit([3, 4, 5], 1000, 0.5) == NO_VOCAB_LIMIT
    assert best_limit([], VOCAB, 0.5) == NO_VOCAB_LIMIT


@given(st.data(), st.integers(1, 200_000), st.floats(0.0, 1.0))
def test_limits_are_worth_more_than_the_whole_head_or_are_not_there(
    data: st.DataObject, vocab_size: int, share: float
) -> None:
    sample = data.draw(st.lists(st.integers(0, vocab_size - 1), max_size=40))
    limit = best_limit(sample, vocab_size, share)
    if limit != NO_VOCAB_LIMIT:
        assert 0 < limit < vocab_size
        part = limit / vocab_size
        inside = sum(id < limit for id in sample)
        assert ((inside + 4 * part) / (len(sample) + 4)) ** 3 > 1 - share * (1 - part)


def test_a_pass_has_the_limit_of_its_most_demanding_row() -> None:
    limits = VocabLimits(VOCAB, 0.38)
    near, far = ids_of((200, 0, 5_000)), ids_of((200, 30_000, 40_000))
    assert limits.of([(A, near), (B, far)]) == limits.of([(B, far)]) > limits.of([(A, near)])


def test_a_text_is_looked_at_again_as_it_grows() -> None:
    limits = VocabLimits(VOCAB, 0.38)
    text = ids_of((300, 0, 5_000))
    first = limits.of([(A, text)])
    assert limits.of([(A, text + [40_000] * 20)]) == first, "too few new tokens to look again"
    assert limits.of([(A, text + [40_000] * SAMPLE_TOKENS)]) > first


def test_what_is_known_of_a_row_goes_with_it() -> None:
    limits = VocabLimits(VOCAB, 0.38)
    limits.of([(A, [1] * 100)])
    assert limits.rows == {A}
    limits.release(A)
    limits.release(B)
    assert limits.rows == frozenset()


def test_without_a_share_all_ids_are_drafted_and_nothing_is_kept() -> None:
    limits = VocabLimits(VOCAB, 0.0)
    assert limits.of([(A, [1] * 100)]) == NO_VOCAB_LIMIT
    assert limits.rows == frozenset()


@pytest.mark.parametrize("tied", [True, False])
def test_the_heads_share_is_its_part_of_what_one_token_reads(tied: bool) -> None:
    _, weights = random_model(ModelShape(tied_head=tied), seed=1)
    layers = sum(w.nbytes for layer in weights.layers for w in vars(layer).values() if w is not None)
    cpu = create_backend("cpu", threads=1).capabilities
    assert head_share_of(weights, cpu) == weights.head.nbytes / (weights.head.nbytes + layers)
    assert head_share_of(weights, replace(cpu, skips_logits=False)) == 0.0
    assert not Capabilities(row_exact=True, kv_dtypes=("f32",)).skips_logits
