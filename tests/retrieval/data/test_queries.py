"""Queries from files of every kind, and from lines of standard input."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.retrieval.conftest import QUERIES
from tilefold import retrieval as r
from tilefold.retrieval.errors import DataError

TEXT_WITH_BLANKS = "  two  blanks "


@pytest.mark.parametrize(
    ("name", "content"),
    [
        pytest.param(
            "q.jsonl",
            f'{{"_id": "1", "text": "{TEXT_WITH_BLANKS}"}}\n',
            id="json lines",
        ),
        pytest.param("q.tsv", f"1\t{TEXT_WITH_BLANKS}\n", id="tsv"),
        pytest.param("q.txt", f"{TEXT_WITH_BLANKS}\n", id="bare lines"),
        pytest.param("q.txt", f"{TEXT_WITH_BLANKS}\r\n", id="bare lines of Windows"),
    ],
)
def test_every_file_of_queries_keeps_the_blanks_of_a_query(
    tmp_path: Path,
    name: str,
    content: str,
) -> None:
    (tmp_path / name).write_bytes(content.encode())
    assert r.load_queries(tmp_path / name) == {"1": TEXT_WITH_BLANKS}


def test_topics_keep_blanks_within_a_line_and_leave_out_those_next_to_tags(tmp_path: Path) -> None:
    topics = "<top>\n<num> 1\n<title>  two  blanks \n  and a line\n\n<desc>\nwhy\n</top>\n"
    escaped = '<topic number="2"><query>&#32;two  blanks&#32;</query></topic>\n'
    (tmp_path / "q.trec").write_text(topics + escaped)
    expected = {"1": "two  blanks and a line", "2": " two  blanks "}
    assert r.load_queries(tmp_path / "q.trec") == expected


@pytest.mark.parametrize(
    ("line", "query", "text"),
    [
        pytest.param(f"{TEXT_WITH_BLANKS}\n", "1", TEXT_WITH_BLANKS, id="text with blanks"),
        pytest.param(
            f" q1 \t{TEXT_WITH_BLANKS}\n",
            " q1 ",
            TEXT_WITH_BLANKS,
            id="id and text with blanks",
        ),
        pytest.param("q1\t\n", "q1", "", id="nothing after the tab is an empty text"),
        pytest.param("q1\ta\tb\n", "q1", "a\tb", id="a text may hold tabs"),
        pytest.param("\ufeffq1\twords\n", "q1", "words", id="a byte order mark is no text"),
    ],
)
def test_a_line_of_standard_input_is_read_like_one_of_a_file(
    tmp_path: Path,
    line: str,
    query: str,
    text: str,
) -> None:
    assert r.query_of_line(line, 1) == (query, text)
    (tmp_path / "q.txt").write_text(line)
    assert r.load_queries(tmp_path / "q.txt") == {query: text}


def test_a_line_without_an_id_before_its_tab_is_refused() -> None:
    with pytest.raises(DataError, match="line 3: expected an id before the tab"):
        r.query_of_line("\ttext\n", 3)


def test_a_line_of_names_of_columns_is_no_query() -> None:
    with pytest.raises(DataError, match="line 1: expected a query, got names of columns"):
        r.query_of_line("qid\tquery\n", 1)


def test_a_query_without_an_id_has_the_number_of_its_line(tmp_path: Path) -> None:
    (tmp_path / "lines.txt").write_text("sleeping cats\n\nq2\ttrees\n")
    assert r.load_queries(tmp_path / "lines.txt") == {"1": "sleeping cats", "q2": "trees"}


def test_queries_are_read_from_the_file_of_a_collection(beir: Path) -> None:
    assert r.load_queries(beir / "queries.jsonl") == r.load_beir(beir).queries


@pytest.mark.parametrize("name", ["queries.tsv", "queries.txt"])
def test_names_of_columns_are_no_query(beir: Path, name: str) -> None:
    expected = r.load_beir(beir).queries
    (beir / "queries.jsonl").unlink()
    rows = [f"{query['_id']}\t{query['text']}\n" for query in QUERIES]
    (beir / name).write_text("qid\tquery\n" + "".join(rows))
    assert r.load_queries(beir / name) == expected


def test_a_collection_has_queries_in_a_table(beir: Path) -> None:
    expected = r.load_beir(beir)
    (beir / "queries.jsonl").unlink()
    rows = [f"{query['_id']}\t{query['text']}\n" for query in QUERIES]
    (beir / "queries.tsv").write_text("qid\tquery\n" + "".join(rows))
    assert r.load_beir(beir) == expected


def test_one_word_that_is_the_name_of_a_column_is_a_query(tmp_path: Path) -> None:
    (tmp_path / "queries.txt").write_text("\n\nquery\nwhat is a topic\n")
    assert r.load_queries(tmp_path / "queries.txt") == {"3": "query", "4": "what is a topic"}


def test_a_first_line_that_may_be_a_query_or_names_of_columns_is_refused(tmp_path: Path) -> None:
    (tmp_path / "queries.txt").write_text("qid\twhat is a qid\n")
    with pytest.raises(DataError, match=r"queries\.txt:1: expected a row, or names of columns"):
        r.load_queries(tmp_path / "queries.txt")


def test_a_missing_file_of_queries_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"gone\.txt: no such file of queries"):
        r.load_queries(tmp_path / "gone.txt")
