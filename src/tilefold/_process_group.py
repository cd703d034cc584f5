"""Process group of an argument ``group``."""

from __future__ import annotations

import torch.distributed as dist


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
