"""The requests and answers that text-embeddings-inference documents, replayed against a real
server.
"""

from __future__ import annotations

import json
import socket
import threading
from typing import Any

import numpy as np
import pytest
import torch

from tests.serve.running import Client, serving
from tilefold.integrations.sentence_transformers import encode_sparse
from tilefold.ops import maxsim
from tilefold.recipes.loading import supports_bf16
from tilefold.serve.models import Served, TextTokens
from tilefold.serve.service import Service

TEXTS = ["read csv files", "write json text, with examples", "dates"]


def similar(source: str, *sentences: str, **parameters: Any) -> dict[str, Any]:
    """A body of ``/similarity``."""
    return {"inputs": {"source_sentence": source, "sentences": sentences}, "parameters": parameters}


def rows(model: Any, texts: list[str], task: str = "document") -> list[dict[int, float]]:
    matrix = encode_sparse(model, texts, task=task).to_dense()
    return [{int(i): float(row[i]) for i in row.nonzero().flatten()} for row in matrix]


def test_embed_sparse_answers_the_model_s_entries_of_each_input_in_index_order(
    client: Client,
    sparse: Any,
) -> None:
    for inputs in (TEXTS[0], TEXTS[:1], TEXTS):
        reply = client.post("/embed_sparse", {"inputs": inputs})
        assert (reply.status, reply.headers["content-type"]) == (200, "application/json")
        texts = [inputs] if isinstance(inputs, str) else inputs
        assert len(reply.json) == len(texts)
        for got, expected in zip(reply.json, rows(sparse, texts), strict=True):
            assert [set(entry) for entry in got] == [{"index", "value"}] * len(expected)
            assert [entry["index"] for entry in got] == sorted(expected)
            assert {e["index"]: e["value"] for e in got} == pytest.approx(
                expected,
                rel=2e-2,
            )  # bf16 batches differ
            assert all(np.float32(entry["value"]) > 0 for entry in got)


def test_the_documented_fields_of_embed_sparse_are_taken_and_unknown_ones_ignored(
    client: Client,
) -> None:
    plain = client.post("/embed_sparse", {"inputs": TEXTS[0]}).json
    for extra in (
        {"truncate": None, "truncation_direction": "right", "prompt_name": None},
        {"truncate": False, "truncation_direction": "Left"},
        {"normalize": True, "parameters": {}, "model": "any"},
    ):
        assert client.post("/embed_sparse", {"inputs": TEXTS[0]} | extra).json == plain
    body = json.dumps({"inputs": TEXTS[0]}).encode()
    for kind in (
        'application/json; charset="UTF-8"',
        "Application/JSON;charset=utf-8; profile=a",
        "application/json;v=1",
        "application/vnd.api+json",
    ):
        assert client.request("POST", "/embed_sparse", body, content_type=kind).json == plain


def test_headers_say_what_a_request_took(client: Client) -> None:
    headers = client.post("/embed_sparse", {"inputs": TEXTS[:2]}).headers
    tokens = sum(map(len, client.post("/tokenize", {"inputs": TEXTS[:2]}).json))
    assert headers["x-compute-type"] == ("gpu" if torch.cuda.is_available() else "cpu")
    assert headers["x-compute-tokens"] == str(tokens)
    for name in ("compute", "total", "tokenization", "queue", "inference"):
        assert int(headers[f"x-{name}-time"]) >= 0
    for path, body, more in (
        ("/embed_sparse", {"inputs": TEXTS}, 0),
        ("/rerank", {"query": "csv", "texts": TEXTS}, 3 * len("csv")),  # those of the pairs
        ("/score", {"queries": ["a", "bc", "d"], "documents": TEXTS}, 4),
        ("/similarity", similar(*TEXTS), 0),
    ):
        assert int(client.post(path, body).headers["x-compute-characters"]) == more + len(
            "".join(TEXTS),
        ), path


