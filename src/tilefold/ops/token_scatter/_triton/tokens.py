"""Device functions on the tokens of one sequence: where they lie, which are valid, how weights compare and add up."""

import triton
import triton.language as tl


@triton.jit
def span_of(cu_ptr, b, B, S, T, PACKED: tl.constexpr, SCAN: tl.constexpr):
    """First token and length of sequence b; and whether the offsets of the batch make sense (length 0 if not)."""
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
        tl.assume(S > 0)  # the launchers see to it: the loops over tokens need no guard, whose predicate was spilled
        return b * S, S, S > 0


@triton.jit
def load_tokens(
    weights_ptr, ids_ptr, mask_ptr, start, s, length, V,
    IGNORE: tl.constexpr, IGNORED: tl.constexpr, HAS_MASK: tl.constexpr,
):  # fmt: skip
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
    """The least e with ``x < 2^e``, of the bits of a finite ``x >= 0`` in fp32 (-126 for what is smaller still)."""
    return (bits >> 23) - 126


@triton.jit
def scale_of(count, peak):
    """The e for which ``count`` terms, none larger than the one with these bits, add up to less than ``2^(62 - e)``."""
    return 62 - exponent_above(count.to(tl.float32).to(tl.int32, bitcast=True)) - exponent_above(peak)


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
