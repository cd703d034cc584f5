"""Statistics of the rows of an attention: thresholds, support sizes, residuals, visible keys, live blocks."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from tilefold.ops.entmax_attention._problem import AttentionTensors, Options
from tilefold.ops.entmax_attention._sparsity import count_blocks, visible_keys

SPARSITY_BLOCK = 64
Rows = tuple[Tensor, Tensor, Tensor]  # thresholds, support sizes and residuals


class EntmaxStats(NamedTuple):
    """Statistics of the rows of an attention, ``[B, H, Nq]`` each (packed ``[1, H, Tq]``).

    Attributes:
        tau: fp32 threshold: ``p = [(alpha - 1) s - tau]_+^(1 / (alpha - 1))`` of the scaled scores s; for alpha = 1 the
            log of softmax's denominator; NaN for a row with nothing to attend to.
        support: int32 number of keys with a positive probability, before dropout.
        residual: fp32 ``|mass - 1|`` of the root, before the mass was divided out.
        visible: int32 number of keys that the row may see.
        live_blocks: int32 ``[B, H]`` (packed ``[1, H]``), with ``return_stats="blocks"``: blocks of 64 queries by 64
            keys with a positive probability, else ``None``.
        visible_blocks: int32, like it: blocks with a pair that may attend at all; what a mask, causality or a window
            hides is not called sparse.
    """

    tau: Tensor
    support: Tensor
    residual: Tensor
    visible: Tensor
    live_blocks: Tensor | None = None
    visible_blocks: Tensor | None = None

    def nonzero_share(self) -> Tensor:
        """``[H]`` fp32: positive probabilities among those that may be, over all rows; NaN where there are none."""
        return _ratio(self.support.sum(dim=(0, 2)), self.visible.expand_as(self.support).sum(dim=(0, 2)))

    def mean_support(self) -> Tensor:
        """``[H]`` fp32: positive probabilities of a row, over the rows that see a key."""
        return _ratio(self.support.sum(dim=(0, 2)), (self.visible.expand_as(self.support) > 0).sum(dim=(0, 2)))

    def live_share(self) -> Tensor:
        """``[H]`` fp32: live blocks among the visible ones.

        Raises:
            ValueError: if blocks were not counted.
        """
        if self.live_blocks is None or self.visible_blocks is None:
            raise ValueError("live_blocks must have been counted, got None; call with return_stats='blocks'.")
        return _ratio(self.live_blocks.sum(dim=0), self.visible_blocks.sum(dim=0))


def _ratio(part: Tensor, whole: Tensor) -> Tensor:
    return part.float() / whole.float()  # a quotient of integers would have torch's default dtype


def of_rows(stats: Tensor, alpha: Tensor | None, options: Options) -> Rows:
    """Row statistics from peaks, roots, masses and support sizes."""
    peak, root, mass, support = stats.detach().unbind(0)
    if alpha is None:
        e = torch.full((1, 1, 1), options.alpha_value - 1, dtype=stats.dtype, device=stats.device)
    else:
        e = alpha.detach().to(stats.dtype).view(1, -1, 1) - 1
    closed = alpha is None and options.alpha_value in (1.5, 2.0)
    c = root if closed else torch.exp(e * root)
    tau = e * peak - c if closed else torch.where(e == 0, peak - root, e * peak - c)
    empty = peak == -math.inf
    residual = torch.where(empty, 0.0, (mass - 1).abs())
    return torch.where(empty, math.nan, tau).float(), support.int(), residual.float()


def described(rows: Rows, tensors: AttentionTensors, options: Options, asked: bool | str) -> EntmaxStats:
    """The statistics that ``return_stats`` asked for."""
    visible = visible_keys(tensors, options).expand_as(rows[1])
    if asked != "blocks":
        return EntmaxStats(*rows, visible)
    return EntmaxStats(*rows, visible, *count_blocks(tensors, options, rows[0], None, SPARSITY_BLOCK))
