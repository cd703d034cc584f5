"""Max pooling, backward: what is launched."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilefold.ops._shared._triton.launch import Step
from tilefold.ops._shared._triton.launches import Launches
from tilefold.ops._shared._triton.tensors import Pieces, Scratch, cdiv, sm_count
from tilefold.ops._shared.winners import no_winner
from tilefold.ops.lsr_head._problem import BackwardCall, Gradients, HeadOptions, Needs, Saved, Tokens, Vocabulary
from tilefold.ops.lsr_head._triton.max_backward import (
    MAX_VOCAB,
    _count_kernel,
    _dhidden_kernel,
    _dweight_kernel,
    _list_kernel,
)
from tilefold.ops.lsr_head._triton.operands import SavedOperands, plan_saved_operands
from tilefold.ops.lsr_head.configs import MaxBackwardConfig, max_backward_config

MAX_ADDED = 8192  # counts that every program adds up itself: more launches take the host longer
MAX_TOGETHER = 1 << 20  # bytes of lists that are held while the weight's gradient is computed too
GIVEN = "dscores scores winners cu_seqlens hidden weight dhidden dweight dbias"
FILL = "dscores scores winners cu_seqlens places counts codes grads"
PRODUCT = "weight places counts codes grads dhidden"


@dataclass(frozen=True, slots=True)
class ManyLists:
    """The launches of the hidden gradient where torch adds up the counts of lists between them.

    Attributes:
        lists: scratch of counts, codes and gradients.
        count: entries of each (tile, vocabulary split), int32.
        fill: the entries, ``[B * V]`` codes and gradients.
        product: the gradient of the tiles' rows.
    """

    lists: Pieces
    count: Step
    fill: Step
    product: Step

    def __call__(self, same: bool, dscores: Tensor, *given: Tensor | None) -> None:
        """Launch, given what :data:`GIVEN` names."""
        *won, _, weight, dhidden, _, _ = given
        counts, codes, grads = self.lists()
        self.count(same, *won, counts)
        places = counts.tensor().cumsum(0)
        self.fill(same, dscores, *won, places, counts, codes, grads)
        self.product(same, weight, places, counts, codes, grads, dhidden)


@dataclass(frozen=True, slots=True)
class MaxBackward:
    """Gradients of max pooling, for all calls that have the key of the first.

    Attributes:
        operands: how the tensors of a call become operands.
        dhidden: the gradient of hidden, if it is needed.
        first: its launches, which count and list the tokens that won and multiply, unless ``last`` does them too.
        dweight: ``None`` where it is not needed, or added to another buffer.
        dbias: the bias's gradient.
        last: the launch of these two.
    """

    operands: SavedOperands
    dhidden: Scratch | None
    first: Launches | ManyLists | None
    dweight: Scratch | None
    dbias: Scratch | None
    last: Launches | None

    def __call__(
        self, dscores: Tensor, saved: Saved, tokens: Tokens, vocabulary: Vocabulary, main_grad: Tensor | None
    ) -> Gradients:
        """Gradients of hidden, weight and bias; that of the weight is added to ``main_grad``, if given."""
        same, operands = self.operands.same(), self.operands.ready(saved, tokens, vocabulary)
        dhidden = None if self.dhidden is None else self.dhidden()
        if self.first is not None:
            self.first(same, dscores, *operands, dhidden, None, None)
        # the lists of the hidden gradient are gone by now: the peak is that of the results
        dweight = None if self.dweight is None else self.dweight()
        dbias = None if self.dbias is None else self.dbias()
        if self.last is not None:
            self.last(same, dscores, *operands, dhidden, dweight if main_grad is None else main_grad, dbias)
        return dhidden, dweight, dbias


def plan_max_backward(call: BackwardCall, aligned: bool, accumulate: bool) -> MaxBackward:
    """The launches of such gradients; ``accumulate`` adds that of the weight to a buffer in fp32."""
    dscores, saved, tokens, vocabulary, options, needs = call
    hidden, weight, winners = tokens.hidden, vocabulary.weight, saved.winners
    dtype, device = options.compute_dtype, hidden.device
    if winners is None:
        raise ValueError("winners must be a tensor in the backward pass of max pooling, got None.")
    if weight.size(0) > MAX_VOCAB:
        raise ValueError(f"weight must have at most {MAX_VOCAB} rows for the Triton backward, got {weight.size(0)}.")
    config = max_backward_config(dtype, device, tokens.batch)
    flags = {
        "ALWAYS_ACTIVE": options.activation in {"softplus", "none"},
        "NO_WINNER": no_winner(winners.dtype),
        "UNIFORM": tokens.cu_seqlens is None,
    }
    sizes = (tokens.batch, weight.size(0), tokens.n_rows, tokens.length)
    problem = _Problem(sizes, hidden.size(-1), dscores.stride(), options, flags, config, device)
    first = _plan_hidden(problem) if needs.hidden else None
    last = _plan_weight(problem, needs, accumulate) if needs.weight or needs.bias is not None else None
    if isinstance(first, Launches) and last is not None and first.scratch_bytes <= MAX_TOGETHER:
        first, last = None, first.followed_by(last)
    return MaxBackward(
        plan_saved_operands(saved, tokens, vocabulary, needs, dtype, aligned),
        Scratch(tuple(hidden.shape), hidden.dtype, device) if needs.hidden else None,
        first,
        Scratch(tuple(weight.shape), weight.dtype, device) if needs.weight and not accumulate else None,
        None if needs.bias is None else Scratch((weight.size(0),), needs.bias, device),
        last,
    )


@dataclass(frozen=True)
class _Problem:
    """What the launches depend on; ``sizes`` are B, V, rows of hidden and the length of sequences (0 if packed)."""

    sizes: tuple[int, int, int, int]
    dim: int
    strides: tuple[int, ...]
    options: HeadOptions
    flags: dict[str, Any]
    config: MaxBackwardConfig
    device: torch.device

    @property
    def scaled(self) -> bool:
        """Whether products need powers of two, for entries that the dtype's range does not hold."""
        return self.options.compute_dtype == torch.float16


