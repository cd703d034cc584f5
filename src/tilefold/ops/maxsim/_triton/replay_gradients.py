"""Gradients of tensors of the same shapes, dtypes and options as others before them: the same launches again."""

from __future__ import annotations

import math
from collections.abc import Callable
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilefold.ops._shared._triton.direct import hooked
from tilefold.ops._shared._triton.launch import Grid, Launcher, launcher
from tilefold.ops.maxsim._problem import Problem
from tilefold.ops.maxsim._triton.direct import Direct
from tilefold.ops.maxsim._triton.norms import unit_gradient_kernel
from tilefold.ops.maxsim._triton.replay import ALIGNMENT, Norms, address_of
from tilefold.ops.maxsim._triton.row_queries import row_queries_launch
from tilefold.ops.maxsim._triton.rows import rows_constants, rows_grid

# The places of what the backward kernels take, besides numbers.
(
    DSCORES, SAVED, QUERIES, DOCUMENTS, QUERY_MASK, DOCUMENT_MASK, CU_QUERIES, CU_DOCUMENTS, STRIDE_Q, STRIDE_D,
    ROW_QUERY, LARGEST, LISTS, OUT, QUERY_SCALE, DOCUMENT_SCALE, ORDER, FIRST, INDEX,
) = range(19)  # fmt: skip
PLACES = 19
LARGEST_STRIDE = 2**31  # from there on kernels take 64-bit numbers


class Step(NamedTuple):
    """The kernel of one gradient.

    Attributes:
        run, grid: the kernel with its constants, and its programs.
        places: of its tensors.
        numbers, strides, last: its numbers, and the places of those that are strides of the scores' gradient.
        lists: entries of the lists of winners that it writes for itself.
    """

    run: Launcher
    grid: Grid
    places: tuple[int, ...]
    numbers: tuple[int, ...]
    strides: tuple[int, ...]
    last: tuple[float, ...] = ()
    lists: int = 0

    def arguments(self, filled: list[Any]) -> tuple[Any, ...]:
        """The kernel's arguments, from what fills the places."""
        tensors, strides = (tuple(filled[place] for place in places) for places in (self.places, self.strides))
        return (*tensors, *self.numbers, *strides, *self.last)


class _Again(NamedTuple):
    """A step that ran: how its kernel is launched by addresses."""

    launch: Callable[..., None]
    pick: Callable[[list[Any]], tuple[Any, ...]]
    numbers: tuple[int, ...]
    strides: Callable[[list[Any]], tuple[Any, ...]]
    last: tuple[float, ...]
    lists: int
    project: Callable[..., None] | None


