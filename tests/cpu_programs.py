"""Programs of the cpu backend for tests: recorded from models without data, and an oracle for barriers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mvllm.backends.cpu import record as graph
from mvllm.backends.cpu.isa import selected
from mvllm.backends.cpu.plan import Buffer
from mvllm.backends.cpu.program import Array, Instruction, Kind, Program, lower, with_sampling
from mvllm.backends.cpu.record import Recorder, Value, sensitive_weights
from mvllm.backends.cpu.tables import Domain, Regime
from mvllm.core.model.decoder import forward
from mvllm.core.model.spec import LayerSpec, ModelSpec, RopeSpec
from mvllm.core.tensor import LayerWeights, ModelWeights

NUM_THREADS = 3
NUM_COLUMNS = 6  # every matrix is this wide to the oracle, which only looks at shares


@dataclass(frozen=True, eq=False)
class NoData:
    """A weight of which only the shape and the format are known."""

    name: str
    shape: tuple[int, ...]
    format_name: str = "F32"
    nbytes: int = 0

    def to_float32(self) -> NDArray[np.float32]:
        raise AssertionError("a program is planned without looking at weights")


@dataclass(frozen=True)
class Outline:
    """What decides the form of a program."""

    num_layers: int = 2
    format_name: str = "Q4_0"
    biases: bool = False
    qk_norm: bool = False
    post_norms: bool = False
    tied_head: bool = False
    embedding_scale: float = 1.0
    final_soft_cap: float | None = None
    taps: bool = False


def program_of(outline: Outline) -> Program:
    """The whole program, sampling included."""
    spec, weights = _model(outline)
    recorder = Recorder(sensitive_weights(weights), selected().wide)
    taps: list[Value] = []
    logits = forward(recorder, spec, weights, taps.append)
    return with_sampling(lower(recorder.nodes, logits, taps if outline.taps else ()))


def _model(outline: Outline) -> tuple[ModelSpec, ModelWeights]:
    hidden, inner, vocab, head_dim, heads, kv_heads = 64, 96, 128, 16, 4, 2

    def matrix(name: str, rows: int, inputs: int) -> NoData:
        return NoData(name, (rows, inputs), outline.format_name)

    def bias(name: str, size: int) -> NoData | None:
        return NoData(name, (size,)) if outline.biases else None

    def gain(name: str, size: int, wanted: bool) -> NoData | None:
        return NoData(name, (size,)) if wanted else None

    layer = LayerWeights(
        attention_norm=NoData("attention_norm", (hidden,)),
        q=matrix("q", heads * head_dim, hidden),
        k=matrix("k", kv_heads * head_dim, hidden),
        v=matrix("v", kv_heads * head_dim, hidden),
        o=matrix("o", hidden, heads * head_dim),
        mlp_norm=NoData("mlp_norm", (hidden,)),
        gate=matrix("gate", inner, hidden),
        up=matrix("up", inner, hidden),
        down=matrix("down", hidden, inner),
        q_bias=bias("q_bias", heads * head_dim),
        down_bias=bias("down_bias", hidden),
        q_norm=gain("q_norm", head_dim, outline.qk_norm),
        k_norm=gain("k_norm", head_dim, outline.qk_norm),
        post_attention_norm=gain("post_attention_norm", hidden, outline.post_norms),
        post_mlp_norm=gain("post_mlp_norm", hidden, outline.post_norms),
    )
    embedding = matrix("embedding", vocab, hidden)
    weights = ModelWeights(
        embedding=embedding,
        layers=(layer,) * outline.num_layers,
        final_norm=NoData("final_norm", (hidden,)),
        head=embedding if outline.tied_head else matrix("head", vocab, hidden),
    )
    spec = ModelSpec(
        architecture="outline",
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=inner,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        context_length=64,
        norm_eps=1e-5,
        ropes=(RopeSpec((1.0,) * (head_dim // 2)),),
        layers=(LayerSpec(),) * outline.num_layers,
        attention_scale=0.25,
        final_soft_cap=outline.final_soft_cap,
        embedding_scale=outline.embedding_scale,
    )
    return spec, weights


# --- who touches what -----------------------------------------------------------------------------------

Cell = tuple[object, int, int]  # memory, row, column


@dataclass(frozen=True)
class Touched:
    """What one thread may read and write in one instruction."""

    reads: frozenset[Cell]
    writes: frozenset[Cell]


def touched_cells(
    step: Instruction, program: Program, buffers: dict[Array, Buffer], regime: Regime, thread: int
) -> Touched:
    """Written from the meaning of each kind of instruction, independently of the planner's rules."""
    rows = _row_count(step.domain, regime)
    replicated = rows == 1 and step.output in program.private
    all_columns = range(NUM_COLUMNS)
    own_rows = range(rows) if replicated else _share(rows, thread)
    own_columns = _share(NUM_COLUMNS, thread)

    def cells(array: Array | None, chosen: Iterable[int], columns: Iterable[int]) -> set[Cell]:
        if array is None:
            return set()
        shift = thread if array in program.private and _row_count(array.domain, regime) == 1 else 0
        return {(buffers[array], row + shift, column) for row in chosen for column in columns}

    reads: set[Cell] = set()
    writes: set[Cell] = set()
    match step.kind:
        case Kind.LINEAR:
            reads |= cells(step.input, range(rows), all_columns)
            reads |= cells(step.other, range(rows), own_columns)
            writes |= cells(step.output, range(rows), own_columns)
        case Kind.ATTEND:  # any thread may take any item
            reads |= cells(step.input, range(rows), all_columns)
            writes |= cells(step.output, range(rows), all_columns)
            reads |= {(_layer(step), row, 0) for row in range(rows)}
        case Kind.STORE_KV:
            reads |= cells(step.input, own_rows, all_columns) | cells(step.other, own_rows, all_columns)
            writes |= {(_layer(step), row, 0) for row in own_rows}
        case Kind.TAKE:
            reads |= cells(step.input, range(_row_count(Domain.TOKENS, regime)), all_columns)
            writes |= cells(step.output, own_rows, all_columns)
        case _:
            reads |= cells(step.input, own_rows, all_columns) | cells(step.other, own_rows, all_columns)
            writes |= cells(step.output, own_rows, all_columns)
    return Touched(frozenset(reads), frozenset(writes))


