"""Calls that are alike: their key, of layouts and options and no value, their passes, and what
torch registers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tilefold.ops._shared import fallback
from tilefold.ops._shared.internals import apply_of, is_eager, matmul_precision

if TYPE_CHECKING:
    from tilefold.ops._shared._triton.program import Program

ALIGNMENT = 16  # bytes
PLAIN = (Tensor, torch.nn.Parameter)

Key = tuple[
    Any,
    ...,
]  # of which the first says whether all tensors are aligned, as TMA descriptors ask


def call_key(
    tensors: Sequence[object],
    options: tuple[object, ...],
    of_call: bool = False,
) -> Key | None:
    """Cache key of a call, or of its gradients; ``None`` where torch has to see the registered
    operator.

    That is in a trace, under modes and transforms, with tensor subclasses and on the meta device;
    else an ``autograd.Function`` may call the implementation: the dispatcher costs 0.1 ms of host
    time more. The first of ``tensors`` chooses the device. Types of ``options`` are part of the
    key: ``True`` equals 1. ``of_call`` says that these have a call, of which ``tensors`` are the
    gradient and what was saved: hooks may bring that back elsewhere and laid out in another way,
    but not in another shape.
    """
    first: Any
    tensor: Any
    first = tensors[0]
    if (
        torch.compiler.is_dynamo_compiling()
        or type(first) not in PLAIN
        or first.is_meta
        or not is_eager(first)
    ):
        return None
    facts: list[object] = []
    together = 0
    try:
        for tensor in tensors:
            if tensor is None:
                facts.append(None)
            elif type(tensor) in PLAIN:
                facts += (tensor.stride(), tensor.dtype)
                if not of_call:
                    facts += (tensor.shape, tensor.device)
                together |= tensor.data_ptr()
            else:
                return None
    except RuntimeError:  # sparse and nested tensors have no strides: the checks report them
        return None
    kind = (
        "cuda" if first.is_cuda else "cpu"
    )  # device.type makes a string, which takes as long as the rest
    autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    # whatever the first tensor's dtype: a gradient in 16 bits may be of products in fp32
    settings = autocast, matmul_precision() == "tf32", *fallback.GIVEN_UP
    return together % ALIGNMENT == 0, *facts, settings, *options, *map(type, options)


@dataclass(eq=False, slots=True)
class Pass:
    """Forward, or the gradients, of calls that are alike. Equal to itself only, so that it may be
    part of a key.
    """

    name: str  # of the operator, or of a variant of it
    options: Any
    impl: str  # "auto" for kernels with the tiled path behind them
    wanted: Any  # whether a gradient may be asked for; of gradients, which are
    backward: bool
    aligned: bool  # as the first of its key says; False without a key
    ready: Callable[[Any], Any] | None = None
    into: tuple[str, ...] = ()  # tensors whose gradients are added to buffers that are given
    take: Any = None  # selects what backward reads, of a call's tensors, its results and None
    program: Program | None = None  # of the kernels, once they ran


class _Eager(torch.autograd.Function):
    """The operator and its gradient without the dispatcher, for calls that have a key.

    Autograd looks at every argument: ``request`` holds all but the leaves, and takes the results
    but the first.
    """

    @staticmethod
    def forward(ctx: Any, request: list[Any], *leaves: Tensor) -> Tensor:
        operator, call, tensors, into = request
        results = operator.compute(tensors[0], call, tensors)
        request[:] = results[1:]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*call.take((*tensors, *results, None)))
        ctx.operator, ctx.call, ctx.into = operator, call, into
        first: Tensor = results[0]
        return first

    @staticmethod
    def backward(ctx: Any, dfirst: Tensor | None) -> tuple[Tensor | None, ...]:
        needs = ctx.needs_input_grad[1:]
        if dfirst is None:
            return None, *[None] * len(needs)
        return None, *ctx.operator.backward(ctx.call, needs, dfirst, ctx.saved_tensors, ctx.into)


APPLY = apply_of(_Eager)  # calls under transforms take the registered operator


def schema_of(arguments: Mapping[str, Any], results: int) -> str:
    """The torch schema of arguments with these annotations, and so many tensors as results."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [
        inspect.Parameter(name, kind, annotation=each) for name, each in arguments.items()
    ]

    def prototype() -> None: ...

    vars(prototype)["__signature__"] = inspect.Signature(parameters, return_annotation=None)
    schema: str = torch.library.infer_schema(prototype, mutates_args=())
    return schema.replace("-> ()", f"-> ({', '.join(['Tensor'] * results)})")


def run(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function with its first argument's GPU as the current one, and outside autocast."""
    with (
        torch.cuda.device(args[0].get_device()),
        torch.autocast(args[0].device.type, enabled=False),
    ):
        return function(*args)


def forbid_double_backward(name: str, operator: str) -> None:
    """Make a derivative of ``tilefold::name``, which has a fake kernel, an error: it would silently
    be wrong.
    """

    def backward(ctx: Any, *grads: Tensor | None) -> None:
        raise RuntimeError(
            f"tilefold::{name} has no derivative: {operator} can be differentiated once. Leave out create_graph=True, "
            "or use impl='reference', which can be differentiated again.",
        )

    torch.library.register_autograd(f"tilefold::{name}", backward)


def as_tuple(results: Any) -> tuple[Any, ...]:
    """Results of a registered operator as those of any number."""
    return (results,) if isinstance(results, Tensor) else tuple(results)


def bare(results: Sequence[object]) -> Any:
    """Results in a registered operator's form."""
    return results[0] if len(results) == 1 else tuple(results)
