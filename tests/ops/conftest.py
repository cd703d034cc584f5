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


@dataclass(frozen=True)
class Target:
    """An implementation on a device."""

    impl: str
    device: str


if triton_interpreted():
    quicken()


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a compile gate's variants the first for each kernel and architecture is the one that
    ``make test`` builds.
    """
    built: set[tuple[object, ...]] = set()
    for item in items:
        if not isinstance(item, pytest.Function) or not item.path.name.endswith("_compile.py"):
            continue
        given = item.callspec.params if hasattr(item, "callspec") else {}
        gate = (item.path, item.originalname, given.get("capability"), given.get("name"))
        if (
            gate in built and item.path.name != "test_cross_compile.py"
        ):  # that one checks the gates themselves
            item.add_marker(pytest.mark.every_build)
        built.add(gate)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give ``target`` to the tests that ask for one: with TRITON_INTERPRET=1 the kernels on the
    CPU, else the rest.
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
    """The target where it is the kernels."""
    if target.impl != "triton":
        pytest.skip("a kernel's test")
    return target


@pytest.fixture
def nobody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host looks at no value on the CPU either, as on a GPU, where that would cost a
    synchronisation.
    """
    monkeypatch.setattr(operator, "host_may_read", lambda device, impl: False)


@pytest.fixture
def nothing_remembered() -> Iterator[None]:
    """Operators know no call of an earlier test, and leave none to a later one."""
    forget_calls()
    yield
    forget_calls()


@pytest.fixture
def nothing_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kernel counts as one that can be built."""
    monkeypatch.setattr(fallback, "GIVEN_UP", {})


@pytest.fixture
def unbound(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels that were launched with their arguments bound anew."""
    from tests.ops.launching import launch  # needs triton

    names: list[str] = []
    honest = launch.KernelLauncher.run_with_triton

    def seen(self: launch.KernelLauncher, build: launch.Build) -> Any:
        names.append(build.kernel.__name__)
        return honest(self, build)

    monkeypatch.setattr(launch.KernelLauncher, "run_with_triton", seen)
    return names


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
