"""Makers of damaged, hostile and unsuitable page files, by the name of what is wrong with them."""

from __future__ import annotations

import io
import os
import struct
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from PIL import Image

SUFFIX_OF_FORMAT = {"PNG": ".png", "JPEG": ".jpg", "WEBP": ".webp", "TIFF": ".tiff", "PDF": ".pdf"}
HUGE = 60_000  # width and height of a decompression bomb in pixels


def encoded(image_format: str, **options: Any) -> bytes:
    """Bytes of a sound image or PDF of 90 x 60 pixels, with some structure to compress."""
    image = Image.linear_gradient("L").resize((90, 60)).convert("RGB")
    stream = io.BytesIO()
    image.save(stream, image_format, **options)
    return stream.getvalue()


def write(folder: Path, name: str, data: bytes) -> Path:
    """Write a file."""
    file = folder / name
    file.write_bytes(data)
    return file


def suffixed(image_format: str) -> str:
    return f"broken{SUFFIX_OF_FORMAT[image_format]}"


def empty_file(image_format: str, folder: Path) -> Path:
    return write(folder, suffixed(image_format), b"")


def random_bytes(image_format: str, folder: Path) -> Path:
    noise = zlib.compress(b"noise" * 100, 0)[2:]
    return write(folder, suffixed(image_format), bytes(byte ^ 0xA5 for byte in noise))


def only_the_header(image_format: str, folder: Path) -> Path:
    return write(folder, suffixed(image_format), encoded(image_format)[:12])


def first_half(image_format: str, folder: Path) -> Path:
    data = encoded(image_format)
    return write(folder, suffixed(image_format), data[: len(data) // 2])


def zeros_after_the_header(image_format: str, folder: Path) -> Path:
    data = encoded(image_format)
    return write(folder, suffixed(image_format), data[:20] + bytes(len(data) - 20))


def other_format(contents: str, suffix: str, folder: Path) -> Path:
    """A file whose suffix is that of another kind of file."""
    return write(folder, f"broken{suffix}", encoded(contents))


def png_chunk(kind: bytes, data: bytes) -> bytes:
    checksum = struct.pack(">I", zlib.crc32(kind + data))
    return struct.pack(">I", len(data)) + kind + data + checksum


def png(width: int, height: int, pixels: bytes) -> bytes:
    """A PNG of grey pixels, whose size need not be true."""
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + png_chunk(b"IHDR", header)
        + png_chunk(b"IDAT", pixels)
        + png_chunk(b"IEND", b"")
    )


def png_bomb(folder: Path) -> Path:
    return write(folder, "broken.png", png(HUGE, HUGE, zlib.compress(bytes(1000))))


def png_without_width(folder: Path) -> Path:
    return write(folder, "broken.png", png(0, 10, zlib.compress(bytes(10))))


def png_of_wrong_checksum(folder: Path) -> Path:
    data = bytearray(encoded("PNG"))
    data[len(data) // 2] ^= 0xFF  # among the pixels, whose checksum is then wrong
    return write(folder, "broken.png", bytes(data))


def png_of_too_few_pixels(folder: Path) -> Path:
    return write(folder, "broken.png", png(100, 100, zlib.compress(bytes(50))))


def jpeg_bomb(folder: Path) -> Path:
    data = bytearray(encoded("JPEG"))
    frame = data.index(b"\xff\xc0")  # the header with the size
    data[frame + 5 : frame + 9] = struct.pack(">HH", 65_000, 65_000)
    return write(folder, "broken.jpg", bytes(data))


def jpeg_without_pixels(folder: Path) -> Path:
    data = encoded("JPEG")
    return write(folder, "broken.jpg", data[: data.index(b"\xff\xda")] + b"\xff\xd9")


def tiff(width: int, height: int, compression: int = 1, next_directory: int = 0) -> bytes:
    """A TIFF of a grey image, whose size need not be true."""
    directory = 8 + 4  # after the header and four bytes of pixels
    tags = [
        (256, width),
        (257, height),
        (258, 8),
        (259, compression),
        (262, 1),
        (273, 8),  # offset of the pixels
        (277, 1),
        (278, height),
        (279, 4),  # bytes of pixels
    ]
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags)
    return (
        struct.pack("<2sHI", b"II", 42, directory)
        + bytes(4)
        + struct.pack("<H", len(tags))
        + entries
        + struct.pack("<I", next_directory)
    )


def tiff_bomb(folder: Path) -> Path:
    return write(folder, "broken.tiff", tiff(HUGE, HUGE))


def tiff_of_unknown_compression(folder: Path) -> Path:
    return write(folder, "broken.tiff", tiff(2, 2, compression=9999))


def tiff_of_too_few_pixels(folder: Path) -> Path:
    return write(folder, "broken.tiff", tiff(100, 100))


def tiff_whose_second_page_is_damaged(folder: Path) -> Path:
    return write(folder, "broken.tiff", tiff(100, 100, next_directory=2))


def animation(image_format: str, folder: Path) -> Path:
    frames = [Image.new("RGB", (20, 20), color) for color in ("red", "green", "blue")]
    file = folder / suffixed(image_format)
    frames[0].save(file, image_format, save_all=True, append_images=frames[1:])
    return file


def pdf(*objects: str, trailer: str = "") -> bytes:
    """A PDF of hand-written objects, of which the first one is the catalogue."""
    data = "%PDF-1.4\n"
    offsets: list[int] = []
    for number, body in enumerate(objects, start=1):
        offsets.append(len(data))
        data += f"{number} 0 obj\n{body}\nendobj\n"
    table = "".join(f"{offset:010d} 00000 n \n" for offset in offsets)
    size = len(objects) + 1
    return (
        f"{data}xref\n0 {size}\n0000000000 65535 f \n{table}"
        f"trailer\n<< /Size {size} /Root 1 0 R {trailer} >>\nstartxref\n{len(data)}\n%%EOF\n"
    ).encode("latin-1")


CATALOG = "<< /Type /Catalog /Pages 2 0 R >>"
ONE_PAGE = "<< /Type /Pages /Kids [3 0 R] /Count 1 >>"


def pdf_without_pages(folder: Path) -> Path:
    pages = "<< /Type /Pages /Kids [] /Count 0 >>"
    return write(folder, "broken.pdf", pdf(CATALOG, pages))


def pdf_without_page_tree(folder: Path) -> Path:
    return write(folder, "broken.pdf", pdf("<< /Type /Catalog >>"))


def pdf_whose_page_is_missing(folder: Path) -> Path:
    return write(folder, "broken.pdf", pdf(CATALOG, ONE_PAGE))


def pdf_bomb(folder: Path) -> Path:
    page = f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 {HUGE} {HUGE}] >>"
    return write(folder, "broken.pdf", pdf(CATALOG, ONE_PAGE, page))


