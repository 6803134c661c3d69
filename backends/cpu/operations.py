"""The compiled function of every kind of instruction, and the loop that runs a program.

A function takes the addresses of an instruction and of the calling thread's worker record, does this thread's
share of the work, and returns; the loop sees to the barriers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mvllm.backends.cpu import elementwise
from mvllm.backends.cpu.atomics import atomic_add
from mvllm.backends.cpu.attention import attend_item, attention_at, item_at, store_keys_values
from mvllm.backends.cpu.attention_plan import step_at
from mvllm.backends.cpu.clock import now_ns
from mvllm.backends.cpu.jit import Kernel, kernel
from mvllm.backends.cpu.linear import embed_row, matmul, quantize_row
from mvllm.backends.cpu.memory import LINE_BYTES
from mvllm.backends.cpu.pointers import call_operation, i32_at, i64_at, record_at
from mvllm.backends.cpu.program import Kind
from mvllm.backends.cpu.quantized_kernels import TILE_BLOCKS
from mvllm.backends.cpu.quantized_panels import PANEL_BLOCKS
from mvllm.backends.cpu.sampler import sample_rows
from mvllm.backends.cpu.tables import (
    ARRIVED,
    EMBED,
    ENDED,
    GATE,
    INSTRUCTION,
    ITEM,
    LINEAR,
    NORM,
    NUM_TIMES,
    QUANTIZE,
    ROTATE,
    SCALAR,
    STARTED,
    Domain,
    Epilogue,
)
from mvllm.backends.cpu.team import control_at, meet, share_of, worker_at

_TOKENS = int(Domain.TOKENS)
_ADD, _SILU, _GELU_TANH, _SOFT_CAP = (
    int(e) for e in (Epilogue.ADD, Epilogue.SILU, Epilogue.GELU_TANH, Epilogue.SOFT_CAP)
)
_MANY_ROWS = 16  # from about so many on products are computed by panels
_INSTRUCTION_BYTES = INSTRUCTION.itemsize
_ITEM_BYTES = ITEM.itemsize

instruction_at = record_at(INSTRUCTION)
embed_at, norm_at, quantize_at, linear_at, rotate_at, scalar_at, gate_at = (
    record_at(table) for table in (EMBED, NORM, QUANTIZE, LINEAR, ROTATE, SCALAR, GATE)
)


@kernel("int64(int64)")
def _step_of(worker: Any) -> Any:
    return control_at(worker_at(worker).control).argument


@kernel("int64(int64, int64)")
def _num_rows(instruction: Any, worker: Any) -> Any:
    step = step_at(_step_of(worker))
    return step.num_tokens if instruction_at(instruction).domain == _TOKENS else step.num_logit_rows


@kernel("UniTuple(int64, 2)(int64, int64)")
def _share_of_rows(instruction: Any, worker: Any) -> Any:
    """The rows [first, last) that this thread works on."""
    rows = _num_rows(instruction, worker)
    if rows == 1:  # always by the same thread, whose caches know what it needs
        return 0, np.int64(instruction_at(instruction).replicated or worker_at(worker).thread == 0)
    return share_of(worker, rows)


@kernel("UniTuple(int64, 3)(int64, int64)")
def _matrices(instruction: Any, worker: Any) -> Any:
    """Addresses of the input, the other input and the output: the thread's own copies where it has them."""
    i, thread = instruction_at(instruction), worker_at(worker).thread
    if _num_rows(instruction, worker) != 1:
        return i.input.address, i.other.address, i.output.address
    return (
        i.input.address + i.input.private * thread * i.input.stride,
        i.other.address + i.other.private * thread * i.other.stride,
        i.output.address + i.output.private * thread * i.output.stride,
    )


def _embed(instruction: Any, worker: Any) -> None:
    i, tokens = instruction_at(instruction), i32_at(step_at(_step_of(worker)).tokens)
    descriptor = embed_at(i.parameters).descriptor
    first, last = _share_of_rows(instruction, worker)
    for row in range(first, last):
        embed_row(descriptor, tokens[row], i.output.address + row * i.output.stride)


def _norm(instruction: Any, worker: Any) -> None:
    i = instruction_at(instruction)
    p = norm_at(i.parameters)
    first, last = _share_of_rows(instruction, worker)
    source, _, target = _matrices(instruction, worker)
    for row in range(first, last):
        for start in range(0, 4 * i.width, 4 * p.group):
            x = source + row * i.input.stride + start
            elementwise.rms_norm(x, p.gain, p.eps, target + row * i.output.stride + start, p.group)


