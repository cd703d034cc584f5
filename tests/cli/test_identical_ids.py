"""Commands on a collection whose queries are documents follow BEIR, and say so."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from tests.cli.program import Call, done, fails, measured
from tilefold import retrieval as r

TEXTS = {
    "a": "tea should be hot with milk",
    "b": "tea should be cold without milk",
    "c": "tea ships sail with milk",
    "d": "boats sail",
}
RUN = {"a": {"a": 9.0, "b": 5.0, "c": 1.0}, "b": {"b": 9.0, "a": 5.0, "c": 1.0}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Such a collection, its BM25 index, and two runs in which queries find themselves."""
    documents = {name: r.Document(name, "", text) for name, text in TEXTS.items()}
    queries = {name: TEXTS[name] for name in RUN}
    judged = {"a": {"b": 1}, "b": {"a": 1}}
    collection = r.Collection("arguments", documents, queries, {"test": judged, "dev": judged})
    collection.save_beir(tmp_path / "data")
    r.BM25Index.build(TEXTS).save(tmp_path / "index")
    for name in ("run.trec", "other.trec"):
        r.write_trec_run(RUN, tmp_path / name)
    return tmp_path


@pytest.mark.parametrize(
    "source",
    [
        pytest.param(["--run", "run.trec"], id="run"),
        pytest.param(["--index", "index"], id="index"),
        pytest.param(["--index", "index", "--prf", "rocchio"], id="feedback"),
    ],
)
def test_evaluate_follows_beir_and_reports_ignored_hits(
    call: Call,
    folder: Path,
    source: list[str],
) -> None:
    paths = [str(folder / part) if (folder / part).exists() else part for part in source]
    command = ["evaluate", *paths, "--data", folder / "data", "--measure", "RR@10"]
    measures = measured(call(*command, "--json"))
    assert measures["measures"]["RR@10"] == 1.0
    assert measures["conventions"]["test"]["ignored_identical_ids"] == 2
    counted = measured(call(*command, "--identical-ids", "count", "--json"))
    assert counted["measures"]["RR@10"] == 0.5
    assert counted["conventions"]["test"]["counted_identical_ids"] == 2
    printed = " ".join(done(call(*command)).out.split())
    assert "hits with the query's own id, ignored, as BEIR does: 2" in printed


def test_compare_follows_beir_and_reports_ignored_hits(call: Call, folder: Path) -> None:
    runs = (folder / "run.trec", folder / "other.trec")
    command = ["compare", *runs, "--data", folder / "data", "--measure", "RR@10", "--json"]
    for choice, value, convention in (
        ([], 1.0, "ignored_identical_ids"),
        (["--identical-ids", "count"], 0.5, "counted_identical_ids"),
    ):
        for row in measured(call(*command, *choice))["runs"].values():
            assert row["measures"]["RR@10"]["mean"] == value
            assert row["conventions"][convention] == 2


@pytest.mark.parametrize(
    "method",
    [
        pytest.param([], id="rrf"),
        pytest.param(
            ["--method", "interpolation", "--tune", "dev", "--in-sample"],
            id="tuned",
        ),
    ],
)
def test_fuse_follows_beir_and_reports_ignored_hits(
    call: Call,
    folder: Path,
    method: list[str],
) -> None:
    runs = ["--run", folder / "run.trec", "--run", folder / "other.trec"]
    command = ["fuse", *runs, "--data", folder / "data", "--measure", "RR@10", *method, "--json"]
    fused = measured(call(*command))
    assert fused["measures"]["RR@10"] == 1.0
    assert fused["conventions"]["test"]["ignored_identical_ids"] == 2
    assert measured(call(*command, "--identical-ids", "count"))["measures"]["RR@10"] == 0.5


def test_a_saved_search_leaves_out_documents_with_the_id_of_the_query(
    call: Call,
    folder: Path,
) -> None:
    (folder / "queries.tsv").write_text(f"a\t{TEXTS['a']}\n")
    queries = ["--queries", folder / "queries.tsv", "--index", folder / "index"]
    run = folder / "saved.trec"
    command = ["search", *queries, "--prf", "rocchio", "--ignore-identical-ids"]
    done(call(*command, "--save-run", run))
    assert list(r.read_trec_run(run)["a"]) == ["b", "c", "d"]
    fails(call(*command), 2, "--ignore-identical-ids requires --save-run")


def test_a_saved_search_reports_the_hits_that_it_ignored(call: Call, folder: Path) -> None:
    (folder / "queries.tsv").write_text(f"a\t{TEXTS['a']}\nx\tboats\n")
    queries = ["--queries", folder / "queries.tsv", "--index", folder / "index"]
    command = ["search", *queries, "--save-run", folder / "saved.trec", "--ignore-identical-ids"]
    saved = call(*command, "--json")
    assert measured(saved)["ignored_identical_ids"] == 1
    assert "hits with the query's own id, ignored: 1" in saved.err


@pytest.mark.parametrize("is_piped", [False, True], ids=["file", "standard-input"])
def test_identical_ids_are_not_ignored_for_queries_without_ids(
    call: Call,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_piped: bool,
) -> None:
    r.BM25Index.build({"1": "hot tea", "2": "cold tea"}).save(tmp_path / "index")
    queries = tmp_path / "queries.txt"
    queries.write_text("tea\n")
    source: list[str | Path] = ["--queries", queries]
    if is_piped:
        source = ["-"]
        monkeypatch.setattr("sys.stdin", io.StringIO("tea\n"))
    command = ["search", *source, "--index", tmp_path / "index", "--ignore-identical-ids"]
    run = tmp_path / "saved.trec"
    fails(call(*command, "--save-run", run), 2, "--ignore-identical-ids: expected queries with ids")
    assert not run.exists()
