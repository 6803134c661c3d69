"""What a model drafter computes and when, on small examples."""

from __future__ import annotations

import itertools
import math
import operator
from dataclasses import replace

import pytest

from mvllm.backends.fake.model import logprobs_of
from mvllm.backends.fake.tags import tag_of
from mvllm.core.batch.row_sampling import RowSampling
from mvllm.core.batch.sampling_row import SamplingRow
from mvllm.core.errors import ConfigError, InvariantViolation
from mvllm.core.request import Request, SamplingParams
from mvllm.core.spec.drafter import DraftRow
from mvllm.core.spec.model_drafter import ModelDrafter, ModelDrafterConfig, catch_up_tokens_for
from mvllm.core.types import RequestId
from tests.models.drafter_machine import RecordingModel

A, B = RequestId("a"), RequestId("b")
VOCAB = 50


def make(
    *,
    blocks: int = 40,
    block_size: int = 4,
    context: int = 100,
    budget: int = 16,
    first_tokens: int | None = None,
) -> tuple[ModelDrafter, RecordingModel]:
    config = ModelDrafterConfig(
        blocks, block_size, context, 4, VOCAB, catch_up_tokens=budget, first_tokens=first_tokens
    )
    model = RecordingModel(VOCAB, blocks, block_size)
    return ModelDrafter(model, config), model


def row(id: RequestId, tokens: list[int], max_drafts: int = 3) -> DraftRow:
    request = Request(id, tuple(tokens), SamplingParams(temperature=0), 0, max_tokens=9)
    return DraftRow(id, tokens, max_drafts, RowSampling(SamplingRow.of(request), None, len(tokens)), "")


def passes(model: RecordingModel) -> list[list[int]]:
    """Tokens of each row in each pass since the last call."""
    sizes = [(batch.row_starts[1:] - batch.row_starts[:-1]).tolist() for batch in model.batches]
    model.batches.clear()
    return sizes


def test_one_pass_for_each_draft_and_none_for_the_last() -> None:
    drafter, model = make()
    [drafts] = drafter.propose([row(A, [1, 2, 3])])
    assert len(drafts) == 3
    assert passes(model) == [[3], [1], [1]]


def test_it_stops_as_soon_as_its_drafts_are_less_likely_than_they_have_to_be() -> None:
    tokens = [1, 2, 3]
    [drafts] = make()[0].propose([row(A, tokens, 4)])
    chances = [
        math.exp(logprobs_of(tag_of([*tokens, *drafts[:index]]), VOCAB)[token])
        for index, token in enumerate(drafts)
    ]
    for place, joint in enumerate(itertools.accumulate(chances[:-1], operator.mul)):
        for least, expected in ((joint, place + 2), (joint * 1.001, place + 1)):
            drafter, model = make()
            asking = replace(row(A, tokens, 4), least_confidence=least)
            [found] = drafter.propose([asking])
            assert found == drafts[:expected]
            wanted = [batch.sampling.num_logprobs.tolist() for batch in model.batches]
            assert wanted == [[0], [0], [0], [-1]][: len(found)], "of the fourth nobody asks how likely it is"


def test_after_a_round_in_which_all_was_right_two_tokens_are_caught_up_with() -> None:
    drafter, model = make()
    tokens = [1, 2, 3]
    [drafts] = drafter.propose([row(A, tokens)])
    passes(model)
    drafter.propose([row(A, [*tokens, *drafts, 7])])
    assert passes(model) == [[2], [1], [1]]


def test_after_a_wrong_draft_only_what_differs_is_computed() -> None:
    drafter, model = make()
    tokens = [1, 2, 3]
    [drafts] = drafter.propose([row(A, tokens)])
    passes(model)
    drafter.propose([row(A, [*tokens, drafts[0], (drafts[1] + 1) % VOCAB])])
    assert passes(model) == [[1], [1], [1]]


