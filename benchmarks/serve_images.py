r"""The pictures of the page of `tilefold serve` in docs/images: a real Chromium, a model of the
demo, and pydocs.

    tilefold demo
    python -m benchmarks.serve_images --demo tilefold-demo/minutes-5-... [--documents 3000] \
        [--output docs/images]

An embedded Qdrant collection holds the demo's learned sparse vectors and dense ones of the packaged
all-MiniLM-L6-v2, beside a BM25 index and that model's token vectors for late interaction, which the
demo has stored: the page then has all of its columns. Needs `pip install
"tilefold[page,serve,qdrant]" pillow` and a Chromium (apt install chromium).
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

from sentence_transformers import SentenceTransformer, SparseEncoder

from tilefold import retrieval as r
from tilefold.cli._models import load_model
from tilefold.integrations.sentence_transformers import accelerate
from tilefold.recipes.backbone import minilm_path
from tilefold.retrieval.index.qdrant import Documents, Layout, QdrantCollection
from tilefold.retrieval.index.qdrant.index import QdrantIndex
from tilefold.serve import Served, Service, create_app
from tilefold.serve.searchable import Searchable
from tilefold.serve.server import Server, bind

QUERY = "how do I read a csv file"
COLOURS = 96  # of the picture's palette
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


def searchable(demo: Path, documents: int, folder: Path) -> Searchable:
    """The first documents of pydocs with everything that the page can show."""
    collection = r.load_collection("pydocs")
    vectors = r.read_vectors(demo / "vectors")
    vectors = vectors.take(range(min(documents, len(vectors))))
    texts = {name: collection.documents[name].contents for name in vectors.ids}
    sparse: Any = SparseEncoder(str(demo / "model"))
    accelerate(sparse)
    minilm: Any = SentenceTransformer(str(minilm_path()), local_files_only=True)
    dense = minilm.encode(list(texts.values()), batch_size=64)
    opened = QdrantCollection.embedded(
        folder,
        Layout(vectors.vocab_size, vectors.fingerprint, dense=dense.shape[1]),
    )
    opened.upsert(Documents(vectors.ids, vectors, dense))
    stored = next(demo.parent.glob("minilm-*"))
    late, _ = load_model(str(stored / "model"), kinds=("multi-vector",))
    kept = {name: collection.documents[name] for name in texts}
    return Searchable(
        "pydocs",
        QdrantIndex(opened),
        Served(sparse, "sparse", "demo"),
        kept,
        vectors,
        r.BM25Index.build(texts),
        Served(late, "multi-vector", "minilm"),
        r.open_tokens(stored / "tokens"),
        dense=Served(minilm, "dense", "minilm"),
    )


@contextmanager
def serving(found: Searchable) -> Iterator[int]:
    """The port of a server on the loopback address."""
    models = [model for model in (found.encoder, found.late, found.dense) if model is not None]
    service, opened, ready = (
        Service(models, searchable=found),
        bind("127.0.0.1", 0),
        threading.Event(),
    )
    server = Server(create_app(service), service, ready.set)
    thread = threading.Thread(target=server.run, args=([opened],))
    thread.start()
    try:
        if not ready.wait(60):
            raise RuntimeError("the server did not start.")
        yield opened.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join()


def picture(browser: Any, port: int, shot: dict[str, Any]) -> bytes:
    """A PNG with few colours."""
    from PIL import Image  # needed here alone

    page = browser.new_page(
        viewport={"width": shot["width"], "height": shot["height"]},
        color_scheme=shot["scheme"],
    )
    page.set_default_timeout(120_000)
    page.goto(f"http://127.0.0.1:{port}/")
    page.wait_for_selector("#options:not([hidden])")
    for name in shot["open"]:
        page.check(f"#{name}")
    page.fill("#query", QUERY)
    for _ in range(2):  # the second search is warm, and its times are those of use
        with page.expect_response(lambda response: response.url.endswith("/search")):
            page.click("#go")
        page.wait_for_selector("#results article")
        page.wait_for_timeout(500)
    raw = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    page.close()
    small = io.BytesIO()
    raw.quantize(COLOURS, dither=Image.Dither.NONE).save(small, "PNG", optimize=True)
    return small.getvalue()


def main(argv: Sequence[str]) -> int:
    """Make all pictures."""
    from playwright.sync_api import sync_playwright  # needed here alone

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--demo",
        type=Path,
        required=True,
        help="a folder of the demo with model and vectors",
    )
    parser.add_argument("--documents", type=int, default=3000)
    parser.add_argument("--output", type=Path, default=Path("docs/images"))
    options = parser.parse_args(argv)
    chromium = (
        shutil.which("chromium")
        or shutil.which("chromium-browser")
        or shutil.which("google-chrome")
    )
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(searchable(options.demo, options.documents, Path(folder))) as port,
        sync_playwright() as playwright,
    ):
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for name, shot in SHOTS.items():
            target = options.output / f"{name}.png"
            target.write_bytes(picture(browser, port, shot))
            print(f"{target}: {target.stat().st_size:,} bytes")
        browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
