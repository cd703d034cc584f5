"""Many processes compute what one does: training steps under DDP and FSDP2, and regularisers over
rows and columns.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest
import torch
from packaging.version import Version
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.distributed.ranks import TEXTS, Rank, Ranks
from tests.integrations.splade_models import five_steps, logged_losses, without_dropout
from tests.refusals import refused
from tilefold import losses
from tilefold.integrations.sentence_transformers import accelerate, collate_ahead
from tilefold.testing import assert_within_budget, budget


def load(folder: Path, rank: Rank) -> Any:
    from sentence_transformers import SparseEncoder

    return without_dropout(SparseEncoder(str(folder), device=str(rank.device)))


def scores_of(model: Any, texts: list[str], device: torch.device) -> Tensor:
    """``[B, V]`` of a plain or wrapped model; features are a plain dict, in which FSDP finds the
    outputs.
    """
    encoder = model.module if hasattr(model, "module") else model
    features = {
        key: value.to(device)
        for key, value in encoder.preprocess(texts).items()
        if isinstance(value, Tensor)
    }
    scores: Tensor = model(features)["sentence_embedding"]
    return scores


def loss_of(model: Any, texts: list[str], rank: Rank, regularizer: Any) -> Tensor:
    """A mean over rows, and FLOPS: what one process with all rows computes is the average over the
    ranks.
    """
    scores = scores_of(model, texts, rank.device)
    weights = torch.rand(scores.size(1), generator=torch.Generator().manual_seed(7)).to(scores)
    return (scores * weights).sum(dim=1).mean() + 0.5 * regularizer.compute_loss_from_embeddings(
        scores,
    )


def my_texts(rank: Rank) -> list[str]:
    share = len(TEXTS) // rank.size
    return TEXTS[rank.rank * share : (rank.rank + 1) * share]


def one_process(folder: Path, rank: Rank) -> tuple[float, dict[str, Tensor], Any]:
    """Loss and gradients of the stock model on all rows."""
    model = load(folder, rank)
    loss = loss_of(model, TEXTS, rank, losses.GlobalFlopsLoss(group=None))
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}, model


def assert_same_gradients(
    model: Any,
    expected: dict[str, Tensor],
    dtype: torch.dtype = torch.float32,
) -> None:
    """Within the gradient budget, on the scale of the largest gradient: some vanish in exact
    arithmetic.
    """
    named = {name.removeprefix("module."): p for name, p in model.named_parameters()}
    assert named.keys() == expected.keys()
    scale = max(
        gradient.abs().max().item() for gradient in expected.values() if gradient is not None
    )
    for name, parameter in named.items():
        gradient = parameter.grad
        if gradient is None or expected[name] is None:
            assert gradient is None and expected[name] is None, name
            continue
        whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        error = (whole - expected[name]).abs().max().item()
        # a trunk of some layers between the head and the parameter: its roundings add up
        assert error <= 4 * budget(dtype, "gradient_bound") * scale, (name, error, scale)


def accelerated(rank: Rank, folder: Path) -> tuple[dict[str, Tensor], Any, Any]:
    """Gradients of :func:`one_process`, an accelerated model, and a mesh of all ranks."""
    _, expected, _ = one_process(folder, rank)
    model = load(folder, rank)
    accelerate(model)
    return expected, model, init_device_mesh(rank.device.type, (rank.size,))


def ddp_step(rank: Rank, folder: Path, fused: bool) -> None:
    expected_loss, expected, _ = one_process(folder, rank)
    model = load(folder, rank)
    if fused:
        accelerate(model)
    wrapped = torch.nn.parallel.DistributedDataParallel(
        model,
        device_ids=None if rank.device.type == "cpu" else [rank.device.index],
    )
    loss = loss_of(wrapped, my_texts(rank), rank, losses.GlobalFlopsLoss())
    loss.backward()
    assert_same_gradients(wrapped, expected)
    total = loss.detach().clone()
    torch.distributed.all_reduce(total)
    assert abs(total.item() / rank.size - expected_loss) <= 1e-5 * abs(expected_loss)


def fsdp_step(rank: Rank, folder: Path, layers: bool) -> None:
    """One step of SGD: gradients, and the parameters after it."""
    from torch.distributed.fsdp import fully_shard

    _, _, whole = one_process(folder, rank)
    expected, model, mesh = accelerated(rank, folder)
    if layers:
        for layer in model[0].model.bert.encoder.layer:
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (whole, model)]
    loss_of(model, my_texts(rank), rank, losses.GlobalFlopsLoss()).backward()
    assert all(isinstance(p.grad, DTensor) for p in model.parameters() if p.grad is not None)
    assert_same_gradients(model, expected)
    for optimizer in optimizers:
        optimizer.step()
    before, after = dict(whole.named_parameters()), dict(model.named_parameters())
    for name, parameter in after.items():
        torch.testing.assert_close(parameter.full_tensor(), before[name], rtol=1e-5, atol=1e-5)
    with torch.no_grad():  # and the sharded model still scores like the whole one
        got, want = (scores_of(m, TEXTS, rank.device) for m in (model, whole))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def fsdp_mixed_precision_step(rank: Rank, folder: Path) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    expected, model, mesh = accelerated(rank, folder)
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    loss_of(model, my_texts(rank), rank, losses.GlobalFlopsLoss()).backward()
    largest = max(
        expected,
        key=lambda name: 0 if expected[name] is None else float(expected[name].norm()),
    )
    gradient = dict(model.named_parameters())[largest].grad
    assert isinstance(gradient, DTensor) and gradient.dtype == torch.float32
    difference = (gradient.full_tensor() - expected[largest]).norm() / expected[largest].norm()
    assert difference < 0.1, float(
        difference,
    )  # the whole trunk runs in bf16, in which other tokens may win


def fsdp_of_the_head_alone(rank: Rank, folder: Path, reshard: bool) -> None:
    """The decoder in a group of its own: its weight must outlive its forward."""
    from torch.distributed.fsdp import fully_shard

    expected, model, mesh = accelerated(rank, folder)
    fully_shard(model[0].model.get_output_embeddings(), mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh)
    if reshard:
        message = r"must be whole when the pooling reads it.*reshard_after_forward=False"
        refused(
            RuntimeError,
            message,
            loss_of,
            model,
            my_texts(rank),
            rank,
            losses.GlobalFlopsLoss(),
        )
        return
    loss_of(model, my_texts(rank), rank, losses.GlobalFlopsLoss()).backward()
    assert_same_gradients(model, expected)


def accelerating_a_sharded_model(rank: Rank, folder: Path) -> None:
    from torch.distributed.fsdp import fully_shard

    _, expected, _ = one_process(folder, rank)
    model = load(folder, rank)
    fully_shard(model, mesh=init_device_mesh(rank.device.type, (rank.size,)))
    refused(RuntimeError, r"before fully_shard.*check=False", accelerate, model)
    accelerate(model, check=False)
    loss_of(model, my_texts(rank), rank, losses.GlobalFlopsLoss()).backward()
    assert_same_gradients(model, expected)


def trained_losses(
    folder: Path,
    output: Path,
    batch: int,
    stream: bool = False,
    fused: bool = True,
    **options: Any,
) -> tuple[list[float], set[str]]:
    """Four steps of the stock trainer on an accelerated model; the losses, and the types of its
    parameters.
    """
    from datasets import Dataset
    from sentence_transformers import SparseEncoder, SparseEncoderTrainer
    from sentence_transformers.sparse_encoder.losses import (
        SparseMultipleNegativesRankingLoss,
        SpladeLoss,
    )

    torch.manual_seed(0)
    model = without_dropout(SparseEncoder(str(folder), device="cpu"))
    if fused:
        accelerate(model)
    ranking = SparseMultipleNegativesRankingLoss(model, gather_across_devices=True)
    flops = {f"{side}_regularizer": losses.GlobalFlopsLoss() for side in ("document", "query")}
    loss = SpladeLoss(
        model,
        ranking,
        document_regularizer_weight=0.3,
        query_regularizer_weight=0.5,
        **flops,
    )
    data = Dataset.from_dict(
        {"anchor": TEXTS, "positive": [" ".join(reversed(text.split())) for text in TEXTS]},
    )
    schedule = {"max_steps": 4, "learning_rate": 1e-3, "lr_scheduler_type": "constant"}
    arguments = five_steps(output, per_device_train_batch_size=batch, **schedule | options)
    data = data.to_iterable_dataset() if stream else data
    trainer = SparseEncoderTrainer(model=model, args=arguments, train_dataset=data, loss=loss)
    ahead = fused and not stream  # the one process runs plainly
    if ahead and torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        collate_ahead(trainer)
        assert trainer.data_collator.join
    return logged_losses(trainer), {
        type(parameter).__name__ for parameter in trainer.model.parameters()
    }


def trainer_run(
    rank: Rank,
    folder: Path,
    output: Path,
    fsdp: bool = False,
    stream: bool = False,
    fused: bool = True,
) -> tuple[list[float], set[str]]:
    """:func:`trained_losses` on this rank's share of the batch, as torchrun would start it.

    Of an ``IterableDataset`` each rank takes batches of its own, the last short.
    """
    options: dict[str, Any] = {"use_cpu": rank.device.type == "cpu"}
    if rank.device.type == "cpu":
        options["ddp_backend"] = "gloo"
    if fsdp:
        options["fsdp"] = "full_shard auto_wrap"
        options["fsdp_config"] = {"fsdp_version": 2, "transformer_layer_cls_to_wrap": ["BertLayer"]}
    if stream:  # that of all ranks at once fails in the stock trainer: batches hold words, which it does not broadcast
        options["accelerator_config"] = {"dispatch_batches": False}
    place = {
        "RANK": rank.rank,
        "LOCAL_RANK": rank.rank,
        "WORLD_SIZE": rank.size,
        "MASTER_PORT": 29400,
    }
    given = {name: str(value) for name, value in place.items()} | {"MASTER_ADDR": "127.0.0.1"}
    with mock.patch.dict(os.environ, given):
        return trained_losses(
            folder,
            output,
            len(TEXTS) // rank.size - stream,
            stream,
            fused,
            **options,
        )


@pytest.fixture(scope="module")
def one_process_losses(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    pytest.importorskip("datasets")
    return trained_losses(tiny_folder, tmp_path_factory.mktemp("one"), len(TEXTS), use_cpu=True)[0]


@pytest.mark.parametrize(
    ("job", "args"),
    [
        (ddp_step, [False]),
        (ddp_step, [True]),
        (fsdp_step, [False]),
        (fsdp_step, [True]),
        (fsdp_mixed_precision_step, []),
        (accelerating_a_sharded_model, []),
    ],
    ids=lambda each: getattr(each, "__name__", str(each)),
)
def test_a_step_of_the_tiny_model_equals_one_process(
    ranks: Ranks,
    tiny_folder: Path,
    job: Callable[..., None],
    args: list[bool],
) -> None:
    ranks.run(job, tiny_folder, *args)


def test_a_decoder_sharded_alone_is_refused_unless_it_stays_whole_after_its_forward(
    ranks: Ranks,
    untied_folder: Path,
) -> None:
    for reshard in (True, False):
        ranks.run(fsdp_of_the_head_alone, untied_folder, reshard)


def test_the_stock_trainer_under_ddp_has_the_losses_of_one_process(
    ranks: Ranks,
    tiny_folder: Path,
    tmp_path: Path,
    one_process_losses: list[float],
) -> None:
    tolerance = 1e-4 if ranks.device_type == "cpu" else 1e-3  # the one process runs on the CPU
    for found, _ in ranks.run(trainer_run, tiny_folder, tmp_path):
        assert found == pytest.approx(one_process_losses, rel=tolerance)


def test_streamed_training_data_give_the_losses_of_the_stock_model(
    ranks: Ranks,
    tiny_folder: Path,
    tmp_path: Path,
) -> None:
    stock, fused = (
        ranks.run(trainer_run, tiny_folder, tmp_path, False, True, fused) for fused in (False, True)
    )
    for (found, _), (expected, _) in zip(fused, stock, strict=True):
        assert len(found) == 4 and found == pytest.approx(expected, rel=1e-4)


@pytest.mark.gpu
def test_the_stock_trainer_under_fsdp2_has_the_losses_of_one_process(
    two_gpus: Ranks,
    tiny_folder: Path,
    tmp_path: Path,
    one_process_losses: list[float],
) -> None:
    for found, types in two_gpus.run(trainer_run, tiny_folder, tmp_path, True):
        assert found == pytest.approx(one_process_losses, rel=1e-3)
        assert types == {"DTensor"}


# Regularisers over the rows, and the columns, of several ranks


def regularizers(group: Any) -> dict[str, losses.Regularizer]:
    return {
        "flops": losses.GlobalFlopsLoss(group=group),
        "thresholded flops": losses.GlobalFlopsLoss(threshold=12, group=group),
        "l1": losses.L1Loss(group=group),
        "anti-zero": losses.AntiZeroLoss(group=group),
        "df-flops": losses.DFFlopsLoss(refresh_every=1, group=group),
        "sum": losses.RegularizerSum(
            [(losses.L1Loss(group=group), 0.3), (losses.GlobalFlopsLoss(group=group), 2.0)],
        ),
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
            value = regularizers("world")[name].compute_loss_from_embeddings(
                sharded,
            )  # the mesh is the world
            assert not isinstance(value, DTensor)
            value.backward()
            assert_within_budget(value.detach(), expected.detach(), name=name)
            if Version(torch.__version__) >= Version(
                "2.13",
            ):  # older ones choose the placements of a gradient
                assert sharded.grad.placements == tuple(placements)
            assert_within_budget(sharded.grad.full_tensor(), whole.grad, kind="gradient", name=name)


def rows_and_columns_can_both_be_spread(rank: Rank) -> None:
    """dp over all ranks with a tp dimension of one, and the other way round."""
    for dp in (1, rank.size):
        mesh = init_device_mesh(
            rank.device.type,
            (dp, rank.size // dp),
            mesh_dim_names=("dp", "tp"),
        )
        encoder, features, mine = problem(rank)
        scores = encoder(features).detach()
        expected = losses.flops(scores)
        rows = scores[mine] if dp > 1 else scores
        sharded = sharded_columns(rows, mesh["tp"], [Shard(1)])
        assert_within_budget(losses.flops(sharded, group=mesh["dp"].get_group()).detach(), expected)


def unclear_ranks_are_refused(rank: Rank) -> None:
    mesh = init_device_mesh(rank.device.type, (1, rank.size), mesh_dim_names=("dp", "tp"))["dp"]
    scores = torch.ones(2, 3, device=rank.device)
    columns, rows = (sharded_columns(scores, mesh, [Shard(dim)]) for dim in (1, 0))
    refused(
        ValueError,
        r"group must name the ranks.*mesh\['dp'\].get_group\(\)",
        losses.flops,
        columns,
        group="world",
    )
    refused(ValueError, r"scores must be Shard\(1\)", losses.flops, rows, group=None)


def document_frequencies_are_those_of_all_ranks(rank: Rank) -> None:
    encoder, features, mine = problem(rank)
    scores = encoder(features).detach()
    loss = losses.DFFlopsLoss(refresh_every=2)
    loss(scores[mine].requires_grad_())
    assert loss.weights is None
    loss(scores[mine].flip(0))
    assert_within_budget(loss.weights, losses.df_weights((scores > 0).double().mean(dim=0)).float())


JOBS = [
    averaged_gradients_are_those_of_all_rows,
    vocabulary_shards_give_the_value_and_gradient_of_the_whole,
    rows_and_columns_can_both_be_spread,
    unclear_ranks_are_refused,
    document_frequencies_are_those_of_all_ranks,
]


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.__name__)
def test_regularizers_over_rows_and_columns_of_ranks(
    ranks: Ranks,
    job: Callable[[Rank], None],
) -> None:
    ranks.run(job)
