"""Processes that are killed, and servers that are away, slow, busy, or want another key."""

from __future__ import annotations

import math
import multiprocessing
import random
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.refusals import refused
from tests.retrieval.conftest import random_vectors
from tests.retrieval.qdrant_over_http import OverHttp
from tilefold.retrieval import SparseVectors, build_index, load_index
from tilefold.retrieval.errors import VocabularyMismatchError
from tilefold.retrieval.index.qdrant import Documents, Layout, QdrantCollection, UnreachableError
from tilefold.retrieval.index.qdrant.server import ServerEngine

Make = Callable[..., SparseVectors]
KEY = "sesame-4711-open"
SPARSE = Layout(500, "f" * 64)
BATCH, PAPERS = 20, Layout(300)
SERVER = multiprocessing.get_context(
    "forkserver",
)  # forks are of a process that never opened a collection
SERVER.set_forkserver_preload([__name__])


OLD, NEW = (random_vectors(240, 300, 12, seed, fingerprint=None) for seed in (0, 1))


def write(place: str, how: str, told: Any) -> None:
    """Write the documents, and tell 0 and after every batch how many are written."""
    told.send(0)
    vectors = NEW if how == "upsert" else OLD
    with QdrantCollection.embedded(place, PAPERS) as collection:
        add = getattr(collection, how)
        add(
            Documents(vectors.ids, vectors),
            batch_size=BATCH,
            progress=lambda done, _: told.send(done),
        )


def writer(place: Path, how: str) -> tuple[Any, Any]:
    """A process that writes the documents, and what it tells."""
    here, there = SERVER.Pipe(duplex=False)
    process = SERVER.Process(target=write, args=(str(place), how, there))
    process.start()
    there.close()
    return process, here


def reports(process: Any, here: Any, stop: float = math.inf, pause: float = 0.0) -> int:
    """What a process told last that is killed `pause` seconds after it told so much."""
    told: list[int] = []
    with suppress(EOFError, OSError):
        while True:
            told.append(here.recv())
            if len(told) > stop:
                time.sleep(pause)
                process.kill()
    process.join(60)
    return told[-1]


def check(folder: Path, reported: int, before: SparseVectors | None, after: SparseVectors) -> None:
    """The first `reported` documents are those of `after`; the others as `before`, absent without,
    or of `after`.
    """
    if not (folder / "collection.json").is_file():
        assert reported == 0 and before is None
        return
    with QdrantCollection.embedded(folder) as collection:
        found = collection.vectors(OLD.ids)
        rows = {name: found.row(row) for row, name in enumerate(found.ids)}
        for at, name in enumerate(after.ids):
            allowed = [after] if at < reported or before is None else [before, after]
            assert name in rows or (at >= reported and before is None), (
                f"{name} of {reported} is lost"
            )
            if name in rows:
                same = [
                    all(map(np.array_equal, rows[name], vectors.row(at))) for vectors in allowed
                ]
                assert any(same), f"{name} is neither old nor new"
        query = SparseVectors.from_rows({"q": dict.fromkeys(range(300), 1.0)}, 300)
        assert {hit.id for hit in collection.search(query, 240)[0]} == set(rows), (
            "the index lacks some"
        )
        assert len(collection) == len(rows)


@pytest.fixture
def http() -> Iterator[OverHttp]:
    server = OverHttp()
    yield server
    server.stop()


def waited(message: str) -> float:
    found = re.search(r"after (\d+\.\d) s", message)
    assert found, message
    return float(found[1])


@pytest.mark.filterwarnings("ignore:.* its files have no checksums:RuntimeWarning")
def test_killed_writers_lose_nothing_that_they_reported(tmp_path: Path) -> None:
    folder, moments, before = tmp_path / "collection", random.Random(3), None  # noqa: S311
    for how, after in (("build", OLD), ("upsert", NEW)):
        for least in (0, 1, 2):
            stop, pause = least + moments.randrange(2), moments.uniform(0.0, 0.15)
            check(folder, reports(*writer(folder, how), stop, pause), before, after)
        last, told = writer(folder, how)
        assert (
            reports(last, told) in (0, 240) and last.exitcode == 0
        )  # 0: one that was killed had written all
        check(folder, 240, before, after)
        before = after
    with QdrantCollection.embedded(folder) as collection:
        found = collection.search(NEW.take([3, 14]), 10)
    exact = build_index(NEW).search(NEW.take([3, 14]), 10)
    assert [[hit.id for hit in row] for row in found] == [[hit.id for hit in row] for row in exact]


