"""Files of runs in the format of TREC, and ids that are integers."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tilefold import retrieval as r
from tilefold.retrieval.common.provenance import Provenance, texts_digest
from tilefold.retrieval.errors import DataError
from tilefold.retrieval.evaluation.measures import read_trec_provenance

RUN = {"q1": {"a": 0.1, "b": 1 / 3}, "q2": {"ü": 1e-30}}


def test_a_run_survives_writing_and_reading(tmp_path: Path) -> None:
    file = tmp_path / "x.run"
    r.write_trec_run(RUN, file, tag="mine")
    lines = file.read_text(encoding="utf-8").splitlines()
    assert lines[0] == f"q1 Q0 b 1 {1 / 3!r} mine"
    assert r.read_trec_run(file) == RUN
    assert read_trec_provenance(file) == Provenance()


def test_the_tag_of_a_run_holds_the_first_digits_of_its_provenance(tmp_path: Path) -> None:
    file = tmp_path / "x.run"
    provenance = Provenance("ab" * 32, "cd" * 32)
    r.write_trec_run(RUN, file, tag=provenance.tag)
    shortened = read_trec_provenance(file)
    assert shortened == Provenance("ab" * 8, "cd" * 8)
    assert shortened.differing_fields(provenance) == []
    assert provenance.differing_fields(shortened) == []
    assert shortened.differing_fields(Provenance()) == []
    assert shortened.differing_fields(Provenance("ab" * 32, "00" * 32)) == ["texts_sha256"]


def test_runs_with_unequal_members_of_a_provenance_share_the_others() -> None:
    first = Provenance("ab" * 32, "cd" * 32)
    second = Provenance("ee" * 32, "cd" * 32)
    assert Provenance.shared([first, second]) == Provenance(None, "cd" * 32)


def test_a_run_that_cannot_be_read_again_is_not_written(tmp_path: Path) -> None:
    file = tmp_path / "x.run"
    with pytest.raises(ValueError, match=r"document id: .*got 'a b'"):
        r.write_trec_run({"q": {"a b": 1.0}}, file)
    with pytest.raises(ValueError, match=r"expected finite scores, got nan for 'a'"):
        r.write_trec_run({"q": {"a": math.nan}}, file)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("line", "message"),
    [
        pytest.param(b"q Q0 d 1 2.0", r":2: expected 6 fields .* got 5", id="too few fields"),
        pytest.param(
            b"q Q0 d 1 high tag",
            r":2: expected a finite score, got 'high'",
            id="score that is a word",
        ),
        pytest.param(
            b"q Q0 d 1 nan tag",
            r":2: expected a finite score, got 'nan'",
            id="score that is nan",
        ),
        pytest.param(
            b"q Q0 a 2 0.5 tag",
            r":2: document 'a' was already given for query 'q'. Keep one",
            id="document twice",
        ),
        pytest.param(
            b"q Q0 d\xe9 1 1 tag",
            r"x.run:2: expected UTF-8 text",
            id="other encoding",
        ),
        pytest.param(
            b"query_id Q0 doc_id rank score tag",
            r":2: expected a finite score, got 'score'.* remove it if it names col",
            id="names of columns",
        ),
    ],
)
def test_a_bad_line_of_a_run_is_named(line: bytes, message: str, tmp_path: Path) -> None:
    file = tmp_path / "x.run"
    file.write_bytes(b"q Q0 a 1 1.0 tag\n" + line + b"\n")
    with pytest.raises(DataError, match=message):
        r.read_trec_run(file)


RUN_OF_INTEGER_DOCUMENTS: Any = {"1": {7: 1.0}}
RUN_OF_INTEGER_QUERIES: Any = {1: {"7": 1.0}}
DOCUMENTS_OF_INTEGERS: Any = {7: r.Document("7", "", "text")}
TEXTS_OF_INTEGERS: Any = {7: "text"}
GRADES_OF_INTEGERS: Any = {7: 1}
QRELS_OF_INTEGER_QUERIES: Any = {1: {"7": 1}}
INTEGER: Any = 7


@pytest.mark.parametrize(
    ("argument", "call"),
    [
        pytest.param(
            "run",
            lambda: r.evaluate(RUN_OF_INTEGER_DOCUMENTS, {"1": {"7": 1}}),
            id="evaluate: documents of the run",
        ),
        pytest.param(
            "run",
            lambda: r.evaluate(RUN_OF_INTEGER_QUERIES, {"1": {"7": 1}}),
            id="evaluate: queries of the run",
        ),
        pytest.param(
            "qrels",
            lambda: r.evaluate({"1": {"7": 1.0}}, QRELS_OF_INTEGER_QUERIES),
            id="evaluate: queries of the judgements",
        ),
        pytest.param(
            "runs",
            lambda: r.interpolate([RUN_OF_INTEGER_DOCUMENTS]),
            id="interpolate",
        ),
        pytest.param(
            "runs",
            lambda: r.reciprocal_rank_fusion([RUN_OF_INTEGER_QUERIES]),
            id="reciprocal_rank_fusion",
        ),
        pytest.param(
            "run",
            lambda: r.write_trec_run(RUN_OF_INTEGER_DOCUMENTS, "never.run"),
            id="write_trec_run",
        ),
        pytest.param(
            "documents",
            lambda: r.BM25Index.build(TEXTS_OF_INTEGERS),
            id="BM25Index.build",
        ),
        pytest.param("id", lambda: r.Document(INTEGER, "", "text"), id="Document"),
        pytest.param(
            "documents",
            lambda: r.Collection("x", DOCUMENTS_OF_INTEGERS, {}, {}),
            id="Collection: documents",
        ),
        pytest.param(
            "queries",
            lambda: r.Collection("x", {}, TEXTS_OF_INTEGERS, {}),
            id="Collection: queries",
        ),
        pytest.param(
            "qrels",
            lambda: r.Collection("x", {}, {}, {"test": {"q": GRADES_OF_INTEGERS}}),
            id="Collection: judgements",
        ),
        pytest.param("texts", lambda: texts_digest(TEXTS_OF_INTEGERS), id="texts_digest"),
    ],
)
def test_integers_as_ids_are_refused(
    argument: str,
    call: Callable[[], object],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TypeError, match=rf"^{argument}: expected .*got [17] \(int\).*str\([17]\)"):
        call()
    assert not list(tmp_path.iterdir())
