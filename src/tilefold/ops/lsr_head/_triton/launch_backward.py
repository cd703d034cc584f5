"""Max pooling, backward: what is launched."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilefold.ops._shared._triton.launch import Step
from tilefold.ops._shared._triton.tensors import Pieces, Scratch, cdiv, contiguous, sm_count
from tilefold.ops._shared.internals import hooked
from tilefold.ops._shared.winners import no_winner
from tilefold.ops.lsr_head._problem import Gradients, HeadOptions, Needs, Saved, Tokens, Vocabulary
from tilefold.ops.lsr_head._triton.max_backward import (
    MAX_VOCAB,
    _count_kernel,
    _dhidden_kernel,
    _dweight_kernel,
    _list_kernel,
)
from tilefold.ops.lsr_head._triton.operands import in_dtype
from tilefold.ops.lsr_head.configs import MaxBackwardConfig, max_backward_config

MAX_ADDED = 8192  # counts that every program adds up itself: more launches take the host longer


@dataclass(frozen=True, slots=True)
class HiddenGradient:
    """Launches that list what each tile of hidden rows won, and multiply.

    Attributes:
        lists: scratch of counts, codes and gradients.
        count: entries of each (tile, vocabulary split), int32.
        added_up: whether torch adds them up for the launches that follow.
        fill: the entries, ``[B * V]`` codes and gradients.
        product: the gradient of the tiles' rows.
    """

    lists: Pieces
    count: Step
    added_up: bool
    fill: Step
    product: Step

    def __call__(
        self, same: bool, dscores: Tensor, won: tuple[Tensor | None, ...], weight: Tensor, dhidden: Tensor
    ) -> None:
        """Write ``dhidden``; ``won`` are scores, winners and offsets."""
        counts, codes, grads = self.lists()
        self.count(same, *won, counts)
        places = counts.tensor().cumsum(0) if self.added_up else None
        self.fill(same, dscores, *won, places, counts, codes, grads)
        self.product(same, weight, places, counts, codes, grads, dhidden)


@dataclass(frozen=True, slots=True)
class MaxBackward:
    """Gradients of max pooling, for all calls that have the key of the first.

    Attributes:
        dtype: of the operands of products.
        as_is: whether no tensor has to be cast or copied.
        aligned: whether all begin at multiples of 16 bytes.
        of_hidden, dhidden: the launches of that gradient, and its memory.
        of_weight, lists: the launch of the weight's and the bias's gradient, and a list per program.
        dweight: ``None`` where it is not needed, or added to another buffer.
        dbias: the bias's gradient.
    """

    dtype: torch.dtype
    as_is: bool
    aligned: bool
    of_hidden: HiddenGradient | None
    dhidden: Scratch | None
    of_weight: Step | None
    lists: Pieces
    dweight: Scratch | None
    dbias: Scratch | None

    def __call__(
        self, dscores: Tensor, saved: Saved, tokens: Tokens, vocabulary: Vocabulary, main_grad: Tensor | None
    ) -> Gradients:
        """Gradients of hidden, weight and bias; that of the weight is added to ``main_grad``, if given."""
        same = self.aligned and not hooked()
        hidden, weight = tokens.hidden, vocabulary.weight
        won: tuple[Tensor | None, ...] = (*saved, tokens.cu_seqlens)
        if not self.as_is:
            won = tuple(map(contiguous, won))
            hidden = hidden if self.of_weight is None else in_dtype(hidden, self.dtype)
            weight = weight if self.of_hidden is None else in_dtype(weight, self.dtype)
        dhidden = None
        if self.of_hidden is not None and self.dhidden is not None:
            dhidden = self.dhidden()
            self.of_hidden(same, dscores, won, weight, dhidden)
        # the lists of the hidden gradient are gone by now: the peak is that of the results
        dweight = None if self.dweight is None else self.dweight()
        dbias = None if self.dbias is None else self.dbias()
        if self.of_weight is not None:
            scores, winners, cu_seqlens = won
            target = dweight if main_grad is None else main_grad
            self.of_weight(same, dscores, scores, winners, hidden, cu_seqlens, *self.lists(), target, dbias)
        return dhidden, dweight, dbias


def plan_max_backward(
    dscores: Tensor,
    saved: Saved,
    tokens: Tokens,
    vocabulary: Vocabulary,
    options: HeadOptions,
    needs: Needs,
    aligned: bool,
    accumulate: bool,
) -> MaxBackward:
    """The launches of such gradients; ``accumulate`` adds that of the weight to a buffer in fp32."""
    hidden, weight, winners = tokens.hidden, vocabulary.weight, saved.winners
    dtype, device = options.compute_dtype, hidden.device
    if winners is None:
        raise ValueError("winners must be a tensor in the backward pass of max pooling, got None.")
    if weight.size(0) > MAX_VOCAB:
        raise ValueError(f"weight must have at most {MAX_VOCAB} rows for the Triton backward, got {weight.size(0)}.")
    config = max_backward_config(dtype, device, tokens.batch)
    read = (*saved, tokens.cu_seqlens, hidden, weight)
    flags = {
        "ALWAYS_ACTIVE": options.activation in {"softplus", "none"},
        "NO_WINNER": no_winner(winners.dtype),
        "UNIFORM": tokens.cu_seqlens is None,
    }
    sizes = (tokens.batch, weight.size(0), tokens.n_rows, tokens.length)
    problem = _Problem(sizes, hidden.size(-1), dscores.stride(), options, flags, config, device)
    of_weight, entries = None, 0
    if needs.weight or needs.bias is not None:
        of_weight, entries = _plan_weight(problem, needs, accumulate)
    return MaxBackward(
        dtype,
        hidden.dtype == weight.dtype == dtype and all(t is None or t.is_contiguous() for t in read),
        aligned,
        _plan_hidden(problem) if needs.hidden else None,
        Scratch(tuple(hidden.shape), hidden.dtype, device) if needs.hidden else None,
        of_weight,
        Pieces(device, ((entries,), torch.int64), ((entries,), dtype)),
        Scratch(tuple(weight.shape), weight.dtype, device) if needs.weight and not accumulate else None,
        None if needs.bias is None else Scratch((weight.size(0),), needs.bias, device),
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


def _plan_hidden(problem: _Problem) -> HiddenGradient:
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
    entries, wide = (batch * vocab,), torch.float32 if p.scaled else p.options.compute_dtype
    return HiddenGradient(
        Pieces(device, ((slots,), torch.int32), (entries, torch.int32), (entries, wide)),
        Step(_count_kernel, (tiles, splits, 1), lists, block),
        slots > MAX_ADDED,
        Step(_list_kernel, (tiles, splits, 1), (*lists, *p.strides), block | activation | added_up),
        Step(
            _dhidden_kernel,
            (tiles, cdiv(p.dim, config.dhidden_block_d), 1),
            (n_rows, splits, p.options.logit_scale),
            constants | added_up,
        ),
    )


def _plan_weight(problem: _Problem, needs: Needs, accumulate: bool) -> tuple[Step, int]:
    """The launch of the weight's and the bias's gradient, and the entries that its programs list."""
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
    entries = programs * config.dweight_block_b * config.dweight_block_v
    return Step(_dweight_kernel, (programs, 1, 1), numbers, constants), entries