def races(
    program: Program, buffers: dict[Array, Buffer], barriers: list[frozenset[Regime]], regime: Regime
) -> list[tuple[int, int]]:
    """Pairs of instructions between which no barrier stands although one thread may disturb another."""
    found = []
    since: list[tuple[int, list[Touched]]] = []
    for index, step in enumerate(program.instructions):
        if regime in barriers[index]:
            since = []
        now = [touched_cells(step, program, buffers, regime, thread) for thread in range(NUM_THREADS)]
        since.append((index, now))
        for earlier, before in since:
            if any(
                _disturbs(before[a], now[b]) for a in range(NUM_THREADS) for b in range(NUM_THREADS) if a != b
            ):
                # Any thread may take any item of one attention; it writes only that item's part.
                if earlier == index and step.kind is Kind.ATTEND:
                    continue
                found.append((earlier, index))
    return found


def _disturbs(x: Touched, y: Touched) -> bool:
    return bool(x.writes & (y.reads | y.writes)) or bool(x.reads & y.writes)


def _row_count(domain: Domain, regime: Regime) -> int:
    match regime:
        case Regime.ONE_TOKEN:
            return 1
        case Regime.ONE_LOGIT_ROW:
            return 4 if domain is Domain.TOKENS else 1
        case Regime.MANY:
            return 4 if domain is Domain.TOKENS else 3


def _share(count: int, thread: int) -> range:
    return range(count * thread // NUM_THREADS, count * (thread + 1) // NUM_THREADS)


def _layer(step: Instruction) -> object:
    assert isinstance(step.operation, graph.Attend)
    return ("layer", step.operation.layer)
