"""Tests of documents that are put and deleted over HTTP."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer

from tests.serve.running import Client, Reply, served, serving
from tests.waiting import WAIT_SECONDS, wait_until
from tilefold import cli
from tilefold import retrieval as r
from tilefold._internal import files
from tilefold._internal.files import InUseError
from tilefold.recipes.backbone import minilm_path
from tilefold.retrieval.data.collection import Collection, Document
from tilefold.retrieval.errors import DataError
from tilefold.retrieval.index import publishing
from tilefold.retrieval.index.generations import IndexGeneration, read_generation, verify_files
from tilefold.retrieval.index.opening import open_index
from tilefold.retrieval.index.publishing import Publication
from tilefold.serve import writing
from tilefold.serve.document_log import Change, DocumentLog
from tilefold.serve.following import IndexFollower, IndexSource
from tilefold.serve.models import Served
from tilefold.serve.searchable import Searchable
from tilefold.serve.service import Service
from tilefold.serve.writing import DocumentWriter

ADMIN_KEY = "open sesame"
NEW = {"id": "parcels", "title": "Returns", "text": "Print the label and bring the parcel back."}


@dataclass(frozen=True)
class Running:
    """A server that takes documents.

    Attributes:
        client: client of the server, with the admin key.
        service: the service of the server.
        path: the folder of the index.
        log: the log of the documents.
    """

    client: Client
    service: Service
    path: Path
    log: DocumentLog

    def put(self, *documents: dict[str, Any], wait: bool = True) -> Reply:
        """Put documents, and wait until searches see them."""
        return self.send("PUT", {"documents": documents}, wait=wait)

    def delete(self, *ids: str, wait: bool = True) -> Reply:
        """Delete documents, and wait until searches do not see them."""
        return self.send("DELETE", {"ids": ids}, wait=wait)

    def send(self, method: str, body: Any, *, wait: bool) -> Reply:
        """Send a request to change the documents."""
        content = json.dumps(body).encode()
        path = f"/documents?wait={json.dumps(wait)}"
        return self.client.request(method, path, content, content_type="application/json")

    def hits(self, query: str) -> dict[str, Any]:
        """Return the id of each hit for a query, with its document."""
        reply = self.client.post("/v1/papers/search", {"query": query, "hits": 100})
        assert reply.status == 200, reply.raw
        return {hit["docid"]: hit["doc"] for hit in reply.json["candidates"]}


def run_index(arguments: Sequence[str]) -> None:
    """Run ``tilefold index`` in this process."""
    try:
        cli.main(["index", *arguments])
    except SystemExit as end:
        if end.code:
            raise RuntimeError(f"code {end.code}") from end


@contextmanager
def writing_server(
    path: Path,
    encoder: Served | None,
    documents: dict[str, Document] | None = None,
    run: Callable[[Sequence[str]], None] | None = run_index,
) -> Iterator[Running]:
    """Serve an index that takes documents."""
    log = DocumentLog(path)

    def open_searchable(generation: str) -> Searchable:
        return Searchable(
            "papers",
            open_index(path),
            encoder,
            log.documents(documents, generation) if documents else {},
            generation=generation,
        )

    generation = read_generation(path)
    models = [] if encoder is None else [encoder]
    service = Service(models, searchable=open_searchable(generation.id))
    source = IndexSource(path, lambda served, generation: open_searchable(generation), 0)
    DocumentWriter(service, IndexFollower(service, source, generation), log, run)
    with serving(service, admin_key=ADMIN_KEY) as client:
        client.headers = {"authorization": f"Bearer {ADMIN_KEY}"}
        yield Running(client, service, path, log)


@pytest.fixture(scope="module")
def encoder(sparse: Any) -> Served:
    """The sparse model, as it is served."""
    return Served(sparse, "sparse", "tiny")


@pytest.fixture
def path(tmp_path: Path, sparse: Any, collection: Collection) -> Path:
    """An index of the documents of the collection."""
    r.encode_collection(sparse, collection.contents(), tmp_path / "vectors")
    r.build_index(r.read_vectors(tmp_path / "vectors")).save(tmp_path / "index")
    return tmp_path / "index"


@pytest.fixture
def running(path: Path, encoder: Served, collection: Collection) -> Iterator[Running]:
    """A server that takes documents and shows them."""
    with writing_server(path, encoder, dict(collection.documents)) as server:
        yield server


def test_documents_are_found_and_shown_when_the_answer_says_so(running: Running) -> None:
    reply = running.put(NEW)
    assert reply.status == 200
    receipt = reply.json
    assert receipt["visible"]
    assert receipt["accepted"] == receipt["sequence"] == 1
    assert receipt["generation"] == read_generation(running.path).id
    hits = running.hits("print the label")
    assert hits["parcels"] == NEW
    document = running.client.get("/v1/papers/doc/parcels").json["doc"]
    assert document == NEW


def test_a_document_is_replaced_and_deleted(running: Running, collection: Collection) -> None:
    first_id = next(iter(collection.documents))
    assert running.put({**NEW, "id": first_id}).status == 200
    assert running.hits("print the label")[first_id]["text"] == NEW["text"]
    assert running.delete(first_id, "no such document").status == 200
    assert first_id not in running.hits("print the label")
    assert running.client.get(f"/v1/papers/doc/{first_id}").status == 404


def test_only_the_document_with_the_same_bytes_in_its_id_is_deleted(running: Running) -> None:
    mark = "\N{ZERO WIDTH NO-BREAK SPACE}"  # a byte order mark, if it begins a file
    assert running.put({**NEW, "id": "parcels"}, {**NEW, "id": f"{mark}parcels"}).status == 200

    assert running.delete(f"{mark}parcels").status == 200

    hits = running.hits("print the label")
    assert "parcels" in hits
    assert f"{mark}parcels" not in hits


def test_a_generation_between_two_changes_of_a_document_shows_the_text_of_its_vector(
    path: Path,
    encoder: Served,
    collection: Collection,
) -> None:
    may_write = threading.Semaphore(1)

    def run(arguments: Sequence[str]) -> None:
        assert may_write.acquire(timeout=WAIT_SECONDS)
        run_index(arguments)

    documents = dict(collection.documents)
    with writing_server(path, encoder, documents, run) as running:
        running.put({**NEW, "text": "the first text"})
        running.put({**NEW, "text": "the second text"}, wait=False)  # is not written yet
        assert running.client.request("POST", "/admin/reload").status == 200
        assert running.hits("print the label")["parcels"]["text"] == "the first text"
        may_write.release()
        wait_until(
            lambda: running.hits("print the label")["parcels"]["text"] == "the second text",
        )


def test_a_change_by_another_process_shows_no_text_whose_vector_could_not_be_written(
    path: Path,
    encoder: Served,
    collection: Collection,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(writing, "_RETRY_SECONDS", 60)
    deleted_id = next(iter(collection.documents))
    is_disk_full = False

    def run(arguments: Sequence[str]) -> None:
        if is_disk_full:
            r.update_index(path, delete=[deleted_id])  # as another process
            raise RuntimeError("no space left on device")
        run_index(arguments)

    with writing_server(path, encoder, dict(collection.documents), run) as running:
        running.put({**NEW, "text": "the first text"})
        is_disk_full = True
        reply = running.put({**NEW, "text": "the second text"})
        assert reply.json["error"] == "no space left on device"
        assert running.client.request("POST", "/admin/reload").status == 200
        hits = running.hits("print the label")
        assert deleted_id not in hits
        assert hits["parcels"]["text"] == "the first text"


def test_the_log_is_compacted_when_a_segment_was_written(
    running: Running,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes = []
    compact = DocumentLog.compact

    def compact_small_logs(log: DocumentLog, base: Container[str] | None) -> bool:
        is_compacted = compact(log, base, min_replaced_bytes=1)
        sizes.append(log.n_bytes)
        return is_compacted

    monkeypatch.setattr(DocumentLog, "compact", compact_small_logs)
    for number in range(4):
        assert running.put({**NEW, "text": f"text {number}"}).json["visible"]
    wait_until(lambda: len(sizes) == 4)
    assert sizes == [sizes[0]] * 4
    assert running.hits("print the label")["parcels"]["text"] == "text 3"


def test_an_answer_before_the_documents_are_visible_estimates_when(running: Running) -> None:
    reply = running.put(NEW, wait=False)
    assert reply.status == 202
    assert not reply.json["visible"]
    assert reply.json["visible_in_seconds"] > 0
    state = running.client.get("/documents").json
    assert state["accepted_sequence"] == 1
    wait_until(lambda: running.client.get("/documents").json["visible_sequence"] == 1)
    assert "parcels" in running.hits("print the label")
    assert running.client.metric("tilefold_pending_documents") == 0


def test_vectors_of_put_documents_are_those_of_encode(
    running: Running,
    sparse: Any,
    tmp_path: Path,
) -> None:
    running.put(NEW)
    r.encode_collection(sparse, {"parcels": f"{NEW['title']}\n{NEW['text']}"}, tmp_path / "new")
    expected = r.read_vectors(tmp_path / "new")
    segment = open_index(running.path).parts[-1]
    stored = segment.stored()
    assert stored.indices.tolist() == expected.indices.tolist()
    assert stored.data == pytest.approx(expected.data, rel=1e-5)
    assert segment.provenance.model_fingerprint == expected.provenance.model_fingerprint


def test_an_index_of_words_takes_documents(tmp_path: Path, collection: Collection) -> None:
    r.BM25Index.build(collection.contents()).save(tmp_path / "index")
    with writing_server(tmp_path / "index", None) as running:
        assert running.put(NEW).json["visible"]
        assert "parcels" in running.hits("label")
        assert running.delete("parcels").json["visible"]
        assert "parcels" not in running.hits("label")


def test_search_on_the_command_line_shows_the_documents_that_were_put(
    tmp_path: Path,
    collection: Collection,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "words"
    collection.save_beir(tmp_path / "data")
    r.BM25Index.build(collection.contents()).save(path)
    replaced_id, deleted_id, *_ = collection.documents
    with writing_server(path, None, dict(collection.documents)) as running:
        running.put(NEW, {"id": replaced_id, "title": "A new title", "text": "of a label"})
        running.delete(deleted_id)
        capsys.readouterr()
        options = ("--index", str(path), "--data", str(tmp_path / "data"), "--json")
        with pytest.raises(SystemExit) as end:
            cli.main(["search", "label", *options])
    assert end.value.code == 0
    output = capsys.readouterr()
    titles = {hit["id"]: hit["title"] for hit in json.loads(output.out)["hits"]}
    assert titles == {"parcels": "Returns", replaced_id: "A new title"}
    assert "titles are not shown" not in output.err


def test_a_title_is_shown_although_the_words_of_the_document_are_the_same(
    tmp_path: Path,
    collection: Collection,
) -> None:
    path = tmp_path / "words"
    r.BM25Index.build(collection.contents()).save(path)
    with writing_server(path, None, dict(collection.documents)) as running:
        running.put({"id": "new", "title": "Print", "text": "the label"})
        running.put({"id": "new", "title": "Print the", "text": "label"})

        assert running.hits("label")["new"]["title"] == "Print the"


def test_an_index_of_passages_of_token_vectors_takes_documents(
    tmp_path: Path,
    late: Any,
    collection: Collection,
) -> None:
    passages = r.Passages(length=4).of(collection.documents)
    r.encode_tokens(late, passages, tmp_path / "tokens")
    path = tmp_path / "index"
    r.LateIndex.build(r.open_tokens(tmp_path / "tokens"), path)
    with writing_server(path, Served(late, "multi-vector", "tiny")) as running:
        reply = running.put(NEW)
        assert reply.json["error"] is None
        assert "parcels" in running.hits("print the label")
        assert sum(name.startswith("parcels#") for name in open_index(path).ids) == 2
        assert running.delete("parcels").json["visible"]
        assert not any(name.startswith("parcels#") for name in open_index(path).ids)


def test_an_index_of_dense_vectors_takes_documents(
    tmp_path: Path,
    collection: Collection,
) -> None:
    minilm = SentenceTransformer(str(minilm_path()), device="cpu", local_files_only=True)
    texts = dict(list(collection.contents().items())[:2])
    r.encode_dense_collection(minilm, texts, tmp_path / "vectors", dimension=128)
    path = tmp_path / "index"
    r.DenseIndex.build(r.open_dense(tmp_path / "vectors")).save(path)
    r.encode_dense_collection(
        minilm,
        {"parcels": f"{NEW['title']}\n{NEW['text']}"},
        tmp_path / "expected",
        dimension=128,
    )
    with writing_server(path, Served(minilm, "dense", "minilm")) as running:
        assert running.put(NEW).json["error"] is None
        assert set(running.client.get("/documents").json["failed"]) == set()
        stored = open_index(path).vectors(["parcels"])
    expected = r.open_dense(tmp_path / "expected").read(["parcels"]).values
    assert stored.tolist()[0] == pytest.approx(expected.float().tolist()[0], abs=1e-5)


@pytest.mark.parametrize(
    ("method", "body", "message"),
    [
        pytest.param("PUT", {"documents": []}, "at least 1 item", id="no documents"),
        pytest.param("PUT", {"documents": [{"id": ""}]}, "got an empty one", id="empty id"),
        pytest.param(
            "PUT",
            {"documents": [{"id": "a"}]},
            "neither a title nor a text",
            id="empty document",
        ),
        pytest.param(
            "PUT",
            {"documents": [{"id": "a\nb", "text": "c"}]},
            "without line breaks",
            id="line break in an id",
        ),
        pytest.param("DELETE", {"ids": ["a"] * 1001}, "at most 1000", id="too many"),
        pytest.param(
            "PUT",
            {"documents": [{"id": "a", "txt": "c"}]},
            "Extra inputs",
            id="unknown field",
        ),
        pytest.param(
            "PUT",
            {"documents": [{"id": "a", "text": "b"}, {"_id": "c", "text": "d"}]},
            "`documents.1`: expected the id as `id`, got `_id`",
            id="id in the field of files",
        ),
    ],
)
def test_invalid_documents_are_refused(
    running: Running,
    method: str,
    body: Any,
    message: str,
) -> None:
    reply = running.send(method, body, wait=False)
    assert reply.status == 422
    assert message in reply.json["error"]
    assert running.client.get("/documents").json["accepted_sequence"] == 0


def test_documents_need_the_admin_key(running: Running) -> None:
    client = Client(running.client.port)
    for method in ("GET", "PUT", "DELETE"):
        assert client.request(method, "/documents").status == 401


def test_more_pending_documents_than_the_limit_are_refused(
    running: Running,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(writing, "MAX_PENDING_DOCUMENTS", 0)
    reply = running.put(NEW)
    assert reply.status == 429
    assert reply.headers["retry-after"] == "1"


def test_a_full_disk_accepts_nothing(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    assert running.put(NEW).status == 200

    def fail(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fail)
        reply = running.put({**NEW, "id": "second"})
    assert reply.status == 507
    assert "nothing was accepted" in reply.json["error"]
    assert "No space left" in reply.json["error"]
    assert running.put({**NEW, "id": "third"}).json["sequence"] == 2
    assert {"parcels", "third"} <= set(running.hits("print the label"))
    assert "second" not in running.hits("print the label")


def test_a_missing_permission_is_named(
    running: Running,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(log: DocumentLog) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(log.folder))

    monkeypatch.setattr(DocumentLog, "lock", refuse)
    reply = running.put(NEW)
    assert reply.status == 507
    assert "nothing was accepted" in reply.json["error"]
    assert "Permission denied" in reply.json["error"]


def test_changes_that_cannot_be_written_are_reported_and_tried_again(
    path: Path,
    encoder: Served,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(writing, "_RETRY_SECONDS", 0.05)
    is_full = threading.Event()
    is_full.set()

    def run(arguments: Sequence[str]) -> None:
        if is_full.is_set():
            raise RuntimeError("the disk is full")
        run_index(arguments)

    with writing_server(path, encoder, run=run) as running:
        reply = running.put(NEW)
        assert reply.status == 202
        assert reply.json["error"] == "the disk is full"
        assert running.client.get("/documents").json["error"] == "the disk is full"
        is_full.clear()
        wait_until(lambda: "parcels" in running.hits("print the label"))
        assert running.client.get("/documents").json["error"] is None


@pytest.fixture
def failing_then_held(
    path: Path,
    encoder: Served,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[tuple[Running, list[str]]]:
    """A server whose second attempt to write is running, because the first one has failed.

    The second attempt has one change. It goes on once another change is in the log.

    Yields:
        The server, and the error messages of its next attempts. Without further messages, it
        writes.
    """
    monkeypatch.setattr(writing, "_RETRY_SECONDS", 0.05)
    errors = ["first error"]
    second_attempt_started = threading.Event()

    def run(arguments: Sequence[str]) -> None:
        is_second_attempt = not errors and not second_attempt_started.is_set()
        if is_second_attempt:
            second_attempt_started.set()
            wait_until(lambda: server.log.n_pending == 2)
        if errors:
            raise RuntimeError(errors.pop(0))
        run_index(arguments)

    with writing_server(path, encoder, run=run) as server:
        assert server.put(NEW).json["error"] == "first error"
        assert second_attempt_started.wait(WAIT_SECONDS)
        yield server, errors


def test_documents_that_are_put_while_failed_changes_are_written_wait_until_they_are_visible(
    failing_then_held: tuple[Running, list[str]],
) -> None:
    running, _ = failing_then_held
    reply = running.put({**NEW, "id": "later"})
    assert reply.status == 200, reply.raw
    assert reply.json["visible"]
    assert {"parcels", "later"} <= running.hits("print the label").keys()


def test_documents_that_are_put_while_failed_changes_are_written_get_the_error_of_their_attempt(
    failing_then_held: tuple[Running, list[str]],
) -> None:
    running, errors = failing_then_held
    errors += ["error of the second attempt", "error of the third attempt"]
    reply = running.put({**NEW, "id": "later"})
    assert reply.status == 202
    assert reply.json["error"] == "error of the third attempt"


def test_an_internal_error_is_logged_with_its_traceback_and_writing_goes_on(
    path: Path,
    encoder: Served,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(writing, "_RETRY_SECONDS", 0.05)
    n_failures = 0

    def run(arguments: Sequence[str]) -> None:
        nonlocal n_failures
        if n_failures < 2:
            n_failures += 1
            raise KeyError("vectors")
        run_index(arguments)

    with writing_server(path, encoder, run=run) as running:
        assert running.put(NEW).json["error"] == "KeyError: 'vectors'"
        wait_until(lambda: "parcels" in running.hits("print the label"))
    (record,) = [record for record in caplog.records if record.exc_info]
    assert record.getMessage() == "documents were not written: KeyError: 'vectors'"


def test_a_document_that_cannot_be_encoded_is_named_and_the_others_are_written(
    running: Running,
    encoder: Served,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    encode = Served.encode

    def fail_for_one(model: Served, key: Any, inputs: Sequence[str]) -> list[Any]:
        if any("impossible" in text for text in inputs):
            raise ValueError("not finite")
        return encode(model, key, inputs)

    monkeypatch.setattr(Served, "encode", fail_for_one)
    reply = running.put({"id": "bad", "text": "impossible"}, NEW)
    assert reply.json["visible"]
    assert set(running.client.get("/documents").json["failed"]) == {"bad"}
    assert "parcels" in running.hits("print the label")
    monkeypatch.undo()
    running.put({"id": "bad", "text": "possible"})
    assert running.client.get("/documents").json["failed"] == {}


def test_a_deletion_is_not_lost_if_the_next_document_of_this_id_cannot_be_encoded(
    path: Path,
    encoder: Served,
    collection: Collection,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    encode = Served.encode
    may_write = threading.Semaphore(1)

    def fail_for_one(model: Served, key: Any, inputs: Sequence[str]) -> list[Any]:
        if any("impossible" in text for text in inputs):
            raise ValueError("not finite")
        return encode(model, key, inputs)

    def run(arguments: Sequence[str]) -> None:
        assert may_write.acquire(timeout=WAIT_SECONDS)
        run_index(arguments)

    monkeypatch.setattr(Served, "encode", fail_for_one)
    with writing_server(path, encoder, dict(collection.documents), run) as running:
        running.put(NEW)
        running.put({"id": "other", "text": "another parcel"}, wait=False)
        # These two changes are written together, since the index is changed meanwhile.
        running.delete("parcels", wait=False)
        running.put({**NEW, "text": "impossible"}, wait=False)
        may_write.release(2)
        wait_until(lambda: "parcels" not in running.hits("print the label"))
        assert set(running.client.get("/documents").json["failed"]) == {"parcels"}
        assert "parcels" not in running.log.documents({})
        assert "parcels" not in DocumentLog(path).documents({})


def test_a_broken_device_fails_no_document(
    path: Path,
    encoder: Served,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(writing, "_RETRY_SECONDS", 0.05)

    def fail(model: Served, key: Any, inputs: Sequence[str]) -> list[Any]:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with writing_server(path, encoder) as running:
        with monkeypatch.context() as broken:
            broken.setattr(Served, "encode", fail)
            reply = running.put(NEW)
            assert reply.status == 202
            assert "inference failed" in reply.json["error"]
            state = running.client.get("/documents").json
            assert (state["pending"], state["failed"]) == (1, {})
        wait_until(lambda: "parcels" in running.hits("print the label"))


def test_a_killed_process_that_changes_the_index_is_named_by_its_signal(
    path: Path,
    encoder: Served,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program = tmp_path / "killed"
    program.write_text("#!/bin/sh\necho 'documents have no metadata' >&2\nkill -9 $$\n")
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    with writing_server(path, encoder, run=None) as running:
        error = running.put(NEW).json["error"]
    assert error == "tilefold index was killed (SIGKILL), as happens when memory is short"


class Panic(BaseException):
    """Stands for a panic of Rust code, which is not an ``Exception`` in Python."""


def test_a_document_on_which_the_tokenizer_panics_fails_alone(
    running: Running,
    encoder: Served,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokenizer = encoder.tokenizer._tokenizer

    class PanickingTokenizer:
        """Panics on one text."""

        def encode(self, text: str, **options: Any) -> Any:
            return self.encode_batch([text], **options)[0]

        def encode_batch(self, texts: list[str], **options: Any) -> Any:
            if any("impossible" in text for text in texts):
                raise Panic("index out of bounds")
            return tokenizer.encode_batch(texts, **options)

    monkeypatch.setattr(encoder.tokenizer, "_tokenizer", PanickingTokenizer())
    reply = running.put({"id": "bad", "text": "impossible"}, NEW)
    assert reply.json["visible"]
    failed = running.client.get("/documents").json["failed"]
    assert failed == {"bad": "Tokenization error: Panic"}
    assert "parcels" in running.hits("print the label")


def test_a_panic_does_not_end_the_writing(
    path: Path,
    encoder: Served,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(writing, "_RETRY_SECONDS", 0.05)
    panics = iter([True])

    def run(arguments: Sequence[str]) -> None:
        if next(panics, False):
            raise Panic("index out of bounds")
        run_index(arguments)

    with writing_server(path, encoder, run=run) as running:
        reply = running.put(NEW)
        assert reply.status == 202
        assert reply.json["error"] == "Panic: index out of bounds"
        wait_until(lambda: "parcels" in running.hits("print the label"))


def test_documents_that_were_accepted_before_a_crash_are_written_at_the_next_start(
    path: Path,
    encoder: Served,
) -> None:
    log = DocumentLog(path)
    log.lock()
    log.append([Change("parcels", Document("parcels", NEW["title"], NEW["text"]))])
    with (log.folder / "log.jsonl").open("ab") as file:
        file.write(b'{"sequence": 2, "put": {"_id": "cut')  # the process was killed here
    log.unlock()
    with writing_server(path, encoder) as running:
        wait_until(lambda: "parcels" in running.hits("print the label"))
        assert running.put({**NEW, "id": "second"}).json["sequence"] == 2


def test_a_second_process_refuses_documents(running: Running, encoder: Served) -> None:
    running.put(NEW)
    with writing_server(running.path, encoder) as second:
        reply = second.put({**NEW, "id": "second"})
        assert reply.status == 409
        assert "another server process" in reply.json["error"]
        assert "parcels" in second.hits("print the label")


def test_a_model_that_did_not_encode_the_index_writes_nothing(
    path: Path,
    two_sided: Any,
) -> None:
    with writing_server(path, Served(two_sided, "sparse", "other")) as running:
        reply = running.put(NEW)
        assert reply.status == 202
        assert "is not the model that encoded the documents" in reply.json["error"]


def test_a_server_with_vectors_in_other_folders_takes_no_documents(
    path: Path,
    encoder: Served,
) -> None:
    service = Service([encoder], searchable=Searchable("papers", open_index(path), encoder))
    with serving(service, admin_key=ADMIN_KEY) as client:
        client.headers = {"authorization": f"Bearer {ADMIN_KEY}"}
        body = json.dumps({"ids": ["a"]}).encode()
        reply = client.request("DELETE", "/documents", body, content_type="application/json")
        assert reply.status == 409
        assert "--vectors" in reply.json["error"]


def test_a_log_is_written_by_one_process_at_a_time(tmp_path: Path) -> None:
    first = DocumentLog(tmp_path / "index")
    second = DocumentLog(tmp_path / "index")
    first.lock()
    with pytest.raises(InUseError):
        second.lock()
    first.append([Change("a", None)])
    first.unlock()
    second.lock()
    assert second.append([Change("b", None)]) == 2
    assert [change.document_id for change in second.pending(10).values()] == ["a", "b"]
    second.unlock()


def test_a_damaged_log_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    log = DocumentLog(tmp_path / "index")
    log.lock()
    log.append([Change("a", None)])
    log.unlock()
    (log.folder / "log.jsonl").write_bytes(b"{}\n")
    with pytest.raises(DataError, match=r"log\.jsonl: expected a change at byte 0"):
        DocumentLog(tmp_path / "index")


@pytest.mark.parametrize(
    "content", ["{}", '{"sequence": "?"}', '{"sequence": 1, "failed": {}, "writing": []}']
)
def test_damaged_progress_of_a_log_is_an_error_that_names_the_file(
    log: DocumentLog,
    content: str,
) -> None:
    (log.folder / "applied.json").write_text(content)

    with pytest.raises(DataError, match=r"applied\.json: expected which changes the index has"):
        DocumentLog(index_of(log))


def test_documents_of_a_log_replace_and_hide_those_of_the_collection(tmp_path: Path) -> None:
    base = {name: Document(name, "", "old") for name in ("a", "b", "c")}
    log = DocumentLog(tmp_path / "index")
    assert log.documents(base) is base
    log.lock()
    changes = [Change("a", Document("a", "", "new", {"lang": "en"})), Change("b", None)]
    log.append([*changes, Change("d", Document("d", "", "new"))])
    assert "b" in log.documents(base)  # the index still has it
    log.mark_applied(3, {})
    documents = log.documents(base)
    assert sorted(documents) == ["a", "c", "d"]
    assert documents["a"] == changes[0].document
    assert documents["c"].text == "old"
    assert len(documents) == 3
    assert bool(documents)
    log.unlock()


def test_a_document_stays_as_it_is_in_the_index_while_its_deletion_is_pending(
    tmp_path: Path,
) -> None:
    base = {"a": Document("a", "", "old")}
    log = DocumentLog(tmp_path / "index")
    log.lock()
    log.append([Change("a", Document("a", "", "new")), Change("b", Document("b", "", "new"))])
    log.mark_applied(2, {})
    log.append([Change("a", None), Change("b", None)])
    documents = log.documents(base)
    assert {name: documents[name].text for name in documents} == {"a": "new", "b": "new"}
    log.mark_applied(4, {})
    log.append([Change("a", None)])  # deleted again
    assert not list(log.documents(base))
    log.append([Change("a", Document("a", "", "newest"))])
    log.mark_applied(6, {})
    assert log.documents(base)["a"].text == "newest"
    log.unlock()


@pytest.fixture
def log(tmp_path: Path) -> Iterator[DocumentLog]:
    """A locked log, of which the index has document ``a`` with the text ``first``."""
    log = DocumentLog(tmp_path / "index")
    log.lock()
    log.append([text_change("a", "first")])
    log.mark_applied(1, {})
    yield log
    log.unlock()


def text_change(document_id: str, text: str) -> Change:
    """Return the change that puts a document."""
    return Change(document_id, Document(document_id, "", text))


def texts_of(log: DocumentLog, generation: str | None = None) -> dict[str, str]:
    """Return id -> text of the documents that an index without a collection has."""
    documents = log.documents({}, generation)
    return {name: documents[name].text for name in documents}


def index_of(log: DocumentLog) -> Path:
    """Return the index of a log."""
    return log.folder.with_name("index")


@pytest.fixture
def generations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Ids of the generations of an index that does not exist; the last one is current."""
    generations = ["old"]
    monkeypatch.setattr(
        publishing,
        "read_generation",
        lambda path: IndexGeneration(generations[-1], "exact", 0),
    )
    return generations


