"""Several processes train like one, under DDP and FSDP2, with regularizers over rows and columns.

Functions that take a :class:`Rank` run in every process of a group.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, cast
from unittest import mock

import pytest
import torch
from packaging.version import Version
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.distributed.ranks import TEXTS, Rank, Ranks
from tests.integrations.splade_models import five_steps, logged_losses, without_dropout
from tilefold import losses
from tilefold.integrations.sentence_transformers import accelerate, collate_ahead
from tilefold.testing import assert_within_budget, budget


def load(folder: Path, rank: Rank) -> Any:
    """The model of a folder on the device of the rank, without dropout."""
    from sentence_transformers import SparseEncoder

    return without_dropout(SparseEncoder(str(folder), device=str(rank.device)))


def scores_of(model: Any, texts: list[str], device: torch.device) -> Tensor:
    """``[B, V]`` scores of a plain or wrapped model.

    The features are a plain dictionary, in which FSDP finds the outputs.
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
    """A mean over rows, and FLOPS.

    The average of the ranks' losses is the loss of one process with all rows.
    """
    scores = scores_of(model, texts, rank.device)
    weights = torch.rand(scores.size(1), generator=torch.Generator().manual_seed(7)).to(scores)
    mean = (scores * weights).sum(dim=1).mean()
    return mean + 0.5 * regularizer.compute_loss_from_embeddings(scores)


def backward_of_rank(model: Any, rank: Rank) -> Tensor:
    """Compute the loss of this rank's texts with gradients, and return it."""
    loss = loss_of(model, texts_of(rank), rank, losses.GlobalFlopsLoss())
    loss.backward()
    return loss.detach()


def texts_of(rank: Rank) -> list[str]:
    share = len(TEXTS) // rank.size
    return TEXTS[rank.rank * share : (rank.rank + 1) * share]


class SingleProcessStep(NamedTuple):
    """A step of the stock model on all rows.

    Attributes:
        loss: The loss.
        gradients: Gradients of the parameters by name.
        model: The model.
    """

    loss: float
    gradients: dict[str, Any]
    model: Any


def single_process_step(folder: Path, rank: Rank) -> SingleProcessStep:
    model = load(folder, rank)
    loss = loss_of(model, TEXTS, rank, losses.GlobalFlopsLoss(group=None))
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return SingleProcessStep(loss.item(), gradients, model)


def assert_same_gradients(
    model: Any,
    expected: dict[str, Any],
    dtype: torch.dtype = torch.float32,
) -> None:
    """Check gradients on the scale of the largest one, since some vanish in exact arithmetic."""
    parameters = {name.removeprefix("module."): p for name, p in model.named_parameters()}
    assert parameters.keys() == expected.keys()
    scale = max(
        gradient.abs().max().item() for gradient in expected.values() if gradient is not None
    )
    # The roundings of some layers between the head and the parameter add up.
    allowed = 4 * budget(dtype, "gradient_bound") * scale
    for name, parameter in parameters.items():
        gradient = parameter.grad
        if gradient is None or expected[name] is None:
            assert gradient is None and expected[name] is None, name
            continue
        full_gradient = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        error = (full_gradient - expected[name]).abs().max().item()
        assert error <= allowed, (name, error, scale)


def accelerated(folder: Path, rank: Rank) -> Any:
    """The accelerated model of a folder."""
    model = load(folder, rank)
    accelerate(model)
    return model


def mesh_of(rank: Rank) -> DeviceMesh:
    return init_device_mesh(rank.device.type, (rank.size,))


def ddp_step(rank: Rank, folder: Path, fused: bool) -> None:
    expected = single_process_step(folder, rank)
    model = accelerated(folder, rank) if fused else load(folder, rank)
    wrapped = torch.nn.parallel.DistributedDataParallel(
        model,
        device_ids=None if rank.device.type == "cpu" else [rank.device.index],
    )
    total = backward_of_rank(wrapped, rank)
    assert_same_gradients(wrapped, expected.gradients)
    torch.distributed.all_reduce(total)
    assert abs(total.item() / rank.size - expected.loss) <= 1e-5 * abs(expected.loss)


