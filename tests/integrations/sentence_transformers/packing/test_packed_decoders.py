"""Accelerated models on decoders encode and train packed tokens as the stock models."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from sentence_transformers import MultiVectorEncoder, SparseEncoder, SparseEncoderTrainer
from sentence_transformers.base.modules import Dense, Transformer
from sentence_transformers.multi_vector_encoder.losses import (
    MultiVectorMultipleNegativesRankingLoss,
)
from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask
from sentence_transformers.sentence_transformer.modules import Normalize
from sentence_transformers.sparse_encoder.losses import CachedSpladeLoss
from sentence_transformers.sparse_encoder.modules import SpladePooling
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from tests.integrations.decoder_models import DECODERS, VOCABULARY
from tests.integrations.sentence_transformers.graphs.test_training import EagerStepGraph
from tests.integrations.sentence_transformers.packing.test_packed_inputs import (
    gradients_of,
    joined,
    splade_loss,
)
from tests.integrations.splade_models import CAUSAL_OPTIONS, five_steps, logged_losses
from tests.recipes.small import TEXTS as TOKENIZER_TEXTS
from tests.recipes.small import byte_pairs
from tilefold.integrations.sentence_transformers import accelerate, encode_sparse, restore
from tilefold.integrations.sentence_transformers._trainer import PACKED_TOKENS
from tilefold.integrations.sentence_transformers.graphs.training import StepGraphs
from tilefold.integrations.sentence_transformers.multi_vector import colbert_scores
from tilefold.integrations.sentence_transformers.streaming.stream import SparseStream
from tilefold.losses.base_splade import JoinedSpladeLoss
from tilefold.modules.echo import EchoTransformer
from tilefold.modules.fused_pooling import SparseOptions
from tilefold.pipeline.rows import Window

MAX_LENGTH = 24
# Rotary positions are rounded to fp32, and begin after the padding in the stock models.
BUDGET = 1e-5
# An empty text, which has no token, one token, texts longer than a window, and truncated ones.
TEXTS = [
    "",
    "x",
    "the quick brown fox jumps over a lazy dog",
    "a",
    "sparse retrieval weighs the words of a vocabulary, and more words follow, " * 3,
    "twelve words",
]
PAIRS = Dataset.from_dict(
    {
        "anchor": ["what is a list", "x", "the sum", "sorting numbers, one by one", "a", "the end"],
        "positive": [text or "an empty text" for text in TEXTS],
    },
)
VARIANTS = [pytest.param(False, id="causal"), pytest.param(True, id="bidirectional")]


def splade(folder: str, bidirectional: bool = False) -> SparseEncoder:
    """Return a SPLADE model on a decoder, whose texts are padded on the left."""
    transformer = Transformer(folder, **CAUSAL_OPTIONS)
    transformer.max_seq_length = MAX_LENGTH
    if bidirectional:
        transformer.model.config.is_causal = False
    return SparseEncoder(modules=[transformer, SpladePooling()], device="cpu")


def colbert(folder: str, side: str, bidirectional: bool = False) -> MultiVectorEncoder:
    """Return a late-interaction model on a decoder.

    Args:
        folder: the folder of the decoder.
        side: the side on which texts are padded.
        bidirectional: whether tokens see later ones.
    """
    transformer = Transformer(folder, max_seq_length=MAX_LENGTH)
    transformer.tokenizer.padding_side = side
    if bidirectional:
        transformer.model.config.is_causal = False
    torch.manual_seed(0)
    projection = Dense(
        32,
        16,
        bias=False,
        activation_function=torch.nn.Identity(),
        module_input_name="token_embeddings",
    )
    modules = [
        transformer,
        projection,
        MultiVectorMask(),
        Normalize(module_input_name="token_embeddings"),
    ]
    return MultiVectorEncoder(modules=modules, device="cpu").eval()


def assert_near(result: Tensor, expected: Tensor, budget: float, name: str = "rows") -> None:
    """Compare tensors, whose difference may be a fraction of the largest expected value."""
    error = float((result.double() - expected.double()).abs().max())
    assert error <= budget * float(expected.abs().max()), f"{name}: error {error:.1e}"


def assert_same_step(
    result: tuple[float, dict[str, Tensor]],
    expected: tuple[float, dict[str, Tensor]],
) -> None:
    """Compare the loss and the gradients of two steps.

    Gradients may differ by a fraction of the largest gradient of all parameters.
    """
    loss, gradients = result
    expected_loss, expected_gradients = expected
    assert loss == pytest.approx(expected_loss, rel=BUDGET)
    assert gradients.keys() == expected_gradients.keys()
    largest = max(float(gradient.abs().max()) for gradient in expected_gradients.values())
    for name, gradient in expected_gradients.items():
        error = float((gradients[name] - gradient).abs().max())
        assert error <= BUDGET * largest, f"{name}: error {error:.1e}"


@pytest.mark.parametrize("bidirectional", VARIANTS)
@pytest.mark.parametrize("kind", DECODERS)
def test_rows_equal_those_of_the_stock_model(
    kind: str,
    bidirectional: bool,
    folders: Callable[..., str],
) -> None:
    model = splade(folders(kind), bidirectional)
    texts = TEXTS[1:]  # the stock model needs a token in each batch, so the empty text comes below
    expected = model.encode(texts).to_dense()
    assert (expected > 0).any()
    assert accelerate(model).padded == {}
    assert_near(model.encode(texts).to_dense(), expected, BUDGET)
    many = encode_sparse(model, [*TEXTS * 8], batch_tokens=50).to_dense()
    assert not many[0].any()  # the row of the empty text
    for row in range(1, len(many)):
        if row % len(TEXTS) > 0:
            assert_near(many[row], expected[row % len(TEXTS) - 1], BUDGET, f"row {row}")


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_texts_are_encoded_in_windows_without_padding(
    kind: str,
    folders: Callable[..., str],
) -> None:
    model = splade(folders(kind)).eval()
    accelerate(model)
    stream = SparseStream(model, SparseOptions(None, 0.0), task=None, prompt=None, batch_tokens=40)
    assert stream.packed
    sizes: list[tuple[int, ...]] = []
    model[0].model.base_model.register_forward_pre_hook(
        lambda module, args, kwargs: sizes.append(tuple(kwargs["input_ids"].shape)),
        with_kwargs=True,
    )
    windows = [Window(TEXTS[1:]), Window(TEXTS[2:])]
    list(stream(iter(windows)))
    lengths = [len(ids) for ids in model.tokenizer(TEXTS, truncation=True)["input_ids"]]
    n_tokens = sum(min(length, MAX_LENGTH) for length in [*lengths[1:], *lengths[2:]])
    assert all(rows == 1 for rows, _ in sizes)
    assert sum(tokens for _, tokens in sizes) == n_tokens


@pytest.mark.parametrize("bidirectional", VARIANTS)
@pytest.mark.parametrize("kind", DECODERS)
def test_a_training_step_has_the_stock_loss_and_gradients(
    kind: str,
    bidirectional: bool,
    folders: Callable[..., str],
) -> None:
    stock = splade(folders(kind), bidirectional)
    packed = copy.deepcopy(stock)
    assert accelerate(packed).padded == {}
    texts = [list(PAIRS[name]) for name in ("anchor", "positive")]
    if kind == "gemma2":  # transformers' eager attention returns NaN for padding in fp64
        stock[0].model.set_attn_implementation("tilefold_packed")
    expected = gradients_of(stock, splade_loss(stock), [stock.preprocess(text) for text in texts])
    columns = [packed.preprocess(text) for text in texts]
    assert_same_step(gradients_of(packed, splade_loss(packed), columns), expected)
    assert "cu_seq_lens_q" in columns[0]
    assert_same_step(gradients_of(packed, splade_loss(packed), joined(packed, texts)), expected)


def add_lora(model: SparseEncoder) -> None:
    """Add an adapter to attention, MLP and, if it has a weight of its own, the LM head."""
    torch.manual_seed(1)
    targets = ["q_proj", "v_proj", "down_proj"]
    if not model[0].model.config.tie_word_embeddings:
        targets.append("lm_head")
    model.add_adapter(
        LoraConfig(r=4, target_modules=targets, lora_dropout=0.0, init_lora_weights=False),
    )


@pytest.mark.parametrize(
    ("settings", "is_cached", "change"),
    [
        pytest.param({}, False, None, id="plain"),
        pytest.param({"gradient_checkpointing": True}, False, None, id="checkpointing"),
        pytest.param({"gradient_accumulation_steps": 2}, False, None, id="accumulation"),
        pytest.param({}, True, None, id="cached loss"),
        pytest.param({}, False, add_lora, id="lora"),
        pytest.param(
            {"gradient_checkpointing": True},
            True,
            add_lora,
            id="cached loss, checkpointing and lora",
        ),
        pytest.param({"bf16": True}, False, None, id="bf16"),
    ],
)
def test_a_training_has_the_stock_losses(
    settings: dict[str, Any],
    is_cached: bool,
    change: Callable[[SparseEncoder], None] | None,
    folders: Callable[..., str],
    tmp_path: Path,
) -> None:
    losses = []
    for is_accelerated in (False, True):
        model = splade(folders("llama"))
        if change is not None:
            change(model)
        options = {"mini_batch_size": 2} if is_cached else {}
        trainer = SparseEncoderTrainer(
            model=model,
            args=five_steps(tmp_path / str(is_accelerated), **settings),
            train_dataset=PAIRS,
            loss=splade_loss(model, cached=is_cached, **options),
        )
        if is_accelerated:
            handle = accelerate(trainer)
            assert PACKED_TOKENS in handle.active
        losses.append(logged_losses(trainer))
    tolerance = 2e-2 if "bf16" in settings else 1e-4
    assert losses[1] == pytest.approx(losses[0], rel=tolerance)


@pytest.mark.parametrize(
    ("kind", "loss_class"),
    [
        pytest.param("llama", CachedSpladeLoss, id="llama, stock loss"),
        pytest.param("llama", JoinedSpladeLoss, id="llama, joined columns"),
        pytest.param("qwen3", JoinedSpladeLoss, id="qwen3, joined columns"),
        pytest.param("gemma3", JoinedSpladeLoss, id="gemma3, joined columns"),
    ],
)
def test_cached_losses_with_checkpointing_and_lora_have_the_gradients_of_the_stock_batch(
    kind: str,
    loss_class: type,
    folders: Callable[..., str],
) -> None:
    stock = splade(folders(kind))
    add_lora(stock)
    packed = copy.deepcopy(stock)
    assert accelerate(packed).padded == {}
    packed[0].model.gradient_checkpointing_enable({"use_reentrant": False})
    texts = [list(PAIRS[name]) for name in ("anchor", "positive")]
    columns = [stock.preprocess(column) for column in texts]
    expected = gradients_of(stock, splade_loss(stock), columns)
    assert any("lora" in name for name in expected[1])
    loss = splade_loss(packed, kind=loss_class, mini_batch_size=2)
    assert_same_step(gradients_of(packed, loss, joined(packed, texts)), expected)


@pytest.mark.parametrize("kind", DECODERS)
def test_restore_undoes_everything_and_checkpoints_are_stock(
    kind: str,
    folders: Callable[..., str],
    tmp_path: Path,
) -> None:
    model = splade(folders(kind))
    attention = model[0].model.config._attn_implementation
    state = model.state_dict()
    expected = model.encode(TEXTS[1:]).to_dense()
    accelerate(model)
    rows = model.encode(TEXTS[1:]).to_dense()
    model.save_pretrained(str(tmp_path), create_model_card=False)
    reloaded = SparseEncoder(str(tmp_path), device="cpu")
    assert "tilefold" not in (tmp_path / "config.json").read_text()
    assert_near(reloaded.encode(TEXTS[1:]).to_dense(), rows, BUDGET)
    restore(model)
    assert model[0].model.config._attn_implementation == attention
    assert torch.equal(model.encode(TEXTS[1:]).to_dense(), expected)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("kind", DECODERS)
def test_rows_in_bf16_are_as_near_to_exact_ones_as_those_of_the_stock_model(
    kind: str,
    folders: Callable[..., str],
) -> None:
    model = splade(folders(kind)).bfloat16()
    exact = copy.deepcopy(model).float().encode(TEXTS[1:]).to_dense()
    stock = model.encode(TEXTS[1:]).to_dense().float()
    assert accelerate(model).padded == {}
    rows = model.encode(TEXTS[1:]).to_dense().float()
    assert (rows - exact).norm() <= 1.5 * (stock - exact).norm()


@pytest.mark.parametrize("bidirectional", VARIANTS)
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", DECODERS)
def test_token_vectors_equal_those_of_the_stock_model(
    kind: str,
    side: str,
    bidirectional: bool,
    folders: Callable[..., str],
) -> None:
    model = colbert(folders(kind), side, bidirectional)
    expected = model.encode_document(TEXTS[1:])
    assert accelerate(model).padded == {}
    assert "cu_seq_lens_q" in model[0](model.preprocess(TEXTS[1:], task="document"))
    vectors = model.encode_document(TEXTS[1:])
    for vector, expected_vector in zip(vectors, expected, strict=True):
        assert vector.shape == expected_vector.shape
        assert_near(torch.as_tensor(vector), torch.as_tensor(expected_vector), BUDGET)


@pytest.mark.parametrize("side", ["left", "right"])
def test_late_interaction_trains_with_the_stock_loss_and_gradients(
    side: str,
    folders: Callable[..., str],
) -> None:
    results = []
    for is_accelerated in (False, True):
        model = colbert(folders("llama"), side)
        if is_accelerated:
            assert accelerate(model).padded == {}
        columns = [
            {**model.preprocess(list(PAIRS[name]), task=task), "task": task}
            for name, task in (("anchor", "query"), ("positive", "document"))
        ]
        loss = MultiVectorMultipleNegativesRankingLoss(model, similarity_fct=colbert_scores)
        results.append(gradients_of(model, loss, columns))
    assert_same_step(results[1], results[0])


def test_a_decoder_that_stays_padded_is_named_with_the_reason(
    folders: Callable[..., str],
    tmp_path: Path,
) -> None:
    folder = folders("gemma2", attn_logit_softcapping=50.0)
    model = splade(folder)
    reason = (
        "Gemma2ForCausalLM has soft-capped attention (attn_logit_softcapping=50.0), which packed "
        "attention lacks"
    )
    trainer = SparseEncoderTrainer(
        model=model,
        args=five_steps(tmp_path),
        train_dataset=PAIRS,
        loss=splade_loss(model),
    )
    with pytest.warns(UserWarning, match="runs on padded batches: Gemma2ForCausalLM has soft-cap"):
        handle = accelerate(trainer)
    assert handle.inactive[PACKED_TOKENS] == f"Gemma2ForCausalLM runs on padded batches: {reason}"
    assert f"packed tokens (Gemma2ForCausalLM runs on padded batches: {reason})" in str(handle)
    handle.restore()
    with pytest.warns(UserWarning, match="runs on padded batches"):
        assert accelerate(model).padded == {"Gemma2ForCausalLM": reason}


def test_a_decoder_with_learned_positions_stays_padded(tmp_path: Path) -> None:
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=128,
        n_embd=32,
        n_layer=2,
        n_head=2,
        initializer_range=0.2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    GPT2LMHeadModel(config).save_pretrained(str(tmp_path))
    byte_pairs(TOKENIZER_TEXTS).save_pretrained(str(tmp_path))
    model = splade(str(tmp_path))
    expected = model.encode(TEXTS[1:]).to_dense()
    with pytest.warns(UserWarning, match="packed and padded batches disagree"):
        accelerate(model)
    assert_near(model.encode(TEXTS[1:], batch_size=32).to_dense(), expected, BUDGET)


def echo(folder: str) -> SparseEncoder:
    """Return a SPLADE model that reads a text twice and pools the second copy."""
    transformer = EchoTransformer(
        folder,
        query_template="Q {text} q {text}",
        document_template="D {text} d {text}",
        **CAUSAL_OPTIONS,
    )
    transformer.max_seq_length = 2 * MAX_LENGTH
    return SparseEncoder(modules=[transformer, SpladePooling()], device="cpu")


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3"])
def test_echo_rows_equal_those_of_the_stock_model(
    kind: str,
    folders: Callable[..., str],
) -> None:
    model = echo(folders(kind))
    expected = {
        "query": model.encode_query(TEXTS).to_dense(),
        "document": model.encode_document(TEXTS).to_dense(),
    }
    assert accelerate(model).padded == {}
    for task, rows in expected.items():
        assert not rows[0].any()  # of the empty text
        assert_near(encode_sparse(model, TEXTS, task=task).to_dense(), rows, BUDGET)
        many = encode_sparse(model, TEXTS * 8, task=task, batch_size=7).to_dense()
        assert_near(many, rows.repeat(8, 1), BUDGET)


def test_echo_texts_run_without_padding_and_the_head_reads_the_second_copy(
    folders: Callable[..., str],
) -> None:
    model = echo(folders("llama"))
    features = model.preprocess(TEXTS)
    accelerate(model)
    shapes: list[tuple[int, ...]] = []
    model[0].model.base_model.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)),
        with_kwargs=True,
    )
    outputs = model[0](features)
    assert shapes == [(1, int(features["attention_mask"].sum()))]
    copies = features["pooling_mask"].bool()
    assert outputs["token_embeddings"].shape[:2] == (1, int(copies.sum()))
    assert torch.equal(outputs["input_ids"][0], features["input_ids"][copies])
    assert outputs["cu_seq_lens_q"].diff().tolist() == copies.sum(1).tolist()


@pytest.mark.parametrize(
    "mini_batch_size",
    [pytest.param(None, id="whole batch"), pytest.param(2, id="mini-batches")],
)
def test_an_echo_step_has_the_stock_loss_and_gradients(
    mini_batch_size: int | None,
    folders: Callable[..., str],
) -> None:
    stock = echo(folders("llama"))
    packed = copy.deepcopy(stock)
    assert accelerate(packed).padded == {}
    texts = [list(PAIRS[name]) for name in ("anchor", "positive")]
    is_cached = mini_batch_size is not None
    options = {"mini_batch_size": mini_batch_size} if is_cached else {}
    columns = [stock.preprocess(column) for column in texts]
    expected = gradients_of(stock, splade_loss(stock, cached=is_cached, **options), columns)
    for packed_columns in (
        [packed.preprocess(column) for column in texts],
        joined(packed, texts),
    ):
        loss = splade_loss(packed, cached=is_cached, **options)
        assert_same_step(gradients_of(packed, loss, packed_columns), expected)
        # A second step with the same features, as a loss that caches gradients runs them.
        assert_same_step(gradients_of(packed, loss, packed_columns), expected)


def test_mini_batches_of_all_echo_columns_have_the_stock_gradients(
    folders: Callable[..., str],
) -> None:
    stock = echo(folders("llama"))
    packed = copy.deepcopy(stock)
    accelerate(packed)
    texts = [list(PAIRS[name]) for name in ("anchor", "positive")]
    columns = [stock.preprocess(column) for column in texts]
    expected = gradients_of(stock, splade_loss(stock), columns)
    loss = splade_loss(packed, kind=JoinedSpladeLoss, mini_batch_size=2)
    assert_same_step(gradients_of(packed, loss, joined(packed, texts)), expected)


@pytest.mark.parametrize("make_model", [splade, echo])
def test_joined_columns_run_as_graphs_with_the_stock_loss_and_gradients(
    make_model: Callable[[str], SparseEncoder],
    folders: Callable[..., str],
) -> None:
    stock = make_model(folders("llama"))
    packed: Any = copy.deepcopy(stock)
    accelerate(packed)
    graphs = StepGraphs(packed[0], EagerStepGraph)
    packed[0].forward.graphs = graphs
    texts = [list(PAIRS[name]) for name in ("anchor", "positive")]
    columns = [stock.preprocess(column) for column in texts]
    expected = gradients_of(stock, splade_loss(stock), columns)
    for _ in range(3):  # the second batch of a size is captured
        step = gradients_of(packed, splade_loss(packed), joined(packed, texts))
        assert_same_step(step, expected)
    assert len(graphs.graphs) == 1
    assert not graphs.failed


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_many_texts_have_the_token_vectors_of_the_stock_model(
    kind: str,
    folders: Callable[..., str],
) -> None:
    model = colbert(folders(kind), "right")
    texts = TEXTS[1:] * 9  # more than are encoded without background threads
    expected = model.encode_document(texts)
    accelerate(model)
    vectors = model.encode_document(texts)
    for vector, expected_vector in zip(vectors, expected, strict=True):
        assert_near(torch.as_tensor(vector), torch.as_tensor(expected_vector), BUDGET)


@pytest.mark.slow
def test_layers_that_the_user_has_compiled_encode_the_same_rows(
    folders: Callable[..., str],
) -> None:
    model: Any = splade(folders("llama"))
    accelerate(model)
    expected = model.encode(TEXTS[1:4]).to_dense()
    for layer in model[0].model.model.layers:
        layer.compile(dynamic=True, backend="eager")  # as on a GPU, without its kernels
    assert_near(model.encode(TEXTS[1:4]).to_dense(), expected, BUDGET)
