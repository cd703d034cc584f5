"""The exact index: equal to a plain sum, read as far as queries need it, and refused where it is damaged."""

from __future__ import annotations

import shutil
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.manifests import edit, sum_terms
from tests.refusals import refused
from tilefold._files import sha256_file
from tilefold.retrieval import SparseVectors, build_index, load_index
from tilefold.retrieval._ranking import top_positive
from tilefold.retrieval.errors import DataError
from tilefold.retrieval.index import exact
from tilefold.retrieval.index.exact import Postings, StoredIds, fastest, portable, save_ids

Make = Callable[..., SparseVectors]


def plain(
    documents: SparseVectors, query: tuple[npt.NDArray[Any], npt.NDArray[Any]], k: int
) -> list[tuple[str, float]]:
    """Scores in float32, term after term, document by document."""
    scores = np.zeros(len(documents), np.float32)
    for term, value in zip(*query, strict=True):
        for at in range(len(documents)):
            terms, weights = documents.row(at)
            scores[at] += value * weights[terms == term].sum()
    order = sorted(np.flatnonzero(scores > 0).tolist(), key=lambda at: (-scores[at], at))
    return [(documents.ids[at], float(scores[at])) for at in order[:k]]


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), n=st.integers(1, 40), vocab=st.integers(1, 12), k=st.integers(1, 60))
def test_scores_are_the_bits_of_a_plain_sum(seed: int, n: int, vocab: int, k: int) -> None:
    rng = np.random.default_rng(seed)
    matrix = rng.exponential(size=(n, vocab)).astype(np.float32).round(int(rng.integers(1, 8)))  # ties, and zeros
    matrix[rng.random(matrix.shape) < 0.6] = 0
    matrix[0, 0] = 1
    documents = SparseVectors.from_torch([f"d{i}" for i in range(n)], torch.from_numpy(matrix))
    asked = np.where(rng.random((3, vocab)) < 0.5, rng.exponential(size=(3, vocab)), 0).astype(np.float32)
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


def test_another_scipy_gives_way_to_numpy_with_one_warning(make_vectors: Make, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_unseen_terms_empty_rows_and_large_k() -> None:
    documents = SparseVectors.from_rows({"a": {0: 1.0, 3: 0.0}, "empty": {}, "b": {0: 1.0, 70_000: 2.0}}, 70_001)
    queries = SparseVectors.from_rows({"x": {0: 2.0}, "unseen": {5: 1.0}, "none": {}, "y": {70_000: 1.0}}, 70_001)
    found = build_index(documents).search(queries, 1_000)
    assert found == [[("a", 2.0), ("b", 2.0)], [], [], [("b", 2.0)]]


def test_pieces_give_the_postings_of_the_whole(make_vectors: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    documents = make_vectors(100)
    documents.data[::7] = 0
    whole = Postings.of(documents)
    monkeypatch.setattr(exact, "_PIECE", 64)  # three rows
    pieces = Postings.of(documents)
    monkeypatch.setattr(exact, "_PIECE", 1)  # less than a row
    monkeypatch.setattr(exact, "_SHORT_TERMS", 0)
    for other in (pieces, Postings.of(documents)):
        for name in ("offsets", "documents", "weights"):
            assert np.array_equal(getattr(whole, name), getattr(other, name))
    assert whole.offsets[-1] == (documents.data > 0).sum()
    assert all(
        (np.diff(whole.documents[a:b]) > 0).all() for a, b in zip(whole.offsets, whole.offsets[1:], strict=False)
    )


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), n=st.integers(1, 3_000), k=st.integers(1, 60), levels=st.integers(1, 500))
def test_the_best_are_found_in_blocks_as_in_a_sort(seed: int, n: int, k: int, levels: int) -> None:
    rng = np.random.default_rng(seed)
    scores = np.where(rng.random(n) < 0.3, rng.integers(0, levels, n), 0).astype(np.float32)
    expected = sorted(np.flatnonzero(scores > 0).tolist(), key=lambda at: (-scores[at], at))[:k]
    assert top_positive(scores, k) == expected


def test_opening_reads_no_postings_and_a_query_only_its_own(make_vectors: Make, tmp_path: Path) -> None:
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
    assert all((tmp_path / "again" / n).read_bytes() == (tmp_path / "index" / n).read_bytes() for n in names)


@pytest.mark.parametrize("name", ["documents.npy", "weights.npy"])
def test_damaged_postings_are_refused_by_the_queries_that_read_them(
    name: str, make_vectors: Make, tmp_path: Path
) -> None:
    documents = make_vectors(100)
    built: Any = build_index(documents)
    built.save(tmp_path / "index")
    term = int(np.argmax(np.diff(built._postings.offsets)))
    file = tmp_path / "index" / name
    content = bytearray(file.read_bytes())
    content[len(content) - 4 * int(built._postings.offsets[-1] - built._postings.offsets[term])] ^= 1
    file.write_bytes(content)
    index = load_index(tmp_path / "index")
    good = SparseVectors.from_rows({"q": {t: 1.0 for t in range(500) if t != term}}, 500)
    assert index.search(good, 10) == built.search(good, 10)
    for _ in range(2):  # it is not trusted after the first refusal
        with pytest.raises(DataError, match=rf"damaged; the postings of term {term} .*tilefold index"):
            index.search(SparseVectors.from_rows({"q": {term: 1.0}}, 500), 10)


def with_checksums(folder: Path) -> None:
    """Write the manifest of a folder whose files were changed."""
    files = {f.name: sha256_file(f) for f in folder.iterdir() if f.name != "index.json"}
    edit(folder / "index.json", files=files)


def test_arrays_that_do_not_fit_are_refused(make_vectors: Make, tmp_path: Path) -> None:
    documents = make_vectors(30)
    built: Any = build_index(documents)
    built.save(tmp_path / "index")
    offsets, text = built._postings.offsets, np.load(tmp_path / "index" / "ids.npy")
    cases = {
        "documents.npy": (np.zeros(offsets[-1], np.int64), "expected .* numbers of int32, got int64"),
        "weights.npy": (np.zeros(7, np.float32), r"got float32 of shape \(7,\)"),
        "checksums.npy": (np.zeros(3, np.uint32), "expected 500 numbers of uint32"),
        "offsets.npy": (offsets[::-1].copy(), "rise from 0"),
        "id_ends.npy": (np.arange(1, 31), "expected the ids of 30 documents"),
        "ids.npy": (text[:-1], "expected the ids of 30 documents"),
    }
    for name, (values, message) in cases.items():
        folder = tmp_path / name
        shutil.copytree(tmp_path / "index", folder)
        np.save(folder / name, values)
        with_checksums(folder)
        refused(DataError, message, load_index, folder)
    np.save(tmp_path / "index" / "documents.npy", np.full(offsets[-1], 1 << 30, np.int32))
    sum_terms(tmp_path / "index")
    with_checksums(tmp_path / "index")
    wrong = load_index(tmp_path / "index")  # with documents out of range, which are never written to
    refused(DataError, "damaged; the postings of term", wrong.search, documents, 3)


@given(st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=20))
@settings(max_examples=40, deadline=None)
def test_ids_are_stored_and_read_one_by_one(tmp_path_factory: pytest.TempPathFactory, ids: list[str]) -> None:
    folder = tmp_path_factory.mktemp("ids")
    save_ids(ids, folder)
    stored = StoredIds.load(folder, len(ids))
    assert list(stored) == ids == [stored[at] for at in range(len(ids))]
    refused(IndexError, "at: expected a position", lambda: stored[len(ids)])
    refused(DataError, "expected the ids of", StoredIds.load, folder, len(ids) + 1)
