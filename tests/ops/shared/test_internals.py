"""What tilefold uses of torch's and Triton's insides is there in the releases that are installed, and nowhere else."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

import tilefold
from tilefold.ops._shared import internals
from tilefold.ops._shared._triton.releases import launches_by_address
from tilefold.ops._shared.impl import triton_installed

SOURCES = Path(tilefold.__file__).parent
PRIVATE = re.compile(
    r"torch\._(?!dynamo|_)\w|aten\._\w|_functorch|forward_ad\._|\bknobs\b|packed_metadata|launch_pdl|backends\.nvidia|\.do_not_specialize"
)
needs_triton = pytest.mark.skipif(not triton_installed(), reason="triton is not installed")


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


@needs_triton
def test_the_launcher_has_the_arguments_that_a_direct_launch_gives() -> None:
    if not launches_by_address():
        pytest.skip("with this release kernels are launched by Triton's own call")
    from triton.backends.nvidia import driver
    from triton.compiler.compiler import CompiledKernel

    source = driver.make_launcher({}, {0: "*fp32", 1: "i32"}, None)
    parsed = re.search(r'PyArg_ParseTuple\(args, "[^"]+"((?:,\s*&\w+)+)', source)
    assert parsed, "the C launcher parses its arguments in another way"
    names = re.findall(r"&(\w+)", parsed[1])
    assert names[:13] == [
        "gridX", "gridY", "gridZ", "_stream", "_function", "launch_cooperative_grid", "launch_pdl",
        "global_scratch_obj", "profile_scratch_obj", "kernel_metadata", "launch_metadata", "launch_enter_hook",
        "launch_exit_hook",
    ]  # fmt: skip
    called = inspect.getsource(CompiledKernel.__getitem__)
    assert "self.function, self.packed_metadata, launch_metadata" in called
    wrapper = driver.wrap_handle_tensordesc(lambda: None, {0: "tensordesc<fp16[8, 8]>"}, [{"swizzle": 0}])
    assert {"launcher", "tensordesc_meta"} <= set(wrapper.__code__.co_freevars)
    assert list(inspect.signature(driver.make_tensordesc_arg).parameters) == ["arg", "metadata"]


class CudaLauncher:
    """As Triton's, by name: what a compiled kernel is launched with."""

    global_scratch_size = profile_scratch_size = 0
    launch_cooperative_grid, launch_pdl = 0, 1

    def __init__(self, launch: Any) -> None:
        self.launch = launch


class _Compiled(SimpleNamespace):
    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        return lambda *arguments: self.called.append((grid, arguments))


class _Recorder:
    """A C function: it has no ``__code__``."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __call__(self, *arguments: Any) -> None:
        self.calls.append(arguments)


def test_a_known_launcher_gets_stream_handle_and_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    function = _Recorder()
    compiled = _Compiled(run=CudaLauncher(function), function=7, packed_metadata=(4,), called=[])
    monkeypatch.setattr(internals, "launches_by_address", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    streams = iter((11, 12))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: (index, next(streams)), raising=False)
    a, b = torch.ones(2), torch.ones(3)
    launch, launch_at = internals.bind(compiled, (5, 6, 1), (8, "constant"))
    assert launch_at is not None
    launch((a, None, b))
    launch_at((b.data_ptr(), a.data_ptr(), None))  # on another stream
    head = (7, 0, 1, None, None, (4,), None, None, None)
    assert function.calls == [
        (5, 6, 1, (3, 11), *head, a.data_ptr(), None, b.data_ptr(), 8, "constant"),
        (5, 6, 1, (3, 12), *head, b.data_ptr(), a.data_ptr(), None, 8, "constant"),
    ]


def test_any_other_launcher_goes_through_triton_with_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = _Compiled(run=SimpleNamespace(), function=7, packed_metadata=(), called=[])
    monkeypatch.setattr(internals, "launches_by_address", lambda: False)
    a, b = torch.ones(4, 2), torch.ones(3)
    described = internals.Tma(2, 4, lambda matrix: ("described", matrix.shape, matrix.data_ptr()))
    launch, launch_at = internals.bind(compiled, (1, 1, 1), (9,), (None, described))
    launch((b, a, None))
    assert launch_at is None
    assert compiled.called == [((1, 1, 1), (b.data_ptr(), ("described", (2, 4), a.data_ptr()), None, 9))]
