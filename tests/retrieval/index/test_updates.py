"""Updated indexes answer as those that are built of all documents, also after a kill."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.retrieval.conftest import dense_folder
from tilefold import retrieval as r
from tilefold._internal import files as _files
from tilefold.retrieval.common.files import write_json_object
from tilefold.retrieval.common.provenance import Provenance
from tilefold.retrieval.errors import DataError, VocabularyMismatchError
from tilefold.retrieval.index import segments as segments_module
from tilefold.retrieval.index.checking import check_index
from tilefold.retrieval.index.opening import open_index

MakeVectors = Callable[..., r.SparseVectors]
EXIT_CODE_OF_KILLED = 9


def ids_in(numbers: range) -> list[str]:
    """Ids ``d0``, ``d1``, ... of the numbers."""
    return [f"d{number}" for number in numbers]


def scores_of(index: Any, queries: Any, k: int = 30) -> list[dict[str, float]]:
    """Document ids with scores, for every query."""
    return [dict(hits) for hits in index.search(queries, k)]


@dataclass(frozen=True)
class UpdateCase:
    """An index of 200 documents, two updates, and queries.

    Attributes:
        index: an index of documents 0 to 199.
        replacements: vectors of documents 180 to 229, of which 20 are in the index.
        additions: vectors of documents 300 to 329.
        queries: as the index takes them.
        build_of: builds an exact index of the current vectors of the documents with some ids.
        tolerance: relative error of scores that the storage of the backend may cause.
    """

    index: Any
    replacements: Any
    additions: Any
    queries: Any
    build_of: Callable[[list[str]], Any]
    tolerance: float


def dense_case(folder: Path) -> UpdateCase:
    first = dense_folder(folder / "v0", ids_in(range(200)), seed=0)
    replacements = dense_folder(folder / "v1", ids_in(range(180, 230)), seed=1)
    additions = dense_folder(folder / "v2", ids_in(range(300, 330)), seed=2)
    store_of = {name: store for store in (first, replacements, additions) for name in store.ids}

    def build_of(names: list[str]) -> Any:
        rows = [store_of[name].read([name]) for name in names]
        return r.DenseIndex.build(r.TokenVectors.concatenate(rows), "dot")

    return UpdateCase(
        index=r.DenseIndex.build(first),
        replacements=replacements,
        additions=additions,
        queries=torch.randn(5, 8, generator=torch.Generator().manual_seed(9)),
        build_of=build_of,
        tolerance=1e-5,
    )


def sparse_case(backend: str, make_vectors: MakeVectors) -> UpdateCase:
    first = make_vectors(200)
    replacements = replace(make_vectors(50, seed=1), ids=ids_in(range(180, 230)))
    additions = replace(make_vectors(30, seed=2), ids=ids_in(range(300, 330)))
    vector_of: dict[str, r.SparseVectors] = {}
    for vectors in (first, replacements, additions):
        for row, name in enumerate(vectors.ids):
            vector_of[name] = vectors.take([row])

    def build_of(names: list[str]) -> Any:
        return r.build_index(r.SparseVectors.concatenate([vector_of[name] for name in names]))

    options: dict[str, Any] = {}
    if backend == "seismic":
        options = {"n_postings": 200, "heap_factor": 0.0, "query_cut": 100}
    return UpdateCase(
        index=r.build_index(first, backend, **options),
        replacements=replacements,
        additions=additions,
        queries=make_vectors(5, seed=3, prefix="q"),
        build_of=build_of,
        tolerance=2e-3 if backend == "seismic" else 1e-5,
    )


@pytest.fixture(params=["exact", "seismic", "dense"])
def backend(request: pytest.FixtureRequest) -> str:
    if request.param == "seismic":
        pytest.importorskip("seismic")
    return str(request.param)


@pytest.fixture
def case(backend: str, make_vectors: MakeVectors, tmp_path: Path) -> UpdateCase:
    if backend == "dense":
        return dense_case(tmp_path)
    return sparse_case(backend, make_vectors)


def test_an_updated_index_answers_as_one_of_all_documents(
    backend: str,
    case: UpdateCase,
    tmp_path: Path,
) -> None:
    path = tmp_path / "index"
    case.index.save(path)
    summary = r.update_index(path, case.replacements)
    assert summary == {"n_documents": 230, "written": 50, "deleted": 0, "unknown_ids": []}
    deleted = ids_in(range(5)) + ids_in(range(200, 205))
    summary = r.update_index(path, delete=[*deleted, "nobody"])
    assert summary == {"n_documents": 220, "written": 0, "deleted": 10, "unknown_ids": ["nobody"]}
    assert r.update_index(path, case.additions)["n_documents"] == 250
    assert r.update_index(path, delete=deleted)["deleted"] == 0, "these were deleted before"

    current_ids = ids_in(range(5, 200)) + ids_in(range(205, 230)) + ids_in(range(300, 330))
    updated: Any = open_index(path)
    expected = case.build_of(current_ids)
    assert sorted(updated.ids) == sorted(current_ids)
    assert updated.n_documents == 250
    if backend == "dense":
        names = ["d190", "d7"]
        assert torch.equal(updated.vectors(names), expected.vectors(names))
    scores = scores_of(updated, case.queries)
    expected_scores = scores_of(expected, case.queries)
    for row, expected_row in zip(scores, expected_scores, strict=True):
        is_equal = row == pytest.approx(expected_row, rel=case.tolerance, abs=1e-5)
        # Scores of 16 bits may exchange documents around the last place.
        n_common = len(row.keys() & expected_row.keys())
        assert is_equal or (backend == "seismic" and n_common > 25)

    assert r.merge_segments(path) == 250
    assert r.merge_segments(path) == 250, "merging a second time changes nothing"
    merged = open_index(path)
    assert type(merged) is type(case.index)
    for row, row_before in zip(scores_of(merged, case.queries), scores, strict=True):
        assert row == pytest.approx(row_before, rel=case.tolerance)


def test_an_updated_index_is_replaced_by_another(case: UpdateCase, tmp_path: Path) -> None:
    path = tmp_path / "index"
    case.index.save(path)
    r.update_index(path, case.replacements)
    case.index.save(path, overwrite=True)
    assert open_index(path).n_documents == 200


def passages_of(**texts: str) -> Any:
    """Passages of three words of documents, by the names of the arguments."""
    documents = {name: r.Document(name, "", text) for name, text in texts.items()}
    return r.Passages(3).of(documents)


def documents_of(passages: Any) -> set[str]:
    """The ids of the documents that passages are of."""
    return {name.partition("#")[0] for name in passages}


@pytest.fixture
def passage_index() -> r.BM25Index:
    """A BM25 index of the passages of documents a, b and c."""
    return r.BM25Index.build(
        passages_of(
            a="one two three four five six seven",
            b="eight nine ten",
            c="red green blue grey",
        ),
    )


NEW_PASSAGES = passages_of(a="tea kettle", d="water")


@pytest.mark.parametrize(
    ("new_passages", "delete", "expected"),
    [
        pytest.param(NEW_PASSAGES, [], {"a", "b", "c", "d"}, id="replaced and added"),
        pytest.param(NEW_PASSAGES, ["b", "c"], {"a", "d"}, id="replaced, added and deleted"),
        pytest.param({}, ["a"], {"b", "c"}, id="deleted"),
    ],
)
def test_all_passages_of_a_document_are_replaced_or_deleted_together(
    new_passages: Any,
    delete: list[str],
    expected: set[str],
    passage_index: r.BM25Index,
) -> None:
    updated = passage_index.updated(new_passages, delete)
    assert documents_of(updated.ids) == expected
    assert updated.provenance == Provenance(passages=passage_index.provenance.passages)


def test_no_passage_of_the_earlier_text_is_left(passage_index: r.BM25Index) -> None:
    updated = passage_index.updated(NEW_PASSAGES)
    assert len([name for name in updated.ids if name.startswith("a#")]) == 1


def test_vectors_of_passages_are_replaced_by_document(
    passage_index: r.BM25Index,
    tmp_path: Path,
) -> None:
    vectors = passage_index.document_vectors()
    r.build_index(vectors).save(tmp_path / "index")
    new_vectors = replace(
        r.BM25Index.build(NEW_PASSAGES).document_vectors(),
        vocab_size=vectors.vocab_size,
        provenance=vectors.provenance,
    )
    assert r.update_index(tmp_path / "index", new_vectors, ["c"])["deleted"] == 2
    assert documents_of(open_index(tmp_path / "index").ids) == {"a", "b", "d"}


def test_an_index_of_passages_takes_no_whole_documents(passage_index: r.BM25Index) -> None:
    with pytest.raises(DataError, match="expected passages"):
        passage_index.updated({"e": "whole"})


def die_before_rename(n_renames: int) -> None:
    """Let this process die before it renames a file or folder after ``n_renames`` renames."""
    renames_left = n_renames

    def dying(rename: Callable[..., Any]) -> Callable[..., Any]:
        def rename_or_die(*args: Any, **options: Any) -> Any:
            nonlocal renames_left
            if renames_left == 0:
                os._exit(EXIT_CODE_OF_KILLED)
            renames_left -= 1
            return rename(*args, **options)

        return rename_or_die

    os.replace = dying(os.replace)
    os.rename = dying(os.rename)
    _files.exchange = dying(_files.exchange)


def run_killed(change_index: Callable[[], object], n_renames: int) -> int:
    """Run a function in a child that dies after ``n_renames`` renames; returns its exit code."""
    child = os.fork()
    if child == 0:
        die_before_rename(n_renames)
        try:
            change_index()
        except BaseException:
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("is_merge", [False, True], ids=["update", "merge"])
def test_a_kill_at_any_rename_leaves_the_index_before_or_after(
    is_merge: bool,
    make_vectors: MakeVectors,
    tmp_path: Path,
) -> None:
    path = tmp_path / "index"
    queries = make_vectors(3, seed=3, prefix="q")
    added = make_vectors(20, seed=1, prefix="n")
    r.build_index(make_vectors(40)).save(path)
    if is_merge:
        r.update_index(path, added, ["d1"])
    n_before = 59 if is_merge else 40
    scores_before = scores_of(open_index(path), queries)

    def change_index() -> None:
        if is_merge:
            r.merge_segments(path)
        else:
            r.update_index(path, added, ["d1"])

    for n_renames in range(30):
        exit_code = run_killed(change_index, n_renames)
        index: Any = open_index(path)
        if exit_code == 0:
            break
        assert exit_code == EXIT_CODE_OF_KILLED
        assert index.n_documents == n_before
        for scores, before in zip(scores_of(index, queries), scores_before, strict=True):
            assert scores == pytest.approx(before)

    assert exit_code == 0
    assert n_renames > 1
    assert index.n_documents == 59
    r.update_index(path, delete=["d2"])
    segments = [entry for entry in (path / "segments").iterdir() if entry.is_dir()]
    expected_segments = 0 if is_merge else 1
    assert len(segments) == expected_segments, "incomplete segments are removed"


@pytest.fixture
def synced_inodes(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Numbers of the files and folders that were synced to the disk."""
    inodes: set[int] = set()
    monkeypatch.setattr(os, "fsync", lambda descriptor: inodes.add(os.fstat(descriptor).st_ino))
    return inodes


