"""Collections: what the BEIR layout holds, and as they come in production: compressed, Parquet,
datasets, TREC.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.recipes.small import small_collection
from tests.refusals import refused
from tests.retrieval.conftest import DOCUMENTS, QUERIES
from tilefold import retrieval as r
from tilefold.retrieval.common.provenance import TextsDigest, texts_digest
from tilefold.retrieval.data import document_lines as _document_lines
from tilefold.retrieval.data import lazy_documents as stored
from tilefold.retrieval.data.shard_texts import FileTexts
from tilefold.retrieval.errors import DataError


def test_a_beir_folder_is_read_with_titles_grades_and_splits(beir: Path) -> None:
    collection = r.load_beir(beir)
    assert collection.name == "tiny"
    assert collection.documents["d1"].contents == "Cats\nCats sleep all day."
    assert collection.documents["d2"].contents == "Dogs chase cats."
    assert collection.qrels == {"test": {"q1": {"d1": 2, "d2": 0}, "q2": {"d3": 1}}}
    assert collection.split_queries("test") == {"q1": "sleeping cats", "q2": "trees"}
    assert collection.pairs("test") == [("q1", "d1"), ("q2", "d3")]
    with (beir / "qrels" / "test.tsv").open("a") as stream:
        stream.write("q2\tgone\t1\n")
    assert r.load_beir(beir, unknown="drop") == collection


def test_a_collection_survives_saving_and_loading(beir: Path, tmp_path: Path) -> None:
    (beir / "queries.jsonl").write_text(
        '{"_id": "q1", "text": "\\ud800 cat"}\n{"_id": "q2", "text": "b"}\n',
    )
    collection = r.load_beir(beir)
    assert collection.queries == {"q1": "\ud800 cat", "q2": "b"}
    collection.save_beir(tmp_path / "copy")
    assert replace(r.load_beir(tmp_path / "copy"), name="tiny") == collection
    refused(FileExistsError, "overwrite=True", collection.save_beir, tmp_path / "copy")
    collection.save_beir(tmp_path / "copy", overwrite=True)
    assert replace(r.load_beir(tmp_path / "copy"), name="tiny") == collection
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy", "tiny"]
    (tmp_path / "copy" / "thesis.txt").write_text("years of work")
    refused(
        FileExistsError,
        r"other files \(thesis.txt\).*nothing was overwritten",
        collection.save_beir,
        tmp_path / "copy",
        overwrite=True,
    )


def test_an_interrupted_save_leaves_no_trace(beir: Path, tmp_path: Path) -> None:
    collection = r.load_beir(beir)

    class Interrupting(dict[str, dict[str, dict[str, int]]]):
        def items(self):  # type: ignore[no-untyped-def]
            raise KeyboardInterrupt

    collection.qrels = Interrupting()
    with pytest.raises(KeyboardInterrupt):
        collection.save_beir(tmp_path / "half")
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]


def test_blank_lines_a_byte_order_mark_integer_ids_and_no_header_are_tolerated(beir: Path) -> None:
    (beir / "corpus.jsonl").write_text('\ufeff{"_id": 7, "text": "seven"}\n\n', encoding="utf-8")
    for header in ("", "query-id\tcorpus-id\tscore\n"):
        (beir / "qrels" / "test.tsv").write_text(f"{header}q1\t7\t1\n\n")
        assert r.load_beir(beir).pairs("test") == [("q1", "7")]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "corpus.jsonl",
            '{"_id": "d1", "text": "x"}\n{"_id": "d',
            r"corpus.jsonl:2: .*malformed JSON",
        ),
        ("corpus.jsonl", "[1]\n", r"corpus.jsonl:1: .*got list"),
        ("corpus.jsonl", "[" * 100_000, r"corpus.jsonl:1: .*malformed JSON"),
        (
            "corpus.jsonl",
            '{"_id": "\\ud800", "text": ""}\n',
            r"corpus.jsonl:1: '_id' must be text that UTF-8 can hold",
        ),
        (
            "corpus.jsonl",
            '{"text": "x"}\n',
            r"corpus.jsonl:1: expected fields with an id \('_id', .*got 'text'. Rename",
        ),
        (
            "corpus.jsonl",
            '{"id": "a", "words": "x"}\n',
            r"corpus.jsonl:1: expected fields with a text \('text', .*got 'id', 'words'.",
        ),
        (
            "corpus.jsonl",
            '{"id": "a", "text": null}\n',
            r"corpus.jsonl:1: 'text' must be a string, got None",
        ),
        (
            "corpus.jsonl",
            '{"_id": "a", "text": "x"}\n' * 2,
            r"corpus.jsonl:2: '_id' 'a' was given before",
        ),
        (
            "corpus.jsonl",
            '{"_id": "a", "text": 3}\n',
            r"corpus.jsonl:1: 'text' must be a string, got 3",
        ),
        ("corpus.jsonl", "", r"corpus.jsonl: expected at least one line"),
        ("queries.jsonl", "\n", r"queries.jsonl: expected at least one line"),
        ("qrels/test.tsv", "q1\td1\n", r"test.tsv:1: expected 3 tab-separated fields .*got 2"),
        ("qrels/test.tsv", "q1\td1\tgood\n", r"test.tsv:1: expected an integer grade, got 'good'"),
        ("qrels/test.tsv", "q1\td1\t1.5\n", r"test.tsv:1: expected an integer grade, got '1.5'"),
        ("qrels/test.tsv", "q1\td1\t1\nq1\td1\t2\n", r"1 in .*test.tsv:1, 2 in .*test.tsv:2"),
        (
            "qrels/test.tsv",
            "q1\td1\t1\nq9\td1\t1\nq1\td8\t1\n",
            r"test.tsv:2: unknown query 'q9'; 2 judgement",
        ),
        (
            "qrels/test.tsv",
            "query-id\tcorpus-id\tscore\n",
            r"test.tsv: expected at least one .* got no judgement",
        ),
    ],
)
def test_a_bad_line_is_reported_by_file_and_number(
    beir: Path,
    name: str,
    content: str,
    message: str,
) -> None:
    (beir / name).write_text(content, encoding="utf-8")
    refused(DataError, message, r.load_beir, beir)


@pytest.mark.parametrize("name", ["corpus.jsonl", "qrels/test.tsv"])
def test_a_bad_byte_is_found_by_line_and_by_byte(beir: Path, name: str) -> None:
    lines = (
        [b'{"_id": "d%d", "text": "x"}\n' % i for i in range(3000)]
        if name == "corpus.jsonl"
        else []
    )
    lines += [b'{"_id": "last", "text": "caf\xe9"}\n']
    (beir / name).write_bytes(b"".join(lines))
    at = b"".join(lines).index(b"\xe9")
    refused(
        DataError,
        rf"{name}:{len(lines)}: .* the byte 0xe9 at byte {at} of the text",
        r.load_beir,
        beir,
    )


@pytest.mark.parametrize("name", ["a\tb", "a\nb", "a\rb", ""])
def test_ids_that_the_layout_cannot_hold_are_refused_and_nothing_is_written(
    name: str,
    tmp_path: Path,
) -> None:
    collection = r.Collection(
        "x",
        {name: r.Document(name, "", "text")},
        {"q": "text"},
        {"test": {"q": {name: 1}}},
    )
    refused(
        DataError,
        "the BEIR layout holds no empty id",
        collection.save_beir,
        tmp_path / "saved",
    )
    assert not list(tmp_path.iterdir())


def test_what_is_not_there_is_said_with_what_is(beir: Path) -> None:
    refused(ValueError, r"tiny has test, got 'dev'", lambda: r.load_beir(beir).pairs("dev"))
    said = r"msmarco: no such file or folder, expected 'pydocs', or the path of a BEIR folder"
    refused(FileNotFoundError, said, r.load_collection, "msmarco")
    for name in ("queries.jsonl", "corpus.jsonl"):
        (beir / name).unlink()
        refused(
            FileNotFoundError,
            rf"{name}: no such file.* A BEIR folder has corpus\.jsonl",
            r.load_beir,
            beir,
        )


def test_pydocs_has_its_size_and_cuts_queries_from_their_documents(pydocs: r.Collection) -> None:
    def normal(text: str) -> str:
        return " ".join(re.findall(r"\w+", text.casefold()))

    assert len(pydocs.documents) >= 3000
    assert len(pydocs.qrels["test"]) >= 300
    assert len(pydocs.qrels["train"]) > 2 * len(pydocs.qrels["test"])
    assert not set(pydocs.qrels["train"]) & set(pydocs.qrels["test"])
    assert set(pydocs.queries) == set(pydocs.qrels["train"]) | set(pydocs.qrels["test"])
    for document in pydocs.documents.values():
        assert document.id == document.title
        assert len(document.text.split()) >= 8, document
    openings = [normal(document.text.split("\n", 1)[0]) for document in pydocs.documents.values()]
    texts = [normal(text) for text in pydocs.queries.values()]
    assert len(set(texts)) == len(texts) and not set(texts) & set(openings)
    bodies = [document.text for document in pydocs.documents.values()]
    assert len(set(bodies)) == len(bodies)
    ids = set(pydocs.documents)
    assert {"json.dumps", "pathlib.Path", "builtins.sorted", "itertools.chain"} <= ids
    assert not [
        name for name in ids if re.match(r"(test|idlelib|turtledemo|site-packages)\b", name)
    ]
    assert pydocs.queries["q-json.dumps"] == "Serialize ``obj`` to a JSON formatted ``str``"
    assert "Serialize ``obj`` to" not in pydocs.documents["json.dumps"].text


def test_pydocs_is_cached_and_a_damaged_cache_is_built_again(
    pydocs: r.Collection,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert (
        r.load_collection("pydocs", cache_dir=tmp_path) == pydocs
    )  # built twice, the same both times
    builds: Any = []
    monkeypatch.setattr(
        "tilefold.retrieval.data.datasets.build_pydocs",
        lambda: builds.append(1) or pydocs,
    )
    (folder,) = (tmp_path / "pydocs").iterdir()
    assert r.load_collection("pydocs", cache_dir=tmp_path) == pydocs
    assert not builds
    (folder / "queries.jsonl").write_text("{broken")
    assert r.load_collection("pydocs", cache_dir=tmp_path) == pydocs
    assert builds == [1]
    assert r.load_beir(folder).queries == pydocs.queries
    (tmp_path / "file").write_text("")
    assert (
        r.load_collection("pydocs", cache_dir=tmp_path / "file").queries == pydocs.queries
    )  # not writable


def parquet(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)


def test_a_corpus_alone_is_a_collection(beir: Path) -> None:
    whole = r.load_beir(beir)
    (beir / "qrels" / "test.tsv").write_text("q9\td9\t1\n")
    assert not r.load_beir(beir, documents_only=True).queries
    (beir / "queries.jsonl").unlink()
    shutil.rmtree(beir / "qrels")
    alone = r.load_beir(beir)
    assert (alone.documents, alone.queries, alone.qrels) == (whole.documents, {}, {})
    assert r.load_collection(beir / "corpus.jsonl") == replace(alone, name="corpus")


def test_compressed_files_are_read_and_damaged_or_double_ones_named(beir: Path) -> None:
    whole = r.load_beir(beir)
    for name in ("corpus.jsonl", "queries.jsonl", "qrels/test.tsv"):
        (beir / f"{name}.gz").write_bytes(gzip.compress((beir / name).read_bytes()))
        (beir / name).unlink()
    assert r.load_beir(beir) == whole
    (beir / "corpus.jsonl.gz").write_bytes((beir / "corpus.jsonl.gz").read_bytes()[:-12])
    refused(DataError, r"corpus\.jsonl\.gz: expected a whole gzip file", r.load_beir, beir)
    (beir / "corpus.jsonl").write_text("")
    refused(
        DataError,
        r"expected one of corpus\.jsonl, corpus\.jsonl\.gz, got all",
        r.load_beir,
        beir,
    )


def test_parquet_files_and_folders_of_them_are_read(beir: Path) -> None:
    whole = r.load_beir(beir)
    for name in ("corpus.jsonl", "queries.jsonl", "qrels/test.tsv"):
        (beir / name).unlink()
    for number, row in enumerate(DOCUMENTS):
        parquet(beir / "corpus" / f"corpus-0000{number}-of-00003.parquet", [row])
    parquet(beir / "queries.parquet", QUERIES)
    judged = [("q1", "d1", 2), ("q1", "d2", 0), ("q2", "d3", 1)]
    for number, judgement in enumerate(judged):
        named = dict(zip(("query-id", "corpus-id", "score"), judgement, strict=True))
        parquet(beir / "qrels" / f"test-0000{number}-of-00003.parquet", [named])
    assert r.load_beir(beir) == whole
    parquet(beir / "queries.parquet", [*QUERIES, {"_id": "q2", "text": "again"}])
    refused(DataError, r"queries\.parquet, row 3: '_id' 'q2' was given before", r.load_beir, beir)
    (beir / "queries.parquet").write_bytes(b"no Parquet")
    refused(DataError, r"queries\.parquet: expected a Parquet file", r.load_beir, beir)


def test_saved_datasets_are_read_as_parts_and_alone(beir: Path, tmp_path: Path) -> None:
    whole = r.load_beir(beir)
    corpus = datasets.Dataset.from_list(DOCUMENTS)
    datasets.DatasetDict({"corpus": corpus}).save_to_disk(str(tmp_path / "alone"))
    assert r.load_collection(tmp_path / "alone").documents == whole.documents
    (beir / "corpus.jsonl").unlink()
    corpus.save_to_disk(str(beir / "corpus"))
    assert r.load_beir(beir) == whole
    datasets.DatasetDict({"a": corpus, "b": corpus}).save_to_disk(str(tmp_path / "two"))
    refused(
        DataError,
        "two: expected a dataset of one split, got a, b",
        r.load_collection,
        tmp_path / "two",
    )


def test_the_files_of_ms_marco_are_read_as_they_are(tmp_path: Path) -> None:
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
    found = r.load_beir(tmp_path)
    assert found.documents["1"].contents == "Another passage." and list(found.queries) == [
        "1048585",
        "2",
        "121352",
    ]
    assert found.qrels == {"dev.small": {"1048585": {"0": 1}}, "train": {"121352": {"1": 1}}}
    assert found.pairs("train") == [("121352", "1")]
    assert list(r.load_beir(tmp_path, splits=["train"]).qrels) == ["train"]
    (tmp_path / "queries.dev.tsv").write_text("1048585\tanother\n")
    with pytest.raises(ValueError, match="query '1048585' has another text in a file before"):
        r.load_beir(tmp_path)


def test_judgements_and_topics_of_trec_are_read(beir: Path) -> None:
    whole = r.load_beir(beir)
    (beir / "qrels" / "test.tsv").unlink()
    (beir / "qrels" / "test.qrels").write_text("q1 0 d1 2\nq1 0 d2 0\nq2\t0\td3\t1\n")
    (beir / "queries.jsonl").unlink()
    (beir / "queries.trec").write_text(
        "<top>\n<num> Number: q1\n<title> sleeping\ncats\n<desc> Description:\nwhy\n</top>\n"
        "<topics><topic "
        'number="q2"><query>trees</query><question>which?</question></topic></topics>\n',
    )
    assert r.load_beir(beir) == whole
    (beir / "queries.trec").write_text("1\ta query")
    refused(DataError, r"expected TREC topics .*, got '1\\ta query'", r.load_beir, beir)
    (beir / "queries.trec").write_text("<top><num>1</num></top>")
    refused(DataError, r"queries\.trec, topic 1: expected a <num> and a <title>", r.load_beir, beir)


SPACED = "  two  blanks "


@pytest.mark.parametrize(
    ("name", "content"),
    [
        pytest.param("q.jsonl", f'{{"_id": "1", "text": "{SPACED}"}}\n', id="json lines"),
        pytest.param("q.tsv", f"1\t{SPACED}\n", id="tsv"),
        pytest.param("q.txt", f"{SPACED}\n", id="bare lines"),
        pytest.param("q.txt", f"{SPACED}\r\n", id="bare lines of Windows"),
    ],
)
def test_every_file_of_queries_keeps_the_blanks_of_a_query(
    tmp_path: Path,
    name: str,
    content: str,
) -> None:
    (tmp_path / name).write_bytes(content.encode())
    assert r.load_queries(tmp_path / name) == {"1": SPACED}


def test_topics_keep_blanks_within_a_line_and_leave_out_those_next_to_tags(tmp_path: Path) -> None:
    topics = "<top>\n<num> 1\n<title>  two  blanks \n  and a line\n\n<desc>\nwhy\n</top>\n"
    escaped = '<topic number="2"><query>&#32;two  blanks&#32;</query></topic>\n'
    (tmp_path / "q.trec").write_text(topics + escaped)
    expected = {"1": "two  blanks and a line", "2": " two  blanks "}
    assert r.load_queries(tmp_path / "q.trec") == expected


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        pytest.param(f"{SPACED}\n", ("1", SPACED), id="a text keeps its blanks"),
        pytest.param(f" q1 \t{SPACED}\n", (" q1 ", SPACED), id="so do an id and its text"),
        pytest.param("q1\t\n", ("q1", ""), id="nothing after the tab is an empty text"),
        pytest.param("q1\ta\tb\n", ("q1", "a\tb"), id="a text may hold tabs"),
        pytest.param("\ufeffq1\twords\n", ("q1", "words"), id="a byte order mark is no text"),
    ],
)
def test_a_line_of_standard_input_is_read_like_one_of_a_file(
    tmp_path: Path,
    line: str,
    expected: tuple[str, str],
) -> None:
    assert r.query_of_line(line, 1) == expected
    (tmp_path / "q.txt").write_text(line)
    assert r.load_queries(tmp_path / "q.txt") == dict([expected])


def test_a_line_without_an_id_before_its_tab_is_refused() -> None:
    refused(DataError, "line 3: expected an id before the tab", r.query_of_line, "\ttext\n", 3)


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
    ("id\ttitle\ttext\n", "1\tCats\n", None),
]


@pytest.mark.parametrize(("header", "line", "expected"), FRAMES)
@pytest.mark.parametrize("name", ["corpus.tsv", "corpus.txt", "corpus.tsv.gz"])
def test_a_first_line_that_names_columns_is_no_document(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    name: str,
    header: str,
    line: str | None,
    expected: Any,
) -> None:
    path = tmp_path / name
    content = (header + (line or "2\tdogs\n")).encode()
    path.write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    if expected is None:
        said = "2: expected 3 fields as in the first line, which names them, got 2"
        if line is None:
            said = (
                "1: expected a row, or names of columns .* put it below another one, if it is a row"
            )
        refused(DataError, f"{name}:{said}", r.load_collection, path)
        return
    found = r.load_collection(path).documents
    assert {key: (document.title, document.text) for key, document in found.items()} == expected
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == bool(header) and all(
        f"{name}:1: this line is taken as names of columns" in s for s in told
    )
    assert FileTexts(path).plan_shards(10).count == 1


def test_queries_are_read_from_files_of_every_kind_and_names_of_columns_are_none(
    beir: Path,
    tmp_path: Path,
) -> None:
    whole = r.load_beir(beir)
    (tmp_path / "lines.txt").write_text("sleeping cats\n\nq2\ttrees\n")
    assert r.load_queries(tmp_path / "lines.txt") == {"1": "sleeping cats", "q2": "trees"}
    assert r.load_queries(beir / "queries.jsonl") == whole.queries
    (beir / "queries.jsonl").unlink()
    refused(
        FileNotFoundError,
        r"gone\.txt: no such file with queries",
        r.load_queries,
        tmp_path / "gone.txt",
    )
    lines = "qid\tquery\n" + "".join(f"{row['_id']}\t{row['text']}\n" for row in QUERIES)
    for name in ("queries.tsv", "queries.txt"):
        (beir / name).write_text(lines)
        assert r.load_queries(beir / name) == whole.queries
    assert r.load_beir(beir) == whole
    (beir / "queries.txt").write_text("\n\nquery\nwhat is a topic\n")  # one word may be a query
    assert r.load_queries(beir / "queries.txt") == {"3": "query", "4": "what is a topic"}
    (beir / "queries.txt").write_text("qid\twhat is a qid\n")
    refused(
        DataError,
        r"queries\.txt:1: expected a row, or names of columns",
        r.load_queries,
        beir / "queries.txt",
    )
    refused(
        DataError,
        "line 1: expected a query, got names of columns",
        r.query_of_line,
        "qid\tquery\n",
        1,
    )


def test_names_of_columns_say_which_is_which_in_judgements_and_a_query_called_qid_is_one(
    beir: Path,
) -> None:
    whole = r.load_beir(beir)
    for lines in (
        "docid\tqid\trelevance\nd1\tq1\t2\nd2\tq1\t0\nd3\tq2\t1\n",
        "topic iteration document rel\nq1 0 d1 2\nq1 0 d2 0\nq2 0 d3 1\n",
        "\nquery_id\tdoc_id\tlabel\nq1\td1\t2\nq1\td2\t0\nq2\td3\t1\n",
    ):
        (beir / "qrels" / "test.tsv").write_text(lines)
        assert r.load_beir(beir) == whole
    (beir / "queries.jsonl").write_text('{"_id": "qid", "text": "cats"}\n')
    (beir / "qrels" / "test.tsv").write_text("qid\td1\t1\n")
    assert r.load_beir(beir).qrels["test"] == {"qid": {"d1": 1}}
    (beir / "qrels" / "test.tsv").write_text("qid\tanswer\tgain\nqid\td1\t1\n")
    refused(
        DataError,
        r"test\.tsv:1: .*got 'gain'.*names of columns are query-id, corpus-id, score",
        r.load_beir,
        beir,
    )


STORED = {
    "jsonl": [
        '{"_id": "d0", "title": "Cats", "text": "sleep"}',
        "",
        '{"id": 7, "text": "\\u732b und Hunde"}',
        "\u3000",
        '{"_id": "ü", "title": null, "text": "trees"}',
    ],
    "tsv": ["d0\tCats\tsleep", "", "7\t\u732b und Hunde", "\u3000", "ü\ttrees"],
}


@pytest.fixture(params=["jsonl"])
def corpus(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(stored, "SETTLED_SECONDS", 0.0)
    file = tmp_path / f"corpus.{request.param}"
    file.write_text("\ufeff" + "\r\n".join(STORED[request.param]), encoding="utf-8", newline="")
    return file


def opened(path: Path) -> tuple[object, dict[str, object], str]:
    collection = load(path)
    return (
        type(collection.documents),
        dict(collection.documents),
        texts_digest(collection.contents()),
    )


def load(path: Path, cache: Path | None = None) -> r.Collection:
    return r.load_collection(path, cache or path.parent / "cache", documents_only=True, stored=0)


@pytest.mark.parametrize("size", [1, 8, 1 << 18])
@pytest.mark.parametrize("corpus", ["jsonl", "tsv"], indirect=True)
def test_documents_read_one_by_one_are_those_of_the_whole_file(
    corpus: Path,
    size: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(_document_lines, "RANGE_BYTES", size)
    monkeypatch.setattr(
        _document_lines,
        "SINGLE_PROCESS_BYTES",
        1 if size == 8 else 1 << 27,
    )  # by several processes
    whole = r.load_documents(corpus)
    contents = {name: document.contents for name, document in whole.items()}
    for _ in range(2):  # the second time from the cache
        assert opened(corpus) == (stored.LazyDocuments, whole, texts_digest(contents))
    collection = load(corpus)
    documents, texts = collection.documents, collection.contents()
    assert list(documents) == list(whole) == ["d0", "7", "ü"] and len(documents) == len(texts) == 3
    assert list(documents.values()) == list(whole.values()) and list(texts.values()) == list(
        contents.values(),
    )
    assert (
        "7" in documents
        and "8" not in texts
        and documents.get("8") is None
        and texts["7"] == contents["7"]
    )
    assert texts.pairs_at([2, 0]) == [("ü", contents["ü"]), ("d0", contents["d0"])]  # type: ignore[attr-defined]
    assert (
        collection.positions_of(["ü", "8", "d0"]).tolist() == [2, -1, 0]
        and "ended early" not in caplog.text
    )
    assert r.Collection("c", whole, {}, {}).positions_of(["ü", "8", "d0"]).tolist() == [2, -1, 0]


def test_ids_with_one_key_are_told_apart(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (stored, _document_lines):
        monkeypatch.setattr(module, "id_key", lambda name: 3)
    assert opened(corpus)[1] == opened(corpus)[1] == r.load_documents(corpus)
    documents = load(corpus).documents
    assert "unknown" not in documents and documents["ü"].text == "trees"


def test_what_a_process_that_ends_has_not_read_is_read(
    corpus: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    whole = list(_document_lines.all_lines(corpus, corpus.stat().st_size))
    monkeypatch.setattr(_document_lines, "SINGLE_PROCESS_BYTES", 0)
    monkeypatch.setattr(_document_lines, "share_of_cores", lambda processes: 2)
    (corpus.parent / "noise").write_text("#!/bin/sh\necho 'something else, longer than a header'\n")
    (corpus.parent / "noise").chmod(0o755)
    for program in ("/bin/false", str(corpus.parent / "noise"), "/nowhere/python", None):
        monkeypatch.setattr("sys.executable", program)
        assert str(list(_document_lines.all_lines(corpus, corpus.stat().st_size))) == str(whole)
        assert ("a process that read its lines ended early" in caplog.text) == (program is not None)
        caplog.clear()
    assert (
        _document_lines._received(
            io.BytesIO(_document_lines._HEADER.pack(_document_lines._MARK, 1, 0) + b"1"),
        )
        is None
    )


def test_a_link_to_a_file_of_another_name_is_read_by_its_own(
    corpus: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    whole = opened(corpus)
    corpus.rename(corpus.parent / "blob")
    corpus.symlink_to(corpus.parent / "blob")
    monkeypatch.setattr(_document_lines, "SINGLE_PROCESS_BYTES", 0)
    assert opened(corpus) == whole and "ended early" not in caplog.text


def test_lines_of_several_kinds_have_the_keys_of_their_texts(tmp_path: Path) -> None:
    texts = {
        "1": "7",
        "01": "x" * 40,
        "a": " b\tc",
        "\u00e9": "\u732b",
        "9" * 18: "1",
        "9" * 19: "",
        "b": "\u732b",
    }
    lines = [f"{name}\t{text}\r\n".encode() for name, text in texts.items()]
    (tmp_path / "c.tsv").write_bytes(b"".join(lines))
    size = (tmp_path / "c.tsv").stat().st_size
    for length in range(1, 90):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_document_lines, "RANGE_BYTES", length)
            found = list(_document_lines.all_lines(tmp_path / "c.tsv", size))
        starts, keys, contents = np.concatenate([part.numbers for part in found], 1).tolist()
        assert starts == np.cumsum([0, *map(len, lines)])[:-1].tolist()
        assert keys == list(map(stored.id_key, texts)) and contents == list(
            map(stored.id_key, texts.values()),
        )
        digest = TextsDigest()
        digest.add_encoded(b"".join(part.encoded for part in found))
        assert digest.hexdigest() == texts_digest(texts)
    assert keys[0] == 1 and len({*keys}) == len(keys)


def test_a_file_that_changed_is_read_again(corpus: Path) -> None:
    before = opened(corpus)[2]
    found = corpus.stat()
    corpus.write_bytes(corpus.read_bytes().replace(b"trees", b"trams"))
    os.utime(corpus, ns=(found.st_atime_ns, found.st_mtime_ns))
    kind, documents, digest = opened(corpus)
    assert (
        kind is stored.LazyDocuments and digest != before and documents == r.load_documents(corpus)
    )
    assert opened(corpus) == (stored.LazyDocuments, documents, digest)
    reading = load(corpus).documents
    corpus.write_bytes(b" " * 30 + corpus.read_bytes())
    refused(DataError, "has changed since it was opened", lambda: reading["7"])
    corpus.unlink()
    refused(DataError, "or is gone", lambda: reading["7"])


def test_a_file_of_this_moment_and_a_small_one_are_not_kept(
    corpus: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stored, "SETTLED_SECONDS", 60.0)
    assert opened(corpus) == opened(corpus) and not (corpus.parent / "cache").exists()
    monkeypatch.setattr(stored, "SETTLED_SECONDS", 0.0)
    assert type(r.load_collection(corpus, stored=1 << 20).documents) is dict


@pytest.mark.parametrize(
    "damage",
    ["facts.json", "keys.npy", "order.npy", "starts.npy", "unwritable"],
)
def test_a_damaged_or_unwritable_cache_costs_only_time(corpus: Path, damage: str) -> None:
    whole = opened(corpus)
    if damage == "unwritable":
        assert dict(load(corpus, Path("/proc/nowhere")).documents) == whole[1]
        return
    (file,) = (corpus.parent / "cache").rglob(damage)
    file.write_bytes(file.read_bytes()[:50])
    assert opened(corpus) == whole
    assert opened(corpus)[0] is stored.LazyDocuments


def test_a_folder_is_read_at_its_corpus_and_malformed_lines_are_named(corpus: Path) -> None:
    folder = corpus.parent / "beir"
    small_collection().save_beir(folder)
    for _ in range(2):
        collection = load(folder)
        assert (collection.name, dict(collection.documents)) == (
            "beir",
            r.load_beir(folder).documents,
        )
    assert isinstance(collection.documents, stored.LazyDocuments) and not collection.queries
    corpus.write_text(json.dumps({"_id": "d0", "text": 3}))
    refused(DataError, "'text' must be a string", load, corpus)
    corpus.write_text("5\n")
    refused(DataError, r"corpus\.jsonl:1: expected one JSON object per line, got int", load, corpus)


def test_a_document_under_another_key_than_its_id_is_refused(tmp_path: Path) -> None:
    documents = {"a": r.Document("same", "", "x"), "b": r.Document("same", "", "y")}
    with pytest.raises(ValueError, match=r"Document\.id 'same' under the key 'a'"):
        r.Collection("c", documents, {}, {})
    collection = r.Collection("c", {"a": "x"}, {}, {})
    collection.documents["b"] = r.Document("a", "", "y")
    with pytest.raises(ValueError, match=r"Document\.id 'a' under the key 'b'"):
        collection.save_beir(tmp_path / "data")