def fsdp_step(rank: Rank, folder: Path, layers: bool) -> None:
    """A step of SGD has the gradients, the parameters and then the scores of one process.

    Args:
        rank: This process.
        folder: Folder of the model.
        layers: Whether each layer is a module of FSDP of its own.
    """
    from torch.distributed.fsdp import fully_shard

    expected = single_process_step(folder, rank)
    model = accelerated(folder, rank)
    mesh = mesh_of(rank)
    if layers:
        for layer in model[0].model.bert.encoder.layer:
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (expected.model, model)]
    backward_of_rank(model, rank)
    assert all(isinstance(p.grad, DTensor) for p in model.parameters() if p.grad is not None)
    assert_same_gradients(model, expected.gradients)
    for optimizer in optimizers:
        optimizer.step()
    expected_parameters = dict(expected.model.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            parameter.full_tensor(),
            expected_parameters[name],
            rtol=1e-5,
            atol=1e-5,
        )
    with torch.no_grad():
        scores = scores_of(model, TEXTS, rank.device)
        expected_scores = scores_of(expected.model, TEXTS, rank.device)
    torch.testing.assert_close(scores, expected_scores, rtol=1e-4, atol=1e-4)


def fsdp_mixed_precision_step(rank: Rank, folder: Path) -> None:
    """The largest gradient of a step in bf16 is near that of one process in fp32."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    expected = single_process_step(folder, rank).gradients
    model = accelerated(folder, rank)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    fully_shard(model, mesh=mesh_of(rank), mp_policy=policy)
    backward_of_rank(model, rank)
    norms = {name: float(g.norm()) for name, g in expected.items() if g is not None}
    largest = max(norms, key=norms.__getitem__)
    gradient = dict(model.named_parameters())[largest].grad
    assert isinstance(gradient, DTensor)
    assert gradient.dtype == torch.float32
    difference = float((gradient.full_tensor() - expected[largest]).norm()) / norms[largest]
    assert difference < 0.1  # all layers run in bf16, in which other tokens may win


def fsdp_of_the_decoder(rank: Rank, folder: Path) -> None:
    """A decoder that is a module of FSDP of its own may stay unsharded after its forward pass."""
    from torch.distributed.fsdp import fully_shard

    expected = single_process_step(folder, rank).gradients
    model = accelerated(folder, rank)
    mesh = mesh_of(rank)
    decoder = model[0].model.get_output_embeddings()
    fully_shard(decoder, mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh)
    backward_of_rank(model, rank)
    assert_same_gradients(model, expected)


def fsdp_of_the_decoder_that_is_sharded_too_early(rank: Rank, folder: Path) -> None:
    """The pooling reads the weight of the decoder after its forward pass."""
    from torch.distributed.fsdp import fully_shard

    model = accelerated(folder, rank)
    mesh = mesh_of(rank)
    decoder = model[0].model.get_output_embeddings()
    fully_shard(decoder, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh)
    message = r"must be whole when the pooling reads it.*reshard_after_forward=False"
    with pytest.raises(RuntimeError, match=message):
        backward_of_rank(model, rank)


def accelerating_a_sharded_model(rank: Rank, folder: Path) -> None:
    """Its check of scores is refused, and without the check its gradients are right."""
    from torch.distributed.fsdp import fully_shard

    expected = single_process_step(folder, rank).gradients
    model = load(folder, rank)
    fully_shard(model, mesh=mesh_of(rank))
    with pytest.raises(RuntimeError, match=r"before fully_shard.*check=False"):
        accelerate(model)
    accelerate(model, check=False)
    backward_of_rank(model, rank)
    assert_same_gradients(model, expected)


class TrainingRun(NamedTuple):
    """Result of some steps of the stock trainer.

    Attributes:
        losses: The loss of every step.
        parameter_types: Names of the types of the parameters.
    """

    losses: list[float]
    parameter_types: set[str]


def run_trainer(
    folder: Path,
    output: Path,
    batch_size: int,
    stream: bool = False,
    fused: bool = True,
    **options: Any,
) -> TrainingRun:
    """Run four steps of the stock trainer.

    Args:
        folder: Folder of the model.
        output: Folder for checkpoints.
        batch_size: Pairs of a batch of this process.
        stream: Whether the data are an ``IterableDataset``.
        fused: Whether the model is accelerated.
        options: Options of the trainer.
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
    loss = SpladeLoss(
        model,
        SparseMultipleNegativesRankingLoss(model, gather_across_devices=True),
        document_regularizer_weight=0.3,
        query_regularizer_weight=0.5,
        document_regularizer=losses.GlobalFlopsLoss(),
        query_regularizer=losses.GlobalFlopsLoss(),
    )
    reversed_texts = [" ".join(reversed(text.split())) for text in TEXTS]
    data: Any = Dataset.from_dict({"anchor": TEXTS, "positive": reversed_texts})
    if stream:
        data = data.to_iterable_dataset()
    schedule = {"max_steps": 4, "learning_rate": 1e-3, "lr_scheduler_type": "constant"}
    arguments = five_steps(output, per_device_train_batch_size=batch_size, **schedule | options)
    trainer = SparseEncoderTrainer(model=model, args=arguments, train_dataset=data, loss=loss)
    is_distributed = torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1
    if fused and not stream and is_distributed:
        collate_ahead(trainer)
        assert trainer.data_collator.join
    step_losses = logged_losses(trainer)
    types = {type(parameter).__name__ for parameter in trainer.model.parameters()}
    return TrainingRun(step_losses, types)


