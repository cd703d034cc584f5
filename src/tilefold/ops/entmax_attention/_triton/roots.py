"""Roots of long rows by blocks of keys, and the map of live blocks.

A first pass over the keys leaves the maxima of some parts of every row, and its maximum in every
block, in scratch. The root of some maxima alone is, by the subset lemma, not smaller than the
row's: a block none of whose rows has a maximum inside that bound has only zeros. The root is then
found on the remaining blocks, and the list is shortened once more by the root itself, with the same
comparison that makes a weight positive. Rows of few blocks, whose blocks are rarely all zero, need
no scratch, list and map.
"""

import inspect

import triton
import triton.language as tl

from tilefold.ops._shared._triton.activation import nan_max
from tilefold.ops._shared._triton.entmax import (
    MAX_EVALUATIONS,
    needs_care,
    peak_power,
    row_peak,
    row_sums,
)
from tilefold.ops.entmax_attention._triton import rows as of_row
from tilefold.ops.entmax_attention._triton import tiles as of_tile

# What is the same for every item is cheap to make again, and would fill the registers from item to
# item. Triton 3.5.
CAN_STOP_HOISTING = tl.constexpr("disable_licm" in inspect.signature(tl.range.__init__).parameters)
# Parts of a long row, whose maxima are stored. In a short row every column of a block is a part.
PARTS = tl.constexpr(16)
PART_STEPS = tl.constexpr(3)  # steps of Newton on the maxima of parts; each gives a safe bound
BLOCK_STEPS = tl.constexpr(2)  # steps of Newton on the maxima of blocks


@triton.jit
def block_distances(
    maxima_ptr,
    block,
    low_block,
    high_block,
    peak,
    e,
    BLOCK_M: tl.constexpr,
    KIND: tl.constexpr,
):
    """Return the distances of block maxima below the peak of their row, ``[BLOCK_M, blocks]``.

    Args:
        maxima_ptr: the largest score of each row in each block, ``[blocks, BLOCK_M]``, from
            ``low_block`` on.
        block: the blocks of keys.
        low_block: the first block that the rows attend to.
        high_block: the block after the last one.
        peak: the largest score of each row.
        e: ``alpha - 1``.
        BLOCK_M: rows of the tile.
        KIND: kind of alpha. The distances of entmax15 and sparsemax are multiplied by ``e``.
    """
    inside = (block >= low_block) & (block < high_block)
    offs = (block - low_block).to(tl.int64)[None, :] * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    best = tl.load(maxima_ptr + offs, mask=inside[None, :], other=float("-inf"))
    return of_tile.distances(best, peak[:, None], 1.0, e, KIND, False)


@triton.jit
def live_flags(
    maxima_ptr,
    word,
    low_block,
    high_block,
    peak,
    y,
    c,
    e,
    is_idle,
    BLOCK_M: tl.constexpr,
    KIND: tl.constexpr,
):
    """Return which of the 32 blocks of a word may have a positive weight in some row.

    Args:
        maxima_ptr: the largest score of each row in each block, ``[blocks, BLOCK_M]``, from
            ``low_block`` on.
        word: number of the word.
        low_block: the first block that the rows attend to.
        high_block: the block after the last one.
        peak: the largest score of each row.
        y: an upper bound of the root of each row.
        c: :func:`peak_power` of ``y``.
        e: ``alpha - 1``.
        is_idle: rows without weights, which do not count.
        BLOCK_M: rows of the tile.
        KIND: kind of alpha.

    Returns:
        Flags ``[32]`` int32, and the blocks.
    """
    block = word * 32 + tl.arange(0, 32)
    d = block_distances(maxima_ptr, block, low_block, high_block, peak, e, BLOCK_M, KIND)
    live = of_tile.alive(d, y[:, None], c[:, None], e, KIND) & ~is_idle[:, None]
    return tl.max(live.to(tl.int32), axis=0), block


