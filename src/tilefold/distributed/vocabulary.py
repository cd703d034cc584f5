"""A vocabulary whose rows are divided among ranks that have different texts."""

from __future__ import annotations

import copy
import math
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
    """Vocabulary rows of embeddings and of an LM head, divided among ranks with different texts.

    A rank computes the scores of its terms for the texts of all ranks. Then the ranks exchange
    scores, so that each rank has the scores of all terms for its texts. Unlike FSDP, which gathers
    the complete weight on every rank, only hidden states and scores are sent.

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

        n_texts = cu_seqlens.numel() - 1
        sizes_of_ranks = self._gather((hidden.size(0), n_texts))
        text_counts = [n_texts_of_rank for _, n_texts_of_rank in sizes_of_ranks]
        if len(set(text_counts)) > 1:
            raise RuntimeError(
                "ranks must have the same number of texts to share a vocabulary, got "
                f"{text_counts}; leave split_vocabulary out.",
            )
        token_counts = [n_tokens for n_tokens, _ in sizes_of_ranks]
        gather_tokens: Any = _GatherTokens.apply
        all_hidden: Tensor = gather_tokens(
            hidden,
            token_counts,
            self._rank,
            self._mesh.get_group(),
        )
        text_lengths = _all_gather(cu_seqlens.diff().contiguous(), self._mesh.get_group())
        text_ends = torch.cat(text_lengths).cumsum(0)
        offsets = nn.functional.pad(text_ends, (1, 0)).to(torch.int32)  # the first text begins at 0
        replica = DTensor.from_local(all_hidden, self._mesh, [Replicate()], run_check=False)
        return PackedTokens(replica, offsets)

    def own_rows(self, scores: Any) -> Tensor:
        """Exchange scores, and return those of this rank's texts for the whole vocabulary.

        Args:
            scores: a DTensor ``[B, V]`` for the texts of all ranks, with its columns divided among
                the ranks.

        Returns:
            Scores ``[B / ranks, V]``, with gradients.
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

        # Every rank looks up the tokens of all ranks in its rows of the table. The ids are padded,
        # because a collective needs tensors of equal shapes.
        token_counts = self._gather(input_ids.numel())
        padded_ids = nn.functional.pad(input_ids, (0, max(token_counts) - input_ids.numel()))
        all_ids = torch.cat(_all_gather(padded_ids, self._mesh.get_group()))
        local_weight: Tensor = weight.to_local()
        n_local_rows = local_weight.size(0)
        rows_per_rank = math.ceil(weight.size(0) / self._mesh.size())  # as torch.chunk divides them
        local_ids = all_ids - self._rank * rows_per_rank
        is_on_other_rank = (local_ids < 0) | (local_ids >= n_local_rows)
        embeddings = local_weight[local_ids.masked_fill(is_on_other_rank, 0)]
        if padding_id is not None:
            is_padding = (all_ids == padding_id)[:, None]
            embeddings = torch.where(is_padding, embeddings.detach(), embeddings)
        embeddings = embeddings.masked_fill(is_on_other_rank[:, None], 0)
        # One rank has the embedding of a token, and all others have zeros. The sum over the ranks
        # (Partial -> Shard) is the embedding; each rank gets the sums of its tokens.
        partial = DTensor.from_local(embeddings, self._mesh, [Partial()], run_check=False)
        own_embeddings: Tensor = partial.redistribute(placements=[Shard(0)]).to_local()
        return self._with_averaged_gradient(own_embeddings[: input_ids.numel()])

    def _with_averaged_gradient(self, rows: Tensor) -> Tensor:
        """Return rows unchanged; backward divides their gradient by the number of ranks.

        The gradient of a divided weight is a sum over the texts of all ranks, which so becomes the
        mean over ranks, as in DDP. ``gather_tokens`` undoes the factor for hidden states.

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
        # A copy of the module, whose table is not the vocabulary, but the embeddings of the tokens
        # of a batch, one per row. Calling it with row numbers runs what the class of the module
        # does after the lookup, such as Gemma's factor.
        self._module_of_batch = copy.copy(embedding)
        self._module_of_batch.padding_idx = None
        self._module_of_batch._parameters = {"weight": None}

    def __call__(self, input_ids: Tensor) -> Tensor:
        """Return the embeddings ``[..., D]`` of token ids ``[...]``."""
        token_embeddings = self._vocabulary.embed(
            input_ids.reshape(-1),
            self._embedding.weight,
            self._embedding.padding_idx,
        )
        # The module looks up row i of `token_embeddings` for token i.
        row_numbers = torch.arange(input_ids.numel(), device=input_ids.device)
        embeddings: Tensor = torch.func.functional_call(
            self._module_of_batch,
            {"weight": token_embeddings},
            (row_numbers.view(input_ids.shape),),
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
    gradient of a replicated DTensor is complete on every rank. The gradient is multiplied by the
    number of ranks, because ``own_rows`` has divided the gradient of the scores by that number.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        token_counts: list[int],
        rank: int,
        group: Any,
    ) -> Tensor:
        """Return the hidden states of all ranks' tokens, rank after rank.

        Args:
            ctx: context of autograd.
            hidden: hidden states ``[T, D]`` of this rank's tokens.
            token_counts: number of tokens of each rank.
            rank: number of this rank.
            group: process group of the ranks.

        Returns:
            Hidden states ``[sum(token_counts), D]``.
        """
        ctx.n_ranks = len(token_counts)
        ctx.first_token = sum(token_counts[:rank])
        ctx.n_tokens = token_counts[rank]
        # A collective needs tensors of equal shapes, so that all are padded to the longest.
        padded = hidden.new_zeros(max(token_counts), hidden.size(1))
        padded[: hidden.size(0)] = hidden
        parts = _all_gather(padded, group)
        return torch.cat([part[:count] for part, count in zip(parts, token_counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Return the gradient of this rank's tokens."""
        (gradient,) = gradients
        own_gradient = gradient.narrow(0, ctx.first_token, ctx.n_tokens)
        return own_gradient * ctx.n_ranks, None, None, None
