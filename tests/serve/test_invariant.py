"""Servers of models whose vectors have the same bits in every batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Normalize, Transformer
from sentence_transformers.sentence_transformer.modules import Pooling

from tests.serve.running import Client, serving
from tilefold.integrations.sentence_transformers import accelerate
from tilefold.recipes import ColbertRecipe
from tilefold.recipes.loading import load_saved
from tilefold.serve.models import Served
from tilefold.serve.service import Service

TEXTS = [
    "csv",
    "read and write files of rows",
    "sum",
    "random numbers, and their seeds",
    "a b c d e",
]


@pytest.fixture(scope="module")
def invariant_client(masked_lm: str) -> Iterator[Client]:
    """A server with a sparse and a multi-vector model, both with ``invariant=True``."""
    sparse: Any = load_saved(masked_lm, "backbone")
    recipe = ColbertRecipe(base_model=masked_lm, dimension=16, max_length=32, bf16=False)
    late = recipe.build_model()
    for model in (sparse, late):
        accelerate(model, invariant=True)
    models = [Served(sparse, "sparse", "splade"), Served(late, "multi-vector", "colbert")]
    with serving(Service(models)) as running:
        yield running


def test_invariant_vectors_are_normalized_again_after_raw_ones(masked_lm: str) -> None:
    transformer = Transformer(masked_lm)
    pooling = Pooling(transformer.get_embedding_dimension())
    dense = SentenceTransformer(modules=[transformer, pooling, Normalize()], device="cpu")
    accelerate(dense, invariant=True)
    invariant_forward = vars(dense[-1])["forward"]
    with serving(Service([Served(dense, "dense", "mean")])) as client:
        (raw,) = client.post("/embed", {"inputs": TEXTS[:1], "normalize": False}).json
        (vector,) = client.post("/embed", {"inputs": TEXTS[:1]}).json
    assert np.linalg.norm(raw) > 1.01
    assert abs(np.linalg.norm(vector) - 1) < 1e-6
    assert vars(dense[-1])["forward"] is invariant_forward


@pytest.mark.parametrize("path", ["/embed_sparse", "/embed_all"])
def test_answers_have_the_same_bits_in_every_batch(invariant_client: Client, path: str) -> None:
    together = invariant_client.post(path, {"inputs": TEXTS}).json
    for text, expected in zip(TEXTS, together, strict=True):
        assert invariant_client.post(path, {"inputs": [text]}).json == [expected]


def test_token_ids_have_the_same_bits_in_every_batch(invariant_client: Client) -> None:
    inputs = [[5, 6, 7], [8], list(range(5, 40))]
    together = invariant_client.post("/embed_sparse", {"inputs": inputs}).json
    for ids, expected in zip(inputs, together, strict=True):
        assert invariant_client.post("/embed_sparse", {"inputs": [ids]}).json == [expected]


def test_info_names_the_device_and_the_libraries(invariant_client: Client) -> None:
    invariant = invariant_client.get("/info").json["invariant"]
    assert set(invariant) == {"sparse", "multi-vector"}
    assert invariant["sparse"]["torch"] == torch.__version__
    assert invariant["sparse"]["device"]


def test_info_has_null_for_models_without_the_promise(client: Client) -> None:
    assert client.get("/info").json["invariant"] == {"sparse": None, "multi-vector": None}
