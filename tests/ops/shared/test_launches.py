"""Calls like an earlier one repeat its launches, whatever is remembered of them.

Most of these tests run in Triton's interpreter on the CPU, and all of them on a GPU. The calls are
in the contracts of the operators.
"""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernels need triton")

from tests.kernels import triton_interpreted
from tests.ops import samples
from tests.ops.base import operator as shared_operator
from tests.ops.contracts import CONTRACTS, OPERATORS, cases, forget_calls
from tests.ops.contracts.contract import RepeatedCall
from tests.ops.launching import launch
from tests.ops.samples import output_gradient, unaligned
from tests.ops.toy import TOY_CALLS, TOY_IN_INTERPRETER
from tests.refusals import refused
from tilefold.testing import nan_poisoned_empty

gpu = pytest.mark.gpu
INTERPRETED = triton_interpreted()  # with small tiles, and the ends of documents of several
kernels = pytest.mark.skipif(False, reason="") if INTERPRETED else gpu
pytestmark = pytest.mark.usefixtures("empty_call_caches")

CALLS: dict[str, RepeatedCall] = cases("repeated") | TOY_CALLS
if not INTERPRETED:
    CALLS |= cases("repeated_on_gpus")
every_call = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)

# What autograd and the cache do is the same for all calls of an operator. The interpreter is slow
# and runs a few of them.
SELECTED = CALLS
if INTERPRETED:
    names = [name for contract in CONTRACTS for name in contract.repeated_in_interpreter]
    SELECTED = {name: CALLS[name] for name in [*names, *TOY_IN_INTERPRETER]}
selected_call = pytest.mark.parametrize("call", SELECTED.values(), ids=SELECTED)


def leaves_of(call: RepeatedCall, seed: int = 0) -> list[Tensor]:
    return call.sample.leaves(samples.KERNEL_DEVICE, seed)


def kernel_arguments(call: RepeatedCall, **options: Any) -> dict[str, Any]:
    """Return the keyword arguments of a call by kernels; ``options`` replace those of the call."""
    arguments = call.sample.arguments(samples.KERNEL_DEVICE)
    return arguments | call.options[0] | options | {"impl": "triton"}


def output_of(call: RepeatedCall, leaves: list[Tensor]) -> Tensor:
    output: Tensor = call.sample.function(*leaves, **kernel_arguments(call))
    return output


def step(call: RepeatedCall, leaves: list[Tensor], **options: Any) -> list[Tensor]:
    """Return the output and the gradients of the leaves that need one."""
    output = call.sample.function(*leaves, **kernel_arguments(call, **options))
    differentiated = [leaf for leaf in leaves if leaf.requires_grad]
    gradients = torch.autograd.grad(output, differentiated, output_gradient(output))
    return [output.detach(), *gradients]


def remembered(call: RepeatedCall) -> dict[Any, Any]:
    """Return what the operator remembers of calls and of their gradients."""
    calls: dict[Any, Any] = OPERATORS[call.sample.name].calls
    return calls


def equal(results: list[Tensor], expected: list[Tensor]) -> bool:
    """Whether all results have the dtypes and the bits of the expected ones; NaN equals NaN."""
    for result, other in zip(results, expected, strict=True):
        if result.dtype != other.dtype:
            return False
        if not torch.equal(result.nan_to_num(7), other.nan_to_num(7)):
            return False
    return True


def warmed(call: RepeatedCall) -> tuple[list[Tensor], list[Tensor]]:
    """Repeat a call until its launches are remembered; return its leaves and its results."""
    leaves = leaves_of(call)
    for _ in range(3):
        results = step(call, leaves)
    return leaves, results


def needed_gradients(call: RepeatedCall) -> list[list[bool]]:
    """Return which leaves need a gradient: all, the first, the second."""
    count = len(call.sample.shapes)
    if count == 1:
        return [[True]]
    only_first = [index == 0 for index in range(count)]
    only_second = [index == 1 for index in range(count)]
    return [[True] * count, only_first, only_second]


