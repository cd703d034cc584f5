"""Regularisers over the rows, and the columns, of several ranks: what one process with everything computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from packaging.version import Version
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.distributed.ranks import Rank, Ranks
from tests.refusals import refused
from tilefold.losses import (
    AntiZeroLoss,
    DFFlopsLoss,
    GlobalFlopsLoss,
    L1Loss,
    Regularizer,
    RegularizerSum,
    df_weights,
    flops,
)
from tilefold.testing import assert_within_budget


def regularizers(group: Any) -> dict[str, Regularizer]:
    return {
        "flops": GlobalFlopsLoss(group=group),
        "thresholded flops": GlobalFlopsLoss(threshold=12, group=group),
        "l1": L1Loss(group=group),
        "anti-zero": AntiZeroLoss(group=group),
        "df-flops": DFFlopsLoss(refresh_every=1, group=group),
        "sum": RegularizerSum([(L1Loss(group=group), 0.3), (GlobalFlopsLoss(group=group), 2.0)]),
    }


class Encoder(nn.Module):
    """Scores ``[B, 25]`` of features ``[B, 8]``: enough parameters to have gradients to average."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 25, dtype=torch.float64)

    def forward(self, features: Tensor) -> Tensor:
        scores: Tensor = self.layer(features).relu()
        return scores


def problem(rank: Rank) -> tuple[Encoder, Tensor, slice]:
    """An encoder, the rows of all ranks, and this rank's: rank r has r + 2 of them."""
    torch.manual_seed(1)
    encoder = Encoder().to(rank.device)
    bounds = [0]
    for other in range(rank.size):
        bounds.append(bounds[-1] + other + 2)
    features = torch.randn(bounds[-1], 8, dtype=torch.float64).to(rank.device)
    return encoder, features, slice(bounds[rank.rank], bounds[rank.rank + 1])


def averaged_gradients_are_those_of_all_rows(rank: Rank) -> None:
    for name, alone in regularizers(None).items():
        together = regularizers("world")[name]
        encoder, features, mine = problem(rank)
        expected = alone.compute_loss_from_embeddings(encoder(features))
        gradients = torch.autograd.grad(expected, list(encoder.parameters()))
        wrapped = nn.parallel.DistributedDataParallel(encoder)
        value = together.compute_loss_from_embeddings(wrapped(features[mine]))
        value.backward()
        assert_within_budget(value.detach(), expected.detach(), name=name)
        for parameter, gradient in zip(encoder.parameters(), gradients, strict=True):
            assert gradient.abs().max() > 0
            assert_within_budget(parameter.grad, gradient, kind="gradient", name=name)


def sharded_columns(scores: Tensor, mesh: DeviceMesh, placements: list[Any]) -> DTensor:
    return cast(DTensor, distribute_tensor(scores.detach(), mesh, placements).requires_grad_())


def vocabulary_shards_give_the_value_and_gradient_of_the_whole(rank: Rank) -> None:
    mesh = init_device_mesh(rank.device.type, (rank.size,))
    for placements in ([Shard(1)], [Replicate()]):
        for name, loss in regularizers(None).items():
            encoder, features, _ = problem(rank)
            whole = encoder(features).detach().requires_grad_()
            expected = loss.compute_loss_from_embeddings(whole)
            expected.backward()
            sharded = sharded_columns(whole, mesh, placements)
            value = regularizers("world")[name].compute_loss_from_embeddings(sharded)  # the mesh is the world
            assert not isinstance(value, DTensor)
            value.backward()
            assert_within_budget(value.detach(), expected.detach(), name=name)
            if Version(torch.__version__) >= Version("2.13"):  # older ones choose the placements of a gradient
                assert sharded.grad.placements == tuple(placements)
            assert_within_budget(sharded.grad.full_tensor(), whole.grad, kind="gradient", name=name)


def rows_and_columns_can_both_be_spread(rank: Rank) -> None:
    """dp over all ranks with a tp dimension of one, and the other way round."""
    for dp in (1, rank.size):
        mesh = init_device_mesh(rank.device.type, (dp, rank.size // dp), mesh_dim_names=("dp", "tp"))
        encoder, features, mine = problem(rank)
        scores = encoder(features).detach()
        expected = flops(scores)
        rows = scores[mine] if dp > 1 else scores
        sharded = sharded_columns(rows, mesh["tp"], [Shard(1)])
        assert_within_budget(flops(sharded, group=mesh["dp"].get_group()).detach(), expected)


def unclear_ranks_are_refused(rank: Rank) -> None:
    mesh = init_device_mesh(rank.device.type, (1, rank.size), mesh_dim_names=("dp", "tp"))["dp"]
    scores = torch.ones(2, 3, device=rank.device)
    columns, rows = (sharded_columns(scores, mesh, [Shard(dim)]) for dim in (1, 0))
    refused(ValueError, r"group must name the ranks.*mesh\['dp'\].get_group\(\)", flops, columns, group="world")
    refused(ValueError, r"scores must be Shard\(1\)", flops, rows, group=None)


def document_frequencies_are_those_of_all_ranks(rank: Rank) -> None:
    encoder, features, mine = problem(rank)
    scores = encoder(features).detach()
    loss = DFFlopsLoss(refresh_every=2)
    loss(scores[mine].requires_grad_())
    assert loss.weights is None
    loss(scores[mine].flip(0))
    assert_within_budget(loss.weights, df_weights((scores > 0).double().mean(dim=0)).float())


JOBS = [
    averaged_gradients_are_those_of_all_rows, vocabulary_shards_give_the_value_and_gradient_of_the_whole,
    rows_and_columns_can_both_be_spread, unclear_ranks_are_refused, document_frequencies_are_those_of_all_ranks,
]  # fmt: skip


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.__name__)
def test_ranks(ranks: Ranks, job: Callable[[Rank], None]) -> None:
    ranks.run(job)
