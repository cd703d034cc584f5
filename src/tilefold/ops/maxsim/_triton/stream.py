"""Scores of few query tokens against many documents, whose tokens are the rows of products.

With a query of 32 tokens on the rows, half of Hopper's 64 would be idle. Here a tile of document
tokens is on the rows, straight from registers if it must be converted first, and the query is on
the columns. The maximum is stored for each position of a tile and taken over the positions once per
document, so that a tile costs one comparison per element.

If documents are int8, every program rounds the query itself: a launch for it would take 4
microseconds, as long as 17 MB of documents. Meanwhile the first document moves from memory to L2.
"""

import triton
import triton.language as tl

from tilefold.ops._shared._triton.activation import nan_max
from tilefold.ops._shared.impl import triton_interpreted
from tilefold.ops.maxsim._triton.device import SIZES, bounds, count_tiles, load_block

_INTERPRETED = tl.constexpr(triton_interpreted())
TINY = tl.constexpr(2.0**-100)


@triton.jit
def int8_rows(x):
    """Round rows to int8, with the results of ``quantize_kernel``.

    A row is divided by its scale without a division: the inverse and two steps of Newton give the
    rounded quotient. The residuals of both steps are exact, because rows with a tiny scale are
    enlarged.

    Args:
        x: rows ``[R, K]``.

    Returns:
        The rows, and their scales ``[R]``. The scale of a row with an infinite element is NaN.
    """
    x = x.to(tl.float32)
    scale = tl.div_rn(tl.reduce(tl.abs(x), 1, nan_max), 127.0)
    enlarged = tl.where(scale < TINY, 2.0**100, 1.0)
    x *= enlarged[:, None]
    divisor = tl.where(scale > 0.0, scale * enlarged, 1.0)
    if _INTERPRETED:  # the interpreter's multiply-add rounds twice
        y = tl.div_rn(x, divisor[:, None] + tl.zeros(x.shape, tl.float32))
    else:
        inverse = tl.div_rn(1.0, divisor)[:, None] + tl.zeros(x.shape, tl.float32)
        minus = tl.zeros(x.shape, tl.float32) - divisor[:, None]
        y = x * inverse
        y = tl.fma(tl.fma(y, minus, x), inverse, y)
        y = tl.fma(tl.fma(y, minus, x), inverse, y)
    # Adding 1.5 * 2^23 rounds half to even, and leaves the integer in the lowest byte.
    rounded = tl.minimum(tl.maximum(y, -127.0), 127.0) + 12582912.0
    integers = rounded.to(tl.int32, bitcast=True).to(tl.int8)
    return integers, tl.where(scale < float("inf"), scale, float("nan"))


@triton.jit
def prefetch(ptr, size):
    """Load a range of global memory into L2, for compute capability 9.0.

    Args:
        ptr: where it begins.
        size: number of bytes, a multiple of 16. Nothing is loaded if it is not positive.
    """
    tl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 t; mov.u32 t, %tid.x; setp.eq.u32 p, t, 0; setp.gt.and.s32 p, "
        "$2, 0, p; @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, t; }",
        "=r,l,r",
        [ptr, size],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit(do_not_specialize=SIZES)
