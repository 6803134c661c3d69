"""Which tensors of a folder are quantized, by `config.json` and by the tensors that lie beside each other.

A quantized matrix X is three tensors: X.weight (uint32, packed codes), X.scales and X.biases. The presence of
scales decides whether it is quantized; `config.json` gives bits and group size, for all matrices and, by
name, for single ones. The shapes of the three must agree with these, so a setting that is looked up under
another name, or stale, is found out and never misread.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mvllm.core.errors import ModelFileError, shown
from mvllm.core.load.mlx_format import MLX_BITS, MLX_FORMATS, MLX_GROUP_SIZES, mlx_format_name
from mvllm.core.load.safetensors import PackedCodes, SafeTensor
from mvllm.core.load.settings import Settings
from mvllm.core.load.weights import AffineWeight, DenseWeight

_WRAPPERS = ("language_model.", "model.")
"""Prefixes that tools put before a matrix's name, or leave away, in settings for single matrices."""


@dataclass(frozen=True)
class GroupSettings:
    """Bits per code, and codes per scale."""

    bits: int
    group_size: int


@dataclass(frozen=True)
class Quantization:
    """The `quantization` section of config.json."""

    default: GroupSettings
    overrides: Mapping[str, GroupSettings | None]  # by bare name (`_bare`); None: not quantized

    def of(self, matrix: str) -> GroupSettings | None:
        """Settings of a matrix, by its name without ".weight"."""
        return self.overrides.get(_bare(matrix), self.default)


def read_quantization(config: Settings) -> Quantization | None:
    """The section `quantization`, or `quantization_config` if that alone is there; None without either.

    Settings for matrices that do not exist are ignored.

    Raises:
        ModelFileError: quantized by another method or mode, or a value is missing or unusable.
    """
    section = config.section("quantization") or config.section("quantization_config")
    if section is None:
        return None
    method = section.text("quant_method")
    if method is not None:
        raise section.error(
            f"safetensors quantized by {shown(method)} are not supported; "
            "use the original checkpoint, one in MLX's affine form, or a GGUF file"
        )
    default = _group_settings(section, GroupSettings(0, 0))
    overrides: dict[str, GroupSettings | None] = {}
    for name, value in section.values.items():
        if name in ("bits", "group_size", "mode", "quant_method"):
            continue
        bare, settings = _bare(name), _override(section, name, value, default)
        if overrides.get(bare, settings) != settings:
            raise section.error(f"{shown(name)} is set twice, differently, under names that mean one matrix")
        overrides[bare] = settings
    return Quantization(default, overrides)


def join_quantized(
    where: str, tensors: Mapping[str, SafeTensor], quantization: Quantization
) -> dict[str, SafeTensor | AffineWeight]:
    """The tensors with each quantized matrix as one weight under the name X.weight.

    Raises:
        ModelFileError: a part of a matrix is missing, or its type or shape contradicts the settings.
    """
    joined: dict[str, SafeTensor | AffineWeight] = dict(tensors)
    for name in tensors:
        matrix, _, part = name.rpartition(".")
        if part == "scales":
            joined[f"{matrix}.weight"] = _join(where, matrix, tensors, quantization.of(matrix))
            del joined[name], joined[f"{matrix}.biases"]
    return joined


def _bare(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.removeprefix(wrapper)
    return name


def _override(section: Settings, name: str, value: object, default: GroupSettings) -> GroupSettings | None:
    if isinstance(value, bool):
        return default if value else None
    if not isinstance(value, dict):
        raise section.error(f"{shown(name)} is {shown(value)}; true, false or an object is expected")
    return _group_settings(Settings(f"{section.where}: {shown(name)}", value), default)


def _group_settings(section: Settings, default: GroupSettings) -> GroupSettings:
    """Bits and group size of a section; what it lacks is the default's."""
    mode = section.text("mode")
    if mode not in (None, "affine"):
        raise section.error(
            f"mode {shown(mode)} is not supported; quantize with mode 'affine', or use a GGUF file"
        )
    bits = section.integer("bits") or default.bits
    group_size = section.integer("group_size") or default.group_size
    if bits not in MLX_BITS:
        raise section.error(f"bits is {bits or 'missing'}; supported: {', '.join(map(str, MLX_BITS))}")
    if group_size not in MLX_GROUP_SIZES:
        known = ", ".join(map(str, MLX_GROUP_SIZES))
        raise section.error(f"group_size is {group_size or 'missing'}; supported: {known}")
    return GroupSettings(bits, group_size)


def _join(
    where: str, matrix: str, tensors: Mapping[str, SafeTensor], settings: GroupSettings | None
) -> AffineWeight:
    def error(problem: str) -> ModelFileError:
        return ModelFileError(f"{where}: quantized matrix {matrix!r}: {problem}")

    codes, scales, biases = (tensors.get(f"{matrix}.{part}") for part in ("weight", "scales", "biases"))
    if codes is None or biases is None:
        raise error(f"{matrix}.{'weight' if codes is None else 'biases'} is missing")
    if settings is None:
        raise error("config.json says that it is not quantized, but it has scales")
    if not isinstance(codes, PackedCodes):
        raise error(f"weight has type {codes.format_name} and shape {codes.shape}; a U32 matrix is expected")
    if not isinstance(scales, DenseWeight) or not isinstance(biases, DenseWeight):
        raise error("scales and biases must be F32, F16 or BF16")
    if (scales.format_name, scales.shape) != (biases.format_name, biases.shape):
        raise error(
            f"scales are {scales.format_name} {scales.shape}, biases {biases.format_name} {biases.shape}; "
            "they must be alike"
        )
    rows, words = codes.shape
    inputs, rest = divmod(32 * words, settings.bits)
    if rest or inputs % settings.group_size or scales.shape != (rows, inputs // settings.group_size):
        raise error(
            f"weight {codes.shape} and scales {scales.shape} do not fit {settings.bits} bits in groups of "
            f"{settings.group_size}, as config.json has it"
        )
    name = mlx_format_name(settings.bits, settings.group_size, scales.format_name)
    return AffineWeight(f"{matrix}.weight", MLX_FORMATS[name], codes.stored, scales.stored, biases.stored)