@triton.jit
def list_live(
    maxima_ptr,
    key_list_ptr,
    live_ptr,
    low_block,
    high_block,
    words,
    peak,
    y,
    e,
    is_idle,
    BLOCK_M: tl.constexpr,
    KIND: tl.constexpr,
    WRITE_MAP: tl.constexpr,
):
    """List the blocks of keys in which some row of a tile may have a positive weight.

    Args:
        maxima_ptr: the largest score of each row in each block, ``[blocks, BLOCK_M]``, from
            ``low_block`` on.
        key_list_ptr: list of the blocks; written.
        live_ptr: the tile's row of the map, one bit for each block; written with ``WRITE_MAP``.
        low_block: the first block that the rows attend to.
        high_block: the block after the last one.
        words: words of a row of the map.
        peak: the largest score of each row.
        y: an upper bound of the root of each row.
        e: ``alpha - 1``.
        is_idle: rows without weights, which do not count.
        BLOCK_M: rows of the tile.
        KIND: kind of alpha.
        WRITE_MAP: whether the map is written. All of its words are written then.

    Returns:
        The number of blocks.
    """
    c = peak_power(y, e, KIND)
    count = low_block * 0
    first = low_block // 32
    last = (high_block + 31) // 32
    if WRITE_MAP:
        first = first * 0
        last = words
    for word in range(first, last):
        flags, block = live_flags(
            maxima_ptr,
            word,
            low_block,
            high_block,
            peak,
            y,
            c,
            e,
            is_idle,
            BLOCK_M,
            KIND,
        )
        list_index = count + tl.cumsum(flags, axis=0) - flags
        tl.store(key_list_ptr + list_index, block, mask=flags > 0)
        count += tl.sum(flags, axis=0)
        if WRITE_MAP:
            tl.store(live_ptr + word, tl.sum(flags << tl.arange(0, 32), axis=0))
    return count


@triton.jit
def blocks_bound(
    maxima_ptr,
    low_block,
    high_block,
    peak,
    y,
    e,
    BLOCK_M: tl.constexpr,
    WIDTH: tl.constexpr,
    KIND: tl.constexpr,
    TOLERANCE: tl.constexpr,
):
    """Return an upper bound of the root of each row, from its maxima in the blocks.

    Args:
        maxima_ptr: the largest score of each row in each block, ``[blocks, BLOCK_M]``, from
            ``low_block`` on.
        low_block: the first block that the rows attend to.
        high_block: the block after the last one.
        peak: the largest score of each row.
        y: a bound to begin with.
        e: ``alpha - 1``.
        BLOCK_M: rows of the tile.
        WIDTH: blocks that are read at a time.
        KIND: kind of alpha.
        TOLERANCE: residual at which a root counts as reached.
    """
    for _step in range(BLOCK_STEPS):
        c = peak_power(y, e, KIND)
        f = tl.zeros_like(y)
        u = tl.zeros_like(y)
        for first in range(low_block, high_block, WIDTH):
            block = first + tl.arange(0, WIDTH)
            d = block_distances(maxima_ptr, block, low_block, high_block, peak, e, BLOCK_M, KIND)
            tile_f, tile_u, _tile_q = row_sums(
                d,
                y[:, None],
                c[:, None],
                e,
                needs_care(e, KIND),
                KIND,
            )
            f += tile_f
            u += tile_u
        y = of_row.subset_step(y, f, u, e, KIND, TOLERANCE)
    return y


