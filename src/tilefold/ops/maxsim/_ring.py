"""MaxSim scores and contrastive loss over the documents of all ranks of a process group.

Documents travel around a ring of ranks and are never gathered. Rank r computes with the documents
of rank r, then of rank r - 1, then of rank r - 2, and so on. The next block arrives from rank r - 1
while the current one is computed. A rank holds its own block and at most two more.

Backward sends the documents around the ring once more. Their gradients follow one step later: each
rank adds its share in the order of the ring, and the sums end at the rank that owns the documents.

Before the first block, the ranks exchange the layouts of their inputs and check that they agree.
This is the only time that the CPU waits for the other ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from tilefold.distributed.process_group import resolve_group
from tilefold.ops._shared.checks import dtype_name
from tilefold.ops._shared.impl import host_may_read, impl_with_fallback
from tilefold.ops.maxsim._arguments import (
    check_arguments,
    check_labels,
    check_scale,
    labelled_loss,
    labels_were_checked,
)
from tilefold.ops.maxsim._problem import (
    MaxSimOptions,
    MaxSimTensors,
    Problem,
    check_values,
    wide_dtype,
)
from tilefold.ops.maxsim.api import MAXSIM, by_reference, query_token_counts
from tilefold.ops.maxsim.quantized import QuantizedTokens

# A block is sent as three tensors with the tags 0, 1 and 2.
BLOCK_TAG = 0
GRADIENT_TAG = 3


class RankLayout(NamedTuple):
    """Layout and options of one rank's inputs, which every rank learns from every other.

    Attributes:
        device: device type of the queries.
        dtype: dtype of queries and documents.
        dim: size D of a token vector.
        loss_options: scale, reduction, mask mode, temperature and whether to normalize.
        queries_need_grad: whether the queries require a gradient.
        documents_need_grad: whether the documents require a gradient.
        n_queries: number of queries.
        n_documents: number of documents.
        n_rows: number of document tokens, padding included.
        document_length: tokens of each padded document; 0 for packed documents.
        packed: whether the documents are packed.
        masked: whether the documents have a mask.
    """

    device: str
    dtype: str
    dim: int
    loss_options: tuple[object, ...]
    queries_need_grad: bool
    documents_need_grad: bool
    n_queries: int
    n_documents: int
    n_rows: int
    document_length: int
    packed: bool
    masked: bool


# Fields of `RankLayout` that must be equal on all ranks, with the first words of the error.
_EQUAL_FIELDS = {
    "device": "queries must lie on the same kind of device",
    "dtype": "queries must have the same dtype",
    "dim": "queries must have the same D",
    "loss_options": "scale, reduction, mask_mode, temperature and normalize must be the same",
    "queries_need_grad": (
        "queries must require a gradient on all ranks or on none: they must be the same"
    ),
    "documents_need_grad": (
        "documents must require a gradient on all ranks or on none: they must be the same"
    ),
}


class DocumentBlock(NamedTuple):
    """Documents of one rank, in the form that ranks send to each other.

    Attributes:
        rows: ``[T, D]`` token vectors.
        mask: ``[T]`` uint8, or empty without a mask.
        offsets: ``[N + 1]`` int64 offsets of packed documents, or empty for padded ones.
    """

    rows: Tensor
    mask: Tensor
    offsets: Tensor


class Ring(NamedTuple):
    """Ranks of a process group as a ring: each sends to the next one, and the last to rank 0.

    Attributes:
        group: the process group.
        rank: this rank.
        layouts: layouts of all ranks' inputs, by rank.
    """

    group: dist.ProcessGroup
    rank: int
    layouts: tuple[RankLayout, ...]

    @property
    def n_ranks(self) -> int:
        """Number of ranks."""
        return len(self.layouts)

    def start_exchange(
        self,
        outgoing: Sequence[Tensor],
        incoming: Sequence[Tensor],
        tag: int,
    ) -> list[dist.Work]:
        """Start to send tensors to the next rank, and to receive tensors from the previous one.

        Args:
            outgoing: tensors to send. Empty tensors are not sent.
            incoming: tensors to receive into. Empty tensors are not received.
            tag: tag of the first tensor; tensor i has the tag ``tag + i``.

        Returns:
            The transfers, which the caller must wait for.
        """
        operations = [
            *self._transfers(dist.isend, outgoing, self.rank + 1, tag),
            *self._transfers(dist.irecv, incoming, self.rank - 1, tag),
        ]
        return dist.batch_isend_irecv(operations) if operations else []

    def _transfers(
        self,
        operation: Callable[..., Any],
        tensors: Sequence[Tensor],
        peer: int,
        tag: int,
    ) -> Iterator[dist.P2POp]:
        """Yield a transfer to or from another rank for each tensor that is not empty.

        Args:
            operation: ``dist.isend`` or ``dist.irecv``.
            tensors: tensors to send or to receive into.
            peer: the other rank, modulo the number of ranks.
            tag: tag of the first tensor; tensor i has the tag ``tag + i``.
        """
        global_peer = dist.get_global_rank(self.group, peer % self.n_ranks)
        for i, tensor in enumerate(tensors):
            if tensor.numel():
                yield dist.P2POp(operation, tensor, global_peer, self.group, tag + i)

    def blocks(self, local: DocumentBlock) -> Iterator[tuple[int, DocumentBlock]]:
        """Yield the documents of every rank, in the order in which this rank receives them.

        In step ``s``, this rank has the documents of rank ``rank - s``. The next block is received
        while the caller works with the current one.

        Args:
            local: documents of this rank.

        Yields:
            The rank that owns the documents, and the documents.
        """
        current = local
        for step in range(self.n_ranks):
            owner = (self.rank - step) % self.n_ranks
            upcoming = current
            transfers: list[dist.Work] = []
            if step + 1 < self.n_ranks:
                next_owner = owner - 1  # -1 is the last rank
                upcoming = _empty_block(self.layouts[next_owner], like=local)
                transfers = self.start_exchange(current, upcoming, BLOCK_TAG)
            yield owner, current
            for transfer in transfers:
                transfer.wait()
            current = upcoming


def _empty_block(layout: RankLayout, like: DocumentBlock) -> DocumentBlock:
    """Allocate memory for the documents of a rank, with the dtypes and the device of ``like``."""
    return DocumentBlock(
        rows=like.rows.new_empty(layout.n_rows, layout.dim),
        mask=like.mask.new_empty(layout.n_rows if layout.masked else 0),
        offsets=like.offsets.new_empty(layout.n_documents + 1 if layout.packed else 0),
    )


def _describe_local_inputs(
    tensors: MaxSimTensors,
    options: MaxSimOptions,
    loss_options: tuple[object, ...],
) -> RankLayout:
    """Describe the inputs of this rank for the other ranks.

    Args:
        tensors: tensors of this rank.
        options: checked options.
        loss_options: options of the loss, which must be equal on all ranks.
    """
    problem = Problem.of(tensors, options)
    grad_enabled = torch.is_grad_enabled()
    return RankLayout(
        device=problem.queries.device.type,
        dtype=dtype_name(problem.queries.dtype),
        dim=problem.queries.size(1),
        loss_options=loss_options,
        queries_need_grad=grad_enabled and tensors.queries.requires_grad,
        documents_need_grad=grad_enabled and tensors.documents.requires_grad,
        n_queries=problem.n_queries,
        n_documents=problem.n_documents,
        n_rows=problem.documents.size(0),
        document_length=problem.document_length,
        packed=problem.cu_documents is not None,
        masked=problem.document_mask is not None,
    )


def exchange_layouts(group: dist.ProcessGroup, layout: RankLayout | Exception) -> Ring:
    """Exchange the layouts of all ranks' inputs, and check that they agree.

    Args:
        group: the process group.
        layout: layout of this rank's inputs, or the error that its arguments raised.

    Raises:
        Exception: the error of this rank, if it passed one.
        ValueError: on every rank if another rank passed an error, or if the layouts disagree.
    """
    layouts_or_errors: list[Any] = [None] * dist.get_world_size(group)
    message = layout if isinstance(layout, RankLayout) else str(layout)
    dist.all_gather_object(layouts_or_errors, message, group=group)
    if not isinstance(layout, RankLayout):
        raise layout
    errors = [
        f"rank {rank}: {layout_or_error}"
        for rank, layout_or_error in enumerate(layouts_or_errors)
        if isinstance(layout_or_error, str)
    ]
    if errors:
        raise ValueError(f"arguments must fit on every rank of group, got on {', '.join(errors)}")
    for field, expected in _EQUAL_FIELDS.items():
        values = [getattr(rank_layout, field) for rank_layout in layouts_or_errors]
        if len(set(values)) > 1:
            raise ValueError(
                f"{expected} on every rank of group, got {', '.join(map(str, values))} by rank.",
            )
    return Ring(group, dist.get_rank(group), tuple(layouts_or_errors))


@torch.compiler.disable  # type: ignore[untyped-decorator]
def loss_over_ranks(
    tensors: MaxSimTensors,
    labels: Tensor | None,
    scale: float,
    group: object,
    reduction: str,
    mask_mode: str,
    temperature: float | None,
    normalize: bool,
    impl: str,
) -> Tensor | None:
    """Compute :func:`tilefold.ops.maxsim_contrastive_loss` over the ranks of a process group.

    Compilers leave this function out, since the transfers depend on the inputs of other ranks.

    Args:
        tensors: queries and documents of this rank.
        labels: ``[Nq]`` document of each query among this rank's, or ``None``.
        scale: factor of the scores.
        group: the process group, or ``"world"``.
        reduction: ``"sum"`` or ``"mean"`` over the tokens of a query.
        mask_mode: whether masked document tokens are left out (``"exclude"``) or score 0
            (``"zero"``).
        temperature: temperature of the smooth maximum, ``None`` for the maximum.
        normalize: whether token vectors are divided by their Euclidean norm.
        impl: name of the implementation, such as ``"auto"``.

    Returns:
        The loss, the same on every rank, or ``None`` if the group has no other rank.
    """
    ranks = resolve_group(group)
    if ranks is None:
        return None
    maxsim_options = (reduction, mask_mode, temperature, normalize)
    try:  # the other ranks wait for the layout of this one, so they must learn of any error
        check_scale(scale)
        documents: object = tensors.documents
        if isinstance(documents, QuantizedTokens):
            raise TypeError(
                "documents must be a torch.Tensor, got QuantizedTokens; give "
                "documents.dequantize().",
            )
        options, prepare = check_arguments(tensors, "all", *maxsim_options)
        if prepare is not None:
            tensors = prepare(tensors)
        impl = impl_with_fallback(impl, MAXSIM.chosen_impl(tensors.queries, impl))
        if host_may_read(tensors.queries.device, impl) or impl == "reference":
            check_values(tensors)
        n_queries, n_documents = Problem.of(tensors, options).score_shape
        checked_labels = check_labels(labels, n_queries, n_documents, tensors.queries.device)
    except (TypeError, ValueError, RuntimeError) as error:
        exchange_layouts(ranks, error)
        raise
    layout = _describe_local_inputs(tensors, options, (scale, *maxsim_options))
    ring = exchange_layouts(ranks, layout)
    scores: Tensor = _RingScores.apply(  # type: ignore[no-untyped-call]
        tensors.queries,
        tensors.documents,
        tensors,
        options._replace(mean=False),
        ring,
        impl,
    )
    if reduction == "mean" and tensors.queries.numel():
        scores = scores / query_token_counts(tensors, scores.dim())
    first_document = sum(layout.n_documents for layout in ring.layouts[: ring.rank])
    loss_sum = labelled_loss(
        scale * scores,
        checked_labels,
        n_documents,
        first_document=first_document,
        reduction="sum",
        were_checked=labels_were_checked(labels),
    )
    n_queries_of_all = sum(layout.n_queries for layout in ring.layouts)
    loss: Tensor = _SumOverRanks.apply(  # type: ignore[no-untyped-call]
        loss_sum / n_queries_of_all,
        ring,
    )
    return loss


class _SumOverRanks(torch.autograd.Function):
    """Sum of a scalar over the ranks; backward multiplies by the number of ranks."""

    @staticmethod
    def forward(ctx: Any, share: Tensor, ring: Ring) -> Tensor:
        ctx.n_ranks = ring.n_ranks
        shares = [share.new_empty(1) for _ in ring.layouts]
        dist.all_gather(shares, share.reshape(1), group=ring.group)
        return torch.cat(shares).sum()  # in the same order on every rank

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] * ctx.n_ranks, None


class _RingScores(torch.autograd.Function):
    """Scores of this rank's queries and all ranks' documents: ``[Nq, sum of Nd]``, by rank."""

    @staticmethod
    def forward(
        ctx: Any,
        queries: Tensor,
        documents: Tensor,
        tensors: MaxSimTensors,
        options: MaxSimOptions,
        ring: Ring,
        impl: str,
    ) -> Tensor:
        """Compute the scores block by block, as the documents arrive from the previous rank.

        Args:
            ctx: the context of autograd.
            queries: query vectors of this rank.
            documents: document vectors of this rank. Queries and documents are separate arguments,
                since they have gradients.
            tensors: masks and offsets of both; its queries and documents are not used.
            options: checked options.
            ring: the ranks.
            impl: the implementation.
        """
        training = any(ctx.needs_input_grad[:2])
        tensors = tensors._replace(queries=queries.detach(), documents=documents.detach())
        scores: dict[int, Tensor] = {}  # by the rank that owns the documents
        winners: list[Tensor | None] = [None] * ring.n_ranks
        local = _local_block(tensors)
        for owner, block in ring.blocks(local):
            block_tensors = _with_documents(tensors, ring.layouts[owner], block)
            if impl == "reference":
                scores[owner] = by_reference(block_tensors, options)
            else:
                scores[owner], winners[owner], *_unused = torch.ops.tilefold.maxsim(
                    *block_tensors,
                    *options,
                    training,
                    impl,
                )
        ctx.save_for_backward(queries, documents, local.mask, local.offsets, *winners)
        # Token vectors must only be held by save_for_backward, which frees them with the graph.
        # Masks and offsets of the queries are small, and belong to the caller.
        ctx.tensors_without_rows = tensors._replace(
            queries=queries.new_empty(0),
            documents=documents.new_empty(0),
        )
        ctx.options = options
        ctx.ring = ring
        ctx.impl = impl
        return torch.cat([scores[rank] for rank in range(ring.n_ranks)], dim=1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dscores: Tensor) -> tuple[Tensor | None, ...]:
        """Send the documents around the ring once more, followed by the sums of their gradients.

        A rank computes the gradients of each block that it receives. It adds those of the block's
        documents to the sum that it has received with the block, and sends the sum to the next
        rank. After a full circle, the sum arrives at the rank that owns the documents.

        Args:
            ctx: the context of autograd.
            dscores: the gradient of the scores, ``[Nq, documents of all ranks]``.

        Returns:
            The gradients of queries and documents, and ``None`` for the other arguments.
        """
        ring: Ring = ctx.ring
        queries, documents, mask, offsets, *winners = ctx.saved_tensors
        tensors = ctx.tensors_without_rows._replace(queries=queries, documents=documents)
        local = DocumentBlock(_rows(documents), mask, offsets)
        need_queries, need_documents = ctx.needs_input_grad[:2]
        sum_dtype = wide_dtype(queries.dtype)
        dqueries = None
        if need_queries:
            dqueries = torch.zeros(queries.shape, dtype=sum_dtype, device=queries.device)
        # Sum of the gradients of the current block, over the ranks that the block has visited.
        received = documents
        transfers: list[dist.Work] = []
        dscores_by_rank = torch.split(
            dscores,
            [layout.n_documents for layout in ring.layouts],
            dim=1,
        )
        for step, (owner, block) in enumerate(ring.blocks(local)):
            layout = ring.layouts[owner]
            block_dqueries, block_ddocuments = _gradients(
                _with_documents(tensors, layout, block),
                ctx.options,
                dscores_by_rank[owner],
                winners[owner],
                (need_queries, need_documents),
                ctx.impl,
            )
            if dqueries is not None:
                dqueries += block_dqueries
            if not need_documents:
                continue
            for transfer in transfers:
                transfer.wait()
            if step == 0:
                ddocuments = torch.zeros(
                    layout.n_rows,
                    layout.dim,
                    dtype=sum_dtype,
                    device=queries.device,
                )
            else:
                ddocuments = received
            ddocuments += block_ddocuments.view(ddocuments.shape)
            received = torch.empty(
                ring.layouts[owner - 1].n_rows,
                layout.dim,
                dtype=sum_dtype,
                device=queries.device,
            )
            transfers = ring.start_exchange([ddocuments], [received], GRADIENT_TAG)
        for transfer in transfers:
            transfer.wait()
        local_ddocuments = None
        if need_documents:
            local_ddocuments = received.to(documents.dtype).view(documents.shape)
        if dqueries is not None:
            dqueries = dqueries.to(queries.dtype)
        return dqueries, local_ddocuments, None, None, None, None


def _rows(documents: Tensor) -> Tensor:
    """Return token vectors as contiguous rows ``[T, D]``."""
    return documents.reshape(-1, documents.size(-1)).contiguous()


def _local_block(tensors: MaxSimTensors) -> DocumentBlock:
    """Return the documents of this rank in the form that other ranks receive.

    A tensor cannot be missing there: no mask, or no offsets, is an empty tensor.
    """
    rows = _rows(tensors.documents)
    if tensors.document_mask is None:
        mask = rows.new_empty(0, dtype=torch.uint8)
    else:
        mask = (tensors.document_mask != 0).to(torch.uint8).reshape(-1)
    if tensors.cu_documents is None:
        offsets = rows.new_empty(0, dtype=torch.int64)
    else:
        offsets = tensors.cu_documents.to(torch.int64).contiguous()
    return DocumentBlock(rows, mask, offsets)


def _with_documents(
    tensors: MaxSimTensors, layout: RankLayout, block: DocumentBlock
) -> MaxSimTensors:
    """Return the tensors of a call with the documents of another rank.

    Args:
        tensors: tensors of this rank.
        layout: layout of the other rank.
        block: documents of the other rank.
    """
    if layout.packed:
        token_shape: tuple[int, ...] = (layout.n_rows,)
    else:
        token_shape = (layout.n_documents, layout.document_length)
    return tensors._replace(
        documents=block.rows.view(*token_shape, layout.dim),
        document_mask=block.mask.view(token_shape) if layout.masked else None,
        cu_documents=block.offsets if layout.packed else None,
    )


def _gradients(
    tensors: MaxSimTensors,
    options: MaxSimOptions,
    dscores: Tensor,
    winners: Tensor | None,
    needs: tuple[bool, bool],
    impl: str,
) -> Sequence[Tensor]:
    """Compute the gradients of queries and of one rank's documents.

    Args:
        tensors: queries of this rank, and documents of the rank.
        options: checked options.
        dscores: ``[Nq, Nd]`` gradient of the scores.
        winners: what the forward pass saved: positions of the document tokens with the maxima, or
            smooth maxima; ``None`` for the reference.
        needs: whether the gradients of queries and of documents are used. A gradient that is not
            used may have any value.
        impl: implementation.
    """
    if impl == "reference":
        queries = tensors.queries.detach().requires_grad_()
        documents = tensors.documents.detach().requires_grad_()
        with torch.enable_grad():
            scores = by_reference(
                tensors._replace(queries=queries, documents=documents),
                options,
            )
        return torch.autograd.grad(scores, [queries, documents], dscores)
    gradients: Sequence[Tensor] = torch.ops.tilefold.maxsim_backward(
        dscores,
        tensors.queries,
        tensors.documents,
        tensors.query_mask,
        tensors.document_mask,
        tensors.cu_queries,
        tensors.cu_documents,
        tensors.pairs,
        winners,
        None,  # norms are computed again, so that those of other ranks are not stored
        None,
        None,
        *options,
        needs,
        impl,
    )
    return gradients
