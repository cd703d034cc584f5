"""Rounding of the LSR head's operands to 8 bits, for inference: the quantised weight, and who
multiplies it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tilefold.ops._shared.calls import call_key, call_on_device
from tilefold.ops._shared.checks import FLOAT_DTYPES, check_dtype, check_shape, check_tensor
from tilefold.ops._shared.fallback import (
    TILED_PATH_RUNS,
    KernelUnavailableError,
    give_up,
    refuse_capture,
    try_kernels,
)
from tilefold.ops._shared.impl import resolve_impl

FP8 = torch.float8_e4m3fn
QUANTIZED_HEAD = "lsr_head with an fp8 weight"
FP8_MAX = 448.0
TINY = 2.0**-126
SLAB_V = 16384  # rows that are converted at a time


@dataclass(frozen=True)
class QuantizedWeight:
    """A decoder weight in fp8 (e4m3) with one scale per row: ``weight[v, d] = scale[v] * values[v,
    d]``, rounded.

    Half the bytes of bf16, twice its product rate. Make it with :func:`quantize_weight`, give it to
    :func:`tilefold.ops.lsr_head` in place of the weight.

    Attributes:
        values: ``[V, D]`` ``torch.float8_e4m3fn``.
        scale: ``[V]`` fp32, positive.
    """

    values: Tensor
    scale: Tensor

    @property
    def shape(self) -> torch.Size:
        """``[V, D]``."""
        return self.values.shape

    @property
    def device(self) -> torch.device:
        """Device of the values."""
        return self.values.device

    def size(self, dim: int) -> int:
        """Size of one dimension."""
        return self.values.size(dim)

    def __getitem__(self, rows: slice) -> QuantizedWeight:
        """A slice of vocabulary rows, without a copy."""
        if not isinstance(rows, slice):
            raise TypeError(
                f"rows must be a slice, got {type(rows).__name__}; weight[v:v + 1] is one row.",
            )
        return QuantizedWeight(self.values[rows], self.scale[rows])

    def __copy__(self) -> QuantizedWeight:
        return QuantizedWeight(self.values, self.scale)

    def __reduce__(self) -> tuple[Callable[..., QuantizedWeight], tuple[object, ...]]:
        # torch neither stores fp8 nor reads it; of a slice only what it shows is kept
        stored = self.values.detach().contiguous().clone().view(torch.uint8)
        return _unpickled, (stored, self.values.dtype, self.scale.clone())

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """``[V, D]`` in ``dtype``: the weight that the quantised head stands for."""
        return (self.values.float() * self.scale[:, None]).to(dtype)


def _unpickled(stored: Tensor, dtype: torch.dtype, scale: Tensor) -> QuantizedWeight:
    return QuantizedWeight(stored.view(dtype), scale)


def quantize_weight(weight: Tensor) -> QuantizedWeight:
    """Round a decoder weight to fp8 (e4m3), each row scaled so that its largest entry becomes 448.

    Rows of zeros keep the scale 1; a NaN or an infinity makes NaN scores of its vocabulary entry,
    as in the plain head. The rounding error of an entry is at most 1/16 of it, or 2^-10 of the
    scale near zero.

    On a GPU with fp8 products it is one pass of a kernel, which reads the weight and writes it in
    fp8; where that cannot be built, this and the quantised head run in torch, after one warning.

    Args:
        weight: ``[V, D]``, fp16, bf16, fp32 or fp64, on any device. It is not kept, and later
            changes of it are not seen: quantise again after an optimiser step.

    Raises:
        TypeError, ValueError: for anything else.
    """
    check_shape("weight", check_tensor("weight", weight), "V D")
    check_dtype("weight", weight, FLOAT_DTYPES, "cast it with .to(torch.bfloat16).")
    if weight.size(1) == 0:
        raise ValueError(f"D must be at least 1, got D=0 in shape {list(weight.shape)}.")
    if call_key((weight,), ()) is not None and chosen_quantized_impl(weight) == "triton":
        from tilefold.ops.lsr_head._triton import quantize

        made = try_kernels(call_on_device, quantize.quantize_rows, weight.detach())
        if not isinstance(made, KernelUnavailableError):
            return QuantizedWeight(*made)
        give_up(QUANTIZED_HEAD, weight.device, str(made), TILED_PATH_RUNS)
    refuse_capture(QUANTIZED_HEAD, weight.device)
    values = torch.empty(weight.shape, dtype=FP8, device=weight.device)
    scale = torch.empty(weight.size(0), dtype=torch.float32, device=weight.device)
    with torch.no_grad():
        for v0 in range(0, weight.size(0), SLAB_V):
            part = slice(v0, v0 + SLAB_V)
            values[part], scale[part] = quantize_rows(weight[part])
    return QuantizedWeight(values, scale)


def quantize_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """``[N, D]`` to fp8 values and ``[N]`` fp32 scales; the scale of a row of zeros is 1."""
    wide = rows.float()
    largest = wide.abs().amax(dim=-1)
    scale = torch.where(
        largest == 0,
        1.0,
        (largest / FP8_MAX).clamp(min=TINY),
    )  # NaN and infinity stay
    return (wide / scale[..., None]).clamp(-FP8_MAX, FP8_MAX).to(FP8), scale


def fake_quantized(rows: Tensor) -> Tensor:
    """``[..., D]`` rounded to fp8 with a scale per row, and back, in fp32."""
    values, scale = quantize_rows(rows)
    return values.float() * scale[..., None]


def chosen_quantized_impl(hidden: Tensor, impl: str = "auto") -> str:
    """Implementation that a quantised head runs: ``"triton"`` from compute capability 8.9 on, else
    ``"tiled"``.

    Raises:
        ValueError: for an unknown name.
        RuntimeError: for ``"triton"`` on a device that has no fp8 products.
    """
    resolved = resolve_impl(impl, hidden.device, QUANTIZED_HEAD)
    if (
        resolved == "triton"
        and hidden.is_cuda
        and torch.cuda.get_device_capability(hidden.device) < (8, 9)
    ):
        if impl == "auto":
            return "tiled"
        raise RuntimeError(
            f"impl='triton' cannot multiply fp8 on {torch.cuda.get_device_name(hidden.device)}: it needs compute "
            "capability 8.9. Use impl='auto', or the weight in 16 bits.",
        )
    return resolved
