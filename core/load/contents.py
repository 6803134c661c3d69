"""What a loader returns: the parts of a checkpoint as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from mvllm.core.model.spec import ModelSpec
from mvllm.core.tensor import ModelWeights
from mvllm.core.text.assets import TextAssets


@dataclass(frozen=True)
class GenerationDefaults:
    """Sampling settings that the checkpoint recommends; None where it says nothing."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    repetition_penalty: float | None = None


class TensorInfo(NamedTuple):
    """One tensor as the file has it."""

    name: str
    format_name: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True)
class Checkpoint:
    """A model on disk, ready to be given to a backend. Weights are views of the files."""

    path: Path
    format: str  # "gguf" or "safetensors"
    spec: ModelSpec
    weights: ModelWeights
    text: TextAssets
    generation: GenerationDefaults
    file_bytes: int  # of all files with weights
    metadata: Mapping[str, object]  # the file's own settings, long arrays as a description
    tensors: tuple[TensorInfo, ...]  # in the file's order
