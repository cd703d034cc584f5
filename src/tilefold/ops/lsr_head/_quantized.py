"""Quantised weights of the LSR head, for inference, and the choice of their implementation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from tilefold.ops._shared.calls import Key, call_key, call_on_device, is_aligned
from tilefold.ops._shared.checks import FLOAT_DTYPES, check_dtype, check_shape, check_tensor
from tilefold.ops._shared.fallback import refuse_capture, run_or_record_failure
from tilefold.ops._shared.impl import resolve_impl
from tilefold.ops._shared.internals import current_gpu

if TYPE_CHECKING:
    from tilefold.ops._shared._triton.program import Program

FP8 = torch.float8_e4m3fn
QUANTIZED_HEAD = "lsr_head with an fp8 weight"
FP8_MAX = 448.0
SMALLEST_NORMAL = 2.0**-126  # of fp32
SLAB_V = 16384  # rows that are converted at a time
FP8_CAPABILITY = (8, 9)  # the first compute capability whose tensor cores multiply fp8
# Longest row that torch's compiler holds in registers. It computes longer rows twice: once for the
# largest entry, and once to round them.
MAX_FUSED_D = 1024
MAX_PROGRAMS = 4096  # layouts of weights or token states whose launches are remembered
_PROGRAMS: dict[Key, Program] = {}


@dataclass(frozen=True)
class QuantizedWeight:
    """A decoder weight in fp8 (e4m3) with one scale per row.

    It represents ``weight[v, d] = scale[v] * values[v, d]``. It takes half the bytes of bf16, and
    is multiplied at twice the rate. Make it with :func:`quantize_weight`, and pass it to
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
        """Return a slice of vocabulary rows, without a copy."""
        if not isinstance(rows, slice):
            raise TypeError(
                f"rows must be a slice, got {type(rows).__name__}; weight[v:v + 1] is one row.",
            )
        return QuantizedWeight(self.values[rows], self.scale[rows])

    def __copy__(self) -> QuantizedWeight:
        return QuantizedWeight(self.values, self.scale)

    def __reduce__(self) -> tuple[Callable[..., QuantizedWeight], tuple[object, ...]]:
        # Torch cannot store fp8, so its bytes are. The copies hold only the rows of a slice.
        value_bytes = self.values.detach().contiguous().clone().view(torch.uint8)
        return _unpickle, (value_bytes, self.values.dtype, self.scale.clone())

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the weight that the quantised head multiplies with, ``[V, D]`` in ``dtype``."""
        return (self.values.float() * self.scale[:, None]).to(dtype)


def _unpickle(value_bytes: Tensor, dtype: torch.dtype, scale: Tensor) -> QuantizedWeight:
    """Restore a weight from the bytes of its values."""
    return QuantizedWeight(value_bytes.view(dtype), scale)


def quantize_weight(weight: Tensor) -> QuantizedWeight:
    """Round a decoder weight to fp8 (e4m3), each row scaled so that its largest entry becomes 448.

    Rows of zeros get the scale 1. A row with NaN or infinity gives NaN scores, as in the plain
    head. The relative rounding error of an entry is at most 1/16. Entries near zero are subnormal
    in fp8, with an absolute error of at most 2^-10 times the scale.

    On a GPU that can multiply fp8, a single kernel reads the weight and writes it in fp8, with the
    same scales and values as on a CPU. If that kernel cannot be built, this function and the
    quantised head run in torch, after one warning.

    Under ``torch.compile`` on a GPU, torch's compiler rounds rows of up to 1,024 entries. Its
    division may round an entry halfway between two numbers of fp8 to the other one.

    Args:
        weight: ``[V, D]``, fp16, bf16, fp32 or fp64, on any device. It is copied, so later changes
            have no effect: quantise again after an optimiser step.

    Raises:
        TypeError: if the weight is not a tensor of one of these dtypes.
        ValueError: if its shape is wrong.

    Examples:
        >>> import torch
        >>> from tilefold.ops import lsr_head
        >>> decoder = torch.randn(100, 16)
        >>> scores = lsr_head(torch.randn(2, 5, 16), quantize_weight(decoder))
        >>> scores.shape
        torch.Size([2, 100])
    """
    # The key of a call holds the layout of the weight. It is None if torch traces the call, or for
    # a subclass of Tensor.
    key = call_key((weight,), ())
    program = None if key is None else _PROGRAMS.get(key)
    if program is not None and program.bound and weight.get_device() == current_gpu():
        return _run(program, weight)  # a weight of this layout has passed the checks before
    check_shape("weight", check_tensor("weight", weight), "V D")
    check_dtype("weight", weight, FLOAT_DTYPES, "cast it with .to(torch.bfloat16).")
    if weight.size(1) == 0:
        raise ValueError(f"D must be at least 1, got D=0 in shape {list(weight.shape)}.")
    if key is not None and len(weight) and chosen_quantized_impl(weight) == "triton":
        quantized: QuantizedWeight | None = run_or_record_failure(
            QUANTIZED_HEAD,
            weight.device,
            call_on_device,
            weight.device,
            _quantize_by_kernel,
            weight,
            key,
        )
        if quantized is not None:
            return quantized
    if torch.compiler.is_compiling():
        return _quantize_in_trace(weight)
    refuse_capture(QUANTIZED_HEAD, weight.device)
    values = torch.empty(weight.shape, dtype=FP8, device=weight.device)
    scale = torch.empty(weight.size(0), dtype=torch.float32, device=weight.device)
    with torch.no_grad():
        for first_row in range(0, weight.size(0), SLAB_V):
            slab = slice(first_row, first_row + SLAB_V)
            values[slab], scale[slab] = quantize_rows(weight[slab])
    return QuantizedWeight(values, scale)


def _quantize_in_trace(weight: Tensor) -> QuantizedWeight:
    """Round a weight to fp8 while torch.compile traces the call.

    Torch's compiler fuses the rounding of short rows with the operations that compute the weight.
    All rows are rounded at once: in slabs, the traced code would depend on their number.
    """
    with torch.no_grad():
        if _needs_kernel_when_compiled(weight):
            return QuantizedWeight(*torch.ops.tilefold.quantize_weight(weight))
        return QuantizedWeight(*quantize_rows(weight))


def _needs_kernel_when_compiled(weight: Tensor) -> bool:
    """Return whether our kernel rounds the rows faster than the code of torch's compiler."""
    return weight.is_cuda and weight.size(1) > MAX_FUSED_D


