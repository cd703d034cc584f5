"""Registration of operators with ``torch.library``: devices, autocast, and derivatives that do not exist."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tilefold.ops._shared.internals import current_gpu, is_eager

PLAIN = (Tensor, torch.nn.Parameter)


def schema_of(arguments: Mapping[str, Any], results: int) -> str:
    """The torch schema of arguments with these annotations, and so many tensors as results."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter(name, kind, annotation=each) for name, each in arguments.items()]

    def prototype() -> None: ...

    returned = Tensor if results == 1 else tuple[(Tensor,) * results]  # type: ignore[misc]
    prototype.__signature__ = inspect.Signature(parameters, return_annotation=returned)  # type: ignore[attr-defined]
    return torch.library.infer_schema(prototype, mutates_args=())


def define_op(name: str, schema: str, function: Callable[..., Any]) -> None:
    """Define ``tilefold::name``, its first argument a tensor, with this function for every device."""
    torch.library.define(f"tilefold::{name}", schema)
    torch.library.impl(f"tilefold::{name}", "default", functools.partial(run, function))


def run(function: Callable[..., Any], *args: Any) -> Any:
    """Call an implementation with its first argument's GPU as the current one, and outside autocast."""
    first = args[0]
    if first.is_cuda and first.get_device() != current_gpu():
        with torch.cuda.device(first.device):
            return run(function, *args)
    device_type = "cuda" if first.is_cuda else first.device.type  # which makes a string, as slowly as the rest of this
    if not torch.is_autocast_enabled(device_type):
        return function(*args)
    with torch.autocast(device_type, enabled=False):
        return function(*args)


def is_plain(*tensors: Tensor | None) -> bool:
    """Whether no compiler, mode or tensor subclass wants to see the registered operator.

    Then an ``autograd.Function`` may call the implementation: a registered operator costs 0.1 ms of host time more.
    """
    return (
        not torch.compiler.is_compiling()
        and is_eager()
        and all(tensor is None or (type(tensor) in PLAIN and not tensor.is_meta) for tensor in tensors)
    )


def forbid_double_backward(name: str, operator: str) -> None:
    """Make a derivative of ``tilefold::name``, which has a fake kernel, an error: it would silently be wrong."""

    def backward(ctx: Any, *grads: Tensor | None) -> None:
        raise RuntimeError(
            f"tilefold::{name} has no derivative: {operator} can be differentiated once. Leave out create_graph=True, "
            "or use impl='reference', which can be differentiated again."
        )

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.set_materialize_grads(False)

    torch.library.register_autograd(f"tilefold::{name}", backward, setup_context=setup_context)


def hashable(option: Any) -> Any:
    """An option as a key can have it: lists come from schemas."""
    return tuple(option) if isinstance(option, list) else option


def empty(like: Tensor, shape: tuple[int, ...], dtype: torch.dtype, strides: tuple[int, ...] | None = None) -> Tensor:
    if strides is None:
        return like.new_empty(shape, dtype=dtype)
    return like.new_empty_strided(shape, strides, dtype=dtype)


def as_tuple(results: Any) -> tuple[Any, ...]:
    """Results of a registered operator as those of any number."""
    return (results,) if isinstance(results, Tensor) else tuple(results)


def bare(results: Sequence[object]) -> Any:
    """Results in a registered operator's form."""
    return results[0] if len(results) == 1 else tuple(results)
