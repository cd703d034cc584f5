"""Collections of page images: ids, rendering, damaged files, and documents that name images."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

pytest.importorskip("PIL")
pytest.importorskip("pypdfium2")

from PIL import Image

from tests.retrieval.data.broken_pages import BROKEN_PAGES, CATALOG, ONE_PAGE, Maker, pdf
from tilefold._internal.files import sha256_file
from tilefold.retrieval import Page, PageRanges, load_beir, load_collection
from tilefold.retrieval.common.provenance import texts_digest
from tilefold.retrieval.data import page_folders, pages
from tilefold.retrieval.data.page_folders import open_page_folder
from tilefold.retrieval.data.pages import count_pages
from tilefold.retrieval.errors import DataError
from tilefold.testing.synthetic_pages import (
    draw_page,
    random_pages,
    random_words,
    save_page_collection,
)


def save(
    file: Path, color: str = "white", size: tuple[int, int] = (40, 20), **options: object
) -> Path:
    """Save an image of one colour."""
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, color).save(file, **options)
    return file


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of two PDFs and images of all formats, with queries and judgements."""
    folder = tmp_path_factory.mktemp("pages")
    drawn_pages = random_pages(9, random_words(100), words_per_page=6, size=(200, 100))
    save_page_collection(folder, drawn_pages)
    return folder


def test_a_folder_of_pdfs_and_images_is_a_collection_with_queries(folder: Path) -> None:
    collection = load_beir(folder)

    assert list(collection.documents) == [
        "report-0.pdf#p1",
        "report-0.pdf#p2",
        "report-0.pdf#p3",
        "report-2.pdf#p1",
        "report-2.pdf#p2",
        "report-2.pdf#p3",
        "scan-3.png",
        "scan-4.jpg",
        "scan-5.webp",
    ]
    assert collection.unread_files == {}
    assert len(collection.split_queries("test")) == 9
    page = collection.documents["report-2.pdf#p3"]
    assert page.metadata == {"file": "report-2.pdf", "page": 3}
    assert page.page == Page(folder / "report-2.pdf", 3)


def test_pages_are_rendered_at_the_resolution_that_is_asked_for(folder: Path) -> None:
    page = Page(folder / "report-0.pdf", 2)

    assert page.image(dpi=72).size == (200, 100)
    assert page.image(dpi=144).size == (400, 200)


def test_a_rendered_page_shows_what_was_drawn(tmp_path: Path) -> None:
    drawn = draw_page(["heading", "text"], size=(200, 200))
    drawn.image.save(tmp_path / "page.pdf", resolution=72, quality=95)

    rendered = Page(tmp_path / "page.pdf").image(dpi=72)

    left, top, right, bottom = drawn.boxes[0]
    inside = rendered.convert("L").crop((left, top, right, bottom))
    assert inside.getextrema()[0] < 130  # dark letters
    assert rendered.convert("L").crop((0, bottom + 60, 200, 200)).getextrema()[0] > 240


def test_page_ranges_choose_pages_of_each_file(folder: Path) -> None:
    listed = open_page_folder(folder, PageRanges.parse("2-"))

    assert list(listed.documents) == [
        "report-0.pdf#p2",
        "report-0.pdf#p3",
        "report-2.pdf#p2",
        "report-2.pdf#p3",
    ]


def test_page_ranges_without_pages_are_refused(folder: Path) -> None:
    with pytest.raises(DataError, match="got none in the range of pages"):
        open_page_folder(folder, PageRanges.parse("7"))


@pytest.mark.parametrize("text", ["", "0", "3-2", "1-2-3", "one", "-3", "1,,2"])
def test_malformed_page_ranges_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="page_ranges: expected"):
        PageRanges.parse(text)


def test_pages_of_subfolders_have_the_path_in_their_id(tmp_path: Path) -> None:
    save(tmp_path / "2021" / "a.png")
    save(tmp_path / "2022" / "a.PNG")
    save(tmp_path / ".hidden" / "a.png")
    (tmp_path / "notes.txt").write_text("not a page")

    assert list(open_page_folder(tmp_path).documents) == ["2021/a.png", "2022/a.PNG"]