@kernels
@every_call
def test_repeated_launches_give_the_bits_of_the_first(
    call: RepeatedCall,
    rebound_kernels: list[str],
) -> None:
    for needed in needed_gradients(call):
        first = None
        for repetition in range(4):
            rebound_kernels.clear()
            leaves = leaves_of(call)  # the same values in other tensors
            for leaf, needs_gradient in zip(leaves, needed, strict=True):
                leaf.requires_grad_(needs_gradient)
            with nan_poisoned_empty():
                results = step(call, leaves)
            if first is None:
                first = results
            assert equal(results, first)
            binds_again = repetition < 2 or INTERPRETED
            assert bool(rebound_kernels) == binds_again, rebound_kernels
            if all(needed) and rebound_kernels:
                assert len(rebound_kernels) in call.launches, rebound_kernels
    with torch.no_grad():
        outputs = [output_of(call, leaves_of(call)) for _ in range(3)]
    with torch.inference_mode():
        outputs += [output_of(call, leaves_of(call)) for _ in range(2)]
    assert all(equal([output], results[:1]) for output in outputs)


@kernels
@every_call
def test_no_value_is_remembered(call: RepeatedCall) -> None:
    seeds = range(3)
    expected = []
    for seed in seeds:
        forget_calls()
        expected.append(step(call, leaves_of(call, seed)))
    assert not equal(expected[0], expected[1])
    for _ in range(2):
        for seed in seeds:
            assert equal(step(call, leaves_of(call, seed)), expected[seed])


@kernels
@every_call
def test_calls_with_other_options_are_not_mixed_up(call: RepeatedCall) -> None:
    expected = []
    for options in call.options:
        forget_calls()
        expected.append(step(call, leaves_of(call), **options))
    for _ in range(2):
        for options, results in zip(call.options, expected, strict=True):
            assert equal(step(call, leaves_of(call), **options), results), options


def gradient_of_strides(output: Tensor, strides: str) -> Tensor:
    """Return a gradient for ``output`` that is expanded, transposed or unaligned."""
    if strides == "expanded":
        return torch.ones((), dtype=output.dtype, device=output.device).expand(output.shape)
    gradient = output_gradient(output)
    if strides == "transposed":
        return gradient.transpose(0, -1).contiguous().transpose(0, -1)
    return unaligned(gradient)


@kernels
@selected_call
@pytest.mark.parametrize("strides", ["expanded", "transposed", "unaligned"])
def test_gradients_of_any_strides_are_those_of_contiguous_ones(
    call: RepeatedCall,
    strides: str,
) -> None:
    leaves, _ = warmed(call)
    for _ in range(3):
        output = output_of(call, leaves)
        gradient = gradient_of_strides(output, strides)
        contiguous = gradient.clone(memory_format=torch.contiguous_format)
        results = torch.autograd.grad(output, leaves, gradient, retain_graph=True)
        expected = torch.autograd.grad(output, leaves, contiguous)
        # another compilation may add up in another order
        torch.testing.assert_close(results, expected)


@kernels
@selected_call
def test_operands_of_any_strides_and_alignment_give_the_same_results(call: RepeatedCall) -> None:
    leaves, results = warmed(call)
    for index, leaf in enumerate(leaves):
        every_second = torch.stack([leaf.detach(), leaf.detach()], dim=-1)[..., 0]
        for operand in (unaligned(leaf), every_second):
            operands = list(leaves)
            operands[index] = operand.detach().requires_grad_()
            for _ in range(3 if index == 0 else 1):
                torch.testing.assert_close(step(call, operands), results)
    assert equal(step(call, leaves), results)


@kernels
@selected_call
def test_saved_tensors_may_be_moved_and_come_back_at_other_addresses(call: RepeatedCall) -> None:
    leaves, results = warmed(call)
    for _ in range(3):
        with torch.autograd.graph.saved_tensors_hooks(unaligned, lambda tensor: tensor):
            output = output_of(call, leaves)
        gradients = torch.autograd.grad(output, leaves, output_gradient(output))
        torch.testing.assert_close([output.detach(), *gradients], results)
        with torch.autograd.graph.save_on_cpu():
            output = output_of(call, leaves)
        gradients = torch.autograd.grad(output, leaves, output_gradient(output))
        assert equal([output.detach(), *gradients], results)


