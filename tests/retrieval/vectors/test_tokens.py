"""Folders of token vectors: what is written is read, and damage is named by its file."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.manifests import edit
from tests.retrieval.vectors.token_vectors import (
    DIMENSION,
    random_token_vectors,
    unit_rows,
    write_store,
)
from tilefold import retrieval as r
from tilefold.retrieval.errors import DataError
from tilefold.retrieval.vectors import tokens


@pytest.mark.parametrize(
    ("value", "storage"),
    [
        pytest.param(math.nan, "int8", id="nan"),
        pytest.param(-math.inf, "int8", id="minus infinity"),
        pytest.param(math.inf, "fp16", id="infinity"),
        pytest.param(1e6, "fp16", id="too large for fp16"),
    ],
)
def test_a_value_that_cannot_be_stored_is_refused_with_its_text(
    value: float,
    storage: str,
) -> None:
    rows = unit_rows(2, seed=0)
    wrong_rows = rows.clone()
    wrong_rows[1, 3] = value
    with pytest.raises(DataError, match=f"got {value} for 'b'"):
        r.TokenVectors.pack(["a", "b"], [rows, wrong_rows], DIMENSION, storage)


def test_vectors_of_another_dimension_are_refused_with_their_text() -> None:
    rows = unit_rows(2, seed=0)
    with pytest.raises(DataError, match=r"expected \[n, 16\] for 'b', got shape \[2, 8\]"):
        r.TokenVectors.pack(["a", "b"], [rows, rows[:, :8]], DIMENSION, "fp16")


def test_falling_offsets_and_repeated_ids_are_refused() -> None:
    rows = unit_rows(2, seed=0)
    with pytest.raises(DataError, match=r"offsets that rise from 0 to 2, got 2 after 3"):
        r.TokenVectors(["a", "b"], torch.tensor([0, 3, 2]), rows)
    with pytest.raises(DataError, match="is a duplicate"):
        r.TokenVectors(["a", "a"], torch.tensor([0, 1, 2]), rows)


def test_a_store_reads_what_was_written(tmp_path: Path) -> None:
    first = random_token_vectors([3, 0, 7])
    second = random_token_vectors([5], prefix="ü", seed=3)
    store = write_store([first, second], tmp_path, model_name="m", kind="document")
    assert len(store) == 4
    assert store.dimension == DIMENSION
    assert list(store.ids) == ["d0", "d1", "d2", "ü0"]
    assert store.manifest.n_documents == 4
    assert store.manifest.n_tokens == 15
    assert torch.equal(store.shard(0).values, first.values)


def test_a_shard_is_mapped_from_its_file(tmp_path: Path) -> None:
    store = write_store([random_token_vectors([3, 0, 7])], tmp_path)
    n_bytes_in_memory = store.shard(0).values.untyped_storage().nbytes()
    assert n_bytes_in_memory <= (tmp_path / "part-00000.safetensors").stat().st_size


def test_a_store_reads_vectors_in_the_order_of_ids(tmp_path: Path) -> None:
    first = random_token_vectors([3, 0, 7])
    second = random_token_vectors([5], prefix="ü", seed=3)
    store = write_store([first, second], tmp_path)
    vectors = store.read(["ü0", "d1", "d0"])
    assert vectors.ids == ["ü0", "d1", "d0"]
    assert vectors.offsets.tolist() == [0, 5, 5, 8]
    assert torch.equal(vectors.rows(2), first.rows(0))
    assert len(store.read([])) == 0
    with pytest.raises(KeyError):
        store.read(["absent"])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of two shards, with two and one texts."""
    write_store(
        [random_token_vectors([3, 2]), random_token_vectors([4], prefix="e")],
        tmp_path / "store",
    )
    return tmp_path / "store"


def test_a_damaged_shard_is_refused_when_it_is_read(folder: Path) -> None:
    shard = folder / "part-00001.safetensors"
    content = bytearray(shard.read_bytes())
    content[-20] ^= 1
    shard.write_bytes(content)
    store = r.open_tokens(folder)
    assert len(store.shard(0)) == 2, "the other shard is not damaged"
    with pytest.raises(DataError, match=r"part-00001.safetensors: damaged; its checksum"):
        store.shard(1)


def overwrite_shard(folder: Path) -> None:
    (folder / "part-00000.safetensors").write_bytes(b"torn")


def delete_shard(folder: Path) -> None:
    (folder / "part-00000.safetensors").unlink()


def delete_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()