def test_one_file_is_a_collection(folder: Path) -> None:
    collection = load_beir(folder / "report-0.pdf")

    assert list(collection.documents) == [f"report-0.pdf#p{number}" for number in (1, 2, 3)]
    assert collection.name == "report-0"


def test_a_tiff_has_several_pages(tmp_path: Path) -> None:
    colors = ("red", "lime", "blue")
    first, *others = [Image.new("RGB", (8, 8), color) for color in colors]
    first.save(tmp_path / "scan.tiff", save_all=True, append_images=others)

    documents = open_page_folder(tmp_path).documents

    assert list(documents) == ["scan.tiff#p1", "scan.tiff#p2", "scan.tiff#p3"]
    listed_pages = [document.page for document in documents.values()]
    assert [page.image().getpixel((0, 0)) for page in listed_pages] == [
        (255, 0, 0),
        (0, 255, 0),
        (0, 0, 255),
    ]


def test_an_image_is_turned_upright(tmp_path: Path) -> None:
    turned = Image.new("RGB", (40, 20))
    orientation = Image.Exif()
    orientation[0x0112] = 6  # by a quarter
    turned.save(tmp_path / "photo.jpg", exif=orientation)

    assert Page(tmp_path / "photo.jpg").image().size == (20, 40)


def test_a_rotated_page_of_a_pdf_is_turned_upright(tmp_path: Path) -> None:
    page = "<< /Type /Page /Parent 2 0 R /MediaBox [0 0 72 36] /Rotate 90 >>"
    (tmp_path / "turned.pdf").write_bytes(pdf(CATALOG, ONE_PAGE, page))

    assert Page(tmp_path / "turned.pdf").image(dpi=72).size == (36, 72)


def test_an_empty_page_of_a_pdf_is_white(tmp_path: Path) -> None:
    page = "<< /Type /Page /Parent 2 0 R /MediaBox [0 0 72 72] >>"
    (tmp_path / "empty.pdf").write_bytes(pdf(CATALOG, ONE_PAGE, page))

    assert Page(tmp_path / "empty.pdf").image(dpi=10).getextrema() == ((255, 255),) * 3


@pytest.mark.parametrize(
    ("mode", "color", "expected"),
    [
        pytest.param("1", 1, (255, 255, 255), id="black and white"),
        pytest.param("L", 100, (100, 100, 100), id="grey"),
        pytest.param("I;16", 256 * 100, (100, 100, 100), id="grey of 16 bits"),
        pytest.param("RGBA", (0, 0, 0, 0), (255, 255, 255), id="transparent"),
        pytest.param("LA", (0, 255), (0, 0, 0), id="opaque grey"),
        pytest.param("P", 0, (0, 0, 0), id="palette"),
    ],
)
def test_images_of_all_modes_become_rgb(
    tmp_path: Path,
    mode: str,
    color: object,
    expected: tuple[int, int, int],
) -> None:
    Image.new(mode, (4, 4), color).save(tmp_path / "image.png")

    image = Page(tmp_path / "image.png").image()

    assert image.mode == "RGB"
    assert image.getpixel((1, 1)) == expected


def test_the_fingerprint_is_that_of_the_contents_of_a_file(tmp_path: Path) -> None:
    white, other_white = save(tmp_path / "white.png"), save(tmp_path / "again.png")
    black = save(tmp_path / "black.png", "black")

    assert Page(white).fingerprint == Page(other_white).fingerprint
    assert Page(white).fingerprint != Page(black).fingerprint
    assert Page(white).fingerprint != Page(white, 2).fingerprint
    digest = texts_digest(load_beir(tmp_path).content())
    save(white, "red")
    assert texts_digest(load_beir(tmp_path).content()) != digest


