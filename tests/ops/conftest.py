"""The implementations under test: what this process can run, and what needs a GPU."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from tilefold.ops._shared.impl import triton_interpreted


@dataclass(frozen=True)
class Target:
    """An implementation on a device."""

    impl: str
    device: str


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give ``target`` to the tests that ask for one: with TRITON_INTERPRET=1 the kernels on the CPU, else the rest."""
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
