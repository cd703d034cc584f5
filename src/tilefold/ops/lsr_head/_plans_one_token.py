"""Launch plans of poolings of one token per sequence, and of gradients of rows that each stand for a sequence."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilefold.ops._shared._triton.tensors import cdiv, power_of_two
from tilefold.ops._shared.plan import Buffer, Launch, Plan, Setting, TorchStep, contiguous, in_dtype
from tilefold.ops._shared.winners import no_winner, winner_dtype
from tilefold.ops.lsr_head._problem import HeadOptions, HeadSaved, HeadTensors, Needs, Tokens
from tilefold.ops.lsr_head._triton.one_token import (
    _find_kernel,
    _forward_kernel,
    _split_gradient_kernel,
    _store_rows_kernel,
    _weight_gradient_kernel,
)
from tilefold.ops.lsr_head.configs import OneTokenConfig, one_token_config

FIND_BLOCK, SHORT_FIND_BLOCK = 1024, 64  # entries of a mask that are looked at a time
MAX_MASK = 1024  # entries that each program of forward looks at itself; more cost the device more than a launch
CLEAR_BLOCK = 1024  # of the gradient of hidden that are zeroed at a time


def forward(tensors: HeadTensors, options: HeadOptions, training: bool, setting: Setting) -> Plan:
    """Winners are the places of the tokens, kept where a mask hides them."""
    tokens, (vocab, dim), batch = tensors.tokens, tensors.weight.shape, tensors.tokens.batch
    config = one_token_config(setting.capability, options.compute_dtype, setting.tf32)
    dtype, masked = winner_dtype(tokens.length_bound), tokens.attention_mask is not None
    flags, block_b = _flags(tokens, options, masked), config.rows(batch)
    finds = masked and block_b * tokens.length <= MAX_MASK
    places = "winners" if training or finds or not masked else "places"  # what no backward reads is scratch
    steps: list[Launch | TorchStep] = [
        *in_dtype(options.compute_dtype, hidden=tokens.hidden, weight=tensors.weight),
        *contiguous(attention_mask=tokens.attention_mask, cu_seqlens=tokens.cu_seqlens, bias=tensors.bias),
    ]
    if masked and not finds:
        found = {"LAST": flags["LAST"], "NO_WINNER": flags["NO_WINNER"], "BLOCK": FIND_BLOCK}
        names = f"attention_mask {places}"
        steps.append(Launch(_find_kernel, (batch, 1, 1), names, (tokens.length,), found))
    constants = flags | {
        "D": dim, "BLOCK_B": block_b, "BLOCK_V": config.block_v, "BLOCK_K": config.block_k,
        "FIND": SHORT_FIND_BLOCK if finds else 0, "WITH_WINNERS": finds and training,
        "ACTIVATION": options.activation, "HAS_BIAS": tensors.bias is not None, "PRECISION": config.precision,
        "num_warps": config.num_warps, "num_stages": config.num_stages,
    }  # fmt: skip
    grid = cdiv(vocab, config.block_v), cdiv(batch, block_b), 1
    numbers = batch, vocab, tokens.n_rows, tokens.length, options.logit_scale
    names = f"weight hidden bias attention_mask {places} cu_seqlens scores"
    steps.append(Launch(_forward_kernel, grid, names, numbers, constants))
    buffers: dict[str, Buffer | None] = {} if masked and training else {"winners": None}
    return Plan(tuple(steps), buffers | ({"places": Buffer((batch, 1), dtype)} if places == "places" else {}))


def _flags(tokens: Tokens, options: HeadOptions, masked: bool) -> dict[str, Any]:
    """Kernel flags for the row that a sequence takes."""
    return {
        "PACKED": tokens.cu_seqlens is not None, "MASKED": masked, "LAST": options.pooling == "last",
        "NO_WINNER": no_winner(winner_dtype(tokens.length_bound)),
    }  # fmt: skip


def backward(dscores: Tensor, saved: HeadSaved, options: HeadOptions, needs: Needs, setting: Setting) -> Plan:
    """Gradients, ``dhidden`` zero where no token was taken."""
    tokens, (vocab, dim), winners = saved.tokens, saved.weight.shape, saved.winners
    flags = _flags(tokens, options, winners is not None and winners.size(0) > 0)
    sizes = (tokens.batch, vocab, dim, tokens.n_rows, tokens.length)
    taken = TakenRows(sizes, dscores.stride(), flags, options, needs)
    launches, parts = row_gradients(taken, "dscores", "scores", "hidden", setting)
    steps = contiguous(scores=saved.scores, winners=winners, cu_seqlens=tokens.cu_seqlens)
    if needs.weight or needs.bias:
        steps += in_dtype(options.compute_dtype, hidden=tokens.hidden)
    if needs.hidden:
        steps += in_dtype(options.compute_dtype, weight=saved.weight)
    return Plan((*steps, *launches), {"parts": parts})


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


def row_gradients(
    taken: TakenRows, dscores: str, scores: str, rows: str, setting: Setting
) -> tuple[list[Launch], Buffer]:
    """The launches of all gradients, given the names of what they read, and their scratch ``parts``."""
    (batch, vocab, dim, *sizes), strides, flags, options, needs = taken
    dtype = options.compute_dtype
    config = one_token_config(setting.capability, dtype, setting.tf32)
    block_b = config.gradient_rows
    constants = flags | {
        "D": dim, "BLOCK_B": block_b, "BLOCK_V": config.gradient_block_v, "BLOCK_D": config.gradient_block_d,
        "ACTIVATION": options.activation, "SCALED": dtype == torch.float16, "PRECISION": config.precision,
        "num_stages": config.gradient_stages,
    }  # fmt: skip
    launches = []
    splits, split_v = plan_vocabulary_splits(vocab, dim, batch, config, setting.multiprocessors)
    if needs.hidden:
        grid = cdiv(dim, config.gradient_block_d), splits, cdiv(batch, block_b)
        numbers = (batch, vocab, *sizes, split_v, *strides)
        hidden_constants = constants | {"num_warps": config.hidden_warps, "CLEAR": CLEAR_BLOCK}
        names = f"{dscores} {scores} winners weight cu_seqlens parts dhidden"
        launches.append(Launch(_split_gradient_kernel, grid, names, numbers, hidden_constants))
        block = {"D": dim, "BLOCK_B": 4, "BLOCK_D": min(256, power_of_two(dim))} | flags
        grid, stored = (cdiv(batch, 4), cdiv(dim, block["BLOCK_D"]), 1), (batch, *sizes, splits, options.logit_scale)
        launches.append(Launch(_store_rows_kernel, grid, "winners cu_seqlens parts dhidden", stored, block))
    if needs.weight or needs.bias:
        tiles = cdiv(vocab, config.gradient_block_v) * (cdiv(dim, config.gradient_block_d) if needs.weight else 1)
        needed = {"NEED_WEIGHT": needs.weight, "NEED_BIAS": needs.bias, "num_warps": config.weight_warps}
        weighed = (batch, vocab, *sizes, options.logit_scale, *strides)
        names = f"{dscores} {scores} winners {rows} cu_seqlens dweight dbias"
        launches.append(Launch(_weight_gradient_kernel, (tiles, 1, 1), names, weighed, constants | needed))
    return launches, Buffer((splits, batch, dim), torch.float32)


def plan_vocabulary_splits(vocab: int, dim: int, batch: int, config: OneTokenConfig, programs: int) -> tuple[int, int]:
    """Number of splits of the vocabulary that keep the device busy, and their length, a multiple of the tile's."""
    tiles = cdiv(vocab, config.gradient_block_v)
    beside = cdiv(dim, config.gradient_block_d) * cdiv(batch, config.gradient_rows)
    wanted = max(1, min(tiles, cdiv(config.hidden_programs * programs, beside)))
    split_v = cdiv(tiles, wanted) * config.gradient_block_v
    return cdiv(vocab, split_v), split_v
