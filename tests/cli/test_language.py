"""Stop words and stemmers of BM25 where it labels training data, and the scale of its scores."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.program import Call, fails, measured
from tilefold.retrieval import BM25Index, Passages, load_collection, read_training_rows
from tilefold.retrieval.data.collection import Collection, Document
from tilefold.retrieval.training_data.passages import training_passages


def score(call: Call, shared: Path, output: Path, *options: str | Path) -> dict[str, object]:
    """Score the mined rows with BM25, and return the JSON report."""
    command = ("score", shared / "mined.parquet", "--data", shared / "data", "--output", output)
    report: dict[str, object] = measured(call(*command, "--teacher", "bm25", *options, "--json"))
    return report


@pytest.mark.parametrize(
    ("options", "language"),
    [
        pytest.param((), "english", id="default"),
        pytest.param(("--language", "german"), "german", id="german"),
        pytest.param(("--language", "none"), "none", id="none"),
    ],
)
def test_score_has_the_language_of_bm25_in_its_report_and_file(
    options: tuple[str, ...],
    language: str,
    call: Call,
    shared: Path,
    tmp_path: Path,
) -> None:
    report = score(call, shared, tmp_path / "scored.parquet", *options)
    assert report["languages"] == {"bm25": language}
    rows = read_training_rows(tmp_path / "scored.parquet")
    assert rows.made_by["teachers"]["bm25"]["language"] == language
    contents = load_collection(shared / "data").contents()
    index = BM25Index.build(contents, language=language)
    group = next(iter(rows.groups()))
    query = load_collection(shared / "data").queries[group.query]
    scores = index.search({"q": query}, len(contents))["q"]
    for document, value in zip(group.documents, group.teachers["bm25"].tolist(), strict=True):
        assert value == pytest.approx(scores.get(document, 0.0), rel=1e-5)


@pytest.mark.parametrize(
    ("options", "scale"),
    [
        pytest.param((), 30.0, id="default"),
        pytest.param(("--normalization", "none"), 1.0, id="no-normalization"),
        pytest.param(("--scale", "7"), 7.0, id="chosen"),
        pytest.param(("--like", "bm25"), None, id="like-a-teacher"),
    ],
)
def test_score_stores_the_scale_that_it_applied(
    options: tuple[str, ...],
    scale: float | None,
    call: Call,
    shared: Path,
    tmp_path: Path,
) -> None:
    report = score(call, shared, tmp_path / "scored.parquet", *options)
    rows = read_training_rows(tmp_path / "scored.parquet")
    assert report["scale"] == rows.made_by["scale"] == scale


def test_a_language_that_does_nothing_or_has_no_stemmer_is_refused(
    call: Call,
    shared: Path,
    masked_lm: str,
    tmp_path: Path,
) -> None:
    data = ("--data", shared / "data")
    scoring = ("score", shared / "mined.parquet", *data, "--output", tmp_path / "scored.parquet")
    training = ("train", *data, "--model", masked_lm, "--output", tmp_path / "m")
    language = ("--language", "german")
    error = "--language requires --teacher bm25"
    fails(call(*scoring, "--teacher", shared / "bm25", *language), 2, error)
    fails(call(*training, *language), 2, "--language requires --passages")
    unknown = ("--language", "klingon")
    fails(call(*scoring, "--teacher", "bm25", *unknown), 2, "--language:")
    fails(call(*training, "--passages", "8", *unknown), 2, "--language:")


def test_train_reports_the_language_that_chooses_passages(
    call: Call,
    shared: Path,
    masked_lm: str,
    tmp_path: Path,
) -> None:
    command = ("train", "--data", shared / "data", "--model", masked_lm, "--steps", "1")
    options = ("--batch-size", "4", "--passages", "8", "--language", "none")
    outcome = call(*command, *options, "--output", tmp_path / "m", "--json")
    assert measured(outcome)["passages"] == {"length": 8, "stride": None, "language": "none"}
    assert "stop words and the stemmer of --language none" in outcome.err


def test_the_language_chooses_the_passage_of_a_relevant_document() -> None:
    documents = {
        "d": Document("d", "", "die die die haus garten baum"),
        "other": Document("other", "", "haus haus haus strasse"),
    }
    collection = Collection("c", documents, {"q": "die haus"}, {"train": {"q": {"d": 1}}})
    passages = Passages(3)
    with_stop_words = training_passages(passages, collection, language="none")
    without_stop_words = training_passages(passages, collection, language="german")
    (first,) = with_stop_words.qrels["train"]["q"]
    (second,) = without_stop_words.qrels["train"]["q"]
    assert with_stop_words.documents[first].text == "die die die"
    assert without_stop_words.documents[second].text == "haus garten baum"
