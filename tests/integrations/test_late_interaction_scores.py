"""Scores of PyLate and colpali-engine equal their formulas; tests/peers compares with the real
packages.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
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
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def pylate_formula(
    name: str,
    queries: Tensor,
    documents: Tensor,
    query_mask: Any = None,
    document_mask: Any = None,
) -> Tensor:
    """What PyLate 1.6 computes with its torch backend, in one formula: masks multiply before the
    maximum.
    """
    if name == "colbert_kd_scores":
        sims = torch.einsum("ash,abth->abst", queries, documents)
        document_mask = None if document_mask is None else document_mask[:, :, None]
    else:
        documents = documents.flatten(0, -3) if name == "ColBERTScores" else documents
        sims = torch.einsum("ash,bth->abst", queries, documents)
        document_mask = (
            None if document_mask is None else document_mask.reshape(1, len(documents), 1, -1)
        )
    if query_mask is not None:
        sims = sims * query_mask[:, None, :, None]
    if document_mask is not None:
        sims = sims * document_mask
    return sims.amax(dim=-1).sum(dim=-1)


def colpali_formula(name: str, query: Tensor, doc: Tensor, tau: float | None = None) -> Tensor:
    """What colpali-engine 0.3.18 computes with its torch backend."""
    sims = torch.einsum(
        "bnd,csd->bcns" if name == "maxsim_inbatch" else "bnd,bksd->bkns",
        query,
        doc,
    )
    best = sims.amax(dim=3) if tau is None else tau * torch.logsumexp(sims / tau, dim=3)
    return best.sum(dim=2)


def function(name: str) -> Callable[..., Tensor]:
    found = getattr(colpali if name in COLPALI else pylate, name)
    return found() if name == "ColBERTScores" else found


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.parametrize("name", PYLATE)
def test_scores_and_gradients_equal_the_formula_of_pylate(
    name: str,
    masks: str,
    device: str,
) -> None:
    expected = results(lambda *a: pylate_formula(name, *a), masked(name, masks))
    arguments, budget = masked(name, masks, device=device), BUDGET if device == "cpu" else 1e-4
    assert_equal(results(function(name), arguments), expected, budget)
    for backend in ("auto", "torch", "tiled") if device == "cpu" else ():
        assert_equal(results(function(name), arguments, backend=backend), expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tau", [None, 0.1, 1.0])
@pytest.mark.parametrize("name", COLPALI)
def test_scores_and_gradients_equal_the_formula_of_colpali_engine(
    name: str,
    tau: float | None,
    device: str,
) -> None:
    expected = results(lambda *a: colpali_formula(name, *a, tau=tau), padded(name), padding=True)
    for impl in ("auto", "reference") if device == "cpu" else ("auto",):
        found = results(
            function(name),
            padded(name, device=device),
            padding=True,
            tau=tau,
            impl=impl,
        )
        assert_equal(found, expected, BUDGET if device == "cpu" else 1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("name", [*PYLATE, *COLPALI])
def test_scores_are_fp32_from_half_precision_and_fp64_from_fp64(
    name: str,
    dtype: torch.dtype,
) -> None:
    arguments = padded(name, dtype) if name in COLPALI else masked(name, "bool", dtype)
    formula = colpali_formula if name in COLPALI else pylate_formula
    scores = function(name)(*arguments)
    assert scores.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert_equal([scores.double()], [formula(name, *(part.double() for part in arguments))])


@pytest.mark.parametrize("name", [*PYLATE, *COLPALI])
def test_the_functions_compile_whole(name: str) -> None:
    torch._dynamo.reset()
    arguments = padded(name) if name in COLPALI else masked(name, "bool")
    compiled = torch.compile(function(name), fullgraph=True, backend="aot_eager")
    plain = results(function(name), arguments, padding=name in COLPALI)
    assert_equal(results(compiled, arguments, padding=name in COLPALI), plain)


@pytest.mark.parametrize("name", PYLATE)
def test_a_document_without_an_unmasked_token_scores_zero_without_a_gradient(name: str) -> None:
    scores, _, documents = results(function(name), masked(name, "bool"))
    columns = [1] if name == "colbert_scores" else [2, 3]
    empty = scores[1] if name == "colbert_kd_scores" else scores[:, columns]
    assert not empty.any() and not documents[1].any() and scores[:2].any()


def test_a_masked_token_or_a_row_of_zeros_wins_where_every_other_similarity_is_negative() -> None:
    queries, documents = torch.ones(1, 1, 8), -torch.ones(1, 2, 8)
    mask = torch.tensor([[True, False]])
    assert pylate.colbert_scores(queries, documents).item() == -8
    assert pylate.colbert_scores(queries, documents, None, mask).item() == 0
    for name in COLPALI:
        query, doc = padded(name)
        before = function(name)(query, doc[..., :1, :])
        after = function(name)(query, torch.nn.functional.pad(doc[..., :1, :], (0, 0, 0, 1)))
        assert (before < 0).any() and (after >= 0).all()


@pytest.mark.parametrize("name", PYLATE)
def test_a_floating_mask_is_differentiated(name: str) -> None:
    arguments = masked(name, "weights", torch.float64)
    masks = [mask.double().requires_grad_() for mask in arguments[2:]]
    found = torch.autograd.grad(function(name)(*arguments[:2], *masks).square().sum(), masks)
    expected = torch.autograd.grad(
        pylate_formula(name, *arguments[:2], *masks).square().sum(),
        masks,
    )
    for mine, truth, mask in zip(found, expected, masks, strict=True):
        torch.testing.assert_close(mine[mask != 0], truth[mask != 0])  # at 0 similarities tie


def test_losses_of_colpali_engine_may_change_the_scores_in_place() -> None:
    query, doc = (part.requires_grad_() for part in padded("maxsim_inbatch"))
    scores = colpali.maxsim_inbatch(query, doc)
    scores[scores > 0.5] *= 0.5  # what filtering high negatives does
    scores.view(-1).sum().backward()
    assert query.grad is not None and doc.grad is not None


def test_the_pairwise_form_is_differentiable_and_takes_sequences_of_any_length() -> None:
    generator = torch.Generator().manual_seed(0)
    queries = [torch.randn(n, 16, generator=generator, requires_grad=True) for n in (3, 1, 5)]
    documents = [torch.randn(n, 16, generator=generator, requires_grad=True) for n in (7, 2, 9)]
    scores = pylate.colbert_scores_pairwise(queries, documents)
    expected = torch.stack(
        [(q @ d.T).amax(dim=-1).sum() for q, d in zip(queries, documents, strict=True)],
    )
    weights = torch.tensor([1.0, -2.0, 0.5])
    found, truth = (
        torch.autograd.grad(s, [*queries, *documents], weights) for s in (scores, expected)
    )
    assert_equal([scores, *found], [expected, *truth])
    arrays = [[item.detach().numpy() for item in side] for side in (queries, documents)]
    assert_equal([pylate.colbert_scores_pairwise(*arrays)], [expected])
    filled = torch.nn.utils.rnn.pad_sequence(documents, batch_first=True)  # rows of zeros take part
    mixed = pylate.colbert_scores_pairwise(queries, filled)
    assert_equal(
        [mixed],
        [torch.stack([(q @ d.T).amax(-1).sum() for q, d in zip(queries, filled, strict=True)])],
    )


def test_lists_and_arrays_are_taken_as_pylate_takes_them() -> None:
    queries = [
        [[1.0], [0.0], [0.0], [0.0]],
        [[0.0], [2.0], [0.0], [0.0]],
        [[0.0], [0.0], [3.0], [0.0]],
    ]
    documents = [[[10.0], [0.0], [1.0]], [[0.0], [100.0], [10.0]], [[1.0], [0.0], [1000.0]]]
    document_mask = torch.tensor([[1.0, 1, 1], [1, 0, 1], [1, 1, 1]])
    query_mask = torch.tensor([[1.0, 1, 1, 1], [1, 1, 1, 1], [1, 1, 0, 1]])
    expected = torch.tensor(
        [[10.0, 10, 1000], [20, 20, 2000], [0, 0, 0]],
    )  # from PyLate's documentation
    arrays = [torch.tensor(side).numpy() for side in (queries, documents)]
    arrays[1].flags.writeable = False
    for a, b in ((queries, documents), arrays, (list(arrays[0]), list(arrays[1]))):
        assert torch.equal(pylate.colbert_scores(a, b, query_mask, document_mask), expected)
    masks = {"queries_mask": query_mask.numpy(), "documents_mask": document_mask.numpy()}
    assert torch.equal(pylate.colbert_scores(*arrays, **masks), expected)


def test_no_queries_empty_documents_and_nan_are_scored() -> None:
    queries, documents = torch.randn(2, 3, 8), torch.randn(4, 0, 8)
    assert pylate.colbert_scores(queries[:0], torch.randn(4, 5, 8)).shape == (0, 4)
    assert torch.equal(pylate.colbert_scores(queries, documents), torch.zeros(2, 4))
    queries, documents, query_mask, document_mask = masked("colbert_scores", "bool")
    documents[0, 8], document_mask[0, 8] = float("nan"), True
    assert pylate.colbert_scores(queries, documents, query_mask, document_mask)[:2, 0].isnan().all()
    document_mask[0, 8] = False  # a masked one is never read
    assert not pylate.colbert_scores(queries, documents, query_mask, document_mask).isnan().any()


def test_arguments_that_do_not_fit_are_named() -> None:
    queries, documents, query_mask, document_mask = masked("colbert_scores", "bool")
    query, doc = padded("maxsim_kd")
    scores, pairwise, every, kd = (
        pylate.colbert_scores,
        pylate.colbert_scores_pairwise,
        colpali.maxsim_inbatch,
        colpali.maxsim_kd,
    )
    cases: list[tuple[type[Exception], str, Callable[[], Tensor]]] = [
        (
            ValueError,
            r"documents_embeddings must have shape \[B, L, D\], got \[9, 16\]",
            lambda: scores(queries, documents[0]),
        ),
        (
            ValueError,
            r"documents_mask must have shape \[4, 9\].*got \[4, 8\]",
            lambda: scores(queries, documents, query_mask, document_mask[:, 1:]),
        ),
        (
            ValueError,
            r"backend must be None or one of 'auto'.*got 'flash'",
            lambda: scores(queries, documents, backend="flash"),
        ),
        (RuntimeError, "impl='triton'", lambda: scores(queries, documents, backend="triton")),
        (
            ValueError,
            "queries_embeddings must hold at least one sequence, got an empty list",
            lambda: pairwise([], documents),
        ),
        (
            ValueError,
            r"must hold sequences of shape \[L, D\], got one of shape \[16\]",
            lambda: pairwise(list(queries), list(documents[0])),
        ),
        (ValueError, "as many as queries", lambda: pairwise(queries, documents)),
        (
            ValueError,
            r"doc must have shape \[B, L, D\], got \[3, 2, 9, 16\]",
            lambda: every(query, doc),
        ),
        (
            ValueError,
            r"doc must have shape \[B, N, L, D\], got \[3, 9, 16\]",
            lambda: kd(query, doc[:, 0]),
        ),
        (TypeError, r"query must be a torch\.Tensor, got list", lambda: every([query], doc[:, 0])),
        (ValueError, "temperature must be a positive", lambda: every(query, doc[:, 0], tau=0.0)),
        (RuntimeError, "impl='triton'", lambda: every(query, doc[:, 0], impl="triton")),
    ]
    for error, message, call in cases:
        refused(error, message, call)


@pytest.mark.parametrize(
    ("module", "package", "requirement"),
    [(pylate, "pylate", "pylate>=1.6"), (colpali, "colpali_engine", "colpali-engine>=0.3.18")],
)
def test_without_the_package_its_acceleration_says_what_to_install(
    module: Any,
    package: str,
    requirement: str,
) -> None:
    if importlib.util.find_spec(package) is None:
        refused(ImportError, f'pip install "{requirement}"', module.accelerate)
    assert not module.is_accelerated()
    module.restore()
    refused(ValueError, "impl must be one of 'auto'", module.accelerate, impl="cuda")
