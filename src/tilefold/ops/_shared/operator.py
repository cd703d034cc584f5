"""Declarative operators: dispatch, caching, registration with torch, and autograd.

An :class:`Operator` is described by records of its tensors, options and results. Eager calls,
compiled calls and gradients take one path from there: a key finds the pass that an equal call left,
and the pass runs kernels or the tiled path.
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
from tilefold.ops._shared.calls import APPLY, Key, Pass, call_key, call_on_device
from tilefold.ops._shared.checks import check_choice
from tilefold.ops._shared.impl import (
    IMPLS,
    capability_of,
    host_may_read,
    impl_with_fallback,
    sm_count,
)
from tilefold.ops._shared.internals import current_gpu, tf32_allowed
from tilefold.ops._shared.plan import Buffer, Selector, Setting, Values, selector

if TYPE_CHECKING:
    from tilefold.ops._shared._triton.program import Program

# a record of tensors, some of which may be None
TensorsT = TypeVar("TensorsT", bound=tuple[Any, ...])
OptionsT = TypeVar("OptionsT", bound=tuple[Any, ...])
Results = Sequence["Tensor | None"]
Needs = tuple[bool, ...]  # which gradients are computed
KERNEL_IMPLS = ("auto", "triton")
NO_BUFFERS: Mapping[str, Tensor] = MappingProxyType({})
MAX_CALLS = 4096  # passes that an operator remembers; a forgotten one is made again


class Checked(NamedTuple):
    """Result of the checks of a call's arguments.

    Attributes:
        options: the operator's options.
        prepare: makes the operator's tensors from the arguments, differentiably; ``None`` if they
            are equal.
    """

    options: Any
    prepare: Callable[[Any], Any] | None = None


@dataclass(eq=False)
class Operator(Generic[TensorsT, OptionsT]):
    """An operator: a function of tensors with a reference, a tiled path, kernels and gradients.

    Only its first result is differentiable, and only once.

    Args:
        name: name of the public function, and of the registered operator ``tilefold::name``.
        tensors: record type of the tensors. Its annotations give the torch schema. The first tensor
            chooses device and implementation.
        options: record type of the options. Its annotations give the torch schema.
        saved: record type of what backward reads. Each field has the name of a tensor or a result.
        results: names of the results.
        outputs: ``(tensors, options, training)`` to the results' shapes and dtypes, for plans and
            for compilers. ``training`` is false where no gradient may be asked for. A result that
            only backward reads then has no elements.
        gradients: by the name of each tensor that has a gradient, the name of the saved tensor with
            the gradient's shape and dtype, or a function ``(saved, options)`` to the gradient's
            :class:`Buffer`. Gradients are contiguous. The tensor itself may be ``None`` in a
            call. The saved tensor of the first entry (the one with its own name, if a function is
            given) chooses the implementation of a registered gradient. An operator without entries
            cannot be differentiated.
        plans: imports ``plans.py``. Its ``forward(tensors, options, training, setting)`` and
            ``backward(d<first result>, saved, options, needs, setting)`` return plans, or ``None``
            if only the tiled path serves. The results of backward are called ``d<tensor>``.
        tiled: the tiled path. Its ``forward(tensors, options, training)`` returns the results, and
            ``backward(d<first result>, saved, options, needs, *main_grads)`` the gradients, with
            ``None`` for those that it does not compute.
        reference: ``(tensors, options)`` to the first result, or to all.
        check_values: checks values of tensors on the CPU before kernels run. The tiled path checks
            the values that it reads.
        reads: names of the fields of ``saved`` that backward reads with these options. The other
            fields are ``None``.
        choose: ``(tensors, impl)`` to the name under which the kernels of such calls are given up,
            and the implementation.

    Attributes:
        calls: passes of the public function, of the registered operators and of gradients, by key.
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
        self._tensor_names: tuple[str, ...] = cast(Any, self.tensors)._fields
        self._differentiable = [self._tensor_names.index(name) for name in self.gradients]
        self._dfirst_name = f"d{self.results[0]}"
        self.calls: dict[Key | None, Pass] = {}
        self._register()

    def chosen_impl(self, first: Tensor, impl: str) -> str:
        """Implementation that runs for the first tensor.

        See :func:`tilefold.ops._shared.impl.chosen_impl`.
        """
        return implementations.chosen_impl(self.name, self._tensor_names[0], first, impl)

    # A call of the public function

    def __call__(
        self,
        tensors: TensorsT,
        raw_options: Values,
        impl: str,
        check: Callable[..., Checked],
        main_grads: Mapping[str, Tensor] = NO_BUFFERS,
    ) -> Values:
        """Compute the results.

        Args:
            tensors: the tensors, as the caller of the public function passed them.
            raw_options: the options, as the caller passed them.
            impl: implementation, one of :data:`IMPLS`.
            check: ``check(tensors, *raw_options, *main_grads.values())`` validates the arguments.
                It runs only if no equal call was made before.
            main_grads: buffers by the name of a tensor. Backward adds the tensor's gradient to its
                buffer, and returns none for it. The public function's argument for such a buffer
                has to be called ``<tensor>_main_grad``.
        """
        training = False
        if torch.is_grad_enabled():
            for position in self._differentiable:
                training = training or bool(getattr(tensors[position], "requires_grad", False))
        key = call_key(
            (*tensors, *main_grads.values()) if main_grads else tensors,
            (*raw_options, *main_grads, impl, training),
        )
        try:
            call = self.calls.get(key)
        except TypeError:  # an option that cannot be hashed: the checks report it
            call = key = None
        if call is None:
            checked = check(tensors, *raw_options, *main_grads.values())
            if checked.prepare is not None:
                tensors = checked.prepare(tensors)
            name, impl = self._choose_impl(tensors, impl)
            if impl == "reference":
                return self._reference_results(tensors, checked.options)
            if key is None:
                situation = "under torch.compile or with tensor subclasses"
                remedy = "leave it out there, and add {}.grad to it after backward"
                refuse_main_grads(main_grads, f"{situation}; {remedy}")
                return calls.as_tuple(
                    self._registered(*tensors, *checked.options, training, impl),
                )
            call = Pass(
                name=name,
                options=checked.options,
                impl=impl,
                needs=training,
                backward=False,
                aligned=key[0],
                prepare=checked.prepare,
                main_grads=tuple(main_grads),
                select_saved=self._saved_selector(checked.options),
            )
            self._remember(key, call)
        elif call.prepare is not None:
            tensors = call.prepare(tensors)
        if not training:
            return tuple(self.compute(tensors[0], call, tensors))
        request = [self, call, tensors, tuple(main_grads.values())]
        first = APPLY(request, *map(tensors.__getitem__, self._differentiable))
        return first, *request

    def _choose_impl(self, tensors: TensorsT, impl: str) -> tuple[str, str]:
        """Return the name under which kernels are given up, and the implementation.

        In a trace the implementation is not resolved: the device is unknown there, and the
        registered operator chooses when it runs.
        """
        if torch.compiler.is_compiling():
            check_choice("impl", impl, IMPLS)
            return self.name, impl
        return self._named_impl(tensors, impl)

    def _named_impl(self, tensors: TensorsT, impl: str) -> tuple[str, str]:
        """Return the name under which kernels are given up, and the implementation."""
        if self.choose is None:
            name = self.name
            chosen = self.chosen_impl(tensors[0], impl)
        else:
            name, chosen = self.choose(tensors, impl)
        return name, impl_with_fallback(impl, chosen)

    def _reference_results(self, tensors: TensorsT, options: OptionsT) -> Values:
        """Return the reference's results, and ``None`` for those that it does not compute."""
        results = calls.as_tuple(self.reference(tensors, options))
        return (*results, *[None] * (len(self.results) - len(results)))

    def _saved_selector(self, options: OptionsT) -> Selector:
        """Return a function that selects what autograd saves for backward.

        The function takes the tensors of a call, its results and a final ``None``, all in one
        tuple. It returns one value for each field of the record of saved tensors. A field that
        backward does not read with these options gets the ``None``.
        """
        reads = self.saved._fields if self.reads is None else self.reads(options)
        names = [*self._tensor_names, *self.results]
        none_position = len(names)
        return selector(
            [
                names.index(field) if field in reads else none_position
                for field in self.saved._fields
            ],
        )

    # One pass

    def compute(self, first: Tensor, call: Pass, inputs: Values) -> Results:
        """Run a pass on the GPU of ``first``, outside autocast.

        Args:
            first: the first of the inputs.
            call: the pass.
            inputs: tensors of a forward pass. Of a backward pass, the gradient of the first result,
                the saved tensors, and the buffers to add gradients to.

        Returns:
            Results of a forward pass, or gradients.
        """
        # device.type makes a string, which takes as long as the rest of this function
        kind = "cuda" if first.is_cuda else first.device.type
        if torch.is_autocast_enabled(kind) or (
            first.is_cuda and first.get_device() != current_gpu()
        ):
            results: Results = call_on_device(self.compute, first, call, inputs)
            return results
        if call.program is not None and call.program.bound:
            return call.program(*inputs)
        if call.impl in KERNEL_IMPLS:
            if (
                self.check_values is not None
                and not call.backward
                and host_may_read(first.device, "triton")
            ):
                self.check_values(self.tensors(*inputs), call.options)
            kernel_results = self._run_kernels(first.device, call, inputs)
            if kernel_results is not None:
                return kernel_results
        fallback.refuse_capture(call.name, first.device)
        return self._run_tiled(call, inputs)

    def _run_kernels(self, device: torch.device, call: Pass, inputs: Values) -> Results | None:
        """Run the kernels, and return their results, or ``None`` if the tiled path has to run.

        A kernel that cannot be built is given up, and the pass is planned again without it. With
        ``impl="triton"`` the last such error is raised.
        """
        replaced: list[tuple[str, str]] = []
        while (
            call.program is not None
            or call.impl == "triton"
            or fallback.given_up(call.name, device) is None
        ):
            results = fallback.try_kernels(self._launch, call, inputs)
            if not isinstance(results, fallback.KernelUnavailableError):
                return results
            call.program = None
            unavailable = results.fallback
            if unavailable is None or unavailable in replaced:
                if call.impl == "triton":
                    raise results
                unavailable = call.name, fallback.TILED_PATH_RUNS
            replaced.append(unavailable)
            kernel, consequence = unavailable
            fallback.give_up(kernel, device, str(results), consequence)
        return None

    def _launch(self, call: Pass, inputs: Values) -> Results | None:
        """Run the kernels, and return their results, or ``None`` if they have no plan."""
        if call.program is None:
            call.program = self._make_program(call, inputs)
        return None if call.program is None else call.program(*inputs)

    def _run_tiled(self, call: Pass, inputs: Values) -> Results:
        """Run the tiled path."""
        results: Results
        if call.backward:
            dfirst, saved, main_grads = self._split_backward_inputs(inputs)
            results = self.tiled.backward(dfirst, saved, call.options, call.needs, *main_grads)
        else:
            results = self.tiled.forward(self.tensors(*inputs), call.options, call.needs)
        return results

    def _make_program(self, call: Pass, inputs: Values) -> Program | None:
        """Plan the kernels of a pass, and bind the plan to the device.

        The plan depends only on shapes, strides and dtypes of the inputs, which are passed on as
        tensors on the meta device.

        Returns:
            The program, or ``None`` if there is no plan for this call.
        """
        from tilefold.ops._shared._triton.program import Program  # needs Triton

        plans = self.plans()
        device = inputs[0].device
        setting = setting_of(device, call.aligned)
        layouts: Values = tuple([None if x is None else _layout_of(x) for x in inputs])
        plan_inputs: tuple[str, ...]
        if call.backward:
            dfirst, saved, _ = self._split_backward_inputs(layouts)
            main_grad_names = [f"d{name}" for name in call.main_grads]
            plan_inputs = (self._dfirst_name, *self.saved._fields, *main_grad_names)
            setting = setting._replace(accumulated=frozenset(call.main_grads))
            plan = plans.backward(dfirst, saved, call.options, call.needs, setting)
        else:
            plan_inputs = self._tensor_names
            plan = plans.forward(self.tensors(*layouts), call.options, call.needs, setting)
        if plan is None:
            return None
        results = self._result_buffers(
            call.backward,
            inputs,
            call.options,
            call.needs,
            call.main_grads,
        )
        return Program(plan, plan_inputs, results, device, call.aligned)

    def _split_backward_inputs(self, inputs: Values) -> tuple[Any, Any, Values]:
        """Return the gradient of the first result, the record of saved tensors, and main grads."""
        first_main_grad = 1 + len(self.saved._fields)
        return inputs[0], self.saved(*inputs[1:first_main_grad]), inputs[first_main_grad:]

    def _result_buffers(
        self,
        backward: bool,
        inputs: Values,
        options: OptionsT,
        needs: Any,
        main_grads: Collection[str] = (),
    ) -> dict[str, Buffer | None]:
        """Return shapes and dtypes of the results of a pass, by name.

        Args:
            backward: whether the pass computes gradients.
            inputs: inputs of the pass, as in :meth:`compute`.
            options: the operator's checked options.
            needs: as in :class:`Pass`.
            main_grads: names of tensors whose gradients are added to buffers.

        Returns:
            Results of a forward pass, or gradients. A gradient that is not needed, or is added to a
            buffer, is ``None``.
        """
        if not backward:
            buffers = self.outputs(self.tensors(*inputs), options, needs)
            return dict(zip(self.results, buffers, strict=True))
        _, saved, _ = self._split_backward_inputs(inputs)
        gradients: dict[str, Buffer | None] = {}
        for (name, like), needed in zip(self.gradients.items(), needs, strict=True):
            if not needed or name in main_grads:
                gradients[f"d{name}"] = None
            elif callable(like):
                gradients[f"d{name}"] = like(saved, options)
            else:
                tensor = getattr(saved, like)
                gradients[f"d{name}"] = Buffer(tuple(tensor.shape), tensor.dtype)
        return gradients

    def _remember(self, key: Key | None, call: Pass) -> None:
        """Cache a pass if it launches kernels. The tiled path would gain nothing."""
        if key is not None and call.impl in KERNEL_IMPLS:
            if len(self.calls) >= MAX_CALLS:
                self.calls.clear()
            self.calls[key] = call

    def backward(
        self,
        call: Pass,
        needs: Needs,
        dfirst: Tensor,
        saved: tuple[Tensor | None, ...],
        main_grads: tuple[Tensor, ...],
    ) -> Results:
        """Compute the gradients of an eager call.

        With ``create_graph`` or ``is_grads_batched`` the registered gradient runs. It refuses
        second derivatives, and can be batched.
        """
        inputs = (dfirst, *saved, *main_grads)
        key = None
        if not torch.is_grad_enabled():
            key = call_key(inputs, (call, needs), of_gradient=True)
        if key is None:
            refuse_main_grads(
                call.main_grads,
                "with create_graph=True or is_grads_batched=True; leave one of them out",
            )
            return self._registered_gradients(dfirst, saved, call.options, needs, call.impl)
        backward_pass = self.calls.get(key)
        if backward_pass is None:
            backward_pass = Pass(
                name=call.name,
                options=call.options,
                impl=call.impl,
                needs=needs,
                backward=True,
                aligned=key[0],
                main_grads=call.main_grads,
            )
            self._remember(key, backward_pass)
        return self.compute(dfirst, backward_pass, inputs)

    # The registered operator

    def _register(self) -> None:
        """Register ``tilefold::name``, and ``tilefold::name_backward`` if there are gradients."""
        options = typing.get_type_hints(self.options)
        forward_arguments = {
            **typing.get_type_hints(self.tensors),
            **options,
            "training": bool,
            "impl": str,
        }
        self._define(self.name, forward_arguments, len(self.results), backward=False)
        self._registered = getattr(torch.ops.tilefold, self.name)
        if not self.gradients:
            return
        backward_name = f"{self.name}_backward"
        backward_arguments = {
            self._dfirst_name: Tensor,
            **typing.get_type_hints(self.saved),
            **options,
            "needs": Sequence[bool],
            "impl": str,
        }
        self._define(backward_name, backward_arguments, len(self.gradients), backward=True)
        self._registered_backward = getattr(torch.ops.tilefold, backward_name)
        calls.forbid_double_backward(backward_name, self.name)
        torch.library.register_autograd(
            f"tilefold::{self.name}",
            self._differentiate,
            setup_context=self._setup_context,
        )

    def _define(
        self,
        name: str,
        arguments: Mapping[str, Any],
        n_results: int,
        backward: bool,
    ) -> None:
        """Register an operator with its schema, its implementation and its fake kernel.

        Args:
            name: name in the namespace ``tilefold``.
            arguments: annotations of the arguments, by name.
            n_results: number of tensors that it returns.
            backward: whether it computes gradients.
        """
        qualified_name = f"tilefold::{name}"
        torch.library.define(qualified_name, calls.schema_of(arguments, n_results))
        torch.library.impl(qualified_name, "default", partial(self._run_registered, backward))
        torch.library.register_fake(qualified_name, partial(self._fake_results, backward))

    def _parse_registered(
        self,
        backward: bool,
        arguments: Values,
    ) -> tuple[Any, OptionsT, Any, str]:
        """Split the arguments of a registered operator.

        Returns:
            The tensors (a record for forward, a tuple for backward), the options, ``training`` or
            which gradients are needed, and the implementation.
        """
        values: list[Any] = [  # torch passes lists, which keys cannot contain
            tuple(value) if isinstance(value, list) else value for value in arguments
        ]
        *values, needs, impl = values
        n_tensors = 1 + len(self.saved._fields) if backward else len(self._tensor_names)
        tensors: Any = tuple(values[:n_tensors])
        if not backward:
            tensors = self.tensors(*tensors)
        return tensors, self.options(*values[n_tensors:]), needs, impl

    def _run_registered(self, backward: bool, *arguments: Any) -> Any:
        """Run ``tilefold::name`` or ``tilefold::name_backward``.

        A registered operator cannot return ``None``. A gradient that is not computed becomes an
        empty tensor, and a result that is not computed becomes zeros of its declared shape.
        """
        tensors, options, needs, impl = self._parse_registered(backward, arguments)
        if backward:
            name = self.name
            deciding = self._tensor_that_chooses(tensors)
            impl = impl_with_fallback(impl, self.chosen_impl(deciding, impl))
        else:
            name, impl = self._named_impl(tensors, impl)
        key = call_key(tensors, ("registered", backward, *options, needs, impl))
        call = self.calls.get(key)
        if call is None:
            aligned = key is not None and key[0]
            call = Pass(name, options, impl, needs, backward, aligned)
            self._remember(key, call)
        results = list(self.compute(tensors[0], call, tensors))
        if backward:
            results = [tensors[0].new_empty(0) if x is None else x for x in results]
        elif any(x is None for x in results):
            empty = calls.as_tuple(self._fake_results(backward, *arguments))
            results = [
                like.zero_() if x is None else x for x, like in zip(results, empty, strict=True)
            ]
        return calls.as_registered(results)

    def _tensor_that_chooses(self, backward_tensors: Values) -> Tensor:
        """Return the saved tensor that chooses the implementation of a registered gradient."""
        name, like = next(iter(self.gradients.items()))
        _, saved, _ = self._split_backward_inputs(backward_tensors)
        tensor: Tensor = getattr(saved, name if callable(like) else like)
        return tensor

    def _fake_results(self, backward: bool, *arguments: Any) -> Any:
        """Return results without values. A gradient that is not needed has no elements."""
        tensors, options, needs, _ = self._parse_registered(backward, arguments)
        first = tensors[0]
        no_gradient = Buffer((0,), first.dtype)
        buffers = self._result_buffers(backward, tensors, options, needs).values()
        results = [
            (no_gradient if buffer is None else buffer).on(first.device) for buffer in buffers
        ]
        return calls.as_registered(results)

    def _registered_gradients(
        self,
        dfirst: Tensor,
        saved: tuple[Tensor | None, ...],
        options: OptionsT,
        needs: Needs,
        impl: str,
    ) -> Results:
        """Compute gradients by the registered operator ``tilefold::name_backward``.

        Args:
            dfirst: gradient of the first result.
            saved: saved tensors, in the order of the record's fields.
            options: the operator's checked options.
            needs: which gradients are computed.
            impl: implementation.

        Returns:
            The gradients, ``None`` for those that are not needed.
        """
        gradients = calls.as_tuple(
            self._registered_backward(dfirst, *saved, *options, needs, impl),
        )
        return [
            gradient if needed else None for gradient, needed in zip(gradients, needs, strict=True)
        ]

    def _setup_context(self, ctx: Any, inputs: Values, output: Any) -> None:
        """Save what the registered operator's backward reads."""
        tensors, ctx.options, ctx.training, ctx.impl = self._parse_registered(False, inputs)
        results = calls.as_tuple(output)
        ctx.mark_non_differentiable(*results[1:])
        ctx.set_materialize_grads(False)
        select_saved = self._saved_selector(ctx.options)
        ctx.save_for_backward(*select_saved((*tensors, *results, None)))

    def _differentiate(
        self,
        ctx: Any,
        dfirst: Tensor | None,
        *_: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        """Compute the gradients of the registered operator's arguments, for autograd.

        Args:
            ctx: autograd's context, as :meth:`_setup_context` filled it.
            dfirst: gradient of the first result, ``None`` if nothing depends on it.
            _: gradients of the other results, which are not differentiable.

        Returns:
            One entry for each argument, ``None`` for those that are not differentiable tensors.
        """
        gradients: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
        if dfirst is None:
            return tuple(gradients)
        if not ctx.training:
            raise RuntimeError(
                f"tilefold::{self.name} needs training=True where a gradient is asked for; call "
                f"{self.name}.",
            )
        needs = tuple(ctx.needs_input_grad[position] for position in self._differentiable)
        computed = self._registered_gradients(
            dfirst,
            ctx.saved_tensors,
            ctx.options,
            needs,
            ctx.impl,
        )
        for position, gradient in zip(self._differentiable, computed, strict=True):
            gradients[position] = gradient
        return tuple(gradients)


def _layout_of(tensor: Tensor) -> Tensor:
    """Return a tensor with the same shape, strides and dtype on the meta device."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def refuse_main_grads(names: Collection[str], situation: str) -> None:
    """Raise ``RuntimeError`` if gradients are to be added to buffers.

    Args:
        names: names of the tensors whose gradients are.
        situation: where that is impossible, and the remedy. ``{}`` becomes the tensor's name.
    """
    for name in names:
        raise RuntimeError(f"{name}_main_grad cannot be used {situation.format(name)}.")


def setting_of(device: torch.device, aligned: bool = True) -> Setting:
    """Return the current setting for plans on a device."""
    return Setting(
        capability=capability_of(device),
        multiprocessors=sm_count(device),
        tf32=tf32_allowed(torch.float32),
        aligned=aligned,
        given_up=frozenset(
            kernel for kernel, kernel_device in fallback.GIVEN_UP if kernel_device == device
        ),
    )
