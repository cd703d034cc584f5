"""The records of alpha-entmax."""

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
    """Tensors saved for gradients: probabilities ``p`` ``[R, n]``, and ``alpha``."""

    p: Tensor
    alpha: Tensor | None


def outputs(
    tensors: EntmaxTensors,
    options: EntmaxOptions,
    training: bool,
) -> tuple[Buffer, Buffer]:
    """``p`` like ``x``, and the support size of each row."""
    return Buffer(tensors.x.shape, tensors.x.dtype), Buffer((tensors.x.size(0),), torch.int32)
