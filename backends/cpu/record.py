"""Records the decoder's operations once, as nodes of a graph in execution order."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from mvllm.backends.cpu.layout import NARROW, QUANTIZED, ActivationLayout, packed_format
from mvllm.backends.cpu.tables import Domain
from mvllm.core.model.spec import Activation
from mvllm.core.tensor import ModelWeights, TensorOps, Weight


@dataclass(frozen=True)
class Value:
    """A float32 matrix of the graph: `width` columns, one row per member of `domain`."""

    number: int
    width: int
    domain: Domain


@dataclass(frozen=True)
class Embed:
    table: Weight


@dataclass(frozen=True)
class RmsNorm:
    gain: Weight
    eps: float


@dataclass(frozen=True)
class Linear:
    weight: Weight
    bias: Weight | None
    activations: ActivationLayout | None = None  # how a quantized weight's input is rounded; None: it is not


@dataclass(frozen=True)
class Rotate:
    rope: int


@dataclass(frozen=True)
class Attend:
    layer: int
    window: int | None
    scale: float
    soft_cap: float | None


@dataclass(frozen=True)
class Gate:
    activation: Activation


@dataclass(frozen=True)
class Add:
    pass


@dataclass(frozen=True)
class Scale:
    factor: float


@dataclass(frozen=True)
class SoftCap:
    cap: float


@dataclass(frozen=True)
class TakeLogitRows:
    pass


Operation = Embed | RmsNorm | Linear | Rotate | Attend | Gate | Add | Scale | SoftCap | TakeLogitRows


@dataclass(frozen=True)
class Node:
    """One operation of the graph."""

    operation: Operation
    inputs: tuple[Value, ...]
    output: Value


class Recorder(TensorOps[Value]):
    """A `TensorOps` that computes nothing. Owns the list of nodes, which every call extends by one.

    Products with the weights in `sensitive` take activations of the layout `wide`.
    """

    def __init__(self, sensitive: Iterable[Weight], wide: ActivationLayout) -> None:
        self.nodes: list[Node] = []
        self._wide = wide
        self._sensitive = {id(weight) for weight in sensitive}

    def embed(self, table: Weight) -> Value:
        return self._record(Embed(table), width=table.shape[1])

    def rms_norm(self, x: Value, gain: Weight, eps: float) -> Value:
        return self._record(RmsNorm(gain, eps), x)

    def linear(self, x: Value, weight: Weight, bias: Weight | None = None) -> Value:
        activations = None
        if packed_format(weight.format_name) in QUANTIZED:
            activations = self._wide if id(weight) in self._sensitive else NARROW
        return self._record(Linear(weight, bias, activations), x, width=weight.shape[0])

    def rotate(self, x: Value, rope: int) -> Value:
        return self._record(Rotate(rope), x)

    def attend(
        self,
        q: Value,
        k: Value,
        v: Value,
        *,
        layer: int,
        window: int | None,
        scale: float,
        soft_cap: float | None,
    ) -> Value:
        return self._record(Attend(layer, window, scale, soft_cap), q, k, v)

    def gate(self, gate: Value, up: Value, activation: Activation) -> Value:
        return self._record(Gate(activation), gate, up)

    def add(self, x: Value, y: Value) -> Value:
        return self._record(Add(), x, y)

    def scale(self, x: Value, factor: float) -> Value:
        return self._record(Scale(factor), x)

    def soft_cap(self, x: Value, cap: float) -> Value:
        return self._record(SoftCap(cap), x)

    def take_logit_rows(self, x: Value) -> Value:
        return self._record(TakeLogitRows(), x, domain=Domain.LOGIT_ROWS)

    def _record(
        self, operation: Operation, *inputs: Value, width: int | None = None, domain: Domain | None = None
    ) -> Value:
        """Append a node; width and domain are the first input's unless given."""
        if width is None:
            width = inputs[0].width
        if domain is None:
            domain = inputs[0].domain if inputs else Domain.TOKENS
        output = Value(len(self.nodes), width, domain)
        self.nodes.append(Node(operation, inputs, output))
        return output


def sensitive_weights(weights: ModelWeights) -> list[Weight]:
    """Products whose rounded inputs cost the most accuracy for their size: the values, which attention passes
    on undiminished, and the head, after which nothing averages errors out.

    On SmolLM2-135M Q4_1 rounding their inputs to 8 bits makes 45 % of the variance of the log-probabilities'
    errors.
    """
    return [*(layer.v for layer in weights.layers), weights.head]
