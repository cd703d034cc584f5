"""Tests of generations of index folders: their ids, files and memory, and opening during changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tilefold import retrieval as r
from tilefold.retrieval.errors import DataError
from tilefold.retrieval.index.generations import (
    IndexGeneration,
    open_current,
    opening_memory,
    part_folders,
    read_generation,
    verify_files,
)
from tilefold.retrieval.index.merging import merge_segments, update_index
from tilefold.retrieval.index.opening import open_index, opened_parts


def vectors_of(*ids: str) -> r.SparseVectors:
    """Return a sparse vector for each id."""
    return r.SparseVectors.from_rows({name: {0: 1.0, 1: 2.0} for name in ids}, vocab_size=3)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """An index of two documents."""
    folder = tmp_path / "index"
    r.build_index(vectors_of("a", "b")).save(folder)
    return folder


def test_every_change_commits_another_generation(path: Path) -> None:
    generations = [read_generation(path)]
    update_index(path, vectors_of("c"))
    generations.append(read_generation(path))
    update_index(path, delete=["a"])
    generations.append(read_generation(path))
    merge_segments(path)
    generations.append(read_generation(path))
    assert len({generation.id for generation in generations}) == 4
    assert [generation.n_segments for generation in generations] == [0, 1, 1, 0]
    assert read_generation(path) == generations[-1]


def test_an_index_that_is_merged_while_it_is_opened_is_opened_again(path: Path) -> None:
    update_index(path, vectors_of("c"), delete=["a"])
    opened: list[IndexGeneration] = []

    def merge_and_open(generation: IndexGeneration) -> Any:
        if not opened:
            merge_segments(path)
        opened.append(generation)
        return open_index(path)

    index = open_current(path, merge_and_open)
    assert len(opened) == 2
    assert opened[-1] == read_generation(path)
    assert sorted(index.ids) == ["b", "c"]


def test_an_error_of_a_generation_that_was_replaced_is_not_raised(path: Path) -> None:
    update_index(path, vectors_of("c"))

    def fail_after_merge(generation: IndexGeneration) -> Any:
        if generation.n_segments:
            merge_segments(path)
            raise FileNotFoundError("segments/00001/index.json")
        return open_index(path)

    assert open_current(path, fail_after_merge).n_documents == 3


def test_an_error_of_the_current_generation_is_raised(path: Path) -> None:
    def fail(generation: IndexGeneration) -> Any:
        raise DataError("damaged")

    with pytest.raises(DataError, match="damaged"):
        open_current(path, fail)


def test_files_that_were_verified_are_not_read_again(path: Path) -> None:
    verified = verify_files(path)
    update_index(path, vectors_of("c"))
    segment = part_folders(path)[-1]
    (segment / "weights.npy").write_bytes(b"\0" * (segment / "weights.npy").stat().st_size)
    with pytest.raises(DataError, match=r"weights\.npy: damaged"):
        verify_files(path, verified)
    (segment / "weights.npy").unlink()
    with pytest.raises(FileNotFoundError, match=r"weights\.npy: listed in index\.json"):
        verify_files(path, verified)


def test_only_files_that_are_read_into_memory_count(path: Path, tmp_path: Path) -> None:
    assert opening_memory(path).cpu_bytes == 0
    n_bytes = opening_memory(path, on_gpu=True).device_bytes
    files = [file for file in path.iterdir() if file.name != "index.json"]
    assert n_bytes == sum(file.stat().st_size for file in files)
    r.build_index(vectors_of("a", "b"), "seismic").save(tmp_path / "seismic")
    n_bytes = opening_memory(tmp_path / "seismic").cpu_bytes
    assert n_bytes > 0
    parts = opened_parts(open_index(tmp_path / "seismic"))
    update_index(tmp_path / "seismic", vectors_of("c"))
    assert 0 < opening_memory(tmp_path / "seismic", opened=parts).cpu_bytes < n_bytes


@pytest.mark.parametrize("backend", ["exact", "seismic"])
def test_an_index_that_shares_parts_with_an_earlier_generation_has_the_same_results(
    tmp_path: Path,
    backend: str,
) -> None:
    path = tmp_path / "index"
    r.build_index(vectors_of("a", "b"), backend).save(path)
    first = open_index(path)
    update_index(path, vectors_of("c"), delete=["a"])
    second = open_index(path, opened=first)
    update_index(path, vectors_of("d"))
    third = open_index(path, opened=second)
    assert third.parts[:2] == second.parts
    assert second.parts[0] is first
    query = vectors_of("q")
    assert [hit.id for hit in first.search(query, 9)[0]] == ["a", "b"]
    assert third.search(query, 9) == open_index(path).search(query, 9)
    merge_segments(path)
    assert sorted(open_index(path, opened=third).ids) == ["b", "c", "d"]
