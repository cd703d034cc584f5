"""An index moves to another model while it is searched and updated; a kill leaves one of the two."""

from __future__ import annotations

import os
import shutil
import zlib
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tilefold import retrieval as r
from tilefold._internal import files as _files
from tilefold._internal.files import InUseError, lock_path
from tilefold.retrieval.common.provenance import Provenance, provenance_of
from tilefold.retrieval.data.documents import Document
from tilefold.retrieval.data.pages import Page
from tilefold.retrieval.data.passages import Passages
from tilefold.retrieval.errors import DataError
from tilefold.retrieval.index import migration as migration_module
from tilefold.retrieval.index.changes import ChangeLog, migration_folder
from tilefold.retrieval.index.migration import Migration, MigrationRecord, recorded_model
from tilefold.retrieval.index.opening import open_index

EXIT_CODE_OF_KILLED = 9
VOCABULARY_SIZE = 97
WORDS = ["tea", "kettle", "cup", "water", "steam", "leaf", "spoon", "sugar", "milk", "pot"]


class WordEncoder:
    """A model of sparse vectors: each word has a term and a weight that depend on the model."""

    def __init__(self, name: str, failing: frozenset[str] = frozenset()) -> None:
        self.name = name
        self.fingerprint = name * 64
        self.failing = failing
        self.encoded: list[str] = []

    def vectors(self, texts: Mapping[str, str]) -> r.SparseVectors:
        rows: dict[str, dict[int, float]] = {}
        for text_id, text in texts.items():
            if text_id in self.failing:
                continue
            row: dict[int, float] = {}
            for word in text.split():
                digest = zlib.crc32(f"{self.name} {word}".encode())
                row[digest % VOCABULARY_SIZE] = 1.0 + digest % 13
            rows[text_id] = row
        vectors = r.SparseVectors.from_rows(rows, VOCABULARY_SIZE, self.name * 64)
        provenance = provenance_of(texts)
        vectors.provenance = Provenance(
            self.fingerprint,
            provenance.texts_sha256,
            provenance.passages,
        )
        return vectors

    def encode(self, texts: Mapping[str, str], folder: Path) -> r.SparseVectors:
        self.encoded.extend(texts)
        r.write_vectors(self.vectors(texts), folder, overwrite=True)
        return r.read_vectors(folder)


OLD = WordEncoder("a")
NEW = WordEncoder("b")


def document(number: int, revision: int = 0) -> Document:
    """Document ``d<number>``, whose words depend on the number and the revision."""
    words = [WORDS[(number + revision * step) % len(WORDS)] for step in range(1, 5)]
    return Document(f"d{number}", "", " ".join([*words, f"n{number}", f"r{revision}"]))


def by_id(*documents: Document) -> dict[str, Document]:
    return {item.id: item for item in documents}


def contents(documents: Mapping[str, Document]) -> dict[str, str]:
    return {name: item.contents for name, item in documents.items()}


DOCUMENTS = by_id(*map(document, range(30)))
# An update that replaces two documents and adds one, and another that replaces two of these.
FIRST_UPDATE = by_id(document(3, 1), document(4, 1), document(40))
SECOND_UPDATE = by_id(document(3, 2), document(40, 1), document(41))


def update(
    index: Path,
    encoder: WordEncoder,
    documents: Mapping[str, Document],
    delete: tuple[str, ...] = (),
) -> None:
    """Update an index with documents that a model encodes."""
    r.update_index(index, encoder.vectors(contents(documents)), delete, documents=documents)


def files_of(folder: Path) -> dict[str, bytes]:
    """Path in the folder -> content, of all files."""
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


def fresh_index(folder: Path, encoder: WordEncoder, *updates: Mapping[str, Document]) -> Path:
    """Build an index of the documents, update it, and merge it."""
    r.build_index(encoder.vectors(contents(DOCUMENTS))).save(folder)
    for documents in updates:
        update(folder, encoder, documents)
    r.merge_segments(folder)
    return folder


