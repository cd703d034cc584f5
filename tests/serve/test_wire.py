"""Details of text-embeddings-inference: token ids, offsets, cuts, metrics, ``/info``, ``/docs``,
CORS, ``/vertex``.
"""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from sentence_transformers import MultiVectorEncoder, SentenceTransformer
from sentence_transformers.base.modules import Transformer
from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling

from tests.refusals import refused
from tests.serve.running import Client, Reply, serving
from tests.serve.test_contract import TEXTS, similar
from tilefold.serve.app import create_app
from tilefold.serve.bodies import (
    EmbedSparse,
    Row,
    cosines,
    numbers,
    rows_of,
    sparse_rows,
    strongest,
)
from tilefold.serve.models import Served
from tilefold.serve.service import Service
from tilefold.serve.settings import Limits

SITE = "https://example.org"


def test_weights_of_16_bits_are_written_as_any_others() -> None:
    weights = (np.arange(1, 1 << 15, dtype=np.uint32) << 16).view(np.float32)
    weights, body = weights[np.isfinite(weights)], EmbedSparse(inputs="a")
    indices = np.arange(len(weights), dtype=np.int32) * 3
    rows = rows_of([0, 0, 2, len(weights), len(weights)], indices, weights)
    assert [bool(row.json) for row in rows] == [False, True, True, False]
    assert sparse_rows(rows, body, str) == sparse_rows([Row(*row[:2]) for row in rows], body, str)
    assert [entry["index"] for entry in json.loads(sparse_rows(rows, body, str)[1])] == [0, 3]
    (odd,) = rows_of([0, 2], indices[:2], weights[:2] * np.float32(1.1))
    assert (
        not odd.json
        and b"%s}]" % numbers(odd.weights)[1].encode() in sparse_rows([odd], body, str)[0]
    )
    assert strongest(rows[2], 1, None).json == b""


@pytest.fixture(scope="module")
def dense(masked_lm: str) -> Any:
    """The vector of ``[CLS]``, made of length 1."""
    transformer = Transformer(masked_lm)
    pooling = Pooling(transformer.get_embedding_dimension(), "cls")
    prompts = {"query": "find ", "named": "dates "}
    return SentenceTransformer(
        modules=[transformer, pooling, Normalize()],
        prompts=prompts,
        device="cpu",
    )


@pytest.fixture(scope="module")
def embeds(dense: Any) -> Iterator[Client]:
    with serving(Service([Served(dense, "dense", "tiny-dense")])) as client:
        yield client


def ids_of(client: Client, text: str, special: bool = True) -> list[int]:
    return [
        token["id"]
        for token in client.post("/tokenize", {"inputs": text, "add_special_tokens": special}).json[
            0
        ]
    ]


def as_dicts(reply: Reply) -> list[dict[int, float]]:
    assert reply.status == 200, reply.raw
    return [{entry["index"]: entry["value"] for entry in row} for row in reply.json]


def outputs(model: Any, ids: list[int], task: str = "document") -> Any:
    """What the modules of a model make of token ids and nothing else."""
    row = torch.tensor([ids])
    with torch.inference_mode():
        return model(
            {"input_ids": row, "attention_mask": torch.ones_like(row), "modality": "text"},
            task=task,
        )


def test_a_sparse_model_reads_token_ids_as_they_are_without_padding(
    client: Client,
    sparse: Any,
) -> None:
    whole, bare = ids_of(client, TEXTS[0]), ids_of(client, TEXTS[0], special=False)
    mask, piece = sparse.tokenizer.mask_token_id, sparse.tokenizer.convert_tokens_to_ids("##e")
    for ids in (whole, bare, bare[:1], [*whole[:2], mask, *whole[2:]], [piece, piece], [whole[0]]):
        (got,) = as_dicts(client.post("/embed_sparse", {"inputs": ids}))
        row = outputs(sparse, ids)["sentence_embedding"].to_dense()[0]
        assert got == pytest.approx(
            {int(i): float(row[i]) for i in row.nonzero().flatten()},
            rel=2e-2,
        ), ids
    seen: list[Any] = []
    hook = sparse[0].register_forward_pre_hook(lambda module, args: seen.append(set(args[0])))
    try:
        mixed = as_dicts(client.post("/embed_sparse", {"inputs": [bare, TEXTS[0], whole]}))
    finally:
        hook.remove()
    assert mixed[1] == pytest.approx(mixed[2], rel=2e-2) and set(mixed[0]) != set(mixed[2])
    assert seen and all("attention_mask" not in features for features in seen)


