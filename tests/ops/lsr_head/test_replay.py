"""Calls that repeat the launches of an earlier one: the same bits, and back to the long way where something differs."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.conftest import Target
from tilefold.nn import LSRHead
from tilefold.ops import lsr_head, quantize_weight
from tilefold.ops._shared.impl import triton_interpreted
from tilefold.ops.lsr_head import _calls
from tilefold.testing import nan_poisoned_empty
from tilefold.testing.lsr_head import LSRHeadInputs, lsr_head_inputs, lsr_head_results

not_interpreted = pytest.mark.skipif(triton_interpreted(), reason="plans are made for compiled kernels")
gpu = pytest.mark.gpu
GIVEN = ("max", "log1p_relu", float, 1.0, None, "auto")


@pytest.fixture(autouse=True)
def nothing_seen() -> Iterator[None]:
    _calls._SEEN.clear()
    yield
    _calls._SEEN.clear()


def plans() -> dict[Any, Any]:
    (found,) = _calls._SEEN.values()
    return found


def remembered() -> set[str]:
    """Which of "forward" and "gradients" there are plans for."""
    return {name[0] for name in plans() if isinstance(name, tuple)} - {"once"}


def on_gpu(*shape: int, dtype: torch.dtype = torch.bfloat16, **options: Any) -> LSRHeadInputs:
    return lsr_head_inputs(*shape, dtype=dtype, device="cuda", **options)


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert value.dtype == expected[name].dtype and value.stride() == expected[name].stride(), name
        assert torch.equal(value.nan_to_num(123), expected[name].nan_to_num(123)), name


@not_interpreted
def test_calls_on_the_cpu_have_no_signature_and_leave_nothing_behind() -> None:
    inputs = lsr_head_inputs(2, 5, 8, 12)
    assert _calls.call_signature(inputs.hidden, inputs.weight, inputs.bias, None, None, None, GIVEN) is None
    assert _calls.call_signature(None, inputs.weight, None, None, None, None, GIVEN) is None
    lsr_head_results(inputs)
    assert not _calls._SEEN


@not_interpreted
@pytest.mark.parametrize("name", ["pooling", "activation", "out_dtype", "impl", "logit_scale"])
def test_options_of_no_hashable_type_are_refused_by_name(name: str) -> None:
    inputs = lsr_head_inputs(2, 5, 8, 12)
    with pytest.raises((TypeError, ValueError), match=name):
        lsr_head(inputs.hidden, inputs.weight, **{name: ["max"]})
    assert _calls.plans_of((["max"],)) is None


def test_what_is_remembered_of_signatures_is_bounded() -> None:
    first = _calls.new_plans((0,))
    assert first is _calls.new_plans((0,)) and first is _calls.plans_of((0,))
    for number in range(_calls.MOST_SEEN + 10):
        _calls.new_plans((number,))
    assert len(_calls._SEEN) <= _calls.MOST_SEEN
    assert _calls.new_plans(None) is None and _calls.plans_of(None) is None


@pytest.mark.parametrize("count", [1, 5, 2048, 2049, 5000])
def test_counts_are_added_up_as_by_torch(count: int, target: Target) -> None:
    if target.impl != "triton":
        pytest.skip("a kernel's test")
    from tilefold.ops._shared._triton.launch import launch
    from tilefold.ops.lsr_head._triton.launch_backward import SCAN_BLOCK
    from tilefold.ops.lsr_head._triton.max_backward import _scan_kernel

    counts = torch.randint(0, 2**20, (count,), dtype=torch.int32, device=target.device)
    places = torch.full((count,), -1, dtype=torch.int64, device=target.device)
    launch(_scan_kernel, (1, 1, 1), (counts, places, count), {"BLOCK": SCAN_BLOCK, "num_warps": 8})
    assert torch.equal(places, counts.cumsum(0))


@not_interpreted
def test_a_launcher_that_is_not_known_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from tilefold.ops.lsr_head._triton import steps

    class Strange:
        tried = 0

        def compiled(self, arguments: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
            self.tried += 1
            return SimpleNamespace(run=object()), ()  # no CudaLauncher

    run, found = Strange(), {}
    plan = steps.Plan((steps.Step(run, (1, 1, 1), (7,)),), ())
    monkeypatch.setattr(steps, "can_remember", lambda *arguments: True)
    for _ in range(5):
        if steps.second_time(found, "forward"):
            assert steps.remembered(plan, {}, (), torch.device("cuda", 0), found, "forward") is None
    assert run.tried == 1


@not_interpreted
def test_what_is_known_of_a_kernel_does_not_grow_with_the_lengths_it_is_called_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("triton")
    from tilefold.ops._shared._triton.launch import Launcher
    from tilefold.ops.lsr_head._triton.max_backward import _count_kernel, _scan_kernel

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    specialized = Launcher(_count_kernel, {})._kind

    def kinds(values: Iterable[int]) -> set[Any]:
        place = list(_count_kernel.arg_names).index("V")
        return {specialized((None,) * place + (value,)) for value in values}

    # Triton builds another kernel for 1, for multiples of 16 and for 64 bits, and for no other value
    assert len(kinds(range(2, 2000))) == 2
    assert not kinds([1]) & kinds([3, 16]) and not kinds([3]) & kinds([16]) and not kinds([3]) & kinds([2**31 + 3])
    assert kinds([0, 16]) == kinds([1600]) and kinds([2**31]) == kinds([2**33])
    assert len({Launcher(_scan_kernel, {})._kind((None, None, value)) for value in range(2000)}) == 1


CASES: dict[str, tuple[tuple[int, ...], dict[str, Any], dict[str, Any]]] = {
    "whole groups": ((3, 16, 64, 200), {}, {}),
    "no whole groups": ((3, 21, 64, 200), {}, {}),
    "cut sequences": ((2, 1040, 64, 40), {}, {}),
    "holes": ((5, 37, 64, 200), {"layout": "holes"}, {}),
    "left, no bias": ((5, 37, 64, 200), {"layout": "left", "bias": False}, {"activation": "log1p_log1p_relu"}),
    "packed": ((5, 37, 64, 200), {"layout": "packed"}, {}),
    "packed, long": ((5, 700, 64, 40), {"layout": "packed"}, {"activation": "softplus"}),
    "scaled, in fp32": ((3, 16, 64, 200), {}, {"logit_scale": 2, "out_dtype": torch.float32, "activation": "none"}),
    "rows that TMA cannot read": ((3, 16, 41, 200), {}, {}),
    "sum": ((3, 21, 64, 200), {}, {"pooling": "sum", "activation": "softplus", "logit_scale": 0.5}),
    "mean, holes, no bias": ((5, 37, 64, 200), {"layout": "holes", "bias": False}, {"pooling": "mean"}),
    "mean, packed": ((5, 37, 64, 200), {"layout": "packed"}, {"pooling": "mean"}),
}


@gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_repeated_launches_give_the_bits_of_the_first(case: str, dtype: torch.dtype) -> None:
    shape, layout, options = CASES[case]
    rounds = [on_gpu(*shape, dtype=dtype, **layout) for _ in range(4)]  # the same values in other tensors
    every = ("hidden", "weight", "bias") if rounds[0].bias is not None else ("hidden", "weight")
    for needs in ((), every, ("hidden",), ("weight",), every[2:]):
        _calls._SEEN.clear()
        first = lsr_head_results(rounds[0], needs=needs, **options)
        assert not remembered(), "what is called once needs no plan"
        assert_same(lsr_head_results(rounds[0], needs=needs, **options), first)
        launched = {"forward", "gradients"} if needs and "pooling" not in options else {"forward"}
        assert remembered() == launched
        with nan_poisoned_empty():
            for inputs in rounds[1:]:
                assert_same(lsr_head_results(inputs, needs=needs, **options), first)


@gpu
@pytest.mark.parametrize("pooling", ["max", "mean"])
def test_offsets_of_the_same_shape_are_looked_at_in_every_call(pooling: str) -> None:
    hidden, weight = on_gpu(1, 60, 64, 200).hidden[0], on_gpu(1, 60, 64, 200).weight
    expected, offsets = [], []
    for values in ([0, 10, 10, 60], [0, 1, 59, 60], [0, 10, 9, 60], [0, 5, 10, 59], [1, 5, 10, 60], [0, 0, 0, 60]):
        _calls._SEEN.clear()
        offsets.append(torch.tensor(values, device="cuda"))
        expected.append(lsr_head(hidden, weight, cu_seqlens=offsets[-1], pooling=pooling))
    assert [bool(scores.isnan().all()) for scores in expected] == [False, False, True, True, True, False]
    for _ in range(3):
        for cu, scores in zip(offsets, expected, strict=True):
            found = lsr_head(hidden, weight, cu_seqlens=cu, pooling=pooling)
            assert torch.equal(found.nan_to_num(7), scores.nan_to_num(7))
    assert remembered() == {"forward"}


@gpu
def test_other_values_and_lengths_of_the_same_shapes_are_not_those_of_the_first_call() -> None:
    rounds = [on_gpu(5, 37, 64, 200, layout="holes", seed=seed) for seed in range(4)]
    expected = []
    for inputs in rounds:
        _calls._SEEN.clear()
        expected.append(lsr_head_results(inputs))
    for _ in range(2):
        for inputs, results in zip(rounds, expected, strict=True):
            assert_same(lsr_head_results(inputs), results)
    assert remembered() == {"forward", "gradients"}


@gpu
@pytest.mark.parametrize("case", ["whole groups", "holes", "packed", "left, no bias"])
def test_quantized_scores_repeat_their_launches(case: str) -> None:
    if torch.cuda.get_device_capability() < (8, 9):  # tiled there
        pytest.skip("fp8 products need compute capability 8.9")
    shape, layout, options = CASES[case]
    inputs = on_gpu(*shape, **layout)
    weight = quantize_weight(inputs.weight)
    first, _ = (lsr_head(inputs.hidden, weight, inputs.bias, **inputs.layout, **options) for _ in range(2))
    assert remembered() == {"forward"}
    for _ in range(2):
        with nan_poisoned_empty():
            scores = lsr_head(inputs.hidden.clone(), weight, inputs.bias, **inputs.layout, **options)
        assert torch.equal(scores, first)
    with pytest.raises(ValueError, match="must not require a gradient"):
        lsr_head(inputs.hidden.clone().requires_grad_(), weight, inputs.bias, **inputs.layout, **options)


def warmed(layout: str = "holes", **options: Any) -> tuple[LSRHeadInputs, list[Tensor], dict[str, Tensor]]:
    """A call of which plans exist, its leaves, and its results."""
    inputs = on_gpu(5, 37, 64, 200, layout=layout)
    for _ in range(2):
        results = lsr_head_results(inputs, **options)
    assert remembered() == {"forward", "gradients"}
    leaves = [tensor.clone().requires_grad_() for tensor in (inputs.hidden, inputs.weight, inputs.bias)]
    return inputs, leaves, results


def gradients_equal(grads: tuple[Tensor | None, ...], results: dict[str, Tensor]) -> bool:
    return all(torch.equal(g, results[f"d{n}"]) for g, n in zip(grads, ("hidden", "weight", "bias"), strict=True))


@gpu
def test_main_grad_is_added_to_and_checked_when_calls_repeat() -> None:
    inputs, leaves, results = warmed()
    _calls._SEEN.clear()
    main_grad, wanted = torch.zeros(200, 64, device="cuda"), [leaves[0], leaves[2]]
    for round_ in range(1, 5):
        scores = lsr_head(*leaves, **inputs.layout, weight_main_grad=main_grad)
        dhidden, dbias = torch.autograd.grad(scores, wanted, inputs.dscores)
        assert torch.equal(dhidden, results["dhidden"]) and torch.equal(dbias, results["dbias"])
        if round_ == 1:
            once = main_grad.clone()
    assert remembered() == {"forward", "gradients"}
    torch.testing.assert_close(main_grad, 4 * once)
    with pytest.raises(ValueError, match="weight_main_grad must be contiguous"):
        lsr_head(*leaves, **inputs.layout, weight_main_grad=torch.zeros(64, 200, device="cuda").T)
    with pytest.raises(TypeError, match="weight_main_grad"):
        lsr_head(*leaves, **inputs.layout, weight_main_grad=main_grad.half())
    with pytest.raises(ValueError, match="weight needs no gradient"):
        lsr_head(leaves[0], leaves[1].detach(), leaves[2], **inputs.layout, weight_main_grad=main_grad)


@gpu
@pytest.mark.parametrize("strides", ["expanded", "transposed", "unaligned"])
def test_gradients_of_any_strides_are_those_of_contiguous_ones(strides: str) -> None:
    inputs, leaves, _ = warmed()
    for _ in range(3):
        scores = lsr_head(*leaves, **inputs.layout)
        dscores = torch.ones((), dtype=scores.dtype, device="cuda").expand(scores.shape)
        if strides == "transposed":
            dscores = inputs.dscores.T.contiguous().T
        elif strides == "unaligned":
            dscores = torch.empty(scores.numel() + 1, dtype=scores.dtype, device="cuda")[1:].view(scores.shape)
            dscores.copy_(inputs.dscores)
        found = torch.autograd.grad(scores, leaves, dscores, retain_graph=True)
        expected = torch.autograd.grad(scores, leaves, dscores.clone(memory_format=torch.contiguous_format))
        torch.testing.assert_close(found, expected)  # other compilations, which may add up in another order


@gpu
def test_a_graph_that_is_kept_gives_the_same_gradients_twice_and_one_that_is_not_refuses() -> None:
    inputs, leaves, results = warmed("packed")
    scores = lsr_head(*leaves, **inputs.layout)
    for keep in (True, False):
        assert gradients_equal(torch.autograd.grad(scores, leaves, inputs.dscores, retain_graph=keep), results)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(scores, leaves, inputs.dscores)


@gpu
def test_a_second_derivative_is_refused_from_plans_too() -> None:
    inputs, leaves, results = warmed()
    grads = torch.autograd.grad(lsr_head(*leaves, **inputs.layout), leaves, inputs.dscores, create_graph=True)
    assert gradients_equal(grads, results)
    with pytest.raises(RuntimeError, match="lsr_head can be differentiated once"):
        grads[0].sum().backward()


@pytest.mark.parametrize("pooling", ["sum", "mean", "cls", "last"])
def test_a_second_derivative_of_the_other_poolings_is_refused(pooling: str, target: Target) -> None:
    inputs = lsr_head_inputs(2, 5, 16, 20, device=target.device)
    hidden = inputs.hidden.requires_grad_()
    for _ in range(3):
        scores = lsr_head(hidden, inputs.weight, inputs.bias, pooling=pooling, impl=target.impl)
        (dhidden,) = torch.autograd.grad(scores, [hidden], inputs.dscores, create_graph=True)
        if target.impl == "reference":
            continue
        with pytest.raises(RuntimeError, match="lsr_head can be differentiated once"):
            dhidden.sum().backward()


@gpu
def test_what_was_changed_in_place_is_noticed() -> None:
    inputs, leaves, _ = warmed()
    scores = lsr_head(*leaves, **inputs.layout)
    with torch.no_grad():
        leaves[1].zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        scores.sum().backward()


@gpu
def test_tensors_that_a_compiled_kernel_cannot_take_go_the_long_way() -> None:
    inputs, leaves, results = warmed()
    room = torch.zeros(leaves[0].numel() + 1, dtype=leaves[0].dtype, device="cuda")
    unaligned = room[1:].view(leaves[0].shape).copy_(inputs.hidden)
    wide = torch.cat([inputs.weight, inputs.weight], dim=1)[:, :64]
    spread = torch.stack([inputs.bias, inputs.bias], dim=1)[:, 0]
    for changed in ((0, unaligned), (1, wide), (2, spread), (0, inputs.hidden.mT.contiguous().mT)):
        mine = list(leaves)
        mine[changed[0]] = changed[1].detach().requires_grad_()
        scores = lsr_head(*mine, **inputs.layout)
        grads = torch.autograd.grad(scores, mine, inputs.dscores)
        expected = [results[name] for name in ("scores", "dhidden", "dweight", "dbias")]
        torch.testing.assert_close([scores.detach(), *grads], expected)


@gpu
def test_saved_tensors_may_travel() -> None:
    inputs, leaves, results = warmed("packed")
    with torch.autograd.graph.save_on_cpu():
        scores = lsr_head(*leaves, **inputs.layout)
    assert gradients_equal(torch.autograd.grad(scores, leaves, inputs.dscores), results)


@gpu
def test_autocast_inference_mode_and_the_module_give_the_same_bits() -> None:
    inputs, leaves, results = warmed()
    wide = [leaf.detach().float().requires_grad_() for leaf in leaves]
    for _ in range(4):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            scores = lsr_head(*wide, **inputs.layout)
        grads = torch.autograd.grad(scores, wide, inputs.dscores)
        assert torch.equal(scores, results["scores"]) and {g.dtype for g in grads} == {torch.float32}
        assert torch.equal(grads[1].bfloat16(), results["dweight"])
    head = LSRHead(64, 200, device="cuda", dtype=torch.bfloat16)
    head.load_state_dict({"weight": inputs.weight, "bias": inputs.bias})
    assert torch.equal(head(inputs.hidden, inputs.attention_mask).detach(), results["scores"])
    with torch.inference_mode():
        for _ in range(3):
            assert torch.equal(lsr_head(inputs.hidden, inputs.weight, inputs.bias, **inputs.layout), results["scores"])


@gpu
def test_transforms_forward_mode_and_the_compiler_see_what_they_saw_before() -> None:
    inputs, leaves, results = warmed()

    def loss(hidden: Tensor) -> Tensor:
        return lsr_head(hidden, inputs.weight, inputs.bias, **inputs.layout).sum()

    with pytest.raises(RuntimeError, match=r"impl must be 'reference' under torch\.func\.grad"):
        torch.func.grad(loss)(inputs.hidden)
    with pytest.raises(RuntimeError, match="forward-mode"):
        torch.func.jvp(loss, (inputs.hidden,), (inputs.hidden,))
    with torch.autograd.forward_ad.dual_level(), pytest.raises(RuntimeError, match="forward-mode"):
        loss(torch.autograd.forward_ad.make_dual(inputs.hidden, inputs.hidden))
    compiled = torch.compile(lsr_head, backend="aot_eager", fullgraph=True)
    grads = torch.autograd.grad(compiled(*leaves, **inputs.layout), leaves, inputs.dscores)
    assert gradients_equal(grads, results)


def step(leaves: list[Tensor], inputs: LSRHeadInputs) -> Callable[[], list[Tensor]]:
    def run() -> list[Tensor]:
        scores = lsr_head(*leaves, **inputs.layout)
        return [scores.detach(), *torch.autograd.grad(scores, leaves, inputs.dscores)]

    return run


@gpu
@pytest.mark.parametrize("planned", [True, False], ids=["planned before", "not planned before"])
@pytest.mark.parametrize("layout", ["full", "holes", "packed"])
def test_a_captured_graph_repeats_a_step_and_plans_hold_nothing_of_it(layout: str, planned: bool) -> None:
    inputs, leaves, results = warmed(layout)  # kernels are compiled before a capture, in any case
    if not planned:
        _calls._SEEN.clear()
    run = step(leaves, inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
        captured = run()
    assert planned or not remembered()
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(captured, results.values(), strict=True))
    with torch.no_grad():
        leaves[0].neg_()
    graph.replay()
    again = [value.clone() for value in captured]
    del graph, captured
    assert all(torch.equal(a, b) for a, b in zip(again, run(), strict=True))


@gpu
def test_plans_hold_no_memory_of_a_call() -> None:
    inputs, leaves, _ = warmed("packed")
    run = step(leaves, inputs)
    for _ in range(3):
        run()
    gc.collect()
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        run()
    assert torch.cuda.memory_allocated() == before
    _calls._SEEN.clear()
    gc.collect()
    assert torch.cuda.memory_allocated() == before


@gpu
def test_threads_and_streams_share_plans() -> None:
    inputs, leaves, results = warmed()
    wrong: list[int] = []

    def work() -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.default_stream())
        with torch.cuda.stream(stream):
            mine = [leaf.detach().clone().requires_grad_() for leaf in leaves]
            for round_ in range(20):
                found = step(mine, inputs)()
                if not all(torch.equal(a, b) for a, b in zip(found, results.values(), strict=True)):
                    wrong.append(round_)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@gpu
def test_a_profilers_hooks_hear_of_every_launch() -> None:
    from triton import knobs

    inputs, _, results = warmed()
    if not hasattr(knobs.runtime.launch_enter_hook, "add"):
        pytest.skip("hooks of this Triton are not chains")
    heard: list[Any] = []
    knobs.runtime.launch_enter_hook.add(heard.append)
    try:
        assert_same(lsr_head_results(inputs), results)
    finally:
        knobs.runtime.launch_enter_hook.remove(heard.append)
    assert len(heard) == 9  # count, copy, fold, combine; count, scan, list, product; weight and bias
