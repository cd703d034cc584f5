from __future__ import annotations

from pathlib import Path

import pytest

from tests.heap import small_heap
from tests.recipes.small import small_collection

__all__ = ["small_heap"]


@pytest.fixture(scope="session")
def beir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small collection in the layout of BEIR."""
    folder = tmp_path_factory.mktemp("data") / "small"
    small_collection().save_beir(folder)
    return folder
