"""Normalised token vectors of any norm: only directions count, and zero rows are left out."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels import triton_interpreted
from tests.ops.conftest import Target
from tests.ops.maxsim.matching import maxsim_results
from tilefold.ops import maxsim
from tilefold.testing import assert_within_budget
from tilefold.testing.maxsim import MaxSimInputs, maxsim_inputs

# Factors of rows whose entries are numbers of the dtype with all their digits.
SIZES = {
    torch.float32: (1e-37, 1e-23, 1e19, 5e36),
    torch.bfloat16: (1e-37, 1e-23, 1e19, 5e36),
    torch.float16: (2.5e-4, 8192.0),
}
INTERPRETED = triton_interpreted()
INTERPRETED_DTYPES = (torch.float32, torch.float16)  # the interpreter multiplies bf16 as integers
DTYPES = [dtype for dtype in SIZES if not INTERPRETED or dtype in INTERPRETED_DTYPES]
SHAPES = {
    "all": ((2, 2, 3, 5, 24), "all"),
    "aligned": ((2, 2, 3, 5, 24), "aligned"),
    "rows of two blocks": ((2, 2, 1, 3, 136), "all"),
}
every_case = pytest.mark.parametrize("case", SHAPES)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
every_maximum = pytest.mark.parametrize("temperature", [None, 0.5])


def powers_of_two(dtype: torch.dtype) -> list[float]:
    """The sizes of a dtype as powers of two, by which rows are multiplied without a rounding."""
    exponents = [round(math.log2(size)) for size in SIZES[dtype]]
    return [2.0**exponent for exponent in exponents]


def smallest_document_size(dtype: torch.dtype, target: Target) -> float:
    """The least size of documents whose parts are numbers.

    Kernels on a GPU multiply fp32 entries as three TF32 numbers, and the least of them must be a
    number too.
    """
    if dtype == torch.float32 and target.impl == "triton" and target.device == "cuda":
        return 2.0**-110
    return 0.0


def resized(rows: Tensor, size: float) -> Tensor:
    """Rows of the same signs whose entries are 0.25 to 1 times ``size``.

    So no entry leaves the numbers that the dtype has at full precision.
    """
    magnitudes = 0.25 + 0.75 * rows.double().abs().clamp(max=1)
    entries = (rows.double().sign() * magnitudes).to(rows.dtype)
    return (entries.double() * size).to(rows.dtype)


def sized(inputs: MaxSimInputs, query_size: float, document_size: float) -> MaxSimInputs:
    """The problem with token vectors of these sizes, and the same directions for all sizes."""
    return dataclasses.replace(
        inputs,
        queries=resized(inputs.queries, query_size),
        documents=resized(inputs.documents, document_size),
    )


def problem(case: str, dtype: torch.dtype, target: Target) -> MaxSimInputs:
    """Random inputs of a case of :data:`SHAPES`."""
    sizes, pairing = SHAPES[case]
    return maxsim_inputs(*sizes, pairing=pairing, dtype=dtype, device=target.device)


@every_maximum
@every_case
@every_dtype
def test_scores_depend_on_the_directions_of_rows_only(
    dtype: torch.dtype,
    case: str,
    temperature: float | None,
    target: Target,
) -> None:
    inputs = problem(case, dtype, target)

    def scores(query_size: float, document_size: float) -> Tensor:
        return maxsim_results(
            sized(inputs, query_size, document_size),
            needs="",
            temperature=temperature,
            normalize=True,
            impl=target.impl,
        )["scores"]

    expected = scores(1, 1).double()
    sizes = powers_of_two(dtype)
    if INTERPRETED:  # which is slow
        sizes = sizes[::3]
    for size in sizes:
        document_size = max(size, smallest_document_size(dtype, target))
        assert_within_budget(scores(size, 1), expected, name=f"queries of {size}")
        assert_within_budget(scores(size, document_size), expected, name=f"all of {size}")
        if not INTERPRETED:
            assert_within_budget(
                scores(1, document_size),
                expected,
                name=f"documents of {document_size}",
            )


@every_maximum
@every_case
@every_dtype
@pytest.mark.parametrize("side", ["queries", "documents"])
def test_gradients_are_inverse_to_the_sizes_of_rows(
    dtype: torch.dtype,
    case: str,
    temperature: float | None,
    side: str,
    target: Target,
) -> None:
    inputs = problem(case, dtype, target)
    options: dict[str, Any] = {"temperature": temperature, "normalize": True}
    exact_inputs = sized(inputs, 1, 1).cast(torch.float64)
    truth = maxsim_results(exact_inputs, impl="reference", **options)
    # Beyond these sizes gradients are no numbers of the dtype.
    sizes = [size for size in powers_of_two(dtype) if 1e-30 < size < 1e30]
    if INTERPRETED:
        sizes = sizes[:1]
    for size in sizes:
        query_size = size if side == "queries" else 1.0
        document_size = size if side == "documents" else 1.0
        gradient_size = min(size, 1.0)
        results = maxsim_results(
            dataclasses.replace(
                sized(inputs, query_size, document_size),
                dscores=inputs.dscores * gradient_size,
            ),
            impl=target.impl,
            **options,
        )
        for name, row_size in (("dqueries", query_size), ("ddocuments", document_size)):
            largest = results[name].abs().amax()
            if float(largest) < 64 * torch.finfo(dtype).tiny:
                continue  # the gradient of the other side has too few digits left
            assert_within_budget(
                results[name].double() * row_size / gradient_size,
                truth[name],
                dtype,
                "gradient_bound",
                name=f"{name} at {size}",
            )


@pytest.mark.parametrize("pairing", ["all", "aligned"])
@pytest.mark.parametrize("temperature", [None, 0.1])
def test_gradients_of_documents_do_not_suffer_from_short_queries_in_half_precision(
    target: Target,
    temperature: float | None,
    pairing: str,
) -> None:
    inputs = maxsim_inputs(2, 2, 4, 5, 16, pairing=pairing, device=target.device)
    short_queries = inputs.queries * 1e-4 * 2**-5
    inputs = dataclasses.replace(inputs, queries=short_queries).cast(torch.float16)
    options: dict[str, Any] = {"temperature": temperature, "normalize": True, "needs": "d"}
    truth = maxsim_results(inputs.cast(torch.float64), impl="reference", **options)
    results = maxsim_results(inputs, impl=target.impl, **options)
    assert_within_budget(results["ddocuments"], truth["ddocuments"], kind="gradient_bound")


@pytest.mark.parametrize("impl", ["reference", "tiled"])
def test_zero_rows_stay_zero_and_nan_gives_nan(impl: str) -> None:
    queries = torch.randn(2, 3, 8)
    documents = torch.randn(2, 4, 8, requires_grad=True)
    queries[0] = 0
    queries[1, 0, 3] = math.nan
    queries.requires_grad_()
    scores = maxsim(queries, documents, normalize=True, impl=impl)
    assert torch.equal(scores[0], torch.zeros(2))
    assert scores[1].isnan().all()
    scores[0].sum().backward()
    assert queries.grad is not None
    assert torch.equal(queries.grad[0], torch.zeros(3, 8))
