"""Turns a program into tables: arrays become addresses, weights descriptors, kinds compiled functions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mvllm.backends.cpu import record as graph
from mvllm.backends.cpu.attention_kernels import score_function, values_function
from mvllm.backends.cpu.crossover import thresholds_of_this_machine
from mvllm.backends.cpu.kv_pool import KvPool
from mvllm.backends.cpu.layout import LAYOUT_NUMBERS, NARROW
from mvllm.backends.cpu.memory import LINE_BYTES, aligned_zeros
from mvllm.backends.cpu.operations import address_of
from mvllm.backends.cpu.plan import Buffer, assign_buffers, check_widths, find_barriers
from mvllm.backends.cpu.program import Array, Instruction, Kind, Program
from mvllm.backends.cpu.tables import (
    ATTENTION,
    EMBED,
    GATE,
    INSTRUCTION,
    LINEAR,
    NORM,
    QUANTIZE,
    ROTATE,
    SCALAR,
    Domain,
    Epilogue,
    Regime,
)
from mvllm.backends.cpu.weights import PackedWeights
from mvllm.core.model.spec import ModelSpec
from mvllm.core.tensor import KvGeometry


@dataclass(frozen=True)
class LinkedProgram:
    """A program ready to run. Owns its tables and buffers; does not own weights or KV."""

    program: Program
    barriers: list[frozenset[Regime]]
    buffers: dict[Array, Buffer]
    table: NDArray[np.uint8]  # INSTRUCTION records
    counters: NDArray[np.uint8]  # one line per attention instruction
    parameters: list[NDArray[Any]]  # records that the table points to
    memory: dict[Buffer, NDArray[np.uint8]]

    @property
    def buffer_bytes(self) -> int:
        return sum(memory.nbytes for memory in self.memory.values())

    def rows(self, array: Array, count: int) -> NDArray[np.float32]:
        """View of the first `count` rows of a float32 array: f32[count, width]."""
        buffer = self.buffers[array]
        matrix = self.memory[buffer].view(np.float32).reshape(-1, buffer.row_bytes // 4)
        return matrix[:count, : array.width]


class Linker:
    """Links programs of one model. Owns nothing but its references; packs weights as it meets them."""

    def __init__(
        self, spec: ModelSpec, geometry: KvGeometry, weights: PackedWeights, pool: KvPool, threads: int
    ) -> None:
        self._spec, self._geometry = spec, geometry
        self._weights, self._pool, self._threads = weights, pool, threads
        self._thresholds = thresholds_of_this_machine()

    def link(self, program: Program) -> LinkedProgram:
        """Pack weights, plan and allocate buffers, write the tables.

        Raises:
            CapacityError: memory can't be had.
        """
        check_widths(program.instructions)
        buffers = assign_buffers(program)
        barriers = find_barriers(program, buffers)
        memory = {buffer: self._allocate(buffer) for buffer in set(buffers.values())}
        instructions = program.instructions
        parameters = [self._parameters(step) for step in instructions]
        self._thresholds.save()
        table = aligned_zeros(len(instructions) * INSTRUCTION.itemsize, "instructions")
        records = table.view(INSTRUCTION)
        num_attends = 0
        for index, (record, step) in enumerate(zip(records, instructions, strict=True)):
            record["function"] = address_of(step.kind)
            record["barriers"] = sum(1 << regime for regime in barriers[index])
            record["domain"] = step.domain
            record["replicated"] = step.output in program.private
            record["width"] = step.output.width if step.output is not None else 0
            record["parameters"] = parameters[index].ctypes.data
            for name in ("input", "other", "output"):
                array = getattr(step, name)
                if array is not None:
                    buffer = buffers[array]
                    address = memory[buffer].ctypes.data
                    record[name] = (address, buffer.row_bytes, array in program.private)
            if step.kind is Kind.ATTEND:
                parameters[index]["counter"] = num_attends
                num_attends += 1
        counters = aligned_zeros(LINE_BYTES * num_attends, "counters")
        return LinkedProgram(program, barriers, buffers, table, counters, parameters, memory)

    def _allocate(self, buffer: Buffer) -> NDArray[np.uint8]:
        geometry = self._geometry
        by_domain = {
            Domain.TOKENS: geometry.max_batch_tokens,
            Domain.LOGIT_ROWS: geometry.max_logit_rows,
        }
        rows = max(by_domain[buffer.domain], self._threads)
        return aligned_zeros(rows * buffer.row_bytes, "activations")

    def _parameters(self, step: Instruction) -> NDArray[Any]:
        """The record of numbers and addresses that the instruction's function reads."""
        match step.operation:
            case graph.Embed(table):
                return _record(EMBED, descriptor=self._weights.matrix(table).embedding_descriptor())
            case graph.RmsNorm(gain, eps):
                return _record(NORM, gain=self._weights.vector(gain), group=gain.shape[0], eps=eps)
            case graph.Linear(weight, bias, activations):
                matrix, records = self._weights.matrix(weight), activations or NARROW
                panels_from = self._thresholds.panels_from(matrix, records)
                return _record(
                    LINEAR,
                    descriptor=matrix.product_descriptor(records, panels_from),
                    bias=self._weights.vector(bias) if bias is not None else 0,
                    blocks=matrix.num_blocks,
                    lanes=matrix.isa.lanes,
                    epilogue=step.epilogue,
                    cap=step.cap,
                )
            case graph.Rotate(rope):
                rope_spec = self._spec.ropes[rope]
                cos, sin = self._weights.rope(rope_spec, self._geometry.max_context)
                return _record(ROTATE, cos=cos, sin=sin, half=len(rope_spec.inverse_frequencies))
            case graph.Attend() as attend:
                return self._attention(attend)
            case graph.Gate(activation):
                return _record(GATE, epilogue=Epilogue.SILU if activation == "silu" else Epilogue.GELU_TANH)
            case graph.Scale(value) | graph.SoftCap(value):
                return _record(SCALAR, value=value)
            case None if step.kind is Kind.QUANTIZE:
                assert step.output is not None and step.output.records is not None
                return _record(QUANTIZE, layout=LAYOUT_NUMBERS[step.output.records])
            case _:
                return _record(SCALAR)

    def _attention(self, attend: graph.Attend) -> NDArray[Any]:
        layout = self._pool.layout
        return _record(
            ATTENTION,
            layer=self._pool.layer_address(attend.layer),
            block_bytes=layout.block_bytes,
            head_bytes=layout.head_bytes,
            value_offset=layout.value_offset,
            block_size=layout.block_size,
            tile=layout.tile,
            head_dim=layout.head_dim,
            padded_dim=layout.padded_dim,
            kv_heads=layout.kv_heads,
            group=self._spec.num_heads // layout.kv_heads,
            is_half=layout.dtype == "f16",
            score=score_function(layout.dtype).address,
            add_values=values_function(layout.dtype).address,
            window=attend.window or 0,
            scale=attend.scale,
            soft_cap=attend.soft_cap or 0.0,
        )


def _record(dtype: np.dtype[Any], **fields: float) -> NDArray[Any]:
    record = np.zeros(1, dtype)
    for name, value in fields.items():
        record[name] = value
    return record
