"""``tilefold recipes``, and the recipes of ``tilefold train``."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.recipes.small import small_collection
from tests.recipes.tiny import tiny_masked_lm
from tilefold.recipes import RECIPES

Call = Callable[..., Any]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recipes") / "small"
    small_collection().save_beir(folder)
    return folder


def test_recipes_are_listed_with_what_they_need_and_what_their_papers_report(call: Call) -> None:
    table = call("recipes")
    assert table.code == 0 and all(name in table.out for name in RECIPES)
    listed = json.loads(call("recipes", "--json").out)
    assert [entry["name"] for entry in listed] == list(RECIPES)
    assert all(entry["publishes"] and entry["summary"] and entry["published"] for entry in listed)
    one = json.loads(call("recipes", "splade-v3", "--json").out)
    assert one["needs"] == ["pairs", "negatives", "scores"] and one["recipe"]["negatives"] == 8
    assert "document_regularizer = " in call("recipes", "splade-doc").out
    assert call("recipes", "spladee").code == 2


def test_options_and_fields_reach_the_recipe(call: Call, data: Path, tmp_path: Path) -> None:
    model = tiny_masked_lm(tmp_path / "base", small_collection())
    given = ("--steps", "1", "--batch-size", "4", "--max-length", "24", "--regularizer", "0.5", "--fp32")
    asked = ("train", "--recipe", "splade-doc", "--data", data, "--model", model, "--output", tmp_path / "m", *given)
    done = call(*asked, "--set", "document.pooling=sum", "--set", "document_regularizer.threshold=3", "--json")
    assert done.code == 0, done.err
    recipe = json.loads((tmp_path / "m/tilefold_training.json").read_text())["settings"]["recipe"]
    assert (recipe["query"]["kind"], recipe["document"]["pooling"]) == ("binary", "sum")
    assert recipe["query_regularizer"]["weight"] == 0.0  # there is none, and no weight makes one
    assert recipe["document_regularizer"]["weight"] == 0.5 and recipe["document_regularizer"]["threshold"] == 3
    assert "warning: document vectors have" in done.err


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["--recipe", "splade-v3"], 1, "--negatives scores.parquet"),
        (["--recipe", "splade-v2", "--negatives", "no-such-file"], 1, "takes none from a file"),
        (["--recipe", "colbert", "--negatives", "x"], 1, "negatives must be left out for a ColbertRecipe"),
        (["--recipe", "splade-v2", "--set", "document.pooling"], 2, "--set: expected FIELD=VALUE"),
        (["--recipe", "splade-v2", "--set", "margin=1"], 2, "--set: there is no field 'margin'"),
        (["--recipe", "splade-v2", "--set", "query.kind=binary"], 2, "--set: there is no field 'query.kind'"),
        (["--recipe", "splade-v2", "--set", "document.kind=lsi"], 2, "document: kind must be one of"),
    ],
)
def test_what_does_not_fit_is_refused(
    call: Call, data: Path, tmp_path: Path, args: list[str], code: int, message: str
) -> None:
    told = call("train", "--data", data, "--output", tmp_path / "m", *args)
    assert (told.code, told.out) == (code, "")
    assert message in told.err


def test_what_mine_and_score_write_is_what_training_reads(call: Call, data: Path, tmp_path: Path) -> None:
    model = tiny_masked_lm(tmp_path / "base", small_collection())
    index, mined, scored = (tmp_path / name for name in ("bm25", "mined.parquet", "scored.parquet"))
    assert call("index", "--backend", "bm25", "--data", data, "--output", index).code == 0
    assert call("mine", "--data", data, "--index", index, "--output", mined).code == 0
    assert call("score", mined, "--data", data, "--teacher", "bm25", "--output", scored).code == 0
    given = ("--steps", "1", "--batch-size", "4", "--max-length", "24", "--fp32", "--model", model, "--json")
    asked = ("train", "--recipe", "splade-v3", "--data", data, "--set", "negatives=3", *given)
    refused = call(*asked, "--negatives", mined, "--output", tmp_path / "m")
    assert refused.code == 1 and "has no teachers' scores" in refused.err
    done = call(*asked, "--negatives", scored, "--output", tmp_path / "m")
    assert done.code == 0, done.err
    assert json.loads(done.out)["steps"] == 1
    assert "of 12 training pairs were left out" in done.err  # BM25 found no other document for them
