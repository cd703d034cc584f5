"""What the operators' registrations share: schema pieces, autocast, the choice of implementation, absent gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from tilefold.ops.lsr_head import _tiled
from tilefold.ops.lsr_head._choice import chosen_impl

HEAD = "Tensor hidden, Tensor weight, Tensor? bias"
_PLAIN = (Tensor, torch.nn.Parameter)
LAYOUT = "Tensor? attention_mask, Tensor? cu_seqlens"
OPTIONS = "str activation, float logit_scale"


def define_op(name: str, schema: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Define ``tilefold::name`` with the decorated function as its implementation on every device."""
    torch.library.define(f"tilefold::{name}", schema)

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        torch.library.impl(f"tilefold::{name}", "default", functools.partial(run, function))
        return function

    return register


def run(function: Callable[..., Any], *args: Any) -> Any:
    """Call an implementation on the device of its first argument, a tensor, and outside autocast."""
    device, device_type = args[0].device, args[0].device.type
    if device_type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):  # kernels are launched on the current device
            return run(function, *args)
    if not torch.is_autocast_enabled(device_type):
        return function(*args)
    # Products must not fall under autocast a second time: the operator has settled its dtypes.
    with torch.autocast(device_type, enabled=False):
        return function(*args)


def is_plain(*tensors: Tensor | None) -> bool:
    """Whether no compiler, mode or tensor subclass wants to see the registered operator.

    Then an ``autograd.Function`` may call the implementation: a registered operator costs 0.1 ms of host time more.
    """
    return (
        not torch.compiler.is_compiling()
        and torch._C._len_torch_dispatch_stack() == 0
        and all(tensor is None or (type(tensor) in _PLAIN and not tensor.is_meta) for tensor in tensors)
    )


def forbid_double_backward(name: str) -> None:
    """Make a derivative of the gradient operator ``tilefold::name`` an error; without this it would silently be wrong.

    Call once the operator's fake kernel is registered.
    """

    def backward(ctx: Any, *grads: Tensor | None) -> None:
        raise RuntimeError(
            f"tilefold::{name} has no derivative: lsr_head can be differentiated once. Leave out create_graph=True, or "
            "use impl='reference', which can be differentiated again."
        )

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.set_materialize_grads(False)

    torch.library.register_autograd(f"tilefold::{name}", backward, setup_context=setup_context)


def implementation(impl: str, hidden: Tensor) -> ModuleType:
    """The module that computes with ``impl`` on ``hidden``."""
    impl = chosen_impl(hidden, impl)
    if impl == "tiled":
        return _tiled
    from tilefold.ops.lsr_head import _triton

    return _triton


def product(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` with fp32 (fp64) accumulation that is also handed out in fp32 (fp64)."""
    wide = torch.promote_types(a.dtype, torch.float32)
    if a.dtype == wide:
        return a @ b
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=wide)
    return a.to(wide) @ b.to(wide)


def present(
    grads: tuple[Tensor | None, Tensor | None, Tensor | None], like: Tensor, bias_dtype: torch.dtype | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Operators return tensors only: an empty one stands for a gradient that nobody asked for."""
    dhidden, dweight, dbias = (like.new_empty(0) if grad is None else grad for grad in grads)
    return dhidden, dweight, dbias if bias_dtype is None else dbias.to(bias_dtype)


def fake_grads(
    hidden: Tensor, weight: Tensor, need_hidden: bool, need_weight: bool, bias_dtype: torch.dtype | None
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.empty_like(hidden, memory_format=torch.contiguous_format) if need_hidden else hidden.new_empty(0),
        torch.empty_like(weight, memory_format=torch.contiguous_format) if need_weight else hidden.new_empty(0),
        hidden.new_empty(0) if bias_dtype is None else weight.new_empty(weight.size(0), dtype=bias_dtype),
    )


def asked_for(grads: tuple[Tensor, ...], needs: tuple[bool, ...]) -> tuple[Tensor | None, ...]:
    return tuple(grad if needed else None for grad, needed in zip(grads, needs, strict=True))
