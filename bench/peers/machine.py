"""What a measurement depends on: machine, versions, date."""

from __future__ import annotations

import datetime
import hashlib
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import mvllm.backends
import mvllm.core


def facts() -> dict[str, str]:
    """Of this process."""
    return {
        "machine": f"{_processor()}, {platform.machine()}, {os.cpu_count()} logical processors",
        "system": f"{platform.system()} {platform.release()}",
        "Python": platform.python_version(),
        **{name: _version(name) for name in ("numba", "llvmlite", "numpy")},
        "mvllm": mvllm.__version__,
        "date": datetime.date.today().isoformat(),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown processor"
    fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    name = fields.get("model name", "unknown processor")
    if "cpu family" in fields:  # virtual machines often hide the model's real name
        name += f" (family {fields['cpu family']}, model {fields.get('model', '?')})"
    return name


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def sources() -> str:
    """Hash of the sources that this process imports: two trees of the same version may differ."""
    digest = hashlib.sha256()
    for package in (mvllm.core, mvllm.backends):
        folder = Path(package.__path__[0])
        for path in sorted(folder.rglob("*.py")):
            digest.update(f"{path.relative_to(folder)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]
