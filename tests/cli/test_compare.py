"""Tests of saved runs, measures by query, and comparisons of runs."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import pytest

from tests.cli.program import Call, done, fails, measured, run_steps
from tests.recipes.small import small_collection
from tilefold import retrieval as r
from tilefold.retrieval.data.collection import Collection, Document
from tilefold.retrieval.search.searcher import Searcher

MEASURES = ("nDCG@10", "RR@10")


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A collection, a BM25 index and runs of 16 queries.

    The run "good" is of the index, "bad" ranks relevant documents last, and "tied" has equal
    scores. Documents of "bad" and "tied" are those of "good".
    """
    folder = tmp_path_factory.mktemp("compare")
    small = small_collection()
    qrels = small.qrels["train"] | small.qrels["test"]
    qrels["q0"] = {"d0": 1, "d1": -2}
    collection = Collection("small", small.documents, small.queries, {"test": qrels})
    collection.save_beir(folder / "data")
    data = ("--data", folder / "data")
    run_steps(
        ("index", "--backend", "bm25", *data, "--output", folder / "bm25"),
        ("evaluate", *data, "--index", folder / "bm25", "--save-run", folder / "good.trec"),
    )
    good = r.read_trec_run(folder / "good.trec")
    bad = {}
    for query, scores in good.items():
        relevant = query.replace("q", "d")
        bad[query] = scores | {"d1": 50.0}
        if relevant in scores and relevant != "d1":
            bad[query][relevant] = -1.0
    r.write_trec_run(bad, folder / "bad.trec")
    tied = {query: dict.fromkeys(scores, 1.0) for query, scores in good.items()}
    r.write_trec_run(tied, folder / "tied.trec")
    return folder


def compare_command(work: Path, *runs: str) -> tuple[str | Path, ...]:
    """Return the command that compares runs."""
    paths = [work / f"{run}.trec" for run in runs]
    return ("compare", *paths, "--data", work / "data")


RUNS = ("good", "bad", "tied")


@pytest.fixture(scope="module")
def measures_by_run(work: Path) -> dict[str, dict[str, dict[str, float]]]:
    """The measures of each query of each run, by the Python functions."""
    qrels = r.load_collection(work / "data").qrels["test"]
    return {
        run: r.evaluate_per_query(r.read_trec_run(work / f"{run}.trec"), qrels, MEASURES)
        for run in RUNS
    }


@pytest.fixture
def comparison(call: Call, work: Path) -> Any:
    """What ``tilefold compare`` prints as JSON for the three runs."""
    outcome = call(
        *compare_command(work, *RUNS),
        "--measure",
        "nDCG@10",
        "--measure",
        "RR@10",
        "--all-pairs",
        "--worst",
        "3",
        "--json",
    )
    return measured(outcome)


def test_comparisons_have_the_numbers_of_the_python_function(
    comparison: Any,
    measures_by_run: Any,
) -> None:
    rows = [dict(row) for row in comparison["comparisons"]]
    for row in rows:
        row.pop("worst", None)
    expected = r.compare(measures_by_run, all_pairs=True)
    assert rows == [pair.to_dict() for pair in expected]
    assert rows[0]["run"] == "bad"
    assert rows[0]["over"] == "good"
    assert rows[0]["different"] is True


def test_comparisons_have_the_texts_of_the_worst_queries(
    comparison: Any,
    measures_by_run: Any,
) -> None:
    expected = r.compare(measures_by_run, all_pairs=True)
    worst_query, worst_difference = next(iter(expected[0].by_query.items()))
    worst_rows = comparison["comparisons"][0]["worst"]
    assert len(worst_rows) == 3
    worst = worst_rows[0]
    assert worst["query"] == worst_query
    assert worst["difference"] == worst_difference
    assert worst["text"].startswith("how do I work with")
    assert worst["values"] == {
        run: measures_by_run[run][worst_query]["nDCG@10"] for run in ("good", "bad")
    }


def test_comparisons_have_intervals_and_conventions_of_each_run(
    comparison: Any,
    measures_by_run: Any,
) -> None:
    tied = comparison["runs"]["tied"]
    mean = r.mean_of(row["RR@10"] for row in measures_by_run["tied"].values())
    assert tied["measures"]["RR@10"]["low"] == mean.low
    assert tied["conventions"]["tied"] == 2
    assert comparison["runs"]["good"]["conventions"]["negative"] == 1


