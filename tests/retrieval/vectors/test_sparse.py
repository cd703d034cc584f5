"""Sparse vectors in memory and on disk: what is written comes back, whole; what does not fit is
named.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from tests import programs
from tests.manifests import sum_shards
from tests.refusals import refused
from tilefold import retrieval as r
from tilefold.retrieval.common.provenance import Provenance
from tilefold.retrieval.errors import DataError, VocabularyMismatchError
from tilefold.retrieval.vectors.shards import Receipt

Make = Callable[..., r.SparseVectors]
OWN: dict[str, Any] = {"vocab_size": 500, "fingerprint": "f" * 64}


def same(left: r.SparseVectors, right: r.SparseVectors) -> bool:
    arrays = ((getattr(left, name), getattr(right, name)) for name in ("indptr", "indices", "data"))
    facts = ((each.ids, each.vocab_size, each.fingerprint) for each in (left, right))
    return next(facts) == next(facts) and all(
        np.array_equal(a, b) and a.dtype == b.dtype for a, b in arrays
    )


def test_vectors_survive_shards_on_disk_bit_for_bit(make_vectors: Make, tmp_path: Path) -> None:
    r.write_vectors(make_vectors(30), tmp_path / "v", shard_size=10)
    vectors = r.SparseVectors.concatenate(
        [make_vectors(24), r.SparseVectors.from_rows({"empty": {}}, 500, "f" * 64)],
    )
    refused(
        FileExistsError,
        r"v: expected a new or empty folder, got one with 30 vectors\. .*overwrite=True",
        r.write_vectors,
        vectors,
        tmp_path / "v",
    )
    assert len(r.read_vectors(tmp_path / "v")) == 30
    manifest = r.write_vectors(
        vectors,
        tmp_path / "v",
        model_name="tiny",
        shard_size=24,
        overwrite=True,
    )
    assert [shard["rows"] for shard in manifest.shards] == [24, 1]
    assert (
        manifest.complete
        and manifest.n_documents == 25
        and r.read_manifest(tmp_path / "v") == manifest
    )
    assert same(r.read_vectors(tmp_path / "v"), vectors) and not vectors.row(24)[0].size, (
        "a row without terms is kept"
    )
    assert sorted(path.name for path in (tmp_path / "v").iterdir()) == [
        "manifest.json",
        "part-00000.parquet",
        "part-00001.parquet",
    ]
    schema = pq.read_schema(tmp_path / "v" / "part-00000.parquet")
    lists = {"indices": pa.list_(pa.int32()), "weights": pa.list_(pa.float32())}
    assert {name: schema.field(name).type for name in schema.names} == {"id": pa.string()} | lists


@pytest.mark.parametrize("backend", ["exact", "seismic"])
def test_model_and_texts_travel_from_vectors_into_an_index(
    make_vectors: Make,
    tmp_path: Path,
    backend: str,
) -> None:
    made = Provenance("ab" * 32, "cd" * 32)
    vectors = replace(make_vectors(12), provenance=made)
    r.write_vectors(vectors, tmp_path / "v", shard_size=5)
    stored, rows = r.read_vectors(tmp_path / "v"), r.read_rows(tmp_path / "v", vectors.ids[:2])
    assert {part.provenance for part in (stored, rows, stored.take([3, 1]))} == {made}
    r.build_index(stored, backend).save(tmp_path / "i")
    assert r.load_index(tmp_path / "i").provenance == made
    other = replace(make_vectors(1, prefix="e"), provenance=Provenance())
    assert r.SparseVectors.concatenate([stored.take([0]), other]).provenance == Provenance()


def test_rows_by_name_come_in_the_order_of_the_folder(make_vectors: Make, tmp_path: Path) -> None:
    vectors = make_vectors(10)
    r.write_vectors(vectors, tmp_path / "v", shard_size=3)
    assert same(r.read_rows(tmp_path / "v", ["d7", "nobody", "d2", "d3"]), vectors.take([2, 3, 7]))
    assert len(r.read_rows(tmp_path / "v", ["nobody"])) == 0


def test_shards_have_receipts_and_those_without_vectors_are_made_again(
    make_vectors: Make,
    tmp_path: Path,
) -> None:
    lister, other = (
        r.SparseVectorWriter(tmp_path, r.VectorManifest(**OWN)),
        r.SparseVectorWriter(tmp_path, r.VectorManifest(**OWN), writes_manifest=False),
    )
    failed = {f"f{i}": "RuntimeError: no memory" for i in range(16)}
    stored = other.store_shard(1, make_vectors(3, prefix="e"))
    assert not lister.reuse_shard(0)
    refused(
        ValueError, "expected at most 0, the next shard, got 1", lister.register_shard, 1, stored
    )
    other.write_shard_with_receipt(1, r.SparseVectors.from_rows({}, 500, "f" * 64), failed, None)
    other.write_shard_with_receipt(0, make_vectors(3), {"x": "expected a string, got int"}, None)
    assert lister.register_received([0, 1]) == {0}
    again = r.SparseVectorWriter(tmp_path, r.VectorManifest(**OWN), resume=True)
    assert again.reuse_shard(0) and not again.reuse_shard(1)
    assert again.manifest.failed == {"x": "expected a string, got int"}
    again.register_shard(1, other.store_shard(1, make_vectors(3, prefix="e")))
    assert again.finish(7).shards[1] == stored
    assert sorted(path.name for path in tmp_path.glob("*.json")) == ["manifest.json"]
    assert r.read_vectors(tmp_path).ids == ["d0", "d1", "d2", "e0", "e1", "e2"]


def test_any_number_of_shards_may_wait_for_the_first_one(
    make_vectors: Make,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A slow worker has the first shard, and the other workers have finished all others."""
    writer = r.SparseVectorWriter(tmp_path, r.VectorManifest(**OWN))
    stored = writer.store_shard(0, make_vectors(1))
    n_waiting = sys.getrecursionlimit()
    for number in range(1, n_waiting + 1):
        writer._received[number] = Receipt(writer.key, 0, stored, {})
    monkeypatch.setattr(writer, "_save", lambda: None)  # a manifest for each shard takes seconds
    writer.register_shard(0, stored)
    assert len(writer.manifest.shards) == n_waiting + 1


