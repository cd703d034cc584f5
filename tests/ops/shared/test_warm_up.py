"""Kernels that are listed and built before their first call."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need triton")

from tests.kernels import triton_interpreted
from tests.ops.launching import recorded_builds
from tests.refusals import refused
from tilefold.ops import lsr_head, maxsim, quantize_tokens
from tilefold.ops.warm_up import build_kernels
from tilefold.testing import nan_poisoned_empty

interpreted = pytest.mark.skipif(
    not triton_interpreted(),
    reason="lists calls on the CPU, where kernels would run",
)


def listed_names(*calls: object) -> list[str]:
    with recorded_builds() as launches:
        for call in calls:
            call()  # type: ignore[operator]
    return [each.kernel.__name__ for each in launches.values()]


@interpreted
def test_a_step_is_listed_and_nothing_is_launched() -> None:
    hidden, weight = torch.randn(2, 5, 16).requires_grad_(), torch.randn(40, 16).requires_grad_()
    results = []

    def step() -> None:
        with nan_poisoned_empty():
            scores = lsr_head(hidden, weight, impl="triton")
        results.append(scores.detach())
        torch.autograd.grad(scores.sum(), (hidden, weight))

    names = listed_names(step, step)
    assert results[0].isnan().all() and len(set(names)) == len(names) >= 4
    assert "max_forward_kernel" in names and "dweight_kernel" in names
    with nan_poisoned_empty():
        assert lsr_head(hidden, weight, impl="triton").isfinite().all()  # launches run again
    documents = quantize_tokens(torch.randn(3, 7, 32))
    assert listed_names(lambda: maxsim(torch.randn(1, 5, 32), documents, impl="triton")) == [
        "quantize_kernel",  # of the query, which shares the pass over the documents
        "shared_pass_kernel",
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="what machines without a GPU say")
def test_a_machine_without_a_gpu_says_so() -> None:
    refused(
        RuntimeError,
        "kernels are built for the GPU that runs them, and torch sees none here",
        build_kernels,
        [],
    )


CROSS_BUILD = """
import sys
from concurrent.futures import ThreadPoolExecutor
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from tilefold.ops._shared._triton import launch
from tilefold.ops.maxsim._triton.norms import quantize_kernel

class Gpu:  # what Triton asks of a driver before it compiles
    get_current_device = get_current_stream = staticmethod(lambda *_: 0)
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))

driver.set_active(Gpu())
torch.cuda.current_device = lambda: 0
rows, out, scale = torch.zeros(4, 64), torch.zeros(4, 64, dtype=torch.int8), torch.zeros(4)
with launch.recorded_builds() as launches:
    for block in (16, 32):
        for count in (4, 9):  # the same kernel
            constants = {"D": 64, "BLOCK_R": block, "BLOCK_D": 64, "num_warps": 4, "num_stages": 3}
            launch.launch(quantize_kernel, (1, 1, 1), (rows, out, scale, count), constants)
assert len(launches) == 2, launches
with ThreadPoolExecutor(2) as pool:
    list(pool.map(lambda build: build(), launches.values()))
assert all(build().asm["cubin"] for build in launches.values())
"""


@pytest.mark.slow
@pytest.mark.skipif(
    triton_interpreted(),
    reason="kernels are interpreted in this run, not compiled",
)
def test_listed_kernels_are_built_in_threads_and_kept_on_the_disk(tmp_path: Path) -> None:
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", CROSS_BUILD], check=True, env=environment)
    assert len(list(tmp_path.rglob("quantize_kernel.cubin"))) == 2
