"""Scores against the documents of every rank: they travel around a ring of ranks, and are never gathered.

Rank r computes with the documents of rank r, then of r - 1, r - 2 and so on, which arrive from r - 1 while the block
before them is computed; it holds its own block and two more at most. Backward sends the documents around once more, and
behind them their gradients, which take each rank's part along, in the order of the ring, and end at home. Every rank
learns the others' sizes first, and whether they agree: the only time that the host waits for the others.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from tilefold._process_group import ranks_of
from tilefold.ops._shared.checks import FLOAT_DTYPES
from tilefold.ops._shared.library import run
from tilefold.ops.maxsim import _reference
from tilefold.ops.maxsim._arguments import prepare
from tilefold.ops.maxsim._labels import check_labels, check_scale, labelled_loss
from tilefold.ops.maxsim._problem import Problem, wide_dtype
from tilefold.ops.maxsim._torch_ops import check_values, compute, compute_gradients
from tilefold.ops.maxsim.api import kept_tokens


class Part(NamedTuple):
    """What a rank holds; each rank knows it of every rank."""

    failed: int
    on_gpu: int
    dtype: int
    dim: int
    options: int
    need_queries: int
    need_documents: int
    queries: int
    documents: int
    rows: int
    length: int
    packed: int
    masked: int


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
        """Number of ranks."""
        return len(self.parts)

    def shift(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor], tag: int) -> list[Any]:
        """Start to send to the next rank, and to receive from the one before; what to wait for."""
        after = dist.get_global_rank(self.group, (self.rank + 1) % self.size)
        before = dist.get_global_rank(self.group, (self.rank - 1) % self.size)
        steps = [
            dist.P2POp(dist.isend, tensor, after, self.group, tag + i)
            for i, tensor in enumerate(outgoing)
            if tensor.numel()
        ] + [
            dist.P2POp(dist.irecv, tensor, before, self.group, tag + i)
            for i, tensor in enumerate(incoming)
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
        """Where the documents of ``part`` can be received."""
        rows, mask, offsets = like
        return [
            rows.new_empty(part.rows, part.dim),
            mask.new_empty(part.rows if part.masked else 0),
            offsets.new_empty(part.documents + 1 if part.packed else 0),
        ]


Held = tuple[Problem, tuple[int, ...]]  # rows, and the shape of their scores


def meet(group: dist.ProcessGroup, held: Held | None, options: object, error: Exception | None) -> Ring:
    """Tell the other ranks what this one holds, and hear what they hold.

    Args:
        group: the ranks, this one among them.
        held: this rank's queries and documents, ``None`` with an ``error``.
        options: what must be the same on every rank.
        error: why this rank cannot go on; raised here, and named by the other ranks.

    Raises:
        ValueError: on every rank, if ranks do not agree or one cannot go on.
    """
    part = Part(1, *[0] * (len(Part._fields) - 1)) if held is None else _part(*held, options)
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


def _part(problem: Problem, shape: tuple[int, ...], options: object) -> Part:
    grad = torch.is_grad_enabled()
    return Part(
        failed=0,
        on_gpu=int(problem.queries.is_cuda),
        dtype=FLOAT_DTYPES.index(problem.queries.dtype),
        dim=problem.queries.size(1),
        options=zlib.crc32(repr(options).encode()),
        need_queries=int(grad and problem.queries.requires_grad),
        need_documents=int(grad and problem.documents.requires_grad),
        queries=shape[0],
        documents=shape[1],
        rows=problem.documents.size(0),
        length=problem.document_length,
        packed=int(problem.cu_documents is not None),
        masked=int(problem.document_mask is not None),
    )


def ring_scores(problem: Problem, ring: Ring, impl: str) -> Tensor:
    """``[Nq, sum of Nd]`` scores of this rank's queries with the documents of all ranks, in the order of the ranks."""
    scores: Tensor = _RingScores.apply(problem.queries, problem.documents, problem, ring, impl)  # type: ignore[no-untyped-call]
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
    held = error = checked = None
    impl = "auto"
    try:  # whatever is wrong here, the other ranks must hear of it
        check_scale(scale)
        operands, call = prepare(queries, documents, **options)
        if operands.document_scale is not None:
            raise TypeError("documents must be a torch.Tensor, got QuantizedTokens; give documents.dequantize().")
        held, impl = (Problem.of(operands, call.options), call.shape), call.impl
        if not call.empty:
            check_values(held[0], impl)
        checked = check_labels(labels, call.shape[0], call.shape[1], operands.queries.device)
    except (TypeError, ValueError, RuntimeError) as caught:
        held, error = None, caught
    same = (scale, *(options[name] for name in ("reduction", "mask_mode", "temperature", "normalize")))
    ring = meet(ranks, held, same, error)
    if held is None or checked is None:  # meet has raised
        raise ValueError("arguments must fit on every rank of group.")
    problem, shape = held
    scores = ring_scores(problem, ring, impl)
    if options["reduction"] == "mean" and problem.queries.numel():
        scores = scores / kept_tokens(operands, scores.dim())
    before = sum(part.documents for part in ring.parts[: ring.rank])
    total = labelled_loss(scale * scores, labels, checked, shape[1], before, "sum")
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
    def forward(ctx: Any, queries: Tensor, documents: Tensor, problem: Problem, ring: Ring, impl: str) -> Tensor:
        with_saved = any(ctx.needs_input_grad[:2])
        problem = replace(problem, queries=queries.detach(), documents=documents.detach())
        scores: list[Tensor] = [queries] * ring.size
        saved: list[Tensor | None] = [None] * ring.size
        own = _outgoing(problem)
        for owner, block in ring.blocks(own):
            scores[owner], saved[owner] = _forward(
                _with(problem, ring.parts[owner], block), (ring.parts[ring.rank].queries, ring.parts[owner].documents),
                with_saved, impl,
            )  # fmt: skip
        # the masks and offsets of the queries are the caller's and small; the rows and winners are not
        ctx.save_for_backward(queries, documents, *own[1:], *saved)
        ctx.problem = replace(problem, queries=queries.new_empty(0), documents=documents.new_empty(0))
        ctx.ring, ctx.impl = ring, impl
        return torch.cat(scores, dim=1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dscores: Tensor) -> tuple[Tensor | None, ...]:
        ring: Ring = ctx.ring
        queries, documents, mask, offsets, *saved = ctx.saved_tensors
        problem = replace(ctx.problem, queries=queries, documents=documents)
        wide = wide_dtype(queries.dtype)
        needs = ctx.needs_input_grad[:2]
        dqueries = torch.zeros(queries.shape, dtype=wide, device=queries.device) if needs[0] else None
        coming = documents
        waiting: list[Any] = []
        shares = torch.split(dscores, [part.documents for part in ring.parts], dim=1)
        for step, (owner, block) in enumerate(ring.blocks([documents.contiguous(), mask, offsets])):
            part = ring.parts[owner]
            dq, dd = _backward(_with(problem, part, block), shares[owner], saved[owner], needs, ctx.impl)
            if dqueries is not None and dq is not None:
                dqueries += dq
            if not needs[1]:
                continue
            for work in waiting:
                work.wait()
            total = torch.zeros(part.rows, part.dim, dtype=wide, device=queries.device) if step == 0 else coming
            if dd is not None:
                total += dd
            coming = torch.empty(ring.parts[owner - 1].rows, part.dim, dtype=wide, device=queries.device)
            waiting = ring.shift([total], [coming], tag=3)
        for work in waiting:
            work.wait()
        return (
            None if dqueries is None else dqueries.to(queries.dtype),
            coming.to(documents.dtype) if needs[1] else None,
            None, None, None,
        )  # fmt: skip


