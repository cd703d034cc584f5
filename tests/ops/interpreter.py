"""What Triton's interpreter needs of the packages around it."""

from __future__ import annotations

import importlib.metadata
import importlib.util


def numpy_is_too_new() -> bool:
    """Whether interpreted loops would fail: Triton 3.6 and older convert arrays as numpy 2.4 no longer does."""
    numpy, triton = (
        tuple(map(int, importlib.metadata.version(name).split(".")[:2])) if importlib.util.find_spec(name) else (0, 0)
        for name in ("numpy", "triton")
    )
    return numpy >= (2, 4) and triton <= (3, 6)
