"""Skips tests that need a GPU where there is none, shares one among workers, and makes property tests repeatable."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from collections.abc import Generator
from pathlib import Path

import pytest
import torch

if importlib.util.find_spec("hypothesis"):
    from hypothesis import settings

    settings.register_profile("tilefold", deadline=None, derandomize=True, database=None, print_blob=True)
    settings.load_profile("tilefold")


def _spread_over_gpus() -> None:
    """Where a machine has several GPUs, each worker sees them in another order: their first one is not the same."""
    worker, count = os.environ.get("PYTEST_XDIST_WORKER"), torch.cuda.device_count()
    if worker is None or count < 2 or torch.cuda.is_initialized():
        return
    names = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count)))).split(",")
    first = int(worker.removeprefix("gw")) % count
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(names[first:] + names[:first])


def pytest_configure(config: pytest.Config) -> None:
    _spread_over_gpus()
    if os.environ.get("TRITON_INTERPRET") == "1":  # the interpreter computes tiles whole, padding included, in numpy
        config.addinivalue_line("filterwarnings", "ignore:Conversion of an array with ndim:DeprecationWarning")
        config.addinivalue_line("filterwarnings", "ignore::RuntimeWarning:triton")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="no CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Where workers share a GPU, a test marked ``whole_gpu`` waits until it is alone, and the others wait for it."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    if run is None or not torch.cuda.is_available():
        return (yield)
    import fcntl

    alone = item.get_closest_marker("whole_gpu") is not None
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    with (Path(tempfile.gettempdir()) / f"tilefold-gpu-{run}-{gpu}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        return (yield)
