"""What the public functions say about arguments that do not fit together, before a value is read."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tilefold.ops._shared.checks import (
    FLOAT_DTYPES,
    check_choice,
    check_dtype,
    check_same_device,
    check_shape,
    check_tensor,
    dtype_name,
)
from tilefold.ops._shared.impl import IMPLS, check_interpreted, settled
from tilefold.ops.lsr_head._activation import ACTIVATIONS
from tilefold.ops.lsr_head._quantized import QuantizedWeight, chosen_quantized_impl

POOLINGS = ("max", "sum", "mean", "cls", "last")


def check_head(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    attention_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    pooling: str,
    activation: str,
    logit_scale: float,
) -> torch.dtype:
    """Check everything that can be checked without reading a value; return the dtype of the products."""
    check_choice("pooling", pooling, POOLINGS)
    check_choice("activation", activation, ACTIVATIONS)
    if not isinstance(logit_scale, (int, float)) or not -math.inf < logit_scale < math.inf:
        raise ValueError(
            f"logit_scale must be a finite Python number, got {logit_scale!r}; "
            "multiply hidden by a tensor to learn a scale."
        )
    check_tensor("hidden", hidden)
    check_tensor("weight", weight)
    check_shape("hidden", hidden, "B S D" if cu_seqlens is None else "T D")
    check_shape("weight", weight, "V D", D=hidden.size(-1))
    for name, value, size in (("D", hidden, hidden.size(-1)), ("V", weight, weight.size(0))):
        if size == 0:
            raise ValueError(f"{name} must be at least 1, got {name}=0 in shape {list(value.shape)}.")
    if bias is not None:
        check_shape("bias", check_tensor("bias", bias), "V", V=weight.size(0))
    if attention_mask is not None:
        check_tensor("attention_mask", attention_mask)
        if cu_seqlens is not None:
            raise ValueError(
                "attention_mask must be None with packed input, got a tensor; cu_seqlens already says which rows "
                "belong to which sequence."
            )
        check_shape("attention_mask", attention_mask, "B S", B=hidden.size(0), S=hidden.size(1))
        if attention_mask.is_complex():
            raise TypeError(f"attention_mask must be bool, integer or floating, got {attention_mask.dtype}.")
    if cu_seqlens is not None:
        check_tensor("cu_seqlens", cu_seqlens)
        check_dtype("cu_seqlens", cu_seqlens, (torch.int32, torch.int64), "use cu_seqlens.int().")
        if cu_seqlens.dim() != 1 or cu_seqlens.numel() == 0:
            raise ValueError(f"cu_seqlens must have shape [B + 1], got {list(cu_seqlens.shape)}.")
    check_same_device(
        "hidden",
        hidden,
        {"weight": weight, "bias": bias, "attention_mask": attention_mask, "cu_seqlens": cu_seqlens},
    )
    return _check_dtypes(hidden, weight, bias)


def _check_dtypes(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> torch.dtype:
    remedy = "cast it with .to(torch.bfloat16) or another of these."
    check_dtype("hidden", hidden, FLOAT_DTYPES, remedy)
    check_dtype("weight", weight, FLOAT_DTYPES, remedy)
    if bias is not None:
        check_dtype("bias", bias, FLOAT_DTYPES, remedy)
    device_type = hidden.device.type
    if (
        hidden.dtype != torch.float64
        and device_type != "meta"  # has no autocast state to ask for
        and torch.is_autocast_enabled(device_type)
    ):
        return torch.get_autocast_dtype(device_type)
    if weight.dtype != hidden.dtype:
        raise TypeError(
            f"weight must have the dtype of hidden ({dtype_name(hidden.dtype)}), got {dtype_name(weight.dtype)}; "
            "cast one of them, or run under torch.autocast."
        )
    return hidden.dtype


def check_quantized_head(
    hidden: Tensor,
    weight: QuantizedWeight,
    bias: Tensor | None,
    attention_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    pooling: str,
    activation: str,
    logit_scale: float,
    out_dtype: torch.dtype | None,
    impl: str,
) -> tuple[torch.dtype, str]:
    """The checks of the plain head, for a weight in fp8; return the dtype of the scores and the implementation."""
    check_tensor("hidden", hidden)
    stand_in = torch.empty((), dtype=hidden.dtype, device=weight.device).expand(weight.shape)
    compute_dtype = check_head(hidden, stand_in, bias, attention_mask, cu_seqlens, pooling, activation, logit_scale)
    if pooling != "max":
        raise ValueError(f"pooling must be 'max' with a QuantizedWeight, got {pooling!r}; use the weight in 16 bits.")
    if hidden.dtype == torch.float64:
        raise TypeError("hidden must be fp16, bf16 or fp32 with a QuantizedWeight, got float64; use hidden.float().")
    if torch.is_grad_enabled() and (hidden.requires_grad or (bias is not None and bias.requires_grad)):
        raise ValueError(
            "hidden and bias must not require a gradient with a QuantizedWeight, which is for inference; use "
            "torch.no_grad(), or train with the weight in 16 bits."
        )
    out_dtype = check_out_dtype(out_dtype, compute_dtype)
    if torch.compiler.is_compiling():
        check_choice("impl", impl, IMPLS)
    else:
        impl = settled(impl, chosen_quantized_impl(hidden, impl))
        check_interpreted(impl, hidden.device, hidden.dtype, out_dtype)
    return out_dtype, impl


def check_main_grad(main_grad: Tensor, weight: Tensor, pooling: str, impl: str) -> None:
    if pooling != "max" or impl == "reference":
        raise ValueError(
            f"weight_main_grad must be None with pooling={pooling!r} and impl={impl!r}, got a tensor; only max pooling "
            "of the tiled and triton implementations accumulates, elsewhere add weight.grad to it yourself."
        )
    check_shape(
        "weight_main_grad", check_tensor("weight_main_grad", main_grad), "V D", V=weight.size(0), D=weight.size(1)
    )
    check_dtype(
        "weight_main_grad",
        main_grad,
        (torch.float32,),
        "allocate it with torch.zeros_like(weight, dtype=torch.float32).",
    )
    check_same_device("weight", weight, {"weight_main_grad": main_grad})
    if not main_grad.is_contiguous() or main_grad.requires_grad:
        raise ValueError(
            "weight_main_grad must be contiguous and must not require a gradient, got strides "
            f"{main_grad.stride()} and requires_grad={main_grad.requires_grad}; use torch.zeros(V, D)."
        )
    if torch.is_grad_enabled() and not weight.requires_grad:
        raise ValueError(
            "weight_main_grad must be None where weight needs no gradient, got a tensor; call weight.requires_grad_() "
            "or leave it out."
        )


def check_out_dtype(out_dtype: torch.dtype | None, default: torch.dtype) -> torch.dtype:
    if out_dtype is None:
        return default
    if out_dtype not in FLOAT_DTYPES:
        names = ", ".join(dtype_name(dtype) for dtype in FLOAT_DTYPES)
        raise TypeError(f"out_dtype must be one of {names} or None, got {out_dtype!r}.")
    return out_dtype
