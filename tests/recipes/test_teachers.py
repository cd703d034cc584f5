"""From cross-encoders on disk to the labels of a recipe, by the commands and by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import CrossEncoder, SentenceTransformer

from tilefold.recipes import LsrRecipe
from tilefold.recipes.catalogue import RECIPES
from tilefold.recipes.training_data import make_examples
from tilefold.retrieval import read_training_rows
from tilefold.retrieval.collection import Collection


def shares(values: Any) -> Any:
    """Between 0 and 1 within a query."""
    return (values - values.min()) / (values.max() - values.min())


def test_labels_are_thirty_times_the_mean_of_the_teachers(
    collection: Collection, teachers: tuple[Path, Path], scores: Path
) -> None:
    folder = teachers[0]
    rerankers = [CrossEncoder(str(folder / name), device="cpu") for name in ("reranker", "other-reranker")]
    dense = SentenceTransformer(str(folder / "dense"), device="cpu")
    texts = {name: document.contents for name, document in collection.documents.items()}
    expected: dict[tuple[str, str], float] = {}
    for group in read_training_rows(scores).groups():
        query, read = collection.queries[group.query], [texts[name] for name in group.documents]
        of_each = [
            model.predict([(query, text) for text in read], activation_fn=torch.nn.Identity()) for model in rerankers
        ]
        of_each.append(dense.similarity(dense.encode_query([query]), dense.encode_document(read))[0].numpy())
        mean = 30 * np.mean([shares(values) for values in of_each], axis=0)
        expected |= {(query, text): float(score) for text, score in zip(read, mean, strict=True)}
        assert all(np.ptp(values) > 1e-3 for values in of_each), (
            "teachers of one mind about all documents teach nothing"
        )
    columns = make_examples(LsrRecipe(loss={"kl": 1.0}, negatives=3, epochs=1), collection, scores).columns
    labels = columns.pop("label")
    assert len(labels) == 12
    for row, label in zip(zip(*columns.values(), strict=True), labels, strict=True):
        by_hand = [expected[row[0], text] for text in row[1:]]
        assert label == pytest.approx(by_hand, abs=1.5)  # by machine the teachers run in bf16


def test_the_recipes_that_distil_are_those_that_ask_for_scores() -> None:
    asking = {name for name, entry in RECIPES.items() if "scores" in entry.needs}
    assert asking == {"splade-pp", "splade-v3", "efficient-splade", "inference-free", "splate"}
