"""Calls like an earlier one: errors, lengths and strides of entmax attention.

What holds for the repeated launches of every operator is in ``tests/ops/shared/test_launches.py``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels import triton_interpreted
from tests.ops.conftest import Target
from tests.ops.matching import assert_entmax_attention_matches
from tests.ops.samples import assert_same_bits
from tests.refusals import refused
from tilefold.ops import entmax_attention
from tilefold.testing.entmax_attention import (
    EntmaxAttentionInputs,
    entmax_attention_inputs,
    entmax_attention_results,
)

pytestmark = pytest.mark.usefixtures("empty_call_caches")
INTERPRETED = triton_interpreted()
SHORT = 10
no_interpreter = pytest.mark.skipif(
    INTERPRETED,
    reason="needs no interpreter, or what it cannot do",
)


def problem(target: Target, n: int = SHORT, seed: int = 0, **options: Any) -> EntmaxAttentionInputs:
    sizes: dict[str, Any] = {"kv_heads": 1, "dtype": torch.float32} | options
    batch = 2 if "layout" in options or not INTERPRETED else 1
    return entmax_attention_inputs(batch, 2, n, 16, device=target.device, seed=seed, **sizes)


def laid_out(tensor: Tensor, how: str) -> Tensor:
    if how == "tokens first":
        return tensor.transpose(1, 2).contiguous().transpose(1, 2)
    if how == "part of a wider one":
        return torch.cat([tensor, tensor], dim=-1)[..., : tensor.size(-1)]
    return tensor.transpose(2, 3).contiguous().transpose(2, 3)


@pytest.mark.parametrize("how", ["tokens first", "part of a wider one", "last dimension first"])
def test_other_strides_are_other_calls_and_those_of_the_results(target: Target, how: str) -> None:
    if INTERPRETED and how == "part of a wider one":
        pytest.skip("interpreting takes seconds per case")
    inputs = problem(target)
    plain = entmax_attention_results(inputs, impl=target.impl)
    q, k, v = (laid_out(tensor, how) for tensor in (inputs.q, inputs.k, inputs.v))
    strange = EntmaxAttentionInputs(q, k, v, laid_out(inputs.dout, how), {})
    actual = assert_entmax_attention_matches(
        strange,
        impl=target.impl,
    )  # other strides may add up in another order
    again = entmax_attention_results(strange, impl=target.impl)
    assert all(torch.equal(again[name], value) for name, value in actual.items())
    dense = how != "last dimension first"
    assert (
        again["out"].stride() == (torch.empty_like(q) if dense else inputs.q.contiguous()).stride()
    )
    assert (
        again["dk"].stride() == (torch.empty_like(k) if dense else inputs.k.contiguous()).stride()
    )
    assert torch.equal(entmax_attention_results(inputs, impl=target.impl)["dq"], plain["dq"])


WRONG: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"alpha": 1.0}, {"alpha": True}, "alpha must be a number in"),
    ({"alpha": 1.5}, {"alpha": [1.5]}, "alpha must be a number in"),
    ({"window": 1}, {"window": True}, "window must be an integer"),
    ({"window": 2}, {"window": 2.0}, "window must be an integer"),
    ({"dropout_p": 0}, {"dropout_p": False}, "dropout_p must be a number"),
    ({"max_seqlen_k": 1}, {"max_seqlen_k": True}, "max_seqlen_k must be an integer"),
    ({}, {"return_stats": "all"}, "return_stats must be one of"),
    ({}, {"impl": "flash"}, "impl must be one of"),
]


@pytest.mark.parametrize(("good", "bad", "text"), WRONG, ids=[str(w[1]) for w in WRONG])
def test_what_equals_a_good_argument_is_no_good_argument(
    target: Target,
    good: dict[str, Any],
    bad: dict[str, Any],
    text: str,
) -> None:
    q = torch.randn(1, 1, 4, 16, device=target.device)
    for _ in range(2):
        entmax_attention(q, q, q, **{"impl": target.impl} | good)
        refused(ValueError, text, entmax_attention, q, q, q, **{"impl": target.impl} | bad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_something_else_than_a_tensor_is_named_under_autocast_too(
    target: Target,
    dtype: torch.dtype,
) -> None:
    q: Any = torch.randn(1, 1, 4, 16, device=target.device).to(dtype)
    with torch.autocast(torch.device(target.device).type, dtype=torch.bfloat16):
        for wrong in ((None, q, q), (q, None, q), (q, q, [q])):
            refused(
                TypeError,
                r"[qkv] must be a torch.Tensor, got",
                entmax_attention,
                *wrong,
                impl=target.impl,
            )


def test_values_are_checked_at_every_call_where_the_host_may_look(target: Target) -> None:
    if target.device != "cpu":
        pytest.skip("looking would wait for the device")
    q, rows = torch.randn(1, 2, 4, 16), torch.randn(4, 2, 16)
    entmax_attention(q, q, q, alpha=torch.tensor([1.2, 2.0]), impl=target.impl)
    with pytest.raises(ValueError, match=r"alpha must lie in \[1, 2\]"):
        entmax_attention(q, q, q, alpha=torch.tensor([1.2, 2.1]), impl=target.impl)
    good, bad = torch.tensor([0, 2, 4]), torch.tensor([0, 3, 2])
    entmax_attention(rows, rows, rows, cu_seqlens_q=good, cu_seqlens_k=good, impl=target.impl)
    with pytest.raises(ValueError, match="cu_seqlens_k must start with 0"):
        entmax_attention(rows, rows, rows, cu_seqlens_q=good, cu_seqlens_k=bad, impl=target.impl)


@no_interpreter
def test_fp64_beside_another_dtype_is_refused_under_autocast_too(target: Target) -> None:
    # Autocast does not cast fp64, and kernels read all operands in the dtype of the first one.
    single = torch.randn(1, 1, 4, 16, device=target.device)
    double = single.double()
    with torch.autocast(torch.device(target.device).type, dtype=torch.bfloat16):
        for q, k, v in ((single, double, double), (double, single, single)):
            refused(
                TypeError,
                "k and v must have the dtype of q",
                entmax_attention,
                q,
                k,
                v,
                impl=target.impl,
            )


def test_several_dtypes_are_refused_on_the_meta_device() -> None:
    q = torch.empty(1, 1, 4, 16, device="meta")
    k = q.bfloat16()
    refused(TypeError, "k and v must have the dtype of q", entmax_attention, q, k, k)


@no_interpreter
def test_autocast_after_a_call_without_it_and_before_one(target: Target) -> None:
    inputs = problem(target)
    kind = torch.device(target.device).type
    rounded = inputs.cast(torch.bfloat16)
    plain = entmax_attention_results(rounded, impl=target.impl)
    wide = entmax_attention_results(inputs, impl=target.impl)
    for _ in range(2):
        with torch.autocast(kind, dtype=torch.bfloat16):
            narrow = entmax_attention_results(rounded, impl=target.impl)
            cast = entmax_attention_results(inputs, impl=target.impl)
        assert_same_bits(narrow, plain)
        assert cast["out"].dtype == torch.bfloat16 and torch.equal(cast["out"], plain["out"])
        assert cast["dq"].dtype == torch.float32
        assert torch.equal(entmax_attention_results(inputs, impl=target.impl)["dq"], wide["dq"])


@no_interpreter
@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
def test_no_call_waits_for_the_device() -> None:
    target = Target("triton", "cuda")
    cases: list[tuple[EntmaxAttentionInputs, dict[str, Any]]] = [
        (problem(target), {}),
        (problem(target, 1100), {"causal": True}),
        (problem(target, layout="holes"), {"alpha": torch.tensor([1.2, 1.7], device="cuda")}),
        (problem(target, layout="packed"), {}),
        (problem(target, layout="holes"), {"return_stats": "blocks"}),
        (problem(target, layout="packed"), {"return_stats": "blocks", "causal": True}),
    ]
    for again in (False, True):
        for inputs, options in cases:
            leaves = [t.detach().requires_grad_() for t in (inputs.q, inputs.k, inputs.v)]
            try:
                torch.cuda.set_sync_debug_mode(
                    "error" if again else "default",
                )  # the first call compiles
                actual = entmax_attention(*leaves, **inputs.layout, **options)
                if isinstance(actual, tuple):
                    actual[1].live_share()
                torch.autograd.grad(
                    actual if isinstance(actual, Tensor) else actual[0],
                    leaves,
                    inputs.dout,
                )
            finally:
                torch.cuda.set_sync_debug_mode("default")
