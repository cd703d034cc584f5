"""Scores of short queries against padded int8 documents for compute capability 9.0: warps with
roles, in Gluon.

A tile has 64 rows: ``GROUP`` documents, and as many tokens of each as fit. It is loaded in four
boxes of 2 tokens of each of 8 documents, one for each warp that multiplies it. What a box reads
past a document's end is zeros. Its rows are in the order in which warps hold products: a lane has
both tokens of its document. The maximum over a document stays in registers until the document ends.
Queries are the columns, one after the other.

Tiles of 32 documents have few rows past a document's end. Tiles of fewer documents have rows that
are closer together in memory.

One warp loads tiles ahead, another one their scales. Four groups of four warps multiply, each by
queries of its own or, for few queries, in documents of its own.

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

ROWS = gl.constexpr(64)  # of a tile
BOXES = gl.constexpr(4)  # of a tile, one for each warp of a group
BOX_TOKENS, BOX_DOCUMENTS = gl.constexpr(2), gl.constexpr(8)
RUN = gl.constexpr(4)  # consecutive tiles of a part
WARP = gl.constexpr(32)  # lanes
DIM = gl.constexpr(128)
ZERO, UNIT = gl.constexpr(0x42800000), gl.constexpr(131072.0)  # bits of 64; 2^17
_tma_load, _barrier, _reinterpret = gluon_tma_load(), gluon_barrier(), gluon_reinterpret()


@gluon.jit
def _tile_start(step, length_d, PARTS: gl.constexpr, GROUP: gl.constexpr):
    """Return the first document and the first token of a tile.

    The parts of the documents alternate after ``RUN`` tiles.

    Args:
        step: number of the tile in the program.
        length_d: length of the padded documents.
        PARTS: number of parts.
        GROUP: documents of a tile.
    """
    tokens: gl.constexpr = ROWS // GROUP
    tiles = gl.cdiv(length_d, tokens)
    tile_of_part = step // (RUN * PARTS) * RUN + step % RUN
    group = tile_of_part // tiles * PARTS + step // RUN % PARTS
    document = (gl.program_id(1) + group * gl.num_programs(1)) * GROUP
    return document, tile_of_part % tiles * tokens


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
    GROUP: gl.constexpr,
):
    """Run the loading warp: fill the ring with the tiles of all parts.

    Args:
        documents_src: TMA descriptor of the documents ``[Nd, length_d, D]``.
        ring: buffers of the tiles, ``BOXES`` boxes for each stage.
        full: barriers on which readers wait until a stage is loaded.
        empty: barriers on which this warp waits until a stage was read.
        length_d: length of the padded documents.
        steps: number of tiles.
        PARTS: number of parts of the documents.
        STAGES: number of stages of the ring.
        GROUP: documents of a tile.
    """
    token_boxes: gl.constexpr = BOXES * BOX_DOCUMENTS // GROUP
    for step in range(steps):
        slot = step % STAGES
        document, token = _tile_start(step, length_d, PARTS, GROUP)
        mbarrier.wait(empty.index(slot), ((step // STAGES) & 1) ^ 1)
        mbarrier.expect(full.index(slot), ROWS * DIM)
        for box in gl.static_range(BOXES):
            box_token = token + box % token_boxes * BOX_TOKENS
            box_document = document + box // token_boxes * BOX_DOCUMENTS
            _tma_load(
                documents_src,
                [box_token, box_document, 0],
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
    GROUP: gl.constexpr,
    HAS_DMASK: gl.constexpr,
    MASK_ZERO: gl.constexpr,
):
    """Load the scales of a tile, and which of its tokens count.

    Args:
        scale_ptr: scales ``[Nd * length_d]`` of the document rows.
        mask_ptr: mask ``[Nd * length_d]``, if HAS_DMASK.
        step: number of the tile in the program.
        Nd: number of documents.
        length_d: length of the padded documents.
        PARTS: number of parts of the documents.
        GROUP: documents of a tile.
        HAS_DMASK: whether documents have a mask.
        MASK_ZERO: whether masked document tokens count with a similarity of 0; otherwise they are
            left out.

    Returns:
        Scales ``[GROUP, tokens]``, and 0 or, for tokens that do not count, minus infinity.
    """
    tokens: gl.constexpr = ROWS // GROUP
    layout: gl.constexpr = gl.BlockedLayout([1, 2], [GROUP, WARP // GROUP], [1, 1], [1, 0])
    first_document, first_token = _tile_start(step, length_d, PARTS, GROUP)
    documents = first_document + gl.arange(0, GROUP, layout=gl.SliceLayout(1, layout))
    document = gl.expand_dims(documents, 1)
    tokens_of_tile = first_token + gl.arange(0, tokens, layout=gl.SliceLayout(0, layout))
    token = gl.expand_dims(tokens_of_tile, 0)
    takes_part = (document < Nd) & (token < length_d)
    row = document.to(gl.int64) * length_d + token
    scale = gl.load(scale_ptr + row, mask=takes_part, other=0.0)
    if HAS_DMASK:
        unmasked = gl.load(mask_ptr + row, mask=takes_part, other=0) != 0
        scale = gl.where(unmasked, scale, 0.0)
        if not MASK_ZERO:
            takes_part = takes_part & unmasked
    return scale, gl.where(takes_part, 0.0, float("-inf"))


@gluon.jit
def _in_rows(x, GROUP: gl.constexpr):
    """Reorder values of a tile to the order of its rows, as boxes hold them.

    Args:
        x: values ``[GROUP, tokens]``.
        GROUP: documents of the tile.

    Returns:
        ``[ROWS]``.
    """
    document_boxes: gl.constexpr = GROUP // BOX_DOCUMENTS
    token_boxes: gl.constexpr = BOXES // document_boxes
    boxes = x.reshape([document_boxes, BOX_DOCUMENTS, token_boxes, BOX_TOKENS])
    return boxes.permute((0, 2, 3, 1)).reshape([ROWS])


@gluon.jit
def _put(
    step,
    scale,
    shift,
    ring,
    PARTS: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP: gl.constexpr,
    HAS_DMASK: gl.constexpr,
    MASK_ZERO: gl.constexpr,
):
    """Store the scales of a tile in the ring, and load the scales of a tile of the next run.

    Args:
        step: number of the tile in the program.
        scale: scales of the tile, ``[GROUP, tokens]``.
        shift: 0 or minus infinity, as :func:`_scales` returns.
        ring: buffers, barriers, tensors and sizes of :func:`_load_scales`.
        PARTS: number of parts of the documents.
        STAGES: number of stages of the ring.
        GROUP: documents of a tile.
        HAS_DMASK: whether documents have a mask.
        MASK_ZERO: whether masked document tokens count with a similarity of 0; otherwise they are
            left out.

    Returns:
        The scales of tile ``step + RUN``, as :func:`_scales` returns them.
    """
    scales, shifts, full, empty, scale_ptr, mask_ptr, Nd, length_d = ring
    slot = step % STAGES
    mbarrier.wait(empty.index(slot), ((step // STAGES) & 1) ^ 1)
    scales.index(slot).store(_in_rows(scale, GROUP))
    shifts.index(slot).store(_in_rows(scale * -64.0 + shift, GROUP))
    _barrier()
    mbarrier.arrive(full.index(slot))
    return _scales(
        scale_ptr,
        mask_ptr,
        step + RUN,
        Nd,
        length_d,
        PARTS,
        GROUP,
        HAS_DMASK,
        MASK_ZERO,
    )


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
    GROUP: gl.constexpr,
    HAS_DMASK: gl.constexpr,
    MASK_ZERO: gl.constexpr,
):
    """Run the warp of the scales: load the scales of tiles, and put them into the ring.

    Scales are loaded ``RUN`` = 4 tiles before they are stored. Each of the four tiles of a run has
    its own variables, so that nothing is moved between registers.

    Args:
        scales: buffers of the scales, one for each stage.
        shifts: buffers of the addends, one for each stage.
        full: barriers on which readers wait until a stage is stored.
        empty: barriers on which this warp waits until a stage was read.
        scale_ptr: scales ``[Nd * length_d]`` of the document rows.
        mask_ptr: mask ``[Nd * length_d]``, if HAS_DMASK.
        Nd: number of documents.
        length_d: length of the padded documents.
        steps: number of tiles, a multiple of ``RUN``.
        PARTS: number of parts of the documents.
        STAGES: number of stages of the ring.
        GROUP: documents of a tile.
        HAS_DMASK: whether documents have a mask.
        MASK_ZERO: whether masked document tokens count with a similarity of 0; otherwise they are
            left out.
    """
    a, a_out = _scales(scale_ptr, mask_ptr, 0, Nd, length_d, PARTS, GROUP, HAS_DMASK, MASK_ZERO)
    b, b_out = _scales(scale_ptr, mask_ptr, 1, Nd, length_d, PARTS, GROUP, HAS_DMASK, MASK_ZERO)
    c, c_out = _scales(scale_ptr, mask_ptr, 2, Nd, length_d, PARTS, GROUP, HAS_DMASK, MASK_ZERO)
    e, e_out = _scales(scale_ptr, mask_ptr, 3, Nd, length_d, PARTS, GROUP, HAS_DMASK, MASK_ZERO)
    ring = scales, shifts, full, empty, scale_ptr, mask_ptr, Nd, length_d
    for step in range(0, steps, RUN):
        a, a_out = _put(step, a, a_out, ring, PARTS, STAGES, GROUP, HAS_DMASK, MASK_ZERO)
        b, b_out = _put(step + 1, b, b_out, ring, PARTS, STAGES, GROUP, HAS_DMASK, MASK_ZERO)
        c, c_out = _put(step + 2, c, c_out, ring, PARTS, STAGES, GROUP, HAS_DMASK, MASK_ZERO)
        e, e_out = _put(step + 3, e, e_out, ring, PARTS, STAGES, GROUP, HAS_DMASK, MASK_ZERO)


@gluon.jit
def _lane_maxima(x):
    """Return the maxima of the two tokens that a lane has of each document.

    Args:
        x: similarities ``[ROWS, columns]``.

    Returns:
        ``[BOXES, BOX_DOCUMENTS, columns]``.
    """
    return gl.reduce(x.reshape([BOXES, BOX_TOKENS, BOX_DOCUMENTS, x.shape[1]]), 1, nan_max)


@gluon.jit
def _document_maxima(best, GROUP: gl.constexpr):
    """Return the maxima over all tokens of each document, ``[GROUP, columns]``.

    Args:
        best: maxima ``[BOXES, BOX_DOCUMENTS, columns]`` over the tokens of each lane.
        GROUP: documents of the tile.
    """
    columns: gl.constexpr = best.shape[2]
    document_boxes: gl.constexpr = GROUP // BOX_DOCUMENTS
    token_boxes: gl.constexpr = BOXES // document_boxes
    document_best = best
    if token_boxes > 1:
        boxes = best.reshape([document_boxes, token_boxes, BOX_DOCUMENTS, columns])
        document_best = gl.reduce(boxes, 1, nan_max)
    return document_best.reshape([GROUP, columns])


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
    """Multiply a tile with the queries, and return its maxima by lanes.

    Integer products n are not converted to floats. Added to the bits of 64, they are the bits of
    ``64 + n / 2^17`` (``64 + n / 2^18`` for n below 0), which is in the order of n. One
    multiply-add with the scale and a shift of -64 scales makes similarities of them.

    Args:
        q: queries ``[DIM, columns]`` in shared memory.
        rows: buffers of the tiles, one for each stage.
        scales: buffers of the scales of document rows.
        shifts: buffers of -64 scales, or minus infinity for tokens that do not count.
        full: barriers on which this group waits until a stage is loaded.
        empty: barriers that tell the loading warps that a stage was read.
        step: number of the tile in the program.
        one: the number 1, which the compiler must not know.
        layout: layout of the products.
        STAGES: number of stages of the ring.

    Returns:
        Maxima as :func:`_lane_maxima` returns them.
    """
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
    zeros = gl.zeros_like(x)
    return _lane_maxima(
        gl.fma(x, gl.expand_dims(scale, 1) + zeros, gl.expand_dims(shift, 1) + zeros),
    )


@gluon.jit
def _finish(
    best,
    first_document,
    weights,
    scores_ptr,
    first_query,
    Nq,
    Nd,
    divisor,
    SLOT: gl.constexpr,
    GROUP: gl.constexpr,
    HAS_QMASK: gl.constexpr,
    HAS_DMASK: gl.constexpr,
    MEAN: gl.constexpr,
):
    """Store the scores of the documents of a tile with the queries of a group of warps.

    Args:
        best: maxima ``[BOXES, BOX_DOCUMENTS, columns]`` over the tokens of each lane.
        first_document: first document of the tile.
        weights: scales of the query rows in shared memory, -1 for masked ones.
        scores_ptr: scores ``[Nq, Nd]``; written.
        first_query: first query of the group.
        Nq, Nd: numbers of queries and documents.
        divisor: divisor of the scores, if MEAN.
        SLOT: rows of a query in the tile.
        GROUP: documents of the tile.
        HAS_QMASK, HAS_DMASK: whether queries and documents have masks.
        MEAN: whether scores are divided.
    """
    COLUMNS: gl.constexpr = best.shape[2]
    document_best = _document_maxima(best, GROUP)
    weight = gl.expand_dims(weights.load(gl.SliceLayout(0, document_best.type.layout)), 0)
    # Negative maxima have half the unit of positive ones. NaN of a document remains NaN.
    value = (document_best + gl.minimum(document_best, 0.0)) * UNIT * weight
    if HAS_QMASK:
        value = gl.where(weight == -1.0, 0.0, value)
    if HAS_DMASK:
        value = gl.where(document_best == float("-inf"), 0.0, value)
    total = gl.sum(value.reshape([GROUP, COLUMNS // SLOT, SLOT]), axis=2)
    if MEAN:
        total = total / divisor
    documents = first_document + gl.arange(0, GROUP, layout=gl.SliceLayout(1, total.type.layout))
    document = gl.expand_dims(documents, 1)
    queries = gl.arange(0, COLUMNS // SLOT, layout=gl.SliceLayout(0, total.type.layout))
    query = gl.expand_dims(first_query + queries, 0)
    gl.store(
        scores_ptr + query.to(gl.int64) * Nd + document,
        total,
        mask=(query < Nq) & (document < Nd),
    )


@gluon.jit
def _score(
    shared,
    PARTS: gl.constexpr,
    STAGES: gl.constexpr,
    SLOT: gl.constexpr,
    GROUP: gl.constexpr,
    HAS_QMASK: gl.constexpr,
    HAS_DMASK: gl.constexpr,
    MEAN: gl.constexpr,
    ROLE: gl.constexpr,
):
    """Run one group of four warps: products and maxima of its queries with its documents.

    Args:
        shared: buffers, barriers, tensors and numbers of :func:`shared_hopper_kernel`, in the order
            in which they are unpacked below.
        PARTS: number of parts of the documents.
        STAGES: number of stages of the ring.
        SLOT: rows of a query in the tile.
        GROUP: documents of a tile.
        HAS_QMASK, HAS_DMASK: whether queries and documents have masks.
        MEAN: whether scores are divided.
        ROLE: number of the group. It has share ``ROLE % SHARES`` of the queries, and part
            ``ROLE // SHARES`` of the documents.
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
    ) = shared
    SHARES: gl.constexpr = queries.shape[0]
    COLUMNS: gl.constexpr = queries.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 32])
    tiles: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    rows = _reinterpret(ring, gl.int8, [STAGES, ROWS, DIM], tiles)
    q, weight = queries.index(ROLE % SHARES).permute((1, 0)), weights.index(ROLE % SHARES)
    first_query = (gl.program_id(0) * SHARES + ROLE % SHARES) * (COLUMNS // SLOT)
    lowest = _lane_maxima(gl.full([ROWS, COLUMNS], float("-inf"), gl.float32, layout=layout))
    best = lowest
    token = 0
    document = (gl.program_id(1) + ROLE // SHARES * gl.num_programs(1)) * GROUP
    for tile_of_part in range(steps // PARTS):
        step = (tile_of_part // RUN * PARTS + ROLE // SHARES) * RUN + tile_of_part % RUN
        best = nan_max(
            best,
            _tile_best(q, rows, scales, shifts, full, empty, step, one, layout, STAGES),
        )
        token += ROWS // GROUP
        if token >= length_d:
            _finish(
                best,
                document,
                weight,
                scores_ptr,
                first_query,
                Nq,
                Nd,
                divisor,
                SLOT,
                GROUP,
                HAS_QMASK,
                HAS_DMASK,
                MEAN,
            )
            best = lowest
            document += PARTS * gl.num_programs(1) * GROUP
            token = 0


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
    GROUP: gl.constexpr,
    REGISTERS: gl.constexpr,
    HAS_QMASK: gl.constexpr,
    HAS_DMASK: gl.constexpr,
    MASK_ZERO: gl.constexpr,
    MEAN: gl.constexpr,
):
    """Compute the scores of short queries with padded int8 documents.

    Warps have different roles. One warp loads tiles of documents, and one their scales. Four groups
    of four warps multiply. Each group has one of ``4 / PARTS`` shares of the queries and one of
    ``PARTS`` parts of the documents. Grid: ``[query tiles, splits]``. A program has BLOCK_Q rows of
    queries and every ``splits``-th group of GROUP documents.

    Args:
        queries_ptr: int8 query rows ``[Nq * length_q, D]``.
        documents_src: TMA descriptor of int8 document rows ``[Nd, length_d, D]``.
        query_mask_ptr, document_mask_ptr: masks of the rows.
        query_factors_ptr: scales ``[Nq * length_q]`` of the query rows.
        document_factors_ptr: scales ``[Nd * length_d]`` of the document rows.
        scores_ptr: scores ``[Nq, Nd]``; written.
        Nq, Nd: numbers of queries and documents.
        length_q, length_d: their lengths.
        divisor: divisor of the scores, if MEAN.
        one: the number 1, which the compiler must not know.
        D: dimension of the rows, at most ``DIM``.
        BLOCK_Q: query rows of a program.
        SLOT: rows of a query in the tile.
        PARTS: number of parts of the documents.
        STAGES: number of stages of the ring.
        GROUP: documents of a tile.
        REGISTERS: registers of a thread that multiplies.
        HAS_QMASK, HAS_DMASK: whether queries and documents have masks.
        MASK_ZERO: whether masked document tokens count with a similarity of 0; otherwise they are
            left out.
        MEAN: whether scores are divided.
    """
    SHARES: gl.constexpr = 4 // PARTS
    COLUMNS: gl.constexpr = BLOCK_Q // SHARES
    # Each stage of the ring then belongs to one part, since a barrier has only two phases.
    gl.static_assert(STAGES % (RUN * PARTS) == 0)
    swizzled: gl.constexpr = gl.NVMMASharedLayout(
        swizzle_byte_width=128,
        element_bitwidth=8,
        rank=2,
    )
    unswizzled: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    queries = gl.allocate_shared_memory(gl.int8, [SHARES, COLUMNS, DIM], swizzled)
    weights = gl.allocate_shared_memory(gl.float32, [SHARES, COLUMNS], unswizzled)
    ring = gl.allocate_shared_memory(
        gl.int8,
        [STAGES * BOXES, BOX_TOKENS, BOX_DOCUMENTS, DIM],
        documents_src.layout,
    )
    scales = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], unswizzled)
    shifts = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], unswizzled)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=2)
        mbarrier.init(empty.index(i), count=SHARES)
    # All groups of warps read the queries and their scales from shared memory.
    by_rows: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
    column = gl.arange(0, COLUMNS, layout=gl.SliceLayout(1, by_rows))
    k = gl.expand_dims(gl.arange(0, DIM, layout=gl.SliceLayout(0, by_rows)), 0)
    for share in gl.static_range(SHARES):
        query = (gl.program_id(0) * SHARES + share) * (COLUMNS // SLOT) + column // SLOT
        token = column % SLOT
        exists = (query < Nq) & (token < length_q)
        row = query * length_q + token
        weight = gl.load(query_factors_ptr + row, mask=exists, other=0.0)
        if HAS_QMASK:
            # A masked token has a scale that no row has.
            unmasked = gl.load(query_mask_ptr + row, mask=exists, other=0) != 0
            weight = gl.where(unmasked, weight, -1.0)
        weights.index(share).store(weight)
        inside = gl.expand_dims(exists, 1) & (k < D)
        row = gl.expand_dims(row.to(gl.int64), 1)
        queries.index(share).store(gl.load(queries_ptr + row * D + k, mask=inside, other=0))
    fence_async_shared()
    _barrier()
    groups = gl.cdiv(gl.cdiv(Nd, GROUP) - gl.program_id(1), gl.num_programs(1))
    # Each part has whole runs. Tiles after the last document are zeros, and are not stored.
    tiles_of_part = gl.cdiv(groups, PARTS) * gl.cdiv(length_d, ROWS // GROUP)
    steps = gl.cdiv(tiles_of_part, RUN) * RUN * PARTS
    shared = (
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
            (_score, (shared, PARTS, STAGES, SLOT, GROUP, HAS_QMASK, HAS_DMASK, MEAN, 0)),
            (_score, (shared, PARTS, STAGES, SLOT, GROUP, HAS_QMASK, HAS_DMASK, MEAN, 1)),
            (_score, (shared, PARTS, STAGES, SLOT, GROUP, HAS_QMASK, HAS_DMASK, MEAN, 2)),
            (_score, (shared, PARTS, STAGES, SLOT, GROUP, HAS_QMASK, HAS_DMASK, MEAN, 3)),
            (
                _load_documents,
                (documents_src, ring, full, empty, length_d, steps, PARTS, STAGES, GROUP),
            ),
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
                    GROUP,
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
    """Return a function that makes the TMA descriptor of boxes of padded documents.

    Args:
        length: number of tokens of each document.
    """
    box = [BOX_TOKENS.value, BOX_DOCUMENTS.value, DIM.value]
    layout = gl.NVMMASharedLayout.get_default_for(box, gl.int8)

    def make(rows: Any, shape: list[int], strides: list[int]) -> TensorDescriptor:
        padded = (
            [length, shape[0] // length, shape[1]],
            [strides[0], length * strides[0], strides[1]],
        )
        return TensorDescriptor(rows, *padded, block_shape=box, layout=layout)

    return make
