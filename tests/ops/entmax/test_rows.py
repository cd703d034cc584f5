"""Alpha-entmax of every alpha, kind of row, dtype and implementation, against independent results."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels import triton_interpreted
from tests.ops.base import alpha_formula, solve
from tests.ops.conftest import Target
from tests.ops.matching import entmax_by_sorting, entmax_results
from tests.ops.samples import assert_same_bits
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
SCORE_FACTORS = {"peaked": 8.0, "flat": 0.05, "huge": 1e30}


def entmax_scores(rows: int, n: int, kind: str = "normal", *, seed: int = 0) -> Tensor:
    """Create scores that are easy or hard for a root search.

    The kinds are:

    - ``"normal"``: standard normal numbers;
    - ``"peaked"`` and ``"flat"``: 8 and 0.05 times these;
    - ``"correlated"``: smooth along the row, as keys of a sequence are;
    - ``"ties"``: whole numbers;
    - ``"shifted"``: normal numbers minus 3e4;
    - ``"geometric"``: the distances to the maximum double, the worst case of active-set methods;
    - ``"masked"``: half of the entries are ``-inf``;
    - ``"huge"``: up to 1e30.

    Args:
        rows: Number of rows.
        n: Number of entries of a row.
        kind: One of :data:`SCORES`.
        seed: Seed of the random numbers.

    Returns:
        ``[rows, n]`` fp32.

    Raises:
        ValueError: If the kind is unknown.
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
    if kind == "ties":
        return x.round()
    if kind == "shifted":
        return x - 3e4
    return SCORE_FACTORS.get(kind, 1.0) * x


INTERPRETED = triton_interpreted()
ALPHAS = (1.0, 1.00001, 1.05, 1.25, 1.5, 1.8, 2.0)
DTYPES = [torch.float32, torch.float16]
if not INTERPRETED:
    DTYPES.append(torch.bfloat16)
LENGTHS = [1, 2, 31, 33, 1000]
if not INTERPRETED:
    LENGTHS.append(40_000)
without_interpreter = pytest.mark.skipif(INTERPRETED, reason="needs no interpreter")


@pytest.mark.parametrize("kind", SCORES)
@pytest.mark.parametrize("alpha", [1.5, 2.0])
@without_interpreter
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