def test_a_comparison_is_printed_and_plotted(call: Call, work: Path, tmp_path: Path) -> None:
    plot = tmp_path / "plots" / "plot.png"
    output = done(call(*compare_command(work, *RUNS), "--plot", plot)).out
    for text in (
        "differences in nDCG@10",
        "largest losses of bad to good",
        "how do I work with",
        "Holm-corrected over 2 comparisons",
        "of the first 10 documents are judged",
        "grades below 0 count as not relevant: 1",
        "queries with equal scores among their first 11 documents, ranked by document id: 2",
    ):
        assert text in output, output
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def evaluate_bad_run(work: Path) -> tuple[str | Path, ...]:
    """The command that evaluates the run "bad"."""
    return (
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


def test_evaluate_writes_the_measures_of_each_query(
    call: Call,
    evaluate_bad_run: tuple[str | Path, ...],
    measures_by_run: Any,
    tmp_path: Path,
) -> None:
    done(call(*evaluate_bad_run, "--per-query", tmp_path / "queries.tsv"))
    with (tmp_path / "queries.tsv").open(newline="") as stream:
        rows = list(csv.DictReader(stream, delimiter="\t"))
    measures = {
        row["query_id"]: {measure: float(row[measure]) for measure in MEASURES} for row in rows
    }
    assert measures == measures_by_run["bad"]
    assert {row["split"] for row in rows} == {"test"}


def test_evaluate_refuses_a_folder_for_the_measures_of_each_query(
    call: Call,
    evaluate_bad_run: tuple[str | Path, ...],
    tmp_path: Path,
) -> None:
    outcome = call(*evaluate_bad_run, "--per-query", tmp_path)
    fails(outcome, 2, "--per-query: expected a file, got the folder")


def test_evaluate_shows_standard_errors_and_intervals(
    call: Call,
    evaluate_bad_run: tuple[str | Path, ...],
    measures_by_run: Any,
) -> None:
    mean = r.mean_of(row["nDCG@10"] for row in measures_by_run["bad"].values())
    result = measured(call(*evaluate_bad_run, "--json"))
    assert result["errors"]["test"]["nDCG@10"] == vars(mean)
    assert result["measures"]["nDCG@10"] == mean.mean
    output = done(call(*evaluate_bad_run)).out
    assert f"{mean.mean:.4f} ± {mean.standard_error:.4f}" in output
    assert f"{mean.low:.4f} to {mean.high:.4f}" in output


@pytest.fixture
def search_to_run(work: Path, tmp_path: Path) -> tuple[str | Path, ...]:
    """Options of a search whose run is saved."""
    return ("--index", work / "bm25", "--k", "100", "--save-run", tmp_path / "run.trec")


def test_search_saves_the_run_that_evaluate_saves(
    call: Call,
    work: Path,
    search_to_run: tuple[str | Path, ...],
    tmp_path: Path,
) -> None:
    queries = work / "data" / "queries.jsonl"
    outcome = done(call("search", "--queries", queries, *search_to_run))
    run = tmp_path / "run.trec"
    assert outcome.out == f"16 queries, 18 documents: {run}\n"
    assert r.read_trec_run(run) == r.read_trec_run(work / "good.trec")
    assert run.read_bytes() == (work / "good.trec").read_bytes()


def test_search_reports_queries_without_a_document(
    call: Call,
    search_to_run: tuple[str | Path, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("a\tcsv files\nb\tzebras\n"))
    outcome = call("search", "-", *search_to_run, "--json")
    run = tmp_path / "run.trec"
    assert measured(outcome) == {
        "output": str(run),
        "queries": 2,
        "documents": len(r.read_trec_run(run)["a"]),
        "empty": 1,
        "ignored_identical_ids": 0,
        "precision": {},  # no model computes
    }
    assert "1 of 2 queries have no hit, and no line in the run" in outcome.err


def test_search_refuses_two_queries_with_one_id(
    call: Call,
    search_to_run: tuple[str | Path, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("a\tcsv files\na\tzebras\n"))
    fails(call("search", "-", *search_to_run), 1, "the id 'a' occurs twice")


def test_search_saves_no_run_of_a_single_query(
    call: Call,
    search_to_run: tuple[str | Path, ...],
) -> None:
    fails(call("search", "words", *search_to_run), 2, "--save-run requires queries with ids")


@pytest.fixture
def no_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail where an index is searched."""

    def fail(*_: object) -> None:
        raise AssertionError("the command should not search")

    monkeypatch.setattr(Searcher, "rank", fail)


@pytest.mark.usefixtures("no_search")
@pytest.mark.parametrize("command", ["search", "evaluate"])
def test_document_ids_that_a_run_cannot_hold_are_refused_before_the_search(
    call: Call,
    tmp_path: Path,
    command: str,
) -> None:
    documents = {id_: Document(id_, "", "sockets and files") for id_ in ("a", "my doc.txt")}
    collection = Collection("named", documents, {"q": "files"}, {"test": {"q": {"a": 1}}})
    collection.save_beir(tmp_path / "data")
    data = ("--data", tmp_path / "data")
    run_steps(("index", "--backend", "bm25", *data, "--output", tmp_path / "bm25"))
    (tmp_path / "queries.tsv").write_text("q\tfiles\n")
    input_options = {"search": ("--queries", tmp_path / "queries.tsv"), "evaluate": data}
    run = tmp_path / "run.trec"
    outcome = call(
        command,
        *input_options[command],
        "--index",
        tmp_path / "bm25",
        "--save-run",
        run,
    )
    message = "document id: a TREC run needs words without white space, got 'my doc.txt'"
    fails(outcome, 2, f"--save-run: {message}")
    assert not run.exists()


@pytest.mark.usefixtures("no_search")
def test_query_ids_that_a_run_cannot_hold_are_refused_before_the_search(
    call: Call,
    search_to_run: tuple[str | Path, ...],
    tmp_path: Path,
) -> None:
    queries = tmp_path / "queries.tsv"
    queries.write_text("q 1\tfiles\n")
    outcome = call("search", "--queries", queries, *search_to_run)
    message = "--save-run: query id: a TREC run needs words without white space, got 'q 1'"
    fails(outcome, 2, message)
    assert not (tmp_path / "run.trec").exists()


@pytest.mark.parametrize(
    ("runs", "options", "message"),
    [
        pytest.param(
            ["good"],
            [],
            "run: expected two files or more, each once",
            id="one run",
        ),
        pytest.param(
            ["good", "good"],
            [],
            "run: expected two files or more, each once",
            id="a run twice",
        ),
        pytest.param(
            ["good", "bad"],
            ["--alpha", "2"],
            "--alpha: expected a number between 0 and 1, got 2",
            id="alpha above 1",
        ),
        pytest.param(
            ["good", "bad"],
            ["--resamples", "9"],
            "--resamples: expected an integer of at least 99",
            id="too few resamples",
        ),
        pytest.param(
            ["good", "none"], [], "run: expected a run, but there is no file", id="missing run"
        ),
        pytest.param(
            ["good", "bad"],
            ["--split", "dev"],
            "'dev' is not a split of",
            id="missing split",
        ),
    ],
)
def test_compare_rejects(
    call: Call,
    work: Path,
    runs: list[str],
    options: list[str],
    message: str,
) -> None:
    fails(call(*compare_command(work, *runs), *options), 2, message)


def test_compare_refuses_a_run_without_a_judged_query(
    call: Call,
    work: Path,
    tmp_path: Path,
) -> None:
    other_run = tmp_path / "other.trec"
    r.write_trec_run({"x": {"d1": 1.0}}, other_run)
    outcome = call("compare", work / "good.trec", other_run, "--data", work / "data")
    fails(outcome, 1, "no result for any of the 16 judged queries")


def test_compare_refuses_a_file_that_is_no_run(call: Call, work: Path, tmp_path: Path) -> None:
    no_run = tmp_path / "result.json"
    no_run.write_text('{"a": 1}\n')
    outcome = call("compare", work / "good.trec", no_run, "--data", work / "data")
    fails(outcome, 1, "result.json:1: expected 6 fields")