def test_a_segment_is_on_the_disk_before_the_index_lists_it(
    make_vectors: MakeVectors,
    synced_inodes: set[int],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    path = tmp_path / "index"
    r.build_index(make_vectors(40)).save(path)
    synced_before: set[int] = set()

    def write_list_of_segments(*args: Any, **options: Any) -> None:
        synced_before.update(synced_inodes)
        write_json_object(*args, **options)

    monkeypatch.setattr(segments_module, "write_json_object", write_list_of_segments)
    r.update_index(path, make_vectors(20, seed=1, prefix="n"))
    segment = path / "segments" / "00001"
    assert {file.stat().st_ino for file in [segment, *segment.iterdir()]} <= synced_before
    assert path.stat().st_ino in synced_before
    assert segment.parent.stat().st_ino in synced_inodes


def test_a_new_index_is_on_the_disk_before_it_replaces_another(
    make_vectors: MakeVectors,
    synced_inodes: set[int],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    path = tmp_path / "index"
    index = r.build_index(make_vectors(40))
    index.save(path)
    exchange = _files.exchange
    synced_before: set[int] = set()

    def exchange_folders(left: Path, right: Path) -> bool:
        synced_before.update(synced_inodes)
        return exchange(left, right)

    monkeypatch.setattr(_files, "exchange", exchange_folders)
    index.save(path, overwrite=True)
    assert {file.stat().st_ino for file in [path, *path.iterdir()]} <= synced_before
    assert tmp_path.stat().st_ino in synced_inodes


@pytest.fixture
def index_of_model_a(make_vectors: MakeVectors, tmp_path: Path) -> Path:
    """The folder of an exact index of twenty vectors with a provenance."""
    vectors = replace(make_vectors(20), provenance=Provenance("a" * 64, "b" * 64))
    r.build_index(vectors).save(tmp_path / "index")
    return tmp_path / "index"


def test_vectors_that_do_not_belong_to_an_index_leave_it_unchanged(
    index_of_model_a: Path,
    make_vectors: MakeVectors,
    tmp_path: Path,
) -> None:
    of_another_model = replace(make_vectors(5, prefix="n"), provenance=Provenance("c" * 64))
    of_another_vocabulary = make_vectors(5, vocab_size=400)
    dense = dense_folder(tmp_path / "dense", ["x"], seed=0)
    with pytest.raises(DataError, match="another model"):
        r.update_index(index_of_model_a, of_another_model, ["d1"])
    with pytest.raises(VocabularyMismatchError, match="vocabulary"):
        r.update_index(index_of_model_a, of_another_vocabulary, ["d1"])
    with pytest.raises(DataError, match="backend exact"):
        r.update_index(index_of_model_a, dense, ["d1"])
    assert open_index(index_of_model_a).n_documents == 20


def test_an_update_leaves_only_the_model_in_the_provenance(
    index_of_model_a: Path,
    make_vectors: MakeVectors,
) -> None:
    added = replace(make_vectors(5, prefix="n"), provenance=Provenance("a" * 64, "b" * 64))
    r.update_index(index_of_model_a, added)
    assert open_index(index_of_model_a).provenance == Provenance("a" * 64)


def test_an_index_with_an_incomplete_segment_is_not_opened(
    index_of_model_a: Path,
    make_vectors: MakeVectors,
) -> None:
    added = replace(make_vectors(5, prefix="n"), provenance=Provenance("a" * 64))
    r.update_index(index_of_model_a, added)
    (index_of_model_a / "segments" / "00001" / "documents.npy").unlink()
    with pytest.raises(FileNotFoundError, match=r"documents\.npy"):
        open_index(index_of_model_a)


@pytest.mark.parametrize("backend", ["exact", "seismic"], indirect=True)
def test_an_index_may_lose_all_its_terms_and_grow_again(backend: str, tmp_path: Path) -> None:
    path = tmp_path / "index"
    query = r.SparseVectors.from_rows({"q": {0: 1.0}}, 2)

    def found_ids() -> list[str]:
        (hits,) = r.load_index(path).search(query, 5)
        return [hit.id for hit in hits]

    r.build_index(r.SparseVectors.from_rows({"a": {0: 1.0}, "b": {1: 1.0}}, 2), backend).save(path)
    r.update_index(path, r.SparseVectors.from_rows({"a": {}, "b": {1: 0.0}}, 2))
    assert found_ids() == []
    assert r.load_index(path).n_documents == 2
    assert r.merge_segments(path) == 2
    assert found_ids() == []
    assert list(r.load_index(path).ids) == ["a", "b"]

    r.update_index(path, r.SparseVectors.from_rows({"a": {0: 2.0}}, 2))
    assert found_ids() == ["a"]
    r.update_index(path, None, ["a", "b"])
    assert r.merge_segments(path) == 0
    assert found_ids() == []

    r.update_index(path, r.SparseVectors.from_rows({"c": {0: 2.0}}, 2))
    assert found_ids() == ["c"]


@pytest.mark.parametrize("backend", ["dense", "late"])
def test_an_index_whose_documents_were_all_deleted_is_not_merged_and_can_grow_again(
    backend: str,
    tmp_path: Path,
) -> None:
    path = tmp_path / "index"

    def vectors_of(document_id: str) -> Any:
        if backend == "dense":
            return dense_folder(tmp_path / document_id, [document_id], seed=0)
        return r.TokenVectors.pack([document_id], [torch.ones(1, 8)], 8, "fp16")

    if backend == "dense":
        r.DenseIndex.build(vectors_of("a")).save(path)
    else:
        r.LateIndex.build(vectors_of("a"), path)
    r.update_index(path, delete=["a"])
    with pytest.raises(DataError, match=r"all deleted\. Add documents first"):
        r.merge_segments(path)
    assert open_index(path).n_documents == 0

    r.update_index(path, vectors_of("b"))
    assert r.merge_segments(path) == 1
    assert list(open_index(path).ids) == ["b"]


@pytest.mark.parametrize(
    "content",
    [
        pytest.param({"written": 0}, id="no parts"),
        pytest.param({"parts": [{"folder": ""}], "written": 0}, id="no removed ids"),
        pytest.param({"parts": ["00001"], "written": 1}, id="parts are texts"),
        pytest.param({"parts": [], "written": "many"}, id="written is no number"),
    ],
)
def test_a_damaged_list_of_parts_is_reported(content: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "index"
    r.build_index(r.SparseVectors.from_rows({"a": {0: 1.0}, "b": {1: 1.0}}, 2)).save(path)
    r.update_index(path, delete=["a"])
    write_json_object(path / "segments" / "current.json", content)
    with pytest.raises(DataError, match=r"current\.json: expected the folder and the removed ids"):
        open_index(path)
    (problem,) = check_index(path).damage
    assert "current.json: expected the folder" in problem


def test_an_updated_seismic_index_says_that_it_searches_on_the_cpu_only(tmp_path: Path) -> None:
    pytest.importorskip("seismic")
    path = tmp_path / "index"
    r.build_index(r.SparseVectors.from_rows({"a": {0: 1.0}}, 2), "seismic").save(path)
    r.update_index(path, r.SparseVectors.from_rows({"b": {1: 1.0}}, 2))
    index: Any = r.load_index(path)
    with pytest.raises(
        ValueError, match=r"index\.on: expected an index of backend 'exact', 'dense' or 'late', got"
    ):
        index.on("cpu")


METADATA = {"d0": {"lang": "de"}}
METADATA_MISSING = (
    r"metadata: expected the fields of the new documents.*stores metadata \(lang\), got none"
)


def test_bm25_with_metadata_refuses_new_documents_without() -> None:
    index = r.BM25Index.build({"d0": "tea", "d1": "cup"}, metadata=METADATA)
    with pytest.raises(ValueError, match=METADATA_MISSING):
        index.updated({"d0": "kettle"})
    assert index.updated({"d2": "kettle"}, metadata={}).n_documents == 3
    assert index.updated({}, ["d1"]).n_documents == 1


@pytest.mark.parametrize("kind", ["exact", "dense", "late"])
def test_an_index_with_metadata_refuses_new_documents_without(
    kind: str,
    make_vectors: MakeVectors,
    tmp_path: Path,
) -> None:
    path = tmp_path / "index"
    queries: Any
    if kind == "exact":
        vectors: Any = make_vectors(4)
        queries = vectors
        r.build_index(vectors, metadata=METADATA).save(path)
    elif kind == "dense":
        vectors = dense_folder(tmp_path / "vectors", ["d0", "d1"], seed=0)
        queries = torch.ones(1, 8)
        r.DenseIndex.build(vectors, metadata=METADATA).save(path)
    else:
        vectors = r.TokenVectors(["d0", "d1"], torch.arange(3), torch.ones(2, 8))
        queries = vectors
        r.LateIndex.build(vectors, path, metadata=METADATA)
    index: Any = open_index(path)
    n_documents = index.n_documents

    with pytest.raises(ValueError, match=METADATA_MISSING):
        r.update_index(path, vectors)

    index = open_index(path)
    assert index.search(queries, 9, where={"lang": "de"})[0][0].id == "d0"
    assert r.update_index(path, delete=["d1"])["n_documents"] == n_documents - 1
    assert r.update_index(path, vectors, metadata={})["n_documents"] == n_documents
    assert r.update_index(path, vectors, metadata=METADATA)["n_documents"] == n_documents


@pytest.mark.parametrize("index_keeps", [True, False])
def test_an_index_refuses_vectors_that_differ_in_special_tokens(
    index_keeps: bool,
    tmp_path: Path,
) -> None:
    def vectors_of(ids: list[str], keeps: bool) -> r.SparseVectors:
        provenance = Provenance("a" * 64, special_tokens=None if keeps else False)
        rows = {name: {0: 1.0, 2: 0.5} for name in ids}
        return replace(r.SparseVectors.from_rows(rows, 3), provenance=provenance)

    first = vectors_of(["a", "b"], index_keeps)
    r.write_vectors(first, tmp_path / "vectors")
    r.build_index(r.read_vectors(tmp_path / "vectors")).save(tmp_path / "index")
    with pytest.raises(DataError, match=r"vectors: expected (no )?weights of special tokens"):
        r.update_index(tmp_path / "index", vectors_of(["c"], not index_keeps))
    r.update_index(tmp_path / "index", vectors_of(["c"], index_keeps))
    assert list(r.load_index(tmp_path / "index").ids) == ["a", "b", "c"]
    r.merge_segments(tmp_path / "index")
    with pytest.raises(DataError, match="special tokens"):
        r.update_index(tmp_path / "index", vectors_of(["d"], not index_keeps))
