"""Tests of scores for PyLate and colpali-engine against formulas.

``tests/peers`` compares with the real packages.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.integrations.multi_vector_models import BUDGET, assert_equal, masked, padded, results
from tests.refusals import refused
from tilefold.integrations import colpali, pylate

MASKS = ["none", "bool", "int64", "float32", "weights"]
PYLATE = ["colbert_scores", "colbert_kd_scores", "ColBERTScores"]
COLPALI = ["maxsim_inbatch", "maxsim_kd"]
GPU_BUDGET = 1e-4
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def pylate_formula(
    name: str,
    queries: Tensor,
    documents: Tensor,
    query_mask: Any = None,
    document_mask: Any = None,
) -> Tensor:
    """Compute scores as PyLate 1.6 does with its torch backend.

    Masks multiply similarities before the maximum.
    """
    if name == "colbert_kd_scores":
        similarities = torch.einsum("ash,abth->abst", queries, documents)
        if document_mask is not None:
            document_mask = document_mask[:, :, None]
    else:
        if name == "ColBERTScores":
            documents = documents.flatten(0, -3)
        similarities = torch.einsum("ash,bth->abst", queries, documents)
        if document_mask is not None:
            document_mask = document_mask.reshape(1, len(documents), 1, -1)
    if query_mask is not None:
        similarities = similarities * query_mask[:, None, :, None]
    if document_mask is not None:
        similarities = similarities * document_mask
    return similarities.amax(dim=-1).sum(dim=-1)


def colpali_formula(name: str, query: Tensor, doc: Tensor, tau: float | None = None) -> Tensor:
    """Compute scores as colpali-engine 0.3.18 does with its torch backend."""
    if name == "maxsim_inbatch":
        similarities = torch.einsum("bnd,csd->bcns", query, doc)
    else:
        similarities = torch.einsum("bnd,bksd->bkns", query, doc)
    if tau is None:
        maxima = similarities.amax(dim=3)
    else:
        maxima = tau * torch.logsumexp(similarities / tau, dim=3)
    return maxima.sum(dim=2)


def formula_of(name: str) -> Callable[..., Tensor]:
    """Return the formula of a function of PyLate or colpali-engine."""
    return partial(colpali_formula if name in COLPALI else pylate_formula, name)


def scoring_function(name: str) -> Callable[..., Tensor]:
    """Return our replacement of a function of PyLate or colpali-engine."""
    if name == "ColBERTScores":
        return pylate.ColBERTScores()
    return getattr(colpali if name in COLPALI else pylate, name)


def inputs_of(name: str, dtype: torch.dtype = torch.float32) -> list[Any]:
    """Return arguments of a function of PyLate (masked) or colpali-engine (padded)."""
    return padded(name, dtype) if name in COLPALI else masked(name, "bool", dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.parametrize("name", PYLATE)
def test_scores_and_gradients_equal_the_formula_of_pylate(
    name: str,
    masks: str,
    device: str,
) -> None:
    expected = results(formula_of(name), masked(name, masks))
    inputs = masked(name, masks, device=device)
    budget = BUDGET if device == "cpu" else GPU_BUDGET
    assert_equal(results(scoring_function(name), inputs), expected, budget)


@pytest.mark.parametrize("backend", ["auto", "torch", "tiled"])
@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.parametrize("name", PYLATE)
def test_every_backend_equals_the_formula_of_pylate(name: str, masks: str, backend: str) -> None:
    inputs = masked(name, masks)
    expected = results(formula_of(name), inputs)
    assert_equal(results(scoring_function(name), inputs, backend=backend), expected)


@pytest.mark.parametrize(
    ("impl", "device"),
    [
        ("auto", "cpu"),
        ("reference", "cpu"),
        pytest.param("auto", "cuda", marks=pytest.mark.gpu),
    ],
)
@pytest.mark.parametrize("tau", [None, 0.1, 1.0])
@pytest.mark.parametrize("name", COLPALI)
def test_scores_and_gradients_equal_the_formula_of_colpali_engine(
    name: str,
    tau: float | None,
    impl: str,
    device: str,
) -> None:
    expected = results(formula_of(name), padded(name), padding=True, tau=tau)
    scores_and_gradients = results(
        scoring_function(name),
        padded(name, device=device),
        padding=True,
        tau=tau,
        impl=impl,
    )
    assert_equal(scores_and_gradients, expected, BUDGET if device == "cpu" else GPU_BUDGET)


@pytest.mark.parametrize(
    ("dtype", "score_dtype"),
    [
        pytest.param(torch.bfloat16, torch.float32, id="bf16"),
        pytest.param(torch.float16, torch.float32, id="fp16"),
        pytest.param(torch.float64, torch.float64, id="fp64"),
    ],
)
@pytest.mark.parametrize("name", [*PYLATE, *COLPALI])
def test_scores_are_fp32_from_half_precision_and_fp64_from_fp64(
    name: str,
    dtype: torch.dtype,
    score_dtype: torch.dtype,
) -> None:
    inputs = inputs_of(name, dtype)
    scores = scoring_function(name)(*inputs)
    assert scores.dtype == score_dtype
    expected = formula_of(name)(*(tensor.double() for tensor in inputs))
    assert_equal([scores.double()], [expected])


@pytest.mark.parametrize("name", [*PYLATE, *COLPALI])
def test_scoring_functions_compile_without_graph_breaks(name: str) -> None:
    torch._dynamo.reset()
    inputs = inputs_of(name)
    compiled = torch.compile(scoring_function(name), fullgraph=True, backend="aot_eager")
    expected = results(scoring_function(name), inputs, padding=name in COLPALI)
    assert_equal(results(compiled, inputs, padding=name in COLPALI), expected)


@pytest.mark.parametrize("name", PYLATE)
def test_a_document_without_an_unmasked_token_scores_zero_without_a_gradient(name: str) -> None:
    scores, _, document_gradients = results(scoring_function(name), masked(name, "bool"))
    # document 1 of the first dimension has no unmasked token
    if name == "colbert_kd_scores":
        scores_of_document = scores[1]
    elif name == "colbert_scores":
        scores_of_document = scores[:, 1]
    else:
        scores_of_document = scores[:, 2:4]
    assert not scores_of_document.any()
    assert not document_gradients[1].any()
    assert scores[:2].any()


def test_a_masked_token_wins_where_other_similarities_are_negative() -> None:
    queries = torch.ones(1, 1, 8)
    documents = -torch.ones(1, 2, 8)
    document_mask = torch.tensor([[True, False]])
    assert pylate.colbert_scores(queries, documents).item() == -8
    assert pylate.colbert_scores(queries, documents, None, document_mask).item() == 0


@pytest.mark.parametrize("name", COLPALI)
def test_a_row_of_zeros_wins_where_other_similarities_are_negative(name: str) -> None:
    query, doc = padded(name)
    first_tokens = doc[..., :1, :]
    with_zeros = torch.nn.functional.pad(first_tokens, (0, 0, 0, 1))
    score = scoring_function(name)
    assert (score(query, first_tokens) < 0).any()
    assert (score(query, with_zeros) >= 0).all()


@pytest.mark.parametrize("name", PYLATE)
def test_a_floating_mask_is_differentiated(name: str) -> None:
    queries, documents, *masks = masked(name, "weights", torch.float64)
    masks = [mask.double().requires_grad_() for mask in masks]
    loss = scoring_function(name)(queries, documents, *masks).square().sum()
    gradients = torch.autograd.grad(loss, masks)
    expected_loss = formula_of(name)(queries, documents, *masks).square().sum()
    expected_gradients = torch.autograd.grad(expected_loss, masks)
    for gradient, expected, mask in zip(gradients, expected_gradients, masks, strict=True):
        is_decided = mask != 0  # at 0, similarities tie
        torch.testing.assert_close(gradient[is_decided], expected[is_decided])


def test_losses_of_colpali_engine_may_change_the_scores_in_place() -> None:
    query, doc = (tensor.requires_grad_() for tensor in padded("maxsim_inbatch"))
    scores = colpali.maxsim_inbatch(query, doc)
    scores[scores > 0.5] *= 0.5  # as the filter of high negatives does
    scores.view(-1).sum().backward()
    assert query.grad is not None
    assert doc.grad is not None


def ragged_pairs() -> tuple[list[Tensor], list[Tensor]]:
    """Return three queries and three documents of unequal lengths, which need gradients."""
    generator = torch.Generator().manual_seed(0)
    queries = [
        torch.randn(length, 16, generator=generator, requires_grad=True) for length in (3, 1, 5)
    ]
    documents = [
        torch.randn(length, 16, generator=generator, requires_grad=True) for length in (7, 2, 9)
    ]
    return queries, documents


def pairwise_formula(queries: Any, documents: Any) -> Tensor:
    """Compute the MaxSim of each query and its document."""
    scores = [
        (query @ document.T).amax(dim=-1).sum()
        for query, document in zip(queries, documents, strict=True)
    ]
    return torch.stack(scores)


def test_pairwise_scores_and_gradients_equal_the_formula() -> None:
    queries, documents = ragged_pairs()
    leaves = [*queries, *documents]
    weights = torch.tensor([1.0, -2.0, 0.5])
    scores = pylate.colbert_scores_pairwise(queries, documents)
    gradients = torch.autograd.grad(scores, leaves, weights)
    expected = pairwise_formula(queries, documents)
    expected_gradients = torch.autograd.grad(expected, leaves, weights)
    assert_equal([scores, *gradients], [expected, *expected_gradients])


def test_pairwise_scores_take_arrays() -> None:
    queries, documents = ragged_pairs()
    query_arrays = [query.detach().numpy() for query in queries]
    document_arrays = [document.detach().numpy() for document in documents]
    scores = pylate.colbert_scores_pairwise(query_arrays, document_arrays)
    assert_equal([scores], [pairwise_formula(queries, documents)])


def test_rows_of_zeros_take_part_in_pairwise_scores() -> None:
    queries, documents = ragged_pairs()
    padded_documents = torch.nn.utils.rnn.pad_sequence(documents, batch_first=True)
    scores = pylate.colbert_scores_pairwise(queries, padded_documents)
    assert_equal([scores], [pairwise_formula(queries, padded_documents)])


def test_lists_and_arrays_score_as_in_the_documentation_of_pylate() -> None:
    queries = [
        [[1.0], [0.0], [0.0], [0.0]],
        [[0.0], [2.0], [0.0], [0.0]],
        [[0.0], [0.0], [3.0], [0.0]],
    ]
    documents = [
        [[10.0], [0.0], [1.0]],
        [[0.0], [100.0], [10.0]],
        [[1.0], [0.0], [1000.0]],
    ]
    query_mask = torch.tensor([[1.0, 1, 1, 1], [1, 1, 1, 1], [1, 1, 0, 1]])
    document_mask = torch.tensor([[1.0, 1, 1], [1, 0, 1], [1, 1, 1]])
    expected = torch.tensor([[10.0, 10, 1000], [20, 20, 2000], [0, 0, 0]])
    query_array = torch.tensor(queries).numpy()
    document_array = torch.tensor(documents).numpy()
    document_array.flags.writeable = False
    for query_form, document_form in (
        (queries, documents),
        (query_array, document_array),
        (list(query_array), list(document_array)),
    ):
        scores = pylate.colbert_scores(query_form, document_form, query_mask, document_mask)
        assert torch.equal(scores, expected)
    scores = pylate.colbert_scores(
        query_array,
        document_array,
        queries_mask=query_mask.numpy(),
        documents_mask=document_mask.numpy(),
    )
    assert torch.equal(scores, expected)


def test_no_queries_have_no_scores() -> None:
    assert pylate.colbert_scores(torch.randn(0, 3, 8), torch.randn(4, 5, 8)).shape == (0, 4)


def test_documents_without_tokens_score_zero() -> None:
    scores = pylate.colbert_scores(torch.randn(2, 3, 8), torch.randn(4, 0, 8))
    assert torch.equal(scores, torch.zeros(2, 4))


def test_a_nan_spreads_to_scores_unless_its_token_is_masked() -> None:
    queries, documents, query_mask, document_mask = masked("colbert_scores", "bool")
    documents[0, 8] = float("nan")
    document_mask[0, 8] = True
    scores = pylate.colbert_scores(queries, documents, query_mask, document_mask)
    assert scores[:2, 0].isnan().all()
    document_mask[0, 8] = False
    scores = pylate.colbert_scores(queries, documents, query_mask, document_mask)
    assert not scores.isnan().any()


QUERIES, DOCUMENTS, QUERY_MASK, DOCUMENT_MASK = masked("colbert_scores", "bool")


@pytest.mark.parametrize(
    ("documents", "options", "error", "message"),
    [
        pytest.param(
            DOCUMENTS[0],
            {},
            ValueError,
            r"documents_embeddings must have shape \[B, L, D\], got \[9, 16\]",
            id="one document",
        ),
        pytest.param(
            DOCUMENTS,
            {"queries_mask": QUERY_MASK, "documents_mask": DOCUMENT_MASK[:, 1:]},
            ValueError,
            r"documents_mask must have shape \[4, 9\].*got \[4, 8\]",
            id="short mask",
        ),
        pytest.param(
            DOCUMENTS,
            {"backend": "flash"},
            ValueError,
            r"backend must be None or one of 'auto'.*got 'flash'",
            id="unknown backend",
        ),
        pytest.param(
            DOCUMENTS,
            {"backend": "triton"},
            RuntimeError,
            "impl='triton'",
            id="triton on the CPU",
        ),
    ],
)
def test_colbert_scores_rejects(
    documents: Tensor,
    options: dict[str, Any],
    error: type[Exception],
    message: str,
) -> None:
    with pytest.raises(error, match=message):
        pylate.colbert_scores(QUERIES, documents, **options)


@pytest.mark.parametrize(
    ("queries", "documents", "message"),
    [
        pytest.param(
            [],
            DOCUMENTS,
            "queries_embeddings must hold at least one sequence, got an empty list",
            id="no queries",
        ),
        pytest.param(
            list(QUERIES),
            list(DOCUMENTS[0]),
            r"must have shape \[L, D\], got \[16\]",
            id="vectors instead of sequences",
        ),
        pytest.param(QUERIES, DOCUMENTS, "as many as queries", id="unequal numbers"),
    ],
)
def test_colbert_scores_pairwise_rejects(queries: Any, documents: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pylate.colbert_scores_pairwise(queries, documents)


QUERY, DOC = padded("maxsim_kd")


@pytest.mark.parametrize(
    ("query", "doc", "options", "error", "message"),
    [
        pytest.param(
            QUERY,
            DOC,
            {},
            ValueError,
            r"doc must have shape \[B, L, D\], got \[3, 2, 9, 16\]",
            id="documents of maxsim_kd",
        ),
        pytest.param(
            [QUERY],
            DOC[:, 0],
            {},
            TypeError,
            r"query must be a torch\.Tensor, got list",
            id="list of queries",
        ),
        pytest.param(
            QUERY,
            DOC[:, 0],
            {"tau": 0.0},
            ValueError,
            "temperature must be a positive",
            id="temperature of 0",
        ),
        pytest.param(
            QUERY,
            DOC[:, 0],
            {"impl": "triton"},
            RuntimeError,
            "impl='triton'",
            id="triton on the CPU",
        ),
    ],
)
def test_maxsim_inbatch_rejects(
    query: Any,
    doc: Tensor,
    options: dict[str, Any],
    error: type[Exception],
    message: str,
) -> None:
    with pytest.raises(error, match=message):
        colpali.maxsim_inbatch(query, doc, **options)


def test_maxsim_kd_rejects_documents_of_maxsim_inbatch() -> None:
    message = r"doc must have shape \[B, N, L, D\], got \[3, 9, 16\]"
    with pytest.raises(ValueError, match=message):
        colpali.maxsim_kd(QUERY, DOC[:, 0])


@pytest.mark.parametrize(
    ("module", "package", "requirement"),
    [
        pytest.param(pylate, "pylate", "pylate>=1.6", id="pylate"),
        pytest.param(colpali, "colpali_engine", "colpali-engine>=0.3.18", id="colpali-engine"),
    ],
)
def test_accelerate_names_the_package_to_install(
    module: Any,
    package: str,
    requirement: str,
) -> None:
    if importlib.util.find_spec(package) is None:
        refused(ImportError, f'pip install "{requirement}"', module.accelerate)
    assert not module.is_accelerated()


@pytest.mark.parametrize("module", [pylate, colpali])
def test_restore_without_acceleration_does_nothing(module: Any) -> None:
    module.restore()
    assert not module.is_accelerated()


@pytest.mark.parametrize("module", [pylate, colpali])
def test_accelerate_rejects_unknown_implementations(module: Any) -> None:
    refused(ValueError, "impl must be one of 'auto'", module.accelerate, impl="cuda")
