"""Backward of entmax attention, in which no two programs add to one number.

One program owns a tile of queries and visits its live keys, another one owns a block of keys and
visits its live queries, so results repeat bit for bit. Scores are computed again from the operands
of forward, scaled in fp32 as there.
"""

import triton
import triton.language as tl

from tilefold.ops._shared._triton.entmax import alpha_terms, peak_power
from tilefold.ops.entmax_attention._triton import tiles as of_tile
from tilefold.ops.entmax_attention._triton.rows import LANES, lane_sums


@triton.jit(do_not_specialize=["tiles", "words", "blocks"])
def key_lists_kernel(live_ptr, key_list_ptr, key_count_ptr, tiles, words, blocks):
    """List the live key blocks of a tile of queries, from its row of the map.

    Grid: ``[query tiles, H]``. ``live``: bits ``[H, tiles, words]``, one for each block. Writes
    ``key_list`` ``[H, tiles, blocks]`` and ``key_count`` ``[H, tiles]``.
    """
    row = tl.program_id(1).to(tl.int64) * tiles + tl.program_id(0)
    lanes = tl.arange(0, 32)
    count = tl.zeros((), tl.int32)
    for word in range(words):
        flags = (tl.load(live_ptr + row * words + word) >> lanes) & 1
        list_index = count + tl.cumsum(flags, axis=0) - flags
        # tiles beyond the last sequence were never written: whatever their words hold stays in
        # their row
        tl.store(
            key_list_ptr + row * blocks + list_index,
            word * 32 + lanes,
            mask=(flags > 0) & (list_index < blocks),
        )
        count += tl.sum(flags, axis=0)
    tl.store(key_count_ptr + row, count)


