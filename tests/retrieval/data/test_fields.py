"""Names of fields in files of every kind, CSV, and judgements by one rule for all formats."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tilefold import retrieval as r
from tilefold.retrieval.data import document_lines as _document_lines
from tilefold.retrieval.data.shard_texts import FileTexts
from tilefold.retrieval.errors import DataError

ROWS = [{"id": "a", "text": "cats sleep"}, {"id": "b", "text": 'dogs, "cats"\nand trees'}]


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_csv(path: Path, rows: list[dict[str, Any]]) -> Path:
    with path.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.DictWriter(stream, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def write_tsv(path: Path, rows: list[dict[str, Any]]) -> Path:
    lines = [list(rows[0]), *(map(str, row.values()) for row in rows)]
    path.write_text("".join("\t".join(line) + "\n" for line in lines), encoding="utf-8")
    return path


WRITERS = {
    ".jsonl": write_jsonl,
    ".csv": write_csv,
    ".parquet": write_parquet,
    ".tsv": write_tsv,
}


@pytest.mark.parametrize("text_name", ["text", "contents", "body", "Content", "passage"])
@pytest.mark.parametrize("id_name", ["_id", "id", "docid", "doc_id", "docno", "DocID"])
@pytest.mark.parametrize("suffix", WRITERS)
def test_usual_names_of_fields_are_recognised_in_every_format(
    tmp_path: Path,
    suffix: str,
    id_name: str,
    text_name: str,
) -> None:
    rows = [{id_name: "a", text_name: "cats sleep", "year": "1998"}]
    file = WRITERS[suffix](tmp_path / f"documents{suffix}", rows)
    assert r.load_documents(file) == {"a": r.Document("a", "", "cats sleep", {"year": "1998"})}


def test_names_of_fields_of_json_lines_hold_where_documents_stay_in_their_file(
    tmp_path: Path,
) -> None:
    rows = [{"docid": "a", "contents": "cats"}, {"doc_id": "b", "body": "dogs", "year": 1998}]
    file = write_jsonl(tmp_path / "documents.jsonl", rows)
    stored = r.load_collection(file, tmp_path / "cache", stored=0)
    assert dict(stored.documents) == r.load_documents(file)
    texts: dict[str, str] = {}
    for part in FileTexts(file).plan_shards(1).ranges:
        texts |= part.read()
    assert texts == {"a": "cats", "b": "dogs"}


def test_an_export_for_anserini_is_read_back_without_its_vectors(tmp_path: Path) -> None:
    vectors = r.SparseVectors.from_rows({"a": {0: 1.0, 1: 2.0}, "b": {1: 0.5}}, 2)
    contents = {"a": "cats sleep", "b": "dogs"}
    r.export_jsonl(vectors, tmp_path / "v.jsonl", ["cat", "dog"], contents=contents)
    collection = r.load_collection(tmp_path / "v.jsonl")
    assert collection.contents() == contents
    assert collection.metadata() == {}


def test_a_vector_beside_other_fields_stays_metadata(tmp_path: Path) -> None:
    row = {"id": "a", "contents": "x", "vector": {"east": 1, "north": 2}, "year": 1998}
    (document,) = r.load_documents(write_jsonl(tmp_path / "d.jsonl", [row])).values()
    assert document.metadata == {"vector": {"east": 1, "north": 2}, "year": 1998}


def test_the_first_choice_of_a_name_leaves_the_others_as_metadata(tmp_path: Path) -> None:
    row = {"_id": "a", "docid": "7", "text": "x", "contents": "y"}
    (document,) = r.load_documents(write_jsonl(tmp_path / "d.jsonl", [row])).values()
    assert document == r.Document("a", "", "x", {"docid": "7", "contents": "y"})


@pytest.mark.parametrize("suffix", WRITERS)
def test_fields_of_other_names_are_read_where_they_are_named(tmp_path: Path, suffix: str) -> None:
    rows = [{"Paper": "a", "Name": "Cats", "Abstract": "They sleep.", "id": "7", "text": "note"}]
    file = WRITERS[suffix](tmp_path / f"documents{suffix}", rows)
    fields = r.DocumentFields(id="Paper", title="Name", text="Abstract")
    expected = r.Document("a", "Cats", "They sleep.", {"id": "7", "text": "note"})
    assert r.load_documents(file, fields) == {"a": expected}
    for stored in (None, 0):
        collection = r.load_collection(file, tmp_path / "cache", fields=fields, stored=stored)
        assert dict(collection.documents) == {"a": expected}
    (part,) = FileTexts(file, fields).plan_shards(9).ranges
    assert part.read() == {"a": "Cats\nThey sleep."}


def test_documents_that_stay_in_their_file_are_indexed_anew_for_other_fields(
    tmp_path: Path,
) -> None:
    file = write_jsonl(tmp_path / "d.jsonl", [{"id": "a", "text": "one", "other": "two"}])
    cache = tmp_path / "cache"
    for fields, text in ((r.DocumentFields(), "one"), (r.DocumentFields(text="other"), "two")) * 2:
        collection = r.load_collection(file, cache, fields=fields, stored=0)
        assert dict(collection.contents()) == {"a": text}


def test_processes_that_read_a_large_file_take_the_names_of_its_fields(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = [{"pk": f"d{i}", "abstract": f"text {i}"} for i in range(300)]
    file = write_jsonl(tmp_path / "d.jsonl", rows)
    monkeypatch.setattr(_document_lines, "SINGLE_PROCESS_BYTES", 0)
    monkeypatch.setattr(_document_lines, "RANGE_BYTES", 1024)
    monkeypatch.setattr(_document_lines, "share_of_cores", lambda ranks: 2)
    fields = r.DocumentFields(id="pk", text="abstract")
    collection = r.load_collection(file, tmp_path / "cache", fields=fields, stored=0)
    assert dict(collection.contents()) == {row["pk"]: row["abstract"] for row in rows}


@pytest.mark.parametrize(
    ("row", "fields", "message"),
    [
        pytest.param(
            {"name": "a", "abstract": "x"},
            r.DocumentFields(),
            r"with an id \('_id', 'id', .* and a text \('text', 'contents', .*got 'name', "
            r"'abstract'"
            r".*--id-field.*--text-field",
            id="neither id nor text",
        ),
        pytest.param(
            {"docid": "a", "doc_id": "b", "text": "x"},
            r.DocumentFields(),
            r"one field with an id, got 'docid', 'doc_id'. Choose one: --id-field",
            id="two ids",
        ),
        pytest.param(
            {"id": "a", "contents": "x", "body": "y"},
            r.DocumentFields(),
            r"one field with a text, got 'contents', 'body'. Choose one: --text-field",
            id="two texts",
        ),
        pytest.param(
            {"id": "a", "text": "x"},
            r.DocumentFields(title="headline", text="abstract"),
            r"with a title \('headline'\) and a text \('abstract'\), got 'id', 'text'",
            id="named ones",
        ),
    ],
)
@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])
def test_one_error_names_all_fields_that_are_missing(
    tmp_path: Path,
    suffix: str,
    row: dict[str, Any],
    fields: r.DocumentFields,
    message: str,
) -> None:
    file = WRITERS[suffix](tmp_path / f"documents{suffix}", [row])
    with pytest.raises(DataError, match=rf"documents{suffix}(:|, row )[12]: expected .*{message}"):
        r.load_documents(file, fields)


def test_the_built_in_collection_has_no_fields_to_name() -> None:
    with pytest.raises(ValueError, match=r"fields: expected none with .* pydocs"):
        r.load_collection("pydocs", fields=r.DocumentFields(text="body"))


def test_csv_keeps_commas_quotes_line_breaks_and_long_fields(tmp_path: Path) -> None:
    rows = [*ROWS, {"id": "c", "text": "long " * 50_000}]
    documents = r.load_documents(write_csv(tmp_path / "documents.csv", rows))
    assert {name: document.text for name, document in documents.items()} == {
        row["id"]: row["text"] for row in rows
    }


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param('id,text\na,"x\n', r":2: expected comma-separated values", id="open quote"),
        pytest.param("id,text\na,x\nb\n", r":3: expected 2 fields as in the header", id="few"),
        pytest.param("id,text\n\na,x,y\n", r":3: expected 2 fields .* got 3", id="many"),
        pytest.param(
            "id,id,text\na,b,x\n",
            r":1: expected distinct column names, got 'id' twice",
            id="name twice",
        ),
        pytest.param(
            "id;text\na;x\n", r":1: expected columns .*by commas, got 'id;text'", id="semicolons"
        ),
        pytest.param(
            'id,text\n"a\nb",x\n"a\nb",y\n', r":4: 'id' 'a\\nb' is a duplicate", id="id twice"
        ),
        pytest.param(
            "id,text\n", "expected at least one line with a row, got none", id="names alone"
        ),
    ],
)
def test_malformed_csv_is_refused_at_its_line(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "documents.csv").write_text(content, encoding="utf-8")
    with pytest.raises(DataError, match=rf"documents\.csv.*{message}"):
        r.load_documents(tmp_path / "documents.csv")


def write_collection(folder: Path, suffix: str, judgements: list[dict[str, Any]]) -> Path:
    """A folder with documents d1 and d2, queries q1 and q2, and judgements in a format."""
    (folder / "qrels").mkdir()
    for name, kind in (("corpus", "d"), ("queries", "q")):
        write_jsonl(
            folder / f"{name}.jsonl",
            [{"_id": f"{kind}{number}", "text": "x"} for number in (1, 2)],
        )
    WRITERS[suffix](folder / "qrels" / f"test{suffix}", judgements)
    return folder


def test_a_collection_of_csv_files_is_read(tmp_path: Path) -> None:
    (tmp_path / "qrels").mkdir()
    write_csv(tmp_path / "corpus.csv", [{"docid": "d1", "title": "T", "contents": "x", "year": 1}])
    write_csv(tmp_path / "queries.csv", [{"qid": "q1", "query": "cats, dogs"}])
    write_csv(tmp_path / "qrels" / "test.csv", [{"qid": "q1", "docid": "d1", "rel": 2}])
    collection = r.load_beir(tmp_path)
    assert collection.documents == {"d1": r.Document("d1", "T", "x", {"year": "1"})}
    assert collection.queries == {"q1": "cats, dogs"}
    assert collection.qrels == {"test": {"q1": {"d1": 2}}}
    assert r.load_queries(tmp_path / "queries.csv") == collection.queries


@pytest.mark.parametrize("suffix", WRITERS)
def test_usual_names_of_judgements_are_recognised_in_every_format(
    tmp_path: Path,
    suffix: str,
) -> None:
    judgements = [{"qid": "q1", "docid": "d1", "relevance": 2}]
    collection = r.load_beir(write_collection(tmp_path, suffix, judgements))
    assert collection.qrels == {"test": {"q1": {"d1": 2}}}


@pytest.mark.parametrize(
    ("grade", "expected"),
    [
        pytest.param(2, 2, id="integer"),
        pytest.param("2", 2, id="digits"),
        pytest.param("2.0", 2, id="digits of a whole float"),
        pytest.param(" -1 ", -1, id="negative digits between blanks"),
        pytest.param(2.0, 2, id="whole float"),
    ],
)
@pytest.mark.parametrize("suffix", WRITERS)
def test_whole_grades_are_read_alike_in_every_format(
    tmp_path: Path,
    suffix: str,
    grade: object,
    expected: int,
) -> None:
    judgements = [{"query-id": "q1", "corpus-id": "d1", "score": grade}]
    collection = r.load_beir(write_collection(tmp_path, suffix, judgements))
    assert collection.qrels["test"] == {"q1": {"d1": expected}}


@pytest.mark.parametrize(
    "grade",
    [
        pytest.param("1_0", id="underscore"),
        pytest.param("\u0661", id="digit of another script"),
        pytest.param("1e0", id="exponent"),
        pytest.param("1.5", id="digits of a fraction"),
        pytest.param("nan", id="text of no number"),
        pytest.param("9" * 5000, id="thousands of digits"),
        pytest.param("", id="empty"),
        pytest.param(0.5, id="fraction"),
    ],
)
@pytest.mark.parametrize("suffix", WRITERS)
def test_grades_that_are_not_whole_are_refused_alike_in_every_format(
    tmp_path: Path,
    suffix: str,
    grade: object,
) -> None:
    judgements = [{"query-id": "q1", "corpus-id": "d1", "score": grade}]
    folder = write_collection(tmp_path, suffix, judgements)
    with pytest.raises(DataError, match=rf"test{suffix}(:|, row )[12]: expected an integer grade"):
        r.load_beir(folder)


@pytest.mark.parametrize(
    ("judgement", "message"),
    [
        pytest.param(
            {"query-id": "q1", "corpus-id": "d1", "score": None},
            "expected an integer grade, got null in 'score'",
            id="null",
        ),
        pytest.param(
            {"query-id": "q1", "corpus-id": "d1", "score": True},
            "expected an integer grade, got True in 'score'",
            id="boolean",
        ),
        pytest.param(
            {"query-id": None, "corpus-id": "d1", "score": 1},
            "expected an id in 'query-id', .*got null",
            id="null as an id",
        ),
        pytest.param(
            {"query-id": "q1", "corpus-id": ["d1"], "score": 1},
            r"expected an id in 'corpus-id', .*got \['d1'\]",
            id="list as an id",
        ),
        pytest.param(
            {"topic": "q1", "value": 1},
            r"expected the fields corpus-id \(or .*\), score \(or .*\), got 'topic', 'value'",
            id="two fields missing",
        ),
        pytest.param(
            {"qid": "q1", "topic": "q2", "docid": "d1", "rel": 1},
            "expected one query-id field, got 'qid', 'topic'",
            id="two queries",
        ),
    ],
)
def test_a_judgement_says_what_is_wrong_with_it(
    tmp_path: Path,
    judgement: dict[str, Any],
    message: str,
) -> None:
    folder = write_collection(tmp_path, ".jsonl", [judgement])
    with pytest.raises(DataError, match=rf"test\.jsonl:1: {message}"):
        r.load_beir(folder)


@pytest.mark.parametrize("suffix", WRITERS)
def test_contradictory_judgements_are_named_with_all_their_lines(
    tmp_path: Path,
    suffix: str,
) -> None:
    pairs = [("q1", "d1", 1), ("q2", "d2", 0), ("q1", "d1", 2), ("q1", "d1", 1), ("q2", "d2", 3)]
    judgements = [
        {"query-id": query, "corpus-id": document, "score": grade}
        for query, document, grade in pairs
    ]
    folder = write_collection(tmp_path, suffix, judgements)
    with pytest.raises(DataError) as caught:
        r.load_beir(folder)
    message = str(caught.value).replace(f"{folder}/qrels/", "")
    first = 1 if suffix in (".jsonl", ".parquet") else 2
    at = f"test{suffix}{', row ' if suffix == '.parquet' else ':'}"
    assert "got several of 2 pair(s)" in message
    assert (
        f"query 'q1' and document 'd1': 1 in {at}{first}, 2 in {at}{first + 2}, 1 in "
        f"{at}{first + 3}"
    ) in message
    assert f"query 'q2' and document 'd2': 0 in {at}{first + 1}, 3 in {at}{first + 4}" in message


def test_equal_judgements_given_twice_count_once(tmp_path: Path) -> None:
    judgements = [{"query-id": "q1", "corpus-id": "d1", "score": 1}] * 2
    collection = r.load_beir(write_collection(tmp_path, ".jsonl", judgements))
    assert collection.qrels["test"] == {"q1": {"d1": 1}}


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        pytest.param(
            ['["q", ["a", 1.5], ["b", null]]'],
            "line 1: .*the score of 'b' is null, which is not a number",
            id="null",
        ),
        pytest.param(
            ['["q", ["a", 1.5], ["b", 0.5]]', '["q", ["a", true], ["b", 0.5]]'],
            "line 2: .*the score of 'a' is true, which is not a number",
            id="boolean",
        ),
        pytest.param(
            ['["q", ["a", "1.5"], ["b", 0.5]]'],
            "line 1: .*the score of 'a' is \"1.5\", which is not a number",
            id="text",
        ),
        pytest.param(
            ['["q", ["a", NaN], ["b", 0.5]]'],
            "line 1: .*the score of 'a' is nan, which is not a finite float32",
            id="not a number",
        ),
        pytest.param(
            ['["q", ["a", 1e39], ["b", 0.5]]'],
            "line 1: .*the score of 'a' is 1e\\+39, which is not a finite float32",
            id="above float32",
        ),
        pytest.param(
            ['["q", ["a", 1.5], ["b", 0.5]]', '["q", "c", "d"]'],
            "line 2: .*'c' has no score, but earlier rows have one",
            id="scores end",
        ),
        pytest.param(
            ['["q", "c", "d"]', '["q", ["a", 1.5], ["b", 0.5]]'],
            "line 2: .*'a' has a score, but earlier rows have none",
            id="scores begin",
        ),
    ],
)
def test_a_score_of_published_negatives_that_is_none_is_named_with_its_line(
    tmp_path: Path,
    lines: list[str],
    message: str,
) -> None:
    file = tmp_path / "negatives.jsonl"
    file.write_text("\n".join(lines), encoding="utf-8")
    with pytest.raises(DataError, match=rf"negatives\.jsonl: {message}"):
        r.read_training_rows(file)
