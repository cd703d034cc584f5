"""Tests of a server that follows its index: other generations take over between requests."""

from __future__ import annotations

import gc
import json
import shutil
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from fastapi.testclient import TestClient

from tests.serve.running import Client, Reply, hold_batch, serving
from tests.waiting import WAIT_SECONDS, wait_until
from tilefold import retrieval as r
from tilefold._internal.memory import drop_memory
from tilefold.retrieval.data.collection import Collection
from tilefold.retrieval.index.generations import read_generation
from tilefold.retrieval.index.merging import merge_segments, update_index
from tilefold.retrieval.index.opening import open_index
from tilefold.retrieval.search.searcher import Searcher
from tilefold.serve import following
from tilefold.serve.app import create_app
from tilefold.serve.document_log import DocumentLog
from tilefold.serve.following import IndexFollower, IndexSource
from tilefold.serve.models import Served
from tilefold.serve.searchable import Searchable
from tilefold.serve.service import Service
from tilefold.serve.writing import DocumentWriter

ADMIN_KEY = "open sesame"
NAME = "papers"


@dataclass(frozen=True)
class Running:
    """A server that follows an index folder.

    Attributes:
        client: client of the server.
        service: the service of the server.
        path: the folder of the index.
    """

    client: Client
    service: Service
    path: Path

    @property
    def generation(self) -> str:
        """Id of the generation that answers."""
        return str(self.client.get("/info").json["index"]["generation"])

    def ids(self, query: str = "csv files") -> list[str]:
        """Return the ids of all hits for a query."""
        body = {"query": query, "hits": 100}
        reply = self.client.post(f"/v1/{NAME}/search", body)
        assert reply.status == 200, reply.raw
        return [candidate["docid"] for candidate in reply.json["candidates"]]

    def reload(self, key: str | None = ADMIN_KEY) -> Reply:
        """Ask for the current generation."""
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        return self.client.request("POST", "/admin/reload", **headers)


@contextmanager
def following_server(
    path: Path,
    encoder: Served | None,
    *,
    watch_seconds: float = 0.05,
    open_generation: Callable[[Searchable, str], Searchable] | None = None,
    takes_documents: bool = False,
    **options: Any,
) -> Iterator[Running]:
    """Serve an index folder, and follow its changes; with ``takes_documents``, also write them."""

    def reopen(served: Searchable, generation: str) -> Searchable:
        index = open_index(path, opened=served.index)
        return Searchable(NAME, index, served.encoder, generation=generation)

    generation = read_generation(path)
    searchable = Searchable(NAME, open_index(path), encoder, generation=generation.id)
    service = Service([] if encoder is None else [encoder], searchable=searchable)
    del searchable, encoder  # the server releases them if another generation takes over
    source = IndexSource(path, open_generation or reopen, watch_seconds)
    follower = IndexFollower(service, source, generation)
    if takes_documents:
        DocumentWriter(service, follower, DocumentLog(path))
    with serving(service, admin_key=ADMIN_KEY, **options) as client:
        yield Running(client, service, path)


@pytest.fixture(scope="module")
def encoder(sparse: Any) -> Served:
    """The sparse model, as it is served."""
    return Served(sparse, "sparse", "tiny")


@pytest.fixture
def path(tmp_path: Path, vectors: r.SparseVectors) -> Path:
    """An index of all documents but the last."""
    folder = tmp_path / "index"
    r.build_index(vectors.take(range(len(vectors) - 1))).save(folder)
    return folder


@pytest.fixture
def last(vectors: r.SparseVectors) -> r.SparseVectors:
    """The last document."""
    return vectors.take([len(vectors) - 1])


@pytest.fixture
def running(path: Path, encoder: Served) -> Iterator[Running]:
    """A server that watches the index."""
    with following_server(path, encoder) as server:
        yield server


@pytest.fixture
def unwatched(path: Path, encoder: Served) -> Iterator[Running]:
    """A server that opens another generation on request only."""
    with following_server(path, encoder, watch_seconds=0) as server:
        yield server


def test_an_update_a_deletion_and_a_merge_take_over(
    running: Running,
    last: r.SparseVectors,
    vectors: r.SparseVectors,
) -> None:
    first_id = vectors.ids[0]
    generations = [running.generation]
    assert last.ids[0] not in running.ids()

    update_index(running.path, last)
    wait_until(lambda: last.ids[0] in running.ids())
    generations.append(running.generation)
    update_index(running.path, delete=[first_id])
    wait_until(lambda: first_id not in running.ids())
    generations.append(running.generation)
    merge_segments(running.path)
    wait_until(lambda: running.generation == read_generation(running.path).id)
    generations.append(running.generation)

    assert len(set(generations)) == 4
    assert set(running.ids()) == set(vectors.ids) - {first_id}
    assert running.client.metric("tilefold_index_reload_count") == 3
    assert running.client.metric("tilefold_index_refused_count") == 0


