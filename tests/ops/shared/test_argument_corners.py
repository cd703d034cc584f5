"""Arguments of operators: wrong kinds, no elements, torch's defaults, transforms and copies."""

from __future__ import annotations

import copy
import importlib
import io
import pickle
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels import triton_installed
from tests.ops.contracts import CONTRACTS, cases, listed
from tests.ops.contracts.contract import OffsetCall, TypedCall
from tilefold.ops import (
    QuantizedTokens,
    QuantizedWeight,
    entmax_attention,
    lsr_head,
    maxsim,
    quantize_tokens,
    quantize_weight,
)

D = 8


@pytest.fixture
def other_defaults() -> Iterator[None]:
    """Make torch create tensors on the meta device and in fp64 by default."""
    torch.set_default_device("meta")
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)


TYPED_CALLS: list[TypedCall] = list(listed("typed_calls"))
LIST_ARGUMENTS = ("pairing",)  # arguments that may be lists
Refusal = tuple[Any, type[Exception], str]


def wrong_floats(call: TypedCall, name: str) -> list[Refusal]:
    """Wrong values of a floating-point argument, with the errors that they cause."""
    value = call.floats[name]
    first = next(iter(call.floats))
    refusals: list[Refusal] = [
        (
            value.int(),
            TypeError,
            f"{name} must have dtype float16, bfloat16, float32, float64, got int32; "
            "cast it with .to(torch.",
        ),
    ]
    if name in call.same_dtype:
        refusals.append(
            (
                value.half(),
                TypeError,
                f"{name} must have the dtype of {first} (float32), got float16; cast one",
            ),
        )
    return refusals


def wrong_integers(name: str, value: Tensor) -> list[Refusal]:
    """Wrong values of a mask, of ids or of offsets, with the errors that they cause."""
    if "mask" in name:
        message = f"{name} must be bool, integer or floating, got torch.complex64."
        return [(value.to(torch.complex64), TypeError, message)]
    is_offsets = name.startswith("cu_seqlens")
    method = "int" if is_offsets else "long"
    message = f"{name} must have dtype int32, int64, got float32; use {name}.{method}()."
    refusals: list[Refusal] = [(value.float(), TypeError, message)]
    if is_offsets:
        refusals.append((value[None], ValueError, f"{name} must have shape ["))
        refusals.append((value[:0], ValueError, f"{name} must have shape ["))
    return refusals


def wrong_tensors(call: TypedCall, name: str) -> list[Refusal]:
    """Wrong values of an argument that must be a tensor, with the errors that they cause."""
    value = (call.floats | call.others)[name]
    first = next(iter(call.floats))
    refusals: list[Refusal] = []
    if name not in LIST_ARGUMENTS:
        message = f"{name} must be a torch.Tensor, got list; convert it first."
        refusals.append(([[1.0]], TypeError, message))
    if name != first:
        message = (
            f"{name} must be on the device of {first} (cpu), got meta; "
            f"move it with .to({first}.device)."
        )
        refusals.append((value.to("meta"), ValueError, message))
    if name in call.floats:
        refusals += wrong_floats(call, name)
    else:
        refusals += wrong_integers(name, value)
    return refusals


@pytest.mark.parametrize(
    "call",
    TYPED_CALLS,
    ids=lambda call: f"{call.function.__name__}-{'-'.join(call.floats | call.others)}",
)
def test_arguments_of_another_kind_are_refused_by_name(call: TypedCall) -> None:
    arguments = call.floats | call.others
    call.function(**arguments)
    for name, value in arguments.items():
        if not isinstance(value, Tensor):
            continue
        for wrong, error, message in wrong_tensors(call, name):
            with pytest.raises(error, match=f"^{re.escape(message)}"):
                call.function(**(arguments | {name: wrong}))


@pytest.mark.parametrize("impl", ["tiled", "reference"])
@pytest.mark.parametrize("sizes", [(0, 3, 5), (2, 0, 5), (2, 3, 0)])
def test_attention_over_nothing_has_a_gradient_of_zeros(
    impl: str,
    sizes: tuple[int, int, int],
) -> None:
    batch, nq, nk = sizes
    q, k, v = (torch.randn(batch, 2, n, D, requires_grad=True) for n in (nq, nk, nk))
    out = entmax_attention(q, k, v, impl=impl)
    assert out.shape == q.shape
    assert not out.any()
    out.sum().backward()
    assert all(leaf.grad is not None and not leaf.grad.any() for leaf in (q, k, v))
    assert entmax_attention(*(leaf.to("meta") for leaf in (q, k, v)), impl=impl).shape == q.shape


