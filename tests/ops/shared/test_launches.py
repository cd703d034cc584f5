"""Calls like an earlier one repeat its launches: what must hold for every operator, whatever is remembered.

``OPERATORS`` says how each is called; most of it runs in Triton's interpreter, on the CPU, and all of it on a GPU.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernels need triton")

from tests.ops.toy import TOY, toy
from tilefold.ops import entmax, entmax_attention, lsr_head, maxsim, token_scatter
from tilefold.ops._shared import operator as shared_operator
from tilefold.ops._shared._triton import launch
from tilefold.ops._shared.impl import triton_interpreted
from tilefold.ops.entmax.api import ENTMAX
from tilefold.ops.entmax_attention.api import ATTENTION
from tilefold.ops.lsr_head.api import HEAD
from tilefold.ops.maxsim.api import MAXSIM
from tilefold.ops.token_scatter.api import SCATTER
from tilefold.testing import nan_poisoned_empty

gpu = pytest.mark.gpu
DEVICE = "cpu" if triton_interpreted() else "cuda"
kernels = pytest.mark.skipif(False, reason="") if triton_interpreted() else gpu


@dataclass(frozen=True)
class Operator:
    """How the contract calls an operator.

    Attributes:
        call: the operator, with the leaves as its positional arguments.
        shapes: of the leaves, which are differentiated.
        given: shapes, and largest values, of integer tensors that the call gets by name.
        options: keyword arguments that give other results, one set of them for each kind of call.
        caches: the operator's own.
        launches: kernels of one call and its gradients; two numbers where more multiprocessors, or smaller tiles, need
            one more.
    """

    call: Callable[..., Tensor]
    shapes: tuple[tuple[int, ...], ...]
    caches: tuple[dict[Any, Any], ...]
    launches: int | tuple[int, ...]
    given: dict[str, Callable[[], Tensor]] = field(default_factory=dict)
    options: tuple[dict[str, Any], ...] = ({},)

    def counts(self, launched: int) -> bool:
        """Whether a call and its gradients may launch so many kernels."""
        return launched in (self.launches if isinstance(self.launches, tuple) else (self.launches,))

    def leaves(self, seed: int = 0, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        """Leaves with values of their own for every seed."""
        generator = torch.Generator().manual_seed(seed)
        values = [torch.randn(shape, generator=generator) for shape in self.shapes]
        return [value.to(DEVICE, dtype).requires_grad_() for value in values]

    def __call__(self, leaves: list[Tensor], **options: Any) -> Tensor:
        named = {name: make().to(DEVICE) for name, make in self.given.items()}
        return self.call(*leaves, **named, **(self.options[0] | options), impl="triton")

    def step(self, leaves: list[Tensor], wanted: list[Tensor] | None = None, **options: Any) -> list[Tensor]:
        """Scores, and the gradients of the leaves or of those that are wanted."""
        scores = self(leaves, **options)
        return [scores.detach(), *torch.autograd.grad(scores, leaves if wanted is None else wanted, dout(scores))]


def dout(scores: Tensor) -> Tensor:
    """A gradient for ``scores``, the same in every call."""
    values = torch.linspace(-1, 1, scores.numel()).view(scores.shape)
    return values.to(scores.device, scores.dtype)


def head(pooling: str, launches: int | tuple[int, ...], length: int = 16, **given: Callable[[], Tensor]) -> Operator:
    """The LSR head; rows of 16 values and 16 tokens are read through TMA descriptors where there are some."""
    shape = (2 * length, 16) if "cu_seqlens" in given else (2, length, 16)
    options: tuple[dict[str, Any], ...] = ({"pooling": pooling}, {"pooling": pooling, "activation": "softplus"})
    options += ({"pooling": pooling, "logit_scale": 0.5}, {"pooling": pooling, "logit_scale": 1})
    caches = (HEAD.calls, HEAD.gradients)
    return Operator(lsr_head, (shape, (40, 16), (40,)), caches, launches, given, options)


def attention(launches: int, *, keys: int = 21, learned: bool = False, **options: Any) -> Operator:
    """Entmax attention."""
    given = {name: options.pop(name) for name in list(options) if callable(options[name])}
    batch = 2 if "key_padding_mask" in given else 1
    shapes = [(32, 1, 16) if "cu_seqlens_k" in given else (batch, 1, n, 16) for n in (7, keys, keys)]
    kinds = (options, options | {"scale": 0.3, "window": 5}) + (() if learned else (options | {"alpha": 1},))
    caches = (ATTENTION.calls, ATTENTION.gradients)
    return Operator(attend, (*shapes, *([(1,)] if learned else [])), caches, launches, given, kinds)


def attend(q: Tensor, k: Tensor, v: Tensor, theta: Tensor | None = None, **options: Any) -> Tensor:
    """Entmax attention; dropout drops the same weights in every call."""
    if "dropout_p" in options:
        options["generator"] = torch.Generator(q.device).manual_seed(0)
    if theta is not None:
        options["alpha"] = 1 + theta.sigmoid()
    out = entmax_attention(q, k, v, **options)
    assert isinstance(out, Tensor)
    return out


def scatter(**given: Callable[[], Tensor]) -> Operator:
    """The token scatter; packed tokens are the first padded ones in a row."""
    packed = "cu_seqlens" in given
    given |= {"input_ids": lambda: ids().flatten()[:32] if packed else ids()}
    options: Any = ({}, {"reduce": "sum"}, {"activation": "softplus"}, {"ignore_ids": (1, 2)}, {"vocab_size": 48})
    caches = (SCATTER.calls, SCATTER.gradients)
    return Operator(scattered, ((32,) if packed else (2, 21),), caches, 2, given, options)


def scattered(weights: Tensor, input_ids: Tensor, vocab_size: int = 40, **options: Any) -> Tensor:
    """The token scatter, all but the weights by name."""
    return token_scatter(weights, input_ids, vocab_size, **options)


def rows(**options: Any) -> Operator:
    """Alpha-entmax of rows."""
    kinds = (options, options | {"dim": 0}, {"alpha": 2.0})
    return Operator(entmax_rows, ((2, 21),), (ENTMAX.calls, ENTMAX.gradients), 2, {}, kinds)


def entmax_rows(x: Tensor, theta: Tensor | None = None, **options: Any) -> Tensor:
    p = entmax(x, **(options if theta is None else options | {"alpha": 1 + theta.sigmoid()}))
    assert isinstance(p, Tensor)
    return p


def toy_like(way: str, launches: int) -> Operator:
    """The toy, which stands for all operators on its base in what is the same for these."""
    options = ({"way": way}, {"way": way, "scale": 0.5}, {"way": way, "scale": 1})
    return Operator(toy, ((5, 16), (16,)), (TOY.calls, TOY.gradients), launches, {}, options)


def ids() -> Tensor:
    """Some of them more than once in a sequence."""
    return torch.arange(42).view(2, 21) * 7 % 38


def mask() -> Tensor:
    """Holes, and a sequence without a token."""
    return torch.arange(42).view(2, 21) % 3 * torch.tensor([[1], [0]])


def offsets() -> Tensor:
    """Three sequences, one of them empty."""
    return torch.tensor([0, 11, 11, 32], dtype=torch.int32)


def late_interaction(
    documents: tuple[int, ...],
    launches: int,
    given: dict[str, Callable[[], Tensor]],
    *options: dict[str, Any],
) -> Operator:
    """MaxSim of two queries of 17 tokens, or as many packed ones."""
    queries = (34, 16) if "cu_seqlens_q" in given else (2, 17, 16)
    return Operator(maxsim, (queries, documents), (MAXSIM.calls, MAXSIM.gradients), launches, given, options)


def of_queries() -> Tensor:
    """Two packed queries."""
    return torch.tensor([0, 20, 34], dtype=torch.int32)


def of_documents() -> Tensor:
    """Three packed documents, one of them empty."""
    return torch.tensor([0, 7, 7, 20], dtype=torch.int32)


def pairs() -> Tensor:
    """Pairs in int64, one document twice."""
    return torch.tensor([[0, 1], [1, 1], [1, 0]])


OPERATORS: dict[str, Operator] = {
    "maxsim": late_interaction((3, 5, 16), 3, {}, {}, {"reduction": "mean"}, {"temperature": 1}, {"temperature": 2.0}),
    "maxsim masked, temperature": late_interaction(
        (3, 21, 16),
        3,
        {"document_mask": lambda: torch.arange(63).view(3, 21) % 3 != 0},
        {"temperature": 0.5},
        {"temperature": 0.5, "mask_mode": "zero"},
    ),
    "maxsim packed": late_interaction(
        (20, 16),
        4 if triton_interpreted() else 3,  # a GPU's tile holds all queries
        {"cu_seqlens_q": of_queries, "cu_seqlens_d": of_documents},
        {"reduction": "mean"},
        {},
    ),
    "maxsim grouped, normalised": late_interaction(
        (2, 2, 5, 16), 6, {}, {"pairing": "grouped", "normalize": True}, {"pairing": "grouped"}
    ),
    "maxsim normalised": late_interaction((3, 5, 16), (4, 5), {}, {"normalize": True}, {"reduction": "mean"}),
    "maxsim aligned": late_interaction((2, 5, 16), 3, {}, {"pairing": "aligned"}, {"pairing": "all"}),
    "maxsim listed pairs": late_interaction((3, 5, 16), 5, {"pairing": pairs}, {}, {"mask_mode": "zero"}),
    "lsr_head": head("max", 5),
    "lsr_head masked": head("max", 6, 21, attention_mask=mask),
    "lsr_head packed": head("max", (6, 7), cu_seqlens=offsets),
    "lsr_head sum": head("sum", 5),
    "lsr_head mean, masked": head("mean", (3, 5), 21, attention_mask=mask),  # few rows, or many
    "lsr_head cls, masked": head("cls", 4, 21, attention_mask=mask),
    "lsr_head last": head("last", 4),
    "lsr_head last, packed": head("last", 4, cu_seqlens=offsets),
    "entmax_attention masked, dropout": attention(3, key_padding_mask=mask, dropout_p=0.3),
    "entmax_attention packed": attention(6, cu_seqlens_q=offsets, cu_seqlens_k=offsets),
    "token_scatter masked": scatter(attention_mask=mask),
    "token_scatter packed": scatter(cu_seqlens=offsets),
    "entmax rows": rows(),
    "entmax rows, learned alpha": Operator(entmax_rows, ((2, 21), (2, 1)), (ENTMAX.calls, ENTMAX.gradients), 2),
    "the toy": toy_like("one launch", 2),
    "the toy, two launches": toy_like("two launches", 3),
    "the toy, torch between": toy_like("torch between", 3),
}
ON_GPUS_ONLY: dict[str, Operator] = {  # interpreting takes a minute each
    "entmax_attention": attention(3),
    "entmax_attention causal, live blocks listed": attention(6, keys=1100, causal=True),
    "entmax_attention, learned alpha": attention(3, learned=True),
}
OPERATORS |= {} if triton_interpreted() else ON_GPUS_ONLY
every_operator = pytest.mark.parametrize("operator", OPERATORS.values(), ids=OPERATORS)
# What autograd and the cache do is the same for all entries of an operator: the interpreter, which is slow, runs one.
SAMPLE = ("maxsim aligned", "lsr_head", "lsr_head last, packed", "entmax_attention packed", "the toy, two launches")
sample = {name: OPERATORS[name] for name in (SAMPLE if triton_interpreted() else OPERATORS)}
an_operator = pytest.mark.parametrize("operator", sample.values(), ids=sample)


@pytest.fixture(autouse=True)
def nothing_remembered() -> Iterator[None]:
    forget()
    yield
    forget()


def forget() -> None:
    for operator in OPERATORS.values():
        for cache in operator.caches:
            cache.clear()


@pytest.fixture
def unbound(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels that were launched with their arguments bound anew."""
    names: list[str] = []
    honest = launch.Launcher.__call__

    def seen(self: launch.Launcher, *arguments: Any) -> None:
        names.append(self._kernel.__name__)
        honest(self, *arguments)

    monkeypatch.setattr(launch.Launcher, "__call__", seen)
    return names


