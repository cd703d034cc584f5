"""Pages of PDFs and images, which are decoded or rendered when their image is needed."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tilefold._internal.arguments import ArgumentError, check_integer, check_least
from tilefold._internal.files import sha256_file
from tilefold.retrieval.common.files import require
from tilefold.retrieval.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["Page", "PageRanges", "count_pages"]

DEFAULT_DPI = 150
MAX_PIXELS = 80_000_000  # an A3 page at 600 dpi has 70 million; Pillow warns from 89 million on
POINTS_PER_INCH = 72
PDF_SUFFIX = ".pdf"
TIFF_SUFFIXES = (".tif", ".tiff")
IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", *TIFF_SUFFIXES)
PAGE_SUFFIXES = (PDF_SUFFIX, *IMAGE_SUFFIXES)
# Decoders that Pillow may use. Others, such as the one of EPS, start programs.
IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "TIFF")
_PAGE_RANGE = re.compile(r"(?P<first>\d+)((?P<dash>-)(?P<last>\d*))?")
_PAGE_RANGE_FORMS = "'3', '1-10', '20-' or several of them, such as '1-10,15'"
# PDFium must not be called by two threads at the same time. A process must not be forked during a
# call either: nothing would release the lock in the new process.
pdfium_lock = threading.Lock()


@dataclass(frozen=True)
class Page:
    """A page of a PDF or an image file, which is read when its image is needed.

    Attributes:
        file: path of the PDF or the image.
        number: number of the page in the file, from 1.

    Raises:
        TypeError: if the number is not an integer.
        ValueError: if the number is less than 1.

    Examples:
        >>> from pathlib import Path
        >>> from PIL import Image
        >>> Image.new("RGB", (40, 20), "white").save("card.png")
        >>> page = Page(Path("card.png"))
        >>> page.image().size
        (40, 20)
    """

    file: Path
    number: int = 1

    def __post_init__(self) -> None:
        check_integer("number", self.number)
        check_least("number", self.number)

    def image(self, dpi: int = DEFAULT_DPI, max_pixels: int = MAX_PIXELS) -> Image:
        """Decode or render the page.

        Args:
            dpi: dots per inch at which the page of a PDF is rendered; not used for images.
            max_pixels: largest number of pixels that is decoded or rendered. The sizes that the
                file declares are compared with it before any pixel is decoded.

        Returns:
            An RGB image, upright as the file says, on white where the page is transparent.

        Raises:
            DataError: if the page is damaged, encrypted, missing or too large.
            MissingPackageError: if Pillow or pypdfium2 is not installed.
        """
        check_integer("dpi", dpi)
        check_least("dpi", dpi)
        check_integer("max_pixels", max_pixels)
        check_least("max_pixels", max_pixels)
        if is_pdf(self.file):
            return _render_pdf_page(self.file, self.number, dpi, max_pixels)
        return _decode_image(self.file, self.number, max_pixels)

    @property
    def fingerprint(self) -> str:
        """Digest of the file and the number of the page, which identify what the page shows.

        The file is read once, and again after it has changed. A page whose file is missing cannot
        be encoded, but has a fingerprint.
        """
        try:
            return f"{sha256_of_state(PageFileState.of(self.file))}#{self.number}"
        except OSError:
            return f"missing#{self.number}"


class PageFileState(NamedTuple):
    """A file of pages with its size and times, by which a change is noticed."""

    file: Path
    size: int  # bytes
    modified_ns: int
    inode: int

    @classmethod
    def of(cls, file: Path) -> PageFileState:
        """Read the state of a file."""
        status = file.stat()
        return cls(file, status.st_size, status.st_mtime_ns, status.st_ino)


# State of a file -> its SHA-256, which is computed once in a process.
_sha256_of_states: dict[PageFileState, str] = {}


def sha256_of_state(state: PageFileState, stored: str | None = None) -> str:
    """Return the SHA-256 of a file, and remember it for this process.

    Args:
        state: the file, with its size and times as they are now.
        stored: the SHA-256 that an earlier process has computed in this state; None reads the file,
            unless this process has computed it before.
    """
    digest = stored or _sha256_of_states.get(state) or sha256_file(state.file)
    _sha256_of_states[state] = digest
    return digest


@dataclass(frozen=True)
class PageRanges:
    """Pages of each file, such as the first ten.

    Attributes:
        ranges: first and last page of each range, from 1; None in place of the last page means
            all further pages.

    Examples:
        >>> first_pages = PageRanges.parse("1-10,15")
        >>> 10 in first_pages, 11 in first_pages, 15 in first_pages
        (True, False, True)
    """

    ranges: tuple[tuple[int, int | None], ...]

    @classmethod
    def parse(cls, text: str) -> PageRanges:
        """Read ranges such as ``"1-10,15"`` or ``"20-"``.

        Raises:
            ValueError: if the text has another form, or a range is empty.
        """
        return cls(tuple(_parse_range(part.strip(), text) for part in text.split(",")))

    def __str__(self) -> str:
        """Return the ranges as :meth:`parse` reads them."""
        return ",".join(_format_range(first, last) for first, last in self.ranges)

    def __contains__(self, number: object) -> bool:
        """Return whether a page, counted from 1, is in one of the ranges."""
        if not isinstance(number, int):
            return False
        return any(
            first <= number and (last is None or number <= last) for first, last in self.ranges
        )


def _format_range(first: int, last: int | None) -> str:
    """Return a range as text: ``"3"``, ``"1-10"``, or ``"20-"`` for all pages from 20 on."""
    if first == last:
        return str(first)
    return f"{first}-{'' if last is None else last}"


def _parse_range(part: str, text: str) -> tuple[int, int | None]:
    """Read one range of pages.

    Args:
        part: the range, such as ``"1-10"``.
        text: all ranges, for the error.

    Returns:
        First and last page; None in place of the last page means all further pages.
    """
    match = _PAGE_RANGE.fullmatch(part)
    if match is None:
        raise ArgumentError("page_ranges", f"expected {_PAGE_RANGE_FORMS}, got {text!r}.")
    first = int(match["first"])
    last: int | None = first
    if match["dash"]:
        last = int(match["last"]) if match["last"] else None
    if first < 1 or (last is not None and last < first):
        raise ArgumentError(
            "page_ranges",
            f"expected pages from 1 in ascending order, got {part!r} in {text!r}.",
        )
    return first, last


def is_pdf(file: Path) -> bool:
    """Return whether the name of a file is that of a PDF."""
    return file.suffix.lower() == PDF_SUFFIX


def has_numbered_pages(file: Path) -> bool:
    """Return whether the ids of a file's pages have numbers: PDF and TIFF may have several."""
    return file.suffix.lower() in (PDF_SUFFIX, *TIFF_SUFFIXES)


