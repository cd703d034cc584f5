"""CSR results of operators: what they keep of the dense scores, and who can use them."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def expected_entries(scores: Tensor, top_k: int | None, min_weight: float) -> list[list[int]]:
    """Columns kept in each row: by score, then by column; strictly above the minimum, or NaN."""
    rows = []
    for row in scores.tolist():
        columns = [v for v, score in enumerate(row) if not score <= min_weight]
        columns.sort(key=lambda v: (-math.inf if math.isnan(row[v]) else -row[v], v))
        rows.append(sorted(columns[:top_k]))
    return rows


def entries(sparse: Tensor) -> list[list[int]]:
    """Columns of each row."""
    starts, columns = sparse.crow_indices().tolist(), sparse.col_indices().tolist()
    return [columns[a:b] for a, b in itertools.pairwise(starts)]


def assert_best(
    sparse: Tensor,
    scores: Tensor,
    top_k: int | None,
    min_weight: float,
    rtol: float = 1e-6,
    atol: float = 0.0,
) -> None:
    """Its entries are the best of the dense scores, or as near as sums in another order."""
    assert sparse.layout == torch.sparse_csr and sparse.shape == scores.shape
    kept = sparse.to_dense()
    torch.testing.assert_close(kept, torch.where(kept != 0, scores, 0), rtol=rtol, atol=atol)
    assert entries(sparse) == expected_entries(scores, top_k, min_weight)


def valid_csr(call: Callable[[], Tensor]) -> Tensor:
    """The result, made without a warning (also of those that torch gives once in a process) or a
    graph.
    """
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            sparse = call()
    finally:
        torch.set_warn_always(before)
    parts = sparse.crow_indices(), sparse.col_indices(), sparse.values()
    torch._validate_sparse_csr_tensor_args(*parts, list(sparse.shape))
    assert not sparse.requires_grad and parts[1].dtype == torch.int64
    torch.testing.assert_close(
        sparse @ torch.ones(sparse.size(1), 1),
        sparse.to_dense().sum(dim=1, keepdim=True),
    )
    return sparse


LIMITS = [(None, 0.0), (None, 0.8), (1, 0.0), (7, 0.0), (7, 0.5), (40, 0.5), (500, 0.0)]
BAD_LIMITS: list[tuple[dict[str, Any], str]] = [
    *(
        ({"top_k": wrong}, "top_k must be a positive integer or None, got ")
        for wrong in (0, -1, 1.5, True, "3")
    ),
    *(
        ({"min_weight": wrong}, "min_weight must be a Python number, got .*-inf keeps every entry")
        for wrong in (math.nan, "a", None, torch.tensor(1.0))
    ),
]
