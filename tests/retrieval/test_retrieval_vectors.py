from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from tests.manifests import edit
from tilefold._files import sha256_file
from tilefold.retrieval import (
    SparseVectors,
    SparseVectorWriter,
    build_index,
    export_jsonl,
    load_index,
    read_manifest,
    read_rows,
    read_vectors,
    vocabulary_fingerprint,
    write_vectors,
)
from tilefold.retrieval.errors import DataError, VocabularyMismatchError
from tilefold.retrieval.provenance import Provenance

Make = Callable[..., SparseVectors]


def same(left: SparseVectors, right: SparseVectors) -> bool:
    return (
        left.ids == right.ids
        and left.vocab_size == right.vocab_size
        and left.fingerprint == right.fingerprint
        and all(
            np.array_equal(a, b) and a.dtype == b.dtype
            for a, b in (
                (left.indptr, right.indptr),
                (left.indices, right.indices),
                (left.data, right.data),
            )
        )
    )


def test_vectors_survive_shards_on_disk_bit_for_bit(make_vectors: Make, tmp_path: Path) -> None:
    vectors = make_vectors(25)
    manifest = write_vectors(vectors, tmp_path / "v", model_name="tiny", shard_size=10)
    assert [shard["rows"] for shard in manifest.shards] == [10, 10, 5]
    assert manifest.complete and manifest.n_documents == 25
    assert read_manifest(tmp_path / "v") == manifest
    assert same(read_vectors(tmp_path / "v"), vectors)


@pytest.mark.parametrize("backend", ["exact", "seismic"])
def test_model_and_texts_travel_from_vectors_to_disk_to_rows_and_into_an_index(
    make_vectors: Make, tmp_path: Path, backend: str
) -> None:
    made = Provenance("ab" * 32, "cd" * 32)
    vectors = replace(make_vectors(12), provenance=made)
    write_vectors(vectors, tmp_path / "v", shard_size=5)
    stored, rows = read_vectors(tmp_path / "v"), read_rows(tmp_path / "v", vectors.ids[:2])
    assert {part.provenance for part in (stored, rows, stored.take([3, 1]))} == {made}
    build_index(stored, backend).save(tmp_path / "i")
    assert load_index(tmp_path / "i").provenance == made
    mixed = SparseVectors.concatenate([stored.take([0]), replace(make_vectors(1, prefix="e"), provenance=Provenance())])
    assert mixed.provenance == Provenance()


def test_shards_have_the_documented_columns(make_vectors: Make, tmp_path: Path) -> None:
    write_vectors(make_vectors(3), tmp_path)
    schema = pq.read_schema(tmp_path / "part-00000.parquet")
    assert schema.field("id").type == pa.string()
    assert schema.field("indices").type == pa.list_(pa.int32())
    assert schema.field("weights").type == pa.list_(pa.float32())


def test_rows_without_terms_are_kept(tmp_path: Path) -> None:
    vectors = SparseVectors.from_rows({"a": {}, "b": {3: 1.0}, "c": {}}, 5)
    write_vectors(vectors, tmp_path)
    assert same(read_vectors(tmp_path), vectors)


