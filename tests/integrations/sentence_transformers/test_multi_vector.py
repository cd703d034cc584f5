"""Tests that scoring functions for losses of MultiVectorEncoder equal sentence-transformers'."""

from __future__ import annotations

import functools
import inspect
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.integrations.multi_vector_models import (
    NEGATIVES,
    POSITIVES,
    QUERIES,
    problem,
    results_of,
)
from tests.integrations.splade_models import FP32_BUDGET, assert_close
from tests.refusals import refused
from tilefold.integrations.sentence_transformers import multi_vector

scoring = pytest.importorskip("sentence_transformers.multi_vector_encoder.scoring")
similarity = pytest.importorskip("sentence_transformers.util.similarity")
losses = pytest.importorskip("sentence_transformers.multi_vector_encoder.losses")

NAMES = [name for name in multi_vector.__all__ if "colbert" in name]
XTR = ["xtr_scores", "xtr_kd_scores", "xtr_scores_pairwise"]
COLUMNS = [QUERIES, POSITIVES, NEGATIVES]
MARGINS = torch.tensor([0.3, -0.1, 1.2, 0.0])
TEACHER = torch.tensor([[2.0, 0.5], [1.0, 1.5], [0.1, 0.0], [3.0, -1.0]])
RANKING_LOSS = "MultiVectorMultipleNegativesRankingLoss"
CACHED_RANKING_LOSS = "CachedMultiVectorMultipleNegativesRankingLoss"
MARGIN_LOSS = "MultiVectorMarginMSELoss"
KL_LOSS = "MultiVectorDistillKLDivLoss"

pytestmark = pytest.mark.filterwarnings("ignore:.*documents without any scoreable token.*")


def options_of(name: str) -> list[dict[str, Any]]:
    """Return options with which a scoring function is compared."""
    if name in XTR:
        return [{"top_k": top_k} for top_k in (1, 7, 500)]
    return [{"length_normalize": False}, {"length_normalize": True}]


@pytest.mark.parametrize("name", [name for name in multi_vector.__all__ if name.islower()])
def test_signatures_are_those_of_sentence_transformers_and_impl(name: str) -> None:
    stock_function = getattr(scoring, name, None) or getattr(similarity, name)
    stock_parameters = list(inspect.signature(stock_function).parameters.values())
    parameters = list(inspect.signature(getattr(multi_vector, name)).parameters.values())
    *shared, last = parameters
    assert last.name == "impl"
    assert len(shared) == len(stock_parameters)
    for parameter, stock in zip(shared, stock_parameters, strict=True):
        assert parameter.name == stock.name
        assert parameter.kind == stock.kind
        assert parameter.default == stock.default


@pytest.mark.parametrize("name", multi_vector.__all__[1:])
def test_functions_are_pickled_by_name(name: str) -> None:
    function: Any = getattr(multi_vector, name)
    assert function.__name__ == name
    assert pickle.loads(pickle.dumps(function)) is function  # noqa: S301


@pytest.mark.parametrize("name", multi_vector.__all__[1:])
def test_docstrings_name_parameters_and_errors(name: str) -> None:
    function: Any = getattr(multi_vector, name)
    docstring = inspect.getdoc(function)
    assert docstring is not None
    assert "Raises:" in docstring
    for parameter in inspect.signature(function).parameters:
        assert parameter in docstring


def stock_problem(name: str, masked: str, device: str = "cpu") -> dict[str, Any]:
    """Return arguments that sentence-transformers' functions and ours treat equally.

    Args:
        name: scoring function.
        masked: side that has a mask, ``"both"``, ``"neither"``, or ``"weights"`` for a query mask
            of weights. A side without a mask has rows of zeros, which are read as padding.
        device: device of the tensors.
    """
    arguments = problem(name, device=device)
    for side in ("queries", "documents"):
        if masked not in ("both", "weights", side):
            mask = arguments.pop(f"{side}_mask")
            arguments[f"{side}_embeddings"] *= mask[..., None]
    if masked == "weights":
        weights = torch.rand(3, 5, generator=torch.Generator().manual_seed(3))
        arguments["queries_mask"] = arguments["queries_mask"] * weights
    return arguments


