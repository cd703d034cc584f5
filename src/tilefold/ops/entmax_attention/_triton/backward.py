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
    """List the live blocks of keys of each tile of queries, from the map.

    Grid: ``[query tiles, H]``.

    Args:
        live_ptr: map of live blocks, bits ``[H, tiles, words]``.
        key_list_ptr: live blocks of each tile, ``[H, tiles, blocks]``; written.
        key_count_ptr: number of live blocks of each tile, ``[H, tiles]``; written.
        tiles: tiles of queries of the batch.
        words: words of a tile's row of the map.
        blocks: the most blocks of a tile.
    """
    row = tl.program_id(1).to(tl.int64) * tiles + tl.program_id(0)
    lanes = tl.arange(0, 32)
    count = tl.zeros((), tl.int32)
    for word in range(words):
        flags = (tl.load(live_ptr + row * words + word) >> lanes) & 1
        list_index = count + tl.cumsum(flags, axis=0) - flags
        # The words of tiles after the last sequence were never written, and may hold any bits.
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
    """List the tiles of queries for which a tile of keys has a live block.

    Grid: ``[key tiles, H]``.

    Args:
        live_ptr: map of live blocks of ``BLOCK_N`` keys, bits ``[H, tiles, words]``.
        query_list_ptr: tiles of queries within their sequence; written. A sequence has space for
            all its tiles of queries, for each of its tiles of keys.
        query_count_ptr: number of listed tiles, ``[H, key tiles]``; written.
        cu_seqlens_q_ptr, cu_seqlens_k_ptr: offsets ``[B + 1]`` of packed sequences.
        q_start_ptr: first tile of queries of each sequence, see :func:`write_table`.
        k_batch_ptr, k_start_ptr: tables of the tiles of keys.
        Nq, Nk: numbers of queries and keys of a padded sequence.
        Tq, Tk: numbers of queries and keys of a packed batch.
        B: number of sequences.
        tiles_per, key_tiles_per: tiles of queries and of keys of a padded sequence.
        tiles: tiles of queries of the batch.
        words: words of a tile's row of the map.
        spans: the most tiles of keys of a sequence.
        BLOCK_M: queries of a tile.
        BLOCK_N: keys of a block.
        KEYS: keys of a tile, one or several blocks.
        PACKED: whether the batch is packed.
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
        block = n0 // BLOCK_N  # A tile's blocks share a word, since their number divides 32.
        n_tiles = (q_len + BLOCK_M - 1) // BLOCK_M
        fits = (n0 // KEYS < spans) & (first + n_tiles <= tiles)
        n_tiles = tl.where(fits, n_tiles, 0)  # for invalid offsets, nothing is read or written
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

    The peak of a row without keys, or after the last row, is infinity. Every distance is then
    infinite, and every weight 0.

    Args:
        stats_ptr: statistics of the rows, ``size`` apart.
        offs: offsets of the rows.
        size: number of rows of the batch.
        mask: rows that exist.
    """
    peak = tl.load(stats_ptr + offs, mask=mask, other=float("-inf"))
    y = tl.load(stats_ptr + size + offs, mask=mask, other=0.0)
    empty = peak == float("-inf")
    return tl.where(empty, float("inf"), peak), y


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
    """Compute the gradients of a tile of queries, and their ``delta`` for :func:`dkv_kernel`.

    With the slopes ``u = p^(2 - alpha)``, the gradient of a score is ``ds = u (dp - delta)``, where
    ``delta`` is the mean of a row's ``dp`` weighted by its slopes, ``dout . out2``. Then
    ``dq = scale * ds @ k``.

    Grid: ``[query tiles, H]``. A program visits the live blocks of keys if these are listed,
    otherwise all blocks that its queries may attend to.

    Args:
        q_ptr: queries ``[B, H, Nq, D]``. All tensors of tokens may be packed, and then hold the
            tokens of all sequences without padding.
        k_ptr: keys ``[B, Hkv, Nk, D]``.
        v_ptr: values, shaped like the keys.
        dout_ptr: gradient of the output.
        out2_ptr: output with the slopes in place of the weights.
        dq_ptr: gradient of the queries; written with ``NEED_Q``.
        delta_ptr: delta of each query; written.
        terms_ptr: gradient of alpha of each query, to be summed over queries; written with
            ``NEED_ALPHA``.
        stats_ptr: peak, root, mass and support of each query, ``stat_size`` apart.
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
        so_b, so_h, so_n: strides of out2.
        sd_b, sd_h, sd_n: strides of dout.
        sg_b, sg_h, sg_n: strides of dq.
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
        NEED_Q: whether the gradient of the queries is needed.
        NEED_ALPHA: whether the gradient of alpha is needed.
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
        dout_ptr += of_tile.row_offset(b, h, q_base, sd_b, sd_h, sd_n)
        out2_ptr += of_tile.row_offset(b, h, q_base, so_b, so_h, so_n)
        if HAS_MASK:
            key_padding_mask_ptr += b.to(tl.int64) * Nk
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
        slopes = tl.zeros((BLOCK_M, LANES), tl.float32)
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
                    slopes += lane_sums(u)
                    sum_a += lane_sums(term_a)
                    sum_b += lane_sums(term_b)
                    dot_a += lane_sums(term_a * dp)
                    dot_b += lane_sums(term_b * dp)
        if NEED_Q:
            dq_ptr += of_tile.row_offset(b, h, q_base, sg_b, sg_h, sg_n)
            dq = tl.where((y != y)[:, None], float("nan"), dq * scale)
            of_tile.store_rows(dq_ptr, i, sg_n, mask_m, dq, D, BLOCK_D)
        if NEED_ALPHA:
            slopes = tl.sum(slopes, axis=1)
            dalpha = tl.sum(sum_a, axis=1) * tl.sum(dot_b, axis=1) - tl.sum(sum_b, axis=1) * tl.sum(
                dot_a,
                axis=1,
            )
            dalpha /= tl.where(slopes > 0, slopes, 1.0)
            tl.store(terms_ptr + offs, dalpha, mask=mask_m)


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

    With the slopes ``u = p^(2 - alpha)``, the gradient of a score is ``ds = u (dp - delta)``, where
    ``delta`` is the mean of a row's ``dp`` weighted by its slopes. Then ``dk = scale * ds.T @ q``
    and ``dv = p.T @ dout``.

    Grid: ``[key tiles, Hkv]``. The query heads that share a key head are visited one after another,
    and the tiles of queries for which a block of the tile is live (all tiles without ``LISTS``).

    Args:
        q_ptr: queries ``[B, H, Nq, D]``. All tensors of tokens may be packed, and then hold the
            tokens of all sequences without padding.
        k_ptr: keys ``[B, Hkv, Nk, D]``.
        v_ptr: values, shaped like the keys.
        dout_ptr: gradient of the output.
        dk_ptr: gradient of the keys; written with ``NEED_K``.
        dv_ptr: gradient of the values; written with ``NEED_V``.
        delta_ptr: delta of each query, from :func:`dq_kernel`.
        stats_ptr: peak, root, mass and support of each query, ``stat_size`` apart.
        query_list_ptr, query_count_ptr: the lists of :func:`query_lists_kernel`, with ``LISTS``.
        alpha_ptr: alpha ``[H]``, with ``HAS_ALPHA``.
        key_padding_mask_ptr: ``[B, Nk]``, 0 for masked keys, with ``HAS_MASK``.
        cu_seqlens_q_ptr, cu_seqlens_k_ptr: offsets ``[B + 1]`` of packed sequences.
        q_start_ptr: first tile of queries of each sequence, see :func:`write_table`.
        k_batch_ptr, k_start_ptr: tables of the tiles of keys.
        seed_ptr: seed of dropout, with ``DROPOUT``.
        sq_b, sq_h, sq_n: strides of q over sequences, heads and tokens.
        sk_b, sk_h, sk_n: strides of k.
        sv_b, sv_h, sv_n: strides of v.
        sd_b, sd_h, sd_n: strides of dout.
        sg_b, sg_h, sg_n: strides of dk.
        sw_b, sw_h, sw_n: strides of dv.
        Nq, Nk: numbers of queries and keys of a padded sequence.
        Tq, Tk: numbers of queries and keys of a packed batch.
        B: number of sequences.
        tiles_per: tiles of queries of a padded sequence.
        key_tiles_per: tiles of keys of a padded sequence.
        window: a query attends to keys at most this far away, with ``WINDOW``.
        scale: factor of the products of queries and keys.
        alpha_value: alpha of all heads without ``HAS_ALPHA``.
        threshold, keep_scale: numbers of :func:`dropout_factor`, with ``DROPOUT``.
        stat_size: distance between two statistics of a query.
        tiles: tiles of queries of the batch.
        spans: the most tiles of keys of a sequence.
        H: number of query heads.
        GROUP: number of query heads that share a key head.
        D: head dimension; ``BLOCK_D`` is the next power of two.
        BLOCK_M: queries of a listed tile.
        KEYS: keys of the tile.
        QUERIES: queries that are read at a time, a divisor of ``BLOCK_M``.
        KIND: kind of alpha, see ``_shared/_triton/entmax.py``.
        HAS_ALPHA: whether each head has its own alpha.
        CAUSAL, WINDOW, HAS_MASK: which of the masks are used.
        PACKED: whether the batch is packed.
        EXACT: whether the scale is a positive power of two, see :func:`hide`.
        DROPOUT: whether weights are dropped.
        LISTS: whether live tiles of queries are listed.
        NEED_K, NEED_V: which gradients are needed.
        PRECISION: precision of products of fp32.
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
        # Transposed in the loop, they would be copied to shared memory in every step (Triton 3.9).
        transposed_k = tl.trans(k)
        transposed_v = tl.trans(v)
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
                first_query_tile = tl.load(q_start_ptr + b)
            else:
                first_query_tile = b * tiles_per
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
                    query_list_ptr
                    + (h.to(tl.int64) * tiles + first_query_tile) * spans
                    + list_offset
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
                s = tl.dot(q, transposed_k, input_precision=PRECISION)  # [QUERIES, KEYS]
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
                    dp = tl.dot(do, transposed_v, input_precision=PRECISION)
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
