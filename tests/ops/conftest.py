"""The implementations under test: what this process can run, and what needs a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.kernels import triton_interpreted
from tests.ops.base import fallback, operator
from tests.ops.contracts import forget_calls
from tests.ops.quick_interpreter import quicken

CAPABILITY_OF_MAKE_TEST = 90
# What `make test` runs in Triton's interpreter: every operator next to its reference.
INTERPRETED_IN_MAKE_TEST = (
    "test_implementations.py",
    "test_rows.py",
    "test_sparse_search.py",
    "test_xtr.py",
)


@dataclass(frozen=True)
class Target:
    """An implementation on a device."""

    impl: str
    device: str


if triton_interpreted():
    quicken()


@pytest.hookimpl(tryfirst=True)  # markers are set before -m selects by them
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what ``make test`` leaves out of the compile gates and of the interpreted tests.

    All but one variant of each compile gate is ``every_build``. ``make test`` builds the first
    variant of each kernel for one architecture, ``make test-full`` for the others.
    ``test_cross_compile.py`` checks the gates themselves, so all of its tests run. Tests that the
    interpreter runs in addition to those of :data:`INTERPRETED_IN_MAKE_TEST` are ``slow``.
    """
    built_gates: set[tuple[object, ...]] = set()
    for item in items:
        if triton_interpreted() and item.path.name not in INTERPRETED_IN_MAKE_TEST:
            item.add_marker(pytest.mark.slow)
        if not isinstance(item, pytest.Function) or not item.path.name.endswith("_compile.py"):
            continue
        if item.path.name == "test_cross_compile.py":
            continue
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        capability = parameters.get("capability", CAPABILITY_OF_MAKE_TEST)
        gate = (item.path, item.originalname, capability, parameters.get("name"))
        if gate in built_gates:
            item.add_marker(pytest.mark.every_build)
        elif capability != CAPABILITY_OF_MAKE_TEST:
            item.add_marker(pytest.mark.slow)
        built_gates.add(gate)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize ``target`` with the implementations that this process can run.

    With ``TRITON_INTERPRET=1`` these are the kernels on the CPU, else all others.
    """
    if "target" not in metafunc.fixturenames:
        return
    if triton_interpreted():
        targets = [pytest.param(Target("triton", "cpu"), id="triton-interpreted")]
    else:
        targets = [
            pytest.param(Target("tiled", "cpu"), id="tiled-cpu"),
            pytest.param(Target("tiled", "cuda"), id="tiled-cuda", marks=pytest.mark.gpu),
            pytest.param(Target("triton", "cuda"), id="triton-cuda", marks=pytest.mark.gpu),
        ]
    metafunc.parametrize("target", targets)


@pytest.fixture
def kernels(target: Target) -> Target:
    """The target, for tests of kernels only."""
    if target.impl != "triton":
        pytest.skip("a kernel's test")
    return target


@pytest.fixture
def host_reads_no_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep checks from reading values of tensors, on the CPU as on a GPU.

    On a GPU, reading a value would cost a synchronisation.
    """
    monkeypatch.setattr(operator, "host_may_read", lambda device, impl: False)


@pytest.fixture
def empty_call_caches() -> Iterator[None]:
    """Clear the operators' caches of calls before and after the test."""
    forget_calls()
    yield
    forget_calls()


@pytest.fixture
def no_failed_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget which kernels could not be built."""
    monkeypatch.setattr(fallback, "FAILURES", {})


@pytest.fixture
def rebound_kernels(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels that were launched with their arguments bound anew."""
    from tests.ops.launching import launch  # needs triton

    names: list[str] = []
    run_with_triton = launch.KernelLauncher.run_with_triton

    def run_and_record(self: launch.KernelLauncher, build: launch.Build) -> Any:
        names.append(build.kernel.__name__)
        return run_with_triton(self, build)

    monkeypatch.setattr(launch.KernelLauncher, "run_with_triton", run_and_record)
    return names


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """Forget all compiled graphs before and after the test."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
