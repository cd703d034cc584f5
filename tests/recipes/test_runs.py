"""Training runs of every kind: what they leave and keep, how they go on, and on what they run."""

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
from tests.recipes.small import with_dev
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
from tests.recipes.small import with_dev
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
OWN: dict[str, dict[str, Any]] = {
    "splade": {},
    "colbert": {"dimension": 16},
    "entmax": {"attention": "entmax", "alpha": 1.8, "anneal_alpha": 0.5},
}


def recipe_of(kind: str, masked_lm: str) -> Any:
    name = "colbert" if kind == "colbert" else "splade"
    return get_recipe(name, base_model=masked_lm, **SMALL | OWN[kind])


@pytest.fixture
def recipe(masked_lm: str) -> LsrRecipe:
    return recipe_of("splade", masked_lm)  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def trained(
    masked_lm: str,
    collection: Collection,
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], Path]:
    """The folder of a whole run of a kind."""
    made: dict[str, Path] = {}

    def run(kind: str) -> Path:
        if kind not in made:
            made[kind], seen = tmp_path_factory.mktemp(kind) / "m", []
            recipe = recipe_of(kind, masked_lm)
            result = train(
                recipe,
                collection,
                made[kind],
                progress=lambda step, steps, _: seen.append((step, steps)),
            )
            assert (result.steps, result.reused, result.resumed_from, result.fused) == (
                4,
                False,
                0,
                True,
            )
            assert seen == [(step, 4) for step in range(1, 5)]
            assert [path.name for path in made[kind].parent.iterdir()] == ["m"]
            unregister()
        return made[kind]

    return run


@pytest.fixture
def still(masked_lm: str, tmp_path: Path) -> str:
    """Without dropout, which draws by the layout of a batch, and other numbers in graphs."""
    folder = shutil.copytree(masked_lm, tmp_path / "base")
    rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    (folder / "config.json").write_text(json.dumps(config(folder) | rates))
    return str(folder)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    files = folder.rglob("model.safetensors")
    return {
        f"{file.parent.name}.{name}": value
        for file in files
        for name, value in load_file(file).items()
    }


def assert_equal(one: Path, other: Path) -> None:
    left, right = (
        {name.partition(".")[2]: value for name, value in weights(path).items()}
        for path in (one, other)
    )
    assert left.keys() == right.keys()
    assert [name for name in left if not torch.equal(left[name], right[name])] == []


def config(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


def rows_of(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "training_log.jsonl").read_text().splitlines()]


def test_a_run_leaves_a_log_and_a_plot_with_the_ranking_loss_and_the_penalties_apart(
    trained: Any,
) -> None:
    for kind in ("splade", "colbert"):
        assert [row["step"] for row in rows_of(trained(kind))] == [1, 4]
        assert (trained(kind) / "training.png").read_bytes().startswith(b"\x89PNG")
    for row in rows_of(trained("splade")):
        penalties = row["query_penalty"] + row["document_penalty"]
        assert (
            row["loss"] == pytest.approx(row["ranking_loss"] + penalties, rel=1e-3)
            and row["query_active_terms"] > 0
        )
    result = json.loads((trained("splade") / "tilefold_training.json").read_text())["result"]
    assert (result["ranking_loss"], result["penalties"]) == (
        row["ranking_loss"],
        pytest.approx(penalties),
    )
    assert str(Losses(1.5, 1.0, 0.5)) == "loss 1.500 (ranking 1.000, penalties 0.500)"
    assert str(Losses(1.5, 1.5)) == "loss 1.500"


def stop_at(wanted: int) -> Any:
    def progress(step: int, steps: int, loss: float | None) -> None:
        if step == wanted:
            raise KeyboardInterrupt

    return progress


