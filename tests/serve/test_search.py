"""The routes of an index: Anserini's, and the POST with fusion, feedback, reranking and
explanations; Qdrant.
"""

from __future__ import annotations

import json
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.retrieval.qdrant_over_http import OverHttp
from tests.serve.running import Client, serving
from tilefold import retrieval as r
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


@pytest.fixture(scope="module")
def searchable(
    sparse: Any,
    late: Any,
    collection: Collection,
    tmp_path_factory: pytest.TempPathFactory,
) -> Searchable:
    folder = tmp_path_factory.mktemp("index")
    r.encode_collection(sparse, collection.contents(), folder / "vectors")
    r.encode_tokens(late, collection.contents(), folder / "tokens")
    vectors = r.read_vectors(folder / "vectors")
    index, words = r.build_index(vectors, "exact"), r.BM25Index.build(collection.contents())
    models = Served(sparse, "sparse", "tiny"), Served(late, "multi-vector", "colbert")
    store = r.open_tokens(folder / "tokens")
    return Searchable(
        "small",
        index,
        models[0],
        collection.documents,
        vectors,
        words,
        models[1],
        store,
    )


@pytest.fixture(scope="module")
def models(searchable: Searchable) -> list[Served]:
    return [model for model in (searchable.encoder, searchable.late) if model]


@pytest.fixture(scope="module")
def client(searchable: Searchable, models: list[Served]) -> Iterator[Client]:
    with serving(Service(models, searchable=searchable)) as running:
        yield running


def ranked(reply: Any) -> dict[str, float]:
    return {entry["docid"]: entry["score"] for entry in reply.json["candidates"]}


@pytest.fixture(scope="module")
def runs(searchable: Any, sparse: Any) -> dict[str, dict[str, float]]:
    """What the functions of tilefold.retrieval give for the query."""
    queries = r.encode_queries(sparse, {"q": QUERY})
    run = r.hits_to_run(queries, searchable.index.search(queries, 16))
    words = searchable.words.search({"q": QUERY}, 16)
    asked = r.encode_texts(searchable.late.model, {"q": QUERY}, kind="query")
    return {
        "sparse": run["q"],
        "words": words["q"],
        "rrf": r.reciprocal_rank_fusion([run, words])["q"],
        "mixed": r.interpolate([run, words], [0.7, 0.3])["q"],
        "late": r.rerank(run, asked, searchable.store, depth=100)["q"],
    }


def test_a_get_answers_as_anserini_does(client: Client, collection: Collection, runs: Any) -> None:
    reply = client.get("/v1/small/search?query=how+do+I+work+with+csv+files&hits=3")
    assert (reply.status, set(reply.json)) == (200, {"api", "index", "query", "candidates"})
    assert (reply.json["api"], reply.json["index"], reply.json["query"]) == (
        "v1",
        "small",
        {"text": QUERY},
    )
    assert ranked(reply) == pytest.approx(dict(list(runs["sparse"].items())[:3]), rel=1e-4)
    for rank, entry in enumerate(reply.json["candidates"], start=1):
        document = collection.documents[entry["docid"]]
        assert (set(entry), entry["rank"]) == ({"docid", "score", "rank", "doc"}, rank)
        assert entry["doc"] == {"id": document.id, "title": document.title, "text": document.text}
    unparsed = client.get("/v1/small/search?query=csv&parse=false").json["candidates"]
    assert json.loads(unparsed[0]["doc"])["id"] == unparsed[0]["docid"]
    assert len(unparsed) == 10
    answer = client.get("/v1/small/doc/d3").json
    found = {"id": "d3", "title": "module3", "text": collection.documents["d3"].text}
    assert answer == {"api": "v1", "index": "small", "docid": "d3", "doc": found}