def test_token_vectors_are_those_of_the_tokens_that_take_part_and_of_ids_alone(
    client: Client,
    late: Any,
) -> None:
    found = client.post("/embed_all", {"inputs": TEXTS}).json
    for got, expected in zip(found, late.encode_document(TEXTS), strict=True):
        assert np.array(got) == pytest.approx(expected.float().cpu().numpy(), abs=1e-2)
    rows = [ids_of(client, TEXTS[1]), ids_of(client, TEXTS[0], special=False)]
    for side in ("document", "query"):
        for ids, got in zip(
            rows,
            client.post(f"/{side}/embed_all", {"inputs": rows}).json,
            strict=True,
        ):
            alone = outputs(late, ids, side)
            kept = alone["token_embeddings"][alone["attention_mask"].bool()]
            assert np.array(got) == pytest.approx(kept.numpy(), abs=1e-2)


def test_a_dense_model_reads_token_ids_as_they_are_and_behind_a_prompt_on_request(
    embeds: Client,
    dense: Any,
) -> None:
    whole, bare = ids_of(embeds, TEXTS[0]), ids_of(embeds, TEXTS[0], special=False)
    alone = np.array(
        [outputs(dense, ids)["sentence_embedding"][0].numpy() for ids in (whole, bare)],
    )
    assert np.array(embeds.post("/embed", {"inputs": [whole, bare]}).json) == pytest.approx(
        alone,
        abs=1e-6,
    )
    assert np.array(embeds.post("/query/embed", {"inputs": whole}).json) == pytest.approx(
        alone[:1],
        abs=1e-6,
    )
    data = embeds.post("/v1/embeddings", {"input": [whole, bare]}).json["data"]
    assert np.array([entry["embedding"] for entry in data]) == pytest.approx(alone, abs=1e-6)
    for name in ("named", "query"):
        prompted = [
            embeds.post("/embed", {"inputs": each, "prompt_name": name}).json
            for each in (whole, TEXTS[0])
        ]
        assert prompted[0] == prompted[1]
        assert np.abs(np.array(prompted[0]) - alone[0]).max() > 1e-3


def test_offsets_are_bytes_and_on_request_characters(client: Client) -> None:
    text = "Röd € 😀 csv"
    for body, encode in (
        ({}, str.encode),
        ({"offsets": "bytes"}, str.encode),
        ({"offsets": "characters"}, str),
    ):
        tokens = client.post(
            "/tokenize",
            {"inputs": [text], "add_special_tokens": False} | body,
        ).json[0]
        source = encode(text)
        assert [encode(token["text"]) for token in tokens] == [
            source[t["start"] : t["stop"]] for t in tokens
        ]
        assert tokens[-1]["stop"] == len(source)


