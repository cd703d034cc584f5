"""The LSR head over a vocabulary that is sharded across ranks.

Forward communicates nothing. Backward sums ``dhidden`` over the ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed
from torch import Tensor

from tilefold.ops._shared.checks import check_shape, check_tensor
from tilefold.ops._shared.plan import cdiv
from tilefold.ops.lsr_head._arguments import product_dtype
from tilefold.ops.lsr_head._problem import Tokens
from tilefold.ops.lsr_head._sparse import csr_from_entries

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Placement

# Types of arguments that are not a DTensor. Every call compares with them, without an import.
PLAIN_TYPES = (Tensor, torch.nn.Parameter, type(None))


class VocabularySharding(NamedTuple):
    """Sharding of the vocabulary over a mesh.

    Attributes:
        mesh: the mesh of ranks.
        dim: dimension of the mesh that shards the vocabulary, or ``None`` if every rank has all
            columns.
        vocab: V.
    """

    mesh: DeviceMesh
    dim: int | None
    vocab: int

    def placements(self, vocabulary_placement: Placement | None) -> tuple[Placement, ...]:
        """Return the placements of a DTensor on this mesh.

        Args:
            vocabulary_placement: placement on the mesh dimension that shards the vocabulary, or
                ``None`` for ``Replicate()``. Every other dimension is ``Replicate()``, and all are
                if the vocabulary is not sharded.
        """
        from torch.distributed.tensor import Replicate

        placements: list[Placement] = [Replicate() for _ in range(self.mesh.ndim)]
        if self.dim is not None and vocabulary_placement is not None:
            placements[self.dim] = vocabulary_placement
        return tuple(placements)

    @property
    def n_shards(self) -> int:
        """Number of ranks that the vocabulary is divided among."""
        return 1 if self.dim is None else self.mesh.size(self.dim)

    def first_column(self) -> int:
        """First column of the vocabulary on this rank, as ``torch.chunk`` divides it."""
        if self.dim is None:
            return 0
        columns_per_shard = cdiv(self.vocab, self.n_shards)
        return min(self.mesh.get_local_rank(self.dim) * columns_per_shard, self.vocab)


def is_distributed(*tensors: object) -> bool:
    """Whether one of ``tensors`` is a DTensor. It imports DTensor, so check the types before."""
    if not torch.distributed.is_available():
        return False
    from torch.distributed.tensor import DTensor

    return any(isinstance(tensor, DTensor) for tensor in tensors)


def parallel_head(
    head: Callable[..., Tensor],
    tokens: Tokens,
    weight: Tensor,
    bias: Tensor | None,
    weight_main_grad: Tensor | None,
    out_dtype: torch.dtype | None,
) -> Tensor:
    """Run the head on this rank's columns of the vocabulary.

    Partial gradients of ``hidden`` leave the head in fp32 (fp64), are summed over the ranks in
    fp32, and are rounded to the dtype of ``hidden`` once, as on one device.

    Args:
        head: :func:`lsr_head` with its options, for plain tensors.
        tokens: token states, equal on every rank.
        weight: ``[V, D]`` DTensor.
        bias: ``[V]`` DTensor, or ``None``.
        weight_main_grad: buffer for the weight's gradient, a DTensor, a plain tensor or ``None``.
        out_dtype: dtype of the scores; ``None`` is that of the products.

    Returns:
        ``[B, V]`` scores as a DTensor, ``Shard(1)`` if the vocabulary is sharded.
    """
    from torch.distributed.tensor import DTensor, Partial, Shard

    sharding, local_tokens, compute_dtype = _local_arguments(tokens, weight, bias)
    hidden = local_tokens.hidden
    local_weight = _local(weight)
    local_bias = _local(bias)
    autocast: AbstractContextManager[object] = nullcontext()
    if sharding.n_shards > 1 and hidden.requires_grad and torch.is_grad_enabled():
        if hidden.dtype in (torch.float16, torch.bfloat16):
            if not torch.is_autocast_enabled(hidden.device.type):
                autocast = torch.autocast(hidden.device.type, dtype=hidden.dtype)
            hidden = hidden.float()  # so that partial gradients are not rounded before the sum
        replica = DTensor.from_local(
            hidden,
            sharding.mesh,
            sharding.placements(None),
            run_check=False,
        )
        # Backward sums a Partial() gradient over the ranks. Forward gets the same tensor back.
        hidden = replica.to_local(grad_placements=sharding.placements(Partial()))
    with autocast:
        if local_weight.size(0) == 0:  # fewer columns than ranks
            scores = _scores_without_columns(
                local_tokens._replace(hidden=hidden),
                local_weight,
                local_bias,
            )
            scores = scores.to(out_dtype or compute_dtype)
        else:
            scores = head(
                hidden,
                local_weight,
                local_bias,
                attention_mask=local_tokens.attention_mask,
                cu_seqlens=local_tokens.cu_seqlens,
                weight_main_grad=_local(weight_main_grad),
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
    out_dtype: torch.dtype | None,
    top_k: int | None,
) -> Tensor:
    """Compute sparse scores with an LM head whose vocabulary is sharded over ranks.

    Each rank computes and selects scores of its part of the vocabulary. The selected scores are
    gathered, and the `top_k` largest of each row are selected among them.

    Args:
        head: :func:`lsr_head_sparse` with its options, for plain tensors.
        tokens: token states, equal on every rank.
        weight: ``[V, D]`` DTensor.
        bias: ``[V]`` DTensor, or ``None``.
        out_dtype: dtype of the scores; ``None`` is that of the products.
        top_k: largest number of entries per row; ``None`` selects all.

    Returns:
        ``[B, V]`` plain CSR tensor, equal on every rank.
    """
    sharding, local_tokens, compute_dtype = _local_arguments(tokens, weight, bias)
    hidden = local_tokens.hidden
    local_weight = _local(weight)
    accumulator_dtype = torch.promote_types(hidden.dtype, torch.float32)
    with torch.no_grad():
        if local_weight.size(0) == 0:  # the vocabulary is too small to be divided over all ranks
            counts = torch.zeros(local_tokens.batch, dtype=torch.int64, device=hidden.device)
            columns = counts.new_zeros(0)
            values = hidden.new_zeros(0, dtype=accumulator_dtype)
        else:
            local_scores = head(
                hidden,
                local_weight,
                _local(bias),
                attention_mask=local_tokens.attention_mask,
                cu_seqlens=local_tokens.cu_seqlens,
                out_dtype=accumulator_dtype,
            )
            counts = local_scores.crow_indices().diff()
            columns = local_scores.col_indices()
            values = local_scores.values()
        rows = torch.arange(counts.numel(), device=counts.device).repeat_interleave(counts)
        entries = _gather_entries(rows, columns + sharding.first_column(), values, sharding)
        if top_k is not None:
            entries = _largest_entries(*entries, top_k)
        shape = (counts.numel(), sharding.vocab)
        return csr_from_entries(*entries, shape, out_dtype or compute_dtype)


class _LocalArguments(NamedTuple):
    """Arguments of a vocabulary-parallel head on this rank, after their checks.

    Attributes:
        sharding: sharding of the vocabulary.
        local_tokens: the tokens as plain tensors.
        compute_dtype: dtype of the products.
    """

    sharding: VocabularySharding
    local_tokens: Tokens
    compute_dtype: torch.dtype


def _local_arguments(tokens: Tokens, weight: Tensor, bias: Tensor | None) -> _LocalArguments:
    """Check that the arguments are DTensors whose placements the head supports, and unwrap tokens.

    Args:
        tokens: token states with their mask or offsets.
        weight: ``[V, D]``.
        bias: ``[V]``, or ``None``.

    Raises:
        TypeError: if an argument is not a tensor, or if dtypes are incompatible.
        ValueError: if an argument is not a DTensor, or has an unsupported placement.
    """
    from torch.distributed.tensor import DTensor

    hidden = tokens.hidden
    check_tensor("hidden", hidden)
    check_tensor("weight", weight)
    if not isinstance(weight, DTensor):
        raise ValueError(
            "weight must be a DTensor if hidden or bias is one, got a plain tensor; distribute "
            "it with distribute_tensor(weight, mesh, [Shard(0)]), or pass plain tensors only.",
        )
    sharding = VocabularySharding(weight.device_mesh, _sharded_mesh_dim(weight), weight.size(0))
    _check_bias(bias, weight)
    if not isinstance(hidden, DTensor):
        raise ValueError(
            "hidden must be a DTensor if weight is one, got a plain tensor, which may differ "
            "between ranks. With tensor parallelism, where every rank holds the same rows, use "
            "DTensor.from_local(hidden, weight.device_mesh, [Replicate()]) or "
            "tilefold.nn.parallel.VocabularyParallel. With FSDP, where ranks hold different rows, "
            "read the weight inside the forward of its FSDP module, which gathers it.",
        )
    _check_replicated(tokens, weight.device_mesh)
    return _LocalArguments(
        sharding=sharding,
        local_tokens=Tokens(*map(_local, tokens)),
        compute_dtype=product_dtype(hidden, weight),
    )


def _check_bias(bias: Tensor | None, weight: DTensor) -> None:
    """Check that a bias is sharded like the weight.

    Args:
        bias: ``[V]``, or ``None``.
        weight: ``[V, D]``.
    """
    from torch.distributed.tensor import DTensor

    if bias is None:
        return
    check_tensor("bias", bias)
    if not isinstance(bias, DTensor):
        raise ValueError(
            "bias must be a DTensor if weight is one, got a plain tensor; distribute it like "
            "the weight with distribute_tensor(bias, weight.device_mesh, weight.placements).",
        )
    if bias.device_mesh != weight.device_mesh or bias.placements != weight.placements:
        raise ValueError(
            "bias must have the mesh and the placements of weight "
            f"({weight.placements} on {weight.device_mesh}), got {bias.placements} on "
            f"{bias.device_mesh}; redistribute it with "
            "bias.redistribute(weight.device_mesh, weight.placements).",
        )
    check_shape("bias", bias, "V", V=weight.size(0))


def _check_replicated(tokens: Tokens, mesh: DeviceMesh) -> None:
    """Check that token states, masks and offsets are replicated on the mesh of the weight.

    Plain tensors are not checked. Masks and offsets may be plain, since they have no gradient.

    Args:
        tokens: token states, which are a DTensor, with their mask or offsets.
        mesh: mesh of the weight.
    """
    from torch.distributed.tensor import DTensor

    for name, value in tokens._asdict().items():
        if not isinstance(value, DTensor):
            continue
        if value.device_mesh != mesh:
            raise ValueError(
                f"{name} must be on the same mesh as weight ({mesh}), got {value.device_mesh}; "
                "redistribute one of them.",
            )
        if not all(placement.is_replicate() for placement in value.placements):
            raise ValueError(
                f"{name} must be Replicate() on every dimension of the mesh, got "
                f"{value.placements}; gather it with "
                f"{name}.redistribute(placements=[Replicate()] * {mesh.ndim}).",
            )


def _sharded_mesh_dim(weight: DTensor) -> int | None:
    """Return the dimension of the mesh that shards the weight's rows, or ``None``.

    Raises:
        ValueError: if the placement is anything but ``Shard(0)`` on at most one dimension and
            ``Replicate()`` on the others, or if the mesh does not contain this rank.
    """
    from torch.distributed.tensor import Shard

    placements = weight.placements
    sharded = [i for i, placement in enumerate(placements) if not placement.is_replicate()]
    # The exact type is compared, because subclasses of Shard place rows differently.
    is_row_shard = [type(placements[i]) is Shard and placements[i].is_shard(0) for i in sharded]
    if len(sharded) > 1 or not all(is_row_shard):
        raise ValueError(
            "weight must be Shard(0) on at most one dimension of its mesh and Replicate() on the "
            f"others, got {placements}; weight.redistribute(placements=[Shard(0)]) shards the "
            "vocabulary, and a weight that FSDP shards must be read inside the forward of its "
            "FSDP module.",
        )
    if weight.device_mesh.get_coordinate() is None:
        raise ValueError(
            "weight must be on a mesh that contains this rank, got one that does not; call on its "
            "ranks only.",
        )
    return sharded[0] if sharded else None


def _local(value: Any) -> Any:
    """Return the local tensor of a DTensor, and any other value unchanged."""
    from torch.distributed.tensor import DTensor

    return value.to_local() if isinstance(value, DTensor) else value


def _scores_without_columns(tokens: Tokens, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return scores ``[B, 0]`` that depend on all arguments, for a rank without columns.

    The gradients of this rank are zeros, which the sum over the ranks needs.

    Args:
        tokens: the token states.
        weight: ``[0, D]``.
        bias: ``[0]``, or ``None``.
    """
    hidden = tokens.hidden
    sum_of_tokens = hidden.sum(dim=tuple(range(hidden.dim() - 1))).to(weight.dtype)
    scores = sum_of_tokens.expand(tokens.batch, -1) @ weight.T
    return scores if bias is None else scores + bias


