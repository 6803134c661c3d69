"""The graphs of a step: one function per shape, compiled where that pays, the longest unused forgotten."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import mlx.core as mx

from mvllm.backends.mlx.batch_plan import GraphShape

Graph = Callable[[list[mx.array], list[mx.array]], tuple[list[mx.array], list[mx.array]]]
"""(pool arrays, batch inputs) -> (results, the pool arrays' successors)."""

MAX_GRAPHS = 64
"""A compiled graph of a large model takes some megabytes; decoding needs a handful, prefill a few dozen."""


class Graphs:
    """Owns the functions made so far, at most `MAX_GRAPHS`.

    Args:
        build: makes the function of a shape.
        compile: `mx.compile`, or the identity.
    """

    def __init__(self, build: Callable[[GraphShape], Graph], compile: Callable[[Graph], Graph]) -> None:
        self._build = build
        self._compile = compile
        self._graphs: OrderedDict[GraphShape, Graph] = OrderedDict()

    def __len__(self) -> int:
        return len(self._graphs)

    def get(self, shape: GraphShape) -> Graph:
        """The function of a shape, made at first use."""
        graph = self._graphs.get(shape)
        if graph is None:
            graph = self._graphs[shape] = self._compile(self._build(shape))
        self._graphs.move_to_end(shape)
        if len(self._graphs) > MAX_GRAPHS:
            self._graphs.popitem(last=False)
        return graph
