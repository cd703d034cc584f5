"""Poolings of one token per sequence: what is launched."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilefold.ops._shared._triton.launch import Step
from tilefold.ops._shared._triton.launches import Launches
from tilefold.ops._shared._triton.tensors import Scratch, cdiv, power_of_two, sm_count
from tilefold.ops._shared.winners import no_winner, winner_dtype
from tilefold.ops.lsr_head._problem import BackwardCall, Gradients, HeadOptions, Needs, Saved, Tokens, Vocabulary
from tilefold.ops.lsr_head._triton.launch_forward import GIVEN, HeadForward
from tilefold.ops.lsr_head._triton.one_token import (
    _find_kernel,
    _forward_kernel,
    _split_gradient_kernel,
    _store_rows_kernel,
    _weight_gradient_kernel,
)
from tilefold.ops.lsr_head._triton.operands import (
    AllOperands,
    SavedOperands,
    plan_operands,
    plan_saved_operands,
)
from tilefold.ops.lsr_head.configs import OneTokenConfig, one_token_config

FIND_BLOCK, SHORT_FIND_BLOCK = 1024, 64  # entries of a mask that are looked at a time
MAX_MASK = 1024  # entries that each program of forward looks at itself; more cost the device more than a launch
GRADIENTS_GIVEN = "dscores scores winners cu_seqlens hidden weight dhidden dweight dbias"
CLEAR_BLOCK = 1024  # of the gradient of hidden that are zeroed at a time


def plan_one_token_forward(tokens: Tokens, vocabulary: Vocabulary, options: HeadOptions, aligned: bool) -> HeadForward:
    """The launches of such a call."""
    operands, tokens, (weight, _, bias) = plan_operands(tokens, vocabulary, options.compute_dtype, aligned)
    device, batch, (vocab, dim) = tokens.hidden.device, tokens.batch, weight.shape
    config = one_token_config(options.compute_dtype, device)
    dtype, masked, training = winner_dtype(tokens.length_bound), tokens.attention_mask is not None, options.training
    flags, block_b = _flags(tokens, options, masked, dtype), config.rows(batch)
    finds = masked and block_b * tokens.length <= MAX_MASK
    places = "winners" if training or finds or not masked else "places"  # what no backward reads is scratch
    steps = []
    if masked and not finds:
        found = {"LAST": flags["LAST"], "NO_WINNER": flags["NO_WINNER"], "BLOCK": FIND_BLOCK}
        steps.append((Step(_find_kernel, (batch, 1, 1), (tokens.length,), found), f"mask {places}"))
    constants = flags | {
        "D": dim, "BLOCK_B": block_b, "BLOCK_V": config.block_v, "BLOCK_K": config.block_k,
        "FIND": SHORT_FIND_BLOCK if finds else 0, "WITH_WINNERS": finds and training,
        "ACTIVATION": options.activation, "HAS_BIAS": bias is not None, "PRECISION": config.precision,
        "num_warps": config.num_warps, "num_stages": config.num_stages,
    }  # fmt: skip
    grid = cdiv(vocab, config.block_v), cdiv(batch, block_b), 1
    numbers = batch, vocab, tokens.n_rows, tokens.length, options.logit_scale
    names = f"weight hidden bias mask {places} cu_seqlens scores"
    steps.append((Step(_forward_kernel, grid, numbers, constants), names))
    return HeadForward(
        options,
        operands,
        Scratch((batch, vocab), options.out_dtype, device),
        Scratch((batch, 1), dtype, device) if masked and training else None,
        Launches(device, GIVEN, {"places": ((batch, 1), dtype)} if places == "places" else {}, steps),
    )


def _flags(tokens: Tokens, options: HeadOptions, masked: bool, dtype: torch.dtype) -> dict[str, Any]:
    """What tells the kernels which row a sequence takes; ``dtype`` is that of winners."""
    return {
        "PACKED": tokens.cu_seqlens is not None, "MASKED": masked, "LAST": options.pooling == "last",
        "NO_WINNER": no_winner(dtype),
    }  # fmt: skip


@dataclass(frozen=True, slots=True)
class OneTokenBackward:
    """Gradients of one token per sequence, or of few rows, for all calls that have the key of the first.

    Attributes:
        operands: how the tensors of a call become operands.
        dhidden, dweight, dbias: the gradients, where they are needed.
        launches: of what adds up splits of the vocabulary and zeroes ``dhidden``, of what puts the splits together, and
            of the gradients of weight and bias.
    """

    operands: SavedOperands | AllOperands
    dhidden: Scratch | None
    dweight: Scratch | None
    dbias: Scratch | None
    launches: Launches

    def __call__(
        self, dscores: Tensor, saved: Saved, tokens: Tokens, vocabulary: Vocabulary, main_grad: Tensor | None
    ) -> Gradients:
        """Gradients of hidden, weight and bias."""
        same, operands = self.operands.same(), self.operands.ready(saved, tokens, vocabulary)
        dhidden = None if self.dhidden is None else self.dhidden()
        dweight = None if self.dweight is None else self.dweight()
        dbias = None if self.dbias is None else self.dbias()
        self.launches(same, dscores, *operands, dhidden, dweight, dbias)
        return dhidden, dweight, dbias


def plan_one_token_backward(call: BackwardCall, aligned: bool) -> OneTokenBackward:
    """The launches of such gradients."""
    dscores, saved, tokens, vocabulary, options, needs = call
    hidden, weight, winners = tokens.hidden, vocabulary.weight, saved.winners
    dtype, device, (vocab, dim) = options.compute_dtype, hidden.device, weight.shape
    masked = winners is not None and winners.size(0) > 0
    flags = _flags(tokens, options, masked, winner_dtype(tokens.length_bound))
    sizes = (tokens.batch, vocab, dim, tokens.n_rows, tokens.length)
    taken = TakenRows(sizes, dscores.stride(), flags, options, needs, device)
    steps, parts = plan_row_gradients(taken, "dscores", "scores", "hidden")
    return OneTokenBackward(
        plan_saved_operands(saved, tokens, vocabulary, needs, dtype, aligned),
        Scratch(tuple(hidden.shape), hidden.dtype, device) if needs.hidden else None,
        Scratch((vocab, dim), weight.dtype, device) if needs.weight else None,
        None if needs.bias is None else Scratch((vocab,), needs.bias, device),
        Launches(device, GRADIENTS_GIVEN, {"parts": parts}, steps),
    )


class TakenRows(NamedTuple):
    """Rows of hidden, one a sequence, whose gradients are asked for.

    Attributes:
        sizes: sequences, V, D, rows of hidden, and length of the sequences.
        strides: of the gradient of scores.
        flags: which rows; see :func:`_flags`.
        options: of the head; its activation is the one whose slope is still to be multiplied.
    """

    sizes: tuple[int, int, int, int, int]
    strides: tuple[int, ...]
    flags: dict[str, Any]
    options: HeadOptions
    needs: Needs
    device: torch.device


def plan_row_gradients(
    taken: TakenRows, dscores: str, scores: str, rows: str
) -> tuple[list[tuple[Step, str]], tuple[tuple[int, ...], torch.dtype]]:
    """The launches of all gradients, given the names of what they read, and their scratch ``parts``."""
    (batch, vocab, dim, *sizes), strides, flags, options, needs, device = taken
    dtype = options.compute_dtype
    config = one_token_config(dtype, device)
    block_b = config.gradient_rows
    constants = flags | {
        "D": dim, "BLOCK_B": block_b, "BLOCK_V": config.gradient_block_v, "BLOCK_D": config.gradient_block_d,
        "ACTIVATION": options.activation, "SCALED": dtype == torch.float16, "PRECISION": config.precision,
        "num_stages": config.gradient_stages,
    }  # fmt: skip
    steps = []
    splits, split_v = plan_vocabulary_splits(vocab, dim, batch, config, sm_count(device))
    if needs.hidden:
        grid = (cdiv(dim, config.gradient_block_d), splits, cdiv(batch, block_b))
        hidden_constants = constants | {"num_warps": config.hidden_warps, "CLEAR": CLEAR_BLOCK}
        of_splits = Step(_split_gradient_kernel, grid, (batch, vocab, *sizes, split_v, *strides), hidden_constants)
        steps.append((of_splits, f"{dscores} {scores} winners weight cu_seqlens parts dhidden"))
        block = {"D": dim, "BLOCK_B": 4, "BLOCK_D": min(256, power_of_two(dim))} | flags
        grid = (cdiv(batch, 4), cdiv(dim, block["BLOCK_D"]), 1)
        store = Step(_store_rows_kernel, grid, (batch, *sizes, splits, options.logit_scale), block)
        steps.append((store, "winners cu_seqlens parts dhidden"))
    if needs.weight or needs.bias is not None:
        tiles = cdiv(vocab, config.gradient_block_v) * (cdiv(dim, config.gradient_block_d) if needs.weight else 1)
        needed = {"NEED_WEIGHT": needs.weight, "NEED_BIAS": needs.bias is not None, "num_warps": config.weight_warps}
        numbers = (batch, vocab, *sizes, options.logit_scale, *strides)
        of_weight = Step(_weight_gradient_kernel, (tiles, 1, 1), numbers, constants | needed)
        steps.append((of_weight, f"{dscores} {scores} winners {rows} cu_seqlens dweight dbias"))
    return steps, ((splits, batch, dim), torch.float32)


def plan_vocabulary_splits(vocab: int, dim: int, batch: int, config: OneTokenConfig, programs: int) -> tuple[int, int]:
    """How many splits of the vocabulary keep the device busy, and their length, a multiple of the tile's."""
    tiles = cdiv(vocab, config.gradient_block_v)
    beside = cdiv(dim, config.gradient_block_d) * cdiv(batch, config.gradient_rows)
    wanted = max(1, min(tiles, cdiv(config.hidden_programs * programs, beside)))
    split_v = cdiv(tiles, wanted) * config.gradient_block_v
    return cdiv(vocab, split_v), split_v
