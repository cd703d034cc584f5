"""Passes of an operator, forward and backward, and how autograd calls one of a plain call without the dispatcher."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tilefold.ops._shared.call_cache import Key
from tilefold.ops._shared.internals import apply_of
from tilefold.ops._shared.library import run

if TYPE_CHECKING:
    from tilefold.ops._shared._triton.program import Program


class Pass:
    """Forward, or the gradients, of calls that are alike. Equal to itself only, so that it may be part of a key.

    Attributes:
        name: of the operator, or of a variant of it.
        options: of the operator.
        impl: the implementation, ``"auto"`` for kernels with the tiled path behind them.
        wanted: whether a gradient may be asked for; of gradients, which are.
        backward: whether these are gradients.
        key: of the calls, ``None`` where nothing is remembered.
        ready: what makes the operator's tensors of those that were given; ``None`` if they are these.
        into: names of the tensors whose gradients are added to buffers that are given.
        program: of the kernels, once they ran.
    """

    __slots__ = ("backward", "impl", "into", "key", "name", "options", "program", "ready", "wanted")

    def __init__(
        self,
        name: str,
        options: Any,
        impl: str,
        wanted: Any,
        backward: bool,
        key: Key | None,
        ready: Any = None,
        into: tuple[str, ...] = (),
    ) -> None:
        self.name, self.options, self.impl, self.wanted, self.backward = name, options, impl, wanted, backward
        self.key, self.ready, self.into = key, ready, into
        self.program: Program | None = None


class Request:
    """Arguments of :class:`_Eager` besides the tensors that may have a gradient, and the results that it leaves.

    ``torch.autograd`` looks at every argument and every output on its own: few are fast.
    """

    __slots__ = ("call", "into", "operator", "rest", "tensors")
    operator: Any
    call: Pass
    tensors: tuple[Any, ...]
    into: tuple[Tensor, ...]
    rest: Sequence[Tensor | None]


class _Eager(torch.autograd.Function):
    """The registered operator and its gradient without the dispatcher, for plain tensors; see ``is_plain``."""

    @staticmethod
    def forward(ctx: Any, request: Request, *leaves: Tensor) -> Tensor:
        operator, call, tensors = request.operator, request.call, request.tensors
        first, *request.rest = results = run(operator.compute, tensors[0], call, tensors)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*operator.keep(call.options, (*tensors, *results)))
        ctx.operator, ctx.call, ctx.into = operator, call, request.into
        return first  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, dfirst: Tensor | None) -> tuple[Tensor | None, ...]:
        needs = ctx.needs_input_grad[1:]
        if dfirst is None:
            return None, *[None] * len(needs)
        return None, *ctx.operator.backward(ctx.call, needs, dfirst, ctx.saved_tensors, ctx.into)


APPLY = apply_of(_Eager)  # calls under transforms take the registered operator
