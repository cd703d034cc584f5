"""Two hundred pages from files to the browser, by the command line alone.

The encoding is killed and resumed, and files of all kinds of damage are among the pages. The last
test needs Playwright and a Chromium; ``make test-page`` runs it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from tests import programs
from tests.processes import environment
from tests.retrieval.data.broken_pages import BROKEN_PAGES
from tests.serve.running import served
from tests.stopping import stopping_after_shards
from tests.waiting import wait_until
from tilefold.ops import maxsim
from tilefold.retrieval import encode_texts, load_collection, open_tokens
from tilefold.testing.page_models import save_page_model
from tilefold.testing.synthetic_pages import random_pages, random_words, save_page_collection

pytestmark = pytest.mark.slow

N_PAGES = 200
N_SAVED_SHARDS = 3  # that the encoding has written when it is killed
WORDS = random_words(60)
QUERY = " ".join(WORDS[:2])
ROUNDING = 2**-9  # of a score, by vectors in fp16


@dataclass(frozen=True)
class Walk:
    """Files of the walk.

    Attributes:
        model: a random ColPali model.
        pages: PDFs and images, and a file of each kind of damage.
        tokens: vectors of the pages.
        index: index of the vectors.
        result: JSON that the resumed encoding printed.
        n_saved: number of shards that the killed encoding left.
    """

    model: Path
    pages: Path
    tokens: Path
    index: Path
    result: dict[str, Any]
    n_saved: int


def tilefold(*arguments: str | Path) -> str:
    """Run a command of tilefold in a process, and return what it printed."""
    done = programs.run("-m", "tilefold.cli", *arguments, env=environment(OMP_NUM_THREADS="1"))
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def walk(tmp_path_factory: pytest.TempPathFactory) -> Walk:
    """Encode the pages by a command that is killed and run again, and index them."""
    folder = tmp_path_factory.mktemp("walk")
    model = save_page_model(folder / "model", "colpali", words=WORDS)
    pages, tokens, index = folder / "pages", folder / "tokens", folder / "index"
    drawn = random_pages(N_PAGES, WORDS, words_per_page=8, size=(210, 297), font_size=12)
    save_page_collection(pages, drawn, pages_per_pdf=10)
    for number, make in enumerate(BROKEN_PAGES.values()):
        damage = folder / f"damage-{number}"
        damage.mkdir()
        damaged_file = make(damage)
        damaged_file.rename(pages / f"damaged-{number}-{damaged_file.name}")
    options = ("--model", model, "--data", pages, "--page-workers", "1", "--shard-size", "16")
    encode = ("encode", *options, "--output", tokens, "--json")
    with killed_after_shards(tokens, *encode):
        pass
    n_saved = len(list(tokens.glob("part-*.safetensors")))
    result = json.loads(tilefold(*encode))
    stored = ("--tokens", tokens, "--storage", "fp16")
    tilefold("index", "--backend", "late", *stored, "--output", index)
    return Walk(model, pages, tokens, index, result, n_saved)


@contextmanager
def killed_after_shards(folder: Path, *arguments: str | Path) -> Iterator[None]:
    """Run a command of tilefold that writes ``N_SAVED_SHARDS`` shards, and kill it then."""
    command = ("-c", stopping_after_shards(N_SAVED_SHARDS), *arguments)
    with programs.start(*command, env=environment(OMP_NUM_THREADS="1")) as process:
        try:
            wait_until(lambda: len(list(folder.glob("part-*.safetensors"))) >= N_SAVED_SHARDS)
            yield
        finally:
            process.kill()


def test_a_killed_encoding_resumes_and_loses_no_page(walk: Walk) -> None:
    collection = load_collection(walk.pages)
    failed = walk.result["failed"]
    stored_ids = open_tokens(walk.tokens).ids
    good_ids = [name for name in collection.documents if not name.startswith("damaged-")]
    assert walk.n_saved == N_SAVED_SHARDS
    assert len(good_ids) == N_PAGES
    assert set(good_ids) <= set(stored_ids)
    assert not set(failed) & set(good_ids)
    # Each kind of damage is reported: a file that cannot be opened, or a page that is not decoded.
    reported = {name.split("-broken")[0] for name in [*walk.result["unread_files"], *failed]}
    assert reported == {f"damaged-{number}" for number in range(len(BROKEN_PAGES))}


def test_a_search_finds_the_best_pages_and_draws_their_heat_maps(
    walk: Walk,
    tmp_path: Path,
) -> None:
    parts = ("--index", walk.index, "--model", walk.model, "--data", walk.pages)
    maps = tmp_path / "maps"
    printed = tilefold("search", QUERY, *parts, "--k", "3", "--heat-maps", maps, "--json")

    hits = json.loads(printed)["hits"]
    scores = exact_scores(walk)
    best_scores = sorted(scores.values(), reverse=True)[:3]
    assert [hit["score"] for hit in hits] == pytest.approx(best_scores, rel=ROUNDING)
    for hit in hits:
        assert hit["score"] == pytest.approx(scores[hit["id"]], rel=ROUNDING)
        with Image.open(hit["heat_map"]) as image:
            assert image.format == "PNG"


def exact_scores(walk: Walk) -> dict[str, float]:
    """Return the score of each page by its stored vectors, without the index."""
    from sentence_transformers import MultiVectorEncoder

    model: Any = MultiVectorEncoder(str(walk.model), device="cpu")
    query = encode_texts(model, {"q": QUERY}, kind="query").rows(0)
    store = open_tokens(walk.tokens)
    page_ids = list(store.ids)
    stored = store.read(page_ids)
    scores = maxsim(
        query.float()[None],
        stored.values.float(),
        cu_seqlens_d=stored.offsets.to(torch.int32),
    )
    return dict(zip(page_ids, scores[0].tolist(), strict=True))


def test_a_browser_shows_the_pages_and_their_heat_maps(page: Any, walk: Walk) -> None:
    parts = ("--index", walk.index, "--model", walk.model, "--data", walk.pages)
    with served(*parts) as (_, client, _):
        page.goto(f"http://127.0.0.1:{client.port}/?q={QUERY.replace(' ', '+')}")
        page.wait_for_selector("#results article .thumbnail img[src^='blob:']")
        titles = page.locator("#results article h3").all_inner_texts()
        page.locator(".thumbnail").first.click()
        page.wait_for_selector("#viewer[open] #viewer-image[src^='blob:']")
        labels = page.locator("#viewer-tokens button").all_inner_texts()
        n_pixels = page.evaluate("document.querySelector('#viewer-image').naturalWidth")
    scores = exact_scores(walk)
    assert scores[titles[0].removeprefix("1. ")] == pytest.approx(
        max(scores.values()),
        rel=ROUNDING,
    )
    assert labels == ["Heat map", "Page", *WORDS[:2]]
    assert n_pixels > 0
    assert page.said == []
