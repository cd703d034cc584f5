"""The plan of ``tilefold info plan`` beside what was measured."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from tilefold.bench.plan import Shape, index_bytes, texts_per_second, training, vector_bytes

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "nvidia-h200"
BERT = Shape(768, 12, 3072, 30522)


def rows(name: str) -> list[dict[str, str]]:
    with (RESULTS / name).open(encoding="utf-8", newline="") as stream:
        return list(csv.DictReader(stream))


TRAINED = [row for row in rows("train_splade.csv") if row["side"] == "tilefold"]


@pytest.mark.parametrize("row", TRAINED, ids=lambda row: "-".join(row[k] for k in ("model", "length", "checkpointing")))
def test_batch_and_memory_are_within_a_tenth_of_the_measured_ones(row: dict[str, str]) -> None:
    shape = Shape(int(row["hidden"]), int(row["layers"]), 4 * int(row["hidden"]), int(row["vocab"]))
    plan = training(
        shape,
        int(row["length"]),
        int(row["query_length"]),
        float(row["memory_gib"]),
        checkpointing=row["checkpointing"] == "yes",
    )
    assert plan.mib_a_pair == pytest.approx(float(row["mib_a_pair"]), rel=0.1)
    assert plan.largest_batch == pytest.approx(int(row["largest_batch"]), rel=0.1)
    assert plan.step_gib(int(row["largest_batch"])) == pytest.approx(float(row["largest_peak_gib"]), rel=0.1)


def test_there_are_rows_to_compare_with() -> None:
    assert len(TRAINED) == 12


def test_the_rate_of_encoding_is_that_of_the_row_it_was_fitted_to() -> None:
    what = ("bert-base", "encode_collection, to Parquet")
    (row,) = (row for row in rows("encode.csv") if (row["case"], row["what"]) == what)
    assert texts_per_second(BERT, round(float(row["tokens"]))) == pytest.approx(float(row["docs_per_s"]), rel=0.02)


def test_a_small_model_is_not_faster_than_its_tokenizer() -> None:
    assert texts_per_second(Shape(32, 1, 32, 30522), 230) == pytest.approx(21096, rel=0.01)


def test_bytes_follow_the_terms_and_a_model_that_does_not_fit_has_no_batch() -> None:
    assert vector_bytes(200) == 2 * vector_bytes(100) and index_bytes(100) == 800
    assert training(BERT, 256, 24, 1.0, checkpointing=False).largest_batch == 0
