"""Folders of vectors that an interrupted run left: what a later run resumes, refuses or replaces."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tilefold import retrieval as r
from tilefold.pipeline.truncation import Truncation
from tilefold.retrieval.errors import DataError
from tilefold.retrieval.vectors.shards import PartialShard

MakeVectors = Callable[..., r.SparseVectors]


def open_writer(folder: Path, **options: Any) -> r.SparseVectorWriter:
    return r.SparseVectorWriter(folder, r.VectorManifest(500, "f" * 64), **options)


def part_of(vectors: r.SparseVectors) -> PartialShard[r.SparseVectors]:
    return PartialShard(vectors, {}, Truncation())


def release(writer: r.SparseVectorWriter) -> None:
    """Release the lock of a folder, as the end of a killed process does."""
    writer._lock.release(force=True)


@pytest.mark.parametrize("listed", [False, True], ids=["receipt alone", "a listed shard, too"])
def test_a_receipt_of_another_precision_is_not_resumed(
    listed: bool,
    make_vectors: MakeVectors,
    tmp_path: Path,
) -> None:
    first = open_writer(tmp_path, precision="bf16")
    if listed:
        first.write_shard(0, make_vectors(3))
    rank = open_writer(tmp_path, writes_manifest=False, precision="bf16")
    rank.write_shard_with_receipt(2, make_vectors(3, prefix="e"), {}, None)
    release(first)
    with pytest.raises(DataError, match=r"vectors that were computed in bf16, but here .* in fp32"):
        open_writer(tmp_path, resume=True, precision="fp32")
    resumed = open_writer(tmp_path, resume=True, precision="bf16")
    assert resumed.reuse_shard(2)


def test_a_kill_between_a_new_part_and_its_manifest_keeps_the_earlier_part(
    make_vectors: MakeVectors,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def killed(writer: r.SparseVectorWriter) -> None:
        raise KeyboardInterrupt

    first = open_writer(tmp_path)
    first.write_partial(0, part_of(make_vectors(3)))
    first.write_partial(0, part_of(make_vectors(5)))
    assert len(list(tmp_path.glob("part-*"))) == 1, "the earlier part is removed"
    with monkeypatch.context() as patched:
        patched.setattr(r.SparseVectorWriter, "_save", killed)
        with pytest.raises(KeyboardInterrupt):
            first.write_partial(0, part_of(make_vectors(7)))
    release(first)

    resumed = open_writer(tmp_path, resume=True)
    part = resumed.read_partial(0)
    assert part is not None
    assert len(part.vectors) == 5
    resumed.write_shard(0, make_vectors(9))
    assert [path.name for path in tmp_path.glob("part-*")] == ["part-00000.parquet"]


@pytest.mark.parametrize("damage", [b"{", b'{"layout": "sparse"}'], ids=["no JSON", "no fields"])
def test_a_damaged_manifest_is_replaced_only_if_vectors_may_be_replaced(
    damage: bytes,
    make_vectors: MakeVectors,
    tmp_path: Path,
) -> None:
    r.write_vectors(make_vectors(30), tmp_path, shard_size=10)
    (tmp_path / "manifest.json").write_bytes(damage)
    with pytest.raises(DataError, match=r"manifest\.json"):
        open_writer(tmp_path)
    with pytest.raises(DataError, match=r"manifest\.json"):
        open_writer(tmp_path, resume=True)
    r.write_vectors(make_vectors(5), tmp_path, overwrite=True)
    assert len(r.read_vectors(tmp_path)) == 5
    assert len(list(tmp_path.glob("part-*"))) == 1


def test_a_damaged_manifest_of_other_vectors_is_not_replaced(
    make_vectors: MakeVectors,
    tmp_path: Path,
) -> None:
    (tmp_path / "manifest.json").write_bytes(b"{")
    (tmp_path / "part-00000.safetensors").write_bytes(b"token vectors")
    with pytest.raises(DataError, match=r"manifest\.json"):
        r.write_vectors(make_vectors(5), tmp_path, overwrite=True)
    assert (tmp_path / "part-00000.safetensors").exists()
