"""The contrastive loss of MaxSim over the documents of several ranks: what one process with
everything computes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
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
CASES: list[dict[str, Any]] = [
    {},
    {"layout": "full", "impl": "reference"},
    {"layout": "packed", "temperature": 0.7},
    {"layout": "holes", "reduction": "mean", "normalize": True, "scale": 20},
    {"layout": "left", "dtype": torch.float64},
    {"dtype": torch.bfloat16},
    {"dtype": torch.float16, "temperature": 0.5, "reduction": "mean"},
]


def shard(number: int, layout: str, dtype: torch.dtype = torch.float32) -> MaxSimInputs:
    """The queries and documents of rank ``number``: as many, and as long, as its number says."""
    sizes = (number + 2, 2 * number + 3, 4 + number, 7 + 3 * number, DIM)
    if layout == "mixed":
        layout = ("holes", "packed", "full")[number % 3]
    return maxsim_inputs(*sizes, layout=layout, dtype=dtype, seed=number)


def labels_of(number: int) -> Tensor:
    """The document of each query among those of its rank; no two are the same."""
    return torch.arange(number + 2) * 2 % (2 * number + 3)


def pieces(shards: list[MaxSimInputs]) -> list[tuple[list[Tensor], ...]]:
    """Kept tokens of each query and each document of every rank, in fp64."""
    result = []
    for inputs in shards:
        packed = inputs if inputs.cu_seqlens_q is not None else inputs.packed()
        sides = ((packed.queries, packed.cu_seqlens_q), (packed.documents, packed.cu_seqlens_d))
        result.append(
            tuple([t.double() for t in rows.split(cu.diff().tolist())] for rows, cu in sides),
        )
    return result


def truth_of(
    shards: list[MaxSimInputs],
    scale: float,
    first_rank: int = 0,
    **options: Any,
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Loss of one process with everything in fp64, and packed gradients of each rank's queries and
    documents.
    """
    parts = pieces(shards)
    lists = [[tokens for part in parts for tokens in part[side]] for side in (0, 1)]
    leaves = [torch.cat(tokens).requires_grad_() for tokens in lists]
    offsets = [torch.tensor([0, *(t.size(0) for t in tokens)]).cumsum(0) for tokens in lists]
    scores = maxsim(
        *leaves,
        cu_seqlens_q=offsets[0],
        cu_seqlens_d=offsets[1],
        impl="reference",
        **options,
    )
    first = 0
    labels = []
    for number, part in enumerate(parts, first_rank):
        labels.append(labels_of(number) + first)
        first += len(part[1])
    loss = nn.functional.cross_entropy(scale * scores, torch.cat(labels))
    grads = torch.autograd.grad(loss, leaves)
    rows = [[sum(t.size(0) for t in part[side]) for part in parts] for side in (0, 1)]
    return loss.detach(), list(grads[0].split(rows[0])), list(grads[1].split(rows[1]))


def ring_results(
    rank: Rank,
    inputs: MaxSimInputs,
    labels: Tensor,
    scale: float,
    **options: Any,
) -> dict[str, Tensor]:
    """The loss over all ranks, and gradients of this rank's kept tokens."""
    inputs = inputs.to(rank.device)
    queries, documents = (
        inputs.queries.clone().requires_grad_(),
        inputs.documents.clone().requires_grad_(),
    )
    layout = {name: value for name, value in inputs.layout.items() if name != "pairing"}
    loss = maxsim_contrastive_loss(
        queries,
        documents,
        labels.to(rank.device),
        scale=scale,
        group="world",
        **layout,
        **options,
    )
    loss.backward()
    found = {"loss": loss.detach()}
    for name, rows, mask in (
        ("queries", queries, inputs.query_mask),
        ("documents", documents, inputs.document_mask),
    ):
        kept = rows.grad.flatten(0, -2) if mask is None else rows.grad[mask != 0]
        if mask is not None:
            assert not rows.grad[mask == 0].any()
        found[name] = kept
    return found


