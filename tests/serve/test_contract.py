"""Tests of the requests and answers that text-embeddings-inference documents."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from tests.serve.running import Client, Reply, serving
from tilefold._internal.precision import gpu_has_bf16
from tilefold.integrations.sentence_transformers import encode_sparse
from tilefold.ops import maxsim
from tilefold.serve.models import Served, TextTokens
from tilefold.serve.service import Service

TEXTS = ["read csv files", "write json text, with examples", "dates"]


def similar(source: str, *sentences: str, **parameters: Any) -> dict[str, Any]:
    """Return the body of a request of ``/similarity``."""
    return {
        "inputs": {"source_sentence": source, "sentences": sentences},
        "parameters": parameters,
    }


def model_entries(model: Any, texts: list[str], task: str = "document") -> list[dict[int, float]]:
    """Return the weights by index that a sparse model computes for each text."""
    matrix = encode_sparse(model, texts, task=task).to_dense()
    return [{int(index): float(row[index]) for index in row.nonzero().flatten()} for row in matrix]


def weights_by_index(entries: list[dict[str, Any]]) -> dict[int, float]:
    """Return the weights by index of a row of a reply."""
    return {entry["index"]: entry["value"] for entry in entries}


@pytest.mark.parametrize(
    "inputs",
    [
        pytest.param(TEXTS[0], id="text"),
        pytest.param(TEXTS[:1], id="list of one text"),
        pytest.param(TEXTS, id="list of texts"),
    ],
)
def test_embed_sparse_answers_the_entries_of_each_input_in_index_order(
    client: Client,
    sparse: Any,
    inputs: str | list[str],
) -> None:
    reply = client.post("/embed_sparse", {"inputs": inputs})
    assert reply.status == 200
    assert reply.headers["content-type"] == "application/json"
    texts = [inputs] if isinstance(inputs, str) else inputs
    for row, expected in zip(reply.json, model_entries(sparse, texts), strict=True):
        assert [set(entry) for entry in row] == [{"index", "value"}] * len(expected)
        assert [entry["index"] for entry in row] == sorted(expected)
        # the server's batches differ from the model's, and with them the rounding in bf16
        assert weights_by_index(row) == pytest.approx(expected, rel=2e-2)
        assert all(np.float32(entry["value"]) > 0 for entry in row)


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param(
            {"truncate": None, "truncation_direction": "right", "prompt_name": None},
            id="default values",
        ),
        pytest.param(
            {"truncate": False, "truncation_direction": "Left"},
            id="truncation of a short text",
        ),
        pytest.param(
            {"normalize": True, "parameters": {}, "model": "any"},
            id="fields of other routes",
        ),
    ],
)
def test_documented_fields_of_embed_sparse_are_accepted_and_unknown_ones_ignored(
    client: Client,
    fields: dict[str, Any],
) -> None:
    expected = client.post("/embed_sparse", {"inputs": TEXTS[0]}).json
    assert client.post("/embed_sparse", {"inputs": TEXTS[0]} | fields).json == expected


@pytest.mark.parametrize(
    "content_type",
    [
        'application/json; charset="UTF-8"',
        "Application/JSON;charset=utf-8; profile=a",
        "application/json;v=1",
        "application/vnd.api+json",
    ],
)
def test_content_types_of_json_are_accepted(client: Client, content_type: str) -> None:
    expected = client.post("/embed_sparse", {"inputs": TEXTS[0]}).json
    body = json.dumps({"inputs": TEXTS[0]}).encode()
    reply = client.request("POST", "/embed_sparse", body, content_type=content_type)
    assert reply.json == expected


def test_headers_have_the_tokens_and_times_of_a_request(client: Client) -> None:
    headers = client.post("/embed_sparse", {"inputs": TEXTS[:2]}).headers
    n_tokens = sum(len(tokens) for tokens in client.post("/tokenize", {"inputs": TEXTS[:2]}).json)
    assert headers["x-compute-tokens"] == str(n_tokens)
    assert headers["x-compute-type"] == ("gpu" if torch.cuda.is_available() else "cpu")
    for part in ("compute", "total", "tokenization", "queue", "inference"):
        assert int(headers[f"x-{part}-time"]) >= 0


@pytest.mark.parametrize(
    ("path", "body", "characters_of_queries"),
    [
        pytest.param("/embed_sparse", {"inputs": TEXTS}, 0, id="embed_sparse"),
        pytest.param(
            "/rerank",
            {"query": "csv", "texts": TEXTS},
            len("csv") * len(TEXTS),
            id="rerank counts the query of each pair",
        ),
        pytest.param(
            "/score",
            {"queries": ["a", "bc", "d"], "documents": TEXTS},
            len("abcd"),
            id="score counts each query",
        ),
        pytest.param("/similarity", similar(*TEXTS), 0, id="similarity"),
    ],
)
def test_headers_have_the_characters_of_a_request(
    client: Client,
    path: str,
    body: dict[str, Any],
    characters_of_queries: int,
) -> None:
    headers = client.post(path, body).headers
    characters_of_texts = sum(len(text) for text in TEXTS)
    assert int(headers["x-compute-characters"]) == characters_of_queries + characters_of_texts


def embed_first_text(client: Client, **fields: Any) -> Any:
    """Return the row of the first text for a request with these fields."""
    return client.post("/embed_sparse", {"inputs": TEXTS[0]} | fields).json[0]


def heaviest_entries(entries: list[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """Return the heaviest entries of a row in index order."""
    heaviest = sorted(entries, key=lambda entry: -entry["value"])[:count]
    return sorted(heaviest, key=lambda entry: entry["index"])


def test_top_k_selects_the_heaviest_entries(client: Client) -> None:
    expected = heaviest_entries(embed_first_text(client), 5)
    assert embed_first_text(client, top_k=5) == expected


def test_threshold_selects_entries_of_larger_weight(client: Client) -> None:
    entries = embed_first_text(client)
    threshold = heaviest_entries(entries, 5)[0]["value"]
    expected = [entry for entry in entries if entry["value"] > threshold]
    assert embed_first_text(client, threshold=threshold) == expected
    assert embed_first_text(client, threshold=1e300) == []


def test_format_selects_arrays_or_tokens(client: Client) -> None:
    entries = embed_first_text(client, top_k=5, tokens=True)
    assert embed_first_text(client, top_k=5, format="arrays") == {
        "indices": [entry["index"] for entry in entries],
        "values": [entry["value"] for entry in entries],
    }
    terms = embed_first_text(client, top_k=5, format="tokens")
    assert terms == {entry["token"]: entry["value"] for entry in entries}
    assert len(terms) == 5


RERANK_PATHS = pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
RERANK_BODY = {"query": "read csv", "texts": TEXTS}


@RERANK_PATHS
def test_rerank_scores_by_mean_maxsim_in_falling_order(
    client: Client,
    late: Any,
    path: str,
) -> None:
    (query,) = late.encode_query(["read csv"])
    expected = {}
    for position, document in enumerate(late.encode_document(TEXTS)):
        score = maxsim(query[None].float(), document[None].float(), reduction="mean")
        expected[position] = float(score)
    reply = client.post(path, RERANK_BODY | {"raw_scores": False, "return_text": True})
    assert reply.status == 200
    scores = [entry["score"] for entry in reply.json]
    assert scores == sorted(scores, reverse=True)
    scores_by_index = {entry["index"]: entry["score"] for entry in reply.json}
    assert scores_by_index == pytest.approx(expected, abs=2e-2)
    assert all(entry["text"] == TEXTS[entry["index"]] for entry in reply.json)


@RERANK_PATHS
def test_rerank_leaves_out_texts_by_default(client: Client, path: str) -> None:
    assert "text" not in client.post(path, RERANK_BODY).json[0]


@RERANK_PATHS
def test_raw_scores_of_rerank_are_sums_over_the_tokens_of_the_query(
    client: Client,
    late: Any,
    path: str,
) -> None:
    (query,) = late.encode_query(["read csv"])
    n_query_tokens = query.size(0)
    mean = client.post(path, RERANK_BODY).json[0]["score"]
    total = client.post(path, RERANK_BODY | {"raw_scores": True}).json[0]["score"]
    assert total == pytest.approx(mean * n_query_tokens, rel=1e-4)


@RERANK_PATHS
def test_rerank_answers_documents_in_the_form_of_cohere(client: Client, path: str) -> None:
    expected = client.post(path, RERANK_BODY).json[:2]
    body = {
        "model": "m",
        "query": "read csv",
        "documents": [TEXTS[0], {"text": TEXTS[1]}, TEXTS[2]],
        "top_n": 2,
    }
    results = client.post(path, body).json["results"]
    assert [set(result) for result in results] == [{"index", "relevance_score", "document"}] * 2
    assert [result["index"] for result in results] == [entry["index"] for entry in expected]
    scores = [result["relevance_score"] for result in results]
    assert scores == pytest.approx([entry["score"] for entry in expected])
    for result in results:
        assert result["document"] == {"text": TEXTS[result["index"]]}


@pytest.mark.parametrize(
    ("query_field", "document_field"),
    [("queries", "documents"), ("text_1", "text_2"), ("data_1", "data_2")],
)
def test_score_answers_in_the_order_of_the_request(
    client: Client,
    query_field: str,
    document_field: str,
) -> None:
    ranking = client.post("/rerank", RERANK_BODY).json
    scores = {entry["index"]: entry["score"] for entry in ranking}
    body = {query_field: "read csv", document_field: TEXTS}
    data = client.post("/score", body).json["data"]
    assert [entry["index"] for entry in data] == [0, 1, 2]
    expected = [scores[position] for position in range(3)]
    assert [entry["score"] for entry in data] == pytest.approx(expected, rel=1e-4)


def test_score_of_several_queries_is_of_pairs(client: Client) -> None:
    single = client.post("/score", {"queries": "read csv", "documents": TEXTS}).json["data"]
    body = {"queries": ["read csv", "dates"], "documents": TEXTS[:2]}
    pairs = client.post("/score", body).json["data"]
    assert pairs[0]["score"] == pytest.approx(single[0]["score"], abs=2e-2)


def test_tokenize_describes_tokens(client: Client) -> None:
    (tokens,) = client.post("/tokenize", {"inputs": "Read files"}).json
    assert tokens[0] == {
        "id": tokens[0]["id"],
        "text": "[CLS]",
        "special": True,
        "start": None,
        "stop": None,
    }
    tokens_of_text = [token for token in tokens if not token["special"]]
    assert "".join(token["text"] for token in tokens_of_text) == "Readfiles"
    assert tokens_of_text[0]["start"] == 0
    body = {"inputs": ["Read files"], "add_special_tokens": False}
    assert client.post("/tokenize", body).json == [tokens_of_text]


def test_decode_is_the_inverse_of_tokenize(client: Client) -> None:
    (tokens,) = client.post("/tokenize", {"inputs": "Read files"}).json
    ids = [token["id"] for token in tokens]
    assert client.post("/decode", {"ids": ids}).json == ["read files"]
    assert client.post("/decode", {"ids": [ids]}).json == ["read files"]
    (text,) = client.post("/decode", {"ids": ids, "skip_special_tokens": False}).json
    assert text.startswith("[CLS]")


def test_info_has_the_documented_fields(client: Client) -> None:
    info = client.get("/info").json
    documented_fields = {
        "model_id",
        "model_sha",
        "model_dtype",
        "model_type",
        "max_concurrent_requests",
        "max_input_length",
        "max_batch_tokens",
        "max_batch_requests",
        "max_client_batch_size",
        "auto_truncate",
        "tokenization_workers",
        "version",
    }
    assert documented_fields <= set(info)
    assert info["model_id"] == "tiny"
    assert info["model_type"] == {"embedding": {"pooling": "splade"}}
    assert info["max_input_length"] == 64
    assert info["max_client_batch_size"] == 32


def test_info_has_the_precision_of_each_model(client: Client) -> None:
    precision_of_sparse_models = "bf16" if gpu_has_bf16() else "fp32"
    assert client.get("/info").json["precision"] == {
        "sparse": precision_of_sparse_models,
        "multi-vector": "fp32",
    }


@pytest.mark.parametrize("path", ["/health", "/ping"])
def test_health_checks_have_an_empty_answer(client: Client, path: str) -> None:
    reply = client.get(path)
    assert reply.status == 200
    assert reply.raw == b""


def test_a_server_of_a_late_interaction_model_alone_is_a_reranker(late: Any) -> None:
    with serving(Service([Served(late, "multi-vector", "colbert")])) as client:
        model_type = client.get("/info").json["model_type"]
        refusal = client.post("/similarity", similar("a", "b"))
        vertex = client.post("/vertex", {"instances": [{"query": "a", "texts": ["b"]}]})
    labels = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    assert model_type == {"reranker": labels}
    assert refusal.status == 424
    assert "POST /rerank" in refusal.json["error"]
    assert vertex.status == 200


def assert_error(reply: Reply, status: int, error_type: str, message: str) -> None:
    """Check the status code, type and text of an error."""
    assert reply.status == status
    assert set(reply.json) == {"error", "error_type"}
    assert reply.json["error_type"] == error_type
    assert message in reply.json["error"]


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        pytest.param(
            "/embed_sparse",
            {"inputs": []},
            "`inputs` cannot be empty",
            id="no inputs",
        ),
        pytest.param(
            "/embed_sparse",
            {"inputs": ""},
            "Input validation error: `inputs` cannot be empty",
            id="empty text",
        ),
        pytest.param(
            "/embed_sparse",
            {"inputs": [[7], []]},
            "Input validation error: `inputs` cannot be empty",
            id="empty list of token ids",
        ),
        pytest.param(
            "/embed_all",
            {"inputs": ["a", ""]},
            "Input validation error: `inputs` cannot be empty",
            id="empty text of several, embed_all",
        ),
        pytest.param(
            "/tokenize",
            {"inputs": ["a", ""]},
            "Input validation error: `inputs` cannot be empty",
            id="empty text of several, tokenize",
        ),
        pytest.param(
            "/decode",
            {"ids": [[7], []]},
            "Input validation error: `input_ids` cannot be empty",
            id="empty list of token ids to decode",
        ),
        pytest.param(
            "/rerank",
            {"query": "", "texts": ["a"]},
            "Input validation error: `inputs` cannot be empty",
            id="empty query",
        ),
        pytest.param(
            "/rerank",
            {"query": "a", "texts": ["a", ""]},
            "Input validation error: `inputs` cannot be empty",
            id="empty text to rerank",
        ),
        pytest.param(
            "/rerank",
            {"query": "a", "texts": []},
            "`texts` cannot be empty",
            id="no texts to rerank",
        ),
        pytest.param(
            "/score",
            {"queries": "a", "documents": ""},
            "Input validation error: `inputs` cannot be empty",
            id="empty document",
        ),
        pytest.param(
            "/similarity",
            similar("a"),
            "`inputs.sentences` cannot be empty",
            id="no sentences",
        ),
        pytest.param(
            "/similarity",
            similar("", "b"),
            "`inputs` cannot be empty",
            id="empty source sentence",
        ),
        pytest.param(
            "/vertex",
            {"instances": []},
            "`instances` cannot be empty",
            id="no instances",
        ),
        pytest.param(
            "/vertex",
            {"instances": [{"inputs": "a"}, {"inputs": ""}]},
            "`inputs` cannot be empty",
            id="instance of an empty text",
        ),
        pytest.param(
            "/vertex",
            {"instances": [{"query": "a", "texts": []}]},
            "`texts` cannot be empty",
            id="instance without texts",
        ),
    ],
)
def test_empty_inputs_are_refused(
    client: Client,
    path: str,
    body: Any,
    message: str,
) -> None:
    assert_error(client.post(path, body), 400, "Empty", message)


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        pytest.param(
            "/embed_sparse",
            {"inputs": ["a"] * 33},
            "batch size 33 > maximum allowed batch size 32",
            id="too many inputs",
        ),
        pytest.param(
            "/embed_sparse",
            {"inputs": "a " * 70, "truncate": False},
            "`inputs` must have less than 64 tokens. Given: 72",
            id="text of too many tokens",
        ),
        pytest.param(
            "/embed_sparse",
            {"inputs": [[7] * 100], "truncate": False},
            "`inputs` must have less than 64 tokens. Given: ",
            id="too many token ids",
        ),
        pytest.param(
            "/embed_sparse",
            {"inputs": ["a", "." * 16_001], "truncate": False},
            "less than 16000 characters. Given: 16001",
            id="text of too many characters",
        ),
        pytest.param(
            "/embed_sparse",
            {"inputs": [[7] * 16_001], "truncate": False},
            "16000 token ids. Given: 16001",
            id="more token ids than are checked",
        ),
        pytest.param(
            "/tokenize",
            {"inputs": "." * 1_900_000},
            "16000 characters. Given: 1900000",
            id="text of too many characters to tokenize",
        ),
        pytest.param(
            "/tokenize",
            {"inputs": ["." * 8000] * 3},
            "16000 characters in all. Given: 24000",
            id="too many characters to tokenize in all",
        ),
        pytest.param(
            "/tokenize",
            {"inputs": "a", "offsets": "words"},
            "`offsets`: ",
            id="unknown unit of offsets",
        ),
        pytest.param(
            "/decode",
            {"ids": [[7] * 8000] * 3},
            "16000 token ids in all. Given: 24000",
            id="too many token ids to decode in all",
        ),
        pytest.param(
            "/rerank",
            {"query": "." * 16_001, "texts": ["a"], "truncate": False},
            "8000 characters. Given: 16001",
            id="query of too many characters",
        ),
        pytest.param(
            "/embed_sparse",
            {"inputs": "a", "prompt_name": "no"},
            "`prompt_name` expected one of",
            id="unknown prompt",
        ),
        pytest.param(
            "/embed_sparse",
            {"inputs": 5},
            "`inputs`: expected a text, a list of texts",
            id="number instead of a text",
        ),
        pytest.param(
            "/embed_sparse",
            {"inputs": "a", "truncate": "yes"},
            "`truncate`: ",
            id="truncate that is no truth value",
        ),
        pytest.param(
            "/embed_sparse",
            {"inputs": "a", "top_k": 0},
            "`top_k`: ",
            id="top_k of 0",
        ),
        pytest.param(
            "/embed_sparse",
            {"input": "a"},
            "`inputs`: Field required",
            id="no field inputs",
        ),
        pytest.param(
            "/rerank",
            {"query": "a"},
            "`texts` or `documents`: expected one of them",
            id="neither texts nor documents",
        ),
        pytest.param(
            "/score",
            {"queries": ["a", "b"], "documents": TEXTS},
            "",
            id="queries and documents of different numbers",
        ),
        pytest.param(
            "/similarity",
            similar("a", *"b" * 32),
            "batch size 33 > maximum allowed batch size 32",
            id="too many sentences",
        ),
        pytest.param(
            "/similarity",
            similar("a", "b", prompt_name="no"),
            "`prompt_name` expected one of",
            id="unknown prompt of similarity",
        ),
        pytest.param(
            "/similarity",
            similar("." * 16_001, "b", truncate=False),
            "16000 characters. Given: 16001",
            id="source sentence of too many characters",
        ),
        pytest.param(
            "/similarity",
            {"inputs": ["a", "b"]},
            "`inputs`: ",
            id="inputs of similarity as a list",
        ),
        pytest.param(
            "/similarity",
            {"inputs": {"source_sentence": "a"}},
            "`inputs.sentences`: Field required",
            id="no field sentences",
        ),
        pytest.param(
            "/vertex",
            {"instances": [{"inputs": "a"}] * 33},
            "batch size 33 > maximum allowed",
            id="too many instances",
        ),
        pytest.param(
            "/vertex",
            {"instances": [{"inputs": "a"}, {"input": "b"}]},
            "`instances.1.inputs`: Field required",
            id="instance without inputs",
        ),
        pytest.param(
            "/vertex",
            {"instances": [3]},
            "`instances.0`: ",
            id="instance that is a number",
        ),
    ],
)
def test_invalid_requests_are_refused(
    client: Client,
    path: str,
    body: Any,
    message: str,
) -> None:
    assert_error(client.post(path, body), 422, "Validation", message)


def test_token_ids_that_the_model_lacks_are_refused(client: Client) -> None:
    reply = client.post("/embed_sparse", {"inputs": [[7, 10**6]]})
    assert_error(reply, 422, "Tokenizer", "token ids: expected numbers from 0 to")


def test_embed_is_refused_without_a_dense_model(client: Client) -> None:
    reply = client.post("/embed", {"inputs": "a"})
    assert_error(reply, 424, "Backend", "POST /embed_sparse")


def test_predict_is_refused_and_counted(client: Client) -> None:
    reply = client.post("/predict", {"inputs": "a"})
    assert_error(reply, 424, "Backend", "model is not a classifier model")
    assert 'te_request_failure{err="model_type"}' in client.metrics_text()


def test_an_unknown_route_is_refused(client: Client) -> None:
    assert_error(client.post("/nowhere", {}), 404, "Validation", "GET /docs lists all routes")


@pytest.mark.parametrize(
    ("path", "field", "thread_name"),
    [
        pytest.param("/embed_sparse", "inputs", "tilefold-helper", id="embed_sparse"),
        pytest.param("/decode", "ids", "tilefold-tokenizer", id="decode"),
    ],
)
def test_token_ids_are_checked_outside_of_the_event_loop_once_their_number_is_allowed(
    client: Client,
    monkeypatch: Any,
    path: str,
    field: str,
    thread_name: str,
) -> None:
    check_ids = TextTokens.check_ids
    threads: list[str] = []

    def record_thread(tokens: TextTokens, ids: Any) -> None:
        threads.append(threading.current_thread().name)
        check_ids(tokens, ids)

    monkeypatch.setattr(TextTokens, "check_ids", record_thread)
    too_many = client.post(path, {field: [[7]] * 33})
    assert too_many.json["error"].startswith("batch size 33 >")
    assert threads == []  # half a million lists would block the event loop for seconds
    assert client.post(path, {field: [[7]] * 32}).status == 200
    assert len(threads) == 32
    assert all(thread.startswith(thread_name) for thread in threads)


@pytest.mark.parametrize("path", ["/v1/embeddings", "/embeddings", "/query/v1/embeddings"])
def test_the_openai_route_of_a_sparse_model_is_refused_in_its_form_of_errors(
    client: Client,
    path: str,
) -> None:
    reply = client.post(path, {"input": "a"})
    assert reply.status == 424
    assert reply.json["code"] == 424
    assert reply.json["type"] == "Backend"
    assert "/embed_sparse" in reply.json["message"]


@pytest.mark.parametrize(
    ("direction", "repeated_word"),
    [pytest.param("right", "csv ", id="right"), pytest.param("left", "sockets ", id="left")],
)
def test_long_texts_are_truncated_at_the_end_that_the_request_names(
    client: Client,
    sparse: Any,
    direction: str,
    repeated_word: str,
) -> None:
    text = "csv " * 80 + "sockets " * 80  # the model reads 64 tokens
    body = {"inputs": text, "truncation_direction": direction}
    (truncated,) = client.post("/embed_sparse", body).json
    (expected,) = client.post("/embed_sparse", {"inputs": repeated_word * 80}).json
    assert [entry["index"] for entry in truncated] == [entry["index"] for entry in expected]
    assert sparse.tokenizer.truncation_side == "right", "the model is unchanged"


@pytest.mark.parametrize(
    ("direction", "truncated_ids"),
    [
        pytest.param("right", list(range(10, 74)), id="right"),
        pytest.param("left", list(range(46, 110)), id="left"),
    ],
)
def test_long_token_ids_are_truncated_at_the_end_that_the_request_names(
    client: Client,
    direction: str,
    truncated_ids: list[int],
) -> None:
    body = {"inputs": list(range(10, 110)), "truncation_direction": direction}
    reply = client.post("/embed_sparse", body)
    assert reply.headers["x-compute-tokens"] == "64"
    assert reply.json == client.post("/embed_sparse", {"inputs": truncated_ids}).json


@pytest.fixture(scope="module")
def two_sided_client(two_sided: Any) -> Iterator[Client]:
    """A server of an inference-free model that encodes queries by default."""
    model = Served(two_sided, "sparse", "two-sided")
    with serving(Service([model], default_side="query")) as client:
        yield client


ASYMMETRIC_TEXT = "functions that read csv files, functions"


@pytest.mark.parametrize(
    ("path", "options", "side"),
    [
        pytest.param("/query/embed_sparse", {}, "query", id="query by path"),
        pytest.param("/document/embed_sparse", {}, "document", id="document by path"),
        pytest.param("/embed_sparse", {}, "query", id="default"),
        pytest.param(
            "/embed_sparse",
            {"prompt_name": "document"},
            "document",
            id="document by prompt",
        ),
        pytest.param(
            "/document/embed_sparse",
            {"prompt_name": "query"},
            "query",
            id="query by prompt in spite of the path",
        ),
    ],
)
def test_an_asymmetric_model_encodes_texts_by_path_and_prompt_name(
    two_sided_client: Client,
    two_sided: Any,
    path: str,
    options: dict[str, str],
    side: str,
) -> None:
    (row,) = two_sided_client.post(path, {"inputs": ASYMMETRIC_TEXT} | options).json
    (expected,) = model_entries(two_sided, [ASYMMETRIC_TEXT], side)
    assert weights_by_index(row) == pytest.approx(expected, rel=2e-2)


@pytest.mark.parametrize(
    ("path", "side", "add_special_tokens"),
    [
        # a query is the weights of its tokens, without special tokens
        pytest.param("/embed_sparse", "query", False, id="query"),
        pytest.param("/document/embed_sparse", "document", True, id="document"),
    ],
)
def test_an_asymmetric_model_encodes_token_ids_as_the_text(
    two_sided_client: Client,
    two_sided: Any,
    path: str,
    side: str,
    add_special_tokens: bool,
) -> None:
    body = {"inputs": ASYMMETRIC_TEXT, "add_special_tokens": add_special_tokens}
    (tokens,) = two_sided_client.post("/tokenize", body).json
    ids = [token["id"] for token in tokens]
    (row,) = two_sided_client.post(path, {"inputs": ids}).json
    (expected,) = model_entries(two_sided, [ASYMMETRIC_TEXT], side)
    assert weights_by_index(row) == pytest.approx(expected, rel=2e-2)


def test_the_two_sides_of_the_asymmetric_model_differ(two_sided: Any) -> None:
    (query,) = model_entries(two_sided, [ASYMMETRIC_TEXT], "query")
    (document,) = model_entries(two_sided, [ASYMMETRIC_TEXT], "document")
    assert set(query) != set(document)


@pytest.mark.parametrize(
    ("path", "side"),
    [("/info", "query"), ("/query/info", "query"), ("/document/info", "document")],
)
def test_info_has_the_side_of_the_path(two_sided_client: Client, path: str, side: str) -> None:
    assert two_sided_client.get(path).json["side"] == side


@contextmanager
def output_bias_of_nan(model: Any) -> Iterator[None]:
    """Replace the bias of a model's output layer by nan within the block."""
    (bias,) = (
        parameter
        for name, parameter in model.named_parameters()
        if name.endswith(("decoder.bias", "predictions.bias"))
    )
    saved = bias.detach().clone()
    with torch.no_grad():
        bias.fill_(float("nan"))
    try:
        yield
    finally:
        with torch.no_grad():
            bias.copy_(saved)


