"""Asymmetric models: every route with an LM head is fused, and a shared one only once."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from sentence_transformers import SparseEncoder
from sentence_transformers.base.modules import Router
from sentence_transformers.sparse_encoder.modules import SparseStaticEmbedding, SpladePooling

from tests.integrations.splade_models import TEXTS, assert_close, tiny_transformer
from tilefold.integrations.sentence_transformers import accelerate, encode_sparse, restore
from tilefold.modules import StaticQuery


def build(kind: str, folder: Path) -> SparseEncoder:
    document = tiny_transformer("bert", folder)
    if kind == "shared model":
        query = [document, SpladePooling("sum")]
    elif kind == "shared pooling":
        router = Router.for_query_document(query_modules=[document], document_modules=[document])
        return SparseEncoder(modules=[router, SpladePooling()], device="cpu")
    elif kind == "two models":
        query = [tiny_transformer("distilbert", folder), SpladePooling(activation_function="log1p_relu")]
    else:
        tokenizer = document.tokenizer
        query = [SparseStaticEmbedding(tokenizer, torch.rand(tokenizer.vocab_size))]
    router = Router.for_query_document(query_modules=query, document_modules=[document, SpladePooling()])
    return SparseEncoder(modules=[router], device="cpu")


KINDS = {"shared model": 1, "shared pooling": 1, "two models": 2, "static queries": 1}


@pytest.mark.parametrize(("kind", "heads"), KINDS.items())
def test_both_routes_score_as_stock(kind: str, heads: int, tokenizer_folder: Path) -> None:
    stock = build(kind, tokenizer_folder)
    fused = copy.deepcopy(stock)
    assert accelerate(fused).heads == heads
    for encode in ("encode_query", "encode_document"):
        expected = getattr(stock, encode)(TEXTS).to_dense()
        assert (expected > 0).any()
        assert_close(getattr(fused, encode)(TEXTS).to_dense(), expected, 1e-5)
        few = getattr(stock, encode)(TEXTS, max_active_dims=3).to_dense()
        for model in (stock, fused):
            rows = encode_sparse(model, TEXTS, task=encode.removeprefix("encode_"), top_k=3)
            assert_close(rows.to_dense(), few, 1e-5)
    restore(fused)
    assert torch.equal(fused.encode_document(TEXTS).to_dense(), expected)


@pytest.mark.parametrize("own", [False, True])
def test_a_padding_token_in_a_query_of_static_weights_counts_in_no_batch(own: bool, tokenizer_folder: Path) -> None:
    model = build("static queries", tokenizer_folder)
    if own:
        stock = model[0].sub_modules["query"][0]
        model[0].sub_modules["query"][0] = StaticQuery(stock.tokenizer, stock.weight.detach().clone())
    longer = "a much longer text than that one is, indeed"
    plain = model.encode_query(["quick fox", longer]).to_dense()
    accelerate(model)
    text = "[PAD][PAD] quick [PAD] fox"
    for rows in (
        torch.stack([model.encode_query(one).to_dense() for one in (text, longer)]),
        model.encode_query([text, longer]).to_dense(),
        model.encode_query([text, longer], batch_size=1).to_dense(),
        encode_sparse(model, [text, longer], task="query").to_dense(),
        encode_sparse(model, [text, longer], task="query", batch_size=1).to_dense(),
        model.encode_sparse_batch([text], task="query").to_dense(),
    ):
        assert_close(rows, plain[: len(rows)], 1e-6)
    restore(model)
    static = model[0].sub_modules["query"][0]
    assert "forward" not in vars(static)
    if own:
        assert_close(model.encode_query([text]).to_dense(), plain[:1], 1e-6)
