"""encode_sparse: the rows of encode, as CSR, without a dense [B, V]."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from sentence_transformers import SparseEncoder

from tests.integrations.splade_models import TEXTS, VOCABULARY, assert_close
from tilefold.integrations.sentence_transformers import accelerate, encode_sparse, is_accelerated, restore
from tilefold.retrieval import SparseVectors, vocabulary_fingerprint


@pytest.fixture
def model(tiny_folder: Path) -> SparseEncoder:
    return SparseEncoder(str(tiny_folder), device="cpu")


def test_rows_are_those_of_encode_in_the_order_of_the_texts(model: SparseEncoder) -> None:
    expected = model.encode(TEXTS).to_dense()
    got = encode_sparse(model, TEXTS, batch_size=3)
    assert got.layout == torch.sparse_csr and got.device.type == "cpu"
    assert_close(got.to_dense(), expected, 1e-5)
    assert not is_accelerated(model)
    with accelerate(model):
        assert torch.equal(encode_sparse(model, TEXTS, batch_size=3).to_dense(), got.to_dense())
        assert is_accelerated(model)


def test_rows_carry_the_vocabulary_into_vectors(model: SparseEncoder) -> None:
    rows = encode_sparse(model, TEXTS)
    vectors = SparseVectors.from_torch([f"d{i}" for i in range(len(TEXTS))], rows)
    assert vectors.fingerprint == vocabulary_fingerprint(model.tokenizer) is not None
    model.tokenizer.add_tokens(["entirely-new"])
    assert vocabulary_fingerprint(model.tokenizer) != vectors.fingerprint, "remembered for as many tokens only"


def test_an_accelerated_model_and_its_copies_carry_the_encoding_of_a_batch(model: SparseEncoder) -> None:
    accelerate(model)
    expected = model.encode_sparse_batch(TEXTS, task="document", top_k=8)
    # in another order of the texts, whose products may round otherwise
    assert_close(encode_sparse(model, TEXTS, task="document", top_k=8).to_dense(), expected.to_dense(), 1e-5)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.transformers_model.get_output_embeddings().bias.add_(1.0)
    assert (twin.encode_sparse_batch(TEXTS).values().sum() > expected.values().sum()).all()
    assert torch.equal(model.encode_sparse_batch(TEXTS, task="document", top_k=8).to_dense(), expected.to_dense())
    restore(model)
    assert not hasattr(model, "encode_sparse_batch")


def test_top_k_and_min_weight_prune_and_the_model_may_say_how_many(model: SparseEncoder) -> None:
    dense = model.encode(TEXTS).to_dense()
    got = encode_sparse(model, TEXTS, top_k=8)
    assert got.crow_indices().tolist() == [0, 8, 16, 24, 32]
    assert_close(got.to_dense(), model.encode(TEXTS, max_active_dims=8).to_dense(), 1e-5)
    threshold = float(dense.max()) / 2
    assert (encode_sparse(model, TEXTS, min_weight=threshold).values() > threshold).all()
    model.max_active_dims = 5
    assert encode_sparse(model, TEXTS).crow_indices().diff().tolist() == [5] * 4


def test_prompts_are_those_of_encode(model: SparseEncoder) -> None:
    model.prompts = {"query": "find: ", "passage": "text: ", "other": "other: "}
    assert_close(encode_sparse(model, TEXTS, task="query").to_dense(), model.encode_query(TEXTS).to_dense(), 1e-5)
    assert_close(encode_sparse(model, TEXTS, task="document").to_dense(), model.encode_document(TEXTS).to_dense(), 1e-5)
    other = model.encode(TEXTS, prompt_name="other").to_dense()
    assert_close(encode_sparse(model, TEXTS, prompt_name="other").to_dense(), other, 1e-5)
    assert_close(encode_sparse(model, TEXTS, prompt="other: ").to_dense(), other, 1e-5)


def test_no_texts_give_no_rows(model: SparseEncoder) -> None:
    assert encode_sparse(model, []).shape == (0, VOCABULARY)


def test_the_mode_of_the_model_is_kept(model: SparseEncoder) -> None:
    model.train()
    encode_sparse(model, TEXTS)
    assert model.training and model.transformers_model.training


def test_wrong_arguments_name_themselves(model: SparseEncoder) -> None:
    with pytest.raises(TypeError, match=r"texts must be a sequence of strings, got one string; pass \[text\]"):
        encode_sparse(model, "one text")
    with pytest.raises(ValueError, match="batch_size must be a positive integer, got 0"):
        encode_sparse(model, TEXTS, batch_size=0)
    with pytest.raises(ValueError, match=r"prompt_name must be one of .*got 'missing'"):
        encode_sparse(model, TEXTS, prompt_name="missing")
