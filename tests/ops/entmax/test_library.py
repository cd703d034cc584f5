"""Alpha-entmax as torch operators: opcheck, torch.compile."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tilefold.ops import entmax, entmax_attention
from tilefold.ops._shared.impl import triton_interpreted
from tilefold.ops.entmax import chosen_impl
from tilefold.testing.entmax import entmax_scores

pytestmark = pytest.mark.skipif(triton_interpreted(), reason="this part needs no interpreter")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
def test_operators_pass_opcheck(device: str) -> None:
    x = entmax_scores(4, 9).to(device)
    alpha = torch.full((4,), 1.4, device=device)
    impl = chosen_impl(x)
    for given, constant in ((None, 1.5), (alpha, 0.0)):
        leaf = None if given is None else given.clone().requires_grad_()
        torch.library.opcheck(
            torch.ops.tilefold.entmax.default, (x.clone().requires_grad_(), leaf, constant, True, impl)
        )
        p = entmax(x, 1.5 if given is None else given[:, None])
        for needs in ((True, given is not None), (True, False)):
            arguments = (x, p, given, constant, needs, impl)
            torch.library.opcheck(torch.ops.tilefold.entmax_backward.default, arguments)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("per_row", [False, True])
def test_the_public_function_compiles_whole_with_gradients(device: str, per_row: bool) -> None:
    x = entmax_scores(12, 10).view(2, 6, 10).to(device)
    alpha = torch.full((6, 1), 1.3, device=device) if per_row else 1.5

    def loss(x: Tensor, alpha: float | Tensor) -> Tensor:
        return (entmax(2 * x, alpha, dim=-1) ** 2).sum()

    grads = []
    for function in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
        leaf = x.clone().requires_grad_()
        a = alpha.clone().requires_grad_() if isinstance(alpha, Tensor) else alpha
        function(leaf, a).backward()
        grads.append((leaf.grad, a.grad if isinstance(a, Tensor) else None))
    torch.testing.assert_close(grads[0], grads[1])


def test_symbolic_sizes_take_an_alpha_of_a_known_size() -> None:
    def rows(x: Tensor, gates: Tensor) -> Tensor:
        p = entmax(x, 1 + torch.sigmoid(gates[:6, :1]), dim=-1)
        assert isinstance(p, Tensor)
        return p

    def attention(x: Tensor, gates: Tensor) -> Tensor:
        x = x.transpose(0, 1)[None]
        out = entmax_attention(x, x, x, alpha=1 + torch.sigmoid(gates[:6, 0]))
        assert isinstance(out, Tensor)
        return out

    x, gates = torch.randn(3, 6, 16), torch.randn(40, 16)
    for function in (rows, attention):
        torch._dynamo.reset()
        compiled = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
        torch.testing.assert_close(compiled(x, gates), function(x, gates))
