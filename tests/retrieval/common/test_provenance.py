"""Fingerprints tell models apart whose weights are equal and whose vectors are not."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from sentence_transformers import SentenceTransformer, SparseEncoder
from sentence_transformers.base.modules import Normalize, Router, Transformer
from sentence_transformers.sentence_transformer.modules import Pooling
from sentence_transformers.sparse_encoder.modules import SparseStaticEmbedding, SpladePooling

from tilefold.integrations.sentence_transformers import accelerate, restore
from tilefold.retrieval.common.provenance import model_fingerprint


def sparse_with(splade: Any, pooling: SpladePooling) -> SparseEncoder:
    """A model of the same network and prompts with another pooling."""
    return SparseEncoder(modules=[splade[0], pooling], prompts=splade.prompts, device="cpu")


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Transformer:
    from tests.recipes.small import VOCABULARY, make_tokenizer_folder, tiny_network

    folder = make_tokenizer_folder(tmp_path_factory.mktemp("dense"), VOCABULARY)
    tiny_network("bert", num_hidden_layers=1).save_pretrained(str(folder))
    return Transformer(str(folder))


def dense_of(network: Transformer, pooling_mode: Any, *others: torch.nn.Module) -> Any:
    pooling = Pooling(network.get_embedding_dimension(), pooling_mode)
    return SentenceTransformer(modules=[network, pooling, *others], device="cpu")


def test_sparse_models_with_other_poolings_have_other_fingerprints(splade: Any) -> None:
    poolings = [
        SpladePooling("max", "relu"),
        SpladePooling("sum", "relu"),
        SpladePooling("max", "log1p_relu"),
    ]
    fingerprints = {model_fingerprint(sparse_with(splade, pooling)) for pooling in poolings}
    assert len(fingerprints) == len(poolings)


def test_dense_models_with_other_modules_have_other_fingerprints(network: Transformer) -> None:
    models = [
        dense_of(network, "mean"),
        dense_of(network, "cls"),
        dense_of(network, "mean", Normalize()),
    ]
    assert len({model_fingerprint(model) for model in models}) == len(models)


@pytest.mark.parametrize(
    "pooling_mode",
    ["mean", pytest.param(("mean", "max"), id="two modes, which are a list in the file")],
)
def test_a_dense_model_that_is_saved_and_loaded_has_the_same_fingerprint(
    network: Transformer,
    pooling_mode: Any,
    tmp_path: Path,
) -> None:
    model = dense_of(network, pooling_mode, Normalize())
    model.save_pretrained(str(tmp_path / "saved"))
    loaded = SentenceTransformer(str(tmp_path / "saved"), device="cpu")
    assert model_fingerprint(loaded) == model_fingerprint(model)


def test_a_sparse_model_has_the_same_fingerprint_after_encoding_and_after_saving(
    splade: Any,
    tmp_path: Path,
) -> None:
    model = sparse_with(splade, SpladePooling("sum"))
    before = model_fingerprint(model)
    model.encode(["one text"])
    assert model_fingerprint(model) == before
    model.save_pretrained(str(tmp_path / "saved"))
    assert model_fingerprint(SparseEncoder(str(tmp_path / "saved"), device="cpu")) == before


def test_a_late_interaction_model_that_is_saved_and_loaded_has_the_same_fingerprint(
    late: Any,
    tmp_path: Path,
) -> None:
    late.save_pretrained(str(tmp_path / "saved"))
    loaded = type(late)(str(tmp_path / "saved"), device="cpu")
    assert model_fingerprint(loaded) == model_fingerprint(late)


@pytest.mark.parametrize("kind", ["splade", "late"])
def test_acceleration_keeps_the_fingerprint(request: pytest.FixtureRequest, kind: str) -> None:
    model = copy.deepcopy(request.getfixturevalue(kind))
    before = model_fingerprint(model)
    accelerate(model)
    model.encode_document(["one text"])
    assert model_fingerprint(model) == before
    restore(model)
    assert model_fingerprint(model) == before


def test_poolings_within_a_router_count(splade: Any) -> None:
    pooling = SpladePooling("max")
    router = Router.for_query_document(
        query_modules=[SparseStaticEmbedding(splade.tokenizer)],
        document_modules=[splade[0], pooling],
    )
    model = SparseEncoder(modules=[router], device="cpu")
    before = model_fingerprint(model)
    pooling.pooling_strategy = "sum"
    assert model_fingerprint(model) != before


def test_modules_without_settings_count_by_their_class(network: Transformer) -> None:
    class Doubled(torch.nn.Module):
        def forward(self, features: dict[str, Any]) -> dict[str, Any]:
            return features | {"sentence_embedding": 2 * features["sentence_embedding"]}

    doubled = dense_of(network, "mean", Doubled())
    assert model_fingerprint(doubled) != model_fingerprint(dense_of(network, "mean"))
    assert model_fingerprint(doubled) == model_fingerprint(copy.deepcopy(doubled))
