"""Differentiable sums over ranks, and the layout of scores that are distributed over ranks."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from tilefold.distributed.process_group import resolve_group

# Ranks that hold other rows of a batch. "world" means all ranks, or only this process if
# torch.distributed is not initialised. None means only this process.
Group: TypeAlias = "dist.ProcessGroup | Literal['world'] | None"


class Columns(NamedTuple):
    """This rank's part of scores that are distributed over ranks.

    Attributes:
        local: the scores ``[B, V]`` of this rank, or its columns of them, in fp32 or fp64.
        shards: the ranks that hold columns of these rows; None if this rank holds all columns.
        rows: the ranks that hold rows of the batch; None if this rank holds all rows.
    """

    local: Tensor
    shards: dist.ProcessGroup | None
    rows: dist.ProcessGroup | None


def columns_of(scores: Tensor, group: Group) -> Columns:
    """Return this rank's part of scores in fp32 or fp64, and the groups that hold the other parts.

    Other ranks may hold other rows of the batch (data parallel), other columns of the vocabulary
    (tensor parallel), or both.

    Args:
        scores: scores ``[B, V]``: a tensor, or a ``DTensor`` whose columns may be sharded.
        group: the ranks that hold other rows of the batch: a process group, ``"world"`` or None.

    Raises:
        TypeError: if `scores` is not a dense floating-point tensor.
        ValueError: if `scores` has another shape, is distributed in another way, or `group` does
            not fit it.
    """
    if not isinstance(scores, Tensor) or not scores.is_floating_point():
        got = scores.dtype if isinstance(scores, Tensor) else type(scores).__name__
        raise TypeError(
            f"scores must be a floating-point tensor, got {got}; pass the [B, V] output of a "
            "sparse encoder.",
        )
    if scores.layout != torch.strided:
        raise TypeError(
            f"scores must be a dense tensor, got layout {scores.layout}; use scores.to_dense().",
        )
    if scores.dim() != 2:
        raise ValueError(f"scores must have shape [B, V], got {list(scores.shape)}.")
    dtype = torch.promote_types(scores.dtype, torch.float32)
    if not _is_dtensor(scores):
        return Columns(scores.to(dtype), shards=None, rows=resolve_group(group))
    distributed_scores: Any = scores  # DTensor is not imported without torch.distributed
    return Columns(
        distributed_scores.to_local().to(dtype),
        shards=_column_group(distributed_scores),
        rows=_row_group(group, distributed_scores.device_mesh),
    )


def _is_dtensor(scores: Tensor) -> bool:
    """Return whether scores are a ``DTensor``."""
    if type(scores) is Tensor or not dist.is_available():
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(scores, DTensor)


def _column_group(scores: Any) -> dist.ProcessGroup | None:
    """Return the ranks that hold columns of the same rows as this rank.

    Args:
        scores: a ``DTensor`` ``[B, V]``.

    Returns:
        The process group; None if the columns are not sharded.

    Raises:
        ValueError: if the scores are distributed in another way than by columns.
    """
    from torch.distributed.tensor import Replicate, Shard

    sharded_dims = [
        mesh_dim
        for mesh_dim, placement in enumerate(scores.placements)
        if not isinstance(placement, Replicate)
    ]
    if not sharded_dims:
        return None
    if len(sharded_dims) > 1 or scores.placements[sharded_dims[0]] != Shard(1):
        raise ValueError(
            "scores must be Shard(1) on at most one dimension of their mesh and Replicate() on the "
            f"others, got {scores.placements}; pass each rank its own rows, and the ranks that "
            "hold other rows as the argument group.",
        )
    column_group: dist.ProcessGroup = scores.device_mesh.get_group(sharded_dims[0])
    return column_group


def _row_group(group: Group, mesh: Any) -> dist.ProcessGroup | None:
    """Return the ranks that hold other rows than this rank's part of a ``DTensor``.

    Args:
        group: the ranks that hold other rows of the batch: a process group, ``"world"`` or None.
        mesh: device mesh of the ``DTensor``, whose ranks hold the same rows.

    Raises:
        ValueError: if `group` is ``"world"`` and the mesh has only some of the ranks.
    """
    if group != "world":
        return resolve_group(group)
    if mesh.size() != dist.get_world_size():
        raise ValueError(
            "group must name the ranks that hold other rows if scores are a DTensor on only some "
            "ranks, got 'world'; pass the group of the data-parallel dimension, for instance "
            "mesh['dp'].get_group(), or None.",
        )
    return None  # no rank is outside the mesh


def sum_over_rows(statistics: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Sum statistics over data-parallel ranks.

    Backward multiplies the gradient by the number of ranks: every rank computes the same loss from
    the sum, and DDP and FSDP average the gradients that the ranks have for their own rows.
    """
    return statistics if group is None else _sum(statistics, group, dist.get_world_size(group))


def sum_over_columns(statistics: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Sum statistics over vocabulary shards.

    Backward returns the gradient unchanged, because each rank holds different columns.
    """
    return statistics if group is None else _sum(statistics, group, 1)


class _Sum(torch.autograd.Function):
    """All-reduce of a tensor whose backward multiplies by a factor."""

    @staticmethod
    def forward(ctx: Any, statistics: Tensor, group: dist.ProcessGroup, factor: int) -> Tensor:
        """Return the sum over the ranks of the group, as a new tensor."""
        ctx.factor = factor
        total = statistics.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient of the statistics, times the factor."""
        gradient = grads[0]
        if ctx.factor != 1:
            gradient = gradient * ctx.factor
        return gradient, None, None


def _sum(statistics: Tensor, group: dist.ProcessGroup, factor: int) -> Tensor:
    """Sum a tensor over ranks; backward multiplies the gradient by `factor`."""
    total: Tensor = _Sum.apply(statistics, group, factor)  # type: ignore[no-untyped-call]
    return total
