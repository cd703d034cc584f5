"""Tests of what text-embeddings-inference does with token ids, metrics, CORS and ``/vertex``."""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from sentence_transformers import MultiVectorEncoder, SentenceTransformer
from sentence_transformers.base.modules import Transformer
from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling

from tests.serve.running import Client, Reply, serving
from tests.serve.test_contract import TEXTS, similar
from tilefold.serve.app import create_app
from tilefold.serve.bodies import (
    EmbedSparse,
    Row,
    dense_cosines,
    format_numbers,
    keep_largest,
    sparse_cosines,
    sparse_vectors_json,
    split_rows,
)
from tilefold.serve.models import Served
from tilefold.serve.service import Service
from tilefold.serve.settings import Limits

SITE = "https://example.org"


def positive_bfloat16_weights() -> np.ndarray:
    """Return all finite positive numbers of bfloat16, as float32."""
    weights = (np.arange(1, 1 << 15, dtype=np.uint32) << 16).view(np.float32)
    return weights[np.isfinite(weights)]


def test_weights_of_16_bits_are_written_by_table_as_by_formatting() -> None:
    weights = positive_bfloat16_weights()
    body = EmbedSparse(inputs="a")
    indices = np.arange(len(weights), dtype=np.int32) * 3
    rows = split_rows([0, 0, 2, len(weights), len(weights)], indices, weights)
    assert [bool(row.json) for row in rows] == [False, True, True, False]
    rows_without_json = [Row(row.indices, row.weights) for row in rows]
    written = sparse_vectors_json(rows, body, str)
    assert written == sparse_vectors_json(rows_without_json, body, str)
    assert [entry["index"] for entry in json.loads(written[1])] == [0, 3]


def test_weights_of_32_bits_are_formatted() -> None:
    weights = positive_bfloat16_weights()[:2] * np.float32(1.1)
    (row,) = split_rows([0, 2], np.array([0, 3], np.int32), weights)
    assert not row.json
    last_weight = format_numbers(row.weights)[1]
    assert (
        f"{last_weight}}}]".encode() in sparse_vectors_json([row], EmbedSparse(inputs="a"), str)[0]
    )


def test_the_strongest_entries_of_a_row_have_no_json_of_the_row() -> None:
    weights = positive_bfloat16_weights()
    (row,) = split_rows([0, 8], np.arange(8, dtype=np.int32), weights[:8])
    assert row.json
    assert keep_largest(row, 1, None).json == b""


@pytest.fixture(scope="module")
def dense(masked_lm: str) -> Any:
    """A dense model: the vector of ``[CLS]``, normalised."""
    transformer = Transformer(masked_lm)
    pooling = Pooling(transformer.get_embedding_dimension(), "cls")
    prompts = {"query": "find ", "named": "dates "}
    return SentenceTransformer(
        modules=[transformer, pooling, Normalize()],
        prompts=prompts,
        device="cpu",
    )


@pytest.fixture(scope="module")
def dense_client(dense: Any) -> Iterator[Client]:
    """A server of the dense model."""
    with serving(Service([Served(dense, "dense", "tiny-dense")])) as client:
        yield client


def token_ids(client: Client, text: str, special: bool = True) -> list[int]:
    """Return the token ids of a text, with or without special tokens."""
    body = {"inputs": text, "add_special_tokens": special}
    (tokens,) = client.post("/tokenize", body).json
    return [token["id"] for token in tokens]


def entries_of(reply: Reply) -> list[dict[int, float]]:
    """Return the weights by index of each row of a reply."""
    assert reply.status == 200, reply.raw
    return [{entry["index"]: entry["value"] for entry in row} for row in reply.json]


def model_output(model: Any, ids: list[int], task: str = "document") -> Any:
    """Return the output of a model for exactly these token ids."""
    input_ids = torch.tensor([ids])
    features = {
        "input_ids": input_ids,
        "attention_mask": torch.ones_like(input_ids),
        "modality": "text",
    }
    with torch.inference_mode():
        return model(features, task=task)


def sparse_entries(model: Any, ids: list[int]) -> dict[int, float]:
    """Return the weights by index that a sparse model computes for token ids."""
    row = model_output(model, ids)["sentence_embedding"].to_dense()[0]
    return {int(index): float(row[index]) for index in row.nonzero().flatten()}