def test_training_leaves_a_stock_model_that_changed(trained: Any, masked_lm: str) -> None:
    sparse = SparseEncoder(str(trained("splade")), device="cpu")
    assert (sparse.max_seq_length, type(sparse[0].model).__name__) == (24, "BertForMaskedLM")
    before, after = (
        load_file(Path(masked_lm) / "model.safetensors"),
        load_file(trained("splade") / "model.safetensors"),
    )
    assert any(not torch.equal(before[name], after[name]) for name in before)
    late = MultiVectorEncoder(str(trained("colbert")), device="cpu", local_files_only=True)
    assert [type(module).__name__ for module in late] == [
        "Transformer",
        "Dense",
        "MultiVectorMask",
        "Normalize",
    ]
    assert (late[0].document_length, late[0].query_length, late.get_embedding_dimension()) == (
        24,
        32,
        16,
    )
    start = recipe_of("colbert", masked_lm).start([]).cpu().state_dict()
    assert all(
        not torch.equal(start[name], value)
        for name, value in late.state_dict().items()
        if "linear" in name
    )
    (vectors,) = late.encode_document(["one, two!"])
    assert vectors.shape == (4, 16)  # punctuation has no vector
    assert vectors.norm(dim=1).tolist() == pytest.approx([1.0] * 4, abs=1e-5)


@pytest.mark.parametrize("kind", ["colbert", "entmax"])
def test_an_interrupted_run_ends_as_a_whole_one(
    trained: Any,
    kind: str,
    masked_lm: str,
    collection: Collection,
    tmp_path: Path,
) -> None:
    recipe = recipe_of(kind, masked_lm)
    refused(KeyboardInterrupt, "^$", train, recipe, collection, tmp_path / "m", progress=stop_at(3))
    assert not (tmp_path / "m").exists()
    assert config(tmp_path / "m.training/checkpoint-2").get("entmax_alpha") == (
        1.8 if kind == "entmax" else None
    )
    told = r"interrupted run with other settings.*seed"
    refused(ValueError, told, train, replace(recipe, seed=9), collection, tmp_path / "m")
    unregister()
    steps: list[int] = []
    result = train(recipe, collection, tmp_path / "m", progress=lambda step, *_: steps.append(step))
    assert (result.resumed_from, steps) == (2, [3, 4])
    assert_equal(trained(kind), tmp_path / "m")
    assert [row["step"] for row in rows_of(tmp_path / "m")] == [1, 4], (
        "what was logged before is kept"
    )
    assert train(recipe, collection, tmp_path / "m").reused


@pytest.mark.parametrize(
    "changed",
    [{"group_by_length": True}, {"evaluate_steps": 2, "learning_rate": 1e-2}],
)
def test_a_killed_run_ends_as_a_whole_one(
    changed: dict[str, Any],
    recipe: Any,
    tmp_path: Path,
) -> None:
    recipe, collection = replace(recipe, max_steps=6, **changed), with_dev()
    command = ("-c", RUN_AND_HANG, json.dumps(recipe.to_dict()), tmp_path / "killed")
    with programs.start(*command, stdout=programs.PIPE, cwd=ROOT) as process:
        assert process.stdout is not None and process.stdout.readline() == "at step 5\n"
        process.kill()
    assert not (tmp_path / "killed").exists()
    half = tmp_path / "killed.training" / "checkpoint-5"  # as if it had died while writing
    half.mkdir()
    (half / "model.safetensors").write_bytes(b"half")
    steps: list[int] = []
    result = train(
        recipe,
        collection,
        tmp_path / "killed",
        progress=lambda step, *_: steps.append(step),
    )
    assert (result.resumed_from, steps) == (4, [5, 6])
    assert train(recipe, collection, tmp_path / "whole").evaluations == result.evaluations
    assert_equal(tmp_path / "killed", tmp_path / "whole")


@pytest.mark.parametrize("kind", ["splade", "colbert"])
def test_fused_and_plain_runs_see_the_same_losses(
    kind: str,
    still: str,
    collection: Collection,
    tmp_path: Path,
) -> None:
    for steps in (1, 4):
        recipe = replace(recipe_of(kind, still), max_steps=steps)
        fused, plain = (
            train(replace(recipe, fused=fused), collection, tmp_path / f"{steps}{fused}")
            for fused in (True, False)
        )
        assert (fused.fused, plain.fused) == (True, False)
        assert fused.loss is not None and fused.loss == pytest.approx(plain.loss, rel=1e-4)


