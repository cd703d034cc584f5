"""Indexes of every backend; the exact one reads as far as queries need it, and is refused where it
is damaged.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.manifests import edit, sum_files, sum_terms
from tests.refusals import refused
from tilefold import retrieval as r
from tilefold.pipeline.rows import SparseRows
from tilefold.retrieval import SparseIndex, SparseVectors, build_index, load_index
from tilefold.retrieval.errors import DataError, MissingPackageError, VocabularyMismatchError
from tilefold.retrieval.index import exact
from tilefold.retrieval.index.exact import Postings, fastest, portable, top_positive
from tilefold.retrieval.index.opening import open_index
from tilefold.retrieval.index.protocol import StoredIds, save_ids
from tilefold.retrieval.index.seismic import SeismicIndex, SeismicOptions

Make = Callable[..., SparseVectors]
BACKENDS = ["exact", "seismic"]
ALL = [*BACKENDS, "qdrant"]


@pytest.mark.parametrize("backend", ALL)
def test_unseen_terms_empty_rows_and_large_k(backend: str) -> None:
    documents = SparseVectors.from_rows(
        {"a": {0: 1.0, 3: 0.0}, "empty": {}, "b": {0: 1.0, 70_000: 2.0}},
        70_001,
    )
    asked = {
        "x": {0: 2.0},
        "unseen": {5: 1.0},
        "none": {},
        "y": {70_000: 1.0},
        "z": {0: 1.0, 70_000: 1.0},
    }
    found = build_index(documents, backend).search(SparseVectors.from_rows(asked, 70_001), 1_000)
    assert found == [[("a", 2.0), ("b", 2.0)], [], [], [("b", 2.0)], [("b", 3.0), ("a", 1.0)]]


@pytest.mark.parametrize("backend", ALL)
def test_a_saved_index_gives_the_same_results(
    backend: str,
    make_vectors: Make,
    tmp_path: Path,
    capfd: Any,
) -> None:
    documents, queries = make_vectors(300), make_vectors(20, seed=1, prefix="q")
    index = build_index(documents, backend)
    assert isinstance(index, SparseIndex)
    index.save(tmp_path / "index")
    again = load_index(tmp_path / "index")
    assert (again.backend, again.n_documents, again.vocab_size, again.fingerprint) == (
        backend,
        300,
        500,
        "f" * 64,
    )
    assert again.search(queries, 7) == index.search(queries, 7)
    assert capfd.readouterr() == ("", "")
    manifest = json.loads((tmp_path / "index" / "index.json").read_text())
    assert manifest["backend"] == backend and "tilefold" in manifest["versions"]
    assert [path.name for path in tmp_path.iterdir()] == ["index"]
    (tmp_path / "index" / "thesis.txt").write_text("years of work")
    refused(FileExistsError, "nothing was overwritten", index.save, tmp_path / "index")


@pytest.mark.parametrize("layout", ["strided", "csr", "coo", "rows"])
@pytest.mark.parametrize("weight", [float("nan"), float("inf"), -1.0, 1e300])
@pytest.mark.parametrize("n_queries", [1, 3])
def test_queries_on_a_device_with_wrong_weights_are_refused(
    layout: str,
    weight: float,
    n_queries: int,
    make_vectors: Make,
) -> None:
    index = exact.ExactIndex.build(make_vectors(5)).on("cpu")
    queries = torch.zeros(n_queries, 500, dtype=torch.float64)
    queries[:, 3] = 1.0
    queries[-1, 7] = weight
    with warnings.catch_warnings():  # that this layout is young
        warnings.simplefilter("ignore", UserWarning)
        csr = queries.to_sparse_csr()
    forms: dict[str, Any] = {
        "strided": queries,
        "csr": csr,
        "coo": queries.to_sparse_coo(),
        "rows": SparseRows(csr.crow_indices().diff(), csr.col_indices().int(), csr.values(), 500),
    }
    message = f"expected finite weights of at least 0, got .* for query {n_queries - 1}"
    refused(DataError, message, index.search_tensor, forms[layout], 2)


@pytest.mark.parametrize("layout", [torch.sparse_csc, torch.sparse_csr, torch.sparse_coo])
def test_sparse_tensors_of_every_layout_become_vectors(layout: torch.layout) -> None:
    matrix = torch.tensor([[0.0, 1.0, 0.0, 2.0], [3.0, 0.0, 0.0, 0.0]])
    with warnings.catch_warnings():  # that this layout is young
        warnings.simplefilter("ignore", UserWarning)
        vectors = SparseVectors.from_torch(["a", "b"], matrix.to_sparse(layout=layout))
    assert [vectors.row(row)[0].tolist() for row in (0, 1)] == [[1, 3], [0]]
    assert vectors.data.tolist() == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_exact_index_finds_the_same_on_a_device(
    device: str,
    make_vectors: Make,
    tmp_path: Path,
) -> None:
    documents, queries = make_vectors(300), make_vectors(20, seed=1, prefix="q")
    build_index(documents).save(tmp_path / "index")
    index = exact.ExactIndex.load(tmp_path / "index")
    fast = index.on(device)
    expected, found = index.search(queries, 9), fast.search(queries, 9)
    for mine, theirs in zip(found, expected, strict=True):
        assert [hit.id for hit in mine] == [hit.id for hit in theirs]
        np.testing.assert_allclose(
            [hit.score for hit in mine],
            [hit.score for hit in theirs],
            rtol=1e-6,
        )
    dense = torch.zeros(len(queries), 500)
    for i in range(len(queries)):
        terms, weights = queries.row(i)
        dense[i, terms.tolist()] = torch.from_numpy(weights.copy())
    with warnings.catch_warnings():  # that this layout is young
        warnings.simplefilter("ignore", UserWarning)
        csr = dense.to_sparse_csr()
    columns, values = csr.col_indices().int().to(device), csr.values().to(device)
    rows = SparseRows(csr.crow_indices().diff(), columns, values, 500)
    for asked in (*(form.to(device) for form in (dense, csr, csr.to_sparse_coo())), rows):
        scores, places = fast.search_tensor(asked, 9)
        assert [[documents.ids[at] for at in row if at >= 0] for row in places.tolist()] == [
            [h.id for h in r] for r in found
        ]
        assert scores[0].tolist() == [hit.score for hit in found[0]]
    assert torch.equal(fast.search_tensor(rows.part(slice(1, 2)), 9)[1], places[1:2])
    some = documents.ids[::7]
    wanted = [[hit.id for hit in row if hit.id in some] for row in index.search(queries, 300)]
    assert [[hit.id for hit in row] for row in fast.search(queries, 300, fast.mask(some))] == wanted
    refused(
        ValueError,
        "expected ids of documents of the index, got 'nobody'",
        fast.mask,
        ["nobody"],
    )
    refused(
        ValueError,
        r"queries: expected \[\.\., 500\], got \[2, 3\]",
        fast.search_tensor,
        torch.zeros(2, 3),
        1,
    )
    refused(
        VocabularyMismatchError,
        "500 terms, got one with 600",
        fast.search,
        make_vectors(2, vocab_size=600),
        3,
    )
    weights = tmp_path / "index" / "weights.npy"
    weights.write_bytes(weights.read_bytes()[:-4] + b"\0\0\x80\x3f")
    broken = exact.ExactIndex.load(tmp_path / "index")
    refused(DataError, "the postings of term 499 are not those that were saved", broken.on, device)


@pytest.mark.parametrize("backend", ALL)
def test_what_no_index_can_be_asked_or_made_of_is_refused(backend: str, make_vectors: Make) -> None:
    index = build_index(make_vectors(20), backend)
    refused(
        VocabularyMismatchError,
        "500 terms, got one with 600",
        index.search,
        make_vectors(2, vocab_size=600),
        3,
    )
    queries = make_vectors(2)
    queries.fingerprint = "0" * 64
    refused(
        VocabularyMismatchError,
        r"got one of the same size \(fingerprint 0{12}\)",
        index.search,
        queries,
        3,
    )
    queries.fingerprint = None  # unknown is not different
    assert len(index.search(queries, 3)) == 2
    for k in (0, -1, 2.5, True):
        refused(ValueError, "k: expected an integer of at least 1", index.search, queries, k)
    for rows in ({}, {"a": {}, "b": {1: 0.0}}):
        with pytest.raises(
            ValueError,
            match=f"at least one vector with a positive weight, got {len(rows)} vector",
        ):
            build_index(SparseVectors.from_rows(rows, 5), backend)


@pytest.mark.parametrize(
    ("backend", "options", "message"),
    [
        ("lucene", {}, "backend: expected one of exact, seismic, qdrant, got 'lucene'"),
        ("exact", {"n_postings": 3}, "the exact index has none, got n_postings"),
        ("seismic", {"ef": 3}, r"Seismic has n_postings, .*; got ef"),
        ("seismic", {"n_postings": 0}, "n_postings: expected an integer of at least 1, got 0"),
        (
            "seismic",
            {"heap_factor": float("nan")},
            r"heap_factor: expected a number in \[0, 1\], got nan",
        ),
    ],
)
def test_wrong_backends_and_options_are_refused(
    backend: str,
    options: dict[str, Any],
    message: str,
) -> None:
    refused(
        ValueError,
        message,
        build_index,
        SparseVectors.from_rows({"a": {0: 7e4}}, 5),
        backend,
        **options,
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_missing_or_damaged_index_is_named(
    backend: str,
    make_vectors: Make,
    tmp_path: Path,
) -> None:
    refused(
        FileNotFoundError,
        r"nowhere: expected an index, as tilefold index writes it, got nothing",
        load_index,
        tmp_path / "nowhere",
    )
    (tmp_path / "index.json").write_text('{"backend": "exact"}')
    refused(DataError, "expected an index of schema 1, got wrong n_documents", load_index, tmp_path)
    build_index(make_vectors(50), backend).save(tmp_path / "index")
    if backend == "exact":
        refused(
            DataError,
            "expected an index of backend 'seismic', got 'exact'",
            SeismicIndex.load,
            tmp_path / "index",
        )
    for file in sorted((tmp_path / "index").iterdir()):
        copy = tmp_path / f"without-{file.name}"
        shutil.copytree(tmp_path / "index", copy)
        (copy / file.name).unlink()
        refused(FileNotFoundError, file.name, load_index, copy)
        (copy / file.name).write_bytes(file.read_bytes()[:-20])
        refused(DataError, file.name, load_index, copy)


@pytest.mark.parametrize(
    ("backend", "changes", "message"),
    [
        (
            "seismic",
            {"heap_factor": "0.7"},
            r"heap_factor: expected a number in \[0, 1\], got '0.7'",
        ),
        ("seismic", {"heap_factor": True}, r"heap_factor: expected a number in \[0, 1\], got True"),
        (
            "seismic",
            {"summary_energy": None},
            r"summary_energy: expected a number in \(0, 1\], got None",
        ),
        (
            "seismic",
            {"num_threads": True},
            "num_threads: expected an integer of at least 0, got True",
        ),
        ("seismic", {"doc_cut": "15"}, "doc_cut: expected an integer of at least 1, got '15'"),
        ("qdrant", {"url": 6333}, "expected a text as url of the options, got 6333"),
        (
            "qdrant",
            {"url": "http://localhost"},
            "expected a text as collection of the options, got None",
        ),
    ],
)
def test_edited_options_are_named(
    backend: str,
    changes: Any,
    message: str,
    make_vectors: Make,
    tmp_path: Path,
) -> None:
    index: Any = build_index(make_vectors(20), backend)
    index.save(tmp_path / "index")
    manifest = tmp_path / "index" / "index.json"
    edit(manifest, options=json.loads(manifest.read_text())["options"] | changes)
    refused(DataError, message, load_index, tmp_path / "index")
    edit(manifest, n_documents=True)
    refused(DataError, "wrong n_documents: expected int, got True", load_index, tmp_path / "index")


def test_seismic_finds_nearly_all_that_exact_search_finds_and_more_on_request(
    make_vectors: Make,
) -> None:
    documents, queries = make_vectors(2000), make_vectors(50, seed=1, terms=10, prefix="q")
    exact, index = build_index(documents).search(queries, 10), build_index(documents, "seismic")
    assert isinstance(index, SeismicIndex)

    def recall(found: list[list[Any]]) -> float:
        pairs = zip(found, exact, strict=True)
        return float(
            np.mean([len({h.id for h in a} & {h.id for h in b}) / len(b) for a, b in pairs]),
        )

    found = index.search(queries, 10)
    assert (
        recall(index.search(queries, 10, query_cut=1, heap_factor=1.0)) < recall(found)
        and recall(found) > 0.9
    )
    assert [index.search(queries.take([at]), 10)[0] for at in range(len(queries))] == found


@pytest.mark.parametrize(
    ("backend", "options"),
    [("seismic", {}), ("qdrant", {"weights": "float16"})],
)
def test_weights_of_16_bits_cost_half_an_ulp(
    backend: str,
    options: dict[str, Any],
    make_vectors: Make,
) -> None:
    documents, queries = make_vectors(100), make_vectors(5, seed=1, prefix="q")
    truth = [
        {hit.id: hit.score for hit in row} for row in build_index(documents).search(queries, 100)
    ]
    for row, scores in zip(
        build_index(documents, backend, **options).search(queries, 10),
        truth,
        strict=True,
    ):
        assert [hit.score for hit in row] == sorted((hit.score for hit in row), reverse=True)
        assert row and all(hit.score == pytest.approx(scores[hit.id], rel=2**-11) for hit in row)


def test_seismic_indexes_large_vocabularies(
    make_vectors: Make,
    tmp_path: Path,
    monkeypatch: Any,
) -> None:
    documents, queries = make_vectors(100, vocab_size=250_002), make_vectors(5, vocab_size=250_002)
    few = build_index(
        documents,
        "seismic",
    )  # fewer than 65,536 terms in use: renumbered into 16 bits
    monkeypatch.setattr("tilefold.retrieval.index.seismic._SMALL_VOCABULARY", 100)
    many = build_index(documents, "seismic")
    seismic = pytest.importorskip("seismic")
    assert (type(few._engine), type(many._engine)) == (seismic.SeismicIndex, seismic.SeismicIndexLV)
    assert [row[0].id for row in few.search(queries, 3)] == queries.ids
    assert [row[0].id for row in many.search(queries, 3)] == queries.ids
    many.save(tmp_path / "index")
    assert load_index(tmp_path / "index").search(queries, 3) == many.search(queries, 3)


def test_missing_packages_of_backends_are_said(
    make_vectors: Make,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for backend, module, package, options in (
        ("seismic", "seismic", "pyseismic-lsr`[.]$", {}),  # no extra brings it everywhere
        ("qdrant", "qdrant_edge", "qdrant-edge-py", {}),
        (
            "qdrant",
            "qdrant_client",
            "qdrant-client",
            {"url": "http://localhost", "collection": "a"},
        ),
    ):
        monkeypatch.setitem(sys.modules, module, None)
        refused(
            MissingPackageError,
            f"pip install {package}",
            build_index,
            make_vectors(3),
            backend,
            **options,
        )


def test_seismic_chooses_by_the_collection_what_is_not_given(
    make_vectors: Make,
    tmp_path: Path,
) -> None:
    index = build_index(
        make_vectors(300),
        "seismic",
        heap_factor=0.6,
    )  # 6,000 postings of 500 terms: 12 each
    assert isinstance(index, SeismicIndex)
    assert (index.options.n_postings, index.options.query_cut, index.options.heap_factor) == (
        40,
        20,
        0.6,
    )
    index.save(tmp_path / "index")
    assert SeismicIndex.load(tmp_path / "index").options == index.options
    many = SeismicOptions().for_collection(8_841_823, 34_500.0)  # MS MARCO
    assert 3_000 <= (many.n_postings or 0) <= 4_000
    assert (many.query_cut, many.heap_factor) == (10, 0.8)
    assert (
        SeismicOptions(n_postings=7, query_cut=3, heap_factor=0.0)
        .for_collection(10, 1.0)
        .n_postings
        == 7
    )


def plain(documents: SparseVectors, query: tuple[Any, Any], k: int) -> list[tuple[str, float]]:
    """Scores in float32, term after term, document by document."""
    scores = np.zeros(len(documents), np.float32)
    for term, value in zip(*query, strict=True):
        for at in range(len(documents)):
            terms, weights = documents.row(at)
            scores[at] += value * weights[terms == term].sum()
    order = sorted(np.flatnonzero(scores > 0).tolist(), key=lambda at: (-scores[at], at))
    return [(documents.ids[at], float(scores[at])) for at in order[:k]]


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    n=st.integers(1, 40),
    vocab=st.integers(1, 12),
    k=st.integers(1, 60),
)
def test_scores_are_the_bits_of_a_plain_sum(seed: int, n: int, vocab: int, k: int) -> None:
    rng = np.random.default_rng(seed)
    matrix = (
        rng.exponential(size=(n, vocab)).astype(np.float32).round(int(rng.integers(1, 8)))
    )  # ties, and zeros
    matrix[rng.random(matrix.shape) < 0.6] = 0
    matrix[0, 0] = 1
    documents = SparseVectors.from_torch([f"d{i}" for i in range(n)], torch.from_numpy(matrix))
    asked = np.where(rng.random((3, vocab)) < 0.5, rng.exponential(size=(3, vocab)), 0).astype(
        np.float32,
    )
    queries = SparseVectors.from_torch(["a", "b", "c"], torch.from_numpy(asked))
    index = build_index(documents)
    expected = [plain(documents, queries.row(at), k) for at in range(3)]
    assert index.search(queries, k) == expected
    assert [index.search(queries.take([at]), k)[0] for at in range(3)] == expected
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exact, "fastest", lambda: portable)
        assert index.search(queries, k) == expected


def test_a_product_that_rounds_otherwise_is_told_apart() -> None:
    def fused(scores: Any, lists: Any, values: Any) -> None:
        for (documents, weights), value in zip(lists, values, strict=True):
            scores[documents] = (scores[documents] + np.float64(value) * weights).astype(np.float32)

    def broken(scores: Any, lists: Any, values: Any) -> None:
        raise TypeError("another signature")

    assert exact._agrees(exact.of_rounded_products(fused))
    assert exact._agrees(portable) and not exact._agrees(fused) and not exact._agrees(broken)


def test_another_scipy_gives_way_to_numpy_with_one_warning(
    make_vectors: Make,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    index, queries = build_index(make_vectors(50)), make_vectors(3, seed=1)
    assert fastest() is not portable, "scipy is installed here"
    expected = index.search(queries, 5)
    monkeypatch.setattr(exact, "_agrees", lambda add: False)
    fastest.cache_clear()
    with pytest.warns(RuntimeWarning, match="numpy searches exact indexes, more slowly"):
        assert index.search(queries, 5) == expected
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        index.search(queries, 5)
        fastest.cache_clear()
        monkeypatch.setitem(sys.modules, "scipy.sparse._sparsetools", None)
        assert fastest() is portable  # not installed: nothing to say
    fastest.cache_clear()


def test_pieces_give_the_postings_of_the_whole(
    make_vectors: Make,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    documents = make_vectors(100)
    documents.data[::7] = 0
    whole = Postings.of(documents)
    monkeypatch.setattr(exact, "_WEIGHTS_PER_PIECE", 64)  # three rows
    pieces = Postings.of(documents)
    monkeypatch.setattr(exact, "_WEIGHTS_PER_PIECE", 1)  # less than a row
    monkeypatch.setattr(exact, "_MAX_SHORT_TERMS", 0)
    for other in (pieces, Postings.of(documents)):
        for name in ("offsets", "documents", "weights"):
            assert np.array_equal(getattr(whole, name), getattr(other, name))
    assert whole.offsets[-1] == (documents.data > 0).sum()
    assert all((np.diff(part) > 0).all() for part in np.split(whole.documents, whole.offsets[1:-1]))


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    n=st.integers(1, 3_000),
    k=st.integers(1, 60),
    levels=st.integers(1, 500),
)
def test_the_best_are_found_in_blocks_as_in_a_sort(seed: int, n: int, k: int, levels: int) -> None:
    rng = np.random.default_rng(seed)
    scores = np.where(rng.random(n) < 0.3, rng.integers(0, levels, n), 0).astype(np.float32)
    assert (
        top_positive(scores, k)
        == sorted(np.flatnonzero(scores > 0).tolist(), key=lambda at: (-scores[at], at))[:k]
    )


INDEXES = ("exact", "seismic", "qdrant", "bm25", "dense", "late")


def index_of(backend: str, names: list[str]) -> Any:
    """An index of documents of these names, with :meth:`save`."""
    if backend == "bm25":
        return r.BM25Index.build({name: f"tea for {name}" for name in names})
    if backend in ("dense", "late"):
        values = torch.randn(len(names), 8, generator=torch.Generator().manual_seed(0))
        vectors = r.TokenVectors(names, torch.arange(len(names) + 1), values)
        if backend == "dense":
            return r.DenseIndex.build(vectors, "dot")
        return r.LateIndex.build(vectors, Path(tempfile.mkdtemp()) / "late")
    rows = {name: {at: 1.0} for at, name in enumerate(names)}
    return build_index(r.SparseVectors.from_rows(rows, 50), backend)


@pytest.mark.parametrize("backend", INDEXES)
def test_saving_over_an_index_is_refused_unless_it_is_to_be_replaced(
    backend: str,
    tmp_path: Path,
) -> None:
    pytest.importorskip("seismic" if backend == "seismic" else "numpy")
    pytest.importorskip("qdrant_edge" if backend == "qdrant" else "numpy")
    large = index_of(backend, [f"d{at}" for at in range(6)])
    small = index_of(backend, ["d0", "d1"])
    large.save(tmp_path / "index")
    refused(
        FileExistsError,
        r"index: expected a new or empty directory.*overwrite=True.*nothing was overwritten",
        small.save,
        tmp_path / "index",
    )
    assert open_index(tmp_path / "index").n_documents == 6
    small.save(tmp_path / "index", overwrite=True)
    assert open_index(tmp_path / "index").n_documents == 2
    assert [entry.name for entry in tmp_path.iterdir()] == ["index"]


def test_token_vectors_are_indexed_over_an_index_only_to_replace_it(tmp_path: Path) -> None:
    vectors = r.TokenVectors(["a", "b"], torch.arange(3), torch.ones(2, 8))
    r.LateIndex.build(vectors, tmp_path / "index")
    more = r.TokenVectors(["a", "b", "c"], torch.arange(4), torch.ones(3, 8))
    refused(FileExistsError, "nothing was over", r.LateIndex.build, more, tmp_path / "index")
    assert r.LateIndex.load(tmp_path / "index").n_documents == 2
    assert r.LateIndex.build(more, tmp_path / "index", overwrite=True).n_documents == 3


def test_an_empty_folder_takes_an_index(tmp_path: Path) -> None:
    index_of("exact", ["a", "b"]).save(tmp_path)
    assert load_index(tmp_path).n_documents == 2


def test_opening_reads_no_postings_and_a_query_only_its_own(
    make_vectors: Make,
    tmp_path: Path,
) -> None:
    documents, queries = make_vectors(300), make_vectors(4, seed=1, terms=5)
    built = build_index(documents)
    built.save(tmp_path / "index")
    index: Any = load_index(tmp_path / "index")
    postings = index._postings
    assert isinstance(postings.documents.base, np.memmap) and not postings.trusted.any()
    assert index.search(queries.take([0]), 5) == built.search(queries.take([0]), 5)
    assert np.flatnonzero(postings.trusted).tolist() == queries.row(0)[0].tolist()
    assert index.search(queries, 5) == built.search(queries, 5)
    index.save(tmp_path / "again")
    names = {file.name for file in (tmp_path / "index").iterdir()}
    assert names == {file.name for file in (tmp_path / "again").iterdir()}
    assert all(
        (tmp_path / "again" / n).read_bytes() == (tmp_path / "index" / n).read_bytes()
        for n in names
    )


@pytest.mark.parametrize("name", ["documents.npy", "weights.npy"])
def test_damaged_postings_are_refused_by_queries_that_read_them(
    name: str,
    make_vectors: Make,
    tmp_path: Path,
) -> None:
    built: Any = build_index(make_vectors(100))
    built.save(tmp_path)
    offsets = built._postings.offsets
    term, content = int(np.argmax(np.diff(offsets))), bytearray((tmp_path / name).read_bytes())
    content[len(content) - 4 * int(offsets[-1] - offsets[term])] ^= 1
    (tmp_path / name).write_bytes(content)
    index = load_index(tmp_path)
    good = SparseVectors.from_rows({"q": {t: 1.0 for t in range(500) if t != term}}, 500)
    assert index.search(good, 10) == built.search(good, 10)
    query = SparseVectors.from_rows({"q": {term: 1.0}}, 500)
    for _ in range(2):  # it is not trusted after the first refusal
        refused(
            DataError,
            rf"damaged; the postings of term {term} .*tilefold index",
            index.search,
            query,
            10,
        )


def test_arrays_that_do_not_fit_are_refused(make_vectors: Make, tmp_path: Path) -> None:
    documents = make_vectors(30)
    built: Any = build_index(documents)
    built.save(tmp_path / "index")
    offsets, text = built._postings.offsets, np.load(tmp_path / "index" / "ids.npy")
    cases = {
        "documents.npy": (
            np.zeros(offsets[-1], np.int64),
            r"expected int32 of shape \[\d+\], got int64",
        ),
        "weights.npy": (np.zeros(7, np.float32), r"got float32 of shape \[7\]"),
        "checksums.npy": (np.zeros(3, np.uint32), r"expected uint32 of shape \[500\]"),
        "offsets.npy": (offsets[::-1].copy(), "rise from 0"),
        "id_offsets.npy": (np.arange(31), r"ids.npy: expected uint8 of shape \[30\]"),
        "id_offsets.npy ": (
            np.r_[0, 0, np.arange(2, 31)],
            "id_offsets.npy: expected ids of one byte at least",
        ),
        "ids.npy": (text[:-1], "ids.npy: expected uint8 of shape"),
    }
    for name, (values, message) in cases.items():
        folder = tmp_path / name
        shutil.copytree(tmp_path / "index", folder)
        np.save(folder / name.strip(), values)
        sum_files(folder)
        refused(DataError, message, load_index, folder)
    np.save(tmp_path / "index" / "documents.npy", np.full(offsets[-1], 1 << 30, np.int32))
    sum_terms(tmp_path / "index")
    sum_files(tmp_path / "index")
    wrong = load_index(
        tmp_path / "index",
    )  # with documents out of range, which are never written to
    refused(DataError, "damaged; the postings of term", wrong.search, documents, 3)


@given(st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=20))
@settings(max_examples=40, deadline=None)
def test_ids_are_stored_and_read_one_by_one(
    tmp_path_factory: pytest.TempPathFactory,
    ids: list[str],
) -> None:
    folder = tmp_path_factory.mktemp("ids")
    save_ids(ids, folder)
    stored = StoredIds.load(folder, len(ids))
    assert list(stored) == ids == [stored[at] for at in range(len(ids))] == stored[:]
    assert stored[-1] == ids[-1] and stored[1::2] == ids[1::2]
    refused(IndexError, "position: expected a position", lambda: stored[len(ids)])
    refused(
        DataError,
        r"id_offsets.npy: expected int64 of shape \[",
        StoredIds.load,
        folder,
        len(ids) + 1,
    )


class DocumentsOneByOne:
    """Dataset with the interface of pyseismic-lsr 0.5.2, which numbers terms as it meets them."""

    def __init__(self, package: Any) -> None:
        self.dataset = package.SeismicDataset()
        self.names: list[str] = []

    def add_document(self, name: str, tokens: Any, weights: Any) -> None:
        self.names.append(name)
        self.dataset.add_document(name, tokens, weights)


def test_terms_that_seismic_numbers_by_itself_are_stored_in_the_order_of_the_vocabulary(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    vectors = SparseVectors.from_rows(
        {"a": {7: 1.0, 20: 0.5}, "empty": {}, "b": {3: 2.0, 20: 0.25}, "c": {1: 4.0, 7: 0.125}},
        vocab_size=30,
    )
    seismic = pytest.importorskip("seismic")
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
    monkeypatch.setattr("tilefold.retrieval.index.seismic._package", lambda: package)
    built = build_index(vectors, "seismic")
    assert names == ["0", "2", "3"]
    built.save(tmp_path / "index")
    query = SparseVectors.from_rows({"q": {1: 1.0, 20: 1.0}}, vocab_size=30)
    for index in (built, SeismicIndex.load(tmp_path / "index")):
        assert isinstance(index, SeismicIndex)
        stored = index.stored()
        assert [stored.row(row)[0].tolist() for row in range(4)] == [[7, 20], [], [3, 20], [1, 7]]
        assert np.array_equal(stored.data, vectors.data)
        hits = index.search(query, 3)[0]
        assert [(hit.id, hit.score) for hit in hits] == [("c", 4.0), ("a", 0.5), ("b", 0.25)]
