"""Max pooling, forward: one persistent kernel whose running maximum and winner stay in registers.

A program walks (vocabulary tile, unit) items; a unit is a run of token tiles. The tile of logits is
``[BLOCK_V, BLOCK_T]``, the maximum runs along its tokens. Sequences are whole groups of GROUP rows, so a tile that
holds several is reduced group by group first and each sequence then picks its groups. A sequence cut by the border
of two units leaves its partial maxima in a small buffer, which the second kernel puts together.

All steps of all items form one flat loop, so that loads of the next tile are in flight during a tile's reduction.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilefold.ops.lsr_head._layout import batch_size, no_winner, winner_dtype
from tilefold.ops.lsr_head._triton.activation import nan_max
from tilefold.ops.lsr_head._triton.launch import can_use_tma, cdiv, sm_count, tma_descriptors
from tilefold.ops.lsr_head._triton.pack import AlignedRows, align_rows
from tilefold.ops.lsr_head._triton.quantize import quantize_rows
from tilefold.ops.lsr_head._triton.sequences import (
    LAST,
    column_terms,
    merge,
    sequence_offset,
    store_partial,
    store_scores,
    unit_tiles_of,
)
from tilefold.ops.lsr_head.configs import MaxForwardConfig, max_forward_config, without_tma

MAX_UNITS = 32
MAX_RAGGED_UNITS = 8  # where sequences differ, each unit looks for its first one
RAGGED_SHARES = (0.25, 0.33, 0.5, 0.75, 1.0)  # of valid rows, that a split of ragged rows is chosen for
LONG_SEQUENCE_TILES = 16  # longer sequences are rather cut than kept in one unit


@triton.jit
def _reduce_tokens(x, AXIS: tl.constexpr, N: tl.constexpr, WITH_WINNERS: tl.constexpr):
    """Maximum of ``x`` over its last axis of size N, and the lowest place that holds it."""
    best = tl.reduce(x, AXIS, nan_max)
    if WITH_WINNERS:
        place = tl.arange(0, N)
        place = place[None, None, :] if AXIS == 2 else place[None, :]
        place = tl.min(tl.where(x == tl.expand_dims(best, AXIS), place, N), axis=AXIS)
    else:
        place = tl.zeros(best.shape, tl.int32)
    return best, place


@triton.jit
def _first_sequence(offset_ptr, row, B, uniform_length, UNIFORM: tl.constexpr):
    """The first sequence that reaches past ``row``."""
    if UNIFORM:
        seq = row // uniform_length
    else:
        seq = row * 0
        if row > 0:
            for b0 in range(0, B, 256):
                b = b0 + tl.arange(0, 256)
                end = tl.load(offset_ptr + 1 + b, mask=b < B, other=LAST)
                seq += tl.sum((end <= row).to(tl.int32))
    return seq


@triton.jit(do_not_specialize=["B", "T", "uniform_length", "units", "round_to", "logit_scale"])
def _max_forward_kernel(
    weight_src, rows_src, row_scale_ptr, weight_scale_ptr, bias_ptr, offset_ptr, position_ptr, out_ptr, winner_ptr,
    part_ptr, part_winner_ptr,
    B, V, T, uniform_length, units, round_to, logit_scale,
    D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_POSITIONS: tl.constexpr, HAS_SCALE: tl.constexpr,
    WITH_WINNERS: tl.constexpr, UNIFORM: tl.constexpr, QUANTIZED: tl.constexpr, USE_TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    K_STEPS: tl.constexpr = (D + BLOCK_K - 1) // BLOCK_K
    n_rows = T if UNIFORM else tl.load(offset_ptr + B)
    n_tiles, unit_tiles = unit_tiles_of(n_rows, units, round_to, BLOCK_T)
    n_units = tl.cdiv(n_tiles, unit_tiles)
    n_items = tl.cdiv(V, BLOCK_V) * n_units
    item = tl.program_id(0)
    stride = tl.num_programs(0)

    total_tiles = 0
    for i in range(item, n_items, stride):
        unit = i % n_units
        total_tiles += tl.minimum(unit_tiles, n_tiles - unit * unit_tiles)

    unit = item % n_units
    v0 = (item // n_units) * BLOCK_V
    unit_row = unit * unit_tiles * BLOCK_T
    last_row = tl.minimum(unit_row + unit_tiles * BLOCK_T, n_tiles * BLOCK_T)
    r0 = unit_row
    seq = _first_sequence(offset_ptr, unit_row, B, uniform_length, UNIFORM)
    start = sequence_offset(offset_ptr, seq, B, uniform_length, UNIFORM)
    end = sequence_offset(offset_ptr, seq + 1, B, uniform_length, UNIFORM)
    best = tl.full((BLOCK_V,), float("-inf"), tl.float32)
    winner = tl.zeros((BLOCK_V,), tl.int32) + tl.maximum(start, unit_row)
    acc = tl.zeros((BLOCK_V, BLOCK_T), tl.float32)
    k = 0
    for _ in tl.range(0, total_tiles * K_STEPS):
        if USE_TMA:
            w = weight_src.load([v0, k * BLOCK_K])  # [BLOCK_V, BLOCK_K]
            h = rows_src.load([r0, k * BLOCK_K])  # [BLOCK_T, BLOCK_K]
        else:
            offs_k = k * BLOCK_K + tl.arange(0, BLOCK_K)
            row_v = v0 + tl.arange(0, BLOCK_V)
            row_t = r0 + tl.arange(0, BLOCK_T)
            w = tl.load(
                weight_src + row_v.to(tl.int64)[:, None] * D + offs_k[None, :],
                mask=(row_v < V)[:, None] & (offs_k < D)[None, :],
                other=0.0,
            )  # [BLOCK_V, BLOCK_K]
            h = tl.load(
                rows_src + row_t.to(tl.int64)[:, None] * D + offs_k[None, :],
                mask=(row_t < T)[:, None] & (offs_k < D)[None, :],
                other=0.0,
            )  # [BLOCK_T, BLOCK_K]
        acc = tl.dot(w, h.T, acc, input_precision=PRECISION)
        k += 1
        if k == K_STEPS:
            if HAS_SCALE:
                acc *= logit_scale
            if QUANTIZED:
                acc *= tl.load(row_scale_ptr + r0 + tl.arange(0, BLOCK_T))[None, :]  # its buffer holds whole tiles
            offs_v = v0 + tl.arange(0, BLOCK_V)
            mask_v = offs_v < V
            scale, bias = column_terms(weight_scale_ptr, bias_ptr, offs_v, mask_v, HAS_BIAS, QUANTIZED)
            r1 = tl.minimum(r0 + BLOCK_T, n_rows)
            if (start <= r0) & (end >= r0 + BLOCK_T):
                tile_best, place = _reduce_tokens(acc, 1, BLOCK_T, WITH_WINNERS)
                best, winner = merge(best, winner, tile_best, r0 + place, WITH_WINNERS)
                if end == r1:
                    if start < unit_row:
                        store_partial(
                            best, winner, 2 * unit, offs_v, mask_v, part_ptr, part_winner_ptr, V, WITH_WINNERS
                        )
                    else:
                        store_scores(
                            best, winner, seq, start, offs_v, mask_v, scale, bias, position_ptr, out_ptr,
                            winner_ptr, V, ACTIVATION, HAS_BIAS, HAS_POSITIONS, WITH_WINNERS, QUANTIZED,
                        )  # fmt: skip
                    seq += 1
                    start = end
                    end = sequence_offset(offset_ptr, seq + 1, B, uniform_length, UNIFORM)
                    best = tl.full((BLOCK_V,), float("-inf"), tl.float32)
                    winner = tl.zeros((BLOCK_V,), tl.int32) + start
            else:
                N_GROUPS: tl.constexpr = BLOCK_T // GROUP
                groups = tl.arange(0, N_GROUPS) * GROUP
                # [BLOCK_V, N_GROUPS]
                group_best, group_place = _reduce_tokens(
                    tl.reshape(acc, (BLOCK_V, N_GROUPS, GROUP)), 2, GROUP, WITH_WINNERS
                )
                group_place += groups[None, :]
                more = True
                while more:
                    inside = ((groups >= start - r0) & (groups < end - r0))[None, :]
                    seq_best = tl.reduce(tl.where(inside, group_best, float("-inf")), 1, nan_max)
                    seq_place = tl.zeros((BLOCK_V,), tl.int32)
                    if WITH_WINNERS:
                        seq_place = tl.min(
                            tl.where(inside & (group_best == seq_best[:, None]), group_place, BLOCK_T), axis=1
                        )
                    best, winner = merge(best, winner, seq_best, r0 + seq_place, WITH_WINNERS)
                    more = end <= r1
                    if more:
                        if start < unit_row:
                            store_partial(
                                best, winner, 2 * unit, offs_v, mask_v, part_ptr, part_winner_ptr, V, WITH_WINNERS
                            )
                        elif end > start:
                            store_scores(
                                best, winner, seq, start, offs_v, mask_v, scale, bias, position_ptr,
                                out_ptr, winner_ptr, V, ACTIVATION, HAS_BIAS, HAS_POSITIONS, WITH_WINNERS, QUANTIZED,
                            )  # fmt: skip
                        seq += 1
                        start = end
                        end = sequence_offset(offset_ptr, seq + 1, B, uniform_length, UNIFORM)
                        best = tl.full((BLOCK_V,), float("-inf"), tl.float32)
                        winner = tl.zeros((BLOCK_V,), tl.int32) + start
                        more = seq < B
            acc = tl.zeros((BLOCK_V, BLOCK_T), tl.float32)
            k = 0
            r0 += BLOCK_T
            if r0 == last_row:
                if (start < last_row) & (seq < B):  # the sequence goes on in the next unit
                    slot = 2 * unit + tl.where(start < unit_row, 0, 1)
                    store_partial(best, winner, slot, offs_v, mask_v, part_ptr, part_winner_ptr, V, WITH_WINNERS)
                item += stride
                unit = item % n_units
                v0 = (item // n_units) * BLOCK_V
                unit_row = unit * unit_tiles * BLOCK_T
                last_row = tl.minimum(unit_row + unit_tiles * BLOCK_T, n_tiles * BLOCK_T)
                r0 = unit_row
                seq = _first_sequence(offset_ptr, unit_row, B, uniform_length, UNIFORM)
                start = sequence_offset(offset_ptr, seq, B, uniform_length, UNIFORM)
                end = sequence_offset(offset_ptr, seq + 1, B, uniform_length, UNIFORM)
                best = tl.full((BLOCK_V,), float("-inf"), tl.float32)
                winner = tl.zeros((BLOCK_V,), tl.int32) + tl.maximum(start, unit_row)


@triton.jit(do_not_specialize=["B", "T", "uniform_length", "units", "round_to"])
def _combine_kernel(
    weight_scale_ptr, bias_ptr, offset_ptr, position_ptr, ok_ptr, out_ptr, winner_ptr, part_ptr, part_winner_ptr,
    B, V, T, uniform_length, units, round_to,
    BLOCK_T: tl.constexpr, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_POSITIONS: tl.constexpr, WITH_WINNERS: tl.constexpr, UNIFORM: tl.constexpr, NO_WINNER: tl.constexpr,
    CHECKED: tl.constexpr, QUANTIZED: tl.constexpr,
):  # fmt: skip
    """Finish the sequences that units cut, and write the empty ones."""
    seq = tl.program_id(0)
    offs_v = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask_v = offs_v < V
    start = sequence_offset(offset_ptr, seq, B, uniform_length, UNIFORM)
    end = sequence_offset(offset_ptr, seq + 1, B, uniform_length, UNIFORM)
    n_rows = T if UNIFORM else tl.load(offset_ptr + B)
    _, unit_tiles = unit_tiles_of(n_rows, units, round_to, BLOCK_T)
    unit_rows = unit_tiles * BLOCK_T
    if start == end:
        empty = 0.0
        if CHECKED:
            empty = tl.where(tl.load(ok_ptr) != 0, 0.0, float("nan"))
        offs = seq.to(tl.int64) * V + offs_v
        tl.store(out_ptr + offs, (tl.zeros((BLOCK,), tl.float32) + empty).to(out_ptr.dtype.element_ty), mask=mask_v)
        if WITH_WINNERS:
            tl.store(winner_ptr + offs, tl.full((BLOCK,), NO_WINNER, winner_ptr.dtype.element_ty), mask=mask_v)
    elif start // unit_rows != (end - 1) // unit_rows:
        best = tl.full((BLOCK,), float("-inf"), tl.float32)
        winner = tl.zeros((BLOCK,), tl.int32) + start
        for unit in range(start // unit_rows, (end - 1) // unit_rows + 1):
            slot = 2 * unit + tl.where(start < unit * unit_rows, 0, 1)
            offs = slot.to(tl.int64) * V + offs_v
            part = tl.load(part_ptr + offs, mask=mask_v, other=0.0)  # [BLOCK]
            part_winner = winner
            if WITH_WINNERS:
                part_winner = tl.load(part_winner_ptr + offs, mask=mask_v, other=0)  # [BLOCK]
            best, winner = merge(best, winner, part, part_winner, WITH_WINNERS)
        scale, bias = column_terms(weight_scale_ptr, bias_ptr, offs_v, mask_v, HAS_BIAS, QUANTIZED)
        store_scores(
            best, winner, seq, start, offs_v, mask_v, scale, bias, position_ptr, out_ptr,
            winner_ptr, V, ACTIVATION, HAS_BIAS, HAS_POSITIONS, WITH_WINNERS, QUANTIZED,
        )  # fmt: skip


def max_forward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    attention_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    activation: str,
    logit_scale: float,
    out_dtype: torch.dtype,
    compute_dtype: torch.dtype,
    with_winners: bool,
    length_bound: int,
    weight_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Scores ``[B, V]`` in ``out_dtype``, and winners ``[B, V]`` (uint16 or int32; empty unless asked for).

    With ``weight_scale``, fp32 ``[V]``, ``weight`` is fp8, and the token states are rounded to fp8 too.
    """
    batch, (vocab, dim) = batch_size(hidden, cu_seqlens), weight.shape
    dtype = winner_dtype(length_bound)
    scores = torch.empty(batch, vocab, dtype=out_dtype, device=hidden.device)
    winners = torch.empty(batch if with_winners else 0, vocab, dtype=dtype, device=hidden.device)
    if batch == 0 or (hidden.dim() == 3 and hidden.size(1) == 0):
        return scores.zero_(), winners.fill_(no_winner(dtype))
    quantized = weight_scale is not None
    config = max_forward_config(weight.dtype if quantized else compute_dtype, hidden.device)
    weight = (weight if quantized else weight.to(compute_dtype)).contiguous()
    aligned = align_rows(hidden.to(compute_dtype), attention_mask, cu_seqlens, config.group)
    rows, row_scale = quantize_rows(aligned.rows, config.block_t) if quantized else (aligned.rows, None)
    if config.use_tma and not (can_use_tma(weight) and can_use_tma(rows)):
        config = without_tma(config)
    programs = sm_count(hidden.device)
    total = rows.size(0)
    units, round_to = plan_units(total, vocab, aligned.uniform_length, config.block_v, config.block_t, programs)
    part = torch.empty(2 * units, vocab, dtype=torch.float32, device=hidden.device)
    part_winner = torch.empty_like(part if with_winners else part[:0], dtype=torch.int32)
    sizes = (batch, vocab, total, aligned.uniform_length, units, round_to)
    flags = {
        "ACTIVATION": activation,
        "HAS_BIAS": bias is not None,
        "HAS_POSITIONS": aligned.positions is not None,
        "WITH_WINNERS": with_winners,
        "UNIFORM": aligned.offsets is None,
        "QUANTIZED": quantized,
        "BLOCK_T": config.block_t,
    }
    pointers = (row_scale, weight_scale, bias, aligned.offsets, aligned.positions, scores, winners, part, part_winner)
    tiles = {"D": dim, "BLOCK_K": config.block_k, "GROUP": config.group, "HAS_SCALE": logit_scale != 1.0, **flags}
    if config.warp_roles:
        from tilefold.ops.lsr_head._triton import max_forward_hopper as hopper  # noqa: PLC0415 (needs Gluon)

        sources = hopper.hopper_descriptors(weight, rows, config.block_t, config.block_k)
        hopper.max_forward_hopper_kernel[(programs,)](
            *sources, *pointers, *sizes, logit_scale, STAGES=config.num_stages, num_warps=config.num_warps, **tiles
        )
    else:
        sources = tma_descriptors(weight, rows, config) if config.use_tma else (weight, rows)
        _max_forward_kernel[(programs,)](
            *sources, *pointers, *sizes, logit_scale, BLOCK_V=config.block_v, USE_TMA=config.use_tma,
            PRECISION=config.precision, num_warps=config.num_warps, num_stages=config.num_stages, **tiles,
        )  # fmt: skip
    if aligned.offsets is not None or units_cut_sequences(aligned, round_to, config):
        block = 1024
        _combine_kernel[(batch, cdiv(vocab, block))](
            weight_scale, bias, aligned.offsets, aligned.positions, aligned.ok, scores, winners, part, part_winner,
            *sizes, BLOCK=block, NO_WINNER=no_winner(dtype), CHECKED=aligned.ok is not None, **flags,
        )  # fmt: skip
    return scores, winners