def test_a_writer_takes_the_manifest_of_a_new_folder_of_its_kind(
    make_vectors: Make,
    tmp_path: Path,
) -> None:
    read = r.write_vectors(make_vectors(6), tmp_path / "v", shard_size=3)
    refused(
        ValueError,
        r"of a new folder, got one that lists 2 shard\(s\)",
        r.SparseVectorWriter,
        tmp_path / "w",
        read,
    )
    tokens = r.TokenManifest(8, "fp16")
    refused(
        TypeError,
        "expected a VectorManifest, got TokenManifest",
        r.SparseVectorWriter,
        tmp_path / "v",
        tokens,
    )
    assert r.read_manifest(tmp_path / "v") == read and not (tmp_path / "w").exists()


@pytest.mark.parametrize("place", ["s.sha256_file", "s.ShardWriter._save"])
def test_a_killed_writer_loses_only_its_last_shard(
    make_vectors: Make,
    tmp_path: Path,
    place: str,
) -> None:
    code = (
        "import os, sys, tilefold.retrieval.vectors.shards as s, "
        "tilefold.retrieval.vectors.sparse_files as v\n"
        "writer = v.SparseVectorWriter(sys.argv[1], v.VectorManifest(500, 'f' * 64))\n"
        "rows = v.SparseVectors.from_rows({'d0': {1: 1.0}}, 500, 'f' * 64)\n"
        "writer.write_shard(0, rows)\n"
        f"{place} = lambda *given: os._exit(9)\n"
        "writer.write_shard(1, rows)\n"
    )
    assert programs.run("-c", code, tmp_path).returncode == 9
    left = ".part-00001.parquet.*.tmp" if place == "s.sha256_file" else "part-00001.parquet"
    assert list(tmp_path.glob(left))
    writer = r.SparseVectorWriter(tmp_path, r.VectorManifest(**OWN), resume=True)
    assert writer.reuse_shard(0) and not writer.reuse_shard(1)
    assert not list(tmp_path.glob(".part*"))
    writer.write_shard(1, make_vectors(2, prefix="e"))
    refused(DataError, r"2 shard\(s\) of an unfinished run", r.read_vectors, tmp_path)
    writer.finish()
    assert r.read_vectors(tmp_path).ids == ["d0", "e0", "e1"]
    other, message = (
        r.VectorManifest(**OWN | {"vocab_size": 600}),
        "vocab_size: 500 before, 600 now.*resume=False",
    )
    refused(DataError, message, r.SparseVectorWriter, tmp_path, other, resume=True)


