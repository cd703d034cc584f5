"""Scores against the documents of every rank: they travel around a ring of ranks, and are never gathered.

Rank r computes with the documents of rank r, then of r - 1, r - 2 and so on, which arrive from r - 1 while the block
before them is computed; it holds its own block and two more at most. Backward sends the documents around once more, and
behind them their gradients, which take each rank's part along, in the order of the ring, and end at home. Every rank
learns the others' sizes first, and whether they agree: the only time that the host waits for the others.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from tilefold._process_group import ranks_of
from tilefold.ops._shared.checks import FLOAT_DTYPES
from tilefold.ops._shared.impl import host_may_read, settled
from tilefold.ops.maxsim import _reference
from tilefold.ops.maxsim._arguments import check_labels, check_scale, checked, labelled_loss
from tilefold.ops.maxsim._problem import MaxSimOptions, MaxSimTensors, Problem, check_values, wide_dtype
from tilefold.ops.maxsim.api import MAXSIM, kept_tokens
from tilefold.ops.maxsim.quantized import QuantizedTokens


class Part(NamedTuple):
    """Part held by a rank; each rank knows that of all."""

    failed: int = 1
    on_gpu: int = 0
    dtype: int = 0
    dim: int = 0
    options: int = 0
    need_queries: int = 0
    need_documents: int = 0
    queries: int = 0
    documents: int = 0
    rows: int = 0
    length: int = 0
    packed: int = 0
    masked: int = 0


# what must agree, and what the error calls it
_COMMON = (
    ("on_gpu", "queries must lie on the same kind of device"),
    ("dtype", "queries must have the same dtype"),
    ("dim", "queries must have the same D"),
    ("options", "scale, reduction, mask_mode, temperature and normalize must be the same"),
    ("need_queries", "queries must require a gradient on all ranks or on none: they must be the same"),
    ("need_documents", "documents must require a gradient on all ranks or on none: they must be the same"),
)


@dataclass(frozen=True)
class Ring:
    """The ranks of ``group`` in their order, this one among them, and what each holds."""

    group: dist.ProcessGroup
    rank: int
    parts: tuple[Part, ...]

    @property
    def size(self) -> int:
        return len(self.parts)

    def shift(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor], tag: int) -> list[Any]:
        """Start to send to the next rank, and to receive from the one before; what to wait for."""
        ways = (dist.isend, outgoing, self.rank + 1), (dist.irecv, incoming, self.rank - 1)
        steps = [
            dist.P2POp(way, tensor, dist.get_global_rank(self.group, rank % self.size), self.group, tag + i)
            for way, tensors, rank in ways
            for i, tensor in enumerate(tensors)
            if tensor.numel()
        ]
        return dist.batch_isend_irecv(steps) if steps else []

    def blocks(self, own: Sequence[Tensor]) -> Iterator[tuple[int, Sequence[Tensor]]]:
        """Every rank's documents (rows, mask and offsets, empty where there are none), as they come by."""
        current = own
        for step in range(self.size):
            owner = (self.rank - step) % self.size
            coming, waiting = current, []
            if step + 1 < self.size:
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


Held = tuple[MaxSimTensors, MaxSimOptions]


def meet(group: dist.ProcessGroup, held: Held | None, options: object, error: Exception | None) -> Ring:
    """Tell the other ranks what this one holds, ``None`` with an ``error``, and hear what they hold.

    ``options`` must be the same on every rank. Raises this rank's error, and ``ValueError`` on every rank if ranks do
    not agree or another one cannot go on.
    """
    part = Part() if held is None else _part(*held, options)
    # where gloo is there too, the numbers do not go through a GPU
    over_cpu = "gloo" in str(dist.get_backend_config(group))
    device = torch.device("cpu") if over_cpu else torch.device("cuda", torch.cuda.current_device())
    mine = torch.tensor(part, dtype=torch.int64, device=device)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, mine, group=group)
    parts = tuple(Part(*numbers.tolist()) for numbers in everyone)
    if any(part.failed for part in parts):
        texts: list[Any] = [None] * len(parts)
        dist.all_gather_object(texts, str(error), group=group)
        if error is not None:
            raise error
        failed = ", ".join(f"rank {r}: {texts[r]}" for r, part in enumerate(parts) if part.failed)
        raise ValueError(f"arguments must fit on every rank of group, got on {failed}")
    for field, expected in _COMMON:
        values = [getattr(part, field) for part in parts]
        if len(set(values)) > 1:
            found = [str(FLOAT_DTYPES[v]).removeprefix("torch.") for v in values] if field == "dtype" else values
            raise ValueError(f"{expected} on every rank of group, got {', '.join(map(str, found))} by rank.")
    return Ring(group, dist.get_rank(group), parts)


