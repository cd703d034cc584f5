"""Batches of training rows: their number, their sizes, and what is reported of them."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file

from tests.recipes.small import small_collection, tiny_masked_lm
from tilefold.recipes import LsrRecipe, TrainingError, get_recipe, train
from tilefold.recipes._batches import TrainingBatches
from tilefold.recipes._rows import Column, Examples, TextsInMemory
from tilefold.recipes._steps import (
    PairCounts,
    TextCounts,
    check_batches,
    expected_pairs,
    step_warnings,
)
from tilefold.recipes.lsr import filled_batches, length_grouped_batches
from tilefold.retrieval.data.collection import Collection, Document

# 40 pairs: query 0 has 30 of them, ten other queries have one each
SKEWED_QUERIES = [*range(11), *[0] * 29]
EVEN_QUERIES = [row % 10 for row in range(40)]


def batches_of(
    queries: list[int],
    batch_size: int,
    *,
    full: bool,
    lengths: list[int] | None = None,
) -> TrainingBatches:
    """Batches of pairs of these queries, each with a document of its own."""
    documents = 1000 + np.arange(len(queries))
    keys = np.column_stack([np.array(queries), documents]).astype(np.uint64)
    return TrainingBatches(
        lambda rows: keys[rows],
        len(queries),
        batch_size,
        fill_batches=full,
        seed=3,
        lengths=None if lengths is None else np.array(lengths),
    )


def examples_of_queries(queries: list[int]) -> Examples:
    texts = TextsInMemory(f"query {number}" for number in range(max(queries) + 1))
    documents = TextsInMemory(f"document {row}" for row in range(len(queries)))
    columns = {
        "query": Column(texts, np.array(queries)),
        "document": Column(documents, np.arange(len(queries))),
    }
    return Examples(columns, len(queries))


@pytest.mark.parametrize("full", [True, False], ids=["full", "short"])
@pytest.mark.parametrize("grouped", [True, False], ids=["grouped", "random"])
@pytest.mark.parametrize("epoch", [0, 1])
@pytest.mark.parametrize(
    "queries",
    [
        pytest.param(list(range(40)), id="a-document-each"),
        pytest.param(list(range(42)), id="not-a-multiple"),
        pytest.param(EVEN_QUERIES, id="four-documents-each"),
        pytest.param(SKEWED_QUERIES, id="one-query-with-most"),
    ],
)
def test_every_epoch_has_the_announced_number_of_batches_without_a_query_twice(
    queries: list[int],
    epoch: int,
    grouped: bool,
    full: bool,
) -> None:
    lengths = [7 * row % 13 for row in range(len(queries))] if grouped else None
    batches = batches_of(queries, 8, full=full, lengths=lengths)
    batches.set_epoch(epoch)
    drawn = list(batches)
    assert len(drawn) == len(batches) == -(-len(queries) // 8)
    assert drawn == list(batches), "an epoch has one order, so that a killed run can go on"
    for batch in drawn:
        assert len({queries[row] for row in batch}) == len(batch) <= 8
        assert not full or len(batch) == 8
    sizes = [batches.pairs_of_step(epoch * len(batches) + step + 1) for step in range(len(drawn))]
    assert sizes == [len(batch) for batch in drawn]
    batches.set_epoch(epoch + 1)
    assert drawn != list(batches)


@pytest.mark.parametrize("full", [True, False], ids=["full", "short"])
@pytest.mark.parametrize("grouped", [True, False], ids=["grouped", "random"])
def test_an_epoch_has_every_pair_and_full_batches_add_few(full: bool, grouped: bool) -> None:
    lengths = [7 * row % 13 for row in range(42)] if grouped else None
    drawn = Counter(
        row for batch in batches_of(list(range(42)), 8, full=full, lengths=lengths) for row in batch
    )
    assert set(drawn) == set(range(42))
    assert drawn.total() == (48 if full else 42)


def test_filled_batches_take_other_queries_again_instead_of_being_short() -> None:
    batch_sizes = [len(batch) for batch in batches_of(SKEWED_QUERIES, 8, full=False)]
    assert batch_sizes[-2:] == [1, 1]
    filled = list(batches_of(SKEWED_QUERIES, 8, full=True))
    assert [len(batch) for batch in filled] == [8] * 5
    uses = Counter(SKEWED_QUERIES[row] for batch in filled for row in batch)
    assert uses[0] == 5
    assert all(uses[query] >= 3 for query in range(1, 11))


def test_rows_may_share_texts_where_documents_are_no_negatives_of_each_other() -> None:
    drawn = list(TrainingBatches(None, 10, 4, fill_batches=False))
    assert sorted(row for batch in drawn for row in batch) == list(range(10))
    assert [len(batch) for batch in drawn] == [4, 4, 2]
    filled = list(TrainingBatches(None, 10, 4, fill_batches=True))
    assert [len(set(batch)) for batch in filled] == [4, 4, 4]
    assert {row for batch in filled for row in batch} == set(range(10))


def test_batches_that_no_order_fills_are_an_error_instead_of_none() -> None:
    # three queries share a document with each other query: no three rows are distinct
    keys = np.array([[0, 10], [0, 11], [1, 10], [1, 11]], np.uint64)
    batches = TrainingBatches(lambda rows: keys[rows], 4, 3, fill_batches=True)
    with pytest.raises(TrainingError, match="batch_size must be at most 2 for full batches"):
        list(batches)


@pytest.mark.parametrize("make", [filled_batches, length_grouped_batches])
def test_a_stock_trainer_can_take_the_batches_of_a_data_set(make: Any) -> None:
    texts = {
        "query": [f"query {number}" for number in SKEWED_QUERIES],
        "document": [f"document {row}" for row in range(40)],
        "label": [1.0] * 40,
    }
    batches = make(
        Dataset.from_dict(texts),
        8,
        drop_last=False,
        valid_label_columns=["label", "score"],
        generator=None,
        seed=1,
    )
    drawn = list(batches)
    assert len(drawn) == len(batches) == 5
    for batch in drawn:
        assert len({SKEWED_QUERIES[row] for row in batch}) == len(batch)
        assert make is length_grouped_batches or len(batch) == 8


def test_bounds_on_batches_follow_from_how_often_texts_occur() -> None:
    counts = TextCounts(examples_of_queries(SKEWED_QUERIES))
    assert counts.fewest_distinct() == ("query", 11)
    assert counts.max_full_batches(8) == 1  # of 1 + 10 rows with different queries, 2 + 10 in two
    assert counts.max_distinct_rows(5) == 15
    even = TextCounts(examples_of_queries(EVEN_QUERIES))
    assert even.max_full_batches(8) == 5
    assert even.max_distinct_rows(5) == 40


def test_pairs_of_steps_are_counted_over_epochs() -> None:
    assert expected_pairs(4, 24, 64) == 96
    assert expected_pairs(2, 100, 64) == 100
    assert expected_pairs(3, 100, 64) == 164
    counts = PairCounts()
    for pairs in (16, 10, 1):
        counts = counts.add_step(pairs)
    assert asdict(counts) == {"steps": 3, "total": 27, "fewest": 1, "most": 16, "single": 1}
    assert PairCounts.from_json(json.loads(json.dumps(asdict(counts)))) == counts
    assert PairCounts.from_json(None) == PairCounts()


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        pytest.param(PairCounts(30, 480, 16, 16, 0), [], id="all-full"),
        pytest.param(
            PairCounts(4, 64, 16, 16, 0),
            ["the training had 4 steps, which hardly change a model"],
            id="few-steps",
        ),
        pytest.param(
            PairCounts(30, 300, 1, 16, 9),
            ["30 steps trained with 300 pairs instead of 480", "9 steps of 30 had a single pair"],
            id="short-batches",
        ),
        pytest.param(PairCounts(30, 476, 12, 16, 0), [], id="under-one-percent-missing"),
        pytest.param(
            PairCounts(30, 475, 11, 16, 0),
            ["30 steps trained with 475 pairs instead of 480, counting a pair once per epoch"],
            id="over-one-percent-missing",
        ),
    ],
)
def test_what_differs_from_the_announcement_is_a_warning(
    counts: PairCounts,
    expected: list[str],
) -> None:
    warnings = step_warnings(
        counts,
        expected_pairs=counts.steps * 16,
        n_pairs=160,
        batch_size=16,
        negatives_in_step=lambda pairs: pairs - 1,
    )
    assert [text[: len(start)] for text, start in zip(warnings, expected, strict=True)] == expected


@pytest.mark.parametrize(
    ("options", "ranks", "queries", "message"),
    [
        pytest.param({}, 2, list(range(12)) * 20, "the 12 different queries.*several", id="ranks"),
        pytest.param(
            {"fill_batches": True},
            1,
            list(range(12)) * 20,
            "the 12 different queries.*because fill_batches",
            id="fill-batches",
        ),
        pytest.param({}, 2, list(range(15)), "the 15 rows of the data", id="fewer-rows"),
        pytest.param({}, 3, list(range(40)), "a multiple of the 3 ranks, got 16", id="no-share"),
    ],
)
def test_batches_that_must_be_full_and_cannot_be_are_refused_before_training(
    options: dict[str, Any],
    ranks: int,
    queries: list[int],
    message: str,
) -> None:
    recipe = get_recipe("splade", batch_size=16, **options)
    with pytest.raises(ValueError, match=message):
        check_batches(recipe, examples_of_queries(queries), ranks=ranks)


@pytest.mark.parametrize(
    ("options", "queries", "message"),
    [
        pytest.param({}, list(range(40)), "", id="a-document-each"),
        pytest.param({}, EVEN_QUERIES, "", id="four-documents-each"),
        pytest.param({}, SKEWED_QUERIES, "at most 1 of 5 batches can be full", id="skewed"),
        pytest.param({}, [0, 1, 2] * 9, "no batch can be full: the training", id="few-queries"),
        pytest.param(
            {"fill_batches": True},
            SKEWED_QUERIES,
            "an epoch of 5 full batches has at most 15 of the 40 pairs",
            id="filled",
        ),
    ],
)
def test_batches_that_are_short_are_announced_before_training(
    options: dict[str, Any],
    queries: list[int],
    message: str,
) -> None:
    recipe = get_recipe("splade", batch_size=8, **options)
    warning = check_batches(recipe, examples_of_queries(queries), ranks=1)
    assert warning[: len(message)] == message and bool(warning) == bool(message)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("base")
    return str(tiny_masked_lm(folder, small_collection(), layers=1, bias=0.1))


def skewed_collection() -> Collection:
    """40 pairs: one query with 30 relevant documents, ten with one each."""
    documents = {f"d{row}": Document(f"d{row}", "", f"tree number {row}") for row in range(40)}
    queries = {f"q{number}": f"question {number}" for number in range(11)}
    judged: dict[str, dict[str, int]] = {query: {} for query in queries}
    for row, query in enumerate(SKEWED_QUERIES):
        judged[f"q{query}"][f"d{row}"] = 1
    return Collection("skewed", documents, queries, {"train": judged, "test": judged})


def test_result_and_card_have_the_pairs_and_negatives_of_steps_that_were_done(
    base: str,
    tmp_path: Path,
) -> None:
    recipe = get_recipe("splade", base_model=base, batch_size=64, epochs=4, bf16=False)
    result = train(recipe, small_collection(), tmp_path / "m")
    assert (result.steps, result.pairs, result.fewest_pairs, result.trained_pairs) == (
        4,
        12,
        12,
        48,
    )
    assert (result.negatives, result.fewest_negatives) == (11, 11)
    _, few_steps, few_pairs = result.warnings[:3]
    assert few_steps.startswith("the training had 4 steps")
    assert few_pairs.startswith("the data have 12 pairs, fewer than batch_size (64)")
    card = (tmp_path / "m/README.md").read_text()
    assert "| training | 4 steps of 12 pairs, 48 in all |" in card
    assert "| negatives of a query | 11 |" in card
    record = json.loads((tmp_path / "m/tilefold_training.json").read_text())["result"]
    assert (record["pairs"], record["negatives"]) == (12, 11)


@pytest.mark.parametrize("fill_batches", [False, True], ids=["short", "filled"])
def test_single_pairs_are_warned_of_and_filled_batches_have_none(
    fill_batches: bool,
    base: str,
    tmp_path: Path,
) -> None:
    recipe = get_recipe(
        "splade", base_model=base, batch_size=8, epochs=4, fill_batches=fill_batches, bf16=False
    )
    result = train(recipe, skewed_collection(), tmp_path / "m")
    warnings = " ".join(result.warnings)
    assert result.steps == 20
    assert ("had a single pair and no negative" in warnings) != fill_batches
    assert ("pairs instead of 160" in warnings) != fill_batches
    assert (result.fewest_pairs, result.pairs) == ((8, 8) if fill_batches else (1, 8))
    assert (result.trained_pairs == 160) == fill_batches


@pytest.mark.slow
def test_a_resumed_run_counts_the_steps_before_the_interruption(base: str, tmp_path: Path) -> None:
    recipe = get_recipe("splade", base_model=base, batch_size=8, epochs=4, save_steps=3, bf16=False)
    expected = train(recipe, skewed_collection(), tmp_path / "whole")

    def stop(step: int, *_: object) -> None:
        if step == 8:
            raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        train(recipe, skewed_collection(), tmp_path / "m", progress=stop)
    resumed = train(recipe, skewed_collection(), tmp_path / "m")
    assert resumed.resumed_from == 6
    assert resumed.trained_pairs == expected.trained_pairs
    assert resumed.warnings == expected.warnings


@pytest.mark.slow
def test_a_run_that_was_interrupted_at_the_end_of_an_epoch_leaves_none_out(
    base: str,
    tmp_path: Path,
) -> None:
    # an epoch of 40 pairs has 5 steps; a checkpoint at step 5 is exactly at its end
    recipe = get_recipe(
        "splade",
        base_model=base,
        batch_size=8,
        epochs=3,
        fill_batches=True,
        save_steps=5,
        learning_rate=1e-3,
        bf16=False,
    )
    expected = train(recipe, skewed_collection(), tmp_path / "whole")

    def stop(step: int, *_: object) -> None:
        if step == 6:
            raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        train(recipe, skewed_collection(), tmp_path / "m", progress=stop)
    resumed = train(recipe, skewed_collection(), tmp_path / "m")
    assert (resumed.resumed_from, resumed.steps) == (5, expected.steps) == (5, 15)
    assert resumed.trained_pairs == expected.trained_pairs == 120
    weights, other = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "m"))
    assert [name for name in weights if not torch.equal(weights[name], other[name])] == []


def test_a_training_that_ends_early_saves_no_model(
    base: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(TrainingBatches, "__iter__", lambda self: iter(()))
    recipe = get_recipe("splade", base_model=base, batch_size=4, max_steps=6, bf16=False)
    with pytest.raises(TrainingError, match="ended after 0 of 6 steps"):
        train(recipe, small_collection(), tmp_path / "m")
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize("grouped", [False, True], ids=["random", "grouped"])
@pytest.mark.parametrize("loss", ["infonce", "pairwise_softmax"])
def test_negatives_of_a_step_follow_its_pairs(loss: str, grouped: bool) -> None:
    recipe = LsrRecipe(loss={loss: 1.0}, negatives=3, group_by_length=grouped)
    assert recipe.negatives_among(5) == (19 if loss == "infonce" else 3)
    assert replace(recipe, negatives=3).distinct_texts == (loss == "infonce")
