"""Scores of short queries against int8 documents, for several queries in one pass.

Queries share the rows of a tile. A query has 16, 32 and so on rows (a slot), in strips of 16 that
are not adjacent, so that all strips of a query are in one warp and its sum stays there. Document
tokens are the columns. The maximum over them is taken in a thread's own registers, tile by tile in
groups of eight columns, and once per document over the lanes. The scale of a column, and whether it
takes part, are one multiply-add.
"""

import triton
import triton.language as tl

from tilefold.ops._shared._triton.activation import nan_max
from tilefold.ops.maxsim._triton.device import SIZES, bounds, count_tiles, load_block

STRIP = tl.constexpr(16)
LANES = tl.constexpr(8)  # columns whose maxima are separate until a document ends


@triton.jit(do_not_specialize=SIZES)
def shared_pass_kernel(
    queries_ptr,
    documents_src,
    query_mask_ptr,
    document_mask_ptr,
    query_factors_ptr,
    document_factors_ptr,
    cu_documents_ptr,
    scores_ptr,
    Td,
    Nq,
    Nd,
    length_q,
    length_d,
    splits,
    divisor,
    D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SLOT: tl.constexpr,
    UNIFORM_D: tl.constexpr,
    ONE_TILE: tl.constexpr,
    HAS_QMASK: tl.constexpr,
    HAS_DMASK: tl.constexpr,
    MASK_ZERO: tl.constexpr,
    USE_TMA: tl.constexpr,
):
    """Compute the scores of several short queries with a share of the documents, all int8.

    The queries of a program are the rows of one tile, ``SLOT`` rows for each. A program has every
    ``splits``-th document. Grid: ``[ceil(Nq / (BLOCK_Q / SLOT)), splits]``.

    Args:
        queries_ptr: int8 query rows ``[Nq * length_q, D]``.
        documents_src: int8 document rows ``[Td, D]``, a pointer or a TMA descriptor.
        query_mask_ptr, document_mask_ptr: masks of the rows.
        query_factors_ptr: scales ``[Nq * length_q]`` of the query rows.
        document_factors_ptr: scales ``[Td]`` of the document rows.
        cu_documents_ptr: offsets ``[Nd + 1]`` of the documents, unless UNIFORM_D.
        scores_ptr: scores ``[Nq, Nd]``; written.
        Td: number of document rows.
        Nq, Nd: numbers of queries and documents.
        length_q: length of all queries.
        length_d: length of all documents, if UNIFORM_D.
        splits: number of programs that share the documents.
        divisor: divisor of the scores: 1, or the number of query tokens for their mean.
        D: dimension of the rows.
        BLOCK_Q, BLOCK_T, BLOCK_K: query rows, document rows and columns of a product.
        SLOT: rows of a query in the tile, a multiple of ``STRIP``.
        UNIFORM_D: whether all documents have the same length, see :func:`bounds`.
        ONE_TILE: whether no document has more than BLOCK_T tokens.
        HAS_QMASK, HAS_DMASK: whether queries and documents have masks.
        MASK_ZERO: whether masked document tokens count with a similarity of 0; otherwise they are
            left out.
        USE_TMA: whether ``documents_src`` is a TMA descriptor.
    """
    QUERIES: tl.constexpr = BLOCK_Q // SLOT
    split = tl.program_id(1)
    first_query = tl.program_id(0) * QUERIES
    # Strips of 16 rows of a query are not adjacent: all of them are in one warp.
    r = tl.arange(0, BLOCK_Q)
    query = first_query + r // STRIP % QUERIES
    token = r // (STRIP * QUERIES) * STRIP + r % STRIP
    unmasked_q = (query < Nq) & (token < length_q)
    row = query * length_q + token
    k = tl.arange(0, BLOCK_K)
    q = tl.load(
        queries_ptr + row.to(tl.int64)[:, None] * D + k[None, :],
        mask=unmasked_q[:, None] & (k < D)[None, :],
        other=0,
    )
    row_scale = tl.load(query_factors_ptr + row, mask=unmasked_q, other=0.0)
    if HAS_QMASK:
        unmasked_q = unmasked_q & (tl.load(query_mask_ptr + row, mask=unmasked_q, other=0) != 0)

    n_tiles = count_tiles(cu_documents_ptr, split, splits, Nd, Td, length_d, BLOCK_T, UNIFORM_D)
    column = tl.arange(0, BLOCK_T)
    d = split
    t0 = 0
    n_tokens = 0
    start, end, document_valid = bounds(cu_documents_ptr, d, Nd, Td, length_d, UNIFORM_D)
    scale = tl.load(document_factors_ptr + start + column, mask=column < end - start, other=0.0)
    best = tl.full((BLOCK_Q, LANES), float("-inf"), tl.float32)
    for _ in tl.range(0, n_tiles):
        length = end - start
        if USE_TMA:
            rows = documents_src.load([start + t0, 0])
        else:
            rows = load_block(documents_src, start + t0, Td - start - t0, k, D, BLOCK_T)
        if ONE_TILE:
            next_t0 = 0
            next_d = d + splits
        else:
            done = t0 + BLOCK_T >= length
            next_t0 = tl.where(done, 0, t0 + BLOCK_T)
            next_d = tl.where(done, d + splits, d)
        next_start, next_end, next_valid = bounds(
            cu_documents_ptr,
            next_d,
            Nd,
            Td,
            length_d,
            UNIFORM_D,
        )
        next_t = next_t0 + column  # scales are loaded one tile ahead, to hide their latency
        is_token = next_t < tl.where(next_d < Nd, next_end - next_start, 0)
        next_scale = tl.load(document_factors_ptr + next_start + next_t, mask=is_token, other=0.0)
        acc = tl.dot(q, rows.T, out_dtype=tl.int32).to(tl.float32)
        is_token = t0 + column < length
        tile_tokens = tl.minimum(length - t0, BLOCK_T)
        if HAS_DMASK:
            unmasked = tl.load(document_mask_ptr + start + t0 + column, mask=is_token, other=0) != 0
            scale = tl.where(unmasked, scale, 0.0)
            if not MASK_ZERO:
                is_token = unmasked
                tile_tokens = tl.sum(unmasked.to(tl.int32))
        acc = acc * scale[None, :] + tl.where(is_token, 0.0, float("-inf"))[None, :]
        scale = next_scale
        lane_best = tl.reduce(tl.reshape(acc, (BLOCK_Q, BLOCK_T // LANES, LANES)), 1, nan_max)
        if ONE_TILE:
            _store(
                lane_best,
                tile_tokens,
                unmasked_q,
                row_scale,
                scores_ptr,
                first_query,
                d,
                document_valid,
                Nq,
                Nd,
                divisor,
                SLOT,
            )
        else:
            best = nan_max(best, lane_best)
            n_tokens += tile_tokens
            if done:
                _store(
                    best,
                    n_tokens,
                    unmasked_q,
                    row_scale,
                    scores_ptr,
                    first_query,
                    d,
                    document_valid,
                    Nq,
                    Nd,
                    divisor,
                    SLOT,
                )
                best = tl.full((BLOCK_Q, LANES), float("-inf"), tl.float32)
            n_tokens = tl.where(done, 0, n_tokens)
        t0 = next_t0
        d = next_d
        start, end, document_valid = next_start, next_end, next_valid


@triton.jit
def _store(
    best,
    n_tokens,
    unmasked_q,
    row_scale,
    scores_ptr,
    first_query,
    d,
    document_valid,
    Nq,
    Nd,
    divisor,
    SLOT: tl.constexpr,
):
    """Store the scores of a document with all queries of a tile.

    Args:
        best: maxima ``[BLOCK_Q, LANES]`` over the document tokens of each lane.
        n_tokens: number of document tokens that count; without any, scores are 0.
        unmasked_q: query rows that exist and are not masked.
        row_scale: scale of each query row.
        scores_ptr: scores ``[Nq, Nd]``; written.
        first_query: first query of the tile.
        d: the document.
        document_valid: whether its offsets are valid; if not, scores are NaN.
        Nq, Nd: numbers of queries and documents.
        divisor: divisor of the scores.
        SLOT: rows of a query in the tile.
    """
    QUERIES: tl.constexpr = best.shape[0] // SLOT
    value = tl.where(unmasked_q & (n_tokens > 0), tl.reduce(best, 1, nan_max) * row_scale, 0.0)
    total = tl.sum(tl.sum(tl.reshape(value, (SLOT // STRIP, QUERIES, STRIP)), axis=2), axis=0)
    total = tl.div_rn(total, divisor + tl.zeros((QUERIES,), tl.float32))
    total = tl.where(document_valid, total, float("nan"))
    query = first_query + tl.arange(0, QUERIES)
    tl.store(scores_ptr + query.to(tl.int64) * Nd + d, total, mask=query < Nq)