def _quantize(instruction: Any, worker: Any) -> None:
    i = instruction_at(instruction)
    layout = quantize_at(i.parameters).layout
    first, last = _share_of_rows(instruction, worker)
    source, _, target = _matrices(instruction, worker)
    for row in range(first, last):
        x, records = source + row * i.input.stride, target + row * i.output.stride
        quantize_row(x, records, i.width, layout)


@kernel("UniTuple(int64, 2)(int64, int64)")
def _share_of_columns(instruction: Any, worker: Any) -> Any:
    """The row blocks [first, last) of a product's weights that this thread works on.

    Products over the same rows with equally many columns are shared out alike, whatever their formats: the
    planner counts on that.
    """
    i, rows = instruction_at(instruction), _num_rows(instruction, worker)
    p = linear_at(i.parameters)
    blocks, together = p.blocks, 1
    if i.domain != _TOKENS:  # the head, the only product over logit rows
        blocks = min(blocks, (step_at(_step_of(worker)).vocab_limit + p.lanes - 1) // p.lanes)
    if rows > 1:  # row blocks that are mostly computed together stay together
        together = TILE_BLOCKS if rows < _MANY_ROWS else PANEL_BLOCKS
    first, last = share_of(worker, (blocks + together - 1) // together)
    return min(first * together, blocks), min(last * together, blocks)


def _linear(instruction: Any, worker: Any) -> None:
    i, rows = instruction_at(instruction), _num_rows(instruction, worker)
    p = linear_at(i.parameters)
    first, last = _share_of_columns(instruction, worker)
    source, other, target = _matrices(instruction, worker)
    matmul(p.descriptor, source, i.input.stride, target, i.output.stride, rows, first, last)
    start, width = 4 * first * p.lanes, (last - first) * p.lanes
    for row in range(rows):
        out = target + row * i.output.stride + start
        operand = other + row * i.other.stride + start
        if p.bias != 0:
            elementwise.add(out, p.bias + start, out, width)
        if p.epilogue == _ADD:
            elementwise.add(operand, out, out, width)
        elif p.epilogue == _SILU or p.epilogue == _GELU_TANH:
            elementwise.gate(p.epilogue, operand, out, out, width)
        elif p.epilogue == _SOFT_CAP:
            elementwise.cap_softly(out, p.cap, out, width)


def _rotate(instruction: Any, worker: Any) -> None:
    i, positions = instruction_at(instruction), i32_at(step_at(_step_of(worker)).positions)
    p = rotate_at(i.parameters)
    first, last = _share_of_rows(instruction, worker)
    for row in range(first, last):
        angle = positions[row] * p.half * 4
        for start in range(0, 4 * i.width, 8 * p.half):
            x = i.input.address + row * i.input.stride + start
            out = i.output.address + row * i.output.stride + start
            elementwise.rotate(x, p.cos + angle, p.sin + angle, out, p.half)


def _store_kv(instruction: Any, worker: Any) -> None:
    i, slots = instruction_at(instruction), i32_at(step_at(_step_of(worker)).slots)
    first, last = _share_of_rows(instruction, worker)
    for row in range(first, last):
        keys = i.input.address + row * i.input.stride
        store_keys_values(i.parameters, slots[row], keys, i.other.address + row * i.other.stride)


def _attend(instruction: Any, worker: Any) -> None:
    i, w, step = instruction_at(instruction), worker_at(worker), step_at(_step_of(worker))
    counter = step.next_item + LINE_BYTES * attention_at(i.parameters).counter
    scratch = step.scratch + w.thread * step.scratch_stride
    number = atomic_add(counter, 1)
    while number < step.num_items:
        item = step.items + _ITEM_BYTES * number
        row = item_at(item).row
        first_token = i32_at(step.row_starts)[row]
        attend_item(
            i.parameters,
            item,
            step.positions + 4 * first_token,
            step.block_tables + 4 * row * step.table_width,
            i.input.address + first_token * i.input.stride,
            i.output.address + first_token * i.output.stride,
            i.output.stride,
            scratch,
        )
        number = atomic_add(counter, 1)


def _gate(instruction: Any, worker: Any) -> None:
    i = instruction_at(instruction)
    activation = gate_at(i.parameters).epilogue
    first, last = _share_of_rows(instruction, worker)
    for row in range(first, last):
        gates = i.input.address + row * i.input.stride
        ups = i.other.address + row * i.other.stride
        elementwise.gate(activation, gates, ups, i.output.address + row * i.output.stride, i.width)


def _add(instruction: Any, worker: Any) -> None:
    i = instruction_at(instruction)
    first, last = _share_of_rows(instruction, worker)
    for row in range(first, last):
        x = i.input.address + row * i.input.stride
        y = i.other.address + row * i.other.stride
        elementwise.add(x, y, i.output.address + row * i.output.stride, i.width)


def _scale(instruction: Any, worker: Any) -> None:
    i = instruction_at(instruction)
    factor = scalar_at(i.parameters).value
    first, last = _share_of_rows(instruction, worker)
    for row in range(first, last):
        x = i.input.address + row * i.input.stride
        elementwise.scale(x, factor, i.output.address + row * i.output.stride, i.width)


def _soft_cap(instruction: Any, worker: Any) -> None:
    i = instruction_at(instruction)
    cap = scalar_at(i.parameters).value
    first, last = _share_of_rows(instruction, worker)
    for row in range(first, last):
        x = i.input.address + row * i.input.stride
        elementwise.cap_softly(x, cap, i.output.address + row * i.output.stride, i.width)


def _take(instruction: Any, worker: Any) -> None:
    i, chosen = instruction_at(instruction), i32_at(step_at(_step_of(worker)).logit_rows)
    first, last = _share_of_rows(instruction, worker)
    _, _, target = _matrices(instruction, worker)
    for row in range(first, last):
        x = i.input.address + chosen[row] * i.input.stride
        elementwise.copy(x, target + row * i.output.stride, i.width)


def _sample(instruction: Any, worker: Any) -> None:
    first, last = _share_of_rows(instruction, worker)
    sample_rows(step_at(_step_of(worker)).sampling, first, last, worker_at(worker).thread)


_FUNCTIONS: dict[Kind, Callable[[Any, Any], None]] = {
    Kind.EMBED: _embed,
    Kind.NORM: _norm,
    Kind.QUANTIZE: _quantize,
    Kind.LINEAR: _linear,
    Kind.ROTATE: _rotate,
    Kind.STORE_KV: _store_kv,
    Kind.ATTEND: _attend,
    Kind.GATE: _gate,
    Kind.ADD: _add,
    Kind.SCALE: _scale,
    Kind.SOFT_CAP: _soft_cap,
    Kind.TAKE: _take,
    Kind.SAMPLE: _sample,
}


@kernel("void(int64, int64)")
def _run_timed(step_address: Any, worker: Any) -> None:
    """Run the program and note when each instruction was arrived at, started and ended."""
    step = step_at(step_address)
    times = i64_at(step.times + 8 * NUM_TIMES * step.num_instructions * worker_at(worker).thread)
    for index in range(step.num_instructions):
        instruction = step.instructions + index * _INSTRUCTION_BYTES
        i = instruction_at(instruction)
        times[NUM_TIMES * index + ARRIVED] = now_ns()
        if i.barriers >> step.regime & 1:
            meet(worker)
        times[NUM_TIMES * index + STARTED] = now_ns()
        call_operation(i.function, instruction, worker)
        times[NUM_TIMES * index + ENDED] = now_ns()


def _run_program(step_address: Any, worker: Any) -> None:
    step = step_at(step_address)
    if step.times != 0:
        _run_timed(step_address, worker)
        return
    for index in range(step.num_instructions):
        instruction = step.instructions + index * _INSTRUCTION_BYTES
        i = instruction_at(instruction)
        if i.barriers >> step.regime & 1:
            meet(worker)
        call_operation(i.function, instruction, worker)


OPERATIONS = {kind: Kernel("void(int64, int64)", function) for kind, function in _FUNCTIONS.items()}
RUN_PROGRAM = Kernel("void(int64, int64)", _run_program)


def address_of(kind: Kind) -> int:
    """Address of the code for a kind of instruction, compiled on first use and kept for the process."""
    return OPERATIONS[kind].native.address


def program_runner() -> int:
    """Address of the job that runs the program of a `STEP`."""
    return RUN_PROGRAM.native.address
