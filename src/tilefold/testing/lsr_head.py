"""Test problems of the LSR head, their results, and inputs with unambiguous gradients."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tilefold.ops import lsr_head
from tilefold.testing import padding

DENSITIES = ("mixed", "dense", "sparse")
# activations with a kink at zero
_KINKED = ("log1p_relu", "log1p_log1p_relu", "relu")
# another order of evaluation changes a logit by less than this share of the largest one
_EVALUATION_MARGIN = 2e-5


@dataclasses.dataclass(frozen=True)
class LSRHeadInputs(padding.Problem):
    """A test problem of :func:`tilefold.ops.lsr_head`, with the gradient of its scores.

    Attributes:
        hidden: ``[B, S, D]``, or packed ``[T, D]``.
        weight: ``[V, D]``.
        bias: ``[V]`` or ``None``.
        attention_mask: ``[B, S]`` or ``None``.
        cu_seqlens: ``[B + 1]`` int32 or ``None``.
        dscores: ``[B, V]``.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    attention_mask: Tensor | None
    cu_seqlens: Tensor | None
    dscores: Tensor

    @property
    def layout(self) -> dict[str, Tensor | None]:
        """``attention_mask`` and ``cu_seqlens``, as keyword arguments."""
        return {"attention_mask": self.attention_mask, "cu_seqlens": self.cu_seqlens}

    def sequences(self) -> list[Tensor]:
        """The valid tokens ``[L, D]`` of each sequence."""
        if self.cu_seqlens is not None:
            return list(torch.split(self.hidden, self.cu_seqlens.diff().tolist()))
        if self.attention_mask is not None:
            return [
                tokens[mask != 0]
                for tokens, mask in zip(self.hidden, self.attention_mask, strict=True)
            ]
        return list(self.hidden)

    def packed(self) -> LSRHeadInputs:
        """Return a copy with the sequences packed one after another, without padding."""
        sequences = self.sequences()
        lengths = torch.tensor(
            [len(tokens) for tokens in sequences],
            dtype=torch.int64,
            device=self.hidden.device,
        )
        # An empty tensor comes first, so that a batch without sequences has a result, too.
        empty = self.hidden.new_empty(0, self.hidden.size(-1))
        return dataclasses.replace(
            self,
            hidden=torch.cat([empty, *sequences]),
            attention_mask=None,
            cu_seqlens=padding.offsets(lengths),
        )


def lsr_head_inputs(
    batch: int,
    length: int,
    dim: int,
    vocab: int,
    *,
    layout: str = "full",
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    bias: bool = True,
    density: str = "mixed",
    seed: int = 0,
) -> LSRHeadInputs:
    """Create random inputs with logits of standard deviation about 1, equal on every device.

    Args:
        batch: number of sequences B.
        length: number of tokens S of the longest sequence.
        dim: width D of the hidden states.
        vocab: number of terms V.
        layout: padding, one of :data:`tilefold.testing.padding.LAYOUTS`, such as ``"right"``.
        dtype: dtype of the floating-point tensors.
        device: the device of all tensors.
        bias: whether the head has a bias.
        density: share of the scores that are positive: about half (``"mixed"``), all (``"dense"``),
            or about 2% (``"sparse"``). The last two need a bias.
        seed: seed of the random numbers.

    Raises:
        ValueError: for an unknown layout or density.
    """
    padding.check_layout(layout)
    if density not in DENSITIES:
        raise ValueError(f"density must be one of {DENSITIES}, got {density!r}.")
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(batch, length, dim, generator=generator)
    weight = torch.randn(vocab, dim, generator=generator) / math.sqrt(dim)
    # approximate expected maximum of `length` standard normal numbers
    expected_maximum = math.sqrt(2 * math.log(max(length, 2)))
    # A bias of 8 makes nearly all logits positive. For sparse scores, the largest logit of a term
    # is about 2 standard deviations below 0.
    mean_bias = {"mixed": 0.0, "dense": 8.0, "sparse": -2.0 - expected_maximum}[density]
    bias_values = 0.5 * torch.randn(vocab, generator=generator) + mean_bias
    dscores = torch.randn(batch, vocab, generator=generator)
    mask = padding.padding_mask(layout, batch, length, generator)
    inputs = LSRHeadInputs(
        hidden=hidden,
        weight=weight,
        bias=bias_values if bias else None,
        attention_mask=mask,
        cu_seqlens=None,
        dscores=dscores,
    )
    inputs = inputs.cast(dtype).to(device)
    return inputs.packed() if layout == "packed" else inputs


