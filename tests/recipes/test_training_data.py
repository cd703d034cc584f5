"""Examples from pairs, mined negatives and teacher scores, what is said where they are missing, and their batches."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from datasets import Dataset

from tilefold.recipes import LsrRecipe, get_recipe
from tilefold.recipes.training_data import length_grouped_batches, make_examples
from tilefold.retrieval.collection import Collection


def write_rows(path: Path, rows: list[tuple[str, str, int, float, bool]], **teachers: list[float]) -> Path:
    names = ("query_id", "document_id", "rank", "score", "relevant")
    types = (pa.string(), pa.string(), pa.int32(), pa.float32(), pa.bool_())
    columns = {
        name: pa.array(values, kind) for name, values, kind in zip(names, zip(*rows, strict=True), types, strict=True)
    }
    columns |= {f"score:{name}": pa.array(values, pa.float32()) for name, values in teachers.items()}
    pq.write_table(pa.table(columns), path)
    return path


@pytest.fixture
def mined(tmp_path: Path) -> Path:
    """Of two training queries; d15 is relevant to no one, d1 to q1."""
    rows = [
        ("q0", "d0", 1, 9.0, True), ("q0", "d1", 2, 8.0, False), ("q0", "d15", 3, 7.0, False),
        ("q1", "d1", 1, 9.0, True), ("q1", "d2", 2, 4.0, False),
    ]  # fmt: skip
    return write_rows(tmp_path / "mined.parquet", rows)


@pytest.fixture
def scored(tmp_path: Path) -> Path:
    rows = [("q0", "d0", 1, 30.0, True), ("q0", "d1", 2, 12.0, False), ("q0", "d15", 3, 0.0, False)]
    return write_rows(tmp_path / "scored.parquet", rows, teacher=[5.0, 2.0, 0.0])


def test_pairs_alone_need_no_file_and_refuse_one(collection: Collection, mined: Path) -> None:
    made = make_examples(get_recipe("splade-v2"), collection, None)
    assert list(made.columns) == ["query", "positive"] and made.pairs == len(made.columns["query"]) == 12
    with pytest.raises(ValueError, match="'splade-v2' takes none from a file"):
        make_examples(get_recipe("splade-v2"), collection, mined)


def test_negatives_are_drawn_for_each_pass_and_never_relevant(collection: Collection, mined: Path) -> None:
    recipe = LsrRecipe(negatives=2, epochs=3, seed=4)
    made = make_examples(recipe, collection, mined)
    assert list(made.columns) == ["query", "positive", "negative_1", "negative_2"]
    assert made.pairs == 2 and len(made.columns["query"]) == 6
    assert made.note.startswith("10 of 12 training pairs were left out: ")
    contents = collection.contents()
    for row in zip(*made.columns.values(), strict=True):
        query = next(name for name, text in collection.queries.items() if text == row[0])
        allowed = {"q0": {"d1", "d15"}, "q1": {"d2"}}[query]
        assert row[1] == contents["d" + query[1:]]
        assert set(row[2:]) == {contents[name] for name in allowed}  # a single one is repeated
    assert make_examples(recipe, collection, mined).columns == made.columns
    assert make_examples(dataclasses.replace(recipe, seed=5), collection, mined).columns != made.columns


def test_labels_are_the_teachers_scores_of_the_positive_and_the_negatives(collection: Collection, scored: Path) -> None:
    recipe = LsrRecipe(loss={"kl": 1.0}, negatives=2, epochs=1)
    columns = make_examples(recipe, collection, scored).columns
    assert columns["query"] == [collection.queries["q0"]]
    score_of = {collection.documents[name].contents: score for name, score in (("d1", 12.0), ("d15", 0.0))}
    assert columns["label"] == [[30.0, score_of[columns["negative_1"][0]], score_of[columns["negative_2"][0]]]]


def test_missing_data_are_named_with_the_commands_that_make_them(collection: Collection, mined: Path) -> None:
    needed = "the recipe 'splade-v3' needs mined negatives with teachers' scores"
    for file, text in ((None, needed), (mined, "has no teachers' scores")):
        with pytest.raises(ValueError, match=text) as told:
            make_examples(get_recipe("splade-v3"), collection, file)
        assert "tilefold mine --data small --index INDEX --output negatives.parquet" in str(told.value)
        assert "tilefold score negatives.parquet --data small --teacher MODEL" in str(told.value)
        assert str(told.value).endswith("negatives=scores.parquet")


def test_rows_of_no_training_query_are_refused(collection: Collection, tmp_path: Path) -> None:
    file = write_rows(tmp_path / "test.parquet", [("q12", "d0", 1, 1.0, False)])
    with pytest.raises(ValueError, match=r"has no negatives of the training queries of 'small'"):
        make_examples(LsrRecipe(negatives=1), collection, file)


def test_batches_grouped_by_length_hold_every_pair_once_and_no_text_twice() -> None:
    texts = [f"{'word ' * (7 * i % 23)}{i}" for i in range(50)]
    texts[41] = texts[3]
    dataset = Dataset.from_dict({"query": [f"q{i}" for i in range(50)], "document": texts})
    sampler = length_grouped_batches(dataset, 4, drop_last=False, generator=torch.Generator(), seed=5)
    batches = list(sampler)
    assert sorted(row for batch in batches for row in batch) == list(range(50))
    assert batches == list(sampler), "an epoch has one order, so that a killed run can go on"
    assert not any({3, 41} <= set(batch) for batch in batches)
    sampler.set_epoch(1)
    assert batches != list(sampler)
    padded = sum(len(batch) * max(len(texts[row]) for row in batch) for batch in batches)
    random = sum(4 * max(map(len, texts[start : start + 4])) for start in range(0, 50, 4))
    assert padded < 0.8 * random