def _largest_entries(
    rows: Tensor,
    columns: Tensor,
    values: Tensor,
    top_k: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Select the ``top_k`` largest entries of each row.

    Among equal values the lowest columns are selected.

    Args:
        rows: ``[n]`` rows of the entries.
        columns: ``[n]`` columns, ascending within a row.
        values: ``[n]`` values.
        top_k: number of entries per row.

    Returns:
        Rows, columns and values of the selected entries, in their order.
    """
    # Two stable sorts order the entries by row, and within a row by descending value.
    by_value = values.sort(descending=True, stable=True).indices
    by_row_and_value = by_value[rows[by_value].sort(stable=True).indices]
    sorted_rows = rows[by_row_and_value]
    counts = torch.bincount(rows)
    row_starts = counts.cumsum(0) - counts
    ranks = torch.arange(sorted_rows.numel(), device=rows.device) - row_starts[sorted_rows]
    selected = by_row_and_value[ranks < top_k].sort().values
    return rows[selected], columns[selected], values[selected]


def _gather_entries(
    rows: Tensor,
    columns: Tensor,
    values: Tensor,
    sharding: VocabularySharding,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gather the entries of all shards of the vocabulary, in the order of the ranks.

    Ranks hold ascending ranges of columns, so the columns of each row stay sorted. Ranks have
    different numbers of entries, so all are padded to the largest number for the exchange.

    Args:
        rows: ``[n]`` rows of this rank's entries.
        columns: ``[n]`` columns in the whole vocabulary.
        values: ``[n]`` values.
        sharding: the sharding of the vocabulary.

    Returns:
        Rows, columns and values of all entries, equal on every rank.
    """
    if sharding.dim is None:
        return rows, columns, values
    group = sharding.mesh.get_group(sharding.dim)
    local_count = torch.tensor([rows.numel()], device=rows.device)
    gathered_counts = [torch.empty_like(local_count) for _ in range(sharding.n_shards)]
    torch.distributed.all_gather(gathered_counts, local_count, group=group)
    counts = [int(count) for count in gathered_counts]

    def gather(local: Tensor) -> Tensor:
        padded = local.new_zeros(max(counts))
        padded[: local.numel()] = local
        gathered = [torch.empty_like(padded) for _ in counts]
        torch.distributed.all_gather(gathered, padded, group=group)
        return torch.cat(
            [shard[:count] for shard, count in zip(gathered, counts, strict=True)],
        )

    return gather(rows), gather(columns), gather(values)
