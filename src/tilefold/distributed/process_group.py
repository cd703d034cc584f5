"""Resolution of an argument ``group`` to a process group, and gathering of rows from all ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def resolve_group(group: object) -> dist.ProcessGroup | None:
    """Convert the argument `group` of a public function to a process group.

    Args:
        group: a process group that holds this rank; ``"world"`` for all ranks, which is only this
            process if torch.distributed is not initialised; or None for only this process.

    Returns:
        The process group, or None if it would have this rank only.

    Raises:
        ValueError: if the value is something else, or a group that does not hold this rank.
    """
    if group is None or not dist.is_available():
        return None
    if group == "world":
        if not dist.is_initialized():
            return None
        group = dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup) or dist.get_rank(group) < 0:
        raise ValueError(
            f"group must be a process group that holds this rank, 'world' or None, got {group!r}; "
            "call on its ranks only, after torch.distributed.init_process_group.",
        )
    return group if dist.get_world_size(group) > 1 else None


def gather_rows(rows: Tensor) -> Tensor:
    """Gather the rows of all ranks, starting with those of this rank.

    The gradient of this rank's rows is the sum of the gradients that all ranks have for them.

    Args:
        rows: this rank's rows ``[B, ...]``, of the same shape on every rank.

    Returns:
        Rows ``[ranks * B, ...]``: those of this rank, of the next rank, and so on, where rank 0
        comes after the last rank.
    """
    gathered: Tensor = _GatherRows.apply(rows)  # type: ignore[no-untyped-call]
    return gathered.flatten(0, 1)


class _GatherRows(torch.autograd.Function):
    """All-gather of rows ``[B, ...]`` to ``[ranks, B, ...]``, with this rank's rows first."""

    @staticmethod
    def forward(ctx: object, rows: Tensor) -> Tensor:
        gathered = rows.new_empty(dist.get_world_size(), *rows.shape)
        dist.all_gather(_in_rank_order(gathered), rows.contiguous())
        return gathered

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> Tensor:
        grads_by_rank = _in_rank_order(grads[0].contiguous())
        grad = torch.empty_like(grads_by_rank[0])
        dist.reduce_scatter(grad, grads_by_rank)
        return grad


def _in_rank_order(own_first: Tensor) -> list[Tensor]:
    """Reorder a stacked tensor from "this rank first" to the order of the ranks.

    Args:
        own_first: tensor ``[ranks, ...]``. Its first part is this rank's, the next one is that of
            the next rank, and after the last rank comes rank 0.

    Returns:
        Views of the parts, in the order of the ranks.
    """
    n_ranks = len(own_first)
    own_rank = dist.get_rank()
    # The modulo continues with rank 0 after the last rank.
    return [own_first[(rank - own_rank) % n_ranks] for rank in range(n_ranks)]
