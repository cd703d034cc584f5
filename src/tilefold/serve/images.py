"""Images of requests, which are decoded, and images that a server shows."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tilefold.retrieval.common.files import require
from tilefold.retrieval.data.pages import IMAGE_FORMATS, as_rgb
from tilefold.serve.bodies import ImageData, ServeError, invalid_input_error

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["ImageInput", "blank_page", "count_pixels", "decode_image", "jpeg_of"]

_JPEG_QUALITY = 88
# Width and height of a blank page in pixels.
_BLANK_SIZE = (420, 594)


@dataclass(frozen=True, eq=False)
class ImageInput:
    """A decoded image of a request or of a document. Images of equal digests are equal.

    Attributes:
        image: the image, in RGB.
        digest: SHA-256 of the bytes of its file, or the id of its document.
    """

    image: Image
    digest: bytes

    def __eq__(self, other: object) -> bool:
        """Compare the digests."""
        return isinstance(other, ImageInput) and self.digest == other.digest

    def __hash__(self) -> int:
        """Return a hash of the digest."""
        return hash(self.digest)


def blank_page() -> ImageInput:
    """Return a small white page, with which a model is warmed up."""
    pillow: Any = require("PIL.Image", "Pillow", "an image", extra="pages")
    return ImageInput(pillow.new("RGB", _BLANK_SIZE, "white"), b"blank")


def count_pixels(data: ImageData, max_pixels: int) -> int:
    """Return the number of pixels that an image of a request declares; none is decoded.

    Args:
        data: the file.
        max_pixels: largest number of pixels.

    Raises:
        ServeError: with status 415 for another format, 413 for too many pixels, and 422 for a
            damaged image.
    """
    with _open_image(data, max_pixels) as image:
        n_pixels: int = image.width * image.height
        return n_pixels


def decode_image(data: ImageData, max_pixels: int) -> ImageInput:
    """Decode an image of a request as RGB, upright, on white where it is transparent.

    Args:
        data: the file.
        max_pixels: largest number of pixels. The size that the file declares is compared with it
            before any pixel is decoded.

    Raises:
        ServeError: with status 415 for another format, 413 for too many pixels, and 422 for a
            damaged image.
    """
    image_ops: Any = require("PIL.ImageOps", "Pillow", "an image", extra="pages")
    digest = hashlib.sha256(data.content).digest()
    with _open_image(data, max_pixels) as image:
        return ImageInput(as_rgb(image_ops.exif_transpose(image)), digest)


@contextmanager
def _open_image(data: ImageData, max_pixels: int) -> Iterator[Image]:
    """Open an image of a request, whose pixels can be decoded within the context.

    Args:
        data: the file.
        max_pixels: largest number of pixels.

    Raises:
        ServeError: with status 415 for another format, 413 for too many pixels, and 422 for a
            damaged image, also if an error within the context shows the damage.
    """
    pillow: Any = require("PIL.Image", "Pillow", "an image", extra="pages")
    try:
        with pillow.open(io.BytesIO(data.content), formats=IMAGE_FORMATS) as image:
            width, height = image.size
            if width * height > max_pixels:
                raise ServeError(
                    "Validation",
                    f"an image has {width} x {height} pixels, more than the limit of {max_pixels}",
                    status=413,
                )
            yield image
    except ServeError:
        raise
    except pillow.UnidentifiedImageError:
        raise ServeError(
            "Validation",
            "expected an image in PNG, JPEG, WebP or TIFF, got another format",
            status=415,
        ) from None
    except pillow.DecompressionBombError:  # Pillow reads the declared size, and refuses very many
        limit = min(max_pixels, 2 * pillow.MAX_IMAGE_PIXELS)
        raise ServeError(
            "Validation",
            f"an image has more pixels than the limit of {limit}",
            status=413,
        ) from None
    except Exception as error:  # Pillow raises exceptions of many classes for damaged files
        raise invalid_input_error(f"an image is damaged ({type(error).__name__})") from error


def jpeg_of(image: Image, width: int | None = None) -> bytes:
    """Return an image as JPEG.

    Args:
        image: the image, in RGB.
        width: largest width in pixels; ``None`` keeps the size. Smaller images are not enlarged.
    """
    if width is not None and image.width > width:
        image = image.resize((width, max(1, round(image.height * width / image.width))))
    stream = io.BytesIO()
    image.save(stream, "JPEG", quality=_JPEG_QUALITY)
    return stream.getvalue()
