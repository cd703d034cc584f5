"""Documents are read one by one from a file that has been read whole before, and only while it has not changed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.recipes.small import small_collection
from tests.refusals import refused
from tilefold.retrieval import load_beir, load_documents
from tilefold.retrieval import stored_documents as stored
from tilefold.retrieval.errors import DataError
from tilefold.retrieval.provenance import texts_digest

LINES = [
    '{"_id": "d0", "title": "Cats", "text": "sleep"}',
    "",
    '{"id": 7, "text": "\\u732b und Hunde"}',
    "\u3000",
    '{"_id": "ü", "title": null, "text": "trees"}',
]


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(stored, "SMALLEST", 0)
    monkeypatch.setattr(stored, "SETTLED_SECONDS", 0.0)
    file = tmp_path / "corpus.jsonl"
    file.write_text("\ufeff" + "\r\n".join(LINES), encoding="utf-8", newline="")
    return file


def opened(path: Path) -> tuple[object, dict[str, object], str]:
    collection, digest = stored.open_documents(path, path.parent / "cache")
    return type(collection.documents), dict(collection.documents), digest


def test_documents_read_one_by_one_are_those_of_the_whole_file(corpus: Path) -> None:
    whole = load_documents(corpus)
    digest = texts_digest({name: document.contents for name, document in whole.items()})
    assert opened(corpus) == (dict, whole, digest)
    assert opened(corpus) == (stored.StoredDocuments, whole, digest)
    documents = stored.open_documents(corpus, corpus.parent / "cache")[0].documents
    assert list(documents) == list(whole) == ["d0", "7", "ü"] and len(documents) == 3
    assert "7" in documents and "8" not in documents and documents.get("8") is None


def test_ids_with_one_key_are_told_apart(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "id_key", lambda name: 3)
    assert opened(corpus)[1] == opened(corpus)[1] == load_documents(corpus)
    assert "unknown" not in stored.open_documents(corpus, corpus.parent / "cache")[0].documents


def test_a_file_that_changed_is_read_again(corpus: Path) -> None:
    before = opened(corpus)[2]
    found = corpus.stat()
    corpus.write_bytes(corpus.read_bytes().replace(b"trees", b"trams"))
    os.utime(corpus, ns=(found.st_atime_ns, found.st_mtime_ns))
    kind, documents, digest = opened(corpus)
    assert kind is dict and digest != before and documents == load_documents(corpus)
    assert opened(corpus) == (stored.StoredDocuments, documents, digest)


def test_a_file_that_changes_while_it_is_read_is_named(corpus: Path) -> None:
    opened(corpus)
    documents = stored.open_documents(corpus, corpus.parent / "cache")[0].documents
    corpus.write_bytes(b" " * 30 + corpus.read_bytes())
    with pytest.raises(DataError, match="has changed since it was opened"):
        documents["7"]


def test_a_file_of_this_moment_and_a_small_one_are_not_kept(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "SETTLED_SECONDS", 60.0)
    assert opened(corpus)[0] is opened(corpus)[0] is dict
    monkeypatch.setattr(stored, "SETTLED_SECONDS", 0.0)
    monkeypatch.setattr(stored, "SMALLEST", 1 << 20)
    assert opened(corpus)[0] is opened(corpus)[0] is dict


@pytest.mark.parametrize("damage", ["facts.json", "keys.npy", "offsets.npy", "unwritable"])
def test_a_damaged_or_unwritable_cache_costs_only_time(corpus: Path, damage: str) -> None:
    whole = opened(corpus)
    if damage == "unwritable":
        assert dict(stored.open_documents(corpus, "/proc/nowhere")[0].documents) == whole[1]
        return
    (file,) = (corpus.parent / "cache").rglob(damage)
    file.write_bytes(file.read_bytes()[:50])
    assert opened(corpus) == whole
    assert opened(corpus)[0] is stored.StoredDocuments


def test_a_folder_is_read_at_its_corpus_and_malformed_lines_are_named(corpus: Path) -> None:
    folder = corpus.parent / "beir"
    small_collection().save_beir(folder)
    cache = corpus.parent / "cache"
    for _ in range(2):
        collection, _ = stored.open_documents(folder, cache)
        assert (collection.name, dict(collection.documents)) == ("beir", load_beir(folder).documents)
    assert isinstance(collection.documents, stored.StoredDocuments) and not collection.queries
    corpus.write_text(json.dumps({"_id": "d0", "text": 3}))
    refused(DataError, "'text' must be a string", stored.open_documents, corpus, cache)
