"""A training step on many processes equals the step on one: DDP and FSDP2, accelerated models, global FLOPS."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("sentence_transformers")

from tests.distributed import training_jobs as jobs
from tests.distributed.models import TEXTS
from tests.distributed.ranks import Ranks


@pytest.fixture(scope="module")
def one_process_losses(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    pytest.importorskip("datasets")
    return jobs.trained_losses(tiny_folder, tmp_path_factory.mktemp("one"), len(TEXTS), use_cpu=True)[0]


@pytest.mark.parametrize("fused", [False, True], ids=["stock", "accelerated"])
def test_a_ddp_step_with_global_flops_equals_one_process(ranks: Ranks, tiny_folder: Path, fused: bool) -> None:
    ranks.run(jobs.ddp_step, tiny_folder, fused)


def test_stock_flops_grows_with_the_number_of_ranks_and_global_flops_does_not(ranks: Ranks, tiny_folder: Path) -> None:
    for ratio in ranks.run(jobs.local_flops_is_not_the_whole_batch, tiny_folder):
        assert ratio > 1.001


@pytest.mark.parametrize("layers", [False, True], ids=["root", "layers-and-root"])
def test_an_fsdp_step_of_an_accelerated_model_equals_one_process(ranks: Ranks, tiny_folder: Path, layers: bool) -> None:
    ranks.run(jobs.fsdp_step, tiny_folder, layers)


def test_an_fsdp_step_in_mixed_precision_reduces_in_fp32(ranks: Ranks, tiny_folder: Path) -> None:
    ranks.run(jobs.fsdp_mixed_precision_step, tiny_folder)


def test_a_decoder_sharded_alone_is_refused_unless_it_stays_whole_after_its_forward(
    ranks: Ranks, untied_folder: Path
) -> None:
    for text in ranks.run(jobs.fsdp_of_the_head_alone, untied_folder, True):
        assert "must be whole when the pooling reads it" in text and "reshard_after_forward=False" in text
    assert ranks.run(jobs.fsdp_of_the_head_alone, untied_folder, False) == [""] * ranks.size


def test_accelerate_comes_before_fully_shard_or_skips_its_check(ranks: Ranks, tiny_folder: Path) -> None:
    for text in ranks.run(jobs.accelerating_a_sharded_model, tiny_folder):
        assert "before fully_shard" in text and "check=False" in text


def test_an_lsr_head_inside_an_fsdp_module_sees_its_whole_weight(ranks: Ranks) -> None:
    ranks.run(jobs.fsdp_around_an_lsr_head)


def test_the_stock_trainer_under_ddp_has_the_losses_of_one_process(
    ranks: Ranks, tiny_folder: Path, tmp_path: Path, one_process_losses: list[float]
) -> None:
    tolerance = 1e-4 if ranks.device_type == "cpu" else 1e-3  # the one process runs on the CPU
    for losses, _ in ranks.run(jobs.trainer_run, tiny_folder, tmp_path, False):
        assert losses == pytest.approx(one_process_losses, rel=tolerance)


def test_streamed_training_data_give_the_losses_of_the_stock_model(
    ranks: Ranks, tiny_folder: Path, tmp_path: Path
) -> None:
    stock, fused = (ranks.run(jobs.streamed_run, tiny_folder, tmp_path, accelerated) for accelerated in (False, True))
    for (losses, _), (expected, _) in zip(fused, stock, strict=True):
        assert len(losses) == 4 and losses == pytest.approx(expected, rel=1e-4)


@pytest.mark.gpu
def test_the_stock_trainer_under_fsdp2_has_the_losses_of_one_process(
    two_gpus: Ranks, tiny_folder: Path, tmp_path: Path, one_process_losses: list[float]
) -> None:
    for losses, types in two_gpus.run(jobs.trainer_run, tiny_folder, tmp_path, True):
        assert losses == pytest.approx(one_process_losses, rel=1e-3)
        assert types == {"DTensor"}
