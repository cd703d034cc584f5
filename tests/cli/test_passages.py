"""Tests of commands with passages of long documents."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.program import Call, done, fails, measured, run_steps
from tests.recipes.small import SUBJECTS, small_collection
from tilefold import retrieval as r
from tilefold.retrieval.data.collection import Collection

PASSAGES = ("--passages", "6")


def long_collection(further_sentence: str = "") -> Collection:
    """Return four documents of four sentences each, and queries about one sentence each.

    Args:
        further_sentence: sentence at the end of the first document.
    """
    documents = {}
    for number in range(4):
        subjects = SUBJECTS[4 * number : 4 * number + 4]
        sentences = [f"They read and write {subject}." for subject in subjects]
        if number == 0 and further_sentence:
            sentences.append(further_sentence)
        id_ = f"d{number}"
        documents[id_] = r.Document(id_, f"part {number}", " ".join(sentences))
    short = small_collection()
    qrels: dict[str, dict[str, dict[str, int]]] = {}
    for split, judged in short.qrels.items():
        # query 5 is about sentence 5, which is in document 1
        qrels[split] = {query: {f"d{int(query[1:]) // 4}": 1} for query in judged}
    return Collection("long", documents, short.queries, qrels)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory, masked_lm: str) -> Path:
    """The collection, its passages' vectors and indexes, and vectors of a changed collection."""
    folder = tmp_path_factory.mktemp("passages")
    long_collection().save_beir(folder / "data")
    long_collection("New words about zebras stand here.").save_beir(folder / "changed-data")
    data = ("--data", folder / "data")
    changed_data = ("--data", folder / "changed-data")
    encode = ("encode", "--model", masked_lm, "--top-k", "64", *PASSAGES)
    index = ("index", "--output")
    run_steps(
        (*encode, *data, "--output", folder / "vectors"),
        (*encode, *changed_data, "--output", folder / "changed"),
        (*index, folder / "index", "--vectors", folder / "vectors"),
        (*index, folder / "bm25", "--backend", "bm25", *PASSAGES, *data),
    )
    return folder


@pytest.fixture
def data(work: Path) -> tuple[str | Path, ...]:
    """Options that name the collection and print JSON."""
    return ("--data", work / "data", "--json")


@pytest.fixture(scope="module")
def run_of_passages(work: Path) -> r.Run:
    """The run of passages for the queries of the split "test"."""
    searcher = r.Searcher(r.BM25Index.load(work / "bm25"))
    queries = long_collection().split_queries("test")
    return searcher.rank(queries, r.SearchRequest(16, by="passage")).run


@pytest.fixture(scope="module")
def run_of_documents(run_of_passages: r.Run) -> r.Run:
    """The run of documents by their best passages."""
    return r.best_passages(run_of_passages)[0]


def test_evaluate_ranks_documents_by_their_best_passage(
    call: Call,
    work: Path,
    data: tuple[str | Path, ...],
    run_of_documents: r.Run,
    tmp_path: Path,
) -> None:
    run = tmp_path / "documents.trec"
    done(call("evaluate", *data, "--index", work / "bm25", "--save-run", run))
    assert r.read_trec_run(run) == run_of_documents


def test_a_run_of_passages_is_evaluated_by_documents(
    call: Call,
    work: Path,
    data: tuple[str | Path, ...],
    run_of_passages: r.Run,
    tmp_path: Path,
) -> None:
    run = tmp_path / "passages.trec"
    tag = r.Searcher(r.BM25Index.load(work / "bm25")).provenance.tag
    r.write_trec_run(run_of_passages, run, tag=tag)
    expected = measured(call("evaluate", *data, "--index", work / "bm25"))
    outcome = call("evaluate", *data, "--run", run)
    assert measured(outcome)["measures"] == expected["measures"]
    assert "ranks passages; each document is ranked by its best passage" in outcome.err


