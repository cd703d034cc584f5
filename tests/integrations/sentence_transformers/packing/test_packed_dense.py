"""Accelerated dense models encode and train packed tokens as the stock models."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.base.modules import Dense, Router, Transformer
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, WordWeights

from tests.integrations.decoder_models import DECODERS, VOCABULARY
from tests.integrations.sentence_transformers.packing.test_packed_inputs import gradients_of
from tests.integrations.splade_models import five_steps, logged_losses, tiny_transformer
from tests.refusals import refused
from tilefold.integrations.sentence_transformers import accelerate, is_accelerated, restore
from tilefold.integrations.sentence_transformers._trainer import (
    AHEAD_BATCHES,
    FUSED_SCORES,
    PACKED_TOKENS,
)
from tilefold.retrieval import DenseIndex, encode_dense_collection, open_dense

MAX_LENGTH = 24
# Positions of left-padded texts begin after the padding in the stock models, and are rounded.
BUDGET = 1e-5
TEXTS = [
    "x",
    "the quick brown fox jumps over a lazy dog",
    "a",
    "sparse retrieval weighs the words of a vocabulary, and more words follow, " * 3,
    "twelve words",
]
MANY_TEXTS = TEXTS * 9  # more than one batch, so that a stream encodes them
PAIRS = Dataset.from_dict(
    {
        "anchor": ["what is a list", "x", "the sum", "sorting numbers, one by one", "a"],
        "positive": TEXTS,
    },
)
POOLINGS = [
    "mean",
    *(
        pytest.param(pooling, marks=pytest.mark.slow)
        for pooling in ("lasttoken", "cls", "max", "weightedmean")
    ),
]


def dense(folder: str, pooling: str = "lasttoken", side: str = "left") -> SentenceTransformer:
    """Return a dense model on a decoder, with prompts and vectors of norm 1.

    Args:
        folder: the folder of the decoder.
        pooling: the mode of the pooling.
        side: the side on which texts are padded.
    """
    transformer = Transformer(folder, max_seq_length=MAX_LENGTH)
    transformer.tokenizer.padding_side = side
    modules = [transformer, Pooling(32, pooling), Normalize()]
    prompts = {"query": "find: ", "document": "read: "}
    return SentenceTransformer(modules=modules, prompts=prompts, device="cpu").eval()


def assert_near(result: Any, expected: Any) -> None:
    """Compare vectors of norm 1, whose entries may differ by the budget."""
    assert type(result) is type(expected)
    np.testing.assert_allclose(np.asarray(result), np.asarray(expected), rtol=0, atol=BUDGET)


@pytest.mark.parametrize(
    ("kind", "side"),
    [
        ("llama", "left"),
        ("gemma3", "right"),
        *(
            pytest.param(kind, side, marks=pytest.mark.slow)
            for kind in DECODERS
            for side in ("left", "right")
            if (kind, side) not in (("llama", "left"), ("gemma3", "right"))
        ),
    ],
)
def test_vectors_of_decoders_equal_those_of_the_stock_model(
    kind: str,
    side: str,
    folders: Callable[..., str],
) -> None:
    model = dense(folders(kind), side=side)
    expected = model.encode(MANY_TEXTS)
    assert accelerate(model).padded == {}
    assert "cu_seq_lens_q" in model[0](model.preprocess(TEXTS))
    assert_near(model.encode(MANY_TEXTS), expected)
    assert_near(model.encode(TEXTS), expected[: len(TEXTS)])
    assert_near(model.encode(TEXTS[1]), expected[1])


@pytest.mark.parametrize("pooling", POOLINGS)
def test_every_pooling_equals_the_stock_one_with_and_without_the_prompt(
    pooling: str,
    folders: Callable[..., str],
) -> None:
    model = dense(folders("llama"), pooling, side="right")
    for include_prompt in (True, False):
        model[1].include_prompt = include_prompt
        expected = model.encode(MANY_TEXTS, prompt_name="query")
        with accelerate(model):
            assert_near(model.encode(MANY_TEXTS, prompt_name="query"), expected)


def test_vectors_of_an_encoder_equal_those_of_the_stock_model(tokenizer_folder: Path) -> None:
    transformer = tiny_transformer("bert", tokenizer_folder)
    transformer = Transformer(transformer.model.name_or_path, max_seq_length=MAX_LENGTH)
    projection = Dense(32, 16, module_input_name="token_embeddings")
    model = SentenceTransformer(modules=[transformer, projection, Pooling(16)], device="cpu")
    texts = ["", *MANY_TEXTS]
    expected = model.encode(texts)
    assert accelerate(model).padded == {}
    assert_near(model.encode(texts), expected)


@pytest.mark.parametrize("pooling", ["lasttoken", "mean", "cls"])
@pytest.mark.parametrize("position", [0, 2, 5])
def test_a_text_without_tokens_has_a_vector_of_zeros(
    position: int,
    pooling: str,
    folders: Callable[..., str],
) -> None:
    model = dense(folders("llama"), pooling)
    expected = model.encode(TEXTS)
    accelerate(model)
    texts = [*TEXTS[:position], "", *TEXTS[position:]]
    vectors = model.encode(texts)
    assert not vectors[position].any()
    assert_near(np.delete(vectors, position, axis=0), expected)
    assert not model.encode(["", ""]).any()


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"convert_to_tensor": True}, id="tensor"),
        pytest.param({"convert_to_numpy": False}, id="list"),
        pytest.param({"truncate_dim": 8, "normalize_embeddings": True}, id="truncated"),
        pytest.param({"prompt_name": "query"}, id="prompt"),
        pytest.param({"batch_size": 4}, id="small batches"),
        pytest.param({"precision": "int8"}, id="int8"),
    ],
)
def test_options_of_encode_have_the_stock_results(
    options: dict[str, Any],
    folders: Callable[..., str],
) -> None:
    model = dense(folders("llama"))
    expected = model.encode(MANY_TEXTS, **options)
    accelerate(model)
    result = model.encode(MANY_TEXTS, **options)
    if isinstance(expected, list):
        result, expected = torch.stack(result), torch.stack(expected)
    if options.get("precision") == "int8":  # a rounding error may cross the limit of two integers
        assert np.abs(result.astype(int) - expected).max() <= 1
    else:
        assert_near(result, expected)


def test_token_vectors_are_those_of_the_stock_model(folders: Callable[..., str]) -> None:
    model = dense(folders("llama"))
    expected = model.encode(TEXTS, output_value="token_embeddings")
    accelerate(model)
    vectors = model.encode(TEXTS, output_value="token_embeddings")
    for vector, expected_vector in zip(vectors, expected, strict=True):
        torch.testing.assert_close(vector, expected_vector, rtol=0, atol=1e-4)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_training_step_has_the_stock_loss_and_gradients(
    side: str,
    folders: Callable[..., str],
) -> None:
    stock = dense(folders("llama"), side=side)
    packed = copy.deepcopy(stock)
    accelerate(packed)
    results = []
    for model in (stock, packed):
        columns = [model.preprocess(list(PAIRS[name])) for name in ("anchor", "positive")]
        results.append(gradients_of(model, MultipleNegativesRankingLoss(model), columns))
    (expected_loss, expected_gradients), (loss, gradients) = results
    assert loss == pytest.approx(expected_loss, rel=BUDGET)
    assert gradients.keys() == expected_gradients.keys()
    largest = max(float(gradient.abs().max()) for gradient in expected_gradients.values())
    for name, gradient in expected_gradients.items():
        assert float((gradients[name] - gradient).abs().max()) <= BUDGET * largest, name


def test_a_training_has_the_stock_losses_and_restore_undoes_it(
    folders: Callable[..., str],
    tmp_path: Path,
) -> None:
    losses = []
    for is_packed in (False, True):
        model = dense(folders("llama"))
        arguments = five_steps(tmp_path / str(is_packed))
        trainer = SentenceTransformerTrainer(
            model=model,
            args=SentenceTransformerTrainingArguments(**arguments.to_dict()),
            train_dataset=PAIRS,
            loss=MultipleNegativesRankingLoss(model),
        )
        if is_packed:
            handle = accelerate(trainer)
            assert handle.active == (PACKED_TOKENS, AHEAD_BATCHES)
            assert (
                handle.inactive[FUSED_SCORES] == "one vector per text has no large matrix of scores"
            )
        losses.append(logged_losses(trainer))
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    vectors = model.encode(MANY_TEXTS)
    model.save_pretrained(str(tmp_path / "saved"), create_model_card=False)
    reloaded = SentenceTransformer(str(tmp_path / "saved"), device="cpu")
    assert "tilefold" not in (tmp_path / "saved" / "config.json").read_text()
    assert_near(reloaded.encode(MANY_TEXTS), vectors)
    handle.restore()
    assert not is_accelerated(model)
    assert not any("forward" in vars(module) for module in model.modules())
    assert np.array_equal(reloaded.encode(MANY_TEXTS), model.encode(MANY_TEXTS))


@pytest.mark.parametrize("storage", ["fp32", pytest.param("fp16", marks=pytest.mark.slow), "int8"])
def test_a_collection_has_the_vectors_of_the_stock_model(
    storage: str,
    folders: Callable[..., str],
    tmp_path: Path,
) -> None:
    model = dense(folders("llama"))
    texts = {f"d{number}": text for number, text in enumerate(MANY_TEXTS)}
    options: dict[str, Any] = {"storage": storage, "dimension": 16}
    encode_dense_collection(model, texts, tmp_path / "stock", **options)
    accelerate(model)
    encode_dense_collection(model, texts, tmp_path / "packed", batch_tokens=100, **options)
    queries = torch.eye(16)  # the scores of a document are the entries of its vector
    expected = DenseIndex.build(open_dense(tmp_path / "stock")).search(queries, k=len(texts))
    hits = DenseIndex.build(open_dense(tmp_path / "packed")).search(queries, k=len(texts))
    rounding = {"fp32": BUDGET, "fp16": 2**-10, "int8": 2**-7}[storage]
    for query_hits, expected_hits in zip(hits, expected, strict=True):
        assert dict(query_hits) == pytest.approx(dict(expected_hits), abs=rounding)


def test_a_model_with_other_modules_stays_padded_with_a_reason(
    folders: Callable[..., str],
) -> None:
    stock = dense(folders("llama"))
    weights = WordWeights(vocab=[str(number) for number in range(VOCABULARY)], word_weights={})
    model = SentenceTransformer(modules=[stock[0], weights, stock[1]], device="cpu")
    expected = model.encode(TEXTS)
    with pytest.warns(UserWarning, match="runs on padded batches: a SentenceTransformer takes"):
        handle = accelerate(model)
    assert "other modules" in handle.padded["LlamaModel"]
    assert_near(model.encode(TEXTS), expected)
    restore(model)
    assert not is_accelerated(model)


def test_the_routes_of_a_router_are_packed(folders: Callable[..., str]) -> None:
    query, document = dense(folders("llama")), dense(folders("qwen3"), "mean")
    router = Router.for_query_document(
        query_modules=list(query),
        document_modules=list(document),
    )
    model = SentenceTransformer(modules=[router], device="cpu").eval()
    expected = model.encode_query(MANY_TEXTS), model.encode_document(MANY_TEXTS)
    assert accelerate(model).padded == {}
    assert_near(model.encode_query(MANY_TEXTS), expected[0])
    assert_near(model.encode_document(MANY_TEXTS), expected[1])


def test_quantize_is_refused(folders: Callable[..., str]) -> None:
    refused(
        ValueError,
        "quantize must be None for a SentenceTransformer",
        accelerate,
        dense(folders("llama")),
        quantize="fp8",
    )
