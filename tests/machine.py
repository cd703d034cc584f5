"""How many workers the tests may have on this machine: by cores, quotas of containers, and memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

WORKER_BYTES = 3 * 2**30  # torch and transformers, the largest test (2.8 GB), and the processes that tests start
MOST_WORKERS = 16  # more finish no sooner: every one imports for seconds, and some files take a minute by themselves


def cores(root: Path = Path("/")) -> int:
    """Cores that this process may keep busy: those of its affinity, hyperthreads counted once, within its CPU quota."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    files = [root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list" for cpu in allowed]
    found = len({_read(file) or str(file) for file in files})
    for quota in _quotas(root):
        found = min(found, int(quota))
    return max(1, found)


def memory(root: Path = Path("/")) -> int | None:
    """Bytes that are left, to the machine or to the container, or ``None`` where nobody says."""
    left = [int(line.split()[1]) * 1024 for line in _read(root / "proc/meminfo").splitlines() if "MemAvailable" in line]
    for group in _groups(root):
        for limit, used in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            most = _read(group / limit)
            if most.isdigit():
                left.append(int(most) - int(_read(group / used) or 0))
    return min(left, default=None)


def workers(root: Path = Path("/")) -> int:
    """One for every core, as long as each has the memory that it may need."""
    left = memory(root)
    fit = MOST_WORKERS if left is None else left // WORKER_BYTES
    return max(1, min(cores(root), fit, MOST_WORKERS))


def _quotas(root: Path) -> Iterator[float]:
    for group in _groups(root):
        quota, _, period = _read(group / "cpu.max").partition(" ")  # version 2
        if not quota:
            quota, period = _read(group / "cpu.cfs_quota_us"), _read(group / "cpu.cfs_period_us")  # version 1
        if quota.isdigit() and period.isdigit():
            yield int(quota) / int(period)


def _groups(root: Path) -> Iterator[Path]:
    """The folders of this process's control groups and of those around them; a container sees its own at the top."""
    for line in ["0::/", *_read(root / "proc/self/cgroup").splitlines()]:
        _, controllers, name = line.split(":", 2)
        top = root / "sys/fs/cgroup"
        for place in [top / controllers, *(top / each for each in controllers.split(",") if controllers)]:
            folder = place / name.strip("/")
            while folder != place:
                yield folder
                folder = folder.parent
            yield place


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""