def test_a_dense_model_answers_embed_and_the_openai_route(embeds: Client, dense: Any) -> None:
    expected = dense.encode(TEXTS)
    assert np.array(embeds.post("/embed", {"inputs": TEXTS}).json) == pytest.approx(
        expected,
        abs=1e-5,
    )
    answer = embeds.post("/v1/embeddings", {"input": TEXTS, "model": "any"}).json
    assert np.array([entry["embedding"] for entry in answer["data"]]) == pytest.approx(
        expected,
        abs=1e-5,
    )
    assert (answer["object"], answer["usage"]["prompt_tokens"] > 9) == ("list", True)
    assert embeds.get("/info").json["model_type"] == {"embedding": {"pooling": "cls"}}
    coded = embeds.post("/v1/embeddings", {"input": TEXTS[0], "encoding_format": "base64"}).json[
        "data"
    ][0]
    assert np.frombuffer(base64.b64decode(coded["embedding"]), "<f4") == pytest.approx(
        expected[0],
        abs=1e-5,
    )
    short = np.array(embeds.post("/embed", {"inputs": TEXTS[0], "dimensions": 8}).json[0])
    assert short == pytest.approx(expected[0][:8] / np.linalg.norm(expected[0][:8]), abs=1e-5)
    for path, body in (
        ("/embed_sparse", {"inputs": "a"}),
        ("/rerank", {"query": "a", "texts": ["b"]}),
    ):
        assert embeds.post(path, body).status == 424


def test_normalize_false_leaves_out_the_module_that_normalizes(embeds: Client, dense: Any) -> None:
    expected = SentenceTransformer(modules=list(dense)[:2], device="cpu").encode(TEXTS)
    assert np.abs(np.linalg.norm(expected, axis=1) - 1).min() > 0.1
    for inputs in (TEXTS, [ids_of(embeds, text) for text in TEXTS]):
        raw = embeds.post("/embed", {"inputs": inputs, "normalize": False}).json
        assert np.array(raw) == pytest.approx(expected, abs=1e-5)
        unit = expected / np.linalg.norm(expected, axis=1, keepdims=True)
        assert np.array(embeds.post("/embed", {"inputs": inputs}).json) == pytest.approx(
            unit,
            abs=1e-5,
        )
    short = embeds.post("/embed", {"inputs": TEXTS, "normalize": False, "dimensions": 5}).json
    assert np.array(short) == pytest.approx(expected[:, :5], abs=1e-5)


def samples(client: Client) -> dict[str, float]:
    """Name and labels -> value; the parser gives counters the suffix that they lack."""
    families = text_string_to_metric_families(client.get("/metrics").raw.decode())
    found = [sample for family in families for sample in family.samples]
    labelled = [
        (" ".join(f"{key}={text}" for key, text in each.labels.items()), each) for each in found
    ]
    return {
        f"{each.name.removesuffix('_total')} {labels}".strip(): each.value
        for labels, each in labelled
    }


def test_metrics_have_the_names_labels_and_bounds_of_text_embeddings_inference(
    sparse: Any,
    late: Any,
) -> None:
    with serving(
        Service([Served(sparse, "sparse", "tiny"), Served(late, "multi-vector", "colbert")]),
    ) as client:
        client.post("/embed_sparse", {"inputs": "a"})
        client.post("/embed_sparse", {"inputs": ["a"]})
        client.post("/embed_sparse", {"inputs": [7, 8]})
        client.post("/embed_sparse", {"inputs": ["a", ""]})
        client.post("/rerank", {"query": "a", "texts": TEXTS})
        raw, found = client.get("/metrics"), samples(client)
    assert raw.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    expected = {
        "te_request_count method=single": 2,
        "te_request_count method=batch": 3,
        "te_request_success method=single": 2,
        "te_request_success method=batch": 2,
        "te_request_failure err=tokenization": 1,
        "te_request_duration_count": 4,
        "te_embed_count": 5,
        "te_embed_success": 3,
        "te_embed_duration_count": 3,
        "te_predict_count": 3,
        "te_predict_success": 3,
        "te_predict_queue_duration_count": 3,
        "te_queue_size": 0,
    }
    assert {name: found[name] for name in expected} == expected
    assert found["te_request_duration_bucket le=+Inf"] == found["te_request_duration_count"]
    assert (
        min(
            found[f"te_{name}_sum"]
            for name in ("batch_next_size", "batch_next_tokens", "request_input_length")
        )
        > 0
    )
    for kind in ("request", "embed", "predict"):
        for part in ("", "tokenization_", "queue_", "inference_"):
            assert found[f"te_{kind}_{part}duration_sum"] >= 0
        bounds = [name for name in found if name.startswith(f"te_{kind}_duration_bucket")]
        assert len(bounds) == 36 and float(bounds[0].rpartition("=")[2]) == pytest.approx(1.5e-5)
    assert b"_total" not in raw.raw and b"_created" not in raw.raw


