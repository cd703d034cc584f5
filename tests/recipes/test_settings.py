"""What a recipe may say, and the examples that it makes of pairs, mined negatives and teacher scores."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from datasets import Dataset

from tests.refusals import refused
from tilefold.recipes import (
    ColbertRecipe,
    EncoderSpec,
    LsrRecipe,
    RegularizerSpec,
    SpladeRecipe,
    TrainingSettings,
    get_recipe,
)  # fmt: skip
from tilefold.recipes.adaptation import AdaptationRecipe
from tilefold.recipes.lsr import length_grouped_batches, make_examples
from tilefold.retrieval.collection import Collection

EVERY = (SpladeRecipe, ColbertRecipe, LsrRecipe)
# fields of all recipes; a value, and what it must be
COMMON: list[tuple[dict[str, Any], str]] = [
    ({"base_model": ""}, "base_model must be 'minilm', a folder or a model name, got ''"),
    ({"max_steps": -1}, "max_steps must be a whole number of at least 0 or None, got -1"),
    ({"batch_size": 1}, "batch_size must be a whole number of at least 2, got 1"),
    ({"epochs": float("nan")}, "epochs must be a number greater than 0, got nan"),
    ({"learning_rate": -1.0}, "learning_rate must be a number greater than 0"),
    ({"similarity_scale": float("inf")}, "similarity_scale must be a number greater than 0"),
    ({"warmup_ratio": 1.0}, r"warmup_ratio must be a number in \[0, 1\)"),
    ({"train_max_length": 512}, r"train_max_length must not exceed max_length \(\d+\), got 512"),
    ({"max_length": 0}, "max_length must be a whole number of at least 1"),
    ({"bf16": "yes"}, "bf16 must be True, False or None"),
    ({"graphs": 1}, "graphs must be True or False, got 1"),
    ({"graphs": True, "fused": False}, "graphs must be False without fused, got True"),
    ({"save_steps": True}, "save_steps must be a whole number"),
    ({"save_minutes": -1}, "save_minutes must be a number of at least 0"),
    ({"seed": 2**32}, r"seed must be a whole number of at least 0 and below 2\^32"),
    ({"attention": "sparse"}, "attention must be 'softmax', 'entmax' or None, got 'sparse'"),
    ({"attention": "entmax", "alpha": 2.5}, r"alpha must be a number in \[1, 2\]"),
    ({"attention": "entmax", "anneal_alpha": -0.1}, r"anneal_alpha must be a number in \[0, 1\]"),
    ({"alpha": 1.5}, "alpha must be left out without attention='entmax'"),
    ({"attention": "softmax", "anneal_alpha": 0.5}, "anneal_alpha must be left out"),
]
OWN: list[tuple[Any, dict[str, Any], str]] = [
    (SpladeRecipe, {"document_regularizer": -1e-3}, "document_regularizer must be a number 0 or more"),
    (SpladeRecipe, {"regularizer_warmup_ratio": 0}, "regularizer_warmup_ratio must"),
    (SpladeRecipe, {"frozen_layers": 1.5}, "frozen_layers must be a whole number"),
    (SpladeRecipe, {"start_percentile": 100}, r"start_percentile must be a number in \(0, 100\)"),
    (LsrRecipe, {"start_deviations": -1}, "start_deviations must be a number 0 or more, or None"),
    (LsrRecipe, {"group_by_length": 1}, "group_by_length must be True or False"),
    (ColbertRecipe, {"dimension": 12}, "dimension must be a multiple of 8 up to 4096 or None, got 12"),
    (ColbertRecipe, {"query_length": 0}, "query_length must be a whole number of at least 1"),
    (ColbertRecipe, {"expand_queries": "yes"}, "expand_queries must be True or False"),
    (LsrRecipe, {"loss": {"hinge": 1.0}}, "loss must map names out of infonce, kl"),
    (LsrRecipe, {"loss": {}}, "loss must map names"),
    (LsrRecipe, {"loss": {"kl": 1.0}}, "negatives must be at least 1 for a loss that compares documents with a"),
    (LsrRecipe, {"loss": {"pairwise_softmax": 1.0}}, "negatives must be at least 1 for the loss pairwise_softmax"),
    (LsrRecipe, {"loss": {"infonce": 0}}, r"loss\['infonce'\] must be a number greater than 0"),
    (LsrRecipe, {"query": {"kind": "word2vec"}}, "query: kind must be one of"),
    (LsrRecipe, {"document_regularizer": {"kind": "l0"}}, "document_regularizer: kind must be one of flops, l1"),
    (RegularizerSpec, {"kind": "df_flops", "per_position": True}, "per_position must be False for kind 'df_flops'"),
    (LsrRecipe, {"query_regularizer": {"per_position": True}}, "query_regularizer: per_position must be False"),
    (LsrRecipe, {"document": None}, "document must be an instance of EncoderSpec, got None"),
    (LsrRecipe, {"negatives": -1}, "negatives must be a whole number of at least 0"),
    (LsrRecipe, {"idf_learning_rate": 0}, "idf_learning_rate must be a number greater than 0"),
    (EncoderSpec, {"kind": "mlm", "lora": 4}, "lora does not apply to an encoder of kind 'mlm'"),
    (EncoderSpec, {"kind": "echo", "literal_residual": True}, "literal_residual does not apply"),
    (EncoderSpec, {"kind": "bge_m3", "top_k": 3}, "top_k does not apply"),
    (EncoderSpec, {"kind": "mlm", "trainable": 1}, "trainable does not apply"),
    (EncoderSpec, {"kind": "idf", "trainable": 1}, "trainable must be True or False, got 1"),
    (AdaptationRecipe, {"length": 1}, "length must be a whole number of at least 2, got 1"),
    (AdaptationRecipe, {"activated_weight": -1}, "activated_weight must be a number of at least 0"),
]


@pytest.mark.parametrize(
    ("kind", "fields", "text"), [*((kind, fields, text) for kind in EVERY for fields, text in COMMON), *OWN]
)
def test_a_recipe_names_the_field_that_is_wrong(kind: Any, fields: dict[str, Any], text: str) -> None:
    refused(ValueError, f"^{text}", kind, **fields)


@pytest.mark.parametrize(
    "recipe",
    [
        SpladeRecipe("folder", epochs=2, seed=3),
        ColbertRecipe("folder", epochs=2, seed=3, dimension=None),
        LsrRecipe("named", "folder", EncoderSpec("idf", trainable=True), loss={"kl": 1.0, "margin_mse": 0.05},
                  negatives=8, document_regularizer=RegularizerSpec("df_flops", 0.3, threshold=20)),
        EncoderSpec("mlm", pooling="sum", logit_scale=0.5),
    ],
    ids=lambda recipe: type(recipe).__name__,
)  # fmt: skip
def test_a_recipe_survives_json_and_refuses_unknown_fields(recipe: Any) -> None:
    kind = type(recipe)
    assert kind.from_dict(json.loads(json.dumps(recipe.to_dict()))) == recipe
    assert recipe.base_model == ("folder" if isinstance(recipe, TrainingSettings) else None)
    refused(ValueError, "unknown recipe fields", kind.from_dict, {"temperature": 1})


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


def test_pairs_alone_need_no_file_and_refuse_one(collection: Collection, mined: Path) -> None:
    recipe = get_recipe("splade-v2")
    made = make_examples(recipe, collection, None)
    assert list(made.columns) == ["query", "positive"] and made.pairs == len(made.columns["query"]) == 12
    refused(ValueError, "'splade-v2' takes none from a file", make_examples, recipe, collection, mined)


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
    assert make_examples(replace(recipe, seed=5), collection, mined).columns != made.columns


def test_labels_are_the_teachers_scores_of_the_positive_and_the_negatives(collection: Any, tmp_path: Path) -> None:
    rows = [("q0", "d0", 1, 30.0, True), ("q0", "d1", 2, 12.0, False), ("q0", "d15", 3, 0.0, False)]
    scored = write_rows(tmp_path / "scored.parquet", rows, teacher=[5.0, 2.0, 0.0])
    columns = make_examples(LsrRecipe(loss={"kl": 1.0}, negatives=2, epochs=1), collection, scored).columns
    assert columns["query"] == [collection.queries["q0"]]
    score_of = {collection.documents[name].contents: score for name, score in (("d1", 12.0), ("d15", 0.0))}
    assert columns["label"] == [[30.0, score_of[columns["negative_1"][0]], score_of[columns["negative_2"][0]]]]


def test_missing_data_are_named_with_their_commands(collection: Collection, mined: Path, tmp_path: Path) -> None:
    needed = "the recipe 'splade-v3' needs mined negatives with teachers' scores"
    for file, text in ((None, needed), (mined, "has no teachers' scores")):
        with pytest.raises(ValueError, match=text) as told:
            make_examples(get_recipe("splade-v3"), collection, file)
        assert "tilefold mine --data small --index INDEX --output negatives.parquet" in str(told.value)
        assert "tilefold score negatives.parquet --data small --teacher MODEL" in str(told.value)
        assert str(told.value).endswith("negatives=scores.parquet")
    file = write_rows(tmp_path / "test.parquet", [("q12", "d0", 1, 1.0, False)])
    text = "has no negatives of the training queries of 'small'"
    refused(ValueError, text, make_examples, LsrRecipe(negatives=1), collection, file)


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
