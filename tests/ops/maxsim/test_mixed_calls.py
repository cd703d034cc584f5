"""Calls of every kind in turns in one process: what is remembered of one must never show in another."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tilefold.ops import maxsim
from tilefold.testing import assert_within_budget
from tilefold.testing.maxsim import MaxSimInputs, maxsim_inputs, maxsim_results, with_one_answer

CASES = 8  # problems of one seed, among which the calls go back and forth
CALLS = 160


@dataclasses.dataclass(frozen=True)
class Case:
    """A problem with its options, and what the specification says of it in fp64."""

    inputs: MaxSimInputs
    options: dict[str, Any]
    expected: dict[str, Tensor]


def masked(inputs: MaxSimInputs, chance: random.Random) -> MaxSimInputs:
    """The problem with masks that now and then take out a whole sequence, or all."""
    changes: dict[str, Any] = {}
    for name, tokens in (("query_mask", inputs.queries), ("document_mask", inputs.documents)):
        if chance.random() < 0.4:
            continue
        kept = torch.rand(tokens.shape[:-1], generator=torch.Generator().manual_seed(chance.randrange(2**30)))
        mask = (kept < chance.choice((0.0, 0.5, 0.9, 1.0))).to(tokens.device)
        changes[name] = mask.to(chance.choice((torch.bool, torch.int64, torch.float32)))
    return dataclasses.replace(inputs, **changes)


def random_cases(chance: random.Random, device: str) -> list[Case]:
    """Problems of one dtype, dimension and layout, so that few kernels are compiled; otherwise of every kind."""
    dtype = chance.choice((torch.bfloat16, torch.bfloat16, torch.float16, torch.float32))
    dim, packed = chance.choice((8, 16, 24, 64)), chance.choice(("", "", "q", "d", "qd"))
    # an error of a similarity is multiplied by 1 / temperature
    temperatures = {torch.bfloat16: (0.001, 0.05, 1), torch.float16: (0.05, 1), torch.float32: (1, 2.0)}[dtype]
    normalize = chance.random() < 0.3
    cases = []
    for _ in range(CASES):
        lengths = chance.choice((1, 5, 33, 70)), chance.choice((1, 2, 17, 40))
        inputs = maxsim_inputs(
            chance.choice((1, 1, 2, 3, 5)), chance.choice((1, 1, 2, 4, 7)), *lengths, dim, dtype=dtype, device=device,
            pairing=chance.choice(("all", "aligned", "grouped")), seed=chance.randrange(2**30),
        )  # fmt: skip
        inputs = masked(inputs.packed(packed), chance)
        options = {
            "reduction": chance.choice(("sum", "mean")),
            "mask_mode": chance.choice(("exclude", "zero")),
            "temperature": chance.choice((None, *temperatures)),
            "normalize": normalize,
        }
        inputs = with_one_answer(inputs, **options)
        truth = maxsim_results(inputs.cast(torch.float64), impl="reference", **options)
        cases.append(Case(inputs, options, truth))
    return cases


def call(
    case: Case, needs: str, context: contextlib.AbstractContextManager[Any], *, parameter: bool
) -> dict[str, Tensor]:
    """Scores of new tensors and the gradients that are asked for; a graph is made exactly where one can be."""
    leaves = {}
    for name, tokens in (("queries", case.inputs.queries), ("documents", case.inputs.documents)):
        leaf = tokens.detach().clone()
        leaves[name] = torch.nn.Parameter(leaf) if parameter else leaf
        leaves[name].requires_grad_(name[0] in needs)
    with context:
        asked = torch.is_grad_enabled() and bool(needs)
        scores = maxsim(leaves["queries"], leaves["documents"], **case.inputs.layout, **case.options)
    if scores.requires_grad is not asked:
        raise AssertionError(
            f"requires_grad {scores.requires_grad}, needs {needs!r}, {type(context).__name__}, grad mode "
            f"{torch.is_grad_enabled()}, leaves {[leaf.requires_grad for leaf in leaves.values()]}, "
            f"{case.options}, {case.inputs}"
        )
    results = {"scores": scores.detach()}
    if asked:
        wanted = [leaf for leaf in leaves.values() if leaf.requires_grad]
        grads = torch.autograd.grad(scores, wanted, case.inputs.dscores)
        results |= dict(zip([f"d{name}" for name, leaf in leaves.items() if leaf.requires_grad], grads, strict=True))
    return results


def in_a_thread(work: Callable[..., dict[str, Tensor]], context: Callable[[], Any]) -> dict[str, Tensor]:
    """What ``work`` returns in a thread that has done nothing before."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(lambda: work(context())).result()


def score_tolerance(case: Case) -> float:
    """How far two sums of the same products may lie apart in fp32, in any order."""
    longest, dim = case.inputs.queries.size(-2), case.inputs.queries.size(-1)
    norms = [1.0, 1.0]
    if not case.options["normalize"]:
        norms = [float(t.float().norm(dim=-1).max()) for t in (case.inputs.queries, case.inputs.documents)]
    # a row's products, their scales and a logarithm; then the tokens of a query
    return (dim + longest + 16) * 2.0**-23 * longest * math.prod(norms)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("seed", range(3))
def test_calls_with_and_without_gradients_in_any_order_give_what_each_asks_for(seed: int, device: str) -> None:
    run_in_any_order(seed, device)


def run_in_any_order(seed: int, device: str) -> None:
    chance = random.Random(seed)  # noqa: S311 (repeatable)
    cases = random_cases(chance, device)
    first: dict[tuple[int, str], Tensor] = {}
    for _ in range(CALLS):
        which = chance.randrange(CASES)
        needs = chance.choice(("", "q", "d", "qd"))
        context = chance.choice((contextlib.nullcontext, contextlib.nullcontext, torch.no_grad, torch.inference_mode))
        if cases[which].inputs.queries.dtype == torch.bfloat16 and chance.random() < 0.2:
            context = partial(torch.autocast, device, torch.bfloat16)  # which has nothing to cast
        work = partial(call, cases[which], needs, parameter=chance.random() < 0.3)
        results = in_a_thread(work, context) if chance.random() < 0.1 else work(context())
        for name, value in results.items():
            # the maximum of a call without a gradient may come from another kernel
            same = (which, f"{name} of {'a graph' if len(results) > 1 else 'scores alone'}")
            if same in first:
                assert torch.equal(value, first[same]), (name, cases[which])
                continue
            first[same] = value
            expected = cases[which].expected[name]
            if name == "scores":
                assert float((value - expected).abs().max()) <= score_tolerance(cases[which]), cases[which]
            else:
                assert_within_budget(value, expected, kind="gradient_bound", name=name)
