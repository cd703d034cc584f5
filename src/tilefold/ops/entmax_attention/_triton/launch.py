"""Launchers: strides, tiles of packed batches, scratch, and which kernel runs."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tilefold.ops._shared._triton.launch import launch
from tilefold.ops._shared.entmax_root import kind_of
from tilefold.ops._shared.philox import dropout_threshold
from tilefold.ops.entmax_attention._geometry import Options, stats_shape
from tilefold.ops.entmax_attention._triton.backward import dkv_kernel, dq_kernel, key_lists_kernel, query_lists_kernel
from tilefold.ops.entmax_attention._triton.forward import output_kernel, resident_kernel
from tilefold.ops.entmax_attention._triton.roots import roots_kernel
from tilefold.ops.entmax_attention.configs import (
    attention_config,
    caps,
    is_resident,
    is_short,
    is_simple,
    live_shape,
    row_tiles,
    span,
    tolerance,
)


@functools.cache
def _processors(device: torch.device) -> int:
    """Multiprocessors that a persistent kernel fills; few where kernels are interpreted."""
    return 2 if device.type != "cuda" else torch.cuda.get_device_properties(device).multi_processor_count


def _turns(blocks: int) -> int:
    """How many persistent programs follow each other in one place: more balance what tiles cost, and take scratch."""
    return max(1, min(4, 264 // blocks))


def _is_exact(scale: float) -> bool:
    """Whether multiplying by ``scale`` never rounds and keeps the order of scores."""
    return scale > 0 and math.frexp(scale)[0] == 0.5


def _power_of_two(n: int, least: int = 16) -> int:
    return max(least, 1 << (n - 1).bit_length())


def _strides(tensor: Tensor, packed: bool) -> tuple[int, int, int]:
    """Strides of sequence, head and token."""
    if packed:
        return 0, tensor.stride(1), tensor.stride(0)
    return tensor.stride(0), tensor.stride(1), tensor.stride(2)


def _readable(tensor: Tensor) -> Tensor:
    """The kernels take any strides but of the last dimension, which they read in one piece."""
    return tensor if tensor.stride(-1) == 1 or tensor.size(-1) == 1 else tensor.contiguous()


def _room_for(tensor: Tensor) -> Tensor:
    """A gradient that the kernels can write, with the strides of ``tensor`` where that is possible."""
    made = torch.empty_like(tensor)
    return made if made.stride(-1) == 1 else torch.empty_like(tensor, memory_format=torch.contiguous_format)


@dataclass(frozen=True)
class Tiles:
    """How one side of a batch, queries or keys, is cut into tiles.

    Attributes:
        total: number of tiles; of a packed batch the most there can be.
        per: tiles of a padded sequence.
        batch, start: of a packed batch, the sequence of every tile, and the first tile of every sequence.
    """

    total: int
    per: int
    batch: Tensor | None
    start: Tensor | None


def _tiles(tensor: Tensor, block: int, offsets: Tensor | None, batch: int) -> Tiles:
    if offsets is None:
        per = -(-tensor.size(2) // block)
        return Tiles(batch * per, per, None, None)
    total = row_tiles(tensor, block, batch, packed=True)
    ends = ((offsets.diff() + (block - 1)) // block).clamp_(min=0).cumsum(0)
    every = torch.arange(total, device=tensor.device)
    of_tile = torch.searchsorted(ends, every, right=True)
    start = torch.nn.functional.pad(ends, (1, 0))
    return Tiles(total, 0, of_tile.to(torch.int32), start.to(torch.int32))


@dataclass(frozen=True)
class Problem:
    """What every kernel of a call is told."""

    queries: Tiles
    keys: Tiles
    packed: bool
    batch: int
    mask: Tensor | None
    alpha: Tensor | None
    offsets: tuple[Tensor | None, Tensor | None]
    sizes: tuple[int, int, int, int, int]
    scalars: tuple[int, float, float, int, float, int]
    flags: dict[str, object]


def _problem(
    q: Tensor,
    k: Tensor,
    alpha: Tensor | None,
    key_mask: Tensor | None,
    cu_q: Tensor | None,
    cu_k: Tensor | None,
    seed: Tensor | None,
    options: Options,
    rows: int,
    columns: int,
) -> Problem:
    """What the kernels of a call are told, for tiles of ``rows`` queries and of ``columns`` keys."""
    packed = cu_q is not None
    cu_q, cu_k = (None if cu is None else cu.to(torch.int32).contiguous() for cu in (cu_q, cu_k))
    batch = q.size(0) if cu_q is None else cu_q.numel() - 1
    if key_mask is not None:
        key_mask = (key_mask if key_mask.dtype == torch.bool else key_mask != 0).contiguous().view(torch.uint8)
    if packed:
        sizes = (0, 0, q.size(0), k.size(0), batch)
    else:
        sizes = (q.size(2), k.size(2), 0, 0, batch)
    heads, dim = q.size(1), q.size(-1)
    p = options.dropout_p
    stat_size = math.prod(stats_shape(q, packed))
    scalars = (options.window, options.scale, options.constant, dropout_threshold(p), 1 / (1 - p), stat_size)
    flags: dict[str, object] = {
        "H": heads,
        "GROUP": heads // k.size(1),
        "D": dim,
        "BLOCK_D": _power_of_two(dim),
        "KIND": kind_of(None if alpha is not None else options.constant),
        "HAS_ALPHA": alpha is not None,
        "CAUSAL": options.causal,
        "WINDOW": options.window >= 0,
        "HAS_MASK": key_mask is not None,
        "PACKED": packed,
        "DROPOUT": seed is not None,
        "EXACT": _is_exact(options.scale),
    }
    alpha = None if alpha is None else alpha.contiguous()
    return Problem(
        _tiles(q, rows, cu_q, batch),
        _tiles(k, columns, cu_k, batch),
        packed,
        batch,
        key_mask,
        alpha,
        (cu_q, cu_k),
        sizes,
        scalars,
        flags,
    )


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    alpha: Tensor | None,
    key_mask: Tensor | None,
    cu_q: Tensor | None,
    cu_k: Tensor | None,
    seed: Tensor | None,
    options: Options,
    with_gradient: bool,
    longest_k: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output, what delta is made from (if a gradient is asked for), statistics, map of live blocks."""
    out = torch.empty_like(q)
    out2 = torch.empty_like(q) if with_gradient else q.new_empty(0)
    stats = q.new_empty((4, *stats_shape(q, cu_q is not None)), dtype=torch.float32)
    config = attention_config(q, seed is not None)
    simple = is_simple(
        None if alpha is not None else options.constant, options.causal, options.window, seed is not None
    )
    resident = is_resident(q, longest_k, options.window, simple)
    short = not resident and is_short(q, longest_k, options.window)
    walked = config.short_rows if short and not with_gradient else config.rows
    rows = config.resident_rows if resident else walked
    problem = _problem(q, k, alpha, key_mask, cu_q, cu_k, seed, options, rows, config.keys)
    live = q.new_empty(
        live_shape(q, problem.batch, longest_k, problem.packed, options.window, simple), dtype=torch.int32
    )
    if q.numel() == 0:
        return out, out2, stats, live
    q, k, v = _readable(q), _readable(k), _readable(v)
    target = _readable(out)  # like q, so only a strange q needs a copy back
    target2 = _readable(out2) if with_gradient else out2
    packed = problem.packed
    strides = [*_strides(q, packed), *_strides(k, packed), *_strides(v, packed), *_strides(target, packed)]
    tables = (problem.alpha, problem.mask, *problem.offsets, problem.queries.batch, problem.queries.start, seed)
    sizes = (*problem.sizes, problem.queries.per, *problem.scalars)
    flags = {**problem.flags, "BLOCK_M": rows, "PRECISION": config.precision}
    most = span(rows, longest_k, options.window)
    if resident:
        own = {"BLOCK_N": _power_of_two(most), "GRADIENT": with_gradient, "TOLERANCE": tolerance(q.dtype)}
        launch(
            resident_kernel,
            (problem.queries.total, q.size(1), 1),
            (q, k, v, target, target2, stats, *tables, *strides, *sizes),
            {**flags, **own, "num_warps": config.resident_warps, "num_stages": 1},
        )
    else:
        blocks, tiles = most // config.keys + 2, problem.queries.total
        programs, maxima, lists, counts = tiles * q.size(1), None, None, None
        if not short:
            programs = min(programs, config.programs * _turns(blocks) * _processors(q.device))
            maxima = q.new_empty((programs, blocks, rows), dtype=torch.float32)
            lists = live.new_empty((q.size(1), tiles, blocks))
            counts = live.new_empty((q.size(1), tiles))
        flags["LISTS"] = not short
        flags |= {"BLOCK_N": config.keys, "num_stages": config.forward_stages}
        flags["num_warps"] = config.short_warps if rows != config.rows else config.num_warps
        narrow, wide = caps(config, str(flags["KIND"]), seed is not None)
        launch(
            roots_kernel,
            (programs, 1, 1),
            (q, k, stats, live, maxima, lists, counts, *tables[:-1], *strides[:6], *sizes, tiles, blocks, live.size(2)),
            {**flags, "WIDTH": 16 if blocks <= 18 else 32, "TOLERANCE": tolerance(q.dtype), "maxnreg": narrow},
        )
        launch(
            output_kernel,
            (tiles, q.size(1), 1),
            (q, k, v, target, target2, stats, lists, counts, *tables, *strides, *sizes, tiles, blocks),
            {**flags, "GRADIENT": with_gradient, "maxnreg": wide if with_gradient else narrow},
        )
    if target is not out:
        out.copy_(target)
        if with_gradient:
            out2.copy_(target2)
    if packed:
        _mark_broken(out, problem, q.size(0), k.size(0))
    return out, out2, stats, live


