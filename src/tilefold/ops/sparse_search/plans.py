"""Launch plan of exact search over sparse vectors."""

from __future__ import annotations

import torch

from tilefold.ops._shared.plan import Plan, Setting, Steps, contiguous, power_of_two
from tilefold.ops._shared.tuning import Between, ConfigRow, lookup
from tilefold.ops.sparse_search._problem import SearchOptions, SearchTensors
from tilefold.ops.sparse_search._triton.search import best_kernel, block_scores_kernel
from tilefold.ops.sparse_search.postings import BLOCK

GROUP, CHUNK = (
    64,
    8192,
)  # documents of a group, and groups of a group of them; values that a program holds
# Facts: capability, programs (blocks of documents times queries)
SCORES = (
    ConfigRow(
        {}, {"ROWS": 4, "WIDE": 256, "num_warps": 4, "num_stages": 3, "SHARED": True}, "H200"
    ),
    ConfigRow(
        {"programs": Between(most=4096)},
        {"ROWS": 8, "WIDE": 512, "num_warps": 32},
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
    """Scores of blocks of documents, and the best of their groups; then the best of all for each
    query.
    """
    (n_queries, length), (k, n_documents, n_terms) = tensors.terms.shape, options
    blocks = -(-n_documents // BLOCK)
    groups, most = blocks * (BLOCK // GROUP), k // GROUP * GROUP + GROUP
    if k <= CHUNK // GROUP:  # whose groups a program holds
        most = min(most, CHUNK // GROUP)
    values = {
        "T": length,
        "V": n_terms,
        "N": n_documents,
        "Nq": n_queries,
        "blocks": blocks,
        "k": k,
        "most": most,
        "BLOCK": BLOCK,
        "GROUP": GROUP,
        "BLOCK_T": 64,
        "HAS_ALLOWED": tensors.allowed is not None,
        "CHUNK": CHUNK,
        "ONE": most * GROUP <= CHUNK,
        "FIRST": min(power_of_two(groups // GROUP, 512), CHUNK),
        "ONE_FIRST": groups // GROUP <= CHUNK,
        "num_warps": 8,
        "num_stages": 3,
    }
    steps = Steps(values)
    steps.steps += contiguous(**tensors._asdict())
    widths = {
        "score": n_documents,
        "group": groups,
        "high": groups // GROUP,
        "member": 3 * most,
        "listed": most,
    }
    for name, width in widths.items():
        steps.buffer(name, (n_queries, width), torch.int32)
    programs = blocks * n_queries
    steps.launch(
        block_scores_kernel,
        (programs,),
        lookup(SCORES, capability=setting.capability, programs=programs),
    )
    steps.launch(best_kernel, (n_queries,))
    return steps.plan()
