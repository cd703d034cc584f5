"""Folders of vectors that are merged into one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.retrieval.conftest import dense_folder
from tilefold import retrieval as r
from tilefold.retrieval.errors import DataError

MakeVectors = Callable[..., r.SparseVectors]


@pytest.fixture
def folders(make_vectors: MakeVectors, tmp_path: Path) -> Path:
    """Folders a and b fit each other, c has another vocabulary, and d has dense vectors."""
    r.write_vectors(make_vectors(30), tmp_path / "a", shard_size=8)
    r.write_vectors(make_vectors(20, seed=1, prefix="n"), tmp_path / "b", shard_size=8)
    r.write_vectors(make_vectors(3, vocab_size=400), tmp_path / "c", shard_size=8)
    dense_folder(tmp_path / "d", ["x"], seed=0)
    return tmp_path


def test_merged_folders_have_the_vectors_of_all(folders: Path) -> None:
    manifest = r.merge_vectors([folders / "a", folders / "b"], folders / "merged")
    merged = r.read_vectors(folders / "merged")
    parts = [r.read_vectors(folders / name) for name in ("a", "b")]
    expected = r.SparseVectors.concatenate(parts)
    assert manifest.n_documents == 50
    assert manifest.n_texts == 50
    assert merged.ids == expected.ids
    assert np.array_equal(merged.data, expected.data)
    assert np.array_equal(merged.indices, expected.indices)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        pytest.param(["a"], "expected two or more", id="one folder"),
        pytest.param(["a", "a"], "'d0' is in", id="a folder twice"),
        pytest.param(["a", "c"], "made with the same settings", id="another vocabulary"),
        pytest.param(["a", "d"], "expected sparse vectors", id="dense vectors"),
    ],
)
def test_folders_that_do_not_fit_are_not_merged(
    names: list[str],
    message: str,
    folders: Path,
) -> None:
    with pytest.raises(ValueError, match=message):
        r.merge_vectors([folders / name for name in names], folders / "never")
    assert not (folders / "never").exists()


def test_a_folder_is_not_merged_with_one_that_contains_its_vectors(folders: Path) -> None:
    r.merge_vectors([folders / "a", folders / "b"], folders / "merged")
    with pytest.raises(ValueError, match="'d0' is in"):
        r.merge_vectors([folders / "a", folders / "merged"], folders / "never")


def test_folders_are_not_merged_into_one_of_themselves(folders: Path) -> None:
    with pytest.raises(DataError, match="output_dir"):
        r.merge_vectors([folders / "a", folders / "b"], folders / "a")


def test_an_interrupted_merge_starts_again(
    folders: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(r.SparseVectorWriter, "finish", interrupt)
        with pytest.raises(KeyboardInterrupt):
            r.merge_vectors([folders / "a", folders / "b"], folders / "merged")
    manifest = r.merge_vectors([folders / "a", folders / "b"], folders / "merged")
    assert manifest.n_documents == 50


def test_other_unfinished_vectors_are_not_replaced_by_a_merge(
    folders: Path,
    make_vectors: MakeVectors,
) -> None:
    other = r.VectorManifest(500, "f" * 64, settings={"top_k": 8})
    r.SparseVectorWriter(folders / "unfinished", other).write_shard(0, make_vectors(3))
    message = "got one with an unfinished run of 3 vectors.*nothing was overwritten"
    with pytest.raises(FileExistsError, match=message):
        r.merge_vectors([folders / "a", folders / "b"], folders / "unfinished")
    assert len(list((folders / "unfinished").glob("part-*"))) == 1
