"""Calls like an earlier one repeat its launches: what must hold for every operator, whatever is
remembered.

``OPERATORS`` says how each is called; most of it runs in Triton's interpreter, on the CPU, and all
of it on a GPU.
"""

from __future__ import annotations

import gc
import threading
import weakref
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernels need triton")

from tests.kernels import triton_interpreted
from tests.ops import samples
from tests.ops.base import operator as shared_operator
from tests.ops.launching import launch
from tests.ops.samples import (
    MASK,
    OFFSETS,
    Sample,
    attention,
    dout,
    forget,
    head,
    late,
    rows,
    scatter,
    unaligned,
)
from tests.ops.toy import toy
from tests.refusals import refused
from tilefold.testing import nan_poisoned_empty

gpu = pytest.mark.gpu
INTERPRETED = triton_interpreted()  # with small tiles, and the ends of documents of several
kernels = pytest.mark.skipif(False, reason="") if INTERPRETED else gpu
pytestmark = pytest.mark.usefixtures("nothing_remembered")


@dataclass(frozen=True)
class Operator:
    """A sample as the contract calls it.

    Attributes:
        launches: kernels of one call and its gradients; two numbers where more multiprocessors, or
            smaller tiles, need one more.
        options: keyword arguments that give other results, one set of them for each kind of call.
    """

    sample: Sample
    launches: int | tuple[int, ...]
    options: tuple[dict[str, Any], ...] = ({},)

    @property
    def passes(self) -> dict[Any, Any]:
        """What is remembered of calls and of their gradients."""
        found: dict[Any, Any] = samples.ROOMS[self.sample.name].calls
        return found

    def counts(self, launched: int) -> bool:
        """Whether a call and its gradients may launch so many kernels."""
        return launched in (self.launches if isinstance(self.launches, tuple) else (self.launches,))

    def leaves(self, seed: int = 0) -> list[Tensor]:
        return self.sample.leaves(samples.DEVICE, seed)

    def __call__(
        self,
        leaves: list[Tensor],
        given: dict[str, Any] | None = None,
        **options: Any,
    ) -> Tensor:
        given = self.sample.given(samples.DEVICE) if given is None else given
        found: Tensor = self.sample.function(
            *leaves,
            **(given | self.options[0] | options),
            impl="triton",
        )
        return found

    def step(
        self,
        leaves: list[Tensor],
        wanted: list[Tensor] | None = None,
        **options: Any,
    ) -> list[Tensor]:
        """Scores, and the gradients of the leaves or of those that are wanted."""
        scores = self(leaves, **options)
        return [
            scores.detach(),
            *torch.autograd.grad(scores, leaves if wanted is None else wanted, dout(scores)),
        ]


Kinds = tuple[dict[str, Any], ...]


def a_head(launches: int | tuple[int, ...], *given: Any, **options: Any) -> Operator:
    kinds: Kinds = ({}, {"activation": "softplus"}, {"logit_scale": 0.5}, {"logit_scale": 1})
    return Operator(head(*given, **options), launches, kinds)


def an_attention(launches: int, learned: bool = False, **options: Any) -> Operator:
    kinds: Kinds = ({}, {"scale": 0.3, "window": 5}, {"alpha": 1})
    return Operator(
        attention(learned=learned, **options),
        launches,
        kinds[:2] if learned else kinds,
    )


def a_scatter(**options: Any) -> Operator:
    kinds: Kinds = (
        {},
        {"reduce": "sum"},
        {"activation": "softplus"},
        {"ignore_ids": (1, 2)},
        {"vocab_size": 48},
    )
    return Operator(scatter(**options), 2, kinds)


def a_toy(way: str, launches: int) -> Operator:
    """The toy, which stands for all operators on its base in what is the same for these."""
    return Operator(
        Sample("toy", toy, ((5, 16), (16,)), {"way": way}),
        launches,
        ({}, {"scale": 0.5}, {"scale": 1}),
    )


