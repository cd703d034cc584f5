"""Whole training runs: losses of accelerated models equal those of stock ones, step by step."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import sentence_transformers
import torch
from datasets import Dataset
from packaging.version import Version
from sentence_transformers import SparseEncoder, SparseEncoderTrainer
from sentence_transformers.sparse_encoder.losses import (
    CachedSpladeLoss,
    SparseMultipleNegativesRankingLoss,
    SpladeLoss,
)

from tests.integrations.splade_models import five_steps
from tilefold.integrations.sentence_transformers import accelerate, is_accelerated

WORDS = ["length", "order", "first", "last", "sum", "copy", "size", "type"]
PAIRS = Dataset.from_dict(
    {
        "anchor": [f"what is the {word} of a list" for word in WORDS],
        "positive": [f"a function gives the {word} of a list, in {steps} steps" for steps, word in enumerate(WORDS)],
    }
)


def train(folder: Path, output: Path, fused: bool, **options: Any) -> tuple[list[float], SparseEncoder]:
    torch.manual_seed(0)
    model = SparseEncoder(str(folder), device="cpu")
    if fused:
        accelerate(model)
    loss = SpladeLoss(
        model=model,
        loss=SparseMultipleNegativesRankingLoss(model=model),
        document_regularizer_weight=3e-3,
        query_regularizer_weight=5e-3,
    )
    arguments = five_steps(output, **options)
    trainer = SparseEncoderTrainer(model=model, args=arguments, train_dataset=PAIRS, loss=loss)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], model


CHECKPOINTING = pytest.param(
    {"gradient_checkpointing": True},
    marks=pytest.mark.skipif(
        Version(sentence_transformers.__version__) < Version("6.2"),
        reason="sentence-transformers before 6.2 cannot switch checkpointing on under a newer trainer",
    ),
)


@pytest.mark.parametrize("options", [{}, CHECKPOINTING, {"bf16": True}])
def test_the_loss_curve_of_a_training_run_is_that_of_the_stock_model(
    options: dict[str, Any], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    folder = request.getfixturevalue("tiny_folder" if options else "minilm_folder")
    expected, stock = train(folder, tmp_path / "stock", fused=False, **options)
    got, fused = train(folder, tmp_path / "fused", fused=True, **options)
    assert len(expected) == 5 and is_accelerated(fused)
    # in bf16 the stock side rounds its logits to 8 bits, and a step hands the difference on to the next
    assert got == pytest.approx(expected, rel=2e-2 if "bf16" in options else 1e-4)
    if not options:
        query = ["what is the length of a list"]
        reached, wanted = fused.encode(query).to_dense(), stock.encode(query).to_dense()
        assert (reached - wanted).abs().max() < 1e-3 * wanted.max()


def test_cached_splade_loss_gives_the_loss_and_gradients_of_stock(tiny_folder: Path) -> None:
    stock = SparseEncoder(str(tiny_folder), device="cpu")
    fused = copy.deepcopy(stock)
    accelerate(fused)
    results = []
    for model in (stock, fused):
        loss = CachedSpladeLoss(
            model=model,
            loss=SparseMultipleNegativesRankingLoss(model=model),
            document_regularizer_weight=3e-3,
            query_regularizer_weight=5e-3,
            mini_batch_size=3,
        )
        columns = [model.preprocess(list(PAIRS["anchor"])), model.preprocess(list(PAIRS["positive"]))]
        torch.manual_seed(2)
        value = loss.train()(columns, None)
        total = sum(value.values()) if isinstance(value, dict) else value
        total.backward()
        results.append((total.item(), {name: p.grad for name, p in model.named_parameters()}))
    (expected, expected_gradients), (got, gradients) = results
    assert got == pytest.approx(expected, rel=1e-5)
    largest = max(gradient.abs().max() for gradient in expected_gradients.values())
    for name, gradient in gradients.items():
        assert (gradient - expected_gradients[name]).abs().max() <= 1e-4 * largest, name