@kernels
@selected_call
def test_a_retained_graph_gives_the_same_gradients_twice(call: RepeatedCall) -> None:
    leaves, results = warmed(call)
    output = output_of(call, leaves)
    gradient = output_gradient(output)
    for retain_graph in (True, False):
        gradients = torch.autograd.grad(output, leaves, gradient, retain_graph=retain_graph)
        assert equal(list(gradients), results[1:])
    refused(RuntimeError, "second time", torch.autograd.grad, output, leaves, gradient)


@kernels
@selected_call
def test_second_derivatives_are_refused_after_any_number_of_calls(call: RepeatedCall) -> None:
    leaves, results = warmed(call)
    output = output_of(call, leaves)
    gradients = torch.autograd.grad(output, leaves, output_gradient(output), create_graph=True)
    assert equal([gradient.detach() for gradient in gradients], results[1:])
    refused(RuntimeError, "can be differentiated once", gradients[0].sum().backward)


@kernels
@selected_call
def test_function_transforms_are_refused_after_any_number_of_calls(call: RepeatedCall) -> None:
    leaves, _ = warmed(call)
    first, *others = [leaf.detach() for leaf in leaves]

    def output_of_first(leaf: Tensor) -> Tensor:
        return output_of(call, [leaf, *others])

    with pytest.raises(RuntimeError, match=r"impl must be 'reference' under torch\.func\.grad"):
        torch.func.grad(lambda leaf: output_of_first(leaf).sum())(first)
    with pytest.raises(RuntimeError, match="forward-mode"):
        torch.func.jvp(output_of_first, (first,), (first,))


@kernels
@selected_call
def test_a_change_in_place_of_what_backward_reads_is_noticed(call: RepeatedCall) -> None:
    leaves, results = warmed(call)
    output = output_of(call, leaves)
    with torch.no_grad():
        leaves[1 % len(leaves)].zero_()
    try:
        gradients = torch.autograd.grad(output, leaves, output_gradient(output))
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
    else:
        # backward did not read the leaf: entmax reads its results
        assert equal(list(gradients), results[1:])


