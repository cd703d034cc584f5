"""PyLate's scoring functions equal PyLate's formula, its masks included; tests/peers compares with the real package."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tilefold.integrations import pylate

# fp32: both sides add 16 products in another order, and up to 9 maxima or gradients of them
BUDGET = 1e-5
MASKS = ["none", "bool", "int64", "float32", "weights"]
NAMES = ["colbert_scores", "colbert_kd_scores", "ColBERTScores"]


def oracle(name: str, queries: Tensor, documents: Tensor, query_mask: Any = None, document_mask: Any = None) -> Tensor:
    """What PyLate 1.6 computes with its torch backend, in one formula: masks multiply before the maximum."""
    if name == "colbert_kd_scores":
        sims = torch.einsum("ash,abth->abst", queries, documents)
        document_mask = None if document_mask is None else document_mask[:, :, None]
    else:
        documents = documents.flatten(0, -3) if name == "ColBERTScores" else documents
        sims = torch.einsum("ash,bth->abst", queries, documents)
        document_mask = None if document_mask is None else document_mask.reshape(1, len(documents), 1, -1)
    if query_mask is not None:
        sims = sims * query_mask[:, None, :, None]
    if document_mask is not None:
        sims = sims * document_mask
    return sims.amax(dim=-1).sum(dim=-1)


def function(name: str) -> Callable[..., Tensor]:
    found = getattr(pylate, name)
    return found() if name == "ColBERTScores" else found


def problem(name: str, masks: str, dtype: torch.dtype = torch.float32, device: str = "cpu") -> list[Any]:
    """Mostly negative similarities, so that a masked token often wins; holes, left padding, rows without a token."""
    generator = torch.Generator().manual_seed(0)
    outer = (4,) if name == "colbert_scores" else (3, 2)
    queries = torch.randn(3, 5, 16, generator=generator) - 0.3
    documents = torch.randn(*outer, 9, 16, generator=generator) + 0.3
    if masks == "none":
        return [queries.to(device, dtype), documents.to(device, dtype), None, None]
    query_mask = torch.rand(3, 5, generator=generator) < 0.7
    document_mask = torch.rand(*outer, 9, generator=generator) < 0.6
    query_mask[2] = False
    document_mask[1] = False
    document_mask[0, ..., :4] = False
    sides = [queries.to(dtype), documents.to(dtype)]
    if masks == "weights":
        weights = [torch.randn(m.shape, generator=generator) * m for m in (query_mask, document_mask)]
    else:
        weights = [m.to(getattr(torch, masks)) for m in (query_mask, document_mask)]
    return [part.to(device) for part in (*sides, *weights)]


def results(score: Callable[..., Tensor], arguments: list[Any], **options: Any) -> list[Tensor]:
    leaves = [part.detach().clone().requires_grad_() for part in arguments[:2]]
    scores = score(*leaves, *arguments[2:], **options)
    weights = torch.rand(scores.shape, generator=torch.Generator().manual_seed(1)).to(scores)
    return [scores.detach(), *torch.autograd.grad(scores, leaves, weights)]


def assert_equal(found: list[Tensor], expected: list[Tensor], budget: float = BUDGET) -> None:
    for mine, truth in zip(found, expected, strict=True):
        assert mine.shape == truth.shape
        error, allowed = (mine - truth).abs().max().item(), budget * truth.abs().max().clamp(min=1).item()
        assert error <= allowed, f"error {error:.2e}, allowed {allowed:.2e}"


@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.parametrize("name", NAMES)
def test_scores_and_gradients_equal_the_formula(name: str, masks: str) -> None:
    arguments = problem(name, masks)
    expected = results(lambda *a: oracle(name, *a), arguments)
    assert_equal(results(function(name), arguments), expected)
    for backend in ("auto", "torch", "tiled"):
        assert_equal(results(function(name), arguments, backend=backend), expected)


@pytest.mark.parametrize("name", NAMES)
def test_a_document_without_an_unmasked_token_scores_zero_without_a_gradient(name: str) -> None:
    arguments = problem(name, "bool")
    scores, _, documents = results(function(name), arguments)
    columns = [1] if name == "colbert_scores" else [2, 3]
    empty = scores[1] if name == "colbert_kd_scores" else scores[:, columns]
    assert not empty.any() and not documents[1].any() and scores[:2].any()


def test_a_masked_token_wins_where_every_other_similarity_is_negative() -> None:
    queries, documents = torch.ones(1, 1, 8), -torch.ones(1, 2, 8)
    mask = torch.tensor([[True, False]])
    assert pylate.colbert_scores(queries, documents).item() == -8
    assert pylate.colbert_scores(queries, documents, None, mask).item() == 0


@pytest.mark.parametrize("name", NAMES)
def test_a_floating_mask_is_differentiated(name: str) -> None:
    arguments = problem(name, "weights", torch.float64)
    masks = [mask.double().requires_grad_() for mask in arguments[2:]]
    found = torch.autograd.grad(function(name)(*arguments[:2], *masks).square().sum(), masks)
    expected = torch.autograd.grad(oracle(name, *arguments[:2], *masks).square().sum(), masks)
    for mine, truth, mask in zip(found, expected, masks, strict=True):
        torch.testing.assert_close(mine[mask != 0], truth[mask != 0])  # at 0 similarities tie


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_scores_are_fp32_from_half_precision_and_fp64_from_fp64(name: str, dtype: torch.dtype) -> None:
    arguments = problem(name, "bool", dtype)
    scores = function(name)(*arguments)
    assert scores.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert_equal([scores.double()], [oracle(name, *(part.double() for part in arguments))])


def test_the_pairwise_form_is_differentiable_and_takes_sequences_of_any_length() -> None:
    generator = torch.Generator().manual_seed(0)
    queries = [torch.randn(n, 16, generator=generator, requires_grad=True) for n in (3, 1, 5)]
    documents = [torch.randn(n, 16, generator=generator, requires_grad=True) for n in (7, 2, 9)]
    scores = pylate.colbert_scores_pairwise(queries, documents)
    expected = torch.stack([(q @ d.T).amax(dim=-1).sum() for q, d in zip(queries, documents, strict=True)])
    assert_equal([scores], [expected])
    weights = torch.tensor([1.0, -2.0, 0.5])
    found = torch.autograd.grad(scores, [*queries, *documents], weights)
    assert_equal(list(found), list(torch.autograd.grad(expected, [*queries, *documents], weights)))
    arrays = [[item.detach().numpy() for item in side] for side in (queries, documents)]
    assert_equal([pylate.colbert_scores_pairwise(*arrays)], [expected])
    padded = torch.nn.utils.rnn.pad_sequence(documents, batch_first=True)  # rows of zeros take part
    mixed = pylate.colbert_scores_pairwise(queries, padded)
    assert_equal([mixed], [torch.stack([(q @ d.T).amax(-1).sum() for q, d in zip(queries, padded, strict=True)])])


def test_lists_and_arrays_are_taken_as_pylate_takes_them() -> None:
    queries = [[[1.0], [0.0], [0.0], [0.0]], [[0.0], [2.0], [0.0], [0.0]], [[0.0], [0.0], [3.0], [0.0]]]
    documents = [[[10.0], [0.0], [1.0]], [[0.0], [100.0], [10.0]], [[1.0], [0.0], [1000.0]]]
    document_mask = torch.tensor([[1.0, 1, 1], [1, 0, 1], [1, 1, 1]])
    query_mask = torch.tensor([[1.0, 1, 1, 1], [1, 1, 1, 1], [1, 1, 0, 1]])
    expected = torch.tensor([[10.0, 10, 1000], [20, 20, 2000], [0, 0, 0]])  # from PyLate's documentation
    assert torch.equal(pylate.colbert_scores(queries, documents, query_mask, document_mask), expected)
    arrays = [torch.tensor(side).numpy() for side in (queries, documents)]
    arrays[1].flags.writeable = False
    masks = {"queries_mask": query_mask.numpy(), "documents_mask": document_mask.numpy()}
    assert torch.equal(pylate.colbert_scores(*arrays, **masks), expected)
    assert torch.equal(pylate.colbert_scores(list(arrays[0]), list(arrays[1]), query_mask, document_mask), expected)


def test_no_queries_and_documents_without_a_place_for_a_token_are_scored() -> None:
    queries, documents = torch.randn(2, 3, 8), torch.randn(4, 0, 8)
    assert pylate.colbert_scores(queries[:0], torch.randn(4, 5, 8)).shape == (0, 4)
    assert torch.equal(pylate.colbert_scores(queries, documents), torch.zeros(2, 4))


def test_a_nan_of_an_unmasked_token_is_not_hidden_and_a_masked_one_is_never_read() -> None:
    queries, documents, query_mask, document_mask = problem("colbert_scores", "bool")
    documents[0, 8], document_mask[0, 8] = float("nan"), True
    assert pylate.colbert_scores(queries, documents, query_mask, document_mask)[:2, 0].isnan().all()
    document_mask[0, 8] = False
    assert not pylate.colbert_scores(queries, documents, query_mask, document_mask).isnan().any()


def test_arguments_that_do_not_fit_are_named() -> None:
    queries, documents, query_mask, document_mask = problem("colbert_scores", "bool")
    with pytest.raises(ValueError, match=r"documents_embeddings must have shape \[B, L, D\], got \[9, 16\]"):
        pylate.colbert_scores(queries, documents[0])
    with pytest.raises(ValueError, match=r"documents_mask must have shape \[4, 9\].*got \[4, 8\]"):
        pylate.colbert_scores(queries, documents, query_mask, document_mask[:, 1:])
    with pytest.raises(ValueError, match=r"backend must be None or one of 'auto'.*got 'flash'"):
        pylate.colbert_scores(queries, documents, backend="flash")
    with pytest.raises(ValueError, match="queries_embeddings must hold at least one sequence, got an empty list"):
        pylate.colbert_scores_pairwise([], documents)
    with pytest.raises(ValueError, match=r"must hold sequences of shape \[L, D\], got one of shape \[16\]"):
        pylate.colbert_scores_pairwise(list(queries), list(documents[0]))
    with pytest.raises(ValueError, match="as many as queries"):
        pylate.colbert_scores_pairwise(queries, documents)
    with pytest.raises(RuntimeError, match="impl='triton'"):
        pylate.colbert_scores(queries, documents, backend="triton")


def test_without_pylate_its_acceleration_says_what_to_install() -> None:
    try:
        import pylate as real  # noqa: F401
    except ImportError:
        with pytest.raises(ImportError, match=r'pip install "pylate>=1.6"'):
            pylate.accelerate()
    assert not pylate.is_accelerated()
    pylate.restore()
    with pytest.raises(ValueError, match="impl must be one of 'auto'"):
        pylate.accelerate(impl="cuda")


@pytest.mark.parametrize("name", NAMES)
def test_the_functions_compile_whole(name: str) -> None:
    torch._dynamo.reset()
    arguments = problem(name, "bool")
    compiled = torch.compile(function(name), fullgraph=True, backend="aot_eager")
    assert_equal(results(compiled, arguments), results(function(name), arguments))


@pytest.mark.gpu
@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.parametrize("name", NAMES)
def test_on_a_gpu_scores_and_gradients_equal_the_formula(name: str, masks: str) -> None:
    expected = results(lambda *a: oracle(name, *a), problem(name, masks))
    found = results(function(name), problem(name, masks, device="cuda"))
    assert_equal([part.cpu() for part in found], expected, 1e-4)
