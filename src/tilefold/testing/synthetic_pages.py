"""Synthetic pages of words and tables, and collections of them as PDFs and images.

They replace scanned documents in tests, tutorials and benchmarks that must not download anything.
A page knows where each of its words is, so that a heat map can be checked.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["SyntheticPage", "draw_page", "random_pages", "random_words", "save_page_collection"]

Box = tuple[int, int, int, int]  # left, top, right and bottom in pixels
_CONSONANTS = "bdfgklmnprstvz"
_VOWELS = "aeiou"
_COLORS = ("black", "navy", "darkgreen", "maroon")
_TABLE_COLUMNS = 3
_RANDOM_TABLE_SIZES = (0, 6, 9)  # words in the table of a random page, 0 for a page without a table
_IMAGE_SUFFIXES = (".png", ".jpg", ".webp", ".tiff")


@dataclass(frozen=True)
class SyntheticPage:
    """A page and the words on it.

    Attributes:
        image: the page, in RGB.
        words: its words, in reading order.
        boxes: the box of each word in pixels.
    """

    image: Image
    words: tuple[str, ...]
    boxes: tuple[Box, ...]


def random_words(n_words: int, seed: int = 0) -> list[str]:
    """Return different pronounceable words of two or three syllables.

    Args:
        n_words: number of words.
        seed: seed of the order.
    """
    syllables = [consonant + vowel for consonant in _CONSONANTS for vowel in _VOWELS]
    generator = random.Random(seed)  # noqa: S311
    words: dict[str, None] = {}
    while len(words) < n_words:
        n_syllables = generator.choice((2, 3))
        words["".join(generator.choices(syllables, k=n_syllables))] = None
    return list(words)


def draw_page(
    words: Sequence[str],
    *,
    size: tuple[int, int] = (420, 594),
    font_size: int = 18,
    n_table_words: int = 0,
    seed: int = 0,
) -> SyntheticPage:
    """Draw words on a page: a heading, lines of text and a table.

    Words that do not fit are left out, and are not among the words of the page.

    Args:
        words: the words. The first one is the heading, and the last `n_table_words` are in a table.
        size: width and height in pixels.
        font_size: height of the font of the text in pixels; the heading has twice as much.
        n_table_words: number of words in the table.
        seed: seed of the colours and the indents of lines.
    """
    from PIL import Image, ImageDraw

    generator = random.Random(seed)  # noqa: S311
    image = Image.new("RGB", size, "white")
    writer = _Writer(ImageDraw.Draw(image), size, generator)
    first_table_word = len(words) - n_table_words
    for word in words[:1]:
        writer.write(word, 2 * font_size)
        writer.start_line()
    for word in words[1:first_table_word]:
        writer.write(word, font_size)
    writer.write_table(words[max(1, first_table_word) :], font_size)
    return SyntheticPage(image, tuple(writer.words), tuple(writer.boxes))


class _Writer:
    """Writes words on a page from left to right and from top to bottom.

    Args:
        drawing: the ``ImageDraw`` of the page.
        size: width and height of the page in pixels.
        generator: source of colours and indents.
    """

    def __init__(self, drawing: Any, size: tuple[int, int], generator: random.Random) -> None:
        """Start at the upper left corner of a page, within its margins."""
        self.words: list[str] = []
        self.boxes: list[Box] = []
        self._drawing = drawing
        self._width, self._height = size
        self._generator = generator
        self._margin = self._width // 20
        self._left = self._margin
        self._top = self._margin
        self._line_height = 0

    def start_line(self) -> None:
        """Continue on the next line, with a random indent."""
        self._left = self._margin + self._generator.randrange(self._margin + 1)
        self._top += self._line_height
        self._line_height = 0

    def write(self, word: str, font_size: int) -> bool:
        """Write a word, on the next line if the line is full.

        Returns:
            Whether the word has fitted on the page.
        """
        width = self._text_width(word, font_size)
        if self._left + width > self._width - self._margin:
            self.start_line()
        right = self._left + width
        fits = right <= self._width and self._top + font_size <= self._height
        if fits:
            self._draw(word, font_size, self._left, self._top)
            self._left = right + font_size // 2
            self._line_height = max(self._line_height, 3 * font_size // 2)
        return fits

    def write_table(self, words: Sequence[str], font_size: int) -> None:
        """Write words in the cells of a table with lines around them."""
        if not words:
            return
        self.start_line()
        cell_width = (self._width - 2 * self._margin) // _TABLE_COLUMNS
        cell_height = 3 * font_size // 2
        for number, word in enumerate(words):
            row, column = divmod(number, _TABLE_COLUMNS)
            left = self._margin + column * cell_width
            top = self._top + row * cell_height
            is_too_wide = self._text_width(word, font_size) > cell_width
            if is_too_wide or top + cell_height > self._height:
                return
            cell = (left, top, left + cell_width, top + cell_height)
            self._drawing.rectangle(cell, outline="gray")
            self._draw(word, font_size, left + 2, top + 2)

    def _text_width(self, word: str, font_size: int) -> int:
        return int(self._drawing.textlength(word, font=_font(font_size))) + 1

    def _draw(self, word: str, font_size: int, left: int, top: int) -> None:
        """Draw a word, and note its box."""
        font = _font(font_size)
        color = self._generator.choice(_COLORS)
        self._drawing.text((left, top), word, fill=color, font=font)
        box = self._drawing.textbbox((left, top), word, font=font)
        self.words.append(word)
        self.boxes.append((int(box[0]), int(box[1]), int(box[2]), int(box[3])))


def _font(font_size: int) -> Any:
    """Return the font that is bundled with Pillow, so that pages are equal on all machines."""
    from PIL import ImageFont

    return ImageFont.load_default(font_size)


def random_pages(
    n_pages: int,
    vocabulary: Sequence[str],
    *,
    words_per_page: int = 40,
    size: tuple[int, int] = (420, 594),
    font_size: int = 18,
    seed: int = 0,
) -> list[SyntheticPage]:
    """Draw pages of random words. Two of three have a table if they have more than 18 words.

    Args:
        n_pages: number of pages.
        vocabulary: the words to choose from.
        words_per_page: number of words that are written on a page, as far as they fit.
        size: width and height of a page in pixels.
        font_size: height of the font in pixels.
        seed: seed of the words.
    """
    generator = random.Random(seed)  # noqa: S311
    # At least half of the words of a page are in its text.
    has_room_for_table = words_per_page > 2 * max(_RANDOM_TABLE_SIZES)
    pages: list[SyntheticPage] = []
    for number in range(n_pages):
        words = generator.sample(list(vocabulary), min(words_per_page, len(vocabulary)))
        n_table_words = generator.choice(_RANDOM_TABLE_SIZES) if has_room_for_table else 0
        pages.append(
            draw_page(
                words,
                size=size,
                font_size=font_size,
                n_table_words=n_table_words,
                seed=seed + number,
            ),
        )
    return pages


def save_page_collection(
    folder: Path,
    pages: Sequence[SyntheticPage],
    *,
    pages_per_pdf: int = 3,
    pdf_dpi: int = 72,
    words_per_query: int = 2,
    seed: int = 0,
) -> dict[str, SyntheticPage]:
    """Save pages as PDFs and images, with a query for each page.

    Every second group of pages is a PDF. The pages of the other groups are PNG, JPEG, WebP and TIFF
    files in turn. ``queries.jsonl`` has words of each page, and ``qrels/test.tsv`` the judgements.

    Args:
        folder: the folder, which is created.
        pages: the pages.
        pages_per_pdf: number of pages of a group.
        pdf_dpi: dots per inch of the pages in PDFs, which determine their size on paper.
        words_per_query: number of words of a page that are its query.
        seed: seed of the words of queries.

    Returns:
        Id of each page in the collection -> page.
    """
    folder.mkdir(parents=True, exist_ok=True)
    generator = random.Random(seed)  # noqa: S311
    suffixes = itertools.cycle(_IMAGE_SUFFIXES)
    page_of_id: dict[str, SyntheticPage] = {}
    for number, start in enumerate(range(0, len(pages), pages_per_pdf)):
        group = pages[start : start + pages_per_pdf]
        if number % 2 == 0:
            ids = _save_pdf(folder, f"report-{number}.pdf", group, pdf_dpi)
        else:
            ids = [
                _save_image(folder, f"scan-{start + offset}{next(suffixes)}", page)
                for offset, page in enumerate(group)
            ]
        page_of_id.update(zip(ids, group, strict=True))
    _save_queries(folder, page_of_id, words_per_query, generator)
    return page_of_id


def _save_pdf(folder: Path, name: str, pages: Sequence[SyntheticPage], dpi: int) -> list[str]:
    """Save pages as a PDF, and return their ids."""
    first_image, *other_images = [page.image for page in pages]
    first_image.save(folder / name, save_all=True, append_images=other_images, resolution=dpi)
    return [f"{name}#p{number}" for number in range(1, len(pages) + 1)]


def _save_image(folder: Path, name: str, page: SyntheticPage) -> str:
    """Save a page as an image, and return its id."""
    page.image.save(folder / name)
    return f"{name}#p1" if name.endswith(".tiff") else name


def _save_queries(
    folder: Path,
    page_of_id: dict[str, SyntheticPage],
    words_per_query: int,
    generator: random.Random,
) -> None:
    """Save a query for each page, and the relevance judgements, in the file format of BEIR.

    A query is a random sample of the words of its page, the only page that is relevant.

    Args:
        folder: the folder of the collection.
        page_of_id: page id -> page.
        words_per_query: largest number of words of a query.
        generator: chooses the words.
    """
    query_lines: list[str] = []
    judgement_lines = ["query-id\tcorpus-id\tscore\n"]
    for number, (page_id, page) in enumerate(page_of_id.items()):
        words = generator.sample(page.words, min(words_per_query, len(page.words)))
        query_lines.append(json.dumps({"_id": f"q{number}", "text": " ".join(words)}) + "\n")
        judgement_lines.append(f"q{number}\t{page_id}\t1\n")
    (folder / "queries.jsonl").write_text("".join(query_lines), encoding="utf-8")
    (folder / "qrels").mkdir(exist_ok=True)
    (folder / "qrels" / "test.tsv").write_text("".join(judgement_lines), encoding="utf-8")
