"""Contract of ``sparse_topk_of_dense``."""

from __future__ import annotations

from torch import Tensor

from tests.ops.contracts.contract import KernelCase, OperatorContract
from tests.ops.contracts.sparse_search import TERMS, postings_on
from tests.ops.samples import Sample
from tilefold.ops.sparse_search import sparse_topk_of_dense
from tilefold.ops.sparse_search.api import DENSE_SEARCH


def best_scores(queries: Tensor, impl: str = "auto") -> Tensor:
    """Return the five best scores of dense queries."""
    postings = postings_on(queries.device)
    scores, _, _ = sparse_topk_of_dense(postings, queries.detach().abs(), 5, impl=impl)
    return scores


SEARCHED = Sample("sparse_topk_of_dense", best_scores, ((2, TERMS),), inference=True)

CONTRACT = OperatorContract(
    name=DENSE_SEARCH.name,
    operator=DENSE_SEARCH,
    kernels={"sparse_search/search.pack_terms_kernel": KernelCase(SEARCHED, compiles=False)},
    opchecked=(SEARCHED,),
    interpreted_files=("sparse_search/test_dense_queries.py",),
    interpreted_least=6,
)
