"""Searches of long documents by their passages, in every stage and in the server."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.recipes.small import SUBJECTS
from tests.retrieval.long_documents import CONTENTS, DOCUMENTS, PASSAGES
from tests.retrieval.search.parts import SearchParts
from tests.serve.running import serving
from tilefold import retrieval as r
from tilefold.integrations.sentence_transformers import accelerate
from tilefold.recipes.colbert import untrained_colbert
from tilefold.recipes.splade import untrained_splade
from tilefold.retrieval.common.provenance import Provenance
from tilefold.retrieval.common.runs import Run
from tilefold.retrieval.data.passages import Passage
from tilefold.retrieval.search.passages import best_passages
from tilefold.serve.models import Served
from tilefold.serve.searchable import Searchable
from tilefold.serve.service import Service

QUERY = {"query": "how do I work with csv files"}
FEEDBACK = r.Feedback("rocchio", depth=2)
FUSION = r.Fusion("interpolation", 0.3)


@pytest.fixture(scope="module")
def parts(splade: Any, late: Any, tmp_path_factory: pytest.TempPathFactory) -> SearchParts:
    """Everything that a searcher takes, of the passages of the documents."""
    folder = tmp_path_factory.mktemp("passages")
    texts = PASSAGES.of(DOCUMENTS)
    r.encode_collection(splade, texts, folder / "vectors", special_tokens=False)
    r.encode_tokens(late, texts, folder / "tokens")
    r.build_index(r.read_vectors(folder / "vectors")).save(folder / "index")
    r.BM25Index.build(texts).save(folder / "bm25")
    return SearchParts(
        index=r.load_index(folder / "index"),
        model=splade,
        documents=DOCUMENTS,
        vectors=folder / "vectors",
        second=r.BM25Index.load(folder / "bm25"),
        late=late,
        tokens=r.open_tokens(folder / "tokens"),
    )


@pytest.fixture(scope="module")
def parts_of_other_passages(
    parts: SearchParts,
    tmp_path_factory: pytest.TempPathFactory,
) -> SearchParts:
    """Vectors, token vectors and a BM25 index of other passages of the same documents."""
    folder = tmp_path_factory.mktemp("other-passages")
    texts = r.Passages(4).of(DOCUMENTS)
    r.encode_collection(parts.model, texts, folder / "vectors")
    r.encode_tokens(parts.late, texts, folder / "tokens")
    return replace(
        parts,
        vectors=folder / "vectors",
        second=r.BM25Index.build(texts),
        tokens=r.open_tokens(folder / "tokens"),
    )


def documents_by_best_passage(run: Run) -> Run:
    """The documents of a run of passages, each with the score of its best passage."""
    return best_passages(run)[0]


def best_passage_ids(run: Run) -> dict[str, str]:
    """The best passage of every document that a run of passages finds for the query."""
    return best_passages(run)[1]["query"]


def all_passages(parts: SearchParts, queries: r.SparseVectors) -> Run:
    """The run of all passages that the sparse index finds."""
    return r.hits_to_run(queries, parts.index.search(queries, 99))


def all_passages_after_feedback(parts: SearchParts) -> Run:
    """The run of passages of the query that was moved by the best passages of two documents."""
    queries = r.encode_queries(parts.model, QUERY)
    passages = best_passage_ids(all_passages(parts, queries))
    basis = {"query": dict.fromkeys(passages.values(), 0.0)}
    vectors = r.read_vectors(parts.vectors)
    return all_passages(parts, r.expand_sparse(queries, vectors, basis, FEEDBACK))


def late_scores_of_all_passages(parts: SearchParts) -> Run:
    """Scores of the query and the stored token vectors of every passage."""
    assert parts.tokens is not None
    queries = r.encode_texts(parts.late, QUERY, kind="query")
    candidates = {"query": dict.fromkeys(parts.tokens.ids, 0.0)}
    return r.rerank(candidates, queries, parts.tokens, tail="drop")


def vectors_of_many_passages() -> r.SparseVectors:
    """Passages of 40 documents with integer scores, of which many are equal.

    Document d7 has 200 passages, and they score higher than all others.
    """
    generator = np.random.default_rng(0)
    rows: dict[str, dict[int, float]] = {}
    for number in range(40):
        has_best_passages = number == 7
        n_passages = 200 if has_best_passages else int(generator.integers(1, 30))
        weights = generator.integers(1, 9, n_passages).astype(float)
        if has_best_passages:
            weights += 10
        for position, weight in enumerate(weights.tolist(), start=1):
            passage = Passage(f"d{number}", position, position, position + 1)
            rows[passage.id] = {0: weight}
    vectors = r.SparseVectors.from_rows(rows, 2)
    vectors.provenance = Provenance(passages="1/1/words")
    return vectors


@pytest.mark.parametrize("k", [1, 2, 39, 40, 100])
def test_the_best_k_documents_are_those_of_all_passages(k: int) -> None:
    vectors = vectors_of_many_passages()
    index = r.build_index(vectors)
    queries = r.SparseVectors.from_rows({"x": {0: 1.0}, "no hits": {1: 1.0}}, 2)
    texts = {"x": "", "no hits": ""}
    passages = r.hits_to_run(queries, index.search(queries, len(vectors)))["x"]
    best_scores: dict[str, float] = {}
    for name, score in passages.items():
        best_scores.setdefault(Passage.of(name).document, score)
    searcher = r.Searcher(index)

    by_document = searcher.rank(texts, r.SearchRequest(k), queries)
    by_passage = searcher.rank(texts, r.SearchRequest(k, by="passage"), queries)

    assert list(by_document.run["x"].items()) == list(best_scores.items())[:k]
    assert by_document.run["no hits"] == {}
    for document, score in by_document.run["x"].items():
        assert passages[str(by_document.passage("x", document))] == score
    assert list(by_passage.run["x"].items()) == list(passages.items())[:k]


def test_feedback_reads_the_best_passages(parts: SearchParts) -> None:
    expected = documents_by_best_passage(all_passages_after_feedback(parts))
    assert parts.searcher().rank(QUERY, r.SearchRequest(9, FEEDBACK)).run == expected


def test_fusion_and_interpolation_rank_documents_by_their_best_passages(
    parts: SearchParts,
) -> None:
    by_vectors = documents_by_best_passage(all_passages_after_feedback(parts))
    by_words = documents_by_best_passage(parts.second.search(QUERY, 99))
    expected = r.interpolate([by_vectors, by_words], [0.7, 0.3], k=9)
    searcher = parts.searcher()

    fused = searcher.rank(QUERY, r.SearchRequest(9, FEEDBACK, fusion=FUSION)).run
    interpolation = r.Interpolation("after", 0.3)
    interpolated = searcher.rank(QUERY, r.SearchRequest(9, FEEDBACK, interpolation)).run

    assert fused == expected
    assert interpolated == expected


def test_passages_are_fused_with_an_index_of_whole_documents(parts: SearchParts) -> None:
    by_vectors = documents_by_best_passage(all_passages_after_feedback(parts))
    of_documents = r.BM25Index.build(CONTENTS)
    expected = r.interpolate([by_vectors, of_documents.search(QUERY, 9)], [0.7, 0.3], k=9)
    searcher = replace(parts, second=of_documents).searcher()
    assert searcher.rank(QUERY, r.SearchRequest(9, FEEDBACK, fusion=FUSION)).run == expected


def test_a_hit_after_feedback_shows_a_passage_of_its_document(parts: SearchParts) -> None:
    request = r.SearchRequest(3, FEEDBACK, r.Interpolation("both"))
    for hit in parts.searcher().search(QUERY["query"], request):
        assert hit["passage"]["text"] in DOCUMENTS[hit["id"]].text


def test_reranking_scores_a_document_by_any_of_its_passages(parts: SearchParts) -> None:
    late_run = late_scores_of_all_passages(parts)
    expected = documents_by_best_passage(late_run)["query"]
    passage_ids = best_passage_ids(late_run)
    request = r.SearchRequest(9, reranking=r.Reranking(9))

    hits = parts.searcher().search(QUERY["query"], request)

    assert {hit["id"]: hit["score"] for hit in hits} == pytest.approx(expected)
    for hit in hits:
        passage = Passage.of(passage_ids[hit["id"]])
        assert hit["passage"] == {
            "number": passage.number,
            "start": passage.start,
            "stop": passage.stop,
            "text": DOCUMENTS[hit["id"]].text[passage.start : passage.stop],
        }


def test_a_reranked_hit_explains_the_passage_that_the_index_found(parts: SearchParts) -> None:
    first = all_passages(parts, r.encode_queries(parts.model, QUERY))
    expected = documents_by_best_passage(first)["query"]
    request = r.SearchRequest(9, reranking=r.Reranking(9))
    contributions = {}
    for hit in parts.searcher().search(QUERY["query"], request):
        contributions[hit["id"]] = sum(term["contribution"] for term in hit["terms"])
    assert contributions == pytest.approx(expected, rel=1e-5)


def test_reranking_without_stored_tokens_encodes_the_passages_that_were_found(
    parts: SearchParts,
) -> None:
    late_scores = late_scores_of_all_passages(parts)["query"]
    first = all_passages(parts, r.encode_queries(parts.model, QUERY))
    expected = {}
    for document, passage in best_passage_ids(first).items():
        expected[document] = late_scores[passage]
    ranking = parts.searcher().rank(QUERY, r.SearchRequest(9))

    reranked = replace(parts, tokens=None).searcher().rerank(QUERY, ranking, r.Reranking(9))

    # Stored token vectors are fp16, those of encoded candidates fp32.
    assert reranked.run["query"] == pytest.approx(expected, abs=1e-2)


def test_reranking_to_a_depth_of_two_reorders_the_best_two_documents_only(
    parts: SearchParts,
) -> None:
    searcher = parts.searcher()
    ranking = searcher.rank(QUERY, r.SearchRequest(9))
    first_ids = list(ranking.run["query"])
    reranked_ids = list(searcher.rerank(QUERY, ranking, r.Reranking(2)).run["query"])
    assert set(reranked_ids[:2]) == set(first_ids[:2])
    assert len(reranked_ids) == len(first_ids)


def test_passages_are_reranked_when_passages_are_asked_for(parts: SearchParts) -> None:
    assert parts.tokens is not None
    searcher = parts.searcher()
    run = searcher.rank(QUERY, r.SearchRequest(4, by="passage")).run
    queries = r.encode_texts(parts.late, QUERY, kind="query")
    expected = r.rerank(run, queries, parts.tokens)["query"]

    request = r.SearchRequest(4, by="passage", reranking=r.Reranking(4))
    hits = searcher.search(QUERY["query"], request)

    assert [hit["score"] for hit in hits] == pytest.approx(list(expected.values()))
    passages = []
    for hit in hits:
        assert hit["terms"]
        position = hit["passage"]
        passage = Passage(hit["id"], position["number"], position["start"], position["stop"])
        passages.append(passage.id)
    assert passages == list(expected)


def test_passages_are_fused_when_passages_are_asked_for(parts: SearchParts) -> None:
    searcher = parts.searcher()
    by_vectors = searcher.rank(QUERY, r.SearchRequest(9, by="passage")).run
    by_words = parts.second.search(QUERY, 9)
    fused = r.reciprocal_rank_fusion([by_vectors, by_words])["query"]
    request = r.SearchRequest(9, by="passage", fusion=r.Fusion())
    assert searcher.rank(QUERY, request).run["query"] == dict(list(fused.items())[:9])


def test_stages_of_different_passages_share_documents(
    parts: SearchParts,
    parts_of_other_passages: SearchParts,
) -> None:
    searcher = replace(parts_of_other_passages, vectors=parts.vectors).searcher()
    request = r.SearchRequest(3, fusion=r.Fusion(), reranking=r.Reranking())
    assert searcher.search("csv", request)


@pytest.mark.parametrize(
    ("request_of_passages", "message"),
    [
        pytest.param(
            r.SearchRequest(3, by="passage", reranking=r.Reranking()),
            "tokens: expected token vectors of the index's passages",
            id="reranked passages",
        ),
        pytest.param(
            r.SearchRequest(3, by="passage", fusion=r.Fusion()),
            "second: .*because passages are ranked, got 4/4/",
            id="fused passages",
        ),
        pytest.param(
            r.SearchRequest(3, r.Feedback(), r.Interpolation("before")),
            "second: .*because feedback reads the best passages, got 4/4/",
            id="passages for feedback",
        ),
    ],
)
def test_stages_of_different_passages_cannot_share_passages(
    parts: SearchParts,
    parts_of_other_passages: SearchParts,
    request_of_passages: r.SearchRequest,
    message: str,
) -> None:
    searcher = replace(parts_of_other_passages, vectors=parts.vectors).searcher()
    with pytest.raises(ValueError, match=message):
        searcher.search("csv", request_of_passages)


def test_vectors_of_other_passages_are_refused(
    parts: SearchParts,
    parts_of_other_passages: SearchParts,
) -> None:
    searched = replace(parts, vectors=parts_of_other_passages.vectors)
    message = "vectors: .*passages: 4/4/sentences, of the index: 6/3"
    with pytest.raises(ValueError, match=message):
        searched.searcher()


def test_passages_of_an_index_of_whole_documents_are_refused() -> None:
    searcher = r.Searcher(r.BM25Index.build(CONTENTS))
    with pytest.raises(ValueError, match="by: expected 'document' for an index of whole"):
        searcher.search("csv", r.SearchRequest(3, by="passage"))


def test_a_search_by_anything_else_is_refused() -> None:
    message = "by: expected one of document, passage, got 'word'"
    with pytest.raises(ValueError, match=message):
        r.SearchRequest(by="word")  # type: ignore[arg-type]


def test_an_index_of_passages_is_no_teacher(parts: SearchParts) -> None:
    message = "teacher w: expected a BM25 index of whole documents"
    with pytest.raises(ValueError, match=message):
        r.Teacher("w", "bm25", parts.second)


@pytest.fixture(scope="module")
def long_document() -> r.Document:
    """2,000 words, the last sentence of which is about something else.

    It is longer than what a model reads, and the sentence is in the last of 30 passages.
    """
    sentences = []
    for size in range(160):
        subject = SUBJECTS[size % 16]
        sentences.append(
            f"The function reads {subject} of size {size} and gives a list of numbers."
        )
    sentences.append("A young sailor painted the harbour of Valparaiso.")
    text = " ".join(sentences)
    assert len(text.split()) > 2_000
    return r.Document("long", "Manual", text)


@pytest.fixture(scope="module")
def manuals(long_document: r.Document) -> dict[str, r.Document]:
    """The long document, and the beginning of its text under two other ids."""
    beginning = long_document.text[:2000]
    return {
        "x": replace(long_document, id="x", text=beginning),
        "y": replace(long_document, id="y", text=beginning),
        "long": long_document,
    }


def check_last_sentence_is_found(
    searcher: r.Searcher,
    long_document: r.Document,
    reranking: r.Reranking | None = None,
) -> None:
    """Expect the long document first, by the passage at the end of its text."""
    request = r.SearchRequest(2, reranking=reranking)
    best_hit = searcher.search("sailor who painted a harbour", request)[0]
    assert best_hit["id"] == "long"
    assert best_hit["passage"]["text"].endswith("harbour of Valparaiso.")
    assert best_hit["passage"]["stop"] == len(long_document.text)


@pytest.mark.slow
def test_sparse_vectors_find_a_document_of_2_000_words_by_its_last_sentence(
    long_document: r.Document,
    manuals: dict[str, r.Document],
    tmp_path: Path,
) -> None:
    splade = untrained_splade()
    accelerate(splade)
    texts = r.Passages(75).of(manuals)
    manifest = r.encode_collection(splade, texts, tmp_path / "vectors", top_k=64)
    assert manifest.truncated["count"] == 0
    index = r.build_index(r.read_vectors(tmp_path / "vectors"))
    check_last_sentence_is_found(r.Searcher(index, splade, documents=manuals), long_document)


def test_bm25_finds_a_document_of_2_000_words_by_its_last_sentence(
    long_document: r.Document,
    manuals: dict[str, r.Document],
) -> None:
    index = r.BM25Index.build(r.Passages(75).of(manuals))
    check_last_sentence_is_found(r.Searcher(index, documents=manuals), long_document)


def test_reranking_finds_a_document_of_2_000_words_by_its_last_sentence(
    long_document: r.Document,
    manuals: dict[str, r.Document],
    tmp_path: Path,
) -> None:
    late = untrained_colbert()
    texts = r.Passages(75).of(manuals)
    manifest = r.encode_tokens(late, texts, tmp_path / "tokens", storage="int8")
    assert manifest.truncated["count"] == 0
    contents = {name: document.contents for name, document in manuals.items()}
    searcher = r.Searcher(
        r.BM25Index.build(contents),
        documents=manuals,
        late=late,
        tokens=r.open_tokens(tmp_path / "tokens"),
    )
    check_last_sentence_is_found(searcher, long_document, r.Reranking())


@pytest.mark.parametrize("by", ["document", "passage"])
def test_a_server_returns_documents_or_passages(parts: SearchParts, by: Any) -> None:
    model = Served(parts.model, "sparse", "tiny")
    late = Served(parts.late, "multi-vector", "late")
    searchable = Searchable(
        "long",
        parts.index,
        model,
        DOCUMENTS,
        r.read_vectors(parts.vectors),
        parts.second,
        late,
    )
    searcher = r.Searcher(
        parts.index,
        parts.model,
        documents=DOCUMENTS,
        vectors=parts.vectors,
        late=parts.late,
    )
    expected = searcher.search(QUERY["query"], r.SearchRequest(by=by))

    with serving(Service([model, late], searchable=searchable)) as client:
        reply = client.post("/v1/long/search", {"query": QUERY["query"], "by": by})
        reply_of_all_stages = client.post(
            "/v1/long/search",
            {
                "query": QUERY["query"],
                "by": by,
                "explain": True,
                "rerank": True,
                "columns": True,
                "fusion": True,
            },
        )

    candidates = reply.json["candidates"]
    assert [candidate["docid"] for candidate in candidates] == [hit["id"] for hit in expected]
    assert [candidate["passage"] for candidate in candidates] == [
        hit["passage"] for hit in expected
    ]
    assert reply_of_all_stages.status == 200, reply_of_all_stages.raw
    for candidate in reply_of_all_stages.json["candidates"]:
        if candidate["passage"]["text"]:
            assert candidate["explanation"]["terms"]
    for column in reply_of_all_stages.json["columns"].values():
        assert {candidate["docid"] for candidate in column} <= set(DOCUMENTS)


def test_a_server_of_whole_documents_refuses_to_return_passages() -> None:
    searchable = Searchable("whole", r.BM25Index.build(CONTENTS))
    with serving(Service([], searchable=searchable)) as client:
        reply = client.post("/v1/whole/search", {"query": "csv", "by": "passage"})
    assert reply.status == 422
    assert "the index is of whole documents" in reply.json["error"]
