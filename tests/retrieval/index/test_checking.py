"""A check of an index finds damage, inconsistent parts and orphans, and changes nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.retrieval.conftest import dense_folder
from tilefold import retrieval as r
from tilefold._internal.files import InUseError, lock_path
from tilefold.retrieval.common.files import read_json_object, write_json_object
from tilefold.retrieval.index import checking
from tilefold.retrieval.index.checking import MergeSavings, check_index
from tilefold.retrieval.index.generations import read_generation

MakeVectors = Callable[..., r.SparseVectors]


def flip_byte(file: Path, position: int = -1) -> None:
    """Change one byte of a file, the last one by default."""
    content = bytearray(file.read_bytes())
    content[position] ^= 1
    file.write_bytes(content)


def files_of(folder: Path) -> dict[str, bytes]:
    """Path in the folder -> content, of all files."""
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in folder.rglob("*")
        if file.is_file()
    }


@pytest.fixture
def updated(tmp_path: Path, make_vectors: MakeVectors) -> Path:
    """An index of 50 documents with a segment of 10, after which 5 documents were deleted."""
    path = tmp_path / "index"
    r.build_index(make_vectors(50)).save(path)
    r.update_index(path, make_vectors(10, seed=1, prefix="new"))
    r.update_index(path, delete=["d1", "d2", "d3", "d4", "new0"])
    return path


def test_an_intact_index_is_reported_with_its_parts_and_not_changed(updated: Path) -> None:
    before = files_of(updated.parent)
    check = check_index(updated)
    assert check.is_intact
    assert not check.orphans
    assert (check.backend, check.n_documents) == ("exact", 55)
    assert check.generation == read_generation(updated).id
    parts = [(part.folder, part.n_documents, part.n_removed) for part in check.parts]
    assert parts == [("", 50, 4), ("00001", 10, 1)]
    assert files_of(updated.parent) == before


def test_the_savings_of_a_merge_are_the_removed_documents(updated: Path) -> None:
    check = check_index(updated)
    first, segment = check.parts
    n_bytes = first.n_bytes * 4 // 50 + segment.n_bytes * 1 // 10
    assert check.merge == MergeSavings(n_segments=1, n_removed=5, n_bytes=n_bytes)
    r.merge_segments(updated)
    assert check_index(updated).merge == MergeSavings(n_segments=0, n_removed=0, n_bytes=0)


def test_every_damaged_file_of_an_index_is_found(updated: Path) -> None:
    """Also in files that a search checks only when a query reads them."""
    for folder in (updated, updated / "segments" / "00001"):
        for name in json.loads((folder / "index.json").read_text())["files"]:
            flip_byte(folder / name)
            check = check_index(updated)
            assert check.damage == [
                f"{folder / name}: damaged; its checksum is not the one in index.json."
            ]
            assert check.merge is None, "a damaged index cannot be merged"
            flip_byte(folder / name)
    assert check_index(updated).is_intact


@pytest.mark.parametrize(
    ("damaged_name", "message"),
    [
        pytest.param("index.json", "the checksum does not match", id="manifest"),
        pytest.param("segments/current.json", "the checksum does not match", id="list of parts"),
        pytest.param("segments/00001/index.json", "the checksum does not match", id="segment"),
    ],
)
def test_damaged_manifests_are_found(updated: Path, damaged_name: str, message: str) -> None:
    file = updated / damaged_name
    file.write_text(file.read_text().replace('"checksum": "', '"checksum": "0'))
    damage = check_index(updated).damage
    assert len(damage) == 1
    assert message in damage[0]
    assert damaged_name in damage[0]


def test_a_missing_file_and_a_missing_segment_are_damage(updated: Path) -> None:
    (updated / "ids.npy").unlink()
    segment = updated / "segments" / "00001"
    segment.rename(updated.parent / "moved")
    damage = check_index(updated).damage
    assert damage[0] == f"{updated / 'ids.npy'}: missing; index.json lists it."
    assert str(segment) in damage[1]


def test_a_document_in_two_parts_is_damage(updated: Path, make_vectors: MakeVectors) -> None:
    r.update_index(updated, make_vectors(3, seed=2))  # replaces d0, d1 and d2
    list_file = updated / "segments" / "current.json"
    listed = read_json_object(list_file, "")
    listed["parts"][0]["removed"].remove("d0")
    write_json_object(list_file, listed)
    (problem,) = check_index(updated).damage
    assert problem.endswith(f"document 'd0' is also in {updated}.")


def test_a_removed_document_that_is_not_in_its_part_is_damage(updated: Path) -> None:
    list_file = updated / "segments" / "current.json"
    listed = read_json_object(list_file, "")
    listed["parts"][1]["removed"].append("nobody")
    write_json_object(list_file, listed)
    (problem,) = check_index(updated).damage
    assert "1 removed documents of current.json are not in this part" in problem


def test_files_of_killed_updates_are_orphans_and_no_damage(updated: Path) -> None:
    for orphan in (updated / "segments" / "00002", updated.parent / ".index.abcd1234.tilefold.tmp"):
        orphan.mkdir()
        (orphan / "weights.npy").write_bytes(b"x" * 7)
    (updated / "notes.txt").write_bytes(b"abc")
    (updated.parent / ".index.b.abcd1234.tilefold.tmp").mkdir()  # of an index named index.b
    check = check_index(updated)
    assert check.is_intact
    sizes = {Path(orphan.path).name: orphan.n_bytes for orphan in check.orphans}
    assert sizes == {"notes.txt": 3, "00002": 7, ".index.abcd1234.tilefold.tmp": 7}


@pytest.mark.parametrize("writer_path", ["index", "link", "."])
@pytest.mark.parametrize("checked_path", ["index", "link", "."])
def test_files_of_a_running_update_are_no_orphans(
    updated: Path,
    monkeypatch: pytest.MonkeyPatch,
    writer_path: str,
    checked_path: str,
) -> None:
    (updated.parent / "link").symlink_to(updated)
    (updated / "segments" / "00002").mkdir()
    monkeypatch.chdir(updated)
    paths = {"index": updated, "link": updated.parent / "link", ".": Path()}
    with lock_path(paths[writer_path]):
        check = check_index(paths[checked_path])
    assert check.is_intact
    assert check.is_being_written
    assert not check.orphans


def test_files_of_an_update_that_begins_during_the_check_are_no_orphans(
    updated: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original = checking._find_unlisted
    with ExitStack() as stack:

        def begin_update(folder: Path, names: Collection[str]) -> Iterator[Path]:
            stack.enter_context(lock_path(updated))
            (updated / "segments" / "00002").mkdir()
            yield from original(folder, names)

        monkeypatch.setattr(checking, "_find_unlisted", begin_update)
        check = check_index(updated)
    assert check.is_being_written
    assert not check.orphans


def test_an_index_that_changes_during_each_check_is_refused(
    updated: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original = checking._check_once

    def check_and_delete(folder: Path) -> checking.IndexCheck:
        check = original(folder)
        r.update_index(updated, delete=[str(r.load_index(updated).ids[0])])
        return check

    monkeypatch.setattr(checking, "_check_once", check_and_delete)
    with pytest.raises(InUseError, match="was changed during each of 3 checks"):
        check_index(updated)


def test_a_folder_without_an_index_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="expected an index"):
        check_index(tmp_path)


def test_indexes_of_other_backends_are_checked(tmp_path: Path) -> None:
    r.BM25Index.build({"a": "tea cups", "b": "kettles"}).save(tmp_path / "bm25")
    r.DenseIndex.build(dense_folder(tmp_path / "v", ["a", "b"], seed=0)).save(tmp_path / "dense")
    tokens = r.TokenVectors.pack(["a", "b"], [unit_tokens(3), unit_tokens(5)], 8, "fp16")
    r.LateIndex.build(tokens, tmp_path / "late")
    for backend in ("bm25", "dense", "late"):
        check = check_index(tmp_path / backend)
        assert (check.backend, check.n_documents) == (backend, 2)
        assert check.is_intact, check.damage
        assert not check.orphans
        name = sorted(json.loads((tmp_path / backend / "index.json").read_text())["files"])[-1]
        flip_byte(tmp_path / backend / name)
        assert not check_index(tmp_path / backend).is_intact


def unit_tokens(n_tokens: int) -> object:
    """Token vectors ``[n_tokens, 8]`` of unit length."""
    import torch

    generator = torch.Generator().manual_seed(n_tokens)
    return torch.nn.functional.normalize(torch.randn(n_tokens, 8, generator=generator), dim=-1)
