"""Answers say how many inputs were cut, counted as the model has them tokenized."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from sentence_transformers import MultiVectorEncoder
from sentence_transformers.base.modules import Transformer
from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask

from tests.serve.running import Client, serving
from tilefold.serve.models import Served
from tilefold.serve.service import Service


@pytest.fixture(scope="module")
def client(two_sided: Any, masked_lm: str) -> Iterator[Client]:
    """An inference-free sparse model that reads 64 tokens, and a late one that expands queries to 16."""
    transformer = Transformer(masked_lm, query_expansion={"strategy": "fixed", "length": 16}, document_length=32)
    late = MultiVectorEncoder(modules=[transformer, MultiVectorMask()], device="cpu")
    with serving(Service([Served(two_sided, "sparse", "two-sided"), Served(late, "multi-vector", "late")])) as running:
        yield running


def cut(client: Client, path: str, body: Any) -> str:
    reply = client.post(path, body)
    assert reply.status == 200, reply.raw
    return reply.headers["x-truncated-inputs"]


def test_inputs_beyond_the_limit_of_their_side_are_counted(client: Client) -> None:
    texts = [" ".join("a" * count) for count in (1, 62, 63, 64, 65, 90)]  # each a token
    assert cut(client, "/document/embed_sparse", {"inputs": texts}) == "4", "two special tokens are among the 64"
    assert cut(client, "/query/embed_sparse", {"inputs": texts}) == "2", "queries have no special tokens"
    assert cut(client, "/document/embed_sparse", {"inputs": texts[:2]}) == "0"
    assert cut(client, "/document/embed_sparse", {"inputs": "a " * 60 + " " * 20_000}) == "1"
    assert cut(client, "/document/embed_sparse", {"inputs": [list(range(10, 75)), list(range(10, 74))]}) == "1"


def test_queries_that_are_expanded_are_cut_where_the_expansion_ends(client: Client) -> None:
    query, texts = " ".join("a" * 15), [" ".join("a" * 30), " ".join("a" * 31)]
    assert cut(client, "/rerank", {"query": query, "texts": texts}) == "2"
    assert client.post("/query/embed_all", {"inputs": query, "truncate": False}).status == 422
    assert client.get("/query/info").json["max_input_length"] == 64  # of the first model


def test_what_encodes_nothing_says_nothing(client: Client) -> None:
    for reply in (client.get("/info"), client.get("/health"), client.post("/tokenize", {"inputs": "a " * 90})):
        assert reply.status == 200 and "x-truncated-inputs" not in reply.headers
