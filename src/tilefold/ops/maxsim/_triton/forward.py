"""Forward kernels, in which a tile of query tokens stays and document tokens stream past.

The running maximum is in registers. For all pairs a tile has the tokens of several queries one
after another, so that short queries fill it. A program owns one tile and a share of the documents.
Its loop runs over the tiles of all of them, so that loads of the next document are in flight while
the last tile of a document is reduced. A query that several tiles share leaves partial sums in a
small buffer, which a second kernel adds up in a fixed order. For listed pairs a program owns one
pair.
"""

import triton
import triton.language as tl

from tilefold.ops._shared._triton.offsets import mask_if
from tilefold.ops.maxsim._triton.device import (
    INDEX,
    SIZES,
    bounds,
    count_tiles,
    finish,
    fold_tile,
    init_state,
    load_block,
    mask_tile,
    sequence_at,
    split_scale,
    times_power,
)
from tilefold.ops.maxsim._triton.norms import query_of


@triton.jit
def _products(
    q,
    queries_ptr,
    row0,
    rows,
    power,
    documents_src,
    start,
    t0,
    n_rows,
    D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    USE_TMA: tl.constexpr,
    PRECISION: tl.constexpr,
    INTEGER: tl.constexpr,
    NORMALIZED: tl.constexpr,
):
    """Compute the products of a query tile and a document tile, fp32 ``[BLOCK_Q, BLOCK_T]``.

    Args:
        q: the query tile, if ``D <= BLOCK_K``. Otherwise it is loaded in parts here.
        queries_ptr: query rows ``[Tq, D]``.
        row0: first query row of the tile.
        rows: number of query rows of the tile.
        power: power of two by which each query row is multiplied, if NORMALIZED.
        documents_src: document rows ``[Td, D]``, a pointer or a TMA descriptor.
        start: first row of the document.
        t0: position of the tile's first token in the document.
        n_rows: number of all document rows.
        D: dimension of the rows.
        BLOCK_Q, BLOCK_T, BLOCK_K: query rows, document rows and columns of a product.
        USE_TMA: whether ``documents_src`` is a TMA descriptor.
        PRECISION: precision of products of fp32.
        INTEGER: whether rows are int8.
        NORMALIZED: whether query rows are multiplied by powers.
    """
    kind: tl.constexpr = tl.int32 if INTEGER else tl.float32
    acc = tl.zeros((BLOCK_Q, BLOCK_T), kind)
    first = start + t0
    if D <= BLOCK_K:
        if USE_TMA:
            d = documents_src.load([first, 0])  # [BLOCK_T, BLOCK_K]
        else:
            d = load_block(documents_src, first, n_rows - first, tl.arange(0, BLOCK_K), D, BLOCK_T)
        acc = tl.dot(q, d.to(q.dtype).T, acc, input_precision=PRECISION, out_dtype=kind)
    else:
        for k0 in range(0, D, BLOCK_K):
            k = k0 + tl.arange(0, BLOCK_K)
            q_part = load_block(queries_ptr, row0, rows, k, D, BLOCK_Q)
            if NORMALIZED:
                q_part = times_power(q_part, power)
            if USE_TMA:
                d = documents_src.load([first, k0])
            else:
                d = load_block(documents_src, first, n_rows - first, k, D, BLOCK_T)
            acc = tl.dot(
                q_part,
                d.to(q_part.dtype).T,
                acc,
                input_precision=PRECISION,
                out_dtype=kind,
            )
    return acc.to(tl.float32)


