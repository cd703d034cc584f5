"""The scatter and its gradient: one program per sequence, work O(S), and no float is ever added or compared in a race.

All tokens with the same id must meet somewhere. Each writes its position to the id's place in a table; whichever
write lasts names the meeting point, a slot beside that token. It does not matter which it is, since all read the same,
and a table whose places are written before they are read needs no clearing: the scores' own memory serves, and
each place that was used is overwritten by its score in the end. At the slot, integer atomics settle the rest in
any order: a maximum of (weight, lowest token) as int64 keys, or a sum of weights in int64 fixed point, whose unit is
that of the largest weight that meets there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilefold.ops._shared._triton.activation import activate, slope_from_logit
from tilefold.ops._shared._triton.launch import Step, aligned
from tilefold.ops._shared._triton.tensors import as_bytes, contiguous
from tilefold.ops._shared.internals import hooked
from tilefold.ops.token_scatter._problem import Problem, batch_size
from tilefold.ops.token_scatter._triton.tokens import (
    kind_of,
    load_tokens,
    order_key,
    power_of_two,
    scale_of,
    span_of,
    sum_of_kinds,
)
from tilefold.ops.token_scatter.configs import scatter_config

SCAN = 256  # offsets that are checked at a time
LOWEST = tl.constexpr(-(2**63))
# positions of a sequence fit the memory of a 16-bit score up to here
UINT16_POSITIONS = 1 << 16
_TABLE_DTYPES = {2: torch.uint16, 4: torch.int32, 8: torch.int64}


@triton.jit(do_not_specialize=["B", "S", "T"])
def _scatter_kernel(
    weights_ptr, ids_ptr, mask_ptr, cu_ptr, out_ptr, table_ptr, slot_ptr, meet_ptr, counted_ptr, B, S, T, V,
    SUM: tl.constexpr, ACTIVATION: tl.constexpr, IGNORE: tl.constexpr, IGNORED: tl.constexpr, HAS_MASK: tl.constexpr,
    PACKED: tl.constexpr, WITH_COUNTED: tl.constexpr, BLOCK: tl.constexpr, SCAN: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    start, length, ok = span_of(cu_ptr, b, B, S, T, PACKED, SCAN)
    kind_ptr, peak_ptr = meet_ptr + T, meet_ptr + 2 * T  # used by sums
    row = b * V

    # 1. every token proposes a meeting point and clears its slot
    broken = tl.zeros((BLOCK,), tl.int32) + (ok == 0).to(tl.int32)
    for s0 in range(0, length, BLOCK):
        s = s0 + tl.arange(0, BLOCK)
        weight, entry, valid, known = load_tokens(
            weights_ptr, ids_ptr, mask_ptr, start, s, length, V, IGNORE, IGNORED, HAS_MASK
        )
        broken |= (valid & (known == 0)).to(tl.int32)
        tl.store(table_ptr + row + entry, s.to(table_ptr.dtype.element_ty), mask=known)
        if SUM:
            tl.store(slot_ptr + start + s, tl.zeros((BLOCK,), tl.int64), mask=s < length)
            tl.store(kind_ptr + start + s, tl.zeros((BLOCK,), tl.int32), mask=s < length)
            tl.store(peak_ptr + start + s, tl.zeros((BLOCK,), tl.int32), mask=s < length)
        else:
            tl.store(slot_ptr + start + s, tl.full((BLOCK,), LOWEST, tl.int64), mask=s < length)
    broken = tl.max(broken)
    tl.debug_barrier()

    # 2. they meet: integer atomics, so that no order can be seen
    for s0 in range(0, length, BLOCK):
        s = s0 + tl.arange(0, BLOCK)
        weight, entry, valid, known = load_tokens(
            weights_ptr, ids_ptr, mask_ptr, start, s, length, V, IGNORE, IGNORED, HAS_MASK
        )
        meet = tl.load(table_ptr + row + entry, mask=known, other=0, cache_modifier=".cg").to(tl.int32)
        tl.store(meet_ptr + start + s, meet, mask=known)
        if SUM:
            value = activate(weight, ACTIVATION)
            kind = kind_of(value)
            # the bits of numbers without a sign rank as they do
            size = tl.where(kind == 0, tl.abs(value), 0.0).to(tl.int32, bitcast=True)
            tl.atomic_max(peak_ptr + start + meet, size, mask=known & (size != 0), sem="relaxed")
            tl.atomic_or(kind_ptr + start + meet, kind, mask=known & (kind != 0), sem="relaxed")
        else:
            tl.atomic_max(slot_ptr + start + meet, order_key(weight, s), mask=known, sem="relaxed")
    tl.debug_barrier()
    if SUM:
        # terms of one sum are added up in units of 2^-scale, in which length * largest < 2^62
        for s0 in range(0, length, BLOCK):
            s = s0 + tl.arange(0, BLOCK)
            weight, entry, valid, known = load_tokens(
                weights_ptr, ids_ptr, mask_ptr, start, s, length, V, IGNORE, IGNORED, HAS_MASK
            )
            meet = tl.load(meet_ptr + start + s, mask=known, other=0)
            peak = tl.load(peak_ptr + start + meet, mask=known, other=0, cache_modifier=".cg")
            value = activate(weight, ACTIVATION)
            number = tl.where(kind_of(value) == 0, value, 0.0).to(tl.float64)
            units = (number * power_of_two(scale_of(length, peak))).to(tl.int64)
            tl.atomic_add(slot_ptr + start + meet, units, mask=known, sem="relaxed")
        tl.debug_barrier()

    # 3. one token of each id writes its score
    for s0 in range(0, length, BLOCK):
        s = s0 + tl.arange(0, BLOCK)
        weight, entry, valid, known = load_tokens(
            weights_ptr, ids_ptr, mask_ptr, start, s, length, V, IGNORE, IGNORED, HAS_MASK
        )
        meet = tl.load(meet_ptr + start + s, mask=known, other=0)
        slot = tl.load(slot_ptr + start + meet, mask=known, other=0, cache_modifier=".cg")
        if SUM:
            kinds = tl.load(kind_ptr + start + meet, mask=known, other=0, cache_modifier=".cg")
            peak = tl.load(peak_ptr + start + meet, mask=known, other=0, cache_modifier=".cg")
            total = (slot.to(tl.float64) * power_of_two(-scale_of(length, peak))).to(tl.float32)
            value = sum_of_kinds(kinds, total)
            writes = known & (meet == s)
            counted = known
        else:
            value = activate(weight, ACTIVATION)
            value = tl.where(value <= 0.0, 0.0, value)
            writes = known & (slot == order_key(weight, s))
            counted = writes & (value != 0.0)
        tl.store(out_ptr + row + entry, value.to(out_ptr.dtype.element_ty), mask=writes)
        if WITH_COUNTED:
            tl.store(counted_ptr + start + s, counted.to(tl.uint8), mask=s < length)

    if broken != 0:  # no plausible number where ids or offsets are broken
        tl.debug_barrier()
        for v0 in range(0, V, BLOCK):
            v = v0 + tl.arange(0, BLOCK)
            nan = tl.full((BLOCK,), float("nan"), tl.float32)
            tl.store(out_ptr + row + v, nan.to(out_ptr.dtype.element_ty), mask=v < V)


@triton.jit(do_not_specialize=["B", "S", "T"])
def _gather_kernel(
    dscores_ptr, weights_ptr, ids_ptr, counted_ptr, cu_ptr, dweights_ptr, B, S, T, stride_db, stride_dv,
    ACTIVATION: tl.constexpr, PACKED: tl.constexpr, BLOCK: tl.constexpr, SCAN: tl.constexpr,
):  # fmt: skip
    """``dweights[b, s] = dscores[b, id] * act'(weight)`` where token s counted, else 0."""
    b = tl.program_id(0).to(tl.int64)
    start, length, ok = span_of(cu_ptr, b, B, S, T, PACKED, SCAN)
    for s0 in range(tl.program_id(1) * BLOCK, length, tl.num_programs(1) * BLOCK):
        s = s0 + tl.arange(0, BLOCK)
        inside = s < length
        counted = tl.load(counted_ptr + start + s, mask=inside, other=0) != 0
        weight = tl.load(weights_ptr + start + s, mask=inside, other=0.0).to(tl.float32)
        entry = tl.load(ids_ptr + start + s, mask=inside, other=0).to(tl.int64)
        grad = tl.load(dscores_ptr + b * stride_db + entry * stride_dv, mask=counted, other=0.0).to(tl.float32)
        grad = tl.where(counted, grad * slope_from_logit(weight, ACTIVATION), 0.0)
        tl.store(dweights_ptr + start + s, grad.to(dweights_ptr.dtype.element_ty), mask=inside)
    if PACKED:  # noqa: SIM102
        if (ok == 0) & (b == 0) & (tl.program_id(1) == 0):
            for t0 in range(0, T, BLOCK):
                t = t0 + tl.arange(0, BLOCK)
                nan = tl.full((BLOCK,), float("nan"), tl.float32)
                tl.store(dweights_ptr + t, nan.to(dweights_ptr.dtype.element_ty), mask=t < T)


