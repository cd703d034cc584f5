"""What the public functions say about arguments that do not fit together, before a value is read."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tilefold.ops._shared.activation import ACTIVATIONS
from tilefold.ops._shared.checks import (
    FLOAT_DTYPES,
    check_choice,
    check_dtype,
    check_out_dtype,
    check_same_device,
    check_shape,
    check_tensor,
    check_tokens,
    dtype_name,
)
from tilefold.ops._shared.impl import IMPLS, check_interpreted, chosen_impl, settled
from tilefold.ops.lsr_head._problem import POOLINGS, Asked, HeadOptions, Tokens
from tilefold.ops.lsr_head._quantized import QuantizedWeight, chosen_quantized_impl


def checked_options(
    tokens: Tokens, weight: Tensor | QuantizedWeight, bias: Tensor | None, asked: Asked, main_grad: Tensor | None
) -> HeadOptions:
    """The options of a call, all of whose arguments fit together as far as that shows without reading a value."""
    quantized = isinstance(weight, QuantizedWeight)
    compute_dtype, out_dtype = check_head(tokens, weight, bias, asked)
    training = torch.is_grad_enabled() and any(
        tensor is not None and tensor.requires_grad
        for tensor in (tokens.hidden, None if isinstance(weight, QuantizedWeight) else weight, bias)
    )
    if isinstance(weight, QuantizedWeight):
        _check_inference(training, main_grad)
    elif main_grad is not None:
        _check_main_grad(main_grad, weight, asked)
    impl = asked.impl
    if torch.compiler.is_compiling():
        check_choice("impl", impl, IMPLS)  # the operators choose when they run: a device cannot be asked in a trace
    else:
        hidden = tokens.hidden
        chosen = chosen_quantized_impl(hidden, impl) if quantized else chosen_impl("lsr_head", "hidden", hidden, impl)
        impl = settled(impl, chosen)
        check_interpreted(impl, hidden.device, hidden.dtype if quantized else compute_dtype, out_dtype)
    return HeadOptions(
        asked.pooling, asked.activation, float(asked.logit_scale), out_dtype, compute_dtype, training, impl
    )


def check_head(
    tokens: Tokens, weight: Tensor | QuantizedWeight, bias: Tensor | None, asked: Asked
) -> tuple[torch.dtype, torch.dtype]:
    """Check what a head of any kind asks of its arguments; return the dtypes of the products and of the scores."""
    if isinstance(weight, QuantizedWeight):
        check_tensor("hidden", tokens.hidden)
        stand_in = torch.empty((), dtype=tokens.hidden.dtype, device=weight.device).expand(weight.shape)
        compute_dtype = _check_plain_head(tokens, stand_in, bias, asked)
        if asked.pooling != "max":
            raise ValueError(
                f"pooling must be 'max' with a QuantizedWeight, got {asked.pooling!r}; use the weight in 16 bits."
            )
        if tokens.hidden.dtype == torch.float64:
            raise TypeError(
                "hidden must be fp16, bf16 or fp32 with a QuantizedWeight, got float64; use hidden.float()."
            )
    else:
        compute_dtype = _check_plain_head(tokens, weight, bias, asked)
    if asked.out_dtype is None:
        return compute_dtype, compute_dtype
    check_out_dtype(asked.out_dtype)
    return compute_dtype, asked.out_dtype


def _check_plain_head(tokens: Tokens, weight: Tensor, bias: Tensor | None, asked: Asked) -> torch.dtype:
    """The dtype of the products of a head whose arguments fit together."""
    (hidden, attention_mask, cu_seqlens), logit_scale = tokens, asked.logit_scale
    check_choice("pooling", asked.pooling, tuple(POOLINGS))
    check_choice("activation", asked.activation, ACTIVATIONS)
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
    check_tokens(attention_mask, cu_seqlens, "rows", B=hidden.size(0), S=hidden.size(1))
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


def _check_inference(training: bool, main_grad: Tensor | None) -> None:
    if training:
        raise ValueError(
            "hidden and bias must not require a gradient with a QuantizedWeight, which is for inference; use "
            "torch.no_grad(), or train with the weight in 16 bits."
        )
    if main_grad is not None:
        raise ValueError("weight_main_grad must be None with a QuantizedWeight, which has no gradient; leave it out.")


def _check_main_grad(main_grad: Tensor, weight: Tensor, asked: Asked) -> None:
    if asked.pooling != "max" or asked.impl == "reference":
        raise ValueError(
            f"weight_main_grad must be None with pooling={asked.pooling!r} and impl={asked.impl!r}, got a tensor; only "
            "max pooling of the tiled and triton implementations accumulates, elsewhere add weight.grad to it yourself."
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
