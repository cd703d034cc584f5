"""The requests and answers that text-embeddings-inference documents, replayed against a real server."""

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
from tilefold.serve.models import Served
from tilefold.serve.service import Service
from tilefold.serve.text import TextTokens

TEXTS = ["read csv files", "write json text, with examples", "dates"]


def similar(source: str, *sentences: str, **parameters: Any) -> dict[str, Any]:
    """A body of ``/similarity``."""
    return {"inputs": {"source_sentence": source, "sentences": sentences}, "parameters": parameters}


def rows(model: Any, texts: list[str], task: str = "document") -> list[dict[int, float]]:
    matrix = encode_sparse(model, texts, task=task).to_dense()
    return [{int(i): float(row[i]) for i in row.nonzero().flatten()} for row in matrix]


def test_embed_sparse_answers_a_list_per_input_of_the_model_s_entries_in_index_order(
    client: Client, sparse: Any
) -> None:
    for inputs in (TEXTS[0], TEXTS[:1], TEXTS):
        reply = client.post("/embed_sparse", {"inputs": inputs})
        assert (reply.status, reply.headers["content-type"]) == (200, "application/json")
        texts = [inputs] if isinstance(inputs, str) else inputs
        assert len(reply.json) == len(texts)
        for got, expected in zip(reply.json, rows(sparse, texts), strict=True):
            assert [set(entry) for entry in got] == [{"index", "value"}] * len(expected)
            assert [entry["index"] for entry in got] == sorted(expected)
            assert {e["index"]: e["value"] for e in got} == pytest.approx(expected, rel=2e-2)  # bf16 batches differ
            assert all(np.float32(entry["value"]) > 0 for entry in got)


def test_the_documented_fields_of_embed_sparse_are_taken_and_unknown_ones_ignored(client: Client) -> None:
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
    ids = [token["id"] for token in client.post("/tokenize", {"inputs": TEXTS[0]}).json[0]]
    for inputs in (ids, [ids]):
        assert client.post("/embed_sparse", {"inputs": inputs}).json == plain
    mixed = client.post("/embed_sparse", {"inputs": [ids, TEXTS[0]]}).json
    assert [[e["index"] for e in row] for row in mixed] == [[e["index"] for e in plain[0]]] * 2


def test_token_ids_go_to_an_accelerated_model_without_padding(client: Client, sparse: Any) -> None:
    seen: list[Any] = []
    hook = sparse[0].register_forward_pre_hook(lambda module, args: seen.append(set(args[0])))
    try:
        rows = client.post("/embed_sparse", {"inputs": [[7, 8, 9], [7]]}).json
    finally:
        hook.remove()
    assert len(rows) == 2 and seen and all("attention_mask" not in features for features in seen)


def test_headers_say_what_a_request_took(client: Client) -> None:
    headers = client.post("/embed_sparse", {"inputs": TEXTS[:2]}).headers
    tokens = sum(map(len, client.post("/tokenize", {"inputs": TEXTS[:2]}).json))
    assert headers["x-compute-type"] == ("gpu" if torch.cuda.is_available() else "cpu")
    assert (headers["x-compute-characters"], headers["x-compute-tokens"]) == (str(len("".join(TEXTS[:2]))), str(tokens))
    for name in ("compute", "total", "tokenization", "queue", "inference"):
        assert int(headers[f"x-{name}-time"]) >= 0


def test_our_own_fields_choose_entries_and_their_form(client: Client) -> None:
    whole = client.post("/embed_sparse", {"inputs": TEXTS[0]}).json[0]
    best = sorted(sorted(whole, key=lambda entry: -entry["value"])[:5], key=lambda entry: entry["index"])
    assert client.post("/embed_sparse", {"inputs": TEXTS[0], "top_k": 5}).json[0] == best
    above = client.post("/embed_sparse", {"inputs": TEXTS[0], "threshold": best[0]["value"]}).json[0]
    assert above == [entry for entry in whole if entry["value"] > best[0]["value"]]
    assert client.post("/embed_sparse", {"inputs": TEXTS[0], "threshold": 1e300}).json == [[]]
    arrays = client.post("/embed_sparse", {"inputs": TEXTS[0], "top_k": 5, "format": "arrays"}).json[0]
    assert arrays == {"indices": [e["index"] for e in best], "values": [e["value"] for e in best]}
    named = client.post("/embed_sparse", {"inputs": TEXTS[0], "top_k": 5, "tokens": True}).json[0]
    terms = client.post("/embed_sparse", {"inputs": TEXTS[0], "top_k": 5, "format": "tokens"}).json[0]
    assert terms == {entry["token"]: entry["value"] for entry in named}
    assert len(terms) == 5


