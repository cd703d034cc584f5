"""One contract for collections in a folder, over HTTP, and on the server of ``TILEFOLD_QDRANT_URL``
if that is set.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.inside import InUseError
from tests.manifests import edit
from tests.refusals import refused
from tests.retrieval.qdrant_over_http import OverHttp
from tilefold.retrieval import (
    SparseVectors,
    build_index,
    hits_to_run,
    load_index,
    reciprocal_rank_fusion,
)
from tilefold.retrieval.common.provenance import Provenance
from tilefold.retrieval.errors import DataError, VocabularyMismatchError
from tilefold.retrieval.index.qdrant import Documents, Filter, Layout, QdrantCollection, Queries
from tilefold.retrieval.vectors.tokens import TokenVectors

Make = Callable[..., SparseVectors]
Open = Callable[..., QdrantCollection]
URL = os.environ.get("TILEFOLD_QDRANT_URL")
PLACES = [
    "embedded",
    "http",
    pytest.param(
        "server",
        marks=pytest.mark.skipif(URL is None, reason="TILEFOLD_QDRANT_URL names no Qdrant server"),
    ),
]
SPARSE = Layout(500, "f" * 64)
ALL = Layout(500, "f" * 64, dense=16, tokens=8, fields={"lang": "keyword", "year": "integer"})


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Open]:
    """Opens the one collection of a test, again and again."""
    opened: list[QdrantCollection] = []
    name = f"tilefold-test-{uuid.uuid4().hex}"
    http = OverHttp() if request.param == "http" else None

    def open_collection(layout: Layout | None = None) -> QdrantCollection:
        if request.param == "embedded":
            opened.append(QdrantCollection.embedded(tmp_path / "collection", layout))
        else:
            opened.append(
                QdrantCollection.server(http.url if http else str(URL), name, layout, patience=2),
            )
        return opened[-1]

    yield open_collection
    for collection in opened:
        if request.param == "server":
            collection._engine.drop()
        collection.close()
    if http is not None:
        http.stop()


def tokens_of(names: list[str], seed: int = 0) -> TokenVectors:
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randn(1 + at % 4, 8, generator=generator) for at in range(len(names))]
    return TokenVectors.pack(names, rows, 8, "fp16")


def documents(vectors: SparseVectors) -> Documents:
    dense = np.random.default_rng(1).normal(size=(len(vectors), 16)).astype(np.float32)
    payloads = {
        name: {"lang": ["en", "de"][at % 2], "year": 2000 + at % 20}
        for at, name in enumerate(vectors.ids)
    }
    return Documents(vectors.ids, vectors, dense, tokens_of(vectors.ids), payloads)


def same_hits(found: list[Any], wanted: list[Any]) -> bool:
    """The same documents and, to the rounding of sums in another order, the same scores."""
    return all(
        [hit.id for hit in a] == [hit.id for hit in b]
        and np.allclose([hit.score for hit in a], [hit.score for hit in b], rtol=5e-6)
        for a, b in zip(found, wanted, strict=True)
    )


def test_documents_are_added_replaced_deleted_and_kept(place: Open, make_vectors: Make) -> None:
    vectors, queries = make_vectors(40), make_vectors(10, seed=1, prefix="q")
    collection = place(SPARSE)
    collection.add(Documents(vectors.ids[:30], vectors.take(range(30))))
    with pytest.raises(
        DataError,
        match=r"10 of 20 ids are in .* already, 'd20' the first. Nothing was added",
    ):
        collection.add(Documents(vectors.ids[20:], vectors.take(range(20, 40))))
    assert len(collection) == 30
    other = make_vectors(30, seed=5)
    collection.upsert(Documents(other.ids[20:], other.take(range(20, 30))))  # replaced
    collection.upsert(
        Documents(vectors.ids[20:], vectors.take(range(20, 40))),
        batch_size=7,
    )  # back, and added
    assert collection.delete(["d3", "d4", "nobody"]) == 2
    collection.close()
    collection = place()
    kept = vectors.take([at for at in range(40) if at not in (3, 4)])
    assert set(collection.ids()) == set(kept.ids) and len(collection) == 38
    assert same_hits(collection.search(queries, 10), build_index(kept).search(queries, 10))
    again = collection.vectors(["d7", "d3", "d5"])
    assert (again.ids, again.fingerprint) == (["d7", "d5"], "f" * 64)
    assert np.array_equal(again.data, vectors.take([7, 5]).data)


def test_equal_scores_are_in_the_order_of_ids_whichever_are_cut_off(place: Open) -> None:
    generator = np.random.default_rng(0)
    weights = generator.integers(0, 3, (300, 4))
    rows = {
        f"d{at:03d}": {t: float(w) for t, w in enumerate(row) if w}
        for at, row in enumerate(weights)
    }
    names = list(rows)
    generator.shuffle(names)
    vectors = SparseVectors.from_rows({name: rows[name] for name in names}, 500)
    collection = place(SPARSE)
    collection.upsert(Documents(vectors.ids, vectors))
    query = SparseVectors.from_rows({"q": {0: 1.0, 2: 2.0}, "none": {}, "nowhere": {77: 1.0}}, 500)
    scores = {name: row.get(0, 0.0) + 2 * row.get(2, 0.0) for name, row in rows.items()}
    ranked = sorted(
        (name for name in scores if scores[name]),
        key=lambda name: (-scores[name], name),
    )
    for k in (1, 3, 10, 57, 400):
        found, none, nowhere = collection.search(query, k)
        assert found == [(name, scores[name]) for name in ranked[:k]]
        assert none == nowhere == []


def test_dense_and_token_vectors_are_ranked_fused_and_reranked(
    place: Open,
    make_vectors: Make,
) -> None:
    stored, asked = documents(make_vectors(60)), make_vectors(6, terms=8, seed=1, prefix="q")
    collection = place(ALL)
    collection.upsert(stored)
    dense = torch.from_numpy(np.random.default_rng(2).normal(size=(6, 16)).astype(np.float32))
    queries = Queries(asked.ids, asked, dense, tokens_of(asked.ids, seed=3))  # type: ignore[arg-type]
    assert stored.dense is not None and stored.tokens is not None and queries.tokens is not None
    similar = dense.numpy() @ stored.dense.T
    late = [
        [
            float((queries.tokens.rows(q) @ stored.tokens.rows(d).T).max(dim=1).values.sum())
            for d in range(60)
        ]
        for q in range(6)
    ]
    by_dense = collection.search(Queries(asked.ids, dense=queries.dense), 5, exact=True)
    by_tokens = collection.search(Queries(asked.ids, tokens=queries.tokens), 5)
    for scores, found in ((similar, by_dense), (late, by_tokens)):
        for row, hits in zip(np.asarray(scores), found, strict=True):
            best = np.argsort(-row)[:5]
            assert [hit.id for hit in hits] == [f"d{at}" for at in best]
            assert np.allclose([hit.score for hit in hits], row[best], rtol=1e-5)
    fused = collection.search(queries, 10, fusion="rrf", depth=30)
    runs = [
        hits_to_run(asked, collection.search(part, 30))
        for part in (
            asked,
            Queries(asked.ids, dense=queries.dense),
            Queries(asked.ids, tokens=queries.tokens),
        )
    ]
    wanted = reciprocal_rank_fusion(runs)
    for name, hits in zip(asked.ids, fused, strict=True):
        expected = list(wanted[name].values())[:10]
        assert np.allclose([hit.score for hit in hits], expected, rtol=1e-5)
        assert all(hit.score == pytest.approx(wanted[name][hit.id], rel=1e-5) for hit in hits)
    assert [len(hits) for hits in collection.search(queries, 4, fusion="dbsf")] == [4] * 6
    both = Queries(asked.ids, asked, tokens=queries.tokens)
    first = collection.search(asked, 12)
    for q, hits in enumerate(collection.search(both, 3, rerank=True, depth=12)):
        candidates = sorted(first[q], key=lambda hit: -late[q][int(hit.id[1:])])
        assert [hit.id for hit in hits] == [hit.id for hit in candidates[:3]]
    for found in (
        collection.search(queries, 9, fusion="rrf", where={"lang": "en"}),
        collection.search(both, 9, rerank=True, where={"lang": "en"}),
        collection.search(
            queries,
            9,
            fusion="rrf",
            rerank=False,
            where=Filter(must_not={"lang": "de"}),
        ),
    ):
        assert all(int(hit.id[1:]) % 2 == 0 for hits in found for hit in hits) and all(found)


def test_filters_count_and_search(place: Open, make_vectors: Make) -> None:
    collection = place(ALL)
    collection.upsert(documents(make_vectors(60)))
    for where, count in (
        (None, 60),
        ({"lang": "en"}, 30),
        ({"lang": ["en", "fr"], "year": {"gte": 2010, "lt": 2012}}, 3),
        (Filter({"year": 2000}, {"lang": "de"}), 3),
    ):
        assert collection.count(where) == count, where
    assert collection.payloads(["d1", "nobody"]) == {"d1": {"lang": "de", "year": 2001}}
    found = collection.search(make_vectors(3, seed=1, prefix="q"), 50, where={"year": [2003, 2005]})
    assert {int(hit.id[1:]) % 20 for hits in found for hit in hits} <= {3, 5} and any(found)


def test_filters_tell_booleans_from_numbers_and_find_fields_with_odd_names(
    place: Open,
    make_vectors: Make,
) -> None:
    collection, vectors = place(SPARSE), make_vectors(3)
    payloads = {
        "d0": {"open": True, "n": 1, "mixed": True, "my field": "a", "a.b": 1, "by": {"name": "x"}},
        "d1": {"open": False, "n": 0, "mixed": 1, "größe": 2, "by": {"name": "y"}},
        "d2": {"open": [True, False], "n": 2**63 - 1, "in": [{"name": "x"}, {"name": "z"}]},
    }
    collection.upsert(Documents(vectors.ids, vectors, payloads=payloads))
    twice: tuple[tuple[str, Any], ...] = (("open", True), ("open", False))
    once = (
        ("n", 1),
        ("n", 2**63 - 1),
        ('"größe"', 2),
        ("by.name", "x"),
        ("in[].name", "z"),
        ('"my field"', "a"),
    )
    for count, conditions in ((2, twice), (1, once)):
        assert [collection.count({name: value}) for name, value in conditions] == [count] * len(
            conditions,
        )
    assert collection.count({"mixed": True}) == collection.count({"mixed": 1}) == 1
    refused(ValueError, "'n', which is integer, got True", collection.count, {"n": True})
    for wrong in ("my field", 'q"', "$", "", "a..b", ".a"):
        refused(
            ValueError,
            r"where: expected names of fields, with quotes",
            collection.count,
            {wrong: 1},
        )
    for value in (2**63, "\ud800"):
        refused(
            ValueError,
            r"where: expected Unicode or an integer of 64 bits for 'n'",
            collection.count,
            {"n": value},
        )


def test_one_id_instead_of_a_list_deletes_nothing(place: Open) -> None:
    collection = place(SPARSE)
    rows = SparseVectors.from_rows({name: {1: 1.0} for name in ("a", "7", "a7")}, 500, "f" * 64)
    collection.upsert(Documents(rows.ids, rows))
    for wrong, said in (
        ("a7", r"ids: expected a list, .*; pass \['a7'\]"),
        ([7], "ids: expected strings as ids"),
    ):
        for call in (
            collection.delete,
            collection.present,
            collection.payloads,
            collection.vectors,
        ):
            refused(TypeError, said, call, wrong)
    refused(
        DataError,
        "ids: expected ids without zero bytes that UTF-8 can hold",
        collection.delete,
        ["\ud800"],
    )
    assert len(collection) == 3
    assert collection.delete(("a7", "a7")) == 1


def test_a_collection_knows_what_made_it_and_refuses_the_rest(
    place: Open,
    make_vectors: Make,
) -> None:
    vectors = make_vectors(20)
    vectors.provenance = Provenance("m" * 64, "t" * 64)
    collection = place(SPARSE)
    reported: list[tuple[int, int]] = []
    collection.build(
        Documents(vectors.ids, vectors),
        batch_size=6,
        progress=lambda *done: reported.append(done),
    )
    assert reported == [(6, 20), (12, 20), (18, 20), (20, 20)]
    collection.build(Documents(vectors.ids, vectors))  # is there
    collection.close()
    collection = place()
    assert collection.complete and collection.provenance == vectors.provenance
    with pytest.raises(DataError, match=r"expected an empty collection, .*, got 20 documents"):
        collection.build(Documents(vectors.ids[:3], vectors.take(range(3))))
    other = make_vectors(3, seed=9, prefix="new")
    other.provenance = Provenance("x" * 64)
    with pytest.raises(
        DataError,
        match=r"sparse vectors of the model that made .*mmmm.* another .xxxx",
    ):
        collection.upsert(Documents(other.ids, other))
    for wrong in (
        make_vectors(2, vocab_size=600),
        SparseVectors.from_rows({"a": {1: 1.0}}, 500, "0" * 64),
    ):
        with pytest.raises(VocabularyMismatchError, match="Encode both with the same model"):
            collection.upsert(Documents(wrong.ids, wrong))
        refused(
            VocabularyMismatchError,
            "Encode both with the same model",
            collection.search,
            wrong,
            3,
        )
    assert len(collection) == 20 and collection.provenance == vectors.provenance
    other.provenance = Provenance("m" * 64)
    collection.upsert(Documents(other.ids, other))
    assert collection.provenance == Provenance(
        "m" * 64,
        None,
    )  # no longer the documents of one file
    collection.close()
    collection = place()
    assert collection.provenance == Provenance("m" * 64, None)
    collection.close()
    with pytest.raises(
        VocabularyMismatchError,
        match=r"layout: expected the vocabulary of .* with 500 terms, got one with 600",
    ):
        place(Layout(600, "f" * 64))
    refused(DataError, r"layout: expected dense=None as in .*, got 16", place, ALL)


def test_bad_input_is_refused_before_anything_is_written(place: Open, make_vectors: Make) -> None:
    collection, vectors = place(ALL), make_vectors(3)
    good, one = documents(vectors), vectors.take([0])
    with pytest.raises(DataError, match="keeps dense vectors, got only sparse, tokens"):
        collection.upsert(Documents(vectors.ids, vectors, tokens=good.tokens))
    with pytest.raises(DataError, match=r"dense vectors of length 16 .*, got 4"):
        collection.upsert(
            Documents(vectors.ids, vectors, np.zeros((3, 4), np.float32), good.tokens),
        )
    long = TokenVectors(
        ["d0"],
        torch.tensor([0, 131_072]),
        torch.zeros(131_072, 8, dtype=torch.float16),
    )
    with pytest.raises(DataError, match=r"fewer than 1,048,576 numbers .* 1,048,576 in 'd0'"):
        collection.upsert(Documents(["d0"], one, np.zeros((1, 16), np.float32), long))
    queries = Queries(vectors.ids, vectors, good.dense)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"k": 0}, "k: expected an integer of at least 1, got 0"),
        ({}, "fusion: expected one of rrf, dbsf for sparse and dense vectors, got None"),
        ({"fusion": "sum"}, "fusion: expected one of rrf, dbsf, got 'sum'"),
        ({"fusion": "rrf", "depth": 0}, "depth: expected an integer of at least 1, got 0"),
        ({"rerank": True}, "rerank: expected queries with tokens"),
        (
            {"fusion": "rrf", "where": {"year": 2.5}},
            "where: expected a text, an integer, .* for 'year', got 2.5",
        ),
        (
            {"fusion": "rrf", "where": {"year": {"above": 3}}},
            "where: expected numbers under gt, gte, lt, lte",
        ),
        ({"fusion": "rrf", "where": {"year": []}}, r"for 'year', got \[\]"),
        (
            {"fusion": "rrf", "where": {}},
            "where: expected at least one condition, got an empty filter",
        ),
    ]
    for options, message in wrong:
        refused(ValueError, message, collection.search, queries, **options)
    refused(
        ValueError,
        "fusion: expected several kinds of vectors to",
        collection.search,
        vectors,
        fusion="rrf",
    )
    refused(
        ValueError,
        "batch_size: expected an integer of at least 1, got 0",
        collection.upsert,
        good,
        batch_size=0,
    )
    assert len(collection) == 0


def test_documents_that_cannot_be_stored_are_named(make_vectors: Make) -> None:
    vectors, bad, rows = make_vectors(2), np.ones((2, 3), np.float32), SparseVectors.from_rows
    ids, heavy, bad[1, 1] = vectors.ids, rows({"a": {0: 7e4}}, 5), np.inf
    cases: list[tuple[str, Callable[[], object]]] = [
        (message, lambda payload=payload: Documents(ids, vectors, payloads={"d0": payload}))  # type: ignore[misc]
        for payload, message in (
            ({"deep": [{"n": 2**64}]}, "an integer of more than 64 bits"),
            ({"_id": 1}, "'_id' is where the id is kept, got it for 'd0'"),
            ({"x": float("nan")}, "what JSON can hold for 'd0'"),
            ({"x": object()}, "what JSON can hold for 'd0'"),
            ({"x": "\ud800"}, r"for 'd0', .*half a surrogate pair"),
        )
    ]
    cases += [
        (
            "payloads: expected ids of the documents, got 'd9'",
            lambda: Documents(ids, vectors, payloads={"d9": {}}),
        ),
        (
            "ids: expected ids without zero bytes that UTF-8 can hold",
            lambda: Documents(["\ud800"], rows({"\ud800": {0: 1.0}}, 5)),
        ),
        ("expected sparse, dense or tokens, got None for all three", lambda: Documents(["a"])),
        (
            "tokens: expected the ids of the 2",
            lambda: Documents(ids, vectors, tokens=tokens_of(["d1", "d0"])),
        ),
        ("dense: expected finite numbers, got inf for 'd1'", lambda: Documents(ids, vectors, bad)),
        (
            r"dense: expected floats \[2, D\], got int64",
            lambda: Documents(ids, vectors, np.ones((2, 3), np.int64)),
        ),
        (
            "up to 65504, got 70000",
            lambda: Documents(["a"], heavy).check(Layout(5, weights="float16"), "here"),
        ),
        ("layout: expected vocab_size, dense or tokens", Layout),
        ("dense: expected an integer of at least 1", lambda: Layout(dense=0)),
        (
            "distance: expected one of dot, cosine, got 'cos'",
            lambda: Layout(dense=3, distance="cos"),
        ),
        (
            "fields: expected a name and one of keyword",
            lambda: Layout(dense=3, fields={"a": "geo"}),
        ),
    ]
    for message, call in cases:
        refused(ValueError, message, call)


def test_an_embedded_collection_is_open_once_and_unharmed_by_others(
    make_vectors: Make,
    tmp_path: Path,
) -> None:
    vectors = make_vectors(30)
    with QdrantCollection.embedded(tmp_path / "c", SPARSE) as collection:
        collection.upsert(Documents(vectors.ids[:20], vectors.take(range(20))))
        said = "open elsewhere, and an embedded one can be open once at a time"
        refused(InUseError, said, QdrantCollection.embedded, tmp_path / "c")
        collection.upsert(Documents(vectors.ids[20:], vectors.take(range(20, 30))))
    refused(RuntimeError, "the collection is closed", len, collection)
    with QdrantCollection.embedded(tmp_path / "c") as collection:
        assert len(collection) == 30
        collection.drop()
    refused(
        FileNotFoundError,
        r"no collection there. Give a layout",
        QdrantCollection.embedded,
        tmp_path / "c",
    )


def test_a_damaged_collection_is_named(make_vectors: Make, tmp_path: Path) -> None:
    folder = tmp_path / "index"
    build_index(make_vectors(20), "qdrant", folder=folder).close()  # type: ignore[attr-defined]
    record, segments = (
        folder / "collection.json",
        (folder / "shard" / "segments").rglob("segment.json"),
    )
    text = record.read_text()
    changes: list[tuple[str, Callable[[], object]]] = [
        ("expected a JSON object", lambda: record.write_text("{")),
        ("of schema 1, got 9", lambda: record.write_text('{"schema_version": 9}')),
        (
            r"got \{'schema_version': 1\} \(KeyError\('layout'\)",
            lambda: record.write_text('{"schema_version": 1}'),
        ),
        (
            "damaged, or edited",
            lambda: record.write_text(text.replace('"complete": true', '"complete": false')),
        ),
        (r"whose build is not finished. Run tilefold index", lambda: edit(record, complete=False)),
        (
            r"segment.json: damaged; its .*\(1 of \d+ files\). Build",
            lambda: [f.write_text("?") for f in segments],
        ),
    ]
    for message, damage in changes:
        record.write_text(text)
        damage()
        refused(DataError, message, load_index, folder)
    refused(
        DataError,
        r"Qdrant failed: .*Build the index again",
        QdrantCollection.embedded,
        folder,
        verify=False,
    )
    record.unlink()
    refused(FileNotFoundError, r"collection.json|no collection there", load_index, folder)


def test_an_index_in_a_folder_replaces_an_earlier_one_when_it_is_complete(
    make_vectors: Make,
    tmp_path: Path,
) -> None:
    vectors, queries = make_vectors(50), make_vectors(5, seed=1, prefix="q")
    build_index(make_vectors(10), "qdrant", folder=tmp_path / "index").close()  # type: ignore[attr-defined]

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    folder, replaces = tmp_path / "index", {"folder": tmp_path / "index", "overwrite": True}
    refused(FileExistsError, "overwrite=True", build_index, vectors, "qdrant", folder=folder)
    with pytest.raises(KeyboardInterrupt):
        build_index(vectors, "qdrant", progress=stop, **replaces)
    with load_index(tmp_path / "index").collection as kept:  # type: ignore[attr-defined]
        assert len(kept) == 10
    index = build_index(vectors, "qdrant", **replaces)
    assert same_hits(index.search(queries, 10), build_index(vectors).search(queries, 10))
    assert [path.name for path in tmp_path.iterdir()] == ["index"]
    assert (index.n_documents, index.vocab_size, index.fingerprint) == (50, 500, "f" * 64)
    with index.collection as collection:  # type: ignore[attr-defined]
        collection.delete(["d0"])
    again = load_index(tmp_path / "index")
    with again.collection:  # type: ignore[attr-defined]
        assert again.n_documents == 49
    (tmp_path / "index" / "thesis.txt").write_text("years of work")
    refused(
        FileExistsError,
        r"other files \(thesis.txt\).*nothing was overwritten",
        build_index,
        vectors,
        "qdrant",
        **replaces,
    )


def test_an_index_on_a_server_is_a_folder_with_its_url(
    make_vectors: Make,
    tmp_path: Path,
    monkeypatch: Any,
) -> None:
    http = OverHttp()
    http.key = "sesame-9d1c"
    monkeypatch.setenv("QDRANT_API_KEY", http.key)
    vectors, queries = make_vectors(50), make_vectors(5, seed=1, prefix="q")
    index = build_index(vectors, "qdrant", url=http.url, collection="papers")
    index.save(tmp_path / "index")
    assert [path.name for path in (tmp_path / "index").iterdir()] == ["index.json"]
    text = (tmp_path / "index" / "index.json").read_text()
    assert http.key not in text and json.loads(text)["options"]["url"] == http.url
    assert same_hits(
        load_index(tmp_path / "index").search(queries, 10),
        build_index(vectors).search(queries, 10),
    )
    other = make_vectors(20, seed=4)
    with pytest.raises(
        DataError,
        match=r"got 50 documents. Choose another place, or drop it \(overwrite=True or --overwrite\)",
    ):
        build_index(other, "qdrant", url=http.url, collection="papers")
    assert (
        build_index(other, "qdrant", url=http.url, collection="papers", overwrite=True).n_documents
        == 20
    )
    with pytest.raises(VocabularyMismatchError):
        build_index(make_vectors(5, vocab_size=700), "qdrant", url=http.url, collection="papers")
    build_index(
        make_vectors(5, vocab_size=700),
        "qdrant",
        url=http.url,
        collection="papers",
        overwrite=True,
    )
    refused(DataError, "got one of another vocabulary", load_index, tmp_path / "index")
    http.client.create_collection("theirs", {})
    with pytest.raises(DataError, match=r"a collection that tilefold made, .*nothing was changed"):
        build_index(vectors, "qdrant", url=http.url, collection="theirs", overwrite=True)
    assert http.client.collection_exists("theirs")
    http.client.delete_collection("papers")
    refused(FileNotFoundError, "there is no such collection", load_index, tmp_path / "index")
    http.stop()


def test_wrong_options_of_the_index_are_named(make_vectors: Make, tmp_path: Path) -> None:
    vectors = make_vectors(3)
    for options, message in (
        ({"ef": 3}, "options: Qdrant has folder, .*; got ef"),
        ({"weights": "int8"}, "weights: expected one of float32, float16, got 'int8'"),
        ({"url": "http://localhost"}, "collection: expected a name for it on the server, got None"),
        ({"url": "http://localhost", "collection": "a/b"}, "name: expected letters"),
        ({"url": "localhost:6333", "collection": "a"}, "url: expected http://host:6333"),
        (
            {"url": "http://me:secret@host", "collection": "a"},
            "url: expected an address without a key",
        ),
        (
            {"url": "http://localhost", "collection": "a", "api_key": "se cret"},
            "api_key: expected printable ASCII",
        ),
        (
            {"url": "http://localhost", "collection": "a", "timeout": 0},
            "timeout: expected seconds above 0, got 0",
        ),
        (
            {"url": "http://localhost", "collection": "a", "folder": "b"},
            "folder: expected either a folder or the url",
        ),
    ):
        with pytest.raises(ValueError, match=message) as caught:
            build_index(vectors, "qdrant", **options)  # type: ignore[arg-type]
        assert "secret" not in str(caught.value) and "se cret" not in str(caught.value)
