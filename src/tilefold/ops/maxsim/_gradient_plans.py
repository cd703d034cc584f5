"""Launch plans of MaxSim's gradients, for tensors of these layouts."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilefold.ops._shared._triton.tensors import cdiv
from tilefold.ops._shared.internals import Grid
from tilefold.ops._shared.plan import Plan, Setting
from tilefold.ops._shared.winners import no_winner
from tilefold.ops.maxsim._problem import MaxSimOptions, MaxSimSaved, Problem
from tilefold.ops.maxsim._steps import PAIRINGS, Steps, layout_flags
from tilefold.ops.maxsim._triton.backward import ddocuments_kernel, dqueries_kernel, dqueries_row_kernel
from tilefold.ops.maxsim._triton.norms import unit_gradient_kernel
from tilefold.ops.maxsim._triton.smooth import smooth_ddocuments_kernel, smooth_dqueries_kernel
from tilefold.ops.maxsim._triton.winner_lists import ddocuments_listed_kernel
from tilefold.ops.maxsim.configs import BackwardConfig, backward_config

MAX_SLICES = 65535  # of a grid's second axis; programs go on to further tiles
TILES_OF_PACKED = 4  # programs that share the tiles of a packed document, where lengths are not known
MANY_ROWS = 16384
MAX_PROGRAMS = 4096  # that keep a list of winners each; the rest of the work is dealt to them
SMOOTH = "dscores saved queries documents query_factors document_factors largest"


def backward(
    dscores: Tensor, saved: MaxSimSaved, options: MaxSimOptions, needs: tuple[bool, ...], setting: Setting
) -> Plan:
    """The gradients of queries and documents."""
    p = Problem.of(saved.tensors, options)
    steps = Steps(p, setting)
    if p.empty or saved.saved is None or saved.saved.numel() == 0:
        steps.fills |= {"dqueries": 0, "ddocuments": 0}
        return steps.plan()
    given = {name: tensor for name, tensor in saved._asdict().items() if tensor is None or tensor.numel()}
    # what forward did not leave is empty in the registered operator
    steps.stands |= {name: f"no_{name}" for name in saved._fields if name not in given}
    strides, given["dscores"] = _strides(p, dscores, setting.aligned)
    if not p.temperature:
        del given["query_mask"], given["document_mask"]
    steps.take(given)
    steps.given("dscores", "dqueries", "ddocuments")
    config = backward_config(setting.capability, p.queries.dtype, setting.tf32)
    has_largest = p.queries.dtype == torch.float16 and (needs[1] or p.temperature > 0)  # scales fp16 products
    gradients = _Gradients(steps, p, config, saved.saved.dtype, strides, 1.0 / p.divisor, has_largest)
    gradients.add_shared(saved)
    for side in (1, 0):  # documents first: their lists of winners are gone when the queries' gradient is made
        if needs[side]:
            gradients.add(side)
    return steps.plan()


def _strides(p: Problem, dscores: Tensor, aligned: bool) -> tuple[tuple[int, int], Tensor | None]:
    """Strides of the scores' gradient over queries, and over documents or pairs; it, where it must be contiguous."""
    everything, strides = p.pairing == "all", dscores.stride()
    usable = everything or dscores.dim() == 1 or dscores.is_contiguous() or not any(strides)
    if not aligned or not usable:  # a copy at another address is contiguous
        return ((dscores.size(1), 1) if everything else (0, 1)), dscores
    return ((strides[0], strides[1]) if everything else (0, strides[-1])), None


def _largest(dscores: Tensor) -> Tensor:
    largest: Tensor = torch.linalg.vector_norm(dscores, math.inf)
    return largest


def _sorted_pairs(side: int, index: Tensor) -> Tensor:
    """The pairs of an index in the order of their queries (0) or documents (1)."""
    return index[:, side].sort(stable=True).indices


def _first_pairs(side: int, count: int, index: Tensor, order: Tensor) -> Tensor:
    """Offsets of the pairs of each of ``count`` queries or documents in that order, and the end of the last one's."""
    which = torch.arange(count + 1, dtype=index.dtype, device=index.device)
    # without sorter=, which has its values checked on the host
    return torch.searchsorted(index[:, side][order], which)


