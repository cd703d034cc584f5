"""A search equals its functions one after another; arguments that do not fit are refused."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.recipes.small import small_collection, small_masked_lm
from tests.retrieval.search.parts import SearchParts
from tilefold import retrieval as r
from tilefold.recipes import ColbertRecipe
from tilefold.retrieval.common.runs import Run
from tilefold.retrieval.errors import DataError

QUERY = {"query": "how do I work with csv files"}
COLLECTION = small_collection()
TEXTS = COLLECTION.contents()
FEEDBACK = r.Feedback("rocchio", depth=2)


@pytest.fixture(scope="module")
def parts(splade: Any, late: Any, tmp_path_factory: pytest.TempPathFactory) -> SearchParts:
    """Everything that a searcher takes, of the small collection."""
    folder = tmp_path_factory.mktemp("searcher")
    r.encode_collection(splade, TEXTS, folder / "vectors", top_k=24, special_tokens=False)
    r.encode_tokens(late, TEXTS, folder / "tokens")
    return SearchParts(
        index=r.build_index(r.read_vectors(folder / "vectors"), "exact"),
        model=splade,
        documents=COLLECTION.documents,
        vectors=folder / "vectors",
        second=r.BM25Index.build(TEXTS),
        late=late,
        tokens=r.open_tokens(folder / "tokens"),
    )


@dataclass(frozen=True)
class Stages:
    """Rankings of one query, from document id to score, by the stage that computed them."""

    feedback: dict[str, float]
    fusion: dict[str, float]
    reranking: dict[str, float]


def stages_by_functions(parts: SearchParts) -> Stages:
    """Rank the query by calling the function of every stage, without a searcher."""
    index, tokens = parts.index, parts.tokens
    assert tokens is not None
    queries = r.encode_queries(parts.model, QUERY)
    first = r.hits_to_run(queries, index.search(queries, 9))
    expanded = r.expand_sparse(queries, r.read_vectors(parts.vectors), first, FEEDBACK)
    second = r.hits_to_run(expanded, index.search(expanded, 9))
    by_words = parts.second.search(QUERY, 9)
    fused = r.interpolate([second, by_words], [0.7, 0.3], k=9)
    late_queries = r.encode_texts(parts.late, QUERY, kind="query")
    reranked = r.rerank(fused, late_queries, tokens, depth=9)
    return Stages(second["query"], fused["query"], reranked["query"])


@pytest.mark.parametrize(
    ("is_stored", "tolerance"),
    [
        pytest.param(True, 0, id="stored vectors"),
        # Stored token vectors are fp16, those of encoded candidates fp32.
        pytest.param(False, 1e-2, id="in memory, candidates encoded"),
    ],
)
def test_a_search_is_the_functions_one_after_another(
    parts: SearchParts,
    is_stored: bool,
    tolerance: float,
) -> None:
    expected = stages_by_functions(parts)
    request = r.SearchRequest(
        4,
        feedback=FEEDBACK,
        fusion=r.Fusion("interpolation", 0.3),
        reranking=r.Reranking(9),
    )
    if not is_stored:
        parts = replace(parts, vectors=r.read_vectors(parts.vectors), tokens=None)

    hits = parts.searcher().search(QUERY["query"], request)

    assert [hit["id"] for hit in hits] == list(expected.reranking)[:4]
    assert [hit["rank"] for hit in hits] == [1, 2, 3, 4]
    fused_ids = list(expected.fusion)
    for hit in hits:
        name = hit["id"]
        assert hit["score"] == pytest.approx(expected.reranking[name], abs=tolerance)
        assert hit["first"]["rank"] == fused_ids.index(name) + 1
        assert hit["first"]["score"] == expected.fusion[name]
        assert hit["first"].keys() == {"rank", "score"}
        assert hit["title"] == COLLECTION.documents[name].title
        if name in expected.feedback:
            contributions = sum(term["contribution"] for term in hit["terms"])
            assert contributions == pytest.approx(expected.feedback[name], rel=1e-5)
            assert sum(term["share"] for term in hit["terms"]) == pytest.approx(1, rel=1e-5)


def test_a_bm25_index_is_searched_without_a_model(parts: SearchParts) -> None:
    hits = r.Searcher(parts.second).search(QUERY["query"], r.SearchRequest(3))
    expected = parts.second.search(QUERY, 3)["query"]
    assert {hit["id"]: hit["score"] for hit in hits} == expected
    assert hits[0]["title"] == ""
    assert hits[0]["terms"] is None
    assert "first" not in hits[0]


def test_a_run_serves_as_the_second_ranking(parts: SearchParts) -> None:
    run: Run = {"query": {"d3": 3.0, "d5": 2.0, "d9": 1.0}, "other": {"d1": 1.0}}
    searcher = r.Searcher(parts.second, second=run)
    request = r.SearchRequest(
        16,
        feedback=r.Feedback(),
        interpolation=r.Interpolation(weight=1.0),
    )
    hits = searcher.search(QUERY["query"], request)
    assert [hit["id"] for hit in hits[:2]] == ["d3", "d5"]


def test_a_query_without_a_word_of_the_index_has_no_hits(parts: SearchParts) -> None:
    assert r.Searcher(parts.second).search("zebra") == []


def test_parts_of_other_documents_are_refused(parts: SearchParts, tmp_path: Path) -> None:
    four_texts = dict(list(TEXTS.items())[:4])
    r.encode_tokens(parts.late, four_texts, tmp_path / "tokens")
    r.encode_collection(parts.model, four_texts, tmp_path / "vectors")
    of_other_vectors = replace(parts, vectors=tmp_path / "vectors")
    of_other_words = replace(parts, second=r.BM25Index.build(four_texts))
    of_other_tokens = replace(parts, tokens=r.open_tokens(tmp_path / "tokens"))

    message = "vectors: .* holds vectors of another model or of other documents"
    with pytest.raises(DataError, match=message):
        of_other_vectors.searcher()
    with pytest.raises(DataError, match="second: was made from other documents"):
        of_other_words.searcher()
    with pytest.raises(DataError, match=r"tokens: .* holds token vectors of other documents"):
        of_other_tokens.searcher()


def test_another_model_is_refused_unless_it_is_allowed(
    parts: SearchParts,
    tmp_path: Path,
) -> None:
    lm = small_masked_lm(tmp_path / "lm", seed=1)
    other_model = ColbertRecipe(base_model=str(lm), dimension=8).build_model()

    with pytest.raises(DataError, match=r"model: .* not the model that made the index"):
        replace(parts, model=other_model).searcher()
    message = "model: makes vectors of dimension 8, and .* of dimension 16"
    with pytest.raises(DataError, match=message):
        replace(parts, late=other_model).searcher()
    assert r.Searcher(
        parts.index,
        other_model,
        documents=parts.documents,
        vectors=parts.vectors,
        second=parts.second,
        tokens=parts.tokens,
        other_model=True,
    )


def test_a_bm25_index_takes_no_model_and_no_vectors(parts: SearchParts) -> None:
    with pytest.raises(ValueError, match="model: must be left out for a BM25 index"):
        r.Searcher(parts.second, model=parts.model)
    with pytest.raises(ValueError, match="vectors: must be left out for a BM25 index"):
        r.Searcher(parts.second, vectors=parts.vectors)


def test_documents_that_contain_no_hit_are_refused(parts: SearchParts) -> None:
    documents = {"x": r.Document("x", "", "of another collection")}
    searcher = r.Searcher(parts.index, parts.model, documents=documents)
    message = r"documents: none of the documents found is in .* \(the first is 'd"
    with pytest.raises(DataError, match=message):
        searcher.search("csv")


def test_special_tokens_match_everywhere_and_are_no_matched_terms(splade: Any) -> None:
    vectors = r.encode_queries(splade, TEXTS)
    special_ids = set(splade.tokenizer.all_special_ids)
    special_tokens = set(splade.tokenizer.convert_ids_to_tokens(sorted(special_ids)))
    searcher = r.Searcher(r.build_index(vectors), splade, vectors=vectors)
    for hit in searcher.search(QUERY["query"]):
        terms, _ = vectors.row(vectors.ids.index(hit["id"]))
        matched_tokens = {term["term"] for term in hit["terms"]}
        assert special_ids & set(terms.tolist())
        assert matched_tokens
        assert not special_tokens & matched_tokens


@pytest.mark.parametrize(
    ("request_with_stage", "message"),
    [
        pytest.param(
            r.SearchRequest(feedback=r.Feedback()),
            "^vectors: expected the documents' vectors, which",
            id="feedback needs vectors",
        ),
        pytest.param(
            r.SearchRequest(fusion=r.Fusion()),
            "^second: expected a BM25 index or a run",
            id="fusion needs a second ranking",
        ),
        pytest.param(
            r.SearchRequest(reranking=r.Reranking()),
            "^reranking: .*with a late-interaction model",
            id="reranking needs a model",
        ),
    ],
)
def test_a_stage_whose_part_the_searcher_lacks_is_refused(
    parts: SearchParts,
    request_with_stage: r.SearchRequest,
    message: str,
) -> None:
    searcher = r.Searcher(parts.index, parts.model)
    with pytest.raises(ValueError, match=message):
        searcher.search("csv", request_with_stage)


def test_texts_are_not_searched_without_a_model(parts: SearchParts) -> None:
    with pytest.raises(ValueError, match=r"^model: expected the SparseEncoder that made"):
        r.Searcher(parts.index).search("csv")


def test_arguments_of_another_type_are_refused(parts: SearchParts) -> None:
    vectors: Any = r.read_vectors(parts.vectors)
    by_words: Any = r.Searcher(parts.second)
    message = "^index: expected an index .* got SparseVectors"
    with pytest.raises(TypeError, match=message):
        r.Searcher(vectors)
    message = "^model: expected the model that made the index, got str; load it"
    with pytest.raises(TypeError, match=message):
        r.Searcher(parts.index, "minilm")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^query: expected a string, got list; rank\(\)"):
        by_words.search(["csv"])
    with pytest.raises(TypeError, match=r"^request: expected a SearchRequest, .* got 5"):
        by_words.search("csv", 5)


@pytest.mark.parametrize("k", [0, 2.5, "3"])
def test_a_request_for_no_positive_number_of_documents_is_refused(k: Any) -> None:
    with pytest.raises(ValueError, match=f"^k: expected an integer of at least 1, got {k!r}"):
        r.SearchRequest(k)


def test_interpolation_needs_feedback() -> None:
    with pytest.raises(ValueError, match=r"^interpolation: expected feedback"):
        r.SearchRequest(interpolation=r.Interpolation())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param({"depth": 0}, "^depth: expected at least 1, got 0", id="depth"),
        pytest.param(
            {"tail": "cut"},
            "^tail: expected one of keep, drop, got 'cut'",
            id="tail",
        ),
        pytest.param(
            {"weight": 2.0},
            r"^weight: expected a number in \[0, 1\], got 2",
            id="weight",
        ),
    ],
)
def test_wrong_options_of_reranking_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        r.Reranking(**options)


def test_an_unknown_method_of_fusion_is_refused() -> None:
    message = "^method: expected one of rrf, interpolation, got 'best'"
    with pytest.raises(ValueError, match=message):
        r.Fusion("best")  # type: ignore[arg-type]