def equal(found: list[Tensor], expected: list[Tensor]) -> bool:
    pairs = list(zip(found, expected, strict=True))
    return all(a.dtype == b.dtype and torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in pairs)


def warmed(operator: Operator) -> tuple[list[Tensor], list[Tensor]]:
    """Leaves of a call that was made often enough to repeat launches, and its results."""
    leaves = operator.leaves()
    for _ in range(3):
        results = operator.step(leaves)
    return leaves, results


@kernels
@every_operator
def test_repeated_launches_give_the_bits_of_the_first(operator: Operator, unbound: list[str]) -> None:
    for wanted in (slice(None), slice(0, 1), slice(1, 2))[: 3 if len(operator.shapes) > 1 else 1]:
        first = None
        for round_ in range(4):
            unbound.clear()
            leaves = operator.leaves()  # the same values in other tensors
            for leaf in set(leaves) - set(leaves[wanted]):
                leaf.requires_grad_(False)
            with nan_poisoned_empty():
                results = operator.step(leaves, leaves[wanted])
            assert first is None or equal(results, first)
            first = results
            assert bool(unbound) == (round_ < 2 or triton_interpreted()), unbound
            assert wanted != slice(None) or not unbound or operator.counts(len(unbound)), unbound
    with torch.no_grad():
        found = [operator(operator.leaves()) for _ in range(3)]
    with torch.inference_mode():
        found += [operator(operator.leaves()) for _ in range(2)]
    assert all(equal([scores], results[:1]) for scores in found)