@pytest.mark.parametrize(
    ("path", "status", "message"),
    [
        ("/v1/small/search", 400, "Parameter 'query' is required"),
        ("/v1/small/search?query=%20", 400, "Parameter 'query' is required"),
        ("/v1/small/search?query=a&hits=0", 400, "Parameter 'hits' must be a positive integer"),
        (
            "/v1/small/search?query=a&hits=" + "9" * 5000,
            400,
            "Parameter 'hits' must be a positive integer",
        ),
        ("/v1/small/search?query=a&hits=1001", 422, "`hits` expected at most 1000, got 1001"),
        ("/v1/small/search?query=a&parse=maybe", 400, "Parameter 'parse'"),
        ("/v1/other/search?query=a", 404, "the index of this server is 'small'"),
        ("/v1/small/doc/none", 404, "there is no document 'none'"),
        ("/v1/small/doc/..%2F..%2Fetc%2Fpasswd", 404, "there is no document"),
    ],
)
def test_a_wrong_address_says_what_is_wrong(
    client: Client,
    path: str,
    status: int,
    message: str,
) -> None:
    reply = client.get(path)
    assert (reply.status, message in reply.json["error"]) == (status, True)


def test_a_post_fuses_and_reranks_as_the_functions_do(client: Client, runs: Any) -> None:
    def post(**body: Any) -> Any:
        return client.post("/v1/small/search", {"query": QUERY, "hits": 16} | body)

    plain = post()
    assert ranked(plain) == pytest.approx(runs["sparse"], rel=1e-4)
    assert ("columns" in plain.json, set(plain.json["milliseconds"])) == (
        False,
        {"encode", "search"},
    )
    assert list(ranked(post(fusion=True))) == list(runs["rrf"])
    assert ranked(post(fusion={"method": "interpolation", "weight": 0.3})) == pytest.approx(
        runs["mixed"],
        rel=1e-3,
    )
    late = post(rerank=True)
    assert ranked(late) == pytest.approx(runs["late"], abs=2e-2)
    assert set(late.json["milliseconds"]) == {"encode", "search", "rerank"}
    only = post(rerank={"depth": 2}, hits=4, explain=True).json["candidates"]
    assert {entry["docid"] for entry in only[:2]} == set(list(runs["sparse"])[:2])
    assert all("late" in entry["explanation"]["stages"] for entry in only[:2])
    assert all("late" not in entry["explanation"]["stages"] for entry in only[2:])
    assert list(ranked(post(rerank={"weight": 0.0}))) == list(runs["sparse"])
    everything = post(fusion=True, prf=True, rerank={"depth": 5}, explain=True)
    assert set(everything.json["candidates"][0]["explanation"]["stages"]) <= {
        "sparse",
        "words",
        "fusion",
        "late",
    }
    assert (
        post(fusion=True, columns=True).json["candidates"] == post(fusion=True).json["candidates"]
    )


def test_columns_are_the_rankings_of_each_method_alone(client: Client, runs: Any) -> None:
    for options in ({}, {"fusion": True}, {"rerank": {"depth": 2}}):
        answer = client.post(
            "/v1/small/search",
            {"query": QUERY, "hits": 4, "columns": True} | options,
        ).json
        assert set(answer["columns"]) == {"sparse", "words", "late"}
        for name, column in answer["columns"].items():
            best = dict(list(runs[name].items())[:4])
            assert [entry["rank"] for entry in column] == list(range(1, len(best) + 1))
            assert {entry["docid"]: entry["score"] for entry in column} == pytest.approx(
                best,
                abs=5e-2,
            )
            assert all(entry["title"] == "module" + entry["docid"][1:] for entry in column)


def test_feedback_moves_the_query_and_says_so(client: Client, searchable: Any, sparse: Any) -> None:
    body = {
        "query": QUERY,
        "hits": 5,
        "prf": {"method": "rocchio", "depth": 2, "top_terms": 20},
        "explain": True,
    }
    reply = client.post("/v1/small/search", body)
    queries, index = r.encode_queries(sparse, {"q": QUERY}), searchable.index
    run = r.hits_to_run(queries, index.search(queries, 5))
    expanded = r.expand_sparse(
        queries,
        searchable.vectors,
        run,
        r.Feedback("rocchio", depth=2, top_terms=20),
    )
    assert ranked(reply) == pytest.approx(
        r.hits_to_run(expanded, index.search(expanded, 5))["q"],
        rel=1e-3,
    )
    weights = [term["weight"] for term in reply.json["query"]["terms"]]
    assert len(weights) <= 20 and weights == sorted(weights, reverse=True)
    assert {term["feedback"] for term in reply.json["query"]["terms"]} <= {True, False}