def test_a_folder_of_other_files_is_never_written_to_nor_read(
    make_vectors: Make,
    tmp_path: Path,
) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    for path, message in (
        (tmp_path, "nothing was overwritten"),
        (tmp_path / "notes.txt", "got a file"),
    ):
        refused(FileExistsError, message, r.write_vectors, make_vectors(3), path)
    refused(FileNotFoundError, r"got a folder without manifest.json", r.read_vectors, tmp_path)
    for version, message in (
        (1, r"expected a manifest of vectors, got \['schema_version'\] \(.*missing"),
        (99, "expected schema_version 1, got 99"),
    ):
        (tmp_path / "manifest.json").write_text(json.dumps({"schema_version": version}))
        refused(DataError, message, r.read_vectors, tmp_path)


def test_a_shard_that_is_damaged_or_written_by_another_program_is_named(
    make_vectors: Make,
    tmp_path: Path,
) -> None:
    r.write_vectors(make_vectors(20), tmp_path, shard_size=10)
    file = tmp_path / "part-00001.parquet"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    refused(DataError, r"part-00001.parquet: damaged", r.read_vectors, tmp_path)
    no_list = pa.array([None], pa.list_(pa.int32()))
    for columns, message in (
        ({"indices": [[1, 2]]}, "expected Parquet with id, indices and weights"),
        (
            {"indices": [[1, 2]], "weights": [[1.0]]},
            "expected as many weights as indices, got 1 weights and 2 indices for 'd0'",
        ),
        (
            {"indices": no_list, "weights": [[1.0]]},
            "expected no nulls, got nulls in indices",
        ),
        (
            {"indices": [[1, 500]], "weights": [[1.0, 2.0]]},
            r"indices: expected terms in \[0, 500\), got 500",
        ),
    ):
        r.write_vectors(make_vectors(1), tmp_path, overwrite=True)
        pq.write_table(pa.table({"id": ["d0"], **columns}), tmp_path / "part-00000.parquet")
        sum_shards(tmp_path)
        refused(DataError, f"part-00000.parquet: {message}", r.read_vectors, tmp_path)


ONE, TWO = (
    (np.array([0, 1]), np.array([2], np.int32)),
    (np.array([0, 2]), np.array([2, 2], np.int32)),
)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: r.SparseVectors.from_rows({"a": {0: 1.0}, "b": {1: float("nan")}}, 5),
            "got nan for 'b'",
        ),
        (
            lambda: r.SparseVectors.from_rows({"a": {0: 1.0}, "b": {1: float("inf")}}, 5),
            "got inf for 'b'",
        ),
        (lambda: r.SparseVectors.from_rows({"a": {0: 1.0}, "b": {1: -0.5}}, 5), "got -0.5 for 'b'"),
        (
            lambda: r.SparseVectors.from_rows({"a": {0: 1.0}, "b": {5: 1.0}}, 5),
            r"in \[0, 5\), got 5 for 'b'",
        ),
        (
            lambda: r.SparseVectors(["a"], *TWO, np.ones(2, np.float32), 5),
            "term 2 occurs twice in the row of 'a'",
        ),
        (
            lambda: r.SparseVectors(["a", "a"], *TWO, np.ones(2, np.float32), 5),
            r"ids\[1\]: 'a' is a duplicate",
        ),
        (
            lambda: r.SparseVectors([""], *ONE, np.ones(1, np.float32), 5),
            r"ids\[0\]: expected a non-empty string",
        ),
        (
            lambda: r.SparseVectors.from_torch(["a"], torch.tensor([[torch.nan]]), min_weight=0.5),
            "got nan for 'a'",
        ),
        (
            lambda: r.SparseVectors.from_torch(["a", "b"], torch.ones(3, 4)),
            r"matrix: expected a tensor \[2, V\]",
        ),
    ],
)
def test_what_is_no_vector_is_named(make: Callable[[], r.SparseVectors], message: str) -> None:
    refused(DataError, message, make)


