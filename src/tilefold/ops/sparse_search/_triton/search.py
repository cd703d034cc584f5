"""Kernels of exact search over sparse vectors: scores of blocks of documents, and their top k.

A program adds the postings of a query in one block of documents, as integers, in shared memory.
Additions of integers give the same sum in any order. Triton cannot declare such shared memory, so
PTX declares, writes and reads it. Interpreted kernels add atomically to the scores in global memory
instead, which gives the same bits.
"""

import triton
import triton.language as tl


@triton.jit
def _tile_address(BLOCK: tl.constexpr):
    """Declare ``BLOCK`` words of shared memory, and return their address.

    The text of an instruction must be constant, so that the number is written out in it.
    """
    tl.static_assert(BLOCK == 8192)
    return tl.inline_asm_elementwise(
        "{ .shared .align 16 .b32 sums[8192]; mov.u32 $0, sums; }",
        "=r",
        [],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _set(address, value):
    """Write words of shared memory.

    Args:
        address: address of each word.
        value: the words.
    """
    tl.inline_asm_elementwise(
        "st.shared.b32 [$1], $2; mov.u32 $0, 0;",
        "=r,r,r",
        [address, value],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _add(address, value, product):
    """Add values to words of shared memory, where a product is positive.

    Args:
        address: address of each word.
        value: what is added.
        product: the products that decide.
    """
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.gt.f32 p, $3, 0f00000000; @p red.shared.add.u32 [$1], $2; mov.u32 "
        "$0, 0; }",
        "=r,r,r,r",
        [address, value, product],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _get(address):
    """Read words of shared memory.

    Args:
        address: address of each word.
    """
    return tl.inline_asm_elementwise(
        "ld.shared.b32 $0, [$1];",
        "=r,r",
        [address],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _bytes(pointers, inside):
    """Load bytes, 0 where ``inside`` is false.

    Triton's own load would exchange the bytes between threads, through as much shared memory as the
    sums take.

    Args:
        pointers: pointer to each byte.
        inside: which bytes are read.
    """
    return tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $2, 0; mov.u32 $0, 0; @p ld.global.u8 $0, [$1]; }",
        "=r,l,r",
        [pointers.to(tl.int64, bitcast=True), inside.to(tl.int32)],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def _exponent(terms_ptr, weights_ptr, largest_ptr, T, V, BLOCK_T: tl.constexpr):
    """Return a power of two that is an upper bound of the scores of a query.

    Args:
        terms_ptr: terms of the query, ``[T]``.
        weights_ptr: their weights, ``[T]``.
        largest_ptr: largest weight of each term in the documents, ``[V]``.
        T: number of terms.
        V: size of the vocabulary.
        BLOCK_T: terms that are read at a time.

    Returns:
        The fp32 exponent field of the smallest power of two that is larger than any score, and the
        number of terms up to the last one with a positive weight.
    """
    bound = tl.zeros((BLOCK_T,), tl.float32)
    length = tl.zeros((BLOCK_T,), tl.int32)
    for t0 in range(0, T, BLOCK_T):
        t = t0 + tl.arange(0, BLOCK_T)
        weight = tl.maximum(tl.load(weights_ptr + t, mask=t < T, other=0.0), 0.0)
        term = tl.load(terms_ptr + t, mask=t < T, other=-1)
        bound += weight * tl.load(largest_ptr + term, mask=(term >= 0) & (term < V), other=0.0)
        length = tl.where(weight > 0.0, t + 1, length)
    return (tl.sum(bound).to(tl.int32, bitcast=True) >> 23) + 1, tl.max(length)


@triton.jit(do_not_specialize=["V"])
def pack_terms_kernel(
    queries_ptr,
    term_order_ptr,
    terms_ptr,
    weights_ptr,
    lengths_ptr,
    V,
    PACKED_CHUNK: tl.constexpr,
):
    """Write the terms of a dense query one after another, in the order of ``term_order``.

    Grid: ``[Nq]``.

    Args:
        queries_ptr: weights of all terms, ``[Nq, V]``.
        term_order_ptr: all terms ``[V]``, in the order in which they are written.
        terms_ptr: terms with a positive weight, ``[Nq, V]``; only the first entries of a row are
            written.
        weights_ptr: weights of these terms, ``[Nq, V]``; written.
        lengths_ptr: number of entries of a row that were written, ``[Nq]``; -1 if a weight of the
            query is negative, infinite or NaN.
        V: size of the vocabulary.
        PACKED_CHUNK: entries of ``term_order`` that are read at a time.
    """
    query = tl.program_id(0).to(tl.int64)
    queries_ptr += query * V
    terms_ptr += query * V
    weights_ptr += query * V
    length = 0
    n_invalid = 0
    for start in range(0, V, PACKED_CHUNK):
        position = start + tl.arange(0, PACKED_CHUNK)
        inside = position < V
        term = tl.load(term_order_ptr + position, mask=inside, other=0)
        weight = tl.load(queries_ptr + term, mask=inside, other=0.0)
        is_valid = (weight >= 0.0) & (weight < float("inf"))  # false for NaN
        n_invalid += tl.sum(tl.where(is_valid, 0, 1))
        is_term = is_valid & (weight > 0.0)
        entry = length + tl.cumsum(is_term.to(tl.int32), 0) - 1
        tl.store(terms_ptr + entry, term, mask=is_term)
        tl.store(weights_ptr + entry, weight, mask=is_term)
        length += tl.sum(is_term.to(tl.int32))
    tl.store(lengths_ptr + query, tl.where(n_invalid > 0, -1, length))


@triton.jit(do_not_specialize=["T", "V", "N", "Nq", "blocks"])
def block_scores_kernel(
    terms_ptr,
    weights_ptr,
    lengths_ptr,
    offsets_ptr,
    local_documents_ptr,
    postings_ptr,
    largest_ptr,
    allowed_ptr,
    score_ptr,
    group_ptr,
    high_ptr,
    T,
    V,
    N,
    Nq,
    blocks,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_T: tl.constexpr,
    TERMS: tl.constexpr,
    POSTINGS: tl.constexpr,
    HAS_LENGTHS: tl.constexpr,
    HAS_ALLOWED: tl.constexpr,
    SHARED: tl.constexpr,
):
    """Compute the scores of one block of documents for one query.

    Products of weights are rounded to integers, and the integers are added, which gives the same
    sum in any order. The sums of the block are in shared memory, or in global memory in the
    interpreter. Grid: ``[blocks * Nq]``.

    Args:
        terms_ptr: terms of the queries, ``[Nq, T]``.
        weights_ptr: their weights, ``[Nq, T]``.
        lengths_ptr: number of entries of a row that are read, ``[Nq]``, if HAS_LENGTHS; otherwise
            all are read.
        offsets_ptr, local_documents_ptr, postings_ptr, largest_ptr: tensors of ``BlockedPostings``:
            offsets of the terms of each block, documents within the block, weights, and the largest
            weight of each term.
        allowed_ptr: ``[N]``, nonzero for documents that may be returned, if HAS_ALLOWED.
        score_ptr: bits of the scores, ``[Nq, N]``; written.
        group_ptr: highest score of each GROUP documents, ``[Nq, groups]``; written.
        high_ptr: highest score of each GROUP groups, ``[Nq, groups / GROUP]``; written.
        T: length of a row of terms.
        V: size of the vocabulary.
        N: number of documents.
        Nq: number of queries.
        blocks: number of blocks.
        BLOCK: documents of a block.
        GROUP: documents of a group.
        BLOCK_T: terms whose weights are read at a time for the bound of the scores.
        TERMS: terms whose postings are added at a time.
        POSTINGS: postings of each of these terms that are added at a time.
        HAS_LENGTHS: whether rows of terms have different lengths.
        HAS_ALLOWED: whether some documents may not be returned.
        SHARED: whether the sums are in shared memory; otherwise they are in ``score``.
    """
    block = tl.program_id(0) // Nq
    query = (tl.program_id(0) % Nq).to(tl.int64)
    terms_ptr += query * T
    weights_ptr += query * T
    if HAS_LENGTHS:
        T = tl.load(lengths_ptr + query)
    # Step 1: the factor by which products are multiplied before they are rounded.
    exponent, length = _exponent(terms_ptr, weights_ptr, largest_ptr, T, V, BLOCK_T)
    # The exponent field of fp32 exceeds the exponent by 127. Scores are below 2^(exponent - 127),
    # and multiplied by the factor they are below 2^31, so its field is 31 + 127 + 127 - exponent.
    # The limits keep the factor and its inverse normal numbers.
    factor_exponent = tl.minimum(tl.maximum(285 - exponent, 1), 253)
    factor = (factor_exponent << 23).to(tl.float32, bitcast=True)
    # Step 2: clear the sums.
    index = tl.arange(0, BLOCK)
    document = block * BLOCK + index
    inside = document < N
    score_ptr += query * N
    if SHARED:
        base = _tile_address(BLOCK)
        _set(base + 4 * index, tl.zeros((BLOCK,), tl.int32))
    else:
        tl.store(score_ptr + document, tl.zeros((BLOCK,), tl.int32), mask=inside)
    tl.debug_barrier()
    # Step 3: add the postings of all terms.
    offsets_ptr += block.to(tl.int64) * V
    first = tl.load(offsets_ptr)  # first posting of the block, which has fewer than 2^31
    local_documents_ptr += first
    postings_ptr += first
    for t0 in range(0, length, TERMS):
        t = t0 + tl.arange(0, TERMS)
        term = tl.load(terms_ptr + t, mask=t < T, other=-1)
        weight = tl.load(weights_ptr + t, mask=t < T, other=0.0)
        is_term = (term >= 0) & (term < V) & (weight > 0.0)
        start = (tl.load(offsets_ptr + term, mask=is_term, other=first) - first).to(tl.int32)
        end = (tl.load(offsets_ptr + term + 1, mask=is_term, other=first) - first).to(tl.int32)
        for i0 in range(0, tl.max(end - start), POSTINGS):
            position = start[:, None] + (i0 + tl.arange(0, POSTINGS))[None, :]
            inside_list = position < end[:, None]
            local_document = (
                tl.load(local_documents_ptr + position, mask=inside_list, other=0)
                .to(tl.uint16, bitcast=True)
                .to(tl.int32)
            )
            product = weight[:, None] * tl.load(
                postings_ptr + position, mask=inside_list, other=0.0
            )
            units = (
                tl.maximum(product * factor + 0.5, 1.0).to(tl.uint32).to(tl.int32, bitcast=True)
            )  # truncated, since 0.5 was added
            if SHARED:
                _add(base + 4 * local_document, units, product)
            else:
                tl.atomic_add(
                    score_ptr + block * BLOCK + local_document,
                    units,
                    mask=product > 0.0,
                    sem="relaxed",
                )
    tl.debug_barrier()
    # Step 4: convert the sums back to scores, and store them and the highest of each group.
    if SHARED:
        total = _get(base + 4 * index)
    else:
        total = tl.load(score_ptr + document, mask=inside, other=0, cache_modifier=".cg")
    if HAS_ALLOWED:
        if SHARED:
            allowed = _bytes(allowed_ptr + document, inside)
        else:
            allowed = tl.load(allowed_ptr + document, mask=inside, other=0).to(tl.int32)
        total = tl.where(allowed != 0, total, 0)
    # Multiplied by the inverse of the factor, a normal number like the factor.
    score = total.to(tl.uint32, bitcast=True).to(tl.float32) * ((254 - factor_exponent) << 23).to(
        tl.float32,
        bitcast=True,
    )
    bits = score.to(tl.int32, bitcast=True)
    tl.store(score_ptr + document, bits, mask=inside)
    bits = tl.where(inside, bits, 0)
    group_best = tl.max(tl.reshape(bits, (BLOCK // GROUP, GROUP)), axis=1)
    first_group = (query * blocks + block) * (BLOCK // GROUP)
    tl.store(group_ptr + first_group + tl.arange(0, BLOCK // GROUP), group_best)
    high_best = tl.max(tl.reshape(group_best, (BLOCK // GROUP // GROUP, GROUP)), axis=1)
    tl.store(high_ptr + first_group // GROUP + tl.arange(0, BLOCK // GROUP // GROUP), high_best)


@triton.jit
def _values(ptr, member_ptr, i, count, n, GROUP: tl.constexpr):
    """Load entries of a row, or of some groups of a row.

    Args:
        ptr: bits of scores, ``[n]``.
        member_ptr: the groups, ``[count]``; not read if GROUP is 0.
        i: numbers of the entries, counted over these groups.
        count: number of these groups, or of entries if GROUP is 0.
        n: number of entries of the row.
        GROUP: entries of a group, or 0 for the row itself.

    Returns:
        The bits, 0 after the end, and the positions in the row.
    """
    if GROUP == 0:
        position = i
        exists = i < count
    else:
        exists = i < count * GROUP
        position = tl.load(member_ptr + i // GROUP, mask=exists, other=0) * GROUP + i % GROUP
        exists &= position < n
    return tl.load(ptr + position, mask=exists, other=0), position


# Subtracted from the bits of an fp32 number, which divides it by 4.
QUARTER = tl.constexpr(1 << 24)


@triton.jit
def _select_best(
    ptr,
    member_ptr,
    out_ptr,
    values_ptr,
    count,
    n,
    k,
    max_listed,
    bound,
    highest,
    GROUP: tl.constexpr,
    CHUNK: tl.constexpr,
    FITS: tl.constexpr,
):
    """List the positions of the ``k`` highest positive values, in rising order.

    A bisection finds a bound that ``k`` values reach. Up to ``max_listed`` values may be listed, so
    that it needs fewer steps. Among equal values the first are listed.

    Args:
        ptr: bits of scores, or of maxima of groups, ``[n]``.
        member_ptr: groups to search, ``[count]``; not read if GROUP is 0.
        out_ptr: listed positions, ``[max_listed]``; written.
        values_ptr: their values, ``[max_listed]``, or ``None``; written.
        count: number of groups to search, or of values if GROUP is 0.
        n: number of values.
        k: number of values to list.
        max_listed: largest number of values to list.
        bound: bits that ``k`` values reach, if GROUP is not 0.
        highest: bits of the highest value, if GROUP is not 0.
        GROUP: values of a group, or 0 to search all values.
        CHUNK: values that are in registers at a time.
        FITS: whether all values fit in one chunk.

    Returns:
        The number of listed positions, bits that ``k`` values reach (0 if there are fewer), and the
        bits of the highest value.
    """
    size = count if GROUP == 0 else count * GROUP
    entry = tl.arange(0, CHUNK)
    value, position = _values(ptr, member_ptr, entry, count, n, GROUP)
    if GROUP == 0:
        highest = tl.max(value)
        if not FITS:
            for i0 in range(CHUNK, size, CHUNK):
                chunk_values, _positions = _values(ptr, member_ptr, i0 + entry, count, n, GROUP)
                highest = tl.maximum(highest, tl.max(chunk_values))
        bound = highest * 0
    n_reached = 0
    upper = highest
    # Bits of positive numbers are in the order of the numbers, so integers are bisected. At least
    # `k` values reach `bound`, and fewer than `k` exceed `upper`.
    while (bound < upper) & ((n_reached < k) | (n_reached > max_listed)):
        middle = bound + (upper - bound) // 2
        is_first_step = (bound == 0) & (upper == highest)
        middle = tl.where(is_first_step, tl.maximum(highest - QUARTER, middle), middle) + 1
        n_reached = tl.sum((value >= middle).to(tl.int32))
        if not FITS:
            for i0 in range(CHUNK, size, CHUNK):
                chunk_values, _positions = _values(ptr, member_ptr, i0 + entry, count, n, GROUP)
                n_reached += tl.sum((chunk_values >= middle).to(tl.int32))
        bound = tl.where(n_reached >= k, middle, bound)
        upper = tl.where(n_reached >= k, upper, middle - 1)
    # More values than fit are equal to the bound: only the first of them are listed.
    splits_ties = (n_reached < k) | (n_reached > max_listed)
    ties = k  # values equal to the bound that are still to be listed
    if splits_ties:
        ties -= tl.sum((value > bound).to(tl.int32))
        if not FITS:
            for i0 in range(CHUNK, size, CHUNK):
                chunk_values, _positions = _values(ptr, member_ptr, i0 + entry, count, n, GROUP)
                ties -= tl.sum((chunk_values > bound).to(tl.int32))
    # List the selected positions, chunk by chunk.
    listed = 0
    for i0 in range(0, 1 if FITS else size, CHUNK):
        if not FITS:
            value, position = _values(ptr, member_ptr, i0 + entry, count, n, GROUP)
        selected = value >= bound
        if splits_ties:
            tie = ((value == bound) & (value > 0)).to(tl.int32)
            selected = (value > bound) | ((tie != 0) & (tl.cumsum(tie, 0) <= ties))
            ties -= tl.sum(tie)
        rank = listed + tl.cumsum(selected.to(tl.int32), 0) - 1
        tl.store(out_ptr + rank, position.to(out_ptr.dtype.element_ty), mask=selected)
        if values_ptr is not None:
            tl.store(values_ptr + rank, value, mask=selected)
        listed += tl.sum(selected.to(tl.int32))
    return listed, bound, highest


RANK_BLOCK = tl.constexpr(64)  # documents that are compared with as many others at a time


@triton.jit(do_not_specialize=["N", "blocks", "k", "max_listed"])
def best_kernel(
    score_ptr,
    group_ptr,
    high_ptr,
    member_ptr,
    listed_ptr,
    documents_ptr,
    values_ptr,
    N,
    blocks,
    k,
    max_listed,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    HIGH_CHUNK: tl.constexpr,
    HIGH_FITS: tl.constexpr,
    CHUNK: tl.constexpr,
    FITS: tl.constexpr,
):
    """Select the ``k`` documents with the highest positive scores of one query, best first.

    The best documents are in the ``k`` groups of documents with the highest maxima, the first
    groups among equal ones. The same holds for groups in groups of groups. So three searches
    suffice: for groups of groups, for groups in these, and for documents in those. At last the
    listed documents are sorted. Grid: ``[Nq]``.

    Args:
        score_ptr: bits of the scores, ``[Nq, N]``.
        group_ptr: highest score of each GROUP documents, ``[Nq, groups]``.
        high_ptr: highest score of each GROUP groups, ``[Nq, groups / GROUP]``.
        member_ptr: scratch for the three lists, ``[Nq, 3, max_listed]``.
        listed_ptr: scratch for the values of the last list, ``[Nq, max_listed]``.
        documents_ptr: documents ``[Nq, k]``, -1 after the last one; written.
        values_ptr: bits of their scores, ``[Nq, k]``, 0 after the last one; written.
        N: number of documents.
        blocks: number of blocks of documents.
        k: number of documents to return.
        max_listed: largest number of documents or groups to list.
        BLOCK: documents of a block.
        GROUP: documents of a group.
        HIGH_CHUNK, HIGH_FITS: CHUNK and FITS of the search for groups of groups.
        CHUNK: values that a search reads at a time.
        FITS: whether all values of a search fit in one chunk.
    """
    query = tl.program_id(0).to(tl.int64)
    groups = blocks * (BLOCK // GROUP)
    high_ptr += query * groups // GROUP
    member_ptr += 3 * query * max_listed
    listed_ptr += query * max_listed
    count, bound, highest = _select_best(
        high_ptr,
        None,
        member_ptr,
        None,
        groups // GROUP,
        0,
        k,
        max_listed,
        0,
        0,
        0,
        HIGH_CHUNK,
        HIGH_FITS,
    )
    tl.debug_barrier()
    count, bound, _ = _select_best(
        group_ptr + query * groups,
        member_ptr,
        member_ptr + max_listed,
        None,
        count,
        groups,
        k,
        max_listed,
        bound,
        highest,
        GROUP,
        CHUNK,
        FITS,
    )
    tl.debug_barrier()
    count, _, _ = _select_best(
        score_ptr + query * N,
        member_ptr + max_listed,
        member_ptr + 2 * max_listed,
        listed_ptr,
        count,
        N,
        k,
        max_listed,
        bound,
        highest,
        GROUP,
        CHUNK,
        FITS,
    )
    tl.debug_barrier()
    # The rank of a document is the number of better ones.
    for i0 in range(0, tl.maximum(k, count), RANK_BLOCK):
        i = i0 + tl.arange(0, RANK_BLOCK)
        value = tl.load(listed_ptr + i, mask=i < count, other=0)
        rank = tl.where(i < count, 0, i)
        for j0 in range(0, count, RANK_BLOCK):
            j = j0 + tl.arange(0, RANK_BLOCK)
            other_value = tl.load(listed_ptr + j, mask=j < count, other=-1)
            # Among equal scores, the document that was listed first is better.
            is_better = (other_value[None, :] == value[:, None]) & (j[None, :] < i[:, None])
            is_better |= other_value[None, :] > value[:, None]
            rank += tl.where(i < count, tl.sum(is_better.to(tl.int32), axis=1), 0)
        document = tl.load(member_ptr + 2 * max_listed + i, mask=i < count, other=-1)
        tl.store(documents_ptr + query * k + rank, document.to(tl.int64), mask=rank < k)
        tl.store(values_ptr + query * k + rank, value, mask=rank < k)
