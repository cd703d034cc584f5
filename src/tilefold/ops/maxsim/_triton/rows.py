"""Stages of a plan that go over rows once: norms, rounding to int8, the gradient of rows from that of unit vectors.

And what is known of rows that forward finds out and backward needs too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tilefold.ops._shared._triton.launch import Grid, Step
from tilefold.ops._shared._triton.tensors import Piece, Pieces, cdiv, without_memory
from tilefold.ops.maxsim._problem import Problem
from tilefold.ops.maxsim._triton import plan as at
from tilefold.ops.maxsim._triton.norms import inverse_norms_kernel, quantize_kernel, unit_gradient_kernel
from tilefold.ops.maxsim._triton.plan import Places, Run, Stage

BLOCK_ROWS, BLOCK_COLUMNS = 16, 128
ALIGNED_ROWS = 32  # of 4 bytes: where the next facts begin


class Share:
    """Scratch for several places, allocated at once: their numbers, shapes and dtypes."""

    __slots__ = ("_pieces", "_places")

    def __init__(self, device: torch.device, *parts: tuple[int, Sequence[int], torch.dtype]) -> None:
        self._places = [place for place, _, _ in parts]
        self._pieces = Pieces(device, *[(tuple(shape), dtype) for _, shape, dtype in parts])

    def __call__(self, places: Places, same: bool) -> None:
        for place, piece in zip(self._places, self._pieces(), strict=True):
            places[place] = piece


class RowFacts:
    """What forward works out of rows and keeps for backward, in the memory of one place.

    The inverse norms of normalised rows, and which query each packed row belongs to.

    Args:
        problem: whose rows.
        found: whether the memory is there, from forward; else it is allocated.
    """

    __slots__ = ("_first", "_found", "_like", "_others")

    def __init__(self, problem: Problem, found: bool) -> None:
        parts, rows = row_facts(problem), 0
        self._others: list[tuple[int, int, torch.dtype]] = []  # places after the first, rows before them, dtypes
        for place, count, dtype in parts:
            self._others.append((place, rows, dtype))
            rows += cdiv(count, ALIGNED_ROWS) * ALIGNED_ROWS
        (self._first, _, dtype), *self._others = self._others
        self._like, self._found = without_memory((rows,), dtype, problem.queries.device), found

    def __call__(self, places: Places, same: bool) -> None:
        if not self._found:
            places[at.ROW_FACTS] = torch.empty_like(self._like)
        facts = places[self._first] = places[at.ROW_FACTS]  # a tensor takes fewer functions than a piece of it
        for place, rows, dtype in self._others:
            places[place] = _Rest(facts, rows, dtype)


class _Rest(Piece):
    """What follows so many entries of 4 bytes, in a dtype of 4 bytes."""

    __slots__ = ("_dtype", "_skipped")

    def __init__(self, buffer: Tensor, skipped: int, dtype: torch.dtype) -> None:
        self._buffer, self._skipped, self._dtype = buffer, skipped, dtype
        self.data_ptr = (buffer.data_ptr() + 4 * skipped).__index__

    def tensor(self) -> Tensor:
        return self._buffer[self._skipped :].view(self._dtype)


def row_facts(problem: Problem) -> list[tuple[int, int, torch.dtype]]:
    """Places, rows and dtypes, of 4 bytes, of the facts that there are."""
    queries, documents = problem.queries.size(0), problem.documents.size(0)
    facts: list[tuple[int, int, torch.dtype]] = []
    if problem.normalize:
        facts += [(at.QUERY_SCALE, queries, torch.float32), (at.DOCUMENT_SCALE, documents, torch.float32)]
    if problem.pairing == "all" and problem.cu_queries is not None:
        facts.append((at.ROW_QUERY, queries, torch.int32))
    return facts


def _grid(*counts: int) -> Grid:
    return sum(cdiv(count, BLOCK_ROWS) for count in counts), 1, 1


def _constants(rows: Tensor) -> dict[str, Any]:
    return {"D": rows.size(1), "BLOCK_R": BLOCK_ROWS, "BLOCK_D": BLOCK_COLUMNS, "num_warps": 4, "num_stages": 3}


def inverse_norms(problem: Problem) -> Run:
    """``[Tq]`` and ``[Td]`` fp32, by which rows of norm 1 are made, in one launch."""
    counts = problem.queries.size(0), problem.documents.size(0)
    step = Step(inverse_norms_kernel, _grid(*counts), counts, _constants(problem.queries))
    return Run(step, (at.QUERIES, at.DOCUMENTS, at.QUERY_SCALE, at.DOCUMENT_SCALE))


def int8_queries(queries: Tensor) -> list[Stage]:
    """The queries in int8, and their scales ``[Tq]``."""
    step = Step(quantize_kernel, _grid(queries.size(0)), (queries.size(0),), _constants(queries))
    return [
        Share(
            queries.device,
            (at.INT8_QUERIES, queries.shape, torch.int8),
            (at.QUERY_SCALE, queries.shape[:1], torch.float32),
        ),
        Run(step, (at.QUERIES, at.INT8_QUERIES, at.QUERY_SCALE)),
    ]


def unit_gradient(rows: Tensor, places: tuple[int, int, int, int]) -> Run:
    """The gradient of ``rows`` from that of their unit vectors, which nobody needs afterwards.

    ``places`` are those of the rows, their inverse norms, the unit vectors' gradient and the result.
    """
    step = Step(unit_gradient_kernel, _grid(rows.size(0)), (rows.size(0),), _constants(rows))
    return Run(step, places, last=(places[2],))