def test_a_sparse_model_encodes_token_ids_without_adding_special_tokens(
    client: Client,
    sparse: Any,
) -> None:
    with_special = token_ids(client, TEXTS[0])
    without_special = token_ids(client, TEXTS[0], special=False)
    mask = sparse.tokenizer.mask_token_id
    word_piece = sparse.tokenizer.convert_tokens_to_ids("##e")
    for ids in (
        with_special,
        without_special,
        without_special[:1],
        [*with_special[:2], mask, *with_special[2:]],
        [word_piece, word_piece],
        [with_special[0]],
    ):
        (entries,) = entries_of(client.post("/embed_sparse", {"inputs": ids}))
        assert entries == pytest.approx(sparse_entries(sparse, ids), rel=2e-2), ids


def test_token_ids_and_texts_are_encoded_together_without_padding(
    client: Client,
    sparse: Any,
) -> None:
    with_special = token_ids(client, TEXTS[0])
    without_special = token_ids(client, TEXTS[0], special=False)
    features_of_batches: list[set[str]] = []

    def record_features(module: Any, args: Any) -> None:
        features_of_batches.append(set(args[0]))

    hook = sparse[0].register_forward_pre_hook(record_features)
    try:
        body = {"inputs": [without_special, TEXTS[0], with_special]}
        by_short_ids, by_text, by_ids = entries_of(client.post("/embed_sparse", body))
    finally:
        hook.remove()
    assert by_text == pytest.approx(by_ids, rel=2e-2)
    assert set(by_short_ids) != set(by_ids)
    assert features_of_batches
    assert all("attention_mask" not in features for features in features_of_batches)


def test_token_vectors_are_those_of_the_model(client: Client, late: Any) -> None:
    rows = client.post("/embed_all", {"inputs": TEXTS}).json
    for row, expected in zip(rows, late.encode_document(TEXTS), strict=True):
        assert np.array(row) == pytest.approx(expected.float().cpu().numpy(), abs=1e-2)


@pytest.mark.parametrize("side", ["document", "query"])
def test_token_vectors_of_token_ids_leave_out_masked_tokens(
    client: Client,
    late: Any,
    side: str,
) -> None:
    inputs = [token_ids(client, TEXTS[1]), token_ids(client, TEXTS[0], special=False)]
    rows = client.post(f"/{side}/embed_all", {"inputs": inputs}).json
    for ids, row in zip(inputs, rows, strict=True):
        output = model_output(late, ids, side)
        expected = output["token_embeddings"][output["attention_mask"].bool()]
        assert np.array(row) == pytest.approx(expected.numpy(), abs=1e-2)


def test_a_dense_model_encodes_token_ids_without_adding_special_tokens(
    dense_client: Client,
    dense: Any,
) -> None:
    inputs = [
        token_ids(dense_client, TEXTS[0]),
        token_ids(dense_client, TEXTS[0], special=False),
    ]
    outputs = [model_output(dense, ids)["sentence_embedding"][0].numpy() for ids in inputs]
    expected = pytest.approx(np.array(outputs), abs=1e-6)
    assert np.array(dense_client.post("/embed", {"inputs": inputs}).json) == expected
    data = dense_client.post("/v1/embeddings", {"input": inputs}).json["data"]
    assert np.array([entry["embedding"] for entry in data]) == expected
    query = dense_client.post("/query/embed", {"inputs": inputs[0]}).json
    assert np.array(query) == pytest.approx(np.array(outputs[:1]), abs=1e-6)


@pytest.mark.parametrize("prompt_name", ["named", "query"])
def test_a_dense_model_puts_a_prompt_before_token_ids_on_request(
    dense_client: Client,
    dense: Any,
    prompt_name: str,
) -> None:
    ids = token_ids(dense_client, TEXTS[0])
    options = {"prompt_name": prompt_name}
    by_ids = dense_client.post("/embed", {"inputs": ids} | options).json
    by_text = dense_client.post("/embed", {"inputs": TEXTS[0]} | options).json
    assert by_ids == by_text
    without_prompt = model_output(dense, ids)["sentence_embedding"].numpy()
    assert np.abs(np.array(by_ids) - without_prompt).max() > 1e-3