def test_our_own_fields_choose_entries_and_their_form(client: Client) -> None:
    def embed(**fields: Any) -> Any:
        return client.post("/embed_sparse", {"inputs": TEXTS[0]} | fields).json[0]

    whole = embed()
    best = sorted(
        sorted(whole, key=lambda entry: -entry["value"])[:5],
        key=lambda entry: entry["index"],
    )
    assert embed(top_k=5) == best
    above = best[0]["value"]
    assert embed(threshold=above) == [entry for entry in whole if entry["value"] > above]
    assert embed(threshold=1e300) == []
    arrays = {"indices": [e["index"] for e in best], "values": [e["value"] for e in best]}
    assert embed(top_k=5, format="arrays") == arrays
    terms = embed(top_k=5, format="tokens")
    assert (
        terms == {entry["token"]: entry["value"] for entry in embed(top_k=5, tokens=True)}
        and len(terms) == 5
    )


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_rerank_scores_by_maxsim_best_first_in_both_forms(
    client: Client,
    late: Any,
    path: str,
) -> None:
    (query,), documents = late.encode_query(["read csv"]), late.encode_document(TEXTS)
    expected = [
        float(maxsim(query[None].float(), row[None].float(), reduction="mean")) for row in documents
    ]
    reply = client.post(
        path,
        {"query": "read csv", "texts": TEXTS, "raw_scores": False, "return_text": True},
    )
    assert reply.status == 200
    assert [entry["score"] for entry in reply.json] == sorted(
        (e["score"] for e in reply.json),
        reverse=True,
    )
    scores = {entry["index"]: entry["score"] for entry in reply.json}
    assert scores == pytest.approx(dict(enumerate(expected)), abs=2e-2)
    assert all(entry["text"] == TEXTS[entry["index"]] for entry in reply.json)
    assert "text" not in client.post(path, {"query": "read csv", "texts": TEXTS}).json[0]
    raw = client.post(path, {"query": "read csv", "texts": TEXTS, "raw_scores": True}).json
    assert raw[0]["score"] == pytest.approx(reply.json[0]["score"] * query.size(0), rel=1e-4)

    body = {
        "model": "m",
        "query": "read csv",
        "documents": [TEXTS[0], {"text": TEXTS[1]}, TEXTS[2]],
        "top_n": 2,
    }
    results = client.post(path, body).json["results"]
    assert [set(result) for result in results] == [{"index", "relevance_score", "document"}] * 2
    assert [result["index"] for result in results] == [entry["index"] for entry in reply.json[:2]]
    assert [result["relevance_score"] for result in results] == pytest.approx(
        [e["score"] for e in reply.json[:2]],
    )
    assert all(result["document"] == {"text": TEXTS[result["index"]]} for result in results)


def test_score_keeps_the_order_of_the_request(client: Client) -> None:
    ranked = {
        e["index"]: e["score"]
        for e in client.post("/rerank", {"query": "read csv", "texts": TEXTS}).json
    }
    for names in (("queries", "documents"), ("text_1", "text_2"), ("data_1", "data_2")):
        answer = client.post("/score", dict(zip(names, ("read csv", TEXTS), strict=True))).json
        assert [entry["index"] for entry in answer["data"]] == [0, 1, 2]
        assert [entry["score"] for entry in answer["data"]] == pytest.approx(
            [ranked[i] for i in range(3)],
            rel=1e-4,
        )
    pairs = client.post("/score", {"queries": ["read csv", "dates"], "documents": TEXTS[:2]}).json[
        "data"
    ]
    assert pairs[0]["score"] == pytest.approx(ranked[0], abs=2e-2)


def test_tokenize_and_decode_are_inverse(client: Client) -> None:
    (tokens,) = client.post("/tokenize", {"inputs": "Read files"}).json
    assert tokens[0] == {
        "id": tokens[0]["id"],
        "text": "[CLS]",
        "special": True,
        "start": None,
        "stop": None,
    }
    assert "".join(token["text"] for token in tokens if not token["special"]) == "Readfiles"
    assert next(token["start"] for token in tokens if not token["special"]) == 0
    bare = client.post("/tokenize", {"inputs": ["Read files"], "add_special_tokens": False}).json
    assert bare == [[token for token in tokens if not token["special"]]]
    ids = [token["id"] for token in tokens]
    assert (
        client.post("/decode", {"ids": ids}).json
        == client.post("/decode", {"ids": [ids]}).json
        == ["read files"]
    )
    assert (
        client.post("/decode", {"ids": ids, "skip_special_tokens": False})
        .json[0]
        .startswith("[CLS]")
    )


