"""Cache keys of calls, the passes that they find, and helpers for registration with torch."""

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

ALIGNMENT = 16  # bytes, at whose multiples a tensor must begin for TMA descriptors
PLAIN_TYPES = (Tensor, torch.nn.Parameter)

Key = tuple[Any, ...]  # its first entry says whether all tensors are aligned


def call_key(
    tensors: Sequence[object],
    options: tuple[object, ...],
    of_gradient: bool = False,
) -> Key | None:
    """Return the cache key of a call, or of its gradients: layouts, options and settings.

    A call that has a key can skip torch's dispatcher, which costs 0.1 ms of CPU time. Torch has to
    see the registered operator in a trace, under modes and transforms, with tensor subclasses and
    on the meta device. Such a call has no key.

    Args:
        tensors: tensors or ``None``. The first one is a tensor, and chooses the device.
        options: hashable values. Their types are part of the key, since ``True`` equals 1.
        of_gradient: whether ``tensors`` are the gradient and the saved tensors of a forward pass,
            which ``options`` contain. Its key holds their shapes and the device. Hooks on saved
            tensors may change strides, but no shape.

    Returns:
        The key, or ``None`` if torch has to see the registered operator.
    """
    first: Any
    tensor: Any
    first = tensors[0]
    if (
        torch.compiler.is_dynamo_compiling()
        or type(first) not in PLAIN_TYPES
        or first.is_meta
        or not is_eager(first)
    ):
        return None
    layouts: list[object] = []
    address_bits = 0
    try:
        for tensor in tensors:
            if tensor is None:
                layouts.append(None)
            elif type(tensor) in PLAIN_TYPES:
                layouts += (tensor.stride(), tensor.dtype)
                if not of_gradient:
                    layouts += (tensor.shape, tensor.device)
                address_bits |= tensor.data_ptr()
            else:
                return None
    except RuntimeError:  # sparse and nested tensors have no strides: the checks report them
        return None
    # `first.device.type` makes a string, which takes as long as the rest of this function.
    device_type = "cuda" if first.is_cuda else "cpu"
    autocast = None
    if torch.is_autocast_enabled(device_type):
        autocast = torch.get_autocast_dtype(device_type)
    # TF32 is part of every key: a gradient in 16 bits may come from products in fp32. Kernels that
    # failed to build are part of it, so that calls from before the failure are planned again.
    settings = autocast, matmul_precision() == "tf32", *fallback.FAILURES
    # The combined bits of all addresses: low bits of 0 mean that all tensors are aligned.
    aligned = address_bits % ALIGNMENT == 0
    return aligned, *layouts, settings, *options, *map(type, options)


def is_aligned(key: Key | None) -> bool:
    """Return whether the tensors of a call with this key all begin at multiples of 16 bytes."""
    return key is not None and key[0]


@dataclass(eq=False, slots=True)
class Pass:
    """Forward or backward pass of all calls that have the same key.

    A pass equals only itself, so that it can be part of a key.

    Attributes:
        name: name of the operator, or of a variant of it, under which failures of kernels are
            recorded.
        options: the operator's checked options.
        impl: implementation. ``"auto"`` is kernels that may fall back to the tiled path.
        needs: for a forward pass, whether backward may follow. For a backward pass, which gradients
            are computed.
        backward: whether the pass computes gradients.
        aligned: whether all tensors begin at multiples of 16 bytes; ``False`` if unknown.
        prepare: makes the operator's tensors from the arguments, differentiably.
        main_grads: names of tensors whose gradients are added to buffers.
        select_saved: selects what backward reads from the tensors, the results and ``None``.
        program: the launches, once the kernels have run.
    """

    name: str
    options: Any
    impl: str
    needs: Any
    backward: bool
    aligned: bool
    prepare: Callable[[Any], Any] | None = None
    main_grads: tuple[str, ...] = ()
    select_saved: Any = None
    program: Program | None = None


