"""The launchers of the backward kernels: few launches, few allocations and no look at the device.

Every argument of a kernel has a name, the number of its place in a list: tensors when a kernel is first launched, their
addresses when :mod:`replay_gradients` launches it again.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, overload

import torch
from torch import Tensor

from tilefold.ops._shared._triton.launch import Grid, launch, launcher
from tilefold.ops._shared._triton.offsets import in_int32
from tilefold.ops.maxsim._problem import GRADIENTS, Problem, no_winner
from tilefold.ops.maxsim._triton.backward import ddocuments_kernel, dqueries_kernel, dqueries_row_kernel
from tilefold.ops.maxsim._triton.direct import can_remember, second_time
from tilefold.ops.maxsim._triton.launch import PAIRINGS, as_bytes, layout_flags, row_scales
from tilefold.ops.maxsim._triton.norms import unit_gradient_kernel
from tilefold.ops.maxsim._triton.replay import ALIGNMENT
from tilefold.ops.maxsim._triton.replay_gradients import (
    CU_DOCUMENTS,
    CU_QUERIES,
    DOCUMENT_MASK,
    DOCUMENT_SCALE,
    DOCUMENTS,
    DSCORES,
    FIRST,
    INDEX,
    LARGEST,
    LISTS,
    ORDER,
    OUT,
    PLACES,
    QUERIES,
    QUERY_MASK,
    QUERY_SCALE,
    ROW_QUERY,
    SAVED,
    STRIDE_D,
    STRIDE_Q,
    Gradients,
    Step,
)
from tilefold.ops.maxsim._triton.row_queries import row_queries
from tilefold.ops.maxsim._triton.rows import cdiv, rows_constants, rows_grid
from tilefold.ops.maxsim._triton.smooth import smooth_ddocuments_kernel, smooth_dqueries_kernel
from tilefold.ops.maxsim._triton.winner_lists import ddocuments_listed_kernel
from tilefold.ops.maxsim.configs import BackwardConfig, backward_config

MOST_SLICES = 65535  # of a grid's second axis; programs go on to further tiles
TILES_OF_PACKED = 4  # programs that share the tiles of a packed document, where lengths are not known
MANY_ROWS = 16384
MOST_PROGRAMS = 4096  # that keep a list of winners each; the rest of the work is dealt to them


@overload
def aligned(tensor: Tensor) -> Tensor: ...
@overload
def aligned(tensor: Tensor | None) -> Tensor | None: ...
def aligned(tensor: Tensor | None) -> Tensor | None:
    """The tensor at an address that a replay could take, copied if need be."""
    return tensor if tensor is None or tensor.data_ptr() % ALIGNMENT == 0 else tensor.clone()


@dataclass
class _Pass:
    """One backward pass: contiguous rows, and what the kernels take of everything else, in its place."""

    problem: Problem
    config: BackwardConfig
    queries: Tensor
    documents: Tensor
    saved: Tensor
    places: list[Any]

    @property
    def sizes(self) -> tuple[int, ...]:
        p = self.problem
        return (
            self.queries.size(0), self.documents.size(0), p.n_queries, p.n_documents, p.query_length,
            p.document_length, max(p.group, 1), p.longest_query,
        )  # fmt: skip

    @property
    def has_largest(self) -> bool:
        return self.places[LARGEST] is not None

    def constants(self, warps: int, stages: int, **others: Any) -> dict[str, Any]:
        flags = layout_flags(self.problem) | others
        return flags | {"num_warps": warps, "num_stages": stages}

    def lists(self, side: int) -> tuple[Tensor | None, Tensor | None]:
        """The pairs of an index sorted by their query (0) or document (1), and where each one's begin."""
        index = self.places[INDEX]
        if index is None:
            return None, None
        count = self.problem.n_documents if side else self.problem.n_queries
        ordered, order = index[:, side].sort(stable=True)
        first = torch.searchsorted(ordered, torch.arange(count + 1, dtype=ordered.dtype, device=ordered.device))
        return order, first


