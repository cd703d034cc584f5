"""Training of models of page images on pairs of a query and a page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from sentence_transformers import MultiVectorEncoder

from tilefold.recipes import TrainResult, train
from tilefold.recipes.colbert import ColbertRecipe, scores_of_all_ranks
from tilefold.retrieval import Collection, load_collection
from tilefold.testing.page_models import save_page_model
from tilefold.testing.synthetic_pages import random_pages, random_words, save_page_collection

WORDS = random_words(30)


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Collection:
    """Eight pages, whose queries are for training and for evaluation."""
    folder = tmp_path_factory.mktemp("training") / "pages"
    drawn_pages = random_pages(8, WORDS, words_per_page=8, size=(64, 96), font_size=9)
    save_page_collection(folder, drawn_pages)
    collection = load_collection(folder)
    judgements = collection.qrels["test"]
    collection.qrels = {"train": judgements, "dev": judgements}
    return collection


@pytest.fixture(scope="module")
def colpali(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_page_model(tmp_path_factory.mktemp("colpali"), "colpali", words=WORDS)


def train_pages(model: Path, pages: Collection, output: Path, **options: Any) -> TrainResult:
    """Train a model of page images for three steps of four pairs."""
    recipe = ColbertRecipe(
        base_model=str(model),
        max_steps=3,
        batch_size=4,
        learning_rate=1e-3,
        bf16=False,
        **options,
    )
    return train(recipe, pages, output)


def test_a_model_of_pages_is_trained_and_is_a_stock_model(
    colpali: Path,
    pages: Collection,
    tmp_path: Path,
) -> None:
    result = train_pages(colpali, pages, tmp_path / "model", evaluate_steps=3)
    assert (result.steps, result.fused) == (3, True)
    assert result.evaluations[0]["nDCG@10"] > 0
    trained = MultiVectorEncoder(str(tmp_path / "model"), device="cpu")
    image = next(iter(pages.documents.values())).page.image()
    before = MultiVectorEncoder(str(colpali), device="cpu").encode_document(image)
    after = trained.encode_document(image)
    assert after.shape == before.shape
    assert not torch.allclose(after, before, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["colpali", "colqwen2", "colmodernvbert"])
def test_fused_scores_train_like_stock_scores(
    architecture: Any,
    pages: Collection,
    tmp_path: Path,
) -> None:
    model = save_page_model(tmp_path / "base", architecture, words=WORDS)
    fused = train_pages(model, pages, tmp_path / "fused")
    stock = train_pages(model, pages, tmp_path / "stock", fused=False)
    assert fused.ranking_loss == pytest.approx(stock.ranking_loss, rel=1e-5)
    actual = load_file(tmp_path / "fused" / "model.safetensors")
    expected = load_file(tmp_path / "stock" / "model.safetensors")
    assert actual.keys() == expected.keys()
    # Adam divides by the root of a mean of squares, which magnifies the rounding of tiny gradients.
    for name, weight in expected.items():
        torch.testing.assert_close(actual[name], weight, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["colpali", "colqwen2"])
def test_lora_trains_the_language_model_and_the_projection(
    architecture: Any,
    pages: Collection,
    tmp_path: Path,
) -> None:
    model = save_page_model(tmp_path / "base", architecture, words=WORDS)
    result = train_pages(model, pages, tmp_path / "model", lora=2)
    assert result.trained_weights is not None and result.weights is not None
    assert result.trained_weights < result.weights / 10
    before = load_file(model / "model.safetensors")
    after = load_file(tmp_path / "model" / "model.safetensors")
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert any("embedding_proj_layer" in name for name in changed)
    assert any("q_proj" in name for name in changed)
    assert not any("vision" in name or "visual" in name for name in changed)


def test_lora_needs_projections_with_known_names(tmp_path: Path, pages: Collection) -> None:
    with pytest.raises(ValueError, match="lora needs a model with projections named"):
        train(ColbertRecipe(lora=2, max_steps=1, batch_size=2), pages, tmp_path / "model")


def test_scores_of_pages_are_padded_to_the_longest_page_of_all_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A page has no maximum length, so ranks must agree on one before they gather."""
    longest_of_others = 7

    def all_reduce(tensor: torch.Tensor, *_: Any) -> None:
        tensor.clamp_(min=longest_of_others)

    gathered: list[torch.Size] = []

    def gather_rows(tensor: torch.Tensor) -> torch.Tensor:
        gathered.append(tensor.shape)
        return tensor

    monkeypatch.setattr("torch.distributed.all_reduce", all_reduce)
    monkeypatch.setattr("tilefold.distributed.process_group.gather_rows", gather_rows)
    generator = torch.Generator().manual_seed(0)
    documents = torch.randn(2, 1, 5, 8, generator=generator)
    scores_of_all_ranks(
        torch.randn(2, 3, 8, generator=generator),
        documents,
        torch.ones(2, 3, dtype=torch.bool),
        torch.ones(2, 1, 5, dtype=torch.bool),
        score_function=lambda queries, pages, **masks: queries,
        length=None,
    )
    assert gathered == [torch.Size([2, 1, 7]), torch.Size([2, 1, 7, 8])]