def test_an_explanation_adds_up_and_points_into_the_texts(
    client: Client,
    searchable: Searchable,
    sparse: Any,
) -> None:
    reply = client.post("/v1/small/search", {"query": QUERY, "explain": True, "hits": 3}).json
    terms = {term["id"]: term for term in reply["query"]["terms"]}
    own = set(sparse.tokenizer(QUERY, add_special_tokens=False)["input_ids"])
    assert all(term["expanded"] == (id_ not in own) for id_, term in terms.items())
    assert all(
        sparse.tokenizer.convert_ids_to_tokens(id_) == term["term"] for id_, term in terms.items()
    )
    for start, stop, id_ in reply["query"]["marks"]:
        assert id_ in own
        assert QUERY[start:stop].lower() == terms[id_]["term"].removeprefix("##")
    for entry in reply["candidates"]:
        matched = {term["id"]: term for term in entry["explanation"]["terms"]}
        special = entry["score"] - sum(term["contribution"] for term in matched.values())
        assert special >= -1e-3  # what special tokens add is left out
        for term in matched.values():
            assert term["share"] == pytest.approx(term["contribution"] / entry["score"])
        for start, stop, id_ in entry["explanation"]["marks"]["text"]:
            assert entry["doc"]["text"][start:stop].lower() == matched[id_]["term"].removeprefix(
                "##",
            )
            assert matched[id_]["expanded"] is False
        assert entry["explanation"]["stages"]["sparse"]["rank"] == entry["rank"]


def test_what_the_server_was_started_without_is_refused_with_the_option(
    models: list[Served],
    searchable: Any,
) -> None:
    with serving(
        Service(models[:1], searchable=Searchable("bare", searchable.index, searchable.encoder)),
    ) as client:
        for body, message in (
            ({"explain": True}, "--vectors"),
            ({"prf": True}, "--vectors"),
            ({"fusion": True}, "--bm25"),
            ({"rerank": True}, "--tokens"),
            ({"hit": 3}, "`hit`: Extra inputs"),
            ({"prf": {"method": "bo1"}}, "`prf."),
        ):
            reply = client.post("/v1/bare/search", {"query": "csv"} | body)
            assert (reply.status, message in reply.json["error"]) == (422, True), reply.json
        assert (
            "`query` cannot be empty" in client.post("/v1/bare/search", {"query": ""}).json["error"]
        )
        assert client.get("/v1/bare/search?query=csv").json["candidates"][0]["doc"] is None
        assert "--data" in client.get("/v1/bare/doc/d1").json["error"]
        (index,) = client.get("/v1/indexes").json["indexes"]
        assert (index["name"], index["backend"], index["documents"]) == ("bare", "exact", 16)
        assert set(index["features"].values()) == {False}


def test_an_index_of_words_needs_no_model(
    searchable: Any,
    collection: Collection,
    runs: Any,
) -> None:
    words = Searchable("words", searchable.words, documents=collection.documents)
    with serving(Service([], searchable=words)) as client:
        reply = client.get("/v1/words/search?query=how+do+I+work+with+csv+files&hits=16")
        assert ranked(reply) == pytest.approx(runs["words"])
        for path in ("/embed_sparse", "/tokenize"):
            assert client.post(path, {"inputs": "a"}).status == 424
        assert (client.get("/info").status, client.get("/health").status) == (424, 200)


