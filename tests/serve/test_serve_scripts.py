"""The scripts that load a server: what they count, on a small one."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import Any

import pytest

from benchmarks import serve_bad, serve_soak
from benchmarks.serve_clients import load
from benchmarks.serve_load import row
from tests.serve.running import Client, serving
from tilefold.serve.models import Served
from tilefold.serve.service import Service
from tilefold.serve.settings import Limits


def test_load_counts_answers_and_their_times(client: Client) -> None:
    bodies = [{"inputs": text, "top_k": 4} for text in ("csv files", "dates")]
    found = asyncio.run(load(client.port, "/embed_sparse", bodies, clients=4, seconds=0.5))
    assert (len(found.seconds) > 8, found.refused) == (True, 0)
    shown = row("tilefold", 4, 1, found)
    assert shown["requests_s"] == round(len(found.seconds) / found.wall, 1)
    assert 0 < shown["p50_ms"] <= shown["p99_ms"] < 1000 * found.wall
    refused = asyncio.run(load(client.port, "/embed_sparse", [{"inputs": []}], clients=1, seconds=0.2))
    assert (refused.seconds, refused.refused > 0) == ([], True)
    with pytest.raises(ValueError, match="at most 1,000"):
        asyncio.run(load(client.port, "/embed_sparse", bodies, clients=5000, seconds=1))


def test_bad_input_gets_the_codes_that_the_soak_expects(sparse: Any, masked_lm: str) -> None:
    limits = Limits(header_seconds=0.5, body_seconds=0.5)  # some wait for them
    with serving(Service([Served(sparse, "sparse", masked_lm)], limits)) as hasty:
        every = serve_bad.BAD | serve_bad.SLOW

        async def send() -> list[Any]:
            return await asyncio.gather(*(serve_bad.send(hasty.port, sent) for sent, _ in every.values()))

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
    watched = serve_soak.Watched([(2.0 * step, (100 + step // 30) * 2**20, seen) for step in range(91)])
    assert watched.medians() == (101, 102)
    assert [(row["minute"], row["memory_mib"], row["answered"]) for row in watched.minutes()] == [
        (1, 101.0, 6), (2, 102.0, 0), (3, 103.0, 0)
    ]  # fmt: skip
