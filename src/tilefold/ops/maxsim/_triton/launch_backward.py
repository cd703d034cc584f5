"""Plans of the backward kernels, and their launch."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilefold.ops._shared._triton.launch import Grid, Step
from tilefold.ops._shared._triton.tensors import cdiv
from tilefold.ops._shared.call_cache import CallCache, Key, call_key, is_aligned
from tilefold.ops._shared.winners import no_winner
from tilefold.ops.maxsim._problem import Operands, Options, Problem
from tilefold.ops.maxsim._triton import plan as at
from tilefold.ops.maxsim._triton.backward import ddocuments_kernel, dqueries_kernel, dqueries_row_kernel
from tilefold.ops.maxsim._triton.launch import PAIRINGS, copies, layout_flags
from tilefold.ops.maxsim._triton.plan import Derive, Make, Plan, Run, Stage
from tilefold.ops.maxsim._triton.row_queries import row_queries
from tilefold.ops.maxsim._triton.rows import RowFacts, inverse_norms, row_facts, unit_gradient
from tilefold.ops.maxsim._triton.smooth import smooth_ddocuments_kernel, smooth_dqueries_kernel
from tilefold.ops.maxsim._triton.winner_lists import ddocuments_listed_kernel
from tilefold.ops.maxsim.configs import BackwardConfig, backward_config

MAX_SLICES = 65535  # of a grid's second axis; programs go on to further tiles
TILES_OF_PACKED = 4  # programs that share the tiles of a packed document, where lengths are not known
MANY_ROWS = 16384
MAX_PROGRAMS = 4096  # that keep a list of winners each; the rest of the work is dealt to them

Needs = tuple[bool, bool]  # whether queries and documents want a gradient
GRADIENT_PLANS: CallCache[Plan] = CallCache()


def backward(
    operands: Operands,
    options: Options,
    dscores: Tensor,
    saved: Tensor,
    needs: Needs,
    key: Key | None = None,
    divisor: float = 1.0,
    facts: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of queries and documents, in their shapes and dtypes; ``None`` where not needed.

    ``key`` is that of a call with a plan; that of any other is made here. ``dscores`` are those of scores that were
    divided by ``divisor``, and ``facts`` are those of rows, from the plan of the call.
    """
    tensors = (*operands, saved, dscores, facts)
    if key is None:
        key = call_key(tensors, (options, needs, divisor))
    plan = GRADIENT_PLANS.find(key)
    if plan is None:
        problem, known = Problem.of(operands, options), key is not None and is_aligned(key)
        plan = plan_backward(problem, operands, dscores, saved, needs, divisor, known, facts is not None)
        if key is not None:
            GRADIENT_PLANS.keep(key, plan)
    dqueries, ddocuments = plan(*tensors)
    return dqueries, ddocuments


def plan_backward(
    problem: Problem,
    operands: Operands,
    dscores: Tensor,
    saved: Tensor,
    needs: Needs,
    divisor: float,
    aligned: bool,
    found: bool,
) -> Plan:
    """How gradients are computed of tensors like these.

    Args:
        problem: the operands as rows; only what makes a call's key is looked at.
        operands, dscores, saved: as the plan will get them.
        needs: which gradients are asked for.
        divisor: of the scores.
        aligned: whether all these tensors are known to begin at multiples of 16 bytes.
        found: whether forward left the facts of rows.
    """
    config = backward_config(problem.queries.dtype, problem.queries.device)
    planning = _Planning(problem, config, saved.dtype, dscores, 1.0 / divisor)
    stages = copies(operands, masks=bool(problem.temperature))
    if not saved.is_contiguous():
        stages.append(Derive(at.SAVED, Tensor.contiguous, at.SAVED))
    stages += planning.settle_strides(aligned)
    if saved.numel():
        stages += planning.shared(needs, found)
    # documents first: their lists of winners are gone when the queries' gradient is allocated
    for side, rows in ((1, operands.documents), (0, operands.queries)):
        if needs[side]:
            stages += planning.gradient(side, rows, saved.numel() == 0)
    return Plan(tuple(stages), (at.DQUERIES, at.DDOCUMENTS), aligned)


