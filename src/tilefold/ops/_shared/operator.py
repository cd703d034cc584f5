"""Operators told by data: one way from a call to its launches, for eager calls, compiled ones and
gradients.
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from tilefold.ops._shared import calls, fallback
from tilefold.ops._shared import impl as implementations
from tilefold.ops._shared.calls import APPLY, Key, Pass, call_key, run
from tilefold.ops._shared.checks import check_choice
from tilefold.ops._shared.impl import IMPLS, capability_of, host_may_read, settled, sm_count
from tilefold.ops._shared.internals import current_gpu, tf32_allowed
from tilefold.ops._shared.plan import Buffer, Setting, Take, Values, taker

if TYPE_CHECKING:
    from tilefold.ops._shared._triton.program import Program

TensorsT = TypeVar(
    "TensorsT",
    bound=tuple[Any, ...],
)  # a record of tensors, some of which may be None
OptionsT = TypeVar("OptionsT", bound=tuple[Any, ...])
Results = Sequence["Tensor | None"]
Needs = tuple[bool, ...]  # which gradients are wanted
KERNELS = ("auto", "triton")
NOTHING: Mapping[str, Tensor] = MappingProxyType({})
MAX_CALLS = 4096  # that are remembered of an operator; what is forgotten is worked out again


class Checked(NamedTuple):
    """Result of a room's checks of a call's arguments."""

    options: Any
    ready: Callable[[Any], Any] | None = (
        None  # makes the operator's tensors of those that were given, differentiably
    )


@dataclass(eq=False)
class Operator(Generic[TensorsT, OptionsT]):
    """``operator(tensors, asked, impl, check, into)``: the results, of which the first may be
    differentiated, once.

    Args:
        name: of the public function, and of the registered operator ``tilefold::name``.
        tensors, options: record types, whose annotations give the schema; the first tensor chooses
            device and implementation.
        saved: record type of what backward reads, each the name of a tensor or a result.
        results: their names.
        outputs: ``(tensors, options, training)`` to the results' shapes and dtypes, for plans and
            for compilers. Where no gradient may be asked for, ``training`` is false, and a result
            that only backward reads has no elements.
        gradients: by the name of each tensor that has one (and may be ``None`` in a call) the saved
            tensor whose shape and dtype the gradient has, in contiguous memory; or ``(saved,
            options)`` to its :class:`Buffer`. The saved tensor of the first entry (by its own name,
            if a function is given) chooses the implementation of a registered gradient. Nothing of
            an operator without an entry can be differentiated.
        plans: imports ``plans.py``, whose ``forward(tensors, options, training, setting)`` and
            ``backward(d<first result>, saved, options, needs, setting)`` return plans, and ``None``
            for what the tiled path always makes; of backward, ``d<tensor>`` are the results.
        tiled: the tiled path: ``forward(tensors, options, training)`` returns the results, and
            ``backward(d<first result>, saved, options, needs, *buffers to add to)`` the gradients;
            ``None`` for what it does not make.
        reference: ``(tensors, options)`` to the first result, or to all.
        check_values: of tensors on the CPU, before kernels; the tiled path checks those that it
            reads.
        reads: which of those that ``saved`` names backward reads with these options; the others are
            ``None``.
        choose: ``(tensors, impl)`` to the name by which the kernels of such calls are given up, and
            the implementation.
    """

    name: str
    tensors: type[TensorsT]
    options: type[OptionsT]
    saved: Any
    results: tuple[str, ...]
    outputs: Callable[[TensorsT, OptionsT, bool], tuple[Buffer, ...]]
    gradients: Mapping[str, str | Callable[[Any, OptionsT], Buffer]]
    plans: Callable[[], Any]
    tiled: Any
    reference: Callable[[TensorsT, OptionsT], Tensor | tuple[Tensor, ...]]
    check_values: Callable[[TensorsT, OptionsT], object] | None = None
    reads: Callable[[OptionsT], Collection[str]] | None = None
    choose: Callable[[TensorsT, str], tuple[str, str]] | None = None

    def __post_init__(self) -> None:
        self._inputs: tuple[str, ...] = cast(Any, self.tensors)._fields
        self._leaves = [self._inputs.index(each) for each in self.gradients]
        self._dfirst = f"d{self.results[0]}"
        self.calls: dict[
            Key | None,
            Pass,
        ] = {}  # of the public function, the registered operators, and gradients
        self._register()

    def chosen_impl(self, first: Tensor, impl: str) -> str:
        """Implementation that runs for the first tensor; see
        :func:`tilefold.ops._shared.impl.chosen_impl`.
        """
        return implementations.chosen_impl(self.name, self._inputs[0], first, impl)

    def _named(self, tensors: TensorsT, impl: str) -> tuple[str, str]:
        """The operator as people call it, and the implementation that it runs."""
        name, chosen = (
            self.choose(tensors, impl)
            if self.choose
            else (self.name, self.chosen_impl(tensors[0], impl))
        )
        return name, settled(impl, chosen)

    # A call of the public function

    def __call__(
        self,
        tensors: TensorsT,
        asked: Values,
        impl: str,
        check: Callable[..., Checked],
        into: Mapping[str, Tensor] = NOTHING,
    ) -> Values:
        """The results; ``check(tensors, *asked, *into's)`` runs if no call like this one was made
        before.

        Backward adds the gradient of a tensor that ``into`` names to the buffer there, and returns
        none for it. The public function's argument for such a buffer is called
        ``<tensor>_main_grad``.
        """
        training = False
        if torch.is_grad_enabled():
            for place in self._leaves:
                training = training or bool(getattr(tensors[place], "requires_grad", False))
        key = call_key(
            (*tensors, *into.values()) if into else tensors,
            (*asked, *into, impl, training),
        )
        try:
            call = self.calls.get(key)
        except TypeError:  # an option that cannot be hashed: the checks report it
            call = key = None
        if call is not None:
            if call.ready is not None:
                tensors = call.ready(tensors)
        else:
            call, found = self._first(
                key,
                check(tensors, *asked, *into.values()),
                tensors,
                impl,
                training,
                into,
            )
            if call is None:
                return tuple(found)
            tensors = found
        if not training:
            return tuple(self.compute(tensors[0], call, tensors))
        request = [self, call, tensors, tuple(into.values())]
        first = APPLY(request, *map(tensors.__getitem__, self._leaves))
        return first, *request

    def _first(
        self,
        key: Key | None,
        checked: Checked,
        tensors: TensorsT,
        impl: str,
        training: bool,
        into: Mapping[str, Tensor],
    ) -> tuple[Pass | None, Any]:
        """The pass of a call that no other was like, and its tensors; ``None`` where none runs it,
        and its results.
        """
        (options, ready), name = checked, self.name
        if ready is not None:
            tensors = ready(tensors)
        if torch.compiler.is_compiling():
            check_choice(
                "impl",
                impl,
                IMPLS,
            )  # the operator chooses when it runs: a device cannot be asked in a trace
        else:
            name, impl = self._named(tensors, impl)
        if impl == "reference":
            found = calls.as_tuple(self.reference(tensors, options))
            return None, (*found, *[None] * (len(self.results) - len(found)))
        if key is None:
            where = "under torch.compile or with tensor subclasses; leave it out there, and add {}.grad to it"
            refuse_buffers(into, f"{where} after backward")
            return None, calls.as_tuple(self._by_torch(*tensors, *options, training, impl))
        call = Pass(
            name,
            options,
            impl,
            training,
            False,
            key[0],
            ready,
            tuple(into),
            self._taker(options),
        )
        return self._kept(key, call), tensors

    def _taker(self, options: OptionsT) -> Take:
        """Function that selects what backward reads, of a call's tensors, its results and ``None``."""
        reads = self.saved._fields if self.reads is None else self.reads(options)
        names = [*self._inputs, *self.results]
        return taker(
            [names.index(each) if each in reads else len(names) for each in self.saved._fields],
        )

    # One pass

    def compute(self, first: Tensor, call: Pass, given: Values) -> Results:
        """Results or gradients, with the GPU of ``first`` as the current one and outside autocast."""
        kind = (
            "cuda" if first.is_cuda else first.device.type
        )  # which makes a string, as slowly as the rest of this
        if torch.is_autocast_enabled(kind) or (
            first.is_cuda and first.get_device() != current_gpu()
        ):
            elsewhere: Results = run(self.compute, first, call, given)
            return elsewhere
        if call.program is not None and call.program.bound:
            return call.program(*given)
        device = first.device
        if call.impl in KERNELS:
            if (
                self.check_values is not None
                and not call.backward
                and host_may_read(device, "triton")
            ):
                self.check_values(self.tensors(*given), call.options)
            tried: list[tuple[str, str]] = []
            while (
                call.program is not None
                or call.impl == "triton"
                or fallback.given_up(call.name, device) is None
            ):
                found = fallback.attempt(self._launched, call, given)
                if not isinstance(found, fallback.KernelUnavailableError):
                    if found is None:
                        break
                    return found
                call.program, instead = None, found.instead
                if instead is None or instead in tried:
                    if call.impl == "triton":
                        raise found
                    instead = call.name, fallback.SLOWER
                tried.append(instead)
                fallback.give_up(instead[0], device, str(found), instead[1])
        fallback.refuse_capture(call.name, device)
        return self._tiled(call, first, given)

    def _tiled(self, call: Pass, first: Tensor, given: Values) -> Results:
        found: Results
        if call.backward:
            count = 1 + len(self.saved._fields)
            saved, into = self.saved(*given[1:count]), given[count:]
            found = self.tiled.backward(first, saved, call.options, call.wanted, *into)
        else:
            found = self.tiled.forward(self.tensors(*given), call.options, call.wanted)
        return found

    def _launched(self, call: Pass, given: Values) -> Results | None:
        """Run the kernels, and return what they make; ``None`` where they have no plan."""
        if call.program is None:
            call.program = self._program(call, given)
        return None if call.program is None else call.program(*given)

    def _program(self, call: Pass, given: Values) -> Program | None:
        """Program of the kernels for such a pass; ``plans.py`` sees layouts and no values."""
        from tilefold.ops._shared._triton.program import Program  # needs Triton

        plans, setting = self.plans(), setting_of(given[0].device, call.aligned)
        layouts: list[Any] = [
            None
            if x is None
            else torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
            for x in given
        ]
        if call.backward:
            names = (self._dfirst, *self.saved._fields, *[f"d{name}" for name in call.into])
            saved = self.saved(*layouts[1 : 1 + len(self.saved._fields)])
            setting = setting._replace(added=frozenset(call.into))
            plan = plans.backward(layouts[0], saved, call.options, call.wanted, setting)
        else:
            names, tensors = self._inputs, self.tensors(*layouts)
            plan = plans.forward(tensors, call.options, call.wanted, setting)
        results = self._made(call.backward, given, call.options, call.wanted, call.into)
        return (
            None if plan is None else Program(plan, names, results, given[0].device, call.aligned)
        )

    def _made(
        self,
        backward: bool,
        given: Sequence[Any],
        options: OptionsT,
        wanted: Any,
        into: Collection[str] = (),
    ) -> dict[str, Buffer | None]:
        """Results of a pass; ``None`` for a gradient that nobody wants, or that is added to a
        buffer.
        """
        if not backward:
            return dict(
                zip(self.results, self.outputs(self.tensors(*given), options, wanted), strict=True),
            )
        saved = self.saved(*given[1 : 1 + len(self.saved._fields)])
        made: dict[str, Buffer | None] = {}
        for (name, like), need in zip(self.gradients.items(), wanted, strict=True):
            if not need or name in into:
                made[f"d{name}"] = None
            elif callable(like):
                made[f"d{name}"] = like(saved, options)
            else:
                tensor = getattr(saved, like)
                made[f"d{name}"] = Buffer(tuple(tensor.shape), tensor.dtype)
        return made

    def _kept(self, key: Key | None, call: Pass) -> Pass:
        if key is not None and call.impl in KERNELS:
            if len(self.calls) >= MAX_CALLS:
                self.calls.clear()
            self.calls[key] = call
        return call

    def backward(
        self,
        call: Pass,
        needs: Needs,
        dfirst: Tensor,
        saved: tuple[Tensor | None, ...],
        into: tuple[Tensor, ...],
    ) -> Results:
        """Gradients of an eager call; the registered operator refuses a second derivative, and
        takes several.
        """
        given = (dfirst, *saved, *into)
        key = None if torch.is_grad_enabled() else call_key(given, (call, needs), of_call=True)
        if key is None:
            refuse_buffers(
                call.into,
                "with create_graph=True or is_grads_batched=True; leave one of them out",
            )
            return self._by_operator(dfirst, saved, call.options, needs, call.impl)
        known = self.calls.get(key)
        if known is None:
            known = self._kept(
                key,
                Pass(call.name, call.options, call.impl, needs, True, key[0], into=call.into),
            )
        return self.compute(dfirst, known, given)

    # The registered operator

    def _register(self) -> None:
        options, back = typing.get_type_hints(self.options), f"{self.name}_backward"
        forward = typing.get_type_hints(self.tensors) | options | {"training": bool, "impl": str}
        backward = {self._dfirst: Tensor} | typing.get_type_hints(self.saved) | options
        backward |= {"needs": Sequence[bool], "impl": str}
        both = (self.name, forward, self.results), (back, backward, self.gradients)
        for name, hints, results in both[: 1 + bool(self.gradients)]:
            is_backward = name == back
            torch.library.define(f"tilefold::{name}", calls.schema_of(hints, len(results)))
            torch.library.impl(
                f"tilefold::{name}",
                "default",
                partial(self._registered, is_backward),
            )
            torch.library.register_fake(f"tilefold::{name}", partial(self._fake, is_backward))
        self._by_torch = getattr(torch.ops.tilefold, self.name)
        if not self.gradients:
            return
        self._gradients_by_torch = getattr(torch.ops.tilefold, back)
        calls.forbid_double_backward(back, self.name)
        torch.library.register_autograd(
            f"tilefold::{self.name}",
            self._differentiate,
            setup_context=self._setup_context,
        )

    def _split(self, backward: bool, args: Values) -> tuple[Any, OptionsT, Any, str]:
        values: list[Any] = [
            tuple(each) if isinstance(each, list) else each for each in args
        ]  # as keys can have them
        *values, wanted, impl = values
        count = 1 + len(self.saved._fields) if backward else len(self._inputs)
        given = tuple(values[:count]) if backward else self.tensors(*values[:count])
        return given, self.options(*values[count:]), wanted, impl

    def _registered(self, backward: bool, *args: Any) -> Any:
        given, options, wanted, impl = self._split(backward, args)
        name = self.name
        if backward:
            first, like = next(iter(self.gradients.items()))
            chooses = given[1 + self.saved._fields.index(first if callable(like) else like)]
            impl = settled(impl, self.chosen_impl(chooses, impl))
        else:
            name, impl = self._named(given, impl)
        key = call_key(given, ("registered", backward, *options, wanted, impl))
        aligned = key is not None and key[0]
        call = self.calls.get(key) or self._kept(
            key,
            Pass(name, options, impl, wanted, backward, aligned),
        )
        found = self.compute(given[0], call, given)
        if backward:  # operators return tensors only
            found = [given[0].new_empty(0) if x is None else x for x in found]
        elif any(result is None for result in found):
            made = calls.as_tuple(self._fake(backward, *args))
            found = [each.zero_() if x is None else x for x, each in zip(found, made, strict=True)]
        return calls.bare(found)

    def _fake(self, backward: bool, *args: Any) -> Any:
        """Results without values; an empty one stands for a gradient that nobody asked for."""
        given, options, wanted, _ = self._split(backward, args)
        made = self._made(backward, given, options, wanted).values()
        return calls.bare(
            [(buffer or Buffer((0,), given[0].dtype)).on(given[0].device) for buffer in made],
        )

    def _by_operator(
        self,
        dfirst: Tensor,
        saved: tuple[Tensor | None, ...],
        options: OptionsT,
        needs: Needs,
        impl: str,
    ) -> Results:
        found = calls.as_tuple(self._gradients_by_torch(dfirst, *saved, *options, needs, impl))
        return [gradient if need else None for gradient, need in zip(found, needs, strict=True)]

    def _setup_context(self, ctx: Any, inputs: Values, output: Any) -> None:
        tensors, ctx.options, ctx.training, ctx.impl = self._split(False, inputs)
        results = calls.as_tuple(output)
        ctx.mark_non_differentiable(*results[1:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*self._taker(ctx.options)((*tensors, *results, None)))

    def _differentiate(
        self,
        ctx: Any,
        dfirst: Tensor | None,
        *_: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        gradients: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
        if dfirst is not None:
            if not ctx.training:
                raise RuntimeError(
                    f"tilefold::{self.name} needs training=True where a gradient is asked for; call {self.name}.",
                )
            needs = tuple(ctx.needs_input_grad[place] for place in self._leaves)
            found = self._by_operator(dfirst, ctx.saved_tensors, ctx.options, needs, ctx.impl)
            for place, gradient in zip(self._leaves, found, strict=True):
                gradients[place] = gradient
        return tuple(gradients)


def refuse_buffers(into: Collection[str], where: str) -> None:
    """Raise ``RuntimeError`` where a buffer is given that gradients are to be added to."""
    for name in into:
        raise RuntimeError(f"{name}_main_grad cannot be used {where.format(name)}.")


def setting_of(device: torch.device, aligned: bool = True) -> Setting:
    """Current setting for plans on this device."""
    tf32, given_up = (
        tf32_allowed(torch.float32),
        frozenset(name for name, on in fallback.GIVEN_UP if on == device),
    )
    return Setting(capability_of(device), sm_count(device), tf32, aligned, given_up)
