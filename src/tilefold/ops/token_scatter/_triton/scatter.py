"""The scatter and its gradient: one program per sequence, work O(S), and no float is ever added or
compared in a race.

All tokens with the same id must meet somewhere. Each writes its position to the id's place in a
table; whichever write lasts names the meeting point, a slot beside that token. It does not matter
which it is, since all read the same, and a table whose places are written before they are read
needs no clearing: the scores' own memory serves, and each place that was used is overwritten by its
score in the end. At the slot, integer atomics settle the rest in any order: a maximum of (weight,
lowest token) as int64 keys, or a sum of weights in int64 fixed point, whose unit is that of the
largest weight that meets there.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilefold.ops._shared._triton.activation import activate, slope_from_logit

LOWEST = tl.constexpr(-(2**63))


@triton.jit
def span_of(cu_ptr, b, B, S, T, PACKED: tl.constexpr, SCAN: tl.constexpr):
    """First token and length of sequence b; and whether the offsets of the batch make sense (length
    0 if not).
    """
    if PACKED:
        ok = (tl.load(cu_ptr) == 0) & (tl.load(cu_ptr + B) == T)
        for b0 in range(0, B, SCAN):
            i = b0 + tl.arange(0, SCAN)
            begin = tl.load(cu_ptr + i, mask=i < B, other=0).to(tl.int64)
            end = tl.load(cu_ptr + 1 + i, mask=i < B, other=0).to(tl.int64)
            ok = ok & (tl.min(end - begin) >= 0)
        start = tl.load(cu_ptr + b).to(tl.int64)
        length = tl.load(cu_ptr + b + 1).to(tl.int64) - start
        return start, tl.where(ok, length, 0).to(tl.int32), ok
    else:
        tl.assume(
            S > 0,
        )  # the launchers see to it: the loops over tokens need no guard, whose predicate was spilled
        return b * S, S, S > 0


@triton.jit
def load_tokens(
    weights_ptr,
    ids_ptr,
    mask_ptr,
    start,
    s,
    length,
    V,
    IGNORE: tl.constexpr,
    IGNORED: tl.constexpr,
    HAS_MASK: tl.constexpr,
):
    """Weights (fp32), ids, valid tokens, and the valid ones whose id lies in the vocabulary."""
    inside = s < length
    weight = tl.load(weights_ptr + start + s, mask=inside, other=0.0).to(tl.float32)
    entry = tl.load(ids_ptr + start + s, mask=inside, other=0).to(tl.int64)
    valid = inside
    if HAS_MASK:
        valid = valid & (tl.load(mask_ptr + start + s, mask=inside, other=0) != 0)
    for i in tl.static_range(IGNORED):
        valid = valid & (entry != IGNORE[i])
    return weight, entry, valid, valid & (entry >= 0) & (entry < V)


@triton.jit
def order_key(weight, s):
    """int64 keys that rank as (weight, then the lowest token) does: NaN first, the two zeros equal."""
    weight = tl.where(weight == 0.0, 0.0, weight)
    bits = weight.to(tl.int32, bitcast=True)
    rank = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    rank = tl.where(weight == weight, rank, 0x7FFFFFFF)
    return (rank.to(tl.int64) << 32) | (0x7FFFFFFF - s).to(tl.int64)


@triton.jit
def exponent_above(bits):
    """The least e with ``x < 2^e``, of the bits of a finite ``x >= 0`` in fp32 (-126 for what is
    smaller still).
    """
    return (bits >> 23) - 126


@triton.jit
def scale_of(count, peak):
    """The e for which ``count`` terms, none larger than the one with these bits, add up to less
    than ``2^(62 - e)``.
    """
    return (
        62 - exponent_above(count.to(tl.float32).to(tl.int32, bitcast=True)) - exponent_above(peak)
    )


@triton.jit
def power_of_two(e):
    """``2^e`` in fp64, -1022 <= e <= 1023."""
    return ((e + 1023).to(tl.int64) << 52).to(tl.float64, bitcast=True)


@triton.jit
def kind_of(x):
    """1 for NaN, 2 for infinity, 4 for minus infinity, 0 for numbers."""
    return tl.where(x != x, 1, tl.where(x == float("inf"), 2, tl.where(x == float("-inf"), 4, 0)))


@triton.jit
def sum_of_kinds(kinds, total):
    """Sum of terms that have these kinds together, ``total`` being that of its numbers."""
    infinite = tl.where(kinds == 2, float("inf"), tl.where(kinds == 4, float("-inf"), float("nan")))
    return tl.where(kinds == 0, total, infinite)


@triton.jit
def as_table(ptr):
    """Memory of numbers as one of integers of their size, which hold positions."""
    if ptr.dtype.element_ty.primitive_bitwidth == 16:
        ptr = ptr.to(tl.pointer_type(tl.uint16))
    elif ptr.dtype.element_ty.primitive_bitwidth == 32:
        ptr = ptr.to(tl.pointer_type(tl.int32))
    else:
        ptr = ptr.to(tl.pointer_type(tl.int64))
    return ptr


@triton.jit(do_not_specialize=["B", "S", "T"])
def scatter_kernel(
    weights_ptr,
    ids_ptr,
    mask_ptr,
    cu_ptr,
    out_ptr,
    table_ptr,
    slot_ptr,
    meet_ptr,
    counted_ptr,
    B,
    S,
    T,
    V,
    SUM: tl.constexpr,
    ACTIVATION: tl.constexpr,
    IGNORE: tl.constexpr,
    IGNORED: tl.constexpr,
    HAS_MASK: tl.constexpr,
    PACKED: tl.constexpr,
    WITH_COUNTED: tl.constexpr,
    BLOCK: tl.constexpr,
    SCAN: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    start, length, ok = span_of(cu_ptr, b, B, S, T, PACKED, SCAN)
    table_ptr = as_table(table_ptr)
    kind_ptr = meet_ptr + T  # used by sums
    peak_ptr = kind_ptr + T  # 2 * T may exceed 32 bits
    row = b * V

    # 1. every token proposes a meeting point and clears its slot
    broken = tl.zeros((BLOCK,), tl.int32) + (ok == 0).to(tl.int32)
    for s0 in range(0, length, BLOCK):
        s = s0 + tl.arange(0, BLOCK)
        weight, entry, valid, known = load_tokens(
            weights_ptr,
            ids_ptr,
            mask_ptr,
            start,
            s,
            length,
            V,
            IGNORE,
            IGNORED,
            HAS_MASK,
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
            weights_ptr,
            ids_ptr,
            mask_ptr,
            start,
            s,
            length,
            V,
            IGNORE,
            IGNORED,
            HAS_MASK,
        )
        meet = tl.load(table_ptr + row + entry, mask=known, other=0, cache_modifier=".cg").to(
            tl.int32,
        )
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
                weights_ptr,
                ids_ptr,
                mask_ptr,
                start,
                s,
                length,
                V,
                IGNORE,
                IGNORED,
                HAS_MASK,
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
            weights_ptr,
            ids_ptr,
            mask_ptr,
            start,
            s,
            length,
            V,
            IGNORE,
            IGNORED,
            HAS_MASK,
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
def gather_kernel(
    dscores_ptr,
    weights_ptr,
    ids_ptr,
    counted_ptr,
    cu_ptr,
    dweights_ptr,
    B,
    S,
    T,
    stride_db,
    stride_dv,
    ACTIVATION: tl.constexpr,
    PACKED: tl.constexpr,
    BLOCK: tl.constexpr,
    SCAN: tl.constexpr,
):
    """``dweights[b, s] = dscores[b, id] * act'(weight)`` where token s counted, else 0."""
    b = tl.program_id(0).to(tl.int64)
    start, length, ok = span_of(cu_ptr, b, B, S, T, PACKED, SCAN)
    for s0 in range(tl.program_id(1) * BLOCK, length, tl.num_programs(1) * BLOCK):
        s = s0 + tl.arange(0, BLOCK)
        inside = s < length
        counted = tl.load(counted_ptr + start + s, mask=inside, other=0) != 0
        weight = tl.load(weights_ptr + start + s, mask=inside, other=0.0).to(tl.float32)
        entry = tl.load(ids_ptr + start + s, mask=inside, other=0).to(tl.int64)
        grad = tl.load(dscores_ptr + b * stride_db + entry * stride_dv, mask=counted, other=0.0).to(
            tl.float32,
        )
        grad = tl.where(counted, grad * slope_from_logit(weight, ACTIVATION), 0.0)
        tl.store(dweights_ptr + start + s, grad.to(dweights_ptr.dtype.element_ty), mask=inside)
    if PACKED:  # noqa: SIM102
        if (ok == 0) & (b == 0) & (tl.program_id(1) == 0):
            for t0 in range(0, T, BLOCK):
                t = t0 + tl.arange(0, BLOCK)
                nan = tl.full((BLOCK,), float("nan"), tl.float32)
                tl.store(dweights_ptr + t, nan.to(dweights_ptr.dtype.element_ty), mask=t < T)