@pytest.mark.parametrize(
    ("options", "encode"),
    [
        pytest.param({}, str.encode, id="default"),
        pytest.param({"offsets": "bytes"}, str.encode, id="bytes"),
        pytest.param({"offsets": "characters"}, str, id="characters"),
    ],
)
def test_offsets_of_tokens_are_bytes_or_characters(
    client: Client,
    options: dict[str, str],
    encode: Callable[[str], Any],
) -> None:
    text = "Röd € 😀 csv"
    body = {"inputs": [text], "add_special_tokens": False}
    (tokens,) = client.post("/tokenize", body | options).json
    source = encode(text)
    for token in tokens:
        assert encode(token["text"]) == source[token["start"] : token["stop"]]
    assert tokens[-1]["stop"] == len(source)


def test_a_dense_model_answers_embed_and_the_openai_route(dense_client: Client, dense: Any) -> None:
    expected = dense.encode(TEXTS)
    rows = dense_client.post("/embed", {"inputs": TEXTS}).json
    assert np.array(rows) == pytest.approx(expected, abs=1e-5)
    answer = dense_client.post("/v1/embeddings", {"input": TEXTS, "model": "any"}).json
    rows = [entry["embedding"] for entry in answer["data"]]
    assert np.array(rows) == pytest.approx(expected, abs=1e-5)
    assert answer["object"] == "list"
    assert answer["usage"]["prompt_tokens"] > 9
    assert dense_client.get("/info").json["model_type"] == {"embedding": {"pooling": "cls"}}


def test_the_openai_route_encodes_vectors_as_base64(dense_client: Client, dense: Any) -> None:
    body = {"input": TEXTS[0], "encoding_format": "base64"}
    (entry,) = dense_client.post("/v1/embeddings", body).json["data"]
    vector = np.frombuffer(base64.b64decode(entry["embedding"]), "<f4")
    assert vector == pytest.approx(dense.encode(TEXTS)[0], abs=1e-5)


def test_dimensions_truncates_and_normalises_vectors(dense_client: Client, dense: Any) -> None:
    truncated = dense.encode(TEXTS)[0, :8]
    (vector,) = dense_client.post("/embed", {"inputs": TEXTS[0], "dimensions": 8}).json
    expected = truncated / np.linalg.norm(truncated)
    assert np.array(vector) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        pytest.param("/embed_sparse", {"inputs": "a"}, id="embed_sparse"),
        pytest.param("/rerank", {"query": "a", "texts": ["b"]}, id="rerank"),
    ],
)
def test_a_dense_model_refuses_routes_of_other_models(
    dense_client: Client,
    path: str,
    body: dict[str, Any],
) -> None:
    assert dense_client.post(path, body).status == 424


def test_normalize_false_leaves_out_the_module_that_normalizes(
    dense_client: Client,
    dense: Any,
) -> None:
    without_normalize = SentenceTransformer(modules=list(dense)[:2], device="cpu")
    expected = without_normalize.encode(TEXTS)
    norms = np.linalg.norm(expected, axis=1, keepdims=True)
    assert np.abs(norms - 1).min() > 0.1
    for inputs in (TEXTS, [token_ids(dense_client, text) for text in TEXTS]):
        raw = dense_client.post("/embed", {"inputs": inputs, "normalize": False}).json
        assert np.array(raw) == pytest.approx(expected, abs=1e-5)
        normalised = dense_client.post("/embed", {"inputs": inputs}).json
        assert np.array(normalised) == pytest.approx(expected / norms, abs=1e-5)
    body = {"inputs": TEXTS, "normalize": False, "dimensions": 5}
    truncated = dense_client.post("/embed", body).json
    assert np.array(truncated) == pytest.approx(expected[:, :5], abs=1e-5)


def samples(client: Client) -> dict[str, float]:
    """Return the metrics of a server: the name and labels of each sample, and its value."""
    values: dict[str, float] = {}
    for family in text_string_to_metric_families(client.metrics_text()):
        for sample in family.samples:
            labels = [f"{label}={value}" for label, value in sample.labels.items()]
            # the parser adds a suffix to the names of counters
            name = sample.name.removesuffix("_total")
            values[" ".join([name, *labels])] = sample.value
    return values


