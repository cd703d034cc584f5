"""Document gradients of all pairs: each tile of document rows lists the query rows that it won, and adds up those.

A dense product of a one-hot matrix with all query rows costs what the forward pass costs, although each query row has
one winner per document. A program reads the winners of its document, 16 bits each, keeps the rows in its tile
in a short list of its own, and multiplies only these. The order of the list is the order of the rows: no atomics, the
same bits every time.
"""

import triton
import triton.language as tl

from tilefold.ops.maxsim._triton.backward import grad_unit
from tilefold.ops.maxsim._triton.device import SIZES, bounds, load_rows, split_scale, times_power
from tilefold.ops.maxsim._triton.norms import projected


@triton.jit
def _add_listed(
    acc, list_ptr, count, dscore_ptr, saved_ptr, query_ptr, query_scale_ptr, row_query_ptr, t0, unit, Tq, length_q,
    stride_q, k,
    D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, UNIFORM_Q: tl.constexpr, HAS_SCALE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """``acc[t] += dscore * queries[row]`` for the listed rows; ``dscore_ptr`` and ``saved_ptr`` are the document's."""
    t = tl.arange(0, BLOCK_T)
    for e0 in tl.range(0, count, BLOCK_E):
        e = e0 + tl.arange(0, BLOCK_E)
        listed = e < count
        row = tl.load(list_ptr + e, mask=listed, other=0)
        place = tl.load(saved_ptr + row, mask=listed, other=0).to(tl.int32) - t0
        if UNIFORM_Q:
            owner = row // length_q
        else:
            owner = tl.load(row_query_ptr + row, mask=listed, other=0).to(tl.int32)
        grad = tl.load(dscore_ptr + owner.to(tl.int64) * stride_q, mask=listed, other=0.0).to(tl.float32) / unit
        x = load_rows(query_ptr, row, listed, k, D)  # [BLOCK_E, BLOCK_D]
        if HAS_SCALE:
            power, rest = split_scale(tl.load(query_scale_ptr + row, mask=listed, other=0.0))
            grad *= rest
            x = times_power(x, power)
        onehot = tl.where(place[None, :] == t[:, None], grad[None, :], 0.0).to(x.dtype)
        acc = tl.dot(onehot, x, acc, input_precision=PRECISION)
    return acc


@triton.jit(do_not_specialize=SIZES)
def ddocuments_listed_kernel(
    dscore_ptr, saved_ptr, query_ptr, doc_ptr, query_scale_ptr, doc_scale_ptr, largest_ptr, cu_d_ptr, row_query_ptr,
    list_ptr, ddoc_ptr,
    Tq, Td, Nd, slices, length_q, length_d, stride_q, stride_d, factor,
    D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_D: tl.constexpr,
    CAPACITY: tl.constexpr, ALIGNED: tl.constexpr, UNIFORM_Q: tl.constexpr, UNIFORM_D: tl.constexpr,
    HAS_SCALE: tl.constexpr, HAS_LARGEST: tl.constexpr, NO_WINNER: tl.constexpr, PRECISION: tl.constexpr,
    PROJECTS: tl.constexpr,
):  # fmt: skip
    """``ddocuments[t] = sum over the query rows that t won of dscore * queries[row]``, times ``factor``.

    Work item ``i`` is slice ``i % slices`` of document ``i // slices``: every ``slices``-th tile of it. ``PROJECTS``:
    rows are normalised, of no more than ``BLOCK_D`` dimensions, and get their own gradient.
    """
    k = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    list_ptr += (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)) * CAPACITY
    unit = grad_unit(largest_ptr, HAS_LARGEST)
    for item in range(tl.program_id(0), Nd * slices, tl.num_programs(0)):
        d = item // slices
        start, end, _ok = bounds(cu_d_ptr, d, Nd, Td, length_d, UNIFORM_D)
        saved_d = saved_ptr + tl.cast(d, tl.int64) * Tq
        if ALIGNED:  # rows are a multiple of 8: winners are read 16 bytes at a time
            saved_d = tl.multiple_of(saved_d, 16)
        dscore_d = dscore_ptr + tl.cast(d, tl.int64) * stride_d
        for t0 in range((item % slices) * BLOCK_T, end - start, slices * BLOCK_T):
            acc = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
            count = 0
            for r0 in range(0, Tq, BLOCK_S):
                row = r0 + tl.arange(0, BLOCK_S)
                winner = tl.load(saved_d + row, mask=row < Tq, other=NO_WINNER).to(tl.int32)
                mine = (winner >= t0) & (winner < t0 + BLOCK_T) & (winner != NO_WINNER)
                place = count + tl.cumsum(mine.to(tl.int32), 0) - 1
                tl.store(list_ptr + place, row, mask=mine)
                count += tl.sum(mine.to(tl.int32))
                if (count > CAPACITY - BLOCK_S) | (r0 + BLOCK_S >= Tq):
                    tl.debug_barrier()  # the list was written by other threads
                    acc = _add_listed(
                        acc, list_ptr, count, dscore_d, saved_d, query_ptr, query_scale_ptr, row_query_ptr, t0, unit,
                        Tq, length_q, stride_q, k, D, BLOCK_T, BLOCK_E, UNIFORM_Q, HAS_SCALE, PRECISION,
                    )  # fmt: skip
                    count = 0
                    tl.debug_barrier()  # before it is written anew
            row_d = start + t0 + tl.arange(0, BLOCK_T)
            acc = acc * unit * factor
            if PROJECTS:
                x = load_rows(doc_ptr, row_d, row_d < end, k, D).to(tl.float32)
                acc = projected(x, tl.load(doc_scale_ptr + row_d, mask=row_d < end, other=0.0), acc)
            tl.store(
                ddoc_ptr + row_d.to(tl.int64)[:, None] * D + k[None, :],
                acc.to(ddoc_ptr.dtype.element_ty),
                mask=(row_d < end)[:, None] & (k < D)[None, :],
            )
