"""Scores of few query tokens against many documents: document tokens stream past, and fill the rows of the products.

With a query of 32 tokens on the rows, half of Hopper's 64 would be idle. Here a tile of document tokens is on the rows,
straight from registers where it must be converted first, and the query on the columns. The maximum is kept for each
place of a tile and taken over the places once per document, so that a tile costs one comparison per element.
"""

import triton
import triton.language as tl

from tilefold.ops._shared._triton.activation import nan_max
from tilefold.ops.maxsim._triton.device import bounds, load_block


@triton.jit(do_not_specialize=["Tq", "Td", "Nq", "Nd", "length_q", "length_d"])
def stream_kernel(
    query_ptr, doc_src, query_mask_ptr, doc_mask_ptr, query_scale_ptr, doc_scale_ptr, cu_q_ptr, cu_d_ptr, score_ptr,
    Tq, Td, Nq, Nd, length_q, length_d,
    D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, UNIFORM_Q: tl.constexpr,
    UNIFORM_D: tl.constexpr, HAS_QMASK: tl.constexpr, HAS_DMASK: tl.constexpr, HAS_QSCALE: tl.constexpr,
    MASK_ZERO: tl.constexpr, HAS_SCALE: tl.constexpr, USE_TMA: tl.constexpr, PRECISION: tl.constexpr,
    INTEGER: tl.constexpr,
):  # fmt: skip
    """Scores ``[Nq, Nd]``: all ``Tq <= BLOCK_Q`` query rows meet every tile; a program owns every so many documents."""
    kind: tl.constexpr = tl.int32 if INTEGER else tl.float32
    split = tl.program_id(0)
    splits = tl.num_programs(0)
    row = tl.arange(0, BLOCK_Q)
    inside = row < Tq
    k = tl.arange(0, BLOCK_K)
    q = load_block(query_ptr, 0, Tq, k, D, BLOCK_Q)
    kept_q = inside
    if HAS_QMASK:
        kept_q = inside & (tl.load(query_mask_ptr + row, mask=inside, other=0) != 0)
    row_scale = tl.full((BLOCK_Q,), 1.0, tl.float32)
    if HAS_QSCALE:
        row_scale = tl.load(query_scale_ptr + row, mask=inside, other=0.0)

    mine = (Nd - split + splits - 1) // splits
    if UNIFORM_D:
        n_tiles = mine * tl.maximum((length_d + BLOCK_T - 1) // BLOCK_T, 1)
    else:  # an empty document takes one tile, in which its score is written
        n_tiles = 0
        for i0 in range(0, mine, 64):
            i = i0 + tl.arange(0, 64)
            start, end, _known = bounds(cu_d_ptr, split + i * splits, Nd, Td, length_d, UNIFORM_D)
            n = tl.maximum((end - start + BLOCK_T - 1) // BLOCK_T, 1)
            n_tiles += tl.sum(tl.where(i < mine, n, 0))

    d = split
    t0 = 0
    parts = 0
    best = tl.full((BLOCK_T, BLOCK_Q), float("-inf"), tl.float32)
    start, end, ok = bounds(cu_d_ptr, d, Nd, Td, length_d, UNIFORM_D)
    for _ in tl.range(0, n_tiles):
        length = end - start
        first = start + t0
        if USE_TMA:
            rows = doc_src.load([first, 0])
        else:
            rows = load_block(doc_src, first, Td - first, k, D, BLOCK_T)
        acc = tl.dot(rows.to(q.dtype), q.T, input_precision=PRECISION, out_dtype=kind).to(tl.float32)
        t = t0 + tl.arange(0, BLOCK_T)
        there = t < length
        if HAS_SCALE:
            acc *= tl.load(doc_scale_ptr + start + t, mask=there, other=0.0)[:, None]
        part = tl.minimum(length - t0, BLOCK_T)
        if HAS_DMASK:
            kept = tl.load(doc_mask_ptr + start + t, mask=there, other=0) != 0
            if MASK_ZERO:
                acc = tl.where(kept[:, None], acc, 0.0)
                acc = tl.where(there[:, None], acc, float("-inf"))
            else:
                acc = tl.where(kept[:, None], acc, float("-inf"))
                part = tl.sum(kept.to(tl.int32))
        elif length - t0 < BLOCK_T:
            acc = tl.where(there[:, None], acc, float("-inf"))
        best = nan_max(best, acc)
        parts += part
        done = t0 + BLOCK_T >= length
        if done:
            value = tl.reduce(best, 0, nan_max)
            if HAS_QSCALE:
                value *= row_scale
            value = tl.where(kept_q & (parts > 0), value, 0.0)
            for query in range(Nq):
                q_start, q_end, known = bounds(cu_q_ptr, query, Nq, Tq, length_q, UNIFORM_Q)
                total = tl.sum(tl.where((row >= q_start) & (row < q_end), value, 0.0))
                total = tl.where(ok & known, total, float("nan"))
                tl.store(score_ptr + tl.cast(query, tl.int64) * Nd + d, total)
            best = tl.full((BLOCK_T, BLOCK_Q), float("-inf"), tl.float32)
        parts = tl.where(done, 0, parts)
        t0 = tl.where(done, 0, t0 + BLOCK_T)
        d = tl.where(done, d + splits, d)
        start, end, ok = bounds(cu_d_ptr, d, Nd, Td, length_d, UNIFORM_D)
