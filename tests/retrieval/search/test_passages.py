"""Long texts by their passages: where they are cut, documents by the best one in every stage, and a
model's length.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.recipes.small import SUBJECTS
from tests.refusals import refused
from tests.serve.running import serving
from tilefold import retrieval as r
from tilefold.integrations.sentence_transformers import accelerate
from tilefold.recipes.colbert import untrained_colbert
from tilefold.recipes.splade import untrained_splade
from tilefold.retrieval.common.provenance import Provenance, model_fingerprint, texts_digest
from tilefold.retrieval.common.runs import Run
from tilefold.retrieval.data.passages import Passage
from tilefold.retrieval.errors import DataError
from tilefold.retrieval.search.passages import best_passages
from tilefold.serve.models import Served
from tilefold.serve.searchable import Searchable
from tilefold.serve.service import Service

QUERY = {"query": "how do I work with csv files"}
CUT = r.Passages(6, 3)
SENTENCES = [f"Functions that read and write {subject} are here." for subject in SUBJECTS]
# ids that look like those of passages, and texts of one to six sentences
DOCUMENTS = {
    name: r.Document(name, title, " ".join(SENTENCES[start:stop]))
    for name, title, start, stop in (
        ("a", "First", 0, 6),
        ("a#1:0-3", "", 6, 10),
        ("b c", "Third", 10, 15),
        ("#", "", 15, 16),
        ("e", "Only", 0, 0),
    )
}
CONTENTS = {name: document.contents for name, document in DOCUMENTS.items()}


@given(
    st.text(st.sampled_from("ab1.!?。日本語 \n\"')(é-"), max_size=120),
    st.integers(1, 9),
    st.integers(1, 9),
    st.sampled_from(["sentences", "words"]),
)
def test_passages_hold_every_word_no_more_than_asked_and_all_move_on(
    text: str,
    length: int,
    stride: int,
    cut: Any,
) -> None:
    ranges = r.Passages(length, min(length, stride), cut).ranges(text)
    words = [match.span() for match in re.finditer(r"[日本語]{1,2}|[ab1é]{1,32}", text)]
    inside = [sum(low <= a and b <= high for a, b in words) for low, high in ranges]
    assert all(any(low <= a and b <= high for low, high in ranges) for a, b in words)
    assert max(inside) <= length and (min(inside) >= 1 or not words)
    assert all(a[0] < b[0] and a[1] < b[1] for a, b in pairwise(ranges))
    if cut == "words" and stride >= length:
        assert inside[:-1] == [length] * (len(inside) - 1)


def test_a_text_is_cut_behind_sentences_and_long_ones_between_words() -> None:
    text = 'He said: "Stop here!" Then he left. One two three four five six seven eight. End.'
    cut = [text[low:high] for low, high in r.Passages(5).ranges(text)]
    assert cut == [
        'He said: "Stop here!"',
        "Then he left. One two",
        "three four five six seven",
        "eight. End.",
    ]
    assert [text[low:high] for low, high in r.Passages(8, 4).ranges(text)] == [
        'He said: "Stop here!" Then he left.',
        "One two three four five six seven eight.",
        "End.",
    ]
    assert r.Passages(3).ranges("  ... \n") == [(0, 5)] and r.Passages(3).ranges("") == [(0, 0)]
    assert [b - a for a, b in r.Passages(2).ranges("x" * 200)] == [64, 64, 64, 8], (
        "a word has 32 letters at most"
    )
    texts = CUT.of(DOCUMENTS)
    assert {Passage.of(name).document for name in texts} == set(DOCUMENTS)
    for name, text in texts.items():
        passage = Passage.of(name)
        document = DOCUMENTS[passage.document]
        part = document.text[passage.start : passage.stop]
        assert passage.id == name and text == r.Document("", document.title, part).contents
    assert texts.provenance == Provenance(
        texts_sha256=texts_digest(CONTENTS),
        passages="6/3/sentences",
    )
    assert (
        Provenance.from_tag(texts.provenance.tag).passages == str(CUT)
        and r.Passages.parse(str(CUT)) == CUT
    )
    for name in ("a", "a#", "a#1", "#1:2-"):
        refused(DataError, "ids: expected that of a passage", Passage.of, name)
    refused(DataError, "expected such as '128/64/sentences', got '5'", r.Passages.parse, "5")
    for wrong, message in (
        ((0,), "length: expected an integer of at least 1"),
        ((5, 0), "stride: expected an integer of at least 1"),
        ((5, 6), r"stride: expected at most the length of a passage \(5\)"),
        ((5, 5, "lines"), "cut: expected one of sentences, words"),
    ):
        refused(ValueError, message, r.Passages, *wrong)


def test_training_takes_the_passage_of_a_relevant_document_that_has_the_words() -> None:
    queries = {"q": "read queues", "none": "zebra"}
    judged = {"q": {"a#1:0-3": 2, "b c": 0}, "none": {"a": 1}}
    cut = r.training_passages(
        r.Passages(9),
        r.Collection("c", DOCUMENTS, queries, {"train": judged}),
    )
    texts = {
        query: [cut.documents[name].text for name in names]
        for query, names in cut.qrels["train"].items()
    }
    assert texts == {
        "q": ["Functions that read and write queues are here."],
        "none": [SENTENCES[0]],
    }
    assert list(cut.qrels["train"]["q"].values()) == [2] and cut.contents() == r.Passages(9).of(
        DOCUMENTS,
    )


def test_the_k_best_documents_are_those_of_all_passages() -> None:
    """Also where one document has all the best passages, and with equal scores."""
    generator = np.random.default_rng(0)
    rows = {
        Passage(f"d{i}", n, n, n + 1).id: {0: float(weight) + 10 * (i == 7)}
        for i in range(40)
        for n, weight in enumerate(
            generator.integers(1, 9, 200 if i == 7 else generator.integers(1, 30)),
            start=1,
        )
    }
    vectors = r.SparseVectors.from_rows(rows, 2)
    vectors.provenance = Provenance(passages="1/1/words")
    queries = r.SparseVectors.from_rows({"x": {0: 1.0}, "nothing": {1: 1.0}}, 2)
    searcher = r.Searcher(r.build_index(vectors), None)
    every = r.hits_to_run(queries, r.build_index(vectors).search(queries, len(rows)))["x"]
    expected: dict[str, float] = {}
    for name, score in every.items():
        expected.setdefault(Passage.of(name).document, score)
    for k in (1, 2, 39, 40, 100):
        ranking = searcher.rank(dict.fromkeys(("x", "nothing"), ""), r.SearchRequest(k), queries)
        assert (
            list(ranking.run["x"].items()) == list(expected.items())[:k]
            and ranking.run["nothing"] == {}
        )
        assert all(
            every[str(ranking.passage("x", name))] == score
            for name, score in ranking.run["x"].items()
        )
        passages = searcher.rank(
            {"x": "", "nothing": ""},
            r.SearchRequest(k, by="passage"),
            queries,
        ).run["x"]
        assert list(passages.items()) == list(every.items())[:k]


@pytest.fixture(scope="module")
def parts(splade: Any, late: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """An index of passages with all that a searcher takes beside it, of the same passages."""
    folder, texts = tmp_path_factory.mktemp("passages"), CUT.of(DOCUMENTS)
    r.encode_collection(splade, texts, folder / "vectors", special_tokens=False)
    r.encode_tokens(late, texts, folder / "tokens")
    r.build_index(r.read_vectors(folder / "vectors")).save(folder / "index")
    r.BM25Index.build(texts).save(folder / "bm25")
    return {
        "index": r.load_index(folder / "index"),
        "model": splade,
        "documents": DOCUMENTS,
        "vectors": folder / "vectors",
        "second": r.BM25Index.load(folder / "bm25"),
        "late": late,
        "tokens": r.open_tokens(folder / "tokens"),
    }


def best(run: Run) -> Run:
    return best_passages(run)[0]


def test_feedback_fusion_and_reranking_are_of_documents_by_their_best_passages(
    parts: dict[str, Any],
) -> None:
    index, words, vectors = parts["index"], parts["second"], r.read_vectors(parts["vectors"])
    searcher, feedback = r.Searcher(**parts), r.Feedback("rocchio", 2)
    queries = r.encode_queries(parts["model"], QUERY)
    all_of: Callable[..., Run] = lambda asked: r.hits_to_run(asked, index.search(asked, 99))  # noqa: E731
    first, second = all_of(queries), words.search(QUERY, 99)
    basis = {"query": dict.fromkeys(best_passages(first)[1]["query"].values(), 0.0)}
    own = best(all_of(r.expand_sparse(queries, vectors, basis, feedback)))
    assert searcher.rank(QUERY, r.SearchRequest(9, feedback)).run == own
    fusion, mix = r.Fusion("interpolation", 0.3), r.Interpolation("after", 0.3)
    fused = r.interpolate([own, best(second)], [0.7, 0.3], k=9)
    assert searcher.rank(QUERY, r.SearchRequest(9, feedback, None, fusion)).run == fused
    assert searcher.rank(QUERY, r.SearchRequest(9, feedback, mix)).run == fused
    whole = {**parts, "second": r.BM25Index.build(CONTENTS)}  # finds documents, too
    fused = r.interpolate([own, whole["second"].search(QUERY, 9)], [0.7, 0.3], k=9)
    assert r.Searcher(**whole).rank(QUERY, r.SearchRequest(9, feedback, None, fusion)).run == fused
    both = searcher.search(QUERY["query"], r.SearchRequest(3, feedback, r.Interpolation("both")))
    assert all(hit["passage"]["text"] in DOCUMENTS[hit["id"]].text for hit in both)

    asked = r.encode_texts(parts["late"], QUERY, kind="query")
    every = r.rerank(
        {"query": dict.fromkeys(parts["tokens"].ids, 0.0)},
        asked,
        parts["tokens"],
        tail="drop",
    )
    expected, passages = best_passages(every)
    hits = searcher.search(QUERY["query"], r.SearchRequest(9, reranking=r.Reranking(9)))
    assert {hit["id"]: hit["score"] for hit in hits} == pytest.approx(expected["query"])
    terms = {hit["id"]: sum(term["contribution"] for term in hit["terms"]) for hit in hits}
    assert terms == pytest.approx(best(first)["query"], rel=1e-5), (
        "of the passage that the index found"
    )
    for hit in hits:
        passage = Passage.of(passages["query"][hit["id"]])
        shown = {"number": passage.number, "start": passage.start, "stop": passage.stop}
        assert hit["passage"] == shown | {
            "text": DOCUMENTS[hit["id"]].text[passage.start : passage.stop],
        }
    encoded = r.Searcher(**{**parts, "tokens": None}).rerank(
        QUERY,
        searcher.rank(QUERY, r.SearchRequest(9)),
        r.Reranking(9),
    )
    found = best_passages(first)[1]["query"]
    scores = {name: every["query"][passage] for name, passage in found.items()}
    assert encoded.run["query"] == pytest.approx(scores, abs=1e-2), "those found, encoded in fp32"
    two = searcher.rerank(QUERY, searcher.rank(QUERY, r.SearchRequest(9)), r.Reranking(2)).run[
        "query"
    ]
    assert set(list(two)[:2]) == set(list(best(first)["query"])[:2]) and len(two) == len(
        best(first)["query"],
    )


def test_passages_are_asked_for_and_of_other_parts_refused(
    parts: dict[str, Any],
    splade: Any,
    tmp_path: Path,
) -> None:
    searcher, by = r.Searcher(**parts), partial(r.SearchRequest, by="passage")
    asked = r.encode_texts(parts["late"], QUERY, kind="query")
    expected = r.rerank(searcher.rank(QUERY, by(4)).run, asked, parts["tokens"])["query"]
    hits = searcher.search(QUERY["query"], by(4, reranking=r.Reranking(4)))
    assert [hit["score"] for hit in hits] == pytest.approx(list(expected.values()))
    assert [Passage(hit["id"], *list(hit["passage"].values())[:3]).id for hit in hits] == list(
        expected,
    )
    assert all(hit["terms"] for hit in hits)
    fused = searcher.rank(QUERY, by(9, fusion=r.Fusion())).run
    assert fused == {
        "query": dict(
            list(
                r.reciprocal_rank_fusion(
                    [searcher.rank(QUERY, by(9)).run, parts["second"].search(QUERY, 9)],
                )["query"].items(),
            )[:9],
        ),
    }
    other = r.Passages(4).of(DOCUMENTS)
    r.encode_collection(splade, other, tmp_path / "vectors")
    r.encode_tokens(parts["late"], other, tmp_path / "tokens")
    tokens, words = r.open_tokens(tmp_path / "tokens"), r.BM25Index.build(other)
    mixed = r.Searcher(**{**parts, "tokens": tokens, "second": words})
    assert mixed.search("csv", r.SearchRequest(3, fusion=r.Fusion(), reranking=r.Reranking())), (
        "documents are shared"
    )
    plain, others = (
        r.Searcher(r.BM25Index.build(CONTENTS)),
        {**parts, "vectors": tmp_path / "vectors"},
    )
    before = r.SearchRequest(3, r.Feedback(), r.Interpolation("before"))
    wrong: list[tuple[str, Callable[[], object]]] = [
        ("by: expected 'document', the index is of whole", lambda: plain.search("csv", by(3))),
        ("by: expected one of document, passage, got 'word'", lambda: r.SearchRequest(by="word")),  # type: ignore[arg-type]
        (
            "teacher w: expected a BM25 index of whole documents",
            lambda: r.Teacher("w", "bm25", parts["second"]),
        ),
        (
            "tokens: expected those of the passages",
            lambda: mixed.search("csv", by(3, reranking=r.Reranking())),
        ),
        (
            r"second: .*as passages are asked for, got 4/4/",
            lambda: mixed.search("csv", by(3, fusion=r.Fusion())),
        ),
        ("second: .*whose best ones feedback reads, got 4/4/", lambda: mixed.search("csv", before)),
        (
            r"vectors: .*passages 4/4/sentences, those of the index 6/3",
            lambda: r.Searcher(**others),
        ),
    ]
    for message, call in wrong:
        refused(ValueError, message, call)


@pytest.fixture(scope="module")
def long_text() -> r.Document:
    """10,000 words, the last sentence of which is about something else."""
    last = "A young sailor painted the harbour of Valparaiso."
    sentences = [
        f"The function reads {SUBJECTS[i % 16]} of size {i} and gives a list of numbers."
        for i in range(800)
    ]
    text = " ".join([*sentences, last])
    assert len(text.split()) > 10_000
    return r.Document("long", "Manual", text)


def test_a_document_of_10_000_words_is_found_by_its_last_sentence(
    long_text: r.Document,
    tmp_path: Path,
) -> None:
    short = {name: replace(long_text, id=name, text=long_text.text[:2000]) for name in ("x", "y")}
    documents = {**short, "long": long_text}
    cut = r.Passages(75)
    texts, contents = (
        cut.of(documents),
        {name: document.contents for name, document in documents.items()},
    )
    query = "sailor who painted a harbour"
    splade = untrained_splade(texts_digest(contents), lambda: contents, cache_dir=tmp_path)
    accelerate(splade)
    late = untrained_colbert()
    manifest = r.encode_collection(splade, texts, tmp_path / "vectors", top_k=64)
    tokens = r.encode_tokens(late, texts, tmp_path / "tokens", storage="int8")
    assert manifest.truncated["count"] == tokens.truncated["count"] == 0
    index = r.build_index(r.read_vectors(tmp_path / "vectors"))
    store = r.open_tokens(tmp_path / "tokens")
    for searcher, reranking in (
        (r.Searcher(index, splade, documents=documents), None),
        (r.Searcher(r.BM25Index.build(texts), documents=documents), None),
        (
            r.Searcher(r.BM25Index.build(contents), documents=documents, late=late, tokens=store),
            r.Reranking(),
        ),
    ):
        hit = searcher.search(query, r.SearchRequest(2, reranking=reranking))[0]
        assert hit["id"] == "long" and hit["passage"]["text"].endswith("harbour of Valparaiso.")
        assert hit["passage"]["stop"] == len(long_text.text)


@pytest.mark.parametrize("fast", [False, True], ids=["plain", "accelerated"])
def test_a_models_length_is_an_option_of_encoding_and_not_of_the_model(
    splade: Any,
    late: Any,
    tmp_path: Path,
    fast: bool,
) -> None:
    if fast:
        accelerate(splade)
    try:
        before = model_fingerprint(splade)
        whole = r.encode_collection(splade, CONTENTS, tmp_path / "whole")
        for kind in ("document", "query"):
            cut = r.encode_collection(splade, CONTENTS, tmp_path / kind, max_length=9, kind=kind)  # type: ignore[arg-type]
            assert cut.truncated == {"count": 4, "max_length": 9}
            assert cut.settings["max_length"] == 9 and "max_length" not in whole.settings
            assert cut.provenance == whole.provenance and model_fingerprint(splade) == before
        again = r.encode_collection(splade, CONTENTS, tmp_path / "again")
        assert (again.shards, again.truncated) == (whole.shards, whole.truncated), (
            "its own length is back"
        )
        limit = splade.max_seq_length
        splade.max_seq_length = 9
        try:
            r.encode_collection(splade, CONTENTS, tmp_path / "nine")
        finally:
            splade.max_seq_length = limit
        nine, cut_rows = (r.read_vectors(tmp_path / name) for name in ("nine", "document"))
        assert np.array_equal(nine.indices, cut_rows.indices) and np.allclose(
            nine.data,
            cut_rows.data,
            rtol=1e-5,
        )
    finally:
        if fast:
            from tilefold.integrations.sentence_transformers import restore

            restore(splade)
    short = r.encode_tokens(late, CONTENTS, tmp_path / "tokens", max_length=8)
    assert (
        r.encode_tokens(late, CONTENTS, tmp_path / "all").n_tokens
        > short.n_tokens
        <= 8 * len(CONTENTS)
    )
    assert r.Searcher(
        r.BM25Index.build(CONTENTS),
        late=late,
        tokens=r.open_tokens(tmp_path / "tokens"),
    )
    said = f"max_length: expected at most {splade.max_seq_length}, .* got 4096"
    refused(
        ValueError,
        said,
        r.encode_collection,
        splade,
        CONTENTS,
        tmp_path / "far",
        max_length=4096,
    )


def test_a_server_gives_documents_or_passages(splade: Any, parts: dict[str, Any]) -> None:
    model, late = Served(splade, "sparse", "tiny"), Served(parts["late"], "multi-vector", "late")
    made = Searchable(
        "long",
        parts["index"],
        model,
        DOCUMENTS,
        r.read_vectors(parts["vectors"]),
        parts["second"],
        late,
    )
    searcher = r.Searcher(**{**parts, "tokens": None, "second": None})
    body = {
        "query": QUERY["query"],
        "explain": True,
        "rerank": True,
        "columns": True,
        "fusion": True,
    }
    with serving(Service([model, late], searchable=made)) as client:
        for by in ("document", "passage"):
            plain = client.post("/v1/long/search", {"query": QUERY["query"], "by": by}).json[
                "candidates"
            ]
            expected = searcher.search(QUERY["query"], r.SearchRequest(by=by))
            assert [(found["docid"], found["passage"]) for found in plain] == [
                (hit["id"], hit["passage"]) for hit in expected
            ]
            full = client.post("/v1/long/search", body | {"by": by})
            assert full.status == 200, full.raw
            assert all(
                found["explanation"]["terms"]
                for found in full.json["candidates"]
                if found["passage"]["text"]
            )
            assert {
                found["docid"] for column in full.json["columns"].values() for found in column
            } <= set(DOCUMENTS)
    with serving(
        Service([], searchable=Searchable("whole", r.BM25Index.build(CONTENTS))),
    ) as client:
        reply = client.post("/v1/whole/search", {"query": "csv", "by": "passage"})
        assert reply.status == 422 and "the index is of whole documents" in reply.json["error"]
