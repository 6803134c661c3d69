"""Random tiny models and hand-made batches for the conformance suite."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mvllm.core.load.weights import DenseWeight
from mvllm.core.model.spec import Activation, LayerSpec, ModelSpec, RopeSpec
from mvllm.core.step import ForwardBatch, SamplingArrays
from mvllm.core.tensor import KvGeometry, LayerWeights, ModelWeights


@dataclass(frozen=True)
class ModelShape:
    """What a random model may vary in."""

    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    hidden_size: int = 64
    intermediate_size: int = 96
    vocab_size: int = 70
    num_layers: int = 2
    window: int | None = None
    biases: bool = False
    qk_norm: bool = False
    tied_head: bool = False
    soft_caps: bool = False
    activation: Activation = "silu"
    format_name: str = "F32"


def random_model(shape: ModelShape, seed: int) -> tuple[ModelSpec, ModelWeights]:
    """A model whose logits have a spread of a few units."""
    draw = _Draw(np.random.default_rng(seed), shape.format_name)
    embedding = draw.matrix("embedding", shape.vocab_size, shape.hidden_size)
    weights = ModelWeights(
        embedding=embedding,
        final_norm=draw.vector("final_norm", shape.hidden_size, around=1),
        layers=tuple(_layer(shape, draw, index) for index in range(shape.num_layers)),
        head=embedding if shape.tied_head else draw.matrix("head", shape.vocab_size, shape.hidden_size),
    )
    return _spec(shape), weights


class _Draw:
    """Random tensors, one after the other."""

    def __init__(self, rng: np.random.Generator, format_name: str) -> None:
        self._rng = rng
        self._format_name = format_name

    def matrix(self, name: str, rows: int, inputs: int) -> DenseWeight:
        values = self._rng.standard_normal((rows, inputs), np.float32) / np.float32(np.sqrt(inputs))
        return _dense(name, values, self._format_name)

    def vector(self, name: str, size: int, around: float = 0.0) -> DenseWeight:
        return _dense(name, around + 0.1 * self._rng.standard_normal(size, np.float32), "F32")


def _layer(shape: ModelShape, draw: _Draw, index: int) -> LayerWeights:
    hidden, inner = shape.hidden_size, shape.intermediate_size
    q_width, kv_width = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    norms = {
        slot: draw.vector(f"{index}.{slot}", hidden, around=1) for slot in ("attention_norm", "mlp_norm")
    }
    sizes = {
        **{"q": (q_width, hidden), "k": (kv_width, hidden), "v": (kv_width, hidden), "o": (hidden, q_width)},
        **{"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)},
    }
    matrices = {slot: draw.matrix(f"{index}.{slot}", *size) for slot, size in sizes.items()}
    optional: dict[str, DenseWeight] = {}
    if shape.biases:
        for slot, (rows, _) in sizes.items():
            optional[f"{slot}_bias"] = draw.vector(f"{index}.{slot}_bias", rows)
    if shape.qk_norm:
        for slot in ("q_norm", "k_norm"):
            optional[slot] = draw.vector(f"{index}.{slot}", shape.head_dim, around=1)
    return LayerWeights(**norms, **matrices, **optional)


def _spec(shape: ModelShape) -> ModelSpec:
    frequencies = 10_000.0 ** (-np.arange(0, shape.head_dim, 2) / shape.head_dim)
    windows = [shape.window if index % 2 == 0 else None for index in range(shape.num_layers)]
    return ModelSpec(
        architecture="random",
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        context_length=512,
        norm_eps=1e-5,
        ropes=(RopeSpec(tuple(float(f) for f in frequencies)),),
        layers=tuple(LayerSpec(window=window) for window in windows),
        attention_scale=float(shape.head_dim**-0.5),
        activation=shape.activation,
        attention_soft_cap=4.0 if shape.soft_caps else None,
        final_soft_cap=6.0 if shape.soft_caps else None,
        tied_head=shape.tied_head,
    )


def _dense(name: str, values: NDArray[np.float32], format_name: str) -> DenseWeight:
    values = values.astype(np.float32)
    if format_name == "F16":
        return DenseWeight(name, "F16", values.astype(np.float16))
    if format_name == "BF16":
        return DenseWeight(name, "BF16", (values.view(np.uint32) >> 16).astype(np.uint16))
    return DenseWeight(name, "F32", values)


def geometry(*, num_blocks: int = 64, block_size: int = 4, dtype: str = "f32") -> KvGeometry:
    return KvGeometry(
        num_blocks=num_blocks,
        block_size=block_size,
        max_context=num_blocks * block_size,
        max_batch_tokens=128,
        max_batch_rows=16,
        max_logit_rows=128,
        dtype=dtype,
    )


@dataclass(frozen=True)
class Row:
    """Compute positions [start, stop) of a sequence; logits of the last `num_logits` of them."""

    tokens: Sequence[int]  # the whole sequence so far
    start: int
    stop: int
    table: Sequence[int]  # block ids that cover [0, stop)
    num_logits: int = 1


def make_batch(rows: Sequence[Row], block_size: int) -> ForwardBatch:
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    starts = [0]
    logit_rows: list[int] = []
    for row in rows:
        for position in range(row.start, row.stop):
            tokens.append(row.tokens[position])
            positions.append(position)
            slots.append(row.table[position // block_size] * block_size + position % block_size)
        starts.append(len(tokens))
        logit_rows.extend(range(len(tokens) - row.num_logits, len(tokens)))
    widest = max(len(row.table) for row in rows)
    tables = np.full((len(rows), widest), -1, np.int32)
    for index, row in enumerate(rows):
        tables[index, : len(row.table)] = row.table
    return ForwardBatch(
        tokens=np.array(tokens, np.int32),
        positions=np.array(positions, np.int32),
        slots=np.array(slots, np.int32),
        row_starts=np.array(starts, np.int32),
        context_lens=np.array([row.stop for row in rows], np.int32),
        block_tables=tables,
        logit_rows=np.array(logit_rows, np.int32),
        sampling=greedy_sampling(len(logit_rows)),
    )


def greedy_sampling(count: int) -> SamplingArrays:
    empty = np.zeros(0, np.int32)
    return SamplingArrays(
        temperature=np.zeros(count, np.float32),
        top_k=np.zeros(count, np.int32),
        top_p=np.ones(count, np.float32),
        min_p=np.zeros(count, np.float32),
        repetition_penalty=np.ones(count, np.float32),
        presence_penalty=np.zeros(count, np.float32),
        frequency_penalty=np.zeros(count, np.float32),
        seed=np.zeros(count, np.uint64),
        position=np.zeros(count, np.int32),
        num_logprobs=np.full(count, -1, np.int32),
        target=np.full(count, -1, np.int32),
        count_offsets=np.zeros(count + 1, np.int32),
        count_tokens=empty,
        prompt_counts=empty,
        output_counts=empty,
        bias_offsets=np.zeros(count + 1, np.int32),
        bias_tokens=empty,
        bias_values=np.zeros(0, np.float32),
    )