def test_info_and_health_have_the_documented_names(client: Client, late: Any) -> None:
    info = client.get("/info").json
    assert {
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
    } <= set(info)
    assert info["model_type"] == {"embedding": {"pooling": "splade"}}
    by_machine = "bf16" if supports_bf16() else "fp32"
    assert info["precision"] == {"sparse": by_machine, "multi-vector": "fp32"}
    assert (info["model_id"], info["max_input_length"], info["max_client_batch_size"]) == (
        "tiny",
        64,
        32,
    )
    for path in ("/health", "/ping"):
        assert (client.get(path).status, client.get(path).raw) == (200, b"")
    with serving(Service([Served(late, "multi-vector", "colbert")])) as other:
        labels = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
        assert other.get("/info").json["model_type"] == {"reranker": labels}
        reply = other.post("/similarity", similar("a", "b"))
        assert (reply.status, "POST /rerank" in reply.json["error"]) == (424, True)
        assert other.post("/vertex", {"instances": [{"query": "a", "texts": ["b"]}]}).status == 200


EMPTY: list[tuple[str, Any, str]] = [
    ("/embed_sparse", {"inputs": []}, "`inputs` cannot be empty"),
    ("/embed_sparse", {"inputs": ""}, "Input validation error: `inputs` cannot be empty"),
    ("/embed_sparse", {"inputs": [[7], []]}, "Input validation error: `inputs` cannot be empty"),
    ("/embed_all", {"inputs": ["a", ""]}, "Input validation error: `inputs` cannot be empty"),
    ("/tokenize", {"inputs": ["a", ""]}, "Input validation error: `inputs` cannot be empty"),
    ("/decode", {"ids": [[7], []]}, "Input validation error: `input_ids` cannot be empty"),
    ("/rerank", {"query": "", "texts": ["a"]}, "Input validation error: `inputs` cannot be empty"),
    (
        "/rerank",
        {"query": "a", "texts": ["a", ""]},
        "Input validation error: `inputs` cannot be empty",
    ),
    ("/rerank", {"query": "a", "texts": []}, "`texts` cannot be empty"),
    (
        "/score",
        {"queries": "a", "documents": ""},
        "Input validation error: `inputs` cannot be empty",
    ),
    ("/similarity", similar("a"), "`inputs.sentences` cannot be empty"),
    ("/similarity", similar("", "b"), "`inputs` cannot be empty"),
    ("/vertex", {"instances": []}, "`instances` cannot be empty"),
    ("/vertex", {"instances": [{"inputs": "a"}, {"inputs": ""}]}, "`inputs` cannot be empty"),
    ("/vertex", {"instances": [{"query": "a", "texts": []}]}, "`texts` cannot be empty"),
]
WRONG: list[tuple[str, Any, str]] = [
    ("/embed_sparse", {"inputs": ["a"] * 33}, "batch size 33 > maximum allowed batch size 32"),
    (
        "/embed_sparse",
        {"inputs": "a " * 70, "truncate": False},
        "`inputs` must have less than 64 tokens. Given: 72",
    ),
    (
        "/embed_sparse",
        {"inputs": [[7] * 100], "truncate": False},
        "`inputs` must have less than 64 tokens. Given: ",
    ),
    (
        "/embed_sparse",
        {"inputs": ["a", "." * 16_001], "truncate": False},
        "less than 16000 characters. Given: 16001",
    ),
    (
        "/embed_sparse",
        {"inputs": [[7] * 16_001], "truncate": False},
        "16000 token ids. Given: 16001",
    ),
    ("/tokenize", {"inputs": "." * 1_900_000}, "16000 characters. Given: 1900000"),
    ("/tokenize", {"inputs": ["." * 8000] * 3}, "16000 characters in all. Given: 24000"),
    ("/tokenize", {"inputs": "a", "offsets": "words"}, "`offsets`: "),
    ("/decode", {"ids": [[7] * 8000] * 3}, "16000 token ids in all. Given: 24000"),
    (
        "/rerank",
        {"query": "." * 16_001, "texts": ["a"], "truncate": False},
        "8000 characters. Given: 16001",
    ),
    ("/embed_sparse", {"inputs": "a", "prompt_name": "no"}, "`prompt_name` expected one of"),
    ("/embed_sparse", {"inputs": 5}, "`inputs`: expected a text, a list of texts"),
    ("/embed_sparse", {"inputs": "a", "truncate": "yes"}, "`truncate`: "),
    ("/embed_sparse", {"inputs": "a", "top_k": 0}, "`top_k`: "),
    ("/embed_sparse", {"input": "a"}, "`inputs`: Field required"),
    ("/rerank", {"query": "a"}, "`texts` or `documents`: expected one of them"),
    ("/score", {"queries": ["a", "b"], "documents": TEXTS}, ""),
    ("/similarity", similar("a", *"b" * 32), "batch size 33 > maximum allowed batch size 32"),
    ("/similarity", similar("a", "b", prompt_name="no"), "`prompt_name` expected one of"),
    ("/similarity", similar("." * 16_001, "b", truncate=False), "16000 characters. Given: 16001"),
    ("/similarity", {"inputs": ["a", "b"]}, "`inputs`: "),
    ("/similarity", {"inputs": {"source_sentence": "a"}}, "`inputs.sentences`: Field required"),
    ("/vertex", {"instances": [{"inputs": "a"}] * 33}, "batch size 33 > maximum allowed"),
    (
        "/vertex",
        {"instances": [{"inputs": "a"}, {"input": "b"}]},
        "`instances.1.inputs`: Field required",
    ),
    ("/vertex", {"instances": [3]}, "`instances.0`: "),
]


