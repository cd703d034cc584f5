"""Steps of a plan while it is made: names and the tensors that they stand for, copies, and passes over rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from tilefold.ops._shared._triton.offsets import int32_launch
from tilefold.ops._shared._triton.tensors import cdiv
from tilefold.ops._shared.calls import ALIGNMENT
from tilefold.ops._shared.internals import Grid, Tma
from tilefold.ops._shared.plan import Buffer, Instead, Launch, Plan, Setting, TorchStep, View
from tilefold.ops.maxsim._problem import Problem
from tilefold.ops.maxsim._triton.norms import inverse_norms_kernel
from tilefold.ops.maxsim._triton.row_queries import row_query_kernel

PAIRINGS = {"all": 0, "aligned": 1, "grouped": 1, "index": 2}
BLOCK_ROWS, BLOCK_COLUMNS = 16, 128  # of kernels that go over rows once
ROW_QUERIES = 256  # rows that a program finds the query of
OFFSETS = ("cu_queries", "cu_documents", "pairs")


class Steps:
    """The steps of a plan in the making. Names that no tensor and no buffer has stand for ``None``.

    Args:
        problem: that is scored, or differentiated.
        setting: of the plan.

    Attributes:
        stands: by the name that launches are written with, the name that the plan has for it.
    """

    def __init__(self, problem: Problem, setting: Setting) -> None:
        self.problem, self.setting = problem, setting
        self.stands: dict[str, str] = {}
        self.fills: dict[str, float] = {}
        self._buffers: dict[str, Buffer | View | None] = {}
        self._copies: list[Launch | TorchStep] = []
        self._steps: list[Launch | TorchStep] = []
        self._known: set[str] = set()

    def take(self, tensors: Mapping[str, Tensor | None]) -> None:
        """Bring tensors to the form that kernels read: contiguous from a multiple of 16 bytes on, offsets in int32."""
        for name, tensor in tensors.items():
            if tensor is None:
                continue
            self._known.add(name)
            if not self.setting.aligned:  # a copy costs less than another build of a kernel, and adds up alike
                self._copies.append(TorchStep(name, _in_order, name))
            elif not tensor.is_contiguous():
                self._copies.append(TorchStep(name, Tensor.contiguous, name))
            if name in OFFSETS and tensor.dtype == torch.int64 and tensor.numel():
                narrow = self.buffer(f"narrow_{name}", tensor.shape, torch.int32)
                self._steps.append(int32_launch(name, narrow, tensor.numel()))
                self.stands[name] = narrow

    def given(self, *names: str) -> None:
        """Names of tensors that are there, and of results that are made."""
        self._known.update(names)

    def buffer(self, name: str, shape: Iterable[int], dtype: torch.dtype) -> str:
        """Scratch, by its name."""
        self._buffers[name] = Buffer(tuple(shape), dtype)
        return name

    def without(self, results: Iterable[str]) -> None:
        """Results that are not made."""
        self._buffers |= dict.fromkeys(results)

    def torch(self, makes: str, function: Any, names: str, first: bool = False) -> None:
        """A step of torch; ``first`` before all launches, of tensors that are given."""
        self._known.add(makes)
        steps = self._copies if first else self._steps
        steps.append(TorchStep(makes, function, " ".join(self._named(names))))

    def launch(
        self,
        kernel: Any,
        grid: Grid,
        names: str,
        numbers: tuple[int | float, ...],
        constants: dict[str, Any],
        tma: Mapping[str, Tma] | None = None,
        instead: Instead | None = None,
    ) -> None:
        """A launch with the tensors of these names."""
        named = self._named(names)
        self._buffers |= dict.fromkeys(name for name in named if name not in self._known | self._buffers.keys())
        self._steps.append(Launch(kernel, grid, " ".join(named), numbers, constants, tma or {}, instead))

    def over_rows(self, kernel: Any, names: str, *counts: int) -> None:
        """A launch that goes over rows of these counts once."""
        dim = self.problem.queries.size(1)
        constants = {"D": dim, "BLOCK_R": BLOCK_ROWS, "BLOCK_D": BLOCK_COLUMNS, "num_warps": 4, "num_stages": 3}
        self.launch(kernel, (sum(cdiv(count, BLOCK_ROWS) for count in counts), 1, 1), names, counts, constants)

    def inverse_norms(self, queries: str, documents: str) -> None:
        """``[Tq]`` and ``[Td]`` fp32 by which rows of norm 1 are made, in one launch, as buffers or results."""
        self.stands |= {"query_factors": queries, "document_factors": documents}
        counts = self.problem.queries.size(0), self.problem.documents.size(0)
        self.over_rows(inverse_norms_kernel, "queries documents query_factors document_factors", *counts)

    def row_queries(self) -> None:
        """``[Tq]`` int32 numbers of the queries that the offsets give rows to."""
        rows, count = self.problem.queries.size(0), self.problem.n_queries
        self.buffer("rows_query", (rows,), torch.int32)
        self.stands["row_query"] = "rows_query"
        constants = {"BLOCK": ROW_QUERIES, "num_warps": 4, "num_stages": 1}
        numbers = (rows, count, count.bit_length())
        self.launch(row_query_kernel, (cdiv(rows, ROW_QUERIES), 1, 1), "cu_queries row_query", numbers, constants)

    def plan(self) -> Plan:
        """All of them."""
        return Plan((*self._copies, *self._steps), self._buffers, self.fills)

    def _named(self, names: str) -> list[str]:
        return [self.stands.get(name, name) for name in names.split()]


def layout_flags(problem: Problem) -> dict[str, Any]:
    """The constants that every kernel takes."""
    return {
        "D": problem.queries.size(1),
        "UNIFORM_Q": problem.cu_queries is None,
        "UNIFORM_D": problem.cu_documents is None,
        "HAS_SCALE": problem.normalize or problem.document_scale is not None,
    }


def _in_order(tensor: Tensor) -> Tensor:
    if tensor.is_contiguous() and tensor.data_ptr() % ALIGNMENT == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)