def _mark_broken(out: Tensor, problem: Problem, q_rows: int, k_rows: int) -> None:
    """NaN everywhere if offsets do not describe the rows: the host cannot look without waiting."""
    for offsets, rows in zip(problem.offsets, (q_rows, k_rows), strict=True):
        if offsets is not None and offsets.is_cuda:
            broken = (offsets[0] != 0) | (offsets[-1] != rows) | (offsets.diff() < 0).any()
            out.masked_fill_(broken, math.nan)


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    alpha: Tensor | None,
    key_mask: Tensor | None,
    cu_q: Tensor | None,
    cu_k: Tensor | None,
    seed: Tensor | None,
    out2: Tensor,
    stats: Tensor,
    live: Tensor,
    options: Options,
    needs: tuple[bool, bool, bool, bool],
    longest_k: int,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of q, k, v (in their dtypes) and alpha ``[H]``; ``None`` where not needed."""
    need_q, need_k, need_v, need_alpha = needs
    dq, dk, dv = (_room_for(t) if n else None for t, n in zip((q, k, v), needs[:3], strict=True))
    if q.numel() == 0 or k.numel() == 0:
        zeros = tuple(None if g is None else g.zero_() for g in (dq, dk, dv))
        return (*zeros, q.new_zeros(q.size(1), dtype=torch.float32) if need_alpha else None)  # type: ignore[return-value]
    config = attention_config(q, seed is not None)
    problem = _problem(q, k, alpha, key_mask, cu_q, cu_k, seed, options, config.rows, config.dkv_keys)
    packed, heads = problem.packed, q.size(1)
    q, k, v, dout, out2 = (_readable(t) for t in (q, k, v, dout, out2))
    delta = torch.empty_like(stats[0])
    dalpha = torch.zeros_like(delta) if need_alpha else None
    lists = live.numel() > 0
    key_list, key_count = _key_lists(live, longest_k, config.keys) if lists else (None, None)
    shared = {**problem.flags, "BLOCK_M": config.rows, "LISTS": lists, "PRECISION": config.precision}
    operands = [*_strides(q, packed), *_strides(k, packed), *_strides(v, packed)]
    queries, keys = problem.queries, problem.keys
    sizes = (*problem.sizes, queries.per)
    narrow, wide = caps(config, str(problem.flags["KIND"]), seed is not None)
    launch(
        dq_kernel,
        (queries.total, heads, 1),
        (
            q, k, v, dout, out2, dq, delta, dalpha, stats, key_list, key_count, problem.alpha, problem.mask,
            *problem.offsets, queries.batch, queries.start, seed,
            *operands, *_strides(out2, packed), *_strides(dout, packed), *_strides(q if dq is None else dq, packed),
            *sizes, *problem.scalars, queries.total, 0 if key_list is None else key_list.size(2),
        ),
        shared
        | {"BLOCK_N": config.keys, "NEED_Q": need_q, "NEED_ALPHA": need_alpha}
        | {"num_warps": config.num_warps, "num_stages": config.num_stages, "maxnreg": narrow},
    )  # fmt: skip
    if need_k or need_v:
        most = queries.per if not packed else queries.total
        query_list, query_count = None, None
        if lists:
            query_list = live.new_empty((heads, keys.total, most))
            query_count = live.new_empty((heads, keys.total))
            blocks = {"BLOCK_M": config.rows, "BLOCK_N": config.keys, "KEYS": config.dkv_keys, "PACKED": packed}
            launch(
                query_lists_kernel,
                (keys.total, heads, 1),
                (
                    live, query_list, query_count, *problem.offsets, queries.start, keys.batch, keys.start,
                    *sizes, keys.per, queries.total, live.size(2), most,
                ),
                blocks | {"num_warps": 4, "num_stages": 1},
            )  # fmt: skip
        launch(
            dkv_kernel,
            (keys.total, k.size(1), 1),
            (
                q, k, v, dout, dk, dv, delta, stats, query_list, query_count, problem.alpha, problem.mask,
                *problem.offsets, keys.batch, keys.start, seed,
                *operands, *_strides(dout, packed), *_strides(k if dk is None else dk, packed),
                *_strides(v if dv is None else dv, packed), *sizes, keys.per, *problem.scalars, most,
            ),
            shared
            | {"KEYS": config.dkv_keys, "QUERIES": config.dkv_queries, "NEED_K": need_k, "NEED_V": need_v}
            | {"num_warps": config.dkv_warps, "num_stages": config.dkv_stages, "maxnreg": wide},
        )  # fmt: skip
    return dq, dk, dv, None if dalpha is None else dalpha.sum(dim=(0, 2))


def _key_lists(live: Tensor, longest_k: int, block: int) -> tuple[Tensor, Tensor]:
    """For every tile of queries the live blocks of keys, and their number."""
    heads, tiles, words = live.shape
    blocks = -(-longest_k // block)
    listed, count = live.new_empty((heads, tiles, blocks)), live.new_empty((heads, tiles))
    arguments = (live, listed, count, tiles, words, blocks)
    launch(key_lists_kernel, (tiles, heads, 1), arguments, {"num_warps": 1, "num_stages": 1})
    return listed, count
