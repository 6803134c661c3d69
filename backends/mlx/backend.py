"""`MlxBackend`: Apple's MLX, on Metal where there is one, else on MLX's CPU device."""

from __future__ import annotations

import logging

from mvllm.backends.mlx.device import choose_device
from mvllm.backends.mlx.encode import is_quantized, matrices
from mvllm.backends.mlx.model import MlxModel
from mvllm.backends.mlx.options import MlxOptions
from mvllm.core.errors import ConfigError, ModelFileError
from mvllm.core.load.mlx_format import MLX_FORMATS
from mvllm.core.load.quantized import QUANT_FORMATS
from mvllm.core.load.weights import DENSE_DTYPES
from mvllm.core.model.spec import ModelSpec
from mvllm.core.tensor import Backend, Capabilities, KvGeometry, Model, ModelWeights, Weight

_KV_DTYPES = ("f32", "f16", "bf16")
_INPUTS_MULTIPLE = 32  # of a quantized matrix: the smallest group that MLX has kernels for
_log = logging.getLogger("mvllm")


class MlxBackend(Backend):
    """Row-exact with `exact` only: a device orders the sums of a product by the product's shape.

    Raises:
        BackendUnavailable: the options ask for a GPU, and MLX has none here.
    """

    name = "mlx"

    def __init__(self, options: MlxOptions | None = None) -> None:
        self._options = options or MlxOptions()
        self._device = choose_device(self._options)
        self.capabilities = Capabilities(row_exact=self._options.exact, kv_dtypes=_KV_DTYPES)

    def unsupported(self, spec: ModelSpec, weights: ModelWeights) -> str | None:
        if spec.head_dim % 2:
            return f"head_dim is {spec.head_dim}; the mlx backend needs an even one"
        if spec.num_heads % spec.num_kv_heads:
            return f"{spec.num_heads} query heads can't share {spec.num_kv_heads} kv heads evenly"
        reasons = (_unsupported_matrix(weight) for weight in matrices(weights))
        return next((reason for reason in reasons if reason is not None), None)

    def load(self, spec: ModelSpec, weights: ModelWeights, geometry: KvGeometry) -> Model:
        if geometry.dtype not in _KV_DTYPES:
            raise ConfigError(
                f"the mlx backend keeps KV as {' or '.join(_KV_DTYPES)}, {geometry.dtype!r} was asked for"
            )
        reason = self.unsupported(spec, weights)
        if reason is not None:
            raise ModelFileError(reason)
        _log.info("mlx backend: device %s", self._device.type.name)
        return MlxModel(spec, weights, geometry, options=self._options, device=self._device)


def _unsupported_matrix(weight: Weight) -> str | None:
    name = weight.format_name
    if name not in DENSE_DTYPES and not is_quantized(weight):
        known = ", ".join([*DENSE_DTYPES, *QUANT_FORMATS, *MLX_FORMATS])
        return f"weight {weight.name} has format {name}; the mlx backend knows {known}"
    inputs = weight.shape[1]
    if is_quantized(weight) and inputs % _INPUTS_MULTIPLE:
        return f"weight {weight.name} has {inputs} inputs, {name} needs a multiple of {_INPUTS_MULTIPLE}"
    return None
