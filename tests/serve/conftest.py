from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from tests.recipes.small import small_collection, tiny_masked_lm
from tests.serve.running import Client, serving, sparse_service
from tests.waiting import WAIT_SECONDS
from tilefold import retrieval as r
from tilefold.integrations.sentence_transformers import accelerate
from tilefold.recipes import ColbertRecipe
from tilefold.recipes.encoders import Base, IdfSpec, MlmSpec, build_encoder
from tilefold.recipes.loading import load_saved
from tilefold.retrieval.data.collection import Collection
from tilefold.serve.models import Served
from tilefold.serve.service import Service

CHROMIUM_PROGRAMS = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="session")
def collection() -> Collection:
    """A collection of 16 documents about Python modules."""
    return small_collection()


@pytest.fixture(scope="session")
def masked_lm(tmp_path_factory: pytest.TempPathFactory, collection: Collection) -> str:
    """A masked language model of three narrow layers that reads at most 64 tokens."""
    return str(tiny_masked_lm(tmp_path_factory.mktemp("models") / "tiny", collection))


@pytest.fixture(scope="session")
def sparse(masked_lm: str) -> Any:
    """An accelerated SPLADE model of random weights."""
    model = load_saved(masked_lm, "backbone")
    accelerate(model)
    return model


@pytest.fixture(scope="session")
def late(masked_lm: str) -> Any:
    """A late-interaction model of random weights."""
    recipe = ColbertRecipe(base_model=masked_lm, dimension=16, max_length=32, bf16=False)
    return recipe.build_model()


@pytest.fixture(scope="session")
def two_sided(masked_lm: str, collection: Collection) -> Any:
    """An inference-free model: queries are weights of their tokens, without the network."""
    base = Base(masked_lm, 64, list(collection.contents().values()))
    model = build_encoder(IdfSpec(), MlmSpec(), base)
    accelerate(model)
    return model


@pytest.fixture(scope="session")
def vectors(sparse: Any, collection: Collection) -> r.SparseVectors:
    """Sparse vectors of the documents."""
    return r.encode_queries(sparse, collection.contents())


@pytest.fixture(scope="module")
def client(sparse: Any, late: Any, masked_lm: str) -> Iterator[Client]:
    """A server with a sparse and a multi-vector model."""
    models = [Served(sparse, "sparse", masked_lm), Served(late, "multi-vector", "colbert")]
    with serving(Service(models)) as running:
        yield running


@pytest.fixture(scope="module")
def keyed_server(sparse: Any) -> Iterator[Client]:
    """A server that requires the key "sesam", and takes bodies of at most 10,000 bytes."""
    with serving(sparse_service(sparse, payload_limit=10_000), api_key="sesam") as running:
        yield running


@pytest.fixture
def keyed_client(keyed_server: Client) -> Client:
    """A new client, without the key, of the server that requires it."""
    return Client(keyed_server.port)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A real Chromium, controlled by Playwright, whose event loop tests of other modules lack."""
    api = pytest.importorskip(
        "playwright.sync_api",
        reason="Playwright is not installed: pip install 'tilefold[page]'",
    )
    chromium = next(filter(None, map(shutil.which, CHROMIUM_PROGRAMS)), None)
    if chromium is None:
        pytest.skip("there is no Chromium on this machine: apt install chromium")
    with api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """An empty tab of the browser."""
    opened = browser.new_page(viewport={"width": 1000, "height": 900})
    opened.set_default_timeout(1000 * WAIT_SECONDS)
    opened.said = []  # errors that the browser reports, and breaches of the policy
    opened.on(
        "console",
        lambda message: opened.said.append(message.text) if message.type == "error" else None,
    )
    opened.on("pageerror", lambda error: opened.said.append(str(error)))
    opened.on("dialog", lambda dialog: opened.said.append(dialog.message))
    yield opened
    opened.close()
