"""Alpha-entmax in torch operations on blocks of rows: the CPU path, and the fallback on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from tilefold.ops._shared.entmax_root import check_alphas, kind_of, row_gradients, row_weights
from tilefold.ops.entmax._problem import EntmaxOptions, EntmaxSaved, EntmaxTensors

TILE_ELEMENTS = 1 << 18  # entries of a block: its few temporaries stay in the cache


def forward(
    tensors: EntmaxTensors,
    options: EntmaxOptions,
    training: bool,
) -> tuple[Tensor, Tensor]:
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
        p, *_ = row_weights(s, _exponent(alpha, alpha_value, s, r, rows), kind)
        out[r : r + rows] = p
        support[r : r + rows] = (p > 0).sum(dim=-1)
    return out, support


def backward(
    dp: Tensor,
    saved: EntmaxSaved,
    options: EntmaxOptions,
    needs: tuple[bool, ...],
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
        of_x, of_alpha = row_gradients(
            tile,
            grad,
            _exponent(alpha, alpha_value, tile, r, rows),
            kind,
            need_alpha,
        )
        if dx is not None:
            dx[r : r + rows] = of_x
        if dalpha is not None and of_alpha is not None:
            dalpha[r : r + rows] = of_alpha
    return dx, dalpha if dalpha is None or alpha is None else dalpha.to(alpha.dtype)


def _exponent(alpha: Tensor | None, alpha_value: float, like: Tensor, r: int, rows: int) -> Tensor:
    if alpha is None:
        return torch.full((1, 1), alpha_value - 1, dtype=like.dtype, device=like.device)
    return alpha[r : r + rows, None].to(like.dtype) - 1
