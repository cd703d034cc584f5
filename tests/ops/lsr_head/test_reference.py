"""The specification of the LSR head by hand, and what it says about arguments."""

from __future__ import annotations

import importlib
import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels import triton_installed
from tests.ops.lsr_head.helpers import POOLINGS
from tests.refusals import refused
from tilefold.ops import lsr_head, lsr_head_sparse
from tilefold.ops.lsr_head import chosen_impl


def head(hidden: object, weight: object, bias: object = None, **options: object) -> Tensor:
    """The reference on nested lists, linear unless another activation is named."""
    tensors = [
        None if x is None else torch.as_tensor(x, dtype=torch.float64)
        for x in (hidden, weight, bias)
    ]
    options = {"activation": "none"} | options
    for name in ("attention_mask", "cu_seqlens"):
        if name in options and not isinstance(options[name], Tensor):
            options[name] = torch.tensor(options[name], dtype=torch.int32)
    return lsr_head(*tensors, impl="reference", **options)


TOKENS = [[[10.0], [11.0], [12.0], [13.0]]]
BY_HAND = {
    "the largest valid "
    "logit": ([[[1.0, 0], [0, 2], [3, 1]]], [[1.0, 0], [0, 1], [1, 1]], None, {}, [3.0, 2.0, 4.0]),
    "a bias once, after the "
    "scale": ([[[1.0], [2.0]]], [[3.0]], [10.0], {"logit_scale": 0.5}, [13.0]),
    "products alone without a bias": ([[[1.0], [2.0]]], [[3.0]], None, {"logit_scale": 0.5}, [3.0]),
    "the smallest under a negative "
    "scale": ([[[1.0], [-2.0], [5.0]]], [[1.0]], None, {"logit_scale": -1.0}, [2.0]),
    "minus infinity beats what is masked": (
        [[[5.0], [-math.inf]]], [[1.0]], None, {"attention_mask": [[0, 1]]}, [-math.inf],
    ),
    **{name: ([[[1.0]]], [[-2.0], [3.0]], None, {"activation": name}, values)
       for name, values in (
           ("log1p_relu", [0.0, math.log(4)]), ("log1p_log1p_relu", [0.0, math.log1p(math.log(4))]),
           ("relu", [0.0, 3.0]), ("softplus", [math.log1p(math.exp(-2)), math.log1p(math.exp(3))]),
           ("none", [-2.0, 3.0]))},
    "sum of activated tokens": ([[[1.0], [-5.0], [3.0], [9.0]]], [[1.0]], None,
                                {"attention_mask": [[1, 1, 1, 0]], "activation": "relu", "pooling": "sum"}, [4.0]),
    "mean of activated tokens": ([[[1.0], [-5.0], [3.0], [9.0]]], [[1.0]], None,
                                 {"attention_mask": [[1, 1, 1, 0]], "activation": "relu", "pooling": "mean"}, [4 / 3]),
    **{f"{pooling} of {mask}": (TOKENS, [[1.0]], None, {"pooling": pooling, "attention_mask": [mask]}, [token])
       for pooling, mask, token in (
           ("cls", [1, 1, 0, 0], 10.0), ("last", [1, 1, 0, 0], 11.0), ("cls", [0, 0, 1, 1], 12.0),
           ("last", [0, 0, 1, 1], 13.0), ("cls", [0, 1, 0, 1], 11.0), ("last", [1, 0, 1, 0], 12.0))},
    **{f"{pooling} of no token": (TOKENS, [[1.0]], [2.0], {"pooling": pooling, "attention_mask": [[0, 0, 0, 0]],
                                                           "activation": "softplus"}, [0.0]) for pooling in POOLINGS},
    **{f"any nonzero mask value, as {mask}": ([[[1.0], [2.0], [3.0]]], [[1.0]], None,
                                              {"attention_mask": torch.tensor([mask]), "pooling": "sum"}, [3.0])
       for mask in ([0.5, -1.0, 0.0], [True, True, False], [2, 7, 0])},
}  # fmt: skip


@pytest.mark.parametrize("case", BY_HAND)
def test_scores_by_hand(case: str) -> None:
    hidden, weight, bias, options, expected = BY_HAND[case]
    assert head(hidden, weight, bias, **options)[0].tolist() == pytest.approx(expected, rel=1e-12)


def test_ties_go_to_the_lowest_token_which_takes_the_whole_gradient() -> None:
    hidden = torch.tensor([[[1.0], [2.0], [2.0], [2.0]]], requires_grad=True)
    lsr_head(hidden, torch.tensor([[1.0]]), impl="reference", activation="none").sum().backward()
    assert hidden.grad.flatten().tolist() == [0, 1, 0, 0]


