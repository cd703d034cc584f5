"""What an outside caller may do to any operator: wrong kinds of arguments, no elements, torch's own defaults."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from tilefold.ops import (
    entmax,
    entmax_attention,
    lsr_head,
    lsr_head_sparse,
    maxsim,
    token_scatter,
    token_scatter_sparse,
)

D = 8


@pytest.fixture
def elsewhere() -> Iterator[None]:
    """Tensors that are made without a device lie on the meta device."""
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


def attention_inputs() -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(1, 2, 3, D), torch.randn(1, 2, 5, D), torch.randn(1, 2, 5, D)


def test_attention_refuses_values_on_another_device() -> None:
    q, k, v = attention_inputs()
    with pytest.raises(ValueError, match="v must be on the device of q"):
        entmax_attention(q, k, v.to("meta"))


@pytest.mark.parametrize("name", ["key_padding_mask", "cu_seqlens_q", "cu_seqlens_k"])
def test_attention_refuses_lists_for_tensors(name: str) -> None:
    q, k, v = attention_inputs()
    if name != "key_padding_mask":
        q, k, v = q[0], k[0][:, :3], v[0][:, :3]
    with pytest.raises(TypeError, match=f"{name} must be a torch.Tensor, got list"):
        entmax_attention(q, k, v, **{name: [[1, 1, 1, 1, 1]]})  # type: ignore[arg-type]


@pytest.mark.parametrize("impl", ["tiled", "reference"])
@pytest.mark.parametrize("sizes", [(0, 3, 5), (2, 0, 5), (2, 3, 0)])
def test_attention_over_nothing_has_a_gradient_of_zeros(impl: str, sizes: tuple[int, int, int]) -> None:
    batch, nq, nk = sizes
    q, k, v = (torch.randn(batch, 2, n, D, requires_grad=True) for n in (nq, nk, nk))
    out = entmax_attention(q, k, v, impl=impl)
    assert out.shape == q.shape
    assert not out.any()
    out.sum().backward()
    for leaf in (q, k, v):
        assert leaf.grad is not None
        assert not leaf.grad.any()


def test_groups_of_no_query_keep_the_number_of_their_documents() -> None:
    queries, documents = torch.randn(0, 3, D, requires_grad=True), torch.randn(0, 4, 5, D)
    scores = maxsim(queries, documents, pairing="grouped")
    assert scores.shape == (0, 4)
    scores.sum().backward()


def sparse_head() -> Tensor:
    return lsr_head_sparse(torch.randn(2, 3, D, device="cpu"), torch.randn(9, D, device="cpu"), top_k=3)


def sparse_scatter() -> Tensor:
    weights = torch.rand(2, 3, device="cpu")
    return token_scatter_sparse(weights, torch.tensor([[1, 2, 1], [4, 4, 0]], device="cpu"), 9)


def dense_scatter() -> Tensor:
    weights = torch.rand(2, 3, device="cpu", requires_grad=True)
    return token_scatter(weights, torch.tensor([[1, 2, 1], [4, 4, 0]], device="cpu"), 9, reduce="sum")


@pytest.mark.parametrize("call", [sparse_head, sparse_scatter, dense_scatter])
def test_results_lie_where_the_arguments_do_whatever_torchs_default_device(
    elsewhere: None, call: Callable[[], Tensor]
) -> None:
    scores = call()
    assert scores.device.type == "cpu"
    if scores.requires_grad:
        scores.sum().backward()


X = torch.rand(2, 3, D, generator=torch.Generator().manual_seed(0))
IDS = torch.tensor([[1, 2, 1, 0, 0, 3, 3, 3]] * 3)


@pytest.mark.parametrize(
    "operator",
    [
        lambda x, impl: lsr_head(x, X[0], impl=impl),
        lambda x, impl: maxsim(x, X.flip(0), impl=impl),
        lambda x, impl: token_scatter(x[0], IDS, 9, impl=impl),
        lambda x, impl: entmax(x, impl=impl),
        lambda x, impl: entmax_attention(x[None], X[None], X[None], impl=impl),
    ],
    ids=["lsr_head", "maxsim", "token_scatter", "entmax", "entmax_attention"],
)
def test_forward_mode_derivatives_are_those_of_the_reference_or_an_error_and_never_zeros(
    operator: Callable[[Tensor, str], Tensor],
) -> None:
    direction = torch.arange(X.numel()).view_as(X) / X.numel()
    x = X.clone().requires_grad_()
    weights = operator(X, "reference").detach()
    (gradient,) = torch.autograd.grad((operator(x, "auto") * weights).sum(), x)
    _, tangent = torch.func.jvp(lambda t: (operator(t, "reference") * weights).sum(), (X,), (direction,))
    torch.testing.assert_close(tangent, (gradient * direction).sum(), rtol=1e-4, atol=1e-6)
    with pytest.raises(RuntimeError, match="impl must be 'reference' in forward-mode differentiation"):
        torch.func.jvp(lambda t: operator(t, "auto"), (X,), (direction,))
