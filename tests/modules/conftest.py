from __future__ import annotations

import pytest

from tests.heap import small_heap  # noqa: F401 - for all files of this folder
from tests.modules.batches import tiny_masked_lm


@pytest.fixture(scope="session")
def tiny_lm(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_masked_lm(tmp_path_factory.mktemp("tiny-lm")))
