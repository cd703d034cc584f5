"""Quick collections of garbage, for the tests of what collects it at every turn: benchmarks, and trainers of models."""

from __future__ import annotations

import gc

import pytest


@pytest.fixture(scope="module", autouse=True)
def small_heap() -> None:
    """What was imported and made before a file need not be looked at by each of its collections, half a second long."""
    gc.collect()
    gc.freeze()
