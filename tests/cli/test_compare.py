"""Runs of queries without judgements, measures by query, and the comparison of runs, with the
numbers of Python.
"""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest

from tests.cli.program import Call, done, fails, measured, run_steps
from tests.recipes.small import small_collection
from tilefold import retrieval as r
from tilefold.retrieval.data.collection import Collection, Document
from tilefold.retrieval.search.searcher import Searcher

MEASURES = ("nDCG@10", "RR@10")


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A collection, a BM25 index, and runs of 16 queries: its own, one that finds less, and one
    without scores.
    """
    folder, small = tmp_path_factory.mktemp("compare"), small_collection()
    judged = small.qrels["train"] | small.qrels["test"]
    judged["q0"] = {"d0": 1, "d1": -2}
    Collection("small", small.documents, small.queries, {"test": judged}).save_beir(folder / "data")
    data = ("--data", folder / "data")
    run_steps(
        ("index", "--backend", "bm25", *data, "--output", folder / "bm25"),
        ("evaluate", *data, "--index", folder / "bm25", "--save-run", folder / "good.trec"),
    )
    good = r.read_trec_run(folder / "good.trec")
    worse = {
        query: {name: -1.0 if name == f"d{query[1:]}" else score for name, score in scores.items()}
        | {"d1": 50.0}
        for query, scores in good.items()
    }
    r.write_trec_run(worse, folder / "bad.trec")
    r.write_trec_run(
        {query: dict.fromkeys(scores, 1.0) for query, scores in good.items()},
        folder / "tied.trec",
    )
    return folder


def compared(work: Path, *names: str) -> tuple[str | Path, ...]:
    return ("compare", *(work / f"{name}.trec" for name in names), "--data", work / "data")


def test_a_comparison_has_the_numbers_of_python_and_the_texts_of_the_worst_queries(
    call: Call,
    work: Path,
    tmp_path: Path,
) -> None:
    qrels, names = r.load_collection(work / "data").qrels["test"], ("good", "bad", "tied")
    tables = {
        name: r.evaluate_per_query(r.read_trec_run(work / f"{name}.trec"), qrels, MEASURES)
        for name in names
    }
    expected = r.compare(tables, all_pairs=True)
    asked = [part for name in MEASURES for part in ("--measure", name)]
    found = measured(call(*compared(work, *names), *asked, "--all-pairs", "--worst", "3", "--json"))
    assert [
        {name: row[name] for name in row if name != "worst"} for row in found["comparisons"]
    ] == [each.to_dict() for each in expected]
    first = found["comparisons"][0]
    assert (first["run"], first["over"], first["different"]) == ("bad", "good", True)
    (query, lost), *_ = expected[0].by_query.items()
    worst = first["worst"][0]
    assert (worst["query"], worst["difference"]) == (query, lost) and worst["text"].startswith(
        "how do I work with",
    )
    assert worst["values"] == {name: tables[name][query]["nDCG@10"] for name in ("good", "bad")}
    assert len(first["worst"]) == 3
    mean = r.mean_of(row["RR@10"] for row in tables["tied"].values())
    assert found["runs"]["tied"]["measures"]["RR@10"]["low"] == mean.low
    assert (
        found["runs"]["tied"]["conventions"]["tied"] == 2
        and found["runs"]["good"]["conventions"]["negative"] == 1
    )

    shown = done(call(*compared(work, *names), "--plot", tmp_path / "made" / "plot.png"))
    for text in (
        "differences in nDCG@10",
        "where bad loses most to good",
        "how do I work with",
        "Holm over 2",
        "of the first 10 documents are judged",
        "grades below 0 count as not relevant: 1",
        "queries with equal scores, ranked by document id: 2",
    ):
        assert text in shown.out, shown.out
    assert (tmp_path / "made" / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_evaluate_writes_each_query_and_shows_errors_and_intervals(
    call: Call,
    work: Path,
    tmp_path: Path,
) -> None:
    qrels = r.load_collection(work / "data").qrels["test"]
    expected = r.evaluate_per_query(r.read_trec_run(work / "bad.trec"), qrels, MEASURES)
    asked = (
        "evaluate",
        "--data",
        work / "data",
        "--run",
        work / "bad.trec",
        "--measure",
        "nDCG@10",
        "--measure",
        "RR@10",
    )
    found = measured(call(*asked, "--per-query", tmp_path / "q.tsv", "--json"))
    with (tmp_path / "q.tsv").open(newline="") as stream:
        rows = list(csv.DictReader(stream, delimiter="\t"))
    assert {
        row["query_id"]: {name: float(row[name]) for name in MEASURES} for row in rows
    } == expected
    assert {row["split"] for row in rows} == {"test"}
    mean = r.mean_of(row["nDCG@10"] for row in expected.values())
    assert (
        found["errors"]["test"]["nDCG@10"] == vars(mean)
        and found["measures"]["nDCG@10"] == mean.mean
    )
    shown = done(call(*asked)).out
    assert (
        f"{mean.mean:.4f} ± {mean.standard_error:.4f}" in shown
        and f"{mean.low:.4f} to {mean.high:.4f}" in shown
    )
    fails(call(*asked, "--per-query", tmp_path), 2, "--per-query: expected a file, got the folder")


def test_search_writes_a_run_without_judgements(
    call: Call,
    work: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file, place = tmp_path / "run.trec", ("--index", work / "bm25", "--k", "100", "--save-run")
    saved = done(call("search", "--queries", work / "data" / "queries.jsonl", *place, file))
    assert saved.out == f"16 queries, 18 documents: {file}\n"
    good = r.read_trec_run(work / "good.trec")
    assert r.read_trec_run(file) == good and file.read_bytes() == (work / "good.trec").read_bytes()
    monkeypatch.setattr("sys.stdin", io.StringIO("a\tcsv files\nb\tzebras\n"))
    told = call("search", "-", *place, file, "--overwrite", "--json")
    assert measured(told) == {
        "output": str(file),
        "queries": 2,
        "documents": len(r.read_trec_run(file)["a"]),
        "empty": 1,
        "ignored_identical_ids": 0,
    }
    assert "1 of 2 queries found no document, and have no line in the run" in told.err
    monkeypatch.setattr("sys.stdin", io.StringIO("a\tcsv files\na\tzebras\n"))
    fails(call("search", "-", *place, file, "--overwrite"), 1, "the id 'a' was given before")
    fails(call("search", "words", *place, tmp_path / "r"), 2, "--save-run: goes with --queries")


def test_ids_that_a_run_cannot_hold_are_refused_before_the_search(
    call: Call,
    work: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def search(*_: object) -> None:
        raise AssertionError("no search was due")

    monkeypatch.setattr(Searcher, "rank", search)
    documents = {name: Document(name, "", "sockets and files") for name in ("a", "my doc.txt")}
    Collection("named", documents, {"q": "files"}, {"test": {"q": {"a": 1}}}).save_beir(
        tmp_path / "data",
    )
    run_steps(
        ("index", "--backend", "bm25", "--data", tmp_path / "data", "--output", tmp_path / "bm25"),
    )
    (tmp_path / "queries.tsv").write_text("q 1\tfiles\n")
    (tmp_path / "twice.txt").write_text("q\tfiles\n")
    place = ("--index", tmp_path / "bm25", "--save-run", tmp_path / "r")
    for asked in (
        ("search", "--queries", tmp_path / "twice.txt"),
        ("evaluate", "--data", tmp_path / "data"),
    ):
        said = (
            "--save-run: document id: a TREC run needs words without white space, got 'my doc.txt'"
        )
        fails(call(*asked, *place), 2, said)
    of_words = (
        "search",
        "--queries",
        tmp_path / "queries.tsv",
        "--index",
        work / "bm25",
        "--save-run",
        tmp_path / "r",
    )
    fails(
        call(*of_words),
        2,
        "--save-run: query id: a TREC run needs words without white space, got 'q 1'",
    )
    assert not (tmp_path / "r").exists()


def test_runs_that_cannot_be_compared_are_refused(call: Call, work: Path, tmp_path: Path) -> None:
    fails(call(*compared(work, "good")), 2, "run: expected two files or more, each once")
    fails(call(*compared(work, "good", "good")), 2, "run: expected two files or more, each once")
    fails(
        call(*compared(work, "good", "bad"), "--alpha", "2"),
        2,
        "--alpha: expected a number between 0 and 1, got 2",
    )
    fails(
        call(*compared(work, "good", "bad"), "--resamples", "9"),
        2,
        "--resamples: expected an integer of at least 99",
    )
    fails(call(*compared(work, "good", "none")), 2, "run: there is no file")
    fails(call(*compared(work, "good", "bad"), "--split", "dev"), 2, "'dev' is not a split of")
    r.write_trec_run({"x": {"d1": 1.0}}, tmp_path / "other.trec")
    asked = ("compare", work / "good.trec", tmp_path / "other.trec", "--data", work / "data")
    fails(call(*asked), 1, "no result for any of the 16 judged queries")
