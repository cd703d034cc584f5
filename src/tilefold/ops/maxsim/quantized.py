"""Token vectors in one byte per entry, with one scale per token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tilefold.ops._shared.checks import FLOAT_DTYPES, check_choice, check_dtype, check_tensor
from tilefold.ops.maxsim._problem import QUANTIZED_DTYPES

# the largest number of each format that a token's largest entry is mapped to
_MAX_VALUE = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


@dataclass(frozen=True)
class QuantizedTokens:
    """Token vectors ``scales[..., None] * values``.

    Attributes:
        values: ``[.., D]`` int8 or float8_e4m3fn.
        scales: ``[..]`` fp32, not negative; NaN for a token that held one, infinite for one that
            held an infinity: both score NaN.
    """

    values: Tensor
    scales: Tensor

    def __post_init__(self) -> None:
        check_tensor("values", self.values)
        check_tensor("scales", self.scales)
        check_dtype("values", self.values, QUANTIZED_DTYPES, "make them with quantize_tokens.")
        check_dtype("scales", self.scales, (torch.float32,), "use scales.float().")
        if self.scales.shape != self.values.shape[:-1] or self.scales.device != self.values.device:
            raise ValueError(
                f"scales must have shape {list(self.values.shape[:-1])} on {self.values.device}, got "
                f"{list(self.scales.shape)} on {self.scales.device}; make both with quantize_tokens.",
            )

    @property
    def nbytes(self) -> int:
        """Bytes of values and scales."""
        return (
            self.values.numel() * self.values.element_size()
            + self.scales.numel() * self.scales.element_size()
        )

    def to(self, device: torch.device | str) -> QuantizedTokens:
        """Return the tokens on ``device``."""
        return QuantizedTokens(self.values.to(device), self.scales.to(device))

    def __copy__(self) -> QuantizedTokens:
        return QuantizedTokens(self.values, self.scales)

    def __reduce__(self) -> tuple[Callable[..., QuantizedTokens], tuple[object, ...]]:
        # torch neither stores fp8 nor reads it; of a slice only what it shows is kept
        stored = self.values.detach().contiguous().clone().view(torch.uint8)
        return _unpickled, (stored, self.values.dtype, self.scales.clone())

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The vectors ``[.., D]`` that the numbers stand for, rounded to ``dtype``."""
        return (self.values.float() * self.scales[..., None]).to(dtype)


def _unpickled(stored: Tensor, dtype: torch.dtype, scales: Tensor) -> QuantizedTokens:
    return QuantizedTokens(stored.view(dtype), scales)


def quantize_tokens(documents: Tensor, dtype: str = "int8") -> QuantizedTokens:
    """Round token vectors to one byte per entry, symmetrically, with one fp32 scale per token.

    The token's largest entry becomes 127 (int8) or 448 (fp8 e4m3); each entry is off by at most
    half a step of ``max|x| / 127`` (int8), or by 1/16 of itself (fp8). Not differentiable.

    Args:
        documents: ``[.., D]`` token vectors, padded or packed; fp16, bf16, fp32 or fp64.
        dtype: ``"int8"`` or ``"fp8"``.

    Raises:
        TypeError, ValueError: for what is no floating tensor; for another name, or a tensor without
            dimensions.
    """
    check_tensor("documents", documents)
    check_dtype("documents", documents, FLOAT_DTYPES, "cast it with .to(torch.float32).")
    check_choice("dtype", dtype, tuple(_DTYPES))
    if documents.dim() == 0:
        raise ValueError("documents must have a last dimension D, got shape [].")
    with torch.no_grad():
        return QuantizedTokens(*quantize_rows(documents, _DTYPES[dtype]))


def quantize_rows(rows: Tensor, kind: torch.dtype) -> tuple[Tensor, Tensor]:
    """Values and scales of ``[.., D]`` rows: ``scale = max|x| / largest``, ``value = round(x /
    scale)``.
    """
    rows = rows.float()
    if rows.size(-1) == 0:
        return rows.to(kind), rows.new_zeros(rows.shape[:-1])
    # by a tensor: on a GPU, torch multiplies by the inverse of a number, and a last bit decides
    # ties of the rounding
    scales = rows.abs().amax(dim=-1) / rows.new_full((), _MAX_VALUE[kind])
    values = rows / torch.where(scales > 0, scales, 1)[..., None]
    if kind == torch.int8:
        values = values.round_().nan_to_num_(0.0).clamp_(-127, 127)
    else:
        values = values.nan_to_num_(0.0).clamp_(-448, 448)
    return values.to(kind), scales