def delete_ids(folder: Path) -> None:
    tensors = load_file(folder / "part-00000.safetensors")
    del tensors["ids"]
    save_file(tensors, folder / "part-00000.safetensors")


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        pytest.param(
            overwrite_shard,
            DataError,
            "part-00000.safetensors: expected a safetensors file of vectors",
            id="shard that is no safetensors file",
        ),
        pytest.param(
            delete_shard,
            FileNotFoundError,
            "part-00000.safetensors: listed in the manifest",
            id="missing shard",
        ),
        pytest.param(delete_manifest, FileNotFoundError, "manifest.json", id="missing manifest"),
        pytest.param(delete_ids, DataError, "expected a tensor 'ids'", id="shard without ids"),
    ],
)
def test_a_damaged_folder_is_not_opened(
    damage: Callable[[Path], None],
    error: type[Exception],
    message: str,
    folder: Path,
) -> None:
    damage(folder)
    with pytest.raises(error, match=message):
        r.open_tokens(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param({"complete": False}, "unfinished run", id="not complete"),
        pytest.param({"schema_version": 99}, "schema_version 1, got 99", id="later schema"),
        pytest.param({"storage": "fp4"}, "fields of other types", id="unknown storage"),
        pytest.param(
            {"dimension": 8},
            r"expected \(D, dtype, texts, token vectors\) \(8,",
            id="another dimension",
        ),
    ],
)
def test_an_edited_manifest_is_refused(
    changes: dict[str, Any],
    message: str,
    folder: Path,
) -> None:
    edit(folder / "manifest.json", **changes)
    with pytest.raises(DataError, match=message):
        r.open_tokens(folder).shard(0)


def test_token_vectors_are_not_read_or_overwritten_as_sparse_vectors(folder: Path) -> None:
    message = r"expected sparse vectors, got token vectors.*--rerank"
    with pytest.raises(DataError, match=message):
        r.read_vectors(folder)
    with pytest.raises(DataError, match="got token vectors"):
        r.SparseVectorWriter(folder, r.VectorManifest(500))
    assert len(r.open_tokens(folder)) == 3


def test_sparse_vectors_are_not_read_or_overwritten_as_token_vectors(
    tmp_path: Path,
    make_vectors: Any,
) -> None:
    r.write_vectors(make_vectors(3), tmp_path / "sparse")
    message = "expected token vectors of a multi-vector model, got sparse"
    with pytest.raises(DataError, match=message):
        r.open_tokens(tmp_path / "sparse")
    with pytest.raises(DataError, match="got sparse"):
        r.TokenVectorWriter(tmp_path / "sparse", r.TokenManifest(DIMENSION, "fp16"))


def test_vectors_of_another_storage_are_not_written(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"expected D=16 in torch.float16"):
        write_store([random_token_vectors([3], "int8")], tmp_path)


def test_a_file_that_is_replaced_while_it_is_read_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tmp_path / "values.safetensors"
    save_file({"values": torch.zeros(4, dtype=torch.float16)}, path)
    map_again = tokens._map_again

    def replace_and_map(path: Path, tensors: Any) -> Any:
        save_file({"values": torch.ones(4, dtype=torch.bfloat16)}, tmp_path / "new.safetensors")
        (tmp_path / "new.safetensors").replace(path)
        return map_again(path, tensors)

    monkeypatch.setattr(tokens, "_map_again", replace_and_map)
    with pytest.raises(DataError, match="another file replaced it"):
        tokens.read_tensors(path, "values")


def test_ids_and_vectors_of_a_shard_are_of_the_same_file(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_store([random_token_vectors([3, 2], "fp16")], tmp_path / "store")
    (path,) = (tmp_path / "store").glob("*.safetensors")
    read_tensors = tokens.read_tensors

    def read_and_replace(path: Path, *names: str, **options: Any) -> Any:
        tensors = read_tensors(path, *names, **options)
        save_file({"ids": torch.tensor(list(b'["x", "y"]'), dtype=torch.uint8)}, tmp_path / "new")
        (tmp_path / "new").replace(path)
        return tensors

    expected_ids = tokens._read_shard(path).ids
    monkeypatch.setattr(tokens, "read_tensors", read_and_replace)
    assert tokens._read_shard(path).ids == expected_ids


def test_tensors_of_a_file_are_those_of_safetensors(tmp_path: Path) -> None:
    path = tmp_path / "values.safetensors"
    stored = {
        "values": torch.randn(5, 3).half(),
        "scales": torch.rand(5),
        "empty": torch.zeros(0, 7),
        "bytes": torch.arange(3, dtype=torch.uint8),
    }
    save_file(stored, path)
    read = tokens.read_tensors(path, *stored)
    for name, tensor in stored.items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name], tensor)
