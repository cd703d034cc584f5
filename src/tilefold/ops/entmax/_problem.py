"""Data of alpha-entmax: tensors, options and results."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tilefold.ops._shared.plan import Buffer

# Value of ``EntmaxOptions.alpha_value`` if alpha is a tensor, which nothing reads: an option of an
# operator cannot be None.
ALPHA_IS_TENSOR = 0.0


class EntmaxTensors(NamedTuple):
    """Tensors of a call, as rows.

    Attributes:
        x: ``[R, n]`` scores.
        alpha: ``[R]`` alpha of each row, or ``None`` if it is a number.
    """

    x: Tensor
    alpha: Tensor | None


class EntmaxOptions(NamedTuple):
    """Checked options of a call.

    Attributes:
        alpha_value: alpha of all rows, or ``ALPHA_IS_TENSOR``.
    """

    alpha_value: float


class EntmaxSaved(NamedTuple):
    """Tensors saved for backward.

    Attributes:
        p: ``[R, n]`` probabilities.
        alpha: ``[R]`` alpha of each row, or ``None`` if it is a number.
    """

    p: Tensor
    alpha: Tensor | None


def outputs(
    tensors: EntmaxTensors,
    options: EntmaxOptions,
    training: bool,
) -> tuple[Buffer, Buffer]:
    """Describe the results: probabilities like ``x``, and the support size of each row.

    Args:
        tensors: tensors of the call.
        options: not used.
        training: not used.
    """
    return Buffer(tensors.x.shape, tensors.x.dtype), Buffer((tensors.x.size(0),), torch.int32)
