"""Process group of an argument ``group``, and rows of all ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def ranks_of(group: object) -> dist.ProcessGroup | None:
    """The process group that `group` means, None where this rank is on its own."""
    if group is None or not dist.is_available():
        return None
    if group == "world":
        if not dist.is_initialized():
            return None
        group = dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup) or dist.get_rank(group) < 0:
        raise ValueError(
            f"group must be a process group that holds this rank, 'world' or None, got {group!r}; call on its ranks "
            "only, after torch.distributed.init_process_group.",
        )
    return group if dist.get_world_size(group) > 1 else None


def gather_rows(rows: Tensor) -> Tensor:
    """Rows of all ranks of the world, this rank's first, of equal shapes; a gradient is the sum of
    all ranks'.
    """
    found: Tensor = _Gathered.apply(rows)  # type: ignore[no-untyped-call]
    return found.flatten(0, 1)


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, rows: Tensor) -> Tensor:
        every = rows.new_empty(dist.get_world_size(), *rows.shape)
        dist.all_gather(_by_rank(every), rows.contiguous())
        return every

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> Tensor:
        parts = _by_rank(grads[0].contiguous())
        own = torch.empty_like(parts[0])
        dist.reduce_scatter(own, parts)
        return own


def _by_rank(own_first: Tensor) -> list[Tensor]:
    return [own_first[(each - dist.get_rank()) % len(own_first)] for each in range(len(own_first))]
