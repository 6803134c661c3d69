"""A model's weights in the form that compiled code reads, each packed once."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future

import numpy as np
from numpy.typing import NDArray

from mvllm.backends.cpu.memory import aligned_zeros
from mvllm.backends.cpu.pack import Arena, PackedMatrix, pack_matrix
from mvllm.core.errors import CapacityError
from mvllm.core.model.spec import RopeSpec
from mvllm.core.tensor import Weight

_PADDING = 16  # floats: vectors may read past the end of a bias


class PackedWeights:
    """Owns the packed matrices, vectors and rotary tables of a model; handed out as addresses that stay valid
    while it lives. Programs of the same model share one.

    Matrices are packed by `workers`, and complete after `finish`.
    """

    def __init__(self, workers: Executor) -> None:
        self._workers = workers
        self._packing: list[Future[None]] = []
        self._arena = Arena()
        self._matrices: dict[int, tuple[Weight, PackedMatrix]] = {}  # by id of the weight
        self._vectors: dict[int, tuple[Weight, NDArray[np.float32]]] = {}
        self._ropes: dict[tuple[RopeSpec, int], tuple[NDArray[np.float32], NDArray[np.float32]]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of packed matrices and vectors."""
        matrices = sum(matrix.nbytes for _, matrix in self._matrices.values())
        return matrices + sum(vector.nbytes for _, vector in self._vectors.values())

    def matrix(self, weight: Weight) -> PackedMatrix:
        """The packed form of `weight`; the first call sees to its making.

        Raises:
            CapacityError: memory for it can't be had.
        """
        known = self._matrices.get(id(weight))
        if known is None:
            try:
                packed = pack_matrix([weight], self._arena, start=self._start)
            except (MemoryError, OSError):
                raise CapacityError(
                    f"weight {weight.name}, bytes", needed=weight.nbytes, available=0
                ) from None
            known = self._matrices[id(weight)] = (weight, packed)
        return known[1]

    def _start(self, task: Callable[[], None]) -> None:
        self._packing.append(self._workers.submit(task))

    def finish(self) -> None:
        """Wait until all matrices asked for are packed."""
        for packing in self._packing:
            packing.result()
        self._packing.clear()

    def vector(self, weight: Weight) -> int:
        """Address of the float32 values of a vector."""
        known = self._vectors.get(id(weight))
        if known is None:
            count = weight.shape[0]
            values = aligned_zeros(4 * (count + _PADDING), f"weight {weight.name}").view(np.float32)
            values[:count] = weight.to_float32()
            known = self._vectors[id(weight)] = (weight, values)
        return int(known[1].ctypes.data)

    def rope(self, spec: RopeSpec, num_positions: int) -> tuple[int, int]:
        """Addresses of the cosines and sines, each float32[num_positions, head_dim / 2]."""
        known = self._ropes.get((spec, num_positions))
        if known is None:
            cos, sin = spec.table(num_positions)
            known = self._ropes[spec, num_positions] = np.ascontiguousarray(cos), np.ascontiguousarray(sin)
        return int(known[0].ctypes.data), int(known[1].ctypes.data)