def start(index: Path, encoder: WordEncoder = NEW) -> Migration:
    return Migration.start(
        index,
        DOCUMENTS,
        encoder,
        model="models/new",
        data="articles",
        old_model="models/old",
    )


def migrate(index: Path) -> None:
    """Start or resume a migration, and cut over."""
    record = MigrationRecord.read(index)
    migration = start(index) if record is None else Migration(index, record)
    if migration.is_cut_over:
        return
    migration.build(DOCUMENTS, NEW)
    migration.exchange(NEW)


@pytest.fixture
def live(tmp_path: Path) -> Path:
    """An index of the old model."""
    return fresh_index(tmp_path / "live", OLD)


def test_after_the_cut_over_the_index_equals_a_fresh_one_bit_for_bit(
    live: Path,
    tmp_path: Path,
) -> None:
    old_files = files_of(live)
    migration = start(live)
    migration.build(DOCUMENTS, NEW)
    assert migration.is_built
    assert files_of(live) == old_files, "the old index is searched until the cut-over"
    migration.exchange()
    assert migration.is_cut_over
    assert files_of(live) == files_of(fresh_index(tmp_path / "fresh", NEW))
    assert files_of(migration.standby) == old_files


def test_after_the_cut_over_a_seismic_index_equals_a_fresh_one_but_for_its_random_clusters(
    tmp_path: Path,
) -> None:
    pytest.importorskip("seismic")
    live = tmp_path / "live"
    r.build_index(OLD.vectors(contents(DOCUMENTS)), "seismic", n_postings=200).save(live)
    old_files = files_of(live)
    migrate(live)
    fresh = tmp_path / "fresh"
    r.build_index(NEW.vectors(contents(DOCUMENTS)), "seismic", n_postings=200).save(fresh)
    live_files = files_of(live)
    fresh_files = files_of(fresh)
    for name in ("index.json", "seismic.index.seismic"):  # the checksum and the clusters
        del live_files[name], fresh_files[name]
    assert live_files == fresh_files
    live_index: Any = r.load_index(live)
    other_index: Any = r.load_index(fresh)
    assert live_index.options == other_index.options
    assert np.array_equal(live_index.stored().indices, other_index.stored().indices)
    assert np.array_equal(live_index.stored().data, other_index.stored().data)
    Migration.open(live).exchange()
    assert files_of(live) == old_files


def test_a_rollback_restores_the_old_index_bit_for_bit(live: Path) -> None:
    old_files = files_of(live)
    migrate(live)
    Migration.open(live).exchange()
    assert files_of(live) == old_files
    assert not Migration.open(live).is_cut_over
    Migration.open(live).exchange()
    assert Migration.open(live).is_cut_over


def test_documents_that_arrive_meanwhile_are_in_both_indexes(live: Path, tmp_path: Path) -> None:
    migration = start(live)
    update(live, OLD, FIRST_UPDATE)
    migration.build(DOCUMENTS, NEW)
    assert migration.catch_up(NEW) == 3
    assert migration.n_changes() == 0
    update(live, OLD, SECOND_UPDATE, delete=("d1", "unknown"))
    r.merge_segments(live)
    assert migration.n_changes() == 1
    migration.exchange(NEW)

    fresh = fresh_index(tmp_path / "fresh", NEW, FIRST_UPDATE)
    update(fresh, NEW, SECOND_UPDATE, delete=("d1",))
    r.merge_segments(fresh)
    assert files_of(live) == files_of(fresh)
    standby: Any = open_index(migration.standby)
    assert set(standby.ids) == set(open_index(live).ids)  # type: ignore[union-attr]


def test_a_rollback_brings_documents_that_arrived_after_the_cut_over(
    live: Path,
    tmp_path: Path,
) -> None:
    migrate(live)
    migration = Migration.open(live)
    update(live, NEW, FIRST_UPDATE)
    with pytest.raises(DataError, match=r"3 documents were added or replaced.*Give the old model"):
        migration.exchange()
    with pytest.raises(DataError, match="expected the old model of the migration"):
        migration.exchange(NEW)
    assert migration.is_cut_over
    migration.exchange(OLD)
    assert files_of(live) == files_of(fresh_index(tmp_path / "fresh", OLD, FIRST_UPDATE))


