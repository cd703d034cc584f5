"""Declarative operators: dispatch, caching, registration with torch, and autograd.

An :class:`Operator` is described by records of its tensors, options and results. Eager calls,
compiled calls and gradients take one path from there: a key finds the pass that an equal call left,
and the pass runs kernels or the tiled path.
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from tilefold.ops._shared import calls, fallback
from tilefold.ops._shared import impl as implementations
from tilefold.ops._shared.calls import APPLY, Key, Pass, call_key, call_on_device, is_aligned
from tilefold.ops._shared.checks import check_choice
from tilefold.ops._shared.fallback import KernelFallback, KernelUnavailableError
from tilefold.ops._shared.impl import (
    IMPLS,
    capability_of,
    host_may_read,
    impl_with_fallback,
    sm_count,
)
from tilefold.ops._shared.internals import current_gpu, tf32_allowed
from tilefold.ops._shared.plan import Buffer, Plan, Selector, Setting, Values, selector

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


class BackwardInputs(NamedTuple):
    """Inputs of a backward pass.

    Attributes:
        output_grad: gradient of the first result.
        saved: record of the saved tensors.
        main_grads: buffers to which gradients are added.
    """

    output_grad: Tensor
    saved: Any
    main_grads: tuple[Tensor, ...]


class RegisteredCall(NamedTuple):
    """Arguments of a registered operator.

    Attributes:
        tensors: the tensors. For backward, the gradient of the first result and the saved tensors.
        options: record of the options.
        needs: for forward, whether backward may follow; for backward, which gradients are needed.
        impl: implementation.
    """

    tensors: Values
    options: Any
    needs: Any
    impl: str


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
            for compilers. ``training`` is false if no gradient can be needed. A result that
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
        choose: ``(tensors, impl)`` to the name under which failed kernels of such calls are
            recorded, and the implementation.

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
        """Derive names from the records, and register the operator with torch."""
        self._tensor_names: tuple[str, ...] = cast(Any, self.tensors)._fields
        self._differentiable = [self._tensor_names.index(name) for name in self.gradients]
        self._output_grad_name = f"d{self.results[0]}"
        self.calls: dict[Key | None, Pass] = {}
        self._register()

    def chosen_impl(self, first: Tensor, impl: str) -> str:
        """Return the implementation that runs for the device and the dtype of the first tensor."""
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
            call = self.calls.get(key)  # what an equal call left: checked options and launches
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
                aligned=is_aligned(key),
                prepare=checked.prepare,
                main_grads=tuple(main_grads),
                select_saved=self._saved_selector(checked.options),
            )
            self._remember(key, call)
        elif call.prepare is not None:
            tensors = call.prepare(tensors)
        if not training:
            return tuple(self.compute(call, tensors))
        # Autograd passes the request on unseen. It then holds the results after the first one.
        request = [self, call, tensors, tuple(main_grads.values())]
        first = APPLY(request, *map(tensors.__getitem__, self._differentiable))
        return first, *request

    def _choose_impl(self, tensors: TensorsT, impl: str) -> tuple[str, str]:
        """Return the name under which failures of kernels are recorded, and the implementation.

        In a trace the implementation is not resolved: the device is unknown there, and the
        registered operator chooses when it runs.

        Args:
            tensors: tensors of the call.
            impl: the argument ``impl`` of the call.
        """
        if torch.compiler.is_compiling():
            check_choice("impl", impl, IMPLS)
            return self.name, impl
        return self._named_impl(tensors, impl)

    def _named_impl(self, tensors: TensorsT, impl: str) -> tuple[str, str]:
        """Return the name under which failures of kernels are recorded, and the implementation."""
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

        The function takes ``(*tensors, *results, None)`` of a call. It returns one value for each
        field of the record of saved tensors. A field that backward does not read with these options
        is ``None``, which the function takes from the end of its argument.
        """
        read_fields = self.saved._fields if self.reads is None else self.reads(options)
        names = [*self._tensor_names, *self.results]
        none_position = len(names)
        return selector(
            [
                names.index(field) if field in read_fields else none_position
                for field in self.saved._fields
            ],
        )

    # One pass

    def compute(self, call: Pass, inputs: Values) -> Results:
        """Run a forward or a backward pass, on the GPU of its first input and outside autocast.

        A program whose launches are all bound runs at once. Otherwise the kernels may first have to
        be planned and compiled. If they cannot run, the tiled path does.

        Args:
            call: the pass: its options, its implementation and, once it has run, its launches.
            inputs: for a forward pass, the tensors. For a backward pass, the fields of
                :class:`BackwardInputs`, in one tuple.

        Returns:
            Results of a forward pass, or gradients.
        """
        first: Tensor = inputs[0]
        # `device.type` builds a string, which takes as long as the rest of this function.
        device_type = "cuda" if first.is_cuda else first.device.type
        is_on_other_gpu = first.is_cuda and first.get_device() != current_gpu()
        if is_on_other_gpu or torch.is_autocast_enabled(device_type):
            results: Results = call_on_device(first.device, self.compute, call, inputs)
            return results
        if call.program is not None and call.program.bound:
            return call.program(*inputs)
        if call.impl in KERNEL_IMPLS:
            kernel_results = self._run_kernels(first.device, call, inputs)
            if kernel_results is not None:
                return kernel_results
        fallback.refuse_capture(call.name, first.device)
        return self._run_tiled(call, inputs)

    def _run_kernels(self, device: torch.device, call: Pass, inputs: Values) -> Results | None:
        """Run the kernels of a pass; return ``None`` if the tiled path has to run instead.

        If a kernel cannot be built, the failure is recorded with a warning, and the pass is planned
        again without this kernel. If no kernel can replace it, the tiled path runs from then on.
        With ``impl="triton"`` the error is raised instead.

        Args:
            device: the GPU.
            call: the pass: its options, its implementation and, once it has run, its launches.
            inputs: the tensors of a forward pass, or what a backward pass reads.
        """
        if self.check_values is not None and not call.backward and host_may_read(device, "triton"):
            self.check_values(self.tensors(*inputs), call.options)
        earlier_replacements: list[KernelFallback] = []
        while call.impl == "triton" or fallback.failure_of(call.name, device) is None:
            try:
                return self._launch(call, inputs)
            except KernelUnavailableError as error:
                call.program = None
                replacement = error.fallback
                if replacement is None or replacement in earlier_replacements:
                    if call.impl == "triton":
                        raise
                    replacement = KernelFallback(call.name, fallback.TILED_PATH_NOTE)
                earlier_replacements.append(replacement)
                fallback.warn_and_record_failure(
                    replacement.kernel,
                    device,
                    str(error),
                    replacement.sentence,
                )
        return None

    def _launch(self, call: Pass, inputs: Values) -> Results | None:
        """Run the kernels, and return their results, or ``None`` if they have no plan."""
        if call.program is None:
            call.program = self._make_program(call, inputs)
        return None if call.program is None else call.program(*inputs)

    def _run_tiled(self, call: Pass, inputs: Values) -> Results:
        """Compute a pass by torch operations on tiles.

        Args:
            call: the pass: its options, its implementation and, once it has run, its launches.
            inputs: the tensors of a forward pass, or what a backward pass reads.
        """
        results: Results
        if call.backward:
            output_grad, saved, main_grads = self._backward_inputs(inputs)
            results = self.tiled.backward(
                output_grad,
                saved,
                call.options,
                call.needs,
                *main_grads,
            )
        else:
            results = self.tiled.forward(self.tensors(*inputs), call.options, call.needs)
        return results

    def _make_program(self, call: Pass, inputs: Values) -> Program | None:
        """Plan the kernels of a pass, and return a program that launches them on the device.

        The plan depends only on the layouts of the inputs: shapes, strides and dtypes, which are
        passed on as tensors on the meta device. Background threads start to compile the kernels,
        and those of the backward pass if one may follow.

        Returns:
            The program, or ``None`` if there is no plan for this call.
        """
        from tilefold.ops._shared._triton.launch import start_plan  # needs Triton
        from tilefold.ops._shared._triton.program import Program

        device = inputs[0].device
        setting = setting_of(device, call.aligned)
        layouts: Values = tuple([None if x is None else _layout_of(x) for x in inputs])
        if call.backward:
            plan = self._plan_backward(call, layouts, setting)
            saved = self._backward_inputs(inputs).saved
            results = self._gradient_buffers(saved, call.options, call.needs, call.main_grads)
            input_names = self._backward_names(call)
        else:
            plan = self.plans().forward(self.tensors(*layouts), call.options, call.needs, setting)
            results = self._output_buffers(self.tensors(*inputs), call.options, call.needs)
            input_names = self._tensor_names
        if plan is None:
            return None
        if call.aligned:  # builds ahead of time are for aligned tensors
            named_layouts = dict(zip(input_names, layouts, strict=True))
            is_new = start_plan(plan, named_layouts, results, device, runs_now=True)
            may_be_differentiated = call.needs and not call.backward
            if is_new and may_be_differentiated and call.select_saved is not None:
                needs = tuple(
                    getattr(inputs[position], "requires_grad", False)
                    for position in self._differentiable
                )
                self._compile_backward_ahead(call, layouts, plan, results, needs, device)
        return Program(plan, input_names, results, device, call.aligned)

    def compile_ahead(
        self,
        tensors: TensorsT,
        options: OptionsT,
        device: torch.device,
        needs: Needs | None = None,
    ) -> None:
        """Let background threads compile the kernels of a call that will probably follow.

        Args:
            tensors: layouts of the tensors on the meta device, all of which will be aligned.
            options: the checked options.
            device: the GPU.
            needs: which gradients will be computed; ``None`` for a call without gradients.
        """
        from tilefold.ops._shared._triton.launch import start_plan  # needs Triton

        call = Pass(
            name=self.name,
            options=options,
            impl="triton",
            needs=needs is not None,
            backward=False,
            aligned=True,
            select_saved=self._saved_selector(options),
        )
        try:
            plan = self.plans().forward(tensors, options, call.needs, setting_of(device))
        except KernelUnavailableError:
            return  # the call meets the same error, and falls back
        if plan is None:
            return
        results = self._output_buffers(tensors, options, call.needs)
        named_layouts = dict(zip(self._tensor_names, tensors, strict=True))
        start_plan(plan, named_layouts, results, device, runs_now=False)
        if needs is not None:
            self._compile_backward_ahead(call, tuple(tensors), plan, results, needs, device)

    def _compile_backward_ahead(
        self,
        call: Pass,
        layouts: Values,
        plan: Plan,
        buffers: Mapping[str, Buffer | None],
        needs: Needs,
        device: torch.device,
    ) -> None:
        """Let background threads compile the kernels of a backward pass that will follow.

        The gradient of the first result is assumed to have the layout of the result. If its layout
        differs, the launch compiles what is missing.

        Args:
            call: the forward pass.
            layouts: layouts of the tensors of the forward pass, on the meta device.
            plan: plan of the forward pass.
            buffers: shapes and dtypes of the results of the forward pass, by name. They are those
                on the GPU, because some results depend on the device.
            needs: which gradients will be computed.
            device: the GPU.
        """
        from tilefold.ops._shared._triton.launch import start_plan  # needs Triton

        if not any(needs):
            return
        result_layouts: list[Any] = []
        for name, buffer in buffers.items():
            if buffer is None or name in plan.skipped_results:
                result_layouts.append(None)
            else:
                result_layouts.append(buffer.on(torch.device("meta")))
        # Fields that backward does not read with these options are taken from the None at the end.
        saved = call.select_saved((*layouts, *result_layouts, None))
        main_grads = [
            torch.empty_like(layouts[self._tensor_names.index(name)], dtype=torch.float32)
            for name in call.main_grads
        ]
        backward_pass = self._backward_pass(call, needs, aligned=True)
        gradient_layout = result_layouts[0]
        inputs = (gradient_layout, *saved, *main_grads)
        try:
            backward_plan = self._plan_backward(backward_pass, inputs, setting_of(device))
        except KernelUnavailableError:
            return  # the backward pass meets the same error, and falls back
        if backward_plan is None:
            return
        gradients = self._gradient_buffers(
            self.saved(*saved),
            call.options,
            needs,
            call.main_grads,
        )
        named_layouts = dict(zip(self._backward_names(call), inputs, strict=True))
        start_plan(backward_plan, named_layouts, gradients, device, runs_now=False)

    def _backward_names(self, call: Pass) -> Values:
        """Return the names of the inputs of a backward pass, in their order."""
        main_grad_names = [f"d{name}" for name in call.main_grads]
        return (self._output_grad_name, *self.saved._fields, *main_grad_names)

    def _backward_pass(self, call: Pass, needs: Needs, *, aligned: bool) -> Pass:
        """Return the backward pass of a forward pass.

        Args:
            call: the forward pass.
            needs: which gradients are computed.
            aligned: whether all its inputs begin at multiples of 16 bytes.
        """
        return Pass(
            name=call.name,
            options=call.options,
            impl=call.impl,
            needs=needs,
            backward=True,
            aligned=aligned,
            main_grads=call.main_grads,
        )

    def _plan_backward(self, call: Pass, layouts: Values, setting: Setting) -> Plan | None:
        """Plan the kernels of a backward pass.

        Args:
            call: the pass: its options, its implementation and, once it has run, its launches.
            layouts: layouts of its inputs.
            setting: facts about the device.
        """
        output_grad, saved, _ = self._backward_inputs(layouts)
        setting = setting._replace(accumulated=frozenset(call.main_grads))
        plan: Plan | None = self.plans().backward(
            output_grad,
            saved,
            call.options,
            call.needs,
            setting,
        )
        return plan

    def _backward_inputs(self, inputs: Values) -> BackwardInputs:
        """Name the inputs of a backward pass."""
        first_main_grad = 1 + len(self.saved._fields)
        return BackwardInputs(
            output_grad=inputs[0],
            saved=self.saved(*inputs[1:first_main_grad]),
            main_grads=inputs[first_main_grad:],
        )

    def _output_buffers(
        self,
        tensors: TensorsT,
        options: OptionsT,
        training: bool,
    ) -> dict[str, Buffer | None]:
        """Return the shape and the dtype of each result of a forward pass, by name.

        Args:
            tensors: tensors of the call.
            options: checked options.
            training: whether a backward pass may follow.
        """
        buffers = self.outputs(tensors, options, training)
        return dict(zip(self.results, buffers, strict=True))

    def _gradient_buffers(
        self,
        saved: Any,
        options: OptionsT,
        needs: Needs,
        main_grads: Collection[str] = (),
    ) -> dict[str, Buffer | None]:
        """Return the shape and the dtype of each gradient of a backward pass, by name.

        Args:
            saved: record of the saved tensors.
            options: the operator's checked options.
            needs: which gradients are computed.
            main_grads: names of the tensors whose gradients are added to the caller's buffers.

        Returns:
            The gradients. One that is not needed, or is added to a buffer, is ``None``.
        """
        buffers: dict[str, Buffer | None] = {}
        for (name, buffer_source), needed in zip(self.gradients.items(), needs, strict=True):
            if not needed or name in main_grads:
                buffer = None
            elif callable(buffer_source):
                buffer = buffer_source(saved, options)
            else:
                tensor = getattr(saved, buffer_source)
                buffer = Buffer(tuple(tensor.shape), tensor.dtype)
            buffers[f"d{name}"] = buffer
        return buffers

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
        output_grad: Tensor,
        saved: tuple[Tensor | None, ...],
        main_grads: tuple[Tensor, ...],
    ) -> Results:
        """Compute the gradients of an eager call.

        Kernels run at once in a plain backward pass. Gradient mode is on if autograd records the
        backward pass itself (``create_graph``), and there is no key for batches of gradients
        (``is_grads_batched``). The registered gradient then runs, which can be batched, and which
        raises an error if it is differentiated.

        Args:
            call: the forward pass.
            needs: which gradients are computed.
            output_grad: gradient of the first result.
            saved: saved tensors, in the order of the record's fields.
            main_grads: buffers to which gradients are added.
        """
        inputs = (output_grad, *saved, *main_grads)
        key = None
        if not torch.is_grad_enabled():
            key = call_key(inputs, (call, needs), of_gradient=True)
        if key is None:
            refuse_main_grads(
                call.main_grads,
                "with create_graph=True or is_grads_batched=True; leave one of them out",
            )
            return self._registered_gradients(output_grad, saved, call.options, needs, call.impl)
        backward_pass = self.calls.get(key)
        if backward_pass is None:
            backward_pass = self._backward_pass(call, needs, aligned=is_aligned(key))
            self._remember(key, backward_pass)
        return self.compute(backward_pass, inputs)

    # The registered operator

    def _register(self) -> None:
        """Register ``tilefold::name``, and ``tilefold::name_backward`` if there are gradients."""
        self._register_forward()
        if self.gradients:
            self._register_backward()

    def _register_forward(self) -> None:
        """Register ``tilefold::name``, whose arguments are the tensors and the options.

        Their names and types are those of the records' fields.
        """
        arguments = {
            **typing.get_type_hints(self.tensors),
            **typing.get_type_hints(self.options),
            "training": bool,
            "impl": str,
        }
        qualified_name = f"tilefold::{self.name}"
        torch.library.define(qualified_name, calls.schema_of(arguments, len(self.results)))
        torch.library.impl(qualified_name, "default", self._run_registered_forward)
        torch.library.register_fake(qualified_name, self._fake_forward)
        self._registered = getattr(torch.ops.tilefold, self.name)

    def _register_backward(self) -> None:
        """Register the backward of this operator with torch, and make it the operator's derivative.

        It is an operator of its own, such as ``tilefold::maxsim_backward`` for
        ``tilefold::maxsim``. Its arguments are the gradient of the first result, the tensors that
        the forward saved, the options, which tensors need a gradient, and the implementation.
        """
        arguments = {
            self._output_grad_name: Tensor,
            **typing.get_type_hints(self.saved),
            **typing.get_type_hints(self.options),
            "needs": Sequence[bool],
            "impl": str,
        }
        backward_name = f"{self.name}_backward"
        qualified_name = f"tilefold::{backward_name}"
        torch.library.define(qualified_name, calls.schema_of(arguments, len(self.gradients)))
        torch.library.impl(qualified_name, "default", self._run_registered_backward)
        torch.library.register_fake(qualified_name, self._fake_backward)
        self._registered_backward = getattr(torch.ops.tilefold, backward_name)
        calls.forbid_double_backward(backward_name, self.name)
        torch.library.register_autograd(
            f"tilefold::{self.name}",
            self._differentiate,
            setup_context=self._setup_context,
        )

    def _registered_call(self, arguments: Values, n_tensors: int) -> RegisteredCall:
        """Name the arguments of a registered operator, of which the first ones are tensors."""
        values: list[Any] = [  # torch passes lists, which keys cannot contain
            tuple(value) if isinstance(value, list) else value for value in arguments
        ]
        *values, needs, impl = values
        return RegisteredCall(
            tensors=tuple(values[:n_tensors]),
            options=self.options(*values[n_tensors:]),
            needs=needs,
            impl=impl,
        )

    def _forward_call(self, arguments: Values) -> RegisteredCall:
        """Name the arguments of ``tilefold::name``; the tensors are the operator's record."""
        call = self._registered_call(arguments, len(self._tensor_names))
        return call._replace(tensors=self.tensors(*call.tensors))

    def _backward_call(self, arguments: Values) -> RegisteredCall:
        """Name the arguments of ``tilefold::name_backward``."""
        n_output_grads = 1
        return self._registered_call(arguments, n_output_grads + len(self.saved._fields))

    def _run_registered_forward(self, *arguments: Any) -> Any:
        """Run ``tilefold::name``.

        A registered operator cannot return ``None``. A result that is not computed becomes zeros of
        its declared shape.
        """
        tensors, options, training, impl = self._forward_call(arguments)
        name, impl = self._named_impl(cast(TensorsT, tensors), impl)
        # The first two entries tell such keys from those of the public function and of gradients.
        key = call_key(tensors, ("registered", False, *options, training, impl))
        call = self.calls.get(key)
        if call is None:
            call = Pass(name, options, impl, training, backward=False, aligned=is_aligned(key))
            self._remember(key, call)
        results = list(self.compute(call, tensors))
        if any(x is None for x in results):
            empty = calls.as_tuple(self._fake_forward(*arguments))
            results = [
                like.zero_() if x is None else x for x, like in zip(results, empty, strict=True)
            ]
        return calls.as_registered(results)

    def _run_registered_backward(self, *arguments: Any) -> Any:
        """Run ``tilefold::name_backward``.

        A registered operator cannot return ``None``. A gradient that is not computed becomes an
        empty tensor.
        """
        tensors, options, needs, impl = self._backward_call(arguments)
        impl = impl_with_fallback(
            impl,
            self.chosen_impl(self._tensor_that_chooses(tensors), impl),
        )
        key = call_key(tensors, ("registered", True, *options, needs, impl))
        call = self.calls.get(key)
        if call is None:
            call = Pass(self.name, options, impl, needs, backward=True, aligned=is_aligned(key))
            self._remember(key, call)
        gradients = self.compute(call, tensors)
        return calls.as_registered(
            [tensors[0].new_empty(0) if x is None else x for x in gradients],
        )

    def _tensor_that_chooses(self, backward_tensors: Values) -> Tensor:
        """Return the saved tensor that chooses the implementation of a registered gradient."""
        name, buffer_source = next(iter(self.gradients.items()))
        saved = self._backward_inputs(backward_tensors).saved
        tensor: Tensor = getattr(saved, name if callable(buffer_source) else buffer_source)
        return tensor

    def _fake_forward(self, *arguments: Any) -> Any:
        """Return the results of ``tilefold::name`` without values, for tracing."""
        tensors, options, training, _ = self._forward_call(arguments)
        buffers = self.outputs(cast(TensorsT, tensors), options, training)
        return calls.as_registered([buffer.on(tensors[0].device) for buffer in buffers])

    def _fake_backward(self, *arguments: Any) -> Any:
        """Return the results of ``tilefold::name_backward`` without values, for tracing.

        A gradient that is not needed has no elements.
        """
        tensors, options, needs, _ = self._backward_call(arguments)
        output_grad, saved, _ = self._backward_inputs(tensors)
        no_gradient = Buffer((0,), output_grad.dtype)
        buffers = self._gradient_buffers(saved, options, needs).values()
        return calls.as_registered(
            [(buffer or no_gradient).on(output_grad.device) for buffer in buffers],
        )

    def _registered_gradients(
        self,
        output_grad: Tensor,
        saved: tuple[Tensor | None, ...],
        options: OptionsT,
        needs: Needs,
        impl: str,
    ) -> Results:
        """Compute gradients by the registered operator ``tilefold::name_backward``.

        The operator returns an empty tensor for a gradient that is not needed, since it cannot
        return ``None``.

        Args:
            output_grad: gradient of the first result.
            saved: saved tensors, in the order of the record's fields.
            options: the operator's checked options.
            needs: which gradients are computed.
            impl: implementation.

        Returns:
            The gradients, ``None`` for those that are not needed.
        """
        gradients = calls.as_tuple(
            self._registered_backward(output_grad, *saved, *options, needs, impl),
        )
        return [
            gradient if needed else None for gradient, needed in zip(gradients, needs, strict=True)
        ]

    def _setup_context(self, ctx: Any, inputs: Values, output: Any) -> None:
        """Save what the backward pass of the registered operator reads.

        Args:
            ctx: the context of autograd.
            inputs: arguments of the forward pass.
            output: its results.
        """
        tensors, ctx.options, ctx.training, ctx.impl = self._forward_call(inputs)
        results = calls.as_tuple(output)
        ctx.mark_non_differentiable(*results[1:])
        ctx.set_materialize_grads(False)
        select_saved = self._saved_selector(ctx.options)
        ctx.save_for_backward(*select_saved((*tensors, *results, None)))

    def _differentiate(
        self,
        ctx: Any,
        output_grad: Tensor | None,
        *_: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        """Compute the gradients of the registered operator's arguments, for autograd.

        Args:
            ctx: autograd's context, as :meth:`_setup_context` filled it.
            output_grad: gradient of the first result, ``None`` if nothing depends on it.
            _: gradients of the other results, which are not differentiable.

        Returns:
            One entry for each argument, ``None`` for those that are not differentiable tensors.
        """
        gradients: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
        if output_grad is None:
            return tuple(gradients)
        if not ctx.training:
            raise RuntimeError(
                f"tilefold::{self.name} needs training=True to compute gradients; call "
                f"{self.name}() instead.",
            )
        needs = tuple(ctx.needs_input_grad[position] for position in self._differentiable)
        computed = self._registered_gradients(
            output_grad,
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
    """Raise ``RuntimeError`` for the first tensor whose gradient is to be added to a buffer.

    Args:
        names: names of the tensors whose gradients are added to buffers. Without any, nothing is
            raised.
        situation: when that is impossible, and the remedy. ``{}`` becomes the tensor's name.
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
        failed_kernels=frozenset(
            kernel for kernel, kernel_device in fallback.FAILURES if kernel_device == device
        ),
    )
