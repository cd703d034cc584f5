"""Metadata of documents: conditions on fields, and searches of the documents that match them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.retrieval.conftest import dense_folder, random_vectors
from tilefold import retrieval as r
from tilefold.retrieval import Filter
from tilefold.retrieval.data.metadata import Metadata, kept_fields
from tilefold.retrieval.errors import DataError
from tilefold.retrieval.index.opening import open_index

MakeVectors = Callable[..., r.SparseVectors]
Fields = dict[str, Any]
UPDATABLE_BACKENDS = ["exact", "seismic", "dense", "bm25"]
EXHAUSTIVE_SEISMIC = {"heap_factor": 0.0, "query_cut": 100, "n_postings": 1000}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def fields_of(number: int) -> Fields:
    """Metadata of every type, which depend on the number of a document."""
    fields: Fields = {
        "lang": ["de", "en", "fr"][number % 3],
        "n": number % 10,
        "year": 2000 + number % 10,
        "tags": ["a", "b"][: number % 3],
        "by": {"name": f"x{number % 2}"},
        "score": number / 7,
        "ok": number % 2 == 0,
    }
    if number == 7:
        fields["rare"] = 1
    return fields


@dataclass(frozen=True)
class Condition:
    """A filter, and a function that says whether the fields of a document match it."""

    where: Any
    matches: Callable[[Fields], bool]


CONDITIONS = [
    Condition({"lang": "de"}, lambda fields: fields["lang"] == "de"),
    Condition(
        {"lang": ["de", "fr"], "year": {"gte": 2003, "lt": 2008}},
        lambda fields: fields["lang"] != "en" and 2003 <= fields["year"] < 2008,
    ),
    Condition({"by.name": "x1"}, lambda fields: fields["by"]["name"] == "x1"),
    Condition({"tags": "b"}, lambda fields: "b" in fields["tags"]),
    Condition(Filter(must_not={"tags": ["a"]}), lambda fields: "a" not in fields["tags"]),
    Condition({"tags": None}, lambda fields: not fields["tags"]),
    Condition(Filter(must_not={"tags": None}), lambda fields: bool(fields["tags"])),
    Condition({"ok": True}, lambda fields: fields["ok"]),
    Condition({"rare": 1}, lambda fields: "rare" in fields),
    Condition(
        Filter({"year": 2003}, {"lang": "de"}),
        lambda fields: fields["year"] == 2003 and fields["lang"] != "de",
    ),
    Condition({"score": {"gt": 20.5}}, lambda fields: fields["score"] > 20.5),
]


@dataclass(frozen=True)
class Parts:
    """Documents d0 to d199, documents d150 to d219, and queries, as a backend takes them."""

    first: Any
    second: Any
    queries: Any


def make_parts(backend: str, make_vectors: MakeVectors, folder: Path) -> Parts:
    first = make_vectors(200)
    second = replace(make_vectors(70, seed=1), ids=[f"d{number}" for number in range(150, 220)])
    if backend == "dense":
        return Parts(
            dense_folder(folder / "first", first.ids, seed=0),
            dense_folder(folder / "second", second.ids, seed=1),
            torch.randn(4, 8, generator=torch.Generator().manual_seed(9)),
        )
    if backend == "bm25":
        queries = {f"q{number}": f"w{number} w{number + 9}" for number in range(4)}
        return Parts(texts_of_terms(first), texts_of_terms(second), queries)
    if backend == "seismic":
        pytest.importorskip("seismic")
    if backend == "qdrant":
        pytest.importorskip("qdrant_edge")
    return Parts(first, second, make_vectors(4, seed=3, prefix="q"))


def texts_of_terms(vectors: r.SparseVectors) -> dict[str, str]:
    """A text for every vector: a word for each of its terms, of 40 words."""
    texts = {}
    for row, name in enumerate(vectors.ids):
        terms, _ = vectors.row(row)
        texts[name] = " ".join(f"w{term % 40}" for term in terms)
    return texts


def build(backend: str, documents: Any, metadata: Any) -> Any:
    """An index of any backend; that of Seismic is exhaustive."""
    if backend == "dense":
        return r.DenseIndex.build(documents, metadata=metadata)
    if backend == "bm25":
        return r.BM25Index.build(documents, metadata=metadata)
    options: dict[str, Any] = EXHAUSTIVE_SEISMIC if backend == "seismic" else {}
    return r.build_index(documents, backend, metadata=metadata, **options)


def search(index: Any, queries: Any, k: int, **options: Any) -> list[list[tuple[str, float]]]:
    """Ids and scores of the hits of every query, for an index of any backend."""
    result = index.search(queries, k, **options)
    if isinstance(result, dict):
        return [list(scores.items()) for scores in result.values()]
    return [[(hit.id, hit.score) for hit in hits] for hits in result]


def found_ids(rows: list[list[tuple[str, float]]]) -> set[str]:
    """The ids of the hits of all queries."""
    return {name for row in rows for name, _ in row}


def check_filtered_rankings(index: Any, queries: Any, metadata: dict[str, Fields]) -> None:
    """Expect, for all conditions, the ranking of all documents without those that do not match."""
    all_rows = search(index, queries, 1000)
    for condition in CONDITIONS:
        for k in (3, 1000):
            rows = search(index, queries, k, where=condition.where)
            for row, all_hits in zip(rows, all_rows, strict=True):
                expected = [hit for hit in all_hits if condition.matches(metadata[hit[0]])][:k]
                assert [name for name, _ in row] == [name for name, _ in expected]
                expected_scores = [score for _, score in expected]
                assert [score for _, score in row] == pytest.approx(expected_scores, rel=2e-3)


@pytest.mark.parametrize("backend", [*UPDATABLE_BACKENDS, "qdrant"])
def test_a_filtered_search_ranks_the_matching_documents(
    backend: str,
    make_vectors: MakeVectors,
    tmp_path: Path,
) -> None:
    parts = make_parts(backend, make_vectors, tmp_path)
    metadata = {f"d{number}": fields_of(number) for number in range(200)}
    built = build(backend, parts.first, metadata)
    check_filtered_rankings(built, parts.queries, metadata)
    if backend == "qdrant":
        return
    built.save(tmp_path / "index")
    loaded: Any = open_index(tmp_path / "index")
    assert loaded.metadata.kinds == built.metadata.kinds
    check_filtered_rankings(loaded, parts.queries, metadata)


@pytest.mark.parametrize("backend", UPDATABLE_BACKENDS)
def test_a_filtered_search_of_an_updated_index_ranks_the_matching_documents(
    backend: str,
    make_vectors: MakeVectors,
    tmp_path: Path,
) -> None:
    path = tmp_path / "index"
    parts = make_parts(backend, make_vectors, tmp_path)
    metadata = {f"d{number}": fields_of(number) for number in range(200)}
    new_metadata = {f"d{number}": fields_of(number + 1) for number in range(150, 220)}
    current_metadata = metadata | new_metadata
    deleted = [f"d{number}" for number in range(5)]
    built = build(backend, parts.first, metadata)
    built.save(path)

    if backend == "bm25":
        built.updated(parts.second, deleted, new_metadata).save(path, overwrite=True)
    else:
        summary = r.update_index(path, parts.second, deleted, metadata=new_metadata)
        assert summary["n_documents"] == 215
        with_segments: Any = open_index(path)
        check_filtered_rankings(with_segments, parts.queries, current_metadata)
        if hasattr(built, "on"):
            devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
            for device in devices:
                on_device = with_segments.on(device)
                assert on_device.n_documents == 215
                check_filtered_rankings(on_device, parts.queries, current_metadata)
        r.merge_segments(path)

    merged: Any = open_index(path)
    assert merged.n_documents == 215
    assert set(merged.ids).isdisjoint(deleted)
    check_filtered_rankings(merged, parts.queries, current_metadata)


@pytest.mark.parametrize("backend", UPDATABLE_BACKENDS)
def test_an_index_without_metadata_refuses_a_filter(
    backend: str,
    make_vectors: MakeVectors,
    tmp_path: Path,
) -> None:
    parts = make_parts(backend, make_vectors, tmp_path)
    index = build(backend, parts.second, None)
    with pytest.raises(ValueError, match="where: expected an index that stores metadata"):
        index.search(parts.queries, 3, where={"lang": "de"})


@pytest.mark.parametrize("backend", UPDATABLE_BACKENDS)
def test_an_index_that_is_replaced_leaves_no_metadata(
    backend: str,
    make_vectors: MakeVectors,
    tmp_path: Path,
) -> None:
    parts = make_parts(backend, make_vectors, tmp_path)
    metadata = {f"d{number}": fields_of(number) for number in range(200)}
    build(backend, parts.first, metadata).save(tmp_path / "index")
    build(backend, parts.second, None).save(tmp_path / "index", overwrite=True)
    assert open_index(tmp_path / "index").metadata is None


@pytest.mark.parametrize("device", DEVICES)
def test_search_on_a_device_ignores_replaced_and_deleted_rows(
    device: str,
    make_vectors: MakeVectors,
    tmp_path: Path,
) -> None:
    parts = make_parts("exact", make_vectors, tmp_path)
    path = tmp_path / "index"
    r.build_index(parts.first, metadata={"d9": {"n": 9}, "d170": {"n": 9}}).save(path)
    r.update_index(path, parts.second, ["d3"], metadata={})
    opened: Any = open_index(path)
    index = opened.on(device)
    # The first row of d170 matches too, but the update replaced it.
    assert index.metadata.mask(Filter({"n": 9})).sum() == 2

    of_mask = search(index, parts.queries, 300, among=index.mask(["d9", "d170", "d210"]))
    of_filter = search(index, parts.queries, 300, where={"n": 9})

    assert found_ids(of_mask) <= {"d9", "d170", "d210"}
    assert found_ids(of_filter) <= {"d9"}
    assert "d3" not in found_ids(search(index, parts.queries, 300))
    with pytest.raises(
        ValueError,
        match="ids: expected ids of documents in the index, got 'd3'",
    ):
        index.mask(["d3"])


@pytest.mark.parametrize("device", DEVICES)
def test_query_tensors_find_the_documents_of_an_updated_index(
    device: str,
    make_vectors: MakeVectors,
    tmp_path: Path,
) -> None:
    parts = make_parts("exact", make_vectors, tmp_path)
    r.build_index(parts.first).save(tmp_path / "index")
    r.update_index(tmp_path / "index", parts.second, ["d3"])
    opened: Any = open_index(tmp_path / "index")
    index = opened.on(device)
    queries = torch.zeros(4, 500)
    for row in range(4):
        terms, weights = parts.queries.row(row)
        queries[row, terms.tolist()] = torch.from_numpy(weights.copy())

    _, positions = index.search_tensor(queries.to(device), 5)

    for row, hits in zip(positions.tolist(), search(index, parts.queries, 5), strict=True):
        assert [index.ids[position] for position in row] == [name for name, _ in hits]


@pytest.fixture(scope="module")
def shallow_seismic_vectors() -> r.SparseVectors:
    """3,000 vectors of 8 terms; every seventh has none."""
    vectors = random_vectors(3000, terms=8)
    has_terms = np.arange(3000) % 7 > 0
    n_terms = np.diff(vectors.indptr) * has_terms
    is_kept = np.repeat(has_terms, 8)
    return replace(
        vectors,
        indptr=np.append(0, n_terms.cumsum()),
        indices=vectors.indices[is_kept],
        data=vectors.data[is_kept],
    )


def test_seismic_stores_documents_without_terms(
    shallow_seismic_vectors: r.SparseVectors,
    tmp_path: Path,
) -> None:
    pytest.importorskip("seismic")
    vectors = shallow_seismic_vectors
    r.build_index(vectors, "seismic", n_postings=5).save(tmp_path / "index")
    index: Any = open_index(tmp_path / "index")
    stored = index.stored()
    assert stored.ids == vectors.ids
    assert np.array_equal(stored.indices, vectors.indices)
    assert stored.data == pytest.approx(vectors.data, rel=2**-10)


@pytest.mark.parametrize(
    ("where", "k"),
    [
        pytest.param({"few": 3}, 4, id="six matching documents"),
        pytest.param({"half": 1}, 10, id="half of the documents"),
        pytest.param({"half": 1}, 3000, id="half of the documents, all of them"),
    ],
)
def test_filtered_seismic_search_returns_as_many_documents_as_exact_search(
    where: Fields,
    k: int,
    shallow_seismic_vectors: r.SparseVectors,
    make_vectors: MakeVectors,
    tmp_path: Path,
) -> None:
    """A search of few postings finds few documents, so Seismic must read more of them."""
    pytest.importorskip("seismic")
    vectors = shallow_seismic_vectors
    queries = make_vectors(20, terms=8, seed=5, prefix="q")
    metadata = {}
    for row, name in enumerate(vectors.ids):
        metadata[name] = {"half": row % 2, "few": row % 500}
    r.build_index(vectors, "seismic", metadata=metadata, n_postings=5).save(tmp_path / "index")
    index: Any = open_index(tmp_path / "index")
    exact = r.build_index(vectors, metadata=metadata)

    rows = index.search(queries, k, where=where)
    exact_rows = exact.search(queries, k, where=where)

    assert [len(hits) for hits in rows] == [len(hits) for hits in exact_rows]


@pytest.fixture
def metadata_of_two() -> Metadata:
    """Metadata of documents a and b, with nested fields and a name with a blank."""
    rows: dict[str, Fields] = {
        "a": {"lang": "de", "zip": "01234", "year": 1999, "a b": {"c": 2.5}},
        "b": {"zip": "99", "all": [{"n": 1}]},
    }
    metadata = Metadata.from_fields(rows, list(rows), None)
    assert metadata is not None
    return metadata


def test_metadata_record_the_types_of_nested_fields(metadata_of_two: Metadata) -> None:
    assert metadata_of_two.kinds == {
        '"a b".c': ["float"],
        "all[].n": ["integer"],
        "lang": ["text"],
        "year": ["integer"],
        "zip": ["text"],
    }


@pytest.mark.parametrize(
    ("conditions", "expected"),
    [
        pytest.param(["lang=de"], [True, False], id="lang=de"),
        pytest.param(["lang!=de"], [False, True], id="lang!=de"),
        pytest.param(["lang=null"], [False, True], id="lang=null"),
        pytest.param(["lang != null"], [True, False], id="lang != null"),
        pytest.param(["zip=99,01234"], [True, True], id="zip=99,01234"),
        pytest.param(["year>=1999", "year<2000"], [True, False], id="year>=1999 and year<2000"),
        pytest.param(["year>1999"], [False, False], id="year>1999"),
        pytest.param(['"a b".c=2.5'], [True, False], id='"a b".c=2.5'),
        pytest.param(["all[].n=1"], [False, True], id="all[].n=1"),
        pytest.param(['lang="de"', "year=1999"], [True, False], id='lang="de" and year=1999'),
        pytest.param(["zip=99"], [False, True], id="zip=99"),
    ],
)
def test_conditions_are_parsed_by_the_types_of_fields(
    metadata_of_two: Metadata,
    conditions: list[str],
    expected: list[bool],
) -> None:
    where = Filter.parse(conditions, metadata_of_two.kinds)
    assert metadata_of_two.mask(where).tolist() == expected


@pytest.mark.parametrize(
    ("conditions", "message"),
    [
        pytest.param(
            ["lang"],
            "expected a condition such as lang=de",
            id="no comparison",
        ),
        pytest.param(
            ["lang=de", "lang=en"],
            "expected one condition for 'lang', got 'lang=en' too",
            id="two values of a field",
        ),
        pytest.param(
            ["land=de"],
            r"expected a field of the index, .*lang \(text\).*; got 'land'",
            id="unknown field",
        ),
        pytest.param(
            ["year=old"],
            r"expected a value of 'year', which is integer, got 'old' \(text\)",
            id="value of another type",
        ),
        pytest.param(
            ["lang>3"],
            "expected a value of 'lang', which is text, got a range",
            id="range of texts",
        ),
        pytest.param(["year=1,old"], "expected a text, an integer", id="values of two types"),
    ],
)
def test_conditions_that_no_document_can_match_are_refused(
    metadata_of_two: Metadata,
    conditions: list[str],
    message: str,
) -> None:
    with pytest.raises(ValueError, match=f"where: {message}"):
        metadata_of_two.mask(Filter.parse(conditions, metadata_of_two.kinds))


def test_fields_that_cannot_be_filtered_by_are_left_out() -> None:
    fields = kept_fields(
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
    assert fields == {"day": "2024-05-01", "fine": [1, 2]}


def test_metadata_come_from_an_object_and_are_saved_again(tmp_path: Path) -> None:
    with_object = {
        "_id": "a",
        "text": "x",
        "title": "",
        "metadata": {"lang": "de", "by": {"name": "n"}},
        "year": 1999,
    }
    with_vector = {"_id": "b", "text": "y", "metadata": {}, "embedding": [0.1, 0.2]}
    lines = [json.dumps(with_object), json.dumps(with_vector)]
    (tmp_path / "corpus.jsonl").write_text("\n".join(lines))

    collection = r.load_beir(tmp_path)
    collection.save_beir(tmp_path / "again")

    assert collection.metadata() == {"a": {"year": 1999, "lang": "de", "by": {"name": "n"}}}
    assert r.load_documents(tmp_path / "again" / "corpus.jsonl") == collection.documents


def test_metadata_come_from_columns(tmp_path: Path) -> None:
    (tmp_path / "rows.tsv").write_text("id\ttext\tlang\tyear\na\tx\tde\t1999\nb\ty\t\t2000\n")
    documents = r.load_documents(tmp_path / "rows.tsv")
    assert documents["a"].metadata == {"lang": "de", "year": "1999"}
    assert documents["b"].metadata == {"year": "2000"}


def test_a_damaged_or_missing_file_of_metadata_is_refused(
    make_vectors: MakeVectors,
    tmp_path: Path,
) -> None:
    r.build_index(make_vectors(5), metadata={"d1": {"lang": "de"}}).save(tmp_path)
    file = tmp_path / "metadata.parquet"
    content = file.read_bytes()
    file.write_bytes(content[:-9] + b"x" + content[-8:])
    with pytest.raises(DataError, match="damaged; its checksum"):
        r.load_index(tmp_path)
    file.unlink()
    with pytest.raises(FileNotFoundError, match="no such file"):
        r.load_index(tmp_path)


def test_a_file_of_other_metadata_is_refused(make_vectors: MakeVectors, tmp_path: Path) -> None:
    r.build_index(make_vectors(5), metadata={"d1": {"lang": "de"}}).save(tmp_path)
    with pytest.raises(DataError, match="expected metadata of"):
        Metadata.load(tmp_path, 1)
    (tmp_path / "metadata.parquet").write_bytes(b"no Parquet")
    with pytest.raises(DataError, match="expected metadata of"):
        Metadata.load(tmp_path, 5)


ENGLISH_DOCUMENTS = {"d0", "d3", "d6", "d9"}


@pytest.fixture(scope="module")
def bilingual_documents() -> dict[str, r.Document]:
    """Twelve documents of several sentences, of which four are English."""
    documents = {}
    for number in range(12):
        name = f"d{number}"
        words = "tea water cup " * (number % 4 + 1)
        text = f"kettle {words}. Red boats of {number} colours sail. Tea again."
        language = "en" if number % 3 == 0 else "de"
        documents[name] = r.Document(name, "", text, {"lang": language})
    return documents


@pytest.fixture(scope="module")
def words(bilingual_documents: dict[str, r.Document]) -> r.BM25Index:
    """A BM25 index of the passages of the documents, with their metadata."""
    metadata = {name: document.metadata for name, document in bilingual_documents.items()}
    return r.BM25Index.build(r.Passages(6).of(bilingual_documents), metadata=metadata)


BILINGUAL_QUERIES = {"q": "kettle tea boats"}
IN_ENGLISH = {"lang": "en"}


def check_english_only(run: Any) -> None:
    """Expect at least three hits, all of them English documents or passages of some."""
    documents = {name.partition("#")[0] for name in run["q"]}
    assert len(run["q"]) >= 3
    assert documents <= ENGLISH_DOCUMENTS


@pytest.mark.parametrize("by", ["document", "passage"])
@pytest.mark.parametrize(
    "stages",
    [
        pytest.param({}, id="first ranking"),
        pytest.param({"feedback": r.Feedback("rocchio", depth=3)}, id="feedback"),
        pytest.param(
            {
                "feedback": r.Feedback("rocchio", depth=3),
                "interpolation": r.Interpolation("both"),
            },
            id="feedback and interpolation",
        ),
        pytest.param({"fusion": r.Fusion()}, id="fusion"),
    ],
)
def test_every_stage_of_a_search_finds_matching_documents_only(
    by: Any,
    stages: dict[str, Any],
    bilingual_documents: dict[str, r.Document],
    words: r.BM25Index,
    late: Any,
) -> None:
    searcher = r.Searcher(words, documents=bilingual_documents, second=words, late=late)
    reranking = r.Reranking(5)
    request = r.SearchRequest(3, by=by, where=IN_ENGLISH, reranking=reranking, **stages)

    ranking = searcher.rank(BILINGUAL_QUERIES, request)

    check_english_only(ranking.run)
    for run in ranking.stages.values():
        check_english_only(run)
    check_english_only(searcher.rerank(BILINGUAL_QUERIES, ranking, reranking).run)


def test_a_filtered_search_of_passages_returns_all_matching_documents(
    bilingual_documents: dict[str, r.Document],
    words: r.BM25Index,
) -> None:
    searcher = r.Searcher(words, documents=bilingual_documents)
    hits = searcher.search("kettle", r.SearchRequest(9, where=IN_ENGLISH))
    assert {hit["id"] for hit in hits} == ENGLISH_DOCUMENTS
    assert len(hits) == 4


def test_a_plain_ranking_of_a_filtered_search_has_as_many_documents(
    bilingual_documents: dict[str, r.Document],
    words: r.BM25Index,
    late: Any,
) -> None:
    searcher = r.Searcher(words, documents=bilingual_documents, second=words, late=late)
    request = r.SearchRequest(3, where=IN_ENGLISH, fusion=r.Fusion(), reranking=r.Reranking(5))
    ranking = searcher.rank(BILINGUAL_QUERIES, replace(request, by="passage"))
    assert len(searcher.rank_without_feedback(BILINGUAL_QUERIES, request, ranking)["q"]) >= 3


def test_a_run_is_not_fused_with_a_filtered_ranking(words: r.BM25Index) -> None:
    searcher = r.Searcher(words, second={"q": {"d1": 1.0}})
    message = "second: expected a BM25 index with metadata to filter by where"
    with pytest.raises(ValueError, match=message):
        searcher.rank(BILINGUAL_QUERIES, r.SearchRequest(fusion=r.Fusion(), where=IN_ENGLISH))


def test_a_request_with_an_empty_filter_is_refused() -> None:
    with pytest.raises(ValueError, match="where: expected at least one condition"):
        r.SearchRequest(where={})


def test_a_text_in_a_field_of_numbers_is_in_no_range_and_can_be_filtered() -> None:
    metadata = Metadata.from_fields({"a": {"year": 2020}, "b": {"year": "soon"}}, ["a", "b"], None)
    assert metadata is not None
    masks = {
        condition: metadata.mask(Filter.parse([condition], metadata.kinds)).tolist()
        for condition in ("year>=2000", "year=2020", "year=soon")
    }
    assert masks == {
        "year>=2000": [True, False],
        "year=2020": [True, False],
        "year=soon": [False, True],
    }
