"""``accelerate(invariant=True)``: a text's vector has the same bits in every batch."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer, SparseEncoder
from sentence_transformers.base.modules import Dense, Normalize, Transformer
from sentence_transformers.sentence_transformer.modules import Pooling
from sentence_transformers.sparse_encoder.modules import SpladePooling
from torch import Tensor, nn
from transformers import AutoModelForMaskedLM, XLMRobertaConfig

from tests.integrations.decoder_models import save_tiny_decoder
from tests.integrations.multi_vector_models import build_colbert
from tests.integrations.splade_models import FP32_BUDGET, assert_close, build_tiny_splade
from tests.refusals import refused
from tilefold._internal.precision import set_precision
from tilefold.integrations.sentence_transformers import (
    _invariant,
    accelerate,
    encode_sparse,
    is_accelerated,
)
from tilefold.integrations.sentence_transformers._invariant import InvariantNorm
from tilefold.integrations.sentence_transformers.packing import accelerate as packing
from tilefold.integrations.sentence_transformers.packing.inputs import packed_inputs
from tilefold.integrations.sentence_transformers.streaming import stream
from tilefold.integrations.transformers.packed import LONGEST_NAMES
from tilefold.ops._shared import row_groups, row_probes, rowwise
from tilefold.ops.implementations import SWITCH

_WORDS = [
    "a",
    "card",
    "lost",
    "list",
    "of",
    "numbers",
    "dictionary",
    "sorted",
    "sum",
    "north",
    "rain",
    ",",
    ".",
    "1755",
    "été",
]


def _random_texts(generator: np.random.Generator, n_texts: int, longest: int = 60) -> list[str]:
    """Texts of random lengths, many of them short, with an empty one and a duplicate."""
    texts = [""]
    while len(texts) < n_texts - 1:
        n_words = generator.choice([1, 2, 3, generator.integers(1, longest)])
        texts.append(" ".join(generator.choice(_WORDS, n_words)))
    return [*texts, texts[-1]]


def _random_batches(
    generator: np.random.Generator, n_texts: int, n_batches: int
) -> list[list[int]]:
    """Random selections of positions, in random order, with repetitions."""
    sizes = [generator.choice([1, 2, 5, n_texts]) for _ in range(n_batches)]
    return [generator.integers(0, n_texts, size).tolist() for size in sizes]


def _assert_invariant(
    encode: Callable[[list[str]], Any],
    n_texts: int = 10,
    n_batches: int = 4,
) -> None:
    """Each text has the bits that it has alone, in random batches."""
    generator = np.random.default_rng(0)
    texts = _random_texts(generator, n_texts)
    alone = [encode([text])[0] for text in texts]
    for positions in _random_batches(generator, n_texts, n_batches):
        together = encode([texts[position] for position in positions])
        for vector, position in zip(together, positions, strict=True):
            assert torch.equal(vector, alone[position]), texts[position]


@pytest.fixture(params=[1, pytest.param(2, marks=pytest.mark.slow)])
def n_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Numbers of threads of torch."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def dense_folder(tmp_path_factory: pytest.TempPathFactory, tokenizer_folder: Path) -> Path:
    """A dense model: a tiny BERT, the mean of its token states, and a projection."""
    splade = build_tiny_splade("bert", tokenizer_folder)
    folder = tmp_path_factory.mktemp("dense")
    splade[0].model.base_model.save_pretrained(folder)
    splade.tokenizer.save_pretrained(folder)
    return folder


def _dense_model(folder: Path, pooling: str = "mean") -> SentenceTransformer:
    transformer = Transformer(str(folder))
    dimension = transformer.get_embedding_dimension()
    modules = [transformer, Pooling(dimension, pooling), Dense(dimension, 24)]
    return SentenceTransformer(modules=modules, device="cpu")


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("bert", "fp32"),
        ("llama", "bf16"),
        pytest.param("bert", "bf16", marks=pytest.mark.slow),
        pytest.param("llama", "fp32", marks=pytest.mark.slow),
        pytest.param("modernbert", "fp32", marks=pytest.mark.slow),
        pytest.param("modernbert", "bf16", marks=pytest.mark.slow),
    ],
)
def test_sparse_vectors_have_the_same_bits_in_every_batch(
    kind: str,
    dtype: Any,
    tokenizer_folder: Path,
    n_threads: int,
) -> None:
    model = build_tiny_splade(kind, tokenizer_folder)
    set_precision(model, dtype)
    accelerate(model, invariant=True)
    _assert_invariant(lambda texts: encode_sparse(model, texts, top_k=20).to_dense())
    _assert_invariant(lambda texts: encode_sparse(model, texts, batch_tokens=64).to_dense())


def test_gelu_has_the_same_bits_for_each_number_of_elements() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        elements = 3 * torch.randn(2000, generator=generator)
        expected = _invariant._gelu(elements)
        for n_elements in (1, 3, 7, 9, 15, 17, 31, 50, 78, 100, 150):
            part = _invariant._gelu(elements[:n_elements])
            assert torch.equal(part, expected[:n_elements])


def test_a_head_that_calls_gelu_as_a_function_has_the_same_bits_in_every_batch(
    tokenizer_folder: Path,
) -> None:
    """The width is no multiple of a vector register."""
    config = XLMRobertaConfig(
        vocab_size=30522,
        hidden_size=36,
        intermediate_size=72,
        num_attention_heads=2,
        num_hidden_layers=1,
        max_position_embeddings=130,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    network = AutoModelForMaskedLM.from_config(config)
    folder = tokenizer_folder.parent / "xlm-roberta-of-36-columns"
    network.save_pretrained(str(folder))
    shutil.copytree(tokenizer_folder, folder, dirs_exist_ok=True)
    transformer = Transformer(str(folder), transformer_task="fill-mask")
    model = SparseEncoder(modules=[transformer, SpladePooling()], device="cpu")
    stock = model.encode(_WORDS, convert_to_tensor=True).to_dense()
    accelerate(model, invariant=True)
    head = transformer.model.lm_head
    assert isinstance(head.forward, _invariant.InvariantHead)
    assert_close(model.encode(_WORDS, convert_to_tensor=True).to_dense(), stock, FP32_BUDGET)
    set_precision(model, "fp16")
    _assert_invariant(lambda texts: encode_sparse(model, texts, top_k=20).to_dense())


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["bert", "modernbert", "llama"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_sparse_vectors_have_the_same_bits_in_every_batch_of_a_gpu(
    kind: str,
    dtype: Any,
    tokenizer_folder: Path,
) -> None:
    model = build_tiny_splade(kind, tokenizer_folder).to("cuda")
    set_precision(model, dtype)
    accelerate(model, invariant=True)
    # With few texts, the first call runs as CUDA graphs, and the second one, a stream, without.
    _assert_invariant(lambda texts: encode_sparse(model, texts, top_k=20).to_dense(), n_texts=50)
    _assert_invariant(lambda texts: encode_sparse(model, texts, batch_tokens=64).to_dense())


@pytest.mark.gpu
@pytest.mark.parametrize("pooling", ["mean", "cls", "max"])
def test_dense_vectors_have_the_same_bits_in_every_batch_of_a_gpu(
    pooling: str,
    dense_folder: Path,
) -> None:
    model = _dense_model(dense_folder, pooling).to("cuda")
    accelerate(model, invariant=True)
    _assert_invariant(lambda texts: model.encode(texts, convert_to_tensor=True), n_texts=50)


def test_all_ways_to_encode_give_the_same_bits(tokenizer_folder: Path) -> None:
    model = build_tiny_splade("bert", tokenizer_folder)
    accelerate(model, invariant=True)
    texts = _random_texts(np.random.default_rng(1), n_texts=40)
    expected = encode_sparse(model, texts).to_dense()
    assert torch.equal(model.encode(texts, batch_size=3).to_dense(), expected)
    assert torch.equal(model.encode(texts, batch_size=64).to_dense(), expected)
    assert torch.equal(model.encode_sparse_batch(texts).to_dense(), expected)
    with torch.no_grad():
        features = model.preprocess(texts)  # padded
        assert torch.equal(model(features)["sentence_embedding"], expected)


def test_numbers_of_threads_give_the_same_bits(tokenizer_folder: Path) -> None:
    model = build_tiny_splade("llama", tokenizer_folder)
    accelerate(model, invariant=True)
    texts = _random_texts(np.random.default_rng(2), n_texts=20)
    one_thread = encode_sparse(model, texts).to_dense()
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        three_threads = encode_sparse(model, texts).to_dense()
    finally:
        torch.set_num_threads(before)
    assert torch.equal(one_thread, three_threads)


def test_token_vectors_have_the_same_bits_in_every_batch() -> None:
    model = build_colbert()
    accelerate(model, invariant=True)
    for encode in (model.encode_query, model.encode_document):
        _assert_invariant(
            lambda texts, encode=encode: encode(texts),
            n_texts=8,
            n_batches=3,
        )


@pytest.mark.parametrize("pooling", ["mean", "cls", "max"])
def test_dense_vectors_have_the_same_bits_in_every_batch(
    pooling: str,
    dense_folder: Path,
    n_threads: int,
) -> None:
    model = _dense_model(dense_folder, pooling)
    accelerate(model, invariant=True)
    _assert_invariant(lambda texts: model.encode(texts, convert_to_tensor=True, batch_size=4))


def test_a_text_of_one_token_has_the_same_bits_alone_in_a_gated_network(tmp_path: Path) -> None:
    """Its half of the columns is contiguous, for which GELU has another kernel on a CPU."""
    transformer = Transformer(str(save_tiny_decoder("modernbert-decoder", tmp_path / "decoder")))
    model = SentenceTransformer(modules=[transformer, Pooling(32, "lasttoken")], device="cpu")
    accelerate(model, invariant=True)
    vectors = model.encode(["x", "y", "the quick brown fox"], convert_to_tensor=True)
    for text, vector in zip(["x", "y"], vectors[:2], strict=True):
        assert torch.equal(model.encode(text, convert_to_tensor=True), vector)


def _pad_to_16_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let norms pad fewer than 16 rows, as on GPUs."""
    monkeypatch.setattr(rowwise, "_least_numbers", {})
    monkeypatch.setattr(rowwise, "_least_number_of_rows", lambda function, kind: 16)


