"""Public functions compile whole, once for batches of all sizes; their registered operators pass
opcheck.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode

from tests.kernels import triton_interpreted
from tests.ops.contracts import cases, listed
from tests.ops.contracts.contract import GrowingCall
from tests.ops.samples import Sample, further_combinations_slow, output_gradient
from tilefold.ops import QuantizedWeight, lsr_head, maxsim, quantize_tokens, quantize_weight

pytestmark = [
    pytest.mark.skipif(triton_interpreted(), reason="this part needs no interpreter"),
    pytest.mark.usefixtures("fresh_dynamo"),
]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
COMPILED: list[Sample] = list(listed("compiled"))
OPCHECKED: list[Sample] = [*COMPILED, *listed("opchecked")]
# Rounding has no gradient, which samples need: see tests/ops/lsr_head/test_quantized.py.
CHECKED_ELSEWHERE = {"tilefold::quantize_weight"}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sample", further_combinations_slow(COMPILED), ids=str)
def test_a_public_function_compiles_whole_with_gradients(sample: Sample, device: str) -> None:
    arguments = sample.arguments(device)

    def loss(*leaves: Tensor) -> Tensor:
        scores: Tensor = sample.function(*(2 * leaf for leaf in leaves), **arguments)
        return ((scores + 1) ** 2).sum()

    def loss_and_gradients(function: Callable[..., Tensor]) -> list[Tensor | None]:
        leaves = sample.leaves(device)
        with torch.no_grad():
            loss_without_gradients = function(*leaves)
        function(*leaves).backward()
        return [loss_without_gradients, *(leaf.grad for leaf in leaves)]

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(loss_and_gradients(compiled), loss_and_gradients(loss))


@pytest.mark.parametrize("device", DEVICES)
def test_a_head_with_a_quantized_weight_compiles_whole(device: str) -> None:
    hidden = torch.randn(3, 16, 32, device=device)
    quantized = quantize_weight(torch.randn(40, 32, device=device))

    def scores(hidden: Tensor, weight: QuantizedWeight) -> Tensor:
        return lsr_head(hidden, QuantizedWeight(weight.values, weight.scale))

    compiled = torch.compile(scores, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(hidden, quantized), scores(hidden, quantized))


@pytest.mark.parametrize("device", DEVICES)
def test_maxsim_of_quantized_documents_compiles_whole(device: str) -> None:
    queries = torch.randn(3, 16, 32, device=device)
    documents = quantize_tokens(torch.randn(4, 10, 32, device=device))
    compiled = torch.compile(maxsim, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(queries, documents), maxsim(queries, documents))


class RecordCalls(TorchDispatchMode):
    """Records the calls of this package's registered operators."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "tilefold":
            self.calls.append((func, args))
        return func(*args, **(kwargs or {}))


def needed_gradients(leaves: int) -> list[list[bool]]:
    """Return which leaves need a gradient: all, the first, the second."""
    only_first = [index == 0 for index in range(leaves)]
    only_second = [index == 1 for index in range(leaves)]
    return [[True] * leaves, only_first, only_second]


def transposed(leaf: Tensor) -> Tensor:
    """Return a copy whose first dimension has the smallest stride."""
    return leaf.transpose(0, -1).contiguous().transpose(0, -1).detach()


def detached(value: Any, is_backward: bool) -> Any:
    """Return an argument of an operator without its history; backward needs no gradients."""
    if not isinstance(value, Tensor):
        return value
    return value.detach().requires_grad_(value.requires_grad and not is_backward)


def operator_calls(
    sample: Sample,
    device: str,
    transpose: bool = False,
) -> list[tuple[Any, tuple[Any, ...]]]:
    """Return the registered operators that a function calls, with their arguments.

    The function is called with gradients of all leaves, of the first, and of the second.

    Args:
        sample: The call.
        device: Where it runs.
        transpose: Whether the leaves are transposed copies.
    """
    calls: dict[str, tuple[Any, tuple[Any, ...]]] = {}
    for needed in needed_gradients(len(sample.shapes)):
        leaves = [leaf.detach() for leaf in sample.leaves(device)]
        if transpose:
            leaves = [transposed(leaf) for leaf in leaves]
        for leaf, needs_gradient in zip(leaves, needed, strict=True):
            leaf.requires_grad_(needs_gradient and not sample.inference)
        with RecordCalls() as recorder:
            scores = sample.function(*leaves, **sample.arguments(device))
            if scores.requires_grad:
                scores.backward(output_gradient(scores))
        for func, args in recorder.calls:
            is_backward = func._opname.endswith("_backward")
            arguments = tuple(detached(value, is_backward) for value in args)
            key = f"{func} {needed if is_backward else None}"
            calls.setdefault(key, (func, arguments))
    return list(calls.values())


def checks_of(args: tuple[Any, ...]) -> tuple[str, ...]:
    """Return the checks of ``opcheck``; that of the schema does arithmetic that fp8 lacks."""
    checks = ("test_faketensor", "test_aot_dispatch_dynamic")
    for value in args:
        if isinstance(value, Tensor) and value.dtype == torch.float8_e4m3fn:
            return checks
    return (*checks, "test_schema", "test_autograd_registration")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sample", further_combinations_slow(OPCHECKED), ids=str)
def test_operators_pass_opcheck(sample: Sample, device: str) -> None:
    calls = operator_calls(sample, device)
    if "lsr_head" in sample.name and not sample.inference:
        calls += operator_calls(sample, device, transpose=True)[:1]
    for func, args in calls:
        torch.library.opcheck(func, args, test_utils=checks_of(args))


def test_every_registered_operator_is_checked() -> None:
    names = {str(name).split(".")[0] for name in torch._C._dispatch_get_all_op_names()}
    registered = {name for name in names if name.startswith("tilefold::") and "toy" not in name}
    called = set()
    for sample in OPCHECKED:
        called |= {func._schema.name for func, _ in operator_calls(sample, "cpu")}
    assert called | CHECKED_ELSEWHERE == registered


GROWING: dict[str, GrowingCall] = cases("growing")


def scores_and_gradients(sample: Sample, function: Callable[..., Tensor]) -> list[Tensor]:
    """Return the scores by ``function``, and the gradients of their sum."""
    leaves = sample.leaves("cpu")
    scores = function(*leaves, **sample.arguments("cpu"))
    return [scores, *torch.autograd.grad(scores.sum(), leaves)]


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("name", GROWING)
def test_batches_of_other_sizes_reuse_one_dynamic_graph(name: str) -> None:
    growing = GROWING[name]
    counter = CompileCounterWithBackend("aot_eager")
    function = growing.sample(3, 8).function
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=counter)
    for count, length in ((3, 8), (5, 13), (6, 21), (9, 40)):
        sample = growing.sample(count, length)
        expected = scores_and_gradients(sample, function)
        torch.testing.assert_close(scores_and_gradients(sample, compiled), expected)
    assert counter.frame_count <= growing.compilations, (
        f"{counter.frame_count} compilations for four shapes"
    )
