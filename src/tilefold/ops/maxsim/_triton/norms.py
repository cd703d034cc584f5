"""Passes over rows: inverse norms, gradients of normalised rows, int8 rows, queries of rows."""

import triton
import triton.language as tl

from tilefold.ops.maxsim._triton.device import load_rows

# a power of two is a normal number, and so is its inverse
MIN_SCALE, MAX_SCALE = tl.constexpr(2.0**-126), tl.constexpr(2.0**126)


@triton.jit
def inverse_power_of_two(x):
    """Return the power of two by which a number comes to between 1 and 2.

    It is limited to normal numbers, and the largest of them for 0.

    Args:
        x: numbers that are not negative.
    """
    exponent = x.to(tl.int32, bitcast=True) & 0x7F800000
    return tl.maximum(0x7F000000 - exponent, 0x00800000).to(tl.float32, bitcast=True)


@triton.jit
def _inverse_norms(
    rows_ptr,
    scale_ptr,
    block,
    T,
    D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Write the inverse norms of a block of rows.

    Rows are multiplied by a power of two, so that their squares neither overflow nor vanish.

    Args:
        rows_ptr: rows ``[T, D]``.
        scale_ptr: inverse norms ``[T]``; written.
        block: number of the block.
        T: number of rows.
        D: dimension of the rows.
        BLOCK_R, BLOCK_D: rows and columns that are read at a time.
    """
    row = block * BLOCK_R + tl.arange(0, BLOCK_R)
    largest = tl.zeros((BLOCK_R,), tl.float32)
    power = inverse_power_of_two(largest)
    square = tl.zeros((BLOCK_R,), tl.float32)
    for k0 in range(0, D, BLOCK_D):
        k = k0 + tl.arange(0, BLOCK_D)
        x = load_rows(rows_ptr, row, row < T, k, D).to(tl.float32)
        largest = tl.maximum(largest, tl.max(tl.abs(x), axis=1))
        previous_power = power
        power = inverse_power_of_two(largest)
        # The squares so far were computed with the previous power.
        square *= (power / previous_power) * (power / previous_power)
        x *= power[:, None]
        square += tl.sum(x * x, axis=1)
    scale = tl.div_rn(power, tl.sqrt_rn(square))
    scale = tl.where(scale < MIN_SCALE, float("nan"), scale)
    # An infinite entry times 0 is NaN where the scale is used.
    scale = tl.where(square == float("inf"), 0.0, scale)
    tl.store(
        scale_ptr + row,
        tl.where((square == 0.0) | (scale > MAX_SCALE), 0.0, scale),
        mask=row < T,
    )


@triton.jit(do_not_specialize=["Tq", "Td"])
def inverse_norms_kernel(
    queries_ptr,
    documents_ptr,
    query_factors_ptr,
    document_factors_ptr,
    Tq,
    Td,
    D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Compute ``1 / norm`` of all query and document rows.

    The result is 0 for a row whose inverse norm exceeds fp32 (a norm below ``2**-126``), and NaN
    where it is not a normal number. Grid: ``[ceil(Tq / BLOCK_R) + ceil(Td / BLOCK_R)]``, queries
    first.

    Args:
        queries_ptr: query rows ``[Tq, D]``.
        documents_ptr: document rows ``[Td, D]``.
        query_factors_ptr: inverse norms ``[Tq]`` of query rows, fp32; written.
        document_factors_ptr: inverse norms ``[Td]`` of document rows, fp32; written.
        Tq, Td: numbers of rows.
        D: dimension of the rows.
        BLOCK_R, BLOCK_D: rows and columns that are read at a time.
    """
    block = tl.program_id(0)
    n_query_blocks = (Tq + BLOCK_R - 1) // BLOCK_R
    if block < n_query_blocks:
        _inverse_norms(queries_ptr, query_factors_ptr, block, Tq, D, BLOCK_R, BLOCK_D)
    else:
        _inverse_norms(
            documents_ptr,
            document_factors_ptr,
            block - n_query_blocks,
            Td,
            D,
            BLOCK_R,
            BLOCK_D,
        )


@triton.jit
def projected(x, scale, g):
    """Return the gradient of rows before normalisation, from that of the normalised rows.

    It is ``scale * (g - u (u . g))`` with ``u = scale * x``.

    Args:
        x: rows ``[R, D]`` before normalisation.
        scale: inverse norms ``[R]``.
        g: gradient of the normalised rows, ``[R, D]``.
    """
    u = x * scale[:, None]
    # A factor of 0 gives 0, even if the other factor is infinite or NaN.
    along = tl.sum(tl.where(g == 0.0, 0.0, u * g), axis=1)[:, None]
    u = tl.where(along == 0.0, 0.0, u)
    return tl.where((along == 0.0) & (g == 0.0), 0.0, scale[:, None] * (g - u * along))


@triton.jit(do_not_specialize=["T"])
def unit_gradient_kernel(
    rows_ptr,
    scale_ptr,
    grad_ptr,
    out_ptr,
    T,
    D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Compute the gradient of rows before normalisation, from that of the normalised ones.

    ``out = scale * (grad - u (u . grad))`` with ``u = scale * row``. Grid: ``[ceil(T / BLOCK_R)]``.

    Args:
        rows_ptr: rows ``[T, D]`` before normalisation.
        scale_ptr: inverse norms ``[T]``.
        grad_ptr: gradient of the normalised rows, ``[T, D]``.
        out_ptr: gradient of the rows, ``[T, D]``; written.
        T: number of rows.
        D: dimension of the rows.
        BLOCK_R, BLOCK_D: rows and columns that are read at a time.
    """
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    scale = tl.load(scale_ptr + row, mask=row < T, other=0.0)
    # The component of the gradient along the normalised row.
    along = tl.zeros((BLOCK_R,), tl.float32)
    for k0 in range(0, D, BLOCK_D):
        k = k0 + tl.arange(0, BLOCK_D)
        inside = (row < T)[:, None] & (k < D)[None, :]
        offs = row.to(tl.int64)[:, None] * D + k[None, :]
        x = tl.load(rows_ptr + offs, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(grad_ptr + offs, mask=inside, other=0.0)
        along += tl.sum(tl.where(g == 0.0, 0.0, x * scale[:, None] * g), axis=1)
    for k0 in range(0, D, BLOCK_D):
        k = k0 + tl.arange(0, BLOCK_D)
        inside = (row < T)[:, None] & (k < D)[None, :]
        offs = row.to(tl.int64)[:, None] * D + k[None, :]
        x = tl.load(rows_ptr + offs, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(grad_ptr + offs, mask=inside, other=0.0)
        u = tl.where(along[:, None] == 0.0, 0.0, x * scale[:, None])
        out = scale[:, None] * (g - u * along[:, None])
        out = tl.where((along == 0.0)[:, None] & (g == 0.0), 0.0, out)
        tl.store(out_ptr + offs, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["T"])
def quantize_kernel(
    rows_ptr,
    out_ptr,
    scale_ptr,
    T,
    D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Round rows to int8, with the operations and the results of ``quantize_tokens``.

    ``scale = max|x| / 127`` and ``out = round(x / scale)``. Grid: ``[ceil(T / BLOCK_R)]``.

    Args:
        rows_ptr: rows ``[T, D]``.
        out_ptr: int8 rows ``[T, D]``; written.
        scale_ptr: scales ``[T]``; written.
        T: number of rows.
        D: dimension of the rows.
        BLOCK_R, BLOCK_D: rows and columns that are read at a time.
    """
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    largest = tl.zeros((BLOCK_R,), tl.float32)
    for k0 in range(0, D, BLOCK_D):
        k = k0 + tl.arange(0, BLOCK_D)
        x = load_rows(rows_ptr, row, row < T, k, D).to(tl.float32)
        # NaN, which is not equal to itself, makes the scale NaN.
        largest = tl.where(tl.max((x != x).to(tl.int32), axis=1) > 0, float("nan"), largest)
        largest = tl.maximum(largest, tl.max(tl.abs(x), axis=1), propagate_nan=tl.PropagateNan.ALL)
    scale = tl.div_rn(largest, 127.0)
    tl.store(scale_ptr + row, scale, mask=row < T)
    divisor = tl.where(scale > 0.0, scale, 1.0)
    for k0 in range(0, D, BLOCK_D):
        k = k0 + tl.arange(0, BLOCK_D)
        inside = (row < T)[:, None] & (k < D)[None, :]
        offs = row.to(tl.int64)[:, None] * D + k[None, :]
        x = tl.load(rows_ptr + offs, mask=inside, other=0.0).to(tl.float32)
        y = tl.div_rn(x, divisor[:, None] + tl.zeros(x.shape, tl.float32))
        y = tl.where(y == y, tl.minimum(tl.maximum(y, -127.0), 127.0), 0.0)
        # Adding 1.5 * 2^23 rounds to a whole number, half to even.
        rounded = (y + 12582912.0) - 12582912.0
        tl.store(out_ptr + offs, rounded.to(tl.int8), mask=inside)


@triton.jit
def query_of(cu_queries_ptr, row, Nq, steps):
    """Return the query of each row, by bisection of the offsets.

    Rows after the last query get the last query.

    Args:
        cu_queries_ptr: offsets ``[Nq + 1]``.
        row: the rows.
        Nq: number of queries.
        steps: number of bisections, at least ``log2(Nq) + 1``.
    """
    low = row * 0
    high = low + Nq
    for _ in range(steps):
        searching = low < high
        middle = (low + high) // 2
        end = tl.load(cu_queries_ptr + 1 + middle, mask=searching, other=0)
        low = tl.where(searching & (end <= row), middle + 1, low)
        high = tl.where(searching & (end > row), middle, high)
    return tl.minimum(low, Nq - 1)
