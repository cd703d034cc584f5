"""The exact index: scores, search on a device, and files that are read as far as queries need."""

from __future__ import annotations

import itertools
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.manifests import sum_files, sum_terms
from tilefold.pipeline.rows import SparseRows
from tilefold.retrieval import SparseVectors, build_index, load_index
from tilefold.retrieval.errors import DataError, VocabularyMismatchError
from tilefold.retrieval.index import exact, on_device
from tilefold.retrieval.index.exact import (
    ExactIndex,
    Postings,
    add_with_numpy,
    choose_add_postings,
    top_positive,
)
from tilefold.retrieval.index.on_device import DeviceIndex

MakeVectors = Callable[..., SparseVectors]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
VOCAB_SIZE = 500


def to_csr(dense: torch.Tensor) -> torch.Tensor:
    """``dense`` in CSR layout, without the warning of torch that the layout is in beta."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return dense.to_sparse_csr()


def to_sparse_rows(csr: torch.Tensor) -> SparseRows:
    """The rows of a CSR tensor, as an encoder returns them."""
    return SparseRows(
        csr.crow_indices().diff().cpu(),
        csr.col_indices().int(),
        csr.values(),
        csr.shape[1],
    )


def to_dense(vectors: SparseVectors) -> torch.Tensor:
    """Vectors as a float32 matrix ``[len(vectors), vocab_size]``."""
    dense = torch.zeros(len(vectors), vectors.vocab_size)
    for row in range(len(vectors)):
        terms, weights = vectors.row(row)
        dense[row, terms.tolist()] = torch.from_numpy(weights.copy())
    return dense


def ids_of(rows: Sequence[Sequence[Any]]) -> list[list[str]]:
    """The ids of the hits of every query."""
    return [[hit.id for hit in hits] for hits in rows]


@pytest.mark.parametrize("device", DEVICES)
def test_search_on_a_device_ranks_and_scores_as_on_the_cpu(
    device: str,
    make_vectors: MakeVectors,
) -> None:
    queries = make_vectors(20, seed=1, prefix="q")
    index = ExactIndex.build(make_vectors(300))

    expected = index.search(queries, 9)
    result = index.on(device).search(queries, 9)

    assert ids_of(result) == ids_of(expected)
    for hits, expected_hits in zip(result, expected, strict=True):
        np.testing.assert_allclose(
            [hit.score for hit in hits],
            [hit.score for hit in expected_hits],
            rtol=1e-6,
        )


@pytest.mark.parametrize("device", DEVICES)
def test_query_tensors_of_every_layout_find_the_same(
    device: str,
    make_vectors: MakeVectors,
) -> None:
    documents = make_vectors(300)
    queries = make_vectors(20, seed=1, prefix="q")
    index = ExactIndex.build(documents).on(device)
    expected = index.search(queries, 9)
    dense = to_dense(queries).to(device)
    csr = to_csr(dense)
    rows = to_sparse_rows(csr)

    for query_batch in (dense, csr, csr.to_sparse_coo(), rows):
        scores, positions = index.search_tensor(query_batch, 9)
        found_ids = []
        for row in positions.tolist():
            found_ids.append([documents.ids[position] for position in row if position >= 0])
        assert found_ids == ids_of(expected)
        assert scores[0].tolist() == [hit.score for hit in expected[0]]

    _, positions = index.search_tensor(rows, 9)
    _, positions_of_part = index.search_tensor(rows.part(slice(1, 2)), 9)
    assert torch.equal(positions_of_part, positions[1:2])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("n_removed", [0, 3])
def test_one_query_of_every_layout_and_dtype_finds_the_same_as_in_a_batch(
    device: str,
    n_removed: int,
    make_vectors: MakeVectors,
) -> None:
    documents = make_vectors(300)
    queries = make_vectors(4, seed=1, prefix="q")
    exact_index = ExactIndex.build(documents)
    present = np.arange(300) >= n_removed
    index = DeviceIndex(documents.ids, exact_index.postings(), exact_index, device, present)
    among = index.mask(documents.ids[10::2])
    batch = to_dense(queries).to(device)
    # weights that fp16 and bf16 hold exactly
    batch = batch.bfloat16().half().float()
    all_scores, all_positions = index.search_tensor(batch, 9, among)

    for row in range(4):
        dense = batch[row : row + 1]
        csr = to_csr(dense)
        layouts: list[Any] = [
            dense,
            dense.double(),
            dense.bfloat16(),
            dense.half(),
            batch.t().contiguous().t()[row : row + 1],
            csr,
            to_csr(dense.half()),
            csr.to_sparse_coo(),
            to_sparse_rows(csr),
        ]
        for query in layouts:
            scores, positions = index.search_tensor(query, 9, among)
            assert torch.equal(scores, all_scores[row : row + 1])
            assert torch.equal(positions, all_positions[row : row + 1])


@pytest.mark.parametrize("device", DEVICES)
def test_one_query_on_the_cpu_finds_the_same_as_in_a_batch(
    device: str,
    make_vectors: MakeVectors,
) -> None:
    index = ExactIndex.build(make_vectors(300)).on(device)
    queries = make_vectors(6, seed=1, prefix="q")
    without_terms = SparseVectors.from_rows({"empty": {}}, VOCAB_SIZE)

    singles = [index.search(queries.take([row]), 9) for row in range(6)]

    assert list(itertools.chain.from_iterable(singles)) == index.search(queries, 9)
    assert index.search(without_terms, 9) == [[]]


def test_one_query_on_a_device_lists_no_terms_on_the_cpu(
    make_vectors: MakeVectors,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    index = ExactIndex.build(make_vectors(300)).on("cpu")
    query = to_dense(make_vectors(1, seed=1, prefix="q"))
    expected = index.search_tensor(query, 9)

    def refuse(queries: object) -> None:
        raise AssertionError("the terms of one query were listed by torch")

    monkeypatch.setattr(on_device, "_extract_entries", refuse)
    for layout in (query, to_csr(query), to_sparse_rows(to_csr(query))):
        for result, expected_result in zip(
            index.search_tensor(layout, 9),
            expected,
            strict=True,
        ):
            assert torch.equal(result, expected_result)


@pytest.mark.parametrize("device", DEVICES)
def test_a_mask_restricts_search_on_a_device_to_its_documents(
    device: str,
    make_vectors: MakeVectors,
) -> None:
    documents = make_vectors(300)
    queries = make_vectors(20, seed=1, prefix="q")
    index = ExactIndex.build(documents)
    allowed_ids = documents.ids[::7]
    expected = []
    for hits in index.search(queries, 300):
        expected.append([hit.id for hit in hits if hit.id in allowed_ids])

    index_on_device = index.on(device)
    result = index_on_device.search(queries, 300, index_on_device.mask(allowed_ids))

    assert ids_of(result) == expected


@pytest.mark.parametrize("device", DEVICES)
def test_search_on_a_device_refuses_unknown_ids_and_queries_of_another_vocabulary(
    device: str,
    make_vectors: MakeVectors,
) -> None:
    index = ExactIndex.build(make_vectors(300)).on(device)

    message = "expected ids of documents in the index, got 'nobody'"
    with pytest.raises(ValueError, match=message):
        index.mask(["nobody"])
    with pytest.raises(ValueError, match=r"queries: expected \[\.\., 500\], got \[2, 3\]"):
        index.search_tensor(torch.zeros(2, 3), 1)
    with pytest.raises(VocabularyMismatchError, match="500 terms, got one with 600"):
        index.search(make_vectors(2, vocab_size=600), 3)


@pytest.mark.parametrize("device", DEVICES)
def test_damaged_postings_are_not_copied_to_a_device(
    device: str,
    make_vectors: MakeVectors,
    tmp_path: Path,
) -> None:
    build_index(make_vectors(300)).save(tmp_path)
    weights = tmp_path / "weights.npy"
    weights.write_bytes(weights.read_bytes()[:-4] + np.float32(1.0).tobytes())
    damaged = ExactIndex.load(tmp_path)

    message = "the postings of term 499 have changed"
    with pytest.raises(DataError, match=message):
        damaged.on(device)


@pytest.mark.parametrize("layout", ["strided", "csr", "coo", "rows"])
@pytest.mark.parametrize("weight", [float("nan"), float("inf"), -1.0, 1e300])
@pytest.mark.parametrize("n_queries", [1, 3])
def test_queries_on_a_device_with_wrong_weights_are_refused(
    layout: str,
    weight: float,
    n_queries: int,
    make_vectors: MakeVectors,
) -> None:
    index = ExactIndex.build(make_vectors(5)).on("cpu")
    dense = torch.zeros(n_queries, VOCAB_SIZE, dtype=torch.float64)
    dense[:, 3] = 1.0
    dense[-1, 7] = weight
    queries: Any = dense
    if layout == "csr":
        queries = to_csr(dense)
    elif layout == "coo":
        queries = dense.to_sparse_coo()
    elif layout == "rows":
        queries = to_sparse_rows(to_csr(dense))

    message = f"expected finite weights of at least 0, got .* for query {n_queries - 1}"
    with pytest.raises(DataError, match=message):
        index.search_tensor(queries, 2)


def search_by_plain_sums(
    documents: SparseVectors,
    query: tuple[Any, Any],
    k: int,
) -> list[tuple[str, float]]:
    """Ids and scores of the best ``k`` documents.

    Scores are summed in float32, term after term and document by document. Documents of equal
    score are in the order of the vectors.
    """
    scores = np.zeros(len(documents), np.float32)
    for term, query_weight in zip(*query, strict=True):
        for row in range(len(documents)):
            terms, weights = documents.row(row)
            scores[row] += query_weight * weights[terms == term].sum()
    return [(documents.ids[row], float(scores[row])) for row in positive_by_sorting(scores)[:k]]


def positive_by_sorting(scores: NDArray[np.float32]) -> list[int]:
    """Positions of the positive scores: descending by score, then ascending by position."""
    positions = np.flatnonzero(scores > 0).tolist()
    return sorted(positions, key=lambda position: (-scores[position], position))


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    n_documents=st.integers(1, 40),
    vocab_size=st.integers(1, 12),
    k=st.integers(1, 60),
)
def test_scores_are_the_bits_of_a_plain_sum(
    seed: int,
    n_documents: int,
    vocab_size: int,
    k: int,
) -> None:
    rng = np.random.default_rng(seed)
    # Rounding makes ties, and some zeros.
    decimals = int(rng.integers(1, 8))
    weights = rng.exponential(size=(n_documents, vocab_size)).astype(np.float32).round(decimals)
    weights[rng.random(weights.shape) < 0.6] = 0
    weights[0, 0] = 1  # an index needs a positive weight
    document_ids = [f"d{row}" for row in range(n_documents)]
    documents = SparseVectors.from_torch(document_ids, torch.from_numpy(weights))
    is_positive = rng.random((3, vocab_size)) < 0.5
    query_weights = np.where(is_positive, rng.exponential(size=(3, vocab_size)), 0)
    queries = SparseVectors.from_torch(
        ["a", "b", "c"],
        torch.from_numpy(query_weights.astype(np.float32)),
    )
    expected = [search_by_plain_sums(documents, queries.row(row), k) for row in range(3)]

    index = build_index(documents)

    assert index.search(queries, k) == expected
    assert [index.search(queries.take([row]), k)[0] for row in range(3)] == expected
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exact, "choose_add_postings", lambda: add_with_numpy)
        assert index.search(queries, k) == expected


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    n_scores=st.integers(1, 3_000),
    k=st.integers(1, 60),
    levels=st.integers(1, 500),
)
def test_top_positive_selects_as_a_sort_of_all_scores(
    seed: int,
    n_scores: int,
    k: int,
    levels: int,
) -> None:
    rng = np.random.default_rng(seed)
    is_scored = rng.random(n_scores) < 0.3
    scores = np.where(is_scored, rng.integers(0, levels, n_scores), 0).astype(np.float32)
    assert top_positive(scores, k) == positive_by_sorting(scores)[:k]


def add_with_fused_products(scores: Any, lists: Any, values: Any) -> None:
    """Add weighted postings like a fused multiply-add: a product is not rounded by itself."""
    for (documents, weights), value in zip(lists, values, strict=True):
        scores[documents] = (scores[documents] + np.float64(value) * weights).astype(np.float32)


def add_with_another_signature(scores: Any, lists: Any, values: Any) -> None:
    raise TypeError("another signature")


def test_a_sum_is_used_only_if_it_rounds_every_product() -> None:
    assert exact._matches_numpy_bitwise(add_with_numpy)
    assert exact._matches_numpy_bitwise(exact.with_rounded_products(add_with_fused_products))
    assert not exact._matches_numpy_bitwise(add_with_fused_products)
    assert not exact._matches_numpy_bitwise(add_with_another_signature)


@pytest.fixture
def no_cached_sum() -> Any:
    """Choose the implementation of sums anew in this test, and again after it."""
    choose_add_postings.cache_clear()
    yield
    choose_add_postings.cache_clear()


def test_a_scipy_that_rounds_otherwise_is_replaced_by_numpy_with_one_warning(
    make_vectors: MakeVectors,
    monkeypatch: pytest.MonkeyPatch,
    no_cached_sum: None,
) -> None:
    index = build_index(make_vectors(50))
    queries = make_vectors(3, seed=1)
    assert choose_add_postings() is not add_with_numpy, "scipy is installed here"
    expected = index.search(queries, 5)
    monkeypatch.setattr(exact, "_matches_numpy_bitwise", lambda add: False)
    choose_add_postings.cache_clear()

    with pytest.warns(RuntimeWarning, match="exact indexes are searched with numpy"):
        assert index.search(queries, 5) == expected
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        index.search(queries, 5)


def test_without_scipy_numpy_is_used_without_a_warning(
    monkeypatch: pytest.MonkeyPatch,
    no_cached_sum: None,
) -> None:
    monkeypatch.setitem(sys.modules, "scipy.sparse._sparsetools", None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert choose_add_postings() is add_with_numpy


def test_postings_built_in_pieces_equal_those_built_at_once(
    make_vectors: MakeVectors,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    documents = make_vectors(100)
    documents.data[::7] = 0
    expected = Postings.from_vectors(documents)
    assert expected.offsets[-1] == (documents.data > 0).sum()
    for start, end in itertools.pairwise(expected.offsets):
        assert (np.diff(expected.documents[start:end]) > 0).all()

    monkeypatch.setattr(exact, "_WEIGHTS_PER_PIECE", 64)  # three rows
    in_pieces_of_rows = Postings.from_vectors(documents)
    monkeypatch.setattr(exact, "_WEIGHTS_PER_PIECE", 1)  # less than a row
    monkeypatch.setattr(exact, "_MAX_SHORT_TERMS", 0)
    in_smallest_pieces = Postings.from_vectors(documents)

    for postings in (in_pieces_of_rows, in_smallest_pieces):
        assert np.array_equal(postings.offsets, expected.offsets)
        assert np.array_equal(postings.documents, expected.documents)
        assert np.array_equal(postings.weights, expected.weights)


def test_a_query_reads_the_postings_of_its_terms_only(
    make_vectors: MakeVectors,
    tmp_path: Path,
) -> None:
    queries = make_vectors(4, seed=1, terms=5)
    built = build_index(make_vectors(300))
    built.save(tmp_path)
    loaded: Any = load_index(tmp_path)
    postings = loaded._postings
    assert isinstance(postings.documents.base, np.memmap)
    assert not postings.trusted.any()

    first_query = queries.take([0])
    assert loaded.search(first_query, 5) == built.search(first_query, 5)
    assert np.flatnonzero(postings.trusted).tolist() == queries.row(0)[0].tolist()
    assert loaded.search(queries, 5) == built.search(queries, 5)


def test_a_loaded_index_is_saved_with_the_same_bytes(
    make_vectors: MakeVectors,
    tmp_path: Path,
) -> None:
    build_index(make_vectors(300)).save(tmp_path / "index")
    load_index(tmp_path / "index").save(tmp_path / "again")
    first = {file.name: file.read_bytes() for file in (tmp_path / "index").iterdir()}
    second = {file.name: file.read_bytes() for file in (tmp_path / "again").iterdir()}
    assert first == second


@pytest.mark.parametrize("name", ["documents.npy", "weights.npy"])
def test_damaged_postings_are_refused_by_queries_that_read_them(
    name: str,
    make_vectors: MakeVectors,
    tmp_path: Path,
) -> None:
    built: Any = build_index(make_vectors(100))
    built.save(tmp_path)
    offsets = built._postings.offsets
    term = int(np.argmax(np.diff(offsets)))
    content = bytearray((tmp_path / name).read_bytes())
    postings_to_end = int(offsets[-1] - offsets[term])
    content[len(content) - 4 * postings_to_end] ^= 1  # entries of both files have 4 bytes
    (tmp_path / name).write_bytes(content)
    index = load_index(tmp_path)

    other_terms = {number: 1.0 for number in range(VOCAB_SIZE) if number != term}
    query = SparseVectors.from_rows({"q": other_terms}, VOCAB_SIZE)
    assert index.search(query, 10) == built.search(query, 10)

    query = SparseVectors.from_rows({"q": {term: 1.0}}, VOCAB_SIZE)
    files = f"{tmp_path / 'documents.npy'}, {tmp_path / 'weights.npy'}"
    message = rf"^{re.escape(files)}: damaged; the postings of term {term} .*tilefold index"
    for _ in range(2):  # the postings are not trusted after the first refusal
        with pytest.raises(DataError, match=message):
            index.search(query, 10)


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        pytest.param(
            "documents.npy",
            lambda documents: np.zeros(len(documents), np.int64),
            r"expected int32 of shape \[\d+\], got int64",
            id="documents of another type",
        ),
        pytest.param(
            "weights.npy",
            lambda weights: np.zeros(7, np.float32),
            r"got float32 of shape \[7\]",
            id="too few weights",
        ),
        pytest.param(
            "checksums.npy",
            lambda checksums: np.zeros(3, np.uint32),
            r"expected uint32 of shape \[500\]",
            id="too few checksums",
        ),
        pytest.param(
            "offsets.npy",
            lambda offsets: offsets[::-1].copy(),
            "rise from 0",
            id="falling offsets",
        ),
        pytest.param(
            "id_offsets.npy",
            lambda id_offsets: np.arange(31),
            r"ids.npy: expected uint8 of shape \[30\]",
            id="id offsets that end before the text",
        ),
        pytest.param(
            "id_offsets.npy",
            lambda id_offsets: np.r_[0, 0, np.arange(2, 31)],
            "id_offsets.npy: an id is empty",
            id="an empty id",
        ),
        pytest.param(
            "ids.npy",
            lambda text: text[:-1],
            "ids.npy: expected uint8 of shape",
            id="text of ids one byte short",
        ),
    ],
)
def test_arrays_that_do_not_fit_each_other_are_refused(
    file: str,
    change: Callable[[NDArray[Any]], NDArray[Any]],
    message: str,
    make_vectors: MakeVectors,
    tmp_path: Path,
) -> None:
    build_index(make_vectors(30)).save(tmp_path)
    np.save(tmp_path / file, change(np.load(tmp_path / file)))
    sum_files(tmp_path)
    with pytest.raises(DataError, match=message):
        load_index(tmp_path)


def test_postings_of_documents_out_of_range_are_refused(
    make_vectors: MakeVectors,
    tmp_path: Path,
) -> None:
    documents = make_vectors(30)
    build_index(documents).save(tmp_path)
    n_postings = len(np.load(tmp_path / "documents.npy"))
    np.save(tmp_path / "documents.npy", np.full(n_postings, 1 << 30, np.int32))
    sum_terms(tmp_path)
    sum_files(tmp_path)
    index = load_index(tmp_path)
    with pytest.raises(DataError, match="damaged; the postings of term"):
        index.search(documents, 3)