def _part(tensors: MaxSimTensors, call: MaxSimOptions, options: object) -> Part:
    grad, problem = torch.is_grad_enabled(), Problem.of(tensors, call)
    return Part(
        failed=0,
        on_gpu=int(problem.queries.is_cuda),
        dtype=FLOAT_DTYPES.index(problem.queries.dtype),
        dim=problem.queries.size(1),
        options=zlib.crc32(repr(options).encode()),
        need_queries=int(grad and tensors.queries.requires_grad),
        need_documents=int(grad and tensors.documents.requires_grad),
        queries=problem.n_queries,
        documents=problem.n_documents,
        rows=problem.documents.size(0),
        length=problem.document_length,
        packed=int(problem.cu_documents is not None),
        masked=int(problem.document_mask is not None),
    )


def ring_scores(tensors: MaxSimTensors, options: MaxSimOptions, ring: Ring, impl: str) -> Tensor:
    """``[Nq, sum of Nd]`` scores of this rank's queries with the documents of all ranks, in the order of the ranks."""
    leaves = tensors.queries, tensors.documents
    scores: Tensor = _RingScores.apply(*leaves, tensors, options, ring, impl)  # type: ignore[no-untyped-call]
    return scores


def mean_over_ranks(total: Tensor, ring: Ring) -> Tensor:
    """The ranks' sums of losses, divided by the number of their queries; backward multiplies by the number of ranks."""
    share = total / sum(part.queries for part in ring.parts)
    mean: Tensor = _SumOverRanks.apply(share, ring)  # type: ignore[no-untyped-call]
    return mean


@torch.compiler.disable  # type: ignore[untyped-decorator]
def loss_over_ranks(
    queries: Tensor,
    documents: Tensor,
    labels: Tensor | None,
    scale: float,
    group: object,
    options: dict[str, Any],
) -> Tensor | None:
    """:func:`tilefold.ops.maxsim_contrastive_loss` over the ranks of ``group``; ``None`` where this rank is alone.

    Compilers leave it out: what the ranks exchange depends on what they hold.
    """
    ranks = ranks_of(group)
    if ranks is None:
        return None
    held = error = None
    try:  # whatever is wrong here, the other ranks must hear of it
        check_scale(scale)
        given: object = documents
        if isinstance(given, QuantizedTokens):
            raise TypeError("documents must be a torch.Tensor, got QuantizedTokens; give documents.dequantize().")
        tensors = MaxSimTensors(
            queries, documents, options["query_mask"], options["document_mask"], options["cu_seqlens_q"],
            options["cu_seqlens_d"], None, None,
        )  # fmt: skip
        asked = (options[name] for name in ("reduction", "mask_mode", "temperature", "normalize"))
        settings, ready = checked(tensors, "all", *asked)
        tensors = tensors if ready is None else ready(tensors)
        impl = settled(options["impl"], MAXSIM.chosen_impl(tensors.queries, options["impl"]))
        if host_may_read(queries.device, impl) or impl == "reference":
            check_values(tensors)
        n_queries, n_documents = Problem.of(tensors, settings).score_shape
        checked_labels = check_labels(labels, n_queries, n_documents, queries.device)
        held = tensors, settings._replace(mean=False)
    except (TypeError, ValueError, RuntimeError) as caught:
        error = caught
    same = (scale, *(options[name] for name in ("reduction", "mask_mode", "temperature", "normalize")))
    ring = meet(ranks, held, same, error)
    if held is None:  # meet has raised
        raise ValueError("arguments must fit on every rank of group.")
    scores = ring_scores(*held, ring, impl)
    if options["reduction"] == "mean" and tensors.queries.numel():
        scores = scores / kept_tokens(tensors, scores.dim())
    before = sum(part.documents for part in ring.parts[: ring.rank])
    total = labelled_loss(scale * scores, labels, checked_labels, n_documents, before, "sum")
    return mean_over_ranks(total, ring)


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, share: Tensor, ring: Ring) -> Tensor:
        ctx.size = ring.size
        shares = [share.new_empty(1) for _ in ring.parts]
        dist.all_gather(shares, share.reshape(1), group=ring.group)
        return torch.cat(shares).sum()  # in one order on every rank

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] * ctx.size, None


