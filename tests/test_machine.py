"""Workers of the tests follow what the process may use, not what the machine has."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests import machine


@pytest.fixture
def sixteen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files of a machine with 16 cores of two threads each, and 100 GB left."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(32)), raising=False)
    for cpu in range(32):
        write(
            tmp_path / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list", f"{cpu % 16},{cpu % 16 + 16}\n"
        )
    write(tmp_path / "proc/meminfo", f"MemTotal: 1 kB\nMemAvailable: {100 * 2**20} kB\n")
    return tmp_path


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def test_threads_of_one_core_count_once(sixteen: Path) -> None:
    assert machine.cores(sixteen) == machine.workers(sixteen) == 16


def test_an_affinity_limits_the_cores(sixteen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 4, 19}, raising=False)
    assert machine.cores(sixteen) == 2


def test_a_machine_that_says_nothing_of_its_threads_has_a_core_for_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2}, raising=False)
    assert (machine.cores(tmp_path), machine.memory(tmp_path), machine.workers(tmp_path)) == (3, None, 3)


@pytest.mark.parametrize(("limit", "expected"), [("max 100000", 16), ("350000 100000", 3), ("50000 100000", 1)])
def test_the_quota_of_a_container_limits_the_cores(sixteen: Path, limit: str, expected: int) -> None:
    write(sixteen / "sys/fs/cgroup/cpu.max", limit)
    assert machine.cores(sixteen) == expected


def test_the_quota_of_any_group_around_the_process_limits_the_cores(sixteen: Path) -> None:
    write(sixteen / "proc/self/cgroup", "0::/slice/unit\n")
    write(sixteen / "sys/fs/cgroup/slice/unit/cpu.max", "max 100000")
    write(sixteen / "sys/fs/cgroup/slice/cpu.max", "400000 100000")
    assert machine.cores(sixteen) == 4


def test_control_groups_of_version_1_limit_cores_and_memory(sixteen: Path) -> None:
    write(sixteen / "proc/self/cgroup", "5:cpu,cpuacct:/docker/1\n4:memory:/docker/1\n")
    write(sixteen / "sys/fs/cgroup/cpu,cpuacct/docker/1/cpu.cfs_quota_us", "200000")
    write(sixteen / "sys/fs/cgroup/cpu,cpuacct/docker/1/cpu.cfs_period_us", "100000")
    write(sixteen / "sys/fs/cgroup/memory/memory.limit_in_bytes", str(8 * 2**30))
    write(sixteen / "sys/fs/cgroup/memory/memory.usage_in_bytes", str(2**30))
    assert machine.cores(sixteen) == 2
    assert machine.memory(sixteen) == 7 * 2**30


def test_every_worker_has_memory_and_there_is_always_one(sixteen: Path) -> None:
    write(sixteen / "sys/fs/cgroup/memory.max", str(11 * 2**30))
    write(sixteen / "sys/fs/cgroup/memory.current", str(2 * 2**30))
    assert machine.workers(sixteen) == 3
    write(sixteen / "sys/fs/cgroup/memory.current", str(10 * 2**30))
    assert machine.workers(sixteen) == 1


def test_this_machine_has_at_least_one_core_and_one_worker() -> None:
    assert 1 <= machine.workers() <= machine.cores() <= (os.cpu_count() or 1)
