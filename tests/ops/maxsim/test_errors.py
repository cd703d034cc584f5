"""What MaxSim says about arguments that do not fit: the name, what was expected, what came, what to
do.
"""

from __future__ import annotations

import itertools
import math
import re
from typing import Any

import pytest
import torch

from tests.kernels import triton_interpreted
from tests.ops.conftest import Target
from tests.refusals import refused
from tilefold.ops import maxsim
from tilefold.ops.maxsim import chosen_impl

QUERIES, DOCUMENTS, PACKED = torch.zeros(2, 3, 4), torch.zeros(2, 5, 4), torch.zeros(6, 4)
OFFSETS = torch.tensor([0, 2, 6], dtype=torch.int32)

VALUES = [
    ({"queries": PACKED}, "queries must have shape [N, L, D], got [6, 4]."),
    ({"documents": PACKED}, "documents must have shape [N, L, D], got [6, 4]."),
    ({"pairing": "grouped"}, "documents must have shape [B, N, L, D], got [2, 5, 4]."),
    (
        {"queries": QUERIES, "cu_seqlens_q": OFFSETS},
        "queries must have shape [T, D], got [2, 3, 4].",
    ),
    (
        {"documents": torch.zeros(2, 5, 8)},
        "documents must have the last dimension D of queries (4), got 8 in shape [2, 5, 8].",
    ),
    (
        {"queries": torch.zeros(2, 3, 0)},
        "queries must have D of at least 1, got D=0 in shape [2, 3, 0].",
    ),
    ({"query_mask": torch.ones(2, 4)}, "query_mask must have shape [2, 3], got [2, 4]."),
    ({"document_mask": torch.ones(2)}, "document_mask must have shape [2, 5], got [2]."),
    (
        {"documents": torch.zeros(3, 5, 4), "pairing": "aligned"},
        "documents must be as many as queries (2) for pairing='aligned', got 3.",
    ),
    (
        {"documents": torch.zeros(3, 2, 5, 4), "pairing": "grouped"},
        "documents must be 2 groups of equal size, one for each query, for "
        "pairing='grouped', got 6 documents in shape [3, 2, 5, 4].",
    ),
    (
        {"pairing": "both"},
        "pairing must be one of 'all', 'aligned', 'grouped', or an integer tensor [P, 2], got "
        "'both'.",
    ),
    ({"pairing": torch.zeros(3, dtype=torch.int64)}, "pairing must have shape [P, 2], got [3]."),
    (
        {"pairing": torch.zeros(3, 3, dtype=torch.int64)},
        "pairing must have shape [P, 2], got [3, 3].",
    ),
    ({"reduction": "max"}, "reduction must be one of 'sum', 'mean', got 'max'."),
    ({"mask_mode": "keep"}, "mask_mode must be one of 'exclude', 'zero', got 'keep'."),
    ({"temperature": 0.0}, "temperature must be a positive Python number or None, got 0.0."),
    ({"temperature": math.inf}, "temperature must be a positive Python number or None, got inf."),
    ({"impl": "cuda"}, "impl must be one of 'auto', 'reference', 'tiled', 'triton', got 'cuda'."),
    (
        {"pairing": torch.tensor([[0, 0], [1, 2]])},
        "pairing must hold indices below the number of documents (2), got 2 in pair 1; drop that "
        "pair or fix its index.",
    ),
    (
        {"pairing": torch.tensor([[-1, 0]])},
        "pairing must hold indices below the number of queries (2), got -1 in pair 0; drop that "
        "pair or fix its index.",
    ),
]


@pytest.mark.parametrize(("changed", "message"), VALUES)
def test_values_that_do_not_fit(changed: dict[str, Any], message: str) -> None:
    for impl in ({},) if "impl" in changed else ({"impl": "reference"}, {"impl": "tiled"}):
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            maxsim(**{"queries": QUERIES, "documents": DOCUMENTS} | changed | impl)


@pytest.mark.skipif(triton_interpreted(), reason="the kernels can run here")
def test_an_implementation_that_cannot_run_is_refused_and_never_replaced() -> None:
    assert chosen_impl(QUERIES) == "tiled"
    refused(
        RuntimeError,
        "impl='triton' cannot run here",
        maxsim,
        QUERIES,
        DOCUMENTS,
        impl="triton",
    )


@pytest.mark.gpu
def test_the_kernels_refuse_fp64_and_auto_does_not_take_them() -> None:
    queries = QUERIES.cuda().double()
    assert chosen_impl(queries) == "tiled"
    with pytest.raises(
        TypeError,
        match="queries must have dtype float16, bfloat16, float32 for impl='triton'",
    ):
        maxsim(queries, queries, impl="triton")


LONG = 2**32  # what is added to an offset or index so that its lower 32 bits stay as they are


@pytest.mark.parametrize("temperature", [None, 0.5])
@pytest.mark.parametrize("side", ["q", "d"])
@pytest.mark.parametrize(
    "bad",
    [[0, 3, LONG + 6], [0, 3 - LONG, 6], [LONG, 3, 6], [0, 4, 2, 6]],
    ids=str,
)
def test_offsets_that_fall_or_need_more_than_32_bits_score_nan_and_no_plausible_number(
    bad: list[int],
    side: str,
    temperature: float | None,
    kernels: Target,
    host_reads_no_values: None,
) -> None:
    good = torch.arange(0, 7, 6 // (len(bad) - 1), device=kernels.device)
    offsets = {
        f"cu_seqlens_{name}": good if name != side else good.new_tensor(bad) for name in "qd"
    }
    leaves = [torch.ones(6, 16, device=kernels.device, requires_grad=True) for _ in range(2)]
    for pairing in ("all", "aligned"):
        scores = maxsim(*leaves, **offsets, pairing=pairing, temperature=temperature, impl="triton")
        fits = [0 <= a <= b <= 6 for a, b in itertools.pairwise(bad)]
        ok = torch.tensor(fits, device=scores.device)
        ok = ok.expand(len(ok), len(ok)) if side == "d" else ok[:, None].expand(len(ok), len(ok))
        assert torch.equal(scores.isnan(), ~(ok if pairing == "all" else ok.diagonal()))
        scores.nan_to_num().sum().backward()  # reads nothing elsewhere


def test_pair_indices_out_of_range_score_nan_and_no_plausible_number(
    kernels: Target,
    host_reads_no_values: None,
) -> None:
    pairs = torch.tensor(
        [[0, 1], [LONG, 1], [0, LONG + 1], [-LONG, 0], [0, 7], [-1, 0], [1, 0]],
        device=kernels.device,
    )
    leaves = [torch.ones(2, 3, 16, device=kernels.device, requires_grad=True) for _ in range(2)]
    scores = maxsim(*leaves, pairing=pairs, impl="triton")
    assert scores.isnan().tolist() == [False, True, True, True, True, True, False]
    scores.nan_to_num().sum().backward()
    assert all(torch.equal(leaf.grad, torch.ones_like(leaf)) for leaf in leaves[:1])
