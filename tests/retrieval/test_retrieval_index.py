from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import seismic

from tests.manifests import edit
from tests.refusals import refused
from tilefold.retrieval import SparseIndex, SparseVectors, build_index, hits_to_run, load_index
from tilefold.retrieval.errors import DataError, MissingPackageError, VocabularyMismatchError
from tilefold.retrieval.index.seismic import SeismicIndex, SeismicOptions

Make = Callable[..., SparseVectors]
BACKENDS = ["exact", "seismic"]
ALL = [*BACKENDS, "qdrant"]


@pytest.mark.parametrize("backend", ALL)
def test_documents_that_share_no_term_are_not_returned(backend: str) -> None:
    documents = SparseVectors.from_rows({"a": {0: 1.0}, "b": {1: 2.0}, "empty": {}}, 9)
    queries = SparseVectors.from_rows({"x": {1: 0.5}, "none": {}, "y": {0: 1.0, 1: 1.0}, "z": {8: 1.0}}, 9)
    run = hits_to_run(queries, build_index(documents, backend).search(queries, 10))
    assert run == {"x": {"b": 1.0}, "none": {}, "y": {"b": 2.0, "a": 1.0}, "z": {}}


@pytest.mark.parametrize("backend", ALL)
def test_a_saved_index_gives_the_same_results(backend: str, make_vectors: Make, tmp_path: Path) -> None:
    documents, queries = make_vectors(300), make_vectors(20, seed=1, prefix="q")
    index = build_index(documents, backend)
    assert isinstance(index, SparseIndex)
    index.save(tmp_path / "index")
    index.save(tmp_path / "index")  # an own index may be replaced
    again = load_index(tmp_path / "index")
    assert (again.backend, again.n_documents, again.vocab_size, again.fingerprint) == (backend, 300, 500, "f" * 64)
    assert again.search(queries, 7) == index.search(queries, 7)
    manifest = json.loads((tmp_path / "index" / "index.json").read_text())
    assert manifest["backend"] == backend and "tilefold" in manifest["versions"]
    assert [path.name for path in tmp_path.iterdir()] == ["index"]
    (tmp_path / "index" / "thesis.txt").write_text("years of work")
    refused(FileExistsError, "nothing was overwritten", index.save, tmp_path / "index")


@pytest.mark.parametrize("backend", ALL)
def test_what_no_index_can_be_asked_or_made_of_is_refused(backend: str, make_vectors: Make) -> None:
    index = build_index(make_vectors(20), backend)
    refused(VocabularyMismatchError, "500 terms, got one with 600", index.search, make_vectors(2, vocab_size=600), 3)
    queries = make_vectors(2)
    queries.fingerprint = "0" * 64
    refused(VocabularyMismatchError, r"got one of the same size \(fingerprint 0{12}\)", index.search, queries, 3)
    queries.fingerprint = None  # unknown is not different
    assert len(index.search(queries, 3)) == 2
    for k in (0, -1, 2.5, True):
        refused(ValueError, "k: expected an integer of at least 1", index.search, queries, k)
    for rows in ({}, {"a": {}, "b": {1: 0.0}}):
        with pytest.raises(ValueError, match=f"at least one vector with a positive weight, got {len(rows)} vector"):
            build_index(SparseVectors.from_rows(rows, 5), backend)


@pytest.mark.parametrize(
    ("backend", "options", "message"),
    [
        ("lucene", {}, "backend: expected one of exact, seismic, qdrant, got 'lucene'"),
        ("exact", {"n_postings": 3}, "the exact index has none, got n_postings"),
        ("seismic", {"ef": 3}, r"Seismic has n_postings, .*; got ef"),
        ("seismic", {"n_postings": 0}, "n_postings: expected an integer of at least 1, got 0"),
        ("seismic", {"heap_factor": float("nan")}, r"heap_factor: expected a number in \[0, 1\], got nan"),
        ("seismic", {}, r"up to 65504, got 70000"),
    ],
)
def test_unknown_backends_wrong_options_and_large_weights_are_refused(
    backend: str, options: dict[str, Any], message: str
) -> None:
    refused(ValueError, message, build_index, SparseVectors.from_rows({"a": {0: 7e4}}, 5), backend, **options)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_missing_or_damaged_index_is_named(backend: str, make_vectors: Make, tmp_path: Path) -> None:
    refused(FileNotFoundError, r"index.json: no such file.*tilefold index", load_index, tmp_path / "nowhere")
    (tmp_path / "index.json").write_text('{"backend": "exact"}')
    refused(DataError, "expected an index of schema 1, got wrong n_documents", load_index, tmp_path)
    build_index(make_vectors(50), backend).save(tmp_path / "index")
    if backend == "exact":
        refused(DataError, "expected an index of backend 'seismic', got 'exact'", SeismicIndex.load, tmp_path / "index")
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
        ("seismic", {"heap_factor": "0.7"}, r"heap_factor: expected a number in \[0, 1\], got '0.7'"),
        ("seismic", {"heap_factor": True}, r"heap_factor: expected a number in \[0, 1\], got True"),
        ("seismic", {"summary_energy": None}, r"summary_energy: expected a number in \(0, 1\], got None"),
        ("seismic", {"num_threads": True}, "num_threads: expected an integer of at least 0, got True"),
        ("seismic", {"doc_cut": "15"}, "doc_cut: expected an integer of at least 1, got '15'"),
        ("qdrant", {"url": 6333}, "expected a text as url of the options, got 6333"),
        ("qdrant", {"url": "http://localhost"}, "expected a text as collection of the options, got None"),
    ],
)
def test_options_of_another_type_in_an_edited_manifest_are_named(
    backend: str, changes: dict[str, Any], message: str, make_vectors: Make, tmp_path: Path
) -> None:
    index: Any = build_index(make_vectors(20), backend)
    index.save(tmp_path / "index")
    manifest = tmp_path / "index" / "index.json"
    edit(manifest, options=json.loads(manifest.read_text())["options"] | changes)
    refused(DataError, message, load_index, tmp_path / "index")
    edit(manifest, n_documents=True)
    refused(DataError, "wrong n_documents: expected int, got True", load_index, tmp_path / "index")