@kernels
@every_operator
def test_no_value_is_remembered(operator: Operator) -> None:
    expected = []
    for seed in range(3):
        forget()
        expected.append(operator.step(operator.leaves(seed)))
    assert not equal(expected[0], expected[1])
    for _ in range(2):
        assert all(equal(operator.step(operator.leaves(seed)), results) for seed, results in enumerate(expected))


@kernels
@every_operator
def test_calls_with_other_options_are_not_mixed_up(operator: Operator) -> None:
    expected = []
    for options in operator.options:
        forget()
        expected.append(operator.step(operator.leaves(), **options))
    for _ in range(2):
        for options, results in zip(operator.options, expected, strict=True):
            assert equal(operator.step(operator.leaves(), **options), results), options


@kernels
@an_operator
def test_a_gradient_is_planned_for_the_precision_that_is_allowed_when_it_runs(operator: Operator) -> None:
    leaves = operator.leaves()
    scores, plans = operator(leaves), []
    try:
        for allowed in (True, False, True, False):
            torch.backends.cuda.matmul.allow_tf32 = allowed
            torch.autograd.grad(scores, leaves, dout(scores), retain_graph=True)
            plans.append(sum(map(len, operator.caches)))
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False
    first = plans[0]
    assert plans == [first, first + 1, first + 1, first + 1]


