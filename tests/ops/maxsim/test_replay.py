"""Calls that repeat the launches of an earlier one: the same bits, and back to the long way where something differs."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from tests.ops.conftest import Target
from tilefold.ops import maxsim, quantize_tokens
from tilefold.ops._shared.impl import triton_interpreted
from tilefold.ops.maxsim import _arguments
from tilefold.ops.maxsim._problem import GRADIENTS, REPLAY, TRAINING
from tilefold.testing import nan_poisoned_empty
from tilefold.testing.maxsim import MaxSimInputs, maxsim_inputs, maxsim_results

not_interpreted = pytest.mark.skipif(triton_interpreted(), reason="plans are made for compiled kernels")
gpu = pytest.mark.gpu


@pytest.fixture(autouse=True)
def nothing_seen() -> Iterator[None]:
    _arguments._SEEN.clear()
    yield
    _arguments._SEEN.clear()


def plans() -> dict[Any, Any]:
    (seen,) = _arguments._SEEN.values()
    return seen.plans


def on_gpu(*shape: int, dtype: torch.dtype = torch.bfloat16, **options: Any) -> MaxSimInputs:
    return maxsim_inputs(*shape, dtype=dtype, device="cuda", **options)


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert value.dtype == expected[name].dtype and value.stride() == expected[name].stride(), name
        assert torch.equal(value.nan_to_num(123), expected[name].nan_to_num(123)), name


def on_the_cpu(queries: Tensor, documents: Any, mask: Tensor | None = None) -> tuple[Any, ...] | None:
    options = ("all", "sum", "exclude", type(None), None, False, "auto")
    return _arguments.call_signature(queries, documents, mask, None, None, None, options)


@not_interpreted
def test_calls_on_the_cpu_have_no_signature_and_leave_nothing_behind() -> None:
    inputs = maxsim_inputs(2, 3, 4, 5, 8)
    assert on_the_cpu(inputs.queries, inputs.documents) is None
    assert on_the_cpu(inputs.queries, None) is None
    maxsim_results(inputs)
    assert not _arguments._SEEN


@not_interpreted
@pytest.mark.parametrize("name", ["pairing", "reduction", "mask_mode", "impl", "temperature"])
def test_options_of_no_hashable_type_are_refused_by_name(name: str) -> None:
    inputs = maxsim_inputs(2, 3, 4, 5, 8)
    with pytest.raises((TypeError, ValueError), match=name):
        maxsim(inputs.queries, inputs.documents, **{name: ["all"]})


@pytest.mark.parametrize("offsets", [[0, 3, 3, 7, 20], [0, 20], [0, 0, 0, 20], [0, 9, 4, 13, 20], [0, 400]], ids=str)
def test_rows_find_their_query_as_a_search_does(offsets: list[int], target: Target) -> None:
    if target.impl != "triton":
        pytest.skip("a kernel's test")
    from tilefold.ops.maxsim._triton.row_queries import row_queries

    rows = offsets[-1]
    for dtype in (torch.int32, torch.int64):
        cu = torch.tensor(offsets, dtype=dtype, device=target.device)
        every_row = torch.arange(rows, dtype=dtype, device=target.device)
        expected = torch.searchsorted(cu[1:].contiguous(), every_row, right=True).clamp_(max=cu.numel() - 2)
        assert torch.equal(row_queries(cu, rows).long(), expected)


CASES: dict[str, tuple[tuple[int, ...], dict[str, Any], dict[str, Any]]] = {
    "all": ((3, 4, 5, 9, 64), {}, {}),
    "all, tiles of a TMA descriptor": ((16, 9, 32, 80, 64), {}, {}),
    "queries longer than a tile": ((2, 5, 200, 40, 64), {"layout": "right"}, {}),
    "holes": ((3, 4, 5, 9, 64), {"layout": "holes"}, {}),
    "holes that score zero, mean": (
        (3, 4, 5, 9, 64), {"layout": "holes"}, {"mask_mode": "zero", "reduction": "mean"},
    ),
    "mean": ((3, 4, 5, 9, 64), {}, {"reduction": "mean"}),
    "packed": ((3, 4, 5, 9, 64), {"layout": "packed"}, {}),
    "packed, mean": ((3, 4, 5, 9, 64), {"layout": "packed"}, {"reduction": "mean"}),
    "aligned": ((3, 3, 5, 9, 64), {"pairing": "aligned", "layout": "holes"}, {"reduction": "mean"}),
    "grouped": ((3, 4, 5, 9, 64), {"pairing": "grouped"}, {}),
    "grouped, packed, mean": ((3, 4, 5, 9, 64), {"pairing": "grouped", "layout": "packed"}, {"reduction": "mean"}),
    "normalised": ((3, 4, 5, 9, 64), {"layout": "holes"}, {"normalize": True}),
    "normalised, packed": ((3, 4, 5, 9, 64), {"layout": "packed"}, {"normalize": True}),
    "smooth": ((3, 4, 5, 9, 64), {"layout": "holes"}, {"temperature": 0.5}),
    "smooth, grouped, normalised": ((3, 4, 5, 9, 64), {"pairing": "grouped"}, {"temperature": 1, "normalize": True}),
    "smooth, packed": ((3, 4, 5, 9, 64), {"layout": "packed"}, {"temperature": 0.5}),
}  # fmt: skip


@gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_repeated_launches_give_the_bits_of_the_first(case: str, dtype: torch.dtype) -> None:
    shape, layout, options = CASES[case]
    rounds = [on_gpu(*shape, dtype=dtype, **layout) for _ in range(4)]  # the same values in other tensors
    for needs, names in (("", (REPLAY,)), ("qd", (TRAINING, GRADIENTS)), ("q", (TRAINING,)), ("d", (TRAINING,))):
        _arguments._SEEN.clear()
        first = maxsim_results(rounds[0], needs=needs, **options)
        assert not set(names) & set(plans()), "what is called once needs no plan"
        assert_same(maxsim_results(rounds[0], needs=needs, **options), first)
        assert all(name in plans() for name in names)
        with nan_poisoned_empty():
            for inputs in rounds[1:]:
                assert_same(maxsim_results(inputs, needs=needs, **options), first)


@gpu
@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize("case", ["all", "queries longer than a tile", "packed, mean", "aligned", "holes"])
def test_quantized_scores_repeat_their_launches(case: str, kind: str) -> None:
    if kind == "fp8" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("fp8 products need compute capability 8.9")
    shape, layout, options = CASES[case]
    inputs = on_gpu(*shape, **layout)
    documents = quantize_tokens(inputs.documents, kind)
    first, _ = (maxsim(inputs.queries, documents, **inputs.layout, **options) for _ in range(2))
    assert REPLAY in plans()
    for _ in range(2):
        with nan_poisoned_empty():
            assert torch.equal(maxsim(inputs.queries.clone(), documents, **inputs.layout, **options), first)


def gradients_of(strides: str, scores: Tensor) -> Tensor:
    values = torch.linspace(-1, 1, 2 * scores.numel(), device=scores.device)
    if strides == "expanded":
        return values[:1].expand(scores.shape) if scores.dim() == 1 else values[:1, None].expand(scores.shape)
    return values[::2].view(scores.shape) if scores.dim() == 1 else values[::2].view(scores.shape[::-1]).mT


@gpu
@pytest.mark.parametrize("strides", ["expanded", "strided", "unaligned"])
@pytest.mark.parametrize("pairing", ["all", "aligned", "grouped"])
def test_gradients_of_any_strides_are_those_of_contiguous_ones(pairing: str, strides: str) -> None:
    inputs = on_gpu(3, 3, 5, 9, 64, pairing=pairing)
    leaves = [inputs.queries.requires_grad_(), inputs.documents.requires_grad_()]
    for _ in range(3):
        scores = maxsim(*leaves, **inputs.layout)
        dscores = gradients_of(strides, scores)
        if strides == "unaligned":
            room = torch.empty(dscores.numel() + 1, device="cuda")
            dscores = room[1:].view(dscores.shape).copy_(dscores)
        found = torch.autograd.grad(scores, leaves, dscores, retain_graph=True)
        expected = torch.autograd.grad(scores, leaves, dscores.clone(memory_format=torch.contiguous_format))
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def warmed(**layout: Any) -> tuple[MaxSimInputs, list[Tensor], dict[str, Tensor]]:
    """A call of which plans exist, its leaves, and its results."""
    inputs = on_gpu(3, 4, 5, 9, 64, **layout)
    for _ in range(2):
        results = maxsim_results(inputs)
    assert TRAINING in plans() and GRADIENTS in plans()
    return inputs, [inputs.queries.clone().requires_grad_(), inputs.documents.clone().requires_grad_()], results


@gpu
def test_a_graph_that_is_kept_gives_the_same_gradients_twice_and_one_that_is_not_refuses() -> None:
    inputs, leaves, results = warmed(layout="packed")
    scores = maxsim(*leaves, **inputs.layout)
    for keep in (True, False):
        grads = torch.autograd.grad(scores, leaves, inputs.dscores, retain_graph=keep)
        assert torch.equal(grads[0], results["dqueries"]) and torch.equal(grads[1], results["ddocuments"])
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(scores, leaves, inputs.dscores)


@gpu
@pytest.mark.parametrize("pairing", ["all", "grouped"])
def test_a_second_derivative_is_refused_from_plans_too(pairing: str) -> None:
    inputs, leaves, results = warmed(pairing=pairing)
    scores = maxsim(*leaves, **inputs.layout)
    grads = torch.autograd.grad(scores, leaves, inputs.dscores, create_graph=True)
    assert torch.equal(grads[0], results["dqueries"]) and torch.equal(grads[1], results["ddocuments"])
    with pytest.raises(RuntimeError, match="maxsim can be differentiated once"):
        grads[0].sum().backward()


@gpu
def test_what_was_changed_in_place_is_noticed() -> None:
    for name in ("queries", "mask"):
        _arguments._SEEN.clear()
        inputs, leaves, _ = warmed(layout="holes")
        scores = maxsim(*leaves, **inputs.layout)
        with torch.no_grad():
            (leaves[0] if name == "queries" else inputs.document_mask).zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            scores.sum().backward()


@gpu
def test_tensors_that_a_compiled_kernel_cannot_take_go_the_long_way() -> None:
    inputs, _, results = warmed()
    queries, documents = inputs.queries, inputs.documents
    room = torch.zeros(queries.numel() + 1, dtype=queries.dtype, device="cuda")
    unaligned = room[1:].view(queries.shape).copy_(queries)
    wide = torch.cat([documents, documents], dim=2)[:, :, :64]
    for leaves in ((unaligned, documents), (queries, wide), (queries.mT.contiguous().mT, documents)):
        mine = [leaf.detach().requires_grad_() for leaf in leaves]
        scores = maxsim(*mine)
        grads = torch.autograd.grad(scores, mine, inputs.dscores)
        torch.testing.assert_close([scores, *grads], [results[name] for name in ("scores", "dqueries", "ddocuments")])


@gpu
def test_saved_tensors_may_travel() -> None:
    inputs, leaves, results = warmed(layout="packed")
    with torch.autograd.graph.save_on_cpu():
        scores = maxsim(*leaves, **inputs.layout)
    grads = torch.autograd.grad(scores, leaves, inputs.dscores)
    assert torch.equal(grads[0], results["dqueries"]) and torch.equal(grads[1], results["ddocuments"])


@gpu
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("pairing", ["all", "aligned", "index"])
def test_saved_tensors_may_come_back_at_addresses_of_any_alignment(pairing: str, normalize: bool) -> None:
    inputs = on_gpu(70, 70, 5, 9, 64, pairing=pairing, layout="holes")
    leaves = [inputs.queries.requires_grad_(), inputs.documents.requires_grad_()]
    rooms: list[Tensor] = []

    def moved(tensor: Tensor) -> Tensor:
        rooms.append(torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device))
        return rooms[-1][1:].view(tensor.shape).copy_(tensor.detach())

    for _ in range(3):
        expected = torch.autograd.grad(maxsim(*leaves, **inputs.layout, normalize=normalize), leaves, inputs.dscores)
        with torch.autograd.graph.saved_tensors_hooks(moved, lambda tensor: tensor):
            scores = maxsim(*leaves, **inputs.layout, normalize=normalize)
        found = torch.autograd.grad(scores, leaves, inputs.dscores)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@gpu
def test_autocast_inference_mode_and_parameters_give_the_same_bits() -> None:
    inputs, leaves, results = warmed()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        scores = maxsim(*leaves)
        assert torch.equal(maxsim(*(leaf.detach().float() for leaf in leaves)), results["scores"])
    grads = torch.autograd.grad(scores, leaves, inputs.dscores)
    assert torch.equal(scores, results["scores"]) and torch.equal(grads[0], results["dqueries"])
    assert torch.equal(maxsim(*map(torch.nn.Parameter, leaves)).detach(), results["scores"])
    with torch.inference_mode():
        for _ in range(3):
            assert torch.equal(maxsim(inputs.queries, inputs.documents), results["scores"])


@gpu
def test_transforms_and_the_compiler_see_the_registered_operator() -> None:
    inputs, leaves, results = warmed()

    def loss(queries: Tensor) -> Tensor:
        return (maxsim(queries, inputs.documents) * inputs.dscores).sum()

    with pytest.raises(RuntimeError, match=r"impl must be 'reference' under torch\.func\.grad"):
        torch.func.grad(loss)(inputs.queries)
    compiled = torch.compile(maxsim, backend="aot_eager", fullgraph=True)
    grads = torch.autograd.grad(compiled(*leaves), leaves, inputs.dscores)
    assert torch.equal(grads[0], results["dqueries"]) and torch.equal(grads[1], results["ddocuments"])


def step(leaves: list[Tensor], inputs: MaxSimInputs) -> Callable[[], list[Tensor]]:
    def run() -> list[Tensor]:
        scores = maxsim(*leaves, **inputs.layout)
        return [scores.detach(), *torch.autograd.grad(scores, leaves, inputs.dscores)]

    return run


@gpu
def test_forward_mode_is_refused_after_calls_without_it() -> None:
    queries, documents = torch.randn(2, 4, 16, device="cuda"), torch.randn(3, 5, 16, device="cuda")
    for _ in range(3):
        maxsim(queries, documents)
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match="impl must be 'reference' in forward-mode"):
        maxsim(forward_ad.make_dual(queries, torch.ones_like(queries)), documents)
    with pytest.raises(RuntimeError, match="impl must be 'reference' in forward-mode"):
        torch.func.jvp(lambda q: maxsim(q, documents), (queries,), (queries,))


@gpu
@pytest.mark.parametrize("planned", [True, False], ids=["planned before", "not planned before"])
@pytest.mark.parametrize("layout", ["full", "packed"])
def test_a_captured_graph_repeats_a_step_and_plans_hold_nothing_of_it(layout: str, planned: bool) -> None:
    inputs, leaves, results = warmed(layout=layout)  # kernels are compiled before a capture, in any case
    if not planned:
        _arguments._SEEN.clear()
    run = step(leaves, inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    if not planned:
        assert not {REPLAY, TRAINING, GRADIENTS} & set(plans())
    graph.replay()
    expected = [results[name] for name in ("scores", "dqueries", "ddocuments")]
    assert all(torch.equal(a, b) for a, b in zip(captured, expected, strict=True))
    with torch.no_grad():
        leaves[0].neg_()
    graph.replay()
    again = [value.clone() for value in captured]
    del graph, captured
    assert all(torch.equal(a, b) for a, b in zip(again, run(), strict=True))


@gpu
def test_plans_hold_no_memory_of_a_call() -> None:
    inputs = on_gpu(3, 4, 5, 9, 64, layout="packed")
    run = step([inputs.queries.requires_grad_(), inputs.documents.requires_grad_()], inputs)
    for _ in range(2):
        run()
    gc.collect()
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        run()
    assert torch.cuda.memory_allocated() == before
    _arguments._SEEN.clear()
    gc.collect()
    assert torch.cuda.memory_allocated() == before


@gpu
def test_threads_and_streams_share_plans() -> None:
    inputs, leaves, results = warmed()
    wrong: list[str] = []

    def work() -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.default_stream())
        with torch.cuda.stream(stream):
            mine = [leaf.detach().clone().requires_grad_() for leaf in leaves]
            for _ in range(20):
                for name, value in zip(("scores", "dqueries", "ddocuments"), step(mine, inputs)(), strict=True):
                    if not torch.equal(value, results[name]):
                        wrong.append(name)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@gpu
def test_every_device_has_plans_of_its_own() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one device here")
    inputs, _, results = warmed()
    there = inputs.to("cuda:1")
    for _ in range(3):
        found = maxsim_results(there)
        assert all(torch.equal(found[name].to("cuda:0"), results[name]) for name in results)
        assert_same(maxsim_results(inputs), results)


@gpu
def test_a_profilers_hooks_hear_of_every_launch() -> None:
    from triton import knobs

    inputs, _, results = warmed()
    if not hasattr(knobs.runtime.launch_enter_hook, "add"):
        pytest.skip("hooks of this Triton are not chains")
    heard: list[Any] = []
    knobs.runtime.launch_enter_hook.add(heard.append)
    try:
        assert_same(maxsim_results(inputs), results)
    finally:
        knobs.runtime.launch_enter_hook.remove(heard.append)
    assert len(heard) == 3
