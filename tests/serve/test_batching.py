"""Batches by tokens, failing inputs, what one request may ask for, others' turns; the scripts that
load a server.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from benchmarks import serve_bad, serve_soak
from benchmarks.serve_clients import load
from benchmarks.serve_load import row
from tests.refusals import refused
from tests.serve.running import Client, serving
from tests.serve.test_sockets import hold, inputs_in_flight, posted, service, wait_until
from tilefold import retrieval as r
from tilefold.serve import batching
from tilefold.serve.batching import BatchWorker, Metrics
from tilefold.serve.bodies import ServeError
from tilefold.serve.models import Served, TextTokens
from tilefold.serve.searchable import Searchable
from tilefold.serve.service import EncodeOptions, Service
from tilefold.serve.settings import Limits

PANIC = -99
MOST = 250 * 64  # characters that the tiny model tokenizes


class Panic(BaseException):
    """As ``pyo3_runtime.PanicException``, which tokenizers raises, is no ``Exception``."""


class Recorder:
    """Runs batches of numbers: doubles them, fails at negative ones, and waits until it is let go."""

    def __init__(self) -> None:
        self.batches: list[tuple[Any, list[int]]] = []
        self.go = threading.Event()

    def __call__(self, key: Any, payloads: list[int]) -> list[int]:
        self.go.wait(10)
        self.batches.append((key, payloads))
        if min(payloads) < 0:
            raise (Panic if min(payloads) == PANIC else ArithmeticError)("negative")
        return [2 * payload for payload in payloads]


def run(
    entries: list[tuple[Any, ...]],
    limit: int = 12,
) -> tuple[list[tuple[Any, list[int]]], list[Any]]:
    """Queue (key, payload, tokens, position, multi_input) behind a first batch: the batches after it, what
    becomes of them.
    """
    recorder = Recorder()
    worker = BatchWorker("test", recorder, limit, Metrics())

    async def main() -> list[Any]:
        worker.start()
        first = worker.submit("first", 0, 1, 0, True)
        while len(worker):
            await asyncio.sleep(0.001)
        waiting = [worker.submit(*entry) for entry in entries]
        recorder.go.set()
        await first
        return await asyncio.gather(*waiting, return_exceptions=True)

    try:
        answers = asyncio.run(main())
        return recorder.batches[1:], answers
    finally:
        worker.close()


def test_what_is_quick_runs_on_the_event_loop_while_the_worker_has_nothing() -> None:
    threads: list[tuple[int, str]] = []
    recorder = Recorder()

    def noted(key: Any, payloads: list[int]) -> list[int]:
        threads.extend((payload, threading.current_thread().name) for payload in payloads)
        return recorder(key, payloads)

    worker = BatchWorker("test", noted, 12, Metrics())

    async def main() -> list[Any]:
        worker.start()
        recorder.go.set()
        early = [worker.submit("a", number, 1, at_once=True) for number in (1, -1)]
        assert all(future.done() for future in early)
        recorder.go.clear()
        waiting = [worker.submit("a", 2, 1), worker.submit("a", 3, 1, at_once=True)]
        while len(worker) > 1:
            await asyncio.sleep(0.001)
        waiting.append(worker.submit("a", 4, 1, at_once=True))  # the worker has a batch
        recorder.go.set()
        return await asyncio.gather(*early, *waiting, return_exceptions=True)

    try:
        one, failed, *rest = asyncio.run(main())
    finally:
        worker.close()
    assert [one.value, *(each.value for each in rest)] == [2, 4, 6, 8]
    assert isinstance(failed, ServeError) and failed.kind == "Backend"
    assert {number: "tilefold" in name for number, name in threads} == {
        1: False,
        -1: False,
        2: True,
        3: True,
        4: True,
    }


def test_a_request_that_is_alone_is_answered_on_the_event_loop(
    sparse: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # as with graphs on a GPU, where a query takes a millisecond
    threads: list[str] = []
    monkeypatch.setattr(Served, "is_quick", lambda self, tokens: tokens <= 8)
    served = Served(sparse, "sparse", "tiny")
    encode = served.encode
    served.encode = lambda *args: threads.append(threading.current_thread().name) or encode(*args)  # type: ignore
    with serving(Service([served])) as client:
        by_loop = client.post("/embed_sparse", {"inputs": "cats"}).json
        assert client.post("/embed_sparse", {"inputs": ["cats", "cats"]}).json == by_loop * 2
        client.post("/embed_sparse", {"inputs": "cats " * 20})
        client.post("/embed_sparse", {"inputs": ["cats", "dogs"]})
        client.post("/embed_sparse", {"inputs": [[5, 6]]})
        assert ["tilefold" in name for name in threads] == [False, False, True, True, True]
        threads.clear()
        found = asyncio.run(load(client.port, "/embed_sparse", [{"inputs": "cats"}], 16, 0.3))
    assert not found.refused and found.seconds and any("tilefold" in name for name in threads)


def test_a_batch_takes_what_queued_of_its_way_while_longest_times_inputs_stays_within_the_limit() -> (
    None
):
    batches, answers = run(
        [("a", 1, 4), ("a", 2, 3), ("a", 3, 4), ("a", 4, 1), ("a", 5, 30), ("a", 6, 2)],
    )
    assert [payloads for _, payloads in batches] == [[1, 2, 3], [4], [5], [6]]
    assert [answer.value for answer in answers] == [2, 4, 6, 8, 10, 12]
    assert all(answer.queue > 0 and answer.inference >= 0 for answer in answers)
    assert run([("a", 1, 2), ("b", 2, 2), ("a", 3, 2), ("b", 4, 2)])[0] == [
        ("a", [1, 3]),
        ("b", [2, 4]),
    ]


@pytest.mark.parametrize(
    ("requests", "batches"),
    [
        (
            [[10, 11, 12, 13], [1], [2], [3]],
            [[1, 2], [10, 11], [3], [12, 13]],
        ),  # every second one is of single inputs
        (
            [[10, 11, 12, 13], [20, 21]],
            [[10, 20], [11, 21], [12, 13]],
        ),  # the first inputs of all come first
    ],
)
def test_requests_take_turns(requests: list[list[int]], batches: list[list[int]]) -> None:
    entries = [
        ("a", each, 1, place, len(inputs) > 1)
        for inputs in requests
        for place, each in enumerate(inputs)
    ]
    assert [payloads for _, payloads in run(entries, limit=2)[0]] == batches


def test_batches_of_long_requests_are_short_while_others_send_single_inputs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [100.0]
    monkeypatch.setattr("tilefold.serve.batching.time.monotonic", lambda: now[0])
    budget = batching._TokenBudget(16384)
    budget.note_batch(True, 8000, 4.0)
    assert (budget.limit(True), budget.limit(False)) == (16384, 16384)  # nobody waits for these
    budget.note_single_input()
    budget.note_batch(False, 12, 0.05)
    budget.note_batch(True, 8000, 4.0)
    assert budget.limit(True) == 200  # 2 * 0.05 s at 2,000 tokens a second
    budget.note_batch(True, 200, 0.05)
    assert budget.limit(True) == 400  # each batch has a cost of its own, so that more fit
    budget.note_batch(True, 30, 0.05)
    assert (budget.limit(True), budget.limit(False)) == (400, 16384)  # there was no more to encode
    now[0] += 11
    assert budget.limit(True) == 16384


def test_an_input_that_fails_does_not_take_the_others_with_it() -> None:
    for bad in (-2, PANIC):
        batches, answers = run([("a", 1, 2), ("a", bad, 2), ("a", 3, 2), ("a", 4, 2)])
        assert [getattr(answer, "value", None) for answer in answers] == [2, None, 6, 8]
        assert isinstance(answers[1], ServeError)
        assert (answers[1].kind, "negative" in answers[1].message) == ("Backend", False)
        assert ("a", [bad]) in batches


def test_a_closed_worker_refuses_what_waits_and_what_comes() -> None:
    recorder = Recorder()
    worker = BatchWorker("test", recorder, 12, Metrics())

    async def main() -> tuple[Any, Any]:
        worker.start()
        first = worker.submit("a", 1, 1)
        while len(worker):
            await asyncio.sleep(0.001)
        waiting = worker.submit("a", 2, 1)
        recorder.go.set()
        await asyncio.to_thread(worker.close)
        refused(ServeError, "closing", worker.submit, "a", 3, 1)
        return await asyncio.gather(first, waiting, return_exceptions=True)

    first, waiting = asyncio.run(main())
    assert getattr(first, "value", None) == 2 or isinstance(first, ServeError)
    assert (isinstance(waiting, ServeError) and waiting.kind == "Unhealthy") or waiting.value == 4
    assert not worker.alive


def test_queries_asked_again_are_answered_from_before(sparse: Any, masked_lm: str) -> None:
    with serving(
        Service([Served(sparse, "sparse", masked_lm)], Limits(cached_queries=2)),
    ) as client:

        def kept() -> int:
            found = client.get("/metrics").raw.decode().split("tilefold_cached_count ")[-1]
            return int(float(found.split()[0]))

        first = [
            client.post("/query/embed_sparse", {"inputs": text}).json for text in ("a list", "sum")
        ]
        both = client.post("/query/embed_sparse", {"inputs": ["sum", "a list", "sum"]}).json
        assert both == [first[1][0], first[0][0], first[1][0]] and kept() == 2
        for text in ("x", "y", "a list"):  # which goes first: it was asked before the others
            client.post("/query/embed_sparse", {"inputs": text})
        client.post("/document/embed_sparse", {"inputs": "a list"})
        client.post("/document/embed_sparse", {"inputs": "a list"})
        assert kept() == 2
    refused(ValueError, "cached_queries: expected at least 0, got -1", Limits, cached_queries=-1)


def test_texts_of_one_turn_of_the_loop_are_counted_by_one_call_and_fail_alone(
    sparse: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    texts, whole, counted = ["cats", "dogs bark", "b" * 20, "bad"], TextTokens.lengths, list[int]()
    failing: BaseException = ServeError("Tokenizer", "Tokenization error: Panic")

    def spied(self: TextTokens, given: list[str], *rest: Any) -> list[int]:
        counted.append(len(given))
        if "bad" in given:
            raise failing
        return whole(self, given, *rest)

    async def main(wanted: list[str]) -> list[Any]:
        asked.start()
        return await asyncio.gather(
            *(asked.encode("sparse", [each], EncodeOptions("query")) for each in wanted),
            return_exceptions=True,
        )

    asked = Service([Served(sparse, "sparse", "tiny")])
    monkeypatch.setattr(TextTokens, "lengths", spied)
    try:
        together, (*others, failed) = asyncio.run(main(texts[:3])), asyncio.run(main(texts))
        alone = [asyncio.run(main([text]))[0].tokens for text in texts[:3]]
        failing = Panic()
        after_panic = asyncio.run(main(texts))
    finally:
        asked.close()
    assert counted[:2] == [3, 4] and isinstance(failed, ServeError)
    assert [each.tokens for each in together] == [each.tokens for each in others] == alone
    assert isinstance(after_panic.pop(), Panic) and [each.tokens for each in after_panic] == alone


def test_limits_that_make_no_sense_are_refused() -> None:
    for name in ("max_concurrent_requests", "payload_limit", "max_connections"):
        refused(ValueError, f"{name}: expected at least 1, got 0", Limits, **{name: 0})
    refused(ValueError, "body_seconds: expected a finite number above 0", Limits, body_seconds=0)
    assert Limits(grace_seconds=0).grace_seconds == 0
    wrong = "grace_seconds: expected a finite number of at least 0, got"
    for seconds in (-1, float("inf"), float("nan")):
        refused(ValueError, wrong, Limits, grace_seconds=seconds)
    refused(
        ValueError,
        "at most max_concurrent",
        Limits,
        max_concurrent_requests=8,
        max_client_batch_size=9,
    )


def test_as_many_characters_are_taken_as_any_model_reads(client: Client, collection: Any) -> None:
    assert [
        len(tokens) for tokens in client.post("/tokenize", {"inputs": ["." * 8000] * 2}).json
    ] == [8002] * 2
    assert len(client.post("/decode", {"ids": [[7] * 8000] * 2}).json) == 2
    with serving(
        Service([], searchable=Searchable("words", r.BM25Index.build(collection.contents()))),
    ) as other:
        replies = [
            other.post("/v1/words/search", {"query": "csv " * count}) for count in (32_000, 32_001)
        ]
        assert [reply.status for reply in replies] == [200, 422]
        assert (
            replies[1]
            .json["error"]
            .endswith("`query` must have less than 128000 characters. Given: 128004")
        )


@pytest.mark.parametrize("direction", ["left", "right"])
def test_nothing_beyond_the_limit_of_a_text_is_read(
    client: Client,
    direction: str,
    monkeypatch: Any,
) -> None:
    lengths, read = TextTokens.lengths, []

    def spied(self: TextTokens, texts: list[str], *given: Any) -> list[int]:
        read.extend(texts)
        return lengths(self, texts, *given)

    monkeypatch.setattr(TextTokens, "lengths", spied)
    text = "csv files " * 100_000 + "dates " * 100_000
    body = {"truncation_direction": direction}
    whole = client.post("/embed_sparse", body | {"inputs": text})
    assert whole.status == 200
    assert read == [text[:MOST] if direction == "right" else text[-MOST:]]
    assert whole.json == client.post("/embed_sparse", body | {"inputs": read[0]}).json


class Gate:
    """Stands before a method of ``TextTokens``: counts who comes, and lets nobody pass until it is
    opened.
    """

    def __init__(self, function: Any) -> None:
        self.function, self.open = function, threading.Event()
        self.came: list[tuple[Any, ...]] = []

    def wait(self, *given: Any, **named: Any) -> Any:
        self.came.append(given)
        self.open.wait(20)
        return self.function(*given, **named)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Gate]:
    made = Gate(getattr(TextTokens, request.param))
    monkeypatch.setattr(
        TextTokens,
        request.param,
        lambda *given, **named: made.wait(*given, **named),  # noqa: PLW0108
    )
    yield made
    made.open.set()


@pytest.mark.parametrize("gate", ["tokenize"], indirect=True)
def test_tokenizing_holds_nobody_else_up(sparse: Any, gate: Gate) -> None:
    with serving(service(sparse)) as client, ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(client.post, "/tokenize", {"inputs": "csv"}) for _ in range(4)]
        wait_until(lambda: len(gate.came) == 2)  # as many as there are threads for it
        assert client.post("/embed_sparse", {"inputs": "csv files"}).status == 200
        gate.open.set()
        assert [each.result().status for each in asked] == [200] * 4


@pytest.mark.parametrize("gate", ["lengths"], indirect=True)
def test_work_for_a_client_that_has_gone_ends_with_its_next_portion(
    sparse: Any,
    gate: Gate,
) -> None:
    with serving(service(sparse)) as client:
        with client.connect() as opened:
            opened.sendall(posted({"inputs": ["." * 9000] * 32}))
            wait_until(lambda: len(gate.came) == 1)
        wait_until(lambda: inputs_in_flight(client) == 0)
        gate.open.set()
        assert client.post("/embed_sparse", {"inputs": "csv files"}).status == 200
        assert [len(texts) for _, texts, *_ in gate.came] == [1, 1]


def test_a_single_query_is_encoded_before_batches_that_came_first(
    sparse: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    encode, batches = Served.encode, []

    def spied(self: Served, way: Any, inputs: list[str]) -> Any:
        batches.append(list(inputs))
        return encode(self, way, inputs)

    monkeypatch.setattr(Served, "encode", spied)
    documents = [f"csv {number}" for number in range(32)]
    with serving(service(sparse, max_batch_tokens=64)) as client, ThreadPoolExecutor(5) as pool:
        with hold(client, sparse, inputs=1):
            for _ in range(4):
                pool.submit(client.post, "/embed_sparse", {"inputs": documents})
            wait_until(lambda: "te_queue_size 128" in client.get("/metrics").raw.decode())
            pool.submit(client.post, "/embed_sparse", {"inputs": "dates"})
            wait_until(lambda: "te_queue_size 129" in client.get("/metrics").raw.decode())
        pool.shutdown()
    assert (
        batches.index(["dates"]) <= 2 and len(batches) > 8
    )  # the held one, one of documents, and then the query


def test_load_counts_answers_and_their_times(client: Client) -> None:
    bodies = [{"inputs": text, "top_k": 4} for text in ("csv files", "dates")]
    found = asyncio.run(load(client.port, "/embed_sparse", bodies, clients=4, seconds=0.5))
    assert (len(found.seconds) > 8, found.refused) == (True, 0)
    shown = row("tilefold", 4, 1, found)
    assert shown["requests_s"] == round(len(found.seconds) / found.wall, 1)
    assert 0 < shown["p50_ms"] <= shown["p99_ms"] < 1000 * found.wall
    refused = asyncio.run(
        load(client.port, "/embed_sparse", [{"inputs": []}], clients=1, seconds=0.2),
    )
    assert (refused.seconds, refused.refused > 0) == ([], True)
    with pytest.raises(ValueError, match="at most 1,000"):
        asyncio.run(load(client.port, "/embed_sparse", bodies, clients=5000, seconds=1))


def test_bad_input_gets_the_codes_that_the_soak_expects(sparse: Any, masked_lm: str) -> None:
    limits = Limits(header_seconds=0.5, body_seconds=0.5)  # some wait for them
    with serving(Service([Served(sparse, "sparse", masked_lm)], limits)) as hasty:
        every = serve_bad.BAD | serve_bad.SLOW

        async def send() -> list[Any]:
            return await asyncio.gather(
                *(serve_bad.send(hasty.port, sent) for sent, _ in every.values()),
            )

        for (name, (_, codes)), code in zip(every.items(), asyncio.run(send()), strict=True):
            assert code in codes, name
        seen: Counter[str] = Counter()
        until = time.monotonic() + 0.1
        asyncio.run(serve_bad.drip(hasty.port, until, seen))
        asyncio.run(serve_bad.unread(hasty.port, time.monotonic() + 0.1, seen, wait=2))
        assert seen == {"byte by byte: as expected": 1, "unread: as expected": 1}


def test_the_soak_tells_answers_from_those_of_other_texts(client: Client) -> None:
    seen: Counter[str] = Counter()
    texts = ["csv files", "dates", "queues of threads", "hash tables"]
    vectors = asyncio.run(serve_soak.alone(client.port, texts))
    asyncio.run(serve_soak.good(client.port, texts, vectors, time.monotonic() + 0.5, seen))
    assert set(seen) == {"answered"}
    shifted = [{index + 1: value for index, value in vector.items()} for vector in vectors]
    asyncio.run(serve_soak.good(client.port, texts, shifted, time.monotonic() + 0.1, seen))
    assert set(seen) == {"answered", "LOST: another vector"}
    asyncio.run(serve_bad.leave(client.port))
    asyncio.run(serve_bad.flood(client.port, 20, seen))
    assert seen["idle connection: kept"] == 20
    assert serve_soak.summed(seen)["connections_kept"] == 20


def test_memory_that_grows_from_the_second_third_to_the_last_is_seen() -> None:
    seen: Counter[str] = Counter(answered=6)
    watched = serve_soak.Watched(
        [(2.0 * step, (100 + step // 30) * 2**20, seen) for step in range(91)],
    )
    assert watched.medians() == (101, 102)
    assert [(row["minute"], row["memory_mib"], row["answered"]) for row in watched.minutes()] == [
        (1, 101.0, 6),
        (2, 102.0, 0),
        (3, 103.0, 0),
    ]
