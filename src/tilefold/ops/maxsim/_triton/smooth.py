"""Backward of the smooth maximum, from the softmax weights of the similarities.

Each tile of similarities is computed again. As in the backward of the maximum, one program owns a
tile of query rows, and another one a tile of document rows.
"""

import triton
import triton.language as tl

from tilefold.ops.maxsim._triton.backward import (
    document_list,
    grad_unit,
    query_list,
    query_of_entry,
    saved_offsets,
)
from tilefold.ops.maxsim._triton.device import (
    ALL,
    SIZES,
    bounds,
    item_of,
    load_block,
    load_rows,
    owner_of,
    split_scale,
    store_rows,
    times_power,
)


@triton.jit
def _weights(
    queries_ptr,
    documents_ptr,
    query_factors_ptr,
    document_factors_ptr,
    document_mask_ptr,
    row0,
    rows,
    row,
    inside_q,
    doc_row0,
    doc_rows,
    doc_row,
    inside_d,
    smooth_max,
    grad,
    inverse_temperature,
    D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_DMASK: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute ``grad * softmax`` of a tile of similarities ``[BLOCK_Q, BLOCK_T]``.

    The softmax of a similarity ``s`` is ``exp((s - smooth_max) / temperature)``. Masked tokens have
    weight 0.

    Args:
        row0: first query row of the tile.
        rows: number of query rows from ``row0`` on.
        row: query rows of the tile.
        inside_q: rows that exist and are not masked.
        doc_row0: first document row of the tile; ``doc_rows``, ``doc_row`` and ``inside_d`` are as
            for queries.
        smooth_max: smooth maxima ``[BLOCK_Q]``.
        grad: gradients of the scores ``[BLOCK_Q]``.
    """
    acc = tl.zeros((BLOCK_Q, BLOCK_T), tl.float32)
    if HAS_SCALE:
        power, mantissa = split_scale(tl.load(query_factors_ptr + row, mask=inside_q, other=0.0))
    for k0 in range(0, D, BLOCK_K):
        k = k0 + tl.arange(0, BLOCK_K)
        q = load_block(queries_ptr, row0, rows, k, D, BLOCK_Q)
        if HAS_SCALE:  # otherwise products might exceed the range of fp32
            q = times_power(q, power)
        d = load_block(documents_ptr, doc_row0, doc_rows, k, D, BLOCK_T)
        acc = tl.dot(q, d.T, acc, input_precision=PRECISION)
    if HAS_SCALE:
        acc *= mantissa[:, None]
        acc *= tl.load(document_factors_ptr + doc_row, mask=inside_d, other=0.0)[None, :]
    unmasked = inside_d
    if HAS_DMASK:
        unmasked = inside_d & (tl.load(document_mask_ptr + doc_row, mask=inside_d, other=0) != 0)
    takes_part = unmasked[None, :] & (inside_q & (smooth_max != float("inf")))[:, None]
    # A similarity cannot exceed the smooth maximum, but may be rounded otherwise than in forward.
    difference = tl.minimum(acc - smooth_max[:, None], 0.0, propagate_nan=tl.PropagateNan.ALL)
    return tl.where(takes_part, grad[:, None] * tl.exp(difference * inverse_temperature), 0.0)


@triton.jit(do_not_specialize=SIZES)
def smooth_dqueries_kernel(
    dscores_ptr,
    saved_ptr,
    queries_ptr,
    documents_ptr,
    query_factors_ptr,
    document_factors_ptr,
    largest_ptr,
    document_mask_ptr,
    cu_queries_ptr,
    cu_documents_ptr,
    row_query_ptr,
    order_ptr,
    first_ptr,
    pairs_ptr,
    dquery_ptr,
    Tq,
    Td,
    Nq,
    Nd,
    length_q,
    length_d,
    group,
    longest,
    stride_q,
    stride_d,
    inverse_temperature,
    factor,
    D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAIRING: tl.constexpr,
    UNIFORM_Q: tl.constexpr,
    UNIFORM_D: tl.constexpr,
    HAS_DMASK: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_LARGEST: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute the gradient of a tile of query rows from smooth maxima.

    Grid: ``[ceil(Tq / BLOCK_Q), ceil(D / BLOCK_D)]`` for all pairs, otherwise
    ``[Nq, ceil(D / BLOCK_D)]``.

    Args:
        saved_ptr: smooth maxima.
        order_ptr: order of listed pairs by query.
        first_ptr: offsets ``[Nq + 1]`` of the pairs of each query in this order.
        dquery_ptr: gradient ``[Tq, D]``; written.

    The other arguments are as in :func:`~tilefold.ops.maxsim._triton.backward.dqueries_kernel`.
    """
    unit = grad_unit(largest_ptr, HAS_LARGEST)
    k = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    first_row, end_row, first_entry, end_entry = query_list(
        cu_queries_ptr,
        first_ptr,
        Tq,
        Nq,
        Nd,
        length_q,
        group,
        BLOCK_Q,
        PAIRING,
        UNIFORM_Q,
    )
    for r0 in range(first_row, end_row, BLOCK_Q):
        row = r0 + tl.arange(0, BLOCK_Q)
        inside = row < end_row
        if PAIRING == ALL:
            owner = owner_of(row_query_ptr, row, inside, length_q, UNIFORM_Q)
        acc = tl.zeros((BLOCK_Q, BLOCK_D), tl.float32)
        for entry in range(first_entry, end_entry):
            pair, _query, d = item_of(entry, first_entry, order_ptr, pairs_ptr, PAIRING)
            start, end, _offsets_valid = bounds(cu_documents_ptr, d, Nd, Td, length_d, UNIFORM_D)
            is_valid = (d >= 0) & (d < Nd)
            end = tl.where(is_valid, end, start)
            saved_offs = saved_offsets(
                entry,
                pair,
                first_entry,
                row,
                first_row,
                Tq,
                longest,
                PAIRING,
            )
            smooth_max = tl.load(saved_ptr + saved_offs, mask=inside, other=0.0)
            if PAIRING == ALL:
                offs = owner.to(tl.int64) * stride_q + tl.cast(d, tl.int64) * stride_d
            else:
                offs = row.to(tl.int64) * 0 + tl.cast(pair, tl.int64) * stride_d
            grad = tl.load(dscores_ptr + offs, mask=inside, other=0.0).to(tl.float32) / unit
            for t0 in range(0, end - start, BLOCK_T):
                doc_row = start + t0 + tl.arange(0, BLOCK_T)
                inside_d = doc_row < end
                share = _weights(
                    queries_ptr,
                    documents_ptr,
                    query_factors_ptr,
                    document_factors_ptr,
                    document_mask_ptr,
                    r0,
                    end_row - r0,
                    row,
                    inside,
                    start + t0,
                    end - start - t0,
                    doc_row,
                    inside_d,
                    smooth_max,
                    grad,
                    inverse_temperature,
                    D,
                    BLOCK_Q,
                    BLOCK_T,
                    BLOCK_K,
                    HAS_DMASK,
                    HAS_SCALE,
                    PRECISION,
                )
                unmasked = inside_d
                if HAS_DMASK:
                    unmasked = inside_d & (
                        tl.load(document_mask_ptr + doc_row, mask=inside_d, other=0) != 0
                    )
                x = load_rows(documents_ptr, doc_row, unmasked, k, D)
                if HAS_SCALE:  # of unmasked tokens only: masked ones may hold NaN
                    power, mantissa = split_scale(
                        tl.load(document_factors_ptr + doc_row, mask=unmasked, other=0.0),
                    )
                    share *= mantissa[None, :]
                    x = times_power(x, power)
                acc = tl.dot(share.to(x.dtype), x, acc, input_precision=PRECISION)
        store_rows(dquery_ptr, row, inside, k, acc * unit * factor, D)


@triton.jit(do_not_specialize=SIZES)
def smooth_ddocuments_kernel(
    dscores_ptr,
    saved_ptr,
    queries_ptr,
    documents_ptr,
    query_factors_ptr,
    document_factors_ptr,
    largest_ptr,
    query_mask_ptr,
    document_mask_ptr,
    cu_queries_ptr,
    cu_documents_ptr,
    row_query_ptr,
    order_ptr,
    first_ptr,
    pairs_ptr,
    ddoc_ptr,
    Tq,
    Td,
    Nq,
    Nd,
    length_q,
    length_d,
    group,
    longest,
    tiles,
    stride_q,
    stride_d,
    inverse_temperature,
    factor,
    D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAIRING: tl.constexpr,
    UNIFORM_Q: tl.constexpr,
    UNIFORM_D: tl.constexpr,
    HAS_QMASK: tl.constexpr,
    HAS_DMASK: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_LARGEST: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute the gradient of the tiles of one document from smooth maxima.

    Grid: ``[Nd, tiles, ceil(D / BLOCK_D)]``; programs share the tiles of a document.

    Args:
        saved_ptr: smooth maxima.
        order_ptr: order of listed pairs by document.
        first_ptr: offsets ``[Nd + 1]`` of the pairs of each document in this order.
        ddoc_ptr: gradient ``[Td, D]``; written.

    The other arguments are as in :func:`~tilefold.ops.maxsim._triton.backward.ddocuments_kernel`.
    """
    unit = grad_unit(largest_ptr, HAS_LARGEST)
    k = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
    d = tl.program_id(0)
    start, end, _offsets_valid = bounds(cu_documents_ptr, d, Nd, Td, length_d, UNIFORM_D)
    first_entry, end_entry = document_list(d, first_ptr, PAIRING)
    for t0 in range(tl.program_id(1) * BLOCK_T, end - start, tiles * BLOCK_T):
        doc_row = start + t0 + tl.arange(0, BLOCK_T)
        inside_d = doc_row < end
        acc = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
        for entry in range(first_entry, end_entry):
            r_start, r_end, base, offs_pair = query_of_entry(
                entry,
                first_entry,
                d,
                order_ptr,
                pairs_ptr,
                cu_queries_ptr,
                Tq,
                Nq,
                length_q,
                group,
                longest,
                stride_d,
                PAIRING,
                UNIFORM_Q,
            )
            for r0 in range(r_start, r_end, BLOCK_Q):
                row = r0 + tl.arange(0, BLOCK_Q)
                inside = row < r_end
                unmasked_q = inside
                if HAS_QMASK:
                    unmasked_q = inside & (tl.load(query_mask_ptr + row, mask=inside, other=0) != 0)
                smooth_max = tl.load(saved_ptr + base + row, mask=inside, other=0.0)
                offs = tl.zeros((BLOCK_Q,), tl.int64) + offs_pair
                if PAIRING == ALL:
                    owner = owner_of(row_query_ptr, row, inside, length_q, UNIFORM_Q)
                    offs += owner.to(tl.int64) * stride_q
                grad = tl.load(dscores_ptr + offs, mask=inside, other=0.0).to(tl.float32) / unit
                share = _weights(
                    queries_ptr,
                    documents_ptr,
                    query_factors_ptr,
                    document_factors_ptr,
                    document_mask_ptr,
                    r0,
                    r_end - r0,
                    row,
                    unmasked_q,
                    start + t0,
                    end - start - t0,
                    doc_row,
                    inside_d,
                    smooth_max,
                    grad,
                    inverse_temperature,
                    D,
                    BLOCK_Q,
                    BLOCK_T,
                    BLOCK_K,
                    HAS_DMASK,
                    HAS_SCALE,
                    PRECISION,
                )
                x = load_rows(queries_ptr, row, unmasked_q, k, D)
                if HAS_SCALE:
                    power, mantissa = split_scale(
                        tl.load(query_factors_ptr + row, mask=unmasked_q, other=0.0),
                    )
                    share *= mantissa[:, None]
                    x = times_power(x, power)
                acc = tl.dot(tl.trans(share).to(x.dtype), x, acc, input_precision=PRECISION)
        store_rows(ddoc_ptr, doc_row, inside_d, k, acc * unit * factor, D)