@kernels
@an_operator
@pytest.mark.parametrize("strides", ["expanded", "transposed", "unaligned"])
def test_gradients_of_any_strides_are_those_of_contiguous_ones(operator: Operator, strides: str) -> None:
    leaves, _ = warmed(operator)
    for _ in range(3):
        scores = operator(leaves)
        if strides == "expanded":
            given = torch.ones((), dtype=scores.dtype, device=DEVICE).expand(scores.shape)
        elif strides == "transposed":
            given = dout(scores).transpose(0, -1).contiguous().transpose(0, -1)
        else:
            given = unaligned(dout(scores))
        found = torch.autograd.grad(scores, leaves, given, retain_graph=True)
        expected = torch.autograd.grad(scores, leaves, given.clone(memory_format=torch.contiguous_format))
        torch.testing.assert_close(found, expected)  # other compilations may add up in another order


def unaligned(tensor: Tensor) -> Tensor:
    """A copy one element past a multiple of 16 bytes."""
    room = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)
    return room[1:].view(tensor.shape).copy_(tensor.detach())


@kernels
@an_operator
def test_operands_of_any_strides_and_alignment_give_the_same_results(operator: Operator) -> None:
    leaves, results = warmed(operator)
    for place, leaf in enumerate(leaves):
        for other in (unaligned(leaf), torch.stack([leaf.detach(), leaf.detach()], dim=-1)[..., 0]):
            for _ in range(3 if place == 0 else 1):
                mine = [*leaves[:place], other.detach().requires_grad_(), *leaves[place + 1 :]]
                torch.testing.assert_close(operator.step(mine), results)
    assert equal(operator.step(leaves), results)


