"""Differentiable sums over ranks, and the layout of scores that are distributed over ranks."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from tilefold.distributed.process_group import ranks_of

# "world" is all ranks, or this process alone where torch.distributed is not initialised; None is
# this process alone.
Group: TypeAlias = "dist.ProcessGroup | Literal['world'] | None"


class Columns(NamedTuple):
    """The part of the scores in this process.

    Attributes:
        local: ``[B, V]``, or this rank's columns of it, in fp32 or fp64.
        shards: the ranks that hold the columns of these rows; None where this rank holds all.
        rows: the ranks that hold the rows of the batch; None where this rank holds all.
    """

    local: Tensor
    shards: dist.ProcessGroup | None
    rows: dist.ProcessGroup | None


def columns_of(scores: Tensor, group: Group) -> Columns:
    """Find this rank's part of scores, and the groups of ranks that hold the other parts.

    Ranks may hold other rows of the batch (data parallel), other columns of the vocabulary (tensor
    parallel), or both.

    Args:
        scores: ``[B, V]``, a tensor or a ``DTensor`` whose columns may be sharded.
        group: the ranks that hold other rows of the batch: a process group, ``"world"`` or None.

    Returns:
        This rank's scores in fp32 or fp64, the group that shares the columns and the group that
        shares the rows. A group is None if this rank has all of them.

    Raises:
        TypeError: for anything but a floating-point tensor.
        ValueError: for another shape or layout, or a `group` that does not fit the layout.
    """
    if not isinstance(scores, Tensor) or not scores.is_floating_point():
        got = scores.dtype if isinstance(scores, Tensor) else type(scores).__name__
        raise TypeError(
            f"scores must be a floating-point tensor, got {got}; pass the [B, V] output of a "
            "sparse encoder.",
        )
    if scores.dim() != 2:
        raise ValueError(f"scores must have shape [B, V], got {list(scores.shape)}.")
    dtype = torch.promote_types(scores.dtype, torch.float32)
    distributed = _distributed_columns(scores)
    if distributed is None:
        return Columns(scores.to(dtype), None, ranks_of(group))
    local, mesh, dim = distributed
    if group == "world":
        if mesh.size() != dist.get_world_size():
            raise ValueError(
                "group must name the ranks that hold other rows where scores are a DTensor on some "
                "of the ranks, got 'world'; pass the group of the data-parallel dimension, for "
                "instance mesh['dp'].get_group(), or None.",
            )
        # The mesh has all ranks of the world, and they hold the same rows.
        group = None
    shards = None if dim is None else mesh.get_group(dim)
    return Columns(local.to(dtype), shards, ranks_of(group))


def sum_over_rows(statistics: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Sum statistics over data-parallel ranks; backward multiplies by the number of ranks.

    Every rank computes the same loss from the sum, and DDP and FSDP average the ranks' gradients of
    their own rows.
    """
    return statistics if group is None else _sum(statistics, group, dist.get_world_size(group))


def sum_over_columns(statistics: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Sum statistics over vocabulary shards.

    Backward passes the gradient on unchanged, because each rank holds other columns.
    """
    return statistics if group is None else _sum(statistics, group, 1)


class _Sum(torch.autograd.Function):
    """All-reduce of a tensor whose backward multiplies by a factor."""

    @staticmethod
    def forward(ctx: Any, statistics: Tensor, group: dist.ProcessGroup, factor: int) -> Tensor:
        ctx.factor = factor
        total = statistics.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0] * ctx.factor if ctx.factor != 1 else grads[0], None, None


def _sum(statistics: Tensor, group: dist.ProcessGroup, factor: int) -> Tensor:
    total: Tensor = _Sum.apply(statistics, group, factor)  # type: ignore[no-untyped-call]
    return total


def _distributed_columns(scores: Any) -> tuple[Tensor, Any, int | None] | None:
    """Read the layout of a ``DTensor``.

    Returns:
        This rank's columns, the device mesh, and the mesh dimension that shards the columns, None
        where they are not sharded. None for a plain tensor.
    """
    if type(scores) is Tensor or not dist.is_available():
        return None
    from torch.distributed.tensor import DTensor, Replicate, Shard

    if not isinstance(scores, DTensor):
        return None
    sharded = [
        dim
        for dim, placement in enumerate(scores.placements)
        if not isinstance(placement, Replicate)
    ]
    if len(sharded) > 1 or any(scores.placements[dim] != Shard(1) for dim in sharded):
        raise ValueError(
            "scores must be Shard(1) on at most one dimension of their mesh and Replicate() on the "
            f"others, got {scores.placements}; rows of data-parallel ranks are plain tensors here, "
            "see the argument group.",
        )
    return scores.to_local(), scores.device_mesh, sharded[0] if sharded else None
