"""A server of page images: a small random ColPali model, and an index of synthetic pages."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sentence_transformers import MultiVectorEncoder

from tilefold import retrieval as r
from tilefold.serve.models import Served
from tilefold.serve.searchable import Searchable
from tilefold.serve.service import Service
from tilefold.testing.page_models import save_page_model
from tilefold.testing.synthetic_pages import random_pages, random_words, save_page_collection


@dataclass(frozen=True)
class PageParts:
    """What a server of pages is made of.

    Attributes:
        model: a model of page images.
        collection: the pages.
        index: an index of the pages' token vectors.
        folder: the folder of the model, the pages and the index.
    """

    model: Any
    collection: r.Collection
    index: r.LateIndex
    folder: Path

    def service(self, **limits: Any) -> Service:
        """Return a service of the model and the index, with some limits."""
        from tilefold.serve.settings import Limits

        served = Served(self.model, "multi-vector", "tiny-colpali")
        searchable = Searchable("pages", self.index, served, self.collection.documents)
        return Service([served], Limits(**limits), searchable=searchable)


def make_page_parts(folder: Path, n_pages: int = 7) -> PageParts:
    """Save a model and pages in a folder, and index the pages."""
    words = random_words(60)
    model: Any = MultiVectorEncoder(
        str(save_page_model(folder / "model", "colpali", words=words)),
        device="cpu",
    )
    save_page_collection(
        folder / "pages", random_pages(n_pages, words, size=(105, 149), font_size=9)
    )
    collection = r.load_collection(folder / "pages")
    images = [document.page.image() for document in collection.documents.values()]
    vectors = model.encode_document(images, show_progress_bar=False)
    dimension = vectors[0].size(1)
    tokens = r.TokenVectors.pack(list(collection.documents), vectors, dimension, "fp16")
    index = r.LateIndex.build(tokens, folder / "index")
    return PageParts(model, collection, index, folder)
