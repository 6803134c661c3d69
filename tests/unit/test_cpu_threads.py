"""How many threads the cpu backend takes: affinity, container quota and physical cores (REQUIREMENTS Q5)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from mvllm.backends.cpu import threads


def fake_root(folder: Path, files: Mapping[str, str]) -> Path:
    """A file system with just these files below `folder`."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return folder


V2 = {"proc/self/cgroup": "0::/app/inner"}
V1 = {"proc/self/cgroup": "5:memory:/x\n4:cpu,cpuacct:/docker/abc\n1:name=systemd:/"}
QUOTAS: list[tuple[Mapping[str, str], float | None]] = [
    ({}, None),
    (V2, None),
    ({**V2, "sys/fs/cgroup/app/inner/cpu.max": "max 100000"}, None),
    ({**V2, "sys/fs/cgroup/app/inner/cpu.max": "250000 100000"}, 2.5),
    ({**V2, "sys/fs/cgroup/app/cpu.max": "50000 100000"}, 0.5),
    (
        {
            **V2,
            "sys/fs/cgroup/app/inner/cpu.max": "800000 100000",
            "sys/fs/cgroup/app/cpu.max": "300000 100000",
        },
        3.0,
    ),
    ({**V2, "sys/fs/cgroup/cpu.max": "400000 100000"}, 4.0),
    (
        {
            **V1,
            "sys/fs/cgroup/cpu,cpuacct/docker/abc/cpu.cfs_quota_us": "-1",
            "sys/fs/cgroup/cpu,cpuacct/docker/abc/cpu.cfs_period_us": "100000",
        },
        None,
    ),
    (
        {
            **V1,
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "150000",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "50000",
        },
        3.0,
    ),
    (
        {
            **V1,
            "sys/fs/cgroup/cpu/docker/abc/cpu.cfs_quota_us": "700000",
            "sys/fs/cgroup/cpu/docker/abc/cpu.cfs_period_us": "100000",
        },
        7.0,
    ),
    ({**V2, "sys/fs/cgroup/app/inner/cpu.max": "nonsense"}, None),
]


@pytest.mark.parametrize("case", QUOTAS, ids=range(len(QUOTAS)))
def test_the_tightest_quota_of_any_group_above_counts(
    case: tuple[Mapping[str, str], float | None], tmp_path: Path
) -> None:
    files, expected = case
    assert threads.cpu_quota(fake_root(tmp_path, files)) == expected


def test_hyperthreads_of_a_core_count_once(tmp_path: Path) -> None:
    topology = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    pairs = {topology.format(cpu): f"{cpu % 4},{cpu % 4 + 4}" for cpu in range(8)}
    root = fake_root(tmp_path, pairs)
    assert threads.physical_cores(range(8), root) == 4
    assert threads.physical_cores([0, 4, 5], root) == 2


def test_cpus_without_topology_count_as_cores(tmp_path: Path) -> None:
    assert threads.physical_cores(range(3), tmp_path) == 3


@pytest.mark.parametrize(
    ("cpus", "quota", "expected"), [(16, "250000 100000", 2), (1, "800000 100000", 1), (4, "50000 100000", 1)]
)
def test_the_default_is_the_smallest_limit_and_at_least_one(
    cpus: int, quota: str, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "usable_cpus", lambda: range(cpus))
    root = fake_root(tmp_path, {**V2, "sys/fs/cgroup/app/inner/cpu.max": quota})
    assert threads.default_threads(root) == expected