def test_groups_of_no_query_keep_the_number_of_their_documents() -> None:
    queries, documents = torch.randn(0, 3, D, requires_grad=True), torch.randn(0, 4, 5, D)
    scores = maxsim(queries, documents, pairing="grouped")
    assert scores.shape == (0, 4)
    scores.sum().backward()


@pytest.mark.parametrize("call", cases("default_calls").values(), ids=cases("default_calls"))
def test_results_have_the_device_and_dtype_of_the_arguments_whatever_torchs_defaults(
    other_defaults: None,
    call: Callable[[Tensor], Any],
) -> None:
    x = torch.rand(2, 3, 1, device="cpu", dtype=torch.float32, requires_grad=True)
    scores = call(x)
    assert scores.device.type == "cpu" and scores.dtype == torch.float32
    if scores.requires_grad:
        scores.sum().backward()
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.testing.assert_close(scores.to_dense(), call(x).to_dense())


X = torch.rand(2, 3, D, generator=torch.Generator().manual_seed(0))
CALLS = cases("calls")
WHOLE_CALLS = cases("whole_calls")
every_call = pytest.mark.parametrize("name", CALLS)


@every_call
def test_sparse_and_nested_tensors_are_refused_by_name(name: str) -> None:
    def call(x: Tensor) -> Any:
        return WHOLE_CALLS[name](x) if name in WHOLE_CALLS else CALLS[name](x, "auto")

    sparse = X.to_sparse()
    with pytest.raises(
        TypeError,
        match=r"\w+ must be a dense tensor, got layout torch\.sparse_coo; use \w+\.to_dense\(\)",
    ):
        call(sparse)
    nested = torch.nested.nested_tensor([X[0], X[1]], layout=torch.jagged)
    with pytest.raises(TypeError, match=r"\w+ must be a dense tensor, got a nested one"):
        call(nested)


BF16 = torch.bfloat16
NO_BF16 = r"dtypes must be float16 or float32 for impl='triton'"


def import_kernels() -> None:
    """Import all kernels, so that none is first imported, and then interpreted, by a later call."""
    for contract in CONTRACTS:
        package = contract.operator.reference.__module__.rpartition(".")[0]
        importlib.import_module(f"{package}.plans")


@pytest.mark.skipif(not triton_installed(), reason="triton is not installed")
@pytest.mark.parametrize("call", cases("bf16_calls").values(), ids=cases("bf16_calls"))
def test_interpreted_kernels_refuse_bf16_which_the_interpreter_takes_for_integers(
    monkeypatch: pytest.MonkeyPatch,
    call: Callable[[Tensor], object],
) -> None:
    import_kernels()
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(RuntimeError, match=NO_BF16 + r".*got bfloat16: it mult"):
        call(X)


@pytest.mark.skipif(not triton_installed(), reason="triton is not installed")
def test_interpreted_kernels_refuse_bf16_of_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    import_kernels()
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with torch.autocast("cpu", dtype=BF16), pytest.raises(RuntimeError, match=NO_BF16):
        lsr_head(X, X[0], impl="triton")


@every_call
def test_function_transforms_need_the_reference(name: str) -> None:
    def scores(impl: str) -> Callable[[Tensor], Any]:
        return lambda x: CALLS[name](x, impl)

    def sum_of_scores(impl: str) -> Callable[[Tensor], Any]:
        return lambda x: CALLS[name](x, impl).sum()

    def run(impl: str, transform: str) -> object:
        if transform == "grad":
            return torch.func.grad(sum_of_scores(impl))(X)
        if transform == "jacrev":
            return torch.func.jacrev(scores(impl))(X)
        return torch.func.vjp(scores(impl), X)

    for transform in ("grad", "jacrev", "vjp"):
        run("reference", transform)
        with pytest.raises(
            RuntimeError,
            match=r"impl must be 'reference' under torch\.func\.grad, vjp and jacrev, got 'auto'",
        ):
            run("auto", transform)