@triton.jit
def tile_roots(
    item,
    q_ptr,
    k_ptr,
    stats_ptr,
    live_ptr,
    maxima_ptr,
    key_list_ptr,
    key_count_ptr,
    alpha_ptr,
    key_padding_mask_ptr,
    cu_seqlens_q_ptr,
    cu_seqlens_k_ptr,
    q_batch_ptr,
    q_start_ptr,
    sq_b,
    sq_h,
    sq_n,
    sk_b,
    sk_h,
    sk_n,
    Nq,
    Nk,
    Tq,
    Tk,
    B,
    tiles_per,
    window,
    scale,
    alpha_value,
    stat_size,
    tiles,
    blocks,
    words,
    H: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WIDTH: tl.constexpr,
    KIND: tl.constexpr,
    HAS_ALPHA: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_MASK: tl.constexpr,
    PACKED: tl.constexpr,
    EXACT: tl.constexpr,
    LISTS: tl.constexpr,
    TOLERANCE: tl.constexpr,
    NEAR: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute the peak and the root of each row of a tile, and list the live blocks of keys.

    A block is live if some row of the tile may have a positive weight in it.

    Args:
        item: number of the tile, over all heads.
        maxima_ptr: scratch of this program, ``[blocks, BLOCK_M]``, with ``LISTS``.

    All other arguments are those of :func:`roots_kernel`.
    """
    h = item // tiles
    tile = tiles - 1 - item % tiles  # under causal attention the last tiles have most to do
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
        k_base, k_len = of_tile.bounds(cu_seqlens_k_ptr, b, Nk, Tk, PACKED)
        plane = b * H + h
        qs = q_ptr + of_tile.row_offset(b, h, q_base, sq_b, sq_h, sq_n)
        ks = k_ptr + of_tile.row_offset(b, h // GROUP, k_base, sk_b, sk_h, sk_n)
        key_mask = key_padding_mask_ptr
        if HAS_MASK:
            key_mask = key_padding_mask_ptr + b.to(tl.int64) * Nk
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
        low_block = low_key // BLOCK_N
        high_block = tl.minimum((high_key + BLOCK_N - 1) // BLOCK_N, low_block + blocks)
        high_block = tl.maximum(high_block, low_block)
        q = of_tile.load_rows(qs, i, sq_n, mask_m, D, BLOCK_D)

        # Step 1: the largest scores of parts of each row, and with LISTS those of each block.
        COUNT: tl.constexpr = PARTS if LISTS else BLOCK_N
        # The second largest is computed for short rows only.
        first = tl.full((BLOCK_M, COUNT), float("-inf"), tl.float32)
        second = first
        for block in range(low_block, high_block):
            n0 = block * BLOCK_N
            s, _, _ = of_tile.score_tile(
                q,
                ks,
                key_mask,
                m0,
                i,
                n0,
                n0 + tl.arange(0, BLOCK_N),
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
            if LISTS:
                largest = of_row.lane_peaks(s, COUNT)
                tile_best = of_tile.scaled(row_peak(largest), scale, EXACT)
                tl.store(
                    maxima_ptr + (block - low_block) * BLOCK_M + tl.arange(0, BLOCK_M),
                    tile_best,
                )
                first = nan_max(first, largest)
            else:
                second = tl.maximum(second, tl.minimum(first, s))
                first = nan_max(first, s)

        # Step 2: an upper bound of the root, from these maxima alone.
        keys = tl.minimum(high_key, high_block * BLOCK_N) - low_key
        best = of_tile.scaled(row_peak(first), scale, EXACT)
        peak, broken, empty, low, high = of_row.start_row(best, e, passed_e, keys, KIND)
        is_idle = broken | empty | ~mask_m
        y = high
        if KIND != "softmax":
            y = of_row.parts_bound(
                first,
                second,
                peak,
                scale,
                high,
                e,
                PART_STEPS,
                not LISTS,
                KIND,
                EXACT,
                TOLERANCE,
            )
        if LISTS:
            tl.debug_barrier()  # other threads of the program read what was stored
            if KIND != "softmax":
                y = blocks_bound(
                    maxima_ptr,
                    low_block,
                    high_block,
                    peak,
                    y,
                    e,
                    BLOCK_M,
                    WIDTH,
                    KIND,
                    TOLERANCE,
                )
        if KIND != "softmax":
            y = tl.where(is_idle, high, tl.maximum(of_row.widen(y, high, e, KIND), low))
        high = y
        count = high_block - low_block
        row = h.to(tl.int64) * tiles + tile
        if LISTS:
            listed = key_list_ptr + row * blocks
            count = list_live(
                maxima_ptr,
                listed,
                live_ptr,
                low_block,
                high_block,
                words,
                peak,
                y,
                e,
                is_idle,
                BLOCK_M,
                KIND,
                False,
            )
            tl.debug_barrier()

        # Step 3: the root, on the blocks that are live for the bound.
        previous_residual = tl.zeros_like(peak) + float("inf")
        support_low = tl.zeros_like(peak)
        support_high = support_low + keys
        converged = is_idle
        max_rise = tl.zeros_like(peak)
        evaluation = 0
        while evaluation < MAX_EVALUATIONS:
            c = peak_power(y, e, KIND)
            f = tl.zeros((BLOCK_M, of_row.LANES), tl.float32)
            u = tl.zeros((BLOCK_M, of_row.LANES), tl.float32)
            n = tl.zeros((BLOCK_M, of_row.LANES), tl.float32)
            for list_index in range(count):
                if LISTS:
                    n0 = tl.load(listed + list_index) * BLOCK_N
                else:
                    n0 = (low_block + list_index) * BLOCK_N
                s, _, _ = of_tile.score_tile(
                    q,
                    ks,
                    key_mask,
                    m0,
                    i,
                    n0,
                    n0 + tl.arange(0, BLOCK_N),
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
                f, u, n = of_row.add_terms(s, peak, y, c, scale, e, f, u, n, KIND, EXACT)
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

        # Step 4: the blocks that are live for the root.
        max_root = y + max_rise
        if LISTS:
            tl.debug_barrier()
            count = list_live(
                maxima_ptr,
                listed,
                live_ptr + row * words,
                low_block,
                high_block,
                words,
                peak,
                max_root,
                e,
                is_idle,
                BLOCK_M,
                KIND,
                True,
            )
            tl.store(key_count_ptr + row, count)
        if PACKED:
            offs = h.to(tl.int64) * Tq + q_base + i
        else:
            offs = plane.to(tl.int64) * Nq + i
        tl.store(stats_ptr + offs, tl.where(empty, float("-inf"), peak), mask=mask_m)
        tl.store(stats_ptr + stat_size + offs, tl.where(broken, float("nan"), y), mask=mask_m)
        tl.store(stats_ptr + 2 * stat_size + offs, max_root, mask=mask_m)
        if (KIND != "softmax") & (KIND != "sparsemax"):
            tl.store(stats_ptr + 3 * stat_size + offs, support_low, mask=mask_m)
        if LISTS:
            tl.debug_barrier()  # the next item overwrites the scratch


@triton.jit(do_not_specialize=[*of_tile.UNSPECIALIZED, "tiles", "blocks", "words"])
def roots_kernel(
    q_ptr,
    k_ptr,
    stats_ptr,
    live_ptr,
    maxima_ptr,
    key_list_ptr,
    key_count_ptr,
    alpha_ptr,
    key_padding_mask_ptr,
    cu_seqlens_q_ptr,
    cu_seqlens_k_ptr,
    q_batch_ptr,
    q_start_ptr,
    sq_b,
    sq_h,
    sq_n,
    sk_b,
    sk_h,
    sk_n,
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
    words,
    H: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WIDTH: tl.constexpr,
    KIND: tl.constexpr,
    HAS_ALPHA: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_MASK: tl.constexpr,
    PACKED: tl.constexpr,
    DROPOUT: tl.constexpr,
    EXACT: tl.constexpr,
    LISTS: tl.constexpr,
    TOLERANCE: tl.constexpr,
    NEAR: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute the peak and the root of each row, and list the live blocks of keys of each tile.

    A block is live for a tile of queries if some query of it may have a positive weight there.

    Grid: any number of programs, which share the tiles of all heads.

    Args:
        q_ptr: queries ``[B, H, Nq, D]``. All tensors of tokens may be packed, and then hold the
            tokens of all sequences without padding.
        k_ptr: keys ``[B, Hkv, Nk, D]``.
        stats_ptr: statistics of each query, four numbers that are ``stat_size`` apart. Written are
            the peak, the root, and for :func:`last_step` the largest root and the excess of the
            mass.
        live_ptr: map of live blocks, bits ``[H, tiles, words]``; written with ``LISTS``.
        maxima_ptr: scratch ``[programs, blocks, BLOCK_M]``, with ``LISTS``.
        key_list_ptr: live blocks of each tile, ``[H, tiles, blocks]``; written with ``LISTS``.
        key_count_ptr: number of live blocks of each tile, ``[H, tiles]``; written with ``LISTS``.
        alpha_ptr: alpha ``[H]``, with ``HAS_ALPHA``.
        key_padding_mask_ptr: ``[B, Nk]``, 0 for masked keys, with ``HAS_MASK``.
        cu_seqlens_q_ptr, cu_seqlens_k_ptr: offsets ``[B + 1]`` of packed sequences.
        q_batch_ptr, q_start_ptr: tables of the tiles of queries, see :func:`write_table`.
        sq_b, sq_h, sq_n: strides of q over sequences, heads and tokens.
        sk_b, sk_h, sk_n: strides of k.
        Nq, Nk: numbers of queries and keys of a padded sequence.
        Tq, Tk: numbers of queries and keys of a packed batch.
        B: number of sequences.
        tiles_per: tiles of queries of a padded sequence.
        window: a query attends to keys at most this far away, with ``WINDOW``.
        scale: factor of the products of queries and keys.
        alpha_value: alpha of all heads without ``HAS_ALPHA``.
        threshold, keep_scale: not used here.
        stat_size: distance between two statistics of a query.
        tiles: tiles of queries of the batch.
        blocks: the most blocks of keys of a tile of queries.
        words: words of a tile's row of the map.
        H: number of query heads.
        GROUP: number of query heads that share a key head.
        D: head dimension; ``BLOCK_D`` is the next power of two.
        BLOCK_M, BLOCK_N: queries of a tile, and keys of a block.
        WIDTH: blocks whose maxima are read at a time.
        KIND: kind of alpha, see ``_shared/_triton/entmax.py``.
        HAS_ALPHA: whether each head has its own alpha.
        CAUSAL, WINDOW, HAS_MASK: which of the masks are used.
        PACKED: whether the batch is packed.
        EXACT: whether the scale is a positive power of two, see :func:`hide`.
        DROPOUT: not used here.
        LISTS: whether live blocks are listed, which is worth it for long rows only.
        TOLERANCE, NEAR: permitted errors of the mass and of the weights, see :func:`improve`.
        PRECISION: precision of products of fp32.
    """
    program = tl.program_id(0)
    if LISTS:
        maxima_ptr += program.to(tl.int64) * blocks * BLOCK_M
    if CAN_STOP_HOISTING:
        for item in tl.range(program, tiles * H, tl.num_programs(0), disable_licm=True):
            tile_roots(
                item,
                q_ptr,
                k_ptr,
                stats_ptr,
                live_ptr,
                maxima_ptr,
                key_list_ptr,
                key_count_ptr,
                alpha_ptr,
                key_padding_mask_ptr,
                cu_seqlens_q_ptr,
                cu_seqlens_k_ptr,
                q_batch_ptr,
                q_start_ptr,
                sq_b,
                sq_h,
                sq_n,
                sk_b,
                sk_h,
                sk_n,
                Nq,
                Nk,
                Tq,
                Tk,
                B,
                tiles_per,
                window,
                scale,
                alpha_value,
                stat_size,
                tiles,
                blocks,
                words,
                H,
                GROUP,
                D,
                BLOCK_D,
                BLOCK_M,
                BLOCK_N,
                WIDTH,
                KIND,
                HAS_ALPHA,
                CAUSAL,
                WINDOW,
                HAS_MASK,
                PACKED,
                EXACT,
                LISTS,
                TOLERANCE,
                NEAR,
                PRECISION,
            )
    else:
        for item in range(program, tiles * H, tl.num_programs(0)):
            tile_roots(
                item,
                q_ptr,
                k_ptr,
                stats_ptr,
                live_ptr,
                maxima_ptr,
                key_list_ptr,
                key_count_ptr,
                alpha_ptr,
                key_padding_mask_ptr,
                cu_seqlens_q_ptr,
                cu_seqlens_k_ptr,
                q_batch_ptr,
                q_start_ptr,
                sq_b,
                sq_h,
                sq_n,
                sk_b,
                sk_h,
                sk_n,
                Nq,
                Nk,
                Tq,
                Tk,
                B,
                tiles_per,
                window,
                scale,
                alpha_value,
                stat_size,
                tiles,
                blocks,
                words,
                H,
                GROUP,
                D,
                BLOCK_D,
                BLOCK_M,
                BLOCK_N,
                WIDTH,
                KIND,
                HAS_ALPHA,
                CAUSAL,
                WINDOW,
                HAS_MASK,
                PACKED,
                EXACT,
                LISTS,
                TOLERANCE,
                NEAR,
                PRECISION,
            )
