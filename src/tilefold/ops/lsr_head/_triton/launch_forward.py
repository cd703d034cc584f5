"""Max pooling, forward: what is launched."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tilefold.ops._shared._triton import releases
from tilefold.ops._shared._triton.launch import Step, rows_fit_descriptor
from tilefold.ops._shared._triton.launches import Launches
from tilefold.ops._shared._triton.tensors import Scratch, cdiv, sm_count
from tilefold.ops._shared.fallback import KernelUnavailableError, give_up
from tilefold.ops._shared.internals import Tma
from tilefold.ops._shared.winners import winner_dtype
from tilefold.ops.lsr_head._problem import HeadOptions, Tokens, Vocabulary
from tilefold.ops.lsr_head._triton.max_forward import _combine_kernel, _max_forward_kernel
from tilefold.ops.lsr_head._triton.operands import Operands, plan_operands
from tilefold.ops.lsr_head._triton.pack import plan_packing
from tilefold.ops.lsr_head._triton.quantize import BLOCK_ROWS, _quantize_rows_kernel, row_constants
from tilefold.ops.lsr_head.configs import (
    NEXT_BEST,
    MaxForwardConfig,
    give_up_missing,
    instead_of,
    kernel_name,
    max_forward_config,
    without_tma,
)

MAX_SPLITS = 32
MAX_RAGGED_SPLITS = 8  # where sequences differ, each split looks for its first one
RAGGED_SHARES = (0.25, 0.33, 0.5, 0.75, 1.0)  # of valid rows, that a split of ragged rows is chosen for
LONG_SEQUENCE_TILES = 16  # longer sequences are rather cut than kept in one split
COMBINE_BLOCK = 1024
FOLDING = ("max_forward_hopper_kernel", "_max_forward_kernel")
GIVEN = "hidden mask cu_seqlens weight weight_scale bias scores winners"


@dataclass(frozen=True, eq=False, slots=True)
class HeadForward:
    """Scores and winners that launches write, for all calls that have the key of the first.

    Attributes:
        options: of the head.
        operands: how the tensors of a call become operands.
        scores: ``[B, V]``.
        winners: of max pooling ``[B, V]``, where a gradient can be asked for; of one token per sequence, under a mask,
            their places ``[B, 1]``.
        launches: of what finds or packs tokens and rounds them to fp8, where that is needed, and of what multiplies; of
            max pooling also of what combines the maxima of sequences that its splits cut.
    """

    options: HeadOptions
    operands: Operands
    scores: Scratch
    winners: Scratch | None
    launches: Launches

    def __call__(self, tokens: Tokens, vocabulary: Vocabulary) -> tuple[Tensor, Tensor | None]:
        """Scores, and winners where they are kept."""
        same = self.operands.same()
        if not self.operands.as_is:
            tokens, vocabulary = self.operands.ready(tokens, vocabulary)
        scores, winners = self.scores(), None if self.winners is None else self.winners()
        self.launches(same, *tokens, *vocabulary, scores, winners)
        return scores, winners


@dataclass(frozen=True, eq=False, slots=True)
class MaxForward(HeadForward):
    """Max pooling; ``config`` is that of the persistent kernel."""

    config: MaxForwardConfig


def max_forward(
    tokens: Tokens, vocabulary: Vocabulary, options: HeadOptions, aligned: bool
) -> tuple[MaxForward, tuple[Tensor, Tensor | None]]:
    """The plan of the fastest kernel that can be built, and what it computed."""
    device = tokens.hidden.device
    give_up_missing(_operand_dtype(vocabulary, options), device)
    while True:
        plan = plan_max_forward(tokens, vocabulary, options, aligned)
        try:
            return plan, plan(tokens, vocabulary)
        except KernelUnavailableError as error:
            if error.kernel not in FOLDING or plan.config not in NEXT_BEST:
                raise  # nothing is behind it
            give_up(kernel_name(plan.config), device, str(error), instead_of(plan.config))


def _operand_dtype(vocabulary: Vocabulary, options: HeadOptions) -> torch.dtype:
    return options.compute_dtype if vocabulary.weight_scale is None else vocabulary.weight.dtype


def plan_max_forward(tokens: Tokens, vocabulary: Vocabulary, options: HeadOptions, aligned: bool) -> MaxForward:
    """The launches of such a call; ``aligned`` says that all tensors begin where TMA descriptors may."""
    dtype = _operand_dtype(vocabulary, options)
    operands, tokens, vocabulary = plan_operands(
        tokens, vocabulary, options.compute_dtype if vocabulary.weight_scale is None else tokens.hidden.dtype, aligned
    )
    hidden, (weight, weight_scale, bias) = tokens.hidden, vocabulary
    (vocab, dim), batch, device = weight.shape, tokens.batch, hidden.device
    config = max_forward_config(dtype, device)
    packing = plan_packing(tokens, vocab, options, config.group)
    if config.use_tma and not (aligned and rows_fit_descriptor(weight)):
        config = without_tma(config)
    total, length = (tokens.n_rows, tokens.length) if packing is None else (packing.total, 0)
    splits, multiple = plan_splits(total, vocab, length, config.block_v, config.block_t, sm_count(device))
    cuts = splits > 1 and (packing is not None or multiple * config.block_t % length != 0)
    steps = [] if packing is None else list(packing.steps)
    scratch = dict.fromkeys(("offsets", "positions", "scales", "parts", "part_winners"))
    scratch |= {} if packing is None else packing.scratch
    rows = "hidden" if packing is None else "rows"
    if weight_scale is not None:
        step = Step(_quantize_rows_kernel, (cdiv(total, BLOCK_ROWS), 1, 1), (total,), row_constants(dim))
        steps.append((step, f"{rows} values scales"))
        # whole tiles of scales, as the kernel reads them
        scales = (cdiv(total, config.block_t) * config.block_t,), torch.float32
        scratch, rows = scratch | {"values": ((total, dim), dtype), "scales": scales}, "values"
    flags = {
        "ACTIVATION": options.activation, "HAS_BIAS": bias is not None,
        "HAS_POSITIONS": packing is not None and options.training, "WITH_WINNERS": options.training,
        "UNIFORM": packing is None, "QUANTIZED": weight_scale is not None, "BLOCK_T": config.block_t,
    }  # fmt: skip
    sizes = (batch, vocab, total, length, splits, multiple)
    folded = "weight_scale bias offsets positions scores winners parts part_winners"
    numbers = (*sizes, options.logit_scale)
    folding = _folding(config, device, dtype, (vocab, total, dim), numbers, flags)
    steps.append((folding, f"weight {rows} scales {folded}"))
    parts = (2 * splits * vocab if cuts else 0,)  # without a cut nothing is partial
    scratch |= {"parts": (parts, torch.float32), "part_winners": (parts if options.training else (0,), torch.int32)}
    if cuts:
        grid = (batch, cdiv(vocab, COMBINE_BLOCK), 1)
        steps.append((Step(_combine_kernel, grid, sizes, flags | {"BLOCK": COMBINE_BLOCK}), folded))
    return MaxForward(
        options,
        operands,
        Scratch((batch, vocab), options.out_dtype, device),
        Scratch((batch, vocab), winner_dtype(tokens.length_bound), device) if options.training else None,
        Launches(device, GIVEN, scratch, steps),
        config,
    )


def _folding(
    config: MaxForwardConfig,
    device: torch.device,
    dtype: torch.dtype,
    sizes: tuple[int, int, int],
    numbers: tuple[int | float, ...],
    flags: dict[str, Any],
) -> Step:
    """The launch of the persistent kernel; ``sizes`` are V, rows and D."""
    vocab, rows, dim = sizes
    kernel: Any = _max_forward_kernel
    make: Callable[..., Any] = tma_descriptor
    block_v = config.block_v
    constants = flags | {
        "D": dim, "BLOCK_K": config.block_k, "GROUP": config.group, "HAS_SCALE": numbers[-1] != 1.0,
        "num_warps": config.num_warps,
    }  # fmt: skip
    if config.warp_roles:
        from tilefold.ops.lsr_head._triton import max_forward_hopper as hopper  # noqa: PLC0415 (needs Gluon)

        kernel, make, block_v = hopper.max_forward_hopper_kernel, hopper.hopper_descriptor, hopper.HALF_V.value
        constants |= {"STAGES": config.num_stages, "LEAN_PLACES": releases.lean_places()}
    else:
        constants |= {"BLOCK_V": block_v, "USE_TMA": config.use_tma, "PRECISION": config.precision}
        constants |= {"num_stages": config.num_stages}
    tma: tuple[Tma, ...] = ()
    if config.use_tma:
        tma = (
            Tma(vocab, dim, make(block_v, config.block_k, dtype)),
            Tma(rows, dim, make(config.block_t, config.block_k, dtype)),
        )
    return Step(kernel, (sm_count(device), 1, 1), numbers, constants, tma)


@functools.cache
def tma_descriptor(rows: int, columns: int, dtype: torch.dtype) -> Callable[[Tensor], TensorDescriptor]:
    """What makes TMA descriptors of tiles of this size, of tensors of this dtype."""
    block = [rows, columns]
    return lambda tensor: TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), block)


@functools.lru_cache(maxsize=4096)
def plan_splits(
    rows: int, vocab: int, uniform_length: int, block_v: int, block_t: int, programs: int
) -> tuple[int, int]:
    """How many splits the token tiles get, and the number of tiles that a split's size is a multiple of.

    The choice that leaves the fewest tiles to the busiest program, at a price per item: 0.1 tile where all sequences
    have one length (``uniform_length``, else 0), 0.15 where the first one has to be looked for. Splits end with
    sequences if that length is a multiple of ``block_t``. How many of ragged ``rows`` are valid only the device knows:
    the choice is then the best on average over several shares.
    """
    tiles_per_sequence = uniform_length // block_t if uniform_length % block_t == 0 else 0
    multiple = tiles_per_sequence if 1 <= tiles_per_sequence <= LONG_SEQUENCE_TILES else 1
    shares, price = ((1.0,), 0.1) if uniform_length else (RAGGED_SHARES, 0.15)
    counts = [max(1, cdiv(int(rows * share), block_t)) for share in shares]
    n_vocab = cdiv(vocab, block_v)

    def busiest(splits: int) -> float:
        total = 0.0
        for n_tiles in counts:
            tiles = cdiv(cdiv(n_tiles, splits), multiple) * multiple
            total += cdiv(n_vocab * cdiv(n_tiles, tiles), programs) * (tiles + price) / n_tiles
        return total

    limit = MAX_SPLITS if uniform_length else MAX_RAGGED_SPLITS
    return min(range(1, min(counts[-1], limit) + 1), key=busiest), multiple
