"""The screen's integer products for compute capability 9.0: the Hopper forward kernel in int8.

``screen.py`` describes the screen.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from tilefold.ops.lsr_head._triton.max_forward_hopper import (
    HALF_V,
    LANES,
    _first_sequence,
    _load_tiles,
    _multiply_tile,
)
from tilefold.ops.lsr_head._triton.screen import N_MARKED, N_SAMPLED, may_be_positive
from tilefold.ops.lsr_head._triton.sequences import column_terms, sequence_offset, split_tiles_of

LOWEST = gl.constexpr(-2147483648)


@gluon.jit
def _larger(a, b):
    """Return the elementwise maximum, for reductions."""
    return gl.maximum(a, b)


@gluon.jit
def _mark(
    best,
    offs_v,
    mask_v,
    seq,
    state_ptr,
    terms_ptr,
    bias,
    marks_ptr,
    B,
    V,
    logit_scale,
    D: gl.constexpr,
    HAS_BIAS: gl.constexpr,
):
    """Mark the scores of a sequence that may be positive, and return their number.

    Args:
        best: largest integer product of each column over the sequence's tokens.
        offs_v: the columns.
        mask_v: columns that exist.
        seq: the sequence.
        state_ptr: state of the screen.
        terms_ptr: scale, norm and error of each row of the weight, ``[3, V]``.
        bias: bias of the columns.
        marks_ptr: marks ``[B, V]``; written.
        B: number of sequences.
        V: number of columns.
        logit_scale: factor of the products.
        D: hidden dimension.
        HAS_BIAS: whether there is a bias.
    """
    positive = may_be_positive(
        best,
        offs_v,
        mask_v,
        seq,
        state_ptr,
        terms_ptr,
        bias,
        B,
        V,
        logit_scale,
        D,
        HAS_BIAS,
    )
    gl.store(
        marks_ptr + seq.to(gl.int64) * V + offs_v,
        gl.full([HALF_V], 1, gl.int8, layout=offs_v.type.layout),
        mask=positive,
    )
    return gl.sum(positive.to(gl.int32), axis=0)


@gluon.jit
def _fold_tiles(
    operands,
    D: gl.constexpr,
    K_STEPS: gl.constexpr,
    BLOCK_T: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    UNIFORM: gl.constexpr,
    HALF: gl.constexpr,
):
    """Run one group of four warps: integer products and running maxima of one half of the columns.

    The loops and the cases are those of ``max_forward_kernel`` in ``max_forward.py``, which
    describes the items and the splits. Where a sequence ends, its scores are marked instead of
    stored.

    Args:
        operands: the tensors and numbers of :func:`screen_hopper_kernel`, in the order in which
            they are unpacked below.
        D: hidden dimension.
        K_STEPS: steps over D.
        BLOCK_T: tokens of a tile.
        STAGES: number of stages of the ring.
        GROUP: sequences begin at multiples of it.
        HAS_BIAS: whether there is a bias.
        UNIFORM: whether all sequences have the same length.
        HALF: number of the half, 0 or 1.
    """
    (
        w_ring,
        h_ring,
        full,
        empty,
        state_ptr,
        terms_ptr,
        bias_ptr,
        offset_ptr,
        marks_ptr,
        B,
        V,
        n_rows,
        n_items,
        n_tiles,
        split_tiles,
        uniform_length,
        logit_scale,
    ) = operands
    # Triton has no int8 product of 256 columns: a tile of 256 tokens takes two of 128.
    N_COLUMNS: gl.constexpr = 128 if BLOCK_T > 128 else BLOCK_T
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N_COLUMNS, 32])
    column: gl.constexpr = gl.SliceLayout(1, layout)
    N_GROUPS: gl.constexpr = BLOCK_T // GROUP
    n_splits = gl.cdiv(n_tiles, split_tiles)
    step = 0
    n_marked = 0
    for item in range(gl.program_id(0), n_items, gl.num_programs(0)):
        split = item % n_splits
        offs_v = (
            (item // n_splits) * 2 * HALF_V + HALF * HALF_V + gl.arange(0, HALF_V, layout=column)
        )
        mask_v = offs_v < V
        _, bias = column_terms(None, bias_ptr, offs_v, mask_v, HAS_BIAS, False)
        t0 = split * split_tiles
        t1 = gl.minimum(t0 + split_tiles, n_tiles)
        seq = _first_sequence(offset_ptr, t0 * BLOCK_T, B, uniform_length, UNIFORM)
        start = sequence_offset(offset_ptr, seq, B, uniform_length, UNIFORM)
        end = sequence_offset(offset_ptr, seq + 1, B, uniform_length, UNIFORM)
        best = gl.full([HALF_V], LOWEST, gl.int32, layout=column)
        for t in range(t0, t1):
            acc = gl.zeros([HALF_V, BLOCK_T], gl.int32, layout=layout)
            acc, step = _multiply_tile(
                acc,
                step,
                w_ring,
                h_ring,
                full,
                empty,
                HALF,
                K_STEPS,
                STAGES,
            )
            r0 = t * BLOCK_T
            r1 = gl.minimum(r0 + BLOCK_T, n_rows)
            has_next = True
            # Case 1: all tokens of the tile belong to one sequence.
            if (start <= r0) & (end >= r0 + BLOCK_T):
                best = gl.maximum(best, gl.reduce(acc, 1, _larger))
                has_next = end == r1
                if has_next:
                    n_marked += _mark(
                        best,
                        offs_v,
                        mask_v,
                        seq,
                        state_ptr,
                        terms_ptr,
                        bias,
                        marks_ptr,
                        B,
                        V,
                        logit_scale,
                        D,
                        HAS_BIAS,
                    )
                    seq += 1
                    start = end
                    end = sequence_offset(offset_ptr, seq + 1, B, uniform_length, UNIFORM)
                    best = gl.full([HALF_V], LOWEST, gl.int32, layout=column)
            # Case 2: several sequences share the tile. Each begins at a multiple of GROUP.
            else:
                grouped = acc.reshape([HALF_V, N_GROUPS, GROUP // 8, LANES, 2])
                group_best = gl.reduce(gl.reduce(grouped, 4, _larger), 2, _larger)
                row_groups: gl.constexpr = gl.SliceLayout(
                    0,
                    gl.SliceLayout(2, group_best.type.layout),
                )
                groups = gl.arange(0, N_GROUPS, layout=row_groups) * GROUP
                while has_next:  # the sequences of the tile, one after another
                    inside = gl.expand_dims(
                        gl.expand_dims((groups >= start - r0) & (groups < end - r0), 0),
                        2,
                    )
                    seq_best = gl.reduce(gl.where(inside, group_best, LOWEST), 1, _larger)
                    best = gl.maximum(
                        best,
                        gl.convert_layout(gl.reduce(seq_best, 1, _larger), column),
                    )
                    has_next = end <= r1  # the sequence ends here: mark it, and take the next one
                    if has_next:
                        if end > start:
                            n_marked += _mark(
                                best,
                                offs_v,
                                mask_v,
                                seq,
                                state_ptr,
                                terms_ptr,
                                bias,
                                marks_ptr,
                                B,
                                V,
                                logit_scale,
                                D,
                                HAS_BIAS,
                            )
                        seq += 1
                        start = end
                        end = sequence_offset(offset_ptr, seq + 1, B, uniform_length, UNIFORM)
                        best = gl.full([HALF_V], LOWEST, gl.int32, layout=column)
                        has_next = seq < B
        # a sequence that continues in the next split is marked there too
        if (start < t1 * BLOCK_T) & (seq < B):
            n_marked += _mark(
                best,
                offs_v,
                mask_v,
                seq,
                state_ptr,
                terms_ptr,
                bias,
                marks_ptr,
                B,
                V,
                logit_scale,
                D,
                HAS_BIAS,
            )
    gl.atomic_add(state_ptr + N_MARKED, n_marked, sem="relaxed")


@gluon.jit(
    do_not_specialize=[
        "B",
        "V",
        "T",
        "uniform_length",
        "splits",
        "multiple",
        "sample_limit",
        "logit_scale",
    ],
)
def screen_hopper_kernel(
    weight_desc,
    rows_desc,
    state_ptr,
    terms_ptr,
    bias_ptr,
    offset_ptr,
    marks_ptr,
    B,
    V,
    T,
    uniform_length,
    splits,
    multiple,
    sample_limit,
    logit_scale,
    D: gl.constexpr,
    BLOCK_T: gl.constexpr,
    BLOCK_K: gl.constexpr,
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    UNIFORM: gl.constexpr,
):
    """Mark the scores that may be positive, by products of 8-bit integers.

    Nothing is done if too many scores of the sample remain. Warps have the roles of
    :func:`max_forward_hopper_kernel`: one warp loads tiles, and two groups of four warps compute.

    Args:
        weight_desc: TMA descriptor of the int8 weight ``[V, D]``.
        rows_desc: TMA descriptor of the int8 token states ``[T, D]``.
        state_ptr: state of the screen. The number of marked scores is added to its counter.
        terms_ptr: scale, norm and error of each row of the weight, ``[3, V]``.
        bias_ptr: bias ``[V]``, if HAS_BIAS.
        offset_ptr: first row of each sequence, ``[B + 1]``, unless UNIFORM.
        marks_ptr: marks ``[B, V]``; written.
        B: number of sequences.
        V: number of columns.
        T: number of rows, if UNIFORM.
        uniform_length: length of all sequences, if UNIFORM.
        splits: number of splits of the token tiles.
        multiple: number that the tiles of a split are a multiple of.
        sample_limit: largest count of the sample with which the screen runs.
        logit_scale: factor of the products.
        D: hidden dimension.
        BLOCK_T, BLOCK_K: tokens and entries of a tile.
        GROUP: sequences begin at multiples of it.
        STAGES: number of stages of the ring.
        HAS_BIAS: whether there is a bias.
        UNIFORM: whether all sequences have the same length.
    """
    K_STEPS: gl.constexpr = (D + BLOCK_K - 1) // BLOCK_K
    n_rows = T
    if not UNIFORM:
        n_rows = gl.load(offset_ptr + B)
    n_tiles, split_tiles = split_tiles_of(n_rows, splits, multiple, BLOCK_T)
    n_items = gl.cdiv(V, 2 * HALF_V) * gl.cdiv(n_tiles, split_tiles)
    n_items = gl.where(gl.load(state_ptr + N_SAMPLED) > sample_limit, 0, n_items)
    w_ring = gl.allocate_shared_memory(
        weight_desc.dtype,
        [2 * STAGES, HALF_V, BLOCK_K],
        weight_desc.layout,
    )
    h_ring = gl.allocate_shared_memory(
        rows_desc.dtype,
        [STAGES, BLOCK_T, BLOCK_K],
        rows_desc.layout,
    )
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    operands = (
        w_ring,
        h_ring,
        full,
        empty,
        state_ptr,
        terms_ptr,
        bias_ptr,
        offset_ptr,
        marks_ptr,
        B,
        V,
        n_rows,
        n_items,
        n_tiles,
        split_tiles,
        uniform_length,
        logit_scale,
    )
    gl.warp_specialize(
        [
            (_fold_tiles, (operands, D, K_STEPS, BLOCK_T, STAGES, GROUP, HAS_BIAS, UNIFORM, 0)),
            (_fold_tiles, (operands, D, K_STEPS, BLOCK_T, STAGES, GROUP, HAS_BIAS, UNIFORM, 1)),
            (
                _load_tiles,
                (
                    weight_desc,
                    rows_desc,
                    w_ring,
                    h_ring,
                    full,
                    empty,
                    n_items,
                    n_tiles,
                    split_tiles,
                    K_STEPS,
                    BLOCK_T,
                    BLOCK_K,
                    STAGES,
                ),
            ),
        ],
        [4, 1],
        [232, 24],
    )