@pytest.fixture(scope="module")
def metrics_client(sparse: Any, late: Any) -> Iterator[Client]:
    """A server that has answered three requests to encode and one to rerank, and refused one."""
    models = [Served(sparse, "sparse", "tiny"), Served(late, "multi-vector", "colbert")]
    with serving(Service(models)) as client:
        client.post("/embed_sparse", {"inputs": "a"})
        client.post("/embed_sparse", {"inputs": ["a"]})
        client.post("/embed_sparse", {"inputs": [7, 8]})
        client.post("/embed_sparse", {"inputs": ["a", ""]})
        client.post("/rerank", {"query": "a", "texts": TEXTS})
        yield client


def test_counters_have_the_names_and_labels_of_text_embeddings_inference(
    metrics_client: Client,
) -> None:
    values = samples(metrics_client)
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
    assert {name: values[name] for name in expected} == expected


def test_histograms_have_the_names_and_bounds_of_text_embeddings_inference(
    metrics_client: Client,
) -> None:
    values = samples(metrics_client)
    assert values["te_request_duration_bucket le=+Inf"] == values["te_request_duration_count"]
    for name in ("batch_next_size", "batch_next_tokens", "request_input_length"):
        assert values[f"te_{name}_sum"] > 0
    for subject in ("request", "embed", "predict"):
        for part in ("", "tokenization_", "queue_", "inference_"):
            assert values[f"te_{subject}_{part}duration_sum"] >= 0
        buckets = [name for name in values if name.startswith(f"te_{subject}_duration_bucket")]
        assert len(buckets) == 36
        first_bound = float(buckets[0].rpartition("=")[2])
        assert first_bound == pytest.approx(1.5e-5)


def test_metrics_are_in_the_text_format_without_suffixes(metrics_client: Client) -> None:
    reply = metrics_client.get("/metrics")
    assert reply.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert b"_total" not in reply.raw
    assert b"_created" not in reply.raw


REPEATED_TEXTS = [*TEXTS, "a " * 30, TEXTS[0], "csv", TEXTS[1], TEXTS[0]]


def test_equal_texts_are_ranked_with_equal_scores_in_the_order_of_the_request(
    client: Client,
) -> None:
    body = {"query": "read csv", "texts": REPEATED_TEXTS}
    ranking = client.post("/rerank", body).json
    scores = {entry["index"]: entry["score"] for entry in ranking}
    assert len(scores) == len(REPEATED_TEXTS)
    assert scores[0] == scores[4] == scores[7]
    assert scores[1] == scores[6]
    ranks = {entry["index"]: rank for rank, entry in enumerate(ranking)}
    assert ranks[0] < ranks[4] < ranks[7]
    assert ranks[1] < ranks[6]


def test_equal_pairs_have_equal_scores(client: Client) -> None:
    body = {"queries": ["csv"] * 3, "documents": ["a", TEXTS[1], "a"]}
    pairs = client.post("/score", body).json["data"]
    assert pairs[0]["score"] == pairs[2]["score"]


def test_equal_texts_of_a_request_are_encoded_once(client: Client) -> None:
    encoded_before = samples(client)["te_batch_next_size_sum"]
    rows = client.post("/embed_sparse", {"inputs": REPEATED_TEXTS}).json
    assert rows[0] == rows[4] == rows[7]
    n_encoded = samples(client)["te_batch_next_size_sum"] - encoded_before
    assert n_encoded == len(set(REPEATED_TEXTS))


def test_the_description_of_routes_is_served_at_both_addresses(keyed_client: Client) -> None:
    description = keyed_client.get("/openapi.json").json
    assert keyed_client.get("/api-doc/openapi.json").json == description


def test_the_routes_are_described_on_a_page_without_scripts_and_links(
    keyed_client: Client,
) -> None:
    page = keyed_client.get("/docs")
    assert keyed_client.get("/page.css").status == 200
    assert page.status == 200
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    text = page.raw.decode()
    assert "<code>/embed_sparse</code>" in text
    assert html.escape('offsets: "bytes" | "characters" = "bytes"') in text
    assert "<script" not in text
    assert "://" not in text
    assert "default-src 'none'" in str(page.headers)


