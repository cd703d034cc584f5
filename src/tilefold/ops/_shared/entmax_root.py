"""The threshold of alpha-entmax, in torch: used by ``entmax`` and ``entmax_attention``.

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
support. A step that leaves the bracket, or follows one that did not halve the residual, is replaced
by bisection: the bracket or the residual halves with every evaluation, for any row.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

EVALUATIONS = (
    100  # bound of the loop; rows of any shape take 3 to 6, a bracket of 2^-24 at most 24 more
)

SOFTMAX, ENTMAX15, SPARSEMAX, GENERIC = "softmax", "entmax15", "sparsemax", "generic"
GENERIC16, GENTLE, STEEP = "generic16", "gentle", "steep"  # of kernels
# Kernels raise x = p^e to the power 1/e by a logarithm that is off by 2^-22 near x = 1; x itself is
# rounded by 2^-25. Below these alpha - 1 a series takes over: weights of fp32 are within 2.4e-6 of
# themselves, of 16 bits within 2e-5.
NEAR_SOFTMAX, NEAR_SOFTMAX16 = 1 / 8, 1 / 64


def check_alphas(alpha: Tensor | None) -> None:
    """Raise ``ValueError`` for a tensor on the CPU with an alpha outside [1, 2]."""
    if alpha is None or alpha.device.type != "cpu":
        return
    for bad in alpha[~((alpha >= 1) & (alpha <= 2))][:1].tolist():
        raise ValueError(
            f"alpha must lie in [1, 2], got {bad}; parametrise it, for instance as 1 + sigmoid(theta).",
        )


def alpha_number(alpha: object) -> float:
    """An alpha that is no tensor, ``ValueError`` unless it is a number in [1, 2]."""
    if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not 1 <= alpha <= 2:
        raise ValueError(f"alpha must be a number in [1, 2] or a tensor of them, got {alpha!r}.")
    return float(alpha)


def tolerance(dtype: torch.dtype) -> float:
    """Tolerance of row masses in kernels, which divide out what is left: 16 bits round the weights
    by far more.
    """
    return 1e-6 if dtype == torch.float32 else 1e-5


def kind_of(alpha: Tensor | None, alpha_value: float) -> str:
    """The closed form that an alpha has, if it is a number: 1 softmax, 1.5 entmax15, 2 sparsemax."""
    return (
        GENERIC
        if alpha is not None
        else {1.0: SOFTMAX, 1.5: ENTMAX15, 2.0: SPARSEMAX}.get(alpha_value, GENERIC)
    )


def kernel_kind(dtype: torch.dtype, alpha: Tensor | None, alpha_value: float) -> str:
    """:func:`kind_of` as kernels know it: less exact about any alpha where results are rounded to
    16 bits.
    """
    kind = kind_of(alpha, alpha_value)
    if kind != GENERIC:
        return kind
    narrow = dtype in (torch.float16, torch.bfloat16)
    if alpha is not None or alpha_value - 1 < (NEAR_SOFTMAX16 if narrow else NEAR_SOFTMAX):
        return GENERIC16 if narrow else GENERIC
    return GENTLE if alpha_value < 1.5 else STEEP


def log_weights(d: Tensor, log_peak: Tensor, e: Tensor) -> Tensor:
    """``log p`` for distances ``d``, ``-inf`` off the support; differentiable in all three."""
    c = torch.exp(e * log_peak)
    absent = d == math.inf  # e = 0 would make it 0 * inf
    t = d.masked_fill(absent, 0) / c
    u = e * t
    inside = (u < 1) & ~absent
    tiny = u < 1e-5
    series = 1 + u * (1 / 2 + u * (1 / 3 + u / 4))
    safe = torch.where(tiny | ~inside, 0.5, u)
    g = torch.where(tiny, series, -torch.log1p(-safe) / safe)
    return torch.where(inside, log_peak - t * torch.where(inside, g, 1.0), -math.inf)


def _evaluate(d: Tensor, y: Tensor, e: Tensor, kind: str) -> tuple[Tensor, Tensor, Tensor]:
    """F, U and Q of every row at ``y``: ``c`` of the closed forms, whose ``d`` holds ``e d``, else
    ``log p_max``.
    """
    if kind == GENERIC:
        log_p = log_weights(d, y, e)
        support = log_p > -math.inf
        log_p = log_p.masked_fill(~support, 0)
        f, u, q = (
            (torch.exp(power * log_p) * support).sum(dim=-1, keepdim=True)
            for power in (1, 1 - e, (1 - 2 * e).clamp(0))
        )
        return f, u, q
    x = (y - d).clamp_min(0)
    if kind == ENTMAX15:
        f, u = (x * x).sum(dim=-1, keepdim=True), x.sum(dim=-1, keepdim=True)
        return f, u, (x > 0).to(x.dtype).sum(dim=-1, keepdim=True)
    f, u = x.sum(dim=-1, keepdim=True), (x > 0).to(x.dtype).sum(dim=-1, keepdim=True)
    return f, u, u


def _step(y: Tensor, f: Tensor, u: Tensor, q: Tensor, e: Tensor, kind: str) -> Tensor:
    log_f = torch.log(f)
    s = -torch.expm1(-e * log_f)
    damping = s * (1 - e) / (2 * e.clamp_min(1e-30)) * (f * q / (u * u) - 1)
    damping = torch.where(
        (e <= 0.5) & (damping < 0.75),
        damping,
        0.0,
    )  # beyond, Q is a sum of negative powers
    r = s * f / u / (1 - damping)
    if kind != GENERIC:
        return y - r
    moved = torch.log1p(-r * torch.exp(-e * y)) / e.clamp_min(1e-30)
    return y + torch.where(e > 0, moved, -log_f)


def solve(
    d: Tensor,
    e: Tensor,
    kind: str,
    *,
    method: str = "halley",
) -> tuple[Tensor, Tensor, Tensor]:
    """The root of every row.

    Args:
        d: ``[R, n]`` distances from the row's maximum, at least 0 and with a 0 in every row; inf is
            never chosen.
        e: ``alpha - 1``, broadcastable to ``[R, 1]``.
        kind: :func:`kind_of` alpha.
        method: ``"halley"``, or ``"bisection"``, which is here to be compared with.

    Returns:
        ``[R, 1]`` root (``c`` of the closed forms, ``log p_max`` of the others), ``[R, 1]`` mass at the root and
        ``[R]`` number of evaluations.
    """
    eps = torch.finfo(d.dtype).eps
    tolerance = 1e-6 if d.dtype == torch.float32 else 1e-13
    n = float(d.size(-1))
    one = torch.ones_like(d[:, :1])
    e = e.to(d.dtype) * one
    if kind == GENERIC:
        low, high = -math.log(n) * one, 0 * one
    else:
        d = d * e
        low, high = n**-e, one
    y = (low + high) / 2
    if kind == GENERIC:  # halfway in c and not in its logarithm: fewer evaluations follow
        halfway = torch.log((1 + torch.exp(e * low)) / 2) / e.clamp_min(1e-3)
        y = torch.where(e > 1e-3, halfway.clamp(low, high), y)
    mass, before = one, math.inf * one
    found = torch.zeros_like(one, dtype=torch.bool)
    evaluations = torch.zeros_like(found, dtype=torch.int32)
    for _ in range(EVALUATIONS):
        f, u, q = _evaluate(d, y, e, kind)
        evaluations += ~found
        mass = torch.where(found, mass, f)
        low, high = torch.where(f <= 1, y, low), torch.where(f >= 1, y, high)
        residual = (f - 1).abs()
        middle = (low + high) / 2
        new = middle
        if method == "halley":
            step = _step(y, f, u, q, e, kind)
            inside = (step >= low - 99 * eps) & (
                step <= high + 99 * eps
            )  # one winner's root lies on the border
            new = torch.where(inside & (residual <= before / 2), step.clamp(low, high), middle)
        still = (new - y).abs() <= eps * (y.abs() if kind != GENERIC else y.abs().clamp_min(1))
        found |= (residual <= tolerance) | still
        if bool(found.all()):
            break
        y, before = torch.where(found, y, new), residual
    return y, mass, evaluations.squeeze(-1)


def probabilities(d: Tensor, y: Tensor, e: Tensor, kind: str) -> Tensor:
    """``p`` at the root ``y`` of :func:`solve`, not yet divided by its mass."""
    if kind == GENERIC:
        return torch.exp(log_weights(d, y, e))
    x = (y - e * d).clamp_min(0)
    return x * x if kind == ENTMAX15 else x


def row_weights(s: Tensor, e: Tensor, kind: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Probabilities of scores ``[R, n]``, and the root, mass and peak of every row, ``[R, 1]``.

    A row of nothing but ``-inf`` is 0; one with NaN, ``+inf`` or an alpha out of range, and its
    root, are NaN.
    """
    peak = s.amax(dim=-1, keepdim=True)
    proper, empty = peak.isfinite() & (e >= 0) & (e <= 1), peak == -math.inf
    d = torch.where(proper, peak - s, 0.0)
    if kind == SOFTMAX:
        p = torch.softmax(-d, dim=-1)
        root, mass = torch.log(p.amax(dim=-1, keepdim=True)), torch.ones_like(peak)
    else:
        e = torch.where(proper, e, 1.0)
        root, mass, _ = solve(d, e, kind)
        p = probabilities(d, root, e, kind) / mass
    nothing = torch.where(empty, 0.0, math.nan).to(p.dtype)
    return torch.where(proper, p, nothing), torch.where(proper | empty, root, math.nan), mass, peak


