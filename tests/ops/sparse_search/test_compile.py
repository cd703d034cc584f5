"""Kernels of exact sparse search build for Ampere, Hopper and Blackwell without a GPU, and hardly
spill.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need triton")

from tests.kernels import triton_interpreted
from tests.ops.base import Launch, Setting
from tests.ops.cross_compile import check, compile_kernel
from tilefold.ops.sparse_search import plans
from tilefold.ops.sparse_search._problem import SearchOptions, SearchTensors

pytestmark = pytest.mark.skipif(
    triton_interpreted(),
    reason="kernels are interpreted in this run, not compiled",
)

TYPES = dict.fromkeys(
    ["terms_ptr", "score_ptr", "group_ptr", "high_ptr", "member_ptr", "listed_ptr", "values_ptr"],
    "*i32",
) | dict.fromkeys(["weights_ptr", "postings_ptr", "largest_ptr"], "*fp32")
TYPES |= {
    "offsets_ptr": "*i64",
    "places_ptr": "*i16",
    "allowed_ptr": "*u8",
    "documents_ptr": "*i64",
}


@pytest.mark.parametrize(("n", "queries", "k"), [(8_800_000, 1, 100), (1_000_000, 512, 1000)])
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_kernels_build(capability: int, n: int, queries: int, k: int) -> None:
    meta = {name: torch.empty(1, device="meta") for name in SearchTensors._fields}
    tensors = SearchTensors(**meta)._replace(terms=torch.empty(queries, 44, device="meta"))
    setting = Setting(divmod(capability, 10), 132, tf32=False, aligned=True, given_up=frozenset())
    for step in plans.forward(tensors, SearchOptions(k, n, 30_522), False, setting).steps:
        assert isinstance(step, Launch)
        types, constants = dict.fromkeys(step.kernel.arg_names, "i32") | TYPES, dict(step.constants)
        warps, stages = constants.pop("num_warps"), constants.pop("num_stages")
        compiled = compile_kernel(step.kernel, types, constants, capability, warps, stages)
        # what lists the best documents puts away some, once per query
        check(compiled, capability, name=step.kernel.__name__, most=168, looped=1 / 60)
        sums = (
            4 * constants["BLOCK"] * constants.get("SHARED", False)
        )  # in PTX: unasked, 48 KB are there for all
        assert compiled.shared + sums <= 48 * 1024, compiled