PREFLIGHT_HEADERS = {
    "Origin": SITE,
    "Access_Control_Request_Method": "POST",
    "Access_Control_Request_Headers": "authorization",
}


def test_other_sites_may_not_read_answers_by_default(client: Client) -> None:
    assert client.request("OPTIONS", "/embed_sparse", **PREFLIGHT_HEADERS).status == 405
    reply = client.request("GET", "/info", Origin=SITE)
    assert "access-control-allow-origin" not in reply.headers


@pytest.mark.parametrize(
    ("origins", "allowed_origin", "allowed_for_other_site"),
    [
        pytest.param([SITE], SITE, None, id="one site"),
        pytest.param(["*"], "*", "*", id="all sites"),
    ],
)
def test_named_sites_may_read_answers(
    sparse: Any,
    origins: list[str],
    allowed_origin: str,
    allowed_for_other_site: str | None,
) -> None:
    service = Service([Served(sparse, "sparse", "tiny")])
    with serving(service, api_key="sesam", origins=origins) as client:
        preflight = client.request("OPTIONS", "/embed_sparse", **PREFLIGHT_HEADERS)
        without_key = client.request("GET", "/info", Origin=SITE)
        other_site = client.request("GET", "/health", Origin="http://evil.example")
    assert preflight.status == 200
    assert preflight.headers["access-control-allow-origin"] == allowed_origin
    assert "authorization" in preflight.headers["access-control-allow-headers"].lower()
    allowed_methods = preflight.headers["access-control-allow-methods"].split(", ")
    assert {"GET", "POST", "PUT", "DELETE"} <= set(allowed_methods)
    assert without_key.status == 401
    assert without_key.headers["access-control-allow-origin"] == allowed_origin
    assert without_key.headers["access-control-expose-headers"] == "x-truncated-inputs"
    assert other_site.headers.get("access-control-allow-origin") == allowed_for_other_site


def test_origins_without_a_scheme_are_refused(sparse: Any) -> None:
    service = Service([Served(sparse, "sparse", "tiny")])
    with pytest.raises(ValueError, match=r"origins: expected \* or an origin such as"):
        create_app(service, None, origins=["a.org"])


def test_similarity_is_the_cosine_of_the_vectors_of_the_model(client: Client, sparse: Any) -> None:
    rows = sparse.encode_document(TEXTS).to_dense().float().cpu().numpy().astype(np.float64)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    expected = (rows[1:] @ rows[0]).tolist()
    reply = client.post("/similarity", similar(*TEXTS))
    assert reply.status == 200
    assert reply.json == pytest.approx(expected, abs=2e-2)


def test_the_similarity_of_equal_texts_is_1(client: Client) -> None:
    inputs = similar("a b", "a b")["inputs"]
    cosine = client.post("/query/similarity", {"inputs": inputs}).json
    assert cosine == pytest.approx([1.0], abs=1e-5)


def test_cosines_of_dense_vectors_match_hand_computed_numbers() -> None:
    vectors = [np.array(row, np.float32) for row in ([3, 4], [4, 3], [0, 0])]
    assert dense_cosines(vectors[0], vectors[1:]) == pytest.approx([24 / 25, 0.0])


def sparse_row(entries: dict[int, float]) -> Row:
    """Return a sparse row with these weights by index."""
    indices = np.array(list(entries), np.int32)
    return Row(indices, np.array(list(entries.values()), np.float32))


def test_cosines_of_sparse_vectors_match_hand_computed_numbers() -> None:
    query = sparse_row({2: 3, 7: 4})
    document = sparse_row({1: 4, 7: 3})
    empty = sparse_row({})
    rows = [query, document, empty, query]
    assert sparse_cosines(rows[0], rows[1:]) == pytest.approx([12 / 25, 0.0, 1.0])