@without_interpreter
@pytest.mark.parametrize("impl", ["reference", "tiled"])
def test_hand_computed_rows(impl: str) -> None:
    x = torch.tensor([[1.0, 0.5, -3.0]], dtype=torch.float64)
    torch.testing.assert_close(
        sparsemax(x, impl=impl),
        torch.tensor([[0.75, 0.25, 0.0]], dtype=torch.float64),
    )
    # With z = x / 2 and the third entry out of the support, c^2 + (c - 1/4)^2 = 1.
    c = 0.125 + math.sqrt(0.5 - 1 / 64)
    expected = torch.tensor([[c * c, (c - 0.25) ** 2, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(entmax(x, 1.5, impl=impl), expected)
    torch.testing.assert_close(entmax(x, 1, impl=impl), x.softmax(dim=-1))


@without_interpreter
def test_derivatives_agree_with_finite_differences() -> None:
    def reference(x: Tensor, alpha: Tensor) -> Any:
        return entmax(x, alpha, impl="reference")

    def tiled(x: Tensor, alpha: Tensor) -> Any:
        return entmax(x, alpha, impl="tiled")

    x = entmax_scores(3, 6).double().requires_grad_()
    alpha = torch.tensor([[1.2], [1.5], [1.9]], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(reference, (x, alpha))
    assert torch.autograd.gradgradcheck(reference, (x, alpha))
    near_one = torch.tensor([[1.0001], [1.02], [1.9]], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(tiled, (x, near_one))


def assert_results_within_budget(results: dict[str, Tensor], truth: dict[str, Tensor]) -> None:
    """Check probabilities and gradients of fp32 scores against exact ones.

    Distances of shifted rows are exact in fp32, so the budget has nothing for the shift.
    """
    for name, value in results.items():
        norm = float(truth[name].norm())
        if name == "dalpha" and norm < 1e-6:
            # The exact gradient is nothing but rounding.
            assert float(value.norm()) < 1e-5
            continue
        if norm < 1e-12:
            assert float(value.norm()) <= 1e-6
            continue
        allowed = budget(torch.float32, "forward" if name == "p" else "gradient_bound")
        if name == "dalpha":
            # Differences of sums are conditioned worse than their entries.
            allowed *= 40
        error = float((value.double() - truth[name]).norm()) / norm
        assert error <= allowed, f"{name}: {error:.1e} > {allowed:.1e}"


@pytest.mark.parametrize("alpha_is_tensor", [False, True], ids=["number", "tensor"])
@pytest.mark.parametrize("kind", SCORES)
@pytest.mark.parametrize("alpha", ALPHAS)
def test_probabilities_and_gradients_stay_within_budget(
    target: Target,
    alpha: float,
    kind: str,
    alpha_is_tensor: bool,
) -> None:
    if INTERPRETED and kind not in ("shifted", "masked"):
        pytest.skip("interpreting every kind takes minutes")
    x = entmax_scores(5, 77, kind).to(target.device)
    dp = entmax_scores(5, 77, seed=1).to(target.device)
    if alpha_is_tensor:
        alphas = torch.full((5, 1), alpha, device=target.device)
        results = entmax_results(x, alphas, dp, impl=target.impl)
        truth = entmax_results(x.double(), alphas.double(), dp.double(), impl="reference")
    else:
        results = entmax_results(x, alpha, dp, impl=target.impl)
        truth = entmax_results(x.double(), alpha, dp.double(), impl="reference")
    assert_results_within_budget(results, truth)
    assert float((results["p"].double().sum(dim=-1) - 1).abs().max()) <= 1e-6


def assert_rows_match(target: Target, x: Tensor, alpha: float) -> None:
    """Check that results have the dtype of the scores and keep its budgets."""
    x = x.to(target.device)
    dp = entmax_scores(*x.shape, seed=1).to(target.device, x.dtype)
    results = entmax_results(x, alpha, dp, impl=target.impl)
    truth = entmax_results(x.double(), alpha, dp.double(), impl="reference")
    assert results["p"].dtype == results["dx"].dtype == x.dtype
    assert_within_budget(results["p"], truth["p"])
    if x.size(1) > 1:
        assert_within_budget(results["dx"], truth["dx"], kind="gradient_bound")


@pytest.mark.parametrize("alpha", [1.0, 1.3, 1.5, 2.0])
def test_rows_of_any_length_and_half_precision_are_rounded_once(
    target: Target,
    alpha: float,
) -> None:
    for dtype in DTYPES:
        assert_rows_match(target, entmax_scores(6, 100, "correlated").to(dtype), alpha)
    for length in LENGTHS:
        assert_rows_match(target, entmax_scores(2, length), alpha)


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


@pytest.mark.parametrize("alpha", ALPHAS)
def test_infinite_nan_and_huge_scores(target: Target, alpha: float) -> None:
    inf = math.inf
    rows = {
        "empty": [-inf, -inf, -inf],
        "NaN": [0, math.nan, 1],
        "infinite": [inf, 0, 0],
        "very negative": [-1e4, -1e4 - 8, -inf],
        "huge": [1e30, 0, 0],
    }
    x = torch.tensor(list(rows.values())).to(target.device)
    p: Any = entmax(x, alpha, impl=target.impl)
    probabilities = dict(zip(rows, p, strict=True))
    assert torch.equal(probabilities["empty"], torch.zeros_like(p[0]))
    assert probabilities["NaN"].isnan().all()
    assert probabilities["infinite"].isnan().all()
    assert probabilities["very negative"][0] > 0.99
    assert probabilities["very negative"][2] == 0
    assert torch.equal(probabilities["huge"].cpu(), torch.tensor([1.0, 0.0, 0.0]))
    dx = entmax_results(x, alpha, torch.ones_like(x), impl=target.impl)["dx"]
    gradients = dict(zip(rows, dx, strict=True))
    assert torch.equal(gradients["empty"], torch.zeros_like(p[0]))
    assert gradients["NaN"].isnan().all()


def test_alpha_may_differ_by_head(target: Target) -> None:
    x = entmax_scores(12, 20).view(2, 3, 2, 20).to(target.device)
    alpha = torch.tensor([1.1, 1.5, 2.0], device=target.device).view(3, 1, 1).requires_grad_()
    p, support_size = entmax(x, alpha, return_support_size=True, impl=target.impl)
    assert support_size.shape == (2, 3, 2)
    assert torch.equal(support_size, (p > 0).sum(dim=-1, dtype=torch.int32))
    for head, value in enumerate((1.1, 1.5, 2.0)):
        torch.testing.assert_close(
            p[:, head],
            entmax(x[:, head], value, impl=target.impl),
            rtol=1e-5,
            atol=1e-6,
        )
    (p**2).sum().backward()
    assert alpha.grad is not None
    assert alpha.grad.shape == alpha.shape


def test_one_alpha_for_all_rows_gets_the_gradient_of_finite_differences(target: Target) -> None:
    x = entmax_scores(12, 20).view(2, 3, 2, 20).to(target.device)

    def sum_of_squares(alpha: float) -> Tensor:
        p = entmax(x.double(), alpha, impl="reference")
        assert isinstance(p, Tensor)
        return p.square().sum()

    alpha = torch.tensor(1.4, device=target.device, requires_grad=True)
    (entmax(x, alpha, impl=target.impl) ** 2).sum().backward()
    step = 1e-3
    slope = (sum_of_squares(1.4 + step) - sum_of_squares(1.4 - step)) / (2 * step)
    torch.testing.assert_close(float(alpha.grad), float(slope), rtol=2e-3, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_the_gradient_of_alpha_is_computed_in_fp32_and_has_its_dtype(
    target: Target,
    dtype: torch.dtype,
) -> None:
    x = entmax_scores(4, 20, seed=0).to(target.device)
    dp = entmax_scores(4, 20, seed=1).to(target.device)
    alpha = torch.tensor([1.125, 1.25, 1.5, 1.75], device=target.device)[:, None]

    def gradient(alpha: Tensor) -> Tensor:
        leaf = alpha.clone().requires_grad_()
        (entmax(x, leaf, impl=target.impl) * dp).sum().backward()
        assert leaf.grad is not None
        return leaf.grad

    for _ in range(3):  # the third call repeats launches
        result = gradient(alpha.to(dtype))
        expected = gradient(alpha)
        assert torch.equal(result, expected.to(dtype))


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_any_dimension_and_strides(target: Target, dim: int) -> None:
    x = entmax_scores(12, 20).view(3, 4, 20).to(target.device)
    strided = x.transpose(0, 2).contiguous().transpose(0, 2)
    result = entmax(strided, 1.5, dim, impl=target.impl)
    assert result.shape == x.shape
    assert_within_budget(result, entmax(x.double(), 1.5, dim, impl="reference"), torch.float32)


def test_results_repeat_bit_for_bit(target: Target) -> None:
    x = entmax_scores(5, 200).to(target.device)
    dp = entmax_scores(5, 200, seed=1).to(target.device)
    alpha = torch.full((5, 1), 1.3, device=target.device)
    first = entmax_results(x, alpha, dp, impl=target.impl)
    assert_same_bits(entmax_results(x, alpha, dp, impl=target.impl), first)


def evaluations(x: Tensor, alpha: float, method: str = "halley") -> Tensor:
    """How often the root search evaluates each row of ``x``.

    Args:
        x: ``[rows, n]`` scores.
        alpha: The exponent.
        method: ``"halley"`` or ``"bisection"``.
    """
    distances = x.amax(dim=-1, keepdim=True) - x
    exponent = torch.tensor([[alpha - 1]], dtype=x.dtype, device=x.device)
    return solve(distances, exponent, alpha_formula(None, alpha), method=method).evaluations


@without_interpreter
@pytest.mark.parametrize("kind", SCORES)
def test_the_root_needs_few_evaluations_for_any_row(kind: str) -> None:
    for alpha in (1.1, 1.25, 1.5, 1.8, 2.0):
        most = int(evaluations(entmax_scores(64, 2048, kind), alpha).max())
        assert most <= (12 if alpha > 1.5 else 8), (alpha, most)


@without_interpreter
def test_the_root_needs_six_times_fewer_evaluations_than_bisection() -> None:
    # The setting of AdaSplash's figure: 8,192 normal scores, alpha = 1.5.
    x = entmax_scores(64, 8192)
    halley = float(evaluations(x, 1.5, "halley").float().mean())
    bisection = float(evaluations(x, 1.5, "bisection").float().mean())
    assert halley <= 3.6
    assert bisection / halley >= 6


X = torch.ones(3, 4)


@without_interpreter
@pytest.mark.parametrize("alpha", [1 - 1e-9, 0.0, 2.01, math.nan, "1.5", True])
def test_an_alpha_out_of_range_is_refused(alpha: Any) -> None:
    with pytest.raises(ValueError, match=r"alpha must be a number in \[1, 2\]"):
        entmax(X, alpha)


@without_interpreter
@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        pytest.param(
            (X, torch.tensor(2.5)),
            {},
            ValueError,
            r"alpha must lie in \[1, 2\], got 2.5; parametrise it",
            id="tensor out of range",
        ),
        pytest.param(
            (X, torch.full((3, 4), 1.5)),
            {},
            ValueError,
            r"alpha must broadcast to \[3, 1\]",
            id="alpha of another shape",
        ),
        pytest.param(
            (X,),
            {"dim": 2},
            ValueError,
            r"dim must be an integer in \[-2, 1\]",
            id="dim out of range",
        ),
        pytest.param(
            (torch.tensor(1.0),),
            {},
            ValueError,
            r"x must have at least one dimension, got shape \[\]; use x.view\(1\)",
            id="no dimension",
        ),
        pytest.param(
            ([1.0],),
            {},
            TypeError,
            r"x must be a torch.Tensor, got list",
            id="list",
        ),
        pytest.param(
            (torch.arange(3),),
            {},
            TypeError,
            r"x must have dtype .* got int64",
            id="integers",
        ),
        pytest.param(
            (X,),
            {"impl": "cuda"},
            ValueError,
            r"impl must be one of",
            id="unknown implementation",
        ),
        pytest.param(
            (X,),
            {"impl": "triton"},
            RuntimeError,
            r"impl='triton' cannot run here",
            id="kernels without a GPU",
        ),
    ],
)
def test_errors_name_the_argument_and_the_remedy(
    arguments: tuple[Any, ...],
    options: dict[str, Any],
    error: type[Exception],
    message: str,
) -> None:
    with pytest.raises(error, match=message):
        entmax(*arguments, **options)


@without_interpreter
@pytest.mark.parametrize("shape", [(0, 4), (3, 0)])
def test_no_rows_and_empty_rows_keep_their_shape(shape: tuple[int, int]) -> None:
    assert entmax(torch.empty(shape)).shape == shape


def gated_rows(x: Tensor, gates: Tensor) -> Tensor:
    """Entmax of rows with an alpha of a fixed size, though ``gates`` has a symbolic one."""
    p = entmax(x, 1 + torch.sigmoid(gates[:6, :1]), dim=-1)
    assert isinstance(p, Tensor)
    return p


def gated_attention(x: Tensor, gates: Tensor) -> Tensor:
    """Attention with an alpha for each of six heads, though ``gates`` has a symbolic size."""
    x = x.transpose(0, 1)[None]
    out = entmax_attention(x, x, x, alpha=1 + torch.sigmoid(gates[:6, 0]))
    assert isinstance(out, Tensor)
    return out


@without_interpreter
@pytest.mark.parametrize("function", [gated_rows, gated_attention])
def test_symbolic_sizes_take_an_alpha_of_a_known_size(
    fresh_dynamo: None,
    function: Callable[[Tensor, Tensor], Tensor],
) -> None:
    x = torch.randn(3, 6, 16)
    gates = torch.randn(40, 16)
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, gates), function(x, gates))
