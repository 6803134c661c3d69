"""How much of a mapped file this process holds in memory, as Linux counts it."""

from __future__ import annotations

from pathlib import Path

SMAPS = Path("/proc/self/smaps")


def resident_bytes(path: Path) -> int:
    """Bytes of the mappings of `path` that are in memory."""
    total, within = 0, False
    for line in SMAPS.read_text().splitlines():
        field = line.split()[0]
        if "-" in field:
            within = line.endswith(f" {path}")
        elif field == "Rss:" and within:
            total += int(line.split()[1]) << 10
    return total
