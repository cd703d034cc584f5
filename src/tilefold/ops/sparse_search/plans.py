"""Launch plan of exact search over sparse vectors."""

from __future__ import annotations

import torch

from tilefold.ops._shared.plan import Buffer, Plan, Steps, power_of_two
from tilefold.ops._shared.tuning import Between, Row, lookup
from tilefold.ops.sparse_search._triton.search import best_kernel, block_scores_kernel
from tilefold.ops.sparse_search.postings import BLOCK

GIVEN = ("term", "weight", "offset", "place", "posting", "largest", "allowed")
GROUP, CHUNK = 64, 8192  # documents of a group, and groups of a group of them; values that a program holds
# Facts: capability, programs (blocks of documents times queries)
SCORES = (
    Row({}, {"ROWS": 4, "WIDE": 256, "num_warps": 4, "num_stages": 3, "SHARED": True}, "H200"),
    Row({"programs": Between(most=4096)}, {"WIDE": 512, "num_warps": 8}, "H200, one query"),
    Row({"capability": (0, 0)}, {"SHARED": False}, "shared memory is declared in PTX"),
)


def search(
    capability: tuple[int, int], allowed: bool, n_documents: int, n_terms: int, length: int, n_queries: int, k: int
) -> Plan:
    """Score bits ``value`` and numbers ``document`` ``[Nq, k]`` of the best for queries of ``length`` terms."""
    blocks = -(-n_documents // BLOCK)
    groups = blocks * (BLOCK // GROUP)
    values = {
        "T": length, "V": n_terms, "N": n_documents, "Nq": n_queries, "blocks": blocks, "k": k, "BLOCK": BLOCK,
        "GROUP": GROUP, "BLOCK_T": 64, "HAS_ALLOWED": allowed, "CHUNK": CHUNK, "ONE": k * GROUP <= CHUNK,
        "FIRST": min(power_of_two(groups // GROUP, 512), CHUNK), "ONE_FIRST": groups // GROUP <= CHUNK,
        "num_warps": 16, "num_stages": 3,
    }  # fmt: skip
    steps = Steps({}, values)
    widths = {"score": n_documents, "group": groups, "high": groups // GROUP, "member": 3 * k, "listed": k}
    for name, width in widths.items():
        steps.buffer(name, (n_queries, width), torch.int32)
    programs = blocks * n_queries
    steps.launch(block_scores_kernel, (programs,), lookup(SCORES, capability=capability, programs=programs))
    steps.launch(best_kernel, (n_queries,))
    return steps.plan()


def results(n_queries: int, k: int) -> dict[str, Buffer]:
    """Results of the plan."""
    return {"value": Buffer((n_queries, k), torch.int32), "document": Buffer((n_queries, k), torch.int64)}
