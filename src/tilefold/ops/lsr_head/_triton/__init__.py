"""The LSR head in Triton: compute capability 8.0 and newer; TMA on 9.0 and newer.

A plan is made for a call and holds for all that have its key; see :mod:`tilefold.ops._shared.call_cache`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tilefold.ops._shared.winners import no_winner, winner_dtype
from tilefold.ops.lsr_head._problem import (
    BackwardCall,
    BackwardPlan,
    ForwardPlan,
    Gradients,
    HeadOptions,
    Needs,
    Saved,
    Tokens,
    Vocabulary,
    winners_shape,
)
from tilefold.ops.lsr_head._triton.launch_backward import plan_max_backward
from tilefold.ops.lsr_head._triton.launch_forward import max_forward
from tilefold.ops.lsr_head._triton.launch_one_token import plan_one_token_backward, plan_one_token_forward
from tilefold.ops.lsr_head._triton.launch_sum import plan_sum_backward, plan_sum_forward
from tilefold.ops.lsr_head._triton.quantize_weight import quantize_rows

__all__ = ["forward", "plan_backward", "quantize_rows"]


@dataclass(frozen=True, eq=False)
class NoTokens:
    """The scores of a batch without a sequence, or of sequences without a place for a token."""

    options: HeadOptions

    def __call__(self, tokens: Tokens, vocabulary: Vocabulary) -> tuple[Tensor, Tensor]:
        """Zeros, which nobody won."""
        hidden, vocab = tokens.hidden, vocabulary.weight.size(0)
        dtype = winner_dtype(tokens.length_bound)
        scores = torch.zeros(tokens.batch, vocab, dtype=self.options.out_dtype, device=hidden.device)
        winners = torch.empty(winners_shape(tokens, vocab, self.options), dtype=dtype, device=hidden.device)
        return scores, winners.fill_(no_winner(dtype))


@dataclass(frozen=True)
class NoGradients:
    """The gradients of such scores, and of packed input without a row."""

    needs: Needs

    def __call__(
        self, dscores: Tensor, saved: Saved, tokens: Tokens, vocabulary: Vocabulary, main_grad: Tensor | None
    ) -> Gradients:
        """Zeros where gradients are needed."""
        needs, weight = self.needs, vocabulary.weight
        return (
            torch.zeros_like(tokens.hidden, memory_format=torch.contiguous_format) if needs.hidden else None,
            torch.zeros_like(weight) if needs.weight and main_grad is None else None,
            None if needs.bias is None else weight.new_zeros(weight.size(0), dtype=needs.bias),
        )


def forward(
    tokens: Tokens, vocabulary: Vocabulary, options: HeadOptions, aligned: bool
) -> tuple[ForwardPlan, tuple[Tensor, Tensor | None]]:
    """A plan for such calls, and what it computed; ``aligned`` says that tensors begin at multiples of 16 bytes."""
    if tokens.batch == 0 or (tokens.cu_seqlens is None and tokens.length == 0):
        nothing = NoTokens(options)
        return nothing, nothing(tokens, vocabulary)
    if options.pooling == "max":
        return max_forward(tokens, vocabulary, options, aligned)
    make = plan_sum_forward if options.pooling in ("sum", "mean") else plan_one_token_forward
    plan: ForwardPlan = make(tokens, vocabulary, options, aligned)
    return plan, plan(tokens, vocabulary)


def plan_backward(call: BackwardCall, aligned: bool, accumulate: bool) -> BackwardPlan:
    """A plan for such gradients; ``accumulate`` adds that of the weight to a buffer in fp32."""
    if call.tokens.batch == 0 or call.tokens.n_rows == 0:
        return NoGradients(call.needs)
    if call.options.pooling == "max":
        return plan_max_backward(call, aligned, accumulate)
    plan = plan_sum_backward if call.options.pooling in ("sum", "mean") else plan_one_token_backward
    return plan(call, aligned)
