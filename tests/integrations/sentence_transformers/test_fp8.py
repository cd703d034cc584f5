"""Trunks in fp8: what is rounded and what is not, restore, records, and refusals."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer, SparseEncoder
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sentence_transformer.modules import Pooling
from torch import nn
from torch._dynamo.testing import CompileCounter

from tests.integrations.decoder_models import save_tiny_decoder
from tests.integrations.sentence_transformers.packing.test_packed_decoders import (
    TEXTS,
    colbert,
    splade,
)
from tests.refusals import refused
from tilefold._internal.precision import computing_in, inference_precision
from tilefold.integrations.sentence_transformers import _fp8, accelerate, restore
from tilefold.integrations.sentence_transformers._fp8 import Fp8Linear
from tilefold.nn.fp8_linear import fp8_rows
from tilefold.ops import quantize_weight
from tilefold.retrieval import encode_collection, read_manifest
from tilefold.retrieval.errors import DataError

TEXTS = TEXTS[1:]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a tiny Llama."""
    return str(save_tiny_decoder("llama", tmp_path_factory.mktemp("decoders") / "llama"))


def rounding_copy(model: Any) -> Any:
    """Return a copy whose trunk computes in fp8 by the definition: rounded operands in fp32."""
    copied = copy.deepcopy(model)
    for layer in copied[0].model.base_model.modules():
        if isinstance(layer, nn.Linear):
            layer.weight.data = fp8_rows(layer.weight).dequantize()
            layer.register_forward_pre_hook(_round_input)
    return copied


def _round_input(layer: nn.Module, inputs: tuple[torch.Tensor]) -> torch.Tensor:
    (hidden,) = inputs
    return fp8_rows(hidden).dequantize().view(hidden.shape)


@pytest.mark.parametrize("kind", ["sparse decoder", "late decoder", "dense decoder", "bert"])
def test_vectors_are_those_of_a_trunk_with_rounded_operands(
    kind: str,
    llama: str,
    model: SparseEncoder,
) -> None:
    builders: dict[str, Callable[[], Any]] = {
        "sparse decoder": lambda: splade(llama),
        "late decoder": lambda: colbert(llama, "left"),
        "dense decoder": lambda: SentenceTransformer(
            modules=[Transformer(llama), Pooling(32, "lasttoken")],
            device="cpu",
        ),
        "bert": lambda: model,
    }
    fp8_model = builders[kind]().eval()
    exact = encoded(fp8_model)
    expected = encoded(rounding_copy(fp8_model))
    accelerate(fp8_model, fp8=True)
    vectors = encoded(fp8_model)
    rounding = np.linalg.norm(expected - exact)
    assert 0 < rounding < 0.2 * np.linalg.norm(exact)
    # without padding, some numbers between two numbers of fp8 are rounded to the other one
    assert np.linalg.norm(vectors - expected) < 0.1 * rounding
    restore(fp8_model)
    assert np.array_equal(encoded(fp8_model), exact)
    assert not any("forward" in vars(module) for module in fp8_model.modules())
    assert not any(isinstance(module, Fp8Linear) for module in fp8_model.modules())


def encoded(model: Any) -> Any:
    """Return the vectors of all texts in one array."""
    if isinstance(model, SparseEncoder):
        return model.encode(TEXTS).to_dense().numpy()
    if isinstance(model, SentenceTransformer):
        return model.encode(TEXTS)
    return np.concatenate(model.encode_document(TEXTS))


def test_the_head_and_the_projection_are_exact(llama: str) -> None:
    model = colbert(llama, "left")
    accelerate(model, fp8=True)
    assert type(model[1].linear) is nn.Linear
    sparse = splade(llama)
    accelerate(sparse, fp8=True)
    assert type(sparse[0].model.lm_head) is nn.Linear
    layer = sparse[0].model.model.layers[0]
    assert type(layer.mlp.down_proj) is Fp8Linear