def test_writing_again_replaces_all_earlier_shards(make_vectors: Make, tmp_path: Path) -> None:
    write_vectors(make_vectors(30), tmp_path, shard_size=10)
    write_vectors(make_vectors(5, seed=1), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["manifest.json", "part-00000.parquet"]
    assert same(read_vectors(tmp_path), make_vectors(5, seed=1))


def test_rows_by_name_come_in_the_order_of_the_folder_and_others_are_left_out(
    make_vectors: Make, tmp_path: Path
) -> None:
    vectors = make_vectors(10)
    write_vectors(vectors, tmp_path / "v", shard_size=3)
    found = read_rows(tmp_path / "v", ["d7", "nobody", "d2", "d3"])
    assert same(found, vectors.take([2, 3, 7]))
    assert len(read_rows(tmp_path / "v", ["nobody"])) == 0


def test_an_unfinished_folder_is_not_taken_for_whole(make_vectors: Make, tmp_path: Path) -> None:
    writer = SparseVectorWriter(tmp_path, vocab_size=500, fingerprint="f" * 64)
    writer.write_shard(0, make_vectors(3))
    with pytest.raises(DataError, match=r"1 shard\(s\) of an unfinished run"):
        read_vectors(tmp_path)


def test_a_crash_between_shard_and_manifest_loses_only_that_shard(
    make_vectors: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = SparseVectorWriter(tmp_path, vocab_size=500, fingerprint="f" * 64)
    writer.write_shard(0, make_vectors(3))
    monkeypatch.setattr(writer, "_save", lambda: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        writer.write_shard(1, make_vectors(3, seed=1, prefix="e"))
    again = SparseVectorWriter(tmp_path, vocab_size=500, fingerprint="f" * 64, resume=True)
    assert again.has_shard(0) and not again.has_shard(1)
    again.write_shard(1, make_vectors(3, seed=2, prefix="e"))
    again.finish()
    assert read_vectors(tmp_path).ids == ["d0", "d1", "d2", "e0", "e1", "e2"]


def test_one_writer_lists_the_shards_that_another_stores(make_vectors: Make, tmp_path: Path) -> None:
    both = {"vocab_size": 500, "fingerprint": "f" * 64}
    lister = SparseVectorWriter(tmp_path, **both)
    storer = SparseVectorWriter(tmp_path, **both, lists=False)
    parts = [make_vectors(3, seed=seed, prefix=f"{seed}-") for seed in range(2)]
    stored = {number: storer.store_shard(number, parts[number]) for number in (1, 0)}
    assert not lister.has_shard(0)
    with pytest.raises(ValueError, match="expected at most 0, the next shard, got 1"):
        lister.list_shard(1, stored[1])
    for number in (0, 1):
        lister.list_shard(number, stored[number], {})
    assert lister.finish().shards == [stored[0], stored[1]]
    assert same(read_vectors(tmp_path), SparseVectors.concatenate(parts))


def test_shards_are_left_with_receipts_and_those_without_any_vector_are_written_again(
    make_vectors: Make, tmp_path: Path
) -> None:
    both = {"vocab_size": 500, "fingerprint": "f" * 64}
    lister = SparseVectorWriter(tmp_path, **both)
    other = SparseVectorWriter(tmp_path, **both, lists=False)
    nothing, failed = (
        SparseVectors.from_rows({}, 500, "f" * 64),
        {f"f{i}": "RuntimeError: no memory" for i in range(16)},
    )
    other.leave_shard(1, nothing, failed, None)
    other.leave_shard(0, make_vectors(3), {"x": "expected a string, got int"}, None)
    assert lister.receive([0, 1]) == {0}
    again = SparseVectorWriter(tmp_path, **both, resume=True)
    assert again.has_shard(0) and not again.has_shard(1)
    assert again.manifest.failed == {"x": "expected a string, got int"}
    again.write_shard(1, make_vectors(3, prefix="e"))
    again.finish(7)
    assert sorted(path.name for path in tmp_path.glob("*.json")) == ["manifest.json"]
    assert read_vectors(tmp_path).ids == ["d0", "d1", "d2", "e0", "e1", "e2"]


def test_what_a_killed_process_left_behind_is_cleared_away(make_vectors: Make, tmp_path: Path) -> None:
    code = (
        "import os, sys, tilefold.retrieval._shards as s, tilefold.retrieval.vectors as v\n"
        "writer = v.SparseVectorWriter(sys.argv[1], vocab_size=500, fingerprint='f' * 64)\n"
        "rows = v.SparseVectors.from_rows({'d0': {1: 1.0}}, 500, 'f' * 64)\n"
        "writer.write_shard(0, rows)\n"
        "s.sha256_file = lambda path: os._exit(9)\n"
        "writer.write_shard(1, rows)\n"
    )
    killed = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert killed.returncode == 9
    assert list(tmp_path.glob(".part-00001.parquet.*.tmp"))
    writer = SparseVectorWriter(tmp_path, vocab_size=500, fingerprint="f" * 64, resume=True)
    assert writer.has_shard(0) and not writer.has_shard(1)
    writer.write_shard(1, make_vectors(2, prefix="e"))
    writer.finish()
    assert read_vectors(tmp_path).ids == ["d0", "e0", "e1"]
    assert not list(tmp_path.glob(".*"))


def test_resuming_with_another_vocabulary_is_refused(make_vectors: Make, tmp_path: Path) -> None:
    write_vectors(make_vectors(3), tmp_path)
    with pytest.raises(DataError, match=r"vocab_size: 500 before, 600 now.*resume=False"):
        SparseVectorWriter(tmp_path, vocab_size=600, fingerprint="f" * 64, resume=True)


def test_a_folder_of_other_files_is_never_written_to(make_vectors: Make, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="nothing was overwritten"):
        write_vectors(make_vectors(3), tmp_path)
    with pytest.raises(FileExistsError, match="got a file"):
        write_vectors(make_vectors(3), tmp_path / "notes.txt")


@pytest.mark.parametrize("damage", ["truncate", "flip", "replace"])
def test_a_damaged_shard_is_named(make_vectors: Make, tmp_path: Path, damage: str) -> None:
    write_vectors(make_vectors(30), tmp_path, shard_size=10)
    file = tmp_path / "part-00001.parquet"
    content = bytearray(file.read_bytes())
    if damage == "truncate":
        content = content[: len(content) // 2]
    elif damage == "flip":
        content[len(content) // 2] ^= 1
    else:
        content = bytearray(b"not parquet")
    file.write_bytes(content)
    with pytest.raises(DataError, match=r"part-00001.parquet: damaged"):
        read_vectors(tmp_path)


def test_a_shard_written_by_another_program_is_checked_too(make_vectors: Make, tmp_path: Path) -> None:
    def forge(table: pa.Table) -> None:
        pq.write_table(table, tmp_path / "part-00000.parquet")
        shard = read_manifest(tmp_path).shards[0] | {"sha256": sha256_file(tmp_path / "part-00000.parquet")}
        edit(tmp_path / "manifest.json", shards=[shard])

    write_vectors(make_vectors(1), tmp_path)
    forge(pa.table({"id": ["d0"], "indices": [[1, 2]]}))
    with pytest.raises(DataError, match=r"part-00000.parquet: expected Parquet with id, indices and weights"):
        read_vectors(tmp_path)
    forge(pa.table({"id": ["d0"], "indices": [[1, 2]], "weights": [[1.0]]}))
    with pytest.raises(DataError, match="as many weights as indices and no nulls, got 1 and 2 for 'd0'"):
        read_vectors(tmp_path)
    forge(pa.table({"id": ["d0"], "indices": pa.array([None], pa.list_(pa.int32())), "weights": [[1.0]]}))
    with pytest.raises(DataError, match="as many weights as indices and no nulls, got nulls in indices"):
        read_vectors(tmp_path)
    forge(pa.table({"id": ["d0"], "indices": [[1, 500]], "weights": [[1.0, 2.0]]}))
    with pytest.raises(DataError, match=r"part-00000.parquet: indices: expected terms in \[0, 500\), got 500"):
        read_vectors(tmp_path)


def test_missing_and_malformed_manifests_are_clear(make_vectors: Make, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"manifest.json: no such file"):
        read_vectors(tmp_path)
    (tmp_path / "manifest.json").write_text('{"schema_version": 1}')
    with pytest.raises(DataError, match=r"expected a manifest of vectors, got \['schema_version'\] \(.*missing"):
        read_vectors(tmp_path)
    (tmp_path / "manifest.json").write_text('{"schema_version": 99}')
    with pytest.raises(DataError, match="expected schema_version 1, got 99"):
        read_vectors(tmp_path)


@pytest.mark.parametrize(("weight", "shown"), [(float("nan"), "nan"), (float("inf"), "inf"), (-0.5, "-0.5")])
def test_weights_must_be_finite_and_not_negative(weight: float, shown: str) -> None:
    with pytest.raises(DataError, match=f"got {shown} for 'bad'"):
        SparseVectors.from_rows({"good": {0: 1.0}, "bad": {1: weight}}, 5)


def test_indices_must_lie_in_the_vocabulary_and_occur_once() -> None:
    with pytest.raises(DataError, match=r"expected terms in \[0, 5\), got 5 for 'b'"):
        SparseVectors.from_rows({"a": {0: 1.0}, "b": {5: 1.0}}, 5)
    two = np.array([2, 2], np.int32), np.ones(2, np.float32)
    with pytest.raises(DataError, match="term 2 is given twice for 'a'"):
        SparseVectors(["a"], np.array([0, 2]), *two, 5)
    rows = SparseVectors(["a", "b"], np.array([0, 1, 2]), *two, 5)  # the same term in two rows is fine
    assert [rows.row(i)[0].tolist() for i in (0, 1)] == [[2], [2]]


def test_ids_must_be_unique_and_not_empty() -> None:
    empty = np.zeros(3, np.int64), np.zeros(0, np.int32), np.zeros(0, np.float32)
    with pytest.raises(DataError, match=r"ids\[1\]: 'a' was given before"):
        SparseVectors(["a", "a"], *empty, 5)
    with pytest.raises(DataError, match=r"ids\[0\]: expected a non-empty string"):
        SparseVectors(["", "a"], *empty, 5)


def test_rows_out_of_order_are_sorted_and_rows_can_be_taken() -> None:
    indices, data = np.array([3, 1, 0, 4], np.int32), np.array([1, 2, 3, 4], np.float32)
    vectors = SparseVectors(["a", "b"], np.array([0, 2, 4]), indices, data, 5)
    assert [part.tolist() for part in vectors.row(0)] == [[1, 3], [2.0, 1.0]]
    taken = vectors.take([1, 0])
    assert taken.ids == ["b", "a"]
    assert [part.tolist() for part in taken.row(0)] == [[0, 4], [3.0, 4.0]]


def test_mixed_vocabularies_are_refused(make_vectors: Make) -> None:
    small, large = make_vectors(2, vocab_size=500), make_vectors(2, vocab_size=600, prefix="e")
    with pytest.raises(VocabularyMismatchError, match=r"parts\[1\]: expected .*500 terms, got one with 600"):
        SparseVectors.concatenate([small, large])
    other = make_vectors(2, prefix="e")
    other.fingerprint = "0" * 64
    with pytest.raises(VocabularyMismatchError, match=r"got one of the same size \(fingerprint 0{12}\)"):
        SparseVectors.concatenate([small, other])


@pytest.mark.parametrize("layout", ["dense", "coo", "csr"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_torch_tensors_of_every_layout_give_the_same_vectors(layout: str, dtype: torch.dtype) -> None:
    dense = torch.tensor([[0.0, 1.5, 0.25], [0.0, 0.0, 0.0], [2.0, 0.0, 0.0]], dtype=dtype)
    matrix = {"dense": dense, "coo": dense.to_sparse_coo()}.get(layout)
    if matrix is None:
        import warnings

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch: sparse CSR is in beta state
            matrix = dense.to_sparse_csr()
    vectors = SparseVectors.from_torch(["a", "b", "c"], matrix, min_weight=0.25)
    assert vectors.indptr.tolist() == [0, 1, 1, 2]
    assert vectors.indices.tolist() == [1, 0]
    assert vectors.data.tolist() == [1.5, 2.0]


def test_nan_from_a_model_is_reported_and_not_dropped() -> None:
    with pytest.raises(DataError, match="got nan for 'b'"):
        SparseVectors.from_torch(["a", "b"], torch.tensor([[1.0], [float("nan")]]), min_weight=0.5)
    with pytest.raises(DataError, match=r"matrix: expected a tensor \[2, V\]"):
        SparseVectors.from_torch(["a", "b"], torch.ones(3, 4))


def test_jsonl_export_has_the_anserini_form(tmp_path: Path) -> None:
    vectors = SparseVectors.from_rows({"a": {0: 0.5, 2: 0.004}, "b": {}}, 3)
    export_jsonl(vectors, tmp_path / "x.jsonl", ["cat", "dog", "ü"], contents={"a": "a cat"})
    lines = [json.loads(line) for line in (tmp_path / "x.jsonl").read_text(encoding="utf-8").splitlines()]
    assert lines[0]["id"] == "a" and lines[0]["contents"] == "a cat"
    assert lines[0]["vector"] == pytest.approx({"cat": 0.5, "ü": 0.004})
    assert lines[1] == {"id": "b", "contents": "", "vector": {}}
    export_jsonl(vectors, tmp_path / "i.jsonl", scale=100)
    assert json.loads((tmp_path / "i.jsonl").read_text().splitlines()[0])["vector"] == {"0": 50}


def test_jsonl_export_needs_a_token_for_every_term_and_keeps_the_old_file_on_error(tmp_path: Path) -> None:
    vectors = SparseVectors.from_rows({"a": {0: 0.5, 2: 1.0}}, 3)
    file = tmp_path / "x.jsonl"
    file.write_text("earlier")
    with pytest.raises(VocabularyMismatchError, match="every index up to 2, got 2 tokens"):
        export_jsonl(vectors, file, ["cat", "dog"])
    with pytest.raises(DataError, match="two terms of 'a' have the same text"):
        export_jsonl(vectors, file, ["cat", "dog", "cat"])
    assert file.read_text() == "earlier"
    assert [path.name for path in tmp_path.iterdir()] == ["x.jsonl"]


def test_fingerprints_follow_the_vocabulary() -> None:
    class Tokenizer:
        def __init__(self, vocabulary: dict[str, int]) -> None:
            self.get_vocab = lambda: vocabulary

    one = vocabulary_fingerprint(Tokenizer({"a": 0, "b": 1}))
    assert one == vocabulary_fingerprint(Tokenizer({"b": 1, "a": 0}))
    assert one != vocabulary_fingerprint(Tokenizer({"a": 1, "b": 0}))
    assert vocabulary_fingerprint(object()) is None
