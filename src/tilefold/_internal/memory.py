"""Free memory of the machine, and of the container or job that this process runs in."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

# Name of a cgroup controller ("" for cgroup v2) -> files with the limit and the used memory, and
# the entry of memory.stat with the cached memory, which the kernel frees on demand.
_FILES = {
    "": ("memory.max", "memory.current", "inactive_file"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def memory_left() -> int | None:
    """Return the memory that this process can still use.

    It is limited by the free memory of the machine, and by the limits of the cgroups of the
    process, by which containers and batch systems limit their jobs.

    Returns:
        Bytes, or None where the system does not report them.
    """
    free: list[int] = []  # by each limit, of which the lowest counts
    with contextlib.suppress(OSError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        # A line is "MemAvailable: <number> kB", where kB means 1,024 bytes.
        free = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")]
    for group, (limit_file, used_file, cached_entry) in _groups():
        with contextlib.suppress(OSError, ValueError, KeyError):  # "max" means no limit
            limit = int((group / limit_file).read_text())
            used = int((group / used_file).read_text())
            stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            # The kernel frees cached memory on demand, although it counts as used.
            free.append(limit - used + int(stat[cached_entry]))
    return min(free, default=None)


def _groups(
    proc: Path = Path("/proc/self/cgroup"),
    root: Path = Path("/sys/fs/cgroup"),
) -> Iterator[tuple[Path, tuple[str, str, str]]]:
    """Iterate over the cgroups of this process and their parents.

    Args:
        proc: file with the cgroups of this process.
        root: where cgroups are mounted.

    Yields:
        The folder of a group, and names of its files with the limit and the used memory, and of the
        entry of ``memory.stat`` with the cached memory.
    """
    group_by_controller = {"": "/", "memory": "/"}
    with contextlib.suppress(OSError):
        for line in proc.read_text().splitlines():
            # A line is "number:controllers:path". Controllers are empty for cgroup v2.
            _, controllers, group_path = line.split(":", 2)
            for controller in controllers.split(","):
                if controller in group_by_controller:
                    group_by_controller[controller] = group_path
    for controller, group_path in group_by_controller.items():
        controller_root = root / controller
        group = (controller_root / group_path.lstrip("/")).resolve()
        # A path of another namespace may lead out of the root, which is then a group by itself.
        for folder in (group, *group.parents, controller_root):
            if folder.is_relative_to(root):
                yield folder, _FILES[controller]