QUERIES, DOCUMENTS = (2, 17, 16), (3, 5, 16)
HOLES = (torch.arange(63).view(3, 21) % 3 != 0).tolist()
PACKS: dict[str, Any] = {
    "cu_seqlens_q": [0, 20, 34],
    "cu_seqlens_d": [0, 7, 7, 20],
}  # a document is empty
PAIRS = [[0, 1], [1, 1], [1, 0]]  # one document twice
OPERATORS: dict[str, Operator] = {
    "maxsim": Operator(
        late(QUERIES, DOCUMENTS),
        3,
        ({}, {"reduction": "mean"}, {"temperature": 1}, {"temperature": 2.0}),
    ),
    "maxsim masked, temperature": Operator(
        late(QUERIES, (3, 21, 16), document_mask=HOLES, temperature=0.5),
        3 + INTERPRETED,
        ({}, {"mask_mode": "zero"}),
    ),
    # a GPU's tile holds all queries
    "maxsim packed": Operator(
        late((34, 16), (20, 16), **PACKS),
        3 + INTERPRETED,
        ({"reduction": "mean"}, {}),
    ),
    "maxsim grouped, normalised": Operator(
        late(QUERIES, (2, 2, 5, 16), pairing="grouped"),
        6,
        ({"normalize": True}, {"normalize": False}),
    ),
    "maxsim normalised": Operator(
        late(QUERIES, DOCUMENTS),
        (4, 5),
        ({"normalize": True}, {"normalize": False, "reduction": "mean"}),
    ),
    "maxsim aligned": Operator(
        late(QUERIES, (2, 5, 16)),
        3,
        ({"pairing": "aligned"}, {"pairing": "all"}),
    ),
    "maxsim listed pairs": Operator(
        late(QUERIES, DOCUMENTS, pairing=PAIRS),
        3,
        ({}, {"mask_mode": "zero"}),
    ),
    "lsr_head": a_head(5),
    "lsr_head masked": a_head(6, "max", 2, 21, 16, attention_mask=MASK),
    "lsr_head packed": a_head((6, 7), "max", 32, 16, cu_seqlens=OFFSETS),
    "lsr_head sum": a_head(5, "sum"),
    "lsr_head mean, masked": a_head(
        (2, 5),
        "mean",
        2,
        21,
        16,
        attention_mask=MASK,
    ),  # few rows, or many
    "lsr_head cls, masked": a_head(4, "cls", 2, 21, 16, attention_mask=MASK),
    "lsr_head last": a_head(4, "last"),
    "lsr_head last, packed": a_head(4, "last", 32, 16, cu_seqlens=OFFSETS),
    "entmax_attention masked, dropout": an_attention(3, key_padding_mask=MASK, dropout_p=0.3),
    "entmax_attention packed": an_attention(6, cu_seqlens_q=OFFSETS, cu_seqlens_k=OFFSETS),
    "token_scatter masked": a_scatter(attention_mask=MASK),
    "token_scatter packed": a_scatter(cu_seqlens=OFFSETS),
    "entmax rows": Operator(rows(), 2, ({}, {"dim": 0}, {"alpha": 2.0})),
    "entmax rows, learned alpha": Operator(rows((2, 1)), 2),
    "the toy": a_toy("one launch", 2),
    "the toy, two launches": a_toy("two launches", 3),
    "the toy, torch between": a_toy("torch between", 3),
}
ON_GPUS_ONLY: dict[str, Operator] = {  # interpreting takes a minute each
    "entmax_attention": an_attention(3),
    "entmax_attention causal, live blocks listed": an_attention(6, keys=1100, causal=True),
    "entmax_attention, learned alpha": an_attention(3, learned=True),
}
OPERATORS |= {} if INTERPRETED else ON_GPUS_ONLY
every_operator = pytest.mark.parametrize("operator", OPERATORS.values(), ids=OPERATORS)
# What autograd and the cache do is the same for all entries of an operator: the interpreter, which
# is slow, runs one.
SAMPLE = (
    "maxsim aligned",
    "lsr_head",
    "lsr_head last, packed",
    "entmax_attention packed",
    "the toy, two launches",
)
sample = {name: OPERATORS[name] for name in (SAMPLE if INTERPRETED else OPERATORS)}
an_operator = pytest.mark.parametrize("operator", sample.values(), ids=sample)


def equal(found: list[Tensor], expected: list[Tensor]) -> bool:
    pairs = list(zip(found, expected, strict=True))
    return all(
        a.dtype == b.dtype and torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in pairs
    )


def warmed(operator: Operator) -> tuple[list[Tensor], list[Tensor]]:
    """Leaves of a call that was made often enough to repeat launches, and its results."""
    leaves = operator.leaves()
    for _ in range(3):
        results = operator.step(leaves)
    return leaves, results


@kernels
@every_operator
def test_repeated_launches_give_the_bits_of_the_first(
    operator: Operator,
    unbound: list[str],
) -> None:
    for wanted in (slice(None), slice(0, 1), slice(1, 2))[
        : 3 if len(operator.sample.shapes) > 1 else 1
    ]:
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
            assert bool(unbound) == (round_ < 2 or INTERPRETED), unbound
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
        assert all(
            equal(operator.step(operator.leaves(seed)), results)
            for seed, results in enumerate(expected)
        )


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
@pytest.mark.parametrize("strides", ["expanded", "transposed", "unaligned"])
def test_gradients_of_any_strides_are_those_of_contiguous_ones(
    operator: Operator,
    strides: str,
) -> None:
    leaves, _ = warmed(operator)
    for _ in range(3):
        scores = operator(leaves)
        if strides == "expanded":
            given = torch.ones((), dtype=scores.dtype, device=scores.device).expand(scores.shape)
        elif strides == "transposed":
            given = dout(scores).transpose(0, -1).contiguous().transpose(0, -1)
        else:
            given = unaligned(dout(scores))
        found = torch.autograd.grad(scores, leaves, given, retain_graph=True)
        expected = torch.autograd.grad(
            scores,
            leaves,
            given.clone(memory_format=torch.contiguous_format),
        )
        torch.testing.assert_close(
            found,
            expected,
        )  # other compilations may add up in another order


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
        assert equal(
            list(torch.autograd.grad(scores, leaves, dout(scores), retain_graph=keep)),
            results[1:],
        )
    refused(RuntimeError, "second time", torch.autograd.grad, scores, leaves, dout(scores))