@triton.jit
def _query_rows(
    queries_ptr,
    mask_ptr,
    scale_ptr,
    row0,
    rows,
    row,
    inside,
    D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    NORMALIZED: tl.constexpr,
):
    """Load the first block of a query tile, and the factors of its rows.

    An inverse norm is split in two: a power of two, by which rows are multiplied without rounding
    so that their products neither overflow nor vanish, and a mantissa for their maxima.

    Args:
        queries_ptr: query rows ``[Tq, D]``.
        mask_ptr: mask ``[Tq]``, if HAS_MASK.
        scale_ptr: factors ``[Tq]`` of the rows, if HAS_SCALE.
        row0: first row of the tile.
        rows: number of rows of the tile.
        row: the rows.
        inside: rows that exist.
        D: dimension of the rows.
        BLOCK_Q, BLOCK_K: rows and columns of the block.
        HAS_MASK: whether queries have a mask.
        HAS_SCALE: whether rows have factors.
        NORMALIZED: whether these are inverse norms.

    Returns:
        The block, the rows that are not masked, the factors of their maxima, and the powers.
    """
    q = load_block(queries_ptr, row0, rows, tl.arange(0, BLOCK_K), D, BLOCK_Q)
    unmasked = inside
    if HAS_MASK:
        unmasked = inside & (tl.load(mask_ptr + row, mask=inside, other=0) != 0)
    scale = tl.full(row.shape, 1.0, tl.float32)
    power = scale
    if HAS_SCALE:
        scale = tl.load(scale_ptr + row, mask=inside, other=0.0)
        if NORMALIZED:
            power, scale = split_scale(scale)
            q = times_power(q, power)
    return q, unmasked, scale, power


@triton.jit(do_not_specialize=SIZES)
def ends_kernel(document_mask_ptr, ends_ptr, length_d, BLOCK: tl.constexpr):
    """Write the position after the last unmasked token of each padded document.

    Grid: ``[Nd]``.

    Args:
        document_mask_ptr: mask ``[Nd, length_d]``.
        ends_ptr: ends ``[Nd]``; written.
        length_d: length of the documents.
        BLOCK: mask entries that are read at a time.
    """
    d = tl.program_id(0)
    end = 0
    for t0 in range(0, length_d, BLOCK):
        t = t0 + tl.arange(0, BLOCK)
        unmasked = (
            tl.load(document_mask_ptr + d.to(tl.int64) * length_d + t, mask=t < length_d, other=0)
            != 0
        )
        end = tl.maximum(end, tl.max(tl.where(unmasked, t + 1, 0)))
    tl.store(ends_ptr + d, end)