def test_a_score_of_exactly_zero_passes_no_gradient_through_relu() -> None:
    hidden = torch.tensor([[[0.0], [-1.0]]], requires_grad=True)
    lsr_head(hidden, torch.tensor([[1.0]]), impl="reference").sum().backward()
    assert not hidden.grad.any()


@pytest.mark.parametrize("poison", [1e30, math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("pooling", POOLINGS)
def test_a_masked_token_never_counts_whatever_it_holds(pooling: str, poison: float) -> None:
    hidden = torch.tensor([[[poison], [1.0], [poison], [2.0], [poison]]], requires_grad=True)
    weight = torch.tensor([[1.0]], requires_grad=True)
    mask = torch.tensor([[0, 1, 0, 1, 0]])
    out = lsr_head(
        hidden,
        weight,
        attention_mask=mask,
        pooling=pooling,
        activation="none",
        impl="reference",
    )
    assert out.item() == {"max": 2, "sum": 3, "mean": 1.5, "cls": 1, "last": 2}[pooling]
    out.sum().backward()
    counted = {"max": [0, 1], "sum": [1, 1], "mean": [0.5, 0.5], "cls": [1, 0], "last": [0, 1]}[
        pooling
    ]
    assert hidden.grad.flatten().tolist() == [0, counted[0], 0, counted[1], 0]
    assert weight.grad.item() == out.item()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_winner_is_chosen_before_rounding(dtype: torch.dtype) -> None:
    # 256 * 1 + 1 * x: the two sums differ by 2^-4, which neither dtype can hold at 256
    hidden = torch.tensor([[[16.0, 1.0], [16.0, 1.0625]]], dtype=dtype, requires_grad=True)
    out = lsr_head(
        hidden,
        torch.tensor([[128.0, 1.0]], dtype=dtype),
        activation="none",
        impl="reference",
    )
    out.sum().backward()
    assert out.dtype == dtype
    assert hidden.grad[0, :, 1].tolist() == [0.0, 1.0]


# What the head says about arguments that do not fit: the name, what was expected, what came, what
# to do

HIDDEN, PACKED = torch.zeros(2, 3, 4), torch.zeros(6, 4)
WEIGHT, BIAS = torch.zeros(5, 4), torch.zeros(5)
MASK = torch.ones(2, 3)
OFFSETS = torch.tensor([0, 2, 6], dtype=torch.int32)
WHOLE = {"weight": WEIGHT, "bias": BIAS, "attention_mask": MASK, "cu_seqlens": OFFSETS}


SPELLED = "'log1p_relu', 'log1p_log1p_relu', 'relu', 'softplus', 'none'"
CAST = "cast it with .to(torch.bfloat16) or another of these."
FLOATS = "float16, bfloat16, float32, float64"
PACKED_INPUT = {"hidden": PACKED, "cu_seqlens": OFFSETS}
WRONG_VALUES: list[tuple[dict[str, Any], str]] = [
    ({"hidden": torch.zeros(2, 4)}, "hidden must have shape [B, S, D], got [2, 4]."),
    ({"hidden": torch.zeros(())}, "hidden must have shape [B, S, D], got []."),
    ({"hidden": HIDDEN, "cu_seqlens": OFFSETS}, "hidden must have shape [T, D], got [2, 3, 4]."),
    ({"weight": torch.zeros(5)}, "weight must have shape [V, D] with D=4, got [5]."),
    ({"weight": torch.zeros(4, 5)}, "weight must have shape [V, D] with D=4, got [4, 5]."),
    ({"bias": torch.zeros(4)}, "bias must have shape [V] with V=5, got [4]."),
    ({"bias": torch.zeros(1, 5)}, "bias must have shape [V] with V=5, got [1, 5]."),
    *(
        (
            {"attention_mask": torch.ones(shape)},
            f"attention_mask must have shape [B, S] with B=2, S=3, got {[*shape]}.",
        )
        for shape in ((2, 4), (3, 3), (2, 3, 1))
    ),
    (
        {"hidden": HIDDEN[..., :0], "weight": WEIGHT[:, :0]},
        "D must be at least 1, got D=0 in shape [2, 3, 0].",
    ),
    ({"weight": torch.zeros(0, 4), "bias": None}, "V must be at least 1, got V=0 in shape [0, 4]."),
    (
        PACKED_INPUT | {"attention_mask": MASK},
        "attention_mask must be None with packed input, got a tensor; cu_seqlens already says "
        "which tokens belong to which sequence.",
    ),
    ({"pooling": "avg"}, "pooling must be one of 'max', 'sum', 'mean', 'cls', 'last', got 'avg'."),
    ({"pooling": None}, "pooling must be one of 'max', 'sum', 'mean', 'cls', 'last', got None."),
    ({"activation": "gelu"}, f"activation must be one of {SPELLED}, got 'gelu'."),
    ({"activation": ["relu"]}, f"activation must be one of {SPELLED}, got ['relu']."),
    ({"impl": "cuda"}, "impl must be one of 'auto', 'reference', 'tiled', 'triton', got 'cuda'."),
    ({"impl": None}, "impl must be one of 'auto', 'reference', 'tiled', 'triton', got None."),
    *(
        (
            {"logit_scale": scale},
            f"logit_scale must be a finite Python number, got {scale!r}; multiply hidden by a "
            "tensor to learn a scale.",
        )
        for scale in (math.nan, math.inf, -math.inf, None, "1", torch.tensor(2.0), 1j)
    ),
]
WRONG_TYPES: list[tuple[dict[str, Any], str]] = [
    ({"out_dtype": torch.int8}, f"out_dtype must be one of {FLOATS} or None, got torch.int8."),
    ({"out_dtype": "float16"}, f"out_dtype must be one of {FLOATS} or None, got 'float16'."),
]


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        *((given, ValueError, said) for given, said in WRONG_VALUES),
        *((given, TypeError, said) for given, said in WRONG_TYPES),
    ],
)
@pytest.mark.parametrize("function", [lsr_head, lsr_head_sparse])
def test_arguments_that_are_wrong(
    function: Any,
    changed: dict[str, Any],
    error: type[Exception],
    message: str,
) -> None:
    arguments = {"hidden": HIDDEN, "weight": WEIGHT, "bias": BIAS} | changed
    refused(error, f"^{re.escape(message)}$", function, **arguments)


