"""What tilefold uses of torch's and Triton's insides is there in the releases that are installed, and nowhere else."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

import tilefold
from tilefold.ops._shared import internals, library

SOURCES = Path(tilefold.__file__).parent
PRIVATE = re.compile(
    r"torch\._(?!dynamo|_)\w|aten\._\w|_functorch|forward_ad\._|\bknobs\b|packed_metadata|launch_pdl|backends\.nvidia|\.do_not_specialize"
)


def test_one_file_names_what_is_private() -> None:
    naming = {str(path.relative_to(SOURCES)) for path in SOURCES.rglob("*.py") if PRIVATE.search(path.read_text())}
    assert naming == {"ops/_shared/internals.py"}


def test_modes_and_transforms_are_seen() -> None:
    assert internals.is_eager() and not internals.in_function_transform() and not internals.in_forward_mode()
    with torch.utils._python_dispatch.TorchDispatchMode():
        assert not internals.is_eager()
    seen = []

    def look(x: torch.Tensor) -> torch.Tensor:
        seen.append((internals.is_eager(), internals.in_function_transform()))
        return x.sum()

    torch.func.grad(look)(torch.ones(2))
    torch.func.vmap(look)(torch.ones(2, 2))
    assert seen == [(False, True), (False, False)]
    with forward_ad.dual_level():
        assert internals.in_forward_mode() and not internals.is_eager()


def test_several_gradients_at_once_are_seen() -> None:
    seen = []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            seen.append(internals.is_eager(grad))
            return grad.clone()

    x = torch.ones(2, requires_grad=True)
    y = Look.apply(x)
    torch.autograd.grad(y, x, torch.ones(2), retain_graph=True)
    torch.autograd.grad(y, x, torch.eye(2), is_grads_batched=True)
    assert seen == [True, False]


def test_an_operator_runs_with_the_gpu_of_its_first_tensor_as_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1]

    @contextlib.contextmanager
    def device(index: int) -> Iterator[None]:
        now.append(index)
        yield

    monkeypatch.setattr(library, "current_gpu", lambda: now[-1])
    monkeypatch.setattr(torch.cuda, "device", device)
    for index in (1, 0):
        gpu = SimpleNamespace(is_cuda=True, get_device=lambda index=index: index, device=index)
        assert library.run(lambda given: now[-1], gpu) == index
    assert now == [1, 0] and library.run(lambda given: now[-1], torch.ones(1)) == 0


def test_the_names_for_gpus_exist() -> None:
    for name in ("_cuda_getCurrentRawStream", "_cuda_getDevice"):
        assert hasattr(torch._C, name) or not torch.backends.cuda.is_built()
    assert internals.matmul_precision() in ("ieee", "tf32", "none")