@triton.jit(do_not_specialize=SIZES)
def all_pairs_kernel(
    queries_ptr,
    documents_src,
    query_mask_ptr,
    document_mask_ptr,
    query_factors_ptr,
    document_factors_ptr,
    cu_queries_ptr,
    cu_documents_ptr,
    scores_ptr,
    parts_ptr,
    saved_ptr,
    row_query_ptr,
    Tq,
    Td,
    Nq,
    Nd,
    length_q,
    length_d,
    tile_rows,
    splits,
    steps,
    temperature,
    inverse_temperature,
    divisor,
    D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    LQ: tl.constexpr,
    DIRECT: tl.constexpr,
    UNIFORM_Q: tl.constexpr,
    UNIFORM_D: tl.constexpr,
    HAS_QMASK: tl.constexpr,
    HAS_DMASK: tl.constexpr,
    HAS_QSCALE: tl.constexpr,
    MASK_ZERO: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    SMOOTH: tl.constexpr,
    WITH_SAVED: tl.constexpr,
    NO_WINNER: tl.constexpr,
    USE_TMA: tl.constexpr,
    PRECISION: tl.constexpr,
    INTEGER: tl.constexpr,
    NORMALIZED: tl.constexpr,
):
    """Compute the scores of a tile of query tokens with a share of the documents, for all pairs.

    A program has every ``splits``-th document. The loop takes the token tiles of all of them one
    after another, so that the next document is loaded while the last tile of one is reduced. After
    the last tile of a document its scores are stored. Grid: ``[ceil(Tq / tile_rows), splits]``.

    Args:
        queries_ptr: query rows ``[Tq, D]``.
        documents_src: document rows ``[Td, D]``, a pointer or a TMA descriptor.
        query_mask_ptr, document_mask_ptr: masks ``[Tq]`` and ``[Td]``.
        query_factors_ptr, document_factors_ptr: factors ``[Tq]`` and ``[Td]`` of the rows.
        cu_queries_ptr: offsets ``[Nq + 1]`` of the queries, unless UNIFORM_Q.
        cu_documents_ptr: offsets ``[Nd + 1]`` of the documents, unless UNIFORM_D.
        scores_ptr: scores ``[Nq, Nd]``; written if DIRECT.
        parts_ptr: partial sums for :func:`combine_kernel`; written unless DIRECT.
        saved_ptr: winners or smooth maxima ``[Nd, Tq]``; written if WITH_SAVED.
        row_query_ptr: query of each row; written if WITH_SAVED, unless UNIFORM_Q.
        Tq, Td: numbers of query and document rows.
        Nq, Nd: numbers of queries and documents.
        length_q, length_d: length of all queries, and of all documents, if UNIFORM_Q or UNIFORM_D.
        tile_rows: query tokens of a tile, at most BLOCK_Q.
        splits: number of programs that share the documents.
        steps: number of bisections of :func:`query_of`.
        temperature, inverse_temperature: of the smooth maximum.
        divisor: divisor of the scores: 1, or the number of query tokens for their mean.
        D: dimension of the rows.
        BLOCK_Q, BLOCK_T, BLOCK_K: query rows, document rows and columns of a product.
        LQ: length of all queries if it divides the tile; otherwise 0.
        DIRECT: whether no query has tokens in several tiles, so that scores need no second kernel.
        UNIFORM_Q: whether all queries have the same length.
        UNIFORM_D: whether all documents have the same length, see :func:`bounds`.
        HAS_QMASK, HAS_DMASK: whether queries and documents have masks.
        HAS_QSCALE: whether query rows have factors.
        MASK_ZERO: whether masked document tokens count with a similarity of 0; otherwise they are
            left out.
        HAS_SCALE: whether document rows have factors.
        SMOOTH: whether the smooth maximum is computed.
        WITH_SAVED: whether a backward pass follows.
        NO_WINNER: position of a query token without a winner.
        USE_TMA: whether ``documents_src`` is a TMA descriptor.
        PRECISION: precision of products of fp32.
        INTEGER: whether rows are int8.
        NORMALIZED: whether the factors of queries are inverse norms.
    """
    tile = tl.program_id(0)
    split = tl.program_id(1)
    row0 = tile * tile_rows
    rows = tl.minimum(tile_rows, Tq - row0)
    row = row0 + tl.arange(0, BLOCK_Q)
    inside = tl.arange(0, BLOCK_Q) < rows
    q, unmasked_q, row_scale, power = _query_rows(
        queries_ptr,
        query_mask_ptr,
        query_factors_ptr,
        row0,
        rows,
        row,
        inside,
        D,
        BLOCK_Q,
        BLOCK_K,
        HAS_QMASK,
        HAS_QSCALE,
        NORMALIZED,
    )
    first_q = sequence_at(cu_queries_ptr, row0, Nq, length_q, UNIFORM_Q)
    last_q = sequence_at(cu_queries_ptr, row0 + rows - 1, Nq, length_q, UNIFORM_Q)
    if WITH_SAVED and not UNIFORM_Q:  # backward reads it
        tl.store(
            row_query_ptr + row,
            query_of(cu_queries_ptr, row, Nq, steps),
            mask=mask_if(inside, split == 0),
        )

    n_tiles = count_tiles(cu_documents_ptr, split, splits, Nd, Td, length_d, BLOCK_T, UNIFORM_D)
    d = split
    t0 = 0
    n_tokens = 0
    best, state = init_state(BLOCK_Q, SMOOTH)
    start, end, document_valid = bounds(cu_documents_ptr, d, Nd, Td, length_d, UNIFORM_D)
    for _ in tl.range(0, n_tiles):
        length = end - start
        acc = _products(
            q,
            queries_ptr,
            row0,
            rows,
            power,
            documents_src,
            start,
            t0,
            Td,
            D,
            BLOCK_Q,
            BLOCK_T,
            BLOCK_K,
            USE_TMA,
            PRECISION,
            INTEGER,
            NORMALIZED,
        )
        acc, tile_tokens = mask_tile(
            acc,
            start,
            length,
            t0,
            row_scale,
            document_mask_ptr,
            document_factors_ptr,
            BLOCK_T,
            HAS_DMASK,
            MASK_ZERO,
            HAS_SCALE,
            SMOOTH,
        )
        best, state = fold_tile(
            acc,
            t0,
            best,
            state,
            inverse_temperature,
            BLOCK_T,
            WITH_SAVED,
            SMOOTH,
        )
        n_tokens += tile_tokens
        done = t0 + BLOCK_T >= length
        if done:
            value, saved = finish(
                best,
                state,
                n_tokens,
                unmasked_q,
                row_scale,
                start,
                temperature,
                document_mask_ptr,
                HAS_DMASK,
                MASK_ZERO,
                HAS_SCALE,
                WITH_SAVED,
                SMOOTH,
                NO_WINNER,
            )
            if WITH_SAVED:
                offs = d.to(tl.int64) * Tq + row
                tl.store(saved_ptr + offs, saved.to(saved_ptr.dtype.element_ty), mask=inside)
            if LQ > 0:  # the tile has whole queries, all of length LQ
                sums = tl.sum(tl.reshape(value, (BLOCK_Q // LQ, LQ)), axis=1)
                sums = tl.div_rn(sums, divisor + tl.zeros((BLOCK_Q // LQ,), tl.float32))
                query = first_q + tl.arange(0, BLOCK_Q // LQ)
                tl.store(
                    scores_ptr + query.to(tl.int64) * Nd + d,
                    tl.where(document_valid, sums, float("nan")),
                    mask=query <= last_q,
                )
            else:
                first_stored = first_q
                end_stored = last_q + 1
                if DIRECT and not UNIFORM_Q:
                    # The only tile stores all queries, also those without tokens.
                    first_stored = first_q * 0
                    end_stored = Nq
                for query in range(first_stored, end_stored):
                    q_start, q_end, query_valid = bounds(
                        cu_queries_ptr,
                        query,
                        Nq,
                        Tq,
                        length_q,
                        UNIFORM_Q,
                    )
                    total = tl.sum(tl.where((row >= q_start) & (row < q_end), value, 0.0))
                    if DIRECT:
                        total = tl.div_rn(total, divisor)
                        total = tl.where(document_valid & query_valid, total, float("nan"))
                        tl.store(scores_ptr + tl.cast(query, tl.int64) * Nd + d, total)
                    else:
                        total = tl.where(document_valid, total, float("nan"))
                        tl.store(parts_ptr + tl.cast(tile + query, tl.int64) * Nd + d, total)
            best, state = init_state(BLOCK_Q, SMOOTH)
        n_tokens = tl.where(done, 0, n_tokens)
        t0 = tl.where(done, 0, t0 + BLOCK_T)
        d = tl.where(done, d + splits, d)
        start, end, document_valid = bounds(cu_documents_ptr, d, Nd, Td, length_d, UNIFORM_D)


@triton.jit(do_not_specialize=SIZES)
def combine_kernel(
    parts_ptr,
    cu_queries_ptr,
    scores_ptr,
    Tq,
    Nq,
    Nd,
    length_q,
    tile_rows,
    divisor,
    BLOCK: tl.constexpr,
    UNIFORM_Q: tl.constexpr,
):
    """Add up the partial scores of each query, tile by tile.

    Grid: ``[Nq * ceil(Nd / BLOCK)]``. Only the first axis of a grid can exceed 65,535.

    Args:
        parts_ptr: partial sums ``[tiles + Nq, Nd]``: row ``tile + query`` is that of a tile and
            a query.
        cu_queries_ptr: offsets ``[Nq + 1]`` of the queries, unless UNIFORM_Q.
        scores_ptr: scores ``[Nq, Nd]``; written.
        Tq: number of query rows.
        Nq, Nd: numbers of queries and documents.
        length_q: length of all queries, if UNIFORM_Q.
        tile_rows: query tokens of a tile.
        divisor: divisor of the scores: 1, or the number of query tokens for their mean.
        BLOCK: documents of a program.
        UNIFORM_Q: whether all queries have the same length.
    """
    blocks = (Nd + BLOCK - 1) // BLOCK
    query = tl.program_id(0) // blocks
    d = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    start, end, is_valid = bounds(cu_queries_ptr, query, Nq, Tq, length_q, UNIFORM_Q)
    total = tl.zeros((BLOCK,), tl.float32)
    if end > start:
        for tile in range(start // tile_rows, (end - 1) // tile_rows + 1):
            total += tl.load(
                parts_ptr + tl.cast(tile + query, tl.int64) * Nd + d,
                mask=d < Nd,
                other=0.0,
            )
        # With invalid offsets, these rows may belong to other queries. The partial scores of this
        # query were not written then.
        if not UNIFORM_Q:
            is_valid &= sequence_at(cu_queries_ptr, start, Nq, length_q, UNIFORM_Q) == query
            is_valid &= sequence_at(cu_queries_ptr, end - 1, Nq, length_q, UNIFORM_Q) == query
    total = tl.div_rn(total, divisor + tl.zeros((BLOCK,), tl.float32))
    total = tl.where(is_valid, total, float("nan"))
    tl.store(scores_ptr + query.to(tl.int64) * Nd + d, total, mask=d < Nd)


@triton.jit(do_not_specialize=SIZES)
def listed_pairs_kernel(
    queries_ptr,
    documents_src,
    query_mask_ptr,
    document_mask_ptr,
    query_factors_ptr,
    document_factors_ptr,
    cu_queries_ptr,
    cu_documents_ptr,
    pairs_ptr,
    scores_ptr,
    saved_ptr,
    Tq,
    Td,
    Nq,
    Nd,
    length_q,
    length_d,
    group,
    longest,
    temperature,
    inverse_temperature,
    divisor,
    D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PAIRING: tl.constexpr,
    UNIFORM_Q: tl.constexpr,
    UNIFORM_D: tl.constexpr,
    HAS_QMASK: tl.constexpr,
    HAS_DMASK: tl.constexpr,
    HAS_QSCALE: tl.constexpr,
    MASK_ZERO: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    SMOOTH: tl.constexpr,
    WITH_SAVED: tl.constexpr,
    NO_WINNER: tl.constexpr,
    USE_TMA: tl.constexpr,
    PRECISION: tl.constexpr,
    INTEGER: tl.constexpr,
    NORMALIZED: tl.constexpr,
):
    """Compute the score of one aligned, grouped or listed pair.

    Grid: ``[P]``, the number of pairs.

    Args:
        queries_ptr: query rows ``[Tq, D]``.
        documents_src: document rows ``[Td, D]``, a pointer or a TMA descriptor.
        query_mask_ptr, document_mask_ptr: masks ``[Tq]`` and ``[Td]``.
        query_factors_ptr, document_factors_ptr: factors ``[Tq]`` and ``[Td]`` of the rows.
        cu_queries_ptr: offsets ``[Nq + 1]`` of the queries, unless UNIFORM_Q.
        cu_documents_ptr: offsets ``[Nd + 1]`` of the documents, unless UNIFORM_D.
        pairs_ptr: query and document of each listed pair, ``[P, 2]`` int32.
        scores_ptr: scores ``[P]``; written.
        saved_ptr: winners or smooth maxima of the pairs; written if WITH_SAVED.
        Tq, Td: numbers of query and document rows.
        Nq, Nd: numbers of queries and documents.
        length_q, length_d: length of all queries, and of all documents, if UNIFORM_Q or UNIFORM_D.
        group: documents of a query, 1 for aligned pairs.
        longest: length of a row of ``saved``, for listed pairs.
        temperature, inverse_temperature: of the smooth maximum.
        divisor: divisor of the scores: 1, or the number of query tokens for their mean.
        D: dimension of the rows.
        BLOCK_Q, BLOCK_T, BLOCK_K: query rows, document rows and columns of a product.
        PAIRING: which pairs have a score: ``ALL``, ``GROUPED`` or ``INDEX`` (listed).
        UNIFORM_Q: whether all queries have the same length.
        UNIFORM_D: whether all documents have the same length, see :func:`bounds`.
        HAS_QMASK, HAS_DMASK: whether queries and documents have masks.
        HAS_QSCALE: whether query rows have factors.
        MASK_ZERO: whether masked document tokens count with a similarity of 0; otherwise they are
            left out.
        HAS_SCALE: whether document rows have factors.
        SMOOTH: whether the smooth maximum is computed.
        WITH_SAVED: whether a backward pass follows.
        NO_WINNER: position of a query token without a winner.
        USE_TMA: whether ``documents_src`` is a TMA descriptor.
        PRECISION: precision of products of fp32.
        INTEGER: whether rows are int8.
        NORMALIZED: whether the factors of queries are inverse norms.
    """
    pair = tl.program_id(0)
    if PAIRING == INDEX:
        query = tl.load(pairs_ptr + 2 * pair.to(tl.int64))
        d = tl.load(pairs_ptr + 2 * pair.to(tl.int64) + 1)
    else:
        query = pair // group
        d = pair
    ids_valid = (query >= 0) & (query < Nq) & (d >= 0) & (d < Nd)
    query = tl.where(ids_valid, query, 0)
    d = tl.where(ids_valid, d, 0)
    q_start, q_end, query_valid = bounds(cu_queries_ptr, query, Nq, Tq, length_q, UNIFORM_Q)
    start, end, document_valid = bounds(cu_documents_ptr, d, Nd, Td, length_d, UNIFORM_D)
    pair_valid = ids_valid & query_valid & document_valid
    length = tl.where(pair_valid, end - start, 0)
    total = 0.0
    for r0 in range(q_start, q_end, BLOCK_Q):
        row = r0 + tl.arange(0, BLOCK_Q)
        inside = row < q_end
        q, unmasked_q, row_scale, power = _query_rows(
            queries_ptr,
            query_mask_ptr,
            query_factors_ptr,
            r0,
            q_end - r0,
            row,
            inside,
            D,
            BLOCK_Q,
            BLOCK_K,
            HAS_QMASK,
            HAS_QSCALE,
            NORMALIZED,
        )
        best, state = init_state(BLOCK_Q, SMOOTH)
        n_tokens = 0
        for t0 in tl.range(0, length, BLOCK_T):
            acc = _products(
                q,
                queries_ptr,
                r0,
                q_end - r0,
                power,
                documents_src,
                start,
                t0,
                Td,
                D,
                BLOCK_Q,
                BLOCK_T,
                BLOCK_K,
                USE_TMA,
                PRECISION,
                INTEGER,
                NORMALIZED,
            )
            acc, tile_tokens = mask_tile(
                acc,
                start,
                length,
                t0,
                row_scale,
                document_mask_ptr,
                document_factors_ptr,
                BLOCK_T,
                HAS_DMASK,
                MASK_ZERO,
                HAS_SCALE,
                SMOOTH,
            )
            best, state = fold_tile(
                acc,
                t0,
                best,
                state,
                inverse_temperature,
                BLOCK_T,
                WITH_SAVED,
                SMOOTH,
            )
            n_tokens += tile_tokens
        value, saved = finish(
            best,
            state,
            n_tokens,
            unmasked_q,
            row_scale,
            start,
            temperature,
            document_mask_ptr,
            HAS_DMASK,
            MASK_ZERO,
            HAS_SCALE,
            WITH_SAVED,
            SMOOTH,
            NO_WINNER,
        )
        total += tl.sum(value)
        if WITH_SAVED:
            if PAIRING == INDEX:
                offs = pair.to(tl.int64) * longest + row - q_start
            else:
                offs = (pair % group).to(tl.int64) * Tq + row
            tl.store(saved_ptr + offs, saved.to(saved_ptr.dtype.element_ty), mask=inside)
    tl.store(scores_ptr + pair, tl.where(pair_valid, tl.div_rn(total, divisor), float("nan")))
