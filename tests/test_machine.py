"""Workers of the tests follow what the process may use, not what the machine has."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests import machine

GROUP, GIB = "sys/fs/cgroup", 2**30


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


@pytest.fixture
def sixteen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files of a machine with 16 cores of two threads each, and 100 GB left."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(32)), raising=False)
    siblings = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    write(tmp_path, {siblings.format(cpu): f"{cpu % 16},{cpu % 16 + 16}\n" for cpu in range(32)})
    write(tmp_path, {"proc/meminfo": f"MemTotal: 1 kB\nMemAvailable: {100 * 2**20} kB\n"})
    return tmp_path


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        pytest.param({}, 16, id="threads of one core count once"),
        ({f"{GROUP}/cpu.max": "max 100000"}, 16),
        ({f"{GROUP}/cpu.max": "350000 100000"}, 3),
        ({f"{GROUP}/cpu.max": "50000 100000"}, 1),
        pytest.param(
            {"proc/self/cgroup": "0::/slice/unit\n", f"{GROUP}/slice/unit/cpu.max": "max 100000",
             f"{GROUP}/slice/cpu.max": "400000 100000"}, 4, id="any group around the process",
        ),
        pytest.param(
            {"proc/self/cgroup": "5:cpu,cpuacct:/docker/1\n4:memory:/docker/1\n",
             f"{GROUP}/cpu,cpuacct/docker/1/cpu.cfs_quota_us": "200000",
             f"{GROUP}/cpu,cpuacct/docker/1/cpu.cfs_period_us": "100000"}, 2, id="version 1",
        ),
    ],
)  # fmt: skip
def test_the_quota_of_a_container_limits_the_cores(sixteen: Path, files: dict[str, str], cores: int) -> None:
    write(sixteen, files)
    assert machine.cores(sixteen) == machine.workers(sixteen) == cores


def test_an_affinity_limits_the_cores(sixteen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 4, 19}, raising=False)
    assert machine.cores(sixteen) == 2
    silent = sixteen / "nothing is said of threads"
    assert (machine.cores(silent), machine.memory(silent), machine.workers(silent)) == (3, None, 3)


def test_every_worker_has_memory_and_there_is_always_one(sixteen: Path) -> None:
    for used, workers in ((2, 3), (10, 1)):
        write(sixteen, {f"{GROUP}/memory.max": str(11 * GIB), f"{GROUP}/memory.current": str(used * GIB)})
        assert machine.workers(sixteen) == workers
    old = f"{GROUP}/memory/docker/1/memory"
    write(sixteen, {"proc/self/cgroup": "4:memory:/docker/1\n", f"{GROUP}/memory.max": "max"})
    write(sixteen, {f"{old}.limit_in_bytes": str(8 * GIB), f"{old}.usage_in_bytes": str(GIB)})
    assert machine.memory(sixteen) == 7 * GIB


def test_this_machine_has_at_least_one_core_and_one_worker() -> None:
    assert 1 <= machine.workers() <= machine.cores() <= (os.cpu_count() or 1)
