"""The threshold of alpha-entmax, in torch, for ``entmax`` and ``entmax_attention``.

With ``e = alpha - 1`` and distances ``d_i = max s - s_i >= 0`` of a row, alpha-entmax is ``p_i = [c
- e d_i]_+^(1/e)``, where ``c = p_max^e`` in ``[n^-e, 1]`` makes the row sum to 1 (the usual
threshold is ``tau = e max s - c``). Solving for ``c`` and not for ``tau`` keeps every digit of
shifted rows. With ``L = log p_max``,

    log p_i = L - (d_i / c) g(e d_i / c),    c = exp(e L),    g(u) = -log(1 - u) / u,    g(0) = 1,

which holds down to alpha = 1, where ``c = 1`` and ``L = -log sum exp(-d)``.

**Root.** Write F, U, Q for the row sums of ``p``, ``p^(1-e)`` and ``p^(1-2e)``. The ``1/e``-norm of
``x = [c - e d]_+`` is ``G(c) = F^e``: convex, increasing, homogeneous in x, and exactly linear both
for a row of equal entries and for a row with one entry in its support, so Newton's and Halley's
steps on ``G(c) = 1`` need far fewer evaluations than on ``F(c) = 1``:

    newton = (1 - F^-e) F / U,    halley = newton / (1 - (1 - F^-e) (1-e)/(2e) (F Q / U^2 - 1)).

At alpha = 2 both are Newton's, which ends in the closed form ``c = (1 + sum e d) / n`` on the
support. A step that leaves the bracket, or comes after a step that did not halve the residual, is
replaced by bisection: the bracket or the residual halves with every evaluation, for any row.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

# Bound of the loop. Rows of any shape take 3 to 6 evaluations, a bracket of 2^-24 at most 24 more.
EVALUATIONS = 100

# Halley's step is at most 1 / (1 - MAX_DAMPING) = 4 times as long as Newton's.
MAX_DAMPING = 0.75
# Replaces a divisor that is 0 at alpha = 1, where the quotient is not used.
TINY = 1e-30

# Formulas for alpha = 1, 1.5, 2 and any other alpha.
SOFTMAX = "softmax"
ENTMAX15 = "entmax15"
SPARSEMAX = "sparsemax"
GENERIC = "generic"
# Formulas that only kernels distinguish: any alpha with results of 16 bits, and an alpha that is a
# number, below 1.5 or above.
GENERIC16 = "generic16"
GENTLE = "gentle"
STEEP = "steep"
# Kernels raise x = p^e to the power 1/e by a logarithm that is off by 2^-22 near x = 1; x itself is
# rounded by 2^-25. Below these alpha - 1 a series takes over: weights of fp32 are within 2.4e-6 of
# themselves, of 16 bits within 2e-5.
NEAR_SOFTMAX = 1 / 8
NEAR_SOFTMAX16 = 1 / 64


def check_alphas(alpha: Tensor | None) -> None:
    """Raise ``ValueError`` for a tensor on the CPU with an alpha outside [1, 2]."""
    if alpha is None or alpha.device.type != "cpu":
        return
    invalid = alpha[~((alpha >= 1) & (alpha <= 2))]
    if invalid.numel():
        raise ValueError(
            f"alpha must lie in [1, 2], got {invalid[0].item()}; parametrise it, for instance as "
            "1 + sigmoid(theta).",
        )


def alpha_number(alpha: object) -> float:
    """Return an alpha that is not a tensor, or raise ``ValueError`` if it is not in [1, 2]."""
    if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not 1 <= alpha <= 2:
        raise ValueError(f"alpha must be a number in [1, 2] or a tensor of them, got {alpha!r}.")
    return float(alpha)


def tolerance(dtype: torch.dtype) -> float:
    """Return how far the sum of a row's weights may be from 1 in kernels.

    Kernels divide the weights by the mass, and results of 16 bits are rounded by far more.
    """
    return 1e-6 if dtype == torch.float32 else 1e-5


def alpha_formula(alpha: Tensor | None, alpha_value: float) -> str:
    """Return the formula for an alpha: a closed form for 1, 1.5 and 2, else :data:`GENERIC`.

    Args:
        alpha: a tensor, which is generic, or ``None``.
        alpha_value: the alpha if it is a number.
    """
    if alpha is not None:
        return GENERIC
    closed_forms = {1.0: SOFTMAX, 1.5: ENTMAX15, 2.0: SPARSEMAX}
    return closed_forms.get(alpha_value, GENERIC)


def kernel_formula(dtype: torch.dtype, alpha: Tensor | None, alpha_value: float) -> str:
    """Return which formula kernels use to raise ``x`` to the power ``1 / (alpha - 1)``.

    - ``SOFTMAX``, ``ENTMAX15`` and ``SPARSEMAX`` are closed forms for alpha = 1, 1.5 and 2.
    - ``GENERIC`` holds for every alpha. Alphas in a tensor and numbers close to 1 need it.
    - ``GENERIC16`` is a cheaper, less accurate form of it, for results of 16 bits.
    - ``GENTLE`` and ``STEEP`` are fast forms for a number below 1.5, and for one above.

    Args:
        dtype: dtype of the results.
        alpha: a tensor of alphas, or ``None``.
        alpha_value: the alpha if it is a number.
    """
    formula = alpha_formula(alpha, alpha_value)
    if formula != GENERIC:
        return formula  # a closed form
    is_16_bit = dtype in (torch.float16, torch.bfloat16)
    is_learned = alpha is not None
    near_softmax = NEAR_SOFTMAX16 if is_16_bit else NEAR_SOFTMAX
    if is_learned or alpha_value - 1 < near_softmax:
        return GENERIC16 if is_16_bit else GENERIC
    return GENTLE if alpha_value < 1.5 else STEEP


def log_weights(distances: Tensor, log_peak: Tensor, alpha_minus_1: Tensor) -> Tensor:
    """Compute log-probabilities of alpha-entmax from ``log p_max``.

    The formula is ``log p = log p_max - t g(e t)`` with ``e = alpha - 1``, ``t = d / p_max^e`` for
    the distance d, and ``g(u) = -log(1 - u) / u``. It also holds for alpha = 1, where
    ``g(0) = 1``. Autograd can differentiate it with respect to all arguments.

    Args:
        distances: ``[R, n]`` distances of the scores from the row's maximum, inf for weight 0.
        log_peak: ``[R, 1]`` ``log p_max``, logarithm of the row's largest probability.
        alpha_minus_1: broadcastable to ``[R, 1]``.

    Returns:
        ``[R, n]`` ``log p``, ``-inf`` where p is 0.
    """
    peak_power = torch.exp(alpha_minus_1 * log_peak)  # p_max^e
    is_absent = distances == math.inf  # e = 0 would make e t = 0 * inf
    t = distances.masked_fill(is_absent, 0) / peak_power
    u = alpha_minus_1 * t
    is_positive = (u < 1) & ~is_absent  # p is positive
    # -log(1 - u) / u loses precision near 0, where a power series is exact. `torch.where`
    # differentiates both branches, so u is 0.5 in the one whose result is discarded: its gradient
    # then stays finite.
    is_tiny = u < 1e-5
    series = 1 + u * (1 / 2 + u * (1 / 3 + u / 4))
    safe_u = torch.where(is_tiny | ~is_positive, 0.5, u)
    g = torch.where(is_tiny, series, -torch.log1p(-safe_u) / safe_u)
    log_p = log_peak - t * torch.where(is_positive, g, 1.0)
    return torch.where(is_positive, log_p, -math.inf)


class _Sums(NamedTuple):
    """Sums of powers of a row's unnormalised weights p at a trial value of the root.

    Attributes:
        mass: ``[R, 1]`` sum of ``p``, called F above. It is 1 at the root.
        first: ``[R, 1]`` sum of ``p^(1-e)``, called U. Newton's step is computed from it.
        second: ``[R, 1]`` sum of ``p^(1-2e)``, called Q, which Halley's step needs in addition.
            ``None`` if only Newton's step is defined.
    """

    mass: Tensor
    first: Tensor
    second: Tensor | None


def _decrease_of_peak_power(sums: _Sums, alpha_minus_1: Tensor) -> Tensor:
    """Return by how much Halley's step on ``mass^e = 1`` decreases ``c = p_max^e``.

    It is Newton's step, ``(1 - mass^-e) mass / first``, divided by ``1 - damping``.

    Args:
        sums: sums at the current value of c.
        alpha_minus_1: ``[R, 1]`` e.
    """
    residual = -torch.expm1(-alpha_minus_1 * torch.log(sums.mass))  # 1 - mass^-e
    newton = residual * sums.mass / sums.first
    if sums.second is None:
        return newton
    positive_e = alpha_minus_1.clamp_min(TINY)
    damping = residual * (1 - alpha_minus_1) / (2 * positive_e)
    damping = damping * (sums.mass * sums.second / (sums.first * sums.first) - 1)
    # Above alpha = 1.5 the exponent 1 - 2e is negative, and weights near 0 would dominate the
    # second sum. A damping near 1 would make the step arbitrarily long.
    is_useful = (alpha_minus_1 <= 0.5) & (damping < MAX_DAMPING)
    return newton / (1 - torch.where(is_useful, damping, 0.0))


class _ClosedFormEquation:
    """Equation ``sum [c - e d]_+^(1/e) = 1`` of rows for alpha = 1.5 or 2; the unknown is c.

    Args:
        distances: ``[R, n]`` distances d from the row's maximum.
        alpha_minus_1: ``[R, 1]`` e.
        formula: ``ENTMAX15`` or ``SPARSEMAX``.
    """

    def __init__(self, distances: Tensor, alpha_minus_1: Tensor, formula: str) -> None:
        self.scaled_distances = distances * alpha_minus_1
        self.alpha_minus_1 = alpha_minus_1
        self.formula = formula

    def bracket(self) -> tuple[Tensor, Tensor]:
        """Return a lower and an upper bound of c: equal weights, and one weight of 1."""
        n = float(self.scaled_distances.size(-1))
        return n**-self.alpha_minus_1, torch.ones_like(self.alpha_minus_1)

    def middle(self, low: Tensor, high: Tensor) -> Tensor:
        """Return the first trial value of c."""
        return (low + high) / 2

    def sums(self, c: Tensor) -> _Sums:
        """Return the sums of each row at ``[R, 1]`` c."""
        x = (c - self.scaled_distances).clamp_min(0)  # p^e
        sum_of_x = x.sum(dim=-1, keepdim=True)
        support_size = (x > 0).to(x.dtype).sum(dim=-1, keepdim=True)
        if self.formula == ENTMAX15:  # e = 1/2: p = x^2, p^(1-e) = x and p^(1-2e) = 1
            sum_of_squares = (x * x).sum(dim=-1, keepdim=True)
            return _Sums(mass=sum_of_squares, first=sum_of_x, second=support_size)
        # e = 1: p = x and p^(1-e) = 1
        return _Sums(mass=sum_of_x, first=support_size, second=None)

    def step(self, c: Tensor, sums: _Sums) -> Tensor:
        """Return the next trial value of c."""
        return c - _decrease_of_peak_power(sums, self.alpha_minus_1)

    def unit(self, c: Tensor) -> Tensor:
        """Return the magnitude to which changes of c are compared."""
        return c.abs()


class _GenericEquation:
    """Equation ``sum p = 1`` of rows for any alpha in [1, 2]; the unknown is ``log p_max``.

    Args:
        distances: ``[R, n]`` distances from the row's maximum, inf for weight 0.
        alpha_minus_1: ``[R, 1]`` e.
    """

    def __init__(self, distances: Tensor, alpha_minus_1: Tensor) -> None:
        self.distances = distances
        self.alpha_minus_1 = alpha_minus_1

    def bracket(self) -> tuple[Tensor, Tensor]:
        """Return a lower and an upper bound of the unknown: equal weights, and one weight of 1."""
        n = float(self.distances.size(-1))
        one = torch.ones_like(self.alpha_minus_1)
        return -math.log(n) * one, 0 * one

    def middle(self, low: Tensor, high: Tensor) -> Tensor:
        """Return the first trial value: the middle of ``c = p_max^e``, not of its logarithm.

        Fewer evaluations follow. Close to alpha = 1, where c is nearly 1, it is the middle of the
        logarithm.
        """
        e = self.alpha_minus_1
        middle_of_c = torch.log((1 + torch.exp(e * low)) / 2) / e.clamp_min(1e-3)
        return torch.where(e > 1e-3, middle_of_c.clamp(low, high), (low + high) / 2)

    def sums(self, log_peak: Tensor) -> _Sums:
        """Return the sums of each row at ``[R, 1]`` ``log p_max``."""
        log_p = log_weights(self.distances, log_peak, self.alpha_minus_1)
        is_support = log_p > -math.inf
        log_p = log_p.masked_fill(~is_support, 0)

        def sum_of_powers(power: Tensor | int) -> Tensor:
            return (torch.exp(power * log_p) * is_support).sum(dim=-1, keepdim=True)

        return _Sums(
            mass=sum_of_powers(1),
            first=sum_of_powers(1 - self.alpha_minus_1),
            # Rows above alpha = 1.5 do not use this sum, whose exponent would be negative.
            second=sum_of_powers((1 - 2 * self.alpha_minus_1).clamp(0)),
        )

    def step(self, log_peak: Tensor, sums: _Sums) -> Tensor:
        """Return the next trial value: the step of ``c``, converted to ``log p_max = log(c) / e``.

        At alpha = 1 the limit of this step is the exact root of softmax.
        """
        e = self.alpha_minus_1
        relative_decrease = _decrease_of_peak_power(sums, e) * torch.exp(-e * log_peak)
        change = torch.log1p(-relative_decrease) / e.clamp_min(TINY)
        return log_peak + torch.where(e > 0, change, -torch.log(sums.mass))

    def unit(self, log_peak: Tensor) -> Tensor:
        """Return the magnitude to which changes of ``log p_max`` are compared."""
        return log_peak.abs().clamp_min(1)


class Root(NamedTuple):
    """Roots of rows, as :func:`solve` finds them.

    Attributes:
        root: ``[R, 1]`` the unknown: ``c = p_max^(alpha - 1)`` for closed forms, ``log p_max`` for
            :data:`GENERIC`.
        mass: ``[R, 1]`` sum of the weights at the root, which is nearly 1.
        evaluations: ``[R]`` number of evaluations of the row.
    """

    root: Tensor
    mass: Tensor
    evaluations: Tensor


def solve(
    distances: Tensor,
    alpha_minus_1: Tensor,
    formula: str,
    *,
    method: str = "halley",
) -> Root:
    """Find the root of every row: the largest probability with which the row sums to 1.

    Args:
        distances: ``[R, n]`` distances from the row's maximum, at least 0, and with a 0 in every
            row. An entry with distance inf has weight 0.
        alpha_minus_1: broadcastable to ``[R, 1]``.
        formula: closed form for alpha = 1, 1.5 or 2, or :data:`GENERIC`.
        method: ``"halley"``, or ``"bisection"`` for comparisons.
    """
    eps = torch.finfo(distances.dtype).eps
    tolerance = 1e-6 if distances.dtype == torch.float32 else 1e-13
    one = torch.ones_like(distances[:, :1])
    alpha_minus_1 = alpha_minus_1.to(distances.dtype) * one
    equation: _GenericEquation | _ClosedFormEquation
    if formula == GENERIC:
        equation = _GenericEquation(distances, alpha_minus_1)
    else:
        equation = _ClosedFormEquation(distances, alpha_minus_1, formula)
    low, high = equation.bracket()
    root = equation.middle(low, high)
    mass = one
    previous_residual = math.inf * one
    is_solved = torch.zeros_like(one, dtype=torch.bool)
    evaluations = torch.zeros_like(is_solved, dtype=torch.int32)
    for _ in range(EVALUATIONS):
        sums = equation.sums(root)
        evaluations += ~is_solved
        mass = torch.where(is_solved, mass, sums.mass)
        # The weights grow with the root, so a sum below 1 makes the trial value a lower bound.
        low = torch.where(sums.mass <= 1, root, low)
        high = torch.where(sums.mass >= 1, root, high)
        residual = (sums.mass - 1).abs()
        next_root = (low + high) / 2  # bisection, unless Halley's step is better
        if method == "halley":
            step = equation.step(root, sums)
            # The root of a row with one positive weight is on the border of the bracket, which
            # rounding may cross.
            is_inside = (step >= low - 99 * eps) & (step <= high + 99 * eps)
            is_good = is_inside & (residual <= previous_residual / 2)
            next_root = torch.where(is_good, step.clamp(low, high), next_root)
        has_stopped = (next_root - root).abs() <= eps * equation.unit(root)
        is_solved |= (residual <= tolerance) | has_stopped
        if bool(is_solved.all()):
            break
        root = torch.where(is_solved, root, next_root)
        previous_residual = residual
    return Root(root, mass, evaluations.squeeze(-1))


def probabilities(distances: Tensor, root: Tensor, alpha_minus_1: Tensor, formula: str) -> Tensor:
    """Compute the weights of rows at their roots, not yet divided by their sum.

    The closed forms are ``p = [c - e d]_+^(1/e)`` with ``e = alpha - 1`` and distances d.

    Args:
        distances: ``[..., n]`` distances from the row's maximum.
        root: ``[..., 1]`` :attr:`Root.root`: c for closed forms, ``log p_max`` for
            :data:`GENERIC`.
        alpha_minus_1: broadcastable to ``[..., 1]``.
        formula: closed form for alpha = 1, 1.5 or 2, or :data:`GENERIC`.
    """
    if formula == GENERIC:
        return torch.exp(log_weights(distances, root, alpha_minus_1))
    x = (root - alpha_minus_1 * distances).clamp_min(0)  # p^e
    return x * x if formula == ENTMAX15 else x


class RowWeights(NamedTuple):
    """Alpha-entmax of rows, and the statistics from which it can be computed again.

    Attributes:
        probabilities: ``[R, n]``.
        root: ``[R, 1]`` :attr:`Root.root`.
        mass: ``[R, 1]`` sum of the weights at the root, by which they were divided.
        peak: ``[R, 1]`` largest score.
    """

    probabilities: Tensor
    root: Tensor
    mass: Tensor
    peak: Tensor


def row_weights(scores: Tensor, alpha_minus_1: Tensor, formula: str) -> RowWeights:
    """Compute the alpha-entmax of every row of scores.

    A row whose scores are all ``-inf`` has probabilities of 0. A row with NaN, ``+inf`` or an alpha
    outside [1, 2] has NaN for its probabilities and its root.

    Args:
        scores: ``[R, n]``.
        alpha_minus_1: ``[R, 1]``.
        formula: closed form for alpha = 1, 1.5 or 2, or :data:`GENERIC`.
    """
    peak = scores.amax(dim=-1, keepdim=True)
    is_valid = peak.isfinite() & (alpha_minus_1 >= 0) & (alpha_minus_1 <= 1)
    is_empty = peak == -math.inf
    # Other rows are solved as well, with equal scores and alpha = 2, and replaced afterwards.
    distances = torch.where(is_valid, peak - scores, 0.0)
    if formula == SOFTMAX:
        p = torch.softmax(-distances, dim=-1)
        root = torch.log(p.amax(dim=-1, keepdim=True))
        mass = torch.ones_like(peak)
    else:
        alpha_minus_1 = torch.where(is_valid, alpha_minus_1, 1.0)
        root, mass, _ = solve(distances, alpha_minus_1, formula)
        p = probabilities(distances, root, alpha_minus_1, formula) / mass
    invalid_p = torch.where(is_empty, 0.0, math.nan).to(p.dtype)
    return RowWeights(
        probabilities=torch.where(is_valid, p, invalid_p),
        root=torch.where(is_valid | is_empty, root, math.nan),
        mass=mass,
        peak=peak,
    )


def row_gradients(
    p: Tensor,
    dp: Tensor,
    alpha_minus_1: Tensor,
    formula: str,
    need_alpha: bool,
) -> tuple[Tensor, Tensor | None]:
    """Compute the gradients of scores and alphas from the gradient of the probabilities.

    The Jacobian of a row is ``diag(u) - u u^T / sum u`` with ``u = p^(2 - alpha)`` on the support.
    :func:`alpha_terms` computes the terms of the derivative with respect to alpha.

    Args:
        p: ``[..., n]`` probabilities.
        dp: ``[..., n]`` gradient of the probabilities.
        alpha_minus_1: ``[..., 1]``.
        formula: closed form for alpha = 1, 1.5 or 2, or :data:`GENERIC`.
        need_alpha: whether the gradient of alpha is needed.

    Returns:
        ``[..., n]`` gradient of the scores, and ``[...]`` gradient of each row's alpha, or
        ``None``.
    """
    u = slopes(p, alpha_minus_1, formula)
    sum_u = u.sum(dim=-1, keepdim=True)
    sum_u = torch.where(sum_u == 0, 1.0, sum_u)  # a row without a support has gradient 0
    mean_dp = (u * dp).sum(dim=-1, keepdim=True) / sum_u
    dscores = u * (dp - mean_dp)
    if not need_alpha:
        return dscores, None
    a, b = alpha_terms(p, u, alpha_minus_1)
    # The product of dp with dp/dalpha = (B sum A - A sum B) / sum u.
    products = a.sum(dim=-1) * (dp * b).sum(dim=-1) - b.sum(dim=-1) * (dp * a).sum(dim=-1)
    return dscores, products / sum_u.squeeze(-1)


def slopes(p: Tensor, alpha_minus_1: Tensor, formula: str) -> Tensor:
    """Compute ``u = p^(2 - alpha)`` on the support and 0 elsewhere, for the gradient of entmax.

    The derivative of a probability by its own score is ``u (1 - u / sum u)``.

    Args:
        p: ``[..., n]`` probabilities.
        alpha_minus_1: ``[..., 1]``.
        formula: closed form for alpha = 1, 1.5 or 2, or :data:`GENERIC`.
    """
    if formula == SOFTMAX:  # alpha = 1
        return p
    if formula == ENTMAX15:  # alpha = 1.5
        return p.sqrt()
    if formula == SPARSEMAX:  # alpha = 2: 1 on the support; NaN stays NaN
        return torch.where(p.isnan(), p, (p > 0).to(p.dtype))
    log_p = torch.log(torch.where(p == 0, 1.0, p))  # no log of 0, whose product may be NaN
    return torch.where(p == 0, 0.0, torch.exp((1 - alpha_minus_1) * log_p))


def alpha_terms(p: Tensor, u: Tensor, alpha_minus_1: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the elementwise A and B of ``dp/dalpha = (B sum A - A sum B) / sum u``.

    With ``e = alpha - 1``, ``y = log p`` and ``w = -e y``, they are
    ``A = p (exp(w) - 1 - w) / e^2`` and ``B = p (1 + w)``. A is finite down to alpha = 1, where it
    is ``p y^2 / 2``.

    Args:
        p: ``[..., n]`` probabilities.
        u: ``[..., n]`` :func:`slopes`, which are ``p exp(w)``.
        alpha_minus_1: ``[..., 1]`` e.

    Returns:
        ``[..., n]`` A and ``[..., n]`` B.
    """
    y = torch.log(torch.where(p > 0, p, 1.0))
    w = -alpha_minus_1 * y
    # (exp(w) - 1 - w) / w^2 as a Taylor series with the coefficients 1/2!, 1/3! up to 1/8!. For a
    # small w the direct formula subtracts nearly equal numbers.
    series = 1 / 2 + w * (
        1 / 6 + w * (1 / 24 + w * (1 / 120 + w * (1 / 720 + w * (1 / 5040 + w / 40320))))
    )
    direct = (u - p - p * w) / (alpha_minus_1 * alpha_minus_1).clamp_min(TINY)
    # Seven terms reach the precision of fp32 below 0.3, and that of fp64 below 0.03.
    series_below = 0.3 if p.dtype == torch.float32 else 0.03
    a = torch.where(w < series_below, p * y * y * series, direct)
    return a, p * (1 + w)
