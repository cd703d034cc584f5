"""Forward: scores of a tile of rows on chip where they fit, else live blocks of keys, listed by a safe bound.

The block kernel's first pass over the keys leaves every row's maximum, and its maximum in every block, in scratch. The
root of those block maxima alone is, by the subset lemma, no smaller than the row's: a block none of whose rows has a
maximum inside that bound holds nothing but zeros. The root is then found on the blocks that are left, and the list is
cut down once more by the root itself, with the same comparison that makes a weight positive.
"""

import triton
import triton.language as tl

from tilefold.ops._shared._triton.activation import nan_max
from tilefold.ops._shared._triton.entmax import (
    MOST_EVALUATIONS,
    bracket,
    inverse_peak,
    next_root,
    row_peak,
    row_sums,
    weight,
    weight_and_slope,
)
from tilefold.ops.entmax_attention._triton.tiles import (
    alive,
    bounds,
    distances,
    dropout_factor,
    exponent,
    key_range,
    load_rows,
    locate,
    score_tile,
    store_rows,
)

SUBSET_STEPS = tl.constexpr(4)  # of Newton on block maxima: each is a safe bound, the fourth a sharp one


@triton.jit
def start_row(best, e, given, keys, KIND: tl.constexpr):
    """What rows begin with: ``(peak, broken, empty, low, high)``."""
    alphas = tl.zeros_like(best) + given
    broken = (best != best) | (best == float("inf")) | (alphas < 0) | (alphas > 1) | (alphas != alphas)
    empty = (best == float("-inf")) & ~broken
    peak = tl.where(broken | empty, 0.0, best)
    low, high = bracket(tl.zeros_like(peak) + tl.maximum(keys, 1), e, KIND)
    return peak, broken, empty, low, high


@triton.jit
def store_stats(stats_ptr, offs, size, mask, peak, y, mass, support, empty, broken):
    tl.store(stats_ptr + offs, tl.where(empty, float("-inf"), peak), mask=mask)
    tl.store(stats_ptr + size + offs, tl.where(broken, float("nan"), y), mask=mask)
    tl.store(stats_ptr + 2 * size + offs, mass, mask=mask)
    tl.store(stats_ptr + 3 * size + offs, support, mask=mask)


@triton.jit
def finish(acc, total, empty, broken):
    """Divide by the mass; zeros for rows with nothing, NaN for broken ones."""
    out = acc / tl.where(total > 0, total, 1.0)[:, None]
    out = tl.where(empty[:, None], 0.0, out)
    return tl.where(broken[:, None], float("nan"), out)


