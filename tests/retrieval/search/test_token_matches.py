"""Explanations of late interaction: matched tokens, and what cannot be explained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tilefold import retrieval as r
from tilefold.retrieval.encoding.scored_tokens import scored_tokens
from tilefold.retrieval.errors import DataError
from tilefold.retrieval.index.opening import open_index
from tilefold.retrieval.search.token_matches import ExplainedQuery

DOCUMENTS = {
    "cats": r.Document("cats", "Cats", "cats sleep all day, and hunt at night."),
    "dogs": r.Document("dogs", "Dogs", "dogs chase cats through the garden."),
    "trees": r.Document("trees", "", "trees grow slowly."),
}
QUERY = "sleeping cats"
# The operator that scores int8 tokens on a CPU rounds the query's vectors of length 1 too, to at
# least 10 bits.
ROUNDING_PER_TOKEN = 2**-10


def assert_adds_up_to_score(hit: dict[str, Any]) -> None:
    """Check that the similarities of the matches of a hit add up to its score."""
    total = sum(match["similarity"] for match in hit["matches"])
    budget = len(hit["matches"]) * ROUNDING_PER_TOKEN
    assert total == pytest.approx(hit["score"], abs=budget)


@pytest.fixture(scope="module")
def token_folder(late: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Token vectors of the documents."""
    folder = tmp_path_factory.mktemp("explained") / "tokens"
    r.encode_tokens(late, {name: item.contents for name, item in DOCUMENTS.items()}, folder)
    return folder


@pytest.fixture(scope="module")
def searcher(late: Any, token_folder: Path) -> r.Searcher:
    """A searcher over an index of the token vectors."""
    index = r.LateIndex.build(r.open_tokens(token_folder), token_folder.parent / "index")
    return r.Searcher(index, late, documents=DOCUMENTS)


def test_similarities_of_an_explained_hit_add_up_to_its_score(searcher: r.Searcher) -> None:
    hits = searcher.search(QUERY, r.SearchRequest(k=3, explain=True))
    assert [hit["id"] for hit in hits] == [
        hit["id"] for hit in searcher.search(QUERY, r.SearchRequest(k=3))
    ]
    for hit in hits:
        assert_adds_up_to_score(hit)


def test_matched_tokens_are_those_that_the_model_scores(searcher: r.Searcher, late: Any) -> None:
    (best, *_) = searcher.search(QUERY, r.SearchRequest(k=1, explain=True))
    query_tokens = late.tokenizer.convert_ids_to_tokens(
        late.preprocess([QUERY], prompt=late.prompts.get("query"), task="query")["input_ids"][0],
    )
    assert [match["query_token"] for match in best["matches"]] == query_tokens
    document = DOCUMENTS[best["id"]]
    query_vectors = late.encode_query([QUERY])[0].float()
    document_vectors = late.encode_document([document.contents])[0].float()
    similarities, positions = (query_vectors @ document_vectors.T).max(dim=1)
    scored = scored_tokens(late, document.contents, "document")
    assert len(scored.names) == len(document_vectors)
    for match, similarity, position in zip(
        best["matches"],
        similarities.tolist(),
        positions.tolist(),
        strict=True,
    ):
        # The index stores int8 vectors.
        assert match["similarity"] == pytest.approx(similarity, abs=2 / 127)
        assert match["document_token"] == scored.names[match["document_position"]]
        if match["document_position"] != position:
            runner_up = float(query_vectors[0] @ document_vectors[position])
            assert runner_up <= similarity + 2 / 127


def test_content_tokens_are_the_words_of_the_query(searcher: r.Searcher) -> None:
    (hit, *_) = searcher.search(QUERY, r.SearchRequest(k=1, explain=True))
    content = [match["query_token"] for match in hit["matches"] if match["content"]]
    assert "".join(token.removeprefix("##") for token in content) == "sleepingcats"


def test_skipped_punctuation_has_no_token(late: Any) -> None:
    tokens = scored_tokens(late, "cats, and dogs.", "document")
    assert len(tokens.ids) == len(late.encode_document(["cats, and dogs."])[0])
    assert {",", "."}.isdisjoint(tokens.names)


