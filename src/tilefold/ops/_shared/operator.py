"""Operators told by data: one way from a call to its launches, for eager calls, compiled ones and gradients.

A room says what its tensors and options are, which results there are, what is saved and which gradients exist; its
``plans.py`` says what is launched. The key of a call, the cache, the choice of an implementation, what takes the place
of a kernel that cannot be built, and the registered operator with its gradient are here, once.
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from tilefold.ops._shared import impl as implementations
from tilefold.ops._shared._triton.tensors import capability_of, sm_count
from tilefold.ops._shared.call_cache import CallCache, Key, call_key, gradient_key, is_aligned
from tilefold.ops._shared.checks import check_choice
from tilefold.ops._shared.fallback import (
    SLOWER,
    KernelUnavailableError,
    give_up,
    given_up,
    given_up_on,
    refuse_capture,
)
from tilefold.ops._shared.impl import IMPLS, host_may_read, settled
from tilefold.ops._shared.library import (
    define_op,
    forbid_double_backward,
    gradient_needs_dispatcher,
    is_plain,
    run,
    schema_of,
)
from tilefold.ops._shared.passes import APPLY, Pass, Request
from tilefold.ops._shared.plan import Buffer, Setting, taker
from tilefold.ops._shared.tf32 import tf32_allowed

if TYPE_CHECKING:
    from tilefold.ops._shared._triton.program import Program

TensorsT = TypeVar("TensorsT", bound=tuple[Any, ...])  # a record of tensors, some of which may be None
OptionsT = TypeVar("OptionsT", bound=tuple[Any, ...])
Results = Sequence["Tensor | None"]
Needs = tuple[bool, ...]  # which gradients are wanted
KERNELS = ("auto", "triton")
NOTHING: Mapping[str, Any] = MappingProxyType({})


class Checked(NamedTuple):
    """Result of a room's checks of a call's arguments.

    Attributes:
        options: of the operator.
        ready: what makes the operator's tensors of those that were given, differentiably; ``None`` if they are these.
    """

    options: Any
    ready: Callable[[Any], Any] | None = None


class Variant(NamedTuple):
    """Calls of an operator that choose an implementation, and whose kernels are given up, apart from the others.

    Attributes:
        name: of the operator, as people call it.
        chosen_impl: from the first tensor and what was asked for to the implementation, as :class:`Operator` has it.
    """

    name: str
    chosen_impl: Callable[[Tensor, str], str]


class Operator(Generic[TensorsT, OptionsT]):
    """``operator(tensors, asked, impl, check, into)``: the results, of which the first may be differentiated, once.

    Args:
        name: of the public function, and of the registered operator ``tilefold::name``.
        tensors: record type; the first tensor chooses device and implementation.
        options: record type; annotations of both give the schema.
        saved: record type of what backward reads, each the name of a tensor or a result.
        results: their names.
        outputs: ``(tensors, options, training)`` to the results' shapes and dtypes, for plans and for compilers. Where
            no gradient may be asked for, ``training`` is false, and a result that only backward reads has no elements.
        gradients: by the name of each tensor that has one (and may be ``None`` in a call) the saved tensor whose shape
            and dtype the gradient has, in contiguous memory; or ``(saved, options)`` to its :class:`Buffer`. The saved
            tensor of the first entry (by its own name, if a function is given) chooses the implementation of a
            registered gradient.
        plans: imports ``plans.py``, whose ``forward(tensors, options, training, setting)`` and ``backward(d<first
            result>, saved, options, needs, setting)`` return plans, and ``None`` for what the tiled path always makes;
            of backward, ``d<tensor>`` are the results.
        tiled: the tiled path: ``forward(tensors, options, training)`` returns the results, and ``backward(d<first
            result>, saved, options, needs, *buffers to add to)`` the gradients; ``None`` for what it does not make.
        reference: ``(tensors, options)`` to the first result.
        check_values: of tensors on the CPU, before kernels; the tiled path checks those that it reads.
        reads: which of those that ``saved`` names backward reads with these options; the others are ``None``.
        variant: of a call, ``None`` where there is nothing special about it.
    """

    def __init__(
        self,
        name: str,
        tensors: type[TensorsT],
        options: type[OptionsT],
        saved: type[tuple[Any, ...]],
        *,
        results: tuple[str, ...],
        outputs: Callable[[TensorsT, OptionsT, bool], tuple[Buffer, ...]],
        gradients: Mapping[str, str | Callable[[Any, OptionsT], Buffer]],
        plans: Callable[[], Any],
        tiled: Any,
        reference: Callable[[TensorsT, OptionsT], Tensor],
        check_values: Callable[[TensorsT, OptionsT], object] | None = None,
        reads: Callable[[OptionsT], Collection[str]] | None = None,
        variant: Callable[[TensorsT], Variant | None] | None = None,
    ) -> None:
        self.name = name
        self._tensors, self._options, self._saved = (_record(each) for each in (tensors, options, saved))
        self._results, self._outputs, self._gradients = results, outputs, list(gradients)
        self._plans, self._tiled, self._reference, self._check_values = plans, tiled, reference, check_values
        self._reads, self._variant = reads, variant
        self._places = {each: place for place, each in enumerate((*self._tensors._fields, *results))}
        self._leaves = [self._places[each] for each in gradients]  # among tensors
        self._takers: dict[Collection[str], Callable[[Any], tuple[Any, ...]]] = {}
        self._likes = [
            self._saved._fields.index(each) if isinstance(each, str) else each for each in gradients.values()
        ]
        first = next(iter(gradients))
        self._chooses = self._likes[0] if isinstance(self._likes[0], int) else self._saved._fields.index(first)
        self._dfirst = f"d{results[0]}"
        self.calls: CallCache[Pass] = CallCache()  # by arguments of the public function, or of the registered operator
        self.gradients: CallCache[Pass] = CallCache()
        self._register()

    def chosen_impl(self, first: Tensor, impl: str) -> str:
        """Implementation that runs for the first tensor; see :func:`tilefold.ops._shared.impl.chosen_impl`."""
        return implementations.chosen_impl(self.name, self._tensors._fields[0], first, impl)

    def _named(self, tensors: TensorsT, impl: str) -> tuple[str, str]:
        """The operator as people call it, and the implementation that it runs."""
        variant = None if self._variant is None else self._variant(tensors)
        if variant is None:
            return self.name, settled(impl, self.chosen_impl(tensors[0], impl))
        return variant.name, settled(impl, variant.chosen_impl(tensors[0], impl))

    def forget(self) -> None:
        """Drop all that is remembered of calls."""
        self.calls.clear()
        self.gradients.clear()

    # A call of the public function

    def __call__(
        self,
        tensors: TensorsT,
        asked: tuple[Any, ...],
        impl: str,
        check: Callable[..., Checked],
        into: Mapping[str, Tensor] = NOTHING,
    ) -> tuple[Any, ...]:
        """The results; ``check(tensors, *asked, *into's)`` runs if no call like this one was made before.

        Backward adds the gradient of a tensor that ``into`` names to the buffer there, and returns none for it. The
        public function's argument for such a buffer is called ``<tensor>_main_grad``.
        """
        training = False
        if torch.is_grad_enabled():
            for place in self._leaves:
                training = training or bool(getattr(tensors[place], "requires_grad", False))
        key = call_key((*tensors, *into.values()) if into else tensors, (*asked, *into, impl, training))
        call = self.calls.find(key)
        if call is None:
            return self._first(key, check(tensors, *asked, *into.values()), tensors, impl, training, into)
        if call.ready is not None:
            tensors = call.ready(tensors)
        return self._eager(call, tensors, into)

    def _first(
        self,
        key: Key | None,
        checked: Checked,
        tensors: TensorsT,
        impl: str,
        training: bool,
        into: Mapping[str, Tensor],
    ) -> tuple[Any, ...]:
        (options, ready), name = checked, self.name
        if ready is not None:
            tensors = ready(tensors)
        if torch.compiler.is_compiling():
            check_choice("impl", impl, IMPLS)  # the operator chooses when it runs: a device cannot be asked in a trace
        else:
            name, impl = self._named(tensors, impl)
        if impl == "reference":
            return (self._reference(tensors, options), *[None] * (len(self._results) - 1))
        if key is None and not is_plain(*tensors):
            where = "under torch.compile or with tensor subclasses; leave it out there, and add {}.grad to it"
            refuse_buffers(into, f"{where} after backward")
            return _tuple(self._registered(*tensors, *options, training, impl))
        call = Pass(name, options, impl, training, False, key, ready, tuple(into))
        return self._eager(self._kept(self.calls, call), tensors, into)

    def _eager(self, call: Pass, tensors: TensorsT, into: Mapping[str, Tensor]) -> tuple[Any, ...]:
        if not call.wanted:
            return tuple(run(self.compute, tensors[0], call, tensors))
        request = Request()
        request.operator, request.call, request.tensors, request.into = self, call, tensors, tuple(into.values())
        first = APPLY(request, *[tensors[place] for place in self._leaves])
        return first, *request.rest

    def keep(self, options: OptionsT, values: tuple[Any, ...]) -> tuple[Any, ...]:
        """Select the values that backward reads."""
        reads = self._saved._fields if self._reads is None else self._reads(options)
        take = self._takers.get(reads)
        if take is None:
            nothing = len(self._places)  # behind all values
            places = [self._places[each] if each in reads else nothing for each in self._saved._fields]
            take = self._takers[reads] = taker(places)
        return take((*values, None))

    # One pass

    def compute(self, first: Tensor, call: Pass, given: tuple[Any, ...]) -> Results:
        """Results or gradients; ``first`` is on the current device, and autocast is off."""
        if call.impl in KERNELS:
            if self._check_values is not None and not call.backward and not first.is_cuda and may_look(first):
                self._check_values(self._tensors(*given), call.options)
            while call.program is not None or call.impl == "triton" or given_up(call.name, first.device) is None:
                program = call.program
                try:
                    if program is None:
                        program = call.program = self._program(call, given)
                    if program is None:
                        break
                    return program(*given)
                except KernelUnavailableError as error:
                    call.program = None
                    instead = error.instead if program is None else program.instead_of(error.kernel)
                    if instead is None and call.impl == "triton":
                        raise
                    kernel, sentence = (call.name, SLOWER) if instead is None else instead
                    why = str(error) if error.instead is None else str(error.args[0])
                    give_up(kernel, first.device, why, sentence)
        refuse_capture(call.name, first.device)
        if call.backward:
            saved, into = given[1 : 1 + len(self._saved._fields)], given[1 + len(self._saved._fields) :]
            found = self._tiled.backward(first, self._saved(*saved), call.options, call.wanted, *into)
        else:
            found = self._tiled.forward(self._tensors(*given), call.options, call.wanted)
        return found  # type: ignore[no-any-return]

    def _program(self, call: Pass, given: tuple[Any, ...]) -> Program | None:
        """Program of the kernels for such a pass; ``plans.py`` sees layouts and no values."""
        from tilefold.ops._shared._triton.program import Program  # needs Triton

        plans, setting = self._plans(), setting_of(given[0].device, call.key is not None and is_aligned(call.key))
        layouts = [
            None if x is None else torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") for x in given
        ]
        results: dict[str, Buffer | None]
        if call.backward:
            saved = self._saved(*layouts[1 : 1 + len(self._saved._fields)])
            setting = setting._replace(added=frozenset(call.into))
            plan = plans.backward(layouts[0], saved, call.options, call.wanted, setting)
            names = (self._dfirst, *self._saved._fields, *[f"d{name}" for name in call.into])
            wanted = [need and name not in call.into for name, need in zip(self._gradients, call.wanted, strict=True)]
            buffers = self._gradient_buffers(saved, call.options, wanted)
            results = {f"d{name}": buffer for name, buffer in zip(self._gradients, buffers, strict=True)}
        else:
            names, tensors = self._tensors._fields, self._tensors(*layouts)
            plan = plans.forward(tensors, call.options, call.wanted, setting)
            outputs = self._outputs(self._tensors(*given), call.options, call.wanted)
            results = dict(zip(self._results, outputs, strict=True))
        return None if plan is None else Program(plan, names, results, given[0].device, setting)

    def _gradient_buffers(self, saved: Any, options: OptionsT, needs: Sequence[bool]) -> list[Buffer | None]:
        return [
            None if not need
            else like(saved, options) if callable(like)
            else Buffer(tuple(saved[like].shape), saved[like].dtype)
            for like, need in zip(self._likes, needs, strict=True)
        ]  # fmt: skip

    def _kept(self, cache: CallCache[Pass], call: Pass) -> Pass:
        if call.key is not None and call.impl in KERNELS:
            return cache.keep(call.key, call)
        call.key = None
        return call

    def backward(
        self, call: Pass, needs: Needs, dfirst: Tensor, saved: tuple[Tensor | None, ...], into: tuple[Tensor, ...]
    ) -> Results:
        """Gradients of an eager call."""
        if gradient_needs_dispatcher(dfirst):
            refuse_buffers(call.into, "with create_graph=True or is_grads_batched=True; leave one of them out")
            return self._by_operator(dfirst, saved, call.options, needs, call.impl)
        saved = (*saved, *into)
        key = None if call.key is None else gradient_key(call, needs, dfirst, saved)
        known = self.gradients.find(key)
        if known is None:
            known = Pass(call.name, call.options, call.impl, needs, True, key, into=call.into)
            known = self._kept(self.gradients, known)
        return run(self.compute, dfirst, known, (dfirst, *saved))  # type: ignore[no-any-return]

    # The registered operator

    def _register(self) -> None:
        name, options = f"tilefold::{self.name}", typing.get_type_hints(self._options)
        forward = typing.get_type_hints(self._tensors) | options | {"training": bool, "impl": str}
        define_op(self.name, schema_of(forward, len(self._results)))(self._registered_forward)
        torch.library.register_fake(name, self._fake_forward)
        backward = {self._dfirst: Tensor} | typing.get_type_hints(self._saved) | options
        backward |= {"needs": Sequence[bool], "impl": str}
        define_op(f"{self.name}_backward", schema_of(backward, len(self._gradients)))(self._registered_backward)
        torch.library.register_fake(f"{name}_backward", self._fake_backward)
        forbid_double_backward(f"{self.name}_backward", self.name)
        torch.library.register_autograd(name, self._differentiate, setup_context=self._setup_context)
        self._registered = getattr(torch.ops.tilefold, self.name)
        self._registered_gradients = getattr(torch.ops.tilefold, f"{self.name}_backward")

    def _forward_arguments(self, args: tuple[Any, ...]) -> tuple[TensorsT, OptionsT, bool, str]:
        *values, training, impl = args
        count = len(self._tensors._fields)
        return self._tensors(*values[:count]), self._options(*map(_hashable, values[count:])), training, impl

    def _backward_arguments(self, args: tuple[Any, ...]) -> tuple[Any, OptionsT, Needs, str]:
        *values, needs, impl = args
        count = len(self._saved._fields)
        return self._saved(*values[:count]), self._options(*map(_hashable, values[count:])), tuple(needs), impl

    def _registered_forward(self, *args: Any) -> Any:
        tensors, options, training, impl = self._forward_arguments(args)
        name, impl = self._named(tensors, impl)
        key = call_key(tensors, ("registered", *options, training, impl))
        call = self.calls.find(key) or self._kept(self.calls, Pass(name, options, impl, training, False, key))
        found = self.compute(tensors[0], call, tensors)
        if any(result is None for result in found):
            shapes = self._outputs(tensors, options, training)
            found = [
                _empty(tensors[0], *like).zero_() if x is None else x for x, like in zip(found, shapes, strict=True)
            ]
        return _bare(found)

    def _fake_forward(self, *args: Any) -> Any:
        tensors, options, training, _ = self._forward_arguments(args)
        return _bare([_empty(tensors[0], *buffer) for buffer in self._outputs(tensors, options, training)])

    def _registered_backward(self, dfirst: Tensor, *args: Any) -> Any:
        saved, options, needs, impl = self._backward_arguments(args)
        impl = settled(impl, self.chosen_impl(saved[self._chooses], impl))
        key = call_key((dfirst, *saved), (*options, *needs, impl))
        known = self.gradients.find(key)
        if known is None:
            known = self._kept(self.gradients, Pass(self.name, options, impl, needs, True, key))
        found = self.compute(dfirst, known, (dfirst, *saved))
        # operators return tensors only: an empty one stands for a gradient that nobody asked for
        return _bare([dfirst.new_empty(0) if gradient is None else gradient for gradient in found])

    def _fake_backward(self, dfirst: Tensor, *args: Any) -> Any:
        saved, options, needs, _ = self._backward_arguments(args)
        buffers = self._gradient_buffers(saved, options, needs)
        return _bare([dfirst.new_empty(0) if buffer is None else _empty(dfirst, *buffer) for buffer in buffers])

    def _by_operator(
        self, dfirst: Tensor, saved: tuple[Tensor | None, ...], options: OptionsT, needs: Needs, impl: str
    ) -> Results:
        found = _tuple(self._registered_gradients(dfirst, *saved, *options, needs, impl))
        return [gradient if need else None for gradient, need in zip(found, needs, strict=True)]

    def _setup_context(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        tensors, ctx.options, ctx.training, ctx.impl = self._forward_arguments(inputs)
        results = _tuple(output)
        ctx.mark_non_differentiable(*results[1:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*self.keep(ctx.options, (*tensors, *results)))

    def _differentiate(self, ctx: Any, dfirst: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        gradients: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
        if dfirst is not None:
            if not ctx.training:
                raise RuntimeError(
                    f"tilefold::{self.name} needs training=True where a gradient is asked for; call {self.name}."
                )
            needs = tuple(ctx.needs_input_grad[place] for place in self._leaves)
            found = self._by_operator(dfirst, ctx.saved_tensors, ctx.options, needs, ctx.impl)
            for place, gradient in zip(self._leaves, found, strict=True):
                gradients[place] = gradient
        return tuple(gradients)


def may_look(first: Tensor) -> bool:
    """Whether values of tensors beside this one may be read before kernels run, which on a GPU would wait for it."""
    return host_may_read(first.device, "triton")


def refuse_buffers(into: Collection[str], where: str) -> None:
    """Raise ``RuntimeError`` where a buffer is given that gradients are to be added to."""
    for name in into:
        raise RuntimeError(f"{name}_main_grad cannot be used {where.format(name)}.")


def setting_of(device: torch.device, aligned: bool = True) -> Setting:
    """Current setting for plans on this device."""
    return Setting(
        capability_of(device),
        sm_count(device),
        tf32_allowed(torch.float32),
        aligned,
        given_up_on(device),
    )


def _record(each: type[tuple[Any, ...]]) -> Any:
    return each


def _hashable(option: Any) -> Any:
    return tuple(option) if isinstance(option, list) else option


def _empty(like: Tensor, shape: tuple[int, ...], dtype: torch.dtype, strides: tuple[int, ...] | None = None) -> Tensor:
    return (
        like.new_empty(shape, dtype=dtype) if strides is None else like.new_empty_strided(shape, strides, dtype=dtype)
    )


def _tuple(results: Any) -> tuple[Any, ...]:
    return (results,) if isinstance(results, Tensor) else tuple(results)


def _bare(results: Sequence[object]) -> Any:
    """Results in a registered operator's form."""
    return results[0] if len(results) == 1 else tuple(results)