def test_seismic_finds_nearly_all_that_exact_search_finds_and_more_on_request(make_vectors: Make) -> None:
    documents, queries = make_vectors(2000), make_vectors(50, seed=1, terms=10, prefix="q")
    exact, index = build_index(documents).search(queries, 10), build_index(documents, "seismic")
    assert isinstance(index, SeismicIndex)

    def recall(found: list[list[Any]]) -> float:
        pairs = zip(found, exact, strict=True)
        return float(np.mean([len({h.id for h in a} & {h.id for h in b}) / len(b) for a, b in pairs]))

    found = index.search(queries, 10)
    assert recall(index.search(queries, 10, query_cut=1, heap_factor=1.0)) < recall(found) and recall(found) > 0.9
    truth = [{hit.id: hit.score for hit in row} for row in build_index(documents).search(queries, 2000)]
    for row, scores in zip(found, truth, strict=True):
        assert [hit.score for hit in row] == sorted((hit.score for hit in row), reverse=True)
        for hit in row:  # weights in 16-bit floats: half an ulp, 2^-11
            assert hit.score == pytest.approx(scores[hit.id], rel=2**-11)
    assert [index.search(queries.take([at]), 10)[0] for at in range(len(queries))] == found


def test_seismic_prints_nothing(make_vectors: Make, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    index = build_index(make_vectors(50), "seismic")
    index.save(tmp_path / "index")
    load_index(tmp_path / "index").search(make_vectors(3), 5)
    sys.stdout.write("still here\n")
    assert capfd.readouterr() == ("still here\n", "")


def test_seismic_indexes_vocabularies_beyond_16_bits(
    make_vectors: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents, queries = make_vectors(100, vocab_size=250_002), make_vectors(5, vocab_size=250_002)
    few = build_index(documents, "seismic")  # fewer than 65,536 terms in use: renumbered into 16 bits
    monkeypatch.setattr("tilefold.retrieval.index.seismic._SMALL_VOCABULARY", 100)
    many = build_index(documents, "seismic")
    assert (type(few._engine), type(many._engine)) == (seismic.SeismicIndex, seismic.SeismicIndexLV)  # type: ignore[attr-defined]
    assert [row[0].id for row in few.search(queries, 3)] == queries.ids
    assert [row[0].id for row in many.search(queries, 3)] == queries.ids
    many.save(tmp_path / "index")
    assert load_index(tmp_path / "index").search(queries, 3) == many.search(queries, 3)


def test_seismic_without_the_fast_loader_gives_the_same_index(
    make_vectors: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents, queries = make_vectors(50), make_vectors(5, seed=1)
    expected = build_index(documents, "seismic", heap_factor=0.0).search(queries, 5)
    real = seismic.SeismicDataset

    class OlderDataset:  # the class before documents could be added by component
        def __new__(cls) -> Any:
            return real()

    monkeypatch.setattr(seismic, "SeismicDataset", OlderDataset)
    found = build_index(documents, "seismic", heap_factor=0.0).search(queries, 5)
    assert [[hit.id for hit in row] for row in found] == [[hit.id for hit in row] for row in expected]


def test_a_missing_backend_package_says_how_to_install_it(make_vectors: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "seismic", None)
    refused(MissingPackageError, r"pip install pyseismic-lsr", build_index, make_vectors(3), "seismic")


def test_seismic_chooses_by_the_collection_what_is_not_given(make_vectors: Make, tmp_path: Path) -> None:
    index = build_index(make_vectors(300), "seismic", heap_factor=0.6)  # 6,000 postings of 500 terms: 12 each
    assert isinstance(index, SeismicIndex)
    assert (index.options.n_postings, index.options.query_cut, index.options.heap_factor) == (40, 20, 0.6)
    index.save(tmp_path / "index")
    assert SeismicIndex.load(tmp_path / "index").options == index.options
    many = SeismicOptions().for_collection(8_841_823, 34_500.0)  # MS MARCO
    assert 3_000 <= (many.n_postings or 0) <= 4_000
    assert (many.query_cut, many.heap_factor) == (10, 0.8)
    assert SeismicOptions(n_postings=7, query_cut=3, heap_factor=0.0).for_collection(10, 1.0).n_postings == 7