@pytest.mark.parametrize("stored", [True, False], ids=["stored token vectors", "encoded on demand"])
def test_reranked_hits_are_explained_by_the_model_that_reranks(
    late: Any,
    token_folder: Path,
    stored: bool,
) -> None:
    index = r.BM25Index.build({name: item.contents for name, item in DOCUMENTS.items()})
    searcher = r.Searcher(
        index,
        documents=DOCUMENTS,
        late=late,
        tokens=r.open_tokens(token_folder) if stored else None,
    )
    request = r.SearchRequest(k=2, reranking=r.Reranking(), explain=True)
    hits = searcher.search("cats", request)
    assert len(hits) == 2
    for hit in hits:
        assert_adds_up_to_score(hit)


def test_passages_are_explained_by_their_own_tokens(late: Any, tmp_path: Path) -> None:
    passages = r.Passages(4, cut="words")
    collection = r.Collection("passages", DOCUMENTS, {}, {})
    r.encode_tokens(late, passages.of(collection.documents), tmp_path / "tokens")
    index = r.LateIndex.build(r.open_tokens(tmp_path / "tokens"), tmp_path / "index")
    searcher = r.Searcher(index, late, documents=DOCUMENTS)
    for by in ("document", "passage"):
        for hit in searcher.search(QUERY, r.SearchRequest(k=2, by=by, explain=True)):
            assert_adds_up_to_score(hit)


def test_documents_that_were_added_are_explained(
    late: Any,
    token_folder: Path,
    tmp_path: Path,
) -> None:
    r.LateIndex.build(r.open_tokens(token_folder), tmp_path / "index")
    cows = r.Document("cows", "", "cows sleep standing.")
    added = r.encode_texts(late, {"cows": cows.contents}, kind="document")
    r.update_index(tmp_path / "index", added)
    searcher = r.Searcher(
        open_index(tmp_path / "index"),
        late,
        documents={**DOCUMENTS, "cows": cows},
    )
    hits = searcher.search("cows", r.SearchRequest(k=4, explain=True))
    assert {hit["id"] for hit in hits} == {*DOCUMENTS, "cows"}
    assert all(hit["matches"] for hit in hits)


def test_a_hit_without_its_document_has_no_matches(searcher: r.Searcher, late: Any) -> None:
    without_cats = {name: item for name, item in DOCUMENTS.items() if name != "cats"}
    partial = r.Searcher(searcher.retriever.index, late, documents=without_cats)
    hits = partial.search(QUERY, r.SearchRequest(k=3, explain=True))
    assert {hit["id"]: hit["matches"] is None for hit in hits} == {
        "cats": True,
        "dogs": False,
        "trees": False,
    }


def test_pooled_vectors_are_refused(late: Any, token_folder: Path, tmp_path: Path) -> None:
    index = r.LateIndex.build(r.open_tokens(token_folder), tmp_path / "index", pool_factor=2)
    searcher = r.Searcher(index, late, documents=DOCUMENTS)
    with pytest.raises(DataError, match=r"expected one vector per token of '.*', got .*pooled"):
        searcher.search(QUERY, r.SearchRequest(k=1, explain=True))


def test_an_index_without_late_interaction_is_refused() -> None:
    index = r.BM25Index.build({name: item.contents for name, item in DOCUMENTS.items()})
    searcher = r.Searcher(index, documents=DOCUMENTS)
    with pytest.raises(ValueError, match="explain: expected an index of token vectors"):
        searcher.search("cats", r.SearchRequest(explain=True))


def test_a_searcher_without_documents_is_refused(searcher: r.Searcher, late: Any) -> None:
    with pytest.raises(ValueError, match="explain: expected the documents, whose tokens are shown"):
        r.Searcher(searcher.retriever.index, late).search("cats", r.SearchRequest(explain=True))


def test_the_match_of_a_planted_vector_is_its_token(late: Any) -> None:
    text = DOCUMENTS["trees"].contents
    scored = scored_tokens(late, text, "document")
    query = scored_tokens(late, "grow", "query")
    planted = scored.names.index("grow")
    query_vectors = torch.eye(16)[torch.zeros(len(query.ids), dtype=torch.int64)]
    document_vectors = torch.eye(16)[torch.ones(len(scored.ids), dtype=torch.int64)]
    document_vectors[planted] = query_vectors[0]
    explanation = ExplainedQuery(late, "grow", query_vectors).explain(
        "trees",
        text,
        document_vectors,
    )
    assert {match.document_token for match in explanation.matches} == {"grow"}
