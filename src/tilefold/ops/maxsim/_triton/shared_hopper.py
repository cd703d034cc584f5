"""Scores of short queries against padded int8 documents for compute capability 9.0: warps with
roles, in Gluon.

A tile is 2 tokens of each of 32 documents, so that documents of any length lie close in it: what a
box of a descriptor reads past a document's end is zeros. Its rows are in the order in which warps
hold products: 8 documents to a warp, one to four lanes, and both tokens in a lane. So the maximum
over a document stays in registers until the document ends, and queries lie on the columns, one
after the other. A warp loads tiles ahead, another one their scales; four groups of four warps
multiply, each by queries of its own or, for few queries, in documents of its own.

Products are not converted: ``z + n`` as bits, with ``z`` those of 64, are ``64 + n / 2^17`` for ``n
>= 0``, and ``64 + n / 2^18`` below, in the order of ``n``. One multiply-add with ``-64 s`` gives
``s n / 2^17``, rounded once. The sum is a product by ``one``, which the compiler does not know:
maxima and sums of integers share half of the lanes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tilefold.ops._shared._triton.activation import nan_max
from tilefold.ops._shared._triton.releases import gluon_barrier, gluon_reinterpret, gluon_tma_load
from tilefold.ops.maxsim._triton.device import SIZES

GROUP, AT_ONCE = gl.constexpr(32), gl.constexpr(2)  # documents of a tile, and tokens of each
BOXES, BOX = (
    gl.constexpr(4),
    gl.constexpr(8),
)  # of a tile, one for each warp, and the documents of one
ROWS, RUN = gl.constexpr(64), gl.constexpr(4)  # of a tile; tiles of a part, one after the other
DIM = gl.constexpr(128)
ZERO, UNIT = gl.constexpr(0x42800000), gl.constexpr(131072.0)  # bits of 64; 2^17
_tma_load, _barrier, _reinterpret = gluon_tma_load(), gluon_barrier(), gluon_reinterpret()


@gluon.jit
def _place(step, length_d, PARTS: gl.constexpr):
    """Return the first document and token of a tile; the parts alternate after ``RUN`` tiles."""
    tiles = gl.cdiv(length_d, AT_ONCE)
    own = step // (RUN * PARTS) * RUN + step % RUN
    group = own // tiles * PARTS + step // RUN % PARTS
    return (gl.program_id(1) + group * gl.num_programs(1)) * GROUP, own % tiles * AT_ONCE


@gluon.jit
def _load_documents(
    documents_src,
    ring,
    full,
    empty,
    length_d,
    steps,
    PARTS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Run the loading warp: fill the ring with the tiles of all parts."""
    for step in range(steps):
        slot = step % STAGES
        d, t0 = _place(step, length_d, PARTS)
        mbarrier.wait(empty.index(slot), ((step // STAGES) & 1) ^ 1)
        mbarrier.expect(full.index(slot), ROWS * DIM)
        for box in gl.static_range(BOXES):
            _tma_load(
                documents_src,
                [t0, d + box * BOX, 0],
                full.index(slot),
                ring.index(slot * BOXES + box),
            )


@gluon.jit
def _scales(
    scale_ptr,
    mask_ptr,
    step,
    Nd,
    length_d,
    PARTS: gl.constexpr,
    HAS_DMASK: gl.constexpr,
    MASK_ZERO: gl.constexpr,
):
    """Load the scales ``[GROUP, AT_ONCE]`` of a tile.

    Returns:
        The scales, and 0 or, for tokens that do not take part, minus infinity.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, AT_ONCE], [32, 1], [1, 1], [1, 0])
    d, t0 = _place(step, length_d, PARTS)
    document = gl.expand_dims(d + gl.arange(0, GROUP, layout=gl.SliceLayout(1, layout)), 1)
    token = gl.expand_dims(t0 + gl.arange(0, AT_ONCE, layout=gl.SliceLayout(0, layout)), 0)
    there = (document < Nd) & (token < length_d)
    at = document.to(gl.int64) * length_d + token
    scale = gl.load(scale_ptr + at, mask=there, other=0.0)
    if HAS_DMASK:
        kept = gl.load(mask_ptr + at, mask=there, other=0) != 0
        scale = gl.where(kept, scale, 0.0)
        if not MASK_ZERO:
            there = there & kept
    return scale, gl.where(there, 0.0, float("-inf"))


@gluon.jit
def _in_rows(x):
    """Reorder values of each document and token of a tile to the order of its rows."""
    return x.reshape([BOXES, BOX, AT_ONCE]).permute((0, 2, 1)).reshape([ROWS])


@gluon.jit
def _put(
    step,
    scale,
    out,
    given,
    PARTS: gl.constexpr,
    STAGES: gl.constexpr,
    HAS_DMASK: gl.constexpr,
    MASK_ZERO: gl.constexpr,
):
    """Put the scales of a tile into the ring, and load those of the tile of the next run."""
    scales, shifts, full, empty, scale_ptr, mask_ptr, Nd, length_d = given
    slot = step % STAGES
    mbarrier.wait(empty.index(slot), ((step // STAGES) & 1) ^ 1)
    scales.index(slot).store(_in_rows(scale))
    shifts.index(slot).store(_in_rows(scale * -64.0 + out))
    _barrier()
    mbarrier.arrive(full.index(slot))
    return _scales(scale_ptr, mask_ptr, step + RUN, Nd, length_d, PARTS, HAS_DMASK, MASK_ZERO)


@gluon.jit
def _load_scales(
    scales,
    shifts,
    full,
    empty,
    scale_ptr,
    mask_ptr,
    Nd,
    length_d,
    steps,
    PARTS: gl.constexpr,
    STAGES: gl.constexpr,
    HAS_DMASK: gl.constexpr,
    MASK_ZERO: gl.constexpr,
):
    """Run the warp of the scales: load them a run ahead, and put them into the ring.

    A round is a run of ``RUN`` tiles, whose scales have variables of their own and are not moved.
    """
    a, a_out = _scales(scale_ptr, mask_ptr, 0, Nd, length_d, PARTS, HAS_DMASK, MASK_ZERO)
    b, b_out = _scales(scale_ptr, mask_ptr, 1, Nd, length_d, PARTS, HAS_DMASK, MASK_ZERO)
    c, c_out = _scales(scale_ptr, mask_ptr, 2, Nd, length_d, PARTS, HAS_DMASK, MASK_ZERO)
    e, e_out = _scales(scale_ptr, mask_ptr, 3, Nd, length_d, PARTS, HAS_DMASK, MASK_ZERO)
    given = scales, shifts, full, empty, scale_ptr, mask_ptr, Nd, length_d
    for step in range(0, steps, RUN):
        a, a_out = _put(step, a, a_out, given, PARTS, STAGES, HAS_DMASK, MASK_ZERO)
        b, b_out = _put(step + 1, b, b_out, given, PARTS, STAGES, HAS_DMASK, MASK_ZERO)
        c, c_out = _put(step + 2, c, c_out, given, PARTS, STAGES, HAS_DMASK, MASK_ZERO)
        e, e_out = _put(step + 3, e, e_out, given, PARTS, STAGES, HAS_DMASK, MASK_ZERO)


@gluon.jit
def _by_documents(x):
    """Return the maxima of the two tokens that a lane has of each document.

    The result is ``[BOXES, BOX, columns]``.
    """
    return gl.reduce(x.reshape([BOXES, AT_ONCE, BOX, x.shape[1]]), 1, nan_max)


@gluon.jit
def _tile_best(
    q,
    rows,
    scales,
    shifts,
    full,
    empty,
    step,
    one,
    layout: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Multiply a tile with the queries, and return its maxima by documents."""
    slot = step % STAGES
    COLUMNS: gl.constexpr = q.shape[1]
    mbarrier.wait(full.index(slot), (step // STAGES) & 1)
    acc = gl.zeros([ROWS, COLUMNS], gl.int32, layout=layout)
    acc = warpgroup_mma(rows.index(slot), q, acc, use_acc=False, is_async=True)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    scale = scales.index(slot).load(gl.SliceLayout(1, layout))
    shift = shifts.index(slot).load(gl.SliceLayout(1, layout))
    mbarrier.arrive(empty.index(slot))
    x = (acc * one + ZERO).to(gl.float32, bitcast=True)
    nothing = gl.zeros_like(x)
    return _by_documents(
        gl.fma(x, gl.expand_dims(scale, 1) + nothing, gl.expand_dims(shift, 1) + nothing),
    )


@gluon.jit
def _finish(
    best,
    d,
    weights,
    scores_ptr,
    first,
    Nq,
    Nd,
    divisor,
    SLOT: gl.constexpr,
    HAS_QMASK: gl.constexpr,
    HAS_DMASK: gl.constexpr,
    MEAN: gl.constexpr,
):
    """Store the scores of the documents of a tile with the queries of a group of warps.

    ``best``: maxima ``[BOXES, BOX, columns]`` over all tokens of the documents.
    """
    COLUMNS: gl.constexpr = best.shape[2]
    top = best.reshape([GROUP, COLUMNS])
    weight = gl.expand_dims(weights.load(gl.SliceLayout(0, top.type.layout)), 0)
    value = (
        (top + gl.minimum(top, 0.0)) * UNIT * weight
    )  # a NaN beside the queries' tokens is one of its document
    if HAS_QMASK:
        value = gl.where(weight == -1.0, 0.0, value)
    if HAS_DMASK:
        value = gl.where(top == float("-inf"), 0.0, value)
    total = gl.sum(value.reshape([GROUP, COLUMNS // SLOT, SLOT]), axis=2)
    if MEAN:
        total = total / divisor
    document = gl.expand_dims(
        d + gl.arange(0, GROUP, layout=gl.SliceLayout(1, total.type.layout)),
        1,
    )
    query = gl.expand_dims(
        first + gl.arange(0, COLUMNS // SLOT, layout=gl.SliceLayout(0, total.type.layout)),
        0,
    )
    gl.store(
        scores_ptr + query.to(gl.int64) * Nd + document,
        total,
        mask=(query < Nq) & (document < Nd),
    )


@gluon.jit
def _score(
    given,
    PARTS: gl.constexpr,
    STAGES: gl.constexpr,
    SLOT: gl.constexpr,
    HAS_QMASK: gl.constexpr,
    HAS_DMASK: gl.constexpr,
    MEAN: gl.constexpr,
    ROLE: gl.constexpr,
):
    """Run one group of four warps: products and maxima of its queries with its documents.

    ``ROLE``: number of the group. It has share ``ROLE % SHARES`` of the queries, and part ``ROLE //
    SHARES`` of the documents.
    """
    (
        queries,
        weights,
        ring,
        scales,
        shifts,
        full,
        empty,
        scores_ptr,
        Nq,
        Nd,
        length_d,
        steps,
        divisor,
        one,
    ) = given
    SHARES: gl.constexpr = queries.shape[0]
    COLUMNS: gl.constexpr = queries.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 32])
    tiles: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    rows = _reinterpret(ring, gl.int8, [STAGES, ROWS, DIM], tiles)
    q, weight = queries.index(ROLE % SHARES).permute((1, 0)), weights.index(ROLE % SHARES)
    first = (gl.program_id(0) * SHARES + ROLE % SHARES) * (COLUMNS // SLOT)
    lowest = _by_documents(gl.full([ROWS, COLUMNS], float("-inf"), gl.float32, layout=layout))
    best = lowest
    t0 = 0
    d = (gl.program_id(1) + ROLE // SHARES * gl.num_programs(1)) * GROUP
    for own in range(steps // PARTS):
        step = (own // RUN * PARTS + ROLE // SHARES) * RUN + own % RUN
        best = nan_max(
            best,
            _tile_best(q, rows, scales, shifts, full, empty, step, one, layout, STAGES),
        )
        t0 += AT_ONCE
        if t0 >= length_d:
            _finish(
                best,
                d,
                weight,
                scores_ptr,
                first,
                Nq,
                Nd,
                divisor,
                SLOT,
                HAS_QMASK,
                HAS_DMASK,
                MEAN,
            )
            best = lowest
            d += PARTS * gl.num_programs(1) * GROUP
            t0 = 0


@gluon.jit(do_not_specialize=SIZES)
def shared_hopper_kernel(
    queries_ptr,
    documents_src,
    query_mask_ptr,
    document_mask_ptr,
    query_factors_ptr,
    document_factors_ptr,
    scores_ptr,
    Nq,
    Nd,
    length_q,
    length_d,
    divisor,
    one,
    D: gl.constexpr,
    BLOCK_Q: gl.constexpr,
    SLOT: gl.constexpr,
    PARTS: gl.constexpr,
    STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,
    HAS_QMASK: gl.constexpr,
    HAS_DMASK: gl.constexpr,
    MASK_ZERO: gl.constexpr,
    MEAN: gl.constexpr,
):
    """Compute the scores of short queries with padded int8 documents.

    Grid: ``[query tiles, splits]``; a program has ``BLOCK_Q`` rows of queries and every
    ``splits``-th group of 32 documents. Four groups of warps multiply, each with one of ``4 /
    PARTS`` shares of the queries and one of ``PARTS`` parts of the documents. ``queries``: int8
    ``[Nq * length_q, D]``. ``documents_src``: descriptor of int8 ``[Nd, length_d, D]``.
    ``query_factors``, ``document_factors``: scales ``[Nq * length_q]`` and ``[Nd * length_d]``.
    ``one``: 1, unknown to the compiler. Writes ``scores`` ``[Nq, Nd]``.
    """
    SHARES: gl.constexpr = 4 // PARTS
    COLUMNS: gl.constexpr = BLOCK_Q // SHARES
    gl.static_assert(
        STAGES % (RUN * PARTS) == 0,
    )  # a place of the ring is one part's, whose waits know two phases
    swizzled: gl.constexpr = gl.NVMMASharedLayout(
        swizzle_byte_width=128,
        element_bitwidth=8,
        rank=2,
    )
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    queries = gl.allocate_shared_memory(gl.int8, [SHARES, COLUMNS, DIM], swizzled)
    weights = gl.allocate_shared_memory(gl.float32, [SHARES, COLUMNS], plain)
    ring = gl.allocate_shared_memory(
        gl.int8,
        [STAGES * BOXES, AT_ONCE, BOX, DIM],
        documents_src.layout,
    )
    scales = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], plain)
    shifts = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], plain)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=2)
        mbarrier.init(empty.index(i), count=SHARES)
    by_rows: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
    r = gl.arange(0, COLUMNS, layout=gl.SliceLayout(1, by_rows))
    k = gl.expand_dims(gl.arange(0, DIM, layout=gl.SliceLayout(0, by_rows)), 0)
    for share in gl.static_range(SHARES):
        query = (gl.program_id(0) * SHARES + share) * (COLUMNS // SLOT) + r // SLOT
        token = r % SLOT
        there, row = (query < Nq) & (token < length_q), query * length_q + token
        weight = gl.load(query_factors_ptr + row, mask=there, other=0.0)
        if HAS_QMASK:  # what is left out has a scale that no row has
            weight = gl.where(gl.load(query_mask_ptr + row, mask=there, other=0) != 0, weight, -1.0)
        weights.index(share).store(weight)
        kept, row = gl.expand_dims(there, 1) & (k < D), gl.expand_dims(row.to(gl.int64), 1)
        queries.index(share).store(gl.load(queries_ptr + row * D + k, mask=kept, other=0))
    fence_async_shared()
    _barrier()
    groups = gl.cdiv(gl.cdiv(Nd, GROUP) - gl.program_id(1), gl.num_programs(1))
    # whole runs of each part: tiles past the last document's are zeros, and not stored
    steps = gl.cdiv(gl.cdiv(groups, PARTS) * gl.cdiv(length_d, AT_ONCE), RUN) * RUN * PARTS
    given = (
        queries,
        weights,
        ring,
        scales,
        shifts,
        full,
        empty,
        scores_ptr,
        Nq,
        Nd,
        length_d,
        steps,
        divisor,
        one,
    )
    gl.warp_specialize(
        [
            (_score, (given, PARTS, STAGES, SLOT, HAS_QMASK, HAS_DMASK, MEAN, 0)),
            (_score, (given, PARTS, STAGES, SLOT, HAS_QMASK, HAS_DMASK, MEAN, 1)),
            (_score, (given, PARTS, STAGES, SLOT, HAS_QMASK, HAS_DMASK, MEAN, 2)),
            (_score, (given, PARTS, STAGES, SLOT, HAS_QMASK, HAS_DMASK, MEAN, 3)),
            (_load_documents, (documents_src, ring, full, empty, length_d, steps, PARTS, STAGES)),
            (
                _load_scales,
                (
                    scales,
                    shifts,
                    full,
                    empty,
                    document_factors_ptr,
                    document_mask_ptr,
                    Nd,
                    length_d,
                    steps,
                    PARTS,
                    STAGES,
                    HAS_DMASK,
                    MASK_ZERO,
                ),
            ),
        ],
        [4, 4, 4, 1, 1],
        [REGISTERS, REGISTERS, REGISTERS, 32, 32],
    )


@functools.cache
def padded_descriptor(length: int) -> Callable[..., TensorDescriptor]:
    """TMA descriptors of tiles of padded documents of ``length`` tokens, by the shape and strides
    of their rows.
    """
    box = [AT_ONCE.value, BOX.value, DIM.value]
    layout = gl.NVMMASharedLayout.get_default_for(box, gl.int8)

    def make(rows: Any, shape: list[int], strides: list[int]) -> TensorDescriptor:
        padded = (
            [length, shape[0] // length, shape[1]],
            [strides[0], length * strides[0], strides[1]],
        )
        return TensorDescriptor(rows, *padded, block_shape=box, layout=layout)

    return make
