"""Layouts of a batch, and the base class of the operators' test problems."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
from torch import Tensor

LAYOUTS = ("full", "right", "left", "holes", "packed")
_ProblemT = TypeVar("_ProblemT", bound="Problem")


@dataclasses.dataclass(frozen=True)
class Problem:
    """Base class of test problems, whose fields are the tensors."""

    def map_tensors(self: _ProblemT, convert: Callable[[Tensor], Tensor]) -> _ProblemT:
        """Return a copy with all tensors converted."""
        tensors = {
            name: convert(value) for name, value in vars(self).items() if isinstance(value, Tensor)
        }
        return dataclasses.replace(self, **tensors)

    def cast(self: _ProblemT, dtype: torch.dtype) -> _ProblemT:
        """Return a copy with all floating-point tensors in `dtype`."""

        def convert(tensor: Tensor) -> Tensor:
            return tensor.to(dtype) if tensor.is_floating_point() else tensor

        return self.map_tensors(convert)

    def to(self: _ProblemT, device: torch.device | str) -> _ProblemT:
        """Return a copy on `device`."""
        return self.map_tensors(lambda tensor: tensor.to(device))


def check_layout(layout: str) -> None:
    """Raise ``ValueError`` for an unknown layout."""
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {LAYOUTS}, got {layout!r}.")


def padding_mask(layout: str, batch: int, length: int, generator: torch.Generator) -> Tensor | None:
    """Create a random attention mask with full and with empty sequences, for tests.

    In batches of two or more, the first sequence has the full length, and ``"left"`` and
    ``"holes"`` have an empty sequence in the middle. In batches of five or more, ``"packed"`` has
    empty sequences at both ends and in the middle, and the second sequence has the full length.

    Args:
        layout: where the padding is: ``"full"`` (none), ``"right"``, ``"left"``, ``"holes"``
            (anywhere), or ``"packed"`` (on the right, before the batch is packed).
        batch: number of sequences.
        length: number of tokens of the longest sequence.
        generator: of the random lengths.

    Returns:
        ``[batch, length]`` int64, 1 for tokens that are kept; None if all are.
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
    """Draw a random mask of the tokens that are kept.

    Args:
        layout: ``"holes"`` keeps about 60% of the tokens. ``"left"`` has random lengths and padding
            on the left, all others on the right.
        batch: number of sequences.
        length: number of tokens of the longest sequence.
        generator: of the random numbers.

    Returns:
        Bool ``[batch, length]``, True for tokens that are kept.
    """
    positions = torch.arange(length)
    lengths = torch.randint(min(1, length), length + 1, (batch, 1), generator=generator)
    if layout == "holes":
        return torch.rand(batch, length, generator=generator) < 0.6
    if layout == "left":
        return positions >= length - lengths
    return positions < lengths


def offsets(lengths: Tensor) -> Tensor:
    """Return the int32 offsets ``[B + 1]`` of packed sequences of these lengths."""
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()


def gradients(out: Tensor, leaves: Mapping[str, Tensor | None], grad: Tensor) -> dict[str, Tensor]:
    """Compute the gradients of the inputs of an operator that require one.

    Args:
        out: the operator's result.
        leaves: its inputs by name, such as ``"weight"``; None for an input that is left out.
        grad: gradient of `out`.

    Returns:
        Gradients by the name of the input with the prefix ``d``, such as ``"dweight"``.
    """
    differentiated = {
        f"d{name}": leaf for name, leaf in leaves.items() if leaf is not None and leaf.requires_grad
    }
    if not differentiated:
        return {}
    results = torch.autograd.grad(out, list(differentiated.values()), grad.to(out.dtype))
    return dict(zip(differentiated, results, strict=True))


def without(options: Mapping[str, object], *names: str) -> dict[str, object]:
    """Return the options except those with these names."""
    return {name: value for name, value in options.items() if name not in names}
