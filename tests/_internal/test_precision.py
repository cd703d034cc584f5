"""The dtype in which a model computes: the default of a device, and a choice of the user."""

from __future__ import annotations

import copy
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from sentence_transformers import SentenceTransformer
from torch import nn

from tests.recipes.small import small_collection, small_masked_lm
from tilefold import retrieval as r
from tilefold._internal import precision
from tilefold._internal.precision import (
    choose_precision,
    computing_in,
    inference_precision,
    precision_of,
    requested_dtype,
)
from tilefold.integrations.sentence_transformers import accelerate, set_precision
from tilefold.recipes.backbone import minilm_path
from tilefold.recipes.loading import load_saved
from tilefold.retrieval.common.provenance import model_fingerprint
from tilefold.retrieval.errors import DataError
from tilefold.testing import budget, relative_error

TEXTS = list(small_collection().contents().values())
TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
needs_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="the model would be on the GPU")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_masked_lm(tmp_path_factory.mktemp("masked-lm"))


@pytest.fixture
def encoder(folder: Path) -> Any:
    return load_saved(str(folder), "backbone")


def half_precision_model() -> nn.Module:
    """Return a small network with bf16 weights, two of which are shared, and a bf16 buffer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)).bfloat16()
    model[1].weight = model[0].weight
    model.register_buffer("scale", torch.ones(2, dtype=torch.bfloat16))
    return model


@pytest.mark.parametrize(
    ("device", "has_bf16", "dtype", "reason"),
    [
        pytest.param("cpu", True, "fp32", "the default on CPUs", id="a CPU"),
        pytest.param("cuda", True, "bf16", "the default on GPUs", id="a GPU"),
        pytest.param(
            "cuda",
            False,
            "fp32",
            "the default on GPUs without bf16",
            id="a GPU without bf16",
        ),
        pytest.param("mps", False, "fp32", "the default on mps devices", id="another device"),
    ],
)
def test_auto_depends_on_the_device(
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    has_bf16: bool,
    dtype: str,
    reason: str,
) -> None:
    monkeypatch.setattr(precision, "gpu_has_bf16", lambda: has_bf16)
    choice = choose_precision("auto", device)
    assert (choice.dtype, choice.device, choice.reason) == (dtype, device, reason)


@pytest.mark.parametrize("dtype", ["float16", "int8", None, 16])
def test_an_unknown_dtype_is_refused(dtype: Any) -> None:
    with pytest.raises(ValueError, match="dtype: expected one of"):
        choose_precision(dtype, "cpu")
    with pytest.raises(ValueError, match="dtype: expected one of"):
        set_precision(half_precision_model(), dtype)


def test_bf16_is_refused_on_a_gpu_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "gpu_has_bf16", lambda: False)
    with pytest.raises(ValueError, match=r"dtype: expected .* this GPU, which has no bf16"):
        choose_precision("bf16", "cuda")
    assert choose_precision("fp16", "cuda").dtype == "fp16"


def test_16_bits_are_refused_on_a_device_without_autocast() -> None:
    with pytest.raises(ValueError, match="dtype: expected 'auto' or 'fp32' on meta"):
        choose_precision("bf16", "meta")


def test_weights_in_fp64_stay_in_fp64() -> None:
    model = nn.Linear(2, 2).double()
    assert set_precision(model).dtype == "fp64"
    assert inference_precision(model) == "fp64"
    with pytest.raises(ValueError, match=r"expected 'auto' for a model with fp64 weights"):
        set_precision(model, "bf16")
    assert requested_dtype(model) == "auto"  # a refused choice changes nothing


@pytest.mark.parametrize(("quantize", "name"), [(None, "fp32"), ("int8", "int8")])
def test_an_onnx_graph_keeps_its_dtype(quantize: str | None, name: str) -> None:
    model = nn.Sequential(nn.Identity())
    vars(model[0])["made_of"] = {"quantize": quantize}
    assert set_precision(model).dtype == name
    with pytest.raises(ValueError, match=f"exported to ONNX in {name}, got 'bf16'"):
        set_precision(model, "bf16")


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_model_computes_as_under_autocast(dtype: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 4))
    inputs = torch.randn(3, 16)
    in_fp32 = model(inputs)
    with torch.autocast("cpu", TORCH_DTYPES[dtype]):
        expected = model(inputs)
    set_precision(model, dtype)
    assert torch.equal(model(inputs), expected)
    set_precision(model, "fp32")
    with torch.autocast("cpu", TORCH_DTYPES[dtype]):
        assert torch.equal(model(inputs), in_fp32)


def test_weights_in_bf16_are_widened_for_fp32_and_narrowed_again() -> None:
    model = half_precision_model()
    stored = copy.deepcopy(model.state_dict())
    fingerprint = model_fingerprint(model)
    inputs = torch.randn(3, 16)
    expected = copy.deepcopy(model).float()(inputs)
    assert str(set_precision(model)) == "fp32 on cpu (the default on CPUs)"
    assert {tensor.dtype for tensor in model.state_dict().values()} == {torch.float32}
    assert torch.equal(model(inputs), expected)
    assert model_fingerprint(model) == fingerprint
    set_precision(model, "bf16")
    assert model_fingerprint(model) == fingerprint
    for name, tensor in model.state_dict().items():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, stored[name])
    assert model[1].weight is model[0].weight


def test_a_choice_for_a_while_ends_with_it() -> None:
    model = half_precision_model()
    with computing_in(model, "fp32"):
        assert inference_precision(model) == "fp32"
    assert requested_dtype(model) is None
    assert inference_precision(model) == "bf16"
    assert model[0].weight.dtype == torch.bfloat16
    set_precision(model, "fp16")
    with computing_in(model, None):
        assert inference_precision(model) == "fp16"
    with computing_in(model, "bf16"):
        assert inference_precision(model) == "bf16"
    assert inference_precision(model) == "fp16"


def pickled_copy(model: nn.Module) -> nn.Module:
    copied: nn.Module = pickle.loads(pickle.dumps(model))  # noqa: S301
    return copied


@pytest.mark.parametrize("copy_of", [copy.deepcopy, pickled_copy])
def test_a_copy_of_a_model_computes_in_the_same_dtype_with_its_own_weights(copy_of: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    set_precision(model, "bf16")
    copied = copy_of(model)
    assert inference_precision(copied) == "bf16"
    inputs = torch.randn(2, 4)
    assert torch.equal(copied(inputs), model(inputs))
    with torch.no_grad():
        copied[0].weight.zero_()
        copied[0].bias.zero_()
    assert not copied(inputs).any()
    assert model(inputs).any()


def test_a_model_that_is_moved_follows_the_default_of_its_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = half_precision_model()
    monkeypatch.setattr(precision, "_device_of", lambda _: "cuda")
    monkeypatch.setattr(precision, "gpu_has_bf16", lambda: True)
    set_precision(model)
    assert inference_precision(model) == "bf16"
    monkeypatch.setattr(precision, "_device_of", lambda _: "cpu")
    # Its weights were not widened for the GPU, and still determine the dtype.
    assert str(precision_of(model)) == "bf16 on cpu (the dtype of its weights)"
    assert set_precision(model).dtype == "fp32"


@needs_cpu
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_vectors_of_minilm_are_within_the_error_of_rounded_products(dtype: Any) -> None:
    exact = SentenceTransformer(str(minilm_path()), device="cpu", local_files_only=True).double()
    model = load_saved(str(minilm_path()), "dense", dtype)
    reference = torch.from_numpy(exact.encode_document(TEXTS))
    vectors = torch.from_numpy(model.encode_document(TEXTS)).double()
    # Each layer has 6 products with weights and 2 of attention. Each rounds both factors and the
    # result. The rounding errors are independent, so that their squares add up.
    n_roundings = 3 * 8 * len(model[0].model.encoder.layer)
    error = relative_error(vectors, reference)
    rounding = budget(TORCH_DTYPES[dtype])
    assert rounding / 4 < error < math.sqrt(n_roundings) * rounding


@needs_cpu
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("is_accelerated", [False, True], ids=["plain", "accelerated"])
def test_sparse_vectors_are_as_exact_as_under_autocast(
    encoder: Any,
    folder: Path,
    dtype: Any,
    is_accelerated: bool,
) -> None:
    exact = load_saved(str(folder), "backbone").double()
    set_precision(exact)
    stock = load_saved(str(folder), "backbone")
    if is_accelerated:
        accelerate(encoder)
    set_precision(encoder, dtype)
    reference = exact.encode_document(TEXTS, convert_to_sparse_tensor=False)
    with computing_in(stock, dtype):
        expected = stock.encode_document(TEXTS, convert_to_sparse_tensor=False)
    vectors = encoder.encode_document(TEXTS, convert_to_sparse_tensor=False)
    error = relative_error(vectors.double(), reference)
    # The fused head rounds its scores once, which is less than the stock head's.
    assert error < relative_error(expected.double(), reference) + budget(TORCH_DTYPES[dtype])


@needs_cpu
def test_encode_collection_computes_in_the_dtype_of_the_call(encoder: Any, tmp_path: Path) -> None:
    texts = small_collection().contents()
    for dtype in ("bf16", "fp32"):
        manifest = r.encode_collection(encoder, texts, tmp_path / dtype, dtype=dtype)
        assert manifest.precision == dtype
    assert inference_precision(encoder) == "fp32"
    in_bf16, in_fp32 = (r.read_vectors(tmp_path / dtype) for dtype in ("bf16", "fp32"))
    assert in_bf16.data.tolist() != in_fp32.data.tolist()
    with pytest.raises(DataError, match=r"here the model computes in fp32.*--dtype bf16"):
        r.encode_collection(encoder, texts, tmp_path / "bf16", dtype="fp32")
    with pytest.raises(ValueError, match="dtype: expected one of"):
        r.encode_collection(encoder, texts, tmp_path / "other", dtype="int8")  # type: ignore[arg-type]


@needs_cpu
def test_searcher_has_the_dtypes_of_index_and_queries(encoder: Any) -> None:
    index = r.build_index(r.encode_queries(encoder, small_collection().contents()))
    searcher = r.Searcher(index, encoder)
    assert searcher.precisions == {"index": None, "queries": "fp32"}
    set_precision(encoder, "bf16")
    assert searcher.precisions == {"index": None, "queries": "bf16"}
    words = r.BM25Index.build(small_collection().contents(), language="none")
    assert r.Searcher(words).precisions == {}