@functools.lru_cache(maxsize=4096)
def plan_units(
    rows: int, vocab: int, uniform_length: int, block_v: int, block_t: int, programs: int
) -> tuple[int, int]:
    """Into how many units the token tiles are split, and the number of tiles that a unit's size is a multiple of.

    The split that leaves the fewest tiles to the busiest program, at a price an item: 0.1 tile where all sequences have
    one length (``uniform_length``, else 0), 0.15 where the first one has to be looked for. Units end with sequences if
    that length is a multiple of ``block_t``. How many of ragged ``rows`` are valid only the device knows: the split is
    then the best on average over several shares.
    """
    tiles_per_sequence = uniform_length // block_t if uniform_length % block_t == 0 else 0
    round_to = tiles_per_sequence if 1 <= tiles_per_sequence <= LONG_SEQUENCE_TILES else 1
    shares, price = ((1.0,), 0.1) if uniform_length else (RAGGED_SHARES, 0.15)
    counts = [max(1, cdiv(int(rows * share), block_t)) for share in shares]
    n_vocab = cdiv(vocab, block_v)

    def busiest(units: int) -> float:
        total = 0.0
        for n_tiles in counts:
            tiles = cdiv(cdiv(n_tiles, units), round_to) * round_to
            total += cdiv(n_vocab * cdiv(n_tiles, tiles), programs) * (tiles + price) / n_tiles
        return total

    most = MAX_UNITS if uniform_length else MAX_RAGGED_UNITS
    return min(range(1, min(counts[-1], most) + 1), key=busiest), round_to


def units_cut_sequences(aligned: AlignedRows, round_to: int, config: MaxForwardConfig) -> bool:
    """Whether the border of two units can lie inside a sequence of uniform input."""
    return (round_to * config.block_t) % max(aligned.uniform_length, 1) != 0
