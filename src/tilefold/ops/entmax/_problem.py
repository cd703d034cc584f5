"""The records of alpha-entmax, and the check of its values."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tilefold.ops._shared.plan import Buffer


class EntmaxTensors(NamedTuple):
    """Rows ``x`` ``[R, n]``, and ``alpha`` ``[R]`` or ``None`` where it is a number."""

    x: Tensor
    alpha: Tensor | None


class EntmaxOptions(NamedTuple):
    """The alpha of all rows, where it is a number."""

    alpha_value: float


class EntmaxSaved(NamedTuple):
    """What gradients are made of: probabilities ``p`` ``[R, n]``, and ``alpha``."""

    p: Tensor
    alpha: Tensor | None


def outputs(tensors: EntmaxTensors, options: EntmaxOptions, training: bool) -> tuple[Buffer, Buffer]:
    """``p`` like ``x``, and the support size of each row."""
    return Buffer(tensors.x.shape, tensors.x.dtype), Buffer((tensors.x.size(0),), torch.int32)


def check_values(tensors: EntmaxTensors, options: EntmaxOptions) -> None:
    """Check an alpha tensor on the CPU.

    Raises:
        ValueError: for an alpha outside [1, 2].
    """
    alpha = tensors.alpha
    if alpha is not None and alpha.device.type == "cpu" and not bool(((alpha >= 1) & (alpha <= 2)).all()):
        bad = alpha[~((alpha >= 1) & (alpha <= 2))][0].item()
        raise ValueError(f"alpha must lie in [1, 2], got {bad}; parametrise it, for instance as 1 + sigmoid(theta).")
