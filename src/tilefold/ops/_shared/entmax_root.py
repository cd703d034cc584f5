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

import torch
from torch import Tensor

# Bound of the loop. Rows of any shape take 3 to 6 evaluations, a bracket of 2^-24 at most 24 more.
EVALUATIONS = 100

# Kinds of alpha: 1, 1.5, 2 and any other.
SOFTMAX = "softmax"
ENTMAX15 = "entmax15"
SPARSEMAX = "sparsemax"
GENERIC = "generic"
# Kinds that only kernels distinguish: any alpha with results of 16 bits, and an alpha that is a
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
    """Tolerance of the rows' masses in kernels.

    Kernels divide the weights by the mass, and results of 16 bits are rounded by far more.
    """
    return 1e-6 if dtype == torch.float32 else 1e-5


def kind_of(alpha: Tensor | None, alpha_value: float) -> str:
    """Return the kind of an alpha: a closed form for 1, 1.5 and 2, else :data:`GENERIC`.

    Args:
        alpha: a tensor, which is generic, or ``None``.
        alpha_value: the alpha if it is a number.
    """
    if alpha is not None:
        return GENERIC
    closed_forms = {1.0: SOFTMAX, 1.5: ENTMAX15, 2.0: SPARSEMAX}
    return closed_forms.get(alpha_value, GENERIC)


def kernel_kind(dtype: torch.dtype, alpha: Tensor | None, alpha_value: float) -> str:
    """Return which formula kernels use to raise ``x`` to the power ``1 / (alpha - 1)``.

    There are closed forms for alpha = 1, 1.5 and 2. A learned alpha, and a number close to 1,
    need a formula that holds for every alpha; results of 16 bits allow a shorter one. Any other
    number is known when the kernel is compiled, and has a fast formula below 1.5 and one above.

    Args:
        dtype: Data type of the results.
        alpha: A tensor of alphas, or ``None``.
        alpha_value: The alpha if it is a number.
    """
    kind = kind_of(alpha, alpha_value)
    if kind != GENERIC:
        return kind  # a closed form
    is_16_bit = dtype in (torch.float16, torch.bfloat16)
    is_learned = alpha is not None
    near_softmax = NEAR_SOFTMAX16 if is_16_bit else NEAR_SOFTMAX
    if is_learned or alpha_value - 1 < near_softmax:
        return GENERIC16 if is_16_bit else GENERIC
    return GENTLE if alpha_value < 1.5 else STEEP


def log_weights(d: Tensor, log_peak: Tensor, e: Tensor) -> Tensor:
    """Compute log-probabilities of alpha-entmax from ``log p_max``.

    The formula is ``log p = log p_max - t g(e t)`` with ``t = d / p_max^e`` and
    ``g(u) = -log(1 - u) / u``. It also holds for alpha = 1, where ``g(0) = 1``.
    Autograd can differentiate it with respect to all arguments.

    Args:
        d: ``[R, n]`` distances of the scores from the row's maximum, inf for weight 0.
        log_peak: ``[R, 1]`` ``log p_max``, logarithm of the row's largest probability.
        e: ``alpha - 1``, broadcastable to ``[R, 1]``.

    Returns:
        ``[R, n]`` ``log p``, ``-inf`` where p is 0.
    """
    c = torch.exp(e * log_peak)  # p_max^e
    absent = d == math.inf  # e = 0 would make it 0 * inf
    t = d.masked_fill(absent, 0) / c
    u = e * t
    inside = (u < 1) & ~absent  # p is positive
    # -log(1 - u) / u loses its digits near 0, where a power series is exact. `where` differentiates
    # both branches, so the direct formula gets a harmless 0.5 where it is not used.
    tiny = u < 1e-5
    series = 1 + u * (1 / 2 + u * (1 / 3 + u / 4))
    safe_u = torch.where(tiny | ~inside, 0.5, u)
    g = torch.where(tiny, series, -torch.log1p(-safe_u) / safe_u)
    return torch.where(inside, log_peak - t * torch.where(inside, g, 1.0), -math.inf)