def test_deletions_after_the_cut_over_need_no_model_for_the_rollback(live: Path) -> None:
    migrate(live)
    r.update_index(live, delete=["d5"])
    Migration.open(live).exchange()
    index: Any = open_index(live)
    assert set(index.ids) == DOCUMENTS.keys() - {"d5"}


def test_an_update_during_a_migration_needs_the_documents(live: Path) -> None:
    vectors = OLD.vectors(contents(FIRST_UPDATE))
    r.update_index(live, vectors)  # without a migration, the vectors are enough
    shutil.rmtree(live)
    fresh_index(live, OLD)
    start(live)
    before = files_of(live)
    with pytest.raises(ValueError, match="documents: expected the documents of all new vectors"):
        r.update_index(live, vectors)
    with pytest.raises(ValueError, match="1 are missing, such as 'd40'"):
        r.update_index(live, vectors, documents=by_id(document(3, 1), document(4, 1)))
    assert files_of(live) == before
    r.update_index(live, delete=["d1"])


def test_passages_are_migrated_as_passages(tmp_path: Path) -> None:
    passages = Passages(3)
    live = tmp_path / "live"
    r.build_index(OLD.vectors(passages.of(DOCUMENTS))).save(live)
    migration = start(live)
    update_vectors = OLD.vectors(passages.of(FIRST_UPDATE))
    r.update_index(live, update_vectors, documents=FIRST_UPDATE)
    r.update_index(live, delete=["d40#1:0-13", "d9"])
    migration.build(DOCUMENTS, NEW)
    migration.exchange(NEW)
    index: Any = open_index(live)
    standby: Any = open_index(migration.standby)
    assert index.provenance.passages == str(passages)
    assert set(index.ids) == set(standby.ids)
    assert not any(name.startswith("d9#") for name in index.ids)


def test_metadata_are_migrated_with_those_of_documents_that_arrive(tmp_path: Path) -> None:
    documents = by_id(
        Document("d0", "", "tea", {"lang": "de"}),
        Document("d1", "", "kettle"),
    )
    live = tmp_path / "live"
    r.build_index(OLD.vectors(contents(documents)), metadata={"d0": {"lang": "de"}}).save(live)
    migration = Migration.start(live, documents, NEW, model="m", data="d")
    added = by_id(Document("d2", "", "cup", {"lang": "fr"}))
    r.update_index(
        live,
        OLD.vectors(contents(added)),
        metadata={"d2": {"lang": "fr"}},
        documents=added,
    )
    migration.build(documents, NEW)
    migration.exchange(NEW)
    query = NEW.vectors({"q": "tea cup kettle"})
    for lang, expected in (("de", "d0"), ("fr", "d2")):
        (hits,) = r.load_index(live).search(query, 5, where={"lang": lang})
        assert [hit.id for hit in hits] == [expected]


def test_encoding_is_resumed_also_if_the_collection_has_grown_meanwhile(live: Path) -> None:
    migration = start(live)
    added = by_id(document(40), document(41))
    update(live, OLD, added)
    grown = {**DOCUMENTS, **added}
    migration.build(grown, NEW)
    assert list(r.load_index(migration.standby).ids) == list(DOCUMENTS)
    migration.exchange(NEW)
    index: Any = open_index(live)
    assert set(index.ids) == set(grown)


def test_encoding_is_resumed_if_updates_have_changed_the_same_documents_as_the_collection(
    live: Path,
    tmp_path: Path,
) -> None:
    migration = start(live)
    update(live, OLD, FIRST_UPDATE, delete=("d7",))
    changed = {**DOCUMENTS, **FIRST_UPDATE}
    del changed["d7"]
    migration.build(changed, NEW)
    migration.exchange(NEW)
    fresh = tmp_path / "fresh"
    r.build_index(NEW.vectors(contents(DOCUMENTS))).save(fresh)
    update(fresh, NEW, FIRST_UPDATE, delete=("d7",))
    r.merge_segments(fresh)
    assert files_of(live) == files_of(fresh)


