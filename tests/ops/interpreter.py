"""What Triton's interpreter needs of the packages around it."""

from __future__ import annotations

import importlib.metadata
import importlib.util

from tilefold.ops._shared._triton.releases import interpreter_breaks_with


def numpy_is_too_new() -> bool:
    """Whether interpreted loops would fail beside the numpy that is installed."""
    return importlib.util.find_spec("numpy") is not None and interpreter_breaks_with(
        importlib.metadata.version("numpy")
    )
