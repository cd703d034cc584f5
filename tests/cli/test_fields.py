"""Options that name the fields of documents, wherever a command reads a collection."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.program import Call, done

FIELDS = ("--id-field", "pk", "--title-field", "headline", "--text-field", "abstract")


@pytest.fixture
def papers(tmp_path: Path) -> Path:
    """A folder with documents whose fields have unusual names, queries and judgements."""
    folder = tmp_path / "papers"
    (folder / "qrels").mkdir(parents=True)
    (folder / "corpus.csv").write_text(
        'pk,headline,abstract,year\na,Cats,"They sleep, all day",1998\nb,Dogs,They chase '
        "cats,2001\n",
        encoding="utf-8",
    )
    (folder / "queries.csv").write_text("qid,query\nq1,sleep\n", encoding="utf-8")
    (folder / "qrels" / "test.csv").write_text("qid,docid,rel\nq1,a,1\n", encoding="utf-8")
    return folder


def test_a_collection_with_named_fields_is_indexed_searched_and_evaluated(
    call: Call,
    papers: Path,
    tmp_path: Path,
) -> None:
    index = tmp_path / "words"
    done(call("index", "--backend", "bm25", "--data", papers, *FIELDS, "--output", index))
    actual = done(
        call("search", "sleep", "--index", index, "--data", papers, *FIELDS, "--json"),
    )
    (hit,) = json.loads(actual.out)["hits"]
    assert (hit["id"], hit["title"]) == ("a", "Cats")
    one_file = papers / "corpus.csv"
    of_file = done(
        call("search", "sleep", "--index", index, "--data", one_file, *FIELDS, "--json"),
    )
    assert json.loads(of_file.out)["hits"] == [hit]
    measured = done(
        call(
            "evaluate", "--data", papers, *FIELDS, "--index", index, "--measure", "RR@10", "--json"
        ),
    )
    assert '"RR@10": 1.0' in measured.out
    where = done(
        call("search", "cats", "--index", index, "--where", "year=2001", "--json"),
    )
    assert [hit["id"] for hit in json.loads(where.out)["hits"]] == ["b"]


def test_a_collection_without_usual_names_says_which_options_name_them(
    call: Call,
    papers: Path,
    tmp_path: Path,
) -> None:
    outcome = call("index", "--backend", "bm25", "--data", papers, "--output", tmp_path / "words")
    assert outcome.code == 1
    for word in ("an id", "a text", "'pk', 'headline', 'abstract'", "--id-field", "--text-field"):
        assert word in outcome.err


@pytest.mark.parametrize(
    ("data", "message"),
    [
        pytest.param((), "--text-field requires --data", id="no collection"),
        pytest.param(
            ("--data", "pydocs"),
            "--text-field cannot be combined with --data pydocs",
            id="built-in collection",
        ),
    ],
)
def test_names_of_fields_need_a_collection_of_files(
    call: Call,
    data: tuple[str, ...],
    message: str,
) -> None:
    outcome = call("search", "cats", "--index", "words", *data, "--text-field", "abstract")
    assert outcome.code == 2
    assert message in outcome.err


def test_the_names_of_one_command_are_not_those_of_the_next(
    call: Call,
    papers: Path,
    tmp_path: Path,
) -> None:
    arguments = ("index", "--backend", "bm25", "--data", papers, "--output")
    done(call(*arguments, tmp_path / "named", *FIELDS))
    assert call(*arguments, tmp_path / "unnamed").code == 1