def _registered_quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Run ``tilefold::quantize_weight``, :func:`quantize_weight` as an operator of torch."""
    quantized = quantize_weight(weight)
    return quantized.values, quantized.scale


def _fake_quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the values and scales without numbers, for tracing."""
    scale = weight.new_empty(weight.size(0), dtype=torch.float32)
    return weight.new_empty(weight.shape, dtype=FP8), scale


torch.library.define("tilefold::quantize_weight", "(Tensor weight) -> (Tensor, Tensor)")
torch.library.impl("tilefold::quantize_weight", "default", _registered_quantize)
torch.library.register_fake("tilefold::quantize_weight", _fake_quantize)


def _run(program: Program, weight: Tensor) -> QuantizedWeight:
    """Round a weight by a program of its layout."""
    values, scale = cast("tuple[Tensor, Tensor]", program(weight))
    return QuantizedWeight(values, scale)


def _quantize_by_kernel(weight: Tensor, key: Key) -> QuantizedWeight:
    """Round a weight by the kernel, and remember the launch for the next weight of this layout.

    Args:
        weight: ``[V, D]`` on the current device, with V > 0.
        key: layout of the weight, under which the launch is remembered.

    Raises:
        KernelUnavailableError: if the kernel cannot be built.
    """
    from tilefold.ops.lsr_head._triton import quantize  # needs Triton

    if not weight.is_contiguous():
        rows = weight.contiguous()
        return _run(quantize.make_program(rows, aligned=False), rows)
    program = _PROGRAMS.get(key)
    if program is None:
        program = quantize.make_program(weight, is_aligned(key))
        if len(_PROGRAMS) >= MAX_PROGRAMS:
            _PROGRAMS.clear()
        _PROGRAMS[key] = program
    return _run(program, weight)


def quantize_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Round rows ``[N, D]`` to fp8, with ``[N]`` fp32 scales.

    The scale of a row of zeros is 1. NaN and infinity become scales of NaN and infinity.
    """
    wide = rows.float()
    largest = wide.abs().amax(dim=-1)
    scale = (largest / FP8_MAX).clamp(min=SMALLEST_NORMAL)
    scale = torch.where(largest == 0, 1.0, scale)
    return (wide / scale[..., None]).clamp(-FP8_MAX, FP8_MAX).to(FP8), scale


def fake_quantized(rows: Tensor) -> Tensor:
    """Round rows ``[..., D]`` to fp8 with a scale per row, and return them in fp32."""
    values, scale = quantize_rows(rows)
    return values.float() * scale[..., None]


def chosen_quantized_impl(hidden: Tensor, impl: str = "auto") -> str:
    """Return the implementation that a head with a quantised weight runs.

    ``"auto"`` chooses ``"triton"`` from compute capability 8.9 on, else ``"tiled"``.

    Args:
        hidden: token states, whose device decides.
        impl: implementation that the caller chose.

    Raises:
        ValueError: if the name is unknown.
        RuntimeError: if ``"triton"`` cannot run, or the device cannot multiply fp8.
    """
    resolved = resolve_impl(impl, hidden.device, QUANTIZED_HEAD)
    if (
        resolved == "triton"
        and hidden.is_cuda
        and torch.cuda.get_device_capability(hidden.device) < FP8_CAPABILITY
    ):
        if impl == "auto":
            return "tiled"
        raise RuntimeError(
            f"impl='triton' cannot multiply fp8 on {torch.cuda.get_device_name(hidden.device)}: "
            "it needs compute capability 8.9. Use impl='auto', or the weight in 16 bits.",
        )
    return resolved
