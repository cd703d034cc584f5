"""Linear layers whose operands are rounded to fp8, for inference."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tilefold.ops import QuantizedWeight, quantize_weight
from tilefold.ops.fp8_products import SIZE_STEP, fp8_products

__all__ = ["fp8_linear", "fp8_rows", "has_fp8_sizes"]

_WEIGHT_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def has_fp8_sizes(layer: nn.Module) -> bool:
    """Return whether a module is a plain linear layer that :func:`fp8_linear` can compute.

    Both sizes must be multiples of 16, and the weight must be fp16, bf16 or fp32. Subclasses of
    ``nn.Linear`` are refused, because their forward may differ, as in quantised layers.

    Args:
        layer: any module.

    Examples:
        >>> from torch import nn
        >>> has_fp8_sizes(nn.Linear(768, 3072)), has_fp8_sizes(nn.Linear(768, 2))
        (True, False)
    """
    if type(layer) is not nn.Linear:
        return False
    has_sizes = layer.in_features % SIZE_STEP == 0 and layer.out_features % SIZE_STEP == 0
    return has_sizes and layer.weight.dtype in _WEIGHT_DTYPES


def fp8_rows(hidden: Tensor) -> QuantizedWeight:
    """Round hidden states to fp8 (e4m3), with one scale for each token.

    The largest entry of a token becomes 448. A token of zeros has the scale 1. A token with NaN or
    infinity has a scale of NaN or infinity.

    Args:
        hidden: hidden states ``[..., K]`` in fp16, bf16 or fp32.

    Returns:
        The values ``[N, K]`` and scales ``[N]`` of all N tokens, as a rounded weight has them.

    Examples:
        >>> import torch
        >>> fp8_rows(torch.randn(2, 5, 32)).shape
        torch.Size([10, 32])
    """
    return quantize_weight(hidden.flatten(0, -2))


def fp8_linear(
    hidden: Tensor | QuantizedWeight,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Compute ``hidden @ weight.T + bias``, with tokens and weight rounded to fp8.

    Each token and each row of the weight is divided by a scale, so that its largest entry becomes
    448, and rounded to e4m3: the relative error of an entry is at most 1/16. There is no gradient.

    The weight is rounded at every call, since its changes cannot always be detected. Rounding reads
    the weight once, which takes a small part of the time of a product with some thousand tokens.

    Args:
        hidden: hidden states ``[..., K]``, or their :func:`fp8_rows`, which several layers can
            share.
        weight: the weight ``[M, K]`` in fp16, bf16 or fp32. K and M are multiples of 16.
        bias: the bias ``[M]``.
        out_dtype: dtype of the result; that of ``hidden`` by default, and bf16 for rounded rows.

    Returns:
        ``[..., M]``, or ``[N, M]`` for rounded rows. A token or a row of the weight with NaN or
        infinity gives NaN.

    Raises:
        ValueError: if the device cannot multiply fp8, or a size is no multiple of 16; see
            :func:`tilefold.ops.fp8_products.fp8_products`.

    Examples:
        >>> import torch
        >>> hidden, weight = torch.randn(2, 5, 32), torch.randn(48, 32)
        >>> fp8_linear(hidden, weight).shape
        torch.Size([2, 5, 48])
    """
    if isinstance(hidden, Tensor):
        rows = fp8_rows(hidden)
        output = fp8_linear(rows, weight, bias, out_dtype=out_dtype or hidden.dtype)
        return output.view(*hidden.shape[:-1], output.size(1))
    rounded_weight = quantize_weight(weight)
    output = fp8_products(
        hidden.values,
        hidden.scale,
        rounded_weight.values,
        rounded_weight.scale,
        bias,
    )
    return output.to(out_dtype or torch.bfloat16)
