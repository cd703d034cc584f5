"""Tests of a server that listens while its models and its index are still loaded."""

from __future__ import annotations

import http.client
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests import programs
from tests.processes import environment
from tests.serve.running import Client, Reply, request_head, sparse_service
from tests.serve.test_sockets import status_codes
from tests.test_imports import run_python
from tests.waiting import WAIT_SECONDS, wait_until
from tilefold.serve.app import create_app
from tilefold.serve.batching import BatchWorker
from tilefold.serve.loading import Report
from tilefold.serve.server import bind, load_and_run
from tilefold.serve.service import Service
from tilefold.serve.settings import Limits

# `tilefold serve` that loads nothing before a named pipe has been opened and closed by the test.
HELD_SERVER = """
import sys
from pathlib import Path
from tilefold import cli
from tilefold.cli import serve

load = serve._load
pipe = Path(sys.argv[1])

def load_after_release(request, limits):
    pipe.read_bytes()
    return load(request, limits)

serve._load = load_after_release
cli.main(sys.argv[2:])
"""


@dataclass
class HeldServer:
    """Process of ``tilefold serve`` that waits in its loading thread.

    Attributes:
        process: the process.
        client: client of the server.
        log: file with its standard error.
        pipe: named pipe on which the loading thread waits.
    """

    process: Any
    client: Client
    log: Path
    pipe: Path

    def release(self) -> None:
        """Let the server load its model."""
        self.pipe.write_bytes(b"")

    def wait_until_ready(self) -> None:
        """Wait for the line that says that the server is ready."""
        wait_until(lambda: "Ctrl-C ends" in self.log.read_text())


@contextmanager
def held_server(folder: Path, model: str | Path) -> Iterator[HeldServer]:
    """Run ``tilefold serve`` with a model that is not loaded before :meth:`HeldServer.release`.

    Args:
        folder: an empty folder for the log and the named pipe.
        model: the folder of the model.
    """
    pipe = folder / "pipe"
    os.mkfifo(pipe)
    log = folder / "log"
    log.touch()
    command = ("-c", HELD_SERVER, pipe, "serve", "--port", "0", "--model", model)
    with programs.start(*command, env=environment(OMP_NUM_THREADS="1"), stderr=log) as process:
        try:
            wait_until(lambda: "listening on" in log.read_text())
            address = log.read_text().partition("listening on ")[2].partition(";")[0]
            port = int(address.rpartition(":")[2])
            yield HeldServer(process, Client(port), log, pipe)
        finally:
            process.kill()


def assert_is_loading(reply: Reply) -> None:
    """Assert that a reply refuses a request because the server is still loading."""
    assert reply.status == 503
    assert reply.headers["retry-after"] == "1"
    assert reply.headers["content-type"] == "application/json"
    assert reply.json["error_type"] == "Unhealthy"
    assert reply.json["stage"] == "loading the model"
    assert reply.json["seconds"] >= 0
    assert "loading the model" in reply.json["error"]


def post_on(connection: http.client.HTTPConnection) -> int:
    """Encode a text on an open connection, and return the status code of the reply."""
    body = json.dumps({"inputs": "csv files"})
    connection.request("POST", "/embed_sparse", body, {"content-type": "application/json"})
    response = connection.getresponse()
    response.read()
    return response.status


def test_all_routes_answer_503_until_the_model_is_loaded(masked_lm: str, tmp_path: Path) -> None:
    with held_server(tmp_path, masked_lm) as server:
        client = server.client
        for path in ("/health", "/ping", "/", "/info", "/query/info", "/nowhere"):
            wait_until(lambda: client.get("/health").json["stage"] == "loading the model")
            assert_is_loading(client.get(path))
        assert_is_loading(client.post("/embed_sparse", {"inputs": "csv files"}))
        assert client.request("HEAD", "/health").status == 503
        assert client.get("/live").status == 200
        assert client.metric("tilefold_ready") == 0
        assert "http://" not in server.log.read_text()

        connection = http.client.HTTPConnection("127.0.0.1", client.port, timeout=WAIT_SECONDS)
        assert post_on(connection) == 503
        server.release()
        wait_until(lambda: post_on(connection) == 200)
        connection.close()
        server.wait_until_ready()
        assert client.get("/health").status == 200
        assert client.get("/live").status == 200
        assert client.metric("tilefold_ready") == 1
        assert client.post("/embed_sparse", {"inputs": "csv files"}).status == 200