@pytest.mark.parametrize(
    ("unit", "expected_run"),
    [("passage", "run_of_passages"), ("document", "run_of_documents")],
)
def test_search_saves_a_run_of_passages_or_documents_with_equal_measures(
    call: Call,
    work: Path,
    data: tuple[str | Path, ...],
    request: pytest.FixtureRequest,
    tmp_path: Path,
    unit: str,
    expected_run: str,
) -> None:
    queries = tmp_path / "queries.tsv"
    texts = long_collection().split_queries("test")
    queries.write_text("".join(f"{query}\t{text}\n" for query, text in texts.items()))
    run = tmp_path / "run.trec"
    outcome = call(
        "search",
        "--queries",
        queries,
        "--index",
        work / "bm25",
        "--k",
        "16",
        "--by",
        unit,
        "--save-run",
        run,
    )
    done(outcome)
    assert r.read_trec_run(run) == request.getfixturevalue(expected_run)
    expected = measured(call("evaluate", *data, "--index", work / "bm25"))
    result = measured(call("evaluate", *data, "--run", run))
    assert result["measures"] == expected["measures"]


@pytest.fixture
def qdrant_index(call: Call, work: Path, tmp_path: Path) -> Path:
    """An index of the passages in Qdrant."""
    folder = tmp_path / "qdrant"
    result = measured(
        call(
            "index",
            "--backend",
            "qdrant",
            "--output",
            folder,
            "--vectors",
            work / "vectors",
            "--json",
        ),
    )
    assert result["n_documents"] == 16
    assert result["passages"] == "6/6/sentences"
    return folder


def test_an_update_replaces_all_passages_of_a_document_and_a_deletion_removes_them(
    call: Call,
    work: Path,
    qdrant_index: Path,
    tmp_path: Path,
    masked_lm: str,
) -> None:
    index = ("index", "--backend", "qdrant", "--output", qdrant_index, "--json")
    measured(call(*index, "--update", "--vectors", work / "changed"))
    (tmp_path / "ids").write_text("d3\n")
    result = measured(call(*index, "--delete", tmp_path / "ids"))
    assert result["deleted"] == 4
    assert result["n_documents"] == 13
    search = ("search", "zebras", "--index", qdrant_index, "--model", masked_lm, "--json")
    passages = measured(call(*search, "--k", "9", "--by", "passage"))["hits"]
    positions = {(hit["id"], hit["passage"]["start"]) for hit in passages}
    assert len(positions) == len(passages), "no passage is found twice"
    documents = measured(call(*search, "--k", "9"))["hits"]
    assert {hit["id"] for hit in documents} == {"d0", "d1", "d2"}


def test_vectors_without_passages_are_refused_by_an_index_of_passages(
    call: Call,
    work: Path,
    qdrant_index: Path,
    tmp_path: Path,
    masked_lm: str,
) -> None:
    vectors = tmp_path / "vectors"
    done(call("encode", "--model", masked_lm, "--data", work / "data", "--output", vectors))
    outcome = call(
        "index",
        "--backend",
        "qdrant",
        "--output",
        qdrant_index,
        "--update",
        "--vectors",
        vectors,
    )
    fails(outcome, 1, "expected passages (6/6/sentences) as in", "got whole documents")


def test_passages_are_exported_with_their_texts(call: Call, work: Path, tmp_path: Path) -> None:
    outcome = call(
        "export",
        "--to",
        "vespa",
        "--vectors",
        work / "vectors",
        "--output",
        tmp_path / "out",
        "--names",
        "numbers",
        "--data",
        work / "data",
    )
    done(outcome)
    lines: list[str] = []
    for path in (tmp_path / "out").glob("*.jsonl"):
        lines += path.read_text().splitlines()
    assert len(lines) == 16
    assert all("They read and write" in json.dumps(json.loads(line)) for line in lines)