@triton.jit(
    do_not_specialize=[
        "Nk",
        "Tk",
        "Nq",
        "Tq",
        "B",
        "tiles_per",
        "key_tiles_per",
        "tiles",
        "words",
        "spans",
    ],
)
def query_lists_kernel(
    live_ptr,
    query_list_ptr,
    query_count_ptr,
    cu_seqlens_q_ptr,
    cu_seqlens_k_ptr,
    q_start_ptr,
    k_batch_ptr,
    k_start_ptr,
    Nq,
    Nk,
    Tq,
    Tk,
    B,
    tiles_per,
    key_tiles_per,
    tiles,
    words,
    spans,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    KEYS: tl.constexpr,
    PACKED: tl.constexpr,
):
    """List the tiles of queries in which a block of a tile of keys is live.

    Grid: ``[key tiles, H]``. ``live``: bits ``[H, tiles, words]``, one for each block of
    ``BLOCK_N`` keys. Writes ``query_count`` ``[H, key tiles]`` and ``query_list``, tiles within the
    sequence. A sequence has space for all its tiles of queries in each of its tiles of keys, which
    are ``spans`` at most.
    """
    key_tile = tl.program_id(0)
    h = tl.program_id(1)
    b, n0, _, k_len = of_tile.locate(
        key_tile,
        Nk,
        Tk,
        key_tiles_per,
        cu_seqlens_k_ptr,
        k_batch_ptr,
        k_start_ptr,
        B,
        KEYS,
        PACKED,
    )
    if n0 < k_len:
        _, q_len = of_tile.bounds(cu_seqlens_q_ptr, b, Nq, Tq, PACKED)
        if PACKED:
            first = tl.load(q_start_ptr + b)
        else:
            first = b * tiles_per
        block = n0 // BLOCK_N  # the tile's blocks share a word: their number divides 32
        n_tiles = (q_len + BLOCK_M - 1) // BLOCK_M
        fits = (n0 // KEYS < spans) & (first + n_tiles <= tiles)
        n_tiles = tl.where(fits, n_tiles, 0)  # broken offsets must not read or write elsewhere
        query_list_ptr += (h.to(tl.int64) * tiles + first) * spans + (n0 // KEYS) * n_tiles
        count = tl.zeros((), tl.int32)
        for t0 in range(0, n_tiles, 128):
            t = t0 + tl.arange(0, 128)
            offs = (h.to(tl.int64) * tiles + first + t) * words + block // 32
            bits = tl.load(live_ptr + offs, mask=t < n_tiles, other=0) >> (block % 32)
            flags = ((bits & ((1 << (KEYS // BLOCK_N)) - 1)) != 0).to(tl.int32)
            list_index = count + tl.cumsum(flags, axis=0) - flags
            tl.store(query_list_ptr + list_index, t, mask=flags > 0)
            count += tl.sum(flags, axis=0)
        tl.store(query_count_ptr + h.to(tl.int64) * tl.num_programs(0) + key_tile, count)


@triton.jit
def load_stats(stats_ptr, offs, size, mask):
    """Load the peaks and roots of rows.

    A row that sees no keys, or is after the end, has an infinite peak, so that its weights are
    zero.
    """
    peak = tl.load(stats_ptr + offs, mask=mask, other=float("-inf"))
    y = tl.load(stats_ptr + size + offs, mask=mask, other=0.0)
    empty = peak == float("-inf")
    return tl.where(empty, float("inf"), peak), y  # an infinite peak makes every distance infinite


@triton.jit(do_not_specialize=[*of_tile.UNSPECIALIZED, "tiles", "blocks"])
def dq_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    dout_ptr,
    out2_ptr,
    dq_ptr,
    delta_ptr,
    terms_ptr,
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
    sd_b,
    sd_h,
    sd_n,
    sg_b,
    sg_h,
    sg_n,
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
    NEED_Q: tl.constexpr,
    NEED_ALPHA: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute the gradients of a tile of queries, and their delta, which :func:`dkv_kernel` reads.

    Grid: ``[query tiles, H]``. With ``LISTS`` it visits the live blocks of ``BLOCK_N`` keys,
    otherwise all blocks with a key that the queries may attend to. Writes ``dq`` with ``NEED_Q``,
    ``delta``, and with ``NEED_ALPHA`` the ``terms`` of dalpha, one for each query.
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
        b64 = b.to(tl.int64)
        q_ptr += b64 * sq_b + h.to(tl.int64) * sq_h + tl.cast(q_base, tl.int64) * sq_n
        k_ptr += b64 * sk_b + (h // GROUP).to(tl.int64) * sk_h + tl.cast(k_base, tl.int64) * sk_n
        v_ptr += b64 * sv_b + (h // GROUP).to(tl.int64) * sv_h + tl.cast(k_base, tl.int64) * sv_n
        dout_ptr += b64 * sd_b + h.to(tl.int64) * sd_h + tl.cast(q_base, tl.int64) * sd_n
        out2_ptr += b64 * so_b + h.to(tl.int64) * so_h + tl.cast(q_base, tl.int64) * so_n
        if HAS_MASK:
            key_padding_mask_ptr += b64 * Nk
        e, _ = of_tile.exponent(alpha_ptr, h, alpha_value, HAS_ALPHA)
        i = m0 + tl.arange(0, BLOCK_M)
        mask_m = i < q_len
        shift = k_len - q_len
        if PACKED:
            offs = h.to(tl.int64) * Tq + q_base + i
        else:
            offs = plane.to(tl.int64) * Nq + i
        q = of_tile.load_rows(q_ptr, i, sq_n, mask_m, D, BLOCK_D)
        do = of_tile.load_rows(dout_ptr, i, sd_n, mask_m, D, BLOCK_D)
        o2 = of_tile.load_rows(out2_ptr, i, so_n, mask_m, D, BLOCK_D)
        delta = tl.sum(do.to(tl.float32) * o2.to(tl.float32), axis=1)
        tl.store(delta_ptr + offs, delta, mask=mask_m)
        peak, y = load_stats(stats_ptr, offs, stat_size, mask_m)
        c = peak_power(y, e, KIND)
        dq = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        total = tl.zeros((BLOCK_M, LANES), tl.float32)
        sum_a = tl.zeros((BLOCK_M, LANES), tl.float32)
        sum_b = tl.zeros((BLOCK_M, LANES), tl.float32)
        dot_a = tl.zeros((BLOCK_M, LANES), tl.float32)
        dot_b = tl.zeros((BLOCK_M, LANES), tl.float32)
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
        if LISTS:
            row = h.to(tl.int64) * tiles + tile
            count = tl.load(key_count_ptr + row)
            key_list_ptr += row * blocks
        if NEED_Q or NEED_ALPHA:
            for list_index in range(count):
                if LISTS:
                    block = tl.load(key_list_ptr + list_index)
                else:
                    block = first + list_index
                n0 = block * BLOCK_N
                j = n0 + tl.arange(0, BLOCK_N)
                s, k, keep = of_tile.score_tile(
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
                p, u = of_tile.weights(
                    s,
                    peak[:, None],
                    y[:, None],
                    c[:, None],
                    scale,
                    e,
                    KIND,
                    EXACT,
                )
                dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
                if DROPOUT:
                    dp *= of_tile.dropout_factor(
                        seed_ptr,
                        i[:, None],
                        j[None, :],
                        plane,
                        threshold,
                        keep_scale,
                    )
                if NEED_Q:
                    ds = u * (dp - delta[:, None])
                    dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
                if NEED_ALPHA:
                    term_a, term_b = alpha_terms(p, u, e)
                    total += lane_sums(u)
                    sum_a += lane_sums(term_a)
                    sum_b += lane_sums(term_b)
                    dot_a += lane_sums(term_a * dp)
                    dot_b += lane_sums(term_b * dp)
        if NEED_Q:
            dq_ptr += b64 * sg_b + h.to(tl.int64) * sg_h + tl.cast(q_base, tl.int64) * sg_n
            dq = tl.where((y != y)[:, None], float("nan"), dq * scale)
            of_tile.store_rows(dq_ptr, i, sg_n, mask_m, dq, D, BLOCK_D)
        if NEED_ALPHA:
            total = tl.sum(total, axis=1)
            rows = tl.sum(sum_a, axis=1) * tl.sum(dot_b, axis=1) - tl.sum(sum_b, axis=1) * tl.sum(
                dot_a,
                axis=1,
            )
            rows /= tl.where(total > 0, total, 1.0)
            tl.store(terms_ptr + offs, rows, mask=mask_m)


@triton.jit(do_not_specialize=[*of_tile.UNSPECIALIZED, "key_tiles_per", "tiles", "spans"])
def dkv_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    dout_ptr,
    dk_ptr,
    dv_ptr,
    delta_ptr,
    stats_ptr,
    query_list_ptr,
    query_count_ptr,
    alpha_ptr,
    key_padding_mask_ptr,
    cu_seqlens_q_ptr,
    cu_seqlens_k_ptr,
    q_start_ptr,
    k_batch_ptr,
    k_start_ptr,
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
    sd_b,
    sd_h,
    sd_n,
    sg_b,
    sg_h,
    sg_n,
    sw_b,
    sw_h,
    sw_n,
    Nq,
    Nk,
    Tq,
    Tk,
    B,
    tiles_per,
    key_tiles_per,
    window,
    scale,
    alpha_value,
    threshold,
    keep_scale,
    stat_size,
    tiles,
    spans,
    H: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    KEYS: tl.constexpr,
    QUERIES: tl.constexpr,
    KIND: tl.constexpr,
    HAS_ALPHA: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_MASK: tl.constexpr,
    PACKED: tl.constexpr,
    DROPOUT: tl.constexpr,
    EXACT: tl.constexpr,
    LISTS: tl.constexpr,
    NEED_K: tl.constexpr,
    NEED_V: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute the gradients of a tile of keys and values.

    Grid: ``[key tiles, Hkv]``. The query heads that share a key head are visited one after another,
    with ``LISTS`` only the tiles of queries in which a block is live. Writes ``dk`` with ``NEED_K``
    and ``dv`` with ``NEED_V``.
    """
    key_tile = tl.program_id(0)
    b, n0, k_base, k_len = of_tile.locate(
        key_tile,
        Nk,
        Tk,
        key_tiles_per,
        cu_seqlens_k_ptr,
        k_batch_ptr,
        k_start_ptr,
        B,
        KEYS,
        PACKED,
    )
    if n0 < k_len:
        kv = tl.program_id(1)
        q_base, q_len = of_tile.bounds(cu_seqlens_q_ptr, b, Nq, Tq, PACKED)
        b64 = b.to(tl.int64)
        kv64 = kv.to(tl.int64)
        j = n0 + tl.arange(0, KEYS)
        mask_n = j < k_len
        keep = mask_n
        if HAS_MASK:
            keep = of_tile.kept_keys(key_padding_mask_ptr + b64 * Nk, n0, k_len, KEYS, HAS_MASK)
        k = of_tile.load_rows(
            k_ptr + b64 * sk_b + kv64 * sk_h + tl.cast(k_base, tl.int64) * sk_n,
            j,
            sk_n,
            keep,
            D,
            BLOCK_D,
        )
        v = of_tile.load_rows(
            v_ptr + b64 * sv_b + kv64 * sv_h + tl.cast(k_base, tl.int64) * sv_n,
            j,
            sv_n,
            keep,
            D,
            BLOCK_D,
        )
        # turned here, they are put into shared memory once: Triton 3.9 would do it again in every
        # step
        turned_k = tl.trans(k)
        turned_v = tl.trans(v)
        dk = tl.zeros((KEYS, BLOCK_D), tl.float32)
        dv = tl.zeros((KEYS, BLOCK_D), tl.float32)
        shift = k_len - q_len
        low_row, high_row = of_tile.query_range(
            n0,
            tl.minimum(n0 + KEYS, k_len),
            shift,
            q_len,
            window,
            CAUSAL,
            WINDOW,
        )
        first = low_row // QUERIES
        count = tl.maximum((high_row + QUERIES - 1) // QUERIES - first, 0)
        if LISTS:
            if PACKED:
                of_queries = tl.load(q_start_ptr + b)
            else:
                of_queries = b * tiles_per
            list_offset = (n0 // KEYS) * ((q_len + BLOCK_M - 1) // BLOCK_M)
        for g in range(GROUP):
            h = kv * GROUP + g
            plane = b * H + h
            e, _ = of_tile.exponent(alpha_ptr, h, alpha_value, HAS_ALPHA)
            qs = q_ptr + b64 * sq_b + h.to(tl.int64) * sq_h + tl.cast(q_base, tl.int64) * sq_n
            dos = dout_ptr + b64 * sd_b + h.to(tl.int64) * sd_h + tl.cast(q_base, tl.int64) * sd_n
            if PACKED:
                to_row = h.to(tl.int64) * Tq + q_base
            else:
                to_row = plane.to(tl.int64) * Nq
            if LISTS:
                row = h.to(tl.int64) * tl.num_programs(0) + key_tile
                count = tl.load(query_count_ptr + row) * (BLOCK_M // QUERIES)
                listed = (
                    query_list_ptr + (h.to(tl.int64) * tiles + of_queries) * spans + list_offset
                )
            for list_index in range(count):
                if LISTS:
                    tile = tl.load(listed + list_index // (BLOCK_M // QUERIES))
                    m0 = tile * BLOCK_M + (list_index % (BLOCK_M // QUERIES)) * QUERIES
                else:
                    m0 = (first + list_index) * QUERIES
                i = m0 + tl.arange(0, QUERIES)
                mask_m = i < q_len
                q = of_tile.load_rows(qs, i, sq_n, mask_m, D, BLOCK_D)
                do = of_tile.load_rows(dos, i, sd_n, mask_m, D, BLOCK_D)
                peak, y = load_stats(stats_ptr, to_row + i, stat_size, mask_m)
                delta = tl.load(delta_ptr + to_row + i, mask=mask_m, other=0.0)
                s = tl.dot(q, turned_k, input_precision=PRECISION)  # [QUERIES, KEYS]
                edge = of_tile.is_edge(m0, n0, shift, k_len, window, QUERIES, KEYS, CAUSAL, WINDOW)
                s = of_tile.hide(
                    s,
                    i[:, None],
                    j[None, :],
                    keep[None, :],
                    edge,
                    shift,
                    scale,
                    window,
                    CAUSAL,
                    WINDOW,
                    HAS_MASK,
                    EXACT,
                )
                p, u = of_tile.weights(
                    s,
                    peak[:, None],
                    y[:, None],
                    peak_power(y, e, KIND)[:, None],
                    scale,
                    e,
                    KIND,
                    EXACT,
                )
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
                if NEED_V:
                    dv = tl.dot(tl.trans(p.to(do.dtype)), do, dv, input_precision=PRECISION)
                if NEED_K:
                    dp = tl.dot(do, turned_v, input_precision=PRECISION)
                    if DROPOUT:
                        dp *= factor
                    ds = u * (dp - delta[:, None])
                    dk = tl.dot(tl.trans(ds.to(q.dtype)), q, dk, input_precision=PRECISION)
        if NEED_K:
            dk_ptr += b64 * sg_b + kv64 * sg_h + tl.cast(k_base, tl.int64) * sg_n
            of_tile.store_rows(dk_ptr, j, sg_n, mask_n, dk * scale, D, BLOCK_D)
        if NEED_V:
            dv_ptr += b64 * sw_b + kv64 * sw_h + tl.cast(k_base, tl.int64) * sw_n
            of_tile.store_rows(dv_ptr, j, sw_n, mask_n, dv, D, BLOCK_D)
