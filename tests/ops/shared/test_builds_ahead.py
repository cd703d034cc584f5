"""Kernels that background threads compile before their launch."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need triton")

from tests.kernels import triton_interpreted
from tests.ops.base import Launch, Plan, background, impl, internals
from tests.ops.contracts import cases, forget_calls
from tests.ops.contracts.contract import KernelCase
from tests.ops.launching import launch, wait_for_background_builds
from tests.waiting import WAIT_SECONDS

INTERPRETED = triton_interpreted()
kernels = pytest.mark.skipif(False, reason="") if INTERPRETED else pytest.mark.gpu
CASES: dict[str, KernelCase] = cases("kernels")
compiled_only = pytest.mark.skipif(
    INTERPRETED,
    reason="kernels are interpreted in this run, not compiled",
)


@pytest.fixture
def tasks() -> Iterator[Any]:
    """Two threads, none of which may be left at the end."""
    tasks = background.BackgroundTasks(2)
    yield tasks
    wait_for_background_builds()


def test_functions_with_different_keys_run_at_the_same_time(tasks: Any) -> None:
    all_run = threading.Barrier(3)  # both functions and this test
    for key in ("first", "second"):
        tasks.start(key, lambda: all_run.wait(WAIT_SECONDS))
    all_run.wait(WAIT_SECONDS)
    for key in ("first", "second"):
        tasks.wait_for(key)
    assert not all_run.broken


def test_a_key_that_runs_is_not_started_again(tasks: Any) -> None:
    runs = threading.Event()
    may_end = threading.Event()
    starts = []

    def run() -> None:
        starts.append(threading.current_thread().name)
        runs.set()
        may_end.wait(WAIT_SECONDS)

    tasks.start("kernel", run)
    assert runs.wait(WAIT_SECONDS)
    tasks.start("kernel", run)
    may_end.set()
    tasks.wait_for("kernel")
    wait_for_background_builds()
    assert len(starts) == 1


def test_the_caller_does_not_wait_for_a_function_that_has_not_begun(tasks: Any) -> None:
    may_end = threading.Event()
    both_run = threading.Barrier(3)

    def occupy() -> None:
        both_run.wait(WAIT_SECONDS)
        may_end.wait(WAIT_SECONDS)

    tasks.start("first", occupy)
    tasks.start("second", occupy)
    both_run.wait(WAIT_SECONDS)
    ran = []
    tasks.start("third", lambda: ran.append("third"))
    tasks.wait_for("third")
    may_end.set()
    wait_for_background_builds()
    assert not ran


def test_an_error_leaves_the_next_function_alone(tasks: Any) -> None:
    fails = threading.Event()
    next_runs = threading.Event()

    def fail() -> None:
        fails.set()
        raise RuntimeError("no such instruction")

    tasks.start("failing", fail)
    assert fails.wait(WAIT_SECONDS)
    tasks.wait_for("failing")
    tasks.start("next", next_runs.set)
    assert next_runs.wait(WAIT_SECONDS)
    wait_for_background_builds()


ENDING_PROCESS = """
import time
from tilefold.ops._shared.background import BackgroundTasks

tasks = BackgroundTasks(1)
for key in range(100_000):
    tasks.start(key, lambda: time.sleep(0.1))
"""


@pytest.mark.slow
def test_a_process_ends_after_the_functions_that_run() -> None:
    subprocess.run([sys.executable, "-c", ENDING_PROCESS], check=True, timeout=WAIT_SECONDS)


CROSS_BUILD = """
import contextlib, threading, time, warnings
import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.errors import TritonError
from triton.runtime import driver
from tilefold.ops._shared._triton import launch
from tilefold.ops._shared.background import BackgroundTasks
from tilefold.ops._shared.fallback import KernelUnavailableError
from tilefold.ops._shared.plan import Launch, Plan
from tilefold.ops.maxsim._triton.norms import quantize_kernel

class Gpu:  # what Triton asks of a driver before it compiles, and the function that launches
    get_current_device = get_current_stream = staticmethod(lambda *_: 0)
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
    launcher_cls = staticmethod(lambda source, metadata: None)

driver.set_active(Gpu())
torch.cuda.current_device = lambda: 0
torch.cuda.device = lambda device: contextlib.nullcontext()
launch.KERNEL_BUILDS = BackgroundTasks(2)
threads = []
both_compile = threading.Barrier(2)
warmup = triton.JITFunction.warmup

def observed_warmup(self, *arguments, **options):
    threads.append(threading.current_thread().name)
    if len(threads) <= 2:
        both_compile.wait(300)
    if options["BLOCK_R"] == 64:
        raise TritonError("no such instruction")
    return warmup(self, *arguments, **options)

triton.JITFunction.warmup = observed_warmup
threads_with_filters = set()
enter = warnings.catch_warnings.__enter__

def observed_enter(self):
    threads_with_filters.add(threading.current_thread().name)
    return enter(self)