def test_unchanged_files_are_not_read_again(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache, folder = tmp_path / "cache", tmp_path / "pages"
    for color in ("red", "lime"):
        os.utime(save(folder / f"{color}.png", color), (1e9, 1e9))
    digest = texts_digest(load_collection(folder, cache).content())
    read_files: list[str] = []

    def count(file: Path) -> int:
        read_files.append(file.name)
        return count_pages(file)

    monkeypatch.setattr(pages, "_sha256_of_states", {})
    monkeypatch.setattr(page_folders, "count_pages", count)
    assert texts_digest(load_collection(folder, cache).content()) == digest
    assert read_files == []

    os.utime(save(folder / "lime.png", "blue", (50, 20)), (1e9, 1e9))
    (folder / "red.png").unlink()
    changed = load_collection(folder, cache)
    assert read_files == ["lime.png"]
    expected = f"{sha256_file(folder / 'lime.png')}#1"
    assert changed.documents["lime.png"].page.fingerprint == expected


def test_a_damaged_cache_is_replaced(tmp_path: Path) -> None:
    cache, folder = tmp_path / "cache", tmp_path / "images"
    os.utime(save(folder / "a.png"), (1e9, 1e9))
    digest = texts_digest(load_collection(folder, cache).content())
    (file,) = (cache / "pages").glob("*.json")
    file.write_text("{}")

    assert texts_digest(load_collection(folder, cache).content()) == digest
    assert "a.png" in file.read_text()


@pytest.mark.parametrize(
    "make", [pytest.param(make, id=name) for name, make in BROKEN_PAGES.items()]
)
def test_a_broken_file_is_reported_and_the_others_are_read(tmp_path: Path, make: Maker) -> None:
    folder = tmp_path / "pages"
    good_file = save(folder / "good.png")
    make(folder)

    listed = open_page_folder(folder)

    assert listed.documents["good.png"].page == Page(good_file)
    broken_pages = [name for name in listed.documents if name != "good.png"]
    if broken_pages:  # the damage is where it is found only by decoding
        with pytest.raises(DataError, match=r"broken\."):
            listed.documents[broken_pages[-1]].page.image()
    else:
        ((name, reason),) = listed.unread_files.items()
        assert name.startswith("broken")
        assert str(folder / name) not in reason, "the name is the key"


def test_there_are_at_least_forty_kinds_of_broken_files() -> None:
    assert len(BROKEN_PAGES) >= 40


@pytest.mark.parametrize("name", ["PNG bomb", "JPEG bomb", "TIFF bomb"])
def test_bombs_are_refused_before_they_are_decoded(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "pages"
    save(folder / "good.png")
    BROKEN_PAGES[name](folder)

    (reason,) = open_page_folder(folder).unread_files.values()

    assert "more pixels than the limit" in reason


def test_an_image_over_the_limit_of_pixels_is_refused(tmp_path: Path) -> None:
    file = save(tmp_path / "large.png", size=(100, 101))

    assert Page(file).image(max_pixels=10_100).size == (100, 101)
    with pytest.raises(DataError, match="has 100 x 101 pixels, more than the limit of 10,000"):
        Page(file).image(max_pixels=10_000)
    with pytest.raises(DataError, match="more than the limit of 10,000"):
        count_pages(file, max_pixels=10_000)


def test_a_page_over_the_limit_of_pixels_is_rendered_at_fewer_dots_per_inch(folder: Path) -> None:
    page = Page(folder / "report-0.pdf")

    with pytest.raises(DataError, match="page 1 at 720 dpi has 2000 x 1000 pixels, more than"):
        page.image(dpi=720, max_pixels=100_000)
    assert page.image(dpi=72, max_pixels=100_000).size == (200, 100)


def test_page_ranges_without_pages_are_named_before_damaged_files(tmp_path: Path) -> None:
    save(tmp_path / "pages" / "good.png")
    (tmp_path / "pages" / "a.pdf").write_bytes(b"")

    with pytest.raises(DataError, match=r"in the range of pages.*1 damaged file, such as a\.pdf"):
        open_page_folder(tmp_path / "pages", PageRanges.parse("7"))


def test_an_encrypted_pdf_is_named_so(tmp_path: Path) -> None:
    save(tmp_path / "pages" / "good.png")
    BROKEN_PAGES["encrypted PDF"](tmp_path / "pages")

    (reason,) = open_page_folder(tmp_path / "pages").unread_files.values()

    assert "encrypted with a password" in reason


def test_a_folder_of_broken_files_only_is_refused_with_the_first_reason(tmp_path: Path) -> None:
    (tmp_path / "a.pdf").write_bytes(b"")

    with pytest.raises(DataError, match=r"got 1 damaged file, such as a\.pdf: the PDF"):
        load_beir(tmp_path)


def test_a_page_number_out_of_range_is_refused(folder: Path) -> None:
    with pytest.raises(DataError, match="expected a page from 1 to 3, got page 4"):
        Page(folder / "report-0.pdf", 4).image()
    with pytest.raises(DataError, match="expected a page from 1 to 1, got page 2"):
        Page(folder / "scan-3.png", 2).image()


def beir_of_images(folder: Path, *rows: dict[str, object]) -> Path:
    """A BEIR folder whose documents are the rows."""
    folder.mkdir(exist_ok=True)
    (folder / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_documents_of_a_beir_folder_name_image_files(tmp_path: Path, folder: Path) -> None:
    save(tmp_path / "images" / "a.png")
    (tmp_path / "report.pdf").write_bytes((folder / "report-0.pdf").read_bytes())
    beir_of_images(
        tmp_path,
        {"_id": "d1", "image": "images/a.png", "lang": "en"},
        {"_id": "d2", "image": "report.pdf#p3", "title": "Report"},
        {"_id": "d3", "text": "a text", "image": "images/a.png"},
    )

    collection = load_beir(tmp_path)

    assert collection.documents["d1"].page == Page(tmp_path / "images" / "a.png")
    assert collection.documents["d1"].metadata["lang"] == "en"
    assert collection.documents["d2"].page == Page(tmp_path / "report.pdf", 3)
    assert collection.documents["d2"].title == "Report"
    assert collection.content()["d3"] == "a text"
    assert collection.documents["d3"].metadata == {"image": "images/a.png"}


@pytest.mark.parametrize(
    ("image", "message"),
    [
        pytest.param("../outside.png", "expected a file in", id="outside"),
        pytest.param("/etc/passwd.png", "expected a file in", id="absolute"),
        pytest.param("notes.txt", "expected the path of an image or a PDF", id="no image"),
    ],
)
def test_images_outside_of_a_beir_folder_are_refused(
    tmp_path: Path,
    image: str,
    message: str,
) -> None:
    folder = beir_of_images(tmp_path / "beir", {"_id": "d1", "image": image})

    with pytest.raises(DataError, match=rf"corpus\.jsonl:1: 'image': .*{message}"):
        load_beir(folder)


def test_a_missing_image_of_a_row_fails_when_it_is_read(tmp_path: Path) -> None:
    save(tmp_path / "a.png")
    beir_of_images(tmp_path, {"_id": "d1", "image": "a.png"}, {"_id": "d2", "image": "b.png"})

    collection = load_beir(tmp_path)

    assert texts_digest(collection.content())
    with pytest.raises(DataError, match=r"b\.png"):
        collection.documents["d2"].page.image()


def test_texts_of_pages_are_refused(folder: Path) -> None:
    with pytest.raises(DataError, match=r"expected texts, got the page image 'report-0\.pdf#p1'"):
        load_beir(folder).contents()


def test_pages_are_not_saved_as_a_beir_folder(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="expected texts, got page images"):
        load_beir(folder).save_beir(tmp_path / "beir")


def test_page_ranges_of_texts_are_refused(beir: Path) -> None:
    with pytest.raises(ValueError, match="page_ranges: expected a folder of PDFs and images"):
        load_beir(beir, page_ranges=PageRanges.parse("1"))
