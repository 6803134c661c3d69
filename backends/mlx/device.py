"""Where MLX computes. The few places that differ between Metal and MLX's CPU device ask here."""

from __future__ import annotations

import mlx.core as mx

from mvllm.backends.mlx.options import MlxOptions
from mvllm.core.errors import BackendUnavailable, CapacityError

DTYPES = {"f32": mx.float32, "f16": mx.float16, "bf16": mx.bfloat16}


def choose_device(options: MlxOptions) -> mx.Device:
    """The device that the options stand for on this machine.

    Raises:
        BackendUnavailable: a GPU is asked for, and MLX has none here.
    """
    if options.device == "cpu":
        return mx.Device(mx.cpu, 0)
    if mx.is_available(mx.gpu):
        return mx.Device(mx.gpu, 0)
    if options.device == "gpu":
        raise BackendUnavailable("mlx", "MLX has no GPU here; device 'cpu' works everywhere")
    return mx.Device(mx.cpu, 0)


def is_gpu(device: mx.Device) -> bool:
    return device.type == mx.gpu


def compiles(options: MlxOptions, device: mx.Device) -> bool:
    """Whether graphs are compiled.

    On the CPU device MLX hands each fused kernel to a C++ compiler, which takes seconds per kernel and gains
    little; so there it has to be asked for.
    """
    return is_gpu(device) if options.compile is None else options.compile


def require_memory(nbytes: int, purpose: str) -> None:
    """Ask before an allocation: MLX's CPU device ends the process when memory is refused.

    Raises:
        CapacityError: with `nbytes` more, MLX would hold more than its limit for this machine.
    """
    available = mx.get_memory_limit() - mx.get_active_memory()
    if nbytes > available:
        raise CapacityError(f"{purpose}, bytes", needed=nbytes, available=max(0, available))
