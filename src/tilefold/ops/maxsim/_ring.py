"""Scores against the documents of every rank: they travel around a ring of ranks, and are never
gathered.

Rank r computes with the documents of rank r, then of r - 1, r - 2 and so on, which arrive from r -
1 while the block before them is computed; it holds its own block and two more at most. Backward
sends the documents around once more, and behind them their gradients, which take each rank's part
along, in the order of the ring, and end at home. Every rank learns the others' sizes first, and
whether they agree: the only time that the host waits for the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from tilefold.distributed.process_group import ranks_of
from tilefold.ops._shared.checks import dtype_name
from tilefold.ops._shared.impl import host_may_read, impl_with_fallback
from tilefold.ops.maxsim._arguments import check_labels, check_scale, checked, labelled_loss
from tilefold.ops.maxsim._problem import (
    MaxSimOptions,
    MaxSimTensors,
    Problem,
    check_values,
    wide_dtype,
)
from tilefold.ops.maxsim.api import MAXSIM, by_reference, kept_tokens
from tilefold.ops.maxsim.quantized import QuantizedTokens

Asked = tuple[
    str,
    str,
    float | None,
    bool,
]  # reduction, mask mode, temperature, whether to normalize


class Part(NamedTuple):
    """Part held by a rank; each rank knows that of all."""

    device: str
    dtype: str
    dim: int
    options: tuple[object, ...]
    need_queries: bool
    need_documents: bool
    queries: int
    documents: int
    rows: int
    length: int
    packed: bool
    masked: bool


# what must agree, and what the error calls it
_COMMON = {
    "device": "queries must lie on the same kind of device",
    "dtype": "queries must have the same dtype",
    "dim": "queries must have the same D",
    "options": "scale, reduction, mask_mode, temperature and normalize must be the same",
    "need_queries": "queries must require a gradient on all ranks or on none: they must be the same",
    "need_documents": "documents must require a gradient on all ranks or on none: they must be the same",
}


class Ring(NamedTuple):
    """The ranks of ``group`` in their order, this one among them, and what each holds."""

    group: dist.ProcessGroup
    rank: int
    parts: tuple[Part, ...]

    def shift(
        self,
        outgoing: Sequence[Tensor],
        incoming: Sequence[Tensor],
        tag: int,
    ) -> list[dist.Work]:
        """Start to send to the next rank, and to receive from the one before; what to wait for."""
        ways = (dist.isend, outgoing, self.rank + 1), (dist.irecv, incoming, self.rank - 1)
        steps = [
            dist.P2POp(
                way,
                tensor,
                dist.get_global_rank(self.group, rank % len(self.parts)),
                self.group,
                tag + i,
            )
            for way, tensors, rank in ways
            for i, tensor in enumerate(tensors)
            if tensor.numel()
        ]
        return dist.batch_isend_irecv(steps) if steps else []

    def blocks(self, own: Sequence[Tensor]) -> Iterator[tuple[int, Sequence[Tensor]]]:
        """Every rank's documents (rows, mask and offsets, empty where there are none), as they come
        by.
        """
        current = own
        for step in range(len(self.parts)):
            owner = (self.rank - step) % len(self.parts)
            coming, waiting = current, []
            if step + 1 < len(self.parts):
                coming = self.room(self.parts[owner - 1], own)
                waiting = self.shift(current, coming, tag=0)
            yield owner, current
            for work in waiting:
                work.wait()
            current = coming

    @staticmethod
    def room(part: Part, like: Sequence[Tensor]) -> list[Tensor]:
        rows, mask, offsets = like
        return [
            rows.new_empty(part.rows, part.dim),
            mask.new_empty(part.rows if part.masked else 0),
            offsets.new_empty(part.documents + 1 if part.packed else 0),
        ]


def _part(tensors: MaxSimTensors, call: MaxSimOptions, options: tuple[object, ...]) -> Part:
    grad, problem = torch.is_grad_enabled(), Problem.of(tensors, call)
    return Part(
        device=problem.queries.device.type,
        dtype=dtype_name(problem.queries.dtype),
        dim=problem.queries.size(1),
        options=options,
        need_queries=grad and tensors.queries.requires_grad,
        need_documents=grad and tensors.documents.requires_grad,
        queries=problem.n_queries,
        documents=problem.n_documents,
        rows=problem.documents.size(0),
        length=problem.document_length,
        packed=problem.cu_documents is not None,
        masked=problem.document_mask is not None,
    )


def meet(group: dist.ProcessGroup, mine: Part | Exception) -> Ring:
    """Tell the other ranks what this one holds, or why it cannot go on, and hear what they hold.

    Raises this rank's error, and ``ValueError`` on every rank if ranks do not agree or another one
    cannot go on.
    """
    heard: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(heard, mine if isinstance(mine, Part) else str(mine), group=group)
    if not isinstance(mine, Part):
        raise mine
    failed = ", ".join(
        f"rank {rank}: {part}" for rank, part in enumerate(heard) if isinstance(part, str)
    )
    if failed:
        raise ValueError(f"arguments must fit on every rank of group, got on {failed}")
    for field, expected in _COMMON.items():
        values = [getattr(part, field) for part in heard]
        if len(set(values)) > 1:
            raise ValueError(
                f"{expected} on every rank of group, got {', '.join(map(str, values))} by rank.",
            )
    return Ring(group, dist.get_rank(group), tuple(heard))


@torch.compiler.disable  # type: ignore[untyped-decorator]
def loss_over_ranks(
    tensors: MaxSimTensors,
    labels: Tensor | None,
    scale: float,
    group: object,
    asked: Asked,
    impl: str,
) -> Tensor | None:
    """:func:`tilefold.ops.maxsim_contrastive_loss` over the ranks of ``group``; ``None`` where this
    rank is alone.

    Compilers leave it out: what the ranks exchange depends on what they hold.
    """
    ranks = ranks_of(group)
    if ranks is None:
        return None
    try:  # whatever is wrong here, the other ranks must hear of it
        check_scale(scale)
        given: object = tensors.documents
        if isinstance(given, QuantizedTokens):
            raise TypeError(
                "documents must be a torch.Tensor, got QuantizedTokens; give documents.dequantize().",
            )
        options, ready = checked(tensors, "all", *asked)
        tensors = tensors if ready is None else ready(tensors)
        impl = impl_with_fallback(impl, MAXSIM.chosen_impl(tensors.queries, impl))
        if host_may_read(tensors.queries.device, impl) or impl == "reference":
            check_values(tensors)
        n_queries, n_documents = Problem.of(tensors, options).score_shape
        checked_labels = check_labels(labels, n_queries, n_documents, tensors.queries.device)
    except (TypeError, ValueError, RuntimeError) as error:
        meet(ranks, error)
        raise
    ring = meet(ranks, _part(tensors, options, (scale, *asked)))
    leaves = tensors.queries, tensors.documents
    scores: Tensor = _RingScores.apply(*leaves, tensors, options._replace(mean=False), ring, impl)  # type: ignore[no-untyped-call]
    if asked[0] == "mean" and tensors.queries.numel():
        scores = scores / kept_tokens(tensors, scores.dim())
    before = sum(part.documents for part in ring.parts[: ring.rank])
    total = labelled_loss(scale * scores, labels, checked_labels, n_documents, before, "sum")
    mean: Tensor = _SumOverRanks.apply(total / sum(part.queries for part in ring.parts), ring)  # type: ignore[no-untyped-call]
    return mean


class _SumOverRanks(torch.autograd.Function):
    """The sum of the ranks' shares; backward multiplies by the number of ranks."""

    @staticmethod
    def forward(ctx: Any, share: Tensor, ring: Ring) -> Tensor:
        ctx.size = len(ring.parts)
        shares = [share.new_empty(1) for _ in ring.parts]
        dist.all_gather(shares, share.reshape(1), group=ring.group)
        return torch.cat(shares).sum()  # in one order on every rank

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] * ctx.size, None


