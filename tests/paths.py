"""Where tests find data that is not in the repository; None where it is absent."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def _existing(path: Path) -> Path | None:
    return path if path.is_dir() else None


SHARED = _existing(ROOT.parent / "shared")
"""Golden data kept beside the repository by its maintainers."""

MODELS = _existing(Path(os.environ["MVLLM_TEST_MODELS"])) if "MVLLM_TEST_MODELS" in os.environ else None
"""Folder with the larger GGUF models, named by the environment."""