class _Eager(torch.autograd.Function):
    """Autograd function of calls that have a key, which go past the dispatcher.

    Autograd inspects every tensor that it gets or returns, which takes time. It therefore gets only
    the tensors that have a gradient, and returns only the first result. Everything else passes
    through ``request``, a list that autograd does not look into: the arguments before the call, and
    the other results after it.
    """

    @staticmethod
    def forward(ctx: Any, request: list[Any], *differentiable: Tensor) -> Tensor:
        """Compute the results of a call, and save what backward reads.

        Args:
            ctx: autograd's context.
            request: operator, pass, all tensors (some ``None``) and buffers of gradients. On return
                it holds the results after the first.
            differentiable: tensors that have a gradient. Only autograd reads them here.

        Returns:
            The first result, which is the only differentiable one.
        """
        operator, call, tensors, main_grads = request
        first_result, *other_results = operator.compute(call, tensors)
        request[:] = other_results
        # select_saved takes None for fields that backward does not read with these options.
        saved = call.select_saved((*tensors, first_result, *other_results, None))
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*saved)
        ctx.operator = operator
        ctx.call = call
        ctx.main_grads = main_grads
        output: Tensor = first_result
        return output

    @staticmethod
    def backward(ctx: Any, output_grad: Tensor | None) -> tuple[Tensor | None, ...]:
        """Compute the gradients of the arguments of :meth:`forward`.

        Args:
            ctx: autograd's context, with the operator and the pass of the forward call.
            output_grad: gradient of the first result, ``None`` if nothing depends on it. The other
                results are not differentiable.

        Returns:
            ``None`` for the first argument, ``request``, and the gradients of the tensors after it.
        """
        needs = ctx.needs_input_grad[1:]
        if output_grad is None:
            return None, *[None] * len(needs)
        gradients = ctx.operator.backward(
            ctx.call,
            needs,
            output_grad,
            ctx.saved_tensors,
            ctx.main_grads,
        )
        return None, *gradients


APPLY = apply_of(_Eager)  # calls under transforms take the registered operator


def schema_of(arguments: Mapping[str, Any], n_results: int) -> str:
    """Return the schema of an operator in torch's notation, such as ``(Tensor x) -> (Tensor)``.

    Torch infers a schema from the signature of a function, here a prototype without a body. It
    cannot infer a number of results that is only known here, so the results are written into the
    schema of a function without any.

    Args:
        arguments: type annotations by argument name.
        n_results: number of tensors that the operator returns.
    """
    parameters = [
        inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=annotation)
        for name, annotation in arguments.items()
    ]

    def prototype() -> None: ...

    vars(prototype)["__signature__"] = inspect.Signature(parameters, return_annotation=None)
    schema: str = torch.library.infer_schema(prototype, mutates_args=())
    results = ", ".join(["Tensor"] * n_results)
    return schema.replace("-> ()", f"-> ({results})")


def call_on_device(device: torch.device, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function with a device as the current GPU, if it is one, and without autocast."""
    gpu_index = device.index if device.type == "cuda" else -1  # -1 leaves the current GPU
    with (
        torch.cuda.device(gpu_index),
        torch.autocast(device.type, enabled=False),
    ):
        return function(*arguments)


def forbid_double_backward(name: str, operator: str) -> None:
    """Make differentiating the registered gradient ``tilefold::name`` an error.

    Without this, its derivative would silently be wrong.
    """

    def backward(ctx: Any, *grads: Tensor | None) -> None:
        raise RuntimeError(
            f"tilefold::{name} has no derivative: {operator} can be differentiated once. Leave out "
            "create_graph=True, or use impl='reference', which can be differentiated again.",
        )

    torch.library.register_autograd(f"tilefold::{name}", backward)


def as_tuple(results: Any) -> tuple[Any, ...]:
    """Return the results of a registered operator as a tuple, even a single one."""
    return (results,) if isinstance(results, Tensor) else tuple(results)


def as_registered(results: Sequence[object]) -> Any:
    """Return results in the form of a registered operator: a tuple, or the single result."""
    return results[0] if len(results) == 1 else tuple(results)
