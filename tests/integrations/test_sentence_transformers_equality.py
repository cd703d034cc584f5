"""An accelerated SparseEncoder gives the scores and the gradients of the stock one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from sentence_transformers import SparseEncoder
from sentence_transformers.sparse_encoder.modules import SpladePooling
from torch import Tensor

from tests.integrations.splade_models import (
    TEXTS,
    assert_close,
    assert_same_training,
    build_tiny_splade,
    needs_all_causal_logits,
    scores_and_gradients,
    without_dropout,
)
from tilefold.integrations.sentence_transformers import accelerate

POOLINGS = [("max", "relu"), ("max", "log1p_relu"), ("sum", "relu"), ("sum", "log1p_relu")]


def fused_copy(stock: SparseEncoder, **options: Any) -> SparseEncoder:
    fused = copy.deepcopy(stock)
    accelerate(fused, **options)
    return fused


@pytest.mark.parametrize(("strategy", "activation"), [POOLINGS[0], POOLINGS[3]])
def test_minilm_trains_with_the_scores_and_gradients_of_the_stock_model(
    minilm_folder: Path, strategy: str, activation: str
) -> None:
    stock = SparseEncoder(str(minilm_folder), device="cpu")
    stock[1].pooling_strategy, stock[1].activation_function = strategy, activation
    assert_same_training(without_dropout(stock), without_dropout(fused_copy(stock)))


CAUSAL = [("llama", {}), ("llama", {"tie_word_embeddings": True}), ("granite", {"logits_scaling": 4.0})]
MODELS: list[Any] = [
    *((kind, {}, pooling, {})
      for kind in ("bert", "distilbert", "roberta", "xlm-roberta", "modernbert", "mpnet", "albert")
      for pooling in ({}, {"pooling_strategy": "sum"})),
    ("bert", {}, {"activation_function": "log1p_relu"}, {}),
    ("bert", {}, {"chunk_size": 3}, {}),
    ("bert", {}, {}, {"impl": "reference"}),
    ("bert", {}, {}, {"impl": "tiled"}),
    ("modernbert", {"decoder_bias": False, "tie_word_embeddings": False}, {}, {}),
    *(pytest.param(kind, options, {}, {}, marks=needs_all_causal_logits) for kind, options in CAUSAL),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:MPNetForMaskedLM runs on padded batches")
@pytest.mark.parametrize(("kind", "options", "pooling", "how"), MODELS, ids=str)
def test_models_of_every_kind_train_as_stock(
    kind: str, options: dict[str, Any], pooling: dict[str, Any], how: dict[str, str], tokenizer_folder: Path
) -> None:
    stock = build_tiny_splade(kind, tokenizer_folder, SpladePooling(**pooling), **options)
    if kind in ("llama", "granite"):  # padding on the left
        assert not stock.preprocess(TEXTS)["attention_mask"][:, 0].all()
    assert (stock.transformers_model.get_output_embeddings().bias is None) == (
        "decoder_bias" in options or kind in ("llama", "granite")
    )
    fused = fused_copy(stock, **how)
    assert fused.splade_pooling_chunk_size == stock.splade_pooling_chunk_size
    assert_same_training(without_dropout(stock), without_dropout(fused))
    assert "token_embeddings" not in fused(fused.preprocess(TEXTS))


def test_gradient_checkpointing_gives_the_same_gradients(tokenizer_folder: Path) -> None:
    stock = build_tiny_splade("bert", tokenizer_folder, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    fused = copy.deepcopy(stock)
    fused.transformers_model.gradient_checkpointing_enable({"use_reentrant": False})
    accelerate(fused)
    assert_same_training(stock.train(), fused.train())


def one_percent_more(hidden: Tensor) -> Tensor:
    hidden.register_hook(lambda gradient: 1.01 * gradient)
    return hidden


def without_a_token(hidden: Tensor) -> Tensor:
    hidden.register_hook(lambda gradient: gradient.index_fill(1, torch.tensor([2]), 0.0))
    return hidden


def rounded(hidden: Tensor) -> Tensor:
    return hidden.bfloat16().to(hidden.dtype)


@pytest.mark.parametrize("fault", [one_percent_more, without_a_token, rounded])
@pytest.mark.parametrize("pooling", ["max", "sum"])
def test_the_comparison_with_stock_tells_a_fault_from_rounding(
    pooling: str, fault: Callable[[Tensor], Tensor], tokenizer_folder: Path
) -> None:
    stock = build_tiny_splade("bert", tokenizer_folder, SpladePooling(pooling))
    fused = fused_copy(stock)
    fused[0].register_forward_hook(
        lambda module, given, features: features | {"token_embeddings": fault(features["token_embeddings"])}
    )
    with pytest.raises(AssertionError, match=r"error .* allowed"):
        assert_same_training(without_dropout(stock), without_dropout(fused))


@pytest.mark.parametrize("pooling", ["max", "sum"])
def test_masks_with_left_padding_holes_and_empty_rows_mean_what_they_mean_in_stock(
    pooling: str, tokenizer_folder: Path
) -> None:
    stock = build_tiny_splade("bert", tokenizer_folder, SpladePooling(pooling)).eval()
    fused = fused_copy(stock)
    features = stock.preprocess(TEXTS)
    mask = torch.ones_like(features["attention_mask"])
    mask[0, :3] = 0
    mask[1, 2:5] = 0
    mask[2] = 0
    expected = stock({**features, "attention_mask": mask})["sentence_embedding"]
    got = fused({**features, "attention_mask": mask})["sentence_embedding"]
    assert got[2].count_nonzero() == 0
    assert_close(got, expected, 1e-5)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(("strategy", "activation"), POOLINGS)
def test_flattened_inputs_are_pooled_as_stock(
    strategy: str, activation: str, training: bool, tokenizer_folder: Path
) -> None:
    stock = build_tiny_splade("bert", tokenizer_folder, SpladePooling(strategy, activation)).train(training)
    fused = fused_copy(stock)
    torch.manual_seed(3)
    hidden = torch.randn(1, 11, 32)
    cu_seq_lens = torch.tensor([0, 4, 5, 11], dtype=torch.int32)
    head = stock.transformers_model.get_output_embeddings()
    results, gradients = [], []
    for model, tokens in (
        (stock, lambda h: torch.nn.functional.linear(h, head.weight, head.bias)),
        (fused, lambda h: h),
    ):
        leaf = hidden.clone().requires_grad_()
        features = model[1]({"token_embeddings": tokens(leaf), "cu_seq_lens_q": cu_seq_lens})
        scores = features["sentence_embedding"]
        if training:  # in evaluation mode stock SpladePooling has no backward
            scores.square().sum().backward()
            gradients.append(leaf.grad)
        results.append(scores.detach())
    assert_close(results[1], results[0], 1e-5)
    if training:
        assert_close(gradients[1], gradients[0], 1e-5, "gradient")


@pytest.mark.parametrize("pooling", ["max", "sum"])
def test_autocast_gives_the_dtypes_and_the_scores_of_stock(pooling: str, tokenizer_folder: Path) -> None:
    stock = build_tiny_splade("bert", tokenizer_folder, SpladePooling(pooling))
    fused = fused_copy(stock)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected, expected_gradients = scores_and_gradients(without_dropout(stock))
        got, gradients = scores_and_gradients(without_dropout(fused))
        assert_close(fused.encode(TEXTS).to_dense(), stock.encode(TEXTS).to_dense(), 2**-6)
    # the stock logits are rounded to 8 bits before they are compared: half a unit in the last place, and of the sum
    assert_close(got, expected, 2**-6)
    assert all(gradients[name].dtype == expected_gradients[name].dtype for name in expected_gradients)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_model_may_change_its_dtype_after_it_was_accelerated(dtype: torch.dtype, tokenizer_folder: Path) -> None:
    stock = build_tiny_splade("bert", tokenizer_folder).eval()
    fused = fused_copy(stock)
    stock.to(dtype)
    fused.to(dtype)
    with torch.no_grad():
        expected = stock(stock.preprocess(TEXTS))["sentence_embedding"]
        got = fused(fused.preprocess(TEXTS))["sentence_embedding"]
    assert_close(got, expected, 1e-10 if dtype == torch.float64 else 2**-6)


def test_dropout_draws_the_same_numbers_in_training(minilm_folder: Path) -> None:
    stock = SparseEncoder(str(minilm_folder), device="cpu").train()
    fused = fused_copy(stock, packed=False)
    assert fused.transformers_model.training
    torch.manual_seed(5)
    expected, _ = scores_and_gradients(stock)
    torch.manual_seed(5)
    got, _ = scores_and_gradients(fused)
    assert_close(got, expected, 1e-5)
