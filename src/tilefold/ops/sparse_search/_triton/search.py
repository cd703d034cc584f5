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

    ``BLOCK`` is written out, since the text of the instruction must be constant.
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
def _set(at, value):
    """Write words of shared memory."""
    tl.inline_asm_elementwise(
        "st.shared.b32 [$1], $2; mov.u32 $0, 0;",
        "=r,r,r",
        [at, value],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _add(at, value, product):
    """Add values to words of shared memory where products are positive."""
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.gt.f32 p, $3, 0f00000000; @p red.shared.add.u32 [$1], $2; mov.u32 "
        "$0, 0; }",
        "=r,r,r,r",
        [at, value, product],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _get(at):
    """Read words of shared memory."""
    return tl.inline_asm_elementwise(
        "ld.shared.b32 $0, [$1];",
        "=r,r",
        [at],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _bytes(at, inside):
    """Load bytes, 0 where ``inside`` is false.

    Triton's load would exchange them between threads through as much shared memory as the sums
    take.
    """
    return tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $2, 0; mov.u32 $0, 0; @p ld.global.u8 $0, [$1]; }",
        "=r,l,r",
        [at.to(tl.int64, bitcast=True), inside.to(tl.int32)],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def _exponent(terms_ptr, weights_ptr, largest_ptr, T, V, BLOCK_T: tl.constexpr):
    """Bound the scores of a query.

    Returns the exponent field of the smallest power of two that is larger than any score, and the
    number of terms up to the last one with a positive weight.
    """
    bound = tl.zeros((BLOCK_T,), tl.float32)
    last = tl.zeros((BLOCK_T,), tl.int32)
    for t0 in range(0, T, BLOCK_T):
        t = t0 + tl.arange(0, BLOCK_T)
        weight = tl.maximum(tl.load(weights_ptr + t, mask=t < T, other=0.0), 0.0)
        term = tl.load(terms_ptr + t, mask=t < T, other=-1)
        bound += weight * tl.load(largest_ptr + term, mask=(term >= 0) & (term < V), other=0.0)
        last = tl.where(weight > 0.0, t + 1, last)
    return (tl.sum(bound).to(tl.int32, bitcast=True) >> 23) + 1, tl.max(last)


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

    Writes the terms and their positive weights, ``[Nq, V]``, of which only the first ones of a row
    are written, and how many these are, ``[Nq]``. That is -1 if a weight is negative, infinite or
    NaN.

    Grid: ``[Nq]``. ``queries``: ``[Nq, V]`` weights of all terms. ``term_order``: ``[V]`` terms.
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
    places_ptr,
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
    ROWS: tl.constexpr,
    WIDE: tl.constexpr,
    HAS_LENGTHS: tl.constexpr,
    HAS_ALLOWED: tl.constexpr,
    SHARED: tl.constexpr,
):
    """Compute the scores of one block of documents for one query.

    Writes the bits of the scores ``[Nq, N]``, the highest of each group of ``GROUP`` documents
    ``[Nq, groups]``, and the highest of each ``GROUP`` groups. ``ROWS`` terms at a time add
    ``WIDE`` postings each.

    Grid: ``[blocks * Nq]``. ``terms``, ``weights``: ``[Nq, T]``. ``lengths``: ``[Nq]``, how many
    entries of a row are read; all without ``HAS_LENGTHS``. ``offsets``, ``places``, ``postings``,
    ``largest``: see ``BlockedPostings``. ``allowed``: ``[N]``.
    """
    block = tl.program_id(0) // Nq
    query = (tl.program_id(0) % Nq).to(tl.int64)
    terms_ptr += query * T
    weights_ptr += query * T
    if HAS_LENGTHS:
        T = tl.load(lengths_ptr + query)
    exponent, length = _exponent(terms_ptr, weights_ptr, largest_ptr, T, V, BLOCK_T)
    up = tl.minimum(tl.maximum(285 - exponent, 1), 253)
    factor = (up << 23).to(tl.float32, bitcast=True)
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
    offsets_ptr += block.to(tl.int64) * V
    first = tl.load(offsets_ptr)  # first posting of the block, which has fewer than 2^31
    places_ptr += first
    postings_ptr += first
    for t0 in range(0, length, ROWS):
        t = t0 + tl.arange(0, ROWS)
        term = tl.load(terms_ptr + t, mask=t < T, other=-1)
        weight = tl.load(weights_ptr + t, mask=t < T, other=0.0)
        is_term = (term >= 0) & (term < V) & (weight > 0.0)
        start = (tl.load(offsets_ptr + term, mask=is_term, other=first) - first).to(tl.int32)
        end = (tl.load(offsets_ptr + term + 1, mask=is_term, other=first) - first).to(tl.int32)
        for i0 in range(0, tl.max(end - start), WIDE):
            at = start[:, None] + (i0 + tl.arange(0, WIDE))[None, :]
            inside_list = at < end[:, None]
            where = (
                tl.load(places_ptr + at, mask=inside_list, other=0)
                .to(tl.uint16, bitcast=True)
                .to(tl.int32)
            )
            product = weight[:, None] * tl.load(postings_ptr + at, mask=inside_list, other=0.0)
            units = (
                tl.maximum(product * factor + 0.5, 1.0).to(tl.uint32).to(tl.int32, bitcast=True)
            )  # truncated, since 0.5 was added
            if SHARED:
                _add(base + 4 * where, units, product)
            else:
                tl.atomic_add(
                    score_ptr + block * BLOCK + where,
                    units,
                    mask=product > 0.0,
                    sem="relaxed",
                )
    tl.debug_barrier()
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
    score = total.to(tl.uint32, bitcast=True).to(tl.float32) * ((254 - up) << 23).to(
        tl.float32,
        bitcast=True,
    )
    bits = score.to(tl.int32, bitcast=True)
    tl.store(score_ptr + document, bits, mask=inside)
    bits = tl.where(inside, bits, 0)
    best = tl.max(tl.reshape(bits, (BLOCK // GROUP, GROUP)), axis=1)
    listed = (query * blocks + block) * (BLOCK // GROUP)
    tl.store(group_ptr + listed + tl.arange(0, BLOCK // GROUP), best)
    higher = tl.max(tl.reshape(best, (BLOCK // GROUP // GROUP, GROUP)), axis=1)
    tl.store(high_ptr + listed // GROUP + tl.arange(0, BLOCK // GROUP // GROUP), higher)


@triton.jit
def _values(ptr, member_ptr, i, count, n, GROUP: tl.constexpr):
    """Load entries of a row, or of the groups of it that are listed.

    Args:
        ptr: ``[n]`` bits of scores.
        member_ptr: ``[count]`` listed groups; not read if ``GROUP`` is 0.
        i: numbers of the entries, counted over the listed groups.
        count: number of listed groups, or of entries if ``GROUP`` is 0.
        n: number of entries of the row.
        GROUP: entries of a group, or 0 for the row itself.

    Returns the bits, 0 past the end, and the positions in the row.
    """
    if GROUP == 0:
        position = i
        exists = i < count
    else:
        exists = i < count * GROUP
        position = tl.load(member_ptr + i // GROUP, mask=exists, other=0) * GROUP + i % GROUP
        exists &= position < n
    return tl.load(ptr + position, mask=exists, other=0), position


NEAR = tl.constexpr(1 << 24)  # subtracted from bits: a quarter of the highest score is tried first


@triton.jit
def _best(
    ptr,
    member_ptr,
    out_ptr,
    values_ptr,
    count,
    n,
    k,
    most,
    bound,
    top,
    GROUP: tl.constexpr,
    CHUNK: tl.constexpr,
    ONE: tl.constexpr,
):
    """List the positions of the ``k`` highest positive values, in rising order.

    Up to ``most`` may be listed, if that takes fewer steps. Among equal values the first are
    listed. A bisection finds a bound that ``k`` values reach.

    Args:
        ptr: ``[n]`` bits of scores, or of maxima of groups.
        member_ptr: ``[count]`` groups to search; not read if ``GROUP`` is 0.
        out_ptr: ``[most]`` listed positions.
        values_ptr: ``[most]`` their values, or ``None``.
        count: number of groups to search, or of values if ``GROUP`` is 0.
        n: number of values.
        k: number of values to list.
        most: largest number of values to list.
        bound: bits that ``k`` values reach, if ``GROUP`` is not 0.
        top: bits of the highest value, if ``GROUP`` is not 0.
        GROUP: values of a group, or 0 to search all values.
        CHUNK: values that are held at a time.
        ONE: whether all values are held.

    Returns the number of listed positions, bits that ``k`` values reach (0 if there are fewer), and
    the bits of the highest value.
    """
    size = count if GROUP == 0 else count * GROUP
    lane = tl.arange(0, CHUNK)
    value, position = _values(ptr, member_ptr, lane, count, n, GROUP)
    if GROUP == 0:
        top = tl.max(value)
        if not ONE:
            for i0 in range(CHUNK, size, CHUNK):
                other, _place = _values(ptr, member_ptr, i0 + lane, count, n, GROUP)
                top = tl.maximum(top, tl.max(other))
        bound = top * 0
    reach = 0
    high = top
    while (bound < high) & ((reach < k) | (reach > most)):  # halves the interval
        tried = bound + (high - bound) // 2
        tried = tl.where((bound == 0) & (high == top), tl.maximum(top - NEAR, tried), tried) + 1
        reach = tl.sum((value >= tried).to(tl.int32))
        if not ONE:
            for i0 in range(CHUNK, size, CHUNK):
                other, _place = _values(ptr, member_ptr, i0 + lane, count, n, GROUP)
                reach += tl.sum((other >= tried).to(tl.int32))
        bound = tl.where(reach >= k, tried, bound)
        high = tl.where(reach >= k, high, tried - 1)
    ties = k  # values equal to the bound that are still to be listed
    apart = (reach < k) | (reach > most)
    if apart:
        ties -= tl.sum((value > bound).to(tl.int32))
        if not ONE:
            for i0 in range(CHUNK, size, CHUNK):
                other, _place = _values(ptr, member_ptr, i0 + lane, count, n, GROUP)
                ties -= tl.sum((other > bound).to(tl.int32))
    listed = 0
    for i0 in range(0, 1 if ONE else size, CHUNK):
        if not ONE:
            value, position = _values(ptr, member_ptr, i0 + lane, count, n, GROUP)
        selected = value >= bound
        if apart:
            tie = ((value == bound) & (value > 0)).to(tl.int32)
            selected = (value > bound) | ((tie != 0) & (tl.cumsum(tie, 0) <= ties))
            ties -= tl.sum(tie)
        rank = listed + tl.cumsum(selected.to(tl.int32), 0) - 1
        tl.store(out_ptr + rank, position.to(out_ptr.dtype.element_ty), mask=selected)
        if values_ptr is not None:
            tl.store(values_ptr + rank, value, mask=selected)
        listed += tl.sum(selected.to(tl.int32))
    return listed, bound, top


RANKED = tl.constexpr(64)


@triton.jit(do_not_specialize=["N", "blocks", "k", "most"])
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
    most,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    FIRST: tl.constexpr,
    ONE_FIRST: tl.constexpr,
    CHUNK: tl.constexpr,
    ONE: tl.constexpr,
):
    """Select the ``k`` documents with the highest positive scores of one query, best first.

    They are in the ``k`` groups of documents whose highest scores are the highest, the first groups
    among equal ones. The same holds for groups in groups of groups. So three searches suffice: for
    groups of groups, for groups, and for documents. Each may list up to ``most``, with fewer steps.
    At last the listed documents are sorted.

    Writes ``[Nq, k]`` documents and bits of scores, -1 and 0 after the last one. Grid: ``[Nq]``.
    ``score``, ``group`` and ``high``: what ``block_scores_kernel`` writes. ``member``:
    ``[Nq, 3, most]`` scratch for the lists. ``listed``: ``[Nq, most]`` scratch for values.
    """
    query = tl.program_id(0).to(tl.int64)
    groups = blocks * (BLOCK // GROUP)
    high_ptr += query * groups // GROUP
    member_ptr += 3 * query * most
    listed_ptr += query * most
    count, bound, top = _best(
        high_ptr,
        None,
        member_ptr,
        None,
        groups // GROUP,
        0,
        k,
        most,
        0,
        0,
        0,
        FIRST,
        ONE_FIRST,
    )
    tl.debug_barrier()
    count, bound, _ = _best(
        group_ptr + query * groups,
        member_ptr,
        member_ptr + most,
        None,
        count,
        groups,
        k,
        most,
        bound,
        top,
        GROUP,
        CHUNK,
        ONE,
    )
    tl.debug_barrier()
    count, _, _ = _best(
        score_ptr + query * N,
        member_ptr + most,
        member_ptr + 2 * most,
        listed_ptr,
        count,
        N,
        k,
        most,
        bound,
        top,
        GROUP,
        CHUNK,
        ONE,
    )
    tl.debug_barrier()
    for i0 in range(0, tl.maximum(k, count), RANKED):
        i = i0 + tl.arange(0, RANKED)
        value = tl.load(listed_ptr + i, mask=i < count, other=0)
        rank = tl.where(i < count, 0, i)
        for j0 in range(0, count, RANKED):
            j = j0 + tl.arange(0, RANKED)
            other = tl.load(listed_ptr + j, mask=j < count, other=-1)
            before = (other[None, :] == value[:, None]) & (
                j[None, :] < i[:, None]
            )  # equal ones that were listed
            before |= other[None, :] > value[:, None]
            rank += tl.where(i < count, tl.sum(before.to(tl.int32), axis=1), 0)
        document = tl.load(member_ptr + 2 * most + i, mask=i < count, other=-1)
        tl.store(documents_ptr + query * k + rank, document.to(tl.int64), mask=rank < k)
        tl.store(values_ptr + query * k + rank, value, mask=rank < k)
