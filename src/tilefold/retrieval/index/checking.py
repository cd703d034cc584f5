"""Check of a saved index: checksums, parts, unlisted files, and what a merge would save."""

from __future__ import annotations

import glob
from collections.abc import Collection, Iterator, Sequence, Set
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tilefold._internal.arguments import path_of
from tilefold._internal.files import (
    LOCK,
    SCRATCH,
    InUseError,
    lock_directory_of,
    lock_folder,
    sha256_file,
)
from tilefold.retrieval.common.files import Json, check_folder
from tilefold.retrieval.common.provenance import Provenance
from tilefold.retrieval.errors import DataError
from tilefold.retrieval.index import LATE
from tilefold.retrieval.index.generations import read_generation
from tilefold.retrieval.index.opening import open_index
from tilefold.retrieval.index.protocol import (
    CANDIDATES_FOLDER,
    MANIFEST_NAME,
    SEGMENTS,
    StoredIds,
    read_description,
)
from tilefold.retrieval.index.segments import LIST_NAME, ListedPart, PartList

__all__ = ["IndexCheck", "MergeSavings", "Orphan", "PartCheck", "check_index"]

# How often a check begins again because the index has changed in the meantime.
_ATTEMPTS = 3
# Backends without segments. Their classes read the ids, and check them when an index is opened.
_QDRANT = "qdrant"
_BM25 = "bm25"
# Suffix of a folder that was replaced in two steps, and has not been removed.
_REPLACED = ".old"
# Pattern of the characters that `tempfile.mkdtemp` puts between a prefix and a suffix.
_RANDOM_NAME = "?" * 8


@dataclass(frozen=True)
class PartCheck:
    """One part of an index: the index that was built first, or a segment.

    Attributes:
        folder: name of the segment's folder; empty for the index that was built first.
        n_documents: number of documents in the files of the part.
        n_removed: how many of them were removed or replaced later.
        n_bytes: size of the part's files.
    """

    folder: str
    n_documents: int
    n_removed: int
    n_bytes: int


@dataclass(frozen=True)
class Orphan:
    """A file or folder that no manifest lists, such as one of a killed update.

    Attributes:
        path: the file or folder.
        n_bytes: its size, with everything in it.
    """

    path: str
    n_bytes: int


@dataclass(frozen=True)
class MergeSavings:
    """Savings of a merge of all parts.

    Attributes:
        n_segments: number of segments, which a search would no longer visit.
        n_removed: number of removed documents, whose vectors would be deleted.
        n_bytes: estimated size of these vectors: the part's size times its removed fraction.
    """

    n_segments: int
    n_removed: int
    n_bytes: int


@dataclass
class IndexCheck:
    """Result of :func:`check_index`.

    Attributes:
        path: the folder of the index.
        backend: the backend; None if the manifest is damaged.
        generation: id of the current generation; None if the manifest is damaged.
        n_documents: number of documents that a search can return.
        n_files: number of files whose checksum was compared.
        parts: the parts of the index.
        damage: descriptions of what is damaged or missing; empty for an intact index.
        orphans: files and folders that no manifest lists.
        is_being_written: whether another process was writing the index, so that orphans were not
            searched.
        merge: savings of a merge; None for a backend without segments, and for a damaged
            index, which cannot be merged.
    """

    path: str
    backend: str | None = None
    generation: str | None = None
    n_documents: int = 0
    n_files: int = 0
    parts: list[PartCheck] = field(default_factory=list)
    damage: list[str] = field(default_factory=list)
    orphans: list[Orphan] = field(default_factory=list)
    is_being_written: bool = False
    merge: MergeSavings | None = None

    @property
    def is_intact(self) -> bool:
        """Whether nothing is damaged or missing. Orphans are no damage."""
        return not self.damage

    def to_dict(self) -> Json:
        """Return the fields and :attr:`is_intact`, for JSON."""
        return {"intact": self.is_intact, **asdict(self)}


def check_index(path: str | Path) -> IndexCheck:
    """Compare all files of a saved index with their checksums, and find inconsistent parts.

    Nothing is changed. If another process changes the index in the meantime, the check begins
    again.

    Args:
        path: the folder of the index, of any backend.

    Raises:
        FileNotFoundError: if the folder is not an index.
        InUseError: if the index keeps changing, or if an embedded Qdrant index is open elsewhere.

    Examples:
        >>> from tilefold.retrieval import SparseVectors, build_index, check_index
        >>> documents = SparseVectors.from_rows({"d1": {0: 1.0}, "d2": {0: 2.0}}, vocab_size=3)
        >>> build_index(documents).save("checked-index")
        >>> check = check_index("checked-index")
        >>> check.is_intact, check.n_documents
        (True, 2)
    """
    folder = path_of("path", path)
    check_folder(folder, MANIFEST_NAME, "an index, as tilefold index writes it")
    for _ in range(_ATTEMPTS):
        state = _read_committed_state(folder)
        check = _check_once(folder)
        if _read_committed_state(folder) == state:
            return check
    raise InUseError(
        f"{folder}: the index was changed during each of {_ATTEMPTS} checks. Check it again while "
        "no update is running.",
    )


