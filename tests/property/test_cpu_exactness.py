"""X1 on random tiny models: a position's logits are the same bits in every arrangement."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from mvllm.backends.cpu.attention import PART
from mvllm.backends.cpu.backend import CpuBackend
from mvllm.core.load.quantized import QUANT_FORMATS
from mvllm.core.load.weights import QuantizedWeight
from mvllm.core.model.spec import ModelSpec
from mvllm.core.tensor import Model, ModelWeights, Weight
from tests.conformance.random_models import ModelShape, Row, geometry, make_batch, random_model
from tests.model_files import random_blocks

Floats = NDArray[np.float32]

VOCAB_SIZE = 70
POOL_TOKENS = 256  # in any block size
MAX_DRAFTS = 4  # beside each row of a step
MODELS = [
    (ModelShape(tied_head=True), "Q4_0"),
    (ModelShape(num_heads=6, num_kv_heads=2, head_dim=32, biases=True, qk_norm=True), "Q4_1"),
    (ModelShape(num_heads=3, num_kv_heads=3, head_dim=64, window=5), "Q8_0"),
    (ModelShape(num_heads=4, num_kv_heads=1, head_dim=24, window=20, activation="gelu_tanh"), "Q5_0"),
    (ModelShape(hidden_size=256, intermediate_size=256, num_heads=4, head_dim=64), "Q4_K"),
    (ModelShape(hidden_size=256, intermediate_size=256, num_heads=8, head_dim=32, soft_caps=True), "Q6_K"),
    (ModelShape(num_heads=5, num_kv_heads=1, biases=True), "F32"),
    (ModelShape(format_name="F16", soft_caps=True), "F16"),
    (ModelShape(format_name="BF16", hidden_size=80, window=3), "BF16"),
]


@functools.cache
def model_of(index: int) -> tuple[ModelSpec, ModelWeights]:
    """A random model, its matrices replaced by random blocks of its quantized format."""
    shape, format_name = MODELS[index]
    spec, weights = random_model(shape, seed=index)
    if format_name not in QUANT_FORMATS:
        return spec, weights
    rng = np.random.default_rng(index)

    def quantized(weight: Weight) -> Weight:
        quant_format = QUANT_FORMATS[format_name]
        return QuantizedWeight(weight.name, quant_format, random_blocks(quant_format, weight.shape, rng))

    layers = tuple(
        replace(
            layer,
            q=quantized(layer.q),
            k=quantized(layer.k),
            v=quantized(layer.v),
            gate=quantized(layer.gate),
            up=quantized(layer.up),
            down=quantized(layer.down),
        )
        for layer in weights.layers
    )
    embedding = quantized(weights.embedding)
    head = embedding if shape.tied_head else quantized(weights.head)
    return spec, replace(weights, layers=layers, embedding=embedding, head=head)


def load(index: int, *, threads: int, block_size: int, dtype: str, pool_tokens: int = POOL_TOKENS) -> Model:
    sizes = replace(geometry(block_size=block_size, dtype=dtype), num_blocks=pool_tokens // block_size)
    return CpuBackend(threads=threads).load(*model_of(index), replace(sizes, max_context=pool_tokens))


def tokens_of(index: int, length: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(100 + index).integers(0, VOCAB_SIZE, length)]


@functools.cache
def logits_alone(index: int, sequence: int, length: int, dtype: str) -> Floats:
    """Logits of every position: one thread, one whole sequence at a time, blocks of 16."""
    with closing(load(index, threads=1, block_size=16, dtype=dtype)) as model:
        row = Row(tokens_of(sequence, length), 0, length, range(POOL_TOKENS // 16), num_logits=length)
        return model.logits(make_batch([row], 16))


@dataclass(frozen=True)
class Arrangement:
    """How the positions of some sequences are computed. A step gives tokens per sequence, and how many drafts
    follow them that turn out wrong: computed in the same forward, then written over."""

    model: int
    dtype: str
    threads: int
    block_size: int
    lengths: tuple[int, ...]
    steps: tuple[tuple[int, ...], ...]
    drafts: tuple[tuple[int, ...], ...]
    seed: int


@st.composite
def arrangements(draw: Callable[..., Any]) -> Arrangement:
    lengths = tuple(draw(st.lists(st.integers(1, 24), min_size=1, max_size=4)))
    left = list(lengths)
    steps, drafts = [], []
    most_drafts = draw(st.sampled_from([0, MAX_DRAFTS]))
    while any(left):
        counts = tuple(draw(st.integers(0, min(n, draw(st.sampled_from([1, 3, 24]))))) for n in left)
        if not any(counts):
            counts = tuple(min(n, 1) for n in left)
        left = [n - count for n, count in zip(left, counts, strict=True)]
        steps.append(counts)
        drafts.append(tuple(draw(st.integers(0, most_drafts)) for _ in lengths))
    return Arrangement(
        model=draw(st.integers(0, len(MODELS) - 1)),
        dtype=draw(st.sampled_from(["f32", "f16"])),
        threads=draw(st.sampled_from([1, 2, 2, 3, 4])),
        block_size=draw(st.sampled_from([1, 4, 8, 16, 32])),
        lengths=lengths,
        steps=tuple(steps),
        drafts=tuple(drafts),
        seed=draw(st.integers(0, 99)),
    )


def computed(arrangement: Arrangement) -> list[Floats]:
    """Logits of every position of every sequence, computed step by step as arranged."""
    order = np.random.default_rng(arrangement.seed)
    block_size = arrangement.block_size
    free = list(order.permutation(POOL_TOKENS // block_size))
    tables: list[Sequence[int]] = []
    for length in arrangement.lengths:
        needed = -(-(length + MAX_DRAFTS) // block_size)
        tables.append([int(block) for block in free[:needed]])
        free = free[needed:]
    done = [0] * len(tables)
    logits: list[list[Floats]] = [[] for _ in tables]
    with closing(
        load(
            arrangement.model,
            threads=arrangement.threads,
            block_size=block_size,
            dtype=arrangement.dtype,
        )
    ) as model:
        for counts, drafts in zip(arrangement.steps, arrangement.drafts, strict=True):
            members = [int(i) for i in order.permutation(len(counts)) if counts[i]]
            rows = []
            for i in members:
                end = done[i] + counts[i]
                wrong = [int(token) for token in order.integers(0, VOCAB_SIZE, drafts[i])]
                tokens = [*tokens_of(i, arrangement.lengths[i])[:end], *wrong]
                rows.append(Row(tokens, done[i], len(tokens), tables[i], num_logits=len(tokens) - done[i]))
            found = model.logits(make_batch(rows, block_size))
            for i in members:
                logits[i].append(found[: counts[i]])
                found = found[counts[i] + drafts[i] :]
                done[i] += counts[i]
    return [np.concatenate(parts) for parts in logits]


@given(arrangements())
def test_x1_logits_do_not_depend_on_the_arrangement(arrangement: Arrangement) -> None:
    for sequence, logits in enumerate(computed(arrangement)):
        length = arrangement.lengths[sequence]
        alone = logits_alone(arrangement.model, sequence, length, arrangement.dtype)
        assert np.array_equal(logits.view(np.int32), alone.view(np.int32))


LONG = 3 * PART + 70
LONG_CONTEXT_MODELS = [0, 3, 5]  # grouped queries, a window, soft caps


def long_logits(index: int, dtype: str, *, threads: int, block_size: int, chunk: int, alone: bool) -> Floats:
    """Logits of the last 8 positions of a long sequence, decoded one by one after a prompt in chunks."""
    tokens, company = tokens_of(0, LONG), tokens_of(1, 8)
    own_blocks = -(-LONG // block_size)
    other_blocks = -(-len(company) // block_size)
    pool_tokens = (own_blocks + other_blocks) * block_size
    order = [int(block) for block in np.random.default_rng(chunk).permutation(own_blocks + other_blocks)]
    table, other_table = order[:own_blocks], order[own_blocks:]
    loaded = load(index, threads=threads, block_size=block_size, dtype=dtype, pool_tokens=pool_tokens)
    found = []
    with closing(loaded) as model:
        for start in range(0, LONG - 8, chunk):
            stop = min(start + chunk, LONG - 8)
            model.logits(make_batch([Row(tokens, start, stop, table)], block_size))
        for step in range(8):
            rows = [Row(tokens, LONG - 8 + step, LONG - 7 + step, table)]
            if not alone:
                rows.append(Row(company, step, step + 1, other_table))
            found.append(model.logits(make_batch(rows, block_size))[0])
    return np.array(found)


@functools.cache
def long_logits_alone(index: int, dtype: str) -> Floats:
    return long_logits(index, dtype, threads=1, block_size=16, chunk=128, alone=True)


@pytest.mark.parametrize("index", LONG_CONTEXT_MODELS)
@pytest.mark.parametrize(
    ("threads", "block_size", "chunk", "dtype"), [(2, 32, 100, "f32"), (3, 16, 128, "f16"), (4, 8, 61, "f32")]
)
@pytest.mark.parametrize("alone", [True, False])
def test_x1_long_contexts_that_threads_share_keep_their_bits(
    index: int, threads: int, block_size: int, chunk: int, dtype: str, alone: bool
) -> None:
    logits = long_logits(index, dtype, threads=threads, block_size=block_size, chunk=chunk, alone=alone)
    assert np.array_equal(logits.view(np.int32), long_logits_alone(index, dtype).view(np.int32))