def lsr_head_results(
    inputs: LSRHeadInputs,
    *,
    needs: Sequence[str] = ("hidden", "weight", "bias"),
    **options: Any,
) -> dict[str, Tensor]:
    """Run the forward and backward pass of the LSR head on a test problem.

    Args:
        inputs: hidden states, weight, bias and the gradient of the scores.
        needs: names of the operands that require a gradient.
        options: options of :func:`tilefold.ops.lsr_head`.

    Returns:
        ``scores``, and the gradients of the operands in ``needs``: ``dhidden``, ``dweight`` and
        ``dbias``.
    """
    # new leaf tensors, so that gradients do not accumulate in the problem
    operands = {"hidden": inputs.hidden, "weight": inputs.weight, "bias": inputs.bias}
    leaves = {
        name: None if operand is None else operand.detach().requires_grad_(name in needs)
        for name, operand in operands.items()
    }
    scores = lsr_head(
        leaves["hidden"],  # type: ignore[arg-type]
        leaves["weight"],  # type: ignore[arg-type]
        leaves["bias"],
        attention_mask=inputs.attention_mask,
        cu_seqlens=inputs.cu_seqlens,
        **options,
    )
    gradients = padding.gradients(scores, leaves, inputs.dscores)
    return {"scores": scores.detach(), **gradients}


def lsr_head_truth(inputs: LSRHeadInputs, **options: Any) -> dict[str, Tensor]:
    """Compute :func:`lsr_head_results` with the reference in fp64."""
    reference_options: dict[str, Any] = padding.without(options, "out_dtype", "impl")
    return lsr_head_results(inputs.cast(torch.float64), impl="reference", **reference_options)


def with_one_answer(
    inputs: LSRHeadInputs,
    pooling: str = "max",
    activation: str = "log1p_relu",
    logit_scale: float = 1.0,
) -> LSRHeadInputs:
    """Return a problem whose gradient does not depend on rounding errors.

    The gradient of a score is ambiguous if the two largest logits are almost equal, or if a logit
    is almost at the kink of relu. Another order of evaluation may change a logit by up to 2e-5 of
    the largest one, and with it the gradient. ``dscores`` of such a score is set to 0, so that
    implementations can be compared with a tight budget. All logits are computed in fp64, so that
    the function is suitable for small problems only.

    Args:
        inputs: the problem.
        pooling: pooling of the operator. Only the gradient of a maximum depends on the order of
            logits.
        activation: activation of the operator. Some have a kink at zero.
        logit_scale: factor of the products of hidden states and weight.

    Returns:
        The problem with more zeros in ``dscores``.
    """
    exact = inputs.cast(torch.float64)
    dscores = inputs.dscores.clone()
    has_kink = activation in _KINKED
    for row, tokens in zip(dscores, exact.sequences(), strict=True):
        logits = logit_scale * (tokens @ exact.weight.T)
        if exact.bias is not None:
            logits = logits + exact.bias
        if logits.numel() == 0:
            continue
        finite_logits = logits.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
        largest_logit = float(finite_logits.abs().max())
        margin = _EVALUATION_MARGIN * max(1.0, largest_logit)
        is_ambiguous = torch.zeros_like(row, dtype=torch.bool)  # [V]
        if pooling == "max":
            two_largest = logits.topk(min(2, logits.size(0)), dim=0).values
            if two_largest.size(0) == 2:
                gap = two_largest[0] - two_largest[1]
                is_ambiguous |= gap < margin
            logits = two_largest[:1]  # the activation reads only the largest one
        if has_kink:
            is_ambiguous |= (logits.abs() < margin).any(dim=0)
        row[is_ambiguous] = 0  # `row` is a view of `dscores`
    return dataclasses.replace(inputs, dscores=dscores)
