"""Tests of batching: token budgets, inputs that fail, turns of requests, and the load scripts."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from benchmarks import serve_bad, serve_clients, serve_soak
from benchmarks.serve_clients import load
from benchmarks.serve_load import row
from tests.refusals import refused
from tests.serve.running import (
    PATIENT_LIMITS,
    Client,
    hold_batch,
    json_request,
    serving,
    sparse_service,
)
from tests.waiting import WAIT_SECONDS, wait_until
from tilefold import retrieval as r
from tilefold.serve import batching
from tilefold.serve.batching import BatchWorker, Metrics
from tilefold.serve.bodies import ServeError
from tilefold.serve.models import Served, TextTokens
from tilefold.serve.searchable import Searchable
from tilefold.serve.service import EncodeOptions, Service
from tilefold.serve.settings import Limits

PANIC = -99
MAX_CHARACTERS = 250 * 64  # characters of a text that are tokenized for the tiny model


class Panic(BaseException):
    """Error that is no ``Exception``, as ``pyo3_runtime.PanicException`` of tokenizers."""


class DoublingRunner:
    """Runs batches of numbers once it is released: doubles them, and fails at negative ones."""

    def __init__(self) -> None:
        self.batches: list[tuple[Any, list[int]]] = []
        self.released = threading.Event()

    def __call__(self, key: Any, payloads: list[int]) -> list[int]:
        assert self.released.wait(WAIT_SECONDS)
        self.batches.append((key, payloads))
        smallest = min(payloads)
        if smallest == PANIC:
            raise Panic("negative")
        if smallest < 0:
            raise ArithmeticError("negative")
        return [2 * payload for payload in payloads]


async def wait_for_waiting_inputs(worker: BatchWorker, n_inputs: int) -> None:
    """Wait until at most ``n_inputs`` inputs are in the queue of a worker."""
    while len(worker) > n_inputs:
        await asyncio.sleep(0.001)


def run_entries(
    entries: list[tuple[Any, ...]],
    max_batch_tokens: int = 12,
) -> tuple[list[tuple[Any, list[int]]], list[Any]]:
    """Queue inputs while a first batch runs, then let the worker run them.

    Args:
        entries: arguments of ``BatchWorker.submit``: key, payload, tokens, position, multi_input.
        max_batch_tokens: limit of the padded tokens of a batch.

    Returns:
        The key and payloads of each batch after the first, and the answer or error of each entry.
    """
    runner = DoublingRunner()
    worker = BatchWorker("test", runner, max_batch_tokens, Metrics())

    async def submit_entries() -> list[Any]:
        worker.start()
        first = worker.submit("first", 0, 1, 0, True)
        await wait_for_waiting_inputs(worker, 0)
        futures = [worker.submit(*entry) for entry in entries]
        runner.released.set()
        await first
        return await asyncio.gather(*futures, return_exceptions=True)

    try:
        answers = asyncio.run(submit_entries())
        return runner.batches[1:], answers
    finally:
        worker.close()


def payloads_of(batches: list[tuple[Any, list[int]]]) -> list[list[int]]:
    """Return the payloads of batches without their keys."""
    return [payloads for _, payloads in batches]


def test_quick_inputs_run_on_the_event_loop_while_the_worker_is_idle() -> None:
    ran_in_worker: dict[int, bool] = {}
    runner = DoublingRunner()

    def run_and_record_thread(key: Any, payloads: list[int]) -> list[int]:
        in_worker = "tilefold" in threading.current_thread().name
        for payload in payloads:
            ran_in_worker[payload] = in_worker
        return runner(key, payloads)

    worker = BatchWorker("test", run_and_record_thread, 12, Metrics())

    async def submit_inputs() -> list[Any]:
        worker.start()
        runner.released.set()
        while_idle = [worker.submit("a", number, 1, at_once=True) for number in (1, -1)]
        assert all(future.done() for future in while_idle)
        runner.released.clear()
        while_busy = [worker.submit("a", 2, 1), worker.submit("a", 3, 1, at_once=True)]
        await wait_for_waiting_inputs(worker, 1)
        while_busy.append(worker.submit("a", 4, 1, at_once=True))
        runner.released.set()
        return await asyncio.gather(*while_idle, *while_busy, return_exceptions=True)

    try:
        first, failed, *while_busy = asyncio.run(submit_inputs())
    finally:
        worker.close()
    assert first.value == 2
    assert [answer.value for answer in while_busy] == [4, 6, 8]
    assert isinstance(failed, ServeError)
    assert failed.kind == "Backend"
    assert ran_in_worker == {1: False, -1: False, 2: True, 3: True, 4: True}


class QuickModel:
    """A served model for which texts of at most 8 tokens are quick, as with graphs on a GPU."""

    def __init__(self, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Served, "is_quick", lambda self, tokens: tokens <= 8)
        self.served = Served(model, "sparse", "tiny")
        self.ran_in_worker: list[bool] = []
        self.may_encode = threading.Event()
        self.may_encode.set()
        encode = self.served.encode

        def encode_and_record_thread(*args: Any) -> Any:
            self.ran_in_worker.append("tilefold" in threading.current_thread().name)
            assert self.may_encode.wait(WAIT_SECONDS)
            return encode(*args)

        monkeypatch.setattr(self.served, "encode", encode_and_record_thread)


def test_a_quick_request_is_encoded_on_the_event_loop_while_no_other_runs(
    sparse: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = QuickModel(sparse, monkeypatch)
    with serving(Service([model.served])) as client:
        by_loop = client.post("/embed_sparse", {"inputs": "cats"}).json
        assert client.post("/embed_sparse", {"inputs": ["cats", "cats"]}).json == by_loop * 2
        client.post("/embed_sparse", {"inputs": "cats " * 20})
        client.post("/embed_sparse", {"inputs": ["cats", "dogs"]})
        client.post("/embed_sparse", {"inputs": [[5, 6]]})
    assert model.ran_in_worker == [False, False, True, True, True]


def test_a_quick_request_is_encoded_by_the_worker_while_another_runs(
    sparse: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = QuickModel(sparse, monkeypatch)
    model.may_encode.clear()
    with serving(Service([model.served])) as client, ThreadPoolExecutor(2) as pool:
        long_reply = pool.submit(client.post, "/embed_sparse", {"inputs": "cats " * 20})
        wait_until(lambda: model.ran_in_worker == [True])
        quick_reply = pool.submit(client.post, "/embed_sparse", {"inputs": "cats"})
        wait_until(lambda: client.metric("te_queue_size") == 1)
        model.may_encode.set()
        assert long_reply.result().status == quick_reply.result().status == 200
    assert model.ran_in_worker == [True, True]


def test_a_batch_takes_inputs_while_the_padded_tokens_are_within_the_limit() -> None:
    batches, answers = run_entries(
        [
            ("a", 1, 4),
            ("a", 2, 3),
            ("a", 3, 4),
            ("a", 4, 1),
            ("a", 5, 30),
            ("a", 6, 2),
        ],
        max_batch_tokens=12,
    )
    assert payloads_of(batches) == [[1, 2, 3], [4], [5], [6]]
    assert [answer.value for answer in answers] == [2, 4, 6, 8, 10, 12]
    assert all(answer.queue > 0 for answer in answers)
    assert all(answer.inference >= 0 for answer in answers)


def test_a_batch_takes_inputs_of_one_key() -> None:
    batches, _ = run_entries([("a", 1, 2), ("b", 2, 2), ("a", 3, 2), ("b", 4, 2)])
    assert batches == [("a", [1, 3]), ("b", [2, 4])]


@pytest.mark.parametrize(
    ("requests", "expected_batches"),
    [
        pytest.param(
            [[10, 11, 12, 13], [1], [2], [3]],
            [[1, 2], [10, 11], [3], [12, 13]],
            id="every second batch is of single inputs",
        ),
        pytest.param(
            [[10, 11, 12, 13], [20, 21]],
            [[10, 20], [11, 21], [12, 13]],
            id="the first inputs of all requests come first",
        ),
    ],
)
def test_requests_take_turns(
    requests: list[list[int]],
    expected_batches: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Durations of batches, which change the token limit, are left out. Other tests are about them.
    monkeypatch.setattr(batching._TokenBudget, "learn_from_multi_batch", lambda *arguments: None)
    entries = []
    for inputs in requests:
        for position, payload in enumerate(inputs):
            entries.append(("a", payload, 1, position, len(inputs) > 1))
    batches, _ = run_entries(entries, max_batch_tokens=2)
    assert payloads_of(batches) == expected_batches


def test_batches_of_long_requests_are_short_while_others_send_single_inputs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [100.0]
    monkeypatch.setattr("tilefold.serve.batching.time.monotonic", lambda: now[0])
    budget = batching._TokenBudget(16384)
    budget.learn_from_multi_batch(8000, 4.0)
    # no single input waits
    assert budget.limit(True) == 16384
    assert budget.limit(False) == 16384
    budget.record_single_input()
    budget.learn_from_single_batch(0.05)
    budget.learn_from_multi_batch(8000, 4.0)
    assert budget.limit(True) == 200  # 2 * 0.05 s at 2,000 tokens a second
    budget.learn_from_multi_batch(200, 0.05)
    assert budget.limit(True) == 400  # a batch has a fixed cost, so that more tokens fit
    budget.learn_from_multi_batch(30, 0.05)
    # the batch was short because no more inputs waited
    assert budget.limit(True) == 400
    assert budget.limit(False) == 16384
    now[0] += 11
    assert budget.limit(True) == 16384


@pytest.mark.parametrize(
    "failing_payload",
    [
        pytest.param(-2, id="error"),
        pytest.param(PANIC, id="panic of the tokenizer"),
    ],
)
def test_an_input_that_fails_leaves_the_others_of_its_batch_unharmed(failing_payload: int) -> None:
    batches, answers = run_entries(
        [("a", 1, 2), ("a", failing_payload, 2), ("a", 3, 2), ("a", 4, 2)],
    )
    error = answers.pop(1)
    assert [answer.value for answer in answers] == [2, 6, 8]
    assert isinstance(error, ServeError)
    assert error.kind == "Backend"
    assert "negative" not in error.message
    assert ("a", [failing_payload]) in batches


def test_a_closed_worker_refuses_waiting_and_new_inputs() -> None:
    runner = DoublingRunner()
    worker = BatchWorker("test", runner, 12, Metrics())

    async def close_while_inputs_wait() -> tuple[Any, Any]:
        worker.start()
        running = worker.submit("a", 1, 1)
        await wait_for_waiting_inputs(worker, 0)
        waiting = worker.submit("a", 2, 1)
        runner.released.set()
        await asyncio.to_thread(worker.close)
        refused(ServeError, "closing", worker.submit, "a", 3, 1)
        return await asyncio.gather(running, waiting, return_exceptions=True)

    running, waiting = asyncio.run(close_while_inputs_wait())
    # both may have been answered before the worker was closed
    assert isinstance(running, ServeError) or running.value == 2
    if isinstance(waiting, ServeError):
        assert waiting.kind == "Unhealthy"
    else:
        assert waiting.value == 4
    assert not worker.alive


def test_repeated_queries_are_answered_from_the_cache(sparse: Any, masked_lm: str) -> None:
    service = Service([Served(sparse, "sparse", masked_lm)], Limits(cached_queries=2))
    with serving(service) as client:
        (a_list,) = client.post("/query/embed_sparse", {"inputs": "a list"}).json
        (a_sum,) = client.post("/query/embed_sparse", {"inputs": "sum"}).json
        repeated = client.post("/query/embed_sparse", {"inputs": ["sum", "a list", "sum"]}).json
        assert repeated == [a_sum, a_list, a_sum]
        assert client.metric("tilefold_cached_count") == 2
        # "x" and "y" evict "a list", so that it is encoded again
        for text in ("x", "y", "a list"):
            client.post("/query/embed_sparse", {"inputs": text})
        client.post("/document/embed_sparse", {"inputs": "a list"})
        client.post("/document/embed_sparse", {"inputs": "a list"})
        assert client.metric("tilefold_cached_count") == 2


class LengthCounter:
    """Replaces ``TextTokens.lengths``: records the texts per call, and raises for the text "bad"."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
        self.texts_per_call: list[int] = []
        lengths = TextTokens.lengths

        def record_and_count(tokens: TextTokens, texts: list[str], *args: Any) -> list[int]:
            self.texts_per_call.append(len(texts))
            if "bad" in texts:
                raise error
            return lengths(tokens, texts, *args)

        monkeypatch.setattr(TextTokens, "lengths", record_and_count)