@pytest.mark.parametrize(
    ("path", "body", "status", "kind", "message"),
    [
        *((path, body, 400, "Empty", message) for path, body, message in EMPTY),
        *((path, body, 422, "Validation", message) for path, body, message in WRONG),
        (
            "/embed_sparse",
            {"inputs": [[7, 10**6]]},
            422,
            "Tokenizer",
            "token ids: expected numbers from 0 to",
        ),
        ("/embed", {"inputs": "a"}, 424, "Backend", "POST /embed_sparse"),
        ("/predict", {"inputs": "a"}, 424, "Backend", "model is not a classifier model"),
        ("/nowhere", {}, 404, "Validation", "there is no such route"),
    ],
)
def test_errors_are_as_documented(
    client: Client,
    path: str,
    body: Any,
    status: int,
    kind: str,
    message: str,
) -> None:
    reply = client.post(path, body)
    assert (reply.status, reply.json["error_type"]) == (status, kind)
    assert message in reply.json["error"]
    assert set(reply.json) == {"error", "error_type"}
    if path == "/predict":
        assert 'te_request_failure{err="model_type"}' in client.get("/metrics").raw.decode()


def test_token_ids_are_counted_and_then_looked_at_beside_the_event_loop(
    client: Client,
    monkeypatch: Any,
) -> None:
    known, threads = TextTokens.known, []

    def spied(self: TextTokens, ids: Any) -> Any:
        threads.append(threading.current_thread().name)
        return known(self, ids)

    monkeypatch.setattr(TextTokens, "known", spied)
    for path, name, pool in (
        ("/embed_sparse", "inputs", "helper"),
        ("/decode", "ids", "tokenizer"),
    ):
        assert client.post(path, {name: [[7]] * 33}).json["error"].startswith("batch size 33 >")
        assert (
            threads == []
        )  # half a million lists would have kept the server from answering anybody for seconds
        assert client.post(path, {name: [[7]] * 32}).status == 200
        assert len(threads) == 32 and all(
            thread.startswith(f"tilefold-{pool}") for thread in threads
        )
        threads.clear()


def test_the_openai_route_of_a_sparse_model_is_refused_with_the_remedy_in_its_own_form(
    client: Client,
) -> None:
    for path in ("/v1/embeddings", "/embeddings", "/query/v1/embeddings"):
        reply = client.post(path, {"input": "a"})
        assert (reply.status, reply.json["code"], reply.json["type"]) == (424, 424, "Backend")
        assert "/embed_sparse" in reply.json["message"]


