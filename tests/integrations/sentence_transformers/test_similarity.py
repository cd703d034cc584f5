"""Similarities of a MultiVectorEncoder: the functions equal the stock ones, and ``accelerate`` puts
them on a model.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.integrations.multi_vector_models import NEGATIVES, POSITIVES, QUERIES, needs_stock
from tests.integrations.splade_models import FP32_BUDGET, assert_close
from tests.refusals import refused
from tilefold.integrations.sentence_transformers import (
    accelerate,
    is_accelerated,
    multi_vector,
    restore,
)

pytest.importorskip("sentence_transformers.multi_vector_encoder.scoring")
from sentence_transformers.util import similarity as stock

NAMES = [name for name in multi_vector.__all__ if "maxsim" in name]
pytestmark = pytest.mark.filterwarnings("ignore:.*documents without any scoreable token.*")


@pytest.fixture
def model(colbert: Any) -> Any:
    yield colbert
    restore(colbert)
    colbert.similarity_fn_name = "maxsim"


@pytest.fixture(scope="module")
def encoded(colbert: Any) -> tuple[list[Tensor], list[Tensor]]:
    return colbert.encode_query(QUERIES), colbert.encode_document(POSITIVES)


def ragged(dtype: torch.dtype = torch.float32) -> tuple[list[Tensor], list[Tensor]]:
    """Sequences of other lengths, a document without a token and a token of zeros among them."""
    generator = torch.Generator().manual_seed(0)
    queries = [torch.randn(n, 16, generator=generator).to(dtype) for n in (5, 1, 3, 4)]
    documents = [torch.randn(n, 16, generator=generator).to(dtype) for n in (9, 0, 2, 7)]
    documents[0][3] = 0
    return queries, documents


def forms() -> dict[str, tuple[Any, Any, dict[str, Any]]]:
    """One call's arguments, in the forms that the stock functions take."""
    queries, documents = ragged()
    padded = [
        torch.nn.utils.rnn.pad_sequence(side, batch_first=True) for side in (queries, documents)
    ]
    masks = {
        key: torch.rand(side.shape[:2], generator=torch.Generator().manual_seed(2)) < 0.7
        for key, side in zip(("a_mask", "b_mask"), padded, strict=True)
    }
    masks["b_mask"][2] = False
    return {
        "lists": (queries, documents, {}),
        "lists and masks": (queries, documents, masks),
        "lists of masks": (
            queries,
            documents,
            {"b_mask": [masks["b_mask"][i, : len(row)] for i, row in enumerate(documents)]},
        ),
        "padded": (padded[0], padded[1], {}),
        "padded and masks": (padded[0], padded[1], masks),
        "weights": (
            padded[0],
            padded[1],
            {"a_mask": torch.rand(4, 5), "b_mask": masks["b_mask"].float()},
        ),
        "weights of lists": (queries, documents, {"a_mask": torch.rand(4, 5)}),
        "mixed": (padded[0], documents, {"a_mask": masks["a_mask"].numpy()}),
        "arrays": ([row.numpy() for row in queries], padded[1].numpy(), {}),
    }


def end_with_their_rows(a: Any, b: Any, masks: dict[str, Any]) -> None:
    """Past a sequence's end, masks of lists speak of the chunk's padding: clear them where chunks
    may differ.
    """
    for key, side in (("a_mask", a), ("b_mask", b)):
        for row, tokens in zip(masks.get(key, ()), side, strict=False):
            row[len(tokens) :] = 0


FORMS = list(forms())


@needs_stock
@pytest.mark.parametrize("kind", FORMS)
@pytest.mark.parametrize("name", NAMES)
def test_scores_equal_those_of_the_stock_function_in_every_form(name: str, kind: str) -> None:
    a, b, masks = forms()[kind]
    for options in ({}, {"length_normalize": False}, {"length_normalize": True}):
        expected = getattr(stock, name)(a, b, **masks, **options)
        found = getattr(multi_vector, name)(a, b, **masks, **options)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, expected)
    assert (expected < -1e7).any()