def test_only_documents_that_match_are_found_in_any_stage(
    searchable: Any,
    models: list[Served],
    sparse: Any,
) -> None:
    metadata = {
        name: {"lang": "de" if at % 2 else "en", "n": at}
        for at, name in enumerate(searchable.documents)
    }
    german = {name for name, each in metadata.items() if each["lang"] == "de"}
    index = r.build_index(searchable.vectors, metadata=metadata)
    words = r.BM25Index.build(
        {name: each.contents for name, each in searchable.documents.items()},
        metadata=metadata,
    )
    with serving(
        Service(models, searchable=replace(searchable, index=index, words=words)),
    ) as client:
        assert client.get("/v1/indexes").json["indexes"][0]["features"]["where"] is True
        asked = {
            "query": QUERY,
            "hits": 16,
            "prf": True,
            "fusion": True,
            "rerank": True,
            "columns": True,
        }
        reply = client.post("/v1/small/search", asked | {"where": {"lang": "de"}})
        assert set(ranked(reply)) == german
        assert all(
            {entry["docid"] for entry in column} <= german
            for column in reply.json["columns"].values()
        )
        reply = client.post(
            "/v1/small/search",
            {"query": QUERY, "hits": 16, "where_not": {"n": {"gte": 3}}},
        )
        assert set(ranked(reply)) == set(list(metadata)[:3])
        beyond_floats = {"n": {"lt": 2**53 + 1}}
        for request in ({"where": beyond_floats}, {"where_not": {"n": 2**53 + 1}}):
            reply = client.post("/v1/small/search", {"query": QUERY, "hits": 16, **request})
            assert set(ranked(reply)) == set(metadata), reply.json
        for where, said in (
            ({"n": 2**64}, "where: expected Unicode or an integer of 64 bits for 'n'"),
            ({"n": {"lt": 10**400}}, "where: expected numbers under gt, gte, lt, lte for 'n'"),
            (
                {"land": "de"},
                "where: expected a field of the index, lang (text), n (integer); got 'land'",
            ),
            ({"n": {"above": 3}}, "where: expected numbers under gt, gte, lt, lte"),
            ({}, "at least one condition"),
        ):
            reply = client.post("/v1/small/search", {"query": QUERY, "where": where})
            assert (reply.status, said in reply.json["error"]) == (422, True), reply.json


def test_candidates_are_encoded_as_many_as_there_are_permits(
    searchable: Any,
    models: list[Served],
    runs: Any,
) -> None:
    bare = replace(searchable, store=None)
    with serving(Service(models, searchable=bare)) as client:
        reply = client.post("/v1/small/search", {"query": QUERY, "hits": 16, "rerank": True})
        assert ranked(reply) == pytest.approx(runs["late"], abs=5e-2)
    limits = Limits(max_concurrent_requests=8, max_client_batch_size=8)
    with serving(Service(models, limits, searchable=bare)) as client:
        for depth, status in ((7, 200), (8, 422)):  # an idle server was too busy for 8, for ever
            reply = client.post("/v1/small/search", {"query": QUERY, "rerank": {"depth": depth}})
            assert reply.status == status, reply.json
        assert "`rerank.depth` expected at most 7, got 8" in reply.json["error"]
        assert (
            len(
                client.post("/v1/small/search", {"query": QUERY, "columns": True}).json["columns"][
                    "late"
                ],
            )
            >= 7
        )


def test_the_schema_names_every_field(client: Client) -> None:
    paths = client.get("/openapi.json").json["paths"]
    schema = paths["/v1/{index}/search"]["post"]["requestBody"]["content"]["application/json"][
        "schema"
    ]
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


def test_feedback_beyond_measure_is_refused(
    client: Client,
    searchable: Any,
    models: list[Served],
    caplog: Any,
) -> None:
    def ask(server: Client, **weights: float) -> Any:
        return server.post(
            "/v1/small/search",
            {"query": QUERY, "prf": {"method": "rocchio"} | weights},
        )

    for weights in ({"alpha": 1e38}, {"alpha": 1e300}, {"beta": 1001}, {"gamma": 1e5, "bottom": 2}):
        told = f"{next(iter(weights))}`: Input should be less than or equal to 1000"
        reply = ask(client, **weights)
        assert (reply.status, told in reply.json["error"]) == (422, True)
    for weights in (
        {"alpha": 1000, "beta": 1000},
        {"alpha": 1e-300, "beta": 1e-300},
        {"alpha": 0, "beta": 1},
    ):
        assert ask(client, **weights).status == 200
    heavy = replace(searchable.vectors, data=searchable.vectors.data * np.float32(1e37))
    with serving(Service(models, searchable=replace(searchable, vectors=heavy))) as other:
        reply = ask(other, beta=1000)
        told = "`prf`: alpha, beta, gamma: expected weights that keep a query below"
        assert (reply.status, told in reply.json["error"]) == (422, True)
    assert not caplog.records


