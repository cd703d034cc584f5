"""What every operator gets from its base, shown by the toy operator.

Repeated launches, hooks, graphs, threads and streams are in ``test_launches.py``, kernels that
cannot be built in ``test_unavailable_kernels.py``.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="plans name kernels")

from tests.kernels import triton_interpreted
from tests.ops import toy as toy_operator
from tests.ops.base import Launch, Plan, Setting, TorchStep, fallback
from tests.ops.base import impl as implementations
from tests.ops.conftest import Target
from tests.ops.launching import launch
from tests.ops.samples import saved_for_backward
from tests.ops.toy import TOY, TWO_LAUNCHES, ToyOptions, ToySaved, ToyTensors, toy

SETTING = Setting((9, 0), 132, tf32=False, aligned=True, failed_kernels=frozenset())
pytestmark = pytest.mark.usefixtures("fresh_dynamo", "empty_call_caches")
kernels = pytest.mark.skipif(False, reason="") if triton_interpreted() else pytest.mark.gpu
DEVICE = "cpu" if triton_interpreted() else "cuda"


def leaves(device: str, rows: int = 5) -> tuple[Tensor, Tensor]:
    """``x`` ``[rows, 16]`` and ``w`` ``[16]``, whose values depend on ``rows`` alone."""
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 16, generator=generator)
    w = torch.randn(16, generator=generator)
    return x.to(device).requires_grad_(), w.to(device).requires_grad_()


def detached_leaves(device: str) -> tuple[Tensor, Tensor]:
    x, w = leaves(device)
    return x.detach(), w.detach()


def gradients(y: Tensor, *inputs: Tensor, **options: Any) -> tuple[Tensor, ...]:
    """Gradients of the inputs for a fixed gradient of ``y``."""
    dy = torch.linspace(-1, 1, y.numel(), device=y.device)
    return torch.autograd.grad(y, inputs, dy, **options)


def assert_equal_gradients(y: Tensor, expected: Tensor, *inputs: Tensor) -> None:
    """Check that two outputs have gradients of the same bits."""
    pairs = zip(gradients(y, *inputs), gradients(expected, *inputs), strict=True)
    for gradient, expected_gradient in pairs:
        assert torch.equal(gradient, expected_gradient)


@pytest.mark.parametrize("way", ["one launch", "two launches", "torch between"])
def test_every_implementation_agrees_with_the_reference(target: Target, way: str) -> None:
    x, w = leaves(target.device)
    y = toy(x, w, 0.5, way, target.impl)
    expected = toy(x, w, 0.5, way, "reference")
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(gradients(y, x, w), gradients(expected, x, w))


@pytest.mark.parametrize("training", [True, False])
def test_the_registered_operator_passes_opcheck(target: Target, training: bool) -> None:
    x, w = leaves(target.device) if training else detached_leaves(target.device)
    arguments = (x, w, 0.5, "one launch", training, target.impl)
    torch.library.opcheck(torch.ops.tilefold.toy.default, arguments)


@pytest.mark.parametrize("strided", [False, True], ids=["contiguous", "strided"])
@pytest.mark.parametrize("needs", [[True, True], [False, True], [True, False]])
def test_the_registered_backward_passes_opcheck(
    target: Target,
    needs: list[bool],
    strided: bool,
) -> None:
    x, w = detached_leaves(target.device)
    if strided:
        x = x.T.contiguous().T
    dy = torch.ones(5, device=target.device)
    sums = torch.ones(5, device=target.device)
    arguments = (dy, x, w, sums, 0.5, "one launch", needs, target.impl)
    torch.library.opcheck(torch.ops.tilefold.toy_backward.default, arguments)


def test_compiled_calls_give_the_bits_of_eager_ones(target: Target) -> None:
    compiled = torch.compile(toy, backend="aot_eager", fullgraph=True)
    for rows in (5, 7):
        x, w = leaves(target.device, rows)
        for _ in range(3):
            y = compiled(x, w, 0.5, impl=target.impl)
            expected = toy(x, w, 0.5, impl=target.impl)
            assert torch.equal(y, expected)
            assert_equal_gradients(y, expected, x, w)


@pytest.mark.parametrize("impl", ["auto", "tiled", "reference"])
def test_a_compiled_call_takes_any_impl(impl: str) -> None:
    def call(x: Tensor, w: Tensor, impl: str) -> Tensor:
        return toy(x, w, impl=impl)

    x, w = leaves("cpu")
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, w, impl), toy(x, w, impl="reference"))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_an_unknown_impl_is_refused(compiled: bool) -> None:
    x, w = leaves("cpu")
    call = torch.compile(toy, backend="aot_eager") if compiled else toy
    with pytest.raises(
        Exception,
        match="impl must be one of 'auto', 'reference', 'tiled', 'triton', got 'fast'",
    ):
        call(x, w, impl="fast")


def test_batched_gradients_are_those_of_each_row(target: Target) -> None:
    x, w = leaves(target.device)
    unit_gradients = torch.eye(5, device=target.device)
    for _ in range(3):  # earlier calls are cached
        y = toy(x, w, impl=target.impl)
        batched = torch.autograd.grad(
            y,
            (x, w),
            unit_gradients,
            is_grads_batched=True,
            retain_graph=True,
        )
        for row, unit_gradient in enumerate(unit_gradients):
            expected = torch.autograd.grad(y, (x, w), unit_gradient, retain_graph=True)
            torch.testing.assert_close(tuple(gradient[row] for gradient in batched), expected)


def test_vmap_takes_the_registered_operator(target: Target) -> None:
    x, w = detached_leaves(target.device)

    def scores(x: Tensor) -> Tensor:
        return toy(x, w, impl=target.impl)

    for _ in range(3):  # earlier calls are cached
        y = scores(x)
        mapped = torch.func.vmap(scores)(torch.stack([x, 2 * x]))
        torch.testing.assert_close(mapped, torch.stack([y, 4 * y]))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_gradients_have_the_strides_that_the_operator_plans(
    target: Target,
    compiled: bool,
) -> None:
    x, w = leaves(target.device)
    strided = x.detach().T.contiguous().T.requires_grad_()
    expected = gradients(toy(x, w, 0.5, impl=target.impl), x, w)
    call = torch.compile(toy, backend="aot_eager", fullgraph=True) if compiled else toy
    for _ in range(3):
        dx, dw = gradients(call(strided, w, 0.5, impl=target.impl), strided, w)
        assert dx.stride() == strided.stride()
        assert dw.is_contiguous()
        torch.testing.assert_close((dx, dw), expected)


def test_a_second_derivative_needs_the_reference(target: Target) -> None:
    x, w = leaves(target.device)
    dx, _ = gradients(toy(x, w, impl=target.impl), x, w, create_graph=True)
    with pytest.raises(RuntimeError, match=r"toy can be differentiated once.*impl='reference'"):
        dx.sum().backward()
    dx, _ = gradients(toy(x, w, impl="reference"), x, w, create_graph=True)
    dx.sum().backward()
    assert w.grad is not None
    assert w.grad.isfinite().all()


@pytest.mark.parametrize(("training", "n_saved"), [(True, 5), (False, 0)])
def test_a_registered_call_returns_sums_of_the_planned_shape_without_gradient(
    training: bool,
    n_saved: int,
) -> None:
    x, w = leaves("cpu")
    _, sums = torch.ops.tilefold.toy(x, w, 1.0, "one launch", training, "tiled")
    assert torch.equal(sums, torch.zeros(n_saved))
    assert not sums.requires_grad


def test_a_registered_call_that_saves_nothing_has_no_gradient() -> None:
    x, w = leaves("cpu")
    y, _ = torch.ops.tilefold.toy(x, w, 1.0, "one launch", False, "tiled")
    with pytest.raises(RuntimeError, match="tilefold::toy needs training=True"):
        y.sum().backward()


def test_fp64_takes_the_tiled_path_and_has_no_kernels() -> None:
    x, w = leaves("cpu")
    x, w = x.detach().double(), w.detach().double()
    assert TOY.chosen_impl(x, "auto") == "tiled"
    assert toy(x, w).dtype == torch.float64
    message = r"x must have dtype|impl='triton' cannot run here"
    with pytest.raises((TypeError, RuntimeError), match=message):
        toy(x, w, impl="triton")


def test_meta_tensors_give_the_shape_of_the_result() -> None:
    x, w = detached_leaves("cpu")
    assert toy(x.to("meta"), w.to("meta")).shape == (5,)


def test_autocast_changes_no_bit(target: Target) -> None:
    x, w = leaves(target.device)
    expected = toy(x, w, impl=target.impl)
    expected_gradients = gradients(expected, x, w)
    for _ in range(3):
        with torch.autocast(target.device, torch.bfloat16):
            y = toy(x, w, impl=target.impl)
            assert torch.equal(y, expected)
            pairs = zip(gradients(y, x, w), expected_gradients, strict=True)
            assert all(torch.equal(gradient, exact) for gradient, exact in pairs)


def test_inference_mode_changes_no_bit(target: Target) -> None:
    x, w = leaves(target.device)
    expected = toy(x, w, impl=target.impl)
    for _ in range(3):
        with torch.inference_mode():
            y = toy(x, w, impl=target.impl)
            assert torch.equal(y, expected)
            assert y.is_inference()


def test_a_gradient_with_a_main_buffer_is_added_to_it_and_not_returned(target: Target) -> None:
    x, w = leaves(target.device)
    buffer = torch.zeros(16, device=target.device)
    dx, dw = gradients(toy(x, w, impl=target.impl), x, w)
    dy = torch.linspace(-1, 1, 5, device=target.device)
    for initial_value in range(1, 5):
        y = toy(x, w, impl=target.impl, w_main_grad=buffer)
        # This does not ask for the gradient of w, and may leave the buffer.
        assert torch.equal(gradients(y, x)[0], dx)
        buffer.fill_(initial_value)
        toy(x, w, impl=target.impl, w_main_grad=buffer).backward(dy)
        assert w.grad is None
        torch.testing.assert_close(buffer, dw + initial_value)
    with pytest.raises(ValueError, match="w must have shape"):
        toy(x, w, impl=target.impl, w_main_grad=buffer[:3])


@pytest.mark.parametrize(
    ("option", "gradient_shape"),
    [
        pytest.param("create_graph", (5,), id="second derivatives"),
        pytest.param("is_grads_batched", (2, 5), id="batched gradients"),
    ],
)
def test_a_main_buffer_is_refused_for_second_and_batched_gradients(
    target: Target,
    option: str,
    gradient_shape: tuple[int, ...],
) -> None:
    x, w = leaves(target.device)
    y = toy(x, w, impl=target.impl, w_main_grad=torch.zeros(16, device=target.device))
    dy = torch.ones(gradient_shape, device=target.device)
    with pytest.raises(RuntimeError, match="w_main_grad cannot be used with create_graph=True"):
        torch.autograd.grad(y, (x, w), dy, retain_graph=True, **{option: True})


def test_a_main_buffer_is_refused_in_compiled_calls(target: Target) -> None:
    x, w = leaves(target.device)
    compiled = torch.compile(toy, backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match=r"w_main_grad cannot be used under torch\.compile"):
        compiled(x, w, impl=target.impl, w_main_grad=torch.zeros(16, device=target.device))


def test_only_one_launch_saves_sums_for_backward(target: Target) -> None:
    x, w = leaves(target.device)
    outputs: list[Tensor] = []

    def run(way: str) -> None:
        outputs.append(toy(x, w, 0.5, way, target.impl))

    assert len(saved_for_backward(lambda: run("two launches"))) == 2
    n_saved = len(saved_for_backward(lambda: run("one launch")))
    assert n_saved == (3 if target.impl == "triton" else 2)  # the tiled path adds up again
    torch.testing.assert_close(gradients(outputs[0], x, w), gradients(outputs[1], x, w))


def test_a_variant_fails_without_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = detached_leaves("cpu")
    monkeypatch.setattr(implementations, "takes_kernels", lambda device: True)
    floats = ToyTensors(x, w)
    halves = ToyTensors(x.half(), w.half())
    assert TOY._named_impl(floats, "auto") == ("toy", "auto")
    assert TOY._named_impl(halves, "auto") == (toy_operator.HALVES, "auto")
    monkeypatch.setitem(fallback.FAILURES, (toy_operator.HALVES, x.device), "no halves")
    assert TOY._named_impl(floats, "auto") == ("toy", "auto")
    assert TOY._named_impl(halves, "auto") == (toy_operator.HALVES, "tiled")


@kernels
def test_a_kernel_that_is_missing_is_replaced_before_a_launch(
    monkeypatch: pytest.MonkeyPatch,
    no_failed_kernel: None,
) -> None:
    def plan_without_kernel(
        tensors: ToyTensors,
        options: ToyOptions,
        training: bool,
        setting: Setting,
    ) -> Any:
        if TWO_LAUNCHES.kernel not in setting.failed_kernels:
            raise fallback.KernelUnavailableError(
                "dot_kernel",
                "this release has none",
                TWO_LAUNCHES,
            )
        return toy_operator.forward(tensors, options, training, setting)

    x, w = detached_leaves(DEVICE)
    expected = toy(x, w, impl="triton")
    monkeypatch.setattr(TOY, "plans", lambda: SimpleNamespace(forward=plan_without_kernel))
    TOY.calls.clear()
    with pytest.warns(
        fallback.FallbackWarning,
        match="one launch cannot run on .*this release has none.. Two la",
    ):
        assert torch.equal(toy(x, w, impl="triton"), expected)


@kernels
def test_calls_with_equal_layouts_are_checked_and_planned_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counts: Counter[str] = Counter()

    def counted(name: str) -> Callable[..., Any]:
        function = getattr(toy_operator, name)

        def call(*arguments: Any) -> Any:
            counts[name] += 1
            return function(*arguments)

        return call

    plans = SimpleNamespace(forward=counted("forward"), backward=counted("backward"))
    monkeypatch.setattr(toy_operator, "_check", counted("_check"))
    monkeypatch.setattr(TOY, "plans", lambda: plans)
    # otherwise the first call also plans its backward pass, to compile the kernels
    monkeypatch.setattr(launch, "start_plan", lambda *_, **__: False)
    for _ in range(3):
        x, w = leaves(DEVICE)
        gradients(toy(x, w, impl="triton"), x, w)
    assert counts == {"_check": 1, "forward": 1, "backward": 1}
    gradients(toy(x, w.detach(), impl="triton"), x)
    assert counts == {"_check": 1, "forward": 1, "backward": 2}


@kernels
def test_calls_with_and_without_gradients_may_alternate() -> None:
    x, w = leaves(DEVICE)
    expected = toy(x, w, impl="reference").detach()
    for _ in range(3):
        for grad in (False, True, False):
            with torch.set_grad_enabled(grad):
                y = toy(x, w, impl="triton")
            assert y.requires_grad is grad
            torch.testing.assert_close(y.detach(), expected)
        torch.testing.assert_close(
            gradients(toy(x, w.detach(), impl="triton"), x),
            gradients(toy(x, w, impl="tiled"), x),
        )
        assert not toy(x.detach(), w.detach(), impl="triton").requires_grad


@kernels
def test_a_pass_without_a_plan_takes_the_tiled_path_and_warns_of_nothing() -> None:
    x, w = leaves(DEVICE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            y = toy(x, w, way="no launch", impl="triton")
            expected = toy(x, w, way="no launch", impl="tiled")
            assert torch.equal(y, expected)
            # A kernel computes the gradient.
            torch.testing.assert_close(gradients(y, x), gradients(expected, x))


@pytest.fixture
def tf32_restored() -> Iterator[None]:
    """Forbid TF32 again after the test."""
    yield
    torch.backends.cuda.matmul.allow_tf32 = False


@kernels
def test_plans_follow_the_precision_that_is_allowed_when_they_run(tf32_restored: None) -> None:
    roundoff = 2.0**-12  # which 16 bits do not hold next to 1
    value = 1 + roundoff
    x = torch.full((3, 4), value, device=DEVICE, requires_grad=True)
    w = torch.full((4,), value, device=DEVICE, requires_grad=True)
    exact = torch.full((3,), 16 * value**4, device=DEVICE)
    rounded = torch.full_like(exact, 16)
    y = toy(x, w, impl="triton")
    slope = 2 * 4 * value**2  # of the forward pass above, without TF32
    for allowed in (False, True, False, True):
        torch.backends.cuda.matmul.allow_tf32 = allowed
        expected_dx = slope if allowed else slope * value
        for _ in range(3):
            result = toy(x, w, impl="triton")
            (dx,) = torch.autograd.grad(y, x, torch.ones_like(y), retain_graph=True)
            assert torch.equal(result, rounded) is allowed
            assert torch.allclose(result, exact, rtol=1e-6) is not allowed
            assert torch.allclose(dx, torch.full_like(dx, expected_dx), rtol=1e-6)


STRIDED_TENSORS = ToyTensors(
    x=torch.empty(5, 16, device="meta"),
    w=torch.empty(16, 2, device="meta")[:, 0],
)
OPTIONS = ToyOptions(0.5, "one launch")


def planned_launches(plan: Plan | None) -> list[Launch]:
    assert plan is not None
    return [step for step in plan.steps if isinstance(step, Launch)]


def test_a_forward_plan_copies_strided_tensors_and_launches_a_kernel() -> None:
    plan = toy_operator.forward(STRIDED_TENSORS, OPTIONS, True, SETTING)
    assert plan is not None
    copy, launch = plan.steps
    assert isinstance(copy, TorchStep)
    assert (copy.output, copy.tensors) == ("w", ("w",))
    assert isinstance(launch, Launch)
    assert launch.kernel is toy_operator.dot_kernel
    assert launch.numbers == (5, 16, 0.5)


@pytest.mark.parametrize("tf32", [False, True])
def test_a_plan_follows_the_precision_of_its_setting(tf32: bool) -> None:
    setting = SETTING._replace(tf32=tf32)
    plan = toy_operator.forward(STRIDED_TENSORS, OPTIONS, True, setting)
    (launch,) = planned_launches(plan)
    assert launch.constants["TF32"] is tf32


def test_a_plan_without_a_failed_kernel_has_two_launches() -> None:
    setting = SETTING._replace(failed_kernels=frozenset([TWO_LAUNCHES.kernel]))
    plan = toy_operator.forward(STRIDED_TENSORS, OPTIONS, True, setting)
    kernels = [launch.kernel for launch in planned_launches(plan)]
    assert kernels == [toy_operator.products_kernel, toy_operator.sum_kernel]


def test_a_backward_plan_computes_needed_gradients_only() -> None:
    dy = torch.empty(5, device="meta")
    saved = ToySaved(x=STRIDED_TENSORS.x, w=dy, sums=dy)
    plan = toy_operator.backward(dy, saved, OPTIONS, (False, True), SETTING)
    (launch,) = planned_launches(plan)
    assert not launch.constants["NEED_X"]
    assert launch.constants["NEED_W"]
