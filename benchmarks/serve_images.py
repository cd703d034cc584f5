r"""Take the pictures of `tilefold serve`'s page for docs/images, with Chromium.

    tilefold demo --minutes 5
    python -m benchmarks.serve_images --demo tilefold-demo/minutes-5-... [--documents 3000] \
        [--output docs/images]
    python -m benchmarks.serve_images --pages

The page searches the demo's collection, pydocs, with everything that has a column on the page. An
embedded Qdrant collection holds the demo's sparse vectors, and dense vectors of the packaged
all-MiniLM-L6-v2. A BM25 index and the token vectors that the demo has stored are searched too.
With --pages, the pictures show page images of the tutorial on pages instead, with a random model.

It needs `pip install "tilefold[page,serve,qdrant]" pillow` and Chromium (apt install chromium).
"""

from __future__ import annotations

import argparse
import io
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sentence_transformers import MultiVectorEncoder, SentenceTransformer, SparseEncoder

from tilefold import retrieval as r
from tilefold.cli._models import load_model
from tilefold.integrations.sentence_transformers import accelerate
from tilefold.recipes.backbone import minilm_path
from tilefold.retrieval.index.qdrant import Documents, Layout, QdrantCollection
from tilefold.retrieval.index.qdrant.index import QdrantIndex
from tilefold.serve import Served, Service, create_app
from tilefold.serve.searchable import Searchable
from tilefold.serve.server import Server, bind
from tilefold.testing.page_models import save_page_model
from tilefold.testing.synthetic_pages import random_pages, random_words, save_page_collection

QUERY = "how do I read a csv file"
# words, pages and a query of the tutorial on page images
N_PAGE_WORDS = 300
N_PAGES = 30
PAGE_QUERY = "zopabu vine"
# colours of a picture's palette
COLOURS = 96
# pictures by name: size of the window, colour scheme, and ids of the checkboxes to tick
SHOTS: dict[str, dict[str, Any]] = {
    "serve-page": {
        "width": 980,
        "height": 1120,
        "scheme": "light",
        "open": ("fusion", "rerank", "columns"),
    },
    "serve-page-dark": {"width": 980, "height": 760, "scheme": "dark", "open": ("prf",)},
    "serve-page-phone": {"width": 360, "height": 760, "scheme": "light", "open": ("fusion",)},
}


# pictures of page images: the results, and a page with its heat map
PAGE_SHOTS: dict[str, dict[str, Any]] = {
    "serve-pages": {
        "width": 760,
        "height": 560,
        "scheme": "light",
        "open": (),
        "query": PAGE_QUERY,
    },
    "serve-pages-heat-map": {
        "width": 760,
        "height": 760,
        "scheme": "light",
        "open": (),
        "query": PAGE_QUERY,
        "opens_page": True,
    },
}


def searchable(demo: Path, documents: int, folder: Path) -> Searchable:
    """Index the first documents of pydocs with all representations that the page can show.

    Args:
        demo: the folder of the demo with a model and vectors.
        documents: the number of documents.
        folder: an empty folder for the Qdrant collection.
    """
    collection = r.load_collection("pydocs")
    vectors = r.read_vectors(demo / "vectors")
    vectors = vectors.take(range(min(documents, len(vectors))))
    texts = {name: collection.documents[name].contents for name in vectors.ids}
    sparse: Any = SparseEncoder(str(demo / "model"))
    accelerate(sparse)
    minilm: Any = SentenceTransformer(str(minilm_path()), local_files_only=True)
    dense = minilm.encode(list(texts.values()), batch_size=64)
    qdrant = QdrantCollection.embedded(
        folder,
        Layout(vectors.vocab_size, vectors.fingerprint, dense=dense.shape[1]),
    )
    qdrant.upsert(Documents(vectors.ids, vectors, dense))
    stored = next(demo.parent.glob("minilm-*"))
    late, _ = load_model(str(stored / "model"), kinds=("multi-vector",))
    indexed_documents = {name: collection.documents[name] for name in texts}
    return Searchable(
        "pydocs",
        QdrantIndex(qdrant),
        Served(sparse, "sparse", "demo"),
        indexed_documents,
        vectors,
        r.BM25Index.build(texts),
        Served(late, "multi-vector", "minilm"),
        r.open_tokens(stored / "tokens"),
        dense=Served(minilm, "dense", "minilm"),
    )


