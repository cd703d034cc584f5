"""Backward of the maximum: only winners carry gradient, and every gradient row has one owner. No atomics.

A query row sums the document rows that won against it, pair by pair. A tile of document rows takes, for the query
rows of the few pairs that list its document, the product of a matrix with one coefficient a column, at the winner's
row, and the query rows, on the tensor cores; :mod:`winner_lists` does so where every query meets every document.
"""

import triton
import triton.language as tl

from tilefold.ops._shared._triton.masks import mask_if
from tilefold.ops.maxsim._triton.device import (
    ALL,
    GROUPED,
    INDEX,
    SIZES,
    bounds,
    item_of,
    load_block,
    load_rows,
    split_scale,
    times_power,
)
from tilefold.ops.maxsim._triton.norms import projected


@triton.jit
def query_list(query, first_ptr, Nd, group, PAIRING: tl.constexpr):
    """The entries of the list of pairs that belong to a query."""
    if PAIRING == ALL:
        return 0 * query, 0 * query + Nd
    elif PAIRING == GROUPED:
        return query * group, query * group + group
    else:
        return tl.load(first_ptr + query).to(tl.int32), tl.load(first_ptr + query + 1).to(tl.int32)


@triton.jit
def grad_unit(largest_ptr, HAS_LARGEST: tl.constexpr):
    """Unit of the scores' gradient, in which its products with fp16 neither vanish nor overflow."""
    unit = 1.0
    if HAS_LARGEST:
        unit = tl.load(largest_ptr).to(tl.float32)
        unit = tl.where(unit == 0.0, 1.0, unit)
    return unit


@triton.jit
def saved_at(e, pair, first_item, row, q_start, Tq, longest, PAIRING: tl.constexpr):
    """Place of rows ``row`` of an entry in ``saved``."""
    if PAIRING == INDEX:
        return pair.to(tl.int64) * longest + row - q_start
    else:
        return tl.cast(e - first_item, tl.int64) * Tq + row


@triton.jit(do_not_specialize=SIZES)
def dqueries_kernel(
    dscore_ptr, saved_ptr, doc_ptr, query_scale_ptr, doc_scale_ptr, cu_q_ptr, cu_d_ptr, row_query_ptr, order_ptr,
    first_ptr, index_ptr, dquery_ptr,
    Tq, Td, Nq, Nd, length_q, length_d, group, longest, stride_q, stride_d, factor,
    D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr, PAIRING: tl.constexpr, UNIFORM_Q: tl.constexpr,
    UNIFORM_D: tl.constexpr, HAS_SCALE: tl.constexpr, NO_WINNER: tl.constexpr,
):  # fmt: skip
    """``dqueries[r] = sum over pairs of dscore * documents[winner]``, times ``factor``."""
    k = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    if PAIRING == ALL:
        block = tl.program_id(0) * BLOCK_R
        stop = tl.minimum(block + BLOCK_R, Tq)
        query = 0
        q_start = 0
    else:
        query = tl.program_id(0)
        q_start, stop, _ok = bounds(cu_q_ptr, query, Nq, Tq, length_q, UNIFORM_Q)
        block = q_start
    e0, e1 = query_list(query, first_ptr, Nd, group, PAIRING)
    for r0 in range(block, stop, BLOCK_R):
        row = r0 + tl.arange(0, BLOCK_R)
        inside = row < stop
        if PAIRING == ALL:
            if UNIFORM_Q:
                owner = row // length_q
            else:
                owner = tl.load(row_query_ptr + row, mask=inside, other=0).to(tl.int32)
        acc = tl.zeros((BLOCK_R, BLOCK_D), tl.float32)
        for e in tl.range(e0, e1):
            pair, _query, d = item_of(e, e0, order_ptr, index_ptr, PAIRING)
            start, end, ok = bounds(cu_d_ptr, d, Nd, Td, length_d, UNIFORM_D)
            at = saved_at(e, pair, e0, row, q_start, Tq, longest, PAIRING)
            winner = tl.load(saved_ptr + at, mask=inside, other=NO_WINNER).to(tl.int32)  # [BLOCK_R]
            has = mask_if(inside & (winner != NO_WINNER), ok) & (start + winner < end)
            if PAIRING == ALL:
                offs = owner.to(tl.int64) * stride_q + tl.cast(d, tl.int64) * stride_d
                grad = tl.load(dscore_ptr + offs, mask=has, other=0.0).to(tl.float32)
            else:
                grad = tl.load(dscore_ptr + tl.cast(pair, tl.int64) * stride_d).to(tl.float32)
                grad = tl.where(has, grad, 0.0)
            doc_row = start + winner
            x = load_rows(doc_ptr, doc_row, has, k, D).to(tl.float32)
            if HAS_SCALE:
                x *= tl.load(doc_scale_ptr + doc_row, mask=has, other=0.0)[:, None]
            acc += grad[:, None] * x
        tl.store(
            dquery_ptr + row.to(tl.int64)[:, None] * D + k[None, :],
            (acc * factor).to(dquery_ptr.dtype.element_ty),
            mask=inside[:, None] & (k < D)[None, :],
        )


