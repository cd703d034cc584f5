"""Properties of MaxSim over odd sizes, masks and numbers that hypothesis thinks of.

What masked tokens hold reaches nothing, and sequences longer than a tile are scored like short
ones.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels import triton_interpreted
from tests.ops.conftest import Target
from tests.ops.matching import held_to_budgets
from tests.ops.maxsim.matching import maxsim_results, with_one_answer
from tilefold.ops import maxsim, xtr_scores
from tilefold.ops.maxsim import maxsim_contrastive_loss, quantize_tokens, tiles
from tilefold.testing.maxsim import PAIRINGS, MaxSimInputs, maxsim_inputs

pytest.importorskip("hypothesis")
from hypothesis import given, settings
from hypothesis import strategies as st

NO_INTERPRETER = pytest.mark.skipif(triton_interpreted(), reason="this part needs no interpreter")
EXAMPLES = settings(max_examples=3 if triton_interpreted() else 60)
MODES = st.sampled_from(["exclude", "zero"])
POISONS = st.sampled_from([math.nan, math.inf, -math.inf, 3e38])
SIDES = (("queries", "query_mask", "q"), ("documents", "document_mask", "d"))
SMALL = {
    "TILE_ELEMENTS": 60,
    "ROW_ELEMENTS": 112,
    "BLOCK_COLUMNS": 5,
    "GROUP_ELEMENTS": 40,
    "SLAB_ENTRIES": 50,
    "CPU_TILE": (3, 40),
    "DEVICE_TILE": (3, 40),
}


@contextmanager
def tiles_of(small: bool) -> Iterator[None]:
    """Tiles of the tiled path so small that every sequence is cut, or as they are."""
    with pytest.MonkeyPatch.context() as patch:
        for name, size in SMALL.items() if small else ():
            patch.setattr(tiles, name, size)
        yield


@st.composite
def problems(draw: st.DrawFn, masked: bool = False, whole_numbers: bool = False) -> MaxSimInputs:
    """Small problems of every pairing, padded or packed on either side, both of them ``masked`` or
    either.

    With whole numbers, equal similarities are exactly equal.
    """
    sizes = [
        draw(st.integers(1, 5)),
        draw(st.integers(1, 5)),
        draw(st.integers(1, 20)),
        draw(st.integers(1, 40)),
    ]
    dim, seed = draw(st.sampled_from([1, 7, 16, 24])), draw(st.integers(0, 2**20))
    generator = torch.Generator().manual_seed(seed)
    inputs = maxsim_inputs(*sizes, dim, pairing=draw(st.sampled_from(PAIRINGS)), seed=seed)
    if whole_numbers:
        inputs = dataclasses.replace(
            inputs,
            queries=inputs.queries.round(),
            documents=(2 * inputs.documents).round(),
        )
    ragged = {  # to be packed: right padding
        mask: torch.arange(rows.size(-2))
        < torch.randint(rows.size(-2) + 1, (*rows.shape[:-2], 1), generator=generator)
        for rows, mask in ((inputs.queries, "query_mask"), (inputs.documents, "document_mask"))
        if draw(st.booleans())
    }
    packed = "".join(letter for _, mask, letter in SIDES if mask in ragged)
    inputs = dataclasses.replace(inputs, **ragged).packed(packed)
    for name, mask, _ in SIDES:
        if masked or draw(st.booleans()):
            kept = draw(st.sampled_from([0.0, 0.2, 0.7, 1.0]))
            shape = getattr(inputs, name).shape[:-1]
            inputs = dataclasses.replace(
                inputs,
                **{mask: torch.rand(shape, generator=generator) < kept},
            )
    return inputs


def poisoned(inputs: MaxSimInputs, value: float) -> MaxSimInputs:
    rows = {
        name: getattr(inputs, name).masked_fill(~getattr(inputs, mask)[..., None], value)
        for name, mask, _ in SIDES
        if getattr(inputs, mask) is not None
    }
    return dataclasses.replace(inputs, **rows)


@settings(max_examples=3 if triton_interpreted() else 120)
@given(
    inputs=problems(),
    mode=MODES,
    temperature=st.sampled_from([None, 0.3]),
    normalize=st.booleans(),
    small=st.booleans(),
    poison=POISONS,
)
def test_every_problem_stays_within_budget_and_what_a_masked_token_holds_reaches_nothing(
    target: Target,
    inputs: MaxSimInputs,
    mode: str,
    temperature: float | None,
    normalize: bool,
    small: bool,
    poison: float,
) -> None:
    normalize = (
        normalize and inputs.queries.size(-1) > 1
    )  # unit vectors of one entry have no gradient but noise
    options: dict[str, Any] = {
        "mask_mode": mode,
        "temperature": temperature,
        "normalize": normalize,
    }
    inputs = with_one_answer(inputs, **options)
    exact = maxsim_results(inputs.cast(torch.float64), impl="reference", **options)
    dirty = poisoned(inputs, poison)
    specified = maxsim_results(dirty.cast(torch.float64), impl="reference", **options)
    assert all(torch.equal(specified[name], value) for name, value in exact.items())
    with tiles_of(small):
        for needs in ("qd", "q", "d", ""):
            results = maxsim_results(
                dirty.to(target.device),
                impl=target.impl,
                needs=needs,
                **options,
            )
            held_to_budgets(
                results,
                {name: exact[name].to(target.device) for name in results},
                "gradient",
            )


def both(function: Callable[..., Tensor], inputs: MaxSimInputs, **options: Any) -> list[Tensor]:
    leaves = [inputs.queries.clone().requires_grad_(), inputs.documents.clone().requires_grad_()]
    layout = {name: value for name, value in inputs.layout.items() if name != "pairing"}
    result = function(*leaves, **layout, **options)
    return [result.detach(), *torch.autograd.grad(result.sum(), leaves)]


@NO_INTERPRETER
@settings(max_examples=40)
@given(inputs=problems(masked=True), normalize=st.booleans(), small=st.booleans(), poison=POISONS)
def test_what_a_masked_token_holds_reaches_neither_xtr_scores_nor_losses(
    target: Target,
    inputs: MaxSimInputs,
    normalize: bool,
    small: bool,
    poison: float,
) -> None:
    if inputs.pairing != "all" or 0 in (inputs.queries.numel(), inputs.documents.numel()):
        return
    clean, dirty = inputs.to(target.device), poisoned(inputs, poison).to(target.device)
    options = {"normalize": normalize, "impl": target.impl}
    labels = torch.zeros(clean.dscores.size(0), dtype=torch.int64, device=target.device)
    with tiles_of(small):
        for function, more in (
            (xtr_scores, {"top_k": 4}),
            (maxsim_contrastive_loss, {"labels": labels}),
        ):
            for actual, expected in zip(
                both(function, dirty, **options, **more),
                both(function, clean, **options, **more),
                strict=True,
            ):
                assert torch.equal(actual, expected)
        layout = {name: value for name, value in clean.layout.items() if name != "pairing"}
        with torch.no_grad():
            scores = [
                maxsim(i.queries, quantize_tokens(i.documents), **layout, impl=target.impl)
                for i in (clean, dirty)
            ]
        assert torch.equal(*scores) and bool(scores[1].isfinite().all())


@NO_INTERPRETER
def test_a_smooth_maximum_of_documents_without_a_masked_token_stays_finite_beside_others() -> None:
    queries, documents = -torch.ones(1, 1, 8), torch.ones(2, 2, 8)
    mask = torch.tensor([[1, 1], [1, 0]])
    options: dict[str, Any] = {"mask_mode": "zero", "temperature": 0.05}
    both_scores = maxsim(queries.requires_grad_(), documents, document_mask=mask, **options)
    alone = maxsim(queries, documents[:1], **options)
    assert both_scores[0, 0].item() == alone.item() and bool(both_scores.isfinite().all())
    (gradient,) = torch.autograd.grad(both_scores.sum(), queries)
    assert bool(gradient.isfinite().all())


@NO_INTERPRETER
@pytest.mark.parametrize("pairing", ["all", "aligned", "grouped", "index"])
def test_queries_that_are_masked_altogether_score_zero_and_can_be_trained(pairing: str) -> None:
    queries, documents = torch.randn(1, 2, 8), torch.randn(1, 17, 8, requires_grad=True)
    scores = maxsim(
        queries,
        documents[None] if pairing == "grouped" else documents,
        query_mask=torch.zeros(1, 2),
        pairing=torch.tensor([[0, 0]]) if pairing == "index" else pairing,
    )
    scores.sum().backward()
    assert not scores.any() and not documents.grad.any()


@NO_INTERPRETER
def test_winners_beyond_the_32767th_token_are_remembered() -> None:
    queries, documents = torch.ones(1, 2, 4), torch.zeros(1, 65535, 4)
    documents[0, 50000] = 1
    documents.requires_grad_()
    maxsim(queries, documents).sum().backward()
    assert documents.grad[0].any(dim=1).nonzero().tolist() == [[50000]]


@NO_INTERPRETER
@pytest.mark.parametrize("temperature", [None, 0.5])
def test_a_nan_behind_the_first_tile_of_a_document_reaches_the_scores_and_the_queries(
    temperature: float | None,
) -> None:
    queries, documents = torch.randn(2, 3, 8, requires_grad=True), torch.randn(2, 50, 8)
    documents[1, 47, 3] = math.nan
    with tiles_of(True):
        scores = maxsim(queries, documents, temperature=temperature)
        (gradient,) = torch.autograd.grad(scores.sum(), queries)
    assert scores.isnan().tolist() == [[False, True]] * 2 and bool(
        gradient.isnan().any(dim=-1).all(),
    )


@EXAMPLES
@given(inputs=problems(whole_numbers=True), mode=MODES)
def test_ties_are_settled_as_in_the_reference(
    target: Target,
    inputs: MaxSimInputs,
    mode: str,
) -> None:
    inputs = inputs.to(target.device)
    results = maxsim_results(inputs, mask_mode=mode, impl=target.impl)
    for name, value in maxsim_results(inputs, mask_mode=mode, impl="reference").items():
        torch.testing.assert_close(results[name], value, rtol=1e-4, atol=1e-5)


@EXAMPLES
@given(inputs=problems(), data=st.data())
def test_pairs_do_not_see_each_other(
    target: Target,
    inputs: MaxSimInputs,
    data: st.DataObject,
) -> None:
    if inputs.pairing != "all":
        return
    inputs = inputs.to(target.device)
    straight = maxsim(inputs.queries, inputs.documents, **inputs.layout, impl=target.impl)
    every = torch.cartesian_prod(*(torch.arange(n) for n in straight.shape)).view(-1, 2)
    order = torch.tensor(data.draw(st.permutations(range(every.size(0)))))
    pairs = every[order].to(target.device)
    shuffled = maxsim(
        inputs.queries,
        inputs.documents,
        **inputs.layout | {"pairing": pairs},
        impl=target.impl,
    )
    torch.testing.assert_close(shuffled, straight[pairs[:, 0], pairs[:, 1]], rtol=1e-5, atol=1e-5)