def test_rows_out_of_order_are_sorted_and_rows_can_be_taken() -> None:
    indices, data = np.array([3, 1, 0, 3], np.int32), np.array([1, 2, 3, 4], np.float32)
    vectors = r.SparseVectors(
        ["a", "b"],
        np.array([0, 2, 4]),
        indices,
        data,
        5,
    )  # 3 in two rows is fine
    assert [part.tolist() for part in vectors.row(0)] == [[1, 3], [2.0, 1.0]]
    taken = vectors.take([1, 0])
    assert taken.ids == ["b", "a"]
    assert [part.tolist() for part in taken.row(0)] == [[0, 3], [3.0, 4.0]]


def test_mixed_vocabularies_are_refused(make_vectors: Make) -> None:
    small, other = make_vectors(2), replace(make_vectors(2, prefix="e"), fingerprint="0" * 64)
    for parts, message in (
        (
            [small, make_vectors(2, vocab_size=600, prefix="e")],
            r"parts\[1\]: expected .*500 terms, got one with 600",
        ),
        ([small, other], r"got one of the same size \(fingerprint 0{12}\)"),
    ):
        refused(VocabularyMismatchError, message, r.SparseVectors.concatenate, parts)


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_torch_tensors_of_every_layout_give_the_same_vectors(dtype: torch.dtype) -> None:
    dense = torch.tensor([[0.0, 1.5, 0.25], [0.0, 0.0, 0.0], [2.0, 0.0, 0.0]], dtype=dtype)
    for matrix in (dense, dense.to_sparse_coo(), dense.to_sparse_csr()):
        vectors = r.SparseVectors.from_torch(["a", "b", "c"], matrix, min_weight=0.25)
        assert vectors.indptr.tolist() == [0, 1, 1, 2]
        assert (vectors.indices.tolist(), vectors.data.tolist()) == ([1, 0], [1.5, 2.0])


def test_jsonl_export_has_the_anserini_form(tmp_path: Path) -> None:
    vectors = r.SparseVectors.from_rows({"a": {0: 0.5, 2: 0.004}, "b": {}}, 3)
    file = tmp_path / "x.jsonl"
    r.export_jsonl(vectors, file, ["cat", "dog", "ü"], contents={"a": "a cat"})
    first, second = (json.loads(line) for line in file.read_text(encoding="utf-8").splitlines())
    assert first == {
        "id": "a",
        "contents": "a cat",
        "vector": pytest.approx({"cat": 0.5, "ü": 0.004}),
    }
    assert second == {"id": "b", "contents": "", "vector": {}}
    r.export_jsonl(vectors, file, scale=100, overwrite=True)
    assert json.loads(file.read_text().splitlines()[0])["vector"] == {"0": 50}
    earlier = file.read_text()
    refused(
        VocabularyMismatchError,
        "every index up to 2, got 2 tokens",
        r.export_jsonl,
        vectors,
        file,
        ["cat", "dog"],
    )
    refused(
        DataError,
        "have the same text",
        r.export_jsonl,
        vectors,
        file,
        ["cat", "dog", "cat"],
    )
    assert file.read_text() == earlier and [path.name for path in tmp_path.iterdir()] == ["x.jsonl"]


def test_fingerprints_follow_the_vocabulary() -> None:
    class Tokenizer:
        def __init__(self, vocabulary: dict[str, int]) -> None:
            self.get_vocab = lambda: vocabulary

    one = r.vocabulary_fingerprint(Tokenizer({"a": 0, "b": 1}))
    assert one == r.vocabulary_fingerprint(Tokenizer({"b": 1, "a": 0}))
    assert one != r.vocabulary_fingerprint(Tokenizer({"a": 1, "b": 0}))
    assert r.vocabulary_fingerprint(object()) is None


def test_terms_of_different_vectors_with_one_text_are_refused(tmp_path: Path) -> None:
    vectors = r.SparseVectors.from_rows({"a": {0: 1.0}, "b": {1: 1.0}}, 3)
    with pytest.raises(DataError, match="terms 0 and 1 have the same text 'cat'"):
        r.export_jsonl(vectors, tmp_path / "x.jsonl", ["cat", "cat", "dog"])
    r.export_jsonl(vectors, tmp_path / "x.jsonl", ["cat", "dog", "dog"])
