"""Alpha-entmax against independent truths, for every alpha, kind of row, dtype and implementation."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels import triton_interpreted
from tests.ops.base import kind_of, solve
from tests.ops.conftest import Target
from tests.ops.matching import entmax_by_sorting, entmax_results
from tests.refusals import refused
from tilefold.ops import entmax, entmax_attention, sparsemax
from tilefold.testing import assert_within_budget, budget

SCORES = (
    "normal",
    "peaked",
    "flat",
    "correlated",
    "ties",
    "shifted",
    "geometric",
    "masked",
    "huge",
)


def entmax_scores(rows: int, n: int, kind: str = "normal", *, seed: int = 0) -> Tensor:
    """``[rows, n]`` fp32 scores that are easy or hard for a root search.

    Args:
        rows, n: the shape.
        kind: ``"normal"``; ``"peaked"`` and ``"flat"``, 8 and 0.05 times that; ``"correlated"``
            along the row, as keys of a sequence are; ``"ties"`` in whole numbers; ``"shifted"`` by
            -3e4; ``"geometric"``, entries whose distances to the maximum double, the worst case of
            active-set methods; ``"masked"``, half of them ``-inf``; ``"huge"``, up to 1e30.
        seed: of the random numbers.

    Raises:
        ValueError: for an unknown kind.
    """
    if kind not in SCORES:
        raise ValueError(f"kind must be one of {SCORES}, got {kind!r}.")
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, n, generator=generator)
    if kind == "geometric":
        return -torch.logspace(-20, 4, n, base=2.0).expand(rows, n).clone()
    if kind == "correlated":
        phase = 6.28 * torch.rand(rows, 8, 1, generator=generator)
        speed = torch.rand(rows, 8, 1, generator=generator) * 0.05
        return 2 * torch.cos(phase + speed * torch.arange(n)).sum(dim=1)
    if kind == "masked":
        hidden = torch.rand(rows, n, generator=generator) < 0.5
        hidden[:, 0] = False
        return x.masked_fill(hidden, -math.inf)
    factor = {"peaked": 8.0, "flat": 0.05, "huge": 1e30}.get(kind, 1.0)
    x = factor * x
    return x.round() if kind == "ties" else x - 3e4 if kind == "shifted" else x


INTERPRETED = triton_interpreted()
ALPHAS = (1.0, 1.00001, 1.05, 1.25, 1.5, 1.8, 2.0)
DTYPES = (
    (torch.float32, torch.float16)
    if INTERPRETED
    else (torch.float32, torch.float16, torch.bfloat16)
)
here_only = pytest.mark.skipif(INTERPRETED, reason="needs no interpreter")


@pytest.mark.parametrize("kind", SCORES)
@pytest.mark.parametrize("alpha", [1.5, 2.0])
@here_only
def test_the_reference_agrees_with_the_sorted_closed_forms(alpha: float, kind: str) -> None:
    x = entmax_scores(9, 300, kind).double()
    if kind == "huge":
        x = x.clamp(-1e12, 1e12)
    torch.testing.assert_close(
        entmax(x, alpha, impl="reference"),
        entmax_by_sorting(x, alpha),
        rtol=1e-9,
        atol=1e-9,
    )


@here_only
def test_hand_computed_rows() -> None:
    x = torch.tensor([[1.0, 0.5, -3.0]], dtype=torch.float64)
    for impl in ("reference", "tiled"):
        torch.testing.assert_close(
            sparsemax(x, impl=impl),
            torch.tensor([[0.75, 0.25, 0.0]], dtype=torch.float64),
        )
        # z = x / 2: (c)^2 + (c - 1/4)^2 = 1 with the third entry out of the support
        c = 0.125 + math.sqrt(0.5 - 1 / 64)
        expected = torch.tensor([[c * c, (c - 0.25) ** 2, 0.0]], dtype=torch.float64)
        torch.testing.assert_close(entmax(x, 1.5, impl=impl), expected)
        torch.testing.assert_close(entmax(x, 1, impl=impl), x.softmax(dim=-1))


@here_only
def test_derivatives_of_the_reference_are_those_of_finite_differences() -> None:
    x = entmax_scores(3, 6).double().requires_grad_()
    alpha = torch.tensor([[1.2], [1.5], [1.9]], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, a: entmax(x, a, impl="reference"), (x, alpha))
    assert torch.autograd.gradgradcheck(lambda x, a: entmax(x, a, impl="reference"), (x, alpha))
    near = torch.tensor([[1.0001], [1.02], [1.9]], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, a: entmax(x, a, impl="tiled"), (x, near))


@pytest.mark.parametrize("kind", SCORES)
@pytest.mark.parametrize("alpha", ALPHAS)
def test_probabilities_and_gradients_stay_within_budget(
    target: Target,
    alpha: float,
    kind: str,
) -> None:
    if INTERPRETED and kind not in ("shifted", "masked"):
        pytest.skip("interpreting every kind takes minutes")
    x = entmax_scores(5, 77, kind).to(target.device)
    dp = entmax_scores(5, 77, seed=1).to(target.device)
    for given in (alpha, torch.full((5, 1), alpha, device=target.device)):
        found = entmax_results(x, given, dp, impl=target.impl)
        wide = given if isinstance(given, float) else given.double()
        truth = entmax_results(x.double(), wide, dp.double(), impl="reference")
        # distances of shifted rows are exact in fp32, so nothing is allowed for the shift
        for name, value in found.items():
            if (
                name == "dalpha" and float(truth[name].norm()) < 1e-6
            ):  # nothing but rounding is left of it
                assert float(value.norm()) < 1e-5
                continue
            factor = (
                40 if name == "dalpha" else 1
            )  # differences of sums: conditioned worse than their entries
            allowed = factor * budget(torch.float32, "forward" if name == "p" else "gradient_bound")
            error = float(
                (value.double() - truth[name]).norm() / truth[name].norm().clamp_min(1e-30),
            )
            if float(truth[name].norm()) < 1e-12:
                assert float(value.norm()) <= 1e-6
            else:
                assert error <= allowed, f"{name} of alpha {given}: {error:.1e} > {allowed:.1e}"
        assert float((found["p"].double().sum(dim=-1) - 1).abs().max()) <= 1e-6


def assert_rows_match(target: Target, x: torch.Tensor, alpha: float) -> None:
    """Within the budgets of the scores' dtype, gradients too; they have that dtype."""
    x, dp = x.to(target.device), entmax_scores(*x.shape, seed=1).to(target.device, x.dtype)
    found = entmax_results(x, alpha, dp, impl=target.impl)
    truth = entmax_results(x.double(), alpha, dp.double(), impl="reference")
    assert found["p"].dtype == found["dx"].dtype == x.dtype
    assert_within_budget(found["p"], truth["p"])
    if x.size(1) > 1:
        assert_within_budget(found["dx"], truth["dx"], kind="gradient_bound")


