"""Skips tests that need a GPU where there is none, shares a machine among workers, makes property
tests repeatable.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import os
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.selection import mark_further_combinations
from tilefold._internal.memory import memory_left

if importlib.util.find_spec("hypothesis"):
    from hypothesis import settings

    settings.register_profile(
        "tilefold",
        deadline=None,
        derandomize=True,
        database=None,
        print_blob=True,
    )
    settings.load_profile("tilefold")

WORKER_BYTES = (
    3 * 2**30
)  # torch and transformers, the largest test (2.8 GB), and the processes that tests start
MOST_WORKERS = 16  # more finish no sooner: every one imports for seconds, and some files take a minute by themselves


def _cores() -> int:
    """Cores that this process may keep busy: those of its affinity, hyperthreads counted once,
    within its CPU quota.
    """
    if importlib.util.find_spec("joblib"):
        return int(importlib.import_module("joblib").cpu_count(only_physical_cores=True))
    return os.cpu_count() or 1


def _spread_over_gpus() -> None:
    """Where a machine has several GPUs, each worker sees them in another order: their first one is
    not the same.
    """
    worker, count = os.environ.get("PYTEST_XDIST_WORKER"), torch.cuda.device_count()
    if worker is None or count < 2 or torch.cuda.is_initialized():
        return
    names = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count)))).split(",")
    first = int(worker.removeprefix("gw")) % count
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(names[first:] + names[:first])


def _share_cores() -> None:
    """Workers divide the cores: were each to take all, their threads would wait for one another
    more than compute.
    """
    if "OMP_NUM_THREADS" in os.environ:
        return
    threads = max(1, _cores() // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))
    if threads < torch.get_num_threads():
        torch.set_num_threads(threads)
        os.environ["OMP_NUM_THREADS"] = str(threads)  # for the processes that tests start


def pytest_configure(config: pytest.Config) -> None:
    # Tests do not depend on the records of passed checks in the cache of this machine.
    os.environ.setdefault("TILEFOLD_SELF_CHECK", "always")
    _spread_over_gpus()
    _share_cores()
    if (
        os.environ.get("TRITON_INTERPRET") == "1"
    ):  # the interpreter computes tiles whole, padding included, in numpy
        config.addinivalue_line(
            "filterwarnings",
            "ignore:Conversion of an array with ndim:DeprecationWarning",
        )
        config.addinivalue_line("filterwarnings", "ignore::RuntimeWarning:triton")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """What ``-n auto`` means: a worker per core that the process may use, as long as each has
    memory.
    """
    left = memory_left()
    return max(
        1,
        min(_cores(), MOST_WORKERS, MOST_WORKERS if left is None else left // WORKER_BYTES),
    )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Files go to workers whole and in the order of :func:`_turn`, but compile gates, which share
    nothing, one by one.

    By itself xdist begins with files of many tests; the few tests of others, which take longest,
    would come last.
    """
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            if file.startswith("tests/distributed/"):
                return "tests/distributed"  # they share processes, which take longer to start than to use
            return nodeid if file.endswith(("_interpreted.py", "_compile.py")) else file

    config.option.loadscopereorder = False
    return Scheduling(config, log)


def _turn(item: pytest.Item) -> int:
    """What takes longest comes first; what is short and shared out test by test comes last."""
    file = item.path.name
    return (
        0
        if file.endswith(("_interpreted.py", "_ray.py"))
        else 2
        if file.endswith("_compile.py")
        else 1
    )


@pytest.hookimpl(tryfirst=True)  # markers are set before -m selects by them
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_further_combinations(items)
    items.sort(key=_turn)
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="no CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


def pytest_collection_finish() -> None:
    """Collecting garbage, which benchmarks do at every turn, need not look at what was imported:
    half a second each.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def small_heap() -> None:
    """Nor at what was made before a file, for the tests of what collects at every turn: benchmarks,
    and trainers.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """This process and those that it starts have one thread: on a CPU the order of sums depends on
    their number.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with mock.patch.dict(os.environ, OMP_NUM_THREADS="1"):
        yield
    torch.set_num_threads(before)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Where workers share a GPU, a test marked ``whole_gpu`` waits until it is alone, and the
    others wait for it.
    """
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    if run is None or not torch.cuda.is_available():
        return (yield)
    import fcntl

    alone = item.get_closest_marker("whole_gpu") is not None
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    with (Path(tempfile.gettempdir()) / f"tilefold-gpu-{run}-{gpu}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        return (yield)