@pytest.mark.parametrize("name", NAMES)
def test_masks_that_are_none_are_named(name: str) -> None:
    a, b = torch.ones(2, 3, 4), torch.ones(2, 5, 4)
    for mask, kind in (("not a mask", "str"), (["x", "y"], "str"), (object(), "object")):
        for side in ("a_mask", "b_mask"):
            with pytest.raises(
                TypeError,
                match=rf"{side} must be a tensor or an array of numbers .* got {kind}",
            ):
                getattr(multi_vector, name)(a, b, **{side: mask})
    with pytest.raises(
        TypeError,
        match=r"documents_mask must be a tensor or an array of numbers .* got str",
    ):
        multi_vector.colbert_kd_scores(a, b[:, None], None, "not a mask")


@needs_stock
@pytest.mark.parametrize("name", NAMES)
def test_small_chunks_change_nothing(name: str) -> None:
    for kind in ("lists", "lists and masks"):
        a, b, masks = forms()[kind]
        end_with_their_rows(a, b, masks)
        expected = getattr(multi_vector, name)(a, b, **masks)
        for elements in (1, 16 * 8, 16 * 12):
            torch.testing.assert_close(
                getattr(multi_vector, name)(a, b, **masks, chunk_elements=elements),
                expected,
            )


@needs_stock
@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_lists_equal_those_of_the_stock_function(name: str) -> None:
    results = []
    for module in (stock, multi_vector):
        queries, documents = ragged()
        leaves = [row.requires_grad_() for row in [*queries, *documents]]
        scores = getattr(module, name)(queries, documents)
        scores = scores[scores > -1e7]
        results.append(torch.autograd.grad(scores, leaves, torch.linspace(-1, 1, scores.numel())))
    for side in (slice(0, 4), slice(4, 8)):
        mine, theirs = (torch.cat(gradients[side]) for gradients in (results[1], results[0]))
        assert_close(mine, theirs, FP32_BUDGET, "gradients")


@needs_stock
@pytest.mark.parametrize("name", NAMES)
def test_one_sequence_and_no_sequence_are_taken(name: str) -> None:
    queries, documents = ragged()
    for a, b in ((queries[0], documents[0]), (queries[0].numpy(), documents[:1])):
        torch.testing.assert_close(getattr(multi_vector, name)(a, b), getattr(stock, name)(a, b))
    unequal = [] if "pairwise" in name else [(queries, []), ([], documents)]
    for one, other in ((queries[:1], [documents[1]]), ([], []), *unequal):
        torch.testing.assert_close(
            getattr(multi_vector, name)(one, other),
            getattr(stock, name)(one, other),
        )


def test_half_precision_is_scored_in_fp32() -> None:
    queries, documents = ragged(torch.bfloat16)
    wide = [[row.float() for row in side] for side in (queries, documents)]
    torch.testing.assert_close(multi_vector.maxsim(queries, documents), multi_vector.maxsim(*wide))
    integers = [(row * 20).to(torch.int8) for row in documents]
    expected = multi_vector.maxsim(wide[0], [row.float() for row in integers])
    torch.testing.assert_close(multi_vector.maxsim(wide[0], integers), expected)


@needs_stock
@pytest.mark.parametrize("similarity", ["maxsim", "meanmaxsim"])
def test_an_accelerated_model_scores_as_before(model: Any, encoded: Any, similarity: str) -> None:
    queries, documents = encoded
    model.similarity_fn_name = similarity
    expected = model.similarity(queries, documents), model.similarity_pairwise(queries, documents)
    assert accelerate(model).model is model
    model.similarity_fn_name = (
        "maxsim"  # setting it, before or after, must not undo the acceleration
    )
    model.similarity_fn_name = similarity
    assert is_accelerated(model) and "similarity" in vars(model)
    torch.testing.assert_close(model.similarity(queries, documents), expected[0])
    torch.testing.assert_close(model.similarity_pairwise(queries, documents), expected[1])
    torch.testing.assert_close(
        model.similarity(
            queries[0],
            documents[0],
            length_normalize=True,
            chunk_elements=64,
            device="cpu",
        ),
        stock.mean_maxsim(queries[0], documents[0]),
    )


