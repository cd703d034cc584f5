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
            "only, after torch.distributed.init_process_group."
        )
    return group if dist.get_world_size(group) > 1 else None


def own_and_others(rows: Tensor) -> Tensor:
    """Rows of all ranks of the world, this rank's first, of equal shapes; a gradient is the sum of all ranks'."""
    found: Tensor = _Gathered.apply(rows)  # type: ignore[no-untyped-call]
    return found.flatten(0, 1)


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, rows: Tensor) -> Tensor:
        own = rows.contiguous()
        every = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(every, own)
        return torch.stack(every).roll(-dist.get_rank(), 0)

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> Tensor:
        every = grads[0].roll(dist.get_rank(), 0).contiguous()
        dist.all_reduce(every)
        return every[dist.get_rank()]
