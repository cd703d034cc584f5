"""Kernels of exact sparse search build for Ampere, Hopper and Blackwell without a GPU, and hardly
spill.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need triton")

from tests.kernels import triton_interpreted
from tests.ops.base import Launch, Plan, Setting
from tests.ops.cross_compile import check, compile_kernel
from tilefold.ops.sparse_search import plans
from tilefold.ops.sparse_search._problem import DenseSearchTensors, SearchOptions, SearchTensors

pytestmark = pytest.mark.skipif(
    triton_interpreted(),
    reason="kernels are interpreted in this run, not compiled",
)

TYPES = {
    **dict.fromkeys(
        [
            "terms_ptr",
            "term_order_ptr",
            "lengths_ptr",
            "score_ptr",
            "group_ptr",
            "high_ptr",
            "member_ptr",
            "listed_ptr",
            "values_ptr",
        ],
        "*i32",
    ),
    **dict.fromkeys(["queries_ptr", "weights_ptr", "postings_ptr", "largest_ptr"], "*fp32"),
    "offsets_ptr": "*i64",
    "local_documents_ptr": "*i16",
    "allowed_ptr": "*u8",
    "documents_ptr": "*i64",
}
VOCABULARY = 30_522


def plan_of_terms(n_documents: int, n_queries: int, k: int, setting: Setting) -> Plan:
    """Return the plan of a search with the terms of queries."""
    meta = {name: torch.empty(1, device="meta") for name in SearchTensors._fields}
    terms = torch.empty(n_queries, 44, device="meta")
    tensors = SearchTensors(**meta)._replace(terms=terms)
    return plans.forward(tensors, SearchOptions(k, n_documents, VOCABULARY), False, setting)


def plan_of_dense(n_documents: int, n_queries: int, k: int, setting: Setting) -> Plan:
    """Return the plan of a search with dense queries."""
    meta = {name: torch.empty(1, device="meta") for name in DenseSearchTensors._fields}
    queries = torch.empty(n_queries, VOCABULARY, device="meta")
    tensors = DenseSearchTensors(**meta)._replace(queries=queries)
    return plans.forward_of_dense(
        tensors,
        SearchOptions(k, n_documents, VOCABULARY),
        False,
        setting,
    )


@pytest.mark.parametrize(
    ("make_plan", "n_documents", "n_queries", "k"),
    [
        pytest.param(plan_of_terms, 8_800_000, 1, 100, id="one query"),
        pytest.param(plan_of_terms, 1_000_000, 512, 1000, id="a batch"),
        pytest.param(plan_of_dense, 1_000_000, 1, 100, id="one dense query"),
    ],
)
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_kernels_build(
    make_plan: Callable[[int, int, int, Setting], Plan],
    capability: int,
    n_documents: int,
    n_queries: int,
    k: int,
) -> None:
    setting = Setting(
        divmod(capability, 10), 132, tf32=False, aligned=True, failed_kernels=frozenset()
    )
    for step in make_plan(n_documents, n_queries, k, setting).steps:
        assert isinstance(step, Launch)
        types = dict.fromkeys(step.kernel.arg_names, "i32") | TYPES
        constants = dict(step.constants)
        warps = constants.pop("num_warps")
        stages = constants.pop("num_stages", 3)
        compiled = compile_kernel(step.kernel, types, constants, capability, warps, stages)
        # what lists the best documents puts away some, once per query
        check(compiled, capability, name=step.kernel.__name__, most=168, looped=1 / 60)
        # in PTX: unasked, 48 KB are there for all
        sums = 4 * constants["BLOCK"] if constants.get("SHARED", False) else 0
        assert compiled.shared + sums <= 48 * 1024, compiled