def test_a_long_prompt_is_caught_up_with_in_parts_and_drafted_for_then() -> None:
    drafter, model = make(budget=16)
    tokens = list(range(40))
    for _ in range(2):
        assert drafter.limit(A, 40) == 0
        assert drafter.propose([row(A, tokens, 0)]) == [()]
    assert drafter.limit(A, 40) > 3
    [drafts] = drafter.propose([row(A, tokens)])
    assert len(drafts) == 3
    assert passes(model) == [[16], [16], [8], [1], [1]]


def test_a_long_prompt_begins_with_its_last_tokens() -> None:
    drafter, model = make(first_tokens=6)
    tokens = list(range(40))
    assert drafter.num_behind(A, 40) == 6
    [drafts] = drafter.propose([row(A, tokens)])
    assert drafter.propose([row(B, tokens[-6:])]) == [drafts], "what came before is unknown to the model"
    assert passes(model) == [[6], [1], [1], [6], [1], [1]]
    assert drafter.num_behind(A, 40 + 3) == 40 + 3 - (34 + 6 + 2), "two of three drafts were computed"


def test_a_row_that_is_told_to_reads_what_it_has_left_out() -> None:
    drafter, model = make(first_tokens=6, budget=16)
    tokens = list(range(40))
    drafter.propose([row(A, tokens)])
    assert drafter.num_unread(A, 40) == 34
    passes(model)
    assert drafter.propose([replace(row(A, tokens), reads_all=True)]) == [()]
    assert drafter.num_unread(A, 40) == 0
    assert drafter.num_behind(A, 40) == 24
    tokens.append(1)  # the target goes on meanwhile
    assert drafter.propose([row(A, tokens, 0)]) == [()]
    [drafts] = drafter.propose([row(A, tokens)])
    assert passes(model) == [[16], [16], [9], [1], [1]]
    whole, _ = make(first_tokens=None, budget=100)
    assert whole.propose([row(A, tokens)]) == [drafts]


def test_a_row_that_may_not_draft_now_is_not_begun_anew() -> None:
    drafter, _ = make(first_tokens=6)
    drafter.propose([row(A, list(range(40)))])
    drafter.propose([replace(row(A, list(range(41)), 0), reads_all=True)])
    assert drafter.num_unread(A, 41) == 34


def test_a_reading_row_whose_room_is_taken_begins_anew_with_its_last_tokens() -> None:
    drafter, _ = make(first_tokens=6, budget=36, blocks=14)
    tokens = list(range(45))
    drafter.propose([row(A, tokens)])
    drafter.propose([replace(row(A, tokens), reads_all=True)])
    assert drafter.num_behind(A, 45) == 9
    drafter.propose([row(B, list(range(6)), 3)])
    drafter.propose([row(B, list(range(19)), 0)])
    drafter.propose([row(RequestId("c"), [7] * 6, 3)])
    tokens += range(12)  # more than is left
    drafts = [drafter.propose([row(A, tokens, 1)])[0] for _ in range(2)]
    assert [len(one) for one in drafts] == [0, 1]
    assert drafter.num_unread(A, len(tokens)) == 0, "there is still no room"


def test_a_row_that_would_not_fit_as_a_whole_has_nothing_unread() -> None:
    for changes in ({"blocks": 10}, {"context": 40}):
        drafter, _ = make(first_tokens=6, **changes)
        drafter.propose([row(A, list(range(36)))])
        assert drafter.num_unread(A, 36) == 0
    drafter, _ = make(first_tokens=6)
    assert drafter.num_unread(A, 36) == 0, "it has not begun"
    drafter.propose([row(A, list(range(5)))])
    assert drafter.num_unread(A, 5) == 0


def test_a_row_that_has_fallen_far_behind_begins_anew() -> None:
    drafter, model = make(first_tokens=6)
    tokens = list(range(20))
    drafter.propose([row(A, tokens, 1)])
    passes(model)
    assert drafter.num_behind(A, 26) == 6
    drafter.propose([row(A, [*tokens, *range(30, 37)], 1)])
    assert passes(model) == [[6]]


def test_a_sequence_beyond_the_context_of_the_draft_model_goes_on_with_its_last_half() -> None:
    drafter, model = make(context=10)
    assert drafter.limit(A, 11) == 10 - 5 + 1
    assert len(drafter.propose([row(A, list(range(11)), 2)])[0]) == 2
    assert passes(model) == [[5], [1]]