warnings.catch_warnings.__enter__ = observed_enter
layouts = {
    "rows": torch.empty(4, 64, device="meta"),
    "out": torch.empty(4, 64, dtype=torch.int8, device="meta"),
    "scale": torch.empty(4, device="meta"),
}
def planned(block):
    constants = {"D": 64, "BLOCK_R": block, "BLOCK_D": 64, "num_warps": 4, "num_stages": 3}
    return Launch(quantize_kernel, (1, 1, 1), ("rows", "out", "scale"), (4,), constants)

plan = Plan(steps=(planned(16), planned(32), planned(64)))
device = torch.device("cuda", 0)
assert launch.start_plan(plan, layouts, {}, device, runs_now=True)
assert not launch.start_plan(plan, layouts, {}, device, runs_now=True)  # the same kernels
builds = launch.planned_builds(plan, layouts, {})
while len(threads) < 2:  # this thread would compile what has not begun
    time.sleep(0.01)
for build in builds[:2]:
    assert build().asm["cubin"]
try:
    builds[2]()
except KernelUnavailableError as error:
    assert str(error) == "quantize_kernel cannot be built (TritonError: no such instruction)"
else:
    raise AssertionError("the kernel that cannot be built was built")
assert len(threads) == 3, threads
assert "MainThread" not in threads[:2], threads
# filters belong to the process: threads that change them at the same time mix them up
assert threads_with_filters.isdisjoint(threads[:2]), threads_with_filters
while threading.active_count() > 1:
    time.sleep(0.01)
"""


@compiled_only
def test_kernels_of_a_plan_are_compiled_at_the_same_time_and_errors_name_the_kernel(
    tmp_path: Path,
) -> None:
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", CROSS_BUILD], check=True, env=environment)


# Kernels that are launched without a plan.
UNPLANNED = {"append_kernel", "quantize_rows_kernel"}


@kernels
@pytest.mark.parametrize("name", CASES)
def test_every_launch_of_a_plan_is_foreseen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    if case.hopper_only and (INTERPRETED or torch.cuda.get_device_capability() != (9, 0)):
        pytest.skip("another kernel runs on this device")
    foreseen: set[Any] = set()

    def foresee(plan: Any, tensors: Any, results: Any, device: Any, *, runs_now: bool) -> bool:
        foreseen.update(build.key for build in launch.planned_builds(plan, tensors, results))
        return True

    monkeypatch.setattr(launch, "start_plan", foresee)
    monkeypatch.setattr(impl, "takes_kernels", lambda device: True)
    forget_calls()
    with launch.recorded_builds() as launched:
        case.sample.results(case.sample.leaves(), {"impl": "triton", **case.sample.arguments()})
    forget_calls()
    unforeseen = {build.kernel.__name__ for key, build in launched.items() if key not in foreseen}
    assert unforeseen <= UNPLANNED
    assert launched


@pytest.mark.skipif(not INTERPRETED, reason="the device is a GPU in this run")
def test_gradients_are_foreseen_from_the_results_of_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from tilefold.ops.entmax_attention import api

    foreseen: list[Any] = []

    def foresee(plan: Any, tensors: Any, results: Any, device: Any, *, runs_now: bool) -> bool:
        foreseen.append(tensors)
        return True

    def chosen_impl(operator: str, name: str, tensor: torch.Tensor, impl: str = "auto") -> str:
        return "tiled" if tensor.is_meta else "triton"  # only a GPU would run the kernels

    monkeypatch.setattr(launch, "start_plan", foresee)
    monkeypatch.setattr(impl, "takes_kernels", lambda device: True)
    monkeypatch.setattr(api, "triton_interpreted", lambda: False)
    monkeypatch.setattr("tilefold.ops._shared.impl.chosen_impl", chosen_impl)
    forget_calls()
    sample = next(case.sample for name, case in CASES.items() if "entmax_attention" in name)
    sample.results(sample.leaves(), {"impl": "triton", **sample.arguments()})
    forget_calls()
    gradients = [tensors for tensors in foreseen if "dout" in tensors]
    assert gradients and gradients[0]["out2"].shape == gradients[0]["q"].shape


@pytest.mark.skipif(not INTERPRETED, reason="kernels are compiled in this run")
def test_interpreted_kernels_start_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "start_builds", lambda *_: pytest.fail("a build was started"))
    plan = Plan(steps=(Launch("kernel", (1, 1, 1), (), (), {}),) * 2)
    launch.start_plan(plan, {}, {}, torch.device("cuda", 0), runs_now=False)


def test_torchs_compiler_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = importlib.import_module("torch._inductor.async_compile")
    started = []
    assert callable(workers.AsyncCompile.use_process_pool)
    monkeypatch.setattr(workers.AsyncCompile, "use_process_pool", lambda: started.append("pool"))
    internals.start_compiler()
    assert started == ["pool"]