def equals_one_process(rank: Rank, cases: list[dict[str, Any]]) -> None:
    """Each case: layout and dtype of the shards, and options of the loss."""
    for given in cases:
        options = {"scale": 0.4} | given
        layout, dtype = options.pop("layout", "mixed"), options.pop("dtype", torch.float32)
        shards = [shard(number, layout, dtype) for number in range(rank.size)]
        found = ring_results(rank, shards[rank.rank], labels_of(rank.rank), **options)
        choices = {name: value for name, value in options.items() if name != "impl"}
        loss, dqueries, ddocuments = truth_of(shards, **choices)
        assert found["queries"].dtype == dtype
        loss = loss.to(rank.device)
        assert_within_budget(found["loss"], loss, name=f"loss of {given}")
        for name, truth in (("queries", dqueries), ("documents", ddocuments)):
            expected = rank.size * truth[rank.rank].to(rank.device)
            assert_within_budget(
                found[name],
                expected,
                kind="gradient_bound",
                name=f"{name} of {given}",
            )


def gradients_are_averaged_under_ddp(rank: Rank) -> None:
    """Its collectives go beside those of the ring: the mean of what the ranks find without it."""
    torch.manual_seed(3)
    encoder = nn.Linear(DIM, 8, dtype=torch.float64).to(rank.device)
    inputs = shard(rank.rank, "holes", torch.float64).to(rank.device)
    masks = {"query_mask": inputs.query_mask, "document_mask": inputs.document_mask}

    def gradients(encode: Any) -> list[Any]:
        encoder.zero_grad()
        split = encode(torch.cat([inputs.queries.flatten(0, 1), inputs.documents.flatten(0, 1)]))
        sides = split.split([inputs.queries[..., 0].numel(), inputs.documents[..., 0].numel()])
        queries, documents = (
            t.view(*like.shape[:2], 8)
            for t, like in zip(sides, (inputs.queries, inputs.documents), strict=True)
        )
        maxsim_contrastive_loss(
            queries,
            documents,
            **masks,
            normalize=True,
            group="world",
        ).backward()
        return [parameter.grad.clone() for parameter in encoder.parameters()]

    alone = gradients(encoder)
    for found, mine in zip(
        gradients(nn.parallel.DistributedDataParallel(encoder)),
        alone,
        strict=True,
    ):
        torch.distributed.all_reduce(mine)
        assert mine.any()
        assert_within_budget(found, mine / rank.size, kind="gradient")


def two_runs_agree_in_every_bit(rank: Rank) -> None:
    inputs, labels = shard(rank.rank, "mixed", torch.bfloat16), labels_of(rank.rank)
    first, second = (ring_results(rank, inputs, labels, 0.3) for _ in range(2))
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


def a_rank_holds_two_blocks_of_others_at_most(rank: Rank) -> None:
    """Counts the rows of received blocks that are alive, forward and backward."""
    import weakref

    alive: weakref.WeakSet[Tensor] = weakref.WeakSet()
    most = 0

    def counted(layout: Any, like: Any) -> Any:
        nonlocal most
        block = empty_block(layout, like)
        alive.add(block.rows)
        most = max(most, len(alive))
        return block

    empty_block = _ring._empty_block
    with mock.patch.object(_ring, "_empty_block", counted):
        ring_results(rank, shard(rank.rank, "full"), labels_of(rank.rank), 0.3)
    assert 1 <= most <= 2, most
    assert not alive