def test_a_row_that_is_not_finite_is_an_error(sparse: Any, client: Client) -> None:
    with output_bias_of_nan(sparse):
        reply = client.post("/embed_sparse", {"inputs": ["a", "b"]})
    message = "inference failed for this input; the log says why"
    assert_error(reply, 424, "Backend", message)
    assert client.post("/embed_sparse", {"inputs": "a"}).status == 200


@pytest.fixture(scope="module")
def local_client(sparse: Any) -> Iterator[Client]:
    """A server that answers only requests to this machine."""
    with serving(Service([Served(sparse, "sparse", "tiny")]), local=True) as client:
        yield client


@pytest.mark.parametrize(
    "host",
    [
        "LOCALHOST:1",
        "127.0.0.1:80",
        "[::1]:8080",
        "[fe80::1%eth0]",
        "tilefold.localhost",
        pytest.param(socket.gethostname(), id="name of this machine"),
        pytest.param("", id="no name"),
    ],
)
def test_a_local_server_answers_to_names_of_this_machine(local_client: Client, host: str) -> None:
    assert local_client.request("GET", "/health", Host=host).status == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil",
        "A:1",
        "example.org",
        "127.0.0.1.example.org:80",
        "localhost.example.org",
        "Example.ORG.",
    ],
)
def test_a_local_server_refuses_names_of_other_sites(local_client: Client, host: str) -> None:
    reply = local_client.request("GET", "/info", Host=host)
    assert reply.status == 421
    assert "must name this machine" in reply.json["error"]
