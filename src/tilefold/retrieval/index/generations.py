"""Generations of an index folder: which one is current, its files, and the memory to open it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

from tilefold._internal.arguments import path_of
from tilefold.retrieval.common.files import FileIdentity, listed_file
from tilefold.retrieval.index.protocol import (
    MANIFEST_NAME,
    REMEDY,
    SEGMENTS,
    read_description,
)
from tilefold.retrieval.index.segments import LIST_NAME, PartList

__all__ = [
    "IndexGeneration",
    "OpeningMemory",
    "open_current",
    "opening_memory",
    "part_folders",
    "read_generation",
    "verify_files",
]

T = TypeVar("T")
_ID_DIGITS = 12  # hexadecimal digits of the id of a generation
# How often an index is opened anew because another generation was committed meanwhile.
_MAX_ATTEMPTS = 10
# Backends whose files are read into memory. The files of other backends are mapped, so that the
# system can drop their pages.
_READ_INTO_MEMORY = ("dense", "seismic")


@dataclass(frozen=True)
class IndexGeneration:
    """One committed state of an index folder.

    Every update, deletion and merge commits another one.

    Attributes:
        id: digest of the manifest and of the list of segments.
        backend: backend of the index.
        n_segments: number of segments that were added since the index was built or merged.
    """

    id: str
    backend: str
    n_segments: int


def read_generation(path: str | Path) -> IndexGeneration:
    """Return the current generation of an index folder.

    Args:
        path: the folder of the index.

    Raises:
        DataError: if the folder is not an index, or its manifest or list of segments is damaged.
        FileNotFoundError: if there is no such folder.
    """
    folder = path_of("path", path)
    contents = _manifest_and_segment_list(folder)
    for _ in range(_MAX_ATTEMPTS):
        backend = str(read_description(folder)["backend"])
        n_segments = len(PartList.read(folder).segment_names)
        # A merge replaces the folder. The files are read again, so that they are of one generation.
        earlier_contents = contents
        contents = _manifest_and_segment_list(folder)
        if contents == earlier_contents:
            break
    digest = hashlib.sha256()
    for content in contents:
        # The length separates the two files.
        digest.update(b"%d:" % len(content))
        digest.update(content)
    return IndexGeneration(digest.hexdigest()[:_ID_DIGITS], backend, n_segments)


def _manifest_and_segment_list(folder: Path) -> list[bytes]:
    """Return the contents of the two files that determine a generation.

    The content of a missing file is empty.
    """
    contents = []
    for file in (folder / MANIFEST_NAME, folder / SEGMENTS / LIST_NAME):
        try:
            contents.append(file.read_bytes())
        except (FileNotFoundError, NotADirectoryError):
            contents.append(b"")
    return contents


def open_current(path: str | Path, open_index: Callable[[IndexGeneration], T]) -> T:
    """Open an index completely from one generation, which is one committed state of its folder.

    An update or a merge may commit another generation while the files are read. The files are then
    read again.

    Args:
        path: the folder of the index.
        open_index: function that opens the index, and gets its generation.

    Raises:
        DataError: if the index is damaged.
    """
    generation = read_generation(path)
    for _ in range(_MAX_ATTEMPTS - 1):
        try:
            index = open_index(generation)
        except Exception:
            # The files of a generation that was replaced meanwhile may be missing. Only an error
            # of the current generation counts.
            previous = generation
            generation = read_generation(path)
            if generation == previous:
                raise
            continue
        previous = generation
        generation = read_generation(path)
        if generation == previous:
            return index
    return open_index(generation)


def part_folders(path: str | Path) -> list[Path]:
    """Return the folders of an index: the index itself, then the segments that updates have added.

    Args:
        path: the folder of the index.
    """
    folder = path_of("path", path)
    return [part.folder_in(folder) for part in PartList.read(folder).parts]


def verify_files(
    path: str | Path,
    verified: Collection[FileIdentity] = (),
) -> set[FileIdentity]:
    """Compare all files of an index with their checksums, also those that opening does not compare.

    Args:
        path: the folder of the index.
        verified: files that were compared before. They are not read again.

    Returns:
        All files of the current generation, which is the committed state of the index.

    Raises:
        DataError: if a file is damaged.
        FileNotFoundError: if a file is missing.
    """
    identities = set()
    for folder, name, digest in _listed_files(path):
        identity = FileIdentity.of(folder / name)
        if identity not in verified:
            listed_file(folder, name, digest, MANIFEST_NAME, REMEDY)
        identities.add(identity)
    return identities


def _listed_files(path: str | Path) -> Iterator[tuple[Path, str, str]]:
    """Iterate over the folder, name and SHA-256 of every file of the current generation.

    Raises:
        FileNotFoundError: if a file is missing.
    """
    for folder in part_folders(path):
        for name, digest in read_description(folder)["files"].items():
            listed_file(folder, name, None, MANIFEST_NAME, REMEDY)  # it must exist
            yield folder, name, digest


class OpeningMemory(NamedTuple):
    """Memory that opening an index takes.

    Attributes:
        cpu_bytes: memory of the process. Mapped files do not count.
        device_bytes: memory of the GPU that searches; 0 for a search on the CPU.
    """

    cpu_bytes: int
    device_bytes: int


def opening_memory(
    path: str | Path,
    *,
    on_gpu: bool = False,
    opened: Collection[FileIdentity] = (),
) -> OpeningMemory:
    """Estimate the memory that opening an index takes, from the sizes of its files.

    Args:
        path: the folder of the index.
        on_gpu: whether the index is copied to a GPU.
        opened: manifests of parts that are open already, and take no more memory.
    """
    backend = read_description(path)["backend"]
    n_bytes = 0
    for folder, name, _ in _listed_files(path):
        if FileIdentity.of(folder / MANIFEST_NAME) not in opened:
            n_bytes += (folder / name).stat().st_size
    # Parts of an exact index are concatenated in memory before they are copied to a GPU.
    is_read = backend in _READ_INTO_MEMORY or (on_gpu and backend == "exact")
    return OpeningMemory(
        cpu_bytes=n_bytes if is_read else 0,
        device_bytes=n_bytes if on_gpu else 0,
    )
