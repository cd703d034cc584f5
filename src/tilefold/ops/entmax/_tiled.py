"""Alpha-entmax in torch operations on blocks of rows: the CPU path and portable fallback."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tilefold.ops._shared.entmax_root import alpha_formula, check_alphas, row_gradients, row_weights
from tilefold.ops.entmax._problem import EntmaxOptions, EntmaxSaved, EntmaxTensors

# Entries of a block of rows: 1 MiB in fp32, so that its few temporaries stay in the cache.
TILE_ELEMENTS = 1 << 18


def forward(
    tensors: EntmaxTensors,
    options: EntmaxOptions,
    training: bool,
) -> tuple[Tensor, Tensor]:
    """Compute the alpha-entmax of the rows of ``x``, one block of rows at a time.

    Args:
        tensors: ``[R, n]`` scores, and ``[R]`` alphas or ``None``.
        options: checked options.
        training: ignored; what backward reads is always computed.

    Returns:
        ``[R, n]`` probabilities in the dtype of ``x``, and ``[R]`` int32 support sizes.
    """
    alpha = tensors.alpha
    check_alphas(alpha)
    x = tensors.x.contiguous()
    formula = alpha_formula(alpha, options.alpha_value)
    probabilities = torch.empty_like(x)
    support = torch.empty(x.size(0), dtype=torch.int32, device=x.device)
    if x.numel() == 0:
        return probabilities, support.zero_()
    dtype = torch.promote_types(x.dtype, torch.float32)
    for rows in _row_blocks(x):
        scores = x[rows].to(dtype)
        alpha_minus_1 = _alpha_minus_1(alpha, options.alpha_value, rows, like=scores)
        block_probabilities = row_weights(scores, alpha_minus_1, formula).probabilities
        probabilities[rows] = block_probabilities
        support[rows] = (block_probabilities > 0).sum(dim=-1)
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
        saved: ``[R, n]`` probabilities, and ``[R]`` alphas or ``None``.
        options: checked options.
        needs: whether the gradients of ``x`` and of ``alpha`` are needed.

    Returns:
        The gradients of ``x`` and ``alpha``. A gradient that is not needed is ``None``.
    """
    p, alpha = saved
    need_x, need_alpha = needs
    formula = alpha_formula(alpha, options.alpha_value)
    dtype = torch.promote_types(p.dtype, torch.float32)
    dx = torch.empty_like(p, memory_format=torch.contiguous_format) if need_x else None
    dalpha = torch.empty(p.size(0), dtype=dtype, device=p.device) if need_alpha else None
    for rows in _row_blocks(p):
        block_p = p[rows].to(dtype)
        block_dx, block_dalpha = row_gradients(
            block_p,
            dp[rows].to(dtype),
            _alpha_minus_1(alpha, options.alpha_value, rows, like=block_p),
            formula,
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


def _alpha_minus_1(alpha: Tensor | None, alpha_value: float, rows: slice, like: Tensor) -> Tensor:
    """Return ``alpha - 1`` for some rows, with the dtype and the device of ``like``.

    Args:
        alpha: ``[R]`` alpha of each row, or ``None``.
        alpha_value: alpha of all rows, if ``alpha`` is ``None``.
        rows: the selected rows.
        like: a tensor with the dtype and the device of the result.

    Returns:
        ``[n, 1]`` for ``n`` rows that have different alphas, else ``[1, 1]``.
    """
    if alpha is None:
        return like.new_full((1, 1), alpha_value - 1)
    return alpha[rows, None].to(like.dtype) - 1