def test_frozen_layers_and_embeddings_keep_their_weights(
    recipe: LsrRecipe,
    collection: Any,
    tmp_path: Path,
) -> None:
    train(replace(recipe, frozen_layers=1), collection, tmp_path / "m")
    before, after = (
        load_file(Path(path) / "model.safetensors") for path in (recipe.base_model, tmp_path / "m")
    )
    kept = {name for name in before if torch.equal(before[name], after[name])}
    assert {name for name in before if "embeddings" in name or ".layer.0." in name} <= kept
    assert {
        name for name in before if ".layer.1." in name and name.endswith("dense.weight")
    } & kept == set()


def test_a_run_stops_when_its_hours_are_over_and_its_card_has_the_command(
    recipe: Any,
    collection: Any,
    trained: Any,
    tmp_path: Path,
    capsys: Any,
) -> None:
    told = "the 1e-09 hours are over, at step 1 of 4; run the same again"
    refused(OutOfTimeError, told, train, recipe, collection, tmp_path / "m", hours=1e-9)
    refused(
        ValueError,
        "hours: must be above 0 or None, got 0",
        train,
        recipe,
        collection,
        tmp_path / "m",
        hours=0,
    )
    refused(
        ValueError,
        "report_to: must be none, .*got 'x'",
        train,
        recipe,
        collection,
        tmp_path / "m",
        report_to="x",
    )
    assert newest_step(tmp_path / "m") == 1
    assert (
        train(
            recipe,
            collection,
            tmp_path / "m",
            hours=9.0,
            command="tilefold train|x",
        ).resumed_from
        == 1
    )
    assert_equal(tmp_path / "m", trained("splade"))
    card = (tmp_path / "m/README.md").read_text()
    for row in (
        r"command | `tilefold train\|x` |",
        "data | small, 12 pairs |",
        "4 steps of 4 pairs, 16 in all |",
        "a query | 3 |",
    ):
        assert f"{row}\n" in card.replace("negatives of a query", "a query")
    assert (
        '"epochs"' not in card
        and "terms of a vector | query " in card
        and "- loss:GlobalFlopsLoss\n" in card
    )
    assert card.index("## Made with tilefold") < card.index("## Training Details")
    assert "MultiVectorEncoder(" in (trained("colbert") / "README.md").read_text()
    collection.save_beir(tmp_path / "data")
    command = (
        "train",
        "--model",
        recipe.base_model,
        "--data",
        tmp_path / "data",
        "--output",
        tmp_path / "c",
    )
    assert (
        run_cli(*command, "--hours", "0") == 2
        and "expected more than 0, got 0" in capsys.readouterr().err
    )
    assert run_cli(*command, "--steps", "2", "--fp32", "--hours", "1e-9") == 1
    assert "hours are over, at step 1 of 2" in capsys.readouterr().err
    assert run_cli(*command, "--steps", "2", "--fp32", "--report-to", "nothing") != 0


@pytest.mark.skipif(find_spec("tensorboard") is None, reason="needs tensorboard")
def test_what_the_trainer_reports_outlives_the_checkpoints(
    recipe: Any,
    collection: Any,
    tmp_path: Path,
) -> None:
    train(recipe, collection, tmp_path / "m", report_to="tensorboard")
    assert list((tmp_path / "m.logs").rglob("events*"))