@triton.jit(do_not_specialize=SIZES)
def dqueries_row_kernel(
    dscore_ptr, saved_ptr, query_ptr, doc_ptr, query_scale_ptr, doc_scale_ptr, cu_d_ptr, row_query_ptr, dquery_ptr,
    Tq, Td, Nd, length_q, length_d, stride_q, stride_d, factor,
    D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, UNIFORM_Q: tl.constexpr, UNIFORM_D: tl.constexpr,
    HAS_SCALE: tl.constexpr, NO_WINNER: tl.constexpr, PROJECTS: tl.constexpr,
):  # fmt: skip
    """Gradient of queries for all pairs of few query rows: a program owns a row, and takes many documents.

    ``PROJECTS``: rows are normalised, of no more than ``BLOCK_D`` dimensions, and get their own gradient.
    """
    row = tl.program_id(0)
    k = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    if UNIFORM_Q:
        owner = row // length_q
    else:
        owner = tl.load(row_query_ptr + row).to(tl.int32)
    acc = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    for d0 in tl.range(0, Nd, BLOCK_N):
        d = d0 + tl.arange(0, BLOCK_N)
        there = d < Nd
        start, end, _ok = bounds(cu_d_ptr, d, Nd, Td, length_d, UNIFORM_D)
        winner = tl.load(saved_ptr + d.to(tl.int64) * Tq + row, mask=there, other=NO_WINNER).to(tl.int32)
        has = (winner != NO_WINNER) & (start + winner < end)  # of an impossible document none: it is empty
        offs = tl.cast(owner, tl.int64) * stride_q + d.to(tl.int64) * stride_d
        grad = tl.load(dscore_ptr + offs, mask=has, other=0.0).to(tl.float32)
        doc_row = start + winner
        x = load_rows(doc_ptr, doc_row, has, k, D).to(tl.float32)
        if HAS_SCALE:
            x *= tl.load(doc_scale_ptr + doc_row, mask=has, other=0.0)[:, None]
        acc += grad[:, None] * x
    total = tl.sum(acc, axis=0) * factor
    offs = tl.cast(row, tl.int64) * D + k
    if PROJECTS:
        x = tl.load(query_ptr + offs, mask=k < D, other=0.0).to(tl.float32)
        scale = tl.load(query_scale_ptr + row + tl.arange(0, 1))
        total = tl.sum(projected(x[None, :], scale, total[None, :]), axis=0)  # of one row
    tl.store(dquery_ptr + offs, total.to(dquery_ptr.dtype.element_ty), mask=k < D)


@triton.jit(do_not_specialize=SIZES)
def ddocuments_kernel(
    dscore_ptr, saved_ptr, query_ptr, query_scale_ptr, largest_ptr, cu_q_ptr, cu_d_ptr, order_ptr, first_ptr,
    index_ptr, ddoc_ptr,
    Tq, Td, Nq, Nd, length_q, length_d, group, longest, tiles, stride_d, factor,
    D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_D: tl.constexpr, PAIRING: tl.constexpr,
    UNIFORM_Q: tl.constexpr, UNIFORM_D: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_LARGEST: tl.constexpr,
    NO_WINNER: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """``ddocuments[t] = sum over the query rows that t won of dscore * queries[row]``, times ``factor``."""
    k = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
    d = tl.program_id(0)
    start, end, _ok = bounds(cu_d_ptr, d, Nd, Td, length_d, UNIFORM_D)
    unit = grad_unit(largest_ptr, HAS_LARGEST)
    if PAIRING == INDEX:
        e0 = tl.load(first_ptr + d).to(tl.int32)
        e1 = tl.load(first_ptr + d + 1).to(tl.int32)
    else:
        e0 = d
        e1 = d + 1
    for t0 in range(tl.program_id(1) * BLOCK_T, end - start, tiles * BLOCK_T):
        t = t0 + tl.arange(0, BLOCK_T)
        acc = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
        for e in range(e0, e1):
            if PAIRING == INDEX:
                pair, query, _d = item_of(e, e0, order_ptr, index_ptr, PAIRING)
                known = (query >= 0) & (query < Nq)
                query = tl.where(known, query, 0)
                r_start, r_end, _ok = bounds(cu_q_ptr, query, Nq, Tq, length_q, UNIFORM_Q)
                r_end = tl.where(known, r_end, r_start)
                base = tl.cast(pair, tl.int64) * longest - r_start
                offs_pair = tl.cast(pair, tl.int64) * stride_d
            else:
                r_start, r_end, _ok = bounds(cu_q_ptr, d // group, Nq, Tq, length_q, UNIFORM_Q)
                base = tl.cast(d % group, tl.int64) * Tq
                offs_pair = tl.cast(d, tl.int64) * stride_d
            for r0 in tl.range(r_start, r_end, BLOCK_E):
                row = r0 + tl.arange(0, BLOCK_E)
                inside = row < r_end
                winner = tl.load(saved_ptr + base + row, mask=inside, other=NO_WINNER).to(tl.int32)
                mine = inside & (winner != NO_WINNER) & (winner >= t0) & (winner < t0 + BLOCK_T)
                grad = tl.load(dscore_ptr + offs_pair).to(tl.float32) / unit
                grad = tl.where(mine, grad, 0.0)
                x = load_block(query_ptr, r0, r_end - r0, k, D, BLOCK_E)  # [BLOCK_E, BLOCK_D]
                x = tl.where(mine[:, None], x, 0.0).to(x.dtype)  # a zero coefficient must not meet a NaN
                if HAS_SCALE:
                    power, rest = split_scale(tl.load(query_scale_ptr + row, mask=mine, other=0.0))
                    grad *= rest
                    x = times_power(x, power)
                onehot = tl.where(winner[None, :] == t[:, None], grad[None, :], 0.0).to(x.dtype)
                acc = tl.dot(onehot, x, acc, input_precision=PRECISION)
        row_d = start + t
        tl.store(
            ddoc_ptr + row_d.to(tl.int64)[:, None] * D + k[None, :],
            (acc * unit * factor).to(ddoc_ptr.dtype.element_ty),
            mask=(row_d < end)[:, None] & (k < D)[None, :],
        )
