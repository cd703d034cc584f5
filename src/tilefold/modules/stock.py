"""Trained modules of this room as stock ones with the same vectors, where there are such."""

from __future__ import annotations

from typing import Any

from sentence_transformers.sparse_encoder.modules import SpladePooling
from torch import nn

from tilefold.modules.activation import STOCK_ACTIVATIONS
from tilefold.modules.head_pooling import HeadPooling
from tilefold.modules.static_query import StaticQuery

__all__ = ["stock_module", "to_stock"]


def to_stock(model: nn.Module) -> int:
    """Replace modules in place by those of sentence-transformers that compute the same vectors.

    A :class:`StaticQuery` becomes a frozen ``SparseStaticEmbedding`` if its vocabulary is the tokenizer's, and a
    :class:`HeadPooling` a ``SpladePooling`` if it has only options of that. Do this when training is over: a model in
    which nothing of this room is left loads without tilefold.

    Returns:
        How many were replaced.

    Raises:
        ValueError: if the model is accelerated.
    """
    replaced = 0
    for parent in model.modules():
        for name, child in list(parent._modules.items()):
            stock = stock_module(child)
            if stock is None or child is None:
                continue
            if "forward" in vars(child):
                raise ValueError("model must not be accelerated, got one that is; call restore(model) first.")
            parent._modules[name] = stock.train(child.training)
            replaced += 1
    return replaced


def stock_module(module: Any) -> nn.Module | None:
    """The stock module with the vectors of `module`, None if there is none."""
    if isinstance(module, StaticQuery) and len(module.tokenizer.get_vocab()) == module.vocab_size:
        made: nn.Module = module.stock()
        made.max_seq_length = module.max_seq_length
        return made
    if not isinstance(module, HeadPooling) or module.pooling not in ("max", "sum"):
        return None
    extras = (module.logit_scale != 1, module.ignore_ids, module.top_k, module.normalize)
    activation = {ours: stock for stock, ours in STOCK_ACTIVATIONS.items()}.get(module.activation)
    if any(extras) or activation is None:
        return None
    pooling: nn.Module = SpladePooling(module.pooling, activation, embedding_dimension=module.embedding_dimension)
    return pooling
