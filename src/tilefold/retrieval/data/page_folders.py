"""Collections of page images: folders of PDFs and images, and documents that name image files."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tilefold.retrieval.common.files import is_unicode
from tilefold.retrieval.data.documents import Document
from tilefold.retrieval.data.pages import (
    MAX_PIXELS,
    PAGE_SUFFIXES,
    Page,
    PageRanges,
    count_pages,
    has_numbered_pages,
)
from tilefold.retrieval.errors import DataError

__all__ = ["PageFolder", "has_pages", "open_page_folder", "page_of_name"]

_NUMBERED_PAGE = re.compile(r"(.+)#p([1-9]\d*)")


@dataclass
class PageFolder:
    """The pages of a folder of PDFs and images.

    Attributes:
        documents: id -> document with a page, in the order of file names and page numbers.
        unread_files: name of a file -> reason why none of its pages is in `documents`.
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
    max_pixels: int = MAX_PIXELS,
) -> PageFolder:
    """List the pages of a folder of PDFs and images, or of one file.

    Files are opened to count their pages, and not decoded. The id of a page is the path of its file
    in the folder, with ``#p`` and the number of the page for PDF and TIFF, which may have several:
    ``2021/report.pdf#p12``. The metadata of a page are ``file`` and ``page``.

    Args:
        path: the folder, which is searched with its subfolders, or a PDF or an image.
        page_ranges: the pages of each file that are listed; None lists all.
        max_pixels: largest number of pixels of an image.

    Returns:
        The pages, and the files that could not be opened with the reasons.

    Raises:
        DataError: if there is no page.
        MissingPackageError: if Pillow or pypdfium2 is needed and not installed.
    """
    root = path if path.is_dir() else path.parent
    folder = PageFolder()
    for file in _page_files(path):
        name = file.relative_to(root).as_posix()
        try:
            _check_file(file, name, root)
            n_pages = count_pages(file, max_pixels)
        except DataError as error:
            folder.unread_files[_printable(name)] = str(error)
            continue
        for number in range(1, n_pages + 1):
            if page_ranges is None or number in page_ranges:
                document = _document_of_page(name, Page(file, number))
                folder.documents[document.id] = document
    if not folder.documents:
        raise DataError(_no_pages_message(path, folder.unread_files, page_ranges))
    return folder


def page_of_name(name: str, root: Path) -> Page:
    """Return the page that a row of a corpus file names.

    Args:
        name: path of an image or a PDF in `root`, with ``#p`` and a number for a later page than
            the first, such as ``scans/report.pdf#p12``.
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
        raise DataError(f"{_printable(name)}: expected a name in UTF-8. Rename the file.")
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


def _printable(name: str) -> str:
    """Return the name of a file for a report, with escapes for bytes that are not UTF-8."""
    return name.encode("utf-8", "backslashreplace").decode("utf-8")


def _no_pages_message(
    path: Path,
    unread_files: dict[str, str],
    page_ranges: PageRanges | None,
) -> str:
    """Return the error for a folder without a page."""
    message = f"{path}: expected pages of PDFs and images ({', '.join(PAGE_SUFFIXES)}), got none"
    if unread_files:
        reason = next(iter(unread_files.values()))
        return f"{message} among {len(unread_files)} damaged ones. The first one: {reason}"
    if page_ranges is not None:
        return f"{message} in the range of pages. Choose another range."
    return f"{message}. Add some."
