"""Normalised rows of any size: the direction of a row is what counts, and what does not exist is
left out.
"""

from __future__ import annotations

import dataclasses
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

SIZES = {
    torch.float32: (1e-37, 1e-23, 1e19, 5e36),
    torch.bfloat16: (1e-37, 1e-23, 1e19, 5e36),
    torch.float16: (2.5e-4, 8192.0),  # of the numbers with all digits
}
INTERPRETED_DTYPES = (torch.float32, torch.float16)  # the interpreter multiplies bf16 as integers
DTYPES = [dtype for dtype in SIZES if not triton_interpreted() or dtype in INTERPRETED_DTYPES]
SHAPES = {
    "all": ((2, 2, 3, 5, 24), {}),
    "aligned": ((2, 2, 3, 5, 24), {"pairing": "aligned"}),
    "rows of two blocks": ((2, 2, 1, 3, 136), {}),
}


def powers_of_two(dtype: torch.dtype) -> list[float]:
    """Sizes that rows can be multiplied by without a rounding."""
    return [
        2.0 ** round(torch.tensor(size, dtype=torch.float64).log2().item()) for size in SIZES[dtype]
    ]


def smallest_documents(dtype: torch.dtype, target: Target) -> float:
    """Entries of fp32 documents are multiplied as three TF32 numbers on a GPU; the least of them
    must be a number.
    """
    return (
        2.0**-110
        if dtype == torch.float32 and target.impl == "triton" and target.device == "cuda"
        else 0.0
    )


def sized(inputs: MaxSimInputs, query_size: float, document_size: float) -> MaxSimInputs:
    """The same directions; largest entries about as given."""

    def times(rows: Tensor, size: float) -> Tensor:
        # entries of 0.25 to 1: none leaves the numbers that the dtype has at full precision
        entries = rows.double().sign() * (0.25 + 0.75 * rows.double().abs().clamp(max=1))
        return (entries.to(rows.dtype).double() * size).to(rows.dtype)

    queries, documents = times(inputs.queries, query_size), times(inputs.documents, document_size)
    return dataclasses.replace(inputs, queries=queries, documents=documents)


@pytest.mark.parametrize("temperature", [None, 0.5])
@pytest.mark.parametrize("case", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_of_any_size_counts_by_its_direction_and_its_gradient_is_inverse_to_its_size(
    dtype: torch.dtype,
    case: str,
    temperature: float | None,
    target: Target,
) -> None:
    shape, layout = SHAPES[case]
    options: dict[str, Any] = {"temperature": temperature, "normalize": True, "impl": target.impl}
    inputs = maxsim_inputs(*shape, dtype=dtype, device=target.device, **layout)
    expected = maxsim_results(sized(inputs, 1, 1), needs="", **options)["scores"]
    for size in powers_of_two(dtype)[:: 3 if triton_interpreted() else 1]:  # which is slow
        documents = max(size, smallest_documents(dtype, target))
        either = ((size, 1), (size, documents), (1, documents))
        for query_size, document_size in either[: 2 if triton_interpreted() else 3]:
            found = maxsim_results(sized(inputs, query_size, document_size), needs="", **options)[
                "scores"
            ]
            assert_within_budget(found, expected.double(), name=f"{query_size}, {document_size}")
    truth = maxsim_results(
        sized(inputs, 1, 1).cast(torch.float64),
        **options | {"impl": "reference"},
    )
    # or gradients are no numbers of the dtype
    moderate = [size for size in powers_of_two(dtype) if 1e-30 < size < 1e30]
    for size in moderate[: 1 if triton_interpreted() else None]:
        dscores = inputs.dscores * min(size, 1.0)
        for query_size, document_size in ((size, 1), (1, size)):
            mine = dataclasses.replace(sized(inputs, query_size, document_size), dscores=dscores)
            gradients = maxsim_results(mine, **options)
            for name, own in (("dqueries", query_size), ("ddocuments", document_size)):
                value = gradients[name].double() * own / min(size, 1.0)
                if bool((gradients[name].abs().amax() < 64 * torch.finfo(dtype).tiny).any()):
                    continue  # the other side's gradient, among the numbers of fewer digits
                assert_within_budget(
                    value,
                    truth[name],
                    dtype,
                    "gradient_bound",
                    name=f"{name} at {size}",
                )


def test_short_rows_in_half_precision_have_the_gradients_of_others(target: Target) -> None:
    for temperature in (None, 0.1):
        for pairing in ("all", "aligned"):
            inputs = maxsim_inputs(2, 2, 4, 5, 16, pairing=pairing, device=target.device)
            inputs = dataclasses.replace(inputs, queries=inputs.queries * 1e-4 * 2**-5).cast(
                torch.float16,
            )
            options: dict[str, Any] = {"temperature": temperature, "normalize": True, "needs": "d"}
            truth = maxsim_results(inputs.cast(torch.float64), impl="reference", **options)
            found = maxsim_results(inputs, impl=target.impl, **options)
            assert_within_budget(found["ddocuments"], truth["ddocuments"], kind="gradient_bound")


@pytest.mark.parametrize("impl", ["reference", "tiled"])
def test_zero_rows_stay_zero_and_broken_ones_give_nan(impl: str) -> None:
    queries, documents = torch.randn(2, 3, 8), torch.randn(2, 4, 8)
    queries[0], queries[1, 0, 3] = 0, float("nan")
    leaves = [queries.requires_grad_(), documents.requires_grad_()]
    scores = maxsim(*leaves, normalize=True, impl=impl)
    assert torch.equal(scores[0], torch.zeros(2)) and scores[1].isnan().all()
    scores[0].sum().backward()
    assert torch.equal(leaves[0].grad[0], torch.zeros(3, 8))
