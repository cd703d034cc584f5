"""Tests of MaxSim of a MultiVectorEncoder, as functions and on an accelerated model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.integrations.multi_vector_models import NEGATIVES, POSITIVES, QUERIES
from tests.integrations.splade_models import FP32_BUDGET, assert_close
from tests.refusals import refused
from tilefold.integrations.sentence_transformers import (
    accelerate,
    is_accelerated,
    multi_vector,
    restore,
)

pytest.importorskip("sentence_transformers.multi_vector_encoder.scoring")
from sentence_transformers.multi_vector_encoder import evaluation
from sentence_transformers.util import similarity as stock

NAMES = [name for name in multi_vector.__all__ if "maxsim" in name]
pytestmark = pytest.mark.filterwarnings("ignore:.*documents without any scoreable token.*")


@pytest.fixture
def model(colbert: Any) -> Any:
    """The ColBERT model, which is restored after the test."""
    yield colbert
    restore(colbert)
    colbert.similarity_fn_name = "maxsim"


@pytest.fixture(scope="module")
def encoded(colbert: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Token vectors of queries and documents."""
    return colbert.encode_query(QUERIES), colbert.encode_document(POSITIVES)


def ragged(dtype: torch.dtype = torch.float32) -> tuple[list[Tensor], list[Tensor]]:
    """Return queries and documents of unequal lengths.

    One document has no token, and one has a token of zeros.
    """
    generator = torch.Generator().manual_seed(0)
    queries = [torch.randn(length, 16, generator=generator).to(dtype) for length in (5, 1, 3, 4)]
    documents = [torch.randn(length, 16, generator=generator).to(dtype) for length in (9, 0, 2, 7)]
    documents[0][3] = 0
    return queries, documents


def random_mask(padded: Tensor) -> Tensor:
    """Return a mask of the tokens of padded sequences, ``[B, L]``."""
    return torch.rand(padded.shape[:2], generator=torch.Generator().manual_seed(2)) < 0.7


def input_forms() -> dict[str, tuple[Any, Any, dict[str, Any]]]:
    """Return queries, documents and masks in every form that the stock functions take."""
    queries, documents = ragged()
    padded_queries = torch.nn.utils.rnn.pad_sequence(queries, batch_first=True)
    padded_documents = torch.nn.utils.rnn.pad_sequence(documents, batch_first=True)
    query_mask = random_mask(padded_queries)
    document_mask = random_mask(padded_documents)
    document_mask[2] = False
    masks = {"a_mask": query_mask, "b_mask": document_mask}
    document_masks = [
        mask[: len(tokens)] for mask, tokens in zip(document_mask, documents, strict=True)
    ]
    query_weights = torch.rand(4, 5)
    document_weights = document_mask.float()
    return {
        "lists": (queries, documents, {}),
        "lists and masks": (queries, documents, masks),
        "lists of masks": (queries, documents, {"b_mask": document_masks}),
        "padded": (padded_queries, padded_documents, {}),
        "padded and masks": (padded_queries, padded_documents, masks),
        "weights": (
            padded_queries,
            padded_documents,
            {"a_mask": query_weights, "b_mask": document_weights},
        ),
        "weights of lists": (queries, documents, {"a_mask": query_weights}),
        "mixed": (padded_queries, documents, {"a_mask": query_mask.numpy()}),
        "arrays": ([query.numpy() for query in queries], padded_documents.numpy(), {}),
    }


def clear_masks_after_the_ends(a: Any, b: Any, masks: dict[str, Any]) -> None:
    """Clear masks of lists after the end of each sequence.

    They apply to the padding of a chunk there, which depends on the size of chunks.
    """
    for key, sequences in (("a_mask", a), ("b_mask", b)):
        for mask, tokens in zip(masks.get(key, ()), sequences, strict=False):
            mask[len(tokens) :] = 0


FORMS = list(input_forms())


LENGTH_OPTIONS = [
    pytest.param({}, id="default"),
    pytest.param({"length_normalize": False}, id="sum"),
    pytest.param({"length_normalize": True}, id="mean"),
]


