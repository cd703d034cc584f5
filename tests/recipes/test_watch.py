"""Dead and nearly dense models are noticed while they train."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import BertForMaskedLM

from tests.recipes.tiny import tiny_masked_lm
from tilefold.losses import NoPenalty
from tilefold.recipes import LsrRecipe, TrainingError, train
from tilefold.recipes._watch import Watch
from tilefold.retrieval.collection import Collection

SMALL: dict[str, Any] = {"batch_size": 4, "max_length": 24, "bf16": False, "save_steps": 100}


@pytest.fixture(scope="module")
def base(collection: Collection, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_masked_lm(tmp_path_factory.mktemp("base"), collection)


def test_a_dead_model_stops_the_training_with_a_remedy(collection: Collection, base: Path, tmp_path: Path) -> None:
    network = BertForMaskedLM.from_pretrained(base)
    with torch.no_grad():
        network.cls.predictions.bias.fill_(-100.0)
    network.save_pretrained(base.parent / "dead")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (base.parent / "dead" / name).write_text((base / name).read_text())
    recipe = LsrRecipe(base_model=str(base.parent / "dead"), max_steps=12, **SMALL)
    with pytest.raises(TrainingError, match=r"every query vector is zero after 10 steps: the model is dead.*smaller"):
        train(recipe, collection, tmp_path / "m")


def test_a_model_that_is_not_sparse_is_told_of(collection: Collection, base: Path, tmp_path: Path) -> None:
    recipe = LsrRecipe(base_model=str(base), max_steps=2, **SMALL)
    result = train(recipe, collection, tmp_path / "m")
    assert [text.split(" vectors have")[0] for text in result.warnings] == ["query", "document"]
    assert "larger weight of the penalties" in result.warnings[0]
    again = train(recipe, collection, tmp_path / "m")
    assert again.reused and again.warnings == result.warnings


def logged(callback: Any, **logs: float) -> dict[str, float]:
    callback.on_log(None, SimpleNamespace(global_step=7), None, logs)
    return logs


def test_what_is_counted_reaches_the_logs_and_the_warnings() -> None:
    loss = SimpleNamespace(query_regularizer=NoPenalty(), document_regularizer=NoPenalty())
    callback = Watch(loss)
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
    with pytest.raises(TrainingError, match="the gradient is zero after 7 steps"):
        logged(callback, loss=1.0, grad_norm=0.0)
