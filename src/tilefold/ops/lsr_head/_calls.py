"""Calls of one kind: what makes the kind, and what was worked out for it.

Checks, and whatever leads from shapes and options to a launch, take longer than a small kernel. On a GPU they look at
nothing but shapes, dtypes, devices and options, so a call like one that passed passes. No value of a tensor, no address
and no buffer is kept.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from tilefold.ops._shared.internals import no_dispatch_mode
from tilefold.ops._shared.library import PLAIN
from tilefold.ops._shared.tf32 import tf32_allowed
from tilefold.ops.lsr_head._layout import Plans
from tilefold.ops.lsr_head._quantized import QuantizedWeight

MOST_SEEN = 2048  # what is forgotten is worked out again

Signature = tuple[Any, ...]

_SEEN: dict[Signature, Plans] = {}


def call_signature(
    hidden: Tensor,
    weight: Tensor | QuantizedWeight,
    bias: Tensor | None,
    attention_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    main_grad: Tensor | None,
    options: tuple[object, ...],
) -> Signature | None:
    """Shapes, dtypes, device and options of a call, or ``None`` where the checks depend on more.

    Written out, without loops: this is looked at in every call.
    """
    if torch.compiler.is_compiling() or type(hidden) not in PLAIN or not hidden.is_cuda:
        return None
    quantized = type(weight) is QuantizedWeight
    values: Any = weight.values if quantized else weight
    if type(values) not in PLAIN or not no_dispatch_mode() or forward_ad._current_level >= 0:
        return None  # what wants to see the registered operator, or must be refused
    device: int = hidden.get_device()
    scales = more = None
    if bias is not None or attention_mask is not None or cu_seqlens is not None:
        more = _facts(bias, device), _facts(attention_mask, device), _facts(cu_seqlens, device)
    if quantized:
        scales = _facts(weight.scale, device)  # type: ignore[union-attr]
    if (
        not values.is_cuda
        or values.get_device() != device
        or scales is False
        or (more is not None and False in more)
        or (main_grad is not None and not _fits(main_grad, values, device))
        or (quantized and torch.is_grad_enabled() and (hidden.requires_grad or getattr(bias, "requires_grad", False)))
    ):
        return None
    dtype = hidden.dtype
    autocast = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
    return (
        hidden.shape, dtype, values.shape, values.dtype, device, scales, more, main_grad is not None, autocast,
        tf32_allowed(dtype), options,
    )  # fmt: skip


def _facts(tensor: object, device: int) -> tuple[Any, ...] | bool | None:
    """Shape and dtype of a tensor on the ``device``, and ``False`` for anything else but ``None``."""
    if tensor is None:
        return None
    if type(tensor) not in PLAIN or not tensor.is_cuda or tensor.get_device() != device:  # type: ignore[attr-defined]
        return False
    return tensor.shape, tensor.dtype  # type: ignore[attr-defined]


def _fits(main_grad: Tensor, weight: Tensor, device: int) -> bool:
    """Whether ``weight_main_grad`` is what its check lets pass."""
    return (
        type(main_grad) in PLAIN
        and main_grad.is_cuda
        and main_grad.get_device() == device
        and main_grad.dtype == torch.float32
        and main_grad.shape == weight.shape
        and main_grad.is_contiguous()
        and not main_grad.requires_grad
        and (weight.requires_grad or not torch.is_grad_enabled())
    )


def plans_of(signature: Signature | None) -> Plans | None:
    """What calls of this signature worked out, if there were any."""
    try:
        return None if signature is None else _SEEN.get(signature)
    except TypeError:  # an option that cannot be hashed: the checks have a better word for it
        return None


def new_plans(signature: Signature | None) -> Plans | None:
    """Where a call that passed all checks may keep what it works out."""
    if signature is None:
        return None
    plans = _SEEN.get(signature)
    if plans is None:
        if len(_SEEN) >= MOST_SEEN:
            _SEEN.clear()
        plans = _SEEN[signature] = {}
    return plans
