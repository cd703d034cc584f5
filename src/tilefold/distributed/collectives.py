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


class LocalScores(NamedTuple):
    """This rank's part of scores that are distributed over ranks.

    Attributes:
        scores: the part, in fp32 or fp64: rows ``[B, V]`` of the batch, with all columns or with
            this rank's columns of the vocabulary.
        column_group: process group of the ranks that hold the columns of these rows; None if this
            rank holds all of them.
        row_group: process group of the ranks that hold the rows of the batch; None if this rank
            holds all of them.
    """

    scores: Tensor
    column_group: dist.ProcessGroup | None
    row_group: dist.ProcessGroup | None


def local_scores(scores: Tensor, group: Group) -> LocalScores:
    """Return this rank's part of scores in fp32 or fp64, and the groups that hold the other parts.

    Other ranks may hold other rows of the batch (data parallel), other columns of the vocabulary
    (tensor parallel), or both.

    Args:
        scores: scores ``[B, V]``: a tensor with this rank's rows and all columns, or a ``DTensor``
            whose columns may be sharded over its mesh.
        group: the ranks that hold other rows of the batch: a process group; ``"world"`` for all
            ranks; or None if there are none.

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
        return LocalScores(
            scores.to(dtype),
            column_group=None,
            row_group=resolve_group(group),
        )
    distributed_scores: Any = scores  # a DTensor, which some builds of torch cannot import
    return LocalScores(
        distributed_scores.to_local().to(dtype),
        column_group=_column_group(distributed_scores),
        row_group=_row_group(group, distributed_scores.device_mesh),
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

    # A DTensor has one placement for each dimension of its mesh of ranks.
    sharded_mesh_dims = [
        mesh_dim
        for mesh_dim, placement in enumerate(scores.placements)
        if not isinstance(placement, Replicate)
    ]
    if not sharded_mesh_dims:
        return None
    columns_sharded = Shard(1)  # dimension 1 of the scores [B, V]
    if len(sharded_mesh_dims) > 1 or scores.placements[sharded_mesh_dims[0]] != columns_sharded:
        raise ValueError(
            "scores must be Shard(1) on at most one dimension of their mesh and Replicate() on the "
            f"others, got {scores.placements}; pass each rank its own rows, and the ranks that "
            "hold other rows as the argument group.",
        )
    column_group: dist.ProcessGroup = scores.device_mesh.get_group(sharded_mesh_dims[0])
    return column_group


def _row_group(group: Group, mesh: Any) -> dist.ProcessGroup | None:
    """Return the ranks that hold other rows of the batch than the ranks of a ``DTensor``.

    Args:
        group: these ranks: a process group; ``"world"`` for all ranks; or None if there are none.
        mesh: device mesh of the ``DTensor``. All ranks of the mesh hold the same rows.

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
    return None  # all ranks are in the mesh, and hold the same rows


def sum_over_rows(statistics: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Sum statistics over data-parallel ranks.

    Backward multiplies the gradient by the number of ranks: every rank computes the same loss from
    the sum, but has gradients for its rows only, and DDP and FSDP divide the sum of these gradients
    by the number of ranks.
    """
    if group is None:
        return statistics
    return _sum(statistics, group, gradient_factor=dist.get_world_size(group))


def sum_over_columns(statistics: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Sum statistics over vocabulary shards.

    Backward returns the gradient unchanged, because each rank holds different columns.
    """
    if group is None:
        return statistics
    return _sum(statistics, group, gradient_factor=1)


class _Sum(torch.autograd.Function):
    """All-reduce of a tensor whose backward multiplies by a factor."""

    @staticmethod
    def forward(
        ctx: Any,
        statistics: Tensor,
        group: dist.ProcessGroup,
        gradient_factor: int,
    ) -> Tensor:
        """Return the sum over the ranks of the group, as a new tensor."""
        ctx.gradient_factor = gradient_factor
        total = statistics.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient of the statistics, times the factor."""
        gradient = grads[0]
        if ctx.gradient_factor != 1:
            gradient = gradient * ctx.gradient_factor
        return gradient, None, None


def _sum(statistics: Tensor, group: dist.ProcessGroup, gradient_factor: int) -> Tensor:
    """Sum a tensor over ranks; backward multiplies the gradient by `gradient_factor`."""
    total: Tensor = _Sum.apply(  # type: ignore[no-untyped-call]
        statistics,
        group,
        gradient_factor,
    )
    return total
