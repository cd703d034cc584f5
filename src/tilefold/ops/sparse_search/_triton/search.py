"""Kernels of exact search over sparse vectors: scores of a block of documents, and the best of each
query.

A program adds the postings of a query in one block of documents, in integers, in shared memory:
additions of integers give the same sum in any order. Shared memory that Triton does not know of is
declared, written and read by lines of PTX; where kernels are interpreted, the sums are atomic
additions to the scores' own memory, which give the same bits.
"""

import triton
import triton.language as tl


@triton.jit
def _tile_address(BLOCK: tl.constexpr):
    """Address of ``BLOCK`` words of shared memory; written out, since the text of the instruction
    must be constant.
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
    """Add values where products are positive."""
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.gt.f32 p, $3, 0f00000000; @p red.shared.add.u32 [$1], $2; mov.u32 $0, 0; }",
        "=r,r,r,r",
        [at, value, product],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _get(at):
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
    """Bytes, 0 outside: Triton's own load passes them from thread to thread, by as much shared
    memory as sums take.
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
    """Exponent field of the least power of two that is larger than any score of a query with these
    terms, and where its last positive weight ends.
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


@triton.jit(do_not_specialize=["T", "V", "N", "Nq", "blocks"])
def block_scores_kernel(
    terms_ptr,
    weights_ptr,
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
    HAS_ALLOWED: tl.constexpr,
    SHARED: tl.constexpr,
):
    """Bits of the scores ``[Nq, N]`` of one block for one query, and the highest of each group of
    documents and of each group of groups. ``ROWS`` terms at a time add ``WIDE`` postings each.
    """
    block = tl.program_id(0) // Nq
    query = (tl.program_id(0) % Nq).to(tl.int64)
    terms_ptr += query * T
    weights_ptr += query * T
    exponent, length = _exponent(terms_ptr, weights_ptr, largest_ptr, T, V, BLOCK_T)
    up = tl.minimum(tl.maximum(285 - exponent, 1), 253)
    factor = (up << 23).to(tl.float32, bitcast=True)
    place = tl.arange(0, BLOCK)
    document = block * BLOCK + place
    inside = document < N
    score_ptr += query * N
    if SHARED:
        base = _tile_address(BLOCK)
        _set(base + 4 * place, tl.zeros((BLOCK,), tl.int32))
    else:
        tl.store(score_ptr + document, tl.zeros((BLOCK,), tl.int32), mask=inside)
    tl.debug_barrier()
    offsets_ptr += block.to(tl.int64) * V
    first = tl.load(offsets_ptr)  # of the block, whose postings are fewer than 2^31
    places_ptr += first
    postings_ptr += first
    for t0 in range(0, length, ROWS):
        t = t0 + tl.arange(0, ROWS)
        term = tl.load(terms_ptr + t, mask=t < T, other=-1)
        weight = tl.load(weights_ptr + t, mask=t < T, other=0.0)
        there = (term >= 0) & (term < V) & (weight > 0.0)
        start = (tl.load(offsets_ptr + term, mask=there, other=first) - first).to(tl.int32)
        end = (tl.load(offsets_ptr + term + 1, mask=there, other=first) - first).to(tl.int32)
        for i0 in range(0, tl.max(end - start), WIDE):
            at = start[:, None] + (i0 + tl.arange(0, WIDE))[None, :]
            inside_list = at < end[:, None]
            where = (
                tl.load(places_ptr + at, mask=inside_list, other=0)
                .to(tl.uint16, bitcast=True)
                .to(tl.int32)
            )
            product = weight[:, None] * tl.load(postings_ptr + at, mask=inside_list, other=0.0)
            whole = (
                tl.maximum(product * factor + 0.5, 1.0).to(tl.uint32).to(tl.int32, bitcast=True)
            )  # cut, not rounded
            if SHARED:
                _add(base + 4 * where, whole, product)
            else:
                tl.atomic_add(
                    score_ptr + block * BLOCK + where,
                    whole,
                    mask=product > 0.0,
                    sem="relaxed",
                )
    tl.debug_barrier()
    if SHARED:
        total = _get(base + 4 * place)
    else:
        total = tl.load(score_ptr + document, mask=inside, other=0, cache_modifier=".cg")
    if HAS_ALLOWED:
        if SHARED:
            allowed = _bytes(allowed_ptr + document, inside)
        else:
            allowed = tl.load(allowed_ptr + document, mask=inside, other=0).to(tl.int32)
        total = tl.where(allowed != 0, total, 0)
    # two factors, of which neither leaves the numbers of fp32
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
    """Bits of entries ``i`` of ``count``, and where they come from: by place, or of the groups that
    are listed.
    """
    if GROUP == 0:
        place = i
        known = i < count
    else:
        known = i < count * GROUP
        place = tl.load(member_ptr + i // GROUP, mask=known, other=0) * GROUP + i % GROUP
        known &= place < n
    return tl.load(ptr + place, mask=known, other=0), place


NEAR = tl.constexpr(1 << 24)  # bits of numbers: a fourth of the highest is tried first


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
    """List the places of the ``k`` highest positive values, or of up to ``most``, rising, the first
    of equal ones; how many, a number that ``k`` values reach (0, if there are fewer), and the
    highest. The last two are given where known.
    """
    size = count if GROUP == 0 else count * GROUP
    lane = tl.arange(0, CHUNK)
    value, place = _values(ptr, member_ptr, lane, count, n, GROUP)
    if GROUP == 0:
        top = tl.max(value)
        if not ONE:
            for i0 in range(CHUNK, size, CHUNK):
                other, _place = _values(ptr, member_ptr, i0 + lane, count, n, GROUP)
                top = tl.maximum(top, tl.max(other))
        bound = top * 0
    reach = 0
    high = top
    while (bound < high) & ((reach < k) | (reach > most)):  # halves what is left
        tried = bound + (high - bound) // 2
        tried = tl.where((bound == 0) & (high == top), tl.maximum(top - NEAR, tried), tried) + 1
        reach = tl.sum((value >= tried).to(tl.int32))
        if not ONE:
            for i0 in range(CHUNK, size, CHUNK):
                other, _place = _values(ptr, member_ptr, i0 + lane, count, n, GROUP)
                reach += tl.sum((other >= tried).to(tl.int32))
        bound = tl.where(reach >= k, tried, bound)
        high = tl.where(reach >= k, high, tried - 1)
    ties = k  # that are still wanted
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
            value, place = _values(ptr, member_ptr, i0 + lane, count, n, GROUP)
        taken = value >= bound
        if apart:
            tie = ((value == bound) & (value > 0)).to(tl.int32)
            taken = (value > bound) | ((tie != 0) & (tl.cumsum(tie, 0) <= ties))
            ties -= tl.sum(tie)
        rank = listed + tl.cumsum(taken.to(tl.int32), 0) - 1
        tl.store(out_ptr + rank, place.to(out_ptr.dtype.element_ty), mask=taken)
        if values_ptr is not None:
            tl.store(values_ptr + rank, value, mask=taken)
        listed += tl.sum(taken.to(tl.int32))
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
    """Documents ``[Nq, k]`` with the highest positive scores of each query and their bits, best
    first; -1 and 0 behind.

    They lie in the ``k`` groups with the highest best document, the first ones where those are
    equal; likewise groups. Up to ``most`` are as good, and found with fewer steps, since all that
    were found are put in order.
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