@pytest.mark.parametrize("listens", [False, True], ids=["down", "never answers"])
def test_a_server_that_is_away_is_left_after_the_patience_and_said_with_the_time_waited(
    listens: bool,
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        if listens:
            taken.listen()
        url, started = f"http://127.0.0.1:{taken.getsockname()[1]}", time.monotonic()
        said = "timed out" if listens else r"no answer from the Qdrant server .*Connection refused"
        with pytest.raises(UnreachableError, match=said) as caught:
            options = {"timeout": 1, "patience": 0.5} if listens else {"patience": 1.0}
            QdrantCollection.server(url, "papers", SPARSE, api_key=KEY, **options)  # type: ignore[arg-type]
    assert 0.3 < waited(str(caught.value)) < (2 if listens else 1.01)
    assert time.monotonic() - started < (2.5 if listens else 1.5)
    assert KEY not in str(caught.value) and url in str(caught.value)


def test_a_key_that_is_refused_is_never_shown(
    http: OverHttp,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    http.key = "another"
    monkeypatch.delenv("QDRANT_API_KEY", raising=False)
    with pytest.raises(PermissionError, match="answered 401 to no key; set QDRANT_API_KEY"):
        QdrantCollection.server(http.url, "papers", SPARSE)
    monkeypatch.setenv("QDRANT_API_KEY", KEY)
    with pytest.raises(PermissionError, match="answered 401 to the key given") as caught:
        QdrantCollection.server(http.url, "papers", SPARSE)
    assert KEY not in str(caught.value) and len(http.seen) == 2  # not asked again
    http.key, http.fault = None, lambda method, path: 400  # whose answer repeats the key
    with pytest.raises(RuntimeError, match=r"answered 400: .*refused, with \*\*\*") as other:
        QdrantCollection.server(http.url, "papers", SPARSE)
    assert KEY not in str(other.value)
    http.fault = None
    with pytest.raises(FileNotFoundError, match=r"there is no such collection. Give a layout"):
        QdrantCollection.server(http.url, "papers")
    collection = QdrantCollection.server(http.url, "papers", SPARSE)
    assert KEY not in repr(collection) and KEY not in repr(vars(collection))
    with pytest.warns(
        UserWarning,
        match=r"http://192.0.2.1:6333: the API key is sent without encryption",
    ) as seen:
        ServerEngine("http://192.0.2.1:6333", "papers", KEY).close()
    assert KEY not in str(seen[0].message)


def test_what_is_no_qdrant_server_is_said_to_be_none(http: OverHttp) -> None:
    garbled = r"the answers of a Qdrant server, got \(.*validation error.*\)\. Is it the right"
    missing = "no such collection, or no Qdrant server"
    for status, kind, message in ((200, RuntimeError, garbled), (404, FileNotFoundError, missing)):
        http.fault = lambda method, path: status  # noqa: B023
        refused(kind, message, QdrantCollection.server, http.url, "papers", SPARSE)


def test_of_two_that_make_a_collection_the_second_takes_what_the_first_made(http: OverHttp) -> None:
    first = QdrantCollection.server(http.url, "papers", SPARSE)
    answers, real = iter([200]), http.answer  # asked too early whether it exists
    http.answer = lambda method, path, body: (  # type: ignore[method-assign]
        {"exists": False}
        if path.endswith("/exists") and next(answers, None)
        else real(method, path, body)
    )
    assert QdrantCollection.server(http.url, "papers", SPARSE).layout == first.layout
    answers = iter([200])
    with pytest.raises(VocabularyMismatchError, match="layout: expected the vocabulary"):
        QdrantCollection.server(http.url, "papers", Layout(600))


def test_a_busy_server_is_asked_again(http: OverHttp, make_vectors: Make) -> None:
    vectors = make_vectors(20)
    collection = QdrantCollection.server(http.url, "papers", SPARSE, patience=10)
    answers = iter([429, 0, 502])
    http.fault = lambda method, path: next(answers, None)
    collection.upsert(Documents(vectors.ids, vectors))
    assert len(collection) == 20
    collection = QdrantCollection.server(http.url, "papers", patience=0)
    http.fault = lambda method, path: 503
    refused(UnreachableError, r"after 0.\d s", collection.search, vectors.take([0]), 3)


def test_a_build_that_lost_its_server_goes_on_where_it_was(
    http: OverHttp,
    make_vectors: Make,
) -> None:
    vectors = make_vectors(60)
    documents = Documents(vectors.ids, vectors)
    collection = QdrantCollection.server(http.url, "papers", SPARSE, patience=0.3)
    reported: list[int] = []
    http.fault = lambda method, path: (
        0 if path.endswith("/points") and method == "PUT" and len(reported) == 3 else None
    )
    with pytest.raises(
        UnreachableError,
        match=r"What was reported as done before is kept; the same call goes on",
    ):
        collection.build(documents, batch_size=10, progress=lambda done, _: reported.append(done))
    assert reported == [10, 20, 30]
    http.fault = None
    again = QdrantCollection.server(http.url, "papers", SPARSE)
    assert not again.complete and set(vectors.ids[:30]) <= set(again.ids())
    http.seen.clear()
    again.build(documents, batch_size=10, progress=lambda done, _: reported.append(done))
    assert reported == [10, 20, 30, 10, 20, 30, 40, 50, 60]
    assert (
        sum(method == "PUT" and path.endswith("/points") for method, path in http.seen) == 3
    )  # not again
    assert again.complete and len(again) == 60


@pytest.mark.parametrize("at", ["collection.json", "index.json"])
def test_a_process_killed_while_it_writes_a_record_leaves_an_index(
    make_vectors: Make,
    tmp_path: Path,
    at: str,
) -> None:
    folder, vectors = tmp_path / "index", make_vectors(5)
    build_index(vectors, "qdrant", folder=folder).close()
    code = f"""
import os
from pathlib import Path
import tilefold._internal.files as files
from tilefold.retrieval import load_index
from tilefold.retrieval.index.qdrant.index import QdrantIndex
index = load_index({str(folder)!r})
replace = Path.replace
Path.replace = lambda self, to: os._exit(9) if str(to).endswith({at!r}) else replace(self, to)
index.save({str(folder)!r}) if {at!r} == "index.json" else index.collection.delete(["d0"])
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 9
    with load_index(folder).collection as left:
        assert len(left) == 5
    build_index(make_vectors(6), "qdrant", folder=folder, overwrite=True).close()
