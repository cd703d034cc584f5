"""The LSR head over a vocabulary that is sharded across ranks: only ``dhidden`` is summed over
them, in backward.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed
from torch import Tensor

from tilefold.ops._shared.checks import check_shape, check_tensor
from tilefold.ops.lsr_head._arguments import product_dtype
from tilefold.ops.lsr_head._problem import Tokens
from tilefold.ops.lsr_head._sparse import csr_from_entries

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Placement

Options = dict[str, Any]  # of the head, by name
# told apart without an import, in every call
PLAIN_TYPES = (Tensor, torch.nn.Parameter, type(None))


class VocabularySharding(NamedTuple):
    """Sharding of the vocabulary: dimension ``dim`` of ``mesh`` shards it, ``None`` if every rank
    holds all of it.
    """

    mesh: DeviceMesh
    dim: int | None
    vocab: int

    def placements(self, at_dim: Placement | None) -> tuple[Placement, ...]:
        """``Replicate()`` everywhere, but ``at_dim`` on the dimension that shards the vocabulary."""
        from torch.distributed.tensor import Replicate

        return tuple(
            at_dim if i == self.dim and at_dim else Replicate() for i in range(self.mesh.ndim)
        )

    @property
    def shards(self) -> int:
        return 1 if self.dim is None else self.mesh.size(self.dim)

    def first_column(self) -> int:
        """The column of the whole scores at which this rank's begin (``torch.chunk``'s division)."""
        if self.dim is None:
            return 0
        return min(self.mesh.get_local_rank(self.dim) * -(-self.vocab // self.shards), self.vocab)


def is_distributed(*tensors: object) -> bool:
    """Whether one of ``tensors``, not all of which are :data:`PLAIN_TYPES`, is a DTensor."""
    if not torch.distributed.is_available():
        return False
    from torch.distributed.tensor import DTensor

    return any(isinstance(tensor, DTensor) for tensor in tensors)


def parallel_head(
    head: Callable[..., Tensor],
    tokens: Tokens,
    weight: Tensor,
    bias: Tensor | None,
    options: Options,
) -> Tensor:
    """Run ``head`` on this rank's rows of ``weight``; ``[B, V]`` as a DTensor, ``Shard(1)`` where
    the vocabulary is.

    Partial ``dhidden`` come out of the head in fp32 (fp64), are summed over the ranks in fp32, and
    are rounded to the dtype of ``hidden`` once, as on one device.
    """
    from torch.distributed.tensor import DTensor, Partial, Shard

    sharding, local, dtype = _check(tokens, weight, bias)
    whole, local_weight, local_bias = local.hidden, _local(weight), _local(bias)
    if options.get("weight_main_grad") is not None:
        options["weight_main_grad"] = _local(options["weight_main_grad"])
    autocast: AbstractContextManager[object] = nullcontext()
    if sharding.shards > 1 and whole.requires_grad and torch.is_grad_enabled():
        if whole.dtype in (torch.float16, torch.bfloat16):
            if not torch.is_autocast_enabled(whole.device.type):
                autocast = torch.autocast(whole.device.type, dtype=whole.dtype)
            whole = (
                whole.float()
            )  # so that the partial gradients are handed out before they are rounded
        replica = DTensor.from_local(
            whole,
            sharding.mesh,
            sharding.placements(None),
            run_check=False,
        )
        whole = replica.to_local(grad_placements=sharding.placements(Partial()))
    with autocast:
        if local_weight.size(0) == 0:  # fewer rows than ranks
            scores = _no_columns(local._replace(hidden=whole), local_weight, local_bias)
            scores = scores.to(options["out_dtype"] or dtype)
        else:
            scores = head(
                weight=local_weight,
                bias=local_bias,
                **local._replace(hidden=whole)._asdict(),
                **options,
            )
    shape = torch.Size((scores.size(0), sharding.vocab))
    return DTensor.from_local(
        scores,
        sharding.mesh,
        sharding.placements(Shard(1)),
        run_check=False,
        shape=shape,
        stride=(shape[1], 1),
    )


def parallel_head_sparse(
    head: Callable[..., Tensor],
    tokens: Tokens,
    weight: Tensor,
    bias: Tensor | None,
    options: Options,
) -> Tensor:
    """Plain CSR ``[B, V]``, equal on every rank: kept entries are gathered, ``top_k`` chooses among
    all of them.
    """
    sharding, local, dtype = _check(tokens, weight, bias)
    whole, local_weight = local.hidden, _local(weight)
    wide = torch.promote_types(whole.dtype, torch.float32)
    out_dtype = options.pop("out_dtype") or dtype
    with torch.no_grad():
        if local_weight.size(0) == 0:  # fewer rows than ranks
            counts = torch.zeros(local.batch, dtype=torch.int64, device=whole.device)
            columns, values = counts.new_zeros(0), whole.new_zeros(0, dtype=wide)
        else:
            mine = head(
                weight=local_weight,
                bias=_local(bias),
                **local._asdict(),
                **options,
                out_dtype=wide,
            )
            counts, columns, values = mine.crow_indices().diff(), mine.col_indices(), mine.values()
        rows = torch.arange(counts.numel(), device=counts.device).repeat_interleave(counts)
        entries = _gather_entries(rows, columns + sharding.first_column(), values, sharding)
        if options["top_k"] is not None:
            entries = _best_entries(*entries, options["top_k"])
        return csr_from_entries(*entries, (counts.numel(), sharding.vocab), out_dtype)


def _check(
    tokens: Tokens,
    weight: Tensor,
    bias: Tensor | None,
) -> tuple[VocabularySharding, Tokens, torch.dtype]:
    """The sharding of the vocabulary, ``tokens`` as the plain tensors that every rank holds, dtype
    of the products.
    """
    from torch.distributed.tensor import DTensor

    hidden = tokens.hidden
    check_tensor("hidden", hidden)
    check_tensor("weight", weight)
    if not isinstance(weight, DTensor):
        raise ValueError(
            "weight must be a DTensor where hidden or bias is one, got a plain tensor; distribute it with "
            "distribute_tensor(weight, mesh, [Shard(0)]), or pass plain tensors only.",
        )
    mesh, places = weight.device_mesh, weight.placements
    sharding = VocabularySharding(mesh, _vocabulary_dim(weight), weight.size(0))
    if bias is not None and not isinstance(check_tensor("bias", bias), DTensor):
        raise ValueError(
            "bias must be a DTensor where weight is one, got a plain tensor; distribute it like the weight with "
            "distribute_tensor(bias, weight.device_mesh, weight.placements).",
        )
    if isinstance(bias, DTensor):
        if bias.device_mesh != mesh or bias.placements != places:
            raise ValueError(
                f"bias must lie like weight ({places} on {mesh}), got {bias.placements} on {bias.device_mesh}; "
                "redistribute it with bias.redistribute(weight.device_mesh, weight.placements).",
            )
        check_shape("bias", bias, "V", V=weight.size(0))
    if not isinstance(hidden, DTensor):
        raise ValueError(
            "hidden must be a DTensor where weight is one, got a plain tensor, which may differ from rank to rank. If "
            "every rank of the mesh holds the same rows (tensor parallelism), say so with DTensor.from_local(hidden, "
            "weight.device_mesh, [Replicate()]), or let tilefold.nn.parallel.VocabularyParallel do it. If the ranks "
            "hold different rows (FSDP), read the weight inside the forward of its FSDP module, where it is whole.",
        )
    for name, value in tokens._asdict().items():
        if not isinstance(value, DTensor):
            continue  # masks and offsets may be plain: they have no gradient
        if value.device_mesh != mesh:
            raise ValueError(
                f"{name} must lie on the mesh of weight ({mesh}), got {value.device_mesh}; redistribute one of them.",
            )
        if not all(placement.is_replicate() for placement in value.placements):
            raise ValueError(
                f"{name} must be Replicate() on every dimension of the mesh, got {value.placements}; gather it with "
                f"{name}.redistribute(placements=[Replicate()] * {mesh.ndim}).",
            )
    return sharding, Tokens(*map(_local, tokens)), product_dtype(hidden, weight)


def _vocabulary_dim(weight: DTensor) -> int | None:
    from torch.distributed.tensor import Shard

    placements = weight.placements
    sharded = [i for i, placement in enumerate(placements) if not placement.is_replicate()]
    if len(sharded) > 1 or any(
        type(placements[i]) is not Shard or not placements[i].is_shard(0) for i in sharded
    ):
        raise ValueError(
            "weight must be Shard(0) on at most one dimension of its mesh and Replicate() on the others, got "
            f"{placements}; weight.redistribute(placements=[Shard(0)]) shards the vocabulary, and a weight that FSDP "
            "shards must be read inside the forward of its FSDP module.",
        )
    if weight.device_mesh.get_coordinate() is None:
        raise ValueError(
            "weight must lie on a mesh that contains this rank, got one that does not; call on its ranks only.",
        )
    return sharded[0] if sharded else None


def _local(value: Any) -> Any:
    from torch.distributed.tensor import DTensor

    return value.to_local() if isinstance(value, DTensor) else value


def _no_columns(tokens: Tokens, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Scores ``[B, 0]`` with a graph: this rank has no rows, but takes part in the sum of the
    gradients.
    """
    hidden = tokens.hidden
    nothing = hidden.sum(dim=tuple(range(hidden.dim() - 1))).to(weight.dtype)
    scores = nothing.expand(tokens.batch, -1) @ weight.T
    return scores if bias is None else scores + bias