def pdf_with_image_bomb(folder: Path) -> Path:
    page = (
        "<< /Type /Page /Parent 2 0 R /MediaBox [0 0 100 100] /Contents 4 0 R "
        "/Resources << /XObject << /Bomb 5 0 R >> >> >>"
    )
    drawing = "<< /Length 27 >>\nstream\n100 0 0 100 0 0 cm /Bomb Do\nendstream"
    image = (
        f"<< /Type /XObject /Subtype /Image /Width {HUGE} /Height {HUGE} /BitsPerComponent 8 "
        "/ColorSpace /DeviceGray /Length 4 >>\nstream\nabcd\nendstream"
    )
    return write(folder, "broken.pdf", pdf(CATALOG, ONE_PAGE, page, drawing, image))


def encrypted_pdf(folder: Path) -> Path:
    page = "<< /Type /Page /Parent 2 0 R /MediaBox [0 0 100 100] >>"
    password = "41" * 32  # of which no user password is the source
    encryption = f"<< /Filter /Standard /V 1 /R 2 /P -4 /O <{password}> /U <{password}> >>"
    data = pdf(CATALOG, ONE_PAGE, page, encryption, trailer=f"/Encrypt 4 0 R /ID [<{'42' * 16}>]")
    return write(folder, "broken.pdf", data)


def broken_link(folder: Path) -> Path:
    file = folder / "broken.png"
    file.symlink_to(folder / "missing.png")
    return file


def link_out_of_the_folder(folder: Path) -> Path:
    outside = write(folder.parent, "outside.png", encoded("PNG"))
    file = folder / "broken.png"
    file.symlink_to(outside)
    return file


def named_pipe(folder: Path) -> Path:
    file = folder / "broken.png"
    os.mkfifo(file)
    return file


def name_that_is_not_utf8(folder: Path) -> Path:
    name = os.fsdecode(b"broken-\xff.png")
    return write(folder, name, encoded("PNG"))


Maker = Callable[[Path], Path]
FORMATS = tuple(SUFFIX_OF_FORMAT)
BROKEN_PAGES: dict[str, Maker] = {
    **{f"empty {name}": partial(empty_file, name) for name in FORMATS},
    **{f"random bytes as {name}": partial(random_bytes, name) for name in FORMATS},
    **{f"header of {name}": partial(only_the_header, name) for name in FORMATS},
    **{f"first half of {name}": partial(first_half, name) for name in FORMATS},
    **{f"{name} of zeros": partial(zeros_after_the_header, name) for name in FORMATS},
    "image named .pdf": partial(other_format, "PNG", ".pdf"),
    "PDF named .png": partial(other_format, "PDF", ".png"),
    "GIF named .png": partial(other_format, "GIF", ".png"),
    "EPS named .png": partial(other_format, "EPS", ".png"),
    "PNG bomb": png_bomb,
    "JPEG bomb": jpeg_bomb,
    "TIFF bomb": tiff_bomb,
    "PDF bomb": pdf_bomb,
    "PDF with an image bomb": pdf_with_image_bomb,
    "PNG without width": png_without_width,
    "PNG of wrong checksum": png_of_wrong_checksum,
    "PNG of too few pixels": png_of_too_few_pixels,
    "JPEG without pixels": jpeg_without_pixels,
    "TIFF of unknown compression": tiff_of_unknown_compression,
    "TIFF of too few pixels": tiff_of_too_few_pixels,
    "TIFF whose second page is damaged": tiff_whose_second_page_is_damaged,
    "animated PNG": partial(animation, "PNG"),
    "animated WebP": partial(animation, "WEBP"),
    "PDF without pages": pdf_without_pages,
    "PDF without page tree": pdf_without_page_tree,
    "PDF whose page is missing": pdf_whose_page_is_missing,
    "encrypted PDF": encrypted_pdf,
    "broken link": broken_link,
    "link out of the folder": link_out_of_the_folder,
    "named pipe": named_pipe,
    "name that is not UTF-8": name_that_is_not_utf8,
}