def shards_may_be_empty(rank: Rank) -> None:
    """Rank 0 has no query; rank 1 no document, and then queries whose documents have no token."""
    device = rank.device
    whole = shard(5, "full")
    mine = min(rank.rank, 2)
    for empty in (0, 2):
        queries = [whole.queries[:0], whole.queries[:empty], whole.queries[2:4]][: rank.size]
        documents = [whole.documents[:2], whole.documents[:empty, :0], whole.documents[2:6]][
            : rank.size
        ]
        leaves = [t[mine].clone().to(device).requires_grad_() for t in (queries, documents)]
        loss = maxsim_contrastive_loss(*leaves, scale=3, reduction="mean", group="world")
        loss.backward()
        if sum(t.size(0) for t in queries) == 0:
            assert loss.isnan() and not leaves[1].grad.any()  # a mean over nothing
            continue
        scored = torch.cat([t for t in documents if t.numel()]).double().requires_grad_()
        asked = torch.cat(queries).double().requires_grad_()
        scores = maxsim(asked, scored, reduction="mean", impl="reference")
        scores = torch.cat(
            [scores[:, :2], scores.new_zeros(scores.size(0), empty), scores[:, 2:]],
            dim=1,
        )
        labels = [
            torch.arange(t.size(0)) + first
            for t, first in zip(queries, (0, 2, 2 + empty), strict=False)
        ]
        expected = nn.functional.cross_entropy(3 * scores, torch.cat(labels))
        dqueries, ddocuments = torch.autograd.grad(expected, (asked, scored))
        assert_within_budget(loss.detach(), expected.detach().to(device))
        of_queries = dqueries.split([t.size(0) for t in queries])
        of_documents = ddocuments.split([t.size(0) if t.numel() else 0 for t in documents])
        for leaf, side in zip(leaves, (of_queries, of_documents), strict=True):
            truth = rank.size * side[mine].to(device)
            assert_within_budget(leaf.grad.flatten(), truth.flatten(), kind="gradient_bound")


def nan_is_seen_and_inference_keeps_no_graph(rank: Rank) -> None:
    inputs, labels = shard(rank.rank, "full").to(rank.device), labels_of(rank.rank).to(rank.device)
    for quiet in (torch.no_grad(), torch.inference_mode()):
        with quiet:
            loss = maxsim_contrastive_loss(inputs.queries, inputs.documents, labels, group="world")
            assert loss.isfinite() and not loss.requires_grad
    if rank.rank == 1:
        inputs.documents[0, 0, 0] = float("nan")
    assert maxsim_contrastive_loss(inputs.queries, inputs.documents, labels, group="world").isnan()


def compiled_code_may_call_it(rank: Rank) -> None:
    inputs = shard(rank.rank, "full").to(rank.device)

    def loss(queries: Tensor) -> Tensor:
        return 2 * maxsim_contrastive_loss(3 * queries, inputs.documents, group="world")

    eager, compiled = (inputs.queries.clone().requires_grad_() for _ in range(2))
    loss(eager).backward()
    torch.compile(loss, backend="eager")(compiled).backward()
    assert torch.equal(eager.grad, compiled.grad)


def gradients_of_one_side(rank: Rank) -> None:
    inputs, labels = shard(rank.rank, "mixed"), labels_of(rank.rank)
    both = ring_results(rank, inputs, labels, 0.3)
    inputs = inputs.to(rank.device)
    layout = {name: value for name, value in inputs.layout.items() if name != "pairing"}
    for name in ("queries", "documents"):
        sides = {
            side: getattr(inputs, side).clone().requires_grad_(side == name)
            for side in ("queries", "documents")
        }
        maxsim_contrastive_loss(
            **sides,
            labels=labels.to(rank.device),
            scale=0.3,
            group="world",
            **layout,
        ).backward()
        mask = layout["query_mask" if name == "queries" else "document_mask"]
        grad = sides[name].grad
        assert torch.equal(grad.flatten(0, -2) if mask is None else grad[mask != 0], both[name])


