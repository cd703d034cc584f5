"""Collections of page images: folders of PDFs and images, and documents that name image files."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tilefold._internal.files import read_json, write_json
from tilefold.retrieval.common.files import is_unicode
from tilefold.retrieval.data.documents import Document
from tilefold.retrieval.data.pages import (
    PAGE_SUFFIXES,
    Page,
    PageFileState,
    PageRanges,
    count_pages,
    has_numbered_pages,
    sha256_of_state,
)
from tilefold.retrieval.errors import DataError

__all__ = ["PageFolder", "has_pages", "open_page_folder", "page_of_name"]

_CACHE_VERSION = 1
_SETTLED_NS = 2_000_000_000  # a file that was written just now may be written again
_NUMBERED_PAGE = re.compile(r"(.+)#p([1-9]\d*)")


@dataclass
class PageFolder:
    """The pages of a folder of PDFs and images.

    Attributes:
        documents: id -> document with a page, in the order of file names and page numbers.
        unread_files: name of a file -> reason why none of its pages is in `documents`, without the
            name.
    """

    documents: dict[str, Document] = field(default_factory=dict)
    unread_files: dict[str, str] = field(default_factory=dict)


def has_pages(path: Path) -> bool:
    """Return whether a path is a PDF or an image, or a folder with one, at any depth."""
    if path.is_file():
        return path.suffix.lower() in PAGE_SUFFIXES
    return next(_page_files(path), None) is not None


def open_page_folder(
    path: Path,
    page_ranges: PageRanges | None = None,
    cache: Path | None = None,
) -> PageFolder:
    """List the pages of a folder of PDFs and images, or of one file.

    Files are opened to count their pages, and not decoded. The id of a page is the path of its file
    in the folder, with ``#p`` and the number of the page for PDF and TIFF, which may have several:
    ``2021/report.pdf#p12``. The metadata of a page are ``file`` and ``page``.

    Args:
        path: the folder, which is searched with its subfolders, or a PDF or an image.
        page_ranges: the pages of each file that are listed; None lists all.
        cache: folder of the cache, which has the number of pages and the digest of each file, so
            that files that have not changed are not opened again. None opens all files, and reads
            them only when a digest is needed.

    Returns:
        The pages, and the files that could not be opened with the reasons.

    Raises:
        DataError: if there is no page.
        MissingPackageError: if Pillow or pypdfium2 is needed and not installed.
    """
    root = path if path.is_dir() else path.parent
    folder = PageFolder()
    page_cache = None if cache is None else _PageCache(cache, path, root)
    for file in _page_files(path):
        name = file.relative_to(root).as_posix()
        try:
            _check_file(file, name, root)
            n_pages = count_pages(file) if page_cache is None else page_cache.count_pages(name)
        except DataError as error:
            # The reason is listed by the name of the file, which some messages begin with.
            printable_name = _escape_name(name)
            reason = str(error).removeprefix(f"{file}: ").removeprefix(f"{printable_name}: ")
            folder.unread_files[printable_name] = reason
            continue
        for number in range(1, n_pages + 1):
            if page_ranges is None or number in page_ranges:
                document = _document_of_page(name, Page(file, number))
                folder.documents[document.id] = document
    if page_cache is not None:
        page_cache.save()
    if not folder.documents:
        raise DataError(_no_pages_message(path, folder.unread_files, page_ranges))
    return folder


class _PageCache:
    """Number of pages and digest of each file of a folder, stored between processes.

    An entry is valid as long as the size, the time of the last change and the inode of its file
    stay the same. A file that has changed just now has no entry, because it may change again
    without a later time.

    Args:
        cache: folder of the cache.
        path: the folder, or the only file, whose entries are stored together.
        root: the folder, or the folder of the file.
    """

    def __init__(self, cache: Path, path: Path, root: Path) -> None:
        """Read the entries that an earlier process has stored in the current format, if any."""
        self._root = root
        key = hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:32]
        self._file = cache / "pages" / f"{key}.json"
        stored = read_json(self._file) or {}
        self._stored_entries: dict[str, Any] = {}
        if stored.get("version") == _CACHE_VERSION:
            self._stored_entries = stored.get("files", {})
        self._entries: dict[str, list[int | str]] = {}

    def count_pages(self, name: str) -> int:
        """Return the number of pages of a file, from its entry or by opening the file.

        The digest of the file is remembered for this process.

        Args:
            name: path of the file in the folder.

        Raises:
            DataError: if the file is not in the cache and cannot be opened.
        """
        try:
            state = PageFileState.of(self._root / name)
        except OSError as error:
            raise DataError(
                f"{self._root / name}: cannot be read ({error}). Check its permissions, or leave "
                "it out.",
            ) from error
        key = [state.size, state.modified_ns, state.inode]
        entry = self._stored_entries.get(name, [])
        if entry[: len(key)] == key:
            n_pages, digest = entry[len(key) :]
            sha256_of_state(state, digest)  # remembers the digest without reading the file
        else:
            n_pages = count_pages(state.file)
            digest = sha256_of_state(state)
        if time.time_ns() - state.modified_ns > _SETTLED_NS:
            self._entries[name] = [*key, n_pages, digest]
        return int(n_pages)

    def save(self) -> None:
        """Store the entries of the files that were counted, if they differ from the stored ones.

        An error while the cache is written is ignored, since the cache only saves time.
        """
        if self._entries == self._stored_entries:
            return
        with contextlib.suppress(OSError):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            write_json(self._file, {"version": _CACHE_VERSION, "files": self._entries})


def page_of_name(name: str, root: Path) -> Page:
    """Return the page that a row of a corpus file names.

    Args:
        name: path of an image or a PDF in `root`, such as ``scans/report.pdf#p12`` for its page 12.
            Without ``#p``, it is the first page.
        root: the folder of the collection.

    Raises:
        DataError: if the path is outside of `root`, or the file has another suffix.
    """
    numbered_page = _NUMBERED_PAGE.fullmatch(name)
    file_name, number = name, 1
    if numbered_page is not None and has_numbered_pages(Path(numbered_page[1])):
        file_name, number = numbered_page[1], int(numbered_page[2])
    if Path(file_name).suffix.lower() not in PAGE_SUFFIXES:
        raise DataError(
            f"expected the path of an image or a PDF ({', '.join(PAGE_SUFFIXES)}), got {name!r}. "
            "Convert the file.",
        )
    file = root / file_name
    _check_is_inside(file, root)
    return Page(file, number)


def _page_files(path: Path) -> Iterator[Path]:
    """Yield the PDFs and images of a folder and its subfolders by name, or the file at a path.

    Hidden files and folders are left out, and links to folders are not followed.
    """
    if path.is_file():
        yield path
        return
    for folder, subfolders, names in os.walk(path):
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        for name in sorted(names):
            if name.lower().endswith(PAGE_SUFFIXES) and not name.startswith("."):
                yield Path(folder, name)


def _check_file(file: Path, name: str, root: Path) -> None:
    """Raise ``DataError`` if a file cannot be in a collection of pages.

    Args:
        file: path of the file.
        name: path of the file in the folder, which becomes its id.
        root: the folder.
    """
    if not is_unicode(name):
        raise DataError(f"{_escape_name(name)}: expected a name in UTF-8. Rename the file.")
    if not file.is_file():
        raise DataError(f"{file}: not a file, or a broken link. Leave it out.")
    _check_is_inside(file, root)


def _check_is_inside(file: Path, root: Path) -> None:
    """Raise ``DataError`` if a path, or a link at it, leads out of a folder.

    A server shows the pages of a collection, so they must not be other files of the machine.
    """
    if not file.resolve().is_relative_to(root.resolve()):
        raise DataError(
            f"{file}: expected a file in {root}, got one outside of it. Copy it into the folder.",
        )


def _document_of_page(name: str, page: Page) -> Document:
    """Return a page as a document.

    Args:
        name: path of the file in the folder.
        page: the page.
    """
    identifier = f"{name}#p{page.number}" if has_numbered_pages(page.file) else name
    return Document(
        identifier,
        title="",
        text="",
        metadata={"file": name, "page": page.number},
        page=page,
    )


def _escape_name(name: str) -> str:
    """Return the name of a file for a report, with escapes for bytes that are not UTF-8."""
    return name.encode("utf-8", "backslashreplace").decode("utf-8")


def _no_pages_message(
    path: Path,
    unread_files: dict[str, str],
    page_ranges: PageRanges | None,
) -> str:
    """Return the error for a folder without a page.

    Args:
        path: the folder, or a file.
        unread_files: name of a file that could not be opened -> reason.
        page_ranges: the pages that were asked for; None for all.
    """
    message = f"{path}: expected pages of PDFs and images ({', '.join(PAGE_SUFFIXES)}), got "
    if page_ranges is not None:
        message += "none in the range of pages. Choose another range."
        if unread_files:
            message += f" Not opened: {_describe_unread(unread_files)}"
        return message
    return message + (_describe_unread(unread_files) if unread_files else "none. Add some.")


def _describe_unread(unread_files: dict[str, str]) -> str:
    """Describe files that could not be opened: their number, and the first name and reason.

    Args:
        unread_files: name of a file that could not be opened -> reason; at least one.
    """
    files = "file" if len(unread_files) == 1 else "files"
    name, reason = next(iter(unread_files.items()))
    return f"{len(unread_files)} damaged {files}, such as {name}: {reason}"
