"""Forward kernels of entmax attention: short rows of scores on chip, or live blocks of long ones.

Scores of a tile of rows stay on chip if they fit. Otherwise the roots are computed before, and the
output is that of the live blocks.
"""

import triton
import triton.language as tl

from tilefold.ops._shared._triton.entmax import MAX_EVALUATIONS, peak_power, row_peak
from tilefold.ops.entmax_attention._triton import rows as of_row
from tilefold.ops.entmax_attention._triton import tiles as of_tile

SUBSET_STEPS = tl.constexpr(2)  # on the maxima of 8 parts of a row whose scores are all there


@triton.jit
def store_stats(stats_ptr, offs, size, mask, peak, y, mass, support, empty, broken):
    """Store the peak, root, mass and support of rows.

    An empty row has a peak of minus infinity, and a broken one a root that is NaN.

    Args:
        stats_ptr: statistics ``[4, size]``; written.
        offs: offsets of the rows.
        size: number of rows of the batch.
        mask: rows that exist.
        peak: the largest score of each row.
        y: root of each row.
        mass: sum of the weights of each row.
        support: number of positive weights of each row.
        empty: rows that see no key.
        broken: rows with NaN, an infinite score or an invalid alpha.
    """
    tl.store(stats_ptr + offs, tl.where(empty, float("-inf"), peak), mask=mask)
    tl.store(stats_ptr + size + offs, tl.where(broken, float("nan"), y), mask=mask)
    tl.store(stats_ptr + 2 * size + offs, mass, mask=mask)
    tl.store(stats_ptr + 3 * size + offs, support, mask=mask)


@triton.jit
def finish(acc, mass, empty, broken):
    """Divide outputs by the mass of their weights.

    Args:
        acc: sums of weighted values, ``[rows, BLOCK_D]``.
        mass: sum of the weights of each row.
        empty: rows that see no key. Their output is 0.
        broken: rows with NaN, an infinite score or an invalid alpha. Their output is NaN.
    """
    out = acc / tl.where(mass > 0, mass, 1.0)[:, None]
    out = tl.where(empty[:, None], 0.0, out)
    return tl.where(broken[:, None], float("nan"), out)


