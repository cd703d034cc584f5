"""Searches of documents whose metadata match: the same documents by every kind of index, also after
it has grown.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.refusals import refused
from tilefold import retrieval as r
from tilefold.retrieval import Filter
from tilefold.retrieval.data.metadata import Metadata, kept_fields
from tilefold.retrieval.errors import DataError
from tilefold.retrieval.index.opening import open_index

Make = Callable[..., r.SparseVectors]
BACKENDS = ["exact", "seismic", "qdrant", "dense", "bm25"]
CONDITIONS: list[tuple[Any, Callable[[dict[str, Any]], bool]]] = [
    ({"lang": "de"}, lambda of: of["lang"] == "de"),
    (
        {"lang": ["de", "fr"], "year": {"gte": 2003, "lt": 2008}},
        lambda of: of["lang"] != "en" and 3 <= of["n"] < 8,
    ),
    ({"by.name": "x1"}, lambda of: of["by"]["name"] == "x1"),
    ({"tags": "b"}, lambda of: "b" in of["tags"]),
    (Filter(must_not={"tags": ["a"]}), lambda of: "a" not in of["tags"]),
    ({"tags": None}, lambda of: not of["tags"]),
    (Filter(must_not={"tags": None}), lambda of: bool(of["tags"])),
    ({"ok": True}, lambda of: of["ok"]),
    ({"rare": 1}, lambda of: "rare" in of),
    (Filter({"year": 2003}, {"lang": "de"}), lambda of: of["n"] == 3 and of["lang"] != "de"),
    ({"score": {"gt": 20.5}}, lambda of: of["score"] > 20.5),
]


def fields(at: int) -> dict[str, Any]:
    found = {
        "lang": ["de", "en", "fr"][at % 3],
        "n": at % 10,
        "year": 2000 + at % 10,
        "tags": ["a", "b"][: at % 3],
    }
    return (
        found
        | {"by": {"name": f"x{at % 2}"}, "score": at / 7, "ok": at % 2 == 0}
        | ({"rare": 1} if at == 7 else {})
    )


def parts_of(backend: str, make: Make, folder: Path) -> tuple[list[Any], Any]:
    """Documents d0 to d199, then d150 to d219, as their backend takes them; queries."""
    first, second = make(200), make(70, seed=1)
    second = replace(second, ids=[f"d{at}" for at in range(150, 220)])
    queries = make(4, seed=3, prefix="q")
    if backend == "dense":
        from tests.retrieval.index.test_updates import dense_folder

        stores = [
            dense_folder(folder / str(seed), part.ids, seed)
            for seed, part in enumerate((first, second))
        ]
        return stores, torch.randn(4, 8, generator=torch.Generator().manual_seed(9))
    if backend == "bm25":
        words = [
            {
                name: " ".join(f"w{term % 40}" for term in part.row(row)[0])
                for row, name in enumerate(part.ids)
            }
            for part in (first, second)
        ]
        return words, {f"q{at}": f"w{at} w{at + 9}" for at in range(4)}
    pytest.importorskip({"seismic": "seismic", "qdrant": "qdrant_edge"}.get(backend, "numpy"))
    return [first, second], queries


def build(backend: str, part: Any, metadata: Any) -> Any:
    if backend in ("dense", "bm25"):
        return (r.DenseIndex if backend == "dense" else r.BM25Index).build(part, metadata=metadata)
    return r.build_index(part, backend, metadata=metadata)


def ranked(index: Any, queries: Any, k: int, **options: Any) -> list[list[tuple[str, float]]]:
    found = index.search(queries, k, **options)
    rows = (each.items() for each in found.values()) if isinstance(found, dict) else found
    return [[(name, pytest.approx(score, rel=2e-3)) for name, score in row] for row in rows]


def check(index: Any, queries: Any, metadata: dict[str, Any]) -> None:
    """Filtered rankings are those of all documents without the others: `k` of them wherever `k`
    match.
    """
    whole = ranked(index, queries, 1000)
    for where, holds in CONDITIONS:
        wanted = [[hit for hit in row if holds(metadata[hit[0]])] for row in whole]
        for k in (3, 1000):
            found = ranked(index, queries, k, where=where)
            assert [[name for name, _ in row] for row in found] == [
                [name for name, _ in row[:k]] for row in wanted
            ]
            assert found == [row[:k] for row in wanted], where


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_index_finds_what_matches_before_and_after_it_grew(
    backend: str,
    make_vectors: Make,
    tmp_path: Path,
) -> None:
    (first, second), queries = parts_of(backend, make_vectors, tmp_path)
    metadata = {f"d{at}": fields(at) for at in range(200)}
    changed = {f"d{at}": fields(at + 1) for at in range(150, 220)}
    options = (
        {"heap_factor": 0.0, "query_cut": 100, "n_postings": 1000} if backend == "seismic" else {}
    )
    built = (
        r.build_index(first, backend, metadata=metadata, **options)
        if options
        else build(backend, first, metadata)
    )
    check(built, queries, metadata)
    if backend == "qdrant":
        return
    place = tmp_path / "index"
    built.save(place)
    loaded: Any = open_index(place)
    assert loaded.metadata.kinds == built.metadata.kinds
    check(loaded, queries, metadata)
    gone = [f"d{at}" for at in range(5)]
    if backend == "bm25":
        loaded.updated(second, gone, changed).save(place, overwrite=True)
    else:
        assert r.update_index(place, second, gone, metadata=changed)["n_documents"] == 215
        grown: Any = open_index(place)
        check(grown, queries, metadata | changed)
        for device in (
            ("cpu", *(["cuda"] if torch.cuda.is_available() else []))
            if hasattr(built, "on")
            else ()
        ):
            check(grown.on(device), queries, metadata | changed)
            assert grown.on(device).n_documents == 215
        r.merge_segments(place)
    merged: Any = open_index(place)
    assert merged.n_documents == 215 and set(merged.ids).isdisjoint(gone)
    check(merged, queries, metadata | changed)
    without = build(backend, second, None)
    with pytest.raises(ValueError, match="where: expected an index that keeps metadata"):
        without.search(queries, 3, where={"lang": "de"})
    without.save(place, overwrite=True)
    assert open_index(place).metadata is None, "nothing is left of the index that was there"


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_an_index_that_grew_finds_on_a_device_what_is_there(
    device: str,
    make_vectors: Make,
    tmp_path: Path,
) -> None:
    (first, second), queries = parts_of("exact", make_vectors, tmp_path)
    r.build_index(first, metadata={"d9": {"n": 9}, "d170": {"n": 9}}).save(tmp_path / "index")
    r.update_index(tmp_path / "index", second, ["d3"], metadata={})
    fast: Any = open_index(tmp_path / "index")
    fast = fast.on(device)
    assert fast.metadata.mask(Filter({"n": 9})).sum() == 2, (
        "of rows, of which one has another document now"
    )
    found = {
        name
        for row in ranked(fast, queries, 300, among=fast.mask(["d9", "d170", "d210"]))
        for name, _ in row
    }
    assert found <= {"d9", "d170", "d210"}
    assert {name for row in ranked(fast, queries, 300, where={"n": 9}) for name, _ in row} <= {"d9"}
    assert "d3" not in {name for row in ranked(fast, queries, 300) for name, _ in row}
    refused(ValueError, "ids: expected ids of documents of the index, got 'd3'", fast.mask, ["d3"])
    dense = torch.zeros(4, 500)
    for row in range(4):
        terms, weights = queries.row(row)
        dense[row, terms.tolist()] = torch.from_numpy(weights.copy())
    assert [
        [fast.ids[at] for at in row] for row in fast.search_tensor(dense.to(device), 5)[1].tolist()
    ] == [[name for name, _ in row] for row in ranked(fast, queries, 5)]


def test_seismic_looks_deeper_and_then_at_all_that_are_allowed(
    make_vectors: Make,
    tmp_path: Path,
) -> None:
    """Few postings, of which a search alone would find a few documents; some documents without
    terms.
    """
    pytest.importorskip("seismic")
    vectors, queries = make_vectors(3000, terms=8), make_vectors(20, terms=8, seed=5, prefix="q")
    lengths = np.diff(vectors.indptr) * (np.arange(3000) % 7 > 0)
    keep = np.repeat(np.arange(3000) % 7 > 0, 8)
    vectors = replace(
        vectors,
        indptr=np.append(0, lengths.cumsum()),
        indices=vectors.indices[keep],
        data=vectors.data[keep],
    )
    metadata = {name: {"half": at % 2, "few": at % 500} for at, name in enumerate(vectors.ids)}
    r.build_index(vectors, "seismic", metadata=metadata, n_postings=5).save(tmp_path / "index")
    index: Any = open_index(tmp_path / "index")
    exact = r.build_index(vectors, metadata=metadata)
    assert np.array_equal(index.stored().indices, vectors.indices)
    assert (
        index.stored().data == pytest.approx(vectors.data, rel=2**-10)
        and index.stored().ids == vectors.ids
    )
    for where, k in (({"few": 3}, 4), ({"half": 1}, 10), ({"half": 1}, 3000)):
        pairs = zip(
            index.search(queries, k, where=where),
            exact.search(queries, k, where=where),
            strict=True,
        )
        assert all(len(found) == len(wanted) for found, wanted in pairs), where


def test_conditions_are_read_from_texts_and_refused_where_nothing_has_such_a_field() -> None:
    rows = {
        "a": {"lang": "de", "zip": "01234", "year": 1999, "a b": {"c": 2.5}},
        "b": {"zip": "99", "all": [{"n": 1}]},
    }
    metadata = Metadata.of(rows, list(rows), None)
    assert metadata is not None
    assert metadata.kinds == {
        '"a b".c': ["float"],
        "all[].n": ["integer"],
        "lang": ["text"],
        "year": ["integer"],
        "zip": ["text"],
    }
    for texts, expected in (
        (["lang=de"], "a"),
        (["lang!=de"], "b"),
        (["lang=null"], "b"),
        (["lang != null"], "a"),
        (["zip=99,01234"], "ab"),
        (["year>=1999", "year<2000"], "a"),
        (["year>1999"], ""),
        (['"a b".c=2.5'], "a"),
        (["all[].n=1"], "b"),
        (['lang="de"', "year=1999"], "a"),
        (["zip=99"], "b"),
    ):
        mask = metadata.mask(Filter.parse(texts, metadata.kinds))
        assert "".join(name for name, there in zip(rows, mask, strict=True) if there) == expected, (
            texts
        )
    for texts, said in (
        (["lang"], "expected a condition such as lang=de"),
        (["lang=de", "lang=en"], "expected one condition for 'lang', got 'lang=en' too"),
        (["land=de"], r"expected a field of the index, .*lang \(text\).*; got 'land'"),
        (["year=old"], r"expected a value of 'year', which is integer, got 'old' \(text\)"),
        (["lang>3"], "expected a value of 'lang', which is text, got a range"),
        (["year=1,old"], "expected a text, an integer"),
    ):
        with pytest.raises(ValueError, match=f"where: {said}"):
            metadata.mask(Filter.parse(texts, metadata.kinds))
    kept = kept_fields(
        {
            "day": date(2024, 5, 1),
            "vector": [0.5, 1.0],
            "long": "x" * 1001,
            "nan": float("nan"),
            "big": 1 << 70,
            "no": None,
            "many": list(range(101)),
            "bytes": b"1",
            "deep": {"none": None},
            "fine": [1, 2],
        },
    )
    assert kept == {"day": "2024-05-01", "fine": [1, 2]}


def test_metadata_come_from_an_object_or_from_columns_and_are_saved_again(tmp_path: Path) -> None:
    lines = [
        {
            "_id": "a",
            "text": "x",
            "title": "",
            "metadata": {"lang": "de", "by": {"name": "n"}},
            "year": 1999,
        },
        {"_id": "b", "text": "y", "metadata": {}, "embedding": [0.1, 0.2]},
    ]
    (tmp_path / "corpus.jsonl").write_text("\n".join(map(json.dumps, lines)))
    read = r.load_beir(tmp_path)
    assert read.metadata() == {"a": {"year": 1999, "lang": "de", "by": {"name": "n"}}}
    read.save_beir(tmp_path / "again")
    assert r.load_documents(tmp_path / "again" / "corpus.jsonl") == read.documents
    (tmp_path / "rows.tsv").write_text("id\ttext\tlang\tyear\na\tx\tde\t1999\nb\ty\t\t2000\n")
    found = {name: each.metadata for name, each in r.load_documents(tmp_path / "rows.tsv").items()}
    assert found == {"a": {"lang": "de", "year": "1999"}, "b": {"year": "2000"}}


def test_a_damaged_file_of_metadata_is_refused(make_vectors: Make, tmp_path: Path) -> None:
    r.build_index(make_vectors(5), metadata={"d1": {"lang": "de"}}).save(tmp_path / "index")
    file = tmp_path / "index" / "metadata.parquet"
    whole = file.read_bytes()
    file.write_bytes(whole[:-9] + b"x" + whole[-8:])
    refused(DataError, "damaged; its checksum", r.load_index, tmp_path / "index")
    file.unlink()
    refused(FileNotFoundError, "no such file", r.load_index, tmp_path / "index")
    file.write_bytes(whole)
    for content, documents in ((b"no Parquet", 5), (whole, 1)):
        file.write_bytes(content)
        refused(DataError, "expected metadata of", Metadata.load, file.parent, documents)


def test_every_stage_of_a_search_keeps_to_what_matches(late: Any) -> None:
    """Passages, feedback, a second ranking, fusion and late interaction; documents of one language
    only.
    """
    texts = [
        f"kettle {'tea water cup ' * (at % 4 + 1)}. Red boats of {at} colours sail. Tea again."
        for at in range(12)
    ]
    documents = {
        f"d{at}": r.Document(f"d{at}", "", text, {"lang": "de" if at % 3 else "en"})
        for at, text in enumerate(texts)
    }
    metadata = {name: each.metadata for name, each in documents.items()}
    english, cut = {"d0", "d3", "d6", "d9"}, r.Passages(6).of(documents)
    words = r.BM25Index.build(cut, metadata=metadata)
    searcher = r.Searcher(words, documents=documents, second=words, late=late)
    where, queries = {"lang": "en"}, {"q": "kettle tea boats"}
    feedback, mix = r.Feedback("rocchio", depth=3), r.Interpolation("both")
    for by in ("document", "passage"):
        for more in (
            {},
            {"feedback": feedback},
            {"feedback": feedback, "interpolation": mix},
            {"fusion": r.Fusion()},
        ):
            request: Any = r.SearchRequest(3, by=by, where=where, reranking=r.Reranking(5), **more)
            ranking = searcher.rank(queries, request)
            for run in (
                ranking.run,
                *ranking.stages.values(),
                searcher.rerank(queries, ranking, request.reranking).run,
            ):
                assert (
                    len(run["q"]) >= 3 and {name.partition("#")[0] for name in run["q"]} <= english
                ), (by, more)
    assert len(searcher.search("kettle", r.SearchRequest(9, where=where))) == 4
    assert len(searcher.rank_plainly(queries, replace(request, by="document"), ranking)["q"]) >= 3
    run = r.Searcher(words, second={"q": {"d1": 1.0}})
    with pytest.raises(
        ValueError,
        match="second: expected a BM25 index with metadata beside where",
    ):
        run.rank(queries, r.SearchRequest(fusion=r.Fusion(), where=where))
    refused(ValueError, "where: expected at least one condition", r.SearchRequest, where={})
