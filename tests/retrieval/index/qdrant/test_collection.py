"""One contract for collections in a folder, over HTTP and on a server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.inside import InUseError
from tests.retrieval.index.qdrant.documents import (
    FULL_LAYOUT,
    SPARSE_LAYOUT,
    MakeVectors,
    OpenCollection,
    check_same_hits,
    full_documents,
    random_tokens,
)
from tilefold.retrieval import (
    SparseVectors,
    build_index,
    hits_to_run,
    reciprocal_rank_fusion,
)
from tilefold.retrieval.common.provenance import Provenance
from tilefold.retrieval.errors import DataError, VocabularyMismatchError
from tilefold.retrieval.index.qdrant import Documents, Filter, Layout, QdrantCollection, Queries
from tilefold.retrieval.vectors.tokens import TokenVectors


def documents_of(vectors: SparseVectors, rows: range) -> Documents:
    """Documents with the sparse vectors of some rows."""
    part = vectors.take(list(rows))
    return Documents(part.ids, part)


def number_of(document: str) -> int:
    """The number in an id such as ``d12``."""
    return int(document[1:])


def test_adding_documents_that_exist_is_refused(
    open_collection: OpenCollection,
    make_vectors: MakeVectors,
) -> None:
    vectors = make_vectors(40)
    collection = open_collection(SPARSE_LAYOUT)
    collection.add(documents_of(vectors, range(30)))
    message = r"10 of 20 ids are in .* already, for example 'd20'. Nothing was added"
    with pytest.raises(DataError, match=message):
        collection.add(documents_of(vectors, range(20, 40)))
    assert len(collection) == 30


def test_documents_are_added_replaced_deleted_and_stored(
    open_collection: OpenCollection,
    make_vectors: MakeVectors,
) -> None:
    vectors = make_vectors(40)
    replacements = make_vectors(30, seed=5)
    queries = make_vectors(10, seed=1, prefix="q")
    collection = open_collection(SPARSE_LAYOUT)
    collection.add(documents_of(vectors, range(30)))
    collection.upsert(documents_of(replacements, range(20, 30)))
    # The first ten of these are replaced again, the others are added.
    collection.upsert(documents_of(vectors, range(20, 40)), batch_size=7)
    assert collection.delete(["d3", "d4", "nobody"]) == 2
    collection.close()

    collection = open_collection()
    expected = vectors.take([row for row in range(40) if row not in (3, 4)])
    assert len(collection) == 38
    assert set(collection.ids()) == set(expected.ids)
    check_same_hits(collection.search(queries, 10), build_index(expected).search(queries, 10))


def test_stored_vectors_are_read_in_the_order_of_the_ids(
    open_collection: OpenCollection,
    make_vectors: MakeVectors,
) -> None:
    vectors = make_vectors(40)
    collection = open_collection(SPARSE_LAYOUT)
    collection.add(documents_of(vectors, range(40)))
    collection.delete(["d3"])
    stored = collection.vectors(["d7", "d3", "d5"])
    assert stored.ids == ["d7", "d5"]
    assert stored.fingerprint == "f" * 64
    assert np.array_equal(stored.data, vectors.take([7, 5]).data)


def test_equal_scores_are_in_the_order_of_ids_at_any_k(open_collection: OpenCollection) -> None:
    generator = np.random.default_rng(0)
    rows: dict[str, dict[int, float]] = {}
    for number, weights in enumerate(generator.integers(0, 3, (300, 4)).tolist()):
        row = {term: float(weight) for term, weight in enumerate(weights) if weight > 0}
        rows[f"d{number:03d}"] = row
    shuffled_ids = list(rows)
    generator.shuffle(shuffled_ids)
    vectors = SparseVectors.from_rows({name: rows[name] for name in shuffled_ids}, 500)
    collection = open_collection(SPARSE_LAYOUT)
    collection.upsert(Documents(vectors.ids, vectors))
    queries = SparseVectors.from_rows(
        {"two terms": {0: 1.0, 2: 2.0}, "no terms": {}, "unseen term": {77: 1.0}},
        500,
    )
    scores = {name: row.get(0, 0.0) + 2 * row.get(2, 0.0) for name, row in rows.items()}
    matching_ids = [name for name, score in scores.items() if score > 0]
    ranking = sorted(matching_ids, key=lambda name: (-scores[name], name))

    for k in (1, 3, 10, 57, 400):
        hits, hits_of_no_terms, hits_of_unseen_term = collection.search(queries, k)
        assert hits == [(name, scores[name]) for name in ranking[:k]]
        assert hits_of_no_terms == []
        assert hits_of_unseen_term == []


N_DOCUMENTS = 60
N_QUERIES = 6


@pytest.fixture
def stored_documents(make_vectors: MakeVectors) -> Documents:
    """Sixty documents with sparse, dense and token vectors and payloads."""
    return full_documents(make_vectors(N_DOCUMENTS))


@pytest.fixture
def full_collection(
    open_collection: OpenCollection,
    stored_documents: Documents,
) -> QdrantCollection:
    """A collection of ``stored_documents``."""
    collection = open_collection(FULL_LAYOUT)
    collection.upsert(stored_documents)
    return collection


@pytest.fixture
def sparse_queries(make_vectors: MakeVectors) -> SparseVectors:
    return make_vectors(N_QUERIES, terms=8, seed=1, prefix="q")


@pytest.fixture
def queries(sparse_queries: SparseVectors) -> Queries:
    """Six queries with sparse, dense and token vectors."""
    dense: Any = torch.from_numpy(
        np.random.default_rng(2).normal(size=(N_QUERIES, 16)).astype(np.float32),
    )
    return Queries(
        sparse_queries.ids,
        sparse_queries,
        dense,
        random_tokens(sparse_queries.ids, seed=3),
    )


def dense_scores(queries: Queries, documents: Documents) -> np.ndarray[Any, Any]:
    """Dot products ``[queries, documents]`` of dense vectors."""
    return np.asarray(queries.dense) @ np.asarray(documents.dense).T


def late_scores(queries: Queries, documents: Documents) -> np.ndarray[Any, Any]:
    """MaxSim ``[queries, documents]`` of token vectors."""
    assert queries.tokens is not None
    assert documents.tokens is not None
    scores = np.zeros((N_QUERIES, N_DOCUMENTS))
    for query in range(N_QUERIES):
        for document in range(N_DOCUMENTS):
            products = queries.tokens.rows(query) @ documents.tokens.rows(document).T
            scores[query, document] = float(products.max(dim=1).values.sum())
    return scores


def check_ranked_by(scores: np.ndarray[Any, Any], rows: list[Any]) -> None:
    """Expect the five documents of the highest scores for every query."""
    for scores_of_query, hits in zip(scores, rows, strict=True):
        best = np.argsort(-scores_of_query)[:5]
        assert [hit.id for hit in hits] == [f"d{number}" for number in best]
        assert np.allclose([hit.score for hit in hits], scores_of_query[best], rtol=1e-5)


def test_dense_vectors_are_ranked_by_dot_product(
    full_collection: QdrantCollection,
    stored_documents: Documents,
    queries: Queries,
) -> None:
    rows = full_collection.search(Queries(queries.ids, dense=queries.dense), 5, exact=True)
    check_ranked_by(dense_scores(queries, stored_documents), rows)


def test_token_vectors_are_ranked_by_maxsim(
    full_collection: QdrantCollection,
    stored_documents: Documents,
    queries: Queries,
) -> None:
    rows = full_collection.search(Queries(queries.ids, tokens=queries.tokens), 5)
    check_ranked_by(late_scores(queries, stored_documents), rows)


def test_reciprocal_rank_fusion_equals_that_of_runs(
    full_collection: QdrantCollection,
    sparse_queries: SparseVectors,
    queries: Queries,
) -> None:
    by_sparse = full_collection.search(sparse_queries, 30)
    by_dense = full_collection.search(Queries(queries.ids, dense=queries.dense), 30)
    by_tokens = full_collection.search(Queries(queries.ids, tokens=queries.tokens), 30)
    runs = [hits_to_run(sparse_queries, rows) for rows in (by_sparse, by_dense, by_tokens)]
    expected = reciprocal_rank_fusion(runs)

    fused = full_collection.search(queries, 10, fusion="rrf", depth=30)

    for query, hits in zip(queries.ids, fused, strict=True):
        best_scores = list(expected[query].values())[:10]
        assert np.allclose([hit.score for hit in hits], best_scores, rtol=1e-5)
        for hit in hits:
            assert hit.score == pytest.approx(expected[query][hit.id], rel=1e-5)


def test_distribution_based_fusion_returns_k_documents(
    full_collection: QdrantCollection,
    queries: Queries,
) -> None:
    rows = full_collection.search(queries, 4, fusion="dbsf")
    assert [len(hits) for hits in rows] == [4] * N_QUERIES


def test_reranking_orders_the_candidates_of_sparse_vectors_by_maxsim(
    full_collection: QdrantCollection,
    stored_documents: Documents,
    sparse_queries: SparseVectors,
    queries: Queries,
) -> None:
    late = late_scores(queries, stored_documents)
    candidate_rows = full_collection.search(sparse_queries, 12)
    sparse_and_tokens = Queries(queries.ids, sparse_queries, tokens=queries.tokens)

    rows = full_collection.search(sparse_and_tokens, 3, rerank=True, depth=12)

    for scores, candidates, hits in zip(late, candidate_rows, rows, strict=True):
        score_of = {hit.id: scores[number_of(hit.id)] for hit in candidates}
        candidate_ids = sorted(score_of, key=score_of.__getitem__, reverse=True)
        assert [hit.id for hit in hits] == candidate_ids[:3]


def test_filters_apply_to_fusion_and_reranking(
    full_collection: QdrantCollection,
    sparse_queries: SparseVectors,
    queries: Queries,
) -> None:
    sparse_and_tokens = Queries(queries.ids, sparse_queries, tokens=queries.tokens)
    not_german = Filter(must_not={"lang": "de"})
    fused = full_collection.search(queries, 9, fusion="rrf", where={"lang": "en"})
    reranked = full_collection.search(sparse_and_tokens, 9, rerank=True, where={"lang": "en"})
    not_reranked = full_collection.search(
        queries,
        9,
        fusion="rrf",
        rerank=False,
        where=not_german,
    )
    for rows in (fused, reranked, not_reranked):
        for hits in rows:
            assert hits
            assert all(number_of(hit.id) % 2 == 0 for hit in hits)


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        pytest.param(None, 60, id="no filter"),
        pytest.param({"lang": "en"}, 30, id="value"),
        pytest.param(
            {"lang": ["en", "fr"], "year": {"gte": 2010, "lt": 2012}},
            3,
            id="values and range",
        ),
        pytest.param(Filter({"year": 2000}, {"lang": "de"}), 3, id="value and no other value"),
    ],
)
def test_filters_count_documents(
    full_collection: QdrantCollection,
    where: Any,
    expected: int,
) -> None:
    assert full_collection.count(where) == expected


def test_filters_apply_to_sparse_search(
    full_collection: QdrantCollection,
    make_vectors: MakeVectors,
) -> None:
    queries = make_vectors(3, seed=1, prefix="q")
    rows = full_collection.search(queries, 50, where={"year": [2003, 2005]})
    assert any(rows)
    for hits in rows:
        assert all(number_of(hit.id) % 20 in (3, 5) for hit in hits)


def test_payloads_are_read_by_id(full_collection: QdrantCollection) -> None:
    assert full_collection.payloads(["d1", "nobody"]) == {"d1": {"lang": "de", "year": 2001}}


@pytest.fixture
def collection_with_odd_fields(
    open_collection: OpenCollection,
    make_vectors: MakeVectors,
) -> QdrantCollection:
    """Three documents with nested fields, odd names, and booleans next to integers."""
    collection = open_collection(SPARSE_LAYOUT)
    vectors = make_vectors(3)
    payloads = {
        "d0": {"open": True, "n": 1, "mixed": True, "my field": "a", "a.b": 1, "by": {"name": "x"}},
        "d1": {"open": False, "n": 0, "mixed": 1, "größe": 2, "by": {"name": "y"}},
        "d2": {"open": [True, False], "n": 2**63 - 1, "in": [{"name": "x"}, {"name": "z"}]},
    }
    collection.upsert(Documents(vectors.ids, vectors, payloads=payloads))
    return collection


def test_filters_distinguish_booleans_from_numbers(
    collection_with_odd_fields: QdrantCollection,
) -> None:
    collection = collection_with_odd_fields
    assert collection.count({"open": True}) == 2
    assert collection.count({"open": False}) == 2
    assert collection.count({"n": 1}) == 1
    assert collection.count({"n": 2**63 - 1}) == 1
    assert collection.count({"mixed": True}) == 1
    assert collection.count({"mixed": 1}) == 1
    with pytest.raises(ValueError, match="'n', which is integer, got True"):
        collection.count({"n": True})


def test_filters_reach_nested_fields_and_fields_with_odd_names(
    collection_with_odd_fields: QdrantCollection,
) -> None:
    collection = collection_with_odd_fields
    assert collection.count({'"größe"': 2}) == 1
    assert collection.count({'"my field"': "a"}) == 1
    assert collection.count({"by.name": "x"}) == 1
    assert collection.count({"in[].name": "z"}) == 1


@pytest.mark.parametrize("name", ["my field", 'q"', "$", "", "a..b", ".a"])
def test_filters_refuse_names_without_quotes(
    collection_with_odd_fields: QdrantCollection,
    name: str,
) -> None:
    with pytest.raises(ValueError, match=r"where: expected field names, got"):
        collection_with_odd_fields.count({name: 1})


@pytest.mark.parametrize("value", [2**63, "\ud800"], ids=["64 bits", "half a surrogate pair"])
def test_filters_refuse_values_that_cannot_be_stored(
    collection_with_odd_fields: QdrantCollection,
    value: Any,
) -> None:
    message = r"where: expected Unicode text or a 64-bit integer for 'n'"
    with pytest.raises(ValueError, match=message):
        collection_with_odd_fields.count({"n": value})


def collection_of_three_ids(open_collection: OpenCollection) -> QdrantCollection:
    """A collection of the documents ``a``, ``7`` and ``a7``."""
    collection = open_collection(SPARSE_LAYOUT)
    vectors = SparseVectors.from_rows(
        {"a": {1: 1.0}, "7": {1: 1.0}, "a7": {1: 1.0}},
        500,
        "f" * 64,
    )
    collection.upsert(Documents(vectors.ids, vectors))
    return collection


@pytest.mark.parametrize("method", ["delete", "present", "payloads", "vectors"])
@pytest.mark.parametrize(
    ("ids", "message"),
    [
        pytest.param("a7", r"ids: expected a list, .*; pass \['a7'\]", id="one id"),
        pytest.param([7], "ids: expected strings as ids", id="integer"),
    ],
)
def test_ids_that_are_no_list_of_strings_are_refused(
    open_collection: OpenCollection,
    method: str,
    ids: Any,
    message: str,
) -> None:
    collection = collection_of_three_ids(open_collection)
    with pytest.raises(TypeError, match=message):
        getattr(collection, method)(ids)
    assert len(collection) == 3


def test_an_id_that_is_not_unicode_is_refused(open_collection: OpenCollection) -> None:
    collection = collection_of_three_ids(open_collection)
    message = "ids: expected ids that UTF-8 can encode, without zero bytes"
    with pytest.raises(DataError, match=message):
        collection.delete(["\ud800"])
    assert len(collection) == 3


def test_an_id_that_is_repeated_is_deleted_once(open_collection: OpenCollection) -> None:
    assert collection_of_three_ids(open_collection).delete(("a7", "a7")) == 1


def with_provenance(vectors: SparseVectors, provenance: Provenance) -> SparseVectors:
    """``vectors`` with a provenance."""
    vectors.provenance = provenance
    return vectors


def test_building_reports_progress_and_may_be_repeated(
    open_collection: OpenCollection,
    make_vectors: MakeVectors,
) -> None:
    documents = documents_of(make_vectors(20), range(20))
    collection = open_collection(SPARSE_LAYOUT)
    progress: list[tuple[int, int]] = []

    collection.build(
        documents,
        batch_size=6,
        progress=lambda done, total: progress.append((done, total)),
    )
    collection.build(documents)

    assert progress == [(6, 20), (12, 20), (18, 20), (20, 20)]
    assert len(collection) == 20


def test_building_other_documents_into_a_collection_is_refused(
    open_collection: OpenCollection,
    make_vectors: MakeVectors,
) -> None:
    vectors = make_vectors(20)
    collection = open_collection(SPARSE_LAYOUT)
    collection.build(documents_of(vectors, range(20)))
    collection.close()

    collection = open_collection()
    assert collection.complete
    message = r"expected an empty collection, .*, got 20 documents"
    with pytest.raises(DataError, match=message):
        collection.build(documents_of(vectors, range(3)))


def test_vectors_of_another_model_are_refused(
    open_collection: OpenCollection,
    make_vectors: MakeVectors,
) -> None:
    provenance = Provenance("m" * 64, "t" * 64)
    vectors = with_provenance(make_vectors(20), provenance)
    collection = open_collection(SPARSE_LAYOUT)
    collection.build(Documents(vectors.ids, vectors))
    collection.close()

    collection = open_collection()
    assert collection.provenance == provenance
    of_another_model = with_provenance(
        make_vectors(3, seed=9, prefix="new"),
        Provenance("x" * 64),
    )
    message = r"sparse vectors of the model that made .*mmmm.* another model .xxxx"
    with pytest.raises(DataError, match=message):
        collection.upsert(Documents(of_another_model.ids, of_another_model))
    assert len(collection) == 20
    assert collection.provenance == provenance


@pytest.mark.parametrize(
    ("vocab_size", "fingerprint"),
    [
        pytest.param(600, "f" * 64, id="another size"),
        pytest.param(500, "0" * 64, id="another fingerprint"),
    ],
)
def test_vectors_of_another_vocabulary_are_refused(
    open_collection: OpenCollection,
    make_vectors: MakeVectors,
    vocab_size: int,
    fingerprint: str,
) -> None:
    vectors = make_vectors(20)
    collection = open_collection(SPARSE_LAYOUT)
    collection.build(Documents(vectors.ids, vectors))
    other = make_vectors(2, vocab_size=vocab_size, fingerprint=fingerprint)
    message = "Encode both with the same model"
    with pytest.raises(VocabularyMismatchError, match=message):
        collection.upsert(Documents(other.ids, other))
    with pytest.raises(VocabularyMismatchError, match=message):
        collection.search(other, 3)
    assert len(collection) == 20


def test_documents_that_are_added_leave_only_the_model_in_the_provenance(
    open_collection: OpenCollection,
    make_vectors: MakeVectors,
) -> None:
    vectors = with_provenance(make_vectors(20), Provenance("m" * 64, "t" * 64))
    added = with_provenance(make_vectors(3, seed=9, prefix="new"), Provenance("m" * 64))
    collection = open_collection(SPARSE_LAYOUT)
    collection.build(Documents(vectors.ids, vectors))
    collection.upsert(Documents(added.ids, added))
    # The documents are no longer those of one file.
    assert collection.provenance == Provenance("m" * 64, None)
    collection.close()
    assert open_collection().provenance == Provenance("m" * 64, None)


def test_a_collection_is_not_opened_with_another_layout(
    open_collection: OpenCollection,
) -> None:
    open_collection(SPARSE_LAYOUT).close()
    message = r"layout: expected the vocabulary of .* with 500 terms, got one with 600"
    with pytest.raises(VocabularyMismatchError, match=message):
        open_collection(Layout(600, "f" * 64))
    with pytest.raises(DataError, match=r"layout: expected dense=None as in .*, got 16"):
        open_collection(FULL_LAYOUT)


def test_documents_that_do_not_fit_the_layout_are_refused(
    open_collection: OpenCollection,
    make_vectors: MakeVectors,
) -> None:
    collection = open_collection(FULL_LAYOUT)
    vectors = make_vectors(3)
    tokens = random_tokens(vectors.ids)
    with pytest.raises(DataError, match="stores dense vectors, got only sparse, tokens"):
        collection.upsert(Documents(vectors.ids, vectors, tokens=tokens))
    short = np.zeros((3, 4), np.float32)
    with pytest.raises(DataError, match=r"dense vectors of dimension 16 .*, got 4"):
        collection.upsert(Documents(vectors.ids, vectors, short, tokens))
    with pytest.raises(ValueError, match="batch_size: expected an integer of at least 1, got 0"):
        collection.upsert(full_documents(vectors), batch_size=0)
    assert len(collection) == 0


def test_a_document_with_too_many_token_vectors_is_refused(
    open_collection: OpenCollection,
    make_vectors: MakeVectors,
) -> None:
    collection = open_collection(FULL_LAYOUT)
    n_tokens = 131_072
    tokens = TokenVectors(
        ["d0"],
        torch.tensor([0, n_tokens]),
        torch.zeros(n_tokens, 8, dtype=torch.float16),
    )
    documents = Documents(["d0"], make_vectors(1), np.zeros((1, 16), np.float32), tokens)
    message = r"fewer than 1,048,576 numbers .* 1,048,576 in 'd0'"
    with pytest.raises(DataError, match=message):
        collection.upsert(documents)
    assert len(collection) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param({"k": 0}, "k: expected an integer of at least 1, got 0", id="k of 0"),
        pytest.param(
            {},
            "fusion: expected one of rrf, dbsf for sparse and dense vectors, got None",
            id="no fusion of two kinds of vectors",
        ),
        pytest.param(
            {"fusion": "sum"},
            "fusion: expected one of rrf, dbsf, got 'sum'",
            id="unknown fusion",
        ),
        pytest.param(
            {"fusion": "rrf", "depth": 0},
            "depth: expected an integer of at least 1, got 0",
            id="depth of 0",
        ),
        pytest.param(
            {"rerank": True},
            "rerank: expected queries with tokens",
            id="reranking without token vectors",
        ),
        pytest.param(
            {"fusion": "rrf", "where": {"year": 2.5}},
            "where: expected a text, an integer, .* for 'year', got 2.5",
            id="filter by a fraction",
        ),
        pytest.param(
            {"fusion": "rrf", "where": {"year": {"above": 3}}},
            "where: expected numbers under gt, gte, lt, lte",
            id="filter by an unknown comparison",
        ),
        pytest.param(
            {"fusion": "rrf", "where": {"year": []}},
            r"for 'year', got \[\]",
            id="filter by no values",
        ),
        pytest.param(
            {"fusion": "rrf", "where": {}},
            "where: expected at least one condition, got an empty filter",
            id="empty filter",
        ),
    ],
)
def test_wrong_options_of_a_search_are_refused(
    open_collection: OpenCollection,
    make_vectors: MakeVectors,
    options: dict[str, Any],
    message: str,
) -> None:
    collection = open_collection(FULL_LAYOUT)
    vectors = make_vectors(3)
    queries = Queries(vectors.ids, vectors, full_documents(vectors).dense)
    with pytest.raises(ValueError, match=message):
        collection.search(queries, **options)


def test_fusion_of_one_kind_of_vectors_is_refused(
    open_collection: OpenCollection,
    make_vectors: MakeVectors,
) -> None:
    collection = open_collection(FULL_LAYOUT)
    with pytest.raises(ValueError, match="fusion: expected several kinds of vectors to"):
        collection.search(make_vectors(3), fusion="rrf")


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        pytest.param(
            {"deep": [{"n": 2**64}]},
            "an integer of more than 64 bits",
            id="large integer",
        ),
        pytest.param(
            {"_id": 1},
            "the field '_id' is reserved for the id, got it for 'd0'",
            id="reserved field",
        ),
        pytest.param({"x": float("nan")}, "values that JSON can represent for 'd0'", id="nan"),
        pytest.param({"x": object()}, "values that JSON can represent for 'd0'", id="object"),
        pytest.param(
            {"x": "\ud800"},
            r"for 'd0', .*an unpaired surrogate",
            id="half a surrogate pair",
        ),
    ],
)
def test_a_payload_that_cannot_be_stored_is_named(
    payload: dict[str, Any],
    message: str,
    make_vectors: MakeVectors,
) -> None:
    vectors = make_vectors(2)
    with pytest.raises(ValueError, match=message):
        Documents(vectors.ids, vectors, payloads={"d0": payload})


def test_documents_whose_ids_do_not_fit_are_refused(make_vectors: MakeVectors) -> None:
    vectors = make_vectors(2)
    not_unicode = SparseVectors.from_rows({"\ud800": {0: 1.0}}, 5)
    with pytest.raises(ValueError, match="payloads: expected ids of the documents, got 'd9'"):
        Documents(vectors.ids, vectors, payloads={"d9": {}})
    with pytest.raises(
        ValueError, match="ids: expected ids that UTF-8 can encode, without zero bytes"
    ):
        Documents(not_unicode.ids, not_unicode)
    with pytest.raises(ValueError, match="tokens: expected the 2 ids of"):
        Documents(vectors.ids, vectors, tokens=random_tokens(["d1", "d0"]))


def test_documents_whose_vectors_cannot_be_stored_are_named(make_vectors: MakeVectors) -> None:
    vectors = make_vectors(2)
    with_infinity = np.ones((2, 3), np.float32)
    with_infinity[1, 1] = np.inf
    integers: Any = np.ones((2, 3), np.int64)
    with pytest.raises(
        ValueError, match="expected sparse, dense or tokens, got None for all three"
    ):
        Documents(["a"])
    with pytest.raises(ValueError, match="dense: expected finite numbers, got inf for 'd1'"):
        Documents(vectors.ids, vectors, with_infinity)
    with pytest.raises(ValueError, match=r"dense: expected floats \[2, D\], got int64"):
        Documents(vectors.ids, vectors, integers)


def test_weights_above_the_largest_of_float16_are_refused() -> None:
    documents = Documents(["a"], SparseVectors.from_rows({"a": {0: 7e4}}, 5))
    with pytest.raises(ValueError, match="up to 65504 for float16, got 70000"):
        documents.check_compatible(Layout(5, weights="float16"), "here")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param({}, "layout: expected vocab_size, dense or tokens", id="no vectors"),
        pytest.param(
            {"dense": 0},
            "dense: expected an integer of at least 1",
            id="dense vectors of length 0",
        ),
        pytest.param(
            {"dense": 3, "distance": "cos"},
            "distance: expected one of dot, cosine, got 'cos'",
            id="unknown distance",
        ),
        pytest.param(
            {"dense": 3, "fields": {"a": "geo"}},
            "fields: expected one of keyword",
            id="unknown type of field",
        ),
    ],
)
def test_wrong_layouts_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Layout(**options)


def test_an_embedded_collection_is_open_once_at_a_time(
    make_vectors: MakeVectors,
    tmp_path: Path,
) -> None:
    vectors = make_vectors(30)
    with QdrantCollection.embedded(tmp_path / "c", SPARSE_LAYOUT) as collection:
        collection.upsert(documents_of(vectors, range(20)))
        message = "open elsewhere, and an embedded one can be open once at a time"
        with pytest.raises(InUseError, match=message):
            QdrantCollection.embedded(tmp_path / "c")
        collection.upsert(documents_of(vectors, range(20, 30)))
    with pytest.raises(RuntimeError, match="the collection is closed"):
        len(collection)
    with QdrantCollection.embedded(tmp_path / "c") as collection:
        assert len(collection) == 30


def test_a_dropped_collection_is_not_opened_without_a_layout(tmp_path: Path) -> None:
    with QdrantCollection.embedded(tmp_path / "c", SPARSE_LAYOUT) as collection:
        collection.drop()
    with pytest.raises(FileNotFoundError, match=r"there is no collection. Pass a layout"):
        QdrantCollection.embedded(tmp_path / "c")
