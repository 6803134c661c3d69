"""The text of `mvllm inspect --program`: what a step's graph is made of."""

from __future__ import annotations

from collections import Counter
from importlib.metadata import version

import mlx.core as mx

from mvllm.backends.mlx.device import compiles
from mvllm.backends.mlx.options import MlxOptions
from mvllm.backends.mlx.weights import DeviceWeights
from mvllm.core.model.decoder import forward
from mvllm.core.model.spec import Activation, ModelSpec
from mvllm.core.tensor import ModelWeights, TensorOps, Weight


def list_model(
    spec: ModelSpec, host: ModelWeights, weights: DeviceWeights, *, options: MlxOptions, device: mx.Device
) -> str:
    """Device and settings, the forms of the weights, then every operation in order."""
    lister = _Lister(weights)
    forward(lister, spec, host)
    forms = Counter(weights.matrix(weight).form for weight in lister.matrices)
    graphs = "compiled" if compiles(options, device) else "not compiled"
    return "\n".join(
        [
            f"mlx {version('mlx')} on {device.type.name}, activations {options.activations}, graphs {graphs}",
            "every token a pass of its own (exact)" if options.exact else "one pass per step",
            f"products row by row up to {options.rows_apart} rows"
            if options.rows_apart
            else "products whole",
            *(f"{count:5} products with {form}" for form, count in sorted(forms.items())),
            *(f"{index:4}  {line}" for index, line in enumerate(lister.lines)),
        ]
    )


class _Lister(TensorOps[str]):
    """Notes each operation as a line; a handle is the number of the line that made it."""

    def __init__(self, weights: DeviceWeights) -> None:
        self._weights = weights
        self.lines: list[str] = []
        self.matrices: list[Weight] = []

    def embed(self, table: Weight) -> str:
        return self._note(f"embed {table.name} ({self._weights.matrix(table).form})")

    def rms_norm(self, x: str, gain: Weight, eps: float) -> str:
        return self._note(f"rms_norm {x} {gain.name}")

    def linear(self, x: str, weight: Weight, bias: Weight | None = None) -> str:
        self.matrices.append(weight)
        added = f" + {bias.name}" if bias is not None else ""
        return self._note(f"linear {x} {weight.name} ({self._weights.matrix(weight).form}){added}")

    def rotate(self, x: str, rope: int) -> str:
        return self._note(f"rotate {x} rope {rope}")

    def attend(
        self, q: str, k: str, v: str, *, layer: int, window: int | None, scale: float, soft_cap: float | None
    ) -> str:
        window_text = f" window {window}" if window is not None else ""
        return self._note(f"attend {q} {k} {v} layer {layer}{window_text}")

    def gate(self, gate: str, up: str, activation: Activation) -> str:
        return self._note(f"{activation} {gate} * {up}")

    def add(self, x: str, y: str) -> str:
        return self._note(f"add {x} {y}")

    def scale(self, x: str, factor: float) -> str:
        return self._note(f"scale {x} {factor:g}")

    def soft_cap(self, x: str, cap: float) -> str:
        return self._note(f"soft_cap {x} {cap:g}")

    def take_logit_rows(self, x: str) -> str:
        return self._note(f"take_logit_rows {x}")

    def _note(self, line: str) -> str:
        self.lines.append(line)
        return f"%{len(self.lines) - 1}"