def test_embed_all_answers_the_vectors_of_the_tokens_that_take_part(client: Client, late: Any) -> None:
    found = client.post("/embed_all", {"inputs": TEXTS}).json
    for got, expected in zip(found, late.encode_document(TEXTS), strict=True):
        assert np.array(got) == pytest.approx(expected.float().cpu().numpy(), abs=1e-2)


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_rerank_scores_by_maxsim_best_first_in_both_forms(client: Client, late: Any, path: str) -> None:
    (query,), documents = late.encode_query(["read csv"]), late.encode_document(TEXTS)
    expected = [float(maxsim(query[None].float(), row[None].float(), reduction="mean")) for row in documents]
    reply = client.post(path, {"query": "read csv", "texts": TEXTS, "raw_scores": False, "return_text": True})
    assert reply.status == 200
    assert [entry["score"] for entry in reply.json] == sorted((e["score"] for e in reply.json), reverse=True)
    assert {entry["index"]: entry["score"] for entry in reply.json} == pytest.approx(
        dict(enumerate(expected)), abs=2e-2
    )
    assert all(entry["text"] == TEXTS[entry["index"]] for entry in reply.json)
    assert "text" not in client.post(path, {"query": "read csv", "texts": TEXTS}).json[0]
    raw = client.post(path, {"query": "read csv", "texts": TEXTS, "raw_scores": True}).json
    assert raw[0]["score"] == pytest.approx(reply.json[0]["score"] * query.size(0), rel=1e-4)

    body = {"model": "m", "query": "read csv", "documents": [TEXTS[0], {"text": TEXTS[1]}, TEXTS[2]], "top_n": 2}
    results = client.post(path, body).json["results"]
    assert [set(result) for result in results] == [{"index", "relevance_score", "document"}] * 2
    assert [result["index"] for result in results] == [entry["index"] for entry in reply.json[:2]]
    assert [result["relevance_score"] for result in results] == pytest.approx([e["score"] for e in reply.json[:2]])
    assert all(result["document"] == {"text": TEXTS[result["index"]]} for result in results)


def test_score_keeps_the_order_of_the_request(client: Client) -> None:
    ranked = {e["index"]: e["score"] for e in client.post("/rerank", {"query": "read csv", "texts": TEXTS}).json}
    for names in (("queries", "documents"), ("text_1", "text_2"), ("data_1", "data_2")):
        answer = client.post("/score", dict(zip(names, ("read csv", TEXTS), strict=True))).json
        assert [entry["index"] for entry in answer["data"]] == [0, 1, 2]
        assert [entry["score"] for entry in answer["data"]] == pytest.approx([ranked[i] for i in range(3)], rel=1e-4)
    pairs = client.post("/score", {"queries": ["read csv", "dates"], "documents": TEXTS[:2]}).json["data"]
    assert pairs[0]["score"] == pytest.approx(ranked[0], abs=2e-2)
    assert client.post("/score", {"queries": ["a", "b"], "documents": TEXTS}).status == 422


def test_tokenize_and_decode_are_inverse(client: Client) -> None:
    (tokens,) = client.post("/tokenize", {"inputs": "Read files"}).json
    assert tokens[0] == {"id": tokens[0]["id"], "text": "[CLS]", "special": True, "start": None, "stop": None}
    assert "".join(token["text"] for token in tokens if not token["special"]) == "Readfiles"
    assert next(token["start"] for token in tokens if not token["special"]) == 0
    bare = client.post("/tokenize", {"inputs": ["Read files"], "add_special_tokens": False}).json
    assert bare == [[token for token in tokens if not token["special"]]]
    ids = [token["id"] for token in tokens]
    assert client.post("/decode", {"ids": ids}).json == client.post("/decode", {"ids": [ids]}).json == ["read files"]
    assert client.post("/decode", {"ids": ids, "skip_special_tokens": False}).json[0].startswith("[CLS]")


def test_info_and_health_have_the_documented_names(client: Client) -> None:
    info = client.get("/info").json
    assert {
        "model_id", "model_sha", "model_dtype", "model_type", "max_concurrent_requests", "max_input_length",
        "max_batch_tokens", "max_batch_requests", "max_client_batch_size", "auto_truncate", "tokenization_workers",
        "version",
    } <= set(info)  # fmt: skip
    assert info["model_type"] == {"embedding": {"pooling": "splade"}}
    assert (info["model_id"], info["max_input_length"], info["max_client_batch_size"]) == ("tiny", 64, 32)
    for path in ("/health", "/ping"):
        assert (client.get(path).status, client.get(path).raw) == (200, b"")