@pytest.mark.parametrize(
    "documents",
    [
        pytest.param(
            {name: item for name, item in DOCUMENTS.items() if name != "d7"},
            id="missing document",
        ),
        pytest.param(DOCUMENTS | by_id(document(7, 1)), id="changed text"),
    ],
)
def test_a_collection_that_no_update_has_changed_is_not_resumed(
    live: Path,
    documents: dict[str, Document],
) -> None:
    migration = start(live)
    with pytest.raises(DataError, match=r"but 1 are missing or have changed \(d7\)"):
        migration.build(documents, NEW)
    assert not migration.is_built


@pytest.mark.parametrize(
    ("documents", "message"),
    [
        pytest.param({"d0": document(0)}, r"got 1; 29 are missing \(d1, d10, d11", id="too few"),
        pytest.param(
            DOCUMENTS | FIRST_UPDATE,
            r"1 are not in the index \(d40\)",
            id="too many",
        ),
    ],
)
def test_a_collection_of_other_documents_starts_no_migration(
    live: Path,
    documents: dict[str, Document],
    message: str,
) -> None:
    with pytest.raises(DataError, match=message):
        Migration.start(live, documents, NEW, model="m", data="d")
    assert not migration_folder(live).exists()


def test_documents_that_the_index_lacks_at_the_start_are_left_out(live: Path) -> None:
    Migration.start(live, DOCUMENTS | FIRST_UPDATE, NEW, model="m", data="d", absent=["d40", "d3"])
    migration = Migration.open(live)
    assert migration.record.n_documents == len(DOCUMENTS)
    update(live, OLD, FIRST_UPDATE)
    migration.build(DOCUMENTS | FIRST_UPDATE, NEW)
    migration.exchange(NEW)
    assert set(r.load_index(live).ids) == DOCUMENTS.keys() | FIRST_UPDATE.keys()


def test_two_migrations_at_once_are_refused(live: Path) -> None:
    migration = start(live)
    with pytest.raises(FileExistsError, match="expected no migration of"):
        start(live, WordEncoder("c"))
    with pytest.raises(DataError, match="expected the new model of the migration"):
        migration.build(DOCUMENTS, WordEncoder("c"))

    class Interrupting(WordEncoder):
        def encode(self, texts: Mapping[str, str], folder: Path) -> r.SparseVectors:
            exit_code = run_in_child(lambda: Migration.open(live).build(DOCUMENTS, NEW))
            assert exit_code == 1
            return super().encode(texts, folder)

    migration.build(DOCUMENTS, Interrupting("b"))
    assert migration.is_built


def run_in_child(function: Callable[[], object]) -> int:
    """Run a function in a fork; returns 0, or 1 if it raised an InUseError."""
    child = os.fork()
    if child == 0:
        code = 2
        try:
            function()
            code = 0
        except InUseError:
            code = 1
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_indexes_that_cannot_be_migrated_are_refused(live: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="got one that this model has encoded"):
        start(live, OLD)
    (tmp_path / "link").symlink_to(live)
    with pytest.raises(DataError, match="got a symbolic link"):
        start(tmp_path / "link")
    r.BM25Index.build(contents(DOCUMENTS)).save(tmp_path / "words")
    with pytest.raises(DataError, match="BM25, which has no model"):
        start(tmp_path / "words")


def test_the_cut_over_waits_for_the_new_index_and_refuses_a_damaged_one(live: Path) -> None:
    migration = start(live)
    before = files_of(live)
    with pytest.raises(FileNotFoundError, match="the new index is not built yet"):
        migration.exchange(NEW)
    migration.build(DOCUMENTS, NEW)
    weights = migration.standby / "weights.npy"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + b"?")
    with pytest.raises(DataError, match=r"should take over is damaged: .*weights\.npy"):
        migration.exchange(NEW)
    assert files_of(live) == before
    weights.write_bytes(content)
    migration.exchange(NEW)


