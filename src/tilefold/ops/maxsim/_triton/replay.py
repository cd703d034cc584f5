"""Scores of tensors of the same shapes, dtypes and options as others before them: the same launches again.

Arriving at a launch takes longer than a small kernel. What a call's signature fixes is worked out once; a call then
looks at addresses, allocates and launches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilefold.ops._shared._triton.direct import hooked
from tilefold.ops._shared._triton.launch import Grid, Launcher, launcher
from tilefold.ops.maxsim._problem import Problem
from tilefold.ops.maxsim._triton.direct import Direct
from tilefold.ops.maxsim._triton.norms import inverse_norm_kernel, quantize_kernel
from tilefold.ops.maxsim._triton.rows import rows_constants, rows_grid

Addresses = tuple[int, int, int | None, int | None, int | None, int | None]
ALIGNMENT = 16  # bytes, of every tensor that a kernel reads
UNFIT = 1  # no such address, of what must be copied first


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


class Combine(NamedTuple):
    """The launch that adds up partial sums, and its numbers."""

    run: Launcher
    grid: Grid
    numbers: tuple[int, ...]


def padded(size: int) -> int:
    """Bytes after which another tensor may begin."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def address_of(tensor: Tensor) -> int:
    """Where a contiguous tensor begins."""
    return tensor.data_ptr() if tensor.is_contiguous() else UNFIT


_ONES: dict[torch.device, list[Tensor]] = {}


def ones(count: int, device: torch.device) -> Tensor:
    """At least ``count`` ones in fp32, kept for good: other streams, and graphs, may read them at any time."""
    known = _ONES.setdefault(device, [])
    if not known or known[-1].numel() < count:
        known.append(torch.ones(2 * count, dtype=torch.float32, device=device))
        torch.cuda.current_stream(device).synchronize()  # once for each doubling: another stream may read them next
    return known[-1]


class Norms:
    """Inverse norms ``[Tq]`` and ``[Td]`` of both sides, in one allocation."""

    def __init__(self, queries: Tensor, documents: Tensor, scales: tuple[Tensor, Tensor]) -> None:
        index = queries.get_device()
        self._rows = queries.size(0), documents.size(0)
        sides = zip((queries, documents), scales, strict=True)
        self._launches = [
            Direct(
                launcher(inverse_norm_kernel, rows_constants(rows)), rows_grid(rows), (rows, scale, rows.size(0)), index
            ).launch
            for rows, scale in sides
        ]
        self._second = padded(4 * self._rows[0])
        self._size, self._device = (self._second + 4 * self._rows[1]) // 4, queries.device

    def __call__(self, queries: int, documents: int) -> tuple[Tensor, int, int]:
        """The allocation, and the address of either side's."""
        room = torch.empty(self._size, dtype=torch.float32, device=self._device)
        first = room.data_ptr()
        second = first + self._second
        self._launches[0](queries, first, self._rows[0])
        self._launches[1](documents, second, self._rows[1])
        return room, first, second