def _evaluate(d: Tensor, y: Tensor, e: Tensor, kind: str) -> tuple[Tensor, Tensor, Tensor]:
    """Compute three sums over every row at a trial value ``y`` of the root.

    With the unnormalised weights ``p`` at ``y``, they are ``F = sum p`` (1 at the root),
    ``U = sum p^(1-e)`` and ``Q = sum p^(1-2e)``. Newton's and Halley's steps are made of them.

    Args:
        d: ``[R, n]`` distances from the row's maximum, multiplied by ``e`` for closed forms.
        y: ``[R, 1]`` the unknown: ``c = p_max^e`` for closed forms, else ``log p_max``.
        e: ``[R, 1]`` ``alpha - 1``.
        kind: :func:`kind_of` alpha.

    Returns:
        ``[R, 1]`` F, ``[R, 1]`` U and ``[R, 1]`` Q.
    """
    if kind == GENERIC:
        log_p = log_weights(d, y, e)
        is_support = log_p > -math.inf
        log_p = log_p.masked_fill(~is_support, 0)

        def sum_of_powers(power: Tensor | int) -> Tensor:
            return (torch.exp(power * log_p) * is_support).sum(dim=-1, keepdim=True)

        # Above alpha = 1.5, where 1 - 2e is negative, Q is not used.
        return sum_of_powers(1), sum_of_powers(1 - e), sum_of_powers((1 - 2 * e).clamp(0))
    x = (y - d).clamp_min(0)  # p^e
    support_size = (x > 0).to(x.dtype).sum(dim=-1, keepdim=True)
    sum_of_x = x.sum(dim=-1, keepdim=True)
    if kind == ENTMAX15:  # e = 1/2: p = x^2, p^(1-e) = x and p^(1-2e) = 1
        return (x * x).sum(dim=-1, keepdim=True), sum_of_x, support_size
    # Sparsemax, e = 1: p = x and p^(1-e) = 1. Q is not used, and is only a placeholder.
    return sum_of_x, support_size, support_size


def _halley_step(y: Tensor, f: Tensor, u: Tensor, q: Tensor, e: Tensor, kind: str) -> Tensor:
    """Return the next trial value of the root after Halley's step on ``G(c) = F^e = 1``.

    For the unknown ``c = p_max^e``, Newton's step decreases it by ``(1 - F^-e) F / U``. Halley's
    step divides this by ``1 - damping``. Above alpha = 1.5 the damping is 0.

    Args:
        y: ``[R, 1]`` the unknown: ``c`` for closed forms, else ``log p_max``.
        f: ``[R, 1]`` F of :func:`_evaluate`, the sum of the weights.
        u: ``[R, 1]`` U of :func:`_evaluate`.
        q: ``[R, 1]`` Q of :func:`_evaluate`.
        e: ``[R, 1]`` ``alpha - 1``.
        kind: :func:`kind_of` alpha.
    """
    log_f = torch.log(f)
    residual = -torch.expm1(-e * log_f)  # 1 - F^-e
    positive_e = e.clamp_min(1e-30)  # no division by 0 at alpha = 1
    damping = residual * (1 - e) / (2 * positive_e) * (f * q / (u * u) - 1)
    # Above alpha = 1.5, Q would be a sum of negative powers. A damping near 1 would make the step
    # arbitrarily long.
    damping = torch.where((e <= 0.5) & (damping < 0.75), damping, 0.0)
    decrease = residual * f / u / (1 - damping)  # of c
    if kind != GENERIC:
        return y - decrease
    # The step in y = log(c) / e. Its limit at alpha = 1 is the exact root of softmax.
    change = torch.log1p(-decrease * torch.exp(-e * y)) / positive_e
    return y + torch.where(e > 0, change, -log_f)


