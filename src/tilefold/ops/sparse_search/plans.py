"""Launch plan of exact search over sparse vectors, and its configurations."""

from __future__ import annotations

import torch

from tilefold.ops._shared.plan import Plan, PlanBuilder, Setting, cdiv, power_of_two
from tilefold.ops._shared.tuning import Between, ConfigRow, lookup
from tilefold.ops.sparse_search._problem import (
    DenseSearchTensors,
    SearchOptions,
    SearchTensors,
)
from tilefold.ops.sparse_search._triton.search import (
    best_kernel,
    block_scores_kernel,
    pack_terms_kernel,
)
from tilefold.ops.sparse_search.postings import BLOCK

GROUP = 64  # documents of a group, and groups of a group of groups
CHUNK = 8192  # values that a program holds
PACKED_CHUNK = 8192  # weights of a dense query that a program holds
# Configurations of the first kernel. Facts: capability, programs (blocks of documents times
# queries).
SCORES = (
    ConfigRow(
        {}, {"TERMS": 4, "POSTINGS": 256, "num_warps": 4, "num_stages": 3, "SHARED": True}, "H200"
    ),
    ConfigRow(
        {"programs": Between(most=4096)},
        {"TERMS": 8, "POSTINGS": 512, "num_warps": 32},
        "H200, one query",
    ),
    ConfigRow({"capability": (0, 0)}, {"SHARED": False}, "shared memory is declared in PTX"),
)


def forward(
    tensors: SearchTensors,
    options: SearchOptions,
    training: bool,
    setting: Setting,
) -> Plan:
    """Record the plan of a search with the terms of the queries.

    Args:
        tensors: layouts of the queries and the postings.
        options: the checked options.
        training: ignored, since a search has no gradient.
        setting: the device.
    """
    n_queries, n_query_terms = tensors.terms.shape
    builder = PlanBuilder({"HAS_LENGTHS": False})
    builder.make_contiguous(tensors._asdict())
    _add_search(
        builder,
        options,
        setting,
        n_queries,
        row_length=n_query_terms,
        has_allowed=tensors.allowed is not None,
    )
    return builder.build()


def forward_of_dense(
    tensors: DenseSearchTensors,
    options: SearchOptions,
    training: bool,
    setting: Setting,
) -> Plan:
    """Record the plan of a search with dense queries.

    Their terms are packed first. The CPU does not know how many there are, so the rows of packed
    terms are as long as the vocabulary, and the kernels read the lengths on the device.

    Args:
        tensors: layouts of the queries and the postings.
        options: the checked options.
        training: ignored, since a search has no gradient.
        setting: the device.
    """
    n_queries, n_terms = tensors.queries.shape
    builder = PlanBuilder({"HAS_LENGTHS": True})
    builder.make_contiguous(tensors._asdict())
    builder.add_buffer("terms", (n_queries, n_terms), torch.int32)
    builder.add_buffer("weights", (n_queries, n_terms), torch.float32)
    builder.add_launch(
        pack_terms_kernel,
        grid=(n_queries,),
        parameters={
            "V": n_terms,
            "PACKED_CHUNK": min(power_of_two(n_terms), PACKED_CHUNK),
            "num_warps": 32,
        },
    )
    _add_search(
        builder,
        options,
        setting,
        n_queries,
        row_length=n_terms,
        has_allowed=tensors.allowed is not None,
    )
    return builder.build()


def _add_search(
    builder: PlanBuilder,
    options: SearchOptions,
    setting: Setting,
    n_queries: int,
    row_length: int,
    has_allowed: bool,
) -> None:
    """Add the steps of a search: the scores of all documents, then each query's best documents.

    The first kernel also writes the highest score of each group of 64 documents, and of each group
    of 64 such groups, a high group. The second kernel searches the best high groups, then the best
    groups in them, then the best documents in these groups.

    Args:
        builder: the plan so far.
        options: the checked options.
        setting: the device.
        n_queries: number of queries.
        row_length: entries of a row of query terms, as they are stored.
        has_allowed: whether some documents may not be returned.
    """
    k = options.k
    n_documents = options.n_documents
    n_blocks = cdiv(n_documents, BLOCK)
    n_groups = n_blocks * (BLOCK // GROUP)
    n_high_groups = n_groups // GROUP
    # The largest number of groups that a search lists: a multiple of GROUP above k, but no more
    # than fit in the registers of a program if k groups fit.
    max_listed = k // GROUP * GROUP + GROUP
    if k <= CHUNK // GROUP:
        max_listed = min(max_listed, CHUNK // GROUP)
    n_programs = n_blocks * n_queries
    builder.set_parameters(
        T=row_length,
        V=options.n_terms,
        N=n_documents,
        Nq=n_queries,
        blocks=n_blocks,
        k=k,
        max_listed=max_listed,
        BLOCK=BLOCK,
        GROUP=GROUP,
        BLOCK_T=64,
        HAS_ALLOWED=has_allowed,
        CHUNK=CHUNK,
        FITS=max_listed * GROUP <= CHUNK,
        HIGH_CHUNK=min(power_of_two(n_high_groups, 512), CHUNK),
        HIGH_FITS=n_high_groups <= CHUNK,
        num_warps=8,
        num_stages=3,
    )
    # The second kernel reads what the first one writes, so no part could be freed before the end.
    builder.allocate_scratch_at_once()
    builder.add_buffer("score", (n_queries, n_documents), torch.int32)
    builder.add_buffer("group", (n_queries, n_groups), torch.int32)  # highest score of a group
    builder.add_buffer("high", (n_queries, n_high_groups), torch.int32)  # of a group of groups
    # scratch of the second kernel
    builder.add_buffer("member", (n_queries, 3 * max_listed), torch.int32)
    builder.add_buffer("listed", (n_queries, max_listed), torch.int32)
    builder.add_launch(
        block_scores_kernel,
        grid=(n_programs,),
        parameters=lookup(SCORES, capability=setting.capability, programs=n_programs),
    )
    builder.add_launch(best_kernel, grid=(n_queries,))
