"""What launchers do of kernels that cannot be built, and in captured graphs that own their memory (cudaMallocAsync)."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
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
    """A kernel whose launches are written down; see ``JITFunction``."""

    __name__ = "_some_kernel"
    arg_names = ("x", "y", "n", "BLOCK")
    params = tuple(SimpleNamespace(do_not_specialize=False) for _ in arg_names)

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.launches: list[tuple[Any, ...]] = []
        self.warmups: list[tuple[Any, ...]] = []

    def warmup(self, *arguments: Any, grid: internals.Grid, **constants: Any) -> Kernel:
        self.warmups.append(arguments)
        return self

    def __getitem__(self, grid: internals.Grid) -> Callable[..., Kernel]:
        def run(*arguments: Any, **constants: Any) -> Kernel:
            self.launches.append(arguments)
            if self.error is not None:
                raise self.error
            return self

        return run


@pytest.fixture
def capturing(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Whether a graph is being captured, for the test to change, with the allocator that lets graphs own memory."""
    state = [True]
    monkeypatch.setattr(launch, "JITFunction", Kernel)
    monkeypatch.setattr(launch, "enter_context", lambda index: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state[0])
    launch._allocates_in_stream_order.cache_clear()
    yield state
    launch._allocates_in_stream_order.cache_clear()


@pytest.mark.parametrize(("captured", "kinds"), [((True,), [int]), ((False, True, False), [Tensor, int, Tensor])])
def test_under_capture_and_only_there_a_kernel_is_compiled_before_and_gets_addresses(
    capturing: list[bool], captured: tuple[bool, ...], kinds: list[type]
) -> None:
    kernel, x = Kernel(), torch.zeros(4)
    run = launch.Launcher(kernel, {"BLOCK": 16})
    for capturing[0] in captured:
        run((1, 1, 1), (x, None, 5))
    assert len(kernel.warmups) == captured[0] and [type(given[0]) for given in kernel.launches] == kinds
    assert kernel.launches[captured.index(True)] == (x.data_ptr(), None, 5, 16)


def test_another_allocator_is_never_asked_whether_it_captures(
    capturing: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: pytest.fail("was asked"))
    kernel, x = Kernel(), torch.zeros(4)
    launch.Launcher(kernel, {"BLOCK": 16})((1, 1, 1), (x, None, 5))
    assert [type(given[0]) for given in kernel.launches] == [Tensor]


BUILD_FAULTS = [
    TritonError("out of resource: shared memory, Required: 150000, Hardware limit: 101376."),
    RuntimeError("PassManager::run failed"),
    RuntimeError("Triton Error [CUDA]: device kernel image is invalid"),
    RuntimeError("Failed to find C compiler. Please specify via CC environment variable."),
    subprocess.CalledProcessError(1, ["gcc"]),
]
LAUNCH_FAULTS = [
    RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
    torch.OutOfMemoryError("full"),
    TypeError("no such argument"),
]


@pytest.mark.parametrize("fault", [*BUILD_FAULTS, *LAUNCH_FAULTS], ids=str)
def test_a_failed_build_is_named_and_not_tried_again_and_no_launch_that_goes_wrong_is_mistaken_for_one(
    capturing: list[bool], fault: Exception
) -> None:
    capturing[0] = False
    kernel = Kernel(fault)
    run = launch.Launcher(kernel, {"BLOCK": 16})
    for _ in range(2):
        if fault in BUILD_FAULTS:
            with pytest.raises(KernelUnavailableError, match=f"_some_kernel cannot be built .{type(fault).__name__}"):
                run((1, 1, 1), (None, None, 5))
        else:
            with pytest.raises(type(fault), match=str(fault).split("[")[0]) as raised:
                run((1, 1, 1), (None, None, 5))
            assert not isinstance(raised.value, KernelUnavailableError)
    assert len(kernel.launches) == (1 if fault in BUILD_FAULTS else 2)


@pytest.mark.gpu
@pytest.mark.parametrize("when", ["first", "warm"])
def test_every_operator_is_captured_with_the_allocator_of_the_driver(when: str) -> None:
    environment = os.environ | {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}
    environment.pop("PYTORCH_ALLOC_CONF", None)
    command = [sys.executable, "-m", "tests.ops.shared.test_graph_memory", when]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def operators() -> list[Sample]:
    bf16, offsets = torch.bfloat16, [0, 33, 40, 66]
    pools = [head(pooling, 3, 33, 64, vocab=257, dtype=bf16) for pooling in ("max", "sum", "mean", "cls")]
    pools += [head(pooling, 66, 64, vocab=257, dtype=bf16, cu_seqlens=offsets) for pooling in ("max", "sum")]
    scores = [late((3, 33, 64), (5, 41, 64), bf16, **kind) for kind in ({}, {"temperature": 0.5}, {"normalize": True})]
    packed = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "max_seqlen_k": 33}
    attentions = [Sample("entmax_attention", attend, ((3, 33, 2, 32),) * 3, {}, bf16)]
    attentions += [Sample("entmax_attention", attend, ((66, 2, 32),) * 3, packed, bf16)]
    ids = {"input_ids": (torch.arange(99) * 7 % 257).view(3, 33).tolist(), "vocab_size": 257}
    scatters = [Sample("token_scatter", scattered, ((3, 33),), ids | {"reduce": each}, bf16) for each in ("max", "sum")]
    return [*pools, *scores, *attentions, Sample("entmax", entmax_rows, ((7, 100),), {}, bf16), *scatters]


def main(when: str) -> None:
    """Capture each operator, forward and backward, and compare what the replayed graph computes with a call."""
    assert torch.cuda.get_allocator_backend() == "cudaMallocAsync"
    for sample in operators():
        inputs, options = sample.leaves("cuda"), sample.given("cuda")

        def step(sample: Sample = sample, inputs: list[Tensor] = inputs, options: Any = options) -> list[Tensor]:
            scores = sample.function(*inputs, **options, impl="triton")
            return [scores.detach(), *torch.autograd.grad(scores.float().sin().sum(), inputs)]

        stream, square = torch.cuda.Stream(), torch.ones(2, 2, device="cuda", requires_grad=True)
        with torch.cuda.stream(stream):
            # torch's own products cannot make their workspaces, of each thread and stream, under capture
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
