"""Memory of the host that is left."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

# of a group: its limit, what it takes, and of that what the kernel gives up when asked
_FILES = {
    "": ("memory.max", "memory.current", "inactive_file"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def memory_left() -> int | None:
    """Bytes that are left to the machine and to the container or job, or None where nobody says."""
    left = list[int]()
    with contextlib.suppress(OSError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        left = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")]
    for group, (limit, used, cached) in _groups():
        with contextlib.suppress(OSError, ValueError, KeyError):  # "max" is no limit
            most, taken = (int((group / name).read_text()) for name in (limit, used))
            stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            left.append(most - taken + int(stat[cached]))
    return min(left, default=None)


def _groups(
    proc: Path = Path("/proc/self/cgroup"),
    root: Path = Path("/sys/fs/cgroup"),
) -> Iterator[tuple[Path, tuple[str, str, str]]]:
    """The groups of this process and those above them."""
    own = {"": "/", "memory": "/"}
    with contextlib.suppress(OSError):
        for line in proc.read_text().splitlines():
            _, kinds, place = line.split(":", 2)
            own |= {kind: place for kind in kinds.split(",") if kind in own}
    for kind, place in own.items():
        inner = (root / kind / place.lstrip("/")).resolve()
        for group in (
            inner,
            *inner.parents,
            root / kind,
        ):  # which a path of another namespace may not reach
            if group.is_relative_to(root):
                yield group, _FILES[kind]