@pytest.mark.parametrize(
    ("path", "body", "status", "kind", "message"),
    [
        ("/embed_sparse", {"inputs": []}, 400, "Empty", "`inputs` cannot be empty"),
        ("/embed_sparse", {"inputs": ""}, 400, "Empty", "Input validation error: `inputs` cannot be empty"),
        ("/embed_sparse", {"inputs": [[7], []]}, 400, "Empty", "Input validation error: `inputs` cannot be empty"),
        ("/embed_all", {"inputs": ["a", ""]}, 400, "Empty", "Input validation error: `inputs` cannot be empty"),
        ("/tokenize", {"inputs": ["a", ""]}, 400, "Empty", "Input validation error: `inputs` cannot be empty"),
        ("/decode", {"ids": [[7], []]}, 400, "Empty", "Input validation error: `input_ids` cannot be empty"),
        ("/rerank", {"query": "", "texts": ["a"]}, 400, "Empty", "Input validation error: `inputs` cannot be empty"),
        ("/rerank", {"query": "a", "texts": ["a", ""]}, 400, "Empty", "Input validation error: `inputs` cannot be"),
        ("/score", {"queries": "a", "documents": ""}, 400, "Empty", "Input validation error: `inputs` cannot be empty"),
        ("/embed_sparse", {"inputs": ["a"] * 33}, 422, "Validation", "batch size 33 > maximum allowed batch size 32"),
        ("/embed_sparse", {"inputs": "a " * 70, "truncate": False}, 422, "Validation",
         "Input validation error: `inputs` must have less than 64 tokens. Given: 72"),
        ("/embed_sparse", {"inputs": ["a", "." * 16_001], "truncate": False}, 422, "Validation",
         "Input validation error: `inputs` must have less than 16000 characters. Given: 16001"),
        ("/embed_sparse", {"inputs": [[7] * 16_001], "truncate": False}, 422, "Validation",
         "16000 token ids. Given: 16001"),
        ("/tokenize", {"inputs": "." * 1_900_000}, 422, "Validation", "16000 characters. Given: 1900000"),
        ("/tokenize", {"inputs": ["." * 8000] * 3}, 422, "Validation", "16000 characters in all. Given: 24000"),
        ("/decode", {"ids": [[7] * 8000] * 3}, 422, "Validation", "16000 token ids in all. Given: 24000"),
        ("/rerank", {"query": "." * 16_001, "texts": ["a"], "truncate": False}, 422, "Validation",
         "8000 characters. Given: 16001"),
        ("/embed_sparse", {"inputs": [[7, 10**6]]}, 422, "Tokenizer", "token ids: expected numbers from 0 to"),
        ("/embed_sparse", {"inputs": "a", "prompt_name": "no"}, 422, "Validation", "`prompt_name` expected one of"),
        ("/embed_sparse", {"inputs": 5}, 422, "Validation", "`inputs`: expected a text, a list of texts"),
        ("/embed_sparse", {"inputs": "a", "truncate": "yes"}, 422, "Validation", "`truncate`: "),
        ("/embed_sparse", {"inputs": "a", "top_k": 0}, 422, "Validation", "`top_k`: "),
        ("/embed_sparse", {"input": "a"}, 422, "Validation", "`inputs`: Field required"),
        ("/rerank", {"query": "a", "texts": []}, 400, "Empty", "`texts` cannot be empty"),
        ("/rerank", {"query": "a"}, 422, "Validation", "`texts` or `documents`: expected one of them"),
        ("/embed", {"inputs": "a"}, 424, "Backend", "POST /embed_sparse"),
        ("/nowhere", {}, 404, "Validation", "there is no such route"),
        ("/similarity", similar("a"), 400, "Empty", "`inputs.sentences` cannot be empty"),
        ("/similarity", similar("a", *"b" * 32), 422, "Validation", "batch size 33 > maximum allowed batch size 32"),
        ("/similarity", similar("", "b"), 400, "Empty", "`inputs` cannot be empty"),
        ("/similarity", similar("a", "b", prompt_name="no"), 422, "Validation", "`prompt_name` expected one of"),
        ("/similarity", similar("." * 16_001, "b", truncate=False), 422, "Validation",
         "16000 characters. Given: 16001"),
        ("/similarity", {"inputs": ["a", "b"]}, 422, "Validation", "`inputs`: "),
        ("/similarity", {"inputs": {"source_sentence": "a"}}, 422, "Validation", "`inputs.sentences`: Field required"),
        ("/vertex", {"instances": []}, 400, "Empty", "`instances` cannot be empty"),
        ("/vertex", {"instances": [{"inputs": "a"}] * 33}, 422, "Validation", "batch size 33 > maximum allowed"),
        ("/vertex", {"instances": [{"inputs": "a"}, {"input": "b"}]}, 422, "Validation",
         "`instances.1.inputs`: Field required"),
        ("/vertex", {"instances": [3]}, 422, "Validation", "`instances.0`: "),
        ("/vertex", {"instances": [{"inputs": "a"}, {"inputs": ""}]}, 400, "Empty", "`inputs` cannot be empty"),
        ("/vertex", {"instances": [{"query": "a", "texts": []}]}, 400, "Empty", "`texts` cannot be empty"),
    ],
)  # fmt: skip
def test_errors_have_the_codes_kinds_and_words_of_text_embeddings_inference(
    client: Client, path: str, body: Any, status: int, kind: str, message: str
) -> None:
    reply = client.post(path, body)
    assert (reply.status, reply.json["error_type"]) == (status, kind)
    assert message in reply.json["error"]
    assert set(reply.json) == {"error", "error_type"}


