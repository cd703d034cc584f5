"""Collections in the layout of BEIR: reading, saving, and errors with file and line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tilefold import retrieval as r
from tilefold.retrieval.errors import DataError

GRADES = dict[str, dict[str, dict[str, int]]]


def test_a_beir_folder_is_read_with_titles_grades_and_splits(beir: Path) -> None:
    collection = r.load_beir(beir)
    assert collection.name == "tiny"
    assert collection.documents["d1"].contents == "Cats\nCats sleep all day."
    assert collection.documents["d2"].contents == "Dogs chase cats."
    assert collection.qrels == {"test": {"q1": {"d1": 2, "d2": 0}, "q2": {"d3": 1}}}
    assert collection.split_queries("test") == {"q1": "sleeping cats", "q2": "trees"}
    assert collection.pairs("test") == [("q1", "d1"), ("q2", "d3")]


def test_judgements_of_unknown_documents_are_dropped_on_request(beir: Path) -> None:
    collection = r.load_beir(beir)
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


def test_a_saved_collection_is_replaced_only_on_request(beir: Path, tmp_path: Path) -> None:
    collection = r.load_beir(beir)
    collection.save_beir(tmp_path / "copy")
    with pytest.raises(FileExistsError, match="overwrite=True"):
        collection.save_beir(tmp_path / "copy")
    collection.save_beir(tmp_path / "copy", overwrite=True)
    assert replace(r.load_beir(tmp_path / "copy"), name="tiny") == collection
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy", "tiny"]


def test_a_folder_with_other_files_is_not_replaced(beir: Path, tmp_path: Path) -> None:
    collection = r.load_beir(beir)
    collection.save_beir(tmp_path / "copy")
    (tmp_path / "copy" / "thesis.txt").write_text("years of work")
    message = r"other files \(thesis.txt\).*nothing was overwritten"
    with pytest.raises(FileExistsError, match=message):
        collection.save_beir(tmp_path / "copy", overwrite=True)


class InterruptedQrels(GRADES):
    """Judgements that cannot be written, as if the user pressed Ctrl-C."""

    def items(self) -> Any:
        raise KeyboardInterrupt


def test_an_interrupted_save_leaves_no_trace(beir: Path, tmp_path: Path) -> None:
    collection = r.load_beir(beir)
    collection.qrels = InterruptedQrels()
    with pytest.raises(KeyboardInterrupt):
        collection.save_beir(tmp_path / "half")
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]


@pytest.mark.parametrize("header", ["", "query-id\tcorpus-id\tscore\n"], ids=["none", "header"])
def test_blank_lines_a_byte_order_mark_and_integer_ids_are_read(beir: Path, header: str) -> None:
    (beir / "corpus.jsonl").write_text('\ufeff{"_id": 7, "text": "seven"}\n\n', encoding="utf-8")
    (beir / "qrels" / "test.tsv").write_text(f"{header}q1\t7\t1\n\n")
    assert r.load_beir(beir).pairs("test") == [("q1", "7")]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param(
            '{"_id": "d1", "text": "x"}\n{"_id": "d',
            r"corpus.jsonl:2: .*malformed JSON",
            id="shortened line",
        ),
        pytest.param("[1]\n", r"corpus.jsonl:1: .*got list", id="list"),
        pytest.param("[" * 100_000, r"corpus.jsonl:1: .*malformed JSON", id="deep nesting"),
        pytest.param(
            '{"_id": "\\ud800", "text": ""}\n',
            r"corpus.jsonl:1: '_id' must be valid Unicode",
            id="half a surrogate pair",
        ),
        pytest.param(
            '{"text": "x"}\n',
            r"corpus.jsonl:1: expected fields with an id \('_id', .*got 'text'. Rename",
            id="no id",
        ),
        pytest.param(
            '{"id": "a", "words": "x"}\n',
            r"corpus.jsonl:1: expected fields with a text \('text', .*got 'id', 'words'.",
            id="no text",
        ),
        pytest.param(
            '{"id": "a", "text": null}\n',
            r"corpus.jsonl:1: 'text' must be a string, got None",
            id="null as a text",
        ),
        pytest.param(
            '{"_id": "a", "text": "x"}\n' * 2,
            r"corpus.jsonl:2: '_id' 'a' is a duplicate",
            id="id twice",
        ),
        pytest.param(
            '{"_id": "a", "text": 3}\n',
            r"corpus.jsonl:1: 'text' must be a string, got 3",
            id="number as a text",
        ),
        pytest.param("", r"corpus.jsonl: expected at least one line", id="empty file"),
    ],
)
def test_a_bad_line_of_the_corpus_is_reported_by_file_and_number(
    beir: Path,
    content: str,
    message: str,
) -> None:
    (beir / "corpus.jsonl").write_text(content, encoding="utf-8")
    with pytest.raises(DataError, match=message):
        r.load_beir(beir)


def test_an_empty_file_of_queries_is_refused(beir: Path) -> None:
    (beir / "queries.jsonl").write_text("\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"queries.jsonl: expected at least one line"):
        r.load_beir(beir)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param(
            "q1\td1\n",
            r"test.tsv:1: expected 3 tab-separated fields .*got 2",
            id="too few fields",
        ),
        pytest.param(
            "q1\td1\tgood\n",
            r"test.tsv:1: expected an integer grade, got 'good'",
            id="word as a grade",
        ),
        pytest.param(
            "q1\td1\t1.5\n",
            r"test.tsv:1: expected an integer grade, got '1.5'",
            id="fraction as a grade",
        ),
        pytest.param(
            "q1\td1\t1\nq1\td1\t2\n",
            r"1 in .*test.tsv:1, 2 in .*test.tsv:2",
            id="two grades",
        ),
        pytest.param(
            "q1\td1\t1\nq9\td1\t1\nq1\td8\t1\n",
            r"test.tsv:2: unknown query 'q9'; 2 judgement",
            id="unknown query",
        ),
        pytest.param(
            "query-id\tcorpus-id\tscore\n",
            r"test.tsv: expected at least one .* got no judgement",
            id="header only",
        ),
    ],
)
def test_a_bad_line_of_judgements_is_reported_by_file_and_number(
    beir: Path,
    content: str,
    message: str,
) -> None:
    (beir / "qrels" / "test.tsv").write_text(content, encoding="utf-8")
    with pytest.raises(DataError, match=message):
        r.load_beir(beir)


@pytest.mark.parametrize(
    ("name", "n_lines_before"),
    [("corpus.jsonl", 3000), ("qrels/test.tsv", 0)],
)
def test_a_byte_that_is_not_utf8_is_reported_by_line_and_position(
    beir: Path,
    name: str,
    n_lines_before: int,
) -> None:
    lines = [b'{"_id": "d%d", "text": "x"}\n' % number for number in range(n_lines_before)]
    lines.append(b'{"_id": "last", "text": "caf\xe9"}\n')
    content = b"".join(lines)
    (beir / name).write_bytes(content)
    position = content.index(b"\xe9")
    message = rf"{name}:{len(lines)}: .* the byte 0xe9 at byte {position} of the text"
    with pytest.raises(DataError, match=message):
        r.load_beir(beir)


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_a_file_in_utf16_is_refused_with_the_command_that_converts_it(
    tmp_path: Path,
    encoding: str,
) -> None:
    path = tmp_path / "documents.jsonl"
    path.write_text('\ufeff{"_id": "a", "text": "x"}\n', encoding=encoding)
    with pytest.raises(DataError, match="Convert it: iconv -f UTF-16 -t UTF-8"):
        r.load_documents(path)


@pytest.mark.parametrize("name", ["a\tb", "a\nb", "a\rb", ""])
def test_ids_that_the_layout_cannot_hold_are_not_saved(name: str, tmp_path: Path) -> None:
    collection = r.Collection(
        "x",
        {name: r.Document(name, "", "text")},
        {"q": "text"},
        {"test": {"q": {name: 1}}},
    )
    with pytest.raises(DataError, match="the BEIR layout needs nonempty Unicode"):
        collection.save_beir(tmp_path / "saved")
    assert not list(tmp_path.iterdir())


def test_an_unknown_split_is_refused_with_those_that_exist(beir: Path) -> None:
    collection = r.load_beir(beir)
    with pytest.raises(ValueError, match=r"tiny has the splits test, got 'dev'"):
        collection.pairs("dev")


def test_an_unknown_collection_is_refused_with_what_can_be_loaded() -> None:
    message = r"msmarco: no such file or folder, expected 'pydocs', or the path of a BEIR folder"
    with pytest.raises(FileNotFoundError, match=message):
        r.load_collection("msmarco")


@pytest.mark.parametrize("name", ["queries.jsonl", "corpus.jsonl"])
def test_a_missing_file_of_a_beir_folder_is_named(beir: Path, name: str) -> None:
    (beir / name).unlink()
    message = rf"{name}: no such file.* A BEIR folder has corpus\.jsonl"
    with pytest.raises(FileNotFoundError, match=message):
        r.load_beir(beir)


def test_a_document_under_another_key_than_its_id_is_refused(tmp_path: Path) -> None:
    documents = {"a": r.Document("same", "", "x"), "b": r.Document("same", "", "y")}
    with pytest.raises(ValueError, match=r"Document\.id 'same' under the key 'a'"):
        r.Collection("c", documents, {}, {})
    collection = r.Collection("c", {"a": "x"}, {}, {})
    collection.documents["b"] = r.Document("a", "", "y")
    with pytest.raises(ValueError, match=r"Document\.id 'a' under the key 'b'"):
        collection.save_beir(tmp_path / "data")
