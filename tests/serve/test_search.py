"""Tests of the routes of an index: Anserini's GET, the POST with its stages, and Qdrant."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer

from tests.retrieval.qdrant_over_http import OverHttp
from tests.serve.running import HELD_SECONDS, Client, serving
from tests.waiting import WAIT_SECONDS, wait_until
from tilefold import retrieval as r
from tilefold.recipes.backbone import minilm_path
from tilefold.retrieval.data.collection import Collection
from tilefold.retrieval.index.qdrant import Documents, Layout, QdrantCollection
from tilefold.retrieval.index.qdrant.index import QdrantIndex
from tilefold.serve import service
from tilefold.serve.models import Served
from tilefold.serve.searchable import Searchable
from tilefold.serve.service import Service
from tilefold.serve.settings import Limits

QUERY = "how do I work with csv files"
PATH = "/v1/papers/search?query=csv+files&hits=3"


SEARCH_ROUTE = "/v1/small/search"


@pytest.fixture(scope="module")
def searchable(
    sparse: Any,
    late: Any,
    collection: Collection,
    tmp_path_factory: pytest.TempPathFactory,
) -> Searchable:
    """An index of sparse vectors with BM25, token vectors and the texts of the collection."""
    folder = tmp_path_factory.mktemp("index")
    r.encode_collection(sparse, collection.contents(), folder / "vectors")
    r.encode_tokens(late, collection.contents(), folder / "tokens")
    vectors = r.read_vectors(folder / "vectors")
    return Searchable(
        "small",
        r.build_index(vectors, "exact"),
        Served(sparse, "sparse", "tiny"),
        collection.documents,
        vectors,
        r.BM25Index.build(collection.contents()),
        Served(late, "multi-vector", "colbert"),
        r.open_tokens(folder / "tokens"),
    )


@pytest.fixture(scope="module")
def models(searchable: Searchable) -> list[Served]:
    """The sparse and the late-interaction model of the index."""
    return [model for model in (searchable.encoder, searchable.late) if model]


@pytest.fixture(scope="module")
def client(searchable: Searchable, models: list[Served]) -> Iterator[Client]:
    """A server of the index."""
    with serving(Service(models, searchable=searchable)) as running:
        yield running


def scores_of(reply: Any) -> dict[str, float]:
    """Return the score of each document of a reply, in order of rank."""
    return {entry["docid"]: entry["score"] for entry in reply.json["candidates"]}


def first_entries(scores: dict[str, float], count: int) -> dict[str, float]:
    """Return the first documents of a ranking."""
    return dict(list(scores.items())[:count])


def search(client: Client, **options: Any) -> Any:
    """Search the index "small" for 16 documents, with further fields of the request."""
    return client.post(SEARCH_ROUTE, {"query": QUERY, "hits": 16} | options)


@pytest.fixture(scope="module")
def runs(searchable: Any, sparse: Any) -> dict[str, dict[str, float]]:
    """The rankings that the functions of tilefold.retrieval compute for the query."""
    queries = r.encode_queries(sparse, {"q": QUERY})
    sparse_run = r.hits_to_run(queries, searchable.index.search(queries, 16))
    words_run = searchable.words.search({"q": QUERY}, 16)
    query_tokens = r.encode_texts(searchable.late.model, {"q": QUERY}, kind="query")
    return {
        "sparse": sparse_run["q"],
        "words": words_run["q"],
        "rrf": r.reciprocal_rank_fusion([sparse_run, words_run])["q"],
        "interpolated": r.interpolate([sparse_run, words_run], [0.7, 0.3])["q"],
        "late": r.rerank(sparse_run, query_tokens, searchable.store, depth=100)["q"],
    }


def test_a_get_answers_as_anserini_does(client: Client, collection: Collection, runs: Any) -> None:
    reply = client.get("/v1/small/search?query=how+do+I+work+with+csv+files&hits=3")
    assert reply.status == 200
    assert set(reply.json) == {"api", "index", "query", "candidates"}
    assert reply.json["api"] == "v1"
    assert reply.json["index"] == "small"
    assert reply.json["query"] == {"text": QUERY}
    assert scores_of(reply) == pytest.approx(first_entries(runs["sparse"], 3), rel=1e-4)
    for rank, entry in enumerate(reply.json["candidates"], start=1):
        document = collection.documents[entry["docid"]]
        assert set(entry) == {"docid", "score", "rank", "doc"}
        assert entry["rank"] == rank
        assert entry["doc"] == {"id": document.id, "title": document.title, "text": document.text}


def test_a_get_without_parse_answers_documents_as_text(client: Client) -> None:
    candidates = client.get("/v1/small/search?query=csv&parse=false").json["candidates"]
    assert len(candidates) == 10
    document = json.loads(candidates[0]["doc"])
    assert document["id"] == candidates[0]["docid"]


def test_a_document_is_answered_by_its_id(client: Client, collection: Collection) -> None:
    document = {"id": "d3", "title": "module3", "text": collection.documents["d3"].text}
    answer = client.get("/v1/small/doc/d3").json
    assert answer == {"api": "v1", "index": "small", "docid": "d3", "doc": document}


@pytest.mark.parametrize(
    ("path", "expected_status", "message"),
    [
        pytest.param(
            "/v1/small/search",
            400,
            "Parameter 'query' is required",
            id="no query",
        ),
        pytest.param(
            "/v1/small/search?query=%20",
            400,
            "Parameter 'query' is required",
            id="blank query",
        ),
        pytest.param(
            "/v1/small/search?query=a&hits=0",
            400,
            "Parameter 'hits' must be a positive integer",
            id="no hits",
        ),
        pytest.param(
            "/v1/small/search?query=a&hits=" + "9" * 5000,
            400,
            "Parameter 'hits' must be a positive integer",
            id="number of too many digits",
        ),
        pytest.param(
            "/v1/small/search?query=a&hits=1001",
            422,
            "`hits` expected at most 1000, got 1001",
            id="too many hits",
        ),
        pytest.param(
            "/v1/small/search?query=a&parse=maybe",
            400,
            "Parameter 'parse'",
            id="parse that is no truth value",
        ),
        pytest.param(
            "/v1/small/search?query=a&where=lang",
            422,
            "unknown query parameter 'where', expected one of query, hits, parse; the body of a "
            "POST to this path takes `where`",
            id="parameter of a POST",
        ),
        pytest.param(
            "/v1/small/search?query=a&section=onco",
            422,
            "unknown query parameter 'section', expected one of query, hits, parse",
            id="unknown parameter",
        ),
        pytest.param(
            "/v1/small/doc/d1?parse=true",
            422,
            "unknown query parameter 'parse', expected none",
            id="parameter of a document",
        ),
        pytest.param(
            "/v1/indexes?name=small",
            422,
            "unknown query parameter 'name', expected none",
            id="parameter of the list of indexes",
        ),
        pytest.param(
            "/v1/other/search?query=a",
            404,
            "the index of this server is 'small'",
            id="unknown index",
        ),
        pytest.param(
            "/v1/small/doc/none",
            404,
            "there is no document 'none'",
            id="unknown document",
        ),
        pytest.param(
            "/v1/small/doc/..%2F..%2Fetc%2Fpasswd",
            404,
            "there is no document",
            id="document outside of the folder",
        ),
    ],
)
def test_a_get_with_a_wrong_address_is_refused(
    client: Client,
    path: str,
    expected_status: int,
    message: str,
) -> None:
    reply = client.get(path)
    assert reply.status == expected_status
    assert message in reply.json["error"]


def test_a_post_ranks_by_sparse_vectors(client: Client, runs: Any) -> None:
    reply = search(client)
    assert scores_of(reply) == pytest.approx(runs["sparse"], rel=1e-4)
    assert "columns" not in reply.json
    assert set(reply.json["milliseconds"]) == {"encode", "search"}


def test_a_post_fuses_rankings_as_the_functions_do(client: Client, runs: Any) -> None:
    fused = search(client, fusion=True)
    assert list(scores_of(fused)) == list(runs["rrf"])
    interpolated = search(client, fusion={"method": "interpolation", "weight": 0.3})
    assert scores_of(interpolated) == pytest.approx(runs["interpolated"], rel=1e-3)


def test_a_post_reranks_as_the_functions_do(client: Client, runs: Any) -> None:
    reply = search(client, rerank=True)
    assert scores_of(reply) == pytest.approx(runs["late"], abs=2e-2)
    assert set(reply.json["milliseconds"]) == {"encode", "search", "rerank"}
    without_weight = search(client, rerank={"weight": 0.0})
    assert list(scores_of(without_weight)) == list(runs["sparse"])


def test_only_documents_within_the_depth_are_reranked(client: Client, runs: Any) -> None:
    reply = search(client, rerank={"depth": 2}, hits=4, explain=True)
    candidates = reply.json["candidates"]
    reranked = {entry["docid"] for entry in candidates[:2]}
    assert reranked == set(first_entries(runs["sparse"], 2))
    has_late_stage = ["late" in entry["explanation"]["stages"] for entry in candidates]
    assert has_late_stage == [True, True, False, False]


def test_all_stages_work_together(client: Client) -> None:
    reply = search(client, fusion=True, prf=True, rerank={"depth": 5}, explain=True)
    stages = set(reply.json["candidates"][0]["explanation"]["stages"])
    assert stages <= {"sparse", "words", "fusion", "late"}


def test_columns_do_not_change_the_ranking(client: Client) -> None:
    with_columns = search(client, fusion=True, columns=True)
    without_columns = search(client, fusion=True)
    assert with_columns.json["candidates"] == without_columns.json["candidates"]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="one stage"),
        pytest.param({"fusion": True}, id="fusion"),
        pytest.param({"rerank": {"depth": 2}}, id="reranking"),
    ],
)
def test_columns_are_the_rankings_of_single_methods(
    client: Client,
    runs: Any,
    options: dict[str, Any],
) -> None:
    columns = search(client, hits=4, columns=True, **options).json["columns"]
    assert set(columns) == {"sparse", "words", "late"}
    for method, column in columns.items():
        expected = first_entries(runs[method], 4)
        scores = {entry["docid"]: entry["score"] for entry in column}
        assert scores == pytest.approx(expected, abs=5e-2)
        assert [entry["rank"] for entry in column] == list(range(1, len(expected) + 1))
        for entry in column:
            number = entry["docid"].removeprefix("d")
            assert entry["title"] == f"module{number}"


def test_feedback_expands_the_query_as_the_functions_do(
    client: Client,
    searchable: Any,
    sparse: Any,
) -> None:
    options = {"method": "rocchio", "depth": 2, "top_terms": 20}
    reply = search(client, hits=5, prf=options, explain=True)
    queries = r.encode_queries(sparse, {"q": QUERY})
    first_run = r.hits_to_run(queries, searchable.index.search(queries, 5))
    feedback = r.Feedback("rocchio", depth=2, top_terms=20)
    expanded = r.expand_sparse(queries, searchable.vectors, first_run, feedback)
    expected = r.hits_to_run(expanded, searchable.index.search(expanded, 5))["q"]
    assert scores_of(reply) == pytest.approx(expected, rel=1e-3)


def test_the_terms_of_an_expanded_query_are_explained(client: Client) -> None:
    options = {"method": "rocchio", "depth": 2, "top_terms": 20}
    terms = search(client, hits=5, prf=options, explain=True).json["query"]["terms"]
    weights = [term["weight"] for term in terms]
    assert len(weights) <= 20
    assert weights == sorted(weights, reverse=True)
    assert {term["feedback"] for term in terms} <= {True, False}


def test_an_explanation_names_the_terms_of_the_query(client: Client, sparse: Any) -> None:
    query = search(client, explain=True, hits=3).json["query"]
    terms = {term["id"]: term for term in query["terms"]}
    ids_of_text = set(sparse.tokenizer(QUERY, add_special_tokens=False)["input_ids"])
    for term_id, term in terms.items():
        assert term["expanded"] == (term_id not in ids_of_text)
        assert term["term"] == sparse.tokenizer.convert_ids_to_tokens(term_id)
    for start, stop, term_id in query["marks"]:
        assert term_id in ids_of_text
        assert QUERY[start:stop].lower() == terms[term_id]["term"].removeprefix("##")


def test_contributions_of_terms_add_up_to_the_score(client: Client) -> None:
    for entry in search(client, explain=True, hits=3).json["candidates"]:
        terms = entry["explanation"]["terms"]
        contribution_of_special_tokens = entry["score"] - sum(
            term["contribution"] for term in terms
        )
        assert contribution_of_special_tokens >= -1e-3
        for term in terms:
            assert term["share"] == pytest.approx(term["contribution"] / entry["score"])
        assert entry["explanation"]["stages"]["sparse"]["rank"] == entry["rank"]


def test_marks_of_an_explanation_point_to_terms_in_the_text(client: Client) -> None:
    for entry in search(client, explain=True, hits=3).json["candidates"]:
        terms = {term["id"]: term for term in entry["explanation"]["terms"]}
        for start, stop, term_id in entry["explanation"]["marks"]["text"]:
            term = terms[term_id]
            marked = entry["doc"]["text"][start:stop].lower()
            assert marked == term["term"].removeprefix("##")
            assert term["expanded"] is False


@pytest.fixture(scope="module")
def plain_client(searchable: Searchable, models: list[Served]) -> Iterator[Client]:
    """A server of the sparse index alone, without texts, vectors, BM25 and token vectors."""
    plain = Searchable("plain", searchable.index, searchable.encoder)
    with serving(Service(models[:1], searchable=plain)) as running:
        yield running


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param({"explain": True}, "--vectors", id="explanations without vectors"),
        pytest.param({"prf": True}, "--vectors", id="feedback without vectors"),
        pytest.param({"fusion": True}, "--bm25", id="fusion without BM25"),
        pytest.param({"rerank": True}, "--tokens", id="reranking without token vectors"),
        pytest.param({"hit": 3}, "`hit`: Extra inputs", id="unknown field"),
        pytest.param({"prf": {"method": "bo1"}}, "`prf.", id="feedback from words"),
    ],
)
def test_a_stage_that_the_server_lacks_is_refused_with_the_option(
    plain_client: Client,
    options: dict[str, Any],
    message: str,
) -> None:
    reply = plain_client.post("/v1/plain/search", {"query": "csv"} | options)
    assert reply.status == 422
    assert message in reply.json["error"]


def test_an_empty_query_is_refused(plain_client: Client) -> None:
    reply = plain_client.post("/v1/plain/search", {"query": ""})
    assert "`query` cannot be empty" in reply.json["error"]


def test_a_server_without_texts_answers_ids(plain_client: Client) -> None:
    reply = plain_client.get("/v1/plain/search?query=csv")
    assert reply.json["candidates"][0]["doc"] is None
    assert "--data" in plain_client.get("/v1/plain/doc/d1").json["error"]


def test_indexes_lists_what_a_server_lacks(plain_client: Client) -> None:
    (index,) = plain_client.get("/v1/indexes").json["indexes"]
    assert index["name"] == "plain"
    assert index["backend"] == "exact"
    assert index["documents"] == 16
    assert set(index["features"].values()) == {False}


def test_a_bm25_index_needs_no_model(
    searchable: Any,
    collection: Collection,
    runs: Any,
) -> None:
    words = Searchable("words", searchable.words, documents=collection.documents)
    with serving(Service([], searchable=words)) as client:
        reply = client.get("/v1/words/search?query=how+do+I+work+with+csv+files&hits=16")
        assert scores_of(reply) == pytest.approx(runs["words"])
        for path in ("/embed_sparse", "/tokenize"):
            assert client.post(path, {"inputs": "a"}).status == 424
        assert client.get("/info").status == 424
        assert client.get("/health").status == 200


@pytest.fixture(scope="module")
def metadata(searchable: Searchable) -> dict[str, dict[str, Any]]:
    """Metadata of each document: its language, which alternates, and its position."""
    return {
        name: {"lang": "de" if position % 2 else "en", "n": position}
        for position, name in enumerate(searchable.documents)
    }


@pytest.fixture(scope="module")
def filter_client(
    searchable: Searchable,
    models: list[Served],
    metadata: dict[str, dict[str, Any]],
) -> Iterator[Client]:
    """A server of an index with metadata."""
    assert searchable.vectors is not None
    contents = {name: document.contents for name, document in searchable.documents.items()}
    filterable = replace(
        searchable,
        index=r.build_index(searchable.vectors, metadata=metadata),
        words=r.BM25Index.build(contents, metadata=metadata),
    )
    with serving(Service(models, searchable=filterable)) as client:
        yield client


def test_every_stage_ranks_only_documents_that_match(
    filter_client: Client,
    metadata: dict[str, dict[str, Any]],
) -> None:
    german = {name for name, fields in metadata.items() if fields["lang"] == "de"}
    reply = search(
        filter_client,
        prf=True,
        fusion=True,
        rerank=True,
        columns=True,
        where={"lang": "de"},
    )
    assert set(scores_of(reply)) == german
    for column in reply.json["columns"].values():
        assert {entry["docid"] for entry in column} <= german


def test_documents_that_match_where_not_are_left_out(
    filter_client: Client,
    metadata: dict[str, dict[str, Any]],
) -> None:
    reply = search(filter_client, where_not={"n": {"gte": 3}})
    assert set(scores_of(reply)) == set(list(metadata)[:3])


@pytest.mark.parametrize(
    "condition",
    [
        pytest.param({"where": {"n": {"lt": 2**53 + 1}}}, id="where"),
        pytest.param({"where_not": {"n": 2**53 + 1}}, id="where_not"),
    ],
)
def test_integers_that_floats_cannot_hold_are_compared(
    filter_client: Client,
    metadata: dict[str, dict[str, Any]],
    condition: dict[str, Any],
) -> None:
    reply = search(filter_client, **condition)
    assert set(scores_of(reply)) == set(metadata), reply.json


def test_indexes_lists_that_documents_can_be_filtered(filter_client: Client) -> None:
    (index,) = filter_client.get("/v1/indexes").json["indexes"]
    assert index["features"]["where"] is True


@pytest.mark.parametrize(
    ("where", "message"),
    [
        pytest.param(
            {"n": 2**64},
            "where: expected Unicode text or a 64-bit integer for 'n'",
            id="integer of more than 64 bits",
        ),
        pytest.param(
            {"n": {"lt": 10**400}},
            "where: expected numbers under gt, gte, lt, lte for 'n'",
            id="bound that no float can hold",
        ),
        pytest.param(
            {"land": "de"},
            "where: expected a field of the index, lang (text), n (integer); got 'land'",
            id="unknown field",
        ),
        pytest.param(
            {"n": {"above": 3}},
            "where: expected numbers under gt, gte, lt, lte",
            id="unknown comparison",
        ),
        pytest.param({}, "at least one condition", id="no condition"),
    ],
)
def test_a_condition_that_makes_no_sense_is_refused(
    filter_client: Client,
    where: dict[str, Any],
    message: str,
) -> None:
    reply = filter_client.post(SEARCH_ROUTE, {"query": QUERY, "where": where})
    assert reply.status == 422
    assert message in reply.json["error"]


def test_candidates_without_stored_token_vectors_are_encoded(
    searchable: Any,
    models: list[Served],
    runs: Any,
) -> None:
    with serving(Service(models, searchable=replace(searchable, store=None))) as client:
        reply = search(client, rerank=True)
    assert scores_of(reply) == pytest.approx(runs["late"], abs=5e-2)


def test_as_many_candidates_can_be_encoded_as_requests_may_run(
    searchable: Any,
    models: list[Served],
) -> None:
    # one of the 8 inputs is the query
    limits = Limits(max_concurrent_requests=8, max_client_batch_size=8)
    service = Service(models, limits, searchable=replace(searchable, store=None))
    with serving(service) as client:
        within_limit = client.post(SEARCH_ROUTE, {"query": QUERY, "rerank": {"depth": 7}})
        above_limit = client.post(SEARCH_ROUTE, {"query": QUERY, "rerank": {"depth": 8}})
        with_columns = client.post(SEARCH_ROUTE, {"query": QUERY, "columns": True})
    assert within_limit.status == 200, within_limit.json
    assert above_limit.status == 422, above_limit.json
    assert "`rerank.depth` expected at most 7, got 8" in above_limit.json["error"]
    assert len(with_columns.json["columns"]["late"]) >= 7


def test_the_schema_names_every_field(client: Client) -> None:
    paths = client.get("/openapi.json").json["paths"]
    operation = paths["/v1/{index}/search"]["post"]
    schema = operation["requestBody"]["content"]["application/json"]["schema"]
    fields = {
        "query",
        "hits",
        "parse",
        "by",
        "fusion",
        "prf",
        "rerank",
        "explain",
        "columns",
        "where",
        "where_not",
    }
    assert set(schema["properties"]) == fields
    assert "$ref" not in json.dumps(paths)
    assert "/v1/{index}/doc/{docid}" in paths


def search_with_feedback(client: Client, weights: dict[str, float]) -> Any:
    """Search the index "small" with feedback of these weights."""
    feedback = {"method": "rocchio"} | weights
    return client.post(SEARCH_ROUTE, {"query": QUERY, "prf": feedback})


@pytest.mark.parametrize(
    ("weight", "options"),
    [
        pytest.param("alpha", {"alpha": 1e38}, id="alpha within float32"),
        pytest.param("alpha", {"alpha": 1e300}, id="alpha beyond float32"),
        pytest.param("beta", {"beta": 1001}, id="beta"),
        pytest.param("gamma", {"gamma": 1e5, "bottom": 2}, id="gamma"),
    ],
)
def test_weights_of_feedback_above_1000_are_refused(
    client: Client,
    weight: str,
    options: dict[str, float],
) -> None:
    reply = search_with_feedback(client, options)
    assert reply.status == 422
    message = f"{weight}`: Input should be less than or equal to 1000"
    assert message in reply.json["error"]


@pytest.mark.parametrize(
    "weights",
    [
        pytest.param({"alpha": 1000, "beta": 1000}, id="largest"),
        pytest.param({"alpha": 1e-300, "beta": 1e-300}, id="below float32"),
        pytest.param({"alpha": 0, "beta": 1}, id="without the query"),
    ],
)
def test_extreme_weights_of_feedback_are_allowed(client: Client, weights: dict[str, float]) -> None:
    assert search_with_feedback(client, weights).status == 200


def test_feedback_that_exceeds_float32_is_refused_and_not_logged(
    searchable: Any,
    models: list[Served],
    caplog: Any,
) -> None:
    data = searchable.vectors.data * np.float32(1e37)
    heavy_vectors = replace(searchable.vectors, data=data)
    service = Service(models, searchable=replace(searchable, vectors=heavy_vectors))
    with serving(service) as client:
        reply = search_with_feedback(client, {"beta": 1000})
    assert reply.status == 422
    message = "`prf`: alpha, beta, gamma: expected weights that keep the entries of a query below"
    assert message in reply.json["error"]
    assert not caplog.records


@contextmanager
def serving_from_qdrant(
    sparse: Any,
    vectors: r.SparseVectors,
    limits: Limits | None = None,
    **options: Any,
) -> Iterator[tuple[Client, OverHttp]]:
    """Serve an index that is on a Qdrant server.

    Args:
        sparse: model that encodes queries.
        vectors: documents of the index.
        limits: limits of the service.
        options: further arguments of ``QdrantCollection.server``.

    Yields:
        A client of the service, and the Qdrant server.
    """
    qdrant = OverHttp()
    r.build_index(vectors, "qdrant", url=qdrant.url, collection="papers")
    index = QdrantIndex(QdrantCollection.server(qdrant.url, "papers", **options))
    model = Served(sparse, "sparse", "tiny")
    searchable = Searchable("papers", index, model)
    with serving(Service([model], limits, searchable=searchable)) as client:
        yield client, qdrant
    qdrant.stop()


def test_an_embedded_index_answers_requests_that_come_together(
    sparse: Any,
    vectors: r.SparseVectors,
) -> None:
    queries = r.encode_queries(sparse, {"q": "csv files"})
    hits = r.build_index(vectors).search(queries, 3)[0]
    expected = {hit.id: hit.score for hit in hits}
    model = Served(sparse, "sparse", "tiny")
    searchable = Searchable("papers", r.build_index(vectors, "qdrant"), model)
    with serving(Service([model], searchable=searchable)) as client:
        with ThreadPoolExecutor(8) as pool:
            replies = list(pool.map(client.get, [PATH] * 24))
        (index,) = client.get("/v1/indexes").json["indexes"]
    assert index["documents"] == len(vectors)
    for reply in replies:
        assert reply.status == 200
        assert scores_of(reply) == pytest.approx(expected, rel=1e-4)


def test_searches_get_503_while_qdrant_fails_and_other_requests_are_answered(
    sparse: Any,
    vectors: r.SparseVectors,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    released = threading.Event()
    arrived: list[Any] = []
    run_search = Service.run_search

    async def note_and_run(service: Service, search: Any, *arguments: Any) -> Any:
        arrived.append(search)
        return await run_search(service, search, *arguments)

    def fail_when_released(method: str, path: str) -> int:
        assert released.wait(HELD_SECONDS)
        return 503

    options = {"patience": 0, "timeout": HELD_SECONDS}
    with serving_from_qdrant(sparse, vectors, **options) as (client, qdrant):
        assert client.get(PATH).status == 200
        monkeypatch.setattr(Service, "run_search", note_and_run)
        qdrant.seen.clear()
        qdrant.fault = fail_when_released
        with ThreadPoolExecutor(16) as pool:
            # more searches than the service has threads for
            paths = [PATH] * 12 + ["/v1/indexes"]
            searches = [pool.submit(client.get, path) for path in paths]
            wait_until(lambda: len(arrived) == len(searches))
            wait_until(lambda: len(qdrant.seen) == service._MIN_SEARCHES)
            assert client.post("/embed_sparse", {"inputs": "csv"}).status == 200
            assert not any(search.done() for search in searches)
            released.set()
        for pending in searches:
            reply = pending.result()
            assert reply.status == 503
            assert reply.json["error_type"] == "Unhealthy"
            assert "does not answer" in reply.json["error"]
            assert "127.0.0.1" not in reply.json["error"]
        # those that waited for a thread did not ask a server that does not answer
        assert len(qdrant.seen) == service._MIN_SEARCHES
        qdrant.fault = None
        assert client.get(PATH).status == 200


def test_the_service_ends_while_qdrant_does_not_answer(
    sparse: Any,
    vectors: Any,
    monkeypatch: Any,
    caplog: Any,
) -> None:
    monkeypatch.setattr(service, "_LEAVE_SECONDS", 0.3)
    asked = threading.Event()
    released = threading.Event()

    def wait_for_release(method: str, path: str) -> None:
        asked.set()
        released.wait(HELD_SECONDS)

    limits = Limits(shutdown_seconds=0.5)
    with ThreadPoolExecutor(1) as pool:
        options = {"timeout": HELD_SECONDS}
        with serving_from_qdrant(sparse, vectors, limits, **options) as (client, qdrant):
            qdrant.fault = wait_for_release
            pending = pool.submit(client.get, PATH)
            assert asked.wait(WAIT_SECONDS)
        # the service has ended, and the search still waits for Qdrant
        search_threads = [
            thread
            for thread in threading.enumerate()
            if thread.name.startswith("tilefold-searcher")
        ]
        assert search_threads
        assert all(thread.daemon for thread in search_threads), "the process should not wait"
        assert pending.result().status == 503
        assert pending.result().json["error"] == "the service is closing"
        assert not [record for record in caplog.records if record.exc_info]
    released.set()


def add_document(index: Any, vectors: r.SparseVectors, document_id: str) -> None:
    """Add a document to an index in Qdrant: the first of the vectors with twice its weights."""
    terms, weights = vectors.row(0)
    entries = dict(zip(terms.tolist(), (2 * weights).tolist(), strict=True))
    rows = r.SparseVectors.from_rows(
        {document_id: entries},
        vectors.vocab_size,
        vectors.fingerprint,
    )
    index.collection.upsert(Documents([document_id], rows))


def test_a_document_that_only_the_index_has_is_named_by_stages_that_need_it(
    sparse: Any,
    late: Any,
    collection: Collection,
    vectors: Any,
) -> None:
    index: Any = r.build_index(vectors, "qdrant")
    encoder = Served(sparse, "sparse", "tiny")
    reranker = Served(late, "multi-vector", "colbert")
    searchable = Searchable(
        "papers",
        index,
        encoder,
        collection.documents,
        vectors,
        late=reranker,
    )
    with serving(Service([encoder, reranker], searchable=searchable)) as client:
        add_document(index, vectors, "added")
        for stage, option in (("prf", "--vectors"), ("rerank", "--data")):
            reply = client.post("/v1/papers/search", {"query": "csv files", stage: True})
            assert reply.status == 424
            assert reply.json["error_type"] == "Backend"
            assert "'added'" in reply.json["error"]
            assert option in reply.json["error"]
        reply = client.post("/v1/papers/search", {"query": "csv files", "explain": True})
        assert reply.status == 200


def test_an_index_of_token_vectors_is_served(
    late: Any,
    collection: Collection,
    tmp_path: Path,
) -> None:
    r.encode_tokens(late, collection.contents(), tmp_path / "tokens")
    index = r.LateIndex.build(
        r.open_tokens(tmp_path / "tokens"),
        tmp_path / "index",
        storage="fp16",
    )
    encoder = Served(late, "multi-vector", "tiny")
    searchable = Searchable("papers", index, encoder, documents=collection.documents)
    with serving(Service([encoder], searchable=searchable)) as client:
        reply = client.post("/v1/papers/search", {"query": "csv files", "hits": 3})
    expected = r.Searcher(index, late).rank({"q": "csv files"}, r.SearchRequest(3)).run["q"]
    assert scores_of(reply) == pytest.approx(expected, abs=1e-2)


def test_an_index_of_token_vectors_is_served_with_the_reduction_of_its_model(
    late: Any,
    collection: Collection,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    r.encode_tokens(late, collection.contents(), tmp_path / "tokens")
    index = r.LateIndex.build(r.open_tokens(tmp_path / "tokens"), tmp_path / "index")
    monkeypatch.setattr(late, "similarity_fn_name", "meanmaxsim")
    searchable = Searchable("papers", index, Served(late, "multi-vector", "tiny"))
    queries = {"q": "csv files"}
    vectors = r.encode_texts(late, queries, kind="query")
    request = r.SearchRequest(3)
    scores = searchable.searcher.rank(queries, request, vectors).run["q"]
    expected = r.Searcher(index, late).rank(queries, request, vectors).run["q"]
    assert scores == pytest.approx(expected)


@dataclass(frozen=True)
class DenseCase:
    """A dense model and its vectors of the collection.

    Attributes:
        model: the served model.
        rows: vector of each document, ``[n, 384]``.
        expected: scores of the best three documents for "csv files", by the model's similarity.
    """

    model: Served
    rows: np.ndarray
    expected: dict[str, float]


@pytest.fixture(scope="module")
def dense_case(collection: Collection) -> DenseCase:
    """MiniLM and its vectors of the collection."""
    minilm = SentenceTransformer(str(minilm_path()), device="cpu", local_files_only=True)
    rows = minilm.encode(list(collection.contents().values()))
    query = r.encode_dense(minilm, {"q": "csv files"}, kind="query")
    best = minilm.similarity(query, torch.from_numpy(rows))[0].topk(3)
    ids = list(collection.documents)
    expected = {
        ids[position]: score
        for position, score in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    }
    return DenseCase(Served(minilm, "dense", "minilm"), rows, expected)


def test_dense_vectors_of_a_qdrant_collection_are_a_column(
    sparse: Any,
    vectors: Any,
    dense_case: DenseCase,
    tmp_path: Path,
) -> None:
    layout = Layout(vectors.vocab_size, vectors.fingerprint, dense=dense_case.rows.shape[1])
    encoder = Served(sparse, "sparse", "tiny")
    with QdrantCollection.embedded(tmp_path, layout) as qdrant:
        qdrant.upsert(Documents(vectors.ids, vectors, dense_case.rows))
        searchable = Searchable("papers", QdrantIndex(qdrant), encoder, dense=dense_case.model)
        with serving(Service([encoder, dense_case.model], searchable=searchable)) as client:
            body = {"query": "csv files", "hits": 3, "columns": True}
            columns = client.post("/v1/papers/search", body).json["columns"]
            (index,) = client.get("/v1/indexes").json["indexes"]
    assert index["features"]["dense"] is True
    assert set(columns) == {"sparse", "dense"}
    scores = {entry["docid"]: entry["score"] for entry in columns["dense"]}
    assert scores == pytest.approx(dense_case.expected, abs=1e-4)


@pytest.fixture(scope="module")
def dense_client(
    vectors: Any,
    collection: Collection,
    dense_case: DenseCase,
) -> Iterator[Client]:
    """A server of an index of dense vectors, with BM25."""
    vectors_of_documents = list(torch.tensor(dense_case.rows)[:, None])
    stored = r.TokenVectors.pack(vectors.ids, vectors_of_documents, 384, "fp32")
    searchable = Searchable(
        "dense",
        r.DenseIndex.build(stored),
        dense_case.model,
        words=r.BM25Index.build(collection.contents()),
    )
    with serving(Service([dense_case.model], searchable=searchable)) as client:
        yield client


def test_an_index_of_dense_vectors_is_served(dense_client: Client, dense_case: DenseCase) -> None:
    reply = dense_client.post("/v1/dense/search", {"query": "csv files", "hits": 3})
    assert scores_of(reply) == pytest.approx(dense_case.expected, abs=1e-4)


def test_an_index_of_dense_vectors_has_feedback_and_fusion(dense_client: Client) -> None:
    options = {"prf": True, "fusion": True, "columns": True}
    body = {"query": "csv files", "hits": 3} | options
    columns = dense_client.post("/v1/dense/search", body).json["columns"]
    assert set(columns) == {"dense", "words"}


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"explain": True}, id="explanations"),
        pytest.param({"prf": {"top_terms": 3}}, id="number of terms of feedback"),
    ],
)
def test_an_index_of_dense_vectors_refuses_options_of_terms(
    dense_client: Client,
    options: dict[str, Any],
) -> None:
    body = {"query": "csv files", "hits": 3} | options
    assert dense_client.post("/v1/dense/search", body).status == 422
