"""Processes that are killed, and servers that are away, slow, busy, or want another key."""

from __future__ import annotations

import math
import os
import random
import re
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import programs
from tests.retrieval.conftest import random_vectors
from tests.retrieval.qdrant_over_http import OverHttp
from tests.waiting import WAIT_SECONDS
from tilefold.retrieval import SparseVectors, build_index, load_index
from tilefold.retrieval.errors import VocabularyMismatchError
from tilefold.retrieval.index.qdrant import Documents, Layout, QdrantCollection, UnreachableError
from tilefold.retrieval.index.qdrant.server import ServerEngine

MakeVectors = Callable[..., SparseVectors]
KEY = "sesame-4711-open"
SPARSE_LAYOUT = Layout(500, "f" * 64)
PAPERS_LAYOUT = Layout(300)
N_DOCUMENTS = 240
OLD = random_vectors(N_DOCUMENTS, 300, 12, 0, fingerprint=None)
NEW = random_vectors(N_DOCUMENTS, 300, 12, 1, fingerprint=None)


def write_documents(folder: str, method: str, connection: Any) -> None:
    """Write documents into a collection, and send 0 and after every batch how many are written."""
    connection.send(0)
    vectors = NEW if method == "upsert" else OLD
    with QdrantCollection.embedded(folder, PAPERS_LAYOUT) as collection:
        write = getattr(collection, method)
        write(
            Documents(vectors.ids, vectors),
            batch_size=20,
            progress=lambda done, _: connection.send(done),
        )


def run_writer(
    folder: Path,
    method: str,
    kill_above: float = math.inf,
    seconds: float = 0.0,
) -> tuple[int, int]:
    """Write documents in another process, which may be killed.

    Args:
        folder: the folder of the collection.
        method: ``"build"`` writes the old vectors, ``"upsert"`` the new ones.
        kill_above: the process is killed when it has reported more documents than this.
        seconds: how long to wait before the process is killed.

    Returns:
        The last number of documents that the process reported, and its exit code.
    """
    context = programs.context()  # its processes are forks of one that never opened a collection
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=write_documents, args=(str(folder), method, sender))
    process.start()
    sender.close()
    n_reported = 0
    with suppress(EOFError, OSError):
        while True:
            n_reported = receiver.recv()
            if n_reported > kill_above:
                time.sleep(seconds)
                process.kill()
    process.join(WAIT_SECONDS)
    assert process.exitcode is not None
    return n_reported, process.exitcode


def check_documents(
    folder: Path,
    n_reported: int,
    before: SparseVectors | None,
    after: SparseVectors,
) -> None:
    """Expect the first ``n_reported`` documents of ``after``, and the others of either state.

    Args:
        folder: the folder of the collection.
        n_reported: how many documents the writer reported as written.
        before: the documents before; ``None`` if there was no collection.
        after: the documents that were written.
    """
    if not (folder / "collection.json").is_file():
        assert n_reported == 0
        assert before is None
        return
    with QdrantCollection.embedded(folder) as collection:
        stored = collection.vectors(OLD.ids)
        stored_rows = {name: stored.row(row) for row, name in enumerate(stored.ids)}
        for row, name in enumerate(after.ids):
            is_reported = row < n_reported
            if name not in stored_rows:
                assert not is_reported, f"{name} of {n_reported} is lost"
                assert before is None, f"{name} is lost"
                continue
            allowed = [after.row(row)]
            if not is_reported and before is not None:
                allowed.append(before.row(row))
            terms, weights = stored_rows[name]
            assert any(
                np.array_equal(terms, allowed_terms) and np.array_equal(weights, allowed_weights)
                for allowed_terms, allowed_weights in allowed
            ), f"{name} is neither old nor new"
        query = SparseVectors.from_rows({"q": dict.fromkeys(range(300), 1.0)}, 300)
        (hits,) = collection.search(query, N_DOCUMENTS)
        assert {hit.id for hit in hits} == set(stored_rows), "the index lacks some documents"
        assert len(collection) == len(stored_rows)


@pytest.fixture
def http() -> Iterator[OverHttp]:
    """A server with an empty store."""
    server = OverHttp()
    yield server
    server.stop()


def seconds_waited(message: str) -> float:
    """The time that the message of an error says that the client waited."""
    match = re.search(r"after (\d+\.\d) s", message)
    assert match is not None, message
    return float(match[1])


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:.* has no checksums, so damage cannot be detected:RuntimeWarning"
)
def test_killed_writers_lose_nothing_that_they_reported(tmp_path: Path) -> None:
    folder = tmp_path / "collection"
    moments = random.Random(3)  # noqa: S311
    before = None
    for method, after in (("build", OLD), ("upsert", NEW)):
        for least_reported in (0, 1, 2):
            kill_above = least_reported + moments.randrange(2)
            seconds = moments.uniform(0.0, 0.15)
            n_reported, _ = run_writer(folder, method, kill_above, seconds)
            check_documents(folder, n_reported, before, after)
        n_reported, exit_code = run_writer(folder, method)
        assert exit_code == 0
        # It reports none if a writer that was killed had written all documents.
        assert n_reported in (0, N_DOCUMENTS)
        check_documents(folder, N_DOCUMENTS, before, after)
        before = after

    queries = NEW.take([3, 14])
    with QdrantCollection.embedded(folder) as collection:
        rows = collection.search(queries, 10)
    for hits, expected in zip(rows, build_index(NEW).search(queries, 10), strict=True):
        assert [hit.id for hit in hits] == [hit.id for hit in expected]


