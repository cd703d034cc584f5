"""The tutorial on page images runs, and prints what its page shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tutorials import DOCS, TutorialRunner, blocks_of
from tilefold.testing.synthetic_pages import random_pages, random_words

pytest.importorskip("PIL")
pytest.importorskip("pypdfium2")
pytest.importorskip("sentence_transformers")


def assert_same_picture(name: str, file: Path) -> None:
    """Check that a picture of the documentation is a smaller copy of an image."""
    from PIL import Image, ImageChops

    with Image.open(DOCS / "images" / name) as picture, Image.open(file) as image:
        copy = image.convert("RGB").resize(picture.size)
        difference = ImageChops.difference(picture.convert("RGB"), copy)
    # The picture has fewer colours.
    assert sum(difference.convert("L").histogram()[48:]) < 200


@pytest.mark.slow
def test_the_tutorial_on_pages_runs_and_prints_what_its_page_shows(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("deleted.txt").write_text("scan-3.png\n", encoding="utf-8")
    runner = TutorialRunner(capsys, sizes_of_files={})

    runner.run(blocks_of("tutorial-pages.md"))

    assert Path("page-index/index.json").is_file()
    (heat_map_file,) = Path("heat-maps").iterdir()
    assert_same_picture("page-heat-map.png", heat_map_file)


def test_the_picture_of_the_tutorial_is_the_first_page_of_its_script() -> None:
    from PIL import Image, ImageChops

    first_page = random_pages(1, random_words(300))[0].image

    with Image.open(DOCS / "images" / "synthetic-page.png") as picture:
        assert picture.size == first_page.size
        # Versions of FreeType may smooth letters differently.
        difference = ImageChops.difference(picture.convert("RGB"), first_page)
    assert sum(difference.convert("L").histogram()[64:]) < 200