class _RingScores(torch.autograd.Function):
    """``[Nq, sum of Nd]`` scores of this rank's queries with the documents of all ranks, in the
    order of the ranks.
    """

    @staticmethod
    def forward(
        ctx: Any,
        queries: Tensor,
        documents: Tensor,
        tensors: MaxSimTensors,
        options: MaxSimOptions,
        ring: Ring,
        impl: str,
    ) -> Tensor:
        training = any(ctx.needs_input_grad[:2])
        tensors = tensors._replace(queries=queries.detach(), documents=documents.detach())
        scores: list[Tensor] = [queries] * len(ring.parts)
        saved: list[Tensor | None] = [None] * len(ring.parts)
        own = _outgoing(tensors)
        for owner, block in ring.blocks(own):
            mine = _with(tensors, ring.parts[owner], block)
            if impl == "reference":
                scores[owner] = by_reference(mine, options)
            else:
                scores[owner], saved[owner], *_ = torch.ops.tilefold.maxsim(
                    *mine,
                    *options,
                    training,
                    impl,
                )
        # the masks and offsets of the queries are the caller's and small; the rows and winners are
        # not
        ctx.save_for_backward(queries, documents, *own[1:], *saved)
        ctx.others = tensors._replace(
            queries=queries.new_empty(0),
            documents=documents.new_empty(0),
        )
        ctx.options, ctx.ring, ctx.impl = options, ring, impl
        return torch.cat(scores, dim=1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dscores: Tensor) -> tuple[Tensor | None, ...]:
        ring: Ring = ctx.ring
        queries, documents, mask, offsets, *saved = ctx.saved_tensors
        tensors = ctx.others._replace(queries=queries, documents=documents)
        wide = wide_dtype(queries.dtype)
        needs = ctx.needs_input_grad[:2]
        dqueries = (
            torch.zeros(queries.shape, dtype=wide, device=queries.device) if needs[0] else None
        )
        coming = documents
        waiting: list[dist.Work] = []
        shares = torch.split(dscores, [part.documents for part in ring.parts], dim=1)
        for step, (owner, block) in enumerate(ring.blocks([_rows(documents), mask, offsets])):
            part = ring.parts[owner]
            dq, dd = _gradients(
                _with(tensors, part, block),
                ctx.options,
                shares[owner],
                saved[owner],
                needs,
                ctx.impl,
            )
            if dqueries is not None:
                dqueries += dq
            if not needs[1]:
                continue
            for work in waiting:
                work.wait()
            total = (
                torch.zeros(part.rows, part.dim, dtype=wide, device=queries.device)
                if step == 0
                else coming
            )
            total += dd.view(total.shape)
            coming = torch.empty(
                ring.parts[owner - 1].rows,
                part.dim,
                dtype=wide,
                device=queries.device,
            )
            waiting = ring.shift([total], [coming], tag=3)
        for work in waiting:
            work.wait()
        return (
            None if dqueries is None else dqueries.to(queries.dtype),
            coming.to(documents.dtype).view(documents.shape) if needs[1] else None,
            None,
            None,
            None,
            None,
        )