def test_inputs_that_are_too_long_are_cut_at_the_end_that_the_request_names(
    client: Client,
    sparse: Any,
) -> None:
    ids = [*range(10, 60), *range(60, 110)]  # the model reads 64
    for side, text, kept in (
        ("right", "csv " * 80, ids[:64]),
        ("left", "sockets " * 80, ids[-64:]),
    ):
        cut = client.post(
            "/embed_sparse",
            {"inputs": "csv " * 80 + "sockets " * 80, "truncation_direction": side},
        )
        alone = client.post("/embed_sparse", {"inputs": text})
        assert [e["index"] for e in cut.json[0]] == [e["index"] for e in alone.json[0]]
        cut = client.post("/embed_sparse", {"inputs": ids, "truncation_direction": side})
        assert cut.headers["x-compute-tokens"] == "64"
        assert cut.json == client.post("/embed_sparse", {"inputs": kept}).json
    assert sparse.tokenizer.truncation_side == "right"


def test_an_asymmetric_model_encodes_by_mount_point_and_by_prompt_name(two_sided: Any) -> None:
    text = "functions that read csv files, functions"
    with serving(
        Service([Served(two_sided, "sparse", "two-sided")], default_side="query"),
    ) as client:
        query, document = (rows(two_sided, [text], task)[0] for task in ("query", "document"))
        assert set(query) != set(document)
        whole, bare = (
            [
                token["id"]
                for token in client.post(
                    "/tokenize",
                    {"inputs": text, "add_special_tokens": each},
                ).json[0]
            ]
            for each in (True, False)
        )
        for path, body, expected in (
            ("/query/embed_sparse", {}, query),
            ("/document/embed_sparse", {}, document),
            ("/embed_sparse", {}, query),
            (
                "/embed_sparse",
                {"inputs": bare},
                query,
            ),  # without inference: the weights of its tokens
            ("/document/embed_sparse", {"inputs": whole}, document),
            ("/embed_sparse", {"prompt_name": "document"}, document),
            ("/document/embed_sparse", {"prompt_name": "query"}, query),
        ):
            got = client.post(path, {"inputs": text} | body).json[0]
            assert {entry["index"]: entry["value"] for entry in got} == pytest.approx(
                expected,
                rel=2e-2,
            )
        for path, side in (("", "query"), ("/query", "query"), ("/document", "document")):
            assert client.get(f"{path}/info").json["side"] == side


def test_a_row_that_is_not_finite_is_an_error_and_no_number(sparse: Any, client: Client) -> None:
    bias = next(
        p
        for name, p in sparse.named_parameters()
        if name.endswith(("decoder.bias", "predictions.bias"))
    )
    kept = bias.detach().clone()
    with torch.no_grad():
        bias.fill_(float("nan"))
    try:
        reply = client.post("/embed_sparse", {"inputs": ["a", "b"]})
        told = {
            "error": "inference failed for this input; the log says why",
            "error_type": "Backend",
        }
        assert (reply.status, reply.json) == (424, told)
    finally:
        with torch.no_grad():
            bias.copy_(kept)
    assert client.post("/embed_sparse", {"inputs": "a"}).status == 200


def test_a_local_server_is_not_reached_by_the_name_of_another_site(sparse: Any) -> None:
    with serving(Service([Served(sparse, "sparse", "tiny")]), local=True) as client:
        own = socket.gethostname()
        for name in (
            "LOCALHOST:1",
            "127.0.0.1:80",
            "[::1]:8080",
            "[fe80::1%eth0]",
            "tilefold.localhost",
            own,
            "",
        ):
            assert client.request("GET", "/health", Host=name).status == 200, name
        for name in (
            "evil",
            "A:1",
            "example.org",
            "127.0.0.1.example.org:80",
            "localhost.example.org",
            "Example.ORG.",
        ):
            reply = client.request("GET", "/info", Host=name)
            assert reply.status == 421 and "expected this machine" in reply.json["error"], name