@dataclass(frozen=True)
class ForwardPlan:
    """How a scatter is launched, but for its tensors.

    Attributes:
        aligned: whether the tensors that are given begin at multiples of 16 bytes.
        scores: ``[B, V]``.
        counted: shape of what says which tokens the gradient goes to.
        table: shape of a table of positions, where the memory of the scores cannot hold them.
        places: how many int64 slots and int32 meeting points there are; sums keep two more numbers beside these.
        scatter: the kernel; ``None`` where there is no token.
    """

    aligned: bool
    scores: tuple[int, int]
    counted: tuple[int, ...]
    table: tuple[int, int] | None = None
    places: tuple[int, int] = (0, 0)
    scatter: Step | None = None


def plan_forward(problem: Problem, with_counted: bool, aligned: bool) -> ForwardPlan:
    """How scatters like this one are launched."""
    weights, vocab_size, batch = problem.weights, problem.vocab_size, problem.batch
    packed, sums, tokens = problem.cu_seqlens is not None, problem.reduce == "sum", weights.numel()
    shapes = ((batch, vocab_size), tuple(weights.shape) if with_counted else (0,))
    if batch == 0 or (tokens == 0 and not packed):
        return ForwardPlan(aligned, *shapes)
    length = 0 if packed else weights.size(1)
    bound = tokens if packed else length
    table = shapes[0] if bound > UINT16_POSITIONS and problem.out_dtype.itemsize == 2 else None
    config = scatter_config(bound, weights.device)
    constants = {
        "SUM": sums, "ACTIVATION": problem.activation, "IGNORE": tuple(problem.ignore_ids),
        "IGNORED": len(problem.ignore_ids), "HAS_MASK": problem.attention_mask is not None, "PACKED": packed,
        "WITH_COUNTED": with_counted, "BLOCK": config.block, "SCAN": SCAN, "num_warps": config.num_warps,
    }  # fmt: skip
    step = Step(_scatter_kernel, (batch, 1, 1), (batch, length, tokens, vocab_size), constants)
    return ForwardPlan(aligned, *shapes, table, (tokens, 3 * tokens if sums else tokens), step)


