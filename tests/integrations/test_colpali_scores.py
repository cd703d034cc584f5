"""colpali-engine's scoring functions equal its formulas; tests/peers compares with the real package and its losses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tilefold.integrations import colpali

# fp32: both sides add 16 products in another order, and up to 9 maxima or gradients of them
BUDGET = 1e-5
NAMES = ["maxsim_inbatch", "maxsim_kd"]


def oracle(name: str, query: Tensor, doc: Tensor, tau: float | None = None) -> Tensor:
    """What colpali-engine 0.3.18 computes with its torch backend."""
    sims = torch.einsum("bnd,csd->bcns" if name == "maxsim_inbatch" else "bnd,bksd->bkns", query, doc)
    best = sims.amax(dim=3) if tau is None else tau * torch.logsumexp(sims / tau, dim=3)
    return best.sum(dim=2)


def problem(name: str, dtype: torch.dtype = torch.float32, device: str = "cpu") -> list[Tensor]:
    """Rows of zeros after each sequence, before it and in it; mostly negative similarities, so that they often win."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(3, 5, 16, generator=generator) / 4 - 0.1
    doc = torch.randn(*((4,) if name == "maxsim_inbatch" else (3, 2)), 9, 16, generator=generator) / 4 + 0.1
    query[0, 3:], query[1, :2], query[2] = 0, 0, 0
    doc[0, ..., 6:, :], doc[1, ..., :4, :], doc[2] = 0, 0, 0
    return [query.to(device, dtype), doc.to(device, dtype)]


def results(function: Any, arguments: list[Tensor], **options: Any) -> list[Tensor]:
    leaves = [part.detach().clone().requires_grad_() for part in arguments]
    scores = function(*leaves, **options)
    weights = torch.rand(scores.shape, generator=torch.Generator().manual_seed(1)).to(scores)
    return [scores.detach(), *torch.autograd.grad(scores, leaves, weights)]


def assert_equal(found: list[Tensor], expected: list[Tensor], arguments: list[Tensor], budget: float = BUDGET) -> None:
    # similarities of rows of zeros tie: which of them has the gradient, which ends at the padding, is nobody's concern
    kept = [torch.ones_like(expected[0], dtype=torch.bool), *(part.any(dim=-1) for part in arguments)]
    for mine, truth, where in zip(found, expected, kept, strict=True):
        assert mine.shape == truth.shape
        error, allowed = (mine - truth)[where].abs().max().item(), budget * truth[where].abs().max().clamp(min=1).item()
        assert error <= allowed, f"error {error:.2e}, allowed {allowed:.2e}"


@pytest.mark.parametrize("tau", [None, 0.1, 1.0])
@pytest.mark.parametrize("name", NAMES)
def test_scores_and_gradients_equal_the_formula(name: str, tau: float | None) -> None:
    arguments = problem(name)
    expected = results(lambda *a: oracle(name, *a, tau=tau), arguments)
    for impl in ("auto", "reference"):
        found = results(getattr(colpali, name), arguments, tau=tau, impl=impl)
        assert_equal(found, expected, arguments)


@pytest.mark.parametrize("name", NAMES)
def test_a_row_of_zeros_hides_negative_similarities(name: str) -> None:
    query, doc = problem(name)
    before = getattr(colpali, name)(query, doc[..., :1, :])
    padded = getattr(colpali, name)(query, torch.nn.functional.pad(doc[..., :1, :], (0, 0, 0, 1)))
    assert (before < 0).any() and (padded >= 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_scores_are_fp32_from_half_precision_and_fp64_from_fp64(name: str, dtype: torch.dtype) -> None:
    arguments = problem(name, dtype)
    scores = getattr(colpali, name)(*arguments)
    assert scores.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(
        scores.double(), oracle(name, *(part.double() for part in arguments)), rtol=BUDGET, atol=BUDGET
    )


def test_losses_may_change_the_scores_in_place() -> None:
    query, doc = (part.requires_grad_() for part in problem("maxsim_inbatch"))
    scores = colpali.maxsim_inbatch(query, doc)
    scores[scores > 0.5] *= 0.5  # what filtering high negatives does
    scores.view(-1).sum().backward()
    assert query.grad is not None and doc.grad is not None


@pytest.mark.parametrize("name", NAMES)
def test_the_functions_compile_whole(name: str) -> None:
    torch._dynamo.reset()
    arguments = problem(name)
    function = getattr(colpali, name)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    assert_equal(results(compiled, arguments), results(function, arguments), arguments)


def test_arguments_that_do_not_fit_are_named() -> None:
    query, doc = problem("maxsim_kd")
    with pytest.raises(ValueError, match=r"doc must have shape \[B, L, D\], got \[3, 2, 9, 16\]"):
        colpali.maxsim_inbatch(query, doc)
    with pytest.raises(ValueError, match=r"doc must have shape \[B, N, L, D\], got \[3, 9, 16\]"):
        colpali.maxsim_kd(query, doc[:, 0])
    with pytest.raises(TypeError, match=r"query must be a torch\.Tensor, got list"):
        colpali.maxsim_inbatch([query], doc[:, 0])
    with pytest.raises(ValueError, match="temperature must be a positive"):
        colpali.maxsim_inbatch(query, doc[:, 0], tau=0.0)
    with pytest.raises(RuntimeError, match="impl='triton'"):
        colpali.maxsim_inbatch(query, doc[:, 0], impl="triton")


def test_without_colpali_engine_its_acceleration_says_what_to_install() -> None:
    try:
        import colpali_engine  # noqa: F401
    except ImportError:
        with pytest.raises(ImportError, match=r'pip install "colpali-engine>=0.3.18"'):
            colpali.accelerate()
    assert not colpali.is_accelerated()
    colpali.restore()
    with pytest.raises(ValueError, match="impl must be one of 'auto'"):
        colpali.accelerate(impl="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("tau", [None, 0.1])
@pytest.mark.parametrize("name", NAMES)
def test_on_a_gpu_scores_and_gradients_equal_the_formula(name: str, tau: float | None) -> None:
    arguments = problem(name)
    expected = results(lambda *a: oracle(name, *a, tau=tau), arguments)
    found = results(getattr(colpali, name), problem(name, device="cuda"), tau=tau)
    assert_equal([part.cpu() for part in found], expected, arguments, 1e-4)