@pytest.fixture
def service(sparse: Any) -> Iterator[Service]:
    """A service of the sparse model that is called without a server."""
    service = Service([Served(sparse, "sparse", "tiny")])
    yield service
    service.close()


def encode_together(service: Service, texts: list[str]) -> list[Any]:
    """Encode texts by one call each in one turn of the event loop; return answers or errors."""

    async def encode_texts() -> list[Any]:
        service.start()
        model = service.model("sparse")
        calls = [service.encode(model, [text], EncodeOptions("query")) for text in texts]
        return await asyncio.gather(*calls, return_exceptions=True)

    return asyncio.run(encode_texts())


@pytest.mark.parametrize(
    "error",
    [
        pytest.param(ServeError("Tokenizer", "Tokenization error: Panic"), id="error"),
        pytest.param(Panic(), id="panic of the tokenizer"),
    ],
)
def test_tokens_of_texts_of_one_turn_of_the_loop_are_counted_by_one_call(
    service: Service,
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
) -> None:
    texts = ["cats", "dogs bark", "b" * 20]
    counter = LengthCounter(monkeypatch, error)
    together = encode_together(service, texts)
    *others, failed = encode_together(service, [*texts, "bad"])
    assert counter.texts_per_call[:2] == [3, 4]
    assert isinstance(failed, type(error))
    separate_tokens = [encode_together(service, [text])[0].tokens for text in texts]
    assert [answer.tokens for answer in together] == separate_tokens
    assert [answer.tokens for answer in others] == separate_tokens


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        pytest.param(
            {"max_concurrent_requests": 0},
            "max_concurrent_requests: expected at least 1, got 0",
            id="no concurrent requests",
        ),
        pytest.param(
            {"payload_limit": 0},
            "payload_limit: expected at least 1, got 0",
            id="no payload",
        ),
        pytest.param(
            {"max_connections": 0},
            "max_connections: expected at least 1, got 0",
            id="no connections",
        ),
        pytest.param(
            {"cached_queries": -1},
            "cached_queries: expected at least 0, got -1",
            id="negative size of the cache",
        ),
        pytest.param(
            {"body_seconds": 0},
            "body_seconds: expected a finite number above 0",
            id="no time for a body",
        ),
        pytest.param(
            {"grace_seconds": -1},
            "grace_seconds: expected a finite number of at least 0, got",
            id="negative grace period",
        ),
        pytest.param(
            {"grace_seconds": float("inf")},
            "grace_seconds: expected a finite number of at least 0, got",
            id="infinite grace period",
        ),
        pytest.param(
            {"grace_seconds": float("nan")},
            "grace_seconds: expected a finite number of at least 0, got",
            id="grace period of nan",
        ),
        pytest.param(
            {"max_concurrent_requests": 8, "max_client_batch_size": 9},
            "at most max_concurrent",
            id="request larger than the limit of all requests",
        ),
    ],
)
def test_limits_reject(limits: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Limits(**limits)


def test_a_server_may_end_without_a_grace_period() -> None:
    assert Limits(grace_seconds=0).grace_seconds == 0


def test_tokenize_and_decode_take_as_many_characters_as_any_model_reads(client: Client) -> None:
    rows = client.post("/tokenize", {"inputs": ["." * 8000] * 2}).json
    assert [len(tokens) for tokens in rows] == [8002, 8002]
    texts = client.post("/decode", {"ids": [[7] * 8000] * 2}).json
    assert len(texts) == 2


def test_a_query_of_bm25_has_a_limit_of_characters(collection: Any) -> None:
    searchable = Searchable("words", r.BM25Index.build(collection.contents()))
    with serving(Service([], searchable=searchable)) as client:
        longest = client.post("/v1/words/search", {"query": "csv " * 32_000})
        longer = client.post("/v1/words/search", {"query": "csv " * 32_001})
    assert longest.status == 200
    assert longer.status == 422
    message = "`query` must have less than 128000 characters. Given: 128004"
    assert longer.json["error"].endswith(message)


@pytest.mark.parametrize("direction", ["left", "right"])
def test_characters_beyond_the_limit_of_a_text_are_not_tokenized(
    client: Client,
    direction: str,
    monkeypatch: Any,
) -> None:
    lengths = TextTokens.lengths
    tokenized: list[str] = []

    def record_and_count(tokens: TextTokens, texts: list[str], *args: Any) -> list[int]:
        tokenized.extend(texts)
        return lengths(tokens, texts, *args)

    monkeypatch.setattr(TextTokens, "lengths", record_and_count)
    text = "csv files " * 100_000 + "dates " * 100_000
    truncated = text[:MAX_CHARACTERS] if direction == "right" else text[-MAX_CHARACTERS:]
    body = {"truncation_direction": direction}
    reply = client.post("/embed_sparse", body | {"inputs": text})
    assert reply.status == 200
    assert tokenized == [truncated]
    assert reply.json == client.post("/embed_sparse", body | {"inputs": truncated}).json


class Gate:
    """Delays a method of ``TextTokens`` until the gate is opened, and records its calls."""

    def __init__(self, method: Any) -> None:
        self.method = method
        self.opened = threading.Event()
        self.calls: list[tuple[Any, ...]] = []

    def call(self, *args: Any, **options: Any) -> Any:
        """Record a call, wait, and call the method."""
        self.calls.append(args)
        assert self.opened.wait(WAIT_SECONDS)
        return self.method(*args, **options)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Gate]:
    """A gate before the method of ``TextTokens`` that the test names as its parameter."""
    gate = Gate(getattr(TextTokens, request.param))

    def call_through_gate(tokens: TextTokens, *args: Any, **options: Any) -> Any:
        return gate.call(tokens, *args, **options)

    monkeypatch.setattr(TextTokens, request.param, call_through_gate)
    yield gate
    gate.opened.set()


