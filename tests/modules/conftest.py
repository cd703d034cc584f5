from __future__ import annotations

import pytest

from tests.modules.batches import tiny_masked_lm


@pytest.fixture(scope="session")
def tiny_lm(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_masked_lm(tmp_path_factory.mktemp("tiny-lm")))