def test_layers_of_one_input_round_it_once(llama: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = splade(llama)
    accelerate(model, fp8=True)
    n_rounded = 0

    def counting(rows: torch.Tensor) -> Any:
        nonlocal n_rounded
        n_rounded += 1
        return quantize_weight(rows)

    monkeypatch.setattr("tilefold.nn.fp8_linear.quantize_weight", counting)
    model.encode(TEXTS)
    n_layers = model[0].model.config.num_hidden_layers
    assert n_rounded == n_layers * (7 + 4)  # weights, and inputs of qkv, o, gate and up, and down


def test_threads_do_not_share_rounded_hidden_states(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = _fp8.SharedRows(n_layers=2)
    first = torch.full((1, 16), 1.0)
    second = torch.full((1, 16), 2.0)
    with ThreadPoolExecutor(1) as other_thread:

        def interrupted(hidden: torch.Tensor) -> Any:
            """Round hidden states, while another thread rounds its own."""
            if hidden is first:
                other_thread.submit(shared.rows_of, second).result()
            return fp8_rows(hidden)

        monkeypatch.setattr(_fp8, "fp8_rows", interrupted)
        assert torch.equal(shared.rows_of(first).dequantize(), first)
        rows = other_thread.submit(shared.rows_of, second).result()
        assert torch.equal(rows.dequantize(), second)
        assert torch.equal(shared.rows_of(first).dequantize(), first)


def test_gradients_are_those_of_the_model_without_fp8(llama: str) -> None:
    model = splade(llama).train()
    accelerate(model)
    expected = gradient_of(model)
    accelerate(model, fp8=True)
    assert torch.equal(gradient_of(model), expected)


def gradient_of(model: Any) -> torch.Tensor:
    """Return the gradient of a layer of the trunk."""
    model.zero_grad()
    model(model.preprocess(TEXTS))["sentence_embedding"].sum().backward()
    gradient: torch.Tensor = model[0].model.model.layers[0].mlp.down_proj.weight.grad
    return gradient


@pytest.mark.slow
def test_compiled_layers_have_the_same_vectors_without_graph_breaks(llama: str) -> None:
    model: Any = colbert(llama, "left")
    accelerate(model, fp8=True)
    expected = encoded(model)
    torch._dynamo.reset()
    counter = CompileCounter()
    for layer in model[0].model.layers:
        # without a compiler of kernels: the traced operations run as they are
        layer.mlp.compile(dynamic=True, fullgraph=True, backend=counter)
    for texts in (TEXTS[:3], TEXTS[1:]):  # batches of several sizes
        model.encode_document(texts)
    assert np.allclose(encoded(model), expected, atol=1e-6)
    assert counter.frame_count == 1  # all layers and all sizes share a graph


def test_changed_weights_and_copies_count(llama: str) -> None:
    model = colbert(llama, "left")
    accelerate(model, fp8=True)
    before = encoded(model)
    copied = pickle.loads(pickle.dumps(copy.deepcopy(model)))  # noqa: S301
    assert np.array_equal(encoded(copied), before)
    with torch.no_grad():
        model[0].model.layers[0].mlp.down_proj.weight.mul_(3)
    assert not np.array_equal(encoded(model), before)
    assert np.array_equal(encoded(copied), before)


def test_the_precision_is_recorded_and_a_folder_is_not_mixed(llama: str, tmp_path: Path) -> None:
    model = splade(llama)
    texts = {f"d{number}": text for number, text in enumerate(TEXTS)}
    accelerate(model)
    encode_collection(model, texts, tmp_path / "fp32")
    accelerate(model, fp8=True)
    assert inference_precision(model) == "fp8"
    with computing_in(model, "bf16"):
        assert inference_precision(model) == "fp8"
    refused(
        DataError,
        "computed in fp32, but here the model computes in fp8",
        encode_collection,
        model,
        texts,
        tmp_path / "fp32",
    )
    encode_collection(model, texts, tmp_path / "fp8")
    assert read_manifest(tmp_path / "fp8").precision == "fp8"
    restore(model)
    assert inference_precision(model) == "fp32"


def test_what_cannot_run_in_fp8_is_refused_and_left_stock(
    llama: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = splade(llama)
    refused(TypeError, "fp8 must be True or False, got 'yes'", accelerate, model, fp8="yes")
    for layer in model[0].model.model.modules():
        if isinstance(layer, nn.Linear):
            layer.double()
    refused(ValueError, "LlamaForCausalLM has none", accelerate, model, fp8=True, check=False)
    assert not any("forward" in vars(module) for module in model.modules())
    model.float()
    monkeypatch.setattr(type(model), "device", torch.device("meta"))
    refused(
        ValueError, "compute capability 8.9 or higher", accelerate, model, fp8=True, check=False
    )