def _plan_hidden(problem: _Problem) -> Launches | ManyLists:
    p, config, device = problem, problem.config, problem.device
    batch, vocab, n_rows, _ = p.sizes
    splits, tiles = cdiv(vocab, config.split_v), cdiv(n_rows, config.block_r)
    block = {"BLOCK_R": config.block_r, "BLOCK": config.scan_block, "num_warps": config.scan_warps, **p.flags}
    lists = (*p.sizes, splits, config.split_v)
    constants = {
        "D": p.dim, "BLOCK_R": config.block_r, "BLOCK_D": config.dhidden_block_d, "BLOCK_E": config.block_e,
        "SCALED": p.scaled, "PRECISION": config.precision, "num_warps": config.dhidden_warps,
        "num_stages": config.dhidden_stages,
    }  # fmt: skip
    slots = tiles * splits
    added_up = {"ADDED_UP": slots > MAX_ADDED}
    activation = {"ACTIVATION": p.options.activation}
    count = Step(_count_kernel, (tiles, splits, 1), lists, block)
    fill = Step(_list_kernel, (tiles, splits, 1), (*lists, *p.strides), block | activation | added_up)
    grid, numbers = (tiles, cdiv(p.dim, config.dhidden_block_d), 1), (n_rows, splits, p.options.logit_scale)
    product = Step(_dhidden_kernel, grid, numbers, constants | added_up)
    entries, wide = (batch * vocab,), torch.float32 if p.scaled else p.options.compute_dtype
    scratch = {"counts": ((slots,), torch.int32), "codes": (entries, torch.int32), "grads": (entries, wide)}
    if slots > MAX_ADDED:
        return ManyLists(Pieces(device, *scratch.values()), count, fill, product)
    steps = [(count, "scores winners cu_seqlens counts"), (fill, FILL), (product, PRODUCT)]
    return Launches(device, GIVEN, {**scratch, "places": None}, steps)


def _plan_weight(problem: _Problem, needs: Needs, accumulate: bool) -> Launches:
    """The launch of the weight's and the bias's gradient, whose programs list entries of their own."""
    p, config = problem, problem.config
    items = cdiv(p.sizes[1], config.dweight_block_v) * (cdiv(p.dim, config.dweight_block_d) if needs.weight else 1)
    programs = min(items, sm_count(p.device) * config.dweight_programs)
    constants = {
        "D": p.dim, "BLOCK_B": config.dweight_block_b, "BLOCK_V": config.dweight_block_v,
        "BLOCK_D": config.dweight_block_d, "BLOCK_E": config.dweight_block_e, "ACTIVATION": p.options.activation,
        "NEED_WEIGHT": needs.weight, "NEED_BIAS": needs.bias is not None, "ACCUMULATE": accumulate,
        "SCALED": p.scaled, "PRECISION": config.precision,
        "num_warps": config.dweight_warps, "num_stages": config.dweight_stages, **p.flags,
    }  # fmt: skip
    if config.dweight_registers is not None:
        constants["maxnreg"] = config.dweight_registers
    numbers = (*p.sizes, p.options.logit_scale, *p.strides)
    entries = (programs * config.dweight_block_b * config.dweight_block_v,)
    step = Step(_dweight_kernel, (programs, 1, 1), numbers, constants)
    scratch = {"own_codes": (entries, torch.int64), "own_grads": (entries, p.options.compute_dtype)}
    names = "dscores scores winners hidden cu_seqlens own_codes own_grads dweight dbias"
    return Launches(p.device, GIVEN, scratch, [(step, names)])
