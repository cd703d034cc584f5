"""Layouts of a batch, and what the problems of all operators share: dtypes, devices, gradients and
budgets.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
from torch import Tensor

LAYOUTS = ("full", "right", "left", "holes", "packed")
_Mine = TypeVar("_Mine", bound="Problem")


@dataclasses.dataclass(frozen=True)
class Problem:
    """Tensors of one problem, the fields of a frozen dataclass."""

    def each(self: _Mine, change: Callable[[Tensor], Tensor]) -> _Mine:
        """This problem with all of its tensors changed."""
        tensors = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        return dataclasses.replace(self, **{name: change(value) for name, value in tensors.items()})

    def cast(self: _Mine, dtype: torch.dtype) -> _Mine:
        """This problem with all floating tensors in `dtype`."""
        return self.each(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)

    def to(self: _Mine, device: torch.device | str) -> _Mine:
        """This problem on `device`."""
        return self.each(lambda tensor: tensor.to(device))


def check_layout(layout: str) -> None:
    """Raise ``ValueError`` for an unknown layout."""
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {LAYOUTS}, got {layout!r}.")


def padding_mask(layout: str, batch: int, length: int, generator: torch.Generator) -> Tensor | None:
    """``[batch, length]`` int64, 1 for the tokens that are kept, or ``None`` for a full batch.

    From B = 2 on the first sequence has the full length, and ``"left"`` and ``"holes"`` have an
    empty one; ``"packed"`` (padded on the right, to be packed) has empty ones at both ends and in
    the middle from B = 5 on.

    Args:
        layout: one of :data:`LAYOUTS`.
        batch, length: the shape.
        generator: of the random lengths.
    """
    if layout == "full":
        return None
    mask = drawn_mask(layout, batch, length, generator)
    if batch >= 2:
        mask[0] = True
    if layout == "packed" and batch >= 5:
        mask[[0, batch // 2, batch - 1]] = False
        mask[1] = True
    elif layout in ("left", "holes") and batch >= 2:
        mask[batch // 2] = False
    return mask.long()


def drawn_mask(layout: str, batch: int, length: int, generator: torch.Generator) -> Tensor:
    """Bool ``[batch, length]`` of random lengths, or with holes, before any sequence is made full
    or empty.
    """
    places = torch.arange(length)
    lengths = torch.randint(min(1, length), length + 1, (batch, 1), generator=generator)
    if layout == "holes":
        return torch.rand(batch, length, generator=generator) < 0.6
    return places >= length - lengths if layout == "left" else places < lengths


def offsets(lengths: Tensor) -> Tensor:
    """Int32 ``[B + 1]``, where packed sequences of these lengths begin and end."""
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()


def gradients(out: Tensor, leaves: Mapping[str, Tensor | None], grad: Tensor) -> dict[str, Tensor]:
    """Gradients of the leaves that want one, by their names with ``"d"``."""
    wanted = {
        f"d{name}": leaf for name, leaf in leaves.items() if leaf is not None and leaf.requires_grad
    }
    found = torch.autograd.grad(out, list(wanted.values()), grad.to(out.dtype)) if wanted else ()
    return dict(zip(wanted, found, strict=True))


def without(options: Mapping[str, object], *names: str) -> dict[str, object]:
    """Options but those of these names."""
    return {name: value for name, value in options.items() if name not in names}