def test_a_short_rest_after_a_cached_prefix_is_computed_whole() -> None:
    drafter, model = make(first_tokens=20)
    tokens = list(range(16))
    drafter.propose([row(A, tokens, 1)])
    drafter.propose([row(A, [*tokens, 40], 1)])
    passes(model)
    drafter.propose([row(B, [*tokens, *range(20, 30)], 1)])
    assert passes(model) == [[10]], "26 tokens, 16 of them cached"


def test_rows_with_little_to_catch_up_go_before_long_prompts() -> None:
    drafter, model = make(budget=16)
    drafter.propose([row(A, [1, 2, 3], 1)])
    passes(model)
    drafts = drafter.propose([row(B, list(range(30))), row(A, [1, 2, 3, 4], 2)])
    assert [len(one) for one in drafts] == [0, 2]
    assert passes(model) == [[1, 15], [1]]


def test_rows_that_want_nothing_cost_nothing() -> None:
    drafter, model = make()
    assert drafter.propose([row(A, [1, 2, 3], 0)]) == [()]
    assert passes(model) == []


def test_a_shared_prompt_is_computed_once() -> None:
    drafter, model = make()
    tokens = list(range(9))
    assert [len(one) for one in drafter.propose([row(A, tokens), row(B, tokens)])] == [3, 0]
    assert [len(one) for one in drafter.propose([row(A, [*tokens, 9]), row(B, tokens)])][1] == 3
    computed = sum(sum(sizes) for sizes in passes(model))
    assert computed == (9 + 2) + (1 + 2) + (1 + 2), "B computes the ninth token alone"


def test_a_full_pool_means_no_drafts_for_the_row_that_comes_later() -> None:
    drafter, _ = make(blocks=3)
    assert [len(one) for one in drafter.propose([row(A, list(range(9))), row(B, list(range(20, 29)))])] == [
        3,
        0,
    ]
    drafter.release(A)
    assert [len(one) for one in drafter.propose([row(B, list(range(20, 29)))])] == [3], "idle blocks go"


def test_the_pool_and_the_context_limit_the_drafts() -> None:
    drafter, _ = make(blocks=3, context=10)
    assert drafter.limit(A, 8) == 3  # positions 8 and 9 are free; the last draft needs none
    assert [len(one) for one in drafter.propose([row(A, list(range(8)), 3)])] == [3]
    assert drafter.limit(A, 10) == 1


def test_a_token_that_the_draft_model_lacks_ends_drafting_for_its_row() -> None:
    drafter, model = make()
    drafter.propose([row(A, [1, 2], 1)])
    passes(model)
    assert drafter.propose([row(A, [1, 2, VOCAB])]) == [()]
    assert drafter.limit(A, 3) == 0
    assert passes(model) == []
    drafter.release(A)
    assert len(drafter.propose([row(A, [1, 2])])[0]) == 3


def test_rows_that_are_not_live_any_more_are_found() -> None:
    drafter, _ = make()
    drafter.propose([row(A, [1, 2])])
    drafter.check_integrity(frozenset({A, B}))
    with pytest.raises(InvariantViolation, match="L4"):
        drafter.check_integrity(frozenset({B}))


def test_the_budget_serves_every_row_after_a_verification() -> None:
    assert catch_up_tokens_for(4) == 256
    assert catch_up_tokens_for(200) == 400
    with pytest.raises(ConfigError, match="8 at least"):
        ModelDrafterConfig(10, 4, 100, max_num_seqs=4, vocab_size=9, catch_up_tokens=7)


def test_parameters_of_rows_that_are_not_live_any_more_are_found() -> None:
    drafter, _ = make()
    drafter.propose([row(A, [1, 2])])
    drafter._cache.release(A)
    with pytest.raises(InvariantViolation, match="L4: the drafter knows"):
        drafter.check_integrity(frozenset())
    drafter.release(A)
    drafter.check_integrity(frozenset())
