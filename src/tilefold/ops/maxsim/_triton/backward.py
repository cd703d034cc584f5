"""Backward of the maximum, in which only winning document tokens receive a gradient.

Every gradient row has one owner, so there are no atomics. The gradient of a query row is the sum of
the document rows that won against it, pair by pair. The gradient of a tile of document rows is a
product on the tensor cores: of a matrix with one coefficient in each column, at the row of the
winner, and of the query rows of the pairs that list the document.

If every query meets every document, a dense product of that one-hot matrix with all query rows
would cost as much as forward, although each query row has one winner per document. A program then
reads the winners of its document, 16 bits each, lists the query rows that won in its tile, in the
order of the rows, and multiplies only these.
"""

import triton
import triton.language as tl

from tilefold.ops._shared._triton.offsets import mask_if
from tilefold.ops.maxsim._triton.device import (
    ALL,
    GROUPED,
    INDEX,
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
from tilefold.ops.maxsim._triton.norms import projected


@triton.jit
def query_list(
    cu_queries_ptr,
    first_ptr,
    Tq,
    Nq,
    Nd,
    length_q,
    group,
    BLOCK: tl.constexpr,
    PAIRING: tl.constexpr,
    UNIFORM_Q: tl.constexpr,
):
    """Return the query rows of a program, and the entries of its list of pairs.

    For all pairs the rows are a block of all query rows, and the entries are the documents.
    Otherwise they are the rows of one query, and the entries are its pairs.

    Args:
        cu_queries_ptr: offsets ``[Nq + 1]`` of the queries, unless UNIFORM_Q.
        first_ptr: offsets ``[Nq + 1]`` of the listed pairs of each query.
        Tq: number of query rows.
        Nq, Nd: numbers of queries and documents.
        length_q: length of all queries, if UNIFORM_Q.
        group: documents of a query, for grouped pairs.
        BLOCK: rows of a block, for all pairs.
        PAIRING: which pairs have a score: ``ALL``, ``GROUPED`` or ``INDEX`` (listed).
        UNIFORM_Q: whether all queries have the same length.

    Returns:
        The first row and the row after the last, the first entry and the entry after the last.
    """
    if PAIRING == ALL:
        first = tl.program_id(0) * BLOCK
        return first, tl.minimum(first + BLOCK, Tq), 0, Nd
    else:
        query = tl.program_id(0)
        first, stop, _offsets_valid = bounds(cu_queries_ptr, query, Nq, Tq, length_q, UNIFORM_Q)
        if PAIRING == GROUPED:
            return first, stop, query * group, query * group + group
        else:
            return (
                first,
                stop,
                tl.load(first_ptr + query).to(tl.int32),
                tl.load(first_ptr + query + 1).to(tl.int32),
            )


@triton.jit
def document_list(d, first_ptr, PAIRING: tl.constexpr):
    """Return the first entry of a document's list of pairs, and the entry after the last.

    Args:
        d: the document.
        first_ptr: offsets ``[Nd + 1]`` of the listed pairs of each document.
        PAIRING: which pairs have a score. Only listed pairs (``INDEX``) have more than one entry.
    """
    if PAIRING == INDEX:
        return tl.load(first_ptr + d).to(tl.int32), tl.load(first_ptr + d + 1).to(tl.int32)
    else:
        return d, d + 1


@triton.jit
def query_of_entry(
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
    PAIRING: tl.constexpr,
    UNIFORM_Q: tl.constexpr,
):
    """Return the query rows of an entry of a document's list, and their offsets.

    Args:
        entry: the entry.
        first_entry: first entry of the document.
        d: the document.
        order_ptr: listed pairs in the order of their documents.
        pairs_ptr: query and document of each listed pair, ``[P, 2]``.
        cu_queries_ptr: offsets ``[Nq + 1]`` of the queries, unless UNIFORM_Q.
        Tq: number of query rows.
        Nq: number of queries.
        length_q: length of all queries, if UNIFORM_Q.
        group: documents of a query, for grouped pairs.
        longest: length of a row of ``saved``, for listed pairs.
        stride_d: stride of the scores' gradient over documents or pairs.
        PAIRING: which pairs have a score: ``ALL``, ``GROUPED`` or ``INDEX`` (listed).
        UNIFORM_Q: whether all queries have the same length.

    Returns:
        The first row and the row after the last, the offset to add to a row for its element of
        ``saved``, and the offset of the pair in the gradient of the scores.
    """
    if PAIRING == INDEX:
        pair, query, _d = item_of(entry, first_entry, order_ptr, pairs_ptr, PAIRING)
        is_valid = (query >= 0) & (query < Nq)
        query = tl.where(is_valid, query, 0)
        start, end, _offsets_valid = bounds(cu_queries_ptr, query, Nq, Tq, length_q, UNIFORM_Q)
        end = tl.where(is_valid, end, start)
        return (
            start,
            end,
            tl.cast(pair, tl.int64) * longest - start,
            tl.cast(pair, tl.int64) * stride_d,
        )
    elif PAIRING == GROUPED:
        start, end, _offsets_valid = bounds(cu_queries_ptr, d // group, Nq, Tq, length_q, UNIFORM_Q)
        return start, end, tl.cast(d % group, tl.int64) * Tq, tl.cast(d, tl.int64) * stride_d
    else:
        return 0, Tq, tl.cast(d, tl.int64) * Tq, tl.cast(d, tl.int64) * stride_d


@triton.jit
def grad_unit(largest_ptr, HAS_LARGEST: tl.constexpr):
    """Return the unit of the scores' gradients.

    Gradients are divided by it, so that their products with fp16 neither vanish nor overflow.

    Args:
        largest_ptr: the largest gradient of a score, which is the unit; without it, the unit is 1.
        HAS_LARGEST: whether there is one.
    """
    unit = 1.0
    if HAS_LARGEST:
        unit = tl.load(largest_ptr).to(tl.float32)
        unit = tl.where(unit == 0.0, 1.0, unit)
    return unit


@triton.jit
def saved_offsets(entry, pair, first_entry, row, q_start, Tq, longest, PAIRING: tl.constexpr):
    """Return the offsets of some query rows of an entry in ``saved``.

    For listed pairs, ``saved`` is ``[pairs, longest]``, otherwise ``[documents of a query, Tq]``.

    Args:
        entry: the entry of the query's list.
        pair: its pair.
        first_entry: first entry of the query.
        row: the rows.
        q_start: first row of the query.
        Tq: number of query rows.
        longest: length of a row of ``saved``, for listed pairs.
        PAIRING: which pairs have a score: ``ALL``, ``GROUPED`` or ``INDEX`` (listed).
    """
    if PAIRING == INDEX:
        return pair.to(tl.int64) * longest + row - q_start
    else:
        return tl.cast(entry - first_entry, tl.int64) * Tq + row


@triton.jit(do_not_specialize=SIZES)
def dqueries_kernel(
    dscores_ptr,
    saved_ptr,
    documents_ptr,
    query_factors_ptr,
    document_factors_ptr,
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
    factor,
    D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAIRING: tl.constexpr,
    UNIFORM_Q: tl.constexpr,
    UNIFORM_D: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    NO_WINNER: tl.constexpr,
):
    """Compute the gradients of query rows: sums of the document rows that won against them.

    ``dqueries[r] = factor * sum over pairs of dscore * documents[winner of r]``. Grid:
    ``[ceil(Tq / BLOCK_R), ceil(D / BLOCK_D)]`` for all pairs, otherwise
    ``[Nq, ceil(D / BLOCK_D)]``.

    Args:
        dscores_ptr: gradient of the scores, with ``stride_q`` and ``stride_d``.
        saved_ptr: winners: positions within a document, or NO_WINNER.
        documents_ptr: document rows ``[Td, D]``.
        query_factors_ptr: not used here.
        document_factors_ptr: factors ``[Td]`` of the document rows, if HAS_SCALE.
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
        factor: 1, or with the mean over query tokens 1 by their number.
        D: dimension of the rows.
        BLOCK_R, BLOCK_D: query rows and columns of a tile.
        PAIRING: which pairs have a score: ``ALL``, ``GROUPED`` or ``INDEX`` (listed).
        UNIFORM_Q: whether all queries have the same length.
        UNIFORM_D: whether all documents have the same length, see :func:`bounds`.
        HAS_SCALE: whether document rows have factors.
        NO_WINNER: position of a query token without a winner.
    """
    k = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    first_row, end_row, first_entry, end_entry = query_list(
        cu_queries_ptr,
        first_ptr,
        Tq,
        Nq,
        Nd,
        length_q,
        group,
        BLOCK_R,
        PAIRING,
        UNIFORM_Q,
    )
    for r0 in range(first_row, end_row, BLOCK_R):
        row = r0 + tl.arange(0, BLOCK_R)
        inside = row < end_row
        if PAIRING == ALL:
            owner = owner_of(row_query_ptr, row, inside, length_q, UNIFORM_Q)
        acc = tl.zeros((BLOCK_R, BLOCK_D), tl.float32)
        for entry in tl.range(first_entry, end_entry):
            pair, _query, d = item_of(entry, first_entry, order_ptr, pairs_ptr, PAIRING)
            start, end, offsets_valid = bounds(cu_documents_ptr, d, Nd, Td, length_d, UNIFORM_D)
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
            # [BLOCK_R]
            winner = tl.load(saved_ptr + saved_offs, mask=inside, other=NO_WINNER).to(tl.int32)
            has_winner = mask_if(inside & (winner != NO_WINNER), offsets_valid)
            has_winner = has_winner & (start + winner < end)
            if PAIRING == ALL:
                grad_offs = owner.to(tl.int64) * stride_q + tl.cast(d, tl.int64) * stride_d
                grad = tl.load(dscores_ptr + grad_offs, mask=has_winner, other=0.0).to(tl.float32)
            else:
                grad = tl.load(dscores_ptr + tl.cast(pair, tl.int64) * stride_d).to(tl.float32)
                grad = tl.where(has_winner, grad, 0.0)
            winner_row = start + winner
            document_row = load_rows(documents_ptr, winner_row, has_winner, k, D).to(tl.float32)
            if HAS_SCALE:
                document_row *= tl.load(
                    document_factors_ptr + winner_row, mask=has_winner, other=0.0
                )[:, None]
            acc += grad[:, None] * document_row
        store_rows(dquery_ptr, row, inside, k, acc * factor, D)


@triton.jit(do_not_specialize=SIZES)
def dqueries_row_kernel(
    dscores_ptr,
    saved_ptr,
    queries_ptr,
    documents_ptr,
    query_factors_ptr,
    document_factors_ptr,
    cu_documents_ptr,
    row_query_ptr,
    dquery_ptr,
    Tq,
    Td,
    Nd,
    length_q,
    length_d,
    stride_q,
    stride_d,
    factor,
    D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    UNIFORM_Q: tl.constexpr,
    UNIFORM_D: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    NO_WINNER: tl.constexpr,
    PROJECTS: tl.constexpr,
):
    """Compute the gradient of one query row from all documents, for few query rows.

    ``dqueries[r] = factor * sum over documents of dscore * documents[winner of r]``. A step of the
    loop takes ``BLOCK_N`` documents. Grid: ``[Tq, ceil(D / BLOCK_D)]``.

    Args:
        dscores_ptr: gradient of the scores ``[Nq, Nd]``, with ``stride_q`` and ``stride_d``.
        saved_ptr: winners ``[Nd, Tq]``: positions within a document, or NO_WINNER.
        queries_ptr: query rows ``[Tq, D]``, if PROJECTS.
        documents_ptr: document rows ``[Td, D]``.
        query_factors_ptr: inverse norms ``[Tq]`` of the query rows, if PROJECTS.
        document_factors_ptr: factors ``[Td]`` of the document rows, if HAS_SCALE.
        cu_documents_ptr: offsets ``[Nd + 1]`` of the documents, unless UNIFORM_D.
        row_query_ptr: query of each row, unless UNIFORM_Q.
        dquery_ptr: gradient ``[Tq, D]``; written.
        Tq, Td: numbers of query and document rows.
        Nd: number of documents.
        length_q, length_d: length of all queries, and of all documents, if UNIFORM_Q or UNIFORM_D.
        factor: 1, or with the mean over query tokens 1 by their number.
        D: dimension of the rows.
        BLOCK_N, BLOCK_D: documents and columns of a step.
        UNIFORM_Q: whether all queries have the same length.
        UNIFORM_D: whether all documents have the same length, see :func:`bounds`.
        HAS_SCALE: whether document rows have factors.
        NO_WINNER: position of a query token without a winner.
        PROJECTS: whether the rows were normalised, so that the gradient is that of the rows before
            normalisation. ``D <= BLOCK_D`` then.
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
        exists = d < Nd
        start, end, _offsets_valid = bounds(cu_documents_ptr, d, Nd, Td, length_d, UNIFORM_D)
        winner = tl.load(saved_ptr + d.to(tl.int64) * Tq + row, mask=exists, other=NO_WINNER).to(
            tl.int32,
        )
        # A document with invalid offsets is empty, so that none of its tokens wins.
        has_winner = (winner != NO_WINNER) & (start + winner < end)
        offs = tl.cast(owner, tl.int64) * stride_q + d.to(tl.int64) * stride_d
        # Loaded as a column, since Triton 3.7 cannot lay out one mask for int32 winners and int64
        # offsets.
        grad = tl.load(dscores_ptr + offs[:, None], mask=has_winner[:, None], other=0.0)
        grad = grad.to(tl.float32)
        doc_row = start + winner
        x = load_rows(documents_ptr, doc_row, has_winner, k, D).to(tl.float32)
        if HAS_SCALE:
            x *= tl.load(document_factors_ptr + doc_row, mask=has_winner, other=0.0)[:, None]
        acc += grad * x
    dquery = tl.sum(acc, axis=0) * factor
    offs = tl.cast(row, tl.int64) * D + k
    if PROJECTS:
        x = tl.load(queries_ptr + offs, mask=k < D, other=0.0).to(tl.float32)
        scale = tl.load(query_factors_ptr + row + tl.arange(0, 1))
        dquery = tl.sum(projected(x[None, :], scale, dquery[None, :]), axis=0)  # of one row
    tl.store(dquery_ptr + offs, dquery.to(dquery_ptr.dtype.element_ty), mask=k < D)


@triton.jit(do_not_specialize=SIZES)
def ddocuments_kernel(
    dscores_ptr,
    saved_ptr,
    queries_ptr,
    query_factors_ptr,
    largest_ptr,
    cu_queries_ptr,
    cu_documents_ptr,
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
    stride_d,
    factor,
    D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAIRING: tl.constexpr,
    UNIFORM_Q: tl.constexpr,
    UNIFORM_D: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_LARGEST: tl.constexpr,
    NO_WINNER: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute the gradients of document rows: sums of the query rows that they won.

    ``ddocuments[t]`` sums ``factor * dscore * queries[r]`` over the rows r that t won. All query
    rows of the document's pairs are multiplied by a one-hot matrix of their winners. Grid:
    ``[Nd, tiles, ceil(D / BLOCK_D)]``; programs share the tiles of a document.

    Args:
        dscores_ptr: gradient of the scores.
        saved_ptr: winners: positions within a document, or NO_WINNER.
        queries_ptr: query rows ``[Tq, D]``.
        query_factors_ptr: factors ``[Tq]`` of the query rows, if HAS_SCALE.
        largest_ptr: the largest gradient of a score, if HAS_LARGEST.
        cu_queries_ptr: offsets ``[Nq + 1]`` of the queries, unless UNIFORM_Q.
        cu_documents_ptr: offsets ``[Nd + 1]`` of the documents, unless UNIFORM_D.
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
        stride_d: stride of the scores' gradient over documents or pairs.
        factor: 1, or with the mean over query tokens 1 by their number.
        D: dimension of the rows.
        BLOCK_T, BLOCK_E, BLOCK_D: document rows, query rows and columns of a tile.
        PAIRING: which pairs have a score: ``ALL``, ``GROUPED`` or ``INDEX`` (listed).
        UNIFORM_Q: whether all queries have the same length.
        UNIFORM_D: whether all documents have the same length, see :func:`bounds`.
        HAS_SCALE: whether query rows have factors.
        HAS_LARGEST: whether gradients are divided by the largest one.
        NO_WINNER: position of a query token without a winner.
        PRECISION: precision of products of fp32.
    """
    k = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
    d = tl.program_id(0)
    start, end, _offsets_valid = bounds(cu_documents_ptr, d, Nd, Td, length_d, UNIFORM_D)
    unit = grad_unit(largest_ptr, HAS_LARGEST)
    first_entry, end_entry = document_list(d, first_ptr, PAIRING)
    for t0 in range(tl.program_id(1) * BLOCK_T, end - start, tiles * BLOCK_T):
        t = t0 + tl.arange(0, BLOCK_T)
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
            for r0 in tl.range(r_start, r_end, BLOCK_E):
                row = r0 + tl.arange(0, BLOCK_E)
                inside = row < r_end
                winner = tl.load(saved_ptr + base + row, mask=inside, other=NO_WINNER).to(tl.int32)
                in_tile = inside & (winner != NO_WINNER) & (winner >= t0) & (winner < t0 + BLOCK_T)
                grad = tl.load(dscores_ptr + offs_pair).to(tl.float32) / unit
                grad = tl.where(in_tile, grad, 0.0)
                x = load_block(queries_ptr, r0, r_end - r0, k, D, BLOCK_E)  # [BLOCK_E, BLOCK_D]
                # Other rows become 0, since a coefficient of 0 times a NaN would be NaN.
                x = tl.where(in_tile[:, None], x, 0.0).to(x.dtype)
                if HAS_SCALE:
                    power, mantissa = split_scale(
                        tl.load(query_factors_ptr + row, mask=in_tile, other=0.0),
                    )
                    grad *= mantissa
                    x = times_power(x, power)
                # [BLOCK_T, BLOCK_E]: the gradient of each query row, at the row of its winner
                onehot = tl.where(winner[None, :] == t[:, None], grad[None, :], 0.0).to(x.dtype)
                acc = tl.dot(onehot, x, acc, input_precision=PRECISION)
        store_rows(ddoc_ptr, start + t, start + t < end, k, acc * unit * factor, D)


@triton.jit
def _add_listed(
    acc,
    lists_ptr,
    count,
    dscores_ptr,
    saved_ptr,
    queries_ptr,
    query_factors_ptr,
    row_query_ptr,
    t0,
    unit,
    Tq,
    length_q,
    stride_q,
    k,
    D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    UNIFORM_Q: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add ``dscore * queries[row]`` of listed query rows to the rows of a tile.

    Args:
        acc: the tile ``[BLOCK_T, BLOCK_D]``, from document token ``t0`` on.
        lists_ptr: the list of query rows.
        count: number of listed rows.
        dscores_ptr: gradient of the scores of the document.
        saved_ptr: winners of the document.
        queries_ptr: query rows ``[Tq, D]``.
        query_factors_ptr: factors ``[Tq]`` of the query rows, if HAS_SCALE.
        row_query_ptr: query of each row, unless UNIFORM_Q.
        t0: position of the tile's first token.
        unit: unit of the scores' gradients.
        Tq: number of query rows.
        length_q: length of all queries, if UNIFORM_Q.
        stride_q: stride of the scores' gradient over queries.
        k: columns of the tile.
        D: dimension of the rows.
        BLOCK_T, BLOCK_E: document rows and query rows of a product.
        UNIFORM_Q: whether all queries have the same length.
        HAS_SCALE: whether query rows have factors.
        PRECISION: precision of products of fp32.

    Returns:
        The tile after the addition.
    """
    t = tl.arange(0, BLOCK_T)
    for entry0 in tl.range(0, count, BLOCK_E):
        entry = entry0 + tl.arange(0, BLOCK_E)
        listed = entry < count
        row = tl.load(lists_ptr + entry, mask=listed, other=0)
        position = tl.load(saved_ptr + row, mask=listed, other=0).to(tl.int32) - t0
        owner = owner_of(row_query_ptr, row, listed, length_q, UNIFORM_Q)
        grad = tl.load(dscores_ptr + owner.to(tl.int64) * stride_q, mask=listed, other=0.0)
        grad = grad.to(tl.float32) / unit
        x = load_rows(queries_ptr, row, listed, k, D)  # [BLOCK_E, BLOCK_D]
        if HAS_SCALE:
            power, mantissa = split_scale(tl.load(query_factors_ptr + row, mask=listed, other=0.0))
            grad *= mantissa
            x = times_power(x, power)
        onehot = tl.where(position[None, :] == t[:, None], grad[None, :], 0.0).to(x.dtype)
        acc = tl.dot(onehot, x, acc, input_precision=PRECISION)
    return acc


@triton.jit(do_not_specialize=SIZES)
def ddocuments_listed_kernel(
    dscores_ptr,
    saved_ptr,
    queries_ptr,
    documents_ptr,
    query_factors_ptr,
    document_factors_ptr,
    largest_ptr,
    cu_documents_ptr,
    row_query_ptr,
    lists_ptr,
    ddoc_ptr,
    Tq,
    Td,
    Nd,
    slices,
    length_q,
    length_d,
    stride_q,
    stride_d,
    factor,
    D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CAPACITY: tl.constexpr,
    ALIGNED: tl.constexpr,
    UNIFORM_Q: tl.constexpr,
    UNIFORM_D: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_LARGEST: tl.constexpr,
    NO_WINNER: tl.constexpr,
    PRECISION: tl.constexpr,
    PROJECTS: tl.constexpr,
):
    """Compute the gradients of document rows, from lists of the query rows that they won.

    This is for all pairs.

    ``ddocuments[t]`` sums ``factor * dscore * queries[r]`` over the rows r that t won. Query rows
    that won in a tile are listed, and only these are multiplied by a one-hot matrix of their
    winners.

    Grid: ``[programs, ceil(D / BLOCK_D)]``. Programs share ``Nd * slices`` items of work: item
    ``i`` is slice ``i % slices`` of document ``i // slices``, every ``slices``-th tile of it.

    Args:
        dscores_ptr: gradient of the scores ``[Nq, Nd]``, with ``stride_q`` and ``stride_d``.
        saved_ptr: winners ``[Nd, Tq]``: positions within a document, or NO_WINNER.
        queries_ptr: query rows ``[Tq, D]``.
        documents_ptr: document rows ``[Td, D]``, if PROJECTS.
        query_factors_ptr: factors ``[Tq]`` of the query rows, if HAS_SCALE.
        document_factors_ptr: inverse norms ``[Td]`` of the document rows, if PROJECTS.
        largest_ptr: the largest gradient of a score, if HAS_LARGEST.
        cu_documents_ptr: offsets ``[Nd + 1]`` of the documents, unless UNIFORM_D.
        row_query_ptr: query of each row, unless UNIFORM_Q.
        lists_ptr: scratch for the lists, CAPACITY rows for each program.
        ddoc_ptr: gradient ``[Td, D]``; written.
        Tq, Td: numbers of query and document rows.
        Nd: number of documents.
        slices: number of slices of a document.
        length_q, length_d: length of all queries, and of all documents, if UNIFORM_Q or UNIFORM_D.
        factor: 1, or with the mean over query tokens 1 by their number.
        D: dimension of the rows.
        BLOCK_T: document rows of a tile.
        BLOCK_S: query rows whose winners are read at a time.
        BLOCK_E, BLOCK_D: query rows and columns of a product.
        CAPACITY: query rows that a list can hold.
        ALIGNED: whether ``Tq`` is a multiple of 8, so that winners are read 16 bytes at a time.
        UNIFORM_Q: whether all queries have the same length.
        UNIFORM_D: whether all documents have the same length, see :func:`bounds`.
        HAS_SCALE: whether query rows have factors.
        HAS_LARGEST: whether gradients are divided by the largest one.
        NO_WINNER: position of a query token without a winner.
        PRECISION: precision of products of fp32.
        PROJECTS: whether the rows were normalised, so that the gradient is that of the rows before
            normalisation. ``D <= BLOCK_D`` then.
    """
    k = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    lists_ptr += (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)) * CAPACITY
    unit = grad_unit(largest_ptr, HAS_LARGEST)
    for item in range(tl.program_id(0), Nd * slices, tl.num_programs(0)):
        d = item // slices
        start, end, _offsets_valid = bounds(cu_documents_ptr, d, Nd, Td, length_d, UNIFORM_D)
        saved_d = saved_ptr + tl.cast(d, tl.int64) * Tq
        if ALIGNED:
            saved_d = tl.multiple_of(saved_d, 16)
        dscore_d = dscores_ptr + tl.cast(d, tl.int64) * stride_d
        for t0 in range((item % slices) * BLOCK_T, end - start, slices * BLOCK_T):
            acc = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
            count = 0
            for r0 in range(0, Tq, BLOCK_S):
                row = r0 + tl.arange(0, BLOCK_S)
                winner = tl.load(saved_d + row, mask=row < Tq, other=NO_WINNER).to(tl.int32)
                in_tile = (winner >= t0) & (winner < t0 + BLOCK_T) & (winner != NO_WINNER)
                position = count + tl.cumsum(in_tile.to(tl.int32), 0) - 1
                tl.store(lists_ptr + position, row, mask=in_tile)
                count += tl.sum(in_tile.to(tl.int32))
                # The list is multiplied when it might overflow in the next step, and at the end.
                if (count > CAPACITY - BLOCK_S) | (r0 + BLOCK_S >= Tq):
                    tl.debug_barrier()  # the list was written by other threads
                    acc = _add_listed(
                        acc,
                        lists_ptr,
                        count,
                        dscore_d,
                        saved_d,
                        queries_ptr,
                        query_factors_ptr,
                        row_query_ptr,
                        t0,
                        unit,
                        Tq,
                        length_q,
                        stride_q,
                        k,
                        D,
                        BLOCK_T,
                        BLOCK_E,
                        UNIFORM_Q,
                        HAS_SCALE,
                        PRECISION,
                    )
                    count = 0
                    tl.debug_barrier()  # the list has been read, and may be overwritten
            row_d = start + t0 + tl.arange(0, BLOCK_T)
            acc = acc * unit * factor
            if PROJECTS:
                x = load_rows(documents_ptr, row_d, row_d < end, k, D).to(tl.float32)
                acc = projected(
                    x,
                    tl.load(document_factors_ptr + row_d, mask=row_d < end, other=0.0),
                    acc,
                )
            store_rows(ddoc_ptr, row_d, row_d < end, k, acc, D)