def test_checkpoints_come_by_time_and_settings_may_change(
    recipe: Any,
    collection: Any,
    tmp_path: Path,
) -> None:
    with pytest.raises(KeyboardInterrupt):
        train(
            replace(recipe, save_steps=100, save_minutes=0.0),
            collection,
            tmp_path / "m",
            progress=stop_at(3),
        )
    assert newest_step(tmp_path / "m") == 2
    other = replace(recipe, learning_rate=1e-3)
    refused(
        ValueError,
        r"differs in learning_rate\); .* with resume=False",
        train,
        other,
        collection,
        tmp_path / "m",
    )
    shutil.copytree(tmp_path / "m.training", tmp_path / "fresh.training")
    assert train(other, collection, tmp_path / "fresh", resume=False).resumed_from == 0
    resumed = train(replace(recipe, save_steps=7, log_steps=1), collection, tmp_path / "m")
    assert (resumed.resumed_from, resumed.steps) == (2, 4)
    log = (tmp_path / "m" / "training_log.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in log][-2:] == [3, 4]
    assert train(recipe, collection, tmp_path / "m").reused
    assert newest_step(tmp_path / "m") is None


@pytest.mark.parametrize(("share", "newest"), [(1e9, 2), (0.0, 1)])
def test_checkpoints_that_take_long_come_seldom(
    recipe: Any,
    collection: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    share: float,
    newest: int,
) -> None:
    monkeypatch.setattr(_watch, "DEFAULT_SAVE_STEPS", 1)
    monkeypatch.setattr(_watch, "MAX_SAVE_SHARE", share)
    with pytest.raises(KeyboardInterrupt):
        train(replace(recipe, save_steps=None), collection, tmp_path / "m", progress=stop_at(3))
    assert newest_step(tmp_path / "m") == newest


def test_a_finished_run_is_reused_or_refuses_other_settings(
    recipe: Any,
    collection: Any,
    tmp_path: Path,
) -> None:
    refused(KeyboardInterrupt, "^$", train, recipe, collection, tmp_path / "m", progress=stop_at(1))
    recipe = replace(recipe, max_steps=1)
    result = train(recipe, collection, tmp_path / "m")
    left = tmp_path / "m.training"
    assert (result.steps, result.resumed_from, left.exists()) == (1, 0, False)
    left.mkdir()  # as if it had died before it cleared away its checkpoints
    (left / "tilefold_training.json").write_text(
        (tmp_path / "m/tilefold_training.json").read_text(),
    )
    assert train(recipe, collection, tmp_path / "m").reused
    assert not left.exists()
    refused(
        FileExistsError,
        "differs in seed",
        train,
        replace(recipe, seed=1),
        collection,
        tmp_path / "m",
    )
    assert not train(replace(recipe, seed=1), collection, tmp_path / "m", overwrite=True).reused


def test_what_others_train_or_made_is_left_alone(
    recipe: LsrRecipe,
    collection: Collection,
    tmp_path: Path,
) -> None:
    with held("lock_folder", tmp_path / "m.training"):
        refused(
            InUseError,
            "another process is writing there",
            train,
            recipe,
            collection,
            tmp_path / "m",
        )
    (tmp_path / "notes.txt").write_text("mine")
    refused(
        FileExistsError,
        "no model that tilefold trained",
        train,
        recipe,
        collection,
        tmp_path,
        overwrite=True,
    )
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_loss_that_explodes_is_seen(
    recipe: LsrRecipe,
    collection: Any,
    tmp_path: Path,
    monkeypatch: Any,
) -> None:
    good = train(replace(recipe, learning_rate=1e-6), collection, tmp_path / "good")
    assert good.first_ranking_loss is not None and not good.exploded
    assert train(
        replace(recipe, learning_rate=10.0, max_steps=12),
        collection,
        tmp_path / "bad",
    ).exploded
    forward = SpladeLoss.forward

    def diverging(self: Any, *args: Any, **options: Any) -> Any:
        return {name: loss * math.nan for name, loss in forward(self, *args, **options).items()}

    monkeypatch.setattr(SpladeLoss, "forward", diverging)
    told = "the loss is nan after 1 steps: the training has diverged"
    refused(TrainingError, told, train, recipe, collection, tmp_path / "m")


def test_what_cannot_be_trained_is_refused(
    recipe: Any,
    collection: Any,
    tmp_path: Path,
    monkeypatch: Any,
) -> None:
    folder = tmp_path / "m"
    bare = replace(collection, name="bare", qrels={"test": collection.qrels["test"]})
    refused(ValueError, "'bare' has no pairs in its 'train' split", train, recipe, bare, folder)
    bare = replace(collection, qrels={"train": {"q0": {"d0": 1}}})
    refused(ValueError, "has a single pair", train, recipe, bare, folder)
    told = "negatives: the recipe 'splade' takes none from a file; leave the file out, or set"
    refused(
        ValueError,
        told,
        train,
        replace(recipe, max_steps=0),
        collection,
        folder,
        negatives="mined.parquet",
    )
    if not torch.cuda.is_available():
        told = r"graphs: expected a GPU of CUDA, got none; leave graphs out on this machine"
        refused(ValueError, told, train, replace(recipe, graphs=True), collection, folder)
    with monkeypatch.context() as patch:
        patch.setenv("WORLD_SIZE", "2")
        told = r"must come from a known launcher, got WORLD_SIZE=2. Start it with torchrun"
        refused(RuntimeError, told, train, recipe, collection, folder)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert train(replace(recipe, max_steps=1), collection, folder).steps == 1
    told = "frozen_layers: must not exceed the model's 2 layers, got 3"
    refused(
        ValueError,
        told,
        train,
        replace(recipe, frozen_layers=3),
        collection,
        tmp_path / "frozen",
    )
    monkeypatch.setattr(_training, "check_graphs", lambda graphs: None)
    two = get_recipe("splade-doc", base_model=recipe.base_model, **SMALL, graphs=True)
    refused(
        ValueError,
        "graphs must be False for a model of several encoders",
        train,
        two,
        collection,
        tmp_path / "t",
    )


def test_steps_follow_epochs_unless_they_are_given() -> None:
    assert total_steps(get_recipe("splade", epochs=2, batch_size=4), 10) == 6
    assert total_steps(get_recipe("splade", max_steps=7), 10) == 7


def splade_loss(**options: Any) -> SpladeLoss:
    return SpladeLoss(None, SparseMultipleNegativesRankingLoss(None), 0.2, 0.4, **options)


def test_penalties_rise_with_a_warm_up_of_their_own_on_each_side() -> None:
    loss = splade_loss()
    schedule = SparseWatch(loss, {"query": 0.5, "document": 1.0})
    seen = []
    for step in (0, 5, 10, 20):
        state = SimpleNamespace(max_steps=20, global_step=step)
        if step == 0:
            schedule.on_train_begin(None, state, None)
        schedule.on_step_begin(None, state, None)
        seen.append((loss.query_regularizer_weight, loss.document_regularizer_weight))
    assert seen == [
        pytest.approx(pair) for pair in ((0, 0), (0.1, 0.0125), (0.4, 0.05), (0.4, 0.2))
    ]


def logged(callback: Any, **logs: float) -> dict[str, float]:
    callback.on_log(None, SimpleNamespace(global_step=7), None, logs)
    return logs


def test_what_is_counted_reaches_the_logs_and_the_warnings() -> None:
    loss = splade_loss(query_regularizer=NoPenalty(), document_regularizer=NoPenalty())
    callback = SparseWatch(loss, {})
    rows = torch.zeros(4, 100, requires_grad=True)
    with torch.no_grad():
        rows[0, :8] = 1
    loss.query_regularizer.compute_loss_from_embeddings(rows + 1)
    loss.document_regularizer.compute_loss_from_embeddings(rows)
    logs = logged(callback, loss=1.0, grad_norm=0.5)
    assert (logs["query_active_terms"], logs["document_active_terms"]) == (100.0, 2.0)
    told = callback.warnings()
    assert told[0].startswith("query vectors have 100 of 100 terms (100 at the start)")
    assert told[1].startswith("75% of the document vectors have no term")
    logged(callback, loss=1.0, grad_norm=0.0)
    refused(
        TrainingError,
        "the gradient is zero after 7 steps",
        logged,
        callback,
        loss=1.0,
        grad_norm=0.0,
    )


# attention


def test_the_program_encodes_with_the_attention_of_a_model(
    trained: Any,
    collection: Collection,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = shutil.copytree(trained("entmax"), tmp_path / "entmax")
    saved = config(folder)
    assert (saved["attn_implementation"], saved["entmax_alpha"]) == ("entmax", 1.8)
    unregister()
    with pytest.raises(ValueError, match="is not supported"):  # plain sentence-transformers
        SparseEncoder(str(folder), device="cpu")
    collection.save_beir(tmp_path / "data")
    command = (
        "encode",
        "--model",
        folder,
        "--data",
        tmp_path / "data",
        "--output",
        tmp_path / "vectors",
        "--json",
    )
    assert run_cli(*command) == 0
    assert json.loads(capsys.readouterr().out)["n"] == 16
    model = load_saved(str(folder), "sparse")
    assert runs_entmax(model) and model[0].model.config.entmax_alpha == 1.8
    del saved["attn_implementation"]  # as if it had been saved by something else
    (folder / "config.json").write_text(json.dumps(saved))
    assert run_cli(*command) == 1
    assert (
        "must run entmax attention where its configuration has entmax_alpha"
        in capsys.readouterr().err
    )
    places = ("--data", tmp_path / "data", "--output", tmp_path / "m")
    assert run_cli("train", *places, "--attention", "sparse") == 2
    assert "--attention: expected one of softmax, entmax, got 'sparse'" in capsys.readouterr().err


def test_a_base_model_keeps_its_attention_unless_asked_to(
    trained: Any,
    collection: Collection,
    tmp_path: Path,
) -> None:
    recipe = get_recipe("splade", base_model=str(trained("entmax")), **SMALL | {"max_steps": 1})
    train(recipe, collection, tmp_path / "same")
    assert config(tmp_path / "same")["entmax_alpha"] == 1.8
    train(replace(recipe, attention="softmax"), collection, tmp_path / "softmax")
    assert {"attn_implementation", "entmax_alpha"} & set(config(tmp_path / "softmax")) == set()


# processors, processes and CUDA graphs


def test_a_processor_held_to_avx2_trains_in_fp32() -> None:
    program = "from tilefold.recipes.loading import supports_bf16; print(supports_bf16())"
    environment = os.environ | {"ATEN_CPU_CAPABILITY": "avx2", "CUDA_VISIBLE_DEVICES": ""}
    told = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert told.stdout.strip() == "False"


@pytest.mark.parametrize("fused", [True, False])
def test_one_of_two_gpus_is_used(
    recipe: LsrRecipe,
    fused: bool,
    collection: Collection,
    tmp_path: Path,
    monkeypatch: Any,
    caplog: Any,
) -> None:
    """On the CPU, where the Trainer takes as many devices as torch counts GPUs, unless it is told
    to use the CPU.
    """
    settings = _trainer._settings
    monkeypatch.setattr(_trainer, "_settings", lambda job: settings(job) | {"use_cpu": False})
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)

    class Wrapped(nn.DataParallel[Any]):
        def __init__(self, *_: Any, **__: Any) -> None:
            raise AssertionError("the Trainer took DataParallel")

    monkeypatch.setattr(nn, "DataParallel", Wrapped)
    result = train(replace(recipe, max_steps=2, fused=fused), collection, tmp_path / "model")
    assert (result.steps, result.reused) == (2, False)
    said = [record.getMessage() for record in caplog.records if record.name.startswith("tilefold")]
    assert len(said) == 1 and "2 GPUs are visible and one is used, cuda:0" in said[0]
    assert said[0].endswith("train --devices all, or torchrun --nproc-per-node 2 SCRIPT")


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["splade", "colbert"])
def test_an_interrupted_run_with_graphs_goes_on(
    kind: str,
    still: str,
    collection: Any,
    tmp_path: Path,
) -> None:
    recipe = get_recipe(
        kind,
        base_model=still,
        batch_size=4,
        max_length=16,
        graphs=True,
        max_steps=8,
        save_steps=4,
    )
    plain = replace(recipe, graphs=False)
    for asked, folder in ((recipe, "m"), (plain, "plain")):
        with pytest.raises(KeyboardInterrupt):
            train(asked, collection, tmp_path / folder, progress=stop_at(6))
    refused(ValueError, "differs in graphs", train, plain, collection, tmp_path / "m")
    resumed, expected = (
        train(recipe, collection, tmp_path / "m"),
        train(plain, collection, tmp_path / "plain"),
    )
    for found in (resumed, expected):
        assert (found.resumed_from, found.steps) == (4, 8)
    assert not any(
        "graphs" in warning for warning in resumed.warnings
    )  # other warnings: a tiny model learns nothing
    assert resumed.loss is not None and resumed.loss == pytest.approx(
        expected.loss,
        rel=0.05,
    )  # of the same steps
