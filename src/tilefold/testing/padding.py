"""Padding layouts of random batches, and the base class of the operators' test problems."""

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
    """Base class of test problems: dataclasses whose fields are tensors and options."""

    def map_tensors(self: _ProblemT, convert: Callable[[Tensor], Tensor]) -> _ProblemT:
        """Return a copy in which ``convert`` is applied to all tensors."""
        tensors = {
            name: convert(value) for name, value in vars(self).items() if isinstance(value, Tensor)
        }
        return dataclasses.replace(self, **tensors)

    def cast(self: _ProblemT, dtype: torch.dtype) -> _ProblemT:
        """Return a copy with all floating-point tensors in ``dtype``."""

        def convert(tensor: Tensor) -> Tensor:
            return tensor.to(dtype) if tensor.is_floating_point() else tensor

        return self.map_tensors(convert)

    def to(self: _ProblemT, device: torch.device | str) -> _ProblemT:
        """Return a copy with all tensors on ``device``."""
        return self.map_tensors(lambda tensor: tensor.to(device))


def check_layout(layout: str) -> None:
    """Raise ``ValueError`` for an unknown layout."""
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {LAYOUTS}, got {layout!r}.")


def padding_mask(layout: str, batch: int, length: int, generator: torch.Generator) -> Tensor | None:
    """Create a random attention mask in which some sequences are full or empty, for tests.

    Args:
        layout: where the padding is: ``"full"`` (none), ``"right"``, ``"left"``, ``"holes"``
            (anywhere), or ``"packed"`` (on the right, to be removed when the batch is packed).
        batch: number of sequences.
        length: number of tokens of the longest sequence.
        generator: source of the random numbers.

    Returns:
        int64 ``[batch, length]``, 1 for valid tokens and 0 for padding; None for ``"full"``.
    """
    if layout == "full":
        return None
    mask = random_mask(layout, batch, length, generator)
    full_rows, empty_rows = _full_and_empty_rows(layout, batch)
    mask[full_rows] = True
    mask[empty_rows] = False
    return mask.long()


def _full_and_empty_rows(layout: str, batch: int) -> tuple[list[int], list[int]]:
    """Return the positions of sequences without padding, and of sequences without tokens.

    Args:
        layout: a layout with padding.
        batch: number of sequences.
    """
    if batch < 2:
        return [], []
    middle = batch // 2
    if layout in ("left", "holes"):
        return [0], [middle]
    if layout == "packed" and batch >= 5:
        # empty sequences at both ends, where offsets repeat the first and the last value
        return [1], [0, middle, batch - 1]
    return [0], []


def random_mask(layout: str, batch: int, max_length: int, generator: torch.Generator) -> Tensor:
    """Draw a random mask of valid tokens.

    Args:
        layout: ``"holes"`` makes about 60% of the tokens valid. ``"left"`` has random lengths and
            padding on the left. Any other layout has random lengths and padding on the right.
        batch: number of sequences.
        max_length: number of columns, the largest length that is drawn.
        generator: source of the random numbers.

    Returns:
        Bool ``[batch, max_length]``, True for valid tokens.
    """
    positions = torch.arange(max_length)
    lengths = torch.randint(min(1, max_length), max_length + 1, (batch, 1), generator=generator)
    if layout == "holes":
        return torch.rand(batch, max_length, generator=generator) < 0.6
    if layout == "left":
        return positions >= max_length - lengths
    return positions < lengths


def offsets(lengths: Tensor) -> Tensor:
    """Return the offsets ``[B + 1]`` of packed sequences with the lengths ``[B]``, in int32."""
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()


def gradients(out: Tensor, leaves: Mapping[str, Tensor | None], grad: Tensor) -> dict[str, Tensor]:
    """Compute the gradients of those inputs of an operator that require a gradient.

    Args:
        out: the operator's result.
        leaves: the operator's inputs by name, such as ``"weight"``; None for an optional input.
        grad: gradient of ``out``.

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
    """Return a copy of the options that lacks ``names``."""
    return {name: value for name, value in options.items() if name not in names}
