"""Inputs of the token scatter."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from tilefold.testing import padding

REDUCTIONS = ("max", "sum")


@dataclasses.dataclass(frozen=True)
class TokenScatterInputs(padding.Problem):
    """One problem for :func:`tilefold.ops.token_scatter`, with the gradient that comes back.

    Attributes:
        weights, input_ids: ``[B, S]``, or packed ``[T]``; int64 ids.
        vocab_size: V.
        attention_mask: ``[B, S]`` or ``None``.
        cu_seqlens: ``[B + 1]`` int32 or ``None``.
        dscores: ``[B, V]``.
    """

    weights: Tensor
    input_ids: Tensor
    vocab_size: int
    attention_mask: Tensor | None
    cu_seqlens: Tensor | None
    dscores: Tensor

    @property
    def operands(self) -> tuple[Tensor, Tensor, int]:
        """The positional arguments."""
        return self.weights, self.input_ids, self.vocab_size

    @property
    def layout(self) -> dict[str, Tensor | None]:
        """``attention_mask`` and ``cu_seqlens``, as keyword arguments."""
        return {"attention_mask": self.attention_mask, "cu_seqlens": self.cu_seqlens}

    def packed(self) -> TokenScatterInputs:
        """This problem with the valid tokens packed."""
        mask = torch.ones_like(self.input_ids) if self.attention_mask is None else self.attention_mask
        valid = mask != 0
        changes: dict[str, Any] = {"weights": self.weights[valid], "input_ids": self.input_ids[valid]}
        changes |= {"attention_mask": None, "cu_seqlens": padding.offsets(valid.sum(dim=1))}
        return dataclasses.replace(self, **changes)


def zipf_ids(shape: tuple[int, ...], vocab: int, generator: torch.Generator) -> Tensor:
    """Ids of which low ones are frequent, as the words of a text are: rank r about in proportion to 1 / r."""
    uniform = torch.rand(shape, generator=generator, device=generator.device, dtype=torch.float64)
    return ((vocab + 1) ** uniform - 1).long().clamp_(0, vocab - 1)


def token_scatter_inputs(
    batch: int,
    length: int,
    vocab: int,
    *,
    layout: str = "full",
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> TokenScatterInputs:
    """Random weights of standard deviation 1 at ids that repeat, the same on every device.

    Args:
        batch, length, vocab: B, S (the longest sequence of a packed input), V.
        layout: as in :func:`tilefold.testing.padding.padding_mask`.

    ``ValueError`` for an unknown layout.
    """
    padding.check_layout(layout)
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(batch, length, generator=generator)
    ids = zipf_ids((batch, length), vocab, generator)
    dscores = torch.randn(batch, vocab, generator=generator)
    mask = padding.padding_mask(layout, batch, length, generator)
    inputs = TokenScatterInputs(weights, ids, vocab, mask, None, dscores).cast(dtype).to(device)
    return inputs.packed() if layout == "packed" else inputs