def test_fp64_is_refused_by_triton_and_tiled_by_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    if triton_installed():
        importlib.import_module(
            "tilefold.ops.lsr_head.plans",
        )  # else its kernels would be interpreted ever after
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr("tilefold.ops._shared.impl.triton_installed", lambda: True)
    assert chosen_impl(HIDDEN.double()) == "tiled"
    message = (
        "hidden must have dtype float16, bfloat16, float32 for impl='triton', got float64; use "
        "impl='auto' or impl='tiled'."
    )
    refused(
        TypeError,
        f"^{re.escape(message)}$",
        lsr_head,
        HIDDEN.double(),
        WEIGHT.double(),
        impl="triton",
    )


def test_a_missing_gpu_is_named_before_a_missing_triton_package(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tilefold.ops._shared.impl.triton_installed", lambda: False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    refused(RuntimeError, "the kernels need a CUDA device", chosen_impl, HIDDEN, "triton")


def test_a_missing_triton_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilefold.ops._shared.impl.triton_installed", lambda: False)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    refused(
        RuntimeError,
        r"the package triton is not installed \(pip install triton\)",
        chosen_impl,
        HIDDEN,
        "triton",
    )


@pytest.mark.gpu
def test_triton_is_chosen_on_a_gpu() -> None:
    assert chosen_impl(HIDDEN) == "tiled" and chosen_impl(HIDDEN.cuda()) == "triton"
    assert chosen_impl(HIDDEN.cuda().double()) == "tiled"


MAIN_GRADS = [
    (
        {"weight_main_grad": torch.zeros(4, 5)},
        ValueError,
        r"weight_main_grad must have shape \[V, D\] with V=5, D=4",
    ),
    (
        {"weight_main_grad": torch.zeros(5, 4).half()},
        TypeError,
        "weight_main_grad must have dtype float32, got",
    ),
    ({"weight_main_grad": torch.zeros(4, 5).T}, ValueError, "weight_main_grad must be contiguous"),
    (
        {"weight_main_grad": torch.zeros(5, 4), "pooling": "sum"},
        ValueError,
        "must be None with pooling='sum'",
    ),
    (
        {"weight_main_grad": torch.zeros(5, 4), "impl": "reference"},
        ValueError,
        "must be None with .*impl='reference'",
    ),
    (
        {"weight_main_grad": torch.zeros(5, 4)},
        ValueError,
        "must be None if weight needs no gradient",
    ),
]


@pytest.mark.parametrize(("options", "error", "message"), MAIN_GRADS)
def test_buffers_that_cannot_take_the_gradient(
    options: dict[str, Any],
    error: type[Exception],
    message: str,
) -> None:
    refused(error, message, lsr_head, HIDDEN, WEIGHT, **options)