@every_call
def test_forward_mode_of_the_reference_agrees_with_gradients_and_needs_the_reference(
    name: str,
) -> None:
    operator = CALLS[name]
    direction = torch.arange(X.numel()).view_as(X) / X.numel()
    x = X.clone().requires_grad_()
    weights = operator(X, "reference").detach()
    (gradient,) = torch.autograd.grad((operator(x, "auto") * weights).sum(), x)
    _, tangent = torch.func.jvp(
        lambda primal: (operator(primal, "reference") * weights).sum(),
        (X,),
        (direction,),
    )
    torch.testing.assert_close(tangent, (gradient * direction).sum(), rtol=1e-4, atol=1e-6)
    with pytest.raises(
        RuntimeError,
        match="impl must be 'reference' in forward-mode differentiation",
    ):
        torch.func.jvp(lambda primal: operator(primal, "auto"), (X,), (direction,))


OFFSET_CALLS: list[OffsetCall] = list(listed("offset_calls"))
# Offsets of six tokens that are no cumulative lengths, and what the error says about them.
WRONG_OFFSETS = {
    (1, 2, 6): "[0] = 1",
    (-1, 2, 6): "[0] = -1",
    (0, 4, 2, 6): "[2] = 2 after 4",
    (0, -2, 6): "[1] = -2 after 0",
    (0, 2, 5): "[-1] = 5 with 6 {unit} in {tensor}",
    (0, 2, 7): "[-1] = 7 with 6 {unit} in {tensor}",
    (0,): "[-1] = 0 with 6 {unit} in {tensor}",
    # In 32 bits no difference is negative.
    (0, 2**31 - 1, -2, 6): "[2] = -2 after 2147483647",
}


@pytest.mark.parametrize("values", WRONG_OFFSETS, ids=str)
@pytest.mark.parametrize("impl", ["reference", "tiled"])
@pytest.mark.parametrize("case", OFFSET_CALLS, ids=lambda case: f"{case.tensor} by {case.name}")
def test_offsets_that_are_no_cumulative_lengths_are_refused(
    case: OffsetCall,
    impl: str,
    values: tuple[int, ...],
) -> None:
    problem = WRONG_OFFSETS[values].format(unit=case.unit, tensor=case.tensor)
    message = (
        f"{case.name} must start with 0, never decrease and end at the number of {case.unit} of "
        f"{case.tensor}, got {case.name}{problem}; build it as the cumulative sum of the sequence "
        "lengths with a 0 in front."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        case.call(torch.tensor(values, dtype=torch.int32), impl)


@pytest.mark.parametrize(
    ("function", "option"),
    [
        pytest.param(function, option, id=f"{function.__name__}-{option}")
        for function, options in cases("unhashable_options").items()
        for option in options
    ],
)
def test_options_of_no_hashable_type_are_refused_by_name(
    function: Callable[..., Any],
    option: str,
) -> None:
    second = X[0] if function is lsr_head else X
    with pytest.raises((TypeError, ValueError), match=option):
        function(X, second, **{option: ["max"]})


def pickled(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))  # noqa: S301


def saved(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


ROWS = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


def values_and_scales(value: QuantizedWeight | QuantizedTokens) -> tuple[Tensor, Tensor]:
    return value.values, value.scale if isinstance(value, QuantizedWeight) else value.scales


@pytest.mark.parametrize("copy_of", [pickled, saved, copy.deepcopy, copy.copy])
@pytest.mark.parametrize(
    "make",
    [
        lambda: quantize_weight(ROWS),
        lambda: quantize_weight(ROWS)[2:5],
        lambda: quantize_tokens(ROWS, "fp8"),
        lambda: quantize_tokens(ROWS.view(2, 3, 4), "int8"),
    ],
    ids=["weight", "rows of a weight", "fp8 tokens", "int8 tokens"],
)
def test_copies_hold_the_same_numbers(
    make: Callable[[], QuantizedWeight | QuantizedTokens],
    copy_of: Callable[[Any], Any],
) -> None:
    original = make()
    copied = copy_of(original)
    assert type(copied) is type(original)
    pairs = zip(values_and_scales(copied), values_and_scales(original), strict=True)
    for tensor, expected in pairs:
        assert tensor.dtype == expected.dtype and tensor.shape == expected.shape
        shares_memory = tensor.data_ptr() == expected.data_ptr()
        assert shares_memory == (copy_of is copy.copy)
        assert torch.equal(tensor.view(torch.uint8), expected.view(torch.uint8))


def test_a_pickled_slice_does_not_carry_the_whole_weight() -> None:
    assert len(pickle.dumps(quantize_weight(torch.randn(1000, 64))[:2])) < 2000