def _best_entries(
    rows: Tensor,
    columns: Tensor,
    values: Tensor,
    top_k: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The ``top_k`` largest of each row; among equal ones the lowest columns, which come first."""
    order = values.sort(descending=True, stable=True).indices
    order = order[rows[order].sort(stable=True).indices]
    ordered = rows[order]
    counts = torch.bincount(rows)
    place = torch.arange(ordered.numel(), device=rows.device) - (counts.cumsum(0) - counts)[ordered]
    kept = order[place < top_k].sort().values  # back in the order of columns
    return rows[kept], columns[kept], values[kept]


def _gather_entries(
    rows: Tensor,
    columns: Tensor,
    values: Tensor,
    sharding: VocabularySharding,
) -> tuple[Tensor, Tensor, Tensor]:
    """The entries of all shards, in the order of their ranks: columns rise within each row of the
    concatenation.
    """
    if sharding.dim is None:
        return rows, columns, values
    group = sharding.mesh.get_group(sharding.dim)
    mine = torch.tensor([rows.numel()], device=rows.device)
    sizes = [torch.empty_like(mine) for _ in range(sharding.shards)]
    torch.distributed.all_gather(sizes, mine, group=group)
    counts = [int(size) for size in sizes]
    gathered = []
    for part in (rows, columns, values):
        padded = part.new_zeros(max(counts))
        padded[: part.numel()] = part
        buffers = [torch.empty_like(padded) for _ in counts]
        torch.distributed.all_gather(buffers, padded, group=group)
        gathered.append(
            torch.cat([buffer[:count] for buffer, count in zip(buffers, counts, strict=True)]),
        )
    return gathered[0], gathered[1], gathered[2]