class _RingScores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, queries: Tensor, documents: Tensor, tensors: MaxSimTensors, options: MaxSimOptions, ring: Ring,
        impl: str,
    ) -> Tensor:  # fmt: skip
        training = any(ctx.needs_input_grad[:2])
        tensors = tensors._replace(queries=queries.detach(), documents=documents.detach())
        scores: list[Tensor] = [queries] * ring.size
        saved: list[Tensor | None] = [None] * ring.size
        own = _outgoing(tensors)
        for owner, block in ring.blocks(own):
            mine = _with(tensors, ring.parts[owner], block)
            scores[owner], saved[owner] = _forward(mine, options, training, impl)
        # the masks and offsets of the queries are the caller's and small; the rows and winners are not
        ctx.save_for_backward(queries, documents, *own[1:], *saved)
        ctx.others = tensors._replace(queries=queries.new_empty(0), documents=documents.new_empty(0))
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
        dqueries = torch.zeros(queries.shape, dtype=wide, device=queries.device) if needs[0] else None
        coming = documents
        waiting: list[Any] = []
        shares = torch.split(dscores, [part.documents for part in ring.parts], dim=1)
        for step, (owner, block) in enumerate(ring.blocks([_rows(documents), mask, offsets])):
            part = ring.parts[owner]
            mine = _with(tensors, part, block)
            dq, dd = _backward(mine, ctx.options, shares[owner], saved[owner], needs, ctx.impl)
            if dqueries is not None and dq is not None:
                dqueries += dq
            if not needs[1]:
                continue
            for work in waiting:
                work.wait()
            total = torch.zeros(part.rows, part.dim, dtype=wide, device=queries.device) if step == 0 else coming
            if dd is not None:
                total += dd.view(total.shape)
            coming = torch.empty(ring.parts[owner - 1].rows, part.dim, dtype=wide, device=queries.device)
            waiting = ring.shift([total], [coming], tag=3)
        for work in waiting:
            work.wait()
        return (
            None if dqueries is None else dqueries.to(queries.dtype),
            coming.to(documents.dtype).view(documents.shape) if needs[1] else None,
            None, None, None, None,
        )  # fmt: skip


def _rows(documents: Tensor) -> Tensor:
    return documents.reshape(-1, documents.size(-1)).contiguous()


def _outgoing(tensors: MaxSimTensors) -> list[Tensor]:
    """This rank's documents as they travel: rows, a byte of mask per row, int64 offsets; empty where there are none."""
    rows, mask, offsets = _rows(tensors.documents), tensors.document_mask, tensors.cu_documents
    return [
        rows,
        rows.new_empty(0, dtype=torch.uint8) if mask is None else (mask != 0).to(torch.uint8).reshape(-1),
        rows.new_empty(0, dtype=torch.int64) if offsets is None else offsets.to(torch.int64).contiguous(),
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


def _forward(tensors: MaxSimTensors, options: MaxSimOptions, training: bool, impl: str) -> tuple[Tensor, Tensor | None]:
    problem = Problem.of(tensors, options)
    if problem.empty:
        dtype = wide_dtype(tensors.queries.dtype)
        return torch.zeros(problem.score_shape, dtype=dtype, device=tensors.queries.device), None
    if impl == "reference":
        return _reference.maxsim(problem), None
    scores, saved, *_ = torch.ops.tilefold.maxsim(*tensors, *options, training, impl)
    return scores, saved


def _backward(
    tensors: MaxSimTensors, options: MaxSimOptions, dscores: Tensor, saved: Tensor | None, needs: tuple[bool, bool],
    impl: str,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    if Problem.of(tensors, options).empty:
        return None, None
    if impl == "reference":
        leaves = [
            rows.detach().requires_grad_(need)
            for rows, need in zip((tensors.queries, tensors.documents), needs, strict=True)
        ]
        with torch.enable_grad(), torch.autocast(leaves[0].device.type, enabled=False):
            given = tensors._replace(queries=leaves[0], documents=leaves[1])
            scores = _reference.maxsim(Problem.of(given, options))
        wanted = [leaf for leaf, need in zip(leaves, needs, strict=True) if need]
        grads = iter(torch.autograd.grad(scores, wanted, dscores))
        return next(grads) if needs[0] else None, next(grads) if needs[1] else None
    # offsets and indices were checked; the norms of rows are worked out again, so that no rank's are kept
    kept = (*tensors[:7], saved, None, None, None)
    dqueries, ddocuments = torch.ops.tilefold.maxsim_backward(dscores, *kept, *options, needs, impl)
    return dqueries if needs[0] else None, ddocuments if needs[1] else None