@dataclass
class _Gradients:
    """One backward pass, while it is planned.

    Attributes:
        steps: that are added to.
        problem, config: what is differentiated, and with which tiles.
        saved_dtype: of winners, or smooth maxima.
        strides: of the scores' gradient over queries, and over documents (or pairs).
        factor: of the gradients, for scores that were divided.
        has_largest: whether the largest gradient of a score is known.
    """

    steps: Steps
    problem: Problem
    config: BackwardConfig
    saved_dtype: torch.dtype
    strides: tuple[int, int]
    factor: float
    has_largest: bool

    def add_shared(self, saved: MaxSimSaved) -> None:
        """Add steps for what both sides' gradients need and forward did not leave."""
        p, steps = self.problem, self.steps
        if p.normalize and (saved.query_norms is None or saved.query_norms.numel() == 0):
            sides = ("query_factors", p.queries), ("document_factors", p.documents)
            steps.inverse_norms(*[steps.buffer(name, (side.size(0),), torch.float32) for name, side in sides])
        elif p.normalize:
            steps.stands |= {"query_factors": "query_norms", "document_factors": "document_norms"}
        ragged = p.pairing == "all" and p.cu_queries is not None
        if ragged and (saved.row_query is None or saved.row_query.numel() == 0):
            steps.row_queries()
        if self.has_largest:
            steps.torch("largest", _largest, "dscores", first=True)

    def add(self, side: int) -> None:
        """The gradient of queries (0) or documents (1)."""
        p, steps = self.problem, self.steps
        name, rows = ("documents", p.documents) if side else ("queries", p.queries)
        # rows that no sequence holds, should offsets be broken, have none; those of queries of all pairs are written
        packed = p.cu_documents is not None if side else p.cu_queries is not None and p.pairing != "all"
        # a unit vector's gradient is projected in fp32, before the only rounding
        apart = p.normalize and not self._projects(side)
        out = steps.buffer(f"unit_d{name}", rows.shape, torch.float32) if apart else f"d{name}"
        if packed and apart:
            steps.torch(out, Tensor.zero_, out)
        elif packed:
            steps.fills[out] = 0
        if p.index is not None:
            count = p.n_documents if side else p.n_queries
            steps.torch(f"order{side}", functools.partial(_sorted_pairs, side), "pairs")
            steps.torch(f"first{side}", functools.partial(_first_pairs, side, count), f"pairs order{side}")
        if p.temperature:
            add = self._add_smooth_documents if side else self._add_smooth_queries
        elif side:
            add = self._add_documents_of_lists if p.pairing == "all" else self._add_documents
        else:
            add = self._add_few_queries if self._has_few_rows else self._add_queries
        add(out)
        if apart:
            factors = "document_factors" if side else "query_factors"
            steps.over_rows(unit_gradient_kernel, f"{name} {factors} {out} d{name}", rows.size(0))

    def _projects(self, side: int) -> bool:
        """Whether the kernel itself makes gradients of rows of those of unit vectors: one that has whole rows."""
        p, block = self.problem, self.config.block_dd if side else self.config.block_d
        if not p.normalize or p.temperature or p.pairing != "all" or p.queries.size(1) > block:
            return False
        return side == 1 or self._has_few_rows

    @property
    def _has_few_rows(self) -> bool:
        return self.problem.pairing == "all" and self.problem.queries.size(0) <= self.config.few_rows

    def _constants(self, warps: int, stages: int, **others: Any) -> dict[str, Any]:
        return layout_flags(self.problem) | others | {"num_warps": warps, "num_stages": stages}

    @property
    def _sizes(self) -> tuple[int, ...]:
        p = self.problem
        return (
            p.queries.size(0), p.documents.size(0), p.n_queries, p.n_documents, p.query_length, p.document_length,
            max(p.group, 1), p.longest_query,
        )  # fmt: skip

    def _add_few_queries(self, out: str) -> None:
        p, config, count = self.problem, self.config, self.problem.queries.size(0)
        constants = self._constants(
            config.warps_few, config.stages_q, BLOCK_N=config.block_n, BLOCK_D=config.block_d,
            NO_WINNER=no_winner(self.saved_dtype), PROJECTS=self._projects(0),
        )  # fmt: skip
        sizes = (count, p.documents.size(0), p.n_documents, p.query_length, p.document_length)
        numbers = (*sizes, *self.strides, self.factor)
        grid = (count, cdiv(p.queries.size(1), config.block_d), 1)
        names = f"dscores saved queries documents query_factors document_factors cu_documents row_query {out}"
        self.steps.launch(dqueries_row_kernel, grid, names, numbers, constants)

    def _add_queries(self, out: str) -> None:
        config = self.config
        constants = self._constants(
            config.warps_q, config.stages_q, PAIRING=PAIRINGS[self.problem.pairing], BLOCK_R=config.block_r,
            BLOCK_D=config.block_d, NO_WINNER=no_winner(self.saved_dtype),
        )  # fmt: skip
        grid = self._blocks_of_queries(config.block_r, config.block_d)
        names = f"dscores saved documents query_factors document_factors {_between(0)} {out}"
        self.steps.launch(dqueries_kernel, grid, names, (*self._sizes, *self.strides, self.factor), constants)

    def _add_smooth_queries(self, out: str) -> None:
        p, config = self.problem, self.config
        constants = self._smooth_constants(HAS_DMASK=p.document_mask is not None)
        numbers = (*self._sizes, *self.strides, 1.0 / p.temperature, self.factor)
        grid = self._blocks_of_queries(config.smooth_r, config.block_dd)
        names = f"{SMOOTH} document_mask {_between(0)} {out}"
        self.steps.launch(smooth_dqueries_kernel, grid, names, numbers, constants)

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

    def _add_documents(self, out: str) -> None:
        p, config = self.problem, self.config
        constants = self._constants(
            config.warps_d, config.stages_d, PAIRING=PAIRINGS[p.pairing], BLOCK_T=config.block_t,
            BLOCK_E=config.block_e, BLOCK_D=config.block_dd, HAS_LARGEST=self.has_largest,
            NO_WINNER=no_winner(self.saved_dtype), PRECISION=config.precision,
        )  # fmt: skip
        slices = self._slices(config.block_t)
        grid = (p.n_documents, slices, cdiv(p.queries.size(1), config.block_dd))
        names = f"dscores saved queries query_factors largest cu_queries cu_documents order1 first1 pairs {out}"
        numbers = (*self._sizes, slices, self.strides[1], self.factor)
        self.steps.launch(ddocuments_kernel, grid, names, numbers, constants)

    def _add_smooth_documents(self, out: str) -> None:
        p, config = self.problem, self.config
        constants = self._smooth_constants(HAS_QMASK=p.query_mask is not None, HAS_DMASK=p.document_mask is not None)
        slices = self._slices(config.smooth_t)
        grid = (p.n_documents, slices, cdiv(p.queries.size(1), config.block_dd))
        numbers = (*self._sizes, slices, *self.strides, 1.0 / p.temperature, self.factor)
        names = f"{SMOOTH} query_mask document_mask {_between(1)} {out}"
        self.steps.launch(smooth_ddocuments_kernel, grid, names, numbers, constants)

    def _add_documents_of_lists(self, out: str) -> None:
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
        self.steps.buffer("lists", (grid[0] * grid[1] * capacity,), torch.int32)
        sizes = (count, p.documents.size(0), p.n_documents, slices, p.query_length, p.document_length)
        names = (
            f"dscores saved queries documents query_factors document_factors largest cu_documents row_query lists {out}"
        )
        numbers = (*sizes, *self.strides, self.factor)
        self.steps.launch(ddocuments_listed_kernel, grid, names, numbers, constants)


def _between(side: int) -> str:
    return f"cu_queries cu_documents row_query order{side} first{side} pairs"
