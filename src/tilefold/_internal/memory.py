"""Free memory of the machine, of the container or job of this process, and of a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

_CGROUPS_OF_PROCESS = Path("/proc/self/cgroup")
_CGROUP_MOUNT = Path("/sys/fs/cgroup")


class _MemoryFiles(NamedTuple):
    """Names of the files of a cgroup that describe its memory.

    Attributes:
        limit: file with the limit in bytes, or ``max``.
        used: file with the used bytes, which include cached files.
        cached_entry: entry of ``memory.stat`` with the cached bytes that the kernel can free.
    """

    limit: str
    used: str
    cached_entry: str


_V2_FILES = _MemoryFiles("memory.max", "memory.current", "inactive_file")
_V1_FILES = _MemoryFiles("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def memory_left() -> int | None:
    """Return the number of bytes of memory that this process can still use.

    Two things limit it: the free memory of the machine, and the limits of the process's cgroups,
    which containers and batch systems set.

    Returns:
        Bytes, or None if the system does not report them.
    """
    bytes_left: list[int] = []  # of the machine and of each cgroup
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            # A line is "MemAvailable: <number> kB", where kB means 1,024 bytes.
            if line.startswith("MemAvailable"):
                bytes_left.append(int(line.split()[1]) * 1024)
    for folder, files in _memory_cgroups(_CGROUPS_OF_PROCESS, _CGROUP_MOUNT):
        with contextlib.suppress(OSError, ValueError, KeyError):  # a limit "max" means no limit
            bytes_left.append(_cgroup_memory_left(folder, files))
    return min(bytes_left, default=None)


def free_device_bytes(device: torch.device | str) -> int:
    """Return the number of bytes of a GPU's memory that this process can still use.

    Args:
        device: device such as ``"cuda"`` or ``"cuda:1"``.
    """
    import torch

    free_bytes, _ = torch.cuda.mem_get_info(device)
    return int(free_bytes) + cached_device_bytes(device) - _bytes_cached_for_graphs(device)


def _bytes_cached_for_graphs(device: torch.device | str) -> int:
    """Return the number of bytes that torch caches, and that only CUDA graphs can use.

    The memory that a graph uses while it runs does not count as allocated, but no new tensor can
    use it.

    Args:
        device: device such as ``"cuda"`` or ``"cuda:1"``.
    """
    import torch

    if torch.cuda.get_allocator_backend() != "native":  # others do not list their memory
        return 0
    with torch.cuda.device(device):
        index = torch.cuda.current_device()
    segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
    default_pool = (0, 0)  # of usual tensors; graphs have pools of their own
    return sum(
        segment["total_size"] - segment["allocated_size"]
        for segment in segments
        if segment["device"] == index and segment["segment_pool_id"] != default_pool
    )


def cached_device_bytes(device: torch.device | str) -> int:
    """Return the number of bytes of a GPU's memory that torch keeps for new tensors.

    Args:
        device: device such as ``"cuda"`` or ``"cuda:1"``.
    """
    import torch

    return torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def _cgroup_memory_left(folder: Path, files: _MemoryFiles) -> int:
    """Return the number of bytes that the processes of a cgroup can still use.

    Args:
        folder: folder of the cgroup.
        files: names of its files.

    Raises:
        OSError, ValueError, KeyError: if the cgroup has no limit.
    """
    limit = int((folder / files.limit).read_text())
    used = int((folder / files.used).read_text())
    stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    # The kernel frees cached memory on demand, although it counts as used.
    return limit - used + int(stat[files.cached_entry])


def _memory_cgroups(
    cgroups_of_process: Path,
    mount: Path,
) -> Iterator[tuple[Path, _MemoryFiles]]:
    """Iterate over the cgroups (Linux's groups of processes) that limit the memory of a process.

    A cgroup is followed by all its parents, because their limits apply, too.

    Args:
        cgroups_of_process: a file such as ``/proc/self/cgroup``.
        mount: folder at which cgroups are mounted.

    Yields:
        The folder of each cgroup, and the names of its files with the limit and the usage. Folders
        may not exist.
    """
    # A process without a line for a version of cgroups belongs to the root of this version.
    v2_path = "/"
    v1_path = "/"
    with contextlib.suppress(OSError):
        for line in cgroups_of_process.read_text().splitlines():
            # A line is "number:controllers:path". cgroup v2 has no controllers.
            _, controllers, path = line.split(":", 2)
            if not controllers:
                v2_path = path
            elif "memory" in controllers.split(","):
                v1_path = path
    for folder in _with_parents(mount, v2_path):
        yield folder, _V2_FILES
    for folder in _with_parents(mount / "memory", v1_path):
        yield folder, _V1_FILES


def _with_parents(mount: Path, path: str) -> Iterator[Path]:
    """Iterate over the folders of a cgroup and its parents.

    In a container, the path may be that on the host, which is not below the mount. The mounted
    folder itself is then the container's cgroup.

    Args:
        mount: folder at which cgroups are mounted.
        path: path of a cgroup below it, as ``/proc/self/cgroup`` shows it.
    """
    root = mount.resolve()
    folder = (root / path.lstrip("/")).resolve()
    for candidate in (folder, *folder.parents):
        is_below_root = candidate.is_relative_to(root) and candidate != root
        if is_below_root:
            yield candidate
    yield root


def drop_memory(tensors: Iterable[torch.Tensor]) -> None:
    """Make tensors empty, and free their memory without the GIL.

    Memory that other tensors use too is not freed. Python holds the GIL while it deletes an object.
    All threads would wait while the system unmaps a large file, which may take long in a process on
    many cores. Functions of torch release the GIL, so one of them drops the last reference here.
    The GIL is held nevertheless if Python has an object for the storage of a tensor, as
    ``untyped_storage()`` creates it.

    Args:
        tensors: tensors that nothing reads any more.
    """
    import torch

    # Buffers that a forward created, such as rotary frequencies, may only be changed in this mode.
    with torch.inference_mode():
        for tensor in tensors:
            # Sparse and quantized tensors have no storage that can be replaced, and stay.
            with contextlib.suppress(RuntimeError):
                tensor.set_(tensor.new_empty(0).untyped_storage())
