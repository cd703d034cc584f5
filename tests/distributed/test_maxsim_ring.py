"""The contrastive loss of MaxSim over several ranks equals that of one process with all documents.

Functions that take a :class:`Rank` run in every process of a group.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed
from torch import Tensor, nn

from tests.distributed.ranks import Rank, Ranks
from tests.ops.base import maxsim_ring as _ring
from tilefold.ops import maxsim, maxsim_contrastive_loss
from tilefold.testing import assert_within_budget
from tilefold.testing.maxsim import MaxSimInputs, maxsim_inputs

DIM = 16


@dataclass(frozen=True)
class LossCase:
    """Inputs and options of a contrastive loss.

    Attributes:
        layout: Layout of the shards, or ``"mixed"`` for another one on every rank.
        dtype: Data type of the token vectors.
        scale: Factor of the scores.
        impl: Implementation of MaxSim.
        options: Options of MaxSim.
    """

    layout: str = "mixed"
    dtype: torch.dtype = torch.float32
    scale: float = 0.4
    impl: str = "auto"
    options: dict[str, Any] = field(default_factory=dict)


CASES = [
    LossCase(),
    LossCase(layout="full", impl="reference"),
    LossCase(layout="packed", options={"temperature": 0.7}),
    LossCase(layout="holes", scale=20, options={"reduction": "mean", "normalize": True}),
    LossCase(layout="left", dtype=torch.float64),
    LossCase(dtype=torch.bfloat16),
    LossCase(dtype=torch.float16, options={"temperature": 0.5, "reduction": "mean"}),
]


def shard(rank: int, layout: str, dtype: torch.dtype = torch.float32) -> MaxSimInputs:
    """Queries and documents of a rank, whose numbers and lengths depend on the rank."""
    sizes = (rank + 2, 2 * rank + 3, 4 + rank, 7 + 3 * rank, DIM)
    if layout == "mixed":
        layout = ("holes", "packed", "full")[rank % 3]
    return maxsim_inputs(*sizes, layout=layout, dtype=dtype, seed=rank)


def labels_of(rank: int) -> Tensor:
    """The document of each query among those of its rank; no two are the same."""
    return torch.arange(rank + 2) * 2 % (2 * rank + 3)


@dataclass(frozen=True)
class RefusedArguments:
    """Arguments of the loss that are refused on every rank.

    Attributes:
        arguments: Keyword arguments of this rank.
        message: Part of the error message.
        wrong_by_itself: Whether those of rank 1 are wrong without a look at other ranks.
    """

    arguments: dict[str, Any]
    message: str
    wrong_by_itself: bool = False


class TokensOfShard(NamedTuple):
    """Valid tokens of each query and each document of a rank, in fp64."""

    queries: list[Tensor]
    documents: list[Tensor]


def tokens_of_shard(inputs: MaxSimInputs) -> TokensOfShard:
    packed = inputs if inputs.cu_seqlens_q is not None else inputs.packed()
    assert packed.cu_seqlens_q is not None
    assert packed.cu_seqlens_d is not None
    return TokensOfShard(
        list(packed.queries.double().split(packed.cu_seqlens_q.diff().tolist())),
        list(packed.documents.double().split(packed.cu_seqlens_d.diff().tolist())),
    )


def offsets_of(sequences: list[Tensor]) -> Tensor:
    return torch.tensor([0, *(tokens.size(0) for tokens in sequences)]).cumsum(0)


def token_count(sequences: list[Tensor]) -> int:
    return sum(tokens.size(0) for tokens in sequences)


class ExactLoss(NamedTuple):
    """The loss of one process with all queries and documents, in fp64.

    Attributes:
        loss: The loss.
        dqueries: Packed gradients of the queries of every rank.
        ddocuments: Packed gradients of the documents of every rank.
    """

    loss: Tensor
    dqueries: list[Tensor]
    ddocuments: list[Tensor]


def exact_loss(
    inputs: list[MaxSimInputs],
    scale: float,
    first_rank: int = 0,
    **options: Any,
) -> ExactLoss:
    """Compute the loss of several ranks in one process.

    Args:
        inputs: The shards of consecutive ranks.
        scale: Factor of the scores.
        first_rank: Rank of the first shard.
        options: Options of MaxSim.
    """
    shards = [tokens_of_shard(shard_inputs) for shard_inputs in inputs]
    all_queries = [tokens for shard_tokens in shards for tokens in shard_tokens.queries]
    all_documents = [tokens for shard_tokens in shards for tokens in shard_tokens.documents]
    queries = torch.cat(all_queries).requires_grad_()
    documents = torch.cat(all_documents).requires_grad_()
    scores = maxsim(
        queries,
        documents,
        cu_seqlens_q=offsets_of(all_queries),
        cu_seqlens_d=offsets_of(all_documents),
        impl="reference",
        **options,
    )
    labels = []
    first_document = 0
    for rank, shard_tokens in enumerate(shards, first_rank):
        labels.append(labels_of(rank) + first_document)
        first_document += len(shard_tokens.documents)
    loss = nn.functional.cross_entropy(scale * scores, torch.cat(labels))
    dqueries, ddocuments = torch.autograd.grad(loss, (queries, documents))
    query_counts = [token_count(shard_tokens.queries) for shard_tokens in shards]
    document_counts = [token_count(shard_tokens.documents) for shard_tokens in shards]
    return ExactLoss(
        loss.detach(),
        list(dqueries.split(query_counts)),
        list(ddocuments.split(document_counts)),
    )


def layout_options(inputs: MaxSimInputs) -> dict[str, Any]:
    """Masks and offsets of the inputs, without a pairing."""
    return {name: value for name, value in inputs.layout.items() if name != "pairing"}


def valid_gradients(tokens: Tensor, mask: Tensor | None) -> Tensor:
    """Gradients of the valid tokens, after a check that those of masked tokens are zero."""
    assert tokens.grad is not None
    if mask is None:
        return tokens.grad.flatten(0, -2)
    assert not tokens.grad[mask == 0].any()
    return tokens.grad[mask != 0]


def ring_results(
    rank: Rank,
    inputs: MaxSimInputs,
    labels: Tensor,
    scale: float,
    **options: Any,
) -> dict[str, Tensor]:
    """Compute the loss over all ranks.

    Returns:
        ``loss``, and gradients of the valid tokens of this rank's ``queries`` and ``documents``.
    """
    inputs = inputs.to(rank.device)
    queries = inputs.queries.clone().requires_grad_()
    documents = inputs.documents.clone().requires_grad_()
    loss = maxsim_contrastive_loss(
        queries,
        documents,
        labels.to(rank.device),
        scale=scale,
        group="world",
        **layout_options(inputs),
        **options,
    )
    loss.backward()
    return {
        "loss": loss.detach(),
        "queries": valid_gradients(queries, inputs.query_mask),
        "documents": valid_gradients(documents, inputs.document_mask),
    }


def equals_one_process(rank: Rank, cases: list[LossCase]) -> None:
    for case in cases:
        shards = [shard(number, case.layout, case.dtype) for number in range(rank.size)]
        results = ring_results(
            rank,
            shards[rank.rank],
            labels_of(rank.rank),
            case.scale,
            impl=case.impl,
            **case.options,
        )
        exact = exact_loss(shards, case.scale, **case.options)
        assert results["queries"].dtype == case.dtype
        assert_within_budget(
            results["loss"],
            exact.loss.to(rank.device),
            name=f"loss of {case}",
        )
        for name, gradients in (("queries", exact.dqueries), ("documents", exact.ddocuments)):
            assert_within_budget(
                results[name],
                rank.size * gradients[rank.rank].to(rank.device),
                kind="gradient_bound",
                name=f"{name} of {case}",
            )


def gradients_are_averaged_under_ddp(rank: Rank) -> None:
    """DDP averages the gradients that the ranks compute, next to the collectives of the ring."""
    torch.manual_seed(3)
    dim = 8
    encoder = nn.Linear(DIM, dim, dtype=torch.float64).to(rank.device)
    inputs = shard(rank.rank, "holes", torch.float64).to(rank.device)
    query_shape = inputs.queries.shape[:2]
    document_shape = inputs.documents.shape[:2]
    tokens = torch.cat([inputs.queries.flatten(0, 1), inputs.documents.flatten(0, 1)])

    def parameter_gradients(encode: nn.Module) -> list[Any]:
        encoder.zero_grad()
        queries, documents = encode(tokens).split([query_shape.numel(), document_shape.numel()])
        loss = maxsim_contrastive_loss(
            queries.view(*query_shape, dim),
            documents.view(*document_shape, dim),
            query_mask=inputs.query_mask,
            document_mask=inputs.document_mask,
            normalize=True,
            group="world",
        )
        loss.backward()
        return [parameter.grad.clone() for parameter in encoder.parameters()]

    local_gradients = parameter_gradients(encoder)
    ddp_gradients = parameter_gradients(nn.parallel.DistributedDataParallel(encoder))
    for ddp_gradient, gradient in zip(ddp_gradients, local_gradients, strict=True):
        torch.distributed.all_reduce(gradient)
        assert gradient.any()
        assert_within_budget(ddp_gradient, gradient / rank.size, kind="gradient")


def two_runs_agree_in_every_bit(rank: Rank) -> None:
    inputs = shard(rank.rank, "mixed", torch.bfloat16)
    labels = labels_of(rank.rank)
    first = ring_results(rank, inputs, labels, 0.3)
    second = ring_results(rank, inputs, labels, 0.3)
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


def a_rank_holds_two_received_blocks_at_most(rank: Rank) -> None:
    alive: weakref.WeakSet[Tensor] = weakref.WeakSet()
    counts: list[int] = []
    empty_block = _ring._empty_block

    def counted_block(layout: Any, like: Any) -> Any:
        block = empty_block(layout, like)
        alive.add(block.rows)
        counts.append(len(alive))
        return block

    with mock.patch.object(_ring, "_empty_block", counted_block):
        ring_results(rank, shard(rank.rank, "full"), labels_of(rank.rank), 0.3)
    assert 1 <= max(counts) <= 2
    assert not alive


def shards_may_be_empty(rank: Rank, n_empty: int) -> None:
    """Rank 0 has no query, and rank 1 no document with a token.

    Args:
        rank: This process.
        n_empty: Numbers of queries and of empty documents of rank 1.
    """
    inputs = shard(5, "full")
    queries = [inputs.queries[:0], inputs.queries[:n_empty], inputs.queries[2:4]][: rank.size]
    documents = [inputs.documents[:2], inputs.documents[:n_empty, :0], inputs.documents[2:6]]
    documents = documents[: rank.size]
    local_queries = queries[rank.rank].clone().to(rank.device).requires_grad_()
    local_documents = documents[rank.rank].clone().to(rank.device).requires_grad_()
    loss = maxsim_contrastive_loss(
        local_queries,
        local_documents,
        scale=3,
        reduction="mean",
        group="world",
    )
    loss.backward()
    assert local_queries.grad is not None
    assert local_documents.grad is not None
    exact_queries = torch.cat(queries).double().requires_grad_()
    if len(exact_queries) == 0:  # a mean over nothing
        assert loss.isnan()
        assert not local_documents.grad.any()
        return
    nonempty_documents = torch.cat([part for part in documents if part.numel()])
    exact_documents = nonempty_documents.double().requires_grad_()
    scores = maxsim(exact_queries, exact_documents, reduction="mean", impl="reference")
    # The documents of rank 1 score zero.
    zeros = scores.new_zeros(len(scores), n_empty)
    scores = torch.cat([scores[:, :2], zeros, scores[:, 2:]], dim=1)
    labels = []
    first_document = 0
    for rank_queries, rank_documents in zip(queries, documents, strict=True):
        labels.append(torch.arange(len(rank_queries)) + first_document)
        first_document += len(rank_documents)
    expected = nn.functional.cross_entropy(3 * scores, torch.cat(labels))
    dqueries, ddocuments = torch.autograd.grad(expected, (exact_queries, exact_documents))
    assert_within_budget(loss.detach(), expected.detach().to(rank.device))
    query_gradients = dqueries.split([len(part) for part in queries])
    document_gradients = ddocuments.split([len(part) if part.numel() else 0 for part in documents])
    for leaf, gradients in (
        (local_queries, query_gradients),
        (local_documents, document_gradients),
    ):
        truth = rank.size * gradients[rank.rank].to(rank.device)
        assert_within_budget(leaf.grad.flatten(), truth.flatten(), kind="gradient_bound")


def inference_keeps_no_graph(rank: Rank) -> None:
    inputs = shard(rank.rank, "full").to(rank.device)
    labels = labels_of(rank.rank).to(rank.device)
    for no_gradients in (torch.no_grad(), torch.inference_mode()):
        with no_gradients:
            loss = maxsim_contrastive_loss(inputs.queries, inputs.documents, labels, group="world")
            assert loss.isfinite()
            assert not loss.requires_grad


def nan_of_one_rank_shows_on_all(rank: Rank) -> None:
    inputs = shard(rank.rank, "full").to(rank.device)
    labels = labels_of(rank.rank).to(rank.device)
    if rank.rank == 1:
        inputs.documents[0, 0, 0] = float("nan")
    assert maxsim_contrastive_loss(inputs.queries, inputs.documents, labels, group="world").isnan()


def compiled_code_may_call_the_loss(rank: Rank) -> None:
    inputs = shard(rank.rank, "full").to(rank.device)

    def loss(queries: Tensor) -> Tensor:
        return 2 * maxsim_contrastive_loss(3 * queries, inputs.documents, group="world")

    eager_queries = inputs.queries.clone().requires_grad_()
    compiled_queries = inputs.queries.clone().requires_grad_()
    loss(eager_queries).backward()
    torch.compile(loss, backend="eager")(compiled_queries).backward()
    assert eager_queries.grad is not None
    assert compiled_queries.grad is not None
    assert torch.equal(eager_queries.grad, compiled_queries.grad)


def gradients_of_one_side(rank: Rank) -> None:
    """A gradient of one side only has the bits that it has with those of both."""
    inputs = shard(rank.rank, "mixed")
    labels = labels_of(rank.rank)
    expected = ring_results(rank, inputs, labels, 0.3)
    inputs = inputs.to(rank.device)
    masks = {"queries": inputs.query_mask, "documents": inputs.document_mask}
    for side, mask in masks.items():
        queries = inputs.queries.clone().requires_grad_(side == "queries")
        documents = inputs.documents.clone().requires_grad_(side == "documents")
        loss = maxsim_contrastive_loss(
            queries,
            documents,
            labels=labels.to(rank.device),
            scale=0.3,
            group="world",
            **layout_options(inputs),
        )
        loss.backward()
        tokens = queries if side == "queries" else documents
        assert torch.equal(valid_gradients(tokens, mask), expected[side])


def a_group_of_the_last_two_ranks(rank: Rank) -> None:
    """The group's order differs from that of the ranks, and other ranks are refused."""
    group = torch.distributed.new_group(
        [rank.size - 1, rank.size - 2],
        use_local_synchronization=False,
    )
    inputs = shard(rank.rank, "full").to(rank.device)
    labels = labels_of(rank.rank).to(rank.device)
    first = rank.size - 2
    if rank.rank >= first:
        loss = maxsim_contrastive_loss(inputs.queries, inputs.documents, labels, group=group)
        shards = [shard(number, "full") for number in (first, first + 1)]
        exact = exact_loss(shards, 1.0, first)
        assert_within_budget(loss, exact.loss.to(rank.device))
    else:
        with pytest.raises(
            (ValueError, TypeError),
            match="group must be a process group that holds this rank",
        ):
            maxsim_contrastive_loss(inputs.queries, inputs.documents, group=group)


