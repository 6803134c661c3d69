"""Properties of the reference sampler, M1 to M10 of the list of invariants, J2 and K1 of the requirements."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mvllm.core.sampling import sampler
from tests.property.check_rules import check_all
from tests.property.sampler_rules import LAWS, RULES
from tests.sampling_cases import Batch, Row, arrays, batches, differences, select


@given(batch=batches())
def test_every_batch_obeys_the_rules(batch: Batch) -> None:
    """M1 to M5, M8, M10, K1: see RULES."""
    check_all(RULES, batch)


@pytest.mark.parametrize("law", LAWS)
def test_the_law_holds_at_fixed_seeds(law: str) -> None:
    """M7, J2, M0: see LAWS."""
    LAWS[law]()


@given(batch=batches(unusable=True))
def test_a_row_does_not_depend_on_its_neighbours_whatever_their_logits(batch: Batch) -> None:
    """M5, M8: also where logits are extreme, NaN or infinite."""
    RULES["M5 a row does not depend on its neighbours"](batch)


NOISE_DECIDES = {"temperature": 100.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


@given(batch=batches() | batches(**NOISE_DECIDES), seed=st.integers(0, 2**64 - 1))
def test_a_seeded_row_keeps_its_token_in_any_company(batch: Batch, seed: int) -> None:
    """M6, J6: neighbours get another seed, another place in the batch and other logits."""
    before = sampler.sample(batch.logits, batch.sampling)
    others = [dataclasses.replace(row, seed=seed, position=row.position ^ 1) for row in batch.rows[1:]]
    rows = [*others, batch.rows[0]]
    logits = np.concatenate([batch.logits[:-1] * np.float32(0.5), batch.logits[:1]])
    after = sampler.sample(logits, arrays(rows))
    width = max(0, batch.rows[0].num_logprobs)
    assert not differences(select(before, [0], width), select(after, [len(rows) - 1], width))


@given(batch=batches(unusable=True))
def test_sampling_changes_none_of_its_arguments(batch: Batch) -> None:
    """M6: nothing is remembered, so asking twice gives the same answer."""
    sampling, logits = batch.sampling, batch.logits.copy()
    first = sampler.sample(logits, sampling)
    assert logits.tobytes() == batch.logits.tobytes()
    for name, array in vars(batch.sampling).items():
        assert getattr(sampling, name).tobytes() == array.tobytes()
    assert not differences(first, sampler.sample(logits, sampling))


@pytest.mark.parametrize("changed", ["seed", "position"])
def test_another_seed_or_position_gives_other_tokens(changed: str) -> None:
    """M6: 64 draws from 1,000 equal tokens with one number changed coincide at most once or so."""
    logits = np.zeros((64, 1000), np.float32)
    rows = [Row(seed=1000 + index, position=2000 + index) for index in range(64)]
    moved = [dataclasses.replace(row, **{changed: getattr(row, changed) + 1_000_000}) for row in rows]
    left, right = (sampler.sample(logits, arrays(batch)).tokens for batch in (rows, moved))
    assert (left == right).sum() <= 2