@pytest.mark.parametrize("alpha", [1.0, 1.3, 1.5, 2.0])
def test_rows_of_any_length_and_half_precision_are_rounded_once(
    target: Target,
    alpha: float,
) -> None:
    for dtype in DTYPES:
        assert_rows_match(target, entmax_scores(6, 100, "correlated").to(dtype), alpha)
    for n in (1, 2, 31, 33, 1000, *([] if INTERPRETED else [40_000])):
        assert_rows_match(target, entmax_scores(2, n), alpha)


@pytest.mark.parametrize("offset", [-1000.0, 1000.0, 30000.0])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_offsets_in_half_precision_give_no_nan(
    target: Target,
    dtype: torch.dtype,
    offset: float,
) -> None:
    x = (entmax_scores(4, 50) + offset).to(target.device, dtype)
    for alpha in (1.3, 1.5):
        assert_within_budget(
            entmax(x, alpha, impl=target.impl),
            entmax(x.double(), alpha, impl="reference"),
        )


def test_special_values(target: Target) -> None:
    inf, nan = math.inf, math.nan
    x = torch.tensor(
        [[-inf] * 3, [0, nan, 1], [inf, 0, 0], [-1e4, -1e4 - 8, -inf], [1e30, 0, 0]],
    ).to(target.device)
    for alpha in ALPHAS:
        p: Any = entmax(x, alpha, impl=target.impl)
        assert torch.equal(p[0], torch.zeros_like(p[0]))
        assert p[1].isnan().all() and p[2].isnan().all()
        assert p[3, 0] > 0.99 and p[3, 2] == 0
        assert torch.equal(p[4].cpu(), torch.tensor([1.0, 0.0, 0.0]))
        found = entmax_results(x, alpha, torch.ones_like(x), impl=target.impl)
        assert torch.equal(found["dx"][0], torch.zeros_like(p[0]))
        assert found["dx"][1].isnan().all()