def test_every_request_during_loading_is_answered(masked_lm: str, tmp_path: Path) -> None:
    large_body = b"x" * 20_000_000  # above the limit: it is refused before it is read
    info_request = b"GET /info HTTP/1.1\r\nhost: localhost\r\n\r\n"
    last_request = info_request.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")
    statuses_by_client: list[list[int]] = [[] for _ in range(4)]

    def embed_until_ready(client: Client, statuses: list[int]) -> None:
        while not statuses or statuses[-1] == 503:
            statuses.append(client.post("/embed_sparse", {"inputs": "csv files"}).status)

    with held_server(tmp_path, masked_lm) as server, ThreadPoolExecutor(4) as pool:
        client = server.client
        client.headers = {"connection": "close"}
        assert client.request("POST", "/embed_sparse", large_body).status == 503
        assert status_codes(client.raw(info_request * 2 + last_request)) == [503, 503, 503]
        head = request_head("content-type: application/json\r\ncontent-length: 100\r\n")
        assert status_codes(client.raw(head)) == [503]  # the body does not come
        client.headers = {}
        clients = [
            pool.submit(embed_until_ready, client, statuses) for statuses in statuses_by_client
        ]
        wait_until(lambda: all(statuses_by_client))
        server.release()
        for running_client in clients:
            running_client.result(WAIT_SECONDS)
    for *before, last in statuses_by_client:
        assert set(before) == {503}
        assert last == 200


@pytest.mark.parametrize("sent_signal", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_server_that_is_loading(
    masked_lm: str,
    tmp_path: Path,
    sent_signal: signal.Signals,
) -> None:
    with held_server(tmp_path, masked_lm) as server:
        assert server.client.get("/health").status == 503
        server.process.send_signal(sent_signal)
        assert server.process.wait(WAIT_SECONDS) == 0  # the loading thread was not released
        lines = server.log.read_text().splitlines()
    assert "listening on" in lines[0]
    assert lines[1:] == ["ended before everything was loaded"]


def test_a_model_that_cannot_be_loaded_ends_the_server_with_its_error(
    masked_lm: str,
    tmp_path: Path,
) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in Path(masked_lm).iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    (broken / "model.safetensors").write_bytes(b"no weights")
    with held_server(tmp_path, broken) as server:
        assert server.client.get("/health").status == 503
        server.release()
        assert server.process.wait(WAIT_SECONDS) == 1
        log = server.log.read_text()
    assert f"Error: --model: the weights in {broken} are damaged" in log
    assert "Traceback" not in log


def test_the_server_listens_before_the_slow_libraries_are_imported() -> None:
    code = """
import sys
from tilefold import cli
from tilefold.serve import server

def print_imports(*arguments, **options):
    slow = ("torch", "fastapi", "transformers", "sentence_transformers")
    print([library for library in slow if library in sys.modules])
    return True

server.load_and_run = print_imports
cli.main(["serve", "--model", "minilm", "--port", "0"])
"""
    assert run_python(code).strip() == "[]"


@contextmanager
def loading_in_thread(
    load: Callable[[Report], Any],
    **options: Any,
) -> Iterator[tuple[Client, Future[bool]]]:
    """Run :func:`load_and_run` in a thread of this process.

    Args:
        load: function that returns the application.
        options: further arguments of :func:`load_and_run`.

    Yields:
        A client of the server, and the result of :func:`load_and_run` as a future.
    """
    listening = threading.Event()
    listener = bind("127.0.0.1", 0)
    with listener, ThreadPoolExecutor(1) as pool:
        result = pool.submit(load_and_run, load, listener, listening=listening.set, **options)
        assert listening.wait(WAIT_SECONDS), "the server did not listen"
        yield Client(listener.getsockname()[1]), result


def test_the_stages_that_a_load_function_reports_are_shown() -> None:
    released = threading.Event()
    reported = threading.Event()

    def load(report: Report) -> Any:
        report("reading the moon")
        reported.set()
        assert released.wait(WAIT_SECONDS)
        raise OSError("the moon is away")

    with loading_in_thread(load) as (client, result):
        assert reported.wait(WAIT_SECONDS)
        assert client.get("/health").json["stage"] == "reading the moon"
        released.set()
        assert isinstance(result.exception(WAIT_SECONDS), OSError)


def test_a_service_with_other_limits_than_the_server_is_refused(sparse: Any) -> None:
    def load(report: Report) -> Any:
        return create_app(sparse_service(sparse, max_hits=3))

    with loading_in_thread(load, limits=Limits(max_hits=4)) as (_, result):
        error = result.exception(WAIT_SECONDS)
    assert isinstance(error, ValueError)
    assert "limits: expected the limits of the loaded service" in str(error)


FAILING_APP = """
import uvicorn
from tilefold.serve import LoadingApp

def load(report):
    raise OSError("the moon is away")

uvicorn.run(LoadingApp(load), port=0, log_level="warning")
"""


def test_a_plain_uvicorn_ends_if_the_application_cannot_be_loaded() -> None:
    result = programs.run("-c", FAILING_APP, env=environment(), timeout=WAIT_SECONDS)
    assert result.returncode == -signal.SIGTERM
    assert "the server could not be loaded: OSError" in result.stderr


def test_a_service_is_live_until_a_worker_thread_ends(
    sparse: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    service: Service = sparse_service(sparse)
    service.start()
    try:
        assert service.live
        service.draining = True
        assert service.live
        assert not service.healthy
        monkeypatch.setattr(BatchWorker, "alive", False)
        assert not service.live
    finally:
        service.close()