def _read_committed_state(folder: Path) -> list[bytes | None]:
    """Return the contents of the two files that an update or a merge replaces.

    The content of a missing file is None.
    """
    contents: list[bytes | None] = []
    for file in (folder / MANIFEST_NAME, folder / SEGMENTS / LIST_NAME):
        content = None
        with suppress(FileNotFoundError, NotADirectoryError):
            content = file.read_bytes()
        contents.append(content)
    return contents


def _check_once(folder: Path) -> IndexCheck:
    """Check an index once, and assume that no other process changes it meanwhile.

    Each step runs only if the steps before have found nothing that would make it fail.
    """
    check = IndexCheck(str(folder))
    try:
        generation = read_generation(folder)
        check.backend = generation.backend
        check.generation = generation.id
        part_list = PartList.read(folder)
    except (DataError, OSError) as error:
        check.damage.append(str(error))
        return check
    _check_parts(folder, part_list.parts, check)
    if check.is_intact:
        _check_opens(folder, check)
    if check.is_intact and check.backend not in (_BM25, _QDRANT):
        check.merge = _estimate_merge_savings(check.parts)
    # Files that no manifest lists are orphans only if no process is writing them.
    lock_directory = lock_directory_of(folder)
    check.is_being_written = _is_locked(lock_directory)
    if check.is_being_written:
        return check
    paths = [*_find_unlisted(folder, part_list.segment_names), *_find_leftovers(folder.resolve())]
    orphans = [Orphan(str(path), _size_of(path)) for path in sorted(paths)]
    # The files may belong to an update that has begun in the meantime.
    check.is_being_written = _is_locked(lock_directory)
    if not check.is_being_written:
        check.orphans = orphans
    return check


def _check_parts(folder: Path, parts: Sequence[ListedPart], check: IndexCheck) -> None:
    """Check the files and documents of all parts, and add the results to a check.

    Args:
        folder: the folder of the index.
        parts: the parts that the index lists.
        check: the check, which is changed.
    """
    part_of_document: dict[str, str] = {}
    provenances: list[Provenance] = []
    for part in parts:
        part_folder = part.folder_in(folder)
        try:
            manifest = read_description(part_folder)
        except (DataError, OSError) as error:
            check.damage.append(str(error))
            continue
        if manifest["backend"] != check.backend:
            check.damage.append(
                f"{part_folder}: expected a part of backend {check.backend}, got "
                f"{manifest['backend']}.",
            )
        provenances.append(Provenance.from_dict(manifest))
        n_damage_before = len(check.damage)
        n_bytes = _check_files(part_folder, manifest, check)
        n_documents = int(manifest["n_documents"])
        check.parts.append(PartCheck(part.name, n_documents, len(part.removed), n_bytes))
        check.n_documents += n_documents - len(part.removed)
        are_files_intact = len(check.damage) == n_damage_before
        if are_files_intact and check.backend not in (_BM25, _QDRANT):
            _check_ids(part_folder, n_documents, part.removed, part_of_document, check)
    first, *others = provenances or [Provenance()]  # there are none if no manifest was readable
    if any("model_fingerprint" in first.differing_fields(other) for other in others):
        check.damage.append(f"{folder}: the parts were made by different models.")


def _check_files(folder: Path, manifest: Json, check: IndexCheck) -> int:
    """Compare all files of a part with their checksums, and return their size in bytes.

    An index of token vectors may hold an index of its centroids, whose files are compared, too.

    Args:
        folder: the folder of the part.
        manifest: the manifest in this folder.
        check: the check, to which damage is added.
    """
    n_bytes = (folder / MANIFEST_NAME).stat().st_size
    for name, digest in manifest["files"].items():
        n_bytes += _check_file(folder, name, digest, check)
    candidates = folder / CANDIDATES_FOLDER
    if manifest["backend"] == LATE and candidates.is_dir():
        try:
            n_bytes += _check_files(candidates, read_description(candidates), check)
        except (DataError, OSError) as error:
            check.damage.append(str(error))
    return n_bytes


def _check_file(folder: Path, name: str, digest: str, check: IndexCheck) -> int:
    """Compare a file with its checksum, and return its size in bytes; 0 if it is missing.

    Args:
        folder: the folder of the part.
        name: name of the file.
        digest: SHA-256 in the manifest of the part.
        check: the check, to which damage is added.
    """
    file = folder / name
    # A name with a slash could point outside the folder.
    if Path(name).name != name or not file.is_file():
        check.damage.append(f"{file}: missing; {MANIFEST_NAME} lists it.")
        return 0
    check.n_files += 1
    try:
        is_equal = sha256_file(file) == digest
    except OSError as error:
        check.damage.append(f"{file}: cannot be read ({error.strerror}).")
        return 0
    if not is_equal:
        check.damage.append(f"{file}: damaged; its checksum is not the one in {MANIFEST_NAME}.")
    return file.stat().st_size


