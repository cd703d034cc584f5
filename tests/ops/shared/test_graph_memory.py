"""What launchers do of kernels that cannot be built, and in captured graphs that own their memory
(cudaMallocAsync).
"""

from __future__ import annotations

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
from tests.ops.launching import launch
from tests.ops.samples import Sample, attend, entmax_rows, head, late, scattered

ROOT = Path(__file__).resolve().parents[3]


class Kernel:
    """A kernel that cannot be built, or not be launched; see ``JITFunction``."""

    __name__ = "_some_kernel"
    arg_names = ("x", "y", "n", "BLOCK")
    params = tuple(SimpleNamespace(do_not_specialize=False) for _ in arg_names)

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
def test_a_failed_build_is_named_and_not_tried_again_and_no_launch_that_goes_wrong_is_mistaken_for_one(
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


def operators() -> list[Sample]:
    bf16, offsets = torch.bfloat16, [0, 33, 40, 66]
    pools = [
        head(pooling, 3, 33, 64, vocab=257, dtype=bf16) for pooling in ("max", "sum", "mean", "cls")
    ]
    pools += [
        head(pooling, 66, 64, vocab=257, dtype=bf16, cu_seqlens=offsets)
        for pooling in ("max", "sum")
    ]
    scores = [
        late((3, 33, 64), (5, 41, 64), bf16, **kind)
        for kind in ({}, {"temperature": 0.5}, {"normalize": True})
    ]
    packed = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "max_seqlen_k": 33}
    attentions = [Sample("entmax_attention", attend, ((3, 33, 2, 32),) * 3, {}, bf16)]
    attentions += [Sample("entmax_attention", attend, ((66, 2, 32),) * 3, packed, bf16)]
    ids = {"input_ids": (torch.arange(99) * 7 % 257).view(3, 33).tolist(), "vocab_size": 257}
    scatters = [
        Sample("token_scatter", scattered, ((3, 33),), ids | {"reduce": each}, bf16)
        for each in ("max", "sum")
    ]
    return [
        *pools,
        *scores,
        *attentions,
        Sample("entmax", entmax_rows, ((7, 100),), {}, bf16),
        *scatters,
    ]


def main(when: str) -> None:
    """Capture each operator, forward and backward, and compare what the replayed graph computes
    with a call.
    """
    assert torch.cuda.get_allocator_backend() == "cudaMallocAsync"
    for sample in operators():
        inputs, options = sample.leaves("cuda"), sample.given("cuda")

        def step(
            sample: Sample = sample,
            inputs: list[Tensor] = inputs,
            options: Any = options,
        ) -> list[Tensor]:
            scores = sample.function(*inputs, **options, impl="triton")
            return [scores.detach(), *torch.autograd.grad(scores.float().sin().sum(), inputs)]

        stream, square = torch.cuda.Stream(), torch.ones(2, 2, device="cuda", requires_grad=True)
        with torch.cuda.stream(stream):
            # torch's own products cannot make their workspaces, of each thread and stream, under
            # capture
            torch.autograd.grad((square @ square).sum(), square)
            for _ in range(3 if when == "warm" else 0):
                step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            found = step()
        for _ in range(2):
            graph.replay()
        torch.cuda.synchronize()
        for tensor, expected in zip(found, step(), strict=True):
            assert torch.equal(tensor, expected), sample
        del found, tensor, graph  # nothing of a graph may be freed while the next one is captured


if __name__ == "__main__":
    main(sys.argv[1])
