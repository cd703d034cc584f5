"""Training steps as CUDA graphs: where they are refused, and that a run resumes with them."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch

from tests.recipes.test_runs import stop_at
from tilefold.recipes import ColbertRecipe, SpladeRecipe, _run, _training
from tilefold.recipes.catalogue import get_recipe, train
from tilefold.retrieval.collection import Collection


@pytest.fixture
def recipe(masked_lm: str) -> SpladeRecipe:
    return SpladeRecipe(base_model=masked_lm, max_steps=4, batch_size=4, max_length=16, save_steps=2, graphs=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
def test_graphs_need_a_gpu_and_nothing_is_left_behind(recipe, collection: Collection, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"graphs must be False without a GPU of CUDA, got True; leave --graphs out"):
        train(recipe, collection, tmp_path / "m")
    assert list(tmp_path.iterdir()) == []


def test_a_model_of_two_encoders_is_refused(
    masked_lm: str, collection: Collection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_training, "check_graphs", lambda graphs: None)
    two = get_recipe("splade-doc", base_model=masked_lm, max_steps=1, batch_size=4, max_length=16, graphs=True)
    with pytest.raises(ValueError, match="graphs must be False for a model of several encoders"):
        train(two, collection, tmp_path / "m")


def test_runs_from_before_graphs_go_on_without_them_and_are_refused_with_them(tmp_path: Path) -> None:
    before = SpladeRecipe().to_dict()
    del before["graphs"]
    record = {"settings": {"recipe": before, "data": "d"}}
    assert _run.TrainingRun(tmp_path / "m", SpladeRecipe().to_dict(), "d")._same(record)
    run = _run.TrainingRun(tmp_path / "m", SpladeRecipe(graphs=True).to_dict(), "d")
    assert not run._same(record)
    assert run._difference(record) == "differs in graphs"


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [SpladeRecipe, ColbertRecipe])
def test_a_run_with_graphs_is_interrupted_and_goes_on(
    kind, masked_lm: str, collection: Collection, tmp_path: Path
) -> None:
    shutil.copytree(masked_lm, tmp_path / "base")  # without dropout, which graphs draw from other random numbers
    config = json.loads((tmp_path / "base" / "config.json").read_text())
    config |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    (tmp_path / "base" / "config.json").write_text(json.dumps(config))
    recipe = kind(
        base_model=str(tmp_path / "base"), max_steps=8, batch_size=4, max_length=16, save_steps=4, graphs=True
    )
    plain = dataclasses.replace(recipe, graphs=False)
    for asked, folder in ((recipe, "m"), (plain, "plain")):
        with pytest.raises(KeyboardInterrupt):
            train(asked, collection, tmp_path / folder, progress=stop_at(6))
    with pytest.raises(ValueError, match="differs in graphs"):
        train(plain, collection, tmp_path / "m")
    resumed, expected = train(recipe, collection, tmp_path / "m"), train(plain, collection, tmp_path / "plain")
    for found in (resumed, expected):
        assert (found.resumed_from, found.steps) == (4, 8)
    assert not any("graphs" in warning for warning in resumed.warnings)  # other warnings: a tiny model learns nothing
    assert resumed.loss is not None and resumed.loss == pytest.approx(expected.loss, rel=0.05)  # of the same steps
