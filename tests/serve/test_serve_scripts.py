"""The scripts that load a server: what they count, on a small one."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import Any

import pytest

from benchmarks import serve_soak
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


def test_bad_input_gets_the_codes_that_the_soak_expects(client: Client, sparse: Any, masked_lm: str) -> None:
    limits = Limits(header_seconds=0.5, body_seconds=0.5)  # some wait for them
    with serving(Service([Served(sparse, "sparse", masked_lm)], limits)) as hasty:
        for name, (sent, codes) in serve_soak.BAD.items():
            assert asyncio.run(serve_soak._sent(hasty.port, sent)) in codes, name
    seen: Counter[str] = Counter()
    asyncio.run(serve_soak.good(client.port, ["csv", "dates", "queues", "hash"], time.monotonic() + 0.5, seen))
    assert set(seen) == {"answered"}
    asyncio.run(serve_soak._leave(client.port))
    asyncio.run(serve_soak.flood(client.port, 20, seen))
    assert seen["idle connection: kept"] == 20