# an index in Qdrant: many requests at once, and a server that goes away


@contextmanager
def away(
    sparse: Any,
    vectors: r.SparseVectors,
    limits: Limits | None = None,
    **options: Any,
) -> Iterator[Any]:
    """A client of a service whose index is on a Qdrant server, and that server."""
    http = OverHttp()
    r.build_index(vectors, "qdrant", url=http.url, collection="papers")
    model, index = (
        Served(sparse, "sparse", "tiny"),
        QdrantIndex(QdrantCollection.server(http.url, "papers", **options)),
    )
    with serving(Service([model], limits, searchable=Searchable("papers", index, model))) as client:
        yield client, http
    http.stop()


def test_an_embedded_index_answers_requests_that_come_together(
    sparse: Any,
    vectors: r.SparseVectors,
) -> None:
    queries = r.encode_queries(sparse, {"q": "csv files"})
    wanted = {hit.id: hit.score for hit in r.build_index(vectors).search(queries, 3)[0]}
    index = r.build_index(vectors, "qdrant")
    model = Served(sparse, "sparse", "tiny")
    with serving(Service([model], searchable=Searchable("papers", index, model))) as client:
        with ThreadPoolExecutor(8) as pool:
            replies = list(pool.map(client.get, [PATH] * 24))
        assert [reply.status for reply in replies] == [200] * 24
        assert all(ranked(reply) == pytest.approx(wanted, rel=1e-4) for reply in replies)
        assert client.get("/v1/indexes").json["indexes"][0]["documents"] == len(vectors)


def test_a_server_that_went_away_is_a_503_and_others_are_answered(
    sparse: Any,
    vectors: r.SparseVectors,
) -> None:
    with away(sparse, vectors, patience=3) as (client, http):
        assert client.get(PATH).status == 200
        http.fault = lambda method, path: 503
        began = time.monotonic()
        with ThreadPoolExecutor(16) as pool:
            paths = [PATH] * 12 + ["/v1/indexes"]  # more than there are threads for them
            searches = [pool.submit(client.get, path) for path in paths]
            time.sleep(0.5)
            assert client.post("/embed_sparse", {"inputs": "csv"}).status == 200
            assert not any(search.done() for search in searches)
        assert time.monotonic() - began < 6
        for search in searches:
            reply = search.result()
            assert (reply.status, reply.json["error_type"]) == (503, "Unhealthy")
            assert (
                "does not answer" in reply.json["error"] and "127.0.0.1" not in reply.json["error"]
            )
        http.fault = None
        assert client.get(PATH).status == 200


def test_the_service_ends_although_a_server_is_silent(
    sparse: Any,
    vectors: Any,
    monkeypatch: Any,
    caplog: Any,
) -> None:
    monkeypatch.setattr(service, "_LEAVE_SECONDS", 0.3)
    asked, never = threading.Event(), threading.Event()

    def silent(method: str, path: str) -> None:
        asked.set()
        never.wait(20)

    with ThreadPoolExecutor(1) as pool:
        with away(sparse, vectors, Limits(shutdown_seconds=0.5)) as (client, http):
            http.fault = silent
            search = pool.submit(client.get, PATH)
            assert asked.wait(10)
            began = time.monotonic()
        assert time.monotonic() - began < 4  # and not the 50 s that a search may take
        left = [
            thread
            for thread in threading.enumerate()
            if thread.name.startswith("tilefold-searcher")
        ]
        assert len(left) == 1 and all(
            thread.daemon for thread in left
        )  # the process need not wait for it either
        assert (search.result().status, search.result().json["error"]) == (
            503,
            "the service is closing",
        )
        assert not [record for record in caplog.records if record.exc_info]
    never.set()


