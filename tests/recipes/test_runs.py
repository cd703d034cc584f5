"""Tests of training runs: their files, resumption, refusals, attention and devices."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from sentence_transformers import MultiVectorEncoder, SparseEncoder
from sentence_transformers.sparse_encoder.losses import (
    SparseMultipleNegativesRankingLoss,
    SpladeLoss,
)
from torch import nn

from tests import programs
from tests.cli.program import run_cli
from tests.inside import InUseError
from tests.processes import ROOT
from tests.recipes.plots import with_plots
from tests.recipes.runs import (
    StepRecorder,
    assert_equal_weights,
    logged_steps,
    read_config,
    read_log,
    train_until,
)
from tests.recipes.small import small_collection, with_dev
from tests.refusals import refused
from tests.retrieval.encoding.test_interruptions import held
from tilefold.integrations.transformers import runs_entmax, unregister
from tilefold.losses import NoPenalty
from tilefold.recipes import (
    Losses,
    LsrRecipe,
    OutOfTimeError,
    TrainingError,
    _trainer,
    _training,
    _watch,
    get_recipe,
    train,
)
from tilefold.recipes._steps import total_steps
from tilefold.recipes._watch import SparseWatch
from tilefold.recipes.loading import load_saved, newest_step
from tilefold.retrieval.data.collection import Collection

RUN_AND_HANG = """
import json, sys, time
from tests.recipes.runs import (
    StepRecorder,
    assert_equal_weights,
    logged_steps,
    read_config,
    read_log,
    train_until,
)
from tests.recipes.small import small_collection, with_dev
from tilefold.recipes import LsrRecipe, train
def hang(step, steps, loss):
    if step == 5:
        print("at step 5", flush=True)
        time.sleep(600)
