"""Documents that are read from their file one by one, with a cache of where they are."""

from __future__ import annotations

import io
import itertools
import json
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from tests.recipes.small import small_collection
from tilefold import retrieval as r
from tilefold.retrieval.common.provenance import TextsDigest, texts_digest
from tilefold.retrieval.data import document_lines, lazy_documents
from tilefold.retrieval.data.lazy_documents import LazyDocuments, id_key
from tilefold.retrieval.errors import DataError

CORPUS_LINES = {
    "jsonl": [
        '{"_id": "d0", "title": "Cats", "text": "sleep"}',
        "",
        '{"id": 7, "text": "\\u732b und Hunde"}',
        "\u3000",
        '{"_id": "ü", "title": null, "text": "trees"}',
    ],
    "tsv": ["d0\tCats\tsleep", "", "7\t\u732b und Hunde", "\u3000", "ü\ttrees"],
}
IDS = ["d0", "7", "ü"]


@pytest.fixture(params=["jsonl"])
def corpus(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of three documents, which may be cached although it has just been written."""
    monkeypatch.setattr(lazy_documents, "SETTLED_SECONDS", 0.0)
    file = tmp_path / f"corpus.{request.param}"
    text = "\ufeff" + "\r\n".join(CORPUS_LINES[request.param])
    file.write_text(text, encoding="utf-8", newline="")
    return file


def load(path: Path, cache: Path | None = None) -> r.Collection:
    """Load a collection whose documents are read one by one, however small its file is."""
    if cache is None:
        cache = path.parent / "cache"
    return r.load_collection(path, cache, documents_only=True, stored=0)


@dataclass(frozen=True)
class Contents:
    """What a collection holds, read from start to end."""

    documents: dict[str, r.Document]
    digest: str


def read_lazily(path: Path) -> Contents:
    """Load a collection, expect that its documents are read one by one, and read them all."""
    collection = load(path)
    assert type(collection.documents) is LazyDocuments
    return Contents(dict(collection.documents), texts_digest(collection.contents()))


@pytest.mark.parametrize(
    ("range_bytes", "single_process_bytes"),
    [
        pytest.param(1, 1 << 27, id="ranges of one byte"),
        pytest.param(8, 1, id="ranges of eight bytes, several processes"),
        pytest.param(1 << 18, 1 << 27, id="one range"),
    ],
)
@pytest.mark.parametrize("corpus", ["jsonl", "tsv"], indirect=True)
def test_documents_read_one_by_one_equal_those_of_the_file(
    corpus: Path,
    range_bytes: int,
    single_process_bytes: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(document_lines, "RANGE_BYTES", range_bytes)
    monkeypatch.setattr(document_lines, "SINGLE_PROCESS_BYTES", single_process_bytes)
    documents = r.load_documents(corpus)
    contents = {name: document.contents for name, document in documents.items()}
    expected = Contents(documents, texts_digest(contents))

    assert read_lazily(corpus) == expected
    assert read_lazily(corpus) == expected, "from the cache"
    assert list(documents) == IDS
    assert "ended early" not in caplog.text


@pytest.mark.parametrize("corpus", ["jsonl", "tsv"], indirect=True)
def test_lazy_documents_and_their_texts_behave_like_dictionaries(corpus: Path) -> None:
    expected = r.load_documents(corpus)
    expected_texts = [document.contents for document in expected.values()]
    collection = load(corpus)
    documents = collection.documents
    texts = collection.contents()
    assert list(documents) == IDS
    assert len(documents) == 3
    assert len(texts) == 3
    assert list(documents.values()) == list(expected.values())
    assert list(texts.values()) == expected_texts
    assert "7" in documents
    assert texts["7"] == expected["7"].contents
    assert "8" not in texts
    assert documents.get("8") is None


def test_positions_of_ids_and_texts_at_positions(corpus: Path) -> None:
    documents = r.load_documents(corpus)
    collection = load(corpus)
    pairs = collection.contents().pairs_at([2, 0])  # type: ignore[attr-defined]
    assert pairs == [("ü", documents["ü"].contents), ("d0", documents["d0"].contents)]
    in_memory = r.Collection("c", documents, {}, {})
    for some_collection in (collection, in_memory):
        assert some_collection.positions_of(["ü", "8", "d0"]).tolist() == [2, -1, 0]


def test_ids_with_equal_keys_are_distinguished(
    corpus: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lazy_documents, "id_key", lambda name: 3)
    monkeypatch.setattr(document_lines, "id_key", lambda name: 3)
    expected = r.load_documents(corpus)
    assert read_lazily(corpus).documents == expected
    assert read_lazily(corpus).documents == expected, "from the cache"
    documents = load(corpus).documents
    assert "unknown" not in documents
    assert documents["ü"].text == "trees"


@pytest.mark.parametrize(
    ("program", "ends_early"),
    [
        pytest.param("/bin/false", True, id="process that fails"),
        pytest.param("noise", True, id="process that prints something else"),
        pytest.param("/nowhere/python", True, id="program that does not exist"),
        pytest.param(None, False, id="no program"),
    ],
)
def test_lines_that_a_process_did_not_read_are_read(
    program: str | None,
    ends_early: bool,
    corpus: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    size = corpus.stat().st_size
    expected = str(list(document_lines.all_lines(corpus, size)))
    monkeypatch.setattr(document_lines, "SINGLE_PROCESS_BYTES", 0)
    monkeypatch.setattr(document_lines, "share_of_cores", lambda processes: 2)
    if program == "noise":
        noise = corpus.parent / "noise"
        noise.write_text("#!/bin/sh\necho 'something else, longer than a header'\n")
        noise.chmod(0o755)
        program = str(noise)
    monkeypatch.setattr("sys.executable", program)

    assert str(list(document_lines.all_lines(corpus, size))) == expected
    assert ("a process that read its lines ended early" in caplog.text) == ends_early


def test_a_message_that_is_shorter_than_its_header_says_is_not_used() -> None:
    header = document_lines._HEADER.pack(document_lines._MARK, 1, 0)
    assert document_lines._receive_lines(io.BytesIO(header + b"1")) is None


def test_a_link_to_a_file_without_an_ending_is_read_by_the_name_of_the_link(
    corpus: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    expected = read_lazily(corpus)
    corpus.rename(corpus.parent / "blob")
    corpus.symlink_to(corpus.parent / "blob")
    monkeypatch.setattr(document_lines, "SINGLE_PROCESS_BYTES", 0)
    assert read_lazily(corpus) == expected
    assert "ended early" not in caplog.text


TEXTS_OF_MANY_KINDS = {
    "1": "7",
    "01": "x" * 40,
    "a": " b\tc",
    "\u00e9": "\u732b",
    "9" * 18: "1",
    "9" * 19: "",
    "b": "\u732b",
}


@pytest.mark.parametrize("range_bytes", range(1, 90))
def test_lines_have_their_offsets_and_keys_in_ranges_of_any_size(
    range_bytes: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(document_lines, "RANGE_BYTES", range_bytes)
    lines = [f"{name}\t{text}\r\n".encode() for name, text in TEXTS_OF_MANY_KINDS.items()]
    content = b"".join(lines)
    (tmp_path / "c.tsv").write_bytes(content)
    line_lengths = [len(line) for line in lines]
    line_offsets = list(itertools.accumulate(line_lengths[:-1], initial=0))

    parts = list(document_lines.all_lines(tmp_path / "c.tsv", len(content)))

    offsets = np.concatenate([part.offsets for part in parts])
    id_keys = np.concatenate([part.id_keys for part in parts])
    text_keys = np.concatenate([part.text_keys for part in parts])
    assert offsets.tolist() == line_offsets
    assert id_keys.tolist() == [id_key(name) for name in TEXTS_OF_MANY_KINDS]
    assert text_keys.tolist() == [id_key(text) for text in TEXTS_OF_MANY_KINDS.values()]
    digest = TextsDigest()
    digest.add_encoded(b"".join(part.encoded for part in parts))
    assert digest.hexdigest() == texts_digest(TEXTS_OF_MANY_KINDS)


def test_keys_of_different_ids_differ() -> None:
    keys = [id_key(name) for name in TEXTS_OF_MANY_KINDS]
    assert keys[0] == 1
    assert len(set(keys)) == len(keys)


def test_a_file_that_changed_is_read_again(corpus: Path) -> None:
    digest_before = read_lazily(corpus).digest
    times = corpus.stat()
    changed = corpus.read_bytes().replace(b"trees", b"trams")
    # The file system's clock may stand still for some milliseconds.
    while corpus.stat().st_ctime_ns == times.st_ctime_ns:
        corpus.write_bytes(changed)
    os.utime(corpus, ns=(times.st_atime_ns, times.st_mtime_ns))

    contents = read_lazily(corpus)

    assert contents.digest != digest_before
    assert contents.documents == r.load_documents(corpus)
    assert read_lazily(corpus) == contents, "from the cache"


def test_a_file_that_changes_or_goes_after_it_was_opened_is_refused(corpus: Path) -> None:
    documents = load(corpus).documents
    corpus.write_bytes(b" " * 30 + corpus.read_bytes())
    with pytest.raises(DataError, match="has changed since it was opened"):
        documents["7"]
    corpus.unlink()
    with pytest.raises(DataError, match="or is gone"):
        documents["7"]


def test_a_file_that_was_just_written_is_not_cached(
    corpus: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lazy_documents, "SETTLED_SECONDS", 60.0)
    assert read_lazily(corpus) == read_lazily(corpus)
    assert not (corpus.parent / "cache").exists()


def test_a_small_file_is_read_into_memory(corpus: Path) -> None:
    assert type(r.load_collection(corpus, stored=1 << 20).documents) is dict


@pytest.mark.parametrize("name", ["facts.json", "keys.npy", "order.npy", "starts.npy"])
def test_a_damaged_cache_is_written_again(corpus: Path, name: str) -> None:
    expected = read_lazily(corpus)
    (file,) = (corpus.parent / "cache").rglob(name)
    file.write_bytes(file.read_bytes()[:50])
    assert read_lazily(corpus) == expected
    assert read_lazily(corpus) == expected


def test_documents_are_read_without_a_cache_that_can_be_written(corpus: Path) -> None:
    collection = load(corpus, Path("/proc/nowhere"))
    assert dict(collection.documents) == r.load_documents(corpus)


def test_the_corpus_of_a_beir_folder_is_read_lazily(corpus: Path) -> None:
    folder = corpus.parent / "beir"
    small_collection().save_beir(folder)
    expected = r.load_beir(folder).documents
    for _ in ("without a cache", "from the cache"):
        collection = load(folder)
        assert collection.name == "beir"
        assert isinstance(collection.documents, LazyDocuments)
        assert dict(collection.documents) == expected
        assert not collection.queries


def test_malformed_lines_are_named(corpus: Path) -> None:
    corpus.write_text(json.dumps({"_id": "d0", "text": 3}))
    with pytest.raises(DataError, match="'text' must be a string"):
        load(corpus)
    corpus.write_text("5\n")
    message = r"corpus\.jsonl:1: expected one JSON object per line, got int"
    with pytest.raises(DataError, match=message):
        load(corpus)
