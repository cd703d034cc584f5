"""Alpha-entmax in torch operations on blocks of rows: the CPU path and portable fallback."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tilefold.ops._shared.entmax_root import check_alphas, kind_of, row_gradients, row_weights
from tilefold.ops.entmax._problem import EntmaxOptions, EntmaxSaved, EntmaxTensors

# Entries of a block of rows, whose few temporaries then stay in the cache.
TILE_ELEMENTS = 1 << 18


def forward(
    tensors: EntmaxTensors,
    options: EntmaxOptions,
    training: bool,
) -> tuple[Tensor, Tensor]:
    """Compute the probabilities.

    Returns:
        ``[R, n]`` probabilities in the dtype of ``x``, and ``[R]`` int32 support sizes.
    """
    alpha = tensors.alpha
    check_alphas(alpha)
    x = tensors.x.contiguous()
    kind = kind_of(alpha, options.alpha_value)
    probabilities = torch.empty_like(x)
    support = torch.empty(x.size(0), dtype=torch.int32, device=x.device)
    if x.numel() == 0:
        return probabilities, support.zero_()
    dtype = torch.promote_types(x.dtype, torch.float32)
    for rows in _row_blocks(x):
        block = x[rows].to(dtype)
        p, *_ = row_weights(block, _exponents(alpha, options.alpha_value, block, rows), kind)
        probabilities[rows] = p
        support[rows] = (p > 0).sum(dim=-1)
    return probabilities, support


def backward(
    dp: Tensor,
    saved: EntmaxSaved,
    options: EntmaxOptions,
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, Tensor | None]:
    """Compute the gradients of ``x`` ``[R, n]`` and of ``alpha`` ``[R]``, in their dtypes.

    Args:
        dp: ``[R, n]`` gradient of the probabilities.
        saved: what the forward pass saved.
        options: checked options.
        needs: whether the gradients of ``x`` and of ``alpha`` are needed.
    """
    p, alpha = saved
    need_x, need_alpha = needs
    kind = kind_of(alpha, options.alpha_value)
    dtype = torch.promote_types(p.dtype, torch.float32)
    dx = torch.empty_like(p, memory_format=torch.contiguous_format) if need_x else None
    dalpha = torch.empty(p.size(0), dtype=dtype, device=p.device) if need_alpha else None
    for rows in _row_blocks(p):
        block = p[rows].to(dtype)
        block_dx, block_dalpha = row_gradients(
            block,
            dp[rows].to(dtype),
            _exponents(alpha, options.alpha_value, block, rows),
            kind,
            need_alpha,
        )
        if dx is not None:
            dx[rows] = block_dx
        if dalpha is not None and block_dalpha is not None:
            dalpha[rows] = block_dalpha
    if dalpha is not None and alpha is not None:
        dalpha = dalpha.to(alpha.dtype)
    return dx, dalpha


def _row_blocks(matrix: Tensor) -> Iterator[slice]:
    """Divide the rows of a matrix into blocks of about ``TILE_ELEMENTS`` entries."""
    n_rows, n_columns = matrix.shape
    size = max(1, TILE_ELEMENTS // max(n_columns, 1))
    for start in range(0, n_rows, size):
        yield slice(start, start + size)


def _exponents(alpha: Tensor | None, alpha_value: float, block: Tensor, rows: slice) -> Tensor:
    """Return ``alpha - 1`` of these rows in the dtype of ``block``: ``[n, 1]``, or ``[1, 1]``."""
    if alpha is None:
        return torch.full((1, 1), alpha_value - 1, dtype=block.dtype, device=block.device)
    return alpha[rows, None].to(block.dtype) - 1
