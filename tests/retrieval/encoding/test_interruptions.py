"""Long work that is interrupted, killed, or meets another process or a full disk."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests import programs
from tests.inside import LOCK, InUseError, atomic_file, lock_path, swap_directory
from tests.refusals import refused
from tilefold import retrieval as r
from tilefold.retrieval.errors import DataError

TEXTS = {f"d{i}": "cats sleep " * (i + 1) for i in range(8)}
HOLD = """
import sys
from pathlib import Path
from tilefold._internal import files as _files
with getattr(_files, sys.argv[1])(Path(sys.argv[2])):
    print("held", flush=True)
    sys.stdin.read()
"""
KILLED = """
import os, signal, sys
from pathlib import Path
from tilefold._internal.files import atomic_directory, atomic_file
path = Path(sys.argv[1])
with atomic_file(path) if path.suffix else atomic_directory(path, own_names=(), overwrite=False) as written:
    (written if path.suffix else written / "half").write_text("half a run")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def stop_at(count: int) -> Any:
    def stop(done: int, total: int) -> None:
        if done == count:
            raise KeyboardInterrupt

    return stop


def test_settings_may_change_until_something_is_written(splade: Any, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        r.encode_collection(splade, TEXTS, tmp_path, shard_size=8, top_k=20, progress=stop_at(0))
    assert r.encode_collection(splade, TEXTS, tmp_path, shard_size=4, top_k=20).complete
    with pytest.raises(DataError, match="shard_size: 4 before, 8 now"):
        r.encode_collection(splade, TEXTS, tmp_path, shard_size=8, top_k=20)


@contextmanager
def held(how: str, path: Path) -> Iterator[None]:
    """Another process that holds `path`, and is killed."""
    command = [sys.executable, "-c", HOLD, how, str(path)]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        yield
        process.kill()


def test_a_folder_that_another_process_writes_to_is_refused(splade: Any, tmp_path: Path) -> None:
    r.encode_collection(splade, TEXTS, tmp_path, top_k=20)
    before = (tmp_path / "manifest.json").read_text()
    with held("lock_folder", tmp_path):
        with pytest.raises(InUseError, match="another process is writing there"):
            r.encode_collection(splade, TEXTS, tmp_path, top_k=5, resume=False)
        assert (tmp_path / "manifest.json").read_text() == before
    assert r.encode_collection(splade, TEXTS, tmp_path, top_k=5, resume=False).complete, (
        "a lock ends with its process"
    )
    assert not (tmp_path / LOCK).exists()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the process that is killed is forked")
@pytest.mark.parametrize("backend", ["exact", "bm25", "seismic"])
def test_a_saved_index_is_whole_after_a_kill_at_any_moment(
    backend: str,
    tmp_path: Path,
    make_vectors: Any,
) -> None:
    if backend == "bm25":
        built: list[Any] = [
            r.BM25Index.build({f"{side}{i}": f"cats sleep {i}" for i in range(50)}) for side in "ab"
        ]
    else:
        built = [r.build_index(make_vectors(50, prefix=side), backend) for side in "ab"]
    load: Any = r.BM25Index.load if backend == "bm25" else r.load_index
    queries: Any = {"q": "cats"} if backend == "bm25" else make_vectors(3, seed=1)
    right = [index.search(queries, k=5) for index in built]
    assert right[0] != right[1]
    built[0].save(tmp_path / "index")
    for _ in range(4):
        child = os.fork()
        if child == 0:
            while True:
                for index in built:
                    index.save(tmp_path / "index", overwrite=True)
        time.sleep(random.uniform(0.0, 0.15))  # noqa: S311
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        assert load(tmp_path / "index").search(queries, k=5) in right


@pytest.mark.parametrize("at_once", [True, False])
def test_a_swapped_directory_leaves_nothing_beside_it(
    at_once: bool,
    tmp_path: Path,
    monkeypatch: Any,
) -> None:
    if not at_once:  # a system or file system without it
        monkeypatch.setattr("tilefold._internal.files.exchange", lambda one, other: False)
    for name in ("new", "there"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).write_text("")
    swap_directory(tmp_path / "new", tmp_path / "there")
    assert [str(entry.relative_to(tmp_path)) for entry in sorted(tmp_path.rglob("*"))] == [
        "there",
        "there/new",
    ]


def test_what_a_killed_save_left_is_removed_by_the_next_of_any_name(
    tmp_path: Path,
    make_vectors: Any,
) -> None:
    assert programs.run("-c", KILLED, tmp_path / "index").returncode == -signal.SIGKILL
    assert {entry.name[: len(".index.")] for entry in tmp_path.iterdir()} == {".index."}
    r.build_index(make_vectors(3), "exact").save(tmp_path / "index")
    assert [entry.name for entry in tmp_path.iterdir()] == ["index"]
    shutil.rmtree(tmp_path / "index")
    assert programs.run("-c", KILLED, tmp_path / "bm25.trec").returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    assert (left / "bm25.trec").read_text() == "half a run"
    (tmp_path / ".notes.tmp").write_text("of another program")
    with atomic_file(tmp_path / "run.trec") as first, atomic_file(tmp_path / "run.jsonl") as second:
        assert not left.exists() and first.parent.exists(), "that of a living process stays"
        second.write_text("{}")
        first.write_text("a run")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [
        ".notes.tmp",
        "run.jsonl",
        "run.trec",
    ]


def test_a_file_that_fails_leaves_the_former_one_alone(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "run").write_text("whole")
    with pytest.raises(KeyError), atomic_file(tmp_path / "run") as file:
        file.write_text("half")
        raise KeyError
    assert [(entry.name, entry.read_text()) for entry in tmp_path.iterdir()] == [("run", "whole")]
    former = os.umask(0o027)
    try:
        with monkeypatch.context() as patch, atomic_file(tmp_path / "run") as file:
            patch.setattr(
                os,
                "umask",
                lambda mask: pytest.fail("files of other threads are made with this one"),
            )
            file.chmod(0o600)
    finally:
        os.umask(former)
    assert (tmp_path / "run").stat().st_mode & 0o777 == 0o640


def test_an_index_that_another_process_writes_is_refused(tmp_path: Path, make_vectors: Any) -> None:
    built = r.build_index(make_vectors(3), "exact")
    with held("lock_path", tmp_path / "index"):
        for index in (built, r.BM25Index.build({"a": "cats sleep"})):
            refused(
                InUseError,
                f"{tmp_path}/index: another process is writing it",
                index.save,
                tmp_path / "index",
            )
        built.save(tmp_path / "other")
    built.save(tmp_path / "index")
    with lock_path(tmp_path / "index"):
        built.save(tmp_path / "index", overwrite=True)
        assert len(list(tmp_path.iterdir())) == 3, "it is held until the outer block ends"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["index", "other"]


def test_a_writer_that_another_one_of_the_process_follows_is_not_in_its_way(
    tmp_path: Path,
    make_vectors: Any,
) -> None:
    first = r.SparseVectorWriter(tmp_path, r.VectorManifest(500, "f" * 64))
    first.write_shard(0, make_vectors(3))
    second = r.SparseVectorWriter(tmp_path, r.VectorManifest(500, "f" * 64), resume=True)
    assert second.reuse_shard(0)
    assert second.finish().n_documents == 3


def test_an_empty_temporary_folder_of_a_process_that_was_killed_before_it_locked_it_is_removed(
    tmp_path: Path,
) -> None:
    for name, age in (("old", 100.0), ("new", 0.0), ("full", 100.0)):
        folder = tmp_path / f".{name}.tilefold.tmp"
        folder.mkdir()
        if name == "full":
            (folder / "work").touch()
        os.utime(folder, (time.time() - age,) * 2)
    with atomic_file(tmp_path / "file"):
        pass
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [
        ".full.tilefold.tmp",
        ".new.tilefold.tmp",
        "file",
    ]