def test_a_pending_text_is_not_shown_before_its_vector(
    log: DocumentLog,
    generations: list[str],
) -> None:
    log.append([text_change("a", "second"), text_change("a", "third"), text_change("b", "new")])
    assert texts_of(log) == {"a": "first"}
    log.mark_writing(2, {}, "old")
    with publishing.publishing(index_of(log), log_sequence=2):
        assert texts_of(log, "old") == {"a": "first"}
        generations.append("new")  # the segment was added, but is not recorded yet
        assert texts_of(log, "new") == {"a": "second"}
    assert texts_of(log, "new") == {"a": "second"}
    assert texts_of(log, "old") == {"a": "first"}
    log.mark_applied(2, {})
    assert texts_of(log, "new") == {"a": "second"}
    log.mark_applied(4, {})
    assert texts_of(log, "newest") == {"a": "third", "b": "new"}


def test_after_a_kill_while_a_segment_was_added_its_generation_decides_on_the_texts(
    log: DocumentLog,
    generations: list[str],
) -> None:
    log.append([text_change("a", "second")])
    log.mark_writing(2, {}, "old")
    Publication(2, "old").write(index_of(log))
    log.unlock()  # killed
    restarted = DocumentLog(index_of(log))
    assert texts_of(restarted, "old") == {"a": "first"}
    assert texts_of(restarted, "new") == {"a": "second"}
    assert list(restarted.pending(10)) == [2]  # it is written again in any case
    generations.append("new")
    restarted.lock()
    restarted.append([text_change("a", "third")])
    restarted.mark_writing(3, {}, "new")
    assert texts_of(restarted, "new") == {"a": "second"}
    with publishing.publishing(index_of(log), log_sequence=3):
        generations.append("newest")
    assert texts_of(restarted, "newest") == {"a": "third"}
    restarted.unlock()