class Gradients:
    """The launches that gave a problem's gradients, each learned when it first ran. It holds no tensor of a call."""

    def __init__(self, problem: Problem, filled: list[Any]) -> None:
        queries = filled[QUERIES]
        self._index, self._device = queries.get_device(), queries.device
        self._current = torch._C._cuda_getDevice
        self._everything = problem.pairing == "all"
        self._half, self._smooth = queries.dtype == torch.float16, bool(problem.temperature)
        self._packed = problem.cu_queries is not None or problem.cu_documents is not None
        self._sides: list[_Again | None] = [None, None]
        self._row_queries: Callable[..., None] | None = None
        self._norms: Norms | None = None
        if problem.normalize:
            self._norms = Norms(queries, filled[DOCUMENTS], (filled[QUERY_SCALE], filled[DOCUMENT_SCALE]))
        if filled[ROW_QUERY] is not None:
            self._count = queries.size(0)
            run, grid, self._numbers = row_queries_launch(self._count, problem.n_queries)
            arguments = (filled[CU_QUERIES], filled[ROW_QUERY], *self._numbers)
            self._row_queries = Direct(run, grid, arguments, self._index).launch

    def learn(self, side: int, step: Step, arguments: tuple[Any, ...], projected: tuple[Any, ...] | None) -> None:
        """Keep how the gradient of queries (0) or documents (1) was launched, and that of rows from unit vectors'."""
        if self._sides[side] is not None:
            return
        launch = Direct(step.run, step.grid, arguments, self._index).launch
        strides = itemgetter(*step.strides) if len(step.strides) > 1 else _alone(step.strides[0])
        project = None
        if projected is not None:
            rows = projected[0]
            run = launcher(unit_gradient_kernel, rows_constants(rows))
            project = Direct(run, rows_grid(rows), projected, self._index).launch
        pick = itemgetter(*step.places)
        self._sides[side] = _Again(launch, pick, step.numbers, strides, step.last, step.lists, project)

    def __call__(
        self,
        dscores: Tensor,
        saved: Tensor,
        queries: Tensor,
        documents: Tensor,
        query_mask: Tensor | None,
        document_mask: Tensor | None,
        cu_queries: Tensor | None,
        cu_documents: Tensor | None,
        need_queries: bool,
        need_documents: bool,
    ) -> tuple[Tensor | None, Tensor | None] | None:
        """The gradients asked for, or ``None`` if the compiled kernels cannot take the tensors as they are."""
        again_q, again_d = self._sides
        if (need_queries and again_q is None) or (need_documents and again_d is None):
            return None
        if self._current() != self._index or hooked():
            return None
        dscores, *strides = self._strided(dscores)
        filled: list[Any] = [
            dscores.data_ptr(), address_of(saved), address_of(queries), address_of(documents), None, None, None, None,
            *strides, None, None, None, None, None, None, None, None, None,
        ]  # fmt: skip
        together = filled[DSCORES] | filled[SAVED] | filled[QUERIES] | filled[DOCUMENTS]
        if self._smooth or self._packed:
            others = (query_mask, document_mask, cu_queries, cu_documents)
            for place, tensor in zip((QUERY_MASK, DOCUMENT_MASK, CU_QUERIES, CU_DOCUMENTS), others, strict=True):
                if tensor is not None:
                    filled[place] = address_of(tensor)
                    together |= filled[place]
        # what was saved may have been packed and unpacked
        elsewhere = not saved.get_device() == queries.get_device() == documents.get_device() == self._index
        if elsewhere or together % ALIGNMENT or max(strides) >= LARGEST_STRIDE:
            return None
        owners = largest = _norms = None  # scratch lives until the launches that read it are enqueued
        if self._row_queries is not None:
            owners = torch.empty(self._count, dtype=torch.int32, device=self._device)
            filled[ROW_QUERY] = owners.data_ptr()
            self._row_queries(filled[CU_QUERIES], filled[ROW_QUERY], *self._numbers)
        if self._half and (need_documents or self._smooth):
            largest = torch.linalg.vector_norm(dscores, math.inf)
            filled[LARGEST] = largest.data_ptr()
        if self._norms is not None:
            _norms, filled[QUERY_SCALE], filled[DOCUMENT_SCALE] = self._norms(filled[QUERIES], filled[DOCUMENTS])
        ddocuments = dqueries = None
        if need_documents and again_d is not None:
            ddocuments = self._gradient(again_d, filled, documents, filled[DOCUMENTS], filled[DOCUMENT_SCALE])
        if need_queries and again_q is not None:
            dqueries = self._gradient(again_q, filled, queries, filled[QUERIES], filled[QUERY_SCALE])
        return dqueries, ddocuments

    def _strided(self, dscores: Tensor) -> tuple[Tensor, int, int]:
        """The scores' gradient, and its strides over queries and documents (or pairs)."""
        strides = dscores.stride()
        if self._everything:
            return dscores, strides[0], strides[1]
        if len(strides) == 1:
            return dscores, 0, strides[0]
        if dscores.is_contiguous():
            return dscores, 0, 1
        return (dscores, 0, 0) if not any(strides) else (dscores.contiguous(), 0, 1)

    def _gradient(self, again: _Again, filled: list[Any], rows: Tensor, address: int, scale: int | None) -> Tensor:
        launch, pick, numbers, strides, last, size, project = again
        # a unit vector's gradient is projected in fp32, before the only rounding
        grad = torch.empty_like(rows) if project is None else torch.empty_like(rows, dtype=torch.float32)
        if self._packed:
            grad.zero_()  # rows that no sequence holds, should offsets be broken
        filled[OUT] = grad.data_ptr()
        lists = None
        if size:
            lists = torch.empty(size, dtype=torch.int32, device=self._device)
            filled[LISTS] = lists.data_ptr()
        launch(*pick(filled), *numbers, *strides(filled), *last)
        if project is None:
            return grad
        out = torch.empty_like(rows)
        project(address, scale, filled[OUT], out.data_ptr(), rows.numel() // rows.size(-1))
        return out


def _alone(place: int) -> Callable[[list[Any]], tuple[Any, ...]]:
    return lambda filled: (filled[place],)
