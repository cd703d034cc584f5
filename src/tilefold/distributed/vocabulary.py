"""A vocabulary whose rows are divided among ranks that have different texts."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class PackedTokens(NamedTuple):
    """Packed hidden states of the texts of all ranks, rank after rank.

    Attributes:
        hidden: hidden states, a DTensor ``[T, D]`` that every rank has.
        cu_seqlens: offsets of the texts, int32 ``[B + 1]``.
    """

    hidden: Tensor
    cu_seqlens: Tensor


class SharedVocabulary:
    """Rows of embeddings and of an LM head that are divided among ranks with different texts.

    A rank computes the scores of its terms for the texts of all ranks. Then the ranks exchange
    scores, so that a rank has all terms of its own texts. Unlike FSDP, which gathers the complete
    weight on every rank, this sends hidden states and scores only.

    Gradients of the rows are averages over ranks, like those of FSDP and DDP.

    Args:
        mesh: the mesh of all ranks, with one dimension.
        gather: returns the values of all ranks, such as ``World.gather``.
    """

    def __init__(self, mesh: DeviceMesh, gather: Callable[[Any], list[Any]]) -> None:
        self._mesh = mesh
        self._gather = gather
        self._rank = mesh.get_local_rank()

    def divide(self, weight: nn.Parameter) -> nn.Parameter:
        """Return this rank's rows of a parameter as a DTensor parameter.

        Args:
            weight: the complete parameter ``[V, ...]``, equal on every rank.
        """
        from torch.distributed.tensor import Shard, distribute_tensor

        shard = distribute_tensor(
            weight.detach().clone(),
            self._mesh,
            [Shard(0)],
            src_data_rank=None,
        )
        return nn.Parameter(shard, requires_grad=weight.requires_grad)

    def gather_tokens(self, hidden: Tensor, cu_seqlens: Tensor) -> PackedTokens:
        """Return the packed tokens of all ranks, with gradients.

        Args:
            hidden: packed hidden states ``[T, D]`` of this rank's texts.
            cu_seqlens: offsets of the texts, ``[B + 1]``. Ranks must have equal numbers of texts.

        Raises:
            RuntimeError: if ranks have different numbers of texts.
        """
        from torch.distributed.tensor import DTensor, Replicate

        sizes = self._gather((hidden.size(0), cu_seqlens.numel()))
        if len({n_offsets for _, n_offsets in sizes}) > 1:
            raise RuntimeError(
                "ranks must have the same number of texts to share a vocabulary, got "
                f"{[n_offsets - 1 for _, n_offsets in sizes]}; leave split_vocabulary out.",
            )
        counts = [n_tokens for n_tokens, _ in sizes]
        gather: Any = _GatherTokens.apply
        all_hidden: Tensor = gather(hidden, counts, self._rank, self._mesh.get_group())
        lengths = _all_gather(cu_seqlens.diff().contiguous(), self._mesh.get_group())
        offsets = nn.functional.pad(torch.cat(lengths).cumsum(0), (1, 0)).to(torch.int32)
        replica = DTensor.from_local(all_hidden, self._mesh, [Replicate()], run_check=False)
        return PackedTokens(replica, offsets)

    def own_rows(self, scores: Any) -> Tensor:
        """Return all columns of this rank's rows of scores, with gradients.

        Args:
            scores: a DTensor ``[B, V]`` for the texts of all ranks, with its columns divided among
                the ranks.
        """
        from torch.distributed.tensor import Shard

        rows: Tensor = scores.redistribute(placements=[Shard(0)]).to_local()
        return self._with_averaged_gradient(rows)

    def embed(self, input_ids: Tensor, weight: Any, padding_id: int | None) -> Tensor:
        """Return the embeddings of this rank's tokens, ``[T, D]``, with gradients.

        Args:
            input_ids: token ids ``[T]`` of this rank.
            weight: the divided embeddings, a DTensor ``[V, D]``.
            padding_id: the id whose embedding has no gradient; None for no id.
        """
        from torch.distributed.tensor import DTensor, Partial, Shard

        counts = self._gather(input_ids.numel())
        padded_ids = nn.functional.pad(input_ids, (0, max(counts) - input_ids.numel()))
        all_ids = torch.cat(_all_gather(padded_ids, self._mesh.get_group()))
        local_weight: Tensor = weight.to_local()
        n_rows = local_weight.size(0)
        rows_per_rank = -(-weight.size(0) // self._mesh.size())  # as torch.chunk divides them
        local_ids = all_ids - self._rank * rows_per_rank
        is_elsewhere = (local_ids < 0) | (local_ids >= n_rows)
        embeddings = local_weight[local_ids.masked_fill(is_elsewhere, 0)]
        if padding_id is not None:
            is_padding = (all_ids == padding_id)[:, None]
            embeddings = torch.where(is_padding, embeddings.detach(), embeddings)
        embeddings = embeddings.masked_fill(is_elsewhere[:, None], 0)
        # One rank has the embedding of a token, and all others have zeros.
        partial = DTensor.from_local(embeddings, self._mesh, [Partial()], run_check=False)
        own_embeddings: Tensor = partial.redistribute(placements=[Shard(0)]).to_local()
        return self._with_averaged_gradient(own_embeddings[: input_ids.numel()])

    def _with_averaged_gradient(self, rows: Tensor) -> Tensor:
        """Return rows unchanged; backward divides their gradient by the number of ranks.

        The summed gradients of the divided weight become the mean, as in DDP. ``gather_tokens``
        undoes the factor for hidden states.

        Args:
            rows: the rows, of any shape.
        """
        scale_gradient: Any = _ScaleGradient.apply
        scaled: Tensor = scale_gradient(rows, 1 / self._mesh.size())
        return scaled


class SharedEmbedding:
    """Forward of an embedding whose rows are divided among ranks.

    Args:
        embedding: the module, with a divided weight.
        vocabulary: the ranks that share the rows.
    """

    def __init__(self, embedding: nn.Embedding, vocabulary: SharedVocabulary) -> None:
        """Prepare to replace the forward of an embedding.

        Args:
            embedding: the embedding, whose weight is divided among ranks.
            vocabulary: the ranks.
        """
        self._embedding = embedding
        self._vocabulary = vocabulary
        # Runs what the class of the module does after the lookup, such as Gemma's factor. Its
        # table has a row for each token of a batch.
        self._table = copy.copy(embedding)
        self._table.padding_idx = None
        self._table._parameters = {"weight": None}

    def __call__(self, input_ids: Tensor) -> Tensor:
        """Return the embeddings ``[..., D]`` of token ids ``[...]``."""
        rows = self._vocabulary.embed(
            input_ids.reshape(-1),
            self._embedding.weight,
            self._embedding.padding_idx,
        )
        positions = torch.arange(input_ids.numel(), device=input_ids.device)
        embeddings: Tensor = torch.func.functional_call(
            self._table,
            {"weight": rows},
            (positions.view(input_ids.shape),),
        )
        return embeddings


def _all_gather(tensor: Tensor, group: Any) -> list[Tensor]:
    """Return the tensors of all ranks, which have equal shapes, in the order of the ranks."""
    tensors = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(tensors, tensor, group=group)
    return tensors


class _ScaleGradient(torch.autograd.Function):
    """Returns a tensor unchanged, and multiplies its gradient by a factor."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, factor: float) -> Tensor:
        """Return the tensor."""
        ctx.factor = factor
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Return the multiplied gradient."""
        (gradient,) = gradients
        return gradient * ctx.factor, None


class _GatherTokens(torch.autograd.Function):
    """Gathers the tokens of all ranks.

    Backward returns this rank's part of the gradient. No sum over ranks is needed, because the
    gradient of a replicated DTensor is complete on every rank. It is multiplied by the number of
    ranks, by which ``own_rows`` has divided the gradient of the scores.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        counts: list[int],
        rank: int,
        group: Any,
    ) -> Tensor:
        """Return the tokens ``[sum(counts), D]``, rank after rank."""
        ctx.n_ranks = len(counts)
        ctx.first_token = sum(counts[:rank])
        ctx.n_tokens = counts[rank]
        padded = hidden.new_zeros(max(counts), hidden.size(1))
        padded[: hidden.size(0)] = hidden
        shards = _all_gather(padded, group)
        return torch.cat([shard[:count] for shard, count in zip(shards, counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Return the gradient of this rank's tokens."""
        (gradient,) = gradients
        own_gradient = gradient.narrow(0, ctx.first_token, ctx.n_tokens)
        return own_gradient * ctx.n_ranks, None, None, None