def test_alpha_broadcasts_per_row_per_head_and_for_all(target: Target) -> None:
    x = entmax_scores(12, 20).view(2, 3, 2, 20).to(target.device)
    alpha = torch.tensor([1.1, 1.5, 2.0], device=target.device).view(3, 1, 1).requires_grad_()
    p, size = entmax(x, alpha, return_support_size=True, impl=target.impl)
    assert size.shape == (2, 3, 2) and torch.equal(size, (p > 0).sum(dim=-1, dtype=torch.int32))
    for head, value in enumerate((1.1, 1.5, 2.0)):
        torch.testing.assert_close(
            p[:, head],
            entmax(x[:, head], value, impl=target.impl),
            rtol=1e-5,
            atol=1e-6,
        )
    (p**2).sum().backward()
    assert alpha.grad is not None and alpha.grad.shape == alpha.shape
    one = torch.tensor(1.4, device=target.device, requires_grad=True)
    (entmax(x, one, impl=target.impl) ** 2).sum().backward()
    h = 1e-3
    above, below = ((entmax(x.double(), 1.4 + s * h, impl="reference") ** 2).sum() for s in (1, -1))
    torch.testing.assert_close(
        float(one.grad),
        float((above - below) / (2 * h)),
        rtol=2e-3,
        atol=1e-4,
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_the_gradient_of_alpha_is_computed_in_fp32_and_has_its_dtype(
    target: Target,
    dtype: torch.dtype,
) -> None:
    x, dp = (entmax_scores(4, 20, seed=seed).to(target.device) for seed in (0, 1))
    alpha = torch.tensor([1.125, 1.25, 1.5, 1.75], device=target.device)[:, None]
    for _ in range(3):  # the third repeats launches
        found, expected = (
            alpha.to(each, copy=True).requires_grad_() for each in (dtype, torch.float32)
        )
        for leaf in (found, expected):
            (entmax(x, leaf, impl=target.impl) * dp).sum().backward()
        assert torch.equal(found.grad, expected.grad.to(dtype))


def test_any_dimension_and_strides(target: Target) -> None:
    x = entmax_scores(12, 20).view(3, 4, 20).to(target.device)
    for dim in (0, 1, -1):
        expected = entmax(x.double(), 1.5, dim, impl="reference")
        found = entmax(x.transpose(0, 2).contiguous().transpose(0, 2), 1.5, dim, impl=target.impl)
        assert found.shape == x.shape
        assert_within_budget(found, expected, torch.float32)


def test_results_repeat_bit_for_bit(target: Target) -> None:
    x, dp = entmax_scores(5, 200).to(target.device), entmax_scores(5, 200, seed=1).to(target.device)
    alpha = torch.full((5, 1), 1.3, device=target.device)
    first, second = (entmax_results(x, alpha, dp, impl=target.impl) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def evaluations(x: torch.Tensor, alpha: float, method: str = "halley") -> torch.Tensor:
    """How often each row of ``x`` is evaluated until its root is found, by ``"halley"`` or
    ``"bisection"``.
    """
    d = x.amax(dim=-1, keepdim=True) - x
    e = torch.tensor([[alpha - 1]], dtype=x.dtype, device=x.device)
    return solve(d, e, kind_of(None, alpha), method=method)[2]


@here_only
def test_the_root_needs_few_evaluations_for_any_row_and_seven_times_fewer_than_bisection() -> None:
    for kind in SCORES:
        for alpha in (1.1, 1.25, 1.5, 1.8, 2.0):
            most = int(evaluations(entmax_scores(64, 2048, kind), alpha).max())
            assert most <= (12 if alpha > 1.5 else 8), (kind, alpha, most)
    x = entmax_scores(
        64,
        8192,
    )  # the setting of AdaSplash's figure: 8,192 normal scores, alpha = 1.5
    halley, bisection = (
        evaluations(x, 1.5, method).float().mean() for method in ("halley", "bisection")
    )
    assert halley <= 3.6 and bisection / halley >= 6, (
        f"{halley:.2f} and {bisection:.2f} evaluations"
    )


@here_only
def test_errors_name_the_argument_and_the_remedy() -> None:
    x = torch.randn(3, 4)
    for alpha in (1 - 1e-9, 0.0, 2.01, math.nan, "1.5", True):
        refused(ValueError, r"alpha must be a number in \[1, 2\]", entmax, x, alpha)
    refused(
        ValueError,
        r"alpha must lie in \[1, 2\], got 2.5; parametrise it",
        entmax,
        x,
        torch.tensor(2.5),
    )
    refused(ValueError, r"alpha must broadcast to \[3, 1\]", entmax, x, torch.full((3, 4), 1.5))
    refused(ValueError, r"dim must be an integer in \[-2, 1\]", entmax, x, dim=2)
    refused(TypeError, r"x must be a torch.Tensor, got list", entmax, [1.0])
    refused(TypeError, r"x must have dtype .* got int64", entmax, torch.arange(3))
    refused(ValueError, r"impl must be one of", entmax, x, impl="cuda")
    refused(RuntimeError, r"impl='triton' cannot run here", entmax, x, impl="triton")
    assert entmax(torch.empty(0, 4)).shape == (0, 4) and entmax(torch.empty(3, 0)).shape == (3, 0)


@here_only
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
