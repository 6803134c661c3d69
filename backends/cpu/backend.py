"""`CpuBackend`: compiled kernels on the processor's vector units, on a team of threads."""

from __future__ import annotations

import logging

from mvllm.backends.cpu.layout import DENSE, GROUP, QUANTIZED, packed_format
from mvllm.backends.cpu.threads import default_threads
from mvllm.core.errors import ConfigError, ModelFileError, shown
from mvllm.core.load.mlx_format import MLX_FORMATS
from mvllm.core.load.quantized import QUANT_FORMATS
from mvllm.core.model.spec import ModelSpec
from mvllm.core.tensor import Backend, Capabilities, KvGeometry, Model, ModelWeights, Weight

_KV_DTYPES = ("f16", "f32")
MAX_THREADS = 256
"""Most threads of a team: beyond what one machine's cores share, barriers only cost."""
_log = logging.getLogger("mvllm")


class CpuBackend(Backend):
    """Row-exact: a row's floats depend on nothing but the model and the tokens before it.

    Importing this module compiles nothing; the first `load` on a machine takes about 20 seconds, which it
    announces through the logger "mvllm", later ones read the compile cache.
    """

    name = "cpu"
    capabilities = Capabilities(row_exact=True, kv_dtypes=_KV_DTYPES, skips_logits=True)

    def __init__(self, threads: int | None = None) -> None:
        """`threads`: size of a model's team; None: as many as the machine and its container allow, and fewer
        while other processes use their cores.

        Raises:
            ConfigError: `threads` is no number of threads.
        """
        if threads is not None and not (type(threads) is int and 1 <= threads <= MAX_THREADS):
            raise ConfigError(f"threads must be a whole number from 1 to {MAX_THREADS}, got {shown(threads)}")
        self._threads = threads

    def unsupported(self, spec: ModelSpec, weights: ModelWeights) -> str | None:
        if spec.head_dim % 2:
            return f"head_dim is {spec.head_dim}; the cpu backend needs an even one"
        if spec.num_heads % spec.num_kv_heads:
            return f"{spec.num_heads} query heads can't share {spec.num_kv_heads} kv heads evenly"
        for weight in _matrices(weights):
            reason = _unsupported_matrix(weight)
            if reason is not None:
                return reason
        return None

    def load(self, spec: ModelSpec, weights: ModelWeights, geometry: KvGeometry) -> Model:
        if geometry.dtype not in _KV_DTYPES:
            raise ConfigError(
                f"the cpu backend keeps KV as {' or '.join(_KV_DTYPES)}, {geometry.dtype!r} was asked for"
            )
        reason = self.unsupported(spec, weights)
        if reason is not None:
            raise ModelFileError(reason)
        # Imported here: a program that loads no model on this backend need not wait for llvmlite.
        from mvllm.backends.cpu.jit import announce_first_compilation

        announce_first_compilation()
        from mvllm.backends.cpu.compile_helper import helper_if_cold
        from mvllm.backends.cpu.isa import selected
        from mvllm.backends.cpu.model import CpuModel

        threads = self._threads or default_threads()
        _log.info("cpu backend: %s kernels, threads: %d", selected().name, threads)
        with helper_if_cold():
            return CpuModel(spec, weights, geometry, threads, adaptive=self._threads is None)


def _matrices(weights: ModelWeights) -> list[Weight]:
    layers = [
        weight
        for layer in weights.layers
        for weight in (layer.q, layer.k, layer.v, layer.o, layer.gate, layer.up, layer.down)
    ]
    return [weights.embedding, *layers, weights.head]


def _unsupported_matrix(weight: Weight) -> str | None:
    name = weight.format_name
    packed = packed_format(name)
    if packed is None:
        known = ", ".join([*DENSE, *QUANT_FORMATS, *MLX_FORMATS])
        return f"weight {weight.name} has format {name}; the cpu backend knows {known}"
    inputs = weight.shape[1]
    group = GROUP * QUANTIZED[packed].superblock if packed in QUANTIZED else 1
    if inputs % group:
        return f"weight {weight.name} has {inputs} inputs, {name} needs a multiple of {group}"
    return None
