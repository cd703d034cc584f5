"""What the tests of operators with CSR results share."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

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


@contextmanager
def warnings_are_errors() -> Iterator[None]:
    """Also those that torch gives once in a process."""
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            yield
    finally:
        torch.set_warn_always(before)