def _largest(dscores: Tensor) -> Tensor:
    largest: Tensor = torch.linalg.vector_norm(dscores, math.inf)
    return largest


def _sorted_pairs(side: int, index: Tensor) -> Tensor:
    """The pairs of an index in the order of their queries (0) or documents (1)."""
    return index[:, side].sort(stable=True).indices


def _first_pairs(side: int, count: int, index: Tensor, order: Tensor) -> Tensor:
    """Where the pairs of each of ``count`` queries or documents begin in that order, and where the last one's end."""
    which = torch.arange(count + 1, dtype=index.dtype, device=index.device)
    # without sorter=, which has its values checked on the host
    return torch.searchsorted(index[:, side][order], which)


@dataclass
class _Planning:
    """One backward pass, while it is planned.

    Attributes:
        problem, config: what is differentiated, and with which tiles.
        saved_dtype: of winners, or smooth maxima.
        dscores: the scores' gradient, or one laid out like it.
        factor: of the gradients, for scores that were divided.
    """

    problem: Problem
    config: BackwardConfig
    saved_dtype: torch.dtype
    dscores: Tensor
    factor: float
    strides: tuple[int, int] = (0, 0)  # of dscores over queries, and over documents (or pairs)
    has_largest: bool = False

    def settle_strides(self, aligned: bool) -> list[Stage]:
        """Find :attr:`strides`; the scores' gradient is copied where it has none that kernels can follow."""
        dscores, everything = self.dscores, self.problem.pairing == "all"
        strides = dscores.stride()
        usable = everything or dscores.dim() == 1 or dscores.is_contiguous() or not any(strides)
        if not aligned or not usable:  # a copy at another address is contiguous
            self.strides = (dscores.size(1), 1) if everything else (0, 1)
            return [Derive(at.DSCORES, Tensor.contiguous, at.DSCORES)]
        self.strides = (strides[0], strides[1]) if everything else (0, strides[-1])
        return []

    def shared(self, needs: Needs, found: bool) -> list[Stage]:
        """What the gradients of both sides need; ``found``: forward left the facts of rows."""
        p, stages = self.problem, list[Stage]()
        if row_facts(p):
            stages.append(RowFacts(p, found))
        if p.normalize and not found:
            stages.append(inverse_norms(p))
        if p.pairing == "all" and p.cu_queries is not None and not found:
            stages.append(row_queries(p.queries.size(0), p.cu_queries.numel() - 1))
        if p.queries.dtype == torch.float16 and (needs[1] or p.temperature):  # by which fp16 products are scaled
            self.has_largest = True
            stages.append(Derive(at.LARGEST, _largest, at.DSCORES))
        return stages

    def gradient(self, side: int, rows: Tensor, empty: bool) -> list[Stage]:
        """The gradient of queries (0) or documents (1), ``rows`` in the caller's shape."""
        p, place = self.problem, at.DDOCUMENTS if side else at.DQUERIES
        # rows that no sequence holds, should offsets be broken, have none; those of queries of all pairs are written
        packed = p.cu_documents is not None if side else p.cu_queries is not None and p.pairing != "all"
        fill = 0.0 if empty or packed else None
        if empty:
            return [Make(place, rows, rows.shape, rows.dtype, fill)]
        # a unit vector's gradient is projected in fp32, before the only rounding
        apart = p.normalize and not self._projects(side)
        written = at.WIDE if apart else place
        stages: list[Stage] = [Make(written, rows, rows.shape, torch.float32 if apart else rows.dtype, fill)]
        if p.index is not None:
            count = p.n_documents if side else p.n_queries
            stages.append(Derive(at.ORDER, functools.partial(_sorted_pairs, side), at.INDEX))
            stages.append(Derive(at.FIRST, functools.partial(_first_pairs, side, count), at.INDEX, at.ORDER))
        stages += self._of_documents(written) if side else [self._of_queries(written)]
        if apart:
            stages.append(Make(place, rows, rows.shape, rows.dtype))
            sides = (p.documents, at.DOCUMENTS, at.DOCUMENT_SCALE) if side else (p.queries, at.QUERIES, at.QUERY_SCALE)
            stages.append(unit_gradient(sides[0], (*sides[1:], written, place)))
        return stages

    def _projects(self, side: int) -> bool:
        """Whether the kernel itself makes gradients of rows of those of unit vectors: one that has whole rows."""
        p, block = self.problem, self.config.block_dd if side else self.config.block_d
        if not p.normalize or p.temperature or p.pairing != "all" or p.queries.size(1) > block:
            return False
        return side == 1 or self._has_few_rows

    @property
    def _has_few_rows(self) -> bool:
        return self.problem.pairing == "all" and self.problem.queries.size(0) <= self.config.few_rows

    def _of_queries(self, out: int) -> Run:
        if self.problem.temperature:
            return self._smooth_queries(out)
        return self._few_queries(out) if self._has_few_rows else self._queries(out)

    def _of_documents(self, out: int) -> list[Stage]:
        if self.problem.temperature:
            return [self._smooth_documents(out)]
        return self._documents_of_lists(out) if self.problem.pairing == "all" else [self._documents(out)]

    def _constants(self, warps: int, stages: int, **others: Any) -> dict[str, Any]:
        return layout_flags(self.problem) | others | {"num_warps": warps, "num_stages": stages}

    @property
    def _sizes(self) -> tuple[int, ...]:
        p = self.problem
        return (
            p.queries.size(0), p.documents.size(0), p.n_queries, p.n_documents, p.query_length, p.document_length,
            max(p.group, 1), p.longest_query,
        )  # fmt: skip

    def _few_queries(self, out: int) -> Run:
        p, config, count = self.problem, self.config, self.problem.queries.size(0)
        constants = self._constants(
            config.warps_few, config.stages_q, BLOCK_N=config.block_n, BLOCK_D=config.block_d,
            NO_WINNER=no_winner(self.saved_dtype), PROJECTS=self._projects(0),
        )  # fmt: skip
        sizes = (count, p.documents.size(0), p.n_documents, p.query_length, p.document_length)
        numbers = (*sizes, *self.strides, self.factor)
        grid = (count, cdiv(p.queries.size(1), config.block_d), 1)
        places = (
            at.DSCORES, at.SAVED, at.QUERIES, at.DOCUMENTS, at.QUERY_SCALE, at.DOCUMENT_SCALE, at.CU_DOCUMENTS,
            at.ROW_QUERY, out,
        )  # fmt: skip
        return Run(Step(dqueries_row_kernel, grid, numbers, constants), places)

    def _queries(self, out: int) -> Run:
        config = self.config
        constants = self._constants(
            config.warps_q, config.stages_q, PAIRING=PAIRINGS[self.problem.pairing], BLOCK_R=config.block_r,
            BLOCK_D=config.block_d, NO_WINNER=no_winner(self.saved_dtype),
        )  # fmt: skip
        grid = self._blocks_of_queries(config.block_r, config.block_d)
        places = (at.DSCORES, at.SAVED, at.DOCUMENTS, at.QUERY_SCALE, at.DOCUMENT_SCALE, *_OFFSETS, out)
        return Run(Step(dqueries_kernel, grid, (*self._sizes, *self.strides, self.factor), constants), places)

    def _smooth_queries(self, out: int) -> Run:
        p, config = self.problem, self.config
        constants = self._smooth_constants(HAS_DMASK=p.document_mask is not None)
        numbers = (*self._sizes, *self.strides, 1.0 / p.temperature, self.factor)
        grid = self._blocks_of_queries(config.smooth_r, config.block_dd)
        places = (*_SMOOTH, at.DOCUMENT_MASK, *_OFFSETS, out)
        return Run(Step(smooth_dqueries_kernel, grid, numbers, constants), places)

    def _smooth_constants(self, **others: Any) -> dict[str, Any]:
        config = self.config
        if config.smooth_registers is not None:
            others["maxnreg"] = config.smooth_registers
        return self._constants(
            config.smooth_warps, config.smooth_stages, PAIRING=PAIRINGS[self.problem.pairing],
            BLOCK_Q=config.smooth_r, BLOCK_T=config.smooth_t, BLOCK_K=config.smooth_k, BLOCK_D=config.block_dd,
            PRECISION=config.precision, HAS_LARGEST=self.has_largest, **others,
        )  # fmt: skip

    def _blocks_of_queries(self, block_r: int, block_d: int) -> Grid:
        p = self.problem
        blocks = cdiv(p.queries.size(0), block_r) if p.pairing == "all" else p.n_queries
        return blocks, cdiv(p.queries.size(1), block_d), 1

    def _slices(self, block_t: int) -> int:
        """Programs that share a document's tiles."""
        p = self.problem
        return min(cdiv(p.document_length, block_t), MAX_SLICES) if p.cu_documents is None else TILES_OF_PACKED

    def _documents(self, out: int) -> Run:
        p, config = self.problem, self.config
        constants = self._constants(
            config.warps_d, config.stages_d, PAIRING=PAIRINGS[p.pairing], BLOCK_T=config.block_t,
            BLOCK_E=config.block_e, BLOCK_D=config.block_dd, HAS_LARGEST=self.has_largest,
            NO_WINNER=no_winner(self.saved_dtype), PRECISION=config.precision,
        )  # fmt: skip
        slices = self._slices(config.block_t)
        grid = (p.n_documents, slices, cdiv(p.queries.size(1), config.block_dd))
        places = (
            at.DSCORES, at.SAVED, at.QUERIES, at.QUERY_SCALE, at.LARGEST, at.CU_QUERIES, at.CU_DOCUMENTS, at.ORDER,
            at.FIRST, at.INDEX, out,
        )  # fmt: skip
        numbers = (*self._sizes, slices, self.strides[1], self.factor)
        return Run(Step(ddocuments_kernel, grid, numbers, constants), places)

    def _smooth_documents(self, out: int) -> Run:
        p, config = self.problem, self.config
        constants = self._smooth_constants(HAS_QMASK=p.query_mask is not None, HAS_DMASK=p.document_mask is not None)
        slices = self._slices(config.smooth_t)
        grid = (p.n_documents, slices, cdiv(p.queries.size(1), config.block_dd))
        numbers = (*self._sizes, slices, *self.strides, 1.0 / p.temperature, self.factor)
        places = (*_SMOOTH, at.QUERY_MASK, at.DOCUMENT_MASK, *_OFFSETS, out)
        return Run(Step(smooth_ddocuments_kernel, grid, numbers, constants), places)

    def _documents_of_lists(self, out: int) -> list[Stage]:
        p, config, count = self.problem, self.config, self.problem.queries.size(0)
        slices = self._slices(config.list_t)
        block_s = config.list_s_many if count >= MANY_ROWS else config.list_s
        capacity = 2 * block_s
        constants = self._constants(
            config.list_warps, config.list_stages, BLOCK_T=config.list_t, BLOCK_S=block_s, BLOCK_E=config.list_e,
            BLOCK_D=config.block_dd, CAPACITY=capacity, ALIGNED=count % 8 == 0, HAS_LARGEST=self.has_largest,
            NO_WINNER=no_winner(self.saved_dtype), PRECISION=config.precision, PROJECTS=self._projects(1),
        )  # fmt: skip
        grid = (min(p.n_documents * slices, MAX_PROGRAMS), cdiv(p.queries.size(1), config.block_dd), 1)
        sizes = (count, p.documents.size(0), p.n_documents, slices, p.query_length, p.document_length)
        places = (
            at.DSCORES, at.SAVED, at.QUERIES, at.DOCUMENTS, at.QUERY_SCALE, at.DOCUMENT_SCALE, at.LARGEST,
            at.CU_DOCUMENTS, at.ROW_QUERY, at.LISTS, out,
        )  # fmt: skip
        step = Step(ddocuments_listed_kernel, grid, (*sizes, *self.strides, self.factor), constants)
        return [
            Make(at.LISTS, p.queries, (grid[0] * grid[1] * capacity,), torch.int32),
            Run(step, places, last=(at.LISTS,)),
        ]


_OFFSETS = (at.CU_QUERIES, at.CU_DOCUMENTS, at.ROW_QUERY, at.ORDER, at.FIRST, at.INDEX)
_SMOOTH = (
    at.DSCORES, at.SAVED, at.QUERIES, at.DOCUMENTS, at.QUERY_SCALE, at.DOCUMENT_SCALE, at.LARGEST,
)  # fmt: skip
