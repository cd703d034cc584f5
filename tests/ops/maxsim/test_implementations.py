"""Every implementation of MaxSim within its error budget of the reference: options, layouts,
shapes, dtypes.

The same tests serve the tiled path on the CPU, the kernels on a GPU, and, started by
shared/test_interpreted.py, the kernels interpreted on the CPU: fewer cases, and no bf16, whose
products the interpreter cannot compute.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import pytest
import torch

from tests.kernels import triton_interpreted
from tests.ops.conftest import Target
from tests.ops.maxsim.matching import assert_maxsim_matches, maxsim_results
from tests.ops.samples import assert_same_bits
from tilefold.ops import maxsim
from tilefold.testing import assert_within_budget, nan_poisoned_empty
from tilefold.testing.maxsim import PAIRINGS, maxsim_inputs
from tilefold.testing.padding import LAYOUTS

INTERPRETED = triton_interpreted()
DTYPES = (
    (torch.float32, torch.float16)
    if INTERPRETED
    else (torch.float32, torch.float16, torch.bfloat16)
)
SHAPE = (3, 2, 5, 21, 24) if INTERPRETED else (4, 5, 7, 37, 40)
OPTIONS: list[dict[str, Any]] = [
    {},
    {"mask_mode": "zero"},
    {"temperature": 0.5},
    {"normalize": True},
    {"reduction": "mean"},
    {"mask_mode": "zero", "temperature": 0.7, "normalize": True, "reduction": "mean"},
]
NAMES = ["plain", "zero", "smooth", "normalize", "mean", "everything"]
# (Nq, Nd, Lq, Ld, D): every pair of sizes occurs, not every combination
SHAPES = [
    (1, 1, 1, 1, 8),
    (2, 3, 1, 70, 9),
    (3, 1, 33, 5, 16),
    (1, 7, 20, 40, 8),
    (5, 2, 16, 33, 136),
]
if not INTERPRETED:
    SHAPES += [
        (17, 3, 32, 30, 24),
        (2, 40, 8, 300, 33),
        (5, 2, 130, 129, 64),
        (3, 2, 300, 257, 40),
        (1, 3, 24, 1100, 8),
    ]


def every_option() -> list[tuple[str, str, dict[str, Any]]]:
    cases = list(itertools.product(PAIRINGS, LAYOUTS, OPTIONS))
    # interpreted: every layout with every pairing, and every option with every pairing
    plain = [(pairing, layout, o) for pairing, layout, o in cases if not o and layout != "left"]
    mean = {"reduction": "mean"}  # which plans divide where nothing is masked
    others = [
        (pairing, layout if o == mean else "holes", o)
        for pairing, layout, o in cases
        if o and layout == "full"
    ]
    return plain + others if INTERPRETED else cases


@pytest.mark.parametrize(("pairing", "layout", "options"), every_option(), ids=str)
def test_scores_and_gradients_for_every_option(
    target: Target,
    pairing: str,
    layout: str,
    options: dict[str, Any],
) -> None:
    inputs = maxsim_inputs(*SHAPE, pairing=pairing, layout=layout, device=target.device)
    with nan_poisoned_empty():
        assert_maxsim_matches(inputs, impl=target.impl, **options)


@pytest.mark.parametrize("sides", ["q", "d", "qd"])
@pytest.mark.parametrize("pairing", PAIRINGS)
def test_packed_sides_with_and_without_masks(target: Target, pairing: str, sides: str) -> None:
    inputs = maxsim_inputs(*SHAPE, pairing=pairing, layout="right", device=target.device).packed(
        sides,
    )
    assert_maxsim_matches(inputs, impl=target.impl)
    generator = torch.Generator().manual_seed(3)
    shapes = {"query_mask": inputs.queries.shape[:-1], "document_mask": inputs.documents.shape[:-1]}
    masks = {
        name: (torch.rand(shape, generator=generator) < 0.5).to(target.device)
        for name, shape in shapes.items()
    }
    for mode in ("exclude", "zero") if sides == "qd" else ():
        assert_maxsim_matches(
            dataclasses.replace(inputs, **masks),
            impl=target.impl,
            mask_mode=mode,
        )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=NAMES)
@pytest.mark.parametrize(("pairing", "layout"), [("all", "holes"), ("grouped", "packed")])
def test_scores_and_gradients_for_every_dtype(
    target: Target,
    pairing: str,
    layout: str,
    options: dict[str, Any],
    dtype: torch.dtype,
) -> None:
    inputs = maxsim_inputs(
        *SHAPE,
        pairing=pairing,
        layout=layout,
        dtype=dtype,
        device=target.device,
    )
    results = assert_maxsim_matches(inputs, impl=target.impl, kind="gradient_bound", **options)
    assert results["scores"].dtype == torch.float32
    assert results["dqueries"].dtype == results["ddocuments"].dtype == dtype


@pytest.mark.skipif(INTERPRETED, reason="the kernels have no fp64")
@pytest.mark.parametrize("options", OPTIONS, ids=NAMES)
@pytest.mark.parametrize("pairing", PAIRINGS)
def test_fp64_is_computed_in_fp64(pairing: str, options: dict[str, Any]) -> None:
    assert_maxsim_matches(
        maxsim_inputs(*SHAPE, pairing=pairing, layout="holes", dtype=torch.float64),
        **options,
    )


@pytest.mark.parametrize("pairing", ["all", "grouped"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_odd_shapes(target: Target, shape: tuple[int, int, int, int, int], pairing: str) -> None:
    for layout in ("packed",) if INTERPRETED else ("full", "holes", "packed"):
        inputs = maxsim_inputs(*shape, pairing=pairing, layout=layout, device=target.device)
        assert_maxsim_matches(inputs, impl=target.impl)
        if not INTERPRETED:
            assert_maxsim_matches(inputs, impl=target.impl, temperature=1.5)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter runs one program after the other")
@pytest.mark.parametrize("options", [{}, {"temperature": 0.5}], ids=["max", "smooth"])
@pytest.mark.parametrize("pairing", PAIRINGS)
def test_results_repeat_to_the_bit(target: Target, pairing: str, options: dict[str, Any]) -> None:
    inputs = maxsim_inputs(*SHAPE, pairing=pairing, layout="holes", device=target.device)
    first, second = (maxsim_results(inputs, impl=target.impl, **options) for _ in range(2))
    assert_same_bits(second, first)


@pytest.mark.parametrize(
    "options",
    [{}, {"mask_mode": "zero"}, {"temperature": 0.5}],
    ids=["max", "zero", "smooth"],
)
@pytest.mark.parametrize(
    "pairing",
    ["all", "index"] if INTERPRETED else PAIRINGS,
)  # one for each forward kernel
def test_nan_is_seen_where_it_is_kept_and_nowhere_else(
    target: Target,
    pairing: str,
    options: dict[str, Any],
) -> None:
    inputs = maxsim_inputs(*SHAPE, pairing=pairing, layout="holes", device=target.device)
    poisoned = dataclasses.replace(
        inputs,
        queries=inputs.queries.clone(),
        documents=inputs.documents.clone(),
    )
    poisoned.queries[inputs.query_mask == 0] = math.nan
    poisoned.documents[inputs.document_mask == 0] = math.nan
    results = maxsim_results(poisoned, impl=target.impl, **options)
    assert_same_bits(results, maxsim_results(inputs, impl=target.impl, **options))
    if isinstance(inputs.pairing, torch.Tensor):
        inputs.pairing[0] = 0  # the first query and the first document keep all their tokens
    poisoned.documents.view(-1, *inputs.documents.shape[-2:])[0, 1, 3] = math.nan
    scores = maxsim_results(poisoned, impl=target.impl, needs="", **options)["scores"]
    expected = maxsim_results(poisoned, impl="reference", needs="", **options)["scores"]
    assert expected.isnan().any() and torch.equal(scores.isnan(), expected.isnan())


@pytest.mark.parametrize("temperature", [None, 0.5])
@pytest.mark.parametrize("side", ["queries", "documents"])
def test_a_loss_of_nan_scores_gives_nan_gradients_to_the_tokens_that_made_them(
    side: str,
    temperature: float | None,
    target: Target,
) -> None:
    inputs = maxsim_inputs(2, 3, 4, 5 if INTERPRETED else 20, 16, device=target.device)
    leaves = {"queries": inputs.queries.clone(), "documents": inputs.documents.clone()}
    leaves[side][1, 2, 3] = math.nan
    scores = maxsim(
        *(leaf.requires_grad_() for leaf in leaves.values()),
        temperature=temperature,
        impl=target.impl,
    )
    broken = scores.isnan().movedim(0 if side == "queries" else 1, 0)
    assert broken[1].all() and not broken[0].any()
    dqueries, ddocuments = torch.autograd.grad((scores**2).sum(), list(leaves.values()))
    assert dqueries[1, 2].isnan().all() and ddocuments[1].isnan().any()
    if side == "queries":
        assert dqueries[0].isfinite().all()
    else:
        assert ddocuments[0].isfinite().all() and ddocuments[2].isfinite().all()


def test_infinite_similarities_are_not_taken_for_masked_ones(target: Target) -> None:
    queries = torch.tensor([[[1.0] * 8]], device=target.device)
    documents = torch.full((2, 3, 8), -math.inf, device=target.device)
    documents[1, 2] = 2.0
    mask = torch.tensor([[1, 1, 0], [0, 1, 1]], device=target.device)
    if INTERPRETED or target.impl != "triton":  # TF32 parts of an infinite product are NaN
        assert maxsim(queries, documents, document_mask=mask, impl=target.impl).tolist() == [
            [-math.inf, 16.0],
        ]


@pytest.mark.skipif(INTERPRETED, reason="too long to interpret")
def test_documents_of_very_different_lengths(target: Target) -> None:
    lengths = torch.tensor([0, 1, 700, 0, 2, 3, 5, 8, 300, 1, 299, 310, 0, 17])
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(int(lengths.sum()), 16, generator=generator).to(target.device)
    queries = torch.randn(3, 4, 16, generator=generator).to(target.device)
    actual = maxsim(queries, rows, cu_seqlens_d=offsets.to(target.device), impl=target.impl)
    exact = maxsim(
        queries.double(),
        rows.double(),
        cu_seqlens_d=offsets.to(target.device),
        impl="reference",
    )
    assert_within_budget(actual, exact)
    assert not actual[:, lengths.to(target.device) == 0].any()


def test_empty_sides(target: Target) -> None:
    rows = torch.randn(6, 8, device=target.device)
    nothing = torch.zeros(3, dtype=torch.int32, device=target.device)
    tokens = torch.randn(2, 4, 8, device=target.device)
    assert maxsim(rows[:0], tokens, cu_seqlens_q=nothing, impl=target.impl).tolist() == [
        [0, 0],
        [0, 0],
    ]
    assert maxsim(tokens, rows[:0], cu_seqlens_d=nothing, impl=target.impl).tolist() == [
        [0, 0],
        [0, 0],
    ]
    assert maxsim(
        tokens,
        tokens,
        pairing=nothing.view(-1, 1)[:0].expand(0, 2),
        impl=target.impl,
    ).shape == (0,)
    assert maxsim(tokens[:0], tokens, impl=target.impl).shape == (0, 2)


@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_what_is_saved_past_the_end_of_a_short_query_says_that_nothing_won(
    target: Target,
    temperature: float,
) -> None:
    inputs = maxsim_inputs(6, 4, 9, 8, 16, pairing="index", layout="packed", device=target.device)
    lengths = inputs.cu_seqlens_q.diff()[inputs.pairing[:, 0]]
    with nan_poisoned_empty():
        saved = torch.ops.tilefold.maxsim(
            inputs.queries,
            inputs.documents,
            None,
            None,
            inputs.cu_seqlens_q,
            inputs.cu_seqlens_d,
            inputs.pairing,
            None,
            "index",
            False,
            temperature,
            False,
            False,
            9,
            True,
            target.impl,
        )[1].double()
    past = torch.arange(9, device=saved.device) >= lengths[:, None]
    assert past.any() and bool((saved[past] == (math.inf if temperature else 65535)).all())