@kernels
@selected_call
def test_plans_are_bounded_and_keep_no_tensor_of_a_call(
    call: RepeatedCall,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    leaves, _ = warmed(call)
    references = [weakref.ref(leaf) for leaf in leaves]
    del leaves
    gc.collect()
    assert all(reference() is None for reference in references)
    monkeypatch.setattr(shared_operator, "MAX_CALLS", 2)
    for options in call.options * 2:
        step(call, leaves_of(call), **options)
        assert len(remembered(call)) <= 2


@kernels
@selected_call
def test_hooks_of_a_profiler_are_called_at_every_launch(
    call: RepeatedCall,
    rebound_kernels: list[str],
) -> None:
    from triton import knobs

    leaves, results = warmed(call)
    if not hasattr(knobs.runtime.launch_enter_hook, "add"):
        pytest.skip("hooks of this Triton are not chains")
    hook_calls: list[Any] = []
    rebound_kernels.clear()
    knobs.runtime.launch_enter_hook.add(hook_calls.append)
    try:
        assert equal(step(call, leaves), results)
    finally:
        knobs.runtime.launch_enter_hook.remove(hook_calls.append)
    assert len(rebound_kernels) in call.launches, rebound_kernels
    assert INTERPRETED or len(hook_calls) == len(rebound_kernels)
    rebound_kernels.clear()
    assert equal(step(call, leaves), results)
    assert bool(rebound_kernels) == INTERPRETED


@gpu
@every_call
@pytest.mark.parametrize("planned", [True, False], ids=["planned before", "not planned before"])
def test_a_captured_graph_repeats_a_step_and_plans_hold_nothing_of_it(
    call: RepeatedCall,
    planned: bool,
) -> None:
    if "dropout_p" in call.sample.options:
        pytest.skip("a graph draws its own random numbers")
    leaves, results = warmed(call)  # kernels are compiled before a capture, in any case
    if not planned:
        forget_calls()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    arguments, gradient = kernel_arguments(call), output_gradient(results[0])
    with torch.cuda.graph(graph):
        for _ in range(2):
            output = call.sample.function(*leaves, **arguments)
            captured = [output.detach(), *torch.autograd.grad(output, leaves, gradient)]
    graph.replay()
    assert equal(captured, results)
    with torch.no_grad():
        leaves[0].neg_()
    graph.replay()
    replayed = [value.clone() for value in captured]
    del graph, captured, output
    assert equal(replayed, step(call, leaves))


@gpu
@every_call
def test_plans_hold_no_memory_of_a_call(call: RepeatedCall) -> None:
    # With threads, one may still free what a step left.
    with torch.autograd.set_multithreading_enabled(False):
        leaves, results = warmed(call)
        gc.collect()
        before = torch.cuda.memory_allocated()
        for _ in range(3):
            step(call, leaves)
        assert torch.cuda.memory_allocated() == before
        forget_calls()
        gc.collect()
        assert torch.cuda.memory_allocated() == before
        assert equal(step(call, leaves), results)


@gpu
@every_call
def test_threads_and_streams_share_plans(call: RepeatedCall) -> None:
    leaves, results = warmed(call)
    wrong_repetitions: list[int] = []

    def repeat() -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.default_stream())
        with torch.cuda.stream(stream):
            copies = [leaf.detach().clone().requires_grad_() for leaf in leaves]
            for repetition in range(20):
                if not equal(step(call, copies), results):
                    wrong_repetitions.append(repetition)

    threads = [threading.Thread(target=repeat) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong_repetitions


@gpu
@every_call
def test_every_device_has_its_own_plans(
    call: RepeatedCall,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one device here")
    _, results = warmed(call)
    for _ in range(4):
        for device in ("cuda:1", "cuda:0"):  # neither of them need be the current one
            monkeypatch.setattr(samples, "KERNEL_DEVICE", device)
            moved = [value.to("cuda:0") for value in step(call, leaves_of(call))]
            assert equal(moved, results)


@pytest.mark.skipif(INTERPRETED, reason="kernels run on the CPU")
@every_call
def test_calls_that_run_no_kernel_leave_no_plan(call: RepeatedCall) -> None:
    arguments = call.sample.arguments("cpu") | call.options[0]
    for _ in range(2):
        call.sample.function(*call.sample.leaves("cpu"), **arguments).sum().backward()
    assert not remembered(call)


@pytest.mark.skipif(INTERPRETED, reason="nothing is compiled")
def test_builds_of_a_kernel_do_not_grow_with_the_lengths_it_is_called_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from tests.ops.launching import check_offsets_kernel, count_kernel

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    pointers = list(count_kernel.arg_names).index("V")

    def build_keys(*values: int) -> set[Any]:
        """Return the keys of builds of ``count_kernel`` for these numbers of terms."""
        keys = set()
        for value in values:
            arguments = (*[None] * pointers, value)
            keys.add(launch.Build(count_kernel, (1, 1, 1), arguments, {}).key)
        return keys

    # Triton builds another kernel for 1, for multiples of 16 and for 64 bits, and for no other
    # value.
    assert len(build_keys(*range(2, 2000))) == 2
    assert not build_keys(1) & build_keys(3, 16)
    assert not build_keys(3) & build_keys(16)
    assert not build_keys(3) & build_keys(2**31 + 3)
    assert build_keys(0, 16) == build_keys(1600)
    assert build_keys(2**31) == build_keys(2**33)

    offset_keys = set()
    for rows in range(2000):
        build = launch.Build(check_offsets_kernel, (1, 1, 1), (None, None, rows, rows), {})
        offset_keys.add(build.key)
    assert len(offset_keys) == 1