@pytest.mark.parametrize("is_published", [True, False])
def test_after_a_kill_another_change_of_the_index_does_not_decide_on_the_texts(
    log: DocumentLog,
    generations: list[str],
    is_published: bool,
) -> None:
    log.append([text_change("a", "second")])
    log.mark_writing(2, {}, "old")
    Publication(2, "old").write(index_of(log))  # the process that adds the segment is killed
    if is_published:
        generations.append("with the segment")
    with publishing.publishing(index_of(log)):
        generations.append("of another process")

    text = "second" if is_published else "first"
    assert texts_of(log, "of another process") == {"a": text}


def test_while_a_segment_waits_a_change_by_another_process_leaves_the_earlier_texts(
    log: DocumentLog,
    generations: list[str],
) -> None:
    log.append([text_change("a", "second")])
    log.mark_writing(2, {}, "old")
    with publishing.publishing(index_of(log)):
        generations.append("of another process")

    for reader in (log, DocumentLog(index_of(log))):
        assert texts_of(reader, "of another process") == {"a": "first"}
    # The segment is then added by another attempt.
    log.mark_writing(2, {}, "of another process")
    with publishing.publishing(index_of(log), log_sequence=2):
        generations.append("new")
    assert texts_of(log, "new") == {"a": "second"}


