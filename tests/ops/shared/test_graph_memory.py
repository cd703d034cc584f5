"""Captured graphs that own their memory, with cudaMallocAsync: the driver does not know addresses in it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the launcher needs triton")

from tilefold.ops import entmax, entmax_attention, lsr_head, maxsim, token_scatter
from tilefold.ops._shared import internals
from tilefold.ops._shared._triton import launch

ROOT = Path(__file__).resolve().parents[3]


class Kernel:
    """A kernel whose launches are written down; see ``JITFunction``."""

    __name__ = "_recording_kernel"
    arg_names = ("x", "y", "n", "BLOCK")
    params = tuple(SimpleNamespace(do_not_specialize=False) for _ in arg_names)

    def __init__(self) -> None:
        self.launches: list[tuple[Any, ...]] = []
        self.warmups: list[tuple[Any, ...]] = []

    def warmup(self, *arguments: Any, grid: internals.Grid, **constants: Any) -> Kernel:
        self.warmups.append(arguments)
        return self

    def __getitem__(self, grid: internals.Grid) -> Callable[..., Kernel]:
        def run(*arguments: Any, **constants: Any) -> Kernel:
            self.launches.append(arguments)
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


def test_the_first_launch_under_capture_compiles_and_then_passes_addresses(capturing: list[bool]) -> None:
    kernel, x = Kernel(), torch.zeros(4)
    launch.Launcher(kernel, {"BLOCK": 16})((1, 1, 1), (x, None, 5))
    assert len(kernel.warmups) == 1
    assert kernel.launches == [(x.data_ptr(), None, 5, 16)]


def test_a_kernel_that_ran_is_launched_with_addresses_under_capture_and_only_there(capturing: list[bool]) -> None:
    kernel, x = Kernel(), torch.zeros(4)
    run = launch.Launcher(kernel, {"BLOCK": 16})
    for now in (False, True, False):
        capturing[0] = now
        run((1, 1, 1), (x, None, 5))
    assert not kernel.warmups
    assert [type(given[0]) for given in kernel.launches] == [Tensor, int, Tensor]


def test_another_allocator_is_never_asked_whether_it_captures(
    capturing: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: pytest.fail("was asked"))
    kernel, x = Kernel(), torch.zeros(4)
    run = launch.Launcher(kernel, {"BLOCK": 16})
    for _ in range(2):
        run((1, 1, 1), (x, None, 5))
    assert [type(given[0]) for given in kernel.launches] == [Tensor, Tensor]


def test_launchers_are_made_once_and_the_table_of_them_is_bounded() -> None:
    kernel = Kernel()
    made = launch.launcher(kernel, {"BLOCK": 16, "num_warps": 4})
    assert launch.launcher(kernel, {"BLOCK": 16, "num_warps": 4}) is made
    assert launch.launcher(kernel, {"BLOCK": 16, "num_warps": 8}) is not made
    assert launch._launcher.cache_info().maxsize == launch.MAX_LAUNCHERS


@pytest.mark.gpu
@pytest.mark.parametrize("when", ["first", "warm"])
def test_every_operator_is_captured_with_the_allocator_of_the_driver(when: str) -> None:
    environment = os.environ | {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}
    environment.pop("PYTORCH_ALLOC_CONF", None)
    command = [sys.executable, "-m", "tests.ops.shared.test_graph_memory", when]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def operators() -> dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]]:
    """Calls by name, and what is differentiated."""

    def rows(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    hidden, weight, heads, tokens = rows(3, 33, 64), rows(257, 64), rows(3, 33, 2, 32), rows(66, 2, 32)
    cu = torch.tensor([0, 33, 40, 66], dtype=torch.int32, device="cuda")
    ids = torch.randint(0, 257, (3, 33), device="cuda")
    packed = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_k": 33}
    calls: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
        f"lsr_head {pooling}": (partial(lsr_head, pooling=pooling, impl="triton"), (hidden, weight))
        for pooling in ("max", "sum", "mean", "cls")
    }
    calls["lsr_head packed"] = (partial(lsr_head, cu_seqlens=cu, impl="triton"), (rows(66, 64), weight))
    calls["lsr_head packed sum"] = (
        partial(lsr_head, cu_seqlens=cu, pooling="sum", impl="triton"), (rows(66, 64), weight),
    )  # fmt: skip
    calls["maxsim"] = (partial(maxsim, impl="triton"), (rows(3, 33, 64), rows(5, 41, 64)))
    calls["maxsim smooth"] = (partial(maxsim, temperature=0.5, impl="triton"), (rows(3, 33, 64), rows(5, 41, 64)))
    calls["maxsim normalised"] = (partial(maxsim, normalize=True, impl="triton"), (rows(3, 33, 64), rows(5, 41, 64)))
    calls["entmax_attention"] = (lambda x: entmax_attention(x, x, x, impl="triton"), (heads,))
    calls["entmax_attention packed"] = (
        lambda x: entmax_attention(x, x, x, **packed, impl="triton"), (tokens,),
    )  # fmt: skip
    calls["entmax"] = (partial(entmax, impl="triton"), (rows(7, 100),))
    for reduce in ("max", "sum"):
        calls[f"token_scatter {reduce}"] = (
            lambda x, reduce=reduce: token_scatter(x, ids, 257, reduce=reduce, impl="triton"), (rows(3, 33),),
        )  # fmt: skip
    return calls


def main(when: str) -> None:
    """Capture each operator, forward and backward, and compare what the replayed graph computes with a call."""
    assert torch.cuda.get_allocator_backend() == "cudaMallocAsync"
    torch.manual_seed(0)
    for name, (call, inputs) in operators().items():

        def step(call: Callable[..., Tensor] = call, inputs: tuple[Tensor, ...] = inputs) -> list[Tensor]:
            scores = call(*inputs)
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
            assert torch.equal(tensor, expected), name
        del found, tensor, graph  # nothing of a graph may be freed while the next one is captured


if __name__ == "__main__":
    main(sys.argv[1])