@triton.jit(
    do_not_specialize=[
        "Nq",
        "Nk",
        "Tq",
        "Tk",
        "B",
        "tiles_per",
        "window",
        "scale",
        "constant",
        "threshold",
        "grown",
        "stat_size",
    ]
)
def resident_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, out2_ptr, stats_ptr, alpha_ptr, mask_ptr, cu_q_ptr, cu_k_ptr, batch_ptr, start_ptr,
    seed_ptr, sq_b, sq_h, sq_n, sk_b, sk_h, sk_n, sv_b, sv_h, sv_n, so_b, so_h, so_n,
    Nq, Nk, Tq, Tk, B, tiles_per, window, scale, constant, threshold, grown, stat_size,
    H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, KIND: tl.constexpr, HAS_ALPHA: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    HAS_MASK: tl.constexpr, PACKED: tl.constexpr, DROPOUT: tl.constexpr, GRADIENT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    b, m0, q_base, q_len = locate(
        tl.program_id(0), Nq, Tq, tiles_per, cu_q_ptr, batch_ptr, start_ptr, B, BLOCK_M, PACKED
    )
    if m0 < q_len:
        h = tl.program_id(1)
        k_base, k_len = bounds(cu_k_ptr, b, Nk, Tk, PACKED)
        plane = b * H + h
        b64 = b.to(tl.int64)
        q_ptr += b64 * sq_b + h.to(tl.int64) * sq_h + tl.cast(q_base, tl.int64) * sq_n
        k_ptr += b64 * sk_b + (h // GROUP).to(tl.int64) * sk_h + tl.cast(k_base, tl.int64) * sk_n
        v_ptr += b64 * sv_b + (h // GROUP).to(tl.int64) * sv_h + tl.cast(k_base, tl.int64) * sv_n
        to_out = b64 * so_b + h.to(tl.int64) * so_h + tl.cast(q_base, tl.int64) * so_n
        if HAS_MASK:
            mask_ptr += b64 * Nk
        e, given = exponent(alpha_ptr, h, constant, HAS_ALPHA)
        i = m0 + tl.arange(0, BLOCK_M)
        mask_m = i < q_len
        shift = k_len - q_len
        low_key, high_key = key_range(m0, tl.minimum(m0 + BLOCK_M, q_len), shift, k_len, window, CAUSAL, WINDOW)
        j = low_key + tl.arange(0, BLOCK_N)
        q = load_rows(q_ptr, i, sq_n, mask_m, D, BLOCK_D)
        s, _, keep = score_tile(
            q, k_ptr, mask_ptr, i, j, shift, sk_n, k_len, scale, window,
            D, BLOCK_D, CAUSAL, WINDOW, HAS_MASK, PRECISION,
        )  # fmt: skip
        best = row_peak(s)
        peak, broken, empty, low, high = start_row(best, e, given, high_key - low_key, KIND)
        d = distances(s, peak[:, None], e, KIND)
        y = 0.5 * (low + high)
        if KIND == "softmax":
            y = high
        before = tl.zeros_like(peak) + float("inf")
        found = broken | empty | ~mask_m
        evaluation = 0
        while evaluation < MOST_EVALUATIONS:
            inverse_c = inverse_peak(y, e, KIND)
            f, u, n = row_sums(d, y[:, None], inverse_c[:, None], e, KIND)
            y, low, high, before, found = next_root(y, f, u, n, low, high, before, found, e, KIND)
            evaluation = tl.where(tl.min(found.to(tl.int32), axis=0) > 0, MOST_EVALUATIONS, evaluation + 1)
        inverse_c = inverse_peak(y, e, KIND)
        v = load_rows(v_ptr, j, sv_n, keep, D, BLOCK_D)
        p = weight(d, y[:, None], inverse_c[:, None], e, KIND)
        mass = tl.sum(p, axis=1)
        support = tl.sum((p > 0).to(tl.float32), axis=1)
        if DROPOUT:
            p *= dropout_factor(seed_ptr, i[:, None], j[None, :], plane, threshold, grown)
        acc = tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
        store_rows(out_ptr + to_out, i, so_n, mask_m, finish(acc, mass, empty, broken), D, BLOCK_D)
        if PACKED:
            offs = h.to(tl.int64) * Tq + q_base + i
        else:
            offs = plane.to(tl.int64) * Nq + i
        store_stats(stats_ptr, offs, stat_size, mask_m, peak, y, mass, support, empty, broken)
        if GRADIENT:
            _, u = weight_and_slope(d, y[:, None], inverse_c[:, None], e, KIND)
            total = tl.sum(u, axis=1)
            if DROPOUT:
                u *= dropout_factor(seed_ptr, i[:, None], j[None, :], plane, threshold, grown)
            acc2 = tl.dot(u.to(v.dtype), v, input_precision=PRECISION)
            store_rows(out2_ptr + to_out, i, so_n, mask_m, finish(acc2, total, empty, broken), D, BLOCK_D)


@triton.jit
def live_flags(
    maxima_ptr, word, low_block, high_block, peak, y, inverse_c, e, idle, BLOCK_M: tl.constexpr, KIND: tl.constexpr
):  # fmt: skip
    """Which of the 32 blocks of a word some row's weights may be positive in, ``[32]`` int32."""
    block = word * 32 + tl.arange(0, 32)
    inside = (block >= low_block) & (block < high_block)
    offs = (block - low_block).to(tl.int64)[None, :] * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    best = tl.load(maxima_ptr + offs, mask=inside[None, :], other=float("-inf"))  # [BLOCK_M, 32]
    d = distances(best, peak[:, None], e, KIND)
    live = alive(d, y[:, None], inverse_c[:, None], e, KIND) & ~idle[:, None]
    return tl.max(live.to(tl.int32), axis=0), block


@triton.jit
def list_live(
    maxima_ptr, list_ptr, live_ptr, low_block, high_block, words, peak, y, e, idle,
    BLOCK_M: tl.constexpr, KIND: tl.constexpr, WRITE_MAP: tl.constexpr,
):  # fmt: skip
    """List the live blocks and return how many there are; ``WRITE_MAP`` also writes the row of the map."""
    inverse_c = inverse_peak(y, e, KIND)
    count = low_block * 0
    first = low_block // 32
    last = (high_block + 31) // 32
    if WRITE_MAP:
        first = first * 0
        last = words
    for word in range(first, last):
        flags, block = live_flags(maxima_ptr, word, low_block, high_block, peak, y, inverse_c, e, idle, BLOCK_M, KIND)
        place = count + tl.cumsum(flags, axis=0) - flags
        tl.store(list_ptr + place, block, mask=flags > 0)
        count += tl.sum(flags, axis=0)
        if WRITE_MAP:
            tl.store(live_ptr + word, tl.sum(flags << tl.arange(0, 32), axis=0))
    return count


@triton.jit
def subset_bound(
    maxima_ptr, low_block, high_block, peak, high, e, BLOCK_M: tl.constexpr, KIND: tl.constexpr
):  # fmt: skip
    """A root that is no smaller than the row's: Newton's, from above, on the block maxima alone."""
    y = high
    for _step in range(SUBSET_STEPS):
        inverse_c = inverse_peak(y, e, KIND)
        f = tl.zeros_like(y)
        u = tl.zeros_like(y)
        for n0 in range(low_block, high_block, 32):
            block = n0 + tl.arange(0, 32)
            offs = (block - low_block).to(tl.int64)[None, :] * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
            best = tl.load(maxima_ptr + offs, mask=(block < high_block)[None, :], other=float("-inf"))
            d = distances(best, peak[:, None], e, KIND)
            tile_f, tile_u, _tile_q = row_sums(d, y[:, None], inverse_c[:, None], e, KIND)
            f += tile_f
            u += tile_u
        f = tl.maximum(f, 1.0)  # below only by rounding
        none = tl.zeros_like(y)
        new, _low, _high, _residual, _found = next_root(
            y, f, u, u * u / f, none - float("inf"), y, none + float("inf"), none > 0, e, KIND
        )
        y = tl.minimum(y, new)
    if (KIND == "square") | (KIND == "linear"):
        return tl.minimum(y * (1 + 1e-5), high)
    else:
        return tl.minimum(y + 1e-5, high)


@triton.jit(
    do_not_specialize=[
        "Nq",
        "Nk",
        "Tq",
        "Tk",
        "B",
        "tiles_per",
        "window",
        "scale",
        "constant",
        "threshold",
        "grown",
        "stat_size",
        "tiles",
        "blocks",
        "words",
    ]
)
def roots_kernel(
    q_ptr, k_ptr, stats_ptr, live_ptr, maxima_ptr, list_ptr, alpha_ptr, mask_ptr, cu_q_ptr, cu_k_ptr, batch_ptr,
    start_ptr, sq_b, sq_h, sq_n, sk_b, sk_h, sk_n,
    Nq, Nk, Tq, Tk, B, tiles_per, window, scale, constant, threshold, grown, stat_size, tiles, blocks, words,
    H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr,
    KIND: tl.constexpr, HAS_ALPHA: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, HAS_MASK: tl.constexpr,
    PACKED: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Peak and root of every row, and the map of live blocks. A program keeps its scratch from item to item."""
    program = tl.program_id(0)
    maxima_ptr += program.to(tl.int64) * blocks * BLOCK
    list_ptr += program.to(tl.int64) * blocks
    for item in range(program, tiles * H, tl.num_programs(0)):
        h = item // tiles
        tile = tiles - 1 - item % tiles  # under causal attention the last tiles have most to do
        b, m0, q_base, q_len = locate(tile, Nq, Tq, tiles_per, cu_q_ptr, batch_ptr, start_ptr, B, BLOCK, PACKED)
        if m0 < q_len:
            k_base, k_len = bounds(cu_k_ptr, b, Nk, Tk, PACKED)
            plane = b * H + h
            b64 = b.to(tl.int64)
            qs = q_ptr + b64 * sq_b + h.to(tl.int64) * sq_h + tl.cast(q_base, tl.int64) * sq_n
            ks = k_ptr + b64 * sk_b + (h // GROUP).to(tl.int64) * sk_h + tl.cast(k_base, tl.int64) * sk_n
            keys_kept = mask_ptr
            if HAS_MASK:
                keys_kept = mask_ptr + b64 * Nk
            e, given = exponent(alpha_ptr, h, constant, HAS_ALPHA)
            i = m0 + tl.arange(0, BLOCK)
            mask_m = i < q_len
            shift = k_len - q_len
            low_key, high_key = key_range(m0, tl.minimum(m0 + BLOCK, q_len), shift, k_len, window, CAUSAL, WINDOW)
            low_block = low_key // BLOCK
            high_block = tl.minimum((high_key + BLOCK - 1) // BLOCK, low_block + blocks)
            high_block = tl.maximum(high_block, low_block)
            q = load_rows(qs, i, sq_n, mask_m, D, BLOCK_D)

            best = tl.full((BLOCK,), float("-inf"), tl.float32)
            for block in range(low_block, high_block):
                j = block * BLOCK + tl.arange(0, BLOCK)
                s, _, _ = score_tile(
                    q, ks, keys_kept, i, j, shift, sk_n, k_len, scale, window,
                    D, BLOCK_D, CAUSAL, WINDOW, HAS_MASK, PRECISION,
                )  # fmt: skip
                tile_best = row_peak(s)
                tl.store(maxima_ptr + (block - low_block) * BLOCK + tl.arange(0, BLOCK), tile_best)
                best = nan_max(best, tile_best)
            tl.debug_barrier()  # other threads of the program read what was stored

            keys = tl.minimum(high_key, high_block * BLOCK) - low_key
            peak, broken, empty, low, high = start_row(best, e, given, keys, KIND)
            idle = broken | empty | ~mask_m
            y = high
            if KIND != "softmax":
                y = subset_bound(maxima_ptr, low_block, high_block, peak, high, e, BLOCK, KIND)
                y = tl.where(idle, high, tl.maximum(y, low))
            high = y
            count = list_live(
                maxima_ptr, list_ptr, live_ptr, low_block, high_block, words, peak, y, e, idle, BLOCK, KIND, False
            )
            tl.debug_barrier()

            before = tl.zeros_like(peak) + float("inf")
            found = idle
            evaluation = 0
            while evaluation < MOST_EVALUATIONS:
                inverse_c = inverse_peak(y, e, KIND)
                f = tl.zeros_like(peak)
                u = tl.zeros_like(peak)
                n = tl.zeros_like(peak)
                for place in range(count):
                    j = tl.load(list_ptr + place) * BLOCK + tl.arange(0, BLOCK)
                    s, _, _ = score_tile(
                        q, ks, keys_kept, i, j, shift, sk_n, k_len, scale, window,
                        D, BLOCK_D, CAUSAL, WINDOW, HAS_MASK, PRECISION,
                    )  # fmt: skip
                    d = distances(s, peak[:, None], e, KIND)
                    tile_f, tile_u, tile_n = row_sums(d, y[:, None], inverse_c[:, None], e, KIND)
                    f += tile_f
                    u += tile_u
                    n += tile_n
                y, low, high, before, found = next_root(y, f, u, n, low, high, before, found, e, KIND)
                evaluation = tl.where(tl.min(found.to(tl.int32), axis=0) > 0, MOST_EVALUATIONS, evaluation + 1)

            tl.debug_barrier()
            to_live = (h.to(tl.int64) * tiles + tile) * words
            list_live(
                maxima_ptr, list_ptr, live_ptr + to_live, low_block, high_block, words, peak, y, e, idle,
                BLOCK, KIND, True,
            )  # fmt: skip
            if PACKED:
                offs = h.to(tl.int64) * Tq + q_base + i
            else:
                offs = plane.to(tl.int64) * Nq + i
            tl.store(stats_ptr + offs, tl.where(empty, float("-inf"), peak), mask=mask_m)
            tl.store(stats_ptr + stat_size + offs, tl.where(broken, float("nan"), y), mask=mask_m)
            tl.debug_barrier()  # the next item overwrites the scratch


@triton.jit(
    do_not_specialize=[
        "Nq",
        "Nk",
        "Tq",
        "Tk",
        "B",
        "tiles_per",
        "window",
        "scale",
        "constant",
        "threshold",
        "grown",
        "stat_size",
        "tiles",
        "blocks",
    ]
)
def output_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, out2_ptr, stats_ptr, list_ptr, count_ptr, alpha_ptr, mask_ptr, cu_q_ptr, cu_k_ptr,
    batch_ptr, start_ptr, seed_ptr, sq_b, sq_h, sq_n, sk_b, sk_h, sk_n, sv_b, sv_h, sv_n, so_b, so_h, so_n,
    Nq, Nk, Tq, Tk, B, tiles_per, window, scale, constant, threshold, grown, stat_size, tiles, blocks,
    H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr,
    KIND: tl.constexpr, HAS_ALPHA: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, HAS_MASK: tl.constexpr,
    PACKED: tl.constexpr, DROPOUT: tl.constexpr, GRADIENT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Weights and values of the live blocks; mass and support of every row."""
    tile = tl.program_id(0)
    b, m0, q_base, q_len = locate(tile, Nq, Tq, tiles_per, cu_q_ptr, batch_ptr, start_ptr, B, BLOCK, PACKED)
    if m0 < q_len:
        h = tl.program_id(1)
        k_base, k_len = bounds(cu_k_ptr, b, Nk, Tk, PACKED)
        plane = b * H + h
        b64 = b.to(tl.int64)
        q_ptr += b64 * sq_b + h.to(tl.int64) * sq_h + tl.cast(q_base, tl.int64) * sq_n
        k_ptr += b64 * sk_b + (h // GROUP).to(tl.int64) * sk_h + tl.cast(k_base, tl.int64) * sk_n
        v_ptr += b64 * sv_b + (h // GROUP).to(tl.int64) * sv_h + tl.cast(k_base, tl.int64) * sv_n
        to_out = b64 * so_b + h.to(tl.int64) * so_h + tl.cast(q_base, tl.int64) * so_n
        if HAS_MASK:
            mask_ptr += b64 * Nk
        e, _given = exponent(alpha_ptr, h, constant, HAS_ALPHA)
        i = m0 + tl.arange(0, BLOCK)
        mask_m = i < q_len
        shift = k_len - q_len
        if PACKED:
            offs = h.to(tl.int64) * Tq + q_base + i
        else:
            offs = plane.to(tl.int64) * Nq + i
        row = h.to(tl.int64) * tiles + tile
        count = tl.load(count_ptr + row)
        list_ptr += row * blocks
        q = load_rows(q_ptr, i, sq_n, mask_m, D, BLOCK_D)
        peak = tl.load(stats_ptr + offs, mask=mask_m, other=float("-inf"))
        y = tl.load(stats_ptr + stat_size + offs, mask=mask_m, other=0.0)
        empty = peak == float("-inf")
        broken = y != y
        peak = tl.where(empty, float("inf"), peak)  # then every distance is infinite
        inverse_c = inverse_peak(y, e, KIND)
        acc = tl.zeros((BLOCK, BLOCK_D), tl.float32)
        acc2 = tl.zeros((BLOCK, BLOCK_D), tl.float32)
        mass = tl.zeros((BLOCK,), tl.float32)
        total = tl.zeros((BLOCK,), tl.float32)
        support = tl.zeros((BLOCK,), tl.float32)
        for place in range(count):
            j = tl.load(list_ptr + place) * BLOCK + tl.arange(0, BLOCK)
            s, _k, keep = score_tile(
                q, k_ptr, mask_ptr, i, j, shift, sk_n, k_len, scale, window,
                D, BLOCK_D, CAUSAL, WINDOW, HAS_MASK, PRECISION,
            )  # fmt: skip
            v = load_rows(v_ptr, j, sv_n, keep, D, BLOCK_D)
            d = distances(s, peak[:, None], e, KIND)
            p, slope = weight_and_slope(d, y[:, None], inverse_c[:, None], e, KIND)
            mass += tl.sum(p, axis=1)
            total += tl.sum(slope, axis=1)
            support += tl.sum((p > 0).to(tl.float32), axis=1)
            if DROPOUT:
                factor = dropout_factor(seed_ptr, i[:, None], j[None, :], plane, threshold, grown)
                p *= factor
                slope *= factor
            acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
            if GRADIENT:
                acc2 = tl.dot(slope.to(v.dtype), v, acc2, input_precision=PRECISION)
        store_rows(out_ptr + to_out, i, so_n, mask_m, finish(acc, mass, empty, broken), D, BLOCK_D)
        if GRADIENT:
            store_rows(out2_ptr + to_out, i, so_n, mask_m, finish(acc2, total, empty, broken), D, BLOCK_D)
        tl.store(stats_ptr + 2 * stat_size + offs, mass, mask=mask_m)
        tl.store(stats_ptr + 3 * stat_size + offs, support, mask=mask_m)
