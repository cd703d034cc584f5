"""Alpha-entmax in torch operations on blocks of rows: the CPU path, and the fallback on any device."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tilefold.ops._shared.entmax_root import SOFTMAX, alpha_terms, check_alphas, kind_of, probabilities, slopes, solve
from tilefold.ops.entmax._problem import EntmaxOptions, EntmaxSaved, EntmaxTensors

TILE_ELEMENTS = 1 << 18  # entries of a block: its few temporaries stay in the cache


def forward(tensors: EntmaxTensors, options: EntmaxOptions, training: bool) -> tuple[Tensor, Tensor]:
    """``[R, n]`` probabilities in the dtype of ``x`` and ``[R]`` int32 support sizes."""
    check_alphas(tensors.alpha)
    x, alpha, alpha_value = tensors.x.contiguous(), tensors.alpha, options.alpha_value
    kind = kind_of(alpha, alpha_value)
    out = torch.empty_like(x)
    support = torch.empty(x.size(0), dtype=torch.int32, device=x.device)
    if x.numel() == 0:
        return out, support.zero_()
    rows = max(1, TILE_ELEMENTS // max(x.size(1), 1))
    for r in range(0, x.size(0), rows):
        s = x[r : r + rows].to(torch.promote_types(x.dtype, torch.float32))
        e = _exponent(alpha, alpha_value, s, r, rows)
        peak = s.amax(dim=-1, keepdim=True)
        proper = peak.isfinite() & (e >= 0) & (e <= 1)
        d = torch.where(proper, peak - s, 0.0)
        if kind == SOFTMAX:
            p = torch.softmax(-d, dim=-1)
        else:
            e = torch.where(proper, e, 1.0)
            root, mass, _ = solve(d, e, kind)
            p = probabilities(d, root, e, kind) / mass
        p = torch.where(proper, p, torch.where(peak == -math.inf, 0.0, math.nan))
        out[r : r + rows] = p
        support[r : r + rows] = (p > 0).sum(dim=-1)
    return out, support


def backward(
    dp: Tensor, saved: EntmaxSaved, options: EntmaxOptions, needs: tuple[bool, ...]
) -> tuple[Tensor | None, Tensor | None]:
    """Gradient of ``x`` ``[R, n]`` and of ``alpha`` ``[R]`` in their dtypes."""
    (p, alpha), alpha_value, (need_x, need_alpha) = saved, options.alpha_value, needs
    kind = kind_of(alpha, alpha_value)
    wide = torch.promote_types(p.dtype, torch.float32)
    dx = torch.empty_like(p, memory_format=torch.contiguous_format) if need_x else None
    dalpha = torch.empty(p.size(0), dtype=wide, device=p.device) if need_alpha else None
    rows = max(1, TILE_ELEMENTS // max(p.size(1), 1))
    for r in range(0, p.size(0), rows):
        tile, grad = p[r : r + rows].to(wide), dp[r : r + rows].to(wide)
        e = _exponent(alpha, alpha_value, tile, r, rows)
        u = slopes(tile, e, kind)
        total = u.sum(dim=-1, keepdim=True)
        total = torch.where(total == 0, 1.0, total)
        if dx is not None:
            dx[r : r + rows] = u * (grad - (u * grad).sum(dim=-1, keepdim=True) / total)
        if dalpha is not None:
            a, b = alpha_terms(tile, u, e)
            products = a.sum(dim=-1) * (grad * b).sum(dim=-1) - b.sum(dim=-1) * (grad * a).sum(dim=-1)
            dalpha[r : r + rows] = products / total.squeeze(-1)
    return dx, dalpha if dalpha is None or alpha is None else dalpha.to(alpha.dtype)


def _exponent(alpha: Tensor | None, alpha_value: float, like: Tensor, r: int, rows: int) -> Tensor:
    if alpha is None:
        return torch.full((1, 1), alpha_value - 1, dtype=like.dtype, device=like.device)
    return alpha[r : r + rows, None].to(like.dtype) - 1
