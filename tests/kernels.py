"""What of Triton is here, its release, and whether its interpreter runs, for tests of all rooms."""

from __future__ import annotations

import importlib.metadata
import importlib.util

import pytest

from tilefold.ops._shared._triton.releases import release
from tilefold.ops._shared.impl import triton_installed, triton_interpreted

__all__ = ["NEEDS_INTERPRETER", "release", "triton_installed", "triton_interpreted"]


def numpy_is_too_new() -> bool:
    """Whether interpreted loops fail beside this numpy: 2.4 converts no array of one element to a
    number.
    """
    if importlib.util.find_spec("numpy") is None or not (0, 0) < release() <= (3, 6):
        return False
    return tuple(map(int, importlib.metadata.version("numpy").split(".")[:2])) >= (2, 4)


NEEDS_INTERPRETER = [
    pytest.mark.skipif(not triton_installed(), reason="triton is not installed"),
    pytest.mark.skipif(triton_interpreted(), reason="this is the interpreted run"),
    pytest.mark.skipif(
        numpy_is_too_new(),
        reason="Triton 3.6 and older interpret loops with what numpy 2.4 removed",
    ),
]
