"""What a repeated call skips, and what it must look at each time; see also
``tests/ops/shared/test_launches.py``.
"""

from __future__ import annotations

import warnings
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernels need triton")

from tests.kernels import triton_interpreted
from tests.ops.base import (
    FallbackWarning,
    KernelUnavailableError,
    Launch,
    MaxSimOptions,
    MaxSimTensors,
    Setting,
)
from tests.ops.conftest import Target
from tests.ops.launching import combine_kernel, owner_kernel
from tests.ops.launching import launch as shared_launch
from tests.ops.maxsim.matching import maxsim_results
from tests.ops.samples import assert_same_bits
from tests.refusals import refused
from tilefold.ops import maxsim
from tilefold.ops.maxsim import plans
from tilefold.ops.maxsim.api import MAXSIM
from tilefold.testing import assert_within_budget, nan_poisoned_empty
from tilefold.testing.maxsim import MaxSimInputs, maxsim_inputs

pytestmark = pytest.mark.usefixtures("no_failed_kernel", "empty_call_caches")
DTYPE = torch.float16
DEVICE = "cpu" if triton_interpreted() else "cuda"
kernels = pytest.mark.skipif(False, reason="") if triton_interpreted() else pytest.mark.gpu


def random_inputs(*shape: int, **layout: Any) -> MaxSimInputs:
    return maxsim_inputs(*shape, dtype=DTYPE, device=DEVICE, **layout)


ONE_LAUNCH: dict[str, tuple[tuple[int, ...], dict[str, Any], dict[str, Any]]] = {
    "packed queries in one tile": ((4, 3, 5, 9, 64), {"layout": "packed"}, {}),
    "mean": ((3, 4, 5, 9, 64), {}, {"reduction": "mean"}),
    "mean of pairs": ((3, 3, 5, 9, 64), {"pairing": "aligned"}, {"reduction": "mean"}),
}


@kernels
@pytest.mark.parametrize("case", ONE_LAUNCH)
def test_inference_is_one_launch(case: str, rebound_kernels: list[str]) -> None:
    shape, layout, options = ONE_LAUNCH[case]
    inputs = random_inputs(*shape, **layout)
    if inputs.cu_seqlens_q is not None:
        inputs.cu_seqlens_q[1] = 0  # queries without a token at either end
        inputs.cu_seqlens_q[3:] = inputs.cu_seqlens_q[-1].clone()
    with nan_poisoned_empty():
        actual = maxsim(inputs.queries, inputs.documents, **inputs.layout, **options, impl="triton")
    assert len(rebound_kernels) == 1
    wide = inputs.cast(torch.float64)
    assert_within_budget(
        actual,
        maxsim(wide.queries, wide.documents, **wide.layout, **options, impl="reference"),
    )


