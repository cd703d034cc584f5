"""The launchers of the backward kernels: few launches, few allocations and no look at the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilefold.ops._shared._triton.launch import Grid, Launcher, launch, launcher
from tilefold.ops.maxsim._problem import Problem, no_winner
from tilefold.ops.maxsim._triton.backward import ddocuments_kernel, dqueries_kernel, dqueries_row_kernel
from tilefold.ops.maxsim._triton.launch import (
    PAIRINGS,
    as_bytes,
    contiguous,
    layout_flags,
    row_scales,
)
from tilefold.ops.maxsim._triton.norms import unit_gradient_kernel
from tilefold.ops.maxsim._triton.rows import cdiv, rows_constants, rows_grid
from tilefold.ops.maxsim._triton.smooth import smooth_ddocuments_kernel, smooth_dqueries_kernel
from tilefold.ops.maxsim._triton.winner_lists import ddocuments_listed_kernel
from tilefold.ops.maxsim.configs import BackwardConfig, backward_config

TILES_OF_PACKED = 4  # programs that share the tiles of a packed document, where lengths are not known
MANY_ROWS = 16384
MOST_PROGRAMS = 4096  # that keep a list of winners each; the rest of the work is dealt to them


@dataclass
class _Pass:
    """One backward pass: contiguous rows, their scales, the scores' gradient and what forward saved.

    ``row_query`` says which query a row of packed queries belongs to; ``largest`` is the largest gradient, by which
    fp16 products are scaled.
    """

    problem: Problem
    config: BackwardConfig
    queries: Tensor
    documents: Tensor
    scales: tuple[Tensor | None, Tensor | None]
    dscores: Tensor
    saved: Tensor
    row_query: Tensor | None = None
    largest: Tensor | None = None

    @property
    def sizes(self) -> tuple[int, ...]:
        p = self.problem
        return (
            self.queries.size(0), self.documents.size(0), p.n_queries, p.n_documents, p.query_length,
            p.document_length, max(p.group, 1), p.longest_query,
        )  # fmt: skip

    @property
    def strides(self) -> tuple[int, int]:
        """Of the scores' gradient, over queries and documents (or pairs)."""
        strides = self.dscores.stride()
        return (strides[0], strides[1]) if self.problem.pairing == "all" else (0, strides[0])

    def constants(self, warps: int, stages: int, **others: Any) -> dict[str, Any]:
        flags = layout_flags(self.problem) | others
        return flags | {"num_warps": warps, "num_stages": stages}

    def lists(self, side: int) -> tuple[Tensor | None, Tensor | None]:
        """The pairs of an index sorted by their query (0) or document (1), and where each one's begin."""
        index = self.problem.index
        if index is None:
            return None, None
        count = self.problem.n_documents if side else self.problem.n_queries
        ordered, order = index[:, side].sort(stable=True)
        first = torch.searchsorted(ordered, torch.arange(count + 1, dtype=ordered.dtype, device=ordered.device))
        return order, first


def _planned(
    run: _Pass, name: str, make: Callable[[_Pass], tuple[Launcher, Grid, tuple[Any, ...]]]
) -> tuple[Launcher, Grid, tuple[Any, ...]]:
    """A kernel with its constants, its programs and its numbers, worked out once for problems of these shapes."""
    plans = run.problem.plans
    if plans is None:
        return make(run)
    key = (name, run.queries.shape, run.documents.shape, run.strides, run.saved.dtype)
    plan: tuple[Launcher, Grid, tuple[Any, ...]] | None = plans.get(key)
    if plan is None:
        plan = plans[key] = make(run)
    return plan