@kernels
@an_operator
def test_saved_tensors_may_travel_and_come_back_anywhere(operator: Operator) -> None:
    leaves, results = warmed(operator)
    for _ in range(3):
        with torch.autograd.graph.saved_tensors_hooks(unaligned, lambda tensor: tensor):
            scores = operator(leaves)
        grads = torch.autograd.grad(scores, leaves, dout(scores))
        torch.testing.assert_close([scores.detach(), *grads], results)
        with torch.autograd.graph.save_on_cpu():
            scores = operator(leaves)
        assert equal([scores.detach(), *torch.autograd.grad(scores, leaves, dout(scores))], results)


@kernels
@an_operator
def test_a_graph_that_is_kept_gives_the_same_gradients_twice(operator: Operator) -> None:
    leaves, results = warmed(operator)
    scores = operator(leaves)
    for keep in (True, False):
        assert equal(list(torch.autograd.grad(scores, leaves, dout(scores), retain_graph=keep)), results[1:])
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(scores, leaves, dout(scores))


@kernels
@an_operator
def test_derivatives_that_do_not_exist_are_refused_after_any_number_of_calls(operator: Operator) -> None:
    leaves, results = warmed(operator)
    grads = torch.autograd.grad(scores := operator(leaves), leaves, dout(scores), create_graph=True)
    assert equal([grad.detach() for grad in grads], results[1:])
    with pytest.raises(RuntimeError, match="can be differentiated once"):
        grads[0].sum().backward()
    rest = [leaf.detach() for leaf in leaves[1:]]
    with pytest.raises(RuntimeError, match=r"impl must be 'reference' under torch\.func\.grad"):
        torch.func.grad(lambda leaf: operator([leaf, *rest]).sum())(leaves[0].detach())
    with pytest.raises(RuntimeError, match="forward-mode"):
        torch.func.jvp(lambda leaf: operator([leaf, *rest]), (leaves[0].detach(),), (leaves[0].detach(),))


@kernels
@an_operator
def test_what_backward_reads_and_was_changed_in_place_is_noticed(operator: Operator) -> None:
    leaves, results = warmed(operator)
    scores = operator(leaves)
    with torch.no_grad():
        leaves[1 % len(leaves)].zero_()
    try:
        grads = torch.autograd.grad(scores, leaves, dout(scores))
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
    else:
        assert equal(list(grads), results[1:])  # backward did not read it, as entmax reads its results


@kernels
@an_operator
def test_plans_are_bounded_and_keep_no_tensor_of_a_call(operator: Operator, monkeypatch: pytest.MonkeyPatch) -> None:
    leaves, _ = warmed(operator)
    kept = [weakref.ref(leaf) for leaf in leaves]
    del leaves
    gc.collect()
    assert not any(ref() is not None for ref in kept)
    monkeypatch.setattr(shared_operator, "MAX_CALLS", 2)
    for options in operator.options * 2:
        operator.step(operator.leaves(), **options)
        assert all(len(cache) <= 2 for cache in operator.caches)


@kernels
@an_operator
def test_a_profilers_hooks_hear_of_every_launch(operator: Operator, unbound: list[str]) -> None:
    from triton import knobs

    leaves, results = warmed(operator)
    if not hasattr(knobs.runtime.launch_enter_hook, "add"):
        pytest.skip("hooks of this Triton are not chains")
    heard: list[Any] = []
    unbound.clear()
    knobs.runtime.launch_enter_hook.add(heard.append)
    try:
        assert equal(operator.step(leaves), results)
    finally:
        knobs.runtime.launch_enter_hook.remove(heard.append)
    assert operator.counts(len(unbound)), unbound
    assert triton_interpreted() or len(heard) == len(unbound)
    unbound.clear()
    assert equal(operator.step(leaves), results) and bool(unbound) == triton_interpreted()


