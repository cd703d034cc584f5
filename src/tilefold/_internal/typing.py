"""Names for annotations of other libraries' objects, which are not imported at run time."""

from __future__ import annotations

from typing import TYPE_CHECKING

__all__ = [
    "Model",
    "Module",
    "MultiVectorEncoder",
    "Network",
    "SentenceTransformer",
    "SparseEncoder",
    "Tensor",
    "Tokenizer",
    "Transformer",
]

if TYPE_CHECKING:
    from sentence_transformers import MultiVectorEncoder, SentenceTransformer, SparseEncoder
    from sentence_transformers.base.modules import Module, Transformer
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    Model = SparseEncoder | MultiVectorEncoder | SentenceTransformer
    Network = PreTrainedModel
    Tokenizer = PreTrainedTokenizerBase
else:
    Model = Module = Network = Tensor = Tokenizer = Transformer = object
    MultiVectorEncoder = SentenceTransformer = SparseEncoder = object
