"""Modules for a ``SparseEncoder`` that sentence-transformers lacks, each with its own ``save`` and
``load``.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from tilefold._internal.lazy import lazy_exports

if TYPE_CHECKING:
    from sentence_transformers import SparseEncoder
    from torch import nn

_NAMES = {
    "echo": "EchoTransformer",
    "splate": "FrozenTransformer SplateHead",
    "epic_pooling": "EpicPooling",
    "fused_pooling": "FusedPooling",
    "head_pooling": "HeadPooling",
    "window": "LexicalWindow",
    "onnx_graph": "OnnxGraph",
    "prosper": "ProsperTransformer",
    "static_query": "StaticQuery",
    "token_weights": "TokenWeights",
}
__all__, __getattr__, __dir__ = lazy_exports(globals(), _NAMES)
__all__ += ["load_encoder", "to_stock"]


def module_classes() -> dict[str, type]:
    """Class path in ``modules.json`` -> class, for every module of this room."""
    from sentence_transformers.base.modules.module import Module

    public = (__getattr__(name) for names in _NAMES.values() for name in names.split())
    room = [made for made in public if isinstance(made, type) and issubclass(made, Module)]
    return {f"{made.__module__}.{made.__qualname__}": made for made in room}


def load_encoder(name_or_path: str, **kwargs: Any) -> SparseEncoder:
    """``SparseEncoder(name_or_path, **kwargs)`` that knows the modules of this room.

    sentence-transformers 6 imports a class of another package only with ``trust_remote_code=True``,
    which also lets a repository run code of its own; here, any other class than those needs the
    flag. A ``UserWarning`` for a model of :class:`EpicPooling` without ``max_active_dims``, whose
    vectors have all V terms.
    """
    from sentence_transformers import SparseEncoder

    from tilefold.modules.epic_pooling import EpicPooling

    model = SparseEncoder._load_with_module_classes(name_or_path, module_classes(), **kwargs)
    is_epic = any(isinstance(module, EpicPooling) for module in model.modules())
    if is_epic and model.max_active_dims is None:
        warnings.warn(
            f"{name_or_path}: expected max_active_dims of a model with EpicPooling, got none, so that "
            "each vector has a weight for every term. Releases of sentence-transformers before 6.2 did "
            "not save it: set it (1,000 in the paper) and save the model again.",
            stacklevel=2,
        )
    return model


def to_stock(model: nn.Module) -> int:
    """Replace modules in place by those of sentence-transformers that compute the same vectors; how
    many these are.

    A :class:`StaticQuery` becomes a frozen ``SparseStaticEmbedding`` if its vocabulary is the
    tokenizer's, and a :class:`HeadPooling` a ``SpladePooling`` if it has only options of that. Do
    this when training is over: a model in which nothing of this room is left loads without
    tilefold.

    Raises:
        ValueError: if the model is accelerated.
    """
    children = [(parent, *item) for parent in model.modules() for item in parent._modules.items()]
    stocks = [
        (*child, stock) for child in children if (stock := stock_module(child[2])) is not None
    ]
    for parent, name, child, stock in stocks:
        if "forward" in vars(child):
            raise ValueError(
                "model must not be accelerated, got one that is; call restore(model) first.",
            )
        parent._modules[name] = stock.train(child is not None and child.training)
    return len(stocks)


def stock_module(module: Any) -> nn.Module | None:
    """The stock module with the vectors of `module`, None if there is none."""
    from sentence_transformers.sparse_encoder.modules import SpladePooling

    from tilefold.modules.fused_pooling import STOCK_ACTIVATIONS
    from tilefold.modules.head_pooling import HeadPooling
    from tilefold.modules.static_query import StaticQuery

    if isinstance(module, StaticQuery) and module.fits_stock():
        made: nn.Module = module.stock()
        return made
    if not isinstance(module, HeadPooling) or module.pooling not in ("max", "sum"):
        return None
    activation = {ours: stock for stock, ours in STOCK_ACTIVATIONS.items()}.get(module.activation)
    if (
        module.logit_scale != 1
        or module.ignore_ids
        or module.top_k
        or module.normalize
        or activation is None
    ):
        return None
    pooling: nn.Module = SpladePooling(
        module.pooling,
        activation,
        embedding_dimension=module.embedding_dimension,
    )
    return pooling
