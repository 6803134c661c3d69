"""The one door to models on disk."""

from __future__ import annotations

from pathlib import Path

from mvllm.core.errors import ModelFileError
from mvllm.core.load.contents import Checkpoint
from mvllm.core.load.gguf import MAGIC
from mvllm.core.load.gguf_model import load_gguf_model
from mvllm.core.load.hf_model import load_hf_model


def load_checkpoint(path: Path, *, mmap: bool = True) -> Checkpoint:
    """Load a model: a GGUF file, or a folder with config.json and safetensors files.

    Args:
        mmap: map the weights (default), or read them into memory: for network file systems on which
            mapping is slow.

    Raises:
        ModelFileError: nothing is there, it is of another kind, damaged, or not supported; the message says
            which.
    """
    if path.is_dir():
        return load_hf_model(path, mmap=mmap)
    if not path.exists():
        raise ModelFileError(f"{path}: no such file or folder")
    if not path.is_file():  # reading a pipe or a device could take for ever
        raise ModelFileError(f"{path}: neither a file nor a folder")
    if path.suffix.lower() == ".gguf" or _magic(path) == MAGIC:
        return load_gguf_model(path, mmap=mmap)
    raise ModelFileError(
        f"{path}: not a model; accepted are a GGUF file, or a folder with config.json and .safetensors files"
    )


def _magic(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC))
    except OSError as error:
        raise ModelFileError(f"{path}: can't be read: {error.strerror or error}") from error