def a_group_of_some_ranks(rank: Rank) -> None:
    """The last two ranks, in an order of their own, and a rank that is on its own."""
    group = torch.distributed.new_group(
        [rank.size - 1, rank.size - 2],
        use_local_synchronization=False,
    )
    inputs, labels = shard(rank.rank, "full").to(rank.device), labels_of(rank.rank).to(rank.device)
    first = rank.size - 2
    if rank.rank >= first:
        together = maxsim_contrastive_loss(inputs.queries, inputs.documents, labels, group=group)
        truth, _, _ = truth_of([shard(number, "full") for number in (first, first + 1)], 1.0, first)
        assert_within_budget(together, truth.to(rank.device))
    else:
        with pytest.raises(
            (ValueError, TypeError),
            match="group must be a process group that holds this rank",
        ):
            maxsim_contrastive_loss(inputs.queries, inputs.documents, group=group)
    alone = maxsim_contrastive_loss(inputs.queries, inputs.documents)
    single = [torch.distributed.new_group([other]) for other in range(rank.size)][rank.rank]
    assert torch.equal(
        maxsim_contrastive_loss(inputs.queries, inputs.documents, group=single),
        alone,
    )


def errors_are_raised_on_every_rank(rank: Rank) -> None:
    """Rank 1 is the odd one; what is wrong there alone is told to the others as its own."""
    odd, device = rank.rank == 1, rank.device
    queries, documents = torch.randn(2, 3, 8, device=device), torch.randn(4, 5, 8, device=device)
    same = "on every rank of group"
    attempts: list[tuple[dict[str, Any], str, bool]] = [
        (
            {"document_mask": torch.ones(4, 5 + odd, device=device)},
            "document_mask must have shape [4, 5], got [4, 6]",
            True,
        ),
        ({"queries": [1.0] if odd else queries}, "queries must be a torch.Tensor, got list", True),
        (
            {"labels": torch.arange(2 + odd, device=device)},
            "labels must have shape [2], got [3]",
            True,
        ),
        (
            {"queries": queries[..., : 8 - 2 * odd], "documents": documents[..., : 8 - 2 * odd]},
            f"queries must have the same D {same}, got 8, 6",
            False,
        ),
        (
            {
                "queries": queries.half() if odd else queries,
                "documents": documents.half() if odd else documents,
            },
            f"queries must have the same dtype {same}, got float32, float16",
            False,
        ),
        (
            {"scale": 1.0 + odd},
            f"scale, reduction, mask_mode, temperature and normalize must be the same {same}",
            False,
        ),
        (
            {"queries": queries.clone().requires_grad_(odd)},
            "queries must require a gradient on all ranks or on none",
            False,
        ),
        (
            {"documents": documents[:1] if odd else documents},
            "documents must be at least as many as queries (2) without labels, got 1",
            True,
        ),
    ]
    if device.type == "cpu":
        rows, offsets = documents.flatten(0, 1), torch.tensor([0, 9, 19 if odd else 20])
        attempts += [
            (
                {"labels": torch.tensor([0, 4 if odd else 1])},
                "below the number of documents (4), got 4",
                True,
            ),
            (
                {"documents": rows, "cu_seqlens_d": offsets},
                "cu_seqlens_d[-1] = 19 with 20 rows",
                True,
            ),
        ]
    for attempt, problem, local in attempts:
        with pytest.raises((ValueError, TypeError)) as caught:
            maxsim_contrastive_loss(
                **{"queries": queries, "documents": documents, "group": "world"} | attempt,
            )
        assert problem in str(caught.value)
        if local and not odd:
            assert f"arguments must fit {same}, got on rank 1: " in str(caught.value)
    maxsim_contrastive_loss(queries, documents, group="world")  # the ranks are still together


JOBS = [
    gradients_are_averaged_under_ddp,
    two_runs_agree_in_every_bit,
    a_rank_holds_two_blocks_of_others_at_most,
    shards_may_be_empty,
    nan_is_seen_and_inference_keeps_no_graph,
    gradients_of_one_side,
    a_group_of_some_ranks,
    errors_are_raised_on_every_rank,
]


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.__name__)
def test_ranks(ranks: Ranks, job: Callable[[Rank], None]) -> None:
    ranks.run(job)


def test_loss_and_gradients_of_uneven_ranks_are_those_of_one_process(
    ranks: Ranks,
    two_ranks: Ranks,
) -> None:
    ranks.run(equals_one_process, CASES)
    two_ranks.run(equals_one_process, CASES[:2])
    two_ranks.run(compiled_code_may_call_it)