def stream_kernel(
    queries_ptr,
    documents_src,
    documents_ptr,
    query_mask_ptr,
    document_mask_ptr,
    document_factors_ptr,
    cu_queries_ptr,
    cu_documents_ptr,
    scores_ptr,
    Tq,
    Td,
    Nq,
    Nd,
    length_q,
    length_d,
    D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    UNIFORM_Q: tl.constexpr,
    UNIFORM_D: tl.constexpr,
    HAS_QMASK: tl.constexpr,
    HAS_DMASK: tl.constexpr,
    MASK_ZERO: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    USE_TMA: tl.constexpr,
    PRECISION: tl.constexpr,
    INTEGER: tl.constexpr,
    PREFETCH: tl.constexpr,
):
    """Compute the scores of all queries with a share of the documents, for few query tokens.

    All queries together have ``Tq <= BLOCK_Q`` tokens, which are the columns of products. The
    maximum is kept for each position of a tile, and reduced over the positions once per document. A
    program has every ``splits``-th document. Grid: ``[splits]``.

    Args:
        queries_ptr: query rows ``[Tq, D]``.
        documents_src: document rows ``[Td, D]``, a pointer or a TMA descriptor.
        documents_ptr: the same rows, for the prefetch.
        query_mask_ptr, document_mask_ptr: masks ``[Tq]`` and ``[Td]``.
        document_factors_ptr: scales ``[Td]`` of the document rows, if HAS_SCALE.
        cu_queries_ptr: offsets ``[Nq + 1]`` of the queries, unless UNIFORM_Q.
        cu_documents_ptr: offsets ``[Nd + 1]`` of the documents, unless UNIFORM_D.
        scores_ptr: scores ``[Nq, Nd]``; written.
        Tq, Td: numbers of query and document rows.
        Nq, Nd: numbers of queries and documents.
        length_q, length_d: length of all queries, and of all documents, if UNIFORM_Q or UNIFORM_D.
        D: dimension of the rows.
        BLOCK_Q, BLOCK_T, BLOCK_K: query rows, document rows and columns of a product.
        UNIFORM_Q: whether all queries have the same length.
        UNIFORM_D: whether all documents have the same length, see :func:`bounds`.
        HAS_QMASK, HAS_DMASK: whether queries and documents have masks.
        MASK_ZERO: whether masked document tokens count with a similarity of 0; otherwise they are
            left out.
        HAS_SCALE: whether document rows have scales.
        USE_TMA: whether ``documents_src`` is a TMA descriptor.
        PRECISION: precision of products of fp32.
        INTEGER: whether rows are int8. The queries are rounded here.
        PREFETCH: rows of the first document that are loaded into L2 at once.
    """
    kind: tl.constexpr = tl.int32 if INTEGER else tl.float32
    split = tl.program_id(0)
    splits = tl.num_programs(0)
    d = split
    start, end, document_valid = bounds(cu_documents_ptr, d, Nd, Td, length_d, UNIFORM_D)
    if PREFETCH > 0:
        prefetch(
            documents_ptr + tl.cast(start, tl.int64) * D,
            tl.minimum(end - start, PREFETCH) * D,
        )
    column = tl.arange(0, BLOCK_T)
    if HAS_SCALE:
        scale = tl.load(document_factors_ptr + start + column, mask=column < end - start, other=0.0)
    row = tl.arange(0, BLOCK_Q)
    inside = row < Tq
    k = tl.arange(0, BLOCK_K)
    q = load_block(queries_ptr, 0, Tq, k, D, BLOCK_Q)
    weight = tl.full((BLOCK_Q,), 1.0, tl.float32)
    if INTEGER:
        q, weight = int8_rows(q)
    if HAS_QMASK:
        # A masked row gets a weight that no other row has, which saves a vector in registers.
        unmasked_q = inside & (tl.load(query_mask_ptr + row, mask=inside, other=0) != 0)
        weight = tl.where(unmasked_q, weight, -1.0)

    n_tiles = count_tiles(cu_documents_ptr, split, splits, Nd, Td, length_d, BLOCK_T, UNIFORM_D)
    t0 = 0
    n_tokens = 0
    best = tl.full((BLOCK_T, BLOCK_Q), float("-inf"), tl.float32)
    for _ in tl.range(0, n_tiles):
        length = end - start
        if USE_TMA:
            rows = documents_src.load([start + t0, 0])
        else:
            rows = load_block(documents_src, start + t0, Td - start - t0, k, D, BLOCK_T)
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
        if HAS_SCALE:  # scales are loaded one tile ahead, to hide their latency
            next_t = next_t0 + column
            is_token = next_t < tl.where(next_d < Nd, next_end - next_start, 0)
            next_scale = tl.load(
                document_factors_ptr + next_start + next_t, mask=is_token, other=0.0
            )
        acc = tl.dot(rows.to(q.dtype), q.T, input_precision=PRECISION, out_dtype=kind).to(
            tl.float32,
        )
        is_token = t0 + column < length
        if HAS_SCALE:
            acc *= scale[:, None]
            scale = next_scale
        tile_tokens = tl.minimum(length - t0, BLOCK_T)
        if HAS_DMASK:
            unmasked = tl.load(document_mask_ptr + start + t0 + column, mask=is_token, other=0) != 0
            if MASK_ZERO:
                acc = tl.where(unmasked[:, None], acc, 0.0)
                acc = tl.where(is_token[:, None], acc, float("-inf"))
            else:
                acc = tl.where(unmasked[:, None], acc, float("-inf"))
                tile_tokens = tl.sum(unmasked.to(tl.int32))
        elif length - t0 < BLOCK_T:
            acc = tl.where(is_token[:, None], acc, float("-inf"))
        best = nan_max(best, acc)
        n_tokens += tile_tokens
        if done:
            value = tl.reduce(best, 0, nan_max)
            if INTEGER or HAS_QMASK:
                value *= weight
            if HAS_QMASK:
                value = tl.where(weight == -1.0, 0.0, value)
            value = tl.where(n_tokens > 0, value, 0.0)
            for query in range(Nq):
                q_start, q_end, query_valid = bounds(
                    cu_queries_ptr, query, Nq, Tq, length_q, UNIFORM_Q
                )
                total = tl.sum(tl.where((row >= q_start) & (row < q_end), value, 0.0))
                total = tl.where(document_valid & query_valid, total, float("nan"))
                tl.store(scores_ptr + tl.cast(query, tl.int64) * Nd + d, total)
            best = tl.full((BLOCK_T, BLOCK_Q), float("-inf"), tl.float32)
        n_tokens = tl.where(done, 0, n_tokens)
        t0 = next_t0
        d = next_d
        start, end, document_valid = next_start, next_end, next_valid
