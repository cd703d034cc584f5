"""``tilefold serve`` killed, or asked to end, while it answers: no answer is half written, and no index is harmed."""

from __future__ import annotations

import hashlib
import json
import random
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests import programs
from tests.processes import environment
from tests.serve.running import Client
from tests.serve.test_serve_sockets import posted
from tilefold import retrieval as r
from tilefold.retrieval.index.qdrant import QdrantIndex

QUERIES = ["csv files", "dates and times", "threads", "write json text"]
CLIENTS = 6
SECONDS = 60  # for an answer, and for the process to start and to end


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


def asked(query: str) -> bytes:
    return posted({"query": query, "hits": 5}, "/v1/papers/search")


def ranking(raw: bytes) -> dict[str, float] | None:
    """The ranking in an answer, None where it is not whole."""
    head, _, body = raw.partition(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", head)
    if length is None or len(body) != int(length[1]):
        return None
    assert head.startswith((b"HTTP/1.1 200", b"HTTP/1.1 503")), raw
    return {entry["docid"]: entry["score"] for entry in json.loads(body).get("candidates", [])}


def ask(client: Client, expected: dict[str, dict[str, float]], seen: Counter[str], seed: int) -> None:
    """Ask again and again, each time on a new connection, until the server is gone."""
    random_ = random.Random(seed)  # noqa: S311
    while True:
        query, raw = random_.choice(QUERIES), b""
        try:
            with client.connect() as opened:
                opened.sendall(asked(query))
                while part := opened.recv(65536):
                    raw += part
        except ConnectionRefusedError:
            return
        except ConnectionError:
            pass
        found = ranking(raw) if raw else {}
        kind = "none" if not raw else "half" if found is None else "refused" if not found else "whole"
        if kind == "whole" and found != pytest.approx(expected[query], rel=2e-2):
            kind = "wrong"
        seen[kind] += 1


def interrupted(process: Any, client: Client, expected: Any, sent: signal.Signals, after: float) -> Counter[str]:
    seen: Counter[str] = Counter()
    threads = [threading.Thread(target=ask, args=(client, expected, seen, seed)) for seed in range(CLIENTS)]
    for thread in threads:
        thread.start()
    until = time.monotonic() + SECONDS
    while seen["whole"] < 5 and time.monotonic() < until:
        time.sleep(0.01)
    time.sleep(after)
    process.send_signal(sent)
    code = process.wait(SECONDS)
    for thread in threads:
        thread.join(SECONDS)
        assert not thread.is_alive(), "a request hangs"
    assert code == (0 if sent is signal.SIGTERM else -sent)
    return seen


def digests(folder: Path) -> dict[str, str]:
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def answers(client: Client) -> dict[str, Any]:
    found = {query: ranking(client.raw(asked(query))) for query in QUERIES}
    assert all(scores and len(scores) == 5 for scores in found.values())
    return found


@pytest.mark.parametrize("backend", ["qdrant", "exact"])
def test_what_was_begun_is_answered_and_a_killed_server_starts_again(
    backend: str, vectors: r.SparseVectors, masked_lm: str, tmp_path: Path
) -> None:
    index, expected = tmp_path / "papers", None
    built = r.build_index(vectors, backend, **({"folder": index} if backend == "qdrant" else {}))
    built.save(index)
    if isinstance(built, QdrantIndex):
        built.collection.close()
    before = digests(index)
    for sent in (signal.SIGKILL, signal.SIGTERM):
        with served(masked_lm, index) as (process, client):
            found = answers(client)
            assert found == (expected or found)
            expected = found
            seen = interrupted(process, client, found, sent, random.uniform(0, 0.6))  # noqa: S311
        assert seen["whole"] >= 5 and not seen["wrong"], seen
        assert sent is signal.SIGKILL or not seen["half"], seen
        assert backend == "qdrant" or digests(index) == before  # whose files are those of Qdrant
