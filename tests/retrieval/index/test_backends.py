"""Behaviour that indexes of several backends share: saving, loading, refusals and identifiers."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.manifests import edit
from tilefold import retrieval as r
from tilefold.retrieval import SparseIndex, SparseVectors, build_index, load_index
from tilefold.retrieval.errors import DataError, MissingPackageError, VocabularyMismatchError
from tilefold.retrieval.index.opening import open_index
from tilefold.retrieval.index.protocol import StoredIds, are_among, save_ids
from tilefold.retrieval.index.seismic import SeismicIndex

MakeVectors = Callable[..., SparseVectors]
FOLDER_BACKENDS = ["exact", "seismic"]
SPARSE_BACKENDS = ["exact", "seismic", "qdrant"]
ALL_BACKENDS = ["exact", "seismic", "qdrant", "bm25", "dense", "late"]


@pytest.mark.parametrize("backend", SPARSE_BACKENDS)
def test_unseen_terms_empty_rows_and_large_k(backend: str) -> None:
    documents = SparseVectors.from_rows(
        {
            "a": {0: 1.0, 3: 0.0},
            "empty": {},
            "b": {0: 1.0, 70_000: 2.0},
        },
        70_001,
    )
    queries = SparseVectors.from_rows(
        {
            "term of both": {0: 2.0},
            "unseen term": {5: 1.0},
            "no terms": {},
            "term of b": {70_000: 1.0},
            "two terms": {0: 1.0, 70_000: 1.0},
        },
        70_001,
    )

    hits = build_index(documents, backend).search(queries, 1_000)

    assert hits == [
        [("a", 2.0), ("b", 2.0)],
        [],
        [],
        [("b", 2.0)],
        [("b", 3.0), ("a", 1.0)],
    ]


@pytest.mark.parametrize("backend", SPARSE_BACKENDS)
def test_a_saved_index_gives_the_same_results(
    backend: str,
    make_vectors: MakeVectors,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    queries = make_vectors(20, seed=1, prefix="q")
    index = build_index(make_vectors(300), backend)
    assert isinstance(index, SparseIndex)

    index.save(tmp_path / "index")
    loaded = load_index(tmp_path / "index")

    assert loaded.backend == backend
    assert loaded.n_documents == 300
    assert loaded.vocab_size == 500
    assert loaded.fingerprint == "f" * 64
    assert loaded.search(queries, 7) == index.search(queries, 7)
    assert capfd.readouterr() == ("", "")
    assert [path.name for path in tmp_path.iterdir()] == ["index"]
    manifest = json.loads((tmp_path / "index" / "index.json").read_text())
    assert manifest["backend"] == backend
    assert "tilefold" in manifest["versions"]


@pytest.mark.parametrize("backend", SPARSE_BACKENDS)
def test_saving_into_a_folder_with_other_files_is_refused(
    backend: str,
    make_vectors: MakeVectors,
    tmp_path: Path,
) -> None:
    index = build_index(make_vectors(300), backend)
    assert isinstance(index, SparseIndex)
    index.save(tmp_path / "index")
    (tmp_path / "index" / "thesis.txt").write_text("years of work")

    with pytest.raises(FileExistsError, match="nothing was overwritten"):
        index.save(tmp_path / "index")


@pytest.mark.parametrize("layout", [torch.sparse_csc, torch.sparse_csr, torch.sparse_coo])
@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
def test_sparse_tensors_of_every_layout_become_vectors(layout: torch.layout) -> None:
    matrix = torch.tensor([[0.0, 1.0, 0.0, 2.0], [3.0, 0.0, 0.0, 0.0]])

    vectors = SparseVectors.from_torch(["a", "b"], matrix.to_sparse(layout=layout))

    assert vectors.row(0)[0].tolist() == [1, 3]
    assert vectors.row(1)[0].tolist() == [0]
    assert vectors.data.tolist() == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("backend", SPARSE_BACKENDS)
def test_queries_of_another_vocabulary_are_refused(
    backend: str,
    make_vectors: MakeVectors,
) -> None:
    index = build_index(make_vectors(20), backend)

    with pytest.raises(VocabularyMismatchError, match="500 terms, got one with 600"):
        index.search(make_vectors(2, vocab_size=600), 3)
    with pytest.raises(
        VocabularyMismatchError,
        match=r"got one of the same size \(fingerprint 0{12}\)",
    ):
        index.search(make_vectors(2, fingerprint="0" * 64), 3)


@pytest.mark.parametrize("backend", SPARSE_BACKENDS)
def test_queries_without_a_fingerprint_are_accepted(
    backend: str,
    make_vectors: MakeVectors,
) -> None:
    index = build_index(make_vectors(20), backend)
    assert len(index.search(make_vectors(2, fingerprint=None), 3)) == 2


@pytest.mark.parametrize("backend", SPARSE_BACKENDS)
@pytest.mark.parametrize("k", [0, -1, 2.5, True])
def test_a_k_that_is_no_positive_integer_is_refused(
    backend: str,
    k: Any,
    make_vectors: MakeVectors,
) -> None:
    index = build_index(make_vectors(20), backend)
    with pytest.raises(ValueError, match="k: expected an integer of at least 1"):
        index.search(make_vectors(2), k)


@pytest.mark.parametrize("backend", SPARSE_BACKENDS)
@pytest.mark.parametrize(
    "rows",
    [
        pytest.param({}, id="no vectors"),
        pytest.param({"a": {}, "b": {1: 0.0}}, id="vectors without a positive weight"),
    ],
)
def test_vectors_without_any_positive_weight_cannot_be_indexed(
    backend: str,
    rows: dict[str, dict[int, float]],
) -> None:
    message = f"at least one vector with a positive weight, got {len(rows)} vector"
    with pytest.raises(ValueError, match=message):
        build_index(SparseVectors.from_rows(rows, 5), backend)


@pytest.mark.parametrize(
    ("backend", "options", "message"),
    [
        pytest.param(
            "lucene",
            {},
            "backend: expected one of exact, seismic, qdrant, got 'lucene'",
            id="unknown backend",
        ),
        pytest.param(
            "exact",
            {"n_postings": 3},
            "the exact index takes no options, got n_postings",
            id="exact has no options",
        ),
        pytest.param(
            "seismic",
            {"ef": 3},
            r"Seismic has n_postings, .*; got ef",
            id="option that Seismic does not have",
        ),
        pytest.param(
            "seismic",
            {"n_postings": 0},
            "n_postings: expected an integer of at least 1, got 0",
            id="n_postings of 0",
        ),
        pytest.param(
            "seismic",
            {"heap_factor": float("nan")},
            r"heap_factor: expected a number in \[0, 1\], got nan",
            id="heap_factor of nan",
        ),
    ],
)
def test_wrong_backends_and_options_are_refused(
    backend: str,
    options: dict[str, Any],
    message: str,
) -> None:
    vectors = SparseVectors.from_rows({"a": {0: 7e4}}, 5)
    with pytest.raises(ValueError, match=message):
        build_index(vectors, backend, **options)


def test_loading_from_a_folder_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    message = r"nowhere: expected an index, as tilefold index writes it, got nothing"
    with pytest.raises(FileNotFoundError, match=message):
        load_index(tmp_path / "nowhere")


def test_a_manifest_without_required_members_is_refused(tmp_path: Path) -> None:
    (tmp_path / "index.json").write_text('{"backend": "exact"}')
    with pytest.raises(DataError, match="expected an index of schema 1, got wrong n_documents"):
        load_index(tmp_path)


def test_an_index_is_not_loaded_as_one_of_another_backend(
    make_vectors: MakeVectors,
    tmp_path: Path,
) -> None:
    build_index(make_vectors(50), "exact").save(tmp_path)
    with pytest.raises(DataError, match="expected an index of backend 'seismic', got 'exact'"):
        SeismicIndex.load(tmp_path)


@pytest.mark.parametrize("backend", FOLDER_BACKENDS)
def test_a_missing_or_shortened_file_of_an_index_is_named(
    backend: str,
    make_vectors: MakeVectors,
    tmp_path: Path,
) -> None:
    build_index(make_vectors(50), backend).save(tmp_path / "index")
    for file in sorted((tmp_path / "index").iterdir()):
        damaged = tmp_path / f"without-{file.name}"
        shutil.copytree(tmp_path / "index", damaged)
        (damaged / file.name).unlink()
        with pytest.raises(FileNotFoundError, match=file.name):
            load_index(damaged)
        (damaged / file.name).write_bytes(file.read_bytes()[:-20])
        with pytest.raises(DataError, match=file.name):
            load_index(damaged)


@pytest.mark.parametrize(
    ("backend", "changes", "message"),
    [
        pytest.param(
            "seismic",
            {"heap_factor": "0.7"},
            r"heap_factor: expected a number in \[0, 1\], got '0.7'",
            id="seismic: text as heap_factor",
        ),
        pytest.param(
            "seismic",
            {"heap_factor": True},
            r"heap_factor: expected a number in \[0, 1\], got True",
            id="seismic: boolean as heap_factor",
        ),
        pytest.param(
            "seismic",
            {"summary_energy": None},
            r"summary_energy: expected a number in \(0, 1\], got None",
            id="seismic: no summary_energy",
        ),
        pytest.param(
            "seismic",
            {"num_threads": True},
            "num_threads: expected an integer of at least 0, got True",
            id="seismic: boolean as num_threads",
        ),
        pytest.param(
            "seismic",
            {"doc_cut": "15"},
            "doc_cut: expected an integer of at least 1, got '15'",
            id="seismic: text as doc_cut",
        ),
        pytest.param(
            "qdrant",
            {"url": 6333},
            "expected a string for the option url, got 6333",
            id="qdrant: number as url",
        ),
        pytest.param(
            "qdrant",
            {"url": "http://localhost"},
            "expected a string for the option collection, got None",
            id="qdrant: url without a collection",
        ),
    ],
)
def test_edited_options_are_named(
    backend: str,
    changes: dict[str, Any],
    message: str,
    make_vectors: MakeVectors,
    tmp_path: Path,
) -> None:
    index: Any = build_index(make_vectors(20), backend)
    index.save(tmp_path)
    manifest = tmp_path / "index.json"
    options = json.loads(manifest.read_text())["options"]
    edit(manifest, options=options | changes)
    with pytest.raises(DataError, match=message):
        load_index(tmp_path)


@pytest.mark.parametrize("backend", ["seismic", "qdrant"])
def test_an_edited_number_of_documents_is_named(
    backend: str,
    make_vectors: MakeVectors,
    tmp_path: Path,
) -> None:
    index: Any = build_index(make_vectors(20), backend)
    index.save(tmp_path)
    edit(tmp_path / "index.json", n_documents=True)
    with pytest.raises(DataError, match="wrong n_documents: expected int, got True"):
        load_index(tmp_path)


@pytest.mark.parametrize(
    ("backend", "options"),
    [
        pytest.param("seismic", {}, id="seismic"),
        pytest.param("qdrant", {"weights": "float16"}, id="qdrant"),
    ],
)
def test_scores_of_16_bit_weights_are_within_half_an_ulp_of_exact_scores(
    backend: str,
    options: dict[str, Any],
    make_vectors: MakeVectors,
) -> None:
    documents = make_vectors(100)
    queries = make_vectors(5, seed=1, prefix="q")
    exact_rows = build_index(documents).search(queries, 100)
    rows = build_index(documents, backend, **options).search(queries, 10)
    for hits, exact_hits in zip(rows, exact_rows, strict=True):
        exact_scores = {hit.id: hit.score for hit in exact_hits}
        scores = [hit.score for hit in hits]
        assert scores
        assert scores == sorted(scores, reverse=True)
        for hit in hits:
            assert hit.score == pytest.approx(exact_scores[hit.id], rel=2**-11)


@pytest.mark.parametrize(
    ("backend", "module", "package", "options"),
    [
        # The pattern ends here: no extra installs Seismic on every Python.
        pytest.param("seismic", "seismic", "pyseismic-lsr`[.]$", {}, id="seismic"),
        pytest.param("qdrant", "qdrant_edge", "qdrant-edge-py", {}, id="embedded qdrant"),
        pytest.param(
            "qdrant",
            "qdrant_client",
            "qdrant-client",
            {"url": "http://localhost", "collection": "a"},
            id="client of qdrant",
        ),
    ],
)
def test_the_error_for_a_missing_package_says_what_to_install(
    backend: str,
    module: str,
    package: str,
    options: dict[str, Any],
    make_vectors: MakeVectors,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingPackageError, match=f"pip install {package}"):
        build_index(make_vectors(3), backend, **options)


def small_index(backend: str, names: list[str], folder: Path) -> Any:
    """An index of documents with the ids ``names``; only ``late`` writes to ``folder``."""
    if backend == "bm25":
        return r.BM25Index.build({name: f"tea for {name}" for name in names})
    if backend in ("dense", "late"):
        values = torch.randn(len(names), 8, generator=torch.Generator().manual_seed(0))
        vectors = r.TokenVectors(names, torch.arange(len(names) + 1), values)
        if backend == "dense":
            return r.DenseIndex.build(vectors, "dot")
        return r.LateIndex.build(vectors, folder)
    rows = {name: {position: 1.0} for position, name in enumerate(names)}
    return build_index(r.SparseVectors.from_rows(rows, 50), backend)


@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_saving_over_an_index_is_refused_unless_it_is_to_be_replaced(
    backend: str,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    if backend == "seismic":
        pytest.importorskip("seismic")
    if backend == "qdrant":
        pytest.importorskip("qdrant_edge")
    scratch = tmp_path_factory.mktemp("late")
    large = small_index(backend, [f"d{row}" for row in range(6)], scratch / "large")
    small = small_index(backend, ["d0", "d1"], scratch / "small")
    path = tmp_path / "index"
    large.save(path)

    message = r"index: expected a new or empty directory.*overwrite=True.*nothing was overwritten"
    with pytest.raises(FileExistsError, match=message):
        small.save(path)
    assert open_index(path).n_documents == 6

    small.save(path, overwrite=True)
    assert open_index(path).n_documents == 2
    assert [entry.name for entry in tmp_path.iterdir()] == ["index"]


def test_token_vectors_are_indexed_over_an_index_only_to_replace_it(tmp_path: Path) -> None:
    path = tmp_path / "index"
    two = r.TokenVectors(["a", "b"], torch.arange(3), torch.ones(2, 8))
    three = r.TokenVectors(["a", "b", "c"], torch.arange(4), torch.ones(3, 8))
    r.LateIndex.build(two, path)

    with pytest.raises(FileExistsError, match="nothing was over"):
        r.LateIndex.build(three, path)
    assert r.LateIndex.load(path).n_documents == 2

    assert r.LateIndex.build(three, path, overwrite=True).n_documents == 3


def test_an_index_is_saved_into_an_empty_folder(make_vectors: MakeVectors, tmp_path: Path) -> None:
    build_index(make_vectors(2)).save(tmp_path)
    assert load_index(tmp_path).n_documents == 2


def test_the_error_for_ids_that_are_not_unicode_has_the_path_of_their_file(tmp_path: Path) -> None:
    save_ids(["a", "b"], tmp_path)
    file = tmp_path / "ids.npy"
    np.save(file, np.array([0xFF, 0xFF], np.uint8))
    stored = StoredIds.load(tmp_path, 2)
    with pytest.raises(DataError) as raised:
        stored.at_positions(np.array([1]))
    assert str(raised.value).startswith(f"{file}: expected ids in UTF-8, got (")


@given(st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=20))
@settings(max_examples=15, deadline=None)
def test_stored_ids_behave_like_the_list_that_was_saved(
    tmp_path_factory: pytest.TempPathFactory,
    ids: list[str],
) -> None:
    folder = tmp_path_factory.mktemp("ids")
    save_ids(ids, folder)
    stored = StoredIds.load(folder, len(ids))
    assert list(stored) == ids
    assert [stored[position] for position in range(len(ids))] == ids
    assert stored[:] == ids
    assert stored[-1] == ids[-1]
    assert stored[1::2] == ids[1::2]
    sought = {*ids[::2], "an id that is not stored"}
    assert are_among(stored, sought).tolist() == [name in sought for name in ids]
    assert are_among(ids, sought).tolist() == [name in sought for name in ids]
    assert not are_among(stored, set()).any()
    with pytest.raises(IndexError, match="position: expected a position"):
        stored[len(ids)]
    with pytest.raises(DataError, match=r"id_offsets.npy: expected int64 of shape \["):
        StoredIds.load(folder, len(ids) + 1)
