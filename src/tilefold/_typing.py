"""Names of other libraries' objects in annotations, without an import of these libraries at run time."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sentence_transformers import MultiVectorEncoder, SentenceTransformer, SparseEncoder
    from transformers import PreTrainedTokenizerBase

    Model = SparseEncoder | MultiVectorEncoder | SentenceTransformer
    Tokenizer = PreTrainedTokenizerBase
else:
    Model = Tokenizer = object