@pytest.fixture
def encode_command(work: Path, masked_lm: str, tmp_path: Path) -> tuple[str | Path, ...]:
    """The command that encodes the collection."""
    return (
        "encode",
        "--model",
        masked_lm,
        "--data",
        work / "data",
        "--output",
        tmp_path / "vectors",
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param(
            ["--stride", "3"],
            "--stride requires --passages",
            id="stride without passages",
        ),
        pytest.param(
            [*PASSAGES, "--queries"],
            "--passages cannot be combined with --queries",
            id="passages of queries",
        ),
        pytest.param(
            [*PASSAGES, "--stride", "7"],
            "--stride: expected at most the length of a passage (6)",
            id="stride above the length",
        ),
        pytest.param(
            [*PASSAGES, "--cut", "lines"],
            "--cut: expected one of sentences, words, got 'lines'",
            id="unknown unit",
        ),
        pytest.param(
            ["--passages", "0"],
            "--passages: expected an integer of at least 1, got 0",
            id="passages of no words",
        ),
        pytest.param(
            ["--max-length", "0"],
            "--max-length: expected at least 1, got 0",
            id="no tokens",
        ),
        pytest.param(
            ["--max-length", "100000"],
            "--max-length: expected at most",
            id="more tokens than the model reads",
        ),
    ],
)
def test_encode_rejects_options_before_it_writes(
    call: Call,
    encode_command: tuple[str | Path, ...],
    tmp_path: Path,
    options: list[str],
    message: str,
) -> None:
    fails(call(*encode_command, *options), 2, message)
    assert not (tmp_path / "vectors").exists()


def test_encode_reports_passages_that_the_model_truncates(
    call: Call,
    encode_command: tuple[str | Path, ...],
) -> None:
    outcome = done(call(*encode_command, *PASSAGES, "--max-length", "5"))
    assert "4 documents were split into 16 passages of at most 6 words" in outcome.err
    assert "16 of 16 passages were truncated at 5 tokens" in outcome.err
    assert "--passages fewer words" in outcome.err


def test_index_splits_documents_for_bm25_only(call: Call, work: Path, tmp_path: Path) -> None:
    output = tmp_path / "index"
    outcome = call("index", *PASSAGES, "--vectors", work / "vectors", "--output", output)
    fails(outcome, 2, "--passages requires --backend bm25")
    assert not output.exists()


def test_search_by_passage_needs_an_index_of_passages(call: Call, shared: Path) -> None:
    outcome = call("search", "csv", "--index", shared / "bm25", "--by", "passage")
    fails(outcome, 2, "requires an index of passages")


def test_search_rejects_an_unknown_unit(call: Call, work: Path) -> None:
    outcome = call("search", "csv", "--index", work / "bm25", "--by", "word")
    fails(outcome, 2, "--by: expected one of document, passage")


def test_search_shows_the_text_of_the_best_passage(call: Call, work: Path) -> None:
    data = ("--data", work / "data")
    output = done(call("search", "csv files", "--index", work / "bm25", *data)).out
    assert "1: They read and write csv files." in " ".join(output.split())


def test_search_refuses_vectors_of_whole_documents(
    call: Call,
    work: Path,
    shared: Path,
    masked_lm: str,
) -> None:
    outcome = call(
        "search",
        "csv",
        "--index",
        work / "index",
        "--model",
        masked_lm,
        "--vectors",
        shared / "vectors",
    )
    fails(outcome, 1, "holds vectors of another model or of other documents")


@pytest.fixture
def train_command(work: Path, masked_lm: str, tmp_path: Path) -> tuple[str | Path, ...]:
    """The command that trains a step on passages."""
    return (
        "train",
        "--model",
        masked_lm,
        "--data",
        work / "data",
        "--output",
        tmp_path / "m",
        "--steps",
        "1",
        "--batch-size",
        "2",
        *PASSAGES,
    )


def test_train_reads_passages(call: Call, train_command: tuple[str | Path, ...]) -> None:
    assert "4 documents were split into 16 passages" in done(call(*train_command)).err


def test_train_refuses_negatives_of_whole_documents(
    call: Call,
    train_command: tuple[str | Path, ...],
    shared: Path,
) -> None:
    outcome = call(*train_command, "--negatives", shared / "mined.parquet")
    fails(outcome, 2, "--negatives cannot be combined with --passages")