def _rows(documents: Tensor) -> Tensor:
    return documents.reshape(-1, documents.size(-1)).contiguous()


def _outgoing(tensors: MaxSimTensors) -> list[Tensor]:
    """This rank's documents as they travel: rows, a byte of mask per row, int64 offsets; empty
    where there are none.
    """
    rows, mask, offsets = _rows(tensors.documents), tensors.document_mask, tensors.cu_documents
    return [
        rows,
        rows.new_empty(0, dtype=torch.uint8)
        if mask is None
        else (mask != 0).to(torch.uint8).reshape(-1),
        rows.new_empty(0, dtype=torch.int64)
        if offsets is None
        else offsets.to(torch.int64).contiguous(),
    ]


def _with(tensors: MaxSimTensors, part: Part, block: Sequence[Tensor]) -> MaxSimTensors:
    """Replace the documents with those of another rank."""
    rows, mask, offsets = block
    shape = (part.rows,) if part.packed else (part.documents, part.length)
    return tensors._replace(
        documents=rows.view(*shape, part.dim),
        document_mask=mask.view(shape) if part.masked else None,
        cu_documents=offsets if part.packed else None,
    )


def _gradients(
    tensors: MaxSimTensors,
    options: MaxSimOptions,
    dscores: Tensor,
    saved: Tensor | None,
    needs: tuple[bool, bool],
    impl: str,
) -> Sequence[Tensor]:
    """Gradients of queries and documents; one that nobody needs may be anything."""
    if impl == "reference":
        leaves = [rows.detach().requires_grad_() for rows in tensors[:2]]
        with torch.enable_grad():
            scores = by_reference(tensors._replace(queries=leaves[0], documents=leaves[1]), options)
        return torch.autograd.grad(scores, leaves, dscores)
    # offsets and indices were checked; the norms of rows are worked out again, so that no rank's
    # are kept
    kept = (*tensors[:7], saved, None, None, None)
    found: Sequence[Tensor] = torch.ops.tilefold.maxsim_backward(
        dscores,
        *kept,
        *options,
        needs,
        impl,
    )
    return found