@pytest.mark.parametrize("options", LENGTH_OPTIONS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", NAMES)
def test_scores_equal_those_of_the_stock_function_in_every_form(
    name: str,
    form: str,
    options: dict[str, bool],
) -> None:
    a, b, masks = input_forms()[form]
    expected = getattr(stock, name)(a, b, **masks, **options)
    scores = getattr(multi_vector, name)(a, b, **masks, **options)
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores, expected)
    assert (expected < -1e7).any(), "a document without a token takes part"


@pytest.mark.parametrize("side", ["a_mask", "b_mask"])
@pytest.mark.parametrize(
    ("mask", "type_name"),
    [
        pytest.param("not a mask", "str", id="text"),
        pytest.param(["x", "y"], "str", id="list of texts"),
        pytest.param(object(), "object", id="object"),
    ],
)
@pytest.mark.parametrize("name", NAMES)
def test_masks_of_another_type_are_refused(
    name: str,
    mask: Any,
    type_name: str,
    side: str,
) -> None:
    function = getattr(multi_vector, name)
    message = rf"{side} must be a tensor or an array of numbers .* got {type_name}"
    with pytest.raises(TypeError, match=message):
        function(torch.ones(2, 3, 4), torch.ones(2, 5, 4), **{side: mask})


def test_colbert_kd_scores_refuses_masks_of_another_type() -> None:
    message = r"documents_mask must be a tensor or an array of numbers .* got str"
    with pytest.raises(TypeError, match=message):
        multi_vector.colbert_kd_scores(
            torch.ones(2, 3, 4),
            torch.ones(2, 1, 5, 4),
            None,
            "not a mask",
        )


@pytest.mark.parametrize("chunk_elements", [1, 16 * 8, 16 * 12])
@pytest.mark.parametrize("form", ["lists", "lists and masks"])
@pytest.mark.parametrize("name", NAMES)
def test_small_chunks_do_not_change_scores(name: str, form: str, chunk_elements: int) -> None:
    function = getattr(multi_vector, name)
    a, b, masks = input_forms()[form]
    clear_masks_after_the_ends(a, b, masks)
    expected = function(a, b, **masks)
    scores = function(a, b, **masks, chunk_elements=chunk_elements)
    torch.testing.assert_close(scores, expected)


def gradients_of_lists(function: Any) -> list[Tensor]:
    """Return the gradients of a weighted sum of scores for queries, then for documents."""
    queries, documents = ragged()
    leaves = [tokens.requires_grad_() for tokens in [*queries, *documents]]
    scores = function(queries, documents)
    scores = scores[scores > -1e7]
    weights = torch.linspace(-1, 1, scores.numel())
    return list(torch.autograd.grad(scores, leaves, weights))


@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_lists_equal_those_of_the_stock_function(name: str) -> None:
    expected = gradients_of_lists(getattr(stock, name))
    gradients = gradients_of_lists(getattr(multi_vector, name))
    n_queries = 4
    for side in (slice(None, n_queries), slice(n_queries, None)):
        assert_close(
            torch.cat(gradients[side]),
            torch.cat(expected[side]),
            FP32_BUDGET,
            "gradients",
        )


def assert_equals_stock(name: str, a: Any, b: Any) -> None:
    """Compare the scores of a function with those of sentence-transformers' function."""
    expected = getattr(stock, name)(a, b)
    torch.testing.assert_close(getattr(multi_vector, name)(a, b), expected)


@pytest.mark.parametrize("name", NAMES)
def test_a_single_sequence_is_scored_as_by_the_stock_function(name: str) -> None:
    queries, documents = ragged()
    assert_equals_stock(name, queries[0], documents[0])
    assert_equals_stock(name, queries[0].numpy(), documents[:1])
    assert_equals_stock(name, queries[:1], [documents[1]])


@pytest.mark.parametrize("name", NAMES)
def test_no_sequences_are_scored_as_by_the_stock_function(name: str) -> None:
    queries, documents = ragged()
    assert_equals_stock(name, [], [])
    if "pairwise" not in name:
        assert_equals_stock(name, queries, [])
        assert_equals_stock(name, [], documents)


