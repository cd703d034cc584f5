"""Recipes and the command line with entmax attention: trained, resumed, saved, loaded, never replaced by softmax."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tilefold import cli
from tilefold.integrations.transformers import runs_entmax, unregister
from tilefold.recipes import SpladeRecipe, train
from tilefold.retrieval.collection import Collection

BASE: dict[str, Any] = {"max_steps": 4, "batch_size": 4, "max_length": 24, "save_steps": 2, "bf16": False}


@pytest.fixture(scope="module")
def trained(masked_lm: str, collection: Collection, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SPLADE model with alpha annealed to 1.8 over half of four steps."""
    folder = tmp_path_factory.mktemp("entmax") / "m"
    recipe = SpladeRecipe(base_model=masked_lm, attention="entmax", alpha=1.8, anneal_alpha=0.5, **BASE)
    train(recipe, collection, folder)
    unregister()
    return folder


def config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def program(*args: str) -> int:
    with pytest.raises(SystemExit) as leave:
        cli.main(list(args))
    return int(leave.value.code or 0)


def test_a_killed_run_goes_on_with_the_alpha_of_its_step(
    trained: Path, masked_lm: str, collection: Collection, tmp_path: Path
) -> None:
    def stop(step: int, steps: int, loss: float | None) -> None:
        if step == 3:
            raise KeyboardInterrupt

    recipe = SpladeRecipe(base_model=masked_lm, attention="entmax", alpha=1.8, anneal_alpha=0.5, **BASE)
    with pytest.raises(KeyboardInterrupt):
        train(recipe, collection, tmp_path / "m", progress=stop)
    assert config(tmp_path / "m.training/checkpoint-2")["entmax_alpha"] == 1.8
    unregister()
    assert train(recipe, collection, tmp_path / "m").resumed_from == 2
    ends = [load_file(folder / "model.safetensors") for folder in (trained, tmp_path / "m")]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def test_the_program_encodes_with_the_attention_of_a_checkpoint_or_not_at_all(
    trained: Path, collection: Collection, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from sentence_transformers import SparseEncoder

    from tilefold.cli._models import load_encoder

    saved = config(trained)
    assert (saved["attn_implementation"], saved["entmax_alpha"]) == ("entmax", 1.8)
    unregister()
    with pytest.raises(ValueError, match="is not supported"):  # plain sentence-transformers
        SparseEncoder(str(trained), device="cpu")
    collection.save_beir(tmp_path / "data")
    place = ("--data", str(tmp_path / "data"), "--output", str(tmp_path / "vectors"), "--json")
    assert program("encode", "--model", str(trained), *place) == 0
    assert json.loads(capsys.readouterr().out)["n"] == 16
    model = load_encoder(str(trained))
    assert runs_entmax(model) and model[0].model.config.entmax_alpha == 1.8
    del saved["attn_implementation"]  # as if it had been saved by something else
    (trained / "config.json").write_text(json.dumps(saved))
    try:
        assert program("encode", "--model", str(trained), *place) == 1
        assert "must run entmax attention where its configuration has entmax_alpha" in capsys.readouterr().err
    finally:
        (trained / "config.json").write_text(json.dumps(saved | {"attn_implementation": "entmax"}))


def test_a_base_model_keeps_its_attention_unless_another_is_asked_for(
    trained: Path, collection: Collection, tmp_path: Path
) -> None:
    recipe = SpladeRecipe(base_model=str(trained), **BASE | {"max_steps": 1})
    train(recipe, collection, tmp_path / "same")
    assert config(tmp_path / "same")["entmax_alpha"] == 1.8
    train(replace(recipe, attention="softmax"), collection, tmp_path / "softmax")
    assert {"attn_implementation", "entmax_alpha"} & set(config(tmp_path / "softmax")) == set()


def test_the_program_names_a_wrong_attention(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert program("train", "--output", str(tmp_path / "m"), "--attention", "sparse") == 2
    assert "attention must be 'softmax', 'entmax' or None, got 'sparse'" in capsys.readouterr().err
