"""Contract of ``sparse_topk``."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from tests.ops.contracts.contract import KernelCase, OperatorContract
from tests.ops.samples import Sample
from tilefold.ops.sparse_search import BlockedPostings, sparse_topk
from tilefold.ops.sparse_search.api import SEARCH

DOCUMENTS, TERMS = 30, 10
POSTINGS_PER_TERM = 6


@functools.cache
def postings_on(device: torch.device) -> BlockedPostings:
    """Return postings in which every document has two of ten terms."""
    entries = TERMS * POSTINGS_PER_TERM
    offsets = torch.arange(0, entries + 1, POSTINGS_PER_TERM)
    documents = torch.arange(entries).view(TERMS, POSTINGS_PER_TERM) * 7 % DOCUMENTS
    documents = documents.sort(dim=1).values.flatten().int()
    weights = torch.linspace(0.1, 1, entries)
    return BlockedPostings.of(offsets, documents, weights, DOCUMENTS, device)


def best_scores(weights: Tensor, impl: str = "auto") -> Tensor:
    """Return the five best scores of queries that have weights of the first terms."""
    terms = torch.arange(weights.size(1), dtype=torch.int32, device=weights.device)
    terms = terms.expand_as(weights)
    return sparse_topk(postings_on(weights.device), terms, weights.detach().abs(), 5, impl=impl)[0]


SEARCHED = Sample("sparse_topk", best_scores, ((2, 7),), inference=True)

CONTRACT = OperatorContract(
    name=SEARCH.name,
    operator=SEARCH,
    kernels={
        "sparse_search/search.best_kernel": KernelCase(SEARCHED, compiles=False),
        "sparse_search/search.block_scores_kernel": KernelCase(SEARCHED, compiles=False),
    },
    opchecked=(SEARCHED,),
    interpreted_files=("sparse_search/test_sparse_search.py",),
    interpreted_least=8,
)
