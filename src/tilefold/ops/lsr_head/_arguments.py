"""Checks of the arguments of the head's public functions, which read no value of a tensor."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tilefold.ops._shared.activation import ACTIVATIONS
from tilefold.ops._shared.autocast import autocast_dtype
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
from tilefold.ops._shared.operator import Checked
from tilefold.ops.lsr_head._problem import POOLINGS, HeadOptions, HeadTensors


def check_arguments(
    tensors: HeadTensors,
    pooling: str,
    activation: str,
    logit_scale: float,
    out_dtype: torch.dtype | None,
    screen: bool = False,
    impl: str = "auto",
    _require_grad: tuple[bool, ...] = (),
    main_grad: Tensor | None = None,
) -> Checked:
    """Check the arguments of :func:`lsr_head`, and return the operator's options.

    Args:
        tensors: tensors of the call.
        pooling: name of the pooling.
        activation: name of the activation.
        logit_scale: factor of the logits.
        out_dtype: dtype of the scores; ``None`` for the dtype of the products.
        screen: whether an int8 product first excludes scores that cannot be positive.
        impl: implementation, for the check of ``main_grad``.
        _require_grad: ignored; an option of the call that only its cache key needs.
        main_grad: buffer for the weight's gradient, or ``None``.
    """
    compute_dtype, out_dtype = check_head(tensors, pooling, activation, logit_scale, out_dtype)
    if not isinstance(screen, bool):
        raise TypeError(f"screen must be True or False, got {screen!r}.")
    if tensors.weight_scale is not None:
        _check_inference(tensors, main_grad)
    elif main_grad is not None:
        _check_main_grad(main_grad, tensors.weight, pooling, impl)
    bias_dtype = None if tensors.bias is None else tensors.bias.dtype
    return Checked(
        HeadOptions(
            pooling=pooling,
            activation=activation,
            logit_scale=float(logit_scale),
            out_dtype=out_dtype,
            compute_dtype=compute_dtype,
            bias_dtype=bias_dtype,
            screen=screen,
        ),
    )


def check_head(
    tensors: HeadTensors,
    pooling: str,
    activation: str,
    logit_scale: float,
    out_dtype: torch.dtype | None,
) -> tuple[torch.dtype, torch.dtype]:
    """Check the arguments that all functions of the head share.

    Args:
        tensors: tensors of the call.
        pooling: name of the pooling.
        activation: name of the activation.
        logit_scale: factor of the logits.
        out_dtype: dtype of the scores, or ``None`` for the dtype of the products.

    Returns:
        Dtype of the products, and dtype of the scores.
    """
    hidden, attention_mask, cu_seqlens, weight, weight_scale, bias = tensors
    _check_options(pooling, activation, logit_scale)
    check_tensor("hidden", hidden)
    check_tensor("weight", weight)
    if weight_scale is not None:
        # The checks below expect a weight in the dtype of hidden, so this one stands in for it.
        weight = torch.empty((), dtype=hidden.dtype, device=weight.device).expand(weight.shape)
    _check_shapes(hidden, weight, bias, attention_mask, cu_seqlens)
    others = {
        "weight": weight,
        "bias": bias,
        "attention_mask": attention_mask,
        "cu_seqlens": cu_seqlens,
    }
    check_same_device("hidden", hidden, others)
    for name, operand in (("hidden", hidden), ("weight", weight), ("bias", bias)):
        if operand is not None:
            check_dtype(
                name,
                operand,
                FLOAT_DTYPES,
                "cast it with .to(torch.bfloat16) or another of these.",
            )
    compute_dtype = product_dtype(hidden, weight)
    if weight_scale is not None:
        _check_quantized(hidden, pooling)
    if out_dtype is None:
        return compute_dtype, compute_dtype
    check_out_dtype(out_dtype)
    return compute_dtype, out_dtype


def _check_options(pooling: str, activation: str, logit_scale: float) -> None:
    """Raise ``ValueError`` for an unknown pooling or activation, or an invalid scale."""
    check_choice("pooling", pooling, tuple(POOLINGS))
    check_choice("activation", activation, ACTIVATIONS)
    if not isinstance(logit_scale, (int, float)) or not -math.inf < logit_scale < math.inf:
        raise ValueError(
            f"logit_scale must be a finite Python number, got {logit_scale!r}; "
            "multiply hidden by a tensor to learn a scale.",
        )


def _check_shapes(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    attention_mask: Tensor | None,
    cu_seqlens: Tensor | None,
) -> None:
    """Raise ``ValueError`` if shapes are inconsistent, or if D or V is 0.

    Masks and offsets of a wrong type raise ``TypeError``.

    Args:
        hidden: token states ``[B, S, D]``, or packed ``[T, D]``.
        weight: ``[V, D]``.
        bias: ``[V]``, or ``None``.
        attention_mask: ``[B, S]``, or ``None``.
        cu_seqlens: offsets ``[B + 1]`` of packed tokens, or ``None``.
    """
    check_shape("hidden", hidden, "B S D" if cu_seqlens is None else "T D")
    check_shape("weight", weight, "V D", D=hidden.size(-1))
    if hidden.size(-1) == 0:
        raise ValueError(f"D must be at least 1, got D=0 in shape {list(hidden.shape)}.")
    if weight.size(0) == 0:
        raise ValueError(f"V must be at least 1, got V=0 in shape {list(weight.shape)}.")
    if bias is not None:
        check_shape("bias", check_tensor("bias", bias), "V", V=weight.size(0))
    check_tokens(attention_mask, cu_seqlens, batch=hidden.size(0), length=hidden.size(1))


def _check_quantized(hidden: Tensor, pooling: str) -> None:
    """Raise an error for a pooling or a dtype that a quantised weight does not support.

    Raises:
        TypeError: if hidden is fp64.
        ValueError: if the pooling is not max.
    """
    if pooling != "max":
        raise ValueError(
            f"pooling must be 'max' with a QuantizedWeight, got {pooling!r}; "
            "use the weight in 16 bits.",
        )
    if hidden.dtype == torch.float64:
        raise TypeError(
            "hidden must be fp16, bf16 or fp32 with a QuantizedWeight, got float64; "
            "use hidden.float().",
        )


def product_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    """Return the dtype of the products: autocast's, or the common one of hidden and weight.

    Raises:
        TypeError: if the two differ without autocast.
    """
    autocast = autocast_dtype(hidden, weight)
    if autocast is not None:
        return autocast
    if weight.dtype != hidden.dtype:
        raise TypeError(
            f"weight must have the dtype of hidden ({dtype_name(hidden.dtype)}), got "
            f"{dtype_name(weight.dtype)}; cast one of them, or run under torch.autocast.",
        )
    return hidden.dtype


def _check_inference(tensors: HeadTensors, main_grad: Tensor | None) -> None:
    """Raise ``ValueError`` if a gradient is needed with a quantised weight.

    Args:
        tensors: tensors of the call.
        main_grad: buffer to which the gradient of the weight would be added, or ``None``.
    """
    others = [tensors.hidden] if tensors.bias is None else [tensors.hidden, tensors.bias]
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in others):
        raise ValueError(
            "hidden and bias must not require a gradient with a QuantizedWeight, which is for "
            "inference; use torch.no_grad(), or train with an unquantised weight.",
        )
    if main_grad is not None:
        raise ValueError(
            "weight_main_grad must be None with a QuantizedWeight, which has no gradient; leave it "
            "out.",
        )


def _check_main_grad(main_grad: Tensor, weight: Tensor, pooling: str, impl: str) -> None:
    """Raise an error if the weight's gradient cannot be added to ``main_grad``.

    Raises:
        TypeError: if its dtype is not fp32.
        ValueError: if its shape or layout, the pooling or the implementation is not supported.
    """
    if pooling != "max" or impl == "reference":
        raise ValueError(
            f"weight_main_grad must be None with pooling={pooling!r} and impl={impl!r}, got a "
            "tensor; only max pooling of the tiled and triton implementations accumulates, so add "
            "weight.grad to it yourself.",
        )
    vocab, dim = weight.shape
    check_shape(
        "weight_main_grad",
        check_tensor("weight_main_grad", main_grad),
        "V D",
        V=vocab,
        D=dim,
    )
    remedy = "allocate it with torch.zeros_like(weight, dtype=torch.float32)."
    check_dtype("weight_main_grad", main_grad, (torch.float32,), remedy)
    check_same_device("weight", weight, {"weight_main_grad": main_grad})
    if not main_grad.is_contiguous() or main_grad.requires_grad:
        raise ValueError(
            "weight_main_grad must be contiguous and must not require a gradient, got strides "
            f"{main_grad.stride()} and requires_grad={main_grad.requires_grad}; use torch.zeros(V, "
            f"D).",
        )
    if torch.is_grad_enabled() and not weight.requires_grad:
        raise ValueError(
            "weight_main_grad must be None if weight needs no gradient, got a tensor; call "
            "weight.requires_grad_() or leave it out.",
        )