def _outgoing(problem: Problem) -> list[Tensor]:
    """This rank's documents as they travel: rows, a byte of mask per row, int64 offsets; empty where there are none."""
    rows, mask, offsets = problem.documents, problem.document_mask, problem.cu_documents
    return [
        rows.contiguous(),
        rows.new_empty(0, dtype=torch.uint8) if mask is None else (mask != 0).to(torch.uint8),
        rows.new_empty(0, dtype=torch.int64) if offsets is None else offsets.to(torch.int64).contiguous(),
    ]


def _with(problem: Problem, part: Part, block: Sequence[Tensor]) -> Problem:
    """The same queries with the documents of another rank."""
    rows, mask, offsets = block
    return replace(
        problem,
        documents=rows,
        document_mask=mask if part.masked else None,
        cu_documents=offsets if part.packed else None,
        document_length=part.length,
    )


def _nothing_to_score(problem: Problem) -> bool:
    return problem.queries.numel() == 0 or problem.documents.numel() == 0


def _forward(problem: Problem, shape: tuple[int, int], with_saved: bool, impl: str) -> tuple[Tensor, Tensor | None]:
    if _nothing_to_score(problem):
        return torch.zeros(shape, dtype=wide_dtype(problem.queries.dtype), device=problem.queries.device), None
    if impl == "reference":
        return _reference.maxsim(problem), None
    return run(compute, problem.queries, problem, with_saved, impl)  # type: ignore[no-any-return]


def _backward(
    problem: Problem, dscores: Tensor, saved: Tensor | None, needs: tuple[bool, bool], impl: str
) -> tuple[Tensor | None, Tensor | None]:
    if _nothing_to_score(problem):
        return None, None
    if impl == "reference":
        leaves = [
            rows.detach().requires_grad_(need)
            for rows, need in zip((problem.queries, problem.documents), needs, strict=True)
        ]
        with torch.enable_grad(), torch.autocast(problem.queries.device.type, enabled=False):
            scores = _reference.maxsim(replace(problem, queries=leaves[0], documents=leaves[1]))
        wanted = [leaf for leaf, need in zip(leaves, needs, strict=True) if need]
        grads = iter(torch.autograd.grad(scores, wanted, dscores))
        return next(grads) if needs[0] else None, next(grads) if needs[1] else None
    return run(compute_gradients, dscores, saved, problem.operands, problem.options, needs, impl)  # type: ignore[no-any-return]
