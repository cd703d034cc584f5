"""Loads a SparseEncoder that holds modules of this room, without trusting any other code."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sentence_transformers import SparseEncoder

__all__ = ["load_encoder", "module_classes"]


def module_classes() -> dict[str, type]:
    """Class path in ``modules.json`` -> class, for every module of this room."""
    from sentence_transformers.base.modules.module import Module

    from tilefold import modules

    public = (getattr(modules, name) for name in modules.__all__)
    room = [made for made in public if isinstance(made, type) and issubclass(made, Module)]
    return {f"{made.__module__}.{made.__qualname__}": made for made in room}


def load_encoder(name_or_path: str, **kwargs: Any) -> SparseEncoder:
    """``SparseEncoder(name_or_path, **kwargs)`` that knows the modules of this room.

    sentence-transformers 6 imports a class outside of its own package only with ``trust_remote_code=True``, even one of
    an installed package, and that flag also lets a repository run code of its own. Here the classes of this room are
    handed over, and any other one still needs the flag. Models of stock modules load as ever.
    """
    from sentence_transformers import SparseEncoder

    return SparseEncoder._load_with_module_classes(name_or_path, module_classes(), **kwargs)
