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
        queries_ptr, documents_ptr: query rows ``[Tq, D]`` and document rows ``[Td, D]``.
        query_factors_ptr, document_factors_ptr: factors of the rows, if HAS_SCALE.
        document_mask_ptr: mask ``[Td]``, if HAS_DMASK.
        row0: first query row of the tile.
        rows: number of query rows from ``row0`` on.
        row: query rows of the tile.
        inside_q: rows that exist and are not masked.
        doc_row0, doc_rows, doc_row, inside_d: the same of document rows, which may be masked.
        smooth_max: smooth maxima ``[BLOCK_Q]``.
        grad: gradients of the scores ``[BLOCK_Q]``.
        inverse_temperature: ``1 / temperature``.
        D: dimension of the rows.
        BLOCK_Q, BLOCK_T, BLOCK_K: query rows, document rows and columns of a product.
        HAS_DMASK: whether documents have a mask.
        HAS_SCALE: whether rows have factors.
        PRECISION: precision of products of fp32.
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
    """Compute the gradients of query rows from the softmax weights of their similarities.

    ``dqueries[r] = factor * sum over pairs and document tokens t of dscore * softmax[r, t] *
    documents[t]``. Grid: ``[ceil(Tq / BLOCK_Q), ceil(D / BLOCK_D)]`` for all pairs, otherwise
    ``[Nq, ceil(D / BLOCK_D)]``.

    Args:
        dscores_ptr: gradient of the scores, with ``stride_q`` and ``stride_d``.
        saved_ptr: smooth maxima.
        queries_ptr: query rows ``[Tq, D]``.
        documents_ptr: document rows ``[Td, D]``.
        query_factors_ptr, document_factors_ptr: factors of the rows, if HAS_SCALE.
        largest_ptr: the largest gradient of a score, if HAS_LARGEST.
        document_mask_ptr: mask ``[Td]``, if HAS_DMASK.
        cu_queries_ptr: offsets ``[Nq + 1]`` of the queries, unless UNIFORM_Q.
        cu_documents_ptr: offsets ``[Nd + 1]`` of the documents, unless UNIFORM_D.
        row_query_ptr: query of each row, for all pairs, unless UNIFORM_Q.
        order_ptr: listed pairs in the order of their queries.
        first_ptr: offsets ``[Nq + 1]`` of the pairs of each query in this order.
        pairs_ptr: query and document of each listed pair, ``[P, 2]``.
        dquery_ptr: gradient ``[Tq, D]``; written.
        Tq, Td: numbers of query and document rows.
        Nq, Nd: numbers of queries and documents.
        length_q, length_d: length of all queries, and of all documents, if UNIFORM_Q or UNIFORM_D.
        group: documents of a query, for grouped pairs.
        longest: length of a row of ``saved``, for listed pairs.
        stride_q, stride_d: strides of the scores' gradient over queries, and over documents or
            pairs.
        inverse_temperature: ``1 / temperature``.
        factor: 1, or with the mean over query tokens 1 by their number.
        D: dimension of the rows.
        BLOCK_Q, BLOCK_T, BLOCK_K: query rows, document rows and columns of a product of
            similarities.
        BLOCK_D: columns of a tile of the gradient.
        PAIRING: which pairs have a score: ``ALL``, ``GROUPED`` or ``INDEX`` (listed).
        UNIFORM_Q: whether all queries have the same length.
        UNIFORM_D: whether all documents have the same length, see :func:`bounds`.
        HAS_DMASK: whether documents have a mask.
        HAS_SCALE: whether rows have factors.
        HAS_LARGEST: whether gradients are divided by the largest one.
        PRECISION: precision of products of fp32.
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
                weights = _weights(
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
                if HAS_SCALE:  # factors of masked tokens may be NaN, and are not read
                    power, mantissa = split_scale(
                        tl.load(document_factors_ptr + doc_row, mask=unmasked, other=0.0),
                    )
                    weights *= mantissa[None, :]
                    x = times_power(x, power)
                acc = tl.dot(weights.to(x.dtype), x, acc, input_precision=PRECISION)
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
    """Compute the gradients of document rows from the softmax weights of their similarities.

    ``ddocuments[t] = factor * sum over pairs and query tokens r of dscore * softmax[r, t] *
    queries[r]``. Grid: ``[Nd, tiles, ceil(D / BLOCK_D)]``; programs share the tiles of a document.

    Args:
        dscores_ptr: gradient of the scores, with ``stride_q`` and ``stride_d``.
        saved_ptr: smooth maxima.
        queries_ptr: query rows ``[Tq, D]``.
        documents_ptr: document rows ``[Td, D]``.
        query_factors_ptr, document_factors_ptr: factors of the rows, if HAS_SCALE.
        largest_ptr: the largest gradient of a score, if HAS_LARGEST.
        query_mask_ptr, document_mask_ptr: masks ``[Tq]`` and ``[Td]``.
        cu_queries_ptr: offsets ``[Nq + 1]`` of the queries, unless UNIFORM_Q.
        cu_documents_ptr: offsets ``[Nd + 1]`` of the documents, unless UNIFORM_D.
        row_query_ptr: query of each row, for all pairs, unless UNIFORM_Q.
        order_ptr: listed pairs in the order of their documents.
        first_ptr: offsets ``[Nd + 1]`` of the pairs of each document in this order.
        pairs_ptr: query and document of each listed pair, ``[P, 2]``.
        ddoc_ptr: gradient ``[Td, D]``; written.
        Tq, Td: numbers of query and document rows.
        Nq, Nd: numbers of queries and documents.
        length_q, length_d: length of all queries, and of all documents, if UNIFORM_Q or UNIFORM_D.
        group: documents of a query, for grouped pairs.
        longest: length of a row of ``saved``, for listed pairs.
        tiles: programs that share a document.
        stride_q, stride_d: strides of the scores' gradient over queries, and over documents or
            pairs.
        inverse_temperature: ``1 / temperature``.
        factor: 1, or with the mean over query tokens 1 by their number.
        D: dimension of the rows.
        BLOCK_Q, BLOCK_T, BLOCK_K: query rows, document rows and columns of a product of
            similarities.
        BLOCK_D: columns of a tile of the gradient.
        PAIRING: which pairs have a score: ``ALL``, ``GROUPED`` or ``INDEX`` (listed).
        UNIFORM_Q: whether all queries have the same length.
        UNIFORM_D: whether all documents have the same length, see :func:`bounds`.
        HAS_QMASK, HAS_DMASK: whether queries and documents have masks.
        HAS_SCALE: whether rows have factors.
        HAS_LARGEST: whether gradients are divided by the largest one.
        PRECISION: precision of products of fp32.
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
                weights = _weights(
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
                    weights *= mantissa[:, None]
                    x = times_power(x, power)
                acc = tl.dot(tl.trans(weights).to(x.dtype), x, acc, input_precision=PRECISION)
        store_rows(ddoc_ptr, doc_row, inside_d, k, acc * unit * factor, D)