@pytest.mark.parametrize("gate", ["tokenize"], indirect=True)
def test_encoding_does_not_wait_for_requests_to_tokenize(sparse: Any, gate: Gate) -> None:
    n_tokenizer_threads = 2
    with serving(sparse_service(sparse)) as client, ThreadPoolExecutor(4) as pool:
        replies = [pool.submit(client.post, "/tokenize", {"inputs": "csv"}) for _ in range(4)]
        wait_until(lambda: len(gate.calls) == n_tokenizer_threads)
        assert client.post("/embed_sparse", {"inputs": "csv files"}).status == 200
        gate.opened.set()
        assert [reply.result().status for reply in replies] == [200] * 4


@pytest.mark.parametrize("gate", ["lengths"], indirect=True)
def test_texts_of_a_client_that_disconnected_are_no_longer_counted(sparse: Any, gate: Gate) -> None:
    with serving(sparse_service(sparse)) as client:
        with client.connect() as connection:
            connection.sendall(json_request({"inputs": ["." * 9000] * 32}))
            wait_until(lambda: len(gate.calls) == 1)
        wait_until(lambda: client.metric("tilefold_inputs_in_flight") == 0)
        gate.opened.set()
        assert client.post("/embed_sparse", {"inputs": "csv files"}).status == 200
        # one text of the client that disconnected, and the text of the other
        assert [len(texts) for _, texts, *_ in gate.calls] == [1, 1]