def count_pages(file: Path, max_pixels: int = MAX_PIXELS) -> int:
    """Count the pages of a PDF or an image file, without decoding them.

    Args:
        file: path of the PDF or the image.
        max_pixels: largest number of pixels of an image.

    Raises:
        DataError: if the file is damaged, encrypted, missing, too large or an animation.
        MissingPackageError: if Pillow or pypdfium2 is not installed.
    """
    if is_pdf(file):
        with _open_pdf(file) as document:
            n_pages = len(document)
        if not n_pages:
            raise DataError(f"{file}: has no pages. Leave it out.")
        return n_pages
    with _open_image(file) as image:
        _check_pixels(file, image.width, image.height, max_pixels)
        return _count_frames(file, image)


def _count_frames(file: Path, image: Any) -> int:
    """Return the number of pages of an opened image. Only a TIFF can have more than 1.

    Args:
        file: path of the image, for errors.
        image: the image as Pillow has opened it.

    Raises:
        DataError: if the image is an animation.
    """
    n_frames = getattr(image, "n_frames", 1)
    if has_numbered_pages(file) and image.format == "TIFF":
        return int(n_frames)
    # Phones write JPEG files as MPO, whose further frames are previews of the same photo.
    if n_frames > 1 and image.format != "MPO":
        raise DataError(
            f"{file}: expected a still image, got an animation of {n_frames} frames. Save the "
            "frames as images.",
        )
    return 1


@contextmanager
def _open_image(file: Path) -> Iterator[Any]:
    """Open an image file with Pillow, whose errors become ``DataError``.

    Pillow raises exceptions of many classes for damaged files, such as ``SyntaxError``,
    ``struct.error`` and ``ZeroDivisionError``.
    """
    pillow = require("PIL.Image", "Pillow", "an image", extra="pages")
    try:
        with pillow.open(file, formats=IMAGE_FORMATS) as image:
            yield image
    except (DataError, MemoryError, KeyboardInterrupt):
        raise
    except pillow.UnidentifiedImageError:
        raise DataError(
            f"{file}: expected an image in PNG, JPEG, WebP or TIFF, got something else or a "
            "damaged file. Convert it, or leave it out.",
        ) from None
    except pillow.DecompressionBombError as error:
        raise DataError(
            f"{file}: the image has more pixels than the limit ({error}). Save it smaller.",
        ) from None
    except Exception as error:
        raise DataError(
            f"{file}: the image is damaged or cannot be read ({type(error).__name__}: {error}). "
            "Replace it, or leave it out.",
        ) from error


def _decode_image(file: Path, number: int, max_pixels: int) -> Image:
    """Decode a page of an image file as RGB."""
    image_ops = require("PIL.ImageOps", "Pillow", "an image", extra="pages")
    _verify_png(file)
    with _open_image(file) as image:
        n_pages = _count_frames(file, image)
        _check_number(file, number, n_pages)
        if n_pages > 1:
            image.seek(number - 1)
        _check_pixels(file, image.width, image.height, max_pixels)
        upright_image = image_ops.exif_transpose(image)
        return as_rgb(upright_image)