train(LsrRecipe.from_dict(json.loads(sys.argv[1])), with_dev(), sys.argv[2], progress=hang)
"""
SMALL: dict[str, Any] = {
    "max_steps": 4,
    "batch_size": 4,
    "max_length": 24,
    "save_steps": 2,
    "bf16": False,
}
OPTIONS_BY_KIND: dict[str, dict[str, Any]] = {
    "splade": {},
    "colbert": {"dimension": 16},
    "entmax": {"attention": "entmax", "alpha": 1.8, "anneal_alpha": 0.5},
}


def recipe_of(kind: str, masked_lm: str) -> Any:
    """Return a small recipe: ``"splade"``, ``"colbert"``, or ``"entmax"`` (SPLADE with entmax)."""
    name = "colbert" if kind == "colbert" else "splade"
    return get_recipe(name, base_model=masked_lm, **SMALL | OPTIONS_BY_KIND[kind])


@pytest.fixture
def recipe(masked_lm: str) -> LsrRecipe:
    """A SPLADE recipe of four steps."""
    return recipe_of("splade", masked_lm)  # type: ignore[no-any-return]


def train_without_interruption(kind: str, masked_lm: str, folder: Path) -> None:
    """Train a recipe, and check the steps that it reports and the files that it leaves."""
    reported_steps: list[tuple[int, int]] = []

    def record_step(step: int, steps: int, loss: float | None) -> None:
        reported_steps.append((step, steps))

    result = train(recipe_of(kind, masked_lm), small_collection(), folder, progress=record_step)
    assert result.steps == 4
    assert not result.reused
    assert result.resumed_from == 0
    assert result.fused
    assert reported_steps == [(step, 4) for step in range(1, 5)]
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    unregister()


@pytest.fixture(scope="module")
def trained(
    masked_lm: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], Path]:
    """A function that returns the folder of a finished run of a kind, and trains it once."""
    folders: dict[str, Path] = {}

    def folder_of(kind: str) -> Path:
        if kind not in folders:
            folder = tmp_path_factory.mktemp(kind) / "m"
            with with_plots():
                train_without_interruption(kind, masked_lm, folder)
            folders[kind] = folder
        return folders[kind]

    return folder_of


@pytest.fixture
def model_without_dropout(masked_lm: str, tmp_path: Path) -> str:
    """The masked language model without dropout, whose draws depend on the layout of a batch."""
    folder = shutil.copytree(masked_lm, tmp_path / "base")
    rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    (folder / "config.json").write_text(json.dumps(read_config(folder) | rates))
    return str(folder)


def test_files_of_a_trained_model_have_the_permissions_of_new_files(
    trained: Any,
    tmp_path: Path,
) -> None:
    new_file = tmp_path / "new"
    new_file.touch()
    modes = {
        file.name: file.stat().st_mode for file in trained("splade").iterdir() if file.is_file()
    }
    assert modes == dict.fromkeys(modes, new_file.stat().st_mode)


@pytest.mark.parametrize("kind", ["splade", "colbert"])
def test_a_run_leaves_a_log_and_a_plot(trained: Any, kind: str) -> None:
    folder = trained(kind)
    assert logged_steps(folder) == [1, 4]
    assert (folder / "training.png").read_bytes().startswith(b"\x89PNG")


def test_the_log_separates_the_ranking_loss_and_the_penalties(trained: Any) -> None:
    folder = trained("splade")
    rows = read_log(folder)
    for row in rows:
        penalties = row["query_penalty"] + row["document_penalty"]
        assert row["loss"] == pytest.approx(row["ranking_loss"] + penalties, rel=1e-3)
        assert row["query_active_terms"] > 0
    last_row = rows[-1]
    last_penalties = last_row["query_penalty"] + last_row["document_penalty"]
    result = json.loads((folder / "tilefold_training.json").read_text())["result"]
    assert result["ranking_loss"] == last_row["ranking_loss"]
    assert result["penalties"] == pytest.approx(last_penalties)


def test_losses_are_printed_with_their_parts() -> None:
    assert str(Losses(1.5, 1.0, 0.5)) == "loss 1.500 (ranking 1.000, penalties 0.500)"
    assert str(Losses(1.5, 1.5)) == "loss 1.500"


def test_a_trained_splade_model_loads_in_sentence_transformers(
    trained: Any,
    masked_lm: str,
) -> None:
    model = SparseEncoder(str(trained("splade")), device="cpu")
    assert model.max_seq_length == 24
    assert type(model[0].model).__name__ == "BertForMaskedLM"
    weights_before = load_file(Path(masked_lm) / "model.safetensors")
    weights = load_file(trained("splade") / "model.safetensors")
    assert any(not torch.equal(weights[name], weights_before[name]) for name in weights_before)


def test_a_trained_colbert_model_loads_in_sentence_transformers(
    trained: Any,
    masked_lm: str,
) -> None:
    model = MultiVectorEncoder(str(trained("colbert")), device="cpu", local_files_only=True)
    modules = [type(module).__name__ for module in model]
    assert modules == ["Transformer", "Dense", "MultiVectorMask", "Normalize"]
    assert model[0].document_length == 24
    assert model[0].query_length == 32
    assert model.get_embedding_dimension() == 16
    weights_before = recipe_of("colbert", masked_lm).build_model([]).cpu().state_dict()
    for name, weight in model.state_dict().items():
        if "linear" in name:
            assert not torch.equal(weight, weights_before[name])


def test_a_trained_colbert_model_encodes_tokens_without_punctuation(trained: Any) -> None:
    model = MultiVectorEncoder(str(trained("colbert")), device="cpu", local_files_only=True)
    (vectors,) = model.encode_document(["one, two!"])
    assert vectors.shape == (4, 16)
    assert vectors.norm(dim=1).tolist() == pytest.approx([1.0] * 4, abs=1e-5)


@pytest.mark.parametrize(
    ("kind", "alpha_of_checkpoint"),
    [("colbert", None), ("entmax", 1.8)],
)
def test_an_interrupted_run_resumes_and_ends_as_one_without_interruption(
    trained: Any,
    kind: str,
    alpha_of_checkpoint: float | None,
    masked_lm: str,
    collection: Collection,
    tmp_path: Path,
) -> None:
    recipe = recipe_of(kind, masked_lm)
    folder = tmp_path / "m"
    train_until(3, recipe, collection, folder)
    assert not folder.exists()
    checkpoint = tmp_path / "m.training/checkpoint-2"
    assert read_config(checkpoint).get("entmax_alpha") == alpha_of_checkpoint
    other_settings = r"interrupted run with other settings.*seed"
    refused(ValueError, other_settings, train, replace(recipe, seed=9), collection, folder)
    unregister()
    progress = StepRecorder()
    result = train(recipe, collection, folder, progress=progress)
    assert result.resumed_from == 2
    assert progress.steps == [3, 4]
    assert_equal_weights(folder, trained(kind))
    assert logged_steps(folder) == [1, 4], "rows from before the interruption stay"
    assert train(recipe, collection, folder).reused


def kill_at_step_5(recipe: Any, folder: Path) -> None:
    """Train in a process that is killed at step 5, while a checkpoint is written."""
    command = ("-c", RUN_AND_HANG, json.dumps(recipe.to_dict()), folder)
    with programs.start(*command, stdout=programs.PIPE, cwd=ROOT) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "at step 5\n"
        process.kill()
    unfinished_checkpoint = folder.with_name(f"{folder.name}.training") / "checkpoint-5"
    unfinished_checkpoint.mkdir()
    (unfinished_checkpoint / "model.safetensors").write_bytes(b"half")


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"group_by_length": True}, id="batches by length"),
        pytest.param({"evaluate_steps": 2, "learning_rate": 1e-2}, id="evaluations"),
    ],
)
def test_a_killed_run_resumes_and_ends_as_one_without_interruption(
    settings: dict[str, Any],
    recipe: Any,
    tmp_path: Path,
) -> None:
    recipe = replace(recipe, max_steps=6, **settings)
    collection = with_dev()
    killed = tmp_path / "killed"
    kill_at_step_5(recipe, killed)
    assert not killed.exists()
    progress = StepRecorder()
    result = train(recipe, collection, killed, progress=progress)
    assert result.resumed_from == 4
    assert progress.steps == [5, 6]
    expected = train(recipe, collection, tmp_path / "uninterrupted")
    assert result.evaluations == expected.evaluations
    assert_equal_weights(killed, tmp_path / "uninterrupted")


@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("kind", ["splade", "colbert"])
def test_fused_runs_have_the_losses_of_runs_that_are_not(
    kind: str,
    steps: int,
    model_without_dropout: str,
    collection: Collection,
    tmp_path: Path,
) -> None:
    recipe = replace(recipe_of(kind, model_without_dropout), max_steps=steps)
    fused = train(replace(recipe, fused=True), collection, tmp_path / "fused")
    stock = train(replace(recipe, fused=False), collection, tmp_path / "stock")
    assert fused.fused
    assert not stock.fused
    assert fused.loss is not None
    assert fused.loss == pytest.approx(stock.loss, rel=1e-4)


def test_frozen_layers_and_embeddings_do_not_change(
    recipe: LsrRecipe,
    collection: Any,
    tmp_path: Path,
) -> None:
    train(replace(recipe, frozen_layers=1), collection, tmp_path / "m")
    weights_before = load_file(Path(recipe.base_model) / "model.safetensors")
    weights = load_file(tmp_path / "m" / "model.safetensors")
    for name, weight in weights_before.items():
        if "embeddings" in name or ".layer.0." in name:
            assert torch.equal(weights[name], weight), name
        elif ".layer.1." in name and name.endswith("dense.weight"):
            assert not torch.equal(weights[name], weight), name


def test_a_run_stops_when_its_hours_are_over_and_resumes(
    recipe: Any,
    collection: Any,
    trained: Any,
    tmp_path: Path,
) -> None:
    folder = tmp_path / "m"
    message = "the 1e-09 hours are over, at step 1 of 4; run the same command again"
    refused(OutOfTimeError, message, train, recipe, collection, folder, hours=1e-9)
    assert newest_step(folder) == 1
    assert train(recipe, collection, folder, hours=9.0).resumed_from == 1
    assert_equal_weights(folder, trained("splade"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param(
            {"hours": 0}, "hours: must be above 0, or None for no limit, got 0", id="no hours"
        ),
        pytest.param({"report_to": "x"}, "report_to: must be none, .*got 'x'", id="report_to"),
    ],
)
def test_train_rejects_options(
    recipe: Any,
    collection: Any,
    tmp_path: Path,
    options: dict[str, Any],
    message: str,
) -> None:
    refused(ValueError, message, train, recipe, collection, tmp_path / "m", **options)


def test_the_model_card_describes_the_run(
    recipe: Any,
    collection: Any,
    tmp_path: Path,
) -> None:
    train(recipe, collection, tmp_path / "m", command="tilefold train|x")
    card = (tmp_path / "m/README.md").read_text()
    for end_of_line in (
        r"command | `tilefold train\|x` |",
        "data | small, 12 pairs |",
        "4 steps of 4 pairs, 16 in all |",
        "negatives of a query | 3 |",
    ):
        assert f"{end_of_line}\n" in card
    assert '"epochs"' not in card
    assert "terms of a vector | query " in card
    assert "- loss:GlobalFlopsLoss\n" in card
    assert card.index("## Made with tilefold") < card.index("## Training Details")


def test_the_model_card_of_a_colbert_model_has_its_modules(trained: Any) -> None:
    assert "MultiVectorEncoder(" in (trained("colbert") / "README.md").read_text()


@pytest.mark.parametrize(
    ("options", "expected_code", "message"),
    [
        pytest.param(["--hours", "0"], 2, "expected more than 0, got 0", id="no hours"),
        pytest.param(
            ["--steps", "2", "--fp32", "--hours", "1e-9"],
            1,
            "hours are over, at step 1 of 2",
            id="hours are over",
        ),
        pytest.param(
            ["--steps", "2", "--fp32", "--report-to", "nothing"],
            2,
            "report",
            id="unknown report",
        ),
    ],
)
def test_the_train_command_ends_with_a_code_and_the_reason(
    recipe: Any,
    collection: Any,
    tmp_path: Path,
    capsys: Any,
    options: list[str],
    expected_code: int,
    message: str,
) -> None:
    collection.save_beir(tmp_path / "data")
    code = run_cli(
        "train",
        "--model",
        recipe.base_model,
        "--data",
        tmp_path / "data",
        "--output",
        tmp_path / "m",
        *options,
    )
    assert code == expected_code
    assert message in capsys.readouterr().err


@pytest.mark.skipif(find_spec("tensorboard") is None, reason="needs tensorboard")
def test_logs_of_the_trainer_outlive_the_checkpoints(
    recipe: Any,
    collection: Any,
    tmp_path: Path,
) -> None:
    train(recipe, collection, tmp_path / "m", report_to="tensorboard")
    assert list((tmp_path / "m.logs").rglob("events*"))


def test_checkpoints_are_saved_by_time(recipe: Any, collection: Any, tmp_path: Path) -> None:
    at_every_step = replace(recipe, save_steps=100, save_minutes=0.0)
    train_until(3, at_every_step, collection, tmp_path / "m")
    assert newest_step(tmp_path / "m") == 2


def test_an_interrupted_run_with_other_settings_starts_again_on_request(
    recipe: Any,
    collection: Any,
    tmp_path: Path,
) -> None:
    train_until(3, recipe, collection, tmp_path / "m")
    changed = replace(recipe, learning_rate=1e-3)
    message = r"differs in learning_rate\); .* with --fresh \(resume=False in Python\)"
    refused(ValueError, message, train, changed, collection, tmp_path / "m")
    assert train(changed, collection, tmp_path / "m", resume=False).resumed_from == 0


def test_intervals_of_checkpoints_and_logs_may_change_when_a_run_resumes(
    recipe: Any,
    collection: Any,
    tmp_path: Path,
) -> None:
    folder = tmp_path / "m"
    train_until(3, replace(recipe, save_minutes=0.0), collection, folder)
    result = train(replace(recipe, save_steps=7, log_steps=1), collection, folder)
    assert result.resumed_from == 2
    assert result.steps == 4
    assert logged_steps(folder)[-2:] == [3, 4]
    assert train(recipe, collection, folder).reused
    assert newest_step(folder) is None


@pytest.mark.parametrize(
    ("max_save_share", "expected_step"),
    [
        pytest.param(1e9, 2, id="any time for checkpoints"),
        pytest.param(0.0, 1, id="no time for checkpoints"),
    ],
)
def test_checkpoints_take_a_limited_share_of_the_time(
    recipe: Any,
    collection: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    max_save_share: float,
    expected_step: int,
) -> None:
    monkeypatch.setattr(_watch, "DEFAULT_SAVE_STEPS", 1)
    monkeypatch.setattr(_watch, "MAX_SAVE_SHARE", max_save_share)
    train_until(3, replace(recipe, save_steps=None), collection, tmp_path / "m")
    assert newest_step(tmp_path / "m") == expected_step


def test_a_run_that_was_interrupted_before_a_checkpoint_starts_again(
    recipe: Any,
    collection: Any,
    tmp_path: Path,
) -> None:
    train_until(1, recipe, collection, tmp_path / "m")
    result = train(replace(recipe, max_steps=1), collection, tmp_path / "m")
    assert result.steps == 1
    assert result.resumed_from == 0
    assert not (tmp_path / "m.training").exists()


def test_a_finished_run_is_reused_and_its_checkpoints_are_removed(
    recipe: Any,
    collection: Any,
    tmp_path: Path,
) -> None:
    recipe = replace(recipe, max_steps=1)
    train(recipe, collection, tmp_path / "m")
    # as after a process that died before it removed its checkpoints
    checkpoints = tmp_path / "m.training"
    checkpoints.mkdir()
    shutil.copy(tmp_path / "m/tilefold_training.json", checkpoints)
    assert train(recipe, collection, tmp_path / "m").reused
    assert not checkpoints.exists()


def test_a_finished_run_with_other_settings_is_replaced_with_overwrite_only(
    recipe: Any,
    collection: Any,
    tmp_path: Path,
) -> None:
    folder = tmp_path / "m"
    train(replace(recipe, max_steps=1), collection, folder)
    changed = replace(recipe, max_steps=1, seed=1)
    refused(FileExistsError, "differs in seed", train, changed, collection, folder)
    assert not train(changed, collection, folder, overwrite=True).reused


def test_a_folder_that_another_process_trains_is_refused(
    recipe: LsrRecipe,
    collection: Collection,
    tmp_path: Path,
) -> None:
    message = "another process is writing there"
    with held("lock_folder", tmp_path / "m.training"):
        refused(InUseError, message, train, recipe, collection, tmp_path / "m")


def test_a_folder_without_a_trained_model_is_not_overwritten(
    recipe: LsrRecipe,
    collection: Collection,
    tmp_path: Path,
) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    message = "no model that tilefold trained"
    refused(FileExistsError, message, train, recipe, collection, tmp_path, overwrite=True)
    assert (tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("settings", "exploded"),
    [
        pytest.param({"learning_rate": 1e-6}, False, id="small learning rate"),
        pytest.param({"learning_rate": 10.0, "max_steps": 12}, True, id="large learning rate"),
    ],
)
def test_the_result_has_whether_the_loss_exploded(
    recipe: LsrRecipe,
    collection: Any,
    tmp_path: Path,
    settings: dict[str, Any],
    exploded: bool,
) -> None:
    result = train(replace(recipe, **settings), collection, tmp_path / "m")
    assert result.first_ranking_loss is not None
    assert result.exploded is exploded


def test_a_loss_of_nan_ends_a_run(
    recipe: LsrRecipe,
    collection: Any,
    tmp_path: Path,
    monkeypatch: Any,
) -> None:
    forward = SpladeLoss.forward

    def diverging(self: Any, *args: Any, **options: Any) -> Any:
        losses = forward(self, *args, **options)
        return {name: loss * math.nan for name, loss in losses.items()}

    monkeypatch.setattr(SpladeLoss, "forward", diverging)
    message = "the loss is nan after 1 steps: the training has diverged"
    refused(TrainingError, message, train, recipe, collection, tmp_path / "m")


def test_a_collection_without_training_pairs_is_refused(
    recipe: Any,
    collection: Any,
    tmp_path: Path,
) -> None:
    untrainable = replace(collection, name="bare", qrels={"test": collection.qrels["test"]})
    message = "'bare' has no pairs in its 'train' split"
    refused(ValueError, message, train, recipe, untrainable, tmp_path / "m")
    assert list(tmp_path.iterdir()) == []


def test_a_collection_of_one_training_pair_is_refused(
    recipe: Any,
    collection: Any,
    tmp_path: Path,
) -> None:
    one_pair = replace(collection, qrels={"train": {"q0": {"d0": 1}}})
    refused(ValueError, "has a single pair", train, recipe, one_pair, tmp_path / "m")
    assert list(tmp_path.iterdir()) == []


def test_negatives_are_refused_by_a_recipe_that_uses_none(
    recipe: Any,
    collection: Any,
    tmp_path: Path,
) -> None:
    message = "negatives: the recipe 'splade' does not read mined negatives; omit them, or set"
    with pytest.raises(ValueError, match=message):
        train(
            replace(recipe, max_steps=0),
            collection,
            tmp_path / "m",
            negatives="mined.parquet",
        )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_graphs_are_refused_without_a_gpu(recipe: Any, collection: Any, tmp_path: Path) -> None:
    message = "graphs: must be False without a CUDA GPU, got True; leave graphs out on this machine"
    with_graphs = replace(recipe, graphs=True)
    refused(ValueError, message, train, with_graphs, collection, tmp_path / "m")
    assert list(tmp_path.iterdir()) == []


def test_several_processes_without_a_known_launcher_are_refused(
    recipe: Any,
    collection: Any,
    tmp_path: Path,
    monkeypatch: Any,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    message = "must come from a known launcher, got WORLD_SIZE=2. Start the program with torchrun"
    refused(RuntimeError, message, train, recipe, collection, tmp_path / "m")
    assert list(tmp_path.iterdir()) == []


def test_a_single_process_of_an_unknown_launcher_trains(
    recipe: Any,
    collection: Any,
    tmp_path: Path,
    monkeypatch: Any,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert train(replace(recipe, max_steps=1), collection, tmp_path / "m").steps == 1


def test_more_frozen_layers_than_the_model_has_are_refused(
    recipe: Any,
    collection: Any,
    tmp_path: Path,
) -> None:
    message = "frozen_layers: must not exceed the model's 2 layers, got 3"
    frozen = replace(recipe, frozen_layers=3)
    refused(ValueError, message, train, frozen, collection, tmp_path / "m")


def test_graphs_that_are_not_possible_are_refused_with_the_reason(
    recipe: Any,
    collection: Any,
    tmp_path: Path,
    monkeypatch: Any,
) -> None:
    monkeypatch.setattr(_training, "check_graphs", lambda graphs: None)
    two_encoders = get_recipe("splade-doc", base_model=recipe.base_model, **SMALL, graphs=True)
    message = "graphs must be None or False for this training, got True, but the model is on a CPU"
    refused(ValueError, message, train, two_encoders, collection, tmp_path / "m")


def test_the_number_of_steps_follows_from_epochs_unless_max_steps_is_set() -> None:
    assert total_steps(get_recipe("splade", epochs=2, batch_size=4), 10) == 6
    assert total_steps(get_recipe("splade", max_steps=7), 10) == 7


def splade_loss(**options: Any) -> SpladeLoss:
    """Return a SPLADE loss whose weights of penalties are 0.2 (documents) and 0.4 (queries)."""
    return SpladeLoss(None, SparseMultipleNegativesRankingLoss(None), 0.2, 0.4, **options)


def test_the_penalty_of_each_side_has_a_warm_up_of_its_own_length() -> None:
    loss = splade_loss()
    schedule = SparseWatch(loss, {"query": 0.5, "document": 1.0})
    schedule.on_train_begin(None, SimpleNamespace(max_steps=20, global_step=0), None)
    weights = {}
    for step in (0, 5, 10, 20):
        schedule.on_step_begin(None, SimpleNamespace(max_steps=20, global_step=step), None)
        weights[step] = (loss.query_regularizer_weight, loss.document_regularizer_weight)
    assert weights[0] == (0, 0)
    assert weights[5] == pytest.approx((0.1, 0.0125))
    assert weights[10] == pytest.approx((0.4, 0.05))
    assert weights[20] == pytest.approx((0.4, 0.2))


def log_step(callback: Any, **logs: float) -> dict[str, float]:
    """Return the figures of step 7 with what a callback adds to them."""
    callback.on_log(None, SimpleNamespace(global_step=7), None, logs)
    return logs


def test_active_terms_are_logged_and_warned_of() -> None:
    loss = splade_loss(query_regularizer=NoPenalty(), document_regularizer=NoPenalty())
    callback = SparseWatch(loss, {})
    documents = torch.zeros(4, 100, requires_grad=True)
    with torch.no_grad():
        documents[0, :8] = 1
    queries = documents + 1
    loss.query_regularizer.compute_loss_from_embeddings(queries)
    loss.document_regularizer.compute_loss_from_embeddings(documents)
    logs = log_step(callback, loss=1.0, grad_norm=0.5)
    assert logs["query_active_terms"] == 100.0
    assert logs["document_active_terms"] == 2.0
    query_warning, document_warning, *_ = callback.warnings()
    assert query_warning.startswith("query vectors have 100 of 100 terms (100 at the start)")
    assert document_warning.startswith("75% of the document vectors have no term")


def test_a_second_gradient_of_zero_ends_a_run() -> None:
    loss = splade_loss(query_regularizer=NoPenalty(), document_regularizer=NoPenalty())
    callback = SparseWatch(loss, {})
    log_step(callback, loss=1.0, grad_norm=0.5)
    log_step(callback, loss=1.0, grad_norm=0.0)
    message = "the gradient is zero after 7 steps"
    refused(TrainingError, message, log_step, callback, loss=1.0, grad_norm=0.0)


def encode_command(model: Path, data: Path, output: Path) -> tuple[str | Path, ...]:
    """Return the arguments of ``tilefold encode``."""
    return ("encode", "--model", model, "--data", data, "--output", output, "--json")


def test_the_command_line_encodes_with_the_attention_of_a_model(
    trained: Any,
    collection: Collection,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = trained("entmax")
    config = read_config(folder)
    assert config["attn_implementation"] == "entmax"
    assert config["entmax_alpha"] == 1.8
    unregister()
    # sentence-transformers without tilefold
    with pytest.raises(ValueError, match="is not supported"):
        SparseEncoder(str(folder), device="cpu")
    collection.save_beir(tmp_path / "data")
    assert run_cli(*encode_command(folder, tmp_path / "data", tmp_path / "vectors")) == 0
    assert json.loads(capsys.readouterr().out)["n"] == 16
    model = load_saved(str(folder), "sparse")
    assert runs_entmax(model)
    assert model[0].model.config.entmax_alpha == 1.8


def test_a_model_with_an_alpha_and_another_attention_is_refused(
    trained: Any,
    collection: Collection,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = shutil.copytree(trained("entmax"), tmp_path / "entmax")
    config = read_config(folder)
    del config["attn_implementation"]
    (folder / "config.json").write_text(json.dumps(config))
    collection.save_beir(tmp_path / "data")
    assert run_cli(*encode_command(folder, tmp_path / "data", tmp_path / "vectors")) == 1
    message = "must run entmax attention in every layer whose configuration has entmax_alpha"
    assert message in capsys.readouterr().err


def test_the_train_command_refuses_an_unknown_attention(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    paths = ("--data", tmp_path / "data", "--output", tmp_path / "m")
    assert run_cli("train", *paths, "--attention", "sparse") == 2
    assert "--attention: expected one of softmax, entmax, got 'sparse'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "alpha"),
    [
        pytest.param({}, 1.8, id="as before"),
        pytest.param({"attention": "softmax"}, None, id="softmax on request"),
    ],
)
def test_a_base_model_is_trained_with_its_attention_unless_the_recipe_names_another(
    trained: Any,
    collection: Collection,
    tmp_path: Path,
    settings: dict[str, str],
    alpha: float | None,
) -> None:
    options = SMALL | {"max_steps": 1} | settings
    recipe = get_recipe("splade", base_model=str(trained("entmax")), **options)
    train(recipe, collection, tmp_path / "m")
    config = read_config(tmp_path / "m")
    assert config.get("entmax_alpha") == alpha
    assert ("attn_implementation" in config) == (alpha is not None)


def test_bf16_is_not_used_on_a_processor_with_avx2_only() -> None:
    program = "from tilefold.recipes.loading import supports_bf16; print(supports_bf16())"
    environment = os.environ | {"ATEN_CPU_CAPABILITY": "avx2", "CUDA_VISIBLE_DEVICES": ""}
    process = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert process.stdout.strip() == "False"


class ForbiddenDataParallel(nn.DataParallel[Any]):
    """Fails where it is used."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise AssertionError("the Trainer took DataParallel")