class Replay:
    """The launches of a ``plan`` that ran with these ``arguments``, for tensors like those of ``problem``.

    ``replay.addresses(...)`` of the tensors, then ``replay(...)`` of both. It holds no tensor of a call.
    """

    def __init__(
        self,
        problem: Problem,
        plan: Plan,
        arguments: tuple[Any, ...],
        saved: Tensor | None,
        combine: tuple[Combine, tuple[Any, ...]] | None,
    ) -> None:
        rows, documents = arguments[0], problem.documents
        index = rows.get_device()
        direct = Direct(plan.run, plan.grid, arguments, index)
        self._launch, self._described = direct.launch, direct.described if plan.block is not None else None
        self._index, self._device = index, rows.device
        self._current = torch._C._cuda_getDevice
        self._shape = problem.final_shape or problem.score_shape
        self._rows = list(documents.shape)
        self._saved = None if saved is None else (saved.shape, saved.dtype)
        self._numbers, self._stream = plan.numbers, plan.kind == "stream"
        self._listed = plan.kind == "listed"
        self._parts: tuple[int, int] | None = None
        self._combine: Callable[..., None] | None = None
        if combine is not None:
            self._parts = (plan.parts, problem.n_documents)
            self._combine = Direct(combine[0].run, combine[0].grid, (*combine[1], *combine[0].numbers), index).launch
            self._combine_numbers = combine[0].numbers
        self._norms = self._quantize = None
        self._ones = 0
        self.score_shape = problem.score_shape  # without the groups' dimension
        self.fixed = (
            problem.query_length, problem.document_length, None, problem.pairing, problem.mask_zero,
            problem.temperature, problem.normalize, problem.longest_query,
        )  # fmt: skip
        if problem.normalize:
            self._norms = Norms(rows, documents, (arguments[4], arguments[5]))
        elif rows.dtype == torch.int8:
            self._quantize = _quantizing(rows, index, problem.query_source)
            self._second, self._bytes = padded(rows.numel()), padded(rows.numel()) + 4 * rows.size(0)
        elif problem.query_scale is not None:
            ones(rows.size(0), rows.device)
            self._ones = rows.size(0)
        self._simple = not (self._parts or self._norms or self._quantize or self._ones or self._stream or self._listed)

    def addresses(
        self,
        queries: Tensor,
        documents: Tensor,
        query_mask: Tensor | None,
        document_mask: Tensor | None,
        cu_queries: Tensor | None,
        cu_documents: Tensor | None,
    ) -> Addresses | None:
        """Where the tensors lie, or ``None`` if the compiled kernel cannot take them as they are."""
        if self._current() != self._index or hooked():
            return None
        q = queries.data_ptr() if queries.is_contiguous() else UNFIT
        d = documents.data_ptr() if documents.is_contiguous() else UNFIT
        qm = None if query_mask is None else address_of(query_mask)
        dm = None if document_mask is None else address_of(document_mask)
        cq = None if cu_queries is None else address_of(cu_queries)
        cd = None if cu_documents is None else address_of(cu_documents)
        return None if (q | d | (qm or 0) | (dm or 0) | (cq or 0) | (cd or 0)) % ALIGNMENT else (q, d, qm, dm, cq, cd)

    def __call__(
        self, addresses: Addresses, documents: Tensor, document_scale: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Scores in their final shape, and what backward needs if the first call kept it."""
        q, d, qm, dm, cq, cd = addresses
        source = (d,) if self._described is None else self._described(documents, d, self._rows)
        scores = torch.empty(self._shape, dtype=torch.float32, device=self._device)
        out = scores.data_ptr()
        saved = kept = None
        if self._saved is not None:
            shape, dtype = self._saved
            saved = torch.empty(shape, dtype=dtype, device=self._device)
            kept = saved.data_ptr()
        if self._simple:
            self._launch(q, *source, qm, dm, None, None, cq, cd, out, out, kept, *self._numbers)
            return scores, saved
        room = parts = None  # scratch lives until its launches are enqueued
        q_scale = None
        d_scale = None if document_scale is None else document_scale.data_ptr()
        if self._norms is not None:
            room, q_scale, d_scale = self._norms(q, d)
        elif self._quantize is not None:
            room = torch.empty(self._bytes, dtype=torch.int8, device=self._device)
            values = room.data_ptr()
            q_scale = values + self._second
            self._quantize(q, values, q_scale)
            q = values
        elif self._ones:
            q_scale = ones(self._ones, self._device).data_ptr()
        if self._stream:
            self._launch(q, *source, qm, dm, q_scale, d_scale, cq, cd, out, *self._numbers)
        elif self._listed:
            self._launch(q, *source, qm, dm, q_scale, d_scale, cq, cd, None, out, kept, *self._numbers)
        elif self._combine is None or self._parts is None:
            self._launch(q, *source, qm, dm, q_scale, d_scale, cq, cd, out, out, kept, *self._numbers)
        else:
            parts = torch.empty(self._parts, dtype=torch.float32, device=self._device)
            first = parts.data_ptr()
            self._launch(q, *source, qm, dm, q_scale, d_scale, cq, cd, out, first, kept, *self._numbers)
            self._combine(first, cq, out, *self._combine_numbers)
        return scores, saved


def _quantizing(rows: Tensor, index: int, source: Tensor | None) -> Any:
    """The launch that makes int8 ``rows`` of queries like ``source``."""
    if source is None:
        raise LookupError("the queries that the rows were made of must be known, got None.")
    count = source.size(0)
    scales = torch.empty(count, dtype=torch.float32, device=rows.device)
    run = launcher(quantize_kernel, rows_constants(source))
    launch = Direct(run, rows_grid(source), (source, rows, scales, count), index).launch
    return lambda q, values, scale: launch(q, values, scale, count)
