"""Token vectors with one byte per entry and one scale per token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tilefold.ops._shared.checks import FLOAT_DTYPES, check_choice, check_dtype, check_tensor
from tilefold.ops.maxsim._problem import QUANTIZED_DTYPES

# The largest entry of a token is mapped to this number.
_MAX_VALUE = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


@dataclass(frozen=True)
class QuantizedTokens:
    """Token vectors ``scales[..., None] * values``.

    Attributes:
        values: ``[.., D]`` int8 or float8_e4m3fn.
        scales: ``[..]`` fp32, not negative. The scale is NaN for a token with a NaN, and infinite
            for a token with an infinity. Both score NaN.

    Examples:
        >>> import torch
        >>> from tilefold.ops import quantize_tokens
        >>> tokens = quantize_tokens(torch.randn(3, 10, 16))
        >>> tokens.nbytes  # one byte per entry, and four per token
        600
        >>> tokens.dequantize().dtype
        torch.float32
    """

    values: Tensor
    scales: Tensor

    def __post_init__(self) -> None:
        """Raise an error for a wrong dtype, or unless each token has one scale on its device."""
        check_tensor("values", self.values)
        check_tensor("scales", self.scales)
        check_dtype("values", self.values, QUANTIZED_DTYPES, "make them with quantize_tokens.")
        check_dtype("scales", self.scales, (torch.float32,), "use scales.float().")
        if self.scales.shape != self.values.shape[:-1] or self.scales.device != self.values.device:
            raise ValueError(
                f"scales must have shape {list(self.values.shape[:-1])} on {self.values.device}, "
                f"got {list(self.scales.shape)} on {self.scales.device}; make both with "
                "quantize_tokens.",
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
        # torch can neither store nor load fp8, so that values are stored as bytes. The copies leave
        # out the rest of a larger tensor that the values are a slice of.
        value_bytes = self.values.detach().contiguous().clone().view(torch.uint8)
        return _unpickled, (value_bytes, self.values.dtype, self.scales.clone())

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the vectors ``[.., D]``, rounded to ``dtype``."""
        return (self.values.float() * self.scales[..., None]).to(dtype)


def _unpickled(value_bytes: Tensor, dtype: torch.dtype, scales: Tensor) -> QuantizedTokens:
    return QuantizedTokens(value_bytes.view(dtype), scales)


def quantize_tokens(documents: Tensor, dtype: str = "int8") -> QuantizedTokens:
    """Round token vectors to one byte per entry, symmetrically, with one fp32 scale per token.

    The largest entry of a token becomes 127 (int8) or 448 (fp8 e4m3). The error of an entry is at
    most half a step of ``max|x| / 127`` (int8), or 1/16 of the entry (fp8). Not differentiable.

    Args:
        documents: ``[.., D]`` token vectors, padded or packed; fp16, bf16, fp32 or fp64.
        dtype: ``"int8"`` or ``"fp8"``.

    Raises:
        TypeError: if ``documents`` is not a floating tensor.
        ValueError: for another ``dtype``, or a tensor without dimensions.

    Examples:
        >>> import torch
        >>> from tilefold.ops import maxsim
        >>> documents = torch.randn(3, 10, 16)
        >>> stored = quantize_tokens(documents)
        >>> stored.values.dtype, stored.scales.shape
        (torch.int8, torch.Size([3, 10]))
        >>> maxsim(torch.randn(2, 4, 16), stored).shape
        torch.Size([2, 3])
    """
    check_tensor("documents", documents)
    check_dtype("documents", documents, FLOAT_DTYPES, "cast it with .to(torch.float32).")
    check_choice("dtype", dtype, tuple(_DTYPES))
    if documents.dim() == 0:
        raise ValueError("documents must have a last dimension D, got shape [].")
    with torch.no_grad():
        return QuantizedTokens(*quantize_rows(documents, _DTYPES[dtype]))


def quantize_rows(rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Round rows to one byte per entry.

    ``scale = max|x| / max_value`` and ``value = round(x / scale)``.

    Args:
        rows: ``[.., D]``.
        dtype: int8 or float8_e4m3fn, whose ``max_value`` is 127 or 448.

    Returns:
        ``[.., D]`` values in ``dtype``, and ``[..]`` fp32 scales.
    """
    rows = rows.float()
    if rows.size(-1) == 0:
        return rows.to(dtype), rows.new_zeros(rows.shape[:-1])
    max_value = _MAX_VALUE[dtype]
    # The divisor is a tensor: on a GPU, torch multiplies by the inverse of a Python number. The
    # last bit of the scale would differ, and ties would be rounded differently.
    scales = rows.abs().amax(dim=-1) / rows.new_full((), max_value)
    values = rows / torch.where(scales > 0, scales, 1)[..., None]
    if dtype == torch.int8:
        values = values.round_()
    # A token with NaN or infinity has such a scale, too, so its values do not matter.
    values = values.nan_to_num_(0.0).clamp_(-max_value, max_value)
    return values.to(dtype), scales