class PausesClock:
    """Clock that only pauses advance, so that no other time counts as waited."""

    def __init__(self) -> None:
        self._now = 0.0

    def monotonic(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        self._now += seconds


def test_a_server_that_is_down_is_given_up_after_the_patience(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tilefold.retrieval.index.qdrant.server.time", PausesClock())
    with socket.socket() as not_listening:
        not_listening.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{not_listening.getsockname()[1]}"
        message = r"no answer from the Qdrant server .*Connection refused"
        with pytest.raises(UnreachableError, match=message) as error:
            QdrantCollection.server(url, "papers", SPARSE_LAYOUT, api_key=KEY, patience=1.0)
    # pauses of 0.2 s and 0.4 s; another one of 0.8 s would end after the patience
    assert seconds_waited(str(error.value)) == 0.6
    assert KEY not in str(error.value)
    assert url in str(error.value)


def test_a_server_that_never_answers_is_given_up_after_the_timeout() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(UnreachableError, match="timed out") as error:
            QdrantCollection.server(
                url,
                "papers",
                SPARSE_LAYOUT,
                api_key=KEY,
                timeout=1,
                patience=0.5,
            )
    default_timeout = 30
    assert 0.9 < seconds_waited(str(error.value)) < default_timeout
    assert KEY not in str(error.value)
    assert url in str(error.value)


def test_a_key_that_is_refused_is_not_in_the_error(
    http: OverHttp,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    http.key = "another"
    monkeypatch.delenv("QDRANT_API_KEY", raising=False)
    with pytest.raises(
        PermissionError, match=r"requires an API key \(status 401\).*QDRANT_API_KEY"
    ):
        QdrantCollection.server(http.url, "papers", SPARSE_LAYOUT)
    monkeypatch.setenv("QDRANT_API_KEY", KEY)
    with pytest.raises(PermissionError, match=r"refused the API key \(status 401\)") as error:
        QdrantCollection.server(http.url, "papers", SPARSE_LAYOUT)
    assert KEY not in str(error.value)
    assert len(http.seen) == 2, "no request is repeated"


def test_a_key_is_removed_from_answers_and_representations(
    http: OverHttp,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("QDRANT_API_KEY", KEY)
    http.fault = lambda method, path: 400  # the answer repeats the key
    with pytest.raises(RuntimeError, match=r"answered 400: .*refused, with \*\*\*") as error:
        QdrantCollection.server(http.url, "papers", SPARSE_LAYOUT)
    assert KEY not in str(error.value)
    http.fault = None
    collection = QdrantCollection.server(http.url, "papers", SPARSE_LAYOUT)
    assert KEY not in repr(collection)
    assert KEY not in repr(vars(collection))


def test_a_key_that_is_sent_without_encryption_is_not_in_the_warning() -> None:
    message = r"http://192.0.2.1:6333: the API key is sent without encryption"
    with pytest.warns(UserWarning, match=message) as warnings_shown:
        ServerEngine("http://192.0.2.1:6333", "papers", KEY).close()
    assert KEY not in str(warnings_shown[0].message)


def test_a_collection_that_does_not_exist_is_not_opened_without_a_layout(http: OverHttp) -> None:
    with pytest.raises(FileNotFoundError, match=r"there is no such collection. Pass a layout"):
        QdrantCollection.server(http.url, "papers")


@pytest.mark.parametrize(
    ("status", "error", "message"),
    [
        pytest.param(
            200,
            RuntimeError,
            r"the answer is not from a Qdrant server \(.*validation error.*\)\. Is it the right",
            id="other answers",
        ),
        pytest.param(
            404,
            FileNotFoundError,
            "no such collection, or no Qdrant server",
            id="not found",
        ),
    ],
)
def test_a_server_that_is_not_qdrant_is_refused(
    http: OverHttp,
    status: int,
    error: type[Exception],
    message: str,
) -> None:
    http.fault = lambda method, path: status
    with pytest.raises(error, match=message):
        QdrantCollection.server(http.url, "papers", SPARSE_LAYOUT)


def hide_collection_once(http: OverHttp, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the server answer once that the collection does not exist, as if asked too early."""
    answer = http.answer
    answers = iter([{"exists": False}])

    def answer_too_early(method: str, path: str, body: Any) -> Any:
        if path.endswith("/exists"):
            early_answer = next(answers, None)
            if early_answer is not None:
                return early_answer
        return answer(method, path, body)

    monkeypatch.setattr(http, "answer", answer_too_early)


def test_a_collection_that_another_process_has_just_made_is_opened(
    http: OverHttp,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = QdrantCollection.server(http.url, "papers", SPARSE_LAYOUT)
    hide_collection_once(http, monkeypatch)
    assert QdrantCollection.server(http.url, "papers", SPARSE_LAYOUT).layout == first.layout


def test_a_collection_that_another_process_made_with_another_layout_is_refused(
    http: OverHttp,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    QdrantCollection.server(http.url, "papers", SPARSE_LAYOUT)
    hide_collection_once(http, monkeypatch)
    with pytest.raises(VocabularyMismatchError, match="layout: expected the vocabulary"):
        QdrantCollection.server(http.url, "papers", Layout(600))


def test_a_busy_server_is_asked_again(http: OverHttp, make_vectors: MakeVectors) -> None:
    vectors = make_vectors(20)
    collection = QdrantCollection.server(http.url, "papers", SPARSE_LAYOUT, patience=10)
    statuses = iter([429, 0, 502])
    http.fault = lambda method, path: next(statuses, None)
    collection.upsert(Documents(vectors.ids, vectors))
    assert len(collection) == 20


def test_a_server_that_stays_busy_is_given_up(http: OverHttp, make_vectors: MakeVectors) -> None:
    collection = QdrantCollection.server(http.url, "papers", SPARSE_LAYOUT, patience=0)
    http.fault = lambda method, path: 503
    http.seen.clear()
    with pytest.raises(UnreachableError, match=r"after \d+\.\d s"):
        collection.search(make_vectors(1), 3)
    assert len(http.seen) == 1, "the request is not repeated"


def test_a_build_that_lost_its_server_goes_on_after_the_stored_documents(
    http: OverHttp,
    make_vectors: MakeVectors,
) -> None:
    vectors = make_vectors(60)
    documents = Documents(vectors.ids, vectors)
    collection = QdrantCollection.server(http.url, "papers", SPARSE_LAYOUT, patience=0.3)
    reported: list[int] = []

    def is_write(method: str, path: str) -> bool:
        return method == "PUT" and path.endswith("/points")

    def close_after_three_writes(method: str, path: str) -> int | None:
        if is_write(method, path) and len(reported) == 3:
            return 0
        return None

    def report(done: int, total: int) -> None:
        reported.append(done)

    http.fault = close_after_three_writes
    message = r"Work already reported is kept; repeat the call to continue"
    with pytest.raises(UnreachableError, match=message):
        collection.build(documents, batch_size=10, progress=report)
    assert reported == [10, 20, 30]

    http.fault = None
    reopened = QdrantCollection.server(http.url, "papers", SPARSE_LAYOUT)
    assert not reopened.complete
    assert set(vectors.ids[:30]) <= set(reopened.ids())
    http.seen.clear()
    reopened.build(documents, batch_size=10, progress=report)
    assert reported == [10, 20, 30, 10, 20, 30, 40, 50, 60]
    writes = [path for method, path in http.seen if is_write(method, path)]
    assert len(writes) == 3, "stored documents are not written again"
    assert reopened.complete
    assert len(reopened) == 60


@pytest.mark.parametrize("record", ["collection.json", "index.json"])
def test_a_process_killed_while_it_writes_a_record_leaves_an_index(
    make_vectors: MakeVectors,
    tmp_path: Path,
    record: str,
) -> None:
    folder = tmp_path / "index"
    build_index(make_vectors(5), "qdrant", folder=folder).close()
    code = f"""
import os
from pathlib import Path
import tilefold._internal.files as files
from tilefold.retrieval import load_index
from tilefold.retrieval.index.qdrant.index import QdrantIndex
index = load_index({str(folder)!r})
replace = Path.replace
Path.replace = lambda self, to: os._exit(9) if str(to).endswith({record!r}) else replace(self, to)
index.save({str(folder)!r}) if {record!r} == "index.json" else index.collection.delete(["d0"])
"""
    assert programs.run("-c", code).returncode == 9
    with load_index(folder).collection as collection:
        assert len(collection) == 5
    build_index(make_vectors(6), "qdrant", folder=folder, overwrite=True).close()


def test_a_forked_process_does_not_delete_the_shard_of_its_parent(
    make_vectors: MakeVectors,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    index: Any = build_index(make_vectors(5), "qdrant", folder=tmp_path / "index")
    engine = index.collection._engine
    shard = engine._shard
    monkeypatch.setattr(engine, "_process", os.getpid() + 1)
    n_references = sys.getrefcount(shard)
    engine.close()  # as at the end of a process that was forked
    assert engine._shard is None
    assert sys.getrefcount(shard) == n_references  # the engine's reference became an eternal one
    shard.close()