def a_group_of_one_rank_has_the_loss_of_this_rank(rank: Rank) -> None:
    inputs = shard(rank.rank, "full").to(rank.device)
    groups = [torch.distributed.new_group([member]) for member in range(rank.size)]
    loss = maxsim_contrastive_loss(inputs.queries, inputs.documents, group=groups[rank.rank])
    assert torch.equal(loss, maxsim_contrastive_loss(inputs.queries, inputs.documents))


EVERY_RANK = "on every rank of group"


def refused_arguments(rank: Rank, queries: Tensor, documents: Tensor) -> list[RefusedArguments]:
    """Arguments that do not fit on rank 1, or not to those of rank 1."""
    is_odd = rank.rank == 1
    device = rank.device
    dim = 6 if is_odd else 8
    odd_dtype = torch.float16 if is_odd else torch.float32
    refused = [
        RefusedArguments(
            {"document_mask": torch.ones(4, 6 if is_odd else 5, device=device)},
            "document_mask must have shape [4, 5], got [4, 6]",
            wrong_by_itself=True,
        ),
        RefusedArguments(
            {"queries": [1.0] if is_odd else queries},
            "queries must be a torch.Tensor, got list",
            wrong_by_itself=True,
        ),
        RefusedArguments(
            {"labels": torch.arange(3 if is_odd else 2, device=device)},
            "labels must have shape [2], got [3]",
            wrong_by_itself=True,
        ),
        RefusedArguments(
            {"queries": queries[..., :dim], "documents": documents[..., :dim]},
            f"queries must have the same D {EVERY_RANK}, got 8, 6",
        ),
        RefusedArguments(
            {"queries": queries.to(odd_dtype), "documents": documents.to(odd_dtype)},
            f"queries must have the same dtype {EVERY_RANK}, got float32, float16",
        ),
        RefusedArguments(
            {"scale": 2.0 if is_odd else 1.0},
            f"scale, reduction, mask_mode, temperature and normalize must be the same {EVERY_RANK}",
        ),
        RefusedArguments(
            {"queries": queries.clone().requires_grad_(is_odd)},
            "queries must require a gradient on all ranks or on none",
        ),
        RefusedArguments(
            {"documents": documents[:1] if is_odd else documents},
            "documents must be at least as many as queries (2) without labels, got 1",
            wrong_by_itself=True,
        ),
    ]
    if device.type != "cpu":
        return refused  # values of tensors on a GPU are not read
    refused.append(
        RefusedArguments(
            {"labels": torch.tensor([0, 4 if is_odd else 1])},
            "below the number of documents (4), got 4",
            wrong_by_itself=True,
        ),
    )
    offsets = torch.tensor([0, 9, 19 if is_odd else 20])
    refused.append(
        RefusedArguments(
            {"documents": documents.flatten(0, 1), "cu_seqlens_d": offsets},
            "cu_seqlens_d[-1] = 19 with 20 rows",
            wrong_by_itself=True,
        ),
    )
    return refused