def test_a_document_that_the_new_model_cannot_encode_stops_the_cut_over(live: Path) -> None:
    encoder = WordEncoder("b", failing=frozenset({"d3"}))
    migration = start(live, encoder)
    migration.build(DOCUMENTS, encoder)
    with pytest.raises(DataError, match=r"1 are missing \(d3\), and 0 are too many"):
        migration.exchange(encoder)
    r.update_index(live, delete=["d3"])
    migration.exchange(encoder)
    assert r.load_index(live).n_documents == len(DOCUMENTS) - 1


@pytest.mark.parametrize(
    ("unit", "texts"),
    [
        pytest.param("documents", contents, id="documents"),
        pytest.param("passages", Passages(3).of, id="passages"),
    ],
)
def test_a_replaced_document_that_the_new_model_cannot_encode_stops_the_cut_over(
    tmp_path: Path,
    unit: str,
    texts: Callable[[Mapping[str, Document]], Mapping[str, str]],
) -> None:
    live = tmp_path / "live"
    r.build_index(OLD.vectors(texts(DOCUMENTS))).save(live)
    migration = start(live)
    migration.build(DOCUMENTS, NEW)
    r.update_index(live, OLD.vectors(texts(FIRST_UPDATE)), documents=FIRST_UPDATE)
    failing_texts = frozenset(texts(by_id(document(3, 1))))
    message = rf"expected the {unit} of {live}; {len(failing_texts)} are missing \(d3"
    with pytest.raises(DataError, match=message):
        migration.exchange(WordEncoder("b", failing=failing_texts))
    assert not migration.is_cut_over


def test_replaced_documents_of_which_the_new_model_encodes_none_stop_the_cut_over(
    live: Path,
) -> None:
    migration = start(live)
    migration.build(DOCUMENTS, NEW)
    update(live, OLD, by_id(document(3, 1)))
    with pytest.raises(DataError, match=r"1 are missing \(d3\)"):
        migration.exchange(WordEncoder("b", failing=frozenset({"d3"})))
    assert not migration.is_cut_over


def test_an_index_that_was_built_again_meanwhile_stops_the_cut_over(live: Path) -> None:
    migration = start(live)
    migration.build(DOCUMENTS, NEW)
    r.build_index(OLD.vectors(contents(SECOND_UPDATE))).save(live, overwrite=True)
    with pytest.raises(DataError, match=r"2 are missing.*29 are too many"):
        migration.exchange(NEW)