@triton.jit(do_not_specialize=of_tile.UNSPECIALIZED)
def resident_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    out2_ptr,
    stats_ptr,
    alpha_ptr,
    key_padding_mask_ptr,
    cu_seqlens_q_ptr,
    cu_seqlens_k_ptr,
    q_batch_ptr,
    q_start_ptr,
    seed_ptr,
    sq_b,
    sq_h,
    sq_n,
    sk_b,
    sk_h,
    sk_n,
    sv_b,
    sv_h,
    sv_n,
    so_b,
    so_h,
    so_n,
    Nq,
    Nk,
    Tq,
    Tk,
    B,
    tiles_per,
    window,
    scale,
    alpha_value,
    threshold,
    keep_scale,
    stat_size,
    H: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    KIND: tl.constexpr,
    HAS_ALPHA: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_MASK: tl.constexpr,
    PACKED: tl.constexpr,
    DROPOUT: tl.constexpr,
    EXACT: tl.constexpr,
    GRADIENT: tl.constexpr,
    SUPPORT: tl.constexpr,
    TOLERANCE: tl.constexpr,
    NEAR: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute the output of a tile of queries whose scores with all keys stay on chip.

    Grid: ``[query tiles, H]``. A tile has ``BLOCK_M`` queries, and ``BLOCK_N`` is at least the
    number of keys.

    Args:
        q_ptr: queries ``[B, H, Nq, D]``. All tensors of tokens may be packed, and then hold the
            tokens of all sequences without padding.
        k_ptr: keys ``[B, Hkv, Nk, D]``.
        v_ptr: values, shaped like the keys.
        out_ptr: output, shaped like the queries; written.
        out2_ptr: output with the slopes ``u = p^(2 - alpha)`` in place of the weights ``p``;
            written with ``GRADIENT``. The backward pass computes ``delta`` from it.
        stats_ptr: peak, root, mass and support of each query, ``stat_size`` apart; written with
            ``GRADIENT`` or ``SUPPORT``.
        alpha_ptr: alpha ``[H]``, with ``HAS_ALPHA``.
        key_padding_mask_ptr: ``[B, Nk]``, 0 for masked keys, with ``HAS_MASK``.
        cu_seqlens_q_ptr, cu_seqlens_k_ptr: offsets ``[B + 1]`` of packed sequences.
        q_batch_ptr, q_start_ptr: tables of the tiles of queries, see :func:`write_table`.
        seed_ptr: seed of dropout, with ``DROPOUT``.
        sq_b, sq_h, sq_n: strides of q over sequences, heads and tokens.
        sk_b, sk_h, sk_n: strides of k.
        sv_b, sv_h, sv_n: strides of v.
        so_b, so_h, so_n: strides of both outputs.
        Nq, Nk: numbers of queries and keys of a padded sequence.
        Tq, Tk: numbers of queries and keys of a packed batch.
        B: number of sequences.
        tiles_per: tiles of queries of a padded sequence.
        window: a query attends to keys at most this far away, with ``WINDOW``.
        scale: factor of the products of queries and keys.
        alpha_value: alpha of all heads without ``HAS_ALPHA``.
        threshold, keep_scale: numbers of :func:`dropout_factor`, with ``DROPOUT``.
        stat_size: distance between two statistics of a query.
        H: number of query heads.
        GROUP: number of query heads that share a key head.
        D: head dimension; ``BLOCK_D`` is the next power of two.
        BLOCK_M, BLOCK_N: queries and keys of the tile.
        KIND: kind of alpha, see ``_shared/_triton/entmax.py``.
        HAS_ALPHA: whether each head has its own alpha.
        CAUSAL, WINDOW, HAS_MASK: which of the masks are used.
        PACKED: whether the batch is packed.
        EXACT: whether the scale is a positive power of two, see :func:`hide`.
        DROPOUT: whether weights are dropped.
        GRADIENT: whether a backward pass follows.
        SUPPORT: whether the sizes of supports are needed.
        TOLERANCE, NEAR: permitted errors of the mass and of the weights, see :func:`improve`.
        PRECISION: precision of products of fp32.
    """
    b, m0, q_base, q_len = of_tile.locate(
        tl.program_id(0),
        Nq,
        Tq,
        tiles_per,
        cu_seqlens_q_ptr,
        q_batch_ptr,
        q_start_ptr,
        B,
        BLOCK_M,
        PACKED,
    )
    if m0 < q_len:
        h = tl.program_id(1)
        k_base, k_len = of_tile.bounds(cu_seqlens_k_ptr, b, Nk, Tk, PACKED)
        plane = b * H + h
        q_ptr += of_tile.row_offset(b, h, q_base, sq_b, sq_h, sq_n)
        k_ptr += of_tile.row_offset(b, h // GROUP, k_base, sk_b, sk_h, sk_n)
        v_ptr += of_tile.row_offset(b, h // GROUP, k_base, sv_b, sv_h, sv_n)
        to_out = of_tile.row_offset(b, h, q_base, so_b, so_h, so_n)
        if HAS_MASK:
            key_padding_mask_ptr += b.to(tl.int64) * Nk
        e, passed_e = of_tile.exponent(alpha_ptr, h, alpha_value, HAS_ALPHA)
        i = m0 + tl.arange(0, BLOCK_M)
        mask_m = i < q_len
        shift = k_len - q_len
        low_key, high_key = of_tile.key_range(
            m0,
            tl.minimum(m0 + BLOCK_M, q_len),
            shift,
            k_len,
            window,
            CAUSAL,
            WINDOW,
        )
        j = low_key + tl.arange(0, BLOCK_N)
        q = of_tile.load_rows(q_ptr, i, sq_n, mask_m, D, BLOCK_D)
        s, _, keep = of_tile.score_tile(
            q,
            k_ptr,
            key_padding_mask_ptr,
            m0,
            i,
            low_key,
            j,
            shift,
            sk_n,
            k_len,
            scale,
            window,
            D,
            BLOCK_D,
            CAUSAL,
            WINDOW,
            HAS_MASK,
            EXACT,
            PRECISION,
        )
        # An upper bound of the root, from the largest scores of parts of the rows.
        parts = of_row.lane_peaks(s, of_row.LANES)
        best = of_tile.scaled(row_peak(parts), scale, EXACT)
        peak, broken, empty, low, high = of_row.start_row(
            best, e, passed_e, high_key - low_key, KIND
        )
        y = high
        if KIND != "softmax":
            y = of_row.parts_bound(
                parts,
                parts,
                peak,
                scale,
                high,
                e,
                SUBSET_STEPS,
                False,
                KIND,
                EXACT,
                TOLERANCE,
            )
            y = tl.where(broken | empty, high, tl.maximum(of_row.widen(y, high, e, KIND), low))
        # The root.
        previous_residual = tl.zeros_like(peak) + float("inf")
        support_low = tl.zeros_like(peak)
        support_high = support_low + (high_key - low_key)
        converged = broken | empty | ~mask_m
        max_rise = tl.zeros_like(peak)
        evaluation = 0
        while evaluation < MAX_EVALUATIONS:
            zeros = tl.zeros((BLOCK_M, of_row.LANES), tl.float32)
            f, u, n = of_row.add_terms(
                s,
                peak,
                y,
                peak_power(y, e, KIND),
                scale,
                e,
                zeros,
                zeros,
                zeros,
                KIND,
                EXACT,
            )
            y, low, high, support_low, support_high, previous_residual, converged, max_rise = (
                of_row.improve(
                    y,
                    tl.sum(f, axis=1),
                    tl.sum(u, axis=1),
                    tl.sum(n, axis=1),
                    low,
                    high,
                    support_low,
                    support_high,
                    previous_residual,
                    converged,
                    max_rise,
                    e,
                    KIND,
                    TOLERANCE,
                    NEAR,
                )
            )
            evaluation = tl.where(
                tl.min(converged.to(tl.int32), axis=0) > 0,
                MAX_EVALUATIONS,
                evaluation + 1,
            )
        c = peak_power(y, e, KIND)
        # The weights and the output.
        v = of_tile.load_rows(v_ptr, j, sv_n, keep, D, BLOCK_D)
        p, slope = of_tile.weights(s, peak[:, None], y[:, None], c[:, None], scale, e, KIND, EXACT)
        mass = tl.sum(of_row.lane_sums(p), axis=1)
        support = tl.zeros_like(mass)
        if SUPPORT:
            support = tl.sum(of_row.lane_sums(of_tile.one_if_positive(slope)), axis=1)
        total = tl.sum(of_row.lane_sums(slope), axis=1)
        if DROPOUT:
            factor = of_tile.dropout_factor(
                seed_ptr,
                i[:, None],
                j[None, :],
                plane,
                threshold,
                keep_scale,
            )
            p *= factor
            slope *= factor
        acc = tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
        of_tile.store_rows(
            out_ptr + to_out,
            i,
            so_n,
            mask_m,
            finish(acc, mass, empty, broken),
            D,
            BLOCK_D,
        )
        if GRADIENT or SUPPORT:
            if PACKED:
                offs = h.to(tl.int64) * Tq + q_base + i
            else:
                offs = plane.to(tl.int64) * Nq + i
            root, mass = of_row.last_step(
                y, mass, total, support, y + max_rise, support_low, e, KIND
            )
            store_stats(
                stats_ptr,
                offs,
                stat_size,
                mask_m,
                peak,
                root,
                mass,
                support,
                empty,
                broken,
            )
        if GRADIENT:
            acc2 = tl.dot(slope.to(v.dtype), v, input_precision=PRECISION)
            of_tile.store_rows(
                out2_ptr + to_out,
                i,
                so_n,
                mask_m,
                finish(acc2, total, empty, broken),
                D,
                BLOCK_D,
            )


@triton.jit(do_not_specialize=[*of_tile.UNSPECIALIZED, "tiles", "blocks"])
def output_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    out2_ptr,
    stats_ptr,
    key_list_ptr,
    key_count_ptr,
    alpha_ptr,
    key_padding_mask_ptr,
    cu_seqlens_q_ptr,
    cu_seqlens_k_ptr,
    q_batch_ptr,
    q_start_ptr,
    seed_ptr,
    sq_b,
    sq_h,
    sq_n,
    sk_b,
    sk_h,
    sk_n,
    sv_b,
    sv_h,
    sv_n,
    so_b,
    so_h,
    so_n,
    Nq,
    Nk,
    Tq,
    Tk,
    B,
    tiles_per,
    window,
    scale,
    alpha_value,
    threshold,
    keep_scale,
    stat_size,
    tiles,
    blocks,
    H: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    KIND: tl.constexpr,
    HAS_ALPHA: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_MASK: tl.constexpr,
    PACKED: tl.constexpr,
    DROPOUT: tl.constexpr,
    EXACT: tl.constexpr,
    LISTS: tl.constexpr,
    GRADIENT: tl.constexpr,
    SUPPORT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute the output of a tile of queries from the roots of :func:`roots_kernel`.

    Grid: ``[query tiles, H]``. A program visits the live blocks of keys if these are listed,
    otherwise all blocks.

    Args:
        q_ptr: queries ``[B, H, Nq, D]``. All tensors of tokens may be packed, and then hold the
            tokens of all sequences without padding.
        k_ptr: keys ``[B, Hkv, Nk, D]``.
        v_ptr: values, shaped like the keys.
        out_ptr: output, shaped like the queries; written.
        out2_ptr: output with the slopes ``u = p^(2 - alpha)`` in place of the weights ``p``;
            written with ``GRADIENT``. The backward pass computes ``delta`` from it.
        stats_ptr: four statistics of each query, ``stat_size`` apart. Those of :func:`roots_kernel`
            are read, and the final root, mass and support are written.
        key_list_ptr: live blocks of each tile, ``[H, tiles, blocks]``, with ``LISTS``.
        key_count_ptr: number of live blocks of each tile, ``[H, tiles]``, with ``LISTS``.
        alpha_ptr: alpha ``[H]``, with ``HAS_ALPHA``.
        key_padding_mask_ptr: ``[B, Nk]``, 0 for masked keys, with ``HAS_MASK``.
        cu_seqlens_q_ptr, cu_seqlens_k_ptr: offsets ``[B + 1]`` of packed sequences.
        q_batch_ptr, q_start_ptr: tables of the tiles of queries, see :func:`write_table`.
        seed_ptr: seed of dropout, with ``DROPOUT``.
        sq_b, sq_h, sq_n: strides of q over sequences, heads and tokens.
        sk_b, sk_h, sk_n: strides of k.
        sv_b, sv_h, sv_n: strides of v.
        so_b, so_h, so_n: strides of both outputs.
        Nq, Nk: numbers of queries and keys of a padded sequence.
        Tq, Tk: numbers of queries and keys of a packed batch.
        B: number of sequences.
        tiles_per: tiles of queries of a padded sequence.
        window: a query attends to keys at most this far away, with ``WINDOW``.
        scale: factor of the products of queries and keys.
        alpha_value: alpha of all heads without ``HAS_ALPHA``.
        threshold, keep_scale: numbers of :func:`dropout_factor`, with ``DROPOUT``.
        stat_size: distance between two statistics of a query.
        tiles: tiles of queries of the batch.
        blocks: the most blocks of keys of a tile of queries.
        H: number of query heads.
        GROUP: number of query heads that share a key head.
        D: head dimension; ``BLOCK_D`` is the next power of two.
        BLOCK_M, BLOCK_N: queries of a tile, and keys of a block.
        KIND: kind of alpha, see ``_shared/_triton/entmax.py``.
        HAS_ALPHA: whether each head has its own alpha.
        CAUSAL, WINDOW, HAS_MASK: which of the masks are used.
        PACKED: whether the batch is packed.
        EXACT: whether the scale is a positive power of two, see :func:`hide`.
        DROPOUT: whether weights are dropped.
        LISTS: whether live blocks are listed.
        GRADIENT: whether a backward pass follows.
        SUPPORT: whether the sizes of supports are needed.
        PRECISION: precision of products of fp32.
    """
    tile = tl.program_id(0)
    b, m0, q_base, q_len = of_tile.locate(
        tile,
        Nq,
        Tq,
        tiles_per,
        cu_seqlens_q_ptr,
        q_batch_ptr,
        q_start_ptr,
        B,
        BLOCK_M,
        PACKED,
    )
    if m0 < q_len:
        h = tl.program_id(1)
        k_base, k_len = of_tile.bounds(cu_seqlens_k_ptr, b, Nk, Tk, PACKED)
        plane = b * H + h
        q_ptr += of_tile.row_offset(b, h, q_base, sq_b, sq_h, sq_n)
        k_ptr += of_tile.row_offset(b, h // GROUP, k_base, sk_b, sk_h, sk_n)
        v_ptr += of_tile.row_offset(b, h // GROUP, k_base, sv_b, sv_h, sv_n)
        to_out = of_tile.row_offset(b, h, q_base, so_b, so_h, so_n)
        if HAS_MASK:
            key_padding_mask_ptr += b.to(tl.int64) * Nk
        e, _passed_e = of_tile.exponent(alpha_ptr, h, alpha_value, HAS_ALPHA)
        i = m0 + tl.arange(0, BLOCK_M)
        mask_m = i < q_len
        shift = k_len - q_len
        if PACKED:
            offs = h.to(tl.int64) * Tq + q_base + i
        else:
            offs = plane.to(tl.int64) * Nq + i
        low_key, high_key = of_tile.key_range(
            m0,
            tl.minimum(m0 + BLOCK_M, q_len),
            shift,
            k_len,
            window,
            CAUSAL,
            WINDOW,
        )
        first = low_key // BLOCK_N
        count = tl.maximum((high_key + BLOCK_N - 1) // BLOCK_N - first, 0)
        # Whether the last step moves the root.
        MOVES: tl.constexpr = (KIND != "softmax") & (KIND != "sparsemax")
        if LISTS:
            row = h.to(tl.int64) * tiles + tile
            count = tl.load(key_count_ptr + row)
            key_list_ptr += row * blocks
        q = of_tile.load_rows(q_ptr, i, sq_n, mask_m, D, BLOCK_D)
        peak = tl.load(stats_ptr + offs, mask=mask_m, other=float("-inf"))
        y = tl.load(stats_ptr + stat_size + offs, mask=mask_m, other=0.0)
        empty = peak == float("-inf")
        broken = y != y
        peak = tl.where(empty, float("inf"), peak)  # then every distance is infinite
        c = peak_power(y, e, KIND)
        acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        acc2 = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        mass = tl.zeros((BLOCK_M, of_row.LANES), tl.float32)
        total = tl.zeros((BLOCK_M, of_row.LANES), tl.float32)
        support = tl.zeros((BLOCK_M, of_row.LANES), tl.float32)
        for list_index in range(count):
            if LISTS:
                n0 = tl.load(key_list_ptr + list_index) * BLOCK_N
            else:
                n0 = (first + list_index) * BLOCK_N
            j = n0 + tl.arange(0, BLOCK_N)
            s, _k, keep = of_tile.score_tile(
                q,
                k_ptr,
                key_padding_mask_ptr,
                m0,
                i,
                n0,
                j,
                shift,
                sk_n,
                k_len,
                scale,
                window,
                D,
                BLOCK_D,
                CAUSAL,
                WINDOW,
                HAS_MASK,
                EXACT,
                PRECISION,
            )
            v = of_tile.load_rows(v_ptr, j, sv_n, keep, D, BLOCK_D)
            p, slope = of_tile.weights(
                s,
                peak[:, None],
                y[:, None],
                c[:, None],
                scale,
                e,
                KIND,
                EXACT,
            )
            mass += of_row.lane_sums(p)
            if SUPPORT:
                support += of_row.lane_sums(of_tile.one_if_positive(slope))
            if GRADIENT or MOVES:
                total += of_row.lane_sums(slope)
            if DROPOUT:
                factor = of_tile.dropout_factor(
                    seed_ptr,
                    i[:, None],
                    j[None, :],
                    plane,
                    threshold,
                    keep_scale,
                )
                p *= factor
                slope *= factor
            acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
            if GRADIENT:
                acc2 = tl.dot(slope.to(v.dtype), v, acc2, input_precision=PRECISION)
        mass = tl.sum(mass, axis=1)
        total = tl.sum(total, axis=1)
        of_tile.store_rows(
            out_ptr + to_out,
            i,
            so_n,
            mask_m,
            finish(acc, mass, empty, broken),
            D,
            BLOCK_D,
        )
        if GRADIENT:
            of_tile.store_rows(
                out2_ptr + to_out,
                i,
                so_n,
                mask_m,
                finish(acc2, total, empty, broken),
                D,
                BLOCK_D,
            )
        support = tl.sum(support, axis=1)
        max_root = tl.load(stats_ptr + 2 * stat_size + offs, mask=mask_m, other=0.0)
        mass_excess = tl.load(stats_ptr + 3 * stat_size + offs, mask=mask_m, other=0.0)
        root, mass = of_row.last_step(y, mass, total, support, max_root, mass_excess, e, KIND)
        # where several warps hold a row, none may overwrite what another has yet to read
        tl.debug_barrier()
        tl.store(stats_ptr + stat_size + offs, root, mask=mask_m)
        tl.store(stats_ptr + 2 * stat_size + offs, mass, mask=mask_m)
        tl.store(stats_ptr + 3 * stat_size + offs, support, mask=mask_m)
