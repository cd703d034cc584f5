"""Files of documents, queries and judgements: compressed, Parquet, datasets, tables and TREC."""

from __future__ import annotations

import gzip
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.retrieval.conftest import DOCUMENTS, QUERIES
from tilefold import retrieval as r
from tilefold.retrieval.data.shard_texts import FileTexts
from tilefold.retrieval.errors import DataError


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write rows into a file of Parquet, whose folder is made."""
    path.parent.mkdir(exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)


def test_a_corpus_without_queries_is_a_collection(beir: Path) -> None:
    documents = r.load_beir(beir).documents
    (beir / "queries.jsonl").unlink()
    shutil.rmtree(beir / "qrels")
    collection = r.load_beir(beir)
    assert collection.documents == documents
    assert collection.queries == {}
    assert collection.qrels == {}
    assert r.load_collection(beir / "corpus.jsonl") == replace(collection, name="corpus")


def test_documents_are_read_without_queries_and_judgements(beir: Path) -> None:
    (beir / "qrels" / "test.tsv").write_text("q9\td9\t1\n")
    assert not r.load_beir(beir, documents_only=True).queries


def test_compressed_files_are_read_and_damaged_or_double_ones_are_named(beir: Path) -> None:
    expected = r.load_beir(beir)
    for name in ("corpus.jsonl", "queries.jsonl", "qrels/test.tsv"):
        content = (beir / name).read_bytes()
        (beir / f"{name}.gz").write_bytes(gzip.compress(content))
        (beir / name).unlink()
    assert r.load_beir(beir) == expected

    compressed = beir / "corpus.jsonl.gz"
    compressed.write_bytes(compressed.read_bytes()[:-12])
    with pytest.raises(DataError, match=r"corpus\.jsonl\.gz: expected a complete gzip file"):
        r.load_beir(beir)
    (beir / "corpus.jsonl").write_text("")
    message = r"expected one of corpus\.jsonl, corpus\.jsonl\.gz, got all"
    with pytest.raises(DataError, match=message):
        r.load_beir(beir)


def test_parquet_files_and_folders_of_them_are_read(beir: Path) -> None:
    expected = r.load_beir(beir)
    for name in ("corpus.jsonl", "queries.jsonl", "qrels/test.tsv"):
        (beir / name).unlink()
    for number, document in enumerate(DOCUMENTS):
        write_parquet(beir / "corpus" / f"corpus-0000{number}-of-00003.parquet", [document])
    write_parquet(beir / "queries.parquet", QUERIES)
    judgements: list[dict[str, Any]] = [
        {"query-id": "q1", "corpus-id": "d1", "score": 2},
        {"query-id": "q1", "corpus-id": "d2", "score": 0},
        {"query-id": "q2", "corpus-id": "d3", "score": 1},
    ]
    for number, judgement in enumerate(judgements):
        write_parquet(beir / "qrels" / f"test-0000{number}-of-00003.parquet", [judgement])
    assert r.load_beir(beir) == expected


def test_a_bad_row_or_file_of_parquet_is_named(beir: Path) -> None:
    (beir / "queries.jsonl").unlink()
    write_parquet(beir / "queries.parquet", [*QUERIES, {"_id": "q2", "text": "again"}])
    with pytest.raises(DataError, match=r"queries\.parquet, row 3: '_id' 'q2' is a duplicate"):
        r.load_beir(beir)
    (beir / "queries.parquet").write_bytes(b"no Parquet")
    with pytest.raises(DataError, match=r"queries\.parquet: expected a Parquet file"):
        r.load_beir(beir)


def test_saved_datasets_are_read(beir: Path, tmp_path: Path) -> None:
    expected = r.load_beir(beir)
    corpus = datasets.Dataset.from_list(DOCUMENTS)
    datasets.DatasetDict({"corpus": corpus}).save_to_disk(str(tmp_path / "one split"))
    assert r.load_collection(tmp_path / "one split").documents == expected.documents
    (beir / "corpus.jsonl").unlink()
    corpus.save_to_disk(str(beir / "corpus"))
    assert r.load_beir(beir) == expected


def test_a_saved_dataset_of_two_splits_is_refused(tmp_path: Path) -> None:
    corpus = datasets.Dataset.from_list(DOCUMENTS)
    datasets.DatasetDict({"a": corpus, "b": corpus}).save_to_disk(str(tmp_path / "two"))
    with pytest.raises(DataError, match="two: expected a dataset of one split, got a, b"):
        r.load_collection(tmp_path / "two")


@pytest.fixture
def ms_marco(tmp_path: Path) -> Path:
    """A folder with files of the names and the format of MS MARCO."""
    files = {
        "collection.tsv": "0\tThe presence of communication.\n1\tAnother passage.\n",
        "queries.train.tsv": "121352\tdefine extreme\n",
        "queries.dev.tsv": "1048585\twhat is paula deen's brother\n2\tandroid\n",
        "queries.dev.small.tsv": "1048585\twhat is paula deen's brother\n",
        "qrels.train.tsv": "121352\t0\t1\t1\n",
        "qrels.dev.small.tsv": "1048585\t0\t0\t1\n",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def test_the_files_of_ms_marco_are_read(ms_marco: Path) -> None:
    collection = r.load_beir(ms_marco)
    assert collection.documents["1"].contents == "Another passage."
    assert list(collection.queries) == ["1048585", "2", "121352"]
    assert collection.qrels == {"dev.small": {"1048585": {"0": 1}}, "train": {"121352": {"1": 1}}}
    assert collection.pairs("train") == [("121352", "1")]
    assert list(r.load_beir(ms_marco, splits=["train"]).qrels) == ["train"]


def test_a_query_with_two_texts_is_refused(ms_marco: Path) -> None:
    (ms_marco / "queries.dev.tsv").write_text("1048585\tanother\n")
    with pytest.raises(ValueError, match="query '1048585' has a different text in an earlier file"):
        r.load_beir(ms_marco)


def test_judgements_and_topics_of_trec_are_read(beir: Path) -> None:
    expected = r.load_beir(beir)
    (beir / "qrels" / "test.tsv").unlink()
    (beir / "qrels" / "test.qrels").write_text("q1 0 d1 2\nq1 0 d2 0\nq2\t0\td3\t1\n")
    (beir / "queries.jsonl").unlink()
    (beir / "queries.trec").write_text(
        "<top>\n"
        "<num> Number: q1\n"
        "<title> sleeping\ncats\n"
        "<desc> Description:\nwhy\n"
        "</top>\n"
        '<topics><topic number="q2">'
        "<query>trees</query><question>which?</question>"
        "</topic></topics>\n",
    )
    assert r.load_beir(beir) == expected


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param("1\ta query", r"expected TREC topics .*, got '1\\ta query'", id="no topic"),
        pytest.param(
            "<top><num>1</num></top>",
            r"queries\.trec, topic 1: expected a <num> and a <title>",
            id="topic without a title",
        ),
    ],
)
def test_bad_topics_of_trec_are_named(beir: Path, content: str, message: str) -> None:
    (beir / "queries.jsonl").unlink()
    (beir / "queries.trec").write_text(content)
    with pytest.raises(DataError, match=message):
        r.load_beir(beir)


def write_table(path: Path, content: str) -> Path:
    """Write a table, compressed if its name ends with ``.gz``."""
    encoded = content.encode()
    path.write_bytes(gzip.compress(encoded) if path.suffix == ".gz" else encoded)
    return path


TABLE_NAMES = pytest.mark.parametrize("name", ["corpus.tsv", "corpus.txt", "corpus.tsv.gz"])


@TABLE_NAMES
@pytest.mark.parametrize(
    ("header", "line", "title", "text"),
    [
        pytest.param("id\ttext\n", "1\tcats sleep\n", "", "cats sleep", id="id and text"),
        pytest.param(
            "docid\ttitle\ttext\n",
            "1\tCats\tcats sleep\n",
            "Cats",
            "cats sleep",
            id="title",
        ),
        pytest.param('"_id"\t"Text"\n', "1\tcats sleep\n", "", "cats sleep", id="quoted names"),
        pytest.param(
            "\tid\ttext\n",
            "0\t1\tcats sleep\n",
            "",
            "cats sleep",
            id="index of a data frame",
        ),
        pytest.param(
            "text\turl\tdocno\n",
            "cats sleep\thttp://a\t1\n",
            "",
            "cats sleep",
            id="other order",
        ),
    ],
)
def test_a_first_line_that_names_columns_is_no_document(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    name: str,
    header: str,
    line: str,
    title: str,
    text: str,
) -> None:
    path = write_table(tmp_path / name, header + line)
    documents = r.load_collection(path).documents
    assert list(documents) == ["1"]
    assert documents["1"].title == title
    assert documents["1"].text == text
    (record,) = caplog.records
    assert f"{name}:1: this line is taken as names of columns" in record.getMessage()
    assert FileTexts(path).plan_shards(10).count == 1


@TABLE_NAMES
def test_a_table_without_names_of_columns_has_an_id_and_a_text(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    name: str,
) -> None:
    path = write_table(tmp_path / name, "1\tcats\tsleep\n")
    documents = r.load_collection(path).documents
    assert list(documents) == ["1"]
    assert documents["1"].title == ""
    assert documents["1"].text == "cats\tsleep"
    assert not caplog.records
    assert FileTexts(path).plan_shards(10).count == 1


@TABLE_NAMES
@pytest.mark.parametrize(
    "header",
    [
        pytest.param("id\tA name, in a dictionary.\n", id="a definition of the word id"),
        pytest.param("docid\turl\n", id="names without a text"),
        pytest.param("number\ttext\n", id="names without an id"),
    ],
)
def test_a_first_line_that_may_be_a_row_or_names_of_columns_is_refused(
    tmp_path: Path,
    name: str,
    header: str,
) -> None:
    path = write_table(tmp_path / name, header + "2\tdogs\n")
    message = f"{name}:1: expected a row, or names of columns .* If they are a row, put it below another one"
    with pytest.raises(DataError, match=message):
        r.load_collection(path)


@TABLE_NAMES
def test_a_row_with_too_few_fields_is_refused(tmp_path: Path, name: str) -> None:
    path = write_table(tmp_path / name, "id\ttitle\ttext\n1\tCats\n")
    message = f"{name}:2: expected 3 fields as in the header, got 2"
    with pytest.raises(DataError, match=message):
        r.load_collection(path)


@pytest.mark.parametrize(
    "lines",
    [
        pytest.param(
            "docid\tqid\trelevance\nd1\tq1\t2\nd2\tq1\t0\nd3\tq2\t1\n",
            id="documents first",
        ),
        pytest.param(
            "topic iteration document rel\nq1 0 d1 2\nq1 0 d2 0\nq2 0 d3 1\n",
            id="names of TREC",
        ),
        pytest.param(
            "\nquery_id\tdoc_id\tlabel\nq1\td1\t2\nq1\td2\t0\nq2\td3\t1\n",
            id="after a blank line",
        ),
    ],
)
def test_judgements_are_read_by_the_names_of_columns(beir: Path, lines: str) -> None:
    expected = r.load_beir(beir)
    (beir / "qrels" / "test.tsv").write_text(lines)
    assert r.load_beir(beir) == expected


def test_a_judgement_of_a_query_with_the_name_of_a_column_is_read(beir: Path) -> None:
    (beir / "queries.jsonl").write_text('{"_id": "qid", "text": "cats"}\n')
    (beir / "qrels" / "test.tsv").write_text("qid\td1\t1\n")
    assert r.load_beir(beir).qrels["test"] == {"qid": {"d1": 1}}


def test_judgements_with_unknown_names_of_columns_are_refused(beir: Path) -> None:
    (beir / "qrels" / "test.tsv").write_text("qid\tanswer\tgain\nqid\td1\t1\n")
    message = r"test\.tsv:1: .*got 'gain'.*names of columns are query-id, corpus-id, score"
    with pytest.raises(DataError, match=message):
        r.load_beir(beir)