def solve(
    d: Tensor,
    e: Tensor,
    kind: str,
    *,
    method: str = "halley",
) -> tuple[Tensor, Tensor, Tensor]:
    """Find the root of every row: the largest probability with which the row sums to 1.

    Args:
        d: ``[R, n]`` distances from the row's maximum, at least 0, and with a 0 in every row. An
            entry with distance inf has weight 0.
        e: ``alpha - 1``, broadcastable to ``[R, 1]``.
        kind: :func:`kind_of` alpha.
        method: ``"halley"``, or ``"bisection"`` for comparisons.

    Returns:
        ``[R, 1]`` root (``c`` of closed forms, ``log p_max`` of others), ``[R, 1]`` mass at the
        root, and ``[R]`` number of evaluations.
    """
    eps = torch.finfo(d.dtype).eps
    tolerance = 1e-6 if d.dtype == torch.float32 else 1e-13
    n = float(d.size(-1))
    one = torch.ones_like(d[:, :1])
    e = e.to(d.dtype) * one
    if kind == GENERIC:
        low = -math.log(n) * one
        high = 0 * one
        # Halfway in c, and not in its logarithm: fewer evaluations follow.
        halfway = torch.log((1 + torch.exp(e * low)) / 2) / e.clamp_min(1e-3)
        y = torch.where(e > 1e-3, halfway.clamp(low, high), (low + high) / 2)
    else:
        d = d * e
        low = n**-e
        high = one
        y = (low + high) / 2
    mass = one
    previous_residual = math.inf * one
    is_solved = torch.zeros_like(one, dtype=torch.bool)
    evaluations = torch.zeros_like(is_solved, dtype=torch.int32)
    for _ in range(EVALUATIONS):
        f, u, q = _evaluate(d, y, e, kind)
        evaluations += ~is_solved
        mass = torch.where(is_solved, mass, f)
        # The weights grow with y, so that a sum below 1 makes y a lower bound of the root.
        low = torch.where(f <= 1, y, low)
        high = torch.where(f >= 1, y, high)
        residual = (f - 1).abs()
        next_y = (low + high) / 2  # bisection, where no better step is known
        if method == "halley":
            step = _halley_step(y, f, u, q, e, kind)
            # The root of a row with one winner is on the border of the bracket, which rounding may
            # cross.
            is_inside = (step >= low - 99 * eps) & (step <= high + 99 * eps)
            is_good = is_inside & (residual <= previous_residual / 2)
            next_y = torch.where(is_good, step.clamp(low, high), next_y)
        scale = y.abs() if kind != GENERIC else y.abs().clamp_min(1)
        has_stopped = (next_y - y).abs() <= eps * scale
        is_solved |= (residual <= tolerance) | has_stopped
        if bool(is_solved.all()):
            break
        y = torch.where(is_solved, y, next_y)
        previous_residual = residual
    return y, mass, evaluations.squeeze(-1)


def probabilities(d: Tensor, y: Tensor, e: Tensor, kind: str) -> Tensor:
    """Compute the weights at the root ``y`` of :func:`solve`, not yet divided by their sum.

    Args:
        d: ``[.., n]`` distances from the row's maximum.
        y: ``[.., 1]`` root: ``c = p_max^e`` for closed forms, else ``log p_max``.
        e: ``alpha - 1``, broadcastable to ``[.., 1]``.
        kind: :func:`kind_of` alpha.
    """
    if kind == GENERIC:
        return torch.exp(log_weights(d, y, e))
    x = (y - e * d).clamp_min(0)  # p^e
    return x * x if kind == ENTMAX15 else x