def backward(
    problem: Problem, dscores: Tensor, saved: Tensor, need_queries: bool, need_documents: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of queries and documents, in their dtypes."""
    queries, documents = problem.queries.contiguous(), problem.documents.contiguous()
    config = backward_config(queries.dtype, queries.device)
    run = _Pass(problem, config, queries, documents, row_scales(problem, queries, documents), dscores, saved)
    if problem.pairing == "all" and problem.cu_queries is not None:
        every_row = torch.arange(queries.size(0), dtype=problem.cu_queries.dtype, device=queries.device)
        run.row_query = torch.searchsorted(problem.cu_queries[1:].contiguous(), every_row, right=True).clamp_(
            max=problem.n_queries - 1
        )
    if queries.dtype == torch.float16 and dscores.numel() and (need_documents or problem.temperature):
        run.largest = dscores.abs().amax()
    # documents first: their lists of winners are gone when the queries' gradient is allocated
    ddocuments = _gradient(run, documents, run.scales[1], _ddocuments) if need_documents else None
    dqueries = _gradient(run, queries, run.scales[0], _dqueries) if need_queries else None
    return dqueries, ddocuments


def _gradient(run: _Pass, rows: Tensor, scale: Tensor | None, fill: Any) -> Tensor:
    normalize = run.problem.normalize and scale is not None
    # a unit vector's gradient is projected in fp32, before the only rounding
    grad = torch.empty(rows.shape, dtype=torch.float32 if normalize else rows.dtype, device=rows.device)
    if run.saved.numel() == 0 or run.problem.cu_queries is not None or run.problem.cu_documents is not None:
        grad.zero_()  # rows that no sequence holds, should offsets be broken
    if run.saved.numel():
        fill(run, grad)
    if not normalize:
        return grad
    out = torch.empty_like(rows)
    launch(unit_gradient_kernel, rows_grid(rows), (rows, scale, grad, out, rows.size(0)), rows_constants(rows))
    return out


def _dqueries(run: _Pass, out: Tensor) -> None:
    p, config = run.problem, run.config
    if p.pairing == "all" and not p.temperature and run.queries.size(0) <= config.few_rows:
        kernel, grid, numbers = _planned(run, "dqueries of few rows", _plan_dquery_rows)
        layout = (contiguous(p.cu_documents), run.row_query)
        kernel(grid, (run.dscores, run.saved, run.documents, *run.scales, *layout, out, *numbers))
        return
    offsets = (contiguous(p.cu_queries), contiguous(p.cu_documents), run.row_query, *run.lists(0), contiguous(p.index))
    if not p.temperature:
        kernel, grid, numbers = _planned(run, "dqueries", _plan_dqueries)
        kernel(grid, (run.dscores, run.saved, run.documents, *run.scales, *offsets, out, *numbers))
        return
    launch(
        smooth_dqueries_kernel,
        _blocks_of_queries(run, config.smooth_r, config.block_dd),
        (
            run.dscores, run.saved, run.queries, run.documents, *run.scales, run.largest, as_bytes(p.document_mask),
            *offsets, out, *run.sizes, *run.strides, 1.0 / p.temperature,
        ),
        run.constants(
            config.smooth_warps, config.smooth_stages, PAIRING=PAIRINGS[p.pairing], BLOCK_Q=config.smooth_r,
            BLOCK_T=config.smooth_t, BLOCK_K=config.smooth_k, BLOCK_D=config.block_dd,
            HAS_DMASK=p.document_mask is not None, PRECISION=config.precision, HAS_LARGEST=run.largest is not None,
        ),
    )  # fmt: skip


def _plan_dquery_rows(run: _Pass) -> tuple[Launcher, Grid, tuple[Any, ...]]:
    p, config, n_rows = run.problem, run.config, run.queries.size(0)
    constants = run.constants(
        config.warps_few, config.stages_q, BLOCK_N=config.block_n, BLOCK_D=config.block_d,
        NO_WINNER=no_winner(run.saved.dtype),
    )  # fmt: skip
    sizes = (n_rows, run.documents.size(0), p.n_documents, p.query_length, p.document_length, *run.strides)
    return launcher(dqueries_row_kernel, constants), (n_rows, cdiv(run.queries.size(1), config.block_d), 1), sizes


def _plan_dqueries(run: _Pass) -> tuple[Launcher, Grid, tuple[Any, ...]]:
    config = run.config
    constants = run.constants(
        config.warps_q, config.stages_q, PAIRING=PAIRINGS[run.problem.pairing], BLOCK_R=config.block_r,
        BLOCK_D=config.block_d, NO_WINNER=no_winner(run.saved.dtype),
    )  # fmt: skip
    grid = _blocks_of_queries(run, config.block_r, config.block_d)
    return launcher(dqueries_kernel, constants), grid, (*run.sizes, *run.strides)


def _blocks_of_queries(run: _Pass, block_r: int, block_d: int) -> Grid:
    p = run.problem
    blocks = cdiv(run.queries.size(0), block_r) if p.pairing == "all" else p.n_queries
    return blocks, cdiv(run.queries.size(1), block_d), 1


def _ddocuments(run: _Pass, out: Tensor) -> None:
    p, config = run.problem, run.config
    if p.pairing == "all" and not p.temperature:
        _ddocuments_listed(run, out)
        return
    block_t = config.smooth_t if p.temperature else config.block_t
    slices = cdiv(p.document_length, block_t) if p.cu_documents is None else TILES_OF_PACKED
    blocks_d = cdiv(run.queries.size(1), config.block_dd)
    offsets = (contiguous(p.cu_queries), contiguous(p.cu_documents))
    lists = (*run.lists(1), contiguous(p.index))
    grid = (p.n_documents, slices, blocks_d)
    if p.temperature:
        launch(
            smooth_ddocuments_kernel,
            grid,
            (
                run.dscores, run.saved, run.queries, run.documents, *run.scales, run.largest, as_bytes(p.query_mask),
                as_bytes(p.document_mask), *offsets, run.row_query, *lists, out, *run.sizes, slices, *run.strides,
                1.0 / p.temperature,
            ),
            run.constants(
                config.smooth_warps, config.smooth_stages, PAIRING=PAIRINGS[p.pairing], BLOCK_Q=config.smooth_r,
                BLOCK_T=block_t, BLOCK_K=config.smooth_k, BLOCK_D=config.block_dd,
                HAS_QMASK=p.query_mask is not None, HAS_DMASK=p.document_mask is not None,
                PRECISION=config.precision, HAS_LARGEST=run.largest is not None,
            ),
        )  # fmt: skip
        return
    launch(
        ddocuments_kernel,
        grid,
        (
            run.dscores, run.saved, run.queries, run.scales[0], run.largest, *offsets, *lists, out, *run.sizes, slices,
            run.strides[1],
        ),
        run.constants(
            config.warps_d, config.stages_d, PAIRING=PAIRINGS[p.pairing], BLOCK_T=block_t, BLOCK_E=config.block_e,
            BLOCK_D=config.block_dd, HAS_LARGEST=run.largest is not None, NO_WINNER=no_winner(run.saved.dtype),
            PRECISION=config.precision,
        ),
    )  # fmt: skip


def _ddocuments_listed(run: _Pass, out: Tensor) -> None:
    kernel, grid, numbers = _planned(run, "ddocuments", _plan_listed)
    capacity, *sizes = numbers
    lists = torch.empty(grid[0] * grid[1] * capacity, dtype=torch.int32, device=out.device)
    kernel(
        grid,
        (
            run.dscores, run.saved, run.queries, run.scales[0], run.largest, contiguous(run.problem.cu_documents),
            run.row_query, lists, out, *sizes,
        ),
    )  # fmt: skip


def _plan_listed(run: _Pass) -> tuple[Launcher, Grid, tuple[Any, ...]]:
    p, config, n_rows = run.problem, run.config, run.queries.size(0)
    slices = TILES_OF_PACKED if p.cu_documents is not None else cdiv(p.document_length, config.list_t)
    block_s = config.list_s_many if n_rows >= MANY_ROWS else config.list_s
    capacity = 2 * block_s
    constants = run.constants(
        config.list_warps, config.list_stages, BLOCK_T=config.list_t, BLOCK_S=block_s, BLOCK_E=config.list_e,
        BLOCK_D=config.block_dd, CAPACITY=capacity, ALIGNED=n_rows % 8 == 0, HAS_LARGEST=run.largest is not None,
        NO_WINNER=no_winner(run.saved.dtype), PRECISION=config.precision,
    )  # fmt: skip
    grid = (min(p.n_documents * slices, MOST_PROGRAMS), cdiv(run.queries.size(1), config.block_dd), 1)
    sizes = (n_rows, run.documents.size(0), p.n_documents, slices, p.query_length, p.document_length, *run.strides)
    return launcher(ddocuments_listed_kernel, constants), grid, (capacity, *sizes)