def test_token_ids_are_looked_at_beside_the_event_loop_and_not_before_their_number_is_checked(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, threads = TextTokens.known, []

    def spied(self: TextTokens, ids: Any) -> Any:
        threads.append(threading.current_thread().name)
        return known(self, ids)

    monkeypatch.setattr(TextTokens, "known", spied)
    for path, name, pool in (("/embed_sparse", "inputs", "helper"), ("/decode", "ids", "tokenizer")):
        assert client.post(path, {name: [[7]] * 33}).json["error"].startswith("batch size 33 >")
        assert threads == []  # half a million lists would have kept the server from answering anybody for seconds
        assert client.post(path, {name: [[7]] * 32}).status == 200
        assert len(threads) == 32 and all(thread.startswith(f"tilefold-{pool}") for thread in threads)
        threads.clear()


def test_the_openai_route_of_a_sparse_model_is_refused_with_the_remedy_in_its_own_form(client: Client) -> None:
    for path in ("/v1/embeddings", "/embeddings", "/query/v1/embeddings"):
        reply = client.post(path, {"input": "a"})
        assert (reply.status, reply.json["code"], reply.json["type"]) == (424, 424, "Backend")
        assert "/embed_sparse" in reply.json["message"]


def test_a_long_input_is_cut_at_the_end_that_the_request_names(client: Client, sparse: Any) -> None:
    long = "csv " * 80 + "sockets " * 80
    by_side = {}
    for side in ("left", "right"):
        by_side[side] = client.post("/embed_sparse", {"inputs": long, "truncation_direction": side}).json
    words = {"right": "csv " * 80, "left": "sockets " * 80}
    for side, text in words.items():
        alone = client.post("/embed_sparse", {"inputs": text}).json
        assert [e["index"] for e in by_side[side][0]] == [e["index"] for e in alone[0]]
    assert by_side["left"] != by_side["right"]
    assert sparse.tokenizer.truncation_side == "right"


def test_an_asymmetric_model_encodes_by_mount_point_and_by_prompt_name(two_sided: Any) -> None:
    text = "functions that read csv files, functions"
    with serving(Service([Served(two_sided, "sparse", "two-sided")], default_side="query")) as client:
        query, document = (rows(two_sided, [text], task)[0] for task in ("query", "document"))
        assert set(query) != set(document)
        for path, body, expected in (
            ("/query/embed_sparse", {}, query),
            ("/document/embed_sparse", {}, document),
            ("/embed_sparse", {}, query),
            ("/embed_sparse", {"prompt_name": "document"}, document),
            ("/document/embed_sparse", {"prompt_name": "query"}, query),
        ):
            got = client.post(path, {"inputs": text} | body).json[0]
            assert {entry["index"]: entry["value"] for entry in got} == pytest.approx(expected, rel=2e-2)
        for path, side in (("", "query"), ("/query", "query"), ("/document", "document")):
            assert client.get(f"{path}/info").json["side"] == side


def test_a_row_that_is_not_finite_is_an_error_and_no_number(sparse: Any, client: Client) -> None:
    bias = next(p for name, p in sparse.named_parameters() if name.endswith(("decoder.bias", "predictions.bias")))
    kept = bias.detach().clone()
    with torch.no_grad():
        bias.fill_(float("nan"))
    try:
        reply = client.post("/embed_sparse", {"inputs": ["a", "b"]})
        assert (reply.status, reply.json) == (
            424,
            {"error": "inference failed for this input; the log says why", "error_type": "Backend"},
        )
    finally:
        with torch.no_grad():
            bias.copy_(kept)
    assert client.post("/embed_sparse", {"inputs": "a"}).status == 200


def test_a_local_server_is_not_reached_by_the_name_of_another_site(sparse: Any) -> None:
    with serving(Service([Served(sparse, "sparse", "tiny")]), local=True) as client:
        own = socket.gethostname()
        for name in ("LOCALHOST:1", "127.0.0.1:80", "[::1]:8080", "[fe80::1%eth0]", "tilefold.localhost", own, ""):
            assert client.request("GET", "/health", Host=name).status == 200, name
        for name in ("evil", "A:1", "example.org", "127.0.0.1.example.org:80", "localhost.example.org", "Example.ORG."):
            reply = client.request("GET", "/info", Host=name)
            assert reply.status == 421 and "expected this machine" in reply.json["error"], name
