"""Where files are kept between runs: fetched models, compiled kernels."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def cache_folder(environment: Mapping[str, str], platform: str) -> Path:
    """$MVLLM_CACHE, or the folder "mvllm" where the platform keeps a user's caches. Makes no folder.

    Args:
        environment: the process's environment variables.
        platform: as `sys.platform` names it.

    Raises:
        RuntimeError: the user has no home folder, and no variable names another one.
    """
    if chosen := environment.get("MVLLM_CACHE"):
        return Path(chosen).expanduser()
    return _user_caches(environment, platform) / "mvllm"


def _user_caches(environment: Mapping[str, str], platform: str) -> Path:
    configured = environment.get("XDG_CACHE_HOME")
    if configured and Path(configured).is_absolute():
        return Path(configured)
    if platform == "win32" and environment.get("LOCALAPPDATA"):
        return Path(environment["LOCALAPPDATA"])
    if platform == "darwin":
        return Path.home() / "Library" / "Caches"
    return Path.home() / ".cache"
