"""mvllm: an LLM inference engine in pure Python.

from mvllm import LLM, SamplingParams

with LLM() as llm:
    [output] = llm.generate("The capital of France is", SamplingParams(temperature=0))
    print(output.outputs[0].text)
"""

from pathlib import Path as _Path

if not (_Path(__file__).parent / "core").is_dir():
    # In a clone the sub-packages' folders lie beside this one, not in it.
    __path__.append(str(_Path(__file__).parent.parent))

from mvllm.core.config import EngineConfig
from mvllm.core.errors import (
    BackendUnavailable,
    CapacityError,
    ConfigError,
    DownloadError,
    EngineClosed,
    InvariantViolation,
    ModelFileError,
    MvllmError,
    RequestRejected,
    TemplateError,
)
from mvllm.core.request import (
    CompletionOutput,
    Logprob,
    RequestMetrics,
    RequestOutput,
    SamplingParams,
    TokenLogprobs,
)
from mvllm.core.spec.drafter import Drafter, DraftRow
from mvllm.llm import LLM, Stream, StreamChunk

__all__ = [
    "LLM",
    "BackendUnavailable",
    "CapacityError",
    "CompletionOutput",
    "ConfigError",
    "DownloadError",
    "DraftRow",
    "Drafter",
    "EngineClosed",
    "EngineConfig",
    "InvariantViolation",
    "Logprob",
    "ModelFileError",
    "MvllmError",
    "RequestMetrics",
    "RequestOutput",
    "RequestRejected",
    "SamplingParams",
    "Stream",
    "StreamChunk",
    "TemplateError",
    "TokenLogprobs",
]

__version__ = "0.1.0"
