"""Inputs of the LSR head's benchmark: hidden states, vocabulary and mask of a case."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tilefold.bench.dtypes import DTYPES
from tilefold.bench.runnables import Runnable, bind
from tilefold.bench.spec import BenchCase

Head = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

_SPARSE_ACTIVE = 0.02  # share of positive scores that "2pct" aims at, that of a trained SPLADE model
_QUANTILE_COLUMNS = 256
_RAGGED_SHARES = (0.02, 0.64)  # sequence lengths as a share of S, evenly spread: 33% of the tokens are valid


@dataclass(frozen=True)
class LSRHeadInputs:
    """Inputs of one case, all on one device.

    Attributes:
        hidden: ``[B, S, D]``, requires a gradient; padding holds random numbers too.
        weight: ``[V, D]``, requires a gradient, scaled so that logits are close to N(0, 1).
        bias: ``[V]``, requires a gradient.
        attention_mask: ``[B, S]`` int64, padded on the right.
        grad_output: ``[B, V]``.
        active: share of positive scores, measured on a sample of the vocabulary.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor
    attention_mask: Tensor
    grad_output: Tensor
    active: float

    def bind(self, head: Head, label: str) -> Runnable:
        """``head(hidden, weight, bias, attention_mask)`` of these inputs."""
        leaves = (self.hidden, self.weight, self.bias)
        return bind(head, (*leaves, self.attention_mask), leaves, self.grad_output, label)

    @property
    def valid_tokens(self) -> int:
        """Number of tokens that are not padding."""
        return int(self.attention_mask.sum().item())


def _attention_mask(case: BenchCase, device: torch.device, generator: torch.Generator) -> Tensor:
    B, S = case.dims["B"], case.dims["S"]
    if not case.variant.startswith("ragged"):
        return torch.ones(B, S, dtype=torch.int64, device=device)
    shares = torch.linspace(*_RAGGED_SHARES, B, device=device)
    order = torch.randperm(B, generator=generator, device=device)
    lengths = (shares[order] * S).round().long().clamp(min=1)
    return (torch.arange(S, device=device)[None, :] < lengths[:, None]).long()


def _sampled_maxima(hidden: Tensor, weight: Tensor, bias: Tensor, mask: Tensor, columns: Tensor) -> Tensor:
    """``[B, C]`` fp32 maxima over valid tokens of the logits of some vocabulary entries."""
    logits = hidden.float() @ weight[columns].float().T + bias[columns].float()
    return logits.masked_fill(~mask.bool()[:, :, None], float("-inf")).amax(dim=1)


def make_inputs(case: BenchCase, device: torch.device, seed: int = 0) -> LSRHeadInputs:
    """Random inputs of ``case``; ``"2pct"`` variants shift the bias until 2% of the scores are positive."""
    B, S, D, V = (case.dims[name] for name in "BSDV")
    dtype = DTYPES[case.dtype]
    generator = torch.Generator(device=device).manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, device=device)

    hidden = normal(B, S, D).to(dtype)
    weight = normal(V, D).mul_(D**-0.5).to(dtype)
    bias = normal(V).mul_(0.1)
    mask = _attention_mask(case, device, generator)
    columns = torch.randint(0, V, (min(_QUANTILE_COLUMNS, V),), generator=generator, device=device)
    if case.variant.endswith("2pct"):
        maxima = _sampled_maxima(hidden, weight, bias, mask, columns)
        kept = max(1, round(_SPARSE_ACTIVE * maxima.numel()))
        bias -= maxima.flatten().topk(kept).values[-1]
    bias = bias.to(dtype)
    active = (_sampled_maxima(hidden, weight, bias, mask, columns) > 0).float().mean().item()
    grad_output = normal(B, V).to(dtype)
    for tensor in (hidden, weight, bias):
        tensor.requires_grad_()
    return LSRHeadInputs(hidden, weight, bias, mask, grad_output, active)