def test_norms_of_few_rows_are_padded(
    monkeypatch: pytest.MonkeyPatch,
    tokenizer_folder: Path,
) -> None:
    _pad_to_16_rows(monkeypatch)
    model = build_tiny_splade("llama", tokenizer_folder)
    accelerate(model, invariant=True)
    layer = model[0].model.base_model.layers[0]
    numbers_of_rows = []
    stock_forward = type(layer.input_layernorm).forward

    def count_rows(norm: nn.Module, rows: Tensor) -> Tensor:
        numbers_of_rows.append(rows.numel() // rows.size(-1))
        return stock_forward(norm, rows)

    monkeypatch.setattr(type(layer.input_layernorm), "forward", count_rows)
    encode_sparse(model, ["a card"])
    assert set(numbers_of_rows) == {16}


def test_vectors_of_few_texts_are_normalized_with_padding(
    monkeypatch: pytest.MonkeyPatch,
    dense_folder: Path,
) -> None:
    _pad_to_16_rows(monkeypatch)
    numbers_of_rows = []
    stock_normalize = rowwise._normalize

    def count_rows(rows: Tensor) -> Tensor:
        numbers_of_rows.append(len(rows))
        return stock_normalize(rows)

    monkeypatch.setattr(rowwise, "_normalize", count_rows)
    texts = ["a card", "", "a lost card of the list"]
    model = _dense_model(dense_folder)
    expected = model.encode(texts, normalize_embeddings=True)
    accelerate(model, invariant=True)
    vectors = model.encode(texts, normalize_embeddings=True)
    np.testing.assert_allclose(vectors, expected, atol=1e-6)
    for text, vector in zip(texts, vectors, strict=True):
        assert (model.encode(text, normalize_embeddings=True) == vector).all()
    assert numbers_of_rows == [16, 16, 16, 16]
    assert model.encode([], normalize_embeddings=True).shape[0] == 0
    with_module = SentenceTransformer(modules=[*model, Normalize()], device="cpu")
    accelerate(with_module, invariant=True, check=False)
    numbers_of_rows.clear()
    assert (with_module.encode(texts) == vectors).all()
    assert numbers_of_rows == [16]


def test_a_filler_text_changes_no_vector(
    monkeypatch: pytest.MonkeyPatch,
    dense_folder: Path,
) -> None:
    model = _dense_model(dense_folder)
    accelerate(model, invariant=True)
    texts = ["a card", "", "a lost card of the list"]
    many_texts = ["a lost card of the list"] * 50
    expected = model.encode(texts, convert_to_tensor=True)
    expected_of_many = model.encode(many_texts, batch_size=50, convert_to_tensor=True)
    numbers_of_tokens = []
    monkeypatch.setattr(packing, "_takes_filler_text", lambda features: True)
    run_packed = packing.PackedForward._run_packed

    def count_tokens(forward: packing.PackedForward, features: Any, kwargs: Any) -> Any:
        numbers_of_tokens.append(features["input_ids"].size(1))
        return run_packed(forward, features, kwargs)

    monkeypatch.setattr(packing.PackedForward, "_run_packed", count_tokens)
    assert torch.equal(model.encode(texts, convert_to_tensor=True), expected)
    encoded = model.encode(many_texts, batch_size=50, convert_to_tensor=True)
    assert torch.equal(encoded, expected_of_many)
    assert numbers_of_tokens == [16, 512]


def test_few_tokens_of_a_gpu_are_padded_to_a_number_that_all_small_layers_multiply_alike(
    monkeypatch: pytest.MonkeyPatch,
    dense_folder: Path,
) -> None:
    model = _dense_model(dense_folder)
    accelerate(model, invariant=True)
    (forward,) = packing.packed_forwards(model)
    assert [forward.padded_token_count(count) for count in (1, 32, 33, 100, 300)] == [
        16,
        32,
        64,
        128,
        300,
    ]
    is_usable = row_probes.SizeProbe.is_usable

    def is_usable_or_wide(probe: row_probes.SizeProbe, size: int) -> bool:
        is_refused = size < 128 and probe._kind.n_outputs > probe._kind.n_inputs
        return not is_refused and is_usable(probe, size)

    uncached = row_groups._fastest_row_count.__wrapped__
    monkeypatch.setattr(row_groups, "_fastest_row_count", uncached)
    monkeypatch.setattr(row_probes.SizeProbe, "is_usable", is_usable_or_wide)
    assert [forward.padded_token_count(count) for count in (1, 33, 129)] == [128, 128, 256]


def test_a_filler_text_has_token_types_if_the_other_texts_have_them(
    monkeypatch: pytest.MonkeyPatch,
    dense_folder: Path,
) -> None:
    model = _dense_model(dense_folder)
    accelerate(model, invariant=True)
    features = model.preprocess(["a card", "a lost card of the list"])
    features["token_type_ids"] = torch.ones_like(features["input_ids"])
    with torch.no_grad():
        expected = model(dict(features))["sentence_embedding"]
        monkeypatch.setattr(packing, "_takes_filler_text", lambda features: True)
        assert torch.equal(model(dict(features))["sentence_embedding"], expected)
        features["token_type_ids"].zero_()
        assert not torch.equal(model(dict(features))["sentence_embedding"], expected)


def test_a_filler_text_needs_no_length_of_the_longest_text(
    monkeypatch: pytest.MonkeyPatch,
    dense_folder: Path,
) -> None:
    model = _dense_model(dense_folder)
    accelerate(model, invariant=True)
    with packed_inputs():
        features = model.preprocess(["a card", "a lost card of the list"])
    for name in LONGEST_NAMES:
        del features[name]
    with torch.no_grad():
        expected = model(dict(features))["sentence_embedding"]
        monkeypatch.setattr(packing, "_takes_filler_text", lambda features: True)
        assert torch.equal(model(dict(features))["sentence_embedding"], expected)


def test_weights_are_copied_to_aligned_addresses(dense_folder: Path) -> None:
    model = SentenceTransformer(str(dense_folder), device="cpu")
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    for layer in layers:  # as if they were mapped from a file
        memory = torch.empty(2 + layer.weight.numel())
        layer.weight.data = memory[2:].view_as(layer.weight).copy_(layer.weight)
    expected = model.encode(["a card", "rain"], convert_to_tensor=True)
    accelerate(model, invariant=True)
    assert all(layer.weight.data_ptr() % 64 == 0 for layer in layers)
    assert_close(model.encode(["a card", "rain"], convert_to_tensor=True), expected, FP32_BUDGET)


def test_norms_of_one_name_and_other_modules_are_compared_separately(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _pad_to_16_rows(monkeypatch)
    for module in ("modeling_a", "modeling_b"):
        norm_class = type("RMSNorm", (nn.RMSNorm,), {"__module__": module})
        with torch.no_grad():
            InvariantNorm(norm_class(8))(torch.ones(3, 8))
    assert len(rowwise._least_numbers) == 2


def test_norms_that_run_as_one_kernel_keep_the_bits(
    monkeypatch: pytest.MonkeyPatch,
    tokenizer_folder: Path,
) -> None:
    # On a CPU, the function of torch is composed of several kernels.
    monkeypatch.setattr(_invariant, "runs_fused", lambda *_: not torch.is_grad_enabled())
    model = build_tiny_splade("llama", tokenizer_folder)
    expected = model.encode(_WORDS).to_dense()
    accelerate(model, invariant=True)
    monkeypatch.setattr(rowwise, "_least_numbers", {})
    _assert_invariant(lambda texts: encode_sparse(model, texts).to_dense())
    assert all("in one kernel" in kind.name for kind in rowwise._least_numbers)
    assert rowwise._least_numbers
    assert_close(model.encode(_WORDS).to_dense(), expected, FP32_BUDGET)


def test_no_mode_watches_the_layers_of_an_invariant_model(
    monkeypatch: pytest.MonkeyPatch,
    tokenizer_folder: Path,
) -> None:
    model = build_tiny_splade("bert", tokenizer_folder)
    accelerate(model, invariant=True)
    monkeypatch.setattr(stream, "fast_linear", None)  # would fail if it was called
    assert encode_sparse(model, ["a card", "a list"]).shape[0] == 2


def test_vectors_equal_those_of_the_stock_model_up_to_rounding(
    tokenizer_folder: Path,
    dense_folder: Path,
) -> None:
    texts = _random_texts(np.random.default_rng(3), n_texts=10)
    for model in (build_tiny_splade("llama", tokenizer_folder), _dense_model(dense_folder)):
        expected = model.encode(texts, convert_to_tensor=True).to_dense()
        accelerate(model, invariant=True)
        vectors = model.encode(texts, convert_to_tensor=True).to_dense()
        assert_close(vectors, expected, FP32_BUDGET)


def test_gradients_are_those_of_the_stock_layers(tokenizer_folder: Path) -> None:
    model = build_tiny_splade("bert", tokenizer_folder)
    accelerate(model, invariant=True)
    model(model.preprocess(["a lost card"]))["sentence_embedding"].sum().backward()
    gradients = [parameter.grad for parameter in model[0].model.base_model.parameters()]
    assert sum(gradient is not None for gradient in gradients) > 10


def test_restore_undoes_it(dense_folder: Path) -> None:
    model = _dense_model(dense_folder)
    expected = model.encode(["a card"])
    with accelerate(model, invariant=True):
        assert is_accelerated(model)
        assert model.invariance.environment()["torch"] == torch.__version__
    assert not is_accelerated(model)
    assert not hasattr(model, "invariance")
    assert not any("forward" in vars(module) for module in model.modules())
    assert (model.encode(["a card"]) == expected).all()


class _Doubled(nn.Linear):
    """A linear layer with a forward of its own."""

    def forward(self, rows: Tensor) -> Tensor:
        return 2 * super().forward(rows)


def _with_sum_pooling(tokenizer_folder: Path) -> Any:
    return build_tiny_splade("bert", tokenizer_folder, SpladePooling("sum"))


def _with_other_linear(tokenizer_folder: Path) -> Any:
    model = build_tiny_splade("bert", tokenizer_folder)
    layer = model[0].model.base_model.encoder.layer[0].intermediate
    layer.dense = _Doubled(layer.dense.in_features, layer.dense.out_features)
    return model


def _with_other_activation(tokenizer_folder: Path) -> Any:
    model = build_tiny_splade("bert", tokenizer_folder)
    model[0].model.base_model.encoder.layer[0].intermediate.intermediate_act_fn = nn.Mish()
    return model


def _with_replaced_norm(tokenizer_folder: Path) -> Any:
    model = build_tiny_splade("llama", tokenizer_folder)
    norm = model[0].model.base_model.norm
    norm.forward = functools.partial(type(norm).forward, norm)
    return model


def _with_replaced_activation(tokenizer_folder: Path) -> Any:
    model = build_tiny_splade("llama", tokenizer_folder)
    activation = model[0].model.base_model.layers[0].mlp.act_fn
    activation.forward = functools.partial(type(activation).forward, activation)
    return model


def _without_packed_tokens(tokenizer_folder: Path) -> Any:
    model = build_tiny_splade("bert", tokenizer_folder)
    model[0].model.set_attn_implementation("eager")
    return model


@pytest.mark.parametrize(
    ("build", "named"),
    [
        pytest.param(_with_sum_pooling, "SpladePooling: it has the pooling 'sum'", id="sum"),
        pytest.param(_with_other_linear, "_Doubled: its forward is not that", id="linear"),
        pytest.param(_with_other_activation, "Mish: a CPU may compute", id="activation"),
        pytest.param(
            _with_replaced_norm,
            "LlamaRMSNorm: its forward was replaced",
            id="replaced norm",
        ),
        pytest.param(
            _with_replaced_activation,
            "SiLUActivation: its forward was replaced",
            id="replaced activation",
        ),
        pytest.param(_without_packed_tokens, "runs on padded batches", id="padded"),
    ],
)
def test_models_that_may_depend_on_the_batch_are_refused(
    build: Callable[[Path], Any],
    named: str,
    tokenizer_folder: Path,
) -> None:
    model = build(tokenizer_folder)
    refused(ValueError, named, accelerate, model, invariant=True)
    assert not is_accelerated(model)


@pytest.mark.parametrize("pooling", ["mean", "cls"])
@pytest.mark.parametrize("output_value", ["token_embeddings", None])
def test_outputs_that_depend_on_padding_are_refused(
    output_value: str | None,
    pooling: str,
    dense_folder: Path,
) -> None:
    model = _dense_model(dense_folder, pooling)
    accelerate(model, invariant=True)
    needs_vectors = "output_value must be 'sentence_embedding' with invariant=True"
    refused(ValueError, needs_vectors, model.encode, ["a card"], output_value=output_value)
    assert model.encode(["a card"], output_value="sentence_embedding").shape == (1, 24)


def test_options_that_break_the_promise_are_refused(tokenizer_folder: Path) -> None:
    model = build_tiny_splade("bert", tokenizer_folder)
    no_quantize = "quantize must be None with invariant=True"
    refused(ValueError, no_quantize, accelerate, model, invariant=True, quantize="fp8")
    no_fp8 = "fp8 must be False with invariant=True"
    refused(ValueError, no_fp8, accelerate, model, invariant=True, fp8=True)
    must_pack = "packed must be True with invariant=True"
    refused(ValueError, must_pack, accelerate, model, invariant=True, packed=False)
    refused(TypeError, "invariant must be True or False", accelerate, model, invariant="yes")


@pytest.mark.filterwarnings("ignore:TILEFOLD_DISABLE is set")
def test_it_is_refused_where_acceleration_is_switched_off(
    monkeypatch: pytest.MonkeyPatch,
    tokenizer_folder: Path,
) -> None:
    model = build_tiny_splade("bert", tokenizer_folder)
    monkeypatch.setenv(SWITCH, "1")
    needs_acceleration = "invariant=True needs an accelerated model"
    refused(RuntimeError, needs_acceleration, accelerate, model, invariant=True)


def test_a_mask_with_holes_is_refused(tokenizer_folder: Path) -> None:
    model = build_tiny_splade("bert", tokenizer_folder)
    accelerate(model, invariant=True)
    features = model.preprocess(["a lost card"])
    features["attention_mask"][0, 1] = 0
    with torch.no_grad():
        refused(ValueError, "tokens are contiguous", model, features)