def searchable_pages(folder: Path) -> Searchable:
    """Index the pages of the tutorial on page images with its random model.

    Args:
        folder: an empty folder for model, pages, vectors and index.
    """
    words = random_words(N_PAGE_WORDS)
    save_page_collection(folder / "pages", random_pages(N_PAGES, words))
    save_page_model(folder / "model", "colqwen2", words=words)
    model: Any = MultiVectorEncoder(str(folder / "model"), device="cpu")
    collection = r.load_collection(folder / "pages")
    r.encode_tokens(model, collection.content(), folder / "tokens")
    index = r.LateIndex.build(r.open_tokens(folder / "tokens"), folder / "index")
    encoder = Served(model, "multi-vector", "random-model")
    return Searchable("pages", index, encoder, collection.documents)


@contextmanager
def serving(collection: Searchable) -> Iterator[int]:
    """Serve a collection in a thread, within a ``with`` block.

    Args:
        collection: the collection.

    Yields:
        The port of the server on the loopback address.
    """
    all_models = (collection.encoder, collection.late, collection.dense)
    models = [model for model in all_models if model is not None]
    service = Service(models, searchable=collection)
    bound = bind("127.0.0.1", 0)
    ready = threading.Event()
    server = Server(create_app(service), service, ready.set)
    thread = threading.Thread(target=server.run, args=([bound],))
    thread.start()
    try:
        if not ready.wait(60):
            raise RuntimeError("the server did not start.")
        _, port = bound.getsockname()
        yield port
    finally:
        server.should_exit = True
        thread.join()


def picture(browser: Any, port: int, shot: dict[str, Any]) -> bytes:
    """Search on the page, and return a screenshot as a PNG with few colours.

    Args:
        browser: a browser of playwright.
        port: the port of the server.
        shot: the settings of the picture, as in :data:`SHOTS`.
    """
    from PIL import Image

    page = browser.new_page(
        viewport={"width": shot["width"], "height": shot["height"]},
        color_scheme=shot["scheme"],
    )
    page.set_default_timeout(120_000)
    page.goto(f"http://127.0.0.1:{port}/")
    page.wait_for_selector("#options:not([hidden])")
    for name in shot["open"]:
        page.check(f"#{name}")
    page.fill("#query", shot.get("query", QUERY))
    # The first search is slower than usual, and the page shows times.
    for _ in range(2):
        with page.expect_response(lambda response: response.url.endswith("/search")):
            page.click("#go")
        page.wait_for_selector("#results article")
        page.wait_for_timeout(500)
    if shot.get("opens_page"):
        page.locator(".thumbnail").first.click()
        page.wait_for_selector("#viewer-image[src^='blob:']")
        page.wait_for_timeout(500)
    screenshot = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    page.close()
    png = io.BytesIO()
    screenshot.quantize(COLOURS, dither=Image.Dither.NONE).save(png, "PNG", optimize=True)
    return png.getvalue()


def main(argv: Sequence[str]) -> int:
    """Take all pictures.

    Args:
        argv: the command line.

    Returns:
        The exit code.
    """
    from playwright.sync_api import sync_playwright

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--demo", type=Path, help="a folder of the demo with model and vectors")
    source.add_argument("--pages", action="store_true", help="show page images")
    parser.add_argument("--documents", type=int, default=3000)
    parser.add_argument("--output", type=Path, default=Path("docs/images"))
    options = parser.parse_args(argv)
    chromium = (
        shutil.which("chromium")
        or shutil.which("chromium-browser")
        or shutil.which("google-chrome")
    )
    shots = PAGE_SHOTS if options.pages else SHOTS
    with tempfile.TemporaryDirectory() as name_of_folder, sync_playwright() as playwright:
        folder = Path(name_of_folder)
        if options.pages:
            collection = searchable_pages(folder)
        else:
            collection = searchable(options.demo, options.documents, folder)
        _take_pictures(collection, shots, playwright.chromium, chromium, options.output)
    return 0


def _take_pictures(
    collection: Searchable,
    shots: dict[str, dict[str, Any]],
    chromium: Any,
    executable: str | None,
    output: Path,
) -> None:
    """Serve a collection, and write its pictures.

    Args:
        collection: the collection.
        shots: pictures by name.
        chromium: the Chromium of playwright.
        executable: path of the browser.
        output: folder of the pictures.
    """
    with serving(collection) as port:
        browser = chromium.launch(executable_path=executable, args=["--no-sandbox"])
        for name, shot in shots.items():
            target = output / f"{name}.png"
            target.write_bytes(picture(browser, port, shot))
            print(f"{target}: {target.stat().st_size:,} bytes")
        browser.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
