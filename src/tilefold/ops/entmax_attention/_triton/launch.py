"""Launcher of the forward kernels: what they are told, the memory that they write, and which of them run."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tilefold.ops._shared._triton.launch import Step
from tilefold.ops._shared._triton.tensors import Scratch, power_of_two, sm_count
from tilefold.ops._shared.impl import triton_interpreted
from tilefold.ops._shared.internals import hooked
from tilefold.ops.entmax_attention._problem import AttentionTensors, Options
from tilefold.ops.entmax_attention._triton.forward import output_kernel, resident_kernel
from tilefold.ops.entmax_attention._triton.layout import (
    is_readable,
    layout_of,
    outline,
    packed_densely,
    read_strides,
    readable,
)
from tilefold.ops.entmax_attention._triton.packing import Tables, nan_if_broken
from tilefold.ops.entmax_attention._triton.roots import roots_kernel
from tilefold.ops.entmax_attention.configs import (
    attention_config,
    caps,
    is_resident,
    is_short,
    live_shape,
    nearness,
    resident_warps,
    row_tiles,
    short_rows,
    span,
    tolerance,
)

Forward = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]


def _processors(device: torch.device) -> int:
    """Multiprocessors that a persistent kernel fills; few where kernels are interpreted."""
    return 2 if triton_interpreted() else sm_count(device)


def _turns(blocks: int) -> int:
    """How many persistent programs follow each other in one place: more balance what tiles cost, and take scratch."""
    return max(1, min(4, 264 // blocks))


@dataclass(frozen=True)
class ForwardPlan:
    """How a call is launched, but for its tensors.

    Attributes:
        aligned: whether q, k, v and whatever is given besides begin at multiples of 16 bytes.
        with_gradient: whether what delta is made from is kept.
        stats: memory of the statistics; ``None`` where nobody reads them.
        scratch: that of the map of live blocks, the maxima, the lists and their lengths; ``None`` without a map.
        copies: whether q, k, v or the output must be copied for the kernels.
        tables: of a packed batch, and
        nan_if_broken: what becomes of its output if the offsets are broken.
        resident: the one kernel of short rows, or
        roots, output: the two of others. All ``None`` where there is no query.
    """

    aligned: bool
    with_gradient: bool
    stats: Scratch | None
    scratch: tuple[Scratch, Scratch, Scratch, Scratch] | None
    copies: bool
    tables: Tables | None = None
    nan_if_broken: Step | None = None
    resident: Step | None = None
    roots: Step | None = None
    output: Step | None = None


def forward(plan: ForwardPlan, tensors: AttentionTensors) -> Forward:
    """Output, what delta is made from (if a gradient is asked for), statistics and the map of live blocks (if any).

    ``tensors`` are like those that the plan was made for.
    """
    q, k, v, alpha, mask, cu_q, cu_k, seed = tensors
    out = torch.empty_like(q)
    out2 = torch.empty_like(q) if plan.with_gradient else None
    stats = None if plan.stats is None else plan.stats()
    live = maxima = lists = counts = None
    if plan.scratch is not None:
        live, maxima, lists, counts = (memory() for memory in plan.scratch)
    if alpha is not None or mask is not None or cu_q is not None:
        alpha, mask, cu_q, cu_k = packed_densely(alpha, mask, cu_q, cu_k)
    target, target2 = out, out if out2 is None else out2
    if plan.copies:
        q, k, v = readable(q), readable(k), readable(v)
        if not is_readable(out):  # like q, so only a strange q needs a copy back
            target, target2 = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (out, target2))
    same = plan.aligned and not hooked()
    batch = start = None
    if plan.tables is not None:
        batch, start, _, _ = plan.tables(same, cu_q, cu_k)
    tables = (alpha, mask, cu_q, cu_k, batch, start)
    if plan.resident is not None:
        plan.resident(same, q, k, v, target, target2, stats, *tables, seed)
    elif plan.roots is not None and plan.output is not None:
        plan.roots(same, q, k, stats, live, maxima, lists, counts, *tables)
        plan.output(same, q, k, v, target, target2, stats, lists, counts, *tables, seed)
    if target is not out:
        out.copy_(target)
        if out2 is not None:
            out2.copy_(target2)
    if plan.nan_if_broken is not None:
        plan.nan_if_broken(same, cu_q, cu_k, out)
    return out, out2, stats, live


def plan_forward(
    tensors: AttentionTensors, options: Options, with_gradient: bool, with_support: bool, aligned: bool
) -> ForwardPlan:
    """How calls with tensors like these are launched."""
    q, k, v, out = tensors.q, tensors.k, tensors.v, outline(tensors.q)
    layout = layout_of(tensors, options)
    config = attention_config(q, tensors.seed is not None)
    resident = is_resident(tensors, options)
    short = not resident and is_short(q, options)
    kind = layout.flags["KIND"]
    walked = short_rows(config, kind) if short and not with_gradient else config.rows
    rows = config.resident_rows if resident else walked
    tiles = row_tiles(q, rows, tensors)
    live = live_shape(tensors, options)
    longest = span(rows, options)
    blocks = longest // config.keys + 2
    programs = tiles * q.size(1)
    scratch = None
    if not (resident or short):
        programs = min(programs, config.programs * _turns(blocks) * _processors(q.device))
        shapes = live, (programs, blocks, rows), (q.size(1), tiles, blocks), (q.size(1), tiles)
        dtypes = torch.int32, torch.float32, torch.int32, torch.int32
        first, second, third, fourth = (Scratch(s, d, q.device) for s, d in zip(shapes, dtypes, strict=True))
        scratch = first, second, third, fourth
    copies = not all(is_readable(tensor) for tensor in (q, k, v, out))
    packed = tensors.packed
    stats = None
    if with_gradient or with_support or not resident:
        stats = Scratch((4, *tensors.stats_shape), torch.float32, q.device)
    place = (aligned, with_gradient, stats, scratch, copies)
    if q.numel() == 0:
        return ForwardPlan(*place)
    tables = Tables(layout.batch, tiles, rows) if packed else None
    # elsewhere the host has looked
    checked = nan_if_broken(tensors, options.max_seqlen_k) if packed else None
    strides = [stride for tensor in (q, k, v, out) for stride in read_strides(tensor, packed)]
    numbers = (*layout.sizes, 0 if packed else tiles // layout.batch, *layout.scalars)
    flags = {**layout.flags, "BLOCK_M": rows, "PRECISION": config.precision}
    made = {"GRADIENT": with_gradient, "SUPPORT": with_support}
    root = {"TOLERANCE": tolerance(q.dtype), "NEAR": nearness(q.dtype)}
    if resident:
        own = {"BLOCK_N": power_of_two(longest), **made, **root}
        launched = {"num_warps": resident_warps(config, kind), "num_stages": 1}
        step = Step(resident_kernel, (tiles, q.size(1), 1), (*strides, *numbers), {**flags, **own, **launched})
        return ForwardPlan(*place, tables, checked, step)
    flags |= {"LISTS": not short, "BLOCK_N": config.keys, "num_stages": config.forward_stages}
    capped = caps(config, kind, tensors.seed is not None)
    flags["num_warps"], narrow = config.num_warps, capped.registers
    if rows != config.rows:
        flags["num_warps"], narrow = config.short_warps, capped.short_registers
    return ForwardPlan(
        *place,
        tables,
        checked,
        None,
        Step(
            roots_kernel,
            (programs, 1, 1),
            (*strides[:6], *numbers, tiles, blocks, live[2]),
            {**flags, "WIDTH": 16 if blocks <= 18 else 32, "maxnreg": narrow, **root},
        ),
        Step(
            output_kernel,
            (tiles, q.size(1), 1),
            (*strides, *numbers, tiles, blocks),
            {**flags, **made, "maxnreg": capped.wide_registers if with_gradient else narrow},
        ),
    )