@pytest.mark.parametrize("masked", ["both", "queries", "documents", "neither", "weights"])
@pytest.mark.parametrize("name", NAMES + XTR)
def test_scores_and_gradients_equal_those_of_the_stock_function(name: str, masked: str) -> None:
    arguments = stock_problem(name, masked)
    is_token = arguments.get("documents_mask")
    if is_token is None:
        is_token = arguments["documents_embeddings"].any(dim=-1)
    for options in options_of(name):
        expected = results_of(getattr(scoring, name), arguments, **options)
        results = results_of(getattr(multi_vector, name), arguments, **options)
        expected_scores, *expected_gradients = expected
        scores, *gradients = results
        assert (expected_scores < -1e7).any()
        torch.testing.assert_close(scores, expected_scores)
        # torch's maximum gives an arbitrary token of an empty document a gradient
        document_gradient = gradients[1]
        assert not document_gradient[~is_token].any()
        for gradient, stock_gradient in zip(gradients, expected_gradients, strict=True):
            assert_close(gradient, stock_gradient, FP32_BUDGET, "gradients")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_scores_are_fp32_for_every_dtype(name: str, dtype: torch.dtype) -> None:
    arguments = problem(name, dtype)
    arguments_fp32 = {
        key: value.float() if value.is_floating_point() else value
        for key, value in arguments.items()
    }
    scores = getattr(multi_vector, name)(**arguments)
    expected = getattr(scoring, name)(**arguments_fp32)
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_documents_of_length_0_score_as_empty(name: str) -> None:
    arguments = problem(name)
    del arguments["queries_mask"]
    token_dimension = arguments["documents_mask"].dim() - 1
    for key in ("documents_embeddings", "documents_mask"):
        arguments[key] = arguments[key].narrow(token_dimension, 0, 0)
    scores = getattr(multi_vector, name)(**arguments)
    torch.testing.assert_close(scores, getattr(scoring, name)(**arguments))


@pytest.mark.parametrize("name", ["colbert_scores_pairwise", "mean_colbert_scores_pairwise"])
def test_lists_of_encoded_texts_are_scored(colbert: Any, name: str) -> None:
    queries = colbert.encode_query(QUERIES)
    documents = colbert.encode_document(POSITIVES)
    scores = getattr(multi_vector, name)(queries, documents)
    torch.testing.assert_close(scores, getattr(scoring, name)(queries, documents))


def test_arrays_are_scored() -> None:
    queries, documents, *_ = problem("colbert_scores").values()
    scores = multi_vector.colbert_scores(queries.numpy(), documents.numpy())
    torch.testing.assert_close(scores, scoring.colbert_scores(queries, documents))


@pytest.mark.parametrize("name", NAMES)
def test_scores_under_autocast_are_fp32_and_near_those_of_the_stock_function(name: str) -> None:
    arguments = problem(name)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = getattr(scoring, name)(**arguments)
        scores = getattr(multi_vector, name)(**arguments)
    assert scores.dtype == expected.dtype == torch.float32
    # the stock function rounds each similarity to bf16
    torch.testing.assert_close(scores, expected, rtol=2e-2, atol=0.2)


@pytest.mark.parametrize("name", NAMES)
def test_scoring_functions_compile_without_graph_breaks(name: str) -> None:
    torch._dynamo.reset()
    function = getattr(multi_vector, name)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    results = results_of(compiled, problem(name))
    expected = results_of(function, problem(name))
    torch.testing.assert_close(results, expected)