def test_bf16_and_integers_are_scored_in_fp32() -> None:
    queries, documents = ragged(torch.bfloat16)
    queries_fp32 = [query.float() for query in queries]
    documents_fp32 = [document.float() for document in documents]
    expected = multi_vector.maxsim(queries_fp32, documents_fp32)
    torch.testing.assert_close(multi_vector.maxsim(queries, documents), expected)
    documents_int8 = [(document * 20).to(torch.int8) for document in documents]
    expected = multi_vector.maxsim(queries_fp32, [document.float() for document in documents_int8])
    torch.testing.assert_close(multi_vector.maxsim(queries_fp32, documents_int8), expected)


@pytest.mark.parametrize("similarity", ["maxsim", "meanmaxsim"])
def test_an_accelerated_model_scores_as_before(model: Any, encoded: Any, similarity: str) -> None:
    queries, documents = encoded
    model.similarity_fn_name = similarity
    expected = model.similarity(queries, documents)
    expected_pairwise = model.similarity_pairwise(queries, documents)
    assert accelerate(model).model is model
    torch.testing.assert_close(model.similarity(queries, documents), expected)
    pairwise = model.similarity_pairwise(queries, documents)
    torch.testing.assert_close(pairwise, expected_pairwise)


@pytest.mark.parametrize("similarity", ["maxsim", "meanmaxsim"])
def test_a_change_of_the_similarity_leaves_a_model_accelerated(
    model: Any,
    encoded: Any,
    similarity: str,
) -> None:
    queries, documents = encoded
    model.similarity_fn_name = similarity
    expected = model.similarity(queries, documents)
    accelerate(model)
    model.similarity_fn_name = "maxsim"
    model.similarity_fn_name = similarity
    assert is_accelerated(model)
    assert "similarity" in vars(model)
    torch.testing.assert_close(model.similarity(queries, documents), expected)


@pytest.mark.parametrize("similarity", ["maxsim", "meanmaxsim"])
def test_similarity_of_an_accelerated_model_takes_options(
    model: Any,
    encoded: Any,
    similarity: str,
) -> None:
    queries, documents = encoded
    model.similarity_fn_name = similarity
    accelerate(model)
    scores = model.similarity(
        queries[0],
        documents[0],
        length_normalize=True,
        chunk_elements=64,
        device="cpu",
    )
    torch.testing.assert_close(scores, stock.mean_maxsim(queries[0], documents[0]))


def retrieval_evaluator(score_functions: Any) -> Any:
    """Return an evaluator that searches all documents."""
    return evaluation.MultiVectorInformationRetrievalEvaluator(
        dict(enumerate(QUERIES)),
        dict(enumerate(POSITIVES + NEGATIVES)),
        {query: {query} for query in range(len(QUERIES))},
        mrr_at_k=[3],
        ndcg_at_k=[3],
        accuracy_at_k=[1],
        precision_recall_at_k=[1],
        map_at_k=[3],
        score_functions=score_functions,
    )


def test_a_reranking_evaluator_reports_the_same_of_an_accelerated_model(colbert: Any) -> None:
    model = copy.deepcopy(colbert)  # evaluators change the model card
    samples = [
        {"query": query, "positive": [positive], "negative": [negative, POSITIVES[0]]}
        for query, positive, negative in zip(
            QUERIES[1:],
            POSITIVES[1:],
            NEGATIVES[1:],
            strict=True,
        )
    ]
    evaluator = evaluation.MultiVectorRerankingEvaluator(samples, show_progress_bar=False)
    expected = evaluator(model)
    with accelerate(model):
        assert evaluator(model) == pytest.approx(expected, rel=1e-5)


