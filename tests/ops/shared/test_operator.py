"""What an operator has of its base, shown by the toy, which holds little else.

Repeated launches, hooks, graphs, threads and streams are in ``test_launches.py``, kernels that
cannot be built in ``test_unavailable_kernels.py``.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="plans name kernels")

from tests.kernels import triton_interpreted
from tests.ops import toy as room
from tests.ops.base import Launch, Setting, TorchStep, fallback
from tests.ops.base import impl as implementations
from tests.ops.conftest import Target
from tests.ops.toy import TOY, TWO_LAUNCHES, ToyOptions, ToySaved, ToyTensors, toy
from tests.refusals import refused

SETTING = Setting((9, 0), 132, tf32=False, aligned=True, given_up=frozenset())
pytestmark = pytest.mark.usefixtures("fresh_dynamo", "empty_call_caches")
kernels = pytest.mark.skipif(False, reason="") if triton_interpreted() else pytest.mark.gpu
DEVICE = "cpu" if triton_interpreted() else "cuda"


def leaves(device: str, rows: int = 5) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    x, w = torch.randn(rows, 16, generator=generator), torch.randn(16, generator=generator)
    return x.to(device).requires_grad_(), w.to(device).requires_grad_()


def gradients(y: Tensor, *wanted: Tensor, **options: Any) -> tuple[Tensor, ...]:
    return torch.autograd.grad(
        y,
        wanted,
        torch.linspace(-1, 1, y.numel(), device=y.device),
        **options,
    )


def test_every_implementation_agrees_with_the_reference(target: Target) -> None:
    x, w = leaves(target.device)
    for way in ("one launch", "two launches", "torch between"):
        y, expected = (toy(x, w, 0.5, way, impl) for impl in (target.impl, "reference"))
        torch.testing.assert_close(y, expected)
        torch.testing.assert_close(gradients(y, x, w), gradients(expected, x, w))


def test_the_registered_operators_pass_opcheck(target: Target) -> None:
    x, w = leaves(target.device)
    for training, given in ((True, (x, w)), (False, (x.detach(), w.detach()))):
        torch.library.opcheck(
            torch.ops.tilefold.toy.default,
            (*given, 0.5, "one launch", training, target.impl),
        )
    saved = x.detach(), w.detach(), torch.ones(5, device=target.device)
    for needs in ([True, True], [False, True], [True, False]):
        back = (torch.ones(5, device=target.device), *saved, 0.5, "one launch", needs, target.impl)
        torch.library.opcheck(torch.ops.tilefold.toy_backward.default, back)


def test_compiled_calls_give_the_bits_of_eager_ones(target: Target) -> None:
    compiled = torch.compile(toy, backend="aot_eager", fullgraph=True)
    for rows in (5, 7):
        x, w = leaves(target.device, rows)
        for _ in range(3):
            y, expected = (call(x, w, 0.5, impl=target.impl) for call in (compiled, toy))
            assert torch.equal(y, expected)
            pairs = zip(gradients(y, x, w), gradients(expected, x, w), strict=True)
            assert all(torch.equal(mine, theirs) for mine, theirs in pairs)


def test_a_compiled_call_takes_any_impl_and_refuses_what_is_none() -> None:
    x, w = leaves("cpu")
    compiled = torch.compile(
        lambda x, w, impl: toy(x, w, impl=impl),
        backend="aot_eager",
        fullgraph=True,
    )
    for impl in ("auto", "tiled", "reference"):
        torch.testing.assert_close(compiled(x, w, impl), toy(x, w, impl="reference"))
    for call in (toy, torch.compile(toy, backend="aot_eager")):
        with pytest.raises(
            Exception,
            match="impl must be one of 'auto', 'reference', 'tiled', 'triton', got 'fast'",
        ):
            call(x, w, impl="fast")


def test_several_gradients_at_once_and_transforms_take_the_registered_operator(
    target: Target,
) -> None:
    x, w = leaves(target.device)
    several = torch.eye(5, device=target.device)
    for _ in range(3):  # whatever is remembered
        y = toy(x, w, impl=target.impl)
        found = torch.autograd.grad(y, (x, w), several, is_grads_batched=True, retain_graph=True)
        for place, row in enumerate(several):
            expected = torch.autograd.grad(y, (x, w), row, retain_graph=True)
            torch.testing.assert_close(tuple(grad[place] for grad in found), expected)
        batch = torch.stack([x.detach(), 2 * x.detach()])
        each = torch.func.vmap(lambda one: toy(one, w.detach(), impl=target.impl))(batch)
        torch.testing.assert_close(each, torch.stack([y.detach(), 4 * y.detach()]))


def test_gradients_are_laid_out_as_the_operator_says(target: Target) -> None:
    x, w = leaves(target.device)
    turned = x.detach().T.contiguous().T.requires_grad_()
    expected = gradients(toy(x, w, 0.5, impl=target.impl), x, w)
    for call in (toy, torch.compile(toy, backend="aot_eager", fullgraph=True)):
        for _ in range(3):
            dx, dw = gradients(call(turned, w, 0.5, impl=target.impl), turned, w)
            assert dx.stride() == turned.stride() and dw.is_contiguous()
            torch.testing.assert_close((dx, dw), expected)
    saved = turned.detach(), w.detach(), torch.ones(5, device=target.device)
    back = (
        torch.ones(5, device=target.device),
        *saved,
        0.5,
        "one launch",
        [True, True],
        target.impl,
    )
    torch.library.opcheck(torch.ops.tilefold.toy_backward.default, back)


def test_a_second_derivative_is_refused_but_by_the_reference(target: Target) -> None:
    x, w = leaves(target.device)
    (first, _) = gradients(toy(x, w, impl=target.impl), x, w, create_graph=True)
    refused(RuntimeError, r"toy can be differentiated once.*impl='reference'", first.sum().backward)
    (first, _) = gradients(toy(x, w, impl="reference"), x, w, create_graph=True)
    first.sum().backward()
    assert w.grad is not None and w.grad.isfinite().all()


def test_a_registered_call_makes_the_results_that_compilers_were_told_and_no_gradient_of_nothing_saved() -> (
    None
):
    x, w = leaves("cpu")
    for training, size in ((True, 5), (False, 0)):
        y, sums = torch.ops.tilefold.toy(x, w, 1.0, "one launch", training, "tiled")
        assert torch.equal(sums, torch.zeros(size)) and not sums.requires_grad
    refused(RuntimeError, "tilefold::toy needs training=True", y.sum().backward)


def test_other_dtypes_and_devices_take_the_path_that_serves_them() -> None:
    x, w = (leaf.detach().double() for leaf in leaves("cpu"))
    assert TOY.chosen_impl(x, "auto") == "tiled"
    assert toy(x, w).dtype == torch.float64
    refused(
        (TypeError, RuntimeError),
        r"x must have dtype|impl='triton' cannot run here",
        toy,
        x,
        w,
        impl="triton",
    )
    assert toy(x.to("meta"), w.to("meta")).shape == (5,)


def test_autocast_and_inference_mode_change_no_bit(target: Target) -> None:
    x, w = leaves(target.device)
    expected = toy(x, w, impl=target.impl)
    grads = gradients(expected, x, w)
    for _ in range(3):
        with torch.autocast(target.device, torch.bfloat16):
            assert torch.equal(y := toy(x, w, impl=target.impl), expected)
            assert all(torch.equal(a, b) for a, b in zip(gradients(y, x, w), grads, strict=True))
        with torch.inference_mode():
            assert torch.equal(y := toy(x, w, impl=target.impl), expected) and y.is_inference()


def test_gradients_are_added_to_a_buffer_that_is_given_and_not_returned(target: Target) -> None:
    x, w = leaves(target.device)
    buffer = torch.zeros(16, device=target.device)
    dx, dw = gradients(toy(x, w, impl=target.impl), x, w)
    for turn in range(1, 5):
        given = toy(x, w, impl=target.impl, w_main_grad=buffer)
        assert torch.equal(gradients(given, x)[0], dx)  # which may leave the buffer as it is
        buffer.fill_(turn)
        toy(x, w, impl=target.impl, w_main_grad=buffer).backward(
            torch.linspace(-1, 1, 5, device=target.device),
        )
        assert w.grad is None
        torch.testing.assert_close(buffer, dw + turn)
    refused(ValueError, "w must have shape", toy, x, w, impl=target.impl, w_main_grad=buffer[:3])


def test_a_buffer_for_a_gradient_is_refused_where_torch_calls_the_registered_operator(
    target: Target,
) -> None:
    x, w = leaves(target.device)
    y = toy(x, w, impl=target.impl, w_main_grad=torch.zeros(16, device=target.device))
    for options in ({"create_graph": True}, {"is_grads_batched": True}):
        dy = torch.ones(5 if "create_graph" in options else (2, 5), device=target.device)
        with pytest.raises(RuntimeError, match="w_main_grad cannot be used with create_graph=True"):
            torch.autograd.grad(y, (x, w), dy, retain_graph=True, **options)
    compiled = torch.compile(toy, backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match=r"w_main_grad cannot be used under torch\.compile"):
        compiled(x, w, impl=target.impl, w_main_grad=torch.zeros(16, device=target.device))


def test_what_is_saved_depends_on_the_options(target: Target) -> None:
    x, w = leaves(target.device)
    packed: Any = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (packed.append(1), x)[1], lambda x: x):
        found = {way: toy(x, w, 0.5, way, target.impl) for way in ("two launches", "one launch")}
        assert len(packed) == (4 if target.impl != "triton" else 5)
    torch.testing.assert_close(*[gradients(y, x, w) for y in found.values()])


def test_a_variant_chooses_and_is_given_up_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = (leaf.detach() for leaf in leaves("cpu"))
    monkeypatch.setattr(implementations, "takes_kernels", lambda device: True)
    tensors, halves = ToyTensors(x, w), ToyTensors(x.half(), w.half())
    assert TOY._named_impl(tensors, "auto") == ("toy", "auto") and TOY._named_impl(
        halves, "auto"
    ) == (
        room.HALVES,
        "auto",
    )
    monkeypatch.setitem(fallback.GIVEN_UP, (room.HALVES, x.device), "no halves")
    assert TOY._named_impl(tensors, "auto") == ("toy", "auto") and TOY._named_impl(
        halves, "auto"
    ) == (
        room.HALVES,
        "tiled",
    )


@kernels
def test_a_kernel_that_is_known_to_be_missing_gives_way_before_a_launch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(tensors: ToyTensors, options: ToyOptions, training: bool, setting: Setting) -> Any:
        if TWO_LAUNCHES.kernel not in setting.given_up:
            raise fallback.KernelUnavailableError(
                "dot_kernel",
                "this release has none",
                TWO_LAUNCHES,
            )
        return room.forward(tensors, options, training, setting)

    x, w = (leaf.detach() for leaf in leaves(DEVICE))
    expected = toy(x, w, impl="triton")
    monkeypatch.setattr(TOY, "plans", lambda: type("", (), {"forward": staticmethod(missing)}))
    TOY.calls.clear()
    monkeypatch.setattr(fallback, "GIVEN_UP", {})
    with pytest.warns(
        fallback.FallbackWarning,
        match="one launch cannot run on .*this release has none.. Two la",
    ):
        assert torch.equal(toy(x, w, impl="triton"), expected)


@kernels
def test_checks_and_plans_are_made_once_for_calls_that_are_alike(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: Any = []

    def counting(name: str) -> Any:
        honest = getattr(room, name)
        return lambda *given: (asked.append(name), honest(*given))[1]

    monkeypatch.setattr(room, "_check", counting("_check"))
    monkeypatch.setattr(
        TOY,
        "plans",
        lambda: type("", (), {n: counting(n) for n in ("forward", "backward")}),
    )
    for _ in range(3):
        x, w = leaves(DEVICE)
        gradients(toy(x, w, impl="triton"), x, w)
    assert sorted(asked) == ["_check", "backward", "forward"]
    gradients(toy(x, w.detach(), impl="triton"), x)
    assert sorted(asked) == ["_check", "backward", "backward", "forward"]


@kernels
def test_calls_with_and_without_a_gradient_in_turns_give_what_each_asks_for() -> None:
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
def test_a_pass_without_a_plan_takes_the_tiled_path_and_gives_nothing_up() -> None:
    x, w = leaves(DEVICE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for impl in ("triton", "triton"):
            y, expected = (toy(x, w, way="no launch", impl=each) for each in (impl, "tiled"))
            assert torch.equal(y, expected)
            torch.testing.assert_close(gradients(y, x), gradients(expected, x))  # by a kernel


@kernels
def test_plans_follow_the_precision_that_is_allowed_when_they_run() -> None:
    x, w = (
        torch.full(shape, 1 + 2.0**-12, device=DEVICE, requires_grad=True)
        for shape in ((3, 4), (4,))
    )
    exact = torch.full((3,), 16 * (1 + 2.0**-12) ** 4, device=DEVICE)
    y = toy(x, w, impl="triton")
    try:
        for allowed in (False, True, False, True):
            torch.backends.cuda.matmul.allow_tf32 = allowed
            for _ in range(3):
                again = toy(x, w, impl="triton")
                (dx,) = torch.autograd.grad(y, x, torch.ones_like(y), retain_graph=True)
                assert torch.equal(again, torch.full_like(exact, 16)) is allowed
                assert torch.allclose(again, exact, rtol=1e-6) is not allowed
                slope = 2 * 4 * (1 + 2.0**-12) ** 2  # that of forward
                assert torch.allclose(
                    dx,
                    torch.full_like(dx, slope * (1 + 2.0**-12 * (not allowed))),
                    rtol=1e-6,
                )
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False


def test_a_plan_is_made_of_layouts_and_a_setting_alone() -> None:
    tensors = ToyTensors(torch.empty(5, 16, device="meta"), torch.empty(16, 2, device="meta")[:, 0])
    options = ToyOptions(0.5, "one launch")
    copy, launch = room.forward(tensors, options, True, SETTING).steps
    assert isinstance(copy, TorchStep) and (copy.makes, copy.tensors) == ("w", "w")
    assert (
        isinstance(launch, Launch)
        and launch.kernel is room.dot_kernel
        and launch.numbers == (5, 16, 0.5)
    )
    narrow = room.forward(tensors, options, True, SETTING._replace(tf32=True)).steps[1]
    assert isinstance(narrow, Launch) and narrow.constants["TF32"] and not launch.constants["TF32"]
    without = room.forward(
        tensors,
        options,
        True,
        SETTING._replace(given_up=frozenset([TWO_LAUNCHES.kernel])),
    )
    assert [step.kernel for step in without.steps if isinstance(step, Launch)] == [
        room.products_kernel,
        room.sum_kernel,
    ]
    gradient = torch.empty(5, device="meta")
    (launch,) = room.backward(
        gradient,
        ToySaved(tensors.x, gradient, gradient),
        options,
        (False, True),
        SETTING,
    ).steps
    assert (
        isinstance(launch, Launch) and not launch.constants["NEED_X"] and launch.constants["NEED_W"]
    )