def loss_and_gradients(
    model: Any,
    loss_name: str,
    similarity_fct: Any,
    options: dict[str, Any],
    labels: Tensor | None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of a batch, and its gradients by parameter."""
    model.zero_grad(set_to_none=True)
    loss = getattr(losses, loss_name)(model, similarity_fct=similarity_fct, **options)
    features = [dict(model.preprocess(texts)) for texts in COLUMNS]
    value = loss(features, labels)
    value.backward()
    gradients = {
        name: parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    return value.detach(), gradients


@pytest.mark.filterwarnings("ignore:.*teacher.*")
@pytest.mark.parametrize(
    ("loss_name", "function_name", "options", "labels"),
    [
        (RANKING_LOSS, "colbert_scores", {"scale": 0.5}, None),
        (RANKING_LOSS, "mean_colbert_scores", {"score_mini_batch_size": 3}, None),
        (CACHED_RANKING_LOSS, "colbert_scores", {"mini_batch_size": 3}, None),
        (MARGIN_LOSS, "colbert_scores_pairwise", {}, MARGINS),
        (MARGIN_LOSS, "mean_colbert_scores_pairwise", {}, MARGINS),
        (KL_LOSS, "colbert_kd_scores", {}, TEACHER),
        (KL_LOSS, "mean_colbert_kd_scores", {}, TEACHER),
    ],
)
def test_losses_and_gradients_equal_those_with_the_stock_function(
    colbert: Any,
    loss_name: str,
    function_name: str,
    options: dict[str, Any],
    labels: Tensor | None,
) -> None:
    stock_function = getattr(scoring, function_name)
    function = getattr(multi_vector, function_name)
    expected, expected_gradients = loss_and_gradients(
        colbert,
        loss_name,
        stock_function,
        options,
        labels,
    )
    loss, gradients = loss_and_gradients(colbert, loss_name, function, options, labels)
    torch.testing.assert_close(loss, expected)
    assert gradients.keys() == expected_gradients.keys()
    # some gradients are 0 in exact arithmetic, such as that of a key bias before a softmax:
    # they may differ by a rounding of the largest gradient
    scales = {name: gradient.abs().max().item() for name, gradient in expected_gradients.items()}
    rounding = torch.finfo(torch.float32).eps * max(scales.values())
    for name, gradient in gradients.items():
        error = (gradient - expected_gradients[name]).abs().max().item()
        allowed = max(FP32_BUDGET * scales[name], rounding)
        assert error <= allowed, f"gradient of {name}: error {error:.2e}, allowed {allowed:.2e}"


def similarity_name_in_config(loss_name: str, model: Any, similarity_fct: Any) -> str:
    """Return the name of a scoring function in the configuration of a loss."""
    loss = getattr(losses, loss_name)(model, similarity_fct=similarity_fct)
    return loss.get_config_dict()["similarity_fct"]


def test_a_partial_function_is_named_with_its_options_in_the_configuration_of_a_loss() -> None:
    function = functools.partial(multi_vector.colbert_scores, length_normalize=True)
    name = similarity_name_in_config(RANKING_LOSS, torch.nn.Identity(), function)
    assert name == "colbert_scores(length_normalize=True)"


@pytest.mark.parametrize(
    ("loss_name", "class_name", "labels"),
    [
        pytest.param(RANKING_LOSS, "XTRScores", None, id="XTRScores"),
        pytest.param(KL_LOSS, "XTRKDScores", TEACHER, id="XTRKDScores"),
    ],
)
def test_xtr_scores_train_and_are_named_as_those_of_sentence_transformers(
    colbert: Any,
    loss_name: str,
    class_name: str,
    labels: Tensor | None,
) -> None:
    stock_function = getattr(scoring, class_name)(top_k=8)
    function = getattr(multi_vector, class_name)(top_k=8)
    expected, expected_gradients = loss_and_gradients(
        colbert,
        loss_name,
        stock_function,
        {},
        labels,
    )
    loss, gradients = loss_and_gradients(colbert, loss_name, function, {}, labels)
    torch.testing.assert_close(loss, expected)
    projection = "1.linear.weight"
    assert_close(
        gradients[projection],
        expected_gradients[projection],
        FP32_BUDGET,
        "gradient of the projection",
    )
    name = similarity_name_in_config(loss_name, colbert, function)
    assert name == similarity_name_in_config(loss_name, colbert, stock_function)


GROUPS = problem("colbert_scores")
QUERY_VECTORS = GROUPS["queries_embeddings"]  # [3, 5, 16]
DOCUMENT_VECTORS = GROUPS["documents_embeddings"]  # [3, 2, 9, 16]
QUERIES_MASK = GROUPS["queries_mask"]
DOCUMENTS_MASK = GROUPS["documents_mask"]


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        pytest.param(
            "colbert_scores",
            (QUERY_VECTORS, DOCUMENT_VECTORS[:, 0]),
            r"documents_embeddings must have shape \[B, N, L, D\], got \[3, 9, 16\]",
            id="documents without groups",
        ),
        pytest.param(
            "colbert_kd_scores",
            (QUERY_VECTORS, DOCUMENT_VECTORS, QUERIES_MASK, DOCUMENTS_MASK[..., 1:]),
            r"documents_mask must have shape \[3, 2, 9\].*got \[3, 2, 8\]",
            id="short mask of documents",
        ),
        pytest.param(
            "xtr_scores",
            (QUERY_VECTORS, DOCUMENT_VECTORS, None, DOCUMENTS_MASK[..., 1:]),
            r"documents_mask must have shape \[3, 2, 9\]",
            id="short mask of documents of XTR",
        ),
        pytest.param(
            "colbert_scores",
            (QUERY_VECTORS, DOCUMENT_VECTORS, QUERIES_MASK[:, 1:], DOCUMENTS_MASK),
            r"queries_mask must have shape \[3, 5\].*got \[3, 4\]",
            id="short mask of queries",
        ),
        pytest.param(
            "colbert_scores_pairwise",
            ([], DOCUMENT_VECTORS[:, 0]),
            "one document for each of the 0 queries, got 3",
            id="no queries",
        ),
        pytest.param(
            "colbert_kd_scores",
            (QUERY_VECTORS[:2], DOCUMENT_VECTORS),
            "one group for each of the 2 queries",
            id="more groups than queries",
        ),
        pytest.param(
            "xtr_kd_scores",
            (QUERY_VECTORS[:2], DOCUMENT_VECTORS),
            "one group for each of the 2 queries",
            id="more groups than queries of XTR",
        ),
        pytest.param(
            "colbert_scores_pairwise",
            (list(QUERY_VECTORS[0]), DOCUMENT_VECTORS[:, 0]),
            r"must have shape \[L, D\], got \[16\]",
            id="vectors instead of sequences",
        ),
        pytest.param(
            "maxsim_pairwise",
            (QUERY_VECTORS[:2], QUERY_VECTORS),
            "document for each of the 2 queries, got 3 documents",
            id="more documents than queries",
        ),
        pytest.param(
            "maxsim",
            (QUERY_VECTORS, QUERY_VECTORS, torch.ones(3, 6)),
            r"a_mask must have shape \[3, 5\].*got \[3, 6\]",
            id="long mask",
        ),
        pytest.param(
            "maxsim",
            (QUERY_VECTORS, list(QUERY_VECTORS[0])),
            r"b\[\d\] must have shape \[L, D\], got \[16\]",
            id="vectors instead of documents",
        ),
        pytest.param(
            "maxsim",
            (DOCUMENT_VECTORS, QUERY_VECTORS),
            r"a must have shape \[B, L, D\], got \[3, 2, 9, 16\]",
            id="groups instead of queries",
        ),
    ],
)
def test_scoring_functions_reject(name: str, arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        getattr(multi_vector, name)(*arguments)


def test_maxsim_rejects_documents_of_another_dtype() -> None:
    documents = list(QUERY_VECTORS.bfloat16())
    refused(TypeError, "dtype of queries", multi_vector.maxsim, QUERY_VECTORS, documents)


def test_the_triton_implementation_is_refused_on_the_cpu() -> None:
    with pytest.raises(RuntimeError, match="impl='triton'"):
        multi_vector.colbert_scores(QUERY_VECTORS, DOCUMENT_VECTORS, impl="triton")


def test_xtr_rejects_a_top_k_of_0() -> None:
    with pytest.raises(ValueError, match="top_k must be a positive integer, got 0"):
        multi_vector.xtr_scores(**GROUPS, top_k=0)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "impl", "options"),
    [
        *((name, "auto", {}) for name in NAMES),
        *((name, "tiled", {}) for name in NAMES),
        *((name, "auto", {"top_k": 7}) for name in XTR),
    ],
)
def test_on_a_gpu_scores_and_gradients_equal_the_reference_on_the_cpu(
    name: str,
    impl: str,
    options: dict[str, int],
) -> None:
    function = getattr(multi_vector, name)
    expected = results_of(function, problem(name), impl="reference", **options)
    results = results_of(function, problem(name, device="cuda"), impl=impl, **options)
    torch.testing.assert_close(results, expected, rtol=1e-4, atol=1e-4)


def peak_memory_of_training(function: Any) -> int:
    """Return the bytes that a scoring function and its backward pass allocate on the GPU."""

    def random_vectors(*shape: int) -> Tensor:
        return torch.randn(
            *shape,
            device="cuda",
            dtype=torch.bfloat16,
            requires_grad=True,
        )

    queries = random_vectors(64, 32, 128)
    documents = random_vectors(64, 2, 300, 128)
    mask = torch.ones(64, 2, 300, dtype=torch.bool, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    allocated_before = torch.cuda.memory_allocated()
    function(queries, documents, documents_mask=mask).sum().backward()
    return torch.cuda.max_memory_allocated() - allocated_before


@pytest.mark.gpu
@pytest.mark.whole_gpu
def test_on_a_gpu_peak_memory_is_less_than_a_quarter_of_the_stock_function_s() -> None:
    stock_peak = peak_memory_of_training(scoring.colbert_scores)
    peak = peak_memory_of_training(multi_vector.colbert_scores)
    assert peak < stock_peak / 4, f"{peak / 2**20:.0f} MiB, stock {stock_peak / 2**20:.0f} MiB"
