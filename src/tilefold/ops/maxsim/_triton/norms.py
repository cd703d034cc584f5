"""Passes over rows: inverse norms, gradients of normalised rows, int8 rows, queries of rows."""

import triton
import triton.language as tl

from tilefold.ops.maxsim._triton.device import load_rows

# a power of two is a normal number, and so is its inverse
MIN_SCALE, MAX_SCALE = tl.constexpr(2.0**-126), tl.constexpr(2.0**126)


@triton.jit
def inverse_power_of_two(x):
    """Return the power of two by which ``x >= 0`` comes to between 1 and 2.

    It is limited to normal numbers, and the largest of them for 0.
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
    """Compute the inverse norms of ``BLOCK_R`` of the ``[T, D]`` rows."""
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
        # the squares so far were of rows multiplied by the previous power
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

    Rows are brought to the order of 1 first, so that their squares neither overflow nor vanish. The
    result is 0 for a row whose inverse norm is no number of fp32 (a norm below ``2**-126``), and
    NaN where it is not a normal one. Grid: ``[ceil(Tq / BLOCK_R) + ceil(Td / BLOCK_R)]``, queries
    first. Writes ``query_factors`` ``[Tq]`` and ``document_factors`` ``[Td]``, fp32.
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
    """Return ``scale * (g - u (u . g))`` with ``u = scale * x``.

    This is the gradient of rows ``x`` ``[R, D]`` before normalisation, from the gradient ``g`` of
    the normalised rows. ``scale`` ``[R]`` is the inverse of their norms.
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
    """Compute ``out = scale * (grad - u (u . grad))`` with ``u = scale * row``.

    This is the gradient of rows before normalisation, from that of the normalised ones. Grid:
    ``[ceil(T / BLOCK_R)]``. ``rows``, ``grad``, ``out``: ``[T, D]``. ``scale``: inverse norms
    ``[T]``.
    """
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    scale = tl.load(scale_ptr + row, mask=row < T, other=0.0)
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
    """Compute ``scale = max|x| / 127`` and ``out = round(x / scale)`` of rows.

    The operations are those of ``quantize_tokens``, with the same results. Grid: ``[ceil(T /
    BLOCK_R)]``. ``rows``: ``[T, D]``. Writes ``out`` ``[T, D]`` int8 and ``scale`` ``[T]``.
    """
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    largest = tl.zeros((BLOCK_R,), tl.float32)
    for k0 in range(0, D, BLOCK_D):
        k = k0 + tl.arange(0, BLOCK_D)
        x = load_rows(rows_ptr, row, row < T, k, D).to(tl.float32)
        # not a number stays one: nan != nan
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
    """Return the first sequence that ends after each row, or the last one.

    ``steps`` bisections of the offsets ``[Nq + 1]`` find it.
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