def _verify_png(file: Path) -> None:
    """Raise ``DataError`` if a checksum of a PNG is wrong, which Pillow ignores while decoding."""
    with _open_image(file) as image:
        if image.format == "PNG":
            image.verify()  # reads the file, so that it must be opened again


def as_rgb(image: Any) -> Image:
    """Convert an image of any mode to RGB, on white where it is transparent."""
    pillow = require("PIL.Image", "Pillow", "an image", extra="pages")
    if image.mode.startswith("I;16"):
        # Pillow's conversion to RGB would clip 16-bit values to 255 instead of scaling them.
        image = image.convert("I").point(lambda value: value * (1 / 256)).convert("L")
    is_transparent = image.mode in ("RGBA", "LA", "PA", "RGBa", "La")
    if is_transparent or "transparency" in image.info:
        image = image.convert("RGBA")
        white = pillow.new("RGBA", image.size, "white")
        image = pillow.alpha_composite(white, image)
    rgb_image: Image = image.convert("RGB")
    return rgb_image


@contextmanager
def _open_pdf(file: Path) -> Iterator[Any]:
    """Open a PDF with PDFium, whose errors become ``DataError``.

    One thread at a time is in this context.
    """
    pdfium = require("pypdfium2", "pypdfium2", "a PDF", extra="pages")
    with pdfium_lock:
        try:
            with pdfium.PdfDocument(file) as document:
                yield document
        except FileNotFoundError:
            raise DataError(
                f"{file}: no such file. Restore it, or run the command again without it."
            ) from None
        except pdfium.PdfiumError as error:
            if "password" in str(error).lower():
                raise DataError(
                    f"{file}: the PDF is encrypted with a password. Save it without one.",
                ) from None
            raise DataError(
                f"{file}: the PDF is damaged or cannot be read ({str(error).rstrip('.')}). Replace "
                "it, or leave it out.",
            ) from error
        except OSError as error:
            raise DataError(
                f"{file}: cannot be read ({error}). Check its permissions, or leave it out.",
            ) from error


def _render_pdf_page(file: Path, number: int, dpi: int, max_pixels: int) -> Image:
    """Render a page of a PDF as RGB, with its annotations, upright as the file says.

    Args:
        file: the PDF.
        number: number of the page, from 1.
        dpi: dots per inch.
        max_pixels: largest number of pixels of the page, and of an image on it.
    """
    require("PIL.Image", "Pillow", "a PDF", extra="pages")
    with _open_pdf(file) as document:
        _check_number(file, number, len(document))
        page = document[number - 1]
        scale = dpi / POINTS_PER_INCH
        width, height = page.get_size()  # in points, after the rotation of the page
        if not (width > 0 and height > 0):
            raise DataError(f"{file}: page {number} has no area. Leave the page out.")
        _check_pixels(
            file, width * scale, height * scale, max_pixels, f"page {number} at {dpi} dpi"
        )
        _check_embedded_images(file, number, page, max_pixels)
        rendered_image = page.render(scale=scale).to_pil()
        # The rendered image shares the memory of the PDF, which is closed after this block.
        rgb_image: Image = rendered_image.convert("RGB")
        was_converted = rgb_image is not rendered_image
        return rgb_image if was_converted else rgb_image.copy()


def _check_embedded_images(file: Path, number: int, page: Any, max_pixels: int) -> None:
    """Check the sizes of the images on a page of a PDF, which PDFium decodes completely."""
    from pypdfium2.raw import FPDF_PAGEOBJ_IMAGE

    for embedded_image in page.get_objects(filter=[FPDF_PAGEOBJ_IMAGE]):
        width, height = embedded_image.get_px_size()
        _check_pixels(file, width, height, max_pixels, f"an image on page {number}")


def _check_number(file: Path, number: int, n_pages: int) -> None:
    """Raise ``DataError`` if a file does not have a page."""
    if number > n_pages:
        raise DataError(f"{file}: expected a page from 1 to {n_pages}, got page {number}.")


def _check_pixels(
    file: Path,
    width: float,
    height: float,
    max_pixels: int,
    subject: str = "the image",
) -> None:
    """Raise ``DataError`` if an image has too many pixels to be decoded.

    Args:
        file: path of the file, for the error.
        width: width in pixels.
        height: height in pixels.
        max_pixels: largest number of pixels.
        subject: what has the pixels, for the error.
    """
    if width * height > max_pixels:
        raise DataError(
            f"{file}: {subject} has {width:.0f} x {height:.0f} pixels, more than the limit of "
            f"{max_pixels:,}. Save it smaller, or render a PDF at fewer dots per inch.",
        )