@pytest.mark.parametrize("fused", [True, False])
def test_one_of_two_gpus_is_used_and_the_log_says_how_to_use_both(
    recipe: LsrRecipe,
    fused: bool,
    collection: Collection,
    tmp_path: Path,
    monkeypatch: Any,
    caplog: Any,
) -> None:
    # On the CPU, Trainer takes as many devices as torch counts GPUs unless `use_cpu` is set.
    arguments = _trainer._common_arguments
    monkeypatch.setattr(
        _trainer, "_common_arguments", lambda job: arguments(job) | {"use_cpu": False}
    )
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(nn, "DataParallel", ForbiddenDataParallel)
    result = train(replace(recipe, max_steps=2, fused=fused), collection, tmp_path / "model")
    assert result.steps == 2
    assert not result.reused
    (message,) = [
        record.getMessage() for record in caplog.records if record.name.startswith("tilefold")
    ]
    assert "2 GPUs are visible and one is used, cuda:0" in message
    assert message.endswith("train --devices all, or torchrun --nproc-per-node 2 SCRIPT")


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["splade", "colbert"])
def test_an_interrupted_run_with_graphs_resumes(
    kind: str,
    model_without_dropout: str,
    collection: Any,
    tmp_path: Path,
) -> None:
    with_graphs = get_recipe(
        kind,
        base_model=model_without_dropout,
        batch_size=4,
        max_length=16,
        graphs=True,
        max_steps=8,
        save_steps=4,
    )
    without_graphs = replace(with_graphs, graphs=False)
    train_until(6, with_graphs, collection, tmp_path / "graphs")
    train_until(6, without_graphs, collection, tmp_path / "plain")
    message = "differs in graphs"
    refused(ValueError, message, train, without_graphs, collection, tmp_path / "graphs")
    result = train(with_graphs, collection, tmp_path / "graphs")
    expected = train(without_graphs, collection, tmp_path / "plain")
    for resumed in (result, expected):
        assert resumed.resumed_from == 4
        assert resumed.steps == 8
    # there are other warnings, since a tiny model learns nothing
    assert not any("graphs" in warning for warning in result.warnings)
    assert result.loss is not None
    assert result.loss == pytest.approx(expected.loss, rel=0.05)