def run_trainer_of_rank(
    rank: Rank,
    folder: Path,
    output: Path,
    fsdp: bool = False,
    stream: bool = False,
    fused: bool = True,
) -> TrainingRun:
    """:func:`run_trainer` on this rank's share of the batch, as torchrun would start it.

    Of an ``IterableDataset`` each rank takes batches of its own, the last of them short.
    """
    options: dict[str, Any] = {"use_cpu": rank.device.type == "cpu"}
    if rank.device.type == "cpu":
        options["ddp_backend"] = "gloo"
    if fsdp:
        options["fsdp"] = "full_shard auto_wrap"
        options["fsdp_config"] = {"fsdp_version": 2, "transformer_layer_cls_to_wrap": ["BertLayer"]}
    batch_size = len(TEXTS) // rank.size
    if stream:
        # Dispatched batches fail in the stock trainer: they hold strings, which it does not
        # broadcast.
        options["accelerator_config"] = {"dispatch_batches": False}
        batch_size -= 1
    environment = {
        "RANK": str(rank.rank),
        "LOCAL_RANK": str(rank.rank),
        "WORLD_SIZE": str(rank.size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29400",
    }
    with mock.patch.dict(os.environ, environment):
        return run_trainer(folder, output, batch_size, stream, fused, **options)


@pytest.fixture(scope="module")
def one_process_losses(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses of the accelerated model in one process."""
    pytest.importorskip("datasets")
    output = tmp_path_factory.mktemp("one")
    return run_trainer(tiny_folder, output, len(TEXTS), use_cpu=True).losses


@pytest.mark.parametrize(
    ("job", "arguments"),
    [
        pytest.param(ddp_step, [False], id="DDP, stock"),
        pytest.param(ddp_step, [True], id="DDP, accelerated"),
        pytest.param(fsdp_step, [False], id="FSDP"),
        pytest.param(fsdp_step, [True], id="FSDP of layers"),
        pytest.param(fsdp_mixed_precision_step, [], id="FSDP in bf16"),
        pytest.param(accelerating_a_sharded_model, [], id="accelerated after FSDP"),
    ],
)
def test_a_step_of_the_tiny_model_equals_one_process(
    ranks: Ranks,
    tiny_folder: Path,
    job: Callable[..., None],
    arguments: list[bool],
) -> None:
    ranks.run(job, tiny_folder, *arguments)


def test_a_decoder_of_its_own_must_stay_unsharded_after_its_forward_pass(
    ranks: Ranks,
    untied_folder: Path,
) -> None:
    ranks.run(fsdp_of_the_decoder_that_is_sharded_too_early, untied_folder)
    ranks.run(fsdp_of_the_decoder, untied_folder)


def test_the_stock_trainer_under_ddp_has_the_losses_of_one_process(
    ranks: Ranks,
    tiny_folder: Path,
    tmp_path: Path,
    one_process_losses: list[float],
) -> None:
    tolerance = 1e-4 if ranks.device_type == "cpu" else 1e-3  # the one process runs on the CPU
    for run in ranks.run(run_trainer_of_rank, tiny_folder, tmp_path):
        assert run.losses == pytest.approx(one_process_losses, rel=tolerance)


def test_streamed_training_data_give_the_losses_of_the_stock_model(
    ranks: Ranks,
    tiny_folder: Path,
    tmp_path: Path,
) -> None:
    fsdp, stream = False, True
    stock_runs = ranks.run(run_trainer_of_rank, tiny_folder, tmp_path, fsdp, stream, False)
    fused_runs = ranks.run(run_trainer_of_rank, tiny_folder, tmp_path, fsdp, stream, True)
    for fused, stock in zip(fused_runs, stock_runs, strict=True):
        assert len(fused.losses) == 4
        assert fused.losses == pytest.approx(stock.losses, rel=1e-4)


@pytest.mark.gpu
def test_the_stock_trainer_under_fsdp2_has_the_losses_of_one_process(
    two_gpus: Ranks,
    tiny_folder: Path,
    tmp_path: Path,
    one_process_losses: list[float],
) -> None:
    fsdp = True
    for run in two_gpus.run(run_trainer_of_rank, tiny_folder, tmp_path, fsdp):
        assert run.losses == pytest.approx(one_process_losses, rel=1e-3)
        assert run.parameter_types == {"DTensor"}


# Regularizers over the rows and the columns of several ranks


def regularizers(group: Any) -> dict[str, losses.Regularizer]:
    """Regularizers whose statistics are those of a process group, or of one process (``None``)."""
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


class Problem(NamedTuple):
    """An encoder and rows that the ranks share.

    Attributes:
        encoder: The encoder.
        features: The rows of all ranks.
        rows: The rows of this rank.
    """

    encoder: Encoder
    features: Tensor
    rows: slice


def problem(rank: Rank) -> Problem:
    """A problem in which rank r has r + 2 rows."""
    torch.manual_seed(1)
    encoder = Encoder().to(rank.device)
    bounds = [0]
    for number in range(rank.size):
        bounds.append(bounds[-1] + number + 2)
    features = torch.randn(bounds[-1], 8, dtype=torch.float64).to(rank.device)
    return Problem(encoder, features, slice(bounds[rank.rank], bounds[rank.rank + 1]))


def averaged_gradients_are_those_of_all_rows(rank: Rank) -> None:
    distributed = regularizers("world")
    for name, single in regularizers(None).items():
        encoder, features, rows = problem(rank)
        expected = single.compute_loss_from_embeddings(encoder(features))
        gradients = torch.autograd.grad(expected, list(encoder.parameters()))
        wrapped = nn.parallel.DistributedDataParallel(encoder)
        value = distributed[name].compute_loss_from_embeddings(wrapped(features[rows]))
        value.backward()
        assert_within_budget(value.detach(), expected.detach(), name=name)
        for parameter, gradient in zip(encoder.parameters(), gradients, strict=True):
            assert gradient.abs().max() > 0
            assert_within_budget(parameter.grad, gradient, kind="gradient", name=name)


def distributed_scores(scores: Tensor, mesh: DeviceMesh, placement: Any) -> DTensor:
    """Scores as a DTensor that needs a gradient."""
    return cast(DTensor, distribute_tensor(scores.detach(), mesh, [placement]).requires_grad_())


def vocabulary_shards_give_the_value_and_gradient_of_all_columns(
    rank: Rank,
    placement: Any,
) -> None:
    mesh = mesh_of(rank)
    distributed = regularizers("world")  # the ranks of the mesh
    for name, single in regularizers(None).items():
        encoder, features, _ = problem(rank)
        scores = encoder(features).detach().requires_grad_()
        expected = single.compute_loss_from_embeddings(scores)
        expected.backward()
        sharded = distributed_scores(scores, mesh, placement)
        value = distributed[name].compute_loss_from_embeddings(sharded)
        assert not isinstance(value, DTensor)
        value.backward()
        assert_within_budget(value.detach(), expected.detach(), name=name)
        gradient = cast(DTensor, sharded.grad)
        if Version(torch.__version__) >= Version("2.13"):
            # Older releases choose the placements of a gradient.
            assert gradient.placements == (placement,)
        assert_within_budget(gradient.full_tensor(), scores.grad, kind="gradient", name=name)


def rows_and_columns_can_both_be_sharded(rank: Rank) -> None:
    """Rows over all ranks with all columns on each, and the other way round."""
    for dp in (1, rank.size):
        mesh = init_device_mesh(
            rank.device.type,
            (dp, rank.size // dp),
            mesh_dim_names=("dp", "tp"),
        )
        encoder, features, rows = problem(rank)
        scores = encoder(features).detach()
        expected = losses.flops(scores)
        local_scores = scores[rows] if dp > 1 else scores
        sharded = distributed_scores(local_scores, mesh["tp"], Shard(1))
        value = losses.flops(sharded, group=mesh["dp"].get_group())
        assert_within_budget(value.detach(), expected)


def unclear_ranks_are_refused(rank: Rank) -> None:
    mesh = init_device_mesh(rank.device.type, (1, rank.size), mesh_dim_names=("dp", "tp"))["dp"]
    scores = torch.ones(2, 3, device=rank.device)
    message = r"group must name the ranks.*mesh\['dp'\].get_group\(\)"
    with pytest.raises(ValueError, match=message):
        losses.flops(distributed_scores(scores, mesh, Shard(1)), group="world")
    with pytest.raises(ValueError, match=r"scores must be Shard\(1\)"):
        losses.flops(distributed_scores(scores, mesh, Shard(0)), group=None)


def document_frequencies_are_those_of_all_ranks(rank: Rank) -> None:
    encoder, features, rows = problem(rank)
    scores = encoder(features).detach()
    loss = losses.DFFlopsLoss(refresh_every=2)
    loss(scores[rows].requires_grad_())
    assert loss.weights is None
    loss(scores[rows].flip(0))
    frequencies = (scores > 0).double().mean(dim=0)
    assert_within_budget(loss.weights, losses.df_weights(frequencies).float())


def term_recall_losses_average_to_that_of_all_rows(rank: Rank) -> None:
    """The first rank has the only nonzero weight of all documents."""
    queries = torch.tensor([[1.0, 0.0]], device=rank.device)
    weight = 0.5 if rank.rank == 0 else 0.0
    documents = torch.tensor([[weight, 0.0]], device=rank.device)
    total = losses.TermRecallLoss().compute_loss_from_embeddings([queries, documents])
    torch.distributed.all_reduce(total)
    assert total.item() / rank.size == pytest.approx((1 - 0.5) ** 2)


@pytest.mark.parametrize(
    ("job", "arguments"),
    [
        pytest.param(averaged_gradients_are_those_of_all_rows, [], id="rows"),
        pytest.param(term_recall_losses_average_to_that_of_all_rows, [], id="term recall"),
        pytest.param(
            vocabulary_shards_give_the_value_and_gradient_of_all_columns,
            [Shard(1)],
            id="columns",
        ),
        pytest.param(
            vocabulary_shards_give_the_value_and_gradient_of_all_columns,
            [Replicate()],
            id="replicated scores",
        ),
        pytest.param(rows_and_columns_can_both_be_sharded, [], id="rows and columns"),
        pytest.param(unclear_ranks_are_refused, [], id="unclear ranks"),
        pytest.param(document_frequencies_are_those_of_all_ranks, [], id="document frequencies"),
    ],
)
def test_losses_over_rows_and_columns_of_ranks(
    ranks: Ranks,
    job: Callable[..., None],
    arguments: list[Any],
) -> None:
    ranks.run(job, *arguments)