def _check_ids(
    folder: Path,
    n_documents: int,
    removed: Set[str],
    part_of_document: dict[str, str],
    check: IndexCheck,
) -> None:
    """Check the document ids of one part of an index.

    A document may be in one part only, unless it was removed from the others. Every id that is
    recorded as removed from this part must be in it.

    Args:
        folder: the folder of the part.
        n_documents: number of documents in the manifest of the part.
        removed: ids of the removed documents of the part.
        part_of_document: id -> folder of the documents of earlier parts, which is extended.
        check: the check, to which damage is added.
    """
    try:
        ids = list(StoredIds.load(folder, n_documents))
    except DataError as error:
        check.damage.append(str(error))
        return
    n_unknown = len(removed - set(ids))
    if n_unknown:
        check.damage.append(
            f"{folder}: {n_unknown} removed documents of {LIST_NAME} are not in this part.",
        )
    for document_id in ids:
        if document_id in removed:
            continue
        earlier = part_of_document.setdefault(document_id, str(folder))
        if earlier != str(folder):
            check.damage.append(f"{folder}: document {document_id!r} is also in {earlier}.")
            return  # one example suffices: the parts may share many documents


def _check_opens(folder: Path, check: IndexCheck) -> None:
    """Open the index as a search does, and record an error as damage.

    Args:
        folder: the folder of the index.
        check: the check, which gets the number of documents of a Qdrant collection.
    """
    try:
        index: Any = open_index(folder)
    except DataError as error:
        check.damage.append(str(error))
        return
    if check.backend == _QDRANT:
        check.n_documents = index.n_documents
        index.close()


def _estimate_merge_savings(parts: Collection[PartCheck]) -> MergeSavings:
    """Estimate how much a merge of the parts would save."""
    n_bytes = sum(part.n_bytes * part.n_removed // max(1, part.n_documents) for part in parts)
    return MergeSavings(
        n_segments=max(0, len(parts) - 1),
        n_removed=sum(part.n_removed for part in parts),
        n_bytes=n_bytes,
    )


def _find_unlisted(folder: Path, segment_names: Collection[str]) -> Iterator[Path]:
    """Yield the files and folders of an index that no manifest lists.

    Args:
        folder: the folder of the index.
        segment_names: names of the segments' folders that the index lists.
    """
    yield from _find_unlisted_files(folder, {SEGMENTS})
    segments_folder = folder / SEGMENTS
    if not segments_folder.is_dir():
        return
    for entry in segments_folder.iterdir():
        if entry.name == LIST_NAME:
            continue
        if entry.name not in segment_names:
            yield entry
        elif entry.is_dir():
            yield from _find_unlisted_files(entry, set())


def _find_unlisted_files(folder: Path, other_names: Collection[str]) -> Iterator[Path]:
    """Yield the entries of the folder of a part that its manifest does not list.

    Args:
        folder: the folder of the part.
        other_names: names that belong to the index without being in the manifest.
    """
    try:
        manifest = read_description(folder)
    except (DataError, OSError):  # reported as damage; the files of the part are unknown
        return
    names = {MANIFEST_NAME, *manifest["files"], *other_names}
    if manifest["backend"] == _QDRANT:
        from tilefold.retrieval.index.qdrant.edge import COLLECTION_NAMES

        names.update(COLLECTION_NAMES)
    if manifest["backend"] == LATE:
        names.add(CANDIDATES_FOLDER)
    yield from (entry for entry in folder.iterdir() if entry.name not in names)


def _find_leftovers(folder: Path) -> Iterator[Path]:
    """Yield the hidden folders next to an index that a killed process has left.

    A living process holds the lock of its hidden folder.
    """
    prefix = f".{glob.escape(folder.name)}.{_RANDOM_NAME}"
    for suffix in (SCRATCH, _REPLACED):
        for entry in folder.parent.glob(prefix + suffix):
            if not _is_locked(entry):
                yield entry


def _is_locked(folder: Path) -> bool:
    """Whether a living process holds the lock file of a temporary folder.

    A lock file that cannot be opened counts as held.
    """
    if not (folder / LOCK).is_file():
        return False
    try:
        lock = lock_folder(folder, reentrant=False)
    except (InUseError, OSError):
        return True
    lock.release(force=True)
    return False


def _size_of(path: Path) -> int:
    """Return the size of a file, or of all files in a folder, in bytes."""
    files = [path] if path.is_file() else path.rglob("*")
    n_bytes = 0
    for file in files:
        with suppress(FileNotFoundError):  # another process may remove it meanwhile
            if file.is_file():
                n_bytes += file.stat().st_size
    return n_bytes