def row_weights(s: Tensor, e: Tensor, kind: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the alpha-entmax of every row of scores, and what backward needs of the row.

    A row whose scores are all ``-inf`` has probabilities of 0. A row with NaN, ``+inf`` or an alpha
    outside [1, 2] has NaN for its probabilities and its root.

    Args:
        s: ``[R, n]`` scores.
        e: ``[R, 1]`` ``alpha - 1``.
        kind: :func:`kind_of` alpha.

    Returns:
        ``[R, n]`` probabilities, ``[R, 1]`` root (see :func:`solve`), ``[R, 1]`` mass (sum of the
        weights at the root, by which they were divided), and ``[R, 1]`` peak (largest score).
    """
    peak = s.amax(dim=-1, keepdim=True)
    is_valid = peak.isfinite() & (e >= 0) & (e <= 1)
    is_empty = peak == -math.inf
    d = torch.where(is_valid, peak - s, 0.0)
    if kind == SOFTMAX:
        p = torch.softmax(-d, dim=-1)
        root = torch.log(p.amax(dim=-1, keepdim=True))
        mass = torch.ones_like(peak)
    else:
        e = torch.where(is_valid, e, 1.0)
        root, mass, _ = solve(d, e, kind)
        p = probabilities(d, root, e, kind) / mass
    invalid_p = torch.where(is_empty, 0.0, math.nan).to(p.dtype)
    return (
        torch.where(is_valid, p, invalid_p),
        torch.where(is_valid | is_empty, root, math.nan),
        mass,
        peak,
    )


def row_gradients(
    p: Tensor,
    dp: Tensor,
    e: Tensor,
    kind: str,
    need_alpha: bool,
) -> tuple[Tensor, Tensor | None]:
    """Compute the gradients of scores and alphas from the gradient of the probabilities.

    The Jacobian of a row is ``diag(u) - u u^T / sum u`` with ``u = p^(1-e)`` on the support.
    :func:`alpha_terms` has the derivative by alpha.

    Args:
        p: ``[.., n]`` probabilities.
        dp: ``[.., n]`` gradient of the probabilities.
        e: ``[.., 1]`` ``alpha - 1``.
        kind: :func:`kind_of` alpha.
        need_alpha: whether the gradient of alpha is needed.

    Returns:
        ``[.., n]`` gradient of the scores, and ``[..]`` gradient of each row's alpha, or ``None``.
    """
    u = slopes(p, e, kind)
    sum_u = u.sum(dim=-1, keepdim=True)
    sum_u = torch.where(sum_u == 0, 1.0, sum_u)  # a row without a support has gradient 0
    mean_dp = (u * dp).sum(dim=-1, keepdim=True) / sum_u
    ds = u * (dp - mean_dp)
    if not need_alpha:
        return ds, None
    a, b = alpha_terms(p, u, e)
    # The product of dp with dp/dalpha = (B sum A - A sum B) / sum u.
    products = a.sum(dim=-1) * (dp * b).sum(dim=-1) - b.sum(dim=-1) * (dp * a).sum(dim=-1)
    return ds, products / sum_u.squeeze(-1)


def slopes(p: Tensor, e: Tensor, kind: str) -> Tensor:
    """Compute ``u = p^(1-e)`` on the support, and 0 elsewhere, for the gradient of entmax.

    Args:
        p: ``[.., n]`` probabilities.
        e: ``[.., 1]`` ``alpha - 1``.
        kind: :func:`kind_of` alpha.
    """
    if kind == SOFTMAX:  # e = 0
        return p
    if kind == ENTMAX15:  # e = 1/2
        return p.sqrt()
    if kind == SPARSEMAX:  # e = 1, but NaN stays NaN
        return torch.where(p.isnan(), p, (p > 0).to(p.dtype))
    log_p = torch.log(torch.where(p == 0, 1.0, p))
    return torch.where(p == 0, 0.0, torch.exp((1 - e) * log_p))


def alpha_terms(p: Tensor, u: Tensor, e: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the elementwise A and B of ``dp/dalpha = (B sum A - A sum B) / sum u``.

    With ``y = log p`` and ``w = -e y``, ``A = p (exp(w) - 1 - w) / e^2`` and ``B = p (1 + w)``. A
    is finite down to alpha = 1, where it is ``p y^2 / 2``.

    Args:
        p: ``[.., n]`` probabilities.
        u: ``[.., n]`` :func:`slopes`, which are ``p exp(w)``.
        e: ``[.., 1]`` ``alpha - 1``.

    Returns:
        ``[.., n]`` A and ``[.., n]`` B.
    """
    y = torch.log(torch.where(p > 0, p, 1.0))
    w = -e * y
    # (exp(w) - 1 - w) / w^2 as a Taylor series, the reciprocals of 2!, 3! up to 8!. For a small w
    # the direct formula subtracts nearly equal numbers.
    series = 1 / 2 + w * (
        1 / 6 + w * (1 / 24 + w * (1 / 120 + w * (1 / 720 + w * (1 / 5040 + w / 40320))))
    )
    direct = (u - p - p * w) / (e * e).clamp_min(1e-30)
    # Seven terms reach the precision of fp32 below 0.3, and that of fp64 below 0.03.
    series_below = 0.3 if p.dtype == torch.float32 else 0.03
    a = torch.where(w < series_below, p * y * y * series, direct)
    return a, p * (1 + w)
