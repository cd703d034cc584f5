"""Exact search over sparse vectors on a device."""

from tilefold.ops.sparse_search.api import sparse_topk as sparse_topk
from tilefold.ops.sparse_search.api import sparse_topk_of_dense as sparse_topk_of_dense
from tilefold.ops.sparse_search.postings import BlockedPostings as BlockedPostings
