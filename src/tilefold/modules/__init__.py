"""Modules for a ``SparseEncoder`` that sentence-transformers lacks."""

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
    """Return every module class of this package by its path in ``modules.json``."""
    from sentence_transformers.base.modules.module import Module

    classes: dict[str, type] = {}
    for names in _NAMES.values():
        for name in names.split():
            exported = __getattr__(name)
            if isinstance(exported, type) and issubclass(exported, Module):
                classes[f"{exported.__module__}.{exported.__qualname__}"] = exported
    return classes


def load_encoder(name_or_path: str, **kwargs: Any) -> SparseEncoder:
    """Load a ``SparseEncoder`` that may contain modules of this package.

    sentence-transformers 6 imports a class of another package only with ``trust_remote_code=True``,
    which also lets a repository run its own code. This function allows the classes of this package
    without the flag. All other classes still need it.

    Args:
        name_or_path: the checkpoint.
        kwargs: other arguments of ``SparseEncoder``.

    Warns:
        UserWarning: if a model has :class:`EpicPooling` but no ``max_active_dims``. Its
            vectors have a weight for every term of the vocabulary.

    Examples:
        >>> from sentence_transformers import SparseEncoder
        >>> from sentence_transformers.sparse_encoder.modules import MLMTransformer
        >>> from tilefold.modules import HeadPooling
        >>> network = MLMTransformer("masked-lm")
        >>> SparseEncoder(modules=[network, HeadPooling("sum")], device="cpu").save("sum-model")
        >>> load_encoder("sum-model", device="cpu")[1].pooling
        'sum'
    """
    from sentence_transformers import SparseEncoder

    from tilefold._internal.arguments import path_of
    from tilefold.modules.epic_pooling import EpicPooling

    path_of("name_or_path", name_or_path)  # raises an error unless it is a name or a path
    model = SparseEncoder._load_with_module_classes(name_or_path, module_classes(), **kwargs)
    is_epic = any(isinstance(module, EpicPooling) for module in model.modules())
    if is_epic and model.max_active_dims is None:
        warnings.warn(
            f"{name_or_path}: the model has EpicPooling but no max_active_dims, so its vectors "
            "have a weight for every term. sentence-transformers did not save it before 6.2: set "
            "it (1,000 in the paper) and save the model again.",
            stacklevel=2,
        )
    return model


def to_stock(model: nn.Module) -> int:
    """Replace modules in place by those of sentence-transformers that compute the same vectors.

    A :class:`StaticQuery` becomes a frozen ``SparseStaticEmbedding`` if its vocabulary is the
    tokenizer's. A :class:`HeadPooling` becomes a ``SpladePooling`` if that supports its options. Do
    this when training is over: a model without modules of this package loads without tilefold.

    Args:
        model: a loaded model, changed in place.

    Returns:
        The number of modules that were replaced.

    Raises:
        TypeError: if it is not a loaded model.
        ValueError: if the model is accelerated.
    """
    if not callable(getattr(model, "modules", None)) or isinstance(model, type):
        raise TypeError(
            f"model must be a loaded model, got {type(model).__name__}; pass "
            "load_encoder(name_or_path).",
        )
    n_replaced = 0
    # a list, because children are replaced during the loop
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if child is None:
                continue
            stock = stock_module(child)
            if stock is None:
                continue
            if "forward" in vars(child):  # accelerate replaces the method of the instance
                raise ValueError(
                    "model must not be accelerated, got one that is; call restore(model) first.",
                )
            parent._modules[name] = stock.train(child.training)
            n_replaced += 1
    return n_replaced


def stock_module(module: Any) -> nn.Module | None:
    """Return a module of sentence-transformers that computes the same vectors as a module of ours.

    Args:
        module: any module.

    Returns:
        A frozen ``SparseStaticEmbedding`` for a :class:`StaticQuery`, a ``SpladePooling`` for a
        :class:`HeadPooling`; ``None`` for other modules, and if these classes lack an option.
    """
    from sentence_transformers.sparse_encoder.modules import SpladePooling

    from tilefold.modules.fused_pooling import STOCK_NAMES
    from tilefold.modules.head_pooling import HeadPooling
    from tilefold.modules.static_query import StaticQuery

    if isinstance(module, StaticQuery) and module.fits_stock():
        embedding: nn.Module = module.stock()
        return embedding
    if not isinstance(module, HeadPooling) or module.pooling not in ("max", "sum"):
        return None
    activation = STOCK_NAMES.get(module.activation)
    has_other_options = (
        module.logit_scale != 1 or module.ignore_ids or module.top_k or module.normalize
    )
    if activation is None or has_other_options:
        return None
    pooling: nn.Module = SpladePooling(
        module.pooling,
        activation,
        embedding_dimension=module.embedding_dimension,
    )
    return pooling
