"""The collection that is built of the documentation of Python."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tilefold import retrieval as r


def words_of(text: str) -> str:
    """The words of a text in lower case, with one blank between them."""
    return " ".join(re.findall(r"\w+", text.casefold()))


def test_pydocs_has_documents_and_queries_of_two_splits(pydocs: r.Collection) -> None:
    train = pydocs.qrels["train"]
    test = pydocs.qrels["test"]
    assert len(pydocs.documents) >= 3000
    assert len(test) >= 300
    assert len(train) > 2 * len(test)
    assert not train.keys() & test.keys()
    assert set(pydocs.queries) == train.keys() | test.keys()


def test_documents_of_pydocs_are_different_texts_of_the_standard_library(
    pydocs: r.Collection,
) -> None:
    for document in pydocs.documents.values():
        assert document.id == document.title
        assert len(document.text.split()) >= 8, document
    texts = [document.text for document in pydocs.documents.values()]
    assert len(set(texts)) == len(texts)
    ids = pydocs.documents.keys()
    assert {"json.dumps", "pathlib.Path", "builtins.sorted", "itertools.chain"} <= ids
    not_documented = re.compile(r"(test|idlelib|turtledemo|site-packages)\b")
    assert not [name for name in ids if not_documented.match(name)]


def test_queries_of_pydocs_are_cut_from_their_documents(pydocs: r.Collection) -> None:
    first_lines = set()
    for document in pydocs.documents.values():
        first_lines.add(words_of(document.text.split("\n", 1)[0]))
    queries = [words_of(text) for text in pydocs.queries.values()]
    assert len(set(queries)) == len(queries)
    assert first_lines.isdisjoint(queries)
    assert pydocs.queries["q-json.dumps"] == "Serialize ``obj`` to a JSON formatted ``str``"
    assert "Serialize ``obj`` to" not in pydocs.documents["json.dumps"].text


class CountedBuild:
    """A function that returns a collection and counts its calls."""

    def __init__(self, collection: r.Collection) -> None:
        self.collection = collection
        self.n_calls = 0

    def __call__(self) -> r.Collection:
        self.n_calls += 1
        return self.collection


@pytest.mark.slow
def test_pydocs_is_the_same_when_it_is_built_again(pydocs: r.Collection) -> None:
    assert r.build_pydocs() == pydocs


def test_pydocs_is_cached_and_a_damaged_cache_is_built_again(
    pydocs: r.Collection,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    build = CountedBuild(pydocs)
    monkeypatch.setattr("tilefold.retrieval.data.datasets.build_pydocs", build)
    assert r.load_collection("pydocs", cache_dir=tmp_path) == pydocs
    assert build.n_calls == 1
    (folder,) = (tmp_path / "pydocs").iterdir()

    assert r.load_collection("pydocs", cache_dir=tmp_path) == pydocs
    assert build.n_calls == 1

    (folder / "queries.jsonl").write_text("{broken")
    assert r.load_collection("pydocs", cache_dir=tmp_path) == pydocs
    assert build.n_calls == 2
    assert r.load_beir(folder).queries == pydocs.queries


def test_pydocs_is_built_without_a_cache_that_can_be_written(
    pydocs: r.Collection,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tilefold.retrieval.data.datasets.build_pydocs", CountedBuild(pydocs))
    (tmp_path / "file").write_text("")
    collection = r.load_collection("pydocs", cache_dir=tmp_path / "file")
    assert collection.queries == pydocs.queries
