"""Stages of a plan that go over rows once: norms, rounding to int8, the gradient of rows from that of unit vectors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tilefold.ops._shared._triton.launch import Grid, Step
from tilefold.ops._shared._triton.tensors import Pieces, cdiv
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


def _grid(*counts: int) -> Grid:
    return sum(cdiv(count, BLOCK_ROWS) for count in counts), 1, 1


def _constants(rows: Tensor) -> dict[str, Any]:
    return {"D": rows.size(1), "BLOCK_R": BLOCK_ROWS, "BLOCK_D": BLOCK_COLUMNS, "num_warps": 4, "num_stages": 3}


def inverse_norms(problem: Problem) -> list[Stage]:
    """``[Tq]`` and ``[Td]`` fp32, by which rows of norm 1 are made, in one launch."""
    queries, counts = problem.queries, (problem.queries.size(0), problem.documents.size(0))
    step = Step(inverse_norms_kernel, _grid(*counts), counts, _constants(queries))
    return [
        Share(
            queries.device,
            (at.QUERY_SCALE, counts[:1], torch.float32),
            (at.DOCUMENT_SCALE, counts[1:], torch.float32),
        ),
        Run(step, (at.QUERIES, at.DOCUMENTS, at.QUERY_SCALE, at.DOCUMENT_SCALE)),
    ]


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
