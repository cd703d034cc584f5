"""How a problem is launched, and the same launch again for other tensors of the same shapes and dtypes."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tilefold.ops._shared._triton.launch import Grid, Launcher
from tilefold.ops.maxsim._triton.rows import quantize_rows
from tilefold.ops.maxsim.quantized import QuantizedTokens


class Plan(NamedTuple):
    """How a problem is launched, but for its tensors.

    Attributes:
        kind: "all", "stream" or "listed".
        run, grid: the kernel with its constants, and its programs.
        block: of the documents' TMA descriptor, or ``None`` for pointers.
        numbers: the arguments after the tensors.
        parts: rows of partial sums that :data:`combine_kernel` adds up; 0 where the kernel writes scores.
        tile_rows: query rows of a tile.
    """

    kind: str
    run: Launcher
    grid: Grid
    block: list[int] | None
    numbers: tuple[int | float, ...]
    parts: int = 0
    tile_rows: int = 0


def aligned(argument: object) -> bool:
    """Whether an argument, if it is a tensor, begins at a multiple of 16 bytes."""
    return not isinstance(argument, Tensor) or argument.data_ptr() % 16 == 0


class Replay:
    """The launch of a ``plan`` with these ``arguments``, without a gradient, for tensors like those.

    ``replay(queries, documents, query_mask, document_mask, cu_queries, cu_documents)`` gives the scores, or ``None``
    for tensors that the compiled kernel cannot take as they are. Without it, half the time of a small call goes into
    arriving at the same launch.
    """

    def __init__(self, plan: Plan, compiled: tuple[Any, tuple[Any, ...]], arguments: tuple[Any, ...]) -> None:
        kernel, constants = compiled
        rows, scores = arguments[0], arguments[8]
        self._run = kernel[plan.grid]
        self._block, self._dim, self._rows = plan.block, rows.size(1), plan.numbers[1]
        self._shape, self._device, self._index = scores.shape, scores.device, scores.get_device()
        self._int8 = rows.dtype == torch.int8
        self._query_scale = None if self._int8 else arguments[4]  # of fp8 documents it is 1 for every row
        # partial sums and winners are not written: one empty tensor stands for both
        rest = (arguments[10], *arguments[10:]) if plan.kind == "all" else arguments[9:]
        self._tail = (*rest, *constants)

    def __call__(
        self,
        queries: Tensor,
        documents: Tensor | QuantizedTokens,
        query_mask: Tensor | None,
        document_mask: Tensor | None,
        cu_queries: Tensor | None,
        cu_documents: Tensor | None,
    ) -> Tensor | None:
        rows, query_scale, document_scale = queries, None, None
        if isinstance(documents, QuantizedTokens):
            document_scale, query_scale, documents = documents.scales, self._query_scale, documents.values
        if torch.cuda.current_device() != self._index:
            return None
        for tensor in (queries, documents, document_scale, query_mask, document_mask, cu_queries, cu_documents):
            if tensor is not None and not (tensor.is_contiguous() and tensor.data_ptr() % 16 == 0):
                return None
        if self._int8:
            rows, query_scale = quantize_rows(queries.view(-1, self._dim))
        source: Any = documents
        if self._block is not None:
            source = TensorDescriptor(documents, [self._rows, self._dim], [self._dim, 1], self._block)
        scores = torch.empty(self._shape, dtype=torch.float32, device=self._device)
        self._run(
            rows, source, query_mask, document_mask, query_scale, document_scale, cu_queries, cu_documents, scores,
            *self._tail,
        )  # fmt: skip
        return scores
