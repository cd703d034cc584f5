"""Launcher of the forward kernels: what they are told, the memory that they write, and which of them run."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilefold.ops.entmax_attention._geometry import Options, stats_shape
from tilefold.ops.entmax_attention._triton.forward import output_kernel, resident_kernel
from tilefold.ops.entmax_attention._triton.packing import Tables, poison
from tilefold.ops.entmax_attention._triton.roots import roots_kernel
from tilefold.ops.entmax_attention._triton.steps import (
    Step,
    are_settled,
    as_bytes,
    as_offsets,
    is_readable,
    layout_of,
    power_of_two,
    read_strides,
    readable,
)
from tilefold.ops.entmax_attention.configs import (
    attention_config,
    caps,
    is_resident,
    is_short,
    is_simple,
    live_shape,
    nearness,
    resident_warps,
    row_tiles,
    span,
    tolerance,
)

Shape = tuple[int, ...]


@functools.cache
def _processors(device: torch.device) -> int:
    """Multiprocessors that a persistent kernel fills; few where kernels are interpreted."""
    return 2 if device.type != "cuda" else torch.cuda.get_device_properties(device).multi_processor_count


def _turns(blocks: int) -> int:
    """How many persistent programs follow each other in one place: more balance what tiles cost, and take scratch."""
    return max(1, min(4, 264 // blocks))


@dataclass(frozen=True)
class ForwardPlan:
    """How calls of one kind run, but for their tensors.

    Attributes:
        stats: shape of the statistics.
        scratch: shapes of the map of live blocks, the maxima, the lists and their lengths; ``None`` without a map.
        copies: whether q, k, v or the output must be copied for the kernels.
        tables: of a packed batch, and
        poison: what becomes of its output if the offsets are broken.
        resident: the one kernel of short rows, or
        roots, output: the two of others. All ``None`` where there is no query.
    """

    stats: Shape
    scratch: tuple[Shape, Shape, Shape, Shape] | None
    copies: bool
    tables: Tables | None = None
    poison: Step | None = None
    resident: Step | None = None
    roots: Step | None = None
    output: Step | None = None


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
    with_support: bool,
    longest_k: int,
    plans: dict[Any, Any],
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """Output, what delta is made from (if a gradient is asked for), statistics, map of live blocks (if there is one).

    ``plans`` belong to calls of this kind; see :mod:`tilefold.ops.entmax_attention._calls`.
    """
    device, out = q.device, torch.empty_like(q)
    plan: ForwardPlan | None = plans.get((with_gradient, with_support))
    if plan is None:
        given = (q, k, v, out, alpha, key_mask, cu_q, seed, options)
        plan = plans[with_gradient, with_support] = _plan(*given, with_gradient, with_support, longest_k)
    out2 = torch.empty_like(q) if with_gradient else None
    stats = torch.empty(plan.stats, dtype=torch.float32, device=device)
    live = maxima = lists = counts = None
    if plan.scratch is not None:
        live = torch.empty(plan.scratch[0], dtype=torch.int32, device=device)
        maxima = torch.empty(plan.scratch[1], dtype=torch.float32, device=device)
        lists = torch.empty(plan.scratch[2], dtype=torch.int32, device=device)
        counts = torch.empty(plan.scratch[3], dtype=torch.int32, device=device)
    if q.numel() == 0:
        return out, out2, stats, live
    alpha, mask = None if alpha is None else alpha.contiguous(), as_bytes(key_mask)
    cu_q, cu_k = as_offsets(cu_q), as_offsets(cu_k)
    target, target2 = out, out if out2 is None else out2
    if plan.copies:
        q, k, v = readable(q), readable(k), readable(v)
        if not is_readable(out):  # like q, so only a strange q needs a copy back
            target, target2 = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (out, target2))
    settled = are_settled(q, k, v, alpha, mask, cu_q, cu_k, seed)
    batch = start = None
    if plan.tables is not None:
        batch, start, _, _ = plan.tables(settled, cu_q, cu_k)
    tables = (alpha, mask, cu_q, cu_k, batch, start)
    if plan.resident is not None:
        plan.resident(settled, q, k, v, target, target2, stats, *tables, seed)
    if plan.roots is not None and plan.output is not None:
        plan.roots(settled, q, k, stats, live, maxima, lists, counts, *tables)
        plan.output(settled, q, k, v, target, target2, stats, lists, counts, *tables, seed)
    if target is not out:
        out.copy_(target)
        if out2 is not None:
            out2.copy_(target2)
    if plan.poison is not None:
        plan.poison(settled, cu_q, cu_k, out)
    return out, out2, stats, live


def _plan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    alpha: Tensor | None,
    key_mask: Tensor | None,
    cu_q: Tensor | None,
    seed: Tensor | None,
    options: Options,
    with_gradient: bool,
    with_support: bool,
    longest_k: int,
) -> ForwardPlan:
    """What the kernels are told besides tensors, in the order of their parameters, and their constants."""
    layout = layout_of(q, k, alpha, key_mask, cu_q, seed, options)
    packed, heads = layout.packed, q.size(1)
    config = attention_config(q, seed is not None)
    simple = is_simple(
        None if alpha is not None else options.constant, options.causal, options.window, seed is not None
    )
    resident = is_resident(q, longest_k, options.window, simple)
    short = not resident and is_short(q, longest_k, options.window)
    walked = config.short_rows if short and not with_gradient else config.rows
    rows = config.resident_rows if resident else walked
    tiles = row_tiles(q, rows, layout.batch, packed)
    live = live_shape(q, layout.batch, longest_k, packed, options.window, simple)
    most = span(rows, longest_k, options.window)
    blocks = most // config.keys + 2
    programs = tiles * heads
    scratch = None
    if not (resident or short):
        programs = min(programs, config.programs * _turns(blocks) * _processors(q.device))
        scratch = live, (programs, blocks, rows), (heads, tiles, blocks), (heads, tiles)
    copies = not all(is_readable(tensor) for tensor in (q, k, v, out))
    stats = (4, *stats_shape(q, packed))
    if q.numel() == 0:
        return ForwardPlan(stats, scratch, copies)
    tables = Tables(layout.batch, tiles, rows) if packed else None
    # elsewhere the host has looked
    checked = poison(layout.batch, q.size(0), k.size(0), longest_k, q.numel()) if packed else None
    place = (stats, scratch, copies, tables, checked)
    strides = [stride for tensor in (q, k, v, out) for stride in read_strides(tensor, packed)]
    numbers = (*layout.sizes, 0 if packed else tiles // layout.batch, *layout.scalars)
    flags = {**layout.flags, "BLOCK_M": rows, "PRECISION": config.precision}
    made = {"GRADIENT": with_gradient, "SUPPORT": with_support}
    root = {"TOLERANCE": tolerance(q.dtype), "NEAR": nearness(q.dtype)}
    if resident:
        own = {"BLOCK_N": power_of_two(most), **made, **root}
        launched = {"num_warps": resident_warps(config, layout.flags["KIND"]), "num_stages": 1}
        step = Step(resident_kernel, (tiles, heads, 1), (*strides, *numbers), {**flags, **own, **launched})
        return ForwardPlan(*place, step)
    flags |= {"LISTS": not short, "BLOCK_N": config.keys, "num_stages": config.forward_stages}
    capped = caps(config, layout.flags["KIND"], seed is not None)
    flags["num_warps"], narrow = config.num_warps, capped.registers
    if rows != config.rows:
        flags["num_warps"], narrow = config.short_warps, capped.short_registers
    return ForwardPlan(
        *place,
        None,
        Step(
            roots_kernel,
            (programs, 1, 1),
            (*strides[:6], *numbers, tiles, blocks, live[2]),
            {**flags, "WIDTH": 16 if blocks <= 18 else 32, "maxnreg": narrow, **root},
        ),
        Step(
            output_kernel,
            (tiles, heads, 1),
            (*strides, *numbers, tiles, blocks),
            {**flags, **made, "maxnreg": capped.wide_registers if with_gradient else narrow},
        ),
    )