@pytest.mark.parametrize(
    "offsets",
    [[0, 3, 3, 7, 20], [0, 20], [0, 0, 0, 20], [0, 9, 4, 13, 20], [0, 400]],
    ids=str,
)
def test_rows_find_their_query_as_a_search_does(offsets: list[int], target: Target) -> None:
    if target.impl != "triton":
        pytest.skip("a kernel's test")
    cu = torch.tensor(offsets, dtype=torch.int32, device=target.device)
    actual = torch.empty(offsets[-1], dtype=torch.int32, device=target.device)
    count = cu.numel() - 1
    numbers = (offsets[-1], count, count.bit_length())
    shared_launch.launch(
        owner_kernel,
        (-(-offsets[-1] // 256), 1, 1),
        (cu, actual, *numbers),
        {"BLOCK": 256},
    )
    assert torch.equal(actual, plans.row_queries(offsets[-1], cu))


@kernels
@pytest.mark.parametrize("pairing", ["all", "index"])
def test_offsets_and_pairs_in_either_width_give_the_same_bits(pairing: str) -> None:
    inputs = random_inputs(3, 4, 5, 9, 16, pairing=pairing, layout="packed")
    wide = {name: getattr(inputs, name).long() for name in ("cu_seqlens_q", "cu_seqlens_d")}
    narrow = {name: offsets.int() for name, offsets in wide.items()}
    pairs = inputs.pairing if isinstance(inputs.pairing, Tensor) else None
    leaves = [inputs.queries.requires_grad_(), inputs.documents.requires_grad_()]

    def step(layout: dict[str, Any], kind: torch.dtype) -> list[Tensor]:
        scores = maxsim(
            *leaves,
            **layout,
            pairing="all" if pairs is None else pairs.to(kind),
            impl="triton",
        )
        return [scores.detach(), *torch.autograd.grad(scores, leaves, inputs.dscores)]

    expected = step(narrow, torch.int32)
    for _ in range(3):
        assert all(
            torch.equal(a, b) for a, b in zip(step(wide, torch.int64), expected, strict=True)
        )


@kernels
def test_the_longest_of_packed_queries_is_looked_at_in_every_call() -> None:
    inputs = random_inputs(2, 3, 9, 7, 16, pairing="index", layout="packed")
    rows = inputs.queries.size(0)
    leaves = [inputs.queries.requires_grad_(), inputs.documents.requires_grad_()]
    for middle in (1, rows - 1, rows // 2, 1):
        offsets = torch.tensor([0, middle, rows], dtype=torch.int32, device=DEVICE)
        layout = inputs.layout | {"cu_seqlens_q": offsets}
        actual, expected = (
            torch.autograd.grad(maxsim(*leaves, **layout, impl=impl), leaves, inputs.dscores)
            for impl in ("triton", "tiled")
        )
        for a, b in zip(actual, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2)


@kernels
def test_autocast_casts_in_every_call() -> None:
    inputs = random_inputs(3, 4, 5, 9, 16, layout="holes")
    expected = maxsim_results(inputs, impl="triton")
    leaves = [side.float().requires_grad_() for side in (inputs.queries, inputs.documents)]
    for _ in range(3):
        with torch.autocast(DEVICE, dtype=DTYPE):
            scores = maxsim(*leaves, **inputs.layout, impl="triton")
        grads = torch.autograd.grad(scores, leaves, inputs.dscores)
        assert torch.equal(scores, expected["scores"]) and all(
            grad.dtype == torch.float32 for grad in grads
        )
        assert torch.equal(grads[0].to(DTYPE), expected["dqueries"])
    refused(
        TypeError,
        "documents must have the dtype of queries",
        maxsim,
        leaves[0],
        inputs.documents,
        impl="triton",
    )


def fail(monkeypatch: pytest.MonkeyPatch, when: Any) -> list[str]:
    """Let some launches fail as if their kernels could not be built.

    Args:
        monkeypatch: Replaces the launch until the end of the test.
        when: Whether a launch with these arguments fails.

    Returns:
        Names of the kernels whose launch was tried, in order.
    """
    tried: list[str] = []
    run_with_triton = shared_launch.KernelLauncher.run_with_triton

    def launch(self: shared_launch.KernelLauncher, build: shared_launch.Build) -> Any:
        tried.append(build.kernel.__name__)
        if when(build.arguments):
            raise KernelUnavailableError(
                build.kernel.__name__,
                "PTXASError: no such instruction",
                build.fallback,
            )
        return run_with_triton(self, build)

    monkeypatch.setattr(shared_launch.KernelLauncher, "run_with_triton", launch)
    return tried


@kernels
def test_kernels_without_tma_follow_where_those_with_it_cannot_be_built(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inputs = random_inputs(3, 4, 40, 32, 64)
    expected = maxsim_results(inputs, impl="triton")
    MAXSIM.calls.clear()
    tried = fail(
        monkeypatch,
        lambda arguments: any(hasattr(argument, "block_shape") for argument in arguments),
    )
    with pytest.warns(FallbackWarning, match="maxsim's kernels with TMA cannot run"):
        results = maxsim_results(inputs, impl="triton")
    for name, value in results.items():
        torch.testing.assert_close(value, expected[name])
    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        for _ in range(2):
            tried.clear()
            assert_same_bits(maxsim_results(inputs, impl="triton"), results)
            assert tried.count("all_pairs_kernel") <= 1, "the plan that failed was kept"


@kernels
@pytest.mark.usefixtures("host_reads_no_values")
@pytest.mark.parametrize(
    "offsets",
    [[0, 9, -1, 20], [0, 9, 3, 20], [0, 15, 9, 20], [0, 5, 30, 20], [0, 12, 2, 20]],
    ids=str,
)
def test_falling_offsets_of_queries_give_nan_and_no_unwritten_number(
    monkeypatch: pytest.MonkeyPatch,
    offsets: list[int],
) -> None:
    honest = torch.empty_strided
    monkeypatch.setattr(
        torch,
        "empty_strided",
        lambda *args, **options: honest(*args, **options).fill_(77),
    )
    inputs = random_inputs(3, 2, 4, 6, 16)
    queries = torch.randn(20, 16, generator=torch.Generator().manual_seed(0)).to(DEVICE, DTYPE)
    scores = maxsim(
        queries,
        inputs.documents,
        cu_seqlens_q=torch.tensor(offsets, device=DEVICE),
        impl="triton",
    )
    for query, (start, end) in enumerate(pairwise(offsets)):
        if scores[query].isnan().all():
            continue
        alone = maxsim(queries[None, start:end], inputs.documents, impl="reference")[0]
        assert torch.allclose(scores[query], alone.to(scores.dtype), rtol=1e-3), (
            query,
            scores[query],
            alone,
        )
    assert scores.isnan().any()


@kernels
@pytest.mark.usefixtures("host_reads_no_values")
@pytest.mark.parametrize(
    "offsets",
    [[0, 9, 3, 20], [2, 9, 12, 20], [0, 5, 30, 20], [0, 12, 15, 18]],
    ids=str,
)
@pytest.mark.parametrize("packed", [False, True], ids=["padded queries", "packed queries"])
def test_rows_that_broken_offsets_give_to_no_document_have_no_gradient(
    offsets: list[int],
    packed: bool,
) -> None:
    inputs = random_inputs(3, 2, 4, 10, 16)
    layout = {"cu_seqlens_d": torch.tensor(offsets, dtype=torch.int32, device=DEVICE)}
    queries, documents = inputs.queries, inputs.documents.flatten(0, 1)
    if packed:
        layout["cu_seqlens_q"] = torch.arange(0, 13, 4, dtype=torch.int32, device=DEVICE)
        queries = queries.flatten(0, 1)
    leaves = [queries.detach().requires_grad_(), documents.detach().requires_grad_()]
    full = [
        (a, b)
        for i, (a, b) in enumerate(pairwise(offsets))
        if 0 <= a <= b <= 20 and (i > 0 or a == 0)
    ]
    full = [(a, b) for a, b in full if (a, b) != (offsets[-2], offsets[-1]) or b == 20]
    held = torch.tensor([any(a <= row < b for a, b in full) for row in range(20)], device=DEVICE)
    for _ in range(3):
        with nan_poisoned_empty():
            scores = maxsim(*leaves, **layout, impl="triton")
            dqueries, ddocuments = torch.autograd.grad(scores, leaves, torch.ones_like(scores))
        assert (
            bool(scores.isnan().any())
            and bool(dqueries.isfinite().all())
            and bool(ddocuments.isfinite().all())
        )
        assert not ddocuments[~held].any() and bool(ddocuments[held].any())


def test_sums_of_many_documents_are_laid_out_along_the_first_axis_of_the_grid() -> None:
    """The second axis has fewer programs than there are documents."""
    queries = torch.empty(2, 150, 16, device="meta")
    documents = torch.empty(2**25, 1, 16, device="meta")
    tensors = MaxSimTensors(queries, documents, *[None] * 6)
    setting = Setting((9, 0), 132, tf32=False, aligned=True, failed_kernels=frozenset())
    *_, sums = plans.forward(
        tensors,
        MaxSimOptions("all", False, 0.0, False, False, 0),
        False,
        setting,
    ).steps
    assert isinstance(sums, Launch)
    assert sums.kernel is combine_kernel
    assert sums.grid == (2 * 2**25 // 256, 1, 1)
