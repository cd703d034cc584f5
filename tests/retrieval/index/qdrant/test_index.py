"""An index of Qdrant: in a folder, or a folder with the URL of a collection on a server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.manifests import edit
from tests.retrieval.index.qdrant.documents import MakeVectors, check_same_hits
from tests.retrieval.qdrant_over_http import OverHttp
from tilefold.retrieval import SparseVectors, build_index, load_index
from tilefold.retrieval.errors import DataError, VocabularyMismatchError
from tilefold.retrieval.index.qdrant import QdrantCollection


def build_in_folder(vectors: SparseVectors, folder: Path, *, overwrite: bool = False) -> Any:
    """Build an index of Qdrant whose collection is embedded in ``folder``."""
    return build_index(vectors, "qdrant", folder=folder, overwrite=overwrite)


@pytest.fixture
def folder(make_vectors: MakeVectors, tmp_path: Path) -> Path:
    """A closed index of twenty documents."""
    folder = tmp_path / "index"
    build_in_folder(make_vectors(20), folder).close()
    return folder


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param("{", "expected a JSON object", id="no JSON"),
        pytest.param('{"schema_version": 9}', "of schema 1, got 9", id="later schema"),
        pytest.param(
            '{"schema_version": 1}',
            r"got \{'schema_version': 1\} \(KeyError\('layout'\)",
            id="no layout",
        ),
    ],
)
def test_a_damaged_record_of_the_collection_is_named(
    content: str,
    message: str,
    folder: Path,
) -> None:
    (folder / "collection.json").write_text(content)
    with pytest.raises(DataError, match=message):
        load_index(folder)


def test_an_edited_record_of_the_collection_is_refused(folder: Path) -> None:
    record = folder / "collection.json"
    record.write_text(record.read_text().replace('"complete": true', '"complete": false'))
    with pytest.raises(DataError, match="the checksum does not match"):
        load_index(folder)


def test_an_unfinished_collection_is_refused(folder: Path) -> None:
    edit(folder / "collection.json", complete=False)
    with pytest.raises(DataError, match=r"whose build is not finished. Run tilefold index"):
        load_index(folder)


def test_damaged_segments_are_named(folder: Path) -> None:
    for file in (folder / "shard" / "segments").rglob("segment.json"):
        file.write_text("?")
    with pytest.raises(DataError, match=r"segment.json: damaged; its .*\(1 of \d+ files\). Build"):
        load_index(folder)
    with pytest.raises(DataError, match=r"Qdrant failed: .*Build the index again"):
        QdrantCollection.embedded(folder, verify=False)


def test_a_missing_record_of_the_collection_is_named(folder: Path) -> None:
    (folder / "collection.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"collection.json|there is no collection"):
        load_index(folder)


def test_an_index_is_replaced_only_on_request_and_when_it_is_complete(
    folder: Path,
    make_vectors: MakeVectors,
    tmp_path: Path,
) -> None:
    vectors = make_vectors(50)
    queries = make_vectors(5, seed=1, prefix="q")

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(FileExistsError, match="overwrite=True"):
        build_in_folder(vectors, folder)
    with pytest.raises(KeyboardInterrupt):
        build_index(vectors, "qdrant", folder=folder, overwrite=True, progress=interrupt)
    loaded: Any = load_index(folder)
    with loaded.collection as collection:
        assert len(collection) == 20

    index = build_in_folder(vectors, folder, overwrite=True)
    with index.collection:
        check_same_hits(index.search(queries, 10), build_index(vectors).search(queries, 10))
        assert index.n_documents == 50
        assert index.vocab_size == 500
        assert index.fingerprint == "f" * 64
    assert [path.name for path in tmp_path.iterdir()] == ["index"]


def test_a_document_deleted_from_the_collection_is_not_in_the_index(folder: Path) -> None:
    index: Any = load_index(folder)
    with index.collection as collection:
        collection.delete(["d0"])
    loaded: Any = load_index(folder)
    with loaded.collection:
        assert loaded.n_documents == 19


def test_a_folder_with_other_files_is_not_replaced(
    folder: Path,
    make_vectors: MakeVectors,
) -> None:
    (folder / "thesis.txt").write_text("years of work")
    message = r"other files \(thesis.txt\).*nothing was overwritten"
    with pytest.raises(FileExistsError, match=message):
        build_in_folder(make_vectors(50), folder, overwrite=True)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[OverHttp]:
    """A server that wants a key, which is in the environment."""
    http = OverHttp()
    http.key = "sesame-9d1c"
    monkeypatch.setenv("QDRANT_API_KEY", http.key)
    yield http
    http.stop()


def build_papers(vectors: SparseVectors, server: OverHttp, *, overwrite: bool = False) -> Any:
    """Build an index in the collection ``papers`` of a server."""
    return build_index(
        vectors,
        "qdrant",
        url=server.url,
        collection="papers",
        overwrite=overwrite,
    )


def test_an_index_on_a_server_is_saved_as_its_url_without_the_key(
    server: OverHttp,
    make_vectors: MakeVectors,
    tmp_path: Path,
) -> None:
    vectors = make_vectors(50)
    queries = make_vectors(5, seed=1, prefix="q")
    build_papers(vectors, server).save(tmp_path)

    assert [path.name for path in tmp_path.iterdir()] == ["index.json"]
    text = (tmp_path / "index.json").read_text()
    assert server.key is not None
    assert server.key not in text
    assert json.loads(text)["options"]["url"] == server.url
    loaded = load_index(tmp_path)
    check_same_hits(loaded.search(queries, 10), build_index(vectors).search(queries, 10))


def test_a_collection_on_a_server_is_replaced_only_on_request(
    server: OverHttp,
    make_vectors: MakeVectors,
    tmp_path: Path,
) -> None:
    build_papers(make_vectors(50), server).save(tmp_path)
    others = make_vectors(20, seed=4)
    of_another_vocabulary = make_vectors(5, vocab_size=700)

    message = (
        r"got 50 documents. Choose another folder or name, or replace the collection "
        r"\(overwrite=True or --overwrite\)"
    )
    with pytest.raises(DataError, match=message):
        build_papers(others, server)
    assert build_papers(others, server, overwrite=True).n_documents == 20
    with pytest.raises(VocabularyMismatchError):
        build_papers(of_another_vocabulary, server)
    build_papers(of_another_vocabulary, server, overwrite=True)
    with pytest.raises(DataError, match="got a collection with another vocabulary"):
        load_index(tmp_path)


def test_a_collection_that_another_program_made_is_not_replaced(
    server: OverHttp,
    make_vectors: MakeVectors,
) -> None:
    server.client.create_collection("theirs", {})
    message = r"a collection that tilefold made, .*nothing was changed"
    with pytest.raises(DataError, match=message):
        build_index(
            make_vectors(50),
            "qdrant",
            url=server.url,
            collection="theirs",
            overwrite=True,
        )
    assert server.client.collection_exists("theirs")


def test_an_index_whose_collection_was_deleted_is_not_loaded(
    server: OverHttp,
    make_vectors: MakeVectors,
    tmp_path: Path,
) -> None:
    build_papers(make_vectors(50), server).save(tmp_path)
    server.client.delete_collection("papers")
    with pytest.raises(FileNotFoundError, match="there is no such collection"):
        load_index(tmp_path)


URL = "http://localhost"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param({"ef": 3}, "options: Qdrant has folder, .*; got ef", id="unknown option"),
        pytest.param(
            {"weights": "int8"},
            "weights: expected one of float32, float16, got 'int8'",
            id="unknown type of weights",
        ),
        pytest.param(
            {"url": URL},
            "collection: expected the name of the collection, got None",
            id="no name of the collection",
        ),
        pytest.param(
            {"url": URL, "collection": "a/b"},
            "name: expected letters",
            id="name with a slash",
        ),
        pytest.param(
            {"url": "localhost:6333", "collection": "a"},
            "url: expected http://host:6333",
            id="address without a scheme",
        ),
        pytest.param(
            {"url": "http://me:secret@host", "collection": "a"},
            "url: expected an address without a key",
            id="key in the address",
        ),
        pytest.param(
            {"url": URL, "collection": "a", "api_key": "se cret"},
            "api_key: expected printable ASCII",
            id="key with a space",
        ),
        pytest.param(
            {"url": URL, "collection": "a", "timeout": 0},
            "timeout: expected seconds above 0, got 0",
            id="timeout of 0",
        ),
        pytest.param(
            {"url": URL, "collection": "a", "folder": "b"},
            "folder: expected either a folder or the url",
            id="folder and address",
        ),
    ],
)
def test_wrong_options_are_named_without_the_key(
    options: dict[str, Any],
    message: str,
    make_vectors: MakeVectors,
) -> None:
    with pytest.raises(ValueError, match=message) as error:
        build_index(make_vectors(3), "qdrant", **options)
    assert "secret" not in str(error.value)
    assert "se cret" not in str(error.value)
