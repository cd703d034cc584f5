"""Sum and mean pooling of few rows, backward: gradients of logits, then the kernels of one token per sequence.

The library's products of few rows are bound by the weight and its gradient, which they write in fp32 to be stored in
another dtype later, and by the host. Each row stands for a sequence of one token here, whose slope is multiplied.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tilefold.ops._shared._triton.launch import Step
from tilefold.ops._shared._triton.launches import Launches, Scratches
from tilefold.ops._shared._triton.tensors import Scratch, cdiv
from tilefold.ops.lsr_head._problem import HeadOptions, Needs, Tokens, Vocabulary
from tilefold.ops.lsr_head._triton.launch_one_token import OneTokenBackward, TakenRows, plan_row_gradients
from tilefold.ops.lsr_head._triton.operands import AllOperands, Operands
from tilefold.ops.lsr_head._triton.sum_pooling import _dlogits_kernel
from tilefold.ops.lsr_head.configs import SumConfig

GIVEN = "dscores hidden mask cu_seqlens weight bias dhidden dweight dbias"


def plan_few_rows(
    dscores: Tensor,
    given: tuple[Tokens, Vocabulary],
    operands: Operands,
    options: HeadOptions,
    needs: Needs,
    config: SumConfig,
    constants: dict[str, Any],
) -> OneTokenBackward:
    """The launches of such gradients; ``constants`` are those that the kernels of sums share."""
    tokens, vocabulary = given
    hidden, (vocab, dim), n_rows = tokens.hidden, vocabulary.weight.shape, tokens.n_rows
    device, dtype = hidden.device, options.compute_dtype
    clean = tokens.attention_mask is not None and needs.weight
    numbers = (0, vocab, vocab, n_rows, tokens.length, options.logit_scale, *dscores.stride(), vocab)
    grid = (tokens.batch, cdiv(vocab, config.block_v), 1)
    step = Step(_dlogits_kernel, grid, numbers, constants | {"CLEAN": clean, "NEED_BIAS": False})
    flags = {"PACKED": False, "MASKED": False, "LAST": False, "NO_WINNER": -1}
    taken = TakenRows(
        (n_rows, vocab, dim, n_rows, 1), (vocab, 1), flags, options._replace(activation="none"), needs, device
    )
    steps, parts = plan_row_gradients(taken, "dlogits", "dlogits", "clean" if clean else "hidden")
    scratch: Scratches = {
        "dlogits": ((n_rows, vocab), dtype), "clean": ((n_rows, dim), dtype) if clean else None, "sums": None,
        "winners": None, "parts": parts,
    }  # fmt: skip
    steps = [(step, "dscores weight hidden bias mask cu_seqlens dlogits clean sums"), *steps]
    return OneTokenBackward(
        AllOperands(operands),
        Scratch(tuple(hidden.shape), hidden.dtype, device) if needs.hidden else None,
        Scratch((vocab, dim), vocabulary.weight.dtype, device) if needs.weight else None,
        None if needs.bias is None else Scratch((vocab,), needs.bias, device),
        Launches(device, GIVEN, scratch, steps),
    )
