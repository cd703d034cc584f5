"""What tilefold uses of torch's and Triton's insides is there in the releases that are installed, and nowhere else."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

import tilefold
from tilefold.ops._shared import internals

SOURCES = Path(tilefold.__file__).parent
PRIVATE = re.compile(
    r"torch\._(?!dynamo|_)\w|aten\._\w|_functorch|forward_ad\._|\bknobs\b|packed_metadata|launch_pdl|backends\.nvidia|\.do_not_specialize"
)


def test_one_file_names_what_is_private() -> None:
    naming = {str(path.relative_to(SOURCES)) for path in SOURCES.rglob("*.py") if PRIVATE.search(path.read_text())}
    assert naming == {"ops/_shared/internals.py"}


def test_modes_and_transforms_are_seen() -> None:
    assert internals.no_dispatch_mode() and not internals.in_function_transform() and not internals.in_forward_mode()
    with torch.utils._python_dispatch.TorchDispatchMode():
        assert not internals.no_dispatch_mode()
    seen = []

    def look(x: torch.Tensor) -> torch.Tensor:
        seen.append((internals.no_dispatch_mode(), internals.in_function_transform()))
        return x.sum()

    torch.func.grad(look)(torch.ones(2))
    torch.func.vmap(look)(torch.ones(2, 2))
    assert seen == [(False, True), (False, False)]
    with forward_ad.dual_level():
        assert internals.in_forward_mode()


def test_a_gpu_is_the_current_one_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 1, raising=False)
    here, there = (SimpleNamespace(is_cuda=True, get_device=lambda index=index: index) for index in (1, 0))
    found: list[Any] = [here, there, torch.ones(1)]
    assert [internals.is_on_current(tensor) for tensor in found] == [True, False, True]


def test_several_gradients_at_once_are_seen() -> None:
    seen = []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            seen.append(internals.is_batched(grad))
            return grad.clone()

    x = torch.ones(2, requires_grad=True)
    y = Look.apply(x)
    torch.autograd.grad(y, x, torch.ones(2), retain_graph=True)
    torch.autograd.grad(y, x, torch.eye(2), is_grads_batched=True)
    assert seen == [False, True]


def test_the_names_for_gpus_exist() -> None:
    for name in ("_cuda_getCurrentRawStream", "_cuda_getDevice"):
        assert hasattr(torch._C, name) or not torch.backends.cuda.is_built()
    reader = internals.precision_reader()
    assert reader is None or reader("cuda", "matmul") in ("ieee", "tf32", "none")


class _Compiled(SimpleNamespace):
    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        return lambda *arguments: self.called.append((grid, arguments))


def test_what_the_driver_cannot_launch_goes_through_triton_with_addresses() -> None:
    metadata = SimpleNamespace(name="kernel", num_warps=4, shared=0, launch_cooperative_grid=True)
    compiled = _Compiled(metadata=metadata, called=[])
    a, b = torch.ones(4, 2), torch.ones(3)
    described = internals.Tma(2, 4, lambda matrix: ("described", matrix.shape, matrix.data_ptr()))
    launch, launch_at = internals.bind(compiled, (1, 1, 1), (b, a, None, 9), (9,), (None, described))
    launch((b, a, None))
    assert launch_at is None
    assert compiled.called == [((1, 1, 1), (b.data_ptr(), ("described", (2, 4), a.data_ptr()), None, 9))]
