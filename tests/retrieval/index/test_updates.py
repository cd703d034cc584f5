"""Indexes that grow: updated ones answer as those that are built of all documents, also after a
kill.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.refusals import refused
from tilefold import retrieval as r
from tilefold._internal import files as _files
from tilefold.retrieval.common.provenance import Provenance
from tilefold.retrieval.errors import DataError, VocabularyMismatchError
from tilefold.retrieval.index.opening import open_index
from tilefold.retrieval.vectors.tokens import DenseManifest

Make = Callable[..., r.SparseVectors]
KILLED = 9


def dense_folder(folder: Path, ids: list[str], seed: int, dimension: int = 8) -> r.TokenStore:
    writer = r.TokenVectorWriter(
        folder,
        DenseManifest(dimension, "fp32", settings={"similarity": "dot"}),
    )
    rows = torch.randn(len(ids), 1, dimension, generator=torch.Generator().manual_seed(seed))
    writer.write_shard(0, r.TokenVectors.pack(ids, list(rows), dimension, "fp32"))
    writer.finish()
    return r.open_dense(folder)


def answers(index: Any, queries: Any, k: int = 30) -> list[dict[str, float]]:
    return [dict(hits) for hits in index.search(queries, k)]


@pytest.mark.parametrize("backend", ["exact", "seismic", "dense"])
def test_an_updated_index_answers_as_one_of_all_documents(
    backend: str,
    make_vectors: Make,
    tmp_path: Path,
) -> None:
    """200 documents, then 50 of which 20 replace others, then 10 are removed, then 30 more; and all
    that merged.
    """
    if backend == "dense":
        parts: list[Any] = [
            dense_folder(tmp_path / f"v{seed}", [f"d{at}" for at in span], seed)
            for seed, span in enumerate((range(200), range(180, 230), range(300, 330)))
        ]
        queries: Any = torch.randn(5, 8, generator=torch.Generator().manual_seed(9))
        first = r.DenseIndex.build(parts[0])
    else:
        pytest.importorskip("seismic" if backend == "seismic" else "numpy")
        parts = [make_vectors(200), make_vectors(50, seed=1), make_vectors(30, seed=2)]
        parts[1] = replace(parts[1], ids=[f"d{at}" for at in range(180, 230)])
        parts[2] = replace(parts[2], ids=[f"d{at}" for at in range(300, 330)])
        queries = make_vectors(5, seed=3, prefix="q")
        options = (
            {"n_postings": 200, "heap_factor": 0.0, "query_cut": 100}
            if backend == "seismic"
            else {}
        )
        first = r.build_index(parts[0], backend, **options)
    place = tmp_path / "index"
    first.save(place)
    assert r.update_index(place, parts[1]) == {"n_documents": 230, "written": 50, "deleted": 0}
    gone = [f"d{at}" for at in range(5)] + [f"d{at}" for at in range(200, 205)]
    assert r.update_index(place, delete=[*gone, "nobody"]) == {
        "n_documents": 220,
        "written": 0,
        "deleted": 10,
    }
    assert r.update_index(place, parts[2])["n_documents"] == 250
    assert r.update_index(place, delete=gone)["deleted"] == 0, "gone already"

    all_of_them = [*range(5, 180), *range(180, 200), *range(205, 230), *range(300, 330)]
    names = [f"d{at}" for at in all_of_them]
    updated: Any = open_index(place)
    assert sorted(updated.ids) == sorted(names) and updated.n_documents == 250
    if backend == "dense":
        rows = {name: (store, name) for store in parts for name in store.ids}
        tables = [rows[name][0].read([name]) for name in names]
        expected: Any = r.DenseIndex.build(r.TokenVectors.concatenate(tables), "dot")
        assert torch.equal(updated.vectors(["d190", "d7"]), expected.vectors(["d190", "d7"]))
    else:
        where = {name: (part, row) for part in parts for row, name in enumerate(part.ids)}
        expected = r.build_index(
            r.SparseVectors.concatenate([where[n][0].take([where[n][1]]) for n in names]),
        )
    close = 2e-3 if backend == "seismic" else 1e-5
    for hits, wanted in zip(answers(updated, queries), answers(expected, queries), strict=True):
        assert hits == {
            name: pytest.approx(score, rel=close, abs=1e-5) for name, score in wanted.items()
        } or (backend == "seismic" and len(set(hits) & set(wanted)) > 25)
    before = answers(updated, queries)
    assert r.merge_segments(place) == r.merge_segments(place) == 250
    merged = open_index(place)
    assert type(merged) is type(first)
    assert answers(merged, queries) == [pytest.approx(each, rel=close) for each in before]
    first.save(place, overwrite=True)
    assert open_index(place).n_documents == 200, "an index in the place of one that grew"


def test_all_passages_of_a_document_go_with_it(tmp_path: Path) -> None:
    def cut(**texts: str) -> Any:
        return r.Passages(3).of({name: r.Document(name, "", text) for name, text in texts.items()})

    texts = cut(a="one two three four five six seven", b="eight nine ten", c="red green blue grey")
    new = cut(a="tea kettle", d="water")
    made = r.BM25Index.build(texts)
    for changed, left in (
        (made.updated(new), "abcd"),
        (made.updated(new, ["b", "c"]), "ad"),
        (made.updated({}, ["a"]), "bc"),
    ):
        assert {name.partition("#")[0] for name in changed.ids} == set(left)
        assert changed.provenance == Provenance(passages=made.provenance.passages)
    assert len([name for name in made.updated(new).ids if name.startswith("a#")]) == 1
    vectors, more = made.document_vectors(), r.BM25Index.build(new).document_vectors()
    r.build_index(vectors).save(tmp_path / "index")
    more = replace(more, vocab_size=vectors.vocab_size, provenance=vectors.provenance)
    assert r.update_index(tmp_path / "index", more, ["c"])["deleted"] == 2
    assert {name.partition("#")[0] for name in open_index(tmp_path / "index").ids} == {
        "a",
        "b",
        "d",
    }
    refused(DataError, "expected passages", made.updated, {"e": "whole"})


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("merging", [False, True], ids=["update", "merge"])
def test_a_kill_at_any_rename_leaves_the_index_before_or_after(
    merging: bool,
    make_vectors: Make,
    tmp_path: Path,
) -> None:
    place, queries = tmp_path / "index", make_vectors(3, seed=3, prefix="q")
    more = make_vectors(20, seed=1, prefix="n")
    r.build_index(make_vectors(40)).save(place)
    if merging:
        r.update_index(place, more, ["d1"])
    before, killed = answers(open_index(place), queries), 0
    for step in range(30):
        child = os.fork()
        if child == 0:
            left = step

            def count(call: Callable[..., Any]) -> Callable[..., Any]:
                def counted(*args: Any, **options: Any) -> Any:
                    nonlocal left
                    if left == 0:
                        os._exit(KILLED)
                    left -= 1
                    return call(*args, **options)

                return counted

            os.replace, os.rename = count(os.replace), count(os.rename)
            _files.exchange = count(_files.exchange)
            try:
                _ = r.merge_segments(place) if merging else r.update_index(place, more, ["d1"])
            except BaseException:
                os._exit(1)
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        now: Any = open_index(place)
        assert code in (0, KILLED)
        if code == 0:
            break
        assert now.n_documents == (59 if merging else 40)
        assert answers(now, queries) == [pytest.approx(each) for each in before]
        killed += 1
    assert code == 0 and killed > 1 and now.n_documents == 59
    r.update_index(place, delete=["d2"])
    assert len([each for each in (place / "segments").iterdir() if each.is_dir()]) == (
        0 if merging else 1
    ), "no leftovers"


def test_vectors_that_do_not_belong_to_an_index_leave_it_as_it_was(
    make_vectors: Make,
    tmp_path: Path,
) -> None:
    place, old = (
        tmp_path / "index",
        replace(make_vectors(20), provenance=Provenance("a" * 64, "b" * 64)),
    )
    r.build_index(old).save(place)
    other = replace(make_vectors(5, prefix="n"), provenance=Provenance("c" * 64))
    strange: list[tuple[type[Exception], str, Any]] = [
        (DataError, "another model", other),
        (VocabularyMismatchError, "vocabulary", make_vectors(5, vocab_size=400)),
        (DataError, "backend exact", dense_folder(tmp_path / "dense", ["x"], 0)),
    ]
    for error, said, vectors in strange:
        refused(error, said, r.update_index, place, vectors, ["d1"])
        assert open_index(place).n_documents == 20
    r.update_index(place, replace(other, provenance=old.provenance))
    assert open_index(place).provenance == Provenance("a" * 64), "of other texts, by the same model"
    (place / "segments" / "00001" / "documents.npy").unlink()
    refused(FileNotFoundError, r"documents\.npy", open_index, place)


def test_merged_folders_are_one_folder_and_what_differs_is_refused(
    make_vectors: Make,
    tmp_path: Path,
) -> None:
    parts = {
        "a": make_vectors(30),
        "b": make_vectors(20, seed=1, prefix="n"),
        "c": make_vectors(3, vocab_size=400),
    }
    for name, vectors in parts.items():
        r.write_vectors(vectors, tmp_path / name, shard_size=8)
    dense_folder(tmp_path / "d", ["x"], 0)
    made = r.merge_vectors([tmp_path / "a", tmp_path / "b"], tmp_path / "out")
    read, expected = (
        r.read_vectors(tmp_path / "out"),
        r.SparseVectors.concatenate([parts["a"], parts["b"]]),
    )
    assert (made.n_documents, made.n_texts, read.ids) == (50, 50, expected.ids)
    assert (read.data == expected.data).all() and (read.indices == expected.indices).all()
    for folders, said in (
        (["a"], "expected two or more"),
        (["a", "a"], "'d0' is in"),
        (["a", "c"], "made alike"),
        (["a", "d"], "expected sparse vectors"),
        (["a", "out"], "'d0' is in"),
    ):
        refused(
            ValueError,
            said,
            r.merge_vectors,
            [tmp_path / name for name in folders],
            tmp_path / "never",
        )
    refused(
        DataError,
        "output_dir",
        r.merge_vectors,
        [tmp_path / "a", tmp_path / "b"],
        tmp_path / "a",
    )


@pytest.mark.parametrize("backend", ["exact", "seismic"])
def test_an_index_may_lose_all_its_terms_and_grow_again(backend: str, tmp_path: Path) -> None:
    pytest.importorskip({"seismic": "seismic"}.get(backend, "numpy"))
    path = tmp_path / "index"
    query = r.SparseVectors.from_rows({"q": {0: 1.0}}, 2)

    def found_ids() -> list[str]:
        (hits,) = r.load_index(path).search(query, 5)
        return [hit.id for hit in hits]

    r.build_index(r.SparseVectors.from_rows({"a": {0: 1.0}, "b": {1: 1.0}}, 2), backend).save(path)
    r.update_index(path, r.SparseVectors.from_rows({"a": {}, "b": {1: 0.0}}, 2))
    assert (found_ids(), r.load_index(path).n_documents) == ([], 2)
    assert r.merge_segments(path) == 2
    assert (found_ids(), list(r.load_index(path).ids)) == ([], ["a", "b"])
    r.update_index(path, r.SparseVectors.from_rows({"a": {0: 2.0}}, 2))
    assert found_ids() == ["a"]
    r.update_index(path, None, ["a", "b"])
    assert (r.merge_segments(path), found_ids()) == (0, [])
    r.update_index(path, r.SparseVectors.from_rows({"c": {0: 2.0}}, 2))
    assert found_ids() == ["c"]


@pytest.mark.parametrize("backend", ["exact", "dense", "late", "bm25"])
def test_new_documents_without_metadata_are_refused_by_an_index_that_keeps_some(
    backend: str,
    make_vectors: Make,
    tmp_path: Path,
) -> None:
    fields, place = {"d0": {"lang": "de"}}, tmp_path / "index"
    message = (
        r"metadata: expected the fields of the new documents.*keeps metadata \(lang\), got none"
    )
    if backend == "bm25":
        words = r.BM25Index.build({"d0": "tea", "d1": "cup"}, metadata=fields)
        refused(ValueError, message, words.updated, {"d0": "kettle"})
        assert words.updated({"d2": "kettle"}, metadata={}).n_documents == 3
        assert words.updated({}, ["d1"]).n_documents == 1
        return
    if backend == "exact":
        vectors: Any = make_vectors(4)
        r.build_index(vectors, metadata=fields).save(place)
    elif backend == "dense":
        vectors = dense_folder(tmp_path / "vectors", ["d0", "d1"], seed=0)
        r.DenseIndex.build(vectors, metadata=fields).save(place)
    else:
        vectors = r.TokenVectors(["d0", "d1"], torch.arange(3), torch.ones(2, 8))
        r.LateIndex.build(vectors, place, metadata=fields)
    count = open_index(place).n_documents
    refused(ValueError, message, r.update_index, place, vectors)
    queries = torch.ones(1, 8) if backend == "dense" else vectors
    assert open_index(place).search(queries, 9, where={"lang": "de"})[0][0].id == "d0"
    assert r.update_index(place, delete=["d1"])["n_documents"] == count - 1
    assert r.update_index(place, vectors, metadata={})["n_documents"] == count
    assert r.update_index(place, vectors, metadata=fields)["n_documents"] == count


def test_an_interrupted_merge_begins_again_and_replaces_no_other_unfinished_vectors(
    make_vectors: Make,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    r.write_vectors(make_vectors(5), folders[0])
    r.write_vectors(make_vectors(5, prefix="e"), folders[1])

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(r.SparseVectorWriter, "finish", interrupt)
        with pytest.raises(KeyboardInterrupt):
            r.merge_vectors(folders, tmp_path / "all")
    assert r.merge_vectors(folders, tmp_path / "all").n_documents == 10

    other = r.VectorManifest(500, "f" * 64, settings={"top_k": 8})
    r.SparseVectorWriter(tmp_path / "unfinished", other).write_shard(0, make_vectors(3))
    refused(
        FileExistsError,
        "got one with an unfinished run of 3 vectors.*nothing was overwritten",
        r.merge_vectors,
        folders,
        tmp_path / "unfinished",
    )
    assert len(list((tmp_path / "unfinished").glob("part-*"))) == 1
