"""A Qdrant collection in a folder, over HTTP, or on the server of ``TILEFOLD_QDRANT_URL``."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.retrieval.index.qdrant.documents import OpenCollection
from tests.retrieval.qdrant_over_http import OverHttp
from tilefold.retrieval.index.qdrant import Layout, QdrantCollection

SERVER_URL = os.environ.get("TILEFOLD_QDRANT_URL")
NO_SERVER = pytest.mark.skipif(
    SERVER_URL is None,
    reason="TILEFOLD_QDRANT_URL names no Qdrant server",
)


@pytest.fixture(params=["embedded", "http", pytest.param("server", marks=NO_SERVER)])
def open_collection(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[OpenCollection]:
    """A function that opens the one collection of a test, any number of times."""
    opened: list[QdrantCollection] = []
    name = f"tilefold-test-{uuid.uuid4().hex}"
    http = OverHttp() if request.param == "http" else None

    def open_again(layout: Layout | None = None) -> QdrantCollection:
        if request.param == "embedded":
            collection = QdrantCollection.embedded(tmp_path / "collection", layout)
        else:
            url = str(SERVER_URL) if http is None else http.url
            collection = QdrantCollection.server(url, name, layout, patience=2)
        opened.append(collection)
        return collection

    yield open_again
    for collection in opened:
        if request.param == "server":
            collection._engine.drop()
        collection.close()
    if http is not None:
        http.stop()
