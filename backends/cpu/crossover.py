"""From how many tokens on a product is faster by panels than by tiles: measured, and kept for later.

The forms give the same bits (`linear`), so whatever is kept here changes nothing but speed.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import llvmlite.binding

from mvllm.backends.cpu import linear
from mvllm.backends.cpu.jit import kernel_folder
from mvllm.backends.cpu.layout import DENSE, ActivationLayout
from mvllm.backends.cpu.memory import aligned_zeros
from mvllm.backends.cpu.pack import PackedMatrix
from mvllm.core.types import ceil_div

NEVER = 2**31 - 1
"""The threshold of a matrix whose tiles are always faster."""

MEASURED_TOKENS = (2, 3, 4, 6, 8, 12, 16, 64)

_WORTHWHILE_WEIGHTS = 1 << 17  # of the smallest matrix whose form matters
_TIMED_WEIGHTS = 1 << 19  # of a timed product, about
_WHOLE_BLOCKS = 12  # multiples of it divide into tiles and panels alike: nothing is computed twice
_ROUNDS = 5
_MAX_FILE_BYTES = 1 << 20
_FILE_NAME = "crossover.json"


def choose(tiles: Mapping[int, float], panels: Mapping[int, float]) -> int:
    """The threshold that loses least against the faster form, given times by number of tokens.

    Losses are relative and add up over the numbers of tokens, so that one disturbed time decides little.
    """

    def loss(threshold: int) -> float:
        chosen = {m: panels[m] if m >= threshold else tiles[m] for m in tiles}
        return sum(chosen[m] / min(tiles[m], panels[m]) for m in tiles)

    return min((*sorted(tiles), NEVER), key=loss)


def measure(matrix: PackedMatrix, records: ActivationLayout) -> int:
    """The threshold of a matrix, from products of a few of its row blocks with zeros on this thread.

    Takes some milliseconds.
    """
    most = max(MEASURED_TOKENS)
    stride = 4 * matrix.inputs if matrix.format_name in DENSE else records.row_bytes(matrix.inputs)
    activations = aligned_zeros(most * stride, "activations")
    out = aligned_zeros(most * 4 * matrix.padded_rows, "outputs")
    at_once = ceil_div(_TIMED_WEIGHTS, matrix.inputs * matrix.isa.lanes * _WHOLE_BLOCKS) * _WHOLE_BLOCKS
    at_once = min(matrix.num_blocks, at_once)
    slices = matrix.num_blocks // at_once
    next_slice = 0

    def seconds(descriptor: int, tokens: int) -> float:
        # Ever other rows, so that weights come from where they do in a forward pass.
        nonlocal next_slice
        first = next_slice % slices * at_once
        next_slice += 1
        return time_product(
            descriptor,
            activations.ctypes.data,
            stride,
            out.ctypes.data,
            4 * matrix.padded_rows,
            tokens,
            first,
            first + at_once,
        )

    by_tiles = matrix.product_descriptor(records, NEVER)
    by_panels = matrix.product_descriptor(records, 2)
    times: dict[int, dict[int, list[float]]] = {by_tiles: {}, by_panels: {}}
    for tokens in MEASURED_TOKENS:
        for _ in range(_ROUNDS):
            for descriptor, found in times.items():
                found.setdefault(tokens, []).append(seconds(descriptor, tokens))
    tiles, panels = ({m: min(found) for m, found in times[form].items()} for form in (by_tiles, by_panels))
    return choose(tiles, panels)


def time_product(*arguments: int) -> float:
    """Seconds of `linear.matmul` with these arguments."""
    start = time.perf_counter()
    linear.matmul(*arguments)
    return time.perf_counter() - start


class Thresholds:
    """Owns the thresholds of this machine's matrices, in memory and in a file that may be missing or spoilt.

    `machine` names what the times depend on beyond the kernels; a file of another machine counts for nothing.
    """

    def __init__(
        self,
        path: Path | None,
        machine: str,
        measure: Callable[[PackedMatrix, ActivationLayout], int] = measure,
    ) -> None:
        self._path, self._machine, self._measure = path, machine, measure
        self._known = _read(path, machine) if path is not None else {}
        self._changed = False

    def panels_from(self, matrix: PackedMatrix, records: ActivationLayout) -> int:
        """The threshold of a matrix; measures it if it is the first of its shape."""
        if matrix.padded_rows * matrix.inputs < _WORTHWHILE_WEIGHTS:
            return linear.default_panels_from(matrix.format_name)
        name = shape_name(matrix, records)
        if name not in self._known:
            self._known[name] = self._measure(matrix, records)
            self._changed = True
        return self._known[name]

    def save(self) -> None:
        """Write the file if anything is new; without effect where that can't be done."""
        if self._path is None or not self._changed:
            return
        # Another process may have measured other shapes meanwhile.
        content = {"machine": self._machine, "panels_from": _read(self._path, self._machine) | self._known}
        with contextlib.suppress(OSError):
            _write(self._path, json.dumps(content))
            self._changed = False


def thresholds_of_this_machine() -> Thresholds:
    """The thresholds kept beside the compiled kernels that they belong to."""
    folder = kernel_folder()
    machine = f"{llvmlite.binding.get_host_cpu_name()}, {os.cpu_count()} CPUs"
    return Thresholds(None if folder is None else folder / _FILE_NAME, machine)


def shape_name(matrix: PackedMatrix, records: ActivationLayout) -> str:
    """What two matrices with the same threshold have in common."""
    activations = "f32" if matrix.format_name in DENSE else records.name
    return f"{matrix.format_name} {activations} {matrix.rows}x{matrix.inputs}"


def _read(path: Path, machine: str) -> dict[str, int]:
    """What a file says of this machine, nothing if it can't be read or makes no sense."""
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            return {}
        content: Any = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(content, dict) or content.get("machine") != machine:
        return {}
    thresholds = content.get("panels_from")
    if not isinstance(thresholds, dict):
        return {}
    return {name: value for name, value in thresholds.items() if type(value) is int and 2 <= value <= NEVER}


def _write(path: Path, content: str) -> None:
    """Replace the file as a whole, so that no reader sees half of it."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(content)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
