"""``tilefold serve`` killed, or asked to end, while it answers: no answer is half written, and no index is harmed."""

from __future__ import annotations

import hashlib
import json
import random
import re
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests import programs
from tests.processes import environment
from tests.serve.running import Client
from tilefold import retrieval as r
from tilefold.retrieval.collection import Collection
from tilefold.retrieval.index.qdrant import QdrantIndex

QUERIES = ["csv files", "dates and times", "threads", "write json text"]
CLIENTS = 6
SECONDS = 60  # for an answer, and for the process to start and to end


@pytest.fixture(scope="module")
def vectors(sparse: Any, collection: Collection, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("killed") / "vectors"
    r.encode_collection(sparse, collection.contents(), folder)
    return folder


@contextmanager
def served(model: str, index: Path) -> Iterator[tuple[Any, Client]]:
    """A process that serves the index."""
    command = ("-m", "tilefold.cli", "serve", "--model", model, "--index", index, "--port", "0")
    with programs.start(*command, env=environment(OMP_NUM_THREADS="1"), stderr=programs.PIPE) as process:
        try:
            assert process.stderr is not None
            line = next(line for line in process.stderr if "http://" in line)
            yield process, Client(int(re.search(r":(\d+); Ctrl-C ends", line)[1]))
        finally:
            process.kill()


def asked(name: str, query: str) -> bytes:
    body = json.dumps({"query": query, "hits": 5}).encode()
    head = (
        f"POST /v1/{name}/search HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\nconnection: close\r\n"
    )
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


def ranking(raw: bytes) -> dict[str, float] | None:
    """The ranking in an answer, None where it is not whole."""
    head, _, body = raw.partition(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", head)
    if length is None or len(body) != int(length[1]):
        return None
    assert head.startswith((b"HTTP/1.1 200", b"HTTP/1.1 503")), raw
    return {entry["docid"]: entry["score"] for entry in json.loads(body).get("candidates", [])}


@dataclass
class Asking:
    """Clients that ask again and again, each on new connections, until the server is gone."""

    client: Client
    name: str
    expected: dict[str, dict[str, float]]
    seen: Counter[str] = field(default_factory=Counter)

    def run(self, seed: int) -> None:
        random_ = random.Random(seed)  # noqa: S311
        while True:
            query, raw = random_.choice(QUERIES), b""
            try:
                with socket.create_connection(("127.0.0.1", self.client.port), timeout=SECONDS) as opened:
                    opened.sendall(asked(self.name, query))
                    while part := opened.recv(65536):
                        raw += part
            except ConnectionRefusedError:
                return
            except ConnectionError:
                pass
            found = ranking(raw) if raw else {}
            kind = "none" if not raw else "half" if found is None else "refused" if not found else "whole"
            if kind == "whole" and found != pytest.approx(self.expected[query], rel=2e-2):
                kind = "wrong"
            self.seen[kind] += 1


def interrupted(process: Any, asking: Asking, sent: signal.Signals, after: float) -> Counter[str]:
    threads = [threading.Thread(target=asking.run, args=(seed,)) for seed in range(CLIENTS)]
    for thread in threads:
        thread.start()
    until = time.monotonic() + SECONDS
    while asking.seen["whole"] < 5 and time.monotonic() < until:
        time.sleep(0.01)
    time.sleep(after)
    process.send_signal(sent)
    code = process.wait(SECONDS)
    for thread in threads:
        thread.join(SECONDS)
        assert not thread.is_alive(), "a request hangs"
    assert code == (0 if sent is signal.SIGTERM else -sent)
    return asking.seen


def digests(folder: Path) -> dict[str, str]:
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def indexed(vectors: Path, backend: str, index: Path) -> Path:
    built = r.build_index(r.read_vectors(vectors), backend, **({"folder": index} if backend == "qdrant" else {}))
    built.save(index)
    if isinstance(built, QdrantIndex):
        built.collection.close()
    return index


def answers(client: Client, name: str) -> dict[str, Any]:
    found = {query: ranking(client.raw(asked(name, query))) for query in QUERIES}
    assert all(scores and len(scores) == 5 for scores in found.values())
    return found


@pytest.mark.parametrize("backend", ["qdrant", "exact"])
def test_a_server_that_is_ended_answers_what_it_began_and_one_that_was_killed_starts_with_the_same_answers(
    backend: str, vectors: Path, masked_lm: str, tmp_path: Path
) -> None:
    index, expected = indexed(vectors, backend, tmp_path / "papers"), None
    before = digests(index)
    for sent in (signal.SIGKILL, signal.SIGTERM):
        with served(masked_lm, index) as (process, client):
            found = answers(client, "papers")
            assert found == (expected or found)
            expected = found
            seen = interrupted(process, Asking(client, "papers", found), sent, random.uniform(0, 0.6))  # noqa: S311
        assert seen["whole"] >= 5 and not seen["wrong"], seen
        assert sent is signal.SIGKILL or not seen["half"], seen
        assert backend == "qdrant" or digests(index) == before  # whose files are those of Qdrant