def test_a_single_query_is_encoded_before_batches_of_documents_that_came_earlier(
    sparse: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    encode = Served.encode
    batches: list[list[str]] = []

    def record_and_encode(served: Served, key: Any, inputs: list[str]) -> Any:
        batches.append(list(inputs))
        return encode(served, key, inputs)

    monkeypatch.setattr(Served, "encode", record_and_encode)
    documents = [f"csv {number}" for number in range(32)]
    service = sparse_service(sparse, max_batch_tokens=64)
    with serving(service) as client, ThreadPoolExecutor(5) as pool:
        with hold_batch(client, sparse, n_inputs=1):
            for _ in range(4):
                pool.submit(client.post, "/embed_sparse", {"inputs": documents})
            wait_until(lambda: client.metric("te_queue_size") == 128)
            pool.submit(client.post, "/embed_sparse", {"inputs": "dates"})
            wait_until(lambda: client.metric("te_queue_size") == 129)
        pool.shutdown()
    # at most the held batch and one batch of documents come before the query
    assert batches.index(["dates"]) <= 2
    assert len(batches) > 8


class TickingClock:
    """Clock of a load script, which advances by one second at each look at it.

    Clients that end by it send the same number of requests on a machine of any speed.
    """

    def __init__(self) -> None:
        self._seconds = itertools.count()

    def monotonic(self) -> float:
        return float(next(self._seconds))

    perf_counter = monotonic


def test_load_measures_answers_and_their_times(
    client: Client,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(serve_clients, "time", TickingClock())
    bodies = [{"inputs": text, "top_k": 4} for text in ("csv files", "dates")]
    result = asyncio.run(load(client.port, "/embed_sparse", bodies, clients=4, seconds=40))
    assert len(result.seconds) > 8
    assert result.refused == 0
    figures = row("tilefold", 4, 1, result)
    assert figures["requests_s"] == round(len(result.seconds) / result.wall, 1)
    assert 0 < figures["p50_ms"] <= figures["p99_ms"] < 1000 * result.wall


def test_load_counts_refused_requests(client: Client) -> None:
    empty: list[dict[str, list[str]]] = [{"inputs": []}]
    result = asyncio.run(load(client.port, "/embed_sparse", empty, clients=1, seconds=0.2))
    assert result.seconds == []
    assert result.refused > 0


def test_load_rejects_more_clients_than_it_can_run(client: Client) -> None:
    with pytest.raises(ValueError, match="at most 1,000"):
        asyncio.run(load(client.port, "/embed_sparse", [{"inputs": "a"}], clients=5000, seconds=1))


@pytest.fixture(scope="module")
def patient_client(sparse: Any) -> Iterator[Client]:
    """A server that gives up no client."""
    with serving(sparse_service(sparse, **PATIENT_LIMITS)) as client:
        yield client


async def send_together(port: int, requests: list[bytes]) -> list[int]:
    """Send bytes on a connection each, at the same time; return the codes of the answers."""
    return await asyncio.gather(*(serve_bad.send(port, request) for request in requests))


def test_bad_input_gets_the_status_codes_that_the_soak_expects(patient_client: Client) -> None:
    requests = [request for request, _ in serve_bad.BAD.values()]
    codes = asyncio.run(send_together(patient_client.port, requests))
    for (name, (_, expected_codes)), code in zip(serve_bad.BAD.items(), codes, strict=True):
        assert code in expected_codes, name


def test_a_slow_head_gets_what_the_soak_expects(sparse: Any) -> None:
    request, expected_codes = serve_bad.SLOW["half a head"]
    limits = PATIENT_LIMITS | {"header_seconds": 0.5}
    with serving(sparse_service(sparse, **limits)) as client:
        (code,) = asyncio.run(send_together(client.port, [request]))
    assert code in expected_codes


@pytest.fixture
def client_with_slow_bodies(sparse: Any) -> Iterator[Client]:
    """A server that waits half a second for bodies, and for a client to read its answer."""
    limits = PATIENT_LIMITS | {"body_seconds": 0.5}
    with serving(sparse_service(sparse, **limits)) as client:
        yield client


@pytest.mark.parametrize("name", sorted(serve_bad.SLOW.keys() - {"half a head"}))
def test_slow_bodies_get_what_the_soak_expects(client_with_slow_bodies: Client, name: str) -> None:
    request, expected_codes = serve_bad.SLOW[name]
    (code,) = asyncio.run(send_together(client_with_slow_bodies.port, [request]))
    assert code in expected_codes


def test_slow_clients_get_what_the_soak_expects(
    client_with_slow_bodies: Client,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counts: Counter[str] = Counter()
    port = client_with_slow_bodies.port
    for slow_client in (serve_bad.drip, partial(serve_bad.unread, wait=2)):
        # The clock ends each client after its first connection.
        monkeypatch.setattr(serve_bad, "time", TickingClock())
        asyncio.run(slow_client(port, 0.5, counts))
    assert counts == {"byte by byte: as expected": 1, "unread: as expected": 1}


def test_the_soak_notices_vectors_of_other_texts(
    patient_client: Client,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counts: Counter[str] = Counter()
    port = patient_client.port
    texts = ["csv files", "dates", "queues of threads", "hash tables"]
    vectors = asyncio.run(serve_soak.alone(port, texts))
    monkeypatch.setattr(serve_soak, "time", TickingClock())
    asyncio.run(serve_soak.good(port, texts, vectors, 30, counts))
    assert set(counts) == {"answered"}
    shifted = [{index + 1: value for index, value in vector.items()} for vector in vectors]
    monkeypatch.setattr(serve_soak, "time", TickingClock())
    asyncio.run(serve_soak.good(port, texts, shifted, 10, counts))
    assert set(counts) == {"answered", "LOST: another vector"}


def test_the_soak_counts_idle_connections_that_stay_open(patient_client: Client) -> None:
    counts: Counter[str] = Counter()
    asyncio.run(serve_bad.leave(patient_client.port))
    asyncio.run(serve_bad.flood(patient_client.port, 20, counts))
    assert counts["idle connection: kept"] == 20
    assert serve_soak.summed(counts)["connections_kept"] == 20


def test_the_soak_compares_memory_of_the_second_and_the_last_third() -> None:
    counts: Counter[str] = Counter(answered=6)
    # a sample every 2 s; memory grows by 1 MiB a minute
    samples = [(2.0 * step, (100 + step // 30) * 2**20, counts) for step in range(91)]
    watched = serve_soak.Watched(samples)
    assert watched.medians() == (101, 102)
    minutes = [(row["minute"], row["memory_mib"], row["answered"]) for row in watched.minutes()]
    assert minutes == [(1, 101.0, 6), (2, 102.0, 0), (3, 103.0, 0)]
