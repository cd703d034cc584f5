"""Stages of a plan that go over rows once: norms, rounding to int8, the gradient of rows from that of unit vectors.

And what is known of rows that forward finds out and backward needs too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tilefold.ops._shared._triton.launch import Grid, Step
from tilefold.ops._shared._triton.tensors import Pieces, cdiv, without_memory
from tilefold.ops.maxsim._problem import Problem
from tilefold.ops.maxsim._triton import plan as at
from tilefold.ops.maxsim._triton.norms import inverse_norms_kernel, quantize_kernel, unit_gradient_kernel
from tilefold.ops.maxsim._triton.plan import Places, Run, Stage

BLOCK_ROWS, BLOCK_COLUMNS = 16, 128


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

    __slots__ = ("_found", "_pieces", "_places", "_queries")

    def __init__(self, problem: Problem, found: bool) -> None:
        parts, device = row_facts(problem), problem.queries.device
        self._places, self._found = [place for place, _, _ in parts], found
        self._pieces = Pieces(device, *[(shape, dtype) for _, shape, dtype in parts])
        alone = parts[0][0] == at.ROW_QUERY  # a tensor, which takes fewer functions than a piece
        self._queries = without_memory(parts[0][1], torch.int32, device) if alone else None

    def __call__(self, places: Places, same: bool) -> None:
        if self._queries is not None:
            if not self._found:
                places[at.ROW_FACTS] = torch.empty_like(self._queries)
            places[at.ROW_QUERY] = places[at.ROW_FACTS]
            return
        if not self._found:
            places[at.ROW_FACTS] = self._pieces.buffer()
        for place, piece in zip(self._places, self._pieces.within(places[at.ROW_FACTS]), strict=True):
            places[place] = piece


def row_facts(problem: Problem) -> list[tuple[int, tuple[int, ...], torch.dtype]]:
    """Places, shapes and dtypes of the facts that there are."""
    queries, documents = problem.queries.size(0), problem.documents.size(0)
    facts: list[tuple[int, tuple[int, ...], torch.dtype]] = []
    if problem.normalize:
        facts += [(at.QUERY_SCALE, (queries,), torch.float32), (at.DOCUMENT_SCALE, (documents,), torch.float32)]
    if problem.pairing == "all" and problem.cu_queries is not None:
        facts.append((at.ROW_QUERY, (queries,), torch.int32))
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
