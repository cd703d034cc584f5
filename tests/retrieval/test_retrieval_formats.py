"""Collections as they come in production: without queries, compressed, in Parquet, as saved datasets, from TREC."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tilefold.retrieval import load_beir, load_collection, load_queries, query_of_line, read_trec_run
from tilefold.retrieval.errors import DataError
from tilefold.retrieval.text_ranges import StoredTexts

from .conftest import DOCUMENTS, QUERIES


def gzipped(path: Path) -> None:
    path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
    path.unlink()


def parquet(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)


def test_a_corpus_alone_is_a_collection(beir: Path) -> None:
    whole = load_beir(beir)
    (beir / "queries.jsonl").unlink()
    shutil.rmtree(beir / "qrels")
    alone = load_beir(beir)
    assert (alone.documents, alone.queries, alone.qrels) == (whole.documents, {}, {})
    assert load_collection(beir / "corpus.jsonl").documents == whole.documents
    assert load_collection(beir / "corpus.jsonl").name == "corpus"


def test_the_documents_can_be_read_without_the_rest(beir: Path) -> None:
    (beir / "qrels" / "test.tsv").write_text("q9\td9\t1\n")
    assert not load_beir(beir, documents_only=True).queries


def test_compressed_files_are_read_and_damaged_ones_named(beir: Path) -> None:
    whole = load_beir(beir)
    for name in ("corpus.jsonl", "queries.jsonl", "qrels/test.tsv"):
        gzipped(beir / name)
    assert load_beir(beir) == whole
    packed = (beir / "corpus.jsonl.gz").read_bytes()
    (beir / "corpus.jsonl.gz").write_bytes(packed[:-12])
    with pytest.raises(DataError, match=r"corpus\.jsonl\.gz: expected a whole gzip file"):
        load_beir(beir)


def test_parquet_files_and_folders_of_them_are_read(beir: Path) -> None:
    whole = load_beir(beir)
    for name in ("corpus.jsonl", "queries.jsonl", "qrels/test.tsv"):
        (beir / name).unlink()
    for number, row in enumerate(DOCUMENTS):
        parquet(beir / "corpus" / f"corpus-0000{number}-of-00003.parquet", [row])
    parquet(beir / "queries.parquet", QUERIES)
    judged = [("q1", "d1", 2), ("q1", "d2", 0), ("q2", "d3", 1)]
    for number, judgement in enumerate(judged):
        named = dict(zip(("query-id", "corpus-id", "score"), judgement, strict=True))
        parquet(beir / "qrels" / f"test-0000{number}-of-00003.parquet", [named])
    assert load_beir(beir) == whole
    parquet(beir / "queries.parquet", [*QUERIES, {"_id": "q2", "text": "again"}])
    with pytest.raises(DataError, match=r"queries\.parquet, row 3: '_id' 'q2' was given before"):
        load_beir(beir)
    (beir / "queries.parquet").write_bytes(b"no Parquet")
    with pytest.raises(DataError, match=r"queries\.parquet: expected a Parquet file"):
        load_beir(beir)


def test_saved_datasets_are_read_as_parts_and_alone(beir: Path, tmp_path: Path) -> None:
    whole = load_beir(beir)
    corpus = datasets.Dataset.from_list(DOCUMENTS)
    datasets.DatasetDict({"corpus": corpus}).save_to_disk(str(tmp_path / "alone"))
    assert load_collection(tmp_path / "alone").documents == whole.documents
    (beir / "corpus.jsonl").unlink()
    corpus.save_to_disk(str(beir / "corpus"))
    assert load_beir(beir) == whole
    datasets.DatasetDict({"a": corpus, "b": corpus}).save_to_disk(str(tmp_path / "two"))
    with pytest.raises(DataError, match="two: expected a dataset of one split, got a, b"):
        load_collection(tmp_path / "two")


def test_two_files_for_one_thing_are_refused(beir: Path) -> None:
    (beir / "corpus.jsonl.gz").write_bytes(gzip.compress(b""))
    with pytest.raises(DataError, match=r"expected one of corpus\.jsonl, corpus\.jsonl\.gz, got all"):
        load_beir(beir)


def test_judgements_and_topics_of_trec_are_read(beir: Path) -> None:
    whole = load_beir(beir)
    (beir / "qrels" / "test.tsv").unlink()
    (beir / "qrels" / "test.qrels").write_text("q1 0 d1 2\nq1 0 d2 0\nq2\t0\td3\t1\n")
    (beir / "queries.jsonl").unlink()
    (beir / "queries.trec").write_text(
        "<top>\n<num> Number: q1\n<title> sleeping\ncats\n<desc> Description:\nwhy\n</top>\n"
        '<topics><topic number="q2"><query>trees</query><question>which?</question></topic></topics>\n'
    )
    assert load_beir(beir) == whole
    (beir / "queries.trec").write_text("1\ta query")
    with pytest.raises(DataError, match=r"expected TREC topics .*, got '1\\ta query'"):
        load_beir(beir)
    (beir / "queries.trec").write_text("<top><num>1</num></top>")
    with pytest.raises(DataError, match=r"queries\.trec, topic 1: expected a <num> and a <title>"):
        load_beir(beir)


def test_queries_are_read_from_files_of_every_kind(tmp_path: Path) -> None:
    (tmp_path / "lines.txt").write_text("sleeping cats\n\nq2\ttrees\n")
    assert load_queries(tmp_path / "lines.txt") == {"1": "sleeping cats", "q2": "trees"}
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in QUERIES))
    assert load_queries(tmp_path / "rows.jsonl") == {"q1": "sleeping cats", "q2": "trees"}
    with pytest.raises(FileNotFoundError, match=r"gone\.txt: no such file with queries"):
        load_queries(tmp_path / "gone.txt")


def test_a_bad_byte_is_found_by_line_and_by_byte(beir: Path) -> None:
    lines = [b'{"_id": "d%d", "text": "x"}\n' % i for i in range(3000)] + [b'{"_id": "last", "text": "caf\xe9"}\n']
    (beir / "corpus.jsonl").write_bytes(b"".join(lines))
    at = b"".join(lines).index(b"\xe9")
    with pytest.raises(DataError, match=rf"corpus\.jsonl:3001: .* the byte 0xe9 at byte {at} of the text"):
        load_beir(beir)


FRAMES = [
    ("id\ttext\n", "1\tcats sleep\n", {"1": ("", "cats sleep")}),
    ("docid\ttitle\ttext\n", "1\tCats\tcats sleep\n", {"1": ("Cats", "cats sleep")}),
    ('"_id"\t"Text"\n', "1\tcats sleep\n", {"1": ("", "cats sleep")}),
    ("\tid\ttext\n", "0\t1\tcats sleep\n", {"1": ("", "cats sleep")}),  # the index of a data frame
    ("text\turl\tdocno\n", "cats sleep\thttp://a\t1\n", {"1": ("", "cats sleep")}),
    ("", "1\tcats\tsleep\n", {"1": ("", "cats\tsleep")}),
    ("id\tA name, in a dictionary.\n", None, None),
    ("docid\turl\n", None, None),
    ("number\ttext\n", None, None),
]


@pytest.mark.parametrize(("header", "line", "expected"), FRAMES)
@pytest.mark.parametrize("name", ["corpus.tsv", "corpus.txt", "corpus.tsv.gz"])
def test_a_first_line_that_names_columns_is_no_document(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, header: str, line: str | None, expected: Any
) -> None:
    path = tmp_path / name
    content = (header + (line or "2\tdogs\n")).encode()
    path.write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    if expected is None:
        with pytest.raises(
            DataError,
            match=rf"{name}:1: expected a row, or names of columns .* put it below another one, if it is a row",
        ):
            load_collection(path)
        return
    found = load_collection(path).documents
    assert {key: (document.title, document.text) for key, document in found.items()} == expected
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == bool(header) and all(f"{name}:1: this line is taken as names of columns" in s for s in said)
    assert StoredTexts(path).survey(10).count == 1


def test_a_row_of_another_length_than_its_names_is_named(tmp_path: Path) -> None:
    (tmp_path / "corpus.tsv").write_text("id\ttitle\ttext\n1\tCats\n")
    with pytest.raises(
        DataError, match=r"corpus\.tsv:2: expected 3 fields as in the first line, which names them, got 2"
    ):
        load_collection(tmp_path / "corpus.tsv")


def test_a_first_line_that_names_columns_is_no_query(beir: Path) -> None:
    whole = load_beir(beir)
    (beir / "queries.jsonl").unlink()
    lines = "qid\tquery\n" + "".join(f"{row['_id']}\t{row['text']}\n" for row in QUERIES)
    for name in ("queries.tsv", "queries.txt"):
        (beir / name).write_text(lines)
        assert load_queries(beir / name) == whole.queries
    assert load_beir(beir) == whole
    (beir / "queries.txt").write_text("\n\nquery\nwhat is a topic\n")  # one word may be a query
    assert load_queries(beir / "queries.txt") == {"3": "query", "4": "what is a topic"}
    (beir / "queries.txt").write_text("qid\twhat is a qid\n")
    with pytest.raises(DataError, match=r"queries\.txt:1: expected a row, or names of columns"):
        load_queries(beir / "queries.txt")
    with pytest.raises(DataError, match="line 1: expected a query, got names of columns"):
        query_of_line("qid\tquery\n", 1)


@pytest.mark.parametrize(
    "lines",
    [
        "docid\tqid\trelevance\nd1\tq1\t2\nd2\tq1\t0\nd3\tq2\t1\n",
        "topic iteration document rel\nq1 0 d1 2\nq1 0 d2 0\nq2 0 d3 1\n",
        "\nquery_id\tdoc_id\tlabel\nq1\td1\t2\nq1\td2\t0\nq2\td3\t1\n",
    ],
)
def test_names_of_columns_say_which_is_which_in_judgements(beir: Path, lines: str) -> None:
    whole = load_beir(beir)
    (beir / "qrels" / "test.tsv").write_text(lines)
    assert load_beir(beir) == whole


def test_a_judgement_of_a_query_called_qid_is_one(beir: Path) -> None:
    (beir / "queries.jsonl").write_text('{"_id": "qid", "text": "cats"}\n')
    (beir / "qrels" / "test.tsv").write_text("qid\td1\t1\n")
    assert load_beir(beir).qrels["test"] == {"qid": {"d1": 1}}
    (beir / "qrels" / "test.tsv").write_text("qid\tanswer\tgain\nqid\td1\t1\n")
    with pytest.raises(DataError, match=r"test\.tsv:1: .*got 'gain'.*names of columns are query-id, corpus-id, score"):
        load_beir(beir)


def test_a_run_that_begins_with_names_of_columns_is_refused_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("query_id Q0 doc_id rank score tag\nq Q0 d 1 2.0 x\n")
    with pytest.raises(DataError, match=r"run:1: expected a finite score, got 'score'.* remove it if it names columns"):
        read_trec_run(tmp_path / "run")