def forward(plan: ForwardPlan, problem: Problem) -> tuple[Tensor, Tensor]:
    """Scores ``[B, V]``, and which tokens the gradient goes to (uint8 like ``weights``; empty unless asked for)."""
    weights, out_dtype = problem.weights, problem.out_dtype
    scores = weights.new_zeros(plan.scores, dtype=out_dtype)
    counted = weights.new_empty(plan.counted, dtype=torch.uint8)
    if plan.scatter is None:
        return scores, counted
    if plan.table is None:
        table = scores.view(_TABLE_DTYPES[out_dtype.itemsize])
    else:
        table = weights.new_empty(plan.table, dtype=torch.int32)
    slots = weights.new_empty(plan.places[0], dtype=torch.int64)
    meets = weights.new_empty(plan.places[1], dtype=torch.int32)
    plan.scatter(
        plan.aligned and not hooked(),
        weights.contiguous(), problem.input_ids.contiguous(), as_bytes(problem.attention_mask),
        contiguous(problem.cu_seqlens), scores, table, slots, meets, counted,
    )  # fmt: skip
    return scores, counted


def plan_backward(dscores: Tensor, weights: Tensor, cu_seqlens: Tensor | None, activation: str) -> Step | None:
    """How gradients like this one are launched; ``None`` where there is no token."""
    tokens, batch, packed = weights.numel(), batch_size(weights, cu_seqlens), cu_seqlens is not None
    if batch == 0 or tokens == 0:
        return None
    length = 0 if packed else weights.size(1)
    config = scatter_config(tokens if packed else length, weights.device)
    # packed lengths are not known here: as many programs per sequence as the average one can use
    programs = max(1, min(16, tokens // (batch * config.block)))
    constants = {
        "ACTIVATION": activation, "PACKED": packed, "BLOCK": config.block, "SCAN": SCAN,
        "num_warps": config.num_warps,
    }  # fmt: skip
    return Step(_gather_kernel, (batch, programs, 1), (batch, length, tokens, *dscores.stride()), constants)


def backward(
    gather: Step | None, dscores: Tensor, weights: Tensor, input_ids: Tensor, counted: Tensor, cu_seqlens: Tensor | None
) -> Tensor:
    """The gradient of the weights: each token that counted takes that of its entry, times its slope."""
    dweights = weights.new_empty(weights.shape)
    if gather is not None:
        tensors = (dscores, weights.contiguous(), input_ids.contiguous(), counted, contiguous(cu_seqlens))
        gather(aligned(*tensors), *tensors, dweights)
    return dweights
