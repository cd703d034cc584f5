"""The token scatter and its gradient, with one program instance per sequence and O(S) work.

No float is added or compared in a race, so results do not depend on the order of the threads.

All tokens with the same id share a slot. To choose it, each token writes its position to the id's
entry of a table. One of these writes is the last, and the slot of that token is the shared one. It
does not matter which token it is, since all read the same position. The table needs no clearing,
because entries are written before they are read. It uses the memory of the scores, and every entry
that was used is overwritten by its score at the end.

At the slot, integer atomics reduce the tokens in any order: a maximum of (weight, lowest token) as
int64 keys, or a sum of weights in int64 fixed point, in a unit that follows from the largest weight
of the slot.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilefold.ops._shared._triton.activation import activate, gradient_from_logit

LOWEST = tl.constexpr(-(2**63))


@triton.jit
def span_of(cu_ptr, b, B, S, T, PACKED: tl.constexpr, SCAN: tl.constexpr):
    """Return the first token and the length of a sequence, and whether all offsets are valid.

    The length is 0 if the offsets are not valid.

    Args:
        cu_ptr: offsets ``[B + 1]``, if PACKED.
        b: the sequence.
        B: number of sequences.
        S: length of padded sequences.
        T: number of tokens.
        PACKED: whether the batch is packed.
        SCAN: offsets that are read at a time.
    """
    if PACKED:
        offsets_valid = (tl.load(cu_ptr) == 0) & (tl.load(cu_ptr + B) == T)
        for b0 in range(0, B, SCAN):
            i = b0 + tl.arange(0, SCAN)
            begin = tl.load(cu_ptr + i, mask=i < B, other=0).to(tl.int64)
            end = tl.load(cu_ptr + 1 + i, mask=i < B, other=0).to(tl.int64)
            offsets_valid = offsets_valid & (tl.min(end - begin) >= 0)
        start = tl.load(cu_ptr + b).to(tl.int64)
        length = tl.load(cu_ptr + b + 1).to(tl.int64) - start
        return start, tl.where(offsets_valid, length, 0).to(tl.int32), offsets_valid
    else:
        # S = 0 is never launched. The assumption saves a guard of the loops over tokens.
        tl.assume(S > 0)
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
    """Load a block of tokens of a sequence.

    Args:
        weights_ptr: weights of all tokens.
        ids_ptr: ids of all tokens.
        mask_ptr: mask of all tokens, if HAS_MASK.
        start: first token of the sequence.
        s: positions in the sequence.
        length: length of the sequence.
        V: size of the vocabulary.
        IGNORE: ids of tokens that do not count.
        IGNORED: number of these ids.
        HAS_MASK: whether there is a mask.

    Returns:
        Weights (fp32), ids, which tokens are valid, and which of these have an id in the
        vocabulary.
    """
    inside = s < length
    weight = tl.load(weights_ptr + start + s, mask=inside, other=0.0).to(tl.float32)
    token_id = tl.load(ids_ptr + start + s, mask=inside, other=0).to(tl.int64)
    valid = inside
    if HAS_MASK:
        valid = valid & (tl.load(mask_ptr + start + s, mask=inside, other=0) != 0)
    for i in tl.static_range(IGNORED):
        valid = valid & (token_id != IGNORE[i])
    return weight, token_id, valid, valid & (token_id >= 0) & (token_id < V)


@triton.jit
def order_key(weight, s):
    """Return int64 keys whose maximum is the token with the largest weight.

    Among equal weights the token with the lowest position has the largest key. NaN is larger than
    all numbers, and both zeros are equal.

    Args:
        weight: weights of the tokens.
        s: their positions.
    """
    weight = tl.where(weight == 0.0, 0.0, weight)
    bits = weight.to(tl.int32, bitcast=True)
    rank = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    rank = tl.where(weight == weight, rank, 0x7FFFFFFF)
    return (rank.to(tl.int64) << 32) | (0x7FFFFFFF - s).to(tl.int64)


@triton.jit
def exponent_above(bits):
    """Return the smallest e with ``x < 2^e``, at least -126.

    Args:
        bits: bits of a finite fp32 number ``x >= 0``.
    """
    return (bits >> 23) - 126


@triton.jit
def scale_of(count, largest):
    """Return the e for which a sum is less than ``2^(62 - e)``.

    Args:
        count: number of terms.
        largest: bits of a number that no term exceeds.
    """
    count_bits = count.to(tl.float32).to(tl.int32, bitcast=True)
    return 62 - exponent_above(count_bits) - exponent_above(largest)


@triton.jit
def power_of_two(e):
    """Return ``2^e`` in fp64, for -1022 <= e <= 1023."""
    return ((e + 1023).to(tl.int64) << 52).to(tl.float64, bitcast=True)


@triton.jit
def kind_of(x):
    """Return 1 for NaN, 2 for infinity, 4 for minus infinity, and 0 for other numbers."""
    return tl.where(x != x, 1, tl.where(x == float("inf"), 2, tl.where(x == float("-inf"), 4, 0)))


@triton.jit
def sum_of_kinds(kinds, total):
    """Return the sum of terms of which some may be infinite or NaN.

    Args:
        kinds: all :func:`kind_of` of the terms, combined by "or".
        total: sum of the other terms.
    """
    infinite = tl.where(kinds == 2, float("inf"), tl.where(kinds == 4, float("-inf"), float("nan")))
    return tl.where(kinds == 0, total, infinite)


@triton.jit
def as_table(ptr):
    """Return a pointer to numbers as one to integers of the same size, which can hold positions."""
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
    slot_position_ptr,
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
    """Compute the scores of a sequence: the largest weight, or the sum of the weights, of each id.

    All tokens with the same id share a slot, the one of the token whose write to the table came
    last. Integer atomics reduce the tokens there, which gives the same result in any order.
    Instance b handles sequence b.

    Args:
        weights_ptr: weights ``[B, S]`` or ``[T]``.
        ids_ptr: ids, in the same shape.
        mask_ptr: mask ``[B, S]``, if HAS_MASK.
        cu_ptr: offsets ``[B + 1]``, if PACKED.
        out_ptr: scores ``[B, V]``, zeros before; written.
        table_ptr: table of positions ``[B, V]``, which may be the scores' memory.
        slot_ptr: int64 slot of each token: its key, or its sum.
        slot_position_ptr: int32 position of the slot that each token uses. With SUM, two more
            numbers per token follow: kinds and largest values.
        counted_ptr: uint8, which tokens have a gradient; written if WITH_COUNTED.
        B: number of sequences.
        S: length of padded sequences.
        T: number of tokens.
        V: number of columns.
        SUM: whether weights are summed; otherwise the largest is taken.
        ACTIVATION: activation of the weights.
        IGNORE: ids of tokens that do not count.
        IGNORED: number of these ids.
        HAS_MASK: whether there is a mask.
        PACKED: whether the batch is packed.
        WITH_COUNTED: whether a backward pass follows.
        BLOCK: tokens that are read at a time.
        SCAN: offsets that are read at a time.
    """
    b = tl.program_id(0).to(tl.int64)
    start, length, offsets_valid = span_of(cu_ptr, b, B, S, T, PACKED, SCAN)
    table_ptr = as_table(table_ptr)
    kind_ptr = slot_position_ptr + T  # used by sums
    largest_ptr = kind_ptr + T  # 2 * T may exceed 32 bits
    row = b * V

    # Step 1: every token writes its position to the table, at its id, and clears its slot.
    is_broken = tl.zeros((BLOCK,), tl.int32) + (offsets_valid == 0).to(tl.int32)
    for s0 in range(0, length, BLOCK):
        s = s0 + tl.arange(0, BLOCK)
        weight, token_id, valid, in_vocabulary = load_tokens(
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
        is_broken |= (valid & (in_vocabulary == 0)).to(tl.int32)
        tl.store(table_ptr + row + token_id, s.to(table_ptr.dtype.element_ty), mask=in_vocabulary)
        if SUM:
            tl.store(slot_ptr + start + s, tl.zeros((BLOCK,), tl.int64), mask=s < length)
            tl.store(kind_ptr + start + s, tl.zeros((BLOCK,), tl.int32), mask=s < length)
            tl.store(largest_ptr + start + s, tl.zeros((BLOCK,), tl.int32), mask=s < length)
        else:
            tl.store(slot_ptr + start + s, tl.full((BLOCK,), LOWEST, tl.int64), mask=s < length)
    is_broken = tl.max(is_broken)
    tl.debug_barrier()

    # Step 2: tokens are reduced at the slots by integer atomics, in any order.
    for s0 in range(0, length, BLOCK):
        s = s0 + tl.arange(0, BLOCK)
        weight, token_id, valid, in_vocabulary = load_tokens(
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
        slot_position = tl.load(
            table_ptr + row + token_id, mask=in_vocabulary, other=0, cache_modifier=".cg"
        ).to(tl.int32)
        tl.store(slot_position_ptr + start + s, slot_position, mask=in_vocabulary)
        if SUM:
            value = activate(weight, ACTIVATION)
            kind = kind_of(value)
            # Bits of numbers that are not negative are in the order of the numbers.
            magnitude = tl.where(kind == 0, tl.abs(value), 0.0).to(tl.int32, bitcast=True)
            tl.atomic_max(
                largest_ptr + start + slot_position,
                magnitude,
                mask=in_vocabulary & (magnitude != 0),
                sem="relaxed",
            )
            tl.atomic_or(
                kind_ptr + start + slot_position,
                kind,
                mask=in_vocabulary & (kind != 0),
                sem="relaxed",
            )
        else:
            tl.atomic_max(
                slot_ptr + start + slot_position,
                order_key(weight, s),
                mask=in_vocabulary,
                sem="relaxed",
            )
    tl.debug_barrier()
    if SUM:
        # The terms of a sum are added in units of 2^-scale, so that length * largest < 2^62 units.
        for s0 in range(0, length, BLOCK):
            s = s0 + tl.arange(0, BLOCK)
            weight, token_id, valid, in_vocabulary = load_tokens(
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
            slot_position = tl.load(slot_position_ptr + start + s, mask=in_vocabulary, other=0)
            largest = tl.load(
                largest_ptr + start + slot_position,
                mask=in_vocabulary,
                other=0,
                cache_modifier=".cg",
            )
            value = activate(weight, ACTIVATION)
            number = tl.where(kind_of(value) == 0, value, 0.0).to(tl.float64)
            units = (number * power_of_two(scale_of(length, largest))).to(tl.int64)
            tl.atomic_add(
                slot_ptr + start + slot_position, units, mask=in_vocabulary, sem="relaxed"
            )
        tl.debug_barrier()

    # Step 3: one token of each id writes its score.
    for s0 in range(0, length, BLOCK):
        s = s0 + tl.arange(0, BLOCK)
        weight, token_id, valid, in_vocabulary = load_tokens(
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
        slot_position = tl.load(slot_position_ptr + start + s, mask=in_vocabulary, other=0)
        slot = tl.load(
            slot_ptr + start + slot_position, mask=in_vocabulary, other=0, cache_modifier=".cg"
        )
        if SUM:
            kinds = tl.load(
                kind_ptr + start + slot_position, mask=in_vocabulary, other=0, cache_modifier=".cg"
            )
            largest = tl.load(
                largest_ptr + start + slot_position,
                mask=in_vocabulary,
                other=0,
                cache_modifier=".cg",
            )
            total = (slot.to(tl.float64) * power_of_two(-scale_of(length, largest))).to(tl.float32)
            value = sum_of_kinds(kinds, total)
            writes = in_vocabulary & (slot_position == s)
            counted = in_vocabulary
        else:
            value = activate(weight, ACTIVATION)
            value = tl.where(value <= 0.0, 0.0, value)
            writes = in_vocabulary & (slot == order_key(weight, s))
            counted = writes & (value != 0.0)
        tl.store(out_ptr + row + token_id, value.to(out_ptr.dtype.element_ty), mask=writes)
        if WITH_COUNTED:
            tl.store(counted_ptr + start + s, counted.to(tl.uint8), mask=s < length)

    if is_broken != 0:  # invalid ids or offsets must not yield plausible scores
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
    """Compute the gradients of the weights from those of the scores.

    A token that counted gets ``dscores[b, id] * act'(weight)``.

    Tokens that did not count get 0. Instance ``(b, j)`` handles every ``num_programs(1)``-th block
    of the tokens of sequence b.

    Args:
        dscores_ptr: gradient of the scores ``[B, V]``, with strides ``stride_db`` and
            ``stride_dv``.
        weights_ptr: weights ``[B, S]`` or ``[T]``.
        ids_ptr: ids, in the same shape.
        counted_ptr: uint8, which tokens have a gradient.
        cu_ptr: offsets ``[B + 1]``, if PACKED.
        dweights_ptr: gradient in the shape of the weights; written.
        B: number of sequences.
        S: length of padded sequences.
        T: number of tokens.
        ACTIVATION: activation of the weights.
        PACKED: whether the batch is packed.
        BLOCK: tokens that are read at a time.
        SCAN: offsets that are read at a time.
    """
    b = tl.program_id(0).to(tl.int64)
    start, length, offsets_valid = span_of(cu_ptr, b, B, S, T, PACKED, SCAN)
    for s0 in range(tl.program_id(1) * BLOCK, length, tl.num_programs(1) * BLOCK):
        s = s0 + tl.arange(0, BLOCK)
        inside = s < length
        counted = tl.load(counted_ptr + start + s, mask=inside, other=0) != 0
        weight = tl.load(weights_ptr + start + s, mask=inside, other=0.0).to(tl.float32)
        token_id = tl.load(ids_ptr + start + s, mask=inside, other=0).to(tl.int64)
        grad = tl.load(
            dscores_ptr + b * stride_db + token_id * stride_dv, mask=counted, other=0.0
        ).to(
            tl.float32,
        )
        grad = tl.where(counted, gradient_from_logit(grad, weight, ACTIVATION), 0.0)
        tl.store(dweights_ptr + start + s, grad.to(dweights_ptr.dtype.element_ty), mask=inside)
    # Invalid offsets must not yield plausible gradients.
    if PACKED:  # noqa: SIM102
        if (offsets_valid == 0) & (b == 0) & (tl.program_id(1) == 0):
            for t0 in range(0, T, BLOCK):
                t = t0 + tl.arange(0, BLOCK)
                nan = tl.full((BLOCK,), float("nan"), tl.float32)
                tl.store(dweights_ptr + t, nan.to(dweights_ptr.dtype.element_ty), mask=t < T)