def row_gradients(
    p: Tensor,
    dp: Tensor,
    e: Tensor,
    kind: str,
    need_alpha: bool,
) -> tuple[Tensor, Tensor | None]:
    """Gradients of scores ``[.., n]``, and of the alpha of each row ``[..]``, from those of the
    probabilities.
    """
    u = slopes(p, e, kind)
    total = u.sum(dim=-1, keepdim=True)
    total = torch.where(total == 0, 1.0, total)
    ds = u * (dp - (u * dp).sum(dim=-1, keepdim=True) / total)
    if not need_alpha:
        return ds, None
    a, b = alpha_terms(p, u, e)
    products = a.sum(dim=-1) * (dp * b).sum(dim=-1) - b.sum(dim=-1) * (dp * a).sum(dim=-1)
    return ds, products / total.squeeze(-1)


def slopes(p: Tensor, e: Tensor, kind: str) -> Tensor:
    """``u = p^(1-e)`` on the support and 0 elsewhere: the Jacobian of a row is ``diag(u) - u u^T /
    sum u``.
    """
    if kind == SOFTMAX:
        return p
    if kind == ENTMAX15:
        return p.sqrt()
    if kind == SPARSEMAX:
        return torch.where(p.isnan(), p, (p > 0).to(p.dtype))
    return torch.where(p == 0, 0.0, torch.exp((1 - e) * torch.log(torch.where(p == 0, 1.0, p))))


def alpha_terms(p: Tensor, u: Tensor, e: Tensor) -> tuple[Tensor, Tensor]:
    """Elementwise A and B of ``dp/dalpha = (B sum A - A sum B) / sum u``, finite down to alpha = 1.

    With ``y = log p`` and ``w = -e y``: ``A = p (exp(w) - 1 - w) / e^2`` (limit ``p y^2 / 2``), ``B
    = p (1 + w)``.
    """
    y = torch.log(torch.where(p > 0, p, 1.0))
    w = -e * y
    series = 1 / 2 + w * (
        1 / 6 + w * (1 / 24 + w * (1 / 120 + w * (1 / 720 + w * (1 / 5040 + w / 40320))))
    )
    direct = (u - p - p * w) / (e * e).clamp_min(1e-30)
    return torch.where(
        w < (0.3 if p.dtype == torch.float32 else 0.03),
        p * y * y * series,
        direct,
    ), p * (1 + w)
