"""Passages from the shell: runs of them, an index that changes, what goes to other engines, and
what is refused.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.program import Call, done, fails, measured, run_steps
from tests.recipes.small import SUBJECTS, small_collection
from tilefold import retrieval as r
from tilefold.retrieval.data.collection import Collection

CUT = ("--passages", "6")


def long_collection(last: str = "") -> Collection:
    """Four documents of four sentences each, and the queries of one of them; `last` is one more of
    the first.
    """
    short = small_collection()
    documents = {
        f"d{i}": r.Document(
            f"d{i}",
            f"part {i}",
            " ".join(f"They read and write {each}." for each in part),
        )
        for i, part in enumerate(SUBJECTS[start : start + 4] for start in range(0, 16, 4))
    }
    documents["d0"] = r.Document("d0", "part 0", f"{documents['d0'].text} {last}".strip())
    qrels = {
        split: {q: {f"d{int(q[1:]) // 4}": 1} for q in judged}
        for split, judged in short.qrels.items()
    }
    return Collection("long", documents, short.queries, qrels)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory, masked_lm: str) -> Path:
    folder = tmp_path_factory.mktemp("cut")
    long_collection().save_beir(folder / "data")
    made = ("encode", "--model", masked_lm, "--top-k", "64", *CUT)
    long_collection("New words about zebras stand here.").save_beir(folder / "more")
    run_steps(
        (*made, "--data", folder / "data", "--output", folder / "vectors"),
        (*made, "--data", folder / "more", "--output", folder / "changed"),
        ("index", "--vectors", folder / "vectors", "--output", folder / "index"),
        (
            "index",
            "--backend",
            "bm25",
            *CUT,
            "--data",
            folder / "data",
            "--output",
            folder / "bm25",
        ),
    )
    return folder


def test_a_run_of_passages_counts_by_documents(call: Call, work: Path, tmp_path: Path) -> None:
    collection, data = long_collection(), ("--data", work / "data", "--json")
    searcher = r.Searcher(r.BM25Index.load(work / "bm25"))
    queries = collection.split_queries("test")
    passages = searcher.rank(queries, r.SearchRequest(16, by="passage")).run
    r.write_trec_run(passages, tmp_path / "passages.trec", tag=searcher.provenance.tag)
    documents = measured(
        call(
            "evaluate",
            *data,
            "--index",
            work / "bm25",
            "--save-run",
            tmp_path / "documents.trec",
        ),
    )
    assert r.read_trec_run(tmp_path / "documents.trec") == r.best_passages(passages)[0]
    found = call("evaluate", *data, "--run", tmp_path / "passages.trec")
    assert measured(found)["measures"] == documents["measures"]
    assert "ranks passages; documents count by their best one" in found.err
    (tmp_path / "asked.tsv").write_text(
        "".join(f"{name}\t{text}\n" for name, text in queries.items()),
    )
    search = ("search", "--queries", tmp_path / "asked.tsv", "--index", work / "bm25", "--k", "16")
    for by, expected in (("passage", passages), ("document", r.best_passages(passages)[0])):
        done(call(*search, "--by", by, "--save-run", tmp_path / by))
        assert r.read_trec_run(tmp_path / by) == expected
        assert (
            measured(call("evaluate", *data, "--run", tmp_path / by))["measures"]
            == documents["measures"]
        )


def test_a_changed_document_has_its_new_passages_alone(
    call: Call,
    work: Path,
    tmp_path: Path,
    masked_lm: str,
) -> None:
    place = ("--backend", "qdrant", "--output", tmp_path / "qdrant")
    built = measured(call("index", *place, "--vectors", work / "vectors", "--json"))
    assert (built["n_documents"], built["passages"]) == (16, "6/6/sentences")
    measured(call("index", *place, "--update", "--vectors", work / "changed", "--json"))
    (tmp_path / "gone").write_text("d3\n")
    after = measured(call("index", *place, "--delete", tmp_path / "gone", "--json"))
    assert (after["deleted"], after["n_documents"]) == (4, 13)
    search = ("search", "zebras", "--model", masked_lm, "--json", "--k", "9")
    changed = measured(call(*search, "--index", tmp_path / "qdrant", "--by", "passage"))["hits"]
    assert len({(hit["id"], hit["passage"]["start"]) for hit in changed}) == len(changed)
    assert {
        hit["id"] for hit in measured(call(*search, "--index", tmp_path / "qdrant"))["hits"]
    } == {"d0", "d1", "d2"}
    whole = (
        "encode",
        "--model",
        masked_lm,
        "--data",
        work / "data",
        "--output",
        tmp_path / "whole",
    )
    done(call(*whole))
    said = "expected passages (6/6/sentences) as in", "got whole documents"
    fails(call("index", *place, "--update", "--vectors", tmp_path / "whole"), 1, *said)


def test_passages_are_exported_with_their_texts(call: Call, work: Path, tmp_path: Path) -> None:
    vectors = ("--vectors", work / "vectors", "--output", tmp_path / "out", "--names", "numbers")
    done(call("export", "--to", "vespa", *vectors, "--data", work / "data"))
    lines = [
        json.loads(line)
        for path in (tmp_path / "out").glob("*.jsonl")
        for line in path.read_text().splitlines()
    ]
    assert len(lines) == 16 and all("They read and write" in json.dumps(line) for line in lines)


def test_options_that_do_not_go_together_are_refused_before_the_work(
    call: Call,
    work: Path,
    shared: Path,
    masked_lm: str,
    tmp_path: Path,
) -> None:
    data, output = ("--data", work / "data"), ("--output", tmp_path / "none")
    encode = ("encode", "--model", masked_lm, *data, *output)
    for command, message in (
        ((*encode, "--stride", "3"), "--stride goes together with --passages"),
        ((*encode, *CUT, "--queries"), "--passages cuts documents"),
        (
            (*encode, *CUT, "--stride", "7"),
            "--stride: expected at most the length of a passage (6)",
        ),
        ((*encode, *CUT, "--cut", "lines"), "--cut: expected one of sentences, words, got 'lines'"),
        ((*encode, "--passages", "0"), "--passages: expected an integer of at least 1, got 0"),
        ((*encode, "--max-length", "0"), "--max-length: expected at least 1, got 0"),
        (
            ("index", *CUT, "--vectors", work / "vectors", *output),
            "--passages goes with --backend bm25",
        ),
        (
            ("search", "csv", "--index", shared / "bm25", "--by", "passage"),
            "goes with an index of passages",
        ),
        (
            ("search", "csv", "--index", work / "bm25", "--by", "word"),
            "--by: expected one of document, passage",
        ),
    ):
        fails(call(*command), 2, message)
    train = (
        "train",
        "--model",
        masked_lm,
        *data,
        "--output",
        tmp_path / "m",
        "--steps",
        "1",
        "--batch-size",
        "2",
        *CUT,
    )
    fails(
        call(*train, "--negatives", shared / "mined.parquet"),
        2,
        "--negatives names whole documents",
    )
    assert "4 documents in 16 passages" in done(call(*train)).err
    fails(call(*encode, "--max-length", "100000"), 2, "--max-length: expected at most")
    assert not (tmp_path / "none").exists()
    told = done(call(*encode, *CUT, "--max-length", "5"))
    assert "4 documents in 16 passages of at most 6 words" in told.err
    assert (
        "16 of 16 passages were cut at 5 tokens" in told.err
        and "--passages fewer words" in told.err
    )
    other = (
        "search",
        "csv",
        "--index",
        work / "index",
        "--model",
        masked_lm,
        "--vectors",
        shared / "vectors",
    )
    fails(call(*other), 1, "holds vectors of another model or of other documents")
    shown = done(call("search", "csv files", "--index", work / "bm25", *data)).out
    assert "1: They read and write csv files." in " ".join(shown.split())
