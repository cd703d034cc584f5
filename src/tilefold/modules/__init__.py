"""Modules for a ``SparseEncoder`` that sentence-transformers lacks, each with its own ``save`` and ``load``."""

from __future__ import annotations

from tilefold._lazy import lazy_exports

_HOME = {
    "EchoTransformer": "echo",
    "FrozenTransformer": "splate",
    "EpicPooling": "epic_pooling",
    "FusedPooling": "fused_pooling",
    "HeadPooling": "head_pooling",
    "LexicalWindow": "window",
    "ProsperTransformer": "prosper",
    "SplateHead": "splate",
    "StaticQuery": "static_query",
    "TokenWeights": "token_weights",
    "load_encoder": "loading",
    "to_stock": "loading",
}

__all__ = list(_HOME)
__getattr__, __dir__ = lazy_exports(globals(), _HOME)
