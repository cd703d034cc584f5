"""Layouts of a batch: padding on either side, holes, packed sequences, and empty ones among them."""

from __future__ import annotations

import torch
from torch import Tensor

LAYOUTS = ("full", "right", "left", "holes", "packed")


def padding_mask(layout: str, batch: int, length: int, generator: torch.Generator) -> Tensor | None:
    """``[batch, length]`` int64, 1 for the tokens that are kept, or ``None`` for a full batch.

    The first sequence has the full length. ``"left"`` and ``"holes"`` have an empty one from B = 2 on, ``"packed"``
    (padded on the right, to be packed) has empty ones at both ends and in the middle from B = 5 on.

    Args:
        layout: one of :data:`LAYOUTS`.
        batch, length: the shape.
        generator: of the random lengths.
    """
    if layout == "full":
        return None
    places = torch.arange(length)
    lengths = torch.randint(min(1, length), length + 1, (batch, 1), generator=generator)
    if layout == "holes":
        mask = torch.rand(batch, length, generator=generator) < 0.6
    elif layout == "left":
        mask = places >= length - lengths
    else:
        mask = places < lengths
    mask[: max(batch - 1, 0)][:1] = True  # one sequence of the full length
    if layout == "packed" and batch >= 5:
        mask[[0, batch // 2, batch - 1]] = False
        mask[1] = True
    elif layout in ("left", "holes") and batch >= 2:
        mask[batch // 2] = False
    return mask.long()