def test_a_document_of_the_index_alone_is_named(
    sparse: Any,
    late: Any,
    collection: Collection,
    vectors: Any,
) -> None:
    index: Any = r.build_index(vectors, "qdrant")
    models = Served(sparse, "sparse", "tiny"), Served(late, "multi-vector", "colbert")
    found = Searchable("papers", index, models[0], collection.documents, vectors, late=models[1])
    with serving(Service(list(models), searchable=found)) as client:
        terms, weights = vectors.row(0)
        added = {"added": dict(zip(terms.tolist(), (2 * weights).tolist(), strict=True))}
        rows = r.SparseVectors.from_rows(added, vectors.vocab_size, vectors.fingerprint)
        index.collection.upsert(Documents(["added"], rows))
        for name, option in (("prf", "--vectors"), ("rerank", "--data")):
            reply = client.post("/v1/papers/search", {"query": "csv files", name: True})
            assert (reply.status, reply.json["error_type"]) == (424, "Backend")
            assert "'added'" in reply.json["error"] and option in reply.json["error"]
        assert (
            client.post("/v1/papers/search", {"query": "csv files", "explain": True}).status == 200
        )


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
    found = Searchable(
        "papers",
        index,
        Served(late, "multi-vector", "tiny"),
        documents=collection.documents,
    )
    with serving(Service([found.encoder] if found.encoder else [], searchable=found)) as client:
        answer = client.post("/v1/papers/search", {"query": "csv files", "hits": 3}).json
    expected = r.Searcher(index, late).rank({"q": "csv files"}, r.SearchRequest(3)).run["q"]
    assert {each["docid"]: each["score"] for each in answer["candidates"]} == pytest.approx(
        expected,
        abs=1e-2,
    )


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


def test_dense_vectors_of_a_collection_are_a_column(
    sparse: Any,
    collection: Collection,
    vectors: Any,
) -> None:
    from sentence_transformers import SentenceTransformer

    from tilefold.recipes.backbone import minilm_path

    minilm = SentenceTransformer(str(minilm_path()), device="cpu", local_files_only=True)
    embedded = minilm.encode(list(collection.contents().values()))
    stored, asked = (
        torch.from_numpy(embedded),
        r.encode_dense(minilm, {"q": "csv files"}, kind="query"),
    )
    best, names = minilm.similarity(asked, stored)[0].topk(3), list(collection.documents)
    expected = {
        names[at]: score
        for at, score in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    }
    layout = Layout(vectors.vocab_size, vectors.fingerprint, dense=embedded.shape[1])
    models = Served(sparse, "sparse", "tiny"), Served(minilm, "dense", "minilm")
    with (
        tempfile.TemporaryDirectory() as folder,
        QdrantCollection.embedded(folder, layout) as opened,
    ):
        opened.upsert(Documents(vectors.ids, vectors, embedded))
        found = Searchable("papers", QdrantIndex(opened), models[0], dense=models[1])
        with serving(Service(list(models), searchable=found)) as client:
            answer = client.post(
                "/v1/papers/search",
                {"query": "csv files", "hits": 3, "columns": True},
            ).json
            assert client.get("/v1/indexes").json["indexes"][0]["features"]["dense"] is True
    assert set(answer["columns"]) == {"sparse", "dense"}
    assert {
        entry["docid"]: entry["score"] for entry in answer["columns"]["dense"]
    } == pytest.approx(expected, abs=1e-4)

    index = r.DenseIndex.build(
        r.TokenVectors.pack(vectors.ids, list(torch.tensor(embedded)[:, None]), 384, "fp32"),
    )
    words = r.BM25Index.build(collection.contents())
    asked = {"query": "csv files", "hits": 3}
    with serving(
        Service([models[1]], searchable=Searchable("own", index, models[1], words=words)),
    ) as client:
        assert ranked(client.post("/v1/own/search", asked)) == pytest.approx(expected, abs=1e-4)
        answer = client.post(
            "/v1/own/search",
            asked | {"prf": True, "fusion": True, "columns": True},
        ).json
        assert set(answer["columns"]) == {"dense", "words"}
        for refused in ({"explain": True}, {"prf": {"top_terms": 3}}):
            assert client.post("/v1/own/search", asked | refused).status == 422, refused