@kernels
@an_operator
def test_derivatives_that_do_not_exist_are_refused_after_any_number_of_calls(
    operator: Operator,
) -> None:
    leaves, results = warmed(operator)
    grads = torch.autograd.grad(scores := operator(leaves), leaves, dout(scores), create_graph=True)
    assert equal([grad.detach() for grad in grads], results[1:])
    refused(RuntimeError, "can be differentiated once", grads[0].sum().backward)
    rest = [leaf.detach() for leaf in leaves[1:]]
    with pytest.raises(RuntimeError, match=r"impl must be 'reference' under torch\.func\.grad"):
        torch.func.grad(lambda leaf: operator([leaf, *rest]).sum())(leaves[0].detach())
    with pytest.raises(RuntimeError, match="forward-mode"):
        torch.func.jvp(
            lambda leaf: operator([leaf, *rest]),
            (leaves[0].detach(),),
            (leaves[0].detach(),),
        )


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
        assert equal(
            list(grads),
            results[1:],
        )  # backward did not read it, as entmax reads its results


@kernels
@an_operator
def test_plans_are_bounded_and_keep_no_tensor_of_a_call(
    operator: Operator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    leaves, _ = warmed(operator)
    kept = [weakref.ref(leaf) for leaf in leaves]
    del leaves
    gc.collect()
    assert not any(ref() is not None for ref in kept)
    monkeypatch.setattr(shared_operator, "MAX_CALLS", 2)
    for options in operator.options * 2:
        operator.step(operator.leaves(), **options)
        assert len(operator.passes) <= 2


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
    assert INTERPRETED or len(heard) == len(unbound)
    unbound.clear()
    assert equal(operator.step(leaves), results) and bool(unbound) == INTERPRETED


@gpu
@every_operator
@pytest.mark.parametrize("planned", [True, False], ids=["planned before", "not planned before"])
def test_a_captured_graph_repeats_a_step_and_plans_hold_nothing_of_it(
    operator: Operator,
    planned: bool,
) -> None:
    if "dropout_p" in operator.sample.options:
        pytest.skip("a graph draws numbers of its own")
    leaves, results = warmed(operator)  # kernels are compiled before a capture, in any case
    if not planned:
        forget()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    given, gradient = operator.sample.given(), dout(results[0])
    with torch.cuda.graph(graph):
        for _ in range(2):
            scores = operator(leaves, given)
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
    with torch.autograd.set_multithreading_enabled(
        False,
    ):  # another thread may still free what a step left
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
def test_every_device_has_plans_of_its_own(
    operator: Operator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one device here")
    _, results = warmed(operator)
    for _ in range(4):
        for device in ("cuda:1", "cuda:0"):  # neither of them need be the current one
            monkeypatch.setattr(samples, "DEVICE", device)
            found = operator.step(operator.leaves())
            assert equal([value.to("cuda:0") for value in found], results)


@pytest.mark.skipif(INTERPRETED, reason="kernels run on the CPU")
@every_operator
def test_calls_that_run_no_kernel_leave_no_plan(operator: Operator) -> None:
    options = operator.sample.given("cpu") | operator.options[0]
    for _ in range(2):
        operator.sample.function(*operator.sample.leaves("cpu"), **options).sum().backward()
    assert not operator.passes


@pytest.mark.skipif(INTERPRETED, reason="nothing is compiled")
def test_what_is_known_of_a_kernel_does_not_grow_with_the_lengths_it_is_called_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from tests.ops.launching import check_offsets_kernel, count_kernel

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    place = list(count_kernel.arg_names).index("V")

    def kinds(*values: int) -> set[Any]:
        return {
            launch.Build(count_kernel, (1, 1, 1), (None,) * place + (value,), {}).key
            for value in values
        }

    # Triton builds another kernel for 1, for multiples of 16 and for 64 bits, and for no other
    # value
    assert len(kinds(*range(2, 2000))) == 2
    assert (
        not kinds(1) & kinds(3, 16) and not kinds(3) & kinds(16) and not kinds(3) & kinds(2**31 + 3)
    )
    assert kinds(0, 16) == kinds(1600) and kinds(2**31) == kinds(2**33)
    assert (
        len(
            {
                launch.Build(check_offsets_kernel, (1, 1, 1), (None, None, n, n), {}).key
                for n in range(2000)
            },
        )
        == 1
    )