def backward(
    problem: Problem, dscores: Tensor, saved: Tensor, need_queries: bool, need_documents: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of queries and documents, in their dtypes."""
    # what was saved may have been moved: kernels for other alignments may add up in another order
    queries, documents = aligned(problem.queries.contiguous()), aligned(problem.documents.contiguous())
    dscores, saved = aligned(dscores), aligned(saved.contiguous())
    config = backward_config(queries.dtype, queries.device)
    places = _places(problem, queries, documents, dscores, saved, need_documents)
    run = _Pass(problem, config, queries, documents, saved, places)
    # documents first: their lists of winners are gone when the queries' gradient is allocated
    ddocuments = _gradient(run, 1) if need_documents else None
    dqueries = _gradient(run, 0) if need_queries else None
    return dqueries, ddocuments


def _places(
    problem: Problem, queries: Tensor, documents: Tensor, dscores: Tensor, saved: Tensor, need_documents: bool
) -> list[Any]:
    """Every argument of the kernels in its place, but for those of one gradient only."""
    places: list[Any] = [None] * PLACES
    strides = dscores.stride()
    places[DSCORES], places[SAVED] = dscores, saved
    places[QUERIES], places[DOCUMENTS] = queries, documents
    places[QUERY_SCALE], places[DOCUMENT_SCALE] = row_scales(problem, queries, documents)
    places[QUERY_MASK], places[DOCUMENT_MASK] = (
        aligned(as_bytes(problem.query_mask)),
        aligned(as_bytes(problem.document_mask)),
    )
    places[CU_QUERIES] = aligned(in_int32(problem.cu_queries))
    places[CU_DOCUMENTS] = aligned(in_int32(problem.cu_documents))
    places[INDEX] = aligned(in_int32(problem.index))
    # of the scores' gradient, over queries and documents (or pairs)
    places[STRIDE_Q], places[STRIDE_D] = strides if problem.pairing == "all" else (0, strides[0])
    if problem.pairing == "all" and problem.cu_queries is not None and queries.numel():
        places[ROW_QUERY] = row_queries(places[CU_QUERIES], queries.size(0))
    if queries.dtype == torch.float16 and dscores.numel() and (need_documents or problem.temperature):
        places[LARGEST] = torch.linalg.vector_norm(dscores, math.inf)  # by which fp16 products are scaled
    return places


def _gradient(run: _Pass, side: int) -> Tensor:
    """The gradient of queries (0) or documents (1)."""
    rows, scale = (run.documents, run.places[DOCUMENT_SCALE]) if side else (run.queries, run.places[QUERY_SCALE])
    normalize = run.problem.normalize
    # a unit vector's gradient is projected in fp32, before the only rounding
    grad = torch.empty(rows.shape, dtype=torch.float32 if normalize else rows.dtype, device=rows.device)
    if run.saved.numel() == 0 or run.problem.cu_queries is not None or run.problem.cu_documents is not None:
        grad.zero_()  # rows that no sequence holds, should offsets be broken
    if run.saved.numel() == 0:
        return grad.to(rows.dtype)
    places = run.places.copy()
    places[ORDER], places[FIRST] = run.lists(side)
    places[OUT] = grad
    step = _step(run, side)
    if step.lists:
        places[LISTS] = torch.empty(step.lists, dtype=torch.int32, device=rows.device)
    arguments = step.arguments(places)
    step.run(step.grid, arguments)
    projected = None
    if normalize:
        projected = (rows, scale, grad, torch.empty_like(rows), rows.size(0))
        launch(unit_gradient_kernel, rows_grid(rows), projected, rows_constants(rows))
        grad = projected[3]
    _remember(run, side, step, arguments, projected)
    return grad


def _remember(run: _Pass, side: int, step: Step, arguments: tuple[Any, ...], projected: tuple[Any, ...] | None) -> None:
    plans = run.problem.plans
    if plans is None or not second_time(plans, (GRADIENTS, side)):
        return
    if not can_remember(*arguments, run.problem.cu_queries, run.problem.cu_documents, run.queries, run.documents):
        return
    gradients = plans.get(GRADIENTS)
    if gradients is None:
        gradients = plans[GRADIENTS] = Gradients(run.problem, run.places)
    gradients.learn(side, step, arguments, projected)


def _step(run: _Pass, side: int) -> Step:
    """A kernel with its constants, its programs and its numbers, worked out once for problems of these shapes."""
    make = _choose(run, side)
    plans = run.problem.plans
    if plans is None:
        return make(run)
    key = (make, run.queries.shape, run.documents.shape, run.saved.dtype, run.has_largest)
    step: Step | None = plans.get(key)
    if step is None:
        step = plans[key] = make(run)
    return step


def _choose(run: _Pass, side: int) -> Callable[[_Pass], Step]:
    p = run.problem
    if p.temperature:
        return _smooth_documents if side else _smooth_queries
    if p.pairing != "all":
        return _documents if side else _queries
    if side:
        return _documents_listed
    return _few_queries if run.queries.size(0) <= run.config.few_rows else _queries


_OFFSETS = (CU_QUERIES, CU_DOCUMENTS, ROW_QUERY, ORDER, FIRST, INDEX, OUT)
_STRIDES = (STRIDE_Q, STRIDE_D)


def _few_queries(run: _Pass) -> Step:
    p, config, n_rows = run.problem, run.config, run.queries.size(0)
    constants = run.constants(
        config.warps_few, config.stages_q, BLOCK_N=config.block_n, BLOCK_D=config.block_d,
        NO_WINNER=no_winner(run.saved.dtype),
    )  # fmt: skip
    places = (DSCORES, SAVED, DOCUMENTS, QUERY_SCALE, DOCUMENT_SCALE, CU_DOCUMENTS, ROW_QUERY, OUT)
    sizes = (n_rows, run.documents.size(0), p.n_documents, p.query_length, p.document_length)
    grid = (n_rows, cdiv(run.queries.size(1), config.block_d), 1)
    return Step(launcher(dqueries_row_kernel, constants), grid, places, sizes, _STRIDES)


def _queries(run: _Pass) -> Step:
    config = run.config
    constants = run.constants(
        config.warps_q, config.stages_q, PAIRING=PAIRINGS[run.problem.pairing], BLOCK_R=config.block_r,
        BLOCK_D=config.block_d, NO_WINNER=no_winner(run.saved.dtype),
    )  # fmt: skip
    places = (DSCORES, SAVED, DOCUMENTS, QUERY_SCALE, DOCUMENT_SCALE, *_OFFSETS)
    grid = _blocks_of_queries(run, config.block_r, config.block_d)
    return Step(launcher(dqueries_kernel, constants), grid, places, run.sizes, _STRIDES)


def _smooth_queries(run: _Pass) -> Step:
    p, config = run.problem, run.config
    constants = run.constants(
        config.smooth_warps, config.smooth_stages, PAIRING=PAIRINGS[p.pairing], BLOCK_Q=config.smooth_r,
        BLOCK_T=config.smooth_t, BLOCK_K=config.smooth_k, BLOCK_D=config.block_dd,
        HAS_DMASK=p.document_mask is not None, PRECISION=config.precision, HAS_LARGEST=run.has_largest,
    )  # fmt: skip
    places = (
        DSCORES, SAVED, QUERIES, DOCUMENTS, QUERY_SCALE, DOCUMENT_SCALE, LARGEST, DOCUMENT_MASK, *_OFFSETS,
    )  # fmt: skip
    grid = _blocks_of_queries(run, config.smooth_r, config.block_dd)
    return Step(
        launcher(smooth_dqueries_kernel, constants), grid, places, run.sizes, _STRIDES, last=(1.0 / p.temperature,)
    )


def _blocks_of_queries(run: _Pass, block_r: int, block_d: int) -> Grid:
    p = run.problem
    blocks = cdiv(run.queries.size(0), block_r) if p.pairing == "all" else p.n_queries
    return blocks, cdiv(run.queries.size(1), block_d), 1


def _slices(run: _Pass, block_t: int) -> int:
    """Programs that share a document's tiles."""
    p = run.problem
    return min(cdiv(p.document_length, block_t), MOST_SLICES) if p.cu_documents is None else TILES_OF_PACKED


def _documents(run: _Pass) -> Step:
    p, config = run.problem, run.config
    constants = run.constants(
        config.warps_d, config.stages_d, PAIRING=PAIRINGS[p.pairing], BLOCK_T=config.block_t, BLOCK_E=config.block_e,
        BLOCK_D=config.block_dd, HAS_LARGEST=run.has_largest, NO_WINNER=no_winner(run.saved.dtype),
        PRECISION=config.precision,
    )  # fmt: skip
    places = (
        DSCORES, SAVED, QUERIES, QUERY_SCALE, LARGEST, CU_QUERIES, CU_DOCUMENTS, ORDER, FIRST, INDEX, OUT,
    )  # fmt: skip
    slices = _slices(run, config.block_t)
    grid = (p.n_documents, slices, cdiv(run.queries.size(1), config.block_dd))
    return Step(launcher(ddocuments_kernel, constants), grid, places, (*run.sizes, slices), (STRIDE_D,))


def _smooth_documents(run: _Pass) -> Step:
    p, config = run.problem, run.config
    constants = run.constants(
        config.smooth_warps, config.smooth_stages, PAIRING=PAIRINGS[p.pairing], BLOCK_Q=config.smooth_r,
        BLOCK_T=config.smooth_t, BLOCK_K=config.smooth_k, BLOCK_D=config.block_dd,
        HAS_QMASK=p.query_mask is not None, HAS_DMASK=p.document_mask is not None,
        PRECISION=config.precision, HAS_LARGEST=run.has_largest,
    )  # fmt: skip
    places = (
        DSCORES, SAVED, QUERIES, DOCUMENTS, QUERY_SCALE, DOCUMENT_SCALE, LARGEST, QUERY_MASK, DOCUMENT_MASK, *_OFFSETS,
    )  # fmt: skip
    slices = _slices(run, config.smooth_t)
    grid = (p.n_documents, slices, cdiv(run.queries.size(1), config.block_dd))
    return Step(
        launcher(smooth_ddocuments_kernel, constants), grid, places, (*run.sizes, slices), _STRIDES,
        last=(1.0 / p.temperature,),
    )  # fmt: skip


def _documents_listed(run: _Pass) -> Step:
    p, config, n_rows = run.problem, run.config, run.queries.size(0)
    slices = _slices(run, config.list_t)
    block_s = config.list_s_many if n_rows >= MANY_ROWS else config.list_s
    capacity = 2 * block_s
    constants = run.constants(
        config.list_warps, config.list_stages, BLOCK_T=config.list_t, BLOCK_S=block_s, BLOCK_E=config.list_e,
        BLOCK_D=config.block_dd, CAPACITY=capacity, ALIGNED=n_rows % 8 == 0, HAS_LARGEST=run.has_largest,
        NO_WINNER=no_winner(run.saved.dtype), PRECISION=config.precision,
    )  # fmt: skip
    places = (DSCORES, SAVED, QUERIES, QUERY_SCALE, LARGEST, CU_DOCUMENTS, ROW_QUERY, LISTS, OUT)
    grid = (min(p.n_documents * slices, MOST_PROGRAMS), cdiv(run.queries.size(1), config.block_dd), 1)
    sizes = (n_rows, run.documents.size(0), p.n_documents, slices, p.query_length, p.document_length)
    lists = grid[0] * grid[1] * capacity
    return Step(launcher(ddocuments_listed_kernel, constants), grid, places, sizes, _STRIDES, lists=lists)