def test_a_file_system_without_an_atomic_exchange_is_refused(
    live: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    migration = start(live)
    migration.build(DOCUMENTS, NEW)
    before = files_of(live)
    monkeypatch.setattr(migration_module, "exchange", lambda left, right: False)
    with pytest.raises(OSError, match=r"could not be exchanged with .* in one step"):
        migration.exchange(NEW)
    assert files_of(live) == before


def test_a_full_disk_leaves_the_old_index_and_the_migration_is_resumed(
    live: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    migration = start(live)
    before = files_of(live)

    def fail_to_save(*args: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("tilefold.retrieval.index.protocol.save_ids", fail_to_save)
        with pytest.raises(_files.DiskFullError, match="the disk or the quota is full"):
            migration.build(DOCUMENTS, NEW)
    assert files_of(live) == before
    assert not migration.is_built
    with monkeypatch.context() as patch:
        patch.setattr("tilefold.retrieval.index.changes.write_json_object", fail_to_save)
        with pytest.raises(_files.DiskFullError, match="the disk or the quota is full"):
            update(live, OLD, FIRST_UPDATE)
    assert r.load_index(live).n_documents == len(DOCUMENTS)
    migrate(live)


def test_a_discarded_migration_leaves_the_index_and_nothing_else(live: Path) -> None:
    before = files_of(live.parent)
    migration = start(live)
    migration.build(DOCUMENTS, NEW)
    migration.discard()
    assert files_of(live.parent) == before
    assert [entry.name for entry in live.parent.iterdir()] == ["live"]
    with pytest.raises(FileNotFoundError, match="expected a migration of"):
        Migration.open(live)


def test_a_migration_knows_the_model_of_the_index_that_is_searched(live: Path) -> None:
    assert recorded_model(live) is None
    migration = start(live)
    assert recorded_model(live) == "models/old"
    migration.build(DOCUMENTS, NEW)
    migration.exchange(NEW)
    assert recorded_model(live) == "models/new"


def test_the_cut_over_waits_for_a_running_update(
    live: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    migration = start(live)
    migration.build(DOCUMENTS, NEW)
    monkeypatch.setattr(migration_module, "_LOCK_SECONDS", 0.1)

    def cut_over() -> None:
        Migration.open(live).exchange(NEW)

    with lock_path(live):
        assert run_in_child(cut_over) == 1
    assert run_in_child(cut_over) == 0


@contextmanager
def dying_before(n_operations: int) -> Any:
    """Let this process die before it changes a name in a file system for the n-th time.

    Names change when a file or folder is created in one step, renamed, exchanged or removed.
    """
    remaining = n_operations

    def dying(function: Callable[..., Any]) -> Callable[..., Any]:
        def call_or_die(*args: Any, **options: Any) -> Any:
            nonlocal remaining
            if remaining == 0:
                os._exit(EXIT_CODE_OF_KILLED)
            remaining -= 1
            return function(*args, **options)

        return call_or_die

    with pytest.MonkeyPatch.context() as patch:
        for name in ("replace", "rename", "unlink", "rmdir", "mkdir"):
            patch.setattr(os, name, dying(getattr(os, name)))
        patch.setattr(_files, "exchange", dying(_files.exchange))
        patch.setattr(migration_module, "exchange", _files.exchange)
        yield


def run_killed(function: Callable[[], object], n_operations: int) -> int:
    """Run a function in a fork that dies before an operation; returns the exit code."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            with dying_before(n_operations):
                function()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def kill_at_each_operation(
    prepared: Path,
    function: Callable[[Path], object],
    check: Callable[[Path], None],
    step: int = 1,
) -> int:
    """Kill a function at each of its operations, each time in a new copy of a folder.

    Args:
        prepared: the folder with an index ``live`` and what belongs to it.
        function: called with the index in the copy.
        check: called with the index after each kill, and after the call that was not killed.
        step: distance of the operations at which the function is killed.

    Returns:
        Number of kills.
    """
    for n_kills, n_operations in enumerate(range(0, 10_000, step)):
        copy = prepared.parent / f"copy-{n_operations}"
        shutil.copytree(prepared, copy)
        exit_code = run_killed(lambda folder=copy: function(folder / "live"), n_operations)  # type: ignore[misc]
        assert exit_code in (0, EXIT_CODE_OF_KILLED)
        check(copy / "live")
        shutil.rmtree(copy)
        if exit_code == 0:
            return n_kills
    raise AssertionError("the function did not end")


@pytest.fixture
def prepared(tmp_path: Path) -> Path:
    folder = tmp_path / "prepared"
    folder.mkdir()
    fresh_index(folder / "live", OLD)
    return folder


needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
STEPS = pytest.mark.parametrize(
    "step",
    [pytest.param(41, id="some"), pytest.param(1, id="all", marks=pytest.mark.slow)],
)


@needs_fork
@STEPS
def test_a_kill_of_the_migration_leaves_the_old_or_the_new_index_and_it_is_resumed(
    prepared: Path,
    tmp_path: Path,
    step: int,
) -> None:
    old_files = files_of(prepared / "live")
    new_files = files_of(fresh_index(tmp_path / "fresh", NEW))
    states: list[dict[str, bytes]] = []

    def check(live: Path) -> None:
        state = files_of(live)
        assert state in (old_files, new_files)
        states.append(state)
        migrate(live)
        assert files_of(live) == new_files
        Migration.open(live).exchange()
        assert files_of(live) == old_files

    assert kill_at_each_operation(prepared, migrate, check, step) > 1
    assert states[0] == old_files
    assert states[-1] == new_files


@needs_fork
@STEPS
def test_after_a_kill_of_an_update_both_indexes_have_its_documents_or_none_has(
    prepared: Path,
    tmp_path: Path,
    step: int,
) -> None:
    migration = start(prepared / "live")
    migration.build(DOCUMENTS, NEW)
    update(prepared / "live", OLD, FIRST_UPDATE)
    expected = {
        False: files_of(fresh_index(tmp_path / "without", NEW, FIRST_UPDATE)),
        True: files_of(fresh_index(tmp_path / "with", NEW, FIRST_UPDATE, SECOND_UPDATE)),
    }
    outcomes: list[bool] = []

    def check(live: Path) -> None:
        index: Any = open_index(live)
        has_update = "d41" in set(index.ids)
        outcomes.append(has_update)
        r.merge_segments(live)  # changes the generation, by which a killed update is recognised
        migrate(live)
        assert files_of(live) == expected[has_update]

    def update_again(live: Path) -> None:
        update(live, OLD, SECOND_UPDATE)

    assert kill_at_each_operation(prepared, update_again, check, step) > 0
    assert outcomes[0] is False
    assert outcomes[-1] is True


@needs_fork
@STEPS
def test_a_kill_while_changes_are_repeated_loses_none(
    prepared: Path,
    tmp_path: Path,
    step: int,
) -> None:
    migration = start(prepared / "live")
    migration.build(DOCUMENTS, NEW)
    update(prepared / "live", OLD, FIRST_UPDATE)
    update(prepared / "live", OLD, SECOND_UPDATE)
    fresh = fresh_index(tmp_path / "fresh", NEW, FIRST_UPDATE, SECOND_UPDATE)

    def check(live: Path) -> None:
        migrate(live)
        index: Any = open_index(live)
        assert list(index.ids) == list(r.load_index(fresh).ids)
        assert files_of(live) == files_of(fresh)

    def catch_up(live: Path) -> None:
        Migration.open(live).catch_up(NEW)

    assert kill_at_each_operation(prepared, catch_up, check, step) > 1


@needs_fork
@STEPS
def test_a_kill_of_a_rollback_or_of_a_discard_leaves_one_of_the_two_indexes(
    prepared: Path,
    step: int,
) -> None:
    old_files = files_of(prepared / "live")
    migrate(prepared / "live")
    new_files = files_of(prepared / "live")

    def roll_back_and_discard(live: Path) -> None:
        migration = Migration.open(live)
        migration.exchange()
        migration.discard()

    def check(live: Path) -> None:
        assert files_of(live) in (old_files, new_files)
        migrate(live)
        assert files_of(live) == new_files

    assert kill_at_each_operation(prepared, roll_back_and_discard, check, step) > 1


def test_the_log_is_empty_without_a_migration(live: Path) -> None:
    update(live, OLD, FIRST_UPDATE)
    assert not ChangeLog(live).is_active
    assert not ChangeLog(live).folder.exists()


def test_page_images_are_refused(live: Path, tmp_path: Path) -> None:
    pages = {name: Document(name, "", "", page=Page(tmp_path / "p.png")) for name in DOCUMENTS}
    with pytest.raises(DataError, match="documents: expected texts, got the page image 'd0'"):
        Migration.start(live, pages, NEW, model="m", data="d")
    start(live)
    page = {"d40": Document("d40", "", "", page=Page(tmp_path / "p.png"))}
    vectors = OLD.vectors(contents(by_id(document(40))))
    with pytest.raises(DataError, match="got the page image 'd40'"):
        r.update_index(live, vectors, documents=page)
    assert r.load_index(live).n_documents == len(DOCUMENTS)
