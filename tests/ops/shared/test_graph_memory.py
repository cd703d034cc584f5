"""What launchers do of kernels that cannot be built, and in captured graphs that own their memory
(cudaMallocAsync).
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the launcher needs triton")

from triton.errors import TritonError

from tests.ops.base import KernelUnavailableError, internals
from tests.ops.contracts import listed
from tests.ops.launching import launch
from tests.ops.samples import Sample

ROOT = Path(__file__).resolve().parents[3]


class Kernel:
    """A kernel that cannot be built, or not be launched; see ``JITFunction``."""

    __name__ = "_some_kernel"
    arg_names = ("x", "y", "n", "BLOCK")
    params = tuple(SimpleNamespace(do_not_specialize=False) for _ in arg_names)
    cache_key = "the hash of its source"

    @staticmethod
    def fn() -> None:
        """Do nothing, like the Python function of a kernel outside kernels."""

    def __init__(self, error: Exception, when: str) -> None:
        self.error, self.when = error, when
        self.tried: list[tuple[Any, ...]] = []

    def warmup(self, *arguments: Any, grid: internals.Grid, **constants: Any) -> Kernel:
        if self.when == "built":
            self.tried.append(arguments)
            raise self.error
        return self

    def __getitem__(self, grid: internals.Grid) -> Callable[..., None]:
        def run(*arguments: Any) -> None:
            self.tried.append(arguments)
            raise self.error

        return run


BUILD_FAULTS = [
    TritonError("out of resource: shared memory, Required: 150000, Hardware limit: 101376."),
    RuntimeError("PassManager::run failed"),
    RuntimeError("Triton Error [CUDA]: device kernel image is invalid"),
    *(
        RuntimeError(f"Triton Error [CUDA]: {why}")
        for why in ("invalid argument", "too many resources requested")
    ),
    RuntimeError("Failed to find C compiler. Please specify via CC environment variable."),
    subprocess.CalledProcessError(1, ["gcc"]),
]
LAUNCH_FAULTS = [
    RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
    torch.OutOfMemoryError("full"),
    TypeError("no such argument"),
]


@pytest.mark.parametrize("when", ["built", "launched"])
@pytest.mark.parametrize("fault", [*BUILD_FAULTS, *LAUNCH_FAULTS], ids=str)
def test_a_failed_build_is_named_and_not_tried_again_unlike_a_failed_launch(
    monkeypatch: pytest.MonkeyPatch,
    fault: Exception,
    when: str,
) -> None:
    monkeypatch.setattr(launch, "JITFunction", Kernel)
    monkeypatch.setattr(launch, "enter_context", lambda index: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    kernel, x = Kernel(fault, when), torch.zeros(4)
    for _ in range(2):
        if fault in BUILD_FAULTS:
            with pytest.raises(
                KernelUnavailableError,
                match=f"_some_kernel cannot be built .{type(fault).__name__}",
            ):
                launch.launch(kernel, (1, 1, 1), (x, None, 5), {"BLOCK": 16})
        else:
            with pytest.raises(type(fault), match=str(fault).split("[")[0]) as raised:
                launch.launch(kernel, (1, 1, 1), (x, None, 5), {"BLOCK": 16})
            assert not isinstance(raised.value, KernelUnavailableError)
    assert len(kernel.tried) == (1 if fault in BUILD_FAULTS else 2)
    assert when == "built" or kernel.tried[0] == (
        x.data_ptr(),
        None,
        5,
        16,
    )  # an address, as graphs ask for


@pytest.mark.gpu
@pytest.mark.parametrize("when", ["first", "warm"])
def test_every_operator_is_captured_with_the_allocator_of_the_driver(when: str) -> None:
    environment = os.environ | {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}
    environment.pop("PYTORCH_ALLOC_CONF", None)
    command = [sys.executable, "-m", "tests.ops.shared.test_graph_memory", when]
    done = subprocess.run(
        command,
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def captured_step(sample: Sample, when: str) -> None:
    """Capture a call and its gradients, and compare what replays compute with a call.

    Args:
        sample: The call.
        when: ``"first"`` captures the first call of this process, ``"warm"`` a repeated one.
    """
    leaves, arguments = sample.leaves("cuda"), sample.arguments("cuda")

    def step() -> list[Tensor]:
        scores = sample.function(*leaves, **arguments, impl="triton")
        return [scores.detach(), *torch.autograd.grad(scores.float().sin().sum(), leaves)]

    stream = torch.cuda.Stream()
    square = torch.ones(2, 2, device="cuda", requires_grad=True)
    with torch.cuda.stream(stream):
        # Torch's own products cannot make their workspaces, of each thread and stream, under
        # capture.
        torch.autograd.grad((square @ square).sum(), square)
        for _ in range(3 if when == "warm" else 0):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = step()
    for _ in range(2):
        graph.replay()
    torch.cuda.synchronize()
    for tensor, expected in zip(captured, step(), strict=True):
        assert torch.equal(tensor, expected), sample


def main(when: str) -> None:
    """Capture every operator, forward and backward."""
    assert torch.cuda.get_allocator_backend() == "cudaMallocAsync"
    for sample in listed("captured"):
        captured_step(sample, when)
        gc.collect()  # nothing of a graph may be freed while the next one is captured


if __name__ == "__main__":
    main(sys.argv[1])