def errors_are_raised_on_every_rank(rank: Rank) -> None:
    """Errors of rank 1 reach the other ranks, and a later call works."""
    queries = torch.randn(2, 3, 8, device=rank.device)
    documents = torch.randn(4, 5, 8, device=rank.device)
    fitting = {"queries": queries, "documents": documents, "group": "world"}
    for refused in refused_arguments(rank, queries, documents):
        with pytest.raises((ValueError, TypeError)) as caught:
            maxsim_contrastive_loss(**fitting | refused.arguments)
        assert refused.message in str(caught.value)
        if refused.wrong_by_itself and rank.rank != 1:
            assert f"arguments must fit {EVERY_RANK}, got on rank 1: " in str(caught.value)
    maxsim_contrastive_loss(queries, documents, group="world")


JOBS = [
    pytest.param(gradients_are_averaged_under_ddp, [], id="DDP"),
    pytest.param(two_runs_agree_in_every_bit, [], id="two runs"),
    pytest.param(a_rank_holds_two_received_blocks_at_most, [], id="memory"),
    pytest.param(shards_may_be_empty, [0], id="no query and document"),
    pytest.param(shards_may_be_empty, [2], id="documents without tokens"),
    pytest.param(inference_keeps_no_graph, [], id="inference"),
    pytest.param(nan_of_one_rank_shows_on_all, [], id="NaN"),
    pytest.param(gradients_of_one_side, [], id="gradients of one side"),
    pytest.param(a_group_of_the_last_two_ranks, [], id="group of two ranks"),
    pytest.param(a_group_of_one_rank_has_the_loss_of_this_rank, [], id="group of one rank"),
    pytest.param(errors_are_raised_on_every_rank, [], id="errors"),
]


@pytest.mark.parametrize(("job", "arguments"), JOBS)
def test_every_rank_passes(ranks: Ranks, job: Callable[..., None], arguments: list[Any]) -> None:
    ranks.run(job, *arguments)


def test_loss_and_gradients_of_uneven_ranks_are_those_of_one_process(ranks: Ranks) -> None:
    ranks.run(equals_one_process, CASES)


def test_loss_and_gradients_of_two_ranks_are_those_of_one_process(two_ranks: Ranks) -> None:
    two_ranks.run(equals_one_process, CASES[:2])


def test_compiled_code_may_call_the_loss(two_ranks: Ranks) -> None:
    two_ranks.run(compiled_code_may_call_the_loss)