@needs_stock
def test_evaluators_of_an_accelerated_model_report_the_same(colbert: Any) -> None:
    from sentence_transformers.multi_vector_encoder import evaluation

    model = copy.deepcopy(colbert)  # evaluators leave themselves on its model card
    samples = [
        {"query": q, "positive": [p], "negative": [n, *POSITIVES[:1]]}
        for q, p, n in zip(QUERIES[1:], POSITIVES[1:], NEGATIVES[1:], strict=True)
    ]
    reranking = evaluation.MultiVectorRerankingEvaluator(samples, show_progress_bar=False)
    corpus = dict(enumerate(POSITIVES + NEGATIVES))
    relevant = {i: {i} for i in range(len(QUERIES))}
    retrieval = [
        evaluation.MultiVectorInformationRetrievalEvaluator(
            dict(enumerate(QUERIES)),
            corpus,
            relevant,
            mrr_at_k=[3],
            ndcg_at_k=[3],
            accuracy_at_k=[1],
            precision_recall_at_k=[1],
            map_at_k=[3],
            score_functions=functions,
        )
        for functions in (None, {"maxsim": multi_vector.maxsim})
    ]
    expected = reranking(model), retrieval[0](model)
    with accelerate(model):
        found = reranking(model), retrieval[1](model)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5)


@needs_stock
def test_models_that_score_with_something_else_are_refused(model: Any) -> None:
    refused(
        ValueError,
        "quantize must be None for a MultiVectorEncoder",
        accelerate,
        model,
        quantize="fp8",
    )
    refused(ValueError, "impl must be one of 'auto'", accelerate, model, impl="cuda")
    assert not is_accelerated(model)
    kind = type(model)
    model.__class__ = type(
        "Halved",
        (kind,),
        {"similarity": lambda self, a, b: kind.similarity(self, a, b) / 2},
    )
    try:
        refused(
            ValueError,
            r"must score with MultiVectorEncoder.similarity, got a Halved",
            accelerate,
            model,
        )
    finally:
        model.__class__ = kind
    model.similarity_fn_name = "maxsim"
    model._similarity = lambda a, b: stock.maxsim(a, b) / 2
    refused(ValueError, r"fused scores must equal those of model.similarity", accelerate, model)
    assert not is_accelerated(model)


def test_a_model_that_cannot_score_where_it_lies_says_so_and_can_skip_the_check(model: Any) -> None:
    twin = copy.deepcopy(model).to("meta")
    refused(RuntimeError, r"score four short sequences on meta.*check=False", accelerate, twin)
    assert not is_accelerated(twin)
    accelerate(twin, check=False)
    assert is_accelerated(twin)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", FORMS)
@pytest.mark.parametrize("name", NAMES)
def test_on_a_gpu_scores_equal_those_of_the_cpu_and_come_back(name: str, kind: str) -> None:
    a, b, masks = forms()[kind]
    end_with_their_rows(a, b, masks)
    expected = getattr(multi_vector, name)(a, b, **masks, impl="reference")
    on_device = getattr(multi_vector, name)(a, b, **masks, device="cuda", chunk_elements=16 * 12)
    assert on_device.device.type == "cpu"
    torch.testing.assert_close(on_device, expected, rtol=1e-4, atol=1e-4)
    if kind == "arrays":  # they follow the other side, as in the stock function
        assert (
            getattr(multi_vector, name)([torch.from_numpy(row).cuda() for row in a], b).device.type
            == "cuda"
        )
    else:
        a, b = (
            [row.cuda() for row in side] if isinstance(side, list) else side.cuda()
            for side in (a, b)
        )
        torch.testing.assert_close(
            getattr(multi_vector, name)(a, b, **masks).cpu(),
            expected,
            rtol=1e-4,
            atol=1e-4,
        )


@pytest.mark.gpu
def test_on_a_gpu_a_model_is_accelerated_in_half_precision(model: Any, encoded: Any) -> None:
    twin = copy.deepcopy(model).to("cuda", torch.bfloat16)
    accelerate(twin)
    queries, documents = ([row.to("cuda", torch.bfloat16) for row in side] for side in encoded)
    expected = multi_vector.maxsim(
        *([row.float().cpu() for row in side] for side in (queries, documents)),
    )
    torch.testing.assert_close(
        twin.similarity(queries, documents).cpu(),
        expected,
        rtol=1e-4,
        atol=1e-4,
    )