def test_vertex_answers_each_instance_as_its_route_does(client: Any) -> None:
    encode = {"inputs": TEXTS[0], "top_k": 4}
    rerank = {"query": "csv", "texts": TEXTS, "return_text": True}
    body = {"instances": [encode, rerank, {"inputs": TEXTS[1:]}], "parameters": {}}
    encoded, ranking, several = client.post("/vertex", body).json["predictions"]
    assert encoded == client.post("/embed_sparse", encode).json
    expected_ranking = client.post("/rerank", rerank).json
    assert [entry["index"] for entry in ranking] == [entry["index"] for entry in expected_ranking]
    assert len(several) == 2


def test_vertex_takes_up_no_permits_after_it_was_refused(sparse: Any) -> None:
    limits = Limits(max_concurrent_requests=4, max_client_batch_size=4)
    with serving(Service([Served(sparse, "sparse", "tiny")], limits)) as client:
        instances = [{"inputs": ["a"] * 3}, {"inputs": ["b"] * 3}]
        reply = client.post("/vertex", {"instances": instances})
        assert reply.status == 429
        assert reply.json["error_type"] == "Overloaded"
        assert reply.headers["retry-after"] == "1"
        assert client.post("/embed_sparse", {"inputs": ["a"] * 4}).status == 200


@pytest.fixture(scope="module")
def limited_client(two_sided: Any, masked_lm: str) -> Iterator[Client]:
    """A server of an inference-free sparse model that reads 64 tokens, and a late-interaction model.

    The latter expands queries to 16 tokens and reads 32 tokens of documents.
    """
    transformer = Transformer(
        masked_lm,
        query_expansion={"strategy": "fixed", "length": 16},
        document_length=32,
    )
    late = MultiVectorEncoder(modules=[transformer, MultiVectorMask()], device="cpu")
    models = [Served(two_sided, "sparse", "two-sided"), Served(late, "multi-vector", "late")]
    with serving(Service(models)) as client:
        yield client


# texts of as many tokens, without special tokens
TEXTS_BY_LENGTH = [" ".join("a" * count) for count in (1, 62, 63, 64, 65, 90)]


@pytest.mark.parametrize(
    ("path", "body", "n_truncated"),
    [
        pytest.param(
            "/document/embed_sparse",
            {"inputs": TEXTS_BY_LENGTH},
            4,
            id="two of the 64 tokens of documents are special",
        ),
        pytest.param(
            "/query/embed_sparse",
            {"inputs": TEXTS_BY_LENGTH},
            2,
            id="queries have no special tokens",
        ),
        pytest.param(
            "/document/embed_sparse",
            {"inputs": TEXTS_BY_LENGTH[:2]},
            0,
            id="texts within the limit",
        ),
        pytest.param(
            "/document/embed_sparse",
            {"inputs": "a " * 60 + " " * 20_000},
            1,
            id="more characters than are tokenized",
        ),
        pytest.param(
            "/document/embed_sparse",
            {"inputs": [list(range(10, 75)), list(range(10, 74))]},
            1,
            id="token ids",
        ),
        pytest.param(
            "/rerank",
            {"query": "a " * 15, "texts": ["a " * 30, "a " * 31]},
            2,
            id="query longer than its expansion, and a document",
        ),
    ],
)
def test_truncated_inputs_are_counted_in_a_header(
    limited_client: Client,
    path: str,
    body: dict[str, Any],
    n_truncated: int,
) -> None:
    reply = limited_client.post(path, body)
    assert reply.status == 200
    assert reply.headers["x-truncated-inputs"] == str(n_truncated)


def test_replies_without_encoding_have_no_count_of_truncated_inputs(limited_client: Client) -> None:
    for reply in (
        limited_client.get("/info"),
        limited_client.get("/health"),
        limited_client.post("/tokenize", {"inputs": "a " * 90}),
    ):
        assert reply.status == 200
        assert "x-truncated-inputs" not in reply.headers


def test_a_query_longer_than_its_expansion_is_refused_without_truncation(
    limited_client: Client,
) -> None:
    body = {"inputs": "a " * 15, "truncate": False}
    assert limited_client.post("/query/embed_all", body).status == 422


def test_info_of_a_server_of_two_models_has_the_limit_of_the_first(limited_client: Client) -> None:
    assert limited_client.get("/query/info").json["max_input_length"] == 64
