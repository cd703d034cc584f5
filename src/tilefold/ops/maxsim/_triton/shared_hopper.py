"""Scores of short queries against padded int8 documents for compute capability 9.0: warps with roles, in Gluon.

A tile is 8 tokens of each of 8 documents, so that documents of any length lie close in it: what a box of a descriptor
reads past a document's end is zeros. Queries lie on its rows as in ``shared.py``. A warp loads tiles ahead, with their
scales; two groups of four warps multiply, each by queries of its own or, for few queries, in documents of its own.
The maximum is kept for each document and lane, and put together once per eight documents.

Products are not converted: ``z + n`` as bits, with ``z`` those of 64, are ``64 + n / 2^17`` for ``n >= 0``, and
``64 + n / 2^18`` below, in the order of ``n``. One multiply-add with ``-64 s`` gives ``s n / 2^17``, rounded once.
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
from tilefold.ops._shared._triton.releases import gluon_barrier, gluon_tma_load
from tilefold.ops.maxsim._triton.device import SIZES
from tilefold.ops.maxsim._triton.shared import STRIP

GROUP, AT_ONCE = gl.constexpr(8), gl.constexpr(8)  # documents of a tile, and tokens of each
COLUMNS = gl.constexpr(64)
DIM = gl.constexpr(128)
ZERO, UNIT = gl.constexpr(0x42800000), gl.constexpr(131072.0)  # bits of 64; 2^17
_tma_load, _barrier = gluon_tma_load(), gluon_barrier()


@gluon.jit
def _place(step, length_d, PARTS: gl.constexpr):
    """First document and token of a tile; tiles of the parts take turns."""
    tiles = gl.cdiv(length_d, AT_ONCE)
    own = step // PARTS
    group = own // tiles * PARTS + step % PARTS
    return (gl.program_id(1) + group * gl.num_programs(1)) * GROUP, own % tiles * AT_ONCE


@gluon.jit
def _scales(
    scale_ptr, mask_ptr, step, Nd, length_d,
    PARTS: gl.constexpr, HAS_DMASK: gl.constexpr, MASK_ZERO: gl.constexpr,
):  # fmt: skip
    """A tile's scales, and 0 or, for what takes no part, minus infinity."""
    d, t0 = _place(step, length_d, PARTS)
    place = gl.arange(0, COLUMNS, layout=gl.BlockedLayout([2], [32], [1], [0]))
    document, token = d + place // AT_ONCE, t0 + place % AT_ONCE
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
def _load_tile(
    step, scale, out, given, PARTS: gl.constexpr, STAGES: gl.constexpr, HAS_DMASK: gl.constexpr, MASK_ZERO: gl.constexpr
):  # fmt: skip
    """Fill a place of the ring; the scales of the tile that is loaded four later."""
    documents_src, ring, scales, shifts, full, empty, scale_ptr, mask_ptr, Nd, length_d = given
    slot = step % STAGES
    d, t0 = _place(step, length_d, PARTS)
    mbarrier.wait(empty.index(slot), ((step // STAGES) & 1) ^ 1)
    mbarrier.expect(full.index(slot), COLUMNS * DIM)
    _tma_load(documents_src, [d, t0, 0], full.index(slot), ring.index(slot))
    scales.index(slot).store(scale)
    shifts.index(slot).store(scale * -64.0 + out)
    _barrier()
    mbarrier.arrive(full.index(slot))
    return _scales(scale_ptr, mask_ptr, step + 4, Nd, length_d, PARTS, HAS_DMASK, MASK_ZERO)


@gluon.jit
def _load_tiles(
    documents_src, ring, scales, shifts, full, empty, scale_ptr, mask_ptr, Nd, length_d, steps,
    PARTS: gl.constexpr, STAGES: gl.constexpr, HAS_DMASK: gl.constexpr, MASK_ZERO: gl.constexpr,
):  # fmt: skip
    """The loading warp: four tiles a round, so that what was read for the next ones is not moved, and waited for."""
    a, a_out = _scales(scale_ptr, mask_ptr, 0, Nd, length_d, PARTS, HAS_DMASK, MASK_ZERO)
    b, b_out = _scales(scale_ptr, mask_ptr, 1, Nd, length_d, PARTS, HAS_DMASK, MASK_ZERO)
    c, c_out = _scales(scale_ptr, mask_ptr, 2, Nd, length_d, PARTS, HAS_DMASK, MASK_ZERO)
    e, e_out = _scales(scale_ptr, mask_ptr, 3, Nd, length_d, PARTS, HAS_DMASK, MASK_ZERO)
    given = documents_src, ring, scales, shifts, full, empty, scale_ptr, mask_ptr, Nd, length_d
    for step in range(0, steps, 4):
        a, a_out = _load_tile(step, a, a_out, given, PARTS, STAGES, HAS_DMASK, MASK_ZERO)
        b, b_out = _load_tile(step + 1, b, b_out, given, PARTS, STAGES, HAS_DMASK, MASK_ZERO)
        c, c_out = _load_tile(step + 2, c, c_out, given, PARTS, STAGES, HAS_DMASK, MASK_ZERO)
        e, e_out = _load_tile(step + 3, e, e_out, given, PARTS, STAGES, HAS_DMASK, MASK_ZERO)


@gluon.jit
def _by_lanes(x):
    """Maximum of the two columns that a lane has of each document, ``[rows, GROUP, lanes]``."""
    ROWS: gl.constexpr = x.shape[0]
    return gl.reduce(x.reshape([ROWS, GROUP, AT_ONCE // 2, 2]), 3, nan_max)


@gluon.jit
def _tile_best(q, ring, scales, shifts, full, empty, step, layout: gl.constexpr, STAGES: gl.constexpr):
    """A tile's products and its maximum."""
    slot = step % STAGES
    ROWS: gl.constexpr = q.shape[0]
    mbarrier.wait(full.index(slot), (step // STAGES) & 1)
    rows = ring.index(slot).reshape([COLUMNS, DIM]).permute((1, 0))
    acc = gl.zeros([ROWS, COLUMNS], gl.int32, layout=layout)
    acc = warpgroup_mma(q, rows, acc, use_acc=False, is_async=True)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    scale = scales.index(slot).load(gl.SliceLayout(0, layout))
    shift = shifts.index(slot).load(gl.SliceLayout(0, layout))
    mbarrier.arrive(empty.index(slot))
    x = (acc + ZERO).to(gl.float32, bitcast=True)
    nothing = gl.zeros_like(x)
    return _by_lanes(gl.fma(x, gl.expand_dims(scale, 0) + nothing, gl.expand_dims(shift, 0) + nothing))


@gluon.jit
def _finish(
    best, d, mask_ptr, scale_ptr, scores_ptr, first, Nq, Nd, length_q, divisor,
    SLOT: gl.constexpr, HAS_QMASK: gl.constexpr, HAS_DMASK: gl.constexpr, MEAN: gl.constexpr,
):  # fmt: skip
    """The scores of the documents of a tile."""
    ROWS: gl.constexpr = best.shape[0]
    QUERIES: gl.constexpr = ROWS // SLOT
    top = gl.reduce(best, 2, nan_max)
    r = gl.arange(0, ROWS, layout=gl.SliceLayout(1, top.type.layout))
    query = first + r // STRIP % QUERIES
    token = r // (STRIP * QUERIES) * STRIP + r % STRIP
    kept = (query < Nq) & (token < length_q)
    row = query * length_q + token
    weight = gl.expand_dims(gl.load(scale_ptr + row, mask=kept, other=0.0), 1)
    value = (
        (top + gl.minimum(top, 0.0)) * UNIT * weight
    )  # a NaN of a row that is no token's is one of its document's too
    if HAS_QMASK:
        kept = kept & (gl.load(mask_ptr + row, mask=kept, other=0) != 0)
        value = gl.where(gl.expand_dims(kept, 1), value, 0.0)
    if HAS_DMASK:
        value = gl.where(top == float("-inf"), 0.0, value)
    total = gl.sum(gl.sum(value.reshape([SLOT // STRIP, QUERIES, STRIP, GROUP]), axis=0), axis=1)
    if MEAN:
        total = total / divisor
    query = gl.expand_dims(first + gl.arange(0, QUERIES, layout=gl.SliceLayout(1, total.type.layout)), 1)
    document = gl.expand_dims(d + gl.arange(0, GROUP, layout=gl.SliceLayout(0, total.type.layout)), 0)
    gl.store(scores_ptr + query.to(gl.int64) * Nd + document, total, mask=(query < Nq) & (document < Nd))


@gluon.jit
def _score(
    given,
    PARTS: gl.constexpr, STAGES: gl.constexpr, SLOT: gl.constexpr, HAS_QMASK: gl.constexpr, HAS_DMASK: gl.constexpr,
    MEAN: gl.constexpr, ROLE: gl.constexpr,
):  # fmt: skip
    """A group of four warps, which has its share of the queries, and its part of the documents."""
    (
        queries, ring, scales, shifts, full, empty, mask_ptr, scale_ptr, scores_ptr, Nq, Nd, length_q, length_d, steps,
        divisor,
    ) = given  # fmt: skip
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 32])
    SHARES: gl.constexpr = queries.shape[0]
    ROWS: gl.constexpr = queries.shape[1]
    q = queries.index(ROLE % SHARES)
    first = (gl.program_id(0) * SHARES + ROLE % SHARES) * (ROWS // SLOT)
    lowest = _by_lanes(gl.full([ROWS, COLUMNS], float("-inf"), gl.float32, layout=layout))
    best = lowest
    t0 = 0
    d = (gl.program_id(1) + ROLE // SHARES * gl.num_programs(1)) * GROUP
    for step in range(ROLE // SHARES, steps, PARTS):
        best = nan_max(best, _tile_best(q, ring, scales, shifts, full, empty, step, layout, STAGES))
        t0 += AT_ONCE
        if t0 >= length_d:
            _finish(
                best, d, mask_ptr, scale_ptr, scores_ptr, first, Nq, Nd, length_q, divisor,
                SLOT, HAS_QMASK, HAS_DMASK, MEAN,
            )  # fmt: skip
            best = lowest
            d += PARTS * gl.num_programs(1) * GROUP
            t0 = 0


@gluon.jit(do_not_specialize=SIZES)
def shared_hopper_kernel(
    queries_ptr, documents_src, query_mask_ptr, document_mask_ptr, query_factors_ptr, document_factors_ptr, scores_ptr,
    Nq, Nd, length_q, length_d, divisor,
    D: gl.constexpr, BLOCK_Q: gl.constexpr, SLOT: gl.constexpr, PARTS: gl.constexpr, STAGES: gl.constexpr,
    REGISTERS: gl.constexpr, HAS_QMASK: gl.constexpr, HAS_DMASK: gl.constexpr, MASK_ZERO: gl.constexpr,
    MEAN: gl.constexpr,
):  # fmt: skip
    """Scores ``[Nq, Nd]``; a program owns ``BLOCK_Q`` rows of queries, of which each of four groups of warps has a
    share, and one of ``PARTS`` of its documents.
    """
    SHARES: gl.constexpr = 4 // PARTS
    ROWS: gl.constexpr = BLOCK_Q // SHARES
    QUERIES: gl.constexpr = ROWS // SLOT
    swizzled: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    queries = gl.allocate_shared_memory(gl.int8, [SHARES, ROWS, DIM], swizzled)
    ring = gl.allocate_shared_memory(gl.int8, [STAGES, GROUP, AT_ONCE, DIM], documents_src.layout)
    scales = gl.allocate_shared_memory(gl.float32, [STAGES, COLUMNS], plain)
    shifts = gl.allocate_shared_memory(gl.float32, [STAGES, COLUMNS], plain)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=2)
        mbarrier.init(empty.index(i), count=SHARES)
    by_rows: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
    r = gl.arange(0, ROWS, layout=gl.SliceLayout(1, by_rows))
    k = gl.expand_dims(gl.arange(0, DIM, layout=gl.SliceLayout(0, by_rows)), 0)
    for share in gl.static_range(SHARES):
        query = (gl.program_id(0) * SHARES + share) * QUERIES + r // STRIP % QUERIES
        token = r // (STRIP * QUERIES) * STRIP + r % STRIP
        kept = gl.expand_dims((query < Nq) & (token < length_q), 1) & (k < D)
        row = gl.expand_dims((query * length_q + token).to(gl.int64), 1)
        queries.index(share).store(gl.load(queries_ptr + row * D + k, mask=kept, other=0))
    fence_async_shared()
    _barrier()
    groups = gl.cdiv(gl.cdiv(Nd, GROUP) - gl.program_id(1), gl.num_programs(1))
    # whole rounds of four tiles: those past the last document's are zeros, and not stored
    steps = gl.cdiv(gl.cdiv(groups, PARTS) * PARTS * gl.cdiv(length_d, AT_ONCE), 4) * 4
    given = (
        queries, ring, scales, shifts, full, empty, query_mask_ptr, query_factors_ptr, scores_ptr, Nq, Nd, length_q,
        length_d, steps, divisor,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (_score, (given, PARTS, STAGES, SLOT, HAS_QMASK, HAS_DMASK, MEAN, 0)),
            (_score, (given, PARTS, STAGES, SLOT, HAS_QMASK, HAS_DMASK, MEAN, 1)),
            (_score, (given, PARTS, STAGES, SLOT, HAS_QMASK, HAS_DMASK, MEAN, 2)),
            (_score, (given, PARTS, STAGES, SLOT, HAS_QMASK, HAS_DMASK, MEAN, 3)),
            (_load_tiles, (
                documents_src, ring, scales, shifts, full, empty, document_factors_ptr, document_mask_ptr, Nd, length_d,
                steps, PARTS, STAGES, HAS_DMASK, MASK_ZERO,
            )),
        ],
        [4, 4, 4, 1], [REGISTERS, REGISTERS, REGISTERS, 24],
    )  # fmt: skip


@functools.cache
def padded_descriptor(length: int) -> Callable[..., TensorDescriptor]:
    """TMA descriptors of tiles of padded documents of ``length`` tokens, by the shape and strides of their rows."""
    box = [GROUP.value, AT_ONCE.value, DIM.value]
    layout = gl.NVMMASharedLayout.get_default_for(box, gl.int8)

    def make(rows: Any, shape: list[int], strides: list[int]) -> TensorDescriptor:
        padded = [shape[0] // length, length, shape[1]], [length * strides[0], *strides]
        return TensorDescriptor(rows, *padded, block_shape=box, layout=layout)

    return make
