"""How many threads a team should have: never more than the machine, the affinity and the container allow."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

_ROOT = Path("/")


def default_threads(root: Path = _ROOT) -> int:
    """min(affinity, floor of the container's CPU quota, physical cores), at least 1.

    A thread more than the quota makes the others spin at barriers for one that is throttled. `root` is where
    /proc and /sys are looked for.
    """
    cpus = usable_cpus()
    limits = [len(cpus), physical_cores(cpus, root)]
    quota = cpu_quota(root)
    if quota is not None:
        limits.append(int(quota))
    return max(1, min(limits))


def usable_cpus() -> Collection[int]:
    """Logical CPUs that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return range(os.cpu_count() or 1)


def physical_cores(cpus: Collection[int], root: Path = _ROOT) -> int:
    """Number of different cores behind the logical CPUs; their own number where the system does not tell."""
    cores = set()
    for cpu in cpus:
        siblings = _read(root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        cores.add(siblings or str(cpu))
    return len(cores)


def cpu_quota(root: Path = _ROOT) -> float | None:
    """CPUs' worth of time that the tightest control group above this process allows; None without a limit.

    Reads version 2 (`cpu.max`) and version 1 (`cpu.cfs_quota_us`) hierarchies.
    """
    quotas = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            for folder in _up(root / "sys/fs/cgroup", path):
                quotas.append(_quota_v2(folder))
        elif "cpu" in controllers.split(","):
            for mount in (controllers, "cpu"):
                for folder in _up(root / "sys/fs/cgroup" / mount, path):
                    quotas.append(_quota_v1(folder))
    return min((quota for quota in quotas if quota is not None), default=None)


def _up(mount: Path, path: str) -> list[Path]:
    """The group's folder and all above it. Inside a container only the upper ones may exist."""
    folder = mount / path.lstrip("/")
    return [folder, *[parent for parent in folder.parents if parent.is_relative_to(mount)]]


def _quota_v2(folder: Path) -> float | None:
    fields = _read(folder / "cpu.max").split()
    if len(fields) != 2 or not all(field.isdigit() for field in fields):
        return None
    return int(fields[0]) / int(fields[1])


def _quota_v1(folder: Path) -> float | None:
    quota, period = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() else None


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
