"""Passes over rows: inverse norms, the gradient of a row from that of its unit vector, rows in int8."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["T"])
def inverse_norm_kernel(rows_ptr, scale_ptr, T, D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr):
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    square = tl.zeros((BLOCK_R,), tl.float32)
    for k0 in range(0, D, BLOCK_D):
        k = k0 + tl.arange(0, BLOCK_D)
        inside = (row < T)[:, None] & (k < D)[None, :]
        x = tl.load(rows_ptr + row.to(tl.int64)[:, None] * D + k[None, :], mask=inside, other=0.0).to(tl.float32)
        square += tl.sum(x * x, axis=1)
    tl.store(scale_ptr + row, tl.where(square == 0.0, 0.0, 1.0 / tl.sqrt_rn(square)), mask=row < T)


@triton.jit(do_not_specialize=["T"])
def unit_gradient_kernel(
    rows_ptr, scale_ptr, grad_ptr, out_ptr, T, D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr
):
    """``out = scale * (grad - u (u . grad))`` with ``u = scale * row``."""
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    scale = tl.load(scale_ptr + row, mask=row < T, other=0.0)
    along = tl.zeros((BLOCK_R,), tl.float32)
    for k0 in range(0, D, BLOCK_D):
        k = k0 + tl.arange(0, BLOCK_D)
        inside = (row < T)[:, None] & (k < D)[None, :]
        offs = row.to(tl.int64)[:, None] * D + k[None, :]
        x = tl.load(rows_ptr + offs, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(grad_ptr + offs, mask=inside, other=0.0)
        along += tl.sum(tl.where(g == 0.0, 0.0, x * g), axis=1)
    along *= scale
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
def quantize_kernel(rows_ptr, out_ptr, scale_ptr, T, D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr):
    """``scale = max|x| / 127`` and ``out = round(x / scale)``, in the very operations of ``quantize_tokens``."""
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    largest = tl.zeros((BLOCK_R,), tl.float32)
    for k0 in range(0, D, BLOCK_D):
        k = k0 + tl.arange(0, BLOCK_D)
        inside = (row < T)[:, None] & (k < D)[None, :]
        x = tl.load(rows_ptr + row.to(tl.int64)[:, None] * D + k[None, :], mask=inside, other=0.0).to(tl.float32)
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
        whole = (y + 12582912.0) - 12582912.0  # 1.5 * 2^23: what is added is rounded to a whole number, half to even
        tl.store(out_ptr + offs, whole.to(tl.int8), mask=inside)
