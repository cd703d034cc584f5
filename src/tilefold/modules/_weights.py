"""Loads a module with weights of its own, as ``Module.save_torch_weights`` wrote them."""

from __future__ import annotations

from typing import Any, TypeVar

__all__ = ["load_with_weights"]

M = TypeVar("M")
_WHERE = ("token", "cache_folder", "revision", "local_files_only")


def load_with_weights(cls: type[M], model_name_or_path: str, subfolder: str, kwargs: dict[str, Any]) -> M:
    """``cls`` from its saved options, with its saved weights."""
    module_class: Any = cls
    where = {"subfolder": subfolder} | {key: kwargs[key] for key in _WHERE if key in kwargs}
    made = module_class(**module_class.load_config(model_name_or_path, **where))
    loaded: M = module_class.load_torch_weights(model_name_or_path, **where, model=made)
    return loaded