def test_info_metrics_and_the_list_of_indexes_name_the_generation(
    unwatched: Running,
    last: r.SparseVectors,
) -> None:
    update_index(unwatched.path, last)
    answer = unwatched.reload().json
    generation = read_generation(unwatched.path).id
    assert answer == {"index": NAME, "generation": generation, "documents": 16}
    info = unwatched.client.get("/info").json["index"]
    assert info == {
        "name": NAME,
        "generation": generation,
        "segments": 1,
        "refused_generation": None,
    }
    (index,) = unwatched.client.get("/v1/indexes").json["indexes"]
    assert index["generation"] == generation
    line = f'tilefold_index_generation{{generation="{generation}"}} 1.0'
    assert line in unwatched.client.metrics_text()


def test_a_request_keeps_its_generation_and_the_last_one_releases_it(
    unwatched: Running,
    last: r.SparseVectors,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    old = weakref.ref(unwatched.service.searchable)
    entered = threading.Event()
    released = threading.Event()
    rank = Searcher.rank

    def wait_and_rank(searcher: Searcher, *arguments: Any) -> Any:
        if not entered.is_set():  # only the first search waits
            entered.set()
            assert released.wait(WAIT_SECONDS)
        return rank(searcher, *arguments)

    monkeypatch.setattr(Searcher, "rank", wait_and_rank)
    replies: list[list[str]] = []
    thread = threading.Thread(target=lambda: replies.append(unwatched.ids()))
    thread.start()
    assert entered.wait(WAIT_SECONDS)
    update_index(unwatched.path, last)
    assert unwatched.reload().status == 200
    assert last.ids[0] in unwatched.ids()
    assert unwatched.client.metric("tilefold_index_open_generations") == 2

    gc.disable()  # the server's objects are frozen: reference counts must be enough
    try:
        released.set()
        thread.join(WAIT_SECONDS)
        wait_until(lambda: old() is None)
    finally:
        gc.enable()
    assert last.ids[0] not in replies[0]
    assert unwatched.client.metric("tilefold_index_open_generations") == 1


def test_a_generation_is_released_without_the_garbage_collector(
    unwatched: Running,
    last: r.SparseVectors,
) -> None:
    gc.disable()  # collections are rare in a server whose objects are frozen
    try:
        for _ in range(2):
            update_index(unwatched.path, last)
            assert unwatched.reload().status == 200
            assert last.ids[0] in unwatched.ids()
        wait_until(lambda: unwatched.client.metric("tilefold_index_open_generations") == 1)
    finally:
        gc.enable()


@dataclass
class Generation:
    """A generation of an index, without a server."""

    index: Any


def is_mapped(path: Path) -> bool:
    """Return whether this process has mapped a file into its memory."""
    return f" {path}" in Path("/proc/self/maps").read_text(encoding="utf-8")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_vectors_of_a_deleted_generation_are_unmapped_without_the_gil(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(following, "_DROP_SECONDS", 0.01)
    rows = torch.randn(50, 1, 8)
    vectors = r.TokenVectors.pack([str(row) for row in range(50)], list(rows), 8, "fp16")
    r.DenseIndex.build(vectors).save(tmp_path / "index")
    file = tmp_path / "index" / "vectors.safetensors"
    first = Generation(open_index(tmp_path / "index"))
    second = Generation(open_index(tmp_path / "index", opened=first.index))
    expected = first.index.search(rows[:2, 0], 5)
    may_drop = threading.Event()
    dropped = threading.Event()

    def drop_and_tell(references: list[torch.Tensor]) -> None:
        assert may_drop.wait(WAIT_SECONDS)
        drop_memory(references)
        dropped.set()

    monkeypatch.setattr(following, "drop_memory", drop_and_tell)
    following._free_without_gil(first)
    del first
    may_drop.set()
    assert dropped.wait(WAIT_SECONDS)
    assert is_mapped(file)  # the second generation has the same part
    assert second.index.search(rows[:2, 0], 5) == expected
    may_drop.clear()
    dropped.clear()
    following._free_without_gil(second)
    del second
    assert is_mapped(file)  # until the thread drops the last reference
    may_drop.set()
    assert dropped.wait(WAIT_SECONDS)
    assert not is_mapped(file)


def test_parts_that_did_not_change_are_not_opened_again(
    unwatched: Running,
    last: r.SparseVectors,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    index = unwatched.service.searchable.index
    update_index(unwatched.path, last)
    monkeypatch.setattr(following, "memory_left", lambda: 0)  # an exact index is mapped
    assert unwatched.reload().status == 200
    segments = unwatched.service.searchable.index
    assert segments.parts[0] is index
    assert [part.n_documents for part in segments.parts] == [15, 1]
    merge_segments(unwatched.path)
    assert unwatched.reload().status == 200
    assert unwatched.service.searchable.index is not index


def damage(path: Path) -> None:
    """Change a byte in the middle of the weights of the newest segment of an index."""
    segment = sorted(entry for entry in (path / "segments").iterdir() if entry.is_dir())[-1]
    file = segment / "weights.npy"
    content = bytearray(file.read_bytes())
    content[-2] ^= 1
    file.write_bytes(content)


def test_a_damaged_generation_is_refused_and_a_whole_one_takes_over_later(
    unwatched: Running,
    last: r.SparseVectors,
) -> None:
    generation = unwatched.generation
    backup = unwatched.path.with_name("backup")
    shutil.copytree(unwatched.path, backup)
    update_index(unwatched.path, last)
    damage(unwatched.path)
    reply = unwatched.reload()
    assert reply.status == 409
    assert "weights.npy: damaged" in reply.json["error"]
    assert str(unwatched.path) in reply.json["error"]
    answer = f"--overwrite); the server still answers from generation {generation}"
    assert answer in reply.json["error"]
    assert last.ids[0] not in unwatched.ids()
    info = unwatched.client.get("/info").json["index"]
    assert info["generation"] == generation
    assert info["refused_generation"] == read_generation(unwatched.path).id
    assert unwatched.client.metric("tilefold_index_refused_count") == 1

    shutil.rmtree(unwatched.path)
    shutil.move(backup, unwatched.path)
    update_index(unwatched.path, last)
    assert unwatched.reload().status == 200
    assert last.ids[0] in unwatched.ids()


def test_an_unexpected_error_is_logged_once_and_the_folder_is_watched_on(
    path: Path,
    last: r.SparseVectors,
    encoder: Served,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    n_failures = 0

    def fail(path: Path) -> None:
        nonlocal n_failures
        n_failures += 1
        raise KeyError("manifest")

    with following_server(path, encoder, watch_seconds=0.01) as running:
        with monkeypatch.context() as patch:
            patch.setattr(following, "read_generation", fail)
            wait_until(lambda: n_failures >= 3)
        update_index(running.path, last)
        wait_until(lambda: last.ids[0] in running.ids())
    (record,) = [record for record in caplog.records if record.exc_info]
    assert record.getMessage() == (
        f"{path} could not be checked for a new generation, and will be checked again: KeyError: 'manifest'"
    )


def test_threads_give_way_more_often_while_a_generation_is_opened(
    path: Path,
    last: r.SparseVectors,
    encoder: Served,
) -> None:
    """Loading a model computes in Python for long, and requests need the GIL often."""
    intervals = []

    def record_and_open(served: Searchable, generation: str) -> Searchable:
        intervals.append(sys.getswitchinterval())
        return Searchable(NAME, open_index(path), served.encoder, generation=generation)

    interval = sys.getswitchinterval()
    with following_server(path, encoder, open_generation=record_and_open) as running:
        update_index(running.path, last)
        wait_until(lambda: last.ids[0] in running.ids())
        wait_until(lambda: sys.getswitchinterval() == pytest.approx(interval))
    assert intervals == pytest.approx([0.0001])
    assert intervals[0] < interval


def test_the_server_goes_on_without_its_folder(running: Running) -> None:
    ids = running.ids()
    shutil.rmtree(running.path)
    wait_until(lambda: running.client.metric("tilefold_index_refused_count") > 0)
    assert running.ids() == ids
    reply = running.reload()
    assert reply.status == 409
    assert "no such file or folder" in reply.json["error"]


def test_a_generation_without_memory_is_refused(
    tmp_path: Path,
    vectors: r.SparseVectors,
    last: r.SparseVectors,
    encoder: Served,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tmp_path / "seismic"
    r.build_index(vectors, "seismic").save(path)
    with following_server(path, encoder, watch_seconds=0) as running:
        update_index(path, last)
        monkeypatch.setattr(following, "memory_left", lambda: 0)
        reply = running.reload()
        assert reply.status == 409
        assert "MB of memory next to the served one, and 0 MB are free" in reply.json["error"]
        monkeypatch.undo()
        assert running.reload().status == 200


def test_a_generation_for_which_a_gpu_runs_out_of_memory_is_refused(
    path: Path,
    last: r.SparseVectors,
    encoder: Served,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run_out_of_memory(*arguments: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 294.00 MiB.")

    with following_server(path, encoder, watch_seconds=0) as running:
        generation = running.generation
        update_index(path, last)
        monkeypatch.setattr(Searchable, "search_probe", run_out_of_memory)
        reply = running.reload()
        assert reply.status == 409
        assert "too little free memory to open the new generation" in reply.json["error"]
        assert running.generation == generation
        monkeypatch.undo()
        assert running.reload().status == 200


@pytest.mark.parametrize(
    ("served_on_gpu", "status"),
    [
        pytest.param(True, 409, id="an index on the GPUs stays there"),
        pytest.param(False, 200, id="an index that is searched block by block is replaced"),
    ],
)
def test_without_gpu_memory_a_generation_replaces_none_that_is_on_the_gpu(
    path: Path,
    last: r.SparseVectors,
    encoder: Served,
    monkeypatch: pytest.MonkeyPatch,
    served_on_gpu: bool,
    status: int,
) -> None:
    """Also if other programs have taken so much that not even one generation would fit."""
    free_bytes_of_gpus = {"cuda:0": 1 << 40, "cuda:1": 0}
    gpus = list(free_bytes_of_gpus) if served_on_gpu else []
    monkeypatch.setattr(following, "gpus_of", lambda index: gpus)
    monkeypatch.setattr(following, "free_device_bytes", free_bytes_of_gpus.__getitem__)
    with following_server(path, encoder, watch_seconds=0) as running:
        update_index(path, last)
        generation = running.generation
        reply = running.reload()
        assert reply.status == status
        assert (running.generation == generation) == served_on_gpu
        if served_on_gpu:
            assert "MB of GPU memory next to the served one" in reply.json["error"]
            monkeypatch.setattr(following, "free_device_bytes", lambda device: 1 << 40)
            assert running.reload().status == 200


@pytest.mark.parametrize(
    ("key", "status"),
    [
        pytest.param(None, 401, id="no key"),
        pytest.param("sesam", 401, id="the key of searches"),
        pytest.param(ADMIN_KEY, 200, id="the admin key"),
    ],
)
def test_a_reload_needs_the_admin_key(
    path: Path,
    encoder: Served,
    key: str | None,
    status: int,
) -> None:
    with following_server(path, encoder, watch_seconds=0, api_key="sesam") as running:
        assert running.reload(key).status == status


def test_a_server_without_an_admin_key_refuses_changes(keyed_server: Client) -> None:
    reply = keyed_server.request("POST", "/admin/reload", authorization="Bearer sesam")
    assert reply.status == 403
    assert "--admin-key-file" in reply.json["error"]


@pytest.mark.parametrize(
    ("method", "route"),
    [("POST", "/admin/reload"), ("GET", "/documents"), ("PUT", "/documents")],
)
def test_changes_below_a_prefix_need_the_admin_key(
    encoder: Served,
    method: str,
    route: str,
) -> None:
    app = create_app(Service([encoder]), admin_key=ADMIN_KEY)
    client = TestClient(app, root_path="/prefix")
    assert client.request(method, f"/prefix{route}").status_code == 401


def test_health_checks_below_a_prefix_need_no_key(encoder: Served) -> None:
    client = TestClient(create_app(Service([encoder]), "sesam"), root_path="/prefix")
    assert client.get("/prefix/live").status_code == 200
    assert client.get("/prefix/info").status_code == 401


def test_an_index_of_words_is_followed(tmp_path: Path, collection: Collection) -> None:
    texts = collection.contents()
    index = r.BM25Index.build(dict(list(texts.items())[:-1]))
    index.save(tmp_path / "index")
    last_id = list(texts)[-1]
    with following_server(tmp_path / "index", None) as running:
        query = texts[last_id]
        assert last_id not in running.ids(query)
        index.updated({last_id: texts[last_id]}).save(tmp_path / "index", overwrite=True)
        wait_until(lambda: last_id in running.ids(query))


def test_an_index_of_token_vectors_is_followed(
    tmp_path: Path,
    late: Any,
    collection: Collection,
) -> None:
    texts = collection.contents()
    last_id = list(texts)[-1]
    first_texts = {name: text for name, text in texts.items() if name != last_id}
    r.encode_tokens(late, first_texts, tmp_path / "tokens")
    r.encode_tokens(late, {last_id: texts[last_id]}, tmp_path / "new-tokens")
    path = tmp_path / "index"
    r.LateIndex.build(r.open_tokens(tmp_path / "tokens"), path)
    with following_server(path, Served(late, "multi-vector", "tiny")) as running:
        update_index(path, r.open_tokens(tmp_path / "new-tokens"))
        wait_until(lambda: last_id in running.ids())
        merge_segments(path)
        wait_until(lambda: running.generation == read_generation(path).id)
        assert sorted(running.ids()) == sorted(texts)


def test_a_generation_of_another_model_takes_over_with_its_model(
    path: Path,
    encoder: Served,
    two_sided: Any,
    collection: Collection,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other = Served(two_sided, "sparse", "two-sided")
    warmed_up: list[str] = []
    warm_up_model = Service.warm_up_model

    def record_and_warm_up(service: Service, model: Served) -> None:
        warmed_up.append(model.name)
        warm_up_model(service, model)

    monkeypatch.setattr(Service, "warm_up_model", record_and_warm_up)

    def open_with_other_model(served: Searchable, generation: str) -> Searchable:
        return Searchable(NAME, open_index(path), other, generation=generation)

    texts = collection.contents()
    with following_server(
        path,
        encoder,
        watch_seconds=0,
        open_generation=open_with_other_model,
    ) as running:
        r.encode_collection(two_sided, texts, path.with_name("vectors"))
        r.build_index(r.read_vectors(path.with_name("vectors"))).save(path, overwrite=True)
        assert running.reload().status == 200
        queries = r.encode_queries(two_sided, {"q": "csv files"})
        expected = open_index(path).search(queries, 100)[0]
        assert warmed_up == ["two-sided"]
        assert running.ids() == [hit.id for hit in expected]
        assert running.client.get("/info").json["model_id"] == "two-sided"


@pytest.mark.parametrize("puts_document", [False, True], ids=["query in flight", "document"])
def test_a_model_that_is_not_served_any_more_is_released(
    puts_document: bool,
    path: Path,
    sparse: Any,
    two_sided: Any,
    collection: Collection,
) -> None:
    """A server's objects are frozen, so that reference counts must be enough."""
    encoder = Served(sparse, "sparse", "tiny")
    other = Served(two_sided, "sparse", "two-sided")
    old_encoder = weakref.ref(encoder)

    def open_with_other_model(served: Searchable, generation: str) -> Searchable:
        return Searchable(NAME, open_index(path), other, generation=generation)

    r.encode_collection(two_sided, collection.contents(), path.with_name("vectors"))
    new_index = r.build_index(r.read_vectors(path.with_name("vectors")))
    query = {"inputs": "csv files"}
    with following_server(
        path,
        encoder,
        watch_seconds=0,
        open_generation=open_with_other_model,
        takes_documents=puts_document,
    ) as running:
        del encoder
        gc.disable()
        try:
            if puts_document:
                document = {"documents": [{"id": "new", "text": "rows of a file"}]}
                content = json.dumps(document).encode()
                reply = running.client.request(
                    "PUT",
                    "/documents?wait=true",
                    content,
                    content_type="application/json",
                    authorization=f"Bearer {ADMIN_KEY}",
                )
                assert reply.json["visible"], reply.raw
                new_index.save(path, overwrite=True)
                assert running.reload().status == 200
            else:
                with hold_batch(running.client, sparse, 1, path="/query/embed_sparse") as held:
                    new_index.save(path, overwrite=True)
                    assert running.reload().status == 200
                assert held.result(WAIT_SECONDS).status == 200
            wait_until(lambda: old_encoder() is None)
            assert running.client.post("/query/embed_sparse", query).status == 200
        finally:
            gc.enable()


def test_searches_do_not_fail_while_generations_change(
    running: Running,
    last: r.SparseVectors,
) -> None:
    replies: list[Reply] = []
    ended = threading.Event()

    def search_until_end() -> None:
        while not ended.is_set():
            replies.append(running.client.post(f"/v1/{NAME}/search", {"query": "csv files"}))

    threads = [threading.Thread(target=search_until_end) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(3):
        update_index(running.path, last)
        merge_segments(running.path)
    wait_until(lambda: running.generation == read_generation(running.path).id)
    ended.set()
    for thread in threads:
        thread.join(WAIT_SECONDS)
    assert {reply.status for reply in replies} == {200}
    assert all(json.loads(reply.raw)["candidates"] for reply in replies)
