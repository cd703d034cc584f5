"""What is worked out once for calls of one kind, and found again by what makes the kind.

Checks, and whatever leads from shapes and options to a launch, take longer than a small kernel. They depend on nothing
but shapes, strides, dtypes, devices and options, so a call like one that passed passes. No value of a tensor, no
address and no buffer is kept.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from tilefold.ops._shared.impl import triton_interpreted
from tilefold.ops._shared.internals import no_dispatch_mode
from tilefold.ops._shared.library import PLAIN
from tilefold.ops._shared.tf32 import tf32_allowed
from tilefold.ops.entmax_attention import configs
from tilefold.ops.entmax_attention._geometry import Options

MOST = 2048  # of either table; what is forgotten is worked out again

Plans = dict[Any, Any]
Signature = tuple[Any, ...]


class Known(NamedTuple):
    """What a call asks for, checked.

    Attributes:
        options: but for the tensors.
        longest_k: a bound of the keys of a sequence.
        impl: the implementation that runs, or while a compiler traces the one that was asked for.
        plans: how its kernels are launched, by the launchers' own keys, where the tensors are plain.
    """

    options: Options
    longest_k: int
    impl: str
    plans: Plans | None = None


_KNOWN: dict[Signature, Known] = {}
_PLANS: dict[Signature, Plans] = {}


def call_signature(
    tensors: tuple[Any, ...], numbers: tuple[object, ...], flags: tuple[object, str]
) -> Signature | None:
    """What the checks of a call look at, or ``None`` for a call that must be looked at whole.

    Args:
        tensors: q, k, v and others, whatever was given for them; ``None`` for nothing.
        numbers: options whose type counts: True equals 1 and 1.0, but is not taken for a number.
        flags: whether attention is causal, and the implementation.
    """
    q = tensors[0]
    if torch.compiler.is_compiling() or not no_dispatch_mode() or forward_ad._current_level >= 0:
        return None  # what wants to see the registered operator, or must be refused
    if type(flags[0]) is not bool or type(q) not in PLAIN or not _has_kernels(q):
        return None
    facts: list[Any] = []
    for tensor in tensors:
        if type(tensor) in PLAIN:
            facts += (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        elif tensor is None:
            facts.append(None)
        else:
            return None
    kind = q.device.type
    if torch.is_autocast_enabled(kind):
        wanted = torch.get_autocast_dtype(kind)
        if any(getattr(tensor, "dtype", None) != wanted for tensor in tensors[:3]):
            return None  # to be cast
    return *facts, *numbers, *map(type, numbers), *flags, *_settings(q)


def _has_kernels(q: object) -> bool:
    """Whether anything is gained: elsewhere the work takes longer than the checks."""
    return isinstance(q, Tensor) and (q.is_cuda or (q.is_cpu and triton_interpreted()))


def recall(signature: Signature | None) -> Known | None:
    """What was found about calls of this signature."""
    if signature is None:
        return None
    try:
        return _KNOWN.get(signature)
    except TypeError:  # an option that cannot be hashed: the checks have a better word for it
        return None


def remember(signature: Signature, known: Known) -> None:
    """Keep what was found about a call that passed all checks."""
    if len(_KNOWN) >= MOST:
        _KNOWN.clear()
    _KNOWN[signature] = known


def plans_of(tensors: tuple[Tensor | None, ...], options: Options, longest_k: int) -> Plans:
    """The launchers' plans for tensors like these, which begin with q; the last is the seed of dropout."""
    *operands, seed = tensors
    facts: list[Any] = [None if seed is None else seed.device, options, longest_k]
    for tensor in operands:
        if tensor is None:
            facts.append(None)
        else:
            facts += (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
    q = tensors[0]
    key = (*facts, *(() if q is None else _settings(q)))
    plans = _PLANS.get(key)
    if plans is None:
        if len(_PLANS) >= MOST:
            _PLANS.clear()
        plans = _PLANS[key] = {}
    return plans


def _settings(q: Tensor) -> tuple[object, ...]:
    """What else the choice of a configuration looks at."""
    return tf32_allowed(q.dtype), configs.config_for if q.is_cuda else configs.INTERPRETED