@gpu
@every_operator
@pytest.mark.parametrize("planned", [True, False], ids=["planned before", "not planned before"])
def test_a_captured_graph_repeats_a_step_and_plans_hold_nothing_of_it(operator: Operator, planned: bool) -> None:
    if "dropout_p" in operator.options[0]:
        pytest.skip("a graph draws numbers of its own")
    leaves, results = warmed(operator)  # kernels are compiled before a capture, in any case
    if not planned:
        forget()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    named = {name: make().to(DEVICE) for name, make in operator.given.items()}
    captive = Operator(lambda *a, **k: operator.call(*a, **named, **k), operator.shapes, (), 0, {}, operator.options)
    gradient = dout(results[0])
    with torch.cuda.graph(graph):
        for _ in range(2):
            scores = captive(leaves)
            captured = [scores.detach(), *torch.autograd.grad(scores, leaves, gradient)]
    graph.replay()
    assert equal(captured, results)
    with torch.no_grad():
        leaves[0].neg_()
    graph.replay()
    again = [value.clone() for value in captured]
    del graph, captured, scores
    assert equal(again, operator.step(leaves))


@gpu
@every_operator
def test_plans_hold_no_memory_of_a_call(operator: Operator) -> None:
    with torch.autograd.set_multithreading_enabled(False):  # another thread may still free what a step left
        leaves, results = warmed(operator)
        gc.collect()
        before = torch.cuda.memory_allocated()
        for _ in range(3):
            operator.step(leaves)
        assert torch.cuda.memory_allocated() == before
        forget()
        gc.collect()
        assert torch.cuda.memory_allocated() == before
        assert equal(operator.step(leaves), results)


@gpu
@every_operator
def test_threads_and_streams_share_plans(operator: Operator) -> None:
    leaves, results = warmed(operator)
    wrong: list[int] = []

    def work() -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.default_stream())
        with torch.cuda.stream(stream):
            mine = [leaf.detach().clone().requires_grad_() for leaf in leaves]
            wrong.extend(round_ for round_ in range(20) if not equal(operator.step(mine), results))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@gpu
@every_operator
def test_every_device_has_plans_of_its_own(operator: Operator, monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one device here")
    _, results = warmed(operator)
    for _ in range(4):
        for device in ("cuda:1", "cuda:0"):  # neither of them need be the current one
            monkeypatch.setattr("tests.ops.shared.test_launches.DEVICE", device)
            found = operator.step(operator.leaves())
            assert equal([value.to("cuda:0") for value in found], results)


@pytest.mark.skipif(triton_interpreted(), reason="kernels run on the CPU")
@every_operator
def test_calls_that_run_no_kernel_leave_no_plan(operator: Operator) -> None:
    generator = torch.Generator().manual_seed(0)
    leaves = [torch.randn(shape, generator=generator).requires_grad_() for shape in operator.shapes]
    named = {name: make() for name, make in operator.given.items()}
    for _ in range(2):
        operator.call(*leaves, **named, **operator.options[0]).sum().backward()
    assert not any(map(len, operator.caches))


@pytest.mark.skipif(triton_interpreted(), reason="nothing is compiled")
def test_what_is_known_of_a_kernel_does_not_grow_with_the_lengths_it_is_called_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from tilefold.ops.lsr_head._triton.max_backward import _count_kernel
    from tilefold.ops.lsr_head._triton.sum_pooling import _check_offsets_kernel

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    place = list(_count_kernel.arg_names).index("V")

    def kinds(*values: int) -> set[Any]:
        kind = launch.Launcher(_count_kernel, {})._kind
        return {kind((None,) * place + (value,)) for value in values}

    # Triton builds another kernel for 1, for multiples of 16 and for 64 bits, and for no other value
    assert len(kinds(*range(2, 2000))) == 2
    assert not kinds(1) & kinds(3, 16) and not kinds(3) & kinds(16) and not kinds(3) & kinds(2**31 + 3)
    assert kinds(0, 16) == kinds(1600) and kinds(2**31) == kinds(2**33)
    assert len({launch.Launcher(_check_offsets_kernel, {})._kind((None, None, n, n)) for n in range(2000)}) == 1