def test_equal_texts_of_a_request_have_equal_scores_and_vectors_and_stay_in_their_order(
    client: Client,
) -> None:
    texts = [*TEXTS, "a " * 30, TEXTS[0], "csv", TEXTS[1], TEXTS[0]]
    ranked = client.post("/rerank", {"query": "read csv", "texts": texts}).json
    score = {entry["index"]: entry["score"] for entry in ranked}
    assert (score[0] == score[4] == score[7], score[1] == score[6], len(score)) == (
        True,
        True,
        len(texts),
    )
    order = [entry["index"] for entry in ranked]
    assert order.index(0) < order.index(4) < order.index(7) and order.index(1) < order.index(6)
    pairs = client.post("/score", {"queries": ["csv"] * 3, "documents": ["a", TEXTS[1], "a"]}).json[
        "data"
    ]
    assert pairs[0]["score"] == pairs[2]["score"]
    before = samples(client)["te_batch_next_size_sum"]
    rows = client.post("/embed_sparse", {"inputs": texts}).json
    assert rows[0] == rows[4] == rows[7]
    assert samples(client)["te_batch_next_size_sum"] - before == len(set(texts))


def test_the_routes_are_described_as_a_page_and_as_json_at_both_addresses(sparse: Any) -> None:
    with serving(Service([Served(sparse, "sparse", "tiny")]), api_key="sesam") as client:
        described = client.get("/openapi.json")
        assert client.get("/api-doc/openapi.json").json == described.json
        page = client.get("/docs")
        assert (page.status, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
        text, field = page.raw.decode(), 'offsets: "bytes" | "characters" = "bytes"'
        assert "<code>/embed_sparse</code>" in text and html.escape(field) in text
        assert (
            "<script" not in text
            and "://" not in text
            and "default-src 'none'" in str(page.headers)
        )
        assert client.get("/page.css").status == 200


def test_other_sites_may_read_answers_if_they_are_named(sparse: Any, client: Client) -> None:
    asks = {
        "Origin": SITE,
        "Access_Control_Request_Method": "POST",
        "Access_Control_Request_Headers": "authorization",
    }
    assert client.request("OPTIONS", "/embed_sparse", **asks).status == 405
    assert "access-control-allow-origin" not in client.request("GET", "/info", Origin=SITE).headers
    service = Service([Served(sparse, "sparse", "tiny")])
    for origins, named in (([SITE], SITE), (["*"], "*")):
        with serving(service, api_key="sesam", origins=origins) as open_:
            preflight = open_.request("OPTIONS", "/embed_sparse", **asks)
            assert (preflight.status, preflight.headers["access-control-allow-origin"]) == (
                200,
                named,
            )
            assert "authorization" in preflight.headers["access-control-allow-headers"].lower()
            closed = open_.request("GET", "/info", Origin=SITE)
            assert (closed.status, closed.headers["access-control-allow-origin"]) == (401, named)
            assert closed.headers["access-control-expose-headers"] == "x-truncated-inputs"
            other = open_.request("GET", "/health", Origin="http://evil.example").headers
            assert other.get("access-control-allow-origin") == (None if named == SITE else "*")
    refused(
        ValueError,
        r"origins: expected \* or an origin such as",
        create_app,
        service,
        None,
        origins=["a.org"],
    )


def test_similarity_is_the_cosine_of_the_vectors_that_the_model_makes(
    client: Client,
    sparse: Any,
) -> None:
    rows = sparse.encode_document(TEXTS).to_dense().float().cpu().numpy().astype(np.float64)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    reply = client.post("/similarity", similar(*TEXTS))
    assert (reply.status, reply.json) == (
        200,
        pytest.approx((rows[1:] @ rows[0]).tolist(), abs=2e-2),
    )
    same = client.post("/query/similarity", {"inputs": similar("a b", "a b")["inputs"]}).json
    assert same == pytest.approx([1.0], abs=1e-5)
    dense = [np.array(row, np.float32) for row in ([3, 4], [4, 3], [0, 0])]
    assert cosines(dense, "dense") == pytest.approx([24 / 25, 0.0])
    one, other, empty = (
        Row(np.array(terms, np.int32), np.array(values, np.float32))
        for terms, values in (([2, 7], [3, 4]), ([1, 7], [4, 3]), ([], []))
    )
    assert cosines([one, other, empty, one], "sparse") == pytest.approx([12 / 25, 0.0, 1.0])


def test_vertex_answers_each_instance_or_gives_back_its_permits(client: Any, sparse: Any) -> None:
    ranked = {"query": "csv", "texts": TEXTS, "return_text": True}
    instances = [{"inputs": TEXTS[0], "top_k": 4}, ranked, {"inputs": TEXTS[1:]}]
    first, second, third = client.post("/vertex", {"instances": instances, "parameters": {}}).json[
        "predictions"
    ]
    assert first == client.post("/embed_sparse", instances[0]).json
    assert [entry["index"] for entry in second] == [
        e["index"] for e in client.post("/rerank", ranked).json
    ]
    assert len(third) == 2
    limits = Limits(max_concurrent_requests=4, max_client_batch_size=4)
    with serving(Service([Served(sparse, "sparse", "tiny")], limits)) as small:
        reply = small.post("/vertex", {"instances": [{"inputs": ["a"] * 3}, {"inputs": ["b"] * 3}]})
        assert (reply.status, reply.json["error_type"], reply.headers["retry-after"]) == (
            429,
            "Overloaded",
            "1",
        )
        assert small.post("/embed_sparse", {"inputs": ["a"] * 4}).status == 200


def test_inputs_beyond_the_limit_of_their_side_are_counted(two_sided: Any, masked_lm: str) -> None:
    """Of an inference-free sparse model that reads 64 tokens, and a late one that expands queries
    to 16.
    """
    transformer = Transformer(
        masked_lm,
        query_expansion={"strategy": "fixed", "length": 16},
        document_length=32,
    )
    late = MultiVectorEncoder(modules=[transformer, MultiVectorMask()], device="cpu")
    texts = [" ".join("a" * count) for count in (1, 62, 63, 64, 65, 90)]  # each a token
    with serving(
        Service([Served(two_sided, "sparse", "two-sided"), Served(late, "multi-vector", "late")]),
    ) as client:
        for path, body, count in (
            ("/document/embed_sparse", {"inputs": texts}, 4),  # two special tokens are among the 64
            ("/query/embed_sparse", {"inputs": texts}, 2),  # queries have no special tokens
            ("/document/embed_sparse", {"inputs": texts[:2]}, 0),
            ("/document/embed_sparse", {"inputs": "a " * 60 + " " * 20_000}, 1),
            ("/document/embed_sparse", {"inputs": [list(range(10, 75)), list(range(10, 74))]}, 1),
            (
                "/rerank",
                {"query": "a " * 15, "texts": ["a " * 30, "a " * 31]},
                2,
            ),  # to where the expansion ends
        ):
            reply = client.post(path, body)
            assert (reply.status, reply.headers["x-truncated-inputs"]) == (200, str(count))
        for reply in (
            client.get("/info"),
            client.get("/health"),
            client.post("/tokenize", {"inputs": "a " * 90}),
        ):
            assert reply.status == 200 and "x-truncated-inputs" not in reply.headers
        assert (
            client.post("/query/embed_all", {"inputs": "a " * 15, "truncate": False}).status == 422
        )
        assert client.get("/query/info").json["max_input_length"] == 64  # of the first model
