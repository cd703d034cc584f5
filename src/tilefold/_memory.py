"""Memory of the host that is left."""

from __future__ import annotations

import contextlib
from pathlib import Path

_GROUPS = (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"))


def memory_left() -> int | None:
    """Bytes that are left to the machine and to the container, or None where nobody says."""
    left, group = [], Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        left = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")]
    for limit, used in _GROUPS:
        with contextlib.suppress(OSError, ValueError):  # "max" is no limit
            left.append(int((group / limit).read_text()) - int((group / used).read_text()))
    return min(left, default=None)
