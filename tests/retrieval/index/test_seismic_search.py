"""Seismic finds nearly all of exact search, chooses its options, and stores any vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tilefold.retrieval import SparseVectors, build_index, load_index
from tilefold.retrieval.index.seismic import SeismicIndex, SeismicOptions

seismic = pytest.importorskip("seismic")
MakeVectors = Callable[..., SparseVectors]


def mean_recall(rows: list[list[Any]], exact_rows: list[list[Any]]) -> float:
    """The part of the hits of exact search that ``rows`` contain, as a mean over the queries."""
    recalls = []
    for hits, exact_hits in zip(rows, exact_rows, strict=True):
        exact_ids = {hit.id for hit in exact_hits}
        common_ids = exact_ids & {hit.id for hit in hits}
        recalls.append(len(common_ids) / len(exact_ids))
    return float(np.mean(recalls))


def test_recall_is_above_nine_tenths_and_falls_with_a_smaller_query_cut(
    make_vectors: MakeVectors,
) -> None:
    documents = make_vectors(2000)
    queries = make_vectors(50, seed=1, terms=10, prefix="q")
    exact_rows = build_index(documents).search(queries, 10)
    index = build_index(documents, "seismic")
    assert isinstance(index, SeismicIndex)

    recall = mean_recall(index.search(queries, 10), exact_rows)
    hasty_rows = index.search(queries, 10, query_cut=1, heap_factor=1.0)

    assert recall > 0.9
    assert mean_recall(hasty_rows, exact_rows) < recall


def test_a_query_finds_the_same_alone_as_in_a_batch(make_vectors: MakeVectors) -> None:
    queries = make_vectors(50, seed=1, terms=10, prefix="q")
    index = build_index(make_vectors(2000), "seismic")
    one_by_one = [index.search(queries.take([row]), 10)[0] for row in range(len(queries))]
    assert one_by_one == index.search(queries, 10)


def test_few_terms_in_use_are_stored_in_16_bits_and_many_in_32(
    make_vectors: MakeVectors,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    documents = make_vectors(100, vocab_size=250_002)
    queries = make_vectors(5, vocab_size=250_002)

    # Fewer than 65,536 terms are in use: they are renumbered into 16 bits.
    small = build_index(documents, "seismic")
    monkeypatch.setattr("tilefold.retrieval.index.seismic._SMALL_VOCABULARY", 100)
    large = build_index(documents, "seismic")

    assert type(small._engine) is seismic.SeismicIndex
    assert type(large._engine) is seismic.SeismicIndexLV
    for index in (small, large):
        assert [hits[0].id for hits in index.search(queries, 3)] == queries.ids
    large.save(tmp_path / "index")
    assert load_index(tmp_path / "index").search(queries, 3) == large.search(queries, 3)


def test_options_that_are_not_set_follow_from_the_collection(
    make_vectors: MakeVectors,
    tmp_path: Path,
) -> None:
    # 300 documents of 20 terms have 6,000 postings of 500 terms: 12 per term.
    index = build_index(make_vectors(300), "seismic", heap_factor=0.6)
    assert isinstance(index, SeismicIndex)
    assert index.options.n_postings == 40
    assert index.options.query_cut == 20
    assert index.options.heap_factor == 0.6
    index.save(tmp_path / "index")
    assert SeismicIndex.load(tmp_path / "index").options == index.options


def test_options_for_a_collection_as_large_as_msmarco() -> None:
    options = SeismicOptions().for_collection(8_841_823, 34_500.0)
    assert options.n_postings is not None
    assert 3_000 <= options.n_postings <= 4_000
    assert options.query_cut == 10
    assert options.heap_factor == 0.8


def test_options_that_are_set_do_not_depend_on_the_collection() -> None:
    options = SeismicOptions(n_postings=7, query_cut=3, heap_factor=0.0)
    assert options.for_collection(10, 1.0).n_postings == 7


class DocumentsOneByOne:
    """Dataset with the interface of pyseismic-lsr 0.5.2, which numbers terms as it meets them."""

    def __init__(self, package: Any) -> None:
        self.dataset = package.SeismicDataset()
        self.names: list[str] = []

    def add_document(self, name: str, tokens: Any, weights: Any) -> None:
        self.names.append(name)
        self.dataset.add_document(name, tokens, weights)


@pytest.fixture
def names_in_the_dataset(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the documents that a build passes to an engine with the interface of 0.5.2."""
    engine_type: Any = seismic.SeismicIndex
    names: list[str] = []

    def build_from_dataset(documents: DocumentsOneByOne, **options: Any) -> Any:
        names.extend(documents.names)
        return engine_type.build_from_dataset(documents.dataset, **options)

    package = SimpleNamespace(
        SeismicDataset=partial(DocumentsOneByOne, seismic),
        SeismicIndex=SimpleNamespace(
            build_from_dataset=build_from_dataset,
            load=engine_type.load,
        ),
        get_seismic_string=seismic.get_seismic_string,
    )
    monkeypatch.setattr("tilefold.retrieval.index.seismic._import_seismic", lambda: package)
    return names


def test_terms_that_seismic_numbers_by_itself_are_stored_in_the_order_of_the_vocabulary(
    tmp_path: Path,
    names_in_the_dataset: list[str],
) -> None:
    vectors = SparseVectors.from_rows(
        {
            "a": {7: 1.0, 20: 0.5},
            "empty": {},
            "b": {3: 2.0, 20: 0.25},
            "c": {1: 4.0, 7: 0.125},
        },
        vocab_size=30,
    )
    built = build_index(vectors, "seismic")
    assert names_in_the_dataset == ["0", "2", "3"]
    built.save(tmp_path / "index")

    query = SparseVectors.from_rows({"q": {1: 1.0, 20: 1.0}}, vocab_size=30)
    for index in (built, SeismicIndex.load(tmp_path / "index")):
        assert isinstance(index, SeismicIndex)
        stored = index.stored()
        assert [stored.row(row)[0].tolist() for row in range(4)] == [[7, 20], [], [3, 20], [1, 7]]
        assert np.array_equal(stored.data, vectors.data)
        (hits,) = index.search(query, 3)
        assert [(hit.id, hit.score) for hit in hits] == [("c", 4.0), ("a", 0.5), ("b", 0.25)]


@pytest.mark.usefixtures("names_in_the_dataset")
def test_a_document_that_small_weights_add_keeps_its_other_weights() -> None:
    # 16 bits represent 1e-4 beside 3e4, but not 5e-5. Seismic meets term 7 before term 2.
    vectors = SparseVectors.from_rows(
        {"large": {7: 3e4}, "added": {1: 5e-5, 2: 1e-4}, "retrieved": {2: 1.2e-4}},
        vocab_size=8,
    )
    index = build_index(vectors, "seismic")
    query = SparseVectors.from_rows({"q": {1: 1.0, 2: 1.0}}, vocab_size=8)
    ((hit,),) = index.search(query, 1)
    assert hit == ("added", pytest.approx(1.5e-4, rel=1e-3))
