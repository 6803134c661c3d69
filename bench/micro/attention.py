"""The cpu backend's attention by itself: KV bytes read per second, and their share of the read bandwidth.

    python -m mvllm.bench.micro.attention

A step runs nothing but the attention of a model's layers, with a barrier before each. Steps take turns on
copies of the sequences that together exceed the caches, and with plain reads of memory; medians. Prefill also
counts floating-point operations: 4 per component, query head and position seen.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import click
import numpy as np
from numpy.typing import NDArray

from mvllm.backends.cpu import record as graph
from mvllm.backends.cpu.inputs import StepInputs
from mvllm.backends.cpu.kv_pool import KvPool, layout_for
from mvllm.backends.cpu.link import Linker
from mvllm.backends.cpu.operations import program_runner
from mvllm.backends.cpu.program import Array, Instruction, Kind, Program
from mvllm.backends.cpu.tables import Domain
from mvllm.backends.cpu.team import Team
from mvllm.backends.cpu.threads import default_threads
from mvllm.backends.cpu.weights import PackedWeights
from mvllm.bench.micro.read_bandwidth import ReadBandwidth
from mvllm.core.batch.sampling_arrays import SamplingPacker
from mvllm.core.model.spec import LayerSpec, ModelSpec, RopeSpec
from mvllm.core.step import ForwardBatch
from mvllm.core.tensor import KvGeometry
from mvllm.core.types import ceil_div

_BLOCK_SIZE = 16
_CACHES_BYTES = 128 << 20  # more than the caches of the machines at hand
_POOL_BYTES = 1 << 30  # at most; of a larger case only the first layers are run
_VALUE_BYTES = {"f32": 4, "f16": 2}


@dataclass(frozen=True)
class Heads:
    """The attention of a model."""

    name: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int


MODELS = (
    Heads("smollm2-135m", 30, 9, 3, 64),
    Heads("qwen2.5-1.5b", 28, 12, 2, 128),
    Heads("gemma3-270m", 18, 4, 1, 256),
)


@dataclass(frozen=True)
class Load:
    """`rows` sequences that each compute the last `chunk` of `context` positions."""

    rows: int
    chunk: int
    context: int

    @property
    def pairs(self) -> int:
        """Query positions times the positions they see, of one head."""
        before = self.context - self.chunk
        return self.rows * (self.chunk * before + self.chunk * (self.chunk + 1) // 2)


LOADS = (
    *(Load(rows, 1, context) for rows in (1, 8) for context in (128, 512, 2048, 8192)),
    Load(1, 256, 256),
    Load(1, 256, 2304),
)


@dataclass(frozen=True)
class Result:
    """Medians of one case."""

    seconds: float  # of one layer
    kv_bytes: int  # of one layer, each byte counted once
    flops: int  # of one layer
    bandwidth: float  # bytes per second read in between

    @property
    def kv_rate(self) -> float:
        return self.kv_bytes / self.seconds


class AttentionAlone:
    """A program of nothing but attention, over a pool of random keys and values. Owns all of it."""

    def __init__(self, heads: Heads, load: Load, dtype: str, threads: int) -> None:
        layer_bytes = load.rows * load.context * 2 * heads.kv_heads * heads.head_dim * _VALUE_BYTES[dtype]
        self.layers = min(heads.layers, max(1, _POOL_BYTES // layer_bytes))
        self.kv_bytes = layer_bytes
        copies = ceil_div(_CACHES_BYTES, layer_bytes * self.layers)
        blocks = ceil_div(load.context, _BLOCK_SIZE) * load.rows
        spec = _spec(heads, self.layers)
        geometry = KvGeometry(
            num_blocks=blocks * copies,
            block_size=_BLOCK_SIZE,
            max_context=load.context,
            max_batch_tokens=load.rows * load.chunk,
            max_batch_rows=load.rows,
            max_logit_rows=1,
            dtype=dtype,
        )
        rng = np.random.default_rng(0)
        self._pool = KvPool(layout_for(spec, geometry))
        block = rng.standard_normal((1, self.layers, 2, _BLOCK_SIZE, heads.kv_heads, heads.head_dim))
        for number in range(geometry.num_blocks):
            self._pool.write([number], block.astype(np.float32))
        order = rng.permutation(geometry.num_blocks).astype(np.int32)
        self._batches = [_batch(load, table) for table in order.reshape(copies, load.rows, -1)]
        queries, program = _program(heads, self.layers)
        with ThreadPoolExecutor() as packers:  # of nothing: the program has no weights
            linker = Linker(spec, geometry, PackedWeights(packers), self._pool, threads)
        self._linked = linker.link(program)
        self._num_tokens = load.rows * load.chunk
        rows = self._linked.rows(queries, self._num_tokens)
        rows[...] = rng.standard_normal(rows.shape)
        self._inputs = StepInputs(spec, geometry, threads)
        self._inputs.set_program(self._linked, len(program.instructions))
        self._team = Team(threads, program_runner())
        self._steps = 0

    @property
    def output(self) -> NDArray[np.float32]:
        """What the last layer of the last step wrote, f32[tokens, heads * head_dim]; a view."""
        return self._linked.rows(self._linked.program.logits, self._num_tokens)

    def step(self) -> float:
        """Seconds of one step."""
        self._inputs.set_batch(self._batches[self._steps % len(self._batches)])
        self._steps += 1
        start = time.perf_counter()
        self._team.run(self._inputs.address)
        return time.perf_counter() - start

    def close(self) -> None:
        self._team.close()


def _spec(heads: Heads, layers: int) -> ModelSpec:
    return ModelSpec(
        architecture="attention",
        vocab_size=1,
        hidden_size=heads.heads * heads.head_dim,
        intermediate_size=1,
        num_heads=heads.heads,
        num_kv_heads=heads.kv_heads,
        head_dim=heads.head_dim,
        context_length=1 << 20,
        norm_eps=1e-5,
        ropes=(RopeSpec((1.0,) * (heads.head_dim // 2)),),
        layers=(LayerSpec(),) * layers,
        attention_scale=heads.head_dim**-0.5,
    )


def _program(heads: Heads, layers: int) -> tuple[Array, Program]:
    """The queries, and a program in which every layer attends with them."""
    width = heads.heads * heads.head_dim
    queries, out = Array(0, width, Domain.TOKENS), Array(1, width, Domain.TOKENS)
    # Something has to write the queries, or they get no memory.
    keep = Instruction(Kind.SCALE, Domain.TOKENS, queries, output=queries, operation=graph.Scale(1.0))
    attends = [
        Instruction(
            Kind.ATTEND,
            Domain.TOKENS,
            queries,
            output=out,
            operation=graph.Attend(layer, None, heads.head_dim**-0.5, None),
        )
        for layer in range(layers)
    ]
    return queries, Program((keep, *attends), out, (queries,), frozenset())


def _batch(load: Load, tables: NDArray[np.int32]) -> ForwardBatch:
    positions = np.arange(load.context - load.chunk, load.context, dtype=np.int32)
    slots = tables[:, positions // _BLOCK_SIZE] * _BLOCK_SIZE + positions % _BLOCK_SIZE
    return ForwardBatch(
        tokens=np.zeros(load.rows * load.chunk, np.int32),
        positions=np.tile(positions, load.rows),
        slots=slots.reshape(-1).astype(np.int32),
        row_starts=np.arange(load.rows + 1, dtype=np.int32) * load.chunk,
        context_lens=np.full(load.rows, load.context, np.int32),
        block_tables=tables,
        logit_rows=np.zeros(0, np.int32),
        sampling=SamplingPacker().pack([]),
    )


def measure(
    heads: Heads, load: Load, dtype: str, threads: int, bandwidth: ReadBandwidth, seconds: float
) -> Result:
    """Run a case for about `seconds` in all, reading memory in between."""
    alone = AttentionAlone(heads, load, dtype, threads)
    alone.step()
    times: list[float] = []
    rates: list[float] = []
    start = time.perf_counter()
    while len(times) < 3 or time.perf_counter() - start < seconds:
        rates.append(bandwidth.measure())
        times += [alone.step() for _ in range(3)]
    alone.close()
    flops = 4 * heads.head_dim * heads.heads * load.pairs
    step = statistics.median(times)
    return Result(step / alone.layers, alone.kv_bytes, flops, statistics.median(rates))


def _line(heads: Heads, load: Load, dtype: str, result: Result) -> str:
    case = f"{heads.name:<14}{dtype:<5}{load.rows:>4} x {load.chunk:<4} of {load.context:<6}"
    share = result.kv_rate / result.bandwidth
    return (
        f"{case}{1e6 * result.seconds:>10.1f} us{1e-9 * result.kv_rate:>8.1f} GB/s{share:>7.0%} of "
        f"{1e-9 * result.bandwidth:.1f}{1e-9 * result.flops / result.seconds:>8.1f} GFLOP/s"
    )


@click.command()
@click.option("--threads", type=click.IntRange(1), help="default: as many as the backend would take")
@click.option("--model", "names", multiple=True, type=click.Choice([heads.name for heads in MODELS]))
@click.option("--dtype", "dtypes", multiple=True, type=click.Choice(list(_VALUE_BYTES)))
@click.option("--context", "contexts", multiple=True, type=int, help="only loads of this context")
@click.option("--rows", type=int, help="only loads of so many sequences")
@click.option("--seconds", default=1.0, help="per case")
def main(
    threads: int | None,
    names: Sequence[str],
    dtypes: Sequence[str],
    contexts: Sequence[int],
    rows: int | None,
    seconds: float,
) -> None:
    """Print time per layer, KV read per second and its share of the read bandwidth, for each case."""
    threads = threads or default_threads()
    bandwidth = ReadBandwidth(threads)
    click.echo(f"threads: {threads}; rows x new tokens of context, time per layer")
    for heads in (heads for heads in MODELS if not names or heads.name in names):
        for dtype in dtypes or _VALUE_BYTES:
            for load in LOADS:
                if (not contexts or load.context in contexts) and rows in (None, load.rows):
                    result = measure(heads, load, dtype, threads, bandwidth, seconds)
                    click.echo(_line(heads, load, dtype, result))
    bandwidth.close()


if __name__ == "__main__":
    main()