def test_a_retrieval_evaluator_reports_the_same_with_our_function(colbert: Any) -> None:
    model = copy.deepcopy(colbert)  # evaluators change the model card
    expected = retrieval_evaluator(None)(model)
    with accelerate(model):
        measures = retrieval_evaluator({"maxsim": multi_vector.maxsim})(model)
    assert measures == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param(
            {"quantize": "fp8"},
            "quantize must be None for a MultiVectorEncoder",
            id="quantize",
        ),
        pytest.param({"impl": "cuda"}, "impl must be one of 'auto'", id="impl"),
    ],
)
def test_accelerate_rejects_options(model: Any, options: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        accelerate(model, **options)
    assert not is_accelerated(model)


def test_a_model_with_a_similarity_method_of_its_own_is_refused(model: Any) -> None:
    model_class: Any = type(model)

    class Halved(model_class):  # type: ignore[valid-type]
        """A model that scores half of MaxSim."""

        def similarity(self, a: Any, b: Any) -> Tensor:
            return super().similarity(a, b) / 2

    model.__class__ = Halved
    try:
        message = r"must score with MultiVectorEncoder.similarity, got a Halved"
        refused(ValueError, message, accelerate, model)
    finally:
        model.__class__ = model_class


def test_a_model_with_another_similarity_function_is_refused(model: Any) -> None:
    def half_of_maxsim(a: Any, b: Any) -> Tensor:
        return stock.maxsim(a, b) / 2

    model.similarity_fn_name = "maxsim"
    model._similarity = half_of_maxsim
    message = r"fused scores must equal those of model.similarity"
    refused(ValueError, message, accelerate, model)
    assert not is_accelerated(model)


def test_a_model_on_meta_is_accelerated_without_the_check_only(model: Any) -> None:
    meta_model = copy.deepcopy(model).to("meta")
    message = r"score four short sequences on meta.*check=False"
    refused(RuntimeError, message, accelerate, meta_model)
    assert not is_accelerated(meta_model)
    accelerate(meta_model, check=False)
    assert is_accelerated(meta_model)


def to_gpu(tokens: Any) -> Any:
    """Move a tensor or a list of tensors to the GPU."""
    if isinstance(tokens, list):
        return [sequence.cuda() for sequence in tokens]
    return tokens.cuda()


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", NAMES)
def test_scores_by_a_gpu_return_to_the_cpu_and_equal_those_of_the_cpu(name: str, form: str) -> None:
    function = getattr(multi_vector, name)
    a, b, masks = input_forms()[form]
    clear_masks_after_the_ends(a, b, masks)
    expected = function(a, b, **masks, impl="reference")
    scores = function(a, b, **masks, device="cuda", chunk_elements=16 * 12)
    assert scores.device.type == "cpu"
    torch.testing.assert_close(scores, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("form", [form for form in FORMS if form != "arrays"])
@pytest.mark.parametrize("name", NAMES)
def test_scores_of_tensors_on_a_gpu_equal_those_of_the_cpu(name: str, form: str) -> None:
    function = getattr(multi_vector, name)
    a, b, masks = input_forms()[form]
    clear_masks_after_the_ends(a, b, masks)
    expected = function(a, b, **masks, impl="reference")
    scores = function(to_gpu(a), to_gpu(b), **masks)
    torch.testing.assert_close(scores.cpu(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_arrays_are_scored_on_the_device_of_the_other_side(name: str) -> None:
    queries, documents, _ = input_forms()["arrays"]
    queries_on_gpu = [torch.from_numpy(query).cuda() for query in queries]
    scores = getattr(multi_vector, name)(queries_on_gpu, documents)
    assert scores.device.type == "cuda"


@pytest.mark.gpu
def test_a_model_on_a_gpu_is_accelerated_in_half_precision(model: Any, encoded: Any) -> None:
    gpu_model = copy.deepcopy(model).to("cuda", torch.bfloat16)
    accelerate(gpu_model)
    queries, documents = (
        [tokens.to("cuda", torch.bfloat16) for tokens in side] for side in encoded
    )
    expected = multi_vector.maxsim(
        [query.float().cpu() for query in queries],
        [document.float().cpu() for document in documents],
    )
    scores = gpu_model.similarity(queries, documents).cpu()
    torch.testing.assert_close(scores, expected, rtol=1e-4, atol=1e-4)
