"""MaxSim against documents in int8 and fp8, rounded and scored within budget, and the best
documents of a query.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.kernels import triton_interpreted
from tests.ops.base import has_int8_products, int8_products
from tests.ops.conftest import Target
from tests.refusals import refused
from tilefold.ops import maxsim
from tilefold.ops.maxsim import QuantizedTokens, maxsim_topk, quantize_tokens, tiles
from tilefold.testing import assert_within_budget
from tilefold.testing.maxsim import PAIRINGS, maxsim_inputs

INTERPRETED = triton_interpreted()
KINDS = ("int8",) if INTERPRETED else ("int8", "fp8")


def test_int8_is_off_by_at_most_half_a_step_and_fp8_by_a_sixteenth() -> None:
    tokens = torch.randn(5, 7, 33, generator=torch.Generator().manual_seed(0))
    found = quantize_tokens(tokens)
    assert found.values.dtype == torch.int8 and found.scales.shape == (5, 7)
    step = tokens.abs().amax(dim=-1, keepdim=True) / 127
    assert bool(((found.dequantize() - tokens).abs() <= 0.5001 * step).all())
    assert found.values.abs().amax(dim=-1).eq(127).all()
    assert found.nbytes == tokens.numel() + 4 * 35
    eighth = quantize_tokens(tokens, "fp8")
    tiny = tokens.abs().amax(dim=-1, keepdim=True) * 2**-18  # fp8 has no finer steps than this
    assert bool(((eighth.dequantize() - tokens).abs() <= tokens.abs() / 16 + tiny).all())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ["holes", "packed"])
@pytest.mark.parametrize("pairing", PAIRINGS)
def test_scores_are_those_of_the_numbers_that_are_stored(
    target: Target,
    pairing: str,
    layout: str,
    kind: str,
) -> None:
    if target.device == "cuda" and kind == "fp8" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no fp8 on this GPU")
    inputs = maxsim_inputs(
        3,
        2,
        5,
        21,
        40,
        pairing=pairing,
        layout=layout,
        dtype=torch.float16,
        device=target.device,
    )
    documents = quantize_tokens(inputs.documents, kind)
    for options in ({}, {"mask_mode": "zero"}, {"temperature": 0.5, "reduction": "mean"}):
        found = maxsim(inputs.queries, documents, **inputs.layout, impl=target.impl, **options)
        assert_within_budget(
            found,
            maxsim(inputs.queries, documents, **inputs.layout, impl="reference", **options),
        )


@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
@pytest.mark.parametrize(
    ("queries", "tokens", "length", "dim"),
    [(1, 32, 9, 128), (4, 20, 3, 96), (9, 17, 8, 128), (3, 70, 17, 64), (12, 9, 5, 64)],
)
def test_many_documents_in_one_pass(
    target: Target,
    queries: int,
    tokens: int,
    length: int,
    dim: int,
    masked: bool,
) -> None:
    count = (
        66 if INTERPRETED else 203 if target.device == "cpu" else 65536 + 5
    )  # so many are for warps with roles
    shape, layout = (queries, count, tokens, length, dim), "holes" if masked else "full"
    inputs = maxsim_inputs(*shape, layout=layout, dtype=torch.float16, device=target.device)
    inputs.documents[:50] = -inputs.documents[:50].abs()  # products below 0 take other steps
    inputs.queries[0] = inputs.queries[0].abs()
    documents = quantize_tokens(inputs.documents.float())
    documents.scales[40:45] *= 2.0**-100
    documents.scales[45:47] *= 2.0**115
    documents.scales[60, 1], documents.scales[61, 2] = math.nan, math.inf
    documents.values[61, 2] = 0  # as what has an infinity is rounded
    asked_for: list[dict[str, str]] = [{}, {"mask_mode": "zero"}, {"reduction": "mean"}]
    for options in asked_for[(queries + masked) % 3 :][:1] if INTERPRETED else asked_for:
        asked = inputs.layout | options
        found = maxsim(inputs.queries, documents, **asked, impl=target.impl)
        truth = maxsim(inputs.queries, documents, **asked, impl="reference")
        assert torch.equal(found.isnan(), truth.isnan()) and (
            masked or found[:, 60:62].isnan().all()
        )
        assert_within_budget(found.nan_to_num(), truth.nan_to_num())
        again = maxsim(inputs.queries, documents, **asked, impl=target.impl)
        assert torch.equal(found.view(torch.int32), again.view(torch.int32))


def test_many_queries_and_long_documents(target: Target) -> None:
    shape = (5, 3, 20, 33, 40) if INTERPRETED else (20, 9, 32, 300, 128)
    inputs = maxsim_inputs(*shape, dtype=torch.float16, device=target.device)
    documents = quantize_tokens(inputs.documents)
    found = maxsim(inputs.queries, documents, impl=target.impl)
    assert_within_budget(found, maxsim(inputs.queries, documents, impl="reference"))
    exact = maxsim(inputs.queries.double(), inputs.documents.double(), impl="reference")
    assert float((found - exact).norm() / exact.norm()) < 0.02


def test_nan_and_zero_tokens_come_through(target: Target) -> None:
    inputs = maxsim_inputs(2, 3, 4, 9, 40, dtype=torch.float16, device=target.device)
    inputs.documents[1] = 0
    inputs.documents[2, 3, 5] = math.nan
    scores = maxsim(inputs.queries, quantize_tokens(inputs.documents), impl=target.impl)
    assert scores[:, 0].isfinite().all() and not scores[:, 1].any() and scores[:, 2].isnan().all()


@pytest.mark.parametrize(
    ("rows", "dtype"),
    [(7, torch.float16), (7, torch.float32), (33, torch.float32)],
    ids=str,
)
def test_queries_are_rounded_to_the_bits_of_quantize_tokens(
    target: Target,
    rows: int,
    dtype: torch.dtype,
) -> None:
    columns, generator = 4 if INTERPRETED else 64, torch.Generator().manual_seed(rows)
    queries = torch.randn(rows, 64, generator=generator)
    steps = torch.randint(-127, 127, (rows, 63), generator=generator) + 0.5
    queries[:, :-1] = steps * queries[:, -1:]  # next to where the rounding changes
    queries[:, -1] *= 127
    queries = queries.to(dtype)
    queries[1] *= 2.0**-14 if dtype == torch.float16 else 2.0**-140
    queries[2] = 0
    queries[3, 5], queries[4, 5] = math.nan, math.inf
    rounded = quantize_tokens(queries)
    documents = quantize_tokens(torch.eye(64)[:columns, None]).to(target.device)
    found = maxsim(queries.to(target.device)[:, None], documents, impl=target.impl).cpu()
    # a document is one entry of 127 with its scale, which are multiplied first
    expected = (
        rounded.values[:, :columns] * 127.0 * documents.scales.cpu()[:, 0] * rounded.scales[:, None]
    )
    ordinary = rounded.scales.isfinite()
    assert torch.equal(found[ordinary], expected[ordinary]) and found[~ordinary].isnan().all()
    assert ordinary.sum() == rows - 2


def test_what_quantized_documents_and_the_best_of_them_refuse() -> None:
    queries, documents = torch.randn(2, 3, 8), quantize_tokens(torch.randn(2, 4, 8))
    with pytest.raises(
        ValueError,
        match="documents must be a floating tensor where a gradient is asked for",
    ):
        maxsim(queries.clone().requires_grad_(), documents)
    refused(
        ValueError,
        "normalize must be False with quantized documents",
        maxsim,
        queries,
        documents,
        normalize=True,
    )
    refused(
        ValueError,
        "dtype must be one of 'int8', 'fp8', got 'int4'",
        quantize_tokens,
        queries,
        "int4",
    )
    with pytest.raises(TypeError, match="values must have dtype int8, float8_e4m3fn, got float32"):
        QuantizedTokens(queries, queries[..., 0])
    with pytest.raises(
        ValueError,
        match=r"scales must have shape \[2, 4\] on cpu, got \[2, 3\] on cpu",
    ):
        dataclasses.replace(documents, scales=documents.scales[:, :3])
    refused(ValueError, "k must be a positive integer, got 0", maxsim_topk, queries, documents, 0)
    refused(
        TypeError,
        r"documents must be a torch\.Tensor, got list",
        maxsim_topk,
        queries,
        [1.0],
        2,
    )


@pytest.mark.skipif(INTERPRETED, reason="this part needs no interpreter")
def test_the_best_documents_are_those_of_the_scores(
    target: Target,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inputs = maxsim_inputs(3, 11, 4, 7, 16, layout="holes", device=target.device)
    for given in (inputs, inputs.packed()):
        options = given.layout
        del options["pairing"]
        scores = maxsim(given.queries, given.documents, **options, impl=target.impl)
        for block in (65536, 4):
            monkeypatch.setattr(tiles, "TOPK_DOCUMENTS", block)
            monkeypatch.setattr(tiles, "TOPK_SCORES", 3 * block)
            best, which = maxsim_topk(
                given.queries,
                given.documents,
                5,
                **options,
                impl=target.impl,
            )
            torch.testing.assert_close(best, scores.sort(dim=1, descending=True).values[:, :5])
            torch.testing.assert_close(scores.gather(1, which), best)
    stored = quantize_tokens(inputs.documents)
    blocks = maxsim_topk(inputs.queries, stored, 3, impl=target.impl)
    monkeypatch.undo()
    for a, b in zip(maxsim_topk(inputs.queries, stored, 3, impl=target.impl), blocks, strict=True):
        torch.testing.assert_close(a, b)
    monkeypatch.setattr(tiles, "TOPK_GROUP", 2)
    many = torch.randint(-2, 3, (301, 1, 16), device=target.device).to(
        inputs.queries.dtype,
    )  # with ties
    best, which = maxsim_topk(inputs.queries, many, 4, impl=target.impl)
    scores = maxsim(inputs.queries, many, impl=target.impl)
    torch.testing.assert_close(best, scores.topk(4, dim=1).values)
    torch.testing.assert_close(scores.gather(1, which), best)
    assert all(len(set(row)) == 4 for row in which.tolist())
    assert maxsim_topk(inputs.queries[:0], many, 4, impl=target.impl)[0].shape == (0, 4)
    best, which = maxsim_topk(inputs.queries, inputs.documents, 50, impl=target.impl)
    assert best.shape == (3, 11) and which.sort(dim=1).values.tolist() == [list(range(11))] * 3


def _int8(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randint(-127, 128, shape, generator=generator, dtype=torch.int8)


STRIDES: list[Any] = [
    pytest.param(_int8, id="contiguous"),
    pytest.param(lambda rows, dim: _int8(1, dim).expand(rows, dim), id="one row repeated"),
    pytest.param(lambda rows, dim: _int8(rows, 1).expand(rows, dim), id="one number repeated"),
    pytest.param(lambda rows, dim: _int8(2 * rows, dim)[::2], id="every second row"),
    pytest.param(lambda rows, dim: _int8(rows, 2 * dim)[:, ::2], id="every second column"),
    pytest.param(lambda rows, dim: _int8(rows, dim + 3)[:, :dim], id="some columns"),
    pytest.param(lambda rows, dim: _int8(dim, rows).T, id="transposed"),
]


@pytest.mark.skipif(not has_int8_products(), reason="no fast products of int8 on this CPU")
@pytest.mark.parametrize("dim", [0, 1, 2, 3, 17, 128])
@pytest.mark.parametrize("matrix", STRIDES)
def test_integer_products_are_exact_for_any_strides(
    matrix: Callable[[int, int], torch.Tensor],
    dim: int,
) -> None:
    for n_rows, n_columns in ((1, 1), (1, 5), (5, 1), (3, 2), (17, 40), (0, 4), (4, 0)):
        rows = matrix(n_rows, dim)
        columns = matrix(n_columns, dim)
        product = int8_products(rows, columns)
        assert product.dtype == torch.int32
        assert torch.equal(product.long(), rows.long() @ columns.long().T), (n_rows, n_columns)


@pytest.mark.parametrize("dim", [1, 2, 8])
@pytest.mark.parametrize("repeated", ["documents", "tokens", "dimensions"])
def test_int8_documents_that_repeat_their_memory_score_like_copies(
    target: Target,
    repeated: str,
    dim: int,
) -> None:
    generator = torch.Generator().manual_seed(0)
    queries = torch.randn(2, 3, dim, generator=generator).to(target.device)
    stored_shape = {
        "documents": (1, 4, dim),
        "tokens": (5, 1, dim),
        "dimensions": (5, 4, 1),
    }[repeated]
    documents = QuantizedTokens(
        _int8(*stored_shape).to(target.device).expand(5, 4, dim),
        torch.rand(5, 4, generator=generator).to(target.device),
    )
    copies = QuantizedTokens(documents.values.contiguous(), documents.scales)
    assert_within_budget(
        maxsim(queries, documents, impl=target.impl),
        maxsim(queries, copies, impl="reference"),
    )
