from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tilefold.retrieval import Collection, Document, load_beir, load_collection
from tilefold.retrieval.errors import DataError


def test_a_beir_folder_is_read_with_titles_grades_and_splits(beir: Path) -> None:
    collection = load_beir(beir)
    assert collection.name == "tiny"
    assert collection.documents["d1"].contents == "Cats\nCats sleep all day."
    assert collection.documents["d2"].contents == "Dogs chase cats."
    assert collection.qrels == {"test": {"q1": {"d1": 2, "d2": 0}, "q2": {"d3": 1}}}
    assert collection.split_queries("test") == {"q1": "sleeping cats", "q2": "trees"}
    assert collection.pairs("test") == [("q1", "d1"), ("q2", "d3")]


def test_a_collection_survives_saving_and_loading(beir: Path, tmp_path: Path) -> None:
    collection = load_beir(beir)
    collection.save_beir(tmp_path / "copy")
    collection.save_beir(tmp_path / "copy")  # an own folder may be replaced
    again = load_beir(tmp_path / "copy")
    assert (again.documents, again.queries, again.qrels) == (
        collection.documents,
        collection.queries,
        collection.qrels,
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy", "tiny"]


def test_saving_never_overwrites_a_folder_of_other_things(beir: Path, tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.txt").write_text("years of work")
    with pytest.raises(FileExistsError, match="nothing was overwritten"):
        load_beir(beir).save_beir(tmp_path / "home")
    assert [path.name for path in (tmp_path / "home").iterdir()] == ["thesis.txt"]


def test_an_interrupted_save_leaves_no_trace(beir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    collection = load_beir(beir)

    class Interrupting(dict[str, dict[str, dict[str, int]]]):
        def items(self):  # type: ignore[no-untyped-def]
            raise KeyboardInterrupt

    collection.qrels = Interrupting()
    with pytest.raises(KeyboardInterrupt):
        collection.save_beir(tmp_path / "half")
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]


def test_an_unknown_split_names_the_splits_there_are(beir: Path) -> None:
    with pytest.raises(ValueError, match=r"tiny has test, got 'dev'"):
        load_beir(beir).pairs("dev")


def test_a_header_is_optional_in_judgements(beir: Path) -> None:
    (beir / "qrels" / "test.tsv").write_text("q1\td1\t1\n")
    assert load_beir(beir).pairs("test") == [("q1", "d1")]


def test_blank_lines_a_byte_order_mark_and_integer_ids_are_tolerated(beir: Path) -> None:
    (beir / "corpus.jsonl").write_text('\ufeff{"_id": 7, "text": "seven"}\n\n', encoding="utf-8")
    (beir / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\nq1\t7\t1\n\n")
    assert list(load_beir(beir).documents) == ["7"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("corpus.jsonl", '{"_id": "d1", "text": "x"}\n{"_id": "d', r"corpus.jsonl:2: .*malformed JSON"),
        ("corpus.jsonl", "[1]\n", r"corpus.jsonl:1: .*got list"),
        ("corpus.jsonl", "[" * 100_000, r"corpus.jsonl:1: .*malformed JSON"),
        (
            "corpus.jsonl",
            '{"_id": "\\ud800", "text": "x"}\n',
            r"corpus.jsonl:1: '_id' must be text that UTF-8 can hold",
        ),
        ("corpus.jsonl", '{"text": "x"}\n', r"corpus.jsonl:1: '_id' must be a non-empty string, got None"),
        ("corpus.jsonl", '{"_id": "a", "text": "x"}\n' * 2, r"corpus.jsonl:2: '_id' 'a' was given before"),
        ("corpus.jsonl", '{"_id": "a", "text": 3}\n', r"corpus.jsonl:1: 'text' must be a string, got 3"),
        ("corpus.jsonl", "", r"corpus.jsonl: expected at least one line"),
        ("queries.jsonl", "\n", r"queries.jsonl: expected at least one line"),
        ("qrels/test.tsv", "q1\td1\n", r"test.tsv:1: expected 3 tab-separated fields .*got 2"),
        ("qrels/test.tsv", "q1\td1\tgood\n", r"test.tsv:1: expected an integer grade, got 'good'"),
        ("qrels/test.tsv", "q1\td1\t1.5\n", r"test.tsv:1: expected an integer grade, got '1.5'"),
        ("qrels/test.tsv", "q1\td1\t1\nq1\td1\t2\n", r"test.tsv:2: .*judged 1 before, got 2"),
        (
            "qrels/test.tsv",
            "q1\td1\t1\nq9\td1\t1\nq1\td8\t1\n",
            r"test.tsv:2: unknown query 'q9'; 2 judgement",
        ),
        (
            "qrels/test.tsv",
            "query-id\tcorpus-id\tscore\n",
            r"test.tsv: expected at least one judgement .* got no judgement",
        ),
    ],
)
def test_a_bad_line_is_reported_by_file_and_number(beir: Path, name: str, content: str, message: str) -> None:
    (beir / name).write_text(content, encoding="utf-8")
    with pytest.raises(DataError, match=message):
        load_beir(beir)


@pytest.mark.parametrize("name", ["corpus.jsonl", "qrels/test.tsv"])
def test_bytes_that_are_not_utf8_are_reported(beir: Path, name: str) -> None:
    (beir / name).write_bytes(b'{"_id": "d1", "text": "\xff\xfe"}\n')
    with pytest.raises(DataError, match=rf"{name}:1: expected UTF-8 text, got the byte 0xff at byte 23 of the text"):
        load_beir(beir)


def test_half_a_surrogate_pair_in_a_text_survives_saving(beir: Path, tmp_path: Path) -> None:
    (beir / "queries.jsonl").write_text('{"_id": "q1", "text": "\\ud800 cat"}\n{"_id": "q2", "text": "b"}\n')
    collection = load_beir(beir)
    collection.save_beir(tmp_path / "saved")
    assert load_beir(tmp_path / "saved").queries == collection.queries == {"q1": "\ud800 cat", "q2": "b"}


@pytest.mark.parametrize("name", ["a\tb", "a\nb", "a\rb", ""])
def test_ids_that_the_layout_cannot_hold_are_refused_and_nothing_is_written(name: str, tmp_path: Path) -> None:
    collection = Collection("x", {name: Document(name, "", "text")}, {"q": "text"}, {"test": {"q": {name: 1}}})
    with pytest.raises(DataError, match="the BEIR layout holds no empty id"):
        collection.save_beir(tmp_path / "saved")
    assert not list(tmp_path.iterdir())


def test_judgements_of_absent_documents_can_be_dropped(beir: Path) -> None:
    with (beir / "qrels" / "test.tsv").open("a") as stream:
        stream.write("q2\tgone\t1\n")
    assert load_beir(beir, unknown="drop").qrels["test"]["q2"] == {"d3": 1}


@pytest.mark.parametrize("name", ["corpus.jsonl", "queries.jsonl"])
def test_a_missing_file_is_reported_with_the_layout(beir: Path, name: str) -> None:
    (beir / name).unlink()
    with pytest.raises(FileNotFoundError, match=r"A BEIR folder has corpus\.jsonl"):
        load_beir(beir)


def test_an_unknown_name_lists_what_is_possible() -> None:
    with pytest.raises(
        FileNotFoundError, match=r"expected 'pydocs' or the path of a BEIR folder or of documents, got 'msmarco'"
    ):
        load_collection("msmarco")


def test_pydocs_has_the_promised_size_and_shape(pydocs: Collection) -> None:
    assert len(pydocs.documents) >= 3000
    assert len(pydocs.qrels["test"]) >= 300
    assert len(pydocs.qrels["train"]) > 2 * len(pydocs.qrels["test"])
    assert not set(pydocs.qrels["train"]) & set(pydocs.qrels["test"])
    assert set(pydocs.queries) == set(pydocs.qrels["train"]) | set(pydocs.qrels["test"])
    for document in pydocs.documents.values():
        assert document.id == document.title
        assert len(document.text.split()) >= 8, document


def test_pydocs_cuts_the_query_from_its_document_and_from_no_other(pydocs: Collection) -> None:
    def normal(text: str) -> str:
        return " ".join(re.findall(r"\w+", text.casefold()))

    openings = [normal(document.text.split("\n", 1)[0]) for document in pydocs.documents.values()]
    texts = [normal(text) for text in pydocs.queries.values()]
    assert len(set(texts)) == len(texts)
    assert not set(texts) & set(openings)
    bodies = [document.text for document in pydocs.documents.values()]
    assert len(set(bodies)) == len(bodies)


def test_pydocs_covers_sources_and_c_modules_but_no_tests(pydocs: Collection) -> None:
    ids = set(pydocs.documents)
    assert {"json.dumps", "pathlib.Path", "builtins.sorted", "itertools.chain"} <= ids
    assert not [name for name in ids if re.match(r"(test|idlelib|turtledemo|site-packages)\b", name)]
    assert pydocs.queries["q-json.dumps"] == "Serialize ``obj`` to a JSON formatted ``str``"
    assert "Serialize ``obj`` to" not in pydocs.documents["json.dumps"].text


def test_pydocs_is_cached_and_a_damaged_cache_is_built_again(
    pydocs: Collection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = load_collection("pydocs", cache_dir=tmp_path)
    assert first == pydocs  # built twice, the same both times
    builds: Any = []
    monkeypatch.setattr("tilefold.retrieval.pydocs.build_pydocs", lambda: builds.append(1) or pydocs)
    (folder,) = (tmp_path / "pydocs").iterdir()
    assert load_collection("pydocs", cache_dir=tmp_path) == pydocs
    assert not builds
    (folder / "queries.jsonl").write_text("{broken")
    assert load_collection("pydocs", cache_dir=tmp_path) == pydocs
    assert builds == [1]
    assert load_beir(folder).queries == pydocs.queries


def test_pydocs_works_without_a_writable_cache(
    pydocs: Collection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tilefold.retrieval.pydocs.build_pydocs", lambda: pydocs)
    (tmp_path / "file").write_text("")
    assert load_collection("pydocs", cache_dir=tmp_path / "file").queries == pydocs.queries
