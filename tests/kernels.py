"""What of Triton is here, its release, and whether its interpreter runs, for tests of all rooms."""

from __future__ import annotations

import importlib.metadata
import importlib.util

import pytest

from tilefold.ops._shared._triton.releases import interpreter_breaks_with, release
from tilefold.ops._shared.impl import triton_installed, triton_interpreted

__all__ = ["NEEDS_INTERPRETER", "release", "triton_installed", "triton_interpreted"]


def numpy_is_too_new() -> bool:
    """Whether interpreted loops would fail beside the numpy that is installed."""
    return importlib.util.find_spec("numpy") is not None and interpreter_breaks_with(
        importlib.metadata.version("numpy")
    )


NEEDS_INTERPRETER = [
    pytest.mark.skipif(not triton_installed(), reason="triton is not installed"),
    pytest.mark.skipif(triton_interpreted(), reason="this is the interpreted run"),
    pytest.mark.skipif(numpy_is_too_new(), reason="Triton 3.6 and older interpret loops with what numpy 2.4 removed"),
]