def test_a_reader_shows_a_segment_although_the_writer_begins_with_another_one(
    log: DocumentLog,
    generations: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log.append([text_change("a", "second")])
    log.mark_writing(2, {}, "old")
    with publishing.publishing(index_of(log), log_sequence=2):
        generations.append("new")
    reader = DocumentLog(index_of(log))
    read_publication = Publication.read

    def read_after_writer(index: Path) -> Publication | None:
        monkeypatch.setattr(Publication, "read", read_publication)
        log.mark_applied(2, {})
        log.append([text_change("b", "third")])
        log.mark_writing(3, {}, "new")
        Publication(3, "new").write(index)
        return Publication.read(index)

    monkeypatch.setattr(Publication, "read", read_after_writer)

    assert texts_of(reader, "new") == {"a": "second"}


def test_a_segment_that_could_not_be_added_leaves_the_earlier_texts(
    log: DocumentLog,
    generations: list[str],
) -> None:
    log.append([text_change("a", "second")])
    log.mark_writing(2, {}, "old")
    with pytest.raises(OSError, match="full"), publishing.publishing(index_of(log), 2):
        raise OSError("full")
    generations.append("of another process")

    assert texts_of(log, "of another process") == {"a": "first"}


def test_a_document_that_could_not_be_encoded_keeps_its_earlier_text(
    log: DocumentLog,
    generations: list[str],
) -> None:
    log.append([text_change("a", "impossible"), text_change("b", "impossible")])
    log.mark_writing(3, {"a", "b"}, "old")
    with publishing.publishing(index_of(log), log_sequence=3):
        generations.append("new")
    assert texts_of(log, "new") == {"a": "first"}
    log.mark_applied(3, {"a": "not finite", "b": "not finite"})
    for reader in (log, DocumentLog(log.folder.with_name("index"))):
        assert texts_of(reader) == {"a": "first"}
        assert set(reader.failed) == {"a", "b"}
    log.append([text_change("a", "possible")])
    log.mark_applied(4, {})
    for reader in (log, DocumentLog(log.folder.with_name("index"))):
        assert texts_of(reader) == {"a": "possible"}
        assert set(reader.failed) == {"b"}


def test_a_compacted_log_has_the_same_documents_and_pending_changes(log: DocumentLog) -> None:
    reader = DocumentLog(log.folder.with_name("index"))
    opened_before = reader.documents({})
    log.append([text_change("b", "new"), Change("b", None), text_change("c", "new")])
    log.append([text_change("a", f"text {number}") for number in range(20)])
    log.mark_applied(23, {})
    log.append([text_change("c", "pending")])
    size = log.n_bytes
    assert log.compact(min_replaced_bytes=1)
    assert log.n_bytes == (log.folder / "log.jsonl").stat().st_size < size / 2
    assert opened_before["a"].text == "first"  # read from the replaced file
    for other in (log, reader, DocumentLog(log.folder.with_name("index"))):
        assert texts_of(other) == {"a": "text 18", "c": "new"}
        assert list(other.documents({"b": Document("b", "", "of the collection")})) == ["c", "a"]
        assert [change.document_id for change in other.pending(10).values()] == ["a", "c"]
    assert log.append([text_change("d", "new")]) == 26
    log.mark_applied(26, {})
    for other in (log, reader, DocumentLog(log.folder.with_name("index"))):
        assert texts_of(other) == {"a": "text 19", "c": "pending", "d": "new"}


def test_a_compacted_log_has_no_deletions_of_documents_that_the_collection_lacks(
    log: DocumentLog,
) -> None:
    base = {"b": Document("b", "", "of the collection")}
    log.append([text_change("c", "new"), Change("b", None), Change("c", None)])
    log.append([Change(f"never present {number}", None) for number in range(20)])
    log.mark_applied(24, {})
    assert not log.compact(min_replaced_bytes=1)  # without the collection, each may have an effect
    assert log.compact(base, min_replaced_bytes=1)
    content = (log.folder / "log.jsonl").read_text()
    assert [list(json.loads(line))[1] for line in content.splitlines()] == ["put", "delete"]
    assert '"delete": "b"' in content
    for reader in (log, DocumentLog(index_of(log))):
        assert list(reader.documents(base)) == ["a"]
        assert reader.last == 24


def test_few_deletions_are_no_reason_to_rewrite_a_log(log: DocumentLog) -> None:
    log.append([Change("b", None), Change("never present", None)])
    log.mark_applied(3, {})

    assert not log.compact({"b"}, min_replaced_bytes=1)
    assert not log.compact({"b"})


def test_sequence_numbers_go_on_if_the_last_changes_were_removed(log: DocumentLog) -> None:
    log.append([text_change("b", "impossible")])
    log.mark_applied(2, {"b": "not finite"})
    log.append([text_change("c", "x" * 100)] * 3)
    log.mark_applied(5, {"c": "not finite"})
    assert log.compact(min_replaced_bytes=1)
    restarted = DocumentLog(log.folder.with_name("index"))
    assert (log.last, restarted.last) == (5, 5)
    assert texts_of(restarted) == {"a": "first"}


def test_a_log_with_few_replaced_lines_is_not_rewritten(log: DocumentLog) -> None:
    log.append([text_change("a", "second")])
    log.mark_applied(2, {})
    assert not log.compact()
    log.append([text_change("b", "x" * 1000)])
    log.mark_applied(3, {})
    assert not log.compact(min_replaced_bytes=1)


def test_a_log_stays_as_it_is_if_it_cannot_be_compacted(
    log: DocumentLog,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log.append([text_change("a", "second")] * 3)
    log.mark_applied(4, {})
    content = (log.folder / "log.jsonl").read_bytes()

    def fail(path: Path, target: Path) -> Path:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full_disk:
        full_disk.setattr(Path, "replace", fail)
        with pytest.raises(OSError, match="No space left"):
            log.compact(min_replaced_bytes=1)
    assert (log.folder / "log.jsonl").read_bytes() == content
    assert texts_of(log) == {"a": "second"}
    assert log.append([text_change("b", "new")]) == 5


def test_a_compaction_that_fails_after_its_last_step_loses_no_change(
    log: DocumentLog,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log.append([text_change("a", "second")] * 3)
    log.mark_applied(4, {})

    def fail(path: Path) -> None:
        if path.is_dir():  # the new file has taken the place of the old one then
            raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as no_descriptors:
        no_descriptors.setattr(files, "sync", fail)
        with pytest.raises(OSError, match="Too many open files"):
            log.compact(min_replaced_bytes=1)
    log.append([text_change("a", "third"), text_change("b", "new")])
    log.mark_applied(6, {})
    log.append([text_change("c", "pending")])
    log.compact(min_replaced_bytes=1)
    reader = DocumentLog(log.folder.with_name("index"))
    assert texts_of(reader) == {"a": "third", "b": "new"}
    assert reader.pending(10) == {7: text_change("c", "pending")}


def test_a_log_that_was_removed_while_a_server_runs_is_not_written(tmp_path: Path) -> None:
    log = DocumentLog(tmp_path / "index")
    log.lock()
    log.append([Change("a", None)])
    log.unlock()
    shutil.rmtree(log.folder)
    with pytest.raises(DataError, match=r"log\.jsonl: expected the changes .* Restart the server"):
        log.lock()
    assert not log.is_locked
    restarted = DocumentLog(tmp_path / "index")
    restarted.lock()
    assert restarted.append([Change("a", None)]) == 1
    restarted.unlock()


def test_a_log_stays_locked_while_a_process_of_its_writer_changes_the_index(tmp_path: Path) -> None:
    log = DocumentLog(tmp_path / "index")
    log.lock()
    with subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()"],
        stdin=subprocess.PIPE,
        pass_fds=log.inherited_descriptors,
    ) as process:
        log.unlock()  # as if the server had been killed
        second = DocumentLog(tmp_path / "index")
        with pytest.raises(InUseError, match="still changing the index"):
            second.lock()
        process.stdin.close()
    second.lock()
    second.unlock()


@pytest.mark.slow
def test_acknowledged_documents_survive_kills_of_the_server(
    path: Path,
    masked_lm: str,
    tmp_path: Path,
) -> None:
    key = tmp_path / "key"
    key.write_text(ADMIN_KEY)
    options = ("--model", masked_lm, "--index", path, "--admin-key-file", key)
    generator = np.random.default_rng(7)
    acknowledged: list[str] = []
    for attempt in range(4):
        with served(*options) as (process, client, _):
            client.headers = {"authorization": f"Bearer {ADMIN_KEY}"}
            ends = time.monotonic() + generator.uniform(0.5, 5)
            number = 0
            while time.monotonic() < ends:
                document_id = f"{attempt}-{number}"
                body = {"documents": [{"id": document_id, "text": f"parcel {number}"}]}
                content = json.dumps(body).encode()
                reply = client.request(
                    "PUT", "/documents", content, content_type="application/json"
                )
                if reply.status in (200, 202):  # 409 while the process of a killed server ends
                    acknowledged.append(document_id)
                number += 1
                time.sleep(generator.uniform(0, 0.1))
            process.kill()
            process.wait(WAIT_SECONDS)
    with served(*options) as (process, client, _):
        client.headers = {"authorization": f"Bearer {ADMIN_KEY}"}
        log_size = len(acknowledged)
        assert log_size > 10
        wait_until(lambda: client.get("/documents").json["pending"] == 0)
        assert client.get("/documents").json["failed"] == {}
    assert set(acknowledged) <= set(open_index(path).ids)
    verify_files(path)


def test_an_index_whose_documents_were_all_deleted_takes_documents_without_a_merge(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(writing, "_MAX_SEGMENTS", -1)  # merges after each change
    minilm = SentenceTransformer(str(minilm_path()), device="cpu", local_files_only=True)
    path = tmp_path / "index"
    r.encode_dense_collection(minilm, {"first": "a text"}, tmp_path / "vectors")
    r.DenseIndex.build(r.open_dense(tmp_path / "vectors")).save(path)
    with writing_server(path, Served(minilm, "dense", "minilm")) as running:
        assert running.put(NEW).json["error"] is None
        assert running.delete("first", "parcels").json["error"] is None
        assert running.put({**NEW, "id": "again"}).json["error"] is None
        assert list(running.hits("label")) == ["again"]
