"""A cache of what was worked out for a call, keyed by shapes, strides, dtypes, devices and options.

Checks, and whatever leads from arguments to launches, take longer than a small kernel. On a GPU they depend on nothing
but what makes the key, so a call like one that passed them passes. No value of a tensor, no address and no buffer is
kept.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from tilefold.ops._shared.fallback import everything_given_up
from tilefold.ops._shared.impl import triton_interpreted
from tilefold.ops._shared.internals import in_forward_mode, no_dispatch_mode
from tilefold.ops._shared.library import PLAIN
from tilefold.ops._shared.tf32 import tf32_allowed

MAX_CALLS = 4096  # per cache; what is forgotten is worked out again
ALIGNMENT = 16  # bytes

Key = tuple[Any, ...]
P = TypeVar("P")


def call_key(tensors: Sequence[object], options: tuple[object, ...]) -> Key | None:
    """Cache key of a call, or ``None`` for one that must be checked and dispatched in full.

    That is a call off the GPU (where the interpreter does not stand in for it), under a compiler, a dispatch mode, a
    transform or forward-mode differentiation, or with a tensor subclass.

    Args:
        tensors: the arguments that are tensors if they are given, the first of which chooses the device.
        options: the others. Their types are part of the key: ``True`` equals 1, but is not taken for a number.
    """
    first: Any = tensors[0]
    if torch.compiler.is_compiling() or type(first) not in PLAIN:
        return None
    if not (first.is_cuda or (first.is_cpu and triton_interpreted())) or not no_dispatch_mode() or in_forward_mode():
        return None
    facts: list[object] = []
    together = 0
    try:
        for tensor in tensors:
            if tensor is None:
                facts.append(None)
            elif type(tensor) in PLAIN:
                facts += (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)  # type: ignore[attr-defined]
                together |= tensor.data_ptr()  # type: ignore[attr-defined]
            else:
                return None
    except RuntimeError:  # sparse and nested tensors have no strides: the checks report them
        return None
    kind = "cuda" if first.is_cuda else "cpu"  # device.type makes a string, which takes as long as the rest
    autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    # whatever the first tensor's dtype: a gradient in 16 bits may be of products in fp32
    settings = autocast, tf32_allowed(torch.float32), everything_given_up()
    return together % ALIGNMENT == 0, *facts, *settings, *options, *map(type, options)


def gradient_key(call: Hashable, needs: tuple[object, ...], grad: Tensor, saved: Sequence[Tensor | None]) -> Key | None:
    """Cache key of a call's gradients; ``call`` is equal to itself only and has its options.

    Hooks for saved tensors may bring them back elsewhere, and laid out in another way, but not in another shape, and
    autograd gives ``grad`` the shape and dtype of the result. Not to be asked where :func:`gradient_needs_dispatcher`
    says yes.
    """
    if type(grad) not in PLAIN:
        return None
    facts: list[object] = [call, needs, tf32_allowed(torch.float32), grad.stride()]
    together = grad.data_ptr()
    for tensor in saved:
        if tensor is None:
            continue
        if type(tensor) not in PLAIN:
            return None
        facts += (tensor.stride(), tensor.dtype)
        together |= tensor.data_ptr()
    return together % ALIGNMENT == 0, *facts


def is_aligned(key: Key) -> bool:
    """Whether all tensors of the calls of this key begin at multiples of 16 bytes, as TMA descriptors ask."""
    return bool(key[0])


class CallCache(Generic[P]):
    """Plans by key, at most :data:`MAX_CALLS` of them. Any thread may ask and add: equal keys have equal plans."""

    def __init__(self) -> None:
        self._plans: dict[Hashable, P] = {}

    def find(self, key: Hashable | None) -> P | None:
        """The plan that was kept, if any."""
        try:
            return None if key is None else self._plans.get(key)
        except TypeError:  # an option that cannot be hashed: the checks of a full call report it
            return None

    def keep(self, key: Hashable, plan: P) -> P:
        """Remember ``plan``, and return it."""
        if len(self._plans) >= MAX_CALLS:
            self._plans.clear()
        self._plans[key] = plan
        return plan

    def clear(self) -> None:
        """Drop all plans."""
        self._plans.clear()

    def __len__(self) -> int:
        return len(self._plans)
