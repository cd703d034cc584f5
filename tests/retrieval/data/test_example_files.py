"""The sample files in examples/data are read by the library's own readers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tilefold import retrieval as r
from tilefold.retrieval.data.fields import TEXT_NAMES

EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "data"
ARTICLES = {"cards", "limits", "abroad", "pin", "joint", "close", "karte", "savings"}
QUERIES = {"q1", "q2", "q3", "q4", "q5", "q6"}


def test_a_folder_in_the_beir_layout_has_documents_queries_and_two_splits() -> None:
    bank = r.load_collection(EXAMPLES / "bank")
    assert set(bank.documents) == ARTICLES
    assert bank.documents["cards"].title == "Lost cards"
    assert bank.documents["cards"].metadata == {
        "lang": "en",
        "year": 2023,
        "tags": ["cards", "security"],
    }
    assert set(bank.queries) == QUERIES
    assert bank.qrels["test"] == {"q5": {"joint": 1}, "q6": {"close": 1}}
    assert len(bank.qrels["train"]) == 4


def test_topics_and_judgements_of_trec_are_those_of_the_beir_layout() -> None:
    trec = r.load_collection(EXAMPLES / "trec")
    bank = r.load_collection(EXAMPLES / "bank")
    assert trec.queries == bank.queries
    assert trec.qrels["test"] == {**bank.qrels["train"], **bank.qrels["test"]}


@pytest.mark.parametrize("name", ["articles.csv", "articles.tsv", "anserini.jsonl"])
def test_a_file_of_documents_has_every_article(name: str) -> None:
    documents = r.load_documents(EXAMPLES / "documents" / name)
    assert set(documents) == ARTICLES
    assert "Block a lost or stolen card" in documents["cards"].text


@pytest.mark.parametrize(
    ("name", "ids"),
    [
        pytest.param("queries.tsv", QUERIES, id="with ids"),
        pytest.param("queries.txt", {"1", "2", "3", "4", "5", "6"}, id="numbered by line"),
    ],
)
def test_a_file_of_queries_has_every_query(name: str, ids: set[str]) -> None:
    queries = r.load_queries(EXAMPLES / "documents" / name)
    assert set(queries) == ids
    assert "my card was stolen" in queries.values()


def test_a_run_of_trec_has_scores_by_query_and_document() -> None:
    run = r.read_trec_run(EXAMPLES / "runs" / "bm25.trec")
    assert run["q6"] == {"limits": 1.9, "close": 1.4}


@pytest.mark.parametrize(
    ("name", "scored"),
    [
        pytest.param("triplets.tsv", False, id="triplets of ids"),
        pytest.param("negatives.jsonl", False, id="several negatives"),
        pytest.param("hard-negatives.jsonl", False, id="negatives by retriever"),
        pytest.param("distillation.jsonl", True, id="a teacher's scores"),
    ],
)
def test_a_file_of_training_rows_has_a_relevant_document_and_negatives(
    name: str,
    scored: bool,
) -> None:
    rows = r.read_training_rows(EXAMPLES / "training" / name)
    assert rows.queries == ["q1", "q2", "q3", "q4"]
    assert rows.scored == scored
    assert int(rows.relevant.sum()) == 4
    assert len(rows) == 12


def test_the_page_of_data_formats_shows_lines_of_the_sample_files() -> None:
    page = (EXAMPLES.parents[1] / "docs" / "data-formats.md").read_text(encoding="utf-8")
    samples = re.findall(
        r"from \[`[^`]+`\]\(\.\./examples/data/([^)]+)\):\n\n```\w+\n(.*?)```",
        page,
        re.DOTALL,
    )
    assert len(samples) >= 7
    for name, block in samples:
        lines = (EXAMPLES / name).read_text(encoding="utf-8").splitlines()
        assert set(block.splitlines()) <= set(lines), name


def test_the_page_of_data_formats_names_every_usual_field() -> None:
    page = (EXAMPLES.parents[1] / "docs" / "data-formats.md").read_text(encoding="utf-8")
    names = {name for aliases in TEXT_NAMES.values() for name in aliases}
    assert {name for name in names if f"`{name}`" not in page} == set()


def test_the_script_for_text_files_writes_documents_that_are_read(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes" / "2024").mkdir(parents=True)
    (tmp_path / "notes" / "2024" / "plan.md").write_text("# Plan\n\nWrite the index.")
    page = (EXAMPLES.parents[1] / "docs" / "data-formats.md").read_text(encoding="utf-8")
    section = page.split("### Text files\n")[1]
    (script, *_) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    exec(compile(script, "docs/data-formats.md", "exec"), {})  # noqa: S102
    (document,) = r.load_documents("notes.jsonl").values()
    assert (document.id, document.title) == (str(Path("notes/2024/plan.md")), "plan")
    assert document.text == "# Plan\n\nWrite the index."
