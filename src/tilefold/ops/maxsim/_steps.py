"""Steps of a plan while it is made: copies, names and what they stand for, launches by kernels' own names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from tilefold.ops._shared._triton.offsets import int32_launch
from tilefold.ops._shared._triton.tensors import cdiv
from tilefold.ops._shared.calls import ALIGNMENT
from tilefold.ops._shared.internals import Grid, Tma
from tilefold.ops._shared.plan import Buffer, Instead, Launch, Plan, Setting, TorchStep, View, arguments_of
from tilefold.ops.maxsim._problem import Problem
from tilefold.ops.maxsim._triton.norms import inverse_norms_kernel, row_query_kernel
from tilefold.ops.maxsim.configs import BY_TMA

BLOCK_ROWS, BLOCK_COLUMNS = 16, 128  # of kernels that go over rows once
ROW_QUERIES = 256  # rows that a program finds the query of
BY_POINTERS = Instead(BY_TMA, "Documents are read by pointers instead: the same scores, slower.")
OFFSETS = ("cu_queries", "cu_documents", "pairs")
TENSORS = {  # by their kernels' names
    "query_ptr": "queries", "doc_ptr": "documents", "doc_src": "documents", "query_mask_ptr": "query_mask",
    "doc_mask_ptr": "document_mask", "query_scale_ptr": "query_factors", "doc_scale_ptr": "document_factors",
    "cu_q_ptr": "cu_queries", "cu_d_ptr": "cu_documents", "index_ptr": "pairs", "score_ptr": "scores",
    "part_ptr": "parts", "saved_ptr": "saved", "row_query_ptr": "row_query", "dscore_ptr": "dscores",
    "largest_ptr": "largest", "list_ptr": "lists",
}  # fmt: skip


class Steps:
    """The steps of a plan in the making. Names that no tensor and no buffer has stand for ``None``.

    Attributes:
        stands: by the name that launches are written with, the name that the plan has for it.
        values: by name, what kernels are told of the problem.
    """

    def __init__(self, problem: Problem, setting: Setting) -> None:
        p = self.problem = problem
        self.setting = setting
        self.stands: dict[str, str] = {}
        self.fills: dict[str, float] = {}
        self.values: dict[str, Any] = {
            "Tq": p.queries.size(0), "Td": p.documents.size(0), "Nq": p.n_queries, "Nd": p.n_documents,
            "length_q": p.query_length, "length_d": p.document_length, "group": max(p.group, 1),
            "longest": p.longest_query, "temperature": p.temperature,
            "inverse_temperature": 1.0 / p.temperature if p.temperature else 0.0, "divisor": p.divisor,
            "D": p.queries.size(1), "UNIFORM_Q": p.cu_queries is None, "UNIFORM_D": p.cu_documents is None,
            "HAS_SCALE": p.normalize or p.document_scale is not None, "HAS_QMASK": p.query_mask is not None,
            "HAS_DMASK": p.document_mask is not None,
            "PAIRING": {"all": 0, "aligned": 1, "grouped": 1, "index": 2}[p.pairing],
        }  # fmt: skip
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
        steps.append(TorchStep(makes, function, " ".join(self.stands.get(name, name) for name in names.split())))

    def launch(
        self,
        kernel: Any,
        grid: Grid,
        own: Mapping[str, Any],
        tensors: Mapping[str, str] | None = None,
        tma: Mapping[str, Tma] | None = None,
    ) -> None:
        """A launch, its arguments by the kernel's names: ``tensors`` and values of its ``own``, and the problem's."""
        places = {name: self.stands.get(place, place) for name, place in (TENSORS | dict(tensors or {})).items()}
        named, numbers, constants = arguments_of(kernel, places, self.values | dict(own))
        self._buffers |= dict.fromkeys(name for name in named if name not in self._known | self._buffers.keys())
        self._steps.append(
            Launch(kernel, grid, " ".join(named), numbers, constants, tma or {}, BY_POINTERS if tma else None)
        )

    def over_rows(self, kernel: Any, count: int, tensors: Mapping[str, str] | None = None, others: int = 0) -> None:
        """A launch that goes over ``count`` rows once, and over ``others``."""
        grid = (cdiv(count, BLOCK_ROWS) + cdiv(others, BLOCK_ROWS), 1, 1)
        blocks: dict[str, int] = {"BLOCK_R": BLOCK_ROWS, "BLOCK_D": BLOCK_COLUMNS, "num_warps": 4, "num_stages": 3}
        self.launch(kernel, grid, {"T": count} | blocks, tensors)

    def inverse_norms(self, results: bool) -> None:
        """``[Tq]`` and ``[Td]`` fp32 by which rows of norm 1 are made, in one launch, as results or buffers."""
        sides = self.problem.queries.size(0), self.problem.documents.size(0)
        if results:
            self.stands |= {"query_factors": "query_norms", "document_factors": "document_norms"}
        else:
            for name, count in zip(("query_factors", "document_factors"), sides, strict=True):
                self.buffer(name, (count,), torch.float32)
        self.over_rows(inverse_norms_kernel, sides[0], others=sides[1])

    def row_queries(self) -> None:
        """``[Tq]`` int32 numbers of the queries that the offsets give rows to."""
        rows, count = self.problem.queries.size(0), self.problem.n_queries
        self.stands["row_query"] = self.buffer("rows_query", (rows,), torch.int32)
        grid = (cdiv(rows, ROW_QUERIES), 1, 1)
        own = {"steps": count.bit_length(), "BLOCK": ROW_QUERIES, "num_warps": 4, "num_stages": 1}
        self.launch(row_query_kernel, grid, own)

    def plan(self) -> Plan:
        """All of them."""
        return Plan((*self._copies, *self._steps), self._buffers, self.fills)


def _in_order(tensor: Tensor) -> Tensor:
    if tensor.is_contiguous() and tensor.data_ptr() % ALIGNMENT == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)
