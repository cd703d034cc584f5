"""Inputs of the token scatter, its results, and their comparison with the reference in fp64."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from tilefold.ops import token_scatter
from tilefold.testing import assert_within_budget
from tilefold.testing.padding import LAYOUTS, padding_mask

REDUCTIONS = ("max", "sum")


@dataclasses.dataclass(frozen=True)
class TokenScatterInputs:
    """One problem for :func:`tilefold.ops.token_scatter`, with the gradient that comes back.

    Attributes:
        weights: ``[B, S]``, or packed ``[T]``.
        input_ids: like ``weights``, int64.
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
        offsets = torch.cat([valid.new_zeros(1, dtype=torch.int64), valid.sum(dim=1)]).cumsum(0).int()
        return dataclasses.replace(
            self,
            weights=self.weights[valid],
            input_ids=self.input_ids[valid],
            attention_mask=None,
            cu_seqlens=offsets,
        )

    def cast(self, dtype: torch.dtype) -> TokenScatterInputs:
        """This problem with the floating tensors in ``dtype``."""
        return dataclasses.replace(self, weights=self.weights.to(dtype), dscores=self.dscores.to(dtype))

    def to(self, device: torch.device | str) -> TokenScatterInputs:
        """This problem on ``device``."""
        return dataclasses.replace(
            self,
            weights=self.weights.to(device),
            input_ids=self.input_ids.to(device),
            attention_mask=None if self.attention_mask is None else self.attention_mask.to(device),
            cu_seqlens=None if self.cu_seqlens is None else self.cu_seqlens.to(device),
            dscores=self.dscores.to(device),
        )


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
        layout: ``"full"`` (no mask), ``"right"`` or ``"left"`` padding, ``"holes"`` anywhere (both with an empty
            sequence from B = 2 on), or ``"packed"`` (with empty ones at both ends and in the middle from B = 5 on).
        dtype, device: of the floating tensors.
        seed: of the random numbers.

    Raises:
        ValueError: for an unknown layout.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {LAYOUTS}, got {layout!r}.")
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(batch, length, generator=generator)
    ids = zipf_ids((batch, length), vocab, generator)
    dscores = torch.randn(batch, vocab, generator=generator)
    mask = padding_mask(layout, batch, length, generator)
    inputs = TokenScatterInputs(weights, ids, vocab, mask, None, dscores).cast(dtype).to(device)
    return inputs.packed() if layout == "packed" else inputs


def token_scatter_results(inputs: TokenScatterInputs, *, needs: bool = True, **options: Any) -> dict[str, Tensor]:
    """Run forward, and backward if ``needs``; return ``scores`` and ``dweights``.

    Args:
        inputs: the problem.
        needs: whether the weights want a gradient.
        options: of :func:`tilefold.ops.token_scatter`.
    """
    leaf = inputs.weights.detach().requires_grad_(needs)
    scores = token_scatter(leaf, inputs.input_ids, inputs.vocab_size, **inputs.layout, **options)  # type: ignore[arg-type]
    if not needs:
        return {"scores": scores}
    (dweights,) = torch.autograd.grad(scores, leaf, inputs.dscores.to(scores.dtype))
    return {"scores": scores.detach(), "dweights": dweights}


def token_scatter_truth(inputs: TokenScatterInputs, *, needs: bool = True, **options: Any) -> dict[str, Tensor]:
    """:func:`token_scatter_results` of the reference in fp64."""
    options = {key: value for key, value in options.items() if key not in ("out_dtype", "impl")}
    return token_scatter_results(inputs.cast(torch.float64), needs=needs, impl="reference", **options)


def assert_token_scatter_matches(
    inputs: TokenScatterInputs, *, kind: str = "gradient", needs: bool = True, **options: Any
) -> dict[str, Tensor]:
    """Run an implementation and hold its scores and gradient to their budgets; return its results.

    Winners are chosen on the weights as they were given, so every implementation has the same ones.

    Args:
        inputs: the problem.
        kind: budget of the gradient.
        needs: whether the weights want a gradient.
        options: of :func:`tilefold.ops.token_scatter`, with ``impl``.
    """
    results = token_scatter_results(inputs, needs=needs, **options)
    truth = token_scatter_truth(inputs, needs=needs, **options)
    for name, out in results.items():
        assert_within_budget(out, truth[name], kind="forward" if name == "scores" else kind, name=name)
    return results
